"""A model that is nothing but numbers: shapes for the pools, and a tokenizer of single bytes."""

from __future__ import annotations

from pathlib import Path

from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Backend

from ksana.model_setup import ModelFiles
from ksana.models.spec import LayerKind, ModelSpec, RopeSpec
from ksana.tokenizers.chat_template import ChatTemplate
from ksana.tokenizers.pieces import pieces_of
from ksana.tokenizers.tokenizer import SpecialTokens, Tokenizer

BOS, EOS, LONG = "<bos>", "<eos>", "<a token of many characters>"
NAME = "toy"
_TEMPLATE = "{% for message in messages %}<bos>{{ message.role }}: {{ message.content }}\n{% endfor %}"


def toy_tokenizer() -> Tokenizer:
    """One token per byte, begin and end of text, and one long token."""
    vocabulary = [BOS, EOS, LONG, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    backend = Backend(models.BPE({piece: index for index, piece in enumerate(vocabulary)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(piece, special=True) for piece in (BOS, EOS, LONG)])
    named = {"bos_token": BOS, "eos_token": EOS}
    eos_id = backend.token_to_id(EOS)
    assert eos_id is not None
    special = SpecialTokens(named, backend.token_to_id(BOS), (eos_id,))
    return Tokenizer(backend, pieces_of(backend, NAME), special, ChatTemplate(_TEMPLATE, named, NAME), NAME)


def toy_model(max_position: int = 2048, sliding_window: int | None = 96) -> ModelFiles:
    """One full and, with a window, two sliding layers per three."""
    kinds: tuple[LayerKind, ...] = ("sliding", "sliding", "full") if sliding_window else ("full",)
    tokenizer = toy_tokenizer()
    spec = ModelSpec(
        family="llama",
        vocab_size=tokenizer.vocab_size,
        hidden_size=8,
        intermediate_size=16,
        num_layers=len(kinds),
        num_heads=1,
        num_kv_heads=1,
        head_dim=8,
        max_position=max_position,
        rms_norm_eps=1e-5,
        rope=RopeSpec(theta=10_000.0),
        layer_kinds=kinds,
        sliding_window=sliding_window,
        attention_scale=1.0,
        bos_token_id=tokenizer.bos_id,
        eos_token_ids=tokenizer.eos_ids,
        name=NAME,
    )
    return ModelFiles(path=Path(NAME), fingerprint="0" * 64, spec=spec, tokenizer=tokenizer)
