"""Draw the charts of the page as PNG and SVG, for papers.

The colours are Okabe and Ito's, which colour-blind readers can distinguish.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..labels import pretty
from ..variants import Variant
from .charts import Curve, curves
from .panels import NAMES, Panel, SweepPoint, Trace, panels

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#B4568F", "#C98500", "#3A9FD8", "#4A4F59", "#6A3FB5")
DODGE = 0.12  # between the symbols of two lines, in powers of two
LINES: tuple[Any, ...] = ("-", "--", ":", "-.", (0, (4, 1, 1, 1)))


def draw(variants: Sequence[Variant], stem: Path, kinds: Sequence[str]) -> list[Path]:
    """Write STEM-val.KIND, and STEM-lr.KIND and STEM-wd.KIND for swept settings. Return the paths.

    kinds: 'png', 'svg' or both
    """
    from matplotlib import style

    stem.parent.mkdir(parents=True, exist_ok=True)
    found: dict[str, list[Panel]] = {}
    for panel in panels(variants):
        found.setdefault(panel.axis, []).append(panel)
    with style.context("sodaopt.figures"):
        losses = curves(variants, "val")
        drawn = {"val": trajectories(losses)} if losses else {}
        drawn |= {axis: sweeps(some) for axis, some in found.items()}
        return [_save(f, stem, name, kind) for name, f in drawn.items() for kind in kinds]


def _save(figure: Figure, stem: Path, name: str, kind: str) -> Path:
    path = stem.with_name(f"{stem.name}-{name}.{kind}")
    # Without a date, the same data gives the same file.
    figure.savefig(path, dpi=200, metadata={"Date": None} if kind == "svg" else None)
    return path


def style(colour: int) -> dict[str, Any]:
    """Return the colour and the dashes of a line, as arguments of matplotlib."""
    at = colour % len(COLOURS), colour // len(COLOURS) % len(LINES)
    return {"color": COLOURS[at[0]], "linestyle": LINES[at[1]]}


def _escaped(label: str) -> str:
    """Escape dollar signs, which begin a formula in matplotlib."""
    return pretty(label).replace("$", r"\$")


def trajectories(found: Sequence[Curve]) -> Figure:
    """Draw loss against steps, with the range over seeds."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6.4, 4.0), layout="constrained")
    ax = figure.add_subplot()
    shown = [c for c in found if c.main] if len(found) > len(COLOURS) else found
    for curve in shown:
        look = style(curve.colour) | ({"linestyle": ":"} if curve.alone else {})
        ax.plot(curve.steps, curve.loss, label=_escaped(curve.label), **look)
        if curve.low:
            colour = COLOURS[curve.colour % len(COLOURS)]
            ax.fill_between(curve.steps, curve.low, curve.high, color=colour, alpha=0.16, lw=0)
    ax.set(xlabel="steps", ylabel="validation loss", ylim=_settled(shown))
    ax.legend()
    return figure


def _settled(found: Sequence[Curve]) -> tuple[float, float]:
    """Return a range of losses that leaves out the steep start of the curves."""
    last = max(curve.steps[-1] for curve in found)
    pairs = [list(zip(c.steps, c.loss, strict=True)) for c in found]
    settled = [[y for x, y in pair if x >= 0.15 * last] for pair in pairs]
    few = max(map(len, settled)) < 3  # too few points to leave out the start
    kept = [ys for ys in ([c.loss for c in found] if few else settled) if ys]
    low, high, first = min(map(min, kept)), max(map(max, kept)), max(ys[0] for ys in kept)
    if first > low:  # cut off a diverging curve
        high = min(high, first + 0.25 * (first - low))
    margin = 0.05 * (high - low) or 0.01 * abs(high) or 0.1
    return low - margin, high + margin


def sweeps(found: Sequence[Panel]) -> Figure:
    """Draw final loss against one setting, in a panel for each scale."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(4.6 * len(found), 3.6), layout="constrained")
    for j, panel in enumerate(found):
        ax = figure.add_subplot(1, len(found), j + 1)
        for place, trace in enumerate(panel.traces):
            _trace(ax, trace, panel, DODGE * (place - (len(panel.traces) - 1) / 2))
        ax.set(title=_escaped(panel.title), xlabel=NAMES[panel.axis], ylabel="final loss",
               ylim=panel.range)  # fmt: skip
        ax.set_xticks(panel.ticks, [pretty(name) for name in panel.names])
        ax.legend()
    return figure


def _trace(ax: Axes, trace: Trace, panel: Panel, dodge: float) -> None:
    """Draw a line of a sweep.

    dodge: shift of the symbols at the top, so that no line covers the symbols of another
    """
    known = [point for point in trace.points if point.loss is not None]
    look, label = style(trace.colour), _escaped(trace.label)
    if trace.level:
        for point in known:
            ax.axhline(point.loss or 0.0, label=label, **look | {"linestyle": "--"})
            _band(ax, point, look["color"])
        return
    losses, spreads = [p.loss or 0.0 for p in known], [p.spread or 0.0 for p in known]
    ax.errorbar([p.x for p in known], losses, spreads, marker="o", label=label, **look)
    hollow = [p for p in known if p.fewer]
    ax.plot([p.x for p in hollow], [p.loss or 0.0 for p in hollow], "o", mfc="white", zorder=3,
            color=look["color"])  # fmt: skip
    # Diverged runs and losses above the range have symbols at the top.
    gone = [p.x + dodge for p in trace.points if p.diverged]
    beyond = [p.x + dodge for p in known if (p.loss or 0.0) > panel.range[1] and not p.diverged]
    for xs, marker in ((gone, "x"), (beyond, "^")):
        if xs:  # an empty line without clipping would stretch the layout
            ax.plot(xs, [panel.range[1]] * len(xs), marker, color=look["color"], clip_on=False)


def _band(ax: Axes, point: SweepPoint, colour: str) -> None:
    if point.loss is not None and point.spread:
        low, high = point.loss - point.spread, point.loss + point.spread
        ax.axhspan(low, high, color=colour, alpha=0.14, lw=0)
