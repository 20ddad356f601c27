"""Tiny random checkpoints, computed by us and, side by side, by transformers in float32."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from ksana.models.load import read_spec
from ksana.models.loader import load_model
from ksana.models.rope import inverse_frequencies
from ksana.models.spec import RopeSpec
from tests.models.paged_driver import PagedDriver
from tests.models.references import read_reference
from tests.models_for_tests import gemma3_gguf, smollm2_gguf
from tests.tiny_models import VOCAB_SIZE, gemma3_config, llama_config, write_directory, write_gguf

TOLERANCE = 1e-4
NUM_TOKENS = 150
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
LINEAR_ROPE = {"rope_type": "linear", "factor": 4.0}
MIXED_LAYERS = ["full_attention", *["sliding_attention"] * 4, "full_attention"]

CASES: dict[str, tuple[dict[str, Any], bool]] = {
    "llama tied": (llama_config(), False),
    "llama untied": (llama_config(tied=False), True),
    "llama tied, another head stored": (llama_config(), True),
    "llama biases": (llama_config(attention_bias=True, mlp_bias=True), False),
    "llama own head size": (llama_config(head_dim=32, num_key_value_heads=4), False),
    "llama3 rope": (llama_config(rope_scaling=LLAMA3_ROPE, rope_theta=500000.0), False),
    "llama3 rope, new spelling": (
        llama_config(rope_parameters={"rope_theta": 500000.0, **LLAMA3_ROPE}, rope_theta=None),
        False,
    ),
    "llama linear rope": (llama_config(rope_scaling=LINEAR_ROPE), False),
    "gemma3": (gemma3_config(), False),
    "gemma3 linear rope": (gemma3_config(rope_scaling=LINEAR_ROPE), False),
    "gemma3 layer types": (gemma3_config(layer_types=MIXED_LAYERS, query_pre_attn_scalar=48), False),
    "gemma3 untied": (gemma3_config(tie_word_embeddings=False), True),
}


def in_gguf(config: dict[str, Any]) -> bool:
    """Whether a GGUF file can say all that this configuration does."""
    return "layer_types" not in config


def random_ids() -> list[int]:
    return torch.randint(VOCAB_SIZE, (NUM_TOKENS,), generator=torch.Generator().manual_seed(3)).tolist()


def reference_logits(directory: Path, ids: list[int]) -> Tensor:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(
        directory, dtype=torch.float32, attn_implementation="eager", local_files_only=True
    )
    with torch.inference_mode():
        return model(torch.tensor([ids])).logits[0]


@pytest.mark.parametrize("name", CASES)
def test_logits(tmp_path: Path, name: str) -> None:
    config, with_head = CASES[name]
    config = {key: value for key, value in config.items() if value is not None}
    directory = write_directory(tmp_path, config, with_head=with_head)
    ids = random_ids()
    expected = reference_logits(directory, ids)
    ours = PagedDriver(load_model(directory), 1, NUM_TOKENS).all_logits(ids, 40)
    assert expected.std() > 0.3
    assert (ours - expected).abs().max() <= TOLERANCE


@pytest.mark.parametrize("name", [name for name, (config, _) in CASES.items() if in_gguf(config)])
def test_gguf_logits(tmp_path: Path, name: str) -> None:
    config, with_head = CASES[name]
    path = write_gguf(tmp_path / "tiny.gguf", config, tmp_path / "config", with_head=with_head)
    ids = random_ids()
    config = {key: value for key, value in config.items() if value is not None}
    expected = reference_logits(write_directory(tmp_path / "hf", config, with_head=with_head), ids)
    ours = PagedDriver(load_model(path), 1, NUM_TOKENS).all_logits(ids, 40)
    assert (ours - expected).abs().max() <= TOLERANCE


@pytest.mark.parametrize("window", [31, 33])
def test_a_window_off_by_one_is_noticed(tmp_path: Path, window: int) -> None:
    directory = write_directory(tmp_path, gemma3_config(), with_head=False)
    ids = random_ids()
    expected = reference_logits(directory, ids)
    model = load_model(directory)
    for layer in model.layers:
        if layer.attention.is_sliding:
            layer.attention.window = window
    ours = PagedDriver(model, 1, NUM_TOKENS).all_logits(ids, 40)
    assert (ours - expected).abs().max() > 100 * TOLERANCE


def test_llama3_frequencies_are_transformers(tmp_path: Path) -> None:
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    scaling = LLAMA3_ROPE | {"original_max_position_embeddings": 8192, "factor": 32.0}
    config = llama_config(rope_scaling=scaling, rope_theta=500000.0, head_dim=128, hidden_size=512)
    write_directory(tmp_path, config, with_head=False)
    expected, _ = ROPE_INIT_FUNCTIONS["llama3"](LlamaConfig.from_pretrained(tmp_path), "cpu")
    rope = read_spec(tmp_path).rope
    ours = inverse_frequencies(rope, 128)
    torch.testing.assert_close(ours, expected, rtol=1e-6, atol=0)

    plain = inverse_frequencies(RopeSpec(theta=500000.0), 128)
    factors = tuple((plain / ours).tolist())  # what a GGUF file carries as rope_freqs.weight
    from_factors = inverse_frequencies(RopeSpec(theta=500000.0, freq_factors=factors), 128)
    torch.testing.assert_close(from_factors, expected, rtol=1e-6, atol=0)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["smollm2", "gemma3"])
def test_every_logit_of_real_models(name: str) -> None:
    """The long text of the kept references, all positions, the whole vocabulary."""
    from transformers import AutoModelForCausalLM

    path = {"smollm2": smollm2_gguf, "gemma3": gemma3_gguf}[name]()
    ids = read_reference(name).long_ids
    model = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32)
    with torch.inference_mode():
        hidden = model.model(torch.tensor([ids]), use_cache=False).last_hidden_state[0]
    driver = PagedDriver(load_model(path, max_positions=2048), 1, len(ids))
    largest = 0.0
    for start in range(0, len(ids), 250):
        ours = driver.step({0: ids[start : start + 250]}, logits_of_all=True)
        with torch.inference_mode():
            expected = model.lm_head(hidden[start : start + 250])
        largest = max(largest, float((ours - expected).abs().max()))
    print(f"{name}: largest difference of a logit {largest:.1e}")
    assert largest <= 1e-3
