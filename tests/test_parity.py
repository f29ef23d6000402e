"""Every row equals an independent implementation of it."""

import pytest
from _pytest.mark import ParameterSet

from tests.support.theirs import RECURRENCES, THEIRS, Theirs
from tools.parity import STEPS, Network, compare, in_float64, mode, set_lr

ENTRIES = (*THEIRS, *RECURRENCES.values())


def one(entry: Theirs) -> ParameterSet:
    missing = pytest.mark.skipif(not entry.installed, reason=f"{entry.package} is not installed")
    name = f"{entry.row}: {entry.label}" + (f", {entry.note}" if entry.note else "")
    return pytest.param(entry, marks=missing, id=name)


each = pytest.mark.parametrize("entry", [one(entry) for entry in ENTRIES])


@pytest.mark.slow
@each
def test_equal(entry: Theirs) -> None:
    assert compare(entry) <= entry.tol


@each
def test_theirs_trains(entry: Theirs) -> None:
    """Two copies of a reference that stands still or blows up would agree and prove nothing."""
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


def test_every_published_row_is_here() -> None:
    """A row with a published name must equal that publication, not only the slow reference."""
    from sodaopt.zoo import ROWS
    from tests.zoo.test_zoo import PROMISED

    assert set(PROMISED) <= {entry.row for entry in ENTRIES}
    assert set(ROWS) >= set(PROMISED)
