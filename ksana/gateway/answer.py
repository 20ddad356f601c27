"""From prompts to an HTTP answer, streaming or not: the part that all generating routes share."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import Any, Protocol

import msgspec
import trio
from quart import Response, g

from ksana.client import OutputStream
from ksana.errors import RequestError, ServiceError
from ksana.gateway import sse
from ksana.gateway.context import Gateway
from ksana.gateway.context_length import counting, too_much
from ksana.gateway.errors import ApiError, error_of
from ksana.gateway.field_names import Names, naming
from ksana.gateway.limits import ENGINE_GRACE_S
from ksana.gateway.outputs import Indexed, Outputs
from ksana.gateway.request_scope import RequestScope, request_scope
from ksana.gateway.sampling_fields import draw_seed
from ksana.messages.outputs import Finished, PromptAccepted, TextDelta, Usage
from ksana.messages.requests import Prompt, SamplingParams
from ksana.sampling.params import validate


class Ask(msgspec.Struct, frozen=True, kw_only=True):
    """What one HTTP request wants generated."""

    prompts: Sequence[Prompt]
    sampling: SamplingParams
    is_seeded: bool
    """The seed is the client's, and of every prompt, so that the same request has the same answer. Else each
    prompt gets one of its own, so that equal prompts have different answers."""
    stream: bool
    cache_salt: str = ""
    names: Names = {}
    """How the client calls the fields."""

    def sampling_of(self, index: int) -> SamplingParams:
        """The parameters of one prompt."""
        if index == 0 or self.is_seeded:
            return self.sampling
        return msgspec.structs.replace(self.sampling, seed=draw_seed())


class Result(msgspec.Struct, frozen=True, kw_only=True):
    """All of one prompt's output."""

    prompt_token_ids: tuple[int, ...]
    text: str
    token_ids: tuple[int, ...]
    finished: Finished
    usage: Usage


class Form(Protocol):
    """How one route writes what was generated. Of its methods, the streaming ones are called in order."""

    content_type: str

    def whole(self, results: Sequence[Result]) -> Any:
        """The object of an answer that does not stream."""
        ...

    def accepted(self, index: int, event: PromptAccepted, /) -> bytes: ...

    def text(self, index: int, event: TextDelta, /) -> bytes: ...

    def finished(self, index: int, finished: Finished, /) -> bytes: ...

    def closing(self, usages: Sequence[Usage], /) -> bytes:
        """After the last choice finished."""
        ...

    def failed(self, error: ApiError) -> bytes:
        """In place of everything that would still come: no clean end follows."""
        ...


async def answer(gateway: Gateway, ask: Ask, form: Form) -> Response:
    """Generate, and answer in `form`.

    Raises RequestError or ServiceError as long as no byte has been sent: whether a stream starts at all is
    decided when the first output is there. Afterwards a failure is written into the stream.
    """
    try:
        with naming(ask.names), counting(ask.sampling.max_tokens):
            await _check(gateway, ask)
            outputs = _start(gateway, ask)
            if not ask.stream:
                results = await _collect(outputs, len(ask.prompts))
                return Response(sse.encode_json(form.whole(results)), content_type="application/json")
            first = await outputs.first()
    except BaseException:
        # Not only when the error has been sent: what still runs for this request is wasted.
        request_scope().close()
        raise
    return Response(
        _stream(outputs, first, form, request_scope()), content_type=form.content_type, headers=sse.HEADERS
    )


async def _check(gateway: Gateway, ask: Ask) -> None:
    """Refuse what cannot be asked of the engine."""
    gateway.traffic.check_open()
    model = gateway.client.model
    max_tokens = ask.sampling.max_tokens
    if max_tokens is not None and max_tokens > model.max_model_len:
        # Not in the words of `validate`: how much there is room for depends on the prompt.
        raise too_much(len(await gateway.client.tokenize(ask.prompts[0])), max_tokens, model.max_model_len)
    validate(ask.sampling, model.vocab_size, model.max_model_len)


def _start(gateway: Gateway, ask: Ask) -> Outputs:
    """Ask the engine for every prompt. If one is refused, those before it are given up."""
    scope = request_scope()
    timeout_s = float(gateway.settings.request_timeout)
    streams: list[OutputStream] = []
    for index, prompt in enumerate(ask.prompts):
        stream = gateway.client.generate(
            prompt,
            ask.sampling_of(index),
            timeout_s=timeout_s,
            cache_salt=g.key_salt + ":" + ask.cache_salt if g.key_salt else ask.cache_salt,
            external_id=scope.request_id,
        )
        scope.on_end(stream.close)
        streams.append(stream)
    outputs = Outputs(
        streams,
        scope.nursery,
        gateway.metrics.observe(len(streams)),
        trio.current_time() + timeout_s + ENGINE_GRACE_S,
    )
    gateway.traffic.add(outputs)
    scope.on_end(lambda: gateway.traffic.remove(outputs))
    return outputs


async def _collect(outputs: Outputs, num_prompts: int) -> list[Result]:
    prompts: list[tuple[int, ...]] = [()] * num_prompts
    texts: list[list[str]] = [[] for _ in range(num_prompts)]
    ids: list[list[int]] = [[] for _ in range(num_prompts)]
    ended: dict[int, tuple[Finished, Usage]] = {}
    while outputs.num_open:
        for index, event in await outputs.take():
            if isinstance(event, PromptAccepted):
                prompts[index] = event.prompt_token_ids
            elif isinstance(event, TextDelta):
                texts[index].append(event.text)
                ids[index] += event.token_ids
            elif isinstance(event.outcome, Finished):
                ended[index] = (event.outcome, event.usage)
            elif (error := error_of(event.outcome)) is not None:
                raise error
    return [
        Result(
            prompt_token_ids=prompts[index],
            text="".join(texts[index]),
            token_ids=tuple(ids[index]),
            finished=ended[index][0],
            usage=ended[index][1],
        )
        for index in range(num_prompts)
    ]


async def _stream(
    outputs: Outputs, events: list[Indexed], form: Form, scope: RequestScope
) -> AsyncIterator[bytes]:
    """The body of a stream: each piece is all that was waiting when the piece before had left."""
    usages: dict[int, Usage] = {}
    try:
        while True:
            pieces = []
            for index, event in events:
                if isinstance(event, PromptAccepted):
                    pieces.append(form.accepted(index, event))
                elif isinstance(event, TextDelta):
                    pieces.append(form.text(index, event))
                elif isinstance(event.outcome, Finished):
                    usages[index] = event.usage
                    pieces.append(form.finished(index, event.outcome))
                elif (error := error_of(event.outcome)) is not None:
                    scope.refusal = error
                    yield b"".join(pieces) + form.failed(error)
                    return
            if not outputs.num_open:
                pieces.append(form.closing([usages[index] for index in sorted(usages)]))
            if piece := b"".join(pieces):
                yield piece
            if not outputs.num_open:
                return
            events = await outputs.take()
    except (RequestError, ServiceError) as error:
        scope.refusal = error
        yield form.failed(error)
    finally:
        outputs.close()
