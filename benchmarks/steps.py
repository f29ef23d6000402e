"""One step of each optimizer over the parameters of a 124M GPT, side by side in one run.

python -m benchmarks.steps [--device cuda] [--rounds 20] [--out FILE]
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import AdamW

from benchmarks.anchors import Gpt, seconds
from benchmarks.pages import where
from sodaopt import SODA, SODAWrapper, memory, param_groups, zoo

ROWS: dict[str, Callable[[nn.Module], Any]] = {
    "torch AdamW fused": lambda net: AdamW(net.parameters(), weight_decay=0, fused=True),
    "torch AdamW foreach": lambda net: AdamW(net.parameters(), weight_decay=0, foreach=True),
    "zoo.adamw": lambda net: SODA(net.parameters(), 1e-3, zoo.adamw()),
    "zoo.soda(adam)": lambda net: SODA(net.parameters(), 1e-3, zoo.soda(zoo.adam())),
    "SODAWrapper(AdamW fused)": lambda net: SODAWrapper(
        AdamW(net.parameters(), weight_decay=0, fused=True)
    ),
    "zoo.lion": lambda net: SODA(net.parameters(), 1e-4, zoo.lion()),
    "recipe muon": lambda net: SODA(param_groups(net, "muon", head="tied"), 1e-3),
    "recipe soda_dagger": lambda net: SODA(param_groups(net, "soda_dagger", head="tied"), 1e-4),
}


def measure(name: str, device: str, rounds: int) -> dict[str, Any]:
    net = Gpt(12, 768, 50304).to(device)
    for p in net.parameters():
        p.grad = torch.randn_like(p) * 1e-3
    opt = ROWS[name](net)
    first = seconds(opt.step, device)
    for _ in range(3):
        opt.step()
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
    ms = statistics.median(1e3 * seconds(opt.step, device) for _ in range(rounds))
    weights = sum(p.nbytes for p in net.parameters())
    row = {"optimizer": name, "ms": round(ms, 2), "first_step_s": round(first, 2)}
    row["state_over_weights"] = round(memory(net, opt).total() / weights, 2)
    if device == "cuda":
        row["peak_temporary_over_weights"] = round(
            (torch.cuda.max_memory_allocated() - before) / weights, 2
        )
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    rows = []
    for name in ROWS:
        rows.append(measure(name, args.device, args.rounds))
        print(json.dumps(rows[-1]), flush=True)
    result = {
        "command": f"python -m benchmarks.steps --device {args.device} --rounds {args.rounds}",
        **where(args.device),
        "rows": rows,
    }
    if args.out:
        args.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
