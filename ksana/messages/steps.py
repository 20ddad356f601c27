"""Steps: scheduler -> device executor -> worker process, and back.

The worker keeps, per request, its token ids, sampling parameters and block tables, and feeds the ids it
sampled in step N to step N+1 itself. All of that can be rebuilt from one `NewRow`.
"""

from __future__ import annotations

from ksana.messages.base import SCHEMA_VERSION, Message, PoolEpoch, RequestId, StepId, Value
from ksana.messages.blocks import BlockCopy, BlockTableEdit, TableEdits
from ksana.messages.requests import SamplingParams


class Row(Value):
    """One request in one step: compute tokens [start, start + num_tokens) of it.

    `sample`: the last of them is the last known token, so its logits give the next token.
    The number of tokens is an upper bound once drafts exist.
    """

    request_id: RequestId
    start: int
    num_tokens: int
    sample: bool
    fa_write_start: int
    fa_edits: tuple[BlockTableEdit, ...] = ()
    swa_edits: tuple[BlockTableEdit, ...] = ()
    num_draft_tokens: int = 0


class NewRow(Value):
    """A request that the worker does not know (new, resumed after preemption, or after a restart).

    Its first row comes in the same plan; block tables start empty and are filled by that row's edits.
    """

    request_id: RequestId
    prompt_len: int
    token_ids: tuple[int, ...]
    """Prompt and output so far: token_ids[prompt_len:] is output."""
    sampling: SamplingParams
    suppressed_token_ids: tuple[int, ...] = ()
    """End-of-sequence and stop tokens: not sampled before output position `sampling.min_tokens`."""


class Rehearsal(Value):
    """A step of the performance backend: the tokens it samples are told, but the worker does not keep them,
    so that the same step can be run again."""

    fill_seed: int | None = None
    """Not None: nothing is computed. The KV of the rows' tokens is filled with values made from this seed."""
    num_layer_rounds: int = 1
    """How often the decoder layers run, one pass after the other."""
    trace_operators: bool = False
    """Measure each operator, which slows the step down."""


class StepPlan(Message):
    """scheduler -> executor -> worker. Order: drop, new, edits, copies, rows."""

    pool_epoch: PoolEpoch
    step_id: StepId
    rows: tuple[Row, ...]
    new: tuple[NewRow, ...] = ()
    drop: tuple[RequestId, ...] = ()
    """Requests the worker may forget."""
    edits: tuple[TableEdits, ...] = ()
    copies: tuple[BlockCopy, ...] = ()
    rehearsal: Rehearsal | None = None
    """None but for the performance backend."""
    schema_version: int = SCHEMA_VERSION


class RowResult(Value):
    """What one row gave. A row that does not sample has no token; a row in error has only that."""

    request_id: RequestId
    token_ids: tuple[int, ...] = ()
    num_accepted_drafts: int = 0
    error: str | None = None
    """For instance NaN in this row's logits. The other rows are good."""


class StepTimes(Value):
    """Nanoseconds inside the worker."""

    prepare_ns: int
    forward_ns: int
    sample_ns: int


class OperatorTime(Value):
    """All calls of one operator in one step."""

    name: str
    total_ns: int
    num_calls: int


class StepDone(Message):
    """worker -> executor -> scheduler. One result per row, in the order of the plan's rows."""

    pool_epoch: PoolEpoch
    step_id: StepId
    results: tuple[RowResult, ...]
    times: StepTimes
    operators: tuple[OperatorTime, ...] = ()
    """Only where the plan asked for them; by falling time."""
    schema_version: int = SCHEMA_VERSION


class WorkerReady(Message):
    """executor -> scheduler. A worker with empty pools stands ready in this epoch."""

    pool_epoch: PoolEpoch


class WorkerLost(Message):
    """executor -> scheduler. The worker of this epoch is gone; no StepDone of the epoch follows.

    `restarting` is False when the executor has given up: too many restarts in too short a time.
    """

    pool_epoch: PoolEpoch
    reason: str
    restarting: bool
