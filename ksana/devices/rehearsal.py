"""What a worker does only for the performance backend: make up KV, repeat layers, time operators. Torch."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import CodeType, FrameType, FunctionType
from typing import Any, Protocol, runtime_checkable

import torch

from ksana import kernels
from ksana.errors import InvariantViolated
from ksana.messages.steps import OperatorTime
from ksana.models.batch import KvCache, StepBatch
from ksana.models.spec import ModelSpec
from ksana.sampling.sampler import sample


def fill_kv(batch: StepBatch, kv: KvCache, spec: ModelSpec, seed: int) -> None:
    """Write made-up keys and values (standard normal) for every token of the step into every layer.

    They depend on the seed, on how many tokens there are and on the first one's position only.
    """
    num_tokens = len(batch.token_ids)
    generator = torch.Generator().manual_seed((seed * 1_000_003 + int(batch.positions[0])) & (2**63 - 1))
    shape = (2, num_tokens, spec.num_kv_heads, spec.head_dim)
    keys, values = torch.randn(shape, generator=generator)
    for layer, kind in enumerate(spec.layer_kinds):
        tables = batch.sliding if kind == "sliding" else batch.full
        assert tables is not None
        kernels.write_kv(keys, values, kv.keys[layer], kv.values[layer], tables.slots)


@runtime_checkable
class LayeredModel(Protocol):
    """A model that runs its decoder layers in the order of this list."""

    layers: list[Any]


@contextmanager
def repeated_layers(model: object, num_rounds: int) -> Iterator[None]:
    """Within, the model's decoder layers run so many times, one pass after the other.

    The result means nothing, but each pass does the work of one: it reads and writes the KV of its layers.
    Raises InvariantViolated for a model without a list of layers.
    """
    if num_rounds == 1:
        yield
        return
    if not isinstance(model, LayeredModel):
        raise InvariantViolated(f"the layers of a {type(model).__name__} cannot be repeated")
    layers = model.layers
    model.layers = layers * num_rounds
    try:
        yield
    finally:
        model.layers = layers


class OperatorTimer:
    """Times operators while it is entered, by name: kernels, the sampler, and torch operations between them.

    It watches the interpreter's calls (`sys.setprofile`), so nothing is changed or wrapped; each call of
    Python code within an operator adds some 0.2 µs to it. Operators called by others are part of these.
    """

    def __init__(self) -> None:
        self._watched = watched_operators()
        self._sums: dict[str, list[int]] = {}
        self._open: FrameType | None = None
        self._name = ""
        self._began_ns = 0
        self._is_in_torch = False

    def __enter__(self) -> OperatorTimer:
        sys.setprofile(self._event)
        return self

    def __exit__(self, *_: object) -> None:
        sys.setprofile(None)

    def times(self) -> tuple[OperatorTime, ...]:
        """The longest first."""
        by_time = sorted(self._sums.items(), key=lambda item: (-item[1][0], item[0]))
        return tuple(
            OperatorTime(name=name, total_ns=total_ns, num_calls=num_calls)
            for name, (total_ns, num_calls) in by_time
        )

    def _event(self, frame: FrameType, event: str, arg: Any) -> None:
        if self._open is not None:
            if event == "return" and frame is self._open:
                self._open = None
                self._add()
        elif event == "call":
            name_of = self._watched.get(frame.f_code)
            if name_of is not None:
                self._open, self._name = frame, name_of(frame)
                self._began_ns = time.perf_counter_ns()
        elif event == "c_call":
            if isinstance(getattr(arg, "__self__", None), torch.Tensor):
                self._is_in_torch, self._name = True, f"torch.{arg.__name__}"
                self._began_ns = time.perf_counter_ns()
        elif self._is_in_torch and event in ("c_return", "c_exception"):
            self._is_in_torch = False
            self._add()

    def _add(self) -> None:
        entry = self._sums.setdefault(self._name, [0, 0])
        entry[0] += time.perf_counter_ns() - self._began_ns
        entry[1] += 1


NameOf = Callable[[FrameType], str]


def watched_operators() -> dict[CodeType, NameOf]:
    """By code object: how a call is named. Products are told apart by shape, attention by its window."""
    plain = (
        *(kernels.rms_norm, kernels.add_rms_norm, kernels.silu_mul, kernels.gelu_tanh_mul),
        *(kernels.rope, kernels.write_kv, sample),
    )
    watched: dict[CodeType, NameOf] = {_code(function): _named(function.__name__) for function in plain}
    watched[_code(kernels.linear)] = _linear_name
    watched[_code(kernels.paged_attention)] = _attention_name
    return watched


def _code(function: Callable[..., Any]) -> CodeType:
    assert isinstance(function, FunctionType)
    return function.__code__


def _named(name: str) -> NameOf:
    return lambda _frame: name


def _linear_name(frame: FrameType) -> str:
    weight = frame.f_locals["weight"]
    return f"linear {weight.in_features}->{weight.out_features}"


def _attention_name(frame: FrameType) -> str:
    window = frame.f_locals["window"]
    return "paged_attention" if window is None else f"paged_attention (window {window})"
