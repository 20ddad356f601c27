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
    if t.dtype is not torch.float32 or not t.is_cpu or t.dim() != 3:
        return False
    per_token, per_head, per_element = t.stride()
    num_tokens, num_heads, dim = t.shape
    return (
        per_element == 1
        and (per_head == dim or num_heads == 1)
        and (per_token >= num_heads * dim or num_tokens <= 1)
    )
