"""The decoder of all families built so far: what differs between them is in the spec and in the weights."""

from __future__ import annotations

import logging
from collections.abc import Callable

import torch
from torch import Tensor

from ksana import kernels
from ksana.models.attention import Attention
from ksana.models.batch import KvCache, StepBatch
from ksana.models.checkpoint import Checkpoint
from ksana.models.layers import LayerReader, Linear
from ksana.models.rope import rope_tables
from ksana.models.spec import ModelSpec

logger = logging.getLogger(__name__)

GATED = {"silu": kernels.silu_mul, "gelu_tanh": kernels.gelu_tanh_mul}


class DecoderLayer:
    """Attention and MLP with the norms between them. The norm before attention belongs to the loop outside,
    which fuses it with the previous layer's residual addition."""

    def __init__(
        self, spec: ModelSpec, layer: int, reader: LayerReader, rope: dict[str, tuple[Tensor, Tensor]]
    ) -> None:
        self.eps = spec.rms_norm_eps
        self.attn_norm = reader.tensor("attn_norm")
        self.attention = Attention(spec, layer, reader, rope)
        self.ffn_norm = reader.tensor("ffn_norm")
        self.gate_up = reader.fused(("gate", "up"), spec.mlp_bias)
        self.gated = GATED[spec.activation]
        self.down = reader.fused(("down",), spec.mlp_bias)
        self.attn_post_norm = reader.tensor("attn_post_norm") if spec.post_norms else None
        self.ffn_post_norm = reader.tensor("ffn_post_norm") if spec.post_norms else None

    def __call__(self, x: Tensor, residual: Tensor, batch: StepBatch, kv: KvCache) -> Tensor:
        """x [T, hidden], normed. Adds attention to `residual` in place; returns what the MLP adds to it."""
        x = self.attention(x, batch, kv)
        if self.attn_post_norm is not None:
            x = kernels.rms_norm(x, self.attn_post_norm, self.eps)
        x = kernels.add_rms_norm(x, residual, self.ffn_norm, self.eps)
        x = self.down(self.gated(self.gate_up(x)))
        if self.ffn_post_norm is not None:
            x = kernels.rms_norm(x, self.ffn_post_norm, self.eps)
        return x


class Model:
    """A loaded model.

    Owns the weights (float32, packed) and the tables of the rotary embedding for `max_positions` positions.
    Not thread-safe only in that a KvCache must not be written by two steps at once.
    """

    def __init__(self, checkpoint: Checkpoint, max_positions: int, on_read: Callable[[], None]) -> None:
        spec = self.spec = checkpoint.spec
        self.max_positions = max_positions
        rope = {"full": rope_tables(spec.rope, spec.head_dim, max_positions)}
        if spec.num_sliding_layers:
            local = spec.rope_local or spec.rope
            rope["sliding"] = rope_tables(local, spec.head_dim, max_positions)
        outer = LayerReader(checkpoint, None, on_read)
        self.embedding = outer.tensor("embedding")
        self.layers = [
            DecoderLayer(spec, layer, LayerReader(checkpoint, layer, on_read), rope)
            for layer in range(spec.num_layers)
        ]
        self.final_norm = outer.tensor("final_norm")
        self.head = Linear(self._head(checkpoint, outer))

    def _head(self, checkpoint: Checkpoint, outer: LayerReader) -> Tensor:
        """The output head's weight. A stored head counts even where the configuration says that it is the
        embedding: usually they are equal, and if not, the values are what the model was trained to."""
        if not checkpoint.has_head:
            return self.embedding
        head = outer.tensor("head")
        if self.spec.tie_word_embeddings and not torch.equal(head, self.embedding):
            logger.warning(
                "%s: tie_word_embeddings is true, but the stored output head differs from the embedding; "
                "the stored one is used",
                checkpoint.path,
            )
        return head

    @torch.inference_mode()
    def forward(self, batch: StepBatch, kv: KvCache) -> Tensor:
        """Run one step: write its keys and values into `kv`, return logits [L, vocab] float32 of the tokens
        in `batch.logit_indices`. Raises ValueError for shapes, slots or positions that do not fit."""
        residual = self.embedding.index_select(0, batch.token_ids)
        if self.spec.embedding_scale != 1.0:
            residual.mul_(self.spec.embedding_scale)
        eps = self.spec.rms_norm_eps
        x = kernels.rms_norm(residual, self.layers[0].attn_norm, eps)
        for layer, following in zip(self.layers, self.layers[1:], strict=False):
            x = layer(x, residual, batch, kv)
            x = kernels.add_rms_norm(x, residual, following.attn_norm, eps)
        x = self.layers[-1](x, residual, batch, kv)
        if not len(batch.logit_indices):
            return x.new_empty((0, self.spec.vocab_size))
        x, residual = x.index_select(0, batch.logit_indices), residual.index_select(0, batch.logit_indices)
        return self.head(kernels.add_rms_norm(x, residual, self.final_norm, eps))


build = Model
