"""Errors in the words of the request: the engine's names of fields become those that the client sent."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from ksana.errors import RequestError

Names = Mapping[str, str]
"""The engine's name of a field, to the one in the request. Those that are missing are the same."""


def renamed(error: RequestError, names: Names) -> RequestError:
    """The same error, about the fields of the request.

    In the text, names with an underscore are exchanged, wherever they stand, and the name of the field at
    fault at the beginning: "prompt" and "stop" are also words.
    """
    param = error.param
    if param is None:
        return error
    words = {name: new for name, new in names.items() if "_" in name}
    text = _WORD.sub(lambda found: words.get(found[0], found[0]), error.message)
    if param in names and param not in words and text.startswith(param + " "):
        text = names[param] + text.removeprefix(param)
    return RequestError(
        text, status=error.status, param=names.get(param, param), code=error.code, type=error.type
    )


_WORD = re.compile(r"(?<![\w.])\w+")


@contextmanager
def naming(names: Names) -> Iterator[None]:
    """What is raised inside leaves as `renamed`."""
    try:
        yield
    except RequestError as error:
        raise renamed(error, names) from None
