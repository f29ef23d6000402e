"""The memory report: predicted before the first step, counted after it."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import AdamW

from sodaopt import SODA, SODAWrapper, memory, param_groups, zoo
from sodaopt.anchors.init import seeded_
from sodaopt.memory import _bytes
from tests.anchors.test_anchors import ANCHORS, OPTIMIZERS, dtypes, model, train

REPORTED: dict[str, Callable[[nn.Module], Any]] = {
    "AdamW": lambda net: AdamW(net.parameters()),
    "wrapped": lambda net: SODAWrapper(AdamW(net.parameters(), weight_decay=0)),
    "wrapped, auto": lambda net: SODAWrapper(
        AdamW(net.parameters(), weight_decay=0), anchor="auto"
    ),
    "wrapped, bf16": lambda net: SODAWrapper(
        AdamW(net.parameters(), weight_decay=0), anchor="bf16"
    ),
    "wrapped, cpu": lambda net: SODAWrapper(AdamW(net.parameters(), weight_decay=0), anchor="cpu"),
    "wrapped, seed": lambda net: SODAWrapper(
        AdamW(net.parameters(), weight_decay=0), anchor=seeded_(net)
    ),
    "wrapped SODA": lambda net: SODAWrapper(SODA(net.parameters(), 0.1, zoo.adam())),
    "soda_dagger": lambda net: SODA(param_groups(net, "soda_dagger"), 0.1),
    "soda_dagger, auto": lambda net: SODA(param_groups(net, "soda_dagger"), 0.1, anchor="auto"),
    "soda_dagger, bf16": lambda net: SODA(param_groups(net, "soda_dagger"), 0.1, anchor="bf16"),
}


@pytest.mark.parametrize("make", REPORTED.values(), ids=REPORTED)
@dtypes
def test_predicted_is_measured(make: Any, dtype: torch.dtype) -> None:
    with torch.device("meta"):
        ghost = nn.Sequential(nn.Embedding(13, 8), nn.Linear(8, 16), nn.LayerNorm(16),
                              nn.Linear(16, 13)).to(dtype)  # fmt: skip
    net = copy.deepcopy(ghost).to_empty(device="cpu")
    seeded_(net)
    opt = make(net)
    before = memory(net, opt)
    train(net, opt, range(1))
    after = memory(net, opt)
    assert before.predicted
    assert not after.predicted
    assert before.total() == pytest.approx(after.total(), rel=0.02)
    # without values, "auto" is predicted to keep a clone of the LayerNorm too
    gains = sum(p.nbytes for p in net[2].parameters())
    ghosts = memory(ghost, make(ghost)).total()
    assert ghosts == pytest.approx(after.total(), rel=0.02, abs=gains)
    assert "x weights" in str(after)


NOTES: dict[str, tuple[str, str]] = {
    "clone": ("clone", "z0: Clone keeps 1.63 kB; a clone 1.63 kB, bf16 816 B, cpu, file and seed"),
    "auto": ("auto", "z0: Constant keeps 1.51 kB; a clone 1.63 kB, bf16 816 B, cpu, file and seed"),
    "bf16": ("bf16", "the weights are rounded to bf16 once, at the first step"),
    "constant or bf16": ("constant or bf16", "the weights are rounded to bf16 once"),
    "cpu": ("cpu", "z0: Host keeps 1.63 kB on the host"),
    "file": ("file", "z0: FromFile keeps nothing"),
    "seed": ("seed", "z0: Seeds keeps nothing"),
}


@pytest.mark.parametrize("stepped", [False, True])
@pytest.mark.parametrize(("name", "words"), NOTES.values(), ids=NOTES)
def test_the_report_says(name: str, words: str, stepped: bool, tmp_path: Path) -> None:
    """The report names the anchor's bytes, and those of the other anchors."""
    net, seeds = model()
    opt = OPTIMIZERS["SODAWrapper"](net, ANCHORS[name](net, seeds, tmp_path))
    if stepped:
        train(net, opt, range(2))
    assert words in str(memory(net, opt))


def test_a_tensor_of_parts_has_their_bytes() -> None:
    """A nested tensor has values and offsets, as a quantised one has codes and scales."""
    parts = [torch.zeros(3, 5), torch.zeros(2, 5)]
    whole = torch.nested.nested_tensor(parts, layout=torch.jagged)
    assert _bytes(whole) == 4 * 25 + whole.offsets().nbytes
