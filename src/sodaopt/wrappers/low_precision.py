"""The fp32 step of 16-bit parameters under a wrapper.

During the base optimizer's step, fp32 copies replace the 16-bit parameters in its groups and state.
Neither its update nor its moments are rounded: the only rounding is the one into the parameter.

The parameters themselves cannot hold fp32 memory during a step. If the dtype of a parameter
changes, autograd makes a new node for its gradient, and the hooks of DDP stay on the old one.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from sodaopt.backends import not_compiled
from sodaopt.core.optimizer import SODA
from sodaopt.parallel import sharded
from sodaopt.rounding import HALVES

BLOCK = 1 << 26
"""The most elements of fp32 copies in one allocation. On a GPU an allocation takes longer than a
view. A single block for all parameters might not fit into free memory."""


class Fp32Step:
    """Lets a base optimizer step fp32 copies of its 16-bit parameters.

    wrapper: the wrapper's class name, for messages.
    """

    def __init__(self, base: Optimizer, wrapper: str) -> None:
        self.base, self.wrapper = base, wrapper
        self.kept: Any = torch.utils.weak.WeakTensorKeyDictionary()  # the copy of each parameter

    @contextmanager
    def replaced(
        self, params: Sequence[Tensor], points: Sequence[Tensor], grads: Sequence[Tensor | None]
    ) -> Iterator[None]:
        """Replace the parameters by fp32 copies in the base's groups and state.

        params: the 16-bit parameters.
        points: this rank's shards in fp32. The copies use their memory.
        grads: the gradients of the copies.
        """
        copies = self._copies(params, points, grads)
        # torch counts the changes of a tensor in the private `_version`. If torch removes it, drop
        # this count and the check below, which finds a base that would move nothing.
        versions = [sharded.local(p)._version for p in params]
        try:
            self._replace(params, copies)
            yield
        finally:
            self._replace(copies, params)
            _release(copies, points)
        if [sharded.local(p)._version for p in params] != versions:
            name = type(self.base).__name__
            raise RuntimeError(
                f"{name} moved a 16-bit parameter instead of its fp32 copy, because it keeps "
                f"parameters outside its param_groups: pass the wrapped optimizer to {name}, "
                f"such as {self.wrapper}.of(torch.optim.AdamW) if it takes a class"
            )

    def params(self) -> list[Tensor]:
        """The 16-bit parameters whose state is in fp32 because the base steps fp32 copies.

        SODA keeps its state in fp32 without copies. An empty parameter has no copy.
        """
        groups = [] if isinstance(self.base, SODA) else self.base.param_groups
        return [p for g in groups for p in g["params"] if p.dtype in HALVES and p.numel()]

    def load_base(self, state_dict: dict[str, Any]) -> None:
        """Load the base's state into fp32 parameters: torch casts it to their dtype."""
        params = self.params()
        shards = [sharded.local(p) for p in params]
        # one element of memory is enough, because only dtype, device and shape matter
        points = [x.new_zeros((), dtype=torch.float32).expand(x.shape) for x in shards]
        with self.replaced(params, points, [None] * len(params)):
            self.base.load_state_dict(state_dict)

    @not_compiled  # torch.compile cannot trace the attributes of a tensor
    def _copies(self, *columns: Sequence[Any]) -> list[Any]:
        """Return the copies. They are the same objects at each step, because bases remember them.

        columns: params, points and grads, as in `replaced`.
        """
        copies = []
        for p, x, grad in zip(*columns, strict=True):
            made: Any = self.kept.get(p)
            if made is None:
                made = self.kept[p] = nn.Parameter(sharded.like(x, p), p.requires_grad)
                vars(made).update(vars(p) | vars(made))
            sharded.refill(made, x)
            made.grad, made.fp32_copy_of = grad, p
            copies.append(made)
        return copies

    def _replace(self, old: Sequence[Tensor], new: Sequence[Tensor]) -> None:
        """Exchange old tensors for new ones in the base's groups, and as keys of its state."""
        by_id = dict(zip(map(id, old), new, strict=True))
        for group in self.base.param_groups:
            group["params"][:] = [by_id.get(id(p), p) for p in group["params"]]
        inside = [v for v in vars(self.base).values() if isinstance(v, Optimizer)]
        for optimizer in [self.base, *inside]:  # an optimizer inside it may share its groups
            renamed = {by_id.get(id(p), p): s for p, s in optimizer.state.items()}
            optimizer.state.clear()
            optimizer.state.update(renamed)


def _release(copies: list[Any], points: Sequence[Tensor]) -> None:
    """Write the copies into the points, and free the copies' memory until the next step."""
    empty = {d: torch.empty(0, dtype=torch.float32, device=d) for d in {x.device for x in points}}
    for made, x in zip(copies, points, strict=True):
        stepped = sharded.local(made)
        if stepped.data_ptr() != x.data_ptr():  # some bases set p.data
            x.copy_(stepped)
        made.grad = None
        del made.fp32_copy_of
        sharded.refill(made, empty[x.device])


def fp32_copies(tensors: list[Any]) -> list[Tensor]:
    """Copy tensors to fp32. On a GPU, many tensors take one launch and few allocations."""
    shards = [sharded.local(t) for t in tensors]
    copies = _allocated(shards)
    torch._foreach_copy_(copies, shards)
    return [sharded.like(copy, t) for copy, t in zip(copies, tensors, strict=True)]


def _allocated(tensors: list[Tensor]) -> list[Tensor]:
    """Return an empty fp32 tensor like each tensor. Tensors of one shape share an allocation."""
    found: dict[int, Tensor] = {}
    alike: dict[Any, list[int]] = {}
    for j, t in enumerate(tensors):
        if t.is_contiguous() and t.numel() % 4 == 0:  # kernels need multiples of 16 bytes
            alike.setdefault((t.shape, t.device), []).append(j)
        else:
            found[j] = torch.empty_like(t, dtype=torch.float32)
    for (shape, device), indices in alike.items():
        most = max(1, BLOCK // max(1, shape.numel()))
        for part in (indices[n : n + most] for n in range(0, len(indices), most)):
            block = torch.empty(len(part), *shape, dtype=torch.float32, device=device)
            found.update(zip(part, block.unbind(), strict=True))
    return [found[j] for j in range(len(tensors))]
