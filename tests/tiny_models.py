"""Tiny random checkpoints, made in milliseconds without torch: Llama and Gemma 3, Hugging Face and GGUF."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt
import safetensors.numpy
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from ksana.models.checkpoint import read_spec
from ksana.models.registry import FAMILIES
from ksana.models.spec import ModelSpec
from ksana.models.tensors import decoder_tensors, head_tensor

Array = npt.NDArray[np.float32]

SPECIAL_TOKENS = ("<pad>", "<eos>", "<bos>", "<unk>", "<|im_start|>", "<|im_end|>")
PAD, EOS, BOS, UNK, IM_START, IM_END = range(6)
VOCAB_SIZE = 320
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def llama_config(*, tied: bool = True, **changes: Any) -> dict[str, Any]:
    """config.json of a 3-layer Llama with grouped queries."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 64,
        "intermediate_size": 160,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "hidden_act": "silu",
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": tied,
        "bos_token_id": BOS,
        "eos_token_id": EOS,
        "pad_token_id": PAD,
        "torch_dtype": "float32",
    } | changes


def gemma3_config(**changes: Any) -> dict[str, Any]:
    """config.json of a 6-layer Gemma 3 with a window of 32 tokens in five layers of six."""
    return {
        "architectures": ["Gemma3ForCausalLM"],
        "model_type": "gemma3_text",
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 6,
        "num_attention_heads": 4,
        "num_key_value_heads": 1,
        "head_dim": 32,
        "hidden_activation": "gelu_pytorch_tanh",
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1000000.0,
        "rope_local_base_freq": 10000.0,
        "query_pre_attn_scalar": 32,
        "sliding_window": 32,
        "sliding_window_pattern": 6,
        "tie_word_embeddings": True,
        "bos_token_id": BOS,
        "eos_token_id": EOS,
        "pad_token_id": PAD,
        "torch_dtype": "float32",
    } | changes


def random_weights(spec: ModelSpec, *, with_head: bool, seed: int = 0) -> dict[tuple[str, int | None], Array]:
    """Values by role and layer, as a Hugging Face checkpoint stores them.

    Matrices keep the variance of what they multiply, so that depth matters and greedy text wanders.
    """
    random = np.random.default_rng(seed)
    wanted = [*decoder_tensors(spec), *([head_tensor(spec)] if with_head else [])]
    weights: dict[tuple[str, int | None], Array] = {}
    for role, layer, shape in wanted:
        if role.endswith("norm"):
            center = 0.0 if spec.family == "gemma3" else 1.0
            values = random.normal(center, 0.2, shape)
        elif role.endswith("bias"):
            values = random.normal(0.0, 0.1, shape)
        elif role == "embedding":
            values = random.normal(0.0, 1.0 / spec.embedding_scale, shape)
        else:
            values = random.normal(0.0, 1.5 * shape[1] ** -0.5, shape)
        weights[role, layer] = values.astype(np.float32)
    return weights


def write_directory(directory: Path, config: dict[str, Any], *, with_head: bool, seed: int = 0) -> Path:
    """A Hugging Face directory: config, random safetensors, tokenizer with a chat template."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config, indent=1))
    spec = read_spec(directory)
    names = FAMILIES[spec.family].hf_names
    weights = random_weights(spec, with_head=with_head, seed=seed)
    tensors = {names[role].format(layer): values for (role, layer), values in weights.items()}
    safetensors.numpy.save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    write_tokenizer(directory)
    return directory


def tiny_tokenizer() -> Tokenizer:
    """Byte-level BPE: the special tokens, the 256 bytes, some merges, and filler up to VOCAB_SIZE."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    pieces = [*SPECIAL_TOKENS, *letters]
    merges = []
    for pair in ("th", "in", "er", "an", "on", "re", "Ġt", "Ġa", "Ġs", "Ġth", "the", "ing", "Ġthe"):
        merges.append((pair[:-1], pair[-1]) if pair[:-1] in pieces else (pair[0], pair[1:]))
        pieces.append(pair)
    pieces += [f"<unused{index}>" for index in range(VOCAB_SIZE - len(pieces))]
    tokenizer = Tokenizer(models.BPE({piece: index for index, piece in enumerate(pieces)}, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(piece, special=True) for piece in SPECIAL_TOKENS])
    return tokenizer


def write_tokenizer(directory: Path) -> None:
    """tokenizer.json and tokenizer_config.json of `tiny_tokenizer`."""
    tiny_tokenizer().save(str(directory / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<bos>",
        "eos_token": "<eos>",
        "pad_token": "<pad>",
        "unk_token": "<unk>",
        "chat_template": CHAT_TEMPLATE,
        "model_max_length": 2048,
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(settings, indent=1))


def write_gguf(
    path: Path,
    config: dict[str, Any],
    scratch: Path,
    *,
    with_head: bool = False,
    seed: int = 0,
    matrix_type: str = "F32",
) -> Path:
    """The same weights as `write_directory` gives for this seed, as a GGUF file.

    Written the way llama.cpp's converter does: rows of q and k interleaved for Llama, 1 added to Gemma's
    norms. `matrix_type` is the storage of matrices whose rows divide into its blocks.
    """
    scratch.mkdir(parents=True, exist_ok=True)
    (scratch / "config.json").write_text(json.dumps(config))
    spec = read_spec(scratch)
    family = FAMILIES[spec.family]
    writer = gguf.GGUFWriter(str(path), spec.family)
    _write_metadata(writer, spec)
    _write_rope_scaling(writer, spec)
    for (role, layer), values in random_weights(spec, with_head=with_head, seed=seed).items():
        values = _converted(spec, role, values)
        is_matrix = values.ndim == 2
        ggml_type = gguf.GGMLQuantizationType[matrix_type if is_matrix else "F32"]
        if values.shape[-1] % gguf.GGML_QUANT_SIZES[ggml_type][0]:
            ggml_type = gguf.GGMLQuantizationType.F32
        stored = gguf.quants.quantize(values, ggml_type)
        writer.add_tensor(family.gguf_names[role].format(layer), stored, raw_dtype=ggml_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _converted(spec: ModelSpec, role: str, values: Array) -> Array:
    if spec.family == "gemma3" and role.endswith("norm"):
        return values + 1
    if spec.family == "llama" and role in ("q", "k", "q_bias", "k_bias"):
        halves = values.reshape(-1, 2, spec.head_dim // 2, *values.shape[1:])
        return np.ascontiguousarray(halves.swapaxes(1, 2).reshape(values.shape))
    return values


def _write_rope_scaling(writer: gguf.GGUFWriter, spec: ModelSpec) -> None:
    """Linear scaling is metadata; Llama 3's is a tensor of divisors, one per pair."""
    rope = spec.rope
    if rope.kind == "linear":
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(rope.factor)
    elif rope.kind == "llama3":
        divisors = []
        for pair in range(spec.head_dim // 2):
            wavelength = 2 * math.pi * rope.theta ** (2 * pair / spec.head_dim)
            turns = rope.original_max_position / wavelength
            share = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
            share = min(1.0, max(0.0, share))
            divisors.append(1 / ((1 - share) / rope.factor + share))
        writer.add_tensor("rope_freqs.weight", np.array(divisors, np.float32))


def _write_metadata(writer: gguf.GGUFWriter, spec: ModelSpec) -> None:
    writer.add_name(f"Tiny {spec.family}")
    writer.add_block_count(spec.num_layers)
    writer.add_context_length(spec.max_position)
    writer.add_embedding_length(spec.hidden_size)
    writer.add_feed_forward_length(spec.intermediate_size)
    writer.add_head_count(spec.num_heads)
    writer.add_head_count_kv(spec.num_kv_heads)
    writer.add_key_length(spec.head_dim)
    writer.add_value_length(spec.head_dim)
    writer.add_layer_norm_rms_eps(spec.rms_norm_eps)
    writer.add_rope_freq_base(spec.rope.theta)
    if spec.sliding_window is not None:
        writer.add_sliding_window(spec.sliding_window)
    vocabulary = sorted(tiny_tokenizer().get_vocab().items(), key=lambda item: item[1])
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list([piece for piece, _ in vocabulary])
    control, normal = gguf.TokenType.CONTROL, gguf.TokenType.NORMAL
    writer.add_token_types([control if piece in SPECIAL_TOKENS else normal for piece, _ in vocabulary])
    merges = json.loads(tiny_tokenizer().to_str())["model"]["merges"]
    writer.add_token_merges([" ".join(pair) for pair in merges])
    writer.add_bos_token_id(BOS)
    writer.add_eos_token_id(EOS)
    writer.add_pad_token_id(PAD)
    writer.add_unk_token_id(UNK)
    writer.add_add_bos_token(False)
    writer.add_chat_template(CHAT_TEMPLATE)
