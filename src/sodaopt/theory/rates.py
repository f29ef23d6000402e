"""The paper's rates as rules: a method, its step size eta, and the bound that holds for them.

    rule = rates.smooth(1000, Constants(R=0.5, L=4.0))
    optimizer = SODA(params, lr=rule.eta, method=rule.method)      # then 999 steps

n counts gradients. A run has n - 1 steps and the output x^{n-1}, so N calls of step() mean
n = N + 1.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TypeAlias

from sodaopt import schedules, zoo
from sodaopt.core.method import Method
from sodaopt.geometry import Geometry
from sodaopt.schedules import Coef

from . import bounds
from .bounds import Constants, equal_weights, linear_weights
from .regularisers import regulariser
from .runs import Weights
from .weights import moda


@dataclass(frozen=True)
class Rule:
    """E f(x^{n-1}) - f* <= bound after n - 1 steps of `method` with lr = eta and the weights a."""

    method: Method
    eta: float
    n: int
    bound: float
    a: Weights


Rate: TypeAlias = Callable[..., Rule]


def method_of(a: Weights, geometry: Geometry = zoo.GD) -> Method:
    """Return the method of these weights.

    alpha = a_k/A_k, alpha_bar = lam = a_{k+1}/A_{k+1}, gamma = eta A_{k+1}, lam_bar = 0.
    """
    if a is equal_weights:
        return zoo.moda(geometry)
    if a is linear_weights:
        return zoo.accelerated(geometry)
    return moda(geometry, a)


def bounded(
    n: int,
    c: Constants,
    geometry: Geometry = zoo.GD,
    *,
    lam_bar: Coef = 0.0,
    a: Weights = equal_weights,
) -> Rule:
    """Return the rule for ||g^k||_* <= G.

    With a_k = 1, eta = sqrt(mu R)/(sqrt(2) G sqrt(n)) and the bound is
    2 sqrt(2) G sqrt(R)/sqrt(mu n). With other weights, eta = sqrt(mu R/(2 sum a_k^2))/G minimises
    the bound.

    lam_bar: any number or schedule with values in [0, 1]
    """
    _check(n, geometry)
    eta = math.sqrt(c.mu * c.need("R") / (2 * bounds.sums(n, a)[1])) / c.need("G")
    method = replace(method_of(a, geometry), lam_bar=lam_bar)
    return Rule(method, eta, n, bounds.bounded_gradients(eta, n, c, a), a)


def smooth(n: int, c: Constants, geometry: Geometry = zoo.GD, *, share: float = 0.0) -> Rule:
    """Return the rule for an L-smooth f with a_k = 1.

    eta = min(mu/(6 rho L), sqrt(mu R)/(sigma sqrt(n))), and the bound is
    R/(eta n) + eta sigma^2/(2 mu) + eta rho/(2 mu n) 2 L^2 R/mu.

    share: lam_bar/lam, in [0, 0.1]
    """
    _check(n, geometry)
    eta = min(c.mu / (6 * c.rho * c.need("L")), _noise_limited(c, n))
    return _smooth_rule(equal_weights, eta, n, c, geometry, share)


def accelerated(n: int, c: Constants, geometry: Geometry = zoo.GD, *, share: float = 0.0) -> Rule:
    """Return the rule for an L-smooth f with a_k = k+1.

    eta = min(mu/(12 rho L), sqrt(mu R)/(sigma n^1.5)), and with A = n(n+1)/2 the bound is
    R/(eta A) + eta sigma^2 (2n+1)/(6 mu) + eta rho L^2 R/(mu^2 A).

    share: lam_bar/lam, in [0, 0.1]
    """
    _check(n, geometry)
    eta = min(c.mu / (12 * c.rho * c.need("L")), _noise_limited(c, n**3))
    return _smooth_rule(linear_weights, eta, n, c, geometry, share)


def _noise_limited(c: Constants, n: int) -> float:
    return math.sqrt(c.mu * c.need("R") / n) / c.sigma if c.sigma else math.inf


def _smooth_rule(
    a: Weights, eta: float, n: int, c: Constants, geometry: Geometry, share: float
) -> Rule:
    """Return the rule with lam_bar = share lam. The proof needs lam_bar <= lam/10."""
    if not 0 <= share <= 0.1:
        raise ValueError(
            f"the smooth rates need lam_bar <= lam/10, got lam_bar = {share} lam. "
            "Use share <= 0.1, or rates.bounded, which takes any lam_bar in [0, 1]."
        )
    method = method_of(a, geometry)
    if share:
        method = replace(method, lam_bar=schedules.times(share, method.lam))
    return Rule(method, eta, n, bounds.smooth(eta, n, c, a), a)


def _check(n: int, geometry: Geometry) -> None:
    if n < 1:
        raise ValueError(f"n counts gradients and must be at least 1, got {n}")
    regulariser(geometry)  # raises an error if the geometry is not strongly convex
