"""What the tests share: the database they run on, other connections, other processes."""

from __future__ import annotations

import contextlib
import os
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psycopg
import pytest
from django.conf import settings
from django.db import connection, connections, transaction
from django.test import TransactionTestCase
from psycopg.pq import TransactionStatus

from tests.connections import OtherConnection
from tests.postgres import FOLDER_VARIABLE, Server, alive
from tests.processes import Processes

# Some of the tests run where it is not installed.
with contextlib.suppress(ModuleNotFoundError):
    from hypothesis import settings as hypothesis_settings

    # A machine that stands still for a moment is no failure of the example that it was at.
    hypothesis_settings.register_profile("patient", deadline=None)
    hypothesis_settings.load_profile("patient")


def pytest_configure(config: pytest.Config) -> None:
    remove_files_of_killed_runs()


def pytest_report_header() -> str:
    database = settings.DATABASES["default"]
    if connection.vendor == "sqlite":
        return f"database: SQLite {'.'.join(map(str, connection.Database.sqlite_version_info))}"
    whose = "started for this run" if FOLDER_VARIABLE in os.environ else "named by DATABASE_URL"
    return f"database: PostgreSQL at {database['HOST']}:{database['PORT']}, {whose}"


KEPT_TABLES = {"django_migrations", "django_content_type", "auth_permission"}


def empty_tables(self: TransactionTestCase) -> None:
    """Delete what a test has committed. TRUNCATE and making all permissions anew take longer than a test."""
    for alias in self._databases_names(include_mirrors=False):
        tables = connections[alias].introspection.django_table_names(only_existing=True)
        deletions = [f'DELETE FROM "{table}"' for table in tables if table not in KEPT_TABLES]
        with transaction.atomic(using=alias), connections[alias].cursor() as cursor:
            for deletion in deletions if connection.vendor == "sqlite" else [";".join(deletions)]:
                cursor.execute(deletion)


TransactionTestCase._fixture_teardown = empty_tables

AS_CONNECTED = "RESET ALL; UNLISTEN *; SELECT pg_advisory_unlock_all(); DISCARD TEMP"


class Kept:
    """The connection that a test began with: on PostgreSQL a new one for each test costs as much as many a test.

    Django closes it after every test. Here it goes on when the test has left it as it was: not connected anew,
    no transaction, no hook; what may be left in its session is taken back. Only on a server of this run's own,
    whose defaults are the settings' values.
    """

    begun_with: object = None
    begin = TransactionTestCase.__dict__["_fixture_setup"].__func__

    @staticmethod
    def begun(case: type[TransactionTestCase]) -> None:
        Kept.begin(case)
        if FOLDER_VARIABLE in os.environ and connection.vendor == "postgresql":
            connection.ensure_connection()
            Kept.begun_with = connection.connection

    @staticmethod
    def must_close(case: TransactionTestCase) -> bool:
        raw = connection.connection
        if raw is None or raw is not Kept.begun_with or len(connections.all(initialized_only=True)) > 1:
            return True
        if raw.closed or raw.info.transaction_status != TransactionStatus.IDLE or not raw.autocommit:
            return True
        if connection.in_atomic_block or connection.execute_wrappers or connection.run_on_commit:
            return True
        try:
            raw.execute(AS_CONNECTED)
        except psycopg.Error:
            return True
        return False


TransactionTestCase._fixture_setup = classmethod(Kept.begun)
TransactionTestCase._should_reload_connections = Kept.must_close


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = "SQLite" if connection.vendor == "sqlite" else "PostgreSQL"
    for item in items:
        for marker, wanted in [("postgres_only", "PostgreSQL"), ("sqlite_only", "SQLite")]:
            if here != wanted and item.get_closest_marker(marker):
                item.add_marker(pytest.mark.skip(reason=f"for {wanted}; this run is on {here}"))


@pytest.fixture(autouse=True)
def no_thread_left() -> Iterator[None]:
    """A test ends the threads that it began; a daemon thread alone may outlive it."""
    before = set(threading.enumerate())
    yield
    deadline = time.monotonic() + 3
    while left := [thread for thread in threading.enumerate() if thread not in before and not thread.daemon]:
        if time.monotonic() > deadline:
            pytest.fail(f"threads left running: {', '.join(thread.name for thread in left)}")
        left[0].join(0.1)


@pytest.fixture
def registry() -> Iterator[None]:
    """A registry of kinds of the test's own."""
    from tests.slices import own_registry

    with own_registry():
        yield


@pytest.fixture
def other_connections(transactional_db: None) -> Iterator[Callable[[], OtherConnection]]:
    """Makes further connections to the tests' database, each in a thread of its own."""
    made: list[OtherConnection] = []

    def make() -> OtherConnection:
        made.append(OtherConnection())
        return made[-1]

    yield make
    for other in made:
        other.close()


@pytest.fixture
def second_connection(other_connections: Callable[[], OtherConnection]) -> OtherConnection:
    """A second connection to the tests' database."""
    return other_connections()


@pytest.fixture
def processes(transactional_db: None, tmp_path: Path) -> Iterator[Processes]:
    """Starts processes on the tests' database; those that still run are killed when the test ends."""
    started = Processes(tmp_path)
    yield started
    started.end()


@pytest.fixture
def postgres_server(transactional_db: None) -> Iterator[Server]:
    """The PostgreSQL server of this run, to be stopped and restarted; it runs again when the test ends."""
    if connection.vendor != "postgresql":
        pytest.skip("for PostgreSQL; this run is on SQLite")
    if FOLDER_VARIABLE not in os.environ:
        pytest.skip("the server named by DATABASE_URL is not ours to restart")
    server = Server.attach(os.environ[FOLDER_VARIABLE])
    yield server
    server.start()
    connections.close_all()


def remove_files_of_killed_runs() -> None:
    for path in Path(tempfile.gettempdir()).glob("durable-jobs-tests-*.sqlite3*"):
        pid = path.name.removeprefix("durable-jobs-tests-").partition(".")[0]
        if pid.isdigit() and not alive(int(pid)):
            try:
                path.unlink()
            except OSError:
                continue
