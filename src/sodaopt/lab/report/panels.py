"""Compute the charts of sweeps: loss against a setting, and heat maps of two settings."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import median

from .. import labels
from ..optimizers import decays, parse
from ..variants import AXES, SCALE, SweepLine, Variant, scale, sweep, swept

NAMES = {"lr": "learning rate", "wd": "weight decay"}


@dataclass(frozen=True)
class SweepPoint:
    """A point of a sweep: the loss of one variant."""

    x: float
    """Position on the axis, see `positions`."""
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

    level: whether the line is horizontal, because the optimizer does not have a weight decay
    best, lowest: the best value of the setting, and its loss
    edge: whether the best value is the smallest or the largest one
    """

    label: str
    colour: int
    level: bool
    points: list[SweepPoint]
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
    """Sentences that explain the symbols of the panel."""


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
    """Explain the symbols that the panel has, in sentences.

    top: the highest loss on the axis
    """
    drawn = [point for trace in traces for point in trace.points if not trace.level]
    counts = {point.n for trace in traces for point in trace.points if point.n}
    high = any(p.loss is not None and p.loss > top and not p.diverged for p in drawn)
    level = ", ".join(trace.label for trace in traces if trace.level)
    said = {
        f"Level lines have no {NAMES[axis]} to tune: {level}.": level,
        f"Each point has the best {NAMES.get(chosen, chosen)} that was tried.": chosen,
        "Edge: the best value is the smallest or the largest one tried. A better one may lie "
        "beyond it.": any(trace.edge for trace in traces),
        f"Points are means over {min(counts, default=0)} to {max(counts, default=0)} seeds. "
        "A point with fewer seeds is hollow, because its loss is less certain.": len(counts) > 1,
        "× at the top: a seed diverged.": any(point.diverged for point in drawn),
        "▴ at the top: a loss beyond the axis.": high,
    }
    return [text for text, holds in said.items() if holds]


def interval(variant: Variant) -> tuple[float, ...]:
    """Return the ends of the bar mean ± spread, or an empty tuple without a mean."""
    spread = variant.spread or 0.0
    return () if variant.mean is None else (variant.mean - spread, variant.mean + spread)


def positions(values: Sequence[float]) -> list[float]:
    """Return log2 of the values. Zero is a little to the left of the smallest other value."""
    least = min((v for v in values if v > 0), default=1.0)
    return [math.log2(v) if v > 0 else math.log2(least) - 1.5 for v in values]


def _level(line: SweepLine, axis: str) -> bool:
    """Whether the axis is the weight decay and the optimizer of the line does not have one."""
    if axis != "wd" or [x for x, _ in line.points] != [0.0]:
        return False
    try:
        return not decays(parse(str(line.job.get("optimizer"))))
    except ValueError:  # an optimizer of another version
        return False


def _trace(
    line: SweepLine, colour: int, label: str, axis: str, at: dict[float, float], most: int
) -> Trace:
    """Return a line of a panel.

    at: the position of each value on the axis
    most: the most seeds of a point of the panel
    """
    level = _level(line, axis)
    points = [
        SweepPoint(
            0.0 if level else at[x], v.mean, v.spread, v.diverged, v.label, v.n, 0 < v.n < most
        )
        for x, v in line.points
    ]
    several = len(line.points) > 1 and line.best is not None
    best = labels.value(line.best[0]) if several and line.best else ""
    return Trace(label, colour, level, points, best, line.head.mean, line.edge)


def _chosen(lines: Iterable[SweepLine], axis: str) -> str:
    """Return the other axis if a line has more variants than points, else an empty string."""
    several = any(line.tried > len(line.points) for line in lines)
    return next(other for other in AXES if other != axis) if several else ""


def window(losses: Sequence[float]) -> tuple[float, float]:
    """Return a range that shows the better half of the losses in detail. Others may be outside."""
    low, middle, top = min(losses), median(losses), max(losses)
    high = min(top, low + 4 * (middle - low)) if middle > low else top
    margin = 0.08 * (high - low) or 0.01 * abs(low) or 1.0
    return low - margin, high + margin


# -- heat maps ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class HeatMap:
    """Losses of one optimizer by learning rate (columns) and weight decay (rows)."""

    label: str
    columns: list[float]
    rows: list[float]
    cells: dict[tuple[float, float], Variant]
    best: Variant | None


def heat_maps(variants: Sequence[Variant]) -> list[HeatMap]:
    """Return a map for each optimizer with several learning rates and weight decays."""
    groups: dict[str, list[Variant]] = {}
    for variant in variants:
        groups.setdefault(variant.sweep_key, []).append(variant)
    jobs = [labels.without_seed(group[0].job, AXES) for group in groups.values()]
    named = zip(labels.labels(jobs), groups.values(), strict=True)
    found = [_heat_map(label, group) for label, group in named]
    return [one for one in found if len(one.columns) > 1 and len(one.rows) > 1]


def _heat_map(label: str, group: Sequence[Variant]) -> HeatMap:
    at = {tuple(float(v.job.get(axis) or 0) for axis in AXES): v for v in group}
    cells = {(lr, wd): v for (lr, wd), v in at.items()}
    known = [v for v in group if v.mean is not None]
    best = min(known, key=lambda v: v.rank, default=None)
    columns, rows = (sorted({key[j] for key in cells}) for j in (0, 1))
    return HeatMap(label, columns, rows, cells, best)
