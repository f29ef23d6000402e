"""Compare common methods on the same problems, each with its best learning rate of one grid.

All of them are `Method`s of the library, so the same optimizer class runs them.
"""

from collections.abc import Callable
from dataclasses import dataclass

from sodaopt import zoo
from sodaopt.core.method import Method
from sodaopt.schedules import Number

from .bounds import equal_weights, linear_weights
from .experiments import quadratic_noisy
from .lemmas import rule_for
from .models import least_absolute, logistic
from .problems import Problem, hard_quadratic
from .remarks import tuned
from .runs import gaps

GRID = [4.0**j for j in range(-7, 3)]
NS = [2**j for j in range(3, 9)]
REPLICAS = 8


def accelerated_gradient() -> Method:
    """Return Nesterov's accelerated gradient (1983) as a method. The parameters hold y.

        x+ = y - lr g
        y  = x+ + k/(k+3) (x+ - x)

    The velocity b <- (k-1)/(k+2) b + g has the mass (k+3)/4. Therefore m = b/mass is an average
    with alpha = 4/(k+3) (1 at the start). The step of y is -lr (g + k/(k+3) b), which equals
    -lr (k+4)/4 m_bar with alpha_bar = 4/(k+4).
    """

    def alpha(k: Number, lr: Number) -> Number:
        return min(1.0, 4 / (k + 3))

    def alpha_bar(k: Number, lr: Number) -> Number:
        return 4 / (k + 4)

    def gamma(k: Number, lr: Number) -> Number:
        return lr * (k + 4) / 4

    return Method(zoo.GD, alpha, alpha_bar, gamma=gamma, name="accelerated_gradient")


METHODS: dict[str, Callable[[], Method]] = {
    "SGD": zoo.sgd,
    "Adam": zoo.adam,
    "Schedule-Free SGD": zoo.schedule_free,
    "Nesterov": accelerated_gradient,
    "dual averaging": zoo.dual_averaging,
    "SODA, a = 1": zoo.moda,
    "SODA, a = k+1": zoo.accelerated,
}

PROBLEMS: dict[str, Callable[[], Problem]] = {
    "quadratic": hard_quadratic,
    "quadratic, noisy": quadratic_noisy,
    "logistic": logistic,
    "absolute": least_absolute,
}


@dataclass(frozen=True)
class Result:
    """The mean gaps of a method on a problem, by the number of gradients.

    lr: the learning rate with the smallest gap at the end
    edge: whether lr is the first or the last one of the grid
    """

    problem: str
    method: str
    lr: float
    edge: bool
    ns: list[int]
    gap: list[float]


def compare(problem: str, method: str) -> Result:
    """Return the result of a method with its best learning rate of the grid, by the last gap."""
    f = PROBLEMS[problem]()
    replicas = REPLICAS if f.stochastic else 1
    lr, found = tuned(f, METHODS[method](), GRID, NS, replicas)
    edge = lr in (GRID[0], GRID[-1])
    return Result(problem, method, lr, edge, list(found), list(found.values()))


def untuned(problem: str) -> list[Result]:
    """Return the results of SODA with a = 1 and a = k+1, and the theory's lr for the largest n."""
    f, n, out = PROBLEMS[problem](), NS[-1], []
    replicas = REPLICAS if f.stochastic else 1
    for a, name in (
        (equal_weights, "SODA, a = 1, theory's lr"),
        (linear_weights, "SODA, a = k+1, theory's lr"),
    ):
        rule, _ = rule_for(f, zoo.GD, a, n)
        found = gaps(f, rule.method, rule.eta, NS, replicas=replicas)
        gap = [float(g.mean()) for g in found.values()]
        out.append(Result(problem, name, rule.eta, False, list(found), gap))
    return out
