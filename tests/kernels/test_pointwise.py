"""Norms, rotary embedding, gated activations, KV write: against plain torch, per row, and out of range."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ksana import kernels
from ksana.kernels import reference


@pytest.fixture(params=["native", "reference"])
def implementation(request):
    if request.param == "reference":
        request.getfixturevalue("reference_only")


def rope_tables(max_position: int, dim: int):
    angles = torch.outer(torch.arange(max_position), 1e4 ** -(torch.arange(0, dim, 2) / dim))
    return angles.cos().contiguous(), angles.sin().contiguous()


@pytest.mark.parametrize("width", [1, 8, 40, 64, 576, 577])
@pytest.mark.parametrize("add_one", [False, True])
def test_rms_norm(width, add_one):
    x, weight = torch.randn(13, width) * 3, torch.randn(width)
    exact = reference.rms_norm(x.double(), weight.double(), 1e-6, add_one)
    ours = kernels.rms_norm(x, weight, 1e-6, add_one)
    torch.testing.assert_close(ours.double(), exact, rtol=1e-6, atol=1e-9)
    torch.testing.assert_close(reference.rms_norm(x, weight, 1e-6, add_one), ours, rtol=1e-6, atol=1e-9)
    for i in range(13):
        assert torch.equal(kernels.rms_norm(x[i : i + 1].clone(), weight, 1e-6, add_one)[0], ours[i])


def test_rms_norm_of_heads():
    """Gemma's norm of q and k: more than two dimensions."""
    x, weight = torch.randn(5, 4, 32), torch.randn(32)
    ours = kernels.rms_norm(x, weight, 1e-6)
    assert torch.equal(ours, kernels.rms_norm(x.view(20, 32), weight, 1e-6).view(5, 4, 32))


@pytest.mark.parametrize("rows", [1, 9, 200])
def test_add_rms_norm(rows):
    x, residual, weight = torch.randn(rows, 576), torch.randn(rows, 576), torch.randn(576)
    total = x + residual
    ours = kernels.add_rms_norm(x, residual, weight, 1e-5)
    assert torch.equal(residual, total)
    assert torch.equal(ours, kernels.rms_norm(total, weight, 1e-5))


@pytest.mark.parametrize("width", [1, 7, 16, 100, 1536])
@pytest.mark.parametrize("rows", [1, 70])
@pytest.mark.parametrize("name", ["silu_mul", "gelu_tanh_mul"])
def test_gated(name, rows, width):
    gate_up = torch.randn(rows, 2 * width) * 4
    exact = getattr(reference, name)(gate_up.double())
    ours = getattr(kernels, name)(gate_up)
    torch.testing.assert_close(ours.double(), exact, rtol=2e-6, atol=2e-6)
    assert torch.equal(getattr(kernels, name)(gate_up[-1:].clone())[0], ours[-1])


@pytest.mark.parametrize("name", ["silu_mul", "gelu_tanh_mul"])
def test_gated_of_extreme_values(name):
    values = [0.0, -0.0, 1e-30, 50.0, -50.0, 90.0, -90.0, 1e4, -1e4, 1e30, -1e30, float("inf"), float("nan")]
    gate_up = torch.tensor([values + [1.0] * len(values)])
    exact = getattr(reference, name)(gate_up.double())
    torch.testing.assert_close(
        getattr(kernels, name)(gate_up).double(), exact, rtol=2e-6, atol=1e-30, equal_nan=True
    )


@pytest.mark.parametrize("dim", [2, 8, 64, 72, 256])
@pytest.mark.parametrize("num_tokens", [1, 50])
def test_rope_on_slices_of_qkv(dim, num_tokens):
    cos, sin = rope_tables(100, dim)
    positions = torch.randint(0, 100, (num_tokens,))
    qkv = torch.randn(num_tokens, 8, dim)
    expected = qkv.clone()
    reference.rope(expected[:, :4], expected[:, 4:6], positions, cos, sin)
    last = qkv[-1:].clone()
    kernels.rope(qkv[:, :4], qkv[:, 4:6], positions, cos, sin)
    torch.testing.assert_close(qkv, expected, rtol=0, atol=2e-6)
    kernels.rope(last[:, :4], last[:, 4:6], positions[-1:].clone(), cos, sin)
    assert torch.equal(last[0], qkv[-1])


def test_reference_rope_is_rotate_half():
    """Against complex numbers: pair (i, i + D/2) is multiplied by exp(i angle)."""
    cos, sin = rope_tables(10, 8)
    q, k, positions = torch.randn(3, 2, 8), torch.randn(3, 1, 8), torch.tensor([0, 3, 9])
    turned = torch.complex(q[..., :4], q[..., 4:]) * torch.complex(cos, sin)[positions][:, None]
    reference.rope(q, k, positions, cos, sin)
    torch.testing.assert_close(q, torch.cat((turned.real, turned.imag), -1))


@pytest.mark.usefixtures("implementation")
def test_write_kv():
    caches = torch.zeros(5, 2, 8, 16), torch.zeros(5, 2, 8, 16)
    qkv = torch.randn(6, 4, 16)
    k, v = qkv[:, :2], qkv[:, 2:]
    kernels.write_kv(k, v, *caches, torch.tensor([0, 39, -1, 17, 8, -1]))
    for token, slot in ((0, 0), (1, 39), (3, 17), (4, 8)):
        assert torch.equal(caches[0][slot // 8, :, slot % 8], k[token])
        assert torch.equal(caches[1][slot // 8, :, slot % 8], v[token])
    assert int((caches[0] != 0).sum()) == 4 * 32


@pytest.mark.usefixtures("implementation")
@pytest.mark.parametrize("slot", [-2, 40, 2**40, -(2**63)])
def test_write_kv_refuses_slots_out_of_range(slot):
    caches = torch.zeros(5, 2, 8, 16), torch.zeros(5, 2, 8, 16)
    with pytest.raises(ValueError, match="slot"):
        kernels.write_kv(torch.ones(2, 2, 16), torch.ones(2, 2, 16), *caches, torch.tensor([3, slot]))
    assert int(caches[0].count_nonzero()) == 0


@pytest.mark.usefixtures("implementation")
@pytest.mark.parametrize("position", [-1, 10, 2**62])
def test_rope_refuses_positions_out_of_range(position):
    with pytest.raises(ValueError, match="position"):
        kernels.rope(
            torch.ones(2, 2, 8), torch.ones(2, 1, 8), torch.tensor([0, position]), *rope_tables(10, 8)
        )


T = torch.randn


@pytest.mark.usefixtures("implementation")
@pytest.mark.parametrize(
    "call",
    [
        lambda: kernels.rms_norm(T(2, 8), T(7), 1e-6),
        lambda: kernels.rms_norm(T(2, 8).double(), T(8), 1e-6),
        lambda: kernels.rms_norm(T(8, 2).T, T(8), 1e-6),
        lambda: kernels.rms_norm(torch.tensor(1.0), T(1), 1e-6),
        lambda: kernels.add_rms_norm(T(2, 8), T(3, 8), T(8), 1e-6),
        lambda: kernels.add_rms_norm(T(2, 8), T(2, 8), T(4), 1e-6),
        lambda: kernels.add_rms_norm(T(2, 8), T(2, 16)[:, :8], T(8), 1e-6),
        lambda: kernels.silu_mul(T(2, 7)),
        lambda: kernels.silu_mul(T(2, 16)[:, :8]),
        lambda: kernels.gelu_tanh_mul(T(8)),
        lambda: kernels.rope(T(2, 2, 8), T(3, 1, 8), torch.zeros(2).long(), *rope_tables(4, 8)),
        lambda: kernels.rope(T(2, 2, 8), T(2, 1, 8), torch.zeros(2).int(), *rope_tables(4, 8)),
        lambda: kernels.rope(T(2, 2, 8), T(2, 1, 8), torch.zeros(3).long(), *rope_tables(4, 8)),
        lambda: kernels.rope(T(2, 2, 8), T(2, 1, 8), torch.zeros(2).long(), *rope_tables(4, 16)),
        lambda: kernels.rope(T(2, 2, 7), T(2, 1, 7), torch.zeros(2).long(), *rope_tables(4, 6)),
        lambda: kernels.rope(T(2, 8, 2).mT, T(2, 1, 8), torch.zeros(2).long(), *rope_tables(4, 8)),
        lambda: kernels.write_kv(T(2, 2, 8), T(2, 2, 8), T(3, 2, 4, 8), T(3, 2, 4, 8), torch.zeros(3).long()),
        lambda: kernels.write_kv(T(2, 2, 8), T(2, 1, 8), T(3, 2, 4, 8), T(3, 2, 4, 8), torch.zeros(2).long()),
        lambda: kernels.write_kv(T(2, 1, 8), T(2, 1, 8), T(3, 2, 4, 8), T(3, 2, 4, 8), torch.zeros(2).long()),
        lambda: kernels.write_kv(T(2, 2, 8), T(2, 2, 8), T(3, 2, 4, 8), T(2, 2, 4, 8), torch.zeros(2).long()),
        lambda: kernels.write_kv(
            T(2, 2, 8), T(2, 2, 8), T(3, 2, 8, 4).mT, T(3, 2, 4, 8), torch.zeros(2).long()
        ),
    ],
)
def test_wrong_shapes_and_types_are_refused(call):
    with pytest.raises(ValueError, match=r"wants|heads"):
        call()


@settings(max_examples=20, deadline=None)
@given(rows=st.integers(0, 20), width=st.integers(1, 90), seed=st.integers(0, 99))
def test_random_shapes(rows, width, seed):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, 2 * width, generator=generator)
    torch.testing.assert_close(kernels.silu_mul(x), reference.silu_mul(x), rtol=2e-6, atol=1e-6)
    weight = torch.randn(2 * width, generator=generator)
    torch.testing.assert_close(
        kernels.rms_norm(x, weight, 1e-5), reference.rms_norm(x, weight, 1e-5, False), rtol=2e-6, atol=1e-6
    )
