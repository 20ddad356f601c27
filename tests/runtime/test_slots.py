import itertools
import time

import pytest
import trio
from hypothesis import given
from hypothesis import strategies as st

from ksana.errors import ServiceError
from ksana.messages.outputs import Ended, Finished, OutputEvent, PromptAccepted, TextDelta, Usage
from ksana.runtime.slots import Slot, Slots, join_deltas


def delta(request_id: int, text: str, *token_ids: int, choice: int = 0) -> TextDelta:
    return TextDelta(request_id=request_id, text=text, token_ids=token_ids, choice_index=choice)


def ended(request_id: int) -> Ended:
    usage = Usage(num_prompt_tokens=1, num_output_tokens=1)
    return Ended(request_id=request_id, outcome=Finished(reason="stop"), usage=usage)


def accepted(request_id: int) -> PromptAccepted:
    return PromptAccepted(request_id=request_id, prompt_token_ids=(1,), max_tokens=4)


async def test_a_slow_reader_sees_fewer_and_longer_deltas() -> None:
    slots = Slots(1)
    slot = slots.open()
    events = [accepted(1), delta(1, "Hel", 1), delta(1, "lo", 2, 3), delta(1, "x", 9, choice=1), ended(1)]
    for event in events:
        slots.post(event)
    assert await slot.take() == [
        accepted(1),
        delta(1, "Hello", 1, 2, 3),
        delta(1, "x", 9, choice=1),
        ended(1),
    ]


def test_joining_is_linear() -> None:
    slot = Slot(1)
    num_deltas = 50_000
    began = time.perf_counter()
    for token_id in range(num_deltas):
        slot.put(delta(1, "ab", token_id))
    (joined,) = trio.run(slot.take)
    assert time.perf_counter() - began < 2  # quadratic joining takes minutes
    assert isinstance(joined, TextDelta)
    assert joined.token_ids == tuple(range(num_deltas))


choices = st.integers(0, 2)
events = st.one_of(
    st.builds(
        lambda text, ids, c: delta(1, text, *ids, choice=c), st.text(), st.lists(st.integers()), choices
    ),
    st.just(accepted(1)),
)


@given(st.lists(events))
def test_joining_keeps_every_choice_whole(given_events: list[OutputEvent]) -> None:
    joined = join_deltas(given_events)
    for choice in range(3):
        before = [e for e in given_events if isinstance(e, TextDelta) and e.choice_index == choice]
        after = [e for e in joined if isinstance(e, TextDelta) and e.choice_index == choice]
        assert "".join(e.text for e in before) == "".join(e.text for e in after)
        assert [t for e in before for t in e.token_ids] == [t for e in after for t in e.token_ids]
    for one, two in itertools.pairwise(joined):
        both = isinstance(one, TextDelta) and isinstance(two, TextDelta)
        assert not both or one.choice_index != two.choice_index


def test_capacity_and_increasing_ids() -> None:
    slots = Slots(2)
    first, second = slots.open(), slots.open()
    assert (first.request_id, second.request_id) == (1, 2)
    with pytest.raises(ServiceError) as refusal:
        slots.open()
    assert refusal.value.status == 429
    assert refusal.value.retry_after_s == 1
    assert slots.num_refused == 1
    slots.post(ended(1))
    slots.close(first)
    assert slots.open().request_id == 3


def test_a_producer_that_left_counts_until_its_request_ended() -> None:
    slots = Slots(1)
    slot = slots.open()
    slots.close(slot)
    slots.close(slot)
    assert len(slots) == 1
    assert slots.unfinished() == [1]
    with pytest.raises(ServiceError):
        slots.open()
    slots.post(delta(1, "late", 5))
    assert len(slots) == 1
    slots.post(ended(1))
    assert len(slots) == 0
    assert slots.num_late_events == 2
    slots.open()


def test_an_ended_slot_counts_until_its_producer_left() -> None:
    slots = Slots(1)
    slot = slots.open()
    slots.post(ended(1))
    assert (len(slots), slots.unfinished()) == (1, [])
    slots.close(slot)
    assert len(slots) == 0


async def test_nothing_follows_the_ending() -> None:
    slots = Slots(1)
    slot = slots.open()
    slots.post(ended(1))
    slots.post(delta(1, "more", 1))
    slots.post(ended(1))
    assert await slot.take() == [ended(1)]
    assert slots.num_late_events == 2


def test_discard_gives_the_slot_back_at_once() -> None:
    slots = Slots(1)
    slots.discard(slots.open())
    assert len(slots) == 0


def test_unfinished_are_sorted() -> None:
    slots = Slots(4)
    opened = [slots.open() for _ in range(4)]
    slots.close(opened[1])
    slots.post(ended(3))
    assert slots.unfinished() == [1, 2, 4]
