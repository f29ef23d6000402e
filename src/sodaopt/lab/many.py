"""`sodaopt compare` and `sodaopt sweep`: train several optimizers or settings."""

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro
from rich.console import Console

from .arguments import Grouped, Output, SeedWords, axis, command_line, parse_seeds, plain
from .board import run_trials
from .commands import INTERRUPTED
from .data import open_data
from .describe import outline, repeats, summary, without_data
from .execution import Execution
from .job import Common, Job, resolve
from .labels import written
from .optimizers import decays, parse
from .presets import preset
from .report import Page, comparison_table, write_report
from .report.terminal import rows
from .sweep import Trial, grid, make_trials
from .train import DATA


@dataclass
class Many:
    """Options that `compare` and `sweep` share."""

    optimizers: Annotated[
        tyro.conf.Positional[tuple[str, ...]], tyro.conf.arg(metavar="OPTIMIZER ...")
    ]
    """Names such as muon "soda(muon)" soda_dagger adamw. The first one is the baseline."""
    common: Annotated[Common, Grouped] = field(default_factory=Common)
    execution: Annotated[Execution, Grouped] = field(default_factory=Execution)
    output: Annotated[Output, Grouped] = field(default_factory=Output)
    workers: int | None = None
    """Number of processes. Default: one for each CPU core, or one for each GPU."""
    on: Literal["here", "ray"] = "here"
    """Where to train: on this machine, or on a Ray cluster (pip install 'sodaopt[ray]')."""
    out: Path | None = None
    """Folder for the runs and report.html. Default: runs/compare or runs/sweep."""
    title: str = ""
    """Title of the report."""
    dry_run: bool = False
    """Describe the runs and stop. This works without the data."""

    def __post_init__(self) -> None:
        for name in self.optimizers:
            parse(name)
        if self.workers is not None and self.workers < 1:
            raise ValueError(f"--workers must be at least 1, got {self.workers}")

    def carry_out(
        self, jobs: Sequence[Job], out: Path, title: str, primary: Sequence[tuple[Job, Job]] = ()
    ) -> int:
        """Run the jobs that are not done, and report on all of them. Return the exit code.

        An interrupted command reports on the runs that are done.

        primary: pairs (variant, baseline) that get a p value
        """
        if self.dry_run:
            return self._dry(jobs, out)
        board = self.output.console()
        data = open_data(self.common.data or jobs[0].dataset, DATA)
        workers, execution = placed(self.execution, self.workers, len(jobs), self.common.preset)
        todo = make_trials(jobs, out, execution, data.vocab)
        pairs = tuple((resolve(a, data.vocab).key, resolve(b, data.vocab).key) for a, b in primary)
        again = command_line(type(self).__name__.lower(), self.optimizers, self)
        page = Page(title, tuple(trial.folder.name for trial in todo), pairs, again)
        page.save(out)
        if note := repeats(resolve(jobs[0], data.vocab), data):
            board.print(note, highlight=False, markup=False)
        try:
            failed = run_trials(todo, workers, board, self.on)
        finally:
            report(todo, page, out, board, self.output)
        if failed:
            board.print(
                f"{len(failed)} of {len(todo)} runs are not done: "
                "run the same command again to continue"
            )
        return 1 if any(o.error for o in failed) else INTERRUPTED if failed else 0

    def _dry(self, jobs: Sequence[Job], out: Path) -> int:
        first, data = without_data(jobs[0])
        resolved = [without_data(job)[0] for job in jobs]
        by_key = {job.key: job for job in resolved}
        print(outline(first, data, self.execution), "", sep="\n")
        print(summary(list(by_key.values()), [out / key for key in by_key], self.execution))
        return 0


def placed(
    execution: Execution, workers: int | None, count: int, size: str
) -> tuple[int, Execution]:
    """Return the number of workers, and the execution settings with each worker's CPU threads.

    workers: the number that the user asked for, or None
    count: the number of runs
    size: the name of their preset
    """
    if workers is not None and workers < 1:
        raise ValueError(f"--workers must be at least 1, got {workers}")
    cpu = execution.target().type == "cpu"
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1
    most = cores if cpu else max(1, execution.gpus())
    workers = workers or min(most, count)
    threads = preset(size).threads or max(1, cores // workers) if cpu else None
    return workers, replace(execution, threads=execution.threads or threads)


def report(trials: Sequence[Trial], page: Page, out: Path, board: Console, to: Output) -> None:
    """Print a table of the runs and write report.html, if a run has a validation loss."""
    runs = [run for trial in trials if (run := trial.run()) is not None]
    if not any(run.of("val") for run in runs):
        return
    path = write_report(runs, out / "report.html", page.title, page.primary, page.command)
    if to.json:
        print(json.dumps(rows(runs, page.primary) | {"report": str(path)}))
    board.print(comparison_table(runs, board.width, page.primary))
    board.print(f"report: {path}", highlight=False, markup=False)


@dataclass
class Compare(Many):
    """Train several optimizers on the same data from the same initial weights, and compare them."""

    seeds: SeedWords = ("0-4",)
    """Seeds of each optimizer, such as 0 1 2 or 0-4."""
    primary: tuple[str, ...] = ()
    """Optimizers to test against the first one, with p values. Default: the second one. The others
    get confidence intervals only."""

    def run(self) -> int:
        if not self.optimizers:
            raise ValueError("name at least one optimizer, such as muon")
        names = [str(parse(name)) for name in self.optimizers]
        primary = [str(parse(name)) for name in self.primary] or names[1:2]
        for name in primary:
            if name not in names[1:]:
                raise ValueError(f"primary is {name}: it must be an optimizer after the first")
        jobs = [
            Job(**plain(self.common), optimizer=name, seed=seed)
            for seed in parse_seeds(self.seeds)
            for name in names
        ]
        pairs = [(jobs[names.index(name)], jobs[0]) for name in primary]
        title = self.title or written(names)
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
        names = written(str(parse(name)) for name in self.optimizers)
        title = self.title or f"{names} over {', '.join(over) or 'seeds'}"
        return self.carry_out(jobs, self.out or Path("runs/sweep"), title)

    def _axes(self, name: str, over: dict[str, list[Any]]) -> dict[str, Sequence[Any]]:
        """Return the axes of an optimizer. One without weight decay has no wd axis."""
        axes: dict[str, Sequence[Any]] = {
            k: v for k, v in over.items() if k != "wd" or decays(parse(name))
        }
        return axes if "seed" in axes else axes | {"seed": parse_seeds(self.seeds)}
