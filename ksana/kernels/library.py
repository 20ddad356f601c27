"""Which implementation runs: the native library, or plain torch; and how many threads it uses."""

from __future__ import annotations


def native_available() -> bool:
    """Whether the kernels run natively. Builds or loads the library on the first call."""
    return False


def describe() -> str:
    """One line for the log: what the kernels run on, or why they are slow."""
    return "plain-torch reference kernels (SLOW): no native library yet"


def set_num_threads(n: int) -> None:
    """Threads of the native kernels, the calling one included; 1 <= n <= 256."""
    if not 1 <= n <= 256:
        raise ValueError(f"number of kernel threads must be from 1 to 256, not {n}")
