"""Estimate the GPU time that the studies of the proxy scale still need.

The definitions of the studies name the planned runs. A run needs its tokens times the FLOPs per
token of its model. Its speed is the median speed of the measured runs at the standard size and
length.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from statistics import median
from typing import Any

from rich.console import Console

from sodaopt.lab.execution import Execution
from sodaopt.lab.job import ResolvedJob, resolve
from sodaopt.lab.presets import PRESETS
from sodaopt.lab.results import Numbers
from sodaopt.lab.scales import SCALES
from sodaopt.lab.studies import STUDIES
from sodaopt.lab.study_runs import Work

SCALE = "proxy"
VOCAB = PRESETS[SCALES[SCALE].preset].vocab or 0
CORE = (
    "muon", "adamw", "table-layers", "scion", "fig-anchor", "table-optimism", "sizes", "horizons",
    "learning-rates", "candidates-muon", "candidates-adamw",
)  # fmt: skip


def work(study: str) -> Work:
    return Work(STUDIES[study], SCALES[SCALE], {}, Path(), Execution(), 1, VOCAB, Console())


def flops(run: ResolvedJob) -> float:
    return float(run.tokens * run.shape.flops_per_token)


def seconds_per_flop(studies: Iterable[Numbers]) -> float:
    """Return the median seconds per FLOP of the measured runs at the standard size and length."""
    cells = [(numbers, cell) for numbers in studies for cell in numbers["cells"]]
    found = []
    for numbers, cell in cells:
        if cell["row"] == SCALES[SCALE].horizons[0]:
            cost = flops(next(iter(runs(numbers["study"], cell["row"]).values())))
            found += [seconds / cost for seconds in cell["seconds"] if seconds]
    return median(found)


def runs(study: str, row: str | None = None) -> dict[tuple[str, str, int], ResolvedJob]:
    """Return the planned runs of a study by row, column and seed."""
    it, scale = STUDIES[study], SCALES[SCALE]
    lr = {cell.base: scale.rate(cell.base) for cell in it.cells}
    return {
        (r.label, cell.column, seed): resolve(cell.job(scale, r, seed, lr[cell.base]), VOCAB)
        for seed in range(max(r.seeds for r in it.planned(scale)))
        for r in it.planned(scale)
        if seed < r.seeds and row in (None, r.label)
        for cell in it.cells
    }


def _tuning(study: str) -> dict[str, ResolvedJob]:
    """Return the runs that tune learning rates and choose settings, by key."""
    it = work(study)
    lr = {cell.base: it.scale.rate(cell.base) for cell in it.study.cells}
    jobs = [*it.first_grids(), *it.candidates(lr)]
    return {(run := resolve(job, VOCAB)).key: run for job in jobs}


def missing(measured: Mapping[str, Numbers]) -> dict[str, list[ResolvedJob]]:
    """Return the runs that each study of the core lacks. A shared run counts once.

    measured: the numbers of the proxy scale by study.
    """
    seen: set[str] = set()
    found: dict[str, list[ResolvedJob]] = {}
    for study in CORE:
        known = measured.get(study)
        done = _done(known) if known else set()
        planned = runs(study)
        todo = {} if known else _tuning(study)
        todo |= {run.key: run for at, run in planned.items() if at not in done}
        seen |= {run.key for at, run in planned.items() if at in done}
        found[study] = [run for key, run in todo.items() if key not in seen]
        seen |= todo.keys()
    return found


def _done(numbers: Numbers) -> set[tuple[str, str, int]]:
    cells: list[Any] = numbers["cells"]
    return {(cell["row"], cell["column"], seed) for cell in cells for seed in cell["seeds"]}
