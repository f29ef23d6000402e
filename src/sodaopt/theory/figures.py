"""The figures: gaps with their bounds, acceleration, the anchor and the comparison.

Colour-blind readers can distinguish the colours, which are Okabe and Ito's. Each curve also has its
own marker.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .experiments import Curve
from .remarks import STEPS
from .study import Study

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#8C8C8C",
           "#5D3A9B")  # fmt: skip
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "<", ">")


def draw(study: Study, out: Path, kinds: Sequence[str]) -> list[Path]:
    """Write every figure whose data the study has, as theory-NAME.KIND."""
    from matplotlib import style

    out.mkdir(parents=True, exist_ok=True)
    files = []
    for name, (has_data, figure) in FIGURES.items():
        if not has_data(study):
            continue
        with style.context("sodaopt.figures"):
            drawn = figure(study)
            for kind in kinds:
                path = out / f"theory-{name}.{kind}"
                # With a date, every run would change the file.
                metadata = {"Date": None} if kind == "svg" else None
                drawn.savefig(path, dpi=160, metadata=metadata)
                files.append(path)
    return files


def panels(rows: int, columns: int, width: float, height: float) -> tuple[Figure, list[Axes]]:
    """Return a figure with rows x columns axes. width, height: the size of each in inches."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width * columns, height * rows), layout="constrained")
    count = rows * columns
    return figure, [figure.add_subplot(rows, columns, j + 1) for j in range(count)]


def _log(ax: Axes, title: str, x: str = "gradients n") -> None:
    """Set logarithmic scales, the title and the labels of the axes."""
    ax.set_xscale("log", base=2)
    ax.set_yscale("log")
    ax.set_title(title)
    ax.set_xlabel(x)
    ax.set_ylabel("f(x) − f*")


def _pair(ax: Axes, xs: Sequence[float], gap: Any, bound: Any, label: str, j: int) -> None:
    """Draw a gap and its bound in one colour."""
    ax.plot(xs, gap, color=COLOURS[j], marker=MARKERS[j], label=label)
    ax.plot(xs, bound, color=COLOURS[j], linestyle="--", linewidth=1.2)


def _legend(ax: Axes, where: Any = "best") -> None:
    """Draw a legend of the curves, with one entry for all dashed lines."""
    from matplotlib.lines import Line2D

    dashed = Line2D([], [], color="0.3", linestyle="--", linewidth=1.2, label="the bound of each")
    ax.legend(handles=[*ax.get_legend_handles_labels()[0], dashed], loc=where)


RATES = (
    ("one method, zoo.moda (a = 1)", ("smooth", "noisy", "absolute")),
    ("one method, zoo.accelerated (a = k+1)", ("fast", "fast-noisy", "fast-absolute")),
)


def rates(study: Study) -> Figure:
    """Draw one method per panel on three problems: exact, noisy, not smooth."""
    figure, axes = panels(1, 2, 4.8, 3.9)
    slopes = {row.key: row.slope for row in study.rows}
    for ax, (title, keys) in zip(axes, RATES, strict=True):
        names = ("smooth, exact", "smooth, noisy", "not smooth")
        for j, (key, name) in enumerate(zip(keys, names, strict=True)):
            c, label = study.curves[key], f"{name}: slope {slopes[key]:.2f}".replace("-", "−")
            _pair(ax, c.ns, c.gap, c.bound, label, j)
        _log(ax, title)
        _legend(ax, "lower left")
    low = min(ax.get_ylim()[0] for ax in axes)
    high = max(ax.get_ylim()[1] for ax in axes)
    for ax in axes:
        ax.set_ylim(low, high)
    return figure


GEOMETRY = (
    ("l1 regression", (("l1", "½‖·‖ₚ² with p near 1"), ("l1-euclidean", "Euclidean"))),
    ("box, smoothed sign ball", (("box", "a = 1"), ("fast-box", "a = k+1"))),
    ("matrix, smoothed spectral ball", (("spectral", "a = 1"), ("fast-spectral", "a = k+1"))),
    ("logistic regression", (("logistic", "a = 1"), ("fast-logistic", "a = k+1"))),
)


def geometry(study: Study) -> Figure:
    """Draw the other problems, each in its own geometry."""
    figure, axes = panels(2, 2, 4.8, 3.2)
    for ax, (title, pairs) in zip(axes, GEOMETRY, strict=True):
        for j, (key, name) in enumerate(pairs):
            c = study.curves[key]
            _pair(ax, c.ns, c.gap, c.bound, name, j)
        _log(ax, title)
        _legend(ax)
    return figure


def acceleration(study: Study) -> Figure:
    """Draw optimism and averaging, separately and together."""
    figure, (ax,) = panels(1, 1, 8.2, 4.2)
    for j, c in enumerate(study.tandem):
        width = 2.6 if j == 0 else 1.4
        ax.plot(c.ns, c.gap, color=COLOURS[j], marker=MARKERS[j], linewidth=width, label=c.label)
    _log(ax, "optimism and averaging on the hard quadratic, each with its best step size")
    ax.set_ylim(top=3 * max(c.gap[0] for c in study.tandem))
    _guide(ax, study.tandem[0], -2)
    _guide(ax, study.tandem[2], -1)
    ax.legend(loc="center left", bbox_to_anchor=(1.0, 0.5))
    return figure


def _guide(ax: Axes, c: Curve, power: int) -> None:
    """Draw a line with this slope above the curve."""
    xs = [c.ns[-3], c.ns[-1]]
    ys = [2.5 * c.gap[-1] * (x / xs[1]) ** power for x in xs]
    ax.plot(xs, ys, color="0.35", linewidth=1, linestyle=":")
    middle = (xs[0] * xs[1]) ** 0.5, (ys[0] * ys[1]) ** 0.5
    ax.annotate(f"$n^{{{power}}}$", middle, color="0.25", ha="left", va="bottom")


ANCHORS = (
    ("distance", f"quadratic, n = {STEPS}, start at distance 1 from x*", "distance of x* from 0"),
    ("ablation", "logistic regression, warm start", "gradients n"),
)


def anchor(study: Study) -> Figure:
    """Draw z0 = initialisation against z0 = 0: with a moving origin, and on real data."""
    figure, axes = panels(1, 2, 4.8, 3.7)
    for ax, (name, title, x) in zip(axes, ANCHORS, strict=True):
        a = study.anchors[name]
        _pair(ax, a.xs, a.zero, a.zero_bound, "z0 = 0", 1)
        _pair(ax, a.xs, a.init, a.init_bound, "z0 = initialisation", 0)
        _log(ax, title, x)
        _legend(ax)
    return figure


def comparison(study: Study) -> Figure:
    """Draw all methods with their best learning rate, one problem per panel."""
    problems = list(dict.fromkeys(r.problem for r in study.comparison))
    methods = list(dict.fromkeys(r.method for r in study.comparison))
    figure, axes = panels(2, 2, 4.8, 3.4)
    for ax, problem in zip(axes, problems, strict=True):
        for r in (r for r in study.comparison if r.problem == problem):
            j = methods.index(r.method)
            line = ":" if "theory" in r.method else "-"
            ax.plot(r.ns, r.gap, line, color=COLOURS[j], marker=MARKERS[j], label=r.method)
        _log(ax, problem)
    handles, labels = axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncol=3)
    return figure


FIGURES: dict[str, tuple[Callable[[Study], bool], Callable[[Study], Figure]]] = {
    "rates": (lambda s: bool(s.curves), rates),
    "geometry": (lambda s: bool(s.curves), geometry),
    "acceleration": (lambda s: bool(s.tandem), acceleration),
    "anchor": (lambda s: bool(s.anchors), anchor),
    "comparison": (lambda s: bool(s.comparison), comparison),
}
