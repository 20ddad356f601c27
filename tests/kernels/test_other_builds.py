"""The same kernels for lesser CPUs, and under the compiler's sanitizers."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from ksana import kernels
from ksana.kernels import build, library, reference
from ksana.kernels import sampling as native_sampling
from ksana.sampling import noise, noise_torch
from tests.kernels.problems import make_problem

pytestmark = [
    pytest.mark.needs_program("gcc", "gcc"),
    pytest.mark.skipif(platform.machine() != "x86_64", reason="flags of x86-64"),
]


def compile_kernels(target: Path, *flags: str, sources: list[Path] | None = None) -> Path:
    files = sources or [path for path in build.source_files() if path.suffix == ".c"]
    subprocess.run(
        [
            "gcc",
            *build.FLAGS,
            "-Wall",
            "-Wextra",
            "-Werror",
            *flags,
            "-o",
            str(target),
            *map(str, files),
            "-lm",
        ],
        check=True,
    )
    return target


def exercise() -> None:
    """Every kernel, with shapes that leave remainders everywhere; raises where something is wrong."""
    for case in (
        make_problem([(70, 70)], heads=8, kv_heads=8, dim=40, block_size=8, window=17),
        make_problem([(1100, 1), (30, 30)], heads=14, kv_heads=2, dim=64, block_size=24),
        make_problem([(700, 40)], heads=3, kv_heads=1, dim=72, block_size=128, window=513),
    ):
        whole = case.run()
        torch.testing.assert_close(whole, case.run(reference.paged_attention), atol=3e-6, rtol=0)
        last = len(case.query_starts) - 2
        num_tokens = int(case.query_starts[-1] - case.query_starts[-2])
        assert torch.equal(case.part(last, num_tokens - 1, num_tokens).run(), whole[-1:])
    for n, k in ((5, 3), (33, 64), (100, 577)):
        x, w, bias = torch.randn(150, k), torch.randn(n, k), torch.randn(n)
        packed = kernels.pack_weight(w)
        ours = kernels.linear(x, packed, bias)
        torch.testing.assert_close(ours, reference.linear(x, w, bias), atol=2e-4, rtol=0)
        for m in range(1, 20):
            assert torch.equal(kernels.linear(x[:m].contiguous(), packed, bias), ours[:m])
    x = torch.randn(9, 70)
    torch.testing.assert_close(kernels.silu_mul(x), reference.silu_mul(x), atol=2e-6, rtol=2e-6)
    torch.testing.assert_close(kernels.gelu_tanh_mul(x), reference.gelu_tanh_mul(x), atol=2e-6, rtol=2e-6)
    weight, residual = torch.randn(70), torch.randn(9, 70)
    norm = reference.rms_norm(x + residual, weight, 1e-5, True)
    torch.testing.assert_close(kernels.add_rms_norm(x, residual, weight, 1e-5, True), norm, atol=1e-5, rtol=0)
    qkv, tables = torch.randn(9, 5, 24), torch.randn(2, 40, 12)
    expected, positions = qkv.clone(), torch.arange(31, 40)
    reference.rope(expected[:, :3], expected[:, 3:4], positions, tables[0], tables[1])
    kernels.rope(qkv[:, :3], qkv[:, 3:4], positions, tables[0].contiguous(), tables[1].contiguous())
    torch.testing.assert_close(qkv, expected, atol=1e-5, rtol=0)
    caches = torch.zeros(3, 1, 5, 24), torch.zeros(3, 1, 5, 24)
    kernels.write_kv(qkv[:, 3:4], qkv[:, 4:5], *caches, torch.tensor([14, 0, -1, 3, 5, 6, 7, 8, 9]))
    assert torch.equal(caches[1][2, 0, 4], qkv[0, 4])


def exercise_sampling() -> None:
    lib = library.native()
    assert lib is not None
    assert torch.equal(
        native_sampling.gumbels(lib, 5, 1, 2, 1003), noise_torch.gumbels(noise.row_key(5, 1, 2), 1003)
    )
    logits = torch.randn(5, 1003) * 3
    rows = [
        (1, 0, 0, 0.0, 0.0, 1.0, 0, (4, 1002, 9999)),
        (2, 0, 0, 1.0, 0.0, 1.0, 0, ()),
        (3, 0, 0, 0.7, 0.0, 0.9, 0, (3,)),
        (4, 0, 0, 1.0, 0.02, 0.99, 700, ()),
        (5, 0, 0, 9.0, 0.3, 1.0, 0, ()),
    ]
    from ksana.messages.requests import SamplingParams
    from ksana.sampling.sampler import RowSampling, sample_row

    ours = native_sampling.sample_rows(lib, logits, rows)
    for token, values, row in zip(ours, logits, rows, strict=True):
        seed, choice, position, temperature, min_p, top_p, top_k, suppressed = row
        params = SamplingParams(seed=seed, temperature=temperature, min_p=min_p, top_p=top_p, top_k=top_k)
        assert token == sample_row(values, RowSampling(params, choice, position, tuple(suppressed)))


@pytest.mark.parametrize("march", ["haswell", "x86-64"])
def test_other_instruction_sets(march, tmp_path, monkeypatch):
    """AVX2 with FMA gives AVX-512's bits of a product; without FMA the promises hold within themselves."""
    if march == "haswell" and "avx2" not in Path("/proc/cpuinfo").read_text():
        pytest.skip("this CPU has no AVX2")
    x, w = torch.randn(17, 200), torch.randn(70, 200)
    native_bits = kernels.linear(x, kernels.pack_weight(w))
    native_isa = kernels.describe()
    lib = library.Library(compile_kernels(tmp_path / "kernels.so", f"-march={march}"))
    assert {"haswell": "AVX2", "x86-64": "portable"}[march] in lib.isa
    monkeypatch.setattr(library, "_choice", library._Choice(lib, "", lib.set_threads(2)))
    exercise()
    exercise_sampling()
    if march == "haswell" and "AVX" in native_isa:
        assert torch.equal(kernels.linear(x, kernels.pack_weight(w)), native_bits)
    lib.set_threads(1)


SANITIZED = """
import sys, torch
from pathlib import Path
from ksana.kernels import library
from tests.kernels import test_other_builds as this
torch.manual_seed(0)
lib = library.Library(Path(sys.argv[1]))
library._choice = library._Choice(lib, "", lib.set_threads(2))
this.exercise()
this.exercise_sampling()
lib.set_threads(1)
print("clean")
"""


@pytest.mark.slow
@pytest.mark.parametrize("march", ["native", "haswell"])
def test_no_access_out_of_bounds(march, tmp_path):
    """AddressSanitizer sees every tensor's edges, UBSan the arithmetic. Its runtime is loaded first."""
    target = compile_kernels(
        *(tmp_path / "kernels.so", f"-march={march}", "-g", "-fsanitize=address,undefined"),
        "-fno-sanitize-recover=undefined",
    )
    runtime = subprocess.run(
        ["gcc", "-print-file-name=libasan.so"], capture_output=True, text=True, check=True
    )
    environment = {
        **os.environ,
        "LD_PRELOAD": runtime.stdout.strip(),
        "ASAN_OPTIONS": "detect_leaks=0:abort_on_error=1",
        "OMP_NUM_THREADS": "1",
    }
    done = subprocess.run(
        [sys.executable, "-c", SANITIZED, str(target)],
        env=environment,
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.stdout.strip() == "clean", done.stderr[-3000:]


POOL_DRIVER = """
#include "ksana.h"
#include <pthread.h>
#include <stdio.h>
int ksana_set_threads(int);
static void work(void *context, int item) { ((long *)context)[item] += item; }
static void *call(void *unused) {
    long counts[37] = {0};
    for (int i = 0; i < 2000; i++) ksana_parallel(work, counts, 1 + i % 37);
    long total = 0;
    for (int i = 0; i < 37; i++) total += counts[i];
    return (void *)total;
}
int main(void) {
    for (int threads = 1; threads <= 4; threads++) {
        ksana_set_threads(threads);
        long alone = (long)call(0);
        pthread_t callers[2];
        for (int i = 0; i < 2; i++) pthread_create(&callers[i], 0, call, 0);
        for (int i = 0; i < 2; i++) {
            void *total;
            pthread_join(callers[i], &total);
            if ((long)total != alone) return printf("wrong\\n"), 1;
        }
    }
    ksana_set_threads(1);
    return printf("clean\\n"), 0;
}
"""


@pytest.mark.slow
def test_the_pool_has_no_data_race(tmp_path):
    driver = tmp_path / "driver.c"
    driver.write_text(POOL_DRIVER)
    program = tmp_path / "driver"
    subprocess.run(
        [
            *("gcc", "-std=gnu11", "-O1", "-g", "-fsanitize=thread", "-pthread", "-I", str(build.SOURCES)),
            *("-o", str(program), str(driver), str(build.SOURCES / "pool.c")),
        ],
        check=True,
    )
    done = subprocess.run([str(program)], capture_output=True, text=True, timeout=120, check=False)
    if "unexpected memory mapping" in done.stderr:
        pytest.skip("this kernel's address randomisation does not suit ThreadSanitizer")
    assert done.stdout.strip() == "clean", done.stderr[-3000:]
