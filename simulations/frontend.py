"""The front end of a simulated engine: stands for gateway, slots, tokenizer and clients, without a task.

It bounds what is open (429), says what producers say, takes every `StepOutputs` in the scheduler's task,
writes down when what came, and holds each answer against its script.
"""

from __future__ import annotations

import random
from array import array
from collections.abc import Callable

from ksana.errors import InvariantViolated
from ksana.messages.base import RequestId
from ksana.messages.outputs import (
    Aborted,
    Failed,
    Finished,
    Outcome,
    RequestEnded,
    RequestTokens,
    StepOutputs,
)
from ksana.messages.requests import AddRequest, SamplingParams
from ksana.runtime.clock import now_s
from simulations.checks.checkers import EngineFacts, account, check_ending
from simulations.engine import SimulatedEngine
from simulations.network import Link
from simulations.reports.metrics import RequestRecord
from simulations.requests import Ending, SimRequest
from simulations.script import EOS_ID, Script, Scripts

STOP_STRING = "stop"


class Asked:
    """One request from its arrival at the front end to its ending."""

    __slots__ = (
        "deadline_s", "error_at", "left", "num_cached_expected", "num_stored", "output_ids", "poison_at",
        "record", "request", "request_id", "script", "seed", "stopped_at",
    )  # fmt: skip

    def __init__(self, request: SimRequest, record: RequestRecord, seed: int) -> None:
        self.request = request
        self.record = record
        self.seed = seed
        """Of the sampling parameters: one per request of the world."""
        self.request_id: RequestId = 0
        self.script: Script
        self.deadline_s = 0.0
        self.output_ids: list[int] = []
        self.left = False
        self.num_cached_expected = 0
        """Prompt tokens that the cache has by the oracle, if there is one."""
        self.num_stored = 0
        """Prompt tokens that the store has, if anybody looked."""
        self.stopped_at: int | None = None
        """The token index that `StopStringFound` named."""
        self.error_at: int | None = None
        """Output position whose row gives an error."""
        self.poison_at: int | None = None
        """Output position from which on the worker dies of it."""


class FrontEnd:
    """Of one engine. Set `engine` before anything is asked."""

    engine: SimulatedEngine

    def __init__(
        self,
        name: str,
        capacity: int,
        *,
        scripts: Scripts,
        link: Link,
        facts: EngineFacts,
        ended: Callable[[Ending], None],
        check_answers: bool = True,
        keep_token_times: bool = False,
        keep_prompts: bool = False,
    ) -> None:
        """`ended` hears of each request that ended, once, also of those refused and those whose clients left.
        `check_answers`: each token against the script; endings are checked in any case."""
        self.name = name
        self.capacity = capacity
        self.num_refused = 0
        self.open: dict[RequestId, Asked] = {}
        self.facts = facts
        self._num_coming = 0
        """On the link."""
        self._next_id: RequestId = 1
        self._scripts = scripts
        self._link = link
        self._ended = ended
        self._check_answers = check_answers
        self._keep_token_times = keep_token_times
        self._keep_prompts = keep_prompts

    @property
    def num_open(self) -> int:
        return len(self.open) + self._num_coming

    # Asking

    def ask(self, asked: Asked) -> None:
        """A client sends its request now."""
        self._num_coming += 1
        num_bytes = 4 * asked.request.prompt.num_tokens

        def arrived() -> None:
            self._num_coming -= 1
            self._take(asked)

        self._link.send(num_bytes, arrived)

    def _take(self, asked: Asked) -> None:
        if len(self.open) >= self.capacity:
            self.num_refused += 1
            self._close(asked, "refused 429", finished=False)
            return
        request = asked.request
        prompt_ids = request.prompt.token_ids()
        asked.request_id = self._next_id
        self._next_id += 1
        asked.script = Script(request, prompt_ids, keep_prompt=self._keep_prompts)
        asked.script.error_at = asked.error_at
        self._scripts.add(asked.seed, asked.script)
        if asked.poison_at is not None:
            position = len(prompt_ids) + asked.poison_at
            self.facts.worker_faults.poisonous[asked.request_id] = position
        asked.deadline_s = now_s() + request.timeout_s
        if self.facts.store_oracle is not None:
            answer = asked.script.tokens(0, request.max_tokens)
            oracle, stored, salt = self.facts.store_oracle, self.facts.stored, request.cache_salt
            oracle.asked(salt, prompt_ids + answer)
            asked.num_stored = oracle.num_stored_tokens(salt, prompt_ids, stored, self.facts.spec)
        if self.facts.oracle is not None:
            asked.num_cached_expected = self.facts.oracle.num_hit_tokens(
                now_s(), request.cache_salt, prompt_ids
            )
        self.open[asked.request_id] = asked
        self.engine.add(
            AddRequest(
                request_id=asked.request_id,
                prompt_token_ids=prompt_ids,
                sampling=_sampling(request, asked.seed),
                eos_token_ids=(EOS_ID,),
                arrival_time_s=asked.record.arrival_s,
                deadline_s=asked.deadline_s,
                cache_salt=request.cache_salt,
            )
        )
        if request.leaves_after == 0:
            self._leave(asked)

    def disconnect(self, share: float, rng: random.Random) -> None:
        """So many of those who wait leave now."""
        for asked in list(self.open.values()):
            if not asked.left and rng.random() < share:
                self._leave(asked)

    def leave(self, request_id: RequestId | None) -> None:
        """One client leaves, if it is still there; all of them, if None."""
        for asked in [self.open.get(request_id)] if request_id is not None else list(self.open.values()):
            if asked is not None and not asked.left:
                self._leave(asked)

    def _leave(self, asked: Asked) -> None:
        asked.left = True
        self.engine.abort(asked.request_id)
        self._close(asked, "left", finished=False)

    # What the scheduler says to the tokenizer

    def take_outputs(self, outputs: StepOutputs) -> None:
        """Raises InvariantViolated for what no client should see."""
        now = now_s()
        for tokens in outputs.tokens:
            asked = self.open.get(tokens.request_id)
            if asked is None:
                raise InvariantViolated(f"tokens for request {tokens.request_id}, which is not open")
            if not asked.left and asked.stopped_at is None:
                self._take_tokens(asked, tokens, now)
        for ended in outputs.ended:
            asked = self.open.pop(ended.request_id, None)
            if asked is None:
                raise InvariantViolated(f"request {ended.request_id} ended twice, or was never asked")
            self._take_ending(asked, ended, now)

    def _take_tokens(self, asked: Asked, tokens: RequestTokens, now: float) -> None:
        output_ids, request = asked.output_ids, asked.request
        first = len(output_ids)
        if tokens.first_index != first:
            raise InvariantViolated(
                f"request {tokens.request_id}: output token {tokens.first_index} came, {first} was due"
            )
        if self._check_answers and tokens.token_ids != asked.script.tokens(first, len(tokens.token_ids)):
            raise InvariantViolated(
                f"request {tokens.request_id}: {tokens.token_ids} from output token {first} on, "
                f"not {asked.script.tokens(first, len(tokens.token_ids))}"
            )
        output_ids += tokens.token_ids
        record, came_s = asked.record, now + self._link.spec.latency_s
        if record.first_token_s is None:
            record.first_token_s = came_s
        record.last_token_s = came_s
        if record.token_times_s is not None:
            record.token_times_s.extend([came_s] * len(tokens.token_ids))
        if request.stop_after is not None and len(output_ids) > request.stop_after:
            asked.stopped_at = request.stop_after
            del output_ids[request.stop_after + 1 :]
            self.engine.stop(asked.request_id, request.stop_after, STOP_STRING)
        elif request.leaves_after is not None and len(output_ids) >= request.leaves_after:
            self._leave(asked)

    def _take_ending(self, asked: Asked, ended: RequestEnded, now: float) -> None:
        check_ending(asked, ended, now, self.facts)
        account(asked, ended, now, self.facts)
        self._scripts.forget(asked.seed)
        self.facts.worker_faults.poisonous.pop(asked.request_id, None)
        record, timing = asked.record, ended.timing
        if timing is not None:
            record.scheduled_s = timing.first_scheduled_s
        record.num_cached_tokens = ended.usage.num_cached_tokens
        if asked.left:
            return
        record.num_output_tokens = ended.usage.num_output_tokens
        self._close(asked, ending_name(ended.outcome), finished=isinstance(ended.outcome, Finished))

    def _close(self, asked: Asked, name: str, *, finished: bool) -> None:
        """The client is done."""
        record = asked.record
        record.ending = name
        record.ended_s = now_s() + self._link.spec.latency_s
        if not finished:
            record.num_output_tokens = len(asked.output_ids)
        self._ended(
            Ending(
                request=asked.request,
                at_s=record.ended_s,
                finished=finished,
                output_ids=tuple(asked.output_ids),
            )
        )

    def new_record(self, request: SimRequest, index: int) -> RequestRecord:
        return RequestRecord(
            index=index,
            engine=self.name,
            arrival_s=request.arrival_s,
            num_prompt_tokens=request.prompt.num_tokens,
            token_times_s=array("d") if self._keep_token_times else None,
            session=request.session,
        )


def _sampling(request: SimRequest, seed: int) -> SamplingParams:
    return SamplingParams(
        seed=seed,
        max_tokens=request.max_tokens,
        min_tokens=request.min_tokens,
        ignore_eos=request.ignore_eos,
        stop_token_ids=() if request.stop_token_id is None else (request.stop_token_id,),
    )


def ending_name(outcome: Outcome) -> str:
    if isinstance(outcome, Finished):
        return f"finished {outcome.reason}"
    if isinstance(outcome, Failed):
        return f"failed {outcome.status}"
    assert isinstance(outcome, Aborted)
    return "aborted"
