"""GGUF files: a bounded reader of header, metadata and tensor table. No torch.

Layout (ggml's docs/gguf.md, versions 2 and 3, little-endian): magic, version, number of tensors, number of
metadata entries; the entries; per tensor a name, dimensions (innermost first), type and offset; padding to
the alignment; tensor data. Every length comes from outside, so each is compared with the bytes that are left
before anything is read or allocated. The `gguf` package supplies type sizes and dequantizing; its reader is
not used because it trusts lengths and takes seconds for a large vocabulary.
"""

from __future__ import annotations

import itertools
import math
import mmap
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize

from ksana.errors import ModelLoadError
from ksana.models.safetensors_file import map_file
from ksana.shown import shown

MAX_DIMS = 4
MAX_NAME_BYTES = 1024
"""Of a key or a tensor. ggml allows keys of 65,535 and tensor names of 63; real ones have some 50."""
MAX_ENTRIES = 4096
"""Of the metadata. Real files have some 50."""
MAX_TENSORS = 1 << 16
MAX_STRING_BYTES = 16 << 20
"""A chat template, a licence."""
MAX_STRINGS = 1 << 21
"""In all arrays together: a vocabulary of 262,144 with its merges has 777,058."""
MAX_STRINGS_BYTES = 64 << 20
"""Of one array."""
MAX_DECODED_ITEMS = 1 << 21
"""Of one array of numbers."""
DEQUANTIZE_ITEMS = 1 << 18

READABLE_TYPES = ("F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q4_K", "Q5_K", "Q6_K")

_STRING, _ARRAY = 8, 9
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_ARRAY_DTYPES = {
    0: "<u1", 1: "<i1", 2: "<u2", 3: "<i2", 4: "<u4", 5: "<i4", 6: "<f4", 7: "?",
    10: "<u8", 11: "<i8", 12: "<f8",
}  # fmt: skip


@dataclass(frozen=True)
class GgufTensor:
    """One entry of the tensor table. `shape` is outermost first, as numpy and torch have it."""

    name: str
    shape: tuple[int, ...]
    type_name: str
    offset: int
    num_bytes: int


class _Cursor:
    """Reads forward through the mapped file and never past its end."""

    def __init__(self, data: mmap.mmap, path: Path) -> None:
        self.data, self.path, self.offset, self.num_strings = data, path, 0, 0

    def _advance(self, num_bytes: int, what: str) -> int:
        start = self.offset
        if num_bytes > len(self.data) - start:
            left = len(self.data) - start
            raise ModelLoadError(f"{self.path}: cut off: {what} needs {num_bytes} bytes, {left} are left")
        self.offset = start + num_bytes
        return start

    def scalar(self, code: str, what: str) -> Any:
        start = self._advance(struct.calcsize("<" + code), what)
        return struct.unpack_from("<" + code, self.data, start)[0]

    def string(self, what: str, max_bytes: int = MAX_STRING_BYTES) -> str:
        length = self.scalar("Q", what)
        if length > max_bytes:
            raise ModelLoadError(
                f"{self.path}: {what} claims {length} bytes, at most {max_bytes} are allowed"
            )
        start = self._advance(length, what)
        return self.data[start : start + length].decode("utf-8", errors="replace")

    def array(self, what: str) -> _ArrayPlace:
        item_type, count = self.scalar("I", what), self.scalar("Q", what)
        place = _ArrayPlace(item_type, count, self.offset)
        if item_type == _STRING:
            self._skip_strings(count, what)
        elif item_type in _ARRAY_DTYPES:
            self._advance(count * np.dtype(_ARRAY_DTYPES[item_type]).itemsize, what)
        else:
            raise ModelLoadError(f"{self.path}: {what} is an array of type {item_type}, which is not known")
        return place

    def _skip_strings(self, count: int, what: str) -> None:
        unpack, data, end, offset = struct.Struct("<Q").unpack_from, self.data, len(self.data), self.offset
        if count > (end - offset) // 8:
            raise ModelLoadError(f"{self.path}: cut off: {what} claims {count} strings")
        self.num_strings += count
        if self.num_strings > MAX_STRINGS:
            raise ModelLoadError(f"{self.path}: {what} brings the file to more than {MAX_STRINGS} strings")
        for _ in range(count):
            if offset > end - 8:
                raise ModelLoadError(f"{self.path}: cut off inside {what}")
            offset += 8 + unpack(data, offset)[0]
        if offset > end:
            raise ModelLoadError(f"{self.path}: cut off inside {what}")
        if offset - self.offset > MAX_STRINGS_BYTES:
            raise ModelLoadError(
                f"{self.path}: {what} has {offset - self.offset} bytes; {MAX_STRINGS_BYTES} are allowed"
            )
        self.offset = offset


@dataclass(frozen=True)
class _ArrayPlace:
    """An array left in the file until somebody asks for it."""

    item_type: int
    count: int
    offset: int


class GgufFile:
    """A GGUF file, mapped read-only.

    Invariant: every tensor of `tensors` lies wholly inside the file, and its size is what its shape and type
    give. Opening costs one walk over the metadata (0.1 s for 262,144 tokens); arrays are decoded on `get`.
    Raises ModelLoadError for anything that is not a well-formed GGUF file.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._data = map_file(path)
        cursor = _Cursor(self._data, path)
        num_tensors, num_entries = self._read_preamble(cursor)
        self._metadata = self._read_metadata(cursor, num_entries)
        self.tensors = self._read_tensor_table(cursor, num_tensors)

    def _read_preamble(self, cursor: _Cursor) -> tuple[int, int]:
        if self._data[:4] != b"GGUF":
            raise ModelLoadError(f"{self.path}: not a GGUF file (it starts with {self._data[:4]!r})")
        cursor.offset = 4
        version = cursor.scalar("I", "the version")
        if version not in (2, 3):
            big = " (a big-endian file?)" if version & 0xFFFF == 0 else ""
            raise ModelLoadError(f"{self.path}: GGUF version {version} is not supported, only 2 and 3{big}")
        return cursor.scalar("Q", "the tensor count"), cursor.scalar("Q", "the metadata count")

    def _read_metadata(self, cursor: _Cursor, num_entries: int) -> dict[str, Any]:
        if num_entries > MAX_ENTRIES:
            raise ModelLoadError(f"{self.path}: {num_entries} metadata entries; {MAX_ENTRIES} are allowed")
        metadata: dict[str, Any] = {}
        for index in range(num_entries):
            key = cursor.string(f"metadata key {index}", MAX_NAME_BYTES)
            what = f"metadata {shown(key)}"
            if key in metadata:
                raise ModelLoadError(f"{self.path}: {what} occurs twice")
            kind = cursor.scalar("I", what)
            if kind == _STRING:
                metadata[key] = cursor.string(what)
            elif kind == _ARRAY:
                metadata[key] = cursor.array(what)
            elif kind in _SCALARS:
                metadata[key] = cursor.scalar(_SCALARS[kind], what)
            else:
                raise ModelLoadError(f"{self.path}: {what} has type {kind}, which is not known")
        return metadata

    def _read_tensor_table(self, cursor: _Cursor, num_tensors: int) -> dict[str, GgufTensor]:
        if num_tensors > MAX_TENSORS:
            raise ModelLoadError(f"{self.path}: {num_tensors} tensors; {MAX_TENSORS} are allowed")
        entries = []
        for index in range(num_tensors):
            name = cursor.string(f"the name of tensor {index}", MAX_NAME_BYTES)
            num_dims = cursor.scalar("I", f"tensor {shown(name)}")
            if num_dims > MAX_DIMS:
                raise ModelLoadError(
                    f"{self.path}: tensor {shown(name)} has {num_dims} dimensions, more than {MAX_DIMS}"
                )
            dims = [cursor.scalar("Q", f"tensor {shown(name)}") for _ in range(num_dims)]
            kind = cursor.scalar("I", f"tensor {shown(name)}")
            entries.append((name, tuple(reversed(dims)), kind, cursor.scalar("Q", f"tensor {shown(name)}")))
        alignment = self._metadata.get("general.alignment", 32)
        if type(alignment) is not int or alignment < 1 or alignment & (alignment - 1):
            raise ModelLoadError(f"{self.path}: general.alignment is {shown(alignment)}, not a power of two")
        data_start = -(-cursor.offset // alignment) * alignment
        tensors: dict[str, GgufTensor] = {}
        for name, shape, kind, offset in entries:
            if name in tensors:
                raise ModelLoadError(f"{self.path}: tensor {shown(name)} occurs twice")
            if offset % alignment:
                raise ModelLoadError(
                    f"{self.path}: tensor {shown(name)} is at {offset}, no multiple of the "
                    f"alignment {alignment}"
                )
            tensors[name] = self._place(name, shape, kind, data_start + offset)
        self._refuse_overlaps(tensors)
        return tensors

    def _refuse_overlaps(self, tensors: dict[str, GgufTensor]) -> None:
        placed = sorted(tensors.values(), key=lambda tensor: (tensor.offset, tensor.num_bytes))
        for before, tensor in itertools.pairwise(placed):
            if tensor.offset < before.offset + before.num_bytes:
                names = f"{shown(before.name)} and {shown(tensor.name)}"
                raise ModelLoadError(f"{self.path}: tensors {names} overlap")

    def _place(self, name: str, shape: tuple[int, ...], kind: int, offset: int) -> GgufTensor:
        try:
            ggml_type = GGMLQuantizationType(kind)
        except ValueError:
            raise ModelLoadError(f"{self.path}: tensor {shown(name)} has the unknown type {kind}") from None
        block_items, block_bytes = GGML_QUANT_SIZES[ggml_type]
        if not shape or shape[-1] % block_items:
            raise ModelLoadError(
                f"{self.path}: tensor {shown(name)} of shape {shown(list(shape))} cannot be "
                f"{ggml_type.name}: its rows must be multiples of {block_items}"
            )
        num_bytes = math.prod(shape) // block_items * block_bytes
        if offset + num_bytes > len(self._data):
            raise ModelLoadError(
                f"{self.path}: cut off: tensor {shown(name)} needs bytes {offset} to {offset + num_bytes}, "
                f"the file has {len(self._data)}"
            )
        return GgufTensor(name, shape, ggml_type.name, offset, num_bytes)

    def __contains__(self, key: str) -> bool:
        return key in self._metadata

    def get(self, key: str, default: Any = None) -> Any:
        """A metadata value: number, bool, string, or a list of them; `default` if there is none."""
        value = self._metadata.get(key, default)
        if not isinstance(value, _ArrayPlace):
            return value
        if value.item_type != _STRING:
            if value.count > MAX_DECODED_ITEMS:
                raise ModelLoadError(f"{self.path}: metadata {shown(key)} has {value.count} items")
            return np.frombuffer(
                self._data, _ARRAY_DTYPES[value.item_type], value.count, value.offset
            ).tolist()
        unpack, data, offset, strings = struct.Struct("<Q").unpack_from, self._data, value.offset, []
        for _ in range(value.count):
            start = offset + 8
            offset = start + unpack(data, offset)[0]
            strings.append(data[start:offset].decode("utf-8", errors="replace"))
        return strings

    def array_length(self, key: str) -> int | None:
        """Number of items of an array in the metadata, not decoding it; None if there is no such array."""
        value = self._metadata.get(key)
        return value.count if isinstance(value, _ArrayPlace) else None

    def metadata_keys(self) -> list[str]:
        return list(self._metadata)

    def raw(self, name: str) -> npt.NDArray[np.uint8]:
        """The stored bytes of a tensor, a view into the file."""
        tensor = self.tensors[name]
        return np.frombuffer(self._data, np.uint8, tensor.num_bytes, tensor.offset)

    def read(self, name: str) -> npt.NDArray[np.float32]:
        """A tensor as float32, dequantized. May be a read-only view into the file."""
        tensor = self.tensors[name]
        if tensor.type_name not in READABLE_TYPES:
            raise ModelLoadError(
                f"{self.path}: tensor {shown(name)} has type {tensor.type_name}; "
                f"supported: {', '.join(READABLE_TYPES)}"
            )
        rows = self.raw(name).reshape(*tensor.shape[:-1], -1)
        if tensor.type_name == "F32":
            return rows.view("<f4")
        if tensor.type_name == "F16":
            return rows.view("<f2").astype(np.float32)
        return _dequantize(rows, GGMLQuantizationType[tensor.type_name], tensor.shape)


def _dequantize(
    rows: npt.NDArray[np.uint8], ggml_type: GGMLQuantizationType, shape: tuple[int, ...]
) -> npt.NDArray[np.float32]:
    """In pieces that stay in the processor's cache, which takes less than half of the time."""
    values = np.empty(shape, np.float32)
    flat_rows, flat_values = rows.reshape(-1, rows.shape[-1]), values.reshape(-1, shape[-1])
    step = max(1, DEQUANTIZE_ITEMS // shape[-1])
    for start in range(0, len(flat_rows), step):
        flat_values[start : start + step] = dequantize(flat_rows[start : start + step], ggml_type)
    return values
