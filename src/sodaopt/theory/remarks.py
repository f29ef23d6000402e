"""Two remarks of the paper made visible: optimism needs averaging, and an anchor costs its R."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from sodaopt import zoo
from sodaopt.core.method import Method
from sodaopt.schedules import Number

from . import checks, rates
from .bounds import constants
from .experiments import Curve, Measurement
from .models import logistic
from .problems import Problem, hard_quadratic
from .runs import gaps

NS = [2**j for j in range(3, 10)]

# -- optimism and averaging in tandem -------------------------------------------------------------

ETAS = [2.0**j for j in range(-4, 4)]  # times 1/L
FLAT, STEEP = (-1.15, -0.85), (-math.inf, -2.0)


@dataclass(frozen=True)
class Variant:
    """One way of spending optimism and averaging, and the slope to expect of it."""

    key: str
    label: str
    method: Method
    slope: tuple[float, float] | None
    promised: str


def _no_look_ahead(k: Number, lr: Number) -> Number:
    """eta A_k for a_k = k+1, which goes with alpha_bar = 0."""
    return lr * (k + 1) * (k + 2) / 2


def variants() -> list[Variant]:
    """Dual averaging from z0 with optimism and averaging switched on one by one; lam = 1 is no
    averaging. ODA averages its output only. The last line has no theorem and is only measured."""
    both = zoo.accelerated()
    averaging = replace(both, alpha_bar=0.0, gamma=_no_look_ahead)
    return [
        Variant("tandem", "in tandem, a = k+1", both, STEEP, "<= -2"),
        Variant("tandem-uniform", "in tandem, a = 1", zoo.moda(), FLAT, "-1 +- 0.15"),
        Variant("tandem-oda", "optimism, ODA, a = 1", zoo.oda(), FLAT, "-1 +- 0.15"),
        Variant(
            "optimism", "optimism alone, a = 1", replace(zoo.moda(), lam=1.0), FLAT, "-1 +- 0.15"
        ),
        Variant(
            "optimism-linear", "optimism alone, a = k+1", replace(both, lam=1.0), None, "diverges"
        ),
        Variant("descent", "gradient descent", zoo.sgd(), FLAT, "-1 +- 0.15"),
        Variant("averaging", "averaging alone, a = k+1", averaging, None, ""),
    ]


def tandem(ns: Sequence[int] = NS) -> tuple[list[Measurement], list[Curve]]:
    """Each variant on the hard quadratic with its best step size of ETAS/L."""
    rows, curves = [], []
    for variant in variants():
        eta, found = tuned(hard_quadratic(), variant.method, ETAS, ns)
        late = [n for n in found if n >= 16]
        diverged = max(found) < max(ns)
        slope = math.inf if diverged else checks.slope(late, [found[n] for n in late])
        holds = diverged == (variant.promised == "diverges")
        holds = holds and (variant.slope is None or variant.slope[0] <= slope <= variant.slope[1])
        last = math.inf if diverged else found[max(ns)]
        setting = f"{variant.label}; {eta:g}/L"
        rows.append(
            Measurement(variant.key, "tandem", "quadratic", setting, max(ns), math.nan, last, slope,
                variant.promised, holds)
        )  # fmt: skip
        gap = list(found.values())
        curves.append(Curve(variant.label, list(found), gap, gap, []))
    return rows, curves


def tuned(
    f: Problem, method: Method, etas: Sequence[float], ns: Sequence[int], replicas: int = 1
) -> tuple[float, dict[int, float]]:
    """The step size with the smallest mean gap at the largest n, and its gaps at all of ns.

    A run ends where its gap is a thousand times what it started from; if all do, the longest.
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
    """Gaps and bounds against a distance, or against n, for z0 = initialisation and z0 = 0."""

    xs: list[float]
    init: list[float]
    init_bound: list[float]
    zero: list[float]
    zero_bound: list[float]


def anchored(f: Problem, ns: Sequence[int], zero: bool) -> list[tuple[float, float]]:
    """Gap and bound at each n of the smooth rate started at f.z0, anchored there or at the origin.

    With x0 != z0 the first term of the sum is <g^0, x0 - x*>, not <g^0, z0 - x*>: the bound gains
    <g^0, x0 - z0>/n.
    """
    centre = f.at(torch.zeros_like(f.z0)) if zero else f
    rules = [rates.smooth(n, constants(centre, zoo.GD, "L")) for n in ns]
    method = replace(rules[0].method, centre="origin" if zero else "init")
    extra = float((f.grad(f.z0[None]) * (f.z0 - centre.z0)).sum())
    found = gaps(f, method, rules[0].eta, ns)
    return [(float(found[rule.n]), rule.bound + extra / rule.n) for rule in rules]


def far_quadratic(distance: float) -> Problem:
    """The hard quadratic with ||x*|| = distance, started at distance 1 from x*."""
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
    """The same start at distance 1 from x*, and the origin further and further away.

    R = 1/2 ||x* - z0||^2 alone tells the two anchors apart: one gap stays, one grows as R.
    """
    init, zero = (
        [pair for d in DISTANCES for pair in anchored(far_quadratic(d), [STEPS], at_zero)]
        for at_zero in (False, True)
    )
    rows = []
    for name, pairs, power in (("init", init, 0.0), ("zero", zero, 1.0)):
        grows = checks.slope(DISTANCES, [gap for gap, _ in pairs]) / 2
        holds = abs(grows - power) <= 0.05 and all(gap <= bound for gap, bound in pairs)
        setting = f"{ANCHORS[name]}; slope in R"
        gap, bound = pairs[-1]
        promised = f"{power:g} +- 0.05"
        key = f"distance-{name}"
        rows.append(
            Measurement(
                key, "anchor", "quadratic", setting, STEPS, bound, gap, grows, promised, holds
            )
        )
    return rows, _anchor(DISTANCES, init, zero)


def anchor_ablation() -> tuple[list[Measurement], Anchor]:
    """Logistic regression on all rows, started at the minimiser of every other row."""
    f = logistic(batch=None)
    f = f.at(logistic(batch=None, rows=slice(None, None, 2)).x_star)
    init, zero = (anchored(f, [*NS, 2 * NS[-1]], at_zero) for at_zero in (False, True))
    rows = []
    for name, pairs in (("init", init), ("zero", zero)):
        gap, bound = pairs[-1]
        holds, key = all(gap <= bound for gap, bound in pairs), f"ablation-{name}"
        setting = ANCHORS[name]
        rows.append(
            Measurement(key, "anchor", f.name, setting, 2 * NS[-1], bound, gap, None, "", holds)
        )
    return rows, _anchor([*NS, 2 * NS[-1]], init, zero)


def _anchor(xs: Sequence[float], *variants: list[tuple[float, float]]) -> Anchor:
    """(gap, bound) pairs of both anchors, as columns."""
    return Anchor(
        list(xs), *(list(column) for pairs in variants for column in zip(*pairs, strict=True))
    )
