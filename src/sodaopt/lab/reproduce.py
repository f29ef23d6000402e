"""`sodaopt reproduce`: run a figure or a table of the paper, and write its numbers to a file."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import fmean, stdev
from typing import Annotated, Any, Literal

import tyro
from rich.console import Console

from sodaopt import __version__
from sodaopt._errors import unknown

from . import results
from .arguments import Grouped, Output, SeedWords, axis, command_line, parse_seeds
from .board import run_trials
from .commands import INTERRUPTED
from .data import open_data
from .describe import outline, summary, without_data
from .execution import Execution
from .job import Job, resolve
from .many import placed
from .optimizers import BASES
from .records import Run
from .report import Plan, write_report
from .studies import DEFINITIONS, SCALES, STUDIES, Cell, Scale, Study, TableRow
from .sweep import Trial, make_trials
from .train import DATA
from .visible import visible


class Unfinished(RuntimeError):
    """Some runs are not done, so the numbers are not complete yet."""

    code = INTERRUPTED


class Failed(Unfinished):
    """Some runs are not done because of an error."""

    code = 1


@dataclass
class Reproduce:
    """Run a figure or a table of the paper.

    Finished runs are kept. Run the same command again to continue after a stop."""

    name: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="NAME")] = ""
    """Name of the figure or table. --list shows the names."""
    list: bool = False
    """List every figure and table."""
    scale: Literal["proxy", "paper"] = "proxy"
    """paper: the paper's own sizes. proxy: a small size, half a minute a run on one large GPU."""
    data: str | None = None
    """Data set, instead of the preset's."""
    seeds: SeedWords = ()
    """Seeds such as 0 1 2 or 0-4, instead of the scale's own."""
    horizons: tuple[str, ...] = ()
    """Horizons such as 1x 4x, instead of the scale's own."""
    tune: bool | None = None
    """Tune the learning rates of the baselines on a grid of powers of two first, on a seed that
    the study does not use."""
    settings: tuple[str, ...] = ()
    """More settings for every run, as NAME=VALUE, for example a smaller model for a trial run."""
    execution: Annotated[Execution, Grouped] = field(default_factory=Execution)
    output: Annotated[Output, Grouped] = field(default_factory=Output)
    workers: int | None = None
    """Number of processes. Default: one for each CPU core, or one for each GPU."""
    out: Path = Path("runs/reproduce")
    """Parent folder of the study's folder, which holds the runs, report.html and results.json."""
    dry_run: bool = False
    """List the runs and stop."""

    def run(self) -> int:
        if self.list or not self.name:
            print(listing())
            return 0 if self.list else 2
        if self.name in DEFINITIONS:
            print(f"nothing to train: {DEFINITIONS[self.name]}")
            return 0
        if self.name not in STUDIES:
            raise ValueError(unknown("figure or table", self.name, (*STUDIES, *DEFINITIONS)))
        board = self.output.console()
        try:
            found = self._carry_out(board)
        except Unfinished as e:
            board.out(visible(f"{e}: run the same command again to continue"), highlight=False)
            return e.code
        if found is None:
            return 0
        path = self.out / f"{self.name}-{self.scale}" / "results.json"
        results.write(path, found)
        if self.output.json:
            print(json.dumps(found))
        elif self.output.shown:
            print(results.markdown(found))
        board.print(f"numbers: {path}", highlight=False, markup=False)
        return 0

    def _carry_out(self, board: Console) -> dict[str, Any] | None:
        study, scale = STUDIES[self.name], self._scale()
        folder = self.out / f"{self.name}-{self.scale}"
        first = self._job(study, scale)
        resolved, data = without_data(first)
        workers, execution = placed(self.execution, self.workers, 1000, first.preset)
        vocab = resolved.shape.vocab if self.dry_run else open_data(first.dataset, DATA).vocab
        work = Work(study, scale, self._settings(), folder, execution, workers, vocab, board)
        if self.dry_run:
            self._dry(work, outline(resolved, data, execution))
            return None
        tuned = work.tune() if scale.tuned and "lr" not in work.settings else {}
        lr = scale.lr | {base: results.best(losses) for base, losses in tuned.items()}
        chosen, work = work.choose(lr)
        runs = work.run(work.jobs(lr))
        primary = work.primary(lr)
        plan = Plan(study.title, tuple(r.folder.name for r in runs), primary, self._command())
        plan.save(folder)
        report = write_report(runs, folder / "report.html", plan.title, primary, plan.command)
        board.print(f"report: {report}", highlight=False, markup=False)
        known = {"study": self.name, "scale": self.scale, "command": self._command()}
        return known | work.numbers(lr, tuned) | {"choices": chosen}

    def _dry(self, work: Work, first: str) -> None:
        """Describe the runs, or print them as JSON. Tuned learning rates are not known yet."""
        lr = dict(work.scale.lr)
        jobs = [*work.candidates(lr), *work.jobs(lr)]
        todo = make_trials(jobs, work.folder, self.execution, work.vocab)
        if self.output.json:
            print("\n".join(trial.text() for trial in todo))
            return
        print(first, "", sep="\n")
        known = [resolve(trial.job, work.vocab) for trial in todo]
        print(summary(known, [trial.folder for trial in todo], self.execution))

    def _command(self) -> str:
        """Return the command line that runs this study again."""
        words = [self.name, "--scale", self.scale]
        return command_line("reproduce", words, replace(self, scale="proxy"))

    def _scale(self) -> Scale:
        scale = SCALES[self.scale]
        if self.horizons:
            scale = replace(scale, horizons=self.horizons)
        if self.seeds:
            scale = replace(scale, seeds=parse_seeds(self.seeds))
        return scale if self.tune is None else replace(scale, tuned=self.tune)

    def _settings(self) -> dict[str, Any]:
        pairs = [axis(text) for text in self.settings]
        more = {name: values[0] for name, values in pairs}
        if "steps" in more:  # replaces the horizon of each row
            more["horizon"] = None
        return more | ({"data": self.data} if self.data else {})

    def _job(self, study: Study, scale: Scale) -> Job:
        row = study.rows(scale)[0]
        more = row.settings | self._settings()
        return study.cells[0].job(scale, replace(row, settings=more), 0, None)


def listing() -> str:
    lines = [f"  {name:<22} {study.title}" for name, study in STUDIES.items()]
    lines += [f"  {name:<22} {about}" for name, about in DEFINITIONS.items()]
    scales = [f"  --scale {name:<14} {scale.about}" for name, scale in SCALES.items()]
    return "\n".join(["sodaopt reproduce NAME [--scale paper|proxy]", "", *lines, "", *scales])


@dataclass(frozen=True)
class Work:
    """A study at one scale, and the settings of its runs."""

    study: Study
    scale: Scale
    settings: dict[str, Any]
    folder: Path
    execution: Execution
    workers: int
    vocab: int
    board: Console

    def run(self, jobs: Iterable[Job]) -> list[Run]:
        """Run the jobs and return their runs. Raise Unfinished unless all are done."""
        todo = make_trials(list(jobs), self.folder, self.execution, self.vocab)
        failed = run_trials(todo, self.workers, self.board)
        if failed:
            count = f"{len(failed)} of {len(todo)} runs are not done"
            errors = [o.error for o in failed if o.error]
            raise Failed(f"{count} ({errors[0]})") if errors else Unfinished(count)
        return [run for trial in todo if (run := trial.run()) is not None]

    def jobs(self, lr: dict[str, float]) -> list[Job]:
        """Return all jobs, ordered by seed, so that a study that stops early has complete rows."""
        study, seeds = self.study, self.scale.seeds
        return [self._job(c, r, s, lr) for s in seeds for r in self._rows() for c in study.cells]

    def primary(self, lr: dict[str, float]) -> tuple[tuple[str, str], ...]:
        """Return the primary comparisons of the first row as folder names of runs."""
        at = {cell.column: cell for cell in self.study.cells}
        row, pairs = self._rows()[0], self.study.pairs[: self.study.primary]
        jobs = [[self._job(at[c], row, self.scale.seeds[0], lr) for c in pair] for pair in pairs]
        return tuple((one, other) for one, other in
                     ([self._trial(job).folder.name for job in pair] for pair in jobs))  # fmt: skip

    def _rows(self) -> Sequence[TableRow]:
        """Return the rows with the settings of all runs. These may make two rows equal."""
        found = [self._row(row) for row in self.study.rows(self.scale)]
        return list({row.label: row for row in found}.values())

    def _row(self, row: TableRow) -> TableRow:
        """Add the settings of all runs to a row. If they change its horizon, change its label."""
        label, settings = row.label, row.settings | self.settings
        if label == row.settings.get("horizon") != settings.get("horizon"):
            job = self._job(self.study.cells[0], replace(row, settings=settings), 0, {})
            label = f"{resolve(job, self.vocab).horizon:.3g}x"
        return replace(row, label=label, settings=settings)

    def _job(self, cell: Cell, row: TableRow, seed: int, lr: dict[str, float]) -> Job:
        return cell.job(self.scale, row, seed, lr.get(cell.base))

    # -- tuning -------------------------------------------------------------------------------

    def tune(self) -> dict[str, dict[float, float]]:
        """Return the losses of the baselines by learning rate, on a seed for tuning.

        The learning rates are powers of two. The grid grows until the best one is not at its edge.
        """
        bases = dict.fromkeys(cell.base for cell in self.study.cells)
        tried: dict[str, dict[float, float]] = {base: {} for base in bases}
        while todo := {b: grid for b in bases if (grid := self._grid(b, tried[b]))}:
            jobs = {(b, lr): self._baseline(b, lr) for b, grid in todo.items() for lr in grid}
            self.run(jobs.values())
            for (base, lr), job in jobs.items():
                tried[base][lr] = self._loss(job)
        return tried

    def _baseline(self, base: str, lr: float) -> Job:
        values: dict[str, Any] = {
            "preset": self.scale.preset,
            "horizon": self.scale.horizons[0],
            "seed": self.study.tuning_seeds[0],
            "lr": lr,
        }
        return Job(**(values | self.settings | {"optimizer": base}))

    def _grid(self, base: str, tried: dict[float, float]) -> list[float]:
        """Return the learning rates to try next."""
        if not tried:
            middle = self.scale.lr.get(base, BASES[base].lr)
            return [middle / 2, middle, middle * 2]
        low, high, at = min(tried), max(tried), results.best(tried)
        return [low / 2] if at == low else [high * 2] if at == high else []

    def _loss(self, job: Job) -> float:
        run = self._trial(job).run()
        return math.inf if run is None or run.val_loss is None else run.val_loss

    def _trial(self, job: Job) -> Trial:
        return make_trials([job], self.folder, self.execution, self.vocab)[0]

    def candidates(self, lr: dict[str, float]) -> list[Job]:
        """The jobs that `choose` runs, seed by seed. Two cells may share a choice."""
        cells = [cell.chosen(c) for cell in self.study.cells for c in cell.choices]
        row, seeds = self._rows()[0], self.study.tuning_seeds
        return list({self._job(c, row, s, lr): None for s in seeds for c in cells})

    def choose(self, lr: dict[str, float]) -> tuple[list[dict[str, Any]], Work]:
        """Return the losses of every choice, and this work with the best choice of each cell.

        The choices are compared at the first row, on seeds that the study does not use.
        """
        if jobs := self.candidates(lr):
            self.run(jobs)
        tried = [self._tried(cell, c, lr) for cell in self.study.cells for c in cell.choices]
        worst_first = sorted(tried, key=lambda t: -math.inf if t["mean"] is None else -t["mean"])
        best = {t["column"]: t["settings"] for t in worst_first}
        rates = {c: {"lr": s["lr"]} for c, s in best.items() if "lr" in s}
        study = self.study
        cells = tuple(c.chosen(best.get(c.column, rates.get(c.follows, {}))) for c in study.cells)
        return tried, replace(self, study=replace(study, cells=cells))

    def _tried(self, cell: Any, choice: dict[str, Any], lr: dict[str, float]) -> dict[str, Any]:
        row, it, seeds = self._rows()[0], cell.chosen(choice), self.study.tuning_seeds
        losses = [self._loss(self._job(it, row, seed, lr)) for seed in seeds]
        mean = fmean(losses)
        return {
            "column": cell.column,
            "settings": choice,
            "seeds": list(seeds),
            "losses": [loss if math.isfinite(loss) else None for loss in losses],
            "mean": mean if math.isfinite(mean) else None,
        }

    def numbers(self, lr: dict[str, float], tuned: dict[str, dict[float, float]]) -> dict[str, Any]:
        cells = [self._cell(row, cell, lr) for row in self._rows() for cell in self.study.cells]
        first_run = self._trial(self.jobs(lr)[0]).run()
        assert first_run is not None
        return {
            "title": self.study.title,
            "sodaopt": __version__,
            "environment": first_run.head["environment"],
            "git": first_run.head["git"],
            "data": first_run.head["data"],
            "parameters": first_run.head["model"]["parameters"],
            "tuning_seed": self.study.tuning_seeds[0],
            "learning_rates": {base: results.finite(losses) for base, losses in tuned.items()},
            "cells": cells,
            "differences": results.differences(cells, self.study.pairs, self.study.primary),
            "published": {k: list(v) for k, v in self.study.published.items()},
        }

    def _cell(self, row: TableRow, cell: Cell, lr: dict[str, float]) -> dict[str, Any]:
        jobs = [self._job(cell, row, seed, lr) for seed in self.scale.seeds]
        runs = [run for job in jobs if (run := self._trial(job).run()) is not None]
        losses = [run.val_loss for run in runs]
        known = [loss for loss in losses if loss is not None]
        return {
            "row": row.label,
            "column": cell.column,
            "optimizer": cell.optimizer,
            "settings": cell.settings,
            "lr": resolve(jobs[0], self.vocab).settings.lr,
            "steps": runs[0].job["steps"],
            "epochs": (runs[0].end or {}).get("epochs"),
            "losses": losses,
            "mean": fmean(known) if known else None,
            "spread": stdev(known) if len(known) > 1 else None,
            "diverged": sum(loss is None for loss in losses),
            "seconds": [(run.end or {}).get("seconds") for run in runs],
            "tokens_per_second": [(run.end or {}).get("tokens_per_second") for run in runs],
            "curve": [[v["step"], v["loss"]] for v in runs[0].of("val")],
        }
