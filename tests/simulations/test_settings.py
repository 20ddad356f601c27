"""Settings reach the world and its engines, or are refused by name."""

from __future__ import annotations

import pytest

from ksana.errors import ConfigError
from simulations.scenario import WorldSpec
from simulations.settings import parse_settings, with_settings


def test_settings_reach_the_world_and_every_engine() -> None:
    base = with_settings(WorldSpec(), {"replicas": 3, "block_size": 4})
    world = with_settings(base, parse_settings(["max-num-seqs=9", "routing=least_requests"]))
    assert (world.replicas, world.routing) == (3, "least_requests")
    assert {(engine.block_size, engine.max_num_seqs) for engine in world.all_engines} == {(4, 9)}


@pytest.mark.parametrize(
    ("texts", "match"),
    [
        (["max_num_seqs"], "key=value"),
        (["=3"], "key=value"),
        (["nonsense=3"], "no setting 'nonsense'"),
        (["max_num_seqs=many"], "settings: Expected `int`"),
        (["max_num_seqs=0"], "max_num_seqs must be positive"),
        (["replicas=100000"], "1 to 256 engines"),
        (["routing=" + "[" * 100_000], "settings"),
    ],
)
def test_wrong_settings(texts: list[str], match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        with_settings(WorldSpec(), parse_settings(texts))
