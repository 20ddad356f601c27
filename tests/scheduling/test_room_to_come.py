"""A waiting request is let in as soon as the blocks that were released before are idle."""

from __future__ import annotations

from ksana.messages.requests import Abort
from tests.scheduling.world import World


def test_blocks_that_only_a_step_in_flight_keeps_are_waited_for() -> None:
    # 12 blocks of 4, of which request 1 has 2, request 2 has 7, and request 3 needs 7.
    world = World(num_blocks=12, prefix_caching=False, max_num_batched_tokens=64, max_model_len=48)
    world.add(1, prompt_len=5, max_tokens=20)
    world.add(2, prompt_len=24, max_tokens=8)
    world.add(3, prompt_len=24, max_tokens=3)
    while len(world.tokens.get(2, ())) < 3 or not world.inboxes["block_allocator"]:
        world.step()
    # The open plan names request 2, so that its blocks, released with the next, are idle one step later.
    world.tell(Abort(request_id=2))
    num_steps = len(world.steps)
    world.run()
    first = next(
        index for index, step in enumerate(world.steps) if any(new.request_id == 3 for new in step.new)
    )
    assert first - num_steps <= 3


def test_when_the_one_that_does_not_fit_leaves_the_next_is_asked_for() -> None:
    # 12 blocks of 4: request 1 has 7 of them and grows, request 2 needs 7, request 3 needs 2.
    world = World(num_blocks=12, prefix_caching=False, max_num_batched_tokens=64, max_model_len=48)
    world.add(1, prompt_len=24, max_tokens=20)
    world.add(2, prompt_len=24, max_tokens=3)
    world.add(3, prompt_len=5, max_tokens=1)
    while len(world.tokens.get(1, ())) < 3:
        world.step()
    world.tell(Abort(request_id=2))
    num_steps = len(world.steps)
    world.run()
    first = next(
        index for index, step in enumerate(world.steps) if any(new.request_id == 3 for new in step.new)
    )
    assert first - num_steps <= 2
