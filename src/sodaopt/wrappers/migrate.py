"""Continue from another optimizer's checkpoint, and export plain weights.

    opt = SODAWrapper(AdamW(model.parameters(), lr=1e-4, weight_decay=0))
    sodaopt.continue_from(opt, torch.load("adamw.pt")["optimizer"])   # AdamW, Muon, Schedule-Free
    ...
    torch.save(sodaopt.export(model, opt), "weights.pt")

The anchor is the model's weights at the next step, unless the optimizer has another one
(`anchors.FromFile`).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from sodaopt.wrappers.base import Wrapper
from sodaopt.wrappers.known_bases import DECAYS


def continue_from(optimizer: Wrapper, state_dict: dict[str, Any]) -> None:
    """Load the state of another optimizer into a wrapped one of its kind.

    The saved weight decay is dropped, because the pull replaces it. A Schedule-Free state becomes
    an Adam state at the same step with a momentum of zero. Load its weights in eval mode.
    """
    groups = [
        g | {key: off for key, off in DECAYS.items() if key in g}
        for g in state_dict["param_groups"]
    ]
    if groups and "weight_lr_power" in groups[0]:
        state_dict = _from_schedule_free(state_dict)
        groups = state_dict["param_groups"]
    live = optimizer.param_groups
    if len(groups) != len(live):
        raise ValueError(
            f"the checkpoint has {len(groups)} parameter groups and the optimizer {len(live)}: "
            "build the optimizer with the same groups"
        )
    # keys that the checkpoint does not have keep this optimizer's values (foreach, fused, ...)
    merged = [
        {k: v for k, v in current.items() if k != "params"}
        | {k: v for k, v in g.items() if k in current and k not in ("foreach", "fused")}
        | {"params": g["params"]}
        for g, current in zip(groups, live, strict=True)
    ]
    optimizer.load_state_dict({"state": state_dict["state"], "param_groups": merged})


def _from_schedule_free(state_dict: dict[str, Any]) -> dict[str, Any]:
    """Convert AdamWScheduleFree's state to Adam's, with zero momentum."""
    state, groups = {}, []
    for g in state_dict["param_groups"]:
        for n in g["params"]:
            s = state_dict["state"].get(n, {})
            if "exp_avg_sq" in s:
                state[n] = {
                    "step": torch.tensor(float(g["k"])),
                    "exp_avg": torch.zeros_like(s["exp_avg_sq"]),
                    "exp_avg_sq": s["exp_avg_sq"],
                }
        kept = ("lr", "eps", "params")
        groups.append({k: v for k, v in g.items() if k in kept})
    return {"state": state, "param_groups": groups}


@torch.no_grad()
def export(model: nn.Module, optimizer: Optimizer) -> dict[str, Tensor]:
    """Return the model's state dict with the method's output x, as copies on the host.

    The optimizer and the model keep their mode.
    """
    prefix = getattr(optimizer, "prefix", "")
    key = f"{prefix}_train_mode" if prefix else "train_mode"
    training = all(g.get(key, True) for g in optimizer.param_groups)
    switch = [getattr(optimizer, mode, lambda: None) for mode in ("eval", "train")]
    if training:
        switch[0]()
    try:
        return {n: t.detach().to("cpu", copy=True) for n, t in model.state_dict().items()}
    finally:
        if training:
            switch[1]()
