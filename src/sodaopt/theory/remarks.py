"""Measure two remarks of the paper: optimism needs averaging, and the bound grows with R.

R = 1/2 ||x* - z0||^2 depends on the anchor z0.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from sodaopt import zoo
from sodaopt.core.method import Method
from sodaopt.schedules import Number

from . import checks, rates
from .bounds import constants
from .experiments import Curve, Measurement, promise
from .models import logistic
from .problems import Problem, hard_quadratic
from .runs import gaps

NS = [2**j for j in range(3, 10)]

# -- optimism and averaging together --------------------------------------------------------------

ETAS = [2.0**j for j in range(-4, 4)]  # in units of 1/L
FLAT, STEEP = (-1.15, -0.85), (-math.inf, -2.0)


@dataclass(frozen=True)
class Variant:
    """A combination of optimism and averaging.

    slope: the promised slope as (lowest, highest), None if nothing is promised
    diverges: no step size of ETAS is expected to converge
    """

    key: str
    label: str
    method: Method
    slope: tuple[float, float] | None = None
    diverges: bool = False


def _no_look_ahead(k: Number, lr: Number) -> Number:
    """Return eta A_k for a_k = k+1, the gamma that belongs to alpha_bar = 0."""
    return lr * (k + 1) * (k + 2) / 2


def variants() -> list[Variant]:
    """Return dual averaging from z0 with and without optimism and averaging.

    lam = 1 switches averaging off. ODA averages only its output. No theorem covers the last
    variant, so nothing is promised for it.
    """
    both = zoo.accelerated()
    alone, alone_linear = replace(zoo.moda(), lam=1.0), replace(both, lam=1.0)
    averaging = replace(both, alpha_bar=0.0, gamma=_no_look_ahead)
    return [
        Variant("tandem", "in tandem, a = k+1", both, STEEP),
        Variant("tandem-constant", "in tandem, a = 1", zoo.moda(), FLAT),
        Variant("tandem-oda", "optimism, ODA, a = 1", zoo.oda(), FLAT),
        Variant("optimism", "optimism alone, a = 1", alone, FLAT),
        Variant("optimism-linear", "optimism alone, a = k+1", alone_linear, diverges=True),
        Variant("descent", "gradient descent", zoo.sgd(), FLAT),
        Variant("averaging", "averaging alone, a = k+1", averaging),
    ]


def tandem(ns: Sequence[int] = NS) -> tuple[list[Measurement], list[Curve]]:
    """Run each variant on the hard quadratic with its best step size of ETAS/L."""
    rows, curves = [], []
    for variant in variants():
        eta, found = tuned(hard_quadratic(), variant.method, ETAS, ns)
        rows.append(_compare_with_promise(variant, eta, found, max(ns)))
        gap = list(found.values())
        curves.append(Curve(variant.label, list(found), gap, gap, []))
    return rows, curves


def _compare_with_promise(
    variant: Variant, eta: float, found: dict[int, float], n: int
) -> Measurement:
    diverged = n not in found  # the run ended early
    late = [m for m in found if m >= 16]
    slope = math.inf if diverged else checks.slope(late, [found[m] for m in late])
    low, high = variant.slope or (-math.inf, math.inf)
    return Measurement(
        key=variant.key,
        result="tandem",
        problem="quadratic",
        setting=f"{variant.label}; {eta:g}/L",
        n=n,
        bound=math.nan,
        measured=math.inf if diverged else found[n],
        slope=slope,
        promised="diverges" if variant.diverges else promise(variant.slope),
        holds=diverged == variant.diverges and low <= slope <= high,
    )


def tuned(
    f: Problem, method: Method, etas: Sequence[float], ns: Sequence[int], replicas: int = 1
) -> tuple[float, dict[int, float]]:
    """Return the step size with the smallest mean gap at the largest n, and its gaps by n.

    A run ends early when its gap is a thousand times the initial one. If all runs end early, the
    longest one is returned.
    """
    stop = 1e3 * float(f.gap(f.z0[None]))
    best: tuple[tuple[int, float], float, dict[int, float]] | None = None
    for eta in etas:
        found = gaps(f, method, eta, ns, replicas=replicas, stop=stop)
        mean = {n: float(gap.mean()) for n, gap in found.items()}
        rank = (-max(mean), mean[max(mean)])
        if best is None or rank < best[0]:
            best = (rank, eta, mean)
    assert best is not None
    return best[1], best[2]


# -- the anchor -----------------------------------------------------------------------------------

DISTANCES = [2.0**j for j in range(6)]
STEPS = 256
ANCHORS = {"init": "z0 = initialisation", "zero": "z0 = 0"}


@dataclass(frozen=True)
class Anchor:
    """Gaps and bounds for z0 = initialisation (init) and z0 = 0 (zero).

    xs: the distances of x* from the origin, or the numbers n of gradients
    """

    xs: list[float]
    init: list[float]
    init_bound: list[float]
    zero: list[float]
    zero_bound: list[float]


def anchored(f: Problem, ns: Sequence[int], zero: bool) -> list[tuple[float, float]]:
    """Return (gap, bound) of the smooth rate at each n, started at f.z0.

    zero: use the origin as the anchor instead of f.z0

    If the start x0 is not the anchor z0, the first term of the regret is <g^0, x0 - x*> instead of
    <g^0, z0 - x*>. The bound then grows by <g^0, x0 - z0>/n.
    """
    centre = f.at(torch.zeros_like(f.z0)) if zero else f
    rules = [rates.smooth(n, constants(centre, zoo.GD, "L")) for n in ns]
    method = replace(rules[0].method, centre="origin" if zero else "init")
    extra = float((f.grad(f.z0[None]) * (f.z0 - centre.z0)).sum())
    found = gaps(f, method, rules[0].eta, ns)
    return [(float(found[rule.n]), rule.bound + extra / rule.n) for rule in rules]


def far_quadratic(distance: float) -> Problem:
    """Return the hard quadratic with ||x*|| = distance, started at distance 1 from x*."""
    f = hard_quadratic()
    shift = f.x_star * (distance - 1)
    return replace(
        f,
        value=lambda x: f.value(x - shift),
        gradient=lambda x: f.grad(x - shift),
        minimiser=f.x_star + shift,
        start=shift,
    )


def anchor_distance() -> tuple[list[Measurement], Anchor]:
    """Start at distance 1 from x* and move the origin away.

    R = 1/2 ||x* - z0||^2 is the only difference between the anchors. The gap is constant for
    z0 = initialisation and proportional to R for z0 = 0.
    """
    init, zero = (
        [pair for d in DISTANCES for pair in anchored(far_quadratic(d), [STEPS], at_zero)]
        for at_zero in (False, True)
    )
    rows = []
    for name, pairs, power in (("init", init, 0.0), ("zero", zero, 1.0)):
        exponent = checks.slope(DISTANCES, [gap for gap, _ in pairs]) / 2
        holds = abs(exponent - power) <= 0.05 and all(gap <= bound for gap, bound in pairs)
        gap, bound = pairs[-1]
        rows.append(
            Measurement(
                key=f"distance-{name}",
                result="anchor",
                problem="quadratic",
                setting=f"{ANCHORS[name]}; slope in R",
                n=STEPS,
                bound=bound,
                measured=gap,
                slope=exponent,
                promised=f"{power:g} +- 0.05",
                holds=holds,
            )
        )
    return rows, _anchor(DISTANCES, init, zero)


def anchor_ablation() -> tuple[list[Measurement], Anchor]:
    """Run logistic regression on all rows, started at the minimiser of every second row."""
    f = logistic(batch=None)
    f = f.at(logistic(batch=None, rows=slice(None, None, 2)).x_star)
    ns = [*NS, 2 * NS[-1]]
    init, zero = (anchored(f, ns, at_zero) for at_zero in (False, True))
    rows = []
    for name, pairs in (("init", init), ("zero", zero)):
        gap, bound = pairs[-1]
        rows.append(
            Measurement(
                key=f"ablation-{name}",
                result="anchor",
                problem=f.name,
                setting=ANCHORS[name],
                n=ns[-1],
                bound=bound,
                measured=gap,
                slope=None,
                promised="",
                holds=all(gap <= bound for gap, bound in pairs),
            )
        )
    return rows, _anchor(ns, init, zero)


def _anchor(
    xs: Sequence[float], init: list[tuple[float, float]], zero: list[tuple[float, float]]
) -> Anchor:
    """Return the (gap, bound) pairs of both anchors as columns."""
    columns = (list(column) for pairs in (init, zero) for column in zip(*pairs, strict=True))
    return Anchor(list(xs), *columns)
