"""Nothing goes round for ever without a trace: what repeats is counted, spaced out, and ends or asks for a human."""

from __future__ import annotations

from typing import Any

import pytest
from django.db import connection

from durable_jobs import database, service, store, testing
from durable_jobs.exceptions import TerminalError
from durable_jobs.keeper import Hold
from durable_jobs.kinds import Done, Kind, Retry
from durable_jobs.models import Job
from durable_jobs.runner import Outcome
from durable_jobs.store import Lease
from durable_jobs.worker import Task, Worker, new_owner

pytestmark = pytest.mark.django_db(transaction=True)


class CutsItsConnection(Kind):
    name = "endless.cuts"
    max_orphanings = 2
    retry = Retry(failures=3, first_delay=0.5)

    def step(self, ctx: Any) -> Done:
        with ctx.fenced(), connection.cursor() as cursor:
            cursor.execute("SELECT pg_terminate_backend(pg_backend_pid())")
        return Done()


class NeverAgrees(Kind):
    name = "endless.never_agrees"
    retry = Retry(failures=1, first_delay=0.5)

    def step(self, ctx: Any) -> Done:
        raise TerminalError("no")

    def on_transition(self, job: Job) -> int:
        return 0

    def on_redrive(self, job: Job) -> int:
        return 1


class Waits(Kind):
    name = "endless.waits"

    def step(self, ctx: Any) -> Done:
        return Done()


@pytest.mark.postgres_only
def test_a_step_that_cuts_its_own_connection_is_parked_as_poison() -> None:
    """C061 says that an outage is no failure; a connection that is cut while the server stands is one."""
    with testing.register_for_test(CutsItsConnection):
        job = testing.run(CutsItsConnection)
    assert (job.status, job.error_code, job.consecutive_failures) == ("failed", "poison", 0)
    assert job.parked_at is not None and job.attempts == 3
    assert [event.event for event in job.events.order_by("id")] == ["cut_off", "cut_off", "parked"]


@pytest.mark.postgres_only
def test_a_cut_connection_waits_longer_each_time() -> None:
    with testing.register_for_test(CutsItsConnection):
        job = service.start(CutsItsConnection).job
        waits = []
        for _ in range(2):
            result = testing.run_slice(job)
            assert result.outcome is Outcome.RETRY and result.job is not None
            waits.append((result.job.next_run_at - result.job.updated_at).total_seconds())
    assert waits == [pytest.approx(0.5, abs=0.2), pytest.approx(1.0, abs=0.2)]


def test_a_hook_that_never_agrees_is_tried_ever_later() -> None:
    """B83, B132: each try leaves a line in the history, so they must not come every few seconds for days."""
    with testing.register_for_test(NeverAgrees):
        job = service.start(NeverAgrees).job
        testing.run_slice(job)
        waits = []
        for _ in range(3):
            current = testing.run_slice(job).job
            assert current is not None and current.status == "running"
            waits.append((current.next_run_at - current.updated_at).total_seconds())
    assert waits == [pytest.approx(2, abs=0.3), pytest.approx(4, abs=0.3), pytest.approx(8, abs=0.3)]


def claimed(worker: Worker) -> Task:
    job = service.start(Waits).job
    taken = store.claim(job.id, 0, 0, worker.owner, 30.0)
    assert isinstance(taken, Job)
    return Task(taken, Hold(Lease(job.id, worker.owner, taken.lease_epoch, 30.0)), suspect=False)


def test_what_a_drain_finds_claimed_and_not_begun_goes_back() -> None:
    """B60, B166: with the same seq, and nothing counted; whether a thread has taken it already or not."""
    with testing.register_for_test(Waits):
        worker = Worker(concurrency=2)
        assert worker.owner != new_owner()
        in_the_box, with_a_thread = claimed(worker), claimed(worker)
        worker._dispatch([in_the_box], 2)
        worker._draining.set()
        worker._empty_inbox()
        worker._run_task(with_a_thread)
        for task in (in_the_box, with_a_thread):
            job = store.get(task.job.id)
            assert job is not None
            assert (job.status, job.lease_owner, job.continuation_seq) == ("pending", None, 0)
            assert (job.interruptions, job.consecutive_failures, job.redrives) == (0, 0, 0)
        assert worker._running() == []
    database.discard(connection)
