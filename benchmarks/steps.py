"""Write the table of steps in docs/performance.md from benchmarks/results/steps-h200.json.

    python -m benchmarks.steps

The rows are those of `sodaopt bench` for 124m and 0.9b.
"""

from __future__ import annotations

import json

from benchmarks.pages import DOCS, RESULTS, filled, markdown

PAGE = DOCS / "performance.md"
COLUMNS = {
    "step, ms": "ms",
    "host, ms": "host_ms",
    "state": "state",
    "peak": "peak",
    "first step, s": "first_step_s",
}


def page() -> str:
    result = json.loads((RESULTS / "steps-h200.json").read_text())
    lines = [["optimizer", "parameters", *COLUMNS]]
    for row in result["rows"]:
        numbers = [f"{row[key]:.2f}" for key in COLUMNS.values()]
        lines.append([row["optimizer"], row["model"], *numbers])
    head = f"{result['device']}, torch {result['torch']}, {result['date']}:"
    return filled(PAGE, "steps", f"{head}\n\n{markdown(lines)}\n\n{result['note']}")


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
