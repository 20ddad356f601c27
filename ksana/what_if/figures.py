"""A run in figures, from what its scheduler said."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

import msgspec
import numpy as np

from ksana.journal.activations import Heard, SegmentReader
from ksana.journal.reading import Segment
from ksana.messages.base import Message, RequestId, StepId
from ksana.messages.outputs import Aborted, Failed, Finished, RequestEnded, StepOutputs
from ksana.messages.steps import StepDone, StepPlan, WorkerLost
from ksana.runtime.actor import Address

TIMED_OUT = 504
_ACTORS: tuple[Address, ...] = ("scheduler",)


class Figures(msgspec.Struct, kw_only=True):
    """Counts, and the endings that times are taken from. Feed it with what a scheduler hears and says."""

    num_steps: int = 0
    num_tokens: int = 0
    """Output tokens of requests that finished."""
    num_started_again: int = 0
    """How often a request began anew: it was preempted, or the worker was lost."""
    num_worker_losses: int = 0
    num_failed: int = 0
    num_failed_at_once: int = 0
    """Those of them that did not run out of time."""
    num_aborted: int = 0
    reasons: Counter[str] = msgspec.field(default_factory=Counter)
    """Of failures: texts, and how often."""
    ended: list[RequestEnded] = []
    """Those that finished."""
    last_s: float = 0.0
    known: set[RequestId] = set()
    skipped: frozenset[RequestId] = frozenset()
    """Requests that count for nothing, nor do steps that have only them."""
    skipped_steps: set[StepId] = set()

    def hear(self, message: Message) -> None:
        if isinstance(message, StepDone):
            self.num_steps += message.step_id not in self.skipped_steps
            self.skipped_steps.discard(message.step_id)
        elif isinstance(message, WorkerLost):
            self.num_worker_losses += 1

    def say(self, message: Message, now_s: float) -> None:
        if isinstance(message, StepPlan):
            if self.skipped and all(row.request_id in self.skipped for row in message.rows):
                self.skipped_steps.add(message.step_id)
            for row in message.new:
                if row.request_id in self.skipped:
                    continue
                self.num_started_again += row.request_id in self.known
                self.known.add(row.request_id)
        elif isinstance(message, StepOutputs):
            for ended in message.ended:
                if ended.request_id in self.skipped:
                    continue
                self.last_s = now_s
                if isinstance(ended.outcome, Failed):
                    self.num_failed += 1
                    self.num_failed_at_once += ended.outcome.status != TIMED_OUT
                    self.reasons[ended.outcome.message[:300]] += 1
                self.num_aborted += isinstance(ended.outcome, Aborted)
                if isinstance(ended.outcome, Finished):
                    self.ended.append(ended)
                    self.num_tokens += ended.usage.num_output_tokens

    def rows(self, first_s: float) -> list[tuple[str, str]]:
        """Names and values, for a table. `first_s`: when the first request arrived."""
        ttft, tpot, latency = [], [], []
        for ended in self.ended:
            timing = ended.timing
            if timing is None or timing.first_token_s is None or timing.last_token_s is None:
                continue
            ttft.append(timing.first_token_s - timing.arrival_s)
            latency.append(timing.last_token_s - timing.arrival_s)
            if ended.usage.num_output_tokens > 1:
                spread_s = timing.last_token_s - timing.first_token_s
                tpot.append(spread_s / (ended.usage.num_output_tokens - 1))
        prompt = sum(ended.usage.num_prompt_tokens for ended in self.ended)
        cached = sum(ended.usage.num_cached_tokens for ended in self.ended)
        seconds = max(self.last_s - first_s, 1e-9)
        return [
            ("requests finished", str(len(self.ended))),
            ("  failed", str(self.num_failed)),
            ("  left by their clients", str(self.num_aborted)),
            *_times("time to first token", ttft),
            *_times("time per output token", tpot),
            *_times("latency", latency),
            ("output tokens per second", f"{self.num_tokens / seconds:.1f}"),
            ("steps", str(self.num_steps)),
            ("requests started again", str(self.num_started_again)),
            ("workers lost", str(self.num_worker_losses)),
            ("prompt tokens found cached", f"{cached / prompt:.1%}" if prompt else "-"),
        ]


def _times(name: str, seconds: Sequence[float]) -> list[tuple[str, str]]:
    if not seconds:
        return [(f"{name}, mean", "-"), ("  p50", "-"), ("  p99", "-")]
    return [
        (f"{name}, mean", _ms(float(np.mean(seconds)))),
        ("  p50", _ms(float(np.percentile(seconds, 50)))),
        ("  p99", _ms(float(np.percentile(seconds, 99)))),
    ]


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.1f} ms" if seconds < 10 else f"{seconds:.2f} s"


def recorded_figures(segments: Iterable[Segment], skipped: frozenset[RequestId]) -> Figures:
    """Those of the recorded run, without the requests of `skipped`."""
    figures = Figures(skipped=skipped)
    for segment in segments:
        reader = SegmentReader(segment, _ACTORS)
        for one in reader.read():
            if not isinstance(one, Heard):
                continue
            for message in one.messages:
                figures.hear(message)
            for address, raw in one.said:
                if address in ("executor", "tokenizer"):
                    figures.say(reader.message(raw, one.offset), one.now_s)
    return figures
