"""What `insert` and `insert_many` write, and what they answer when a key is taken."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from django.db import DatabaseError, IntegrityError, connection, transaction
from django.db.models.signals import post_init

from durable_jobs import store
from durable_jobs.jsontext import encode, sha256
from durable_jobs.models import Job, Scope, uuid7
from durable_jobs.store import NewJob
from tests.store.rows import ago, ahead, as_columns, execute, image, make, stored, user

pytestmark = pytest.mark.django_db

TEXTS = (
    '{"a":1}',
    '{"a": 1}',
    "null",
    '"naïve Straße \U0001f980 漢字 \\" \\\\ / \\u2028"',
    '"\u2028\u2029\ufeff\uffff\U0010ffff\x7f"',
    '[1e400,-0.0,12345678901234567890]',
    '"%s %(name)s :name {now} \'quoted\' $1"',
    "\n{ }\t",
)  # fmt: skip


def new(**changes: Any) -> NewJob:
    text = changes.pop("input", '{"n":1}')
    plain = NewJob(uuid7(), "tests.work", "pending", "acme", "north", "queue", text, text and sha256(text))
    return replace(plain, **changes)


def through_one(job: NewJob) -> Job | None:
    return store.insert(job)


def through_many(job: NewJob) -> Job | None:
    return store.insert_many([job]).get(job.id)


both_ways = pytest.mark.parametrize("insert", [through_one, through_many], ids=["insert", "insert_many"])


@both_ways
def test_a_started_job_waits(insert: Any) -> None:
    """B22, B10, B11: pending since now, due now, no lease, all counters at nought."""
    job = insert(new(priority=7, meta='{"for": "x"}', created_by=user("ann"), progress_job_id=uuid7()))
    assert job.status == "pending"
    for moment in (job.created_at, job.updated_at, job.pending_since, job.next_run_at):
        assert abs(moment - ago(0)) < timedelta(seconds=5)
    counters = (
        "lease_epoch", "attempts", "continuation_seq", "redrives", "redrives_since_commit",
        "lost_deliveries", "consecutive_failures", "interruptions", "mirror_attempts", "processed_count",
        "processed_at_claim",
    )  # fmt: skip
    assert {getattr(job, name) for name in counters} == {0}
    unset = (
        "lease_owner", "lease_expires_at", "heartbeat_at", "claimed_at", "started_at", "finished_at",
        "parked_at", "verdict", "cancel_requested_at", "checkpoint_text", "result_text", "total_count",
        "last_committed_at", "error_class", "domain_mirrored_at", "queue_job_id", "cancelled_by_id",
    )  # fmt: skip
    assert {getattr(job, name) for name in unset} == {None}
    assert (job.priority, job.meta, job.created_by_id) == (7, {"for": "x"}, user("ann"))
    assert as_columns(job) == image(job.id)


@both_ways
@pytest.mark.parametrize("text", TEXTS, ids=range(len(TEXTS)))
def test_an_input_is_stored_byte_for_byte(insert: Any, text: str) -> None:
    """A10, A18, T19: what is hashed is what is stored, in either way in."""
    job = insert(new(input=text))
    ((stored, hashed),) = execute("SELECT input, input_sha256 FROM durable_jobs_job")
    assert stored == text == job.input_text
    assert hashed == sha256(stored)


@both_ways
def test_the_same_in_every_way(insert: Any) -> None:
    """One statement and the other write the same columns."""
    whole = new(
        idempotency_key="once", lock_key="ledger", subject_type="auth.group", subject_id="4",
        progress_job_id=uuid7(), meta=encode({"for": "ß"}, field="meta", limit=99), created_by=user("ann"),
        run_at=datetime(2030, 1, 2, 3, 4, 5, 678901, tzinfo=UTC), priority=-100, organization=None,
    )  # fmt: skip
    job = insert(whole)
    assert job.next_run_at == whole.run_at
    assert job.progress_job_id == whole.progress_job_id
    assert (job.idempotency_key, job.lock_key, job.subject_type, job.subject_id) == (
        "once", "ledger", "auth.group", "4",
    )  # fmt: skip
    assert (job.priority, job.organization_id, job.meta) == (-100, None, {"for": "ß"})
    assert as_columns(job) == image(job.id)


@both_ways
def test_a_job_without_input_has_no_hash(insert: Any) -> None:
    job = insert(new(input=None))
    assert (job.input_text, job.input_sha256) == (None, None)


@both_ways
def test_a_held_job_is_not_due(insert: Any) -> None:
    job = insert(new(status="held", delay=3))
    assert (job.status, job.next_run_at, job.pending_since) == ("held", None, None)


@both_ways
@pytest.mark.parametrize("delay", [0.25, 90.0, 366 * 86400.0])
def test_a_delay_is_counted_by_the_database(insert: Any, delay: float) -> None:
    job = insert(new(delay=delay))
    assert abs(job.next_run_at - ahead(delay)) < timedelta(seconds=5)
    assert abs(job.pending_since - ago(0)) < timedelta(seconds=5)


@both_ways
def test_the_moment_wins_over_the_delay(insert: Any) -> None:
    for moment in (
        datetime(2031, 1, 1, tzinfo=UTC),
        datetime(2031, 1, 1, 2, 3, 4, 5, tzinfo=UTC),
        datetime(2031, 7, 1, 1, 2, 3, tzinfo=UTC).astimezone(),
    ):
        assert insert(new(run_at=moment, delay=9)).next_run_at == moment


@both_ways
@pytest.mark.parametrize("key", ["idempotency_key", "lock_key"])
def test_a_taken_key_inserts_nothing(insert: Any, key: str) -> None:
    """B25: answered with nothing, in a transaction that stays usable; who holds the key is then looked up."""
    first = insert(new(**{key: "k"}))
    with transaction.atomic():
        assert insert(new(**{key: "k"})) is None
        assert Job.objects.count() == 1
        assert insert(new(**{key: "other"})) is not None
        assert insert(new(**{key: "k"}, organization=None)) is not None
        assert insert(new(**{key: "k"}, tenant="umbrella")) is not None
    if key == "lock_key":
        holder = store.by_lock_key("k", Scope("acme", "north"))
    else:
        holder = store.by_idempotency_key("tests.work", "k", Scope("acme", "north"))
        assert store.by_idempotency_key("tests.other", "k", Scope("acme", "north")) is None
    assert holder is not None and holder.id == first.id


@both_ways
def test_the_same_id_twice_inserts_nothing(insert: Any) -> None:
    """B28: explained by neither key; the caller sees that and raises."""
    job = new()
    assert insert(job) is not None
    assert insert(job) is None


@both_ways
def test_a_key_comes_back_after_the_end(insert: Any) -> None:
    """B35: a lock key is free again, an idempotency key never."""
    for base in ("completed", "failed", "parked"):
        make(base, lock_key="ledger", idempotency_key=f"once {base}")
        job = insert(new(lock_key="ledger"))
        assert job is not None
        assert insert(new(idempotency_key=f"once {base}")) is None
        execute("DELETE FROM durable_jobs_job WHERE id = %s", job.id)


@both_ways
def test_a_rolled_back_start_leaves_nothing(insert: Any) -> None:
    """B29: job and domain row are committed or vanish together."""
    with pytest.raises(ZeroDivisionError), transaction.atomic():
        assert insert(new()) is not None
        raise ZeroDivisionError
    assert not Job.objects.exists()


def test_many_are_answered_one_by_one() -> None:
    """C044: each row its own answer; keys that meet each other within one call count as taken."""
    first = new(idempotency_key="a")
    rows = [
        first,
        new(idempotency_key="a"),
        new(idempotency_key="b"),
        new(),
        new(lock_key="l"),
        new(lock_key="l"),
    ]
    made = store.insert_many(rows)
    assert [row.id in made for row in rows] == [True, False, True, True, True, False]
    again = store.insert_many([new(idempotency_key=key) for key in "abc"])
    assert [job.idempotency_key for job in again.values()] == ["c"]


def test_many_may_be_none_or_very_many() -> None:
    assert store.insert_many([]) == {}
    rows = [new(idempotency_key=f"{number:05}") for number in range(1200)]
    assert store.insert_many(rows).keys() == {row.id for row in rows}


def varied() -> list[NewJob]:
    ann, moment = user("ann"), datetime(2031, 1, 2, 3, 4, 5, 678901, tzinfo=UTC)
    return [
        new(),
        new(meta='{"a":1.0,"b":1e16}', priority=3),
        new(status="held", created_by=ann, lock_key="l"),
        new(run_at=moment, delay=9, tenant="umbrella"),
        new(run_at=datetime(2031, 1, 2, tzinfo=UTC), organization=None),
        new(delay=90.25, subject_type="auth.group", subject_id="4", progress_job_id=uuid7()),
        new(kind="tests.other", queue="other", idempotency_key="once"),
        new(input=None, created_by=ann),
    ]


@pytest.mark.parametrize("watched", [False, True], ids=["alone", "watched"])
@pytest.mark.parametrize("alike", [False, True], ids=["varied", "alike"])
def test_what_is_answered_is_what_the_rows_hold(watched: bool, alike: bool) -> None:
    """Only what the database decides is read back; the rest is known, whatever the rows have in common."""
    rows = [new(meta='{"a":[1.0]}', priority=-3, delay=7) for _ in range(3)] if alike else varied()
    seen: list[Any] = []

    def see(sender: Any, instance: Any, **more: Any) -> None:
        seen.append(instance.id)

    if watched:
        post_init.connect(see, sender=Job)
    try:
        answered = {**store.insert_many(rows[1:]), rows[0].id: through_one(rows[0])}
    finally:
        post_init.disconnect(see, sender=Job)
    assert sorted(seen) == (sorted(answered) if watched else [])
    assert answered.keys() == {row.id for row in rows}
    for job_id, job in answered.items():
        read = store.get(job_id)
        assert read is not None and job is not None
        attributes = {name: value for name, value in vars(job).items() if name != "_state"}
        assert attributes == {name: value for name, value in vars(read).items() if name != "_state"}
        assert {name: type(value) for name, value in attributes.items()} == {
            name: type(getattr(read, name)) for name in attributes
        }
        assert (job._state.adding, job._state.db) == (read._state.adding, read._state.db)


def test_many_come_due_in_their_order() -> None:
    """Jobs of one priority that were started together are not shuffled."""
    rows = [new() for _ in range(20)]
    made = store.insert_many(rows)
    due = [made[row.id].next_run_at for row in rows]
    assert due == sorted(due)
    if connection.vendor == "postgresql":
        assert len(set(due)) == len(due)
    assert max(due) <= store.now()


PIPELINED = 1
"""What libpq calls PQ_PIPELINE_ON."""


@pytest.mark.postgres_only
@pytest.mark.parametrize(
    ("pipeline", "watched", "expected"), [(True, False, True), (False, False, False), (True, True, False)]
)
def test_what_follows_is_made_ready_while_the_server_inserts(
    pipeline: bool, watched: bool, expected: bool, settings: Any, transactional_db: None
) -> None:
    """Whoever watches statements sees each of them end before anything else is done."""
    settings.DURABLE_JOBS = {"PIPELINE": pipeline}
    seen: list[bool] = []

    def following() -> Iterator[NewJob]:
        seen.append(connection.connection.pgconn.pipeline_status == PIPELINED)
        yield new()

    first, second = store.NewJobs([new(), new()]), store.NewJobs(following())
    with connection.execute_wrapper(lambda execute, *given: execute(*given)) if watched else nullcontext():
        assert len(store.insert_many(first, second)) == 2
        assert seen == [expected]
        assert len(store.insert_many(second)) == 1
    assert Job.objects.count() == 3
    assert not connection.in_atomic_block and connection.get_autocommit()


@pytest.mark.parametrize("pipeline", [True, False], ids=["pipeline", "none"])
@pytest.mark.parametrize("together", [True, False], ids=["in a transaction", "alone"])
def test_rows_that_the_table_refuses_leave_nothing_and_a_connection_that_works(
    together: bool, pipeline: bool, settings: Any, transactional_db: None
) -> None:
    settings.DURABLE_JOBS = {"PIPELINE": pipeline}
    following = store.NewJobs([new()])
    for wrong, error in ((new(input_sha256="0" * 63), IntegrityError), (new(priority=10**6), DatabaseError)):
        with pytest.raises(error), transaction.atomic() if together else nullcontext():
            store.insert_many(store.NewJobs([new(), wrong]), following)
        assert not Job.objects.exists()
    assert len(store.insert_many(following)) == 1


def test_a_job_without_a_key_is_given_one_once() -> None:
    first, second = new(lock_key="a"), new(lock_key="b")
    for one in (first, second):
        assert store.insert(one) is not None
    before = stored()
    assert not store.set_idempotency_key(uuid7(), "key")
    assert store.set_idempotency_key(first.id, "key")
    assert not store.set_idempotency_key(first.id, "another"), "it has one"
    assert not store.set_idempotency_key(second.id, "key"), "another job has it"
    job = store.get(first.id)
    assert job is not None and (job.idempotency_key, job.status) == ("key", "pending")
    assert stored()[second.id] == before[second.id]
