"""Workloads of the hit-rate simulation: a scaled-down Mooncake trace, and conversations made from a seed."""

from __future__ import annotations

import random
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import msgspec

from ksana.errors import ConfigError
from simulations.workloads.mooncake import MOONCAKE_BLOCK, mooncake_lines


class TraceRequest(msgspec.Struct, frozen=True, kw_only=True):
    """One recorded request. Its content is in `token_ids`; what the model answers is not recorded."""

    arrival_s: float
    token_ids: tuple[int, ...]
    max_tokens: int


class Conversation(msgspec.Struct, frozen=True, kw_only=True):
    """A made-up chat: a system prompt that others may share, then turns, each after some thinking."""

    start_s: float
    system: tuple[int, ...]
    turns: tuple[Turn, ...]


class Turn(msgspec.Struct, frozen=True, kw_only=True):
    think_s: float
    user: tuple[int, ...]
    max_tokens: int


def read_mooncake(
    path: Path, *, block_size: int, first_token: int, num_tokens: int, limit: int | None = None
) -> Iterator[TraceRequest]:
    """A Mooncake trace, scaled down.

    Each 512 tokens of the trace become `block_size` tokens here, spelled from the hash id with the
    `num_tokens` ids from `first_token` on, so that equal content stays equal and block counts stay as they
    were. Lengths are rounded up. Raises ConfigError, with the line, for anything else.
    """
    for request in islice(mooncake_lines(path), limit):
        token_ids: list[int] = []
        for hash_id in request.hash_ids:
            token_ids += _spell(hash_id, block_size, first_token, num_tokens)
        length = max(1, -(-request.input_length * block_size // MOONCAKE_BLOCK))
        yield TraceRequest(
            arrival_s=request.timestamp / 1000,
            token_ids=tuple(token_ids[:length]),
            max_tokens=max(1, -(-request.output_length * block_size // MOONCAKE_BLOCK)),
        )


def _spell(number: int, num_digits: int, first_token: int, base: int) -> list[int]:
    """`number` in `num_digits` digits of that base, most significant last, so that siblings differ early."""
    digits = []
    for _ in range(num_digits):
        number, digit = divmod(number, base)
        digits.append(first_token + digit)
    if number:
        raise ConfigError(f"a hash id does not fit into {num_digits} tokens")
    return digits


def make_conversations(
    seed: int,
    num: int,
    *,
    token_range: tuple[int, int],
    per_s: float = 2.0,
    num_systems: int = 20,
    system_len: int = 128,
    max_turns: int = 8,
    think_s: float = 15.0,
    user_len: tuple[int, int] = (8, 96),
    output_len: tuple[int, int] = (8, 64),
) -> list[Conversation]:
    """Chats that begin at random (a Poisson process), with few popular and many rare system prompts."""
    rng = random.Random(seed)

    def tokens(length: int) -> tuple[int, ...]:
        return tuple(rng.choices(range(*token_range), k=length))

    systems = [tokens(system_len) for _ in range(num_systems)]
    start_s = 0.0
    conversations = []
    for _ in range(num):
        start_s += rng.expovariate(per_s)
        turns = tuple(
            Turn(
                think_s=rng.expovariate(1 / think_s) if index else 0.0,
                user=tokens(rng.randint(*user_len)),
                max_tokens=rng.randint(*output_len),
            )
            for index in range(rng.randint(1, max_turns))
        )
        popularity = min(int(rng.paretovariate(1.0)) - 1, num_systems - 1)
        conversations.append(Conversation(start_s=start_s, system=systems[popularity], turns=turns))
    return conversations


def working_set_tokens(conversations: list[Conversation]) -> int:
    """Distinct tokens, roughly: what a cache that never evicts would hold in the end."""
    systems = {conversation.system for conversation in conversations}
    own = sum(len(turn.user) + turn.max_tokens for c in conversations for turn in c.turns)
    return sum(map(len, systems)) + own
