"""What comes out of an engine is what transformers says, by files of `python -m tests.make_references`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from ksana.devices.threads import default_num_threads
from ksana.messages.requests import SamplingParams
from ksana.models.loader import load_model

from ..engines import model_files
from ..models_for_tests import gemma3_gguf, smollm2_gguf
from .recording import recorded_engine
from .traffic import Ask, play

DATA = Path(__file__).parent.parent / "data"
NEAR_TIE = 1e-4


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "locate", "num_prompts"), [("smollm2", smollm2_gguf, 8), ("gemma3", gemma3_gguf, 4)]
)
async def test_greedy_answers_are_the_references(
    name: str, locate: Callable[[], Path], num_prompts: int
) -> None:
    """Each token is the reference's best, or ties with it within 1e-4; behind a token that only ties, the
    reference went another way, and nothing is compared."""
    with np.load(DATA / f"reference_{name}.npz", allow_pickle=False) as kept:
        ends = np.cumsum(kept["prompt_lengths"])
        prompts = np.split(kept["prompts"], ends[:-1])[-num_prompts:]
        chosen, best_ids, best_logits = (
            kept[key][-num_prompts:] for key in ("chosen", "best_ids", "best_logits")
        )
    num_tokens = chosen.shape[1]
    greedy = SamplingParams(seed=0, temperature=0.0, max_tokens=num_tokens, ignore_eos=True)
    asked = [Ask(tuple(prompt.tolist()), greedy) for prompt in prompts]
    path = locate()
    settings = {"max_model_len": 256, "kv_cache_memory": "128MiB", "num_threads": default_num_threads()}
    engine, _ = recorded_engine(model_files(path), load_model(path, max_positions=256), **settings)
    async with engine:
        answers = await play(engine, asked)
    num_compared = num_ties = 0
    for row, answer in enumerate(answers):
        assert len(answer.token_ids) == num_tokens
        for step, token in enumerate(answer.token_ids):
            num_compared += 1
            if token != best_ids[row, step, 0]:
                num_ties += 1
                behind = best_logits[row, step, 0] - best_logits[row, step, 1]
                assert token == best_ids[row, step, 1], (row, step)
                assert behind <= NEAR_TIE, (row, step)
            if token != chosen[row, step]:
                break
    assert num_compared > num_prompts * num_tokens * 0.9
    assert num_ties <= num_compared * 0.01
