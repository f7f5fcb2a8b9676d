"""The database transport through PgBouncer in transaction mode, three server connections (C108, C109)."""

from __future__ import annotations

import io
import os
import re
import signal
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import psycopg
import pytest
from django.core.management import call_command
from django.db import connection, connections, transaction
from django.test import override_settings

from durable_jobs import conf, service
from durable_jobs.models import Job, WorkerProcess
from tests import worker_kinds
from tests.brokers.ledger import epochs, lines, writers
from tests.brokers.pgbouncer import POOL_SIZE, PgBouncer
from tests.postgres import ROOT, wait_until
from tests.processes import Process, Processes, database_url

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.postgres_only, pytest.mark.timeout(180)]

QUICK = worker_kinds.Quick.name
SHORT = {"DISCOVER": ["brokers.ledger", "worker_kinds"], "POLL": 0.1, "TICK": 0.3, "GRACE": 0.5}


@pytest.fixture(scope="module")
def pooler() -> Iterator[PgBouncer]:
    if connection.vendor != "postgresql":
        pytest.skip("PgBouncer is for PostgreSQL; this run is on SQLite")
    made = PgBouncer(os.environ["DATABASE_URL"])
    yield made
    made.close()


@pytest.fixture
def through(pooler: PgBouncer, transactional_db: None) -> Iterator[PgBouncer]:
    """This process goes through the pooler, too."""
    given = dict(connection.settings_dict)
    direct = database_url()
    connections.close_all()
    connection.settings_dict.update(PORT=pooler.port, PASSWORD="x", DISABLE_SERVER_SIDE_CURSORS=True)
    yield pooler
    connections.close_all()
    connection.settings_dict.update(given)
    with psycopg.connect(direct) as server:
        server.execute(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = current_database()"
            " AND pid <> pg_backend_pid() AND backend_type = 'client backend'"
        )


@pytest.fixture
def worker(pooler: PgBouncer, processes: Processes) -> Any:
    def start(*arguments: str, module: str = "tests.brokers.pgbouncer_settings", **settings: Any) -> Process:
        url = pooler.url(connection.settings_dict["NAME"])
        environment = {"DATABASE_URL": url, "DJANGO_SETTINGS_MODULE": module}
        return processes.manage(
            "runworker", *arguments, settings={**SHORT, **settings}, environment=environment
        )

    return start


def unfinished(started: list[Job]) -> int:
    return Job.objects.filter(pk__in=[job.pk for job in started]).exclude(status__in=TERMINAL).count()


TERMINAL = ("completed", "failed", "cancelled")


@pytest.mark.parametrize("listen", ["off", "through the pooler", "on a connection of its own"])
def test_two_hundred_jobs_by_four_workers(through: PgBouncer, worker: Any, listen: str) -> None:
    """All run with polling alone; LISTEN through the pooler hears nothing and does no harm."""
    settings: dict[str, Any] = {"LISTEN": listen != "off"}
    if listen == "on a connection of its own":
        settings["LISTEN_DSN"] = database_url()
    started = [service.start(QUICK, number).job for number in range(100)]
    workers = [worker("--concurrency", "2", **settings) for _ in range(2)]
    wait_until(lambda: WorkerProcess.objects.count() == 2, 30, workers[0].output)
    started += [service.start(QUICK, number).job for number in range(100, 200)]

    wait_until(lambda: not unfinished(started), 60, f"{workers[0].output}\n{workers[1].output}")

    rows = Job.objects.filter(pk__in=[job.pk for job in started])
    assert set(rows.values_list("status", "attempts", "consecutive_failures")) == {("completed", 1, 0)}
    assert len([one for one in through.show("SERVERS") if one["database"] != "pgbouncer"]) <= POOL_SIZE
    for process in workers:
        process.terminate()
    assert [process.wait() for process in workers] == [0, 0]
    assert_sessions_are_as_new(through)


def test_workers_see_by_themselves_that_a_pooler_is_there(through: PgBouncer, worker: Any) -> None:
    """Where Django's setting was forgotten they prepare nothing either, and no job counts a failure for it."""
    started = [service.start(QUICK, number).job for number in range(100)]
    workers = [worker("--concurrency", "2", module="tests.settings", LISTEN=False) for _ in range(2)]
    wait_until(lambda: WorkerProcess.objects.count() == 2, 30, workers[0].output)
    started += [service.start(QUICK, number).job for number in range(100, 200)]
    wait_until(lambda: not unfinished(started), 60, f"{workers[0].output}\n{workers[1].output}")
    rows = Job.objects.filter(pk__in=[job.pk for job in started])
    assert set(rows.values_list("status", "attempts", "consecutive_failures")) == {("completed", 1, 0)}
    for process in workers:
        process.terminate()
    assert [process.wait() for process in workers] == [0, 0]
    assert_sessions_are_as_new(through)


def test_many_are_started_at_once(through: PgBouncer) -> None:
    """In psycopg's pipelines, alone and in a transaction."""
    rows = [{"kind": QUICK, "input": number} for number in range(1200)]
    answers = service.start_many(rows)
    with transaction.atomic():
        answers += service.start_many(rows)
    assert {type(one) for one in answers} == {service.Started}
    assert Job.objects.filter(status="pending").count() == 2400
    assert_sessions_are_as_new(through)


def test_kills_and_cancels(through: PgBouncer, worker: Any) -> None:
    """Two of four workers die in the middle, some jobs are cancelled: every line once, nothing left over."""
    workers = [worker("--concurrency", "3", LISTEN=False) for _ in range(4)]
    wait_until(lambda: WorkerProcess.objects.count() == 4, 60, workers[0].output)
    started = [service.start("brokers.ledger", 40).job for _ in range(16)]

    def writes(process: Process) -> bool:
        return any(0 < writers(job).count(process.pid) < 30 for job in started[:12])

    wait_until(lambda: all(writes(victim) for victim in workers[:2]), 60, workers[0].output)
    for victim in workers[:2]:
        victim.send(signal.SIGKILL)
        victim.wait()
    cancelled = started[12:]
    for job in cancelled:
        service.cancel(job.id, actor="tests")
    workers.append(worker("--concurrency", "3", LISTEN=False))

    wait_until(lambda: not unfinished(started), 90, workers[2].output)
    assert {now(job).status for job in started[:12]} == {"completed"}
    assert {now(job).status for job in cancelled} == {"cancelled"}
    for job in started:
        done = now(job).checkpoint or 0
        assert lines(job) == list(range(done)), f"{now(job).status} {job.id}"
        assert epochs(job) == sorted(epochs(job))
    resumed = [job for job in started if len(set(writers(job))) > 1]
    assert resumed, "nobody went on with a dead worker's job"
    wait_until(lambda: WorkerProcess.objects.filter(pid=workers[4].pid).exists(), 60, "not begun")
    for process in workers[2:]:
        process.terminate()
    assert [process.wait() for process in workers[2:]] == [0, 0, 0]
    assert_sessions_are_as_new(through)


def test_a_drain_and_what_an_operator_does(through: PgBouncer, worker: Any) -> None:
    """Pause, drain and bounded transactions bring their settings along and take them away again."""
    first = worker("--concurrency", "2")
    started = [service.start("brokers.ledger", 60).job for _ in range(2)]
    wait_until(lambda: all(len(lines(job)) > 2 for job in started), 30, first.output)
    first.terminate()
    assert first.wait() == 0
    service.pause(queue="ledger", reason="tests", actor="tests")
    assert service.running_under(queue="ledger") == 0
    service.unpause(queue="ledger", actor="tests")
    second = worker("--concurrency", "2")
    wait_until(lambda: not unfinished(started), 60, second.output)
    for job in started:
        assert lines(job) == list(range(60))
    assert_sessions_are_as_new(through)


def test_nothing_of_ours_needs_a_cursor_of_the_server(
    through: PgBouncer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """C109: a named cursor vanishes between two transactions, also where Django's setting was forgotten."""
    monkeypatch.setitem(connection.settings_dict, "DISABLE_SERVER_SIDE_CURSORS", False)
    monkeypatch.setattr(connection, "chunked_cursor", lambda: pytest.fail("a cursor of the server"))
    service.start_many({"kind": QUICK, "input": number} for number in range(500))
    service.reconcile(wait=False)
    for words in (
        ["list", "--limit", "200", "--json"],
        ["cancel", "--kind", QUICK, "--reason", "x"],
        ["cancel", "--kind", QUICK, "--reason", "x", "--yes"],
        ["stats"],
        ["prune", "--older-than", "0d", "--no-archive", "--yes"],
    ):
        call_command("durable_jobs", *words, stdout=io.StringIO())
    assert not Job.objects.exists()


def test_the_settings_of_the_page() -> None:
    """`docs/pgbouncer.md` gives the settings that these tests run with."""
    page = (ROOT / "docs" / "pgbouncer.md").read_text()
    [block] = re.findall(r"^```python\n(.*?)^```", page, re.DOTALL | re.MULTILINE)
    found: dict[str, Any] = {}
    exec(block, found)
    assert found["DATABASES"]["default"]["DISABLE_SERVER_SIDE_CURSORS"] is True
    with override_settings(DURABLE_JOBS=found["DURABLE_JOBS"]):
        assert conf.problems() == []


def now(job: Job) -> Job:
    return Job.objects.get(pk=job.pk)


STATE = """
    SELECT pg_backend_pid(), current_setting('lock_timeout'), current_setting('statement_timeout'),
        current_setting('idle_in_transaction_session_timeout'), current_setting('default_transaction_isolation'),
        current_setting('default_transaction_read_only'), current_setting('search_path'), current_user,
        (SELECT count(*) FROM pg_prepared_statements), (SELECT count(*) FROM pg_cursors WHERE is_holdable),
        (SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND pid = pg_backend_pid())
"""


def assert_sessions_are_as_new(pooler: PgBouncer) -> None:
    """Each of the pool's sessions has the settings of one that nobody used, and holds nothing."""
    name = connection.settings_dict["NAME"]
    connections.close_all()
    with psycopg.connect(database_url()) as fresh:
        row = fresh.execute(STATE).fetchone()
    assert row is not None
    seen: dict[int, tuple[Any, ...]] = {}
    with ExitStack() as stack:
        # Transactions open at once, so that each has a session of its own.
        for _ in range(POOL_SIZE):
            client = stack.enter_context(psycopg.connect(pooler.url(name), prepare_threshold=None))
            found = client.execute(STATE).fetchone()
            assert found is not None
            seen[found[0]] = found[1:]
    assert len(seen) == POOL_SIZE
    assert set(seen.values()) == {row[1:]}
