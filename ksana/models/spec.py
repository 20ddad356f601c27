"""What a model is, as far as numbers can say: read without torch, used by engine and worker alike."""

from __future__ import annotations

from typing import Literal

import msgspec

LayerKind = Literal["full", "sliding"]


class RopeSpec(msgspec.Struct, frozen=True, kw_only=True):
    """Rotary position embedding: angle of pair i at position p is p * inv_freq[i] (see models.rope)."""

    theta: float
    kind: Literal["default", "linear", "llama3", "dynamic", "yarn"] = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position: int = 0
    attention_factor: float | None = None
    beta_fast: float = 32.0
    beta_slow: float = 1.0


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
    attention_bias: bool = False
    mlp_bias: bool = False
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
