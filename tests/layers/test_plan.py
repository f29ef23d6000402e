"""The layer plan: the role of each parameter, its method, and the errors."""

import copy
import math
import pickle
import re
from collections.abc import Iterable, Iterator
from dataclasses import replace
from importlib.metadata import PackageNotFoundError, version

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import sodaopt
from sodaopt import RECIPES, SODA, Plan, hidden, param_groups, plan, views, zoo
from sodaopt.core.method import Method
from sodaopt.geometry import (
    Ball,
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
from sodaopt.geometry.polar import EXACT
from sodaopt.layers.recipes import PARENT, ROLES, UNDECAYED, rules, soda
from tests.support import models
from tests.support.models import MODELS, make
from tools import layers_doc

STEPS = 8
# The paper's learning rates if it has them.
LR = {
    "soda_dagger": 2**-12,
    "scion": 2**-12,
    "uscion": 2**-12,
    "muon": 2**-11,
    "adam": 2**-9,
    "adamw": 2**-9,
    "lion": 2**-10,
}
# soda_dagger is anchored already. Without their decay, scion and adamw are uscion and adam.
ANCHORED = [f"soda({name})" for name in RECIPES if name not in ("soda_dagger", *UNDECAYED)]
each_model = pytest.mark.parametrize("name", MODELS)
# Every model with two recipes whose rules differ most, and every recipe on the two models that
# have the most roles between them.
PAIRS = [
    (name, recipe)
    for name in MODELS
    for recipe in [*RECIPES, *ANCHORED]
    if recipe in ("soda_dagger", "soda(muon)") or name in ("qwen_moe", "conv_net")
]
each_pair = pytest.mark.parametrize(("name", "recipe"), PAIRS)


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """transformers warns about token ids beyond the tiny vocabularies."""
    import logging

    logging.disable(logging.WARNING)
    yield
    logging.disable(logging.NOTSET)


@pytest.fixture
def one_rank(tmp_path) -> Iterator[None]:
    if not (dist.is_available() and dist.is_gloo_available()):
        pytest.skip("torch without gloo")
    dist.init_process_group("gloo", f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def model(name: str) -> nn.Module:
    if name in models.HUGGING_FACE:
        pytest.importorskip("transformers")
    return make(name)[0]


def roles(p: Plan) -> dict[str, str]:
    return {row.name: row.role for row in p.rows}


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
def test_every_parameter_once_with_the_right_state_size(name: str, recipe: str) -> None:
    net = model(name)
    p = plan(net, recipe)
    assert [row.name for row in p.rows] == [n for n, _ in net.named_parameters()]
    opt = SODA(p.groups(), 1e-3)
    ours = [q for group in opt.param_groups for q in group["params"]]
    assert len(ours) == len(set(ours))
    assert set(ours) == set(net.parameters())
    kept = [t for state in opt.state.values() for t in state.values()]
    assert sum(t.numel() * t.element_size() for t in kept) == p.state_bytes


@each_model
def test_meta_device_gives_the_same_plan(name: str) -> None:
    with torch.device("meta"):
        empty = model(name)
    assert all(q.is_meta for q in empty.parameters())
    assert plan(empty).table(full=True) == plan(model(name)).table(full=True)


# -- GPT-2, by hand -------------------------------------------------------------------------------

CONV1D = "Spectral(dense, transposed)"
GPT2_BLOCK = (  # name, shape, role, geometry, radius
    ("ln_1.weight", (768,), "norm", "BiasRMS", 50),
    ("ln_1.bias", (768,), "bias", "BiasRMS", 50),
    ("attn.c_attn.weight", (768, 2304), "hidden", CONV1D, 50),
    ("attn.c_attn.bias", (2304,), "bias", "BiasRMS", 50),
    ("attn.c_proj.weight", (768, 768), "hidden", CONV1D, 50),
    ("attn.c_proj.bias", (768,), "bias", "BiasRMS", 50),
    ("ln_2.weight", (768,), "norm", "BiasRMS", 50),
    ("ln_2.bias", (768,), "bias", "BiasRMS", 50),
    ("mlp.c_fc.weight", (768, 3072), "hidden", CONV1D, 50),
    ("mlp.c_fc.bias", (3072,), "bias", "BiasRMS", 50),
    ("mlp.c_proj.weight", (3072, 768), "hidden", CONV1D, 50),
    ("mlp.c_proj.bias", (768,), "bias", "BiasRMS", 50),
)
GPT2 = (
    ("wte.weight", (50257, 768), "tied", "Sign(dense)", 3000),
    ("wpe.weight", (1024, 768), "position", "Sign(one_hot)", 1),
    *((f"h.{j}.{name}", *rest) for j in range(12) for name, *rest in GPT2_BLOCK),
    ("ln_f.weight", (768,), "norm", "BiasRMS", 50),
    ("ln_f.bias", (768,), "bias", "BiasRMS", 50),
)


def test_gpt2_by_hand() -> None:
    pytest.importorskip("transformers")
    p = plan(layers_doc.gpt2(), "soda_dagger")
    ours = [(r.name, r.shape, r.role, r.geometry, r.radius) for r in p.rows]
    assert ours == [(f"transformer.{name}", *rest) for name, *rest in GPT2]
    for row in p.rows:
        assert row.lr_factor == 1
        assert row.method is not None
        assert row.method.name == "soda_dagger"
        assert row.state_bytes == 2 * 4 * math.prod(row.shape) + 4  # m, z0 and the step
    assert p.rows[0].aliases == ("lm_head.weight",)
    assert sum(math.prod(row.shape) for row in p.rows) == 124_439_808


def test_gpt2_widths() -> None:
    """The factor of each update, from d_out and d_in as the layer uses them."""
    pytest.importorskip("transformers")
    rows = {row.name: row for row in plan(layers_doc.gpt2(), "uscion").rows}

    def width(name: str) -> float:
        method = rows[f"transformer.{name}.weight"].method
        assert method is not None
        assert isinstance(method.geometry, Ball)
        return method.geometry.norm.width(rows[f"transformer.{name}.weight"].shape)

    assert width("wte") == 1 / 768
    assert width("wpe") == 1
    assert width("h.0.mlp.c_fc") == pytest.approx(math.sqrt(3072 / 768))
    assert width("h.0.mlp.c_proj") == pytest.approx(math.sqrt(768 / 3072))
    assert width("h.0.attn.c_attn") == pytest.approx(math.sqrt(3))


# -- roles ----------------------------------------------------------------------------------------

SPECIAL = {  # the special layers of each model. All others are hidden, norm or bias
    "gpt2": {"transformer.wte.weight": "tied", "transformer.wpe.weight": "position"},
    "llama": {"model.embed_tokens.weight": "embedding", "lm_head.weight": "head"},
    "qwen_moe": {
        "model.embed_tokens.weight": "embedding",
        "lm_head.weight": "head",
        r"\.experts\.(gate_up|down)_proj": "experts",
        r"\.mlp\.(gate|shared_expert_gate)\.weight": "router",
    },
    "bert": {
        "word_embeddings": "tied",
        "position_embeddings": "position",
        "token_type_embeddings": "position",
    },
    "t5": {"shared.weight": "tied", "relative_attention_bias": "position"},
    "vit": {
        "cls_token": "vector",
        "position_embeddings": "position",
        "projection.weight": "conv",
        "classifier.weight": "head",
    },
    "gpt": {"embed.weight": "tied"},
    "gpt_untied": {"embed.weight": "embedding", "head.weight": "head"},
    "transformer": {
        "tokens.weight": "embedding",
        "positions.weight": "position",
        "head.weight": "head",
    },
    "conv_net": {r"^[034]\.weight": "conv", r"^8\.weight": "head"},
    "mlp": {r"^5\.weight": "head"},
}


@each_model
def test_roles(name: str) -> None:
    net, particular = model(name), SPECIAL[name]
    for row in plan(net).rows:
        pattern = next((k for k in particular if re.search(k, row.name)), None)
        if pattern is not None:
            assert row.role == particular[pattern], row
        elif len(row.shape) > 1:
            assert row.role == "hidden", row
        else:
            assert row.role in ("norm", "bias"), row
            assert (row.role == "bias") == row.name.endswith("bias"), row


@each_model
def test_hidden(name: str) -> None:
    net = model(name)
    kept = [q for q in net.parameters() if q.ndim > 1]
    rest = {"embedding", "position", "tied", "head", "vector"}
    out = {row.parameter for row in plan(net).rows if row.role in rest}
    assert hidden(net) == [q for q in kept if q not in out]


def only(module: nn.Module) -> list[tuple[str, str]]:
    return [(row.role, row.geometry) for row in plan(module).rows if row.role != "bias"]


def test_layers_of_torch() -> None:
    spectral = "Spectral(dense)"
    assert only(
        nn.Transformer(8, 2, 1, 1, 8, batch_first=True).encoder.layers[0].self_attn
    ) == 2 * [("hidden", spectral)]
    assert only(nn.LSTM(4, 5)) == 2 * [("hidden", spectral)]
    assert only(nn.Conv1d(4, 6, 3)) == [("conv", "Spectral(dense, conv)")]
    assert only(nn.Conv3d(4, 6, 3, groups=2)) == [("conv", "Spectral(dense, grouped(2))")]
    assert only(nn.ConvTranspose2d(4, 6, 2)) == [("conv", "Spectral(dense, deconv)")]
    assert only(nn.EmbeddingBag(9, 4)) == [("embedding", "Sign(one_hot)")]
    assert only(nn.GroupNorm(2, 4)) == [("norm", "BiasRMS")]
    assert only(nn.PReLU(3)) == [("vector", "BiasRMS")]
    assert only(nn.PReLU()) == [("scalar", "BiasRMS")]
    assert only(nn.Linear(4, 3)) == [("head", "Sign(dense)")]


def test_a_foreign_linear_layer_counts_by_its_sizes() -> None:
    class Theirs(nn.Module):
        def __init__(self, flipped: bool) -> None:
            super().__init__()
            self.in_features, self.out_features = 3, 5
            self.weight = nn.Parameter(torch.zeros((3, 5) if flipped else (5, 3)))

    net = nn.Sequential(Theirs(False), Theirs(True), nn.Linear(5, 2))
    assert [row.geometry for row in plan(net).rows][:2] == ["Spectral(dense)", CONV1D]


class MoE(nn.Module):
    """Four experts in one stack, stored either way, and a router."""

    def __init__(self, says: bool | None = None) -> None:
        super().__init__()
        self.experts = nn.Module()
        self.experts.w = nn.Parameter(torch.zeros(4, 6, 8))
        self.experts.w_bias = nn.Parameter(torch.zeros(4, 8))
        if says is not None:
            self.experts.is_transposed = says
        self.gate = nn.Linear(6, 4, bias=False)


def test_experts_declare_how_they_are_stored() -> None:
    stack = nn.ModuleList([MoE(True), MoE(False)])
    rows = {row.name: (row.role, row.geometry) for row in plan(stack).rows}
    assert rows["0.experts.w"] == ("experts", CONV1D)
    assert rows["1.experts.w"] == ("experts", "Spectral(dense)")
    assert rows["0.experts.w_bias"] == ("bias", "BiasRMS")
    assert rows["0.gate.weight"][0] == "router"
    with pytest.raises(ValueError, match=r"experts\.w \(4x6x8\)(.|\n)*views.matrix"):
        plan(MoE())
    assert plan(MoE(), **{r"experts\.w$": ("experts", views.transposed)}).rows[0].geometry == CONV1D


def test_gpt_oss() -> None:
    t = pytest.importorskip("transformers")
    sizes = {"hidden_size": 16, "intermediate_size": 24, "head_dim": 8, "num_local_experts": 4}
    heads = {"num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1}
    with torch.device("meta"):
        net = t.GptOssForCausalLM(t.GptOssConfig(vocab_size=40, **sizes, **heads))
    rows = {row.name.removeprefix("model.layers.0."): row for row in plan(net).rows}
    assert rows["mlp.experts.gate_up_proj"].geometry == CONV1D
    assert rows["mlp.experts.gate_up_proj_bias"].role == "bias"
    assert rows["mlp.router.weight"].role == "router"
    assert rows["self_attn.sinks"].role == "vector"


def test_a_list_of_experts_has_a_router_and_a_list_of_layers_a_head() -> None:
    class Sparse(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            two = (nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 6)) for _ in range(4))
            self.experts, self.gate = nn.ModuleList(two), nn.Linear(6, 4)

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(Sparse() for _ in range(4))
            self.out = nn.Linear(6, 4)

    found = roles(plan(Net()))
    assert {found[f"layers.{j}.gate.weight"] for j in range(4)} == {"router"}
    assert found["out.weight"] == "head"


def test_lora() -> None:
    peft = pytest.importorskip("peft")
    net = peft.get_peft_model(
        model("gpt2"), peft.LoraConfig(target_modules=["c_attn", "wte"], r=2, fan_in_fan_out=True)
    )
    p = plan(net, "soda_dagger")
    found = roles(p)
    for name, q in net.named_parameters():
        factor = re.search(r"lora_(?:embedding_)?([AB])", name)
        assert found[name] == (f"lora_{factor[1].lower()}" if factor else "frozen")
        assert q.requires_grad == bool(factor)
    assert {q for group in p.groups() for _, q in group["params"]} == {
        q for q in net.parameters() if q.requires_grad
    }
    # Adam for the second factors only
    mine = RECIPES["soda_dagger"] | {"lora_b": zoo.adam()}
    assert {r.geometry for r in plan(net, mine).rows if r.role == "lora_b"} == {"Diagonal"}


def test_classifiers_and_bodies() -> None:
    t = pytest.importorskip("transformers")
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
    config = t.RobertaConfig(num_attention_heads=2, vocab_size=40, **sizes)
    with torch.device("meta"):
        found = roles(plan(t.RobertaForSequenceClassification(config)))
        body = plan(t.RobertaModel(config))
    assert found["classifier.out_proj.weight"] == "head"
    assert found["classifier.dense.weight"] == "hidden"
    assert found["roberta.embeddings.word_embeddings.weight"] == "embedding"
    assert found["roberta.embeddings.token_type_embeddings.weight"] == "position"  # two, as classes
    assert "head" not in {row.role for row in body.rows}
    assert any(note.startswith("no head") for note in body.notes)


def test_heads_that_are_inferred() -> None:
    assert any(
        "no head" in note for note in plan(nn.Transformer(8, 2, 1, 1, 8, batch_first=True)).notes
    )
    image = nn.Sequential(nn.Linear(4, 4), nn.Conv2d(3, 3, 1))
    assert roles(plan(image))["0.weight"] == "hidden"
    auto = nn.ModuleDict({"a": nn.Sequential(nn.Linear(4, 2)), "b": nn.Sequential(nn.Linear(2, 4))})
    assert roles(plan(auto)) == {
        "a.0.weight": "hidden", "a.0.bias": "bias", "b.0.weight": "head", "b.0.bias": "bias",
    }  # fmt: skip


class Sharing(nn.Module):
    """A GPT whose head is a function of the embedding, with a block used three times."""

    def __init__(self) -> None:
        super().__init__()
        self.wte, self.wpe = nn.Embedding(20, 4), nn.Embedding(8, 4)
        self.layers = nn.ModuleList([models.Block()] * 3)


def test_an_override_declares_a_functional_tied_head() -> None:
    net = Sharing()
    assert roles(plan(net))["wte.weight"] == roles(plan(net))["wpe.weight"] == "embedding"
    assert any("wte.weight, wpe.weight" in note for note in plan(net).notes)
    p = plan(net, wte="tied")
    assert roles(p)["wte.weight"] == "tied"
    assert roles(p)["wpe.weight"] == "position"
    assert p.rows[0].geometry == "Sign(dense)"
    assert not [
        row for row in p.rows if row.aliases
    ]  # a block that is used three times is not tied


# -- wrappers and shards --------------------------------------------------------------------------


def test_wrappers_do_not_change_the_plan(one_rank: None) -> None:
    net = models.GPT()
    expected = plan(net).table(full=True)
    parallel = nn.parallel.DistributedDataParallel(net)
    for wrapped in (nn.DataParallel(net), parallel, torch.compile(parallel)):
        assert plan(wrapped).table(full=True) == expected


def test_dtensor(one_rank: None) -> None:
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import DTensor, init_device_mesh

    (net, loss), other = make("gpt"), models.GPT()
    other.load_state_dict(net.state_dict())
    expected = plan(net)
    fully_shard(net, mesh=init_device_mesh("cpu", (1,)))
    p = plan(net)
    assert [replace_title(p)] == [replace_title(expected)]
    assert all(isinstance(row.parameter, DTensor) for row in p.rows)
    for q in (p, plan(other)):
        q.init_(seed=3, radius=1.0)
    nets = (net, other)
    opts = [SODA(param_groups(n), lr=2**-12) for n in nets]
    for n, opt in zip(nets, opts, strict=True):
        for _ in range(3):
            opt.zero_grad()
            loss(n).backward()
            opt.step()
    for ours, theirs in zip(net.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(ours.full_tensor(), theirs)


def replace_title(p: Plan) -> str:
    return replace(p, title="").table(full=True)


def test_flattened_parameters_are_refused() -> None:
    net = nn.Sequential(nn.Linear(3, 4))
    net[0].weight = nn.Parameter(torch.zeros(12))
    with pytest.raises(ValueError, match=r"0\.weight \(12\) is flattened.*fully_shard"):
        plan(net)
    flat = nn.Module()
    flat.register_parameter("_flat_param", nn.Parameter(torch.zeros(12)))
    with pytest.raises(ValueError, match="flattened"):
        plan(flat)


def test_lazy_parameters_are_refused() -> None:
    with pytest.raises(ValueError, match=r"0\.weight has no shape yet"):
        plan(nn.Sequential(nn.LazyLinear(3)))


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
    mine = {"hidden": zoo.muon(), "router": (zoo.adam(), None, 2.0), "rest": zoo.sgd()}
    assert by_role(mine)["hidden"] == zoo.muon()
    assert by_role(mine)["norm"] == zoo.sgd()
    wider = RECIPES["uscion"] | {"conv": (zoo.uscion(ColNorm()), 7.0)}
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
    with pytest.raises(ValueError, match="unknown recipe 'sgd'"):
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


def test_the_page_is_up_to_date() -> None:
    try:
        installed = version("transformers")
    except PackageNotFoundError:
        pytest.skip("transformers is not installed")
    text = layers_doc.PAGE.read_text(encoding="utf-8")
    if layers_doc.stamp(installed) not in text:
        pytest.skip(f"docs/layers.md was written with another transformers than {installed}")
    assert layers_doc.filled(text) == text, "write it again: python -m tools.layers_doc"


def test_public_names() -> None:
    assert {"RECIPES", "Plan", "hidden", "param_groups", "plan", "views"} <= set(sodaopt.__all__)
    assert set(PARENT) <= set(ROLES)
    assert {role for recipe in RECIPES.values() for role in recipe} <= {*ROLES, "rest"}
