"""What a model family has to say about itself. No torch.

A family is one file that fills in a `Family`: how its configurations become a `ModelSpec`, what its tensors
are called in both kinds of checkpoint, and what has to be done to their values. The computation itself is
`models.decoder`, driven by the spec; a family that needs another one names its module in `decoder`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ksana.models.fields import Fields
from ksana.models.gguf_file import GgufFile
from ksana.models.spec import ModelSpec

Array = npt.NDArray[np.float32]


def keep(_spec: ModelSpec, _role: str, values: Array) -> Array:
    """The transform of tensors that are stored the way they are used."""
    return values


@dataclass(frozen=True)
class Family:
    """One entry of the registry. Names are given per role (models.tensors); `{}` stands for the layer."""

    name: str
    config_architectures: tuple[str, ...]
    """Values of `architectures` in config.json."""
    gguf_architectures: tuple[str, ...]
    """Values of `general.architecture` in GGUF."""
    spec_from_config: Callable[[Fields], ModelSpec]
    spec_from_gguf: Callable[[GgufFile, Fields], ModelSpec]
    hf_names: Mapping[str, str]
    gguf_names: Mapping[str, str]
    hf_prefixes: tuple[tuple[str, str], ...] = ()
    """(prefix in the checkpoint, what it stands for): other places where the same tensors may live."""
    hf_transform: Callable[[ModelSpec, str, Array], Array] = keep
    gguf_transform: Callable[[ModelSpec, str, Array], Array] = keep
    ignored: tuple[str, ...] = ()
    """Regular expressions of tensor names that may be present and are not part of the decoder."""
    decoder: str = "ksana.models.decoder"
