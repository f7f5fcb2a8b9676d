"""What becomes of the jobs of processes that ended without a word, and what the reconciler never touches."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from typing import Any

import pytest
from django.db import InterfaceError, OperationalError, ProgrammingError, connection, connections, transaction
from django.test import override_settings

from durable_jobs import kinds, lifecycle, reconciler, service, signals, store
from durable_jobs.exceptions import LockKeyHeld, TransactionOwned
from durable_jobs.kinds import Done, Kind, StatusMirror
from durable_jobs.models import CancelRequest, Job, JobEvent, Pause, Scope, WorkerProcess, uuid7
from durable_jobs.reconciler import Cancel, Leave, Park, Reconciler, Redrive, Report, decide, spacing
from durable_jobs.store import Lease, Orphan
from durable_jobs.testing import make_job, register_for_test
from tests.connections import OtherConnection
from tests.models import Shipment
from tests.postgres import wait_until

GRACE = 20.0
DAY = 86_400.0

pytestmark = pytest.mark.django_db(transaction=True)


# --- kinds ----------------------------------------------------------------------------------------------


class Hooked(Kind):
    """Does what a test tells it to where the reconciler asks it something."""

    failing: set[Any] = set()
    on_decision: Callable[[], object] | None = None

    def step(self, ctx: Any) -> Done:
        return Done()

    def on_transition(self, job: Job) -> int:
        return 0 if job.id in self.failing else 1

    def on_redrive(self, job: Job) -> int:
        return 1


class Redriven(Hooked):
    name = "tests.redriven"
    orphan_policy = "redrive"


class Parked(Hooked):
    name = "tests.parked"


class Interrupted(Hooked):
    """Between the selection of an orphan and the act on it, something happens: once, where a test says so."""

    name = "tests.interrupted"
    policy = "park"

    @property
    def orphan_policy(self) -> str:
        act, type(self).on_decision = type(self).on_decision, None
        if act is not None:
            act()
        return self.policy


class Mirrored(Kind):
    name = "tests.mirrored"
    mirror = StatusMirror(
        "tests.Shipment",
        open=("queued", "moving"),
        redriven="queued",
        completed="arrived",
        failed="lost",
        cancelled="stopped",
    )

    def step(self, ctx: Any) -> Done:
        return Done()


@pytest.fixture(autouse=True)
def registered() -> Iterator[None]:
    Hooked.failing = set()
    Interrupted.on_decision, Interrupted.policy = None, "park"
    with register_for_test(Redriven, Parked, Interrupted, Mirrored):
        yield


# --- helpers --------------------------------------------------------------------------------------------


class Clock:
    """Stands still but for what a test skips, so that on a slow machine no pass is late and no write is slow."""

    def __init__(self) -> None:
        self._now = time.monotonic()

    def __call__(self) -> float:
        return self._now

    def skip(self, seconds: float) -> None:
        self._now += seconds


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def mender(clock: Clock) -> Reconciler:
    return Reconciler("mender", clock=clock)


def age(*jobs: Job, seconds: float = 3_600.0) -> None:
    """Let leases have run out so many seconds ago."""
    when = datetime.fromtimestamp(time.time() - seconds, UTC)
    rewrite(jobs, lease_expires_at=when)


def rewrite(jobs: Any, **columns: Any) -> None:
    settings = ", ".join(f"{column} = %s" for column in columns)
    adapt = connection.ops.adapt_datetimefield_value
    values = [adapt(value) if isinstance(value, datetime) else value for value in columns.values()]
    with connection.cursor() as cursor:
        for job in jobs:
            key = job.id.hex if connection.vendor == "sqlite" else job.id
            cursor.execute(f"UPDATE durable_jobs_job SET {settings} WHERE id = %s", [*values, key])


def orphan(kind: str | type[Kind] = Redriven, **options: Any) -> Job:
    """A running job whose worker has been silent for an hour."""
    job = make_job("expired", kind=kind, **{"owner": "gone", **options})
    age(job)
    return job


def lease_of(job: Job, ttl: float = 60.0) -> Lease:
    assert job.lease_owner is not None
    return Lease(job.id, job.lease_owner, job.lease_epoch, ttl)


def now(job: Job) -> Job:
    found = store.get(job.id)
    assert found is not None
    return found


def row(job: Job) -> dict[str, Any]:
    return Job.objects.filter(pk=job.pk).values().get()


def events(job: Job) -> list[str]:
    return list(JobEvent.objects.filter(job_id=job.id).order_by("id").values_list("event", flat=True))


def passes(mender: Reconciler, clock: Clock, **options: Any) -> Report:
    """Sight, wait, act; the second report."""
    mender.tick(**options)
    clock.skip(GRACE + 1)
    return mender.tick(**options)


def logged(caplog: pytest.LogCaptureFixture, event: str) -> list[logging.LogRecord]:
    return [record for record in caplog.records if getattr(record, "event", None) == event]


# --- the decision ---------------------------------------------------------------------------------------


def seen(**facts: Any) -> Orphan:
    values: dict[str, Any] = {
        "id": uuid7(),
        "kind": "a",
        "tenant": "default",
        "organization": None,
        "owner": "gone",
        "epoch": 1,
        "expires_at": datetime.now(UTC),
        "cancel": False,
        "verdict": None,
        "redrives_since_commit": 0,
        "overdue": 60.0,
    }
    return Orphan(**{**values, **facts})


REDRIVE, PARK, UNKNOWN = Redriven(), Parked(), None


@pytest.mark.parametrize(
    ("facts", "kind", "expected"),
    [
        ({}, REDRIVE, Redrive(0.0)),
        ({"redrives_since_commit": 1}, REDRIVE, Redrive(15.0)),
        ({"redrives_since_commit": 2}, REDRIVE, Redrive(30.0)),
        ({"redrives_since_commit": 3}, REDRIVE, "poison"),
        ({"redrives_since_commit": 900}, REDRIVE, "poison"),
        ({}, PARK, "orphaned"),
        ({"redrives_since_commit": 3}, PARK, "orphaned"),
        ({"verdict": "retry_exhausted"}, REDRIVE, "retry_exhausted"),
        ({"verdict": "unrecoverable"}, PARK, "unrecoverable"),
        ({"cancel": True}, REDRIVE, Cancel()),
        ({"cancel": True}, PARK, Cancel()),
        ({"cancel": True, "verdict": "unrecoverable"}, REDRIVE, Cancel()),
        ({"cancel": True, "redrives_since_commit": 9}, REDRIVE, Cancel()),
        ({"overdue": DAY}, UNKNOWN, Leave("unknown_kind")),
        ({"overdue": DAY + 1}, UNKNOWN, "no_handler"),
        ({"overdue": DAY + 1, "verdict": "unrecoverable"}, UNKNOWN, "no_handler"),
        ({"overdue": DAY, "cancel": True}, UNKNOWN, Leave("unknown_kind")),
        ({"overdue": DAY + 1, "cancel": True}, UNKNOWN, Cancel()),
        ({"overdue": -5.0}, REDRIVE, Redrive(0.0)),
        ({"begun": False}, REDRIVE, Redrive(0.0, counted=False)),
        ({"begun": False, "redrives_since_commit": 3}, REDRIVE, Redrive(0.0, counted=False)),
        ({"begun": False}, PARK, "orphaned"),
    ],
)
def test_the_first_rule_that_matches_decides(facts: dict[str, Any], kind: Kind | None, expected: Any) -> None:
    """B116, B122."""
    decision = decide(seen(**facts), kind, unknown_kind_grace=DAY)
    if isinstance(expected, str):
        assert isinstance(decision, Park) and decision.code == expected and decision.message
    else:
        assert decision == expected


def test_redrives_without_a_commit_are_spaced_out_up_to_ten_minutes() -> None:
    assert [spacing(n) for n in range(9)] == [0, 15, 30, 60, 120, 240, 480, 600, 600]
    assert spacing(10**9) == 600


# --- two sightings --------------------------------------------------------------------------------------


def test_a_first_pass_repairs_nothing(mender: Reconciler) -> None:
    job = orphan()
    before = row(job)
    report = mender.tick()
    assert (report.scanned, report.sighted, report.redriven) == (1, 1, 0)
    assert row(job) == before


def test_a_second_pass_repairs_only_after_the_grace(mender: Reconciler, clock: Clock) -> None:
    job = orphan()
    mender.tick()
    clock.skip(GRACE - 1)
    assert mender.tick().sighted == 1
    clock.skip(2)
    assert mender.tick().redriven == 1
    assert now(job).status == "pending"


@pytest.mark.parametrize("change", ["epoch", "expiry"])
def test_a_lease_that_has_changed_is_news(mender: Reconciler, clock: Clock, change: str) -> None:
    job = orphan()
    mender.tick()
    if change == "epoch":
        expires = job.lease_expires_at
        rewrite([job], lease_epoch=7, lease_expires_at=expires)
        age(job)
    age(job, seconds=1_800)
    clock.skip(GRACE + 1)
    assert mender.tick().sighted == 1
    clock.skip(GRACE + 1)
    assert mender.tick().redriven == 1


def test_the_epoch_alone_makes_a_lease_another(mender: Reconciler, clock: Clock) -> None:
    job = orphan()
    mender.tick()
    rewrite([job], lease_epoch=7)
    clock.skip(GRACE + 1)
    assert mender.tick().sighted == 1


def test_a_row_that_was_not_seen_again_is_forgotten(mender: Reconciler, clock: Clock) -> None:
    job = orphan()
    expires = now(job).lease_expires_at
    mender.tick()
    store.beat_many("gone", [lease_of(job)])
    clock.skip(GRACE + 1)
    assert mender.tick().scanned == 0
    rewrite([job], lease_expires_at=expires)
    assert mender.tick().sighted == 1


def test_a_late_pass_starts_from_nothing_seen(
    mender: Reconciler, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    mender.tick()
    clock.skip(2 * GRACE + 1)
    orphan()
    mender.tick()
    assert not logged(caplog, "reconcile_sightings_void")  # nothing had been seen
    clock.skip(2 * GRACE + 1)
    with caplog.at_level("WARNING"):
        assert mender.tick().sighted == 1
    assert [record.reason for record in logged(caplog, "reconcile_sightings_void")] == ["late_tick"]  # type: ignore[attr-defined]
    clock.skip(GRACE + 1)
    assert mender.tick().redriven == 1


def test_passes_a_grace_apart_are_not_late(clock: Clock) -> None:
    orphan()
    with override_settings(DURABLE_JOBS={"GRACE": 120, "TICK": 0}):
        mender = Reconciler("mender", clock=clock)
        mender.tick()
        clock.skip(121)
        assert mender.tick().redriven == 1


def test_another_reconciler_has_sightings_of_its_own(mender: Reconciler, clock: Clock) -> None:
    orphan()
    mender.tick()
    clock.skip(GRACE + 1)
    assert Reconciler("fresh", clock=clock).tick().sighted == 1
    assert mender.tick().redriven == 1


def enrol(owner: str) -> None:
    store.worker_started(owner, host="here", pid=1, queues=[], kinds=[], concurrency=1)


def hold_worker_row(other: OtherConnection) -> None:
    """On PostgreSQL the row, on SQLite the file."""
    other.enter(transaction.atomic())
    other.run(
        lambda: connections["default"].cursor().execute("UPDATE durable_jobs_worker SET host = 'elsewhere'")
    )


WRITE = store.worker_beat


def slow_writes(monkeypatch: pytest.MonkeyPatch, clock: Clock, seconds: float) -> None:
    """From now on the write that begins a pass takes so long."""

    def slow(owner: str) -> bool:
        clock.skip(seconds)
        return WRITE(owner)

    monkeypatch.setattr(store, "worker_beat", slow)


def test_a_first_write_that_waited_voids_what_was_seen(
    mender: Reconciler, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """P2: a database that takes no write has taken no beats either."""
    job = orphan()
    enrol("mender")
    mender.tick()
    clock.skip(GRACE + 1)
    slow_writes(monkeypatch, clock, 1.5)
    report = mender.tick()
    assert (report.sighted, report.redriven, report.errors) == (1, 0, 0)
    assert now(job).status == "running"
    clock.skip(GRACE + 1)
    slow_writes(monkeypatch, clock, 0.5)
    assert mender.tick().redriven == 1


@pytest.mark.parametrize("always", ["slow", "late"])
def test_a_machine_that_is_always_slow_repairs_all_the_same(
    mender: Reconciler, clock: Clock, monkeypatch: pytest.MonkeyPatch, always: str
) -> None:
    """Each of those writes was taken, so the owner's would have been taken too."""
    job = orphan()
    enrol("mender")
    slow_writes(monkeypatch, clock, 1.5 if always == "slow" else 0.0)
    repaired = []
    for _ in range(6):
        repaired.append(mender.tick().redriven)
        clock.skip(GRACE + 1 if always == "slow" else 2 * GRACE + 1)
    assert repaired == [0, 0, 0, 0, 1, 0] and now(job).status == "pending"


def test_a_beat_in_slow_times_begins_the_doubts_anew(
    mender: Reconciler, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """P2: whoever lives has been able to write between two of the writes that were taken."""
    job = orphan()
    enrol("mender")
    slow_writes(monkeypatch, clock, 1.5)
    for _ in range(3):
        assert mender.tick().sighted == 1
        clock.skip(GRACE + 1)
    age(job, seconds=1_800)
    for _ in range(4):
        assert mender.tick().sighted == 1
        clock.skip(GRACE + 1)
    assert mender.tick().redriven == 1


@pytest.mark.postgres_only
def test_a_lost_connection_voids_what_was_seen_and_the_next_pass_has_a_new_one(
    mender: Reconciler, clock: Clock, second_connection: OtherConnection, caplog: pytest.LogCaptureFixture
) -> None:
    """C014."""
    job = orphan()
    enrol("mender")
    mender.tick()
    clock.skip(GRACE + 1)
    cut(second_connection)
    report = mender.tick()
    assert (report.scanned, report.errors) == (0, 1)
    [line] = logged(caplog, "database_unavailable")
    assert line.part == "reconciler" and line.exc_info is None
    assert mender.tick().sighted == 1
    assert logged(caplog, "working_again")
    clock.skip(GRACE + 1)
    assert mender.tick().redriven == 1
    assert now(job).status == "pending"


def cut(other: OtherConnection) -> None:
    """End the server process of this thread's connection."""
    with connection.cursor() as cursor:
        cursor.execute("SELECT pg_backend_pid()")
        (pid,) = cursor.fetchone()
    gone = "SELECT count(*) FROM pg_stat_activity WHERE pid = %s"

    def ask(sql: str) -> int:
        with connections["default"].cursor() as theirs:
            theirs.execute(sql, [pid])
            return int(theirs.fetchone()[0])

    other.run(ask, "SELECT pg_terminate_backend(%s)::int")
    wait_until(lambda: other.run(ask, gone) == 0, 5, "the server process lives on")


@pytest.mark.postgres_only
def test_a_connection_lost_in_the_middle_ends_the_pass_and_all_are_repaired_later(
    mender: Reconciler, clock: Clock, second_connection: OtherConnection
) -> None:
    """C014."""
    jobs = [orphan(Interrupted) for _ in range(20)]
    Interrupted.policy = "redrive"
    mender.tick()
    clock.skip(GRACE + 1)
    Interrupted.on_decision = lambda: cut(second_connection)
    report = mender.tick()
    assert (report.redriven, report.errors) == (0, 1)
    assert mender.tick().sighted == 20
    clock.skip(GRACE + 1)
    assert mender.tick().redriven == 20
    assert {now(job).status for job in jobs} == {"pending"}


@pytest.mark.sqlite_only
def test_a_locked_file_voids_what_was_seen(
    mender: Reconciler,
    clock: Clock,
    second_connection: OtherConnection,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    job = orphan()
    enrol("mender")
    mender.tick()
    clock.skip(GRACE + 1)
    hold_worker_row(second_connection)
    monkeypatch.setitem(connection.settings_dict["OPTIONS"], "timeout", 0.2)
    report = mender.tick()
    assert (report.scanned, report.errors) == (0, 1)
    second_connection.leave()
    assert mender.tick().sighted == 1
    clock.skip(GRACE + 1)
    assert mender.tick().redriven == 1
    assert now(job).status == "pending"


def test_an_outage_that_aged_every_lease_parks_nothing(mender: Reconciler, clock: Clock) -> None:
    """P2: the first reconciler back meets twenty old leases of workers that live."""
    jobs = [make_job("running", kind=kind, owner="alive") for kind in [Redriven, Parked] * 10]
    age(*jobs)
    assert mender.tick().sighted == 20
    beats = store.beat_many("alive", [lease_of(job) for job in jobs])
    assert len(beats) == 20 and all(beat.renewed for beat in beats.values())
    for _ in range(3):
        clock.skip(GRACE + 1)
        assert mender.tick() == Report()
    assert {now(job).status for job in jobs} == {"running"}


def test_a_pass_refuses_a_transaction_of_the_caller(mender: Reconciler) -> None:
    with transaction.atomic(), pytest.raises(TransactionOwned):
        mender.tick()
    with transaction.atomic(), pytest.raises(TransactionOwned):
        mender.repair_dead("gone")


# --- repairs --------------------------------------------------------------------------------------------


def test_a_redriven_orphan_is_due_with_its_identity_and_limits_counted(
    mender: Reconciler, clock: Clock
) -> None:
    """B123."""
    job = orphan()
    published: list[Job] = []
    mender = Reconciler("mender", clock=clock, published=published.append)
    assert passes(mender, clock).redriven == 1
    after = now(job)
    assert (after.status, after.lease_owner, after.lease_epoch) == ("pending", None, job.lease_epoch + 1)
    assert (after.redrives, after.redrives_since_commit, after.attempts) == (1, 1, 1)
    assert after.next_run_at is not None and after.next_run_at <= datetime.now(UTC)
    (event,) = JobEvent.objects.filter(job_id=job.id)
    assert (event.event, event.owner, event.actor) == ("orphaned", "gone", "reconciler:mender")
    assert (event.data["owner"], event.data["epoch"], event.data["reaped"]) == (
        "gone",
        job.lease_epoch,
        False,
    )
    assert [told.id for told in published] == [job.id]


def test_a_later_orphaning_without_a_commit_waits_longer(mender: Reconciler, clock: Clock) -> None:
    job = orphan()
    rewrite([job], redrives_since_commit=2)
    passes(mender, clock)
    after = now(job)
    assert after.next_run_at is not None
    wait = (after.next_run_at - datetime.now(UTC)).total_seconds()
    assert 24 - 5 < wait <= 36


def test_waits_are_spread(mender: Reconciler) -> None:
    waits = {reconciler._jittered(100) for _ in range(50)}
    assert len(waits) > 1 and min(waits) >= 80 and max(waits) <= 120
    assert reconciler._jittered(0) == 0


def kill_and_repair(job: Job, mender: Reconciler, clock: Clock, *, commit: bool) -> Job:
    waiting = now(job)
    claimed = store.claim(job.id, waiting.continuation_seq, waiting.redrives, "again", 60)
    assert isinstance(claimed, Job)
    if commit:
        assert store.write_checkpoint(lease_of(claimed)) is not None
    age(claimed)
    passes(mender, clock)
    return now(job)


def test_a_job_that_commits_between_orphanings_is_never_poison(mender: Reconciler, clock: Clock) -> None:
    """B129."""
    job = make_job(kind=Redriven)
    for _ in range(5):
        assert kill_and_repair(job, mender, clock, commit=True).status == "pending"


def test_the_fourth_orphaning_without_a_commit_parks_as_poison(mender: Reconciler, clock: Clock) -> None:
    job = make_job(kind=Redriven)
    for _ in range(3):
        assert kill_and_repair(job, mender, clock, commit=False).status == "pending"
    after = kill_and_repair(job, mender, clock, commit=False)
    assert (after.status, after.error_code, after.error_class) == ("failed", "poison", "terminal")
    assert after.parked_at is not None and "4 times" in (after.error_message or "")


def test_an_orphan_of_a_kind_that_parks_waits_for_a_human(mender: Reconciler, clock: Clock) -> None:
    """B126."""
    job = orphan(Parked)
    parked: list[Job] = []
    signals.job_parked.connect(receiver := lambda job, **_: parked.append(job))
    try:
        assert passes(mender, clock).parked == 1
    finally:
        signals.job_parked.disconnect(receiver)
    after = now(job)
    assert (after.status, after.error_code, after.lease_owner) == ("failed", "orphaned", None)
    assert after.parked_at is not None and after.finished_at is not None and after.error_message
    (event,) = JobEvent.objects.filter(job_id=job.id)
    assert (event.event, event.owner, event.code) == ("parked", "gone", "orphaned")
    assert [told.id for told in parked] == [job.id]


def test_a_verdict_on_the_row_is_what_it_parks_with(mender: Reconciler, clock: Clock) -> None:
    job = make_job("verdict", kind=Redriven)
    claimed = store.claim(job.id, 0, 0, "gone", 0)
    assert isinstance(claimed, Job) and claimed.verdict == "retry_exhausted"
    age(claimed)
    assert passes(mender, clock).parked == 1
    after = now(job)
    assert (after.status, after.error_code, after.error_message) == (
        "failed",
        "retry_exhausted",
        "made for a test",
    )


@pytest.mark.parametrize("kind", [Redriven, Parked])
@pytest.mark.parametrize("by_mail", [False, True])
def test_an_orphan_that_was_to_be_cancelled_ends_cancelled(
    mender: Reconciler, clock: Clock, kind: type[Kind], by_mail: bool
) -> None:
    """B102, B116: under every policy."""
    job = orphan(kind)
    if by_mail:
        mail(job)
    else:
        assert store.request_cancel(job.id, scope=None) == "stamped"
    report = passes(mender, clock)
    assert (report.cancelled, report.parked, report.redriven) == (1, 0, 0)
    after = now(job)
    assert (after.status, after.parked_at, after.error_code) == ("cancelled", None, None)
    (event,) = JobEvent.objects.filter(job_id=job.id)
    assert event.data["worker_gone"] is True and event.data["hooks_skipped"] is False
    assert not CancelRequest.objects.exists()


def mail(job: Job) -> None:
    """What a request leaves that met a locked row."""
    key = job.id.hex if connection.vendor == "sqlite" else job.id
    with connection.cursor() as cursor:
        cursor.execute(
            "INSERT INTO durable_jobs_cancelrequest (job_id, actor, reason, requested_at) "
            "VALUES (%s, 'ada', '', CURRENT_TIMESTAMP)",
            [key],
        )


def test_a_request_in_the_mailbox_of_live_work_goes_to_its_row(mender: Reconciler) -> None:
    job = make_job("running", kind=Parked, owner="alive")
    mail(job)
    mender.tick()
    after = now(job)
    assert after.status == "running" and after.cancel_requested_at is not None
    assert not CancelRequest.objects.exists()


@pytest.mark.postgres_only
def test_a_request_that_met_a_locked_row_is_not_lost(
    mender: Reconciler, second_connection: OtherConnection
) -> None:
    """P11."""
    job = make_job(kind=Parked)
    second_connection.enter(transaction.atomic())
    second_connection.run(lock, job)
    assert store.request_cancel(job.id, scope=None) == "posted"
    assert mender.tick() == Report()
    second_connection.leave()
    assert mender.tick().cancelled == 1
    assert now(job).status == "cancelled"


def lock(job: Job) -> None:
    list(Job._base_manager.select_for_update(no_key=True).filter(pk=job.pk))


def test_the_row_of_the_project_agrees_whoever_ends_the_job(mender: Reconciler, clock: Clock) -> None:
    parked, cancelled, waiting, deleted = (Shipment.objects.create() for _ in range(4))
    jobs = [
        (orphan if shipment is not waiting else make_job)(
            kind=Mirrored, subject_type="tests.shipment", subject_id=str(shipment.pk)
        )
        for shipment in (parked, cancelled, waiting, deleted)
    ]
    store.request_cancel(jobs[1].id, scope=None)
    store.request_cancel(jobs[2].id, scope=None)
    deleted.delete()
    mender.tick()
    clock.skip(GRACE + 1)
    mender.tick()
    assert [now(job).status for job in jobs] == ["failed", "cancelled", "cancelled", "failed"]
    for shipment in (parked, cancelled, waiting):
        shipment.refresh_from_db()
    assert [parked.status, cancelled.status, waiting.status] == ["lost", "stopped", "stopped"]
    assert events(jobs[3]) == ["row_gone", "parked"]


@pytest.mark.parametrize("status", ["pending", "held", "retrying", "verdict"])
def test_a_request_for_work_that_nobody_holds_is_settled_at_once(mender: Reconciler, status: str) -> None:
    """B100, B120."""
    job = make_job(status, kind=Parked)
    store.request_cancel(job.id, scope=None)
    report = mender.tick()
    assert (report.scanned, report.cancelled) == (1, 1)
    after = now(job)
    assert (after.status, after.verdict) == ("cancelled", None)
    assert JobEvent.objects.get(job_id=job.id).actor == "reconciler:mender"


# --- what is left alone ---------------------------------------------------------------------------------


def test_live_leases_and_their_cancels_are_left_to_their_owners(mender: Reconciler, clock: Clock) -> None:
    """B120; within the grace, too."""
    live, late = (make_job("running", kind=Parked, owner="alive") for _ in range(2))
    age(late, seconds=GRACE / 2)
    for job in (live, late):
        store.request_cancel(job.id, scope=None)
    before = [row(live), row(late)]
    assert passes(mender, clock) == Report()
    assert [row(live), row(late)] == before


def test_a_backlog_of_a_day_is_never_touched(mender: Reconciler, clock: Clock) -> None:
    """T14, P1, B121, B131: with the database as transport no message can be lost."""
    jobs = [make_job(status, kind=kind) for status in ("pending", "retrying") for kind in (Redriven, Parked)]
    jobs += [make_job(kind="nobody.knows"), make_job("held", kind=Parked)]
    long_ago = datetime.fromtimestamp(time.time() - 2 * DAY, UTC)
    rewrite(jobs, created_at=long_ago, updated_at=long_ago)
    rewrite(jobs[:5], next_run_at=long_ago)
    rewrite([jobs[0], jobs[1], jobs[4]], pending_since=long_ago)
    rewrite(jobs[2:4], lease_expires_at=long_ago)
    before = [row(job) for job in jobs]
    for _ in range(12):
        assert mender.tick() == Report()
        clock.skip(GRACE + 1)
    assert [row(job) for job in jobs] == before


def test_rows_of_the_reserved_queue_are_left_to_their_owner(mender: Reconciler, clock: Clock) -> None:
    job = orphan(queue="manual")
    held = make_job("held", kind=Parked, queue="manual")
    store.request_cancel(held.id, scope=None)
    assert passes(mender, clock) == Report()
    assert (now(job).status, now(held).status) == ("running", "held")


def pause(**what: str) -> None:
    columns = {"queue_name": "", "kind": "", "tenant_id": "", "reason": "", "actor": "", **what}
    with connection.cursor() as cursor:
        cursor.execute(
            f"INSERT INTO durable_jobs_pause ({', '.join(columns)}, since) "
            f"VALUES ({', '.join(['%s'] * len(columns))}, CURRENT_TIMESTAMP)",
            list(columns.values()),
        )


def unpause() -> None:
    with connection.cursor() as cursor:
        cursor.execute("DELETE FROM durable_jobs_pause")


@pytest.mark.parametrize(
    "what", [{}, {"queue_name": "default"}, {"kind": "tests.parked"}, {"tenant_id": "default"}]
)
def test_orphans_of_paused_work_wait_and_cancels_do_not(
    mender: Reconciler, clock: Clock, what: dict[str, str]
) -> None:
    """F10."""
    paused, stopped, waiting = orphan(Parked), orphan(Parked), make_job(kind=Parked)
    for job in (stopped, waiting):
        store.request_cancel(job.id, scope=None)
    pause(**what)
    mender.tick()
    clock.skip(GRACE + 1)
    assert mender.tick().cancelled == 1
    assert [now(job).status for job in (paused, stopped, waiting)] == ["running", "cancelled", "cancelled"]
    unpause()
    assert passes(mender, clock).parked == 1
    assert not Pause.objects.exists()


@pytest.mark.parametrize("policy", ["park", "redrive"])
def test_a_pause_that_comes_between_selection_and_repair_wins(
    mender: Reconciler, clock: Clock, second_connection: OtherConnection, policy: str
) -> None:
    job = orphan(Interrupted)
    Interrupted.policy = policy
    mender.tick()
    clock.skip(GRACE + 1)
    Interrupted.on_decision = lambda: second_connection.run(pause)
    report = mender.tick()
    assert (report.parked, report.redriven, now(job).status) == (0, 0, "running")


def test_one_tenant_may_be_swept_alone(mender: Reconciler, clock: Clock) -> None:
    """B119."""
    mine, theirs = orphan(scope=Scope("a")), orphan(scope=Scope("b"))
    waiting = make_job(kind=Parked, scope=Scope("b"))
    store.request_cancel(waiting.id, scope=None)
    report = passes(mender, clock, tenant="a")
    assert (report.scanned, report.redriven) == (1, 1)
    assert [now(job).status for job in (mine, theirs, waiting)] == ["pending", "running", "pending"]


# --- kinds unknown here ---------------------------------------------------------------------------------


def test_an_orphan_of_an_unknown_kind_is_left_and_reported_then_parked(
    mender: Reconciler, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    """P8, B122: a rolling deploy."""
    job = orphan("nobody.knows")
    before = row(job)
    with caplog.at_level("WARNING"):
        mender.tick()
        clock.skip(GRACE + 1)
        report = mender.tick()
    assert (report.unknown_kind, report.sighted, report.parked) == (1, 0, 0)
    assert row(job) == before
    assert [(record.kind, record.jobs) for record in logged(caplog, "unknown_kind")] == [("nobody.knows", 1)]  # type: ignore[attr-defined]
    age(job, seconds=DAY + 60)
    assert mender.tick().sighted == 1
    clock.skip(GRACE + 1)
    with caplog.at_level("WARNING"):
        assert mender.tick().parked == 1
    after = now(job)
    assert (after.status, after.error_code) == ("failed", "no_handler")
    assert JobEvent.objects.get(job_id=job.id).data == {"hooks_skipped": True}
    assert logged(caplog, "no_handler")


def test_a_cancel_of_an_unknown_kind_ends_without_hooks_only_after_a_day(
    mender: Reconciler, clock: Clock
) -> None:
    """B102: never as no_handler."""
    waiting, gone = make_job(kind="nobody.knows"), orphan("nobody.knows")
    for job in (waiting, gone):
        store.request_cancel(job.id, scope=None)
    report = passes(mender, clock)
    assert (report.unknown_kind, report.cancelled) == (2, 0)
    assert (now(waiting).status, now(gone).status) == ("pending", "running")
    rewrite([waiting], cancel_requested_at=datetime.fromtimestamp(time.time() - DAY - 60, UTC))
    age(gone, seconds=DAY + 60)
    mender.tick()
    clock.skip(GRACE + 1)
    mender.tick()
    for job in (waiting, gone):
        assert now(job).status == "cancelled"
        assert JobEvent.objects.get(job_id=job.id).data["hooks_skipped"] is True


def test_a_kind_is_found_by_its_old_name(mender: Reconciler, clock: Clock) -> None:
    class Renamed(Kind):
        name = "tests.new_name"
        aliases = ("tests.old_name",)
        orphan_policy = "redrive"

        def step(self, ctx: Any) -> Done:
            return Done()

    job = orphan("tests.old_name")
    kinds.register(Renamed)
    try:
        assert passes(mender, clock).redriven == 1
    finally:
        kinds.unregister("tests.new_name")
    assert now(job).status == "pending"


# --- between selection and act --------------------------------------------------------------------------


def interrupted(
    mender: Reconciler, clock: Clock, policy: str, act: Callable[[Job], object]
) -> tuple[Job, Report]:
    job = orphan(Interrupted)
    Interrupted.policy = policy
    mender.tick()
    clock.skip(GRACE + 1)
    Interrupted.on_decision = lambda: act(job)
    report = mender.tick()
    assert Interrupted.on_decision is None, "nothing happened between selection and act"
    return job, report


@pytest.mark.parametrize("policy", ["park", "redrive"])
def test_a_beat_between_selection_and_act_saves_the_work(
    mender: Reconciler, clock: Clock, second_connection: OtherConnection, policy: str
) -> None:
    """B123, B127."""
    job, report = interrupted(
        mender, clock, policy, lambda job: second_connection.run(store.beat_many, "gone", [lease_of(job)])
    )
    assert (report.parked, report.redriven, report.errors) == (0, 0, 0)
    assert (now(job).status, now(job).lease_owner, events(job)) == ("running", "gone", [])


@pytest.mark.parametrize("policy", ["park", "redrive"])
def test_a_claim_between_selection_and_act_is_left_alone(
    mender: Reconciler, clock: Clock, second_connection: OtherConnection, policy: str
) -> None:
    """B127: even where the new lease has run out already."""

    def hand_on(job: Job) -> None:
        assert store.yield_slice(lease_of(job)) is not None
        assert isinstance(store.claim(job.id, 1, 0, "new", 0), Job)
        age(job)

    job, report = interrupted(mender, clock, policy, lambda job: second_connection.run(hand_on, job))
    assert (report.parked, report.redriven) == (0, 0)
    after = now(job)
    assert (after.status, after.lease_owner, after.lease_epoch) == ("running", "new", job.lease_epoch + 1)


@pytest.mark.parametrize("policy", ["park", "redrive"])
@pytest.mark.parametrize("by_mail", [False, True])
def test_a_cancel_between_selection_and_act_ends_cancelled(
    mender: Reconciler, clock: Clock, second_connection: OtherConnection, policy: str, by_mail: bool
) -> None:
    """B102."""

    def ask(job: Job) -> None:
        if by_mail:
            mail(job)
        else:
            store.request_cancel(job.id, scope=None)

    job, report = interrupted(mender, clock, policy, lambda job: second_connection.run(ask, job))
    assert (report.parked, report.redriven, now(job).status) == (0, 0, "running")
    assert mender.tick().cancelled == 1
    assert now(job).status == "cancelled"


def test_a_beat_saves_work_that_was_to_be_cancelled(
    mender: Reconciler, clock: Clock, second_connection: OtherConnection
) -> None:
    """P15: its owner lives and ends it at a boundary."""
    job = orphan(Interrupted)
    other = orphan(Interrupted)
    store.request_cancel(other.id, scope=None)
    mender.tick()
    clock.skip(GRACE + 1)
    # The decision on the first orphan falls after the selection of both.
    Interrupted.on_decision = lambda: second_connection.run(store.beat_many, "gone", [lease_of(other)])
    report = mender.tick()
    assert (report.parked, report.cancelled) == (1, 0)
    assert (now(job).status, now(other).status) == ("failed", "running")


# --- rows that cannot be settled ------------------------------------------------------------------------


def test_one_bad_row_does_not_stop_the_pass(
    mender: Reconciler, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    """B118, B132: one row at a time, too."""
    bad, good = orphan(Parked), orphan(Parked)
    bad_waiting, good_waiting = make_job(kind=Parked), make_job(kind=Parked)
    for job in (bad_waiting, good_waiting):
        store.request_cancel(job.id, scope=None)
    Hooked.failing = {bad.id, bad_waiting.id}
    report = mender.tick(batch=1)
    assert (report.cancelled, report.errors) == (1, 1)
    clock.skip(GRACE + 1)
    report = mender.tick(batch=1)
    assert (report.parked, report.errors) == (1, 2)
    statuses = [now(job).status for job in (bad, good, bad_waiting, good_waiting)]
    assert statuses == ["running", "failed", "pending", "cancelled"]
    assert (now(bad).mirror_attempts, now(bad_waiting).mirror_attempts) == (1, 2)
    assert logged(caplog, "reconcile_orphan_failed") and logged(caplog, "reconcile_cancel_failed")


def test_a_live_cancel_does_not_fill_the_batch(mender: Reconciler) -> None:
    """T15, B132."""
    live, waiting = make_job("running", kind=Parked), make_job(kind=Parked)
    for job in (live, waiting):
        store.request_cancel(job.id, scope=None)
    report = mender.tick(batch=1)
    assert (report.scanned, report.cancelled) == (1, 1)
    assert now(waiting).status == "cancelled"


def test_a_row_whose_hook_keeps_failing_is_tried_less_and_less_often(
    mender: Reconciler, clock: Clock
) -> None:
    job = orphan(Parked)
    Hooked.failing = {job.id}
    mender.tick()
    for _ in range(20):
        clock.skip(GRACE + 1)
        mender.tick()
    assert now(job).mirror_attempts == 5  # after 21, 42, 84, 168 and 315 s
    Hooked.failing = set()
    for _ in range(12):
        clock.skip(GRACE + 1)
        mender.tick()
    assert now(job).status == "failed"


def test_a_cancel_whose_hook_fails_is_not_tried_with_every_pass(mender: Reconciler, clock: Clock) -> None:
    job = make_job(kind=Parked)
    store.request_cancel(job.id, scope=None)
    Hooked.failing = {job.id}
    for _ in range(4):
        mender.tick()
        clock.skip(GRACE + 1)
    assert now(job).mirror_attempts == 3  # at 0, 21 and 63 s: the third waits 30 s
    Hooked.failing = set()
    clock.skip(60)
    assert mender.tick().cancelled == 1


def test_an_error_of_the_database_that_is_no_outage_ends_the_pass_and_not_the_reconciler(
    mender: Reconciler, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """B118: a table that a migration has taken away, for example."""
    job = make_job(kind=Parked)
    store.request_cancel(job.id, scope=None)
    with monkeypatch.context() as patch:

        def missing(*_: Any, **__: Any) -> Any:
            raise ProgrammingError("no such column")

        patch.setattr(store, "cancelling", missing)
        assert mender.tick().errors == 1
    (told,) = logged(caplog, "reconcile_pass_failed")
    assert told.exc_info
    assert mender.tick().cancelled == 1


def test_an_error_of_the_kind_itself_is_counted(mender: Reconciler, clock: Clock) -> None:
    def explode(_: Job) -> None:
        raise ZeroDivisionError

    job, report = interrupted(mender, clock, "park", explode)
    assert (report.errors, report.parked, now(job).status) == (1, 0, "running")


def test_an_outage_of_another_database_that_a_hook_met_is_one_rows_error(
    mender: Reconciler, clock: Clock
) -> None:
    """B118."""

    def meet() -> None:
        raise InterfaceError("the warehouse is closed")

    first, second = orphan(Interrupted), orphan(Parked)
    mender.tick()
    clock.skip(GRACE + 1)
    Interrupted.on_decision = meet
    report = mender.tick()
    assert (report.parked, report.errors) == (1, 1)
    assert (now(first).status, now(second).status) == ("running", "failed")


def test_a_connection_that_was_lost_in_a_hook_ends_the_pass(
    mender: Reconciler, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """C014: Django has another one by then, and that it works says nothing about what was seen."""

    def lose(self: Hooked, job: Job) -> int:
        connection.close()
        raise InterfaceError("connection already closed")

    jobs = [orphan(Parked), orphan(Parked)]
    mender.tick()
    clock.skip(GRACE + 1)
    with monkeypatch.context() as patched:
        patched.setattr(Hooked, "on_transition", lose)
        report = mender.tick()
    assert (report.parked, report.errors) == (0, 1)
    assert mender.tick().sighted == 2
    clock.skip(GRACE + 1)
    assert mender.tick().parked == 2
    assert {now(job).status for job in jobs} == {"failed"}


def test_an_outage_that_a_hook_met_is_ours_when_no_write_is_taken(
    mender: Reconciler, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As after a failover: the connection works and reads, and the database takes no write."""

    def meet() -> None:
        monkeypatch.setattr(store, "worker_beat", refuse)
        raise InterfaceError("the connection was closed")

    def refuse(owner: str) -> bool:
        raise OperationalError("cannot execute UPDATE in a read-only transaction")

    first, second = orphan(Interrupted), orphan(Parked)
    mender.tick()
    clock.skip(GRACE + 1)
    Interrupted.on_decision = meet
    report = mender.tick()
    monkeypatch.undo()
    assert (report.parked, report.errors) == (0, 1)
    assert (now(first).status, now(second).status) == ("running", "running")
    assert mender.tick().sighted == 2


def test_the_history_says_of_an_orphan_whether_it_had_begun(mender: Reconciler) -> None:
    """What was claimed ahead of its turn has no beat, and uses up none of its tries."""
    begun, waiting = (make_job("running", kind=Redriven, owner="gone") for _ in range(2))
    rewrite([waiting], heartbeat_at=None)
    assert mender.repair_dead("gone").redriven == 2
    told = {job.id: JobEvent.objects.get(job_id=job.id).data for job in (begun, waiting)}
    assert (told[waiting.id]["begun"], told[waiting.id]["redrives_since_commit"]) == (False, 0)
    assert (told[begun.id].get("begun"), told[begun.id]["redrives_since_commit"]) == (None, 1)
    assert all(one["reaped"] is True and one["delay"] == 0 for one in told.values())


def test_a_file_that_was_locked_is_an_outage_even_if_it_is_free_again(
    mender: Reconciler, clock: Clock
) -> None:
    """Every beat has waited for it as well."""

    def meet() -> None:
        raise OperationalError("database is locked")

    first, second = orphan(Interrupted), orphan(Parked)
    mender.tick()
    clock.skip(GRACE + 1)
    Interrupted.on_decision = meet
    assert mender.tick().parked == 0
    assert (now(first).status, now(second).status) == ("running", "running")
    assert mender.tick().sighted == 2


def test_a_beat_saves_work_that_nobody_here_knows_as_well(
    mender: Reconciler, clock: Clock, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A day after its lease ran out it would be parked; the owner comes back in between."""
    job = orphan("nobody.knows")
    age(job, seconds=DAY + 3_600)
    park = store.park_orphan

    def late(seen: Orphan, **options: Any) -> Job | None:
        age(job, seconds=-60)
        return park(seen, **options)

    monkeypatch.setattr(store, "park_orphan", late)
    report = passes(mender, clock)
    assert (report.parked, report.errors, now(job).status) == (0, 0, "running")
    assert not logged(caplog, "no_handler")


def test_a_failure_to_publish_is_counted_and_changes_nothing(
    clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    """T16, B128."""

    def refuse(job: Job) -> None:
        raise ConnectionError("no broker")

    jobs = [orphan(), orphan()]
    report = passes(Reconciler("mender", clock=clock, published=refuse), clock)
    assert (report.redriven, report.errors) == (2, 2)
    assert {now(job).status for job in jobs} == {"pending"}
    assert len(logged(caplog, "reenqueue_failed")) == 2


@pytest.mark.postgres_only
def test_a_row_that_somebody_holds_is_passed_over_and_named(
    mender: Reconciler,
    clock: Clock,
    second_connection: OtherConnection,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """P10."""
    held, free = orphan(), orphan()
    second_connection.enter(transaction.atomic())
    second_connection.run(lock, held)
    pid = second_connection.connection.connection.info.backend_pid
    assert passes(mender, clock).redriven == 1
    assert (now(held).status, now(free).status) == ("running", "pending")
    (record,) = logged(caplog, "orphan_locked")
    assert (record.job_id, str(pid) in record.holders) == (str(held.id), True)  # type: ignore[attr-defined]
    second_connection.leave()
    assert mender.tick().redriven == 1


@pytest.mark.postgres_only
def test_no_lock_is_held_across_a_hook_but_that_of_its_own_row(
    mender: Reconciler, clock: Clock, second_connection: OtherConnection
) -> None:
    """B117: what was selected is free while the project's code takes its time."""
    free: list[int] = []

    def lock_the_others(job_id: Any) -> None:
        with transaction.atomic():
            free.append(len(Job.objects.select_for_update(nowait=True).exclude(pk=job_id)))

    class Slow(Parked):
        name = "tests.slow"

        def on_transition(self, job: Job) -> int:
            second_connection.run(lock_the_others, job.id)
            return 1

    with register_for_test(Slow):
        orphans, waiting = [orphan(Slow) for _ in range(3)], [make_job(kind=Slow) for _ in range(3)]
        for job in waiting:
            store.request_cancel(job.id, scope=None)
        first = mender.tick()
        clock.skip(GRACE + 1)
        second = mender.tick()
    assert (first.cancelled, second.parked, second.errors) == (3, 3, 0)
    assert free == [5] * 6
    assert {now(job).status for job in orphans} == {"failed"}


def test_a_pass_reads_no_more_than_a_batch_at_a_time(
    mender: Reconciler, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """B117, B132, T15: page by page, each in a transaction that has ended before the first row is touched."""
    sizes: list[int] = []

    def counted(read: Callable[..., list[Any]]) -> Callable[..., list[Any]]:
        def page(*arguments: Any, **options: Any) -> list[Any]:
            rows = read(*arguments, **options)
            assert not connection.in_atomic_block
            sizes.append(len(rows))
            return rows

        return page

    for name in ("orphans", "cancelling", "mailed"):
        monkeypatch.setattr(store, name, counted(getattr(store, name)))
    for _ in range(5):
        orphan()
    assert passes(mender, clock, batch=2).redriven == 5
    assert max(sizes) == 2 and sum(sizes) == 10


def test_the_service_repairs_one_tenant_in_batches() -> None:
    """B175, B119."""
    ours, theirs = [orphan(scope=Scope("a")) for _ in range(3)], orphan(scope=Scope("b"))
    report = service.reconcile(batch=1, tenant="a", wait=False)
    assert (report.redriven, report.scanned) == (3, 6)
    assert {now(job).status for job in ours} == {"pending"} and now(theirs).status == "running"


def test_an_orphan_keeps_its_lock_key_whatever_was_started_meanwhile(
    mender: Reconciler, clock: Clock
) -> None:
    """C015: no second job of the key can have been queued, so no repair meets one."""
    keyed, free = orphan(lock_key="ledger"), [orphan(), orphan()]
    with pytest.raises(LockKeyHeld):
        service.start(Redriven, lock_key="ledger")
    assert passes(mender, clock).redriven == 3
    assert {now(job).status for job in [keyed, *free]} == {"pending"}
    with pytest.raises(LockKeyHeld) as refused:
        service.start(Redriven, lock_key="ledger")
    assert refused.value.held_by == keyed.id


# --- several, and other processes -----------------------------------------------------------------------


def test_two_at_once_repair_each_row_once(
    clock: Clock, other_connections: Callable[[], OtherConnection]
) -> None:
    """B115."""
    jobs = [orphan(kind) for kind in [Redriven, Parked] * 15]
    menders = [Reconciler(name, clock=clock) for name in ("one", "two")]
    for mender in menders:
        mender.tick()
    clock.skip(GRACE + 1)
    running = [other_connections().begin(mender.tick) for mender in menders]
    reports = [future.result(30) for future in running]
    assert sum(report.redriven for report in reports) == 15
    assert sum(report.parked for report in reports) == 15
    assert sum(report.errors for report in reports) == 0
    assert {(now(job).redrives, len(events(job))) for job in jobs} == {(1, 1), (0, 1)}


def test_a_supervisor_repairs_what_its_dead_child_held_at_once(mender: Reconciler) -> None:
    child = [make_job("running", kind=kind, owner="child") for kind in (Redriven, Parked, Parked)]
    stranger = make_job("running", kind="nobody.knows", owner="child")
    sibling = make_job("running", kind=Redriven, owner="sibling")
    store.request_cancel(child[2].id, scope=None)
    report = mender.repair_dead("child")
    assert report == Report(scanned=4, redriven=1, parked=1, cancelled=1, unknown_kind=1)
    assert [now(job).status for job in child] == ["pending", "failed", "cancelled"]
    assert (now(stranger).status, now(sibling).status) == ("running", "running")
    assert JobEvent.objects.get(job_id=child[0].id).data["reaped"] is True


def test_processes_that_were_silent_for_a_day_leave_the_screen(mender: Reconciler, clock: Clock) -> None:
    for name in ("mender", "quiet", "busy"):
        enrol(name)
    with connection.cursor() as cursor:
        for name, seconds in (("mender", 2 * DAY), ("quiet", DAY + 60), ("busy", DAY - 60)):
            long_ago = datetime.fromtimestamp(time.time() - seconds, UTC)
            cursor.execute(
                "UPDATE durable_jobs_worker SET beat_at = %s WHERE owner = %s",
                [connection.ops.adapt_datetimefield_value(long_ago), name],
            )
    mender.tick()
    assert set(WorkerProcess.objects.values_list("owner", flat=True)) == {"mender", "busy"}


def test_a_process_whose_row_has_gone_is_told(clock: Clock) -> None:
    """C018."""
    told: list[str] = []
    mender = Reconciler("mender", clock=clock, register=lambda: (told.append("gone"), enrol("mender"))[0])
    mender.tick()
    mender.tick()
    assert told == ["gone"]


def test_an_end_without_hooks_is_not_marked_as_mirrored() -> None:
    """B93: "nothing to mirror" is satisfied; "hooks unknown here" is not."""
    for end in ("cancel", "park"):
        job = make_job("expired", kind="tests.nobody_knows")
        if end == "cancel":
            store.request_cancel(job.id, scope=None)
        (orphan,) = [one for one in store.orphans(-1.0) if one.id == job.id]
        if end == "cancel":
            ended = lifecycle.cancel_orphan(None, orphan, grace=-1.0)
        else:
            ended = lifecycle.park_orphan(None, orphan, grace=-1.0, code="no_handler", message="m")
        assert ended is not None and ended.domain_mirrored_at is None


# --- what mutants of the code got away with


def test_silent_workers_are_forgotten_once_an_hour(
    mender: Reconciler, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    forgotten: list[float] = []
    monkeypatch.setattr(store, "forget_workers", forgotten.append)
    mender.tick()
    mender.tick()
    clock.skip(3_500)
    mender.tick()
    assert forgotten == [86_400.0]
    clock.skip(200)
    mender.tick()
    assert forgotten == [86_400.0] * 2


def test_a_repair_of_the_dead_that_meets_an_outage_counts_it(
    mender: Reconciler, monkeypatch: pytest.MonkeyPatch
) -> None:
    def away(owner: str) -> Any:
        raise OperationalError("the server is away")

    monkeypatch.setattr(store, "dead_leases", away)
    assert mender.repair_dead("somebody").errors == 1
