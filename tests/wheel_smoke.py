"""What is published: wheel and source distribution, what they hold and say, and what strangers meet with them."""

from __future__ import annotations

import email
import glob
import os
import re
import shutil
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path

import trove_classifiers

import durable_jobs
from tests import fresh_projects
from tests.fresh_projects import call, tell

ROOT = Path(__file__).resolve().parent.parent

FOREIGN = {"tests", "project", "benchmarks", "templates", ".ci"}


def main() -> int:
    with tempfile.TemporaryDirectory(prefix="durable-jobs-wheel-") as name:
        folder = Path(name)
        wheel = build(folder / "dist")
        check_contents(wheel)
        check_metadata(wheel)
        check_source(folder / "dist", wheel)
        check_old_python(wheel, folder)
        fresh_projects.main(wheel, folder)
    print("Wheel: passed")
    return 0


def build(target: Path) -> Path:
    """Build the source distribution, and the wheel from it."""
    call([sys.executable, "-m", "build", "--outdir", str(target), str(ROOT)], target.parent)
    (wheel,) = target.glob("*.whl")
    return wheel


def check_source(target: Path, wheel: Path) -> None:
    """The source distribution holds what was decided, and the wheel from it is the wheel from this tree."""
    (source,) = target.glob("*.tar.gz")
    with tarfile.open(source) as archive:
        parts = {second_part(name) for name in archive.getnames()}
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert not parts & FOREIGN, f"The source distribution holds {parts & FOREIGN}"
    wanted = {"LICENSE", "CHANGELOG.md", "README.md", "pyproject.toml"}
    wanted |= {f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md")}
    assert wanted <= names, f"The source distribution lacks {wanted - names}"
    shutil.rmtree(ROOT / "build", ignore_errors=True)  # what an earlier build has left would go into this one
    call([sys.executable, "-m", "build", "--wheel", "--outdir", str(target / "tree"), str(ROOT)], target)
    shutil.rmtree(ROOT / "build", ignore_errors=True)
    (from_tree,) = (target / "tree").glob("*.whl")
    different = sorted(name for name, _ in contents(from_tree).items() ^ contents(wheel).items())
    assert not different, f"The tree and the source distribution make different wheels: {different}"
    call([sys.executable, "-m", "twine", "check", "--strict", str(source), str(wheel)])


def contents(wheel: Path) -> dict[str, int]:
    """Every file of a wheel with the checksum of its bytes."""
    with zipfile.ZipFile(wheel) as archive:
        return {one.filename: one.CRC for one in archive.infolist()}


def check_metadata(wheel: Path) -> None:
    """What an index would show is what the tree says, each thing from its one place."""
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (one for one in archive.namelist() if one.endswith(".dist-info/METADATA"))
        metadata = email.message_from_bytes(archive.read(name))
    released = re.search(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert released and metadata["Version"] == durable_jobs.__version__ == released[1]
    assert metadata["License-Expression"] == "MIT" and metadata["Requires-Python"] == ">=3.11"
    always = [need for need in metadata.get_all("Requires-Dist", []) if "extra ==" not in need]
    assert always == ["Django>=5.2"], always
    assert set(metadata.get_all("Provides-Extra", [])) == set(fresh_projects.EXTRAS)
    assert metadata["Description-Content-Type"] == "text/markdown"
    description = str(metadata.get_payload())
    assert "service.start(" in description and "## What is promised" in description
    dead = re.findall(r"\]\((?!https://)[^)]*\)", description)
    assert not dead, f"An index cannot follow these links of the description: {dead}"
    unknown = set(metadata.get_all("Classifier", [])) - set(trove_classifiers.classifiers)
    assert not unknown, unknown


def check_old_python(wheel: Path, folder: Path) -> None:
    """A Python that is too old is told so by pip, and by make."""
    root = os.environ.get("PYENV_ROOT", os.path.expanduser("~/.pyenv"))
    found = [shutil.which("python3.10"), *glob.glob(f"{root}/versions/3.10*/bin/python")]
    old = next((path for path in found if path and tell([path, "-c", "print(1)"]) == "1"), None)
    if old is None:
        print("Wheel on a Python that is too old: left out, because no Python 3.10 was found (PATH, pyenv).")
        return
    said = call([old, "-m", "pip", "install", "--dry-run", "--no-deps", str(wheel)], code=1)
    assert "requires a different Python: 3.10" in said, said
    said = call(["make", "install", f"PYTHON={old}", f"VENV={folder / 'none'}"], ROOT, code=2)
    assert "durable_jobs needs Python 3.11 or later; name one with PYTHON=" in said, said


def second_part(name: str) -> str:
    return name.split("/")[1] if "/" in name else ""


def check_contents(wheel: Path) -> None:
    """Everything in the package's folder is in the wheel, and nothing else is."""
    with zipfile.ZipFile(wheel) as archive:
        inside = {name for name in archive.namelist() if ".dist-info/" not in name}
        licences = [name for name in archive.namelist() if name.endswith("LICENSE")]
    wanted = {
        str(path.relative_to(ROOT))
        for path in (ROOT / "durable_jobs").rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    assert inside == wanted, f"missing: {sorted(wanted - inside)}; too much: {sorted(inside - wanted)}"
    assert licences, "The wheel holds no LICENSE"


if __name__ == "__main__":
    sys.exit(main())
