"""Fill a model from a seed, so that its initial weights need no memory.

    seeds = sodaopt.init.seeded_(model, seed=0)
    opt = SODAWrapper(AdamW(model.parameters(), weight_decay=0), anchor=seeds)

`seeded_` fills a model with the distributions of torch's default initialisers. z0 is then made
again at each step, in registers on a GPU and slice by slice elsewhere. Uniform and sign weights
have the same bits on every device. Normal weights have the same bits on devices of one kind.
"""

import math
from collections.abc import Callable, Mapping
from typing import TypeAlias

import torch
from torch import Tensor, nn

from sodaopt._errors import times
from sodaopt.anchors.distributions import KINDS, Init, Seeded, Spec
from sodaopt.anchors.elsewhere import Elsewhere, parameter_of
from sodaopt.anchors.pull import Source, pull_, value
from sodaopt.parallel import sharded

__all__ = [
    "KINDS", "Init", "Rules", "Seeds", "Spec", "between", "constant", "default", "normal",
    "seeded_", "sign", "truncated",
]  # fmt: skip


def constant(value: float) -> Init:
    """Every element is `value`.

    value: a number.

    >>> init.constant(1.0).a
    1.0
    """
    return Init("constant", value)


def between(low: float, high: float) -> Init:
    """Uniform on [low, high).

    low, high: the ends, low <= high.

    >>> init.between(-0.1, 0.1).kind
    'between'
    """
    return Init("between", low, high)


def normal(mean: float = 0.0, std: float = 1.0) -> Init:
    """Normal: mean + std N(0, 1).

    mean, std: its mean and its standard deviation, std >= 0.

    >>> init.normal(std=0.02).b
    0.02
    """
    return Init("normal", mean, std)


def truncated(mean: float = 0.0, std: float = 1.0) -> Init:
    """mean + std N(0, 1) within [mean - 2 std, mean + 2 std].

    mean, std: the mean and the standard deviation before the cut, std >= 0.

    >>> init.truncated(std=0.02).b
    0.02
    """
    return Init("truncated", mean, std)


def sign(scale: float) -> Init:
    """+scale or -scale with equal odds.

    scale: the absolute value of every element.

    >>> init.sign(0.5).kind
    'sign'
    """
    return Init("sign", scale)


Rules: TypeAlias = Mapping[str, Init]
"""The distributions of a module's own parameters, by name."""
CONVS = (
    nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d,
)  # fmt: skip
NORMS = (
    nn.LayerNorm, nn.GroupNorm, nn.RMSNorm, nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d,
    nn.SyncBatchNorm,
)  # fmt: skip


def default(module: nn.Module) -> Rules | None:
    """Return the distributions that torch's reset_parameters draws from, by parameter name.

    module: a layer. The result is None if the default of its type is not known.

    >>> sorted(init.default(nn.Linear(4, 2)))
    ['bias', 'weight']
    """
    if isinstance(module, (nn.Linear, *CONVS)):
        fan_in = module.weight.shape[1:].numel()
        bound = 1 / math.sqrt(fan_in) if fan_in else 0.0
        return {"weight": between(-bound, bound), "bias": between(-bound, bound)}
    if isinstance(module, nn.Embedding) and module.padding_idx is None:
        return {"weight": normal()}
    if isinstance(module, NORMS):
        return {"weight": constant(1.0), "bias": constant(0.0)}
    if isinstance(module, nn.RNNBase):
        bound = 1 / math.sqrt(module.hidden_size)
        return {name: between(-bound, bound) for name, _ in module.named_parameters()}
    return None


CHECKED = 1 << 18
"""The number of elements of each parameter that are compared with the seed."""


class Seeds(Elsewhere):
    """An anchor that makes z0 again at each step, from a `Spec` of each parameter.

    model: the model that was filled from the seed.
    entries: a `Spec` by the name of each parameter.

    >>> seeds = init.seeded_(model, seed=0)
    >>> adamw = torch.optim.AdamW(model.parameters(), weight_decay=0)
    >>> opt = SODAWrapper(adamw, anchor=seeds)  # no copy of z0
    """

    def check_weights(self, p: Tensor) -> None:
        """Raise if the shape or the first elements of p differ from the seed's weights.

        Without this check, a parameter that was changed after `seeded_` would be pulled to other
        weights than its initial ones, and no error would say so.
        """
        super().check_weights(p)
        spec, shard = self.entry(p), sharded.local(p.detach()).reshape(-1)[:CHECKED]
        if not torch.equal(shard, value(Seeded(spec, p), shard)):
            raise ValueError(
                f"{spec.name} ({times(p.shape)}) does not hold the weights of its seed: it was "
                "loaded or changed after seeded_(). Seed it again, or use another anchor"
            )

    def source(self, p: Tensor, kept: Tensor) -> Source:
        return Seeded(self.entry(p), parameter_of(p))


@torch.no_grad()
def seeded_(
    model: nn.Module, seed: int = 0, rules: Callable[[str, nn.Module], Rules | None] | None = None
) -> Seeds:
    """Fill every parameter of the model from the seed, and return the anchor that makes z0 again.

    model: the model, which is changed in place.
    seed: the same seed and names of parameters give the same weights.
    rules: a function of a module's name and the module. It returns the distributions of its own
    parameters by name, or None for torch's default of that type. A module without a default needs
    a rule.

    >>> seeds = init.seeded_(model, seed=0, rules=lambda name, module: None)  # torch's defaults
    """
    specs = {}
    for name, p in model.named_parameters():  # a tied parameter has the rule of its first owner
        path, _, short = name.rpartition(".")
        module = model.get_submodule(path)
        given = {**(default(module) or {}), **((rules(path, module) if rules else None) or {})}
        if short not in given:
            raise ValueError(
                f"no initialisation is known for {name} ({times(p.shape)}) of a "
                f"{type(module).__name__}: give one by rules=lambda path, module: "
                f"{{{short!r}: sodaopt.init.normal(0, 0.02)}}"
            )
        specs[name] = Spec(name, given[short], seed, tuple(p.shape))
        pull_([sharded.local(p).zero_()], [Seeded(specs[name], p)], 1.0)
    return Seeds(model, specs)
