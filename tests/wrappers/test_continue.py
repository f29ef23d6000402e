"""Runs of other optimizers continue under SODA, and weights are exported as plain tensors."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import Parameter
from torch.optim import SGD, Adam, AdamW, Muon

from sodaopt import GPA, SODA, ScheduleFree, SODAWrapper, anchors, continue_from, export, zoo
from tests.support.tables import network


def feed(opt: Any, ps: list[Parameter], steps: range) -> None:
    for k in steps:
        for p in ps:
            rng = torch.Generator().manual_seed(k)
            p.grad = torch.randn(p.shape, generator=rng, dtype=torch.float64).to(p.dtype)
        opt.step()


@pytest.mark.parametrize("cls", [AdamW, Muon, Adam, SGD], ids=lambda c: c.__name__)
def test_from_a_checkpoint_with_decay(cls: Any) -> None:
    old, new = network(torch.float32), network(torch.float32, seed=1)
    running = cls(old, lr=0.01, weight_decay=0.1)
    feed(running, old, range(4))
    opt = SODAWrapper(cls(new, lr=0.5, weight_decay=0))
    continue_from(opt, running.state_dict())
    for w, v in zip(new, old, strict=True):
        w.data.copy_(v)
        assert opt.state[w].keys() == running.state[v].keys()
        assert all(torch.equal(opt.state[w][key], t) for key, t in running.state[v].items())
    z0 = [w.detach().clone() for w in new]
    assert opt.param_groups[0]["weight_decay"] == 0
    assert opt.param_groups[0]["lr"] == 0.01
    feed(opt, new, range(4, 6))
    for w, z in zip(new, z0, strict=True):
        assert torch.equal(opt.state[w]["soda_z0"], z)


@pytest.mark.parametrize("setting", ["foreach", "fused"])
@pytest.mark.parametrize("value", [None, False])
def test_the_implementation_is_the_optimizers(setting: str, value: bool | None) -> None:
    """A checkpoint from a GPU may have settings that this device does not support."""
    old, new = network(torch.float32), network(torch.float32)
    running = AdamW(old, **{setting: True})
    feed(running, old, range(2))
    opt = SODAWrapper(AdamW(new, weight_decay=0, **{setting: value}))
    continue_from(opt, running.state_dict())
    assert opt.param_groups[0][setting] is value
    feed(opt, new, range(2, 4))


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2))


def split(model: nn.Module, named: bool, **more: Any) -> list[dict[str, Any]]:
    """Return groups of vectors and of matrices, which is another order than the model's."""
    params = [(n, p) if named else p for n, p in model.named_parameters()]
    dims = [p.dim() for p in model.parameters()]
    return [
        {"params": [p for p, d in zip(params, dims, strict=True) if d == 1]},
        {"params": [p for p, d in zip(params, dims, strict=True) if d == 2], **more},
    ]


NAMES = {  # the checkpoint has names, the optimizer has names, the model is given
    "all": (True, True, False),
    "the checkpoint's and the model's": (True, False, True),
    "the model's": (False, False, True),
}


@pytest.mark.parametrize(("saved", "live", "given"), NAMES.values(), ids=NAMES)
def test_other_groups_are_matched_by_name(saved: bool, live: bool, given: bool) -> None:
    old, new = net(), net()
    running = AdamW(old.named_parameters() if saved else old.parameters(), lr=0.1)
    feed(running, list(old.parameters()), range(3))
    opt = SODAWrapper(AdamW(split(new, live, lr=0.7), lr=0.5, weight_decay=0))
    continue_from(opt, running.state_dict(), new if given else None)
    for p, q in zip(old.parameters(), new.parameters(), strict=True):
        assert opt.state[q]["step"] == 3
        assert torch.equal(opt.state[q]["exp_avg_sq"], running.state[p]["exp_avg_sq"])
    assert [g["lr"] for g in opt.param_groups] == [0.5, 0.7]
    feed(opt, list(new.parameters()), range(3, 5))


def test_other_groups_without_names_are_refused() -> None:
    opt = SODAWrapper(AdamW(network(), weight_decay=0))
    two = AdamW([{"params": network()}, {"params": network()}])
    with pytest.raises(ValueError, match=r"has 2 parameter groups and the optimizer has 1.*model="):
        continue_from(opt, two.state_dict())
    model = net()
    opt = SODAWrapper(AdamW(split(model, True)[:1], weight_decay=0))
    with pytest.raises(ValueError, match=r"0\.weight is in the checkpoint or in the optimizer"):
        continue_from(opt, AdamW(model.named_parameters()).state_dict())


EXPORTS = {
    "SODAWrapper": lambda net: SODAWrapper(SGD(net.parameters(), 0.1)),
    "ScheduleFree": lambda net: ScheduleFree(SGD(net.parameters(), 0.1)),
    "GPA": lambda net: GPA(SGD(net.parameters(), 0.1)),
    "zoo.schedule_free": lambda net: SODA(net.parameters(), 0.1, zoo.schedule_free()),
    "AdamW": lambda net: AdamW(net.parameters()),
}


@pytest.mark.parametrize("make", EXPORTS.values(), ids=EXPORTS)
def test_export(make: Any) -> None:
    net = nn.Linear(4, 3)
    opt = make(net)
    feed(opt, list(net.parameters()), range(5))
    y = [p.detach().clone() for p in net.parameters()]
    x = export(net, opt)
    assert all(torch.equal(p, v) for p, v in zip(net.parameters(), y, strict=True))
    feed(opt, list(net.parameters()), range(5, 6))  # export left it in train mode
    if hasattr(opt, "eval"):
        opt.eval()
        in_eval = export(net, opt)
        assert all(torch.equal(in_eval[n], t) for n, t in net.state_dict().items())
    assert set(x) == {"weight", "bias"}


def test_finetuning_pulls_back_to_the_pretrained_weights(tmp_path: Any) -> None:
    """The pull leads weights that start elsewhere back to the anchor in the file."""
    save = pytest.importorskip("safetensors.torch").save_file
    net = nn.Linear(4, 3)
    save(net.state_dict(), tmp_path / "model.safetensors")
    pretrained = {n: t.clone() for n, t in net.state_dict().items()}
    with torch.no_grad():
        for p in net.parameters():
            p.add_(1.0)
    anchor = anchors.FromFile(tmp_path / "model.safetensors", net)
    opt = SODAWrapper(SGD(net.parameters(), 0.1), anchor=anchor)
    for _ in range(50):
        for p in net.parameters():
            p.grad = torch.zeros_like(p)
        opt.step()
    for n, p in net.named_parameters():
        torch.testing.assert_close(p.detach(), pretrained[n] + 1 / 51, rtol=1e-4, atol=1e-4)
    wide = nn.Linear(4, 5)
    wide_anchor = anchors.FromFile(tmp_path / "model.safetensors", wide)
    opt = SODAWrapper(SGD(wide.parameters(), 0.1), anchor=wide_anchor)
    with pytest.raises(ValueError, match="is 3x4 in FromFile"):
        feed(opt, list(wide.parameters()), range(1))
