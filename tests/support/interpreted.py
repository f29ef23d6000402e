"""Triton's kernels on a CPU, through its interpreter.

    TRITON_INTERPRET=1 python -m tests.support.interpreted all    prints a line of JSON
    TRITON_INTERPRET=1 python -m tests.support.interpreted few    the first case of each check
    TRITON_INTERPRET=1 python -m tests.support.interpreted rest   the other cases

The variable must be set before triton is imported, so `tests/backends/test_kernels.py` runs this
module in a process of its own. The interpreter does not know the functions of a GPU's library
(normal weights), and it truncates to bf16 instead of rounding. `tests/backends/test_gpu.py` runs
the same comparisons on a GPU.
"""

from __future__ import annotations

import copy
import json
import sys
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

from sodaopt import SODA, Method, geometry, init, rounding, schedules, zoo
from sodaopt.core.fused import Fused
from sodaopt.geometry import polar, views

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
    z0 = [s.values(range(start, start + n), cpu).to(dtype) for s, n in parts]
    expected = [x.lerp(z, lam) for x, z in zip(xs, z0, strict=True)]
    seeded.pull_(xs, specs, [start] * len(SIZES), lam, dtype)
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
    pairs = enumerate(zip(ps, xs, strict=True))
    kernel.write_([(p, x, start, rounding.prefix(7, j)) for j, (p, x) in pairs], 9)
    return all(map(torch.equal, whole, expected))


def _method(geometry_: geometry.Geometry, centre: str, alpha: float = 1.0) -> Method:
    lam = 1.0 if centre == "last" else 0.25
    return Method(geometry_, alpha=alpha, alpha_bar=0.5, lam=lam, centre=centre, gamma=1.0)


MAPS = {
    "diagonal": geometry.Diagonal(rate=0.25, eps=0.5),
    "sign": geometry.Ball(geometry.Sign(geometry.unit)),
    "identity": geometry.Sharp(geometry.Euclidean()),
    "polar": geometry.Ball(geometry.Spectral(geometry.unit)),
    "direction": geometry.Ball(geometry.BiasRMS(geometry.unit)),
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
    "coupled": zoo.soda(zoo.lion(), schedules.coupled()),
    "transposed": Method(geometry.Ball(geometry.Spectral(view=geometry.transposed)), alpha=0.1),
}
SHAPES = ((6, 4), (4, 6), (5, 5), (80, 60), (1, 3))


def counted(owner: type, name: str) -> Any:
    """Record the calls of a method, which works as before."""
    return mock.patch.object(owner, name, autospec=True, side_effect=getattr(owner, name))


def steps(name: str, dtype: torch.dtype, anchor: str, maximize: bool) -> bool:
    """Two steps with kernels, as on a GPU, agree with two steps without."""
    from sodaopt.backends.triton.tables import Launch

    found, calls = [], []
    for runs in (True, False):
        torch.manual_seed(0)
        weights = [torch.nn.Parameter(torch.randn(s).to(dtype)) for s in SHAPES]
        weights[1].data.fill_(0.5)
        opt = SODA(weights, 0.01, ROWS[name], seed=3, anchor=anchor, maximize=maximize)
        with (
            mock.patch("sodaopt.core.optimizer.runs_kernels", return_value=runs),
            counted(polar.Newton, "products") as X,
            counted(Launch, "__call__") as launched,
        ):
            for _ in range(2):
                for w in weights:
                    w.grad = torch.randn_like(w)
                opt.step()
        readable = dtype != torch.float64
        assert launched.called == (runs and readable)
        found.append([t for w in weights for t in (w.detach(), *opt.state[w].values())])
        calls.append(sum(len(call.args[1]) for call in X.call_args_list))
    if "direction" not in name:  # plain operations call it otherwise
        assert calls[0] == calls[1], "a polar factor was computed twice"
    return all(map(is_close, *found))


SKIPPED = 2
"""The step at which a gradient is infinite, so that GradScaler skips it."""


def capturable(row: str, dtype: torch.dtype, scaled: bool) -> bool:
    """Steps with capturable=True, a schedule and GradScaler agree with ordinary steps."""
    found = []
    for captures in (True, False):
        torch.manual_seed(0)
        weights = [torch.nn.Parameter(torch.randn(s).to(dtype)) for s in SHAPES]
        lr: Any = torch.tensor(0.0, dtype=torch.float64) if captures else 0.0
        opt = SODA(weights, lr, ROWS[row], seed=3, capturable=captures)
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0, enabled=scaled)
        scaler.scale(torch.ones(()))
        with mock.patch("sodaopt.core.optimizer.runs_kernels", return_value=True):
            for k in range(5):
                now = 0.01 * (5 - k)
                opt.param_groups[0]["lr"] = lr.fill_(now) if captures else now
                for w in weights:
                    w.grad = torch.randn_like(w) * scaler.get_scale()
                if scaled and k == SKIPPED:
                    weights[0].grad[0] = torch.inf
                scaler.step(opt)
                scaler.update()
        found.append([t for w in weights for t in (w.detach(), *opt.state[w].values())])
        assert float(opt.state[weights[0]]["step"]) == 5 - scaled
    return all(map(is_close, *found))


def compiled(row: str, dtype: torch.dtype) -> bool:
    """Steps in one graph of torch.compile agree with ordinary steps.

    The compiled function sets the gradients, and the learning rate in place or as a new tensor.
    """
    torch._dynamo.reset()
    backend, counts = CompileCounterWithBackend("aot_eager"), list[int]()
    found = []
    for compiles in (True, False):
        torch.manual_seed(0)
        weights = [torch.nn.Parameter(torch.randn(s).to(dtype)) for s in SHAPES]
        lr = torch.tensor(0.0)  # torch loses writes to a scalar in float64 on a CPU
        opt = copy.deepcopy(SODA(weights, lr, ROWS[row], seed=3, capturable=True))
        weights = opt.param_groups[0]["params"]

        def train(opt: SODA, now: torch.Tensor, grads: list[Any], in_place: bool) -> torch.Tensor:
            group = opt.param_groups[0]
            if in_place:
                group["lr"].copy_(now)
            else:
                group["lr"] = 2 * now
            for p, g in zip(group["params"], grads, strict=True):
                p.grad = None if g is None else 2 * g
            opt.step()
            return 2 * group["params"][0]

        take = torch.compile(train, backend=backend, fullgraph=True) if compiles else train
        with mock.patch("sodaopt.core.optimizer.runs_kernels", return_value=True):
            for k in range(7):
                now = torch.tensor(0.01 * (7 - k))
                grads: list[Any] = [torch.randn_like(w) for w in weights]
                if k == 5:
                    grads[1] = None
                assert torch.equal(take(opt, now, grads, k < 4), 2 * weights[0])
                counts.append(backend.frame_count)
        found.append([t for w in weights for t in (w.detach(), *opt.state[w].values())])
        assert float(opt.state[weights[0]]["step"]) == 7
    assert counts[0] == counts[3], "a new learning rate compiled it again"
    return all(map(torch.equal, *found))


VIEWS = {  # every layout in memory, with shapes that fill whole tiles and others
    "matrix": (geometry.matrix, [(64, 128), (128, 64), (65, 130), (130, 65), (1, 3), (3, 70, 5)]),
    "transposed": (geometry.transposed, [(64, 128), (130, 7)]),
    "split": (views.split(3), [(192, 64), (21, 5), (2, 6, 9)]),
    "split transposed": (views.split(3, geometry.transposed), [(64, 192), (5, 21), (2, 9, 6)]),
    "conv": (geometry.conv, [(64, 16, 2, 2), (5, 3, 3, 3)]),
}
SIZES_OF_GRADIENTS = (1.0, 1e30, 1e-30, 0.0)


def spectral(name: str, size: float, device: str = "cpu") -> bool:
    """Two steps by kernels agree with the same steps in float64."""
    view, shapes = VIEWS[name]
    map_ = geometry.Ball(geometry.Spectral(geometry.unit, view=view))
    found = []
    for dtype, at in ((torch.float32, device), (torch.float64, "cpu")):
        torch.manual_seed(0)
        weights = [torch.nn.Parameter(torch.randn(s).to(at, dtype)) for s in shapes]
        opt = SODA(weights, 0.01, _method(map_, "init", 0.25))
        with mock.patch("sodaopt.core.optimizer.runs_kernels", lambda p: p.dtype == torch.float32):
            for _ in range(2):
                for w in weights:
                    w.grad = (torch.randn(w.shape) * size).to(w)
                kernels = [isinstance(b.run, Fused) for b in opt._buckets()]
                assert all(kernels) == (dtype == torch.float32)
                opt.step()
        found.append([w.detach().double().cpu() for w in weights])
    return all((a - b).norm() < TOLERANCE[device] * b.norm() for a, b in zip(*found, strict=True))


TOLERANCE = {"cpu": 1e-5, "cuda": 5e-3}  # products in fp32 and in fp16


def poisoned(bad: float, device: str = "cpu") -> bool:
    """NaN and infinity make their own matrix NaN, and no other."""
    w = torch.nn.Parameter(torch.ones(3, 70, 90, device=device))
    opt = SODA([w], 0.01, _method(MAPS["polar"], "last"))
    w.grad = torch.randn_like(w)
    w.grad[1, 5, 7] = bad
    with mock.patch("sodaopt.core.optimizer.runs_kernels", return_value=True):
        opt.step()
    return w[1].isnan().all().item() and w[::2].isfinite().all().item()


def symmetric(n: int, side: int, depth: int, device: str = "cpu") -> bool:
    """X X^T, a polynomial Z of R = X X^T, and R Z.

    A GPU sums both triangles of A A^T in the same order, so they are equal to the bit. The
    interpreter multiplies by numpy, for which this is true on some CPUs only.
    """
    from sodaopt.backends.triton.spectral import product

    torch.manual_seed(0)
    X = torch.randn(n, side, depth, dtype=torch.float64, device=device).div(depth**0.5).half()
    R = (X.double() @ X.double().mT).half()
    Z = (0.5 * R.double() @ R.double() - R.double()).half()
    R64, Z64 = R.double(), Z.double()
    eye = 3.0 * torch.eye(side, dtype=torch.float64, device=device)
    is_same = is_close if device == "cpu" else torch.equal
    return all(
        is_same(ours, ours.mT) and torch.allclose(ours.double(), exact, rtol=4e-3, atol=4e-3)
        for ours, exact in (
            (product(X), X.double() @ X.double().mT),
            (product(R, R, R, 2.0, -1.5, 3.0), 2 * R64 @ R64 - 1.5 * R64 + eye),
            (product(R, Z), R64 @ Z64),
        )
    )


def replaced(w: torch.nn.Parameter) -> None:
    w.data = w.data.clone()


CHANGES = {  # between two steps
    "nothing": lambda opt, ws: None,
    "a gradient less": lambda opt, ws: setattr(ws[0], "grad", None),
    "other memory": lambda opt, ws: replaced(ws[0]),
    "other state": lambda opt, ws: opt.load_state_dict(opt.state_dict()),
    "other lr": lambda opt, ws: opt.param_groups[0].update(lr=0.02),
    "ascent": lambda opt, ws: opt.param_groups[0].update(maximize=True),
    "gradients in another order": lambda opt, ws: setattr(
        ws[0], "grad", ws[0].grad.t().contiguous().t()
    ),
    "another count": lambda opt, ws: opt.state[ws[0]]["step"].fill_(7),
}


REUSED = ("nothing", "other memory", "other lr")
"""The changes after which the buckets are used again."""


def repeated(name: str, row: str, device: str = "cpu") -> bool:
    """Buckets are used again, unless a change makes them wrong."""
    found = []
    for runs in (True, False):
        torch.manual_seed(0)
        weights = [torch.nn.Parameter(torch.randn(6, 4, device=device)) for _ in range(3)]
        opt = SODA(weights, 0.01, ROWS[row])
        with (
            mock.patch("sodaopt.core.optimizer.runs_kernels", return_value=runs),
            mock.patch.object(opt, "_buckets", wraps=opt._buckets) as sorted_,
        ):
            for k in range(6):
                for w in weights:
                    w.grad = torch.randn_like(w)
                if k == 3:
                    CHANGES[name](opt, weights)
                opt.step()
        assert (sorted_.call_count == 1) == (name in REUSED), sorted_.call_count
        found.append([t for w in weights for t in (w.detach(), *opt.state[w].values())])
    return all((a - b).norm() <= TOLERANCE[device] * b.norm() for a, b in zip(*found, strict=True))


UNREADABLE = {
    "parameter in another order": lambda p, s: p.set_(p.data.t().contiguous().t()),
    "fp64 state": lambda p, s: s.update(m=s["m"].double()),
    "16-bit state": lambda p, s: s.update(m=s["m"].bfloat16()),
    "fp64 z0": lambda p, s: s.update(z0=s["z0"].double()),
}


def unreadable(name: str) -> bool:
    """If the kernel would misread a tensor, plain operations step the parameter."""
    p = torch.nn.Parameter(torch.randn(8, 4))
    opt = SODA([p], 0.01, zoo.soda(zoo.lion()))
    p.grad = torch.randn_like(p)
    opt.step()
    with mock.patch("sodaopt.core.optimizer.runs_kernels", return_value=True):
        assert isinstance(opt._buckets()[0].run, Fused)
        with torch.no_grad():
            UNREADABLE[name](p, opt.state[p])
        return not isinstance(opt._buckets()[0].run, Fused)


def chosen(which: str) -> list[tuple[str, tuple[object, ...]]]:
    """All cases, the first case of each check, or the other cases."""
    every = list(cases())
    few = {check: (check, arguments) for check, arguments in reversed(every)}
    if which == "rest":
        return [case for case in every if case not in few.values()]
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
    for n, row in enumerate(ROWS):  # each map, centre and alpha in one of the dtypes, in turns
        yield "steps", (row, DTYPES[(n + n // 2) % 2], "auto", False)
    for anchor in ("clone", "bf16"):
        yield "steps", ("soda(lion)", torch.float32, anchor, True)
    yield "steps", ("adamw", torch.float64, "auto", False)
    for name in UNREADABLE:
        yield "unreadable", (name,)
    yield "capturable", ("adamw", torch.float32, True)
    yield "capturable", ("soda(lion)", torch.float32, False)
    yield "capturable", ("coupled", torch.float32, True)
    yield "capturable", ("soda_dagger", torch.bfloat16, True)
    yield "capturable", ("soda_dagger", torch.float16, False)
    yield "compiled", ("coupled", torch.float32)
    yield "compiled", ("soda_dagger", torch.bfloat16)
    yield from spectral_cases()


def spectral_cases() -> Iterator[tuple[str, tuple[object, ...]]]:
    for name in VIEWS:
        for size in SIZES_OF_GRADIENTS if name == "matrix" else (1.0,):
            yield "spectral", (name, size)
    for bad in (torch.nan, torch.inf):
        yield "poisoned", (bad,)
    for name in CHANGES:
        yield "repeated", (name, "soda(lion)")
    for name in REUSED:
        yield "repeated", (name, "soda_dagger")
    for shape in ((1, 64, 64), (2, 70, 200), (0, 8, 8), (2, 130, 131), (1, 256, 512)):
        yield "symmetric", shape


def label(check: str, arguments: tuple[object, ...]) -> str:
    return "-".join((check, *(str(a).removeprefix("torch.") for a in arguments)))


def main(which: str) -> None:
    torch.manual_seed(0)
    print(json.dumps({label(c, a): globals()[c](*a) for c, a in chosen(which)}))


if __name__ == "__main__":
    main("".join(sys.argv[1:]))
