"""The identities hold to 1e-12, and the lemmas hold on every run. Mutants test the checks."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sodaopt import zoo
from sodaopt.geometry import Sharp, Sign, unit
from sodaopt.theory import checks, lemmas, rates, runs
from sodaopt.theory.bounds import equal_weights, linear_weights
from sodaopt.theory.mutants import MUTANTS, examine
from sodaopt.theory.regularisers import regulariser
from sodaopt.theory.spaces import Space
from sodaopt.theory.weights import moda
from tests.support.geometries import SEEDS, SHAPE, STRONGLY_CONVEX, metric, normal


def inside(h, x):
    """Return x, halved until h is finite there."""
    assert x.isfinite().all()
    while not h.gap(x[None]).isfinite():
        x = x / 2
    return x


# -- any weights, any gradients -------------------------------------------------------------------


@st.composite
def histories(draw, geometries=None):
    """Draw a run as (geometry, trace, z0).

    The gradients are arbitrary and need not belong to a function f, or they are those of a random
    quadratic with noise.
    """
    n, seed = draw(st.integers(1, 12)), draw(SEEDS)
    some = draw(st.lists(st.floats(0.05, 20.0), min_size=1, max_size=n + 1))
    scale, eta = 10.0 ** draw(st.integers(-3, 3)), 10.0 ** draw(st.floats(-3, 1))
    g = scale * normal(seed, n, 2, *SHAPE)
    geometry = draw(st.sampled_from(geometries or list(STRONGLY_CONVEX.values())))

    def a(k):
        return some[k % len(some)]

    method = moda(geometry, a)
    method = lemmas.with_lam_bar(method, draw(st.sampled_from(lemmas.LAM_BARS)))
    z0 = draw(st.sampled_from([0.0, 1.0])) * normal(seed + 1, *SHAPE)
    Q = draw(st.sampled_from([0.0, 1.0])) * metric(seed + 2)
    t = runs.trace(method, eta, n, z0, lambda k, y: Q @ y + g[k], a, replicas=2)
    return geometry, t, z0


@settings(max_examples=80, deadline=None)
@given(histories(), SEEDS)
def test_e1_e2_and_the_regret_bound_hold_for_any_weights_and_gradients(history, seed):
    geometry, t, z0 = history
    for check in (checks.e1(t), checks.e2(t)):
        assert check.holds, check
    h = regulariser(geometry)
    worst = -t.eta * (t.w[..., None, None] * t.g).sum(0)[0]  # here the linear losses are smallest
    for u in (normal(seed, *SHAPE), worst, torch.zeros(SHAPE, dtype=torch.float64)):
        check = checks.regret(t, h, z0 + inside(h, u))
        assert check.holds, (geometry, check)


@settings(max_examples=40, deadline=None)
@given(histories([zoo.GD]), SEEDS)
def test_e3_holds_for_any_weights_gradients_and_x(history, seed):
    _, t, z0 = history
    check = checks.e3(t, z0 + normal(seed, *SHAPE))
    assert check.holds, check


@settings(max_examples=60, deadline=None)
@given(
    SEEDS,
    st.integers(1, 12),
    st.sampled_from([equal_weights, linear_weights]),
    st.sampled_from(lemmas.LAM_BARS),
)
def test_all_three_hold_for_the_closed_forms_of_the_zoo(seed, n, a, lam_bar):
    g, z0 = normal(seed, n, 1, *SHAPE), normal(seed + 1, *SHAPE)
    method = lemmas.with_lam_bar(rates.method_of(a), lam_bar)
    t = runs.trace(method, 0.3, n, z0, lambda k, y: g[k], a)
    for check in (checks.e1(t), checks.e2(t), checks.e3(t, normal(seed + 2, *SHAPE))):
        assert check.holds, check


def test_without_strong_convexity_the_regret_bound_fails():
    """Sharp(Sign()) needs smoothing: 1/2 ||.||_inf^2 does not penalise the smaller coordinates."""

    class Infinity(Space):
        def dual(self, g):
            return g.abs().sum((-2, -1))

    def oracle(k, y):  # once the first coordinate, then 0.1 |x_2|
        return torch.stack([torch.full_like(y[:, 0], k == 0), 0.1 * y[:, 1].sign() + (k == 0)], 1)

    sharp, z0 = Sharp(Sign(unit)), torch.zeros(2, 1, dtype=torch.float64)
    h = replace(
        regulariser(zoo.GD), space=Infinity(), gap=lambda u: u.abs().amax((-2, -1)) ** 2 / 2
    )
    t = runs.trace(zoo.oda(sharp), 1.0, 200, z0, oracle, equal_weights)
    assert checks.e1(t).holds
    assert checks.regret(t, h, z0).measured > 1.5


# -- on the problems ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "setting", lemmas.SETTINGS, ids=lambda s: f"{s.label}-{s.problem.__name__}"
)
def test_identities_and_lemmas_on_the_problems(setting):
    for check in lemmas.examine(setting, n=24, replicas=6):
        assert check.holds, check


# -- the checks detect mistakes -------------------------------------------------------------------


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda m: m.name)
def test_every_mutant_is_caught_by_its_check(mutant):
    found = examine(mutant)
    failed = [name for name, check in found.items() if not check.holds]
    if mutant.caught is None:
        assert failed == []
        return
    assert mutant.caught in failed
    if mutant.caught in ("E1", "E2"):  # the inequalities alone would let this mutant pass
        assert not {"ODA regret", "online-to-batch", "corollary"} & set(failed)


def test_the_inequalities_miss_six_mutants():
    assert sum(mutant.caught in ("E1", "E2") for mutant in MUTANTS) == 6
