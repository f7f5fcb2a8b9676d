"""The database's clock alone: a worker whose own is wrong changes nothing."""

from __future__ import annotations

import ast
import inspect
import time
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from django.db import connection
from django.utils import timezone

from durable_jobs import database, store
from durable_jobs.models import Job, Scope, uuid7
from durable_jobs.store import NewJob, Probe
from tests.store.rows import CLAIMER, GRACE, State, execute, image, lease_on, make, orphan_on, post_letter

HOUR = 3600.0


def seconds_ahead(job_id: Any, column: str) -> float:
    """How far ahead of the database's clock a column is, by the database's own arithmetic."""
    if connection.vendor == "postgresql":
        sql = f"extract(epoch FROM {column} - clock_timestamp())::float8"
    else:
        sql = f"(julianday({column}) - julianday('now')) * 86400.0"
    ((seconds,),) = execute(f"SELECT {sql} FROM durable_jobs_job WHERE id = %s", job_id)
    return float(seconds)


@pytest.mark.django_db
@pytest.mark.parametrize("skew", [-HOUR, HOUR], ids=["an hour behind", "an hour ahead"])
def test_a_worker_with_a_wrong_clock_changes_nothing(skew: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """B19, A25, B133, T5: what is due, leased, expired and taken stays what the database says."""
    orphan_id, live_id = make("expired"), make("running")
    due_id = make("pending", queue_name="q", kind="k", priority=0)
    later_id = make(State("pending", later=True), queue_name="q", kind="k", priority=0)
    asked_id = make(State("expired", request="row"))
    orphan = orphan_on(orphan_id)
    real_time, real_now = time.time, timezone.now
    monkeypatch.setattr(time, "time", lambda: real_time() + skew)
    monkeypatch.setattr(time, "time_ns", lambda: int((real_time() + skew) * 1e9))
    monkeypatch.setattr(timezone, "now", lambda: real_now() + timedelta(seconds=skew))
    assert abs((timezone.now() - datetime.now(UTC)).total_seconds()) > 3000

    started = store.insert(NewJob(uuid7(), "k", "pending", "t", None, "q", None, None, delay=100))
    assert started is not None
    assert abs(seconds_ahead(started.id, "created_at")) < 5
    assert abs(seconds_ahead(started.id, "next_run_at") - 100) < 5
    many = store.insert_many([NewJob(uuid7(), "k", "pending", "t", None, "q", None, None, delay=100)])
    assert abs(seconds_ahead(next(iter(many)), "next_run_at") - 100) < 5

    claimed = store.claim_next(CLAIMER, 8, [Probe("q", "k", 0, None, 30.0)])
    assert [one.job.id for one in claimed] == [due_id]
    assert image(later_id)["status"] == "pending"
    assert abs(seconds_ahead(due_id, "lease_expires_at") - 30) < 5
    for column in ("claimed_at", "heartbeat_at", "updated_at"):
        assert abs(seconds_ahead(due_id, column)) < 5
    assert [round(route.due_in, -2) for route in store.routes() if route.kind == "k"] == [100]

    assert {one.id for one in store.orphans(GRACE)} == {orphan_id, asked_id}
    assert store.take_orphan(orphan_on(live_id), grace=GRACE, delay=0) is None
    assert store.redrive(live_id, scope=Scope("acme", "north"), grace=GRACE) is None
    assert store.take_orphan(orphan, grace=GRACE, delay=50) is not None
    assert abs(seconds_ahead(orphan_id, "next_run_at") - 50) < 5
    assert store.cancel_orphan(orphan_on(asked_id), grace=GRACE) is not None

    lease = lease_on(due_id, ttl=45)
    assert store.beat_many(CLAIMER, [lease])[due_id].renewed
    assert abs(seconds_ahead(due_id, "lease_expires_at") - 45) < 5
    assert store.write_checkpoint(lease, "1") is False
    assert abs(seconds_ahead(due_id, "last_committed_at")) < 5
    assert store.request_cancel(due_id, scope=None) == "stamped"
    assert abs(seconds_ahead(due_id, "cancel_requested_at")) < 5
    assert store.yield_slice(lease, 70) is not None
    assert abs(seconds_ahead(due_id, "next_run_at") - 70) < 5
    assert abs((store.now() - datetime.now(UTC)).total_seconds()) < 5


@pytest.mark.parametrize("module", [store, database], ids=lambda module: module.__name__)
def test_no_statement_is_given_a_moment_of_the_worker(module: Any) -> None:
    """T5: the clock of the process is not even read; only its monotonic one is, for waits."""
    calls = [
        ast.unparse(node.func)
        for node in ast.walk(ast.parse(inspect.getsource(module)))
        if isinstance(node, ast.Call)
    ]
    wrong = [call for call in calls if call.endswith((".now", ".utcnow", ".today", "time.time", "time_ns"))]
    assert not wrong


@pytest.mark.parametrize("vendor", ["postgresql", "sqlite"])
def test_no_statement_uses_the_time_at_which_its_transaction_began(vendor: str) -> None:
    """P18, T5: `now()` stands still in a long fence."""
    statements = {name: one for name, one in vars(store).items() if isinstance(one, store.Statement)}
    statements |= {f"claim_next {size}": one for size, one in store._CLAIM_NEXT.items()}
    assert len(statements) > 40
    for name, statement in statements.items():
        sql = statement.sql(vendor).lower()
        if vendor == "postgresql":
            assert " now()" not in sql and "current_timestamp" not in sql, name
        else:
            assert "current_timestamp" not in sql and "datetime('now'" not in sql, name


WAITING = (
    "_LOCK_FENCE", "_YIELD_SLICE", "_GIVE_BACK", "_FAIL_SLICE", "_RELEASE_LEASE", "_COMPLETE",
    "_FAIL_TERMINAL", "_CANCEL_RUNNING", "_SET_PROGRESS", "_WRITE_CHECKPOINT", "_EXTEND", "_RENEW",
    "_SET_PERCENT", "_KEEP_CHECKPOINT", "_COMPLETE_OWNED", "_FAIL_OWNED", "_CANCEL_OWNED",
)  # fmt: skip


def test_what_takes_a_job_from_somebody_never_waits() -> None:
    """P4, P11: every other UPDATE of a job by id skips a locked row, so that no wait cycle holds a job row."""
    # The key is put on a row that the same transaction has just made.
    allowed = (*WAITING, "_SET_DELIVERY", "_SET_IDEMPOTENCY_KEY")
    for name, statement in vars(store).items():
        if not isinstance(statement, store.Statement):
            continue
        sql = statement.sql("postgresql")
        if "UPDATE durable_jobs_job" in sql and name not in allowed:
            assert "SKIP LOCKED" in sql, name
    # Behind a wait, a lease must not be set by the statement that waited.
    for name in WAITING:
        sql = vars(store)[name].sql("postgresql")
        if "make_interval(secs => %(ttl)s" in sql:
            assert re_locks_first(sql), name


def re_locks_first(sql: str) -> bool:
    return "WHERE id = (SELECT id FROM durable_jobs_job WHERE" in sql and "FOR NO KEY UPDATE" in sql


# --- SQLite writes moments as text ------------------------------------------------------------------------------


@pytest.mark.sqlite_only
@pytest.mark.parametrize(
    "moment",
    [
        datetime(2026, 1, 2, 3, 4, 5),
        datetime(2026, 1, 2, 3, 4, 5, 1000),
        datetime(2026, 12, 31, 23, 59, 59, 999000),
        datetime(2026, 1, 1, 0, 0, 0),
        datetime(2026, 1, 2, 3, 4, 5, 120000),
        datetime(2026, 1, 2, 3, 4, 0, 7000),
    ],
    ids=str,
)
@pytest.mark.django_db
def test_a_moment_is_the_text_that_django_would_write(moment: datetime) -> None:
    """Six digits, or none for a whole second: another form of the same instant compares unequal."""
    shape = database._SNIPPETS["sqlite"]["now"].replace("%%", "%").replace("'now'", "?")
    with connection.cursor() as cursor:
        cursor.execute("SELECT 1")
        raw = connection.connection
        ((written,),) = raw.execute(f"SELECT {shape}", [moment.isoformat(sep=" ")]).fetchall()
    aware = moment.replace(tzinfo=UTC)
    assert written == connection.ops.adapt_datetimefield_value(aware) == database._adapt_sqlite(aware)


@pytest.mark.sqlite_only
@pytest.mark.django_db
def test_every_moment_that_a_statement_writes_has_that_form() -> None:
    """What was read back finds its row again, in every column that any statement writes."""
    ids = [make("pending", queue_name="q", kind="k", priority=0) for _ in range(12)]
    for job_id in ids:
        store.claim(job_id, 4, 2, CLAIMER, 30)
        lease = lease_on(job_id, ttl=7.25)
        store.write_checkpoint(lease, "1")
    store.yield_slice(lease_on(ids[0]), 1.5)
    store.fail_terminal(ids[1], lease_on(ids[1]).epoch, parked=True)
    store.complete(lease_on(ids[2]), None)
    store.request_cancel(ids[3], scope=None)
    store.cancel_running(ids[4], lease_on(ids[4]).epoch)
    post_letter(ids[5])
    store.fold_cancel(ids[5])
    store.insert(NewJob(uuid7(), "k", "pending", "t", None, "q", None, None, delay=0.125))
    moments = [f.column for f in Job._meta.concrete_fields if f.get_internal_type() == "DateTimeField"]
    for column in moments:
        for job_id, text in execute(
            f"SELECT id, {column} || '' FROM durable_jobs_job WHERE {column} IS NOT NULL"
        ):
            value = Job.objects.values_list(column, flat=True).get(pk=job_id)
            assert connection.ops.adapt_datetimefield_value(value) == text, column
            assert Job.objects.filter(**{column: value, "pk": job_id}).exists(), column
