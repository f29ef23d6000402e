"""The cases of tests/fixtures/v0_1, shared by the script that wrote them and by the test.

Only public names of sodaopt appear here, so that the table survives changes inside the package.
The settings of a case must not change: the recorded state dicts belong to them.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

import sodaopt
from sodaopt import SODA, SODAWrapper, zoo

FOLDER = Path(__file__).parents[1] / "fixtures" / "v0_1"
ANCHOR_FILE = FOLDER / "z0.safetensors"
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
LR = 0.1
Weights = dict[str, Tensor]

ROWS = (
    "sgd", "nesterov", "adam", "adamw", "nadam", "torch_nadam", "simplified_ademamix", "signsgd",
    "signum", "lion", "ssd", "muon", "shampoo", "multinorm", "scion", "uscion", "soda_dagger",
    "frank_wolfe", "dual_averaging", "double_averaging", "oda", "moda", "accelerated",
    "schedule_free", "gpa",
)  # fmt: skip
SODA_ROWS = (
    "sgd", "nesterov", "adam", "nadam", "torch_nadam", "simplified_ademamix", "signsgd", "signum",
    "lion", "ssd", "muon", "shampoo", "multinorm", "uscion",
)  # fmt: skip
"""Rows without decay or averaging, which zoo.soda accepts."""
MATRIX_ROWS = ("ssd", "muon", "shampoo", "multinorm", "scion", "uscion", "soda_dagger")
"""Rows whose geometry accepts matrices only."""


@dataclass(frozen=True)
class Case:
    """An optimizer and the model that it steps.

    build: makes the optimizer. It may fill the model first.
    matrix_only: the model has no vector.
    """

    build: Callable[[nn.Module], Optimizer]
    matrix_only: bool = False

    def model(self, dtype: torch.dtype) -> nn.Module:
        """Return a 4 x 3 matrix and a vector of six ones, as modules that seeded_ can fill."""
        matrix = nn.Linear(3, 4, bias=False, dtype=dtype)
        if self.matrix_only:
            return nn.Sequential(matrix)
        return nn.Sequential(matrix, nn.LayerNorm(6, bias=False, dtype=dtype))


def step(model: nn.Module, opt: Optimizer, grads: Weights) -> None:
    """Take one step with the given gradients."""
    for name, p in model.named_parameters():
        p.grad = grads[name].clone()
    opt.step()


def weights(model: nn.Module) -> Weights:
    """Return a copy of the parameters by name."""
    return {name: p.detach().clone() for name, p in model.named_parameters()}


# -- optimizers -----------------------------------------------------------------------------------


def _row(name: str) -> Case:
    def build(model: nn.Module) -> Optimizer:
        return SODA(model.parameters(), LR, getattr(zoo, name)())

    return Case(build, name in MATRIX_ROWS)


def _soda_row(name: str) -> Case:
    def build(model: nn.Module) -> Optimizer:
        return SODA(model.parameters(), LR, zoo.soda(getattr(zoo, name)()))

    return Case(build, name in MATRIX_ROWS)


def _adamw(model: nn.Module) -> Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=0)


def _anchored(anchor: Callable[[nn.Module], Any], wrapper: bool) -> Case:
    def build(model: nn.Module) -> Optimizer:
        chosen = anchor(model)
        if wrapper:
            return SODAWrapper(_adamw(model), anchor=chosen)
        return SODA(model.parameters(), LR, zoo.soda(zoo.adam()), anchor=chosen)

    return Case(build)


ANCHORS: dict[str, Callable[[nn.Module], Any]] = {
    "clone": lambda model: "clone",
    "bf16": lambda model: "bf16",
    "cpu": lambda model: "cpu",
    "constant": lambda model: "auto",
    "auto": lambda model: "auto",
    "seeds": lambda model: sodaopt.init.seeded_(model, seed=3),
    "file": lambda model: sodaopt.anchors.FromFile(ANCHOR_FILE, model),
}

CASES: dict[str, dict[str, Case]] = {
    "rows": {name: _row(name) for name in ROWS}
    | {f"soda({name})": _soda_row(name) for name in SODA_ROWS},
    "wrappers": {
        "SODAWrapper(AdamW)": Case(lambda model: SODAWrapper(_adamw(model))),
        "SODAWrapper(SGD)": Case(
            lambda model: SODAWrapper(torch.optim.SGD(model.parameters(), lr=LR, momentum=0.9))
        ),
        "SODAWrapper(muon)": Case(
            lambda model: SODAWrapper(SODA(model.parameters(), LR, zoo.muon())), matrix_only=True
        ),
        "ScheduleFree(AdamW)": Case(lambda model: sodaopt.ScheduleFree(_adamw(model))),
        "GPA(AdamW)": Case(lambda model: sodaopt.GPA(_adamw(model))),
        # Outer steps after steps 2 and 4, so that one precedes the state dict and one follows it.
        "Lookahead(AdamW)": Case(lambda model: sodaopt.Lookahead(_adamw(model), every=2)),
        "SNOO(AdamW)": Case(lambda model: sodaopt.SNOO(_adamw(model), every=2)),
    },
    "anchors": {f"SODAWrapper, {name}": _anchored(a, True) for name, a in ANCHORS.items()}
    | {f"SODA, {name}": _anchored(a, False) for name, a in ANCHORS.items()},
}
"""The files, by name without suffix, and the cases in each."""

PICKLES = {
    "SODA.pickle.pt": CASES["rows"]["soda(adam)"],
    "SODAWrapper.pickle.pt": CASES["wrappers"]["SODAWrapper(AdamW)"],
}
"""Optimizers that were saved whole, after three steps in fp32."""

# -- the lab --------------------------------------------------------------------------------------

LAB_JOB: dict[str, Any] = {
    "preset": "nano", "optimizer": "soda(muon)", "steps": 12, "width": 16, "depth": 1,
    "head_dim": 16, "context": 32, "batch": 2, "eval_every": 4, "eval_tokens": 256,
}  # fmt: skip
"""The settings of the recorded runs."""
LAB_EXECUTION: dict[str, Any] = {"device": "cpu", "log_every": 1}


def lab_command() -> list[str]:
    """Return the arguments of `sodaopt` that start, continue or find the recorded run."""
    settings = LAB_JOB | LAB_EXECUTION
    return [
        "train",
        *(a for k, v in settings.items() for a in (f"--{k.replace('_', '-')}", f"{v}")),
    ]
