"""Two and three hands on the same rows at once, each on a connection of its own."""

from __future__ import annotations

import contextlib
import sqlite3
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import Any
from uuid import UUID

import pytest
from django.contrib.auth.models import Group
from django.db import DatabaseError, IntegrityError, OperationalError, connection, transaction

from durable_jobs import database, store
from durable_jobs.exceptions import ErrorClass, ErrorFacts
from durable_jobs.jsontext import sha256
from durable_jobs.models import Job, JobEvent, Scope, uuid7
from durable_jobs.store import BUSY, Lease, NewJob, Probe
from tests.connections import OtherConnection
from tests.store.rows import (
    CLAIMER,
    EPOCH,
    GRACE,
    ME,
    State,
    ago,
    ahead,
    execute,
    image,
    lease_on,
    letters,
    make,
    orphan_on,
    post_letter,
)

pytestmark = pytest.mark.django_db(transaction=True)
on_postgresql = pytest.mark.postgres_only
on_sqlite = pytest.mark.sqlite_only

SCOPE = Scope("acme", "north")
FACTS = ErrorFacts(ErrorClass.TRANSIENT, "E1", "builtins.OSError", "no route", "")

PAUSED_BEAT = 7_216_005
"""The advisory lock that a beat waits for when a test has stopped it."""

Make = Callable[[], OtherConnection]


@contextlib.contextmanager
def at_once(seconds: float = 1.0) -> Iterator[None]:
    """The block must not have waited for anybody; on PostgreSQL a wait for a lock is cut short."""
    waits = connection.vendor == "postgresql"
    if waits:
        execute("SET lock_timeout = '3s'")
    start = time.monotonic()
    try:
        yield
    finally:
        if waits and not connection.needs_rollback:
            execute("RESET lock_timeout")
    assert time.monotonic() - start < seconds, "waited"


@contextlib.contextmanager
def held(other: OtherConnection, act: Callable[..., Any], *arguments: Any) -> Iterator[Any]:
    """While the block runs, the other connection is inside a transaction in which it has done `act`."""
    other.enter(database.transaction(database.alias()))
    try:
        yield other.run(act, *arguments)
    finally:
        other.leave()


def lock(job_id: UUID) -> None:
    """As an operator's `select_for_update` does, or a fence."""
    execute("SELECT id FROM durable_jobs_job WHERE id = %s FOR NO KEY UPDATE", job_id)


def fail(lease: Lease) -> Job | None:
    return store.fail_slice(
        lease, FACTS, max_failures=5, first_delay=5, longest_delay=300, exponential=True
    )  # fmt: skip


def is_blocked(call: Future[Any], seconds: float = 0.3) -> bool:
    with contextlib.suppress(TimeoutError):
        call.result(seconds)
    return not call.done()


# --- claims -----------------------------------------------------------------------------------------------


def test_each_row_is_claimed_exactly_once(other_connections: Make) -> None:
    """B42: three claimers on many rows; SKIP LOCKED shares them out, nobody waits, nobody gets one twice."""
    for number in range(240):
        make("pending", queue_name="q", kind="k", priority=number % 3, attempts=0, lease_epoch=0)
    probes = [Probe("q", "k", priority, None, 30.0) for priority in range(3)]

    def claim_all(owner: str) -> list[UUID]:
        ids: list[UUID] = []
        while claimed := store.claim_next(owner, 8, probes):
            assert len(claimed) <= 8
            ids += [one.job.id for one in claimed]
        return ids

    calls = [other_connections().begin(claim_all, f"w{number}") for number in range(3)]
    counts = Counter(job_id for call in calls for job_id in call.result(60))
    assert len(counts) == 240 and set(counts.values()) == {1}
    assert set(Job.objects.values_list("attempts", "lease_epoch")) == {(1, 1)}


def test_one_of_many_deliveries_of_one_identity_runs(other_connections: Make) -> None:
    """B42: the rest are refused, or told to ask again and then refused."""
    for _ in range(8):
        job_id = make("pending")
        row = image(job_id)
        gate = threading.Barrier(3)

        def deliver(owner: str, job_id: UUID = job_id, row: Any = row, gate: threading.Barrier = gate) -> Any:
            gate.wait(10)
            while (
                answer := store.claim(job_id, row["continuation_seq"], row["redrives"], owner, 30)
            ) is BUSY:
                time.sleep(0.01)
            return answer

        others = [other_connections() for _ in range(3)]
        answers = [call.result(20) for call in [o.begin(deliver, f"w{n}") for n, o in enumerate(others)]]
        assert len([answer for answer in answers if answer is not None]) == 1
        assert image(job_id)["attempts"] == row["attempts"] + 1
        for other in others:
            other.close()


def test_a_killed_slices_redelivery_is_refused() -> None:
    """P3: only the reconciler takes a job from its owner, and counts it; a broker's redelivery never does."""
    job_id = make("expired")
    before = image(job_id)
    for _ in range(5):
        assert store.claim(job_id, 4, 2, CLAIMER, 30) is None
    assert image(job_id) == before
    job = store.take_orphan(orphan_on(job_id), grace=GRACE, delay=0)
    assert job is not None and job.redrives_since_commit == before["redrives_since_commit"] + 1


@on_postgresql
def test_a_locked_row_is_busy_and_a_taken_one_refused(second_connection: OtherConnection) -> None:
    """P17: a skipped claim must not swallow a delivery."""
    job_id = make("pending")
    with held(second_connection, lock, job_id), at_once():
        assert store.claim(job_id, 4, 2, CLAIMER, 30) is BUSY
        assert store.claim(job_id, 3, 2, CLAIMER, 30) is None
        assert (
            store.claim_next(CLAIMER, 1, [Probe(f"{image(job_id)['queue_name']}", "tests.work", 5, None, 9)])
            == []
        )
    assert store.claim(job_id, 4, 2, CLAIMER, 30) is not None
    assert store.claim(job_id, 4, 2, "another", 30) is None


@on_postgresql
def test_a_claim_passes_over_locked_rows(second_connection: OtherConnection) -> None:
    first = make("pending", queue_name="q", kind="k", priority=0, next_run_at=ago(90))
    second = make("pending", queue_name="q", kind="k", priority=0, next_run_at=ago(30))
    with held(second_connection, lock, first), at_once():
        claimed = store.claim_next(CLAIMER, 4, [Probe("q", "k", 0, None, 30.0)])
    assert [one.job.id for one in claimed] == [second]


@on_postgresql
def test_a_claim_locks_no_more_than_it_takes(second_connection: OtherConnection) -> None:
    """P22: the rows behind the limit stay free for the next worker, even while the claim is not committed."""
    for number in range(20):
        make("pending", queue_name="q", kind="k", priority=number % 2)
    probes = [Probe("q", "k", priority, None, 30.0) for priority in (0, 1)]
    with held(second_connection, store.claim_next, "w", 4, probes) as claimed:
        assert len(claimed) == 4
        free = execute(
            "SELECT count(*) FROM (SELECT id FROM durable_jobs_job FOR NO KEY UPDATE SKIP LOCKED) rows"
        )
        assert free == [(16,)]
        assert len(store.claim_next("other", 16, probes)) == 16


@on_postgresql
@pytest.mark.parametrize("binding", [False, True], ids=["client", "server"])
def test_a_claim_planned_on_an_empty_table_keeps_its_limit(binding: bool) -> None:
    """P-G: planned while the table was empty, `IN (SELECT … LIMIT 1 …)` once took the whole queue."""
    with_options(server_side_binding=binding)
    try:
        execute("SET plan_cache_mode = force_generic_plan")
        connection.connection.prepare_threshold = 0
        probes = [Probe("q", "k", priority, None, 30.0) for priority in range(3)]
        for size in store._CLAIM_SIZES:
            for _ in range(3):
                assert store.claim_next(CLAIMER, size, probes) == []
                assert store.claim_next(CLAIMER, 1, probes[:1]) == []
        for number in range(300):
            make("pending", queue_name="q", kind="k", priority=number % 3)
        for size in store._CLAIM_SIZES:
            assert len(store.claim_next(CLAIMER, size, probes)) == size
        assert len(store.claim_next(CLAIMER, 1, probes[:1])) == 1
        if binding:
            ((prepared,),) = execute("SELECT count(*) FROM pg_prepared_statements WHERE generic_plans > 0")
            assert prepared > 0
    finally:
        with_options()


# --- the lease and the fence -------------------------------------------------------------------------------


@on_postgresql
def test_a_fence_that_rolls_back_loses_to_no_repair(second_connection: OtherConnection) -> None:
    """P4: the lease runs out inside the block, the repair skips the row, and the failure is recorded."""
    job_id = make("expired")
    lease, orphan = lease_on(job_id), orphan_on(job_id)
    second_connection.enter(transaction.atomic())
    assert second_connection.run(store.lock_fence, lease, 30)
    with at_once():
        assert store.take_orphan(orphan, grace=GRACE, delay=0) is None
        assert store.park_orphan(orphan, grace=GRACE, code="c", message="m") is None
        assert store.redrive(job_id, scope=None, grace=GRACE) is None
        assert store.settle(job_id, scope=None, grace=GRACE) is None
        post_letter(job_id)
        assert store.cancel_orphan(orphan, grace=GRACE) is None
        assert store.fold_cancel(job_id) is None
    second_connection.leave(ValueError("the block failed"))
    job = second_connection.run(fail, lease)
    assert job is not None and job.error_code == "E1"


@on_postgresql
def test_a_locked_row_is_not_renewed_but_still_mine(second_connection: OtherConnection) -> None:
    """P5, R1: locked by anybody is not lost; stolen is."""
    locked, stolen, free = make("running"), make("running"), make("running")
    leases = [lease_on(job_id) for job_id in (locked, stolen, free)]
    execute("UPDATE durable_jobs_job SET lease_epoch = 9 WHERE id = %s", stolen)
    with held(second_connection, lock, locked), at_once():
        beats = store.beat_many(ME, leases)
    assert beats[locked][:2] == (False, True)
    assert beats[stolen][:2] == (False, False)
    assert beats[free][:2] == (True, True)


@on_postgresql
def test_a_row_that_changes_between_the_look_and_the_lock_of_a_beat_is_judged_as_it_is_then(
    second_connection: OtherConnection, monkeypatch: pytest.MonkeyPatch
) -> None:
    """P5: written by somebody, it is renewed all the same; taken by somebody, it is not, and stays as it is."""
    written, retaken, stolen, ended, free = (make("expired") for _ in range(5))
    jobs = (written, retaken, stolen, ended, free)
    leases = [lease_on(job_id) for job_id in jobs]
    templates = store._BEAT_MANY._templates
    locking = "FOR NO KEY UPDATE SKIP LOCKED"
    assert templates["postgresql"].count(locking) == 1, "the statement has changed"
    pausing = f"AND (SELECT count(*) FROM pg_advisory_xact_lock_shared({PAUSED_BEAT})) = 1 {locking}"
    monkeypatch.setattr(
        store, "_BEAT_MANY", store._statement(templates["postgresql"].replace(locking, pausing))
    )
    execute(f"SELECT pg_advisory_lock({PAUSED_BEAT})")
    try:
        beat = second_connection.begin(store.beat_many, ME, leases)
        wait_for(lambda: beat.done() or is_waiting_for(PAUSED_BEAT), 20)
        assert not beat.done()
        execute("UPDATE durable_jobs_job SET progress_message = 'half' WHERE id = %s", written)
        execute("UPDATE durable_jobs_job SET lease_epoch = lease_epoch + 1 WHERE id = %s", retaken)
        execute("UPDATE durable_jobs_job SET lease_owner = 'thief' WHERE id = %s", stolen)
        assert store.complete(lease_on(ended), None) is not None
        taken = {job_id: image(job_id) for job_id in (retaken, stolen, ended)}
    finally:
        execute(f"SELECT pg_advisory_unlock({PAUSED_BEAT})")
    beats = beat.result(20)
    assert {job_id for job_id in jobs if beats[job_id].renewed} == {written, free}
    assert {job_id: image(job_id) for job_id in taken} == taken
    assert image(written)["progress_message"] == "half"
    for job_id in (written, free):
        assert image(job_id)["lease_expires_at"] > ahead(0)
    monkeypatch.undo()
    again = store.beat_many(ME, leases)
    assert {job_id for job_id in jobs if not again[job_id].mine} == {retaken, stolen, ended}


@on_postgresql
def test_an_owner_kept_from_beating_gets_its_lease_back(second_connection: OtherConnection) -> None:
    """P5, R2: a foreign lock outlasts the lease; at the unlock the owner's next beat comes before the repair."""
    job_id = make("expired")
    lease, orphan = lease_on(job_id), orphan_on(job_id)
    with held(second_connection, lock, job_id):
        assert store.beat_many(ME, [lease])[job_id][:2] == (False, True)
        assert store.take_orphan(orphan, grace=GRACE, delay=0) is None
    assert store.beat_many(ME, [lease])[job_id][:2] == (True, True)
    assert store.take_orphan(orphan, grace=GRACE, delay=0) is None


def test_a_taken_job_is_lost_to_its_owner(second_connection: OtherConnection) -> None:
    """B44: after the repair and the next claim, nothing of the first owner matches; its fence is refused."""
    job_id = make("expired")
    old = lease_on(job_id)
    assert second_connection.run(store.take_orphan, orphan_on(job_id), grace=GRACE, delay=0) is not None
    row = image(job_id)
    new = second_connection.run(store.claim, job_id, row["continuation_seq"], row["redrives"], ME, 30)
    assert new.lease_epoch == EPOCH + 2
    before = image(job_id)
    with database.transaction(database.alias()):
        assert not store.lock_fence(old, 30)
    assert store.beat_many(ME, [old])[job_id][:2] == (False, False)
    assert store.write_checkpoint(old, "1") is None
    assert fail(old) is None and store.complete(old, None) is None and store.yield_slice(old) is None
    assert store.cancel_running(job_id, old.epoch) is None and store.fail_terminal(job_id, old.epoch) is None
    assert image(job_id) == before


@on_postgresql
def test_a_peer_that_stopped_in_its_fence_gives_the_row_up(second_connection: OtherConnection) -> None:
    """P10: the fence's own statement sets an idle timeout, for its transaction alone."""
    job_id = make("expired")
    lease, orphan = lease_on(job_id), orphan_on(job_id)
    second_connection.enter(transaction.atomic())
    assert second_connection.run(store.lock_fence, lease, 0.3)
    second_connection.run(Group.objects.create, name="never")
    assert store.take_orphan(orphan, grace=GRACE, delay=0) is None
    wait_for(lambda: store.take_orphan(orphan, grace=GRACE, delay=0) is not None, 10)
    with pytest.raises(DatabaseError) as cut:
        second_connection.run(execute, "SELECT 1")
    assert database.is_outage(cut.value)
    with contextlib.suppress(DatabaseError):
        second_connection.leave()
    assert not Group.objects.exists()


@on_postgresql
def test_the_idle_timeout_ends_with_the_fence() -> None:
    """P10: safe behind a pooler, since nothing is left on the connection."""
    job_id = make("running")
    ((usual,),) = execute("SHOW idle_in_transaction_session_timeout")
    with database.transaction(database.alias()):
        assert store.lock_fence(lease_on(job_id), 41)
        assert execute("SHOW idle_in_transaction_session_timeout") == [("41s",)]
    assert execute("SHOW idle_in_transaction_session_timeout") == [(usual,)]


@on_postgresql
@pytest.mark.parametrize(
    "write",
    [lambda lease: store.lock_fence(lease, 30), store.write_checkpoint, store.yield_slice],
    ids=["lock_fence", "write_checkpoint", "yield_slice"],
)
def test_rows_that_point_to_the_job_are_inserted_under_its_fence(
    second_connection: OtherConnection, write: Callable[[Lease], Any]
) -> None:
    """P12: FOR NO KEY UPDATE lets every foreign key to the job through."""
    job_id = make("running")
    execute("CREATE TABLE tests_pointer (job_id uuid REFERENCES durable_jobs_job (id))")
    try:
        with held(second_connection, write, lease_on(job_id)), at_once(), transaction.atomic():
            execute("INSERT INTO tests_pointer VALUES (%s)", job_id)
    finally:
        execute("DROP TABLE tests_pointer")


@on_postgresql
def test_a_fence_waits_for_the_row_and_then_sees_it_as_it_is(other_connections: Make) -> None:
    """B46, B20: the proof holds until the commit, and is never a view from before the wait."""
    job_id = make("expired")
    lease, orphan = lease_on(job_id), orphan_on(job_id)
    holder, owner = other_connections(), other_connections()
    holder.enter(transaction.atomic())
    assert holder.run(store.take_orphan, orphan, grace=GRACE, delay=0) is not None
    fence = owner.begin(store.lock_fence, lease, 30)
    assert is_blocked(fence)
    holder.leave()
    assert fence.result(10) is False


@on_postgresql
@pytest.mark.parametrize("waiter", ["write_checkpoint", "beat after it"])
def test_a_lease_set_after_a_wait_has_its_full_length(other_connections: Make, waiter: str) -> None:
    """P18: times are computed after the row's lock was taken, by the wall clock."""
    job_id = make("running")
    lease = lease_on(job_id, ttl=20)
    holder, owner = other_connections(), other_connections()
    holder.enter(transaction.atomic())
    holder.run(lock, job_id)
    call = owner.begin(store.write_checkpoint, lease, '{"at": 11}')
    assert is_blocked(call, 1.2)
    holder.leave()
    assert call.result(10) is False
    if waiter == "beat after it":
        owner.run(store.beat_many, ME, [lease])
    ((left,),) = execute(
        "SELECT extract(epoch FROM lease_expires_at - clock_timestamp())::float8 FROM durable_jobs_job"
    )
    assert 19.2 < left <= 20
    row = image(job_id)
    assert row["heartbeat_at"] >= ago(1) and row["last_committed_at"] >= ago(1)


@on_postgresql
def test_a_lease_set_late_in_a_long_transaction_has_its_full_length() -> None:
    """P18, T5: never the time at which the transaction began."""
    job_id = make("running")
    with database.transaction(database.alias()):
        assert store.lock_fence(lease_on(job_id), 30)
        time.sleep(1.2)
        store.write_checkpoint(lease_on(job_id, ttl=20))
        ((left,),) = execute(
            "SELECT extract(epoch FROM lease_expires_at - clock_timestamp())::float8 FROM durable_jobs_job"
        )
    assert 19.5 < left <= 20


@on_postgresql
def test_a_claim_between_locked_neighbours_has_its_full_lease(second_connection: OtherConnection) -> None:
    """P18: what never waits may use the statement's time in its WHERE, not for the lease it sets."""
    job_id = make("pending", queue_name="q", kind="k", priority=0)
    with transaction.atomic():
        execute("SELECT pg_sleep(0.6)")
    store.claim_next(CLAIMER, 1, [Probe("q", "k", 0, None, 20.0)])
    assert image(job_id)["lease_expires_at"] > ahead(19.5)


def test_a_beat_between_look_and_act_saves_the_job(second_connection: OtherConnection) -> None:
    """P15, P2: a cancel by epoch alone would kill work that came back."""
    job_id = make(State("expired", request="row"))
    (orphan,) = store.orphans(GRACE)
    second_connection.run(store.beat_many, ME, [lease_on(job_id)])
    assert store.cancel_orphan(orphan, grace=GRACE) is None
    assert store.park_orphan(orphan, grace=GRACE, code="c", message="m") is None
    assert image(job_id)["status"] == "running"


# --- cancel -------------------------------------------------------------------------------------------------


@on_postgresql
def test_a_request_never_waits_for_a_fence(second_connection: OtherConnection) -> None:
    """P11, R4, R33: it goes into the mailbox, the keeper reads it at once, the owner's next write folds it in."""
    job_id = make("running")
    lease = lease_on(job_id)
    with held(second_connection, store.lock_fence, lease, 30):
        with at_once():
            assert store.request_cancel(job_id, scope=SCOPE, actor="Ann") == "posted"
            assert store.request_cancel(job_id, scope=SCOPE, actor="Ben") == "posted"
            assert store.request_cancel(job_id, scope=Scope("umbrella")) is None
        beat = store.beat_many(ME, [lease])[job_id]
        assert (beat.mine, beat.cancel) == (True, True)
        assert second_connection.run(store.set_progress, lease, store.Counts()) is True
    assert image(job_id)["cancel_requested_at"] is None
    job = store.yield_slice(lease)
    assert job is not None and job.cancel_requested_at is not None
    assert len(letters()[job_id]) == 2
    with transaction.atomic():
        ended = store.cancel_waiting(job_id)
    assert ended is not None and ended.status == "cancelled" and not letters()


@on_postgresql
def test_a_view_and_a_slice_do_not_deadlock(second_connection: OtherConnection) -> None:
    """P11, R5: the view holds the domain row and cancels; the slice holds the job and writes the domain row."""
    job_id = make("running")
    group = Group.objects.create(name="domain")
    second_connection.enter(transaction.atomic())
    assert second_connection.run(store.lock_fence, lease_on(job_id), 30)
    with transaction.atomic():
        Group.objects.select_for_update().get(pk=group.pk)
        slice_waits = second_connection.begin(Group.objects.filter(pk=group.pk).update, name="by the slice")
        assert is_blocked(slice_waits)
        with at_once():
            assert store.request_cancel(job_id, scope=SCOPE) == "posted"
    assert slice_waits.result(10) == 1
    second_connection.leave()


@on_postgresql
def test_counting_a_failed_hook_waits_for_nobody(second_connection: OtherConnection) -> None:
    """P11, P14: a view that holds a domain row counts; a slice that holds the job wants that row."""
    job_id = make("running")
    group = Group.objects.create(name="domain")
    second_connection.enter(database.transaction(database.alias()))
    assert second_connection.run(store.lock_fence, lease_on(job_id), 30)
    with transaction.atomic():
        Group.objects.select_for_update().get(pk=group.pk)
        slice_waits = second_connection.begin(Group.objects.filter(pk=group.pk).update, name="by the slice")
        assert is_blocked(slice_waits)
        with at_once():
            assert store.bump_mirror_attempts(job_id, EPOCH) is False
    assert slice_waits.result(10) == 1
    second_connection.leave()
    assert store.bump_mirror_attempts(job_id, EPOCH) is True


@on_postgresql
@pytest.mark.parametrize("fenced", [False, True], ids=["free rows", "fenced rows"])
def test_two_open_transactions_cancel_the_same_jobs_crosswise(other_connections: Make, fenced: bool) -> None:
    """P11, P13: neither the rows nor the mailbox make them wait for each other."""
    first_job, second_job = make("running"), make("running")
    fence, one, two = other_connections(), other_connections(), other_connections()
    with contextlib.ExitStack() as stack:
        if fenced:
            stack.enter_context(held(fence, lock, first_job))
            fence.run(lock, second_job)
        one.enter(transaction.atomic())
        two.enter(transaction.atomic())
        with at_once(2):
            answers = [
                one.run(store.request_cancel, first_job, scope=SCOPE),
                two.run(store.request_cancel, second_job, scope=SCOPE),
                one.run(store.request_cancel, second_job, scope=SCOPE),
                two.run(store.request_cancel, first_job, scope=SCOPE),
            ]
        assert answers == (["posted"] * 4 if fenced else ["stamped", "stamped", "posted", "posted"])
        one.leave()
        two.leave()
    for job_id in (first_job, second_job):
        beat = store.beat_many(ME, [lease_on(job_id)])[job_id]
        assert beat.cancel and len(letters()[job_id]) == (2 if fenced else 1)
        assert store.fold_cancel(job_id) is not None
    assert not letters()


@on_postgresql
def test_a_request_that_its_caller_rolls_back_was_never_made(second_connection: OtherConnection) -> None:
    job_id = make("running")
    with held(second_connection, lock, job_id):
        with pytest.raises(ZeroDivisionError), transaction.atomic():
            assert store.request_cancel(job_id, scope=SCOPE) == "posted"
            raise ZeroDivisionError
    assert not letters()
    assert store.beat_many(ME, [lease_on(job_id)])[job_id].cancel is False


@on_postgresql
def test_a_request_made_during_a_redrive_outlives_it(second_connection: OtherConnection) -> None:
    """P11, B102: the redrive empties the mailbox of what came before it, not of what came after."""
    job_id = make(State("retry", request="both"))
    with held(second_connection, lambda: store.redrive(job_id, scope=None, grace=GRACE)):
        assert store.request_cancel(job_id, scope=None, actor="Ann") == "posted"
    assert image(job_id)["cancel_requested_at"] is None and len(letters()[job_id]) == 1
    row = image(job_id)
    job = store.claim(job_id, row["continuation_seq"], row["redrives"], CLAIMER, 30)
    assert isinstance(job, Job) and job.cancel_requested_at is not None


@on_postgresql
def test_who_holds_a_row_can_be_told(second_connection: OtherConnection) -> None:
    """P10: for the report on rows that expired long ago and cannot be locked."""
    job_id = make("expired")
    assert store.holders(job_id) is None
    with held(second_connection, store.lock_fence, lease_on(job_id), 30):
        ((pid,),) = second_connection.run(execute, "SELECT pg_backend_pid()")
        (told,) = store.holders(job_id) or [""]
        assert f"pid {pid}" in told
    assert store.holders(job_id) is None


def test_a_claim_wins_over_ending_waiting_work(second_connection: OtherConnection) -> None:
    """B104: between request and end a worker claims; it is left to observe the request."""
    job_id = make("pending")
    assert store.request_cancel(job_id, scope=SCOPE) == "stamped"
    assert second_connection.run(store.claim, job_id, 4, 2, CLAIMER, 30) is not None
    assert store.cancel_waiting(job_id) is None
    assert image(job_id)["status"] == "running"
    lease = lease_on(job_id)
    assert store.beat_many(CLAIMER, [lease])[job_id].cancel


@on_sqlite
def test_a_request_meets_a_writer_on_sqlite(second_connection: OtherConnection) -> None:
    """P11: one writer per file: it waits for its turn, and then it is on the row, not in the mailbox."""
    job_id = make("running")
    second_connection.enter(database.transaction(database.alias()))
    assert second_connection.run(store.lock_fence, lease_on(job_id), 30)
    threading.Timer(0.3, second_connection.leave).start()
    with database.transaction(database.alias(), timeout=3):
        assert store.request_cancel(job_id, scope=SCOPE) == "stamped"
    second_connection.enter(database.transaction(database.alias()))
    with pytest.raises(OperationalError, match="locked"), database.transaction(database.alias(), timeout=0.3):
        pytest.fail("two writers on one file")
    second_connection.leave()


# --- starts -------------------------------------------------------------------------------------------------


def new(**changes: Any) -> NewJob:
    text = '{"n":1}'
    plain = {"id": uuid7(), "kind": "tests.work", "status": "pending", "tenant": "acme",
             "organization": "north", "queue": "q", "input": text, "input_sha256": sha256(text)}  # fmt: skip
    return NewJob(**{**plain, **changes})


@pytest.mark.parametrize("key", ["idempotency_key", "lock_key"])
@pytest.mark.parametrize("many", [False, True], ids=["insert", "insert_many"])
@pytest.mark.parametrize("wins", [True, False], ids=["the winner commits", "the winner rolls back"])
def test_a_loser_waits_for_the_winner(other_connections: Make, key: str, many: bool, wins: bool) -> None:
    """B25, B26: then it gets the winner's job, or its own insert succeeds; its transaction stays usable."""
    winner, loser = other_connections(), other_connections()
    theirs, mine = new(**{key: "k"}), new(**{key: "k"})

    def start() -> tuple[UUID | None, UUID | None, int]:
        with transaction.atomic():
            own = store.insert_many([mine]).get(mine.id) if many else store.insert(mine)
            holder = (
                store.by_lock_key("k", SCOPE)
                if key == "lock_key"
                else store.by_idempotency_key("tests.work", "k", SCOPE)
            )
            return own and own.id, holder and holder.id, Group.objects.create(name="mine").pk

    winner.enter(transaction.atomic())
    assert winner.run(store.insert, theirs) is not None
    call = loser.begin(start)
    assert is_blocked(call)
    winner.leave(None if wins else ValueError("rolled back"))
    own, holder, _ = call.result(20)
    assert (own, holder) == ((None, theirs.id) if wins else (mine.id, mine.id))
    assert Group.objects.count() == 1 and Job.objects.count() == 1


def test_twenty_start_the_same_at_once(other_connections: Make) -> None:
    """C044, A20: one row; everybody can name it."""
    gate = threading.Barrier(6)

    def start(number: int) -> list[UUID]:
        found = []
        for turn in range(6):
            gate.wait(20)
            with transaction.atomic():
                own = store.insert(new(idempotency_key=f"k{turn}", lock_key=f"l{turn}"))
                job = own or store.by_idempotency_key("tests.work", f"k{turn}", SCOPE)
                assert job is not None
                Group.objects.create(name=f"{number} {turn}")
                found.append(job.id)
        return found

    calls = [other_connections().begin(start, number) for number in range(6)]
    found = {tuple(call.result(60)) for call in calls}
    assert len(found) == 1 and Job.objects.count() == 6


def test_many_in_opposite_order_do_not_deadlock(other_connections: Make) -> None:
    """P13, R10, C105: whatever the order they are given in, two bulk starts of the same keys do not deadlock."""
    keys = [f"k{number:04}" for number in range(300)]
    gate = threading.Barrier(2)

    def start(order: list[str], turn: int) -> int:
        gate.wait(20)
        return len(store.insert_many([new(idempotency_key=f"{turn} {key}") for key in order]))

    one, two = other_connections(), other_connections()
    for turn in range(6):
        calls = [one.begin(start, keys, turn), two.begin(start, keys[::-1], turn)]
        assert sum(call.result(60) for call in calls) == 300


def test_a_redrive_that_meets_the_lock_key_leaves_the_transaction_usable(
    second_connection: OtherConnection,
) -> None:
    """P20, R14, B109: the index has the last word; it is an answer, not a broken transaction."""
    job_id = make("failed", lock_key="ledger")
    before = image(job_id)
    second_connection.run(store.insert, new(lock_key="ledger"))
    with transaction.atomic():
        Group.objects.create(name="before")
        assert store.redrive(job_id, scope=SCOPE, grace=GRACE) is BUSY
        Group.objects.create(name="after")
    assert Group.objects.count() == 2
    assert image(job_id) == before


def test_a_redrive_waits_for_a_rival_start(other_connections: Make) -> None:
    """B36, B109: a start of the same key is not committed yet; its end decides."""
    for wins in (True, False):
        job_id = make("failed", lock_key=f"ledger {wins}")
        rival, operator = other_connections(), other_connections()
        rival.enter(transaction.atomic())
        assert rival.run(store.insert, new(lock_key=f"ledger {wins}")) is not None

        def redrive(job_id: UUID = job_id) -> Any:
            with database.transaction(database.alias()):
                return store.redrive(job_id, scope=SCOPE, grace=GRACE)

        call = operator.begin(redrive)
        assert is_blocked(call)
        rival.leave(None if wins else ValueError("rolled back"))
        answer = call.result(20)
        assert answer is BUSY if wins else answer.status == "pending"


def test_two_redrives_are_one(other_connections: Make) -> None:
    """B110: the second finds the job pending and is refused; `redrives` counts once."""
    job_id = make("failed")
    gate = threading.Barrier(2)

    def redrive() -> Any:
        gate.wait(10)
        with database.transaction(database.alias()):
            return store.redrive(job_id, scope=SCOPE, grace=GRACE)

    answers = [call.result(20) for call in [other_connections().begin(redrive) for _ in range(2)]]
    assert len([answer for answer in answers if isinstance(answer, Job)]) == 1
    assert image(job_id)["redrives"] == 3


def test_another_unique_violation_is_not_the_lock_key(monkeypatch: pytest.MonkeyPatch) -> None:
    """B37: only the named constraint becomes a refusal."""
    job_id = make("failed")
    other = make("failed", lock_key=image(job_id)["lock_key"], idempotency_key="taken")
    broken = store._statement(
        "UPDATE {job} SET idempotency_key = 'taken' WHERE id = :id AND id <> :id OR id = :id RETURNING {columns}"
    )
    monkeypatch.setattr(store, "_REDRIVE", broken)
    with pytest.raises(IntegrityError), transaction.atomic():
        store.redrive(job_id, scope=SCOPE, grace=GRACE)
    assert image(other)["idempotency_key"] == "taken"


@on_postgresql
def test_a_stricter_transaction_is_told_to_try_again(second_connection: OtherConnection) -> None:
    """P16, C104: REPEATABLE READ is the caller's wish; the error is a conflict, not a failure of the job."""
    job_id = make("running")
    with pytest.raises(OperationalError) as start, transaction.atomic():
        execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ")
        assert Job.objects.count() == 1
        second_connection.run(store.insert, new(idempotency_key="k"))
        store.insert(new(idempotency_key="k"))
    with pytest.raises(OperationalError) as cancel, transaction.atomic():
        execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ")
        assert Job.objects.count() == 2
        second_connection.run(store.beat_many, ME, [lease_on(job_id)])
        store.request_cancel(job_id, scope=None)
    for error in (start.value, cancel.value):
        assert database.is_conflict(error) and not database.is_outage(error)


# --- SQLite ---------------------------------------------------------------------------------------------------


@on_sqlite
def test_no_statement_keeps_the_write_lock() -> None:
    """P23: a cursor that was not read to its end would; a raw connection that waits for nothing gets in."""
    jobs = [make("running") for _ in range(3)]
    store.beat_many(ME, [lease_on(job_id) for job_id in jobs])
    store.claim_next(CLAIMER, 2, [Probe("q", "k", 0, None, 30.0)])
    store.write_checkpoint(lease_on(jobs[0]), "1")
    store.complete(lease_on(jobs[0]), None)
    assert store.request_cancel(jobs[1], scope=None) == "stamped"
    with contextlib.closing(sqlite3.connect(connection.settings_dict["NAME"], timeout=0)) as raw:
        raw.execute("BEGIN IMMEDIATE")
        raw.rollback()


@on_sqlite
def test_beats_pass_a_busy_writer(other_connections: Make) -> None:
    """P6, C003: two writers of 50 ms, back to back; a keeper in the same process is never starved."""
    job_id = make("running")
    lease = lease_on(job_id)
    over = threading.Event()

    def write_on() -> int:
        count = 0
        while not over.is_set():
            with database.transaction(database.alias()):
                Group.objects.create(name=f"{threading.get_ident()} {count}")
                time.sleep(0.05)
            count += 1
        return count

    writers = [other_connections() for _ in range(2)]
    calls = [writer.begin(write_on) for writer in writers]
    waits = []
    try:
        for _ in range(12):
            start = time.monotonic()
            assert store.beat_many(ME, [lease])[job_id].renewed
            waits.append(time.monotonic() - start)
            time.sleep(0.05)
    finally:
        over.set()
    assert all(call.result(20) > 3 for call in calls)
    assert max(waits) < 0.5, waits


@on_sqlite
def test_another_process_gets_its_turn_beside_a_busy_writer(second_connection: OtherConnection) -> None:
    """P6: 110 ms free in every second, longer than the longest nap of SQLite's busy handler."""
    over = threading.Event()

    def write_on() -> None:
        while not over.is_set():
            with database.transaction(database.alias()):
                Group.objects.create(name=f"{time.monotonic()}")
                time.sleep(0.05)

    call = second_connection.begin(write_on)
    try:
        waits = []
        with contextlib.closing(sqlite3.connect(connection.settings_dict["NAME"], timeout=5)) as raw:
            for _ in range(3):
                time.sleep(0.2)
                start = time.monotonic()
                raw.execute("BEGIN IMMEDIATE")
                raw.rollback()
                waits.append(time.monotonic() - start)
    finally:
        over.set()
    call.result(20)
    assert max(waits) < 2.5, waits


@on_sqlite
def test_a_reader_that_writes_later_is_not_locked_out(second_connection: OtherConnection) -> None:
    """P23, C102: our transactions take the write lock when they begin, whatever the project's mode is."""
    job_id = make("running")
    second_connection.run(setattr, second_connection.connection, "transaction_mode", None)

    def read_then_write() -> bool | None:
        with database.transaction(database.alias()):
            assert Job.objects.count() == 1
            time.sleep(0.3)
            return store.write_checkpoint(lease_on(job_id), "1")

    call = second_connection.begin(read_then_write)
    time.sleep(0.1)
    assert store.beat_many(ME, [lease_on(job_id)])[job_id].renewed
    assert call.result(20) is False


# --- helpers --------------------------------------------------------------------------------------------------


def with_options(**options: Any) -> None:
    """Connect anew with these OPTIONS besides the usual ones (none: as usual)."""
    connection.close()
    settings = connection.settings_dict
    usual = settings.setdefault("OPTIONS", {})
    usual.pop("server_side_binding", None)
    usual.update(options)
    connection.features.__dict__.pop("uses_server_side_binding", None)
    connection.ensure_connection()


def is_waiting_for(key: int) -> bool:
    ((waiting,),) = execute(
        "SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND objid = %s AND NOT granted", key
    )
    return bool(waiting)


def wait_for(happens: Callable[[], bool], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not happens():
        assert time.monotonic() < deadline, "did not happen"
        time.sleep(0.05)


def test_history_can_be_written_under_any_fence(second_connection: OtherConnection) -> None:
    """P12: the event's job is a reference without constraint, so that history waits for nobody."""
    if connection.vendor == "sqlite":
        pytest.skip("one writer per file")
    job_id = make("running")
    job = store.get(job_id)
    assert job is not None
    with held(second_connection, lock, job_id), at_once():
        store.add_event(job, "seen")
    assert JobEvent.objects.count() == 1
