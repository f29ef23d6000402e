"""The five lines in one pass over memory, by a Triton kernel on a GPU.

A geometry names its kernel (`Geometry.kernel`). "polar" is fused after the polar factors; the
other kernels are fused from end to end.
"""

from __future__ import annotations

import struct
from typing import Any

import torch
from torch import Tensor

from sodaopt import backends, rounding
from sodaopt.anchors import Source
from sodaopt.core.method import Method
from sodaopt.core.update import Bucket, dual_average
from sodaopt.parallel import sharded

ELEMENTWISE = ("diagonal", "sign", "identity")


def is_fusable(p: Tensor, state: dict[str, Any], method: Method, z0: Source | None) -> bool:
    """Whether the kernel of the method can read the parameter, its gradient, state and z0."""
    if method.geometry.kernel is None or not method.fused:
        return False
    if p.dtype in rounding.HALVES and rounding.first_element(p) is None:
        return False
    grad: Any = p.grad
    if sharded.is_sharded(p):
        if method.geometry.kernel == "polar" or not sharded.is_placed_like(grad, p):
            return False
        p, grad = sharded.local(p), sharded.local(grad)
    tensors = [p, grad, *(sharded.local(state[name]) for name in ("m", "v") if name in state)]
    if isinstance(z0, Tensor):
        tensors.append(z0)
    elif not isinstance(z0, float | None):
        return False
    alike = all(t.shape == p.shape and t.device == p.device for t in tensors)
    fp32 = all(state[n].dtype == torch.float32 for n in ("m", "v") if n in state)
    return alike and fp32 and all(map(backends.readable, tensors))


def elementwise_step(b: Bucket) -> None:
    """Take one step with a map that acts on each entry."""
    _launch(b, b.gradients(), momentum=b.method.keeps_m)


def polar_step(b: Bucket) -> None:
    """Take one step along polar factors, which stay in the dtype of their products."""
    geometry: Any = b.method.geometry
    _launch(b, geometry.norm.polar_factors(dual_average(b)), momentum=False)


def _launch(b: Bucket, directions: list[Tensor], momentum: bool) -> None:
    """Launch the kernel once for each scale, dtype of the directions and kind of z0."""
    from sodaopt.backends.triton.elementwise import step_
    from sodaopt.backends.triton.tables import address

    method, n = b.method, len(b.params)
    shards = [sharded.local(p) for p in b.params] if b.is_sharded else b.params
    m = b.kept("m") if momentum else [None] * n
    v = b.kept("v") if b.kernel == "diagonal" else [None] * n
    z0: list[Any] = b.z0 or [None] * n
    scales = method.geometry.kernel_scales(b.gamma, b)
    launches: dict[Any, list[tuple[tuple[int, ...], list[Tensor | None]]]] = {}
    for j, tensors in enumerate(zip(shards, directions, m, v, z0, strict=True)):
        p, g, *_, z = tensors
        *addresses, last = (
            _bits(t) if isinstance(t, float) else address(t) if t is not None else 0
            for t in tensors
        )
        row = p.numel(), *addresses, last, *_counter(b, j)
        key = scales[j], g.dtype, z.dtype if isinstance(z, Tensor) else type(z)
        launches.setdefault(key, []).append((row, [p, *tensors[2:4]]))
    rate, eps = method.geometry.kernel_constants(b.k, b.lr)
    for (scale, dtype, kind), rows in launches.items():
        step_(
            [t for _, tensors in rows for t in tensors if t is not None],
            tuple(row for row, _ in rows),
            (b.c.alpha, b.c.alpha_bar, b.c.lam, rate, eps, scale),
            b.k,
            p=shards[0].dtype,
            g=dtype,
            z0=kind if isinstance(kind, torch.dtype) else None,
            MAP=b.kernel,
            CENTRE={"init": "number" if kind is float else "tensor"}.get(
                method.centre, method.centre
            ),
            MOMENTUM=momentum,
            OPTIMISM=momentum and method.alpha_bar != 0,
            MAXIMIZE=b.maximize and b.kernel != "polar",
        )


def _counter(b: Bucket, j: int) -> tuple[int, int]:
    """The rounding bits of a 16-bit parameter: its first element's index, and the key's prefix."""
    if b.params[j].dtype not in rounding.HALVES:
        return 0, 0
    return rounding.first_element(b.params[j]) or 0, rounding.prefix(b.seed, b.indices[j])


def _bits(number: float) -> int:
    """The bits of a number in fp32."""
    return int(struct.unpack("<i", struct.pack("<f", number))[0])
