"""Models from the Hugging Face hub, through its own client, cache and environment variables. No torch."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import huggingface_hub
from huggingface_hub import errors as hub_errors

from ksana.errors import ModelLoadError
from ksana.models.wheel_files import Report

CONFIG_FILES = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.json",
    "chat_template.jinja",
)
WEIGHT_FILE = re.compile(r"model(-\d+-of-\d+)?\.safetensors(\.index\.json)?")
SHOWN_FILES = 12
LISTING_TIMEOUT_S = 20.0
HttpError: type[Exception] = hub_errors.HfHubHTTPError.__bases__[0]
"""What the client's HTTP library raises, answers and lost connections alike. Which library it is depends on
the client's version."""


def fetch_directory(repo: str, revision: str | None, report: Report) -> Path:
    """Configuration, tokenizer and safetensors of a repository: the directory in the hub's cache."""
    with _explained(repo, revision):
        names = _file_names(repo, revision)
        if names is None:
            report(f"{repo}: offline, taking it from the hub's cache")
            return _from_cache(repo, revision, [*CONFIG_FILES, "model*.safetensors*"])
        wanted = [name for name in names if name in CONFIG_FILES or WEIGHT_FILE.fullmatch(name)]
        if not any(WEIGHT_FILE.fullmatch(name) for name in wanted):
            raise ModelLoadError(f"{_title(repo, revision)} has no model.safetensors: {_what_else(names)}")
        report(f"Fetching {_title(repo, revision)}: {len(wanted)} files into the hub's cache")
        return Path(huggingface_hub.snapshot_download(repo, revision=revision, allow_patterns=wanted))


def fetch_gguf(repo: str, revision: str | None, quant: str, report: Report) -> Path:
    """The one GGUF file of a repository whose name holds `quant` (Q4_K_M) as a word."""
    with _explained(repo, revision):
        names = _file_names(repo, revision)
        if names is None:
            report(f"{repo}: offline, taking it from the hub's cache")
            folder = _from_cache(repo, revision, ["*.gguf"])
            names = [str(path.relative_to(folder)) for path in folder.rglob("*.gguf")]
            return folder / _one_gguf(names, quant, f"the cached {_title(repo, revision)}")
        name = _one_gguf(names, quant, _title(repo, revision))
        report(f"Fetching {name} of {_title(repo, revision)} into the hub's cache")
        return Path(huggingface_hub.hf_hub_download(repo, name, revision=revision))


def _one_gguf(names: list[str], quant: str, title: str) -> str:
    ggufs = sorted(name for name in names if name.lower().endswith(".gguf"))
    as_word = re.compile(rf"(?<![a-z0-9_]){re.escape(quant.lower())}(?![a-z0-9_])")
    matching = [name for name in ggufs if as_word.search(name.lower())]
    if len(matching) == 1:
        return matching[0]
    if matching:
        raise ModelLoadError(f"{title} has {len(matching)} GGUF files for {quant}: {_listed(matching)}")
    if ggufs:
        raise ModelLoadError(f"{title} has no GGUF file for {quant}, but: {_listed(ggufs)}")
    raise ModelLoadError(f"{title} has no GGUF files at all")


def _what_else(names: list[str]) -> str:
    ggufs = [name for name in names if name.lower().endswith(".gguf")]
    if ggufs:
        return f"its GGUF files are asked for as org/name:QUANT: {_listed(ggufs)}"
    if any(name.endswith((".bin", ".pt", ".pth")) for name in names):
        return "only pickled weights, which can run code and are not read; convert them to safetensors"
    return f"it has {_listed(names) or 'no files'}"


def _listed(names: list[str]) -> str:
    more = f" and {len(names) - SHOWN_FILES} more" if len(names) > SHOWN_FILES else ""
    return ", ".join(sorted(names)[:SHOWN_FILES]) + more


def _file_names(repo: str, revision: str | None) -> list[str] | None:
    """What the repository holds; None when the hub cannot be reached (or must not be)."""
    try:
        info = huggingface_hub.HfApi().model_info(repo, revision=revision, timeout=LISTING_TIMEOUT_S)
    except hub_errors.HfHubHTTPError:
        raise
    except (hub_errors.OfflineModeIsEnabled, HttpError, ConnectionError):
        return None
    return [sibling.rfilename for sibling in info.siblings or ()]


def _from_cache(repo: str, revision: str | None, patterns: list[str]) -> Path:
    return Path(
        huggingface_hub.snapshot_download(
            repo, revision=revision, allow_patterns=patterns, local_files_only=True
        )
    )


def _title(repo: str, revision: str | None) -> str:
    return f"{repo}@{revision}" if revision else repo


@contextmanager
def _explained(repo: str, revision: str | None) -> Iterator[None]:
    """Turn what the client raises into one clear line."""
    title = _title(repo, revision)
    try:
        yield
    except hub_errors.GatedRepoError:
        raise ModelLoadError(
            f"{title}: access has to be granted on the hub first; then set HF_TOKEN to that account's token"
        ) from None
    except hub_errors.RevisionNotFoundError:
        raise ModelLoadError(f"{title}: there is no such revision on the hub") from None
    except hub_errors.RepositoryNotFoundError:
        raise ModelLoadError(
            f"{title}: no such repository on the hub (or a private one: then set HF_TOKEN)"
        ) from None
    except hub_errors.LocalEntryNotFoundError:
        raise ModelLoadError(f"{title}: the hub cannot be reached and its cache does not hold it") from None
    except (hub_errors.HfHubHTTPError, hub_errors.HFValidationError, HttpError, OSError) as error:
        first_line = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ModelLoadError(f"{title}: could not be fetched from the hub: {first_line}") from None
