"""The order of the stages of all rounds.

Each round is one stage behind the one before it. So on a GPU one round is computed while the next
one travels to its owners, and the results of the previous one travel back. Large rounds do not
overlap, because they need much memory, and their products take longer than the exchange.

If a round has fewer matrices than there are ranks, some replicas may have no work in it. They
compute the next rounds before this one is spread. Until then, each replica holds only its own
results.
"""

from collections import Counter
from collections.abc import Iterator, Sequence

from sodaopt.parallel.layout import Round


def ordered(rounds: Sequence[Round]) -> Iterator[tuple[str, int]]:
    """Yield the stages of all rounds in their order, as (stage, index of the round)."""
    yield from _one_by_one(rounds, [j for j, round_ in enumerate(rounds) if round_.is_large])
    yield from _overlapping(rounds, [j for j, round_ in enumerate(rounds) if not round_.is_large])


def _one_by_one(rounds: Sequence[Round], indices: list[int]) -> Iterator[tuple[str, int]]:
    """Send and compute one round after the other.

    Before a round that would need too much memory, finish the oldest computed rounds.
    """
    computed, largest = list[int](), max((rounds[j].largest for j in indices), default=0)
    for j in [*indices, None]:
        for old in _oldest(rounds, computed, j, largest):
            yield "spread", old
            yield "finish", old
        if j is not None:
            yield "send", j
            yield "compute", j
            computed.append(j)


def _overlapping(rounds: Sequence[Round], indices: list[int]) -> Iterator[tuple[str, int]]:
    """Send each round before the previous one is computed, and finish earlier ones after it."""
    computed, spread = list[int](), list[int]()
    largest = max((rounds[j].largest for j in indices), default=0)
    for sent, j in zip([*indices, None, None], [None, *indices, None], strict=True):
        if sent is not None:
            yield "send", sent
        if j is not None:
            yield "compute", j
        for old in _oldest(rounds, computed, j, largest):
            yield from (("finish", n) for n in spread)
            yield "spread", old
            spread = [old]
        if j is None or rounds[j].grid.R == 1:  # without replicas, `spread` sends nothing
            yield from (("finish", n) for n in spread)
            spread = []
        if j is not None:
            computed.append(j)


def _oldest(
    rounds: Sequence[Round], computed: list[int], j: int | None, largest: int
) -> Iterator[int]:
    """Remove and yield the oldest computed rounds, until the others leave memory for round j.

    j: the round that is computed now or next. None: there is none, and all rounds are removed.
    largest: the elements of the largest matrix. The rounds need at most twice this memory.
    """
    while computed and (j is None or _needed(rounds, computed, j, largest) > 2 * largest):
        yield computed.pop(0)


def _needed(rounds: Sequence[Round], computed: list[int], j: int, largest: int) -> float:
    """The most elements that a rank needs for round j and for the results of computed rounds.

    The shards of a replica hold the results that this replica has computed. Besides them, a rank
    needs twice its matrices of round j. Later the results of one round arrive from other replicas.
    """
    S, held, own = rounds[j].grid.S, _results(rounds, computed), _results(rounds, [j])
    needed = [
        held[owner // S] / S + max(2 * size, own[owner // S] / S + largest)
        for owner, size in rounds[j].owned.items()
    ]
    return max(needed, default=0.0)


def _results(rounds: Sequence[Round], indices: list[int]) -> Counter[int]:
    """The elements of the results of these rounds in each replica."""
    found = Counter[int]()
    for j in indices:
        for owner, size in rounds[j].owned.items():
            found[owner // rounds[j].grid.S] += size
    return found
