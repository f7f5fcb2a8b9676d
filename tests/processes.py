"""Processes of their own on the tests' database: a crash needs a killed process."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from django.db import connection

from tests.apps import PARENT_VARIABLE
from tests.postgres import ROOT, wait_until

PREPARE = "import django; django.setup()\n"


class Process:
    """One started process; its output goes to a file, so that it never blocks on a full pipe."""

    def __init__(self, command: list[str], environment: Mapping[str, str], output: Path) -> None:
        self._output = output
        with output.open("wb") as file:
            self.popen = subprocess.Popen(
                command, cwd=ROOT, env=environment, stdin=subprocess.DEVNULL, stdout=file, stderr=file
            )

    @property
    def pid(self) -> int:
        return self.popen.pid

    @property
    def output(self) -> str:
        """What the process has written so far, both streams."""
        return self._output.read_text(errors="replace")

    @property
    def running(self) -> bool:
        return self.popen.poll() is None

    def wait(self, timeout: float = 30) -> int:
        """The exit code (negative: the signal that ended it); AssertionError when the process goes on."""
        try:
            return self.popen.wait(timeout)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"Still running after {timeout:g} s; it wrote:\n{self.output}") from None

    def wait_for_output(self, text: str, timeout: float = 30) -> None:
        """Return as soon as the process has written `text`."""
        wait_until(
            lambda: text in self.output or not self.running, timeout, f"No {text!r} in:\n{self.output}"
        )
        assert text in self.output, f"Ended ({self.popen.returncode}) without {text!r}:\n{self.output}"

    def send(self, number: signal.Signals) -> None:
        self.popen.send_signal(number)

    def terminate(self) -> None:
        """SIGTERM: the process is asked to drain."""
        self.popen.terminate()

    def kill(self) -> None:
        """SIGKILL, and wait until it is gone."""
        self.popen.kill()
        self.popen.wait(10)

    def freeze(self) -> None:
        self.popen.send_signal(signal.SIGSTOP)

    def thaw(self) -> None:
        self.popen.send_signal(signal.SIGCONT)


class Processes:
    """Starts processes on the tests' database and ends them, whatever becomes of the test."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._started: list[Process] = []

    def manage(self, *arguments: str, **given: Any) -> Process:
        """Start a management command; `settings` are its DURABLE_JOBS, `environment` is added to its own."""
        return self._start([sys.executable, "-m", "django", *arguments], **given)

    def python(self, code: str, *arguments: str, **given: Any) -> Process:
        """Start Python code with Django set up; `arguments` are its ``sys.argv[1:]``."""
        return self._start([sys.executable, "-c", PREPARE + code, *arguments], **given)

    def end(self) -> None:
        for process in self._started:
            if process.running:
                process.popen.kill()
        for process in self._started:
            process.popen.wait(10)

    def _start(
        self,
        command: list[str],
        *,
        settings: Mapping[str, Any] | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> Process:
        output = self._folder / f"process-{len(self._started) + 1}.txt"
        process = Process(command, {**process_environment(settings), **(environment or {})}, output)
        self._started.append(process)
        return process


def process_environment(settings: Mapping[str, Any] | None = None) -> dict[str, str]:
    """The environment in which Django finds the settings of jobs and the database of this run."""
    return {
        **os.environ,
        "DATABASE_URL": database_url(),
        "DJANGO_SETTINGS_MODULE": "tests.job_settings",
        "DURABLE_JOBS_TEST_SETTINGS": json.dumps(settings or {}),
        "PYTHONUNBUFFERED": "1",
        PARENT_VARIABLE: str(os.getpid()),
    }


def database_url() -> str:
    """The address of the database that this run has created, for other processes."""
    name = connection.settings_dict["NAME"]
    if connection.vendor == "sqlite":
        return f"sqlite:///{name}"
    return urlsplit(os.environ["DATABASE_URL"])._replace(path=f"/{name}").geturl()
