"""The theory holds: identities to 1e-12, bounds on every run or in the mean, rates by their slopes.

Equalities come first: the inequalities alone would let wrong coefficients pass (see MUTANTS).
"""

import math
import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sodaopt import SODA, schedules, zoo
from sodaopt.geometry import (
    Ball,
    Clip,
    Context,
    Diagonal,
    Euclidean,
    RowNorm,
    Sharp,
    Sign,
    Spectral,
    unit,
)
from sodaopt.geometry.polar import EXACT
from sodaopt.theory import bounds, checks, compare, lemmas, models, problems, rates, remarks, runs
from sodaopt.theory.bounds import Constants, constants, equal_weights, linear_weights
from sodaopt.theory.experiments import CASES, measure, near_l1
from sodaopt.theory.mutants import MUTANTS, examine
from sodaopt.theory.problems import Problem, measured_noise
from sodaopt.theory.regularisers import FixedMetric, PNorm, Smoothed, clip, regulariser
from sodaopt.theory.spaces import Lp, Metric, Space, dot

MANY = settings(max_examples=40, deadline=None)
SHAPE = (4, 3)
SEEDS = st.integers(0, 2**31)


def normal(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def metric(seed: int, d: int = SHAPE[0]) -> torch.Tensor:
    A = normal(seed, d, d)
    return A @ A.mT + 0.1 * torch.eye(d, dtype=torch.float64)


SPECTRAL = Spectral(unit, polar=EXACT)
STRONGLY_CONVEX = {
    "Euclidean": zoo.GD,
    "Euclidean, radius 2": Sharp(Euclidean(), 2.0),
    "clip": clip(1.5),
    "metric": FixedMetric(metric(0)),
    "p = 2": PNorm(2.0),
    "p = 1.5": PNorm(1.5),
    "p = 1.1": PNorm(1.1),
    "sign ball": Smoothed(Ball(Sign(unit)), 0.7),
    "sign sharp": Smoothed(Sharp(Sign(unit)), 0.7),
    "sign clip": Smoothed(Clip(Sign(unit), 1.5), 0.3),
    "sign ball with width": Smoothed(Ball(Sign(), 3.0), 0.7),
    "spectral ball": Smoothed(Ball(SPECTRAL), 0.7),
    "spectral sharp": Smoothed(Sharp(SPECTRAL, 2.0), 0.7),
    "spectral clip": Smoothed(Clip(SPECTRAL), 0.3),
    "Euclidean ball": Smoothed(Ball(Euclidean(view=zoo.Spectral().view), 2.0), 0.5),
}
GEOMETRIES = pytest.mark.parametrize(
    "geometry", STRONGLY_CONVEX.values(), ids=STRONGLY_CONVEX.keys()
)


def mirror(geometry, m_bar, gamma):
    return geometry([m_bar], gamma, Context([m_bar.shape], [m_bar], 0, 1.0, [{}]))[0]


def inside(h, x):
    """x, halved until h is finite there."""
    assert x.isfinite().all()
    while not h.gap(x[None]).isfinite():
        x = x / 2
    return x


# -- the equalities: any weights, any gradients ---------------------------------------------------


@st.composite
def histories(draw, geometries=None):
    """A run as (geometry, trace, z0): on arbitrary gradients, which need not come from an f, or on
    those of a random quadratic with noise."""
    n, seed = draw(st.integers(1, 12)), draw(SEEDS)
    some = draw(st.lists(st.floats(0.05, 20.0), min_size=1, max_size=n + 1))
    scale, eta = 10.0 ** draw(st.integers(-3, 3)), 10.0 ** draw(st.floats(-3, 1))
    g = scale * normal(seed, n, 2, *SHAPE)
    geometry = draw(st.sampled_from(geometries or list(STRONGLY_CONVEX.values())))

    def a(k):
        return some[k % len(some)]

    method = zoo.moda(geometry, schedules.weights(a))
    method = lemmas.with_lam_bar(method, draw(st.sampled_from(lemmas.LAM_BARS)))
    z0 = draw(st.sampled_from([0.0, 1.0])) * normal(seed + 1, *SHAPE)
    Q = draw(st.sampled_from([0.0, 1.0])) * metric(seed + 2)
    t = runs.trace(method, eta, n, z0, lambda k, y: Q @ y + g[k], a, replicas=2)
    return geometry, t, z0


@MANY
@given(histories())
def test_e1_and_e2_hold_for_any_weights_and_gradients(history):
    _, t, _ = history
    for check in (checks.e1(t), checks.e2(t)):
        assert check.holds, check


@MANY
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


@settings(max_examples=80, deadline=None)
@given(histories(), SEEDS)
def test_the_regret_bound_holds_on_every_path(history, seed):
    geometry, t, z0 = history
    h = regulariser(geometry)
    worst = -t.eta * (t.w[..., None, None] * t.g).sum(0)[0]  # where the linear losses are smallest
    for u in (normal(seed, *SHAPE), worst, torch.zeros(SHAPE, dtype=torch.float64)):
        check = checks.regret(t, h, z0 + inside(h, u))
        assert check.holds, (geometry, check)


def test_without_strong_convexity_the_regret_bound_fails():
    """Why Sharp(Sign()) is refused: 1/2 ||.||_inf^2 lets every smaller coordinate jump for free."""

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


# -- regularisers, norms --------------------------------------------------------------------------


@GEOMETRIES
@settings(max_examples=15, deadline=None)
@given(seed=SEEDS, gamma=st.floats(0.01, 10.0))
def test_the_map_minimises_and_mu_is_a_modulus_of_strong_convexity(geometry, seed, gamma):
    """gamma <m, v> + h(v) >= gamma <m, u> + h(u) + mu/2 ||v - u||^2: map, h, mu, norm at once."""
    h, m = regulariser(geometry), normal(seed, 3, *SHAPE)
    u = mirror(geometry, m, gamma)
    least = gamma * dot(m, u) + h.gap(u)
    for v in (0.3 * normal(seed + 1, 3, *SHAPE), u + 1e-3 * normal(seed + 2, 3, *SHAPE), 0.9 * u):
        rhs = least + h.mu / 2 * h.space.norm(v - u) ** 2
        assert (gamma * dot(m, v) + h.gap(v) >= rhs - 1e-9 * (1 + rhs.abs())).all()


@pytest.mark.parametrize("space", [Lp(), Lp(1.5), Lp(1.1), Metric(metric(1))], ids=repr)
def test_dual_norms_and_what_a_norm_makes_of_maps_and_noise(space):
    x, g, A = normal(0, 500, 4, 1), normal(1, 500, 4, 1), normal(2, 6, 4)
    assert (dot(x, g) <= space.norm(x) * space.dual(g) * (1 + 1e-12)).all()
    assert (Lp().norm(A @ x) <= space.operator(A) * space.norm(x) * (1 + 1e-12)).all()
    assert float((space.dual(normal(3, 4000, 4, 1)) ** 2).mean()) <= space.gaussian((4, 1)) * 1.05


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_fixed_metric_may_be_symmetric_up_to_rounding(dtype):
    H = metric(0, 64).to(dtype)
    asymmetric = H.clone()
    asymmetric[0, 1] += 32 * torch.finfo(dtype).eps * float(H.abs().max())
    kept = FixedMetric(asymmetric).H
    assert torch.equal(kept, kept.mT)
    assert torch.allclose(kept, H, atol=32 * torch.finfo(dtype).eps * float(H.abs().max()))


def test_smoothing_a_sign_ball_is_a_projection_and_not_a_clip():
    m = torch.tensor([[3.0], [0.2]], dtype=torch.float64)[None]
    u = mirror(Smoothed(Ball(Sign(unit))), m, 1.0)
    assert torch.equal(u, -m.clamp(-1, 1))
    assert not torch.allclose(u, mirror(Clip(Sign(unit)), m, 1.0))


# -- problems know what they say ------------------------------------------------------------------

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
def test_nothing_is_smaller_than_the_minimiser(f, geometry):
    h = regulariser(geometry)
    near = torch.stack([f.x_star + s * normal(j, *f.shape) for j in range(40) for s in (1e-3, 0.3)])
    if not f.interior:  # back into the ball
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
def test_constants_bound_what_they_say(f, geometry):
    space = regulariser(geometry).space
    x, y = (f.x_star + normal(j, 50, *f.shape) for j in (1, 2))
    if f.L is not None:
        change = space.dual(f.grad(x) - f.grad(y))
        assert (change <= f.constant("L", space) * space.norm(x - y) * (1 + 1e-9)).all()
    if f.G is not None:
        assert (space.dual(f.oracle(3)(0, x)) <= f.constant("G", space) * (1 + 1e-9)).all()
    if f.stochastic:
        assert measured_noise(f, space, x[:5]) <= f.constant("v", space) * 1.05


# -- lemmas and corollaries -----------------------------------------------------------------------


@pytest.mark.parametrize(
    "setting", lemmas.SETTINGS, ids=lambda s: f"{s.label}-{s.problem.__name__}"
)
def test_identities_and_lemmas_on_the_problems(setting):
    for check in lemmas.examine(setting, n=24, replicas=6):
        assert check.holds, check


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.key)
def test_corollaries_hold_in_the_mean_with_99_percent_confidence(case):
    row, curve = measure(replace(case, ns=(1, 2, 16, 64, 256), slope=None))
    assert row.holds, (curve.upper, curve.bound)


PROMISED = [case for case in CASES if case.slope is not None]


@pytest.mark.parametrize("case", PROMISED, ids=lambda case: case.key)
def test_slopes_are_as_promised(case):
    """-1 smooth, at most -2 accelerated, -1/2 noisy or not smooth; the bound holds on the way."""
    row, _ = measure(case)
    assert row.holds, (row.slope, row.promised)


def test_one_method_is_optimal_for_smooth_noisy_and_non_smooth_problems():
    """Universality: the three accelerated cases differ in eta alone."""
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


def test_n_counts_gradients():
    f = problems.hard_quadratic()
    points = list(runs.walk(zoo.moda(), 0.1, 7, f.z0, f.oracle()))
    assert len(points) == 7
    assert float(points[-1].optimizer.state[points[-1].y]["step"]) == 6
    assert torch.equal(runs.gaps(f, zoo.moda(), 0.1, [1])[1], f.gap(f.z0[None]))


@pytest.mark.parametrize("geometry", [zoo.GD, clip(1.0), PNorm(1.3)], ids=["GD", "clip", "PNorm"])
def test_the_running_regret_of_long_runs_is_that_of_a_trace(geometry):
    f, h = problems.hard_quadratic().noisy(1.0), regulariser(geometry)
    rule = rates.smooth(20, constants(f, geometry, "L"), geometry, share=0.1)
    gap, share = runs.gaps_and_regret(f, rule, [20], h, replicas=3)
    t = runs.trace(rule.method, rule.eta, 20, f.z0, f.oracle(), rule.a, replicas=3)
    assert share == pytest.approx(checks.regret(t, h, f.x_star).measured, rel=1e-9)
    assert torch.allclose(gap[20], f.gap(t.x[-1]), rtol=1e-12)


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


def test_a_far_anchor_costs_what_R_says():
    rows, anchor = remarks.anchor_distance()
    assert all(row.holds for row in rows), rows
    assert max(anchor.init) == pytest.approx(min(anchor.init), rel=1e-6)
    assert anchor.zero[-1] / anchor.zero[0] == pytest.approx(32**2, rel=0.1)


def test_on_real_data_the_initialisation_is_the_better_anchor():
    rows, anchor = remarks.anchor_ablation()
    assert all(row.holds for row in rows), rows
    assert all(init < zero for init, zero in zip(anchor.init, anchor.zero, strict=True))


def test_nesterovs_method_is_a_row_of_the_template():
    f, lr = problems.hard_quadratic(), 0.7
    x = y = f.z0[None]
    want = []
    for k in range(12):
        want.append(y)
        x, x_old = y - lr * f.grad(y), x
        y = x + k / (k + 3) * (x - x_old)
    points = runs.walk(compare.accelerated_gradient(), lr, 12, f.z0, f.oracle())
    got = [at.y.detach().clone() for at in points]
    assert torch.allclose(torch.stack(got), torch.stack(want), rtol=1e-12, atol=1e-14)


def test_comparison_takes_the_best_of_the_grid():
    f, grid = problems.hard_quadratic(), [0.25, 1.0, 100.0]
    lr, found = remarks.tuned(f, zoo.sgd(), grid, [8, 32])
    assert lr == 1.0
    assert found[32] == min(
        float(runs.gaps(f, zoo.sgd(), lr, [32], stop=1e3).get(32, torch.inf)) for lr in grid
    )


# -- the checks themselves: each mutant is caught -------------------------------------------------


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda m: m.name)
def test_every_mutant_is_caught_by_its_check(mutant):
    failed = [name for name, check in examine(mutant).items() if not check.holds]
    if mutant.caught is None:
        assert failed == []
    else:
        assert mutant.caught in failed


def test_inequalities_alone_let_six_mutants_pass():
    wrong = [m for m in MUTANTS if m.caught in ("E1", "E2")]
    assert len(wrong) == 6
    for mutant in wrong:
        found = examine(mutant, replicas=4)
        assert all(found[name].holds for name in ("ODA regret", "online-to-batch", "corollary"))


# -- for a user's own problem ---------------------------------------------------------------------


def test_a_rule_runs_on_a_users_own_problem():
    torch.manual_seed(0)
    A, b = torch.randn(30, 5), torch.randn(30)
    x_star = torch.linalg.lstsq(A, b).solution
    L = float(torch.linalg.matrix_norm(A, 2) ** 2) / 30
    w = torch.nn.Parameter(torch.zeros(5))
    rule = rates.accelerated(200, Constants(R=float(x_star @ x_star) / 2, L=L))
    optimizer = SODA([w], lr=rule.eta, method=rule.method)

    def loss(w):
        return ((A @ w - b) ** 2).mean() / 2

    for _ in range(rule.n - 1):
        optimizer.zero_grad()
        loss(w).backward()
        optimizer.step()
    assert float((loss(w) - loss(x_star)).detach()) <= rule.bound


def test_a_problem_by_autograd_with_numbers_for_constants():
    x_star = torch.ones(3, 1, dtype=torch.float64)
    f = Problem("mine", (3, 1), lambda x: ((x - 1) ** 2).sum((-2, -1)), minimiser=x_star, L=2.0)
    rule = rates.smooth(40, constants(f, zoo.GD, "L"))
    assert float(runs.gaps(f, rule.method, rule.eta, [40])[40]) <= rule.bound


# -- bad input ------------------------------------------------------------------------------------

MINE = Problem("mine", (3, 1), lambda x: x.abs().sum((-2, -1)))
CENTRED = replace(MINE, minimiser=torch.ones(3, 1, dtype=torch.float64))
NOISY = replace(CENTRED, L=1.0, sample=lambda x, generator: x)


@pytest.mark.parametrize(
    ("attempt", "message"),
    [
        (lambda: constants(MINE, zoo.GD, "L"), r"mine does not know minimiser.*minimiser=\.\.\."),
        (lambda: constants(CENTRED, zoo.GD, "L"), r"mine does not know L, the smoothness"),
        (lambda: constants(CENTRED, zoo.GD, "G"), r"mine does not know G, the largest dual norm"),
        (lambda: constants(NOISY, zoo.GD, "L"), r"mine does not know v, the noise.*Problem\("),
        (lambda: rates.smooth(9, Constants(R=1.0)), r"needs L > 0.*Constants\(L=\.\.\.\)"),
        (lambda: rates.bounded(9, Constants(R=1.0)), r"needs G > 0.*Constants\(G=\.\.\.\)"),
        (lambda: rates.bounded(9, Constants(G=1.0)), r"needs R > 0.*Constants\(R=\.\.\.\)"),
        (lambda: rates.smooth(9, Constants(R=-1.0, L=1.0)), r"needs R > 0.*got -1.0"),
        (lambda: rates.smooth(0, Constants(R=1.0, L=1.0)), "n counts gradients"),
        (lambda: rates.smooth(9, Constants(R=1.0, L=1.0), share=0.5), "lam_bar <= lam/10"),
        (lambda: regulariser(Ball(Sign())), r"Ball\(Sign\(\)\) is not strongly convex.*"
         r"theory\.Smoothed\(Ball\(Sign\(\)\), tau=1\.0\)"),
        (lambda: regulariser(Sharp(SPECTRAL)), r"Smoothed\(Sharp\(Spectral\(\)\), tau=1\.0\)"),
        (lambda: regulariser(Diagonal()), "not strongly convex"),
        (lambda: rates.bounded(9, Constants(R=1.0, G=1.0), Ball(Sign())), "Smooth it"),
        (lambda: PNorm(1.0), "1 < p <= 2"),
        (lambda: PNorm(2.5), "1 < p <= 2"),
        (lambda: FixedMetric(-torch.eye(2)), "positive definite"),
        (lambda: FixedMetric(torch.full((2, 2), math.nan)), "symmetric"),
        (lambda: FixedMetric(torch.tensor([[2.0, 0.5], [0.4, 2.0]])), "symmetric.*0.1"),
        (lambda: FixedMetric(torch.ones(2, 3)), "square matrix, got 2x3"),
        (lambda: Smoothed(Ball(Sign()), 0.0), "tau must be positive"),
        (lambda: constants(problems.hard_quadratic(), clip(0.5), "L"), "outside the ball"),
        (lambda: problems.hard_quadratic().at(torch.zeros(2, 1)), "z0 is 2x1"),
        (lambda: models.logistic("iriss"), "no data set 'iriss'"),
        (lambda: runs.trace(zoo.sgd(), 0.1, 2, torch.zeros(2, 1), lambda k, y: y, equal_weights),
         "no fixed centre"),
        (lambda: list(runs.walk(zoo.moda(Clip(Euclidean())), 0.1, 2, torch.zeros(2, 1),
                                lambda k, y: y, replicas=3)), "3 replicas as one"),
    ],
)  # fmt: skip
def test_bad_input_is_refused_with_its_fix(attempt, message):
    with pytest.raises(ValueError, match=message):
        attempt()


@pytest.mark.parametrize("h", [Diagonal(), Ball(RowNorm()), Ball(Sign(), schedules.grow)])
def test_what_cannot_be_smoothed_says_so(h):
    with pytest.raises(TypeError, match=r"Smoothed (takes|has no map)"):
        Smoothed(h)


def test_a_missing_scikit_learn_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "sklearn", None)
    with pytest.raises(ModuleNotFoundError, match=r"scikit-learn: pip install 'sodaopt\[lab\]'"):
        models.logistic()


def test_a_nan_never_holds():
    f = problems.hard_quadratic()
    rule = replace(rates.smooth(3, constants(f, zoo.GD, "L")), eta=1e200)
    _, share = runs.gaps_and_regret(f, rule, [3], regulariser(zoo.GD))
    assert share > 1
    assert not checks.Check("x", math.nan, 1.0).holds


def test_the_theory_imports_torch_alone():
    lab = ("matplotlib", "rich", "tyro", "sklearn", "scipy")
    code = f"""
import sys
for name in {lab}:
    sys.modules[name] = None
import sodaopt.theory
from sodaopt.theory import rates, Constants
rates.smooth(10, Constants(R=1.0, L=1.0))
"""
    subprocess.run([sys.executable, "-c", code], check=True)


def test_bounds_with_general_weights_agree_with_the_closed_sums():
    assert bounds.sums(9, equal_weights) == (9, 9)
    assert bounds.sums(9, linear_weights) == (45, 285)
