from __future__ import annotations

import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import decoders

from ksana.errors import ModelLoadError
from ksana.tokenizers.detokenizer import Detokenizer
from ksana.tokenizers.pieces import TokenPieces, pieces_of
from ksana.tokenizers.tokenizer import Tokenizer
from tests.tokenizers.tiny_tokenizers import (
    byte_level_backend,
    byte_level_tokenizer,
    sentencepiece_backend,
    sentencepiece_tokenizer,
    tokenizer_of,
)

BYTE_LEVEL = byte_level_tokenizer()
SENTENCEPIECE = sentencepiece_tokenizer()
ids = st.lists(st.integers(0, 275), max_size=30)
SMILE = [3 + byte for byte in "😀".encode()]
"""The four byte tokens of one character; the same in both tiny vocabularies."""


def deltas(tokenizer: Tokenizer, token_ids: list[int], skip: bool = True) -> list[str]:
    stream = tokenizer.stream(skip)
    return [stream.push(token_id) for token_id in token_ids] + [stream.flush()]


@given(ids, st.booleans())
@settings(max_examples=300)
def test_byte_level_deltas_join_to_what_the_package_decodes(token_ids: list[int], skip: bool) -> None:
    reference = byte_level_backend().decode(token_ids, skip_special_tokens=skip)
    assert "".join(deltas(BYTE_LEVEL, token_ids, skip)) == reference


def lossy_reference(token_ids: list[int], skip: bool) -> str:
    """SentencePiece's own rule, all at once: in a run of byte tokens good characters stay, bad bytes become
    U+FFFD one by one."""
    backend = sentencepiece_backend()
    shown = [i for i in token_ids if i < backend.get_vocab_size() and not (skip and i < 3)]
    text, run = "", b""
    for token_id in [*shown, None]:
        if token_id is not None and 3 <= token_id < 259:
            run += bytes([token_id - 3])
            continue
        while run:
            good = [size for size in (1, 2, 3, 4) if is_character(run[:size])]
            text += run[: good[0]].decode() if good else "\ufffd"
            run = run[good[0] if good else 1 :]
        if token_id is not None:
            text += (backend.id_to_token(token_id) or "").replace("▁", " ")
    return text.removeprefix(" ")


def is_character(data: bytes) -> bool:
    try:
        return len(data.decode()) == 1
    except UnicodeDecodeError:
        return False


@given(ids, st.booleans())
@settings(max_examples=300)
def test_sentencepiece_deltas_join_to_the_text_of_all_ids(token_ids: list[int], skip: bool) -> None:
    assert "".join(deltas(SENTENCEPIECE, token_ids, skip)) == lossy_reference(token_ids, skip)


@given(st.text(max_size=20), st.booleans())
def test_valid_text_comes_back_as_the_package_decodes_it(text: str, skip: bool) -> None:
    for tokenizer, backend in ((BYTE_LEVEL, byte_level_backend()), (SENTENCEPIECE, sentencepiece_backend())):
        token_ids = tokenizer.encode(text)
        assert "".join(deltas(tokenizer, token_ids, skip)) == backend.decode(
            token_ids, skip_special_tokens=skip
        )


@given(ids, ids)
def test_no_later_token_changes_what_was_given_out(token_ids: list[int], more: list[int]) -> None:
    for tokenizer in (BYTE_LEVEL, SENTENCEPIECE):
        stream = tokenizer.stream()
        shown = "".join(map(stream.push, token_ids))
        assert tokenizer.decode(token_ids + more).startswith(shown)


@pytest.mark.parametrize("tokenizer", [BYTE_LEVEL, SENTENCEPIECE], ids=["byte level", "sentencepiece"])
class TestCharactersOverTokens:
    def test_a_character_of_four_tokens_comes_whole_with_the_last(self, tokenizer: Tokenizer) -> None:
        assert deltas(tokenizer, SMILE) == ["", "", "", "😀", ""]

    def test_an_unfinished_character_becomes_a_replacement_at_the_end(self, tokenizer: Tokenizer) -> None:
        shown = deltas(tokenizer, SMILE[:3])
        assert shown[:3] == ["", "", ""]
        assert set(shown[3]) == {"\ufffd"}

    def test_only_bad_bytes_are_replaced(self, tokenizer: Tokenizer) -> None:
        assert tokenizer.decode([*SMILE, 3 + 0xFF, *SMILE]) == "😀\ufffd😀"

    def test_a_special_token_between_does_not_break_a_character_when_skipped(
        self, tokenizer: Tokenizer
    ) -> None:
        assert tokenizer.decode([*SMILE[:2], 2, *SMILE[2:]]) == "😀"

    def test_special_tokens_are_shown_on_request(self, tokenizer: Tokenizer) -> None:
        assert deltas(tokenizer, [2, *SMILE], skip=False)[0] == "<|user|>"

    def test_ids_outside_the_vocabulary_have_no_text(self, tokenizer: Tokenizer) -> None:
        assert tokenizer.decode([100_000, *SMILE, -1, 1 << 40]) == "😀"

    def test_a_character_begun_by_the_prompt_is_completed(self, tokenizer: Tokenizer) -> None:
        stream = tokenizer.stream(prompt_ids=[0, 100, *SMILE[:1], 2, *SMILE[1:3]])
        assert stream.push(SMILE[3]) == "😀"

    def test_a_prompt_that_ends_whole_leaves_nothing(self, tokenizer: Tokenizer) -> None:
        stream = tokenizer.stream(prompt_ids=[3 + 0xBF, *SMILE])
        assert stream.push(SMILE[0]) + stream.flush() == tokenizer.decode(SMILE[:1])


class TestLeadingSpace:
    HELLO = SENTENCEPIECE.encode("Hello", add_special_tokens=False)

    def test_the_space_before_the_first_word_of_a_text_is_not_shown(self) -> None:
        assert SENTENCEPIECE.decode(self.HELLO) == "Hello"

    def test_it_is_shown_after_a_prompt_with_text(self) -> None:
        stream = SENTENCEPIECE.stream(prompt_ids=self.HELLO)
        assert "".join(map(stream.push, self.HELLO)) == " Hello"

    def test_it_is_not_shown_after_a_prompt_of_hidden_tokens(self) -> None:
        stream = SENTENCEPIECE.stream(prompt_ids=[0])
        assert "".join(map(stream.push, self.HELLO)) == "Hello"

    def test_only_one_space_is_taken(self) -> None:
        two_spaces = sentencepiece_backend().token_to_id("▁▁")
        assert SENTENCEPIECE.decode([two_spaces, two_spaces, *self.HELLO]) == "    Hello"

    def test_without_the_strip_step_nothing_is_taken(self) -> None:
        assert tokenizer_of(sentencepiece_backend(strip=False)).decode(self.HELLO) == " Hello"


class TestDecodersThatExplode:
    @staticmethod
    def pieces(*steps: object) -> TokenPieces:
        backend = sentencepiece_backend()
        backend.decoder = decoders.Sequence([*steps, decoders.Fuse()])
        return pieces_of(backend, "m")

    @pytest.mark.parametrize(
        "steps",
        [
            [decoders.Replace("a", "a" * 10)] * 8,
            [decoders.Replace("a", "b" * 10**6)],
            [decoders.Replace("", "b" * 20)],
        ],
    )
    def test_replacements_that_multiply_are_refused_at_load(self, steps: list[object]) -> None:
        with pytest.raises(ModelLoadError, match=r"^m: .*more than 32 characters of one"):
            self.pieces(*steps)

    def test_a_token_whose_text_is_too_long_has_none(self) -> None:
        backend = sentencepiece_backend()
        backend.add_tokens(["a" * 5000])
        backend.decoder = decoders.Sequence([decoders.Replace("a", "b" * 30), decoders.Fuse()])
        with pytest.raises(ValueError, match="150000 characters"):
            pieces_of(backend, "m")[backend.token_to_id("a" * 5000)]

    def test_replacements_are_done_in_their_order(self) -> None:
        pieces = self.pieces(*(decoders.Replace(*pair) for pair in ("▁a", "ab", "▁c", "bH", "ac")))
        backend = sentencepiece_backend()
        assert pieces[backend.token_to_id("▁")] == b"H"

    def test_very_many_spaces_are_cut_in_no_time(self) -> None:
        backend = sentencepiece_backend()
        backend.add_tokens([" " * 60_000])
        backend.decoder = decoders.Sequence([decoders.Fuse(), decoders.Strip(" ", 10**9, 0)])
        token_id = backend.token_to_id(" " * 60_000)
        detokenizer = Detokenizer(pieces_of(backend, "m"))
        start_s = time.thread_time()
        assert [detokenizer.push(token_id) for _ in range(20)] == [""] * 20
        assert detokenizer.push(backend.token_to_id("a")) == "a"
        assert detokenizer.push(token_id) == " " * 60_000
        assert time.thread_time() - start_s < 5
