"""Errors as HTTP answers, in OpenAI's form, for every way in which a request can go wrong."""

from __future__ import annotations

import logging
from typing import Any

import msgspec
from quart import Response
from quart_trio import QuartTrio
from werkzeug.exceptions import HTTPException, MethodNotAllowed, RequestEntityTooLarge

from ksana.errors import KsanaError, RequestError, ServiceError
from ksana.gateway.request_scope import request_scope
from ksana.messages.outputs import Aborted, Failed, Finished, Outcome

log = logging.getLogger("ksana.gateway")

ApiError = RequestError | ServiceError

CONTEXT_LENGTH_EXCEEDED = "context_length_exceeded"
EMPTY_PROMPT = "empty_prompt"
"""Codes of the engine's tokenizer, which the gateway cannot import (numpy comes with it)."""

_RETRY_AFTER_S = {429: 1, 503: 5}
"""Where whoever raises the error says nothing. Five seconds is about what a new worker takes."""


def error_body(error: ApiError) -> dict[str, Any]:
    """OpenAI's error object: {"error": {"message", "type", "param", "code"}}."""
    return {
        "error": {
            "message": error.message,
            "type": error.type,
            "param": error.param,
            "code": error.code,
        }
    }


def error_bytes(error: ApiError) -> bytes:
    """The body of an answer that is an error."""
    return msgspec.json.encode(error_body(error))


def error_response(error: ApiError) -> Response:
    """The answer to the current request, whose log line will tell the error."""
    request_scope().refusal = error
    response = Response(error_bytes(error), status=error.status, content_type="application/json")
    if isinstance(error, ServiceError):
        retry_after_s = (
            _RETRY_AFTER_S.get(error.status) if error.retry_after_s is None else error.retry_after_s
        )
        if retry_after_s is not None:
            response.headers["Retry-After"] = str(retry_after_s)
    if error.status == 401:
        response.headers["WWW-Authenticate"] = "Bearer"
    return response


def error_of(outcome: Outcome) -> ApiError | None:
    """How an ending of the engine is told to a client; None for a good one."""
    if isinstance(outcome, Finished):
        return None
    if isinstance(outcome, Aborted):
        return ServiceError(
            f"the request was aborted: {outcome.reason}", status=503, retry_after_s=1, code="aborted"
        )
    return _failed(outcome)


def _failed(failed: Failed) -> ApiError:
    if 400 <= failed.status < 500 and failed.status != 429:
        return RequestError(
            failed.message,
            status=failed.status,
            param=failed.param,
            code=failed.code,
            # An engine that names no type means the usual one for the status.
            type="invalid_request_error" if failed.error_type == "server_error" else failed.error_type,
        )
    return ServiceError(
        failed.message,
        status=failed.status,
        retry_after_s=failed.retry_after_s,
        code=failed.code,
        type=failed.error_type,
    )


def internal_error(request_id: str) -> ServiceError:
    """What is told of a bug: nothing but where to find it in the log."""
    return ServiceError(
        f"internal error; the server's log has it under request id {request_id}", code="internal_error"
    )


def _http_error(error: HTTPException) -> ApiError:
    status = error.code or 500
    if isinstance(error, RequestEntityTooLarge):
        return RequestError(
            "the request body is larger than this server accepts (--max-body-bytes)",
            status=413,
            code="body_too_large",
        )
    if status == 404:
        return RequestError("there is no such path here", status=404, code="not_found")
    if status == 405:
        return RequestError("this path does not know that method", status=405, code="method_not_allowed")
    if status == 408:
        return RequestError("the request body took too long to arrive", status=408, code="request_timeout")
    if status >= 500:
        return ServiceError(error.name, status=status)
    return RequestError(error.description or error.name, status=status)


def add_handlers(app: QuartTrio) -> None:
    """Make `app` answer every exception in OpenAI's form; unknown ones are logged and told as a plain 500."""

    @app.errorhandler(HTTPException)
    async def on_http_error(error: HTTPException) -> Response:
        response = error_response(_http_error(error))
        if isinstance(error, MethodNotAllowed) and error.valid_methods:
            response.headers["Allow"] = ", ".join(sorted(error.valid_methods))
        return response

    @app.errorhandler(KsanaError)
    async def on_ksana_error(error: KsanaError) -> Response:
        if isinstance(error, RequestError | ServiceError):
            return error_response(error)
        request_id = request_scope().request_id
        log.error("request id %s: unexpected %s: %s", request_id, type(error).__name__, error)
        return error_response(internal_error(request_id))

    @app.errorhandler(Exception)
    async def on_bug(error: Exception) -> Response:
        request_id = request_scope().request_id
        log.error("internal error, request id %s", request_id, exc_info=error)
        return error_response(internal_error(request_id))
