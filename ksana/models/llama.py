"""Llama: SmolLM2, Llama 2 and 3, TinyLlama.

A pre-norm decoder with rotary positions, SwiGLU and grouped-query attention.
"""

from __future__ import annotations

from ksana.models.family import Array, Family
from ksana.models.fields import Fields
from ksana.models.gguf_file import GgufFile
from ksana.models.gguf_spec import common_gguf_fields, gguf_freq_factors
from ksana.models.rope_config import rope_from_config, rope_from_gguf
from ksana.models.spec import LayerKind, ModelSpec

ATTENTION_NAMES = {
    "q": "model.layers.{}.self_attn.q_proj.weight",
    "k": "model.layers.{}.self_attn.k_proj.weight",
    "v": "model.layers.{}.self_attn.v_proj.weight",
    "o": "model.layers.{}.self_attn.o_proj.weight",
    "q_bias": "model.layers.{}.self_attn.q_proj.bias",
    "k_bias": "model.layers.{}.self_attn.k_proj.bias",
    "v_bias": "model.layers.{}.self_attn.v_proj.bias",
    "o_bias": "model.layers.{}.self_attn.o_proj.bias",
}
MLP_NAMES = {
    "gate": "model.layers.{}.mlp.gate_proj.weight",
    "up": "model.layers.{}.mlp.up_proj.weight",
    "down": "model.layers.{}.mlp.down_proj.weight",
    "gate_bias": "model.layers.{}.mlp.gate_proj.bias",
    "up_bias": "model.layers.{}.mlp.up_proj.bias",
    "down_bias": "model.layers.{}.mlp.down_proj.bias",
}
OUTER_NAMES = {
    "embedding": "model.embed_tokens.weight",
    "final_norm": "model.norm.weight",
    "head": "lm_head.weight",
}
HF_NAMES = {
    **OUTER_NAMES,
    **ATTENTION_NAMES,
    **MLP_NAMES,
    "attn_norm": "model.layers.{}.input_layernorm.weight",
    "ffn_norm": "model.layers.{}.post_attention_layernorm.weight",
}
GGUF_NAMES = {
    "embedding": "token_embd.weight",
    "final_norm": "output_norm.weight",
    "head": "output.weight",
    "attn_norm": "blk.{}.attn_norm.weight",
    "q": "blk.{}.attn_q.weight",
    "k": "blk.{}.attn_k.weight",
    "v": "blk.{}.attn_v.weight",
    "o": "blk.{}.attn_output.weight",
    "q_bias": "blk.{}.attn_q.bias",
    "k_bias": "blk.{}.attn_k.bias",
    "v_bias": "blk.{}.attn_v.bias",
    "o_bias": "blk.{}.attn_output.bias",
    "ffn_norm": "blk.{}.ffn_norm.weight",
    "gate": "blk.{}.ffn_gate.weight",
    "up": "blk.{}.ffn_up.weight",
    "down": "blk.{}.ffn_down.weight",
    "gate_bias": "blk.{}.ffn_gate.bias",
    "up_bias": "blk.{}.ffn_up.bias",
    "down_bias": "blk.{}.ffn_down.bias",
}


def all_full(num_layers: int) -> tuple[LayerKind, ...]:
    return tuple("full" for _ in range(num_layers))


def spec_from_config(config: Fields) -> ModelSpec:
    """From config.json of a LlamaForCausalLM."""
    config.refuse_unless("hidden_act", ("silu", "swish"), "only silu is built for Llama")
    num_heads = config.size("num_attention_heads")
    hidden_size = config.size("hidden_size")
    if "head_dim" not in config and hidden_size % num_heads:
        raise config.fail(
            "hidden_size", f"is {hidden_size}, not a multiple of the {num_heads} attention heads"
        )
    head_dim = config.size("head_dim", hidden_size // num_heads or None)
    num_layers = config.num_layers("num_hidden_layers")
    attention_bias = config.flag("attention_bias", False)
    return ModelSpec(
        family="llama",
        vocab_size=config.size("vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=config.size("intermediate_size"),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=config.size("num_key_value_heads", num_heads),
        head_dim=head_dim,
        max_position=config.size("max_position_embeddings", 2048),
        rms_norm_eps=config.number("rms_norm_eps", 1e-6),
        rope=rope_from_config(config, default_theta=10_000.0),
        tie_word_embeddings=config.flag("tie_word_embeddings", False),
        attention_bias=attention_bias,
        output_bias=attention_bias,
        mlp_bias=config.flag("mlp_bias", False),
        layer_kinds=all_full(num_layers),
        attention_scale=head_dim**-0.5,
        bos_token_id=config.token_id("bos_token_id"),
        eos_token_ids=config.token_ids("eos_token_id"),
    )


def spec_from_gguf(file: GgufFile, metadata: Fields) -> ModelSpec:
    """From the metadata of a GGUF file of architecture `llama`."""
    metadata.refuse_unless("llama.expert_count", (0,), "a mixture of experts is not built")
    common = common_gguf_fields(file, metadata, "llama")
    num_layers, head_dim = common["num_layers"], common["head_dim"]
    return ModelSpec(
        family="llama",
        **common,
        rope=rope_from_gguf(metadata, "llama", head_dim, gguf_freq_factors(file, head_dim)),
        attention_bias="blk.0.attn_q.bias" in file.tensors,
        output_bias="blk.0.attn_output.bias" in file.tensors,
        mlp_bias="blk.0.ffn_gate.bias" in file.tensors,
        layer_kinds=all_full(num_layers),
        attention_scale=head_dim**-0.5,
    )


def gguf_transform(spec: ModelSpec, role: str, values: Array) -> Array:
    """Undo the interleaving of q and k rows.

    GGUF stores, within each head, the two halves of the rotation as neighbours (row 2i and 2i+1), the
    rotate-half form has them head_dim / 2 apart.
    """
    if role not in ("q", "k", "q_bias", "k_bias"):
        return values
    pairs = values.reshape(-1, spec.head_dim // 2, 2, *values.shape[1:])
    return pairs.swapaxes(1, 2).reshape(values.shape)


FAMILY = Family(
    name="llama",
    config_architectures=("LlamaForCausalLM",),
    gguf_architectures=("llama",),
    spec_from_config=spec_from_config,
    spec_from_gguf=spec_from_gguf,
    hf_names=HF_NAMES,
    gguf_names=GGUF_NAMES,
    gguf_transform=gguf_transform,
    ignored=(r"(model\.)?layers\.\d+\.self_attn\.rotary_emb\.inv_freq", r"rope_freqs\.weight"),
)
