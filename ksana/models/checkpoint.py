"""A checkpoint as a decoder sees it: tensors by role and layer, as float32. No torch.

Opening checks completeness: every tensor the spec asks for is there with its shape and a type that can be
read, and nothing is there that nobody asked for. What is read is checked to be finite.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Protocol

import msgspec
import numpy as np
import numpy.typing as npt

from ksana.errors import ModelLoadError
from ksana.json_object import read_json_object
from ksana.models.family import Array, Family
from ksana.models.fields import Fields
from ksana.models.gguf_file import READABLE_TYPES, GgufFile
from ksana.models.gguf_spec import gguf_fields
from ksana.models.registry import FAMILIES, family_of_config, family_of_gguf
from ksana.models.safetensors_file import ITEM_BYTES, open_directory
from ksana.models.spec import ModelSpec
from ksana.models.tensors import TensorRole, decoder_tensors, head_tensor
from ksana.shown import shown, shown_path

MAX_CONFIG_BYTES = 10_000_000
GENERATION_CONFIG = "generation_config.json"
HEAD_DIM_MULTIPLE, MAX_HEAD_DIM = 8, 512
"""What the attention kernels can do."""


class StoredTensor(Protocol):
    """What both formats know about a tensor without reading it."""

    @property
    def name(self) -> str: ...
    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def type_name(self) -> str: ...
    @property
    def num_bytes(self) -> int: ...


class TensorFile(Protocol):
    """GgufFile or SafetensorsFile."""

    path: Path

    @property
    def tensors(self) -> Mapping[str, StoredTensor]: ...
    def raw(self, name: str) -> npt.NDArray[np.uint8]: ...
    def read(self, name: str) -> npt.NDArray[np.float32]: ...


class Checkpoint:
    """Spec and tensors of one model, opened by `open_checkpoint`."""

    def __init__(
        self,
        path: Path,
        spec: ModelSpec,
        stored: Mapping[str, tuple[TensorFile, str]],
        names: Mapping[str, str],
        transform: Callable[[ModelSpec, str, Array], Array],
        readable: tuple[str, ...],
    ) -> None:
        self.path, self.spec = path, spec
        self._stored, self._names, self._transform, self._readable = stored, names, transform, readable

    @property
    def has_head(self) -> bool:
        """Whether an output head is stored, whatever the configuration says about tying."""
        return self._names["head"] in self._stored

    def check(self, ignored: tuple[str, ...]) -> None:
        """Raise ModelLoadError unless the stored tensors are exactly those of the spec, rightly shaped."""
        wanted = list(decoder_tensors(self.spec))
        if self.has_head or not self.spec.tie_word_embeddings:
            wanted.append(head_tensor(self.spec))
        for tensor in wanted:
            self._check_one(tensor)
        extra = set(self._stored) - {self.stored_name(tensor.role, tensor.layer) for tensor in wanted}
        known = re.compile("|".join(ignored)) if ignored else None
        unknown = sorted(name for name in extra if known is None or not known.fullmatch(name))
        if unknown:
            file, stored_name = self._stored[unknown[0]]
            raise ModelLoadError(
                f"{file.path}: tensor {shown(stored_name)} is not part of a {self.spec.family} model of this "
                f"configuration ({len(unknown)} such tensors); leaving it out would give wrong answers"
            )

    def _check_one(self, tensor: TensorRole) -> None:
        name = self.stored_name(tensor.role, tensor.layer)
        if name not in self._stored:
            hint = " (tie_word_embeddings is false)" if tensor.role == "head" else ""
            raise ModelLoadError(f"{self.path}: tensor {shown(name)} is missing{hint}")
        file, stored_name = self._stored[name]
        stored = file.tensors[stored_name]
        if stored.shape != tensor.shape:
            raise ModelLoadError(
                f"{file.path}: tensor {shown(stored_name)} has shape {shown(list(stored.shape))}, "
                f"the configuration gives {list(tensor.shape)}"
            )
        if stored.type_name not in self._readable:
            raise ModelLoadError(
                f"{file.path}: tensor {shown(stored_name)} has type {stored.type_name}; "
                f"supported: {', '.join(self._readable)}"
            )

    def stored_name(self, role: str, layer: int | None = None) -> str:
        return self._names[role].format(layer)

    def read(self, role: str, layer: int | None = None) -> Array:
        """The values of a tensor, float32, contiguous, writable only if they were converted."""
        file, stored_name = self._stored[self.stored_name(role, layer)]
        values = file.read(stored_name)
        if values.size and not (np.isfinite(values.min()) and np.isfinite(values.max())):
            raise ModelLoadError(f"{file.path}: tensor {shown(stored_name)} holds values that are not finite")
        # A file may place its data at any byte; kernels want whole words.
        return np.require(self._transform(self.spec, role, values), requirements=["C", "A"])

    def stored_tensors(self) -> list[tuple[StoredTensor, npt.NDArray[np.uint8]]]:
        """Every stored tensor with its bytes, by name: what a fingerprint is made of."""
        pairs = sorted(self._stored.items())
        return [(file.tensors[name], file.raw(name)) for _, (file, name) in pairs]


def open_checkpoint(path: Path) -> Checkpoint:
    """Open and check a Hugging Face directory or a GGUF file. Raises ModelLoadError."""
    spec, family, gguf = _identify(path)
    if gguf is not None:
        stored: dict[str, tuple[TensorFile, str]] = {name: (gguf, name) for name in gguf.tensors}
        names, transform = family.gguf_names, family.gguf_transform
        readable: tuple[str, ...] = READABLE_TYPES
    else:
        files = open_directory(path)
        stored = {_canonical(name, family): (file, name) for name, file in files.items()}
        if len(stored) < len(files):
            raise ModelLoadError(f"{path}: tensors occur twice, under different prefixes")
        names, transform = family.hf_names, family.hf_transform
        readable = tuple(ITEM_BYTES)
    checkpoint = Checkpoint(path, spec, stored, names, transform, readable)
    checkpoint.check(family.ignored)
    return checkpoint


def read_spec(path: Path) -> ModelSpec:
    """What the model is, from config.json of a directory or the metadata of a GGUF file."""
    return _identify(path)[0]


def _identify(path: Path) -> tuple[ModelSpec, Family, GgufFile | None]:
    if path.is_dir():
        spec = _spec_from_config(read_json(path / "config.json"), path)
        return spec, FAMILIES[spec.family], None
    if path.suffix != ".gguf":
        raise ModelLoadError(f"{path}: neither a directory nor a .gguf file")
    file = GgufFile(path)
    architecture = file.get("general.architecture")
    if not isinstance(architecture, str):
        raise ModelLoadError(f"{path}: general.architecture is missing")
    family = family_of_gguf(architecture, str(path))
    metadata = gguf_fields(file, architecture)
    metadata.refuse_unless(
        "split.count", (0, 1), "GGUF files in several parts are not read; merge them first"
    )
    return _checked(family.spec_from_gguf(file, metadata), path), family, file


def read_json(path: Path) -> Fields:
    """A configuration file. Raises ModelLoadError if it cannot be read or is not a JSON object."""
    return Fields(read_json_object(path, MAX_CONFIG_BYTES), shown_path(path))


def _more_end_tokens(directory: Path) -> tuple[int, ...]:
    """End tokens that only generation_config.json names, as some chat models do. Nothing else is taken
    from that file: sampling is what the request says."""
    if not os.path.lexists(directory / GENERATION_CONFIG):
        return ()
    return read_json(directory / GENERATION_CONFIG).token_ids("eos_token_id")


def _spec_from_config(config: Fields, path: Path) -> ModelSpec:
    architectures = config.values.get("architectures")
    if not isinstance(architectures, list) or not all(isinstance(name, str) for name in architectures):
        raise config.fail("architectures", "must list the names of the architecture")
    config.refuse_unless("quantization_config", (), "quantized safetensors are not read; GGUF files are")
    spec = family_of_config(architectures, config.source).spec_from_config(config)
    ends = tuple(dict.fromkeys(spec.eos_token_ids + _more_end_tokens(path)))
    return _checked(msgspec.structs.replace(spec, eos_token_ids=ends, name=_directory_name(path)), path)


def _directory_name(path: Path) -> str:
    """What a directory's model is called: org/name in the hub's cache, else the directory's own name."""
    path = path.resolve()
    repository = path.parent.parent.name
    if path.parent.name == "snapshots" and repository.startswith("models--"):
        return repository.removeprefix("models--").replace("--", "/", 1)
    return path.name


def _checked(spec: ModelSpec, path: Path) -> ModelSpec:
    if spec.num_heads % spec.num_kv_heads:
        raise ModelLoadError(
            f"{path}: {spec.num_heads} heads are no multiple of {spec.num_kv_heads} KV heads"
        )
    if spec.head_dim % HEAD_DIM_MULTIPLE or spec.head_dim > MAX_HEAD_DIM:
        raise ModelLoadError(
            f"{path}: head size {spec.head_dim} is not built; it must be a multiple of {HEAD_DIM_MULTIPLE} "
            f"up to {MAX_HEAD_DIM}"
        )
    beyond = [i for i in (spec.bos_token_id, *spec.eos_token_ids) if i is not None and i >= spec.vocab_size]
    if beyond:
        raise ModelLoadError(
            f"{path}: special token {beyond[0]} is not in the vocabulary of {spec.vocab_size}"
        )
    return spec


def _canonical(name: str, family: Family) -> str:
    for prefix, replacement in family.hf_prefixes:
        if name.startswith(prefix):
            return replacement + name[len(prefix) :]
    return name
