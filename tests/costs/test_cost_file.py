from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from ksana.costs import cost_file
from ksana.costs.cost_file import CostModel, HeldOutError, load_cost, save_cost
from ksana.costs.extrapolation import ExtrapolationError
from ksana.costs.fitted_cost import FittedTerms, Term
from ksana.costs.step_cost import LinearStepCost
from ksana.errors import ConfigError
from ksana.perf.profile_tables import read_profile
from tests.costs.profiles import write_profile
from tests.costs.test_profile_cost import shape

FITTED = FittedTerms(
    constant_s=0.001,
    terms=(
        Term(quantity="tokens", seconds=1e-4),
        Term(quantity="tokens", form="over", knot=10, seconds=2e-4),
        Term(quantity="tokens", form="up_to", knot=4, seconds=4e-4),
        Term(quantity="decode_kv", seconds=1e-6),
    ),
    most={"tokens": 100, "samples": 100, "prefill_pairs": 6000, "prefill_kv": 200, "decode_kv": 1000},
)


def test_terms_add_up() -> None:
    model = CostModel(FITTED)
    expected = 0.001 + 20e-4 + 10 * 2e-4 + 4 * 4e-4
    assert model.step.seconds(shape((20, 7))) == pytest.approx(expected)
    assert model.step.seconds(shape(decodes=2, kv=50)) == pytest.approx(0.001 + 2e-4 + 8e-4 + 1e-4)


def test_fitted_terms_do_not_go_beyond_what_was_measured() -> None:
    with pytest.raises(ExtrapolationError, match="decode kv 1010"):
        CostModel(FITTED).step.seconds(shape(decodes=10, kv=101))
    allowed = CostModel(FITTED, allow_extrapolation=True)
    assert allowed.step.seconds(shape((101, 0))) > 0.01
    assert allowed.num_extrapolated == 1


def test_files_give_back_what_they_were_given(tmp_path: Path) -> None:
    write_profile(tmp_path)
    errors = {"held-out steps": HeldOutError(num_samples=3, mean_abs_pct=1.5, max_abs_pct=4.0)}
    for data in (LinearStepCost(), FITTED, read_profile(tmp_path, num_layers=2)):
        save_cost(tmp_path / "cost.json", CostModel(data, host_s=0.002, source="a test", errors=errors))
        model = load_cost(tmp_path / "cost.json")
        assert (model.data, model.host_s, model.source, model.errors) == (data, 0.002, "a test", errors)
        assert model.num_extrapolated == 0
        assert model.step.seconds(shape(decodes=2, kv=64)) > 0


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda raw: raw.update(schema_version=2), "schema version 2"),
        (lambda raw: raw.update(host_s=-1), "host_s: a time is negative"),
        (lambda raw: raw.update(more=1), "more"),
        (lambda raw: raw["cost"].update(type="magic"), "magic"),
        (lambda raw: raw["cost"].update(num_layers=0), "at least one layer"),
        (lambda raw: raw["cost"]["dense"][0]["us"].pop(), "sizes must ascend, and have a time each"),
        (lambda raw: raw["cost"]["dense"][0]["sizes"].__setitem__(-1, 1 << 40), "outside 0 to"),
        (lambda raw: raw["cost"]["attention"]["decodes"].__setitem__(0, 9), "decodes must"),
        (lambda raw: raw["cost"]["attention"]["mixed_us"][0].pop(), "size of its axes"),
        (lambda raw: raw["cost"]["attention"]["mixed_us"][0][0][0].pop(), "size of its axes"),
        (lambda raw: raw["cost"]["attention"]["decode_us"][0].__setitem__(0, -3.0), "negative"),
        (lambda raw: raw["cost"].update(padded_sizes=[8, 4]), "padded_sizes"),
    ],
)
def test_broken_files_are_refused(
    tmp_path: Path, change: Callable[[dict[str, Any]], object], message: str
) -> None:
    write_profile(tmp_path)
    path = tmp_path / "cost.json"
    save_cost(path, CostModel(read_profile(tmp_path, num_layers=2)))
    raw = msgspec.json.decode(path.read_bytes())
    change(raw)
    path.write_bytes(msgspec.json.encode(raw))
    with pytest.raises(ConfigError, match=message) as caught:
        load_cost(path)
    assert "cost.json" in str(caught.value)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda cost: cost["most"].pop("samples"), "most samples that were measured"),
        (lambda cost: cost["most"].update(tokens=-1), "most tokens that were measured"),
        (lambda cost: cost["terms"][1].update(knot=-1), "a knot is negative"),
        (lambda cost: cost["terms"][0].update(seconds=1e300), "a time is negative, not a number, or absurd"),
        (lambda cost: cost.update(constant_s=-1e-9), "a time is negative"),
    ],
)
def test_broken_terms_are_refused(
    tmp_path: Path, change: Callable[[dict[str, Any]], object], message: str
) -> None:
    path = tmp_path / "cost.json"
    save_cost(path, CostModel(FITTED))
    raw = msgspec.json.decode(path.read_bytes())
    change(raw["cost"])
    path.write_bytes(msgspec.json.encode(raw))
    with pytest.raises(ConfigError, match=message):
        load_cost(path)


def test_what_cannot_be_written_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "cost.json").mkdir()
    for path in (tmp_path / "cost.json", tmp_path / "no" / "cost.json"):
        with pytest.raises(ConfigError, match="cannot write the cost model"):
            save_cost(path, CostModel(FITTED))
    assert [path.name for path in tmp_path.iterdir()] == ["cost.json"]


def test_files_that_are_none_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="No such file"):
        load_cost(tmp_path / "cost.json")
    (tmp_path / "cost.json").write_text("[" * 100_000)
    with pytest.raises(ConfigError, match="not a cost model"):
        load_cost(tmp_path / "cost.json")
    monkeypatch.setattr(cost_file, "MAX_FILE_BYTES", 1000)
    with pytest.raises(ConfigError, match="is larger than 1000"):
        load_cost(tmp_path / "cost.json")
