"""The layer plan: a row for each parameter, the groups for SODA, and the printed table."""

from collections.abc import Container, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from sodaopt._errors import times
from sodaopt.core.method import Method
from sodaopt.geometry import Ball, BiasRMS, Geometry, Norm, views
from sodaopt.schedules import Coef

COLUMNS = ("parameter", "", "shape", "role", "method", "geometry", "radius", "lr factor")


@dataclass(frozen=True, eq=False)
class PlannedParameter:
    """One parameter of the plan. A frozen one has no method and is in no group.

    name, aliases: its first name in the model, and its names in other layers that use it.
    role: the role that the plan found, or that an override gave.
    parameter: the parameter itself.
    method, lr_factor: as the rule of the role or an override sets them.
    """

    name: str
    role: str
    parameter: nn.Parameter = field(repr=False)
    aliases: tuple[str, ...] = ()
    method: Method | None = field(default=None, repr=False)
    lr_factor: float = 1.0

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.parameter.shape)

    @property
    def geometry(self) -> str:
        return geometry_label(self.method.geometry) if self.method else ""

    @property
    def radius(self) -> Coef | None:
        """The radius of the norm's ball. Maps without a norm have none."""
        return getattr(self.method.geometry, "radius", None) if self.method else None


@dataclass(frozen=True, eq=False)
class Plan:
    """Every parameter of a model exactly once. `print(plan)` shows it.

    title: the first line of the table.
    rows: a `PlannedParameter` for each parameter.
    notes: the lines below the table, such as inferred heads.

    >>> found = plan(model, "muon")
    >>> [row.role for row in found.rows]
    ['hidden', 'bias', 'hidden', 'bias', 'head', 'bias']
    """

    title: str
    rows: tuple[PlannedParameter, ...]
    notes: tuple[str, ...] = ()

    def groups(self) -> list[dict[str, Any]]:
        """Return groups for SODA: one for each method and lr factor, in order of appearance."""
        merged: dict[tuple[Method, float], list[PlannedParameter]] = {}
        for row in self.rows:
            if row.method is not None:
                merged.setdefault((row.method, row.lr_factor), []).append(row)
        groups: list[dict[str, Any]] = []
        for (method, factor), rows in merged.items():
            name = "+".join(dict.fromkeys(row.role for row in rows))
            count = sum(g["name"].split("#")[0] == name for g in groups)
            name += f"#{count + 1}" if count else ""
            params = [(row.name, row.parameter) for row in rows]
            groups.append({"params": params, "method": method, "lr_factor": factor, "name": name})
        return groups

    def table(self, full: bool = False) -> str:
        """Return the plan as text, with repeated layers on one line unless `full`."""
        repeated: dict[object, list[PlannedParameter]] = {}
        for row in self.rows:
            name = tuple("#" if k.isdigit() and not full else k for k in row.name.split("."))
            shown = row.shape, row.role, row.method, row.lr_factor
            repeated.setdefault((name, shown), []).append(row)
        head, *lines = aligned([COLUMNS, *map(_cells, repeated.values())], right=(1, 6, 7))
        rule = "-" * max(map(len, (head, *lines)))
        numbers = sum(row.parameter.numel() for row in self.rows)
        frozen = sum(row.parameter.numel() for row in self.rows if row.method is None)
        total = f"{len(self.rows)} parameters, {numbers:,} numbers"
        total += f" ({frozen:,} of them frozen)" if frozen else ""
        return "\n".join([self.title, head, rule, *lines, rule, total, *self.notes])

    __str__ = table


def _cells(rows: Sequence[PlannedParameter]) -> tuple[str, ...]:
    """Return one line of the table for parameters that differ only by the numbers in their names.

    h.0.w, h.1.w and h.2.w are written as h.*.w.
    """
    row, columns = rows[0], zip(*(r.name.split(".") for r in rows), strict=True)
    return (
        ".".join(column[0] if len(set(column)) == 1 else "*" for column in columns),
        f"x{len(rows)}" if len(rows) > 1 else "",
        times(row.shape),
        row.role,
        row.method.name if row.method else "",
        row.geometry,
        _number(row.radius),
        _number(row.lr_factor) if row.method else "",
    )


def _number(x: Any) -> str:
    return "" if x is None else "schedule" if callable(x) else f"{x:g}"


def geometry_label(g: Geometry) -> str:
    """Name a geometry: Ball(Spectral(dense, transposed)) -> 'Spectral(dense, transposed)'."""
    norm: Any = getattr(g, "norm", g)  # a map without a norm has its own label
    is_scaled = isinstance(norm, Norm) and not isinstance(norm, BiasRMS)
    options = [norm.scale.__name__] if is_scaled else []
    if getattr(norm, "view", views.matrix) not in (views.matrix, views.elements, views.whole):
        options.append(views.label(norm.view))
    text = type(norm).__name__ + (f"({', '.join(options)})" if options else "")
    return text if norm is g or isinstance(g, Ball) else f"{type(g).__name__} {text}"


def aligned(lines: Sequence[Sequence[str]], right: Container[int] = ()) -> list[str]:
    """Return the lines of a table as text, with columns of equal width.

    right: the columns that are aligned right.
    """
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]

    def cell(j: int, text: str) -> str:
        return text.rjust(widths[j]) if j in right else text.ljust(widths[j])

    return ["  ".join(cell(j, text) for j, text in enumerate(line)).rstrip() for line in lines]
