"""Two runs of one workload side by side: figures of their requests' times, and their state over time."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec

from benchmarks.recorded_run import Sample

MEANS_WITHIN, P99_WITHIN = 3.0, 6.0
"""Percent."""


class Times(msgspec.Struct, frozen=True):
    """Of one request, seconds of one clock. `queued_s`: the engine, between two steps, took it in."""

    arrival_s: float
    queued_s: float
    scheduled_s: float
    first_token_s: float
    last_token_s: float
    num_output_tokens: int


METRICS: dict[str, Callable[[Times], float | None]] = {
    "TTFT from arrival at the engine": lambda t: t.first_token_s - t.queued_s,
    "TTFT from being scheduled": lambda t: t.first_token_s - t.scheduled_s,
    "TPOT": lambda t: (
        (t.last_token_s - t.first_token_s) / (t.num_output_tokens - 1) if t.num_output_tokens > 1 else None
    ),
    "latency": lambda t: t.last_token_s - t.queued_s,
    "(TTFT from the client's call)": lambda t: t.first_token_s - t.arrival_s,
    "(waiting at the engine)": lambda t: t.scheduled_s - t.queued_s,
}
"""Those in brackets are shown and not judged."""


def percentile(values: Sequence[float], share: float) -> float:
    """With linear interpolation between the two values next to it."""
    ordered = sorted(values)
    place = share * (len(ordered) - 1)
    index = min(int(place), len(ordered) - 2) if len(ordered) > 1 else 0
    above = ordered[min(index + 1, len(ordered) - 1)]
    return ordered[index] + (place - index) * (above - ordered[index])


STATISTICS: dict[str, tuple[float | None, float | None]] = {
    "mean": (None, MEANS_WITHIN),
    "p50": (0.5, None),
    "p99": (0.99, P99_WITHIN),
}
"""By name: which percentile (None: the mean), and by how many percent it may be off (None: not judged)."""


class Figure(msgspec.Struct, frozen=True):
    """One statistic of one metric, in both runs, in seconds."""

    name: str
    recorded_s: float
    simulated_s: float
    bound_pct: float | None

    @property
    def error_pct(self) -> float:
        return 100 * (self.simulated_s / self.recorded_s - 1) if self.recorded_s else float("inf")

    @property
    def is_within(self) -> bool:
        return self.bound_pct is None or abs(self.error_pct) <= self.bound_pct


def figures(recorded: Sequence[Times], simulated: Sequence[Times]) -> list[Figure]:
    found = []
    for name, metric in METRICS.items():
        real, made = (
            [value for times in run if (value := metric(times)) is not None] for run in (recorded, simulated)
        )
        for statistic, (share, bound) in STATISTICS.items():
            one, other = (
                sum(values) / len(values) if share is None else percentile(values, share)
                for values in (real, made)
            )
            is_judged = not name.startswith("(")
            found.append(Figure(f"{name}, {statistic}", one, other, bound if is_judged else None))
    return found


def print_figures(table: Sequence[Figure]) -> None:
    print(f"{'':38} {'recorded':>10} {'simulated':>10} {'error':>8}   ms")
    for figure in table:
        mark = "" if figure.is_within else f"  more than {figure.bound_pct:g} %"
        print(
            f"{figure.name:38} {1e3 * figure.recorded_s:10.1f} {1e3 * figure.simulated_s:10.1f} "
            f"{figure.error_pct:+7.2f} %{mark}"
        )


def print_spread(tables: Sequence[Sequence[Figure]]) -> None:
    print(f"{len(tables)} runs more, arrivals moved by up to a millisecond: errors in percent")
    for column in zip(*tables, strict=True):
        if column[0].bound_pct is None:
            continue
        errors = sorted(figure.error_pct for figure in column)
        mean = sum(errors) / len(errors)
        print(f"{column[0].name:38} mean {mean:+6.2f}   from {errors[0]:+6.2f} to {errors[-1]:+6.2f}")


def compare_samples(recorded: Sequence[Sample], simulated: Sequence[Sample]) -> None:
    """Running, waiting and KV use over time: means, and how far apart they are second by second."""
    pairs = list(zip(recorded, simulated, strict=False))
    print(f"over time: {len(recorded)} s recorded, {len(simulated)} s simulated")
    if not pairs:
        return
    for name in ("running", "waiting", "kv_cache_pct"):
        real = [getattr(one, name) for one, _ in pairs]
        made = [getattr(other, name) for _, other in pairs]
        apart = sum(abs(a - b) for a, b in zip(real, made, strict=True)) / len(pairs)
        print(
            f"  {name:14} mean {sum(real) / len(real):8.2f} {sum(made) / len(made):8.2f}   "
            f"most {max(real):8.2f} {max(made):8.2f}   apart by {apart:.2f} on average"
        )
