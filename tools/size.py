"""Count the library's lines of code, without blank lines, comments and docstrings.

    python -m tools.size             the total and the longest files
    python -m tools.size --all       every file

The lab and the theory are not counted because no optimizer needs them.
"""

from __future__ import annotations

import argparse
import ast
import io
import tokenize
from pathlib import Path

PACKAGE = Path(__file__).parents[1] / "src" / "sodaopt"
NOT_CODE = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENDMARKER,
}


def code_lines(source: str) -> int:
    """Count the lines that hold a token of code.

    A string that is a statement of its own is documentation, wherever it stands.
    """
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in NOT_CODE:
            lines.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            lines.difference_update(range(node.lineno, (node.end_lineno or 0) + 1))
    return len(lines)


def sizes() -> dict[str, tuple[int, int]]:
    """Map each file to its lines of code and its lines in all, longest file first."""
    found = {}
    for path in PACKAGE.rglob("*.py"):
        name = path.relative_to(PACKAGE)
        if name.parts[0] not in ("lab", "theory"):
            source = path.read_text(encoding="utf-8")
            found[str(name)] = code_lines(source), source.count("\n")
    return dict(sorted(found.items(), key=lambda item: (-item[1][1], item[0])))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--all", action="store_true", help="list every file, not the longest ten")
    found = sizes()
    shown = list(found.items())[: None if parser.parse_args().all else 10]
    print(" code   all  file")
    for name, (code, all_) in shown:
        print(f"{code:5d} {all_:5d}  {name}")
    totals = [sum(column) for column in zip(*found.values(), strict=True)]
    print(f"{totals[0]:5d} {totals[1]:5d}  in {len(found)} files")


if __name__ == "__main__":
    main()
