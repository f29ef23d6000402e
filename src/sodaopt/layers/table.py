"""The table that `print(plan)` shows."""

from __future__ import annotations

import math
from collections.abc import Container, Sequence
from typing import Any

from sodaopt._errors import times
from sodaopt.geometry import Ball, BiasRMS, Geometry, MultiNorm, Norm
from sodaopt.geometry.views import elements, label, matrix, whole

COLUMNS = ("parameter", "", "shape", "role", "method", "geometry", "radius", "lr factor")
RIGHT = (1, 6, 7)  # the columns of numbers, aligned right


def geometry_label(g: Geometry) -> str:
    """Name a geometry: Ball(Spectral(dense, transposed)) -> 'Spectral(dense, transposed)'."""
    norm = getattr(g, "norm", None)
    if isinstance(norm, Norm):
        options = [] if isinstance(norm, BiasRMS) else [norm.scale.__name__]
        if norm.view not in (matrix, elements, whole):
            options.append(label(norm.view))
        text = type(norm).__name__ + (f"({', '.join(options)})" if options else "")
        return text if isinstance(g, Ball) else f"{type(g).__name__} {text}"
    if isinstance(g, MultiNorm) and g.view is not matrix:
        return f"MultiNorm({label(g.view)})"
    return type(g).__name__


def render(title: str, rows: Sequence[Any], notes: Sequence[str], full: bool) -> str:
    """Return the plan as text, with repeated layers on one line unless `full`."""
    lines = [_line(same) for same in ([[row] for row in rows] if full else _repeated(rows))]
    head, *body = aligned([COLUMNS, *lines], RIGHT)
    rule = "-" * max(map(len, (head, *body)))
    return "\n".join([title, head, rule, *body, rule, _total(rows), *notes])


def aligned(lines: Sequence[Sequence[str]], right: Container[int] = ()) -> list[str]:
    """Return the lines of a table as text.

    right: the columns that are aligned right.
    """
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]

    def cell(j: int, text: str) -> str:
        return text.rjust(widths[j]) if j in right else text.ljust(widths[j])

    return ["  ".join(cell(j, text) for j, text in enumerate(line)).rstrip() for line in lines]


def _line(rows: Sequence[Any]) -> tuple[str, ...]:
    """Return the cells of parameters that differ only by the numbers in their names."""
    row = rows[0]
    return (
        _merged([r.name for r in rows]),
        f"x{len(rows)}" if len(rows) > 1 else "",
        times(row.shape),
        row.role,
        row.method.name if row.method else "",
        row.geometry,
        _number(row.radius),
        _number(row.lr_factor),
    )


def _repeated(rows: Sequence[Any]) -> list[list[Any]]:
    """Group the rows that differ only by the numbers in their names, in order of appearance."""
    found: dict[object, list[Any]] = {}
    for row in rows:
        parts = tuple("#" if k.isdigit() else k for k in row.name.split("."))
        shown = (row.shape, row.role, row.method, row.lr_factor)
        found.setdefault((parts, shown), []).append(row)
    return list(found.values())


def _merged(names: Sequence[str]) -> str:
    """Join names: h.0.w, h.1.w, h.2.w -> h.0-2.w"""
    columns = zip(*(name.split(".") for name in names), strict=True)
    return ".".join(_span(list(dict.fromkeys(column))) for column in columns)


def _span(parts: list[str]) -> str:
    if len(parts) == 1:
        return parts[0]
    numbers = sorted(map(int, parts))
    in_a_row = numbers[-1] - numbers[0] == len(numbers) - 1
    return f"{numbers[0]}-{numbers[-1]}" if in_a_row else "*"


def _total(rows: Sequence[Any]) -> str:
    frozen = sum(math.prod(r.shape) for r in rows if r.method is None)
    text = f"{len(rows)} parameters, {sum(math.prod(r.shape) for r in rows):,} numbers"
    return text + (f" ({frozen:,} of them frozen)" if frozen else "")


def _number(x: Any) -> str:
    return "" if x is None else "schedule" if callable(x) else f"{x:g}"
