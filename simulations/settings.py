"""Settings of a world and of its engines, as `key=value` texts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from ksana.errors import ConfigError
from ksana.setting_fields import nearest
from simulations.engine import EngineSpec
from simulations.scenario import WorldSpec


def with_settings(world: WorldSpec, settings: Mapping[str, Any]) -> WorldSpec:
    """The world with these fields of its own, or of all its engines, set. Raises ConfigError."""
    of_engines = {name: value for name, value in settings.items() if name in EngineSpec.__struct_fields__}
    of_world = {name: value for name, value in settings.items() if name not in of_engines}
    for name in of_world:
        if name not in WorldSpec.__struct_fields__:
            near = nearest(name, _all_names())
            raise ConfigError(f"there is no setting {name[:80]!r}{near}; there are {', '.join(_all_names())}")
    engines = [msgspec.to_builtins(engine) | of_engines for engine in world.engines]
    try:
        changed = msgspec.convert(msgspec.to_builtins(world) | {"engines": engines} | of_world, WorldSpec)
    except msgspec.ValidationError as error:
        raise ConfigError(f"settings: {error}") from None
    changed.check()
    return changed


def _all_names() -> list[str]:
    return sorted({*EngineSpec.__struct_fields__, *WorldSpec.__struct_fields__})


def parse_settings(texts: Sequence[str]) -> dict[str, Any]:
    """`key=value` texts; a value is JSON or, if it is none, text. Raises ConfigError."""
    settings: dict[str, Any] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals or not name:
            raise ConfigError(f"a setting is written key=value, not {text[:80]!r}")
        try:
            settings[name.strip().replace("-", "_")] = msgspec.json.decode(value)
        except (msgspec.DecodeError, RecursionError):
            settings[name.strip().replace("-", "_")] = value
    return settings
