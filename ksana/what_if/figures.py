"""A run in figures, from what its scheduler said."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec
import numpy as np

from ksana.journal.activations import Heard, SegmentReader
from ksana.journal.reading import Segment
from ksana.messages.base import Message, RequestId
from ksana.messages.outputs import Aborted, Failed, Finished, RequestEnded, StepOutputs
from ksana.messages.steps import StepDone, StepPlan, WorkerLost
from ksana.runtime.actor import Address

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
    num_aborted: int = 0
    ended: list[RequestEnded] = []
    """Those that finished."""
    last_s: float = 0.0
    known: set[RequestId] = set()

    def hear(self, message: Message) -> None:
        if isinstance(message, StepDone):
            self.num_steps += 1
        elif isinstance(message, WorkerLost):
            self.num_worker_losses += 1

    def say(self, message: Message, now_s: float) -> None:
        if isinstance(message, StepPlan):
            for row in message.new:
                self.num_started_again += row.request_id in self.known
                self.known.add(row.request_id)
        elif isinstance(message, StepOutputs):
            for ended in message.ended:
                self.last_s = now_s
                self.num_failed += isinstance(ended.outcome, Failed)
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
    figures = Figures()
    for segment in segments:
        reader = SegmentReader(segment, _ACTORS)
        for one in reader.read():
            if not isinstance(one, Heard):
                continue
            for message in one.messages:
                figures.hear(message)
            for address, raw in one.said:
                if address in ("executor", "tokenizer"):
                    figures.say(_without(reader.message(raw, one.offset), skipped), one.now_s)
    return figures


def _without(message: Message, skipped: frozenset[RequestId]) -> Message:
    if isinstance(message, StepOutputs) and skipped:
        ended = tuple(one for one in message.ended if one.request_id not in skipped)
        return msgspec.structs.replace(message, ended=ended)
    return message
