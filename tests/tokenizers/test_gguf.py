"""Tokenizers from small GGUF files written for each test."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from gguf import GGUFWriter

from ksana.errors import ModelLoadError
from ksana.messages.requests import ChatMessage
from ksana.tokenizers import Tokenizer, load_tokenizer
from ksana.tokenizers.pieces import byte_alphabet

NORMAL, CONTROL, USER_DEFINED, BYTE = 1, 3, 4, 6
BYTE_LEVEL_TOKENS = ["<s>", "</s>", "<|im_end|>", "<tool>", *byte_alphabet().values(), "ab", "Ġa", "12"]
BYTE_LEVEL: dict[str, Any] = {
    "model": "gpt2",
    "pre": "gpt-2",
    "tokens": BYTE_LEVEL_TOKENS,
    "token_type": [CONTROL] * 3 + [USER_DEFINED] + [NORMAL] * (len(BYTE_LEVEL_TOKENS) - 4),
    "merges": ["a b", "Ġ a", "1 2"],
    "bos_token_id": 0,
    "eos_token_id": 1,
}
WORDS = ["▁", "a", "b", "c", "ab", "bc", "abc", "▁a"]
SENTENCEPIECE: dict[str, Any] = {
    "model": "llama",
    "tokens": ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *WORDS],
    "scores": [0.0] * 259 + [-9.0, -9.0, -9.0, -9.0, -2.0, -1.0, -3.0, -4.0],
    "token_type": [2, CONTROL, CONTROL] + [BYTE] * 256 + [NORMAL] * len(WORDS),
    "bos_token_id": 1,
    "eos_token_id": 2,
    "unknown_token_id": 0,
}


def write(
    path: Path, values: dict[str, Any], template: str | None = None, architecture: str = "llama"
) -> Path:
    writer = GGUFWriter(path, architecture)
    for name, value in values.items():
        key = f"tokenizer.ggml.{name}"
        if isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, int):
            writer.add_uint32(key, value)
        elif isinstance(value, str):
            writer.add_string(key, value)
        else:
            writer.add_array(key, value)
    if template is not None:
        writer.add_string("tokenizer.chat_template", template)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return path


def load(directory: Path, base: dict[str, Any], template: str | None = None, **changes: Any) -> Tokenizer:
    architecture = changes.pop("architecture", "llama")
    values = {key: value for key, value in {**base, **changes}.items() if value is not None}
    return load_tokenizer(write(directory / "m.gguf", values, template, architecture))


def pieces(tokenizer: Tokenizer, text: str) -> list[str]:
    return [tokenizer._backend.id_to_token(i) for i in tokenizer.encode(text, add_special_tokens=False)]


class TestByteLevel:
    def test_words_merges_and_whole_tokens(self, tmp_path: Path) -> None:
        tokenizer = load(tmp_path, BYTE_LEVEL)
        assert pieces(tokenizer, "ab a<tool>é</s>") == ["ab", "Ġa", "<tool>", "Ã", "©", "</s>"]
        assert tokenizer.decode(tokenizer.encode("ab a<tool>é</s>")) == "ab a<tool>é"

    def test_the_named_pre_tokenizer_decides_how_digits_are_cut(self, tmp_path: Path) -> None:
        assert pieces(load(tmp_path, BYTE_LEVEL), "12") == ["12"]
        assert pieces(load(tmp_path, BYTE_LEVEL, pre="smollm"), "12") == ["1", "2"]
        assert pieces(load(tmp_path, BYTE_LEVEL, pre="qwen2"), "12") == ["1", "2"]
        assert pieces(load(tmp_path, BYTE_LEVEL, pre="llama-bpe"), "12") == ["12"]

    def test_no_name_means_gpt2_s_words(self, tmp_path: Path) -> None:
        assert pieces(load(tmp_path, BYTE_LEVEL, pre=None), "ab  12") == ["ab", "Ġ", "Ġ", "12"]

    def test_an_unknown_name_is_an_error_that_lists_the_known(self, tmp_path: Path) -> None:
        with pytest.raises(ModelLoadError, match=r"m\.gguf.*'no-such'.*llama-bpe.*smollm"):
            load(tmp_path, BYTE_LEVEL, pre="no-such")

    @pytest.mark.parametrize(
        ("changes", "has_bos"),
        [
            ({}, False),
            ({"add_bos_token": True}, True),
            ({"pre": "llama-bpe"}, True),
            ({"pre": "llama-bpe", "add_bos_token": False}, False),
        ],
    )
    def test_bos_is_added_where_the_file_or_its_kind_says_so(
        self, tmp_path: Path, changes: dict[str, Any], has_bos: bool
    ) -> None:
        assert (load(tmp_path, BYTE_LEVEL, **changes).encode("a")[0] == 0) == has_bos

    def test_eos_is_added_on_request(self, tmp_path: Path) -> None:
        assert load(tmp_path, BYTE_LEVEL, add_eos_token=True).encode("a")[-1] == 1

    def test_llama3_takes_a_word_that_is_a_token_whole(self, tmp_path: Path) -> None:
        tokens = [*BYTE_LEVEL_TOKENS, "xyz"]
        types = [*BYTE_LEVEL["token_type"], NORMAL]
        assert pieces(
            load(tmp_path, BYTE_LEVEL, pre="llama-bpe", tokens=tokens, token_type=types), "xyz"
        ) == ["xyz"]


class TestSentencePiece:
    def test_the_best_score_is_joined_first(self, tmp_path: Path) -> None:
        tokenizer = load(tmp_path, SENTENCEPIECE, add_space_prefix=False)
        assert pieces(tokenizer, "abc") == ["abc"]
        better = list(SENTENCEPIECE["scores"])
        better[-3], better[-2] = -1.0, -9.0  # abc is worse than bc and ab; without "a bc" it stays two
        tokens = [token if token != "abc" else "xyz" for token in SENTENCEPIECE["tokens"]]
        assert pieces(load(tmp_path, SENTENCEPIECE, tokens=tokens, add_space_prefix=False), "abc") == [
            "a",
            "bc",
        ]

    def test_a_space_is_written_before_the_text_unless_the_file_says_no(self, tmp_path: Path) -> None:
        with_prefix = load(tmp_path, SENTENCEPIECE)
        assert pieces(with_prefix, "a b") == ["▁a", "▁", "b"]
        assert with_prefix.decode(with_prefix.encode("a b")) == "a b"
        without = load(tmp_path, SENTENCEPIECE, add_space_prefix=False)
        assert pieces(without, "a b") == ["a", "▁", "b"]
        assert without.decode(without.encode(" a")) == " a"

    def test_what_the_vocabulary_lacks_becomes_bytes(self, tmp_path: Path) -> None:
        tokenizer = load(tmp_path, SENTENCEPIECE)
        assert pieces(tokenizer, "é") == ["▁", "<0xC3>", "<0xA9>"]
        assert tokenizer.decode(tokenizer.encode("aé😀")) == "aé😀"

    def test_bos_is_added_unless_the_file_says_no(self, tmp_path: Path) -> None:
        assert load(tmp_path, SENTENCEPIECE).encode("a")[0] == 1
        assert load(tmp_path, SENTENCEPIECE, add_bos_token=False).encode("a")[0] != 1

    @pytest.mark.parametrize(
        ("switches", "before", "after"),
        [
            ({}, [1], []),
            ({"add_bos_token": True}, [1], []),
            ({"add_bos_token": False}, [], []),
            ({"add_eos_token": True}, [1], [2]),
            ({"add_eos_token": False}, [1], []),
            ({"add_bos_token": False, "add_eos_token": True, "add_sep_token": True}, [], [2]),
        ],
    )
    def test_bos_and_eos_are_switched_one_by_one(
        self, tmp_path: Path, switches: dict[str, bool], before: list[int], after: list[int]
    ) -> None:
        tokenizer = load(tmp_path, SENTENCEPIECE, **switches)
        plain = tokenizer.encode("a</s>b", add_special_tokens=False)
        assert tokenizer.encode("a</s>b") == before + plain + after
        assert tokenizer.encode("") == before + after

    def test_unnamed_tokens_are_where_sentencepiece_has_them(self, tmp_path: Path) -> None:
        unnamed = {"bos_token_id": None, "eos_token_id": None, "unknown_token_id": None}
        tokenizer = load(tmp_path, SENTENCEPIECE, **unnamed)
        assert (tokenizer.bos_id, tokenizer.eos_ids, tokenizer.encode("a")[0]) == (1, (2,), 1)
        types = [2, NORMAL, NORMAL, *SENTENCEPIECE["token_type"][3:]]  # but only if they are of that kind
        tokenizer = load(tmp_path, SENTENCEPIECE, **unnamed, token_type=types)
        assert (tokenizer.bos_id, tokenizer.eos_ids) == (None, ())

    def test_leading_spaces_are_kept(self, tmp_path: Path) -> None:
        tokenizer = load(tmp_path, SENTENCEPIECE)
        assert pieces(tokenizer, " a") == ["▁", "▁a"]
        assert pieces(tokenizer, "  a ") == ["▁", "▁", "▁a", "▁"]
        assert pieces(tokenizer, "▁a") == ["▁", "▁a"]
        assert pieces(tokenizer, "") == []
        for text in ("a", " a", "  a", " ", "▁ a".replace("▁", " ")):
            assert tokenizer.decode(tokenizer.encode(text)) == text

    def test_every_stretch_after_a_whole_token_gets_its_space(self, tmp_path: Path) -> None:
        tokenizer = load(tmp_path, SENTENCEPIECE)
        assert pieces(tokenizer, "a</s>b") == ["▁a", "</s>", "▁", "b"]
        assert pieces(tokenizer, "<s>a</s> a") == ["<s>", "▁a", "</s>", "▁", "▁a"]
        assert pieces(tokenizer, "</s></s>") == ["</s>", "</s>"]
        without = load(tmp_path, SENTENCEPIECE, add_space_prefix=False)
        assert pieces(without, "a</s>b </s> a") == ["a", "</s>", "b", "▁", "</s>", "▁a"]

    def test_byte_tokens_written_out_are_text(self, tmp_path: Path) -> None:
        tokenizer = load(tmp_path, SENTENCEPIECE)
        assert tokenizer.decode(tokenizer.encode("<0x41>")) == "<0x41>"

    def test_gemma_spells_runs_of_spaces_anew(self, tmp_path: Path) -> None:
        tokens = [*SENTENCEPIECE["tokens"], "  "]
        tokenizer = load(
            tmp_path,
            SENTENCEPIECE,
            architecture="gemma3",
            tokens=tokens,
            scores=[*SENTENCEPIECE["scores"], -5.0],
            token_type=[*SENTENCEPIECE["token_type"], USER_DEFINED],
        )
        assert pieces(tokenizer, "abc  ") == ["abc", "▁▁"]
        assert pieces(tokenizer, "▁▁ ▁▁") == ["▁▁", "▁", "▁▁"]  # whole where it is written, before joining
        assert tokenizer.decode(tokenizer.encode(" a  b")) == " a  b"

    @pytest.mark.parametrize("score", [-1000.0, 0.0])
    def test_gemma_joins_what_was_added_by_hand_first(self, tmp_path: Path, score: float) -> None:
        """Spaces are joined before a space and a letter are, whatever score the file's maker put there."""
        runs = ["  ", "   "]
        tokenizer = load(
            tmp_path,
            SENTENCEPIECE,
            architecture="gemma3",
            tokens=[*SENTENCEPIECE["tokens"], *runs],
            scores=[*SENTENCEPIECE["scores"], score, score],
            token_type=[*SENTENCEPIECE["token_type"], USER_DEFINED, USER_DEFINED],
        )
        assert pieces(tokenizer, " a") == ["▁a"]
        assert pieces(tokenizer, "  a") == ["▁▁", "a"]
        assert pieces(tokenizer, "    a") == ["▁▁▁", "▁a"]


class TestSpecialTokens:
    def test_end_of_turn_tokens_end_an_answer_too(self, tmp_path: Path) -> None:
        assert load(tmp_path, BYTE_LEVEL).eos_ids == (1,)
        assert load(tmp_path, BYTE_LEVEL, template="{{ 'x' }}<|im_end|>").eos_ids == (1, 2)
        assert load(tmp_path, BYTE_LEVEL, eot_token_id=2).eos_ids == (1, 2)

    def test_templates_know_the_special_tokens(self, tmp_path: Path) -> None:
        tokenizer = load(
            tmp_path, BYTE_LEVEL, template="{{ bos_token }}{{ messages[0].content }}{{ eos_token }}"
        )
        assert tokenizer.chat([ChatMessage(role="user", content="ab")])[0] == 0

    def test_another_template_can_be_given(self, tmp_path: Path) -> None:
        path = write(tmp_path / "m.gguf", BYTE_LEVEL, template="one")
        assert load_tokenizer(path, "two").render_chat([ChatMessage(role="user", content="")]) == "two"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": "bert"}, "'bert'.*is not gpt2 or llama"),
        ({"tokens": None}, "no list tokenizer.ggml.tokens"),
        ({"merges": None}, "no list tokenizer.ggml.merges"),
        ({"merges": ["a b", "abc"]}, "not a pair"),
        ({"merges": ["a zz"]}, "m.gguf"),
        ({"token_type": [1, 2]}, "2 items for"),
        ({"bos_token_id": 99999}, "bos_token_id is 99999"),
        ({"tokens": [*BYTE_LEVEL_TOKENS[:-1], "<s>"]}, "a token twice"),
    ],
)
def test_broken_metadata_is_named(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelLoadError, match=message):
        load(tmp_path, BYTE_LEVEL, **changes)


def test_sentencepiece_needs_scores(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match="scores"):
        load(tmp_path, SENTENCEPIECE, scores=None)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"scores": [0.0] * 266 + [float("nan")]}, "scores has an item that is not finite"),
        ({"scores": [0.0] * 266 + [float("inf")]}, "scores has an item that is not finite"),
        ({"scores": ["0"] * 267}, "item 0 of tokenizer.ggml.scores is a str"),
        ({"tokens": list(range(267))}, "item 0 of tokenizer.ggml.tokens is a int"),
        ({"token_type": [1.5] * 267}, "item 0 of tokenizer.ggml.token_type is a float"),
        ({"tokens": [*SENTENCEPIECE["tokens"][:-1], "a" * 100_000]}, "too long to find their merges.*100000"),
    ],
)
def test_broken_sentencepiece_metadata_is_named(
    tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ModelLoadError, match=message):
        load(tmp_path, SENTENCEPIECE, **changes)


def test_a_path_that_is_neither_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match=r"neither a directory nor a \.gguf"):
        load_tokenizer(tmp_path / "model.bin")
