"""What a tokenizer adds around a text: a BOS before it, an EOS after it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from tokenizers import Tokenizer as Backend
from tokenizers import processors

_Token = tuple[str, int]
"""Its spelling and its id."""


def set_bos_eos(backend: Backend, bos: str | None, eos: str | None) -> None:
    """Let `backend` add these tokens, which it must know, and nothing else. None adds nothing."""
    _set(backend, _token(backend, bos), _token(backend, eos))


def change_bos_eos(
    backend: Backend, *, bos: str | None, eos: str | None, add_bos: bool | None, add_eos: bool | None
) -> None:
    """Switch the BOS and the EOS that `backend` adds on (True) or off (False); None leaves one as it is.

    Tokens in other roles that it adds stay. A token that is None cannot be added.
    """
    before, after = _added(backend)
    bos_token, eos_token = _token(backend, bos), _token(backend, eos)
    new_before, new_after = before, after
    if add_bos is not None and bos_token:
        others = [token for token in before if token not in bos_token]
        new_before = [*bos_token, *others] if add_bos else others
    if add_eos is not None and eos_token:
        others = [token for token in after if token not in eos_token]
        new_after = [*others, *eos_token] if add_eos else others
    if (new_before, new_after) != (before, after):
        _set(backend, new_before, new_after)


def _token(backend: Backend, spelling: str | None) -> list[_Token]:
    if spelling is None:
        return []
    token_id = backend.token_to_id(spelling)
    assert token_id is not None, spelling
    return [(spelling, token_id)]


def _set(backend: Backend, before: Sequence[_Token], after: Sequence[_Token]) -> None:
    # Short names stand for the tokens: a template reads ":" and "$" in a name as its own.
    names = {token: f"t{number}" for number, token in enumerate(dict.fromkeys((*before, *after)))}
    backend.post_processor = processors.TemplateProcessing(
        single=[
            *(f"{names[token]}:0" for token in before),
            "$A:0",
            *(f"{names[token]}:0" for token in after),
        ],
        special_tokens=[
            {"id": name, "ids": [token_id], "tokens": [spelling]}
            for (spelling, token_id), name in names.items()
        ],
    )


def _added(backend: Backend) -> tuple[list[_Token], list[_Token]]:
    """The tokens that a backend adds before and after a text."""
    if backend.post_processor is None:
        return [], []
    return _added_by(json.loads(backend.post_processor.__getstate__()))


def _added_by(processor: Mapping[str, Any]) -> tuple[list[_Token], list[_Token]]:
    kind = processor["type"]
    before: list[_Token] = []
    after: list[_Token] = []
    if kind == "Sequence":  # each works on what the one before it made
        for inner in processor["processors"]:
            first, last = _added_by(inner)
            before, after = [*first, *before], [*after, *last]
    elif kind in ("BertProcessing", "RobertaProcessing"):
        before, after = [tuple(processor["cls"])], [tuple(processor["sep"])]
    elif kind == "TemplateProcessing":
        side = before
        for piece in processor["single"]:
            if "Sequence" in piece:
                side = after
            else:
                token = processor["special_tokens"][piece["SpecialToken"]["id"]]
                side += zip(token["tokens"], token["ids"], strict=True)
    return before, after
