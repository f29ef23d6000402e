"""A step as one operator of torch, which torch.compile calls and does not trace.

A traced step would freeze the addresses in the kernels' tables. The compiled function passes
everything to the operator that it may change before the step: parameters, gradients and learning
rates. The operator needs `capturable=True`, because otherwise the host reads k and lr.
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
"""All living optimizers by their id, because an operator takes tensors and numbers only."""


@torch.library.custom_op(
    "sodaopt::step",
    mutates_args=("params",),
    schema="(Tensor(a!)[] params, Tensor?[] grads, Tensor[] lrs, int optimizer) -> ()",
    tags=(torch.Tag.cudagraph_unsafe,),  # the host fills the kernels' tables
)
def step(
    params: Sequence[Tensor], grads: Sequence[Tensor | None], lrs: Sequence[Tensor], optimizer: int
) -> None:
    """Step these tensors instead of the optimizer's own.

    params, grads: the values and gradients of all parameters, in the order of the groups.
    torch.compile may pass copies, or a gradient that is not in p.grad yet.
    lrs: the learning rate of each group.
    optimizer: its key in KNOWN.
    """
    opt = KNOWN[optimizer]
    groups = opt.param_groups
    own = [p for group in groups for p in group["params"]]
    before = [p.data for p in own], [p.grad for p in own], [group["lr"] for group in groups]
    try:
        _assign(opt, own, params, grads, lrs)
        opt._step_now()
    finally:
        _assign(opt, own, *before)


def _assign(
    opt: SODA,
    own: list[Tensor],
    values: Sequence[Tensor],
    grads: Sequence[Tensor | None],
    lrs: Sequence[Tensor],
) -> None:
    for p, x, g in zip(own, values, grads, strict=True):
        p.data, p.grad = x, g
    for group, lr in zip(opt.param_groups, lrs, strict=True):
        group["lr"] = lr


step.register_fake(lambda params, grads, lrs, optimizer: None)
