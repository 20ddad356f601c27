"""Attention of one layer over the paged cache."""

from __future__ import annotations

from torch import Tensor

from ksana import kernels
from ksana.models.batch import KvCache, StepBatch
from ksana.models.layers import LayerReader
from ksana.models.spec import ModelSpec


class Attention:
    """Grouped-query attention with rotary positions: [T, hidden] to [T, hidden].

    q, k and v come out of one product; the rotation works in place on slices of its result. Writes the
    step's keys and values before it attends, so that a token sees itself and those before it.
    """

    def __init__(
        self, spec: ModelSpec, layer: int, reader: LayerReader, rope: dict[str, tuple[Tensor, Tensor]]
    ) -> None:
        self.layer = layer
        self.num_heads, self.num_kv_heads, self.head_dim = spec.num_heads, spec.num_kv_heads, spec.head_dim
        self.scale, self.eps = spec.attention_scale, spec.rms_norm_eps
        self.is_sliding = spec.layer_kinds[layer] == "sliding"
        self.window = spec.sliding_window if self.is_sliding else None
        self.cos, self.sin = rope[spec.layer_kinds[layer]]
        self.qkv = reader.fused(("q", "k", "v"), spec.attention_bias)
        self.out = reader.fused(("o",), spec.output_bias)
        self.q_norm = reader.tensor("q_norm") if spec.qk_norm else None
        self.k_norm = reader.tensor("k_norm") if spec.qk_norm else None

    def __call__(self, x: Tensor, batch: StepBatch, kv: KvCache) -> Tensor:
        tables = batch.sliding if self.is_sliding else batch.full
        assert tables is not None, f"layer {self.layer} has no block tables"
        keys, values = kv.keys[self.layer], kv.values[self.layer]
        num_heads, num_kv_heads = self.num_heads, self.num_kv_heads
        heads = self.qkv(x).view(len(x), num_heads + 2 * num_kv_heads, self.head_dim)
        q, k = heads[:, :num_heads], heads[:, num_heads : num_heads + num_kv_heads]
        v = heads[:, num_heads + num_kv_heads :]
        if self.q_norm is not None and self.k_norm is not None:
            q = kernels.rms_norm(q.contiguous(), self.q_norm, self.eps)
            k = kernels.rms_norm(k.contiguous(), self.k_norm, self.eps)
        kernels.rope(q, k, batch.positions, self.cos, self.sin)
        kernels.write_kv(k, v, keys, values, tables.slots)
        attended = kernels.paged_attention(
            q, keys, values, tables.block_tables, batch.query_starts, batch.positions, self.scale, self.window
        )
        return self.out(attended.view(len(x), num_heads * self.head_dim))
