"""For scripts: a model that stays loaded, called synchronously.

with LLM("smollm2-135m") as llm:
    for completion in llm.generate(["The sky is", "Once upon a time"]):
        print(completion.text)
"""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
import threading
from collections.abc import Callable, Sequence
from functools import partial
from types import TracebackType
from typing import Any, Literal, Self

import msgspec
import trio
from tqdm import tqdm  # type: ignore[import-untyped]

from ksana.client import OutputStream
from ksana.config import settings_from
from ksana.engine import Engine
from ksana.errors import KsanaError, RequestError, ServiceError
from ksana.messages.outputs import Ended, Failed, Finished, PromptAccepted, Usage
from ksana.messages.requests import Prompt, SamplingParams
from ksana.messages.status import ModelInfo
from ksana.sampling.params import validate
from ksana.script_inputs import AnyPrompt, as_prompts, as_sampling

DEFAULT_SAMPLING = SamplingParams(seed=0, max_tokens=64, temperature=0.0)
"""Where none is given. Short, as models that were not taught to stop fill the context, which takes minutes;
greedy, so that the same script prints the same."""


class Completion(msgspec.Struct, frozen=True, kw_only=True):
    """What came back for one prompt."""

    prompt_token_ids: tuple[int, ...]
    text: str
    token_ids: tuple[int, ...]
    finish_reason: Literal["stop", "length"]
    stop_reason: str | int | None
    usage: Usage


class LLM:
    """An `Engine` on a thread of its own. May be called from any thread, by several at once.

    `close` it, or use it by `with`; at the latest it is closed when the interpreter exits.
    """

    def __init__(
        self,
        model: str | os.PathLike[str] | None = None,
        *,
        engine: Callable[[], Engine] | None = None,
        **settings: Any,
    ) -> None:
        """Load the model; `settings` are those of `ksana.config.Settings`. Or give a function that makes
        the engine. Raises ConfigError, before anything is loaded, for settings that will not do, or
        ModelLoadError."""
        if (model is None) == (engine is None):
            raise TypeError("LLM wants a model, or a function that makes an engine, and not both")
        if engine is not None and settings:
            raise TypeError(f"LLM wants settings ({', '.join(settings)}), or an engine that has its own")
        self._make_engine = engine or partial(Engine, settings_from({"model": model} | settings))
        self._started = threading.Event()
        self._failures: list[BaseException] = []
        self._token: trio.lowlevel.TrioToken | None = None
        self._thread = threading.Thread(target=self._run, name="ksana engine", daemon=True)
        self._thread.start()
        atexit.register(self.close)
        self._started.wait()
        if self._failures:
            self.close()
            raise self._failures[0]

    @property
    def model(self) -> ModelInfo:
        """What is loaded."""
        return self._engine.client.model

    def generate(
        self,
        prompts: AnyPrompt | Sequence[AnyPrompt],
        sampling: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        progress: bool | None = None,
    ) -> list[Completion]:
        """Complete prompts, as many at a time as the engine takes; the answers are in their order.

        `sampling` is one for all, or one for each, and taken as it is: without `max_tokens` an answer may
        fill the context. By default each answer is greedy (temperature 0) and 64 tokens long at most; see
        `DEFAULT_SAMPLING`. `progress` shows a bar on stderr; by default when that is a terminal. Raises
        RequestError for the first prompt that is refused, ServiceError for the first that fails; the others
        are then aborted.
        """
        asked = as_prompts(prompts)
        params = as_sampling(DEFAULT_SAMPLING if sampling is None else sampling, len(asked))
        if not asked:
            return []
        model = self.model
        for each in params[:1] if isinstance(sampling, SamplingParams) else params:
            validate(each, model.vocab_size, model.max_model_len)
        shown = sys.stderr.isatty() if progress is None else progress
        with tqdm(total=len(asked), desc="Prompts", unit="prompt", disable=not shown) as bar:
            return self._call(list(zip(asked, params, strict=True)), bar)

    def close(self) -> None:
        """Stop the engine and its worker. May be called twice."""
        atexit.unregister(self.close)
        if self._token is not None:
            with contextlib.suppress(trio.RunFinishedError):
                self._token.run_sync_soon(self._stop.set)
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # On the engine's thread

    def _run(self) -> None:
        try:
            trio.run(self._main)
        except BaseException as error:
            self._failures.append(error)
        finally:
            self._started.set()

    async def _main(self) -> None:
        self._stop = trio.Event()
        async with self._make_engine() as self._engine:
            self._token = trio.lowlevel.current_trio_token()
            self._started.set()
            await self._stop.wait()

    def _call(self, asked: list[tuple[Prompt, SamplingParams]], bar: Any) -> list[Completion]:
        if self._token is None or not self._thread.is_alive():
            raise ServiceError("this LLM is closed", status=503)
        scope = trio.CancelScope()

        async def run() -> list[Completion]:
            with scope:
                return await self._generate_all(asked, bar)
            raise ServiceError("the call was interrupted", status=503)

        try:
            return trio.from_thread.run(run, trio_token=self._token)
        except trio.RunFinishedError:
            raise ServiceError("this LLM is closed", status=503) from None
        except KeyboardInterrupt:
            self._token.run_sync_soon(scope.cancel)
            raise

    async def _generate_all(self, asked: list[tuple[Prompt, SamplingParams]], bar: Any) -> list[Completion]:
        done: dict[int, Completion] = {}
        settings = self._engine.settings
        at_once = trio.CapacityLimiter(settings.max_num_seqs + settings.max_queued_requests)

        async def one(index: int, prompt: Prompt, sampling: SamplingParams) -> None:
            async with at_once:
                done[index] = await _complete(self._engine.generate(prompt, sampling))
            bar.update()

        failed: KsanaError | None = None
        try:
            async with trio.open_nursery() as nursery:
                for index, (prompt, sampling) in enumerate(asked):
                    nursery.start_soon(one, index, prompt, sampling)
        except* KsanaError as group:
            failed = _first(group)
        if failed is not None:
            raise failed
        return [done[index] for index in range(len(asked))]


async def _complete(stream: OutputStream) -> Completion:
    prompt_token_ids: tuple[int, ...] = ()
    texts: list[str] = []
    token_ids: list[int] = []
    async with stream:
        async for event in stream:
            if isinstance(event, PromptAccepted):
                prompt_token_ids = event.prompt_token_ids
            elif isinstance(event, Ended):
                outcome = event.outcome
                if not isinstance(outcome, Finished):
                    raise _error_of(outcome)
                return Completion(
                    prompt_token_ids=prompt_token_ids,
                    text="".join(texts),
                    token_ids=tuple(token_ids),
                    finish_reason=outcome.reason,
                    stop_reason=outcome.stop_reason,
                    usage=event.usage,
                )
            else:
                texts.append(event.text)
                token_ids += event.token_ids
    raise ServiceError("the stream ended without an ending")


def _error_of(outcome: object) -> KsanaError:
    if not isinstance(outcome, Failed):
        return ServiceError("the request was aborted", status=503)
    if outcome.status < 500 and outcome.status != 429:
        return RequestError(outcome.message, status=outcome.status, param=outcome.param, code=outcome.code)
    return ServiceError(outcome.message, status=outcome.status, code=outcome.code)


def _first(group: BaseExceptionGroup[KsanaError]) -> KsanaError:
    error: BaseException = group
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    assert isinstance(error, KsanaError)
    return error
