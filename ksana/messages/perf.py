"""The performance backend: a producer that measures one fixed step again and again.

It speaks ids, so it talks to the scheduler itself and takes the `StepOutputs` in the tokenizer's stead. A
batch ends like any other requests: by an `Abort` for each.
"""

from __future__ import annotations

from ksana.messages.base import Message, RequestId, Value
from ksana.messages.blocks import PoolUse
from ksana.messages.requests import SamplingParams


class InferRequest(Value):
    """One request of a batch. Its last `forwarding_token_num` tokens are computed in every round; the KV of
    those before is made up, as if computed long ago."""

    request_id: RequestId
    token_ids: tuple[int, ...]
    forwarding_token_num: int
    sampling: SamplingParams
    cache_salt: str = ""


class AddInferRequest(Message):
    """performance backend -> scheduler. The requests of the next batch; the one before has ended.

    Answered by InferBatchReady, or by StepOutputs in which requests end as failed.
    """

    requests: tuple[InferRequest, ...]
    fill_seed: int
    """From it comes the KV that is made up."""


class InferBatchReady(Message):
    """scheduler -> performance backend. Blocks are allocated and filled; rounds may be asked for."""

    fa_use: PoolUse
    swa_use: PoolUse | None


class RunInferRound(Message):
    """performance backend -> scheduler. Run the batch's step once (more). Answered by StepOutputs with one
    token for each request; then everything is as it was before the round."""

    num_layer_rounds: int = 1
    trace_operators: bool = False
