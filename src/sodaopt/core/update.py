"""The five lines of the paper on a bucket of parameters, in plain torch operations."""

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from sodaopt import rounding
from sodaopt.anchors import pull_, value
from sodaopt.core.method import Coefs, Method
from sodaopt.geometry import Context, Geometry
from sodaopt.parallel import sharded


@dataclass
class Bucket(Context):
    """Parameters that share method, step count, dtype, device and layout: one call steps them.

    g: the gradients in the dtype of the sums, set by `read`.
    group: the parameter group.
    indices: the index of each parameter in the optimizer. It selects the random bits of rounding.
    z0: the `Source` of each parameter's initial weights, or None if the centre is not "init".
    is_sharded: the parameters are DTensors. Tensors in g, state and z0 are this rank's shards.
    ranks: the ranks that share the work on these parameters, see `Sharing.key`. None: they do not.
    c, memory: the five coefficients of this step, and their memory after it.
    grad_scale, found_inf: GradScaler's divisor of the gradients, and whether to skip the step. Both
    are on the device.
    run: the function that takes the step, see `optimizer.STEPS`.
    """

    group: dict[str, Any]
    method: Method
    params: list[Tensor]
    indices: list[int]
    z0: list[Any]
    is_sharded: bool
    ranks: Any
    c: Coefs = field(default_factory=Coefs)
    memory: dict[str, Any] = field(default_factory=dict)
    run: Any = None
    grad_scale: Tensor | None = None
    found_inf: Tensor | None = None

    @cached_property
    def dtype(self) -> torch.dtype:
        """The dtype of the sums: fp32 for 16-bit parameters."""
        return torch.promote_types(self.params[0].dtype, torch.float32)

    def gradients(self) -> list[Tensor]:
        """This rank's shard of each gradient, in the gradient's dtype."""
        if self.is_sharded:
            return [sharded.local_like(p.grad, p) for p in self.params]
        return [p.grad for p in self.params]  # type: ignore[misc]

    def read(self) -> None:
        """Set g from the gradients, unless it is set."""
        if not self.g:
            self.g = [g if g.dtype == self.dtype else g.to(self.dtype) for g in self.gradients()]
            if self.group["maximize"]:
                self.g = list(torch._foreach_neg(self.g))

    def release(self) -> None:
        """Free the copies in g, unless `read` would have to communicate to make them again."""
        if all(not self.is_sharded or sharded.is_placed_like(p.grad, p) for p in self.params):
            self.g = []

    def points(self) -> list[Tensor]:
        """Return the parameters in the dtype of the sums, as copies if they have another dtype."""
        shards = [sharded.local(p) for p in self.params] if self.is_sharded else self.params
        same = self.params[0].dtype == self.dtype
        return shards if same else [p.to(self.dtype) for p in shards]

    def write(self, y: list[Tensor]) -> None:
        """Round the points into 16-bit parameters. Other points are the parameters themselves."""
        if self.params[0].dtype != self.dtype:
            rounding.write_(self.params, y, self.indices, self.group["seed"], self.k)


def eager_step(b: Bucket) -> None:
    """Take one step by plain torch operations."""
    dual_average(b)
    finish(b)


def finish(b: Bucket) -> None:
    """Compute the lines after the dual average."""
    u = mirror(b)
    y = b.points()
    if b.method._is_one_sum:
        pull_to_centre(b, y)
        torch._foreach_add_(y, u, alpha=1 if b.method._adds_plain_u else b.c.lam)
    else:
        average(b, y, u)
    b.write(y)


def dual_average(b: Bucket) -> None:
    """m <- lerp(m, g, alpha)."""
    b.read()
    if b.method._keeps_m:
        torch._foreach_lerp_(b.kept("m"), b.g, b.c.alpha)


def optimism(b: Bucket) -> list[Tensor]:
    """m_bar = lerp(m, g, alpha_bar)."""
    b.read()
    if not b.method._keeps_m:
        return b.g
    m = b.kept("m")
    return m if b.method.alpha_bar == 0 else list(torch._foreach_lerp(m, b.g, b.c.alpha_bar))


def inputs(b: Bucket) -> list[Tensor]:
    """Return this rank's shards of the tensors whose matrices travel. Free copies of gradients."""
    tensors = b.method.geometry.tensors(optimism(b), b)
    b.release()
    return tensors


def mirror(b: Bucket) -> list[Tensor]:
    """Return u of the geometry. On sharded parameters these are this rank's shards."""
    geometry = b.method.geometry
    if b.is_sharded:
        check_shardable(geometry)
    m_bar = optimism(b) if geometry.reads_m_bar or b.results is None else []
    return geometry(m_bar, b.method._step_size(b.c), b)


def check_shardable(geometry: Geometry) -> None:
    """Raise if the map can neither step a shard alone nor exchange shards with other ranks."""
    if not (geometry.elementwise or geometry.exchanges):
        raise NotImplementedError(
            f"{type(geometry).__name__} needs whole parameters, and these are sharded: set its "
            "`exchanges`, and describe the matrices that it needs whole by `exchanged`"
        )


def pull_to_centre(b: Bucket, y: list[Tensor]) -> None:
    """y <- (1 - lam) y + lam centre. For the centre "last" lam is 1 and nothing happens."""
    if b.method.centre == "origin":
        torch._foreach_mul_(y, 1 - b.c.lam)
    elif b.method.centre == "init":
        pull_(y, b.z0, b.c.lam)


def average(b: Bucket, y: list[Tensor], u: list[Tensor]) -> None:
    """z = centre + u, x <- lerp(x, z, lam), y <- lerp(x, z, lam_bar), if x or z is stored."""
    method = b.method
    z = u
    if method.centre == "init":
        torch._foreach_add_(z, [value(z0, t) for z0, t in zip(b.z0, z, strict=True)])
    if method.centre == "last":
        z = b.kept("z") if method._keeps_z else y
        torch._foreach_add_(z, u)
    x = b.kept("x") if method._keeps_x else y
    torch._foreach_lerp_(x, z, b.c.lam)
    if method._keeps_x and z is not y:
        torch._foreach_copy_(y, x)
        torch._foreach_lerp_(y, z, b.c.lam_bar)
