"""Polar backends equal their polynomials of the singular values, or the exact polar factor."""

import math
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from sodaopt.backends.products import PRODUCTS, chosen, dense
from sodaopt.geometry import polar
from sodaopt.geometry.polar import BACKENDS, EXACT, Newton, factor

SHAPES = [(1, 6, 9), (1, 9, 6), (1, 7, 7), (1, 1, 8), (1, 8, 1), (1, 1, 1), (3, 6, 4), (2, 4, 6)]
POLYNOMIALS = [b for b in BACKENDS.values() if isinstance(b, Newton)]
# The range of singular values for a Gaussian 256x1024, and their least largest distance from 1.
RANGES = {
    "exact": (1 - 1e-5, 1 + 1e-5, 0.0),
    "keller": (0.66, 1.15, 0.1),
    "you": (0.96, 1.05, 0.01),
    "polar_express": (0.85, 1.15, 0.1),
    "cubic": (1 - 1e-4, 1 + 1e-5, 0.0),
}
PINNED = {  # the results for the singular values 0.01, 0.1 and sqrt(1 - 0.01^2 - 0.1^2)
    "keller": (0.698917, 0.71212, 0.702132),
    "you": (1.018025, 1.01905, 0.997364),
    "polar_express": (1.054024, 0.891444, 0.870374),
    "cubic": (1.0, 1.0, 1.0),
}

each = pytest.mark.parametrize("name", BACKENDS)
each_polynomial = pytest.mark.parametrize("backend", POLYNOMIALS, ids=lambda b: b.name)
each_shape = pytest.mark.parametrize("shape", SHAPES, ids=lambda s: "x".join(map(str, s)))


def randn(shape: tuple[int, ...], seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def on_singular_values(name: str, X: Tensor) -> Tensor:
    """Return U p(s) V^T of each matrix. The exact backend has p = 1 above the rounding level."""
    out, backend = [], BACKENDS[name]
    for M in X:
        U, s, Vh = torch.linalg.svd(M.double(), full_matrices=False)
        if isinstance(backend, Newton):
            s = s / (backend.safety * math.sqrt(sum(v * v for v in s.tolist())))
            for a, b, c in backend.steps:
                s = a * s + b * s**3 + c * s**5
        else:
            s = (s > 1e-12 * s.max()).double()
        out.append(U @ torch.diag(s) @ Vh)
    return torch.stack(out)


@each
@each_shape
@settings(max_examples=10, deadline=None)
@given(seed=st.integers(0, 2**40))
def test_polynomial(name, shape, seed) -> None:
    X = randn(shape, seed)
    kept = X.clone()
    Y = BACKENDS[name](X)
    assert Y.shape == X.shape
    assert Y.dtype == X.dtype
    assert torch.equal(X, kept)
    assert torch.allclose(Y, on_singular_values(name, X), atol=1e-9)


@pytest.mark.parametrize("name", PINNED)
def test_constants(name) -> None:
    """A typo in the published coefficients changes the results for three singular values."""
    assert PINNED.keys() == {b.name for b in POLYNOMIALS}
    X = torch.diag(torch.tensor([0.01, 0.1, math.sqrt(0.9899)], dtype=torch.float64))[None]
    assert BACKENDS[name](X)[0].diag().tolist() == pytest.approx(PINNED[name], abs=1e-6)


@each
def test_singular_value_range(name) -> None:
    low, high, spread = RANGES[name]
    s = torch.linalg.svdvals(BACKENDS[name](randn((1, 256, 1024), dtype=torch.float32))[0])
    assert low < s.min() <= s.max() < high
    assert (s - 1).abs().max() >= spread


@each
@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 2**40), exponent=st.floats(-9, 9))
def test_ignores_scale(name, seed, exponent) -> None:
    X = randn((2, 4, 6), seed)
    assert torch.allclose(BACKENDS[name](X * 10**exponent), BACKENDS[name](X), atol=1e-8)


@each
@each_shape
def test_odd_and_transposable(name, shape) -> None:
    f, X = BACKENDS[name], randn(shape)
    assert torch.allclose(f(-X), -f(X), atol=1e-12)
    assert torch.allclose(f(X.mT), f(X).mT, atol=1e-9)


@each
def test_batch_is_one_by_one(name) -> None:
    f, X = BACKENDS[name], randn((4, 5, 3)) * torch.tensor([1e-6, 1.0, 0.0, 1e6])[:, None, None]
    assert torch.allclose(f(X), torch.cat([f(M) for M in X.split(1)]), atol=1e-12)


@each
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_zero_and_rank_deficient(name, dtype) -> None:
    """A zero matrix gives exactly zero, and the result has no directions that X lacks."""
    f = BACKENDS[name]
    assert not f(torch.zeros(2, 4, 6, dtype=dtype)).any()
    X = randn((1, 6, 2)) @ randn((1, 2, 9), 1)
    Y, P = f(X.to(dtype))[0].double(), on_singular_values("exact", X)[0]
    tol = 1e-3 if dtype == torch.float32 else 1e-10
    assert (Y - P @ P.mT @ Y).abs().max() < tol
    if name == "exact":
        assert torch.allclose(Y, P, atol=tol / 100)
        ones = EXACT(torch.ones(1, 4, 9, dtype=dtype))
        assert torch.allclose(ones, torch.full_like(ones, 1 / 6))


@each
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@each_shape
def test_a_number_that_is_not_finite_stays_visible(name, dtype, bad, shape) -> None:
    """The result of its own matrix is not finite, and those of other matrices are."""
    X = randn(shape).to(dtype)
    X[-1, -1, 0] = bad
    Y = BACKENDS[name](X)
    assert not Y[-1].isfinite().all()
    assert Y[:-1].isfinite().all()


@each
def test_dtypes(name) -> None:
    """On a CPU, products are in fp32. 16 bits are cast to fp32, and rounded only at the end."""
    f, X = BACKENDS[name], randn((2, 24, 40))
    single = f(X.float())
    assert single.dtype == torch.float32
    assert torch.allclose(single.double(), f(X.float().double()), atol=1e-4)
    for dtype in (torch.bfloat16, torch.float16):
        half = f(X.to(dtype))
        assert half.dtype == dtype
        assert torch.equal(half, f(X.to(dtype).float()).to(dtype))


@each_polynomial
def test_a_chosen_dtype_is_used(backend) -> None:
    X = randn((1, 24, 40), dtype=torch.float32)
    low = Newton("low", backend.steps, backend.safety, torch.bfloat16)(X)
    error = (low - backend(X)).abs().max()
    assert low.dtype == torch.float32
    assert 1e-4 < error < 0.1


def test_without_steps_a_matrix_is_only_normalised() -> None:
    X = torch.randn(2, 6, 3, generator=torch.Generator().manual_seed(0))
    none = Newton("none", ())
    torch.testing.assert_close(none(X), X / X.norm(dim=(-2, -1), keepdim=True))


GRAM = [b for b in POLYNOMIALS if b.restarts]


def mirrored(*arguments: Any) -> Tensor:
    """Return the lower triangle of the product and its mirror image, as the Triton kernel does."""
    low = dense(*arguments).tril()
    return low + low.tril(-1).mT


def in_form(backend: Newton, X: Tensor, form: str, product=dense) -> Tensor:
    with mock.patch.object(polar, "choice", return_value=(form, product)):
        return backend(X)


@pytest.mark.parametrize("backend", GRAM, ids=lambda b: b.name)
@pytest.mark.parametrize("product", [dense, mirrored])
@pytest.mark.parametrize("shape", [(2, 24, 96), (2, 96, 40), (1, 1, 2)], ids=str)
def test_both_forms_are_the_same_polynomial(backend, product, shape) -> None:
    X = randn(shape)
    plain, gram = (in_form(backend, X, form, product) for form in ("plain", "gram"))
    torch.testing.assert_close(gram, plain, rtol=1e-9, atol=1e-9)


@each_polynomial
@pytest.mark.parametrize("n", [1, 2, 3])
def test_factor(backend, n) -> None:
    """Q X is X after n steps."""
    X = randn((1, 8, 20))
    X = X / X.norm()
    Q = factor(X, backend.steps[:n], dense)
    for step in backend.steps[:n]:
        X, before = Newton("", (step,)).products(X), X
    torch.testing.assert_close(Q @ randn((1, 8, 20)) / randn((1, 8, 20)).norm(), X)
    assert not torch.equal(X, before)


def with_values(s: Tensor) -> Tensor:
    U, V = (torch.linalg.qr(randn((n, len(s)), n)).Q for n in (64, 256))
    return (U * s @ V.mT)[None]


HARD = {
    "Gaussian": randn((1, 64, 256)),
    "condition 1e3": with_values(torch.logspace(0, -3, 64, dtype=torch.float64)),
    "condition 1e6": with_values(torch.logspace(0, -6, 64, dtype=torch.float64)),
    "rank 4": with_values(torch.tensor([1.0] * 4 + [0.0] * 60, dtype=torch.float64)),
    "one large element": randn((1, 64, 256)).index_put(
        [torch.tensor([0])] * 3, torch.tensor(1e4, dtype=torch.float64)
    ),
}


@pytest.mark.parametrize("name", HARD)
@pytest.mark.parametrize("backend", GRAM, ids=lambda b: b.name)
@pytest.mark.parametrize(
    ("form", "product"), [("plain", dense), ("gram", dense), ("gram", mirrored)]
)
def test_fp16_is_three_times_as_accurate_as_bf16(name, backend, form, product) -> None:
    X = HARD[name]
    exact = backend(X)

    def error(form: str, dtype: torch.dtype, product=dense) -> float:
        low = replace(backend, dtype=dtype)
        return float((in_form(low, X.float(), form, product).double() - exact).norm())

    assert error(form, torch.float16, product) < error("plain", torch.bfloat16) / 3


@pytest.mark.parametrize("backend", GRAM, ids=lambda b: b.name)
def test_restarts_are_needed(backend) -> None:
    X = HARD["condition 1e3"] / HARD["condition 1e3"].norm() / backend.safety
    exact, low = backend(X), X.half()
    never = factor(low, backend.steps, dense) @ low
    often = in_form(replace(backend, dtype=torch.float16), X.float(), "gram")
    assert not (never - exact).norm() < 5 * (often - exact).norm()


@each
@pytest.mark.parametrize("size", [1e20, 1e30, 1e-12])
def test_squares_may_overflow(name, size) -> None:
    X = randn((2, 12, 20), dtype=torch.float32)
    torch.testing.assert_close(BACKENDS[name](X * size), BACKENDS[name](X), rtol=1e-3, atol=1e-4)


@each
def test_a_length_that_overflows_stays_visible(name) -> None:
    Y = BACKENDS[name](torch.full((2, 6, 4), 3e38))
    assert Y.isnan().all()


@pytest.mark.parametrize("aspect", [1, 2, 3, 4, 100])
@pytest.mark.parametrize("short", [1, 255, 256, 768, 2047, 100_000])
def test_the_table_has_every_shape(short, aspect) -> None:
    pytest.importorskip("triton")
    form, product = chosen(short, aspect * short)
    assert product in [PRODUCTS[name]() for name in ("dense", "triangle")]
    assert form == "plain" or (form == "gram" and aspect > 1)
