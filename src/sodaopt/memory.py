"""Report the bytes that an optimizer keeps, by parameter and by kind of state.

    print(sodaopt.memory(model, optimizer))

Before the first step the state is predicted: a copy of the optimizer makes its state on the meta
device, where nothing is allocated. After the first step the tensors of the state are counted.
"""

import copy
from collections import defaultdict
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from sodaopt.core.optimizer import SODA
from sodaopt.layers.table import aligned
from sodaopt.parallel import sharded

SHOWN = 12
"""Parameters in the printed table, the largest first."""


@dataclass(frozen=True)
class ParameterBytes:
    """The bytes on this rank of one parameter, or of several parameters together."""

    name: str
    shape: tuple[int, ...]
    weight: int
    gradient: int
    state: dict[str, int]

    def cells(self, kinds: list[str]) -> list[str]:
        """Return the row of the printed table, with a column for each of these kinds of state."""
        sizes = [self.weight, self.gradient, *(self.state.get(k, 0) for k in kinds)]
        shown = [size(n) or "-" for n in (*sizes, sum(self.state.values()))]
        return [self.name, "x".join(map(str, self.shape)), *shown]


@dataclass(frozen=True)
class Memory:
    """The bytes of weights, gradients and state. `print` shows them as a table.

    rows: name, shape, and the bytes of weight, gradient and each state tensor of every parameter.
    predicted: whether the state was predicted, because the optimizer had not stepped.

    >>> adamw = torch.optim.AdamW(model.parameters())
    >>> sodaopt.memory(model, adamw).predicted  # it has not stepped
    True
    """

    rows: tuple[ParameterBytes, ...]
    predicted: bool

    def state(self) -> dict[str, int]:
        """Return the bytes of all parameters by kind of state."""
        kinds = dict.fromkeys(kind for row in self.rows for kind in row.state)
        return {kind: sum(row.state.get(kind, 0) for row in self.rows) for kind in kinds}

    def total(self) -> int:
        """Return the bytes of the whole state."""
        return sum(self.state().values())

    def __str__(self) -> str:
        weights, gradients = (sum(getattr(r, n) for r in self.rows) for n in ("weight", "gradient"))
        every = ParameterBytes(f"all {len(self.rows)}", (), weights, gradients, self.state())
        kinds = [k for k, n in every.state.items() if n >= 1000] or list(every.state)
        largest = sorted(self.rows, key=lambda r: -r.weight)[:SHOWN]
        lines = [["parameter", "shape", "weights", "gradient", *kinds, "state"]]
        lines += [row.cells(kinds) for row in (*largest, every)]
        how = "predicted on the meta device" if self.predicted else "counted"
        share = self.total() / weights if weights else 0.0
        return "\n".join([*aligned(lines), f"state {share:.2f} x weights, {how}"])


def memory(model: nn.Module, optimizer: Optimizer) -> Memory:
    """Return the bytes of each parameter, its gradient and its state on this rank.

    The state is counted if the optimizer has stepped, and predicted if it has not.

    model: gives the names of the parameters.
    optimizer: any torch optimizer of the model's parameters.

    >>> opt = SODA(model.parameters(), lr=1e-3, method=zoo.adam())
    >>> weights = sum(p.nbytes for p in model.parameters())
    >>> round(sodaopt.memory(model, opt).total() / weights, 1)  # two moments
    2.0
    """
    counts = [s.get("step") for s in optimizer.state.values() if isinstance(s, dict)]
    has_stepped = any(c is None or float(c) > 0 for c in counts)
    states = optimizer.state if has_stepped else _predicted(optimizer)
    rows = []
    for name, p in model.named_parameters():
        state, nbytes = states.get(p, {}), _bytes(p)
        kept = {str(k): _bytes(t) for k, t in state.items() if isinstance(t, Tensor)}
        rows.append(ParameterBytes(name, tuple(p.shape), nbytes, nbytes * p.requires_grad, kept))
    return Memory(tuple(rows), not has_stepped)


def _bytes(t: Tensor) -> int:
    """Return the bytes of this rank's shard, and of a quantised tensor the sum over its parts."""
    return sum(part.nbytes for part in _parts(sharded.local(t)))


def _parts(t: Tensor) -> list[Tensor]:
    """The plain tensors of a quantised one, such as its codes and scales."""
    if not hasattr(t, "__tensor_flatten__"):
        return [t]
    return [part for name in t.__tensor_flatten__()[0] for part in _parts(getattr(t, name))]


def _predicted(optimizer: Optimizer) -> dict[Tensor, dict[str, Any]]:
    """The state that a copy of the optimizer makes for meta copies of its parameters."""
    meta: dict[Tensor, Tensor] = {}
    for p in (p for group in optimizer.param_groups for p in group["params"]):
        meta[p] = nn.Parameter(sharded.local(p).detach().to("meta"), p.requires_grad)
        meta[p].grad = torch.empty_like(meta[p]) if p.requires_grad else None
    known = {id(p): q for p, q in meta.items()}
    # the copy gets the meta parameters and an empty state
    copied = copy.deepcopy(optimizer, known | {id(optimizer.state): defaultdict(dict)})
    for group in copied.param_groups:
        group.update({k: v for k, v in ON_META.items() if k in group})
    copied.state_dict()  # SODA makes its state here, and other optimizers in a step
    if not isinstance(copied, SODA):
        copied.step()
    return {p: copied.state.get(q, {}) for p, q in meta.items()}


ON_META = {"fused": None, "capturable": False, "foreach": False}
"""Group settings with which a step runs on the meta device. They do not change the state."""


def size(n: float) -> str:
    """Write a number of bytes with its unit: 1500 -> '1.5 kB', 0 -> ''."""
    if n < 1000:
        return f"{n:.0f} B" if n else ""
    power = 1 + (n >= 999.5e3) + (n >= 999.5e6) + (n >= 999.5e9)
    return f"{n / 1000**power:.3g} {('', 'kB', 'MB', 'GB', 'TB')[power]}"
