"""A request whose numbers go wrong fails alone: its neighbours' answers keep every bit."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import trio

from ksana.errors import RequestError
from ksana.messages.outputs import Failed
from ksana.messages.requests import SamplingParams, TextPrompt, TokensPrompt
from ksana.model_setup import ModelFiles
from ksana.models.decoder import Model
from ksana.models.loader import load_model

from ..engines import Heard, greedy, is_balanced, listen, model_files, prompt, settled
from ..tiny_models import gemma3_config, llama_config, tiny_tokenizer, write_directory
from ..tokenizers.exploding_tokenizers import EXPLODING, TENFOLD_CASE, Exploding
from .recording import recorded_engine
from .traffic import SAMPLED, Answer, Ask, check_same, play

SETTINGS = {"max_model_len": 128, "kv_cache_memory": "600KiB", "num_threads": 1, "max_num_batched_tokens": 48}


def checkpoint(directory: Path, family: str) -> Path:
    """A tiny model with a head of its own, so that a token's embedding says nothing about its logit."""
    config = llama_config(tied=False) if family == "llama" else gemma3_config(tie_word_embeddings=False)
    return write_directory(directory, config, with_head=True)


NEIGHBOURS = [
    Ask(
        tuple((number * 31 + at * 7) % 300 + 6 for at in range(5 + 9 * number)),
        SamplingParams(
            seed=number, max_tokens=25, ignore_eos=True, **({"temperature": 0.0} if number % 2 else SAMPLED)
        ),
    )
    for number in range(8)
]
DOOMED = prompt(40, 41, 42, 43, 44, 45, 46)


async def undisturbed(files: ModelFiles, model: Model) -> tuple[list[Answer], list[int]]:
    """The neighbours' answers and those to DOOMED, each alone."""
    engine, recording = recorded_engine(files, model, **SETTINGS)
    async with engine:
        alone = [(await play(engine, [ask], recording))[0] for ask in NEIGHBOURS]
        return alone, (await listen(engine.generate(DOOMED, greedy(60)))).token_ids


def fatal_token(alone: list[Answer], doomed: list[int]) -> int:
    """Position in `doomed` of a token that came up for the first time there, and nowhere else at all."""
    met = {*DOOMED.token_ids}
    for ask, answer in zip(NEIGHBOURS, alone, strict=True):
        met |= {*ask.token_ids, *answer.token_ids}
    return next(
        at for at, token in enumerate(doomed) if at >= 3 and token not in met and token not in doomed[:at]
    )


@pytest.mark.parametrize("family", ["llama", "gemma"])
@pytest.mark.parametrize(
    "value", [np.nan, *(pytest.param(value, marks=pytest.mark.slow) for value in (np.inf, 3e38))]
)
async def test_a_poisoned_token_harms_only_those_who_use_it(
    family: str, value: float, tmp_path: Path
) -> None:
    """Its embedding is not a number, or too large for float32. One request has it in the prompt, another
    one makes it after a while; their blocks are then used by others."""
    directory = checkpoint(tmp_path, family)
    files, model = model_files(directory), load_model(directory)
    alone, doomed = await undisturbed(files, model)
    at = fatal_token(alone, doomed)
    model.embedding[doomed[at]] = value  # in memory, since no file with such numbers is loaded
    engine, recording = recorded_engine(files, model, **SETTINGS)
    heard: dict[str, Heard] = {}
    with_it = prompt(*range(200, 220), doomed[at], *range(240, 260))

    async def listen_to(name: str, tokens: TokensPrompt) -> None:
        heard[name] = await listen(engine.generate(tokens, greedy(60)))

    async with engine:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(listen_to, "in the prompt", with_it)
            nursery.start_soon(listen_to, "made", DOOMED)
            answers = await play(engine, NEIGHBOURS, recording)
        check_same(NEIGHBOURS, answers, alone)
        for _ in range(3):
            check_same(NEIGHBOURS, await play(engine, NEIGHBOURS, recording), alone)
            await listen_to("again", with_it)
        status = await settled(engine)
    assert status.num_core_crashes == status.num_worker_restarts == 0
    assert is_balanced(status.swa_use)
    assert heard["made"].token_ids[: at + 1] == doomed[: at + 1]
    if np.isfinite(value):
        assert all(one.outcome for one in heard.values())
        return  # what comes of it is the model's matter: the norm makes a zero of it
    for name, num_tokens in (("in the prompt", 0), ("made", at + 1), ("again", 0)):
        outcome = heard[name].outcome
        assert isinstance(outcome, Failed), name
        assert outcome.status == 500
        assert "NaN" in outcome.message
        assert len(heard[name].token_ids) == num_tokens


def with_tokenizer(directory: Path, case: Exploding) -> Path:
    """A tiny model whose tokenizer runs away on some text."""
    write_directory(directory, llama_config(), with_head=False)
    tokenizer = tiny_tokenizer()
    case.change(tokenizer)
    tokenizer.save(str(directory / "tokenizer.json"))
    return directory


@pytest.mark.slow
@pytest.mark.parametrize("case", [EXPLODING[0], EXPLODING[3], TENFOLD_CASE], ids=lambda case: case.name)
async def test_a_prompt_that_explodes_harms_only_itself(case: Exploding, tmp_path: Path) -> None:
    """Its tokenizer backtracks without end, or makes gigabytes of a few letters, while others are served."""
    files = model_files(with_tokenizer(tmp_path, case))
    engine, recording = recorded_engine(files, load_model(tmp_path), **SETTINGS)
    poisoned: list[Heard] = []
    good = TextPrompt(text="b c")

    async def poison() -> None:
        poisoned.append(await listen(engine.generate(TextPrompt(text=case.poison), greedy(5))))

    async with engine:
        ids = await engine.tokenize(good)
        alone = await play(engine, NEIGHBOURS, recording)
        async with trio.open_nursery() as nursery:
            for _ in range(3):
                nursery.start_soon(poison)
            together = await play(engine, NEIGHBOURS, recording)
        check_same(NEIGHBOURS, together, alone)
        assert await engine.tokenize(good) == ids
        heard = await listen(engine.generate(good, greedy(5)))
        assert heard.accepted is not None
        assert heard.accepted.prompt_token_ids == ids
        with pytest.raises(RequestError, match="could not be turned into tokens"):
            await engine.tokenize(TextPrompt(text=case.poison))
        status = await settled(engine)
        child = files.tokenizer.encoding._child
    assert child.pid is None
    assert status.num_core_crashes == status.num_worker_restarts == 0
    for one in poisoned:
        assert isinstance(one.outcome, Failed)
        assert one.outcome.status == 400
        assert one.accepted is None
