"""Wrappers that average the iterates of any optimizer: the paper's other averaging methods.

ScheduleFree and GPA average z at each step, Lookahead and SNOO every few steps.
"""

from collections.abc import Generator

import torch
from torch import Tensor
from torch.optim import Optimizer

from sodaopt import schedules
from sodaopt._errors import count, number
from sodaopt.parallel import sharded
from sodaopt.wrappers.base import GroupStep, Tensors, Wrapper


class _Averaged(Wrapper):
    """A wrapper whose base optimizer steps z, and whose output x is an average of z.

    The parameters hold y = (1-lam_bar) x + lam_bar z. For 16-bit parameters x and z are kept in
    fp32, so y is computed in fp32 and then rounded.
    """

    _output = "x"

    def _coefs(self) -> tuple[schedules.Coef, float, float]:
        """Return lam, lam_bar, and the weight decay at y. The base's own weight decay acts at z."""
        raise NotImplementedError

    def _coef(self) -> schedules.Coef:
        return self._coefs()[0]

    def _around(self, step: GroupStep, kept: Tensors, lam: float) -> Generator[None]:
        y, (_, lam_bar, at_y) = step.points, self._coefs()
        xs, zs = ([sharded.local(own[name]) for own in kept.values()] for name in ("x", "z"))
        decayed = torch._foreach_add(zs, y, alpha=-at_y * step.group["lr"]) if at_y else zs
        torch._foreach_copy_(y, decayed)
        try:
            yield
            torch._foreach_copy_(zs, y)
            torch._foreach_lerp_(xs, zs, lam)
        finally:  # the parameters must hold y again, even if the base's step does not begin
            torch._foreach_copy_(y, xs)
            torch._foreach_lerp_(y, zs, lam_bar)
            for j in step.low:
                sharded.local(step.params[j]).copy_(y[j])

    def _first(self, p: Tensor) -> dict[str, Tensor]:
        z = p.detach().to(torch.promote_types(p.dtype, torch.float32), copy=True)
        return {"x": z.clone(), "z": z}

    def _swap(self, p: Tensor, kept: dict[str, Tensor], train: bool) -> None:
        shard, x, z = sharded.local(p), sharded.local(kept["x"]), sharded.local(kept["z"])
        if p.dtype == x.dtype:
            super()._swap(p, kept, train)
        else:  # y gets the same bits again, because it is rounded from the same fp32 tensors
            shard.copy_(x.lerp(z, self._coefs()[1]) if train else x)


class ScheduleFree(_Averaged):
    """Schedule-Free averaging around any optimizer. (Defazio et al. 2024)

        z <- z + BaseUpdate(g at y)
        x <- (1 - c) x + c z
        y <- beta x + (1 - beta) z

    c = w_k/(w_0+...+w_k) with w_k = (k+1)^r (largest lr so far)^weight_lr_power. The parameters
    hold y, and the output is x. Call eval() before evaluating or saving weights, and train() before
    stepping.

    base: the optimizer to wrap. Its own weight decay acts at z.
    beta: the weight of x in y, in [0, 1].
    r: the power of k+1 in w_k. If it is positive, later points have more weight.
    weight_lr_power: the power of the largest lr in w_k. If it is positive, points of a larger lr
    have more weight.
    weight_decay_at_y: the published method's weight decay, wd >= 0 in z <- z - lr wd y.

    >>> opt = ScheduleFree(torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0))
    >>> opt.eval()  # the model holds x
    >>> opt.train()  # and y again
    """

    _prefix = "sf_"

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

    def _coefs(self) -> tuple[schedules.Coef, float, float]:
        lam = schedules.lr_weighted(self.r, self.weight_lr_power)
        return lam, 1 - self.beta, self.weight_decay_at_y


class GPA(_Averaged):
    """Generalized primal averaging around any optimizer. (Defazio et al. 2025)

        z <- z + BaseUpdate(g at y)
        x <- (1 - lam) x + lam z
        y <- (1 - lam_bar) x + lam_bar z

    The parameters hold y, and the output is x. The defaults are from its paper:
    1 - lam_bar = 0.9 and 1 - lam = 0.9^(1/32).

    base: the optimizer to wrap. Its weight decay acts at z.
    lam: the weight of z in x, in [0, 1].
    lam_bar: the weight of z in y, in [0, 1].

    >>> opt = GPA(torch.optim.AdamW(model.parameters(), lr=1e-3))
    """

    _prefix = "gpa_"

    def __init__(self, base: Optimizer, *, lam: float = 0.003287, lam_bar: float = 0.1) -> None:
        self.lam, self.lam_bar = number("lam", lam, 1), number("lam_bar", lam_bar, 1)
        super().__init__(base)

    def _coefs(self) -> tuple[schedules.Coef, float, float]:
        return self.lam, self.lam_bar, 0.0


class _Periodic(Wrapper):
    """A wrapper with slow weights, which step toward the fast weights every `every` steps.

    The base optimizer steps the fast weights, which the parameters hold. After each step of the
    slow weights, the fast weights restart from them.
    """

    _output = "slow"
    every: int

    def _around(self, step: GroupStep, kept: Tensors, lam: float) -> Generator[None]:
        yield
        k = self._k(step.group)
        is_outer = (k + 1) % self.every == 0
        for own, z in zip(kept.values(), step.points, strict=True) if is_outer else ():
            self._outer({name: sharded.local(t) for name, t in own.items()}, z)
        step.write(0, k)
        for p, own in kept.items() if is_outer else ():
            sharded.local(own["slow"]).copy_(sharded.local(p))

    def _first(self, p: Tensor) -> dict[str, Tensor]:
        return {"slow": p.detach().clone()}

    def _outer(self, own: dict[str, Tensor], z: Tensor) -> None:
        """Set z to the new slow weights.

        own: the wrapper's tensors of the parameter, such as the old slow weights.
        z: the fast weights.
        """
        raise NotImplementedError


class Lookahead(_Periodic):
    """Lookahead around any optimizer. (Zhang et al. 2019)

    Every `every` steps:

        x <- (1-alpha) x + alpha z
        z <- x

    The parameters hold z, and the output is x.

    base: the optimizer to wrap. It steps z.
    every: steps between two averages, at least 1.
    alpha: the weight of z, in [0, 1].

    >>> opt = Lookahead(torch.optim.SGD(model.parameters(), lr=0.1), every=5)
    """

    _prefix = "lookahead_"

    def __init__(self, base: Optimizer, *, every: int = 5, alpha: float = 0.5) -> None:
        self.every, self.alpha = count("every", every, 1), number("alpha", alpha, 1)
        super().__init__(base)

    def _outer(self, own: dict[str, Tensor], z: Tensor) -> None:
        z.lerp_(own["slow"].to(z.dtype), 1 - self.alpha)


class SNOO(_Periodic):
    """DiLoCo's outer Nesterov step on one worker. (Douillard et al. 2023, Kallusky et al. 2025)

    Every `every` steps:

        s = x - z
        b <- momentum b + s
        x <- x - lr (s + momentum b)
        z <- x

    The parameters hold z, and the output is x.

    base: the optimizer to wrap. It steps z.
    every: steps between two outer steps, at least 1.
    lr: the learning rate of the outer step, at least 0.
    momentum: the weight of the past in b, in [0, 1].

    >>> opt = SNOO(torch.optim.AdamW(model.parameters(), lr=1e-3), every=32)
    """

    _prefix = "snoo_"

    def __init__(
        self, base: Optimizer, *, every: int = 32, lr: float = 0.7, momentum: float = 0.9
    ) -> None:
        self.every, self.lr = count("every", every, 1), number("lr", lr)
        self.momentum = number("momentum", momentum, 1)
        super().__init__(base)

    def _first(self, p: Tensor) -> dict[str, Tensor]:
        b = torch.zeros_like(p, dtype=torch.promote_types(p.dtype, torch.float32))
        return super()._first(p) | {"b": b}

    def _outer(self, own: dict[str, Tensor], z: Tensor) -> None:
        x, b = own["slow"].to(z.dtype), own["b"]
        s = x - z
        b.mul_(self.momentum).add_(s)
        z.copy_(x - self.lr * (s + self.momentum * b))
