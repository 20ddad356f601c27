"""Chooses the batches from which a cost model can be fitted: every kind of step, out to the engine's limits.

A cost is trusted only between what was measured, so each axis is walked from its least to its most, in steps
of a factor: tokens of a prefill, KV before it, decodes, their KV, and both kinds in one step. What is most
telling comes first (ends, then middles, then quarters), so that a run which is cut short has still been
everywhere.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ksana.perf.batches import Batch
from ksana.perf.limits import Limits, fits
from ksana.perf.result import RequestGroup

Groups = Sequence[tuple[int, int, int]]
"""(sequence length, tokens computed, requests) of each group."""


def sweep_batches(limits: Limits, *, quick: bool = False) -> list[Batch]:
    """Batches for an engine with these limits, the most telling first; about 140, or 75 if quick (fewer
    where limits are narrow)."""
    finder = _Finder(limits, quick)
    kinds = (finder.prefills(), finder.decodes(), finder.late_prefills(), finder.mixed(), finder.several())
    batches: dict[tuple[RequestGroup, ...], Batch] = {}
    for batch in _interleaved([_ends_first(kind) for kind in kinds]):
        batches.setdefault(batch.groups, batch)
    return list(batches.values())


class _Finder:
    """Makes batches, and leaves out those that the engine cannot run."""

    def __init__(self, limits: Limits, quick: bool) -> None:
        self._limits = limits
        self._quick = quick
        self._budget = min(limits.max_num_batched_tokens, limits.max_model_len - 1)
        self._longest = self._longest_alone()

    def prefills(self) -> list[Batch]:
        """A prompt from its beginning. Steps of kernels show here, so the axis is walked most closely."""
        factors = 2 if self._quick else 4
        return self._made([self._prefill(tokens, 0) for tokens in _axis(1, self._budget, factors)])

    def late_prefills(self) -> list[Batch]:
        """A chunk with KV before it."""
        chunks = _axis(16, self._budget, 1)[:: 3 if self._quick else 2]
        chunks = sorted({*chunks, self._budget})
        return self._made(
            [
                self._prefill(tokens, kv)
                for kv in self._kv_axis(self._longest - self._budget)
                for tokens in chunks
            ]
        )

    def decodes(self) -> list[Batch]:
        """So many decodes with so much KV each, up to what the pools hold; and some with unequal KV."""
        most = min(self._limits.max_num_seqs, self._limits.max_num_batched_tokens)
        made = []
        for num in _axis(1, most, 1):
            room = self._largest(lambda kv, num=num: [(kv + 1, 1, num)], self._longest)  # type: ignore[misc]
            made += [self._decodes(num, kv) for kv in self._kv_axis(room)]
            if num >= 4 and not self._quick:
                few, many = max(1, num // 8), num - max(1, num // 8)
                unequal = [(max(2, room // 2), 1, few), (max(2, room // 16), 1, many)]
                made.append((f"{few} decodes at {room // 2}, {many} at {room // 16}", unequal))
        return self._made(made)

    def mixed(self) -> list[Batch]:
        """A chunk and decodes in one step."""
        made = []
        decodes = _axis(1, max(1, min(self._limits.max_num_seqs - 1, self._budget // 2)), 1)
        for num in decodes[:: 3 if self._quick else 2]:
            for tokens in sorted({16, (self._budget - num) // 4, self._budget - num}):
                for kv in self._kv_axis(self._longest // 4)[::2]:
                    groups = [(tokens + kv, tokens, 1), (kv + 1, 1, num)]
                    made.append((f"prefill {tokens} after {kv}, {num} decodes at {kv}", groups))
        return self._made(made)

    def several(self) -> list[Batch]:
        """Several prompts in one step, from their beginnings, and with as much KV before each as there is
        room for: so they come when their prefixes were cached, and read far more KV than one prompt can."""
        made: list[tuple[str, Groups]] = []
        for num in _axis(2, min(self._limits.max_num_seqs, self._budget // 2), 1)[:: 3 if self._quick else 2]:
            short = max(2, self._budget // num // 4)
            lengths = sorted({self._budget // num, short})
            made += [(f"{num} prefills of {tokens}", [(tokens, tokens, num)]) for tokens in lengths]
            room = self._largest(
                lambda kv, num=num, short=short: [(short + kv, short, num)],  # type: ignore[misc]
                self._longest,
            )
            if room > 0:
                made.append((f"{num} prefills of {short} after {room}", [(short + room, short, num)]))
        return self._made(made)

    def _kv_axis(self, most: int) -> list[int]:
        """Lengths of KV from one block on."""
        least = self._limits.cache.block_size
        if most < least:
            return [most] if most > 0 else []
        axis = _axis(least, most, 1)
        return sorted({*axis[:: 4 if self._quick else 2], axis[-1]})

    def _prefill(self, tokens: int, kv: int) -> tuple[str, Groups]:
        name = f"prefill {tokens} after {kv}" if kv else f"prefill {tokens}"
        return name, [(tokens + kv, tokens, 1)]

    def _decodes(self, num: int, kv: int) -> tuple[str, Groups]:
        return f"{num} decodes at {kv}", [(kv + 1, 1, num)]

    def _made(self, wanted: Sequence[tuple[str, Groups]]) -> list[Batch]:
        return [_batch(name, groups) for name, groups in wanted if self._fits(groups)]

    def _fits(self, groups: Groups) -> bool:
        if any(computed < 1 or length < computed or num < 1 for length, computed, num in groups):
            return False
        requests = [(length, computed) for length, computed, num in groups for _ in range(num)]
        return fits(requests, self._limits)

    def _largest(self, groups_of: Callable[[int], Groups], most: int) -> int:
        """The largest value for which the batch fits, by bisection; 0 if none does."""
        low, high = 0, most
        while low < high:
            middle = (low + high + 1) // 2
            if self._fits(groups_of(middle)):
                low = middle
            else:
                high = middle - 1
        return low

    def _longest_alone(self) -> int:
        """Tokens of the longest request, when there is no other."""
        return self._largest(lambda length: [(length, 1, 1)], self._limits.max_model_len - 1)


def _batch(name: str, groups: Groups) -> Batch:
    return Batch(
        name=name,
        place=(f"batch {name!r}",),
        groups=tuple(
            RequestGroup(sequence_len=length, forwarding_token_num=computed, request_num=num)
            for length, computed, num in groups
        ),
    )


def _axis(least: int, most: int, per_doubling: int) -> list[int]:
    """Whole numbers from least to most, both included, in steps of the `per_doubling`-th root of 2."""
    values = {least, most} if most > least else {most}
    value, factor = float(least), 2 ** (1 / per_doubling)
    while value < most:
        values.add(round(value))
        value *= factor
    return sorted(value for value in values if value >= 1)


def _ends_first(batches: Sequence[Batch]) -> list[Batch]:
    """The last, the first, then what halves the gaps, again and again."""
    num = len(batches)
    if num == 0:
        return []
    order = dict.fromkeys([num - 1, 0])
    stride = num
    while stride > 1:
        stride = -(-stride // 2)
        order.update(dict.fromkeys(range(0, num, stride)))
    order.update(dict.fromkeys(range(num)))
    return [batches[index] for index in order]


def _interleaved(kinds: Sequence[Sequence[Batch]]) -> list[Batch]:
    longest = max(map(len, kinds))
    return [kind[place] for place in range(longest) for kind in kinds if place < len(kind)]
