"""The numbers that the remote-cache loader decides with."""

from __future__ import annotations

import msgspec


class LoaderSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Sizes of one engine's blocks and staging memory, and how much may go on at once."""

    identity: bytes
    """What the KV depends on besides tokens and salt; see `ksana.cache.chain_keys.root_key`."""
    block_size: int
    fa_block_bytes: int
    """0: no layer keeps KV for FA blocks; they are identity only, and need no loading."""
    swa_block_bytes: int = 0
    """0: no sliding layers."""
    window_blocks: int = 0
    """W_blocks; 0 without sliding layers."""
    window_open_at_start: bool = True
    num_slots: int
    """Staging slots, each large enough for a block of either pool."""

    find_timeout_s: float = 1.0
    fetch_timeout_s: float = 2.0
    """For one order of at most `blocks_per_fetch` blocks. No order outlives the load's own deadline."""
    save_timeout_s: float = 10.0
    blocks_per_fetch: int = 8
    fetches_in_flight: int = 4
    """Orders of one load at a time."""

    write_back: bool = True
    max_queued_blocks: int = 1024
    """Filled blocks waiting to be written back; more are not written."""
    saves_in_flight: int = 2
    max_known_keys: int = 1 << 17
    """Keys remembered as being in the store, about 100 bytes each."""

    def __post_init__(self) -> None:
        if self.block_size < 1 or self.num_slots < 4:
            raise ValueError(f"no room to load or save: {self}")
        if (self.swa_block_bytes > 0) != (self.window_blocks > 0):
            raise ValueError(f"sliding layers need blocks and a window, others neither: {self}")
        if self.fa_block_bytes + self.swa_block_bytes < 1:
            raise ValueError(f"blocks without bytes: {self}")

    @property
    def num_write_slots(self) -> int:
        """A quarter of the slots is for writing back, so that neither waits for the other."""
        return max(2, self.num_slots // 4) if self.write_back else 0

    @property
    def slots_per_filled_block(self) -> int:
        return (self.fa_block_bytes > 0) + (self.swa_block_bytes > 0)

    @property
    def blocks_per_save(self) -> int:
        """So that `saves_in_flight` of them fit, if there are enough slots."""
        return max(1, self.num_write_slots // self.slots_per_filled_block // self.saves_in_flight)
