"""Listening, and stopping: a stop lets what runs end, then ends it, and is over in bounded time."""

from __future__ import annotations

import errno
import logging
import resource
from operator import attrgetter, itemgetter

import trio
from hypercorn.app_wrappers import ASGIWrapper
from hypercorn.config import Config
from hypercorn.trio.worker_context import WorkerContext
from hypercorn.typing import ASGIFramework

from ksana.config import Settings
from ksana.errors import ConfigError
from ksana.gateway.connection import Connection
from ksana.gateway.limits import (
    BODY_GRACE_S,
    CLOSE_GRACE_S,
    EXTRA_CONNECTIONS,
    IDLE_TIMEOUT_S,
    REFUSAL_LOG_EVERY_S,
)
from ksana.gateway.traffic import Traffic

log = logging.getLogger("ksana.gateway")

_FULL = (
    b'{"error":{"message":"too many connections","type":"server_error","param":null,'
    b'"code":"too_many_connections"}}'
)
_REFUSAL = (
    b"HTTP/1.1 503 Service Unavailable\r\ncontent-type: application/json\r\nretry-after: 1\r\n"
    b"connection: close\r\ncontent-length: %d\r\n\r\n%b" % (len(_FULL), _FULL)
)
_BACKLOG = 1024


class Server:
    """Serves one application.

    `stop` begins the end: new requests are refused with a 503, running ones get `drain_timeout` seconds,
    then an error at the end of their streams, then their connections are closed. `hurry` skips the waiting.
    `stopped` is set when all that is over.
    """

    def __init__(self, app: ASGIFramework, settings: Settings, traffic: Traffic) -> None:
        self.stop = trio.Event()
        self.hurry = trio.Event()
        self.stopped = trio.Event()
        self._app = ASGIWrapper(app)
        self._settings = settings
        self._traffic = traffic
        self._config = _hypercorn_config()
        self._context = WorkerContext(None)
        self._connections: set[Connection] = set()
        self._no_connections = trio.Event()
        self._no_connections.set()
        self._max_connections = max_connections(settings)
        self._num_untold = 0
        self._next_telling_s = 0.0

    async def serve(self, *, task_status: trio.TaskStatus[list[tuple[str, int]]]) -> None:
        """Listen until stopped. Reports the addresses listened at, with the port that was picked for port 0.

        Raises ConfigError when the address cannot be listened at.
        """
        listeners = await _listen(self._settings.host, self._settings.port)
        async with trio.open_nursery() as connections:
            async with trio.open_nursery() as accepting:
                accepting.start_soon(self._accept, listeners, connections)
                task_status.started([listener.socket.getsockname()[:2] for listener in listeners])
                await self.stop.wait()
                await self._drain()
                accepting.cancel_scope.cancel()
            await self._close(connections)
        self.stopped.set()

    async def _accept(self, listeners: list[trio.SocketListener], connections: trio.Nursery) -> None:
        await trio.serve_listeners(self._handle, listeners, handler_nursery=connections)

    async def _handle(self, stream: trio.SocketStream) -> None:
        if len(self._connections) >= self._max_connections and not self._make_room():
            self._tell_of_refusal()
            await _refuse(stream)
            return
        connection = Connection(self._app, self._config, self._context, stream)
        if not self._connections:
            self._no_connections = trio.Event()
        self._connections.add(connection)
        try:
            await connection.run()
        except* (OSError, trio.BrokenResourceError, trio.ClosedResourceError):
            pass
        except* Exception as error:
            log.error("internal error in a connection", exc_info=error)
        finally:
            self._connections.discard(connection)
            if not self._connections:
                self._no_connections.set()

    def _tell_of_refusal(self) -> None:
        """At most once in a while: a crowd that is refused must not fill the log too."""
        self._num_untold += 1
        if trio.current_time() >= self._next_telling_s:
            log.warning(
                "503 to %d connections: too many, %d are open (code=too_many_connections)",
                self._num_untold,
                len(self._connections),
            )
            self._num_untold, self._next_telling_s = 0, trio.current_time() + REFUSAL_LOG_EVERY_S

    def _make_room(self) -> bool:
        """Close the connection that has been idle for longest; if none is, the one whose request body has
        been coming for longest, and long. False when all others are at work.

        Without this, whoever opens many connections and says nothing keeps everybody else out.
        """
        idle = [(one.idle_since_s, one) for one in self._connections if one.idle_since_s is not None]
        if idle:
            victim = min(idle, key=itemgetter(0))[1]
            victim.close_idle()
        else:
            since_s = trio.current_time() - BODY_GRACE_S
            slow = [one for one in self._connections if one.awaits_body and one.busy_since_s <= since_s]
            if not slow:
                return False
            victim = min(slow, key=attrgetter("busy_since_s"))
            victim.abort()
        # It takes a moment to end, and must not be chosen twice meanwhile.
        self._connections.discard(victim)
        return True

    async def _drain(self) -> None:
        self._traffic.draining = True
        if len(self._traffic):
            log.info(
                "stopping; %d requests may take %d s more", len(self._traffic), self._settings.drain_timeout
            )
        with trio.move_on_after(self._settings.drain_timeout):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._cancel_when_hurried, nursery.cancel_scope)
                await self._traffic.wait_idle()
                nursery.cancel_scope.cancel()
        if len(self._traffic):
            log.warning("ending %d requests that did not get done in time", len(self._traffic))
            self._traffic.end_all()
            with trio.move_on_after(CLOSE_GRACE_S):
                await self._traffic.wait_idle()

    async def _cancel_when_hurried(self, scope: trio.CancelScope) -> None:
        await self.hurry.wait()
        scope.cancel()

    async def _close(self, connections: trio.Nursery) -> None:
        await self._context.terminated.set()
        with trio.move_on_after(CLOSE_GRACE_S):
            await self._no_connections.wait()
        for connection in list(self._connections):
            connection.abort()
        connections.cancel_scope.cancel()


def max_connections(settings: Settings) -> int:
    """One for each request that may run or wait and some more, as far as file descriptors allow."""
    wanted = settings.max_num_seqs + settings.max_queued_requests + EXTRA_CONNECTIONS
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return wanted
    return max(16, min(wanted, soft - 64))


def _hypercorn_config() -> Config:
    config = Config()
    config.accesslog = None
    config.errorlog = logging.getLogger("ksana.gateway.http")
    config.include_server_header = False
    config.keep_alive_timeout = IDLE_TIMEOUT_S
    config.keep_alive_max_requests = 1 << 30
    return config


async def _listen(host: str, port: int) -> list[trio.SocketListener]:
    try:
        return await trio.open_tcp_listeners(port, host=host, backlog=_BACKLOG)
    except OSError as error:
        hint = "; is another server running there?" if error.errno == errno.EADDRINUSE else ""
        raise ConfigError(f"cannot listen at {host} port {port}: {error}{hint}") from None


async def _refuse(stream: trio.SocketStream) -> None:
    with trio.move_on_after(1):
        try:
            await stream.send_all(_REFUSAL)
            await stream.send_eof()
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            pass
    await trio.aclose_forcefully(stream)
