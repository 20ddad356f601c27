"""`ksana replay`: a journal, said again by the cores that it was recorded from, without a device."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import cast

from ksana.cli.settings import Parser
from ksana.cli.what_if import show_what_if
from ksana.config import Settings
from ksana.errors import ConfigError
from ksana.journal.reading import Segment, list_segments
from ksana.journal.replay import Difference, ReplayReport, replay
from ksana.journal.schema import STATE_TYPES
from ksana.model_setup import find_model
from ksana.runtime.actor import Address
from ksana.tokenizers.prompts import PromptEncoder

SAME, DIFFERENT = 0, 1
_SEGMENTS = re.compile(r"([0-9]{1,9})(-([0-9]{1,9})?)?", re.ASCII)
MAX_SHOWN_CHARS = 4000
"""Of one message; a plan may be long."""
CHARS_BEFORE = 200
"""Of a long message, before the first difference."""


def run(argv: Sequence[str]) -> int:
    """Replay, or with --set run again. Returns the exit code."""
    parser = build_parser()
    arguments = parser.parse_strictly(argv)
    tell = say if arguments.changes else print
    segments = choose_segments(list_segments(Path(arguments.DIR), tell), arguments.segment)
    if arguments.changes:
        if arguments.actor or arguments.model or arguments.chat_template:
            raise ConfigError("--set runs all actors but the tokenizer: leave out --actor and --model")
        return show_what_if(segments, arguments.changes)
    if arguments.chat_template and not arguments.model:
        raise ConfigError("--chat-template means nothing without --model")
    actors = choose_actors(segments, arguments.actor, can_tokenize=arguments.model is not None)
    if arguments.model is not None and "tokenizer" not in actors:
        raise ConfigError(f"--model means nothing: only the tokenizer needs it, here are {', '.join(actors)}")
    encoder = None
    if "tokenizer" in actors:
        encoder = find_encoder(arguments.model, arguments.chat_template, segments)
    count = "1 segment" if len(segments) == 1 else f"{len(segments)} segments"
    say(f"{count} in {arguments.DIR}; actors: {', '.join(actors)}")
    report = replay(segments, actors, encoder, progress_of(segments))
    print(result_text(report), flush=True)
    return SAME if report.difference is None else DIFFERENT


def build_parser() -> Parser:
    parser = Parser(
        prog="ksana replay",
        description="Feed a journal (ksana serve --journal DIR) to the code that decides, and hold every "
        "message it says against the recorded one. Exit code 0: all the same; 1: something differs, or with "
        "--set: requests fail, or the comparison says too little; 2: the journal cannot be read, or is "
        "damaged.",
    )
    parser.add_argument("DIR", help="Directory of the journal")
    parser.add_argument(
        "--segment", metavar="N", help="Only the segment with this number; 3- for all from 3 on, 3-7 for some"
    )
    parser.add_argument(
        "--actor",
        action="append",
        metavar="NAME",
        help="Only this actor (may be repeated); default: all that were recorded",
    )
    parser.add_argument(
        "--set",
        action="append",
        metavar="NAME=VALUE",
        dest="changes",
        help="Run the recorded requests once more with another setting (may be repeated), such as "
        "max_num_seqs=8, and show both runs side by side",
    )
    parser.add_argument("--model", metavar="TEXT", help="The model, which the tokenizer needs to replay")
    parser.add_argument(
        "--chat-template", metavar="FILE", help="The chat template, if the server was given one"
    )
    return parser


def choose_segments(segments: list[Segment], asked: str | None) -> list[Segment]:
    """All; or those with the number `3`, from `3-` on, or from `3-7`. Raises ConfigError."""
    if asked is None:
        return segments
    match = _SEGMENTS.fullmatch(asked.strip())
    if match is None:
        raise ConfigError(f"--segment: {asked[:40]!r} is no number, nor such as 3- or 3-7")
    first = int(match[1])
    last = first if match[2] is None else int(match[3] or segments[-1].number)
    chosen = [segment for segment in segments if first <= segment.number <= last]
    if not chosen:
        there = f"{segments[0].number} to {segments[-1].number}"
        raise ConfigError(f"--segment: there is no segment {asked[:40]!r}, only {there}")
    return chosen


def choose_actors(
    segments: Sequence[Segment], asked: Sequence[str] | None, *, can_tokenize: bool
) -> tuple[Address, ...]:
    """Those that are asked for; else all that were recorded, the tokenizer only if there is a model for it.
    Raises ConfigError."""
    recorded = dict.fromkeys(actor for segment in segments for actor in segment.header.actors)
    if not asked:
        if "tokenizer" in recorded and not can_tokenize:
            say(f"the tokenizer is left out: it needs --model {segments[0].header.settings.model!r}")
            del recorded["tokenizer"]
        if not recorded:
            raise ConfigError("no other actor was recorded: give --model")
        return tuple(recorded)
    for name in asked:
        if name not in STATE_TYPES:
            raise ConfigError(f"--actor: {name[:40]!r} is none of {', '.join(STATE_TYPES)}")
        if name not in recorded:
            raise ConfigError(f"--actor: {name} was not recorded, only {', '.join(recorded)}")
    if "tokenizer" in asked and not can_tokenize:
        raise ConfigError("--actor tokenizer needs --model")
    return cast(tuple[Address, ...], tuple(dict.fromkeys(asked)))


def find_encoder(model: str, chat_template: str | None, segments: Sequence[Segment]) -> PromptEncoder:
    """The tokenizer of a model. Raises ConfigError if it is not the one that was recorded."""
    files = find_model(Settings(model=model, chat_template=chat_template), say)
    settings = segments[0].header.settings
    for segment in segments:
        if segment.header.model_fingerprint != files.fingerprint:
            raise ConfigError(f"--model: {model} is not the model that was recorded ({settings.model})")
        if segment.header.settings.max_model_len != settings.max_model_len:
            raise ConfigError("the segments were recorded with different limits: give --segment")
    return PromptEncoder(
        files.tokenizer, max_model_len=settings.max_model_len, vocab_size=files.spec.vocab_size
    )


def result_text(report: ReplayReport) -> str:
    """What a person reads."""
    lines = list(report.notes)
    if report.difference is not None:
        return "\n".join([*lines, *difference_lines(report.difference)])
    counts = ", ".join(f"{count} of the {actor}" for actor, count in report.by_actor.items())
    lines.append(
        f"All the same: {report.num_messages} messages in {report.num_activations} activations"
        + (f" ({counts})." if counts else ".")
    )
    return "\n".join(lines)


def difference_lines(difference: Difference) -> list[str]:
    where = f"segment {difference.segment}, byte {difference.offset}"
    lines = [
        f"Differs: {difference.actor}, {where}, activation {difference.activation}, "
        f"at {difference.now_s:.6f} s: {difference.what}"
    ]
    lines += [f"  told      {shortened(message)}" for message in difference.messages]
    if difference.recorded or difference.replayed:
        same = num_same(difference.recorded, difference.replayed)
        lines.append(f"  recorded  {shortened(difference.recorded, same)}")
        lines.append(f"  replayed  {shortened(difference.replayed, same)}")
    return lines


def num_same(one: str, two: str) -> int:
    """Leading characters in which two texts agree."""
    pairs = enumerate(zip(one, two, strict=False))
    return next((at for at, (a, b) in pairs if a != b), min(len(one), len(two)))


def shortened(value: object, at: int = 0) -> str:
    """The text of a value; of a long one the part that has the character `at`."""
    text = value if isinstance(value, str) else repr(value)
    if len(text) <= MAX_SHOWN_CHARS:
        return text
    start = max(0, min(at, len(text)) - CHARS_BEFORE)
    part = text[start : start + MAX_SHOWN_CHARS]
    more = len(text) - start - len(part)
    before = f"({start} characters) ..." if start else ""
    return before + part + (f"... ({more} characters more)" if more else "")


def progress_of(segments: Sequence[Segment]) -> Callable[[Segment], None]:
    """Shows which segment is being replayed, on a terminal."""

    def show(segment: Segment) -> None:
        if sys.stderr.isatty():
            is_last = segment is segments[-1]
            print(
                f"\rsegment {segment.number} (to {segments[-1].number})",
                end="\n" if is_last else "",
                file=sys.stderr,
                flush=True,
            )

    return show


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
