"""What must hold of a recorded run before it is run again: a journal may come from anywhere."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from ksana.journal.format import RecordedSettings
from ksana.journal.reading import JournalError
from ksana.journal.requests import RecordedRequest
from ksana.what_if.changes import MAX_COUNTS

MAX_TOKEN_ID = (1 << 31) - 1
"""Ids are kept as signed 32-bit integers."""
_MAX_BLOCK_SIZE = 1 << 16


def check_settings(settings: RecordedSettings) -> None:
    """Raises JournalError for sizes that no engine has: pools are made as large as they say."""
    scheduler, cache = settings.scheduler, settings.cache
    smallest = {"num_swa_blocks": 0} if cache.sliding_window is None else {}
    for name, largest in MAX_COUNTS.items():
        value = getattr(scheduler if name in scheduler.__struct_fields__ else cache, name)
        _check_range(name, value, smallest.get(name, 1), largest)
    _check_range("block_size", cache.block_size, 1, _MAX_BLOCK_SIZE)
    _check_range("block_size", scheduler.block_size, 1, _MAX_BLOCK_SIZE)
    _check_range("vocab_size", settings.vocab_size, 1, MAX_TOKEN_ID)


def check_requests(requests: Sequence[RecordedRequest]) -> None:
    """Raises JournalError for one that no server has taken."""
    for request in requests:
        ids = (request.prompt_token_ids, request.output_token_ids, request.eos_token_ids)
        if not request.prompt_token_ids or not all(map(_are_ids, (*ids, request.sampling.stop_token_ids))):
            raise _cannot(f"request {request.request_id} has no tokens, or ids that are none")
        times = (request.arrival_s, request.added_s or 0.0, request.aborted_s or 0.0)
        if not all(map(math.isfinite, times)) or math.isnan(request.deadline_s):
            raise _cannot(f"request {request.request_id} has a time that is none")


def _are_ids(token_ids: Iterable[int]) -> bool:
    return all(0 <= token_id <= MAX_TOKEN_ID for token_id in token_ids)


def _check_range(name: str, value: int, smallest: int, largest: int) -> None:
    if not smallest <= value <= largest:
        raise _cannot(f"its {name} is {value}, not from {smallest} to {largest}")


def _cannot(why: str) -> JournalError:
    return JournalError(f"the recorded run cannot be run again: {why}")
