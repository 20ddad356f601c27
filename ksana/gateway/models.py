"""GET /v1/models and /v1/models/NAME."""

from __future__ import annotations

from typing import Any

from quart import Response
from quart_trio import QuartTrio

from ksana.gateway import sse
from ksana.gateway.context import Gateway


def model_object(gateway: Gateway) -> dict[str, Any]:
    """OpenAI's model object, with vLLM's `max_model_len`."""
    return {
        "id": gateway.model_name,
        "object": "model",
        "created": gateway.started_s,
        "owned_by": "ksana",
        "root": gateway.model_name,
        "parent": None,
        "max_model_len": gateway.client.model.max_model_len,
    }


def add_routes(app: QuartTrio, gateway: Gateway) -> None:
    @app.get("/v1/models")
    async def list_models() -> Response:
        body = {"object": "list", "data": [model_object(gateway)]}
        return Response(sse.encode_json(body), content_type="application/json")

    @app.get("/v1/models/<path:name>")
    async def show_model(name: str) -> Response:
        gateway.check_model(name)
        return Response(sse.encode_json(model_object(gateway)), content_type="application/json")
