"""Request bodies on their way in: how many bytes of them there may be, over all connections."""

from __future__ import annotations

from quart_trio.wrappers import TrioRequest
from quart_trio.wrappers.request import TrioBody

from ksana.config import Settings
from ksana.errors import ServiceError
from ksana.gateway.limits import MAX_BODIES_BYTES


class BodyBudget:
    """Bytes of all bodies that came and are not decoded yet. Invariant: 0 <= num_bytes <= limit."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.num_bytes = 0

    @staticmethod
    def of(settings: Settings) -> BodyBudget:
        """Room for at least one body of the largest size."""
        return BodyBudget(max(MAX_BODIES_BYTES, settings.max_body_bytes))

    def take(self, num_bytes: int) -> bool:
        """Whether there is room for that many more; if so they are counted."""
        if self.num_bytes + num_bytes > self.limit:
            return False
        self.num_bytes += num_bytes
        return True

    def give_back(self, num_bytes: int) -> None:
        self.num_bytes -= num_bytes


class Body(TrioBody):
    """A body that counts what it holds. Whoever sets `budget` calls `close` in the end.

    What came is counted and not what was announced: announcing costs nothing.
    """

    budget: BodyBudget | None = None
    _num_counted = 0

    def append(self, data: bytes) -> None:
        if self.budget is not None and self._must_raise is None:
            if not self.budget.take(len(data)):
                self._refuse()
                return
            self._num_counted += len(data)
        super().append(data)

    def clear(self) -> None:
        super().clear()
        if self.budget is not None:
            self.budget.give_back(self._num_counted)
            self._num_counted = 0

    def close(self) -> None:
        """Hold and count nothing; of what may still come either."""
        self.clear()
        self.budget = None

    def _refuse(self) -> None:
        self.clear()
        self._must_raise = ServiceError(
            "too many large request bodies are arriving at once",
            status=503,
            retry_after_s=1,
            code="overloaded",
        )
        self.set_complete()


class Request(TrioRequest):
    body_class = Body
    body: Body
