"""What a worker remembers of its requests, and how a step's rows become arrays. numpy only, no torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from ksana.errors import InvariantViolated
from ksana.messages.base import RequestId
from ksana.messages.blocks import NO_BLOCK, BlockTableEdit
from ksana.messages.requests import SamplingParams
from ksana.messages.steps import NewRow, Row


@dataclass(slots=True)
class KnownRequest:
    """One request. `tokens[:num_tokens]` are prompt and output; `index` is its line in the block tables."""

    index: int
    prompt_len: int
    tokens: NDArray[np.int64]
    num_tokens: int
    sampling: SamplingParams
    suppressed_token_ids: tuple[int, ...]

    @property
    def output_position(self) -> int:
        """Position among the output of the token that is sampled next."""
        return self.num_tokens - self.prompt_len

    def append(self, token_id: int) -> None:
        if self.num_tokens == len(self.tokens):
            self.tokens = np.concatenate([self.tokens, np.empty(64, dtype=np.int64)])
        self.tokens[self.num_tokens] = token_id
        self.num_tokens += 1


@dataclass(slots=True)
class PoolArrays:
    """`block_tables` int32 [R, max_blocks], -1 where no block is; `slots` int64 [T], -1 writes nothing."""

    block_tables: NDArray[np.int32]
    slots: NDArray[np.int64]


@dataclass(slots=True)
class BatchArrays:
    """T tokens of R rows; shapes as in `ksana.models.batch.StepBatch`."""

    token_ids: NDArray[np.int64]
    positions: NDArray[np.int64]
    query_starts: NDArray[np.int32]
    logit_indices: NDArray[np.int64]
    fa: PoolArrays | None
    swa: PoolArrays | None


@dataclass(slots=True)
class _Tables:
    """Block tables of one pool: one line per request, `NO_BLOCK` where nothing is."""

    name: str
    num_blocks: int
    lines: NDArray[np.int32] = field(repr=False)

    def edit(self, index: int, edits: Sequence[BlockTableEdit]) -> None:
        line = self.lines[index]
        for edit in edits:
            # The kernels trust what stands here: a wild id would read or write foreign memory.
            if not (NO_BLOCK <= edit.block_id < self.num_blocks and 0 <= edit.index < len(line)):
                raise InvariantViolated(
                    f"{self.name} block {edit.block_id} at {edit.index} does not fit a pool of "
                    f"{self.num_blocks} blocks and tables of {len(line)}"
                )
            line[edit.index] = edit.block_id


class RequestTable:
    """Requests by id, with their block tables.

    Invariants: every known request has one line in each pool's tables, and no two share one; ids in
    tables are inside the pool. Memory: 4 bytes per request, pool and possible block.
    """

    def __init__(
        self,
        *,
        block_size: int,
        max_model_len: int,
        num_fa_blocks: int,
        num_swa_blocks: int,
        num_requests: int = 64,
    ) -> None:
        """A pool of 0 blocks is one the model has no layers for. `num_requests` is only where to begin."""
        self._block_size = block_size
        self._max_blocks = -(-max_model_len // block_size)
        self._requests: dict[RequestId, KnownRequest] = {}
        self._free_lines = list(range(num_requests))[::-1]
        self._fa = self._tables("fa", num_fa_blocks, num_requests)
        self._swa = self._tables("swa", num_swa_blocks, num_requests)

    def _tables(self, name: str, num_blocks: int, num_lines: int) -> _Tables | None:
        if num_blocks == 0:
            return None
        return _Tables(name, num_blocks, np.full((num_lines, self._max_blocks), NO_BLOCK, dtype=np.int32))

    def __len__(self) -> int:
        return len(self._requests)

    def __getitem__(self, request_id: RequestId) -> KnownRequest:
        try:
            return self._requests[request_id]
        except KeyError:
            raise InvariantViolated(f"the plan names request {request_id}, unknown to the worker") from None

    def add(self, new: NewRow) -> None:
        """Learn of a request, with empty block tables. One already known is replaced."""
        self.drop(new.request_id)
        if not self._free_lines:
            self._grow()
        index = self._free_lines.pop()
        for tables in (self._fa, self._swa):
            if tables is not None:
                tables.lines[index] = NO_BLOCK
        num_tokens = len(new.token_ids)
        room = max(1, (new.sampling.max_tokens or 0) - (num_tokens - new.prompt_len))
        tokens = np.empty(num_tokens + min(room, 4096), dtype=np.int64)
        tokens[:num_tokens] = new.token_ids
        self._requests[new.request_id] = KnownRequest(
            index=index,
            prompt_len=new.prompt_len,
            tokens=tokens,
            num_tokens=num_tokens,
            sampling=new.sampling,
            suppressed_token_ids=new.suppressed_token_ids,
        )

    def drop(self, request_id: RequestId) -> None:
        """Forget a request; nothing happens when it is unknown."""
        request = self._requests.pop(request_id, None)
        if request is not None:
            self._free_lines.append(request.index)

    def edit(
        self,
        request_id: RequestId,
        fa_edits: Sequence[BlockTableEdit],
        swa_edits: Sequence[BlockTableEdit],
    ) -> None:
        """Change a request's block tables. Raises InvariantViolated for a block outside its pool."""
        request = self[request_id]
        for tables, edits in ((self._fa, fa_edits), (self._swa, swa_edits)):
            if edits:
                if tables is None:
                    raise InvariantViolated("edits for a pool that the model has no layers for")
                tables.edit(request.index, edits)

    def is_ready(self, row: Row) -> bool:
        """Whether the row's tokens are known. They are not after a step that gave this request no token."""
        return row.start + row.num_tokens <= self[row.request_id].num_tokens

    def batch(self, rows: Sequence[Row]) -> BatchArrays:
        """The arrays of a step with these rows, at least one; all of them ready.

        Raises InvariantViolated when a row wants to sample elsewhere than after its last known token, or
        to write where its table has no block.
        """
        requests = [self[row.request_id] for row in rows]
        num_rows = len(rows)
        starts = np.fromiter((row.start for row in rows), np.int64, num_rows)
        lengths = np.fromiter((row.num_tokens for row in rows), np.int64, num_rows)
        samples = np.fromiter((row.sample for row in rows), np.bool_, num_rows)
        write_starts = np.fromiter((row.fa_write_start for row in rows), np.int64, num_rows)
        lines = np.fromiter((request.index for request in requests), np.int64, num_rows)
        known = np.fromiter((request.num_tokens for request in requests), np.int64, num_rows)
        ends = starts + lengths
        if (samples & (ends != known)).any() or (lengths < 1).any():
            raise InvariantViolated("a row is empty, or samples elsewhere than after its last token")
        query_starts = np.zeros(num_rows + 1, dtype=np.int64)
        np.cumsum(lengths, out=query_starts[1:])
        row_of_token = np.repeat(np.arange(num_rows), lengths)
        positions = np.arange(query_starts[-1]) - np.repeat(query_starts[:-1] - starts, lengths)
        token_ids = np.concatenate(
            [
                request.tokens[row.start : row.start + row.num_tokens]
                for request, row in zip(requests, rows, strict=True)
            ]
        )
        num_blocks = -(-int(ends.max()) // self._block_size)
        fa = self._pool_arrays(self._fa, lines, num_blocks, row_of_token, positions)
        if fa is not None:
            fa.slots[positions < np.repeat(write_starts, lengths)] = -1
        return BatchArrays(
            token_ids=token_ids,
            positions=positions,
            query_starts=query_starts.astype(np.int32),
            logit_indices=query_starts[1:][samples] - 1,
            fa=fa,
            swa=self._pool_arrays(self._swa, lines, num_blocks, row_of_token, positions),
        )

    def _pool_arrays(
        self,
        tables: _Tables | None,
        lines: NDArray[np.int64],
        num_blocks: int,
        row_of_token: NDArray[np.int64],
        positions: NDArray[np.int64],
    ) -> PoolArrays | None:
        if tables is None:
            return None
        if num_blocks > self._max_blocks:
            raise InvariantViolated(f"a row reaches block {num_blocks} of tables of {self._max_blocks}")
        block_tables = np.ascontiguousarray(tables.lines[:, :num_blocks][lines])
        blocks = block_tables[row_of_token, positions // self._block_size].astype(np.int64)
        if (blocks < 0).any():
            raise InvariantViolated(f"a row has no {tables.name} block where one of its tokens goes")
        return PoolArrays(block_tables, blocks * self._block_size + positions % self._block_size)

    def _grow(self) -> None:
        """Twice as many lines."""
        for tables in (self._fa, self._swa):
            if tables is not None:
                fresh = np.full_like(tables.lines, NO_BLOCK)
                tables.lines = np.concatenate([tables.lines, fresh])
        num_lines = len(self._requests)
        self._free_lines = list(range(num_lines, 2 * num_lines))[::-1]
