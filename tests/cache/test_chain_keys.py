"""Content hashes of token chains."""

from __future__ import annotations

import hashlib

import pytest

from ksana.cache.chain_keys import KEY_BYTES, chain_keys, root_key

ROOT = root_key(b"model", "")
TOKENS = tuple(range(100, 130))


def test_each_full_block_has_a_key_that_covers_everything_before_it() -> None:
    keys = chain_keys(ROOT, TOKENS, 4)
    assert len(keys) == 7
    assert all(len(key) == KEY_BYTES for key in keys)
    assert len(set(keys)) == 7
    for position in range(28):
        changed = (*TOKENS[:position], 7, *TOKENS[position + 1 :])
        others = chain_keys(ROOT, changed, 4)
        same = position // 4
        assert others[:same] == keys[:same]
        assert not set(others[same:]) & set(keys)


def test_a_part_of_a_chain_goes_on_from_its_parent() -> None:
    keys = chain_keys(ROOT, TOKENS, 4)
    assert chain_keys(ROOT, TOKENS, 4, 3, keys[2]) == keys[3:]
    assert chain_keys(ROOT, TOKENS, 4, 3) == keys[3:]
    assert chain_keys(ROOT, TOKENS, 4, 7, keys[6]) == []
    assert chain_keys(ROOT, TOKENS[:3], 4) == []


def test_keys_are_the_same_on_every_machine() -> None:
    tokens = b"".join(token.to_bytes(4, "little") for token in (1, 70_000))
    [key] = chain_keys(ROOT, (1, 70_000), 2)
    assert key == hashlib.sha256(ROOT + tokens).digest()
    assert root_key(b"", "").hex() == hashlib.sha256(b"ksana kv chain 1" + bytes(16)).hexdigest()


@pytest.mark.parametrize(
    ("identity", "salt"), [(b"model2", ""), (b"model", "a"), (b"mode", "l"), (b"", "model"), (b"model", "\0")]
)
def test_identity_and_salt_are_told_apart(identity: bytes, salt: str) -> None:
    assert root_key(identity, salt) != ROOT
    assert not set(chain_keys(root_key(identity, salt), TOKENS, 4)) & set(chain_keys(ROOT, TOKENS, 4))


def test_a_token_id_that_is_no_32_bit_integer_is_refused() -> None:
    with pytest.raises(OverflowError):
        chain_keys(ROOT, (1, 2**31), 2)


def test_block_boundaries_matter() -> None:
    """The same tokens in blocks of another size have other keys (the identity says so as well)."""
    assert not set(chain_keys(ROOT, TOKENS, 2)) & set(chain_keys(ROOT, TOKENS, 4))
