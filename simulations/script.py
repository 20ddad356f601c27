"""What the simulated model answers: it depends on prompt and seed, and ends when it is told to."""

from __future__ import annotations

import zlib
from array import array
from collections.abc import Sequence

from ksana.devices.simulated_worker import KnownRequest
from ksana.errors import InvariantViolated
from simulations.requests import FIRST_TOKEN, SPELLING_BASE, SimRequest

EOS_ID = 1
"""Never sampled but at the end of an answer."""
STOP_TOKEN_ID = 2
"""A token that only requests which stop at it are answered with."""


class Script:
    """The answer to one request. Equal prompts and seeds have equal tokens."""

    __slots__ = ("_num_output_tokens", "base", "end_id", "error_at", "min_tokens", "prompt_ids")

    def __init__(self, request: SimRequest, prompt_ids: tuple[int, ...], *, keep_prompt: bool) -> None:
        """`keep_prompt`: so that the worker's copy can be held against it."""
        self.base = zlib.crc32(array("i", prompt_ids).tobytes(), request.seed & 0xFFFFFFFF)
        ends_nothing = request.ignore_eos and request.stop_token_id is None
        self.min_tokens = 0 if ends_nothing else request.min_tokens
        self.end_id = EOS_ID if request.stop_token_id is None else request.stop_token_id
        self._num_output_tokens = request.num_output_tokens
        if self._num_output_tokens is not None:
            self._num_output_tokens = max(self._num_output_tokens, request.min_tokens)
        self.prompt_ids = prompt_ids if keep_prompt else None
        self.error_at: int | None = None
        """Output position whose row gives an error instead of a token."""

    def token(self, position: int) -> int:
        if position + 1 == self._num_output_tokens:
            return self.end_id
        return FIRST_TOKEN + ((self.base ^ (position * 0x9E3779B1)) >> 7) % SPELLING_BASE

    def tokens(self, first: int, count: int) -> tuple[int, ...]:
        return tuple([self.token(position) for position in range(first, first + count)])


class Scripts:
    """A token source for simulated workers. Scripts are found by the sampling seed: one per request."""

    def __init__(self) -> None:
        self._by_seed: dict[int, Script] = {}

    def add(self, seed: int, script: Script) -> None:
        self._by_seed[seed] = script

    def forget(self, seed: int) -> None:
        """The request ended: nothing of it is computed any more, but for steps in flight."""
        self._by_seed.pop(seed, None)

    def __call__(self, request: KnownRequest, position: int) -> int | str:
        script = self._by_seed.get(request.sampling.seed)
        if script is None:
            return EOS_ID  # ended while this step was in flight: nobody will see it
        if position == script.error_at:
            return "NaN in the logits"
        if script.prompt_ids is not None:
            self._check_known(request, script, position)
            if position + 1 < script.min_tokens and script.end_id not in request.suppressed_token_ids:
                return script.end_id  # a model that would like to end as soon as it is let
        return script.token(position)

    def _check_known(self, request: KnownRequest, script: Script, position: int) -> None:
        known: Sequence[int] = request.token_ids
        assert script.prompt_ids is not None
        if tuple(known[: request.prompt_len]) != script.prompt_ids:
            raise InvariantViolated(f"the worker has another prompt for request {request.request_id}")
        if tuple(known[request.prompt_len :]) != script.tokens(0, position):
            raise InvariantViolated(f"the worker has other output tokens for request {request.request_id}")
