"""The rounds on the host: every entry of every matrix travels once, and ranks have even work."""

import math
from collections import Counter
from itertools import product
from typing import Any

import pytest
import torch

from sodaopt.geometry.views import Frame, conv, grouped, heads, matrix, split, transposed, whole
from sodaopt.lab.cluster import elements_received, elements_under_way
from sodaopt.parallel import layout
from sodaopt.parallel.deal import deal
from sodaopt.parallel.layout import Grid, Param, Placement, boxes
from sodaopt.parallel.order import ordered
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


def rounds(params: list, placement: Placement, R: int, S: int, limit: int = 40) -> dict:
    """The rounds of each rank. A vector is not cut by a second dimension."""

    def fitted(shape: tuple[int, ...]) -> Placement:
        cuts = tuple(c if c is None or c < len(shape) else 0 for c in placement.cuts)
        return placement._replace(cuts=cuts)

    entries = tuple(Param(0, s, fitted(s), ((s, view(s)),)) for view, s in params)
    ranks = product(range(R), range(S))
    return {(r, s): deal(Grid(R, S, r, s), entries, limit) for r, s in ranks}


def totals(every: dict, S: int) -> list[int]:
    """The work of each rank. All ranks have the same rounds."""
    first, *others = [[round_.work for round_ in of] for of in every.values()]
    assert all(work == first for work in others)
    work = sum(first, Counter())
    return [work[r * S + s] for r, s in every]


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
    every = rounds(MIXED, placement, R, S)
    for number in range(len(every[0, 0])):
        for (r, s), t in product(every, range(S)):
            sent = [p.size for p in every[r, s][number].held[r] if p.shard == t]
            expected = [p.size for p in every[r, t][number].made_of if p.shard == s]
            assert sent == expected
    for (_, s), of in every.items():
        seen = {}
        for round_ in of:
            for n, j in enumerate(round_.params):
                seen[j] = torch.zeros([len(axis) for axis in boxes(MIXED[j][1], placement)[s]])
                assert seen[j].shape == round_.shapes[n]
            for piece in (p for row in round_.held for p in row):
                seen[round_.params[piece.tensor]][piece.at] += 1
        assert sorted(seen) == list(range(len(MIXED)))
        assert all(bool((t == 1).all()) for t in seen.values())


@pytest.mark.parametrize("limit", [1, 40, 1000])
@pytest.mark.parametrize("name", PLACEMENTS)
def test_work_is_even(name: str, limit: int) -> None:
    """No rank has more than its share and one matrix, also of stacks that divide unevenly."""
    placement, R, S = PLACEMENTS[name]
    params = [(matrix, (9, 6, 5)), (matrix, (10, 5, 4)), *MIXED, *MIXED, VIEWS["one row"]]
    every = rounds(params, placement, R, S, limit)
    work = totals(every, S)
    largest = max(flops(shape, view) for view, shape in params)
    assert max(work) <= sum(work) / len(work) + largest
    for of, expected in zip(every.values(), work, strict=True):
        mine = [round_.frames[n] for round_ in of for n, _ in round_.mine]
        assert sum(layout._flops(f.o, f.i * f.taps) for f in mine) == expected


def flops(shape: tuple[int, ...], view: Any) -> int:
    f = view(shape)
    return layout._flops(f.o, f.i * f.taps)


def test_experts_stay_with_their_ranks() -> None:
    placement, R, S = PLACEMENTS["fsdp"]
    for (round_,) in rounds([VIEWS["experts"]], placement, R, S).values():
        assert not round_.travels
        assert (len(round_.mine), elements_received(round_)) == (2, (0, 0))


def test_experts_beyond_the_mean_work_travel() -> None:
    """Nine experts on four ranks are 3 + 3 + 3 + 0. The last rank gets two of them."""
    placement, R, S = PLACEMENTS["fsdp"]
    every = rounds([(matrix, (9, 3, 2))], placement, R, S)
    assert sorted(len(round_.mine) for (round_,) in every.values()) == [2, 2, 2, 3]
    assert [elements_received(round_)[0] // 6 for (round_,) in every.values()].count(2) == 1


def test_parameters_with_and_without_matrices_are_in_different_rounds() -> None:
    """The results of a round belong to all of its parameters, or there are none."""
    whole_ = Placement((), (), ())
    both = (Param(0, (6, 4), whole_, (((6, 4), matrix((6, 4))),)), Param(0, (5, 4), whole_, ()))
    assert [round_.params for round_ in deal(Grid(2, 1, 0, 0), both, 1 << 20)] == [[0], [1]]


def test_other_matrices_fill_the_gaps_that_experts_leave() -> None:
    """Ten experts on four ranks are 3 + 3 + 3 + 1."""
    placement, R, S = PLACEMENTS["fsdp"]
    params = [(matrix, (4, 4)), (matrix, (10, 4, 4)), (matrix, (4, 4))]
    assert totals(rounds(params, placement, R, S), S) == [3 * 192] * 4


@pytest.mark.parametrize("limit", [1, 100, 3000])
@pytest.mark.parametrize("name", PLACEMENTS)
def test_rounds_are_bounded(name: str, limit: int) -> None:
    """A rank neither holds nor computes more than the limit, one matrix or one parameter.

    Uneven shards of large matrices are an exception, so that each of the S ranks has a matrix.
    """
    placement, R, S = PLACEMENTS[name]
    shapes = [(8, 6), (24, 12), (40, 12, 4), (16, 24, 3, 3)] * 40
    params = [(conv if len(shape) == 4 else matrix, shape) for shape in shapes]
    for of in rounds(params, placement, R, S, limit).values():
        assert sorted(j for round_ in of for j in round_.params) == list(range(len(shapes)))
        for round_ in of:
            uneven = 0 if all(shapes[j][0] % S == 0 for j in round_.params) else 2 * round_.largest
            assert round_.size <= max(limit, round_.largest, uneven) or len(round_.params) == 1
            assert sum(math.prod(shape) for _, shape in round_.mine) <= round_.size
            assert sum(round_.parts) <= round_.size


@pytest.mark.parametrize("limit", [24, 48, 400])
@pytest.mark.parametrize("name", PLACEMENTS)
def test_memory_depends_neither_on_the_number_of_parameters_nor_on_replicas(
    name: str, limit: int
) -> None:
    """Eight rounds, or two matrices if they are larger than a round."""
    placement, R, S = PLACEMENTS[name]
    for number in (200, 400):
        for of in rounds([(matrix, (8, 6))] * number, placement, R, S, limit).values():
            assert elements_under_way(of) <= max(8 * limit, 2 * 48) * 1.05
    if S == 1:
        for replicas in (2, 8, 64):
            grid = Grid(replicas, 1, 0, 0)
            whole_ = Placement((replicas,), (None,), (0,))
            many = tuple([Param(0, (8, 6), whole_, (((8, 6), matrix((8, 6))),))] * 256)
            needed = elements_under_way(deal(grid, many, limit))
            assert needed <= max(8 * limit, 2 * 48)


@pytest.mark.parametrize("R", [1, 2, 8])
@pytest.mark.parametrize("limit", [16, 48, 100])
def test_every_replica_computes_before_results_are_spread(R: int, limit: int) -> None:
    """When the first results are spread, each of the replicas has computed a matrix."""
    placement = Placement((R, 2), (None, 0), (0, 1))
    entry = Param(0, (8, 6), placement, (((8, 6), matrix((8, 6))),))
    of = deal(Grid(R, 2, 0, 0), (entry,) * 64, limit)
    order = list(ordered(of))
    before = order[: next(n for n, (stage, _) in enumerate(order) if stage == "spread")]
    owners = {rank // 2 for stage, j in before if stage == "compute" for rank in of[j].work}
    assert owners == set(range(R))
    assert sorted(order) == sorted(product(("send", "compute", "spread", "finish"), range(len(of))))


@pytest.mark.slow
def test_the_page_shows_the_predictions() -> None:
    page = (scaling.DOCS / "scaling.md").read_text(encoding="utf-8")
    for line in scaling.lines("moe-30b")[:6]:
        assert f"| {' | '.join(line)} |" in page
