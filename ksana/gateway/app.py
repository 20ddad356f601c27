"""The Quart application: routes, and what happens before and after each of them."""

from __future__ import annotations

from quart import Response, g, request
from quart_trio import QuartTrio

from ksana.client import Client
from ksana.config import Settings, read_api_keys
from ksana.gateway import chat, completions, errors, generate, health, models, tokenize
from ksana.gateway.asgi import HttpConnection
from ksana.gateway.auth import OPEN_PATHS, ApiKeys
from ksana.gateway.bodies import BodyBudget, Request
from ksana.gateway.context import Gateway
from ksana.gateway.cors import Cors
from ksana.gateway.limits import BODY_TIMEOUT_S
from ksana.gateway.metrics import Metrics
from ksana.gateway.request_id import HEADER
from ksana.gateway.request_scope import request_scope
from ksana.gateway.traffic import Traffic


class App(QuartTrio):
    """Quart under trio, with our handling of one request."""

    asgi_http_class = HttpConnection
    request_class = Request

    def __init__(self, settings: Settings) -> None:
        super().__init__("ksana.gateway", static_folder=None)
        self.body_budget = BodyBudget.of(settings)


def create_gateway(client: Client, settings: Settings) -> Gateway:
    return Gateway(client=client, settings=settings, metrics=Metrics(client), traffic=Traffic())


def create_app(gateway: Gateway) -> App:
    """An ASGI application that answers for `gateway.client`.

    Raises ConfigError for an API key file that cannot be used.
    """
    app = App(gateway.settings)
    app.config["MAX_CONTENT_LENGTH"] = gateway.settings.max_body_bytes
    app.config["BODY_TIMEOUT"] = BODY_TIMEOUT_S
    # Quart would cut streams after a minute; the engine's deadline and the send timeout bound them.
    app.config["RESPONSE_TIMEOUT"] = None
    app.config["PROPAGATE_EXCEPTIONS"] = False
    app.url_map.strict_slashes = False
    app.url_map.merge_slashes = False  # a redirect would repeat whatever the client says our host is
    errors.add_handlers(app)
    _add_hooks(app, ApiKeys(read_api_keys(gateway.settings)), Cors(gateway.settings.allowed_origins))
    for routes in (chat, completions, generate, tokenize, models, health):
        routes.add_routes(app, gateway)
    return app


def _add_hooks(app: App, keys: ApiKeys, cors: Cors) -> None:
    @app.before_request
    async def admit() -> Response | None:
        request_scope().is_routed = True
        g.key_salt = ""
        if request.method == "OPTIONS" and "Access-Control-Request-Method" in request.headers:
            # Browsers ask this without credentials.
            return Response(b"", status=204, headers=dict(cors.preflight(request.headers.get("Origin"))))
        if request.path not in OPEN_PATHS:
            g.key_salt = keys.check(request.headers.get("Authorization"))
        return None

    @app.after_request
    async def sign(response: Response) -> Response:
        response.headers[HEADER] = request_scope().request_id
        for name, value in cors.headers(request.headers.get("Origin")).items():
            response.headers[name] = value
        return response
