"""What a settings struct says about itself: for each field its flag, variable, bounds and help text.

Pure. Everything comes from the struct's annotations (`typing` and `msgspec.Meta`), so a new setting is
one field in `ksana.config` and nothing else.
"""

from __future__ import annotations

import difflib
import types
import typing
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import msgspec
from msgspec import Meta

from ksana.config import BYTE_FIELDS, GROUPS, SECRET_FIELDS

VARIABLE_PREFIX = "KSANA_"

Kind = typing.Literal["bool", "bytes", "choice", "int", "list", "text"]


@dataclass(frozen=True, kw_only=True)
class Field:
    """One setting. `kind` is how it is written; `annotation` is what msgspec checks it against."""

    name: str
    kind: Kind
    annotation: object
    base: object
    """The annotation without bounds and None: `int`, `bool`, `Literal[...]`."""
    group: str
    description: str
    default: object
    """`msgspec.NODEFAULT` for a setting that must be given."""
    choices: tuple[object, ...]
    expected: str
    """What a value must be, to follow "must be": `a whole number from 0 to 65535`."""

    @property
    def flag(self) -> str:
        return "--" + self.name.replace("_", "-")

    @property
    def variable(self) -> str:
        return VARIABLE_PREFIX + self.name.upper()

    @property
    def secret(self) -> bool:
        return self.name in SECRET_FIELDS

    @property
    def metavar(self) -> str:
        match self.kind:
            case "choice":
                return "{" + ",".join(map(str, self.choices)) + "}"
            case "int":
                return "N"
            case "bytes":
                return "SIZE"
            case "list":
                return "A,B"
            case _:
                return "FILE" if self.name.endswith(("_file", "_template")) else "TEXT"


def settings_fields(struct: type[msgspec.Struct], groups: Mapping[str, str] = GROUPS) -> tuple[Field, ...]:
    """The fields of a settings struct, in its order. `groups` maps a group's first field to its title."""
    annotations = typing.get_type_hints(struct, include_extras=True)
    fields = []
    group = ""
    for info in msgspec.structs.fields(struct):
        group = groups.get(info.name, group)
        annotation = annotations[info.name]
        kind, choices, expected = _describe(info.name, annotation)
        fields.append(
            Field(
                name=info.name,
                kind=kind,
                annotation=annotation,
                base=base_type(annotation),
                group=group,
                description=next((meta.description for meta in _metas(annotation) if meta.description), ""),
                default=info.default,
                choices=choices,
                expected=expected,
            )
        )
    return tuple(fields)


def nearest(name: str, names: Iterable[str]) -> str:
    """` (did you mean X?)` with the most similar of `names`, or nothing when none is similar."""
    found = difflib.get_close_matches(name, list(names), n=1, cutoff=0.6)
    return f" (did you mean {found[0]}?)" if found else ""


def base_type(annotation: object) -> object:
    """The type inside `Annotated[...]` and `... | None`, whichever way they are nested."""
    origin = typing.get_origin(annotation)
    if origin is typing.Annotated:
        return base_type(typing.get_args(annotation)[0])
    if origin in (typing.Union, types.UnionType):
        inner = [arg for arg in typing.get_args(annotation) if arg is not type(None)]
        return base_type(inner[0])
    return annotation


def _describe(name: str, annotation: object) -> tuple[Kind, tuple[object, ...], str]:
    """Kind, choices and expectation of an annotation such as `Annotated[int, Meta(ge=1)] | None`."""
    inner = base_type(annotation)
    if name in BYTE_FIELDS:
        return "bytes", (), "a size in bytes, such as 4096, 512MiB or 1.5GiB"
    if inner is bool:
        return "bool", (), "true or false"
    if inner is int:
        return "int", (), "a whole number" + _bounds(_metas(annotation))
    if typing.get_origin(inner) is typing.Literal:
        choices = typing.get_args(inner)
        return "choice", choices, "one of " + ", ".join(map(str, choices))
    if typing.get_origin(inner) is tuple:
        return "list", (), "texts separated by commas (in a file also a list of texts)"
    return "text", (), "a text"


def _bounds(metas: list[Meta]) -> str:
    low = next((meta.ge for meta in metas if meta.ge is not None), None)
    high = next((meta.le for meta in metas if meta.le is not None), None)
    if low is not None and high is not None:
        return f" from {low} to {high}"
    return f", {low} or more" if low is not None else f", {high} or less" if high is not None else ""


def _metas(annotation: object) -> list[Meta]:
    """All `Meta`s of an annotation, outermost first."""
    origin = typing.get_origin(annotation)
    if origin is typing.Annotated:
        inner, *extras = typing.get_args(annotation)
        return [extra for extra in extras if isinstance(extra, Meta)] + _metas(inner)
    if origin in (typing.Union, types.UnionType):
        return [meta for arg in typing.get_args(annotation) for meta in _metas(arg)]
    return []
