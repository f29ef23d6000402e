"""Triton's kernels on a CPU, through its interpreter.

    TRITON_INTERPRET=1 python -m tests.support.interpreted        prints a line of JSON
    TRITON_INTERPRET=1 python -m tests.support.interpreted few    the first case of each check

The variable must be set before triton is imported, so `tests/backends/test_kernels.py` runs this
module in a process of its own. The interpreter does not know the functions of a GPU's library
(normal weights), and it truncates to bf16 instead of rounding. `tests/backends/test_gpu.py` runs
the same comparisons on a GPU.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from functools import partial
from unittest import mock

import torch
from torch import Tensor

from sodaopt import SODA, Method, geometry, init, rounding, zoo
from sodaopt.geometry import polar

KINDS = {"between": init.between(-0.3, 0.2), "sign": init.sign(0.1)}
DTYPES = (torch.float32, torch.float16)
STARTS = (0, 3, 2**33 + 5)
LAMS = (0.25, 1.0)
SIZES = (1, 1030, 5000)


def is_close(a: Tensor, b: Tensor) -> bool:
    """To rounding: 1e-6 relative in fp32, one unit in the last place in 16 bits."""
    tol = {torch.float64: 1e-12, torch.float32: 1e-6, torch.float16: 2.0**-10}.get(a.dtype, 2.0**-7)
    return torch.allclose(a.double(), b.double(), rtol=tol, atol=tol)


def seeded(kind: str, dtype: torch.dtype, start: int, lam: float) -> bool:
    from sodaopt.backends.triton import seeded

    specs = [init.Spec(f"w{j}", KINDS[kind], 2**63 + 5, (1 << 40,)) for j in range(len(SIZES))]
    xs = [torch.randn(n).to(dtype) for n in SIZES]
    cpu = torch.device("cpu")
    parts = zip(specs, SIZES, strict=True)
    z0 = [s.values(start, start + n, cpu).to(dtype) for s, n in parts]
    expected = [x.lerp(z, lam) for x, z in zip(xs, z0, strict=True)]
    streams = [seeded.Stream(start, s.stream, s.seed, s.init.a, s.init.spread) for s in specs]
    seeded.pull_(xs, streams, kind, lam, dtype)
    return all(map(is_close, xs, expected))


def pull(dtype: torch.dtype, offset: int, lam: float) -> bool:
    from sodaopt.backends.triton import pull

    whole = [torch.randn(n + offset) for n in SIZES]
    zs = [torch.randn(n + offset).to(dtype)[offset:] for n in SIZES]
    expected = [x.clone() for x in whole]
    for x, z in zip(expected, zs, strict=True):
        x[offset:].lerp_(z.float(), lam)
    pull.pull_([x[offset:] for x in whole], zs, lam)
    return all(map(is_close, whole, expected))


def rounded(dtype: torch.dtype, offset: int, start: int) -> bool:
    """To the bit: the random bits are a hash of the counter on every device."""
    from sodaopt.backends.triton import rounding as kernel

    whole = [torch.randn(n + offset).to(dtype) for n in SIZES]
    ps, expected = [p[offset:] for p in whole], [p.clone() for p in whole]
    xs = [torch.randn(n) * 10.0 ** torch.linspace(-9, 4, n) for n in SIZES]
    for x in xs[1:]:
        x[:6] = torch.tensor([0.0, -0.0, torch.inf, -torch.inf, 65519.0, 1e-40])
    for j, (p, x) in enumerate(zip(expected, xs, strict=True)):
        index = torch.arange(start, start + len(x))
        p[offset:] = rounding.stochastic(x, dtype, rounding.key(7, j, 9), index)
    prefixes = [rounding.prefix(7, j) for j in range(len(SIZES))]
    kernel.write_(ps, xs, [start] * len(SIZES), prefixes, 9)
    return all(map(torch.equal, whole, expected))


def _method(geometry_: geometry.Geometry, centre: str, alpha: float = 1.0) -> Method:
    lam = 1.0 if centre == "last" else 0.25
    return Method(geometry_, alpha=alpha, alpha_bar=0.5, lam=lam, centre=centre, gamma=1.0)


MAPS = {
    "diagonal": geometry.Diagonal(rate=0.25, eps=0.5),
    "sign": geometry.Ball(geometry.Sign(geometry.unit)),
    "identity": geometry.Sharp(geometry.Euclidean()),
    "polar": geometry.Ball(geometry.Spectral(geometry.unit)),
}
ROWS = {
    f"{name}, {centre}, alpha {alpha}": _method(map_, centre, alpha)
    for name, map_ in MAPS.items()
    for centre in ("last", "origin", "init")
    for alpha in (1.0, 0.25)
} | {
    "adamw": zoo.adamw(),
    "soda(lion)": zoo.soda(zoo.lion()),
    "soda_dagger": zoo.soda_dagger(),
    "transposed": Method(geometry.Ball(geometry.Spectral(view=geometry.transposed)), alpha=0.1),
}
SHAPES = ((6, 4), (4, 6), (5, 5), (80, 60), (1, 3))


def steps(name: str, dtype: torch.dtype, anchor: str, maximize: bool) -> bool:
    """Two steps of a whole optimizer with kernels, as on a GPU, and without."""
    from sodaopt.backends.triton import elementwise

    found, calls = [], []
    for runs in (True, False):
        torch.manual_seed(0)
        weights = [torch.nn.Parameter(torch.randn(s).to(dtype)) for s in SHAPES]
        weights[1].data.fill_(0.5)
        opt = SODA(weights, 0.01, ROWS[name], seed=3, anchor=anchor, maximize=maximize)
        raw = polar.Newton.raw
        with (
            mock.patch("sodaopt.core.optimizer.kernels_run_on", return_value=runs),
            mock.patch.object(polar.Newton, "raw", autospec=True, side_effect=raw) as factors,
            mock.patch.object(elementwise, "step_", wraps=elementwise.step_) as launched,
        ):
            for _ in range(2):
                for w in weights:
                    w.grad = torch.randn_like(w)
                opt.step()
        readable = dtype != torch.float64
        assert (launched.call_count > 0) == (runs and readable), launched.call_count
        found.append([t for w in weights for t in (w.detach(), *opt.state[w].values())])
        calls.append(factors.call_count)
    assert calls[0] == calls[1], "a polar factor was computed twice"
    return all(map(is_close, *found))


UNREADABLE = {
    "parameter in another order": lambda p, s: p.set_(p.data.t().contiguous().t()),
    "fp64 state": lambda p, s: s.update(m=s["m"].double()),
    "16-bit state": lambda p, s: s.update(m=s["m"].bfloat16()),
    "fp64 z0": lambda p, s: s.update(z0=s["z0"].double()),
}


def unreadable(name: str) -> bool:
    """A tensor that the kernel would misread is left to plain operations."""
    p = torch.nn.Parameter(torch.randn(8, 4))
    opt = SODA([p], 0.01, zoo.soda(zoo.lion()))
    p.grad = torch.randn_like(p)
    opt.step()
    with mock.patch("sodaopt.core.optimizer.kernels_run_on", return_value=True):
        assert next(opt._buckets()).kernel
        with torch.no_grad():
            UNREADABLE[name](p, opt.state[p])
        return not next(opt._buckets()).kernel


def chosen(which: str) -> list[tuple[str, tuple[object, ...]]]:
    """All cases, or the first case of each check."""
    every = list(cases())
    few = {check: (check, arguments) for check, arguments in reversed(every)}
    return list(few.values()) if which == "few" else every


def cases() -> Iterator[tuple[str, tuple[object, ...]]]:
    for kind in KINDS:
        for dtype in DTYPES:
            for start in STARTS:
                yield "seeded", (kind, dtype, start, 0.25)
        yield "seeded", (kind, torch.float32, 3, 1.0)
    for offset in (0, 3):
        for lam in LAMS:
            yield "pull", (torch.bfloat16, offset, lam)
            yield "pull", (torch.float16, offset, lam)
        for dtype in (torch.bfloat16, torch.float16):
            for start in STARTS:
                yield "rounded", (dtype, offset, start)
    for row in ROWS:
        for dtype in (torch.float32, torch.float16):
            yield "steps", (row, dtype, "auto", False)
    for anchor in ("clone", "bf16"):
        yield "steps", ("soda(lion)", torch.float32, anchor, True)
    yield "steps", ("adamw", torch.float64, "auto", False)
    for name in UNREADABLE:
        yield "unreadable", (name,)


def label(check: str, arguments: tuple[object, ...]) -> str:
    return "-".join((check, *(str(a).removeprefix("torch.") for a in arguments)))


def main(which: str) -> None:
    torch.manual_seed(0)
    checks = {f.__name__: f for f in (seeded, pull, rounded, steps, unreadable)}
    print(json.dumps({label(c, a): partial(checks[c], *a)() for c, a in chosen(which)}))


if __name__ == "__main__":
    main("".join(sys.argv[1:]))
