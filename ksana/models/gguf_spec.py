"""The part of a ModelSpec that every GGUF architecture spells alike."""

from __future__ import annotations

import math
from typing import Any

from ksana.models.fields import MAX_LAYERS, Fields
from ksana.models.gguf_file import GgufFile

SCALAR_KEYS_PREFIXES = ("general.", "tokenizer.ggml.", "split.")


def gguf_fields(file: GgufFile, prefix: str) -> Fields:
    """The metadata as Fields, without the long arrays of the vocabulary."""
    wanted = (f"{prefix}.", *SCALAR_KEYS_PREFIXES)
    keys = [key for key in file.metadata_keys() if key.startswith(wanted)]
    values = {key: file.get(key) for key in keys if not _is_long_array(file, key)}
    return Fields(values, str(file.path))


def _is_long_array(file: GgufFile, key: str) -> bool:
    length = file.array_length(key)
    return length is not None and length > MAX_LAYERS


def common_gguf_fields(file: GgufFile, metadata: Fields, prefix: str) -> dict[str, Any]:
    """Sizes, epsilon, special tokens and name: keyword arguments of ModelSpec.

    The vocabulary's size is that of the embedding; a GGUF file without an output head has a tied one.
    """
    embedding = file.tensors.get("token_embd.weight")
    if embedding is None:
        raise metadata.fail("tensor 'token_embd.weight'", "is missing")
    num_heads = metadata.size(f"{prefix}.attention.head_count")
    hidden_size = metadata.size(f"{prefix}.embedding_length")
    head_dim = metadata.size(f"{prefix}.attention.key_length", hidden_size // num_heads or None)
    value_dim = metadata.size(f"{prefix}.attention.value_length", head_dim)
    if value_dim != head_dim:
        raise metadata.fail(
            f"{prefix}.attention.value_length", f"is {value_dim}, not the key length {head_dim}"
        )
    return {
        "name": metadata.text("general.name", file.path.stem),
        "vocab_size": embedding.shape[0],
        "hidden_size": hidden_size,
        "intermediate_size": metadata.size(f"{prefix}.feed_forward_length"),
        "num_layers": metadata.num_layers(f"{prefix}.block_count"),
        "num_heads": num_heads,
        "num_kv_heads": metadata.size(f"{prefix}.attention.head_count_kv", num_heads),
        "head_dim": head_dim,
        "max_position": metadata.size(f"{prefix}.context_length"),
        "rms_norm_eps": metadata.number(f"{prefix}.attention.layer_norm_rms_epsilon"),
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "bos_token_id": metadata.token_id("tokenizer.ggml.bos_token_id"),
        "eos_token_ids": _end_tokens(metadata),
    }


def _end_tokens(metadata: Fields) -> tuple[int, ...]:
    """End of sequence and, for chat models, end of turn."""
    ids = metadata.token_ids("tokenizer.ggml.eos_token_id") + metadata.token_ids(
        "tokenizer.ggml.eot_token_id"
    )
    return tuple(dict.fromkeys(ids))


def gguf_freq_factors(file: GgufFile, head_dim: int) -> tuple[float, ...] | None:
    """Values of the tensor rope_freqs.weight (llama3 scaling), or None if the file has none."""
    if "rope_freqs.weight" not in file.tensors:
        return None
    fields = Fields({}, str(file.path))
    if file.tensors["rope_freqs.weight"].shape != (head_dim // 2,):
        shape = list(file.tensors["rope_freqs.weight"].shape)
        raise fields.fail("tensor 'rope_freqs.weight'", f"has shape {shape}, not [{head_dim // 2}]")
    factors = tuple(file.read("rope_freqs.weight").tolist())
    if not all(math.isfinite(factor) and factor > 0 for factor in factors):
        raise fields.fail("tensor 'rope_freqs.weight'", "holds values that are not finite and above 0")
    return factors
