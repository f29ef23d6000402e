"""Coefficients that are functions of (k, lr), and the interface that all coefficients share."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from types import MappingProxyType
from typing import Any, TypeAlias

import torch

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
    """Raise ValueError if two parts use one name for different memories, in three trial steps.

    parts: the coefficients that share a memory.

    >>> schedules.check_memory([schedules.coupled(), schedules.uniform])
    """
    pasts: list[Past] = [start(c) for c in parts]
    for k, rate in enumerate((1.0, 0.5, 2.0)):
        pasts = [advance(c, past, k, rate) for c, past in zip(parts, pasts, strict=True)]
        seen: dict[str, Number] = {}
        for name, v in (item for past in pasts for item in past.items()):
            if seen.setdefault(name, v) != v:
                raise ValueError(f"{name!r} is the memory of two different coefficients of {parts}")


class Schedule:
    """A coefficient made of other coefficients, or with a memory.

    Its memory is the memory of its parts. A class with a memory of its own overrides `start` and
    `advance`. Parts with the same memory share it.

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
    """1/(k+2): x is the plain mean of z0, z1, ... The paper uses it in the wrapper.

    >>> schedules.uniform(0, 0.1), schedules.uniform(8, 0.1)
    (0.5, 0.1)
    """
    return 1 / (k + 2)


def mean(k: Number, lr: Number) -> Number:
    """1/(k+1): m is the plain mean of the gradients seen so far.

    >>> schedules.mean(3, 0.1)
    0.25
    """
    return 1 / (k + 1)


def accelerated(k: Number, lr: Number) -> Number:
    """2/(k+3): weights a_k = k+1, the paper's accelerated rate.

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
    """0 if k < start_at, else c_k. k counts from the first step of all.

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
    """c_k (1 + cos(pi t))/2, t = (k - begin)/(end - begin) in [0, 1]: c_k, and 0 from step `end`.

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
        t = (k - self.begin) / (self.end - self.begin)
        t = minimum(maximum(t, 0.0), 1.0)
        cos = torch.cos(t * math.pi) if isinstance(t, torch.Tensor) else math.cos(t * math.pi)
        return value(self.c, k, lr, past) * (1 + cos) / 2


@dataclass(frozen=True)
class debias(Schedule):
    """(1-b)/(1-b^(k+1)): the rate at which an average is bias-corrected as in Adam.

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


@dataclass(frozen=True)
class mass(Schedule):
    """1 + b + ... + b^k + a: the weights of the gradients in M + a g, where M <- b M + g.

    b: the weight of the past in M, in [0, 1).
    a: the extra weight of the newest gradient, at least 0.

    >>> schedules.mass(0.5)(1, 0.1)
    1.5
    """

    b: float
    a: float = 0.0

    def __call__(self, k: Number, lr: Number, past: Past = NO_PAST) -> Number:
        return (1 - self.b ** (k + 1)) / (1 - self.b) + self.a


def log_time(c: float) -> Schedule:
    """c lr/(k+1): the logarithmic-time decay of Ferbach et al.

    c: a number, at least 0.

    >>> schedules.log_time(2.0)(4, 0.1)
    0.04
    """
    return times(c, over(lr, over(1, mean)))


@dataclass(frozen=True)
class falling(Schedule):
    """c (n/max(k+1, n))^rho: c for n steps, then a power of 1/(k+1).

    c: the number of the first n steps.
    n: steps before it falls, at least 1.
    rho: how fast it falls, at least 0.

    >>> schedules.falling(0.1, n=10)(4, 1e-3), schedules.falling(0.1, n=10)(19, 1e-3)
    (0.1, 0.05)
    """

    c: float
    n: int
    rho: float = 1.0

    def __call__(self, k: Number, lr: Number, past: Past = NO_PAST) -> Number:
        return self.c * (self.n / maximum(k + 1, self.n)) ** self.rho


def maximum(a: Number, b: Number) -> Number:
    """Return the larger of two numbers, either of which may be a tensor."""
    if isinstance(a, torch.Tensor):
        return a.clamp(min=b)
    return b.clamp(min=a) if isinstance(b, torch.Tensor) else max(a, b)


def minimum(a: Number, b: Number) -> Number:
    return -maximum(-a, -b)
