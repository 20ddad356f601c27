"""What holds between the block allocator and the SWA cache manager, while no batch is open."""

from __future__ import annotations

from ksana.cache.block_allocator import BlockAllocator
from ksana.cache.cached_request import CachedRequest
from ksana.cache.swa_loading import SwaRequest
from ksana.cache.swa_manager import SWACacheManager
from ksana.errors import InvariantViolated


def check_together(allocator: BlockAllocator, manager: SWACacheManager | None) -> None:
    """The full check of both, and of what they must agree on. O(pools). Raises InvariantViolated."""
    if allocator.is_batch_open:
        raise InvariantViolated("only between batches the two agree")
    allocator.check()
    if manager is None:
        return
    manager.check()
    tables = manager.tables.requests
    if sorted(allocator.fa.requests) != sorted(tables):
        raise InvariantViolated(f"running: {sorted(allocator.fa.requests)}, {sorted(tables)}")
    for request_id, request in allocator.fa.requests.items():
        _check_window(allocator, manager, request, tables[request_id])
    _check_loads(allocator, manager)
    for entry in manager.cache.fixed_entries():
        if entry.fa_block_id not in allocator.fa.tree:
            raise InvariantViolated(f"its FA block is not in the tree: {entry}")
        if entry.fa_generation != allocator.fa.pool.generation(entry.fa_block_id):
            raise InvariantViolated(f"it belongs to an earlier life of its FA block: {entry}")


def _check_loads(allocator: BlockAllocator, manager: SWACacheManager) -> None:
    """Loads and holds are known to both; the sliding part of each hangs on FA blocks that it holds too."""
    fa, swa = allocator.fa, manager.loading
    if sorted(fa.loads) != sorted(swa.loads) or sorted(fa.holds) != sorted(swa.holds):
        raise InvariantViolated(f"{fa.loads}, {fa.holds} here; {swa.snapshot()} there")
    for request_id, load in fa.loads.items():
        if len(swa.loads[request_id].slots) != load.num_swa_slots:
            raise InvariantViolated(f"{swa.loads[request_id].slots} are not the SWA blocks of {load}")
        if not {entry.fa_block_id for entry in swa.loads[request_id].pinned} <= set(load.pinned):
            raise InvariantViolated(f"{swa.loads[request_id]} pins more than {load}")
    for hold_id, entries in swa.holds.items():
        if not {entry.fa_block_id for entry in entries} <= set(fa.holds[hold_id]):
            raise InvariantViolated(f"hold {hold_id} holds SWA blocks of {entries}, FA {fa.holds[hold_id]}")


def _check_window(
    allocator: BlockAllocator, manager: SWACacheManager, request: CachedRequest, swa: SwaRequest
) -> None:
    """Every position in the window of a running or confirmed request has a live SWA block that hangs on its
    FA block."""
    config = allocator.config
    if request.is_confirmed != swa.is_confirmed:
        raise InvariantViolated(f"runs here and not there: {request}, {swa}")
    first_needed = config.first_window_block(request.num_computed)
    if not swa.first_index == request.swa_first <= first_needed:
        raise InvariantViolated(f"the window starts at block {first_needed}: {request}, {swa}")
    if not swa.end_index == request.swa_end >= -(-request.num_planned // config.block_size):
        raise InvariantViolated(f"the SWA table is too short: {request}, {swa}")
    for index, entry in enumerate(swa.entries, swa.first_index):
        if not manager.cache.pool.owner_count(entry.swa_block_id):
            raise InvariantViolated(f"block {index} of {request} could be evicted: {entry}")
        if entry.fa_block_id != request.fa_block_ids[index]:
            raise InvariantViolated(f"block {index} of {request} hangs elsewhere: {entry}")
