"""GGUF files and directories of real models against their own tokenizers, over strings that go wrong easily.

The ids are those of the whole tokenizers; the data has the part of the vocabularies that the strings use (see
tests/data/tokenizers/make_comparison.py). The GGUF files are written as llama.cpp's converter writes them.
"""

from __future__ import annotations

import functools
import hashlib
import json
import lzma
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer as Backend

from ksana.tokenizers import Tokenizer, load_tokenizer
from tests.models_for_tests import gemma3_gguf, smollm2_gguf
from tests.tokenizers.test_gguf import BYTE, CONTROL, NORMAL, USER_DEFINED, write

DATA = Path(__file__).parents[1] / "data/tokenizers/comparison.json.xz"
MODELS = ("smollm2", "gemma3", "llama2", "mistral", "llama3_1", "qwen3")
UNKNOWN = 2
PRE = {"smollm2": "smollm", "llama3_1": "llama-bpe", "qwen3": "qwen2"}
ROLES = {
    "smollm2": {"bos": "<|im_start|>", "eos": "<|im_end|>", "unknown": "<|endoftext|>"},
    "gemma3": {"bos": "<bos>", "eos": "<eos>", "unknown": "<unk>", "padding": "<pad>"},
    "llama2": {"bos": "<s>", "eos": "</s>", "unknown": "<unk>"},
    "mistral": {"bos": "<s>", "eos": "</s>", "unknown": "<unk>"},
    "llama3_1": {"bos": "<|begin_of_text|>", "eos": "<|eot_id|>"},
    "qwen3": {"bos": "<|endoftext|>", "eos": "<|im_end|>", "padding": "<|endoftext|>"},
}
SWITCHES: dict[str, dict[str, bool]] = {
    "smollm2": {"add_bos_token": False, "add_space_prefix": False},
    "gemma3": {"add_bos_token": True, "add_eos_token": False, "add_space_prefix": False},
    "llama2": {"add_bos_token": True, "add_eos_token": False},
    "qwen3": {"add_bos_token": False},
}
GEMMA3_MERGES = "1f135fa7a1d9cbd85598122588c5e5a68e550d29aff370daab72a104cc602fae"
"""SHA-256 of the 514,906 merges of Gemma 3's own tokenizer.json, "left right" and a line feed each."""


@functools.cache
def data() -> dict[str, Any]:
    content: dict[str, Any] = json.loads(lzma.decompress(DATA.read_bytes()))
    return content


def texts() -> list[str]:
    listed: list[str] = data()["texts"]
    return listed


def check_runs(tokenizer: Tokenizer, name: str, ids: list[int] | None) -> None:
    """All runs of each of some sixty characters and pairs, against a digest of their ids."""
    start, stop = data()["lengths"]
    digests = data()["models"][name]["runs"]
    assert (start, stop) == (1, 301)
    for run, expected in zip(data()["run_of"], digests, strict=True):
        found = [tokenizer.encode(run * length, add_special_tokens=False) for length in range(start, stop)]
        if ids is not None:
            found = [[ids[token_id] for token_id in run_ids] for run_ids in found]
        assert hashlib.sha256(json.dumps(found).encode()).hexdigest() == expected, run


def directory_of(name: str, directory: Path) -> Path:
    model = data()["models"][name]
    (directory / "tokenizer.json").write_text(json.dumps(model["tokenizer"]))
    (directory / "tokenizer_config.json").write_text(json.dumps(model["config"]))
    return directory


def looks_special(token: str) -> bool:
    return (
        token == "<mask>" or token.startswith("<unused") or (token.startswith("<|") and token.endswith("|>"))
    )


def gguf_of(name: str, directory: Path) -> tuple[Path, list[int]]:
    """The model as a GGUF file, and the model's id for each of the file's, which leave no gap."""
    model = data()["models"][name]
    vocab: dict[str, int] = model["tokenizer"]["model"]["vocab"]
    tokens = sorted(vocab, key=vocab.__getitem__)
    added = {token["content"]: token["special"] for token in model["tokenizer"]["added_tokens"]}
    types = [
        NORMAL if token not in added else CONTROL if added[token] or looks_special(token) else USER_DEFINED
        for token in tokens
    ]
    values: dict[str, Any] = {"model": "gpt2"}
    if name in PRE:
        values |= {
            "pre": PRE[name],
            "merges": [" ".join(pair) for pair in model["tokenizer"]["model"]["merges"]],
        }
    else:
        types = [BYTE if token.startswith("<0x") else kind for token, kind in zip(tokens, types, strict=True)]
        values = {"model": "llama", "scores": [score(token, vocab[token]) for token in tokens]}
    if name == "gemma3":
        values["scores"] = [dict(zip(vocab, model["gguf"]["scores"], strict=True))[token] for token in tokens]
        types = [dict(zip(vocab, model["gguf"]["types"], strict=True))[token] for token in tokens]
        spelled = zip(tokens, types, strict=True)
        tokens = [token.replace("▁", " ") if kind == USER_DEFINED else token for token, kind in spelled]
    elif "<unk>" in tokens:
        types[tokens.index("<unk>")] = UNKNOWN
    values |= {"tokens": tokens, "token_type": types, **SWITCHES.get(name, {})}
    values |= {f"{role}_token_id": tokens.index(token) for role, token in ROLES[name].items()}
    path = write(directory / "m.gguf", values, architecture="gemma3" if name == "gemma3" else "llama")
    return path, sorted(vocab.values())


def score(token: str, token_id: int) -> float:
    """As in the SentencePiece models of Llama 2 and Mistral: by id, but runs of spaces come last."""
    if token_id < 259:
        return 0.0
    return -1e9 if len(token) > 1 and set(token) == {"▁"} else 259.0 - token_id


def check(tokenizer: Tokenizer, strings: list[str], expected: list[list[int]], ids: list[int] | None) -> None:
    for text, wanted in zip(strings, expected, strict=True):
        found = tokenizer.encode(text, add_special_tokens=False)
        if ids is not None:
            found = [ids[token_id] for token_id in found]
        assert found == wanted, (text[:80], len(text))


@pytest.mark.parametrize("name", MODELS)
class TestIds:
    def test_there_are_a_thousand_strings(self, name: str) -> None:
        assert len(set(texts())) >= 1000
        assert len(data()["models"][name]["ids"]) == len(texts())

    def test_a_directory_gives_the_ids_of_its_tokenizer_json(self, name: str, tmp_path: Path) -> None:
        tokenizer = load_tokenizer(directory_of(name, tmp_path))
        model = data()["models"][name]
        check(tokenizer, texts(), model["ids"], None)
        for text, ids in zip(texts()[:300], model["ids"], strict=False):
            assert tokenizer.encode(text) == model["prefix"] + ids

    def test_a_gguf_file_gives_the_ids_of_tokenizer_json(self, name: str, tmp_path: Path) -> None:
        path, real_ids = gguf_of(name, tmp_path)
        tokenizer = load_tokenizer(path)
        model = data()["models"][name]
        check(tokenizer, texts(), model["ids"], real_ids)
        for text, ids in zip(texts()[:300], model["ids"], strict=False):
            assert [real_ids[token_id] for token_id in tokenizer.encode(text)] == model["prefix"] + ids

    def test_a_gguf_file_cuts_runs_of_one_character_alike(self, name: str, tmp_path: Path) -> None:
        path, real_ids = gguf_of(name, tmp_path)
        check_runs(load_tokenizer(path), name, real_ids)

    @pytest.mark.parametrize("skip", [True, False])
    def test_decoded_texts_are_the_reference_s(self, name: str, skip: bool, tmp_path: Path) -> None:
        tokenizer = load_tokenizer(directory_of(name, tmp_path))
        path, real_ids = gguf_of(name, tmp_path)
        of_gguf = load_tokenizer(path)
        file_ids = {real_id: file_id for file_id, real_id in enumerate(real_ids)}
        model = data()["models"][name]
        reference = Backend.from_str(json.dumps(model["tokenizer"]))
        # Files count some tokens as control tokens that tokenizer.json does not call special.
        added = model["tokenizer"]["added_tokens"]
        unlike = {t["id"] for t in added if not t["special"] and file_ids[t["id"]] in of_gguf.special_ids}
        for ids in model["ids"]:
            text = reference.decode(ids, skip_special_tokens=skip)
            assert tokenizer.decode(ids, skip) == text
            if not (skip and unlike.intersection(ids)):
                assert of_gguf.decode([file_ids[token_id] for token_id in ids], skip) == text


@pytest.mark.parametrize(("name", "path"), [("gemma3", gemma3_gguf), ("smollm2", smollm2_gguf)])
@pytest.mark.slow
def test_the_real_files_give_the_ids_of_tokenizer_json(name: str, path: Any) -> None:
    """With the whole vocabularies: some 20,000 strings."""
    tokenizer = load_tokenizer(path())
    check(tokenizer, texts(), data()["models"][name]["ids"], None)
    check_runs(tokenizer, name, None)


@pytest.mark.slow
def test_gemma3_s_merges_are_those_of_its_tokenizer_json() -> None:
    """All 514,906, in their order."""
    model = json.loads(load_tokenizer(gemma3_gguf())._backend.to_str())["model"]
    lines = "".join(f"{left} {right}\n" for left, right in model["merges"])
    assert len(model["merges"]) == 514_906
    assert hashlib.sha256(lines.encode()).hexdigest() == GEMMA3_MERGES
