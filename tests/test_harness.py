"""What the other tests rely on."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psycopg
import pytest
from django.contrib.auth.models import Group
from django.db import OperationalError, connection, transaction

from tests.connections import OtherConnection
from tests.postgres import (
    FOLDER_VARIABLE,
    ROOT,
    Server,
    alive,
    copy_binaries,
    installed_binaries,
    runs,
    wait_until,
)
from tests.processes import Processes


@pytest.mark.sqlite_only
def test_sqlite_has_the_options_that_jobs_need(transactional_db: None) -> None:
    with connection.cursor() as cursor:
        assert cursor.execute("PRAGMA journal_mode").fetchone() == ("wal",)
        assert cursor.execute("PRAGMA busy_timeout").fetchone() == (20_000,)
    assert connection.transaction_mode == "IMMEDIATE"


@pytest.mark.postgres_only
def test_postgres_speaks_utf8_and_utc(transactional_db: None) -> None:
    with connection.cursor() as cursor:
        cursor.execute("SELECT current_setting('server_encoding'), current_setting('TimeZone')")
        assert cursor.fetchone() == ("UTF8", "UTC")


def test_another_connection_sees_only_what_is_committed(second_connection: OtherConnection) -> None:
    second_connection.enter(transaction.atomic())
    second_connection.run(Group.objects.create, name="theirs")
    assert not Group.objects.exists()
    second_connection.leave()
    assert Group.objects.get().name == "theirs"


def test_another_connection_can_be_left_blocked(
    other_connections: Callable[[], OtherConnection],
) -> None:
    first, second = other_connections(), other_connections()
    Group.objects.create(name="before")
    first.enter(transaction.atomic())
    first.run(Group.objects.update, name="first")
    blocked = second.begin(Group.objects.update, name="second")
    with pytest.raises(TimeoutError):
        second.join(0.2)
    assert second.busy
    first.leave(ValueError("rolls back"))
    assert blocked.result(10) == 1
    assert Group.objects.get().name == "second"


def test_a_connection_left_open_is_rolled_back(transactional_db: None) -> None:
    with OtherConnection() as other:
        other.enter(transaction.atomic())
        other.run(Group.objects.create, name="abandoned")
    assert not Group.objects.exists()


def test_a_process_works_on_the_same_database(processes: Processes) -> None:
    code = "from django.contrib.auth.models import Group; import sys; Group.objects.create(name=sys.argv[1])"
    process = processes.python(code, "made elsewhere")
    assert process.wait() == 0, process.output
    assert Group.objects.get().name == "made elsewhere"


def test_a_process_has_the_settings_given(processes: Processes) -> None:
    code = "from django.conf import settings; print(settings.DURABLE_JOBS)"
    process = processes.python(code, settings={"GRACE": 0.5})
    process.wait_for_output("{'GRACE': 0.5}")


def test_a_process_ends_with_the_run_that_was_killed(processes: Processes) -> None:
    parent = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    try:
        code = "import time; print('ready'); time.sleep(60)"
        process = processes.python(code, environment={"DURABLE_JOBS_TEST_PARENT": str(parent.pid)})
        process.wait_for_output("ready")
    finally:
        parent.kill()
        parent.wait()
    assert process.wait(10) == 1


@pytest.mark.parametrize("mode", ["fast", "immediate"])
def test_the_server_comes_back_with_what_was_committed(postgres_server: Server, mode: str) -> None:
    Group.objects.create(name="committed")
    postgres_server.restart(mode)  # type: ignore[arg-type]
    with pytest.raises(OperationalError):
        Group.objects.exists()
    connection.close()
    assert Group.objects.get().name == "committed"


def test_the_server_stays_down_until_it_is_started(postgres_server: Server) -> None:
    postgres_server.stop()
    time.sleep(0.3)
    assert not postgres_server.answers()
    postgres_server.start()
    assert postgres_server.answers()


def test_backends_can_be_cut(postgres_server: Server, second_connection: OtherConnection) -> None:
    second_connection.run(Group.objects.count)
    assert postgres_server.terminate_backends() >= 1
    with pytest.raises(OperationalError):
        second_connection.run(Group.objects.count)


def test_copied_binaries_find_their_libraries(tmp_path: Path) -> None:
    assert runs(copy_binaries(installed_binaries(), tmp_path), None)


@pytest.mark.postgres_only
class TestRunner:
    """`python -m tests.postgres run` beside another run: a server of its own, gone with it."""

    @pytest.fixture
    def started(self, tmp_path: Path) -> RunnerStart:
        return RunnerStart(tmp_path)

    def test_the_commands_exit_code_is_passed_on(self, started: RunnerStart) -> None:
        runner = started("import sys; sys.exit(7)")
        assert runner.wait(60) == 7
        assert not started.folder.exists()

    def test_a_command_ended_by_a_signal_is_told_as_a_shell_would(self, started: RunnerStart) -> None:
        runner = started("import os, signal; os.kill(os.getpid(), signal.SIGKILL)")
        assert runner.wait(60) == 128 + 9

    @pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
    def test_nothing_is_left_when_the_runner_is_ended(
        self, started: RunnerStart, number: signal.Signals
    ) -> None:
        runner = started("import time; time.sleep(60)")
        server = Server.attach(started.folder)
        postmaster = int((server.folder / "postmaster").read_text())
        runner.send_signal(number)
        runner.wait(30)
        wait_until(lambda: not alive(started.command), 15, "the command goes on")
        wait_until(lambda: not alive(postmaster), 15, "the server goes on")
        wait_until(lambda: not server.folder.exists(), 15, "the folder is still there")
        with pytest.raises(psycopg.OperationalError):
            psycopg.connect(server.url)


class RunnerStart:
    """Starts the runner with a Python command that first tells its pid and the server's folder."""

    def __init__(self, folder: Path) -> None:
        self._told = folder / "told"
        self.command = 0
        self.folder = Path()

    def __call__(self, code: str) -> subprocess.Popen[bytes]:
        tell = (
            "import os, pathlib\n"
            f"pathlib.Path({str(self._told) + '.part'!r}).write_text("
            f"f\"{{os.getpid()}}\\n{{os.environ['{FOLDER_VARIABLE}']}}\")\n"
            f"os.rename({str(self._told) + '.part'!r}, {str(self._told)!r})\n"
        )
        command = [sys.executable, "-m", "tests.postgres", "run", "--", sys.executable, "-c", tell + code]
        environment = {name: value for name, value in os.environ.items() if name != FOLDER_VARIABLE}
        runner = subprocess.Popen(command, cwd=ROOT, env=environment)
        wait_until(self._told.exists, 60, "the command was not started")
        pid, folder = self._told.read_text().split("\n")
        self.command, self.folder = int(pid), Path(folder)
        return runner
