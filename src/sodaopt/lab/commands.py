"""`sodaopt train`, `compare`, `sweep` and `sample`."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any

import torch
import tyro
from rich.console import Console

from . import records
from .arguments import Flat, SeedWords, axis, parse_seeds, plain
from .board import console, run_trials
from .data import open_data
from .execution import NO_MEMORY, Execution
from .job import Common, Job, ResolvedJob, resolve
from .optimizers import parse
from .progress import progress, short
from .records import DIVERGED, FINISHED, Run
from .report import Plan, comparison_table, write_report
from .restore import restore
from .sample import generate
from .sweep import Trial, grid, make_trials
from .train import DATA, train
from .visible import visible

INTERRUPTED = 130
"""Exit code of a command that Ctrl-C ended."""


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

    def carry_out(
        self, jobs: Sequence[Job], out: Path, title: str, primary: Sequence[tuple[Job, Job]] = ()
    ) -> int:
        """Run the jobs that are not done, and report on all of them. Return the exit code.

        An interrupted command reports on the runs that are done.
        """
        board = console()
        vocab = open_data(self.common.data or jobs[0].dataset, DATA).vocab
        workers, execution = self._placed(len(jobs))
        todo = make_trials(jobs, out, execution, vocab)
        pairs = tuple((resolve(a, vocab).key, resolve(b, vocab).key) for a, b in primary)
        plan = Plan(title, tuple(trial.folder.name for trial in todo), pairs)
        plan.save(out)
        try:
            failed = run_trials(todo, workers, board)
        except KeyboardInterrupt:
            _report(todo, plan, out, board)
            raise
        _report(todo, plan, out, board)
        if failed:
            board.print(
                f"{len(failed)} of {len(todo)} runs are not done: "
                "run the same command again to continue"
            )
        return 1 if any(o.error for o in failed) else INTERRUPTED if failed else 0

    def _placed(self, count: int) -> tuple[int, Execution]:
        """Return the number of workers, and the execution settings with their threads."""
        cpu = self.execution.target().type == "cpu"
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1
        most = cores if cpu else max(1, self.execution.gpus())
        workers = self.workers or min(most, count)
        threads = self.execution.threads or (max(1, cores // workers) if cpu else None)
        return workers, replace(self.execution, threads=threads)


def _report(trials: Sequence[Trial], plan: Plan, out: Path, board: Console) -> None:
    """Print the table and write the page, if a run has a loss."""
    runs = [run for trial in trials if (run := trial.run()) is not None]
    if any(run.of("val") for run in runs):
        board.print(comparison_table(runs, board.width, plan.primary))
        page = write_report(runs, out / "report.html", plan.title, plan.primary)
        board.print(f"report: {page}", highlight=False, markup=False)


@dataclass
class Compare(Many):
    """Train several optimizers on the same data from the same initial weights, and compare them."""

    seeds: SeedWords = ("0-4",)
    """Seeds of each optimizer, such as 0 1 2 or 0-4."""
    primary: tuple[str, ...] = ()
    """Optimizers to test against the first one, with p values. Default: the second one. The others
    get intervals only."""

    def run(self) -> int:
        if not self.optimizers:
            raise ValueError("name at least one optimizer, such as muon")
        names = [str(parse(name)) for name in self.optimizers]
        primary = [str(parse(name)) for name in self.primary] or names[1:2]
        for name in primary:
            if name not in names[1:]:
                raise ValueError(f"primary {name} must be one of the optimizers after the first")
        jobs = [
            Job(**plain(self.common), optimizer=name, seed=seed)
            for seed in parse_seeds(self.seeds)
            for name in names
        ]
        pairs = [(jobs[names.index(name)], jobs[0]) for name in primary]
        title = self.title or " vs ".join(names)
        return self.carry_out(jobs, self.out or Path("runs/compare"), title, pairs)


@dataclass
class Sweep(Many):
    """Train every combination of settings.

    Finished runs are kept, so a sweep can be stopped, resumed and extended."""

    over: tyro.conf.UseAppendAction[tuple[str, ...]] = ()
    """A setting and its values: lr=2^-12..2^-8 (powers of two), wd=0,0.1,0.2, horizon=1x,4x,
    fade=0.6:0.9,0.8:1."""
    seeds: SeedWords = ("0",)
    """Seeds of each combination, such as 0 1 2 or 0-4."""

    def run(self) -> int:
        if not self.optimizers:
            raise ValueError("name at least one optimizer, such as muon")
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
        axes: dict[str, Sequence[Any]] = {
            k: v for k, v in over.items() if k != "wd" or parse(name).decays
        }
        return axes if "seed" in axes else axes | {"seed": parse_seeds(self.seeds)}


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
