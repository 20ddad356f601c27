"""Whether loading is faster than computing, from what the store has shown so far."""

from __future__ import annotations

import msgspec

_WEIGHT = 0.3
"""Of the newest measurement, in the exponentially weighted mean."""
STALE_S = 30.0
"""A measurement older than this says nothing: the next load is tried, and measures again."""


class StoreSpeed(msgspec.Struct):
    """An exponentially weighted mean. 0: not measured yet."""

    bytes_per_s: float = 0.0
    """Over whole loads, with the waits for slots and worker, and beside other loads."""
    measured_s: float = 0.0
    """When a load was last measured."""

    def loaded(self, num_bytes: int, seconds: float, now_s: float) -> None:
        self.bytes_per_s = _mean(self.bytes_per_s, num_bytes / max(seconds, 1e-6))
        self.measured_s = now_s

    def load_s(self, num_bytes: int, now_s: float) -> float | None:
        """How long loading so much will take once it is known where it is; None: not known."""
        if not self.bytes_per_s or now_s - self.measured_s > STALE_S:
            return None
        return num_bytes / self.bytes_per_s


def is_worth_it(load_s: float | None, num_tokens: int, prefill_tokens_per_s: float) -> bool:
    """Whether to load the KV of so many tokens rather than compute it. Not knowing speaks for loading."""
    if load_s is None or prefill_tokens_per_s <= 0:
        return True
    return load_s < num_tokens / prefill_tokens_per_s


def _mean(old: float, new: float) -> float:
    return new if not old else old + _WEIGHT * (new - old)
