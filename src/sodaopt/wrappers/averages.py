"""The other primal-averaging wrappers of the paper, around any optimizer.

ScheduleFree   z <- z + BaseUpdate(g at y), x <- (1-c) x + c z, y = beta x + (1-beta) z
GPA            the same with a constant c = lam, and lam_bar for 1-beta
Lookahead      every H steps x <- (1-alpha) x + alpha z, and z restarts at x
SNOO           every H steps a Nesterov step on x with x - z as the gradient (DiLoCo's outer
               step on one worker), and z restarts at x
"""

from __future__ import annotations

import sys
from numbers import Real
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

from sodaopt import schedules
from sodaopt.parallel import sharded
from sodaopt.rounding import SUM_DTYPE
from sodaopt.schedules import Coef
from sodaopt.wrappers.base import GroupStep, Wrapper
from sodaopt.wrappers.live import Group

LARGEST = sys.float_info.max


class _Kept(NamedTuple):
    """x and z of one parameter. is_new: they are not in the state yet."""

    x: Tensor
    z: Tensor
    is_new: bool


class _Averaged(Wrapper):
    """The base steps z. Parameters hold y = (1-lam_bar) x + lam_bar z, and x is the output.

    x and z of 16-bit parameters are kept in fp32, so y is rounded but never summed in 16 bits.
    """

    _output = "x"
    lam: Coef
    lam_bar: float
    weight_decay_at_y: float = 0.0

    def _group_keys(self) -> Group:
        memory = schedules.start(self.lam)
        return super()._group_keys() | {self._key(n): v for n, v in memory.items()}

    def _before(self, step: GroupStep) -> list[_Kept]:
        kept = [self._kept(p) for p in step.params]
        at_y = step.group.get("lr", 0.0) * self.weight_decay_at_y
        for point, (_, z, _) in zip(step.points, kept, strict=True):
            y = point.clone() if at_y else point
            point.copy_(sharded.local(z))  # z itself stays until the base has stepped
            if at_y:
                point.sub_(y, alpha=at_y)
        return kept

    def _kept(self, p: Tensor) -> _Kept:
        own = self._own(p)
        if own:
            return _Kept(own["x"], own["z"], False)
        z = p.detach().to(SUM_DTYPE.get(p.dtype, p.dtype), copy=True)
        return _Kept(z.clone(), z, True)

    def _after(self, step: GroupStep) -> None:
        group = step.group
        k, lr = group[self._key("k")], group.get("lr", 1.0)
        past = {n: group[self._key(n)] for n in schedules.start(self.lam)}
        past = schedules.advance(self.lam, past, k, lr)
        lam = schedules.value(self.lam, k, lr, past)
        for p, point, kept in zip(step.params, step.points, step.held, strict=True):
            x, z = sharded.local(kept.x), sharded.local(kept.z)
            z.copy_(point)
            x.lerp_(z, lam)
            sharded.local(p).copy_(x.lerp(z, self.lam_bar))
            if kept.is_new:
                self._keep(p, x=kept.x, z=kept.z)
        group |= {self._key(n): v for n, v in past.items()}

    def _undo(self, step: GroupStep) -> None:
        for p, kept in zip(step.params, step.held, strict=True):
            x, z = sharded.local(kept.x), sharded.local(kept.z)
            sharded.local(p).copy_(x.lerp(z, self.lam_bar))

    def _restored(self, p: Tensor, name: str, t: Tensor) -> Tensor:
        return super()._restored(p, name, t).to(SUM_DTYPE.get(p.dtype, p.dtype))

    def _swap(self, p: Tensor, kept: dict[str, Tensor], train: bool) -> None:
        shard, x, z = sharded.local(p), sharded.local(kept["x"]), sharded.local(kept["z"])
        if p.dtype == x.dtype:
            super()._swap(p, kept, train)
        else:  # y is rounded from two fp32 tensors, so it gets the same bits again
            shard.copy_(x.lerp(z, self.lam_bar) if train else x)


class ScheduleFree(_Averaged):
    """Schedule-Free around any base. (Defazio et al. 2024)

    c_k = w_k / sum w, w = (k+1)^r (largest lr so far)^weight_lr_power. A weight decay of the base
    acts at z, and weight_decay_at_y is the published one. Call eval() before evaluating or saving
    weights, train() before stepping.
    """

    prefix = "sf"

    def __init__(
        self,
        base: Optimizer,
        *,
        beta: float = 0.9,
        r: float = 0.0,
        weight_lr_power: float = 2.0,
        weight_decay_at_y: float = 0.0,
    ) -> None:
        self.lam = schedules.lr_weighted(r, weight_lr_power)
        self.lam_bar = 1 - _unit("beta", beta)
        self.weight_decay_at_y = _real("weight_decay_at_y", weight_decay_at_y, 0.0, LARGEST)
        super().__init__(base)


class GPA(_Averaged):
    """Generalized primal averaging around any base, with the base's weight decay acting on z.

    The defaults are the paper's: 1 - lam_bar = 0.9, 1 - lam = 0.9^(1/32). (Defazio et al. 2025)
    """

    prefix = "gpa"

    def __init__(self, base: Optimizer, *, lam: float = 0.003287, lam_bar: float = 0.1) -> None:
        self.lam, self.lam_bar = _unit("lam", lam), _unit("lam_bar", lam_bar)
        super().__init__(base)


class _Periodic(Wrapper):
    """Every `every` steps the slow weights step toward the fast ones, which restart there."""

    _output = "slow"
    every: int

    def _before(self, step: GroupStep) -> dict[Tensor, Tensor]:
        """Return the slow weights of the parameters that have none yet."""
        return {p: p.detach().clone() for p in step.params if "slow" not in self._own(p)}

    def _after(self, step: GroupStep) -> None:
        for p, slow in step.held.items():
            self._keep(p, slow=slow, **self._extra_state(p))
        k = step.group[self._key("k")]
        if (k + 1) % self.every:
            step.write(0, k)
            return
        for p, z in zip(step.params, step.points, strict=True):
            z.copy_(self._outer(p, sharded.local(self._own(p)["slow"]).to(z.dtype), z))
        step.write(0, k)
        for p in step.params:
            sharded.local(self._own(p)["slow"]).copy_(sharded.local(p))

    def _restored(self, p: Tensor, name: str, t: Tensor) -> Tensor:
        dtype = p.dtype if name == "slow" else SUM_DTYPE.get(p.dtype, p.dtype)
        return super()._restored(p, name, t).to(dtype)

    def _extra_state(self, p: Tensor) -> dict[str, Tensor]:
        """More state of p. It exists from the first step on, as checkpoints expect."""
        return {}

    def _outer(self, p: Tensor, x: Tensor, z: Tensor) -> Tensor:
        """The new slow weights from the slow x and the fast z."""
        raise NotImplementedError


class Lookahead(_Periodic):
    """x <- (1-alpha) x + alpha z every `every` steps. (Zhang et al. 2019)"""

    prefix = "lookahead"

    def __init__(self, base: Optimizer, *, every: int = 5, alpha: float = 0.5) -> None:
        self.every, self.alpha = _positive("every", every), _unit("alpha", alpha)
        super().__init__(base)

    def _outer(self, p: Tensor, x: Tensor, z: Tensor) -> Tensor:
        return z.lerp(x, 1 - self.alpha)


class SNOO(_Periodic):
    """s = x - z, b <- momentum b + s, x <- x - lr (s + momentum b) every `every` steps.

    DiLoCo's outer Nesterov step on one worker. (Douillard et al. 2023, Kallusky et al. 2025)
    """

    prefix = "snoo"

    def __init__(
        self, base: Optimizer, *, every: int = 32, lr: float = 0.7, momentum: float = 0.9
    ) -> None:
        self.every = _positive("every", every)
        self.lr = _real("lr", lr, 0.0, LARGEST)
        self.momentum = _unit("momentum", momentum)
        super().__init__(base)

    def _extra_state(self, p: Tensor) -> dict[str, Tensor]:
        return {"b": torch.zeros_like(p, dtype=SUM_DTYPE.get(p.dtype, p.dtype))}

    def _outer(self, p: Tensor, x: Tensor, z: Tensor) -> Tensor:
        s, b = x - z, sharded.local(self._own(p)["b"])
        b.mul_(self.momentum).add_(s)
        return x - self.lr * (s + self.momentum * b)


def _real(name: str, value: Any, least: float, most: float) -> float:
    """Return the number, or raise if it is not one between least and most."""
    if not isinstance(value, Real) or isinstance(value, bool):
        raise TypeError(f"{name} must be a number, got {value!r}")
    if not least <= float(value) <= most:
        where = f"in [{least:g}, {most:g}]" if most < LARGEST else "finite and not negative"
        raise ValueError(f"{name} must be {where}, got {value}")
    return float(value)


def _unit(name: str, value: Any) -> float:
    return _real(name, value, 0.0, 1.0)


def _positive(name: str, value: Any) -> int:
    if not (isinstance(value, int) and value > 0) or isinstance(value, bool):
        raise ValueError(f"{name} counts steps and must be a positive integer, got {value!r}")
    return value
