"""Specs from configurations: every spelling, what is derived, and what is refused."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest

from ksana.errors import ModelLoadError
from ksana.models.load import read_spec
from ksana.models.spec import RopeSpec
from ksana.models.tensors import num_parameters
from tests.models_for_tests import tiny_gemma3_gguf, tiny_llama_gguf
from tests.tiny_models import gemma3_config, llama_config, write_gguf

LLAMA3_SCALING = {
    "factor": 32.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 512,
}
LLAMA3 = RopeSpec(
    theta=500000.0,
    kind="llama3",
    factor=32.0,
    low_freq_factor=1.0,
    high_freq_factor=4.0,
    original_max_position=512,
)


def spec_of(tmp_path: Path, config: dict[str, Any]) -> Any:
    (tmp_path / "config.json").write_text(json.dumps(config))
    return read_spec(tmp_path)


def test_llama_sizes(tmp_path: Path) -> None:
    spec = spec_of(tmp_path, llama_config(eos_token_id=[1, 5], head_dim=None))
    assert (spec.num_layers, spec.num_heads, spec.num_kv_heads, spec.head_dim) == (3, 4, 2, 16)
    assert spec.attention_scale == 0.25
    assert spec.eos_token_ids == (1, 5)
    assert spec.bos_token_id == 2
    assert spec.layer_kinds == ("full",) * 3
    assert spec.name == tmp_path.name
    assert spec_of(tmp_path, llama_config(head_dim=32)).head_dim == 32
    assert spec_of(tmp_path, llama_config(num_key_value_heads=None)).num_kv_heads == 4
    untied = llama_config()
    del untied["tie_word_embeddings"]
    assert not spec_of(tmp_path, untied).tie_word_embeddings


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, RopeSpec(theta=10000.0)),
        ({"rope_theta": None}, RopeSpec(theta=10000.0)),
        ({"rope_scaling": None, "rope_theta": 1e6}, RopeSpec(theta=1e6)),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, RopeSpec(theta=1e4, kind="linear", factor=2.0)),
        ({"rope_scaling": {"rope_type": "default"}}, RopeSpec(theta=1e4)),
        ({"rope_theta": 500000.0, "rope_scaling": {"rope_type": "llama3", **LLAMA3_SCALING}}, LLAMA3),
        ({"rope_theta": 500000.0, "rope_scaling": {"type": "llama3", **LLAMA3_SCALING}}, LLAMA3),
        (
            {"rope_parameters": {"rope_type": "llama3", "rope_theta": 500000.0, **LLAMA3_SCALING}},
            LLAMA3,
        ),
        ({"rope_theta": None, "rope_parameters": {"rope_theta": 77.0}}, RopeSpec(theta=77.0)),
        ({"rope_parameters": {"full_attention": {"rope_theta": 99.0}}}, RopeSpec(theta=99.0)),
        ({"rope_scaling": {}, "rope_parameters": {"rope_theta": 77.0}}, RopeSpec(theta=77.0)),
        ({"rope_scaling": {}, "rope_theta": 5e5}, RopeSpec(theta=5e5)),
        ({"rope_scaling": {}, "rope_parameters": {}, "rope_theta": None}, RopeSpec(theta=1e4)),
        (
            {"rope_scaling": {"type": "linear", "factor": 2.0}, "rope_parameters": {"rope_theta": 77.0}},
            RopeSpec(theta=77.0, kind="linear", factor=2.0),
        ),
        (
            {"rope_scaling": {}, "rope_parameters": {"full_attention": {"rope_theta": 99.0}}},
            RopeSpec(theta=99.0),
        ),
        (
            {
                "rope_scaling": {
                    "rope_type": "llama3",
                    **LLAMA3_SCALING,
                    "original_max_position_embeddings": None,
                },
                "rope_theta": 500000.0,
                "original_max_position_embeddings": LLAMA3_SCALING["original_max_position_embeddings"],
            },
            LLAMA3,
        ),
    ],
)
def test_llama_rope_spellings(tmp_path: Path, changes: dict[str, Any], expected: RopeSpec) -> None:
    assert spec_of(tmp_path, llama_config(**changes)).rope == expected


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "'dynamic'; supported are default, linear"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 2.0}}, "rope_scaling: rope_type is 'yarn'"),
        ({"rope_parameters": {"rope_type": "longrope"}}, "rope_parameters: rope_type is 'longrope'"),
        ({"rope_scaling": {"type": "linear"}}, "rope_scaling: factor is missing"),
        ({"rope_scaling": {"type": "linear", "factor": 0}}, "factor is 0, not a finite number above 0"),
        ({"rope_scaling": {"type": "llama3", "factor": 8}}, "low_freq_factor is missing"),
        ({"rope_scaling": {"type": "llama3", **LLAMA3_SCALING, "high_freq_factor": 1.0}}, "not above low"),
        ({"rope_scaling": "linear"}, "rope_scaling is 'linear', not an object"),
        (
            {"rope_scaling": {"type": "linear", "factor": 2.0}, "rope_parameters": {"rope_type": "default"}},
            "rope_scaling: rope_type is 'linear', but 'default' in",
        ),
        (
            {"rope_scaling": {"rope_theta": 5.0}, "rope_parameters": {"rope_theta": 7.0}},
            r"rope_scaling: rope_theta is 5\.0, but 7\.0 in .*rope_parameters",
        ),
        ({"rope_parameters": {"sliding_attention": {"rope_theta": 9.0}}}, "has no full_attention"),
        ({"rope_theta": "1e4"}, "rope_theta is '1e4', not a number"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5: .* not built"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu': only silu"),
        ({"num_hidden_layers": 0}, "num_hidden_layers is 0, not an integer from 1"),
        ({"num_hidden_layers": 10**12}, "num_hidden_layers is 1000000000000"),
        ({"vocab_size": None}, "vocab_size is missing"),
        ({"vocab_size": True}, "vocab_size is True"),
        ({"hidden_size": 65}, "hidden_size is 65, not a multiple of the 4"),
        ({"num_key_value_heads": 3}, "4 heads are no multiple of 3 KV heads"),
        ({"head_dim": 15}, "head size 15 is not built"),
        ({"eos_token_id": 320}, "special token 320 is not in the vocabulary of 320"),
        ({"eos_token_id": [1, "2"]}, "eos_token_id holds '2'"),
        ({"rms_norm_eps": float("nan")}, "not a JSON object|not a finite number"),
        ({"architectures": ["GPT2LMHeadModel"]}, r"architecture \['GPT2LMHeadModel'\] is not supported"),
        ({"architectures": None}, "architectures must list"),
        ({"quantization_config": {"quant_method": "gptq"}}, "quantized safetensors are not read"),
    ],
)
def test_llama_refusals(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelLoadError, match=message) as raised:
        spec_of(tmp_path, llama_config(**changes))
    assert str(tmp_path) in str(raised.value)


def test_gemma3_layers_and_ropes(tmp_path: Path) -> None:
    spec = spec_of(tmp_path, gemma3_config())
    assert spec.layer_kinds == ("sliding",) * 5 + ("full",)
    assert (spec.num_full_layers, spec.num_sliding_layers) == (1, 5)
    assert spec.rope == RopeSpec(theta=1e6)
    assert spec.rope_local == RopeSpec(theta=1e4)
    assert spec.embedding_scale == 8.0
    assert spec.attention_scale == 32**-0.5
    assert spec.kv_bytes_per_token("sliding", 4) == 2 * 5 * 1 * 32 * 4


@pytest.mark.parametrize(
    ("changes", "kinds"),
    [
        ({"sliding_window_pattern": 2}, "sfsfsf"),
        ({"sliding_window_pattern": None}, "sssssf"),
        ({"layer_types": ["full_attention", *["sliding_attention"] * 4, "full_attention"]}, "fssssf"),
    ],
)
def test_gemma3_layer_kinds(tmp_path: Path, changes: dict[str, Any], kinds: str) -> None:
    spec = spec_of(tmp_path, gemma3_config(**changes))
    assert "".join(kind[0] for kind in spec.layer_kinds) == kinds


LINEAR = {"rope_type": "linear", "factor": 8.0}


@pytest.mark.parametrize(
    "changes",
    [
        {"rope_scaling": LINEAR},
        {"rope_scaling": LINEAR, "rope_parameters": {}},
        {"rope_scaling": {}, "rope_parameters": {"rope_theta": 1e6, **LINEAR}},
        {"rope_scaling": LINEAR, "rope_parameters": {"sliding_attention": {"rope_theta": 1e4}}},
        {"rope_scaling": {}, "rope_parameters": {"full_attention": LINEAR}},
        {"rope_scaling": {"type": "linear", "factor": 8.0}},
        {
            "rope_parameters": {
                "full_attention": {"rope_theta": 1e6, **LINEAR},
                "sliding_attention": {"rope_theta": 1e4, "rope_type": "default"},
            },
            "rope_theta": None,
            "rope_local_base_freq": None,
        },
        {"rope_parameters": {"full_attention": LINEAR}},
        {"rope_parameters": {"rope_theta": 1e6, **LINEAR}},
    ],
)
def test_gemma3_scales_full_layers_only(tmp_path: Path, changes: dict[str, Any]) -> None:
    spec = spec_of(tmp_path, gemma3_config(**changes))
    assert spec.rope == RopeSpec(theta=1e6, kind="linear", factor=8.0)
    assert spec.rope_local == RopeSpec(theta=1e4)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"attn_logit_softcapping": 50.0}, "attn_logit_softcapping is 50.0: soft caps are not built"),
        ({"final_logit_softcapping": 30.0}, "final_logit_softcapping is 30.0"),
        ({"use_bidirectional_attention": True}, "only causal attention"),
        ({"hidden_activation": "gelu"}, "only gelu_pytorch_tanh"),
        ({"layer_types": ["full_attention"]}, "must list 6 layers"),
        ({"layer_types": ["chunked_attention"] * 6}, "names 'chunked_attention'"),
        ({"sliding_window": 0}, "sliding_window is 0"),
    ],
)
def test_gemma3_refusals(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelLoadError, match=message):
        spec_of(tmp_path, gemma3_config(**changes))


def test_gguf_metadata_gives_the_same_spec(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(llama_config()))
    theirs, ours = read_spec(tmp_path), read_spec(tiny_llama_gguf(tmp_path))
    for field in set(ours.__struct_fields__) - {"name", "rms_norm_eps"}:
        assert getattr(ours, field) == getattr(theirs, field), field
    assert ours.rms_norm_eps == pytest.approx(theirs.rms_norm_eps, rel=1e-7)
    assert ours.name == "Tiny llama"
    (tmp_path / "config.json").write_text(json.dumps(gemma3_config()))
    theirs, ours = read_spec(tmp_path), read_spec(tiny_gemma3_gguf(tmp_path))
    for field in set(ours.__struct_fields__) - {"name", "rms_norm_eps"}:
        assert getattr(ours, field) == getattr(theirs, field), field


def test_end_tokens_of_the_generation_config_count(tmp_path: Path) -> None:
    text = json.dumps({"eos_token_id": [5, 1], "temperature": 0.6})
    (tmp_path / "generation_config.json").write_text(text)
    assert spec_of(tmp_path, llama_config(eos_token_id=1)).eos_token_ids == (1, 5)
    (tmp_path / "generation_config.json").write_text("{")
    with pytest.raises(ModelLoadError, match=r"generation_config\.json: not a JSON object"):
        spec_of(tmp_path, llama_config())


def test_gguf_rope_scaling(tmp_path: Path) -> None:
    linear = llama_config(rope_scaling={"type": "linear", "factor": 4.0})
    spec = read_spec(write_gguf(tmp_path / "linear.gguf", linear, tmp_path))
    assert spec.rope == RopeSpec(theta=1e4, kind="linear", factor=4.0)
    llama3 = llama_config(rope_scaling={"rope_type": "llama3", **LLAMA3_SCALING})
    rope = read_spec(write_gguf(tmp_path / "llama3.gguf", llama3, tmp_path)).rope
    assert rope.kind == "default"
    assert rope.freq_factors is not None
    assert len(rope.freq_factors) == 8
    assert (min(rope.freq_factors), max(rope.freq_factors)) == (1.0, 32.0)


def test_number_of_parameters(tmp_path: Path) -> None:
    layer = 64 * (64 + 2 * 32 + 64) + 3 * 64 * 160 + 2 * 64
    tied = 320 * 64 + 64 + 3 * layer
    assert num_parameters(spec_of(tmp_path, llama_config())) == tied
    assert num_parameters(spec_of(tmp_path, llama_config(tied=False))) == tied + 320 * 64


def test_reading_needs_no_torch(tmp_path: Path) -> None:
    import subprocess
    import sys

    path = tiny_llama_gguf(tmp_path)
    program = (
        "import sys; from pathlib import Path; from ksana.models import load, sources\n"
        f"load.read_spec(Path({str(path)!r})); load.fingerprint(Path({str(path)!r}))\n"
        "assert 'torch' not in sys.modules and 'transformers' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


@pytest.mark.slow
def test_rope_spellings_as_transformers_reads_them(tmp_path: Path) -> None:
    """Where it reads at most one of the two objects; of two it takes one and forgets what the other says."""
    from transformers import AutoConfig

    absent = object()
    scalings = (absent, None, {}, {"type": "linear", "factor": 2.0}, {"rope_type": "default"})
    parameters = (
        absent,
        None,
        {},
        {"rope_type": "default", "rope_theta": 77.0},
        {"rope_theta": 77.0, "rope_type": "linear", "factor": 2.0},
    )
    num_compared = 0
    for scaling, parameter, theta in itertools.product(scalings, parameters, (absent, 5e5)):
        if isinstance(scaling, dict) and isinstance(parameter, dict) and scaling and parameter:
            continue
        changes = {"rope_scaling": scaling, "rope_parameters": parameter, "rope_theta": theta}
        config = llama_config(**changes)
        (tmp_path / "config.json").write_text(
            json.dumps({key: value for key, value in config.items() if value is not absent})
        )
        theirs = AutoConfig.from_pretrained(tmp_path).rope_parameters
        ours = read_spec(tmp_path).rope
        expected = (theirs["rope_theta"], theirs["rope_type"], theirs.get("factor", 1.0))
        assert (ours.theta, ours.kind, ours.factor) == expected, changes
        num_compared += 1
    assert num_compared == 42
