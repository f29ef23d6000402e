"""Compute the data of the charts. page.py draws them with uPlot, figures.py with matplotlib."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from statistics import fmean, median
from typing import Any

from .. import labels
from ..optimizers import parse
from ..records import DIVERGED, FINISHED, Run
from ..variants import AXES, SCALE, SweepLine, Variant, scale, status, sweep, swept

NAMES = {"lr": "learning rate", "wd": "weight decay"}
POINTS = 1500
"""Most points of a curve."""
BUDGET = 12_000
"""Most points of all curves of a chart, to limit the size of a page."""
SMOOTH = 0.02
"""Window for smoothing the training loss, as a fraction of the run."""


@dataclass(frozen=True)
class Curve:
    """Loss along a run: the mean over seeds, and the range if there are several seeds."""

    label: str
    colour: int
    main: bool
    """Whether it is the best variant of its optimizer. Only these are shown if there are many."""
    alone: bool
    """Whether it is one diverged seed of a variant with other seeds."""
    steps: list[float]
    tokens: list[float]
    seconds: list[float]
    loss: list[float]
    low: list[float]
    high: list[float]


def colours(variants: Sequence[Variant]) -> list[int]:
    """Return a colour for each variant. The best one of a sweep has the colour of its line."""
    heads = [line.head for line in sweep(variants, AXES[0])]
    order = [
        *heads,
        *(variant for variant in variants if not any(variant is head for head in heads)),
    ]
    at = {id(variant): j for j, variant in enumerate(order)}
    return [at[id(variant)] for variant in variants]


def curves(variants: Sequence[Variant], kind: str) -> list[Curve]:
    """Return the curves of the variants.

    kind: 'val' for the validation loss, or 'step' for the smoothed training loss
    """
    heads, found = len(sweep(variants, AXES[0])), []
    for variant, colour in zip(variants, colours(variants), strict=True):
        for label, runs in _drawn(variant):
            curve = _curve(label, colour, colour < heads, runs, kind)
            found.append(replace(curve, alone=label != variant.label))
    limit = max(100, min(POINTS, BUDGET // max(1, len(found))))
    return [thin(curve, limit) for curve in found if curve.steps]


def _drawn(variant: Variant) -> list[tuple[str, list[Run]]]:
    """Return the curves of a variant as (label, runs). A diverged seed is not part of the mean."""
    bad = [run for run in variant.runs if status(run) == DIVERGED]
    good = [run for run in variant.runs if status(run) != DIVERGED]
    if not bad or not good:
        return [(variant.label, variant.runs)]
    alone = [(f"{variant.label}, seed {run.job.get('seed')} diverged", [run]) for run in bad]
    return [(variant.label, good), *alone]


def _curve(label: str, colour: int, main: bool, runs: Sequence[Run], kind: str) -> Curve:
    at = _common(runs, kind)
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


def _common(runs: Sequence[Run], kind: str) -> dict[int, list[dict[str, Any]]]:
    """Return the records of the steps that all runs have, so that each mean is over the same seeds.

    If some runs have finished, the others do not count.
    """
    done = [run for run in runs if status(run) == FINISHED] or list(runs)
    at: dict[int, list[dict[str, Any]]] = {}
    for run in done:
        for record in run.of(kind):
            if record.get("loss") is not None:
                at.setdefault(record["step"], []).append(record)
    most = max(map(len, at.values()), default=0)
    return {step: found for step, found in at.items() if len(found) == most}


def _along(at: dict[int, list[dict[str, Any]]], name: str) -> list[float]:
    """Return the mean tokens or seconds over seeds, or an empty list if a step has none."""
    known = [[r[name] for r in at[step] if r.get(name) is not None] for step in sorted(at)]
    return [fmean(some) for some in known] if all(known) else []


def smooth(values: Sequence[float]) -> list[float]:
    """Return the exponential average, without a bias towards the first value."""
    keep = 1 - 1 / max(1.0, SMOOTH * len(values))
    total = weight = 0.0
    out = []
    for v in values:
        total, weight = keep * total + v, keep * weight + 1
        out.append(total / weight)
    return out


def thin(curve: Curve, limit: int) -> Curve:
    """Reduce a curve to `limit` evenly spaced points, including the first and the last."""
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
    """A variant as a point on the axis."""

    x: float
    loss: float | None
    spread: float | None
    diverged: int
    label: str
    n: int
    """Number of seeds in the loss."""
    fewer: bool
    """Whether other points of the panel have more seeds. Such a point is hollow."""


@dataclass(frozen=True)
class Trace:
    """A line of a sweep.

    level: the optimizer does not have a weight decay, so the line is horizontal
    best, lowest: the best value of the setting, and its loss
    edge: the best value is the first or the last one
    """

    label: str
    colour: int
    level: bool
    marks: list[Mark]
    best: str
    lowest: float | None
    edge: bool


@dataclass(frozen=True)
class Panel:
    """Loss against one setting. The axis is log2, with zero to the left of the other values."""

    axis: str
    title: str
    ticks: list[float]
    names: list[str]
    traces: list[Trace]
    range: tuple[float, float]
    chosen: str
    """The other setting, if each point is the best of several of its values, else empty."""
    notes: list[str]
    """Sentences about the marks that the panel has."""


def panels(variants: Sequence[Variant]) -> list[Panel]:
    """Return a panel for each swept setting and each scale of the runs."""
    return [panel for axis in AXES for panel in _panels(variants, axis)]


def _panels(variants: Sequence[Variant], axis: str) -> list[Panel]:
    lines = sweep(variants, axis)
    scales: dict[str, list[int]] = {}
    for j, line in enumerate(lines):
        scales.setdefault(scale(line.job), []).append(j)
    names = labels.distinguishing([line.job for line in lines])
    names = [name for name in names if name in SCALE]
    return [
        _panel([lines[j] for j in js], js, axis, labels.settings(lines[js[0]].job, names))
        for js in scales.values()
        if swept(lines[j] for j in js)
    ]


def _panel(lines: Sequence[SweepLine], indices: Sequence[int], axis: str, title: str) -> Panel:
    values = sorted({x for line in lines if not _level(line, axis) for x, _ in line.points})
    at = dict(zip(values, positions(values), strict=True))
    inner = labels.labels([line.job for line in lines])
    named = zip(lines, indices, inner, strict=True)
    most = max(variant.n for line in lines for _, variant in line.points)
    traces = [_trace(line, colour, label, axis, at, most) for line, colour, label in named]
    ends = [end for line in lines for _, variant in line.points for end in interval(variant)]
    ticks, names = list(at.values()), [labels.value(v) for v in values]
    reach, chosen = window(ends or [0.0]), _chosen(lines, axis)
    notes = _notes(traces, axis, chosen, reach[1])
    return Panel(axis, title, ticks, names, traces, reach, chosen, notes)


def _notes(traces: Sequence[Trace], axis: str, chosen: str, top: float) -> list[str]:
    """Describe the marks of a panel, and only those that are drawn."""
    drawn = [mark for trace in traces for mark in trace.marks if not trace.level]
    counts = {mark.n for trace in traces for mark in trace.marks if mark.n}
    high = any(mark.loss is not None and mark.loss > top and not mark.diverged for mark in drawn)
    level = ", ".join(trace.label for trace in traces if trace.level)
    said = {
        f"Level lines have no {NAMES[axis]} to tune: {level}.": level,
        f"At each point, the best {NAMES.get(chosen, chosen)}.": chosen,
        "Edge: the best value is the last one tried. A better one may lie beyond it.": any(
            trace.edge for trace in traces
        ),
        f"Points are means over {min(counts, default=0)} to {max(counts, default=0)} seeds. Those "
        "with fewer seeds are hollow: differences to them are less certain.": len(counts) > 1,
        "× at the top: a seed diverged.": any(mark.diverged for mark in drawn),
        "▴ at the top: a loss beyond the axis.": high,
    }
    return [text for text, holds in said.items() if holds]


def interval(variant: Variant) -> tuple[float, ...]:
    spread = variant.spread or 0.0
    return () if variant.mean is None else (variant.mean - spread, variant.mean + spread)


def positions(values: Sequence[float]) -> list[float]:
    """Return log2 of the values, with zero a little to the left of the smallest."""
    least = min((v for v in values if v > 0), default=1.0)
    return [math.log2(v) if v > 0 else math.log2(least) - 1.5 for v in values]


def _level(line: SweepLine, axis: str) -> bool:
    """Whether the optimizer does not have the setting. All of them have a learning rate."""
    if axis != "wd" or [x for x, _ in line.points] != [0.0]:
        return False
    try:
        return not parse(str(line.job.get("optimizer"))).decays
    except ValueError:  # an optimizer of another version
        return False


def _trace(
    line: SweepLine, colour: int, label: str, axis: str, at: dict[float, float], most: int
) -> Trace:
    level = _level(line, axis)
    marks = [
        Mark(0.0 if level else at[x], v.mean, v.spread, v.diverged, v.label, v.n, 0 < v.n < most)
        for x, v in line.points
    ]
    several = len(line.points) > 1 and line.best is not None
    best = labels.value(line.best[0]) if several and line.best else ""
    return Trace(label, colour, level, marks, best, line.head.mean, line.edge)


def _chosen(lines: Iterable[SweepLine], axis: str) -> str:
    """Return the other axis if a line has more variants than points, else an empty string."""
    several = any(line.tried > len(line.points) for line in lines)
    return next(other for other in AXES if other != axis) if several else ""


def window(losses: Sequence[float]) -> tuple[float, float]:
    """Return a range that shows the better half well. Losses far above it are cut off."""
    low, middle, top = min(losses), median(losses), max(losses)
    high = min(top, low + 4 * (middle - low)) if middle > low else top
    margin = 0.08 * (high - low) or 0.01 * abs(low) or 1.0
    return low - margin, high + margin
