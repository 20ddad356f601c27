"""Whether a tokenizer can explode: what its declared steps may do to the time and memory of encoding.

A tokenizer.json is a program of sorts. A pattern may backtrack for ever, eight replacements make a gigabyte
of ten letters, a model may be quadratic in the length of a word. Here the steps are looked at one by one, and
only what is known to take time and memory linear in the text, with a small factor, is called bounded. All
that this does not know is not; so a new kind of step costs a hop to another process and never the server.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec
from tokenizers import Tokenizer as Backend

from ksana.tokenizers.linear_patterns import is_linear

MAX_GROWTH = 32
"""Characters that normalizing may make of one."""
MAX_STEPS = 16
"""Normalizers, and pre-tokenizers."""
MAX_FIXED_CHARS = 64
"""Of what is put before a text, into it, or at the parts of a word."""
MAX_SPECIAL_IDS = 64
"""Ids that may be added around one text."""

_GROWTH = {"NFC": 3, "NFD": 4, "NFKC": 18, "NFKD": 18, "Lowercase": 3, "ByteLevel": 4, "Nmt": 1}
_GROWTH |= {"Strip": 1, "StripAccents": 1}
"""Characters, at most, that a normalizer makes of one: from Unicode's tables."""
_LINEAR_SPLITS = {"ByteLevel", "Whitespace", "WhitespaceSplit", "BertPreTokenizer", "Metaspace", "Digits"}
_LINEAR_SPLITS |= {"CharDelimiterSplit", "Punctuation", "UnicodeScripts"}
_LINEAR_PROCESSORS = {"ByteLevel", "BertProcessing", "RobertaProcessing"}


class ModelOptions(msgspec.Struct):
    """A model without its vocabulary."""

    type: str | None = None
    continuing_subword_prefix: str | None = None
    end_of_word_suffix: str | None = None


class Pipeline(msgspec.Struct):
    """What a tokenizer.json declares, without vocabulary, merges and added tokens."""

    normalizer: Any = None
    pre_tokenizer: Any = None
    model: ModelOptions | None = None
    post_processor: Any = None


@dataclass(frozen=True)
class Bounds:
    """`growth`: characters made of one, at most; 1 where `reason` is set.
    `reason`: why encoding may take any amount of time or memory; None where it is linear."""

    growth: int
    reason: str | None = None


class _Unbounded(Exception):
    """Its text is the reason."""


def pipeline_of(backend: Backend) -> Pipeline:
    """The steps of a tokenizer that is loaded."""
    model = backend.model
    options = ModelOptions(
        type(model).__name__,
        getattr(model, "continuing_subword_prefix", None),
        getattr(model, "end_of_word_suffix", None),
    )
    normalizer, pre_tokenizer, post_processor = (
        None if step is None else json.loads(step.__getstate__())
        for step in (backend.normalizer, backend.pre_tokenizer, backend.post_processor)
    )
    return Pipeline(normalizer, pre_tokenizer, options, post_processor)


def bounds_of_file(definition: bytes) -> Bounds:
    """Bounds of what a tokenizer.json declares, before it is loaded. Takes 3 ms per MB of vocabulary."""
    try:
        return bounds_of(msgspec.json.decode(definition, type=Pipeline))
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError):
        return Bounds(1, "it is not understood")


def bounds_of(pipeline: Pipeline) -> Bounds:
    try:
        growth = _growth(pipeline.normalizer)
        _check_splits(pipeline.pre_tokenizer)
        _check_model(pipeline.model)
        _check_processor(pipeline.post_processor)
    except _Unbounded as unbounded:
        return Bounds(1, str(unbounded))
    except (KeyError, TypeError, AttributeError, ValueError, RecursionError):
        return Bounds(1, "it is not understood")
    return Bounds(growth)


def _steps(step: Any, members: str) -> list[Mapping[str, Any]]:
    """The steps of a sequence, which may hold others."""
    if step is None:
        return []
    if step["type"] != "Sequence":
        return [step]
    steps = [inner for one in step[members][: MAX_STEPS + 1] for inner in _steps(one, members)]
    if len(steps) > MAX_STEPS or len(step[members]) > MAX_STEPS:
        raise _Unbounded(f"it has more than {MAX_STEPS} {members}")
    return steps


def _growth(normalizer: Any) -> int:
    growth = 1.0
    for step in _steps(normalizer, "normalizers"):
        kind = step["type"]
        if kind == "Replace":
            growth *= _growth_of_replace(step)
        elif kind == "Prepend":
            if len(step["prepend"]) > MAX_FIXED_CHARS:
                raise _Unbounded(f"it puts {len(step['prepend'])} characters before every text")
        elif kind in _GROWTH:
            growth *= _GROWTH[kind]
        else:
            raise _Unbounded(f"the normalizer {kind!r} may make anything of a text")
        if growth > MAX_GROWTH:
            raise _Unbounded(f"its normalizers may make more than {MAX_GROWTH} characters of one")
    return math.ceil(growth)


def _growth_of_replace(step: Mapping[str, Any]) -> float:
    pattern, content = step["pattern"], step["content"]
    shortest = len(pattern["String"]) if "String" in pattern else 1
    if "String" not in pattern:
        _check_pattern(pattern["Regex"], "normalizer replaces")
    elif not shortest:
        raise _Unbounded("its normalizer replaces the empty text")
    if len(content) > MAX_FIXED_CHARS:
        raise _Unbounded(f"its normalizer puts {len(content)} characters into a text")
    return max(1.0, len(content) / shortest)


def _check_splits(pre_tokenizer: Any) -> None:
    for step in _steps(pre_tokenizer, "pretokenizers"):
        if step["type"] == "Split":
            if "String" not in step["pattern"]:
                _check_pattern(step["pattern"]["Regex"], "pre-tokenizer splits")
        elif step["type"] not in _LINEAR_SPLITS:
            raise _Unbounded(f"the pre-tokenizer {step['type']!r} may take any time")


def _check_pattern(pattern: str, who: str) -> None:
    if not is_linear(pattern):
        shown = repr(pattern if len(pattern) <= 60 else pattern[:57] + "...")
        raise _Unbounded(f"its {who} by a pattern that is not known to take linear time: {shown}")


def _check_model(model: ModelOptions | None) -> None:
    kind = None if model is None else model.type
    if model is None or kind not in ("BPE", "WordLevel"):
        raise _Unbounded(f"a model of the kind {kind!r} may take quadratic time over a long word")
    if max(len(model.continuing_subword_prefix or ""), len(model.end_of_word_suffix or "")) > MAX_FIXED_CHARS:
        raise _Unbounded("its prefix or suffix of words is very long")


def _check_processor(processor: Any) -> None:
    num_ids = 0
    for step in _steps(processor, "processors"):
        if step["type"] == "TemplateProcessing":
            num_ids += _ids_around(step)
        elif step["type"] in _LINEAR_PROCESSORS:
            num_ids += 2
        else:
            raise _Unbounded(f"the post-processor {step['type']!r} may add any number of tokens")
        if num_ids > MAX_SPECIAL_IDS:
            raise _Unbounded(f"it adds more than {MAX_SPECIAL_IDS} tokens to every text")


def _ids_around(template: Mapping[str, Any]) -> int:
    if sum("Sequence" in piece for piece in template["single"]) > 1:
        raise _Unbounded("its post-processor writes the text more than once")
    added = [piece["SpecialToken"]["id"] for piece in template["single"] if "SpecialToken" in piece]
    return sum(len(template["special_tokens"][name]["ids"]) for name in added)
