"""The rows of a comparison as plain records, for `--json`."""

from collections.abc import Sequence
from typing import Any

from ..comparison import Comparison, Pairs, comparisons
from ..records import Run
from ..variants import group_by_variant
from .text import ordered


def rows(runs: Sequence[Run], primary: Pairs = ()) -> dict[str, Any]:
    """Return the rows of the headline table with all digits."""
    found = ordered(comparisons(group_by_variant(runs), primary))
    return {"variants": [_row(line) for line in found]}


def _row(line: Comparison) -> dict[str, Any]:
    variant, gap = line.variant, line.difference
    return {
        "variant": variant.label, "job": variant.job, "status": variant.summary(),
        "losses": {str(seed): loss for seed, loss in variant.losses.items()},
        "mean": variant.mean, "sd": variant.spread, "n": variant.n, "diverged": variant.diverged,
        "baseline": line.base.label, "difference": gap.mean if gap else None,
        "low": gap.low if gap else None, "high": gap.high if gap else None,
        "primary": line.primary, "p": line.p,
    }  # fmt: skip
