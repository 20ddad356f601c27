"""Which implementation runs: the native library, or plain torch; and how many threads it uses.

KSANA_KERNELS=native demands the library (RuntimeError without it), =reference demands plain torch; unset
takes the library if it can be built. The choice is made on first use and holds for the process.
"""

from __future__ import annotations

import ctypes
import os
import threading
from dataclasses import dataclass
from pathlib import Path

from ksana.kernels.build import BuildError, build
from ksana.kernels.threads import default_num_threads

_P, _I, _F = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float
SIGNATURES: dict[str, tuple[object, ...]] = {
    "ksana_linear": (_P, _P, _P, _P, _I, _I, _I, _I),
    "ksana_pack": (_P, _P, _I, _I),
    "ksana_rms_norm": (_P, _P, _P, _P, _I, _I, _F, _F),
    "ksana_gated": (_P, _P, _I, _I, ctypes.c_int),
    "ksana_rope": (_P, _P, _P, _P, _P, _I, _I, _I, _I, _I, _I, _I),
    "ksana_write_kv": (_P, _P, _P, _P, _P, _I, _I, _I, _I, _I, _I, _I),
    "ksana_paged_attention": (*(_P,) * 7, *(_I,) * 10, _F),
    "ksana_sample": (_P, _P, _P, _P, _I, _I, _I),
    "ksana_gumbels": (ctypes.c_uint64, ctypes.c_uint32, ctypes.c_uint32, _P, _I),
    "ksana_set_threads": (ctypes.c_int,),
}
"""Argument types of what returns 0 or, with a text in ksana_error, -1."""


class Library:
    """The loaded native kernels: one attribute per C function, without its prefix."""

    def __init__(self, path: Path) -> None:
        library = ctypes.CDLL(str(path))
        for name, arguments in SIGNATURES.items():
            function = getattr(library, name)
            function.argtypes = arguments
            function.restype = ctypes.c_int
        self.linear = library.ksana_linear
        self.pack = library.ksana_pack
        self.rms_norm = library.ksana_rms_norm
        self.gated = library.ksana_gated
        self.rope = library.ksana_rope
        self.write_kv = library.ksana_write_kv
        self.paged_attention = library.ksana_paged_attention
        self.sample = library.ksana_sample
        self.gumbels = library.ksana_gumbels
        self.set_threads = library.ksana_set_threads
        self.packed_floats = library.ksana_packed_floats
        self.packed_floats.argtypes, self.packed_floats.restype = (_I, _I), _I
        self.use_huge_pages = library.ksana_use_huge_pages
        self.use_huge_pages.argtypes, self.use_huge_pages.restype = (_P, _I), None
        self._error = library.ksana_error
        self._error.argtypes, self._error.restype = (), ctypes.c_char_p
        library.ksana_isa.argtypes, library.ksana_isa.restype = (), ctypes.c_char_p
        self.isa: str = library.ksana_isa().decode()

    def error(self) -> ValueError:
        """What the last call on this thread refused."""
        return ValueError(self._error().decode(errors="replace"))


@dataclass
class _Choice:
    library: Library | None
    reason: str
    num_threads: int


_choice: _Choice | None = None
_choosing = threading.Lock()


def _choose() -> _Choice:
    global _choice
    with _choosing:
        if _choice is None:
            _choice = _make_choice()
        return _choice


def _make_choice() -> _Choice:
    wanted = os.environ.get("KSANA_KERNELS", "")
    if wanted not in ("", "native", "reference"):
        raise RuntimeError(f"KSANA_KERNELS is {wanted!r}; it must be native or reference")
    if wanted == "reference":
        return _Choice(None, "KSANA_KERNELS=reference", 1)
    try:
        library = Library(build())
    except (BuildError, OSError) as error:
        if wanted == "native":
            raise RuntimeError(f"KSANA_KERNELS=native, but: {error}") from error
        return _Choice(None, str(error), 1)
    return _Choice(library, "", library.set_threads(default_num_threads()))


def native() -> Library | None:
    """The native library, or None where plain torch is used. Builds or loads it on the first call."""
    return (_choice or _choose()).library


def native_available() -> bool:
    """Whether the kernels run natively."""
    return native() is not None


def describe() -> str:
    """One line for the log: what the kernels run on, or why they are slow."""
    choice = _choose()
    if choice.library is None:
        return f"plain-torch reference kernels, MANY TIMES SLOWER than native ones ({choice.reason})"
    threads = "1 thread" if choice.num_threads == 1 else f"{choice.num_threads} threads"
    return f"native {choice.library.isa}, {threads}"


def set_num_threads(n: int) -> None:
    """Threads of the native kernels, the calling one included; 1 <= n <= 256. Not while a kernel runs.

    Results do not depend on it. The default is one per physical core that this process may use. The threads
    do not survive fork: a child computes on the calling thread only and must not call this.
    """
    if not 1 <= n <= 256:
        raise ValueError(f"number of kernel threads must be from 1 to 256, not {n}")
    choice = _choose()
    if choice.library is not None:
        choice.num_threads = choice.library.set_threads(n)
