"""Which bytes a token id stands for.

Every tokenizer served here writes text as a sequence of bytes in UTF-8, one fixed byte string per token;
a character may be split over tokens. Two ways of writing them down exist (named by the decoder in
tokenizer.json): byte-level BPE spells each byte as one printable character, SentencePiece spells text as
itself with "▁" for a space, and single bytes as "<0xE2>".
"""

from __future__ import annotations

import codecs
import json
import math
import re
from collections.abc import Sequence

from tokenizers import Tokenizer as Backend

from ksana.errors import ModelLoadError

_BYTE_TOKEN = re.compile(r"<0x[0-9A-Fa-f]{2}>")

MAX_PIECE_CHARS = 1 << 17
"""Of the text of one token."""
MAX_GROWTH = 32
"""Characters that a decoder may make of one; all known ones make one."""
REPLACE_MAXIMAL = "replace"
"""One U+FFFD for each maximal part of an invalid sequence (what Unicode recommends, and Rust does)."""
REPLACE_EACH_BYTE = "ksana.replace_each_byte"
"""One U+FFFD for each invalid byte, as SentencePiece does."""


def _replace_each_byte(error: UnicodeError) -> tuple[str, int]:
    assert isinstance(error, UnicodeDecodeError)
    return "\ufffd" * (error.end - error.start), error.end


codecs.register_error(REPLACE_EACH_BYTE, _replace_each_byte)


def byte_alphabet() -> dict[int, str]:
    """The printable character that stands for each byte in a byte-level vocabulary.

    Printable Latin-1 bytes stand for themselves; the others, in order, for the characters from U+0100 on
    (GPT-2's `bytes_to_unicode`).
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    return {byte: chr(byte) for byte in printable} | {byte: chr(256 + i) for i, byte in enumerate(others)}


_BYTE_OF_CHAR = {char: byte for byte, char in byte_alphabet().items()}


class TokenPieces:
    """Bytes of every token id of one vocabulary, computed when first asked for.

    `errors` is how invalid UTF-8 is shown, `strip_left` how many spaces are cut off at the start of a text
    (SentencePiece writes one before the first word).
    """

    def __init__(
        self,
        backend: Backend,
        *,
        byte_level: bool,
        byte_fallback: bool = False,
        replacements: Sequence[tuple[str, str]] = (),
        strip_left: int = 0,
    ) -> None:
        self.errors = REPLACE_MAXIMAL if byte_level else REPLACE_EACH_BYTE
        self.strip_left = strip_left
        self._backend = backend
        self._byte_level = byte_level
        self._byte_fallback = byte_fallback
        self._replacements = tuple(replacements)
        self._pieces: dict[int, bytes] = {}

    def __getitem__(self, token_id: int) -> bytes:
        """Bytes of a token; none for an id that the vocabulary does not have."""
        piece = self._pieces.get(token_id)
        if piece is None:
            token = self._backend.id_to_token(token_id) if 0 <= token_id < 1 << 32 else None
            piece = b"" if token is None else self._bytes_of(token)
            if token is not None:
                self._pieces[token_id] = piece
        return piece

    def _bytes_of(self, token: str) -> bytes:
        if self._byte_level:
            try:
                return bytes([_BYTE_OF_CHAR[char] for char in token])
            except KeyError:  # an added token, spelled as itself
                return token.encode()
        for old, new in self._replacements:
            _check_length(token, old, new)
            token = token.replace(old, new)
        if self._byte_fallback and _BYTE_TOKEN.fullmatch(token):
            return bytes([int(token[3:5], 16)])
        return token.encode()


def _check_length(token: str, old: str, new: str) -> None:
    """Before it is made: replacements after one another may make gigabytes of ten letters."""
    num_chars = len(token) + token.count(old) * (len(new) - len(old))
    if num_chars > MAX_PIECE_CHARS:
        raise ValueError(f"the text of a token has {num_chars} characters; {MAX_PIECE_CHARS} are allowed")


def pieces_of(backend: Backend, source: str) -> TokenPieces:
    """Understand the decoder of a tokenizer. `source` names the file in errors.

    Raises ModelLoadError for a decoder that is neither byte-level nor SentencePiece's.
    """
    # The state of a decoder is its part of tokenizer.json; writing out the whole tokenizer takes 0.3 s.
    decoder = None if backend.decoder is None else json.loads(backend.decoder.__getstate__())
    if decoder is None:
        raise ModelLoadError(
            f"{source}: the tokenizer has no decoder, so its tokens cannot be turned into text"
        )
    steps = decoder["decoders"] if decoder["type"] == "Sequence" else [decoder]
    kinds = [step["type"] for step in steps]
    if kinds == ["ByteLevel"]:
        return TokenPieces(backend, byte_level=True)
    replacements, strip_left = [], 0
    for step, kind in zip(steps, kinds, strict=True):
        if kind == "Replace" and "String" in step["pattern"]:
            replacements.append((step["pattern"]["String"], step["content"]))
        elif kind == "Strip" and step["content"] == " " and step["stop"] == 0:
            strip_left = step["start"]
        elif kind not in ("ByteFallback", "Fuse"):
            raise ModelLoadError(f"{source}: the decoder {' + '.join(kinds)} is not supported")
    if math.prod(max(1.0, len(new) / max(len(old), 0.5)) for old, new in replacements) > MAX_GROWTH:
        raise ModelLoadError(
            f"{source}: the decoder's replacements make more than {MAX_GROWTH} characters of one"
        )
    return TokenPieces(
        backend,
        byte_level=False,
        byte_fallback="ByteFallback" in kinds,
        replacements=replacements,
        strip_left=strip_left,
    )
