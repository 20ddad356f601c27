"""Where in a directory the file of a key lies, and whose fault it is when it cannot be used.

    root/3f/3f9a...66.safetensors      root/<shard>/<key in hex>

What stands in the place of one block, or of one shard, is a fault of those keys and not of the store: the
others go on. Links are never followed below the root.
"""

from __future__ import annotations

import errno
import os
import re
import stat

from ksana.stores import envelope
from ksana.stores.envelope import KeyFault

SUFFIX = ".safetensors"
SHARD = re.compile(r"[0-9a-f]{2}")
NAME = re.compile(rf"[0-9a-f]{{2,{2 * envelope.MAX_KEY_BYTES}}}{re.escape(SUFFIX)}")

_FAULTS_OF_KEYS = frozenset(
    {
        *(errno.EISDIR, errno.ENOTDIR, errno.EEXIST, errno.ENOTEMPTY, errno.ELOOP, errno.ENAMETOOLONG),
        *(errno.EACCES, errno.EPERM, errno.EXDEV, errno.ENXIO, errno.ENODEV, errno.ETXTBSY, errno.EBUSY),
    }
)
"""Where the root itself can be used. Others (ENOSPC, EDQUOT, EROFS, EIO, ESTALE, ...) are the store's."""


def block_path(root: str, key: bytes) -> str:
    envelope.check_limits(key, 0)
    return named_path(root, key.hex() + SUFFIX)


def named_path(root: str, name: str) -> str:
    return f"{root}/{name[:2]}/{name}"


def is_regular(path: str) -> bool:
    """Whether a file that could be a block is there. Raises OSError if the store is at fault."""
    try:
        return has_shard(path) and stat.S_ISREG(os.stat(path, follow_symlinks=False).st_mode)
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError as error:
        if is_keys_fault(error, path):
            return False
        raise


def has_shard(path: str) -> bool:
    """Whether the shard of the block is there: a directory, and no link to one. Raises OSError, which is the
    store's fault: the root cannot be looked into."""
    try:
        return is_directory(os.path.dirname(path))
    except (FileNotFoundError, NotADirectoryError):
        return False


def is_directory(path: str) -> bool:
    return stat.S_ISDIR(os.stat(path, follow_symlinks=False).st_mode)


def check_place(path: str) -> None:
    """Raises KeyFault if no block can be written there, OSError if the store is at fault."""
    shard = os.path.dirname(path)
    try:
        if not is_directory(shard):
            raise KeyFault(f"{shard} is no directory")
    except (FileNotFoundError, NotADirectoryError):
        return  # the writer makes it
    try:
        info = os.stat(path, follow_symlinks=False)
    except FileNotFoundError:
        return
    except OSError as error:
        raise fault_of(error, path) from error
    if stat.S_ISDIR(info.st_mode):
        raise KeyFault(f"{path} is a directory")


def fault_of(error: OSError, path: str) -> OSError | KeyFault:
    """What to raise for an error at the place of one block."""
    if is_keys_fault(error, path):
        return KeyFault(f"{path}: {error.strerror}")
    return error


def is_keys_fault(error: OSError, path: str) -> bool:
    """Of this key alone, as what stands above its shard can be used."""
    if error.errno not in _FAULTS_OF_KEYS:
        return False
    try:
        has_shard(path)
    except OSError:
        return False
    return True
