"""Builds src/sodaopt/native.c with the package, where there is a compiler.

Without one, or with SODAOPT_NATIVE=0, the wheel is pure Python and works everywhere.

    python hatch_build.py      build it in place, for a checkout that is not installed
"""

from __future__ import annotations

import contextlib
import os
import shlex
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path
from typing import Any

SOURCE = Path(__file__).parent / "src" / "sodaopt" / "native.c"
LIBRARY = SOURCE.with_name("libnative.so")


def build() -> str | None:
    """Compile beside the source. Where that cannot be done: why, and no older library is left."""
    why = _build()
    if why:
        with contextlib.suppress(OSError):
            LIBRARY.unlink()
    return why


def _build() -> str | None:
    if os.environ.get("SODAOPT_NATIVE") == "0":
        return "SODAOPT_NATIVE=0"
    if sys.platform != "linux":
        return f"not done on {sys.platform}"
    new = LIBRARY.with_suffix(f".{os.getpid()}.so")
    # Products and sums are fused as in torch's lerp_. Compiled for OpenMP but not linked with it:
    # the runtime is the one that torch has loaded.
    flags = ["-O3", "-fPIC", "-fopenmp", "-ffp-contract=fast"]
    try:
        cc = shlex.split(os.environ.get("CC") or "cc")
        with tempfile.TemporaryDirectory() as folder:
            made = Path(folder) / "native.o"
            subprocess.run([*cc, *flags, "-c", SOURCE, "-o", made], check=True)
            subprocess.run([*cc, "-shared", made, "-o", new], check=True)
        new.replace(LIBRARY)  # at once: a running process may have the old one
    except (OSError, ValueError, subprocess.SubprocessError) as error:
        with contextlib.suppress(OSError):
            new.unlink()
        return str(error)
    return None


def main() -> None:
    why = build()
    sys.exit(f"native.c was not built: {why}" if why else 0)


if __name__ == "__main__":
    main()
else:
    from hatchling.builders.hooks.plugin.interface import BuildHookInterface

    class Native(BuildHookInterface[Any]):
        def initialize(self, version: str, build_data: dict[str, Any]) -> None:
            if why := build():
                self.app.display_warning(f"a pure wheel, native.c was not built: {why}")
                return
            system = sysconfig.get_platform().replace("-", "_").replace(".", "_")
            build_data["artifacts"].append(str(LIBRARY.relative_to(SOURCE.parents[2])))
            build_data["pure_python"] = False
            build_data["tag"] = f"py3-none-{system}"
