"""A server whose tokenizer.json runs away on some prompts goes on serving the others."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from tests.server.conftest import Serve
from tests.tiny_models import llama_config, tiny_tokenizer, write_directory
from tests.tokenizers.exploding_tokenizers import EXPLODING, TENFOLD_CASE, Exploding

pytestmark = pytest.mark.slow


def resident_bytes(pid: int) -> int:
    """Of the server and of every process below it, together."""
    status = Path(f"/proc/{pid}/status").read_text()
    own = int(status.partition("VmRSS:")[2].split()[0]) << 10
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return own + sum(resident_bytes(int(child)) for child in children)


@pytest.mark.parametrize("case", [EXPLODING[0], TENFOLD_CASE], ids=lambda case: case.name)
def test_one_bad_prompt_is_a_400_and_the_server_goes_on(
    serve: Serve, tmp_path: Path, case: Exploding
) -> None:
    write_directory(tmp_path, llama_config(), with_head=False)
    tokenizer = tiny_tokenizer()
    case.change(tokenizer)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    server = serve(model=str(tmp_path))
    good = {"prompt": "b c", "max_tokens": 5, "temperature": 0, "ignore_eos": True}
    with server.http() as http:
        expected = http.post("/v1/completions", json=good).raise_for_status().json()["choices"]
        before = resident_bytes(server.pid)
        answers: list[int] = []

        def poison() -> None:
            with server.http() as other:
                chat = {"messages": [{"role": "user", "content": case.poison}], "max_tokens": 5}
                for path, body in (
                    ("/v1/completions", good | {"prompt": case.poison}),
                    ("/v1/completions", good | {"prompt": case.poison, "stream": True}),
                    ("/v1/chat/completions", chat),
                    ("/tokenize", {"prompt": case.poison}),
                ):
                    answer = other.post(path, json=body)
                    answers.append(answer.status_code)
                    assert "error" in answer.json()

        threads = [threading.Thread(target=poison) for _ in range(2)]
        for thread in threads:
            thread.start()
        while any(thread.is_alive() for thread in threads):
            assert http.get("/health").status_code == 200
            assert http.post("/v1/completions", json=good).json()["choices"] == expected
            assert resident_bytes(server.pid) < before + (3 << 29)
        assert len(answers) == 8
        assert set(answers) <= {400, 200 if case is EXPLODING[0] else 400}  # a template ends in other letters
        assert answers.count(400) >= 6
        assert http.post("/v1/completions", json=good).json()["choices"] == expected
    log = server.log
    assert log.count("prompts are encoded in a process with limits, since") == 1
    assert "panicked" not in log
    assert "an actor broke" not in log
    assert "aaaaaaaaaaa" not in log
