"""What the kernel tests share."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch

from ksana import kernels
from ksana.kernels import library
from tests.kernels.problems import Problem, make_problem


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@pytest.fixture
def reference_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a machine without a compiler."""
    monkeypatch.setattr(library, "_choice", library._Choice(None, "a test", 1))


@pytest.fixture
def with_threads() -> Iterator[Callable[[int], None]]:
    """Change the number of kernel threads; put back afterwards."""
    kernels.native_available()
    before = library._choose().num_threads
    yield kernels.set_num_threads
    kernels.set_num_threads(before)


@pytest.fixture
def problem() -> Callable[..., Problem]:
    return make_problem
