"""One session of pytest that collects the tests once, and forks for whatever is to be run of them."""

from __future__ import annotations

import json
import os
import select
import shutil
import signal
import sys
from collections.abc import Callable, Mapping
from contextlib import redirect_stdout, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]

FIRST = "tests/store/test_models.py"
"""Its first test that needs the database makes it, for all forks."""
LONGEST_TEST = 60
"""Seconds that a test may take while it is learned what it reaches."""


def vendor() -> str:
    return "postgresql" if os.environ.get("DATABASE_URL", "").startswith("postgres") else "sqlite"


def say(text: str) -> None:
    print(text, file=sys.__stdout__, flush=True)


class Notes:
    """What became of each test that was run."""

    def __init__(self) -> None:
        self.failed: list[str] = []
        self.seconds: dict[str, float] = {}

    def pytest_runtest_logreport(self, report: Any) -> None:
        self.seconds[report.nodeid] = self.seconds.get(report.nodeid, 0.0) + report.duration
        if report.failed and report.nodeid not in self.failed:
            self.failed.append(report.nodeid)


class Tests:
    """The collected tests, on a database that every fork finds as the first one left it."""

    def __init__(self, folder: Path, act: Callable[[Tests], None]) -> None:
        self.items: dict[str, pytest.Item] = {}
        self._act = act
        self._notes = Notes()
        self._database = Database(folder)

    def collect(self, paths: list[str], left_out: list[str]) -> None:
        """Collect the tests, and do what is to be done with them."""
        os.chdir(ROOT)
        arguments = [
            "--ds=tests.mutation.settings", "-q", "-q", "-s", "-W", "ignore", "-p", "no:cacheprovider",
            "-p", "no:faulthandler", f"--timeout={LONGEST_TEST}", "--create-db", "--reuse-db",
            *(f"--ignore={path}" for path in left_out), *paths,
        ]  # fmt: skip
        with open(os.devnull, "w") as nowhere, redirect_stdout(nowhere):
            code = pytest.main(arguments, plugins=[self, self._notes])
        if not self.items:
            raise SystemExit(f"The tests cannot be collected: pytest ended with {int(code)}.")

    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        if session.testsfailed:
            raise session.Interrupted("a test file cannot be imported")
        # A parameter that shows its address has another name each time.
        self.items = {item.nodeid: item for item in session.items if " at 0x" not in item.nodeid}
        first = next(
            name for name, item in self.items.items() if name.startswith(FIRST) and _needs_database(item)
        )
        self._play([first], first_failure=True)
        self._database.keep()
        try:
            self._act(self)
        finally:
            self._database.remove()
        return True

    def run(
        self,
        names: list[str],
        limits: Mapping[str, float],
        *,
        patience: float,
        prepare: Callable[[], None] | None = None,
    ) -> str | None:
        """Run the tests in a fork until one fails: its name, "" when all pass, None when they hang."""

        def act() -> str:
            if prepare is not None:
                prepare()
            for name in names:
                self.items[name].add_marker(pytest.mark.timeout(limits[name]), append=False)
            self._play(names, first_failure=True)
            return self._notes.failed[0] if self._notes.failed else ""

        self._database.restore()
        answer = in_a_fork(act, patience)
        return None if answer is None else str(answer)

    def learn(self, names: list[str], measured: Any, patience: float) -> dict[str, Any]:
        """Run all of them in a fork: how long each took, which failed, and what `measured` saw of each."""

        def act() -> dict[str, Any]:
            measured.start()
            self._play(names, first_failure=False, before=measured.switch_context)
            measured.stop()
            data = measured.get_data()
            lines = {path: data.contexts_by_lineno(path) for path in data.measured_files()}
            return {"seconds": self._notes.seconds, "failed": self._notes.failed, "lines": lines}

        self._database.restore()
        answer = in_a_fork(act, patience)
        if not isinstance(answer, dict):
            raise SystemExit(f"The tests cannot be run: {answer or 'they hang'}")
        return answer

    def _play(
        self, names: list[str], *, first_failure: bool, before: Callable[[str], Any] = lambda name: None
    ) -> None:
        items = [self.items[name] for name in names]
        for item, following in zip(items, [*items[1:], _Elsewhere(items[0].session)], strict=True):
            before(item.nodeid)
            item.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
            if first_failure and self._notes.failed:
                return


@dataclass(frozen=True)
class _Elsewhere:
    """Stands for a test that shares nothing with the last one but the session: what that has set up stays."""

    session: pytest.Session

    def listchain(self) -> list[Any]:
        return [self.session]


def _needs_database(item: pytest.Item) -> bool:
    return item.get_closest_marker("django_db") is not None


class Database:
    """The tests' database, made once and copied for each fork."""

    def __init__(self, folder: Path) -> None:
        self._own, self._template = folder / "mutant.sqlite3", folder / "template.sqlite3"
        os.environ["DURABLE_JOBS_MUTATION_DATABASE"] = str(self._own)

    def keep(self) -> None:
        from django.db import connections

        connections.close_all()
        if vendor() == "sqlite":
            shutil.copy(self._own, self._template)
        else:
            self._on_the_server(
                "DROP DATABASE IF EXISTS {template}", "ALTER DATABASE {own} RENAME TO {template}"
            )

    def restore(self) -> None:
        if vendor() == "sqlite":
            for left in self._own.parent.glob(f"{self._own.name}*"):
                left.unlink()
            shutil.copy(self._template, self._own)
        else:
            self._on_the_server(
                "DROP DATABASE IF EXISTS {own} WITH (FORCE)", "CREATE DATABASE {own} TEMPLATE {template}"
            )

    def remove(self) -> None:
        """Leave nothing on the server that a next run would trip over."""
        if vendor() == "postgresql":
            self._on_the_server(
                "DROP DATABASE IF EXISTS {own} WITH (FORCE)", "DROP DATABASE IF EXISTS {template}"
            )

    def _on_the_server(self, *statements: str) -> None:
        import psycopg
        from django.db import connection
        from psycopg import sql

        settings = connection.settings_dict
        names = {name: sql.Identifier(f"{settings['NAME']}{ending}") for name, ending in
                 [("own", ""), ("template", "_template")]}  # fmt: skip
        with psycopg.connect(
            host=settings["HOST"], port=settings["PORT"], user=settings["USER"], password=settings["PASSWORD"],
            dbname="postgres", autocommit=True,
        ) as server:  # fmt: skip
            for statement in statements:
                server.execute(sql.SQL(statement).format(**names))


def in_a_fork(act: Callable[[], Any], patience: float) -> Any:
    """Run `act()` in a process of its own, and answer with what it says; None when it hangs or dies."""
    read, write = os.pipe()
    pid = os.fork()
    if not pid:
        os.close(read)
        os.setsid()
        quiet = os.open(os.devnull, os.O_RDWR)
        for stream in (0, 1, 2):
            os.dup2(quiet, stream)
        try:
            answer = json.dumps(act())
        except BaseException as error:
            answer = json.dumps(f"broken: {error!r}"[:200])
        with os.fdopen(write, "w") as pipe:
            pipe.write(answer)
        os._exit(0)
    os.close(write)
    return _answer(pid, read, patience)


def _answer(pid: int, read: int, patience: float) -> Any:
    with os.fdopen(read) as pipe:
        ready, _, _ = select.select([pipe], [], [], patience)
        said = pipe.read() if ready else ""
    with suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    return json.loads(said) if said else None
