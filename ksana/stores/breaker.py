"""The circuit breaker lies in `ksana.loading`, below the stores: the loader's core decides with it."""

from __future__ import annotations

from ksana.loading.breaker import BreakerPhase, BreakerSettings, BreakerState, CircuitBreaker

__all__ = ["BreakerPhase", "BreakerSettings", "BreakerState", "CircuitBreaker"]
