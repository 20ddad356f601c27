"""Step plans for tests, one request at a time."""

from ksana.messages.blocks import BlockTableEdit
from ksana.messages.requests import SamplingParams
from ksana.messages.steps import NewRow, Row, StepPlan


def edits(*block_ids: int, first: int = 0) -> tuple[BlockTableEdit, ...]:
    return tuple(BlockTableEdit(index=first + i, block_id=b) for i, b in enumerate(block_ids))


def new_row(request_id: int, token_ids: tuple[int, ...], *, prompt_len: int | None = None) -> NewRow:
    return NewRow(
        request_id=request_id,
        prompt_len=len(token_ids) if prompt_len is None else prompt_len,
        token_ids=token_ids,
        sampling=SamplingParams(seed=1, temperature=0.0, max_tokens=8),
    )


def row(
    request_id: int,
    start: int,
    num_tokens: int,
    *,
    sample: bool = True,
    fa: tuple[BlockTableEdit, ...] = (),
    swa: tuple[BlockTableEdit, ...] = (),
    fa_write_start: int | None = None,
) -> Row:
    return Row(
        request_id=request_id,
        start=start,
        num_tokens=num_tokens,
        sample=sample,
        fa_write_start=start if fa_write_start is None else fa_write_start,
        fa_edits=fa,
        swa_edits=swa,
    )


def plan(step_id: int, *rows: Row, new: tuple[NewRow, ...] = (), drop: tuple[int, ...] = ()) -> StepPlan:
    return StepPlan(pool_epoch=1, step_id=step_id, rows=rows, new=new, drop=drop)


def first_plan(step_id: int = 1, request_id: int = 1, num_tokens: int = 5) -> StepPlan:
    """A new request of one block, prefilled in one go."""
    tokens = tuple(range(10, 10 + num_tokens))
    return plan(
        step_id,
        row(request_id, 0, num_tokens, fa=edits(request_id)),
        new=(new_row(request_id, tokens),),
    )


def next_plan(step_id: int, request_id: int, start: int) -> StepPlan:
    return plan(step_id, row(request_id, start, 1))
