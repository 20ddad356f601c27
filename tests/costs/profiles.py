"""A made-up profile directory whose times follow a formula: predictions can be told right from wrong."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

CHUNKS = (16, 64, 128, 256)
BEFORE = (0, 16, 128, 512)
DECODES = (1, 2, 8, 32)
DECODE_KV = (16, 64, 256, 1024)


def attention_us(chunk: int, before: float, num: float, kv: float) -> float:
    """A launch, pairs attended, KV read by decodes, and so much per decode."""
    return 10 + 0.001 * chunk * (before + chunk / 2) + 0.02 * num * kv + 0.5 * num


def dense_us(tokens: int) -> float:
    """Tiles of 16 tokens."""
    return 100.0 + 20.0 * -(-tokens // 16)


def write_profile(directory: Path, *, padded_sizes: tuple[int, ...] = ()) -> None:
    sizes = (1, 8, 16, 32, 48, 64, 96, 128, 256)
    dense = [f"qkv_proj,{size},{dense_us(size)}" for size in sizes]
    dense += [f"layernorm,{size},2.0" for size in sizes] + [f"embedding,{size},5.0" for size in sizes]
    (directory / "dense.csv").write_text("\n".join(["layer,tokens,time_us", *dense]))
    rows = [f"lm_head,{size},{50 + size}" for size in (1, 2, 4, 8, 16, 32, 64)]
    (directory / "per_sequence.csv").write_text("\n".join(["layer,sequences,time_us", *rows]))
    points = [(0, 0, num, kv) for num, kv in itertools.product(DECODES, DECODE_KV)]
    points += [(chunk, before, 0, 0) for chunk, before in itertools.product(CHUNKS, BEFORE)]
    points += [p for p in itertools.product(CHUNKS, BEFORE, DECODES, DECODE_KV) if p[2] < DECODES[-1]]
    lines = [",".join(map(str, (*point, attention_us(*point)))) for point in points]
    header = "prefill_chunk,kv_prefill,n_decode,kv_decode,time_us"
    (directory / "attention.csv").write_text("\n".join([header, *lines]))
    if padded_sizes:
        compilation = {"cudagraph_capture_sizes": list(padded_sizes)}
        meta = {"model": "made up", "resolved_config": {"compilation_config": compilation}}
        (directory / "meta.json").write_text(json.dumps(meta))
