"""The other primal-averaging wrappers of the paper, around any optimizer: what SODA competes with.

ScheduleFree   z <- z + BaseUpdate(g at y), x <- (1-c) x + c z, y = beta x + (1-beta) z
GPA            the same with a constant c = lam, and lam_bar for 1-beta
Lookahead      every H steps x <- (1-alpha) x + alpha z, and z starts again at x
SNOO           every H steps a Nesterov step on x with x - z for a gradient (DiLoCo's outer
               step on one worker), and z starts again at x
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

from sodaopt import rounding, schedules
from sodaopt.core.update import sum_dtype
from sodaopt.parallel import sharded
from sodaopt.schedules import Coef
from sodaopt.wrappers.base import Group, Pair, Wrapper
from sodaopt.wrappers.low_precision import in_fp32


class _Kept(NamedTuple):
    x: Tensor
    z: Tensor
    point: Tensor
    """What the base steps: the parameter itself, or an fp32 point in its place."""
    fresh: bool


class _Averaged(Wrapper):
    """The base steps z; parameters hold y = (1-lam_bar) x + lam_bar z; x is the output.

    x and z are kept in fp32 for 16-bit parameters, so y is only ever rounded, never summed there.
    """

    output = "x"
    lam: Coef
    lam_bar: float
    weight_decay_at_y: float = 0.0

    def marks(self) -> Group:
        memory = schedules.start(self.lam)
        return super().marks() | {self.key(n): v for n, v in memory.items()}

    def before(self, group: Group, pairs: list[Pair]) -> list[_Kept]:
        held = []
        for _, p in pairs:
            kept, dtype = self.own(p), sum_dtype(p.dtype)
            z = kept.get("z", p.detach().to(dtype, copy=True))
            x = kept.get("x", z.clone())
            p_, point = sharded.local(p), sharded.local(z)
            if self.weight_decay_at_y:
                at_y = group.get("lr", 0.0) * self.weight_decay_at_y
                point = point.sub(p_.to(dtype), alpha=at_y)
            # z itself stays until the base has come back
            point = p_.copy_(point) if p.dtype == dtype else point.clone()
            held.append(_Kept(x, z, point, not kept))
        return held

    def points(self, pairs: list[Pair], held: list[_Kept]) -> list[tuple[Tensor, Tensor]]:
        both = zip(pairs, held, strict=True)
        return [(p, h.point) for (_, p), h in both if p.dtype in rounding.HALVES]

    def after(self, group: Group, pairs: list[Pair], held: list[_Kept]) -> None:
        k, lr = group[self.key("k")], group.get("lr", 1.0)
        past = {n: group[self.key(n)] for n in schedules.start(self.lam)}
        past = schedules.advance(self.lam, past, k, lr)
        lam = schedules.value(self.lam, k, lr, past)
        for (_, p), kept in zip(pairs, held, strict=True):
            p_, x, z = sharded.local(p), sharded.local(kept.x), sharded.local(kept.z)
            z.copy_(kept.point)
            x.lerp_(z, lam)
            p_.copy_(x.lerp(z, self.lam_bar))
            if kept.fresh:
                self.keep(p, x=kept.x, z=kept.z)
        group |= {self.key(n): v for n, v in past.items()}

    def undo(self, group: Group, pairs: list[Pair], held: list[_Kept]) -> None:
        for (_, p), kept in zip(pairs, held, strict=True):
            x, z = sharded.local(kept.x), sharded.local(kept.z)
            sharded.local(p).copy_(x.lerp(z, self.lam_bar))

    def place(self, p: Tensor, name: str, t: Tensor) -> Tensor:
        return super().place(p, name, t).to(sum_dtype(p.dtype))

    def swap(self, p: Tensor, kept: dict[str, Tensor], train: bool) -> None:
        p_, x, z = sharded.local(p), sharded.local(kept["x"]), sharded.local(kept["z"])
        if p.dtype == x.dtype:
            super().swap(p, kept, train)
        else:  # y is the rounded blend of two fp32 tensors: the same bits again
            p_.copy_(x.lerp(z, self.lam_bar) if train else x)


class ScheduleFree(_Averaged):
    """Schedule-Free around any base. (Defazio et al. 2024)

    c_k = w_k / sum w, w = (k+1)^r (largest lr so far)^weight_lr_power. A weight decay of the base
    acts at z; weight_decay_at_y is the published one. Call eval() before evaluating or saving
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
        self.weight_decay_at_y = weight_decay_at_y
        super().__init__(base)


class GPA(_Averaged):
    """Generalized primal averaging around any base, its weight decay acting on z.

    The defaults are the paper's: 1 - lam_bar = 0.9, 1 - lam = 0.9^(1/32). (Defazio et al. 2025)
    """

    prefix = "gpa"

    def __init__(self, base: Optimizer, *, lam: float = 0.003287, lam_bar: float = 0.1) -> None:
        self.lam, self.lam_bar = _unit("lam", lam), _unit("lam_bar", lam_bar)
        super().__init__(base)


class _Fast(NamedTuple):
    slow: dict[Tensor, Tensor]
    """Of parameters that have none yet."""
    points: list[tuple[Tensor, Tensor]]


class _Periodic(Wrapper):
    """Every `every` steps the slow weights step toward the fast ones, which restart there."""

    output = "slow"
    every: int

    def before(self, group: Group, pairs: list[Pair]) -> _Fast:
        low = [p for _, p in pairs if p.dtype in rounding.HALVES]
        points = zip(low, in_fp32([sharded.local(p) for p in low]), strict=True)
        slow = {p: p.detach().clone() for _, p in pairs if "slow" not in self.own(p)}
        return _Fast(slow, list(points))

    def points(self, pairs: list[Pair], held: _Fast) -> list[tuple[Tensor, Tensor]]:
        return held.points

    def after(self, group: Group, pairs: list[Pair], held: _Fast) -> None:
        for p, slow in held.slow.items():
            self.keep(p, slow=slow, **self.more(p))
        k, fast, low = group[self.key("k")], dict(held.points), []
        ends = (k + 1) % self.every == 0
        for n, p in pairs:
            x = z = fast.get(p, sharded.local(p))
            if ends:
                x = self.outer(p, sharded.local(self.own(p)["slow"]).to(z.dtype), z)
            if p in fast:
                low.append((p, x, n))
            elif ends:
                sharded.local(p).copy_(x)
        if low:
            params, xs, numbers = (list(column) for column in zip(*low, strict=True))
            rounding.write_(params, xs, numbers, 0, k)
        if ends:
            for _, p in pairs:
                sharded.local(self.own(p)["slow"]).copy_(sharded.local(p))

    def place(self, p: Tensor, name: str, t: Tensor) -> Tensor:
        return super().place(p, name, t).to(p.dtype if name == "slow" else sum_dtype(p.dtype))

    def more(self, p: Tensor) -> dict[str, Tensor]:
        """What else is kept of p; there from the first step on, as checkpoints expect."""
        return {}

    def outer(self, p: Tensor, x: Tensor, z: Tensor) -> Tensor:
        """The slow weights from the slow x and the fast z."""
        raise NotImplementedError


class Lookahead(_Periodic):
    """x <- (1-alpha) x + alpha z every `every` steps. (Zhang et al. 2019)"""

    prefix = "lookahead"

    def __init__(self, base: Optimizer, *, every: int = 5, alpha: float = 0.5) -> None:
        self.every, self.alpha = _positive("every", every), _unit("alpha", alpha)
        super().__init__(base)

    def outer(self, p: Tensor, x: Tensor, z: Tensor) -> Tensor:
        return z.lerp(x, 1 - self.alpha)


class SNOO(_Periodic):
    """s = x - z, b <- momentum b + s, x <- x - lr (s + momentum b) every `every` steps.

    DiLoCo's outer Nesterov step on one worker. (Douillard et al. 2023, Kallusky et al. 2025)
    """

    prefix = "snoo"

    def __init__(
        self, base: Optimizer, *, every: int = 32, lr: float = 0.7, momentum: float = 0.9
    ) -> None:
        self.every, self.lr = _positive("every", every), lr
        self.momentum = _unit("momentum", momentum)
        super().__init__(base)

    def more(self, p: Tensor) -> dict[str, Tensor]:
        return {"b": torch.zeros_like(p, dtype=sum_dtype(p.dtype))}

    def outer(self, p: Tensor, x: Tensor, z: Tensor) -> Tensor:
        s, b = x - z, sharded.local(self.own(p)["b"])
        b.mul_(self.momentum).add_(s)
        return x - self.lr * (s + self.momentum * b)


def _unit(name: str, value: float) -> float:
    if not 0 <= value <= 1:
        raise ValueError(f"{name} must be in [0, 1], got {value}")
    return value


def _positive(name: str, value: Any) -> int:
    if not (isinstance(value, int) and value > 0):
        raise ValueError(f"{name} counts steps and must be a positive integer, got {value!r}")
    return value
