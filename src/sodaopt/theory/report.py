"""Write a study as a table, as JSON and CSV, and as the numbers in a page of the documentation."""

from __future__ import annotations

import csv
import json
import math
import re
from collections.abc import Iterable
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .checks import CONFIDENCE
from .compare import GRID, METHODS, NS
from .experiments import CASES, REPLICAS, Measurement
from .study import Study

if TYPE_CHECKING:
    from rich.table import Table

COLUMNS = ("result", "problem", "setting", "n", "bound", "measured", "slope", "promised", "holds")


def number(x: float | None) -> str:
    """Return x with three digits, "" for None and NaN, and "diverges" for infinity."""
    if x is None or math.isnan(x):
        return ""
    return "diverges" if math.isinf(x) else f"{x:.3g}"


def cells(row: Measurement) -> list[str]:
    """Return the texts of a row, in the order of COLUMNS."""
    slope = "" if row.slope is None else number(round(row.slope, 2) + 0.0)
    return [
        row.result, row.problem, row.setting, str(row.n), number(row.bound), number(row.measured),
        slope, row.promised, "yes" if row.holds else "NO",
    ]  # fmt: skip


def condensed(rows: Iterable[Measurement]) -> list[Measurement]:
    """Return one row for each identity and lemma, from its worst setting.

    The regret bound has one row for each regulariser.
    """
    groups: dict[str, list[Measurement]] = {}
    for row in rows:
        key = f"{row.key}, {row.setting}" if row.key == "ODA regret" else row.key
        groups.setdefault(slug(key), []).append(row)
    out = []
    for key, same in groups.items():
        worst = max(same, key=lambda row: row.measured / row.bound if len(same) > 1 else 0.0)
        setting = worst.setting if len({row.setting for row in same}) == 1 else "all settings"
        holds = all(row.holds for row in same)
        out.append(replace(worst, key=key, setting=setting, holds=holds))
    return sorted(out, key=lambda row: ORDER.index(row.result))


ORDER = ("E1", "E2", "E3", "ODA regret", "online-to-batch", "online-to-batch, smooth",
         "gradient variation", "bounded gradients", "smooth", "accelerated", "universality",
         "tandem", "anchor")  # fmt: skip


def table(rows: Iterable[Measurement], width: int) -> Table:
    """Return the table for a terminal of this width.

    A narrow table has result, problem and setting in one column and no promised slopes.
    """
    from rich import box
    from rich.table import Table

    out = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    wide = width >= 110
    for name in COLUMNS if wide else ("result", "n", "bound", "measured", "slope", "holds"):
        numeric = name in ("n", "bound", "measured", "slope")
        out.add_column(name, justify="right" if numeric else "left", no_wrap=numeric)
    for row in condensed(rows):
        line = cells(row)
        if not wide:
            line = [f"{line[0]}: {line[1]}, {line[2]}", *line[3:7], line[8]]
        out.add_row(*line, style=None if row.holds else "bold red")
    return out


def comparison(study: Study) -> Table:
    """Return a table of the mean gaps at the largest n: a row per method, a column per problem."""
    from rich import box
    from rich.table import Table

    problems, lines = _comparison(study)
    out = Table(box=box.SIMPLE_HEAD, pad_edge=False, title=f"gap (lr), {grid()}")
    for name in ("method", *problems):
        out.add_column(name)
    for line in lines:
        out.add_row(*line)
    return out


def grid() -> str:
    """Return the grid of learning rates as text."""
    return f"best lr of 4^{round(math.log(GRID[0], 4))} ... 4^{round(math.log(GRID[-1], 4))}"


def _comparison(study: Study) -> tuple[list[str], list[list[str]]]:
    """Return the problems, and for each method its name and its "gap (lr)" on each problem.

    A star marks an lr at an end of the grid.
    """
    found = {(r.method, r.problem): r for r in study.comparison}
    problems = list(dict.fromkeys(r.problem for r in study.comparison))
    methods = list(dict.fromkeys([*METHODS, *(r.method for r in study.comparison)]))
    lines = []
    for method in methods:
        results = [found[method, problem] for problem in problems]
        edge = ["*" if r.edge else "" for r in results]
        gaps = [f"{r.gap[-1]:.2g} ({r.lr:.2g}{e})" for r, e in zip(results, edge, strict=True)]
        lines.append([method, *gaps])
    return problems, lines


# -- files ----------------------------------------------------------------------------------------


def write(study: Study, out: Path) -> list[Path]:
    """Write theory.json with the whole study and theory.csv with the rows of every setting."""
    out.mkdir(parents=True, exist_ok=True)
    everything = out / "theory.json"
    everything.write_text(json.dumps(_plain(asdict(study)), indent=1, allow_nan=False) + "\n")
    table = out / "theory.csv"
    with table.open("w", newline="") as file:
        writer = csv.DictWriter(file, [f.name for f in fields(Measurement)])
        writer.writeheader()
        writer.writerows(asdict(row) for row in study.rows)
    return [everything, table]


def _plain(value: Any) -> Any:
    """Replace NaN and infinity by None, because JSON cannot represent them."""
    if isinstance(value, dict):
        return {key: _plain(v) for key, v in value.items()}
    if isinstance(value, list):
        return [_plain(v) for v in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


# -- the page -------------------------------------------------------------------------------------

MARKER = re.compile(r"(<!-- begin (?P<key>[^ ]+) -->)(?P<body>.*?)(<!-- end -->)", re.DOTALL)


def fill(page: str, study: Study) -> str:
    """Insert the numbers between `<!-- begin KEY -->` and `<!-- end -->`, inline or as blocks."""
    values = numbers(study)

    def put(match: re.Match[str]) -> str:
        key = match["key"]
        if key not in values:
            raise ValueError(
                f"the page has a marker for {key!r}, which the study does not have. "
                f"Known keys: {', '.join(sorted(values))}"
            )
        return f"{match[1]}{values[key]}{match[4]}"

    return MARKER.sub(put, page)


def numbers(study: Study) -> dict[str, str]:
    """Return the texts that a page can contain: tables by result, and the numbers of each row."""
    rows, out = condensed(study.rows), {}
    for result in ORDER:
        out[f"table.{slug(result)}"] = markdown(row for row in rows if row.result == result)
    out["table.identities"] = markdown(row for row in rows if row.result in ("E1", "E2", "E3"))
    for row in rows:
        out[f"slope.{row.key}"] = cells(row)[COLUMNS.index("slope")].replace("-", "−")
        out[f"measured.{row.key}"] = number(row.measured)
        out[f"bound.{row.key}"] = number(row.bound)
        out[f"share.{row.key}"] = number(round(row.measured / row.bound, 2))
    out["held"] = f"{sum(row.holds for row in rows)} of {len(rows)}"
    out["mutants"] = _mutants(study)
    out["comparison"] = _markdown(["method", *_comparison(study)[0]], _comparison(study)[1])
    out["grid"] = grid()
    out["replicas"], out["confidence"] = str(REPLICAS), f"{CONFIDENCE:.0%}"
    out["since"] = str(max(case.since for case in CASES))
    out["compared"] = str(NS[-1])
    return out


def slug(text: str) -> str:
    """Return text as a key: 'lam_bar = 0' becomes 'lam_bar-0'."""
    return re.sub(r"[^a-z0-9_+]+", "-", text.lower()).strip("-")


# A bar would end the cell of a table. The other replacements are easier to read.
GLYPHS = {"1/2||.||_p^2": "½‖·‖ₚ²", "lam_bar": "λ̄", "lam/10": "λ/10", "+-": "±", "<=": "≤"}


def markdown(rows: Iterable[Measurement]) -> str:
    """Return the rows as a Markdown table, without empty columns."""
    lines = [cells(row) for row in rows]
    used = [j for j in range(len(COLUMNS)) if any(line[j] for line in lines)]
    return _markdown([COLUMNS[j] for j in used], [[line[j] for j in used] for line in lines])


def _markdown(head: list[str], lines: list[list[str]]) -> str:
    rule = ["---"] * len(head)
    body = "\n".join("| " + " | ".join(line) + " |" for line in (head, rule, *lines))
    for plain, glyph in GLYPHS.items():
        body = body.replace(plain, glyph)
    return f"\n\n{body}\n\n"


def _mutants(study: Study) -> str:
    names = list(dict.fromkeys(name for found in study.mutants.values() for name in found))
    lines = []
    for mutant, found in study.mutants.items():
        results = {name: "passes" if check.holds else "**fails**" for name, check in found.items()}
        lines.append([mutant, *(results.get(name, "") for name in names)])
    return _markdown(["mutant", *names], lines)
