"""The Python of the README and of every page of the site runs, block after block, as a script."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from torch import nn

ROOT = Path(__file__).parents[1]
BLOCK = re.compile(r"^```python\n(.*?)^```", flags=re.DOTALL | re.MULTILINE)
PAGES = {
    str(page.relative_to(ROOT)): blocks
    for page in [*sorted(ROOT.glob("*.md")), *sorted(ROOT.glob("docs/**/*.md"))]
    if (blocks := BLOCK.findall(page.read_text(encoding="utf-8")))
}


def network() -> nn.Module:
    return nn.Sequential(
        nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 1)
    )


def named() -> nn.Module:
    """A model with the names that the patterns in docs/layers.md look for."""
    model, mixer, experts = nn.Module(), nn.Module(), nn.Module()
    model.embed, model.wpe = nn.Embedding(16, 8), nn.Embedding(4, 8)
    model.c_attn, model.lm_head = nn.Linear(8, 24), nn.Linear(8, 16)
    mixer.A_log = nn.Parameter(torch.zeros(8))
    experts.w1, experts.is_transposed = nn.Parameter(torch.zeros(2, 8, 12)), True
    model.blocks = nn.ModuleList([nn.ModuleDict({"mixer": mixer, "experts": experts})])
    return model


def names(page: str) -> dict[str, object]:
    """The names that a page may use without defining them. The README defines all of its own."""
    if not page.startswith("docs"):
        return {"__name__": "page"}
    torch.manual_seed(0)
    model = named() if page == "docs/layers.md" else network()
    return {
        "__name__": "page",
        "torch": torch,
        "model": model,
        "params": list(model.parameters()),
        "pretrained": network().state_dict(),
    }


def test_the_pages_are_found() -> None:
    assert len(PAGES["README.md"]) >= 4
    assert {"docs/choose.md", "docs/guides/continue.md", "docs/api/zoo.md"} <= set(PAGES)


@pytest.mark.parametrize("page", PAGES)
def test_all_blocks(page: str) -> None:
    exec(compile("\n".join(PAGES[page]), page, "exec", dont_inherit=True), names(page))


def test_no_comment_breaks_a_paragraph() -> None:
    """Markdown ends a paragraph at a line that begins with an HTML comment."""
    broken = re.compile(r"^ *<!--[^>]*-->[^\n]", flags=re.MULTILINE)
    pages = [ROOT / "README.md", *ROOT.glob("docs/**/*.md")]
    assert not [p for p in pages if broken.search(p.read_text("utf-8"))]


@pytest.mark.parametrize("page", sorted(ROOT.glob("*.md")), ids=lambda page: page.name)
def test_links(page: Path) -> None:
    """Links between files outside of docs/, which the build of the site does not see."""
    for target in re.findall(r"\]\((?!https?:)([^)#]+)", page.read_text(encoding="utf-8")):
        assert (ROOT / target).exists(), target
