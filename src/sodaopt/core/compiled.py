"""A step as one operator of torch, which torch.compile calls and does not look into.

Traced, a step would freeze k, which the host reads, and the addresses in the kernels' tables.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING
from weakref import WeakValueDictionary

import torch
from torch import Tensor

if TYPE_CHECKING:
    from sodaopt.core.optimizer import SODA

KNOWN: WeakValueDictionary[int, SODA] = WeakValueDictionary()
"""All optimizers by their id, because an operator takes tensors and numbers only."""


@torch.library.custom_op(
    "sodaopt::step",
    mutates_args=("params",),
    schema="(Tensor(a!)[] params, Tensor?[] grads, int optimizer) -> ()",
    tags=(torch.Tag.cudagraph_unsafe,),  # a graph would repeat the k of one step
)
def step(params: Sequence[Tensor], grads: Sequence[Tensor | None], optimizer: int) -> None:
    """Step these tensors as the optimizer's parameters.

    params, grads: of all parameters. torch.compile may pass copies, and computes gradients that the
    parameters do not have yet.
    """
    opt = KNOWN[optimizer]
    own = [p for group in opt.param_groups for p in group["params"]]
    before = [(p.data, p.grad) for p in own]
    try:
        _hold(own, params, grads)
        opt._step_now()
    finally:
        _hold(own, *zip(*before, strict=True))


def _hold(own: list[Tensor], values: Sequence[Tensor], grads: Sequence[Tensor | None]) -> None:
    """Let the parameters hold these values and gradients."""
    for p, x, g in zip(own, values, grads, strict=True):
        p.data, p.grad = x, g


step.register_fake(lambda params, grads, optimizer: None)
