"""The Python of the README and of docs/choose.md runs, block after block, as one script each."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

README = Path(__file__).parents[1] / "README.md"
CHOOSE = README.parent / "docs" / "choose.md"


@pytest.mark.parametrize(("page", "count"), [(README, 4), (CHOOSE, 1)])
def test_all_blocks(page: Path, count: int) -> None:
    blocks = re.findall(r"```python\n(.*?)```", page.read_text(), flags=re.DOTALL)
    assert len(blocks) >= count
    names: dict[str, object] = {"__name__": "page"}
    exec(compile("\n".join(blocks), str(page), "exec"), names)
    assert "opt" in names


def test_links() -> None:
    for target in re.findall(r"\]\((docs/[^)#]+)\)", README.read_text()):
        assert (README.parent / target).exists(), target
