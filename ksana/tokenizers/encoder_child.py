"""This process's end of `ksana.tokenizers.encoder_process`."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import weakref
from array import array
from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from ksana.runtime.frames import FrameDecoder, FrameError, encode_frame
from ksana.tokenizers import encoder_process
from ksana.tokenizers.encoder_process import Definition, Encoded, EncodeText, FromProcess, NotDone, ToProcess

_COMMAND = (sys.executable, "-P", encoder_process.__file__)
_INHERITED = (
    "PATH",
    "PYTHONPATH",
    "PYTHONHOME",
    "VIRTUAL_ENV",
    "LD_LIBRARY_PATH",
    "LANG",
    "LC_ALL",
    "TMPDIR",
)
_RECEIVE_BYTES = 1 << 18
_LOAD_BYTES, _LOAD_BYTES_PER_BYTE = 256 << 20, 64
_LOAD_CPU_S, _LOAD_CPU_S_PER_BYTE = 1.5, 0.6e-6
"""What loading a definition may take; a vocabulary of 262,144 takes 24 bytes and 0.12 µs per byte."""
_WALL_FACTOR, _WALL_S = 10.0, 30.0
"""Processor time is the limit; time by the clock is for a process that hangs, even on a busy machine."""


@dataclass(frozen=True)
class TextLimits:
    """What encoding one text may take."""

    num_bytes: int = 1 << 30
    cpu_s: float = 2.0
    cpu_s_per_char: float = 5e-6
    """A character takes 0.2 to 4 µs with tokenizers that are linear."""
    max_cpu_s: float = 20.0

    def cpu_s_of(self, text: str) -> float:
        return min(self.cpu_s + self.cpu_s_per_char * len(text), self.max_cpu_s)

    def __str__(self) -> str:
        return f"{self.num_bytes >> 20} MiB and {self.cpu_s:g} s"


class ChildEnded(Exception):
    """The other process did not do what was asked. `why` can be shown to anybody: it quotes no text."""

    def __init__(self, why: str) -> None:
        super().__init__(why)
        self.why = why


class EncoderChild:
    """A process that encodes with limits: started when needed, replaced when it dies.

    One text at a time; who comes later waits for a lock. May be used from several threads.
    """

    def __init__(self, definition: Callable[[], bytes], limits: TextLimits) -> None:
        """`definition` makes the tokenizer.json."""
        self._definition = definition
        self._limits = limits
        self._lock = threading.Lock()
        self._process: _Process | None = None

    @property
    def pid(self) -> int | None:
        """While there is one."""
        process = self._process
        return None if process is None else process.pid

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        """Raises ChildEnded when the limits are exceeded or the library fails."""
        cpu_s = self._limits.cpu_s_of(text)
        with self._lock:
            process = self._started()
            order = EncodeText(text=text, add_special_tokens=add_special_tokens, cpu_s=cpu_s)
            answer = self._ask(process, order, cpu_s, self._limits.num_bytes)
            if not isinstance(answer, Encoded) or answer.used_up:
                self._end()
        if not isinstance(answer, Encoded):
            raise ChildEnded(_failure(answer, self._limits.num_bytes))
        return array("I", answer.ids).tolist()

    def check(self) -> None:
        """Load the definition and end. Raises ChildEnded when that is not possible within the limits."""
        try:
            with self._lock:
                self._started()
        finally:
            self.close()

    def close(self) -> None:
        """End the process; a text that it is working on is refused."""
        process = self._process
        if process is not None:
            process.kill()  # so that who holds the lock gets on
        with self._lock:
            self._end()

    def _started(self) -> _Process:
        """The running process, or a new one that has loaded the definition."""
        if self._process is not None:
            return self._process
        tokenizer = self._definition()
        load_bytes = _LOAD_BYTES + _LOAD_BYTES_PER_BYTE * len(tokenizer)
        cpu_s = _LOAD_CPU_S + _LOAD_CPU_S_PER_BYTE * len(tokenizer)
        order = Definition(
            tokenizer=tokenizer, load_bytes=load_bytes, load_cpu_s=cpu_s, text_bytes=self._limits.num_bytes
        )
        self._process = process = _Process()
        answer = self._ask(process, order, cpu_s, load_bytes)
        if isinstance(answer, NotDone):
            self._end()
            raise ChildEnded(answer.message)
        return process

    def _ask(self, process: _Process, order: ToProcess, cpu_s: float, num_bytes: int) -> FromProcess:
        try:
            return process.ask(order, _WALL_S + _WALL_FACTOR * cpu_s)
        except (OSError, EOFError, FrameError, msgspec.DecodeError) as error:
            self._end()
            why = "no answer in time" if isinstance(error, TimeoutError) else process.how_it_ended()
            raise ChildEnded(_exceeded(why, cpu_s, num_bytes)) from None
        except BaseException:
            self._end()  # its answer to this would be taken for that to the next
            raise

    def _end(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            process.end()


def _exceeded(signal_name: str, cpu_s: float, num_bytes: int) -> str:
    if signal_name == "SIGPROF":
        return f"it takes more than {cpu_s:.1f} s of processor time, which is the limit"
    if signal_name == "SIGABRT":  # how the library ends when there is no more memory
        return _too_much_memory(num_bytes)
    return f"the process that works on it ended ({signal_name})"


def _failure(answer: FromProcess, num_bytes: int) -> str:
    kind = answer.kind if isinstance(answer, NotDone) else type(answer).__name__
    if kind == "MemoryError":
        return _too_much_memory(num_bytes)
    return f"this model's tokenizer failed on it ({kind})"


def _too_much_memory(num_bytes: int) -> str:
    return f"it takes more than {num_bytes >> 20} MiB of memory, which is the limit"


class _Process:
    """One process and the socket to it. Ends with this object."""

    def __init__(self) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            environment = {name: os.environ[name] for name in _INHERITED if name in os.environ}
            # Whatever a panic prints may quote the text.
            self._process = subprocess.Popen(
                [*_COMMAND, str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                pass_fds=(theirs.fileno(),),
                env=environment | {"TOKENIZERS_PARALLELISM": "false", "RAYON_NUM_THREADS": "1"},
                start_new_session=True,  # Ctrl-C in a terminal is for us
            )
        self._socket = ours
        self._frames = FrameDecoder()
        self._finalizer = weakref.finalize(self, _end, self._process, ours)

    @property
    def pid(self) -> int:
        return self._process.pid

    def ask(self, order: ToProcess, within_s: float) -> FromProcess:
        """Raises OSError, EOFError, FrameError or msgspec.DecodeError when it does not answer rightly."""
        deadline_s = time.monotonic() + within_s
        self._socket.settimeout(within_s)
        self._socket.sendall(encode_frame(msgspec.msgpack.encode(order)))
        while True:
            self._socket.settimeout(max(deadline_s - time.monotonic(), 0.001))
            data = self._socket.recv(_RECEIVE_BYTES)
            if not data:
                raise EOFError
            for payload in self._frames.feed(data):
                return encoder_process.from_process_decoder.decode(payload)

    def kill(self) -> None:
        self._process.kill()

    def end(self) -> None:
        self._finalizer()

    def how_it_ended(self) -> str:
        """The name of the signal that killed it, or its exit status; when it is reaped."""
        returncode = self._process.returncode
        with contextlib.suppress(ValueError):
            return signal.Signals(-returncode).name
        return f"status {returncode}"


def _end(process: subprocess.Popen[bytes], connection: socket.socket) -> None:
    connection.close()
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(0.2)  # it may be on its way, by a signal that tells why
    process.kill()
    process.wait()
