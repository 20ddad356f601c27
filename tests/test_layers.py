"""A simulation or a router runs on a machine without torch: nothing but the worker may import it.

The import contracts in pyproject.toml (`lint-imports`) read the source; these tests import for real, so
they also see what third parties bring along.
"""

from __future__ import annotations

import pkgutil
import subprocess
import sys

import pytest

import ksana

TORCH_FREE = (
    "actors",
    "cache",
    "cli",
    "costs",
    "gateway",
    "loading",
    "messages",
    "perf",
    "router",
    "runtime",
    "scheduling",
    "stores",
)
"""Packages none of whose modules imports torch."""


def modules_of(package: str) -> list[str]:
    root = f"ksana.{package}"
    path = [f"{entry}/{package}" for entry in ksana.__path__]
    return [root, *(module.name for module in pkgutil.walk_packages(path, root + "."))]


def imported_heavy(modules: list[str]) -> list[str]:
    """Which of the slow packages a fresh interpreter has loaded after importing all of `modules`."""
    code = (
        "import importlib, sys\n"
        "for name in sys.argv[1:]: importlib.import_module(name)\n"
        "print(*(name for name in ('torch', 'transformers') if name in sys.modules))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, *modules], capture_output=True, text=True, check=False, timeout=60
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


def test_the_check_would_notice() -> None:
    assert imported_heavy(["ksana.models.loader"]) == ["torch"]


def test_engine_and_client_do_not_import_torch() -> None:
    assert imported_heavy(["ksana", "ksana.engine", "ksana.client", "ksana.config"]) == []


@pytest.mark.parametrize("package", TORCH_FREE)
def test_no_module_of_it_imports_torch(package: str) -> None:
    modules = modules_of(package)
    assert imported_heavy(modules) == []


def test_modules_are_found() -> None:
    assert "ksana.messages.steps" in modules_of("messages")
    assert "ksana.actors" in modules_of("actors")


def test_what_the_engine_reads_of_a_model_needs_no_torch() -> None:
    assert imported_heavy(["ksana.models.spec", "ksana.models.load", "ksana.models.sources"]) == []
