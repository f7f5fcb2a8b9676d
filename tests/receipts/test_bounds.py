"""Deadlines, lock waits, and the connection's own lock policy."""

from __future__ import annotations

import math
import sqlite3
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from django.db import OperationalError, connection, connections, transaction

from durable_jobs import bounded, receipts, service, store
from durable_jobs.exceptions import (
    DeadlineExceeded,
    InvalidInput,
    LeaseLostError,
    LockPolicyConflict,
    ScopeMismatch,
    TransactionOwned,
)
from durable_jobs.manager import JobManager
from durable_jobs.models import Job, Scope
from durable_jobs.receipts import (
    AttemptOutcome,
    ExecutionContext,
    Finalized,
    Limits,
    PendingFinalization,
    Submission,
    complete_atomically,
    finalize_atomically,
    retry_atomically,
)
from tests.connections import OtherConnection
from tests.models import Shipment
from tests.receipts import acts
from tests.receipts.acts import HOME, RECEIPT, context, ended, everything, job_of, lock_policy, owned, ship
from tests.store import rows

pytestmark = pytest.mark.django_db(transaction=True)

TOLERANCE = 0.05
FAILED = AttemptOutcome("failed", "no route")


def lock(job_id: Any) -> None:
    """Keep the row, on SQLite the file, from everybody else."""
    if connection.vendor == "postgresql":
        Job.objects.select_for_update().get(pk=job_id)
    else:
        rows.execute("UPDATE durable_jobs_job SET priority = priority WHERE id = %s", job_id)


@contextmanager
def locked(other: OtherConnection, job_id: Any) -> Iterator[None]:
    other.enter(transaction.atomic())
    other.run(lock, job_id)
    yield
    other.leave()


def overrun(call: Callable[[], Any], deadline: float) -> float:
    """Seconds after its deadline at which a refused call came back."""
    answer = None
    with suppress(DeadlineExceeded):
        answer = call()
    late = time.monotonic() - deadline
    assert answer is None or (isinstance(answer, PendingFinalization) and answer.deadline_exceeded), answer
    return late


@pytest.mark.parametrize("verb", ["complete", "finalize", "retry", "claim"])
def test_a_wait_for_a_lock_ends_with_the_deadline(verb: str, second_connection: OtherConnection) -> None:
    """A83, A84: within 50 ms of it, with everything as it was and the connection usable."""
    job = ended("failed") if verb == "retry" else job_of(owned())
    held_job = receipts.defer(acts.KIND, Submission("held", "{}"), scope=HOME)
    ctx = owned()
    wanted = job.id if verb == "retry" else job_of(ctx).id
    before, policy, lateness = everything(), lock_policy(), []
    with locked(second_connection, wanted):
        for _ in range(3):
            deadline = time.monotonic() + 0.3
            late_ctx = replace(ctx, deadline=deadline)
            fresh = replace(late_ctx, fence=None, idempotency_key=job.idempotency_key)
            call = {
                "complete": lambda late_ctx=late_ctx: complete_atomically(late_ctx, lambda _: ship()),
                "finalize": lambda late_ctx=late_ctx: finalize_atomically(late_ctx, FAILED, lambda _: ship()),
                "retry": lambda fresh=fresh: retry_atomically(wanted, fresh, lambda _: ship()),
                "claim": lambda fresh=fresh: begin_behind_a_lock(fresh, held_job),
            }[verb]
            lateness.append(overrun(call, deadline))
    assert -0.02 < min(lateness) < TOLERANCE, lateness
    assert everything() == before and lock_policy() == policy
    if verb == "complete":
        complete_atomically(ctx, lambda _: ship())


def begin_behind_a_lock(ctx: ExecutionContext, held_job: Job) -> Any:
    """On SQLite any write waits for the file; on PostgreSQL a claim skips locked rows, but waits for a count."""
    if connection.vendor == "sqlite":
        return receipts.begin(replace(ctx, idempotency_key="new"), "{}")
    other = OtherConnection()
    try:
        other.enter(transaction.atomic())
        other.run(store.wait_lock, store.capacity_lock(acts.KIND, HOME))
        return receipts.begin(replace(ctx, idempotency_key="new"), "{}", max_running=5)
    finally:
        other.leave()
        other.close()


@pytest.mark.postgres_only
def test_a_wait_inside_the_callback_ends_with_the_deadline_too(second_connection: OtherConnection) -> None:
    """A84: the bound is narrowed as the time runs out; a domain row keeps nobody longer than the job's row."""
    row = Shipment.objects.create(note="theirs")
    second_connection.enter(transaction.atomic())
    second_connection.run(lambda: Shipment.objects.select_for_update().get(pk=row.pk))
    lateness = []
    for _ in range(3):
        ctx = owned()
        deadline = time.monotonic() + 0.5
        before = everything()

        def waiting(_: ExecutionContext) -> str:
            time.sleep(0.25)
            Shipment.objects.filter(pk=row.pk).update(note="ours")
            return RECEIPT

        late_ctx = replace(ctx, deadline=deadline)
        lateness.append(overrun(partial(complete_atomically, late_ctx, waiting), deadline))
        assert everything() == before
    second_connection.leave()
    assert min(lateness) < TOLERANCE, lateness


@pytest.mark.postgres_only
def test_a_wait_at_the_commit_ends_with_the_deadline_too(second_connection: OtherConnection) -> None:
    """A84: Django's foreign keys are checked there, and wait for a parent that somebody holds."""
    rows.execute("CREATE TABLE tests_parent (id int PRIMARY KEY)")
    rows.execute("INSERT INTO tests_parent VALUES (1)")
    rows.execute(
        "CREATE TABLE tests_child (parent int REFERENCES tests_parent DEFERRABLE INITIALLY DEFERRED)"
    )
    try:
        second_connection.enter(transaction.atomic())
        second_connection.run(rows.execute, "SELECT * FROM tests_parent FOR UPDATE")

        def adopt(_: ExecutionContext) -> str:
            time.sleep(0.15)
            rows.execute("INSERT INTO tests_child VALUES (1)")
            return RECEIPT

        lateness = []
        for _ in range(3):
            ctx = owned()
            deadline = time.monotonic() + 0.4
            lateness.append(
                overrun(partial(complete_atomically, replace(ctx, deadline=deadline), adopt), deadline)
            )
            assert job_of(ctx).status == "running"
        second_connection.leave()
        assert min(lateness) < TOLERANCE, lateness
    finally:
        rows.execute("DROP TABLE tests_child")
        rows.execute("DROP TABLE tests_parent")


@pytest.mark.sqlite_only
def test_a_commit_that_waits_for_readers_ends_with_the_deadline(tmp_path: Path) -> None:
    """A84: without a write-ahead log it does."""
    plain = connection.copy("plain")  # type: ignore[attr-defined]
    plain.settings_dict |= {"NAME": str(tmp_path / "plain.sqlite3"), "OPTIONS": {}}
    connections["plain"] = plain
    reader = sqlite3.connect(plain.settings_dict["NAME"], isolation_level=None)

    def slow(deadline: float) -> None:
        with bounded.transaction("plain", deadline=deadline, what="slow"), plain.cursor() as cursor:
            cursor.execute("INSERT INTO lines VALUES (1)")
            time.sleep(0.3)

    try:
        reader.execute("CREATE TABLE lines (n int)")
        reader.execute("BEGIN")
        reader.execute("SELECT * FROM lines").fetchall()
        lateness = []
        for _ in range(3):
            deadline = time.monotonic() + 0.5
            lateness.append(overrun(partial(slow, deadline), deadline))
            with plain.cursor() as cursor:
                cursor.execute("PRAGMA busy_timeout")
                assert cursor.fetchone() == (5000,)
        assert min(lateness) < TOLERANCE, lateness
        reader.execute("COMMIT")
        assert reader.execute("SELECT * FROM lines").fetchall() == []
        slow(time.monotonic() + 5)
        assert reader.execute("SELECT * FROM lines").fetchall() == [(1,)]
    finally:
        reader.close()
        plain.close()
        del connections["plain"]


@pytest.mark.parametrize("seconds", [math.inf, 40 * 86_400, 1e15], ids=["none", "40 days", "for ever"])
def test_a_deadline_may_be_far_away_or_none(seconds: float) -> None:
    """A83: farther than a database can be told."""
    policy = lock_policy()
    ctx = owned(seconds=seconds)
    assert complete_atomically(ctx, lambda _: ship()) == RECEIPT
    assert isinstance(finalize_atomically(owned(seconds=seconds), FAILED, lambda _: "1"), Finalized)
    page = service.candidates(service.CandidateQuery(acts.KIND, "anna", HOME), context(seconds=seconds))
    assert len(page.candidates) == 2 and lock_policy() == policy


@pytest.mark.postgres_only
def test_a_long_statement_ends_with_the_deadline() -> None:
    """A83: a statement that could not commit any more is not waited for."""
    ctx = owned()
    deadline = time.monotonic() + 0.3
    late = overrun(
        lambda: complete_atomically(
            replace(ctx, deadline=deadline), lambda _: rows.execute("SELECT pg_sleep(5)")
        ),
        deadline,
    )
    assert late < 0.2
    assert job_of(ctx).status == "running"


def set_policy(milliseconds: int) -> None:
    if connection.vendor == "sqlite":
        rows.execute(f"PRAGMA busy_timeout = {milliseconds}")
    else:
        rows.execute(f"SET lock_timeout = {milliseconds}")


def test_the_connections_own_shorter_policy_stays_in_force(second_connection: OtherConnection) -> None:
    """A84: the lesser of both; that it ended the wait is the database's word, not the deadline's."""
    ctx = owned()
    set_policy(200)
    try:
        policy = lock_policy()
        with locked(second_connection, job_of(ctx).id):
            began = time.monotonic()
            with pytest.raises(OperationalError):
                complete_atomically(ctx, lambda _: ship())
            assert 0.15 < time.monotonic() - began < 1.0
        assert lock_policy() == policy
        seen: list[Any] = []
        complete_atomically(ctx, lambda _: seen.append(lock_policy()) or RECEIPT)  # type: ignore[func-returns-value]
        assert seen[0][0] in (200, "200ms") and lock_policy() == policy
    finally:
        connection.close()


def test_the_policy_is_narrowed_inside_and_back_afterwards() -> None:
    """A84."""
    policy, seen = lock_policy(), []

    def looking(_: Any) -> str:
        seen.append(lock_policy())
        return RECEIPT

    ctx = owned(seconds=3)
    assert lock_policy() == policy
    complete_atomically(ctx, looking)
    assert lock_policy() == policy
    finalize_atomically(owned(seconds=3), FAILED, looking)
    retry_atomically((job := ended("failed")).id, context(job.idempotency_key, seconds=3), looking)
    assert lock_policy() == policy
    for found in seen:
        assert found != policy
        bound = (
            found[0]
            if connection.vendor == "sqlite"
            else int(str(found[0]).removesuffix("ms").removesuffix("s"))
        )
        assert 0 < bound <= 3000


def test_a_policy_changed_inside_is_refused_and_not_overwritten(monkeypatch: pytest.MonkeyPatch) -> None:
    """A84: before the commit, also when nothing had to be narrowed after the change."""
    monkeypatch.setattr(bounded, "SLACK_SECONDS", 3600.0)
    ctx = owned()
    before, policy = everything(), lock_policy()

    def changing(_: ExecutionContext) -> str:
        set_policy(1234)
        return ship()

    with pytest.raises(LockPolicyConflict) as refused:
        complete_atomically(ctx, changing)
    assert refused.value.code == "E_JOB_LOCK_POLICY_CONFLICT"
    set_policy(20_000 if connection.vendor == "sqlite" else 0)
    answer = finalize_atomically(ctx, FAILED, changing)
    assert isinstance(answer, PendingFinalization) and answer.code == "E_JOB_LOCK_POLICY_CONFLICT"
    assert everything() == before
    # PostgreSQL takes such a change back with the transaction; on SQLite it is the other's, and is left alone.
    assert lock_policy() == ((1234,) if connection.vendor == "sqlite" else policy)
    connection.close()


@pytest.mark.parametrize("verb", ["complete", "finalize", "retry"])
def test_a_callback_after_the_commit_that_fails_undoes_nothing(verb: str) -> None:
    """A86: the write was committed, and says so; the failure is kept with the job."""

    def work(_: Any) -> str:
        transaction.on_commit(lambda: 1 / 0)
        return ship()

    job = ended("failed") if verb == "retry" else None
    ctx = context(job.idempotency_key) if job else owned()
    policy = lock_policy()
    if verb == "finalize":
        answer = finalize_atomically(ctx, FAILED, work)
        assert isinstance(answer, Finalized) and "division by zero" in (answer.cleanup_error or "")
    elif job:
        retry_atomically(job.id, ctx, work)
    else:
        assert complete_atomically(ctx, work) == RECEIPT
    done = acts.read(job.id) if job else job_of(ctx)
    assert done.status == {"complete": "completed", "finalize": "failed", "retry": "running"}[verb]
    assert "division by zero" in (done.diagnostic or "") and len(acts.shipments()) == 1
    assert lock_policy() == policy and not connection.in_atomic_block


@pytest.mark.sqlite_only
def test_a_failure_after_the_commit_undoes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """A86, A54: it is kept with the job; with a failed write both are told."""
    real = bounded.set_busy_timeout
    calls: list[int] = []

    def failing(raw: Any, milliseconds: int) -> None:
        calls.append(milliseconds)
        if milliseconds == 20_000:
            raise RuntimeError("no pragma today")
        real(raw, milliseconds)

    monkeypatch.setattr(bounded, "set_busy_timeout", failing)
    ctx = owned()
    assert complete_atomically(ctx, lambda _: ship()) == RECEIPT
    job = job_of(ctx)
    assert job.status == "completed" and "no pragma today" in (job.diagnostic or "")
    real(connection.connection, 20_000)
    second = owned()
    real(connection.connection, 20_000)
    answer = finalize_atomically(second, FAILED, lambda _: RECEIPT)
    assert isinstance(answer, Finalized) and "no pragma today" in (answer.cleanup_error or "")
    real(connection.connection, 20_000)
    third = owned()
    real(connection.connection, 20_000)
    with pytest.raises(ZeroDivisionError) as both:
        complete_atomically(third, lambda _: 1 / 0)  # type: ignore[arg-type,return-value]
    assert "no pragma today" in both.value.__notes__[0]


# --- contexts -------------------------------------------------------------------------------------------


def test_a_context_is_never_renewed() -> None:
    """A83: the deadline that was given stands, whatever the calls before took."""
    ctx = owned(seconds=0.3)
    assert ctx.deadline == replace(ctx, stop=ctx.stop).deadline
    time.sleep(0.35)
    before = everything()
    with pytest.raises(DeadlineExceeded):
        complete_atomically(ctx, lambda _: ship())
    assert everything() == before


def test_a_deadline_that_passes_in_the_callback_rolls_back() -> None:
    """A83."""
    ctx = owned()
    late = replace(ctx, deadline=time.monotonic() + 0.2)
    before = everything()

    def slow(_: ExecutionContext) -> str:
        ship()
        time.sleep(0.25)
        return RECEIPT

    with pytest.raises(DeadlineExceeded):
        complete_atomically(late, slow)
    assert everything() == before


@pytest.mark.parametrize(
    "wrong",
    [
        {"scope": "acme"}, {"scope": Scope("")}, {"scope": Scope("  ")}, {"scope": Scope("acme", " ")}, {"kind": ""},
        {"kind": "  "}, {"kind": None}, {"idempotency_key": "\t"}, {"idempotency_key": "x" * 201}, {"actor": None},
        {"deadline": "soon"}, {"deadline": float("nan")}, {"deadline": True}, {"stop": None}, {"fence": "mine"},
        {"limits": 7}, {"limits": None}, {"scope": Scope("t" * 65)}, {"scope": Scope("acme", "o" * 65)},
        {"kind": "k" * 201},
    ],
)  # fmt: skip
def test_a_context_of_nonsense_is_refused(wrong: dict[str, Any]) -> None:
    """A80, A4, A3."""
    facts = {"scope": HOME, "actor": "a", "kind": "k", "idempotency_key": "k", "deadline": 1.0}
    with pytest.raises(InvalidInput):
        ExecutionContext(**{**facts, **wrong})


def test_a_context_may_be_as_long_as_its_columns() -> None:
    ExecutionContext(Scope("t" * 64, "o" * 64), "a", "k" * 200, "i" * 200, math.inf)


def test_what_a_context_may_read_is_bounded() -> None:
    """A80, A94: refused charges are not charged."""
    ctx = context(limits=Limits(items=3, bytes=100))
    ctx.consume(items=2, bytes=60)
    for charge in ({"items": 2}, {"bytes": 41}, {"items": 1, "bytes": 41}):
        with pytest.raises(InvalidInput, match="used up"):
            ctx.consume(**charge)
    replace(ctx, actor="anna").consume(items=1, bytes=40)
    with pytest.raises(InvalidInput):
        ctx.consume(items=1)
    context().consume(items=10**9, bytes=10**12)


def test_what_is_not_named_is_not_charged() -> None:
    ctx = context(limits=Limits(items=1, bytes=1))
    for _ in range(3):
        ctx.consume()
    ctx.consume(bytes=1)
    ctx.consume(items=1)
    with pytest.raises(InvalidInput, match="used up"):
        ctx.consume(items=1)


@pytest.mark.parametrize("amount", [-1, -(10**9), 1.5, float("nan"), True, "3", None])
def test_amounts_are_whole_and_never_negative(amount: Any) -> None:
    """A80, A94: nobody gives back what was not taken."""
    for name in ("items", "bytes"):
        ctx = context(limits=Limits(items=3, bytes=100))
        with pytest.raises(InvalidInput, match=name):
            ctx.consume(**{name: amount})
        ctx.consume(items=3, bytes=100)
        if amount is not None:
            with pytest.raises(InvalidInput, match=name):
                Limits(**{name: amount})


@pytest.mark.parametrize("verb", ["start", "defer", "resume", "cancel"])
@pytest.mark.parametrize(
    "foreign",
    [{"scope": Scope("acme")}, {"kind": "tests.other"}, {"idempotency_key": "another"}],
    ids=["scope", "kind", "key"],
)
def test_a_context_that_is_supplied_must_match(verb: str, foreign: dict[str, Any]) -> None:
    """A81, A51, A22: before anything else; without a context the plain behaviour stays (A87)."""
    manager = JobManager(HOME, "anna")
    held = manager.defer_job(acts.KIND, Submission("held", "{}"))
    new = Submission("held" if verb in ("resume", "cancel") else "new", "{}")
    ctx = context("held" if verb in ("resume", "cancel") else "new")
    wrong = replace(ctx, **foreign)
    calls: dict[str, Callable[[ExecutionContext], Any]] = {
        "start": lambda ctx: manager.start_job(acts.KIND, lambda _: None, new, ctx=ctx),
        "defer": lambda ctx: manager.defer_job(acts.KIND, new, ctx=ctx),
        "resume": lambda ctx: manager.resume_job(held, lambda _: None, ctx=ctx),
        "cancel": lambda ctx: manager.cancel_job(held, ctx=ctx),
    }
    before = everything()
    with pytest.raises(ScopeMismatch):
        calls[verb](wrong)
    stopped = replace(ctx)
    stopped.stop.set()
    with pytest.raises(LeaseLostError):
        calls[verb](stopped)
    with pytest.raises(DeadlineExceeded):
        calls[verb](replace(ctx, deadline=0.0))
    assert everything() == before


def test_a_cancel_is_held_to_identity_before_its_status_counts() -> None:
    """A51: also for a job that has ended."""
    manager = JobManager(HOME, "anna")
    job = ended("completed")
    with pytest.raises(ScopeMismatch):
        manager.cancel_job(job.id, ctx=context("another"))
    assert manager.cancel_job(job.id, ctx=context(job.idempotency_key)) is False


def test_a_bounded_call_is_refused_inside_another_of_the_same_connection() -> None:
    """A85."""
    manager = JobManager(HOME, "anna")
    with bounded.transaction("default", deadline=time.monotonic() + 5, what="outer"):
        with pytest.raises(TransactionOwned):
            manager.start_job(acts.KIND, lambda _: None, ctx=replace(context(), idempotency_key=None))
        with pytest.raises(TransactionOwned):
            manager.start_job(acts.KIND, lambda _: None)
        assert service.get(job_of.__name__) is None
    assert connections["default"].in_atomic_block is False
