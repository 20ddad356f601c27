"""What things are called in a redacted journal: equal things alike, different ones differently.

Ids are renamed by a permutation of the vocabulary that a key gives, salts and stop strings by a keyed hash,
chain keys by what renamed tokens hash to.
"""

from __future__ import annotations

import hashlib
import logging
from array import array
from collections.abc import Sequence

from ksana.cache.cache_config import CacheConfig
from ksana.journal.chain_names import ChainNames, split_store_key
from ksana.journal.redaction_key import permutation
from ksana.messages.base import Message

log = logging.getLogger(__name__)

LEFT_OUT = "left out of the journal"
MAX_FOREIGN = 256


class Renaming:
    """Names for ids, texts and keys, consistent as long as the key is the same.

    Raises IndexError for an id outside the vocabulary.
    """

    def __init__(self, key: bytes, config: CacheConfig, vocab_size: int) -> None:
        self._key = key
        self._permutation = permutation(key, vocab_size)
        self._chains = ChainNames(config, self.ids, self.text)
        self._has_warned = False
        self._foreign: dict[str, None] = {}
        """Words of workers, the last ones last: they may quote anything."""

    def see(self, message: Message) -> None:
        """Whatever the scheduler says, recorded or not, before anybody hears it."""
        self._chains.see(message)

    def ids(self, token_ids: Sequence[int]) -> list[int]:
        names = self._permutation
        if token_ids and min(token_ids) < 0:
            raise IndexError("a token id below 0")
        return [names[token_id] for token_id in token_ids]

    def tuple_of(self, token_ids: Sequence[int]) -> tuple[int, ...]:
        return tuple(self.ids(token_ids))

    def packed(self, tokens: bytes | bytearray) -> bytes:
        """Ids as `prefix_tree.token_bytes` gives them."""
        return array("i", self.ids(array("i", bytes(tokens)))).tobytes()

    def text(self, text: str) -> str:
        """A name for a text; nothing stays nothing."""
        if not text:
            return text
        data = text.encode("utf-8", "surrogatepass")
        return hashlib.blake2b(data, key=self._key, digest_size=12, person=b"ksana text").hexdigest()

    def foreign(self, text: str) -> str:
        """In place of words that a worker said."""
        self._foreign.pop(text, None)
        self._foreign[text] = None
        if len(self._foreign) > MAX_FOREIGN:
            del self._foreign[next(iter(self._foreign))]
        return LEFT_OUT

    def words(self, text: str) -> str:
        """Words of the scheduler, which may end with those of a worker."""
        head, colon, tail = text.partition(": ")
        return f"{head}{colon}{LEFT_OUT}" if tail in self._foreign else text

    def chain_key(self, key: bytes) -> bytes:
        named = self._chains.name(key)
        if named is not None:
            return named
        if not self._has_warned:
            log.warning("a block was so old that its name was forgotten: the loader may replay differently")
            self._has_warned = True
        return hashlib.blake2b(key, key=self._key, digest_size=32, person=b"ksana block").digest()

    def store_key(self, key: bytes) -> bytes:
        parts = split_store_key(key)
        return key if parts is None else self.chain_key(parts[0]) + parts[1]
