"""The role of each parameter, in models and layers of every kind."""

import math
import re
from dataclasses import replace

import pytest
import torch
from torch import nn

from sodaopt import RECIPES, SODA, Plan, hidden, param_groups, plan, views, zoo
from sodaopt.geometry import (
    Ball,
)
from tests.support import models
from tests.support.layers import CONV1D, each_model, model, roles
from tests.support.models import make
from tools import layers_doc

# -- GPT-2, by hand -------------------------------------------------------------------------------

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
    "conv_net": {r"^[04]\.weight": "conv", r"^3\.weight": "depthwise", r"^8\.weight": "head"},
    "mlp": {r"^5\.weight": "head"},
}


@each_model
def test_roles(name: str) -> None:
    special = SPECIAL[name]
    rows = plan(model(name)).rows
    patterns = [next((k for k in special if re.search(k, row.name)), "") for row in rows]
    assert set(patterns) - {""} == set(special)
    for row, pattern in zip(rows, patterns, strict=True):
        vector = "bias" if row.name.endswith("bias") else "norm"
        other = "hidden" if len(row.shape) > 1 else vector
        assert row.role == special.get(pattern, other), row


@each_model
def test_hidden(name: str) -> None:
    net = model(name)
    kept = [q for q in net.parameters() if q.ndim > 1]
    rest = {"embedding", "position", "tied", "head", "vector", "depthwise"}
    out = {row.parameter for row in plan(net).rows if row.role in rest}
    assert hidden(net) == [q for q in kept if q not in out]


def test_hidden_does_not_ask_whether_a_method_fits() -> None:
    """It is for other optimizers too, some of which train complex parameters."""
    net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    net.phase = nn.Parameter(torch.zeros(3, dtype=torch.complex64))
    assert hidden(net) == [net[0].weight]
    with pytest.raises(ValueError, match=r"phase.*is complex"):
        SODA(param_groups(net), 1e-3)


def without_biases(module: nn.Module) -> list[tuple[str, str]]:
    return [(row.role, row.geometry) for row in plan(module).rows if row.role != "bias"]


def test_layers_of_torch() -> None:
    spectral = "Spectral(dense)"
    assert without_biases(
        nn.Transformer(8, 2, 1, 1, 8, batch_first=True).encoder.layers[0].self_attn
    ) == 2 * [("hidden", spectral)]
    assert without_biases(nn.LSTM(4, 5)) == 2 * [("hidden", spectral)]
    assert without_biases(nn.Conv1d(4, 6, 3)) == [("conv", "Spectral(dense, conv)")]
    assert without_biases(nn.Conv3d(4, 6, 3, groups=2)) == [("conv", "Spectral(dense, grouped(2))")]
    assert without_biases(nn.ConvTranspose2d(4, 6, 2)) == [("conv", "Spectral(dense, deconv)")]
    grouped = "Spectral(dense, grouped(2, deconv))"
    assert without_biases(nn.ConvTranspose2d(4, 6, 2, groups=2)) == [("conv", grouped)]
    assert without_biases(nn.Conv1d(4, 8, 3, groups=4)) == [
        ("depthwise", "Sign(dense, grouped(4))")
    ]
    assert without_biases(nn.EmbeddingBag(9, 4)) == [("embedding", "Sign(one_hot)")]
    assert without_biases(nn.GroupNorm(2, 4)) == [("norm", "BiasRMS")]
    assert without_biases(nn.PReLU(3)) == [("vector", "BiasRMS")]
    assert without_biases(nn.PReLU()) == [("scalar", "BiasRMS")]
    assert without_biases(nn.Linear(4, 3)) == [("head", "Sign(dense)")]


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
    assert plan(MoE()).rows[0].geometry == CONV1D  # the router reads 6 numbers
    with pytest.raises(ValueError, match=r"w \(4x6x8\) of Module(.|\n)*views.matrix"):
        plan(MoE().experts)
    mine = plan(MoE().experts, **{r"^w$": ("experts", views.transposed)})
    assert mine.rows[0].geometry == CONV1D


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


def test_a_gate_beside_a_list_of_experts_is_hidden() -> None:
    """A list does not tell experts from layers, and the rule for a router is the hidden layers'."""

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
    assert {found[f"layers.{j}.gate.weight"] for j in range(4)} == {"hidden"}
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


def test_lora_of_a_convolution() -> None:
    peft = pytest.importorskip("peft")
    net = peft.get_peft_model(model("conv_net"), peft.LoraConfig(target_modules=["0"], r=2))
    found = {row.role: row.geometry for row in plan(net).rows if row.role != "frozen"}
    assert found == dict.fromkeys(("lora_a", "lora_b"), "Spectral(dense, conv)")


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
        self.wte, self.speaker = nn.Embedding(20, 4), nn.Embedding(8, 4)
        self.layers = nn.ModuleList([models.Block()] * 3)


def test_an_override_declares_a_functional_tied_head() -> None:
    net = Sharing()
    assert roles(plan(net))["wte.weight"] == roles(plan(net))["speaker.weight"] == "embedding"
    assert any("wte.weight, speaker.weight" in note for note in plan(net).notes)
    p = plan(net, wte="tied")
    assert roles(p)["wte.weight"] == "tied"
    assert roles(p)["speaker.weight"] == "position"
    assert p.rows[0].geometry == "Sign(dense)"
    assert not [
        row for row in p.rows if row.aliases
    ]  # a block that is used three times is not tied


# -- wrappers and shards --------------------------------------------------------------------------


@pytest.mark.slow
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
