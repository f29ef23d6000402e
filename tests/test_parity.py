"""Every row equals an independent implementation of it."""

from importlib.metadata import PackageNotFoundError

import pytest

from tests.parity import STEPS, Network, compare, in_float64, mode, set_lr
from tests.theirs import RECURRENCES, THEIRS, Theirs

ENTRIES = (*THEIRS, *RECURRENCES.values())
each = pytest.mark.parametrize("entry", ENTRIES, ids=lambda e: f"{e.row}-{e.label}")


def installed(entry: Theirs) -> None:
    try:
        entry.source  # noqa: B018
    except PackageNotFoundError:
        pytest.skip(f"{entry.package} is not installed")


@each
def test_equal(entry: Theirs) -> None:
    installed(entry)
    assert compare(entry) <= entry.tol


@each
def test_theirs_trains(entry: Theirs) -> None:
    """Two copies of a reference that stands still or blows up would agree and prove nothing."""
    installed(entry)
    net = Network()
    start, ref = net.loss().item(), entry.make(net.weights, entry.lr)
    mode(ref, "train")
    for k in range(STEPS):
        if entry.schedule and not entry.own_schedule:
            set_lr(ref, entry.lr * entry.schedule(k))
        net.backward()
        with in_float64():
            ref.step()
    assert net.loss().item() < 0.9 * start


def test_every_row_is_here() -> None:
    from sodaopt.zoo import ROWS

    assert set(ROWS) <= {entry.row for entry in ENTRIES}
