"""A worker without a model: keeps what a real one keeps, checks plans more strictly, and makes up tokens.

Instead of keys and values its pools hold, for every token position, a number that stands for all tokens
up to there. So it notices what a real worker would silently answer garbage for: a block that was
reused too early, a prefix shared with the wrong request, a table entry that is missing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec
import numpy as np
from numpy.typing import NDArray

from ksana.cache.cache_config import CacheConfig
from ksana.devices.staging import StagingMemory
from ksana.errors import InvariantViolated
from ksana.messages.base import RequestId
from ksana.messages.blocks import BlockTableEdit
from ksana.messages.requests import SamplingParams
from ksana.messages.staging import CopyFromStaging, CopyToStaging, StagedBlock, StagingCopied
from ksana.messages.steps import NewRow, Row, RowResult, StepDone, StepPlan, StepTimes

_NOTHING = -1


class KnownRequest(msgspec.Struct, kw_only=True):
    """What the worker knows of a request. `token_ids` is prompt and output so far."""

    request_id: RequestId
    prompt_len: int
    token_ids: list[int]
    sampling: SamplingParams
    suppressed_token_ids: tuple[int, ...] = ()
    prompt_hash: int | None = None
    """Made and kept by `hashed_tokens`."""


TokenSource = Callable[[KnownRequest, int], int | str]
"""(request, output position) -> the token to sample there, or a text: the row's error.

To be a stand-in for a model it must depend on token ids and sampling alone, not on the request id.
"""


def hashed_tokens(vocab_size: int, eos_token_id: int | None = None, mean_output_len: int = 0) -> TokenSource:
    """Tokens that depend on the prompt, the seed and the position, and look random.

    With `eos_token_id` and `mean_output_len` about one in that many tokens is the end of sequence.
    """

    def token(request: KnownRequest, position: int) -> int:
        mixed = request.prompt_hash
        if mixed is None:
            mixed = request.sampling.seed
            for token_id in request.token_ids[: request.prompt_len]:
                mixed = (mixed * 6364136223846793005 + token_id + 1442695040888963407) & (2**64 - 1)
            request.prompt_hash = mixed
        mixed = (mixed ^ (position * 0x9E3779B97F4A7C15)) & (2**64 - 1)
        mixed = (mixed * 0xD6E8FEB86659FD93) & (2**64 - 1)
        mixed ^= mixed >> 32
        ends = eos_token_id is not None and mean_output_len > 0 and mixed % mean_output_len == 0
        if ends and position >= request.sampling.min_tokens:
            assert eos_token_id is not None
            return eos_token_id
        token_id = (mixed >> 16) % vocab_size
        return (token_id + 1) % vocab_size if token_id == eos_token_id else token_id

    return token


def simulated_block_bytes(block_size: int) -> int:
    """What one block of a simulated pool takes in staging memory and in a store: a number per token."""
    return block_size * np.dtype(np.int64).itemsize


class SimulatedPool:
    """Stands for the KV of one kind of layers. `window` None: full attention."""

    def __init__(self, name: str, num_blocks: int, block_size: int, window: int | None) -> None:
        self.name = name
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.window = window
        self.tables: dict[RequestId, dict[int, int]] = {}
        self._kv = np.full((num_blocks, block_size), _NOTHING, dtype=np.int64)

    def edit(self, request_id: RequestId, edits: tuple[BlockTableEdit, ...]) -> None:
        table = self.tables[request_id]
        for edit in edits:
            if not _NOTHING <= edit.block_id < self.num_blocks:
                raise InvariantViolated(
                    f"{self.name} block {edit.block_id} of request {request_id} is outside the pool "
                    f"of {self.num_blocks}"
                )
            table[edit.index] = edit.block_id

    def copy(self, source: int, destination: int) -> None:
        self._kv[destination] = self._kv[source]

    def content(self, block_id: int) -> NDArray[np.int64]:
        """The numbers of one block, [block_size]; not a copy."""
        if not 0 <= block_id < self.num_blocks:
            raise InvariantViolated(f"{self.name} block {block_id} is outside the pool of {self.num_blocks}")
        content: NDArray[np.int64] = self._kv[block_id]
        return content

    def write(self, request_id: RequestId, history: NDArray[np.int64], start: int, end: int) -> None:
        """Write positions [start, end) of a request. `history[p]` stands for its tokens up to p."""
        table = self.tables[request_id]
        for index in range(start // self.block_size, -(-end // self.block_size) if end > start else 0):
            lo, hi = max(start, index * self.block_size), min(end, (index + 1) * self.block_size)
            block_id = self._block(request_id, table, index)
            first = index * self.block_size
            self._kv[block_id, lo - first : hi - first] = history[lo:hi]

    def check(self, request_id: RequestId, history: NDArray[np.int64], start: int, end: int) -> None:
        """Raise InvariantViolated unless all that the tokens [start, end) attend to is there."""
        first_key = 0 if self.window is None else max(0, start - self.window + 1)
        table = self.tables[request_id]
        indices = range(first_key // self.block_size, -(-end // self.block_size))
        block_ids = [table.get(index, _NOTHING) for index in indices]
        if _NOTHING not in block_ids:
            content = self._kv[block_ids].reshape(-1)
            first = indices.start * self.block_size
            if np.array_equal(content[first_key - first : end - first], history[first_key:end]):
                return
        for index in indices:  # to say which
            lo, hi = max(first_key, index * self.block_size), min(end, (index + 1) * self.block_size)
            block_id = self._block(request_id, table, index)
            first = index * self.block_size
            if not np.array_equal(self._kv[block_id, lo - first : hi - first], history[lo:hi]):
                raise InvariantViolated(
                    f"{self.name} block {block_id}, position {index} of request {request_id}, does not hold "
                    f"the KV of its tokens {lo} to {hi - 1}"
                )

    def _block(self, request_id: RequestId, table: dict[int, int], index: int) -> int:
        block_id = table.get(index, _NOTHING)
        if block_id == _NOTHING:
            raise InvariantViolated(f"{self.name} table of request {request_id} has no block at {index}")
        return block_id


class _History:
    """A number per token of a request that stands for all its tokens up to there."""

    def __init__(self) -> None:
        self._numbers = np.empty(64, dtype=np.int64)
        self._num_made = 0
        self._last = 17

    def up_to(self, end: int, token_ids: list[int]) -> NDArray[np.int64]:
        """The numbers of tokens [0, end); not a copy. O(1) but for tokens that are new."""
        if end > self._num_made:
            self._make(token_ids[self._num_made : end])
        numbers: NDArray[np.int64] = self._numbers[:end]
        return numbers

    def _make(self, token_ids: list[int]) -> None:
        made = []
        number = self._last
        for token_id in token_ids:
            number = (number * 1000003 + token_id + 1) & (2**62 - 1)
            made.append(number)
        self._last = number
        end = self._num_made + len(made)
        if end > len(self._numbers):
            longer = np.empty(2 * end, dtype=np.int64)
            longer[: self._num_made] = self._numbers[: self._num_made]
            self._numbers = longer
        self._numbers[self._num_made : end] = made
        self._num_made = end


def simulated_kv(token_ids: Sequence[int]) -> bytes:
    """What the pools hold for these tokens, as bytes: block i is i-th of `simulated_block_bytes` each."""
    return _History().up_to(len(token_ids), list(token_ids)).tobytes()


class SimulatedWorker:
    """A `Runner` without torch. Raises InvariantViolated for a plan that a real worker cannot run."""

    def __init__(
        self,
        tokens: TokenSource,
        *,
        block_size: int,
        num_fa_blocks: int,
        num_swa_blocks: int = 0,
        sliding_window: int | None = None,
        staging: StagingMemory | None = None,
    ) -> None:
        """A block of either pool takes `simulated_block_bytes(block_size)` bytes of a staging slot."""
        self._staging = staging
        self._tokens = tokens
        self._requests: dict[RequestId, KnownRequest] = {}
        self._pools = {"fa": SimulatedPool("fa", num_fa_blocks, block_size, None)}
        if sliding_window is not None:
            self._pools["swa"] = SimulatedPool("swa", num_swa_blocks, block_size, sliding_window)
        self._histories: dict[RequestId, _History] = {}

    @classmethod
    def of_cache(
        cls, config: CacheConfig, tokens: TokenSource, staging: StagingMemory | None = None
    ) -> SimulatedWorker:
        """One with the pools that the allocators of this configuration own."""
        return cls(
            tokens,
            block_size=config.block_size,
            num_fa_blocks=config.num_fa_blocks,
            num_swa_blocks=config.num_swa_blocks,
            sliding_window=config.sliding_window,
            staging=staging,
        )

    def run(self, plan: StepPlan) -> StepDone:
        for request_id in plan.drop:
            self._requests.pop(request_id, None)
            self._histories.pop(request_id, None)
            for pool in self._pools.values():
                pool.tables.pop(request_id, None)
        for new in plan.new:
            self._add(new)
        for edits in plan.edits:
            self._edit(edits.request_id, edits.fa_edits, edits.swa_edits)
        for copy in plan.copies:
            self._pools[copy.pool].copy(copy.source, copy.destination)
        for row in plan.rows:
            self._edit(row.request_id, row.fa_edits, row.swa_edits)
        runnable = [row for row in plan.rows if self._tokens_known(row)]
        for row in runnable:
            self._write(row)
        for row in runnable:
            self._check(row)
        results = tuple(self._result(row) for row in plan.rows)
        if plan.rehearsal is not None:
            for row in runnable:
                if row.sample:  # what was sampled is not kept
                    del self._requests[row.request_id].token_ids[row.start + row.num_tokens :]
        return StepDone(
            pool_epoch=plan.pool_epoch,
            step_id=plan.step_id,
            results=results,
            times=StepTimes(prepare_ns=0, forward_ns=0, sample_ns=0),
        )

    def copy_staged(self, order: CopyFromStaging | CopyToStaging) -> StagingCopied:
        for block in order.blocks:
            content, slot = self._pools[block.pool].content(block.block_id), self._slot(block)
            if isinstance(order, CopyFromStaging):
                content[:] = slot
            else:
                slot[:] = content
        return StagingCopied(pool_epoch=order.pool_epoch, copy_id=order.copy_id)

    def _slot(self, block: StagedBlock) -> NDArray[np.int64]:
        if self._staging is None:
            raise InvariantViolated("a copy for a simulated worker without staging memory")
        block_size = self._pools[block.pool].block_size
        return np.frombuffer(
            self._staging.slot(block.slot, simulated_block_bytes(block_size)), dtype=np.int64
        )

    def _add(self, new: NewRow) -> None:
        self._requests[new.request_id] = KnownRequest(
            request_id=new.request_id,
            prompt_len=new.prompt_len,
            token_ids=list(new.token_ids),
            sampling=new.sampling,
            suppressed_token_ids=new.suppressed_token_ids,
        )
        self._histories[new.request_id] = _History()
        for pool in self._pools.values():
            pool.tables[new.request_id] = {}

    def _edit(
        self,
        request_id: RequestId,
        fa_edits: tuple[BlockTableEdit, ...],
        swa_edits: tuple[BlockTableEdit, ...],
    ) -> None:
        if request_id not in self._requests:
            raise InvariantViolated(f"the plan names request {request_id}, which the worker does not know")
        self._pools["fa"].edit(request_id, fa_edits)
        if "swa" in self._pools:
            self._pools["swa"].edit(request_id, swa_edits)
        elif swa_edits:
            raise InvariantViolated("sliding-window edits for a model without sliding layers")

    def _tokens_known(self, row: Row) -> bool:
        """A row planned ahead whose token did not come (its request failed in the step before) is not run."""
        return row.start + row.num_tokens <= len(self._requests[row.request_id].token_ids)

    def _history(self, request_id: RequestId, end: int) -> NDArray[np.int64]:
        return self._histories[request_id].up_to(end, self._requests[request_id].token_ids)

    def _write(self, row: Row) -> None:
        end = row.start + row.num_tokens
        history = self._history(row.request_id, end)
        self._pools["fa"].write(row.request_id, history, max(row.start, row.fa_write_start), end)
        if "swa" in self._pools:
            self._pools["swa"].write(row.request_id, history, row.start, end)

    def _check(self, row: Row) -> None:
        end = row.start + row.num_tokens
        history = self._history(row.request_id, end)
        for pool in self._pools.values():
            pool.check(row.request_id, history, row.start, end)

    def _result(self, row: Row) -> RowResult:
        request = self._requests[row.request_id]
        if not self._tokens_known(row):
            return RowResult(request_id=row.request_id, error="the token before this row was never sampled")
        if not row.sample:
            return RowResult(request_id=row.request_id)
        if row.start + row.num_tokens != len(request.token_ids):
            raise InvariantViolated(
                f"request {row.request_id}: sampling after token {row.start + row.num_tokens} "
                f"of {len(request.token_ids)} known"
            )
        token = self._tokens(request, len(request.token_ids) - request.prompt_len)
        if isinstance(token, str):
            return RowResult(request_id=row.request_id, error=token)
        request.token_ids.append(token)
        return RowResult(request_id=row.request_id, token_ids=(token,))
