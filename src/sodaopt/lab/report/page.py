"""Write the report as one HTML file that needs no other files and no network."""

import base64
import csv
import hashlib
import io
import json
import re
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from functools import cache
from html import escape
from importlib.resources import files
from pathlib import Path
from string import Template
from typing import Any

from sodaopt import __version__

from .. import labels
from ..comparison import Comparison, Pairs, compare
from ..files import write_atomically
from ..labels import pretty
from ..records import Run
from ..variants import Variant, group_by_variant, status
from . import charts, heat, panels, sentences, tables, text

PAGE_FILE = "report.json"
SCRIPTS = ("chart.js", "curves.js", "sections.js", "sweeps.js", "table.js", "page.js")


@dataclass(frozen=True)
class Page:
    """The contents of a page: its title, the folders of its runs in order, and the comparisons.

    It is saved before the runs start, so that the primary comparisons are named before any result
    is known, and so that an interrupted command leaves it too.
    """

    title: str = ""
    runs: tuple[str, ...] = ()
    primary: tuple[tuple[str, str], ...] = ()
    command: str = ""
    """The command line that makes the runs."""

    def save(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        write_atomically(folder / PAGE_FILE, [f"{json.dumps(asdict(self), indent=1)}\n".encode()])

    @classmethod
    def load(cls, folder: Path) -> "Page":
        """Return the page of a folder, or an empty one. Version 0.1 had no primary comparisons."""
        with suppress(OSError, ValueError, KeyError, TypeError):
            values = json.loads((folder / PAGE_FILE).read_text(encoding="utf-8"))
            pairs = tuple((str(a), str(b)) for a, b in values.get("primary", ()))
            runs = tuple(map(str, values["runs"]))
            return cls(str(values["title"]), runs, pairs, str(values.get("command", "")))
        return cls()


def write_report(
    runs: Sequence[Run], out: Path, title: str, primary: Pairs = (), command: str = "",
    refresh: float | None = None,
) -> Path:  # fmt: skip
    """Write the page to `out`, and return `out`. Readers see the old page or the complete new one.

    primary: the comparisons that were named before the runs
    command: the command line that makes the runs. The page has a button that copies it
    refresh: seconds after which an open page reloads itself, or None if the runs are done
    """
    if not runs:
        raise ValueError("a report needs at least one run")
    page = html(group_by_variant(runs), title, primary, command)
    if refresh:
        meta = f'<meta http-equiv="refresh" content="{max(1, round(refresh))}">'
        page = page.replace("<title>", f"{meta}\n<title>", 1)
    out.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(out, [page.encode()])
    return out


def html(found: Sequence[Variant], title: str, primary: Pairs = (), command: str = "") -> str:
    """Return the page as HTML. `write_report` explains the arguments."""
    compared = compare(found, primary)
    runs = [run for variant in found for run in variant.runs]
    plot, script = asset("uPlot.iife.min.js"), "\n".join(map(asset, SCRIPTS))
    parts = {
        "title": escape(title),
        "policy": policy(plot, script),
        "licence": asset("uPlot.LICENSE"),
        "style": asset("uPlot.min.css") + asset("page.css"),
        "facts": " · ".join(map(tables.show, facts(runs))),
        "headlines": "".join(map(headline, sentences.headlines(compared)[:4])),
        "results": tables.results(compared),
        "heat": heat.heat_section(found),
        "baseline": _baseline(compared),
        "differing": tables.differing_table(found),
        "notes": "".join(f"<li>{tables.show(note)}</li>" for note in sentences.notes(compared)),
        "samples": section("samples", "Samples", tables.samples(found)),
        "setup": tables.setup(runs),
        "runs": tables.runs_table(found),
        "data": embedded(data(compared) | {"copies": copies(found, command)}),
        "plot": plot,
        "script": script,
        "version": escape(__version__),
    }
    return Template(asset("page.html")).substitute(parts)


def _baseline(comparisons: Sequence[Comparison]) -> str:
    """Return the name of the baseline if all differences are to the same one, as HTML."""
    names = {c.base.label for c in comparisons if c.variant is not c.base}
    return tables.show(names.pop()) if len(names) == 1 else "the baseline"


@cache
def asset(name: str) -> str:
    return (files(__package__) / "assets" / name).read_text(encoding="utf-8")


def headline(sentence: tuple[str, str]) -> str:
    """Return a sentence as HTML, with no line breaks next to ± and =."""
    subject, rest = map(tables.show, sentence)
    rest = re.sub(r"(?<=[ (])-(?=\d)", "−", rest)
    for sign in ("±", "=", "&lt;"):
        rest = rest.replace(f" {sign} ", f"&nbsp;{sign}&nbsp;")
    return f"<p><b>{subject}</b> {rest}</p>" if subject else f"<p>{rest}</p>"


def section(name: str, title: str, body: str) -> str:
    """Return a section, or an empty string if its body is empty."""
    return f'<section id="{name}"><h2>{title}</h2>{body}</section>' if body else ""


def policy(*scripts: str) -> str:
    """Return a policy that allows these scripts only, and no network.

    It protects the reader if the text of a run contains HTML.
    """
    digests = [hashlib.sha256(f"\n{script}\n".encode()).digest() for script in scripts]
    hashes = " ".join(f"'sha256-{base64.b64encode(d).decode()}'" for d in digests)
    return f"default-src 'none'; img-src data:; style-src 'unsafe-inline'; script-src {hashes}"


# -- data -----------------------------------------------------------------------------------------


def data(comparisons: Sequence[Comparison]) -> dict[str, Any]:
    """Return the data of the charts."""
    found = [c.variant for c in comparisons]
    small = charts.dynamics(found)
    return {
        "gap": [asdict(curve) for curve in charts.gaps(comparisons)],
        "val": [asdict(curve) for curve in charts.curves(found, "val")],
        "train": [asdict(curve) for curve in charts.curves(found, "step")],
        "dynamics": {role: {name: [asdict(c) for c in some] for name, some in rows.items()}
                     for role, rows in small.items()},
        "titles": charts.DYNAMICS,
        "sweeps": [asdict(panel) for panel in panels.panels(found)],
    }  # fmt: skip


BIBTEX = """@software{{sodaopt,
  title = {{{{sodaopt: SODA optimizers for PyTorch}}}},
  author = {{{{The sodaopt developers}}}},
  version = {{{version}}},
  year = {{2026}},
}}"""


def copies(variants: Sequence[Variant], command: str) -> dict[str, str]:
    """Return the texts of the copy buttons by their names."""
    names = ["optimizer", *labels.differing([variant.job for variant in variants])]
    file = io.StringIO()
    table = csv.writer(file, lineterminator="\n")
    table.writerow([*names, "seed", "status", "val_loss"])
    for variant in variants:
        for run in variant.runs:
            settings = [run.job.get(name) for name in names]
            table.writerow([*settings, run.job.get("seed"), status(run), run.val_loss])
    found = {"CSV": file.getvalue(), "BibTeX": BIBTEX.format(version=__version__)}
    return {"command": command} | found if command else found


def embedded(value: Any) -> str:
    """Return JSON for a script element. No text in it can end the element."""
    dense = json.dumps(_short(value), allow_nan=False, separators=(",", ":"))
    return dense.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _short(value: Any) -> Any:
    """Round numbers to seven digits, more than a chart shows. Labels get superscripts."""
    if isinstance(value, dict):
        return {k: v if k == "copies" else _short(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_short(v) for v in value]
    if isinstance(value, float):
        short = float(f"{value:.7g}")
        return int(short) if short == int(short) else short
    return pretty(value) if isinstance(value, str) else value


def facts(runs: Sequence[Run]) -> list[str]:
    """Return the facts for the line below the title. They are the same for all runs."""
    heads = [tables.facts(run) for run in runs]

    def same(part: str, name: str) -> Any:
        values = {json.dumps(head[part].get(name)) for head in heads}
        return json.loads(values.pop()) if len(values) == 1 else None

    parameters, steps = same("model", "parameters"), same("job", "steps")
    commits = {tables.commit(run) for run in runs}
    found = [
        _counted(runs),
        f"{text.count(parameters)} parameters" if parameters else None,
        f"{steps:,} steps" if steps else None,
        f"data: {same('data', 'name')}" if same("data", "name") else None,
        same("environment", "device"),
        f"commit {commits.pop()}" if len(commits) == 1 and "" not in commits else None,
        _day(run.head.get("time") for run in runs),
    ]
    return [str(fact) for fact in found if fact]


def _counted(runs: Sequence[Run]) -> str:
    several = {run.job.get("seed") for run in runs}
    count = "1 run" if len(runs) == 1 else f"{len(runs)} runs"
    return f"{count}, {text.seeds(len(several))}" if len(several) > 1 else count


def _day(times: Iterable[Any]) -> str:
    """Return the date of the latest run. A time is in seconds or begins with a date."""
    known = sorted(_date(t) for t in times if t)
    return known[-1] if known else ""


def _date(time: Any) -> str:
    if isinstance(time, int | float):
        return datetime.fromtimestamp(time, UTC).strftime("%Y-%m-%d")
    return str(time)[:10]
