"""After a crash of the worker: who may run, so that the one request that causes it is found.

Policy. The requests of the steps in flight are suspects. They are tried again in halves, one group at a
time and with nobody else in the engine. A group that crashes is halved again (of its members only those in
flight are suspects; the rest stays a group of its own). A member is cleared when it has computed again, in
a step that is done, every token that the crashed steps had tried, or has ended. When all members of a group
are cleared they step aside and the next group is tried; after the last group everything runs as usual.

A request fails (500) when it was the only one in flight in a crash and had been a suspect before without
being cleared since. So one crash alone, such as a worker killed from outside, never fails anybody; an
innocent may be present in several crashes and is not failed, as it was never alone; and one poisonous
request among n is found after at most max(2, ceil(log2(n)) + 1) crashes, failing alone. The executor must
allow that many restarts in a row.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from ksana.messages.base import RequestId


class Trials(msgspec.Struct):
    """Groups of suspects. Invariants: no group is empty; no request is in two groups."""

    groups: list[list[RequestId]] = []
    """The first is being tried now. Members that are cleared or gone have left it."""

    @property
    def active(self) -> bool:
        return bool(self.groups)

    def may_run(self, request_id: RequestId) -> bool:
        return not self.groups or request_id in self.groups[0]

    def split(self, suspects: list[RequestId]) -> None:
        """A crash with these requests in flight: try them in halves, before everything else."""
        if not suspects:
            return
        later = [
            rest
            for group in self.groups
            if (rest := [request_id for request_id in group if request_id not in suspects])
        ]
        middle = (len(suspects) + 1) // 2
        halves = [half for half in (suspects[:middle], suspects[middle:]) if half]
        self.groups = halves + later

    def forget(self, request_ids: Iterable[RequestId]) -> bool:
        """These are cleared or gone. True when that ended the trial of the first group."""
        if not self.groups:
            return False
        gone = set(request_ids)
        first = self.groups[0]
        groups = [[member for member in group if member not in gone] for group in self.groups]
        ended = bool(first) and not groups[0]
        self.groups = [group for group in groups if group]
        return ended
