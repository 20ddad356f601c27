"""The requests of a batch, made from a seed: equal seeds give equal inputs, whatever else is measured."""

from __future__ import annotations

import hashlib

import numpy as np

from ksana.messages.perf import InferRequest
from ksana.messages.requests import SamplingParams
from ksana.perf.batches import Batch


def infer_requests(
    batch: Batch, batch_number: int, *, seed: int, vocab_size: int, first_id: int
) -> tuple[InferRequest, ...]:
    """Tokens are uniform over the vocabulary, sampling is that of a request without parameters. No two
    requests share a prefix in the cache: each has a salt of its own, also when a batch is measured again."""
    return tuple(
        InferRequest(
            request_id=first_id + number,
            token_ids=_token_ids(f"{seed}/{batch_number}/{number}", length, vocab_size),
            forwarding_token_num=forwarding,
            sampling=SamplingParams(seed=_number(f"{seed}/{batch_number}/{number}/sampling")),
            cache_salt=f"perf {first_id + number}",
        )
        for number, (length, forwarding) in enumerate(batch.requests)
    )


def fill_seed(seed: int, batch_number: int) -> int:
    """For the KV that is made up."""
    return _number(f"{seed}/{batch_number}/kv") >> 24


def _token_ids(text: str, length: int, vocab_size: int) -> tuple[int, ...]:
    """By a hash rather than a generator, so that they are the same with every version of numpy."""
    raw = hashlib.shake_256(f"ksana perf {text}".encode()).digest(4 * length)
    return tuple((np.frombuffer(raw, dtype="<u4") % vocab_size).tolist())


def _number(text: str) -> int:
    return int.from_bytes(hashlib.sha256(f"ksana perf {text}".encode()).digest()[:8], "big")
