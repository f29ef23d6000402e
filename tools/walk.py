"""Print the files and functions of the library that one call of step() visits.

    python -m tools.walk [--json | --docs]

Each optimizer takes two steps on three small fp32 parameters, and the second step is recorded.
Files and functions are in the order of their first visit. Lambdas and comprehensions are left out.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import nn

import sodaopt
from benchmarks.pages import DOCS, filled
from sodaopt import SODA, SODAWrapper, param_groups, zoo

PACKAGE = Path(sodaopt.__file__).parent
Walk = dict[str, list[str]]  # file -> functions, in order of their first visit


def model(device: str) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 4, bias=False)).to(device)


def adamw() -> torch.optim.Optimizer:
    return SODA(model("cpu").parameters(), 1e-3, zoo.adamw())


def wrapped_adamw() -> torch.optim.Optimizer:
    return SODAWrapper(torch.optim.AdamW(model("cpu").parameters(), weight_decay=0))


def soda_dagger() -> torch.optim.Optimizer:
    return SODA(param_groups(model("cuda"), "soda_dagger"), 2**-12)


CASES: dict[str, tuple[Callable[[], torch.optim.Optimizer], bool]] = {  # True: needs a GPU
    "SODA(zoo.adamw()) on a CPU": (adamw, False),
    "SODAWrapper(torch.optim.AdamW) on a CPU": (wrapped_adamw, False),
    'SODA(param_groups(model, "soda_dagger")) on a GPU': (soda_dagger, True),
}


def walk(opt: torch.optim.Optimizer) -> Walk:
    """Take two steps with `opt`, and return the files and functions that the second one visits."""
    visited: Walk = {}

    def record(frame: FrameType, event: str, _: Any) -> None:
        path, name = Path(frame.f_code.co_filename), frame.f_code.co_qualname
        if event == "call" and path.is_relative_to(PACKAGE) and not name.endswith(">"):
            functions = visited.setdefault(str(path.relative_to(PACKAGE)), [])
            if (name := name.split("<locals>.")[-1]) not in functions:
                functions.append(name)

    for profile in (None, record):
        for group in opt.param_groups:
            for p in group["params"]:
                p.grad = torch.ones_like(p)
        sys.setprofile(profile)
        try:
            opt.step()
        finally:
            sys.setprofile(None)
    return visited


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print JSON: case -> file -> functions")
    parser.add_argument("--docs", action="store_true", help="write docs/design.md")
    args = parser.parse_args()
    walks = {
        name: None if gpu and not torch.cuda.is_available() else walk(make())
        for name, (make, gpu) in CASES.items()
    }
    if args.json:
        print(json.dumps(walks, indent=2))
    elif args.docs:
        (DOCS / "design.md").write_text(page(walks), encoding="utf-8")
    else:
        print(text(walks))


def text(walks: dict[str, Walk | None]) -> str:
    lines = []
    for name, visited in walks.items():
        lines.append(f"{name}: {'needs a GPU' if visited is None else f'{len(visited)} files'}")
        for n, (path, functions) in enumerate((visited or {}).items(), 1):
            lines.append(f"{n}. {path}: {', '.join(functions)}")
        lines.append("")
    return "\n".join(lines)


def page(walks: dict[str, Walk | None]) -> str:
    """docs/design.md with the files of each walk. Without a GPU, the lines that need one stay."""
    path = DOCS / "design.md"
    before = path.read_text(encoding="utf-8").splitlines()
    lines = []
    for name, visited in walks.items():
        if visited is None:
            lines += [line for line in before if line.startswith(name)]
        else:
            files = " -> ".join(f"`{file}`" for file in visited)
            lines.append(f"{name}, {len(visited)} files: {files}.")
    return filled(path, "walk", "\n\n".join(lines))


if __name__ == "__main__":
    main()
