"""The paper's coefficients for any weights a_k > 0, with the sums A_k = a_0 + ... + a_k.

`zoo.moda` has their closed forms for a_k = 1, and `zoo.accelerated` for a_k = k+1.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from sodaopt.core.method import Method
from sodaopt.geometry import Geometry
from sodaopt.schedules import NO_PAST, Number, Past, Schedule


@dataclass(frozen=True)
class _Weighted(Schedule):
    """A coefficient that remembers the sum A_k."""

    a: Callable[[Number], Number]

    def start(self) -> dict[str, float]:
        return {"A": 0.0}

    def advance(self, past: Past, k: Number, lr: Number) -> dict[str, Number]:
        return {"A": past["A"] + self.a(k)}


class _Now(_Weighted):
    """a_k / A_k."""

    def __call__(self, k: Number, lr: Number, past: Past = NO_PAST) -> Number:
        return self.a(k) / past["A"]


class _Next(_Weighted):
    """a_{k+1} / A_{k+1}."""

    def __call__(self, k: Number, lr: Number, past: Past = NO_PAST) -> Number:
        return self.a(k + 1) / (past["A"] + self.a(k + 1))


class _Total(_Weighted):
    """lr A_{k+1}, which is lr A_k / (1 - a_{k+1}/A_{k+1})."""

    def __call__(self, k: Number, lr: Number, past: Past = NO_PAST) -> Number:
        return lr * (past["A"] + self.a(k + 1))


class Coefficients(NamedTuple):
    """The coefficients of the weights a_k.

    now: a_k/A_k, for alpha.
    next: a_{k+1}/A_{k+1}, for alpha_bar and lam.
    total: lr A_{k+1}, for gamma.
    """

    now: Schedule
    next: Schedule
    total: Schedule


def weights(a: Callable[[Number], Number]) -> Coefficients:
    """Return the coefficients of the weights.

    a: a function k -> a_k > 0.
    """
    return Coefficients(_Now(a), _Next(a), _Total(a))


def moda(geometry: Geometry, a: Callable[[Number], Number]) -> Method:
    """Return `zoo.moda` with the weights a.

    >>> moda(zoo.GD, lambda k: k + 1).coefs(0, 0.1, {"A": 1.0}).alpha_bar == 2 / 3
    True
    """
    w = weights(a)
    return Method(geometry, w.now, w.next, w.next, 0.0, w.total, "init", name="moda")
