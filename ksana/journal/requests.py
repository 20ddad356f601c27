"""The requests of a recorded run: when they came, what they asked for, and what became of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path

import msgspec

from ksana.journal.activations import Heard, SegmentReader, State
from ksana.journal.cores import decode_state
from ksana.journal.format import UNREADABLE
from ksana.journal.reading import JournalError, Segment, list_segments, missing_before
from ksana.messages.base import Message, RequestId
from ksana.messages.outputs import Outcome, RequestTiming, StepOutputs
from ksana.messages.requests import Abort, AddRequest, SamplingParams, StopStringFound
from ksana.runtime.actor import Address

_ACTORS: tuple[Address, ...] = ("scheduler",)


class RecordedRequest(msgspec.Struct, kw_only=True):
    """One request, as the scheduler knew it. Times are of the recorded engine's clock, in seconds; ids are
    renamed if the journal is redacted."""

    request_id: RequestId
    arrival_s: float
    """When it was handed in; the scheduler was told `added_s`."""
    added_s: float | None
    """None: before the journal begins."""
    prompt_token_ids: tuple[int, ...]
    sampling: SamplingParams
    eos_token_ids: tuple[int, ...]
    deadline_s: float
    cache_salt: str = ""

    output_token_ids: list[int] = []
    """All that the scheduler told of, also after a stop string."""
    aborted_s: float | None = None
    stop: StopStringFound | None = None
    """A stop string was found in its text."""
    outcome: Outcome | None = None
    """None: the journal ends before it does, or the engine broke."""
    num_output_tokens: int = 0
    """Those that count."""
    num_cached_tokens: int = 0
    timing: RequestTiming | None = None


def recorded_requests(directory: Path, run: str | None = None) -> list[RecordedRequest]:
    """The requests of one run, in the order of arrival: of the last one, unless another is named.

    Raises JournalError when the journal cannot be read or its scheduler was not recorded. Memory: all ids.
    """
    return requests_of(segments_of_run(list_segments(directory), run))


def segments_of_run(segments: Sequence[Segment], run: str | None = None) -> list[Segment]:
    """Those of the run, or of the last one. Raises JournalError if some between them are missing: then what
    became of the requests is not known."""
    name = segments[-1].header.run if run is None else run
    chosen = [segment for segment in segments if segment.header.run == name]
    if not chosen or any("scheduler" not in segment.header.actors for segment in chosen):
        raise JournalError(f"the scheduler of run {name} was not recorded")
    for before, segment in pairwise(chosen):
        gap = missing_before(segment, before)
        if gap is not None:
            raise JournalError(f"{gap}: name those after or before it with --segment")
    return chosen


def requests_of(segments: Sequence[Segment]) -> list[RecordedRequest]:
    """The requests of these segments, which follow each other."""
    requests: dict[RequestId, RecordedRequest] = {}
    for place, segment in enumerate(segments):
        reader = SegmentReader(segment, _ACTORS)
        for one in reader.read():
            if isinstance(one, State):
                if place == 0:
                    requests.update(_known_before(one))
                continue
            for message in one.messages:
                _hear(requests, message, one.now_s)
            for message in _outputs(reader, one):
                _take_outputs(requests, message)
    return sorted(requests.values(), key=lambda request: request.request_id)


def _known_before(one: State) -> dict[RequestId, RecordedRequest]:
    """Requests that were there when the journal began."""
    try:
        state = decode_state("scheduler", one.state)
    except UNREADABLE as error:
        raise JournalError(f"the recorded state of the scheduler is none ({error})") from None
    return {
        request.request_id: RecordedRequest(
            request_id=request.request_id,
            arrival_s=request.arrival_time_s,
            added_s=None,
            prompt_token_ids=request.prompt_token_ids,
            sampling=request.sampling,
            eos_token_ids=tuple(sorted(request.stop_rules.eos_token_ids)),
            deadline_s=request.deadline_s,
            cache_salt=request.cache_salt,
            output_token_ids=list(request.output_token_ids),
        )
        for request in state.requests.values()
        if request.phase != "ended"
    }


def _hear(requests: dict[RequestId, RecordedRequest], message: Message, now_s: float) -> None:
    if isinstance(message, AddRequest):
        requests[message.request_id] = RecordedRequest(
            request_id=message.request_id,
            arrival_s=message.arrival_time_s,
            added_s=now_s,
            prompt_token_ids=message.prompt_token_ids,
            sampling=message.sampling,
            eos_token_ids=message.eos_token_ids,
            deadline_s=message.deadline_s,
            cache_salt=message.cache_salt,
        )
    elif isinstance(message, Abort | StopStringFound):
        request = requests.get(message.request_id)
        if request is None:
            return
        if isinstance(message, Abort):
            request.aborted_s = now_s
        elif request.stop is None:
            request.stop = message


def _outputs(reader: SegmentReader, one: Heard) -> Iterator[StepOutputs]:
    for address, raw in one.said:
        if address == "tokenizer":
            message = reader.message(raw, one.offset)
            if isinstance(message, StepOutputs):
                yield message


def _take_outputs(requests: dict[RequestId, RecordedRequest], message: StepOutputs) -> None:
    for tokens in message.tokens:
        request = requests.get(tokens.request_id)
        if request is not None:
            request.output_token_ids += tokens.token_ids
    for ended in message.ended:
        request = requests.get(ended.request_id)
        if request is not None:
            request.outcome = ended.outcome
            request.timing = ended.timing
            request.num_output_tokens = ended.usage.num_output_tokens
            request.num_cached_tokens = ended.usage.num_cached_tokens
