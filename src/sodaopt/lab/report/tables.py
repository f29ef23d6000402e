"""Format the tables of the page as HTML. All text from runs is escaped."""

from collections.abc import Iterable, Sequence
from html import escape
from typing import Any

from sodaopt.memory import size

from ..comparison import Comparison
from ..labels import differing, distinguishing, pretty, value
from ..records import FINISHED, Record, Run
from ..variants import Variant, status
from . import charts, panels, text

DASHES = ("", "7 3", "2 2.5", "9 3 2 3", "4 2 1 2")
"""Dashes of lines. Readers can distinguish eight colours, so more lines need dashes. chart.js has
similar dashes, in the same order."""
HUES = 8
MANY = 24  # most runs of a table that is not folded
DOTS = 90  # width of the small chart in the table, in pixels
SAMPLE = 1500  # most characters of a sample


def show(label: object) -> str:
    """Return a text of a run as HTML, escaped and with superscripts."""
    return escape(pretty(str(label)))


def minus(number: str) -> str:
    """Return a formatted number as HTML, with a minus sign instead of a hyphen."""
    return escape(number.replace("-", "−"))


def swatch(colour: int) -> str:
    """Return a short line in the colour and the dashes of a variant."""
    dash = DASHES[colour // HUES % len(DASHES)]
    return (f'<svg class="swatch hue{colour % HUES}" viewBox="0 0 22 8" aria-hidden="true">'
            f'<line x1="1" y1="4" x2="21" y2="4" stroke-dasharray="{dash}"/></svg>')  # fmt: skip


# -- results --------------------------------------------------------------------------------------


def results(comparisons: Sequence[Comparison]) -> str:
    """Return the headline table. Readers can sort and filter a long one."""
    variants = [c.variant for c in comparisons]
    colours = dict(zip((v.label for v in variants), charts.colours(variants), strict=True))
    ends = [end for c in comparisons for end in panels.interval(c.variant)]
    reach = panels.window(ends) if ends else (0.0, 1.0)
    best = min((c.variant.rank for c in comparisons if c.variant.n), default=None)
    body = "".join(
        _result(c, colours[c.variant.label], reach, c.variant.rank == best)
        for c in text.ordered(comparisons)
    )
    several = len({c.base.label for c in comparisons}) > len({c.scale for c in comparisons})
    fine = all(c.variant.statuses.keys() == {FINISHED} for c in comparisons)
    head = "".join(f'<th scope="col" data-label="{c.name}" data-drop="{c.drop}">{c.name}</th>'
                   for c in text.COLUMNS)  # fmt: skip
    long = len(comparisons) > text.MANY
    name = "results" + " long" * long + " fine" * fine + " several" * several
    table = f'<table class="{name}"><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>'
    region = 'class="wide tall" tabindex="0" role="region" aria-label="All variants"'
    return f"<div {region}>{table}</div>" if long else f'<div class="wide">{table}</div>'


def _result(comparison: Comparison, colour: int, reach: tuple[float, float], best: bool) -> str:
    """Return a row of the headline table.

    reach: the range of losses that the small charts show
    best: whether the variant has the lowest loss
    """
    variant, base = comparison.variant, comparison.base
    label, first = show(variant.label), ' class="best"' if best and variant.n else ""
    gap, _, stars = text.gap(comparison).partition(" ")
    difference = f'{minus(gap)}<span class="mark">{stars}</span>'
    if comparison.primary:
        difference += f'<span class="against">against {show(base.label)}</span>'
    loss, _, spread = text.loss(comparison).partition(" ")
    drawn = {
        "variant": f"{swatch(colour)}<span>{label}</span>",
        "val loss": f'<b>{loss}</b> <span class="soft">{spread}</span>',
        "seeds": _dots(variant, colour, reach),
        "difference": difference if comparison.difference else f'<span class="soft">{gap}</span>',
        "status": f'<span class="{_tone(variant)}">{escape(variant.summary())}</span>',
    }
    cells = "".join(_cell(c, comparison, drawn.get(c.name, "")) for c in text.COLUMNS)
    return f'<tr{first} data-variant="{label}">{cells}</tr>'


def _cell(column: text.Column, comparison: Comparison, drawn: str) -> str:
    """Return a cell of the headline table. Long tables are sorted by the attribute data-value.

    drawn: the content as HTML, or an empty string for the column's text
    """
    content = drawn or minus(column.text(comparison))
    if column.name == "variant":
        return f'<th scope="row" data-label="variant">{content}</th>'
    baseline = column.name == "difference" and comparison.variant is comparison.base
    value = 0 if baseline else column.value(comparison)
    by = "" if column.words else f' data-value="{"" if value is None else f"{value:.9g}"}"'
    return f'<td data-label="{column.name}"{by}>{content}</td>'


def _tone(variant: Variant) -> str:
    """Return the CSS class of a status. Narrow screens do not show the class 'fine'."""
    if variant.diverged:
        return "bad"
    return "soft fine" if variant.statuses.keys() == {FINISHED} else "soft"


def _dots(variant: Variant, colour: int, reach: tuple[float, float]) -> str:
    """Draw the mean as a dot, the spread as a bar, and each seed as a tick."""
    if variant.mean is None:
        return ""
    low, high = (_position(end, reach) for end in panels.interval(variant))
    at = [_position(loss, reach) for loss in variant.losses.values()]
    ticks = "".join(f'<line class="seed" x1="{x}" x2="{x}" y1="5" y2="13"/>' for x in at)
    dot = f'<circle cx="{_position(variant.mean, reach)}" cy="9" r="3.6"/>'
    bar = f'<line x1="{low}" x2="{high}" y1="9" y2="9"/>'
    return (f'<svg class="dots hue{colour % HUES}" viewBox="0 0 {DOTS} 18" width="{DOTS}" '
            f'height="18" aria-hidden="true">{ticks if variant.n > 1 else ""}{bar}{dot}'
            "</svg>")  # fmt: skip


def _position(loss: float, reach: tuple[float, float]) -> float:
    """Return the distance from the left in pixels, at most the width of the chart."""
    share = (loss - reach[0]) / (reach[1] - reach[0])
    return round(4 + (DOTS - 8) * min(1.0, max(0.0, share)), 1)


# -- runs -----------------------------------------------------------------------------------------

OUTCOME = ("seed", "status", "val loss", "steps", "epochs", "time", "optimizer ms/step",
           "peak memory", "commit")  # fmt: skip
PARTS = ("job", "model", "data", "environment", "git")


def facts(run: Run) -> dict[str, Record]:
    """Return the head record of a run, by part."""
    parts = {name: run.head.get(name) for name in PARTS}
    return {name: part if isinstance(part, dict) else {} for name, part in parts.items()}


def setup(runs: Sequence[Run]) -> str:
    """Return the settings that all runs share, by part."""
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
    """Format a value, with commas in large integers: 123000000 -> '123,000,000'."""
    return f"{x:,}" if isinstance(x, int) and x >= 10_000 else value(x)


def _same(record: Record, name: str, wanted: Any) -> bool:
    return name in record and bool(record[name] == wanted)


def differing_table(variants: Sequence[Variant]) -> str:
    """Return a table of the settings in which the variants differ, or an empty string."""
    names = ["optimizer", *differing([variant.job for variant in variants])]
    if len(variants) < 2 or len(names) < 2:
        return ""
    head = "".join(f'<th scope="col">{show(name)}</th>' for name in names[1:])
    rows = "".join(
        f'<tr><th scope="row">{show(variant.label)}</th>'
        + "".join(f"<td>{show(_word(variant.job.get(name)))}</td>" for name in names[1:])
        + "</tr>"
        for variant in variants
    )
    table = (
        f'<table class="runs"><thead><tr><th scope="col">variant</th>{head}</tr></thead>'
        f"<tbody>{rows}</tbody></table>"
    )
    region = '<div class="wide" tabindex="0" role="region" aria-label="Settings that differ">'
    return (
        f"<details{'' if len(variants) > text.MANY else ' open'}><summary>Settings that differ"
        f"</summary>{region}{table}</div></details>"
    )


def runs_table(variants: Sequence[Variant]) -> str:
    """Return a table of all runs, with their results and the facts in which they differ."""
    runs = [(variant, run) for variant in variants for run in variant.runs]
    extra = _extra([run for _, run in runs])
    names, cells = [*OUTCOME, *(name for _, name in extra)], [_run(run, extra) for _, run in runs]
    used = [j for j in range(len(names)) if any(row[j] for row in cells)]
    head = "".join(f'<th scope="col">{show(names[j])}</th>' for j in used)
    body = "".join(
        f'<tr><th scope="row" title="{escape(run.folder.name)}">{show(variant.label)}</th>'
        + "".join(f"<td>{row[j]}</td>" for j in used)
        + "</tr>"
        for (variant, run), row in zip(runs, cells, strict=True)
    )
    first = '<th scope="col">variant</th>'
    table = (
        f'<table class="runs"><thead><tr>{first}{head}</tr></thead><tbody>{body}</tbody></table>'
    )
    if len(runs) <= MANY:
        return table
    return f"<details><summary>All {len(runs)} runs</summary>{table}</details>"


def _extra(runs: Sequence[Run]) -> list[tuple[str, str]]:
    """Return (part, name) of each fact that differs between runs and is not in their labels."""
    named = distinguishing([run.job for run in runs])
    found = []
    for part in PARTS[:-1]:
        records = [facts(run)[part] for run in runs]
        skip = named if part == "job" else ()
        found += [(part, name) for name in differing(records) if name not in skip]
    return found


def _run(run: Run, extra: Iterable[tuple[str, str]]) -> list[str]:
    """Return the cells of a run, in the order of OUTCOME and then of `extra`."""
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
    """Return the commit of a run's source, such as '3f2a91c0 + changes'."""
    git = facts(run)["git"]
    known = show(str(git.get("commit") or "")[:8])
    return f"{known} + changes" if known and git.get("dirty") else known


# -- samples --------------------------------------------------------------------------------------


def samples(variants: Sequence[Variant]) -> str:
    """Return the last sample of each run. The first seeds of all variants come first."""
    first, more = [], []
    for variant, colour in zip(variants, charts.colours(variants), strict=True):
        cards = [_sample(variant, colour, run) for run in variant.runs if run.of("sample")]
        first += cards[:1]
        more += cards[1:]
    shown, folded = first[:6], first[6:] + more
    if folded:
        fold = f'<details><summary>{len(folded)} more</summary><div class="samples">'
        return f'<div class="samples">{"".join(shown)}</div>{fold}{"".join(folded)}</div></details>'
    return f'<div class="samples">{"".join(shown)}</div>' if shown else ""


def _sample(variant: Variant, colour: int, run: Run) -> str:
    record = run.of("sample")[-1]
    prompt, words = str(record.get("prompt") or ""), str(record.get("text") or "")
    rest = words.removeprefix(prompt)
    cut = "…" if len(rest) > SAMPLE else ""
    where = f"seed {show(run.job.get('seed', '?'))}, step {show(record.get('step', '?'))}"
    return (f'<figure class="sample"><figcaption>{swatch(colour)}<b>{show(variant.label)}</b> '
            f'<span class="soft">{where}</span></figcaption>'
            f"<p><mark>{escape(prompt)}</mark>{escape(rest[:SAMPLE])}{cut}</p></figure>"
            )  # fmt: skip
