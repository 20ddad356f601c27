"""What happens when an actor breaks, which is always a bug (`InvariantViolated` or worse).

The states of scheduler, allocator and SWA manager depend on each other, so none can go on without the
rest, and after a bug none can be trusted. Therefore all actors live and die together, as one
*generation*: when one raises, the others are cancelled, every request in flight fails with a 500,
mailboxes are emptied, and a new generation starts with fresh cores and a fresh worker. Requests that
come later are served as if nothing had happened. When generations break too often, the last one is not
replaced: the engine is broken, refuses everything, and /health says so.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable

from ksana.runtime.clock import now_s
from ksana.runtime.restarts import RestartLimiter

log = logging.getLogger(__name__)


async def supervise(
    run_generation: Callable[[], Awaitable[None]],
    on_crash: Callable[[Exception], None],
    limiter: RestartLimiter,
) -> bool:
    """Run generations of actors until one ends by itself (True) or they break too often (False).

    `on_crash` is called after each crash, when no actor of the generation runs any more: it fails the
    requests and clears the mailboxes. Cancellation passes through.
    """
    while True:
        try:
            await run_generation()
        except Exception as error:
            log.critical("an actor broke: every request in flight fails with a 500", exc_info=error)
            on_crash(error)
            if not limiter.allow(now_s()):
                log.critical(
                    "actors broke more than %d times in %.0f s: the engine stops serving",
                    limiter.max_restarts,
                    limiter.within_s,
                )
                return False
            log.warning("the engine goes on with fresh actors and a fresh worker")
        else:
            return True
