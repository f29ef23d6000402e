"""Write the table of docs/scaling.md: the plans of a spectral step for large models.

    python -m tools.scaling [--print]

The numbers are those of `sodaopt.parallel.layout.plan`, which the tests compare with counted ones.
"""

from __future__ import annotations

import argparse
import math
from typing import Any

from benchmarks.pages import DOCS, filled, markdown
from sodaopt.geometry.views import matrix
from sodaopt.parallel.exchange import ROUND_ELEMENTS
from sodaopt.parallel.layout import Grid, Placement, Plan, plan

Shapes = list[tuple[int, ...]]


def dense(width: int, keys: int, hidden: int, depth: int) -> Shapes:
    """The hidden matrices of a transformer with gated feed-forward layers."""
    attention = [(width, width), (keys, width), (keys, width), (width, width)]
    return [*attention, (hidden, width), (hidden, width), (width, hidden)] * depth


def mixture(width: int, hidden: int, experts: int, depth: int) -> Shapes:
    feed_forward = [(experts, hidden, width)] * 2 + [(experts, width, hidden)]
    return ([(width, width)] * 4 + feed_forward) * depth


MODELS = {
    "7B": dense(4096, 4096, 11008, 32),
    "70B": dense(8192, 1024, 28672, 80),
    "30B of 128 experts": mixture(2048, 768, 128, 48),
}
# R replicas of S shards
GRIDS = {
    "DDP": [(8, 1)],
    "FSDP": [(1, 8), (1, 64), (1, 512), (1, 4096)],
    "HSDP": [(8, 8), (64, 8), (512, 8)],
}


def made(shapes: Shapes, R: int, S: int) -> Plan:
    """The plan of the first rank."""
    placement = Placement((R, S), (None, 0), (0, 1))
    params = tuple((shape, placement, matrix(shape)) for shape in shapes)
    return plan(Grid(R, S, 0, 0), params, (0,) * (R * S), ROUND_ELEMENTS)


def row(model: str, kind: str, R: int, S: int) -> list[str]:
    shapes = MODELS[model]
    found = made(shapes, R, S)
    share = sum(found.loads) / len(found.loads)
    elements = sum(math.prod(shape) for shape in shapes)
    got = sum(found.elements_received()) * 4 / 1e9
    own = 3 * 2 * elements * (S - 1) / S / 1e9 + 2 * 2 * (R - 1) / R * elements / S / 1e9
    return [
        model, f"{kind} {R} x {S}" if kind == "HSDP" else f"{kind} {R * S}", f"{found.computed:,}",
        f"{max(found.loads) / sum(found.loads):.2%}", f"{max(found.loads) / share:.2f}",
        f"{got:.2f}", f"{got / 2:.2f}", f"{own:.1f}",
    ]  # fmt: skip


HEAD = [
    "model", "ranks", "matrices of rank 0", "work of the busiest rank", "over its share",
    "GB received, fp32", "in bf16", "GB of the training itself",
]  # fmt: skip


def table() -> str:
    rows: list[Any] = [
        row(model, kind, R, S)
        for model in MODELS
        for kind, grids in GRIDS.items()
        for R, S in grids
    ]
    return markdown([HEAD, *rows])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--print", action="store_true", help="print the table only")
    if parser.parse_args().print:
        print(table())
    else:
        page = DOCS / "scaling.md"
        page.write_text(filled(page, "plans", table()), encoding="utf-8")


if __name__ == "__main__":
    main()
