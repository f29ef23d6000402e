"""A method: one geometry, five coefficients, one centre. Every optimizer of the paper is one."""

import math
import re
from collections.abc import Callable
from dataclasses import dataclass, field, fields, replace
from functools import cached_property, wraps
from typing import Literal, NamedTuple, ParamSpec, TypeAlias, get_args

from torch import Tensor

from sodaopt import schedules
from sodaopt._errors import number, unknown
from sodaopt._names import every_name, parse
from sodaopt.geometry import Geometry
from sodaopt.schedules import Coef, Number, Past

Centre: TypeAlias = Literal["origin", "init", "last"]
CENTRES = get_args(Centre)


class Coefs(NamedTuple):
    """The five numbers of one step."""

    alpha: Number = 1.0
    alpha_bar: Number = 0.0
    lam: Number = 1.0
    lam_bar: Number = 0.0
    gamma: Number = 0.0


@dataclass(frozen=True)
class Method:
    """An optimizer, as the slots of the template. Use `dataclasses.replace` to vary one.

        m     <- (1 - alpha) m + alpha g              dual averaging
        m_bar  = (1 - alpha_bar) m + alpha_bar g      optimism
        z      = centre + u, u = argmin_u gamma (m_bar . u) + psi(u)
        x     <- (1 - lam) x + lam z                  primal averaging
        y     <- (1 - lam_bar) x + lam_bar z          where the next gradient is taken

    geometry: the map from m_bar and gamma to u, with its regulariser psi. See `sodaopt.geometry`.
    alpha, alpha_bar, lam, lam_bar: in [0, 1], each a number or a function of (k, lr).
    gamma: the step size, at least 0, a number or a function of (k, lr).
    centre: "origin" (decoupled weight decay), "init" (the initial weights: SODA) or "last" (the
    previous z: no decay).
    full_step: z = centre + u/lam, so that y <- (1 - lam) y + lam centre + u. lam is then the
    strength of the pull alone, and may be 0.
    name: the name in groups and messages. It does not count in comparisons.

    >>> from sodaopt.geometry import Ball, Sign, unit
    >>> Method(Ball(Sign(unit)), alpha=1 - 0.9) == zoo.signum(beta=0.9)
    True
    """

    geometry: Geometry
    alpha: Coef = 1.0
    alpha_bar: Coef = 0.0
    lam: Coef = 1.0
    lam_bar: Coef = 0.0
    gamma: Coef = schedules.lr
    centre: Centre = "last"
    full_step: bool = False
    name: str = field(default="method", compare=False)

    def __post_init__(self) -> None:
        if not isinstance(self.geometry, Geometry):
            raise TypeError(
                f"a method needs a geometry such as Ball(Sign()), got {self.geometry!r}"
            )
        if self.centre not in CENTRES:
            raise ValueError(unknown("centre", self.centre, CENTRES))
        if self.full_step and (self.centre == "last" or self.lam_bar != 0):
            raise ValueError(
                f"{self.name}: full_step needs the centre 'origin' or 'init' and lam_bar = 0, got "
                f"centre {self.centre!r} and lam_bar = {self.lam_bar!r}"
            )
        for slot, c in zip(Coefs._fields, self._coefs(), strict=True):
            if not callable(c):
                _check(slot, c, self.name)
        schedules.check_memory(self._coefs())

    @cached_property
    def memory(self) -> dict[str, float]:
        """The memory of the coefficients before the first step, by name."""
        return {n: v for c in self._coefs() for n, v in schedules.start(c).items()}

    def advance(self, past: Past, k: Number, lr: Number) -> dict[str, Number]:
        """Return the memory at step k.

        past: the memory at step k-1.
        """
        return {n: v for c in self._coefs() for n, v in schedules.advance(c, past, k, lr).items()}

    def coefs(self, k: Number, lr: Number, past: Past = schedules.NO_PAST) -> Coefs:
        """Return the five numbers at step k. Raise if one is out of range.

        past: the memory at step k, for schedules that have one.
        """
        values = Coefs(*(schedules.value(c, k, lr, past) for c in self._coefs()))
        for slot, c in zip(Coefs._fields, values, strict=True):
            if not isinstance(c, Tensor):  # reading it would synchronise the device
                _check(slot, c, self.name, k, lr)
        return values

    def _coefs(self) -> list[Coef]:
        return [getattr(self, slot) for slot in Coefs._fields]

    # The properties below follow from the slots, and are for the package. The first three say which
    # tensors are stored between steps. x equals y if nothing is averaged (lam = 1) or extrapolated
    # (lam_bar = 0). z equals y if lam or lam_bar is 1.

    @cached_property
    def _keeps_m(self) -> bool:
        return self.alpha != 1

    @cached_property
    def _keeps_x(self) -> bool:
        return self.lam_bar != 0 and self.lam != 1

    @cached_property
    def _keeps_z(self) -> bool:
        return self.centre == "last" and self.lam != 1 and self.lam_bar != 1

    @cached_property
    def _counts_by_group(self) -> bool:
        """Whether k and the memory are the group's. Other methods count each parameter's steps."""
        return getattr(self.lam, "by_group", False)

    @cached_property
    def _is_one_sum(self) -> bool:
        """Whether the step is y <- (1-lam) y + lam centre + lam u, or + u if `full_step`."""
        return not (self._keeps_x or self._keeps_z)

    @cached_property
    def _adds_plain_u(self) -> bool:
        """Whether this sum adds u without a factor: gamma has the factor lam, or `full_step`."""
        return self.full_step or (self._is_one_sum and self.geometry.homogeneous)

    def _step_size(self, c: Coefs) -> Number:
        """The gamma of the map: lam * gamma if it is homogeneous and u is multiplied by lam."""
        return c.lam * c.gamma if self._adds_plain_u and not self.full_step else c.gamma

    @cached_property
    def _kernel(self) -> str | None:
        """The kernel of the geometry, if the step is one sum."""
        return self.geometry.kernel if self._is_one_sum else None

    def __repr__(self) -> str:
        """The slots as text that is the same in every process: checkpoints compare it."""
        slots = [f"{f.name}={getattr(self, f.name)!r}" for f in fields(self)[:-1]]
        return without_addresses(f"Method({self.name}: {', '.join(slots)})")


def without_addresses(text: str) -> str:
    """Leave out the addresses of objects, which differ between processes."""
    return re.sub(r"<function (.+?) at 0x[0-9a-f]+>|( at 0x[0-9a-f]+)", r"\1", text)


def _check(slot: str, c: Number, name: str, *at: Number) -> None:
    """Raise if a coefficient is out of range.

    name: the method's name.
    at: k and lr, if the coefficient is a function of them.
    """
    if type(c) in (int, float) and 0 <= c <= 1:  # nearly always, at each step
        return
    try:
        number(slot, c, math.inf if slot == "gamma" else 1)
    except (TypeError, ValueError) as e:
        where = " at k = {}, lr = {}".format(*at) if at else ""  # k and lr are read for errors only
        fix = " (with weight decay, lam is lr * weight_decay)" if slot == "lam" and at else ""
        raise type(e)(f"{name}: {e}{where}{fix}") from None


# -- methods by name ------------------------------------------------------------------------------

P = ParamSpec("P")
ROWS: dict[str, Callable[..., Method]] = {}
"""The rows of the zoo by name."""


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


def named(text: str) -> Method:
    """Return a method by its name: a row such as "muon", or "soda(muon)"."""
    name = parse(text, every_name(ROWS, ("soda",)), "method")
    method = ROWS[name.undecayed]()
    return soda(method) if name.pull else method


# -- the anchored and the decayed form of a method ------------------------------------------------


def soda(method: Method, decay: Coef = schedules.uniform) -> Method:
    """Return the anchored form of a method, with u the method's own step:

        y <- (1 - 1/(k+2)) y + 1/(k+2) z0 + u          (paper, Algorithm 1)

    >>> zoo.soda(zoo.adam(), decay=schedules.coupled()).centre
    'init'

    SODAWrapper around the method does the same if no gradient is missing. SODA counts the steps k
    of each parameter, and the wrapper those of each group.

    decay: strength of the pull in place of 1/(k+2), in [0, 1], such as schedules.coupled(uniform),
    schedules.fade(uniform, 900, 1000) or schedules.after(uniform, 100).
    """
    name = f"soda({check_plain(method, 'soda').name})"
    return replace(method, lam=decay, centre="init", full_step=True, name=name)


def decayed(method: Method, weight_decay: float) -> Method:
    """Add decoupled weight decay to a method: y <- (1 - lr wd) y + u.

    >>> zoo.decayed(zoo.lion(), 0.1) == zoo.lion(weight_decay=0.1)
    True
    """
    if number("weight_decay", weight_decay) == 0:
        return method
    lam = schedules.times(weight_decay, schedules.lr)
    return replace(check_plain(method, "decayed"), lam=lam, centre="origin", full_step=True)


def check_plain(method: Method, who: str) -> Method:
    """Return the method if its step is y <- y + u, else raise.

    who: the function that adds a centre or an average to the method.
    """
    if not isinstance(method, Method):
        raise TypeError(f"{who} takes a Method such as zoo.adam(), got {method!r}")
    if (method.centre, method.lam, method.lam_bar) != ("last", 1, 0):
        raise ValueError(
            f"{who} takes a method without decay or averaging of its own, and {method.name} has "
            f"centre {method.centre!r} and lam_bar {method.lam_bar}. If it decays, pass "
            "weight_decay=0, or uscion for scion. If it is anchored already, use it as it is. If "
            "it averages, pass the method inside it."
        )
    return method
