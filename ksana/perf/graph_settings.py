"""Reads from `meta.json`, the settings of a recorded run, which steps ran from captured CUDA graphs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta

from ksana.errors import ConfigError
from ksana.input_file import read_input

_MAX_BYTES = 64 << 20

_SMALLEST = (1, 2, 4)
_LARGEST = 512

_NONE, _FULL = 0, 2
"""Modes by number, as the engine records them; 1 is piecewise. Of a pair the first is that of decodes."""


class GraphSettings(msgspec.Struct, frozen=True, kw_only=True):
    sizes: tuple[int, ...] = ()
    """Tokens that graphs were captured for, ascending; steps are padded up to the next one."""
    is_known: bool = False
    """Whether anything is known of an engine at all."""
    are_whole: bool = True
    """Steps of decodes are one graph each, attention included."""


class _Compilation(msgspec.Struct):
    cudagraph_capture_sizes: list[int] | None = None
    cudagraph_mode: int | list[int] | str | None = None


class _Resolved(msgspec.Struct):
    compilation_config: _Compilation | None = None


class _Engine(msgspec.Struct):
    max_num_seqs: Annotated[int, Meta(ge=1, le=1 << 20)] | None = None
    enforce_eager: bool = False


class _Settings(msgspec.Struct):
    resolved_config: _Resolved | None = None
    engine_kwargs: _Engine | None = None


def captured_sizes(max_num_seqs: int) -> tuple[int, ...]:
    """Sizes for which vLLM captures graphs unless it is told others: by 8 up to 256, by 16 above, and no more
    than twice the sequences it may run."""
    most = min(2 * max_num_seqs, _LARGEST)
    sizes = (*_SMALLEST, *range(8, 256, 8), *range(256, _LARGEST + 1, 16))
    return tuple(size for size in sizes if size <= most)


def read_graphs(path: Path) -> GraphSettings:
    """Without that file nothing is known. Where the record lacks the sizes, they are those that its engine
    takes by itself. Raises ConfigError."""
    if not path.exists():
        return GraphSettings()
    try:
        settings = msgspec.json.decode(read_input(path, _MAX_BYTES), type=_Settings)
    except (msgspec.DecodeError, RecursionError) as error:
        raise ConfigError(f"{path}: {error}") from None
    resolved = settings.resolved_config
    compilation = (resolved.compilation_config if resolved is not None else None) or _Compilation()
    engine = settings.engine_kwargs or _Engine()
    mode = compilation.cudagraph_mode
    of_decodes = mode[0] if isinstance(mode, list) and mode else mode
    if engine.enforce_eager or of_decodes in (_NONE, "NONE"):
        return GraphSettings(is_known=True)
    sizes = compilation.cudagraph_capture_sizes
    if sizes is None:
        sizes = list(captured_sizes(engine.max_num_seqs)) if engine.max_num_seqs is not None else []
    return GraphSettings(
        sizes=tuple(sorted({size for size in sizes if size > 0})),
        is_known=bool(sizes),
        are_whole=of_decodes is None or of_decodes == _FULL or str(of_decodes).startswith("FULL"),
    )
