"""Which form of a Newton-Schulz iteration, and which product, is fastest for a shape.

    python -m benchmarks.products [--out src/sodaopt/backends/products.json]

The five steps of KELLER on normalised fp16 matrices, as many as a part of a step has, replayed as
a CUDA graph: the time of the GPU alone. A row holds for its short side and aspect ratio and all
larger ones up to the next row. error is the distance to the same polynomial in float64, relative.
"""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from benchmarks.pages import where
from sodaopt.backends import products
from sodaopt.core.fused import WORKSPACE
from sodaopt.geometry import polar
from sodaopt.lab.bench import events

SHORT = (4096, 2048, 1024, 768, 512, 256)
ASPECTS = (4, 2, 1)
MARGIN = 0.97
"""Another form or product than the plain dense one must save this much."""


def measure(short: int, aspect: int, rounds: int) -> dict[str, Any]:
    each = 2 * short * short * (2 * aspect + 1)
    n = max(5, WORKSPACE // each)
    G = torch.randn(n, short, aspect * short, device="cuda")
    G /= torch.linalg.vector_norm(G, dim=(-2, -1), keepdim=True)
    X, exact = G.half(), polar.KELLER.products(G[:1].double())
    found: dict[tuple[str, str], dict[str, float]] = {}
    for form in ("plain", "gram") if aspect > 1 else ("plain",):
        for name, product in products.PRODUCTS.items():
            if name == "hopper" and not products.has_hopper():
                continue
            chosen = products.Choice(form, product)
            with mock.patch.object(polar, "choice", lambda X, chosen=chosen: chosen):
                Y = polar.KELLER.products(X)
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph):
                    polar.KELLER.products(X)
            ms = statistics.median(events(graph.replay, rounds))
            error = (Y[:1].double() - exact).norm() / exact.norm()
            found[form, name] = {"ms": round(ms, 4), "error": round(error.item(), 5)}
    without = best({key: value for key, value in found.items() if key[1] != "hopper"})
    row = {"short": short, "aspect": aspect, **without, "matrices": n}
    if (overall := best(found)) != without:
        row["with_hopper"] = overall
    return row | {"measured": {"/".join(key): value for key, value in found.items()}}


def best(found: dict[tuple[str, str], dict[str, float]]) -> dict[str, str]:
    """The fastest form and product. Each must save a share of the time of those before it."""
    chosen = ("plain", "dense")
    for key, value in found.items():
        if value["ms"] < MARGIN * found[chosen]["ms"]:
            chosen = key
    return {"form": chosen[0], "product": chosen[1]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--out", type=Path, default=products.TABLE)
    args = parser.parse_args()
    rows = []
    for short in SHORT:
        for aspect in ASPECTS:
            rows.append(measure(short, aspect, args.rounds))
            print(json.dumps(rows[-1]), flush=True)
    rows += [row | {"short": 1} for row in rows[-len(ASPECTS) :]]
    lines = ",\n".join(f"  {json.dumps(row)}" for row in rows)
    head = json.dumps({"command": "python -m benchmarks.products", **where("cuda")})
    args.out.write_text(f'{head[:-1]},\n "rows": [\n{lines}\n ]}}\n')


if __name__ == "__main__":
    main()
