from __future__ import annotations

import msgspec

from ksana.messages.requests import SamplingParams
from ksana.scheduling.request_state import RequestState
from ksana.scheduling.settings import SchedulerSettings, reserved_tokens
from ksana.scheduling.stop_rules import StopRules

SETTINGS = SchedulerSettings(max_num_seqs=8, max_num_batched_tokens=64, max_model_len=1000, block_size=16)


def request(prompt_len: int, max_tokens: int, num_output: int = 0, num_preemptions: int = 0) -> RequestState:
    sampling = SamplingParams(seed=0, max_tokens=max_tokens)
    return RequestState(
        request_id=1,
        prompt_token_ids=(0,) * prompt_len,
        sampling=sampling,
        suppressed_token_ids=(),
        stop_rules=StopRules.of(sampling, (), prompt_len, SETTINGS.max_model_len),
        cache_salt="",
        deadline_s=0.0,
        arrival_time_s=0.0,
        output_token_ids=[0] * num_output,
        num_preemptions=num_preemptions,
    )


def test_a_new_request_reserves_its_prompt_and_a_block() -> None:
    assert reserved_tokens(request(100, 50), SETTINGS, num_running=5, pool_tokens=0) == 116


def test_never_more_than_it_can_need() -> None:
    assert reserved_tokens(request(100, 3), SETTINGS, num_running=5, pool_tokens=0) == 102


def test_a_preempted_one_leaves_a_block_for_each_that_runs() -> None:
    preempted = request(100, 50, num_output=10, num_preemptions=1)
    assert reserved_tokens(preempted, SETTINGS, num_running=5, pool_tokens=1600) == 126 + 80
    assert reserved_tokens(preempted, SETTINGS, num_running=0, pool_tokens=1600) == 126


def test_the_margin_is_never_more_than_the_pool() -> None:
    preempted = request(100, 50, num_output=10, num_preemptions=1)
    assert reserved_tokens(preempted, SETTINGS, num_running=5, pool_tokens=160) == 160
    assert reserved_tokens(preempted, SETTINGS, num_running=5, pool_tokens=112) == 126


def test_no_more_run_than_a_step_has_tokens() -> None:
    small = SchedulerSettings(max_num_seqs=64, max_num_batched_tokens=16, max_model_len=100, block_size=16)
    assert small.max_running == 16


def test_other_engines_ask_for_the_prompt_alone_or_for_nothing() -> None:
    preempted = request(100, 50, num_output=10, num_preemptions=1)
    whole = msgspec.structs.replace(SETTINGS, admission="whole_prompt")
    assert reserved_tokens(preempted, whole, num_running=5, pool_tokens=1600) == 110
    chunk = msgspec.structs.replace(SETTINGS, admission="first_chunk")
    assert reserved_tokens(preempted, chunk, num_running=5, pool_tokens=1600) == 0
