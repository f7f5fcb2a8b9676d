"""The wheel as a stranger uses it: built, installed into an empty environment, added to an empty project."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

FOREIGN = {"tests", "project", "benchmarks", "templates", ".ci"}

JOBS = """
from durable_jobs.kinds import Done, Kind, register


@register
class Greet(Kind):
    name = "greetings.greet"

    def step(self, ctx):
        return Done({"greeting": f"Hello {ctx.input['name']}"})
"""

START = """
from durable_jobs import service

print(service.start("greetings.greet", {"name": "wheel"}).job.pk)
"""

SHOW = """
from durable_jobs.models import Job

job = Job.objects.get()
assert job.status == "completed", (job.status, job.error_code, job.error_message)
assert job.result == {"greeting": "Hello wheel"}, job.result
"""


def main() -> int:
    with tempfile.TemporaryDirectory(prefix="durable-jobs-wheel-") as name:
        folder = Path(name)
        wheel = build(folder / "dist")
        check_contents(wheel)
        python = install(wheel, folder / "venv")
        project = start_project(python, folder / "site")
        use(python, project)
    print("Wheel: passed")
    return 0


def build(target: Path) -> Path:
    """Build the source distribution, and the wheel from it."""
    run(sys.executable, "-m", "build", "--outdir", str(target), str(ROOT), cwd=target.parent)
    (source,) = target.glob("*.tar.gz")
    with tarfile.open(source) as archive:
        strangers = {part for part in map(second_part, archive.getnames()) if part in FOREIGN}
    assert not strangers, f"The source distribution holds {strangers}"
    (wheel,) = target.glob("*.whl")
    return wheel


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


def install(wheel: Path, target: Path) -> Path:
    run(sys.executable, "-m", "venv", str(target), cwd=target.parent)
    python = target / "bin" / "python"
    run(str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", str(wheel))
    run(str(python), "-m", "pip", "check", "--disable-pip-version-check")
    return python


def start_project(python: Path, folder: Path) -> Path:
    """An empty project with one small app, as `startproject` and `startapp` make them."""
    folder.mkdir()
    run(str(python), "-m", "django", "startproject", "site_of_a_stranger", ".", cwd=folder)
    run(str(python), "manage.py", "startapp", "greetings", cwd=folder)
    (folder / "greetings" / "jobs.py").write_text(JOBS)
    with (folder / "site_of_a_stranger" / "settings.py").open("a") as settings:
        settings.write('\nINSTALLED_APPS += ["durable_jobs", "greetings"]\n')
        settings.write(
            'DATABASES["default"]["OPTIONS"] = '
            '{"transaction_mode": "IMMEDIATE", "timeout": 20, "init_command": "PRAGMA journal_mode=WAL;"}\n'
        )
    return folder


def use(python: Path, project: Path) -> None:
    def manage(*arguments: str) -> None:
        run(str(python), "manage.py", *arguments, cwd=project)

    manage("check", "--fail-level", "WARNING")
    manage("makemigrations", "--check", "--dry-run")
    manage("migrate", "--verbosity", "0")
    if not (ROOT / "durable_jobs" / "worker.py").exists():
        return
    manage("shell", "--command", START)
    manage("runworker", "--until-idle")
    manage("shell", "--command", SHOW)


def run(*command: str, cwd: Path | None = None) -> None:
    """Run a command with an environment in which only the installed package can be found."""
    environment = {
        name: value
        for name, value in os.environ.items()
        if name not in {"PYTHONPATH", "DJANGO_SETTINGS_MODULE", "DATABASE_URL"}
    }
    print("+", shutil.which(command[0]) and Path(command[0]).name, *command[1:], flush=True)
    done = subprocess.run(command, cwd=cwd or tempfile.gettempdir(), env=environment, timeout=300)
    if done.returncode != 0:
        sys.exit(f"Wheel: FAILED ({' '.join(command)} ended with {done.returncode})")


if __name__ == "__main__":
    sys.exit(main())
