"""The other primal-averaging wrappers of the paper, around any optimizer.

ScheduleFree   z <- z + BaseUpdate(g at y), x <- (1-c) x + c z, y = beta x + (1-beta) z
GPA            the same with a constant c = lam, and lam_bar for 1-beta
Lookahead      every H steps x <- (1-alpha) x + alpha z, and z restarts at x
SNOO           every H steps a Nesterov step on x with x - z as the gradient (DiLoCo's outer
               step on one worker), and z restarts at x
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.optim import Optimizer

from sodaopt import schedules
from sodaopt._errors import count, number
from sodaopt.parallel import sharded
from sodaopt.rounding import SUM_DTYPE
from sodaopt.schedules import Coef
from sodaopt.wrappers.base import GroupStep, Operation, Wrapper

Values: TypeAlias = list[tuple[Tensor, Tensor]]  # tensors, and the values to copy there


class _Average(Wrapper):
    """A wrapper that keeps more than one point of each parameter."""

    def _first(self, p: Tensor) -> dict[str, Tensor]:
        """The wrapper's tensors of p before the first step."""
        raise NotImplementedError

    def _kept(self, step: GroupStep) -> list[dict[str, Tensor]]:
        """The wrapper's tensors of each parameter. New ones are stored after the base's step."""
        kept = [self._own(p) or self._first(p) for p in step.params]
        step.finish.append(partial(self._keep, step, dict(zip(step.params, kept, strict=True))))
        return kept


class _Averaged(_Average):
    """The base steps z. Parameters hold y = (1-lam_bar) x + lam_bar z, and x is the output.

    x and z of 16-bit parameters are kept in fp32, so y is rounded but never summed in 16 bits.
    """

    _output = "x"

    @property
    def _lam_bar(self) -> float:
        raise NotImplementedError

    @property
    def _decay_at_y(self) -> float:
        """The weight decay at y. The base's own acts at z."""
        return 0.0

    def _before(self, step: GroupStep) -> None:
        group, points = step.group, step.points
        k = group[self._key("k")]
        past = self._memory(group, k)
        lam = schedules.value(self._coef, k, group.get("lr", 1.0), past)
        kept = self._kept(step)
        xs, zs = ([sharded.local(own[name]) for own in kept] for name in ("x", "z"))
        y = partial(_lerp, xs, zs, self._lam_bar, points)
        step.undo.append(y)
        step.finish += [
            partial(torch._foreach_copy_, zs, points),
            partial(_lerp, xs, zs, lam, points),
            partial(torch._foreach_copy_, xs, points),
            y,
            partial(self._write, step),
            self._count(step, **past),
        ]
        at_y = group.get("lr", 0.0) * self._decay_at_y
        for point, z in zip(points, zs, strict=True):
            torch.sub(z, point, alpha=at_y, out=point)  # z, unless there is a decay at y

    def _first(self, p: Tensor) -> dict[str, Tensor]:
        z = p.detach().to(SUM_DTYPE.get(p.dtype, p.dtype), copy=True)
        return {"x": z.clone(), "z": z}

    def _write(self, step: GroupStep) -> None:
        """Copy y into the 16-bit parameters, whose points are fp32 copies."""
        for j in step.low():
            sharded.local(step.params[j]).copy_(step.points[j])

    def _restored(self, p: Tensor, name: str, t: Tensor) -> Tensor:
        return super()._restored(p, name, t).to(SUM_DTYPE.get(p.dtype, p.dtype))

    def _swap(self, p: Tensor, kept: dict[str, Tensor], train: bool) -> None:
        shard, x, z = sharded.local(p), sharded.local(kept["x"]), sharded.local(kept["z"])
        if p.dtype == x.dtype:
            super()._swap(p, kept, train)
        else:  # y is rounded from two fp32 tensors, so it gets the same bits again
            shard.copy_(x.lerp(z, self._lam_bar) if train else x)


class ScheduleFree(_Averaged):
    """Schedule-Free around any base. (Defazio et al. 2024)

    c_k = w_k / sum w, w = (k+1)^r (largest lr so far)^weight_lr_power. A weight decay of the base
    acts at z, and weight_decay_at_y is the published one. Call eval() before evaluating or saving
    weights, train() before stepping.

    >>> opt = ScheduleFree(torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0))
    >>> opt.eval()  # the model holds x
    >>> opt.train()  # and y again
    """

    _prefix = "sf"

    def __init__(
        self,
        base: Optimizer,
        *,
        beta: float = 0.9,
        r: float = 0.0,
        weight_lr_power: float = 2.0,
        weight_decay_at_y: float = 0.0,
    ) -> None:
        self.beta, self.r, self.weight_lr_power = number("beta", beta, 1), r, weight_lr_power
        self.weight_decay_at_y = number("weight_decay_at_y", weight_decay_at_y)
        super().__init__(base)

    @property
    def _coef(self) -> Coef:
        return schedules.lr_weighted(self.r, self.weight_lr_power)

    @property
    def _lam_bar(self) -> float:
        return 1 - self.beta

    @property
    def _decay_at_y(self) -> float:
        return self.weight_decay_at_y


class GPA(_Averaged):
    """Generalized primal averaging around any base, with the base's weight decay acting on z.

    The defaults are the paper's: 1 - lam_bar = 0.9, 1 - lam = 0.9^(1/32). (Defazio et al. 2025)

    >>> opt = GPA(torch.optim.AdamW(model.parameters(), lr=1e-3))
    """

    _prefix = "gpa"

    def __init__(self, base: Optimizer, *, lam: float = 0.003287, lam_bar: float = 0.1) -> None:
        self.lam, self.lam_bar = number("lam", lam, 1), number("lam_bar", lam_bar, 1)
        super().__init__(base)

    @property
    def _coef(self) -> Coef:
        return self.lam

    @property
    def _lam_bar(self) -> float:
        return self.lam_bar


class _Periodic(_Average):
    """Every `every` steps the slow weights step toward the fast ones, which restart there."""

    _output = "slow"
    every: int

    def _before(self, step: GroupStep) -> None:
        k, kept = step.group[self._key("k")], self._kept(step)
        if (k + 1) % self.every:
            step.finish += [partial(step.write, 0, k), self._count(step)]
            return
        for own, z in zip(kept, step.points, strict=True):
            step.finish += _computed(partial(self._outer, own, z))
        slow = [(own["slow"], p) for own, p in zip(kept, step.params, strict=True)]
        step.finish += [partial(step.write, 0, k), partial(_copy, slow), self._count(step)]

    def _restored(self, p: Tensor, name: str, t: Tensor) -> Tensor:
        dtype = p.dtype if name == "slow" else SUM_DTYPE.get(p.dtype, p.dtype)
        return super()._restored(p, name, t).to(dtype)

    def _first(self, p: Tensor) -> dict[str, Tensor]:
        return {"slow": p.detach().clone()}

    def _outer(self, own: dict[str, Tensor], z: Tensor) -> Values:
        """The new fast weights, from the slow ones in own and the fast z."""
        raise NotImplementedError


class Lookahead(_Periodic):
    """x <- (1-alpha) x + alpha z every `every` steps. (Zhang et al. 2019)

    >>> opt = Lookahead(torch.optim.SGD(model.parameters(), lr=0.1), every=5)
    """

    _prefix = "lookahead"

    def __init__(self, base: Optimizer, *, every: int = 5, alpha: float = 0.5) -> None:
        self.every, self.alpha = count("every", every, 1), number("alpha", alpha, 1)
        super().__init__(base)

    def _outer(self, own: dict[str, Tensor], z: Tensor) -> Values:
        x = sharded.local(own["slow"]).to(z.dtype)
        return [(z, z.lerp(x, 1 - self.alpha))]


class SNOO(_Periodic):
    """s = x - z, b <- momentum b + s, x <- x - lr (s + momentum b) every `every` steps.

    DiLoCo's outer Nesterov step on one worker. (Douillard et al. 2023, Kallusky et al. 2025)

    >>> opt = SNOO(torch.optim.AdamW(model.parameters(), lr=1e-3), every=32)
    """

    _prefix = "snoo"

    def __init__(
        self, base: Optimizer, *, every: int = 32, lr: float = 0.7, momentum: float = 0.9
    ) -> None:
        self.every, self.lr = count("every", every, 1), number("lr", lr)
        self.momentum = number("momentum", momentum, 1)
        super().__init__(base)

    def _first(self, p: Tensor) -> dict[str, Tensor]:
        b = torch.zeros_like(p, dtype=SUM_DTYPE.get(p.dtype, p.dtype))
        return super()._first(p) | {"b": b}

    def _outer(self, own: dict[str, Tensor], z: Tensor) -> Values:
        x, b = sharded.local(own["slow"]).to(z.dtype), sharded.local(own["b"])
        s = x - z
        b_new = b * self.momentum + s
        return [(b, b_new), (z, x - self.lr * (s + self.momentum * b_new))]


def _lerp(xs: list[Tensor], zs: list[Tensor], weight: Any, out: list[Tensor]) -> None:
    """out <- (1-weight) x + weight z, without other memory."""
    for x, z, point in zip(xs, zs, out, strict=True):
        torch.lerp(x, z, weight, out=point)


def _computed(compute: Callable[[], Values]) -> list[Operation]:
    """Operations that compute new values, then copy them to their places."""
    values: Values = []

    def keep() -> None:
        values[:] = compute()

    def copy() -> None:
        _copy(values)
        values.clear()

    return [keep, copy]


def _copy(values: Values) -> None:
    for place, value in values:
        sharded.local(place).copy_(sharded.local(value))
