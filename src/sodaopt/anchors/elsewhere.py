"""Anchors that keep nothing in the optimizer's state: z0 is in a file, or made from a seed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from sodaopt._errors import times, unknown
from sodaopt.anchors.distributions import Seeded, Spec
from sodaopt.anchors.init import Seeds
from sodaopt.anchors.pull import Source, value
from sodaopt.anchors.stored import Elsewhere, nothing, original
from sodaopt.parallel import sharded


class FromFile(Elsewhere):
    """z0 in safetensors files that stay on disk, mapped into memory: the pretrained weights.

    path: a file, or a folder of them.
    rename: maps the model's name of a parameter to the file's name.
    """

    differs: ClassVar[bool] = True

    def __init__(
        self, path: str | Path, model: nn.Module, rename: Callable[[str], str] = str
    ) -> None:
        self.path, self.tensors = path, open_safetensors(path)
        self.model, self.rename = model, rename
        self._names: dict[Tensor, str] = {}

    def __reduce__(self) -> Any:  # a copy maps the file again
        return type(self), (self.path, self.model, self.rename)

    def capture(self, p: Tensor, first: bool) -> Tensor:
        z0 = self._find(original(p))
        if tuple(z0.shape) != tuple(p.shape) and not p.is_meta:
            raise ValueError(
                f"the anchor file has {times(z0.shape)} for {self._names[original(p)]}, and the "
                f"parameter is {times(p.shape)}: use the file of this model"
            )
        return nothing(p)

    def source(self, p: Tensor, kept: Tensor) -> Source:
        return sharded.part(self._find(original(p)), p)

    def _find(self, p: Tensor) -> Tensor:
        if p not in self._names:
            self._names = {q: self.rename(n) for n, q in self.model.named_parameters()}
        if p not in self._names:
            raise ValueError(
                f"a parameter of shape {times(p.shape)} is not in the anchor's model: pass the "
                "model whose parameters the optimizer has"
            )
        if self._names[p] not in self.tensors:
            raise ValueError(unknown("tensor in the anchor file", self._names[p], self.tensors))
        return self.tensors[self._names[p]]


def open_safetensors(path: str | Path) -> dict[str, Tensor]:
    """Map the floating-point tensors of a safetensors file, or of all files in a folder."""
    try:
        from safetensors import SafetensorError, safe_open
    except ModuleNotFoundError:
        raise ModuleNotFoundError(
            "anchors.FromFile reads safetensors files: pip install safetensors", name="safetensors"
        ) from None
    path, found = Path(path), {}
    for file in sorted(path.glob("*.safetensors")) if path.is_dir() else [path]:
        try:
            with safe_open(file, framework="pt") as f:
                found.update({name: f.get_tensor(name) for name in f.keys()})  # noqa: SIM118
        except SafetensorError as e:
            raise ValueError(
                f"{file} is damaged or is not a safetensors file ({e}): copy it again"
            ) from None
    return {name: t for name, t in found.items() if t.is_floating_point()}


CHECKED = 1 << 18
"""Elements of each parameter that are compared with their seed."""


@dataclass(frozen=True)
class Regenerated(Elsewhere):
    """z0 made again from its seed at each step.

    The first elements are compared once. Otherwise a parameter that was changed after seeding
    would be pulled to the wrong place without a sign of it.
    """

    seeds: Seeds

    def capture(self, p: Tensor, first: bool) -> Tensor:
        p = original(p)
        spec = self._spec(p)
        if first and not p.is_meta and not _starts_at(p, spec):
            raise ValueError(
                f"{spec.name} ({times(p.shape)}) does not hold the weights of its seed: it was "
                "loaded, resized or changed after seeded_(); seed it again, or use another anchor"
            )
        return nothing(p)

    def source(self, p: Tensor, kept: Tensor) -> Source:
        p = original(p)
        return Seeded(self._spec(p), p)

    def _spec(self, p: Tensor) -> Spec:
        spec = self.seeds.of(p)
        if spec is None:
            raise ValueError(
                f"a parameter of shape {times(p.shape)} was not filled by sodaopt.init.seeded_"
            )
        return spec


def _starts_at(p: Tensor, spec: Spec) -> bool:
    """Whether the first elements of this rank's shard are those of the spec."""
    if spec.shape != tuple(p.shape):
        return False
    shard = sharded.local(p.detach()).reshape(-1)[:CHECKED]
    return torch.equal(shard, value(Seeded(spec, p), shard))
