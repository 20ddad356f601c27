"""The requests of a journal: what was asked of a real engine, asked again.

The model answers as long as it did then; who left, leaves after as many tokens; where a stop string was
found, it is found again.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from ksana.errors import ConfigError
from ksana.journal.reading import JournalError
from ksana.journal.requests import RecordedRequest, recorded_requests
from ksana.messages.outputs import Finished
from simulations.requests import ListedText, PromptSource, SimRequest


def read_journal(directory: Path) -> Iterator[SimRequest]:
    """The last run in the journal; its first request arrives at 0.

    Raises ConfigError at once: no journal, a damaged one, or one without its scheduler.
    """
    try:
        recorded = recorded_requests(directory)
    except JournalError as error:
        raise ConfigError(f"{directory}: {error}") from None
    recorded.sort(key=lambda request: request.arrival_s)
    start_s = recorded[0].arrival_s if recorded else 0.0
    return (_asked_again(request, start_s) for request in recorded)


def _asked_again(request: RecordedRequest, start_s: float) -> SimRequest:
    outcome, sampling = request.outcome, request.sampling
    num_answered = len(request.output_token_ids)
    ended_by_itself = isinstance(outcome, Finished) and outcome.reason == "stop" and request.stop is None
    max_tokens = sampling.max_tokens if sampling.max_tokens is not None else num_answered
    return SimRequest(
        arrival_s=request.arrival_s - start_s,
        prompt=PromptSource((ListedText(request.prompt_token_ids),)),
        num_output_tokens=request.num_output_tokens if ended_by_itself else None,
        max_tokens=max(1, max_tokens),
        seed=sampling.seed,
        cache_salt=request.cache_salt,
        timeout_s=request.deadline_s - request.arrival_s,
        leaves_after=num_answered if request.aborted_s is not None else None,
        stop_after=request.stop.token_index if request.stop is not None else None,
    )
