"""What lies between kernels: their launches, which no table of kernels holds."""

from __future__ import annotations

import msgspec


class Launches(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Microseconds on top of a step's kernels, by how they are launched; below 0 where kernels that follow
    each other in a graph take less than measured one by one."""

    full_us: float = 0.0
    """A step of decodes that one captured graph holds."""
    piecewise_us: float = 0.0
    """A step that fits the graphs, with a prefill: all but attention is captured."""
    none_us: float = 0.0
    """A larger step: every kernel is launched by the host."""
