"""Triton's kernels on a CPU, through its interpreter, which must be chosen before it is imported:

    TRITON_INTERPRET=1 python -m tests.support.interpreted        a line of JSON, for `test_kernels.py`

The interpreter knows neither the functions of a GPU's library (normal weights) nor how to round to
bf16, and its fma rounds twice: `test_gpu.py` has what is missing, and the products here are exact.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import partial
from unittest import mock

import torch

from sodaopt import SODA, Method, anchors, geometry, init, rounding, zoo
from sodaopt.core import onepass
from sodaopt.core.update import Leaf, Step, in_passes
from sodaopt.geometry import polar as msign

KINDS = {"uniform": init.between(-0.3, 0.2), "sign": init.sign(0.1)}
DTYPES = (torch.float32, torch.float16)
STARTS = (0, 3, 2**33 + 5)
LAMS = (0.25, 1.0)
SIZES = (1, 1030, 5000)


def seeded(kind: str, dtype: torch.dtype, start: int, lam: float) -> bool:
    from sodaopt.backends.triton import seeded

    specs = [init.Spec(f"w{j}", KINDS[kind], 2**63 + 5, (1 << 40,)) for j in range(len(SIZES))]
    xs = [torch.randn(n).to(dtype) for n in SIZES]
    expected = [
        x.lerp(spec.values(start, start + x.numel(), x.device).to(dtype), lam)
        for x, spec in zip(xs, specs, strict=True)
    ]
    seeded.pull_(xs, specs, [start] * len(SIZES), lam, dtype)
    return all(map(torch.equal, xs, expected))


def pull(dtype: torch.dtype, offset: int, lam: float) -> bool:
    from sodaopt.backends.triton import pull

    whole = [torch.randn(n + offset) for n in SIZES]
    zs = [torch.randn(n + offset).to(dtype)[offset:] for n in SIZES]
    expected = [x.clone() for x in whole]
    for x, z in zip(expected, zs, strict=True):
        x[offset:].lerp_(z.float(), lam)
    pull.pull_([x[offset:] for x in whole], zs, lam)
    return all(map(torch.equal, whole, expected))


def rounded(dtype: torch.dtype, offset: int, start: int) -> bool:
    from sodaopt.backends.triton import rounding as kernel

    whole = [torch.randn(n + offset).to(dtype) for n in SIZES]
    ps, expected = [p[offset:] for p in whole], [p.clone() for p in whole]
    xs = [torch.randn(n) * 10.0 ** torch.linspace(-9, 4, n) for n in SIZES]
    for x in xs[1:]:
        x[:6] = torch.tensor([0.0, -0.0, torch.inf, -torch.inf, 65519.0, 1e-40])
    for j, (p, x) in enumerate(zip(expected, xs, strict=True)):
        index = torch.arange(start, start + len(x))
        p[offset:] = rounding.stochastic(x, dtype, rounding.key(7, j, 9), index)
    numbers = list(range(len(SIZES)))
    prefixes = [rounding.prefix(7, j) for j in numbers]
    kernel.write_(ps, xs, [start] * len(SIZES), prefixes, 9)
    return all(map(torch.equal, whole, expected))


MAPS = {
    "diagonal": geometry.Diagonal(rate=0.25, eps=0.5),
    "sign": geometry.Ball(geometry.Sign(geometry.unit)),
    "euclidean": geometry.Sharp(geometry.Euclidean()),
}


def grid(n: int) -> torch.Tensor:
    """Numbers of so few bits that sums and products of some are exact."""
    return torch.randint(-64, 64, (n,)) / 64


def placed(t: torch.Tensor, offset: int) -> torch.Tensor:
    """A copy that begins at an offset in its memory."""
    return torch.cat([t.new_zeros(offset), t])[offset:]


def launch(leaves: list[Leaf], step: Step, *given: list[torch.Tensor]) -> list[int]:
    return onepass.launch(leaves, step, onepass._z0s(leaves, step), *given)


def lines(map_: str, centre: str, dtype: torch.dtype, alpha: float, offset: int) -> bool:
    """To the bit, rounding included; but for roots and quotients."""
    lam = 1.0 if centre == "last" else 0.25
    method = Method(MAPS[map_], alpha=alpha, alpha_bar=0.5, lam=lam, centre=centre, gamma=1.0)
    group, found = {"maximize": offset > 0, "seed": 1}, []
    torch.manual_seed(0)
    start = [[grid(n).to(dtype) for n in SIZES] for _ in range(3)]
    moments = [[grid(n).abs() for n in SIZES] for _ in range(2)]
    for in_one in (True, False):
        leaves = []
        for j in range(len(SIZES)):
            p, g, z, m, v = (placed(tensors[j], offset) for tensors in (*start, *moments))
            p.grad = g
            state = {"z0": torch.tensor(2.0) if j == 1 else z} if centre == "init" else {}
            state |= {"m": m} if method.keeps_m else {}
            state |= {"v": v} if map_ == "diagonal" else {}
            leaves.append(Leaf(p, state, j))
        step = Step(method, 3, 0.5, method.coefs(3, 0.5), group, anchors.Constant())
        left = launch(leaves, step) if in_one else in_passes(leaves, step)
        assert not left
        found.append([t for leaf in leaves for t in (leaf.p, *leaf.state.values())])
    if map_ != "diagonal":
        return all(map(same_bits, *found))
    tol = 2.0**-20 if dtype == torch.float32 else 2.0**-8
    return all(torch.allclose(a, b, tol, tol) for a, b in zip(*found, strict=True))


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """In which zeros have a sign."""
    bits = {2: torch.int16, 4: torch.int32}[a.itemsize]
    return torch.equal(a.view(bits), b.view(bits))


def given(centre: str, dtype: torch.dtype, of: torch.dtype, offset: int) -> bool:
    """As above, along directions that were computed before."""
    lam = 1.0 if centre == "last" else 0.25
    ball = geometry.Ball(geometry.Spectral(geometry.unit))
    method = Method(ball, lam=lam, centre=centre, gamma=1.0)
    group = {"maximize": False, "seed": 1}
    step = Step(method, 3, 0.5, method.coefs(3, 0.5), group, anchors.Clone())
    torch.manual_seed(0)
    ps, zs = ([placed(grid(n).to(dtype), offset) for n in SIZES] for _ in range(2))
    us = [placed(grid(n).to(of), offset) for n in SIZES]
    before = [p.float().clone() for p in ps]
    rows = enumerate(zip(ps, zs, strict=True))
    leaves = [Leaf(p.view(1, -1), {"z0": z.view(1, -1)}, j) for j, (p, z) in rows]
    assert not launch(leaves, step, [u.view(1, -1) for u in us])
    centres = {"last": lambda y, z: y, "origin": lambda y, z: y * (1 - lam)}
    pulled = centres.get(centre, lambda y, z: y.lerp(z.float(), lam))
    wanted = [pulled(y, z) - lam * u.float() for y, z, u in zip(before, zs, us, strict=True)]
    if dtype != torch.float32:
        keys = [rounding.key(1, j, 3) for j in range(len(SIZES))]
        wanted = [rounding.stochastic(w, dtype, key) for w, key in zip(wanted, keys, strict=True)]
    return all(map(torch.equal, ps, wanted))


def unreadable(what: str) -> bool:
    """What the kernel would take for something else is left to plain operations."""
    step = Step(
        method := Method(MAPS["sign"], alpha=0.25, centre="init", lam=0.25, gamma=1.0), 3, 0.5,
        method.coefs(3, 0.5), {"maximize": False, "seed": 1}, anchors.Clone(),
    )  # fmt: skip
    p, g, m, z = (torch.randn(8, 4) for _ in range(4))
    if what == "p":
        p = p.double()
    elif what == "order":
        p = p.t()
        g, m, z = g.t(), m.t(), z.t()
    elif what == "m":
        m = m.double()
    elif what == "16-bit m":
        m = m.bfloat16()
    elif what == "m of another shape":
        m = m[:4]
    elif what == "z0":
        z = z.double()
    p.grad = g.to(p.dtype)
    return launch([Leaf(p, {"m": m, "z0": z}, 0)], step) == [0]


class Computed(anchors.Clone):
    """Whose z0 is nobody's but the caller's."""

    def give(self, p: torch.Tensor, kept: torch.Tensor) -> torch.Tensor:
        return kept * 0.5


def temporary() -> bool:
    """What is made for the launch lives until then."""
    method = Method(MAPS["sign"], centre="init", lam=0.25, gamma=1.0)
    group = {"maximize": False, "seed": 1}
    step = Step(method, 3, 0.5, method.coefs(3, 0.5), group, Computed())
    found = []
    for run in (launch, in_passes):
        torch.manual_seed(0)
        leaves = [Leaf(grid(1000), {"z0": grid(1000)}, j) for j in range(6)]
        for leaf in leaves:
            leaf.p.grad = grid(1000)
        assert not run(leaves, step)
        found.append([leaf.p for leaf in leaves])
    return all(map(same_bits, *found))


ROWS = {
    "adamw": zoo.adamw(),
    "soda(lion)": zoo.soda(zoo.lion()),
    "muon": zoo.muon(),
    "soda_dagger": zoo.soda_dagger(),
    "transposed": Method(geometry.Ball(geometry.Spectral(view=geometry.transposed)), alpha=0.1),
}


def steps(name: str, dtype: torch.dtype) -> bool:
    """A whole optimizer as on a GPU, and no polar factor computed more often than without."""
    from sodaopt.backends.triton import elementwise as kernel_lines

    found, calls = [], []
    for runs in (True, False):
        torch.manual_seed(0)
        weights = [torch.nn.Parameter(torch.randn(s).to(dtype)) for s in ((6, 4), (4, 6), (5, 5))]
        opt = SODA(weights, 0.01, ROWS[name], seed=3)
        raw = msign.Newton.raw
        with (
            mock.patch.object(onepass, "_runs", return_value=runs),
            mock.patch.object(msign.Newton, "raw", autospec=True, side_effect=raw) as counted,
            mock.patch(
                "sodaopt.backends.triton.elementwise.update_", wraps=kernel_lines.update_
            ) as launched,
        ):
            for _ in range(2):
                for w in weights:
                    w.grad = torch.randn_like(w)
                opt.step()
        reads = dtype != torch.float64
        assert (launched.call_count > 0) == (runs and reads), launched.call_count
        found.append([w.detach().float() for w in weights])
        calls.append(counted.call_count)
    tol = 2.0**-7 if dtype == torch.float16 else 1e-5
    return calls[0] == calls[1] and all(map(partial(torch.allclose, rtol=tol, atol=tol), *found))


def cases() -> Iterator[tuple[str, tuple[object, ...]]]:
    for kind in KINDS:
        for dtype in DTYPES:
            for start in STARTS:
                for lam in LAMS:
                    yield "seeded", (kind, dtype, start, lam)
    for offset in (0, 3):
        for lam in LAMS:
            yield "pull", (torch.bfloat16, offset, lam)
            yield "pull", (torch.float16, offset, lam)
        for dtype in (torch.bfloat16, torch.float16):
            for start in (0, 3, 2**33 + 5):
                yield "rounded", (dtype, offset, start)
    for map_ in MAPS:
        for centre in ("last", "origin", "init"):
            yield "lines", (map_, centre, torch.float32, 1.0, 3)
            yield "lines", (map_, centre, torch.float16, 0.25, 0)
    for centre in ("last", "origin", "init"):
        yield "given", (centre, torch.float32, torch.bfloat16, 3)
        yield "given", (centre, torch.float16, torch.float32, 0)
    for what in ("p", "order", "m", "16-bit m", "m of another shape", "z0"):
        yield "unreadable", (what,)
    yield "temporary", ()
    for row in ROWS:
        for dtype in (torch.float32, torch.float16, torch.float64):
            yield "steps", (row, dtype)


def name(check: str, arguments: tuple[object, ...]) -> str:
    return "-".join((check, *(str(a).removeprefix("torch.") for a in arguments)))


def main() -> None:
    torch.manual_seed(0)
    checks = {"seeded": seeded, "pull": pull, "rounded": rounded, "lines": lines, "given": given}
    checks |= {"unreadable": unreadable, "temporary": temporary, "steps": steps}
    print(json.dumps({name(c, a): checks[c](*a) for c, a in cases()}))  # type: ignore[operator]


if __name__ == "__main__":
    main()
