"""What a run leaves behind: who was served when, how each engine did over time, and which steps it took.

The world fills a `RunRecord`; `summary` makes figures of it, and `report` pages.
All times are seconds of the world's clock.
"""

from __future__ import annotations

from array import array
from typing import Any

import msgspec


class RequestRecord(msgspec.Struct, kw_only=True):
    """One request as its client saw it. A time is None where that never happened."""

    index: int
    """Counts requests of the run from 0, in the order in which they arrived."""
    engine: str
    arrival_s: float
    num_prompt_tokens: int
    scheduled_s: float | None = None
    first_token_s: float | None = None
    last_token_s: float | None = None
    ended_s: float | None = None
    ending: str = ""
    """`finished stop`, `finished length`, `failed 504`, `aborted`, `left`, `refused 429`; empty: it did not
    end."""
    num_output_tokens: int = 0
    num_cached_tokens: int = 0
    token_times_s: array[float] | None = None
    """When each output token came; None where nobody kept it."""
    session: int | None = None

    @property
    def is_finished(self) -> bool:
        return self.ending.startswith("finished")


class EngineSample(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """One engine at one moment. Uses are shares of a pool, 0 to 1; token counts are totals so far."""

    at_s: float
    num_running: int
    num_waiting: int
    """Without those that are loading."""
    num_loading: int = 0
    fa_use: float = 0.0
    """Blocks that requests hold; cached ones that nobody holds are free."""
    swa_use: float = 0.0
    num_queried_tokens: int = 0
    num_hit_tokens: int = 0


class StepLog:
    """Steps of one engine, as columns: a long run has millions. `start_s` never falls."""

    def __init__(self) -> None:
        self.start_s = array("d")
        self.end_s = array("d")
        self.num_rows = array("l")
        self.num_tokens = array("l")

    def append(self, start_s: float, end_s: float, num_rows: int, num_tokens: int) -> None:
        self.start_s.append(start_s)
        self.end_s.append(end_s)
        self.num_rows.append(num_rows)
        self.num_tokens.append(num_tokens)

    def __len__(self) -> int:
        return len(self.start_s)


class EngineRecord(msgspec.Struct, kw_only=True):
    name: str
    samples: list[EngineSample] = msgspec.field(default_factory=list)
    steps: StepLog | None = None
    """None where nobody kept it."""
    counters: dict[str, int] = msgspec.field(default_factory=dict)
    """Totals by name, `num_steps` and `num_preemptions` among them. Reports sum them over engines."""


class FaultRecord(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    at_s: float
    target: str
    """An engine's name, or `store`, `network`, `clients`."""
    text: str


class RunRecord(msgspec.Struct, kw_only=True):
    """One run of a world."""

    title: str
    seed: int
    settings: dict[str, Any]
    """What the run was made with, as JSON: scenario, engine settings, cost model, workload."""
    requests: list[RequestRecord] = msgspec.field(default_factory=list)
    engines: list[EngineRecord] = msgspec.field(default_factory=list)
    faults: list[FaultRecord] = msgspec.field(default_factory=list)
    counters: dict[str, int] = msgspec.field(default_factory=dict)
    """Totals that belong to no engine: messages, faults, extrapolated steps, ..."""
    virtual_s: float = 0.0
    wall_s: float = 0.0
    digest: str = ""
    """SHA-256 of the message log; empty where none was kept."""
