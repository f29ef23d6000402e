"""Read and write the numbers of a study, and format them as tables in the layout of the paper."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .files import write_atomically
from .labels import value as shown

Numbers = dict[str, Any]


def write(path: Path, numbers: Numbers) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, [(json.dumps(numbers, indent=1) + "\n").encode()])


def read(path: Path) -> Numbers:
    return json.loads(path.read_text(encoding="utf-8"))  # type: ignore[no-any-return]


def page(studies: Sequence[Numbers], head: str) -> str:
    """Return a page with all studies."""
    return "\n\n".join([head.rstrip(), *(markdown(numbers) for numbers in studies)]) + "\n"


def markdown(numbers: Numbers) -> str:
    parts = [f"## {numbers['title']}", _about(numbers), _losses(numbers)]
    if numbers["differences"]:
        parts += ["Differences by seed (negative: the first is better):", _differences(numbers)]
    if "analysis" in numbers:
        parts += [_model(numbers["analysis"]), _intervals(numbers["analysis"])]
    if numbers["learning_rates"]:
        parts += ["Learning rates of the baselines, seed 0:", _rates(numbers)]
    if numbers.get("choices"):
        parts += ["Settings chosen by the mean loss over other seeds:", _choices(numbers)]
    parts += numbers.get("notes", [])
    return "\n\n".join(parts)


def _about(numbers: Numbers) -> str:
    e, data, cells = numbers["environment"], numbers["data"], numbers["cells"]
    seeds = max(len(c["losses"]) for c in cells)
    epochs = max(c["epochs"] or 0 for c in cells)
    steps = sorted({c["steps"] for c in cells})
    return (
        f"`{numbers['command']}`: {numbers['parameters'] / 1e6:.3g}M parameters, "
        f"{' and '.join(map(str, steps))} steps, {seeds} seed{'s' * (seeds > 1)}, data "
        f"{data['name']} ({data['train_tokens'] / 1e6:.0f}M tokens, vocabulary {data['vocab']}; "
        f"{epochs:.2f} epochs seen), {e['device']}, torch {e['torch']}. Validation loss, mean and "
        "standard deviation over seeds:"
    )


def _losses(numbers: Numbers) -> str:
    columns = list(dict.fromkeys(c["column"] for c in numbers["cells"]))
    labels = list(dict.fromkeys(c["row"] for c in numbers["cells"]))
    lines = []
    for row in labels:
        at = {c["column"]: c for c in numbers["cells"] if c["row"] == row}
        lines.append([row, *(_loss(at[column]) for column in columns)])
        lines.append(["lr", *(shown(at[column]["lr"]) for column in columns)])
        if row in numbers["published"] and len(numbers["published"][row]) == len(columns):
            lines.append(["*paper, 124M*", *(f"*{v:.5f}*" for v in numbers["published"][row])])
    return table(["", *columns], lines)


def _loss(cell: dict[str, Any]) -> str:
    if cell["mean"] is None:
        return "diverged"
    spread = f" ± {cell['spread']:.4f}" if cell["spread"] is not None else ""
    lost = f" ({cell['diverged']} diverged)" if cell["diverged"] else ""
    return f"{cell['mean']:.4f}{spread}{lost}"


def _differences(numbers: Numbers) -> str:
    lines = []
    for d in numbers["differences"]:
        spread = f"{d['spread']:.4f}" if d["spread"] is not None else "-"
        p = f"{d['p']:.3f}" if d["p"] is not None else "-"
        lines.append([d["row"], d["one"], d["other"], f"{d['mean']:+.4f}", spread, p, str(d["n"])])
    return table(["", "", "against", "difference", "spread", "p (paired t)", "n"], lines)


def _model(analysis: Numbers) -> str:
    one, other = analysis["primary"]
    return (
        f"Differences to {analysis['baseline']} with {analysis['level']:.0%} intervals. Pooled: "
        f"the fit {analysis['model']} (sd {analysis['residual_sd']:.4f}, "
        f"{analysis['degrees_of_freedom']} degrees of freedom). Paired: the seeds of the two "
        f"variants alone. The primary comparison is {one} against {other}:"
    )


def _intervals(analysis: Numbers) -> str:
    lines = []
    for d in analysis["differences"]:
        both = [d["pooled"], d["paired"]]
        ranges = [f"{i['low']:+.4f} to {i['high']:+.4f}" for i in both]
        lines.append([d["variant"], f"{both[0]['difference']:+.4f}", *ranges])
    return table(["", "difference", "pooled", "paired"], lines)


def _rates(numbers: Numbers) -> str:
    rates = sorted({float(k) for t in numbers["learning_rates"].values() for k in t})
    lines = []
    for base, tried in numbers["learning_rates"].items():
        losses = {float(k): v for k, v in tried.items()}
        low = min((loss for loss in losses.values() if loss is not None), default=None)
        lines.append([base, *(_mark(losses, rate, low) for rate in rates)])
    return table(["", *map(shown, rates)], lines)


def _choices(numbers: Numbers) -> str:
    lines = []
    for t in numbers["choices"]:
        chosen = " ".join(f"{name} {shown(v)}" for name, v in t["settings"].items())
        mean = f"{t['mean']:.4f}" if t["mean"] is not None else "diverged"
        lines.append([t["column"], chosen, mean, ", ".join(map(str, t["seeds"]))])
    return table(["", "setting", "loss", "seeds"], lines)


def _mark(losses: dict[float, float | None], rate: float, low: float | None) -> str:
    if rate not in losses:
        return ""
    loss = losses[rate]
    if loss is None:
        return "diverged"
    return f"**{loss:.4f}**" if loss == low else f"{loss:.4f}"


def table(head: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    rows = [list(head), ["---"] * len(head), *map(list, lines)]
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)
