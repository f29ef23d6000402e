"""Test which installed optimizers read the weights, and how exactly SODAWrapper wraps each.

    python -m tools.known_bases

Writes the table of src/sodaopt/wrappers/non_readers.txt, and docs/bases.md. An optimizer reads the
weights if its update depends on them and not on the gradients alone.
"""

from __future__ import annotations

import contextlib
import importlib
import inspect
import os
import random
import sys
import textwrap
import warnings
from collections.abc import Callable
from functools import cache
from importlib import metadata
from pathlib import Path

import numpy as np
import torch
from torch.nn import Parameter
from torch.optim import Optimizer

from sodaopt.wrappers.known_bases import DECAYS, NON_READERS

PACKAGES = ("torch.optim", "pytorch_optimizer", "lion_pytorch", "muon", "schedulefree")
SHAPES = ((6, 4), (4, 4))
Make = Callable[[list[Parameter], float], Optimizer]


def name(cls: type) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"


@cache
def installed() -> dict[str, type[Optimizer]]:
    """Return the public optimizer classes of the installed packages, by full name."""
    found: dict[str, type[Optimizer]] = {}
    for package in PACKAGES:
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                module = importlib.import_module(package)
        except ImportError:
            continue
        for v in vars(module).values():
            if inspect.isclass(v) and issubclass(v, Optimizer) and v is not Optimizer:
                found[name(v)] = v
    return dict(sorted(found.items()))


def make(cls: type[Optimizer]) -> Make:
    """Return a function that builds the optimizer without any kind of decay.

    It calls cls(params, lr=...), or passes a group with use_muon=True if a Muon asks for that.
    """

    def build(params: list[Parameter], lr: float) -> Optimizer:
        try:
            opt = cls(params, lr=lr)  # type: ignore[call-arg]
        except Exception:
            if "Muon" not in cls.__name__:
                raise
            opt = cls([{"params": params, "lr": lr, "use_muon": True}])  # type: ignore[call-arg]
        for group in opt.param_groups:
            group.update({key: off for key, off in DECAYS.items() if key in group})
        return opt

    return build


def gradients(steps: int, seed: int = 0) -> list[list[torch.Tensor]]:
    rng = torch.Generator().manual_seed(seed)
    return [
        [torch.randn(s, generator=rng, dtype=torch.float64) for s in SHAPES] for _ in range(steps)
    ]


def seed(k: int) -> None:
    """Seed every generator that an optimizer may draw from."""
    torch.manual_seed(k)
    np.random.seed(k)
    random.seed(k)


def points(shift: float = 0.0) -> list[Parameter]:
    rng = torch.Generator().manual_seed(7)
    return [
        Parameter(torch.randn(s, generator=rng, dtype=torch.float64) * (1 + shift) + shift)
        for s in SHAPES
    ]


def deltas(build: Make, shift: float, steps: int = 60, lr: float = 1e-2) -> list[torch.Tensor]:
    """Return the update of each step. The weights are scaled after each step."""
    seed(0)
    params, out = points(shift), []
    opt = build(params, lr)
    for k, gs in enumerate(gradients(steps)):
        for p, g in zip(params, gs, strict=True):
            p.grad = g.clone()
        old = [p.detach().clone() for p in params]
        seed(k)
        opt.step()
        out += [p.detach() - q for p, q in zip(params, old, strict=True)]
        with torch.no_grad():
            for p in params:
                p.mul_(1 + shift / (k + 2))
    return out


def reads(build: Make) -> bool:
    """Return whether equal gradients at two points give updates that differ beyond rounding."""
    pairs = zip(deltas(build, 0.0), deltas(build, 0.5), strict=True)
    return any(not torch.allclose(a, b, rtol=1e-9, atol=1e-12) for a, b in pairs)


def probe(cls: type[Optimizer]) -> bool | None:
    """Return whether a class reads the weights, or None if it does not run."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return reads(make(cls))
        except Exception:
            return None


def verdict(cls: type[Optimizer], steps: int = 50) -> str:
    """Return the form in which SODAWrapper wraps a class and its largest distance to Algorithm 1.

    If the class is refused or does not run, return the reason.
    """
    from sodaopt import SODAWrapper

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            ours, theirs = points(), points()
            plain = make(cls)(theirs, 1e-2)
        except Exception as e:
            return f"not run: {_short(e)}"
        try:
            wrapped = SODAWrapper(make(cls)(ours, 1e-2))
        except (TypeError, ValueError) as e:
            return f"refused: {_short(e)}"
        try:
            gap = algorithm_1(wrapped, ours, plain, theirs, steps)
        except Exception as e:
            return f"not run: {_short(e)}"
        return f"{'pull first' if name(cls) in NON_READERS else 'delta'} {gap:.1e}"


def algorithm_1(
    wrapped: Optimizer, ours: list[Parameter], plain: Optimizer, theirs: list[Parameter], steps: int
) -> float:
    """Return the largest distance to x <- (1 - 1/(k+2)) x + z0/(k+2) + BaseUpdate(g at x)."""
    z0 = [p.detach().clone() for p in theirs]
    gap = 0.0
    for k, gs in enumerate(gradients(steps)):
        for p, q, g in zip(ours, theirs, gs, strict=True):
            p.grad, q.grad = g.clone(), g.clone()
        x = [q.detach().clone() for q in theirs]
        for opt in (wrapped, plain):
            seed(k)
            opt.step()
        with torch.no_grad():
            for p, q, x_, z in zip(ours, theirs, x, z0, strict=True):
                q.copy_((1 - 1 / (k + 2)) * x_ + z / (k + 2) + (q - x_))
                gap = max(gap, float((p - q).abs().max().nan_to_num(torch.inf)))
    return gap


def _short(e: Exception) -> str:
    line = f"{type(e).__name__}: {e}".splitlines()[0]
    return textwrap.shorten(line, 110, placeholder=" ...")


TABLE = Path(__file__).parents[1] / "src" / "sodaopt" / "wrappers" / "non_readers.txt"
PAGE = Path(__file__).parents[1] / "docs" / "bases.md"


def table() -> list[str]:
    """Return the names in the library's table."""
    return TABLE.read_text().split()


def versions() -> dict[str, str]:
    """Return the versions of the installed packages."""
    wheels = {"torch.optim": "torch", "muon": "muon-optimizer", "lion_pytorch": "lion-pytorch"}
    found = {}
    for package in PACKAGES:
        with contextlib.suppress(metadata.PackageNotFoundError):
            found[package] = metadata.version(wheels.get(package, package)).split("+")[0]
    return found


def line(cls: type[Optimizer], v: str) -> str:
    """Return a row of the page."""
    form, _, gap = v.rpartition(" ") if not v.startswith(("not", "ref")) else (v, "", "")
    return f"| `{name(cls)}` | {form.replace('|', '/')} | {gap} |"


def page() -> str:
    """Return the text of docs/bases.md."""
    lines = [
        "# Which optimizers SODAWrapper wraps",
        "",
        "This page compares SODAWrapper with Algorithm 1, written out around the same optimizer,",
        "for every optimizer class of the packages below. It shows the largest difference over 50",
        "steps in float64. *Pull first* is the form that needs no copy of the weights. *Delta* is",
        "the form for optimizers whose update depends on the weights. It keeps one temporary copy.",
        "*Refused* is followed by the error of SODAWrapper. *Not run* is followed by the error of",
        "an optimizer that cannot be built as `C(params, lr=...)`, or that cannot step on dense",
        "gradients without a closure.",
        "",
        "`python -m tools.known_bases` writes this page.",
        "",
        f"Versions: `{versions()}`",
        "",
        "| optimizer | form | largest difference |",
        "|---|---|---|",
    ]
    lines += [line(cls, verdict(cls)) for cls in installed().values()]
    return "\n".join(lines) + "\n"


def write() -> bool:
    """Write the library's table, and return whether it changed."""
    before = TABLE.read_text()
    TABLE.write_text("".join(f"{n}\n" for n, c in installed().items() if probe(c) is False))
    return TABLE.read_text() != before


if __name__ == "__main__":
    if write():  # SODAWrapper has imported the old table, so start again
        os.execv(sys.executable, [sys.executable, "-m", "tools.known_bases"])
    PAGE.write_text(page())
