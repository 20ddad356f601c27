"""Cores from a journal: with the recorded settings, in the recorded state, without a device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from ksana.cache.block_allocator import BlockAllocator
from ksana.cache.swa_manager import SWACacheManager
from ksana.journal.format import RecordedSettings
from ksana.journal.reading import JournalError
from ksana.journal.schema import STATE_TYPES
from ksana.loading.remote_cache_loader import RemoteCacheLoader
from ksana.messages.base import Message
from ksana.runtime.actor import Address, Said
from ksana.scheduling.scheduler import Scheduler
from ksana.tokenizers.core import TokenizerCore
from ksana.tokenizers.prompts import PromptEncoder


class RestoredCore:
    """A core, and its state as values that can be compared."""

    def __init__(self, actor: Address, core: Any) -> None:
        self._actor = actor
        self._core = core

    def handle(self, now_s: float, messages: Sequence[Message]) -> list[Said]:
        """See `ksana.runtime.actor.Core`."""
        return list(self._core.handle(now_s, messages))

    def next_timer_s(self) -> float | None:
        """See `ksana.runtime.actor.Core`."""
        timer_s: float | None = self._core.next_timer_s()
        return timer_s

    def state(self) -> Any:
        """Everything it remembers."""
        snapshot = self._core.snapshot()
        return decode_state(self._actor, snapshot) if isinstance(snapshot, bytes) else snapshot


def decode_state(actor: Address, state: bytes) -> Any:
    """What a snapshot holds. Raises msgspec.MsgspecError."""
    return msgspec.msgpack.decode(state, type=STATE_TYPES[actor])


def restore_core(
    actor: Address, settings: RecordedSettings, state: bytes, encoder: PromptEncoder | None = None
) -> RestoredCore:
    """The core of an actor as it was. `encoder`: only for the tokenizer, which cannot do without.

    Raises JournalError when the state is none of such a core. Memory: what the state has, not what the
    settings ask for.
    """
    try:
        return RestoredCore(actor, _restore(actor, settings, state, encoder))
    except JournalError:
        raise
    except Exception as error:  # whatever a core trips over
        raise JournalError(
            f"the recorded state of the {actor} is none ({type(error).__name__}: {error})"
        ) from None


def _restore(actor: Address, settings: RecordedSettings, state: bytes, encoder: PromptEncoder | None) -> Any:
    core: Any
    if actor == "scheduler":
        core = Scheduler(settings.scheduler)
        core.restore(state)
    elif actor == "block_allocator":
        snapshot = decode_state(actor, state)
        _check_size(settings.cache.num_fa_blocks, snapshot["fa"]["pool"]["generations"])
        core = BlockAllocator(settings.cache)
        core.restore(snapshot)
    elif actor == "swa_cache_manager":
        snapshot = decode_state(actor, state)
        _check_size(settings.cache.num_swa_blocks, snapshot["cache"]["pool"]["generations"])
        core = SWACacheManager(settings.cache)
        core.restore(snapshot)
    elif actor == "remote_cache_loader":
        if settings.loader is None:
            raise JournalError("a remote-cache loader was recorded, but not its settings")
        core = RemoteCacheLoader(settings.loader, decode_state(actor, state))
        core.check()
    else:
        if encoder is None:
            raise JournalError("the tokenizer replays only with its model: give --model")
        core = TokenizerCore(encoder)
        core.restore(state)
    return core


def _check_size(num_expected: int, entries: list[Any]) -> None:
    if len(entries) != num_expected:
        raise JournalError(f"the recorded state has {len(entries)} entries, the settings say {num_expected}")
