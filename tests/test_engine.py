"""The engine on a simulated device and a virtual clock: every actor is real, nothing else is."""

import random
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
import pytest
import trio

from ksana.config import Settings
from ksana.devices.backend import WorkerLostError
from ksana.devices.simulated import SimulatedBackend, crash_at_steps
from ksana.devices.simulated_worker import hashed_tokens
from ksana.engine import Engine
from ksana.errors import ConfigError, ModelLoadError, RequestError, ServiceError
from ksana.messages.outputs import Aborted, Ended, Failed, Finished
from ksana.messages.requests import TextPrompt
from ksana.model_setup import ModelFiles
from ksana.runtime.deterministic import run_deterministic
from ksana.runtime.virtual_clock import VirtualClock

from .engines import Heard, greedy, is_balanced, listen, model_files, prompt, settled, simulated
from .models_for_tests import tiny_gemma3_dir, tiny_llama_dir


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> ModelFiles:
    return model_files(tiny_llama_dir(tmp_path_factory.mktemp("llama")))


@pytest.fixture(scope="module")
def gemma(tmp_path_factory: pytest.TempPathFactory) -> ModelFiles:
    return model_files(tiny_gemma3_dir(tmp_path_factory.mktemp("gemma")))


def run(engine: Engine, script: Callable[[Engine], Awaitable[None]], seed: int = 0) -> None:
    async def main() -> None:
        async with engine:
            await script(engine)

    run_deterministic(seed, main, VirtualClock())


def test_a_request_runs_from_text_to_text(llama: ModelFiles) -> None:
    async def script(engine: Engine) -> None:
        heard = await listen(engine.generate(TextPrompt(text="hello world"), greedy(20)))
        assert heard.accepted is not None
        assert heard.accepted.prompt_token_ids == tuple(llama.tokenizer.encode("hello world", True))
        assert heard.outcome == Finished(reason="length")
        assert len(heard.token_ids) == heard.usage.num_output_tokens == 20
        assert heard.text == llama.tokenizer.decode(heard.token_ids, True)
        status = await settled(engine)
        assert status.counters.num_finished == 1
        assert status.counters.num_output_tokens == 20
        assert status.unhealthy_because(120) is None
        assert engine.client.model.name == "tiny-llama"
        assert engine.client.model.device == "simulated"

    run(simulated(llama), script)


@pytest.mark.parametrize("family", ["llama", "gemma"])
def test_200_requests_with_random_aborts_end_once_and_pools_balance(
    family: str, request: pytest.FixtureRequest
) -> None:
    files: ModelFiles = request.getfixturevalue(family)
    rng = random.Random(7)
    ends = {"whole": 0, "left": 0, "cancelled": 0}

    async def one(engine: Engine, number: int) -> None:
        await trio.sleep(rng.expovariate(1 / 2.0))
        shared = [9 + i % 200 for i in range(rng.choice([0, 20, 90]))]
        tokens = [*shared, *(rng.randrange(6, 320) for _ in range(rng.randrange(1, 60)))]
        wanted = rng.randrange(1, 60)
        stream = engine.generate(prompt(*tokens), greedy(wanted, seed=number))
        way = rng.choice(["whole", "whole", "left", "cancelled"])
        ends[way] += 1
        if way == "whole":
            heard = await listen(stream)
            assert isinstance(heard.outcome, Finished), heard.outcome
            assert len(heard.token_ids) == wanted
        elif way == "left":
            await listen(stream, leave_after=rng.randrange(0, wanted + 1))
        else:
            with trio.move_on_after(rng.uniform(0, 1.5)):
                await listen(stream)

    async def script(engine: Engine) -> None:
        async with trio.open_nursery() as nursery:
            for number in range(200):
                nursery.start_soon(one, engine, number)
        status = await settled(engine)
        assert status.num_core_crashes == 0
        assert is_balanced(status.swa_use)
        counted = status.counters
        assert counted.num_finished + counted.num_aborted + counted.num_failed <= 200
        assert counted.num_failed == 0
        assert counted.num_finished >= ends["whole"]

    run(simulated(files, max_num_seqs=16, kv_cache_memory="1MiB"), script)
    assert min(ends.values()) > 20


def play(files: ModelFiles, seed: int) -> list[bytes]:
    """Some traffic; every activation of every actor as bytes."""
    log: list[bytes] = []

    def tap(*activation: Any) -> None:
        log.append(msgspec.msgpack.encode(activation))

    async def script(engine: Engine) -> None:
        rng = random.Random(seed)

        async def one(number: int) -> None:
            await trio.sleep(rng.random())
            await listen(engine.generate(prompt(*range(6, 30 + number)), greedy(5 + number)))

        async with trio.open_nursery() as nursery:
            for number in range(12):
                nursery.start_soon(one, number)

    run(simulated(files, tap=tap, fault=crash_at_steps(20)), script, seed)
    return log


def test_the_same_seed_gives_the_same_log_and_another_seed_another(gemma: ModelFiles) -> None:
    first = play(gemma, 1)
    assert len(first) > 200
    assert play(gemma, 1) == first
    assert play(gemma, 2) != first


def test_streams_go_on_with_the_same_tokens_when_the_worker_dies(llama: ModelFiles) -> None:
    def tokens_with(*crashes: int) -> list[list[int]]:
        heard: list[Heard] = []

        async def script(engine: Engine) -> None:
            async def one(number: int) -> None:
                heard.append(await listen(engine.generate(prompt(*range(6, 20 + number)), greedy(30))))

            async with trio.open_nursery() as nursery:
                for number in range(4):
                    nursery.start_soon(one, number)
            status = await settled(engine)
            assert status.num_worker_restarts == len(crashes)
            assert status.worker_epoch == len(crashes) + 1

        run(simulated(llama, fault=crash_at_steps(*crashes)), script)
        assert all(isinstance(h.outcome, Finished) for h in heard)
        return sorted(h.token_ids for h in heard)

    undisturbed = tokens_with()
    assert tokens_with(8, 30) == undisturbed


def test_dropping_cancelling_or_breaking_out_of_a_stream_aborts_at_once(llama: ModelFiles) -> None:
    async def script(engine: Engine) -> None:
        async for event in engine.generate(prompt(6, 7), greedy(400)):
            if not isinstance(event, Ended):
                break
        with pytest.raises(ZeroDivisionError):  # noqa: PT012
            async for _ in engine.generate(prompt(6, 7), greedy(400)):
                raise ZeroDivisionError
        with trio.move_on_after(0.3):
            async for _ in engine.generate(prompt(6, 7), greedy(400)):
                pass
        began_s = trio.current_time()
        status = await settled(engine)
        assert trio.current_time() - began_s < 0.2
        assert status.counters.num_aborted == 3
        assert status.num_open_slots == 0

    run(simulated(llama), script)


def test_deadlines(llama: ModelFiles) -> None:
    async def script(engine: Engine) -> None:
        heard = await listen(engine.generate(prompt(6), greedy(400), timeout_s=1))
        assert isinstance(heard.outcome, Failed)
        assert heard.outcome.status == 504
        assert trio.current_time() == pytest.approx(3, abs=0.1)

    run(simulated(llama), script)


def test_refusals(llama: ModelFiles) -> None:
    async def script(engine: Engine) -> None:
        wrong = await listen(engine.generate(prompt(9999), greedy(4)))
        assert isinstance(wrong.outcome, Failed)
        assert wrong.outcome.status == 400
        streams = [engine.generate(prompt(6), greedy(50)) for _ in range(4)]
        with pytest.raises(ServiceError) as refusal:
            engine.generate(prompt(6), greedy(50))
        assert refusal.value.status == 429
        assert engine.status().num_refused == 1
        for stream in streams:
            assert isinstance((await listen(stream)).outcome, Finished)
        await settled(engine)
        engine.generate(prompt(6), greedy(50)).close()

    run(simulated(llama, max_num_seqs=2, max_queued_requests=2), script)


async def test_tokenize_and_detokenize(llama: ModelFiles) -> None:
    async with simulated(llama) as engine:
        ids = await engine.client.tokenize(TextPrompt(text="hello"))
        assert await engine.client.detokenize(ids, skip_special_tokens=True) == "hello"
        with pytest.raises(RequestError, match="outside the vocabulary"):
            await engine.client.detokenize((5, 9999))
        with pytest.raises(RequestError, match="context"):
            await engine.client.detokenize((7,) * 1000)


def test_an_actor_that_breaks_fails_what_runs_and_the_engine_goes_on(
    llama: ModelFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    from ksana.cache.block_allocator import BlockAllocator

    handle = BlockAllocator.handle
    calls = 0

    def breaks_once(self: BlockAllocator, *args: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == 10:
            raise AssertionError("pools do not balance")
        return handle(self, *args)

    monkeypatch.setattr(BlockAllocator, "handle", breaks_once)

    async def script(engine: Engine) -> None:
        stream = engine.generate(prompt(6, 7), greedy(5))
        left = engine.generate(prompt(6, 7), greedy(50))
        left.close()
        heard = await listen(engine.generate(prompt(6, 7), greedy(50)))
        assert isinstance(heard.outcome, Failed)
        assert (heard.outcome.status, heard.outcome.code) == (500, "engine_error")
        del stream
        before = engine.status()
        assert before.num_core_crashes == 1
        assert before.counters.num_output_tokens > 0
        again = await listen(engine.generate(prompt(6, 7), greedy(50)))
        assert isinstance(again.outcome, Finished)
        status = await settled(engine)
        assert status.worker_epoch == 2
        assert status.counters.num_output_tokens == before.counters.num_output_tokens + 50
        assert status.unhealthy_because(120) is None

    run(simulated(llama), script)


def test_an_engine_whose_actors_keep_breaking_stops_serving_and_says_so(
    llama: ModelFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    from ksana.cache.block_allocator import BlockAllocator

    def breaks(*_args: Any) -> Any:
        raise AssertionError("always")

    async def script(engine: Engine) -> None:
        monkeypatch.setattr(BlockAllocator, "handle", breaks)
        heard = await listen(engine.generate(prompt(6, 7), greedy(5)))
        assert isinstance(heard.outcome, Failed)
        await trio.sleep(20)
        status = engine.status()
        assert status.broken
        assert "internal errors" in str(status.unhealthy_because(120))
        with pytest.raises(ServiceError, match="internal errors"):
            engine.generate(prompt(6), greedy(1))

    run(simulated(llama), script)


def test_a_worker_that_cannot_be_restarted(llama: ModelFiles) -> None:
    made: list[SimulatedBackend] = []

    async def script(engine: Engine) -> None:
        stream = engine.generate(prompt(6, 7), greedy(400))
        await trio.sleep(0.5)
        made[0].kill()
        heard = await listen(stream)
        assert isinstance(heard.outcome, Failed)
        assert heard.outcome.status == 503
        assert "keeps dying" in str(engine.status().unhealthy_because(120))
        late = await listen(engine.generate(prompt(6), greedy(1)))
        assert isinstance(late.outcome, Failed)
        assert late.outcome.status == 503
        await trio.sleep(200)
        assert isinstance((await listen(engine.generate(prompt(6), greedy(1)))).outcome, Finished)
        assert engine.status().unhealthy_because(120) is None

    fault = lambda epoch: "no memory" if 2 <= epoch <= 8 else None  # noqa: E731
    run(simulated(llama, made=made, start_fault=fault), script)


def test_a_stalled_engine_is_not_healthy(llama: ModelFiles) -> None:
    made: list[SimulatedBackend] = []

    class Frozen:
        def seconds(self, _shape: object) -> float:
            return 1e6

    async def script(engine: Engine) -> None:
        made[0]._cost = Frozen()
        await trio.sleep(500)
        stream = engine.generate(prompt(6, 7), greedy(4))
        await trio.sleep(99)
        status = engine.status()
        assert status.unhealthy_because(120) is None
        assert "no step was done for 99 s" in str(status.unhealthy_because(50))
        stream.close()

    run(simulated(llama, made=made), script)


def test_a_worker_that_is_being_replaced_is_healthy_however_long_it_loads(llama: ModelFiles) -> None:
    made: list[SimulatedBackend] = []

    async def script(engine: Engine) -> None:
        made[0]._start_time_s = 500
        stream = engine.generate(prompt(6, 7), greedy(200))
        await trio.sleep(0.5)
        made[0].kill()
        await trio.sleep(499)
        status = engine.status()
        assert status.has_work
        assert status.worker_state == "restarting"
        assert status.unhealthy_because(120) is None
        heard = await listen(stream)
        assert isinstance(heard.outcome, Finished)
        assert engine.status().unhealthy_because(120) is None

    run(simulated(llama, made=made), script)


def test_leaving_waits_for_what_runs_and_refuses_what_is_new(llama: ModelFiles) -> None:
    heard: list[Heard] = []

    async def main() -> None:
        async with trio.open_nursery() as nursery, simulated(llama) as engine:

            async def one() -> None:
                heard.append(await listen(engine.generate(prompt(6, 7), greedy(100))))

            async def late() -> None:
                await trio.sleep(0.1)
                with pytest.raises(ServiceError, match="shutting down") as refusal:
                    engine.generate(prompt(6), greedy(1))
                assert refusal.value.status == 503

            nursery.start_soon(one)
            await trio.sleep(0.2)
            nursery.start_soon(late)

    trio.run(main, clock=VirtualClock())
    assert heard[0].outcome == Finished(reason="length")


def test_leaving_does_not_wait_longer_than_the_drain_timeout(llama: ModelFiles) -> None:
    heard: list[Heard] = []

    async def main() -> None:
        async with trio.open_nursery() as nursery:
            async with simulated(llama, drain_timeout=1) as engine:

                async def one() -> None:
                    heard.append(await listen(engine.generate(prompt(6, 7), greedy(400))))

                nursery.start_soon(one)
                await trio.sleep(0.2)
                began_s = trio.current_time()
            assert trio.current_time() - began_s < 1.2

    trio.run(main, clock=VirtualClock())
    assert isinstance(heard[0].outcome, Failed)
    assert heard[0].outcome.status == 503


def test_an_exception_or_cancellation_inside_ends_at_once_and_comes_out_as_it_is(llama: ModelFiles) -> None:
    heard: list[Heard] = []

    async def main() -> None:
        async with trio.open_nursery() as nursery:

            async def one(engine: Engine) -> None:
                heard.append(await listen(engine.generate(prompt(6, 7), greedy(400))))

            with pytest.raises(ZeroDivisionError):  # noqa: PT012
                async with simulated(llama) as engine:
                    nursery.start_soon(one, engine)
                    await trio.sleep(0.2)
                    raise ZeroDivisionError
            assert trio.current_time() < 3
            with trio.move_on_after(4) as scope:
                async with simulated(llama) as engine:
                    await trio.sleep_forever()
            assert scope.cancelled_caught

    trio.run(main, clock=VirtualClock())
    assert isinstance(heard[0].outcome, Aborted)


def test_starts_that_cannot_work_say_why(llama: ModelFiles) -> None:
    async def start(engine: Engine) -> None:
        async with engine:
            raise AssertionError("it started")

    def fails(engine: Engine, error: type[Exception], text: str) -> None:
        with pytest.raises(error, match=text):
            trio.run(start, engine, clock=VirtualClock())

    fails(simulated(llama, start_fault=lambda _epoch: "model: tensor x"), ModelLoadError, "tensor x")
    fails(simulated(llama, start_fault=lambda _epoch: "no luck"), WorkerLostError, "no luck")
    fails(simulated(llama, max_model_len=4096), ConfigError, "2048 tokens at most")
    fails(simulated(llama, kv_cache_memory="100KiB"), ConfigError, "max-model-len")
    fails(Engine(Settings(model="/nowhere/at-all")), ModelLoadError, "nowhere")
    fails(Engine(Settings(model=str(llama.path), chat_template="/no/file")), ConfigError, "chat template")


def test_one_row_in_error_harms_only_its_request(llama: ModelFiles) -> None:
    good = hashed_tokens(320)

    def tokens(known: Any, position: int) -> int | str:
        return "NaN in the logits" if known.token_ids[0] == 13 and position == 3 else good(known, position)

    async def script(engine: Engine) -> None:
        heard: dict[int, Heard] = {}

        async def one(first: int) -> None:
            heard[first] = await listen(engine.generate(prompt(first, 7), greedy(20)))

        async with trio.open_nursery() as nursery:
            for first in (12, 13, 14):
                nursery.start_soon(one, first)
        assert isinstance(heard[13].outcome, Failed)
        assert heard[13].outcome.status == 500
        assert isinstance(heard[12].outcome, Finished)
        assert isinstance(heard[14].outcome, Finished)
        await settled(engine)

    run(simulated(llama, tokens=tokens), script)
