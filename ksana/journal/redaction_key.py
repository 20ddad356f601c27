"""The key of a redaction, and the permutation of the vocabulary that it gives."""

from __future__ import annotations

import hashlib
import os
import secrets
import stat
from pathlib import Path

from ksana.errors import ConfigError
from ksana.private_files import open_private, warn_if_exposed

KEY_BYTES = 32


def permutation(key: bytes, vocab_size: int) -> list[int]:
    """The new id of each id: ids in the order of their keyed hashes. 1 µs each."""

    def place(token_id: int) -> bytes:
        data = token_id.to_bytes(4, "little")
        return hashlib.blake2b(data, key=key, digest_size=16, person=b"ksana ids").digest()

    renamed = [0] * vocab_size
    for new_id, token_id in enumerate(sorted(range(vocab_size), key=place)):
        renamed[token_id] = new_id
    return renamed


def read_or_make_key(file: str | None) -> bytes:
    """The key in the file (64 hexadecimal digits), which is made if it is not there; without a file a key
    that nobody learns. Raises ConfigError."""
    key = secrets.token_bytes(KEY_BYTES)
    if file is None:
        return key
    path = Path(file)
    try:
        try:
            descriptor = open_private(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY)
        except FileExistsError:
            # A pipe that nobody writes to would be waited for in vain.
            with os.fdopen(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as existing:
                if not stat.S_ISREG(os.fstat(existing.fileno()).st_mode):
                    raise ConfigError(f"the journal's key file {path} is no regular file") from None
                text = existing.read(2 * KEY_BYTES + 64)
            warn_if_exposed(path, "the journal's key file")
        else:
            with os.fdopen(descriptor, "w") as made:
                made.write(key.hex() + "\n")
            return key
    except OSError as error:
        raise ConfigError(f"the journal's key file {path} cannot be used: {error.strerror}") from None
    try:
        key = bytes.fromhex(text.decode("ascii").strip())
    except ValueError:
        key = b""
    if len(key) != KEY_BYTES:
        raise ConfigError(f"the journal's key file {path} does not hold {2 * KEY_BYTES} hexadecimal digits")
    return key
