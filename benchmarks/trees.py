"""Compare a step of several versions of the library on one machine, in one run.

    python -m benchmarks.trees --out FILE 0.1=FOLDER before=FOLDER now=src

FOLDER is the source folder of a version, such as `git archive REVISION src` writes. Each version
measures all rows in a process of its own, and the versions take turns. A number is the best of all
turns, because other work on the machine only makes a step slower.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import nn

SIZES = {"124m": (768, 12), "0.9b": (2048, 16)}
ROUNDS, WARM_UP = 30, 8


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("versions", nargs="*", metavar="NAME=FOLDER")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--models", nargs="+", default=["124m"], choices=SIZES)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--measure", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.measure:
        for model in args.models:
            print(json.dumps(dict(measured(*SIZES[model], model))), flush=True)
        return
    versions = dict(v.split("=", 1) for v in args.versions)
    found: dict[str, dict[str, dict[str, float]]] = {}
    for _ in range(args.turns):
        for version, folder in versions.items():
            for row, numbers in run(folder, args.models).items():
                best = found.setdefault(row, {}).setdefault(version, numbers)
                best.update({name: min(best[name], value) for name, value in numbers.items()})
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    head = {"torch": torch.__version__, "device": device, "turns": args.turns}
    if args.out:
        args.out.write_text(json.dumps(head | {"rows": found}, indent=1) + "\n")
    print(table(found))


def run(folder: str, models: list[str]) -> dict[str, dict[str, float]]:
    """Measure all rows with the library in this folder, in a process of its own."""
    command = [sys.executable, __file__, "--measure", folder, "--models", *models]
    environment = os.environ | {"PYTHONPATH": folder}
    result = subprocess.run(command, env=environment, stdout=subprocess.PIPE, check=True, text=True)
    return {
        row: its for line in result.stdout.splitlines() for row, its in json.loads(line).items()
    }


def table(found: dict[str, dict[str, dict[str, float]]]) -> str:
    """Return ms (host_ms) by version, and the last version's ms divided by each other version's."""
    lines = []
    for row, by_version in found.items():
        cells = [f"{v['ms']:.3f} ({v['host_ms']:.3f})" for v in by_version.values()]
        *others, last = [v["ms"] for v in by_version.values()]
        ratios = [f"x{last / other:.3f}" for other in others]
        lines.append("  ".join([f"{row:32}", *cells, *ratios]))
    return "\n".join(["  ".join([" " * 32, *next(iter(found.values()))]), *lines])


class Layers(nn.Module):
    """The parameters of a GPT: an embedding, and the matrices of its blocks."""

    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(50304, width)
        self.blocks = nn.ModuleList(
            nn.ModuleDict(
                {n: nn.Linear(width, width, bias=False) for n in ("q", "k", "v", "o")}
                | {
                    "up": nn.Linear(width, 4 * width, bias=False),
                    "down": nn.Linear(4 * width, width, bias=False),
                }
            )
            for _ in range(depth)
        )


def rows() -> dict[str, Callable[[nn.Module], torch.optim.Optimizer]]:
    from sodaopt import SODA, SODAWrapper, param_groups, zoo

    def adamw(model: nn.Module) -> torch.optim.Optimizer:
        fused = next(model.parameters()).is_cuda
        return torch.optim.AdamW(model.parameters(), 1e-4, weight_decay=0, fused=fused)

    return {
        "torch AdamW": adamw,
        "adamw": lambda model: SODA(model.parameters(), 1e-4, zoo.adamw()),
        "soda(adam)": lambda model: SODA(model.parameters(), 1e-4, zoo.soda(zoo.adam())),
        "lion": lambda model: SODA(model.parameters(), 1e-4, zoo.lion()),
        "wrapped adamw": lambda model: SODAWrapper(adamw(model)),
        **{
            recipe: lambda model, recipe=recipe: SODA(param_groups(model, recipe), 1e-4)
            for recipe in ("muon", "scion", "soda_dagger")
        },
    }


def measured(width: int, depth: int, name: str) -> Iterator[tuple[str, dict[str, float]]]:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    for dtype in (torch.float32, torch.bfloat16):
        with torch.device(device):
            torch.manual_seed(0)
            model = Layers(width, depth).to(dtype)
        for p in model.parameters():
            p.grad = torch.randn_like(p)
        for row, build in rows().items():
            prefix = "" if dtype == torch.float32 else "bf16 "
            yield f"{name} {prefix}{row}", step_times(build(model), device)


def step_times(optimizer: Any, device: str) -> dict[str, float]:
    """Return the median times of a step on the device and on the host.

    The device's time is the time between two consecutive steps.
    """
    for _ in range(WARM_UP):
        optimizer.step()
    ms, host = [], []
    if device == "cuda":
        events = [torch.cuda.Event(enable_timing=True) for _ in range(ROUNDS + 1)]
        torch.cuda.synchronize()
        for event in events:
            event.record()
            optimizer.step()
        torch.cuda.synchronize()
        ms = [a.elapsed_time(b) for a, b in pairwise(events)]
    for _ in range(ROUNDS):
        begin = time.perf_counter()
        optimizer.step()
        host.append(1e3 * (time.perf_counter() - begin))
        if device == "cuda":
            torch.cuda.synchronize()
    return {"ms": statistics.median(ms or host), "host_ms": statistics.median(host)}


if __name__ == "__main__":
    main()
