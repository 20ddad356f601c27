"""How often something that breaks may be started again."""

from __future__ import annotations

from collections import deque


class RestartLimiter:
    """Allows at most `max_restarts` in any `within_s` seconds, counted since the last `forgive`."""

    def __init__(self, max_restarts: int, within_s: float) -> None:
        self.max_restarts = max_restarts
        self.within_s = within_s
        self._restarts_s: deque[float] = deque()

    def allow(self, now_s: float) -> bool:
        """Whether to restart now; a restart that is allowed is counted."""
        while self._restarts_s and self._restarts_s[0] <= now_s - self.within_s:
            self._restarts_s.popleft()
        if len(self._restarts_s) >= self.max_restarts:
            return False
        self._restarts_s.append(now_s)
        return True

    def forgive(self) -> None:
        """It worked: what broke before is forgotten."""
        self._restarts_s.clear()
