"""Readers of the screens and the workers do not get in each other's way."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from django.db import connection, transaction

from durable_jobs import kinds, service
from durable_jobs.models import Job, JobEvent
from tests.admin.conftest import ALL, logged_in, make_user, url
from tests.connections import OtherConnection
from tests.processes import Processes
from tests.worker_kinds import KINDS

pytestmark = pytest.mark.django_db(transaction=True)

JOBS = 200


@pytest.fixture(autouse=True)
def registered() -> Iterator[None]:
    for kind in KINDS:
        kinds.register(kind)
    yield
    for kind in KINDS:
        kinds.unregister(kind.name)


def hold_a_page_open(client: Any, ended: threading.Event) -> int:
    """Read the list in a transaction that stays open; how many locks beyond a reader's it has."""
    with connection.cursor() as cursor:
        cursor.execute("BEGIN")  # on SQLite deferred: a reader's
        assert client.get(url("changelist")).status_code == 200
        locks = 0
        if connection.vendor == "postgresql":
            cursor.execute(
                "SELECT count(*) FROM pg_locks WHERE pid = pg_backend_pid() AND relation IS NOT NULL"
                " AND mode <> 'AccessShareLock'"
            )
            locks = cursor.fetchone()[0]
        ended.wait(60)
        cursor.execute("ROLLBACK")
    return locks


def read_and_read(client: Any, ended: threading.Event) -> list[int]:
    """Ask for the list and for the overview, twenty times a second together."""
    answers = []
    while not ended.wait(0.1):
        for name in ("changelist", "overview"):
            answers.append(client.get(url(name)).status_code)
    return answers


def test_reading_the_list_all_the_time_fails_no_job_and_counts_no_attempt(
    processes: Processes, other_connections: Callable[[], OtherConnection]
) -> None:
    """C090: pages lock no rows, and a page whose transaction stays open holds nobody up."""
    anna = make_user("anna", *ALL)
    readers = [logged_in(anna) for _ in range(3)]
    with transaction.atomic():
        for number in range(JOBS):
            service.start("worker.quick", number)
    ended = threading.Event()
    holding = other_connections().begin(hold_a_page_open, readers[0], ended)
    reading = [other_connections().begin(read_and_read, one, ended) for one in readers[1:]]
    began = time.monotonic()
    settings = {"DISCOVER": ["worker_kinds"]}
    workers = processes.manage(
        "runworker", "--concurrency", "4", "--until-idle", "--skip-checks", settings=settings
    )
    try:
        assert workers.wait(60) == 0, workers.output
    finally:
        ended.set()
    took = time.monotonic() - began
    assert holding.result(30) == 0
    for one in reading:
        answers = one.result(30)
        assert answers and set(answers) == {200}, answers
    done = list(Job.objects.values_list("status", "attempts", "consecutive_failures", "interruptions"))
    assert done == [("completed", 1, 0, 0)] * JOBS, took
    assert set(JobEvent.objects.values_list("event", flat=True)) == {"ran"}
