"""Anchors that keep z0 in the optimizer's state, or as one number."""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from sodaopt._errors import check_shape
from sodaopt.anchors.pull import Source
from sodaopt.backends import PLAIN
from sodaopt.parallel import sharded


class Anchor:
    """Where z0 lives. An optimizer keeps one tensor for each parameter in its state.

        parameter --capture--> state --saved--> checkpoint --restore--> state
        state --source--> z0, at each step

    A subclass defines `capture`. It also defines

        source    if z0 is not the captured tensor
        saved     if the captured tensor does not have the parameter's shape
        restore   if the tensor in a checkpoint does not have the parameter's shape, or if
                  `capture` cannot make the state from it
        writable  as False if z0 is not in the state: `capture` then returns an empty tensor, and
                  z0 is found by the parameter, as in `Elsewhere`

    If `saved` returns z0 in the parameter's shape, the anchors read each other's checkpoints. An
    anchor is copied and pickled with its optimizer. `capture` also gets DTensors, and meta tensors
    when memory is predicted. For a DTensor, `source` returns this rank's shard of z0.

    writable: z0 is in the state. The wrapper's at_start="reanchor" can then capture it again later.

    >>> anchors.Clone().writable
    True
    """

    writable = True

    def capture(self, p: Tensor, first: bool) -> Tensor:
        """Return the tensor to keep in the state if z0 is the present value of p.

        first: the first step with this z0 begins. Before that, weights may still be loaded, so
        nothing is checked or changed.
        """
        raise NotImplementedError

    def source(self, p: Tensor, kept: Tensor) -> Source:
        """Return z0 of this rank's shard of p.

        kept: the tensor that `capture` returned.
        """
        return kept if type(kept) in PLAIN else sharded.local(kept)

    def restore(self, kept: Tensor, p: Tensor) -> Tensor:
        """Return the tensor to keep in the state, from the one in a checkpoint.

        The default captures the checkpoint's tensor, which must have the shape of p, or be empty if
        the anchor is not writable.

        kept: the tensor that `saved` returned, or the one of another anchor.
        """
        if p.numel() and bool(kept.numel()) != self.writable:
            found, keeps = ("no", "keeps it") if self.writable else ("a", "does not keep it")
            raise ValueError(
                f"the state to load has {found} z0, and {type(self).__name__} {keeps} in the "
                "state: load it with the anchor that wrote it"
            )
        if self.writable:
            check_shape("z0", kept.shape, p.shape)
            kept = sharded.place(kept, p)
        return self.capture(kept.detach().to(p.device), False)

    def saved(self, kept: Tensor, p: Tensor) -> Tensor:
        """Return the tensor to store in a checkpoint.

        Its shape must not depend on the weights: a distributed checkpoint is loaded into the state
        of an optimizer whose weights differ.
        """
        return kept


@dataclass(frozen=True)
class Clone(Anchor):
    """A copy of the weights.

    dtype: the dtype of the copy. None is the parameter's. If it has fewer bits, the weights are
    rounded to it once, at the first step, so that z0 is exact.

    >>> opt = SODA(model.parameters(), lr=1e-3, method="soda(adam)", anchor=anchors.Clone())
    """

    dtype: torch.dtype | None = None

    def capture(self, p: Tensor, first: bool) -> Tensor:
        z0 = p.detach().to(self.dtype or p.dtype, copy=True)
        if first and z0.dtype != p.dtype:
            p.detach().copy_(z0)
        return z0


@dataclass(frozen=True)
class Rounded(Clone):
    """A bf16 copy of weights that are rounded to bf16 first: half the memory, and exact.

    dtype: as in `Clone`.

    >>> opt = SODA(model.parameters(), lr=1e-3, method="soda(adam)", anchor="bf16")
    """

    dtype: torch.dtype | None = torch.bfloat16


@dataclass(frozen=True)
class Host(Anchor):
    """A copy in the host's pinned memory. A pull copies it to the device a slice at a time.

    >>> opt = SODA(model.parameters(), lr=1e-3, method="soda(adam)", anchor="cpu")
    """

    def capture(self, p: Tensor, first: bool) -> Tensor:
        z0 = p.detach().to("meta" if p.is_meta else "cpu", copy=True)
        if p.is_cuda:  # the device copies pinned memory without the host
            sharded.refill(z0, sharded.local(z0).pin_memory())
        return z0


@dataclass(frozen=True)
class Constant(Anchor):
    """One number on the host if all elements are equal, else the anchor `other`.

    other: the anchor of weights that are not all equal. It stores z0, as `Clone` does.

    >>> anchors.anchor("auto") == anchors.Constant(anchors.Clone())
    True
    """

    other: Anchor = field(default_factory=Clone)

    def __post_init__(self) -> None:
        if not self.other.writable:
            name = type(self.other).__name__
            raise ValueError(f"{name} stores no z0 in the state: use {name} without Constant")

    def capture(self, p: Tensor, first: bool) -> Tensor:
        kept = self.other.capture(p, first)  # the number has the dtype of the tensor it replaces
        number = constant_of(kept)
        return kept if number is None else number

    def source(self, p: Tensor, kept: Tensor) -> Source:
        return self.other.source(p, kept) if kept.dim() == p.dim() else float(kept)

    def saved(self, kept: Tensor, p: Tensor) -> Tensor:
        if kept.dim() == p.dim():
            return self.other.saved(kept, p)
        return torch.full_like(p, float(kept), dtype=kept.dtype)


def constant_of(p: Tensor) -> Tensor | None:
    """Return the one value of all elements of this rank's shard of p, or None if they differ.

    A p of one element gives None too, because a number would not save memory. The values of a meta
    tensor are unknown, and count as different. The result may differ between ranks, because each
    rank needs its own shard only.

    p: a parameter, or a tensor of that kind.

    >>> anchors.constant_of(torch.zeros(3)), anchors.constant_of(torch.arange(3))
    (tensor(0.), None)
    """
    shard = sharded.local(p.detach()).reshape(-1)
    if p.numel() <= 1 or p.is_meta or not len(shard) or (shard != shard[0]).any():
        return None
    return shard[0].to("cpu", copy=True)
