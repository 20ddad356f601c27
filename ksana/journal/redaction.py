"""A journal without prompts: token ids are renamed, text is left out, and what decides still replays.

Ids are renamed by a permutation of the vocabulary that a key gives, salts and stop strings by a keyed hash,
chain keys by what renamed tokens hash to. Equal things stay equal and different ones different, which is
all that scheduler, allocator, SWA cache manager and loader look at. It is a substitution, not encryption:
how long texts are, and which of them share a beginning, is still to be seen, and how often each id comes.
"""

from __future__ import annotations

import hashlib
import logging
import typing
from array import array
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from ksana.cache.cache_config import CacheConfig
from ksana.journal.chain_names import ChainNames, split_store_key
from ksana.journal.redaction_key import permutation
from ksana.messages.base import Message
from ksana.messages.blocks import (
    AllocateRequestBlocks,
    BlocksPlanned,
    PlanBlocks,
    ResetPools,
    UpdateRequestTokens,
)
from ksana.messages.outputs import Failed, Finished, RequestEnded, StepOutputs
from ksana.messages.remote import (
    AllocateBlocksForRemoteCache,
    BlocksFilled,
    BlocksHeld,
    CancelLoad,
    ConfirmRemoteCacheLoadingResult,
    DropRemoteCacheLoading,
    FilledBlock,
    GetRequestPrefixBlockNumberBeforeRemoteCacheLoading,
    HoldBlocks,
    LoadPrefix,
    PrefixBlockNumber,
    PrefixLoaded,
    ReleaseHeldBlocks,
    RemoteBlocksAllocated,
    RemoteCallRefused,
    RemoteLoadingConfirmed,
)
from ksana.messages.requests import Abort, AddRequest, Drain, SamplingParams, StopStringFound
from ksana.messages.staging import CopyFromStaging, CopyToStaging, StagingCopied
from ksana.messages.steps import RowResult, StepDone, StepPlan, WorkerLost, WorkerReady
from ksana.messages.stores import (
    StoredBlock,
    StoreFetch,
    StoreFetched,
    StoreFind,
    StoreFound,
    StoreSave,
    StoreSaved,
)
from ksana.messages.swa import SwaBatch, SwaBatchDone
from ksana.messages.swa_remote import SwaAnswer, SwaCall

log = logging.getLogger(__name__)
replace = msgspec.structs.replace

LEFT_OUT = "left out of the journal"
MAX_FOREIGN = 256

WITHOUT_CONTENT: frozenset[type] = frozenset(
    {
        Abort,
        Drain,
        BlocksPlanned,
        ResetPools,
        CancelLoad,
        PrefixLoaded,
        PrefixBlockNumber,
        AllocateBlocksForRemoteCache,
        RemoteBlocksAllocated,
        ConfirmRemoteCacheLoadingResult,
        RemoteLoadingConfirmed,
        DropRemoteCacheLoading,
        RemoteCallRefused,
        HoldBlocks,
        BlocksHeld,
        ReleaseHeldBlocks,
        CopyFromStaging,
        CopyToStaging,
        StagingCopied,
        WorkerReady,
        SwaBatch,
        SwaBatchDone,
        *typing.get_args(SwaCall),
        *typing.get_args(SwaAnswer),
    }
)
"""Messages of numbers, and of words that are the same for every prompt."""


class Unredactable(Exception):
    """A message that nobody has said how to redact: it must not be written."""


class Redaction:
    """Renames messages and states, consistently as long as the key is the same.

    Raises Unredactable for a message it does not know, IndexError for an id outside the vocabulary.
    """

    def __init__(self, key: bytes, config: CacheConfig, vocab_size: int) -> None:
        self._key = key
        self._permutation = permutation(key, vocab_size)
        self._chains = ChainNames(config, self.ids, self.text)
        self._has_warned = False
        self._foreign: dict[str, None] = {}
        """Words of workers, the last ones last: they may quote anything."""

    def see(self, message: Message) -> None:
        """Whatever the scheduler says, recorded or not, before anybody hears it."""
        self._chains.see(message)

    def message(self, message: Message) -> Message:
        """The message as it may be written."""
        if type(message) in WITHOUT_CONTENT:
            return message
        redact = self._REDACT.get(type(message))
        if redact is None:
            raise Unredactable(type(message).__name__)
        redacted: Message = redact(self, message)
        return redacted

    # Parts

    def ids(self, token_ids: Sequence[int]) -> list[int]:
        names = self._permutation
        if token_ids and min(token_ids) < 0:
            raise IndexError("a token id below 0")
        return [names[token_id] for token_id in token_ids]

    def tuple_of(self, token_ids: Sequence[int]) -> tuple[int, ...]:
        return tuple(self.ids(token_ids))

    def packed(self, tokens: bytes | bytearray) -> bytes:
        """Ids as `prefix_tree.token_bytes` gives them."""
        return array("i", self.ids(array("i", bytes(tokens)))).tobytes()

    def text(self, text: str) -> str:
        """A name for a text; nothing stays nothing."""
        if not text:
            return text
        data = text.encode("utf-8", "surrogatepass")
        return hashlib.blake2b(data, key=self._key, digest_size=12, person=b"ksana text").hexdigest()

    def foreign(self, text: str) -> str:
        """In place of words that a worker said."""
        self._foreign.pop(text, None)
        self._foreign[text] = None
        if len(self._foreign) > MAX_FOREIGN:
            del self._foreign[next(iter(self._foreign))]
        return LEFT_OUT

    def words(self, text: str) -> str:
        """Words of the scheduler, which may end with those of a worker."""
        head, colon, tail = text.partition(": ")
        return f"{head}{colon}{LEFT_OUT}" if tail in self._foreign else text

    def sampling(self, sampling: SamplingParams) -> SamplingParams:
        return replace(
            sampling,
            stop=tuple(map(self.text, sampling.stop)),
            stop_token_ids=self.tuple_of(sampling.stop_token_ids),
        )

    def chain_key(self, key: bytes) -> bytes:
        named = self._chains.name(key)
        if named is not None:
            return named
        if not self._has_warned:
            log.warning("a block was so old that its name was forgotten: the loader may replay differently")
            self._has_warned = True
        return hashlib.blake2b(key, key=self._key, digest_size=32, person=b"ksana block").digest()

    def store_key(self, key: bytes) -> bytes:
        parts = split_store_key(key)
        return key if parts is None else self.chain_key(parts[0]) + parts[1]

    def stored(self, blocks: Sequence[StoredBlock]) -> tuple[StoredBlock, ...]:
        return tuple(replace(block, key=self.store_key(block.key)) for block in blocks)

    def filled(self, blocks: Sequence[FilledBlock]) -> tuple[FilledBlock, ...]:
        return tuple(replace(block, chain_key=self.chain_key(block.chain_key)) for block in blocks)

    def updates(self, updates: Sequence[UpdateRequestTokens]) -> tuple[UpdateRequestTokens, ...]:
        return tuple(replace(update, token_ids=self.tuple_of(update.token_ids)) for update in updates)

    def _demand(self, demand: AllocateRequestBlocks) -> AllocateRequestBlocks:
        if demand.new is None:
            return demand
        new = replace(
            demand.new,
            token_ids=self.tuple_of(demand.new.token_ids),
            cache_salt=self.text(demand.new.cache_salt),
        )
        return replace(demand, new=new)

    def _ended(self, ended: RequestEnded) -> RequestEnded:
        outcome = ended.outcome
        if isinstance(outcome, Failed):
            return replace(ended, outcome=replace(outcome, message=self.words(outcome.message)))
        if not isinstance(outcome, Finished) or outcome.stop_reason is None:
            return ended
        reason = outcome.stop_reason
        named = self.text(reason) if isinstance(reason, str) else self.ids([reason])[0]
        return replace(ended, outcome=replace(outcome, stop_reason=named))

    # Messages

    def _add_request(self, message: AddRequest) -> AddRequest:
        return replace(
            message,
            prompt_token_ids=self.tuple_of(message.prompt_token_ids),
            sampling=self.sampling(message.sampling),
            eos_token_ids=self.tuple_of(message.eos_token_ids),
            cache_salt=self.text(message.cache_salt),
        )

    def _stop_string(self, message: StopStringFound) -> StopStringFound:
        found = message.stop_string
        return replace(message, stop_string=None if found is None else self.text(found))

    def _plan_blocks(self, message: PlanBlocks) -> PlanBlocks:
        return replace(
            message,
            updates=self.updates(message.updates),
            demands=tuple(map(self._demand, message.demands)),
        )

    def _step_plan(self, message: StepPlan) -> StepPlan:
        new = tuple(
            replace(
                row,
                token_ids=self.tuple_of(row.token_ids),
                sampling=self.sampling(row.sampling),
                suppressed_token_ids=self.tuple_of(row.suppressed_token_ids),
            )
            for row in message.new
        )
        return replace(message, new=new)

    def _step_done(self, message: StepDone) -> StepDone:
        return replace(message, results=tuple(map(self._result, message.results)))

    def _result(self, result: RowResult) -> RowResult:
        if result.error is not None:
            result = replace(result, error=self.foreign(result.error))
        return replace(result, token_ids=self.tuple_of(result.token_ids)) if result.token_ids else result

    def _worker_lost(self, message: WorkerLost) -> WorkerLost:
        return replace(message, reason=self.foreign(message.reason))

    def _step_outputs(self, message: StepOutputs) -> StepOutputs:
        tokens = tuple(replace(part, token_ids=self.tuple_of(part.token_ids)) for part in message.tokens)
        return replace(message, tokens=tokens, ended=tuple(map(self._ended, message.ended)))

    def _load(self, message: Any) -> Any:
        return replace(
            message,
            token_ids=self.tuple_of(message.token_ids),
            cache_salt=self.text(message.cache_salt),
        )

    def _blocks_filled(self, message: BlocksFilled) -> BlocksFilled:
        return replace(message, blocks=self.filled(message.blocks))

    def _find(self, message: StoreFind) -> StoreFind:
        return replace(message, keys=tuple(map(self.store_key, message.keys)))

    def _store_order(self, message: Any) -> Any:
        return replace(message, blocks=self.stored(message.blocks))

    def _store_answer(self, message: Any) -> Any:
        """An error may name the file of a block, and so its key."""
        return message if message.error is None else replace(message, error=LEFT_OUT)

    _REDACT: dict[type[Message], Callable[..., Any]] = {
        AddRequest: _add_request,
        StopStringFound: _stop_string,
        PlanBlocks: _plan_blocks,
        StepPlan: _step_plan,
        StepDone: _step_done,
        StepOutputs: _step_outputs,
        WorkerLost: _worker_lost,
        LoadPrefix: _load,
        GetRequestPrefixBlockNumberBeforeRemoteCacheLoading: _load,
        BlocksFilled: _blocks_filled,
        StoreFind: _find,
        StoreFetch: _store_order,
        StoreSave: _store_order,
        StoreFound: _store_answer,
        StoreFetched: _store_answer,
        StoreSaved: _store_answer,
    }
