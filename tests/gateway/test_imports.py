from __future__ import annotations

import subprocess
import sys

from ksana.gateway import errors
from ksana.tokenizers import prompts


def test_the_gateway_needs_neither_torch_nor_transformers() -> None:
    code = (
        "import sys, ksana.gateway.app, ksana.gateway.server; "
        "print(sorted({'torch', 'transformers', 'numpy'} & set(sys.modules)))"
    )
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert answer.stdout == "[]\n", answer.stdout + answer.stderr


def test_the_gateway_knows_the_tokenizer_s_codes() -> None:
    assert errors.CONTEXT_LENGTH_EXCEEDED == prompts.CONTEXT_LENGTH_EXCEEDED
    assert errors.EMPTY_PROMPT == prompts.EMPTY_PROMPT
