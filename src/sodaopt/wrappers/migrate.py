"""Continue from another optimizer's checkpoint, and export plain weights.

    opt = SODAWrapper(AdamW(model.parameters(), lr=1e-4, weight_decay=0))
    sodaopt.continue_from(opt, torch.load("adamw.pt")["optimizer"], model)   # AdamW, Muon, ...
    ...
    torch.save(sodaopt.export(model, opt), "weights.pt")

The optimizer then pulls toward the model's weights at its next step, unless its anchor has other
weights (`anchors.FromFile`).
"""

from contextlib import ExitStack
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from sodaopt.wrappers.base import Wrapper
from sodaopt.wrappers.known_bases import DECAYS
from sodaopt.wrappers.live import Group


def continue_from(
    optimizer: Wrapper, state_dict: dict[str, Any], model: nn.Module | None = None
) -> None:
    """Load the state of an optimizer into a wrapper around an optimizer of the same kind.

    The weight decay stays that of the wrapper's groups, which is 0 under a pull.

    If the optimizer has other groups than the checkpoint, parameters are matched by name, and the
    groups keep their own settings such as lr. An optimizer that is built from
    `model.named_parameters()` knows the names, and its checkpoint has them.

    optimizer: the wrapped optimizer to load into.
    state_dict: the state dict of the other optimizer.
    model: gives the names if the optimizer or the checkpoint has none. A checkpoint without names
    must then have one group with `model.parameters()`.

    >>> saved = torch.optim.AdamW(model.parameters(), weight_decay=0.1).state_dict()
    >>> opt = SODAWrapper(torch.optim.AdamW(model.parameters(), weight_decay=0))
    >>> sodaopt.continue_from(opt, saved)
    """
    live = optimizer.param_groups
    saved = _regrouped(state_dict["param_groups"], live, model)
    if [len(g["params"]) for g in saved] != [len(g["params"]) for g in live]:
        raise ValueError(
            f"the checkpoint has {len(saved)} parameter groups and the optimizer has {len(live)}, "
            "or the groups differ in size: pass model=, or build the optimizer with the same groups"
        )
    # these keys, and keys that the checkpoint does not have, keep this optimizer's values
    own = {"foreach", "fused", "param_names", *DECAYS}
    merged = [
        current | {k: v for k, v in g.items() if k in current and k not in own}
        for g, current in zip(saved, live, strict=True)
    ]
    optimizer.load_state_dict({"state": state_dict["state"], "param_groups": merged})


def _names(groups: list[Group], known: dict[Any, str]) -> list[list[str]]:
    """The parameter names of each group, or [] if one is unknown.

    known: the names by parameter, or by a parameter's number in the checkpoint.
    """
    if all("param_names" in g for g in groups):
        return [g["param_names"] for g in groups]
    if all(p in known for g in groups for p in g["params"]):
        return [[known[p] for p in g["params"]] for g in groups]
    return []


def _regrouped(saved: list[Group], live: list[Group], model: nn.Module | None) -> list[Group]:
    """Return the checkpoint's groups, sorted by name into groups like the live ones.

    If a name is unknown, or if the names of both are equal, return them unchanged.
    """
    by_param = {p: name for name, p in model.named_parameters()} if model else {}
    is_plain = [len(g["params"]) for g in saved] == [len(by_param)]
    by_number = dict(enumerate(by_param.values())) if is_plain else {}
    theirs, ours = _names(saved, by_number), _names(live, by_param)
    if not theirs or not ours or theirs == ours:
        return saved
    numbers = {
        name: n
        for g, names in zip(saved, theirs, strict=True)
        for n, name in zip(g["params"], names, strict=True)
    }
    if odd := sorted(numbers.keys() ^ {name for names in ours for name in names}):
        raise ValueError(
            f"{odd[0]} is in the checkpoint or in the optimizer, but not in both: build the "
            "optimizer with the parameters of the checkpoint"
        )
    return [{"params": [numbers[name] for name in names]} for names in ours]


def export(model: nn.Module, optimizer: Optimizer) -> dict[str, Tensor]:
    """Return the model's state dict with the method's output x as the weights, copied to the CPU.

    Afterwards the optimizer and the model are in the same mode as before.

    model: the model that is trained.
    optimizer: the model's optimizer: `SODA`, a wrapper or any other.

    >>> opt = GPA(torch.optim.AdamW(model.parameters(), lr=1e-3))
    >>> sorted(sodaopt.export(model, opt)) == sorted(model.state_dict())
    True
    """
    modes = [v for g in optimizer.param_groups for k, v in g.items() if k.endswith("train_mode")]
    with ExitStack() as afterwards:
        if modes and all(modes):
            switches: Any = optimizer
            switches.eval()
            afterwards.callback(switches.train)
        return {n: t.detach().to("cpu", copy=True) for n, t in model.state_dict().items()}
