"""Content hashes of token chains: what a block is called outside this engine.

Inside the engine the prefix tree compares token ids; only stores go by hash, and there a key has to name
everything that the KV depends on. So a chain starts from an identity (model, layout, dtype, ...) and the
cache salt, and every key is a SHA-256 over its parent's key and the exact token ids of its block.
"""

from __future__ import annotations

import hashlib
import sys
from array import array
from collections.abc import Iterable, Sequence

KEY_BYTES = 32


def root_key(identity: bytes, cache_salt: str) -> bytes:
    """The parent of every first block: 32 bytes. Each part is preceded by its length, so that no two pairs
    of identity and salt are hashed alike."""
    salt = cache_salt.encode("utf-8", "surrogatepass")
    digest = hashlib.sha256(b"ksana kv chain 1")
    for part in (identity, salt):
        digest.update(len(part).to_bytes(8, "little"))
        digest.update(part)
    return digest.digest()


def block_key(parent_key: bytes, block_tokens: bytes) -> bytes:
    """The key of one block: its token ids as 32-bit integers, least significant byte first."""
    digest = hashlib.sha256(parent_key)
    digest.update(block_tokens)
    return digest.digest()


def chain_keys(
    root: bytes,
    token_ids: Sequence[int],
    block_size: int,
    first_block: int = 0,
    parent_key: bytes | None = None,
) -> list[bytes]:
    """Keys of the full blocks `first_block`, `first_block` + 1, ... of these tokens.

    `token_ids` are all tokens of the sequence, from its start. `parent_key` is the key of block
    `first_block` - 1; without it the chain is computed from the root. A last block that is not full has no
    key. OverflowError for a token id that is no 32-bit integer.
    """
    size = 4 * block_size
    start = first_block if parent_key is not None else 0
    data = little_endian_bytes(token_ids[start * block_size :])
    parent = root if parent_key is None else parent_key
    keys = []
    for end in range(size, len(data) + 1, size):
        parent = block_key(parent, data[end - size : end])
        keys.append(parent)
    return keys[first_block - start :]


def little_endian_bytes(token_ids: Iterable[int] | bytes) -> bytes:
    """Token ids (or their bytes, as `prefix_tree.token_bytes` gives them) as keys see them, whatever the
    byte order of this machine."""
    tokens = array("i", token_ids)
    if sys.byteorder == "big":
        tokens.byteswap()
    return tokens.tobytes()
