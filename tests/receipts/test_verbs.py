"""Complete, finalize, retry: what each of them promises, one promise after the other."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from dataclasses import FrozenInstanceError, replace
from typing import Any

import pytest
from django.db import connection, transaction

from durable_jobs import kinds, receipts, service, signals, store
from durable_jobs.exceptions import (
    DeadlineExceeded,
    InvalidInput,
    LeaseLostError,
    LockKeyHeld,
    NotReclaimable,
    ScopeMismatch,
    TransactionOwned,
)
from durable_jobs.models import Job, JobEvent, Scope, uuid7
from durable_jobs.receipts import (
    AttemptOutcome,
    ExecutionContext,
    Finalized,
    PendingFinalization,
    assert_write_fence,
    complete_atomically,
    finalize_atomically,
    retry_atomically,
)
from durable_jobs.testing import make_job, register_for_test
from tests.connections import OtherConnection
from tests.models import Shipment
from tests.receipts import acts
from tests.receipts.acts import (
    HOME,
    RECEIPT,
    age,
    context,
    ended,
    everything,
    expired,
    job_of,
    owned,
    read,
    ship,
    tamper,
)
from tests.store import rows

pytestmark = pytest.mark.django_db(transaction=True)

FAILED = AttemptOutcome("failed", "no route")
CANCELLED = AttemptOutcome("cancelled", "asked to stop")


def bookkeeping(ctx: ExecutionContext) -> str:
    return ship("kept")


def retain(image: str) -> str:
    Shipment.objects.create(status="lost", note=str(len(image)))
    return RECEIPT


# --- complete -------------------------------------------------------------------------------------------


def test_domain_change_receipt_and_completion_are_one() -> None:
    """A66, A14, A44."""
    ctx = owned()
    before = job_of(ctx)
    given: list[ExecutionContext] = []

    def mutation(passed: ExecutionContext) -> str:
        given.append(passed)
        return ship()

    assert complete_atomically(ctx, mutation) == RECEIPT
    after = job_of(ctx)
    assert given == [ctx]
    assert (after.status, after.result_text, after.progress) == ("completed", RECEIPT, 100.0)
    assert after.result == {"moved": 1.5}
    assert (after.lease_epoch, after.attempts) == (1, 1) and after.finished_at is not None
    assert after.lease_owner is None and after.heartbeat_at >= before.heartbeat_at
    assert [note for _, _, note in acts.shipments()] == ["moved"]
    kept = ("created_at", "started_at", "input_text", "input_sha256", "idempotency_key", "claimed_at")
    assert all(getattr(after, name) == getattr(before, name) for name in kept)
    (event,) = JobEvent.objects.filter(job_id=after.id)
    assert (event.event, event.actor) == ("receipt", "anna")


def test_without_a_fence_nothing_is_completed() -> None:
    """A65."""
    with pytest.raises(LeaseLostError, match="carries no fence"):
        complete_atomically(context(), lambda _: ship())
    assert not acts.shipments()


def test_a_repeat_meets_a_finished_job() -> None:
    """A35, A46: an outcome ends the right to write."""
    ctx = owned()
    complete_atomically(ctx, lambda _: ship())
    before = everything()
    with pytest.raises(LeaseLostError, match="completed"):
        complete_atomically(ctx, lambda _: ship())
    assert isinstance(finalize_atomically(ctx, FAILED, bookkeeping), PendingFinalization)
    assert everything() == before


@pytest.mark.parametrize("place", ["row", "mail"])
def test_a_cancel_requested_before_refuses_the_completion(place: str) -> None:
    """T12, A67: on the row or in the mailbox."""
    ctx = owned()
    if place == "row":
        store.request_cancel(job_of(ctx).id, scope=None)
    else:
        rows.post_letter(job_of(ctx).id)
    before = everything()
    with pytest.raises(LeaseLostError, match="cancel was requested"):
        complete_atomically(ctx, lambda _: ship())
    assert everything() == before


@pytest.mark.postgres_only
def test_a_cancel_requested_inside_the_mutation_refuses_the_completion(
    second_connection: OtherConnection,
) -> None:
    """A67: the row is locked by then, so the request arrives in the mailbox."""
    ctx = owned()
    job_id = job_of(ctx).id

    def mutation(_: ExecutionContext) -> str:
        assert second_connection.run(service.cancel, job_id, scope=HOME).status == "running"
        return ship()

    with pytest.raises(LeaseLostError, match="cancel was requested"):
        complete_atomically(ctx, mutation)
    assert job_of(ctx).status == "running" and not acts.shipments()
    assert len(rows.letters()[job_id]) == 1


@pytest.mark.postgres_only
def test_a_project_of_repeatable_reads_sees_the_cancel_as_well(second_connection: OtherConnection) -> None:
    """A67, P16: the second look must not come from the snapshot of the first."""
    ctx = owned()
    job_id = job_of(ctx).id
    rows.execute("SET SESSION CHARACTERISTICS AS TRANSACTION ISOLATION LEVEL REPEATABLE READ")

    def mutation(_: ExecutionContext) -> str:
        second_connection.run(service.cancel, job_id, scope=HOME)
        return ship()

    try:
        with pytest.raises(LeaseLostError, match="cancel was requested"):
            complete_atomically(ctx, mutation)
    finally:
        connection.close()
    assert not acts.shipments()


def test_a_cancel_after_the_commit_erases_nothing() -> None:
    """A67, A47."""
    ctx = owned()
    complete_atomically(ctx, lambda _: ship())
    before = everything()
    with pytest.raises(Exception, match="completed already"):
        service.cancel(job_of(ctx).id, scope=HOME)
    assert everything() == before


async def coroutine(_: ExecutionContext) -> str:
    return RECEIPT


def generator(_: ExecutionContext) -> Any:
    yield RECEIPT


class Called:
    async def __call__(self, _: ExecutionContext) -> str:
        return RECEIPT


@pytest.mark.parametrize(
    "callback",
    [
        coroutine, generator, Called(), lambda _: coroutine(_), lambda _: None, lambda _: {"moved": 1},
        lambda _: "no json", lambda _: "", lambda _: '{"a": NaN}', lambda _: b"{}", lambda _: '"\\u0000"', 7,
    ],
    ids=["coroutine function", "generator function", "async object", "coroutine", "None", "object", "no JSON",
         "blank", "NaN", "bytes", "NUL", "no function"],
)  # fmt: skip
@pytest.mark.parametrize("verb", ["complete", "finalize", "retry"])
def test_only_a_text_of_json_is_a_receipt(verb: str, callback: Any) -> None:
    """A3, A68: refused and rolled back, whatever the callback did before."""

    def spoiled(*given: Any) -> Any:
        ship()
        return callback(*given)

    plain = callback if callback in (coroutine, generator, 7) or isinstance(callback, Called) else spoiled
    job = ended("failed") if verb == "retry" else None
    ctx = context(job.idempotency_key) if job else owned()
    before = everything()
    if verb == "finalize":
        answer = finalize_atomically(ctx, FAILED, plain)
        assert isinstance(answer, PendingFinalization) and answer.code == "E_JOB_INPUT_INVALID"
    else:
        with pytest.raises(InvalidInput):
            complete_atomically(ctx, plain) if job is None else retry_atomically(job.id, ctx, plain)
    assert everything() == before


@pytest.mark.parametrize(
    "edit",
    ["lease_epoch = lease_epoch + 1, attempts = attempts", "lease_owner = 'me'", "checkpoint = '1', checkpoint_at = created_at",
     "priority = 9", "meta = '{}'", "progress_message = 'x'", "input = '{\"shipment\": 8}'", "heartbeat_at = NULL",
     "cancel_requested_at = created_at", "lease_expires_at = created_at", "organization_id = NULL"],
)  # fmt: skip
@pytest.mark.parametrize("verb", ["complete", "finalize", "retry"])
def test_a_callback_that_edits_the_job_is_refused(verb: str, edit: str) -> None:
    """T23, A69, A77: it grants itself nothing."""
    job = ended("failed") if verb == "retry" else None
    ctx = context(job.idempotency_key) if job else owned()
    job_id = job.id if job else job_of(ctx).id
    if job and edit.startswith(("lease_owner", "lease_epoch")):
        edit = "redrives = redrives + 1"

    def editing(_: Any) -> str:
        rows.execute(f"UPDATE durable_jobs_job SET {edit} WHERE id = %s", job_id)
        return ship()

    before = everything()
    if verb == "finalize":
        answer = finalize_atomically(ctx, FAILED, editing)
        assert isinstance(answer, PendingFinalization) and answer.code == "E_JOB_LEASE_LOST"
    else:
        with pytest.raises(LeaseLostError):
            complete_atomically(ctx, editing) if job is None else retry_atomically(job.id, ctx, editing)
    assert everything() == before


@pytest.mark.parametrize("verb", ["complete", "finalize"])
def test_a_callback_that_lets_the_lease_run_out_is_refused(verb: str) -> None:
    """T23, A66, A69, A72."""
    ctx = owned(lease_seconds=0.15)

    def slow(_: ExecutionContext) -> str:
        time.sleep(0.2)
        return ship()

    before = everything()
    if verb == "complete":
        with pytest.raises(LeaseLostError, match="run out"):
            complete_atomically(ctx, slow)
    else:
        answer = finalize_atomically(ctx, FAILED, slow)
        assert isinstance(answer, PendingFinalization) and "run out" in answer.reason
    assert everything() == before


def test_a_callback_that_ends_the_transaction_itself_is_found_out() -> None:
    """A68: what it committed stays, for callbacks are trusted; the job is not completed for it."""
    ctx = owned()

    def committing(_: ExecutionContext) -> str:
        with connection.cursor() as cursor:
            cursor.execute("COMMIT")
        return RECEIPT

    with pytest.raises(Exception) as refused:
        complete_atomically(ctx, committing)
    assert isinstance(refused.value, TransactionOwned) or "transaction" in str(refused.value)
    connection.close()
    assert job_of(ctx).status == "running"


def test_four_threads_with_one_lease_complete_once() -> None:
    """A34, A35, C11: the lease names an attempt, not a thread."""
    ctx, barrier, answers = owned(), threading.Barrier(4), []

    def complete() -> None:
        try:
            barrier.wait(5)
            answers.append(complete_atomically(ctx, lambda _: ship()))
        except LeaseLostError as error:
            answers.append(error)  # type: ignore[arg-type]
        finally:
            connection.close()

    threads = [threading.Thread(target=complete) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert sorted(type(answer).__name__ for answer in answers) == [*["LeaseLostError"] * 3, "str"]
    assert len(acts.shipments()) == 1


def test_a_callback_that_swallows_a_broken_statement_commits_nothing() -> None:
    """A66: a transaction that can only be rolled back never passes for a commit."""
    ctx = owned()

    def swallowing(_: ExecutionContext) -> str:
        ship()
        try:
            with transaction.atomic(savepoint=False):
                raise ValueError
        except ValueError:
            pass
        return RECEIPT

    before = everything()
    with pytest.raises(transaction.TransactionManagementError):
        complete_atomically(ctx, swallowing)
    assert everything() == before


def test_what_a_callback_raises_comes_out_and_nothing_stays() -> None:
    """A66."""
    ctx = owned()

    def failing(_: ExecutionContext) -> str:
        ship()
        raise ZeroDivisionError

    before = everything()
    with pytest.raises(ZeroDivisionError):
        complete_atomically(ctx, failing)
    assert everything() == before


# --- the fence ------------------------------------------------------------------------------------------


def test_an_authentic_owner_passes_the_fence_with_one_query(django_assert_num_queries: Any) -> None:
    """A36, A37: it reads, opens no transaction and writes nothing."""
    ctx = owned()
    before = everything()
    with transaction.atomic(), django_assert_num_queries(1):
        assert_write_fence(ctx)
    with django_assert_num_queries(1):
        assert_write_fence(ctx)
    assert everything() == before


def test_without_a_fence_only_the_activity_is_checked(django_assert_num_queries: Any) -> None:
    """A37."""
    ctx = context()
    with django_assert_num_queries(0):
        assert_write_fence(ctx)
    ctx.stop.set()
    with pytest.raises(LeaseLostError, match="asked to stop"):
        assert_write_fence(ctx)
    with pytest.raises(DeadlineExceeded):
        assert_write_fence(context(seconds=-1))


@pytest.mark.parametrize(
    ("column", "value"),
    [
        ("lease_owner", "somebody"), ("lease_epoch", 2), ("lease_expires_at", rows.ago(0)),
        ("cancel_requested_at", rows.ago(0)), ("tenant_id", "umbrella"), ("organization_id", None),
        ("organization_id", "south"), ("kind", "tests.other"), ("idempotency_key", "another"),
        ("idempotency_key", None), ("input", '{"shipment": 8}'), ("input", None), ("input_sha256", "0" * 64),
    ],
)  # fmt: skip
def test_the_fence_falls_with_each_of_its_facts(column: str, value: Any) -> None:
    """A36, A34, C10: owner, epoch, expiry, cancel, scope, kind, key, hash, bytes."""
    ctx = owned()
    assert_write_fence(ctx)
    if column == "lease_expires_at":
        age(job_of(ctx).id, 0.001)
    else:
        acts.write(job_of(ctx).id, column, value)
    with transaction.atomic():
        with pytest.raises(LeaseLostError):
            assert_write_fence(ctx)
    before, called = everything(), []
    with pytest.raises(LeaseLostError):
        complete_atomically(ctx, lambda _: called.append(1) or ship())  # type: ignore[func-returns-value]
    assert everything() == before and not called


def test_of_several_faults_the_first_is_told() -> None:
    """A36: its facts are looked at one after the other, so that who lost a lease is not told of what came later."""
    faults = [
        ("input", '{"shipment": 8}', "does not match its hash"),
        ("input_sha256", "0" * 64, "hash of the input is another one"),
        ("kind", "tests.other", "kind"),
        ("cancel_requested_at", rows.ago(0), "a cancel was requested"),
        ("lease_owner", "somebody", "another attempt owns the job"),
    ]
    ctx = owned()
    for column, value, words in faults:
        acts.write(job_of(ctx).id, column, value)
        with pytest.raises(LeaseLostError, match=words):
            complete_atomically(ctx, lambda _: ship())


def test_the_image_that_is_retained_holds_texts_as_they_are() -> None:
    job = ended("failed")
    acts.write(job.id, "progress_message", "vorüber")
    images: list[str] = []
    retry_atomically(job.id, context(job.idempotency_key), lambda image: images.append(image) or RECEIPT)  # type: ignore[func-returns-value]
    assert '"vorüber"' in images[0]


def test_bytes_and_hash_changed_together_are_not_the_captured_ones() -> None:
    """A36: the captured hash decides, not that the row agrees with itself."""
    ctx = owned()
    rows.execute(
        "UPDATE durable_jobs_job SET input = %s, input_sha256 = %s WHERE id = %s",
        "[]", receipts.jsontext.sha256("[]"), job_of(ctx).id,
    )  # fmt: skip
    with pytest.raises(LeaseLostError, match="hash"):
        assert_write_fence(ctx)


@pytest.mark.parametrize("status", ["held", "pending", "failed", "completed", "cancelled", "retrying"])
def test_the_fence_needs_a_running_job(status: str) -> None:
    """A36."""
    ctx = owned()
    assert ctx.fence is not None
    other = make_job(
        status, kind=acts.KIND, scope=HOME, idempotency_key=acts.new_key(), input={"shipment": 7}
    )
    lease = replace(ctx.fence.lease, job_id=other.id, epoch=other.lease_epoch)
    with pytest.raises(LeaseLostError):
        assert_write_fence(
            replace(ctx, fence=replace(ctx.fence, lease=lease), idempotency_key=other.idempotency_key)
        )


@pytest.mark.parametrize("fact", ["database", "alias", "vendor"])
def test_the_fence_knows_its_database(fact: str) -> None:
    """T1, A36: another database with the very same row is another job."""
    ctx = owned()
    assert ctx.fence is not None
    moved = replace(ctx, fence=replace(ctx.fence, **{fact: "elsewhere"}))
    with pytest.raises(LeaseLostError, match="another database"):
        assert_write_fence(moved)
    with pytest.raises(LeaseLostError, match="another database"):
        assert_write_fence(ctx, using="replica")
    with pytest.raises(LeaseLostError):
        complete_atomically(moved, lambda _: ship())
    assert not acts.shipments() and job_of(ctx).status == "running"


def test_a_job_that_is_gone_has_no_fence() -> None:
    """A36, A68: whoever has deleted the row by hand."""
    ctx = owned()
    rows.execute("DELETE FROM durable_jobs_job WHERE id = %s", job_of(ctx).id)
    with pytest.raises(LeaseLostError, match="gone"):
        assert_write_fence(ctx)
    with pytest.raises(LeaseLostError, match="gone"):
        complete_atomically(ctx, lambda _: RECEIPT)


def test_a_temporary_table_does_not_stand_in_for_the_jobs() -> None:
    """A36: read through the real table."""
    ctx = owned()
    job_id = job_of(ctx).id
    with connection.cursor() as cursor:
        cursor.execute("CREATE TEMPORARY TABLE durable_jobs_job AS SELECT * FROM durable_jobs_job")
    try:
        store_now = "main.durable_jobs_job" if connection.vendor == "sqlite" else "public.durable_jobs_job"
        rows.execute(f"UPDATE {store_now} SET lease_epoch = 2 WHERE id = %s", job_id)
        with pytest.raises(LeaseLostError):
            assert_write_fence(ctx)
        with pytest.raises(LeaseLostError):
            complete_atomically(ctx, lambda _: ship())
    finally:
        with connection.cursor() as cursor:
            cursor.execute(
                f"DROP TABLE {'temp' if connection.vendor == 'sqlite' else 'pg_temp'}.durable_jobs_job"
            )
    assert job_of(ctx).status == "running" and not acts.shipments()


@pytest.mark.parametrize("verb", ["complete", "finalize", "retry"])
def test_a_temporary_table_of_the_same_rows_is_not_written_either(verb: str) -> None:
    """A66, A70, A77: the row is verified through the real table before the commit."""
    job = ended("failed") if verb == "retry" else None
    ctx = context(job.idempotency_key) if job else owned()
    before = everything()
    with connection.cursor() as cursor:
        cursor.execute("CREATE TEMPORARY TABLE durable_jobs_job AS SELECT * FROM durable_jobs_job")
    try:
        if verb == "finalize":
            answer = finalize_atomically(ctx, FAILED, bookkeeping)
            assert isinstance(answer, PendingFinalization) and answer.code == "E_JOB_LEASE_LOST"
        else:
            with pytest.raises(LeaseLostError):
                complete_atomically(ctx, lambda _: ship()) if job is None else retry_atomically(
                    job.id, ctx, retain
                )
    finally:
        with connection.cursor() as cursor:
            cursor.execute(
                f"DROP TABLE {'temp' if connection.vendor == 'sqlite' else 'pg_temp'}.durable_jobs_job"
            )
    assert everything() == before


def test_a_context_and_its_fence_are_frozen() -> None:
    """A80, A15."""
    ctx = owned()
    with pytest.raises(FrozenInstanceError):
        ctx.deadline = 1e9  # type: ignore[misc]
    with pytest.raises(FrozenInstanceError):
        ctx.fence.lease.epoch = 9  # type: ignore[misc,union-attr]


# --- finalize -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("outcome", [FAILED, CANCELLED], ids=lambda outcome: outcome.status)
def test_an_outcome_is_recorded_with_its_receipt(outcome: AttemptOutcome) -> None:
    """A70, A71, A43."""
    ctx = owned()
    assert ctx.fence is not None
    store.keep_checkpoint(ctx.fence.lease, '{"at": 3}')
    store.request_cancel(job_of(ctx).id, scope=None)
    answer = finalize_atomically(ctx, outcome, bookkeeping)
    assert isinstance(answer, Finalized), answer
    assert (answer.receipt, answer.deadline_exceeded, answer.cleanup_error) == (RECEIPT, False, None)
    assert 0 <= answer.elapsed < 5
    job = job_of(ctx)
    assert (job.status, job.result_text, job.error_message) == (outcome.status, RECEIPT, outcome.message)
    assert job.checkpoint == {"at": 3}
    assert [note for _, _, note in acts.shipments()] == ["kept"]


@pytest.mark.parametrize("status", ["completed", "running", "pending", "held", "", None, 7])
def test_an_attempt_ends_failed_or_cancelled(status: Any) -> None:
    """A70, A3."""
    ctx = owned()
    before = everything()
    answer = finalize_atomically(ctx, AttemptOutcome(status, "m"), bookkeeping)
    assert isinstance(answer, PendingFinalization) and answer.code == "E_JOB_INPUT_INVALID"
    assert everything() == before


@pytest.mark.parametrize("message", ["", "  ", None, 7, "a\x00"])
def test_an_outcome_has_a_message(message: Any) -> None:
    """A70, A4."""
    ctx = owned()
    before = everything()
    answer = finalize_atomically(ctx, AttemptOutcome("failed", message), bookkeeping)
    assert isinstance(answer, PendingFinalization) and answer.code == "E_JOB_INPUT_INVALID"
    assert everything() == before


class Evil(Exception):
    """Can be neither shown nor asked."""

    def __str__(self) -> str:
        raise RuntimeError

    @property
    def code(self) -> str:
        raise RuntimeError


@pytest.mark.parametrize(
    "error", [ZeroDivisionError(), LeaseLostError(None), LockKeyHeld("k"), BaseException("odd"), Evil()]
)
def test_finalize_never_raises(error: BaseException) -> None:
    """T23, A71, A74: a failure of the bookkeeping does not hide the attempt's own."""
    ctx = owned()
    before = everything()

    def failing(_: ExecutionContext) -> str:
        ship()
        raise error

    answer = finalize_atomically(ctx, FAILED, failing)
    assert isinstance(answer, PendingFinalization) and type(error).__name__ in answer.reason
    assert isinstance(finalize_atomically(None, FAILED, bookkeeping), PendingFinalization)  # type: ignore[arg-type]
    assert isinstance(finalize_atomically(ctx, None, bookkeeping), PendingFinalization)  # type: ignore[arg-type]
    assert isinstance(finalize_atomically(context(), FAILED, bookkeeping), PendingFinalization)
    assert everything() == before


def test_after_a_stop_there_is_bookkeeping_but_no_domain_work() -> None:
    """A72."""
    ctx = owned()
    ctx.stop.set()
    with pytest.raises(LeaseLostError):
        complete_atomically(ctx, lambda _: ship())
    assert not acts.shipments()
    assert isinstance(finalize_atomically(ctx, FAILED, bookkeeping), Finalized)


@pytest.mark.parametrize("outcome", [FAILED, CANCELLED], ids=lambda outcome: outcome.status)
@pytest.mark.parametrize(
    ("column", "value"),
    [("lease_owner", "x"), ("lease_epoch", 2), ("kind", "x"), ("tenant_id", "x"), ("idempotency_key", "x"),
     ("input", "[]"), ("input_sha256", "0" * 64), ("lease_expires_at", rows.ago(1))],
)  # fmt: skip
def test_an_outcome_needs_the_whole_authority(column: str, value: Any, outcome: AttemptOutcome) -> None:
    """A72: that a lease ran out says nothing about the work."""
    ctx = owned()
    ctx.stop.set()
    acts.write(job_of(ctx).id, column, value)
    before = everything()
    answer = finalize_atomically(ctx, outcome, bookkeeping)
    assert isinstance(answer, PendingFinalization) and answer.code == "E_JOB_LEASE_LOST"
    assert everything() == before


def test_a_cancellation_is_requested_or_observed() -> None:
    """A73, A3."""
    ctx = owned()
    before = everything()
    answer = finalize_atomically(ctx, CANCELLED, bookkeeping)
    assert isinstance(answer, PendingFinalization) and answer.code == "E_JOB_INPUT_INVALID"
    assert everything() == before
    ctx.stop.set()
    assert isinstance(finalize_atomically(ctx, CANCELLED, bookkeeping), Finalized)
    assert job_of(ctx).cancel_requested_at is not None
    mailed = owned()
    rows.post_letter(job_of(mailed).id)
    assert isinstance(finalize_atomically(mailed, CANCELLED, bookkeeping), Finalized)
    assert not rows.letters()


def test_past_the_deadline_the_database_is_not_asked(django_assert_num_queries: Any) -> None:
    """A74, A83."""
    ctx = replace(owned(), deadline=time.monotonic() - 0.001)
    before = everything()
    with django_assert_num_queries(0):
        answer = finalize_atomically(ctx, FAILED, bookkeeping)
    assert isinstance(answer, PendingFinalization)
    assert answer.deadline_exceeded and answer.code == "E_JOB_DEADLINE_EXCEEDED"
    with django_assert_num_queries(0), pytest.raises(DeadlineExceeded):
        complete_atomically(ctx, lambda _: ship())
    with django_assert_num_queries(0), pytest.raises(DeadlineExceeded):
        retry_atomically(uuid7(), replace(ctx, fence=None), retain)
    assert everything() == before


# --- retry ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("status", ["failed", "cancelled", "expired"])
def test_a_retry_is_a_new_claim_of_the_same_work(status: str) -> None:
    """T23, A75, A78, A43, A31, C14: only such a restart clears a cancel request."""
    key = acts.new_key()
    job = job_of(expired(key=key)) if status == "expired" else ended(status, key=key)
    acts.write(job.id, "progress", 55)
    rows.post_letter(job.id)
    before = read(job.id)
    lease = retry_atomically(job.id, context(key), retain, lease_seconds=40)
    after = read(job.id)
    assert (after.status, after.lease_owner, after.lease_epoch, after.attempts) == (
        "running",
        lease.owner,
        2,
        2,
    )
    assert (lease.job_id, lease.epoch, lease.ttl) == (job.id, 2, 40.0)
    cleared = ("finished_at", "result_text", "error_message", "error_class", "error_code", "cancel_requested_at",
               "verdict", "parked_at", "domain_mirrored_at")  # fmt: skip
    assert [name for name in cleared if getattr(after, name) is not None] == [] and after.progress == 0
    kept = ("checkpoint_text", "checkpoint_at", "created_at", "started_at", "input_text", "input_sha256",
            "idempotency_key", "processed_count")  # fmt: skip
    assert all(getattr(after, name) == getattr(before, name) for name in kept)
    assert not rows.letters()
    assert after.ownership == "current"
    complete_atomically(context(key).with_fence(lease), lambda _: ship())


def test_the_callback_gets_the_whole_row_as_it_was() -> None:
    """A77, C21: it is in the job's history as well."""
    job = ended("failed")
    seen: list[str] = []
    retry_atomically(job.id, context(job.idempotency_key), lambda image: seen.append(image) or RECEIPT)  # type: ignore[func-returns-value]
    row = json.loads(seen[0])
    assert set(row) == {field.column for field in Job._meta.concrete_fields}
    assert (row["id"], row["status"], row["input"], row["result"]) == (
        str(job.id),
        "failed",
        job.input_text,
        RECEIPT,
    )
    assert row["finished_at"] == job.finished_at.isoformat()
    event = JobEvent.objects.get(job_id=job.id, event="retried")
    assert event.data["before"] == row and event.data["receipt"] == RECEIPT


@pytest.mark.parametrize("status", ["completed", "pending", "held", "running", "retrying"])
def test_nothing_else_is_retried(status: str) -> None:
    """A75, A46, A7: complete, waiting, held and owned work, and work that waits for its own retry."""
    job = make_job(status, kind=acts.KIND, scope=HOME, idempotency_key=acts.new_key())
    before = everything()
    with pytest.raises(NotReclaimable):
        retry_atomically(job.id, context(job.idempotency_key), retain)
    assert everything() == before


@pytest.mark.parametrize("owner", ["", "  ", "x" * 201, 7, "a\x00"])
def test_the_owner_of_a_retry_has_a_name(owner: Any) -> None:
    """A4, A3: refused before any transaction."""
    job = ended("failed")
    before = everything()
    with pytest.raises(InvalidInput, match="owner"):
        retry_atomically(job.id, context(job.idempotency_key), retain, owner=owner)
    assert everything() == before
    assert retry_atomically(job.id, context(job.idempotency_key), retain, owner="me").owner == "me"


@pytest.mark.parametrize("job_id", ["nonsense", "", None, "00000000-0000-0000-0000-000000000000"])
def test_an_unknown_job_is_not_retried(job_id: Any) -> None:
    """A75."""
    with pytest.raises(NotReclaimable):
        retry_atomically(job_id, context(), retain)


def test_a_retry_needs_a_fresh_context() -> None:
    """A76, A3: checked before anything else."""
    ctx = expired()
    with pytest.raises(InvalidInput, match="earlier attempt"):
        retry_atomically("nonsense", ctx, retain)


@pytest.mark.parametrize(
    "foreign",
    [
        {"scope": Scope("acme")},
        {"scope": Scope("umbrella", "north")},
        {"kind": "tests.other"},
        {"key": "another"},
    ],
    ids=["organization", "tenant", "kind", "key"],
)
def test_a_retry_is_held_to_the_jobs_identity(foreign: dict[str, Any]) -> None:
    """A76, A81."""
    job = ended("failed")
    before = everything()
    with pytest.raises(ScopeMismatch):
        retry_atomically(job.id, context(**{"key": job.idempotency_key, **foreign}), retain)
    assert everything() == before


@pytest.mark.parametrize(
    ("spoilt", "refusal"),
    [
        ({"state", "identity", "input", "counters", "capacity"}, NotReclaimable),
        ({"identity", "input", "counters", "capacity"}, ScopeMismatch),
        ({"input", "counters", "capacity"}, "input"),
        ({"counters", "capacity"}, "attempts"),
        ({"capacity"}, "max_running"),
    ],
    ids=["state", "identity", "input", "counters", "capacity"],
)
def test_the_refusals_of_a_retry_have_an_order(spoilt: set[str], refusal: Any) -> None:
    """A76, A32, A62: state, identity, input, counters, capacity."""
    job = ended("failed")
    owned()  # one of the same kind that runs
    if "state" in spoilt:
        rows.execute(
            "UPDATE durable_jobs_job SET status = 'completed', error_class = NULL, error_code = NULL, "
            "error_message = NULL WHERE id = %s",
            job.id,
        )
    if "input" in spoilt:
        tamper(job.id)
    if "counters" in spoilt:
        rows.execute(
            "UPDATE durable_jobs_job SET lease_epoch = %s, attempts = %s WHERE id = %s",
            2**63 - 1,
            2**31 - 1,
            job.id,
        )
    ctx = context("another" if "identity" in spoilt else job.idempotency_key)
    before = everything()
    expected = InvalidInput if isinstance(refusal, str) else refusal
    with pytest.raises(expected) as refused:
        retry_atomically(job.id, ctx, retain, max_running=1)
    if isinstance(refusal, str):
        assert refused.value.field == refusal
    assert everything() == before


def test_what_a_retry_kept_goes_with_it() -> None:
    """A79."""
    job = ended("failed")
    before = everything()

    def failing(image: str) -> str:
        retain(image)
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        retry_atomically(job.id, context(job.idempotency_key), failing)
    assert everything() == before


def test_a_retry_takes_the_lock_key() -> None:
    """C13: or is refused with its holder."""
    job = make_job("failed", kind=acts.KIND, scope=HOME, idempotency_key="k1", lock_key="import:7")
    holder = make_job("running", kind=acts.KIND, scope=HOME, lock_key="import:7")
    before = everything()
    with pytest.raises(LockKeyHeld) as refused:
        retry_atomically(job.id, context("k1"), retain)
    assert refused.value.held_by == holder.id
    assert everything() == before


def test_only_one_of_two_retries_wins(second_connection: OtherConnection) -> None:
    """A79, A64: the other finds the job owned."""
    job = ended("failed")

    def retried() -> Any:
        try:
            return retry_atomically(job.id, context(job.idempotency_key), retain)
        except NotReclaimable as refusal:
            return refusal

    other = second_connection.begin(retried)
    answers = [retried(), other.result(10)]
    assert sorted(type(answer).__name__ for answer in answers) == ["Lease", "NotReclaimable"]
    assert read(job.id).lease_epoch == 2 and len(acts.shipments()) == 1


# --- kinds with hooks -------------------------------------------------------------------------------------


class Repair(kinds.Kind):
    name = acts.KIND
    heard: list[tuple[str, str]] = []
    answer = 1

    def step(self, ctx: Any) -> kinds.Done:
        return kinds.Done()

    def on_transition(self, job: Job) -> Any:
        type(self).heard.append(("ended", job.status))
        ship(job.status)
        return self.answer

    def on_redrive(self, job: Job) -> Any:
        type(self).heard.append(("reopened", job.status))
        return self.answer

    def on_cancel(self, job: Job) -> None:
        type(self).heard.append(("cancelled", job.status))


def test_the_hooks_of_a_registered_kind_take_part() -> None:
    """B85, C13: whoever ends or reopens the job, the project's own row goes along."""
    with register_for_test(Repair):
        Repair.heard.clear()
        complete_atomically(owned(), lambda _: ship())
        job = ended("cancelled")
        retry_atomically(job.id, context(job.idempotency_key), retain)
    assert Repair.heard == [
        ("ended", "completed"), ("cancelled", "cancelled"), ("ended", "cancelled"), ("reopened", "running"),
    ]  # fmt: skip


def test_a_hook_that_does_not_agree_rolls_everything_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """B90."""
    with register_for_test(Repair):
        failed = ended("failed")
        ctx = owned()
        monkeypatch.setattr(Repair, "answer", 0)
        before = everything()
        with pytest.raises(Exception, match="does not agree"):
            complete_atomically(ctx, lambda _: ship())
        assert isinstance(finalize_atomically(ctx, FAILED, bookkeeping), PendingFinalization)
        with pytest.raises(Exception, match="does not agree"):
            retry_atomically(failed.id, context(failed.idempotency_key), retain)
        assert everything() == before


def test_an_end_and_a_new_attempt_are_told_once_they_are_committed() -> None:
    """B185: as whoever else ends or reopens a job; and not at all when it is rolled back."""
    told: list[tuple[str, str]] = []
    names = ("job_completed", "job_failed", "job_cancelled", "job_redriven")
    hearers = {name: lambda job, name=name, **_: told.append((name, job.status)) for name in names}
    for name, hearer in hearers.items():
        getattr(signals, name).connect(hearer)
    try:
        with pytest.raises(ZeroDivisionError):
            complete_atomically(owned(), lambda _: str(1 / 0))
        assert told == []
        complete_atomically(owned(), lambda _: ship())
        job = ended("failed")
        ended("cancelled")
        retry_atomically(job.id, context(job.idempotency_key), retain)
    finally:
        for name, hearer in hearers.items():
            getattr(signals, name).disconnect(hearer)
    assert told == [
        ("job_completed", "completed"), ("job_failed", "failed"), ("job_cancelled", "cancelled"), ("job_redriven", "running"),
    ]  # fmt: skip


# --- borrowed transactions --------------------------------------------------------------------------------


def by_atomic() -> Any:
    return transaction.atomic()


class WithoutAutocommit:
    def __enter__(self) -> None:
        transaction.set_autocommit(False)

    def __exit__(self, *error: Any) -> None:
        transaction.commit()
        transaction.set_autocommit(True)


class WithRawBegin:
    def __enter__(self) -> None:
        with connection.cursor() as cursor:
            cursor.execute("BEGIN")

    def __exit__(self, *error: Any) -> None:
        with connection.cursor() as cursor:
            cursor.execute("COMMIT")


@pytest.mark.parametrize(
    "borrowed", [by_atomic, WithoutAutocommit, WithRawBegin], ids=lambda case: case.__name__
)
def test_a_borrowed_transaction_is_refused_and_stays_usable(borrowed: Callable[[], Any]) -> None:
    """A38, A66, A95: nothing of it is rolled back, and the caller's own row commits."""
    ctx, failed = owned(), ended("failed")
    before, told = everything(), []
    with borrowed():
        Shipment.objects.create(note="the caller's")
        for act in (
            lambda: complete_atomically(ctx, lambda _: ship()),
            lambda: retry_atomically(failed.id, context(failed.idempotency_key), retain),
            lambda: receipts.begin(context(), "{}"),
            lambda: receipts.claim(failed.id, context()),
            lambda: service.candidates(service.CandidateQuery(acts.KIND, "anna", HOME), context()),
        ):
            with pytest.raises(TransactionOwned) as refused:
                act()
            assert refused.value.code == "E_JOB_TRANSACTION_OWNED"
            told.append(str(refused.value).split()[0])
        answer = finalize_atomically(ctx, FAILED, bookkeeping)
        assert isinstance(answer, PendingFinalization) and answer.code == "E_JOB_TRANSACTION_OWNED"
    assert told == ["complete_atomically", "retry_atomically", "begin", "claim", "candidates"]
    assert [note for _, _, note in acts.shipments()] == ["the caller's"]
    assert everything()[0] == before[0]
    complete_atomically(ctx, lambda _: ship())


def test_one_bounded_transaction_at_a_time() -> None:
    """A85: none inside another, not even of ours."""
    ctx, inner = owned(), owned()

    def nested(_: ExecutionContext) -> str:
        return complete_atomically(inner, lambda _: ship())

    before = everything()
    with pytest.raises(TransactionOwned):
        complete_atomically(ctx, nested)
    assert everything() == before


# --- what mutants of the code got away with ----------------------------------------------------------------


@pytest.mark.parametrize(("owner", "epoch"), [("somebody", 1), (None, 2)])
def test_a_fence_is_captured_of_the_rows_own_lease_only(owner: str | None, epoch: int) -> None:
    fence = owned().fence
    assert fence is not None
    with pytest.raises(LeaseLostError, match="another attempt owns the job"):
        receipts.Fence.capture(replace(fence.lease, owner=owner or fence.lease.owner, epoch=epoch))
    assert receipts.Fence.capture(fence.lease) == fence


def test_a_job_under_a_lease_that_holds_is_not_retried() -> None:
    ctx = owned()
    with pytest.raises(NotReclaimable, match="it is running and owned"):
        retry_atomically(job_of(ctx).id, replace(ctx, fence=None), retain)


@pytest.mark.parametrize("full", [{"lease_epoch": 2**63 - 1}, {"attempts": 2**31 - 1}])
def test_counters_that_are_full_are_named(full: dict[str, int]) -> None:
    with pytest.raises(InvalidInput, match="cannot grow any more"):
        receipts.require_counters(Job(**{"lease_epoch": 1, "attempts": 1, **full}))
    receipts.require_counters(
        Job(**{"lease_epoch": 1, "attempts": 1, **{name: n - 1 for name, n in full.items()}})
    )


def test_held_work_whose_input_was_changed_is_refused_with_what_is_wrong() -> None:
    job = receipts.defer(acts.KIND, receipts.Submission("held", "{}"), scope=HOME)
    acts.tamper(job.id)
    with pytest.raises(NotReclaimable, match="do not match"):
        receipts.claim(job.id, context("held"))


def test_deferred_work_is_announced() -> None:
    heard: list[Any] = []
    signals.job_created.connect(receiver := lambda job, **_: heard.append(job.id))
    try:
        job = receipts.defer(acts.KIND, receipts.Submission("held", "{}"), scope=HOME)
    finally:
        signals.job_created.disconnect(receiver)
    assert heard == [job.id]
