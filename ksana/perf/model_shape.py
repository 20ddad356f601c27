"""The sizes of a model that a profile of one layer does not tell, and the device it was made on.

They are stated by whoever asks, or stand in `config.json` beside the tables, or are those of a known model
that `meta.json` or `meta.yaml` names. What none of them tells is unknown, and refused where it is needed.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import msgspec
import yaml
from msgspec import Meta

from ksana.errors import ConfigError
from ksana.input_file import read_input

_MAX_BYTES = 1 << 20

Size = Annotated[int, Meta(ge=1, le=1 << 24)]


class ModelShape(msgspec.Struct, frozen=True, kw_only=True):
    """Of the whole model. None: unknown."""

    num_layers: Size | None = None
    hidden_size: Size | None = None
    kv_heads: Size | None = None
    vocab_size: Size | None = None

    def filled_from(self, other: ModelShape) -> ModelShape:
        known = {name: value for name in self.__struct_fields__ if (value := getattr(self, name)) is not None}
        return msgspec.structs.replace(other, **known)


def _shape(num_layers: int, hidden_size: int, kv_heads: int, vocab_size: int) -> ModelShape:
    return ModelShape(
        num_layers=num_layers, hidden_size=hidden_size, kv_heads=kv_heads, vocab_size=vocab_size
    )


_KNOWN = {
    "llama-2-7b": _shape(32, 4096, 32, 32_000),
    "llama-3.1-8b": _shape(32, 4096, 8, 128_256),
    "llama-3.1-70b": _shape(80, 8192, 8, 128_256),
    "llama-3.3-70b": _shape(80, 8192, 8, 128_256),
    "llama-3.2-1b": _shape(16, 2048, 8, 128_256),
    "llama-3.2-3b": _shape(28, 3072, 8, 128_256),
    "mistral-7b": _shape(32, 4096, 8, 32_768),
    "mixtral-8x7b": _shape(32, 4096, 8, 32_000),
    "phi-3.5-moe": _shape(32, 4096, 8, 32_064),
    "qwen3-8b": _shape(36, 4096, 8, 151_936),
    "qwen3-14b": _shape(40, 5120, 8, 151_936),
    "qwen3-32b": _shape(64, 5120, 8, 151_936),
    "qwen3-30b-a3b": _shape(48, 2048, 4, 151_936),
}
"""By the beginning of the name after its owner, in lower case: variants have the sizes of their base."""


def known_shape(model: str) -> ModelShape:
    """All unknown for a model that is not known."""
    name = model.rsplit("/", 1)[-1].lower().removeprefix("meta-")
    found = [known for known in _KNOWN if name == known or name.startswith(known + "-")]
    return _KNOWN[max(found, key=len)] if found else ModelShape()


class _Config(msgspec.Struct):
    """What is read of a `config.json`."""

    num_hidden_layers: Size | None = None
    hidden_size: Size | None = None
    num_key_value_heads: Size | None = None
    num_attention_heads: Size | None = None
    vocab_size: Size | None = None


class ProfileMeta(msgspec.Struct):
    """What is read of `meta.yaml` and, for the model, of `meta.json`."""

    gpu: str = ""
    model: str = ""


def read_meta(directory: Path) -> ProfileMeta:
    """Raises ConfigError for a file that is none; where there is none, nothing is known."""
    meta = ProfileMeta()
    path = directory / "meta.yaml"
    if path.exists():
        try:
            meta = msgspec.convert(yaml.safe_load(read_input(path, _MAX_BYTES)) or {}, ProfileMeta)
        except (yaml.YAMLError, RecursionError, ValueError, msgspec.ValidationError) as error:
            raise ConfigError(f"{path}: {str(error)[:200]}") from None
    return meta


def read_shape(directory: Path, stated: ModelShape, model: str) -> ModelShape:
    """Raises ConfigError for a `config.json` that is none, and where nothing tells the number of layers."""
    found = stated
    path = directory / "config.json"
    if path.exists():
        try:
            config = msgspec.json.decode(read_input(path, _MAX_BYTES), type=_Config)
        except (msgspec.DecodeError, RecursionError) as error:
            raise ConfigError(f"{path}: {error}") from None
        found = found.filled_from(
            ModelShape(
                num_layers=config.num_hidden_layers,
                hidden_size=config.hidden_size,
                kv_heads=config.num_key_value_heads or config.num_attention_heads,
                vocab_size=config.vocab_size,
            )
        )
    found = found.filled_from(known_shape(model))
    if found.num_layers is None:
        raise ConfigError(
            f"{directory} holds profiles of one layer, and nothing tells how many "
            f"{model or 'the model'} has: put its config.json beside the tables, or give --num-layers"
        )
    return found


def tables_of(directory: Path, num_devices: int) -> Path:
    """Where the tables of one device's share are: in `tp<N>/`, or in the directory itself when it has no such
    folders (they are then taken to be those of the run). Raises ConfigError."""
    folder = directory / f"tp{num_devices}"
    if folder.is_dir():
        return folder
    others = sorted(path.name for path in directory.glob("tp[0-9]*") if path.is_dir())[:8]
    if others:
        raise ConfigError(f"{directory} has tables for {', '.join(others)}, and none for tp{num_devices}")
    return directory
