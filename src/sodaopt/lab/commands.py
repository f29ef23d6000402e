"""`sodaopt train`, `compare`, `sweep` and `sample`."""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Annotated, Any

import torch
import tyro

from . import records
from .board import console, run_rows
from .checkpoint import FOLDER, WEIGHTS, found, load, newest
from .data import open_data
from .execution import NO_MEMORY, Execution
from .job import Common, Job, Plan, resolve
from .labels import number
from .model import GPT
from .optimizers import averaged, build, parse
from .progress import progress, short
from .records import DIVERGED, FINISHED, Run
from .report import comparison_table, write_report
from .sample import generate
from .sweep import grid, rows
from .train import DATA, train

INTERRUPTED = 130
"""The exit code of a command that Ctrl-C ended."""

Flat = tyro.conf.arg(name="")


@dataclass
class Train:
    """Train one model. The same command again goes on where it was stopped."""

    job: Annotated[Job, Flat] = field(default_factory=Job)
    execution: Annotated[Execution, Flat] = field(default_factory=Execution)
    out: Path | None = None
    """Folder of the run; by default one under runs/train that is named after its settings."""
    dry_run: bool = False
    """Only say what would be done."""

    def run(self) -> int:
        plan = resolve(self.job, open_data(self.job.dataset, DATA).vocab)
        folder = self.out or Path("runs/train") / plan.key
        lone = int(os.environ.get("RANK", "0")) == 0
        if lone:
            print(describe(plan))
        if self.dry_run:
            return 0
        before = records.begun(folder) if lone else None
        done = before is not None and before.done
        shown = progress(plan.steps) if lone and not done else None
        try:
            run = train(self.job, folder, self.execution, shown)
        except torch.OutOfMemoryError:
            raise ValueError(NO_MEMORY) from None
        if not lone:
            return 0
        if done and not run.finished:
            print(f"{folder} has ended before: {(run.end or {}).get('reason', DIVERGED)}")
        return self._report(run, folder)

    def _report(self, run: Run, folder: Path) -> int:
        end = run.end or {}
        if end.get("status") == FINISHED:
            print(f"validation loss {end['val_loss']:.4f} after {end['step']} steps")
            for sample in run.of("sample")[-1:]:
                print(f"\n{sample['text']}\n")
            print(f"report: {write_report([run], folder / 'report.html', str(run.optimizer))}")
            return 0
        return 1 if end.get("status") == DIVERGED else INTERRUPTED


def describe(plan: Plan) -> str:
    """What a run will do, in two lines."""
    s, batch = plan.shape, plan.batch
    return (
        f"{plan.name}, lr {plan.settings.lr:.4g}: {short(s.parameters)} parameters "
        f"(width {s.width}, depth {s.depth}, vocabulary {s.vocab}) on {plan.job.dataset}\n"
        f"{plan.steps} steps of {batch} x {s.context} tokens = {short(plan.tokens)} tokens "
        f"({plan.horizon:.3g}x Chinchilla), {short(plan.tokens * s.flops_per_token)}FLOP"
    )


@dataclass
class Many:
    """What `compare` and `sweep` share."""

    optimizers: tyro.conf.Positional[tuple[str, ...]]
    """Names such as muon "soda(muon)" soda_dagger adamw; the first is what the others are
    compared with."""
    common: Annotated[Common, Flat] = field(default_factory=Common)
    execution: Annotated[Execution, Flat] = field(default_factory=Execution)
    workers: int | None = None
    """Processes that run at a time: by default one for each CPU core, or one for each GPU."""
    out: Path | None = None
    """Where the runs and report.html go: runs/NAME."""
    title: str = ""

    def __post_init__(self) -> None:
        for name in self.optimizers:
            parse(name)
        if self.workers is not None and self.workers < 1:
            raise ValueError(f"workers must be at least 1, got {self.workers}")

    def carry_out(self, jobs: Sequence[Job], out: Path, title: str) -> int:
        """Run what is left of the jobs and show all of them."""
        board = console()
        vocab = open_data(self.common.data or jobs[0].dataset, DATA).vocab
        workers, execution = self._placed(len(jobs))
        todo = rows(jobs, out, execution, vocab)
        failed = run_rows(todo, workers, board)
        runs = [run for row in todo if (run := row.run()) is not None]
        if any(run.of("val") for run in runs):
            board.print(comparison_table(runs))
            board.print(
                f"report: {write_report(runs, out / 'report.html', title, keep=True)}",
                highlight=False,
            )
        errors = [o for o in failed if o.error]
        if failed:
            board.print(f"{len(failed)} of {len(todo)} runs are not done: the same command goes on")
        return 1 if errors else INTERRUPTED if failed else 0

    def _placed(self, count: int) -> tuple[int, Execution]:
        """How many at a time, and the threads of each."""
        cpu = self.execution.target().type == "cpu"
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1
        most = cores if cpu else max(1, self.execution.gpus())
        workers = self.workers or min(most, count)
        threads = self.execution.threads or (max(1, cores // workers) if cpu else None)
        return workers, replace(self.execution, threads=threads)


@dataclass
class Compare(Many):
    """Train several optimizers on the same data from the same start, and compare them."""

    seeds: int = 3
    """How many seeds each one is trained with."""

    def run(self) -> int:
        if not self.optimizers or self.seeds < 1:
            raise ValueError("name at least one optimizer, and train it with at least one seed")
        jobs = [
            Job(**plain(self.common), optimizer=name, seed=seed)
            for seed in range(self.seeds)
            for name in self.optimizers
        ]
        names = " vs ".join(self.optimizers)
        return self.carry_out(jobs, self.out or Path("runs/compare"), self.title or names)


def plain(common: Common) -> dict[str, Any]:
    return {f.name: getattr(common, f.name) for f in fields(common)}


@dataclass
class Sweep(Many):
    """Train every combination of settings. Finished rows are kept, so a sweep can be stopped,
    resumed and extended."""

    over: tyro.conf.UseAppendAction[tuple[str, ...]] = ()
    """A setting and its values: lr=2^-12..2^-8 (powers of two), wd=0,0.1,0.2, horizon=1x,4x,
    fade=0.6:0.9,0.8:1."""
    seeds: tuple[int, ...] = (0,)

    def run(self) -> int:
        if not self.optimizers:
            raise ValueError("name at least one optimizer, such as muon")
        if not self.seeds:
            raise ValueError("name at least one seed, such as --seeds 0 1")
        over: dict[str, list[Any]] = {}
        for name, values in map(axis, self.over):
            over[name] = list(dict.fromkeys([*over.get(name, []), *values]))
        jobs = [
            job
            for name in self.optimizers
            for job in grid(Job(**plain(self.common), optimizer=name), self._axes(name, over))
        ]
        title = self.title or f"{' vs '.join(self.optimizers)} over {', '.join(over) or 'seeds'}"
        return self.carry_out(jobs, self.out or Path("runs/sweep"), title)

    def _axes(self, name: str, over: dict[str, list[Any]]) -> dict[str, Sequence[Any]]:
        """Without the weight decay of an optimizer that has none: it is one line in the plot."""
        kind = parse(name)
        decays = kind.spec.decays and not kind.anchored
        axes: dict[str, Sequence[Any]] = {k: v for k, v in over.items() if k != "wd" or decays}
        return axes if "seed" in axes else axes | {"seed": self.seeds}


def axis(text: str) -> tuple[str, list[Any]]:
    """'lr=2^-12..2^-8' -> ("lr", [2**-12, ..., 2**-8]); 'wd=0,0.1' -> ("wd", [0.0, 0.1])"""
    name, equals, values = text.partition("=")
    name = name.strip().replace("-", "_")
    kinds = {f.name: str(f.type) for f in fields(Job) if f.name != "optimizer"}
    if not equals or not values or name not in kinds:
        known = ", ".join(sorted(kinds))
        raise ValueError(f"SETTING=VALUE,VALUE,... is needed with one of {known}; got {text!r}")
    kind = kinds[name]
    if ".." in values and "str" not in kind:  # a folder may have dots
        return name, [_value(kind, str(power)) for power in _powers(values)]
    return name, [_value(kind, part.strip()) for part in values.split(",")]


def _powers(text: str) -> list[float]:
    begin, _, end = text.partition("..")
    ends = sorted((number(begin), number(end)))
    found = [math.frexp(value) for value in ends]  # (0.5, e + 1) for 2^e
    if any(part != 0.5 for part, _ in found):
        raise ValueError(f"a range goes over powers of two, such as 2^-12..2^-8; got {text!r}")
    return [2.0**e for e in range(found[0][1] - 1, found[1][1])]


def _value(kind: str, text: str) -> Any:
    if "str" in kind:
        return text
    if "tuple" in kind:
        return tuple(number(part) for part in text.split(":"))
    value = number(text)
    if "float" in kind:
        return value
    if not value.is_integer():
        raise ValueError(f"a whole number is needed, got {text!r}")
    return int(value)


@dataclass
class Sample:
    """Text from a trained model."""

    folder: tyro.conf.Positional[Path]
    """Folder of a run: it holds run.jsonl."""
    prompt: str = "The people of the United States"
    tokens: int = 200
    temperature: float = 0.8
    """0 takes the likeliest token each time."""
    top_k: int = 50
    seed: int = 0
    count: int = 1
    """How many texts."""

    def __post_init__(self) -> None:
        counts = self.top_k, self.tokens, self.count
        if not 0 <= self.temperature < math.inf or min(counts) < 1:
            raise ValueError("tokens, count and top_k must be at least 1, temperature at least 0")

    def run(self) -> int:
        runs = records.find([self.folder])
        if len(runs) != 1:
            names = ", ".join(str(run.folder) for run in runs[:5]) or "none"
            raise ValueError(f"name one run; {self.folder} holds {len(runs)}: {names}")
        model, data = restore(runs[0])
        for j in range(self.count):
            print(
                generate(
                    model, data.tokenizer(), self.prompt, tokens=self.tokens,
                    temperature=self.temperature, top_k=self.top_k, seed=self.seed + j,
                )
            )  # fmt: skip
        return 0


def restore(run: Run) -> tuple[GPT, Any]:
    """The model of a run as far as it was trained, and its data."""
    data = open_data(str(run.job["data"]), DATA)
    plan = resolve(job_of(run), data.vocab)
    model = GPT(plan.shape)
    if (run.folder / WEIGHTS).exists():
        model.load_state_dict(load(run.folder / WEIGHTS))
        return model, data
    best = newest(found(run.folder / FOLDER), lambda text: print(text, file=sys.stderr))
    if best is None:
        raise ValueError(f"{run.folder} has neither weights nor a sound checkpoint yet")
    _, state = best
    model.load_state_dict(state["model"])
    opt = build(plan.name, model, plan.settings)
    opt.load_state_dict(state["optimizer"])
    with averaged(opt), torch.no_grad():
        x = {name: value.clone() for name, value in model.state_dict().items()}
    model.load_state_dict(x)
    return model, data


def job_of(run: Run) -> Job:
    """The job that a run's record describes in full."""
    r = run.job
    names = ("optimizer", "preset", "data", "seed", "lr", "wd", "steps", "batch", "context")
    more = ("width", "depth", "head_dim", "activation", "alpha", "alpha_bar", "z0")
    fade = tuple(r["fade"]) if r.get("fade") else None
    decay = r.get("decay", "uniform")
    parts = {part: r[part] / r["steps"] for part in ("warmup", "warmdown")}
    return Job(**{name: r[name] for name in (*names, *more)}, fade=fade, decay=decay, **parts)
