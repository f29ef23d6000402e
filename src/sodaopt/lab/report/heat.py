"""Draw heat maps of the loss by learning rate and weight decay, as HTML tables."""

from collections.abc import Sequence

from ..labels import value
from ..variants import Variant
from .panels import HeatMap, heat_maps, window
from .tables import show


def heat_section(variants: Sequence[Variant]) -> str:
    """Return the section of the heat maps, or an empty string if no runs sweep both settings."""
    found = heat_maps(variants)
    if not found:
        return ""
    caption = (
        "Validation loss. Deeper blue is better. A frame marks the best cell, and hatched cells "
        "have a diverged seed. Cells with fewer seeds than others show their number n."
    )
    tables = "".join(map(_table, found))
    return (
        '<section id="heat"><h2>Learning rate and weight decay</h2>'
        f'<div class="panels maps">{tables}</div><p class="caption">{caption}</p></section>'
    )


def _table(one: HeatMap) -> str:
    means = [v.mean for v in one.cells.values() if v.mean is not None and not v.diverged]
    reach = window(means) if means else (0.0, 1.0)
    most = max(v.n for v in one.cells.values())
    head = "".join(f'<th scope="col">{show(value(lr))}</th>' for lr in one.columns)
    rows = "".join(
        f'<tr><th scope="row">{show(value(wd))}</th>'
        + "".join(_cell(one.cells.get((lr, wd)), one, reach, most) for lr in one.columns)
        + "</tr>"
        for wd in reversed(one.rows)
    )
    name = show(one.label)
    region = f'<div class="wide" tabindex="0" role="region" aria-label="Heat map of {name}">'
    return (
        f'<div class="panel"><h3>{name}</h3>{region}<table class="heat">'
        f'<thead><tr><th scope="col">wd \\ lr</th>{head}</tr></thead><tbody>{rows}</tbody></table>'
        "</div></div>"
    )


def _cell(variant: Variant | None, one: HeatMap, reach: tuple[float, float], most: int) -> str:
    """Return a cell. Its colour is the place of the loss in `reach`.

    most: the most seeds of a cell
    """
    if variant is None:
        return "<td></td>"
    names = ["best"] if variant is one.best else []
    names += ["gone"] if variant.diverged else []
    if variant.mean is None:
        return f'<td class="{" ".join(names)}">{"diverged" if variant.diverged else "…"}</td>'
    if variant.diverged:  # no colour: the other seeds do not represent this setting
        note = f'<span class="n">{variant.summary()}</span>'
        return f'<td class="{" ".join(names)}">{variant.mean:.3f}{note}</td>'
    share = min(1.0, max(0.0, (variant.mean - reach[0]) / (reach[1] - reach[0])))
    note = f'<span class="n">n {variant.n}</span>' if variant.n < most else ""
    style = f'class="{" ".join(names)}" style="--level:{round(100 * (1 - share))}%"'
    return f"<td {style}>{variant.mean:.3f}{note}</td>"
