"""`sodaopt bench --cluster 8x128`: predict the optimizer's part of a step on many GPUs.

The counts (bytes, products, state) are those of the library's own plans for one rank, and tests on
two and four ranks compare them with counted ones. The times follow from the counts and a `Machine`,
and were not measured on a cluster:

    passes         the bytes of parameters, gradients and state, over the GPU's memory bandwidth
    products       the products of the busiest rank
    communication  the bytes that a rank receives, over NVLink within a node, else over the network
    step           passes + the larger one of products and communication, which overlap

The step runs after the backward pass, and the table compares it with that pass.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, NamedTuple

from torch import nn

from sodaopt import SODA, param_groups
from sodaopt.geometry.maps import Ball, Geometry
from sodaopt.geometry.norms import Spectral
from sodaopt.geometry.polar import Newton
from sodaopt.parallel.exchange import ROUND_ELEMENTS
from sodaopt.parallel.layout import Grid, Placement, Plan, boxes, buckets, plan

METHODS = ("adamw", "soda(adamw)", "muon", "soda(muon)", "soda_dagger")
KINDS = ("ddp", "fsdp", "hsdp")
FP32 = 4


@dataclass(frozen=True)
class Machine:
    """A GPU and its links, in FLOP/s and bytes/s. The defaults are an H100 with 400 Gb/s.

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
    """GPUs of a node, and nodes."""

    gpus: int
    nodes: int

    @property
    def size(self) -> int:
        return self.gpus * self.nodes

    def grid(self, kind: str, needed: float) -> tuple[int, int]:
        """R replicas of S shards. Under hsdp, S is one node, doubled until a replica fits.

        needed: the number of GPUs whose memory one replica fills
        """
        S = {"ddp": 1, "fsdp": self.size}.get(kind, self.gpus)
        while kind == "hsdp" and needed > S and self.size >= 2 * S:
            S *= 2
        return self.size // S, S


def cluster(text: str) -> Cluster:
    """'8x128' -> 8 GPUs in each of 128 nodes."""
    found = re.fullmatch(r"([1-9]\d*)x([1-9]\d*)", text)
    if not found:
        raise ValueError(f"--cluster is GPUs of a node x nodes, such as 8x128, got {text!r}")
    return Cluster(int(found[1]), int(found[2]))


@dataclass
class Counts:
    """The memory, traffic and products of one rank in a step, in bytes and FLOP.

    flops, busiest: the products of this rank, and of the rank that has most.
    temporary: the results of a bucket, and its rounds under way.
    """

    weights: int = 0
    state: int = 0
    shards: int = 0
    replicas: int = 0
    flops: int = 0
    busiest: int = 0
    temporary: int = 0
    passes: int = 0
    plans: list[Plan] = field(default_factory=list, repr=False)

    @property
    def memory(self) -> int:
        """Parameters, gradients, state and the temporary memory of a step."""
        return 2 * self.weights + self.state + self.temporary


def counts(opt: SODA, placement: Placement, grid: Grid) -> Counts:
    """Count the step of one rank, for fp32 parameters that travel in fp32.

    opt: an optimizer over whole parameters, which may be on the meta device.
    """
    found, loads = Counts(), (0,) * (grid.R * grid.S)
    work = [0] * (grid.R * grid.S)
    for group in opt.param_groups:
        geometry = opt.methods[group["method"]].geometry
        shapes = [tuple(p.shape) for p in group["params"]]
        for p, shape in zip(group["params"], shapes, strict=True):
            own = math.prod(map(len, boxes(shape, placement)[grid.s]))
            sums = [t for t in opt.state[p].values() if t.shape == p.shape and t.ndim]
            found.weights += own * FP32
            found.state += own * sum(t.itemsize for t in sums)
            found.passes += own * FP32 * (3 + 2 * len(sums))  # read g, read and write p and state
        if not has_polar_factors(geometry):
            continue
        params = [(shape, placement, geometry.matrices(shape)) for shape in shapes]
        for part in buckets(grid.R, params, ROUND_ELEMENTS):
            bucket = [shapes[j] for j in part]
            made = _plan(grid, bucket, placement, geometry, loads)
            each = _flops_per_unit(geometry)
            work = [w + each * (b - a) for w, a, b in zip(work, loads, made.loads, strict=True)]
            loads = made.loads
            _add(found, made, bucket, placement)
    found.flops, found.busiest = work[grid.r * grid.S + grid.s], max(work)
    return found


def _plan(
    grid: Grid, shapes: Sequence[tuple[int, ...]], placement: Placement, geometry: Geometry,
    loads: tuple[int, ...],
) -> Plan:  # fmt: skip
    assert isinstance(geometry, Ball)
    frames = [geometry.norm.view(shape) for shape in shapes]
    params = tuple((s, placement, f) for s, f in zip(shapes, frames, strict=True))
    return plan(grid, params, loads, ROUND_ELEMENTS)


def has_polar_factors(geometry: Any) -> bool:
    """Whether the map computes polar factors, which are the matrices that ranks share."""
    return isinstance(getattr(geometry, "norm", None), Spectral)


def _flops_per_unit(geometry: Any) -> int:
    """FLOP of a polar factor over the plan's unit: each step is three products."""
    polar = geometry.norm.polar
    return 2 * len(polar.steps) if isinstance(polar, Newton) else 1


def _add(found: Counts, made: Plan, shapes: Sequence[Any], placement: Placement) -> None:
    shards, replicas = made.elements_received()
    found.shards += shards * FP32
    found.replicas += replicas * FP32
    held = sum(math.prod(map(len, boxes(shape, placement)[made.grid.s])) for shape in shapes)
    found.temporary = max(found.temporary, FP32 * (held + made.elements_under_way()))
    found.plans.append(made)


@dataclass(frozen=True)
class Row:
    """A prediction for one method and parallelism. Times are in seconds."""

    method: str
    parallel: str
    cluster: Cluster
    counts: Counts
    communication: float
    products: float
    passes: float
    backward: float

    @property
    def step(self) -> float:
        return self.passes + max(self.products, self.communication)

    @property
    def hides(self) -> str:
        """The work that takes longer than the communication, which can then overlap with it.

        "no": neither products nor the backward pass do. "none": there is no communication.
        """
        if not self.communication:
            return "none"
        if self.communication <= self.products:
            return "products"
        return "backward" if self.communication <= self.backward else "no"


def predict(
    model: nn.Module, method: str, c: Cluster, kind: str, tokens: int, machine: Machine
) -> Row:
    """Predict a step.

    model: whole parameters, best on the meta device.
    tokens: tokens of a step, of all GPUs together.
    """
    bytes_ = 4 * FP32 * sum(p.numel() for p in model.parameters())  # with AdamW's state
    R, S = c.grid(kind, bytes_ / (0.8 * machine.capacity))
    placement, grid = Placement((R, S), (None, 0), (0, 1)), Grid(R, S, 0, 0)
    found = counts(_optimizer(model, method), placement, grid)
    within = machine.nvlink if c.gpus >= S else machine.network
    across = machine.nvlink if c.nodes == 1 else machine.network
    parallel = {"ddp": f"ddp {R}", "fsdp": f"fsdp {S}", "hsdp": f"hsdp {R} x {S}"}[kind]
    return Row(
        method, parallel, c, found,
        communication=found.shards / within + found.replicas / across,
        products=found.busiest / (machine.flops * machine.products),
        passes=found.passes / machine.memory,
        backward=4 * _visited(model) * tokens / c.size / (machine.flops * machine.training),
    )  # fmt: skip


@lru_cache(maxsize=8)
def _optimizer(model: nn.Module, method: str) -> SODA:
    return SODA(param_groups(model, method), 1.0)


def _visited(model: nn.Module) -> float:
    """The parameters that a token visits: of stacks of experts only the active ones."""
    active = getattr(model, "active", 1.0)
    return sum(p.numel() * (active if p.ndim == 3 else 1.0) for p in model.parameters())


def rows(
    model: nn.Module, c: Cluster, methods: Sequence[str] = METHODS, tokens: int = 1 << 22,
    machine: Machine = H100,
) -> list[Row]:  # fmt: skip
    """Predict every method and parallelism on a cluster."""
    kinds = [kind for kind in KINDS if c.size > 1 or kind == "ddp"]
    return [predict(model, m, c, kind, tokens, machine) for kind in kinds for m in methods]


HEAD = (
    "method", "parallel", "GB a GPU", "GB received", "TFLOP, busiest", "passes ms", "products ms",
    "communication ms", "hides behind", "step ms", "x AdamW", "% of backward",
)  # fmt: skip


def cells(row: Row, adamw: Row) -> list[str]:
    """The row of a table, beside AdamW with the same parallelism."""
    n = row.counts
    return [
        row.method, row.parallel, f"{n.memory / 1e9:.1f}",
        f"{(n.shards + n.replicas) / 1e9:.2f}", f"{n.busiest / 1e12:.2f}",
        *(f"{1e3 * t:.1f}" for t in (row.passes, row.products, row.communication)),
        row.hides, f"{1e3 * row.step:.1f}", f"{row.step / adamw.step:.1f}",
        f"{row.step / row.backward:.1%}",
    ]  # fmt: skip


def table(found: Sequence[Row]) -> list[list[str]]:
    """A table of rows, with its head. The rows must contain AdamW for each parallelism."""
    base = {row.parallel: row for row in found if row.method == "adamw"}
    return [list(HEAD), *(cells(row, base[row.parallel]) for row in found)]
