"""A worker that keeps no KV content and checks nothing: for runs that ask how fast, not whether."""

from __future__ import annotations

from ksana.devices.simulated_worker import KnownRequest, TokenSource
from ksana.errors import InvariantViolated
from ksana.messages.base import RequestId
from ksana.messages.staging import CopyFromStaging, CopyToStaging, StagingCopied
from ksana.messages.steps import Row, RowResult, StepDone, StepPlan, StepTimes

_NO_TIMES = StepTimes(prepare_ns=0, forward_ns=0, sample_ns=0)


class FastWorker:
    """A `Runner` that samples the same tokens as `SimulatedWorker`.

    Cost: about 1 µs per row, and what `tokens` costs. Blocks, and whether their content is the right one, it
    leaves to runs with a `SimulatedWorker`.
    """

    def __init__(self, tokens: TokenSource) -> None:
        self._tokens = tokens
        self._requests: dict[RequestId, KnownRequest] = {}

    def run(self, plan: StepPlan) -> StepDone:
        for request_id in plan.drop:
            self._requests.pop(request_id, None)
        for new in plan.new:
            self._requests[new.request_id] = KnownRequest(
                request_id=new.request_id,
                prompt_len=new.prompt_len,
                token_ids=list(new.token_ids),
                sampling=new.sampling,
                suppressed_token_ids=new.suppressed_token_ids,
            )
        return StepDone(
            pool_epoch=plan.pool_epoch,
            step_id=plan.step_id,
            results=tuple([self._result(row) for row in plan.rows]),
            times=_NO_TIMES,
        )

    def _result(self, row: Row) -> RowResult:
        if not row.sample:
            return RowResult(request_id=row.request_id)
        request = self._requests[row.request_id]
        token_ids = request.token_ids
        num_missing = row.start + row.num_tokens - len(token_ids)
        if num_missing > 0:
            return RowResult(request_id=row.request_id, error="the token before this row was never sampled")
        if num_missing:
            raise InvariantViolated(f"request {row.request_id} samples before its last known token")
        token = self._tokens(request, len(token_ids) - request.prompt_len)
        if isinstance(token, str):
            return RowResult(request_id=row.request_id, error=token)
        token_ids.append(token)
        return RowResult(request_id=row.request_id, token_ids=(token,))

    def copy_staged(self, order: CopyFromStaging | CopyToStaging) -> StagingCopied:
        return StagingCopied(pool_epoch=order.pool_epoch, copy_id=order.copy_id)
