"""`sodaopt bench`: measure one step of optimizers on the same parameters, side by side.

ms is the median over CUDA events around steps that follow each other without a pause (on a CPU:
over the clock). host_ms is the time until step() returns while the device has nothing to do, and
wall_ms waits for the device after each step. State and peak, the memory beyond it, are in units of
the parameters. Optimizers run in turn, so that all of them meet the same machine.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any

import torch
import tyro
from torch import Tensor, nn

from sodaopt import RECIPES, SODA, SODAWrapper, param_groups
from sodaopt._errors import unknown
from sodaopt.core.method import named

from .environment import environment
from .model import GPT, Shape
from .peers import PEERS, Build, adamw
from .presets import PRESETS

SHAPES = {"124m": Shape(), "0.9b": Shape(width=2048, depth=16)}
DEFAULT = ("adamw", "soda(adam)", "wrapped adamw", "muon", "scion", "soda_dagger")
COLUMNS = ("ms", "host_ms", "wall_ms", "state", "peak", "first_step_s")


@dataclass
class Bench:
    """Measure one step of optimizers over the parameters of a model."""

    optimizers: Annotated[
        tyro.conf.Positional[tuple[str, ...]], tyro.conf.arg(metavar="OPTIMIZER ...")
    ] = DEFAULT
    """Recipes such as muon, rows of the zoo such as lion and "soda(adam)", or "wrapped adamw". Rows
    run on all parameters. With "bf16 " before the name the parameters have 16 bits."""
    model: str = "124m"
    """124m, 0.9b, a preset of the lab, or the name or folder of a Hugging Face configuration."""
    against: tuple[str, ...] = ("torch",)
    """Libraries to compare with: torch, muon, pytorch_optimizer, schedulefree, lion-pytorch, and
    dion, whose source DION_PATH names."""
    device: str = "cuda" if torch.cuda.is_available() else "cpu"
    rounds: int = 30
    """Measured steps of each optimizer, after 8 others."""
    out: Path = Path("runs/bench")
    """Folder for bench.json and bench.svg."""

    def __post_init__(self) -> None:
        if self.rounds < 2:
            raise ValueError(f"--rounds must be at least 2, got {self.rounds}")

    def run(self) -> int:
        from rich.console import Console

        rows = []
        for name, build in self._builds().items():
            try:
                rows.append(self._measured(name, build))
            except ModuleNotFoundError as e:
                Console().print(f"skipped {name}: {e.name} is not installed", highlight=False)
        result = {
            "date": f"{datetime.now(UTC):%Y-%m-%d}", "model": self.model, "rounds": self.rounds,
            **environment(torch.device(self.device)), **ceilings(self.device), "rows": rows,
        }  # fmt: skip
        self.out.mkdir(parents=True, exist_ok=True)
        (self.out / "bench.json").write_text(json.dumps(result, indent=1) + "\n")
        Console().print(table(rows))
        draw(rows, self.out / "bench.svg")
        return 0

    def _builds(self) -> dict[str, Build]:
        builds: dict[str, Build] = {}
        for peer in self.against:
            if peer not in PEERS:
                raise ValueError(unknown("library", peer, PEERS))
            builds |= PEERS[peer]
        return builds | {name: ours(name.removeprefix("bf16 ")) for name in self.optimizers}

    def _measured(self, name: str, build: Build) -> dict[str, Any]:
        dtype = torch.bfloat16 if name.startswith("bf16 ") else torch.float32
        with torch.device(self.device):
            model = parameters(self.model).to(dtype)
        row = measure(model, build, self.rounds, self.device)
        if self.device == "cuda":
            torch.cuda.empty_cache()
        return {"optimizer": name, **row}


def ours(name: str) -> Build:
    """Return the function that builds our optimizer with this name."""
    if name == "wrapped adamw":
        return lambda model: SODAWrapper(adamw(model))
    if name in RECIPES:
        return lambda model: SODA(param_groups(model, name), 1e-4)
    method = named(name)
    return lambda model: SODA(model.parameters(), 1e-4, method)


def parameters(name: str) -> nn.Module:
    """A model with the parameters to step."""
    if name in SHAPES:
        return GPT(SHAPES[name])
    if p := PRESETS.get(name):
        return GPT(Shape(p.vocab or 50304, p.width, p.depth, p.head_dim))
    from transformers import AutoConfig, AutoModelForCausalLM

    auto: Any = AutoModelForCausalLM
    made: nn.Module = auto.from_config(AutoConfig.from_pretrained(name))
    return made


# -- measuring ------------------------------------------------------------------------------------


def measure(model: nn.Module, build: Build, rounds: int, device: str) -> dict[str, Any]:
    for p in model.parameters():
        p.grad = torch.randn_like(p) * 1e-3
    opt, wait = build(model), torch.cuda.synchronize if device == "cuda" else _nothing
    first = clocked(opt.step, wait)
    for _ in range(7):
        opt.step()
    wait()
    weights, peak = sum(p.nbytes for p in model.parameters()), None
    if device == "cuda":
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        times = events(opt.step, rounds)
        peak = round((torch.cuda.max_memory_allocated() - before) / weights, 3)
    else:
        times = [1e3 * clocked(opt.step, wait) for _ in range(rounds)]
    low, middle, high = statistics.quantiles(times, n=4)
    both = [(clocked(opt.step, _nothing), clocked(wait, _nothing)) for _ in range(rounds)]
    return {
        "ms": round(middle, 3),
        "quartiles": [round(low, 3), round(high, 3)],
        "host_ms": round(1e3 * statistics.median(host for host, _ in both), 3),
        "wall_ms": round(1e3 * statistics.median(host + rest for host, rest in both), 3),
        "state": round(state_bytes(opt.state) / weights, 2),
        "peak": peak,
        "first_step_s": round(first, 2),
    }


def _nothing() -> None:
    pass


def clocked(f: Callable[[], Any], wait: Callable[[], Any]) -> float:
    began = time.perf_counter()
    f()
    wait()
    return time.perf_counter() - began


def events(step: Callable[[], Any], rounds: int) -> list[float]:
    """The milliseconds of each call on the device."""
    event: Any = torch.cuda.Event
    marks = [event(enable_timing=True) for _ in range(rounds + 1)]
    marks[0].record()
    for mark in marks[1:]:
        step()
        mark.record()
    torch.cuda.synchronize()
    return [a.elapsed_time(b) for a, b in pairwise(marks)]


def state_bytes(state: Any) -> int:
    """The bytes of all tensors, without the numbers on the host."""
    if isinstance(state, Tensor):
        return state.nbytes if state.dim() else 0
    return sum(map(state_bytes, state.values())) if hasattr(state, "values") else 0


def ceilings(device: str) -> dict[str, Any]:
    """The rates that this GPU reaches: a large copy, and a large fp16 product."""
    if device != "cuda":
        return {}
    x = torch.randn(1 << 30, device=device)
    y, a = torch.empty_like(x), torch.randn(8192, 8192, device=device).half()
    copy = statistics.median(events(lambda: y.copy_(x), 10))
    product = statistics.median(events(lambda: a @ a, 10))
    return {
        "copy_tb_per_s": round(2 * x.nbytes / copy / 1e9, 2),
        "product_tflop_per_s": round(2 * 8192**3 / product / 1e9),
    }


# -- showing --------------------------------------------------------------------------------------


def table(rows: list[dict[str, Any]]) -> Any:
    from rich.table import Table

    shown = Table("optimizer", *COLUMNS)
    for row in rows:
        cells = ("" if row[c] is None else f"{row[c]:.2f}" for c in COLUMNS)
        shown.add_row(row["optimizer"], *cells)
    return shown


def draw(rows: list[dict[str, Any]], path: Path) -> None:
    """Draw the time of a step as one bar for each optimizer."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    from sodaopt._figures import STYLE

    from .report.figures import COLOURS

    theirs = {name for builds in PEERS.values() for name in builds}
    with rc_context(STYLE):
        figure = Figure(figsize=(6.4, 0.6 + 0.3 * len(rows)), layout="constrained")
        ax = figure.add_subplot()
        names, ms = [row["optimizer"] for row in rows], [row["ms"] for row in rows]
        bars = ax.barh(names, ms, color=[COLOURS[6 if name in theirs else 0] for name in names])
        ax.bar_label(bars, fmt="%.2f", padding=3, fontsize=8)
        ax.invert_yaxis()
        ax.grid(False, axis="y")
        ax.set_xlabel("milliseconds of a step")
        figure.savefig(path, metadata={"Date": None})
