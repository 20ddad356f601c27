"""What a run writes down, and how closely it looks."""

from __future__ import annotations

import msgspec


class Keep(msgspec.Struct, frozen=True, kw_only=True):
    """What a run writes down, and how closely it looks. All of it costs time."""

    digest: bool = False
    steps: bool = False
    token_times: bool = False
    check_answers: bool = True
    """Every token against its script."""
    check_cache: bool = False
    """The invariants of the cache after every message, and now and then of everything."""
