"""A worker as a subprocess on a socket pair: it alone imports torch, and its death harms nobody else."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import IO

import msgspec
import trio

from ksana.devices import wire
from ksana.devices.backend import Answer, Order, WorkerInfo, WorkerLostError, WorkerSettings
from ksana.errors import ModelLoadError
from ksana.messages.base import PoolEpoch
from ksana.messages.staging import StagingCopied
from ksana.messages.steps import StepDone
from ksana.runtime.frames import FrameDecoder, FrameError

log = logging.getLogger(__name__)
worker_log = logging.getLogger("ksana.worker")

WORKER_COMMAND = (sys.executable, "-P", "-m", "ksana.devices.worker")
_RECEIVE_BYTES = 1 << 18
_SECRETS = ("KSANA_API_KEY", "KSANA_API_KEY_FILE", "HF_TOKEN", "HUGGING_FACE_HUB_TOKEN")

Progress = Callable[[int, int], None]
"""Told of tensors loaded, and tensors in all."""


class ProcessBackend:
    """A `Backend` whose worker is a subprocess.

    Death of the worker is noticed at once, as the end of the socket. The worker dies with this process,
    too: it sees the socket's end, and the kernel kills it when the thread that started it is gone
    (so `start` must be called on a thread that lives as long as the worker: the trio thread).
    """

    def __init__(
        self,
        settings: WorkerSettings,
        *,
        model_fingerprint: str = "",
        command: Sequence[str] = WORKER_COMMAND,
        start_timeout_s: float = 1800.0,
        progress: Progress | None = None,
    ) -> None:
        self._settings = settings
        self._fingerprint = model_fingerprint
        self._command = tuple(command)
        self._start_timeout_s = start_timeout_s
        self._progress = progress
        self._process: subprocess.Popen[bytes] | None = None
        self._stream: trio.SocketStream | None = None
        self._frames = FrameDecoder()
        self._header_seen = False
        self._arrived: deque[wire.FromWorker] = deque()
        self._last_lines: deque[str] = deque(maxlen=5)

    @property
    def pid(self) -> int | None:
        """The worker's process id, while there is one."""
        return None if self._process is None else self._process.pid

    async def start(self, epoch: PoolEpoch) -> WorkerInfo:
        await self.stop()
        try:
            self._spawn()
            with trio.fail_after(self._start_timeout_s):
                info = await self._hand_shake()
        except trio.TooSlowError:
            await self.stop()
            raise WorkerLostError(
                f"the worker did not load the model in {self._start_timeout_s:.0f} s (worker_start_timeout)"
            ) from None
        except BaseException:
            await self.stop()
            raise
        log.info("worker %s ready in epoch %d: %s", self.pid, epoch, info.device)
        return info

    async def submit(self, order: Order) -> None:
        if self._stream is not None:
            await self._send(wire.encode(order))

    async def receive(self) -> Answer:
        message = await self._next_message()
        if not isinstance(message, StepDone | StagingCopied):
            raise await self._lost(f"it sent a {type(message).__name__} instead of an answer")
        return message

    async def stop(self) -> None:
        # The worker has nothing to save, so the way to stop it is the one that always works.
        process, self._process = self._process, None
        stream, self._stream = self._stream, None
        if stream is not None:
            stream.socket.close()
        if process is not None:
            process.kill()
            with trio.CancelScope(shield=True):
                await _reap(process)

    def _spawn(self) -> None:
        ours, theirs = socket.socketpair()
        self._frames = FrameDecoder()
        self._header_seen = False
        self._arrived.clear()
        self._last_lines.clear()
        with theirs:
            # Not through trio: it forks on a helper thread, whose end would look like our death.
            self._process = subprocess.Popen(
                [*self._command, str(theirs.fileno()), str(os.getpid())],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                pass_fds=(theirs.fileno(), *self._staging_fds()),
                env=_worker_environment(self._settings.num_threads),
                start_new_session=True,  # Ctrl-C in a terminal is for us, not for the worker
            )
        self._stream = trio.SocketStream(trio.socket.from_stdlib_socket(ours))
        assert self._process.stdout is not None
        threading.Thread(
            target=_log_lines,
            args=(self._process.stdout, self._last_lines),
            name=f"log of worker {self._process.pid}",
            daemon=True,
        ).start()

    def _staging_fds(self) -> tuple[int, ...]:
        """Inherited under the same number, so that the settings can name it."""
        staging = self._settings.staging
        return () if staging is None else (staging.fd,)

    async def _hand_shake(self) -> WorkerInfo:
        await self._send(wire.encode(wire.settings_header(self._settings, self._fingerprint)))
        while True:
            message = await self._next_message()
            if isinstance(message, wire.LoadProgress):
                if self._progress is not None:
                    self._progress(message.done, message.total)
            elif isinstance(message, WorkerInfo):
                return message
            elif isinstance(message, wire.WorkerFailed):
                if message.kind == "model":
                    raise ModelLoadError(message.message)
                raise WorkerLostError(message.message)
            else:
                raise await self._lost(f"it sent a {type(message).__name__} while starting")

    async def _send(self, frame: bytes) -> None:
        assert self._stream is not None
        # When the worker is gone, `receive` reports it.
        with contextlib.suppress(trio.BrokenResourceError, trio.ClosedResourceError):
            await self._stream.send_all(frame)

    async def _next_message(self) -> wire.FromWorker:
        while not self._arrived:
            if self._stream is None:
                raise WorkerLostError("the worker is stopped")
            try:
                data = await self._stream.receive_some(_RECEIVE_BYTES)
            except (trio.BrokenResourceError, trio.ClosedResourceError):
                data = b""
            if not data:
                raise await self._lost("")
            try:
                self._take(data)
            except (FrameError, msgspec.DecodeError) as error:
                raise await self._lost(f"it does not speak our language: {error}") from error
        return self._arrived.popleft()

    def _take(self, data: bytes | bytearray) -> None:
        for payload in self._frames.feed(data):
            if not self._header_seen:
                wire.header_decoder.decode(payload).check(wire.FORMAT)
                self._header_seen = True
            else:
                self._arrived.append(wire.from_worker_decoder.decode(payload))

    async def _lost(self, why: str) -> WorkerLostError:
        """Stop what is left of the worker and say how it went."""
        process = self._process
        if process is not None and not why:
            with trio.move_on_after(2):  # its exit status comes a little after the socket's end
                await _exit_of(process)
        returncode = None if process is None else process.returncode
        await self.stop()
        said = "; it last said: " + " | ".join(self._last_lines) if self._last_lines else ""
        return WorkerLostError(f"the worker is gone: {why or _how_it_ended(returncode)}{said}")


def _worker_environment(num_threads: int | None) -> dict[str, str]:
    environment = {name: value for name, value in os.environ.items() if name not in _SECRETS}
    environment["OMP_WAIT_POLICY"] = "passive"  # spinning threads make steps ten times slower on busy cores
    environment["TORCH_DEVICE_BACKEND_AUTOLOAD"] = "0"
    environment["PYTHONUNBUFFERED"] = "1"
    if num_threads is not None:
        environment["OMP_NUM_THREADS"] = str(num_threads)
    return environment


def _log_lines(pipe: IO[bytes], last_lines: deque[str]) -> None:
    with pipe:
        while line := pipe.readline(8192):
            text = line.decode(errors="replace").rstrip()
            if text:
                last_lines.append(text)
                worker_log.warning("%s", text)


async def _exit_of(process: subprocess.Popen[bytes]) -> None:
    """Wait until the process has exited, and reap it."""
    if process.poll() is None:
        pidfd = os.pidfd_open(process.pid)
        try:
            await trio.lowlevel.wait_readable(pidfd)
        finally:
            os.close(pidfd)
        process.wait()


async def _reap(process: subprocess.Popen[bytes], within_s: float = 10.0) -> None:
    with trio.move_on_after(within_s) as scope:
        await _exit_of(process)
    if scope.cancelled_caught:
        log.error("worker %d did not die within %.0f s of SIGKILL", process.pid, within_s)


def _how_it_ended(returncode: int | None) -> str:
    if returncode is None:
        return "it closed its socket"
    if returncode >= 0:
        return f"it exited with status {returncode}"
    try:
        name = signal.Signals(-returncode).name
    except ValueError:
        name = f"signal {-returncode}"
    hint = " (perhaps by the kernel, for want of memory)" if returncode == -signal.SIGKILL else ""
    return f"it was killed by {name}{hint}"
