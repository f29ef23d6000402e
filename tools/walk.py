"""Print the files and functions that the second call of step() visits, without torch.compile.

    python -m tools.walk [--json | --docs]

Each optimizer takes two steps on three small fp32 parameters, and the second step is recorded. The
first step makes state and plans the buckets. Files and functions are in the order of their first
visit. Lambdas and comprehensions are left out, and so are kernels. Without a GPU,
TRITON_INTERPRET=1 lets the kernels run on the CPU.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any
from unittest import mock

import torch
from torch import nn

import sodaopt
from sodaopt import SODA, SODAWrapper, param_groups, zoo
from tools.pages import DOCS, filled

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
    device = "cuda" if torch.cuda.is_available() else "cpu"
    return SODA(param_groups(model(device), "soda_dagger"), 2**-12)


CASES: dict[str, tuple[Callable[[], torch.optim.Optimizer], bool]] = {  # True: runs kernels
    "SODA(zoo.adamw()) on a CPU": (adamw, False),
    "SODAWrapper(torch.optim.AdamW) on a CPU": (wrapped_adamw, False),
    'SODA(param_groups(model, "soda_dagger")) on a GPU': (soda_dagger, True),
}
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


def kernels() -> set[tuple[str, str]]:
    """The file and the name of each function that Triton compiles."""
    folder = PACKAGE / "backends" / "triton"
    return {
        (str(path), node.name)
        for path in folder.glob("*.py")
        for node in ast.parse(path.read_text(encoding="utf-8")).body
        if isinstance(node, ast.FunctionDef)
        and "jit" in "".join(map(ast.dump, node.decorator_list))
    }


def walk(opt: torch.optim.Optimizer) -> Walk:
    """Take two steps with `opt`, and return the files and functions that the second one visits."""
    visited: Walk = {}
    compiled = kernels()

    def record(frame: FrameType, event: str, _: Any) -> None:
        path, name = Path(frame.f_code.co_filename), frame.f_code.co_qualname
        if (str(path), name) in compiled or name.endswith(">"):
            return
        if event == "call" and path.is_relative_to(PACKAGE):
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
    walks = {}
    for name, (make, runs_kernels) in CASES.items():
        walks[name] = None
        if not runs_kernels or torch.cuda.is_available():
            walks[name] = walk(make())
        elif INTERPRETED:
            with mock.patch("sodaopt.core.optimizer.runs_kernels", return_value=True):
                walks[name] = walk(make())
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
