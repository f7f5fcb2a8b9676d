"""A pause from end to end: claims stop, slices yield, nothing is harmed, and its end wakes the workers."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from django.db import connection, transaction

from durable_jobs import kinds, runner, service, store
from durable_jobs.exceptions import NotReclaimable
from durable_jobs.keeper import Hold, Keeper
from durable_jobs.models import Job, JobEvent, Pause
from durable_jobs.reconciler import Reconciler
from durable_jobs.runner import Outcome
from durable_jobs.selection import Look
from durable_jobs.store import Lease, Probe
from durable_jobs.testing import make_job, run_slice
from tests.connections import OtherConnection
from tests.postgres import wait_until
from tests.processes import Process, Processes
from tests.store import rows
from tests.store.conftest import no_users_remembered  # noqa: F401
from tests.test_commands import call
from tests.worker_kinds import KINDS

pytestmark = pytest.mark.django_db(transaction=True)

SETTINGS = {"DISCOVER": ["worker_kinds"], "GRACE": 0.3, "TICK": 0.2}

MATCHING: list[dict[str, str]] = [
    {},
    {"queue": "worker"},
    {"kind": "worker.quick"},
    {"tenant": "default"},
    {"queue": "worker", "kind": "worker.quick", "tenant": "default"},
]
OTHERS: list[dict[str, str]] = [
    {"queue": "other"},
    {"kind": "worker.nap"},
    {"tenant": "acme"},
    {"queue": "worker", "tenant": "acme"},
    {"kind": "worker.quick", "queue": "other"},
]


@pytest.fixture(autouse=True)
def registered() -> Iterator[None]:
    for kind in KINDS:
        kinds.register(kind)
    yield
    for kind in KINDS:
        kinds.unregister(kind.name)


def worker(processes: Processes, *arguments: str, **settings: Any) -> Process:
    started = processes.manage("runworker", *arguments, "--skip-checks", settings={**SETTINGS, **settings})
    started.wait_for_output("worker_started")
    return started


def start(kind: str, value: Any = None, **options: Any) -> Job:
    return service.start(f"worker.{kind}", value, **options).job


def now(job: Job) -> Job:
    return Job.objects.get(pk=job.pk)


def became(job: Job, status: str) -> Callable[[], bool]:
    return lambda: now(job).status == status


def names(job: Job) -> list[str]:
    return list(JobEvent.objects.filter(job_id=job.pk).order_by("id").values_list("event", flat=True))


def claimed(job: Job) -> bool:
    probe = Probe(job.queue_name, job.kind, job.priority, None, 60.0)
    return bool(store.claim_next("w", 1, [probe]))


# --- claims ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("pause", MATCHING)
def test_what_matches_is_not_claimed_by_either_way(pause: dict[str, str]) -> None:
    job = start("quick")
    service.pause(**pause, reason="x")
    assert not claimed(job)
    with pytest.raises(NotReclaimable):
        run_slice(job)
    assert Look.take().phase(now(job)) == "paused"
    service.unpause(**pause)
    assert claimed(job)


@pytest.mark.parametrize("pause", OTHERS)
def test_what_does_not_match_is_claimed(pause: dict[str, str]) -> None:
    job = start("quick")
    service.pause(**pause, reason="x")
    assert claimed(job)


def test_starting_stays_allowed_and_redriving_and_cancelling() -> None:
    done = make_job("failed", kind="worker.quick")
    service.pause(reason="x")
    job = start("quick")
    assert service.redrive(done.id).status == "pending"
    assert service.cancel(job.id).status == "cancelled"
    assert Look.take().phase(now(done)) == "paused"


def test_a_pause_again_replaces_the_reason_and_is_one_pause() -> None:
    service.pause(queue="worker", reason="first", actor="anna")
    service.pause(queue="worker", reason="second", actor="bob")
    [kept] = Pause.objects.all()
    assert (kept.reason, kept.actor) == ("second", "bob")
    assert service.unpause(queue="worker") and not service.unpause(queue="worker")


def test_the_history_tells_of_a_pause_and_of_its_end() -> None:
    service.pause(queue="worker", tenant="acme", reason="a deploy", actor="anna")
    service.unpause(queue="worker", tenant="acme", actor="bob")
    service.pause(reason="all of it", actor="anna")
    told = JobEvent.objects.order_by("id").values_list(
        "event", "actor", "reason", "tenant_id", "message", "data"
    )
    nothing = {"queue": "", "kind": "", "tenant": ""}
    part = {**nothing, "queue": "worker", "tenant": "acme"}
    assert list(told) == [
        ("paused", "anna", "a deploy", "acme", "queue worker, tenant acme", part),
        ("unpaused", "bob", "", "acme", "queue worker, tenant acme", part),
        ("paused", "anna", "all of it", "", "all work", nothing),
    ]


# --- what runs ------------------------------------------------------------------------------------------


def test_the_keeper_tells_a_running_slice_at_its_next_beat() -> None:
    job = make_job("running", kind="worker.patient", owner="w", lease_seconds=60.0)
    keeper = Keeper("w")
    hold = Hold(Lease(job.id, "w", job.lease_epoch, 0.3))
    keeper.hold(hold)
    keeper.start()
    try:
        service.pause(reason="x")
        wait_until(lambda: hold.paused, 5, "the slice was not told")
        # A step that waits for something else waits on `stop`.
        assert hold.stop.is_set() and not hold.cancelled and not hold.lost
    finally:
        keeper.stop()


def test_running_slices_yield_without_a_failure_and_go_on_afterwards(processes: Processes) -> None:
    process = worker(processes)
    job, bystander = start("patient", 30), start("patient", 1, queue="other")
    wait_until(
        lambda: now(job).checkpoint is not None and now(bystander).checkpoint is not None, 20, "not begun"
    )
    assert call("pause", "--queue", "worker", "--reason", "migration", "--wait", "10").code == 0
    paused = now(job)
    assert (paused.status, paused.lease_owner, paused.interruptions) == ("pending", None, 1)
    assert (paused.consecutive_failures, paused.redrives, paused.redrives_since_commit) == (0, 0, 0)
    reached = paused.checkpoint
    assert 0 < reached < 1_500
    wait_until(became(bystander, "completed"), 20, "the bystander did not end")
    waiting = start("quick")
    time.sleep(0.6)
    assert now(job).checkpoint == reached and now(waiting).status == "pending" and now(waiting).attempts == 0
    assert now(job).lease_epoch == paused.lease_epoch
    assert call("unpause", "--queue", "worker").code == 0
    wait_until(lambda: now(job).checkpoint > reached, 20, "the job did not go on")
    wait_until(became(waiting, "completed"), 20, "the other did not run")
    assert JobEvent.objects.filter(job_id=job.id, event="ran").order_by("id").last().data == {"from": reached}
    process.terminate()
    assert process.wait(20) == 0, process.output


def test_waiting_says_what_still_runs_when_a_step_does_not_yield(processes: Processes) -> None:
    process = worker(processes)
    job = start("nap", 2)
    wait_until(lambda: "ran" in names(job), 20, "not begun")
    answer = call("pause", "--all", "--reason", "x", "--wait", "0.5")
    assert answer.code == 1 and str(job.id) in answer.out
    # It ends by itself: a pause takes nothing away that is done.
    assert call("pause", "--all", "--reason", "x", "--wait", "10").code == 0
    assert now(job).status == "completed"
    process.terminate()
    assert process.wait(20) == 0


def test_the_end_of_a_pause_wakes_a_worker_that_sleeps(processes: Processes) -> None:
    worker(processes, POLL=30.0)
    service.pause(reason="x")
    job = start("quick")
    time.sleep(1.5)
    assert now(job).status == "pending"
    began = time.monotonic()
    service.unpause()
    wait_until(became(job, "completed"), 10, "nobody woke up")
    assert time.monotonic() - began < 3


def test_a_pause_that_is_rolled_back_stops_nothing() -> None:
    job = start("quick")
    with pytest.raises(RuntimeError), transaction.atomic():
        service.pause(reason="x")
        raise RuntimeError
    assert claimed(job)


def test_a_pause_waits_for_no_running_fence(second_connection: OtherConnection) -> None:
    if connection.vendor == "sqlite":
        pytest.skip("SQLite has one writer")
    job = make_job("running", kind="worker.quick")
    second_connection.enter(transaction.atomic())
    second_connection.run(lambda: Job.objects.select_for_update().get(pk=job.pk))
    began = time.monotonic()
    service.pause(reason="x")
    service.unpause()
    assert time.monotonic() - began < 1


# --- repair ---------------------------------------------------------------------------------------------


class Clock:
    """Stands still but for what is skipped."""

    skipped = 0.0

    def __call__(self) -> float:
        return 1_000.0 + self.skipped


def repaired() -> Any:
    clock = Clock()
    mender = Reconciler("mender", clock=clock)
    mender.tick()
    clock.skipped = 21.0
    return mender.tick()


def orphan(**options: Any) -> Job:
    job = make_job("expired", kind="worker.quick", queue="worker", owner="gone", **options)
    rows.execute("UPDATE durable_jobs_job SET lease_expires_at = %s WHERE id = %s", rows.ago(3_600), job.id)
    return job


def test_orphans_of_paused_work_wait_and_others_do_not() -> None:
    mine, other = orphan(), make_job("expired", kind="worker.quick", owner="gone")
    rows.execute("UPDATE durable_jobs_job SET lease_expires_at = %s", rows.ago(3_600))
    service.pause(queue="worker", reason="x")
    assert repaired().redriven == 1
    assert [now(job).status for job in (mine, other)] == ["running", "pending"]
    assert names(mine) == []
    service.unpause(queue="worker")
    assert repaired().redriven == 1
    assert now(mine).status == "pending"


def test_under_a_pause_of_all_the_reconciler_repairs_nothing_and_parks_nothing() -> None:
    (
        orphan(),
        make_job("retrying", kind="worker.quick"),
        make_job("verdict", kind="worker.quick"),
        make_job(kind="gone.kind"),
    )
    service.pause(reason="x")
    before = rows.stored()
    report = repaired()
    assert (report.redriven, report.parked, report.cancelled, report.errors) == (0, 0, 0, 0)
    assert rows.stored() == before


def test_cancels_of_paused_work_are_settled() -> None:
    lost, mailed = orphan(), orphan()
    waiting, retrying = make_job(kind="worker.quick"), make_job("retrying", kind="worker.quick")
    service.pause(reason="x")
    for job in (lost, waiting, retrying):
        store.request_cancel(job.id, scope=None)
    rows.insert_raw(rows.letter(mailed.id, "anna", 5), table="durable_jobs_cancelrequest")
    repaired()
    assert {now(job).status for job in (lost, mailed, waiting, retrying)} == {"cancelled"}


def test_a_slice_that_is_paused_and_cancelled_ends_cancelled() -> None:
    job = make_job(kind="worker.patient", input=5)
    claim = store.claim(job.id, 0, 0, "w", 60.0)
    assert isinstance(claim, Job)
    service.pause(reason="x")
    service.cancel(job.id)
    keeper = Keeper("w")
    keeper.start()
    try:
        result = runner.run_slice(claim, owner="w", keeper=keeper)
    finally:
        keeper.stop()
    assert result.outcome is Outcome.CANCELLED
    assert now(job).status == "cancelled"


@pytest.mark.parametrize("field", ["queue", "kind", "tenant"])
def test_unpausing_takes_away_exactly_that_pause(field: str) -> None:
    """Two pauses that differ in one part of what they match."""
    which = {"queue": "worker", "kind": "worker.quick", "tenant": "acme"}
    other = {**which, field: "another"}
    for one in (which, other):
        service.pause(**one, reason="to see", actor="tests")
    assert service.unpause(**which)
    [left] = Pause.objects.all()
    assert (left.queue_name, left.kind, left.tenant_id) == (other["queue"], other["kind"], other["tenant"])
