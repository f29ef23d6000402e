"""The five lines of the paper, on lists of tensors: what a step does to a bucket of parameters."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from sodaopt import rounding
from sodaopt.anchors import Anchor
from sodaopt.core import onepass
from sodaopt.core.method import Coefs, Method
from sodaopt.geometry import Context, State
from sodaopt.parallel import sharded


class Leaf(NamedTuple):
    """A parameter, its gradient's owner, at its place among all of the optimizer's."""

    p: Tensor
    state: State
    number: int


class Step(NamedTuple):
    """One step of leaves that share its number, the memory of their coefficients, dtype and device;
    anchor: where their z0 is."""

    method: Method
    k: int
    lr: float
    c: Coefs
    group: dict[str, Any]
    anchor: Anchor

    @property
    def gamma(self) -> float:
        """With lam in it, where the map allows that."""
        return self.c.lam * self.c.gamma if self.folds else self.c.gamma  # type: ignore[no-any-return]

    @property
    def folds(self) -> bool:
        return self.method.fused and self.method.geometry.homogeneous


def update(leaves: list[Leaf], method: Method, group: dict[str, Any], anchor: Anchor) -> None:
    """One step of leaves that share step, memory, dtype and device."""
    s = [leaf.state for leaf in leaves]
    k, lr = int(s[0]["step"]), float(group["lr"])
    past = method.advance({name: float(s[0][name]) for name in method.memory}, k, lr)
    step = Step(method, k, lr, method.coefs(k, lr, past), group, anchor)
    if left := onepass.update(leaves, step):
        in_passes(left, step)
    # of a number, or without alpha, this costs a small step as much as all the rest
    one = torch.ones((), dtype=torch.float32, device="cpu")
    torch._foreach_add_([t["step"] for t in s], one, alpha=1.0)
    for t in s:
        for name, value in past.items():
            t[name].fill_(value)


def in_passes(leaves: list[Leaf], step: Step) -> None:
    """Line by line, in plain operations on lists."""
    ps, s = [leaf.p for leaf in leaves], [leaf.state for leaf in leaves]
    method, k, lr, c, group, anchor = step
    dtype = sum_dtype(ps[0].dtype)

    g = [_to(sharded.local_like(p.grad, p), dtype) for p in ps]
    g = list(torch._foreach_neg(g)) if group["maximize"] else g

    m = m_bar = g
    if method.keeps_m:
        m = m_bar = [sharded.local(t["m"]) for t in s]
        torch._foreach_lerp_(m, g, c.alpha)
        if method.alpha_bar != 0:
            m_bar = list(torch._foreach_lerp(m, g, c.alpha_bar))

    if onepass.finish(leaves, step, m_bar):
        return
    y = [_to(sharded.local(p), dtype) for p in ps]  # the parameter itself where dtypes agree
    u = _mirror(method, m_bar, step.gamma, Context([p.shape for p in ps], g, k, lr, s), ps)
    if method.fused:
        if method.centre == "origin":
            torch._foreach_mul_(y, 1 - c.lam)
        elif method.centre == "init":
            anchor.pull_(ps, y, [t["z0"] for t in s], c.lam)
        torch._foreach_add_(y, u, alpha=1 if step.folds else c.lam)
    else:
        if method.centre == "init":
            z0 = [anchor.give(p, t["z0"]).to(dtype) for p, t in zip(ps, s, strict=True)]
            torch._foreach_add_(u, z0)
        _average(y, u, s, method, c)

    if ps[0].dtype != dtype:
        rounding.write_(ps, y, [leaf.number for leaf in leaves], group["seed"], k)


def _mirror(
    method: Method, m_bar: list[Tensor], gamma: float, at: Context, ps: list[Tensor]
) -> list[Tensor]:
    """The geometry's u, on shards where that is exact and on gathered tensors where it is not."""
    if not any(map(sharded.is_sharded, ps)):
        return method.geometry(m_bar, gamma, at)
    at = replace(at, state=[{n: sharded.local(t) for n, t in s.items()} for s in at.state])
    if method.geometry.elementwise:
        return method.geometry(m_bar, gamma, at)
    at = replace(at, g=[sharded.gather(t, p) for t, p in zip(at.g, ps, strict=True)])
    whole = [sharded.gather(t, p) for t, p in zip(m_bar, ps, strict=True)]
    u = method.geometry(whole, gamma, at)
    return [sharded.scatter(t, p) for t, p in zip(u, ps, strict=True)]


def _average(y: list[Tensor], u: list[Tensor], s: list[State], method: Method, c: Coefs) -> None:
    """z from u; x <- lerp(x, z, lam); y <- lerp(x, z, lam_bar), with what is kept of them."""
    z = u  # around the origin or z0, which is in it already
    if method.centre == "last":
        z = [sharded.local(t["z"]) for t in s] if method.keeps_z else y
        torch._foreach_add_(z, u)
    x = [sharded.local(t["x"]) for t in s] if method.keeps_x else y
    torch._foreach_lerp_(x, z, c.lam)
    if method.keeps_x and z is not y:
        torch._foreach_copy_(y, x)
        torch._foreach_lerp_(y, z, c.lam_bar)


def _to(t: Tensor, dtype: torch.dtype) -> Tensor:
    return t if t.dtype == dtype else t.to(dtype)


def sum_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float32 if dtype.itemsize < 4 else dtype
