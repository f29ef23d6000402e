"""The plan: overrides, views, initialisation and the printed table."""

import pickle
import re

import pytest
import torch
from torch import nn

import sodaopt
from sodaopt import RECIPES, SODA, hidden, param_groups, plan, views, zoo
from sodaopt.geometry import (
    Spectral,
    matrix,
    transposed,
)
from sodaopt.geometry.polar import EXACT
from sodaopt.layers.roles import PARENT, ROLES
from tests.support import models
from tests.support.layers import CONV1D, model, roles
from tools.architectures import MEANINGS

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
    "shape": ({"mix": "hidden", "shift": zoo.muon()}, ValueError, r"shift \(4.*expected a matrix"),
    "cut": ({"mix": ("hidden", views.split(3))}, ValueError, "cannot cut shape 5x5 into 3"),
    "groups": (
        {"mix": ("hidden", views.grouped(3))},
        ValueError,
        "cannot cut shape 5x5 into 3 groups",
    ),
    "no groups": ({"mix": ("hidden", views.grouped(0))}, ValueError, "5x5 into 0 groups"),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_overrides(case: str) -> None:
    overrides, error, match = WRONG[case]
    with pytest.raises(error, match=match):
        SODA(param_groups(Odd(), **overrides), 1e-3)


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
    with pytest.raises(TypeError, match=r"a rule is a Method.*or \(Method, lr factor\)"):
        plan(net, {"rest": (zoo.adam(), None, 1.0)})


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


# -- printing -------------------------------------------------------------------------------------


def test_table() -> None:
    p = plan(models.GPT(), "muon")
    lines = str(p).splitlines()
    assert lines[0] == "muon for GPT"
    assert lines[-1] == "embed.weight is also head.weight"
    assert lines[-2] == "13 parameters, 6,912 numbers"
    assert re.search(r"^blocks\.\*\.up\.weight +x2 +64x16 +hidden +muon +Spectral\(rms\)", lines[8])
    ends = {len(line) for line in lines[3:10]}
    assert len(ends) == 1  # the last column is flush right
    assert len(p.table(full=True).splitlines()) == 13 + 6


def test_layers_that_differ_by_a_number_print_as_one_line() -> None:
    net = nn.Sequential(*(nn.Linear(8, 8, bias=False) for _ in range(5)), nn.Linear(8, 3))
    net[1].requires_grad_(False)
    assert re.search(r"^\*\.weight +x4 +8x8 +hidden", str(plan(net)), re.M)
    assert re.search(r"^1\.weight +8x8 +frozen", str(plan(net)), re.M)
    blocks = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8)) for _ in range(3)), nn.Linear(8, 3))
    assert re.search(r"^\*\.0\.weight +x3 +8x8 +hidden", str(plan(blocks)), re.M)


def test_a_row_without_an_lr_factor_has_the_factor_1() -> None:
    p = nn.Parameter(torch.ones(2, 3))
    row = sodaopt.layers.plan.PlannedParameter("w", "hidden", p, method=zoo.muon())
    groups = sodaopt.Plan("by hand", (row,)).groups()
    assert [g["lr_factor"] for g in groups] == [1.0]
    assert SODA(groups, 0.1).param_groups[0]["lr"] == 0.1


def test_public_names() -> None:
    assert {"RECIPES", "Plan", "hidden", "param_groups", "plan", "views"} <= set(sodaopt.__all__)
    assert set(PARENT) <= set(ROLES) == set(MEANINGS)
    assert {role for recipe in RECIPES.values() for role in recipe} <= {*ROLES, "rest"}
