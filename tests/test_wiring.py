"""The bounds of mailboxes hold whatever the settings allow."""

from __future__ import annotations

from ksana.config import Settings
from ksana.loading.remote_cache_loader import RemoteCacheLoader
from ksana.loading.settings import LoaderSettings
from ksana.messages.blocks import ResetPools
from ksana.messages.remote import LoadPrefix
from ksana.wiring import _OTHER_MESSAGES, Mailboxes
from tests.engines import most_remote_loads


def test_all_loads_that_may_be_under_way_can_begin_at_once() -> None:
    num_loads = most_remote_loads()
    assert Settings(model="m", max_remote_loads=num_loads).max_remote_loads == num_loads
    settings = LoaderSettings(identity=b"x", block_size=4, fa_block_bytes=64, num_slots=16)
    loads = [
        LoadPrefix(
            pool_epoch=1,
            request_id=request_id,
            token_ids=tuple(range(20)),
            cache_salt="",
            num_reserved_tokens=20,
            give_up_at_s=5.0,
            prefill_tokens_per_s=0.0,
        )
        for request_id in range(num_loads)
    ]
    said = RemoteCacheLoader(settings).handle(0.0, [ResetPools(pool_epoch=1), *loads])
    mailbox = Mailboxes(num_slots=1, num_loads=num_loads).block_allocator
    for address, message in said:
        if address == "block_allocator":
            mailbox.put(message)
    assert len(mailbox) == num_loads
    assert mailbox.capacity - len(mailbox) >= _OTHER_MESSAGES
