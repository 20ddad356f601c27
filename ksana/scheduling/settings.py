"""What a scheduler is started with, and how much room a request must find to be let in."""

from __future__ import annotations

from typing import Literal

import msgspec

from ksana.scheduling.request_state import RequestState

Admission = Literal["room_to_grow", "whole_prompt", "first_chunk"]
"""How much room a waiting request must find; see `reserved_tokens`. The first is Ksana's own rule; the others
are those of other engines, for simulations of them."""


class SchedulerSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Limits of one engine. Lengths in tokens."""

    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    block_size: int
    sliding_window: int | None = None
    """Of the sliding layers; None without any. Their blocks are given up as it moves on."""
    plan_ahead: bool = True
    max_new_per_plan: int = 16
    """Waiting requests asked for in one batch: bounds the size of a PlanBlocks message."""

    admission: Admission = "room_to_grow"
    hold_when_short: bool = False
    """When a running request is refused blocks: send no step without it, but plan again once the blocks of
    the request that lost its place are free. A held step costs the time in which it could have stood ready;
    a sent one costs those that lack a block their turn. (Other engines hand such blocks over at once.)"""

    max_remote_loads: int = 0
    """Requests whose prefixes may be loaded at the same time, or that wait with loaded blocks. 0: there is no
    remote cache."""
    remote_load_timeout_s: float = 5.0

    @property
    def max_running(self) -> int:
        """Requests that may run. Never more than a step has tokens, so that every running decode has a
        place in every step and at least one token is left for a running prefill."""
        return min(self.max_num_seqs, self.max_num_batched_tokens)

    @property
    def max_steps(self) -> int:
        """Steps in the executor at once: one runs, and with planning ahead one more stands ready."""
        return 2 if self.plan_ahead else 1


def reserved_tokens(
    request: RequestState, settings: SchedulerSettings, num_running: int, pool_tokens: int
) -> int:
    """Leading tokens for which blocks must be obtainable before a waiting request is let in.

    room_to_grow. A new request: all its tokens and one block to grow, but never more than it can ever need
    (all of prompt plus max_tokens but the last), so that a request which fits the pool is never refused for
    good. That keeps a long prompt from starting in a pool that cannot hold it. One that was preempted: one
    more block for each running request as well (up to the whole pool), because the pool has proved too small
    for all of them. Without that it would come back into the last free block and be the first to go again,
    computing its tokens anew each time. The margin is 0 when nothing runs, so nobody waits for ever.

    whole_prompt. All tokens it has, and no more, whether it was preempted or not.

    first_chunk. Nothing beyond what its first step computes (0: the allocator looks at that anyway).
    """
    if settings.admission == "first_chunk":
        return 0
    if settings.admission == "whole_prompt":
        return request.num_tokens
    own = min(request.num_tokens + settings.block_size, request.num_kv_tokens)
    if not request.num_preemptions:
        return own
    return max(own, min(own + settings.block_size * num_running, pool_tokens))
