"""`sodaopt bench`: measure one step of several optimizers on the same parameters.

    ms        median time of consecutive steps, by CUDA events (on a CPU, by the clock)
    host_ms   median time until step() returns, when the device is idle before the step
    wall_ms   median time until the device has finished that step
    state     bytes of the optimizer state, as a multiple of the bytes of the parameters
    peak      bytes that a step needs temporarily, as a multiple of the bytes of the parameters

All optimizers run one after another in one process, so that they can be compared.
"""

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

from sodaopt import SODA, SODAWrapper, param_groups
from sodaopt._errors import unknown
from sodaopt.core.method import named
from sodaopt.layers.recipes import rules
from sodaopt.layers.table import aligned

from . import cluster
from .decoders import CONFIGS, decoder
from .environment import environment
from .model import GPT, Shape
from .peers import PEERS, Build, adamw
from .presets import PRESETS

SHAPES = {
    "1m": Shape(2048, 128, 4),
    "6m": Shape(4096, 256, 6),
    "30m": Shape(8192, 512, 8),
    "124m": Shape(),
    "350m": Shape(width=1024, depth=24),
    "0.9b": Shape(width=2048, depth=16),
    "3b": Shape(width=2560, depth=36),
}
DEFAULT = ("adamw", "zoo.soda(adam)", "wrapped adamw", "muon", "scion", "soda_dagger")
COLUMNS = {
    "ms": "ms", "floor": "floor_ms", "host": "host_ms", "state": "state", "peak": "peak",
    "first, s": "first_step_s",
}  # fmt: skip


@dataclass
class Bench:
    """Measure one step of each optimizer on the parameters of a model."""

    optimizers: Annotated[
        tyro.conf.Positional[tuple[str, ...]], tyro.conf.arg(metavar="OPTIMIZER ...")
    ] = DEFAULT
    """Recipes such as muon and "soda(muon)", optimizers of the zoo for all parameters such as
    zoo.lion and "zoo.soda(adam)", or "wrapped adamw". "bf16 " before a name: parameters of 16 bits.
    "graph " before a recipe: its step is replayed as a CUDA graph."""
    model: tuple[str, ...] = ("124m",)
    """1m, 6m, 30m, 124m, 350m, 0.9b, 3b, presets of `sodaopt train`, or names or folders of Hugging
    Face configurations. With several models, the chart shows the time of a step against the number
    of parameters."""
    against: tuple[str, ...] = ("torch",)
    """Libraries to compare with: torch, muon, pytorch_optimizer, schedulefree, lion-pytorch,
    gram-newton-schulz, heavyball, and dion, whose source is in the folder $DION_PATH."""
    device: str = "cuda" if torch.cuda.is_available() else "cpu"
    """cuda or cpu."""
    cluster: str | None = None
    """Predict the step on a cluster instead of measuring it: 8x128 is 8 GPUs in each of 128 nodes.
    Each OPTIMIZER must then be a recipe, and adamw is always the first row. The model may also be
    llama-7b, llama-70b, llama-405b, moe-30b or moe-1t."""
    rounds: int = 30
    """Measured steps of each optimizer, after 8 steps that are not measured."""
    out: Path = Path("runs/bench")
    """Folder for bench.json and bench.svg."""

    def __post_init__(self) -> None:
        if self.rounds < 2:
            raise ValueError(f"--rounds must be at least 2, got {self.rounds}")

    def run(self) -> int:
        from rich.console import Console

        if self.cluster:
            return self._predicted(self.cluster)
        rates, rows = ceilings(self.device), []
        for model in self.model:
            for name, build in self._builds().items():
                try:
                    rows.append({"model": model, **self._measured(model, name, build, rates)})
                except ModuleNotFoundError as e:
                    Console().print(f"skipped {name}: {e.name} is not installed", highlight=False)
                self._write(rows, rates)  # so that a later failure does not lose these numbers
        Console().print(table(rows))
        (draw if len(self.model) == 1 else draw_scaling)(rows, self.out / "bench.svg")
        return 0

    def _write(self, rows: list[dict[str, Any]], rates: dict[str, Any]) -> None:
        result = {
            "date": f"{datetime.now(UTC):%Y-%m-%d}", "rounds": self.rounds,
            **environment(torch.device(self.device)), **rates, "rows": rows,
        }  # fmt: skip
        self.out.mkdir(parents=True, exist_ok=True)
        (self.out / "bench.json").write_text(json.dumps(result, indent=1) + "\n")

    def _predicted(self, text: str) -> int:
        wanted = cluster.METHODS if self.optimizers == DEFAULT else self.optimizers
        methods = tuple(dict.fromkeys(("adamw", *wanted)))
        for model in self.model:
            found = cluster.rows(without_memory(model), cluster.cluster(text), methods)
            print("\n".join(aligned(cluster.table(found))))
        return 0

    def _builds(self) -> dict[str, Build]:
        if self.device != "cuda" and any("graph " in name for name in self.optimizers):
            raise ValueError("'graph ...' needs a GPU: use --device cuda")
        builds: dict[str, Build] = {}
        for peer in self.against:
            if peer not in PEERS:
                raise ValueError(unknown("library", peer, PEERS))
            builds |= PEERS[peer]
        return builds | {name: ours(name.removeprefix("bf16 ")) for name in self.optimizers}

    def _measured(
        self, model: str, name: str, build: Build, rates: dict[str, float]
    ) -> dict[str, Any]:
        dtype = torch.bfloat16 if name.startswith("bf16 ") else torch.float32
        with torch.device(self.device):
            net = parameters(model).to(dtype)
        opt = build(net)
        row = measure(net, opt, self.rounds, self.device)
        if rates and isinstance(opt, SODA):
            row["floor_ms"] = round(floor(opt, **rates), 3)
        if self.device == "cuda":
            torch.cuda.empty_cache()
        return {"optimizer": name, "parameters": sum(p.numel() for p in net.parameters()), **row}


def ours(name: str) -> Build:
    """Return the function that builds our optimizer with this name."""
    if (graphed := name.removeprefix("graph ")) != name:
        return lambda model: Graphed(model, graphed)
    if name == "wrapped adamw":
        return lambda model: SODAWrapper(adamw(model))
    if name.startswith("zoo."):
        method = named(name.removeprefix("zoo."))
        return lambda model: SODA(model.parameters(), 1e-4, method)
    recipe = rules(name)
    return lambda model: SODA(param_groups(model, recipe), 1e-4)


class Graphed:
    """A recipe whose step is replayed as a CUDA graph, from the third step on."""

    def __init__(self, model: nn.Module, recipe: str) -> None:
        lr = torch.tensor(1e-4, device="cuda")
        self.opt = SODA(param_groups(model, recipe), lr, capturable=True)
        self.graph, self.state, self.steps = torch.cuda.CUDAGraph(), self.opt.state, 0

    def step(self) -> None:
        self.steps += 1
        if self.steps < 3:
            self.opt.step()
            return
        if self.steps == 3:
            with torch.cuda.graph(self.graph):
                self.opt.step()
        self.graph.replay()


def without_memory(name: str) -> nn.Module:
    """Return a model on the meta device: a decoder of `decoders.py`, or a model of `parameters`."""
    with torch.device("meta"):
        return decoder(name) if name in CONFIGS else parameters(name)


def parameters(name: str) -> nn.Module:
    """Return the model with this name: a size, a preset, or a Hugging Face configuration."""
    if name in SHAPES:
        return GPT(SHAPES[name])
    if p := PRESETS.get(name):
        return GPT(Shape(p.vocab or 50304, p.width, p.depth, p.head_dim))
    from transformers import AutoConfig, AutoModelForCausalLM

    auto: Any = AutoModelForCausalLM
    made: nn.Module = auto.from_config(AutoConfig.from_pretrained(name))
    return made


# -- measuring ------------------------------------------------------------------------------------


def measure(model: nn.Module, opt: Any, rounds: int, device: str) -> dict[str, Any]:
    """Measure `rounds` steps with random gradients. Return the numbers of a row."""
    for p in model.parameters():
        p.grad = torch.randn_like(p) * 1e-3
    wait = torch.cuda.synchronize if device == "cuda" else _nothing
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
    """Call f and then `wait`. Return the seconds that both took."""
    began = time.perf_counter()
    f()
    wait()
    return time.perf_counter() - began


def events(step: Callable[[], Any], rounds: int) -> list[float]:
    """Call `step` `rounds` times. Return the milliseconds that each call took on the device."""
    event: Any = torch.cuda.Event
    recorded = [event(enable_timing=True) for _ in range(rounds + 1)]
    recorded[0].record()
    for after in recorded[1:]:
        step()
        after.record()
    torch.cuda.synchronize()
    return [a.elapsed_time(b) for a, b in pairwise(recorded)]


def state_bytes(state: Any) -> int:
    """Return the bytes of all tensors in the state, without 0-D tensors such as step counts."""
    if isinstance(state, Tensor):
        return state.nbytes if state.dim() else 0
    return sum(map(state_bytes, state.values())) if hasattr(state, "values") else 0


def floor(opt: SODA, copy_tb_per_s: float, product_tflop_per_s: float) -> float:
    """Return the milliseconds that the bytes and products of a step take at the measured rates.

    Every tensor is read once, and every tensor except gradients and z0 is written once. Only half
    of a symmetric product is counted, and each polynomial is counted in its cheaper form.
    """
    moved, operations = 0.0, 0.0
    for group in opt.param_groups:
        geometry: Any = opt.methods[group["method"]].geometry
        for p in group["params"]:
            state = {name: t for name, t in opt.state[p].items() if t.dim()}
            moved += 3 * p.nbytes + sum(t.nbytes * (1 + (n != "z0")) for n, t in state.items())
            if geometry.kernel == "polar":
                f, polar = geometry.norm.view(p.shape), geometry.norm.polar
                s, l = sorted((f.o, f.i * f.taps))
                n, blocks = len(polar.steps), len(polar.restarts) + 1
                plain = n * (3 * s * s * l + s**3)
                gram = blocks * 3 * s * s * l + (4 * n - 3 * blocks) * s**3
                operations += f.n * min(plain, gram if polar.restarts else plain)
    return moved / copy_tb_per_s / 1e9 + operations / product_tflop_per_s / 1e9


def ceilings(device: str) -> dict[str, Any]:
    """Return the rates of this GPU in a large copy and a large fp16 product. A CPU has none."""
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
    """Return the rows as a table for the terminal."""
    from rich.table import Table

    shown = Table("optimizer", "model", *COLUMNS)
    for row in rows:
        cells = ("" if row.get(c) is None else f"{row[c]:.2f}" for c in COLUMNS.values())
        shown.add_row(row["optimizer"], row["model"], *cells)
    return shown


def draw(rows: list[dict[str, Any]], path: Path) -> None:
    """Draw the time of a step as one bar for each optimizer."""
    from matplotlib import style
    from matplotlib.figure import Figure

    from .report.figures import COLOURS

    theirs = {name for builds in PEERS.values() for name in builds}
    with style.context("sodaopt.figures"):
        figure = Figure(figsize=(6.4, 0.6 + 0.3 * len(rows)), layout="constrained")
        ax = figure.add_subplot()
        names, ms = [row["optimizer"] for row in rows], [row["ms"] for row in rows]
        bars = ax.barh(names, ms, color=[COLOURS[6 if name in theirs else 0] for name in names])
        ax.bar_label(bars, fmt="%.2f", padding=3, fontsize=8)
        ax.invert_yaxis()
        ax.grid(False, axis="y")
        ax.set_xlabel("milliseconds of a step")
        figure.savefig(path, metadata={"Date": None})


def draw_scaling(rows: list[dict[str, Any]], path: Path) -> None:
    """Draw the time of a step against the number of parameters, and our floors as dotted lines."""
    from matplotlib import style
    from matplotlib.figure import Figure

    from .report.figures import COLOURS

    theirs = {name for builds in PEERS.values() for name in builds}
    with style.context("sodaopt.figures"):
        figure = Figure(figsize=(6.4, 4.2), layout="constrained")
        ax = figure.add_subplot()
        for n, name in enumerate(dict.fromkeys(row["optimizer"] for row in rows)):
            its = [row for row in rows if row["optimizer"] == name]
            sizes, colour = [row["parameters"] for row in its], COLOURS[n % len(COLOURS)]
            line = "--" if name in theirs else "-"
            ax.plot(sizes, [row["ms"] for row in its], line, marker="o", color=colour, label=name)
            if all("floor_ms" in row for row in its):
                ax.plot(sizes, [row["floor_ms"] for row in its], ":", color=colour, linewidth=1)
        ax.set(xscale="log", yscale="log", xlabel="parameters", ylabel="milliseconds of a step")
        ax.legend(fontsize=8)
        figure.savefig(path, metadata={"Date": None})
