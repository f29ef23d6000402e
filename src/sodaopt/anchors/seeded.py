"""Initial weights as a function of (seed, parameter, element), so that they need not be stored.

    seeds = sodaopt.init.seeded_(model, seed=0)
    opt = SODAWrapper(AdamW(model.parameters(), weight_decay=0), anchor=seeds)

`seeded_` fills a model with the distributions of torch's default initialisers; z0 is then made
again at each step: in registers on a GPU, elsewhere slice by slice. Uniform and sign weights have
the same bits on every device, normal ones on the same kind of device.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from sodaopt import backends as kernels
from sodaopt._bare import is_bare
from sodaopt._errors import times
from sodaopt.anchors import philox
from sodaopt.anchors.pull import lerp_to_numbers_
from sodaopt.parallel import sharded

SLICES = {"cpu": 1 << 18, "cuda": 1 << 22}
"""Elements made at a time in plain torch operations: a processor's cache, a GPU's launches."""


@dataclass(frozen=True)
class Init:
    """A distribution of initial weights: `kind` with two numbers.

    constant a | uniform on [a, b) | normal mean a, std b | truncated: that normal within 2 std,
    as nn.init.trunc_normal_ with the defaults scaled | sign: +-a
    """

    kind: str
    a: float = 0.0
    b: float = 0.0

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            from sodaopt._errors import unknown

            raise ValueError(unknown("kind of initialisation", self.kind, KINDS))

    @property
    def words(self) -> int:
        """How many words an element takes."""
        return 2 if self.kind == "normal" else 1

    def make(self, w: Tensor) -> Tensor:
        """fp32 values from words, two words an element for normals, one for the others."""
        return KINDS[self.kind](self, w)


def _normal(i: Init, w: Tensor) -> Tensor:
    u, v = philox.uniform(w[0::2]), philox.uniform(w[1::2])
    r = torch.sqrt(-2 * torch.log1p(-u))
    return i.a + i.b * r * torch.cos(2 * math.pi * v)


def _truncated(i: Init, w: Tensor) -> Tensor:
    edge = math.erf(2 / math.sqrt(2))
    u = (2 * philox.uniform(w) - 1) * edge
    return i.a + i.b * (torch.erfinv(u) * math.sqrt(2)).clamp(-2, 2)


KINDS: dict[str, Callable[[Init, Tensor], Tensor]] = {
    "constant": lambda i, w: torch.full(w.shape, i.a, dtype=torch.float32, device=w.device),
    "uniform": lambda i, w: i.a + (i.b - i.a) * philox.uniform(w),
    "normal": _normal,
    "truncated": _truncated,
    "sign": lambda i, w: i.a * ((w & 1) * 2 - 1).float(),
}


def constant(value: float) -> Init:
    return Init("constant", value)


def between(low: float, high: float) -> Init:
    return Init("uniform", low, high)


def normal(mean: float = 0.0, std: float = 1.0) -> Init:
    return Init("normal", mean, std)


def truncated(mean: float = 0.0, std: float = 1.0) -> Init:
    return Init("truncated", mean, std)


def sign(scale: float) -> Init:
    return Init("sign", scale)


# -- torch's own rules ----------------------------------------------------------------------------

Rules: TypeAlias = Mapping[str, Init]
CONVS = (
    nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d,
)  # fmt: skip
NORMS = (nn.LayerNorm, nn.GroupNorm, nn.RMSNorm, nn.modules.batchnorm._BatchNorm)


def default(module: nn.Module) -> Rules | None:
    """The distributions that torch's reset_parameters would draw from, by parameter name."""
    if isinstance(module, (nn.Linear, *CONVS)):
        fan = nn.init._calculate_fan_in_and_fan_out(module.weight)[0]
        bound = 1 / math.sqrt(fan) if fan else 0.0
        return {"weight": between(-bound, bound), "bias": between(-bound, bound)}
    if isinstance(module, nn.Embedding) and module.padding_idx is None:
        return {"weight": normal()}
    if isinstance(module, NORMS):
        return {"weight": constant(1.0), "bias": constant(0.0)}
    if isinstance(module, nn.RNNBase):
        bound = 1 / math.sqrt(module.hidden_size)
        return {name: between(-bound, bound) for name, _ in module.named_parameters()}
    return None


# -- a seeded model -------------------------------------------------------------------------------


@dataclass(frozen=True)
class Spec:
    """How one parameter is made: its name gives the stream, the seed the key."""

    name: str
    init: Init
    seed: int
    shape: tuple[int, ...]

    @cached_property
    def stream(self) -> int:
        return int.from_bytes(hashlib.blake2b(self.name.encode(), digest_size=8).digest(), "little")

    def values(self, start: int, stop: int, device: torch.device) -> Tensor:
        """Elements start..stop-1 of the flattened parameter, fp32."""
        w = self.init.words
        return self.init.make(philox.words(w * start, w * stop, self._key, self.stream, device))

    def values_at(self, index: Tensor) -> Tensor:
        """The elements with these numbers, fp32."""
        w = self.init.words
        index = (index.unsqueeze(-1) * w + torch.arange(w, device=index.device)).flatten()
        return self.init.make(philox.words_at(index, self._key, self.stream))

    @property
    def _key(self) -> tuple[int, int]:
        return self.seed & 0xFFFFFFFF, self.seed >> 32 & 0xFFFFFFFF

    def slices(self, p: Tensor, stop: int) -> Iterator[tuple[slice, Tensor]]:
        """z0 of the first elements of this rank's part of p, piece by piece: where, and what."""
        device = sharded.local(p).device
        step = SLICES.get(device.type, SLICES["cpu"])
        for i in range(0, stop, step):
            at = slice(i, min(i + step, stop))
            n = sharded.numbers(p, at.start, at.stop)
            z0 = self.values(n.start, n.stop, device) if isinstance(n, range) else self.values_at(n)
            yield at, z0.to(p.dtype)


@torch._disable_dynamo  # type: ignore[attr-defined]  # as many operations as slices
def regenerate_(xs: list[Tensor], ps: list[Tensor], specs: list[Spec], lam: Any) -> None:
    """x <- x + lam (z0 - x), each x flat and contiguous: the first elements of this rank's part of
    its p. All z0 that is made from a seed is made here, rounded to p's dtype; lam = 1 writes z0."""
    numbers: tuple[list[Tensor], list[float]] = [], []
    launches: dict[Any, list[tuple[Tensor, Spec, int]]] = {}
    for x, p, spec in zip(xs, ps, specs, strict=True):
        if spec.init.kind == "constant":
            numbers[0].append(x)
            numbers[1].append(_rounded(spec.init.a, p.dtype))
        elif (start := _start(x, p, spec.init.kind, lam)) is not None:
            key = x.device, x.dtype, spec.init.kind, p.dtype
            launches.setdefault(key, []).append((x, spec, start))
        else:
            for at, z0 in spec.slices(p, x.numel()):
                x[at].lerp_(z0.to(x.dtype), lam)
    if numbers[0]:
        lerp_to_numbers_(*numbers, lam)
    for (*_, dtype), rows in launches.items():
        from sodaopt.backends.triton import seeded

        x_, spec_, start_ = (list(column) for column in zip(*rows, strict=True))
        seeded.pull_(x_, spec_, start_, lam, dtype)


@cache
def _rounded(value: float, dtype: torch.dtype) -> float:
    return float(torch.tensor(value, dtype=torch.float32, device="cpu").to(dtype))


NARROW = frozenset((torch.float32, torch.bfloat16, torch.float16))


def _start(x: Tensor, p: Tensor, kind: str, lam: Any) -> int | None:
    """The number of x's first element, where a kernel can make z0 in registers: for fp32 or less,
    of elements that follow one another."""
    if not (x.is_cuda and isinstance(lam, float) and is_bare(x) and {x.dtype, p.dtype} <= NARROW):
        return None
    n = sharded.numbers(p, 0, 0)  # of none of them: whether it is a range, and where that begins
    return n.start if isinstance(n, range) and kernels.usable(kind, x.device) else None


@torch.no_grad()
def regenerated(p: Tensor, spec: Spec, elements: int | None = None) -> Tensor:
    """z0 of this rank's part of p, flat; or of so many of its first elements."""
    part = sharded.local(p)
    n = part.numel() if elements is None else min(elements, part.numel())
    z0 = torch.zeros(n, dtype=p.dtype, device=part.device)
    regenerate_([z0], [p], [spec], 1.0)
    return z0


class Seeds:
    """The specs of a model's parameters. An anchor: it makes z0 again instead of keeping it."""

    def __init__(self, model: nn.Module, specs: dict[str, Spec]) -> None:
        self.specs, self.model = specs, model
        self._known: dict[Tensor, Spec] = {}  # by object: an id may be another's by now

    def of(self, p: Tensor) -> Spec | None:
        """The spec of a parameter, found again after a framework put others in their place."""
        if p not in self._known:
            named = self.model.named_parameters()
            self._known = {q: self.specs[n] for n, q in named if n in self.specs}
        return self._known.get(p)

    def __getstate__(self) -> dict[str, object]:
        return {"specs": self.specs, "model": self.model, "_known": {}}


def seeded_(
    model: nn.Module, seed: int = 0, rules: Callable[[str, nn.Module], Rules | None] | None = None
) -> Seeds:
    """Fill every parameter of the model from the seed; returns what makes them again.

    rules(name of the module, module) gives the distributions of its own parameters by name, or None
    for torch's default of that type. A module that torch gives no default for needs a rule.
    """
    specs: dict[str, Spec] = {}
    names = {id(p): n for n, p in model.named_parameters()}
    for path, module in model.named_modules():
        own = dict(module.named_parameters(recurse=False))
        if not own:
            continue
        given = {**(default(module) or {}), **((rules(path, module) if rules else None) or {})}
        for short, p in own.items():
            name = names[id(p)]
            if short not in given:
                raise ValueError(
                    f"no initialisation is known for {name} ({times(p.shape)}) of a "
                    f"{type(module).__name__}: give one, rules=lambda path, module: "
                    f"{{{short!r}: sodaopt.init.normal(0, 0.02)}}"
                )
            if name not in specs:  # a tied parameter has the rule of its first owner
                specs[name] = Spec(name, given[short], seed, tuple(p.shape))
                fill_(p, specs[name])
    return Seeds(model, specs)


@torch.no_grad()
def fill_(p: Tensor, spec: Spec) -> None:
    """Write the initial weights into p; each rank its own part."""
    part = sharded.local(p)
    if part.is_contiguous():
        regenerate_([part.zero_().view(-1)], [p], [spec], 1.0)
    else:  # such as channels_last: elements are numbered in another order than they are stored
        part.copy_(regenerated(p, spec).view(part.shape))
