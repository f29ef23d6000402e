"""The README's Python runs, block after block, as one script."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

README = Path(__file__).parents[1] / "README.md"
BLOCKS = re.findall(r"```python\n(.*?)```", README.read_text(), flags=re.DOTALL)


def test_all_blocks(capsys: pytest.CaptureFixture[str]) -> None:
    assert len(BLOCKS) >= 4
    exec(compile("\n".join(BLOCKS), str(README), "exec"), {"__name__": "readme"})
    assert "loss" in capsys.readouterr().out


def test_links() -> None:
    for target in re.findall(r"\]\((docs/[^)#]+)\)", README.read_text()):
        assert (README.parent / target).exists(), target
