# ruff: noqa: ASYNC110, ASYNC220, ASYNC240 - processes are watched from outside, by looking again and again

import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
import pytest
import trio

from ksana.devices.backend import WorkerLostError, WorkerSettings
from ksana.devices.process import ProcessBackend
from ksana.devices.simulated_worker import SimulatedWorker, hashed_tokens, simulated_block_bytes
from ksana.devices.staging import StagingMemory
from ksana.errors import ModelLoadError
from ksana.messages.staging import CopyFromStaging, CopyToStaging, StagedBlock, StagingCopied
from ksana.messages.steps import StepDone
from tests.processes import is_running

from .plans import edits, first_plan, next_plan, plan, row

COMMAND = (sys.executable, str(Path(__file__).with_name("fake_worker.py")))
SETTINGS = WorkerSettings(
    model_path="nowhere",
    num_fa_blocks=64,
    num_swa_blocks=0,
    block_size=16,
    max_model_len=256,
    max_num_seqs=4,
    num_threads=1,
)


@asynccontextmanager
async def backend(**options: object) -> AsyncIterator[ProcessBackend]:
    made = ProcessBackend(SETTINGS, command=COMMAND, **options)  # type: ignore[arg-type]
    try:
        with trio.fail_after(30):
            yield made
    finally:
        await made.stop()


async def wait_until_gone(pid: int, within_s: float = 10) -> None:
    with trio.fail_after(within_s):
        while is_running(pid):
            await trio.sleep(0.01)


async def test_starts_runs_steps_sent_ahead_and_stops() -> None:
    seen: list[tuple[int, int]] = []
    async with backend(progress=lambda done, total: seen.append((done, total)), model_fingerprint="f00") as b:
        info = await b.start(1)
        assert info.device == "fake f00"
        assert seen[-1] == (2, 2)
        pid = b.pid
        assert pid is not None
        plans = [first_plan(1), next_plan(2, 1, 5), next_plan(3, 1, 6)]
        for plan in plans:
            await b.submit(plan)
        done = [await b.receive() for _ in plans]
        inline = SimulatedWorker(hashed_tokens(1000), block_size=16, num_fa_blocks=64)
        assert [d.results for d in done] == [inline.run(plan).results for plan in plans]
        await b.stop()
        assert not is_running(pid)
        assert b.pid is None


async def test_kill_9_is_noticed_at_once_and_a_new_worker_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAKE_WORKER_STEP_S", "60")
    async with backend() as b:
        await b.start(1)
        await b.submit(first_plan())
        assert b.pid is not None
        began = time.monotonic()
        os.kill(b.pid, signal.SIGKILL)
        with pytest.raises(WorkerLostError, match="SIGKILL"):
            await b.receive()
        assert time.monotonic() - began < 2
        with pytest.raises(WorkerLostError):
            await b.receive()
        await b.submit(first_plan())  # to nobody: no error here
        monkeypatch.setenv("FAKE_WORKER_STEP_S", "0")
        await b.start(2)
        await b.submit(first_plan())
        assert (await b.receive()).step_id == 1


async def test_an_exception_in_a_step_is_a_death_with_its_last_words(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("FAKE_WORKER", "raise")
    with caplog.at_level(logging.WARNING, logger="ksana.worker"):
        async with backend() as b:
            await b.start(1)
            await b.submit(first_plan())
            with pytest.raises(WorkerLostError, match="exited with status 1"):
                await b.receive()
            with trio.move_on_after(5):
                while "RuntimeError: a step that fails" not in caplog.text:
                    await trio.sleep(0.01)
    assert "RuntimeError: a step that fails" in caplog.text
    assert "step 1 on stdout" in caplog.text


@pytest.mark.parametrize(
    ("mode", "error", "text"),
    [
        ("bad_model", ModelLoadError, "tensor x is missing"),
        ("bug", WorkerLostError, "ValueError: a bug in loading"),
        ("garbage", WorkerLostError, "does not speak our language"),
    ],
)
async def test_a_worker_that_cannot_start(
    monkeypatch: pytest.MonkeyPatch, mode: str, error: type[Exception], text: str
) -> None:
    monkeypatch.setenv("FAKE_WORKER", mode)
    async with backend() as b:
        with pytest.raises(error, match=text):
            await b.start(1)
        assert b.pid is None


async def test_a_start_that_takes_too_long_or_is_cancelled_leaves_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("FAKE_WORKER", "slow_start")
    async with backend(start_timeout_s=0.5) as b:
        with pytest.raises(WorkerLostError, match="worker_start_timeout"):
            await b.start(1)
        assert b.pid is None
    async with backend() as b:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(b.start, 1)
            while b.pid is None:
                await trio.sleep(0.01)
            pid = b.pid
            nursery.cancel_scope.cancel()
        await wait_until_gone(pid)


async def test_a_stopped_worker_is_killed_all_the_same() -> None:
    async with backend() as b:
        await b.start(1)
        assert b.pid is not None
        pid = b.pid
        os.kill(pid, signal.SIGSTOP)
        with trio.fail_after(5):
            await b.stop()
        assert not is_running(pid)


async def test_secrets_do_not_reach_the_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KSANA_API_KEY", "s3kr1t")
    monkeypatch.setenv("HF_TOKEN", "s3kr1t")
    async with backend() as b:
        await b.start(1)
        environment = Path(f"/proc/{b.pid}/environ").read_bytes()
    assert b"s3kr1t" not in environment
    assert b"OMP_WAIT_POLICY=passive" in environment


PARENT = """
import sys, trio
sys.path.insert(0, {tests!r})
from devices.test_process import COMMAND, SETTINGS
from devices.plans import first_plan
from ksana.devices.process import ProcessBackend
async def main():
    backend = ProcessBackend(SETTINGS, command=COMMAND)
    await backend.start(1)
    await backend.submit(first_plan())
    print(backend.pid, flush=True)
    await trio.sleep_forever()
trio.run(main)
"""


async def test_the_worker_dies_with_its_parent_even_in_the_middle_of_a_step() -> None:
    environment = {**os.environ, "FAKE_WORKER_STEP_S": "60"}
    code = PARENT.format(tests=str(Path(__file__).parents[1]))
    parent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, env=environment)
    assert parent.stdout is not None
    pid = int(parent.stdout.readline())
    assert is_running(pid)
    parent.kill()
    parent.wait()
    parent.stdout.close()
    await wait_until_gone(pid, within_s=5)


async def test_a_worker_process_shares_staging_memory_over_restarts() -> None:
    memory = StagingMemory.create(4, simulated_block_bytes(16))
    made = ProcessBackend(msgspec.structs.replace(SETTINGS, staging=memory.area), command=COMMAND)
    out = CopyToStaging(pool_epoch=1, copy_id=5, blocks=(StagedBlock(pool="fa", block_id=1, slot=2),))
    try:
        with trio.fail_after(30):
            await made.start(1)
            await made.submit(first_plan(1))
            await made.submit(out)
            assert isinstance(await made.receive(), StepDone)
            assert await made.receive() == StagingCopied(pool_epoch=1, copy_id=5)
            inline = SimulatedWorker(hashed_tokens(1000), block_size=16, num_fa_blocks=64)
            expected = inline.run(first_plan(1)).results
            content = inline._pools["fa"].content(1).tobytes()
            assert bytes(memory.slot(2, len(content))) == content

            await made.start(2)
            back = (StagedBlock(pool="fa", block_id=7, slot=2),)
            await made.submit(CopyFromStaging(pool_epoch=2, copy_id=6, blocks=back))
            # Only the last token is computed: the others are read from the block that was loaded.
            new = first_plan(1).new
            await made.submit(plan(2, row(1, 4, 1, fa=edits(7)), new=new))
            assert await made.receive() == StagingCopied(pool_epoch=2, copy_id=6)
            done = await made.receive()
            assert isinstance(done, StepDone)
            assert done.results == expected
    finally:
        await made.stop()
        memory.close()
