"""The tables of the page as HTML. Everything that comes from a run is escaped."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape
from typing import Any

from sodaopt.layers.table import size

from ..labels import differing, pretty, telling, value
from ..records import FINISHED, Record, Run
from ..stats import AXES, Row, status, sweep
from . import charts, text

DASHES = ("", "7 3", "2 2.5", "9 3 2 3", "4 2 1 2")
"""Eight colours can be told apart: from the ninth line on, dashes help. See also chart.js."""
HUES = 8
MANY = 12  # rows of a table that is shown whole
RESULTS = ("variant", "val loss", "", "n", "difference", "p", "ms/step", "tokens/s", "state",
           "status")  # fmt: skip
DOTS = 110  # width of the little chart in the table, in pixels
SAMPLE = 1500  # characters


def show(label: object) -> str:
    """Words of a run, safe and with superscripts."""
    return escape(pretty(str(label)))


def minus(number: str) -> str:
    return escape(number.replace("-", "−"))


def swatch(colour: int) -> str:
    """A piece of the line in the charts."""
    dash = DASHES[colour // HUES % len(DASHES)]
    return (f'<svg class="swatch hue{colour % HUES}" viewBox="0 0 22 8" aria-hidden="true">'
            f'<line x1="1" y1="4" x2="21" y2="4" stroke-dasharray="{dash}"/></svg>')  # fmt: skip


# -- results --------------------------------------------------------------------------------------


def results(rows: Sequence[Row]) -> str:
    """The headline table; of long sweeps the best rows, with all of them to unfold."""
    heads = [line.head for line in sweep(rows, AXES[0])]
    if len(rows) <= MANY or len(heads) == len(rows):
        return _results(rows, rows)
    best = [row for row in rows if any(row is head for head in heads)]
    fold = f"<details><summary>All {len(rows)} variants</summary>{_results(rows, rows)}</details>"
    return _results(rows, best) + fold


def _results(rows: Sequence[Row], shown: Sequence[Row]) -> str:
    means = [row.mean for row in shown if row.mean is not None]
    ends = [end for row in shown for end in charts.interval(row)]
    reach = charts.window(ends) if ends else (0.0, 1.0)
    body = "".join(
        _result(line, colour, reach, line.row.mean is not None and line.row.mean == min(means))
        for line, colour in zip(text.lines(rows), charts.colours(rows), strict=True)
        if any(line.row is row for row in shown)
    )
    head = "".join(f'<th scope="col">{name}</th>' for name in RESULTS)
    return f'<table class="results"><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>'


def _result(line: text.Line, colour: int, reach: tuple[float, float], best: bool) -> str:
    row = line.row
    mark = f'<span class="mark">{line.difference.mark}</span>' if line.difference else ""
    gap = "baseline" if row is line.base else minus(line.gap.rstrip("* ")) + mark
    cells = [
        ("val loss", f'<b>{line.loss}</b> <span class="soft">{line.spread}</span>'),
        ("dots", _dots(row, colour, reach)),
        ("n", line.n),
        ("difference", gap if row is not line.base else f'<span class="soft">{gap}</span>'),
        ("p", minus(line.p)),
        ("ms/step", text.milliseconds(row.step_seconds)),
        ("tokens/s", text.count(row.tokens_per_second)),
        ("state", size(row.state_bytes or 0)),
        ("status", f'<span class="{_tone(row)}">{escape(row.summary())}</span>'),
    ]
    body = "".join(f'<td data-label="{name}">{cell}</td>' for name, cell in cells)
    name = f'<th scope="row">{swatch(colour)}<span>{show(row.label)}</span></th>'
    return f"<tr{' class=best' if best else ''}>{name}{body}</tr>"


def _tone(row: Row) -> str:
    """A narrow screen leaves out what is fine."""
    return "bad" if row.diverged else "soft fine" if row.statuses.keys() == {FINISHED} else "soft"


def _dots(row: Row, colour: int, reach: tuple[float, float]) -> str:
    """The mean as a dot, the spread as a bar, every seed as a tick, on one axis for all rows."""
    if row.mean is None:
        return ""
    low, high = (_place(end, reach) for end in charts.interval(row))
    ticks = "".join(f'<line class="seed" x1="{x}" x2="{x}" y1="5" y2="13"/>'
                    for x in (_place(loss, reach) for loss in row.losses.values()))  # fmt: skip
    dot = f'<circle cx="{_place(row.mean, reach)}" cy="9" r="3.6"/>'
    bar = f'<line x1="{low}" x2="{high}" y1="9" y2="9"/>'
    return (f'<svg class="dots hue{colour % HUES}" viewBox="0 0 {DOTS} 18" width="{DOTS}" '
            f'height="18" aria-hidden="true">{ticks if row.n > 1 else ""}{bar}{dot}'
            "</svg>")  # fmt: skip


def _place(loss: float, reach: tuple[float, float]) -> float:
    """Pixels from the left; what lies beyond stands at the edge."""
    share = (loss - reach[0]) / (reach[1] - reach[0])
    return round(4 + (DOTS - 8) * min(1.0, max(0.0, share)), 1)


# -- runs -----------------------------------------------------------------------------------------

OUTCOME = ("seed", "status", "val loss", "steps", "epochs", "time", "optimizer ms/step",
           "peak memory", "commit")  # fmt: skip
PARTS = ("job", "model", "data", "environment", "git")


def facts(run: Run) -> dict[str, Record]:
    """Everything the head of a run says, by part."""
    parts = {name: run.head.get(name) for name in PARTS}
    return {name: part if isinstance(part, dict) else {} for name, part in parts.items()}


def setup(runs: Sequence[Run]) -> str:
    """What all runs have in common, part by part."""
    heads = [facts(run) for run in runs]
    lists = []
    for part in PARTS:
        first = heads[0][part]
        same = {k: v for k, v in first.items() if all(_same(h[part], k, v) for h in heads)}
        shown = {k: v for k, v in same.items() if v is not None}
        if shown:
            items = "".join(f"<div><dt>{show(k)}</dt><dd>{show(_long(v))}</dd></div>"
                            for k, v in shown.items())  # fmt: skip
            lists.append(f"<section><h3>{part}</h3><dl>{items}</dl></section>")
    return "".join(lists)


def _long(x: Any) -> str:
    """123000000 -> '123,000,000'"""
    return f"{x:,}" if type(x) is int and x >= 10_000 else value(x)


def _same(record: Record, name: str, wanted: Any) -> bool:
    return name in record and bool(record[name] == wanted)


def runs_table(rows: Sequence[Row]) -> str:
    """Every run with how it went, and all in which it differs from another."""
    runs = [(row, run) for row in rows for run in row.runs]
    extra = _extra([run for _, run in runs])
    names, lines = [*OUTCOME, *(name for _, name in extra)], [_run(run, extra) for _, run in runs]
    used = [j for j in range(len(names)) if any(line[j] for line in lines)]
    head = "".join(f'<th scope="col">{show(names[j])}</th>' for j in used)
    body = "".join(
        f'<tr><th scope="row" title="{escape(run.folder.name)}">{show(row.label)}</th>'
        + "".join(f"<td>{line[j]}</td>" for j in used)
        + "</tr>"
        for (row, run), line in zip(runs, lines, strict=True)
    )
    first = '<th scope="col">variant</th>'
    table = (
        f'<table class="runs"><thead><tr>{first}{head}</tr></thead><tbody>{body}</tbody></table>'
    )
    if len(runs) <= 2 * MANY:
        return table
    return f"<details><summary>All {len(runs)} runs</summary>{table}</details>"


def _extra(runs: Sequence[Run]) -> list[tuple[str, str]]:
    """Part and name of what differs between runs and is in no label."""
    named = telling([run.job for run in runs])
    found = []
    for part in PARTS[:-1]:
        records = [facts(run)[part] for run in runs]
        skip = named if part == "job" else ()
        found += [(part, name) for name in differing(records) if name not in skip]
    return found


def _run(run: Run, extra: Iterable[tuple[str, str]]) -> list[str]:
    """In the order of OUTCOME."""
    end, last = run.end or {}, [*run.of("step")[-1:], *run.of("val")[-1:]]
    steps = max([r["step"] for r in last] + [end.get("step") or 0])
    return [
        show(run.job.get("seed", "")), escape(status(run)),
        "" if run.val_loss is None else f"{run.val_loss:.4f}", f"{steps:,}",
        _number(end.get("epochs")), text.duration(end.get("seconds")),
        _number(end.get("optimizer_ms")), size(end.get("peak_memory") or 0), commit(run),
        *(show(_word(facts(run)[part].get(name))) for part, name in extra),
    ]  # fmt: skip


def _word(x: Any) -> str:
    return "" if x is None else value(x)


def _number(x: float | None) -> str:
    return "" if x is None else f"{x:.3g}"


def commit(run: Run) -> str:
    """'3f2a91c0 + changes'"""
    git = facts(run)["git"]
    known = show(str(git.get("commit") or "")[:8])
    return f"{known} + changes" if known and git.get("dirty") else known


# -- samples --------------------------------------------------------------------------------------


def samples(rows: Sequence[Row]) -> str:
    """The last text that each run wrote: the first seed of each variant, then the others."""
    first, more = [], []
    for row, colour in zip(rows, charts.colours(rows), strict=True):
        cards = [_sample(row, colour, run) for run in row.runs if run.of("sample")]
        first += cards[:1]
        more += cards[1:]
    shown, hidden = first[:6], first[6:] + more
    if hidden:
        fold = f'<details><summary>{len(hidden)} more</summary><div class="samples">'
        return f'<div class="samples">{"".join(shown)}</div>{fold}{"".join(hidden)}</div></details>'
    return f'<div class="samples">{"".join(shown)}</div>' if shown else ""


def _sample(row: Row, colour: int, run: Run) -> str:
    record = run.of("sample")[-1]
    prompt, words = str(record.get("prompt") or ""), str(record.get("text") or "")
    rest = words.removeprefix(prompt)
    cut = "…" if len(rest) > SAMPLE else ""
    where = f"seed {show(run.job.get('seed', '?'))}, step {show(record.get('step', '?'))}"
    return (f'<figure class="sample"><figcaption>{swatch(colour)}<b>{show(row.label)}</b> '
            f'<span class="soft">{where}</span></figcaption>'
            f"<p><mark>{escape(prompt)}</mark>{escape(rest[:SAMPLE])}{cut}</p></figure>"
            )  # fmt: skip
