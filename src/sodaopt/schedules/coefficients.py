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
    """Evaluate the coefficient at step k. A number is its own value at every step."""
    if isinstance(c, Schedule):
        return c(k, lr, past)
    return c(k, lr) if callable(c) else c


def start(c: Coef) -> dict[str, float]:
    """Return the coefficient's memory before the first step."""
    return c.start() if isinstance(c, Schedule) else {}


def advance(c: Coef, past: Past, k: Number, lr: Number) -> dict[str, Number]:
    """Return the coefficient's memory at step k. Called once a step, before `value`."""
    return c.advance(past, k, lr) if isinstance(c, Schedule) else {}


def check_memory(parts: list[Coef]) -> None:
    """Raise ValueError if two parts use one name for different memories, in three trial steps."""
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
    """The learning rate itself."""
    return lr


def uniform(k: Number, lr: Number) -> Number:
    """1/(k+2): x is the plain mean of z0, z1, ... The paper uses it in the wrapper."""
    return 1 / (k + 2)


def mean(k: Number, lr: Number) -> Number:
    """1/(k+1): m is the plain mean of the gradients seen so far."""
    return 1 / (k + 1)


def accelerated(k: Number, lr: Number) -> Number:
    """2/(k+3): weights a_k = k+1, the paper's accelerated rate."""
    return 2 / (k + 3)


def linear(k: Number, lr: Number) -> Number:
    """2/(k+2): a_k/A_k for the weights a_k = k+1."""
    return 2 / (k + 2)


def grow(k: Number, lr: Number) -> Number:
    """k+2, the inverse of `uniform`."""
    return k + 2


def triangular(k: Number, lr: Number) -> Number:
    """(k+2)(k+3)/2 = A_{k+1} for the weights a_k = k+1."""
    return (k + 2) * (k + 3) / 2


# -- combinations ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class times(Schedule):
    """a_k b_k."""

    a: Coef
    b: Coef

    def __call__(self, k: Number, lr: Number, past: Past = NO_PAST) -> Number:
        return value(self.a, k, lr, past) * value(self.b, k, lr, past)


@dataclass(frozen=True)
class over(Schedule):
    """a_k / b_k."""

    a: Coef
    b: Coef

    def __call__(self, k: Number, lr: Number, past: Past = NO_PAST) -> Number:
        return value(self.a, k, lr, past) / value(self.b, k, lr, past)


@dataclass(frozen=True)
class first(Schedule):
    """1 at k = 0, then c_k: an average that starts at its first sample."""

    c: Coef

    def __call__(self, k: Number, lr: Number, past: Past = NO_PAST) -> Number:
        c = value(self.c, k, lr, past)
        return c + (1 - c) * (k == 0)


@dataclass(frozen=True)
class after(Schedule):
    """0 before step `start_at`, then c_k. k counts from the first step of all."""

    c: Coef
    start_at: int

    def __call__(self, k: Number, lr: Number, past: Past = NO_PAST) -> Number:
        return value(self.c, k, lr, past) * (k >= self.start_at)


@dataclass(frozen=True)
class fade(Schedule):
    """c_k times a cosine that falls from 1 at step `begin` to 0 at step `end`."""

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
    """(1-b)/(1-b^(k+1)): the rate at which an average is bias-corrected as in Adam."""

    b: float

    def __post_init__(self) -> None:
        if not 0 <= self.b < 1:
            raise ValueError(f"an average needs a beta in [0, 1), got {self.b}")

    def __call__(self, k: Number, lr: Number, past: Past = NO_PAST) -> Number:
        return (1 - self.b) / (1 - self.b ** (k + 1))


@dataclass(frozen=True)
class log_time(Schedule):
    """c lr/(k+1): the logarithmic-time decay of Ferbach et al."""

    c: float

    def __call__(self, k: Number, lr: Number, past: Past = NO_PAST) -> Number:
        return self.c * lr / (k + 1)


@dataclass(frozen=True)
class falling(Schedule):
    """c (n/max(k+1, n))^rho: c for n steps, then a power of 1/(k+1)."""

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
