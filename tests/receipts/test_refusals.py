"""What exactly a verb refuses, at which point, and in which words: each of its checks alone, by what it rests on."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from functools import partial
from typing import Any
from uuid import UUID

import pytest

from durable_jobs import kinds, receipts, store
from durable_jobs.exceptions import (
    DeadlineExceeded,
    IdempotencyConflict,
    InvalidInput,
    LeaseLostError,
    LockKeyHeld,
    NotReclaimable,
)
from durable_jobs.jsontext import sha256
from durable_jobs.models import Job, Scope, note_diagnostic
from durable_jobs.receipts import (
    AttemptOutcome,
    ExecutionContext,
    PendingFinalization,
    Submission,
    complete_atomically,
    finalize_atomically,
    retry_atomically,
)
from durable_jobs.testing import make_job, register_for_test
from tests.receipts import acts
from tests.receipts.acts import HOME, RECEIPT, age, ended, everything, expired, job_of, ship
from tests.store import rows

pytestmark = pytest.mark.django_db(transaction=True)

context = partial(acts.context, seconds=120)
owned = partial(acts.owned, seconds=120, lease_seconds=120)
FAILED = AttemptOutcome("failed", "no route")


class Watched(kinds.Kind):
    """Its hooks do what a test tells them, in the transaction that ends or reopens a job."""

    name = acts.KIND
    act: Callable[[Job], object] = staticmethod(lambda job: None)

    def step(self, ctx: Any) -> kinds.Done:
        return kinds.Done()

    def on_transition(self, job: Job) -> int:
        type(self).act(job)
        return 1

    def on_redrive(self, job: Job) -> int:
        type(self).act(job)
        return 1


@contextmanager
def hooks(act: Callable[[Job], object]) -> Iterator[None]:
    Watched.act = staticmethod(act)
    with register_for_test(Watched):
        yield


def set_columns(columns: str) -> Callable[[Job], object]:
    return lambda job: rows.execute(f"UPDATE durable_jobs_job SET {columns} WHERE id = %s", job.id)


def reason_of(act: Callable[[], object]) -> str:
    with pytest.raises(LeaseLostError) as refused:
        act()
    return refused.value.reason


# --- the last look at the row -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "edit",
    ["lease_epoch = lease_epoch + 1", "result = '1'", "error_message = 'another'", f"input_sha256 = '{'0' * 64}'"],
)  # fmt: skip
def test_a_hook_that_changes_what_is_about_to_be_committed_is_refused(edit: str) -> None:
    """T23, A69: the row is read once more, last of all."""
    ctx = owned()
    before = everything()
    with hooks(set_columns(edit)):
        if not edit.startswith("error"):  # the table lets no completed job have one
            refused = reason_of(lambda: complete_atomically(ctx, lambda _: ship()))
            assert refused == "the row does not hold the outcome"
        answer = finalize_atomically(ctx, FAILED, lambda _: ship())
    assert isinstance(answer, PendingFinalization) and "does not hold the outcome" in answer.reason
    assert everything() == before


def test_a_cancel_that_comes_with_the_hooks_refuses_a_completion_and_no_outcome() -> None:
    """A67: before the commit it counts, however late."""
    ctx = owned()
    rows.user("by-mail")
    before = everything()
    with hooks(lambda job: rows.post_letter(job.id)):
        assert reason_of(lambda: complete_atomically(ctx, lambda _: ship())) == "a cancel was requested"
        assert everything() == before
        assert isinstance(finalize_atomically(ctx, FAILED, lambda _: ship()), receipts.Finalized)


def test_a_cancel_that_comes_with_the_mutation_is_named() -> None:
    ctx = owned()

    def mutation(_: ExecutionContext) -> str:
        rows.post_letter(job_of(ctx).id)
        return ship()

    before = everything()
    assert reason_of(lambda: complete_atomically(ctx, mutation)) == "a cancel was requested"
    assert everything() == before


@pytest.mark.parametrize(
    "edit",
    ["cancel_requested_at = created_at", "lease_owner = 'x'", "lease_epoch = lease_epoch + 1",
     "lease_expires_at = created_at"],
)  # fmt: skip
def test_a_hook_that_takes_the_new_attempt_away_is_refused(edit: str) -> None:
    """A77: what is answered is a lease that the row carries."""
    job = ended("failed")
    before = everything()
    with hooks(set_columns(edit)):
        refused = reason_of(
            lambda: retry_atomically(job.id, context(job.idempotency_key), lambda image: ship())
        )
    assert refused == "the new attempt is not the row's"
    assert everything() == before


@pytest.mark.parametrize("verb", ["complete", "finalize"])
def test_a_lease_that_runs_out_at_the_last_moment_is_named(
    verb: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """T23, A72: between the last check and the write, the write itself refuses."""
    ctx = owned()
    name = "complete_owned" if verb == "complete" else "fail_owned"
    write = getattr(store, name)

    def late(*arguments: Any, **options: Any) -> Any:
        age(job_of(ctx).id)
        return write(*arguments, **options)

    before = everything()
    monkeypatch.setattr(store, name, late)
    if verb == "complete":
        refused = reason_of(lambda: complete_atomically(ctx, lambda _: ship()))
        assert refused == "it ran out, or a cancel was requested"
    else:
        answer = finalize_atomically(ctx, FAILED, lambda _: ship())
        assert isinstance(answer, PendingFinalization)
        assert answer.code == "E_JOB_LEASE_LOST" and "(it ran out)" in answer.reason
    assert everything() == before


# --- whoever was asked to stop ----------------------------------------------------------------------------


@pytest.mark.parametrize("verb", ["complete", "retry"])
def test_after_a_stop_in_the_callback_no_hook_runs(verb: str) -> None:
    """A72: no more work of the project's than was under way."""
    heard: list[UUID] = []
    job = ended("failed") if verb == "retry" else None
    ctx = context(job.idempotency_key) if job else owned()

    def stopping(_: Any) -> str:
        ctx.stop.set()
        return ship()

    before = everything()
    with hooks(lambda job: heard.append(job.id)):
        refused = reason_of(
            lambda: retry_atomically(job.id, ctx, stopping) if job else complete_atomically(ctx, stopping)
        )
    assert refused == "the caller was asked to stop"
    assert heard == [] and everything() == before


@pytest.mark.parametrize("verb", ["complete", "retry"])
def test_after_a_stop_neither_the_database_nor_the_callback_is_asked(
    verb: str, django_assert_num_queries: Any
) -> None:
    job = ended("failed") if verb == "retry" else None
    ctx = context(job.idempotency_key) if job else owned()
    ctx.stop.set()
    called: list[object] = []

    def callback(given: object) -> str:
        called.append(given)
        return RECEIPT

    with django_assert_num_queries(0):
        refused = reason_of(
            lambda: retry_atomically(job.id, ctx, callback) if job else complete_atomically(ctx, callback)
        )
    assert (refused, called) == ("the caller was asked to stop", [])


@pytest.mark.parametrize("act", ["begin", "defer", "claim"])
def test_a_context_that_is_over_is_told_so_before_anything_else(act: str) -> None:
    """A81: whose work it is, and whether it may run, is asked of a context that works."""
    over = replace(context("key"), deadline=0.0)
    theirs = Scope("somebody else")
    before = everything()
    with pytest.raises(DeadlineExceeded):
        if act == "begin":
            receipts.insert(
                acts.KIND, Submission("key", "{}"), scope=theirs, owner="o", lease_seconds=30, ctx=over
            )
        elif act == "defer":
            receipts.defer(acts.KIND, Submission("key", "{}"), scope=theirs, ctx=over)
        else:
            receipts.claim(make_job("held").id, over)
    assert act == "claim" or everything() == before


def test_a_context_is_a_value_and_what_was_read_with_it_is_no_part_of_that() -> None:
    one = context("key")
    same = ExecutionContext(one.scope, one.actor, one.kind, "key", one.deadline, one.stop)
    one.consume(items=5)
    assert one == same and "_used" not in repr(one)


def test_a_coroutine_that_a_callback_returns_is_closed() -> None:
    """It will never be awaited, and nobody is to be warned of that later."""

    async def later() -> str:
        return RECEIPT

    made = later()
    with pytest.raises(InvalidInput):
        complete_atomically(owned(), lambda _: made)  # type: ignore[arg-type,return-value]
    assert inspect.getcoroutinestate(made) == inspect.CORO_CLOSED


# --- claims by hand ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("status", "words"),
    [("running", "it is running and owned"), ("completed", "it is completed"), ("failed", "it is failed"),
     ("pending", "it is pending"), ("retrying", "it is running"), ("cancelled", "it is cancelled")],
)  # fmt: skip
def test_who_may_not_take_a_job_is_told_what_it_is(status: str, words: str) -> None:
    """A62: in words that tell a job that runs from one that only ran."""
    job = make_job(status, scope=HOME)  # type: ignore[arg-type]
    before = everything()
    with pytest.raises(NotReclaimable) as refused:
        receipts.take(job.id, scope=HOME, owner="me", lease_seconds=30)
    assert refused.value.reason == words
    assert everything() == before


def test_the_holder_of_a_lock_key_is_named() -> None:
    job = ended("failed")
    acts.write(job.id, "lock_key", "ledger")
    holder = make_job("pending", scope=HOME, lock_key="ledger")
    with pytest.raises(LockKeyHeld) as refused:
        retry_atomically(job.id, context(job.idempotency_key), lambda image: RECEIPT)
    assert (refused.value.lock_key, refused.value.held_by) == ("ledger", holder.id)


def test_what_this_process_failed_to_tidy_up_keeps_nobody_from_taking_the_job_over() -> None:
    """A56: a diagnostic of work that runs tells about the writing of it, not about the work."""
    ctx = expired()
    job = job_of(ctx)
    note_diagnostic(job.id, "Committed, but the connection's policy could not be restored.")
    assert receipts.claim(job.id, replace(ctx, fence=None)).fence is not None


@pytest.mark.parametrize(
    "columns", [{"input": '{"shipment": 8}'}, {"input_sha256": sha256('{"shipment": 8}')}], ids=["bytes", "hash"]
)  # fmt: skip
def test_a_repeat_is_known_by_its_bytes_and_by_their_hash(columns: dict[str, str]) -> None:
    """A11, A52: a row in which one of them was changed is no repeat of anything."""
    ctx = owned()
    assert receipts.begin(replace(ctx, fence=None), acts.INPUT).ctx is None
    for name, value in columns.items():
        acts.write(job_of(ctx).id, name, value)
    with pytest.raises(IdempotencyConflict) as refused:
        receipts.begin(replace(ctx, fence=None), acts.INPUT)
    assert refused.value.code == "E_JOB_IDEMPOTENCY_CONFLICT"


# --- how long something was held --------------------------------------------------------------------------


def test_the_seconds_that_a_job_was_held_are_exact_and_never_negative() -> None:
    job = job_of(owned())
    assert job.claimed_at is not None
    for seconds, told in ((0.25, 0.25), (-5.0, 0.0), (7.0, 7.0)):
        job.updated_at = job.claimed_at + timedelta(seconds=seconds)
        assert store.seconds_held(job) == told
    assert store.seconds_held(job, until=job.claimed_at) == 0.0
    job.claimed_at = None
    assert store.seconds_held(job) is None
