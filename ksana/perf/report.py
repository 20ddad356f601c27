"""A result for people: a table for the terminal, and a page with charts (`--plot`)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from html import escape

from ksana.perf.charts import Bar, LineChart, Point, Series, bar_chart, line_chart
from ksana.perf.html_page import charts, page, table
from ksana.perf.result import BatchResult, PerfResult

MAX_BARS = 20
_PARTS = ("schedule_ns", "dispatch_ns", "prepare_ns", "forward_ns", "repeats_ns", "sampling_ns", "update_ns")


def summary_table(result: PerfResult) -> str:
    """A line per batch: its shape, and medians in milliseconds."""
    lines = [("batch", "requests", "tokens", "KV before", "forward ms", "step ms", "p99")]
    for batch in result.batches:
        shape = batch.shape
        numbers = (
            (_ms(batch, "forward_ns", "p50"), _ms(batch, "step_ns", "p50"), _ms(batch, "step_ns", "p99"))
            if batch.summary
            else ("", "failed", "")
        )
        tokens, kv = str(shape.num_forwarding_tokens), str(shape.num_kv_tokens)
        lines.append((batch.name[:48], str(shape.num_requests), tokens, kv, *numbers))
    widths = [max(len(line[column]) for line in lines) for column in range(len(lines[0]))]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if column == 0 else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    )


def result_page(result: PerfResult) -> str:
    """One self-contained HTML document."""
    good = [batch for batch in result.batches if batch.summary]
    figures = [
        _steps_by_tokens(good),
        _steps_by_kv(good),
        *([_operators(good)] if any(batch.operator_rounds for batch in good) else []),
        _parts_of_a_step(good),
    ]
    about = (
        f"{result.device}, {result.dtype}, blocks of {result.block_size} tokens, "
        f"{'planned ahead' if result.plan_ahead else 'not planned ahead'}, seed {result.seed}. "
        "Medians over the rounds of each batch."
    )
    title = f"Steps of {result.model}"
    return page(title, f"<p>{escape(about)}</p>{charts(figures)}<h2>Batches</h2>{_batches(result)}")


def _steps_by_tokens(batches: Sequence[BatchResult]) -> str:
    """Every batch is a point; whether it is prefill, decode or both is told by colour."""
    return line_chart(
        LineChart(
            title="Step time by tokens computed",
            x_label="tokens in the step",
            y_label="ms",
            series=_by_kind(batches, lambda batch: float(batch.shape.num_forwarding_tokens)),
            x_log=True,
        )
    )


def _steps_by_kv(batches: Sequence[BatchResult]) -> str:
    return line_chart(
        LineChart(
            title="Step time by KV before the step",
            x_label="tokens in the KV cache, all requests together",
            y_label="ms",
            series=_by_kind(batches, lambda batch: float(batch.shape.num_kv_tokens)),
        )
    )


def _by_kind(batches: Sequence[BatchResult], x_of: Callable[[BatchResult], float]) -> list[Series]:
    points: dict[str, list[Point]] = {"prefill only": [], "decode only": [], "both": []}
    for batch in batches:
        points[_kind(batch)].append((x_of(batch), batch.summary["step_ns"].p50 / 1e6))
    return [
        Series(name=name, points=sorted(some), colour=colour, dotted=True)
        for colour, (name, some) in enumerate(points.items())
        if some
    ]


def _kind(batch: BatchResult) -> str:
    if not batch.shape.num_decodes:
        return "prefill only"
    return "both" if batch.shape.num_prefills else "decode only"


def operator_shares(batches: Iterable[BatchResult]) -> list[tuple[str, float, int]]:
    """(operator, share of all operators' time, calls) over all traced rounds, the largest first."""
    times: dict[str, int] = {}
    calls: dict[str, int] = {}
    for batch in batches:
        for operators in batch.operator_rounds:
            for name, sample in operators.items():
                times[name] = times.get(name, 0) + sample.total_ns
                calls[name] = calls.get(name, 0) + sample.calls
    total = sum(times.values()) or 1
    by_time = sorted(times, key=lambda name: (-times[name], name))
    return [(name, times[name] / total, calls[name]) for name in by_time]


def _operators(batches: Sequence[BatchResult]) -> str:
    bars = [
        Bar(name=name, value=share, text=f"{share:.1%}, {calls} calls")
        for name, share, calls in operator_shares(batches)[:MAX_BARS]
    ]
    return bar_chart("Operators by their share of the time in operators", bars)


def _parts_of_a_step(batches: Sequence[BatchResult]) -> str:
    """Where a step's time goes, all batches together."""
    totals = {part: sum(batch.summary[part].mean for batch in batches) for part in _PARTS}
    whole = sum(totals.values()) or 1.0
    bars = [
        Bar(name=part.removesuffix("_ns"), value=total / whole, text=f"{total / whole:.2%}")
        for part, total in totals.items()
    ]
    return bar_chart("Parts of a step, by their share of the time", bars)


def _batches(result: PerfResult) -> str:
    header = ("batch", "prefills", "decodes", "tokens", "KV before", *(f"{part[:-3]} ms" for part in _PARTS))
    rows = []
    for batch in result.batches:
        shape = batch.shape
        numbers = [_ms(batch, part, "p50") for part in _PARTS] if batch.summary else ["" for _ in _PARTS]
        step = _ms(batch, "step_ns", "p50") if batch.summary else ""
        counts = (shape.num_prefills, shape.num_decodes, shape.num_forwarding_tokens, shape.num_kv_tokens)
        rows.append((batch.name, *map(str, counts), *numbers, step, batch.error or ""))
    return table((*header, "step ms", "error"), rows)


def _ms(batch: BatchResult, field: str, statistic: str) -> str:
    return f"{getattr(batch.summary[field], statistic) / 1e6:.3f}"
