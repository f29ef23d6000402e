"""The wrappers around AdamW: what the matrix, the frameworks and the kill test run."""

from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import AdamW
from torch.optim import lr_scheduler as lrs

from sodaopt import GPA, SNOO, Lookahead, ScheduleFree, SODAWrapper
from sodaopt.wrapping import Wrapper
from tests.training import LR, STEPS, network

HALF = STEPS // 2

# A short cycle, so that HALF a run stops in the middle of one.
WRAPPERS: dict[str, tuple[type[Wrapper], dict[str, Any]]] = {
    "SODAWrapper": (SODAWrapper, {}),
    "ScheduleFree": (ScheduleFree, {}),
    "GPA": (GPA, {}),
    "Lookahead": (Lookahead, {"every": 2}),
    "SNOO": (SNOO, {"every": 2}),
}


def wrap(name: str, params: Any, lr: Any = LR, **base: Any) -> Wrapper:
    cls, options = WRAPPERS[name]
    return cls(AdamW(params, lr, weight_decay=0, **base), **options)


def class_form(name: str) -> type[Wrapper]:
    cls, options = WRAPPERS[name]
    return cls.of(AdamW, **options)


def started(name: str, dtype: torch.dtype = torch.float64, **base: Any) -> tuple[nn.Module, Any]:
    model = network(dtype)
    return model, wrap(name, model.parameters(), **base)


def warmup(opt: Any) -> lrs.LambdaLR:
    """The first step has lr = 0."""
    return lrs.LambdaLR(opt, lambda k: min(k / 3, 1.0))


def loss_of(model: nn.Module, X: Tensor, Y: Tensor) -> Tensor:
    return (model(X) - Y).square().mean()


def missing(*needs: str) -> str:
    """Those packages that are not installed; of "a or b" one is enough."""
    return ", ".join(n for n in needs if not any(map(find_spec, n.split(" or "))))


def keys(opt: Wrapper) -> set[str]:
    """The names of the wrapper's own tensors."""
    n = len(opt.prefix) + 1
    names = {k for s in opt.state.values() for k in s if k.startswith(f"{opt.prefix}_")}
    return {k[n:] for k in names}
