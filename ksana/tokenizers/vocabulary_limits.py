"""How large the vocabulary of a tokenizer may be, found out before the `tokenizers` package reads it.

The package takes memory and time for whatever a file says: a million added tokens take it minutes, an id of
four thousand million makes tables of that size elsewhere. The limits are several times what any model has
(Gemma 3: 33 MB, 262,144 tokens, 6,415 of them added).
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import msgspec

from ksana.errors import ModelLoadError

MAX_TOKENIZER_BYTES = 64 << 20
MAX_TOKENS = 1 << 20
MAX_ADDED_TOKENS = 1 << 17
MAX_TOKEN_ID = (1 << 24) - 1
MAX_IDS_BEYOND = 1024
"""Ids that the model has no embedding for, such as marks of images for a model's text part. A prompt that has
one is refused."""
MAX_TOKEN_CHARS = 1 << 17
"""Of one token; real ones have a few hundred at most."""
_MAX_PUNCTUATION = 3 << 19
"""Keys, lists, and texts in lists of the whole file: 250 MB when read. Gemma 3 has 514,906 merges."""


class _AddedToken(msgspec.Struct):
    id: int
    content: str


class _Model(msgspec.Struct):
    vocab: dict[str, int] | list[msgspec.Raw] = {}


class _Outline(msgspec.Struct):
    """Of a tokenizer.json, what can be large, but for the merges."""

    model: _Model
    added_tokens: list[_AddedToken] = []


def check_definition(definition: bytes, source: str, num_embeddings: int | None = None) -> None:
    """Refuse a tokenizer.json with too many tokens or ids out of range. Takes some 5 ms per MB.

    `num_embeddings`: of the model, if it is known. What is malformed in another way is left for the package
    to say. Raises ModelLoadError.
    """
    punctuation = max(map(definition.count, (b":", b"[", b'",')))
    if punctuation > _MAX_PUNCTUATION:
        raise ModelLoadError(f"{source}: the tokenizer has more than {MAX_TOKENS} tokens, or much besides")
    try:
        outline = msgspec.json.decode(definition, type=_Outline)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError):
        return
    vocab = outline.model.vocab
    ids = vocab.values() if isinstance(vocab, dict) else range(len(vocab))
    if len(set(ids)) < len(vocab):
        raise ModelLoadError(f"{source}: two tokens have one id")
    all_ids = [*ids, *(token.id for token in outline.added_tokens)]
    check_ids(all_ids, source)
    if num_embeddings is not None and max(all_ids, default=0) >= num_embeddings + MAX_IDS_BEYOND:
        raise ModelLoadError(
            f"{source}: token ids go up to {max(all_ids)}, but the model has {num_embeddings} embeddings"
        )
    check_added_tokens(outline.added_tokens, source)


def check_ids(ids: Sequence[int], source: str) -> None:
    """Raises ModelLoadError for too many, or one that no vocabulary has."""
    if len(ids) > MAX_TOKENS:
        raise ModelLoadError(f"{source}: {len(ids)} tokens; {MAX_TOKENS} are allowed")
    if ids and not 0 <= min(ids) <= max(ids) <= MAX_TOKEN_ID:
        worst = min(ids) if min(ids) < 0 else max(ids)
        raise ModelLoadError(f"{source}: token id {worst} is not from 0 to {MAX_TOKEN_ID}")


def check_added_tokens(tokens: Collection[object], source: str) -> None:
    """Raises ModelLoadError for too many tokens that are found whole in a text."""
    if len(tokens) > MAX_ADDED_TOKENS:
        raise ModelLoadError(f"{source}: {len(tokens)} added tokens; {MAX_ADDED_TOKENS} are allowed")


def check_tokens(tokens: Sequence[str], source: str) -> None:
    """Raises ModelLoadError for a list of tokens that is too long, or has one that is."""
    check_ids(range(len(tokens)), source)
    lengths = list(map(len, tokens))
    if max(lengths, default=0) > MAX_TOKEN_CHARS:
        raise ModelLoadError(
            f"{source}: a token has {max(lengths)} characters; {MAX_TOKEN_CHARS} are allowed"
        )
