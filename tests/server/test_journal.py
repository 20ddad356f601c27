"""A server that records, whose worker is killed, and that is killed itself; then its journal replays."""

from __future__ import annotations

import os
import random
import signal
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from ksana.journal.reading import list_segments
from ksana.journal.requests import recorded_requests
from tests.processes import eventually
from tests.server.conftest import Serve
from tests.server.process import COMMAND, ServerProcess

SECRET = "a text that nobody else would write"


def replay(*argv: str) -> tuple[int, str]:
    done = subprocess.run(
        [*COMMAND, "replay", *argv], capture_output=True, text=True, check=False, timeout=300
    )
    return done.returncode, done.stdout + done.stderr


def load(
    server: ServerProcess, num_requests: int, *, seed: int = 0, kill_worker_at: int | None = None
) -> None:
    """Streams and answers, some of which are left; prefixes are shared."""

    def one(number: int) -> None:
        if number == kill_worker_at:
            os.kill(server.the_worker(), signal.SIGKILL)
        rng = random.Random(seed * 10_000 + number)
        prompt = f"{SECRET} {rng.randrange(4)} " * rng.randrange(1, 8) + str(number)
        body = {"prompt": prompt, "max_tokens": rng.randrange(1, 40), "seed": number, "stop": ["zq"]}
        with server.http() as http:
            if rng.random() < 0.3:
                with http.stream("POST", "/v1/completions", json={**body, "stream": True}) as answer:
                    assert answer.status_code == 200
                    for count, _ in enumerate(answer.iter_lines()):
                        if count == 5:
                            return
            else:
                assert http.post("/v1/completions", json=body).status_code == 200

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(one, range(num_requests)))


def test_what_was_recorded_replays_after_the_worker_was_killed(
    serve: Serve, tiny_model: Path, tmp_path: Path
) -> None:
    journal, store = tmp_path / "journal", tmp_path / "store"
    flags = (
        "--journal",
        str(journal),
        "--journal-segment-bytes",
        "128KiB",
        "--remote-cache",
        f"file://{store}",
    )
    server = serve(*flags)
    load(server, 60, kill_worker_at=30)
    assert server.metrics()["journal_up"] == 1
    assert "prompts and answers are in it" in server.log
    server.send_signal(signal.SIGTERM)
    code, _, _ = server.wait()
    assert code == 0
    assert len(list_segments(journal)) > 1
    assert len(recorded_requests(journal)) == 60
    code, text = replay(str(journal), "--model", str(tiny_model))
    assert code == 0, text
    assert "All the same" in text
    for actor in ("tokenizer", "scheduler", "block_allocator", "remote_cache_loader"):
        assert f" of the {actor}" in text
    assert "ends without an end" not in text

    # Another process goes on in the same directory, and dies.
    server = serve(*flags)
    load(server, 20, seed=1)
    recorded = server.metrics()["journal_bytes_total"]

    def written() -> bool:
        segments = list_segments(journal)
        last_run = [s for s in segments if s.header.run == segments[-1].header.run]
        return sum(s.path.stat().st_size for s in last_run) >= recorded

    eventually(written)
    server.send_signal(signal.SIGKILL)
    server.wait()
    code, text = replay(str(journal))
    assert code == 0, text
    assert "ends without an end" in text


@pytest.mark.slow
def test_500_requests_with_a_killed_worker_replay(serve: Serve, tmp_path: Path) -> None:
    journal, store = tmp_path / "journal", tmp_path / "store"
    server = serve(
        "--journal",
        str(journal),
        "--journal-segment-bytes",
        "512KiB",
        "--remote-cache",
        f"file://{store}",
        "--kv-cache-memory",
        "1600KiB",
    )
    load(server, 500, kill_worker_at=250)
    server.send_signal(signal.SIGTERM)
    server.wait()
    code, text = replay(str(journal))
    assert code == 0, text
    assert len(recorded_requests(journal)) == 500


def test_a_redacted_journal_holds_no_text(serve: Serve, tmp_path: Path) -> None:
    journal = tmp_path / "journal"
    server = serve("--journal", str(journal), "--journal-redact")
    load(server, 20)
    with httpx.Client(base_url=server.url) as http:
        assert http.get("/health").status_code == 200
    server.send_signal(signal.SIGTERM)
    server.wait()
    data = b"".join(segment.path.read_bytes() for segment in list_segments(journal))
    assert SECRET.encode() not in data
    assert b"\xa2zq" not in data, "the stop string"
    code, text = replay(str(journal))
    assert code == 0, text
    assert " of the scheduler" in text


def test_a_directory_that_cannot_be_written_is_told_at_once(serve: Serve, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    server = serve("--journal", str(tmp_path / "file" / "journal"))
    code, _, error = server.wait()
    assert code == 2
    assert "cannot be written" in error.splitlines()[-1]
