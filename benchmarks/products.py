"""Find the fastest form of a Newton-Schulz iteration, and the fastest product, for each shape.

    python -m benchmarks.products [--out src/sodaopt/backends/products.json] [--measured FILE ...]

FILE is the printed output of this command. With FILE, nothing is measured, and the table is chosen
again from the recorded times. Rows of later files replace those of earlier ones.

A measurement runs the five steps of KELLER on normalised fp16 matrices, as many as one part of an
optimizer step has. It replays a CUDA graph, so it is the time of the GPU without the host. A row of
the table applies from its short side and aspect ratio up to those of the next row. Smaller matrices
use the plain form with dense products. `error` is the relative distance to the same polynomial in
float64.
"""

from __future__ import annotations

import argparse
import json
import statistics
from itertools import product
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from benchmarks.records import where
from sodaopt.backends import products
from sodaopt.core.fused import WORKSPACE
from sodaopt.geometry import polar
from sodaopt.lab.bench import events

SHORT = (4096, 2048, 1024, 768, 512, 256)
ASPECTS = (4, 2, 1)
MARGIN = 0.97
"""A dense product is chosen if its time is below this share of the others' time.

Dense products need more launches and are less accurate."""
HOPPER = 1024
"""Below this short side, a call of quack-kernels takes longer on the host than on the GPU."""


def measure(short: int, aspect: int, rounds: int) -> dict[str, Any]:
    each = 2 * short * short * (2 * aspect + 1)
    n = max(5, 4 * WORKSPACE // each)  # as many as a part of fp32 parameters has
    G = torch.randn(n, short, aspect * short, device="cuda")
    G /= torch.linalg.vector_norm(G, dim=(-2, -1), keepdim=True)
    X, exact = G.half(), polar.KELLER.products(G[:1].double())
    found: dict[tuple[str, str], dict[str, float]] = {}
    for form in ("plain", "gram") if aspect > 1 else ("plain",):
        for name, load in products.PRODUCTS.items():
            if name == "hopper" and not products.has_hopper():
                continue
            choice = form, load()
            with mock.patch.object(polar, "choice", lambda X, choice=choice: choice):
                Y = polar.KELLER.products(X)
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph):
                    polar.KELLER.products(X)
            ms = statistics.median(events(graph.replay, rounds))
            error = (Y[:1].double() - exact).norm() / exact.norm()
            found[form, name] = {"ms": round(ms, 4), "error": round(error.item(), 5)}
    measured = {"/".join(key): value for key, value in found.items()}
    return {"short": short, "aspect": aspect, "matrices": n, "measured": measured}


def chosen(row: dict[str, Any]) -> dict[str, Any]:
    """Return the row with its fastest form and product, with and without quack-kernels."""
    ours = {name: v for name, v in row["measured"].items() if not name.endswith("hopper")}
    overall = best(row["measured"] if row["short"] >= HOPPER else ours)
    row = row | best(ours)
    return row | ({"with_hopper": overall} if overall["product"] == "hopper" else {})


def best(measured: dict[str, dict[str, float]]) -> dict[str, str]:
    def cost(name: str) -> float:
        return measured[name]["ms"] / (MARGIN if name.endswith("dense") else 1)

    form, product = min(measured, key=cost).split("/")
    return {"form": form, "product": product}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--out", type=Path, default=products.TABLE)
    parser.add_argument("--measured", type=Path, nargs="*", default=[])
    args = parser.parse_args()
    found = {}
    for line in (line for file in args.measured for line in file.read_text().splitlines()):
        if line.startswith("{"):
            row = json.loads(line)
            found[row["short"], row["aspect"]] = row
    for short, aspect in [] if found else product(SHORT, ASPECTS):
        found[short, aspect] = measure(short, aspect, args.rounds)
        print(json.dumps(found[short, aspect]), flush=True)
    keys = "short", "aspect", "matrices", "measured"
    rows = [chosen({key: row[key] for key in keys}) for row in found.values()]
    lines = ",\n".join(f"  {json.dumps(row)}" for row in rows)
    machine = json.loads(products.TABLE.read_text()) if args.measured else where("cuda")
    head = {"command": "python -m benchmarks.products"}
    head |= {key: machine[key] for key in ("device", "torch", "threads")}
    args.out.write_text(f'{json.dumps(head)[:-1]},\n "rows": [\n{lines}\n ]}}\n')


if __name__ == "__main__":
    main()
