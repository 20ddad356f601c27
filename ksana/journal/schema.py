"""Every message and every state a journal may hold, and a hash of how they are defined.

A journal is read by the Ksana that wrote it, or by one whose messages, states and settings are the same: with
others a replay would compare what cannot be compared.
"""

from __future__ import annotations

import functools
import hashlib
import importlib
import pkgutil
import types
import typing
from typing import Any, Union

import msgspec

import ksana.messages
from ksana.cache.block_allocator import AllocatorSnapshot
from ksana.cache.swa_manager import ManagerSnapshot
from ksana.journal.format import RecordedSettings
from ksana.loading.state import LoaderState
from ksana.messages.base import Message
from ksana.runtime.actor import Address
from ksana.scheduling.state import SchedulerState
from ksana.tokenizers.core import TokenizerState

STATE_TYPES: dict[Address, Any] = {
    "scheduler": SchedulerState,
    "block_allocator": AllocatorSnapshot,
    "swa_cache_manager": ManagerSnapshot,
    "remote_cache_loader": LoaderState,
    "tokenizer": TokenizerState,
}
"""The actors that can be recorded, and what a snapshot of each holds."""


@functools.cache
def message_types() -> tuple[type[Message], ...]:
    """All messages of `ksana.messages`, by name."""
    for module in pkgutil.iter_modules(ksana.messages.__path__, "ksana.messages."):
        importlib.import_module(module.name)
    found: set[type[Message]] = set()

    def collect(kind: type[Message]) -> None:
        for below in kind.__subclasses__():
            collect(below)
        if not kind.__subclasses__() and kind.__module__.startswith("ksana.messages."):
            found.add(kind)

    collect(Message)
    return tuple(sorted(found, key=lambda kind: kind.__name__))


@functools.cache
def message_decoder() -> msgspec.msgpack.Decoder[Message]:
    """Reads any message from msgpack."""
    return msgspec.msgpack.Decoder(Union[message_types()])  # noqa: UP007


@functools.cache
def schema_hash() -> str:
    """SHA-256 over the definition of every message, every state, the settings, and all they are made of."""
    described: dict[str, str] = {}
    for kind in (*message_types(), *STATE_TYPES.values(), RecordedSettings):
        _describe(kind, described)
    digest = hashlib.sha256()
    for name in sorted(described):
        digest.update(f"{name}: {described[name]}\n".encode())
    return digest.hexdigest()


def _describe(kind: Any, described: dict[str, str]) -> None:
    """Add the definition of a type and of every struct and dict it is made of, each once."""
    if isinstance(kind, type) and (issubclass(kind, msgspec.Struct) or typing.is_typeddict(kind)):
        name = f"{kind.__module__}.{kind.__qualname__}"
        if name in described:
            return
        described[name] = ""
        hints = typing.get_type_hints(kind)
        fields = [f"{field}: {_name(hint)}" for field, hint in hints.items()]
        if issubclass(kind, msgspec.Struct):
            config = kind.__struct_config__
            fields.append(f"({config.tag}, {config.array_like})")
        described[name] = ", ".join(fields)
        for hint in hints.values():
            _describe(hint, described)
        return
    for part in typing.get_args(kind):
        _describe(part, described)


def _name(hint: Any) -> str:
    """A type in words that do not depend on how a version of Python shows it."""
    arguments = typing.get_args(hint)
    origin = typing.get_origin(hint)
    if origin in (Union, types.UnionType):
        return " | ".join(map(_name, arguments))
    if origin is typing.Literal:
        return f"Literal{list(arguments)!r}"
    if origin is not None:
        return f"{_name(origin)}[{', '.join(map(_name, arguments))}]"
    return f"{hint.__module__}.{hint.__qualname__}" if isinstance(hint, type) else repr(hint)
