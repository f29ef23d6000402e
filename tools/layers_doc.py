"""Write the roles and the plans of three known models into docs/layers.md.

python -m tools.layers_doc
"""

from importlib.metadata import version
from pathlib import Path

import torch
from torch import nn

from sodaopt import plan
from sodaopt.layers.recipes import RECIPES, rule_of, rules
from sodaopt.layers.roles import ROLES
from sodaopt.layers.table import geometry_label

PAGE = Path(__file__).parents[1] / "docs" / "layers.md"
END = "<!-- layers:end -->"


def stamp(installed: str) -> str:
    """Return the opening mark, with the version of transformers because layer names change."""
    return f"<!-- layers:begin transformers {installed} -->"


def gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    with torch.device("meta"):
        return GPT2LMHeadModel(GPT2Config())


def llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    with torch.device("meta"):
        return LlamaForCausalLM(LlamaConfig())


def vit() -> nn.Module:
    from transformers import ViTConfig, ViTForImageClassification

    with torch.device("meta"):
        return ViTForImageClassification(ViTConfig(num_labels=1000))


MODELS = (
    ("GPT-2 124M", gpt2, "soda_dagger"),
    ("Llama 7B", llama, "muon"),
    ("ViT-B/16", vit, "soda(uscion)"),
)


def role_table() -> str:
    """Return the meaning of each role, with its rule in the two main recipes."""
    lines = ["| role | meaning | soda_dagger | muon |", "|---|---|---|---|"]
    for role, meaning in ROLES.items():
        cells = []
        for name in ("soda_dagger", "muon"):
            rule = rule_of(rules(RECIPES[name]), role)
            assert rule is not None
            radius = f", radius {rule.radius:g}" if rule.radius else ""
            factor = f", {rule.lr_factor:g}x lr" if rule.lr_factor != 1 else ""
            method = "" if rule.method.name == name else f"{rule.method.name}: "
            cells.append(f"{method}{geometry_label(rule.method.geometry)}{radius}{factor}")
        lines.append(f"| `{role}` | {meaning} | {' | '.join(cells)} |")
    return "\n".join(lines)


def generated() -> str:
    """Return the text between the marks."""
    sections = ["## Roles\n\n" + role_table()]
    for title, model, recipe in MODELS:
        table = plan(model(), recipe)
        sections.append(
            f'## {title}\n\n`print(sodaopt.plan(model, "{recipe}"))`\n\n```text\n{table}\n```'
        )
    return "\n\n".join(sections)


def filled(text: str) -> str:
    """Return the page with new text between its marks."""
    before, rest = text.split("<!-- layers:begin", 1)
    after = rest.split(END, 1)[1]
    return f"{before}{stamp(version('transformers'))}\n\n{generated()}\n\n{END}{after}"


if __name__ == "__main__":
    PAGE.write_text(filled(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
    print(f"wrote {PAGE}")
