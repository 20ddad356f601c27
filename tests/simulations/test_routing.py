"""Which engine gets a request."""

from __future__ import annotations

from dataclasses import dataclass

from simulations.requests import NamedText, PromptSource, SimRequest
from simulations.routing import Router


@dataclass
class Engine:
    num_open: int = 0


def asks(*texts: int, salt: str = "") -> SimRequest:
    prompt = PromptSource(tuple(NamedText(text, 16) for text in texts))
    return SimRequest(arrival_s=0.0, prompt=prompt, max_tokens=1, cache_salt=salt)


def test_round_robin() -> None:
    router = Router("round_robin", [Engine() for _ in range(3)])
    assert [router.choose(asks(1)) for _ in range(5)] == [0, 1, 2, 0, 1]


def test_least_requests_goes_to_the_emptiest_in_turn() -> None:
    engines = [Engine(2), Engine(1), Engine(1)]
    router = Router("least_requests", engines)
    assert [router.choose(asks(1)) for _ in range(3)] == [1, 2, 1]
    engines[0].num_open = 0
    assert router.choose(asks(1)) == 0


def test_prefix_affinity_follows_the_longest_known_prefix() -> None:
    engines = [Engine() for _ in range(3)]
    router = Router("prefix_affinity", engines)
    first = router.choose(asks(1, 2))
    second = router.choose(asks(5, 6))
    assert first != second
    assert router.choose(asks(1, 2, 3)) == first
    assert router.choose(asks(1, 9)) == first
    assert router.choose(asks(5, 7)) == second


def test_prefix_affinity_gives_way_to_load() -> None:
    engines = [Engine(), Engine()]
    router = Router("prefix_affinity", engines)
    home = router.choose(asks(1))
    engines[home].num_open = 4
    assert router.choose(asks(1)) == home
    engines[home].num_open = 5
    away = router.choose(asks(1))
    assert away != home
    engines[home].num_open = 0
    assert router.choose(asks(1)) == away, "that is where the prefix was computed last"


def test_salts_share_nothing() -> None:
    router = Router("prefix_affinity", [Engine(), Engine()])
    first = router.choose(asks(1, salt="a"))
    assert router.choose(asks(1, salt="b")) != first
    assert router.choose(asks(1, salt="a")) == first
