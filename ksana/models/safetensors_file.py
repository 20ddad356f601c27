"""Safetensors checkpoints, one file or shards with an index: read through a map, without torch.

Format: u64 little-endian header length, a JSON object name -> {dtype, shape, data_offsets}, the data. Lengths
are checked against the file before anything is allocated, and tensors must lie end to end: bytes that belong
to two of them, or to none, mean that the header is not the one that the data was written with.
"""

from __future__ import annotations

import math
import mmap
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from ksana.errors import ModelLoadError
from ksana.input_file import open_regular
from ksana.json_object import decode_json_object, read_json_object
from ksana.shown import shown, shown_path

MAX_HEADER_BYTES = 32 << 20
MAX_INDEX_BYTES = 64 << 20
MAX_TENSORS = 1 << 16
"""Of one file. DeepSeek-V3 has some 600 in each of its files."""
MAX_INDEX_TENSORS = 1 << 17
"""Of all files together. DeepSeek-V3 has 91,991."""
_ITEMS_PER_TENSOR = 16
"""Punctuation of one header entry: 12, and some for more dimensions."""
MAX_DIMS = 8
MAX_FILE_NAME_BYTES = 255
ITEM_BYTES = {"F32": 4, "F16": 2, "BF16": 2}
INDEX_NAME, SINGLE_NAME = "model.safetensors.index.json", "model.safetensors"


@dataclass(frozen=True)
class SafeTensor:
    """One tensor of a file. `offset` counts from the start of the file."""

    name: str
    shape: tuple[int, ...]
    type_name: str
    offset: int
    num_bytes: int


class SafetensorsFile:
    """One .safetensors file, mapped read-only.

    Invariant: every tensor of `tensors` lies wholly inside the file; for supported dtypes its size is what
    its shape gives. Raises ModelLoadError for anything malformed.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._data = map_file(path)
        if len(self._data) < 8:
            raise ModelLoadError(f"{path}: cut off: only {len(self._data)} bytes")
        length = int.from_bytes(self._data[:8], "little")
        if length > MAX_HEADER_BYTES or 8 + length > len(self._data):
            raise ModelLoadError(
                f"{path}: the header claims {length} bytes; the file has {len(self._data)} and at most "
                f"{MAX_HEADER_BYTES} are allowed. Truncated, or not a safetensors file"
            )
        self._start = 8 + length
        header = decode_json_object(
            self._data[8 : self._start],
            f"{shown_path(path)}: the header",
            max_items=_ITEMS_PER_TENSOR * MAX_TENSORS,
            unique=True,
        )
        if len(header) > MAX_TENSORS:
            raise ModelLoadError(f"{path}: {len(header)} tensors; {MAX_TENSORS} are allowed")
        self.tensors = {
            name: self._entry(name, entry) for name, entry in header.items() if name != "__metadata__"
        }
        self._check_places(self.tensors.values())

    def _entry(self, name: str, entry: Any) -> SafeTensor:
        try:
            raw = msgspec.convert(entry, _HeaderEntry)
        except msgspec.ValidationError as error:
            raise ModelLoadError(f"{self.path}: tensor {shown(name)} is described wrongly: {error}") from None
        begin, end = raw.data_offsets
        if any(size < 0 for size in raw.shape) or len(raw.shape) > MAX_DIMS or not 0 <= begin <= end:
            raise ModelLoadError(f"{self.path}: tensor {shown(name)} is described wrongly: {shown(entry)}")
        if self._start + end > len(self._data):
            raise ModelLoadError(
                f"{self.path}: cut off: tensor {shown(name)} needs bytes up to {self._start + end}, "
                f"the file has {len(self._data)}"
            )
        if raw.dtype in ITEM_BYTES and math.prod(raw.shape) * ITEM_BYTES[raw.dtype] != end - begin:
            raise ModelLoadError(
                f"{self.path}: tensor {shown(name)} of {raw.dtype} and shape {shown(list(raw.shape))} "
                f"has {end - begin} bytes"
            )
        return SafeTensor(name, raw.shape, raw.dtype, self._start + begin, end - begin)

    def _check_places(self, tensors: Iterable[SafeTensor]) -> None:
        end, before = self._start, "the header"
        for tensor in sorted(tensors, key=lambda tensor: (tensor.offset, tensor.num_bytes)):
            if tensor.offset < end:
                raise ModelLoadError(f"{self.path}: tensors {before} and {shown(tensor.name)} overlap")
            if tensor.offset > end:
                raise ModelLoadError(
                    f"{self.path}: {tensor.offset - end} bytes between {before} and tensor "
                    f"{shown(tensor.name)} belong to no tensor"
                )
            end, before = tensor.offset + tensor.num_bytes, shown(tensor.name)
        if end < len(self._data):
            raise ModelLoadError(f"{self.path}: the last {len(self._data) - end} bytes belong to no tensor")

    def raw(self, name: str) -> npt.NDArray[np.uint8]:
        """The stored bytes of a tensor, a view into the file."""
        tensor = self.tensors[name]
        return np.frombuffer(self._data, np.uint8, tensor.num_bytes, tensor.offset)

    def read(self, name: str) -> npt.NDArray[np.float32]:
        """A tensor as float32 in its shape. May be a read-only view into the file."""
        tensor = self.tensors[name]
        raw = self.raw(name)
        if tensor.type_name == "F32":
            values = raw.view("<f4")
        elif tensor.type_name == "F16":
            values = raw.view("<f2").astype(np.float32)
        elif tensor.type_name == "BF16":  # the upper half of a float32
            values = (raw.view("<u2").astype(np.uint32) << 16).view(np.float32)
        else:
            raise ModelLoadError(
                f"{self.path}: tensor {shown(name)} has dtype {tensor.type_name}; "
                f"supported: {', '.join(ITEM_BYTES)}"
            )
        return values.reshape(tensor.shape)


class _HeaderEntry(msgspec.Struct):
    dtype: str
    shape: tuple[int, ...]
    data_offsets: tuple[int, int]


def map_file(path: Path) -> mmap.mmap:
    """A regular file as memory, read-only. Raises ModelLoadError."""
    descriptor = open_regular(path, ModelLoadError, f"{shown_path(path)}:")
    try:
        return mmap.mmap(descriptor, 0, access=mmap.ACCESS_READ)
    except (OSError, ValueError) as error:
        raise ModelLoadError(f"{shown_path(path)}: cannot be read: {error}") from error
    finally:
        os.close(descriptor)


def open_directory(directory: Path) -> dict[str, SafetensorsFile]:
    """Tensor name to the file that holds it, for a Hugging Face directory.

    With an index, exactly the files and names it lists count, and stray files are not looked at. Without one
    there must be a single file. Raises ModelLoadError, also for directories with pickled weights only.
    """
    index_path = directory / INDEX_NAME
    if os.path.lexists(index_path):
        return _open_index(directory, index_path)
    single = directory / SINGLE_NAME
    if os.path.lexists(single):
        file = SafetensorsFile(single)
        return dict.fromkeys(file.tensors, file)
    others = sorted(path.name for path in directory.glob("*.safetensors"))
    if len(others) == 1:
        file = SafetensorsFile(directory / others[0])
        return dict.fromkeys(file.tensors, file)
    if others:
        raise ModelLoadError(
            f"{directory}: {len(others)} safetensors files ({', '.join(others[:3])}, ...) and no "
            f"{INDEX_NAME} that says which belong together"
        )
    pickled = sorted(path.name for path in directory.glob("*.bin"))
    if pickled:
        raise ModelLoadError(
            f"{directory}: only pickled weights ({pickled[0]}); they can run code and are not read. "
            f"Convert them to safetensors"
        )
    raise ModelLoadError(f"{directory}: no {SINGLE_NAME} and no {INDEX_NAME}")


def _open_index(directory: Path, index_path: Path) -> dict[str, SafetensorsFile]:
    weight_map = read_json_object(index_path, MAX_INDEX_BYTES, unique=True).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(name, str) for name in weight_map.values()):
        raise ModelLoadError(f"{index_path}: weight_map must map tensor names to file names")
    if len(weight_map) > MAX_INDEX_TENSORS:
        raise ModelLoadError(f"{index_path}: {len(weight_map)} tensors; {MAX_INDEX_TENSORS} are allowed")
    files: dict[str, SafetensorsFile] = {}
    for file_name in dict.fromkeys(weight_map.values()):
        if not _is_plain_name(file_name):
            raise ModelLoadError(
                f"{index_path}: {shown(file_name)} is not the plain name of a safetensors file"
            )
        if not os.path.lexists(directory / file_name):
            missing = next(name for name, holder in weight_map.items() if holder == file_name)
            raise ModelLoadError(f"{directory / file_name}: missing; it should hold tensor {shown(missing)}")
        files[file_name] = SafetensorsFile(directory / file_name)
    for name, file_name in weight_map.items():
        if name not in files[file_name].tensors:
            raise ModelLoadError(
                f"{files[file_name].path}: tensor {shown(name)} is missing; the index says it is here"
            )
    return {name: files[file_name] for name, file_name in weight_map.items()}


def _is_plain_name(name: str) -> bool:
    """Whether it can only be a file beside the index."""
    return (
        name.endswith(".safetensors")
        and name.isprintable()
        and Path(name).name == name
        and len(name.encode()) <= MAX_FILE_NAME_BYTES
    )
