"""`ksana check`: what `ksana serve` would load with the same settings, and whether it fits. No torch.

Everything but the weights' values is read and checked: the configuration, that every tensor is there with
the right shape and a type that can be read, the tokenizer, the limits, the pools. Exit code 0: it fits.
"""

from __future__ import annotations

import math
import os
import sys
from collections import Counter
from collections.abc import Sequence

from ksana.cli.report import rows
from ksana.cli.settings import read_settings
from ksana.config import format_bytes
from ksana.errors import ConfigError
from ksana.host_memory import available_memory_bytes
from ksana.model_setup import ModelFiles, ModelSetup, find_model, model_name, set_up
from ksana.models.load import Checkpoint, open_checkpoint
from ksana.models.spec import ModelSpec

FLOAT32_BYTES = 4
PROCESS_BYTES = 1 << 30
"""What server, worker and PyTorch need beside weights and KV, generously."""


def run(argv: Sequence[str]) -> int:
    description = "Say what `ksana serve` would load with the same settings, and whether it fits."
    settings = read_settings("ksana check", description, argv, os.environ)
    files = find_model(settings, lambda text: print(text, file=sys.stderr))
    checkpoint = open_checkpoint(files.path)
    num_parameters = count_parameters(checkpoint)
    pairs = [*describe_files(files, checkpoint), *describe_spec(files.spec, num_parameters)]
    print(rows(model_name(settings.model), pairs), flush=True)
    setup = set_up(settings, files)
    needed = num_parameters * FLOAT32_BYTES + setup.pools.kv_bytes + PROCESS_BYTES
    free = available_memory_bytes()
    print(rows("With these settings", describe_setup(setup, needed, free)), flush=True)
    refuse_too_large(needed, free)
    return 0


def count_parameters(checkpoint: Checkpoint) -> int:
    """Elements of all tensors that are loaded; a tied output head counts once, as it is stored."""
    return sum(math.prod(tensor.shape) for tensor, _ in checkpoint.stored_tensors())


def describe_files(files: ModelFiles, checkpoint: Checkpoint) -> list[tuple[str, str]]:
    tensors = [tensor for tensor, _ in checkpoint.stored_tensors()]
    types = Counter(tensor.type_name for tensor in tensors)
    kinds = ", ".join(f"{count} {name}" for name, count in types.most_common())
    size = format_bytes(sum(tensor.num_bytes for tensor in tensors))
    return [
        ("files", str(files.path)),
        ("tensors", f"{len(tensors)} of {size} ({kinds})"),
        ("fingerprint", files.fingerprint),
    ]


def describe_spec(spec: ModelSpec, num_parameters: int) -> list[tuple[str, str]]:
    layers = f"{spec.num_layers} layers"
    if spec.num_sliding_layers:
        layers += f" ({spec.num_sliding_layers} with a window of {spec.sliding_window} tokens)"
    weights = format_bytes(num_parameters * FLOAT32_BYTES)
    return [
        (
            "family",
            f"{spec.family}: {layers}, hidden size {spec.hidden_size}, {spec.vocab_size} tokens known",
        ),
        ("attention", f"{spec.num_heads} heads over {spec.num_kv_heads} KV heads of {spec.head_dim}"),
        ("parameters", f"{num_parameters / 1e6:,.1f} million, {weights} in memory as float32"),
        ("context", f"{spec.max_position} tokens"),
    ]


def describe_setup(setup: ModelSetup, needed_bytes: int, free_bytes: int | None) -> list[tuple[str, str]]:
    pools = setup.pools
    blocks = f"{pools.num_fa_blocks} blocks of {pools.block_size} tokens"
    if pools.num_swa_blocks:
        blocks += f", and {pools.num_swa_blocks} for the layers with a window"
    if free_bytes is None:  # a system that does not tell
        free, fits = "an unknown amount", "unknown"
    else:
        free, fits = format_bytes(free_bytes), "yes" if needed_bytes <= free_bytes else "no"
    return [
        ("KV pool", f"{format_bytes(pools.kv_bytes)}: {blocks}"),
        ("longest", f"{setup.max_model_len} tokens of prompt and output"),
        ("memory", f"about {format_bytes(needed_bytes)} needed, {free} free"),
        ("fits", fits),
    ]


def refuse_too_large(needed_bytes: int, free_bytes: int | None) -> None:
    """Raises ConfigError when weights, KV pool and the processes do not fit into memory."""
    if free_bytes is not None and needed_bytes > free_bytes:
        raise ConfigError(
            f"about {format_bytes(needed_bytes)} are needed and {format_bytes(free_bytes)} are free; "
            "lower --kv-cache-memory, or take a smaller model"
        )
