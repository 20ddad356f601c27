"""`ksana version`: what is installed, for bug reports."""

from __future__ import annotations

import importlib.metadata
import platform
from collections.abc import Sequence

from ksana.cli.settings import Parser

PACKAGES = ("ksana", "torch", "trio", "quart", "quart-trio", "hypercorn", "msgspec", "tokenizers", "gguf")


def run(argv: Sequence[str]) -> int:
    Parser(prog="ksana version", description="Print versions.").parse_strictly(argv)
    for package in PACKAGES:
        try:
            version = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            version = "not installed"
        print(f"{package:<11} {version}")
    print(f"{'python':<11} {platform.python_version()} on {platform.system()} {platform.machine()}")
    return 0
