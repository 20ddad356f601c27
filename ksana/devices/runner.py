"""Runs step plans on a model: remembers requests, builds the batch, computes, samples. Torch."""

from __future__ import annotations

import time
import traceback
from collections.abc import Sequence
from typing import Protocol

import torch

from ksana.devices.rehearsal import OperatorTimer, fill_kv, repeated_layers
from ksana.devices.request_table import BatchArrays, KnownRequest, PoolArrays, RequestTable
from ksana.devices.staged_blocks import StagedBlocks
from ksana.devices.staging import StagingMemory
from ksana.errors import InvariantViolated
from ksana.messages.blocks import BlockCopy
from ksana.messages.staging import CopyFromStaging, CopyToStaging, StagingCopied
from ksana.messages.steps import OperatorTime, Rehearsal, Row, RowResult, StepDone, StepPlan, StepTimes
from ksana.models.batch import AttentionTables, KvCache, StepBatch
from ksana.models.spec import LayerKind, ModelSpec
from ksana.sampling.sampler import RowSampling, SampleError, sample

_POOL_OF: dict[LayerKind, str] = {"full": "fa", "sliding": "swa"}


class RunnableModel(Protocol):
    """What the runner needs of a model."""

    @property
    def spec(self) -> ModelSpec: ...

    def forward(self, batch: StepBatch, kv: KvCache) -> torch.Tensor:
        """Logits float32 [L, vocab] of `batch.logit_indices`; writes the batch's keys and values."""
        ...


class ModelRunner:
    """The worker's state and what it does: steps, and copies between pools and staging memory.

    Everything it knows of a request can be rebuilt from a `NewRow`. An exception out of it means that the
    state can no longer be trusted: the worker must end.
    """

    def __init__(
        self,
        model: RunnableModel,
        kv: KvCache,
        *,
        num_fa_blocks: int,
        num_swa_blocks: int,
        max_model_len: int,
        max_num_seqs: int = 64,
        staging: StagingMemory | None = None,
    ) -> None:
        self._model = model
        self._kv = kv
        self._requests = RequestTable(
            block_size=kv.block_size,
            max_model_len=max_model_len,
            num_fa_blocks=num_fa_blocks,
            num_swa_blocks=num_swa_blocks if model.spec.num_sliding_layers else 0,
            num_requests=2 * max_num_seqs,
        )
        self._layers_of_pool = {
            pool: [layer for layer, kind in enumerate(model.spec.layer_kinds) if _POOL_OF[kind] == pool]
            for pool in ("fa", "swa")
        }
        self._staged = None if staging is None else StagedBlocks(staging, kv, self._layers_of_pool)

    @torch.inference_mode()
    def run(self, plan: StepPlan) -> StepDone:
        """Run one step. One result per row, in order.

        When the step as a whole raises, its rows are run one by one, and those that raise again are
        reported in error; when that is all of them, or there is only one, the exception comes out.
        """
        began_ns = time.perf_counter_ns()
        self._apply(plan)
        stopwatch = _Stopwatch(began_ns)
        ready = [row for row in plan.rows if self._requests.is_ready(row)]
        operators: tuple[OperatorTime, ...] = ()
        if not ready:
            results: dict[int, RowResult] = {}
        elif plan.rehearsal is None:
            results = self._compute_isolating(ready, stopwatch)
        else:
            results, operators = self._rehearse(plan.rehearsal, ready, stopwatch)
        never_sampled = "the token before this row was never sampled"
        return StepDone(
            pool_epoch=plan.pool_epoch,
            step_id=plan.step_id,
            results=tuple(
                results.get(row.request_id) or RowResult(request_id=row.request_id, error=never_sampled)
                for row in plan.rows
            ),
            times=stopwatch.times(),
            operators=operators,
        )

    @torch.inference_mode()
    def copy_staged(self, order: CopyFromStaging | CopyToStaging) -> StagingCopied:
        """Copy blocks between pools and staging memory. Raises InvariantViolated if out of bounds."""
        if self._staged is None:
            raise InvariantViolated(f"{type(order).__name__} for a worker without staging memory")
        return self._staged.copy(order)

    def _apply(self, plan: StepPlan) -> None:
        for request_id in plan.drop:
            self._requests.drop(request_id)
        for new in plan.new:
            self._requests.add(new)
        for edits in plan.edits:
            self._requests.edit(edits.request_id, edits.fa_edits, edits.swa_edits)
        for copy in plan.copies:
            self._copy_block(copy)
        for row in plan.rows:
            if row.fa_edits or row.swa_edits:
                self._requests.edit(row.request_id, row.fa_edits, row.swa_edits)

    def _copy_block(self, copy: BlockCopy) -> None:
        for layer in self._layers_of_pool[copy.pool]:
            for cache in (self._kv.keys[layer], self._kv.values[layer]):
                cache[copy.destination].copy_(cache[copy.source])

    def _rehearse(
        self, rehearsal: Rehearsal, rows: Sequence[Row], stopwatch: _Stopwatch
    ) -> tuple[dict[int, RowResult], tuple[OperatorTime, ...]]:
        """A step that leaves no trace in what is known of the requests. What it raises comes out."""
        if rehearsal.fill_seed is not None:
            batch = _to_torch(self._requests.batch(rows))
            fill_kv(batch, self._kv, self._model.spec, rehearsal.fill_seed)
            return {row.request_id: RowResult(request_id=row.request_id) for row in rows}, ()
        with repeated_layers(self._model, rehearsal.num_layer_rounds):
            if not rehearsal.trace_operators:
                return self._compute(rows, stopwatch, keep_tokens=False), ()
            with OperatorTimer() as timer:
                results = self._compute(rows, stopwatch, keep_tokens=False)
            return results, timer.times()

    def _compute_isolating(self, rows: Sequence[Row], stopwatch: _Stopwatch) -> dict[int, RowResult]:
        try:
            return self._compute(rows, stopwatch)
        except Exception:
            if len(rows) == 1:
                raise
            traceback.print_exc()
        # KV written twice is the same KV, and no token was kept: rows can simply be run again.
        results: dict[int, RowResult] = {}
        num_failed = 0
        for row in rows:
            try:
                results |= self._compute([row], stopwatch)
            except Exception as error:
                num_failed += 1
                if num_failed == len(rows):
                    raise
                text = f"the step failed for this request: {type(error).__name__}: {error}"
                results[row.request_id] = RowResult(request_id=row.request_id, error=text)
        return results

    def _compute(
        self, rows: Sequence[Row], stopwatch: _Stopwatch, *, keep_tokens: bool = True
    ) -> dict[int, RowResult]:
        batch = _to_torch(self._requests.batch(rows))
        stopwatch.prepared()
        logits = self._model.forward(batch, self._kv)
        stopwatch.forwarded()
        sampled = [row for row in rows if row.sample]
        requests = [self._requests[row.request_id] for row in sampled]
        tokens = sample(logits, [_row_sampling(request) for request in requests]) if sampled else []
        results = {row.request_id: RowResult(request_id=row.request_id) for row in rows}
        for row, request, token in zip(sampled, requests, tokens, strict=True):
            if isinstance(token, SampleError):
                results[row.request_id] = RowResult(request_id=row.request_id, error=token.message)
            else:
                if keep_tokens:
                    request.append(token)
                results[row.request_id] = RowResult(request_id=row.request_id, token_ids=(token,))
        stopwatch.sampled()
        return results


class _Stopwatch:
    """Sums up where a step's time goes."""

    def __init__(self, began_ns: int) -> None:
        self._last_ns = began_ns
        self._prepare_ns = self._forward_ns = self._sample_ns = 0

    def _lap(self) -> int:
        now_ns = time.perf_counter_ns()
        lap_ns, self._last_ns = now_ns - self._last_ns, now_ns
        return lap_ns

    def prepared(self) -> None:
        self._prepare_ns += self._lap()

    def forwarded(self) -> None:
        self._forward_ns += self._lap()

    def sampled(self) -> None:
        self._sample_ns += self._lap()

    def times(self) -> StepTimes:
        self._prepare_ns += self._lap()  # building the answer counts as preparation
        return StepTimes(prepare_ns=self._prepare_ns, forward_ns=self._forward_ns, sample_ns=self._sample_ns)


def _row_sampling(request: KnownRequest) -> RowSampling:
    position = request.output_position
    return RowSampling(
        sampling=request.sampling,
        choice_index=0,
        output_position=position,
        suppressed_token_ids=(request.suppressed_token_ids if position < request.sampling.min_tokens else ()),
    )


def _to_torch(arrays: BatchArrays) -> StepBatch:
    return StepBatch(
        token_ids=torch.from_numpy(arrays.token_ids),
        positions=torch.from_numpy(arrays.positions),
        query_starts=torch.from_numpy(arrays.query_starts),
        full=_pool_to_torch(arrays.fa),
        sliding=_pool_to_torch(arrays.swa),
        logit_indices=torch.from_numpy(arrays.logit_indices),
    )


def _pool_to_torch(arrays: PoolArrays | None) -> AttentionTables | None:
    if arrays is None:
        return None
    return AttentionTables(
        block_tables=torch.from_numpy(arrays.block_tables), slots=torch.from_numpy(arrays.slots)
    )
