"""Every recipe trains, and gives each role its method."""

import re

import pytest
import torch
from torch import nn

from sodaopt import RECIPES, SODA, factory, param_groups, plan, views, zoo
from sodaopt._names import UNDECAYED
from sodaopt.core.method import Method
from sodaopt.geometry import (
    BiasRMS,
    ColNorm,
    Sign,
    Spectral,
    dense,
    matrix,
    one_hot,
    rms,
    transposed,
)
from sodaopt.layers.recipes import ROLES, rules, soda
from tests.support.layers import CONV1D, each_model, model
from tests.support.models import MODELS

STEPS = 8
LR = factory.LR | {"lion": 2**-10}
# soda_dagger is anchored already. Without their decay, scion and adamw are uscion and adam.
ANCHORED = [f"soda({name})" for name in RECIPES if name not in ("soda_dagger", *UNDECAYED)]
# Every model with the two recipes whose rules differ most, and every recipe on the two models that
# together have the most roles.
PAIRS = [
    (name, recipe)
    for name in MODELS
    for recipe in [*RECIPES, *ANCHORED]
    if recipe in ("soda_dagger", "soda(muon)") or name in ("qwen_moe", "conv_net")
]
each_pair = pytest.mark.parametrize(("name", "recipe"), PAIRS)


# -- recipes train models -------------------------------------------------------------------------


@each_pair
def test_trains(name: str, recipe: str) -> None:
    net, loss = model(name), MODELS[name][1]
    opt = SODA(param_groups(net, recipe), lr=LR[re.sub(r"soda\((.*)\)", r"\1", recipe)])
    start = loss(net).item()
    for _ in range(STEPS):
        opt.zero_grad()
        loss(net).backward()
        opt.step()
    assert loss(net).item() < 0.995 * start


@each_pair
def test_every_parameter_once(name: str, recipe: str) -> None:
    net = model(name)
    p = plan(net, recipe)
    assert [row.name for row in p.rows] == [n for n, _ in net.named_parameters()]
    opt = SODA(p.groups(), 1e-3)
    ours = [q for group in opt.param_groups for q in group["params"]]
    assert len(ours) == len(set(ours))
    assert set(ours) == set(net.parameters())


@each_model
def test_meta_device_gives_the_same_plan(name: str) -> None:
    with torch.device("meta"):
        empty = model(name)
    assert all(q.is_meta for q in empty.parameters())
    assert plan(empty).table(full=True) == plan(model(name)).table(full=True)


# -- recipes --------------------------------------------------------------------------------------


def by_role(recipe: object, name: str = "transformer") -> dict[str, Method]:
    return {row.role: row.method for row in plan(model(name), recipe).rows}


def test_recipes_are_the_papers() -> None:
    dagger, scion, muon = (by_role(name) for name in ("soda_dagger", "scion", "muon"))
    assert dagger["hidden"] == zoo.soda_dagger(Spectral(dense), 50.0)
    assert dagger["head"] == zoo.soda_dagger(Sign(dense), 3000.0)
    assert dagger["embedding"] == zoo.soda_dagger(Sign(one_hot), 1.0)
    assert dagger["bias"] == zoo.soda_dagger(BiasRMS(), 50.0)
    assert scion["hidden"] == zoo.scion(Spectral(dense), 50.0)
    assert by_role("uscion")["head"] == zoo.uscion(Sign(dense), 3000.0)
    assert muon["hidden"] == zoo.muon(momentum=0.95, scale=rms)
    assert muon["hidden"].alpha == muon["hidden"].alpha_bar == pytest.approx(0.05)
    assert muon["head"] == muon["bias"] == zoo.adam((0.9, 0.95))
    assert by_role("adamw")["hidden"] == zoo.adamw((0.9, 0.95))
    assert by_role("adamw")["norm"] == zoo.adam((0.9, 0.95))
    assert by_role("lion")["hidden"] == zoo.lion()


def test_lr_factors_reach_the_optimizer() -> None:
    opt = SODA(param_groups(model("gpt"), "muon"), lr=2**-11)
    assert [(group["name"], group["lr"]) for group in opt.param_groups] == [
        ("tied", 10 * 2**-11),
        ("hidden", 2**-11),
    ]
    assert opt.param_groups[0]["param_names"] == ["embed.weight"]


def test_soda_anchors_hidden_layers_and_can_anchor_all() -> None:
    ours = by_role("soda(muon)")
    assert ours["hidden"] == zoo.soda(zoo.muon(scale=rms))
    assert ours["head"] == zoo.adam((0.9, 0.95))
    everything = by_role(soda("uscion", only=tuple(ROLES)))
    assert {method.centre for method in everything.values()} == {"init"}
    assert rules("soda(scion)") == rules("soda(uscion)")
    assert rules("soda(adamw)") == rules("soda(adam)")
    with pytest.raises(ValueError, match="without decay or averaging"):
        plan(nn.Linear(2, 2), soda("soda_dagger", only=("head",)))


def test_a_recipe_of_ones_own() -> None:
    mine = {"hidden": zoo.muon(), "router": (zoo.adam(), 2.0), "rest": zoo.sgd()}
    assert by_role(mine)["hidden"] == zoo.muon()
    assert by_role(mine)["norm"] == zoo.sgd()
    wider = RECIPES["uscion"] | {"conv": zoo.uscion(ColNorm(), 7.0)}
    rows = {row.role: row for row in plan(model("conv_net"), wider).rows}
    assert rows["conv"].radius == 7
    assert rows["conv"].geometry == "ColNorm(dense, conv)"
    assert rows["head"].radius == 3000


def test_multinorm_sees_the_layer_as_it_is_stored() -> None:
    recipe = {"hidden": zoo.multinorm(), "rest": zoo.adam()}
    geometry = {row.role: row.geometry for row in plan(model("gpt2"), recipe).rows}
    assert geometry["hidden"] == "MultiNorm(transposed)"


def test_a_norm_that_chose_its_view_keeps_it() -> None:
    chosen = zoo.uscion(Spectral(view=matrix))  # the default view, which the layer's own replaces
    assert plan(model("gpt2"), **{r"c_fc\.weight": chosen}).rows[10].geometry == CONV1D
    flat = zoo.uscion(Spectral(view=views.split(4, transposed)))
    p = plan(model("gpt2"), **{r"c_fc\.weight": flat})
    assert p.rows[10].geometry == "Spectral(dense, split(4, transposed))"
