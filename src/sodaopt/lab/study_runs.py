"""Tune, choose and run the jobs of a study, and collect their numbers."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import fmean
from typing import Any

from rich.console import Console

from sodaopt import __version__
from sodaopt._errors import unknown

from . import results
from .board import run_trials
from .commands import INTERRUPTED
from .execution import Execution
from .job import Job, resolve
from .records import Run
from .scales import Scale
from .study import Cell, Study, TableRow, standard
from .sweep import Trial, make_trials


class Unfinished(RuntimeError):
    """Some runs are not done, so the numbers are not complete yet."""

    code = INTERRUPTED


class Failed(Unfinished):
    """Some runs are not done because of an error."""

    code = 1


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
    seeds: tuple[int, ...] = ()
    """Seeds to run, instead of the planned ones."""
    only: tuple[str, ...] = ()
    """Labels of the rows to run, instead of all rows."""
    columns: tuple[str, ...] = ()
    """Columns to run, instead of all columns."""
    known_rates: dict[str, dict[float, float]] = field(default_factory=dict)
    """Losses of baselines by learning rate that earlier commands measured."""
    known_choices: tuple[dict[str, Any], ...] = ()
    """Losses of choices that earlier commands measured. No settings are chosen again for their
    columns."""

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
        rows, cells = self._selected(), self._cells()
        seeds = sorted({seed for row in rows for seed in self._seeds(row)})
        found = [(s, row) for s in seeds for row in rows if s in self._seeds(row)]
        return [self._job(cell, row, s, lr) for s, row in found for cell in cells]

    def folders(self, jobs: Iterable[Job]) -> tuple[str, ...]:
        """Return the names of the jobs' folders."""
        return tuple(self._trial(job).folder.name for job in jobs)

    def primary(self, lr: dict[str, float]) -> tuple[tuple[str, str], ...]:
        """Return the primary comparisons of the first row as folder names of runs."""
        row = self._selected()[0]
        seed = self._seeds(row)[0]
        jobs = {cell.column: self._job(cell, row, seed, lr) for cell in self._cells()}
        names = {column: self._trial(job).folder.name for column, job in jobs.items()}
        pairs = self.study.pairs[: self.study.primary]
        return tuple((names[a], names[b]) for a, b in pairs if names.keys() >= {a, b})

    def _rows(self) -> Sequence[TableRow]:
        """Return the rows with the settings of all runs. Rows that become equal count once."""
        found = [self._row(row) for row in self.study.planned(self.scale)]
        return list({row.label: row for row in found}.values())

    def _selected(self) -> Sequence[TableRow]:
        """Return the rows to run."""
        rows = {row.label: row for row in self._rows()}
        for label in self.only:
            if label not in rows:
                raise ValueError(unknown("row", label, rows))
        return [row for label, row in rows.items() if not self.only or label in self.only]

    def _cells(self) -> list[Cell]:
        """Return the cells of the columns to run."""
        at = {cell.column: cell for cell in self.study.cells}
        for column in self.columns:
            if column not in at:
                raise ValueError(unknown("column", column, at))
        return [cell for column, cell in at.items() if not self.columns or column in self.columns]

    def _seeds(self, row: TableRow) -> tuple[int, ...]:
        """Return the seeds of a row to run."""
        return self.seeds or tuple(range(row.seeds))

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

    @property
    def _reference(self) -> TableRow:
        """The row at which learning rates are tuned and settings are chosen."""
        return self._row(standard(self.scale)[0])

    def tune(self) -> dict[str, dict[float, float]]:
        """Return the losses of the baselines by learning rate, on the seeds for tuning.

        The learning rates are powers of two. The grid grows until the best one is not at its edge.
        """
        tried = {base: dict(self.known_rates.get(base, {})) for base in self._untuned()}
        while todo := {b: grid for b in tried if (grid := self._grid(b, tried[b]))}:
            jobs = {(b, lr): self._baseline(b, lr) for b, grid in todo.items() for lr in grid}
            self.run(job for same in jobs.values() for job in same)
            for (base, lr), same in jobs.items():
                tried[base][lr] = fmean(map(self._loss, same))
        return tried

    def _untuned(self) -> list[str]:
        """Return the baselines whose learning rates must be tuned."""
        if not self.scale.tuned or all("lr" in row.settings for row in self._rows()):
            return []
        cells = [cell for cell in self.study.cells if cell.needs_lr(self.scale)]
        return list(dict.fromkeys(cell.base for cell in cells))

    def first_grids(self) -> list[Job]:
        """Return the jobs with which `tune` begins. Its grids may grow."""
        grids = {b: self._grid(b, self.known_rates.get(b, {})) for b in self._untuned()}
        points = [(base, lr) for base, grid in grids.items() for lr in grid]
        return [job for base, lr in points for job in self._baseline(base, lr)]

    def _baseline(self, base: str, lr: float) -> list[Job]:
        """Return the runs of a baseline, one for each seed for tuning."""
        seeds = self.scale.tuning_seeds
        return [self._job(Cell("", base, base), self._reference, s, {base: lr}) for s in seeds]

    def _grid(self, base: str, tried: dict[float, float]) -> list[float]:
        """Return the learning rates to try next."""
        if not tried:
            middle = self.scale.rate(base)
            return [middle / 2, middle, middle * 2]
        low, high, at = min(tried), max(tried), results.best(tried)
        return [low / 2] if at == low else [high * 2] if at == high else []

    def _loss(self, job: Job) -> float:
        run = self._trial(job).run()
        return math.inf if run is None or run.val_loss is None else run.val_loss

    def _trial(self, job: Job) -> Trial:
        return make_trials([job], self.folder, self.execution, self.vocab)[0]

    def candidates(self, lr: dict[str, float]) -> list[Job]:
        """Return the jobs that `choose` runs, ordered by seed. Equal jobs of two cells run once."""
        cells = [cell.chosen(c) for cell in self._open() for c in cell.choices(self.scale)]
        seeds, row = self.scale.tuning_seeds, self._reference
        return list({self._job(c, row, s, lr): None for s in seeds for c in cells})

    def _open(self) -> list[Cell]:
        """Return the cells whose settings no earlier command has chosen."""
        known = {t["column"] for t in self.known_choices}
        return [cell for cell in self.study.cells if cell.column not in known]

    def choose(self, lr: dict[str, float]) -> tuple[list[dict[str, Any]], "Work"]:
        """Return the losses of every choice, and this work with the best choice of each cell.

        The choices are compared at the standard size and length, on the seeds for tuning.
        """
        if jobs := self.candidates(lr):
            self.run(jobs)
        study, scale = self.study, self.scale
        columns = {cell.column for cell in study.cells}
        tried = [t for t in self.known_choices if t["column"] in columns]
        tried += [self._tried(cell, c, lr) for cell in self._open() for c in cell.choices(scale)]
        # dict keeps the last choice of a column, so the best choice comes last
        worst_first = sorted(tried, key=lambda t: -math.inf if t["mean"] is None else -t["mean"])
        best = {t["column"]: t["settings"] for t in worst_first}
        cells = tuple(c.chosen(best.get(c.column) or c.following(best)) for c in study.cells)
        return tried, replace(self, study=replace(study, cells=cells))

    def _tried(self, cell: Cell, choice: dict[str, Any], lr: dict[str, float]) -> dict[str, Any]:
        """Return a choice of a cell, with its losses on the seeds for tuning."""
        row, it, seeds = self._reference, cell.chosen(choice), self.scale.tuning_seeds
        losses = [self._loss(self._job(it, row, seed, lr)) for seed in seeds]
        mean = fmean(losses)
        return {
            "column": cell.column,
            "settings": choice,
            "seeds": list(seeds),
            "losses": [loss if math.isfinite(loss) else None for loss in losses],
            "mean": mean if math.isfinite(mean) else None,
        }

    # -- numbers ------------------------------------------------------------------------------

    def numbers(self, lr: dict[str, float], tuned: dict[str, dict[float, float]]) -> dict[str, Any]:
        """Return the numbers of all runs that are done, whether this command ran them or not."""
        rows = self._rows()
        cells = [self._cell(row, cell, lr) for row in rows for cell in self.study.cells]
        known = [(cell, runs) for cell, runs in cells if runs]
        if not known:
            raise Unfinished("no run is done")
        head = known[0][1][0].head
        return {
            "title": self.study.title,
            "sodaopt": __version__,
            "environment": head["environment"],
            "git": head["git"],
            "data": head["data"],
            "parameters": head["model"]["parameters"],
            "tuning_seeds": list(self.scale.tuning_seeds),
            "learning_rates": {base: results.finite(losses) for base, losses in tuned.items()},
            "planned": {row.label: row.seeds for row in rows},
            "cells": [cell for cell, _ in known],
            "pairs": [list(pair) for pair in self.study.pairs],
            "primary": self.study.primary,
            "published": {k: list(v) for k, v in self.study.published.items()},
        }

    def _cell(
        self, row: TableRow, cell: Cell, lr: dict[str, float]
    ) -> tuple[dict[str, Any], list[Run]]:
        """Return the numbers of one cell, and its runs that are done."""
        seeds = sorted({*range(row.seeds), *self.seeds})
        jobs = {seed: self._job(cell, row, seed, lr) for seed in seeds}
        begun = {seed: self._trial(job).run() for seed, job in jobs.items()}
        runs = {seed: run for seed, run in begun.items() if run is not None and run.done}
        ends = [run.end or {} for run in runs.values()]
        first = next(iter(runs.values()), None)
        return {
            "row": row.label,
            "column": cell.column,
            "optimizer": cell.optimizer,
            "settings": cell.settings,
            "lr": resolve(jobs[seeds[0]], self.vocab).settings.lr,
            "parameters": first and first.head["model"]["parameters"],
            "steps": first and first.job["steps"],
            "epochs": ends[0].get("epochs") if ends else None,
            "seeds": list(runs),
            **results.summary([run.val_loss for run in runs.values()]),
            "seconds": [end.get("seconds") for end in ends],
            "tokens_per_second": [end.get("tokens_per_second") for end in ends],
            "curve": [[v["step"], v["loss"]] for v in first.of("val")] if first else [],
        }, list(runs.values())
