"""The wrappers around AdamW, and SODAWrapper with each anchor, by the names that tests of
checkpoints, frameworks and kills run over."""

import os
import tempfile
from collections.abc import Callable
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import AdamW
from torch.optim import lr_scheduler as lrs

from sodaopt import GPA, SNOO, Lookahead, ScheduleFree, SODAWrapper, anchors, init
from sodaopt.wrappers.base import Wrapper
from tests.support.training import LR, STEPS, network, whole

HALF = STEPS // 2

# A short cycle, so that HALF a run stops in the middle of one.
WRAPPERS: dict[str, tuple[type[Wrapper], dict[str, Any]]] = {
    "SODAWrapper": (SODAWrapper, {}),
    "ScheduleFree": (ScheduleFree, {}),
    "GPA": (GPA, {}),
    "Lookahead": (Lookahead, {"every": 2}),
    "SNOO": (SNOO, {"every": 2}),
}

# Each anchor from a new model and its seeds.
POLICIES: dict[str, Callable[[nn.Module, init.Seeds], Any]] = {
    **{name: lambda model, seeds, name=name: name for name in anchors.ANCHORS},
    "clone fp32": lambda model, seeds: anchors.Clone(torch.float32),
    "file": lambda model, seeds: anchors.FromFile(z0_file(model), model),
    "seed": lambda model, seeds: seeds,
}
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
ANCHORED = {f"{policy}, {dtype}": (policy, dtype) for policy in POLICIES for dtype in DTYPES}


def dtype_of(name: str, default: torch.dtype = torch.float64) -> torch.dtype:
    return DTYPES[ANCHORED[name][1]] if name in ANCHORED else default


def prepared(name: str, model: nn.Module, seed: int = 0) -> nn.Module:
    """Give a new model its anchor. Models have equal weights for all anchors, and zero biases."""
    if name in ANCHORED:
        seeds = init.seeded_(model, seed, rules)
        model.z0 = POLICIES[ANCHORED[name][0]](model, seeds)
    return model


def rules(path: str, module: nn.Module) -> init.Rules:
    def rule(short: str, p: Tensor) -> init.Init:
        if p.dim() == 1:
            return init.constant(0.0 if "bias" in short else 1.0)
        return init.between(-(p.shape[-1] ** -0.5), p.shape[-1] ** -0.5)

    return {n: rule(n, p) for n, p in module.named_parameters(recurse=False)}


def z0_file(model: nn.Module) -> Path:
    from safetensors.torch import save_file

    number, path = tempfile.mkstemp(".safetensors", dir=_folder().name)
    os.close(number)
    form = torch.contiguous_format
    save_file({n: whole(p).clone(memory_format=form) for n, p in model.named_parameters()}, path)
    return Path(path)


@cache
def _folder() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory()  # it is removed when the process ends


def fresh(name: str, dtype: torch.dtype | None = None) -> nn.Module:
    """Return the model of `started`, before its first step."""
    return prepared(name, network(dtype or dtype_of(name)))


def initial(name: str) -> list[Tensor]:
    """Return the weights from which the first step starts. The anchor "bf16" rounds them."""
    rounded = name in ANCHORED and ANCHORED[name][0] == "bf16"
    ws = [p.detach() for p in fresh(name).parameters()]
    return [w.bfloat16().to(w.dtype) for w in ws] if rounded else ws


def wrap(name: str, params: Any, lr: Any = LR, model: Any = None, **base: Any) -> Wrapper:
    """Return the wrapper around AdamW.

    params: a model, or some of its parameters.
    model: the model with the anchor, if params are parameters.
    """
    model = params if isinstance(params, nn.Module) else model
    params = params.parameters() if isinstance(params, nn.Module) else params
    cls, options = _form(name, model)
    return cls(AdamW(params, lr, weight_decay=0, **base), **options)


def class_form(name: str, model: nn.Module) -> type[Wrapper]:
    cls, options = _form(name, model)
    return cls.of(AdamW, **options)


def _form(name: str, model: Any) -> tuple[type[Wrapper], dict[str, Any]]:
    return (SODAWrapper, {"anchor": model.z0}) if name in ANCHORED else WRAPPERS[name]


def started(name: str, dtype: torch.dtype | None = None, **base: Any) -> tuple[nn.Module, Any]:
    model = fresh(name, dtype)
    return model, wrap(name, model, **base)


def warmup(opt: Any) -> lrs.LambdaLR:
    """The first step has lr = 0."""
    return lrs.LambdaLR(opt, lambda k: min(k / 3, 1.0))


def loss_of(model: nn.Module, X: Tensor, Y: Tensor) -> Tensor:
    return (model(X) - Y).square().mean()


def missing(*needs: str) -> str:
    """Return the packages that are not installed. Of "a or b" one is enough."""
    return ", ".join(n for n in needs if not any(map(find_spec, n.split(" or "))))


def keys(opt: Wrapper) -> set[str]:
    """The names of the wrapper's own tensors."""
    n = len(opt._prefix)
    names = {k for s in opt.state.values() for k in s if k.startswith(opt._prefix)}
    return {k[n:] for k in names}
