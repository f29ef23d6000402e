"""Measure the corollaries on the problems: the gap f(x) - f* against n, with its bound."""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from sodaopt import schedules, zoo
from sodaopt.geometry import Ball, Geometry, Sign, Spectral, unit
from sodaopt.geometry.polar import EXACT

from . import checks, rates
from .bounds import constants, linear_weights
from .models import l1_regression, least_absolute, logistic
from .problems import Problem, box, hard_quadratic, spectral
from .rates import Rule
from .regularisers import FixedMetric, PNorm, Smoothed, regulariser
from .runs import gaps_and_regret

REPLICAS = 16
LONG = [2**j for j in range(4, 12)]  # for cheap problems, and if one run is enough for all n
SHORT = LONG[:-1]


@dataclass(frozen=True)
class Measurement:
    """A line of the table: one result on one problem.

    slope: the measured exponent of the gap in n, None if there is none
    promised: the slope that the theory promises, as text
    holds: whether the bound holds at every n, and the slope is as promised. For a rate, the regret
        bound must hold on every run as well.
    """

    key: str
    result: str
    problem: str
    setting: str
    n: int
    bound: float
    measured: float
    slope: float | None
    promised: str
    holds: bool


@dataclass(frozen=True)
class Curve:
    """The mean gap against n, the upper end of its confidence interval, and the bound."""

    label: str
    ns: list[int]
    gap: list[float]
    upper: list[float]
    bound: list[float]


@dataclass(frozen=True)
class Case:
    """A rate on a problem.

    slope: the promised slope as (lowest, highest), None if nothing is promised
    since: the slope is fitted to n >= since
    """

    key: str
    result: str
    setting: str
    problem: Callable[[], Problem]
    rate: Callable[..., Rule]
    geometry: Callable[[Problem], Geometry] = lambda f: zoo.GD
    ns: Sequence[int] = tuple(SHORT)
    slope: tuple[float, float] | None = None
    since: int = 16


def promise(slope: tuple[float, float] | None) -> str:
    """Return a promised slope as text: '-1 +- 0.1', '<= -2', or '' for None."""
    if slope is None:
        return ""
    low, high = slope
    return f"<= {high:g}" if math.isinf(low) else f"{(low + high) / 2:g} +- {(high - low) / 2:g}"


def measure(case: Case, replicas: int = REPLICAS) -> tuple[Measurement, Curve]:
    """Run the case at every n and compare the gaps with the bound."""
    f = case.problem()
    geometry = case.geometry(f)
    rules = _rules(case, f, geometry)
    found, share = _gaps_and_regret(f, geometry, rules, replicas if f.stochastic else 1)
    done = [checks.corollary(found[rule.n], rule.bound) for rule in rules]
    curve = Curve(
        case.key,
        [rule.n for rule in rules],
        [float(found[rule.n].mean()) for rule in rules],
        [check.measured for check in done],
        [rule.bound for rule in rules],
    )
    slope = _slope(curve, case.since)
    low, high = case.slope or (-math.inf, math.inf)
    holds = (case.slope is None or low <= slope <= high) and share <= 1 + checks.ROUNDING
    measurement = Measurement(
        key=case.key,
        result=case.result,
        problem=f.name,
        setting=case.setting,
        n=rules[-1].n,
        bound=rules[-1].bound,
        measured=done[-1].measured,
        slope=slope,
        promised=promise(case.slope),
        holds=holds and all(check.holds for check in done),
    )
    return measurement, curve


def _gaps_and_regret(
    f: Problem, geometry: Geometry, rules: list[Rule], replicas: int
) -> tuple[dict[int, Tensor], float]:
    """Return the gaps by n and the largest ratio of regret to bound, with one run for each eta."""
    found: dict[int, Tensor] = {}
    worst, h = 0.0, regulariser(geometry)
    for same in _by_eta(rules):
        gaps, share = gaps_and_regret(f, same[0], [rule.n for rule in same], h, replicas)
        found |= gaps
        worst = max(worst, share)
    return found, worst


def _slope(curve: Curve, since: int) -> float:
    late = [(n, gap) for n, gap in zip(curve.ns, curve.gap, strict=True) if n >= since]
    return checks.slope([n for n, _ in late], [gap for _, gap in late])


def _rules(case: Case, f: Problem, geometry: Geometry) -> list[Rule]:
    c = constants(f, geometry, "L" if f.L is not None else "G")
    return [case.rate(n, c, geometry) for n in case.ns]


def _by_eta(rules: Iterable[Rule]) -> list[list[Rule]]:
    """Group the rules that differ only in n. One run is enough for each group."""
    groups: dict[float, list[Rule]] = {}
    for rule in rules:
        groups.setdefault(rule.eta, []).append(rule)
    return list(groups.values())


# -- the cases ------------------------------------------------------------------------------------


def quadratic_metric(f: Problem) -> Geometry:
    """Return the metric H = Q^(1/2), between gradient descent and Newton's method."""
    eye = torch.eye(f.shape[0], dtype=torch.float64)[..., None]
    Q = (f.grad(eye) - f.grad(0 * eye))[..., 0]
    w, V = torch.linalg.eigh((Q + Q.mT) / 2)
    return FixedMetric((V * w.clamp(min=0).sqrt()) @ V.mT)


def near_l1(f: Problem) -> Geometry:
    """Return 1/2 ||.||_p^2 with p = q/(q-1) and q = 2 log d: close to l1, and strongly convex."""
    q = 2 * math.log(math.prod(f.shape))
    return PNorm(q / (q - 1))


def tenth(rate: Callable[..., Rule]) -> Callable[..., Rule]:
    """Return the rate with lam_bar = lam/10."""
    if rate is rates.bounded:
        return partial(rate, lam_bar=schedules.times(0.1, schedules.uniform))
    return partial(rate, share=0.1)


SIGN_BALL = Smoothed(Ball(Sign(unit)))
SPECTRAL_BALL = Smoothed(Ball(Spectral(unit, polar=EXACT)))
HALF, ONE, TWO = (-0.6, -0.4), (-1.1, -0.9), (-math.inf, -2.0)


def quadratic_noisy() -> Problem:
    return hard_quadratic().noisy(1.0)


def box_noisy() -> Problem:
    return box().noisy(0.3)


def spectral_noisy() -> Problem:
    return spectral().noisy(0.3)


BOUNDED, SMOOTH, ACCELERATED = "bounded gradients", "smooth", "accelerated"
ODA = partial(rates.bounded, lam_bar=1.0)
UNIVERSAL = partial(rates.bounded, a=linear_weights)


def _absolute(key: str, result: str, setting: str, rate: Callable[..., Rule]) -> Case:
    """Return a case of least absolute deviations, with a slope fitted to n >= 128.

    For smaller n, the gap is still near f(z0) - f*.
    """
    return Case(key, result, setting, least_absolute, rate, ns=LONG, slope=HALF, since=128)


CASES = [
    _absolute("absolute", BOUNDED, "lam_bar = 0", rates.bounded),
    _absolute("absolute-tenth", BOUNDED, "lam_bar = lam/10", tenth(rates.bounded)),
    _absolute("absolute-oda", BOUNDED, "lam_bar = 1 (ODA)", ODA),
    Case("l1", BOUNDED, "1/2||.||_p^2", l1_regression, rates.bounded, near_l1),
    Case("l1-oda", BOUNDED, "1/2||.||_p^2, ODA", l1_regression, ODA, near_l1),
    Case("l1-euclidean", BOUNDED, "Euclidean", l1_regression, rates.bounded),
    Case("smooth", SMOOTH, "lam_bar = 0", hard_quadratic, rates.smooth, ns=LONG, slope=ONE),
    Case("smooth-tenth", SMOOTH, "lam_bar = lam/10", hard_quadratic, tenth(rates.smooth), ns=LONG,
         slope=ONE),
    Case("smooth-metric", SMOOTH, "fixed metric", hard_quadratic, rates.smooth, quadratic_metric,
         LONG),
    Case("smooth-p", SMOOTH, "1/2||.||_p^2", hard_quadratic, rates.smooth, near_l1, LONG),
    Case("noisy", SMOOTH, "lam_bar = 0", quadratic_noisy, rates.smooth, slope=HALF),
    Case("noisy-tenth", SMOOTH, "lam_bar = lam/10", quadratic_noisy, tenth(rates.smooth),
         slope=HALF),
    Case("noisy-p", SMOOTH, "1/2||.||_p^2", quadratic_noisy, rates.smooth, near_l1),
    Case("logistic", SMOOTH, "lam_bar = 0", logistic, rates.smooth),
    Case("box", SMOOTH, "sign ball, smoothed", box_noisy, rates.smooth, lambda f: SIGN_BALL),
    Case("spectral", SMOOTH, "spectral ball, smoothed", spectral_noisy, rates.smooth,
         lambda f: SPECTRAL_BALL),
    Case("fast", ACCELERATED, "lam_bar = 0", hard_quadratic, rates.accelerated, ns=LONG, slope=TWO),
    Case("fast-tenth", ACCELERATED, "lam_bar = lam/10", hard_quadratic, tenth(rates.accelerated),
         ns=LONG, slope=TWO),
    Case("fast-noisy", ACCELERATED, "lam_bar = 0", quadratic_noisy, rates.accelerated, slope=HALF),
    Case("fast-noisy-tenth", ACCELERATED, "lam_bar = lam/10", quadratic_noisy,
         tenth(rates.accelerated), slope=HALF),
    Case("fast-logistic", ACCELERATED, "lam_bar = 0", logistic, rates.accelerated),
    Case("fast-box", ACCELERATED, "sign ball, smoothed", box_noisy, rates.accelerated,
         lambda f: SIGN_BALL),
    Case("fast-spectral", ACCELERATED, "spectral ball, smoothed", spectral_noisy,
         rates.accelerated, lambda f: SPECTRAL_BALL),
    _absolute("fast-absolute", "universality", "a = k+1, not smooth", UNIVERSAL),
]  # fmt: skip
