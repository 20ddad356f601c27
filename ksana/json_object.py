"""JSON objects from files that nobody vouches for.

A JSON text of a few megabytes can stand for gigabytes of Python objects (`[[],[],...`), nest deeper than the
stack, name a key twice, or hold half of a character. Its punctuation is counted before it is read.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from ksana.errors import ModelLoadError
from ksana.input_file import read_input
from ksana.shown import shown, shown_path

MAX_ITEMS = 1 << 20
"""Keys, objects, lists and items, as many as there may be in all: at most 200 MB of objects."""
_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")


def read_json_object(
    path: Path, max_bytes: int, *, max_items: int = MAX_ITEMS, unique: bool = False
) -> dict[str, Any]:
    """The object that a file of a model holds. Raises ModelLoadError, with its name, for anything else.

    `unique`: a key that stands twice is an error, where it would not be clear which one counts.
    """
    content = read_input(path, max_bytes, f"{shown_path(path)}:", error=ModelLoadError, pipes=False)
    return decode_json_object(content, shown_path(path), max_items=max_items, unique=unique)


def decode_json_object(
    content: bytes, source: str, *, max_items: int = MAX_ITEMS, unique: bool = False
) -> dict[str, Any]:
    """The object that the bytes are. `source` names them in errors. Raises ModelLoadError."""
    num_items = sum(map(content.count, (b":", b",", b"[", b"{")))
    if num_items > max_items:
        raise ModelLoadError(f"{source}: holds about {num_items} items; {max_items} are allowed")
    try:
        value = json.loads(content.decode("utf-8-sig"), object_pairs_hook=_unique if unique else None)
        if _SURROGATE.search(content):
            json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise ModelLoadError(f"{source}: holds half of a character (a lone surrogate)") from None
    except UnicodeDecodeError as error:
        raise ModelLoadError(f"{source}: not UTF-8: byte {error.start} cannot be read") from None
    except RecursionError:
        raise ModelLoadError(f"{source}: not a JSON object: nested too deeply") from None
    except ValueError as error:
        raise ModelLoadError(f"{source}: not a JSON object: {error}") from None
    if not isinstance(value, dict):
        raise ModelLoadError(f"{source}: not a JSON object, but {shown(value)}")
    return value


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for index, name in enumerate(names) if name in names[:index])
        raise ValueError(f"the key {shown(twice)} stands twice")
    return values
