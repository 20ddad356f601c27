"""The process that encodes what could explode. Started by its file name, so that it imports little.

    parent    Definition (a tokenizer.json, and limits)      EncodeText, ...
    process                                        Loaded                    Encoded, ...

over a socket, in frames of msgpack. Memory is bounded by the size of the address space above what the process
has when it begins, time by a timer of processor time whose signal kills: whatever the library does meanwhile,
it ends. The process ends with its parent, too: when the socket closes. It writes nothing anywhere.
"""

from __future__ import annotations

import os
import resource
import select
import signal
import socket
import sys
import threading
from array import array
from collections.abc import Iterator

import msgspec
from tokenizers import Tokenizer

from ksana.runtime.frames import FrameDecoder, encode_frame

_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
_RECEIVE_BYTES = 1 << 18
_WORTH_LEAVING = 4
"""A process that has grown by this part of its allowance is not used again."""


class Definition(msgspec.Struct, tag=True, kw_only=True):
    """parent -> process, first of all: the tokenizer, and what loading it and one text may take."""

    tokenizer: bytes
    load_bytes: int
    load_cpu_s: float
    text_bytes: int


class EncodeText(msgspec.Struct, tag=True, kw_only=True):
    """parent -> process."""

    text: str
    add_special_tokens: bool
    cpu_s: float


class Loaded(msgspec.Struct, tag=True):
    """process -> parent: ready for texts."""


class Encoded(msgspec.Struct, tag=True, kw_only=True):
    """process -> parent: ids as 32-bit numbers."""

    ids: bytes
    used_up: bool
    """It holds so much memory now that another process should encode the next text."""


class NotDone(msgspec.Struct, tag=True, kw_only=True):
    """process -> parent: the library failed."""

    kind: str
    message: str


ToProcess = Definition | EncodeText
FromProcess = Loaded | Encoded | NotDone
from_process_decoder = msgspec.msgpack.Decoder(FromProcess)
_to_process_decoder = msgspec.msgpack.Decoder(ToProcess)


def main() -> None:
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    with socket.socket(fileno=int(sys.argv[1])) as connection:
        threading.Thread(target=_end_with_parent, args=(connection.fileno(),), daemon=True).start()
        orders = _orders(connection)
        definition = next(orders)
        assert isinstance(definition, Definition)
        with_limits = _Limits(definition.load_bytes, definition.load_cpu_s)
        try:
            with with_limits:
                backend = Tokenizer.from_buffer(definition.tokenizer)
        except BaseException as error:  # a panic is no Exception
            _say(connection, _not_done(error))
            return
        text_bytes = definition.text_bytes
        del definition
        _say(connection, Loaded())
        loaded_bytes = _address_space_bytes()
        for order in orders:
            assert isinstance(order, EncodeText)
            answer = _encode(backend, order, loaded_bytes + text_bytes)
            if isinstance(answer, Encoded):
                answer.used_up = _address_space_bytes() - loaded_bytes > text_bytes // _WORTH_LEAVING
            _say(connection, answer)


def _encode(backend: Tokenizer, order: EncodeText, limit_bytes: int) -> Encoded | NotDone:
    try:
        with _Limits(limit_bytes - _address_space_bytes(), order.cpu_s):
            (encoding,) = backend.encode_batch_fast([order.text], add_special_tokens=order.add_special_tokens)
            return Encoded(ids=array("I", encoding.ids).tobytes(), used_up=False)
    except BaseException as error:
        return _not_done(error)


def _not_done(error: BaseException) -> NotDone:
    return NotDone(kind=type(error).__name__, message=str(error)[:500])


class _Limits:
    """Within: at most so many bytes of address space more than now, and so much processor time."""

    def __init__(self, more_bytes: int, cpu_s: float) -> None:
        self._more_bytes = max(more_bytes, 0)
        self._cpu_s = cpu_s

    def __enter__(self) -> None:
        soft, hard = resource.getrlimit(resource.RLIMIT_AS)
        self._before: int = soft
        limit = _address_space_bytes() + self._more_bytes
        resource.setrlimit(resource.RLIMIT_AS, (limit if hard < 0 else min(limit, hard), hard))
        signal.setitimer(signal.ITIMER_PROF, self._cpu_s)

    def __exit__(self, *raised: object) -> None:
        signal.setitimer(signal.ITIMER_PROF, 0)
        _, hard = resource.getrlimit(resource.RLIMIT_AS)
        resource.setrlimit(resource.RLIMIT_AS, (self._before, hard))


def _address_space_bytes() -> int:
    with open("/proc/self/statm", "rb") as file:
        return int(file.read().split()[0]) * _PAGE_BYTES


def _end_with_parent(fd: int) -> None:
    """The parent's end of the socket closes with its death, however it dies."""
    poll = select.poll()
    poll.register(fd, select.POLLRDHUP)
    poll.poll()
    os._exit(0)


def _orders(connection: socket.socket) -> Iterator[ToProcess]:
    frames = FrameDecoder()
    while data := connection.recv(_RECEIVE_BYTES):
        for payload in frames.feed(data):
            yield _to_process_decoder.decode(payload)


def _say(connection: socket.socket, message: FromProcess) -> None:
    connection.sendall(encode_frame(msgspec.msgpack.encode(message)))


if __name__ == "__main__":
    main()
