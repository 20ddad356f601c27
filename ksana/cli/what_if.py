"""`ksana replay --set NAME=VALUE`: the recorded run, and what it would have been, side by side."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from ksana.errors import ConfigError
from ksana.journal.reading import Segment
from ksana.journal.requests import requests_of, segments_of_run
from ksana.what_if.changes import changed, without_remote_cache
from ksana.what_if.figures import recorded_figures
from ksana.what_if.limits import check_requests, check_settings
from ksana.what_if.rerun import rerun
from ksana.what_if.step_times import fit, recorded_steps


def show_what_if(segments: Sequence[Segment], changes: Sequence[str]) -> int:
    """Print the table. Raises ConfigError or JournalError. Returns the exit code.

    The recorded settings are run again as well: what that column says otherwise than the first is the error
    of the simulation.
    """
    segments = segments_of_run(segments)
    recorded_settings = segments[0].header.settings
    check_settings(recorded_settings)
    new_settings = changed(recorded_settings, changes)
    requests = requests_of(segments)
    asked = [request for request in requests if request.added_s is not None]
    if not asked:
        raise ConfigError("no request was handed in while this was recorded")
    check_requests(asked)
    fitted = fit(recorded_steps(segments))
    print(
        f"{len(asked)} requests of run {segments[0].header.run}; times fitted to {fitted.num_steps} steps, "
        f"off by {fitted.mean_error:+.1%} on the whole and {fitted.typical_error:.1%} for a typical step",
        file=sys.stderr,
    )
    num_open = sum(request.outcome is None for request in asked)
    has_loader = recorded_settings.loader is not None
    for note in _notes(len(requests) - len(asked), num_open, has_loader=has_loader):
        print(note, file=sys.stderr)
    skipped = frozenset(request.request_id for request in requests if request.added_s is None)
    first_s = min(request.arrival_s for request in asked)
    columns = {
        "recorded": recorded_figures(segments, skipped),
        "run again": rerun(asked, without_remote_cache(recorded_settings), fitted.cost),
        ", ".join(changes): rerun(asked, without_remote_cache(new_settings), fitted.cost),
    }
    print(_table({title: figures.rows(first_s) for title, figures in columns.items()}), flush=True)
    return 0


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
