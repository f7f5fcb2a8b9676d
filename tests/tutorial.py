"""docs/tutorial.md as a new user follows it, to the letter: files written, commands typed, answers compared.

`python -m tests.tutorial [--python python3.13]`. It happens in an empty folder, with the wheel of this tree: by this
Python and by the newest that is found, which takes the newest Django along.
"""

from __future__ import annotations

import argparse
import os
import re
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from tests.fresh_projects import tell
from tests.tasks.__main__ import newer_python
from tests.wheel_smoke import build

PAGE = Path(__file__).resolve().parent.parent / "docs" / "tutorial.md"
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
NAME = re.compile(r"(?P<append>At the end of )?`(?P<name>[\w./]+\.py)`:?$")
END = "end of the command"
LONGEST_WAIT = 60.0
"""Seconds in which a page that says `sleep 4` must be right on a slow machine."""


class Shell:
    """One interactive-like bash for all commands, as a reader has one terminal."""

    def __init__(self, folder: Path, environment: dict[str, str]) -> None:
        self.process = subprocess.Popen(
            ["bash", "--norc"],
            cwd=folder,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        self.say("set -m")

    def run(self, command: str) -> tuple[int, str]:
        """The command's exit code and what it printed."""
        self.say(f"{command}\necho; echo {END} $?")
        lines: list[str] = []
        assert self.process.stdout
        for line in self.process.stdout:
            if line.startswith(END):
                return int(line.removeprefix(END)), "".join(lines)
            lines.append(line)
        raise SystemExit(f"Tutorial: FAILED: the shell ended at {command}")

    def say(self, text: str) -> None:
        assert self.process.stdin
        self.process.stdin.write(text + "\n")
        self.process.stdin.flush()

    def end(self) -> None:
        """Leave nothing running: jobs of the shell are groups of its session."""
        for number in self.run("jobs -p")[1].split():
            subprocess.run(["kill", "-9", f"-{number}"], stderr=subprocess.DEVNULL)
        self.process.kill()
        self.process.wait()


def steps(page: str) -> Iterator[tuple[str, str, str]]:
    """(language, what stands in the line above, text) of each block."""
    for found in BLOCK.finditer(page):
        above = page[: found.start()].rstrip("\n").rpartition("\n")[2]
        yield found[1], above, found[2]


def follow(page: str, shell: Shell, folder: Path) -> int:
    """Do everything that the page says; the number of commands."""
    commands, slept = 0, False
    for language, above, text in steps(page):
        if language == "python":
            name = NAME.search(above)
            assert name, f"A block of Python whose file is not named: {text[:60]!r}"
            path = folder / "bookshop" / name["name"]
            if name["append"]:
                path.write_text(path.read_text() + "\n" + text)
            else:
                path.write_text(text)
            continue
        assert language == "console", language
        for command, expected in conversation(text):
            commands += 1
            print("$", command, flush=True)
            code, printed = shell.run(command)
            end = time.monotonic() + LONGEST_WAIT
            while slept and not matches(expected, printed) and time.monotonic() < end:
                time.sleep(0.5)
                code, printed = shell.run(command)
            slept = command.startswith("sleep ")
            print(printed.strip(), flush=True)
            if code != 0 or not matches(expected, printed):
                raise SystemExit(f"Tutorial: FAILED: {command} ended with {code}; the page says:\n{expected}")
    return commands


def conversation(text: str) -> Iterator[tuple[str, str]]:
    """Each command with the answer that the page shows."""
    for part in re.split(r"^\$ ", text, flags=re.MULTILINE)[1:]:
        command, _, answer = part.partition("\n")
        yield command, answer.strip()


def matches(expected: str, printed: str) -> bool:
    """Whether the answer is the one on the page, where … stands for anything; no answer says nothing."""
    if not expected:
        return "Traceback" not in printed
    pattern = ".*".join(re.escape(part) for part in expected.split("…"))
    return re.fullmatch(pattern, printed.strip(), re.DOTALL) is not None


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="tests.tutorial", description=__doc__)
    parser.add_argument("--python", help="the reader's interpreter (default: this one, and the newest)")
    options = parser.parse_args(arguments)
    for python in [options.python] if options.python else dict.fromkeys([sys.executable, newest()]):
        walk(python)
        said = tell([python, "-c", "import sys; print(sys.version.split()[0])"])
        print(f"Tutorial on Python {said}: passed", flush=True)
    print("Tutorial: passed")
    return 0


def newest() -> str:
    python = newer_python()
    if python is None:
        print(
            "Tutorial on a newer Python: left out, because no Python 3.12 or later was found (PATH, pyenv)."
        )
    return python or sys.executable


def walk(python: str) -> None:
    """From the empty folder to the end of the page."""
    environment = {
        name: value
        for name, value in os.environ.items()
        if name not in {"PYTHONPATH", "DJANGO_SETTINGS_MODULE", "DATABASE_URL", "VIRTUAL_ENV", "MAKEFLAGS"}
    }
    with tempfile.TemporaryDirectory(prefix="durable-jobs-tutorial-") as name:
        folder = Path(name)
        # What a reader gets by name is this very tree.
        page = PAGE.read_text().replace(
            "install durable-jobs\n", f"install --quiet {build(folder / 'dist')}\n"
        )
        page = page.replace("python3 -m venv", f"{python} -m venv", 1).replace("8000", str(free_port()))
        shell = Shell(folder, environment)
        try:
            commands = follow(page, shell, folder)
        finally:
            shell.end()
    assert commands > 20, "The page has lost its commands"


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
