"""`sodaopt train`, `compare`, `sweep` and `sample`."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Annotated, Any

import torch
import tyro

from . import records
from .board import console, run_trials
from .data import open_data
from .execution import NO_MEMORY, Execution
from .job import Common, Job, ResolvedJob, resolve
from .labels import number
from .optimizers import parse
from .progress import progress, short
from .records import DIVERGED, FINISHED, Run
from .report import comparison_table, write_report
from .restore import restore
from .sample import generate
from .sweep import grid, make_trials
from .train import DATA, train
from .visible import visible

INTERRUPTED = 130
"""Exit code of a command that Ctrl-C ended."""

Flat = tyro.conf.arg(name="")


@dataclass
class Train:
    """Train one model. Run the same command again to continue after a stop."""

    job: Annotated[Job, Flat] = field(default_factory=Job)
    execution: Annotated[Execution, Flat] = field(default_factory=Execution)
    out: Path | None = None
    """Folder of the run. Default: a folder under runs/train with a name made of the settings."""
    dry_run: bool = False
    """Describe the run and stop."""

    def run(self) -> int:
        resolved = resolve(self.job, open_data(self.job.dataset, DATA).vocab)
        folder = self.out or Path("runs/train") / resolved.key
        first_rank = int(os.environ.get("RANK", "0")) == 0
        if first_rank:
            print(describe(resolved))
        if self.dry_run:
            return 0
        before = records.begun(folder) if first_rank else None
        done = before is not None and before.done
        shown = progress(resolved.steps) if first_rank and not done else None
        try:
            run = train(self.job, folder, self.execution, shown)
        except torch.OutOfMemoryError:
            raise ValueError(NO_MEMORY) from None
        if not first_rank:
            return 0
        if done and not run.finished:
            reason = (run.end or {}).get("reason", DIVERGED)
            print(visible(f"{folder} has already ended: {reason}"))
        return self._report(run, folder)

    def _report(self, run: Run, folder: Path) -> int:
        end = run.end or {}
        if end.get("status") == FINISHED:
            print(f"validation loss {end['val_loss']:.4f} after {end['step']} steps")
            for sample in run.of("sample")[-1:]:
                print(f"\n{visible(sample.get('text', ''))}\n")
            print(f"report: {write_report([run], folder / 'report.html', str(run.optimizer))}")
            return 0
        return 1 if end.get("status") == DIVERGED else INTERRUPTED


def describe(resolved: ResolvedJob) -> str:
    """Return two lines that describe a run."""
    s, batch = resolved.shape, resolved.batch
    return (
        f"{resolved.name}, lr {resolved.settings.lr:.4g}: {short(s.parameters)} parameters "
        f"(width {s.width}, depth {s.depth}, vocabulary {s.vocab}) on {resolved.job.dataset}\n"
        f"{resolved.steps} steps of {batch} x {s.context} tokens = {short(resolved.tokens)} tokens "
        f"({resolved.horizon:.3g}x Chinchilla), {short(resolved.tokens * s.flops_per_token)}FLOP"
    )


@dataclass
class Many:
    """Options that `compare` and `sweep` share."""

    optimizers: tyro.conf.Positional[tuple[str, ...]]
    """Names such as muon "soda(muon)" soda_dagger adamw. The first one is the baseline."""
    common: Annotated[Common, Flat] = field(default_factory=Common)
    execution: Annotated[Execution, Flat] = field(default_factory=Execution)
    workers: int | None = None
    """Number of processes. Default: one for each CPU core, or one for each GPU."""
    out: Path | None = None
    """Folder for the runs and report.html. Default: runs/compare or runs/sweep."""
    title: str = ""
    """Title of the report."""

    def __post_init__(self) -> None:
        for name in self.optimizers:
            parse(name)
        if self.workers is not None and self.workers < 1:
            raise ValueError(f"workers must be at least 1, got {self.workers}")

    def carry_out(self, jobs: Sequence[Job], out: Path, title: str) -> int:
        """Run the jobs that are not done, and report on all of them. Return the exit code."""
        board = console()
        vocab = open_data(self.common.data or jobs[0].dataset, DATA).vocab
        workers, execution = self._placed(len(jobs))
        todo = make_trials(jobs, out, execution, vocab)
        failed = run_trials(todo, workers, board)
        runs = [run for trial in todo if (run := trial.run()) is not None]
        if any(run.of("val") for run in runs):
            board.print(comparison_table(runs))
            board.print(
                f"report: {write_report(runs, out / 'report.html', title, keep=True)}",
                highlight=False,
                markup=False,
            )
        errors = [o for o in failed if o.error]
        if failed:
            board.print(
                f"{len(failed)} of {len(todo)} runs are not done: "
                "run the same command again to continue"
            )
        return 1 if errors else INTERRUPTED if failed else 0

    def _placed(self, count: int) -> tuple[int, Execution]:
        """Return the number of workers, and the execution settings with their threads."""
        cpu = self.execution.target().type == "cpu"
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1
        most = cores if cpu else max(1, self.execution.gpus())
        workers = self.workers or min(most, count)
        threads = self.execution.threads or (max(1, cores // workers) if cpu else None)
        return workers, replace(self.execution, threads=threads)


@dataclass
class Compare(Many):
    """Train several optimizers on the same data from the same initial weights, and compare them."""

    seeds: int = 3
    """Number of seeds for each optimizer."""

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
    """Train every combination of settings.

    Finished runs are kept, so a sweep can be stopped, resumed and extended."""

    over: tyro.conf.UseAppendAction[tuple[str, ...]] = ()
    """A setting and its values: lr=2^-12..2^-8 (powers of two), wd=0,0.1,0.2, horizon=1x,4x,
    fade=0.6:0.9,0.8:1."""
    seeds: tuple[int, ...] = (0,)
    """Seeds of each combination."""

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
        """Return the axes of an optimizer. One without weight decay has no wd axis."""
        kind = parse(name)
        decays = kind.spec.decays and not kind.anchored
        axes: dict[str, Sequence[Any]] = {k: v for k, v in over.items() if k != "wd" or decays}
        return axes if "seed" in axes else axes | {"seed": self.seeds}


def axis(text: str) -> tuple[str, list[Any]]:
    """Parse a setting and its values.

    'lr=2^-12..2^-8' -> ("lr", [2**-12, ..., 2**-8])
    'wd=0,0.1' -> ("wd", [0.0, 0.1])
    """
    name, equals, values = text.partition("=")
    name = name.strip().replace("-", "_")
    kinds = {f.name: str(f.type) for f in fields(Job) if f.name != "optimizer"}
    if not equals or not values or name not in kinds:
        known = ", ".join(sorted(kinds))
        raise ValueError(f"expected SETTING=VALUE,VALUE,... with one of {known}, got {text!r}")
    kind = kinds[name]
    if ".." in values and "str" not in kind:  # the name of a folder may contain dots
        return name, [_value(kind, str(power)) for power in _powers(values)]
    return name, [_value(kind, part.strip()) for part in values.split(",")]


def _powers(text: str) -> list[float]:
    begin, _, end = text.partition("..")
    ends = sorted((number(begin), number(end)))
    found = [math.frexp(value) for value in ends]  # (0.5, e + 1) for 2^e
    if any(part != 0.5 for part, _ in found):
        raise ValueError(f"a range needs powers of two, such as 2^-12..2^-8, got {text!r}")
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
        raise ValueError(f"expected a whole number, got {text!r}")
    return int(value)


@dataclass
class Sample:
    """Generate text with a trained model."""

    folder: tyro.conf.Positional[Path]
    """Folder of a run, which contains run.jsonl."""
    prompt: str = "The people of the United States"
    tokens: int = 200
    temperature: float = 0.8
    """0 always takes the most likely token."""
    top_k: int = 50
    seed: int = 0
    count: int = 1
    """Number of texts."""

    def __post_init__(self) -> None:
        counts = self.top_k, self.tokens, self.count
        if not 0 <= self.temperature < math.inf or min(counts) < 1:
            raise ValueError("tokens, count and top_k must be at least 1, temperature at least 0")

    def run(self) -> int:
        runs = records.find([self.folder])
        if len(runs) != 1:
            names = ", ".join(str(run.folder) for run in runs[:5]) or "none"
            raise ValueError(
                f"{self.folder} contains {len(runs)} runs ({names}): name the folder of one run"
            )
        model, data = restore(runs[0])
        for j in range(self.count):
            text = generate(
                model, data.tokenizer(), self.prompt, tokens=self.tokens,
                temperature=self.temperature, top_k=self.top_k, seed=self.seed + j,
            )  # fmt: skip
            print(visible(text))
        return 0
