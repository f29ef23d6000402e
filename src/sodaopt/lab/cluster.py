"""`sodaopt bench --cluster 8x128`: predict the optimizer's part of a step on many GPUs.

The bytes and products of one rank are counted from the rounds that the library makes. Tests on two
and four ranks compare them with the counts of a real step. The times follow from the counts and a
`Machine`. They were not measured on a cluster:

    passes         time to read and write parameters, gradients and state in the GPU's memory
    products       time of the matrix products of the busiest rank
    communication  time to receive the matrices, by NVLink within a node, else by the network
    step           passes + max(products, communication that overlaps with them) + communication of
                   large matrices, which does not overlap with products

The step runs after the backward pass, so the table compares it with the time of that pass.
"""

import math
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, NamedTuple

from torch import nn

from sodaopt import SODA, param_groups
from sodaopt.geometry.norms import Spectral
from sodaopt.geometry.polar import Newton
from sodaopt.parallel import stages
from sodaopt.parallel.deal import deal
from sodaopt.parallel.layout import (
    Grid,
    Param,
    Piece,
    Round,
    Shape,
    is_in_order,
    located,
)
from sodaopt.parallel.order import ordered

from .placements import PlacementRule, cut_by_layers, cut_by_rows

METHODS = ("adamw", "soda(adamw)", "muon", "soda(muon)", "soda_dagger")
KINDS = ("ddp", "fsdp", "hsdp", "tp")
FP32 = 4


@dataclass(frozen=True)
class Machine:
    """A GPU and its links, in FLOP/s and bytes/s. The defaults are an H100 with a 400 Gb/s network.

    capacity: bytes of memory.
    training, products: the shares of `flops` that a training step and large products reach.
    """

    flops: float = 989e12
    training: float = 0.4
    products: float = 0.6
    memory: float = 3.35e12
    capacity: float = 80e9
    nvlink: float = 450e9
    network: float = 50e9


H100 = Machine()


class Cluster(NamedTuple):
    """The number of GPUs of a node, and the number of nodes."""

    gpus: int
    nodes: int

    @property
    def size(self) -> int:
        return self.gpus * self.nodes

    def grid(self, kind: str, needed: float) -> tuple[int, int]:
        """Return (R, S): the number of replicas, and the number of shards of each.

        Under hsdp, S is one node, and is doubled until a replica fits into the memory of S GPUs.
        Under tp, each node shards the layers by tensor parallelism, and FSDP shards over the nodes.

        needed: the number of GPUs whose memory one replica fills.
        """
        S = {"ddp": 1, "fsdp": self.size, "tp": self.size}.get(kind, self.gpus)
        while kind == "hsdp" and needed > S and self.size >= 2 * S:
            S *= 2
        return self.size // S, S


def cluster(text: str) -> Cluster:
    """Parse a cluster: '8x128' is 8 GPUs in each of 128 nodes."""
    found = re.fullmatch(r"([1-9]\d*)x([1-9]\d*)", text)
    if not found:
        raise ValueError(f"--cluster must be GPUs of a node x nodes, such as 8x128, got {text!r}")
    return Cluster(int(found[1]), int(found[2]))


@dataclass
class Counts:
    """The memory, traffic and products of one rank in a step, in bytes and FLOP.

    shards, replicas: bytes received from the other shards, and from the other replicas.
    flops, busiest: the products of this rank, and of the rank that has most.
    temporary: memory of the rounds of the exchange that are under way.
    passes: bytes of parameters, gradients and state that are read and written.
    large: the parts of `shards` and `replicas` that belong to rounds with large matrices.
    """

    weights: int = 0
    state: int = 0
    shards: int = 0
    replicas: int = 0
    flops: int = 0
    busiest: int = 0
    temporary: int = 0
    passes: int = 0
    large: tuple[int, int] = (0, 0)
    rounds: list[Round] = field(default_factory=list, repr=False)

    @property
    def memory(self) -> int:
        """The bytes of parameters, gradients, state and the temporary memory of a step."""
        return 2 * self.weights + self.state + self.temporary


def counts(opt: SODA, rule: PlacementRule, grid: Grid, at: tuple[int, int]) -> Counts:
    """Count the memory, traffic and products of one rank, for fp32 parameters that travel in fp32.

    opt: an optimizer over whole parameters, which may be on the meta device. It knows their names.
    rule: how the mesh cuts each parameter.
    grid: the numbers of replicas and shards, and the indices of this rank among them.
    at: the coordinates of this rank in the mesh of `rule`.
    """
    found, params = Counts(), list[Param]()
    for number, group in enumerate(opt.param_groups):
        geometry = opt.methods[group["method"]].geometry
        for name, p in zip(group["param_names"], group["params"], strict=True):
            shape = tuple(p.shape)
            placement = rule(name, shape)
            own = math.prod(map(len, placement.box(shape, at)))
            sums = [t for t in opt.state[p].values() if t.shape == p.shape and t.ndim]
            found.weights += own * FP32
            found.state += own * sum(t.itemsize for t in sums)
            found.passes += own * FP32 * (3 + 2 * len(sums))  # read g, read and write p and state
            if has_polar_factors(geometry):
                exchanged: Any = geometry.exchanged(shape)
                params.append(Param(number, shape, placement, exchanged))
    found.rounds = deal(grid, tuple(params), stages.ROUND)
    found.temporary = FP32 * elements_under_way(found.rounds)
    work = Counter[int]()
    for made in found.rounds:
        group = opt.param_groups[params[made.params[0]].number]
        each = _flops_per_unit(opt.methods[group["method"]].geometry)
        work.update({rank: each * n for rank, n in made.work.items()})
        shards, replicas = (FP32 * n for n in elements_received(made))
        found.shards += shards
        found.replicas += replicas
        if made.is_large:
            found.large = found.large[0] + shards, found.large[1] + replicas
    found.flops, found.busiest = work[grid.r * grid.S + grid.s], max(work.values(), default=0)
    return found


def elements_received(round_: Round) -> tuple[int, int]:
    """Return the numbers of elements that this rank receives from other shards and other replicas.

    Padding counts.
    """
    R, _, r, s = round_.grid
    pieces = [p for p in round_.held[r] + round_.made_of if p.shard != s]
    shards, parts = round_.travels * sum(p.size for p in pieces), round_.parts
    return shards, (R - 1) * max(parts) if round_.is_even else sum(parts) - parts[r]


def elements_under_way(rounds: Sequence[Round]) -> int:
    """Return the most elements of all rounds that are in memory at once, during any stage."""
    most, total, held = 0, 0, [0] * len(rounds)
    needed = [_needed(round_) for round_ in rounds]
    for stage, j in ordered(rounds):
        within, after = needed[j][stage]
        most = max(most, total - held[j] + within)
        total, held[j] = total - held[j] + after, after
    return most


def _needed(n: Round) -> dict[str, tuple[int, int]]:
    """Return, by stage, the elements that a round needs during the stage and holds after it."""
    R, own, parts = n.grid.R, n.parts[n.grid.r], n.parts
    shapes = [shape for _, shape in n.mine]
    mine, batched = sum(map(math.prod, shapes)), Counter(shapes)
    # matrices of one shape are copied into a batch, unless they have travelled and already are one
    batch = sum(math.prod(shape) * m for shape, m in batched.items() if m > 1 and not n.travels)
    copied, matrices = _copied([n.made_of], shapes), mine if n.travels else 0
    under_way = own + mine if n.travels else 0
    computed = max(matrices + copied, matrices + batch + mine, mine + copied, under_way)
    held = own if n.is_large and n.travels else under_way or mine
    gathered = own if R == 1 else R * max(parts) if n.is_even else sum(parts)
    sent = max(parts) if R > 1 and n.is_even else 0
    return {
        "send": (under_way, under_way),
        "compute": (computed, held),
        "spread": (max(held, own + sent + gathered), sent + gathered),
        "finish": (gathered + _copied(n.held, n.shapes), 0),
    }


def _copied(rows: Sequence[list[Piece]], shapes: Sequence[Shape]) -> int:
    """Return the elements of the tensors whose pieces are packed in another order, and copied."""
    tensors = zip(located(rows, len(shapes)), shapes, strict=True)
    return sum(math.prod(shape) for pieces, shape in tensors if not is_in_order(pieces, shape))


def has_polar_factors(geometry: Any) -> bool:
    """Whether the map computes polar factors, which the ranks divide among themselves."""
    return isinstance(getattr(geometry, "norm", None), Spectral)


def _flops_per_unit(geometry: Any) -> int:
    """Return the FLOP for each unit of `Round.work`, which is a multiply-add of one step."""
    polar = geometry.norm.polar
    return 2 * len(polar.steps) if isinstance(polar, Newton) else 1


@dataclass(frozen=True)
class Prediction:
    """A prediction for one method and parallelism. Times are in seconds.

    exposed: the part of the communication that does not overlap with products.
    """

    method: str
    parallel: str
    cluster: Cluster
    counts: Counts
    communication: float
    exposed: float
    products: float
    passes: float
    backward: float

    @property
    def step(self) -> float:
        return self.passes + self.exposed + max(self.products, self.communication - self.exposed)

    @property
    def hides(self) -> str:
        """The work that the communication can hide behind, because that work takes longer.

        "no": products and backward pass are both shorter. "none": nothing is communicated.
        """
        if not self.communication:
            return "none"
        if self.communication <= self.products and not self.exposed:
            return "products"
        return "backward" if self.communication <= self.backward else "no"


def predict(
    model: nn.Module, method: str, c: Cluster, kind: str, tokens: int, machine: Machine
) -> Prediction:
    """Predict a step of one method with one kind of parallelism.

    model: whole parameters, best on the meta device.
    kind: one of KINDS.
    tokens: the number of tokens of a step, on all GPUs together.
    """
    bytes_ = 4 * FP32 * sum(p.numel() for p in model.parameters())  # also gradients, m and v
    R, S = c.grid(kind, bytes_ / (0.8 * machine.capacity))
    rule = cut_by_layers(c.nodes, c.gpus) if kind == "tp" else cut_by_rows(R, S)
    found = counts(_optimizer(model, method), rule, Grid(R, S, 0, 0), (0, 0))
    within = machine.nvlink if c.gpus >= S else machine.network
    across = machine.nvlink if c.nodes == 1 else machine.network
    parallel = {
        "ddp": f"ddp {R}",
        "fsdp": f"fsdp {S}",
        "hsdp": f"hsdp {R} x {S}",
        "tp": f"fsdp {c.nodes} x tp {c.gpus}",
    }[kind]
    return Prediction(
        method, parallel, c, found,
        communication=found.shards / within + found.replicas / across,
        exposed=found.large[0] / within + found.large[1] / across,
        products=found.busiest / (machine.flops * machine.products),
        passes=found.passes / machine.memory,
        backward=4 * _visited(model) * tokens / c.size / (machine.flops * machine.training),
    )  # fmt: skip


@lru_cache(maxsize=8)
def _optimizer(model: nn.Module, method: str) -> SODA:
    return SODA(param_groups(model, method), 1.0)


def _visited(model: nn.Module) -> float:
    """Return the number of parameters that a token visits, with the active experts only."""
    active = getattr(model, "active", 1.0)
    return sum(p.numel() * (active if p.ndim == 3 else 1.0) for p in model.parameters())


def rows(
    model: nn.Module, c: Cluster, methods: Sequence[str] = METHODS, tokens: int = 1 << 22,
    machine: Machine = H100,
) -> list[Prediction]:  # fmt: skip
    """Predict a step of every method with every kind of parallelism on a cluster."""
    kinds = [kind for kind in KINDS if c.size > 1 or kind == "ddp"]
    return [predict(model, m, c, kind, tokens, machine) for kind in kinds for m in methods]


HEAD = (
    "method", "parallel", "GB a GPU", "GB received", "TFLOP, busiest", "passes ms", "products ms",
    "communication ms", "hides behind", "step ms", "x AdamW", "% of backward",
)  # fmt: skip


def cells(row: Prediction, adamw: Prediction) -> list[str]:
    """Return the texts of a row, in the order of HEAD.

    adamw: the row of AdamW with the same parallelism.
    """
    n = row.counts
    return [
        row.method, row.parallel, f"{n.memory / 1e9:.1f}",
        f"{(n.shards + n.replicas) / 1e9:.2f}", f"{n.busiest / 1e12:.2f}",
        *(f"{1e3 * t:.1f}" for t in (row.passes, row.products, row.communication)),
        row.hides, f"{1e3 * row.step:.1f}", f"{row.step / adamw.step:.1f}",
        f"{row.step / row.backward:.1%}",
    ]  # fmt: skip


def table(found: Sequence[Prediction]) -> list[list[str]]:
    """Return a table of texts that begins with HEAD. `found` needs AdamW for each parallelism."""
    base = {row.parallel: row for row in found if row.method == "adamw"}
    return [list(HEAD), *(cells(row, base[row.parallel]) for row in found)]
