"""The plan: overrides, views, initialisation and the printed table."""

import copy
import pickle
import re
from collections.abc import Iterable

import pytest
import torch
from torch import Tensor, nn

import sodaopt
from sodaopt import RECIPES, SODA, hidden, plan, views, zoo
from sodaopt.geometry import (
    Ball,
    Spectral,
    matrix,
    transposed,
)
from sodaopt.geometry.polar import EXACT
from sodaopt.layers.recipes import PARENT, ROLES
from tests.layers.support import CONV1D, model, roles
from tests.support import models
from tests.support.models import make

# -- overrides ------------------------------------------------------------------------------------


def test_the_first_match_wins() -> None:
    p = plan(
        model("gpt2"),
        **{r"h\.0\..*c_attn\.weight": (zoo.adam(), 0.5), "c_attn": 0.25, "wpe": "frozen"},
    )
    rows = {row.name.removeprefix("transformer."): row for row in p.rows}
    assert rows["h.0.attn.c_attn.weight"].method == zoo.adam()
    assert rows["h.0.attn.c_attn.weight"].lr_factor == 0.5
    assert rows["h.1.attn.c_attn.weight"].lr_factor == 0.25
    assert rows["h.0.attn.c_attn.bias"].lr_factor == 0.25
    assert rows["h.1.attn.c_attn.weight"].geometry == CONV1D
    assert rows["wpe.weight"].role == "frozen"
    assert rows["wpe.weight"].state_bytes == 0
    assert rows["wpe.weight"].parameter.requires_grad  # the model is unchanged
    assert "transformer.wpe.weight" not in [n for g in p.groups() for n, _ in g["params"]]


def test_any_name_of_a_tied_parameter_matches() -> None:
    assert plan(model("gpt2"), lm_head="embedding").rows[0].role == "embedding"


def test_a_matrix_role_leaves_the_bias_beside_it() -> None:
    p = plan(model("mlp"), **{r"^3\.": "head"})
    assert roles(p)["3.weight"] == "head"
    assert roles(p)["3.bias"] == "bias"
    assert roles(p)["5.weight"] == "hidden"  # the user's head is the only one


def test_frozen_parameters_are_listed() -> None:
    net = model("gpt")
    net.blocks.requires_grad_(False)
    p = plan(net)
    assert len(p.rows) == 13
    assert sum(row.role == "frozen" for row in p.rows) == 12
    assert len(p.groups()) == 1
    assert hidden(net) == []
    assert "6,144 of them frozen" in str(p)


class Odd(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Module() for _ in range(3))
        for block in self.blocks:
            block.mix = nn.Parameter(torch.zeros(5, 5))
        self.scale, self.shift = nn.Parameter(torch.tensor(1.0)), nn.Parameter(torch.zeros(4))


def test_an_unassigned_parameter_is_an_error_with_the_pattern_to_write() -> None:
    with pytest.raises(ValueError, match="cannot tell the role of 3 parameters") as error:
        plan(Odd())
    assert "blocks.0.mix (5x5) of Module" in str(error.value)
    pattern = re.search(r'r"(.*)": "hidden"', str(error.value))
    assert pattern is not None
    p = plan(Odd(), **{pattern[1]: "hidden"})
    assert [row.role for row in p.rows] == ["scalar", "vector", "hidden", "hidden", "hidden"]
    assert plan(Odd(), mix=zoo.adam()).rows[-1].role == "custom"
    assert plan(Odd(), mix="vector").rows[-1].geometry == "BiasRMS"
    assert plan(Odd(), mix="position").rows[-1].geometry == "Sign(one_hot)"


WRONG = {
    "no match": ({"mixx": "hidden"}, ValueError, r"no parameter matches.*did you mean 'mix'"),
    "shadowed": ({"mix": "hidden", r"0\.mix": "head"}, ValueError, "no effect.*Put it first"),
    "role": ({"mix": "hiden"}, ValueError, "unknown role 'hiden'; did you mean 'hidden'"),
    "regex": ({"(": "hidden"}, ValueError, "not a regular expression"),
    "value": ({"mix": None}, TypeError, "an override is a role"),
    "shape": ({"mix": "hidden", "shift": zoo.muon()}, ValueError, r"shift \(4.*needs a matrix"),
    "cut": ({"mix": ("hidden", views.split(3))}, ValueError, "cannot cut shape 5x5 into 3"),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_overrides(case: str) -> None:
    overrides, error, match = WRONG[case]
    with pytest.raises(error, match=match):
        plan(Odd(), **overrides)


def test_wrong_recipes() -> None:
    net = model("mlp")
    with pytest.raises(ValueError, match="unknown recipe 'muonn'; did you mean 'muon'"):
        plan(net, "muonn")
    with pytest.raises(ValueError, match=r"unknown recipe 'soda\(sgd\)'"):
        plan(net, "soda(sgd)")
    with pytest.raises(ValueError, match="unknown role 'hiden'"):
        plan(net, {"hiden": zoo.muon()})
    with pytest.raises(ValueError, match=r"no rule for 1\.bias.*'bias' or 'vector' or 'rest'"):
        plan(net, {"hidden": zoo.muon()})
    with pytest.raises(TypeError, match="a rule is a Method"):
        plan(net, {"rest": "adam"})
    with pytest.raises(ValueError, match="adam has no norm"):
        plan(net, {"rest": (zoo.adam(), 50.0, 1.0)})


# -- views ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("stored", [matrix, transposed])
def test_a_split_layer_moves_as_its_parts_do(stored: views.View) -> None:
    torch.manual_seed(0)
    flipped = stored is transposed
    d = torch.randn(5, 12) if flipped else torch.randn(12, 5)
    norm = Spectral(view=views.split(3, stored), polar=EXACT)
    parts = d.chunk(3, 1 if flipped else 0)
    one = Spectral(view=stored, polar=EXACT)
    torch.testing.assert_close(
        norm.lmo(d), torch.cat([one.lmo(p) for p in parts], 1 if flipped else 0)
    )
    torch.testing.assert_close(norm.dual(d), sum((one.dual(p) for p in parts), torch.tensor(0.0)))


def test_split_stacks() -> None:
    torch.manual_seed(0)
    d, cut = torch.randn(2, 5, 6), views.split(3, transposed)
    frame = cut(d.shape)
    X = frame.fold(d)
    assert X.shape == (6, 2, 5)
    assert torch.equal(X[4], d[1, :, 2:4].mT)
    assert torch.equal(frame.unfold(X, d.shape), d)
    assert pickle.loads(pickle.dumps(cut)) == cut


def test_split_as_an_override() -> None:
    p = plan(model("transformer"), in_proj=views.split(3))
    assert {r.geometry for r in p.rows if "in_proj_weight" in r.name} == {
        "Spectral(dense, split(3))"
    }
    p = plan(model("gpt2"), c_attn=views.split(3))
    row = next(row for row in p.rows if row.name.endswith("c_attn.weight"))
    assert row.geometry == "Spectral(dense, split(3, transposed))"
    SODA(p.groups(), 1e-3)


def test_grouped_kernels_are_matrices_of_their_own() -> None:
    torch.manual_seed(0)
    d = torch.randn(6, 2, 3, 3)
    norm = Spectral(view=views.grouped(3), polar=EXACT)
    one = Spectral(view=views.conv, polar=EXACT)
    torch.testing.assert_close(norm.lmo(d), torch.cat([one.lmo(p) for p in d.chunk(3)]))
    up = torch.randn(4, 3, 2, 2)
    flat = Spectral(polar=EXACT).lmo(up.reshape(4, 12).mT).mT.reshape(4, 3, 2, 2)
    torch.testing.assert_close(Spectral(view=views.deconv, polar=EXACT).lmo(up), flat)


# -- initialisation -------------------------------------------------------------------------------


def same(ours: Iterable[Tensor], theirs: Iterable[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


def largest(q: Tensor) -> float:
    return float(torch.linalg.matrix_norm(q, ord=2))


def test_init_is_explicit_and_norm_matched() -> None:
    net = model("transformer")
    before = copy.deepcopy(net.state_dict())
    p = plan(net, "scion")
    p.groups()
    assert same(before.values(), net.state_dict().values())
    filled = p.init_(seed=5)
    for row in p.rows:
        assert row.method is not None
        assert isinstance(row.method.geometry, Ball)
        q = row.parameter.detach()
        if row.role == "norm":
            assert row.name not in filled
            assert torch.equal(q, before[row.name])
        elif row.role == "bias":
            assert not q.any()
        else:
            size = row.method.geometry.norm.norm(q)
            torch.testing.assert_close(size, torch.tensor(row.radius), rtol=1e-4, atol=0)
    again = model("transformer")
    plan(again, "scion").init_(seed=5)
    assert same(net.parameters(), again.parameters())
    plan(again, "scion").init_(radius=1.0)
    assert largest(again.body.encoder.layers[0].linear1.weight.detach()) == pytest.approx(2**0.5)


def scion_init(p: Tensor, role: str) -> Tensor:
    """Scion's init() at radius 1, written from the paper: U V^T of a Gaussian for each tap."""
    if p.ndim < 2:
        return torch.zeros_like(p)
    o, i = p.shape[:2]
    if role == "head":
        return (torch.rand_like(p) - 0.5).sign() / i
    taps = torch.randn_like(p).reshape(o, i, -1).permute(2, 0, 1)
    U, _, Vh = torch.linalg.svd(taps, full_matrices=False)
    return (U @ Vh).permute(1, 2, 0).reshape(p.shape) * (o / i) ** 0.5 / len(taps)


def moments(ws: list[Tensor]) -> Tensor:
    """Invariants of the distribution: mean, variance, and the Gram matrix of each tap."""
    w = torch.stack(ws)
    if w.ndim < 3:
        return w.flatten()
    taps = w.flatten(3) if w.ndim > 3 else w.unsqueeze(-1)
    taps = taps.movedim(-1, 1)
    gram = taps @ taps.mT if taps.shape[-2] < taps.shape[-1] else taps.mT @ taps
    scale = w.square().mean().sqrt()
    return torch.cat([x.flatten() for x in (w.mean(0) / scale, gram.mean(0) / gram.abs().max())])


def test_init_has_the_distributions_of_scion() -> None:
    """Over 400 draws the mean of an entry is within 0.25 standard deviations of zero."""
    net = nn.Sequential(
        *(nn.Conv2d(2, 6, 3), nn.Conv2d(6, 4, 3), nn.Conv2d(4, 1, 1), nn.LayerNorm(3)),
        *(nn.Linear(6, 8), nn.Linear(8, 5)),
    )
    p = plan(net, "scion")
    ours: dict[str, list[Tensor]] = {row.name: [] for row in p.rows}
    for seed in range(400):
        p.init_(seed, radius=1.0)
        for row in p.rows:
            ours[row.name].append(row.parameter.detach().clone())
    torch.manual_seed(0)
    for row in p.rows:
        if row.role == "norm":
            assert all(w.eq(1).all() for w in ours[row.name])
            continue
        theirs = [scion_init(row.parameter.detach(), row.role) for _ in range(400)]
        torch.testing.assert_close(moments(ours[row.name]), moments(theirs), rtol=0, atol=0.25)
        torch.testing.assert_close(ours[row.name][0].norm(), theirs[0].norm())


def test_init_errors() -> None:
    with pytest.raises(ValueError, match="no parameter has a norm-matched initialisation"):
        plan(model("mlp"), "muon").init_()
    with torch.device("meta"):
        empty = models.mlp()
    with pytest.raises(ValueError, match="meta device"):
        plan(empty).init_()


def test_init_may_follow_the_optimizer() -> None:
    """The anchor is taken at the first step, so that it is the initialisation."""
    net, loss = make("mlp")
    p = plan(net)
    opt = SODA(p.groups(), lr=2**-12)
    p.init_(radius=1.0)
    start = net[1].weight.detach().clone()
    loss(net).backward()
    opt.step()
    assert torch.equal(opt.state[net[1].weight]["z0"], start)


# -- printing -------------------------------------------------------------------------------------


def test_table() -> None:
    p = plan(models.GPT(), "muon")
    lines = str(p).splitlines()
    assert lines[0] == "muon for GPT"
    assert lines[-1] == "embed.weight is also head.weight"
    assert lines[-2] == "13 parameters, 6,912 numbers, 30.8 kB of state"
    assert re.search(
        r"^blocks\.0-1\.up\.weight +x2 +64x16 +hidden +muon +Spectral\(rms\)", lines[8]
    )
    ends = {len(line) for line in lines[3:10]}
    assert len(ends) == 1  # the last column is flush right
    assert len(p.table(full=True).splitlines()) == 13 + 6


def test_public_names() -> None:
    assert {"RECIPES", "Plan", "hidden", "param_groups", "plan", "views"} <= set(sodaopt.__all__)
    assert set(PARENT) <= set(ROLES)
    assert {role for recipe in RECIPES.values() for role in recipe} <= {*ROLES, "rest"}
