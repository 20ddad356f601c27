"""Crowds: every request ends in a defined way, exactly once, and nothing is held afterwards.

With the real worker process. Readers read on, leave early, are cancelled, run out of time; requests are
wrong in many ways; some end at stop strings; more come than there are slots.
"""

from __future__ import annotations

import os
import random
import signal
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import trio

from ksana.config import Settings
from ksana.devices.process import ProcessBackend
from ksana.engine import Engine
from ksana.errors import ServiceError
from ksana.messages.base import Message, RequestId
from ksana.messages.outputs import Ended, Failed, Finished, Outcome
from ksana.messages.requests import ChatMessage, ChatPrompt, Prompt, SamplingParams, TextPrompt, TokensPrompt
from ksana.runtime.actor import Said

from ..engines import Heard, is_balanced, listen, settled
from ..models_for_tests import tiny_gemma3_dir, tiny_llama_dir

MAX_MODEL_LEN = 160
WRONG: list[tuple[Prompt, dict[str, Any]]] = [
    (TokensPrompt(token_ids=()), {}),
    (TokensPrompt(token_ids=(5, 9999)), {}),
    (TokensPrompt(token_ids=(5, -1)), {}),
    (TokensPrompt(token_ids=tuple([7] * MAX_MODEL_LEN)), {}),
    (TokensPrompt(token_ids=(7,) * 100), {"max_tokens": 100}),
    (TextPrompt(text="x" * 100_000), {}),
    (TextPrompt(text="hi"), {"temperature": float("nan")}),
    (TextPrompt(text="hi"), {"top_p": -0.1}),
    (TextPrompt(text="hi"), {"max_tokens": 0}),
    (TextPrompt(text="hi"), {"max_tokens": 10**30}),
    (TextPrompt(text="hi"), {"stop_token_ids": (9999,)}),
    (TextPrompt(text="hi"), {"stop": ("",)}),
    (TextPrompt(text="hi"), {"seed": -1}),
]


class Crowd:
    """Requests of all kinds at one engine, and how each ended."""

    def __init__(self, engine: Engine, endings: Counter[RequestId], seed: int) -> None:
        self.engine = engine
        self.rng = random.Random(seed)
        self.asked: Counter[str] = Counter()
        self.ended: Counter[str] = Counter()
        self.request_ids: list[RequestId] = []
        self.num_events = 0
        self._on_event = trio.Event()
        self.whole: list[tuple[Prompt, SamplingParams, list[int], str]] = []
        """Requests that ran to their end, with their ids and text."""
        self._endings = endings
        self._kinds: list[Callable[[], Awaitable[None]]] = [
            self._whole,
            self._whole,
            self._whole,
            self._stop_string,
            self._leaves,
            self._leaves,
            self._cancelled,
            self._out_of_time,
            self._wrong,
        ]

    async def one(self, delay_s: float) -> None:
        await trio.sleep(delay_s)
        kind = self.rng.choice(self._kinds)
        self.asked[kind.__name__] += 1
        await kind()

    async def _ask(
        self, prompt: Prompt, sampling: SamplingParams, leave: int | None = None, **how: Any
    ) -> Heard:
        """Ask, and again a little later while every slot is taken."""
        while True:
            try:
                stream = self.engine.generate(prompt, sampling, **how)
                break
            except ServiceError as error:
                if error.status != 429:
                    raise
                await trio.sleep(0.02 + self.rng.random() * 0.1)
        self.request_ids.append(stream.request_id)
        heard = await listen(stream, leave_after=leave, on_token=self._on_token)
        if heard.endings:
            outcome = heard.outcome
            self.ended[_name(outcome)] += 1
            assert heard.usage.num_output_tokens == len(heard.token_ids)
        return heard

    def _on_token(self, _num_tokens: int) -> None:
        self.num_events += 1
        self._on_event.set()

    async def heard(self, num_events: int) -> None:
        """Wait until readers have taken output so many times."""
        while self.num_events < num_events:
            self._on_event = trio.Event()
            await self._on_event.wait()

    def _prompt(self) -> Prompt:
        rng = self.rng
        if rng.random() < 0.2:
            return TextPrompt(text="the thing in the " * rng.randrange(1, 8))
        if rng.random() < 0.2:
            return ChatPrompt(messages=(ChatMessage(role="user", content="sing " * rng.randrange(1, 9)),))
        shared = [9 + at % 200 for at in range(rng.choice([0, 20, 50]))]
        return TokensPrompt(token_ids=(*shared, *rng.choices(range(6, 320), k=rng.randrange(1, 50))))

    def _sampling(self, **changes: Any) -> SamplingParams:
        rng = self.rng
        usual = {
            "seed": rng.randrange(2**64),
            "max_tokens": rng.choice([1, 2, 5, 20, 50]),
            "temperature": rng.choice([0.0, 0.8, 1.5]),
            "top_p": rng.choice([1.0, 0.9]),
            "ignore_eos": rng.random() < 0.5,
        }
        return SamplingParams(**(usual | changes))

    async def _whole(self) -> None:
        prompt, sampling = self._prompt(), self._sampling()
        heard = await self._ask(prompt, sampling)
        assert isinstance(heard.outcome, Finished), heard.outcome
        if heard.outcome.reason == "length":
            assert len(heard.token_ids) == sampling.max_tokens
        else:
            assert not sampling.ignore_eos
        self.whole.append((prompt, sampling, heard.token_ids, heard.text))

    async def _stop_string(self) -> None:
        prompt, sampling = self._prompt(), self._sampling(stop=("a", "e", "th"), max_tokens=50)
        heard = await self._ask(prompt, sampling)
        outcome = heard.outcome
        assert isinstance(outcome, Finished), outcome
        assert not any(stop in heard.text for stop in sampling.stop)
        if outcome.reason == "length":
            assert len(heard.token_ids) == 50
        else:
            assert outcome.stop_reason in (*sampling.stop, None)
            self.ended["by a stop string"] += outcome.stop_reason is not None
        self.whole.append((prompt, sampling, heard.token_ids, heard.text))

    async def _leaves(self) -> None:
        await self._ask(self._prompt(), self._sampling(), leave=self.rng.randrange(0, 30))

    async def _cancelled(self) -> None:
        with trio.move_on_after(self.rng.random() * 0.3):
            await self._ask(self._prompt(), self._sampling(max_tokens=50))

    async def _out_of_time(self) -> None:
        soon = self.rng.choice([0.001, self.rng.random() * 0.2])
        heard = await self._ask(self._prompt(), self._sampling(max_tokens=50), timeout_s=soon)
        if isinstance(heard.outcome, Failed):
            assert (heard.outcome.status, heard.outcome.code) == (504, "request_timeout")
        else:
            assert isinstance(heard.outcome, Finished)

    async def _wrong(self) -> None:
        prompt, changes = self.rng.choice(WRONG)
        heard = await self._ask(prompt, self._sampling(**({"max_tokens": 5} | changes)))
        assert isinstance(heard.outcome, Failed), (prompt, changes)
        assert heard.outcome.status == 400
        assert heard.accepted is None
        assert not heard.token_ids

    async def run(self, num_requests: int, within_s: float, num_at_once: int = 0) -> None:
        """The first `num_at_once` come in the same instant, so that slots run out on any machine."""
        async with trio.open_nursery() as nursery:
            for number in range(num_requests):
                nursery.start_soon(self.one, 0 if number < num_at_once else self.rng.random() * within_s)

    async def check_afterwards(self) -> None:
        """All ended once; pools balance; some that ran whole say the same again, alone and cold."""
        status = await settled(self.engine)
        assert is_balanced(status.fa_use)
        assert is_balanced(status.swa_use)
        assert status.num_open_slots == status.num_running == status.num_waiting == 0
        assert status.num_core_crashes == 0
        assert len(set(self.request_ids)) == len(self.request_ids)
        assert all(self._endings[request_id] == 1 for request_id in self.request_ids)
        assert len(self._endings) == len(self.request_ids)
        for number, (prompt, sampling, token_ids, text) in enumerate(self.rng.sample(self.whole, 15)):
            stream = self.engine.generate(prompt, sampling, cache_salt=f"cold {number}")
            again = await listen(stream)
            assert (again.token_ids, again.text) == (token_ids, text)


def _name(outcome: Outcome) -> str:
    if isinstance(outcome, Finished):
        return outcome.reason
    return f"failed {outcome.status}" if isinstance(outcome, Failed) else "aborted"


def engine_that_counts(directory: Path, **settings: Any) -> tuple[Engine, Counter[RequestId]]:
    """And how often the tokenizer said `Ended`, per request, whether or not anybody listened."""
    endings: Counter[RequestId] = Counter()

    def tap(_actor: str, _now_s: float, _in: Sequence[Message], said: Sequence[Said]) -> None:
        for address, message in said:
            if address == "producer" and isinstance(message, Ended):
                endings[message.request_id] += 1

    made = Settings(model=str(directory), max_model_len=MAX_MODEL_LEN, num_threads=1, **settings)
    return Engine(made, tap=tap), endings


async def test_500_requests(tmp_path: Path) -> None:
    engine, endings = engine_that_counts(
        tiny_llama_dir(tmp_path),
        kv_cache_memory="500KiB",
        block_size=8,
        max_num_seqs=24,
        max_queued_requests=40,
        max_num_batched_tokens=128,
    )
    async with engine:
        crowd = Crowd(engine, endings, seed=1)
        with trio.fail_after(120):
            await crowd.run(500, within_s=0.5, num_at_once=200)
            await crowd.check_afterwards()
        status = engine.status()
    assert sum(crowd.asked.values()) == 500
    assert min(crowd.asked.values()) > 25
    for way in ("length", "stop", "by a stop string", "failed 400", "failed 504"):
        assert crowd.ended[way] > 3, way
    assert status.num_refused > 0
    assert status.counters.num_preemptions > 0
    assert status.counters.num_aborted > 20
    assert status.cache.num_hit_tokens > 0


async def test_100_requests_and_sliding_windows_and_a_worker_that_is_killed(tmp_path: Path) -> None:
    engine, endings = engine_that_counts(
        tiny_gemma3_dir(tmp_path),
        kv_cache_memory="900KiB",
        max_num_seqs=16,
        max_num_batched_tokens=64,
    )
    async with engine:
        backend = engine._executor._backend
        assert isinstance(backend, ProcessBackend)
        crowd = Crowd(engine, endings, seed=2)
        with trio.fail_after(120):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(crowd.run, 100, 2)
                await crowd.heard(400)
                assert backend.pid is not None
                os.kill(backend.pid, signal.SIGKILL)
            await crowd.check_afterwards()
        status = engine.status()
    assert status.num_worker_restarts == 1
    assert sum(crowd.asked.values()) == 100
    assert min(crowd.asked.values()) > 3
    assert status.counters.num_finished > 30
