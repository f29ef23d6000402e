"""Register rows, and derive the anchored and the decayed form of a method."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import wraps
from typing import ParamSpec

from sodaopt import schedules
from sodaopt._errors import number
from sodaopt.core.method import FORMS, ROWS, Method
from sodaopt.schedules import Coef, times, uniform

P = ParamSpec("P")


def row(f: Callable[P, Method]) -> Callable[P, Method]:
    """Register a function that returns a method as a row of the zoo, under its own name.

    f: the function. Its arguments have defaults, so that SODA(method="name") can call it.

    >>> @zoo.row
    ... def gentle(momentum: float = 0.5) -> Method:
    ...     return zoo.sgd(momentum)
    >>> SODA(model.parameters(), lr=0.1, method="gentle").methods["gentle"] == zoo.sgd(0.5)
    True
    """

    @wraps(f)
    def named(*args: P.args, **kwargs: P.kwargs) -> Method:
        return replace(f(*args, **kwargs), name=f.__name__)

    ROWS[f.__name__] = named
    return named


def soda(method: Method, decay: Coef = uniform) -> Method:
    """Return the anchored form of a method, with u the method's own step:

        y <- (1 - 1/(k+2)) y + 1/(k+2) z0 + u          (paper, Algorithm 1)

    >>> zoo.soda(zoo.adam(), decay=schedules.coupled()).centre
    'init'

    SODAWrapper around the method does the same if no gradient is missing: a row counts the steps k
    of each parameter, and the wrapper those of a group.

    decay: strength of the pull in place of 1/(k+2), in [0, 1], such as schedules.coupled(uniform),
    schedules.fade(uniform, 900, 1000) or schedules.after(uniform, 100).
    """
    name = f"soda({check_plain(method, 'soda').name})"
    return replace(method, lam=decay, centre="init", full_step=True, name=name)


FORMS["soda"] = soda


def decayed(method: Method, weight_decay: float) -> Method:
    """Add decoupled weight decay to a method: y <- (1 - lr wd) y + u.

    >>> zoo.decayed(zoo.lion(), 0.1) == zoo.lion(weight_decay=0.1)
    True
    """
    if number("weight_decay", weight_decay) == 0:
        return method
    lam = times(weight_decay, schedules.lr)
    return replace(check_plain(method, "decayed"), lam=lam, centre="origin", full_step=True)


WAYS_OUT = {  # by the centre of a method that is not plain
    "origin": "Pass weight_decay=0, or use uscion for scion.",
    "init": "It is anchored already: use it as it is.",
    "last": "It averages: pass the method inside it.",
}


def check_plain(method: Method, who: str) -> Method:
    """Return the method if its step is y <- y + u, else raise: `who` adds its own centre or x."""
    if not isinstance(method, Method):
        raise TypeError(f"{who} takes a Method such as zoo.adam(), got {method!r}")
    if (method.centre, method.lam, method.lam_bar) != ("last", 1, 0):
        raise ValueError(
            f"{who} takes a method without decay or averaging of its own, and {method.name} has "
            f"centre {method.centre!r}. {WAYS_OUT[method.centre]}"
        )
    return method
