"""Builds src/sodaopt/native.c with the package, where there is a compiler.

Without one, or with SODAOPT_NATIVE=0, the wheel is pure Python and works everywhere.

    python hatch_build.py      build it in place, for a checkout that is not installed
"""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Any

SOURCE = Path(__file__).resolve().parent / "src" / "sodaopt" / "native.c"
LIBRARY = SOURCE.with_name("libnative.so")


def build() -> str | None:
    """Compile beside the source; why not, where it cannot be done."""
    if os.environ.get("SODAOPT_NATIVE") == "0":
        return "SODAOPT_NATIVE=0"
    if sys.platform != "linux":
        return f"not done on {sys.platform}"
    cc = shlex.split(os.environ.get("CC", "cc"))
    new, made = (LIBRARY.with_suffix(f".{os.getpid()}.{kind}") for kind in ("so", "o"))
    # Compiled for OpenMP but not linked with it: the runtime is the one that torch has loaded.
    try:
        subprocess.run([*cc, "-O3", "-fPIC", "-fopenmp", "-c", SOURCE, "-o", made], check=True)
        subprocess.run([*cc, "-shared", made, "-o", new], check=True)
        new.replace(LIBRARY)  # at once: a running process may have the old one
    except (OSError, subprocess.SubprocessError) as error:
        return str(error)
    finally:
        made.unlink(missing_ok=True)
        new.unlink(missing_ok=True)
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
            build_data["artifacts"].append(str(LIBRARY.relative_to(self.root)))
            build_data["pure_python"] = False
            build_data["tag"] = f"py3-none-{system}"
