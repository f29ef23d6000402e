"""What the charts show, as plain data: the page draws it with uPlot, papers with matplotlib."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from statistics import fmean, median
from typing import Any

from .. import labels
from ..records import DIVERGED, Run
from ..stats import AXES, SCALE, Line, Row, scale, status, sweep, swept

POINTS = 1500
"""The most points that a line is drawn with."""
BUDGET = 12_000
"""Points of all lines of a chart together, which bounds the size of a page."""
SMOOTH = 0.02
"""Smoothing of the training loss, as a part of the run."""


@dataclass(frozen=True)
class Curve:
    """Loss along a run: the mean over seeds, and the range where there are several."""

    label: str
    colour: int
    main: bool
    """The best of its optimizer: shown at first where there are too many to show."""
    alone: bool
    """A seed that diverged, where others of its variant did not."""
    steps: list[float]
    tokens: list[float]
    seconds: list[float]
    loss: list[float]
    low: list[float]
    high: list[float]


def colours(rows: Sequence[Row]) -> list[int]:
    """A colour for each row. The best row of a sweep has the colour of its line in the sweep."""
    heads = [line.head for line in sweep(rows, AXES[0])]
    order = [*heads, *(row for row in rows if not any(row is head for head in heads))]
    at = {id(row): j for j, row in enumerate(order)}
    return [at[id(row)] for row in rows]


def curves(rows: Sequence[Row], kind: str) -> list[Curve]:
    """Of kind `val`, or `step` for the training loss, which is smoothed."""
    heads, found = len(sweep(rows, AXES[0])), []
    for row, colour in zip(rows, colours(rows), strict=True):
        for label, runs in _drawn(row):
            curve = _curve(label, colour, colour < heads, runs, kind)
            found.append(replace(curve, alone=label != row.label))
    limit = max(100, min(POINTS, BUDGET // max(1, len(found))))
    return [thin(curve, limit) for curve in found if curve.steps]


def _drawn(row: Row) -> list[tuple[str, list[Run]]]:
    """A diverged seed among others gets its own line: a mean with it would say nothing."""
    bad = [run for run in row.runs if status(run) == DIVERGED]
    good = [run for run in row.runs if status(run) != DIVERGED]
    if not bad or not good:
        return [(row.label, row.runs)]
    alone = [(f"{row.label}, seed {run.job.get('seed')} diverged", [run]) for run in bad]
    return [(row.label, good), *alone]


def _curve(label: str, colour: int, main: bool, runs: Sequence[Run], kind: str) -> Curve:
    at: dict[int, list[dict[str, Any]]] = {}
    for run in runs:
        for record in run.of(kind):
            if record.get("loss") is not None:
                at.setdefault(record["step"], []).append(record)
    losses = [[float(r["loss"]) for r in at[step]] for step in sorted(at)]
    mean = [fmean(some) for some in losses]
    several = kind == "val" and any(len(some) > 1 for some in losses)
    return Curve(
        label,
        colour,
        main,
        False,
        [float(step) for step in sorted(at)],
        _along(at, "tokens"),
        _along(at, "seconds"),
        smooth(mean) if kind == "step" else mean,
        [min(some) for some in losses] if several else [],
        [max(some) for some in losses] if several else [],
    )


def _along(at: dict[int, list[dict[str, Any]]], name: str) -> list[float]:
    """The mean over seeds of tokens or seconds; nothing if a record does not have it."""
    known = [[r[name] for r in at[step] if r.get(name) is not None] for step in sorted(at)]
    return [fmean(some) for some in known] if all(known) else []


def smooth(values: Sequence[float]) -> list[float]:
    """Exponential average without the bias to the first value."""
    keep = 1 - 1 / max(1.0, SMOOTH * len(values))
    total = weight = 0.0
    out = []
    for v in values:
        total, weight = keep * total + v, keep * weight + 1
        out.append(total / weight)
    return out


def thin(curve: Curve, limit: int) -> Curve:
    """At most so many points, evenly spaced, with the first and the last."""
    count = len(curve.steps)
    if count <= limit:
        return curve
    kept = sorted({round(j * (count - 1) / (limit - 1)) for j in range(limit)})

    def some(values: list[float]) -> list[float]:
        return [values[j] for j in kept] if values else []

    return replace(
        curve, steps=some(curve.steps), tokens=some(curve.tokens), seconds=some(curve.seconds),
        loss=some(curve.loss), low=some(curve.low), high=some(curve.high),
    )  # fmt: skip


# -- sweeps ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Mark:
    """A row at its place on the axis."""

    x: float
    loss: float | None
    spread: float | None
    diverged: int
    label: str


@dataclass(frozen=True)
class Trace:
    """A line of a sweep. Level: it has no such setting, and holds for all its values."""

    label: str
    colour: int
    level: bool
    marks: list[Mark]
    best: str
    edge: bool


@dataclass(frozen=True)
class Panel:
    """Loss against one setting. The axis is log2; a value of zero stands left of the others."""

    axis: str
    title: str
    ticks: list[float]
    names: list[str]
    traces: list[Trace]
    range: tuple[float, float]
    chosen: str
    """The other setting, if the best of several of its values was taken at each point."""


def panels(rows: Sequence[Row]) -> list[Panel]:
    """A panel for each swept setting and each scale of the runs."""
    return [panel for axis in AXES for panel in _panels(rows, axis)]


def _panels(rows: Sequence[Row], axis: str) -> list[Panel]:
    lines = sweep(rows, axis)
    scales: dict[str, list[int]] = {}
    for j, line in enumerate(lines):
        scales.setdefault(scale(line.job), []).append(j)
    names = labels.telling([line.job for line in lines])
    names = [name for name in names if name in SCALE]
    return [
        _panel([lines[j] for j in js], js, axis, labels.settings(lines[js[0]].job, names))
        for js in scales.values()
        if swept(lines[j] for j in js)
    ]


def _panel(lines: Sequence[Line], indices: Sequence[int], axis: str, title: str) -> Panel:
    values = sorted({x for line in lines if not _level(line, axis) for x, _ in line.points})
    at = dict(zip(values, positions(values), strict=True))
    inner = labels.labels([line.job for line in lines])
    named = zip(lines, indices, inner, strict=True)
    traces = [_trace(line, colour, label, axis, at) for line, colour, label in named]
    ends = [end for line in lines for _, row in line.points for end in interval(row)]
    ticks, names = list(at.values()), [labels.value(v) for v in values]
    return Panel(axis, title, ticks, names, traces, window(ends or [0.0]), _chosen(lines, axis))


def interval(row: Row) -> tuple[float, ...]:
    spread = row.spread or 0.0
    return () if row.mean is None else (row.mean - spread, row.mean + spread)


def positions(values: Sequence[float]) -> list[float]:
    """log2, with zero a little to the left of the smallest."""
    least = min((v for v in values if v > 0), default=1.0)
    return [math.log2(v) if v > 0 else math.log2(least) - 1.5 for v in values]


def _level(line: Line, axis: str) -> bool:
    """Only weight decay can be missing; every optimizer has a learning rate."""
    return axis == "wd" and [x for x, _ in line.points] == [0.0]


def _trace(line: Line, colour: int, label: str, axis: str, at: dict[float, float]) -> Trace:
    level = _level(line, axis)
    marks = [
        Mark(0.0 if level else at[x], row.mean, row.spread, row.diverged, row.label)
        for x, row in line.points
    ]
    several = len(line.points) > 1 and line.best is not None
    best = labels.value(line.best[0]) if several and line.best else ""
    return Trace(label, colour, level, marks, best, line.edge)


def _chosen(lines: Iterable[Line], axis: str) -> str:
    """The other axis, where a line had more rows to choose from than it has points."""
    several = any(line.tried > len(line.points) for line in lines)
    return next(other for other in AXES if other != axis) if several else ""


def window(losses: Sequence[float]) -> tuple[float, float]:
    """A range that shows the better half well; what lies far above it is marked at the edge."""
    low, middle, top = min(losses), median(losses), max(losses)
    high = min(top, low + 4 * (middle - low)) if middle > low else top
    margin = 0.08 * (high - low) or 0.01 * abs(low) or 1.0
    return low - margin, high + margin
