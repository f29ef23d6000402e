"""Norms, scales, views and maps. Tables list all of them, and tests run over products of tables.

Norms are checked in float64 with the exact polar factor. The polynomials have a file of their own.
"""

import math
from dataclasses import replace
from itertools import product
from typing import NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from sodaopt import geometry, schedules
from sodaopt.geometry import (
    SCALES,
    Ball,
    BiasRMS,
    Clip,
    ColNorm,
    Context,
    Diagonal,
    Euclidean,
    Geometry,
    Kronecker,
    MultiNorm,
    Norm,
    RowNorm,
    Sharp,
    Sign,
    Spectral,
    conv,
    dense,
    elements,
    matrix,
    one_hot,
    transposed,
    unit,
    whole,
)
from sodaopt.geometry.norms import matrixwise
from sodaopt.geometry.polar import BACKENDS, EXACT, lengths
from sodaopt.geometry.views import grouped, split

sqrt = math.sqrt
EXPORTS = {name: getattr(geometry, name) for name in geometry.__all__}
CLASSES = [c for c in EXPORTS.values() if isinstance(c, type)]
NORMS = [c for c in CLASSES if issubclass(c, Norm) and c is not Norm]
MAPS = {  # psi is the indicator of a ball of this radius, plus `half` times ||u/rho||^2
    Ball: (lambda gamma, rho: gamma * rho, 0.0),
    Sharp: (lambda gamma, rho: math.inf, 0.5),
    Clip: (lambda gamma, rho: rho, 0.5),
}
METRICS = [
    c for c in CLASSES if issubclass(c, Geometry) and c is not Geometry and c not in MAPS
]  # geometries without a norm
SHAPES = {
    matrix: [(3, 5), (5, 3), (4, 4), (1, 6), (6, 1), (3, 4, 5)],
    transposed: [(7, 3), (3, 7), (2, 5, 3)],
    conv: [(4, 3, 2), (4, 3, 3, 3), (2, 3, 2, 2, 2)],
    whole: [(6,), (), (2, 3)],
    elements: [(6,), (), (3, 5), (2, 3, 4), (2, 3, 2, 2)],
}
POSITIONS = [(view, shape) for view, shapes in SHAPES.items() for shape in shapes]
CUT = [  # views that cut one matrix into blocks
    (split(3), (6, 4)),
    (split(2, transposed), (3, 8)),
    (grouped(2), (4, 3, 2)),
]
DTYPES = [torch.float32, torch.float64]


class Case(NamedTuple):
    """A geometry with a readable name."""

    geometry: Geometry
    name: str


def named(v: object) -> str | None:
    if isinstance(v, Case):
        return v.name
    if isinstance(v, tuple):
        return "x".join(map(str, v)) or "scalar"
    return type(v).__name__ if isinstance(v, Norm) else getattr(v, "__name__", None)


def build(N: type[Norm], **kw: object) -> Norm:
    return N(**kw, **({"polar": EXACT} if N is Spectral else {}))


NORMED = {N.__name__: N() for N in NORMS if N is not Spectral} | {
    f"Spectral-{name}": Spectral(polar=polar) for name, polar in BACKENDS.items()
}
GEOMETRIES = [Case(M(n), f"{M.__name__}-{s}") for M in MAPS for s, n in NORMED.items()] + [
    Case(M(), M.__name__) for M in METRICS
]
each_norm = pytest.mark.parametrize("N", NORMS, ids=named)
each_position = pytest.mark.parametrize(("view", "shape"), POSITIONS + CUT, ids=named)
each_geometry = pytest.mark.parametrize("case", GEOMETRIES, ids=named)
each_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)


def randn(shape: tuple[int, ...], seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def wild(shape: tuple[int, ...], seed: int, exponent: int, spread: float) -> Tensor:
    """Return entries around 10^exponent that vary by about `spread` decades up and down."""
    return randn(shape, seed) * 10 ** (spread * randn(shape, seed + 1) + exponent)


def call(
    geo: Geometry,
    m_bar: list[Tensor],
    gamma: float | Tensor = 1.0,
    k: int | Tensor = 0,
    lr: float | Tensor = 0.1,
    shapes: list | None = None,
) -> list[Tensor]:
    """Return u at step k, from a new state."""
    state = [geo.state(d, d.dtype) for d in m_bar]
    return geo(m_bar, gamma, Context(shapes or [d.shape for d in m_bar], m_bar, k, lr, state))


def accepts(geo: Geometry, shape: tuple[int, ...]) -> bool:
    try:
        geo.check(shape)
    except ValueError:
        return False
    return True


def shapes_of(geo: Geometry) -> list[tuple[int, ...]]:
    return sorted({s for _, s in POSITIONS if accepts(geo, s)})


def close(a: Tensor, b: Tensor | float, tol: float = 1e-9) -> bool:
    b = torch.as_tensor(b, dtype=a.dtype)
    return a.shape == b.shape and torch.allclose(a, b, rtol=tol, atol=tol * b.abs().max().item())


def test_every_export_is_in_a_table() -> None:
    lower = {f for name, f in EXPORTS.items() if name.islower()}
    assert lower == set(SHAPES) | set(SCALES.values())
    assert {N for N, _ in TABLE} == set(NORMS)
    assert {c for c in CLASSES if issubclass(c, Geometry)} == {Geometry, *MAPS, *METRICS}


# -- norms ----------------------------------------------------------------------------------------


@each_norm
@each_position
@settings(max_examples=5, deadline=None)
@given(
    seed=st.integers(0, 2**40),
    exponent=st.integers(-6, 6),
    spread=st.sampled_from([0.0, 0.0, 1.0, 2.0]),
)
def test_norm_and_dual_are_dual(N, view, shape, seed, exponent, spread) -> None:
    """lmo attains the dual norm in the unit ball, and the gradient of the norm attains the norm.

    With |<x, d>| <= norm(x) dual(d) the two norms determine each other.
    """
    d, x = wild(shape, seed, exponent, spread), wild(shape, seed + 2, -exponent, spread)
    for scale in SCALES.values():
        norm = build(N, scale=scale, view=view)
        dims = view(shape).dims
        u, dual, size = norm.lmo(d), norm.dual(d), norm.norm(x)
        stack = tuple(n for j, n in enumerate(shape) if j not in dims)
        assert u.shape == d.shape
        assert dual.shape == size.shape == stack
        assert close((d * u).sum(dims), -dual)
        assert close(norm.norm(u), torch.ones(stack))
        assert ((x * d).sum(dims).abs() <= size * dual * (1 + 1e-9)).all()
        x_ = x.clone().requires_grad_()
        (g,) = torch.autograd.grad(norm.norm(x_).sum(), x_)
        assert close((x * g).sum(dims), size)
        assert close(norm.dual(g), torch.ones(stack))


def s(X: Tensor) -> Tensor:
    return torch.linalg.svdvals(X)


def polar(X: Tensor) -> Tensor:
    U, _, Vh = torch.linalg.svd(X, full_matrices=False)
    return U @ Vh


def col(X: Tensor) -> Tensor:
    return (X * X).sum(0, keepdim=True).sqrt()


def row(X: Tensor) -> Tensor:
    return (X * X).sum(1, keepdim=True).sqrt()


def rms(X: Tensor) -> Tensor:
    return (X * X).mean().sqrt()


TABLE = {  # (lmo, norm, dual) of (X, o, i): the paper's table, and the norms of Lion and SSD
    (Spectral, dense): (
        lambda d, o, i: -sqrt(o / i) * polar(d),
        lambda x, o, i: sqrt(i / o) * s(x).max(),
        lambda d, o, i: sqrt(o / i) * s(d).sum(),
    ),
    (Spectral, one_hot): (
        lambda d, o, i: -sqrt(o) * polar(d),
        lambda x, o, i: s(x).max() / sqrt(o),
        lambda d, o, i: sqrt(o) * s(d).sum(),
    ),
    (Spectral, unit): (
        lambda d, o, i: -polar(d),
        lambda x, o, i: s(x).max(),
        lambda d, o, i: s(d).sum(),
    ),
    (ColNorm, dense): (
        lambda d, o, i: -(sqrt(o) / i) * d / col(d),
        lambda x, o, i: (i / sqrt(o)) * col(x).max(),
        lambda d, o, i: (sqrt(o) / i) * col(d).sum(),
    ),
    (ColNorm, one_hot): (
        lambda d, o, i: -sqrt(o) * d / col(d),
        lambda x, o, i: col(x).max() / sqrt(o),
        lambda d, o, i: sqrt(o) * col(d).sum(),
    ),
    (RowNorm, dense): (
        lambda d, o, i: -d / (sqrt(i) * row(d)),
        lambda x, o, i: sqrt(i) * row(x).max(),
        lambda d, o, i: row(d).sum() / sqrt(i),
    ),
    (RowNorm, one_hot): (
        lambda d, o, i: -d / row(d),
        lambda x, o, i: row(x).max(),
        lambda d, o, i: row(d).sum(),
    ),
    (Sign, dense): (
        lambda d, o, i: -(1 / i) * d.sign(),
        lambda x, o, i: i * x.abs().max(),
        lambda d, o, i: d.abs().sum() / i,
    ),
    (Sign, one_hot): (
        lambda d, o, i: -d.sign(),
        lambda x, o, i: x.abs().max(),
        lambda d, o, i: d.abs().sum(),
    ),
    (Sign, unit): (
        lambda d, o, i: -d.sign(),
        lambda x, o, i: x.abs().max(),
        lambda d, o, i: d.abs().sum(),
    ),
    (BiasRMS, dense): (
        lambda d, o, i: -d / rms(d),
        lambda x, o, i: rms(x),
        lambda d, o, i: d.numel() * rms(d),
    ),
    (Euclidean, unit): (
        lambda d, o, i: -d / (d * d).sum().sqrt(),
        lambda x, o, i: (x * x).sum().sqrt(),
        lambda d, o, i: (d * d).sum().sqrt(),
    ),
}
CELLS = [
    (N, scale, view, shape)
    for N, scale in TABLE
    for view, shape in [
        *product([matrix, transposed], [(3, 7), (7, 3), (4, 4), (1, 6), (6, 1)]),
        (matrix, (3, 4, 5)),
        (transposed, (3, 4, 5)),
    ]
]


@pytest.mark.parametrize(("N", "scale", "view", "shape"), CELLS, ids=named)
def test_table(N, scale, view, shape) -> None:
    """Every cell, on matrices, on stacks (each matrix is a layer) and in transposed storage."""
    lmo, size, dual = TABLE[N, scale]
    norm, d = build(N, scale=scale, view=view), randn(shape)
    layers = [X.mT if view is transposed else X for X in d.reshape(-1, *shape[-2:])]
    o, i = layers[0].shape
    u = [lmo(X, o, i).mT if view is transposed else lmo(X, o, i) for X in layers]
    stack = shape[:-2]
    assert close(norm.lmo(d), torch.stack(u).reshape(shape))
    assert close(norm.norm(d), torch.stack([size(X, o, i) for X in layers]).reshape(stack))
    assert close(norm.dual(d), torch.stack([dual(X, o, i) for X in layers]).reshape(stack))


@pytest.mark.parametrize("N", [Sign, BiasRMS, Euclidean], ids=named)
@pytest.mark.parametrize("shape", [(5,), (), (2, 3, 2, 2)], ids=named)
def test_not_a_matrix(N, shape) -> None:
    """With the default views, Sign has the factor 1, and BiasRMS divides by the RMS."""
    lmo, size, dual = TABLE[N, unit if N in (Sign, Euclidean) else dense]
    d, norm = randn(shape), N()
    assert close(norm.lmo(d), lmo(d, 1, 1))
    assert close(norm.norm(d), size(d, 1, 1))
    assert close(norm.dual(d), dual(d, 1, 1))


KERNELS = [((8, 2, 3), 3), ((8, 2, 3, 3), 9), ((2, 8, 5, 5), 25), ((2, 3, 2, 3, 4), 24)]


@pytest.mark.parametrize(("shape", "taps"), KERNELS)
def test_conv_kernel(shape, taps) -> None:
    """Spectral on (out, in k k) with sqrt(out/in)/k^2. In one dimension sqrt(out/in)/k."""
    norm, d = Spectral(view=conv, polar=EXACT), randn(shape)
    factor = sqrt(shape[0] / shape[1]) / taps
    assert norm.width(shape) == pytest.approx(factor)
    assert close(norm.lmo(d), -factor * polar(d.flatten(1)).reshape(shape))
    assert close(norm.norm(d), s(d.flatten(1)).max() / factor)
    assert close(norm.dual(d), s(d.flatten(1)).sum() * factor)


WIDTHS = {  # scale: widths of Spectral at 8x2, 2x8 and the 8x2x3x3 kernel, and of Sign at 8x2
    "dense": (2.0, 0.5, 2 / 9, 1 / 2),
    "one_hot": (sqrt(8), sqrt(2), sqrt(8) / 9, 1.0),
    "unit": (1.0, 1.0, 1.0, 1.0),
    "original": (2.0, 1.0, 1.0, 2.0),
    "rms": (sqrt(8), sqrt(8), sqrt(18), sqrt(8)),
    "adamw": (0.2 * sqrt(8), 0.2 * sqrt(8), 0.2 * sqrt(18), 0.2 * sqrt(8)),
}


@pytest.mark.parametrize("name", SCALES)
def test_scale(name) -> None:
    scale = SCALES[name]
    tall, wide, kernel, sign = WIDTHS[name]
    assert Spectral(scale).width((8, 2)) == pytest.approx(tall)
    assert Spectral(scale).width((5, 2, 8)) == pytest.approx(wide)
    assert Spectral(scale, transposed).width((2, 8)) == pytest.approx(tall)
    assert Spectral(scale, conv).width((8, 2, 3, 3)) == pytest.approx(kernel)
    assert Sign(scale).width((8, 2)) == pytest.approx(sign)


# -- maps -----------------------------------------------------------------------------------------


def search(f, fit, shape: tuple[int, int]) -> float:
    """Return the least value of a convex f, by samples of a Gaussian fitted to the best quarter."""
    g, n = torch.Generator().manual_seed(0), math.prod(shape)
    mean, root, low = torch.zeros(n).double(), torch.eye(n).double(), 0.0
    for _ in range(60):
        z = torch.randn(200, n, generator=g, dtype=torch.float64)
        U = fit((mean + z @ root.mT).view(-1, *shape))
        values, order = f(U).sort()
        low, best = min(low, values[0].item()), U[order[:50]].flatten(1)
        spread, mean = best - mean, best.mean(0)
        root = torch.linalg.cholesky(spread.mT @ spread / 50 + 1e-24 * torch.eye(n))
    return low


@pytest.mark.parametrize("M", MAPS, ids=named)
@each_norm
@pytest.mark.parametrize("shape", [(2, 2), (3, 1)], ids=named)
@pytest.mark.parametrize(("gamma", "rho"), [(0.05, 1.5), (0.5, 3.0)])
def test_map_minimises(M, N, shape, gamma, rho) -> None:
    """u = argmin gamma <m, u> + psi(u), compared with a search that knows only the norm."""
    norm = build(N, view=matrix)
    geo, m = M(norm, radius=rho), (1 + randn(shape).abs()) * randn(shape, 1).sign()
    radius, half = MAPS[M]
    radius = radius(gamma, rho)

    def F(U: Tensor) -> Tensor:
        return gamma * (m * U).sum((-2, -1)) + half * (norm.norm(U) / rho) ** 2

    def fit(U: Tensor) -> Tensor:
        return U / (norm.norm(U) / radius).clamp(min=1)[:, None, None]

    (u,) = call(geo, [m], gamma)
    ours, best = F(u[None])[0].item(), search(F, fit, shape)
    assert norm.norm(u) <= radius * (1 + 1e-12)
    assert ours <= best + 1e-12  # no feasible point does better
    assert ours == pytest.approx(best, abs=1e-6, rel=1e-6)
    g = torch.Generator().manual_seed(1)
    spray = fit(u + 0.3 * torch.randn(500, *shape, generator=g, dtype=torch.float64))
    assert (F(spray) >= ours - 1e-12).all()


@each_norm
@pytest.mark.parametrize("gamma", [1e-3, 0.2, 5.0])
@pytest.mark.parametrize("shape", [(4, 3), (2, 4, 3)], ids=named)
def test_map_formulas(N, gamma, shape) -> None:
    """Each map is a scalar times lmo. Each matrix of a stack has its own scalar."""
    norm, rho, d = build(N, view=matrix), 2.5, randn(shape)
    lmo, dual = norm.lmo(d), norm.dual(d)[..., None, None]
    assert close(call(Ball(norm, rho), [d], gamma)[0], gamma * rho * lmo)
    assert close(call(Sharp(norm, rho), [d], gamma)[0], gamma * rho**2 * dual * lmo)
    clip = rho * (gamma * rho * dual).clamp(max=1) * lmo
    assert close(call(Clip(norm, rho), [d], gamma)[0], clip)


def test_sharp_euclidean_is_gradient_descent() -> None:
    d = randn((3, 4))
    assert torch.equal(call(Sharp(Euclidean()), [d], 0.5)[0], -0.5 * d)


@pytest.mark.parametrize("M", MAPS, ids=named)
def test_radius_schedule(M) -> None:
    d = randn((3, 4))
    grown = call(M(Sign(), schedules.over(1, schedules.uniform)), [d], 0.01, k=3)
    assert torch.equal(grown[0], call(M(Sign(), 5.0), [d], 0.01)[0])


@pytest.mark.parametrize("M", MAPS, ids=named)
def test_map_refuses(M) -> None:
    for radius in (-1.0, math.inf, math.nan):
        with pytest.raises(ValueError, match=f"radius must not be .*, got {radius}"):
            M(Sign(), radius)
    with pytest.raises(TypeError, match="needs a Norm"):
        M(Sign)


@each_geometry
@pytest.mark.parametrize("factor", [0.5, 3.0, 1e3])
def test_homogeneous(case, factor) -> None:
    """u(s gamma) = s u(gamma) for the homogeneous maps, and for no others."""
    d = randn((3, 4))
    once, more = call(case.geometry, [d], 1.0)[0], call(case.geometry, [d], factor)[0]
    assert close(more, factor * once, 1e-12) == case.geometry.homogeneous


BALLS = [c for c in GEOMETRIES if isinstance(c.geometry, Ball | MultiNorm)]


@pytest.mark.parametrize("case", BALLS, ids=named)
@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 2**40), exponent=st.floats(-6, 6))
def test_ball_ignores_scale(case, seed, exponent) -> None:
    d = randn((4, 6), seed)
    assert close(call(case.geometry, [d * 10**exponent])[0], call(case.geometry, [d])[0], 1e-8)


@pytest.mark.parametrize("size", [1e20, 1e30, 1e-12])
@pytest.mark.parametrize("norm", NORMS)
def test_the_lmo_does_not_depend_on_the_size(norm, size) -> None:
    """Squares of 1e20 overflow in fp32."""
    d = torch.randn(6, 4, generator=torch.Generator().manual_seed(0))
    [small], [scaled] = norm().units([d]), norm().units([d * size])
    torch.testing.assert_close(scaled, small, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("size", [1e20, 1e30, 1e-12])
def test_multinorm_does_not_depend_on_the_size(size) -> None:
    d = torch.randn(6, 4, generator=torch.Generator().manual_seed(0))
    [small], [scaled] = (call(MultiNorm(), [x]) for x in (d, d * size))
    torch.testing.assert_close(scaled, small, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("norm", NORMS)
def test_a_length_that_overflows_stays_visible(norm) -> None:
    """A division by infinity would look like a zero gradient. NaN and the right result do not."""
    [u] = norm().units([torch.full((6, 4), 3e38)])
    assert (u != 0).all()


@pytest.mark.parametrize("dims", [(0,), (0, 1)])
def test_the_length_of_an_empty_shard(dims) -> None:
    assert not lengths(torch.zeros(0, 3), dims).any()


@each_geometry
@each_dtype
def test_zero_gives_zero(case, dtype) -> None:
    for shape in shapes_of(case.geometry):
        (u,) = call(case.geometry, [torch.zeros(shape, dtype=dtype)], 1e3)
        assert torch.equal(u, torch.zeros(shape, dtype=dtype)), shape


@each_geometry
@each_dtype
def test_zero_parts_stay_finite(case, dtype) -> None:
    """Zero rows and columns, and a zero matrix beside another matrix, give zeros."""
    d = randn((3, 4), dtype=dtype)
    d[1] = d[:, 2] = 0
    u, zero = call(case.geometry, [d, torch.zeros_like(d)])
    assert u.isfinite().all()
    assert not zero.any()
    tol = 1e-3 if isinstance(case.geometry, Kronecker) else 1e-5
    assert max(u[1].abs().max(), u[:, 2].abs().max()) <= tol
    if accepts(case.geometry, (2, 3, 4)):
        (u,) = call(case.geometry, [torch.stack([d, torch.zeros_like(d)])])
        assert u.isfinite().all()
        assert not u[1].any()


@each_geometry
@each_dtype
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_number_that_is_not_finite_stays_visible(case, dtype, bad) -> None:
    """The result of its own parameter is not finite, and those of other parameters are."""
    for shape in shapes_of(case.geometry):
        good, d = randn(shape, 1, dtype), randn(shape, dtype=dtype)
        d.view(-1)[-1] = bad
        for others in ([], [good]):
            u, *rest = call(case.geometry, [d, *others])
            assert not u.isfinite().all(), shape
            assert all(r.isfinite().all() for r in rest), shape


@each_geometry
def test_a_list_is_one_by_one(case) -> None:
    """A batch gives the same results. The inputs do not change, and the outputs are new tensors."""
    shapes = shapes_of(case.geometry)
    ds = [randn(shape, j) for j, shape in enumerate([*shapes, *shapes[::-1]])]
    ds += [ds[0].clone(), randn((5, 3), 9).mT]
    kept = [d.clone() for d in ds]
    us = call(case.geometry, ds, 0.7)
    for d, u in zip(ds, us, strict=True):
        assert close(u, call(case.geometry, [d], 0.7)[0], 1e-12)
        assert u.dtype == d.dtype
    for u in us:
        u.zero_()
    assert all(map(torch.equal, ds, kept))


def test_stacks_side_by_side_in_one_memory() -> None:
    """Single matrices at equal distances are joined without a copy. Stacks are not."""
    stacks = list(randn((6, 3, 5)).split(2))
    for d, doubled in zip(stacks, matrixwise(lambda X: 2 * X, stacks), strict=True):
        assert torch.equal(doubled, 2 * d)


@each_geometry
def test_numbers_or_tensors(case) -> None:
    """gamma, k and lr may be 0-D tensors."""
    d, t = randn((3, 4)), torch.tensor
    f64 = {"dtype": torch.float64}
    (u,) = call(case.geometry, [d], t(0.3, **f64), t(2.0, **f64), t(0.1, **f64))
    assert close(u, call(case.geometry, [d], 0.3, 2, 0.1)[0], 1e-12)


@pytest.mark.parametrize("case", [c for c in GEOMETRIES if c.geometry.elementwise], ids=named)
def test_elementwise_needs_only_a_part(case) -> None:
    for shape in shapes_of(case.geometry):
        d = randn(shape)
        whole, part = call(case.geometry, [d])[0], d.reshape(-1)[::2]
        (u,) = call(case.geometry, [part], shapes=[shape])
        assert close(u, whole.reshape(-1)[::2], 1e-12)


REFUSED = [
    *product([Spectral(), ColNorm(), RowNorm()], [(), (7,), (2, 3, 4, 5)]),
    *product([Spectral(view=conv), Sign(view=conv)], [(), (7,), (4, 6)]),
    *product([RowNorm(view=transposed)], [(7,), (2, 3, 4, 5)]),
]


@pytest.mark.parametrize(("norm", "shape"), REFUSED, ids=named)
def test_wrong_shape_is_named(norm, shape) -> None:
    words = "x".join(map(str, shape)) or "scalar"
    for M in MAPS:
        with pytest.raises(ValueError, match=f"shape {words}"):
            M(norm).check(shape)
    for f in (norm.lmo, norm.dual, norm.norm):
        with pytest.raises(ValueError, match=f"shape {words}"):
            f(randn(shape))


@pytest.mark.parametrize(
    ("geo", "shape"),
    [*product([Kronecker()], [(), (7,), (2, 3, 4)]), *product([MultiNorm()], [(), (7,)])],
)
def test_wrong_shape_of_a_metric_is_named(geo, shape) -> None:
    words = "x".join(map(str, shape)) or "scalar"
    with pytest.raises(ValueError, match=f"shape {words}"):
        geo.check(shape)


# -- metrics --------------------------------------------------------------------------------------


def steps(geo: Geometry, gs: list[Tensor], gamma: float = 1.0) -> list[Tensor]:
    """Return u for each gradient in turn, with one state."""
    state = geo.state(gs[0], gs[0].dtype)
    return [geo([g], gamma, Context([g.shape], [g], k, 0.1, [state]))[0] for k, g in enumerate(gs)]


@pytest.mark.parametrize("shape", [(3, 5), (5, 3), (4, 4), (1, 6)], ids=named)
def test_kronecker(shape) -> None:
    """If G is constant, u is -U V^T/sqrt(t). Otherwise it is the formula with the two sums."""
    G = randn(shape)
    for t, u in enumerate(steps(Kronecker(), [G] * 5, 2.0), 1):
        assert close(u, -2 * polar(G) / sqrt(t), 1e-6)
    gs, eps = [randn(shape, j) for j in range(4)], 1e-3
    L, R = eps * torch.eye(shape[0]).double(), eps * torch.eye(shape[1]).double()
    for g, u in zip(gs, steps(Kronecker(eps), gs), strict=True):
        L, R = L + g @ g.mT, R + g.mT @ g
        (w, P), (v, Q) = torch.linalg.eigh(L), torch.linalg.eigh(R)
        assert close(u, -P @ (w**-0.25).diag() @ P.mT @ g @ Q @ (v**-0.25).diag() @ Q.mT)


def test_kronecker_clamps_eigenvalues() -> None:
    """Rounding makes zero eigenvalues of L and R negative. All below eps count as eps."""
    eps, L = 1e-4, torch.tensor([1.0, 1e-6, -0.5]).double().diag()
    d, zero, R = torch.eye(3).double(), torch.zeros(3, 3).double(), torch.eye(3).double()
    u, *_ = Kronecker(eps).mapped([d, zero, L, R])
    assert close(u, torch.tensor([1.0, eps**-0.25, eps**-0.25]).diag())


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("side", [2, 3])
def test_kronecker_state_that_is_not_finite_stays_visible(side, bad) -> None:
    """Such as sums of squares that overflowed at an earlier step."""
    four = [torch.ones(3, 3), torch.zeros(3, 3), torch.eye(3), torch.eye(3)]
    four[side][1, 1] = bad
    assert Kronecker().mapped(four)[0].isnan().all()


@pytest.mark.parametrize(("view", "shape"), [p for p in POSITIONS if p[0] is not whole], ids=named)
def test_multinorm(view, shape) -> None:
    """Rows to norm sqrt(columns), then columns to norm sqrt(rows), five times: unit RMS."""
    f, d = view(shape), randn(shape) + 2
    (u,) = call(MultiNorm(view=view), [d], 0.5)
    for X, U in zip(f.fold(d), f.fold(u), strict=True):
        m, n = X.shape
        for _ in range(5):
            X = sqrt(n) * X / row(X)
            X = sqrt(m) * X / col(X)
        assert close(U, -0.5 * X)
        assert close(rms(U), 0.5, 1e-12)


RATES = {  # the rate, and the weight of g_j^2 in v after step t
    "plain": (0.25, lambda j, t: 0.25 * 0.75 ** (t - j)),
    "debiased": (
        schedules.debias(0.75),
        lambda j, t: 0.25 * 0.75 ** (t - j) / (1 - 0.75 ** (t + 1)),
    ),
}


@pytest.mark.parametrize("rate", RATES)
@pytest.mark.parametrize("shape", [(3, 4), (5,), ()], ids=named)
def test_diagonal(rate, shape) -> None:
    """-gamma m_bar/(sqrt(v) + eps), in which v contains the current gradient."""
    (c, weight), eps = RATES[rate], 0.01
    gs = [randn(shape, j) for j in range(5)]
    for t, u in enumerate(steps(Diagonal(c, eps), gs, 0.3)):
        v = sum(weight(j, t) * gs[j] ** 2 for j in range(t + 1))
        assert close(u, -0.3 * gs[t] / (v.sqrt() + eps), 1e-12)


def test_values_compare() -> None:
    """Geometries are values: equal if they have equal arguments, and `replace` changes one."""
    for M, N in product(MAPS, NORMS):
        assert M(N()) == M(N())
        assert hash(M(N())) == hash(M(N()))
        assert replace(M(N()), radius=2.0) != M(N())
    for M in METRICS:
        assert M() == M()
