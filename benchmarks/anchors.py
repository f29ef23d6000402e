"""The cost of each anchor: the time that SODAWrapper adds to torch's fused AdamW, and the bytes.

    python -m benchmarks.anchors --rounds 15 --out benchmarks/results/anchors-cpu.json
    python -m benchmarks.anchors --rounds 20 --device cuda --out .../anchors-h200.json
    python -m benchmarks.anchors --docs

The parameters are those of a 124M GPT with a tied embedding and zero-initialised projections, as in
the paper. Steps of the bare and the wrapped base optimizer alternate, so that a busy machine slows
both. Times are medians. Seeds are the slowest anchor and get a third of the rounds.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import AdamW

from benchmarks.records import RESULTS, where
from sodaopt import SODAWrapper, anchors, init, memory
from tools.pages import DOCS, filled, markdown


class Gpt(nn.Module):
    """The parameters of a GPT. Only their shapes and initial values matter here."""

    def __init__(self, layers: int, width: int, vocab: int) -> None:
        super().__init__()
        self.head = nn.Linear(width, vocab, bias=False)
        for j in range(layers):
            for name in ("q", "k", "v", "out"):
                self.add_module(f"{name}{j}", nn.Linear(width, width, bias=False))
            self.add_module(f"up{j}", nn.Linear(width, 4 * width, bias=False))
            self.add_module(f"down{j}", nn.Linear(4 * width, width, bias=False))


def zero_projections(path: str, module: nn.Module) -> Any:
    """Return the rule that starts output projections at zero, as in the paper's model, or None."""
    return {"weight": init.constant(0.0)} if path.startswith(("out", "down")) else None


def signs(path: str, module: nn.Module) -> Any:
    bound = getattr(module, "in_features", 1) ** -0.5
    return zero_projections(path, module) or {"weight": init.sign(bound)}


def normals(path: str, module: nn.Module) -> Any:
    return zero_projections(path, module) or {"weight": init.normal(0.0, 0.02)}


def from_file(net: nn.Module, seeds: init.Seeds) -> Any:
    """Write z0 to a safetensors file without the package. The format is a header and the bytes."""
    path = Path(tempfile.mkdtemp()) / "z0.safetensors"
    header, data, at = {}, [], 0
    for name, p in net.named_parameters():
        raw = p.detach().cpu().contiguous().view(-1).view(torch.uint8)
        header[name] = {"dtype": "F32", "shape": list(p.shape), "data_offsets": [at, at + len(raw)]}
        at += len(raw)
        data.append(raw)
    text = json.dumps(header).encode()
    with path.open("wb") as f:
        f.write(len(text).to_bytes(8, "little") + text)
        for raw in data:
            f.write(raw.numpy().tobytes())
    return anchors.FromFile(path, net)


Rules = Callable[[str, nn.Module], Any]
POLICIES: dict[str, tuple[Rules, Callable[[nn.Module, init.Seeds], Any]]] = {
    "clone": (zero_projections, lambda net, seeds: anchors.Clone()),
    "bf16": (zero_projections, lambda net, seeds: "bf16"),
    "auto": (zero_projections, lambda net, seeds: "auto"),
    "auto, else bf16": (
        zero_projections,
        lambda net, seeds: anchors.Constant(anchors.Rounded()),
    ),
    "cpu": (zero_projections, lambda net, seeds: "cpu"),
    "file": (zero_projections, from_file),
    "seed, between": (zero_projections, lambda net, seeds: seeds),
    "seed, sign": (signs, lambda net, seeds: seeds),
    "seed, normal": (normals, lambda net, seeds: seeds),
}


def seconds(step: Callable[[], Any], device: str) -> float:
    if device == "cuda":
        torch.cuda.synchronize()
    start = time.perf_counter()
    step()
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - start


def measure(name: str, device: str, layers: int, rounds: int) -> dict[str, Any]:
    rules, anchor = POLICIES[name]
    net = Gpt(layers, 768, 50304).to(device)
    seeds = init.seeded_(net, 0, rules)
    for p in net.parameters():
        p.grad = torch.randn_like(p) * 1e-3
    base = AdamW(net.parameters(), lr=1e-4, weight_decay=0, fused=True)
    inner = AdamW(net.parameters(), lr=1e-4, weight_decay=0, fused=True)
    wrapped = SODAWrapper(inner, anchor=anchor(net, seeds))
    wrapped.step()  # captures z0 from the initial weights
    for opt in (base, wrapped):
        opt.step()
    times: dict[str, list[float]] = {"base": [], "wrapped": []}
    for _ in range(max(3, rounds // 3) if name.startswith("seed") else rounds):
        times["base"].append(seconds(base.step, device))
        times["wrapped"].append(seconds(wrapped.step, device))
    a, b = (statistics.median(times[k]) for k in ("base", "wrapped"))
    ratio = statistics.median(y / x for x, y in zip(*times.values(), strict=True))
    kept = memory(net, wrapped).state().get("soda_z0", 0)
    weights = sum(p.nbytes for p in net.parameters())
    return {
        "anchor": name,
        "base_ms": round(1e3 * a, 3),
        "added_ms": round(1e3 * (b - a), 3),
        "added_over_base": round(ratio - 1, 3),
        "device_bytes": 0 if name == "cpu" and device == "cuda" else kept,
        "kept_over_weights": round(kept / weights, 3),
        "moment_bytes": temporary_memory(base, wrapped) if device == "cuda" else None,
    }


def temporary_memory(base: AdamW, wrapped: SODAWrapper) -> int:
    """Return the device memory that the wrapper needs only during a step."""
    peaks = []
    for opt in (base, wrapped):
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        opt.step()
        torch.cuda.synchronize()
        peaks.append(torch.cuda.max_memory_allocated() - before)
    return max(0, peaks[1] - peaks[0])


PAGE = DOCS / "memory.md"


def table() -> str:
    """Return the results of every machine as markdown."""
    parts = []
    for file in sorted(RESULTS.glob("anchors-*.json")):
        r = json.loads(file.read_text())
        threads = f", {r['threads']} threads" if r["device"] == "CPU" else ""
        has_memory = any(x.get("moment_bytes") is not None for x in r["rows"])
        head = ["anchor", "bare step, ms", "added, ms", "added, %", "kept, x weights"]
        head += ["on device, MB", *(["and during a step, MB"] if has_memory else [])]
        lines = [head]
        for x in r["rows"]:
            line = [x["anchor"], f"{x['base_ms']:.2f}", f"{x['added_ms']:.2f}"]
            line += [f"{100 * x['added_over_base']:.0f}", f"{x['kept_over_weights']:.2f}"]
            line += [f"{x['device_bytes'] / 1e6:.0f}"]
            line += [f"{x['moment_bytes'] / 1e6:.0f}"] if has_memory else []
            lines.append(line)
        parts.append(
            f"{r['device']}{threads}, torch {r['torch']}, {r['parameters']:,} parameters"
            f" (`{r['command']}`):\n\n{markdown(lines)}"
        )
    return "\n\n".join(parts)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--docs", action="store_true", help="only write docs/memory.md")
    args = parser.parse_args()
    if args.docs:
        PAGE.write_text(filled(PAGE, "anchors", table()), encoding="utf-8")
        return
    rows = []
    for name in POLICIES:
        rows.append(measure(name, args.device, args.layers, args.rounds))
        print(json.dumps(rows[-1]), flush=True)
    result = {
        "command": f"python -m benchmarks.anchors --device {args.device} --rounds {args.rounds}",
        **where(args.device),
        "parameters": sum(p.numel() for p in Gpt(args.layers, 768, 50304).parameters()),
        "rows": rows,
    }
    if args.out:
        args.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
