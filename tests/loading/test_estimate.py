import pytest

from ksana.loading.estimate import STALE_S, StoreSpeed, is_worth_it
from ksana.loading.known_keys import KnownKeys


def test_what_is_not_known_speaks_for_loading() -> None:
    speed = StoreSpeed()
    assert speed.load_s(10**9, now_s=5.0) is None
    assert is_worth_it(None, 1, 1e9)
    assert is_worth_it(100.0, 1, 0.0)


def test_loading_is_compared_with_computing() -> None:
    speed = StoreSpeed()
    speed.loaded(num_bytes=1000, seconds=2.0, now_s=10.0)
    load_s = speed.load_s(5000, now_s=11.0)
    assert load_s == pytest.approx(10.0)
    assert is_worth_it(load_s, num_tokens=1100, prefill_tokens_per_s=100.0)
    assert not is_worth_it(load_s, num_tokens=900, prefill_tokens_per_s=100.0)


def test_means_follow_the_newest_and_old_ones_are_forgotten() -> None:
    speed = StoreSpeed()
    speed.loaded(1000, 1.0, now_s=1.0)
    for _ in range(20):
        speed.loaded(3000, 1.0, now_s=2.0)
    assert speed.bytes_per_s == pytest.approx(3000, rel=0.01)
    assert speed.load_s(3000, now_s=2.0 + STALE_S + 1) is None


def test_known_keys_forget_the_least_recently_seen() -> None:
    known = KnownKeys({}, capacity=3)
    known.add([b"a", b"b", b"c"])
    known.add([b"a"])
    known.add([b"d"])
    assert [key for key in (b"a", b"b", b"c", b"d") if key in known] == [b"a", b"c", b"d"]
    known.discard([b"a", b"never there"])
    assert b"a" not in known
    assert len(known) == 2
