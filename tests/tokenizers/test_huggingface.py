"""Tokenizers from small Hugging Face directories written for each test."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Regex, decoders, normalizers, pre_tokenizers, processors
from tokenizers import Tokenizer as Backend

from ksana.errors import ModelLoadError
from ksana.messages.requests import ChatMessage
from ksana.tokenizers import Tokenizer, load_tokenizer
from ksana.tokenizers.post_processing import set_bos_eos
from tests.tokenizers.tiny_tokenizers import byte_level_backend, sentencepiece_backend

USER = [ChatMessage(role="user", content="ab")]
CONFIG: dict[str, Any] = {"bos_token": "<s>", "eos_token": {"content": "</s>", "special": True}}
SWITCHES = {"absent": None, "null": None, "true": True, "false": False}
BOS_EOS = [("<s>", 0), ("</s>", 1)]
ADDED: dict[str, tuple[Any, list[int], list[int]]] = {
    "nothing": (None, [], []),
    "byte level": (processors.ByteLevel(trim_offsets=False), [], []),
    "template without": (processors.TemplateProcessing(single="$A"), [], []),
    "template with BOS": (processors.TemplateProcessing(single="<s> $A", special_tokens=BOS_EOS), [0], []),
    "template with EOS": (processors.TemplateProcessing(single="$A </s>", special_tokens=BOS_EOS), [], [1]),
    "template with both": (
        processors.TemplateProcessing(single="<s> $A </s>", special_tokens=BOS_EOS),
        [0],
        [1],
    ),
    "template with another": (
        processors.TemplateProcessing(single="<|user|> $A <|user|>", special_tokens=[("<|user|>", 2)]),
        [2],
        [2],
    ),
    "sequence": (
        processors.Sequence(
            [
                processors.ByteLevel(trim_offsets=False),
                processors.TemplateProcessing(single="<s> $A", special_tokens=BOS_EOS),
            ]
        ),
        [0],
        [],
    ),
    "roberta": (processors.RobertaProcessing(("</s>", 1), ("<s>", 0)), [0], [1]),
    "bert": (processors.BertProcessing(("</s>", 1), ("<s>", 0)), [0], [1]),
}
"""Post-processors, with the ids that they add before and after a text."""


def switches(**names: str) -> dict[str, Any]:
    return {name: SWITCHES[value] for name, value in names.items() if value != "absent"}


def write(directory: Path, backend: Backend | None = None, **files: Any) -> Path:
    """Files by name, "." written "__"; dicts become JSON."""
    (backend or byte_level_backend()).save(str(directory / "tokenizer.json"))
    for name, content in {"tokenizer_config__json": CONFIG, **files}.items():
        text = content if isinstance(content, str) else json.dumps(content)
        (directory / name.replace("__", ".")).write_text(text)
    return directory


def load(directory: Path, backend: Backend | None = None, **files: Any) -> Tokenizer:
    return load_tokenizer(write(directory, backend, **files))


def test_ids_are_those_of_tokenizer_json(tmp_path: Path) -> None:
    for name, backend in (("b", byte_level_backend()), ("s", sentencepiece_backend())):
        (tmp_path / name).mkdir()
        tokenizer = load(tmp_path / name, backend)
        ids = tokenizer.encode("Hello world")
        assert ids == backend.encode("Hello world").ids
        assert tokenizer.decode(ids) == "Hello world"
        assert (tokenizer.bos_id, tokenizer.eos_ids, tokenizer.special_ids) == (0, (1,), {0, 1, 2})


class TestBosAndEos:
    @staticmethod
    def adding() -> Backend:
        backend = byte_level_backend()
        set_bos_eos(backend, "<s>", None)
        return backend

    def test_tokenizer_json_decides_when_the_configuration_is_silent(self, tmp_path: Path) -> None:
        assert load(tmp_path, self.adding()).encode("a")[0] == 0

    @pytest.mark.parametrize("added", list(ADDED))
    @pytest.mark.parametrize("bos", [*SWITCHES])
    @pytest.mark.parametrize("eos", [*SWITCHES])
    def test_each_switch_changes_its_own_token_and_nothing_else(
        self, tmp_path: Path, added: str, bos: str, eos: str
    ) -> None:
        """Absent and null leave what tokenizer.json's post-processor adds; true and false decide."""
        processor, before, after = ADDED[added]
        backend = byte_level_backend()
        if processor is not None:
            backend.post_processor = processor
        config = CONFIG | switches(add_bos_token=bos, add_eos_token=eos)
        if bos in ("true", "false"):
            before = [0] * (bos == "true") + [token_id for token_id in before if token_id != 0]
        if eos in ("true", "false"):
            after = [token_id for token_id in after if token_id != 1] + [1] * (eos == "true")
        tokenizer = load(tmp_path, backend, tokenizer_config__json=config)
        plain = backend.encode("ab a", add_special_tokens=False).ids
        assert tokenizer.encode("ab a") == before + plain + after
        assert tokenizer.encode("ab a", add_special_tokens=False) == plain
        assert tokenizer.encode("") == before + after

    def test_a_token_that_is_not_named_cannot_be_added(self, tmp_path: Path) -> None:
        config = {"add_bos_token": True, "add_eos_token": True, "eos_token": None}
        tokenizer = load(tmp_path, tokenizer_config__json=config)
        assert tokenizer.encode("a") == byte_level_backend().encode("a").ids

    def test_a_token_s_name_may_have_what_templates_read_as_their_own(self, tmp_path: Path) -> None:
        config = {"bos_token": "$A:0 <x>", "eos_token": "</s>", "add_bos_token": True, "add_eos_token": True}
        tokenizer = load(tmp_path, tokenizer_config__json=config)
        assert tokenizer.encode("a")[0] == tokenizer.bos_id == byte_level_backend().get_vocab_size()

    @pytest.mark.parametrize("value", ["true", 1, [], {}])
    def test_a_switch_that_is_none_is_an_error(self, tmp_path: Path, value: Any) -> None:
        with pytest.raises(
            ModelLoadError, match=r"add_bos_token in tokenizer_config\.json is .*not true or false"
        ):
            load(tmp_path, tokenizer_config__json=CONFIG | {"add_bos_token": value})

    def test_padding_and_truncation_of_the_file_are_off(self, tmp_path: Path) -> None:
        backend = self.adding()
        backend.enable_truncation(3)
        backend.enable_padding(length=20)
        assert len(load(tmp_path, backend).encode("x" * 10)) == 11


class TestAddedTokens:
    def test_tokens_added_later_get_the_ids_stated(self, tmp_path: Path) -> None:
        size = byte_level_backend().get_vocab_size()
        later = {
            str(size): {"content": "<tool>", "special": False},
            str(size + 1): {"content": "<|end|>", "special": True},
        }
        tokenizer = load(tmp_path, tokenizer_config__json=CONFIG | {"added_tokens_decoder": later})
        assert tokenizer.encode("<tool><|end|>") == [size, size + 1]
        assert tokenizer.decode([size, size + 1]) == "<tool>"
        assert tokenizer.vocab_size == size + 2

    def test_contradicting_ids_are_an_error(self, tmp_path: Path) -> None:
        later = {"7": {"content": "<s>", "special": True}}
        with pytest.raises(ModelLoadError, match=r"'<s>' is 0 in tokenizer\.json and 7"):
            load(tmp_path, tokenizer_config__json=CONFIG | {"added_tokens_decoder": later})

    def test_roles_may_be_in_the_older_file(self, tmp_path: Path) -> None:
        roles = {"eos_token": "<|user|>", "additional_special_tokens": ["<x>"]}
        tokenizer = load(
            tmp_path, special_tokens_map__json=roles, tokenizer_config__json={"bos_token": "<s>"}
        )
        assert tokenizer.eos_ids == (2,)
        assert tokenizer.decode(tokenizer.encode("a<x>b")) == "ab"


class TestEndOfSequence:
    def test_generation_config_and_config_add_ids(self, tmp_path: Path) -> None:
        tokenizer = load(
            tmp_path, generation_config__json={"eos_token_id": [2, 1]}, config__json={"eos_token_id": 5}
        )
        assert tokenizer.eos_ids == (1, 2, 5)


class TestChatTemplate:
    def test_there_may_be_none(self, tmp_path: Path) -> None:
        assert not load(tmp_path).has_chat_template

    def test_from_the_configuration(self, tmp_path: Path) -> None:
        config = CONFIG | {"chat_template": "{{ bos_token }}{{ messages[0].content }}{{ eos_token }}"}
        assert load(tmp_path, tokenizer_config__json=config).render_chat(USER) == "<s>ab</s>"

    def test_the_default_of_several(self, tmp_path: Path) -> None:
        several = [{"name": "tool_use", "template": "t"}, {"name": "default", "template": "d"}]
        config = CONFIG | {"chat_template": several}
        assert load(tmp_path, tokenizer_config__json=config).render_chat(USER) == "d"

    def test_files_of_their_own_win(self, tmp_path: Path) -> None:
        config = CONFIG | {"chat_template": "config"}
        files = {"tokenizer_config__json": config, "chat_template__json": {"chat_template": "json"}}
        assert load(tmp_path, **files).render_chat(USER) == "json"
        assert load(tmp_path, chat_template__jinja="jinja", **files).render_chat(USER) == "jinja"
        assert load_tokenizer(tmp_path, "given").render_chat(USER) == "given"


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"tokenizer__json": "{"}, r"tokenizer\.json: the tokenizer cannot be read"),
        ({"tokenizer_config__json": "[1]"}, r"tokenizer_config\.json: not a JSON object"),
        ({"generation_config__json": "{]"}, r"generation_config\.json: not a JSON object"),
        ({"tokenizer_config__json": {"chat_template": 5}}, "chat_template is neither"),
        (
            {"tokenizer_config__json": {"added_tokens_decoder": {"x": {"content": "a"}}}},
            "added_tokens_decoder",
        ),
        ({"tokenizer_config__json": {"added_tokens_decoder": {"5": {}}}}, "5 has no content"),
        (
            {"tokenizer_config__json": {"added_tokens_decoder": [1]}},
            "added_tokens_decoder is not an object of ids",
        ),
    ],
)
def test_broken_files_are_named(tmp_path: Path, files: dict[str, Any], message: str) -> None:
    write(tmp_path)
    for name, content in files.items():
        text = content if isinstance(content, str) else json.dumps(content)
        (tmp_path / name.replace("__", ".")).write_text(text)
    with pytest.raises(ModelLoadError, match=message):
        load_tokenizer(tmp_path)


def test_no_tokenizer_json(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match=r"tokenizer\.json: no such file"):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer.model").touch()
    with pytest.raises(ModelLoadError, match=r"tokenizer\.model alone"):
        load_tokenizer(tmp_path)


def test_a_decoder_that_cannot_be_streamed_is_refused(tmp_path: Path) -> None:
    backend = byte_level_backend()
    backend.decoder = decoders.WordPiece()
    with pytest.raises(ModelLoadError, match="WordPiece"):
        load(tmp_path, backend)


@pytest.mark.slow
def test_what_tokenizer_json_adds_is_what_transformers_adds(tmp_path: Path) -> None:
    """Where the configuration has no say. (Since version 5 transformers reads neither switch beside a
    tokenizer.json; before it, and here, true and false decide.) Imports transformers, which takes seconds."""
    from transformers import AutoTokenizer

    for number, (processor, _, _) in enumerate(ADDED.values()):
        for bos, eos in itertools.product(("absent", "null"), repeat=2):
            directory = tmp_path / f"{number}-{bos}-{eos}"
            directory.mkdir()
            backend = byte_level_backend()
            if processor is not None:
                backend.post_processor = processor
            config = {"bos_token": "<s>", "eos_token": "</s>"}
            config |= switches(add_bos_token=bos, add_eos_token=eos)
            tokenizer = load(directory, backend, tokenizer_config__json=config)
            assert tokenizer.encode("ab a") == AutoTokenizer.from_pretrained(directory).encode("ab a")


@pytest.mark.slow
def test_directories_that_transformers_writes_give_its_ids(tmp_path: Path) -> None:
    """Imports transformers, which takes seconds."""
    from transformers import AutoTokenizer

    from tests.models_for_tests import gemma3_gguf, smollm2_gguf
    from tests.tokenizers.test_references import TEXTS

    for path in (smollm2_gguf(), gemma3_gguf()):
        reference = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
        directory = tmp_path / path.stem
        reference.save_pretrained(directory)
        tokenizer = load_tokenizer(directory)
        for text in TEXTS:
            assert tokenizer.encode(text) == reference.encode(text)
            ids = tokenizer.encode(text, add_special_tokens=False)
            assert ids == reference.encode(text, add_special_tokens=False)
            assert tokenizer.decode(ids) == reference.decode(ids, skip_special_tokens=True)
        if tokenizer.has_chat_template:
            messages = [{"role": "user", "content": "Hi"}]
            ids = reference.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
            assert tokenizer.chat([ChatMessage(role="user", content="Hi")]) == ids


class TestWhatExplodes:
    def test_the_dropout_of_merges_is_left_out(
        self, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        """The same prompt has the same ids, always."""
        backend = byte_level_backend()
        backend.model.dropout = 0.5
        tokenizer = load(tmp_path, backend)
        expected = byte_level_backend().encode("abc STOP").ids
        assert all(tokenizer.encode("abc STOP", False) == expected for _ in range(50))
        assert "dropout" in caplog.text

    def test_truncation_and_padding_of_the_file_are_left_out(self, tmp_path: Path) -> None:
        backend = byte_level_backend()
        backend.enable_truncation(2)
        backend.enable_padding(length=50)
        ids = load(tmp_path, backend).encode("xyz", False)
        assert ids == byte_level_backend().encode("xyz").ids

    def test_a_token_longer_than_any_real_one(self, tmp_path: Path) -> None:
        backend = byte_level_backend()
        backend.add_tokens(["x" * 200_000])
        with pytest.raises(ModelLoadError, match="a token has 200000 characters; 131072 are allowed"):
            load(tmp_path, backend)

    def test_a_token_of_the_configuration_that_would_explode(self, tmp_path: Path) -> None:
        backend = byte_level_backend()
        backend.normalizer = normalizers.Sequence([normalizers.Replace("a", "a" * 10)] * 8)
        token = {"content": "aaa", "normalized": True}
        config = CONFIG | {"added_tokens_decoder": {str(backend.get_vocab_size()): token}}
        with pytest.raises(ModelLoadError, match="not known to be bounded"):
            load(tmp_path, backend, tokenizer_config__json=config)
        token["normalized"] = False
        load(tmp_path, backend, tokenizer_config__json=config).close()

    def test_a_tokenizer_that_is_guarded_has_the_ids_of_its_file(self, tmp_path: Path) -> None:
        backend = byte_level_backend()
        backend.pre_tokenizer = pre_tokenizers.Sequence(
            [pre_tokenizers.Split(Regex("b+(?=c)|x"), "isolated"), backend.pre_tokenizer]
        )
        tokenizer = load(tmp_path, backend)
        assert tokenizer.encoding.guarded_because is not None
        for text in ("abc", "bbbc", "xaxbc STOP", "", "é"):
            assert tokenizer.encode(text, False) == backend.encode(text).ids
        tokenizer.close()
