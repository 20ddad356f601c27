"""What devices tell each other: measured, by a link, or refused."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from ksana.costs.communication import (
    Communication,
    CommunicationCost,
    Exchange,
    Link,
    MeasuredOperation,
    link_s,
)
from ksana.costs.cost_file import CostModel, load_cost, save_cost
from ksana.errors import ConfigError
from ksana.perf.profile_tables import read_profile
from tests.costs.profiles import write_profile
from tests.costs.test_profile_cost import shape

LINK = Link(bytes_per_s=50e9, latency_s=5e-6)
SUMS = Exchange(operation="all_reduce", num_devices=4, per_step=65, bytes_each=8192)
LOGITS = Exchange(operation="all_gather", num_devices=4, per_step=1, bytes_each=256_000, of_rows=True)


def test_a_link_by_the_usual_costs() -> None:
    size = 100e6
    assert link_s(LINK, "all_gather", 4, size) == pytest.approx(3 * 5e-6 + 0.75 * size / 50e9)
    assert link_s(LINK, "reduce_scatter", 2, size) == pytest.approx(5e-6 + 0.5 * size / 50e9)
    assert link_s(LINK, "all_to_all", 8, size) == pytest.approx(7 * 5e-6 + 7 / 8 * size / 50e9)
    assert link_s(LINK, "all_reduce", 4, size) == pytest.approx(6 * 5e-6 + 1.5 * size / 50e9)
    # A few bytes are read from all others at once, for one latency.
    assert link_s(LINK, "all_reduce", 4, 1000) == pytest.approx(5e-6 + 3 * 1000 / 50e9)


def test_a_step_adds_its_exchanges_up() -> None:
    cost = CommunicationCost(Communication(exchanges=(SUMS, LOGITS), link=LINK))
    expected = 65 * link_s(LINK, "all_reduce", 4, 8192 * 300) + link_s(LINK, "all_gather", 4, 256_000 * 20)
    assert cost.seconds(300, 20) == pytest.approx(expected)
    assert cost.seconds(300, 20) == cost.seconds(300, 20)


def test_measurements_go_before_the_link() -> None:
    measured = MeasuredOperation(
        operation="all_reduce", num_devices=4, sizes=(1000, 100_000, 1_000_000), us=(10.0, 20.0, 110.0)
    )
    exchange = msgspec.structs.replace(SUMS, per_step=1, bytes_each=1000)
    cost = CommunicationCost(Communication(exchanges=(exchange, LOGITS), measured=(measured,), link=LINK))

    def sums_us(num_tokens: int) -> float:
        return 1e6 * (cost.seconds(num_tokens, 1) - link_s(LINK, "all_gather", 4, 256_000))

    assert sums_us(1) == pytest.approx(10)
    assert sums_us(550) == pytest.approx(65)
    assert sums_us(2000) == pytest.approx(210)  # the last bandwidth goes on
    small = msgspec.structs.replace(exchange, bytes_each=1)
    assert CommunicationCost(Communication(exchanges=(small,), measured=(measured,))).seconds(
        1, 1
    ) == pytest.approx(10e-6)


def test_what_nothing_tells_is_refused() -> None:
    measured = MeasuredOperation(operation="all_reduce", num_devices=2, sizes=(1, 2), us=(1.0, 2.0))
    with pytest.raises(
        ConfigError, match=r"how long all_reduce over 4 devices takes: put communication\.csv"
    ):
        CommunicationCost(Communication(exchanges=(SUMS,), measured=(measured,)))


def test_a_profile_costs_it_at_the_padded_size(tmp_path: Path) -> None:
    write_profile(tmp_path, padded_sizes=(1, 16))
    tables = read_profile(tmp_path, num_layers=2)
    communication = Communication(exchanges=(SUMS, LOGITS), link=LINK)
    shared = msgspec.structs.replace(tables, communication=communication)
    step = shape(decodes=5, kv=64)
    added = CostModel(shared).step.seconds(step) - CostModel(tables).step.seconds(step)
    assert added == pytest.approx(CommunicationCost(communication).seconds(16, 5))
    save_cost(tmp_path / "cost.json", CostModel(shared))
    assert load_cost(tmp_path / "cost.json").data == shared


@pytest.mark.parametrize(
    ("communication", "message"),
    [
        (Communication(exchanges=(SUMS,), link=Link(bytes_per_s=0, latency_s=1)), "a bandwidth above 0"),
        (Communication(exchanges=(SUMS,), link=Link(bytes_per_s=1, latency_s=-1)), "a latency of 0 to"),
        (
            Communication(exchanges=(msgspec.structs.replace(SUMS, num_devices=1),), link=LINK),
            "all_reduce over 1 devices",
        ),
        (
            Communication(
                exchanges=(SUMS,),
                measured=(
                    MeasuredOperation(operation="all_reduce", num_devices=4, sizes=(2, 1), us=(1.0, 2.0)),
                ),
            ),
            "two sizes or more must ascend",
        ),
    ],
)
def test_impossible_ones_are_refused(tmp_path: Path, communication: Communication, message: str) -> None:
    write_profile(tmp_path)
    tables = read_profile(tmp_path, num_layers=2)
    with pytest.raises(ConfigError, match=message):
        CostModel(msgspec.structs.replace(tables, communication=communication))
