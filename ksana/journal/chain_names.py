"""What blocks are called in a redacted journal: the chain keys that renamed tokens give.

A chain key is a hash over tokens, so the key that an actor says would not be the one that a replay computes
from renamed tokens. Whoever keys are computed from is told of here first, so both keys of a block are known
before anybody says one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec

from ksana.cache.cache_config import CacheConfig
from ksana.cache.chain_keys import KEY_BYTES, block_key, little_endian_bytes, root_key
from ksana.messages.base import Message, RequestId
from ksana.messages.blocks import PlanBlocks
from ksana.messages.outputs import StepOutputs
from ksana.messages.remote import LoadPrefix

MAX_NAMES = 1 << 18
"""Twice what a remote-cache loader remembers; about 60 MB."""
_MAX_ENDED = 1024
"""Requests that ended and did not give back blocks: most of them never had any."""


class _Chain(msgspec.Struct):
    """One request: the keys of its last full block, before and after renaming."""

    key: bytes
    named: bytes
    num_tokens: int = 0
    rest: list[int] = []
    """Tokens behind the last full block."""


class ChainNames:
    """Keys of all full blocks of all requests that blocks were asked for.

    Cost: two SHA-256 a block, one if its prefix was seen before.
    """

    def __init__(
        self,
        config: CacheConfig,
        rename: Callable[[Sequence[int]], list[int]],
        rename_salt: Callable[[str], str],
    ) -> None:
        self._config = config
        self._rename = rename
        self._rename_salt = rename_salt
        self._names: dict[bytes, bytes] = {}
        """Least recently seen first."""
        self._chains: dict[RequestId, _Chain] = {}
        self._ended: dict[RequestId, None] = {}

    def name(self, chain_key: bytes) -> bytes | None:
        """The key of the same block after renaming; None for one that was forgotten or never was."""
        return self._names.get(chain_key)

    def see(self, message: Message) -> None:
        """Something that the scheduler says."""
        if isinstance(message, PlanBlocks):
            for update in message.updates:
                chain = self._chains.get(update.request_id)
                if chain is not None:
                    self._extend(chain, update.token_ids)
            for release in message.releases:
                self._chains.pop(release.request_id, None)
            for demand in message.demands:
                if demand.new is not None:
                    self._follow(demand.request_id, demand.new.cache_salt, demand.new.token_ids)
        elif isinstance(message, LoadPrefix):
            self._follow(message.request_id, message.cache_salt, message.token_ids)
        elif isinstance(message, StepOutputs):
            for ended in message.ended:
                self._ended[ended.request_id] = None
            while len(self._ended) > _MAX_ENDED:
                request_id = next(iter(self._ended))
                del self._ended[request_id]
                self._chains.pop(request_id, None)

    def _follow(self, request_id: RequestId, salt: str, token_ids: Sequence[int]) -> None:
        """These are all its tokens now; they only ever grow."""
        chain = self._chains.get(request_id)
        if chain is None:
            identity = self._config.chain_identity
            chain = _Chain(root_key(identity, salt), root_key(identity, self._rename_salt(salt)))
            self._chains[request_id] = chain
        self._extend(chain, token_ids[chain.num_tokens :])

    def _extend(self, chain: _Chain, token_ids: Sequence[int]) -> None:
        chain.num_tokens += len(token_ids)
        tokens = [*chain.rest, *token_ids]
        size = self._config.block_size
        num_full = len(tokens) // size * size
        for start in range(0, num_full, size):
            block = tokens[start : start + size]
            chain.key = block_key(chain.key, little_endian_bytes(block))
            named = self._names.pop(chain.key, None)
            if named is None:
                named = block_key(chain.named, little_endian_bytes(self._rename(block)))
            chain.named = self._names[chain.key] = named
        chain.rest = tokens[num_full:]
        while len(self._names) > MAX_NAMES:
            del self._names[next(iter(self._names))]


def split_store_key(key: bytes) -> tuple[bytes, bytes] | None:
    """Chain key and kind of a store's key; None if it is none of a block."""
    return (key[:KEY_BYTES], key[KEY_BYTES:]) if len(key) == KEY_BYTES + 1 else None
