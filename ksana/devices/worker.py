"""The worker process: `python -m ksana.devices.worker FD PARENT_PID`, started by `ProcessBackend`.

One blocking loop: read an order, do it, answer. Orders sent ahead wait in the socket. It ends when the
socket does, and the kernel kills it when its parent dies in the middle of a step.
"""

from __future__ import annotations

import ctypes
import gc
import os
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable, Iterator

from ksana.devices import wire
from ksana.devices.backend import Answer, Order, Runner, WorkerInfo, WorkerSettings
from ksana.errors import ModelLoadError
from ksana.messages.steps import StepPlan
from ksana.runtime.frames import FrameDecoder, Header

_PR_SET_PDEATHSIG = 1
_PROGRESS_EVERY_S = 0.1
_RECEIVE_BYTES = 1 << 18

Progress = Callable[[int, int], None]


Build = Callable[[WorkerSettings, str, Progress], tuple[Runner, WorkerInfo]]
"""Makes a runner out of settings and the model's expected fingerprint. Raises ModelLoadError."""


def serve(connection: socket.socket, build: Build) -> int:
    """Speak `ksana.devices.wire` on a blocking socket until it ends. Returns the exit status."""
    payloads = _payloads(connection)
    header = wire.header_decoder.decode(next(payloads))
    connection.sendall(wire.encode(Header(format=wire.FORMAT)))
    try:
        runner, info = build(wire.settings_of(header), header.model_fingerprint, _progress_to(connection))
    except ModelLoadError as error:
        connection.sendall(wire.encode(wire.WorkerFailed(kind="model", message=str(error))))
        return ModelLoadError.exit_code
    except Exception as error:
        traceback.print_exc()
        message = f"the worker could not start: {type(error).__name__}: {error}"
        connection.sendall(wire.encode(wire.WorkerFailed(kind="other", message=message)))
        return 1
    connection.sendall(wire.encode(info))
    # What is alive now stays: the collector need not look at it again in the middle of steps.
    gc.collect()
    gc.freeze()
    for payload in payloads:
        connection.sendall(wire.encode(carry_out(runner, wire.order_decoder.decode(payload))))
    return 0


def carry_out(runner: Runner, order: Order) -> Answer:
    """Do one order."""
    if isinstance(order, StepPlan):
        return runner.run(order)
    return runner.copy_staged(order)


def _payloads(connection: socket.socket) -> Iterator[bytes]:
    frames = FrameDecoder()
    while data := connection.recv(_RECEIVE_BYTES):
        yield from frames.feed(data)


def _progress_to(connection: socket.socket) -> Progress:
    last_s = 0.0

    def progress(done: int, total: int) -> None:
        nonlocal last_s
        now_s = time.monotonic()
        if done >= total or now_s - last_s >= _PROGRESS_EVERY_S:
            last_s = now_s
            connection.sendall(wire.encode(wire.LoadProgress(done=done, total=total)))

    return progress


def die_with_parent(parent_pid: int) -> None:
    """Ask the kernel to kill this process when its parent's thread ends (Linux; elsewhere nothing)."""
    if not sys.platform.startswith("linux"):
        return
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent_pid:  # it died before we asked
        os._exit(1)


def main(build: Build) -> int:
    """Run as the worker named on the command line, with runners made by `build`."""
    fd, parent_pid = int(sys.argv[1]), int(sys.argv[2])
    die_with_parent(parent_pid)
    with socket.socket(fileno=fd) as connection:
        try:
            return serve(connection, build)
        except (BrokenPipeError, ConnectionResetError):
            return 0  # whoever wanted the answer is gone


if __name__ == "__main__":
    from ksana.devices.build import build_runner

    sys.exit(main(build_runner))
