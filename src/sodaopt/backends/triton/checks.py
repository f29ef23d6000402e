"""Each kernel once on small tensors, before it is used: the bits of plain torch operations."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from sodaopt import rounding as plain
from sodaopt.anchors import Clone
from sodaopt.anchors.seeded import Init, Spec
from sodaopt.backends.triton import pull, rounding, seeded
from sodaopt.core import onepass
from sodaopt.core.method import Coefs, Method
from sodaopt.core.update import Leaf, Step, in_passes
from sodaopt.geometry import Ball, Context, Diagonal, Euclidean, Sharp, Sign, Spectral

N = 10_000


def check_pull(device: torch.device) -> None:
    x, z = _values(device, 0.7), _values(device, 0.3).bfloat16()
    expected = x.lerp(z.float(), 1 / 3)
    pull.pull_([x], [z], 1 / 3)
    _same(x, expected)


def check_seeded(kind: str, device: torch.device) -> None:
    spec = Spec("check", Init(kind, -0.3, 0.4), 1, (2 * N,))
    x = _values(device, 0.7)
    expected = x.lerp(spec.values(5, 5 + N, device), 1 / 3)
    seeded.pull_([x], [spec], [5], 1 / 3, torch.float32)
    _same(x, expected)


def check_rounding(dtype: torch.dtype, device: torch.device) -> None:
    x = _values(device, 0.7)
    p = torch.empty_like(x, dtype=dtype)
    expected = plain.stochastic(x, dtype, plain.key(1, 2, 3))
    rounding.write_([p], [x], [0], [plain.prefix(1, 2)], 3)
    _same(p, expected)


def check_lines(map_: str, device: torch.device) -> None:
    geometry = {"diagonal": Diagonal(), "sign": Ball(Sign()), "euclidean": Sharp(Euclidean())}[map_]
    method = Method(geometry, alpha=0.1, alpha_bar=0.2, lam=1 / 3, centre="init")
    coefs, group = Coefs(0.1, 0.2, 1 / 3, 0.0, 0.7), {"maximize": False, "seed": 1}
    for dtype in (torch.float32, torch.bfloat16):
        found = []
        for in_one in (True, False):
            p = _values(device, 0.7).to(dtype)
            p.grad = _values(device, 0.3).to(dtype)
            state = {"m": _values(device, 0.9), "z0": _values(device, 0.1).to(dtype)}
            state |= {"v": _values(device, 0.8).abs()} if map_ == "diagonal" else {}
            leaves, step = [Leaf(p, state, 2)], Step(method, 3, 0.7, coefs, group, Clone())
            if in_one and onepass.launch(leaves, step, [(state["z0"], dtype)]):
                raise ValueError("a plain tensor was not taken")
            if not in_one:
                in_passes(leaves, step)
            found.append([p, *state.values()])
        for a, b in zip(*found, strict=True):
            _same(a, b)


def check_given(device: torch.device) -> None:
    """With all in one pass but the direction."""
    geometry, group = Ball(Spectral()), {"maximize": False, "seed": 1}
    method = Method(geometry, lam=1 / 3, centre="init")
    for dtype in (torch.float32, torch.bfloat16):
        p, z0 = (_values(device, step).view(100, -1).to(dtype) for step in (0.7, 0.1))
        u = _values(device, 0.3).view(100, -1).bfloat16()
        step = Step(method, 3, 0.7, Coefs(1.0, 0.0, 1 / 3, 0.0, 0.7), group, Clone())
        leaves = [Leaf(p, {"z0": z0}, 2)]
        scale = step.gamma * geometry.widths(Context([p.shape], [], 3, 0.7, []))[0]
        y = p.float().lerp(z0.float(), 1 / 3) + u.float() * -scale
        if dtype != torch.float32:
            y = plain.stochastic(y, dtype, plain.key(1, 2, 3))
        if onepass.launch(leaves, step, [(z0, dtype)], [u]):
            raise ValueError("a plain tensor was not taken")
        _same(p, y)


def _values(device: torch.device, step: float) -> torch.Tensor:
    return (torch.arange(N, device=device, dtype=torch.float64) * step).sin().float()


def _same(a: torch.Tensor, b: torch.Tensor) -> None:
    bits = {2: torch.int16, 4: torch.int32}[a.itemsize]  # in which zeros have a sign
    if not torch.equal(a.view(bits), b.view(bits)):
        raise ArithmeticError(f"{(a != b).sum()} of {a.numel()} elements are not torch's bits")


CHECKS: dict[str, Callable[[torch.device], None]] = {
    "pull": check_pull,
    **{kind: partial(check_seeded, kind) for kind in ("uniform", "sign", "normal", "truncated")},
    **{str(t): partial(check_rounding, t) for t in (torch.bfloat16, torch.float16)},
    "given lines": check_given,
    **{f"{m} lines": partial(check_lines, m) for m in ("diagonal", "sign", "euclidean")},
}
