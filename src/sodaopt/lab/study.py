"""A study: a figure or a table as columns and rows, at any scale.

A `Cell` describes a column: its optimizer, its settings, and the baseline whose learning rate it
uses. A `TableRow` has the settings that all runs of a row share, such as the horizon.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from .job import Job
from .scales import Scale

Choices = Callable[[Scale], Sequence[dict[str, Any]]]


def none(scale: Scale) -> Sequence[dict[str, Any]]:
    """Return no choices."""
    return ()


@dataclass(frozen=True)
class Cell:
    """A column of a study.

    base: the baseline whose learning rate the column uses
    """

    column: str
    optimizer: str
    base: str
    settings: dict[str, Any] = field(default_factory=dict)
    choices: Choices = none
    """Settings to choose from. The choice has the lowest mean loss over the tuning seeds, at the
    standard size and length."""
    follows: str = ""
    """Another column, whose chosen settings this column uses."""
    takes: tuple[str, ...] = ("lr",)
    """Names of the settings that this column takes from the column that it follows."""

    def chosen(self, settings: dict[str, Any]) -> "Cell":
        """Return the cell with the settings of one of its choices."""
        return replace(self, settings=self.settings | settings, choices=none)

    def following(self, best: dict[str, dict[str, Any]]) -> dict[str, Any]:
        """Return the settings of the column that this cell follows.

        best: the chosen settings of each column
        """
        return {k: v for k, v in best.get(self.follows, {}).items() if k in self.takes}

    def job(self, scale: Scale, row: "TableRow", seed: int, lr: float | None) -> Job:
        """Return the job of this column in a row. If choices are open, it has the first choice."""
        values: dict[str, Any] = {
            "preset": scale.preset,
            "optimizer": self.optimizer,
            "seed": seed,
            "lr": lr,
        }
        chosen = next(iter(self.choices(scale)), {})
        return Job(**(values | row.settings | self.settings | chosen))

    def needs_lr(self, scale: Scale) -> bool:
        """Whether the baseline's learning rate must be known before the settings are chosen."""
        given = self.settings | next(iter(self.choices(scale)), {})
        return "lr" not in given and not self.follows


@dataclass(frozen=True)
class TableRow:
    """A row of a table: a horizon, a model size or a learning rate."""

    label: str
    settings: dict[str, Any]
    seeds: int = 0
    """Number of seeds that the study plans."""


@dataclass(frozen=True)
class Study:
    """A figure or a table."""

    title: str
    cells: tuple[Cell, ...]
    rows: Callable[[Scale], Sequence[TableRow]]
    kind: str = "table"
    """table, curves (loss against steps), or an axis such as wd."""
    pairs: tuple[tuple[str, str], ...] = ()
    """Pairs of columns to compare: (column, the column it is compared with)."""
    primary: int = 1
    """Number of leading pairs that are primary comparisons, which get a p value."""
    published: dict[str, tuple[float, ...]] = field(default_factory=dict)
    """The numbers in the paper, by row."""
    seeds: tuple[int, ...] = (5,)
    """Number of seeds of each row. The last number is used for all rows after it, too."""

    def planned(self, scale: Scale) -> list[TableRow]:
        """Return the rows at a scale, with their numbers of seeds."""
        rows, last = self.rows(scale), len(self.seeds) - 1
        own = [self.seeds[min(j, last)] for j in range(len(rows))]
        return [replace(r, seeds=scale.seeds or n) for r, n in zip(rows, own, strict=True)]


# -- rows -----------------------------------------------------------------------------------------


def _horizon(length: str) -> TableRow:
    return TableRow(length, {"horizon": length})


def standard(scale: Scale) -> list[TableRow]:
    return [_horizon(scale.horizons[0])]


def horizons(scale: Scale) -> list[TableRow]:
    return [_horizon(h) for h in scale.horizons]


def short_and_long(scale: Scale) -> list[TableRow]:
    return [_horizon(scale.horizons[0]), _horizon(scale.lengths[-1])]


def lengths(scale: Scale) -> list[TableRow]:
    return [_horizon(h) for h in scale.lengths]


def sizes(scale: Scale) -> list[TableRow]:
    length = {"horizon": scale.horizons[0]}
    return [TableRow(label, settings | length) for label, settings in scale.sizes]


def rates(scale: Scale) -> list[TableRow]:
    """Return rows over three octaves of Muon's learning rate."""
    near = [scale.rate("muon") * factor for factor in (0.25, 0.5, 1, 2)]
    length = {"horizon": scale.horizons[0]}
    return [TableRow(f"lr 2^{math.log2(lr):g}", {"lr": lr} | length) for lr in near]


# -- choices --------------------------------------------------------------------------------------


def muon_decays(scale: Scale) -> list[dict[str, Any]]:
    return [{"wd": wd} for wd in scale.decays["muon"]]


def adamw_grid(scale: Scale) -> list[dict[str, Any]]:
    near = [scale.rate("adamw") * factor for factor in (0.5, 1, 2, 4)]
    return [{"lr": lr, "wd": wd} for lr in near for wd in scale.decays["adamw"]]


def adamw_rates(scale: Scale) -> list[dict[str, Any]]:
    return [choice for choice in adamw_grid(scale) if not choice["wd"]]
