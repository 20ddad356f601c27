"""A world does what its plan says, keeps every promise, and repeats itself."""

from __future__ import annotations

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
import pytest

from ksana.errors import ConfigError
from simulations.faults import (
    BadRow,
    Disconnects,
    Drained,
    OnMessage,
    Overload,
    Poison,
    SlowMessages,
    SlowWorker,
    StartFailures,
    StoreTrouble,
    WorkerCrash,
)
from simulations.keep import Keep
from simulations.network import LinkSpec
from simulations.requests import Ending, SimRequest
from simulations.scenario import StoreSpec
from simulations.swarm.swarm_draw import draw_scenario
from simulations.world import run_world
from tests.simulations.worlds import ENGINE, STEP_S, endings, ran, request, world


def test_one_request_takes_a_step_per_token() -> None:
    (asked,) = ran(world(), [request(at_s=1.0, max_tokens=5)], token_times=True).requests
    assert asked.ending == "finished length"
    assert asked.num_output_tokens == 5
    assert asked.scheduled_s == 1.0
    assert asked.token_times_s is not None
    assert list(asked.token_times_s) == pytest.approx([1 + STEP_S * (n + 1) for n in range(5)])


def test_the_model_ends_when_it_is_told_to() -> None:
    asked = [
        request(num_output_tokens=3, max_tokens=9),
        request(num_output_tokens=3, max_tokens=9, min_tokens=6),
        request(num_output_tokens=3, max_tokens=9, ignore_eos=True),
        request(num_output_tokens=3, max_tokens=9, stop_token_id=2),
        request(stop_after=1, max_tokens=9),
        request(leaves_after=2, max_tokens=9),
        request(prompt=ENGINE.max_model_len),
        request(timeout_s=0.035, max_tokens=90),
    ]
    record = ran(world(), asked)
    assert endings(record) == [
        "finished stop",
        "finished stop",
        "finished length",
        "finished stop",
        "finished stop",
        "left",
        "failed 400",
        "failed 504",
    ]
    assert [one.num_output_tokens for one in record.requests] == [3, 6, 9, 3, 2, 2, 0, 2]


def test_slots_are_bounded() -> None:
    engine = msgspec.structs.replace(ENGINE, max_num_seqs=2, max_queued_requests=1)
    record = ran(world(engine=engine), [request() for _ in range(5)])
    assert endings(record).count("refused 429") == 2
    assert record.engines[0].counters["num_refused"] == 2


def test_a_link_takes_time() -> None:
    link = LinkSpec(latency_s=0.1, bytes_per_s=400.0)
    first, second = ran(world(link=link), [request(), request(text=1)]).requests
    assert first.scheduled_s == pytest.approx(0.1 + 40 / 400)
    assert second.scheduled_s == pytest.approx(0.1 + 80 / 400)
    assert first.first_token_s == pytest.approx(0.2 + STEP_S + 0.1)


def test_what_follows_an_ending_is_asked() -> None:
    class Twice:
        def first(self):
            yield request()

        def after(self, ending: Ending) -> SimRequest | None:
            if ending.request.session is not None:
                return None
            return request(at_s=ending.at_s + 1, session=7)

    first, second = run_world(world(), Twice()).requests
    assert first.ended_s is not None
    assert second.arrival_s == first.ended_s + 1
    assert second.session == 7


def test_a_crash_costs_time_and_no_tokens() -> None:
    record = ran(world(WorkerCrash(at_s=0.025)), [request(max_tokens=10)])
    assert endings(record) == ["finished length"]
    assert record.engines[0].counters["num_worker_restarts"] == 1
    assert record.requests[0].ended_s == pytest.approx(0.025 + 0.5 + 8 * STEP_S)
    assert [fault.text for fault in record.faults] == ["worker_crash"]


def test_starts_that_fail_are_tried_again() -> None:
    record = ran(world(StartFailures(count=2), WorkerCrash(at_s=0.025)), [request(max_tokens=10)])
    assert record.engines[0].counters["num_worker_restarts"] == 3
    assert endings(record) == ["finished length"]


def test_a_slow_worker_is_slow_for_a_while() -> None:
    record = ran(world(SlowWorker(at_s=0.0, for_s=0.2, factor=10.0)), [request(at_s=0.001, max_tokens=10)])
    # The step that begins just before the end is slow as well.
    assert record.requests[0].ended_s == pytest.approx(0.001 + 2 * 0.1 + 8 * STEP_S, abs=0.11)
    assert record.requests[0].ended_s > 0.2


def test_a_poisonous_request_is_found_and_nobody_else_fails() -> None:
    asked = [request(text=n, max_tokens=30) for n in range(4)]
    record = ran(world(Poison(request=2, position=5)), asked)
    assert endings(record) == ["finished length", "finished length", "failed 500", "finished length"]
    assert record.engines[0].counters["num_worker_losses"] == 3


def test_a_bad_row_fails_alone() -> None:
    record = ran(world(BadRow(request=1, position=3)), [request(text=n, max_tokens=9) for n in range(3)])
    assert endings(record) == ["finished length", "failed 500", "finished length"]
    assert record.requests[1].num_output_tokens == 3


def test_all_leave_at_once() -> None:
    record = ran(world(Disconnects(at_s=0.015)), [request(text=n, max_tokens=50) for n in range(6)])
    assert endings(record) == ["left"] * 6


def test_an_overload_comes_on_top() -> None:
    record = ran(world(Overload(at_s=0.5, count=30)), [request()])
    assert len(record.requests) == 31
    assert set(endings(record)) == {"finished length"}


def test_an_engine_that_is_shut_down_says_so() -> None:
    record = ran(world(Drained(at_s=0.03)), [request(max_tokens=50), request(at_s=1.0)])
    assert endings(record) == ["failed 503", "failed 503"]


def test_slow_messages_delay_and_lose_nothing() -> None:
    fault = SlowMessages(actor="scheduler", at_s=0.0, for_s=0.05, delay_s=0.02)
    record = ran(world(fault), [request(at_s=0.001, max_tokens=10)])
    assert endings(record) == ["finished length"]
    assert record.requests[0].scheduled_s == pytest.approx(0.021 + 0.02, abs=0.0205)


def test_a_fault_can_wait_for_a_message() -> None:
    crash = OnMessage(message="StepDone", nth=3, do="crash")
    record = ran(world(crash), [request(max_tokens=10)])
    assert endings(record) == ["finished length"]
    assert record.engines[0].counters["num_worker_losses"] == 1
    assert record.faults[0].at_s == pytest.approx(3 * STEP_S)

    leave = OnMessage(message="AddRequest", nth=2, do="leave")
    record = ran(world(leave), [request(text=n, max_tokens=10) for n in range(3)])
    assert endings(record) == ["finished length", "left", "finished length"]


def test_engines_share_a_store() -> None:
    spec = world(replicas=2, store=StoreSpec(latency_s=0.001, bytes_per_s=1e8))
    first, second = ran(spec, [request(prompt=60), request(at_s=2.0, prompt=60)]).requests
    assert (first.engine, second.engine) == ("engine-0", "engine-1")
    assert second.num_cached_tokens == 56


@pytest.mark.parametrize("how", ["down", "frozen", "slow", "losing", "corrupt"])
def test_a_store_in_trouble_costs_no_answer(how: str) -> None:
    trouble = [
        StoreTrouble(engine=engine, how=how, for_s=3.0, share=1.0)  # type: ignore[arg-type]
        for engine in range(2)
    ]
    asked = [request(at_s=n / 20, text=n % 2, prompt=60) for n in range(40)]
    record = ran(world(*trouble, replicas=2, store=StoreSpec()), asked)
    assert set(endings(record)) == {"finished length"}


def test_fast_and_checked_worlds_say_the_same() -> None:
    asked = [request(at_s=n / 50, text=n % 3, prompt=20 + n) for n in range(40)]
    records = [ran(world(fidelity=fidelity), asked, check_cache=False) for fidelity in ("fast", "checked")]
    fast, checked = (record.requests for record in records)
    assert fast == checked


def test_what_a_world_leaves_behind() -> None:
    spec = msgspec.structs.replace(world(), sample_every_s=0.02)
    record = run_world(
        spec, iter_loop([request(max_tokens=20)]), keep=Keep(steps=True, digest=True), title="one", seed=5
    )
    (engine,) = record.engines
    assert engine.steps is not None
    assert len(engine.steps) == 20
    assert engine.counters["num_steps"] == 20
    assert [sample.num_running for sample in engine.samples[1:10]] == [1] * 9
    assert record.counters["StepPlan"] == 20
    assert (record.title, record.seed, len(record.digest)) == ("one", 5, 64)
    assert msgspec.convert(record.settings, type(spec)) == spec


def iter_loop(requests: list[SimRequest]):
    from simulations.requests import OpenLoop

    return OpenLoop(iter(requests))


@pytest.mark.parametrize(
    "spec",
    [
        world(replicas=0),
        world(WorkerCrash(engine=1)),
        world(WorkerCrash(at_s=float("nan"))),
        world(Overload(count=10**9)),
        world(engine=msgspec.structs.replace(ENGINE, num_fa_blocks=1 << 30)),
        world(engine=msgspec.structs.replace(ENGINE, block_size=0)),
        world(engine=msgspec.structs.replace(ENGINE, sliding_window=64, num_swa_blocks=3)),
        world(store=StoreSpec(bytes_per_s=0.0)),
    ],
)
def test_impossible_worlds_are_refused(spec) -> None:
    with pytest.raises(ConfigError):
        run_world(spec, iter_loop([]))


def rough_scenario() -> bytes:
    """One that has a store, sliding windows and faults."""
    for seed in range(200):
        scenario = draw_scenario(seed)
        has_windows = scenario.world.engines[0].sliding_window is not None
        if scenario.world.store is not None and has_windows and len(scenario.world.faults) >= 3:
            return msgspec.json.encode(scenario)
    raise AssertionError("no such scenario")


def test_the_same_seed_says_the_same_in_ten_processes(tmp_path: Path) -> None:
    file = tmp_path / "rough.json"
    file.write_bytes(rough_scenario())

    def digest(hash_seed: int) -> str:
        command = [sys.executable, "-m", "simulations", "run", str(file), "--digest", "--check"]
        environment = os.environ | {"PYTHONHASHSEED": str(hash_seed)}
        out = subprocess.run(command, env=environment, stdout=subprocess.PIPE, check=True).stdout
        found: str = msgspec.json.decode(out)["digest"]
        return found

    with ThreadPoolExecutor(2) as pool:
        digests = set(pool.map(digest, range(1, 11)))
    assert len(digests) == 1
    assert len(digests.pop()) == 64


def test_another_seed_says_something_else() -> None:
    spec = world(replicas=2, store=StoreSpec())
    asked = [request(at_s=n / 20, text=n % 3, prompt=60) for n in range(20)]
    digests = {ran(spec, asked, seed=seed, digest=True).digest for seed in (1, 2)}
    assert len(digests) == 2
