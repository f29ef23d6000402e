"""The five lines of the paper on one plain tensor: no fusing, no buckets, everything kept.

It is slow on purpose: the tests compare the optimizer with it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from sodaopt import rounding
from sodaopt.core.method import Method
from sodaopt.geometry import Context
from sodaopt.schedules import Number, value


class Point(NamedTuple):
    """The iterates of the template after a step."""

    x: Tensor
    y: Tensor
    z: Tensor
    m: Tensor


def iterates(
    method: Method, x0: Tensor, grad: Callable[[Tensor], Tensor], lr: float | Callable[[int], float]
) -> Iterator[Point]:
    """Yield the steps of `method` from x0 on one parameter, without end.

    grad(y): the gradient at y.
    """
    x = y = z = z0 = x0.clone()
    m = x0 * 0
    state, past = method.geometry.state(x0, x0.dtype), method.memory
    k = 0
    while True:
        lr_k: Number = lr(k) if callable(lr) else lr
        past = method.advance(past, k, lr_k)
        alpha, alpha_bar, lam, lam_bar, gamma = (
            value(c, k, lr_k, past)
            for c in (method.alpha, method.alpha_bar, method.lam, method.lam_bar, method.gamma)
        )
        g = grad(y)
        m = (1 - alpha) * m + alpha * g
        m_bar = (1 - alpha_bar) * m + alpha_bar * g
        centre = {"origin": x0 * 0, "init": z0, "last": z}[method.centre]
        [u] = method.geometry([m_bar], gamma, Context([x0.shape], [g], k, lr_k, [state]))
        z = centre + u
        x = (1 - lam) * x + (lam * centre + u if method.full_step else lam * z)
        y = (1 - lam_bar) * x + lam_bar * z
        yield Point(x, y, z, m)
        k += 1


def rounded(x: Tensor, dtype: torch.dtype, key: int) -> Tensor:
    """Round a whole parameter."""
    index = torch.arange(x.numel(), device=x.device).view(x.shape)
    return rounding.stochastic(x, dtype, key, index)
