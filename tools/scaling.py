"""Write the tables of docs/scaling.md: predictions for large models, and Dion's counts beside them.

python -m tools.scaling [--print]
"""

from __future__ import annotations

import argparse
from functools import cache

from torch import nn

from sodaopt.lab.bench import without_memory
from sodaopt.lab.cluster import H100, Prediction, cluster, has_polar_factors, rows, table
from tools.pages import DOCS, filled, markdown

CLUSTERS = {
    "gpt-1b": ("1x1", "8x1", "8x8"),
    "llama-7b": ("8x1", "8x8", "8x64", "8x512"),
    "llama-70b": ("8x4", "8x32", "8x128", "8x2048"),
    "llama-405b": ("8x32", "8x128", "8x2048"),
    "moe-30b": ("8x1", "8x8", "8x64", "8x512"),
    "moe-1t": ("8x32", "8x128", "8x2048"),
}
METHODS = ("adamw", "muon")


@cache
def found(model: str) -> list[Prediction]:
    """The rows of a model that fit into the memory of the GPUs."""
    made = without_memory(model)
    every = [row for c in CLUSTERS[model] for row in rows(made, cluster(c), METHODS)]
    fits = {row.parallel for row in every if row.counts.memory <= H100.capacity}
    fits = {parallel for parallel in fits if not parallel.startswith("hsdp 1 x")}
    once = {(row.parallel, row.method): row for row in every if row.parallel in fits}
    return list(once.values())


def lines(model: str) -> list[list[str]]:
    head, *body = table(found(model))
    return [["model", *head], *([model, *line] for line in body)]


RANK = 1 / 4
"""Dion's rank, as a share of the short side."""


def dion(model: nn.Module, muon: Prediction) -> list[str]:
    """Return a row: the elements that a rank receives, as a share of the elements of all matrices.

    Table 1 of arXiv:2504.05295v1 has m n for Muon and (m + 1) r for Dion, for a matrix m x n with
    m <= n.
    """
    matrices = [p.shape for g in muon_groups(model) for p in g]
    elements = sum(s.numel() for s in matrices)
    low = 0.0
    for *stack, a, b in matrices:
        m = min(a, b)
        low += (stack[0] if stack else 1) * (m + 1) * RANK * m
    ours = (muon.counts.shards + muon.counts.replicas) / 4
    return [muon.parallel, "1", f"{low / elements:.3f}", f"{ours / elements:.3f}"]


def muon_groups(model: nn.Module) -> list[list[nn.Parameter]]:
    from sodaopt import param_groups

    groups = param_groups(model, "muon")
    return [[p for _, p in g["params"]] for g in groups if has_polar_factors(g["method"].geometry)]


def compared() -> str:
    head = ["model", "parallel", "Muon, gathered on each rank (Dion, Table 1)",
            "Dion, rank 1/4 (Table 1)", "sodaopt, counted by the rounds"]  # fmt: skip
    body = [
        [model, *dion(without_memory(model), row)]
        for model in CLUSTERS
        for row in found(model)
        if row.method == "muon" and not row.parallel.startswith("ddp")
    ]
    return markdown([head, *body])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--print", action="store_true", help="print the tables only")
    every = [lines(model) for model in CLUSTERS]
    plans = markdown([every[0][0], *(line for one in every for line in one[1:])])
    if parser.parse_args().print:
        print(plans, compared(), sep="\n\n")
    else:
        page = DOCS / "scaling.md"
        page.write_text(filled(page, "plans", plans), encoding="utf-8")
        page.write_text(filled(page, "dion", compared()), encoding="utf-8")


if __name__ == "__main__":
    main()
