"""The tensors a decoder consists of: role, layer and shape, derived from the spec. No torch.

A role is what a tensor does ("q", "ffn_norm"); families map roles to names. Matrices are [out, in].
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

from ksana.models.spec import ModelSpec


class TensorRole(NamedTuple):
    """One tensor that must be there, `layer` None for those that exist once."""

    role: str
    layer: int | None
    shape: tuple[int, ...]


def decoder_tensors(spec: ModelSpec) -> Iterator[TensorRole]:
    """Every tensor the decoder needs, except the output head, which may be the embedding."""
    yield TensorRole("embedding", None, (spec.vocab_size, spec.hidden_size))
    yield TensorRole("final_norm", None, (spec.hidden_size,))
    shapes = layer_shapes(spec)
    for layer in range(spec.num_layers):
        for role, shape in shapes.items():
            yield TensorRole(role, layer, shape)


def head_tensor(spec: ModelSpec) -> TensorRole:
    """The output head: [vocab, hidden]."""
    return TensorRole("head", None, (spec.vocab_size, spec.hidden_size))


def num_parameters(spec: ModelSpec) -> int:
    """Weights of the model, the embedding counted once if it is also the head."""
    tensors = [*decoder_tensors(spec), *([] if spec.tie_word_embeddings else [head_tensor(spec)])]
    return sum(math.prod(tensor.shape) for tensor in tensors)


def layer_shapes(spec: ModelSpec) -> dict[str, tuple[int, ...]]:
    """Role to shape within one layer."""
    hidden, inner = spec.hidden_size, spec.intermediate_size
    q_size, kv_size = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    shapes: dict[str, tuple[int, ...]] = {
        "attn_norm": (hidden,),
        "q": (q_size, hidden),
        "k": (kv_size, hidden),
        "v": (kv_size, hidden),
        "o": (hidden, q_size),
        "ffn_norm": (hidden,),
        "gate": (inner, hidden),
        "up": (inner, hidden),
        "down": (hidden, inner),
    }
    if spec.qk_norm:
        shapes |= {"q_norm": (spec.head_dim,), "k_norm": (spec.head_dim,)}
    if spec.post_norms:
        shapes |= {"attn_post_norm": (hidden,), "ffn_post_norm": (hidden,)}
    if spec.attention_bias:
        shapes |= {"q_bias": (q_size,), "k_bias": (kv_size,), "v_bias": (kv_size,)}
    if spec.output_bias:
        shapes |= {"o_bias": (hidden,)}
    if spec.mlp_bias:
        shapes |= {"gate_bias": (inner,), "up_bias": (inner,), "down_bias": (hidden,)}
    return shapes
