"""Write the roles, three plans and the table of architectures into docs/layers.md.

python -m tools.layers_doc

The sections of a package that is not installed stay as they are.
"""

import re
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from torch import nn

from sodaopt import plan
from sodaopt.layers.recipes import rules
from sodaopt.layers.table import geometry_label
from tools import architectures

PAGE = Path(__file__).parents[1] / "docs" / "layers.md"


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
    for role, meaning in architectures.MEANINGS.items():
        cells = []
        for name in ("soda_dagger", "muon"):
            rule = rules(name)[role]
            radius = getattr(rule.method.geometry, "radius", 1.0)
            radius = f", radius {radius:g}" if radius != 1 else ""
            factor = f", {rule.lr_factor:g}x lr" if rule.lr_factor != 1 else ""
            method = "" if rule.method.name == name else f"{rule.method.name}: "
            cells.append(f"{method}{geometry_label(rule.method.geometry)}{radius}{factor}")
        lines.append(f"| `{role}` | {meaning} | {' | '.join(cells)} |")
    return "\n".join(lines)


def plans() -> str:
    """Return the table of roles and the plans of three known models."""
    sections = ["## Roles\n\n" + role_table()]
    for title, model, recipe in MODELS:
        table = plan(model(), recipe)
        sections.append(
            f'## {title}\n\n`print(sodaopt.plan(model, "{recipe}"))`\n\n```text\n{table}\n```'
        )
    return "\n\n".join(sections)


# Each section of the page, the package that it needs, and how it is written.
SECTIONS: dict[str, tuple[str, Callable[[], str]]] = {
    "plans": ("transformers", plans),
    **{name: (name, partial(architectures.table, name)) for name in architectures.NAMES},
}


def written_with(section: str) -> str:
    """Return the version of the package that wrote a section of the page."""
    found = re.search(f"<!-- {section}:begin (.*) -->", PAGE.read_text(encoding="utf-8"))
    assert found is not None
    return found[1]


def filled(text: str, section: str) -> str:
    """Return the page with new text in a section, if the section's package is installed."""
    package, write = SECTIONS[section]
    if (version := architectures.installed(package)) is None:
        return text
    before, _, rest = text.partition(f"<!-- {section}:begin")
    end = f"<!-- {section}:end -->"
    after = rest.partition(end)[2]
    return f"{before}<!-- {section}:begin {version} -->\n\n{write()}\n\n{end}{after}"


if __name__ == "__main__":
    page = PAGE.read_text(encoding="utf-8")
    for name in SECTIONS:
        page = filled(page, name)
    PAGE.write_text(page, encoding="utf-8")
    print(f"wrote {PAGE}")
