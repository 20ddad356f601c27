"""Small tokenizers whose every part is in sight."""

from __future__ import annotations

from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Backend

from ksana.tokenizers.chat_template import ChatTemplate
from ksana.tokenizers.pieces import byte_alphabet, pieces_of
from ksana.tokenizers.post_processing import set_bos_eos
from ksana.tokenizers.tokenizer import SpecialTokens, Tokenizer

SPECIAL = ["<s>", "</s>", "<|user|>"]
NAMED = {"bos_token": "<s>", "eos_token": "</s>"}
TEMPLATE = (
    "{{ bos_token }}"
    "{% for message in messages %}<|user|>{{ message.role }}: {{ message.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}<|user|>assistant: {% endif %}"
)


def byte_level_backend() -> Backend:
    """Ids: 0 to 2 special, then one per byte, then a few words."""
    alphabet = byte_alphabet()
    tokens = [*SPECIAL, *(alphabet[byte] for byte in range(256))]
    merges = [("a", "b"), ("ab", "c"), ("S", "T"), ("O", "P"), ("ST", "OP"), ("Ġ", "S")]
    tokens += ["".join(pair) for pair in merges]
    backend = Backend(models.BPE({token: i for i, token in enumerate(tokens)}, merges))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(token, special=True) for token in SPECIAL])
    return backend


def sentencepiece_backend(strip: bool = True) -> Backend:
    """Ids: 0 to 2 special, then 256 byte tokens, then letters and words with "▁" for a space."""
    words = ["▁", *"abcHelowrd", "▁H", "ll", "▁w", "▁▁", "é"]
    tokens = [*SPECIAL, *(f"<0x{byte:02X}>" for byte in range(256)), *words]
    merges = [("▁", "H"), ("l", "l"), ("▁", "w"), ("▁", "▁")]
    backend = Backend(models.BPE({token: i for i, token in enumerate(tokens)}, merges, byte_fallback=True))
    backend.pre_tokenizer = pre_tokenizers.Metaspace("▁", prepend_scheme="first", split=False)
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if strip else steps)
    backend.add_special_tokens([AddedToken(token, special=True) for token in SPECIAL])
    return backend


def tokenizer_of(backend: Backend, template: str | None = TEMPLATE, adds_bos: bool = True) -> Tokenizer:
    set_bos_eos(backend, "<s>" if adds_bos else None, None)
    return Tokenizer(
        backend,
        pieces_of(backend, "tiny"),
        SpecialTokens(NAMED, bos_id=0, eos_ids=(1,)),
        None if template is None else ChatTemplate(template, NAMED, "tiny"),
        "tiny",
    )


def byte_level_tokenizer(template: str | None = TEMPLATE) -> Tokenizer:
    return tokenizer_of(byte_level_backend(), template)


def sentencepiece_tokenizer() -> Tokenizer:
    return tokenizer_of(sentencepiece_backend())
