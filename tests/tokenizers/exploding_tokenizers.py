"""Tokenizers that run away on some text: each with that text, and one it can encode."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers, processors

from tests.tokenizers.tiny_tokenizers import byte_level_backend

GOOD = "b c"
"""A text that every one of them can encode."""


@dataclass(frozen=True)
class Exploding:
    name: str
    change: Callable[[Tokenizer], None]
    poison: str
    why: str = "memory|processor time|Panic"
    """What the refusal says. Which of the limits is first, or the library's own, is the machine's matter."""

    def backend(self) -> Tokenizer:
        backend = byte_level_backend()
        self.change(backend)
        return backend


def splitting(pattern: str) -> Callable[[Tokenizer], None]:
    def change(backend: Tokenizer) -> None:
        spell = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        split = pre_tokenizers.Split(Regex(pattern), "isolated")
        backend.pre_tokenizer = pre_tokenizers.Sequence([split, spell])

    return change


def normalizing(*steps: Any) -> Callable[[Tokenizer], None]:
    def change(backend: Tokenizer) -> None:
        backend.normalizer = normalizers.Sequence(list(steps))

    return change


def _quadratic_words(backend: Tokenizer) -> None:
    vocabulary = {"[UNK]": 0, "a": 1, "##a": 2, "Ġb": 3, "Ġ": 4, "b": 5, "##Ġ": 6, "##c": 7}
    backend.model = models.WordPiece(vocabulary, unk_token="[UNK]", max_input_chars_per_word=10**9)
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)


def _long_pieces(backend: Tokenizer) -> None:
    pieces = [("<unk>", 0.0), *(("a" * length, -1.0) for length in range(1, 3000))]
    backend.model = models.Unigram([*pieces, ("b", -1.0), ("Ġ", -1.0), ("c", -1.0)], 0, False)
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)


def _text_many_times(backend: Tokenizer) -> None:
    added = processors.TemplateProcessing(single=["$A:0"] * 3000, special_tokens=[])
    backend.post_processor = processors.Sequence([added] * 4)


TENFOLD = normalizers.Replace("a", "a" * 10)
PATTERNS = {
    r"(a+)+$": "a" * 60 + "b",
    r"(a|a)*$": "a" * 60 + "b",
    r"(a|aa)+$": "a" * 60 + "b",
    r"(\w+\s?)+$": "a" * 60 + "!",
    r"(?:x+x+)+y": "x" * 3000,
    r"(x+x+)+y|(?<=z)q": "x" * 3000,
    r"(?=(a+))\1+$": "a" * 50_000 + "b",
    r"\s+$": " " * 50_000 + "x",
}
NORMALIZERS: dict[str, tuple[list[Any], str]] = {
    "replace tenfold, eight times": ([TENFOLD] * 8, "a" * 200),
    "replace by a long text": ([normalizers.Replace("a", "b" * 10**7)], "a" * 200),
    "a pattern in a normalizer": ([normalizers.Replace(Regex("(a+)+$"), "")], "a" * 60 + "b"),
    "replace nothing": ([normalizers.Replace(Regex("(?=.)"), "aaaaaaaa")] * 9, "a" * 200),
    "prepend a long text": ([normalizers.Prepend("b" * 10**7)] * 9, "a" * 10),
    "decompose and replace": ([normalizers.NFKD(), TENFOLD] * 8, "a" * 200),
}
EXPLODING = [
    *(Exploding(pattern, splitting(pattern), poison) for pattern, poison in PATTERNS.items()),
    *(Exploding(name, normalizing(*steps), poison) for name, (steps, poison) in NORMALIZERS.items()),
    Exploding("a model of pieces of words", _quadratic_words, "a" * 40_000, "processor time"),
    Exploding("a model of long pieces", _long_pieces, "a" * 40_000),
    Exploding("a template of the text", _text_many_times, "a" * 3000),
]
TENFOLD_CASE = next(case for case in EXPLODING if case.name.startswith("replace tenfold"))
