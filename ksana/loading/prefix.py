"""The blocks of one request's prefix: what they are called in the store, and which of them are loaded."""

from __future__ import annotations

from collections.abc import Mapping

from ksana.cache.chain_keys import chain_keys, root_key
from ksana.loading.choice import LoadChoice, choose_load
from ksana.loading.load import Load, WantedBlock
from ksana.loading.settings import LoaderSettings
from ksana.messages.remote import LoadPrefix, RemoteBlocksAllocated
from ksana.messages.stores import FA_KIND, SWA_KIND


def max_blocks(settings: LoaderSettings, request: LoadPrefix) -> int:
    """Blocks that may be reused at all: one token is always computed."""
    return (len(request.token_ids) - 1) // settings.block_size


def chain_keys_of(settings: LoaderSettings, request: LoadPrefix) -> tuple[bytes, ...]:
    """Of all blocks that may be reused."""
    root = root_key(settings.identity, request.cache_salt)
    num_tokens = max_blocks(settings, request) * settings.block_size
    return tuple(chain_keys(root, request.token_ids[:num_tokens], settings.block_size))


def keys_to_find(settings: LoaderSettings, load: Load) -> tuple[bytes, ...]:
    """Store keys of what is not here: FA blocks after the local hit, SWA blocks anywhere."""
    keys: list[bytes] = []
    if settings.fa_block_bytes:
        keys += [key + FA_KIND for key in load.keys[load.local_fa :]]
    if settings.swa_block_bytes:
        valid = load.swa_valid
        keys += [
            key + SWA_KIND for index, key in enumerate(load.keys) if not (index < len(valid) and valid[index])
        ]
    return tuple(keys)


def choose(settings: LoaderSettings, load: Load, in_store: Mapping[bytes, bool]) -> LoadChoice:
    """`in_store` answers `keys_to_find`."""
    return choose_load(
        local_fa=load.local_fa,
        swa_valid=load.swa_valid,
        fa_in_store=[
            in_store[key + FA_KIND] if settings.fa_block_bytes else True for key in load.keys[load.local_fa :]
        ],
        swa_in_store=[in_store.get(key + SWA_KIND, False) for key in load.keys],
        window_blocks=settings.window_blocks,
        window_open_at_start=settings.window_open_at_start,
    )


def num_bytes(settings: LoaderSettings, load: Load, choice: LoadChoice) -> int:
    """What loading it moves."""
    num_fa = choice.num_fa_blocks - load.local_fa
    return num_fa * settings.fa_block_bytes + len(choice.swa_indices) * settings.swa_block_bytes


def wanted_blocks(
    settings: LoaderSettings, load: Load, choice: LoadChoice, reserved: RemoteBlocksAllocated
) -> tuple[WantedBlock, ...]:
    """What is to be fetched, each with the pool block it goes to: FA blocks first."""
    wanted: list[WantedBlock] = []
    if settings.fa_block_bytes:
        fa_indices = range(load.local_fa, choice.num_fa_blocks)
        for index, block_id in zip(fa_indices, reserved.fa_block_ids, strict=True):
            wanted.append(
                WantedBlock(
                    pool="fa",
                    index=index,
                    block_id=block_id,
                    key=load.keys[index] + FA_KIND,
                    num_bytes=settings.fa_block_bytes,
                )
            )
    for index, block_id in zip(choice.swa_indices, reserved.swa_block_ids, strict=True):
        wanted.append(
            WantedBlock(
                pool="swa",
                index=index,
                block_id=block_id,
                key=load.keys[index] + SWA_KIND,
                num_bytes=settings.swa_block_bytes,
            )
        )
    return tuple(wanted)
