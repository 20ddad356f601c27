"""The parts decoder layers are made of. Every matrix product of every model goes through `Linear`."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ksana import kernels
from ksana.models.checkpoint import Checkpoint


class Linear:
    """y = x W^T + b, with the weight packed at load. x [M, in], y [M, out]."""

    __slots__ = ("bias", "weight")

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self.weight = kernels.pack_weight(weight)
        self.bias = bias

    def __call__(self, x: Tensor) -> Tensor:
        return kernels.linear(x, self.weight, self.bias)


class LayerReader:
    """Tensors of one layer (or, with None, of the whole model) out of a checkpoint, as torch tensors."""

    def __init__(
        self, checkpoint: Checkpoint, layer: int | None, on_read: Callable[[], None] = lambda: None
    ) -> None:
        self.checkpoint, self.layer, self._on_read = checkpoint, layer, on_read

    def tensor(self, role: str) -> Tensor:
        """In memory of our own, never a view into the file, which may be misaligned or change."""
        values = self.checkpoint.read(role, self.layer)
        self._on_read()
        return torch.from_numpy(values if values.flags.writeable else values.copy())

    def fused(self, roles: tuple[str, ...], has_bias: bool) -> Linear:
        """One product for several that share their input: rows of the weights one below the other."""
        bias = _stacked([self.tensor(f"{role}_bias") for role in roles]) if has_bias else None
        return Linear(_stacked([self.tensor(role) for role in roles]), bias)


def _stacked(tensors: list[Tensor]) -> Tensor:
    return tensors[0] if len(tensors) == 1 else torch.cat(tensors)
