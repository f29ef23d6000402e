"""Compare every row of the zoo with an independent implementation, step by step.

    python -m tools.parity

Writes the table in docs/parity.md.
"""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from tests.support.theirs import RECURRENCES, THEIRS, Theirs, in_float64

STEPS = 40
BEGIN, END = "<!-- parity:begin -->", "<!-- parity:end -->"
HEAD = (
    "| row | independent implementation | largest difference | tolerance |",
    "|---|---|---|---|",
)
PAGE = Path(__file__).parents[1] / "docs" / "parity.md"
INTRO = f"""# Parity

This page compares every row of `sodaopt.zoo` with an independent implementation of the same method:
another project's code, or the recurrence from the papers in `tests/support/recurrences.py`. Both
train a two-layer tanh network without biases in float64 for {STEPS} steps from the same weights,
each with its own gradients. The table shows the largest difference over all weights and steps, and
over the averaged weights at the end if the method has them.

`python -m tools.parity` writes this table.
"""


class Network:
    """min ||W2 tanh(W1 X) - Y||^2 / 64 with fixed data, W1 12 x 7 and W2 5 x 12."""

    def __init__(self) -> None:
        rng = torch.Generator().manual_seed(0)

        def normal(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=rng, dtype=torch.float64)

        self.weights = [Parameter(0.4 * normal(12, 7)), Parameter(0.3 * normal(5, 12))]
        self.X, self.Y = normal(7, 64), normal(5, 64)

    def loss(self) -> Tensor:
        w1, w2 = self.weights
        return (w2 @ torch.tanh(w1 @ self.X) - self.Y).square().sum() / 64

    def backward(self) -> None:
        for w in self.weights:
            w.grad = None
        self.loss().backward()

    def distance(self, other: "Network") -> float:
        pairs = zip(self.weights, other.weights, strict=True)
        return max(float((a - b).detach().abs().max().nan_to_num(torch.inf)) for a, b in pairs)


def mode(opt: Any, name: str) -> None:
    """Call opt.train() or opt.eval() if the optimizer has it."""
    getattr(opt, name, lambda: None)()


def set_lr(opt: Any, lr: float) -> None:
    for group in opt.param_groups:
        group["lr"] = lr


def compare(entry: Theirs, steps: int = STEPS) -> float:
    """Return the largest difference between theirs and SODA over a run."""
    from sodaopt import SODA

    ours, theirs = Network(), Network()
    opt = SODA(ours.weights, entry.lr, entry.method())
    ref = entry.make(theirs.weights, entry.lr)
    mode(opt, "train"), mode(ref, "train")
    gap = 0.0
    for k in range(steps):
        lr = entry.lr * (entry.schedule(k) if entry.schedule else 1)
        set_lr(opt, lr)
        if not entry.own_schedule:
            set_lr(ref, lr)
        ours.backward(), theirs.backward()
        opt.step()
        with in_float64():
            ref.step()
        gap = max(gap, ours.distance(theirs))
    if hasattr(ref, "eval"):
        mode(opt, "eval"), mode(ref, "eval")
        gap = max(gap, ours.distance(theirs))
    return gap


def line(entry: Theirs, gap: float | None) -> str:
    """Return a row of the table. The gap is None if the package is not installed."""
    source = entry.package if gap is None else entry.source
    label = f"`{entry.label}` ({source})".replace("|", "\\|")
    label += f"; {entry.note}" if entry.note else ""
    found = "not installed" if gap is None else f"{gap:.1e}"
    return f"| {entry.row} | {label} | {found} | {entry.tol:.0e} |"


def measure(entry: Theirs) -> float | None:
    return compare(entry) if entry.installed else None


def write(rows: str) -> None:
    """Write the table between the comments BEGIN and END. Start the page if there is none."""
    text = PAGE.read_text() if PAGE.exists() else INTRO
    if BEGIN not in text:
        text += f"\n{BEGIN}\n{END}\n"
    before, rest = text.split(BEGIN, 1)
    PAGE.parent.mkdir(exist_ok=True)
    PAGE.write_text(f"{before}{BEGIN}\n{rows}\n{END}{rest.split(END, 1)[1]}")


def main() -> None:
    entries = sorted((*THEIRS, *RECURRENCES.values()), key=lambda e: (e.row, not e.package))
    gaps = [measure(e) for e in entries]
    rows = "\n".join((*HEAD, *map(line, entries, gaps)))
    print(rows)
    write(rows)
    wrong = [e for e, gap in zip(entries, gaps, strict=True) if gap is not None and gap > e.tol]
    if wrong:
        raise SystemExit("\n".join(f"above tolerance: {e.row}, {e.label}" for e in wrong))


if __name__ == "__main__":
    main()
