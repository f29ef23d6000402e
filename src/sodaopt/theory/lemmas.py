"""Check the identities and lemmas on every problem and regulariser.

Each check runs with the weights a_k = 1 and a_k = k+1, and with lam_bar = 0, lam/10 and 1.

E1, E2 and E3 must hold up to 1e-12. The regret bound and the online-to-batch lemmas are checked on
every run. The noise constants (rho, sigma) of the corollaries are checked in the mean.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from sodaopt import schedules, zoo
from sodaopt.core.method import Method
from sodaopt.geometry import Clip, Geometry, Sharp, Sign, Spectral, unit
from sodaopt.geometry.polar import EXACT

from . import checks, rates
from .bounds import Constants, constants, equal_weights, linear_weights
from .checks import Check
from .experiments import (
    SIGN_BALL,
    SPECTRAL_BALL,
    Measurement,
    box_noisy,
    near_l1,
    quadratic_metric,
    quadratic_noisy,
    spectral_noisy,
)
from .models import l1_regression, least_absolute, logistic
from .problems import Problem
from .rates import Rule
from .regularisers import Smoothed, clip, regulariser
from .runs import Weights, trace

N = 64
LAM_BARS = ("0", "lam/10", "1")


@dataclass(frozen=True)
class Setting:
    """A problem with a geometry and the name of its regulariser."""

    label: str
    problem: Callable[[], Problem]
    geometry: Callable[[Problem], Geometry]


SETTINGS = [
    Setting("Euclidean", quadratic_noisy, lambda f: zoo.GD),
    Setting("Euclidean", least_absolute, lambda f: zoo.GD),
    Setting("Euclidean", logistic, lambda f: zoo.GD),
    Setting("Euclidean clip", quadratic_noisy, lambda f: clip(1.0)),
    Setting("fixed metric", quadratic_noisy, quadratic_metric),
    Setting("1/2||.||_p^2", quadratic_noisy, near_l1),
    Setting("1/2||.||_p^2", l1_regression, near_l1),
    Setting("sign ball, smoothed", box_noisy, lambda f: SIGN_BALL),
    Setting("sign sharp, smoothed", quadratic_noisy, lambda f: Smoothed(Sharp(Sign(unit)), 0.5)),
    Setting("spectral ball, smoothed", spectral_noisy, lambda f: SPECTRAL_BALL),
    Setting(
        "spectral clip, smoothed",
        spectral_noisy,
        lambda f: Smoothed(Clip(Spectral(unit, polar=EXACT)), 0.5),
    ),
]


def with_lam_bar(method: Method, lam_bar: str) -> Method:
    """Return the method with this lam_bar, one of LAM_BARS."""
    if lam_bar == "lam/10":
        return replace(method, lam_bar=schedules.times(0.1, method.lam))
    return replace(method, lam_bar=float(lam_bar))


def rule_for(f: Problem, geometry: Geometry, a: Weights, n: int) -> tuple[Rule, Constants]:
    """Return the smooth rule if the problem has an L, else the one for bounded gradients."""
    if f.L is None:
        c = constants(f, geometry, "G")
        return rates.bounded(n, c, geometry, a=a), c
    c = constants(f, geometry, "L")
    rate = rates.smooth if a is equal_weights else rates.accelerated
    return rate(n, c, geometry), c


def examine(setting: Setting, n: int = N, replicas: int = 8) -> Iterator[Check]:
    """Yield every check that applies, for both weights and every lam_bar."""
    f = setting.problem()
    geometry = setting.geometry(f)
    h = regulariser(geometry)
    for a in (equal_weights, linear_weights):
        rule, c = rule_for(f, geometry, a, n)
        for lam_bar in LAM_BARS:
            method = with_lam_bar(rule.method, lam_bar)
            t = trace(method, rule.eta, n, f.z0, f.oracle(), a, replicas)
            yield from (checks.e1(t), checks.e2(t), checks.online_to_batch(t, f))
            yield checks.regret(t, h, f.x_star)
            if geometry == zoo.GD:
                yield checks.e3(t, f.x_star)
            if f.L is not None and lam_bar != "1":
                yield checks.online_to_batch_smooth(t, f, h.space)
            if f.L is not None:
                yield checks.gradient_variation(t, f, c, h.space)


def measure(setting: Setting) -> list[Measurement]:
    """Return the worst result of each check."""
    f = setting.problem()
    worst: dict[str, Check] = {}
    for check in examine(setting):
        seen = worst.get(check.name)
        if seen is None or not check.ratio <= seen.ratio:  # a NaN is the worst
            worst[check.name] = check
    return [
        Measurement(
            key=name,
            result=name,
            problem=f.name,
            setting=setting.label,
            n=N,
            bound=check.limit,
            measured=check.measured,
            slope=None,
            promised="",
            holds=check.holds,
        )
        for name, check in worst.items()
    ]
