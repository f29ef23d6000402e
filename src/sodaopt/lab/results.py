"""Read and write the numbers of a study, and format them as tables in the layout of the paper."""

import json
import math
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from . import stats
from .files import write_atomically
from .labels import value as shown
from .progress import short

Numbers = dict[str, Any]


def write(path: Path, numbers: Numbers) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, [(json.dumps(numbers, indent=1) + "\n").encode()])


def read(path: Path) -> Numbers:
    """Return the numbers of a file. Numbers of version 0.1 get the keys that it did not write."""
    numbers: Numbers = json.loads(path.read_text(encoding="utf-8"))
    is_old = isinstance(numbers, dict) and "differences" in numbers
    return _of_0_1(numbers) if is_old else numbers


def _of_0_1(numbers: Numbers) -> Numbers:
    """Version 0.1 took the first seeds of each cell, tuned on seed 0, and named no comparison as
    primary."""
    cells = [{"seeds": list(range(len(cell["losses"])))} | cell for cell in numbers["cells"]]
    pairs = dict.fromkeys((gap["one"], gap["other"]) for gap in numbers["differences"])
    planned = {cell["row"]: len(cell["seeds"]) for cell in cells}
    added = {"planned": planned, "pairs": list(map(list, pairs)), "primary": 0, "tuning_seeds": [0]}
    return added | numbers | {"cells": cells}


def summary(losses: Sequence[float | None]) -> Numbers:
    """Return the losses of a cell with their mean and standard deviation.

    losses: the loss of each seed, None if the run has diverged
    """
    known = [loss for loss in losses if loss is not None]
    return {
        "losses": list(losses),
        "mean": fmean(known) if known else None,
        "spread": stdev(known) if len(known) > 1 else None,
        "diverged": len(losses) - len(known),
    }


def searched(known: Sequence[Numbers]) -> tuple[dict[str, dict[float, float]], tuple[Numbers, ...]]:
    """Return the losses by baseline and learning rate, and the choices, of earlier commands.

    known: the numbers of these commands
    """
    rates = {
        base: {float(lr): math.inf if loss is None else loss for lr, loss in losses.items()}
        for numbers in known
        for base, losses in numbers["learning_rates"].items()
    }
    choices: list[Numbers] = []
    for numbers in known:  # two files may hold the same choice
        choices += [c for c in numbers.get("choices", ()) if c not in choices]
    return rates, tuple(choices)


def completed(new: Numbers, known: Sequence[Numbers]) -> Numbers:
    """Return the numbers of a command, merged with known numbers of the same study."""
    for old in known:
        if old["study"] == new["study"]:
            new = _merged(old, new)
    return new


def _merged(old: Numbers, new: Numbers) -> Numbers:
    """Add the runs of a later command to the numbers of a study.

    If both have a run of the same seed, the later run counts.
    """
    for name, value in old["data"].items():
        if new["data"][name] != value:
            raise ValueError(
                f"the earlier runs of {old['study']} have data with {name} {value}, and these have "
                f"{new['data'][name]}: remove the file of the earlier runs from --known"
            )
    cells = {(cell["row"], cell["column"]): cell for cell in old["cells"]}
    for cell in new["cells"]:
        at = cell["row"], cell["column"]
        cells[at] = _joined(cells[at], cell) if at in cells else cell
    before = {name: old.get(name) for name in ("command", "git", "environment")}
    return new | {
        "cells": list(cells.values()),
        "earlier": [*old.get("earlier", []), before],
        "notes": old.get("notes", []),
    }


def _joined(old: Numbers, new: Numbers) -> Numbers:
    """Return a cell with the runs of both cells."""
    for name in ("lr", "steps", "settings"):
        if old.get(name, new[name]) != new[name]:
            raise ValueError(
                f"{new['column']}, {new['row']}: the earlier runs have {name} {old[name]}, and "
                f"these have {new[name]}: remove the file of the earlier runs from --known"
            )
    each = ("losses", "seconds", "tokens_per_second")
    runs = {
        seed: values
        for cell in (old, new)
        for seed, *values in zip(cell["seeds"], *(cell[name] for name in each), strict=True)
    }
    losses, seconds, speeds = zip(*(runs[seed] for seed in sorted(runs)), strict=True)
    times = {"seconds": list(seconds), "tokens_per_second": list(speeds)}
    return new | {"seeds": sorted(runs), **summary(losses), **times}


def page(studies: Sequence[Numbers], head: str) -> str:
    """Return a Markdown page of all studies. `head` is the text above them."""
    return "\n\n".join([head.rstrip(), *(markdown(numbers) for numbers in studies)]) + "\n"


def markdown(numbers: Numbers) -> str:
    """Return the section of a study in Markdown: a description, tables and notes."""
    parts = [f"## {numbers['title']}", _about(numbers), _losses(numbers)]
    if found := differences(numbers["cells"], numbers["pairs"], numbers["primary"]):
        parts += [_tested(found), _differences(found)]
    if numbers["learning_rates"]:
        parts += [f"Learning rates of the baselines, {_seeds(numbers['tuning_seeds'])}:"]
        parts += [_rates(numbers)]
    if numbers.get("choices"):
        parts += ["Settings chosen by the mean loss over other seeds:", _choices(numbers)]
    parts += numbers.get("notes", [])
    return "\n\n".join(parts)


def _about(numbers: Numbers) -> str:
    """Describe how the numbers were measured: commands, sizes, data, machine and seeds."""
    e, data, cells = numbers["environment"], numbers["data"], numbers["cells"]
    cpu = f"{e.get('processor', 'CPU')}, {e.get('cores')} cores"
    machine = cpu if e["device"] == "cpu" else e["device"]
    epochs = max(c["epochs"] or 0 for c in cells)
    steps = sorted({c["steps"] for c in cells})
    sizes = sorted({c.get("parameters", numbers["parameters"]) for c in cells})
    commands = [f"`{it['command']}`" for it in [*numbers.get("earlier", []), numbers]]
    return (
        f"{', then '.join(commands)}: {', '.join(map(short, sizes))} parameters, "
        f"{', '.join(map(str, steps))} steps, data "
        f"{data['name']} ({data['train_tokens'] / 1e6:.0f}M tokens, vocabulary {data['vocab']}; "
        f"{epochs:.2f} epochs seen), {machine}, torch {e['torch']}. {_measured(numbers)} "
        "Validation loss, mean and standard deviation over seeds:"
    )


def _measured(numbers: Numbers) -> str:
    """Say which seeds of each row are measured, and how many are planned."""
    words = []
    for row, planned in numbers["planned"].items():
        cells = [cell["seeds"] for cell in numbers["cells"] if cell["row"] == row]
        seeds = sorted({seed for found in cells for seed in found})
        missing = "" if len(seeds) >= planned else f" of {planned} planned"
        words.append(f"{row}: {_seeds(seeds)}{missing}" if seeds else f"{row}: not measured yet")
    return ". ".join(words) + "."


def _seeds(seeds: Sequence[int]) -> str:
    """Return 'seed 3', 'seeds 0 to 4' or 'seeds 0, 2'."""
    if len(seeds) < 2:
        return f"seed {seeds[0]}"
    whole = list(seeds) == list(range(seeds[0], seeds[-1] + 1))
    return "seeds " + (f"{seeds[0]} to {seeds[-1]}" if whole else ", ".join(map(str, seeds)))


def _losses(numbers: Numbers) -> str:
    columns = list(dict.fromkeys(c["column"] for c in numbers["cells"]))
    labels = list(dict.fromkeys(c["row"] for c in numbers["cells"]))
    lines = []
    for row in labels:
        at = {c["column"]: c for c in numbers["cells"] if c["row"] == row}
        lines.append([row, *(_loss(at[c]) if c in at else "-" for c in columns)])
        lines.append(["lr", *(shown(at[c]["lr"]) if c in at else "" for c in columns)])
        if row in numbers["published"] and len(numbers["published"][row]) == len(columns):
            lines.append(["*paper, 124M*", *(f"*{v:.5f}*" for v in numbers["published"][row])])
    return table(["", *columns], lines)


def _loss(cell: dict[str, Any]) -> str:
    if cell["mean"] is None:
        return "diverged"
    spread = f" ± {cell['spread']:.4f}" if cell["spread"] is not None else ""
    lost = f" ({cell['diverged']} diverged)" if cell["diverged"] else ""
    return f"{cell['mean']:.4f}{spread}{lost}"


def differences(
    cells: Sequence[Numbers], pairs: Sequence[tuple[str, str]], primary: int = 1
) -> list[Numbers]:
    """Compare pairs of columns in each row by the fit of loss = variant + seed.

    primary: number of leading pairs that are primary comparisons. Only these have a p value.
    """
    found = [
        _difference(row, one, other, fit, j < primary)
        for row, fit in _fits(cells).items()
        for j, (one, other) in enumerate(pairs)
    ]
    known = [d for d in found if d is not None]
    tested = [d for d in known if d["primary"] and d["p"] is not None]
    for d, p in zip(tested, stats.holm([d["p"] for d in tested]), strict=True):
        d["p"] = p
    return known


def _fits(cells: Sequence[Numbers]) -> dict[str, stats.Fit]:
    """Fit the losses of each row. Columns with a diverged seed are left out."""
    rows: dict[str, dict[Any, float]] = {}
    for cell in cells:
        if None not in cell["losses"]:
            known = zip(cell["seeds"], cell["losses"], strict=True)
            losses = {(cell["column"], seed): loss for seed, loss in known}
            rows.setdefault(cell["row"], {}).update(losses)
    return {row: stats.fit(losses) for row, losses in rows.items()}


def _difference(row: str, one: str, other: str, fit: stats.Fit, primary: bool) -> Numbers | None:
    gap = fit.difference(one, other)
    if gap is None:
        return None
    return {
        "row": row, "one": one, "other": other, "primary": primary, "mean": gap.mean,
        "low": gap.low, "high": gap.high, "p": gap.p if primary else None,
        "sd": fit.sd, "freedom": fit.freedom, "n": fit.shared(one, other),
    }  # fmt: skip


def _tested(found: Sequence[Numbers]) -> str:
    lines = ["Differences (negative: the first is better) with 95 % intervals from a fit of "
             f"{stats.MODEL} to each row. The residuals of all columns are pooled."]  # fmt: skip
    known = [d for d in found if d["sd"] is not None]
    for d in {d["row"]: d for d in known}.values():
        least = stats.detectable(d["sd"], d["n"], d["freedom"])
        lines.append(
            f"{d['row']}: residual sd {d['sd']:.4f}, {d['freedom']} degrees of freedom; {d['n']} "
            f"seeds find a difference of {least:.4f} with a probability of 80 %."
        )
    named = {f"{d['one']} against {d['other']}": d for d in found if d["primary"]}
    if named:
        lines.append(f"Primary: {'; '.join(named)}. Only primary comparisons have p values, after "
                     "Holm's correction for their number.")  # fmt: skip
    return " ".join(lines)


def _differences(found: Sequence[Numbers]) -> str:
    lines = []
    for d in found:
        ends = "-" if d["low"] is None else f"{d['low']:+.4f} to {d['high']:+.4f}"
        p = "" if d["p"] is None else f"{_probability(d['p'])} {stats.stars(d['p'])}".strip()
        lines.append([d["row"], d["one"], d["other"], f"{d['mean']:+.4f}", ends, p])
    return table(["", "", "against", "difference", "95 % interval", "p"], lines)


def _probability(p: float) -> str:
    return "< 0.001" if p < 1e-3 else f"{p:.3f}"


def _rates(numbers: Numbers) -> str:
    rates = sorted({float(k) for t in numbers["learning_rates"].values() for k in t})
    lines = []
    for base, tried in numbers["learning_rates"].items():
        losses = {float(k): v for k, v in tried.items()}
        low = min((loss for loss in losses.values() if loss is not None), default=None)
        lines.append([base, *(_tried_loss(losses, rate, low) for rate in rates)])
    return table(["", *map(shown, rates)], lines)


def _choices(numbers: Numbers) -> str:
    lines = []
    for t in numbers["choices"]:
        chosen = " ".join(f"{name} {shown(v)}" for name, v in t["settings"].items())
        mean = f"{t['mean']:.4f}" if t["mean"] is not None else "diverged"
        lines.append([t["column"], chosen, mean, ", ".join(map(str, t["seeds"]))])
    return table(["", "setting", "loss", "seeds"], lines)


def _tried_loss(losses: dict[float, float | None], rate: float, low: float | None) -> str:
    """Return the loss at a learning rate, in bold if it is the lowest, or '' if there is none."""
    if rate not in losses:
        return ""
    loss = losses[rate]
    if loss is None:
        return "diverged"
    return f"**{loss:.4f}**" if loss == low else f"{loss:.4f}"


def table(head: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    """Return a table in Markdown."""
    rows = [list(head), ["---"] * len(head), *map(list, lines)]
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)


def finite(losses: dict[float, float]) -> dict[str, float | None]:
    """Replace the infinite loss of a diverged run by None, because JSON has no infinity."""
    return {str(lr): loss if math.isfinite(loss) else None for lr, loss in sorted(losses.items())}


def best(losses: dict[float, float]) -> float:
    """Return the learning rate with the lowest loss."""
    return min(losses, key=losses.__getitem__)
