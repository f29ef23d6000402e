"""Anchors that keep nothing in the optimizer's state, and find z0 by the parameter's name."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from sodaopt._errors import times, unknown
from sodaopt.anchors.pull import Source
from sodaopt.anchors.stored import Anchor
from sodaopt.parallel import sharded


def parameter_of(p: Tensor) -> Tensor:
    """Return p, or the 16-bit parameter if p is its fp32 copy in a wrapped optimizer's step."""
    return getattr(p, "fp32_copy_of", p)


class Elsewhere(Anchor):
    """An anchor that keeps no copy of the weights, and finds z0 by the parameter's name.

    model: gives the names of the parameters. The optimizer has the same parameters.
    entries: a tensor or a `Spec` of z0 for each name.

    >>> issubclass(anchors.FromFile, anchors.Elsewhere)
    True
    """

    writable = False

    def __init__(self, model: nn.Module, entries: Mapping[str, Any]) -> None:
        self.model, self.entries = model, entries
        self._names: dict[Tensor, str] = {}  # not by id, which a new tensor may reuse

    def name_of(self, p: Tensor) -> str:
        """Return the name of p in `entries`, also after a framework has replaced the parameters."""
        p = parameter_of(p)
        if p not in self._names:
            self._names = {q: name for name, q in self.model.named_parameters()}
        if p not in self._names:
            raise ValueError(
                f"a parameter of shape {times(p.shape)} is not in the anchor's model: pass the "
                "model whose parameters the optimizer has"
            )
        return self._names[p]

    def entry(self, p: Tensor) -> Any:
        """Return the entry of p."""
        name = self.name_of(p)
        if name not in self.entries:
            raise ValueError(unknown(f"parameter in {type(self).__name__}", name, self.entries))
        return self.entries[name]

    def capture(self, p: Tensor, first: bool) -> Tensor:
        """Check the weights at the first step. Return an empty tensor as the z0 in the state."""
        if first and not p.is_meta:
            self.check_weights(parameter_of(p))
        return torch.empty(0, dtype=torch.float32, device=p.device)

    def check_weights(self, p: Tensor) -> None:
        """Raise if z0 of p is missing or has another shape."""
        shape = self.entry(p).shape
        if tuple(shape) != tuple(p.shape):
            raise ValueError(
                f"z0 of {self.name_of(p)} is {times(shape)} in {type(self).__name__}, but the "
                f"parameter is {times(p.shape)}. Use the file or the seeds of this model"
            )


class FromFile(Elsewhere):
    """z0 in safetensors files that stay on disk, mapped into memory: the pretrained weights.

    path: a file, or a folder of them.
    model: gives the names of the parameters. The optimizer has the same parameters.
    rename: maps the model's name of a parameter to the file's name.

    >>> from safetensors.torch import save_file
    >>> from tempfile import mkdtemp
    >>> path = f"{mkdtemp()}/model.safetensors"
    >>> save_file(model.state_dict(), path)
    >>> z0 = anchors.FromFile(path, model)
    """

    def __init__(
        self, path: str | Path, model: nn.Module, rename: Callable[[str], str] = str
    ) -> None:
        super().__init__(model, open_safetensors(path))
        self.path, self.rename = path, rename

    def __reduce__(self) -> Any:  # a copy maps the file again
        return type(self), (self.path, self.model, self.rename)

    def name_of(self, p: Tensor) -> str:
        return self.rename(super().name_of(p))

    def source(self, p: Tensor, kept: Tensor) -> Source:
        return sharded.part(self.entry(p), p)


def open_safetensors(path: str | Path) -> dict[str, Tensor]:
    """Map the floating-point tensors of a safetensors file, or of all files in a folder."""
    try:
        from safetensors import SafetensorError
        from safetensors.torch import load_file
    except ModuleNotFoundError:
        raise ModuleNotFoundError(
            "anchors.FromFile reads safetensors files: pip install safetensors", name="safetensors"
        ) from None
    path, found = Path(path), {}
    for file in sorted(path.glob("*.safetensors")) if path.is_dir() else [path]:
        try:
            found.update(load_file(file))  # load_file maps the file and copies nothing
        except SafetensorError as e:
            raise ValueError(
                f"{file} is damaged or is not a safetensors file ({e}): copy it again"
            ) from None
    return {name: t for name, t in found.items() if t.is_floating_point()}
