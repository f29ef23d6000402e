"""Bounds hold in the mean, slopes are as promised, and rules have the paper's numbers."""

import math
from dataclasses import replace

import pytest
import torch

from sodaopt import zoo
from sodaopt.theory import bounds, checks, compare, problems, rates, remarks, runs
from sodaopt.theory.bounds import Constants, constants, equal_weights, linear_weights
from sodaopt.theory.experiments import CASES, measure
from sodaopt.theory.regularisers import PNorm, clip, regulariser
from sodaopt.theory.spaces import Lp

# -- corollaries ----------------------------------------------------------------------------------

SLOPES = ("absolute", "absolute-oda", "fast-absolute", "smooth", "fast", "noisy", "fast-noisy")


@pytest.mark.slow
@pytest.mark.parametrize(
    "case", [case for case in CASES if case.key not in SLOPES], ids=lambda case: case.key
)
def test_corollaries_hold_in_the_mean_with_99_percent_confidence(case):
    found, curve = measure(replace(case, ns=(1, 2, 16, 64, 256), slope=None))
    assert found.holds, (curve.upper, curve.bound)


@pytest.mark.slow
@pytest.mark.parametrize(
    "case", [case for case in CASES if case.key in SLOPES], ids=lambda case: case.key
)
def test_bounds_hold_and_slopes_are_as_promised(case):
    """The slope is -1 (smooth), at most -2 (accelerated), or -1/2 (noisy or not smooth)."""
    assert case.slope is not None
    found, curve = measure(replace(case, ns=(1, 2, *case.ns)))
    assert found.holds, (found.slope, found.promised, curve.upper, curve.bound)


def test_one_method_is_optimal_for_smooth_noisy_and_non_smooth_problems():
    """The three accelerated cases differ only in eta."""
    keys = ("fast", "fast-noisy", "fast-absolute")
    by_key = {case.key: case for case in CASES}
    methods = []
    for key in keys:
        f = by_key[key].problem()
        c = constants(f, zoo.GD, "G" if f.L is None else "L")
        methods.append(by_key[key].rate(64, c, zoo.GD).method)
    assert methods == [zoo.accelerated()] * 3


def test_bounds_and_step_sizes_are_the_papers():
    c, n = Constants(R=0.7, mu=0.5, L=3.0, G=2.0, rho=2.0, sigma=0.4), 50
    rule = rates.bounded(n, c)
    assert rule.eta == pytest.approx(math.sqrt(0.5 * 0.7) / (math.sqrt(2) * 2 * math.sqrt(n)))
    assert rule.bound == pytest.approx(2 * math.sqrt(2) * 2 * math.sqrt(0.7) / math.sqrt(0.5 * n))
    rule = rates.smooth(n, c)
    assert rule.eta == pytest.approx(min(0.5 / (6 * 2 * 3), math.sqrt(0.5 * 0.7) / (0.4 * n**0.5)))
    start = rule.eta * 2 / (2 * 0.5 * n) * 2 * 3**2 * 0.7 / 0.5
    want = 0.7 / (rule.eta * n) + rule.eta * 0.4**2 / (2 * 0.5) + start
    assert rule.bound == pytest.approx(want)
    rule, A = rates.accelerated(n, c), n * (n + 1) / 2
    assert rule.eta == pytest.approx(min(0.5 / (12 * 2 * 3), math.sqrt(0.35) / (0.4 * n**1.5)))
    noise = rule.eta * 0.4**2 * (2 * n + 1) / (6 * 0.5)
    want = 0.7 / (rule.eta * A) + noise + rule.eta * 2 * 3**2 * 0.7 / (0.5**2 * A)
    assert rule.bound == pytest.approx(want)


@pytest.mark.parametrize("rate", [rates.smooth, rates.accelerated])
def test_noise_changes_the_step_size_of_the_smooth_rates(rate):
    c = Constants(R=0.5, L=1.0, rho=2.0, sigma=10.0)
    power = 0.5 if rate is rates.smooth else 1.5
    assert rate(100, c).eta == pytest.approx(math.sqrt(0.5) / (10 * 100**power))
    assert rate(100, replace(c, sigma=0.0)).eta == 1 / ((6 if rate is rates.smooth else 12) * 2)


def test_noise_constants_are_those_of_the_norm():
    f = problems.hard_quadratic().noisy(0.5)
    c = constants(f, zoo.GD, "L")
    assert (c.rho, c.sigma**2) == (2, pytest.approx(3 * 0.5**2))
    c = constants(f, PNorm(1.5), "L")
    assert (c.rho, c.sigma**2) == (3, pytest.approx(6 * f.constant("v", Lp(1.5)) ** 2))
    assert constants(problems.hard_quadratic(), zoo.GD, "L").sigma == 0


def test_bounds_with_general_weights_agree_with_the_closed_sums():
    assert bounds.sums(9, equal_weights) == (9, 9)
    assert bounds.sums(9, linear_weights) == (45, 285)


def test_n_counts_gradients():
    f = problems.hard_quadratic()
    points = list(runs.walk(zoo.moda(), 0.1, 7, f.z0, f.oracle()))
    assert len(points) == 7
    assert float(points[-1].optimizer.state[points[-1].y]["step"]) == 6
    assert torch.allclose(runs.gaps(f, zoo.moda(), 0.1, [1])[1], f.gap(f.z0[None]))


@pytest.mark.parametrize("geometry", [zoo.GD, clip(1.0), PNorm(1.3)], ids=["GD", "clip", "PNorm"])
def test_the_running_regret_of_long_runs_is_that_of_a_trace(geometry):
    f, h = problems.hard_quadratic().noisy(1.0), regulariser(geometry)
    rule = rates.smooth(20, constants(f, geometry, "L"), geometry, share=0.1)
    gap, share = runs.gaps_and_regret(f, rule, [20], h, replicas=3)
    t = runs.trace(rule.method, rule.eta, 20, f.z0, f.oracle(), rule.a, replicas=3)
    assert share == pytest.approx(checks.regret(t, h, f.x_star).measured, rel=1e-9)
    assert torch.allclose(gap[20], f.gap(t.x[-1]), rtol=1e-9)


def test_student_quantiles():
    for freedom, want in ((5, 3.365), (7, 2.998), (15, 2.602), (31, 2.453)):
        assert checks.quantile(0.99, freedom) == pytest.approx(want, abs=0.02)


# -- remarks --------------------------------------------------------------------------------------


def test_optimism_accelerates_in_tandem_with_averaging_and_not_alone():
    rows = {row.key: row for row in remarks.tandem(ns=[8, 16, 32, 64, 128, 256])[0]}
    assert all(row.holds for row in rows.values()), rows
    assert rows["tandem"].slope <= -2
    assert rows["optimism"].slope > -1.15
    assert rows["tandem"].measured < rows["optimism"].measured / 20
    assert math.isinf(rows["optimism-linear"].measured)


def test_the_gap_of_an_anchor_at_zero_grows_with_R(anchor_study):
    anchor = anchor_study.anchors["distance"]
    assert all(row.holds for row in anchor_study.rows if row.problem == "quadratic")
    assert max(anchor.init) == pytest.approx(min(anchor.init), rel=1e-6)
    assert anchor.zero[-1] / anchor.zero[0] == pytest.approx(32**2, rel=0.1)


def test_on_real_data_the_initialisation_is_the_better_anchor(anchor_study):
    anchor = anchor_study.anchors["ablation"]
    assert all(row.holds for row in anchor_study.rows if row.problem == "logistic")
    assert all(init < zero for init, zero in zip(anchor.init, anchor.zero, strict=True))


def test_nesterovs_method_is_an_instance_of_the_template():
    f, lr = problems.hard_quadratic(), 0.7
    x = y = f.z0[None]
    want = []
    for k in range(12):
        want.append(y)
        x, x_old = y - lr * f.grad(y), x
        y = x + k / (k + 3) * (x - x_old)
    points = runs.walk(compare.accelerated_gradient(), lr, 12, f.z0, f.oracle())
    got = [at.y.detach().clone() for at in points]
    assert torch.allclose(torch.stack(got), torch.stack(want), rtol=1e-9, atol=1e-12)


def test_comparison_uses_the_best_of_the_grid():
    f = problems.hard_quadratic()
    lr, found = remarks.tuned(f, zoo.sgd(), [0.25, 1.0, 100.0], [8, 32])
    assert lr == 1.0
    assert found[32] == pytest.approx(float(runs.gaps(f, zoo.sgd(), 1.0, [32])[32]))
    assert found[32] < float(runs.gaps(f, zoo.sgd(), 0.25, [32])[32])
