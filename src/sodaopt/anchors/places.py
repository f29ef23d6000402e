"""Where z0, the initial weights, lives: the pull needs them for ever.

    clone      a copy in the parameter's dtype                             exact
    bf16       half of that; the weights are rounded to bf16 once, at the start  exact
    cpu        a copy on the host, pinned, brought over at each step   exact
    constant   one number, for parameters that start at zero or one        exact
    file       a memory-mapped safetensors file: finetuning, or a frozen reference model
    seed       made again from (seed, parameter, element): see `sodaopt.init`
    auto       constant where it can be, else clone

An anchor is asked at a parameter's first step what to keep in the optimizer's state (`take`), and
then to pull toward z0 at each step (`pull_`). What is not at hand in the right dtype and on the
right device is widened on the way, where there is a pass for it, or comes in buckets, so that no
second copy of the weights is ever made.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from sodaopt._bare import owner
from sodaopt._errors import times, unknown
from sodaopt.anchors import seeded as init
from sodaopt.anchors.pull import Piece, lerp_, lerp_to_numbers_, pull_in_buckets_
from sodaopt.anchors.seeded import Seeds, Spec
from sodaopt.parallel import sharded


class Anchor:
    """Where z0 lives. A subclass writes `take` and `give`.

    apart: z0 may differ from the weights at the first step, so that step pulls already.
    """

    apart: ClassVar[bool] = False

    def take(self, p: Tensor, first: bool) -> Tensor:
        """What to keep of p as it is now. first: its first step begins (before that, weights may
        still be loaded, so nothing is checked or changed)."""
        raise NotImplementedError

    def give(self, p: Tensor, kept: Tensor) -> Tensor:
        """z0 of this rank's part of p, on its device; or one number for all of it."""
        raise NotImplementedError

    def source(self, p: Tensor, kept: Tensor) -> Tensor:
        """z0 of this rank's part of p where it lies, on any device and in any dtype."""
        return self.give(p, kept)

    def dtype_of(self, p: Tensor, z: Tensor) -> torch.dtype:
        """The dtype that z0 counts in, given what `source` said."""
        return z.dtype

    def pull_(self, ps: list[Tensor], xs: list[Tensor], kept: list[Tensor], lam: Any) -> None:
        """x <- (1-lam) x + lam z0 for this rank's part x of each p."""
        near: tuple[list[Tensor], list[Tensor]] = [], []
        flat: tuple[list[Tensor], list[float]] = [], []
        far: list[Piece] = []
        compiling = torch.compiler.is_compiling()
        for p, x, t in zip(ps, xs, kept, strict=True):
            z = self.source(p, t)
            dtype = self.dtype_of(p, z)
            if x.is_meta:  # a prediction of memory, where a shard may look like a whole
                continue
            if z.shape != x.shape and compiling:
                x.add_((z.to(x.dtype) - x) * lam)  # a number of the host goes with any device
            elif z.shape != x.shape and not z.is_cpu:
                x.lerp_(z.to(x.dtype), lam)  # a look at it would stall
            elif z.shape != x.shape:
                flat[0].append(x)
                flat[1].append(float(z))
            elif z.device == x.device and (z.dtype == dtype == x.dtype or compiling):
                near[0].append(x)
                near[1].append(z.to(dtype).to(x.dtype) if compiling else z)  # which fuses the casts
            else:
                far.append((x, z, dtype))
        if near[0]:
            lerp_(*near, lam)
        if flat[0]:
            lerp_to_numbers_(*flat, lam)
        if far:
            pull_in_buckets_(far, lam)

    def place(self, kept: Tensor, p: Tensor) -> Tensor:
        """A kept tensor that was loaded, where it belongs; always a copy."""
        self.check(kept, p)
        return kept.detach().to(p.device, copy=True)

    def check(self, kept: Tensor, p: Tensor) -> None:
        """Raise if what was loaded is no z0."""
        if kept.numel() == 0 != p.numel():
            raise ValueError(
                f"the state to load keeps no z0 (it was made from a seed or a file), and "
                f"{type(self).__name__} needs one: use the anchor it was saved with"
            )

    def written(self, kept: Tensor, p: Tensor) -> Tensor:
        """A kept tensor as a checkpoint has it: of a shape that says nothing of the values, since
        a distributed checkpoint is loaded into what an optimizer of other weights has kept."""
        return kept


def nothing(p: Tensor) -> Tensor:
    """What is kept of a z0 that lives elsewhere: a mark that the parameter has been seen."""
    return torch.empty(0, dtype=torch.float32, device=p.device)


class Elsewhere(Anchor):
    """An anchor that keeps nothing of the weights."""

    def place(self, kept: Tensor, p: Tensor) -> Tensor:
        if kept.numel() and p.numel():
            raise ValueError(
                f"the state to load brings its own z0, and {type(self).__name__} has another: use "
                "the anchor it was saved with, such as anchor='clone'"
            )
        return nothing(p)


@dataclass(frozen=True)
class Clone(Anchor):
    """A copy, in the parameter's dtype or another."""

    dtype: torch.dtype | None = None

    def take(self, p: Tensor, first: bool) -> Tensor:
        return p.detach().to(self.dtype or p.dtype, copy=True)

    def give(self, p: Tensor, kept: Tensor) -> Tensor:
        return sharded.local(kept)


@dataclass(frozen=True)
class Rounded(Clone):
    """A bf16 copy of weights that are rounded to bf16 first: half the memory, and exact."""

    def take(self, p: Tensor, first: bool) -> Tensor:
        z0 = p.detach().to(torch.bfloat16, copy=True)
        if first:
            with torch.no_grad():
                p.copy_(z0)
        return z0


@dataclass(frozen=True)
class Host(Anchor):
    """A copy in pinned memory of the host, brought to the device a bucket ahead of its use."""

    def take(self, p: Tensor, first: bool) -> Tensor:
        return self.place(p, p)

    def give(self, p: Tensor, kept: Tensor) -> Tensor:
        return sharded.local(kept).to(p.device, non_blocking=True)

    def source(self, p: Tensor, kept: Tensor) -> Tensor:
        return sharded.local(kept)

    def place(self, kept: Tensor, p: Tensor) -> Tensor:
        self.check(kept, p)
        if p.is_meta:
            return torch.empty_like(p)
        z0 = kept.detach().to("cpu", copy=True)
        return sharded.pinned(z0) if p.is_cuda else z0


@dataclass(frozen=True)
class Constant(Anchor):
    """One number where all elements are equal, kept on the host, which looks at it at each step;
    elsewhere what `other` does."""

    other: Anchor = field(default_factory=Clone)

    def take(self, p: Tensor, first: bool) -> Tensor:
        kept = self.other.take(p, first)  # the number has the dtype of what it stands for
        value = constant_of(p if p.is_meta else kept)
        return kept if value is None else _on_host(value.to(kept.dtype))

    def give(self, p: Tensor, kept: Tensor) -> Tensor:
        return kept if kept.dim() < p.dim() else self.other.give(p, kept)

    def source(self, p: Tensor, kept: Tensor) -> Tensor:
        return kept if kept.dim() < p.dim() else self.other.source(p, kept)

    def place(self, kept: Tensor, p: Tensor) -> Tensor:
        self.check(kept, p)
        value = kept if kept.dim() < p.dim() else constant_of(kept)
        return self.other.place(kept, p) if value is None else _on_host(value.clone())

    def written(self, kept: Tensor, p: Tensor) -> Tensor:
        if kept.dim() == p.dim():
            return self.other.written(kept, p)
        part = sharded.local(p)
        return sharded.like(kept.to(part.device).expand(part.shape).contiguous(), p)


def _on_host(t: Tensor) -> Tensor:
    return t if t.is_meta else t.cpu()


def constant_of(p: Tensor) -> Tensor | None:
    """The one value that all elements of p have, on every rank; None where they differ."""
    if p.dim() == 0 or p.numel() <= 1:
        return None
    if p.is_meta:  # no values to look at
        return torch.empty((), dtype=p.dtype, device="meta") if owner(p) in _CONSTANT else None
    return sharded.constant(p)


_CONSTANT: set[Tensor] = set()


@contextmanager
def known_constants(params: set[Tensor]) -> Iterator[None]:
    """Meta parameters that would be constant if they had values: for predictions of memory."""
    _CONSTANT.update(params)
    try:
        yield
    finally:
        _CONSTANT.difference_update(params)


class FromFile(Elsewhere):
    """z0 in safetensors files that stay on disk, mapped into memory: the pretrained weights.

    rename: the file's name of a parameter from the model's, where they differ.
    """

    apart: ClassVar[bool] = True

    def __init__(
        self, path: str | Path, model: nn.Module, rename: Callable[[str], str] = str
    ) -> None:
        self.path, self.tensors = path, open_safetensors(path)
        self.model, self.rename = model, rename
        self._names: dict[Tensor, str] = {}

    def __reduce__(self) -> Any:  # a copy maps the file again
        return type(self), (self.path, self.model, self.rename)

    def take(self, p: Tensor, first: bool) -> Tensor:
        z0 = self._find(owner(p))
        if tuple(z0.shape) != tuple(p.shape) and not p.is_meta:
            raise ValueError(
                f"the anchor file has {times(z0.shape)} where the parameter is {times(p.shape)}"
            )
        return nothing(p)

    def give(self, p: Tensor, kept: Tensor) -> Tensor:
        return self.source(p, kept).to(p.device, owner(p).dtype)

    def source(self, p: Tensor, kept: Tensor) -> Tensor:
        return sharded.part(self._find(owner(p)), p)

    def dtype_of(self, p: Tensor, z: Tensor) -> torch.dtype:
        return owner(p).dtype  # z0 is what the parameter would hold if it were loaded from the file

    def _find(self, p: Tensor) -> Tensor:
        if p not in self._names:
            self._names = {q: self.rename(n) for n, q in self.model.named_parameters()}
        if p not in self._names:
            raise ValueError(f"a parameter of shape {times(p.shape)} is none of the anchor's model")
        if self._names[p] not in self.tensors:
            raise ValueError(unknown("tensor in the anchor file", self._names[p], self.tensors))
        return self.tensors[self._names[p]]


def open_safetensors(path: str | Path) -> dict[str, Tensor]:
    """The tensors of a safetensors file (or of all in a folder), mapped, not read."""
    path = Path(path)
    if path.is_dir():
        files = sorted(path.glob("*.safetensors"))
        return {n: t for f in files for n, t in open_safetensors(f).items()}
    with path.open("rb") as f:
        (length,) = struct.unpack("<Q", f.read(8))
        header: dict[str, Any] = json.loads(f.read(length))
    data = torch.from_file(str(path), size=path.stat().st_size, dtype=torch.uint8)
    out = {}
    for name, entry in header.items():
        if name != "__metadata__" and entry["dtype"] in SAFETENSORS:  # weights, not counters
            begin, end = entry["data_offsets"]
            raw = data[8 + length + begin : 8 + length + end]
            out[name] = raw.view(SAFETENSORS[entry["dtype"]]).view(entry["shape"])
    return out


SAFETENSORS: Mapping[str, torch.dtype] = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
}  # fmt: skip


CHECKED = 1 << 18  # elements of each parameter that are compared with their seed


@dataclass(frozen=True)
class Regenerated(Elsewhere):
    """z0 made again from its seed at each step. The first elements are compared once: a parameter
    that is not what its seed says would be pulled somewhere else in silence."""

    seeds: Seeds

    def take(self, p: Tensor, first: bool) -> Tensor:
        p = owner(p)
        spec = self._spec(p)
        if first and not p.is_meta:
            part = sharded.local(p.detach()).reshape(-1)
            same = spec.shape == tuple(p.shape)
            z0 = init.regenerated(p, spec, CHECKED) if same else None
            if z0 is None or not torch.equal(part[: len(z0)], z0):
                raise ValueError(
                    f"{spec.name} ({times(p.shape)}) is not what its seed says: it was loaded, "
                    "resized or changed after seeded_(); seed it again, or use another anchor"
                )
        return nothing(p)

    def give(self, p: Tensor, kept: Tensor) -> Tensor:
        p = owner(p)
        return init.regenerated(p, self._spec(p)).view(sharded.local(p).shape)

    def pull_(self, ps: list[Tensor], xs: list[Tensor], kept: list[Tensor], lam: Any) -> None:
        pairs = list(zip(xs, map(owner, ps), strict=True))
        rows = [(x.view(-1), p, self._spec(p)) for x, p in pairs if x.is_contiguous()]
        init.regenerate_(
            [x for x, _, _ in rows], [p for _, p, _ in rows], [s for *_, s in rows], lam
        )
        for x, p in pairs:
            if not x.is_contiguous():  # such as channels_last: numbered in another order
                x.lerp_(self.give(p, x).to(x.dtype), lam)

    def _spec(self, p: Tensor) -> Spec:
        spec = self.seeds.of(p)
        if spec is None:
            raise ValueError(
                f"a parameter of shape {times(p.shape)} was not filled by sodaopt.init.seeded_"
            )
        return spec


ANCHORS: dict[str, Callable[[], Anchor]] = {
    "clone": Clone,
    "bf16": Rounded,
    "cpu": Host,
    "constant": Constant,
    "auto": Constant,
}


def anchor(spec: Any) -> Anchor:
    """An anchor from its name, from `Seeds`, or an object of one's own."""
    if isinstance(spec, Seeds):
        return Regenerated(spec)
    if isinstance(spec, str):
        if spec == "seed":
            raise ValueError(
                'anchor="seed" needs to know the seeds: seeds = sodaopt.init.seeded_(model, 0) '
                "before training, then anchor=seeds"
            )
        if spec not in ANCHORS:
            raise ValueError(unknown("anchor", spec, [*ANCHORS, "seed"]))
        return ANCHORS[spec]()
    if not isinstance(spec, Anchor):
        raise TypeError(f"an anchor is a name, Seeds, or an Anchor object, got {spec!r}")
    return spec
