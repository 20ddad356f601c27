"""One engine of a world, without a tokenizer."""

from __future__ import annotations

import pytest
import trio

from ksana.costs.step_cost import LinearStepCost
from ksana.devices.simulated_worker import KnownRequest
from ksana.messages.outputs import Finished, Outcome, StepOutputs
from ksana.messages.requests import AddRequest, SamplingParams
from ksana.runtime.deterministic import run_deterministic
from ksana.runtime.virtual_clock import VirtualClock
from ksana.stores.simulated import SimulatedStore
from simulations.engine import EngineSpec, SimulatedEngine


def next_number(request: KnownRequest, position: int) -> int:
    return request.token_ids[0] + position


def add_request(request_id: int, prompt: tuple[int, ...], max_tokens: int) -> AddRequest:
    return AddRequest(
        request_id=request_id,
        prompt_token_ids=prompt,
        sampling=SamplingParams(seed=0, max_tokens=max_tokens),
        eos_token_ids=(),
        arrival_time_s=trio.current_time(),
        deadline_s=1e6,
    )


@pytest.mark.parametrize("with_store", [False, True])
def test_requests_run_to_their_end_in_virtual_time(with_store: bool) -> None:
    tokens: dict[int, list[int]] = {}
    ended: dict[int, Outcome] = {}
    cached: dict[int, int] = {}

    def listen(outputs: StepOutputs) -> None:
        for some in outputs.tokens:
            assert some.first_index == len(tokens.setdefault(some.request_id, []))
            tokens[some.request_id] += some.token_ids
        for end in outputs.ended:
            ended[end.request_id] = end.outcome
            cached[end.request_id] = end.usage.num_cached_tokens

    async def main() -> None:
        spec = EngineSpec(block_size=4, num_fa_blocks=64, num_swa_blocks=64, sliding_window=8)
        store = SimulatedStore(0, latency_s=0.001, bytes_per_s=1e6) if with_store else None
        cost = LinearStepCost(fixed_s=1.0, per_token_s=0.0, per_attended_token_s=0.0)
        engine = SimulatedEngine(
            spec, cost=cost, tokens=next_number, listener=listen, store=store, check_messages=True
        )
        async with trio.open_nursery() as nursery:
            nursery.start_soon(engine.run)
            engine.add(add_request(1, tuple(range(100, 120)), 5))
            await trio.sleep(30)
            engine.add(add_request(2, tuple(range(100, 120)), 3))
            await trio.sleep(30)
            nursery.cancel_scope.cancel()
        assert engine.num_open == 0

    run_deterministic(1, main, VirtualClock())
    assert tokens == {1: [100, 101, 102, 103, 104], 2: [100, 101, 102]}
    assert ended == {1: Finished(reason="length"), 2: Finished(reason="length")}
    assert cached == {1: 0, 2: 16}
