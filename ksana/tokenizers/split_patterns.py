"""How byte-level vocabularies cut text into words before merging: by the name GGUF files give.

The patterns are part of the vocabularies: each is the one its merges were learned with, as published in the
models' tokenizer.json. A wrong one gives plausible ids that the model was never trained on, so a name that
is not listed is an error.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tokenizers import Regex, normalizers, pre_tokenizers

from ksana.errors import ModelLoadError

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_WHITESPACE = r"\s*[\r\n]+|\s+(?!\S)|\s+"

_LLAMA3 = (
    _CONTRACTIONS
    + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|"
    + _WHITESPACE
)  # fmt: skip
_QWEN2 = (
    _CONTRACTIONS
    + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|"
    + _WHITESPACE
)  # fmt: skip
_CASED_WORDS = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+{suffix}"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*{suffix}"
)
_TEKKEN = _CASED_WORDS.replace("{suffix}", "") + r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|" + _WHITESPACE
_GPT4O = (
    _CASED_WORDS.replace("{suffix}", _CONTRACTIONS + "?")
    + r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|"
    + _WHITESPACE
)  # fmt: skip


@dataclass(frozen=True)
class ByteLevelStyle:
    """What the name of a pre-tokenizer implies."""

    pattern: str | None = None
    """Words as matches of this pattern; None: those of GPT-2."""
    single_digits: bool = False
    """Every digit is a word of its own."""
    ignore_merges: bool = False
    """A word that is a token is taken whole, whatever the merges say."""
    adds_bos: bool = False
    """Whether a BOS is added where the file does not say."""
    composes: bool = False
    """Text is brought into Unicode's composed form (NFC) first."""

    def normalizer(self) -> Any:
        return normalizers.NFC() if self.composes else None

    def splitter(self) -> Any:
        if self.pattern is not None:
            split = pre_tokenizers.Split(Regex(self.pattern), behavior="isolated")
            spell = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
            return pre_tokenizers.Sequence([split, spell])
        words = pre_tokenizers.ByteLevel(add_prefix_space=False)
        if self.single_digits:
            return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), words])
        return words


_GPT2_STYLE = ByteLevelStyle()
_DIGITS_STYLE = ByteLevelStyle(single_digits=True)
_LLAMA3_STYLE = ByteLevelStyle(pattern=_LLAMA3, ignore_merges=True, adds_bos=True)
_STYLES = {
    **dict.fromkeys(("default", "gpt-2", "phi-2", "jais"), _GPT2_STYLE),
    **dict.fromkeys(("smollm", "starcoder", "refact", "codeshell"), _DIGITS_STYLE),
    **dict.fromkeys(("mpt", "olmo"), ByteLevelStyle(composes=True)),  # both GPT-NeoX's
    "command-r": ByteLevelStyle(single_digits=True, composes=True),
    **dict.fromkeys(("llama3", "llama-v3", "llama-bpe", "falcon3"), _LLAMA3_STYLE),
    "smaug-bpe": ByteLevelStyle(pattern=_LLAMA3),
    "dbrx": ByteLevelStyle(pattern=_LLAMA3),
    "qwen2": ByteLevelStyle(pattern=_QWEN2, composes=True),
    "deepseek-r1-qwen": ByteLevelStyle(pattern=_QWEN2, composes=True, adds_bos=True),
    "tekken": ByteLevelStyle(pattern=_TEKKEN, ignore_merges=True, adds_bos=True),
    "gpt-4o": ByteLevelStyle(pattern=_GPT4O),
    "llama4": ByteLevelStyle(pattern=_GPT4O),
}


def byte_level_style(name: str, source: str) -> ByteLevelStyle:
    """What `tokenizer.ggml.pre` says. Raises ModelLoadError for a name that is not known."""
    style = _STYLES.get(name)
    if style is None:
        known = ", ".join(sorted(_STYLES))
        raise ModelLoadError(
            f"{source}: the pre-tokenizer {name!r} (tokenizer.ggml.pre) is not known; known: {known}"
        )
    return style
