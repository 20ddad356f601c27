"""Gemma 3, text: Llama's shape with scaled embeddings, norms by (1 + w) on both sides of attention and MLP,
norms on q and k, GELU, and layers that see a sliding window between those that see everything."""

from __future__ import annotations

import numpy as np

from ksana.models.family import Array, Family
from ksana.models.fields import Fields
from ksana.models.gguf_file import GgufFile
from ksana.models.gguf_spec import common_gguf_fields
from ksana.models.llama import ATTENTION_NAMES, MLP_NAMES, OUTER_NAMES
from ksana.models.llama import GGUF_NAMES as LLAMA_GGUF_NAMES
from ksana.models.rope_config import rope_from_gguf, rope_from_section, rope_sections
from ksana.models.spec import LayerKind, ModelSpec, RopeSpec
from ksana.shown import shown

THETA_FULL, THETA_SLIDING = 1_000_000.0, 10_000.0
DEFAULT_PATTERN = 6
"""Every sixth layer is a full one, where a checkpoint does not say."""

HF_NAMES = {
    **OUTER_NAMES,
    **ATTENTION_NAMES,
    **MLP_NAMES,
    "attn_norm": "model.layers.{}.input_layernorm.weight",
    "q_norm": "model.layers.{}.self_attn.q_norm.weight",
    "k_norm": "model.layers.{}.self_attn.k_norm.weight",
    "attn_post_norm": "model.layers.{}.post_attention_layernorm.weight",
    "ffn_norm": "model.layers.{}.pre_feedforward_layernorm.weight",
    "ffn_post_norm": "model.layers.{}.post_feedforward_layernorm.weight",
}
GGUF_NAMES = {
    **LLAMA_GGUF_NAMES,
    "q_norm": "blk.{}.attn_q_norm.weight",
    "k_norm": "blk.{}.attn_k_norm.weight",
    "attn_post_norm": "blk.{}.post_attention_norm.weight",
    "ffn_post_norm": "blk.{}.post_ffw_norm.weight",
}


def spec_from_config(config: Fields) -> ModelSpec:
    """From config.json of a Gemma3ForCausalLM, or from the text part of a Gemma3ForConditionalGeneration."""
    text = config.section("text_config") or config
    text.refuse_unless("hidden_activation", ("gelu_pytorch_tanh",), "only gelu_pytorch_tanh is built")
    text.refuse_unless("attn_logit_softcapping", (), "soft caps are not built")
    text.refuse_unless("final_logit_softcapping", (), "soft caps are not built")
    text.refuse_unless("use_bidirectional_attention", (False,), "only causal attention is built")
    num_heads = text.size("num_attention_heads", 8)
    num_layers = text.num_layers("num_hidden_layers", 26)
    hidden_size = text.size("hidden_size", 2304)
    kinds = _kinds_from_config(text, num_layers)
    rope, rope_local = _ropes_from_config(text)
    attention_bias = text.flag("attention_bias", False)
    outer = config if "eos_token_id" in config else text
    return ModelSpec(
        family="gemma3",
        vocab_size=text.size("vocab_size", 262_208),
        hidden_size=hidden_size,
        intermediate_size=text.size("intermediate_size", 9216),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=text.size("num_key_value_heads", 4),
        head_dim=text.size("head_dim", 256),
        max_position=text.size("max_position_embeddings", 131_072),
        rms_norm_eps=text.number("rms_norm_eps", 1e-6),
        rope=rope,
        rope_local=rope_local,
        tie_word_embeddings=config.flag("tie_word_embeddings", text.flag("tie_word_embeddings", True)),
        attention_bias=attention_bias,
        output_bias=attention_bias,
        activation="gelu_tanh",
        qk_norm=True,
        post_norms=True,
        embedding_scale=hidden_size**0.5,
        layer_kinds=kinds,
        sliding_window=text.size("sliding_window", 4096) if "sliding" in kinds else None,
        attention_scale=text.number("query_pre_attn_scalar", 256) ** -0.5,
        bos_token_id=outer.token_id("bos_token_id") if "bos_token_id" in outer else 2,
        eos_token_ids=outer.token_ids("eos_token_id") or (1,),
    )


def _kinds_from_config(text: Fields, num_layers: int) -> tuple[LayerKind, ...]:
    if "layer_types" not in text:
        return layer_pattern(num_layers, text.size("sliding_window_pattern", DEFAULT_PATTERN))
    names: dict[str, LayerKind] = {"full_attention": "full", "sliding_attention": "sliding"}
    given = text.values["layer_types"]
    if not isinstance(given, list) or len(given) != num_layers:
        raise text.fail("layer_types", f"must list {num_layers} layers")
    unknown = [name for name in given if not isinstance(name, str) or name not in names]
    if unknown:
        raise text.fail("layer_types", f"names {shown(unknown[0])}; known are {', '.join(names)}")
    return tuple(names[name] for name in given)


def _ropes_from_config(text: Fields) -> tuple[RopeSpec, RopeSpec]:
    """(full, sliding). Scaling that is not given per layer type is for the full layers only."""
    max_position = text.size("max_position_embeddings", 131_072)
    theta_full = text.number("rope_theta", THETA_FULL)
    theta_sliding = text.number("rope_local_base_freq", THETA_SLIDING)
    sections = rope_sections(text)
    return (
        rope_from_section(sections.get("full_attention"), theta_full, max_position),
        rope_from_section(sections.get("sliding_attention"), theta_sliding, max_position),
    )


def layer_pattern(num_layers: int, period: int) -> tuple[LayerKind, ...]:
    """Every `period`-th layer is full, the others are sliding."""
    return tuple("sliding" if (layer + 1) % period else "full" for layer in range(num_layers))


def spec_from_gguf(file: GgufFile, metadata: Fields) -> ModelSpec:
    """From the metadata of a GGUF file of architecture `gemma3`, which leaves out what all sizes share."""
    common = common_gguf_fields(file, metadata, "gemma3")
    num_layers, head_dim, hidden_size = common["num_layers"], common["head_dim"], common["hidden_size"]
    kinds = layer_pattern(
        num_layers, metadata.size("gemma3.attention.sliding_window_pattern", DEFAULT_PATTERN)
    )
    # The 27B model (62 layers) scales by its hidden size per head, all others by the head's.
    scalar = hidden_size // common["num_heads"] if num_layers == 62 else head_dim
    return ModelSpec(
        family="gemma3",
        **common,
        rope=rope_from_gguf(metadata, "gemma3", head_dim, None, default_theta=THETA_FULL),
        rope_local=RopeSpec(theta=metadata.number("gemma3.rope.freq_base_swa", THETA_SLIDING)),
        activation="gelu_tanh",
        qk_norm=True,
        post_norms=True,
        embedding_scale=hidden_size**0.5,
        layer_kinds=kinds,
        sliding_window=metadata.size("gemma3.attention.sliding_window") if "sliding" in kinds else None,
        attention_scale=metadata.number("gemma3.attention.scale", scalar**-0.5),
    )


def hf_transform(_spec: ModelSpec, role: str, values: Array) -> Array:
    """Norms are stored as w and applied as (1 + w): add the 1 here, in float32, once. GGUF has it added."""
    return values + np.float32(1.0) if role.endswith("norm") else values


FAMILY = Family(
    name="gemma3",
    config_architectures=("Gemma3ForCausalLM", "Gemma3ForConditionalGeneration"),
    gguf_architectures=("gemma3",),
    spec_from_config=spec_from_config,
    spec_from_gguf=spec_from_gguf,
    hf_names=HF_NAMES,
    gguf_names=GGUF_NAMES,
    hf_prefixes=(
        ("model.language_model.", "model."),
        ("language_model.model.", "model."),
        ("language_model.lm_head.", "lm_head."),
    ),
    hf_transform=hf_transform,
    ignored=(
        r"(model\.)?vision_tower\..*",
        r"(model\.)?multi_modal_projector\..*",
        r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq",
    ),
)
