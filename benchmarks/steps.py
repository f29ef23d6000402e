"""One step of each optimizer over the parameters of a GPT, side by side in one run.

    python -m benchmarks.steps [--model 124m 0.9b] [--device cuda] [--rows NAME ...] [--out FILE]
    python -m benchmarks.steps --docs

ms is the median over CUDA events around steps that follow each other without a pause (on a CPU:
over the clock). wall_ms waits for the device after each step. host_ms is the time until step()
returns while the device has nothing to do. State and peak memory, state not included, are in units
of the parameters. Each row runs in turn, so that all of them meet the same machine.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import AdamW

import sodaopt
from benchmarks.anchors import Gpt
from benchmarks.pages import DOCS, RESULTS, filled, markdown, where
from sodaopt import SODA, SODAWrapper, param_groups, zoo

MODELS = {"1m": (2, 128, 2048), "124m": (12, 768, 50304), "0.9b": (16, 2048, 50304)}
PAGE = DOCS / "performance.md"


class Both:
    """torch's Muon takes matrices alone. The embedding has AdamW, as in Muon's own examples."""

    def __init__(self, net: nn.Module) -> None:
        hidden = [p for name, p in net.named_parameters() if not name.startswith("head")]
        rest = [p for name, p in net.named_parameters() if name.startswith("head")]
        self.parts = torch.optim.Muon(hidden), AdamW(rest, fused=True)
        self.state = {j: part.state for j, part in enumerate(self.parts)}

    def step(self) -> None:
        for part in self.parts:
            part.step()


def fused(net: nn.Module) -> AdamW:
    return AdamW(net.parameters(), weight_decay=0, fused=True)


ROWS: dict[str, Callable[[nn.Module], Any]] = {
    "torch AdamW fused": fused,
    "torch AdamW foreach": lambda net: AdamW(net.parameters(), weight_decay=0, foreach=True),
    "torch Muon": Both,
    "zoo.adamw": lambda net: SODA(net.parameters(), 1e-3, zoo.adamw()),
    "zoo.soda(adam)": lambda net: SODA(net.parameters(), 1e-3, zoo.soda(zoo.adam())),
    "SODAWrapper(AdamW fused)": lambda net: SODAWrapper(fused(net)),
    "zoo.lion": lambda net: SODA(net.parameters(), 1e-4, zoo.lion()),
    "recipe muon": lambda net: SODA(param_groups(net, "muon", head="tied"), 1e-3),
    "recipe scion": lambda net: SODA(param_groups(net, "scion", head="tied"), 1e-4),
    "recipe soda_dagger": lambda net: SODA(param_groups(net, "soda_dagger", head="tied"), 1e-4),
    "bf16 torch AdamW fused": fused,
    "bf16 SODAWrapper(AdamW fused)": lambda net: SODAWrapper(fused(net)),
    "bf16 recipe soda_dagger": lambda net: SODA(
        param_groups(net, "soda_dagger", head="tied"), 1e-4
    ),
}


def measure(name: str, model: str, device: str, rounds: int) -> dict[str, Any]:
    dtype = torch.bfloat16 if name.startswith("bf16") else torch.float32
    with torch.device(device):
        net = Gpt(*MODELS[model]).to(dtype)
    for p in net.parameters():
        p.grad = torch.randn_like(p) * 1e-3
    opt = ROWS[name](net)
    wait = torch.cuda.synchronize if device == "cuda" else lambda: None
    first = clocked(opt.step, wait)
    for _ in range(7):
        opt.step()
    wait()
    weights = sum(p.nbytes for p in net.parameters())
    row = {"optimizer": name, "model": model, "first_step_s": round(first, 2)}
    if device == "cuda":
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        times = events(opt.step, rounds)
        peak = (torch.cuda.max_memory_allocated() - before) / weights
        row |= {"peak": round(peak, 3)}
    else:
        times = [1e3 * clocked(opt.step, wait) for _ in range(rounds)]
    low, _, high = statistics.quantiles(times, n=4)
    row |= {"ms": round(statistics.median(times), 3), "quartiles": [round(low, 3), round(high, 3)]}
    both = [(clocked(opt.step, lambda: None), clocked(wait, wait)) for _ in range(rounds)]
    row["host_ms"] = round(1e3 * statistics.median(host for host, _ in both), 3)
    row["wall_ms"] = round(1e3 * statistics.median(host + rest for host, rest in both), 3)
    return row | {"state": round(state_bytes(opt.state) / weights, 2)}


def clocked(f: Callable[[], Any], wait: Callable[[], Any]) -> float:
    began = time.perf_counter()
    f()
    wait()
    return time.perf_counter() - began


def events(step: Callable[[], Any], rounds: int) -> list[float]:
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(rounds + 1)]
    marks[0].record()
    for mark in marks[1:]:
        step()
        mark.record()
    torch.cuda.synchronize()
    return [a.elapsed_time(b) for a, b in pairwise(marks)]


def state_bytes(state: Any) -> int:
    if isinstance(state, Tensor):
        return state.nbytes if state.is_cuda or state.dim() else 0
    return sum(map(state_bytes, state.values())) if hasattr(state, "values") else 0


def ceilings() -> dict[str, float]:
    """The rates that this GPU reaches: a large copy, and a large fp16 product."""
    x = torch.randn(1 << 30, device="cuda")
    y = torch.empty_like(x)
    a = torch.randn(8192, 8192, device="cuda").half()
    copy = statistics.median(events(lambda: y.copy_(x), 10))
    product = statistics.median(events(lambda: a @ a, 10))
    return {
        "copy_tb_per_s": round(2 * x.nbytes / copy / 1e9, 2),
        "product_tflop_per_s": round(2 * 8192**3 / product / 1e9),
    }


def page() -> str:
    """docs/performance.md with the table of the committed results."""
    result = json.loads((RESULTS / "steps-h200.json").read_text())
    lines = [["optimizer", "parameters", "step, ms", "host, ms", "state", "peak", "first step, s"]]
    for row in result["rows"]:
        numbers = (row[key] for key in ("ms", "host_ms", "state", "peak", "first_step_s"))
        lines.append([row["optimizer"], row["model"], *(f"{number:.2f}" for number in numbers)])
    head = f"{result['device']}, torch {result['torch']} (`{result['command']}`):"
    return filled(
        PAGE, "steps", f"{head}\n\n{markdown(lines)}\n\n{result.get('note', '')}".rstrip()
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--model", nargs="+", default=["124m"], choices=MODELS)
    parser.add_argument("--rows", nargs="+", default=list(ROWS))
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--docs", action="store_true", help="write docs/performance.md")
    args = parser.parse_args()
    if args.docs:
        PAGE.write_text(page(), encoding="utf-8")
        return
    rows = []
    for model in args.model:
        for name in args.rows:
            rows.append(measure(name, model, args.device, args.rounds))
            print(json.dumps(rows[-1]), flush=True)
            if args.device == "cuda":
                torch.cuda.empty_cache()
    models, rounds = " ".join(args.model), f"--rounds {args.rounds}"
    result = {
        "command": f"python -m benchmarks.steps --model {models} --device {args.device} {rounds}",
        **where(args.device),
        "sodaopt": sodaopt.__version__,
        **(ceilings() if args.device == "cuda" else {}),
        "rows": rows,
    }
    if args.out:
        lines = ",\n".join(f"  {json.dumps(row)}" for row in result.pop("rows"))
        head = json.dumps(result, indent=1).removesuffix("\n}")
        args.out.write_text(f'{head},\n "rows": [\n{lines}\n ]\n}}\n')


if __name__ == "__main__":
    main()
