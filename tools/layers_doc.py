"""The plans of three known models: `python -m tools.layers_doc` writes them in docs/layers.md."""

from importlib.metadata import version
from pathlib import Path

import torch
from torch import nn

from sodaopt import plan
from sodaopt.layers.recipes import RECIPES, rule_of, rules
from sodaopt.layers.roles import ROLES

PAGE = Path(__file__).parents[1] / "docs" / "layers.md"
END = "<!-- layers:end -->"


def stamp(installed: str) -> str:
    """Names of layers change between versions, so the page says which one it shows."""
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


def block(text: str) -> str:
    return f"```text\n{text}\n```"


def role_table() -> str:
    """What each role is, and what the two main recipes give it."""
    lines = ["| role | what it is | soda_dagger | muon |", "|---|---|---|---|"]
    for role, what in ROLES.items():
        cells = []
        for name in ("soda_dagger", "muon"):
            rule = rule_of(rules(RECIPES[name]), role)
            assert rule is not None
            g = rule.method.geometry
            norm = getattr(g, "norm", None)
            how = f"{type(norm).__name__} {norm.scale.__name__}" if norm else "Adam"
            how = (
                how.removesuffix(" hidden") if role in ("norm", "bias", "scalar", "vector") else how
            )
            radius = f", radius {rule.radius:g}" if rule.radius else ""
            factor = f", {rule.lr_factor:g}x lr" if rule.lr_factor != 1 else ""
            cells.append(f"{how}{radius}{factor}")
        lines.append(f"| `{role}` | {what} | {' | '.join(cells)} |")
    return "\n".join(lines)


def generated() -> str:
    return "\n\n".join(
        (
            "## Roles\n\n" + role_table(),
            '## GPT-2 124M\n\n`print(sodaopt.plan(model, "soda_dagger"))`\n\n'
            + block(str(plan(gpt2(), "soda_dagger"))),
            '## Llama 7B\n\n`print(sodaopt.plan(model, "muon"))`\n\n'
            + block(str(plan(llama(), "muon"))),
            '## ViT-B/16\n\n`print(sodaopt.plan(model, "soda(uscion)"))`\n\n'
            + block(str(plan(vit(), "soda(uscion)"))),
        )
    )


def filled(text: str) -> str:
    """The page with everything between the marks written anew."""
    before, rest = text.split("<!-- layers:begin", 1)
    after = rest.split(END, 1)[1]
    return f"{before}{stamp(version('transformers'))}\n\n{generated()}\n\n{END}{after}"


if __name__ == "__main__":
    PAGE.write_text(filled(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
    print(f"wrote {PAGE}")
