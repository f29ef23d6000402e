"""The plan on the host: every entry of every matrix travels once, and ranks have even work."""

import math
from itertools import product

import pytest
import torch

from sodaopt.geometry.views import Frame, conv, grouped, heads, matrix, split, transposed, whole
from sodaopt.parallel.layout import Grid, Placement, boxes, buckets, plan
from tools import scaling

VIEWS = {
    "matrix": (matrix, (7, 5)),
    "one row": (matrix, (1, 6)),
    "experts": (matrix, (8, 3, 2)),
    "few experts": (matrix, (3, 4, 5)),
    "transposed": (transposed, (4, 6)),
    "fused": (split(3), (9, 4)),
    "fused experts": (split(2), (3, 4, 5)),
    "fused, transposed": (split(3, transposed), (4, 9)),
    "fused experts, transposed": (split(2, transposed), (3, 5, 4)),
    "kernel": (conv, (6, 3, 2, 2)),
    "groups": (grouped(2), (6, 3, 2)),
    "heads": (heads, (6, 2, 3)),
    "vector": (whole, (5,)),
}
PLACEMENTS = {  # each on R x S ranks
    "fsdp": (Placement((4,), (0,), (0,)), 1, 4),
    "hsdp": (Placement((2, 3), (None, 0), (0, 1)), 2, 3),
    "tp of replicas": (Placement((2, 2), (1, None), (0, 1)), 2, 2),
    "fsdp x tp": (Placement((2, 3), (0, 1), (0, 1)), 1, 6),
    "fsdp after tp": (Placement((2, 2), (0, 0), (1, 0)), 1, 4),
    "ddp": (Placement((4,), (None,), (0,)), 4, 1),
}
MIXED = [VIEWS[name] for name in ("matrix", "experts", "fused", "few experts", "matrix", "kernel")]


def plans(params: list, placement: Placement, R: int, S: int, limit: int = 40) -> dict:
    """The plan of each rank. A vector is not cut by a second dimension."""

    def fitted(shape: tuple[int, ...]) -> Placement:
        cuts = tuple(c if c is None or c < len(shape) else 0 for c in placement.cuts)
        return placement._replace(cuts=cuts)

    entries = tuple((shape, fitted(shape), view(shape)) for view, shape in params)
    loads = (0,) * (R * S)
    return {
        (r, s): plan(Grid(R, S, r, s), entries, loads, limit)
        for r, s in product(range(R), range(S))
    }


@pytest.mark.parametrize("name", VIEWS)
def test_boxes_are_the_matrices(name: str) -> None:
    view, shape = VIEWS[name]
    f: Frame = view(shape)
    numbers = torch.arange(math.prod(shape)).view(shape)
    parts = [numbers[tuple(slice(a.start, a.stop) for a in box)] for box in f.boxes(shape)]
    found = torch.stack([f.one().fold(part)[0] for part in parts])
    assert sorted(found.flatten(1).tolist()) == sorted(f.fold(numbers).flatten(1).tolist())
    assert all(
        torch.equal(f.one().unfold(X, p.shape), p) for X, p in zip(found, parts, strict=True)
    )


@pytest.mark.parametrize("name", PLACEMENTS)
def test_every_entry_travels_once(name: str) -> None:
    """Rank (r, s) sends to (r, t) as many entries as that one expects, in the same order, and each
    entry of a shard comes back from one replica."""
    placement, R, S = PLACEMENTS[name]
    every = plans(MIXED, placement, R, S)
    for number in range(len(every[0, 0].rounds)):
        for (r, s), t in product(every, range(S)):
            sent = every[r, s].rounds[number].held[r][t]
            expected = every[r, t].rounds[number].made_of[s]
            if every[r, s].rounds[number].travels or s == t:
                assert [p.size for p in sent] == [p.size for p in expected]
    for (_, s), one in every.items():
        for j, (_, shape) in enumerate(MIXED):
            axes = boxes(shape, placement)[s]
            seen = torch.zeros([len(axis) for axis in axes])
            for n in one.rounds:
                for piece in (
                    p for row in n.held for pieces in row for p in pieces if p.tensor == j
                ):
                    seen[piece.at] += 1
            assert bool((seen == 1).all())


@pytest.mark.parametrize("name", PLACEMENTS)
def test_work_is_even(name: str) -> None:
    """No rank has more than its share and one matrix. Experts that stay where they are may."""
    placement, R, S = PLACEMENTS[name]
    params = [VIEWS[name] for name in ("matrix", "fused", "one row", "transposed", "kernel")] * 3
    every = plans(params, placement, R, S)
    (loads,) = {p.loads for p in every.values()}
    largest = max(m.flops for p in every.values() for n in p.rounds for m in n.mine)
    assert max(loads) <= sum(loads) / len(loads) + largest
    for (r, s), p in every.items():
        assert sum(m.flops for n in p.rounds for m in n.mine) == loads[r * S + s]


def test_experts_stay_with_their_ranks() -> None:
    placement, R, S = PLACEMENTS["fsdp"]
    for one in plans([VIEWS["experts"]], placement, R, S).values():
        assert not any(n.travels for n in one.rounds)
        assert (one.computed, one.elements_received()) == (2, (0, 0))


def test_rounds_are_bounded() -> None:
    placement, R, S = PLACEMENTS["fsdp"]
    for one in plans([VIEWS["matrix"]] * 16, placement, R, S, limit=80).values():
        assert [len(n.mine) for n in one.rounds] == [2, 2]


@pytest.mark.parametrize("name", PLACEMENTS)
def test_buckets_are_bounded(name: str) -> None:
    """A rank holds at most eight rounds of a bucket, two matrices for each replica, or a parameter.

    Every rank has a matrix to compute, also if the matrices are convolutions.
    """
    placement, R, S = PLACEMENTS[name]
    shapes = [(8, 6), (24, 12), (40, 12, 4), (16, 24, 3, 3)] * 40
    numbers = {shape: shape[0] if len(shape) == 3 else 1 for shape in shapes}
    found = buckets(R, [(shape, placement, numbers[shape]) for shape in shapes], 100)
    assert sorted(j for part in found for j in part) == list(range(len(shapes)))
    for part in found:
        largest = [math.prod(map(len, boxes(shapes[j], placement)[0])) for j in part]
        matrices = [math.prod(shapes[j]) // numbers[shapes[j]] for j in part]
        assert sum(largest) <= max(8 * 100, 2 * R * max(matrices)) or len(part) == 1
        assert part is found[-1] or sum(math.prod(shapes[j]) for j in part) >= R * S * matrices[0]


@pytest.mark.slow
def test_the_page_shows_the_predictions() -> None:
    page = (scaling.DOCS / "scaling.md").read_text(encoding="utf-8")
    for line in scaling.lines("moe-30b")[:6]:
        assert f"| {' | '.join(line)} |" in page
