"""Initial weights as a function of (seed, parameter, element), so that they need not be stored."""

import hashlib
import math
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from sodaopt._errors import unknown
from sodaopt.anchors import philox
from sodaopt.parallel import sharded

KINDS = ("constant", "between", "normal", "truncated", "sign")
"""The kinds of distributions."""


@dataclass(frozen=True)
class Init:
    """A distribution of initial weights: a kind with two numbers.

    kind: "constant" (a), "between" (uniform on [a, b)), "normal" (mean a, std b), "truncated" (this
    normal cut at 2 std, as a + b nn.init.trunc_normal_ with its defaults), or "sign" (+a or -a).
    a, b: the numbers of the kind.

    >>> init.normal(0.0, 0.02) == init.Init("normal", 0.0, 0.02)
    True
    """

    kind: str
    a: float = 0.0
    b: float = 0.0

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(unknown("kind of initialisation", self.kind, KINDS))

    @property
    def spread(self) -> float:
        """The factor of the random number: b - a for "between", else b."""
        return self.b - self.a if self.kind == "between" else self.b

    def make(self, w: Tensor) -> Tensor:
        """Return fp32 values from random words: two words a value for "normal", else one."""
        match self.kind:
            case "constant":
                return torch.full_like(w, self.a, dtype=torch.float32)
            case "sign":
                return self.a * ((w & 1) * 2 - 1).float()
            case "between":
                return self.a + self.spread * philox.fractions(w)
            case "normal":
                u, v = philox.fractions(w[0::2]), philox.fractions(w[1::2])
                r = torch.sqrt(-2 * torch.log1p(-u))
                return self.a + self.b * r * torch.cos(2 * math.pi * v)
            case _:  # "truncated"
                edge = math.erf(2 / math.sqrt(2))  # the probability within 2 std
                u = torch.erfinv((2 * philox.fractions(w) - 1) * edge)
                return self.a + self.b * (u * math.sqrt(2)).clamp(-2, 2)


@dataclass(frozen=True)
class Spec:
    """How one parameter is made.

    name: the parameter's name in the model. It selects the random stream.
    init: the distribution.
    seed: the key of the random numbers.
    shape: the parameter's shape.

    >>> init.seeded_(model, seed=0).entries["0.weight"].seed
    0
    """

    name: str
    init: Init
    seed: int
    shape: tuple[int, ...]

    @cached_property
    def stream(self) -> int:
        return int.from_bytes(hashlib.blake2b(self.name.encode(), digest_size=8).digest(), "little")

    def values(self, index: range | Tensor, device: torch.device) -> Tensor:
        """Return the elements of the flattened parameter with these indices, in fp32."""
        w = 2 if self.init.kind == "normal" else 1  # random words for each element
        key = self.seed & 0xFFFFFFFF, self.seed >> 32 & 0xFFFFFFFF
        if isinstance(index, range):
            words = philox.words(w * index.start, w * index.stop, key, self.stream, device)
        else:
            each = (index.unsqueeze(-1) * w + torch.arange(w, device=device)).flatten()
            words = philox.words_at(each, key, self.stream)
        return self.init.make(words)


class Seeded(NamedTuple):
    """z0 of this rank's shard of the parameter p, made from its spec and rounded to p's dtype."""

    spec: Spec
    p: Tensor

    def elements(self, begin: int, stop: int) -> Tensor:
        """Return elements begin..stop-1 of the flattened shard."""
        index = sharded.element_indices(self.p, begin, stop)
        return self.spec.values(index, sharded.local(self.p).device).to(self.p.dtype)
