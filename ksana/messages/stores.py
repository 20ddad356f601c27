"""What the remote-cache loader says to the store port, and what comes back.

Each order names an operation and is answered exactly once, at the latest at its deadline: what was not done
by then has failed. `seconds` is how long the operation took. A store's key is the block's chain key and one
byte for the kind: `FA_KIND` or `SWA_KIND`.

KV bytes are in none of these: an order names slots of staging memory (`messages.staging`). Between an order
and its answer its slots belong to the store port; afterwards the store never touches them again.
"""

from __future__ import annotations

from typing import Literal

from ksana.messages.base import Message, Value

FA_KIND = b"f"
SWA_KIND = b"s"

ItemResult = Literal["ok", "missing", "corrupt", "unusable", "failed"]
"""`missing`: the store does not have it. `corrupt`: it has something else than was put there. `unusable`:
what stands in this key's place is no value and cannot become one, but the store is well. `failed`: the store
could not be reached, or did not answer in time."""


class StoredBlock(Value, array_like=True):
    """One value of the store, and the slot whose first `num_bytes` bytes it is read into or written from."""

    key: bytes
    slot: int
    num_bytes: int


class StoreFind(Message):
    """loader -> store. Which of these keys are there?"""

    op_id: int
    keys: tuple[bytes, ...]
    deadline_s: float
    """Clock time."""


class StoreFound(Message):
    """store -> loader. One answer per key, or an error and none."""

    op_id: int
    found: tuple[bool, ...]
    seconds: float
    error: str | None = None
    timed_out: bool = False
    """The deadline came first."""


class StoreFetch(Message):
    """loader -> store. Read these blocks into their slots, checked against what was once put there."""

    op_id: int
    blocks: tuple[StoredBlock, ...]
    deadline_s: float
    timeout_s: float | None = None
    """For the work itself, which may have to wait for other fetches first; None: only the deadline counts."""


class StoreFetched(Message):
    """store -> loader. One result per block; only slots of those that are `ok` hold anything."""

    op_id: int
    results: tuple[ItemResult, ...]
    seconds: float
    """Without the wait for other fetches; 0 if the deadline came before its turn."""
    error: str | None = None
    """The first thing that went wrong, for the log."""
    timed_out: bool = False


class StoreSave(Message):
    """loader -> store. Put these slots there."""

    op_id: int
    blocks: tuple[StoredBlock, ...]
    deadline_s: float


class StoreSaved(Message):
    """store -> loader. One result per block: `ok`, `unusable` or `failed`."""

    op_id: int
    results: tuple[ItemResult, ...]
    seconds: float
    error: str | None = None
    timed_out: bool = False


class RemoteCacheStatus(Value):
    """How the remote cache is doing: totals since start, and what is under way. For /metrics and logs."""

    num_loads: tuple[tuple[str, int], ...] = ()
    """How often each outcome of `messages.remote.LoadOutcome` came, those that came."""
    num_loading: int = 0
    """Loads under way."""
    num_loaded_tokens: int = 0
    """Tokens that did not have to be computed because they were loaded."""
    num_loaded_blocks: int = 0
    num_loaded_bytes: int = 0
    num_missing_blocks: int = 0
    """The store said it had them, and then did not."""
    num_corrupt_blocks: int = 0
    num_unusable_blocks: int = 0
    """Blocks that could not be read or saved because of what stands in their places in the store."""
    num_store_errors: int = 0
    """Orders that the store answered with an error."""
    num_store_timeouts: int = 0
    """Orders that it did not answer in time."""
    num_saved_blocks: int = 0
    num_saved_bytes: int = 0
    num_unsaved_blocks: int = 0
    """Filled blocks that were not written back: too many waited, they were evicted, or the store failed."""
    num_queued_blocks: int = 0
    """Filled blocks that wait to be written back."""
    num_late_answers: int = 0
    """Answers to what nobody waited for any more."""
    num_breaker_openings: int = 0
    store_ok: bool = True
    """Whether the store is read at the moment; if not, it is probed."""
    saves_ok: bool = True
    """Whether blocks are saved at the moment; a store that is full or read-only is still read."""
