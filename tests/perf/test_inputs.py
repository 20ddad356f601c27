"""Equal seeds give equal inputs: of the same batch, whatever the others are."""

from __future__ import annotations

import hashlib

import msgspec

from ksana.perf.batches import Batch
from ksana.perf.inputs import fill_seed, infer_requests
from ksana.perf.result import RequestGroup


def batch(*entries: tuple[int, int, int]) -> Batch:
    groups = tuple(
        RequestGroup(sequence_len=length, forwarding_token_num=computed, request_num=num)
        for length, computed, num in entries
    )
    return Batch(name="b", place=("b",), groups=groups)


def test_requests_are_as_the_batch_says() -> None:
    requests = infer_requests(batch((50, 1, 2), (30, 30, 1)), 4, seed=42, vocab_size=320, first_id=7)
    assert [request.request_id for request in requests] == [7, 8, 9]
    assert [(len(r.token_ids), r.forwarding_token_num) for r in requests] == [(50, 1), (50, 1), (30, 30)]
    assert all(0 <= token_id < 320 for request in requests for token_id in request.token_ids)
    assert len({request.token_ids[:16] for request in requests}) == 3
    assert len({request.cache_salt for request in requests}) == 3
    assert len({request.sampling.seed for request in requests}) == 3


def test_the_same_seed_gives_the_same_for_ever() -> None:
    one = infer_requests(batch((50, 1, 2)), 3, seed=42, vocab_size=49152, first_id=1)
    other = infer_requests(batch((50, 1, 2)), 3, seed=42, vocab_size=49152, first_id=100)
    assert [r.token_ids for r in one] == [r.token_ids for r in other]
    assert [r.sampling for r in one] == [r.sampling for r in other]
    # Written down: also the next version of Python or numpy must give this.
    digest = hashlib.sha256(msgspec.msgpack.encode(one)).hexdigest()
    assert digest == "421bff801316aa92f18f8633ba25967b0c7b073de1cb77bc1408c888bd8e79d0"
    assert fill_seed(42, 3) == 709265662469


def test_another_seed_batch_or_request_gives_something_else() -> None:
    def first(seed: int, number: int) -> tuple[int, ...]:
        return infer_requests(batch((50, 1, 1)), number, seed=seed, vocab_size=320, first_id=1)[0].token_ids

    assert len({first(seed, number) for seed in (1, 2) for number in (0, 1)}) == 4
    assert len({fill_seed(seed, number) for seed in (1, 2) for number in (0, 1)}) == 4
    assert all(0 <= fill_seed(seed, 0) < 2**40 for seed in (0, 2**64 - 1))
