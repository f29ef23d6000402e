"""A step as one operator of torch, which torch.compile calls and does not look into.

A traced step would freeze k, because the host reads it. It would also freeze the addresses in the
kernels' tables.
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

    params, grads: the values and gradients of all parameters, in the order of the groups.
    torch.compile may pass copies. A gradient may not be in p.grad yet.
    """
    opt = KNOWN[optimizer]
    own = [p for group in opt.param_groups for p in group["params"]]
    before = [(p.data, p.grad) for p in own]
    try:
        _assign(own, params, grads)
        opt._step_now()
    finally:
        _assign(own, *zip(*before, strict=True))


def _assign(own: list[Tensor], values: Sequence[Tensor], grads: Sequence[Tensor | None]) -> None:
    """Set the data and the gradient of each parameter."""
    for p, x, g in zip(own, values, grads, strict=True):
        p.data, p.grad = x, g


step.register_fake(lambda params, grads, optimizer: None)
