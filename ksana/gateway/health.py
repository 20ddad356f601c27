"""GET /health, /ready, /version and /metrics: what probes and dashboards ask.

Healthy means: the engine gets on with the work it has. Ready means: send requests here. A worker that is
being restarted is healthy but not ready; a server that drains is too.
"""

from __future__ import annotations

from importlib.metadata import version

from quart import Response
from quart_trio import QuartTrio

from ksana.errors import ServiceError
from ksana.gateway import sse
from ksana.gateway.context import Gateway
from ksana.gateway.metrics import METRICS_CONTENT_TYPE


def _ok(status: str) -> Response:
    return Response(sse.encode_json({"status": status}), content_type="application/json")


def add_routes(app: QuartTrio, gateway: Gateway) -> None:
    @app.get("/health")
    async def health() -> Response:
        reason = gateway.client.status().unhealthy_because(float(gateway.settings.stall_timeout))
        if reason is not None:
            raise ServiceError(reason, status=503, code="unhealthy")
        return _ok("ok")

    @app.get("/ready")
    async def ready() -> Response:
        gateway.traffic.check_open()
        status = gateway.client.status()
        if status.draining or status.broken:
            raise ServiceError("the engine takes no requests", status=503, code="not_ready")
        if status.worker_state != "ready":
            raise ServiceError(f"the worker is {status.worker_state}", status=503, code="not_ready")
        return _ok("ready")

    @app.get("/version")
    async def show_version() -> Response:
        return Response(sse.encode_json({"version": version("ksana")}), content_type="application/json")

    @app.get("/metrics")
    async def metrics() -> Response:
        return Response(gateway.metrics.render(), content_type=METRICS_CONTENT_TYPE)
