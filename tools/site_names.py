"""Check that the site documents every public name. `make docs` runs it after the build.

    python -m tools.site_names site

The public names are those in `__all__` of sodaopt and of its public modules, and the rows of the
zoo.
"""

from __future__ import annotations

import sys
import zlib
from pathlib import Path
from types import ModuleType

import sodaopt
from sodaopt.core.method import ROWS


def public_names() -> set[str]:
    names = {f"sodaopt.zoo.{name}" for name in ROWS}
    for name in set(sodaopt.__all__) - {"__version__"}:
        member = getattr(sodaopt, name)
        if isinstance(member, ModuleType):
            names |= {f"sodaopt.{name}.{inner}" for inner in getattr(member, "__all__", ())}
        elif name == getattr(member, "__module__", "").removeprefix("sodaopt."):
            names.add(f"sodaopt.{name}.{name}")  # a function in a module of the same name
        else:
            names.add(f"sodaopt.{name}")
    return names


def documented(site: Path) -> set[str]:
    """The names in the site's inventory: four lines of header, then compressed lines."""
    body = (site / "objects.inv").read_bytes().split(b"\n", 4)[4]
    return {line.split(" ")[0] for line in zlib.decompress(body).decode().splitlines()}


def main(site: str) -> int:
    missing = sorted(public_names() - documented(Path(site)))
    if missing:
        print(f"no page of {site} documents {', '.join(missing)}", file=sys.stderr)
    return bool(missing)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
