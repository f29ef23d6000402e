"""`sodaopt report`: write a page and figures about runs, and print a table."""

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

from rich.console import Console
from tyro.conf import Positional, arg

from sodaopt._errors import unknown

from ..arguments import Grouped, Output
from ..records import FILE, Run, find
from ..visible import visible
from .page import Page
from .terminal import rows


@dataclass
class Report:
    """Compare runs on one HTML page, which needs no network. Runs may be unfinished."""

    runs: Annotated[Positional[tuple[Path, ...]], arg(metavar="FOLDER ...")]
    """Folders of runs, or folders that contain such folders."""
    out: Path | None = None
    """File of the page. Default: report.html in the first folder."""
    title: str = ""
    """Title of the page. Default: the title of the existing page, or the name of the folder."""
    baseline: str = ""
    """Name of an optimizer. Its runs come first, and the first row is the baseline."""
    png: bool = False
    """Also write the charts as PNG, next to the page."""
    svg: bool = False
    """Also write the charts as SVG."""
    live: float | None = None
    """Seconds after which the page is written again, until all runs are done. Open pages reload."""
    output: Annotated[Output, Grouped] = field(default_factory=Output)

    def __post_init__(self) -> None:
        if not self.runs:
            raise ValueError("name at least one folder of runs")
        if self.live is not None and not self.live > 0:
            raise ValueError(f"--live must be above 0 seconds, got {self.live}")

    def run(self) -> int:
        console = self.output.console()
        if self.live is None:
            self._write(console)
            return 0
        console.print("writing the page again until all runs are done: press Ctrl-C to stop")
        while not self._write(console, self.live):
            time.sleep(self.live)
            console = Console(quiet=True)  # print the table only once
        return 0

    def _write(self, console: Console, refresh: float | None = None) -> bool:
        """Print the table, and write the page and figures. Return whether all runs are done."""
        from . import comparison_table, write_report

        plain: dict[str, Any] = {"highlight": False, "markup": False, "soft_wrap": True}
        runs = self._runs(lambda why: console.print(f"skipped: {visible(why)}", **plain))
        pages = [Page.load(folder) for folder in self.runs]
        primary = [pair for page in pages for pair in page.primary]
        planned = sum(len(page.runs) for page in pages)
        done = len(runs) >= planned and all(run.done for run in runs)
        console.print(comparison_table(runs, console.width, primary))
        out = self.out or self.runs[0] / "report.html"
        command = pages[0].command if len(pages) == 1 else ""
        title, again = self.title or self._title(runs), None if done else refresh
        files = [write_report(runs, out, title, primary, command, again)]
        for file in files + self._figures(runs, out):
            console.print(visible(file), **plain)
        if self.output.json:
            print(json.dumps(rows(runs, primary) | {"report": str(out)}))
        return done

    def _runs(self, skip: Callable[[str], None]) -> list[Run]:
        """Return the runs in the order of the pages: the baseline's runs come first.

        skip: called with the reason for each run that cannot be read
        """
        runs = find(self.runs, skip)
        if not runs:
            where = ", ".join(map(str, self.runs))
            raise FileNotFoundError(f"no runs in {where}: no {FILE} in or under it")
        names = {run.optimizer for run in runs}
        if self.baseline and self.baseline not in names:
            raise ValueError(unknown("baseline", self.baseline, names))
        order = [(folder / name).resolve() for folder in self.runs
                 for name in Page.load(folder).runs]  # fmt: skip
        place = {path: j for j, path in enumerate(order)}
        runs.sort(key=lambda run: place.get(run.folder.resolve(), len(place)))
        return sorted(runs, key=lambda run: run.optimizer != (self.baseline or run.optimizer))

    def _title(self, runs: Sequence[Run]) -> str:
        """Return the title of the existing page if it shows these runs, else a new title."""
        page = Page.load(self.runs[0])
        shown = {(self.runs[0] / name).resolve() for name in page.runs}
        same = {run.folder.resolve() for run in runs} <= shown
        return page.title if page.title and same else _name(self.runs)

    def _figures(self, runs: Sequence[Run], out: Path) -> list[Path]:
        kinds = [kind for kind, wanted in (("png", self.png), ("svg", self.svg)) if wanted]
        if not kinds:
            return []
        from ..variants import group_by_variant
        from .figures import draw

        return draw(group_by_variant(runs), out.with_suffix(""), kinds)


def _name(folders: Sequence[Path]) -> str:
    """Make a title of folder names: 'runs/muon-sweep' -> 'muon sweep'."""
    names = [folder.resolve().name for folder in folders]
    return ", ".join(name.replace("-", " ").replace("_", " ") for name in names)
