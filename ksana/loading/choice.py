"""What to load: the farthest endpoint that local blocks and the store reach together, and nothing more."""

from __future__ import annotations

from collections.abc import Sequence

from ksana.cache.window_match import last_valid_end, registered_blocks
from ksana.messages.base import Value


class LoadChoice(Value):
    """`endpoint` leading blocks need no computing if everything chosen comes."""

    endpoint: int
    num_fa_blocks: int
    """M: leading FA blocks that are there then. Those from the local hit on are to be loaded."""
    swa_indices: tuple[int, ...]
    """Blocks whose SWA block is to be loaded, ascending, all below M."""


def choose_load(
    *,
    local_fa: int,
    swa_valid: Sequence[bool],
    fa_in_store: Sequence[bool],
    swa_in_store: Sequence[bool],
    window_blocks: int,
    window_open_at_start: bool,
) -> LoadChoice:
    """The choice for one request.

    `local_fa` FA blocks are there, of which `swa_valid` says which have a valid SWA block. The store has
    FA block `local_fa + i` if `fa_in_store[i]`, and SWA block i if `swa_in_store[i]`; the two reach to the
    last block that may be reused at all, and no farther. `window_blocks` 0: no sliding layers.

    If the endpoint is not beyond the one that the local blocks give, there is nothing to load.
    """
    reach = local_fa + _leading_true(fa_in_store)
    if not window_blocks:
        return LoadChoice(endpoint=reach, num_fa_blocks=reach, swa_indices=())
    local = [*swa_valid[:local_fa], *([False] * (reach - local_fa))]
    within_reach = [here or there for here, there in zip(local, swa_in_store, strict=False)]
    endpoint = last_valid_end(within_reach, window_blocks, window_open_at_start=window_open_at_start)
    return LoadChoice(
        endpoint=endpoint,
        num_fa_blocks=max(endpoint, local_fa),
        swa_indices=tuple(index for index in registered_blocks(endpoint, window_blocks) if not local[index]),
    )


def _leading_true(bits: Sequence[bool]) -> int:
    for count, bit in enumerate(bits):
        if not bit:
            return count
    return len(bits)
