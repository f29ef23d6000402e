"""Measure the time that SODAWrapper adds to a step of torch's fused AdamW.

    python -m benchmarks.wrapper [--parameters 100e6] [--device cpu] [--rounds 40]

The two steps alternate on the same parameters in one run, so that a busy machine slows both. Times
are medians, and percentages are medians over neighbouring steps. The pull moves at least 12 bytes a
parameter (read x and z0, write x), which is 43 % of AdamW's 28. A plain copy of z0 is timed too. It
moves as many bytes as the pull, because a CPU also reads the cache lines that it writes.
"""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path
from typing import Any

import torch
from torch.nn import Parameter
from torch.optim import AdamW

from benchmarks.anchors import seconds
from benchmarks.records import where
from sodaopt import SODAWrapper


def shapes(total: int) -> list[tuple[int, int]]:
    """Return shapes of the layers of a GPT of width 768, until they have `total` parameters."""
    out: list[tuple[int, int]] = []
    layer = [(768, 768)] * 4 + [(3072, 768), (768, 3072)]
    while sum(a * b for a, b in out) < total:
        out.append(layer[len(out) % len(layer)])
    return out


def parameters(total: int, device: str) -> list[Parameter]:
    ps = [Parameter(torch.randn(s, device=device) * 0.02) for s in shapes(total)]
    for p in ps:
        p.grad = torch.randn_like(p)
    return ps


def state_bytes(opt: torch.optim.Optimizer) -> int:
    return sum(t.nbytes for s in opt.state.values() for t in s.values() if torch.is_tensor(t))


def measure(total: int, device: str, rounds: int) -> dict[str, Any]:
    ps = parameters(total, device)
    base = AdamW(ps, lr=1e-4, weight_decay=0, fused=True)
    wrapped = SODAWrapper(AdamW(ps, lr=1e-4, weight_decay=0, fused=True))
    for opt in (base, wrapped) * 3:
        opt.step()
    z0 = [wrapped.state[p]["soda_z0"] for p in ps]
    target = [torch.empty_like(t) for t in z0]
    times: dict[str, list[float]] = {"base": [], "wrapped": [], "copy": []}
    for _ in range(rounds):
        times["base"].append(seconds(base.step, device))
        times["wrapped"].append(seconds(wrapped.step, device))
        times["copy"].append(seconds(lambda: torch._foreach_copy_(target, z0), device))
    a, b, c = (statistics.median(t) for t in times.values())
    ratio = statistics.median(y / x for x, y, _ in zip(*times.values(), strict=True))
    copied = statistics.median(z / x for x, _, z in zip(*times.values(), strict=True))
    size = sum(p.nbytes for p in ps)
    return {
        "parameters": sum(p.numel() for p in ps),
        "base_ms": round(1e3 * a, 2),
        "wrapped_ms": round(1e3 * b, 2),
        "copy_ms": round(1e3 * c, 2),
        "added_percent": round(100 * (ratio - 1), 1),
        "copy_percent": round(100 * copied, 1),
        "added_state_over_parameters": (state_bytes(wrapped) - state_bytes(base)) / size,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--parameters", type=float, default=100e6)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    row = measure(int(args.parameters), args.device, args.rounds) | where(args.device)
    print(json.dumps(row, indent=1))
    if args.out:
        args.out.write_text(json.dumps(row, indent=1) + "\n")


if __name__ == "__main__":
    main()
