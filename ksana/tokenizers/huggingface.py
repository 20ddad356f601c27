"""The tokenizer of a Hugging Face directory.

tokenizer.json holds the whole of it for the `tokenizers` package; tokenizer_config.json (and, in older
directories, special_tokens_map.json) adds roles of tokens, tokens added later, whether BOS and EOS are
added, and the chat template; generation_config.json and config.json name more tokens that end an answer.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tokenizers import AddedToken
from tokenizers import Tokenizer as Backend

from ksana.errors import ModelLoadError
from ksana.tokenizers.chat_template import ChatTemplate
from ksana.tokenizers.guarded_encoding import check_added, load_backend
from ksana.tokenizers.pieces import pieces_of
from ksana.tokenizers.post_processing import set_bos_eos
from ksana.tokenizers.tokenizer import SpecialTokens, Tokenizer

_MAX_JSON_BYTES = 256 << 20
_ROLES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_EXTRA_ROLES = ("additional_special_tokens", "extra_special_tokens")


def load_huggingface_tokenizer(directory: Path, chat_template: str | None = None) -> Tokenizer:
    """Build the tokenizer of a directory. `chat_template` replaces the directory's own.

    Raises ModelLoadError for files that are missing, unreadable or contradict each other.
    """
    file = directory / "tokenizer.json"
    backend = _read_backend(file)
    config = {
        **_read_json(directory / "special_tokens_map.json"),
        **_read_json(directory / "tokenizer_config.json"),
    }
    named = {role: token for role in _ROLES if (token := _spelling(config.get(role))) is not None}
    check_added(backend, config.get("added_tokens_decoder"), str(directory))
    _add_tokens(backend, config, named, str(directory))
    if "add_bos_token" in config or "add_eos_token" in config:
        set_bos_eos(
            backend,
            bos=named.get("bos_token") if config.get("add_bos_token") else None,
            eos=named.get("eos_token") if config.get("add_eos_token") else None,
        )
    template = chat_template if chat_template is not None else _chat_template(directory, config)
    special = SpecialTokens(
        named, _id_of(backend, named.get("bos_token")), _eos_ids(directory, backend, named)
    )
    return Tokenizer(
        backend,
        pieces_of(backend, str(file)),
        special,
        ChatTemplate(template, named, str(directory)) if template is not None else None,
        str(file),
    )


def _read_backend(file: Path) -> Backend:
    if not file.is_file():
        hint = " (tokenizer.model alone is not enough: convert it with transformers)"
        has_model = (file.parent / "tokenizer.model").exists()
        raise ModelLoadError(f"{file}: no such file{hint if has_model else ''}")
    try:
        backend = load_backend(file.read_bytes(), str(file))
    except OSError as error:
        raise ModelLoadError(f"{file}: the tokenizer cannot be read: {error}") from error
    backend.no_truncation()
    backend.no_padding()
    return backend


def _read_json(file: Path) -> dict[str, Any]:
    """A JSON object from a file; empty if there is no such file."""
    if not file.is_file():
        return {}
    try:
        if file.stat().st_size > _MAX_JSON_BYTES:
            raise ModelLoadError(f"{file}: larger than {_MAX_JSON_BYTES} bytes")
        content = json.loads(file.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise ModelLoadError(f"{file}: cannot be read as JSON: {error}") from error
    if not isinstance(content, dict):
        raise ModelLoadError(f"{file}: not a JSON object")
    return content


def _spelling(token: Any) -> str | None:
    """A token is written as its text, or as an object with `content`."""
    if isinstance(token, Mapping):
        token = token.get("content")
    return token if isinstance(token, str) and token else None


def _add_tokens(backend: Backend, config: Mapping[str, Any], named: Mapping[str, str], source: str) -> None:
    """Add what the configuration has and tokenizer.json lacks, in the order of the ids it states."""
    later = config.get("added_tokens_decoder") or {}
    if not isinstance(later, Mapping) or not all(token_id.isdecimal() for token_id in later):
        raise ModelLoadError(f"{source}: added_tokens_decoder is not an object of ids")
    for token_id, token in sorted(later.items(), key=lambda item: int(item[0])):
        content = _spelling(token)
        if content is None or not isinstance(token, Mapping):
            raise ModelLoadError(f"{source}: added token {token_id} has no content")
        flags = {
            flag: bool(token.get(flag, False))
            for flag in ("single_word", "lstrip", "rstrip", "normalized", "special")
        }
        backend.add_tokens([AddedToken(content, **flags)])
        if backend.token_to_id(content) != int(token_id):
            raise ModelLoadError(
                f"{source}: the token {content!r} is {backend.token_to_id(content)} in tokenizer.json"
                f" and {token_id} in tokenizer_config.json"
            )
    extra = [_spelling(token) for role in _EXTRA_ROLES for token in _listed(config.get(role))]
    known = {token.content for token in backend.get_added_tokens_decoder().values()}
    for content in (*named.values(), *extra):
        if content is not None and content not in known:
            backend.add_special_tokens([AddedToken(content, normalized=False, special=True)])


def _listed(value: Any) -> list[Any]:
    if isinstance(value, Mapping):
        return list(value.values())
    return value if isinstance(value, list) else []


def _chat_template(directory: Path, config: Mapping[str, Any]) -> str | None:
    alone = directory / "chat_template.jinja"
    if alone.is_file():
        if alone.stat().st_size > _MAX_JSON_BYTES:
            raise ModelLoadError(f"{alone}: larger than {_MAX_JSON_BYTES} bytes")
        return alone.read_text(encoding="utf-8")
    template = _read_json(directory / "chat_template.json").get("chat_template", config.get("chat_template"))
    if isinstance(template, list):  # several, each with a name
        named = {item.get("name"): item.get("template") for item in template if isinstance(item, Mapping)}
        template = named.get("default")
    if template is not None and not isinstance(template, str):
        raise ModelLoadError(
            f"{directory}: chat_template is neither a text nor a list with one named default"
        )
    return template


def _id_of(backend: Backend, token: str | None) -> int | None:
    return None if token is None else backend.token_to_id(token)


def _eos_ids(directory: Path, backend: Backend, named: Mapping[str, str]) -> tuple[int, ...]:
    ids = [_id_of(backend, named.get("eos_token"))]
    for name in ("generation_config.json", "config.json"):
        value = _read_json(directory / name).get("eos_token_id")
        ids += value if isinstance(value, list) else [value]
    return tuple(dict.fromkeys(i for i in ids if isinstance(i, int)))
