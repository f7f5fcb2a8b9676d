"""An outage of ten leases says nothing about twenty jobs whose workers live."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from django.db import connection, connections

from durable_jobs.models import Job, JobEvent
from tests.connections import OtherConnection
from tests.operate.conftest import PROVE, Start, begun, start
from tests.operate.kinds import LEASE
from tests.postgres import Server, wait_until

pytestmark = pytest.mark.django_db(transaction=True)

LEASE_SECONDS = 6.0 if PROVE else 0.4
OUTAGE = 10 * LEASE_SECONDS
AFTERWARDS = LEASE_SECONDS + 3
"""Long enough for every reconciler to do what it must not do: a lease, two graces, ticks."""


@contextmanager
def twenty_running_jobs(start_worker: Start) -> Iterator[list[Any]]:
    """On two workers; their kind's orphans are parked, so that nothing goes unnoticed."""
    jobs = [start("quiet", OUTAGE + AFTERWARDS + 3) for _ in range(20)]
    environment = {LEASE: str(LEASE_SECONDS)}
    workers = [start_worker("--concurrency", "10", environment=environment, GRACE=1.0) for _ in range(2)]
    for one in jobs:
        begun(one)
    yield workers
    time.sleep(AFTERWARDS)
    states = set(Job.objects.values_list("status", "redrives", "attempts", "lost_deliveries"))
    assert states <= {("running", 0, 1, 0), ("completed", 0, 1, 0)}, states
    wait_until(lambda: not Job.objects.exclude(status="completed").exists(), 15, "not completed")
    assert set(JobEvent.objects.values_list("event", flat=True)) == {"ran"}
    for worker in workers:
        worker.terminate()
    for worker in workers:
        assert worker.wait(15) == 0, worker.output


@contextmanager
def one_comes_back_late(workers: list[Any]) -> Iterator[None]:
    """The block ends the outage; one worker beats again only when the other has long reconciled."""
    workers[0].freeze()
    yield
    time.sleep(0.5)
    workers[0].thaw()


def test_a_stopped_server_parks_nothing(start_worker: Start, postgres_server: Server) -> None:
    """P2, C061."""
    with twenty_running_jobs(start_worker) as workers:
        connections.close_all()
        postgres_server.stop("fast")
        time.sleep(OUTAGE)
        with one_comes_back_late(workers):
            postgres_server.start()
    for worker in workers:
        # Once for each part, not once for each try.
        assert worker.output.count("database_unavailable part=keeper") <= 1 + OUTAGE // 60


@pytest.mark.postgres_only
def test_a_server_that_can_be_read_but_not_written_parks_nothing(start_worker: Start) -> None:
    name = connection.settings_dict["NAME"]
    cut = (
        "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE application_name LIKE 'durable_jobs %'"
    )
    with twenty_running_jobs(start_worker) as workers, connection.cursor() as cursor:
        cursor.execute(f'ALTER DATABASE "{name}" SET default_transaction_read_only = on')
        try:
            cursor.execute(cut)
            time.sleep(OUTAGE)
        finally:
            with one_comes_back_late(workers):
                cursor.execute("SET default_transaction_read_only = off")
                cursor.execute(f'ALTER DATABASE "{name}" RESET default_transaction_read_only')
                cursor.execute(cut)


@pytest.mark.sqlite_only
def test_a_file_that_somebody_else_writes_to_parks_nothing(
    start_worker: Start, second_connection: OtherConnection
) -> None:
    def execute(sql: str) -> Callable[[], Any]:
        return lambda: connections["default"].cursor().execute(sql)

    with twenty_running_jobs(start_worker) as workers:
        second_connection.run(execute("BEGIN EXCLUSIVE"))
        time.sleep(OUTAGE)
        with one_comes_back_late(workers):
            second_connection.run(execute("ROLLBACK"))
