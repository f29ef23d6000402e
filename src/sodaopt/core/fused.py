"""The five lines in one pass over memory, by a Triton kernel on a GPU.

A geometry names its kernel (`Geometry.kernel`). "polar" is fused after the polar factors.
The other kernels are fused from end to end.
"""

from __future__ import annotations

import struct
from typing import Any

import torch
from torch import Tensor

from sodaopt import backends, rounding
from sodaopt.anchors import Source
from sodaopt.core.update import Bucket, dual_average
from sodaopt.parallel import sharded

ELEMENTWISE = ("diagonal", "sign", "identity")


def is_fusable(p: Tensor, state: dict[str, Any], kernel: str, z0: Source | None) -> bool:
    """Whether the kernel can read the parameter, its gradient, state and z0."""
    if p.dtype in rounding.HALVES and rounding.first_element(p) is None:
        return False
    if type(p) not in backends.PLAIN and (
        kernel == "polar" or not sharded.is_placed_like(p.grad, p)
    ):
        return False
    tensors: list[Any] = [p]
    if kernel != "polar":  # else plain operations read the gradient and m
        moments = [state[name] for name in ("m", "v") if name in state]
        if any(t.dtype != torch.float32 for t in moments):
            return False
        tensors += [p.grad, *moments]
    if type(p) not in backends.PLAIN:
        tensors = [sharded.local(t) for t in tensors]
    if isinstance(z0, Tensor):
        tensors.append(z0)
    elif z0 is not None and not isinstance(z0, float):
        return False
    return backends.readable_together(tensors)


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

    method, n = b.method, len(b.params)
    shards = [sharded.local(p) for p in b.params] if b.is_sharded else b.params
    m = b.kept("m") if momentum else []
    v = b.kept("v") if b.kernel == "diagonal" else []
    z0: list[Any] = b.z0 or [None] * n
    scales = method.geometry.kernel_scales(b.gamma, b)
    launches: dict[Any, list[tuple[int, tuple[int, ...]]]] = {}
    for j, (p, g, z) in enumerate(zip(shards, directions, z0, strict=True)):
        is_tensor = isinstance(z, Tensor)
        m_address, v_address = m[j].data_ptr() if m else 0, v[j].data_ptr() if v else 0
        last = z.data_ptr() if is_tensor else 0 if z is None else _bits(z)
        row = p.numel(), p.data_ptr(), g.data_ptr(), m_address, v_address, last, *_counter(b, j)
        key = scales[j], g.dtype, z.dtype if is_tensor else type(z)
        launches.setdefault(key, []).append((j, row))
    rate, eps = method.geometry.kernel_constants(b.k, b.lr)
    for (scale, dtype, kind), rows in launches.items():
        centre = method.centre
        if centre == "init":
            centre = "number" if kind is float else "tensor"
        step_(
            [tensors[j] for tensors in (shards, m, v) if tensors for j, _ in rows],
            tuple([row for _, row in rows]),
            (b.c.alpha, b.c.alpha_bar, b.c.lam, rate, eps, scale),
            b.k,
            p=shards[0].dtype,
            g=dtype,
            z0=kind if isinstance(kind, torch.dtype) else None,
            MAP=b.kernel,
            CENTRE=centre,
            MOMENTUM=momentum,
            OPTIMISM=momentum and method.alpha_bar != 0,
            MAXIMIZE=b.maximize and b.kernel != "polar",
        )


def _counter(b: Bucket, j: int) -> tuple[int, int]:
    """The rounding bits of a 16-bit parameter: its first element's index, and the key's prefix."""
    if b.params[j].dtype not in rounding.HALVES:
        return 0, 0
    return rounding.first_element(b.params[j]) or 0, rounding.cached_prefix(b.seed, b.indices[j])


def _bits(number: float) -> int:
    """The bits of a number in fp32."""
    return int(struct.unpack("<i", struct.pack("<f", number))[0])
