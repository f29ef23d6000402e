"""Coefficients: a number, or a function of the step k = 0, 1, 2, ... and the learning rate lr.

Every function here is branch-free arithmetic, so k and lr may be Python numbers or 0-D tensors.
The parametrised ones are values (frozen dataclasses): they print, compare, copy and pickle.
They are spelled in lower case because they are used as functions: `schedules.debias(0.9)`.

What depends on the past (a running sum, a product) is declared as memory: `start()` names the
numbers, `advance()` moves them by one step, and the optimizer keeps them in its state.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from types import MappingProxyType
from typing import Any, TypeAlias

import torch

Number: TypeAlias = Any  # int, float or a 0-D tensor
Coef: TypeAlias = float | Callable[[Number, Number], Number]
Past: TypeAlias = Mapping[str, Number]

NO_PAST: Past = MappingProxyType({})


def value(c: Coef, k: Number, lr: Number, past: Past = NO_PAST) -> Number:
    """The coefficient at step k: a number is itself."""
    if isinstance(c, Schedule):
        return c(k, lr, past)
    return c(k, lr) if callable(c) else c


def start(c: Coef) -> dict[str, float]:
    """What the coefficient remembers before the first step."""
    return c.start() if isinstance(c, Schedule) else {}


def advance(c: Coef, past: Past, k: Number, lr: Number) -> dict[str, Number]:
    """What it remembers at step k; called once a step, before `value`."""
    return c.advance(past, k, lr) if isinstance(c, Schedule) else {}


def check_memory(parts: list[Coef]) -> None:
    """Parts may share a memory, but one name cannot stand for two: try three steps."""
    pasts: list[Past] = [start(c) for c in parts]
    for k, rate in enumerate((1.0, 0.5, 2.0)):
        pasts = [advance(c, past, k, rate) for c, past in zip(parts, pasts, strict=True)]
        seen: dict[str, Number] = {}
        for name, v in (item for past in pasts for item in past.items()):
            if seen.setdefault(name, v) != v:
                raise ValueError(f"two coefficients remember different things as {name!r}: {parts}")


class Schedule:
    """A coefficient made of others, or with a memory. It remembers what its parts remember."""

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
    """1/(k+2): x is the plain mean of z0, z1, ... (the paper's choice for the wrapper)."""
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
class at_lr(Schedule):
    """c_k at a learning rate of its own, whatever the optimizer's is."""

    c: Coef
    lr: float

    def __call__(self, k: Number, lr: Number, past: Past = NO_PAST) -> Number:
        return value(self.c, k, self.lr, past)

    def advance(self, past: Past, k: Number, lr: Number) -> dict[str, Number]:
        return advance(self.c, past, k, self.lr)


@dataclass(frozen=True)
class first(Schedule):
    """1 at k = 0, then c_k: an average that starts at its first sample."""

    c: Coef

    def __call__(self, k: Number, lr: Number, past: Past = NO_PAST) -> Number:
        c = value(self.c, k, lr, past)
        return c + (1 - c) * (k == 0)


@dataclass(frozen=True)
class after(Schedule):
    """0 before step `start_at`, then c_k (k keeps counting from the beginning)."""

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
        t = _minimum(_maximum(t, 0.0), 1.0)
        cos = torch.cos(t * math.pi) if isinstance(t, torch.Tensor) else math.cos(t * math.pi)
        return value(self.c, k, lr, past) * (1 + cos) / 2


@dataclass(frozen=True)
class debias(Schedule):
    """(1-b)/(1-b^(k+1)): Adam's bias correction as a schedule of the average itself."""

    b: float

    def __post_init__(self) -> None:
        if not 0 <= self.b < 1:
            raise ValueError(f"an average needs a beta in [0, 1), got {self.b}")

    def __call__(self, k: Number, lr: Number, past: Past = NO_PAST) -> Number:
        return (1 - self.b) / (1 - self.b ** (k + 1))


@dataclass(frozen=True)
class log_time(Schedule):
    """c lr_k/(k+1): the logarithmic-time decay of Ferbach et al., for comparison."""

    c: float

    def __call__(self, k: Number, lr: Number, past: Past = NO_PAST) -> Number:
        return self.c * lr / (k + 1)


# -- with a memory --------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Weighted(Schedule):
    """Weights a_k > 0 with their running sum A_k = a_0 + ... + a_k."""

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


@dataclass(frozen=True)
class weights:
    """The paper's coefficients for any weights a: k -> a_k > 0.

    now = a_k/A_k (alpha), next = a_{k+1}/A_{k+1} (alpha_bar and lam), total = lr A_{k+1} (gamma).
    """

    a: Callable[[Number], Number]

    @property
    def now(self) -> Schedule:
        return _Now(self.a)

    @property
    def next(self) -> Schedule:
        return _Next(self.a)

    @property
    def total(self) -> Schedule:
        return _Total(self.a)


@dataclass(frozen=True)
class lr_weighted(Schedule):
    """w_k / (w_0 + ... + w_k), w = (k+1)^r (largest lr so far)^power: Schedule-Free's averaging.

    For a constant or falling lr and r = 0 this is exactly 1/(k+1).
    """

    r: float = 0.0
    power: float = 2.0

    def start(self) -> dict[str, float]:
        return {"lr_max": 0.0, "weight_sum": 0.0}

    def _weight(self, k: Number, lr_max: Number) -> Number:
        return (k + 1) ** self.r * lr_max**self.power

    def advance(self, past: Past, k: Number, lr: Number) -> dict[str, Number]:
        lr_max = _maximum(past["lr_max"], lr)
        return {"lr_max": lr_max, "weight_sum": past["weight_sum"] + self._weight(k, lr_max)}

    def __call__(self, k: Number, lr: Number, past: Past = NO_PAST) -> Number:
        # a warmup that starts at lr = 0 has no weight yet: 0, not 0/0
        total = past["weight_sum"]
        return self._weight(k, past["lr_max"]) / (total + (total == 0))


@dataclass(frozen=True)
class _LargestLr(Schedule):
    """The largest learning rate so far."""

    def start(self) -> dict[str, float]:
        return {"lr_max": 0.0}

    def advance(self, past: Past, k: Number, lr: Number) -> dict[str, Number]:
        return {"lr_max": _maximum(past["lr_max"], lr)}

    def __call__(self, k: Number, lr: Number, past: Past = NO_PAST) -> Number:
        return past["lr_max"]


@dataclass(frozen=True)
class coupled(Schedule):
    """c_k lr_k / (largest lr so far): the pull falls with the learning rate, to 0 if lr does.

    While lr is constant or rises, this is c_k. Before the first lr > 0 it is 0.
    """

    c: Coef

    def _parts(self) -> list[Coef]:
        return [self.c, _LargestLr()]

    def __call__(self, k: Number, lr: Number, past: Past = NO_PAST) -> Number:
        lr_max = past["lr_max"]
        # the ratio first: it is exactly 1 while lr is the largest so far
        return value(self.c, k, lr, past) * (lr / (lr_max + (lr_max == 0)))


@dataclass(frozen=True)
class _NadamMomentum(Schedule):
    """mu_t = b (1 - 0.96^(t psi)/2) with t = k+1, and P_t = mu_1 ... mu_t."""

    b: float
    psi: float

    def mu(self, t: Number) -> Number:
        return self.b * (1 - 0.5 * 0.96 ** (t * self.psi))

    def start(self) -> dict[str, float]:
        return {"mu_product": 1.0}

    def advance(self, past: Past, k: Number, lr: Number) -> dict[str, Number]:
        return {"mu_product": past["mu_product"] * self.mu(k + 1)}

    def parts(self, k: Number, past: Past) -> tuple[Number, Number]:
        """c_g and c_m: the step is c_g g + c_m m."""
        P, mu, mu_next = past["mu_product"], self.mu(k + 1), self.mu(k + 2)
        return (1 - mu) / (1 - P), mu_next / (1 - P * mu_next)


class nadam_alpha_bar(_NadamMomentum):
    """c_g / (c_g + c_m), torch's NAdam."""

    def __call__(self, k: Number, lr: Number, past: Past = NO_PAST) -> Number:
        c_g, c_m = self.parts(k, past)
        return c_g / (c_g + c_m)


class nadam_gamma(_NadamMomentum):
    """lr (c_g + c_m), torch's NAdam."""

    def __call__(self, k: Number, lr: Number, past: Past = NO_PAST) -> Number:
        c_g, c_m = self.parts(k, past)
        return lr * (c_g + c_m)


@dataclass(frozen=True)
class _HeavyBall(Schedule):
    """N_k = b_k N_{k-1} + 1, the mass of the heavy-ball sum M <- b_k M + g; m = M / N_k.

    b_k rises to b over `warmup` steps so that the half-life ln 2 / -ln b rises linearly.
    """

    b: float
    a: float
    warmup: int = 0
    b_start: float = 0.9

    def beta(self, k: Number) -> Number:
        if not self.warmup:
            return self.b
        t = _minimum((k + 1) / self.warmup, 1.0)
        low, high = _half_life(self.b_start), _half_life(self.b)
        return 0.5 ** (1 / (low + (high - low) * t))

    def start(self) -> dict[str, float]:
        return {"mass": 0.0}

    def advance(self, past: Past, k: Number, lr: Number) -> dict[str, Number]:
        return {"mass": past["mass"] * self.beta(k) + 1}


class heavy_alpha(_HeavyBall):
    """1 / N_k."""

    def __call__(self, k: Number, lr: Number, past: Past = NO_PAST) -> Number:
        return 1 / past["mass"]


class heavy_alpha_bar(_HeavyBall):
    """a / (N_k + a)."""

    def __call__(self, k: Number, lr: Number, past: Past = NO_PAST) -> Number:
        return self.a / (past["mass"] + self.a)


class heavy_gamma(_HeavyBall):
    """lr (N_k + a)."""

    def __call__(self, k: Number, lr: Number, past: Past = NO_PAST) -> Number:
        return lr * (past["mass"] + self.a)


def _half_life(b: float) -> float:
    return math.log(0.5) / math.log(b)


def _maximum(a: Number, b: Number) -> Number:
    if isinstance(a, torch.Tensor):
        return a.clamp(min=b)
    return b.clamp(min=a) if isinstance(b, torch.Tensor) else max(a, b)


def _minimum(a: Number, b: Number) -> Number:
    return -_maximum(-a, -b)
