"""Requests that fill the pools to the token: they run, and alone or together nobody loses its place.

A request of P prompt tokens and at most M of output computes P + M - 1 of them: the last one is only sampled.
The worker reads back every KV it needs, so that a block too few would show.
"""

from __future__ import annotations

from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ksana.messages.outputs import Failed
from tests.scheduling.world import BLOCK_SIZE, World

BUDGET = 8
"""Tokens in a step."""


def blocks(num_tokens: int) -> int:
    return -(-num_tokens // BLOCK_SIZE)


def fa_need(prompt_len: int, max_tokens: int) -> int:
    """Counted token by token: the blocks that the computed ones lie in."""
    return len({position // BLOCK_SIZE for position in range(prompt_len + max_tokens - 1)})


def swa_need(prompt_len: int, max_tokens: int, window: int | None, plan_ahead: bool) -> int:
    """A window, the chunks that run or are planned, and a block for where the window begins inside one."""
    if window is None:
        return 0
    at_once = blocks(window) + (2 if plan_ahead else 1) * blocks(BUDGET) + 1
    return min(at_once, fa_need(prompt_len, max_tokens))


def world(num_blocks: int, num_swa_blocks: int, window: int | None, **settings: int | bool | str) -> World:
    return World(
        num_blocks=num_blocks,
        num_swa_blocks=num_swa_blocks,
        window=window,
        max_num_batched_tokens=BUDGET,
        **settings,  # type: ignore[arg-type]
    )


def check_all_went_well(made: World) -> None:
    for request_id in made.added:
        made.check_finished(request_id)
        assert made.ended[request_id].outcome.reason == "length"  # type: ignore[union-attr]
    assert made.scheduler.status().counters.num_preemptions == 0
    made.check_quiet()


LENGTHS = [(1, 1), (1, 4), (1, 5), (4, 1), (5, 1), (3, 2), (4, 4), (4, 5), (5, 5), (8, 9), (9, 16), (13, 28)]


@pytest.mark.parametrize("window", [None, 1, 3, 4, 6, 12, 100])
@pytest.mark.parametrize("plan_ahead", [True, False])
def test_one_alone_fills_the_pools_to_the_token(window: int | None, plan_ahead: bool) -> None:
    for (prompt_len, max_tokens), caching in product(LENGTHS, (True, False)):
        need = fa_need(prompt_len, max_tokens)
        swa = swa_need(prompt_len, max_tokens, window, plan_ahead)
        made = world(need, swa, window, plan_ahead=plan_ahead, prefix_caching=caching)
        made.add(1, prompt_len=prompt_len, max_tokens=max_tokens)
        made.run()
        check_all_went_well(made)
        # Once more, over what the first has left in the cache.
        made.add(2, prompt=made.added[1].prompt_token_ids, max_tokens=max_tokens)
        made.run()
        check_all_went_well(made)


@pytest.mark.parametrize("admission", ["room_to_grow", "whole_prompt", "first_chunk"])
@pytest.mark.parametrize("window", [None, 6])
def test_one_token_more_is_refused_at_once_and_told_what_fits(window: int | None, admission: str) -> None:
    for prompt_len, num_blocks in product((1, 4, 5, 8, 11), (3, 6)):
        most = num_blocks * BLOCK_SIZE + 1 - prompt_len
        swa = swa_need(prompt_len, most, window, plan_ahead=True)
        made = world(num_blocks, swa, window, admission=admission)
        made.add(1, prompt_len=prompt_len, max_tokens=most + 1)
        made.add(2, prompt_len=prompt_len, max_tokens=most)
        made.run()
        outcome = made.ended[1].outcome
        assert isinstance(outcome, Failed)
        assert (outcome.status, outcome.param, outcome.code) == (400, "max_tokens", "context_length_exceeded")
        assert f"need KV for {num_blocks * BLOCK_SIZE + 1} tokens" in outcome.message
        assert f"{num_blocks} blocks of {BLOCK_SIZE} tokens" in outcome.message
        assert f"the largest max_tokens for this prompt is {most}." in outcome.message
        assert made.ended[1].usage.num_output_tokens == 0
        assert 1 not in {row.request_id for step in made.steps for row in step.rows}
        made.check_finished(2)
        made.check_quiet()


def test_a_prompt_of_the_whole_pool_gives_one_token_and_a_longer_one_none() -> None:
    made = world(5, 0, None)
    made.add(1, prompt_len=20, max_tokens=1)
    made.add(2, prompt_len=21, max_tokens=1)
    made.run()
    made.check_finished(1)
    outcome = made.ended[2].outcome
    assert isinstance(outcome, Failed)
    assert (outcome.status, outcome.param) == (400, "prompt")
    assert "the longest prompt that fits has 20 tokens" in outcome.message
    made.check_quiet()


@given(
    lengths=st.lists(st.tuples(st.integers(1, 30), st.integers(1, 30)), min_size=2, max_size=4),
    window=st.sampled_from([None, 3, 4, 9, 100]),
    plan_ahead=st.booleans(),
    caching=st.booleans(),
    hold=st.booleans(),
)
@settings(max_examples=150, deadline=None)
def test_several_that_fill_the_pools_together_need_no_preemption(
    lengths: list[tuple[int, int]], window: int | None, plan_ahead: bool, caching: bool, hold: bool
) -> None:
    need = sum(fa_need(*each) for each in lengths)
    swa = sum(swa_need(*each, window, plan_ahead) for each in lengths)
    made = world(need, swa, window, plan_ahead=plan_ahead, prefix_caching=caching, hold_when_short=hold)
    for request_id, (prompt_len, max_tokens) in enumerate(lengths, 1):
        made.add(request_id, prompt_len=prompt_len, max_tokens=max_tokens)
    made.run()
    check_all_went_well(made)


@given(
    prompts=st.tuples(st.integers(1, 4), st.integers(1, 4)),
    outputs=st.tuples(st.integers(1, 40), st.integers(1, 40)),
    plan_ahead=st.booleans(),
    hold=st.booleans(),
)
@settings(max_examples=200, deadline=None)
def test_two_of_which_one_ends_in_time_for_the_other_need_no_preemption(
    prompts: tuple[int, int], outputs: tuple[int, int], plan_ahead: bool, hold: bool
) -> None:
    """Both start with the first step and go on token by token: as many blocks as they have at any moment, or
    either needs alone, are enough. Who waits for the blocks of one that is bound to end takes no place."""
    at_once = [
        sum(blocks(p + step) for p, m in zip(prompts, outputs, strict=True) if step < m)
        for step in range(max(outputs))
    ]
    made = world(
        max(at_once), 0, None, plan_ahead=plan_ahead, hold_when_short=hold, admission="first_chunk",
        prefix_caching=False,
    )  # fmt: skip
    for request_id, (prompt_len, max_tokens) in enumerate(zip(prompts, outputs, strict=True), 1):
        made.add(request_id, prompt_len=prompt_len, max_tokens=max_tokens)
    made.run()
    check_all_went_well(made)


def test_no_block_is_taken_for_a_token_that_is_never_computed() -> None:
    made = world(64, 0, None, prefix_caching=False)
    made.add(1, prompt_len=4, max_tokens=5)  # computes 8 tokens: two blocks, full
    made.run()
    taken = [edit.block_id for step in made.steps for row in step.rows for edit in row.fa_edits]
    assert len(taken) == 2
