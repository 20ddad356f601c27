"""The tokenizer of a Hugging Face directory.

tokenizer.json holds the whole of it for the `tokenizers` package; tokenizer_config.json (and, in older
directories, special_tokens_map.json) adds roles of tokens, tokens added later and the chat template, and may
switch the BOS and the EOS of tokenizer.json's post-processor on or off; generation_config.json and
config.json name more tokens that end an answer.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tokenizers import AddedToken
from tokenizers import Tokenizer as Backend

from ksana.errors import ModelLoadError
from ksana.input_file import read_input
from ksana.json_object import read_json_object
from ksana.models.fields import MAX_END_TOKENS
from ksana.shown import shown
from ksana.tokenizers.chat_template import ChatTemplate
from ksana.tokenizers.guarded_encoding import check_added, load_backend
from ksana.tokenizers.pieces import pieces_of
from ksana.tokenizers.post_processing import change_bos_eos
from ksana.tokenizers.template_limits import MAX_TEMPLATE_BYTES
from ksana.tokenizers.tokenizer import SpecialTokens, Tokenizer
from ksana.tokenizers.vocabulary_limits import (
    MAX_TOKEN_ID,
    MAX_TOKENIZER_BYTES,
    check_added_tokens,
    check_definition,
)

_MAX_JSON_BYTES = 32 << 20
_ID = re.compile(r"[0-9]{1,9}", re.ASCII)
_ROLES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_EXTRA_ROLES = ("additional_special_tokens", "extra_special_tokens")


def load_huggingface_tokenizer(
    directory: Path, chat_template: str | None = None, num_embeddings: int | None = None
) -> Tokenizer:
    """Build the tokenizer of a directory. `chat_template` replaces the directory's own.

    Raises ModelLoadError for files that are missing, unreadable or contradict each other.
    """
    file = directory / "tokenizer.json"
    backend = _read_backend(file, num_embeddings)
    config = {
        **_read_json(directory / "special_tokens_map.json"),
        **_read_json(directory / "tokenizer_config.json"),
    }
    named = {role: token for role in _ROLES if (token := _spelling(config.get(role))) is not None}
    check_added(backend, config.get("added_tokens_decoder"), str(directory))
    _add_tokens(backend, config, named, str(directory))
    change_bos_eos(
        backend,
        bos=named.get("bos_token"),
        eos=named.get("eos_token"),
        add_bos=_switch(config, "add_bos_token", str(directory)),
        add_eos=_switch(config, "add_eos_token", str(directory)),
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


def _read_backend(file: Path, num_embeddings: int | None) -> Backend:
    if not os.path.lexists(file):
        hint = " (tokenizer.model alone is not enough: convert it with transformers)"
        has_model = (file.parent / "tokenizer.model").exists()
        raise ModelLoadError(f"{file}: no such file{hint if has_model else ''}")
    definition = read_input(file, MAX_TOKENIZER_BYTES, f"{file}:", error=ModelLoadError, pipes=False)
    check_definition(definition, str(file), num_embeddings)
    backend = load_backend(definition, str(file))
    backend.no_truncation()
    backend.no_padding()
    return backend


def _read_json(file: Path) -> dict[str, Any]:
    """A JSON object from a file; empty if there is no such file."""
    return read_json_object(file, _MAX_JSON_BYTES) if os.path.lexists(file) else {}


def _switch(config: Mapping[str, Any], name: str, source: str) -> bool | None:
    """A switch of tokenizer_config.json; None (absent or null) leaves what tokenizer.json says."""
    value = config.get(name)
    if value is not None and not isinstance(value, bool):
        raise ModelLoadError(f"{source}: {name} in tokenizer_config.json is {value!r:.50}, not true or false")
    return value


def _spelling(token: Any) -> str | None:
    """A token is written as its text, or as an object with `content`."""
    if isinstance(token, Mapping):
        token = token.get("content")
    return token if isinstance(token, str) and token else None


def _add_tokens(backend: Backend, config: Mapping[str, Any], named: Mapping[str, str], source: str) -> None:
    """Add what the configuration has and tokenizer.json lacks, in the order of the ids it states."""
    later = config.get("added_tokens_decoder") or {}
    if not isinstance(later, Mapping):
        raise ModelLoadError(f"{source}: added_tokens_decoder is not an object of ids")
    check_added_tokens(later, source)
    wrong = next((key for key in later if not _ID.fullmatch(key)), None)
    if wrong is not None:
        raise ModelLoadError(f"{source}: added_tokens_decoder has the key {shown(wrong)}, which is no id")
    tokens = []
    for token_id, token in sorted(later.items(), key=lambda item: int(item[0])):
        content = _spelling(token)
        if content is None or not isinstance(token, Mapping):
            raise ModelLoadError(f"{source}: added token {token_id} has no content")
        flags = {
            flag: bool(token.get(flag, False))
            for flag in ("single_word", "lstrip", "rstrip", "normalized", "special")
        }
        tokens.append((int(token_id), AddedToken(content, **flags)))
    backend.add_tokens([token for _, token in tokens])  # at once: each call goes over all tokens
    for number, token in tokens:
        if backend.token_to_id(token.content) != number:
            raise ModelLoadError(
                f"{source}: the token {shown(token.content)} is {backend.token_to_id(token.content)} in "
                f"tokenizer.json and {number} in tokenizer_config.json"
            )
    extra = [_spelling(token) for role in _EXTRA_ROLES for token in _listed(config.get(role))]
    check_added_tokens(extra, source)
    known = {token.content for token in backend.get_added_tokens_decoder().values()}
    new = dict.fromkeys(
        content for content in (*named.values(), *extra) if content is not None and content not in known
    )
    backend.add_special_tokens([AddedToken(content, normalized=False, special=True) for content in new])


def _listed(value: Any) -> list[Any]:
    if isinstance(value, Mapping):
        return list(value.values())
    return value if isinstance(value, list) else []


def _chat_template(directory: Path, config: Mapping[str, Any]) -> str | None:
    alone = directory / "chat_template.jinja"
    if os.path.lexists(alone):
        content = read_input(alone, MAX_TEMPLATE_BYTES, f"{alone}:", error=ModelLoadError, pipes=False)
        try:
            return content.decode("utf-8")
        except UnicodeDecodeError as error:
            raise ModelLoadError(f"{alone}: not UTF-8: byte {error.start} cannot be read") from None
    template = _read_json(directory / "chat_template.json").get("chat_template", config.get("chat_template"))
    if isinstance(template, list):  # several, each with a name
        named = [item for item in template if isinstance(item, Mapping) and item.get("name") == "default"]
        template = named[-1].get("template") if named else None
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
        named_ids = value if isinstance(value, list) else [value]
        wrong = [i for i in named_ids if i is not None and not _is_id(i)]
        if wrong or len(named_ids) > MAX_END_TOKENS:
            what = f"holds {shown(wrong[0])}, no token id" if wrong else f"lists {len(named_ids)} tokens"
            raise ModelLoadError(f"{directory / name}: eos_token_id {what}")
        ids += named_ids
    return tuple(dict.fromkeys(i for i in ids if i is not None))


def _is_id(value: Any) -> bool:
    return type(value) is int and 0 <= value <= MAX_TOKEN_ID
