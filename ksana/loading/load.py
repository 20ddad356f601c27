"""One load: what is known of it, and its states.

    probing ──> finding ──> reserving ──> fetching ──> confirming ──> done
       │           │            │            │             │
       │           └────────────┼─ nothing to gain ───────>│
       │                        └─ no room ────────────────┼──────────> done
       └─ cancelled ─> draining <─ cancelled ┘ (reserving) │
                          └────────────────────────────────┴──────────> done

probing     asked the allocator for the local hit, which it pins
finding     asked the store what it has of the rest
reserving   asked the allocator for blocks
fetching    blocks come from the store into slots, and from there go to the worker, piece by piece
confirming  told the allocator what came; the worker was told before to copy it, so whoever uses the blocks
            comes after the copies, and nobody need wait for them
draining    cancelled while the allocator had a call to answer: when it has, everything is given back

`done` is no state: the load is forgotten, and PrefixLoaded said. A load that is cancelled while finding or
fetching is done at once; what the store still brings goes nowhere. Cancelled while confirming, it ends as
it would have, but as cancelled. When the deadline comes while finding or fetching, the load goes on to
confirming with what there is; when it comes elsewhere, the next of these two states sees it. ResetPools
ends every load at once, from every state.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from ksana.loading.choice import LoadChoice
from ksana.messages.base import Value
from ksana.messages.remote import LoadOutcome, LoadPrefix

LoadState = Literal["probing", "finding", "reserving", "fetching", "confirming", "draining"]


class WantedBlock(Value, array_like=True):
    """A block to be fetched: what it is, and the pool block it goes to."""

    pool: Literal["fa", "swa"]
    index: int
    """Blocks before it in the request."""
    block_id: int
    key: bytes
    num_bytes: int


class Load(msgspec.Struct, kw_only=True):
    """Only what the state needs is set; see each field."""

    load_id: int
    request: LoadPrefix
    state: LoadState = "probing"
    cancelled: bool = False
    outcome: LoadOutcome = "nothing"
    """From confirming on: how it will end."""
    error: str | None = None
    """What went wrong with the store, for the log."""

    # from finding on
    local_fa: int = 0
    local_cached: int = 0
    """The local endpoint, in blocks."""
    swa_valid: tuple[bool, ...] = ()
    keys: tuple[bytes, ...] = ()
    """Chain keys of all blocks that may be reused."""

    # from reserving on
    choice: LoadChoice | None = None

    # from fetching on
    num_reserved_fa: int = 0
    wanted: tuple[WantedBlock, ...] = ()
    num_ordered: int = 0
    """How many of `wanted` have been asked for."""
    num_orders: int = 0
    """Orders to the store not answered yet."""
    fa_here: set[int] = set()
    swa_here: set[int] = set()
    """Indices of blocks that have come and are being copied."""
    began_s: float = 0.0
    """When the first order went out."""
    num_bytes: int = 0
    """That have come."""

    def num_leading_fa(self) -> int:
        """M as far as blocks have come: leading FA blocks without a gap."""
        count = self.local_fa
        while count in self.fa_here:
            count += 1
        return count
