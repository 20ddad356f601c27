from __future__ import annotations

import subprocess
import sys


def test_the_gateway_needs_neither_torch_nor_transformers() -> None:
    code = (
        "import sys, ksana.gateway.app, ksana.gateway.server; "
        "print(sorted({'torch', 'transformers', 'numpy'} & set(sys.modules)))"
    )
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert answer.stdout == "[]\n", answer.stdout + answer.stderr
