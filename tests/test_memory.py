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

from sodaopt import GPA, SODA, SODAWrapper, memory, param_groups, zoo
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
    "wrapped shampoo": lambda net: SODAWrapper(
        SODA([p for p in net.parameters() if p.ndim == 2], 0.1, zoo.shampoo())
    ),
    "averaged SODA": lambda net: GPA(SODA(net.parameters(), 0.1, "soda(adam)")),
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
    # "auto" is predicted to keep a clone of the LayerNorm too
    gains = sum(p.nbytes for p in net[2].parameters())
    assert before.total() == pytest.approx(after.total(), rel=0.02, abs=gains)
    assert memory(ghost, make(ghost)).total() == pytest.approx(before.total(), rel=0.02)
    assert "x weights" in str(after)


Z0_BYTES = {  # of 408 weights, 32 of them in two constant vectors
    "clone": 1632, "fp32": 1632, "bf16": 816, "cpu": 1632, "auto": 1512, "constant or bf16": 756,
    "seed": 0, "file": 0,
}  # fmt: skip


@pytest.mark.parametrize("stepped", [False, True])
@pytest.mark.parametrize("name", ANCHORS)
def test_z0(name: str, stepped: bool, tmp_path: Path) -> None:
    net, seeds = model()
    opt = OPTIMIZERS["SODAWrapper"](net, ANCHORS[name](net, seeds, tmp_path))
    if stepped:
        train(net, opt, range(2))
    found = memory(net, opt)
    # A prediction reads no weights, so a constant one is predicted as its anchor keeps the others.
    predicted = {"auto": "clone", "constant or bf16": "bf16"}.get(name, name)
    assert found.state()["soda_z0"] == Z0_BYTES[name if stepped else predicted]
    assert str(found).endswith("counted" if stepped else "predicted on the meta device")


def test_a_tensor_of_parts_has_their_bytes() -> None:
    """A nested tensor has values and offsets, as a quantised one has codes and scales."""
    parts = [torch.zeros(3, 5), torch.zeros(2, 5)]
    whole = torch.nested.nested_tensor(parts, layout=torch.jagged)
    assert _bytes(whole) == 4 * 25 + whole.offsets().nbytes
