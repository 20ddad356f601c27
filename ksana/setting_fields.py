"""What a settings struct says about itself, and the one check of a value that anybody gives.

For each field its flag, variable, bounds and help text. Pure. Everything comes from the struct's annotations
(`typing` and `msgspec.Meta`), so a new setting is one field in `ksana.config` and nothing else; one whose
annotation does not say what it may be is refused when the module is imported.
"""

from __future__ import annotations

import difflib
import os
import re
import types
import typing
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import msgspec
from msgspec import Meta

from ksana.byte_sizes import MAX_BYTES, format_bytes, parse_bytes
from ksana.errors import ConfigError
from ksana.setting_texts import TextRule
from ksana.shown import shown

VARIABLE_PREFIX = "KSANA_"

Kind = typing.Literal["bool", "bytes", "choice", "int", "list", "text"]

_SIZE = "a size in bytes, such as 4096, 512MiB or 1.5GiB"
_WHOLE_NUMBER = re.compile("-?[0-9]{1,30}", re.ASCII)


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
    secret: bool
    rule: TextRule | None
    """Of a text, or of each text of a list."""

    @property
    def flag(self) -> str:
        return "--" + self.name.replace("_", "-")

    @property
    def variable(self) -> str:
        return VARIABLE_PREFIX + self.name.upper()

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

    def check(self, value: object, source: str, *, is_text: bool) -> typing.Any:
        """The value as the struct holds it. `is_text`: from a source where everything is text, and `8000` may
        mean a number. Raises ConfigError that names the source, the value and what it must be."""
        try:
            if is_text and self.kind == "int" and not _WHOLE_NUMBER.fullmatch(str(value)):
                raise ValueError(value)  # msgspec would take 1e3 and 8.0, too
            checked = msgspec.convert(self._as_annotated(value), self.annotation, strict=not is_text)
            self._check_texts(checked)
        except (msgspec.ValidationError, ValueError, TypeError):
            given = "the value" if self.secret else shown(value)
            raise ConfigError(f"{source}: {given} will not do; it must be {self.expected}") from None
        return checked

    def _as_annotated(self, value: object) -> object:
        """The value in the one form that msgspec is asked about. Raises ValueError or TypeError."""
        if self.kind == "list" and isinstance(value, str):
            return [part.strip() for part in value.split(",") if part.strip()]
        if self.kind == "bytes" and value is not None:
            if not isinstance(value, str | int) or isinstance(value, bool):
                raise TypeError(value)
            num_bytes = parse_bytes(str(value))
            if not 1 <= num_bytes <= MAX_BYTES:
                raise ValueError(num_bytes)
            return num_bytes if self.base is int else str(value).strip()
        if self.rule is not None and self.rule.is_path and isinstance(value, os.PathLike):
            return os.fspath(value)
        return value

    def _check_texts(self, value: object) -> None:
        if self.rule is None or value is None:
            return
        for text in (value,) if isinstance(value, str) else typing.cast(tuple[str, ...], value):
            self.rule.check(text)


def settings_fields(
    struct: type[msgspec.Struct],
    *,
    groups: Mapping[str, str],
    secrets: frozenset[str] = frozenset(),
    byte_sizes: frozenset[str] = frozenset(),
) -> tuple[Field, ...]:
    """The fields of a settings struct, in its order. `groups` maps a group's first field to its title;
    `byte_sizes` may be written as `2GiB`. Raises TypeError for a field without bounds or rule."""
    annotations = typing.get_type_hints(struct, include_extras=True)
    fields = []
    group = ""
    for info in msgspec.structs.fields(struct):
        group = groups.get(info.name, group)
        annotation = annotations[info.name]
        metas = _metas(annotation)
        kind, choices, expected = _describe(info.name, annotation, info.name in byte_sizes)
        fields.append(
            Field(
                name=info.name,
                kind=kind,
                annotation=annotation,
                base=base_type(annotation),
                group=group,
                description=next((meta.description for meta in metas if meta.description), ""),
                default=info.default,
                choices=choices,
                expected=expected,
                secret=info.name in secrets,
                rule=_rule(metas),
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


def _describe(name: str, annotation: object, is_size: bool) -> tuple[Kind, tuple[object, ...], str]:
    """Kind, choices and expectation of an annotation such as `Annotated[int, Meta(ge=1)] | None`."""
    inner, metas = base_type(annotation), _metas(annotation)
    if inner is bool:
        return "bool", (), "true or false"
    if inner is int:
        low, high = _bounds(name, metas)
        if is_size:
            return "bytes", (), f"{_SIZE}, from {format_bytes(low)} to {format_bytes(high)}"
        return "int", (), f"a whole number from {low} to {high}"
    if typing.get_origin(inner) is typing.Literal:
        choices = typing.get_args(inner)
        return "choice", choices, _one_of(choices)
    rule = _rule(metas)
    if typing.get_origin(inner) is tuple:
        item = base_type(typing.get_args(inner)[0])
        if rule is None and typing.get_origin(item) is not typing.Literal:
            raise TypeError(f"the setting {name} does not say which texts it may hold")
        each = rule.expected if rule is not None else _one_of(typing.get_args(item))
        return "list", (), f"texts separated by commas (in a file also a list of texts), each {each}"
    if inner is not str or rule is None:
        raise TypeError(f"the setting {name} does not say what it may be")
    if is_size:
        return "bytes", (), f"{_SIZE}, from 1 B to {format_bytes(MAX_BYTES)}"
    return "text", (), rule.expected


def _one_of(choices: Iterable[object]) -> str:
    return "one of " + ", ".join(map(str, choices))


def _bounds(name: str, metas: list[Meta]) -> tuple[int, int]:
    low = next((meta.ge for meta in metas if meta.ge is not None), None)
    high = next((meta.le for meta in metas if meta.le is not None), None)
    if not isinstance(low, int) or not isinstance(high, int):
        raise TypeError(f"the setting {name} is a number without bounds")
    return low, high


def _rule(metas: list[Meta]) -> TextRule | None:
    return next((meta.extra["rule"] for meta in metas if meta.extra), None)


def _metas(annotation: object) -> list[Meta]:
    """All `Meta`s of an annotation, outermost first; of a list also those of what it holds."""
    origin = typing.get_origin(annotation)
    if origin is typing.Annotated:
        inner, *extras = typing.get_args(annotation)
        return [extra for extra in extras if isinstance(extra, Meta)] + _metas(inner)
    if origin in (typing.Union, types.UnionType, tuple):
        return [meta for arg in typing.get_args(annotation) for meta in _metas(arg)]
    return []
