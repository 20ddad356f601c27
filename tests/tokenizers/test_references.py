"""Real tokenizers against the ids of the reference (tests/data/tokenizers/make_references.py)."""

from __future__ import annotations

import functools
import json
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ksana.errors import RequestError
from ksana.messages.requests import ChatMessage
from ksana.tokenizers import Tokenizer, load_tokenizer
from ksana.tokenizers.guarded_encoding import MAX_CHARS_IN_PROCESS
from tests.models_for_tests import gemma3_gguf, smollm2_gguf

REFERENCES: dict[str, Any] = json.loads(
    (Path(__file__).parents[1] / "data/tokenizers/references.json").read_text(encoding="utf-8")
)
TEXTS: list[str] = REFERENCES["texts"]


@functools.cache
def smollm2() -> Tokenizer:
    return load_tokenizer(smollm2_gguf())


@functools.cache
def gemma3() -> Tokenizer:
    return load_tokenizer(gemma3_gguf())


@pytest.mark.parametrize("index", range(len(TEXTS)))
def test_smollm2_ids_are_the_reference_s(index: int) -> None:
    assert smollm2().encode(TEXTS[index]) == REFERENCES["smollm2"][index]


@pytest.mark.parametrize("index", range(len(TEXTS)))
def test_gemma3_ids_are_the_reference_s(index: int) -> None:
    assert gemma3().encode(TEXTS[index]) == REFERENCES["gemma3"][index]


def test_special_tokens_can_be_left_out() -> None:
    ids = [gemma3().encode(text, add_special_tokens=False) for text in TEXTS[:5]]
    assert ids == REFERENCES["gemma3_no_special"]
    assert all(gemma3().bos_id not in text_ids for text_ids in ids)


@pytest.mark.parametrize("chat", REFERENCES["smollm2_chats"])
def test_smollm2_conversations_are_the_reference_s(chat: dict[str, Any]) -> None:
    options = dict(chat)
    ids = options.pop("ids")
    messages = [ChatMessage(**message) for message in options.pop("messages")]
    assert smollm2().chat(messages, **options) == ids


def test_a_base_model_has_no_chat_template_and_says_so() -> None:
    with pytest.raises(RequestError, match="no chat template"):
        gemma3().chat([ChatMessage(role="user", content="Hi")])


def test_what_is_known_of_the_models() -> None:
    assert (smollm2().vocab_size, smollm2().bos_id, smollm2().eos_ids) == (49152, 1, (2,))
    assert (gemma3().vocab_size, gemma3().bos_id, gemma3().eos_ids) == (262144, 2, (1,))


@pytest.mark.parametrize("make", [smollm2, gemma3])
def test_texts_stream_back(make: Any) -> None:
    tokenizer = make()
    for text in TEXTS:
        ids = tokenizer.encode(text, add_special_tokens=False)
        stream = tokenizer.stream(skip_special_tokens=False)
        deltas = [stream.push(token_id) for token_id in ids] + [stream.flush()]
        assert "".join(deltas) == tokenizer._backend.decode(ids, skip_special_tokens=False)


@given(st.lists(st.integers(0, 49151), max_size=40), st.booleans())
@settings(max_examples=200, deadline=None)
def test_any_smollm2_ids_stream_to_what_the_package_decodes(ids: list[int], skip: bool) -> None:
    stream = smollm2().stream(skip)
    deltas = [stream.push(token_id) for token_id in ids] + [stream.flush()]
    assert "".join(deltas) == smollm2()._backend.decode(ids, skip_special_tokens=skip)


NOT_BYTES = st.integers(0, 262143).filter(lambda token_id: not 238 <= token_id < 494)
BYTES_OF_A_CHARACTER = st.characters(exclude_categories=["Cs"]).map(
    lambda char: [238 + b for b in char.encode()]
)


@given(st.lists(st.one_of(NOT_BYTES.map(lambda i: [i]), BYTES_OF_A_CHARACTER), max_size=30), st.booleans())
@settings(max_examples=200, deadline=None)
def test_gemma3_ids_with_valid_bytes_stream_to_what_the_package_decodes(
    parts: list[list[int]], skip: bool
) -> None:
    ids = [token_id for part in parts for token_id in part]
    stream = gemma3().stream(skip)
    deltas = [stream.push(token_id) for token_id in ids] + [stream.flush()]
    assert "".join(deltas) == gemma3()._backend.decode(ids, skip_special_tokens=skip)


@given(st.lists(st.integers(0, 600), max_size=40), st.booleans())
@settings(max_examples=200, deadline=None)
def test_any_gemma3_ids_stream_to_the_text_of_all(ids: list[int], skip: bool) -> None:
    stream = gemma3().stream(skip)
    deltas = [stream.push(token_id) for token_id in ids] + [stream.flush()]
    assert "".join(deltas) == gemma3().decode(ids, skip)
    # Where the package replaces a whole run of byte tokens, the good characters of it are kept here.
    package = gemma3()._backend.decode(ids, skip_special_tokens=skip)
    assert "".join(deltas).replace("\ufffd", "").startswith(package[: package.find("\ufffd")])


@pytest.mark.parametrize(("path", "limit_s"), [(smollm2_gguf, 5), (gemma3_gguf, 20)])
def test_loading_takes_seconds_at_most(path: Any, limit_s: float) -> None:
    """0.2 and 2 s on the machine it was written on; the limits leave room for slow and busy ones."""
    file = path()
    start_s = time.process_time()
    load_tokenizer(file)
    assert time.process_time() - start_s < limit_s


def test_real_tokenizers_are_encoded_in_this_process() -> None:
    for tokenizer in (smollm2(), gemma3()):
        assert tokenizer.encoding.guarded_because is None
        assert not tokenizer.encoding.is_elsewhere(MAX_CHARS_IN_PROCESS)
