"""Every exception Ksana raises on purpose.

KsanaError
  ConfigError            wrong flags or files, found before start         exit code 2
  ModelLoadError         unknown architecture, missing or broken weights  exit code 3
  RequestError           the caller's fault                               HTTP 400 404 413 422
  ServiceError           ours, or temporary                               HTTP 429 500 502 503 504
  RemoteCacheError       never reaches a caller: becomes a recompute
InvariantViolated        a bug in Ksana: the engine fails the requests it touched and recovers

Texts say what happened, with the values, and what to do about it. Anything shown to an HTTP client
comes from `RequestError` or `ServiceError`; every other exception is answered with a plain 500.
"""

from __future__ import annotations


class KsanaError(Exception):
    """Base class of all expected failures."""

    exit_code: int = 1


class ConfigError(KsanaError):
    """A flag, settings file or combination of them that cannot work. Raised before anything starts."""

    exit_code = 2


class ModelLoadError(KsanaError):
    """A model that cannot be loaded as it is. The text names the file and, if there is one, the tensor."""

    exit_code = 3


class RequestError(KsanaError):
    """The caller asked for something wrong.

    `status` is the HTTP status, `param` the field at fault, `code` a short machine-readable word.
    """

    def __init__(
        self,
        message: str,
        *,
        status: int = 400,
        param: str | None = None,
        code: str | None = None,
        type: str = "invalid_request_error",
    ) -> None:
        super().__init__(message)
        self.message = message
        self.status = status
        self.param = param
        self.code = code
        self.type = type


class ServiceError(KsanaError):
    """We cannot serve the request now, or failed while serving it.

    `retry_after_s` becomes the `Retry-After` header where it makes sense (429, 503).
    """

    def __init__(
        self,
        message: str,
        *,
        status: int = 500,
        retry_after_s: int | None = None,
        code: str | None = None,
        type: str = "server_error",
    ) -> None:
        super().__init__(message)
        self.message = message
        self.status = status
        self.retry_after_s = retry_after_s
        self.param: str | None = None
        self.code = code
        self.type = type


class RemoteCacheError(KsanaError):
    """A remote cache store misbehaved. Never shown to a caller; the prefix is recomputed instead."""


class InvariantViolated(Exception):
    """Something that must always hold did not: a bug in Ksana, not in its input."""
