"""What is written to a client that sends nothing more, to find out whether it is still there."""

from __future__ import annotations

import h11


class Begun:
    """Bytes that every answer begins with, sent one by one before there is an answer.

    Whether a client that sends nothing more has left or still reads, only writing tells. What is written has
    to be harmless, so it is the beginning of what comes anyway: of the status line, or of the next chunk,
    whose length may have zeros before it. `rest_of` what then comes is sent.
    """

    LINE = b"HTTP/1.1 "
    MAX_ZEROS = 8

    def __init__(self) -> None:
        self.in_chunks = False
        """Of an answer whose head has been sent."""
        self._num_sent = 0

    def next(self, our_state: object) -> bytes:
        """One more byte, or nothing where none may be sent. The caller sends it."""
        byte = b""
        if our_state is h11.SEND_RESPONSE:
            byte = self.LINE[self._num_sent : self._num_sent + 1]
        elif our_state is h11.SEND_BODY and self.in_chunks and self._num_sent < self.MAX_ZEROS:
            byte = b"0"
        self._num_sent += len(byte)
        return byte

    def rest_of(self, data: bytes) -> bytes:
        """What is still to be sent of the next piece."""
        num_sent, self._num_sent = self._num_sent, 0
        return data[num_sent:] if num_sent and data.startswith(self.LINE) else data
