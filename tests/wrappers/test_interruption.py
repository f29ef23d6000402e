"""A step that fails before the end of the base's step is undone, or finished as far as it came."""

from __future__ import annotations

import copy
import os
import signal
import sys
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Adafactor, AdamW, Optimizer
from torch.utils._python_dispatch import TorchDispatchMode

from sodaopt import GPA, SNOO, SODA, Lookahead, ScheduleFree, SODAWrapper, anchors, init, zoo

FP64 = anchors.Clone(torch.float64)
WRAPS: dict[str, Callable[[Optimizer, Any], Any]] = {
    "SODAWrapper": lambda base, seeds: SODAWrapper(base),
    "SODAWrapper in slices": lambda base, seeds: SODAWrapper(base, anchor=FP64),
    "SODAWrapper seeds": lambda base, seeds: SODAWrapper(base, anchor=seeds),
    "ScheduleFree": lambda base, seeds: ScheduleFree(base, weight_decay_at_y=0.1),
    "GPA": lambda base, seeds: GPA(base, lam=0.3),
    "Lookahead": lambda base, seeds: Lookahead(base, every=3),
    "SNOO": lambda base, seeds: SNOO(base, every=3),
}
BASES: dict[str, Callable[[list[Any]], Optimizer]] = {
    "AdamW foreach": lambda gs: AdamW(gs, lr=0.01, weight_decay=0, foreach=True),
    "AdamW loop": lambda gs: AdamW(gs, lr=0.01, weight_decay=0, foreach=False),
    "Adafactor (reads)": lambda gs: Adafactor(gs, lr=0.01, weight_decay=0, foreach=False),
    "SODA(lion)": lambda gs: SODA(gs, 0.01, zoo.lion()),
}
SOME = {
    "SODAWrapper seeds": ["AdamW foreach"],
    "SODAWrapper in slices": ["AdamW foreach"],
    "GPA": ["AdamW foreach", "Adafactor (reads)"],
    "Lookahead": ["AdamW foreach"],
    "SNOO": ["AdamW foreach", "SODA(lion)"],
}
BOTH = (torch.float32, 0), (torch.bfloat16, 2)
EVERY = (*BOTH, (torch.float32, 2), (torch.bfloat16, 0))
# Each wrapper has paths of its own for the first step, for 16 bits, and for each kind of base.
# These pairs are tested with both dtypes at both steps.
FULL = {("SODAWrapper", "AdamW foreach"), ("ScheduleFree", "AdamW foreach"),
        ("SODAWrapper", "Adafactor (reads)")}  # fmt: skip
CASES = [
    pytest.param(WRAPS[wrap], BASES[base], *how, id=f"{wrap}, {base}, {how[0]}, step {how[1] + 1}")
    for wrap in WRAPS
    for base in SOME.get(wrap, BASES)
    for how in (EVERY if (wrap, base) in FULL else BOTH)
]


class Fault(TorchDispatchMode):
    """Raises once, at operation number `at`, or never if that is 0."""

    def __init__(self, at: int = 0) -> None:
        super().__init__()
        self.at, self.n = at, 0
        self.error = (MemoryError if at % 2 else KeyboardInterrupt)("interrupted")

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.n += 1
        if self.n == self.at:
            raise self.error
        return func(*args, **(kwargs or {}))


class BaseStep:
    """The base's step, which notes at which operations it began and ended.

    swallows: end the step without an error if it is interrupted.
    """

    def __init__(self, base: Optimizer, fault: Fault, swallows: bool) -> None:
        self.inner, self.fault, self.swallows = base.step, fault, swallows
        self.first = self.last = 1 << 30
        base.step = self  # type: ignore[method-assign, assignment]

    def __call__(self) -> None:
        self.first = self.fault.n
        try:
            self.inner()
        except (MemoryError, KeyboardInterrupt):
            if not self.swallows:
                raise
        finally:
            self.last = self.fault.n


class Run:
    """A network of two groups after a few steps."""

    def __init__(self, wrap: Any, base: Any, dtype: torch.dtype, steps: int) -> None:
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(4, 3, bias=False), nn.Linear(3, 2, bias=False)).to(dtype)
        seeds = init.seeded_(net) if wrap is WRAPS["SODAWrapper seeds"] else None
        self.weights = list(net.parameters())
        self.opt = wrap(base([{"params": list(layer.parameters())} for layer in net]), seeds)
        for k in range(steps):
            self.feed(k)
            self.opt.step()
        self.feed(steps)

    def feed(self, k: int) -> None:
        rng = torch.Generator().manual_seed(k)
        for w in self.weights:
            w.grad = torch.randn(w.shape, generator=rng).to(w.dtype)

    def everything(self, completed: bool = True) -> dict[str, Any]:
        """The weights and the state.

        completed: if it is false, parameters that the base has no state of are left out, because
        the wrapper must not add to their state.
        """
        found = copy.deepcopy(self.opt.state_dict())
        if not completed:
            for n, s in list(found["state"].items()):
                if all(key.startswith(self.opt._prefix) for key in s):
                    del found["state"][n]
        return {"weights": [w.detach().clone() for w in self.weights], "state": found}

    def step(self, at: int, swallows: bool = False) -> tuple[BaseStep, bool]:
        """Step with a fault. Return the base's step, and whether the wrapper's raised."""
        fault = Fault(at)
        base = BaseStep(self.opt.base, fault, swallows)
        try:
            with fault:
                self.opt.step()
        except (MemoryError, KeyboardInterrupt):
            return base, True
        return base, False


def assert_same(a: Any, b: Any, tolerance: float = 0.0) -> None:
    if isinstance(a, Tensor):
        torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance, equal_nan=True)
    elif isinstance(a, dict):
        assert a.keys() == b.keys()
        for key in a:
            assert_same(a[key], b[key], tolerance)
    elif isinstance(a, list | tuple):
        for s, t in zip(a, b, strict=True):
            assert_same(s, t, tolerance)
    else:
        assert a == b


@pytest.mark.slow
@pytest.mark.parametrize(("wrap", "base", "dtype", "steps"), CASES)
def test_every_operation(wrap: Any, base: Any, dtype: torch.dtype, steps: int) -> None:
    """An error before the base's step changes nothing. A later one ends the base's step there."""
    new = partial(Run, wrap, base, dtype, steps)
    before = new().everything()
    whole, _ = new().step(0)
    assert whole.last - whole.first > 3
    # Drawing z0 from a seed takes hundreds of operations, which leave nothing to undo.
    stride = 10 if wrap is WRAPS["SODAWrapper seeds"] else 1
    for n in (*range(1, whole.first + 1, stride), *range(whole.first + 1, whole.last + 1)):
        run = new()
        _, raised = run.step(n)
        assert raised
        after = run.everything(completed=False)
        if n <= whole.first:
            assert_same(after["state"], before["state"])
            assert_same(after["weights"], before["weights"], 1e-6)
        else:
            reference = new()
            reference.step(n, swallows=True)
            assert_same(after, reference.everything(completed=False))
        if steps or n <= whole.first:  # torch's Adam cannot go on with half a state
            run.feed(steps + 1)
            run.opt.base.__dict__.pop("step")
            run.opt.step()
            assert all(w.isfinite().all() for w in run.weights)
    _, raised = new().step(whole.last + 1)
    assert raised, "an error while the wrapper finishes has to be raised"


@pytest.fixture
def heeds_ctrl_c() -> Iterator[None]:
    """A process in the background ignores Ctrl-C."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.skipif(sys.platform == "win32", reason="os.kill ends the process there")
@pytest.mark.usefixtures("heeds_ctrl_c")
@pytest.mark.parametrize("when", ["before", "after", "twice"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("wrap", ["SODAWrapper", "ScheduleFree"])
def test_ctrl_c_waits(wrap: str, dtype: torch.dtype, when: str) -> None:
    """It takes effect after the step, which is then complete. A second one does not wait."""
    run, calm = (Run(WRAPS[wrap], BASES["AdamW loop"], dtype, 2) for _ in range(2))
    inner, base = run.opt.base.step, run.opt.base

    def interrupted() -> None:
        if when == "before":
            os.kill(os.getpid(), signal.SIGINT)
        inner()
        for _ in range({"before": 0, "after": 1, "twice": 2}[when]):
            os.kill(os.getpid(), signal.SIGINT)
        if when == "twice":
            pytest.fail("the second signal did not end the step")

    base.step = interrupted
    calm.opt.step()
    handler = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        run.opt.step()
    assert signal.getsignal(signal.SIGINT) is handler
    assert_same(run.everything(), calm.everything())
