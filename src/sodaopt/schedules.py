"""Coefficients: a number, or a function of the step k = 0, 1, 2, ... and the learning rate lr.

No function here branches on the value of k or lr, so they may be Python numbers or 0-D tensors.
Schedules with parameters are frozen dataclasses: they print, compare, copy and pickle. Their names
are in lower case because they are used as functions: `schedules.debias(0.9)`.

A schedule that depends on the past, such as a running sum, declares a memory, which is a dict of
numbers. `start()` returns it before the first step, and `advance()` returns it one step later. The
optimizer keeps it in its state.

k: the number of steps before this one.
lr: the learning rate of this step.
a, b, c: coefficients with the values a_k, b_k, c_k at step k, unless a line below says otherwise.
past: the memory by name, for schedules that have one.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from types import MappingProxyType
from typing import Any, ClassVar, TypeAlias

import torch

__all__ = [
    "NO_PAST", "Coef", "Number", "Past", "Schedule", "accelerated", "advance", "after", "coupled",
    "debias", "fade", "first", "log_time", "lr", "lr_weighted", "mean", "over", "start", "times",
    "uniform", "value",
]  # fmt: skip

Number: TypeAlias = Any
"""An int, a float or a 0-D tensor."""
Coef: TypeAlias = float | Callable[[Number, Number], Number]
"""A number, or a function of (k, lr)."""
Past: TypeAlias = Mapping[str, Number]
"""A coefficient's memory, by name."""

NO_PAST: Past = MappingProxyType({})
"""The memory of a coefficient that has none."""


def value(c: Coef, k: Number, lr: Number, past: Past = NO_PAST) -> Number:
    """Evaluate the coefficient at step k. A number is its own value at every step.

    >>> schedules.value(0.3, k=5, lr=0.1), schedules.value(schedules.uniform, k=0, lr=0.1)
    (0.3, 0.5)
    """
    if isinstance(c, Schedule):
        return c(k, lr, past)
    return c(k, lr) if callable(c) else c


def start(c: Coef) -> dict[str, float]:
    """Return the coefficient's memory before the first step.

    >>> schedules.start(schedules.uniform)
    {}
    """
    return c.start() if isinstance(c, Schedule) else {}


def advance(c: Coef, past: Past, k: Number, lr: Number) -> dict[str, Number]:
    """Return the coefficient's memory at step k. Called once a step, before `value`.

    >>> c = schedules.coupled()
    >>> past = schedules.advance(c, schedules.start(c), k=0, lr=0.1)
    >>> schedules.value(c, 1, 0.05, schedules.advance(c, past, k=1, lr=0.05)) == 0.5 / 3
    True
    """
    return c.advance(past, k, lr) if isinstance(c, Schedule) else {}


def check_memory(parts: list[Coef]) -> None:
    """Raise ValueError if two coefficients keep different numbers under one name in trial steps.

    parts: the coefficients that share a memory.
    """
    pasts: list[Past] = [start(c) for c in parts]
    for k, rate in enumerate((1.0, 0.5, 2.0)):
        pasts = [advance(c, past, k, rate) for c, past in zip(parts, pasts, strict=True)]
        seen: dict[str, Number] = {}
        for name, v in (item for past in pasts for item in past.items()):
            if seen.setdefault(name, v) != v:
                raise ValueError(f"{parts} keep different numbers under {name!r}: rename one")


class Schedule:
    """A coefficient made of other coefficients, or with a memory.

    Its parts are the fields of the dataclass, and its memory is the memory of its parts. Parts that
    use the same name share the number. A class with a memory of its own overrides `start` and
    `advance`.

    >>> schedules.over(1, schedules.uniform)(3, 0.1)
    5.0
    """

    def __post_init__(self) -> None:
        check_memory(self._parts())

    def start(self) -> dict[str, float]:
        return {name: v for c in self._parts() for name, v in start(c).items()}

    def advance(self, past: Past, k: Number, lr: Number) -> dict[str, Number]:
        return {name: v for c in self._parts() for name, v in advance(c, past, k, lr).items()}

    def _parts(self) -> list[Coef]:
        return [getattr(self, f.name) for f in fields(self)]  # type: ignore[arg-type]

    def __call__(self, k: Number, lr: Number, past: Past = NO_PAST) -> Number:
        raise NotImplementedError


# -- functions of k and lr ------------------------------------------------------------------------


def lr(k: Number, lr: Number) -> Number:
    """The learning rate itself.

    >>> schedules.lr(3, 0.1)
    0.1
    """
    return lr


def uniform(k: Number, lr: Number) -> Number:
    """1/(k+2): as lam, it makes x the plain mean of z0, z1, ... It is the paper's pull.

    >>> schedules.uniform(0, 0.1), schedules.uniform(8, 0.1)
    (0.5, 0.1)
    """
    return 1 / (k + 2)


def mean(k: Number, lr: Number) -> Number:
    """1/(k+1): as alpha, it makes m the plain mean of the gradients so far.

    >>> schedules.mean(3, 0.1)
    0.25
    """
    return 1 / (k + 1)


def accelerated(k: Number, lr: Number) -> Number:
    """2/(k+3): the rate of an average with the weights a_k = k+1. The paper's accelerated rate.

    >>> schedules.accelerated(1, 0.1)
    0.5
    """
    return 2 / (k + 3)


# -- combinations ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class times(Schedule):
    """a_k b_k.

    >>> schedules.times(2, schedules.lr)(0, 0.1)
    0.2
    """

    a: Coef
    b: Coef

    def __call__(self, k: Number, lr: Number, past: Past = NO_PAST) -> Number:
        return value(self.a, k, lr, past) * value(self.b, k, lr, past)


@dataclass(frozen=True)
class over(Schedule):
    """a_k / b_k.

    >>> schedules.over(schedules.lr, 2)(0, 0.1)
    0.05
    """

    a: Coef
    b: Coef

    def __call__(self, k: Number, lr: Number, past: Past = NO_PAST) -> Number:
        return value(self.a, k, lr, past) / value(self.b, k, lr, past)


@dataclass(frozen=True)
class first(Schedule):
    """1 at k = 0, then c_k: an average that starts at its first sample.

    >>> schedules.first(0.05)(0, 0.1), schedules.first(0.05)(1, 0.1)
    (1.0, 0.05)
    """

    c: Coef

    def __call__(self, k: Number, lr: Number, past: Past = NO_PAST) -> Number:
        c = value(self.c, k, lr, past)
        return c + (1 - c) * (k == 0)


@dataclass(frozen=True)
class after(Schedule):
    """0 if k < start_at, else c_k. c does not restart: its k counts from the first step of the run.

    start_at: the first step with c_k, at least 0.

    >>> late = schedules.after(schedules.uniform, 100)
    >>> late(99, 0.1), late(100, 0.1) == 1 / 102
    (0.0, True)
    """

    c: Coef
    start_at: int

    def __call__(self, k: Number, lr: Number, past: Past = NO_PAST) -> Number:
        return value(self.c, k, lr, past) * (k >= self.start_at)


@dataclass(frozen=True)
class fade(Schedule):
    """c_k (1 + cos(pi t))/2, t = (k - begin)/(end - begin) clipped to [0, 1].

    This is c_k up to step `begin`, and 0 from step `end` on.

    begin, end: the steps between which it falls, 0 <= begin < end.

    >>> faded = schedules.fade(schedules.uniform, 900, 1000)
    >>> faded(900, 0.1) == 1 / 902, faded(1000, 0.1)
    (True, 0.0)
    """

    c: Coef
    begin: int
    end: int

    def __post_init__(self) -> None:
        if not 0 <= self.begin < self.end:
            raise ValueError(f"fade needs 0 <= begin < end, got {self.begin} and {self.end}")

    def __call__(self, k: Number, lr: Number, past: Past = NO_PAST) -> Number:
        left = maximum(self.end - maximum(k, self.begin), 0) / (self.end - self.begin)
        angle = left * math.pi
        cos = torch.cos(angle) if isinstance(angle, torch.Tensor) else math.cos(angle)
        return value(self.c, k, lr, past) * (1 - cos) / 2


@dataclass(frozen=True)
class debias(Schedule):
    """(1-b)/(1-b^(k+1)): the rate of an average that has Adam's bias correction.

    b: the weight of the past, Adam's beta, in [0, 1).

    >>> schedules.debias(0.9)(0, 0.1)
    1.0
    """

    b: float

    def __post_init__(self) -> None:
        if not 0 <= self.b < 1:
            raise ValueError(f"an average needs a beta in [0, 1), got {self.b}")

    def __call__(self, k: Number, lr: Number, past: Past = NO_PAST) -> Number:
        return (1 - self.b) / (1 - self.b ** (k + 1))


def log_time(c: float) -> Schedule:
    """c lr/(k+1): the logarithmic-time decay of Ferbach et al.

    c: a number, at least 0.

    >>> schedules.log_time(2.0)(4, 0.1)
    0.04
    """
    return times(c, over(lr, over(1, mean)))


# -- with a memory --------------------------------------------------------------------------------


@dataclass(frozen=True)
class lr_weighted(Schedule):
    """w_k / (w_0 + ... + w_k), w = (k+1)^r (largest lr so far)^power: Schedule-Free's averaging.

    If lr never rises and r = 0, this is 1/(k+1).

    r: the power of k+1, at least 0. The larger it is, the more weight late points have.
    power: the power of the learning rate. The larger it is, the less weight a warmup has.

    >>> zoo.schedule_free().lam == schedules.lr_weighted()
    True
    """

    by_group: ClassVar[bool] = True
    """k and the memory are the group's, as in the authors' code."""

    r: float = 0.0
    power: float = 2.0

    def start(self) -> dict[str, float]:
        return {"lr_max": 0.0, "weight_sum": 0.0}

    def _weight(self, k: Number, lr_max: Number) -> Number:
        return (k + 1) ** self.r * lr_max**self.power

    def advance(self, past: Past, k: Number, lr: Number) -> dict[str, Number]:
        lr_max = maximum(past["lr_max"], lr)
        return {"lr_max": lr_max, "weight_sum": past["weight_sum"] + self._weight(k, lr_max)}

    def __call__(self, k: Number, lr: Number, past: Past = NO_PAST) -> Number:
        # Until the first lr > 0, all weights are 0. The coefficient is then 0, not 0/0.
        total = past["weight_sum"]
        return self._weight(k, past["lr_max"]) / (total + (total == 0))


@dataclass(frozen=True)
class _RelativeLr(Schedule):
    """lr_k / (largest lr so far), and 0 before the first lr > 0."""

    def start(self) -> dict[str, float]:
        return {"lr_max": 0.0}

    def advance(self, past: Past, k: Number, lr: Number) -> dict[str, Number]:
        return {"lr_max": maximum(past["lr_max"], lr)}

    def __call__(self, k: Number, lr: Number, past: Past = NO_PAST) -> Number:
        lr_max = past["lr_max"]
        return lr / (lr_max + (lr_max == 0))


def coupled(c: Coef = uniform) -> Schedule:
    """c_k lr_k / (largest lr so far): the pull falls with the learning rate, to 0 if lr does.

    c: the strength while lr is the largest so far. The default is 1/(k+2).

    While lr is constant or rises, this is c_k. Before the first lr > 0 it is 0.

    >>> adamw = torch.optim.AdamW(model.parameters(), weight_decay=0)
    >>> opt = SODAWrapper(adamw, only=hidden(model), decay=schedules.coupled())
    """
    return times(c, _RelativeLr())


def maximum(a: Number, b: Number) -> Number:
    """Return the larger of two numbers. Each may be a tensor."""
    if isinstance(a, torch.Tensor):
        return a.clamp(min=b)
    return b.clamp(min=a) if isinstance(b, torch.Tensor) else max(a, b)
