"""A user's own problem, and the errors for bad input."""

import math
import subprocess
import sys
from dataclasses import replace

import pytest
import torch

from sodaopt import SODA, schedules, zoo
from sodaopt.geometry import Ball, Clip, Diagonal, Euclidean, RowNorm, Sharp, Sign
from sodaopt.theory import checks, models, problems, rates, runs
from sodaopt.theory.bounds import Constants, constants, equal_weights
from sodaopt.theory.problems import Problem
from sodaopt.theory.regularisers import FixedMetric, PNorm, Smoothed, clip, regulariser
from tests.support.geometries import SPECTRAL


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
        (lambda: constants(MINE, zoo.GD, "L"), r"minimiser of mine is unknown.*minimiser=\.\.\."),
        (lambda: constants(CENTRED, zoo.GD, "L"), r"L of mine is unknown: the smoothness"),
        (lambda: constants(CENTRED, zoo.GD, "G"), r"G of mine is unknown: the largest dual norm"),
        (lambda: constants(NOISY, zoo.GD, "L"), r"v of mine is unknown: the noise.*Problem\("),
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
def test_bad_input_raises_an_error_with_a_fix(attempt, message):
    with pytest.raises(ValueError, match=message):
        attempt()


@pytest.mark.parametrize(
    "h", [Diagonal(), Ball(RowNorm()), Ball(Sign(), schedules.over(1, schedules.uniform))]
)
def test_other_geometries_cannot_be_smoothed(h):
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


@pytest.mark.slow
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
