"""Cheap argument checks: a wrong shape, type or layout is a ValueError, never a read out of bounds."""

from __future__ import annotations

from typing import NoReturn

import torch
from torch import Tensor


def fail(kernel: str, what: str, **tensors: Tensor) -> NoReturn:
    """Raise ValueError that names the kernel, what it wants, and what it was given."""
    given = ", ".join(
        f"{name} {tuple(t.shape)} {str(t.dtype).removeprefix('torch.')} strides {t.stride()} on {t.device}"
        for name, t in tensors.items()
    )
    raise ValueError(f"{kernel}: {what}; given {given}")


def is_dense(t: Tensor, dtype: torch.dtype = torch.float32) -> bool:
    """Contiguous, of that type, in this machine's memory."""
    return t.dtype is dtype and t.is_contiguous() and t.is_cpu


def is_heads(t: Tensor) -> bool:
    """float32 [T, heads, D] with the heads of a token contiguous: a whole tensor, or a slice of qkv rows."""
    return (
        t.dtype is torch.float32
        and t.is_cpu
        and t.dim() == 3
        and t.stride(2) == 1
        and (t.stride(1) == t.shape[2] or t.shape[1] == 1)
        and (t.stride(0) >= t.shape[1] * t.shape[2] or t.shape[0] <= 1)
    )
