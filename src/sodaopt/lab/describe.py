"""Describe runs before they start: size, plan, memory, schedule, data, folder and time."""

import math
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from statistics import median

import torch

from sodaopt.layers.plan import plan
from sodaopt.layers.recipes import soda
from sodaopt.memory import memory, size

from . import records
from .data import Dataset, open_data
from .data.corpus import EMBEDDED, EMBEDDED_VOCAB
from .data.shards import DataError
from .environment import PEAKS, device_name, peak
from .execution import Execution
from .job import Job, ResolvedJob, resolve
from .model import GPT
from .optimizers import PULLS, build, recipe
from .presets import preset
from .progress import short
from .report.text import duration
from .train import DATA
from .variants import tokens_per_second

RUNS = Path("runs")
SHARD = 100_000_000
"""Tokens in a downloaded shard."""
CPU_SPEED = 25e9
"""FLOP/s of one CPU thread that trains the preset nano, roughly."""
GPU_SHARE = 0.4
"""Share of a GPU's peak that the larger presets reach, roughly."""


def describe(resolved: ResolvedJob) -> str:
    """Return two lines that describe a run."""
    s, batch = resolved.shape, resolved.batch
    return (
        f"{resolved.name}, lr {resolved.settings.lr:.4g}: {short(s.parameters)} parameters "
        f"(width {s.width}, depth {s.depth}, vocabulary {s.vocab}) on {resolved.job.dataset}\n"
        f"{resolved.steps} steps of {batch} x {s.context} tokens = {short(resolved.tokens)} tokens "
        f"({resolved.horizon:.3g}x Chinchilla), {short(resolved.tokens * s.flops_per_token)}FLOP"
    )


def without_data(job: Job) -> tuple[ResolvedJob, Dataset | None]:
    """Resolve a job even if its data are not on this machine. Return it with its data or None.

    This writes no files.
    """
    data = None
    if job.dataset != EMBEDDED or (DATA / EMBEDDED).exists():
        with suppress(DataError):
            data = open_data(job.dataset, DATA)
    known = EMBEDDED_VOCAB if job.dataset == EMBEDDED else preset(job.preset).vocab
    return resolve(job, data.vocab if data else known or EMBEDDED_VOCAB), data


def epochs(resolved: ResolvedJob, data: Dataset) -> float:
    """Return how often the run reads its training data."""
    return resolved.tokens / data.train_tokens


def repeats(resolved: ResolvedJob, data: Dataset) -> str:
    """Return a sentence if the run reads its data more than once, else an empty string."""
    count = epochs(resolved, data)
    if count <= 1:
        return ""
    return (
        f"{data.name} has {short(data.train_tokens)} training tokens: each run reads them "
        f"{count:.3g} times"
    )


def outline(resolved: ResolvedJob, data: Dataset | None, execution: Execution) -> str:
    """Return the whole description of a run: plan, memory, schedule, data and time."""
    parts = [describe(resolved), "", _layers(resolved), "", _schedule(resolved)]
    parts += [_data(resolved, data), time_of([resolved], execution)]
    return "\n".join(parts)


def summary(todo: Sequence[ResolvedJob], folders: Sequence[Path], execution: Execution) -> str:
    """Return one line for each run of a command, and their time."""
    lines = [
        f"{folder}  {r.name}, seed {r.job.seed}, lr {r.settings.lr:.4g}, wd {r.settings.wd:g}"
        for r, folder in zip(todo, folders, strict=True)
    ]
    return "\n".join([*lines, f"{len(todo)} runs. {time_of(todo, execution)}"])


def gpu_cost(todo: Sequence[ResolvedJob], gpu: str, mfu: float, price: float) -> str:
    """Return the hours of one GPU for all runs, their price in USD, and the command for the data.

    mfu: share of the GPU's peak
    price: USD per GPU hour
    """
    total = sum(r.tokens * r.shape.flops_per_token for r in todo)
    hours = total / (PEAKS[gpu] * mfu) / 3600
    lines = [
        f"{short(total)}FLOP take {hours:,.1f} hours of one {gpu} at {mfu:.0%} of its peak, "
        f"and cost {hours * price:,.0f} USD at {price:g} USD an hour"
    ]
    for name in dict.fromkeys(r.job.dataset for r in todo):
        if "fineweb" in name:
            shards = max(shards_needed(r) for r in todo if r.job.dataset == name)
            lines.append(f"data: sodaopt data download {name} {shards}")
    return "\n".join(lines)


def _layers(resolved: ResolvedJob) -> str:
    """Return the layer plan and the memory, computed on the meta device."""
    with torch.device("meta"):
        model = GPT(resolved.shape)
    rules = recipe(resolved.name, resolved.settings)
    table = plan(model, soda(rules, PULLS.get(resolved.name.pull or "", ())))
    found = memory(model, build(resolved.name, model, resolved.settings))
    weights = sum(row.weight for row in found.rows)
    kinds = ", ".join(f"{name} {size(n)}" for name, n in found.state().items() if n >= 1000)
    return (
        f"{table}\n\nmemory: weights {size(weights)}, gradients {size(weights)}, optimizer state "
        f"{size(found.total()) or '0 B'} ({kinds or 'counters'}), without activations"
    )


def _schedule(resolved: ResolvedJob) -> str:
    up, down = resolved.warmup, resolved.warmdown
    rise = f"rises for {up} steps to" if up else "starts at"
    more = resolved.eval_late != resolved.eval_every
    late = f", and every {resolved.eval_late} in the last tenth" if more else ""
    return (
        f"schedule: lr {rise} {resolved.settings.lr:.4g}, and falls to zero over the last {down} "
        f"of {resolved.steps} steps. Validation every {resolved.eval_every} steps{late}"
    )


def _data(resolved: ResolvedJob, data: Dataset | None) -> str:
    name = resolved.job.dataset
    if data is not None:
        have = f"data: {name}, {short(data.train_tokens)} training tokens"
        return f"{have}, {epochs(resolved, data):.3g} epochs"
    if name == EMBEDDED:
        return f"data: {name}, which is part of the package"
    shards = f" One epoch needs {shards_needed(resolved)} shards." if "fineweb" in name else ""
    return f"data: {name} is not in {DATA}.{shards} The vocabulary of the preset is assumed"


def shards_needed(resolved: ResolvedJob) -> int:
    """Return the number of downloaded shards that the run reads once."""
    return math.ceil(resolved.tokens / SHARD)


# -- time -----------------------------------------------------------------------------------------


def time_of(todo: Sequence[ResolvedJob], execution: Execution) -> str:
    """Return a sentence that estimates the time of the runs, one after the other."""
    device = execution.target()
    speed, how = _speed(todo[0], device)
    if speed is None:
        return f"time: not known for {device_name(device)}"
    total = sum(r.tokens * r.shape.flops_per_token for r in todo)
    seconds = total / (speed * todo[0].shape.flops_per_token)
    return f"time: about {duration(seconds)} one after the other, on {device_name(device)} ({how})"


def _speed(resolved: ResolvedJob, device: torch.device) -> tuple[float | None, str]:
    """Return the tokens per second, or None if unknown, and the source of this number."""
    known = [speed for run in _alike(resolved, device) if (speed := tokens_per_second(run))]
    if known:
        return median(known), "from earlier runs of this size"
    each = resolved.shape.flops_per_token
    if device.type == "cpu":
        return CPU_SPEED / each, "assuming 25 GFLOP/s"
    most = peak(device)
    return (GPU_SHARE * most / each, "assuming 40 % of its peak") if most else (None, "")


def _alike(resolved: ResolvedJob, device: torch.device) -> list[records.Run]:
    """Return up to ten finished runs in runs/NAME/JOB with this model, batch and device."""
    wanted = resolved.record()
    found: list[records.Run] = []
    for path in sorted(RUNS.glob(f"*/*/{records.FILE}")):
        with suppress(OSError, ValueError):
            run = records.read(path.parent)
            same = all(run.job.get(n) == wanted[n] for n in ("width", "depth", "context", "batch"))
            here = run.head.get("environment", {}).get("device") == device_name(device)
            found += [run] if same and here and run.finished else []
        if len(found) == 10:
            break
    return found
