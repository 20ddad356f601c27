"""Snapshots as a redacted journal has them: renamed as the messages are that come after them."""

from __future__ import annotations

from typing import Any

import msgspec

from ksana.cache.block_allocator import AllocatorSnapshot
from ksana.cache.remote_calls import RemoteCall
from ksana.journal.redaction import Redaction, Unredactable
from ksana.journal.renaming import LEFT_OUT
from ksana.journal.schema import STATE_TYPES
from ksana.loading.load import Load, WantedBlock
from ksana.loading.state import LoaderState
from ksana.messages.blocks import PlanBlocks
from ksana.messages.remote import LoadPrefix
from ksana.runtime.actor import Address
from ksana.scheduling.state import SchedulerState

replace = msgspec.structs.replace


def redacted_state(redaction: Redaction, actor: Address, state: bytes) -> bytes:
    """The snapshot of an actor, in msgpack, as it may be written."""
    if actor == "swa_cache_manager":  # numbers of blocks and requests
        return state
    decoded: Any = msgspec.msgpack.decode(state, type=STATE_TYPES[actor])
    if actor == "scheduler":
        _redact_scheduler(redaction, decoded)
    elif actor == "block_allocator":
        _redact_allocator(redaction, decoded)
    elif actor == "remote_cache_loader":
        _redact_loader(redaction, decoded)
    else:
        raise Unredactable(f"the state of the {actor}")
    return msgspec.msgpack.encode(decoded)


def _redact_scheduler(redaction: Redaction, state: SchedulerState) -> None:
    for request in state.requests.values():
        request.prompt_token_ids = redaction.tuple_of(request.prompt_token_ids)
        request.output_token_ids = redaction.ids(request.output_token_ids)
        request.suppressed_token_ids = redaction.tuple_of(request.suppressed_token_ids)
        request.sampling = redaction.sampling(request.sampling)
        request.cache_salt = redaction.text(request.cache_salt)
        rules = request.stop_rules
        request.stop_rules = replace(
            rules,
            eos_token_ids=frozenset(redaction.ids(sorted(rules.eos_token_ids))),
            stop_token_ids=frozenset(redaction.ids(sorted(rules.stop_token_ids))),
        )
    state.updates = list(redaction.updates(state.updates))
    state.refusal = redaction.words(state.refusal)


def _redact_allocator(redaction: Redaction, state: AllocatorSnapshot) -> None:
    fa = state["fa"]
    fa["tree"]["nodes"] = [
        (
            block_id,
            redaction.text(parent) if isinstance(parent, str) else parent,
            redaction.packed(key),
            last_used,
            is_queued,
        )
        for block_id, parent, key, last_used, is_queued in fa["tree"]["nodes"]
    ]
    for request in fa["requests"]:
        request.cache_salt = redaction.text(request.cache_salt)
        request.tokens = bytearray(redaction.packed(request.tokens))
        if request.num_chained >= 0:
            request.chain_key = redaction.chain_key(request.chain_key)
    for load in fa["loads"]:
        load.cache_salt = redaction.text(load.cache_salt)
        load.tokens = bytearray(redaction.packed(load.tokens))
    fa["filled"] = list(redaction.filled(fa["filled"]))
    batch = state["planning"]["open"]
    if batch is not None:
        state["planning"]["open"] = replace(batch, plan=redaction.message(batch.plan))
    call = state["remote"]["open"]
    if call is not None:
        state["remote"]["open"] = _call(redaction, call)
    state["waiting"] = [_call(redaction, message) for message in state["waiting"]]


def _call(redaction: Redaction, call: Any) -> Any:
    """A PlanBlocks or a call, redacted as a message."""
    assert isinstance(call, PlanBlocks | RemoteCall)
    return redaction.message(call)


def _redact_loader(redaction: Redaction, state: LoaderState) -> None:
    for load in state.loads.values():
        _redact_load(redaction, load)
    for operation in state.operations.values():
        operation.keys = tuple(map(redaction.store_key, operation.keys))
        operation.blocks = redaction.stored(operation.blocks)
        operation.wanted = _wanted(redaction, operation.wanted)
    for batch in state.batches.values():
        batch.filled = redaction.filled(batch.filled)
        batch.blocks = redaction.stored(batch.blocks)
    state.queue = list(redaction.filled(state.queue))
    state.known_keys = {redaction.store_key(key): None for key in state.known_keys}


def _redact_load(redaction: Redaction, load: Load) -> None:
    request = redaction.message(load.request)
    assert isinstance(request, LoadPrefix)
    load.request = request
    load.keys = tuple(map(redaction.chain_key, load.keys))
    load.wanted = _wanted(redaction, load.wanted)
    load.error = None if load.error is None else LEFT_OUT


def _wanted(redaction: Redaction, blocks: tuple[WantedBlock, ...]) -> tuple[WantedBlock, ...]:
    return tuple(replace(block, key=redaction.store_key(block.key)) for block in blocks)
