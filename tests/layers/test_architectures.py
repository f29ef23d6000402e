"""Public architectures whose layers are easily mistaken, and the table of them in the docs."""

import re

import pytest
import torch
from torch import nn

from sodaopt import plan
from tests.support import models
from tests.support.layers import roles
from tools import architectures, layers_doc

# Each pattern of names, with the role of all parameters that it matches.
NAMED = {
    "MusicgenForCausalLM": {r"lm_heads\.\d": "head", "embed_tokens": "embedding"},
    "DetrForObjectDetection": {
        r"class_labels_classifier\.weight": "head",
        r"bbox_predictor\.layers\.2\.weight": "head",
        r"bbox_predictor\.layers\.[01]\.weight": "hidden",
        "query_position_embeddings": "position",
    },
    "BertForPreTraining": {r"seq_relationship\.weight": "head", r"transform\.dense\.w": "hidden"},
    "CLIPModel": {r"(text|visual)_projection\.weight": "head", "position_embedding": "position"},
    "CLIPForImageClassification": {r"classifier\.weight": "head"},
    "SwinForImageClassification": {"relative_position_bias_table": "position"},
    "BeitForImageClassification": {"lambda_": "vector"},
    "Dinov2ForImageClassification": {"layer_scale": "vector"},
    "Dinov2WithRegistersForImageClassification": {"register_tokens": "vector"},
    "ConvNextForImageClassification": {r"dwconv\.weight": "depthwise", "layer_scale": "vector"},
    "ConvNextV2ForImageClassification": {r"grn\.weight": "norm"},
    "LevitForImageClassification": {"attention_biases": "position"},
    "MambaForCausalLM": {"A_log": "vector", r"conv1d\.weight": "depthwise"},
    "SamModel": {r"vision_encoder\.pos_embed": "position", "rel_pos_[hw]": "position"},
    "Wav2Vec2ForCTC": {r"weight\.original0": "vector", r"weight\.original1": "conv"},
    "HubertForCTC": {r"weight\.original0": "vector", r"weight\.original1": "conv"},
    "XLNetLMHeadModel": {r"rel_attn\.[qkvor]$": "hidden", "_bias": "bias", "seg_": "position"},
    "Llama4ForCausalLM": {r"experts\.": "experts", "router": "router"},
    "JetMoeForCausalLM": {r"put_linear\.weight": "experts", r"router\.layer": "router"},
    "FSMTForConditionalGeneration": {r"decoder\.embed_tokens": "tied"},
    "ZambaForCausalLM": {r"mamba\.D$": "vector"},
    "PerceiverForMaskedLM": {"latents": "vector", "output_position": "position"},
}
GEOMETRY = {  # a parameter of the model, and how it is a matrix
    "XLNetLMHeadModel": (r"rel_attn\.q$", "Spectral(dense, heads)"),
    "Llama4ForCausalLM": (r"experts\.gate_up_proj$", "Spectral(dense, transposed)"),
    "JetMoeForCausalLM": (r"mlp\.input_linear\.weight$", "Spectral(dense)"),
    "Wav2Vec2ForCTC": (r"weight\.original1$", "Spectral(dense, grouped(16))"),
    "MambaForCausalLM": (r"conv1d\.weight$", "Sign(dense, grouped(1536))"),
}


@pytest.mark.parametrize("name", NAMED)
def test_transformers(name: str) -> None:
    pytest.importorskip("transformers")
    with torch.device("meta"):
        net = architectures.BUILD["transformers"](name, architectures.OPTIONS.get(name, {}))
    p = plan(net)
    for pattern, role in NAMED[name].items():
        found = {row.role for row in p.rows if re.search(pattern, row.name)}
        assert found == {role}, pattern
    if name in GEOMETRY:
        pattern, geometry = GEOMETRY[name]
        assert {row.geometry for row in p.rows if re.search(pattern, row.name)} == {geometry}


class BatchNormAct2d(nn.BatchNorm2d):
    def __init__(self) -> None:
        super().__init__(4)
        self.act = nn.ReLU()


class LayerScale(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gamma = nn.Parameter(torch.ones(4))


class PreNormBlock(nn.Module):
    """A block that is called a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.gamma, self.fc = nn.Parameter(torch.ones(6)), nn.Linear(6, 6)


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.relative_position_bias_table = nn.Parameter(torch.zeros(9, 2))
        self.bias_norm, self.beta = nn.LayerNorm(4), nn.Parameter(torch.zeros(2, 2))
        self.rel_pos_h = nn.Parameter(torch.zeros(5, 4))
        self.q = nn.Parameter(torch.zeros(4, 2, 2))


class Detector(nn.Module):
    """Layers of timm and torchvision: a convolution after the parallel heads."""

    def __init__(self) -> None:
        super().__init__()
        self.cls_token = nn.Parameter(torch.zeros(1, 1, 4))
        self.reg_token = nn.Parameter(torch.zeros(1, 3, 4))
        self.pos_embed = nn.Parameter(torch.zeros(1, 4, 3, 3))
        self.norm, self.scale, self.block = BatchNormAct2d(), LayerScale(), PreNormBlock()
        self.attn = Attention()
        self.fc6, self.fc7 = nn.Linear(6, 16), nn.Linear(16, 16)
        self.cls_score, self.bbox_pred = nn.Linear(16, 5), nn.Linear(16, 20)
        self.mask = nn.Conv2d(3, 2, 1)


def test_detector() -> None:
    assert {n: r for n, r in roles(plan(Detector())).items() if not n.endswith("bias")} == {
        "cls_token": "vector",
        "reg_token": "vector",
        "pos_embed": "position",
        "norm.weight": "norm",
        "scale.gamma": "vector",
        "block.gamma": "norm",
        "block.fc.weight": "hidden",
        "attn.relative_position_bias_table": "position",
        "attn.rel_pos_h": "position",
        "attn.beta": "bias",
        "attn.bias_norm.weight": "norm",
        "attn.q": "hidden",
        "fc6.weight": "hidden",
        "fc7.weight": "hidden",
        "cls_score.weight": "head",
        "bbox_pred.weight": "head",
        "mask.weight": "conv",
    }


def test_a_small_gate_is_not_a_second_head() -> None:
    net = models.GPT()
    net.gate, net.value = nn.Linear(12, 1), nn.Linear(models.D, 1)
    found = roles(plan(net))
    assert found["gate.weight"] == "hidden"
    assert found["value.weight"] == "head"


@pytest.mark.parametrize("norm", [nn.utils.weight_norm, nn.utils.spectral_norm])
@pytest.mark.filterwarnings("ignore:`torch.nn.utils.weight_norm`")
def test_a_reparametrised_weight_keeps_its_role(norm: type) -> None:
    net = nn.Sequential(norm(nn.Conv1d(4, 6, 3)), norm(nn.Linear(6, 6)), nn.Linear(6, 5))
    found = [row.role for row in plan(net).rows if row.role not in ("bias", "vector")]
    assert found == ["conv", "hidden", "head"]


@pytest.mark.parametrize("section", layers_doc.SECTIONS)
@pytest.mark.slow
def test_the_page_is_up_to_date(section: str) -> None:
    package = layers_doc.SECTIONS[section][0]
    written, here = layers_doc.written_with(section), architectures.installed(package)
    if written != here:
        pytest.skip(f"written with {package} {written}, and {here} is installed")
    text = layers_doc.PAGE.read_text(encoding="utf-8")
    assert layers_doc.filled(text, section) == text, "write it again: python -m tools.layers_doc"


def test_the_table_is_long_enough() -> None:
    assert sum(len(names.split()) for names in architectures.NAMES.values()) >= 60
    assert sum(len(names.split()) for names in architectures.CHECKED.values()) >= 20
    for package, names in architectures.CHECKED.items():
        assert set(names.split()) <= set(architectures.NAMES[package].split())


@pytest.mark.parametrize("layer", ["patch_embed", "token_mixer", "multiscale"])
def test_a_layers_name_does_not_make_a_bare_matrix_a_table(layer: str) -> None:
    net = nn.Module()
    net.add_module(layer, nn.Module())
    getattr(net, layer).mix = nn.Parameter(torch.zeros(5, 6))
    with pytest.raises(ValueError, match=rf"cannot tell the role(.|\n)*{layer}.mix \(5x6\)"):
        plan(net)
