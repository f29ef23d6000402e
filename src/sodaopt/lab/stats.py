"""Runs as rows: the seeds of a variant together, their mean and spread, and what differs for sure.

A row is a variant, that is, a job without its seed. Rows are compared seed by seed: the same seed
gives the same initialisation and the same batches, so that much of the noise cancels.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from statistics import fmean, median, stdev
from typing import Any

from . import labels
from .records import DIVERGED, FINISHED, STOPPED, Record, Run

UNFINISHED = "unfinished"
MARKS = ((0.001, "***"), (0.01, "**"), (0.05, "*"))
AXES = ("lr", "wd")
SCALE = ("preset", "data", "horizon", "steps", "batch", "context", "width", "depth")
"""What a comparison of optimizers keeps the same."""


@dataclass(frozen=True)
class Row:
    """The runs of one variant, one for each seed."""

    label: str
    job: Record
    runs: list[Run] = field(repr=False)
    repeats: int = 0
    """Earlier runs of the same job, which do not count."""

    @cached_property
    def losses(self) -> dict[Any, float]:
        """Final validation loss by seed, of the runs that finished."""
        found = {run.job.get("seed"): run.val_loss for run in self.runs}
        return {seed: loss for seed, loss in found.items() if loss is not None}

    @property
    def n(self) -> int:
        return len(self.losses)

    @property
    def mean(self) -> float | None:
        return fmean(self.losses.values()) if self.losses else None

    @property
    def spread(self) -> float | None:
        """Sample standard deviation over seeds; one seed has none."""
        return stdev(self.losses.values()) if self.n > 1 else None

    @property
    def so_far(self) -> float | None:
        """Where nothing has finished: the mean of the latest validation losses."""
        latest = [vals[-1]["loss"] for run in self.runs if (vals := run.of("val"))]
        known = [loss for loss in latest if loss is not None]
        return fmean(known) if known and not self.losses else None

    @property
    def statuses(self) -> Counter[str]:
        return Counter(status(run) for run in self.runs)

    @property
    def diverged(self) -> int:
        return self.statuses[DIVERGED]

    @property
    def step_seconds(self) -> float | None:
        return _mean(step_seconds(run) for run in self.runs)

    @property
    def tokens_per_second(self) -> float | None:
        return _mean(tokens_per_second(run) for run in self.runs)

    @property
    def state_bytes(self) -> float | None:
        return _mean((run.end or {}).get("state_bytes") for run in self.runs)

    def summary(self) -> str:
        """'finished', or how many runs came to what end."""
        counts = self.statuses
        if len(counts) == 1:
            return _progress(self.runs) if UNFINISHED in counts else next(iter(counts))
        order = dict.fromkeys((FINISHED, DIVERGED, STOPPED, UNFINISHED, *counts))
        return ", ".join(f"{counts[name]} {name}" for name in order if counts[name])


def rows(runs: Iterable[Run]) -> list[Row]:
    """Runs by variant, in the order in which they come; of two with the same seed, the later."""
    groups: dict[str, dict[str, list[Run]]] = {}
    for run in runs:
        seeds = groups.setdefault(labels.key(labels.variant(run.job)), {})
        seeds.setdefault(labels.value(run.job.get("seed")), []).append(run)
    found = [[max(same, key=_age) for same in seeds.values()] for seeds in groups.values()]
    repeats = [sum(len(same) - 1 for same in seeds.values()) for seeds in groups.values()]
    jobs = [labels.variant(kept[0].job) for kept in found]
    named = zip(labels.labels(jobs), jobs, found, repeats, strict=True)
    return [Row(label, job, sorted(kept, key=_seed), again) for label, job, kept, again in named]


def _age(run: Run) -> tuple[bool, str]:
    """A run that came to its end counts before one that did not, whenever they began."""
    return run.done, str(run.head.get("time", ""))


def _seed(run: Run) -> tuple[int, str]:
    seed = run.job.get("seed")
    return (seed, "") if isinstance(seed, int) else (0, str(seed))


def status(run: Run) -> str:
    """finished, diverged, stopped; unfinished if it goes on or was killed, which looks the same."""
    return UNFINISHED if run.end is None else str(run.end.get("status", UNFINISHED))


def epochs(run: Run) -> float:
    """How often it saw its data, as far as its end says."""
    return float((run.end or {}).get("epochs") or 0.0)


def notes(run: Run) -> list[str]:
    """What it had to say, such as that it could not be saved; each thing once."""
    said = [str(r.get("text", "")) for r in run.records if r["kind"] == "note"]
    return list(dict.fromkeys(said))


def _progress(runs: Sequence[Run]) -> str:
    done = [r["step"] for run in runs for r in (run.of("step")[-1:] or run.of("val")[-1:])]
    total = sum(run.job.get("steps") or 0 for run in runs)
    return f"{UNFINISHED}, {sum(done) / total:.0%}" if total else UNFINISHED


def _mean(values: Iterable[float | None]) -> float | None:
    known = [v for v in values if v is not None]
    return fmean(known) if known else None


def step_seconds(run: Run) -> float | None:
    """The median over the intervals between records: a pause or a validation does not count."""
    steps = [r for r in run.of("step") if r.get("seconds") is not None]
    pairs = [(b["seconds"] - a["seconds"], b["step"] - a["step"])
             for a, b in pairwise(steps)]  # fmt: skip
    rates = [seconds / count for seconds, count in pairs if seconds > 0]
    return median(rates) if rates else None


def tokens_per_second(run: Run) -> float | None:
    rates = [r["tokens_per_second"] for r in run.of("step") if r.get("tokens_per_second")]
    return median(rates[1:] or rates) if rates else None  # the first one includes compilation


# -- differences ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Difference:
    """Row minus base over the seeds that both finished."""

    mean: float
    n: int
    p: float | None
    """Of a two-sided paired t-test; one seed has none."""

    @property
    def mark(self) -> str:
        """One to three stars; no correction for how many rows are compared."""
        return next((m for level, m in MARKS if self.p is not None and self.p < level), "")


def difference(row: Row, base: Row) -> Difference | None:
    """Return the mean difference by seed, or None if they share no finished seed."""
    gaps = [row.losses[seed] - base.losses[seed] for seed in row.losses if seed in base.losses]
    return Difference(fmean(gaps), len(gaps), p_value(gaps)) if gaps else None


def p_value(gaps: Sequence[float]) -> float | None:
    """Return the p value of a two-sided paired t-test, or None for fewer than two pairs.

    gaps: the differences between the pairs
    """
    if len(gaps) < 2:
        return None
    if stdev(gaps) == 0:  # scipy warns and returns nan here
        return 0.0 if fmean(gaps) else 1.0
    from scipy.stats import ttest_1samp  # slow to import

    return float(ttest_1samp(gaps, 0.0).pvalue)


def bases(rows: Sequence[Row]) -> list[Row]:
    """What each row is compared with: the first one, or the first at its scale if that has more.

    If the first belongs to a sweep, the best of that sweep stands for it: no one is helped by a
    comparison with a learning rate that nobody would use.
    """
    lines = sweep(rows, AXES[0])
    first: dict[str, Row] = {}
    for line in lines:
        first.setdefault(scale(line.job), line.head)
    if len(first) == len(lines):  # the scale is what is compared
        return [lines[0].head] * len(rows)
    return [first[scale(row.job)] for row in rows]


def scale(job: Record) -> str:
    return labels.key({name: job.get(name) for name in SCALE})


# -- sweeps ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Line:
    """One optimizer along an axis. At each value, the best row over the other axes."""

    label: str
    job: Record
    points: list[tuple[float, Row]]
    tried: int
    """Rows that the points were chosen from."""

    @property
    def best(self) -> tuple[float, Row] | None:
        known = [(x, row) for x, row in self.points if row.mean is not None]
        return min(known, key=lambda point: _loss(point[1]), default=None)

    @property
    def head(self) -> Row:
        """The row that stands for the line: its best one, or the first if none has finished."""
        return self.best[1] if self.best else self.points[0][1]

    @property
    def edge(self) -> bool:
        """The best value is the first or the last one tried: a better one may lie beyond."""
        ends = [self.points[0][0], self.points[-1][0]]
        return len(self.points) > 1 and self.best is not None and self.best[0] in ends


def sweep(rows: Sequence[Row], axis: str) -> list[Line]:
    """A line for each variant that differs from the others by more than the axes."""
    groups: dict[str, list[Row]] = {}
    for row in rows:
        groups.setdefault(labels.key(labels.variant(row.job, AXES)), []).append(row)
    jobs = [labels.variant(group[0].job, AXES) for group in groups.values()]
    named = zip(labels.labels(jobs), jobs, groups.values(), strict=True)
    return [Line(label, job, _points(group, axis), len(group)) for label, job, group in named]


def swept(lines: Iterable[Line]) -> bool:
    return any(len(line.points) > 1 for line in lines)


def _points(rows: Iterable[Row], axis: str) -> list[tuple[float, Row]]:
    at: dict[float, Row] = {}
    for row in rows:
        x = float(row.job.get(axis) or 0)
        at[x] = min(at.get(x, row), row, key=_loss)
    return sorted(at.items(), key=lambda point: point[0])


def _loss(row: Row) -> float:
    return math.inf if row.mean is None else row.mean


def best(rows: Sequence[Row], axis: str) -> dict[str, float]:
    """Of each swept line, the value of the axis with the lowest loss."""
    lines = [line for line in sweep(rows, axis) if len(line.points) > 1]
    return {line.label: line.best[0] for line in lines if line.best}
