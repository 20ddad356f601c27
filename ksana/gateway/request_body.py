"""From a request body to a checked struct: a field is understood, neutral, or refused by its name."""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from typing import Any, TypeVar

import msgspec
from quart import request

from ksana.errors import RequestError

T = TypeVar("T")

Neutral = Mapping[str, tuple[Any, ...]]
"""Fields that exist elsewhere but not here yet, with the values at which they change nothing."""

_AT = re.compile(r" - at `\$\.?(.*)`$", re.DOTALL)
_UNKNOWN = re.compile(r"unknown field `(.*)`$", re.DOTALL)
_QUOTED_VALUE = re.compile(r"Invalid enum value .*", re.DOTALL)
_MISSING = re.compile(r"missing required field `(.*)`$", re.DOTALL)


async def read_request(kind: type[T], neutral: Neutral) -> T:
    """The current request's body as `kind`.

    Raises RequestError 400 that names the field at fault, and 415 for a body that is compressed.
    """
    encodings = request.headers.get("Content-Encoding", "").lower().split(",")
    if any(encoding.strip() not in ("", "identity") for encoding in encodings):
        raise RequestError(
            "bodies with a 'Content-Encoding' are not read here; send the JSON itself",
            status=415,
            code="unsupported_content_encoding",
        )
    body = await request.get_data(cache=False, as_text=False, parse_form_data=False)
    return decode(body, kind, neutral)


def decode(body: bytes, kind: type[T], neutral: Neutral) -> T:
    """`body` (JSON, one object) as `kind`. Raises RequestError 400 that names the field at fault.

    Cost: linear in the body; numbers and nesting are bounded by the JSON decoder.
    """
    fields = _decode_object(body)
    check_neutral(fields, neutral)
    return convert(fields, kind)


def check_neutral(fields: dict[str, Any], neutral: Neutral, prefix: str = "") -> None:
    """Take the `neutral` fields out of `fields`. Raises RequestError 400 for one that asks for something."""
    for name, allowed in neutral.items():
        if name in fields:
            _check_value(prefix + name, fields.pop(name), allowed)


def convert(fields: dict[str, Any], kind: type[T], prefix: str = "") -> T:
    """`fields` as `kind`. Raises RequestError 400 that names the field at fault, with `prefix` before it."""
    try:
        return msgspec.convert(fields, kind)
    except msgspec.ValidationError as error:
        raise _named(str(error), kind, prefix) from None


def _decode_object(body: bytes) -> dict[str, Any]:
    try:
        return msgspec.json.decode(body, type=dict[str, Any])
    except RecursionError:
        raise RequestError("the JSON in the body is nested too deeply", code="invalid_json") from None
    except UnicodeDecodeError:
        raise RequestError("the body is not valid UTF-8", code="invalid_json") from None
    except msgspec.ValidationError as error:
        raise RequestError(f"the body must be a JSON object: {error}", code="invalid_json") from None
    except (msgspec.DecodeError, ValueError) as error:
        raise RequestError(f"the body is not valid JSON: {error}", code="invalid_json") from None


def _check_value(name: str, value: Any, allowed: tuple[Any, ...]) -> None:
    # 1 == True in Python, but not for a client.
    if value is None or any(
        value == one and isinstance(value, bool) == isinstance(one, bool) for one in allowed
    ):
        return
    choices = " or ".join(msgspec.json.encode(one).decode() for one in (*allowed, None))
    raise RequestError(
        f"{name!r} is not supported by this server yet; leave it out or send {choices}",
        param=name,
        code="unsupported_parameter",
    )


def _named(text: str, kind: type[Any], prefix: str) -> RequestError:
    """A RequestError from msgspec's text, which ends in the path of the value at fault."""
    at = _AT.search(text)
    path = at[1] if at else ""
    what = text[: at.start()] if at else text
    inside = prefix + (f"{path}." if path else "")
    if unknown := _UNKNOWN.search(what):
        hint = "" if path else _nearest(unknown[1], kind)
        param = (inside + unknown[1])[:200]
        return RequestError(f"unknown field {param!r}{hint}", param=param, code="unknown_parameter")
    if missing := _MISSING.search(what):
        param = inside + missing[1]
        return RequestError(f"field {param!r} is required", param=param, code="missing_parameter")
    param = prefix + path
    # msgspec quotes the whole value, however long, and a prompt in the wrong field is a prompt.
    what = _QUOTED_VALUE.sub("it is no value that is known here", what)
    return RequestError(f"field {param!r}: {what}", param=param or None, code="invalid_value")


def _nearest(name: str, kind: type[Any]) -> str:
    names = [field.encode_name for field in msgspec.structs.fields(kind)]
    close = difflib.get_close_matches(name[:64], names, n=1)
    return f"; did you mean {close[0]!r}?" if close else ""
