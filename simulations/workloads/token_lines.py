"""The `workload.jsonl` form: JSON lines of input_toks, output_toks, arrival_time_ns, maybe input_tok_ids."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import msgspec

from simulations.requests import MAX_CONTENT_ID, ListedText, NamedText, PromptSource, SimRequest
from simulations.workloads.lines import Arrivals, check_lengths, read_json_lines

TokenId = Annotated[int, msgspec.Meta(ge=0, lt=1 << 31)]


class _TokenLine(msgspec.Struct, gc=False):
    input_toks: int
    output_toks: int
    arrival_time_ns: int
    input_tok_ids: tuple[TokenId, ...] | None = None


def read_token_lines(path: Path) -> Iterator[SimRequest]:
    """Prompts whose ids are not recorded are texts of their own. Raises ConfigError, with the line."""
    arrivals = Arrivals()
    for line, request in read_json_lines(path, _TokenLine):
        arrivals.check(line, request.arrival_time_ns / 1e9)
        check_lengths(line, input_toks=request.input_toks, output_toks=request.output_toks)
        if line.number > MAX_CONTENT_ID:
            raise line.wrong("too many lines")
        text: ListedText | NamedText = NamedText(line.number, request.input_toks)
        if request.input_tok_ids is not None:
            text = ListedText(request.input_tok_ids)
            if text.num_tokens != request.input_toks:
                raise line.wrong(f"input_toks is {request.input_toks}, but there are {text.num_tokens} ids")
        yield SimRequest(
            arrival_s=request.arrival_time_ns / 1e9,
            prompt=PromptSource((text,)),
            max_tokens=request.output_toks,
        )
