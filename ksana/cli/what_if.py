"""`ksana replay --set NAME=VALUE`: the recorded run, and what it would have been, side by side."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from ksana.errors import ConfigError
from ksana.journal.reading import Segment
from ksana.journal.requests import requests_of, segments_of_run
from ksana.what_if.changes import changed, without_remote_cache
from ksana.what_if.figures import Figures, recorded_figures
from ksana.what_if.limits import check_requests, check_settings
from ksana.what_if.rerun import rerun
from ksana.what_if.step_times import Fit, fit, recorded_steps

MIN_REQUESTS = 10
"""Fewer say nothing about a setting."""
MAX_MEAN_ERROR = 0.25
"""Of the fitted step times on the whole, relative."""
MAX_FAILED = 0.1
"""Share of requests that may fail, by their deadlines, beside those that do with the recorded settings."""
MAX_LEFT_OUT = 0.5
"""Share of requests that cannot be compared."""


def show_what_if(segments: Sequence[Segment], changes: Sequence[str]) -> int:
    """Print the table. Raises ConfigError or JournalError. Returns the exit code.

    The recorded settings are run again as well: what that column says otherwise than the first is the error
    of the simulation. The exit code is 1, with a line that says why, where requests fail that did not, or the
    columns cannot be relied on.
    """
    segments = segments_of_run(segments)
    recorded_settings = segments[0].header.settings
    check_settings(recorded_settings)
    new_settings = changed(recorded_settings, changes)
    requests = requests_of(segments)
    asked = [request for request in requests if request.added_s is not None]
    if not asked:
        raise ConfigError(
            f"none of {len(requests)} requests was handed in while this was recorded: nothing can be compared"
        )
    check_requests(asked)
    fitted = fit(recorded_steps(segments))
    print(
        f"{len(asked)} of {len(requests)} requests of run {segments[0].header.run} are compared; "
        f"times fitted to {fitted.num_steps} steps, "
        f"off by {fitted.mean_error:+.1%} on the whole and {fitted.typical_error:.1%} for a typical step",
        file=sys.stderr,
    )
    num_open = sum(request.outcome is None for request in asked)
    has_loader = recorded_settings.loader is not None
    for note in _notes(len(requests) - len(asked), num_open, has_loader=has_loader):
        print(note, file=sys.stderr)
    skipped = frozenset(request.request_id for request in requests if request.added_s is None)
    first_s = min(request.arrival_s for request in asked)
    again = rerun(asked, without_remote_cache(recorded_settings), fitted.cost)
    new = rerun(asked, without_remote_cache(new_settings), fitted.cost)
    columns = {
        "recorded": recorded_figures(segments, skipped),
        "run again": again,
        ", ".join(changes): new,
    }
    print(_table({title: figures.rows(first_s) for title, figures in columns.items()}), flush=True)
    failures = _failures(again, new, len(asked), changes)
    doubts = _doubts(fitted, len(asked), len(requests))
    for reason in (*failures, *doubts):
        print(f"ksana replay: {reason}", file=sys.stderr)
    return 1 if doubts or _is_broken(again, new, len(asked)) else 0


def _is_broken(again: Figures, new: Figures, num_asked: int) -> bool:
    """Whether the changed settings fail requests otherwise than by making some of them late."""
    more = new.num_failed - again.num_failed
    return more > MAX_FAILED * num_asked or new.num_failed_at_once > again.num_failed_at_once


def _failures(again: Figures, new: Figures, num_asked: int, changes: Sequence[str]) -> list[str]:
    """What the changed settings break."""
    if new.num_failed <= again.num_failed:
        return []
    why = f", most of them: {new.reasons.most_common(1)[0][0]}" if new.reasons else ""
    return [
        f"with {', '.join(changes)} {new.num_failed} of {num_asked} requests fail, with the recorded "
        f"settings {again.num_failed}{why}"
    ]


def _doubts(fitted: Fit, num_asked: int, num_requests: int) -> list[str]:
    """Why the columns are not to be relied on."""
    doubts = []
    if not abs(fitted.mean_error) <= MAX_MEAN_ERROR:
        doubts.append(
            f"the fitted step times are off by {fitted.mean_error:+.1%} on the whole, more than "
            f"{MAX_MEAN_ERROR:.0%}: the times of the new runs say nothing"
        )
    if num_asked < MIN_REQUESTS:
        doubts.append(f"{num_asked} requests are too few to compare settings by: {MIN_REQUESTS} are needed")
    if num_requests - num_asked > MAX_LEFT_OUT * num_requests:
        doubts.append(
            f"only {num_asked} of {num_requests} requests are compared: the others ran already when the "
            "recording begins, and their load is missing from the new runs"
        )
    return doubts


def _notes(num_skipped: int, num_open: int, *, has_loader: bool) -> list[str]:
    notes = []
    if num_skipped:
        notes.append(f"{num_skipped} requests that ran when the journal begins are left out of the new runs")
    if num_open:
        notes.append(
            f"{num_open} requests had not ended when the journal does, or its engine broke: the new runs "
            "make up the rest of their answers"
        )
    if has_loader:
        notes.append("the new runs have no remote cache")
    return notes


def _table(columns: dict[str, list[tuple[str, str]]]) -> str:
    titles = ["", *columns]
    names = [name for name, _ in next(iter(columns.values()))]
    rows = [[name, *(column[place][1] for column in columns.values())] for place, name in enumerate(names)]
    widths = [max(len(row[place]) for row in [titles, *rows]) for place in range(len(titles))]
    return "\n".join(
        "  ".join(
            [row[0].ljust(widths[0]), *(cell.rjust(w) for cell, w in zip(row[1:], widths[1:], strict=True))]
        ).rstrip()
        for row in [titles, *rows]
    )
