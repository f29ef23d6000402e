"""`sodaopt theory`: check the theory and write the table, the figures and the numbers."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from . import study as studies
from .study import Part, Study

if TYPE_CHECKING:
    from rich.console import Console


@dataclass
class Theory:
    """Check the convex theory on problems with known constants, and write tables and figures."""

    out: Path = Path("runs/theory")
    """Folder for the figures (PNG and SVG), theory.json and theory.csv."""
    only: tuple[Part, ...] = ()
    """Parts to run. The default is all of them."""
    jobs: int = min(2, os.cpu_count() or 1)
    """Number of processes."""
    docs: Path | None = None
    """Folder with theory.md: update its numbers and its figures. Needs all parts."""

    def __post_init__(self) -> None:
        if self.docs is not None and self.only:
            raise ValueError("--docs needs all parts. Remove --only or --docs.")
        if self.jobs < 1:
            raise ValueError(f"--jobs must be at least 1, got {self.jobs}")

    def run(self) -> int:
        """Check the theory and write the files. Return 0 if every bound holds, else 1."""
        from rich.console import Console

        console = Console() if sys.stdout.isatty() else Console(width=132)
        begin = time.perf_counter()
        study = self._study(console)
        self._show(study, console)
        files = self._write(study)
        console.print(f"{len(files)} files in {self.out}", highlight=False)
        if self.docs is not None:
            _fill(study, self.docs)
            console.print(f"{self.docs / 'theory.md'} is up to date", highlight=False)
        console.print(f"{time.perf_counter() - begin:.0f} s", highlight=False)
        return 0 if study.holds else 1

    def _study(self, console: Console) -> Study:
        total = len(studies.select(self.only))
        with _progress(console, total) as advance:
            for done, study in studies.run(self.only, self.jobs):
                if study is not None:
                    return study
                advance(done)
        raise AssertionError("internal error: the run ended without a study")

    def _show(self, study: Study, console: Console) -> None:
        from . import report

        if study.rows:
            rows = report.condensed(study.rows)
            console.print(report.table(study.rows, console.width))
            console.print(f"{sum(row.holds for row in rows)} of {len(rows)} hold", highlight=False)
        if study.comparison:
            console.print(report.comparison(study))
        for name, found in study.mutants.items():
            failed = [check for check, result in found.items() if not result.holds]
            console.print(
                f"mutant {name}: {'caught by ' + ', '.join(failed) if failed else 'passes'}"
            )

    def _write(self, study: Study) -> list[Path]:
        from . import figures, report

        files = report.write(study, self.out)
        return files + figures.draw(study, self.out, ("png", "svg"))


def _fill(study: Study, docs: Path) -> None:
    from . import figures, report

    page = docs / "theory.md"
    text = report.fill(page.read_text(encoding="utf-8"), study)
    page.write_text(text, encoding="utf-8")
    figures.draw(study, docs / "figures", ("svg",))


@contextmanager
def _progress(console: Console, total: int) -> Iterator[Callable[[str], None]]:
    """Show a progress bar on a terminal. Elsewhere, print one line per task."""
    if not console.is_terminal:
        count = iter(range(1, total + 1))
        yield lambda done: console.print(f"[{next(count)}/{total}] {done}", markup=False)
        return
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.description}"),
    )
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("starting", total=total)
        yield lambda done: bar.update(task, advance=1, description=done)
