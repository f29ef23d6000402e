"""Where z0, the initial weights, lives: the pull needs them at every step.

    clone  a copy in the parameter's dtype
    bf16   a copy in bf16, after rounding the weights to bf16 once
    cpu    a pinned copy on the host, copied to the device at each step
    auto   one number if all elements are equal, else a clone
    file   a memory-mapped safetensors file, for finetuning: see `FromFile`
    seed   made again from (seed, parameter, element): see `sodaopt.init`

The first four are exact, and so is a file in the dtype of the parameters.

At a parameter's first step an anchor returns the tensor to keep in the optimizer's state
(`capture`). At each step it returns a `Source` of z0 (`source`), and `pull_` pulls toward it.
"""

from typing import Any, Literal, TypeAlias

from sodaopt._errors import unknown
from sodaopt.anchors.elsewhere import Elsewhere, FromFile
from sodaopt.anchors.pull import Source, inverse, pull_, value
from sodaopt.anchors.stored import Anchor, Clone, Constant, Host, Rounded, constant_of

__all__ = [
    "ANCHORS", "Anchor", "AnchorName", "Clone", "Constant", "Elsewhere", "FromFile", "Host",
    "Rounded", "Source", "anchor", "constant_of", "inverse", "pull_", "value",
]  # fmt: skip

AnchorName: TypeAlias = Literal["auto", "clone", "bf16", "cpu"]
"""The names of anchors."""
ANCHORS: dict[str, type[Anchor]] = {"clone": Clone, "bf16": Rounded, "cpu": Host, "auto": Constant}
"""The anchors that have a name."""


def anchor(spec: Any) -> Anchor:
    """Return an anchor by its name, or an Anchor object as it is.

    spec: a name in ANCHORS, or an Anchor.

    >>> anchors.anchor("bf16") == anchors.Rounded()
    True
    """
    if isinstance(spec, str):
        if spec not in ANCHORS:
            raise ValueError(
                f"{unknown('anchor', spec, ANCHORS)} (for a file: anchors.FromFile(path, model), "
                "for a seed: seeds = sodaopt.init.seeded_(model, 0) before training)"
            )
        return ANCHORS[spec]()
    if not isinstance(spec, Anchor):
        raise TypeError(f"anchor must be one of {list(ANCHORS)} or an Anchor object, got {spec!r}")
    return spec
