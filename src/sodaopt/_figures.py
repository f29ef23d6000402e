"""The Matplotlib style of every figure in the project."""

from typing import Any

STYLE: dict[Any, Any] = {
    "font.size": 9, "axes.spines.top": False, "axes.spines.right": False, "axes.grid": True,
    "grid.alpha": 0.25, "grid.linewidth": 0.6, "legend.fontsize": 8, "legend.frameon": False,
    "axes.titlesize": 10, "lines.linewidth": 1.6, "lines.markersize": 4.5,
    "figure.facecolor": "white", "axes.facecolor": "white", "svg.hashsalt": "sodaopt",
}  # fmt: skip
