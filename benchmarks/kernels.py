"""Native kernels beside torch: products, paged attention, sampling. Prints a table; more than 1.0 is faster.

    python -m benchmarks.kernels [--threads N] [--seconds S]

Both sides use the same number of threads and are timed in turns, best of many, so that a busy machine
disturbs them alike.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable

os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import torch
import torch.nn.functional as F

from ksana import kernels
from ksana.kernels.threads import default_num_threads
from ksana.messages.requests import SamplingParams
from ksana.sampling.sampler import RowSampling, sample

PRODUCTS = {
    "qkv 960x576": (960, 576),
    "out 576x576": (576, 576),
    "gate-up 3072x576": (3072, 576),
    "down 576x1536": (576, 1536),
    "LM head 49152x576": (49152, 576),
}
ROWS = (1, 8, 32, 512)

ATTENTION = [  # heads, KV heads, head dim, rows, context, query tokens per row
    (9, 3, 64, 1, 256, 1),
    (9, 3, 64, 8, 256, 1),
    (9, 3, 64, 8, 1024, 1),
    (9, 3, 64, 32, 1024, 1),
    (9, 3, 64, 1, 512, 512),
    (4, 1, 256, 8, 512, 1),
    (4, 1, 256, 1, 512, 512),
    (32, 8, 128, 8, 1024, 1),
    (32, 8, 128, 1, 512, 512),
]

SAMPLING: list[tuple[str, dict[str, float]]] = [
    ("greedy", {"temperature": 0.0}),
    ("temperature 1", {}),
    ("top_k 50", {"top_k": 50}),
    ("top_p 0.9", {"top_p": 0.9}),
    ("min_p 0.05", {"min_p": 0.05}),
]


def best_of(seconds: float, *calls: Callable[[], object]) -> list[float]:
    """Shortest time of each call, seconds; they take turns."""
    best = [float("inf")] * len(calls)
    for call in calls:
        call()
    end = time.perf_counter() + seconds * len(calls)
    while time.perf_counter() < end:
        for index, call in enumerate(calls):
            start = time.perf_counter()
            call()
            best[index] = min(best[index], time.perf_counter() - start)
    return best


def products(seconds: float) -> None:
    print(
        f"{'product':20} {'rows':>5} {'ours µs':>10} {'GFLOP/s':>8} {'GB/s':>6} {'torch µs':>10} {'ratio':>6}"
    )
    for name, (n, k) in PRODUCTS.items():
        weight = torch.randn(n, k)
        packed = kernels.pack_weight(weight)
        for m in ROWS:
            x = torch.randn(m, k)

            def ours(x: torch.Tensor = x, packed: kernels.PackedWeight = packed) -> torch.Tensor:
                return kernels.linear(x, packed)

            def theirs(x: torch.Tensor = x, weight: torch.Tensor = weight) -> torch.Tensor:
                return F.linear(x, weight)

            mine, torchs = best_of(seconds, ours, theirs)
            print(
                f"{name:20} {m:5} {mine * 1e6:10.1f} {2 * m * n * k / mine / 1e9:8.1f} "
                f"{4 * n * k / mine / 1e9:6.1f} {torchs * 1e6:10.1f} {torchs / mine:6.2f}"
            )


def attention(seconds: float) -> None:
    print(f"\n{'attention':40} {'ours µs':>9} {'dense µs':>9} {'ratio':>6} {'gather µs':>10} {'ratio':>6}")
    for heads, kv_heads, dim, rows, context, queries in ATTENTION:
        blocks = context // 16
        k_cache, v_cache = torch.randn(2, rows * blocks, kv_heads, 16, dim).unbind()
        tables = torch.randperm(rows * blocks).view(rows, blocks)
        q = torch.randn(rows * queries, heads, dim)
        dense_q = q.view(rows, queries, heads, dim).transpose(1, 2).contiguous()
        starts = torch.arange(0, rows * queries + 1, queries, dtype=torch.int32)
        positions = torch.arange(context - queries, context).repeat(rows)
        tables32, causal, shape = tables.to(torch.int32), queries > 1, (rows, kv_heads, context, dim)

        def gather(cache: torch.Tensor, tables=tables, shape=shape) -> torch.Tensor:  # type: ignore[no-untyped-def]
            return cache[tables].permute(0, 2, 1, 3, 4).reshape(shape)

        def dense(k: torch.Tensor, v: torch.Tensor, q=dense_q, causal=causal) -> torch.Tensor:  # type: ignore[no-untyped-def]
            return F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=True)

        arguments = (q, k_cache, v_cache, tables32, starts, positions, dim**-0.5, None)
        k, v = gather(k_cache).contiguous(), gather(v_cache).contiguous()
        mine, with_dense, with_gather = best_of(
            seconds,
            lambda arguments=arguments: kernels.paged_attention(*arguments),  # type: ignore[misc]
            lambda dense=dense, k=k, v=v: dense(k, v),  # type: ignore[misc]
            lambda dense=dense, gather=gather, k=k_cache, v=v_cache: dense(gather(k), gather(v)),  # type: ignore[misc]
        )
        name = f"{heads}/{kv_heads} heads of {dim}, {rows} x {queries} of {context}"
        print(
            f"{name:40} {mine * 1e6:9.0f} {with_dense * 1e6:9.0f} {with_dense / mine:6.2f} "
            f"{with_gather * 1e6:10.0f} {with_gather / mine:6.2f}"
        )


def sampling(seconds: float) -> None:
    print(f"\n{'sampling 32 rows':20} {'vocabulary':>10} {'ms':>8}")
    for vocabulary in (49_152, 262_144):
        logits = torch.randn(32, vocabulary) * 5
        for name, parameters in SAMPLING:
            rows = [RowSampling(SamplingParams(seed=i, **parameters), 0, i) for i in range(32)]  # type: ignore[arg-type]
            (mine,) = best_of(seconds, lambda logits=logits, rows=rows: sample(logits, rows))  # type: ignore[misc]
            print(f"{name:20} {vocabulary:10} {mine * 1e3:8.2f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--threads", type=int, default=default_num_threads())
    parser.add_argument("--seconds", type=float, default=0.3, help="for each number")
    options = parser.parse_args()
    kernels.set_num_threads(options.threads)
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    print(f"{kernels.describe()}; torch {torch.__version__} with {torch.get_num_threads()} threads\n")
    with torch.inference_mode():
        products(options.seconds)
        attention(options.seconds)
        sampling(options.seconds)


if __name__ == "__main__":
    main()
