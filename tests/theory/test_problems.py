"""Maps, moduli and norms of the regularisers, and the constants of the problems."""

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sodaopt import zoo
from sodaopt.geometry import Ball, Clip, Sign, unit
from sodaopt.theory import models, problems
from sodaopt.theory.experiments import near_l1
from sodaopt.theory.problems import measured_noise
from sodaopt.theory.regularisers import FixedMetric, PNorm, Smoothed, regulariser
from sodaopt.theory.spaces import Lp, Metric, dot
from tests.support.geometries import SEEDS, SHAPE, SPECTRAL, STRONGLY_CONVEX, metric, mirror, normal

# -- regularisers and norms -----------------------------------------------------------------------


@pytest.mark.parametrize("geometry", STRONGLY_CONVEX.values(), ids=STRONGLY_CONVEX.keys())
@settings(max_examples=15, deadline=None)
@given(seed=SEEDS, gamma=st.floats(0.01, 10.0))
def test_the_map_minimises_and_mu_is_a_modulus_of_strong_convexity(geometry, seed, gamma):
    """gamma <m, v> + h(v) >= gamma <m, u> + h(u) + mu/2 ||v - u||^2 tests map, h, mu and norm."""
    h, m = regulariser(geometry), normal(seed, 3, *SHAPE)
    u = mirror(geometry, m, gamma)
    least = gamma * dot(m, u) + h.gap(u)
    for v in (0.3 * normal(seed + 1, 3, *SHAPE), u + 1e-3 * normal(seed + 2, 3, *SHAPE), 0.9 * u):
        rhs = least + h.mu / 2 * h.space.norm(v - u) ** 2
        assert (gamma * dot(m, v) + h.gap(v) >= rhs - 1e-9 * (1 + rhs.abs())).all()


@pytest.mark.parametrize("space", [Lp(), Lp(1.5), Lp(1.1), Metric(metric(1))], ids=repr)
def test_dual_operator_and_gaussian_norms_are_upper_bounds(space):
    x, g, A = normal(0, 500, 4, 1), normal(1, 500, 4, 1), normal(2, 6, 4)
    assert (dot(x, g) <= space.norm(x) * space.dual(g) * (1 + 1e-12)).all()
    assert (Lp().norm(A @ x) <= space.operator(A) * space.norm(x) * (1 + 1e-12)).all()
    assert float((space.dual(normal(3, 4000, 4, 1)) ** 2).mean()) <= space.gaussian((4, 1)) * 1.05


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_fixed_metric_may_be_symmetric_up_to_rounding(dtype):
    H = metric(0, 64).to(dtype)
    H = (H + H.mT) / 2
    rounding = 32 * torch.finfo(dtype).eps * float(H.abs().max())
    asymmetric = H.clone()
    asymmetric[0, 1] += rounding
    kept = FixedMetric(asymmetric).H
    assert torch.equal(kept, kept.mT)
    assert torch.allclose(kept, H, rtol=0, atol=rounding)


def test_smoothing_a_sign_ball_is_a_projection_and_not_a_clip():
    m = torch.tensor([[3.0], [0.2]], dtype=torch.float64)[None]
    u = mirror(Smoothed(Ball(Sign(unit))), m, 1.0)
    assert torch.equal(u, -m.clamp(-1, 1))
    assert not torch.allclose(u, mirror(Clip(Sign(unit)), m, 1.0))


# -- problems -------------------------------------------------------------------------------------

PROBLEMS = {
    "quadratic": (problems.hard_quadratic(), zoo.GD),
    "quadratic, metric": (problems.hard_quadratic(), FixedMetric(metric(5, 64))),
    "quadratic, p": (problems.hard_quadratic(), PNorm(1.2)),
    "box": (problems.box(), Smoothed(Ball(Sign(unit)))),
    "spectral": (problems.spectral(), Smoothed(Ball(SPECTRAL))),
    "absolute": (models.least_absolute(), zoo.GD),
    "absolute, exact": (models.least_absolute(batch=None), zoo.GD),
    "l1": (models.l1_regression(), near_l1(models.l1_regression())),
    "logistic": (models.logistic(), zoo.GD),
    "wine": (models.logistic("wine", batch=4), zoo.GD),
}
KNOWN = pytest.mark.parametrize(("f", "geometry"), PROBLEMS.values(), ids=PROBLEMS.keys())


@KNOWN
def test_no_point_is_below_the_minimiser(f, geometry):
    h = regulariser(geometry)
    near = torch.stack([f.x_star + s * normal(j, *f.shape) for j in range(40) for s in (1e-3, 0.3)])
    if not f.interior:  # project into the ball
        near = mirror(geometry, -near, 1.0)
    assert h.gap(near).isfinite().all()
    assert float(f.gap(near).min()) >= -1e-12
    if f.interior and f.L is not None:
        assert float(f.grad(f.x_star[None]).abs().max()) < 1e-12


@KNOWN
def test_gradients_are_those_of_f_and_the_oracle_is_unbiased(f, geometry):
    y = f.x_star + normal(0, 3, *f.shape)
    assert torch.allclose(replace(f, gradient=None).grad(y), f.grad(y), atol=1e-12)
    if f.stochastic:
        many = y[:1].expand(20_000, *f.shape)
        mean = f.oracle(1)(0, many).mean(0)
        assert Lp().norm(mean - f.grad(y[:1])[0]) <= 5 * f.constant("v", Lp()) / math.sqrt(20_000)


@KNOWN
def test_constants_are_upper_bounds(f, geometry):
    space = regulariser(geometry).space
    x, y = (f.x_star + normal(j, 50, *f.shape) for j in (1, 2))
    assert f.L is not None or f.G is not None, "no constant to check"
    if f.L is not None:
        change = space.dual(f.grad(x) - f.grad(y))
        assert (change <= f.constant("L", space) * space.norm(x - y) * (1 + 1e-9)).all()
    if f.G is not None:
        assert (space.dual(f.oracle(3)(0, x)) <= f.constant("G", space) * (1 + 1e-9)).all()
    if f.stochastic:
        assert measured_noise(f, space, x[:5]) <= f.constant("v", space) * 1.05
