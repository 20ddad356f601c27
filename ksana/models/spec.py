"""What a model is, as far as numbers can say: read without torch, used by engine and worker alike."""

from __future__ import annotations

from typing import Literal

import msgspec

LayerKind = Literal["full", "sliding"]
RopeKind = Literal["default", "linear", "llama3"]
Activation = Literal["silu", "gelu_tanh"]


class RopeSpec(msgspec.Struct, frozen=True, kw_only=True):
    """Rotary position embedding: angle of pair i at position p is p * inv_freq[i] (see models.rope)."""

    theta: float
    kind: RopeKind = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position: int = 0
    freq_factors: tuple[float, ...] | None = None
    """Divisors of inv_freq, one per pair, after `kind` was applied: how GGUF files carry llama3 scaling."""


class ModelSpec(msgspec.Struct, frozen=True, kw_only=True):
    """Shapes and constants of a decoder. Sizes in elements, `sliding_window` in tokens (HF's meaning:
    query i sees key j when 0 <= i - j < sliding_window)."""

    family: str
    """Name in the registry: "llama", "gemma3"."""
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position: int
    rms_norm_eps: float
    rope: RopeSpec
    rope_local: RopeSpec | None = None
    """For sliding layers, where it differs."""
    tie_word_embeddings: bool = False
    """The checkpoint says that the output head is the embedding (or, in GGUF, carries no head)."""
    attention_bias: bool = False
    output_bias: bool = False
    """Bias of the attention's output projection; `attention_bias` is that of q, k and v."""
    mlp_bias: bool = False
    activation: Activation = "silu"
    qk_norm: bool = False
    """RMS norm over each head of q and k, before the rotation."""
    post_norms: bool = False
    """RMS norms on what attention and MLP give, before it is added to the residual."""
    embedding_scale: float = 1.0
    layer_kinds: tuple[LayerKind, ...]
    sliding_window: int | None = None
    attention_scale: float
    """Factor on q.k before the softmax."""
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    name: str = ""
    """What the model calls itself (general.name, or the directory)."""

    @property
    def num_full_layers(self) -> int:
        return sum(kind == "full" for kind in self.layer_kinds)

    @property
    def num_sliding_layers(self) -> int:
        return sum(kind == "sliding" for kind in self.layer_kinds)

    def kv_bytes_per_token(self, kind: LayerKind, bytes_per_element: int) -> int:
        """KV bytes of one token over all layers of a kind: keys and values, all KV heads."""
        num_layers = sum(k == kind for k in self.layer_kinds)
        return 2 * num_layers * self.num_kv_heads * self.head_dim * bytes_per_element
