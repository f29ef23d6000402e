"""The wheel as a user gets it: its files and requirements, and that the README's code runs."""

import json
import re
import subprocess
import sys
import tarfile
import venv
import zipfile
from dataclasses import dataclass
from email.message import Message
from email.parser import Parser
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

pytestmark = pytest.mark.slow  # each test needs the wheel, most of them an environment with it
ROOT = Path(__file__).resolve().parents[1]


def run(*command: str | Path, cwd: Path, env: dict[str, str] | None = None) -> str:
    """Run a command and return its output. Fail with all of its output."""
    done = subprocess.run(
        [str(part) for part in command], cwd=cwd, env=env, capture_output=True, text=True
    )
    assert done.returncode == 0, f"exit code {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def torch_and_its_dependencies() -> dict[str, Path]:
    """Top-level entries of site-packages that belong to torch or to its dependencies."""
    entries: dict[str, Path] = {}
    todo, seen = ["torch"], set()
    while todo:
        name = canonicalize_name(todo.pop())
        if name in seen:
            continue
        seen.add(name)
        try:
            dist = metadata.distribution(name)
        except metadata.PackageNotFoundError:
            continue
        for file in dist.files or []:
            top = file.parts[0]
            if top not in ("..", "__pycache__"):
                entries[top] = Path(str(dist.locate_file(top)))
        for line in dist.requires or []:
            requirement = Requirement(line)
            if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
                todo.append(requirement.name)
    return entries


@dataclass
class Installed:
    python: Path
    site: Path
    cwd: Path

    def run(self, *arguments: str | Path) -> str:
        # -I keeps PYTHONPATH, the user's site and the current folder out of sys.path.
        return run(self.python, "-I", *arguments, cwd=self.cwd)


def build(target: str, folder: Path, source: Path = ROOT) -> Path:
    """Build the wheel or the sdist of a source tree, and return its path."""
    run(sys.executable, "-m", "hatchling", "build", "-t", target, "-d", folder, cwd=source)
    (path,) = folder.iterdir()
    return path


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build("wheel", tmp_path_factory.mktemp("dist"))


@pytest.fixture(scope="module")
def wheel_metadata(wheel: Path) -> Message:
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (n for n in archive.namelist() if n.endswith(".dist-info/METADATA"))
        return Parser().parsestr(archive.read(name).decode())


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Installed:
    """A fresh environment with the wheel, torch and nothing else.

    torch is linked in and not installed again, which would take a minute.
    """
    home = tmp_path_factory.mktemp("fresh")
    venv.create(home, with_pip=False, symlinks=True)
    python = home / "bin" / "python"
    site = Path(
        run(
            python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))", cwd=home
        ).strip()
    )
    for name, path in torch_and_its_dependencies().items():
        (site / name).symlink_to(path)
    run(
        *(sys.executable, "-m", "pip", "--python", python, "install", "--quiet"),
        *("--no-deps", "--no-index", "--disable-pip-version-check", wheel),
        cwd=home,
    )
    return Installed(python, site, tmp_path_factory.mktemp("elsewhere"))


def test_wheel_holds_the_package_and_nothing_else(wheel: Path, wheel_metadata: Message) -> None:
    info = f"sodaopt-{wheel_metadata['Version']}.dist-info"
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    assert {name.split("/")[0] for name in names} == {"sodaopt", info}
    assert {"sodaopt/__init__.py", "sodaopt/py.typed", f"{info}/licenses/LICENSE"} <= names
    assert not [name for name in names if re.search(r"(^|/)(tests/|test_|conftest)", name)]


def test_the_sdist_builds_the_same_wheel(wheel: Path, tmp_path: Path) -> None:
    with tarfile.open(build("sdist", tmp_path / "sdist")) as archive:
        archive.extractall(tmp_path / "source", filter="data")
    (source,) = (tmp_path / "source").iterdir()
    again = build("wheel", tmp_path / "wheel", source)
    with zipfile.ZipFile(wheel) as a, zipfile.ZipFile(again) as b:
        assert {i.filename: i.CRC for i in a.infolist()} == {
            i.filename: i.CRC for i in b.infolist()
        }


def test_wheel_needs_only_torch(wheel_metadata: Message) -> None:
    requirements = [Requirement(line) for line in wheel_metadata.get_all("Requires-Dist", [])]
    always = [str(r) for r in requirements if r.marker is None or r.marker.evaluate({"extra": ""})]
    assert always == ["torch>=2.11"]


def test_the_wheel_is_pure_python(wheel: Path) -> None:
    assert wheel.stem.endswith("-py3-none-any")


def test_first_readme_snippet_runs_from_the_wheel(installed: Installed) -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    snippet = re.search(r"^```python\n(.*?)^```", readme, re.DOTALL | re.MULTILINE)
    assert snippet is not None, "README.md has no python snippet"
    script = installed.cwd / "snippet.py"
    script.write_text(snippet[1], encoding="utf-8")
    installed.run(script)


@pytest.fixture(scope="module")
def imported(installed: Installed) -> dict[str, Any]:
    """Import the installed package once for all tests, and return its file, versions and modules.

    It runs in this interpreter, where the packages that must stay out could be imported.
    """
    code = f"""
import importlib.metadata, json, sys
sys.path.insert(0, {str(installed.site)!r})
import torch
before = set(sys.modules)
import sodaopt
print(json.dumps({{
    "file": sodaopt.__file__,
    "versions": [sodaopt.__version__, importlib.metadata.version("sodaopt")],
    "modules": sorted({{name.split(".")[0] for name in set(sys.modules) - before}}),
}}))
"""
    return json.loads(run(sys.executable, "-I", "-c", code, cwd=installed.cwd))


def test_import_comes_from_the_wheel(installed: Installed, imported: dict[str, Any]) -> None:
    assert Path(imported["file"]) == installed.site / "sodaopt" / "__init__.py"


def test_version_is_the_same_everywhere(imported: dict[str, Any], wheel_metadata: Message) -> None:
    assert imported["versions"] == [wheel_metadata["Version"]] * 2


def test_import_loads_nothing_beyond_torch(imported: dict[str, Any]) -> None:
    allowed = {entry.removesuffix(".py") for entry in torch_and_its_dependencies()}
    assert set(imported["modules"]) - allowed - set(sys.stdlib_module_names) == {"sodaopt"}


def test_the_environment_is_printed_without_the_lab(installed: Installed) -> None:
    said = installed.run("-m", "sodaopt.cli", "env")
    assert re.search(r"^torch +\d", said, re.MULTILINE)


def test_import_is_quick() -> None:
    """0.2 s are promised beyond torch. The best of three runs may take twice as long here."""
    code = """
import os, time, torch
for _ in range(3):
    if not os.fork():
        t = time.process_time()
        import sodaopt
        print(time.process_time() - t, flush=True)
        os._exit(0)
    os.wait()
"""
    seconds = list(map(float, run(sys.executable, "-c", code, cwd=ROOT).split()))
    assert len(seconds) == 3
    assert min(seconds) < 0.4
