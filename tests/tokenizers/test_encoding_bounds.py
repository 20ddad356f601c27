from __future__ import annotations

import re
import time
from typing import Any

import pytest
from tokenizers import Regex, pre_tokenizers

from ksana.tokenizers import linear_patterns
from ksana.tokenizers.encoding_bounds import (
    Bounds,
    ModelOptions,
    Pipeline,
    bounds_of,
    bounds_of_file,
    pipeline_of,
)
from ksana.tokenizers.linear_patterns import is_linear
from ksana.tokenizers.split_patterns import _STYLES
from tests.tokenizers.exploding_tokenizers import EXPLODING
from tests.tokenizers.tiny_tokenizers import byte_level_backend, sentencepiece_backend

BPE = ModelOptions(type="BPE")
SPACES = {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}
LLAMA_3 = (
    "(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\\r\\n\\p{L}\\p{N}]?\\p{L}+|\\p{N}{1,3}| ?[^\\s\\p{L}\\p{N}]+[\\r\\n]*"
    "|\\s*[\\r\\n]+|\\s+(?!\\S)|\\s+"
)
DEEPSEEK = (
    "[!\"#$%&'()*+,\\-./:;<=>?@\\[\\\\\\]^_`{|}~][A-Za-z]+|[^\r\n\\p{L}\\p{P}\\p{S}]?[\\p{L}\\p{M}]+"
    "| ?[\\p{P}\\p{S}]+[\r\n]*|\\s*[\r\n]+|\\s+(?!\\S)|\\s+"
)


def split(pattern: str) -> dict[str, Any]:
    return {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}


def sequence(kind: str, *steps: dict[str, Any]) -> dict[str, Any]:
    return {"type": "Sequence", kind: list(steps)}


def replace(pattern: str, content: str, kind: str = "String") -> dict[str, Any]:
    return {"type": "Replace", "pattern": {kind: pattern}, "content": content}


def template(*pieces: dict[str, Any], ids: int = 1) -> dict[str, Any]:
    special = {"<s>": {"id": "<s>", "ids": [1] * ids, "tokens": ["<s>"] * ids}}
    return {"type": "TemplateProcessing", "single": list(pieces), "pair": [], "special_tokens": special}


TEXT = {"Sequence": {"id": "A", "type_id": 0}}
BOS = {"SpecialToken": {"id": "<s>", "type_id": 0}}
BYTES = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}

BOUNDED = {
    "nothing": Pipeline(model=BPE),
    "gemma": Pipeline(SPACES, {"type": "Split", "pattern": {"String": " "}}, BPE, template(BOS, TEXT)),
    "llama 2": Pipeline(sequence("normalizers", {"type": "Prepend", "prepend": "▁"}, SPACES), None, BPE),
    "llama 3": Pipeline(
        None,
        sequence("pretokenizers", split(LLAMA_3), BYTES),
        BPE,
        sequence("processors", BYTES, template(BOS, TEXT)),
    ),
    "deepseek": Pipeline(
        sequence("normalizers"),
        sequence("pretokenizers", split(r"\p{N}{1,3}"), split("[一-龥぀-ゟ゠-ヿ]+"), split(DEEPSEEK), BYTES),
        BPE,
        BYTES,
    ),
    "smollm": Pipeline(None, sequence("pretokenizers", {"type": "Digits"}, {"type": "ByteLevel"}), BPE),
    "compatibly composed": Pipeline({"type": "NFKC"}, None, BPE),
}


@pytest.mark.parametrize("name", BOUNDED)
def test_what_models_have_is_bounded(name: str) -> None:
    assert bounds_of(BOUNDED[name]).reason is None


def test_growth_is_that_of_all_normalizers_together() -> None:
    growing = {"type": "Replace", "pattern": {"String": "ab"}, "content": "abcde"}
    shrinking = {"type": "Replace", "pattern": {"String": "abcd"}, "content": "a"}
    assert bounds_of(Pipeline(SPACES, model=BPE)) == Bounds(1)
    assert bounds_of(
        Pipeline(sequence("normalizers", growing, {"type": "NFC"}, shrinking), model=BPE)
    ) == Bounds(8)
    assert bounds_of(Pipeline({"type": "NFKC"}, model=BPE)) == Bounds(18)


@pytest.mark.parametrize(
    ("pipeline", "reason"),
    [
        (Pipeline(), "kind None"),
        (Pipeline(model=ModelOptions(type="WordPiece")), "WordPiece"),
        (Pipeline(model=ModelOptions(type="Unigram")), "Unigram"),
        (Pipeline(model=ModelOptions(type="BPE", end_of_word_suffix="x" * 1000)), "very long"),
        (Pipeline({"type": "Precompiled"}, None, BPE), "'Precompiled'"),
        (Pipeline({"type": "BertNormalizer"}, None, BPE), "'BertNormalizer'"),
        (Pipeline({"type": "Prepend", "prepend": "x" * 65}, None, BPE), "65 characters before"),
        (Pipeline({"type": "Replace", "pattern": {"String": ""}, "content": "a"}, None, BPE), "empty text"),
        (Pipeline({"type": "Replace", "pattern": {"Regex": "a*"}, "content": "a"}, None, BPE), "'a[*]'"),
        (
            Pipeline({"type": "Replace", "pattern": {"String": "a"}, "content": "a" * 65}, None, BPE),
            "65 char",
        ),
        (
            Pipeline(sequence("normalizers", *[{"type": "NFKD"}] * 2), None, BPE),
            "more than 32 characters of one",
        ),
        (Pipeline(sequence("normalizers", *[SPACES] * 17), None, BPE), "more than 16"),
        (Pipeline(sequence("normalizers", *[sequence("normalizers", *[SPACES] * 9)] * 9), None, BPE), "16"),
        (Pipeline(None, split(r"(a+)+$"), BPE), "linear time"),
        (Pipeline(None, split(LLAMA_3 + "|(a+)+$"), BPE), "linear time"),
        (Pipeline(None, sequence("pretokenizers", BYTES, split("(a|a)*$")), BPE), "linear time"),
        (Pipeline(None, {"type": "FixedLength", "length": 0}, BPE), "FixedLength"),
        (Pipeline(None, None, BPE, template(TEXT, TEXT)), "more than once"),
        (Pipeline(None, None, BPE, template(BOS, TEXT, ids=65)), "64 tokens"),
        (Pipeline(None, None, BPE, {"type": "New"}), "'New'"),
        (Pipeline(None, {"type": "Split"}, BPE), "not understood"),
        (Pipeline(7, None, BPE), "not understood"),
        (Pipeline({"type": []}, None, BPE), "not understood"),
    ],
)
def test_what_is_not_known_to_be_linear_is_told_with_its_reason(pipeline: Pipeline, reason: str) -> None:
    bounds = bounds_of(pipeline)
    assert bounds.reason is not None
    assert pytest.approx(bounds.growth) == 1
    assert re.search(reason, bounds.reason), bounds.reason


@pytest.mark.parametrize("case", EXPLODING, ids=lambda case: case.name)
def test_a_file_and_its_loaded_tokenizer_are_judged_alike(case: Any) -> None:
    backend = case.backend()
    assert bounds_of_file(backend.to_str().encode()) == bounds_of(pipeline_of(backend))
    assert bounds_of(pipeline_of(backend)).reason is not None


def test_tiny_tokenizers_and_their_files_are_bounded() -> None:
    for backend in (byte_level_backend(), sentencepiece_backend()):
        assert bounds_of_file(backend.to_str().encode()) == bounds_of(pipeline_of(backend)) == Bounds(1)


def test_every_pattern_of_gguf_files_is_known() -> None:
    for style in _STYLES.values():
        backend = byte_level_backend()
        backend.pre_tokenizer = style.splitter()
        backend.normalizer = style.normalizer() or backend.normalizer
        assert bounds_of(pipeline_of(backend)).reason is None, style


RUNS = [
    "a",
    "A",
    "aA",
    "1",
    " ",
    "\n",
    " \n",
    "!",
    "'",
    "'s",
    "é",
    "你",
    "\u0301",
    "あ",
    "a ",
    " a",
    "!\n",
    "\t ",
    "ǅ",
]


@pytest.mark.slow
def test_known_patterns_take_linear_time() -> None:
    """Quadratic time would be minutes for each: 400,000 characters squared."""
    for pattern in sorted(linear_patterns._LINEAR):
        splitter = pre_tokenizers.Split(Regex(pattern), "isolated")
        for run in RUNS:
            for text in (
                run * (100_000 // len(run)),
                run * (100_000 // len(run)) + "x",
                run * 100_000 + "\n",
            ):
                start_s = time.thread_time()
                splitter.pre_tokenize_str(text)
                assert time.thread_time() - start_s < 5, (pattern, run)


def test_a_pattern_is_known_however_line_ends_are_spelled() -> None:
    assert is_linear(LLAMA_3)
    assert is_linear(LLAMA_3.replace(r"\r\n", "\r\n"))
    assert not is_linear(LLAMA_3 + "+")
