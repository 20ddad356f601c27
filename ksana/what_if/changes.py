"""Which recorded settings may be changed, and how: `max_num_seqs=8`."""

from __future__ import annotations

import difflib
import re
import typing
from collections.abc import Sequence
from typing import Any

import msgspec

from ksana.cache.cache_config import SwaEviction
from ksana.errors import ConfigError
from ksana.journal.format import RecordedSettings
from ksana.scheduling.settings import Admission

MAX_COUNTS = {
    "max_num_seqs": 4096,
    "max_num_batched_tokens": 1 << 20,
    "max_new_per_plan": 4096,
    "num_fa_blocks": 1 << 22,
    "num_swa_blocks": 1 << 22,
}
"""Names, with the largest value; the smallest is 1."""
_BOOLEANS = ("plan_ahead", "enable_prefix_caching", "window_open_at_start")
_WORDS = {
    "swa_eviction": typing.get_args(SwaEviction),
    "admission": typing.get_args(Admission),
}
NAMES = (*MAX_COUNTS, *_BOOLEANS, *_WORDS)


def changed(settings: RecordedSettings, changes: Sequence[str]) -> RecordedSettings:
    """The settings with `name=value` for each of `changes`; of a name that stands twice the last counts.

    Raises ConfigError for a name or a value that cannot be.
    """
    values = dict(_parse(change) for change in changes)
    scheduler = _with(settings.scheduler, values)
    cache = _with(settings.cache, values)
    if settings.cache.sliding_window is None and {"num_swa_blocks", "swa_eviction"} & values.keys():
        raise ConfigError("--set: the recorded model has no sliding layers")
    return msgspec.structs.replace(settings, scheduler=scheduler, cache=cache)


def without_remote_cache(settings: RecordedSettings) -> RecordedSettings:
    """As they are, but nothing is loaded or saved."""
    return msgspec.structs.replace(
        settings,
        scheduler=msgspec.structs.replace(settings.scheduler, max_remote_loads=0),
        cache=msgspec.structs.replace(settings.cache, write_back=False),
        loader=None,
    )


def _parse(change: str) -> tuple[str, Any]:
    name, equals, text = change.partition("=")
    name = name.strip().replace("-", "_")
    if not equals or name not in NAMES:
        near = difflib.get_close_matches(name, NAMES, n=1)
        hint = f" (did you mean {near[0]}?)" if near else ""
        raise ConfigError(f"--set {change[:80]!r}{hint}: say NAME=VALUE with one of {', '.join(NAMES)}")
    text = text.strip()
    if name in MAX_COUNTS:
        if re.fullmatch("[0-9]{1,12}", text, re.ASCII) is None or not 1 <= int(text) <= MAX_COUNTS[name]:
            raise ConfigError(f"--set {name}: {text[:40]!r} is no whole number from 1 to {MAX_COUNTS[name]}")
        return name, int(text)
    if name in _BOOLEANS:
        if text not in ("true", "false"):
            raise ConfigError(f"--set {name}: {text[:40]!r} is neither true nor false")
        return name, text == "true"
    if text not in _WORDS[name]:
        raise ConfigError(f"--set {name}: {text[:40]!r} is none of {', '.join(_WORDS[name])}")
    return name, text


def _with(struct: Any, values: dict[str, Any]) -> Any:
    own = {name: value for name, value in values.items() if name in struct.__struct_fields__}
    return msgspec.structs.replace(struct, **own)
