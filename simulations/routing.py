"""Which of several engines gets a request."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, Protocol

from simulations.requests import ListedText, NamedText, SimRequest

Routing = Literal["round_robin", "least_requests", "prefix_affinity"]

_MAX_NODES = 1 << 20


class Load(Protocol):
    """What a router sees of an engine."""

    @property
    def num_open(self) -> int:
        """Requests added and not ended."""
        ...


class Router:
    """Chooses an index. Deterministic: no rule draws or depends on hashes.

    round_robin: in turn. least_requests: the fewest open ones, of equals the one that was not chosen for the
    longest time. prefix_affinity: where most of the prompt's leading parts went last, unless that engine has
    more than `spread` times as many requests open as the least loaded one (and 4 more); else the least
    loaded.
    """

    def __init__(self, rule: Routing, engines: Sequence[Load], spread: float = 1.5) -> None:
        self._rule = rule
        self._engines = engines
        self._spread = spread
        self._num_routed = 0
        self._last = [-1] * len(engines)
        """When each was chosen last."""
        self._children: dict[tuple[int, NamedText | ListedText | str], int] = {}
        self._went_to: list[int] = [0]
        """By node of the tree of prompt parts: the engine that was given it last."""

    def choose(self, request: SimRequest) -> int:
        if len(self._engines) == 1:
            return 0
        if self._rule == "round_robin":
            index = self._num_routed % len(self._engines)
        elif self._rule == "least_requests":
            index = self._least()
        else:
            index = self._by_prefix(request)
        self._last[index] = self._num_routed
        self._num_routed += 1
        return index

    def _least(self) -> int:
        return min(range(len(self._engines)), key=lambda i: (self._engines[i].num_open, self._last[i]))

    def _by_prefix(self, request: SimRequest) -> int:
        if len(self._went_to) > _MAX_NODES:
            self._children.clear()
            self._went_to = [0]
        path, known = self._walk(request)
        index = least = self._least()
        if known:
            index = self._went_to[known]
            if self._engines[index].num_open > self._spread * self._engines[least].num_open + 4:
                index = least
        for node in path:
            self._went_to[node] = index
        return index

    def _walk(self, request: SimRequest) -> tuple[list[int], int]:
        """The nodes of the prompt's parts, new ones included, and the last of them that was known (or 0)."""
        path: list[int] = []
        node = known = 0
        for part in (request.cache_salt, *request.prompt.parts):
            child = self._children.get((node, part))
            if child is None:
                child = self._children[node, part] = len(self._went_to)
                self._went_to.append(0)
            elif part != request.cache_salt:
                known = child
            node = child
            path.append(node)
        return path, known
