"""`sodaopt reproduce`: run a figure or a table of the paper, and write its numbers down."""

from __future__ import annotations

import math
import shlex
from collections.abc import Iterable, Sequence
from dataclasses import MISSING, dataclass, field, fields, is_dataclass, replace
from pathlib import Path
from statistics import fmean, stdev
from typing import Annotated, Any, Literal

import tyro
from rich.console import Console

from .. import __version__
from .._errors import unknown
from . import results
from .board import console, run_rows
from .commands import INTERRUPTED, Flat, axis
from .data import open_data
from .execution import Execution
from .job import Job, resolve
from .optimizers import BASES
from .records import Run
from .report import write_report
from .studies import DEFINITIONS, SCALES, STUDIES, TUNING_SEEDS, Scale, Study
from .sweep import Row, rows
from .train import DATA
from .ttest import t_test


class Unfinished(RuntimeError):
    """Some rows are not done, so there are no numbers yet."""

    code = INTERRUPTED


class Failed(Unfinished):
    """An error is why."""

    code = 1


@dataclass
class Reproduce:
    """Run a figure or a table of the paper. Finished runs are kept: the same command goes on."""

    name: tyro.conf.Positional[str] = ""
    """Which one; --list names them."""
    list: bool = False
    """Name every figure and table."""
    scale: Literal["proxy", "paper"] = "proxy"
    """The paper's own sizes, or one that takes half a minute a run on one large GPU."""
    data: str | None = None
    """Instead of the preset's."""
    seeds: int | None = None
    """How many, instead of the scale's own."""
    horizons: tuple[str, ...] = ()
    """Such as 1x 4x, instead of the scale's own."""
    tune: bool | None = None
    """Tune the learning rates of the baselines on a grid of powers of two first (seed 0)."""
    settings: tuple[str, ...] = ()
    """More settings for every run, as NAME=VALUE: a smaller model to try it out, say."""
    execution: Annotated[Execution, Flat] = field(default_factory=Execution)
    workers: int = 1
    """Runs at a time."""
    out: Path = Path("runs/reproduce")
    """Where runs, report.html and results.json go, in a folder of the study's name."""
    dry_run: bool = False
    """Only list the runs."""

    def run(self) -> int:
        if self.list or not self.name:
            print(listing())
            return 0 if self.list else 2
        if self.name in DEFINITIONS:
            print(f"nothing to train: {DEFINITIONS[self.name]}")
            return 0
        if self.name not in STUDIES:
            raise ValueError(unknown("figure or table", self.name, (*STUDIES, *DEFINITIONS)))
        if self.workers < 1:
            raise ValueError(f"workers must be at least 1, got {self.workers}")
        board = console()
        try:
            found = self._carry_out(board)
        except Unfinished as e:
            board.print(f"{e}: the same command goes on", highlight=False)
            return e.code
        if found is None:
            return 0
        path = self.out / f"{self.name}-{self.scale}" / "results.json"
        results.write(path, found)
        print(results.markdown(found))
        board.print(f"numbers: {path}", highlight=False)
        return 0

    def _carry_out(self, board: Console) -> dict[str, Any] | None:
        study, scale = STUDIES[self.name], self._scale()
        folder = self.out / f"{self.name}-{self.scale}"
        vocab = open_data(self._job(study, scale).dataset, DATA).vocab
        work = Work(
            study, scale, self._settings(), folder, self.execution, self.workers, vocab, board
        )
        if self.dry_run:
            jobs = [*work.candidates(dict(scale.lr)), *work.jobs(dict(scale.lr))]
            for row in rows(jobs, folder, self.execution, vocab):
                print(row.text())
            return None
        tuned = work.tune() if scale.tuned and "lr" not in work.settings else {}
        lr = scale.lr | {base: best(losses) for base, losses in tuned.items()}
        chosen, work = work.choose(lr)
        ended = work.run(work.jobs(lr))
        report = write_report(ended, folder / "report.html", study.title, keep=True)
        board.print(f"report: {report}", highlight=False)
        known = {"study": self.name, "scale": self.scale, "command": self._command()}
        return known | work.numbers(lr, tuned) | {"choices": chosen}

    def _command(self) -> str:
        """As it can be typed again."""
        more = typed(replace(self, name="", scale="proxy"))
        return shlex.join(["sodaopt", "reproduce", self.name, "--scale", self.scale, *more])

    def _scale(self) -> Scale:
        scale = SCALES[self.scale]
        if self.horizons:
            scale = replace(scale, horizons=self.horizons)
        if self.seeds is not None:
            if self.seeds < 1:
                raise ValueError(f"seeds must be at least 1, got {self.seeds}")
            scale = replace(scale, seeds=self.seeds)
        return scale if self.tune is None else replace(scale, tuned=self.tune)

    def _settings(self) -> dict[str, Any]:
        pairs = [axis(text) for text in self.settings]
        more = {name: values[0] for name, values in pairs}
        if "steps" in more:  # instead of the rows' own horizons
            more["horizon"] = None
        return more | ({"data": self.data} if self.data else {})

    def _job(self, study: Study, scale: Scale) -> Job:
        row = study.rows(scale)[0]
        row = replace(row, settings=row.settings | self._settings())
        return study.cells[0].job(scale, row, 0, None)


def typed(command: Any) -> list[str]:
    """The flags of what is not as it is by default."""
    words = []
    for f in fields(command):
        value = getattr(command, f.name)
        default = f.default if f.default_factory is MISSING else f.default_factory()
        if is_dataclass(value):
            words += typed(value)
        elif value != default:
            parts = value if isinstance(value, tuple) else (value,)
            words += [f"--{f.name.replace('_', '-')}", *map(str, parts)]
    return words


def listing() -> str:
    lines = [f"  {name:<22} {study.title}" for name, study in STUDIES.items()]
    lines += [f"  {name:<22} {about}" for name, about in DEFINITIONS.items()]
    scales = [f"  --scale {name:<14} {scale.about}" for name, scale in SCALES.items()]
    return "\n".join(["sodaopt reproduce NAME [--scale paper|proxy]", "", *lines, "", *scales])


@dataclass(frozen=True)
class Work:
    """A study at a scale, with what it is run with."""

    study: Study
    scale: Scale
    settings: dict[str, Any]
    folder: Path
    execution: Execution
    workers: int
    vocab: int
    board: Console

    def run(self, jobs: Iterable[Job]) -> list[Run]:
        """Every run of the jobs, all of them done."""
        todo = rows(list(jobs), self.folder, self.execution, self.vocab)
        failed = run_rows(todo, self.workers, self.board)
        if failed:
            count = f"{len(failed)} of {len(todo)} runs are not done"
            errors = [o.error for o in failed if o.error]
            raise Failed(f"{count} ({errors[0]})") if errors else Unfinished(count)
        return [run for row in todo if (run := row.run()) is not None]

    def jobs(self, lr: dict[str, float]) -> list[Job]:
        """Seed by seed, so that a study that is stopped early has whole rows."""
        study, seeds = self.study, range(self.scale.seeds)
        return [self._job(c, r, s, lr) for s in seeds for r in self._rows() for c in study.cells]

    def _rows(self) -> Sequence[Any]:
        """With the settings of all runs, which may make rows the same."""
        found = [self._row_with(row) for row in self.study.rows(self.scale)]
        return list({row.label: row for row in found}.values())

    def _row_with(self, row: Any) -> Any:
        """A row that is named by its length is named by the one that it has."""
        label, settings = row.label, row.settings | self.settings
        if label == row.settings.get("horizon") != settings.get("horizon"):
            job = self._job(self.study.cells[0], replace(row, settings=settings), 0, {})
            label = f"{resolve(job, self.vocab).horizon:.3g}x"
        return replace(row, label=label, settings=settings)

    def _job(self, cell: Any, row: Any, seed: int, lr: dict[str, float]) -> Job:
        return cell.job(self.scale, row, seed, lr.get(cell.base))  # type: ignore[no-any-return]

    # -- learning rates -----------------------------------------------------------------------

    def tune(self) -> dict[str, dict[float, float]]:
        """The baselines' losses on a grid of powers of two that holds its best point inside."""
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
            "lr": lr,
        }
        return Job(**(values | self.settings | {"optimizer": base}))

    def _grid(self, base: str, tried: dict[float, float]) -> list[float]:
        """Learning rates to try next."""
        if not tried:
            middle = self.scale.lr.get(base, BASES[base].lr)
            return [middle / 2, middle, middle * 2]
        low, high, at = min(tried), max(tried), best(tried)
        return [low / 2] if at == low else [high * 2] if at == high else []

    def _loss(self, job: Job) -> float:
        run = self._row(job).run()
        return math.inf if run is None or run.val_loss is None else run.val_loss

    def _row(self, job: Job) -> Row:
        return rows([job], self.folder, self.execution, self.vocab)[0]

    # -- other settings -----------------------------------------------------------------------

    def candidates(self, lr: dict[str, float]) -> list[Job]:
        """The jobs that `choose` runs, seed by seed."""
        cells = [cell.chosen(c) for cell in self.study.cells for c in cell.choices]
        return [self._job(c, self._rows()[0], seed, lr) for seed in TUNING_SEEDS for c in cells]

    def choose(self, lr: dict[str, float]) -> tuple[list[dict[str, Any]], Work]:
        """Return the losses of every choice, and this work with the best choice of each cell.

        The choices are compared at the first row, on seeds that the study does not use.
        """
        if jobs := self.candidates(lr):
            self.run(jobs)
        tried = [self._tried(cell, c, lr) for cell in self.study.cells for c in cell.choices]
        worst_first = sorted(tried, key=lambda t: -math.inf if t["mean"] is None else -t["mean"])
        best = {t["column"]: t["settings"] for t in worst_first}
        cells = tuple(cell.chosen(best.get(cell.column, {})) for cell in self.study.cells)
        return tried, replace(self, study=replace(self.study, cells=cells))

    def _tried(self, cell: Any, choice: dict[str, Any], lr: dict[str, float]) -> dict[str, Any]:
        row, it = self._rows()[0], cell.chosen(choice)
        losses = [self._loss(self._job(it, row, seed, lr)) for seed in TUNING_SEEDS]
        mean = fmean(losses)
        return {
            "column": cell.column,
            "settings": choice,
            "seeds": list(TUNING_SEEDS),
            "losses": [loss if math.isfinite(loss) else None for loss in losses],
            "mean": mean if math.isfinite(mean) else None,
        }

    # -- numbers ------------------------------------------------------------------------------

    def numbers(self, lr: dict[str, float], tuned: dict[str, dict[float, float]]) -> dict[str, Any]:
        cells = [self._cell(row, cell, lr) for row in self._rows() for cell in self.study.cells]
        some = self._row(self.jobs(lr)[0]).run()
        assert some is not None
        return {
            "title": self.study.title,
            "sodaopt": __version__,
            "environment": some.head["environment"],
            "git": some.head["git"],
            "data": some.head["data"],
            "parameters": some.head["model"]["parameters"],
            "learning_rates": {base: _finite(losses) for base, losses in tuned.items()},
            "cells": cells,
            "differences": [d for row in self._rows() for d in self._differences(row.label, cells)],
            "published": {k: list(v) for k, v in self.study.published.items()},
        }

    def _cell(self, row: Any, cell: Any, lr: dict[str, float]) -> dict[str, Any]:
        jobs = [self._job(cell, row, seed, lr) for seed in range(self.scale.seeds)]
        runs = [run for job in jobs if (run := self._row(job).run()) is not None]
        losses = [run.val_loss for run in runs]
        known = [loss for loss in losses if loss is not None]
        end = runs[0].end or {}
        return {
            "row": row.label,
            "column": cell.column,
            "optimizer": cell.optimizer,
            "settings": cell.settings,
            "lr": resolve(jobs[0], self.vocab).settings.lr,
            "steps": runs[0].job["steps"],
            "epochs": end.get("epochs"),
            "losses": losses,
            "mean": fmean(known) if known else None,
            "spread": stdev(known) if len(known) > 1 else None,
            "diverged": sum(loss is None for loss in losses),
            "seconds": [(run.end or {}).get("seconds") for run in runs],
            "tokens_per_second": [(run.end or {}).get("tokens_per_second") for run in runs],
            "curve": [[v["step"], v["loss"]] for v in runs[0].of("val")],
        }

    def _differences(self, row: str, cells: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        at = {c["column"]: c["losses"] for c in cells if c["row"] == row}
        found = []
        for one, other in self.study.pairs:
            pairs = zip(at[one], at[other], strict=True)
            gaps = [a - b for a, b in pairs if a is not None and b is not None]
            if gaps:
                spread = stdev(gaps) if len(gaps) > 1 else None
                found.append(
                    {"row": row, "one": one, "other": other, "mean": fmean(gaps), "spread": spread,
                     "n": len(gaps), "p": t_test(gaps)}
                )  # fmt: skip
        return found


def _finite(losses: dict[float, float]) -> dict[str, float | None]:
    """For JSON, which has no infinity: a run that diverged has no loss."""
    return {str(lr): loss if math.isfinite(loss) else None for lr, loss in sorted(losses.items())}


def best(losses: dict[float, float]) -> float:
    """The learning rate with the lowest loss."""
    return min(losses, key=losses.__getitem__)
