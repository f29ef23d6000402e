"""Wrong versions of the method, each with an easy mistake, and the checks that detect them.

The mutants test the checks: a check that every mutant passes detects nothing.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

from sodaopt import schedules, zoo
from sodaopt.schedules import Number, over, times

from . import checks, rates
from .bounds import constants
from .checks import Check
from .models import least_absolute
from .problems import Problem, hard_quadratic
from .rates import Rate, Rule
from .regularisers import regulariser
from .runs import gaps, trace

Change: TypeAlias = Callable[[Callable[[int], Rule], int], Rule]


@dataclass(frozen=True)
class Mutant:
    """A rule with a mistake.

    change: (rule, n) -> the wrong rule for n gradients
    caught: the name of a check that fails, None if every check passes
    """

    name: str
    change: Change
    caught: str | None
    rate: Rate = rates.smooth


def _with(**coefficients: Any) -> Change:
    """Return a change that replaces coefficients of the method."""

    def change(rule: Callable[[int], Rule], n: int) -> Rule:
        right = rule(n)
        return replace(right, method=replace(right.method, **coefficients))

    return change


def _steps(rule: Callable[[int], Rule], n: int) -> Rule:
    """Return the rule with the eta of n - 1 gradients, which counts steps instead of gradients."""
    return replace(rule(n), eta=rule(n - 1).eta)


def _five_times(lam: Callable[[Number, Number], Number]) -> Callable[[Number, Number], Number]:
    """Return the schedule min(1, 5 lam)."""
    return lambda k, lr: min(1.0, 5 * lam(k, lr))


ETA_K1 = over(schedules.lr, schedules.mean)  # eta (k+1)
ETA_K2 = over(schedules.lr, schedules.uniform)  # eta (k+2)
FAR = _with(lam_bar=_five_times(schedules.uniform))
FAR_AHEAD = _with(lam_bar=_five_times(schedules.accelerated))

MUTANTS = [
    Mutant("unchanged, smooth", _with(), None),
    Mutant("unchanged, bounded gradients", _with(), None, rates.bounded),
    Mutant("unchanged, accelerated", _with(), None, rates.accelerated),
    Mutant("alpha_bar = 0", _with(alpha_bar=0.0), "E1"),
    Mutant("alpha_bar one index off, 1/(k+1)", _with(alpha_bar=schedules.mean), "E1"),
    Mutant("gamma = eta (k+1)", _with(gamma=ETA_K1), "E1"),
    Mutant("gamma three times too large", _with(gamma=times(3, ETA_K2)), "E1"),
    Mutant("alpha = 1/(k+2)", _with(alpha=schedules.uniform), "E1"),
    Mutant("lambda = 1/2", _with(lam=0.5), "E2"),
    Mutant("n = steps, not steps + 1", _steps, "counting", rates.bounded),
    Mutant("lambda_bar = 5 lambda, smooth", FAR, None),
    Mutant("lambda_bar = 5 lambda, accelerated", FAR_AHEAD, "corollary", rates.accelerated),
]


def examine(mutant: Mutant, n: int = 48, replicas: int = 16) -> dict[str, Check]:
    """Return the results of all checks on one mutant, by name.

    The identities and the lemmas are checked on a noisy run of n gradients. The corollary is
    checked on a run of 8 n gradients, which has no noise if the rate is for smooth problems.
    """
    noisy, exact, name = _problems(mutant.rate)
    h, c = regulariser(zoo.GD), constants(noisy, zoo.GD, name)
    wrong = mutant.change(lambda n: mutant.rate(n, c), n)
    t = trace(wrong.method, wrong.eta, n, noisy.z0, noisy.oracle(), wrong.a, replicas)
    x = noisy.x_star
    found = [checks.e1(t), checks.e2(t), checks.e3(t, x), checks.regret(t, h, x)]
    found.append(checks.online_to_batch(t, exact))
    if mutant.rate is rates.bounded:
        found.append(checks.counting(t, c))
    found.append(_corollary(mutant, exact, name, 8 * n, replicas))
    return {check.name: check for check in found}


def _problems(rate: Rate) -> tuple[Problem, Problem, str]:
    """Return a noisy problem, the problem of the corollary, and the constant for the rate."""
    if rate is rates.bounded:
        return least_absolute(), least_absolute(), "G"
    return hard_quadratic().noisy(0.3), hard_quadratic(), "L"


def _corollary(mutant: Mutant, f: Problem, name: str, n: int, replicas: int) -> Check:
    c = constants(f, zoo.GD, name)
    wrong = mutant.change(lambda n: mutant.rate(n, c), n)
    gap = gaps(f, wrong.method, wrong.eta, [n], replicas=replicas if f.stochastic else 1)[n]
    return checks.corollary(gap, mutant.rate(n, c).bound)
