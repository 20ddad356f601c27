"""Journals that no server has written are not run again."""

from __future__ import annotations

import math
from typing import Any

import msgspec
import pytest

from ksana.journal.format import RecordedSettings
from ksana.journal.reading import JournalError
from ksana.journal.requests import RecordedRequest
from ksana.messages.requests import SamplingParams
from ksana.what_if.limits import check_requests, check_settings
from simulations.engine import EngineSpec

replace = msgspec.structs.replace


def settings_of(spec: EngineSpec) -> RecordedSettings:
    return RecordedSettings(
        scheduler=spec.scheduler_settings(has_store=False),
        cache=spec.cache_config(has_store=False),
        max_model_len=spec.max_model_len,
        vocab_size=100,
    )


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"num_fa_blocks": 10**12}, "its num_fa_blocks is 1000000000000"),
        ({"num_swa_blocks": 1 << 40, "sliding_window": 32}, "its num_swa_blocks"),
        ({"max_num_seqs": -1}, "its max_num_seqs is -1"),
        ({"max_num_batched_tokens": 1 << 50}, "its max_num_batched_tokens"),
    ],
)
def test_sizes_that_no_engine_has(changes: dict[str, Any], text: str) -> None:
    check_settings(settings_of(EngineSpec()))
    check_settings(settings_of(EngineSpec(num_swa_blocks=4, sliding_window=32)))
    with pytest.raises(JournalError, match=text):
        check_settings(settings_of(EngineSpec(**changes)))
    with pytest.raises(JournalError, match="its vocab_size"):
        check_settings(replace(settings_of(EngineSpec()), vocab_size=1 << 40))


@pytest.mark.parametrize(
    "changes",
    [
        {"prompt_token_ids": ()},
        {"prompt_token_ids": (1, 1 << 31)},
        {"output_token_ids": [-1]},
        {"eos_token_ids": (1 << 40,)},
        {"sampling": SamplingParams(seed=1, stop_token_ids=(-5,))},
        {"arrival_s": math.nan},
        {"added_s": math.inf},
        {"aborted_s": -math.inf},
        {"deadline_s": math.nan},
    ],
)
def test_requests_that_no_server_took(changes: dict[str, Any]) -> None:
    request = RecordedRequest(
        request_id=1,
        arrival_s=1.0,
        added_s=1.5,
        prompt_token_ids=(1, 2),
        sampling=SamplingParams(seed=1),
        eos_token_ids=(2,),
        deadline_s=math.inf,
    )
    check_requests([request])
    with pytest.raises(JournalError, match="the recorded run cannot be run again: request 1 has"):
        check_requests([request, replace(request, **changes)])
