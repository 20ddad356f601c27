"""What recording costs: time of the event loop per step, bytes per step, and the states of a new segment.

    python -m benchmarks.journal_costs --step-ms 47

An engine with a toy model and a simulated device decodes 32 requests; the taps are timed with the CPU time
of this thread, and so is handing over to the disk. The share is of a step of `--step-ms`; 47 ms is a step of
SmolLM2-135M at batch 32 on two cores. The target is 2 %.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import trio

from ksana.config import Settings
from ksana.costs.step_cost import LinearStepCost
from ksana.devices.simulated_worker import hashed_tokens
from ksana.engine import Engine
from ksana.journal.reading import list_segments
from ksana.journal.recorder import JournalRecorder
from ksana.messages.base import Message
from ksana.messages.requests import SamplingParams, TokensPrompt
from ksana.runtime.actor import Address, Said
from ksana.runtime.virtual_clock import VirtualClock
from ksana.stores.simulated import SimulatedStore
from simulations.device import simulated_device
from simulations.toy_model import toy_model

BATCH = 32
PROMPT_TOKENS = 256
OUTPUT_TOKENS = 400
TARGET = 0.02


class Timed:
    """Adds up the CPU time of this thread in the recorder, by what it does."""

    def __init__(self) -> None:
        self.tap_s = self.take_s = self.begin_s = 0.0
        self.num_begun = 0
        record, take, begin = JournalRecorder.__call__, JournalRecorder.take, JournalRecorder._begin_segment

        def timed_record(
            recorder: JournalRecorder,
            actor: Address,
            now_s: float,
            messages: Sequence[Message],
            said: Sequence[Said],
        ) -> None:
            began = time.thread_time()
            record(recorder, actor, now_s, messages, said)
            self.tap_s += time.thread_time() - began

        def timed_take(recorder: JournalRecorder) -> object:
            began = time.thread_time()
            pieces = take(recorder)
            self.take_s += time.thread_time() - began
            return pieces

        def timed_begin(recorder: JournalRecorder, now_s: float) -> None:
            began = time.thread_time()
            begin(recorder, now_s)
            self.begin_s += time.thread_time() - began
            self.num_begun += 1

        self._changes = {"__call__": timed_record, "take": timed_take, "_begin_segment": timed_begin}
        self._kept = {"__call__": record, "take": take, "_begin_segment": begin}

    def __enter__(self) -> Timed:
        for name, value in self._changes.items():
            setattr(JournalRecorder, name, value)
        return self

    def __exit__(self, *_: object) -> None:
        for name, value in self._kept.items():
            setattr(JournalRecorder, name, value)


def measure(title: str, step_ms: float, *, redact: bool = False, store: bool = False) -> bool:
    """One line of the table. Whether the target is met."""
    model = toy_model(sliding_window=None)
    with tempfile.TemporaryDirectory() as directory, Timed() as timed:
        settings = Settings(
            model="toy",
            kv_cache_memory="64MiB",
            max_model_len=1024,
            max_num_seqs=BATCH,
            max_num_batched_tokens=512,
            journal=str(Path(directory) / "journal"),
            journal_redact=redact,
        )

        async def main() -> int:
            engine = Engine(
                settings,
                files=model,
                backend=lambda setup: simulated_device(
                    setup,
                    hashed_tokens(model.spec.vocab_size),
                    LinearStepCost(fixed_s=step_ms / 1e3, per_token_s=0, per_attended_token_s=0),
                    lambda _number, _plan: None,
                ),
                threads=False,
                store=SimulatedStore(1) if store else None,
            )
            async with engine, trio.open_nursery() as nursery:

                async def ask(number: int) -> None:
                    token_ids = tuple(3 + (number * 31 + i * 7) % 200 for i in range(PROMPT_TOKENS))
                    sampling = SamplingParams(seed=number, max_tokens=OUTPUT_TOKENS, ignore_eos=True)
                    async with engine.generate(TokensPrompt(token_ids=token_ids), sampling) as events:
                        async for _ in events:
                            pass

                for number in range(BATCH):
                    nursery.start_soon(ask, number)
            return engine.status().counters.num_steps

        num_steps = trio.run(main, clock=VirtualClock())
        num_bytes = sum(s.path.stat().st_size for s in list_segments(Path(directory) / "journal"))
    tap_us = (timed.tap_s + timed.take_s) / num_steps * 1e6
    share = tap_us / 1e3 / step_ms
    print(
        f"{title:<34} {tap_us:8.0f} µs  {share:7.2%}  {num_bytes / num_steps / 1024:7.1f} KiB"
        f"  {timed.begin_s / timed.num_begun * 1e3:7.1f} ms"
    )
    return share < TARGET


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--step-ms", type=float, default=47.0, help="How long a step takes (default: 47)")
    step_ms = parser.parse_args().step_ms
    print(f"{'batch 32, all actors':<34} {'a step':>11}  {'share':>7}  {'written':>11}  {'states':>10}")
    good = [
        measure("whole", step_ms),
        measure("whole, with a remote cache", step_ms, store=True),
        measure("redacted", step_ms, redact=True),
        measure("redacted, with a remote cache", step_ms, redact=True, store=True),
    ]
    print(f"target: below {TARGET:.0%} of a step of {step_ms:g} ms: {'met' if all(good) else 'missed'}")
    return 0 if all(good) else 1


if __name__ == "__main__":
    raise SystemExit(main())
