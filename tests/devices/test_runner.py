import random

import pytest
import torch

from ksana.devices.runner import ModelRunner
from ksana.errors import InvariantViolated
from ksana.messages.blocks import BlockCopy
from ksana.messages.requests import SamplingParams
from ksana.messages.steps import NewRow, StepPlan
from ksana.models.batch import AttentionTables, KvCache, StepBatch
from ksana.models.spec import LayerKind, ModelSpec, RopeSpec

from .plans import edits, new_row, next_plan, plan, row

VOCAB = 97
BLOCK = 4
WINDOW = 6


def spec(kinds: tuple[LayerKind, ...]) -> ModelSpec:
    return ModelSpec(
        family="fake",
        vocab_size=VOCAB,
        hidden_size=1,
        intermediate_size=1,
        num_layers=len(kinds),
        num_heads=1,
        num_kv_heads=1,
        head_dim=1,
        max_position=64,
        rms_norm_eps=1e-6,
        rope=RopeSpec(theta=1e4),
        layer_kinds=kinds,
        sliding_window=WINDOW if "sliding" in kinds else None,
        attention_scale=1.0,
    )


def expected_token(history: list[int], sliding: bool) -> int:
    """What the fake model says after these tokens."""
    total = sum((p + 1) * t for p, t in enumerate(history))
    if sliding:
        first = max(0, len(history) - WINDOW)
        total += sum((p + 1) * t for p, t in enumerate(history) if p >= first)
    return total % VOCAB


class FakeModel:
    """Writes token ids as keys and reads them back through the block tables, as attention would."""

    def __init__(self, kinds: tuple[LayerKind, ...] = ("full", "sliding")) -> None:
        self.spec = spec(kinds)
        self.poison: set[int] = set()
        """Token ids: a step with one of them raises."""
        self.nan: set[int] = set()
        """Token ids: a row that ends with one of them has a NaN among its logits."""

    def forward(self, batch: StepBatch, kv: KvCache) -> torch.Tensor:
        if self.poison & set(batch.token_ids.tolist()):
            raise RuntimeError("the device does not like this token")
        totals = torch.zeros(len(batch.token_ids), dtype=torch.int64)
        for layer, kind in enumerate(self.spec.layer_kinds):
            tables = batch.full if kind == "full" else batch.sliding
            assert tables is not None
            assert tables.block_tables.is_contiguous()
            assert tables.block_tables.dtype == batch.query_starts.dtype == torch.int32
            assert tables.slots.dtype == batch.positions.dtype == batch.token_ids.dtype == torch.int64
            keys = kv.keys[layer].view(-1)
            written = tables.slots >= 0
            keys[tables.slots[written]] = batch.token_ids[written].float()
            totals += self._attend(batch, tables, keys, None if kind == "full" else WINDOW)
        logits = torch.zeros(len(batch.logit_indices), VOCAB)
        for line, token in enumerate(batch.logit_indices.tolist()):
            logits[line, int(totals[token]) % VOCAB] = 5
            if int(batch.token_ids[token]) in self.nan:
                logits[line, 3] = float("nan")
        return logits

    def _attend(
        self, batch: StepBatch, tables: AttentionTables, keys: torch.Tensor, window: int | None
    ) -> torch.Tensor:
        totals = torch.zeros(len(batch.token_ids), dtype=torch.int64)
        starts = batch.query_starts.tolist()
        for index, (lo, hi) in enumerate(zip(starts, starts[1:], strict=False)):  # noqa: RUF007
            for token in range(lo, hi):
                p = int(batch.positions[token])
                for key in range(0 if window is None else max(0, p - window + 1), p + 1):
                    block = int(tables.block_tables[index, key // BLOCK])
                    assert block >= 0
                    totals[token] += (key + 1) * int(keys[block * BLOCK + key % BLOCK])
        return totals


def runner(model: FakeModel, num_blocks: int = 32) -> ModelRunner:
    kv = KvCache.allocate(model.spec, num_blocks, num_blocks, BLOCK)
    return ModelRunner(
        model, kv, num_fa_blocks=num_blocks, num_swa_blocks=num_blocks, max_model_len=64, max_num_seqs=1
    )


def test_rows_of_all_kinds_in_one_batch_give_what_each_gives_alone() -> None:
    rng = random.Random(5)
    model = FakeModel()
    r = runner(model)
    histories = {i: [rng.randrange(VOCAB) for _ in range(rng.randrange(1, 12))] for i in range(1, 5)}
    blocks = iter(range(32))
    fa = {i: [next(blocks) for _ in range(5)] for i in histories}
    computed = dict.fromkeys(histories, 0)
    new = tuple(new_row(i, tuple(h)) for i, h in histories.items())
    for step in range(1, 12):
        rows = []
        for i, history in histories.items():
            if len(history) >= 20:
                continue
            num_tokens = min(len(history) - computed[i], rng.choice([1, 2, 5]))
            first = edits(*fa[i]) if step == 1 else ()
            sample = computed[i] + num_tokens == len(history)
            rows.append(row(i, computed[i], num_tokens, sample=sample, fa=first, swa=first))
            computed[i] += num_tokens
        rng.shuffle(rows)
        done = r.run(plan(step, *rows, new=new if step == 1 else ()))
        assert [result.request_id for result in done.results] == [each.request_id for each in rows]
        for result, each in zip(done.results, rows, strict=True):
            assert result.error is None
            history = histories[each.request_id]
            if each.sample:
                assert result.token_ids == (expected_token(history, sliding=True),)
                history.extend(result.token_ids)
            else:
                assert result.token_ids == ()
    assert sum(map(len, histories.values())) > 30


def test_the_sampled_token_is_fed_by_the_worker_itself() -> None:
    r = runner(FakeModel(("full",)))
    history = [5, 6, 7]
    r.run(plan(1, row(1, 0, 3, fa=edits(2, 1)), new=(new_row(1, (5, 6, 7)),)))
    history.append(expected_token(history, sliding=False))
    for step in range(2, 5):
        (result,) = r.run(next_plan(step, 1, len(history) - 1)).results
        assert result.token_ids == (expected_token(history, sliding=False),)
        history.extend(result.token_ids)


def test_a_cached_prefix_is_read_and_not_written() -> None:
    model = FakeModel(("full", "sliding"))
    r = runner(model)
    prompt = (1, 2, 3, 4, 5)
    r.run(plan(1, row(1, 0, 5, fa=edits(0, 1), swa=edits(0, 1)), new=(new_row(1, prompt),)))
    r._kv.keys[0][0] += 0.25  # a mark that a write would wipe out
    again = row(2, 0, 5, fa=edits(0, 2), swa=edits(2, 3), fa_write_start=4)
    (result,) = r.run(plan(2, again, new=(new_row(2, prompt),))).results
    assert result.token_ids == (expected_token(list(prompt), sliding=True),)
    assert r._kv.keys[0][0].flatten().tolist() == [1.25, 2.25, 3.25, 4.25]
    assert r._kv.keys[1][2].flatten().tolist() == [1, 2, 3, 4]


def test_copies_come_before_the_step_and_touch_one_pool() -> None:
    r = runner(FakeModel(("full", "sliding")))
    r.run(plan(1, row(1, 0, 4, fa=edits(0), swa=edits(0)), new=(new_row(1, (1, 2, 3, 4)),)))
    copied = StepPlan(
        pool_epoch=1,
        step_id=2,
        rows=(row(2, 4, 1, fa=edits(7, 8), swa=edits(0, 8)),),
        new=(new_row(2, (1, 2, 3, 4, 5)),),
        copies=(BlockCopy(pool="fa", source=0, destination=7),),
    )
    (result,) = r.run(copied).results
    assert result.token_ids == (expected_token([1, 2, 3, 4, 5], sliding=True),)
    assert r._kv.keys[1][7].abs().sum() == 0


def test_dropped_requests_leave_room_and_tables_grow() -> None:
    r = runner(FakeModel(("full",)), num_blocks=64)
    for step in range(1, 20):
        r.run(plan(step, row(step, 0, 2, fa=edits(step)), new=(new_row(step, (step, 1)),), drop=(step - 3,)))
    assert len(r._requests) == 3
    new = tuple(new_row(100 + i, (i, 2)) for i in range(20))
    rows = [row(100 + i, 0, 2, fa=edits(30 + i)) for i in range(20)]
    done = r.run(plan(20, *rows, new=new))
    assert [x.token_ids[0] for x in done.results] == [expected_token([i, 2], False) for i in range(20)]


def test_a_row_with_nan_is_in_error_and_harms_nobody() -> None:
    model = FakeModel(("full",))
    model.nan = {13}
    r = runner(model)
    new = (new_row(1, (1, 13)), new_row(2, (1, 2)))
    bad, good = r.run(plan(1, row(1, 0, 2, fa=edits(0)), row(2, 0, 2, fa=edits(1)), new=new)).results
    assert "NaN" in str(bad.error)
    assert good.token_ids == (expected_token([1, 2], False),)
    ahead = r.run(plan(2, row(1, 2, 1), row(2, 2, 1)))
    assert "never sampled" in str(ahead.results[0].error)
    assert ahead.results[1].error is None


def test_the_row_that_makes_a_step_raise_is_told_from_the_others() -> None:
    model = FakeModel(("full",))
    model.poison = {13}
    r = runner(model)
    new = (new_row(1, (1, 2)), new_row(2, (1, 13)), new_row(3, (3, 4)))
    rows = [row(i, 0, 2, fa=edits(i)) for i in (1, 2, 3)]
    one, two, three = r.run(plan(1, *rows, new=new)).results
    assert one.token_ids == (expected_token([1, 2], False),)
    assert three.token_ids == (expected_token([3, 4], False),)
    assert "the device does not like this token" in str(two.error)
    # Nobody else got two tokens out of it.
    assert r.run(next_plan(2, 1, 2)).results[0].error is None


def test_a_step_that_fails_for_every_row_is_the_end() -> None:
    model = FakeModel(("full",))
    model.poison = {13}
    r = runner(model)
    new = (new_row(1, (13,)), new_row(2, (13,)))
    with pytest.raises(RuntimeError, match="does not like"):
        r.run(plan(1, row(1, 0, 1, fa=edits(0)), row(2, 0, 1, fa=edits(1)), new=new))
    with pytest.raises(RuntimeError, match="does not like"):
        r.run(plan(2, row(1, 0, 1)))


@pytest.mark.parametrize(
    ("bad", "text"),
    [
        (plan(2, row(9, 0, 1)), "request 9"),
        (plan(2, row(1, 2, 1, fa=edits(32))), "does not fit a pool of 32"),
        (plan(2, row(1, 2, 1, fa=edits(-2))), "does not fit a pool"),
        (plan(2, row(1, 2, 1, fa=edits(1, first=16))), "tables of 16"),
        (plan(2, row(1, 2, 1, swa=edits(0))), "no layers for"),
        (plan(2, row(1, 1, 1)), "samples elsewhere"),
        (plan(2, row(1, 2, 1, fa=edits(-1))), "no fa block where one of its tokens goes"),
    ],
)
def test_plans_that_would_read_or_write_foreign_memory_are_refused(bad: StepPlan, text: str) -> None:
    r = runner(FakeModel(("full",)))
    r.run(plan(1, row(1, 0, 2, fa=edits(0)), new=(new_row(1, (1, 2)),)))
    with pytest.raises(InvariantViolated, match=text):
        r.run(bad)


def test_a_resumed_request_goes_on_where_it_was() -> None:
    """Noise and min_tokens go by the output position, which counts output before the preemption."""
    sampling = SamplingParams(seed=11, temperature=30.0, max_tokens=8, min_tokens=6)
    suppressed = tuple(range(1, VOCAB, 2))

    def new(tokens: tuple[int, ...]) -> NewRow:
        return NewRow(
            request_id=1,
            prompt_len=2,
            token_ids=tokens,
            sampling=sampling,
            suppressed_token_ids=suppressed,
        )

    whole = runner(FakeModel(("full",)))
    tokens = [3, 4]
    step = plan(1, row(1, 0, 2, fa=edits(0, 1, 2)), new=(new((3, 4)),))
    for number in range(2, 9):
        tokens += whole.run(step).results[0].token_ids
        step = next_plan(number, 1, len(tokens) - 1)
    assert all(token % 2 == 0 for token in tokens[2:8])
    for known in range(3, 9):
        resumed = runner(FakeModel(("full",)))
        again = plan(1, row(1, 0, known, fa=edits(5, 6, 7)), new=(new(tuple(tokens[:known])),))
        assert resumed.run(again).results[0].token_ids == (tokens[known],)


def test_times_are_told() -> None:
    r = runner(FakeModel(("full",)))
    times = r.run(plan(1, row(1, 0, 2, fa=edits(0)), new=(new_row(1, (1, 2)),))).times
    assert min(times.prepare_ns, times.forward_ns, times.sample_ns) > 0
