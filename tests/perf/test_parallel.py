"""What a spread of a model over devices makes them tell each other."""

from __future__ import annotations

from pathlib import Path

import pytest

from ksana.costs.communication import Exchange, Link
from ksana.errors import ConfigError
from ksana.perf.fitting import fit_profile
from ksana.perf.model_shape import ModelShape
from ksana.perf.parallel import Spread, communication_of, exchanges_of, read_communication
from tests.costs.profiles import write_profile
from tests.perf.test_profile_tables import write_experts

SHAPE = ModelShape(num_layers=48, hidden_size=2048, kv_heads=4, vocab_size=150_000)
LINK = Link(bytes_per_s=50e9, latency_s=5e-6)


def exchange(operation: str, num_devices: int, per_step: int, size: float, **more: bool) -> Exchange:
    return Exchange(operation=operation, num_devices=num_devices, per_step=per_step, bytes_each=size, **more)  # type: ignore[arg-type]


def test_a_tensor_parallel_layer_sums_twice() -> None:
    expected = (
        exchange("all_reduce", 2, 97, 4096),
        exchange("all_gather", 2, 1, 300_000, of_rows=True),
    )
    assert exchanges_of(Spread(tensor=2), SHAPE) == expected
    experts = Spread(tensor=2, has_experts=True, is_expert_parallel=True)
    assert exchanges_of(experts, SHAPE) == expected
    assert experts.of_experts == 2


def test_data_parallel_engines_meet_at_their_experts_only() -> None:
    assert exchanges_of(Spread(), SHAPE) == ()
    assert exchanges_of(Spread(data=4), SHAPE) == ()
    spread = Spread(data=4, has_experts=True, is_expert_parallel=True)
    assert spread.of_experts == 4
    assert exchanges_of(spread, SHAPE) == (
        exchange("all_gather", 4, 48, 4 * 4096),
        exchange("reduce_scatter", 4, 48, 4 * 4096),
    )
    both = Spread(tensor=2, data=4, has_experts=True, is_expert_parallel=True)
    assert both.of_experts == 8
    assert len(exchanges_of(both, SHAPE)) == 4
    with pytest.raises(ConfigError, match="experts in parts over 4 data parallel engines"):
        exchanges_of(Spread(data=4, has_experts=True), SHAPE)


@pytest.mark.parametrize(
    ("field", "flag"), [("hidden_size", "--hidden-size"), ("vocab_size", "--vocab-size")]
)
def test_sizes_that_are_needed_and_unknown_are_refused(field: str, flag: str) -> None:
    known = {name: getattr(SHAPE, name) for name in SHAPE.__struct_fields__ if name != field}
    with pytest.raises(ConfigError, match=rf"depends on {field}, which is unknown: .* or give {flag}"):
        exchanges_of(Spread(tensor=2), ModelShape(**known))


def test_a_table_is_read_in_any_order(tmp_path: Path) -> None:
    file = tmp_path / "communication.csv"
    rows = ["all_reduce,2,4096,12", "all_gather,4,1024,9", "all_reduce,2,1024,8.5", "all_gather,4,64,7"]
    file.write_text("\n".join(["op,num_devices,bytes,us", *rows]))
    reduce, gather = read_communication(file)
    assert (reduce.operation, reduce.num_devices, reduce.sizes, reduce.us) == (
        "all_reduce",
        2,
        (1024, 4096),
        (8.5, 12.0),
    )
    assert (gather.operation, gather.num_devices, gather.sizes) == ("all_gather", 4, (64, 1024))
    found = communication_of(tmp_path, Spread(tensor=2), SHAPE, None)
    assert found is not None
    assert found.measured == (reduce, gather)
    assert communication_of(tmp_path, Spread(), SHAPE, LINK) is None


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("op,num_devices,bytes\nall_reduce,2,3\n", "has no column us"),
        ("op,num_devices,bytes,us\ngossip,2,3,4\n", "line 2: 'gossip' is none of all_reduce, all_gather"),
        ("op,num_devices,bytes,us\nall_reduce,1,3,4\n", "line 2: a value is not a number, too small"),
        ("op,num_devices,bytes,us\nall_reduce,2,3,nan\n", "line 2: a value is not a number"),
        ("op,num_devices,bytes,us\nall_reduce,2,3,-4\n", "line 2: a value is not a number, too small"),
        ("op,num_devices,bytes,us\nall_reduce,two,3,4\n", "line 2: expected op, and numbers"),
        ("op,num_devices,bytes,us\nall_reduce,2,3\n", "line 2: expected op, and numbers"),
        ("op,num_devices,bytes,us\nall_reduce,2,3,4\n", "all_reduce over 2 devices needs two sizes"),
    ],
)
def test_broken_tables_are_refused(tmp_path: Path, text: str, said: str) -> None:
    (tmp_path / "communication.csv").write_text(text)
    with pytest.raises(ConfigError, match=said):
        read_communication(tmp_path / "communication.csv")


def test_a_share_without_what_connects_it_is_refused(tmp_path: Path) -> None:
    write_profile(tmp_path)
    spread = Spread(tensor=2)
    with pytest.raises(ConfigError, match="nothing tells how long all_reduce over 2 devices takes"):
        fit_profile(tmp_path, stated=SHAPE, spread=spread)
    model = fit_profile(tmp_path, stated=SHAPE, spread=spread, link=LINK)
    assert model.data.communication is not None  # type: ignore[union-attr]


def test_experts_over_devices_and_engines(tmp_path: Path) -> None:
    """Rows of their share are read, at the tokens of all engines."""
    write_profile(tmp_path)
    write_experts(tmp_path)
    spread = Spread(data=2, is_expert_parallel=True)
    model = fit_profile(tmp_path, stated=SHAPE, spread=spread, link=LINK)
    (experts,) = [layer for layer in model.data.dense if layer.name == "moe"]  # type: ignore[union-attr]
    assert set(experts.us) == {1.0}  # as they are there for two devices
    assert experts.sizes[-1] == 128  # 256 tokens of two engines
    with pytest.raises(ConfigError, match=r"no rows of experts spread over 4 devices \(ep\); it has .* 1, 2"):
        fit_profile(tmp_path, stated=SHAPE, spread=Spread(data=4, is_expert_parallel=True), link=LINK)
