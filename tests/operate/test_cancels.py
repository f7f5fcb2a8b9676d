"""A cancel is seen soon, waits for nobody, and nobody waits for it."""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from django.db import connections, transaction

from durable_jobs import database, runner, service
from durable_jobs.exceptions import Busy
from durable_jobs.kinds import Done, Yield
from durable_jobs.models import CancelRequest, Job
from durable_jobs.runner import SliceContext
from tests.connections import OtherConnection
from tests.models import Shipment
from tests.operate.conftest import PROVE, Start, begun, now, start
from tests.operate.kinds import LEASE, Ship
from tests.slices import OWNER, claim, made, on_postgresql

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.usefixtures("registry")]

BOUNDARY = 0.02
"""Seconds between two boundaries of the patient kinds."""


@pytest.mark.parametrize("kind", ["patient", "quiet"])
def test_running_work_stops_soon_after_a_cancel(
    start_worker: Start, figure: Callable[..., None], kind: str
) -> None:
    """PostgreSQL: 200 ms after the next boundary, by NOTIFY. SQLite: within one beat.

    One kind commits often and meets the request there, the other only waits for `ctx.stop`.
    """
    by_notice = on_postgresql()
    # Under a lease of a minute the next beat is up to five seconds away.
    lease, beat = (60, 5.0) if by_notice or PROVE else (1, 0.3)
    limit = BOUNDARY + (0.2 if by_notice else beat)
    worker = start_worker("--concurrency", "1", environment={LEASE: str(lease)})
    took = []
    for _ in range(5):
        one = start("lasting" if kind == "patient" and lease == 60 else kind, 60)
        begun(one)
        time.sleep(0.1)
        at = time.monotonic()
        service.cancel(one.id)
        while now(one).status != "cancelled":
            time.sleep(0.002)
            assert time.monotonic() - at < 15
        took.append(time.monotonic() - at)
    what = {"patient": "cancel of work that commits every 20 ms", "quiet": "cancel of work that only waits"}[
        kind
    ]
    figure(f"{what}, until it has ended, median of 5", statistics.median(took), f"< {limit:g} s")
    figure(f"{what}, until it has ended, longest of 5", max(took), "")
    assert statistics.median(took) < limit
    worker.terminate()
    assert worker.wait(15) == 0, worker.output


@contextmanager
def open_fences(count: int) -> Iterator[list[Job]]:
    """Slices that stand inside a fence until the block ends."""
    inside, leave = threading.Semaphore(0), threading.Event()

    def step(ctx: SliceContext) -> Done | Yield:
        with ctx.fenced():
            inside.release()
            assert leave.wait(300)
            ctx.save_checkpoint(1)
        return Yield()

    kind = made(step, name="operate.fencing")
    jobs = [claim(service.start(kind).job) for _ in range(count)]

    def run(job: Job) -> None:
        try:
            runner.run_slice(job, owner=OWNER)
        finally:
            connections.close_all()

    threads = [threading.Thread(target=run, args=[job]) for job in jobs]
    for thread in threads:
        thread.start()
    try:
        for _ in threads:
            assert inside.acquire(timeout=10)
        yield jobs
    finally:
        leave.set()
        for thread in threads:
            thread.join(30)


@pytest.mark.postgres_only
def test_a_click_answers_at_once_however_long_a_fence_is_open(figure: Callable[..., None]) -> None:
    """P11, F16."""
    took, clicks = [], 30
    with open_fences(1) as [job]:
        for _ in range(clicks):
            time.sleep((60 if PROVE else 1.5) / clicks)
            at = time.monotonic()
            answered = service.cancel(job.id, actor="operator")
            took.append(time.monotonic() - at)
            assert answered.status == "running"
        assert CancelRequest.objects.filter(job_id=job.id).exists()
    figure(f"cancel while a fence is open, median of {clicks} clicks", statistics.median(took), "< 0.1 s")
    figure(f"cancel while a fence is open, longest of {clicks} clicks", max(took), "")
    assert statistics.median(took) < 0.1
    assert now(job).status == "cancelled"


@pytest.mark.postgres_only
def test_two_transactions_that_cancel_two_fenced_jobs_crosswise_do_not_wait(
    other_connections: Callable[[], OtherConnection], figure: Callable[..., None]
) -> None:
    """P11."""
    one, two = other_connections(), other_connections()
    longest = 0.0

    def click(other: OtherConnection, job: Job) -> None:
        nonlocal longest
        at = time.monotonic()
        other.begin(service.cancel, job.id).result(5)
        longest = max(longest, time.monotonic() - at)

    with open_fences(2) as [x, y]:
        one.enter(transaction.atomic())
        two.enter(transaction.atomic())
        click(one, x)
        click(two, y)
        click(one, y)
        click(two, x)
        one.leave()
        two.leave()
    figure("two open transactions cancel two fenced jobs crosswise, longest call", longest, "no wait")
    assert longest < 1
    assert {now(x).status, now(y).status} == {"cancelled"}


@pytest.mark.postgres_only
def test_a_deadlock_of_the_caller_s_own_rows_is_told_as_such_and_not_as_busy(
    other_connections: Callable[[], OtherConnection],
) -> None:
    one, two = other_connections(), other_connections()
    rows = [Shipment.objects.create() for _ in range(2)]

    def lock(row: Shipment) -> None:
        Shipment.objects.select_for_update().get(pk=row.pk)

    for other, row in zip((one, two), rows, strict=True):
        other.enter(transaction.atomic())
        other.run(lock, row)
    waits = [one.begin(lock, rows[1]), two.begin(lock, rows[0])]
    [error] = [error for error in (wait.exception(10) for wait in waits) if error is not None]
    assert database.is_conflict(error)
    assert not database.is_locked(error) and not database.is_outage(error)
    for other in (one, two):
        other.leave(RuntimeError("rolled back"))


class View:
    """A request that locks a domain row, then cancels the job that works on it."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self.locked, self.go_on = threading.Event(), threading.Event()
        self.error: BaseException | None = None
        self.thread = threading.Thread(target=self._run)

    def _run(self) -> None:
        try:
            with transaction.atomic():
                Shipment.objects.select_for_update().get(pk=self.job.subject_id)
                self.locked.set()
                assert self.go_on.wait(10)
                service.cancel(self.job.id, actor="view")
        except BaseException as error:
            self.error = error
        finally:
            connections.close_all()


def test_a_view_that_locks_the_row_and_cancels_does_not_deadlock_with_the_slice() -> None:
    """P11: The slice holds the job and wants the row; on SQLite, which has one writer, it wants its fence."""
    shipment = Shipment.objects.create()
    fencing = threading.Event()
    view: Any = None

    def step(ctx: SliceContext) -> Done | Yield:
        if not on_postgresql():
            view.thread.start()
            assert view.locked.wait(10)
            fencing.set()
        with ctx.fenced():
            if on_postgresql():
                view.thread.start()
                assert view.locked.wait(10)
                fencing.set()
            Shipment.objects.filter(pk=shipment.pk).update(status=Shipment.Status.MOVING)
            ctx.save_checkpoint(1)
        return Yield()

    assert Ship.mirror is not None
    kind = made(step, name="operate.wanting", mirror=None)
    job = claim(service.start(kind, subject=shipment).job)
    view = View(job)
    helper = threading.Thread(target=lambda: (fencing.wait(10), time.sleep(0.5), view.go_on.set()))
    helper.start()
    at = time.monotonic()
    result = runner.run_slice(job, owner=OWNER)
    took = time.monotonic() - at
    view.thread.join(10)
    helper.join(10)
    assert view.error is None
    assert (result.outcome, result.error) == ("cancelled", None)
    assert took < 5
    assert Shipment.objects.get(pk=shipment.pk).status == Shipment.Status.MOVING


@pytest.mark.sqlite_only
def test_a_click_is_refused_as_busy_after_three_seconds(
    second_connection: OtherConnection, figure: Callable[..., None]
) -> None:
    one = start("patient", 1)
    before = Job.objects.filter(pk=one.pk).values().get()
    second_connection.enter(transaction.atomic())
    at = time.monotonic()
    with pytest.raises(Busy) as refused:
        service.cancel(one.id)
    took = time.monotonic() - at
    second_connection.leave()
    figure("cancel of a job in a locked file, until it is refused as busy", took, "3 s")
    assert refused.value.code == "busy"
    assert 2.8 < took < 4.5
    assert Job.objects.filter(pk=one.pk).values().get() == before
    assert service.cancel(one.id).status == "cancelled"
