"""A journal without prompts: token ids are renamed, text is left out, and what decides still replays.

Equal things stay equal and different ones different (`ksana.journal.renaming`), which is all that scheduler,
allocator, SWA cache manager and loader look at. It is a substitution, not encryption: how long texts are,
which of them share a beginning and how often each id comes is still to be seen, and whoever can send requests
to the server learns the names of the ids that they choose.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from ksana.journal.renaming import LEFT_OUT, Renaming
from ksana.journal.without_content import WITHOUT_CONTENT
from ksana.messages.base import Message
from ksana.messages.blocks import (
    AllocateRequestBlocks,
    PlanBlocks,
    UpdateRequestTokens,
)
from ksana.messages.outputs import Failed, Finished, RequestEnded, StepOutputs
from ksana.messages.remote import (
    BlocksFilled,
    FilledBlock,
    GetRequestPrefixBlockNumberBeforeRemoteCacheLoading,
    LoadPrefix,
)
from ksana.messages.requests import AddRequest, SamplingParams, StopStringFound
from ksana.messages.steps import RowResult, StepDone, StepPlan, WorkerLost
from ksana.messages.stores import (
    StoredBlock,
    StoreFetch,
    StoreFetched,
    StoreFind,
    StoreFound,
    StoreSave,
    StoreSaved,
)

replace = msgspec.structs.replace


class Unredactable(Exception):
    """A message that nobody has said how to redact: it must not be written."""


class Redaction(Renaming):
    """Renames messages, consistently as long as the key is the same; states in `redacted_states`.

    Raises Unredactable for a message it does not know, IndexError for an id outside the vocabulary.
    """

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

    def sampling(self, sampling: SamplingParams) -> SamplingParams:
        return replace(
            sampling,
            stop=tuple(map(self.text, sampling.stop)),
            stop_token_ids=self.tuple_of(sampling.stop_token_ids),
        )

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
