"""Decode, prefill and the engine's own time per step, side by side with transformers in one run.

    python -m benchmarks.against_transformers [--model DIR] [--rounds 3]

Both compute in float32 on the same weights, with as many threads, and take turns, so that a noisy machine
hits both. Medians over the rounds are printed.

    decode   32-token prompts of random ids, 64 greedy tokens each, at batch 1, 8 and 32; the time is that of
             the whole batch, prompts included
    prefill  one 512-token prompt, one token out; a new prompt each time, so nothing comes from the cache
    own time of a decode step at batch 32: the time between two steps' ends, less the time the model ran and
             sampled inside the worker; and the CPU time the engine's process spent per step
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import trio

from ksana.config import Settings
from ksana.engine import Engine
from ksana.messages.base import Message
from ksana.messages.outputs import Ended, Finished
from ksana.messages.requests import SamplingParams, TokensPrompt
from ksana.messages.steps import StepDone
from ksana.runtime.actor import Address, Said

PROMPT_LEN, OUTPUT_LEN, PREFILL_LEN = 32, 64, 512
BATCHES = (1, 8, 32)

Prompts = list[tuple[int, ...]]


@dataclass
class StepTap:
    """Notes when steps were done and how long the worker computed."""

    done: list[tuple[float, int, int]] = field(default_factory=list)
    """(clock seconds, worker's forward and sampling time in ns, rows)"""

    def __call__(
        self, actor: Address, now_s: float, messages: Sequence[Message], _said: Sequence[Said]
    ) -> None:
        if actor == "scheduler":
            for message in messages:
                if isinstance(message, StepDone):
                    times = message.times
                    self.done.append((now_s, times.forward_ns + times.sample_ns, len(message.results)))

    def own_times_s(self, num_rows: int) -> list[float]:
        """Time between the ends of neighbouring steps of `num_rows` rows, less the worker's computing."""
        return [
            later[0] - earlier[0] - later[1] / 1e9
            for earlier, later in zip(self.done, self.done[1:], strict=False)
            if earlier[2] == later[2] == num_rows
        ]


def random_prompts(rng: random.Random, num: int, length: int, vocab_size: int) -> Prompts:
    return [tuple(rng.randrange(100, vocab_size) for _ in range(length)) for _ in range(num)]


async def run_ours(engine: Engine, prompts: Prompts, max_tokens: int) -> float:
    """Seconds until every prompt has its tokens."""

    async def one(prompt: tuple[int, ...]) -> None:
        sampling = SamplingParams(seed=0, temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
        async for event in engine.generate(TokensPrompt(token_ids=prompt), sampling):
            if isinstance(event, Ended):
                assert isinstance(event.outcome, Finished), event
                assert event.usage.num_output_tokens == max_tokens
                assert event.usage.num_cached_tokens == 0

    start = time.perf_counter()
    async with trio.open_nursery() as nursery:
        for prompt in prompts:
            nursery.start_soon(one, prompt)
    return time.perf_counter() - start


def transformers_runner(directory: Path, num_threads: int) -> Callable[[Prompts, int], float]:
    import torch
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(num_threads)
    model = AutoModelForCausalLM.from_pretrained(str(directory), dtype=torch.float32)
    model.eval()

    def run(prompts: Prompts, max_tokens: int) -> float:
        ids = torch.tensor(prompts)
        start = time.perf_counter()
        with torch.inference_mode():
            out = model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                do_sample=False,
                min_new_tokens=max_tokens,
                max_new_tokens=max_tokens,
                pad_token_id=0,
            )
        assert out.shape[1] == ids.shape[1] + max_tokens
        return time.perf_counter() - start

    return run


async def compare(settings: Settings, directory: Path, rounds: int, num_threads: int) -> None:
    theirs = transformers_runner(directory, num_threads)
    tap = StepTap()
    rng = random.Random(0)
    async with Engine(settings, tap=tap) as engine:
        model = engine.client.model
        print(f"{model.name}, {model.device}; transformers float32, {num_threads} threads; {rounds} rounds")
        print(f"{'':24}{'ksana':>12}{'transformers':>14}{'ratio':>8}")
        cases = [(f"decode batch {n}, tok/s", n, PROMPT_LEN, OUTPUT_LEN) for n in BATCHES]
        cases.append((f"prefill {PREFILL_LEN}, tok/s", 1, PREFILL_LEN, 1))
        cpu_per_step_s = 0.0
        for name, num, length, max_tokens in cases:
            await run_ours(engine, random_prompts(rng, num, length, model.vocab_size), max_tokens)
            theirs(random_prompts(rng, num, length, model.vocab_size), max_tokens)
            ours_s, theirs_s = [], []
            for _ in range(rounds):
                prompts = random_prompts(rng, num, length, model.vocab_size)
                num_steps, cpu_s = len(tap.done), time.process_time()
                ours_s.append(await run_ours(engine, prompts, max_tokens))
                cpu_per_step_s = (time.process_time() - cpu_s) / (len(tap.done) - num_steps)
                theirs_s.append(theirs(prompts, max_tokens))
                if name.startswith("decode batch 32"):
                    cpu_at_32_s = cpu_per_step_s
            work = num * (max_tokens if max_tokens > 1 else length)
            ours, other = work / statistics.median(ours_s), work / statistics.median(theirs_s)
            print(f"{name:24}{ours:12.1f}{other:14.1f}{ours / other:8.2f}")
        own = sorted(tap.own_times_s(max(BATCHES)))
        print(
            f"own time per step at batch {max(BATCHES)}: median {statistics.median(own) * 1e3:.2f} ms, "
            f"p90 {own[int(len(own) * 0.9)] * 1e3:.2f} ms over {len(own)} steps; "
            f"CPU of the engine's process {cpu_at_32_s * 1e3:.2f} ms per step"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--model", help="Hugging Face directory; default: SmolLM2, made from the demo model")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    if options.model is None:
        from tests.models_for_tests import smollm2_directory

        directory = smollm2_directory()
    else:
        directory = Path(options.model)
    settings = Settings(
        model=str(directory),
        max_num_seqs=max(BATCHES),
        num_threads=options.threads,
        max_num_batched_tokens=1024,
    )
    trio.run(compare, settings, directory, options.rounds, options.threads)


if __name__ == "__main__":
    main()
