"""What every route of one gateway shares."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from ksana.client import Client
from ksana.config import Settings
from ksana.errors import RequestError
from ksana.gateway.metrics import Metrics
from ksana.gateway.traffic import Traffic


@dataclass(frozen=True)
class Gateway:
    """One per application. `wall_clock` gives seconds since 1970, for the `created` fields."""

    client: Client
    settings: Settings
    metrics: Metrics
    traffic: Traffic
    wall_clock: Callable[[], float] = time.time
    started_s: int = field(default_factory=lambda: int(time.time()))

    @property
    def model_name(self) -> str:
        return self.client.model.name

    def check_model(self, name: str | None) -> None:
        """Raises RequestError 404 for a model this server does not serve. No name means the one it does."""
        if name is not None and name != self.model_name:
            raise RequestError(
                f"the model {name[:200]!r} is not served here; this server has {self.model_name!r}",
                status=404,
                param="model",
                code="model_not_found",
            )
