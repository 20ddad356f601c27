"""`ksana serve`: an engine, a gateway in front of it, and what a person sees of both."""

from __future__ import annotations

import importlib.metadata
import logging
import os
import shlex
import shutil
import sys
from collections.abc import Sequence

import trio

from ksana.cli.listening import check_can_listen
from ksana.cli.loading import LoadingBar
from ksana.cli.logs import configure_logging
from ksana.cli.report import start_block, url_of, work_line
from ksana.cli.settings import read_settings
from ksana.cli.shutdown import Shutdown
from ksana.client import Client
from ksana.config import Settings
from ksana.devices.backend import WorkerLostError
from ksana.engine import Engine
from ksana.errors import ServiceError
from ksana.gateway.app import create_app, create_gateway
from ksana.gateway.server import Server
from ksana.private_files import warn_if_exposed

log = logging.getLogger("ksana.serve")

REPORT_EVERY_S = 10.0


def run(argv: Sequence[str]) -> int:
    settings = read_settings("ksana serve", "Serve a model over an OpenAI-compatible API.", argv, os.environ)
    configure_logging(settings.log_level)
    if any(argument.partition("=")[0] == "--api-key" for argument in argv):
        log.warning("a key on the command line can be seen by others on this machine; prefer KSANA_API_KEY")
    if settings.api_key_file is not None:
        warn_if_exposed(settings.api_key_file, "the API key file")
    check_can_listen(settings.host, settings.port)
    return trio.run(serve, settings)


async def serve(settings: Settings) -> int:
    """Load, serve until a signal, drain. Returns the exit code."""
    shutdown = Shutdown()
    async with trio.open_nursery() as nursery:
        await nursery.start(shutdown.watch)
        with shutdown.loading:
            try:
                await _load_and_serve(settings, shutdown)
            except WorkerLostError as error:  # only at the start; later the engine replaces it
                raise ServiceError(str(error)) from error
        nursery.cancel_scope.cancel()
    return shutdown.exit_code


async def _load_and_serve(settings: Settings, shutdown: Shutdown) -> None:
    bar = LoadingBar(sys.stderr)
    async with Engine(settings, report=bar.say, progress=bar) as engine:
        bar.finish()
        gateway = create_gateway(engine.client, settings)
        server = Server(create_app(gateway), settings, gateway.traffic)
        async with trio.open_nursery() as background:
            async with trio.open_nursery() as serving:
                addresses = await serving.start(server.serve)
                shutdown.serving(server)
                _show(settings, engine.client, addresses[0][1])
                background.start_soon(report_work, engine.client)
            background.cancel_scope.cancel()


def _show(settings: Settings, client: Client, port: int) -> None:
    version = importlib.metadata.version("ksana")
    block = start_block(version, client.model, settings, url_of(settings.host, port), _own_command())
    print(f"\n{block}\n", file=sys.stderr, flush=True)


def _own_command() -> str:
    """How a shell finds this program: by name, or, as with a .venv that is not active, as it was called."""
    if shutil.which("ksana"):
        return "ksana"
    if os.access(sys.argv[0], os.X_OK):
        return shlex.quote(sys.argv[0])
    return f"{shlex.quote(sys.executable)} -m ksana.cli.main"


async def report_work(client: Client, every_s: float = REPORT_EVERY_S) -> None:
    """Log a line of throughput and load every `every_s` seconds in which there was work. Never returns."""
    before = client.status()
    while True:
        await trio.sleep(every_s)
        now = client.status()
        if line := work_line(before, now):
            log.info("%s", line)
        before = now
