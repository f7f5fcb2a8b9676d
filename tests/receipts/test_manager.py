"""The manager in this process: what its executors are given, and what becomes of their jobs."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import FrozenInstanceError, fields
from typing import Any
from uuid import UUID

import pytest
from django.db import OperationalError, connection, transaction

from durable_jobs import lifecycle, receipts, service, store
from durable_jobs.exceptions import (
    IdempotencyConflict,
    InvalidInput,
    LeaseLostError,
    NotReclaimable,
    TransactionOwned,
)
from durable_jobs.manager import Aborted, ExecutorContext, JobManager, Submission
from durable_jobs.models import Job, JobEvent, Scope, uuid7
from durable_jobs.testing import make_job
from tests.connections import OtherConnection
from tests.postgres import wait_until
from tests.processes import Processes
from tests.receipts import acts
from tests.receipts.acts import HOME, age, everything, read, ship, tamper
from tests.store import rows

pytestmark = pytest.mark.django_db(transaction=True)

KIND = "reports.rebuild"
SUBMISSION = Submission("march", '{"month": 3}')


class Work:
    """An executor that waits until it is told to go on."""

    def __init__(self, end: Callable[[ExecutorContext], Any] = lambda ctx: None) -> None:
        self.begun, self.go, self.end = threading.Event(), threading.Event(), end
        self.ctx: ExecutorContext | None = None
        self.calls = 0

    def __call__(self, ctx: ExecutorContext) -> Any:
        self.calls += 1
        self.ctx = ctx
        self.begun.set()
        assert self.go.wait(20)
        return self.end(ctx)


@pytest.fixture
def managers() -> Iterator[Callable[..., JobManager]]:
    """Makes managers; their executors have ended, their threads are gone, when the test is over."""
    made: list[JobManager] = []

    def make(scope: Scope = HOME, actor: str = "anna", **given: Any) -> JobManager:
        made.append(JobManager(scope, actor, **{"lease_seconds": 10.0, **given}))
        return made[-1]

    yield make
    for manager in made:
        for run in list(manager._runs.values()):
            run.stop.set()
        wait_until(lambda manager=manager: not manager._runs, 20, "executors left")
        manager._wake.set()
        if (beats := manager._beats) is not None:
            beats.join(5)


def status_of(job_id: UUID) -> str:
    return read(job_id).status


def settled(manager: JobManager, job_id: UUID) -> Job:
    """The job, once its executor is gone."""
    wait_until(lambda: job_id not in manager._runs, 20, "the executor is still there")
    job = manager.get_job(job_id)
    assert job is not None
    return job


def run(
    manager: JobManager, end: Callable[[ExecutorContext], Any], submission: Submission | None = None
) -> Job:
    work = Work(end)
    job_id = manager.start_job(KIND, work, submission)
    assert work.begun.wait(10)
    work.go.set()
    return settled(manager, job_id)


# --- opening ----------------------------------------------------------------------------------------------


def test_opening_a_manager_changes_nothing(managers: Any, django_assert_num_queries: Any) -> None:
    """A28: also beside one that works, and beside what a dead one has left."""
    running, dead = Work(), acts.expired()
    one = managers()
    job_id = one.start_job(KIND, running)
    assert running.begun.wait(10)
    before = everything()
    with django_assert_num_queries(0):
        other = managers()
    assert everything() == before
    assert other.list_jobs() and other.get_job(job_id) and everything() == before
    assert acts.job_of(dead).ownership == "expired"
    running.go.set()
    assert settled(one, job_id).status == "completed"


def test_each_manager_is_an_owner_of_its_own(managers: Any) -> None:
    """A29, A12: the actor is a label and proves nothing."""
    one, other = managers(actor="anna"), managers(actor="anna")
    assert one.owner != other.owner
    work = Work()
    job_id = one.start_job(KIND, work)
    with pytest.raises(LeaseLostError):
        other.update_progress(job_id, 10)
    work.go.set()
    settled(one, job_id)


@pytest.mark.parametrize(
    "wrong",
    [{"lease_seconds": 0}, {"lease_seconds": -1}, {"lease_seconds": "x"}, {"max_jobs": 0}, {"max_jobs": "2"},
     {"max_jobs": 1.5}, {"scope": "acme"}, {"scope": Scope(" ")}, {"actor": "  "}, {"actor": 7}],
)  # fmt: skip
def test_a_manager_of_nonsense_is_refused(wrong: dict[str, Any]) -> None:
    """A27, A62, A4."""
    with pytest.raises(InvalidInput):
        JobManager(**wrong)


def test_the_defaults() -> None:
    """C7, A98."""
    manager = JobManager()
    assert (manager.scope, manager.lease_seconds, manager.max_jobs) == (Scope(), 30.0, 10)


# --- starting ---------------------------------------------------------------------------------------------


def test_a_job_runs_and_its_result_is_kept(managers: Any) -> None:
    """A98, A102, A15, A44."""
    seen: list[Job] = []
    manager = managers()
    job = run(manager, lambda ctx: seen.append(read(ctx.lease.job_id)) or {"rows": 3}, SUBMISSION)  # type: ignore[func-returns-value]
    assert (seen[0].status, seen[0].lease_owner, seen[0].queue_name) == ("running", manager.owner, "manual")
    assert (job.status, job.result, job.progress, job.diagnostic) == ("completed", {"rows": 3}, 100.0, None)
    assert (job.kind, job.idempotency_key, job.input) == (KIND, "march", {"month": 3})
    assert run(manager, lambda ctx: None).result_text is None


def test_coroutines_run_too(managers: Any) -> None:
    """A98."""

    async def work(ctx: ExecutorContext) -> str:
        return "done"

    manager = managers()
    assert settled(manager, manager.start_job(KIND, work)).result == "done"


def test_a_repeat_starts_nothing(managers: Any) -> None:
    """A98, A16, T20: while it runs, and after."""
    manager, work = managers(), Work()
    job_id = manager.start_job(KIND, work, SUBMISSION)
    other = managers()
    assert other.start_job(KIND, work, SUBMISSION) == job_id == manager.start_job(KIND, work, SUBMISSION)
    work.go.set()
    settled(manager, job_id)
    assert manager.start_job(KIND, work, SUBMISSION) == job_id
    assert work.calls == 1
    with pytest.raises(IdempotencyConflict):
        manager.start_job(KIND, work, Submission("march", '{"month":3}'))


def test_an_earlier_job_that_cannot_be_read_is_a_lost_lease(
    managers: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A98."""
    manager = managers()
    manager.defer_job(KIND, SUBMISSION)
    monkeypatch.setattr(service, "get", lambda *given, **named: None)
    with pytest.raises(LeaseLostError, match="cannot be read"):
        manager.start_job(KIND, lambda ctx: None, SUBMISSION)


def test_what_cannot_be_called_starts_nothing(managers: Any) -> None:
    """A27."""
    manager = managers()
    held = manager.defer_job(KIND, SUBMISSION)
    with pytest.raises(InvalidInput, match="executor"):
        manager.start_job(KIND, "work")
    with pytest.raises(InvalidInput, match="executor"):
        manager.resume_job(held, None)
    assert [job.status for job in manager.list_jobs()] == ["held"]


def test_no_more_than_max_jobs(managers: Any) -> None:
    """A98, A62, A63: across managers of the scope; workers' jobs have limits of their own."""
    make_job("running", scope=HOME)
    works, manager = [Work(), Work()], managers(max_jobs=2)
    ids = [manager.start_job(KIND, work) for work in works]
    for refused in (manager, managers(max_jobs=2)):
        with pytest.raises(InvalidInput, match="max_jobs"):
            refused.start_job(KIND, Work())
    theirs = Work()
    foreign = managers(scope=Scope("umbrella"), max_jobs=1)
    foreign_id = foreign.start_job(KIND, theirs)
    for work in (*works, theirs):
        work.go.set()
    for job_id in ids:
        assert settled(manager, job_id).status == "completed"
    settled(foreign, foreign_id)


def test_writes_are_refused_inside_a_callers_transaction(managers: Any) -> None:
    """A38, C16: what joins joins, and is gone with it."""
    manager, work = managers(), Work()
    job_id = manager.start_job(KIND, work)
    held = manager.defer_job(KIND, SUBMISSION)
    with transaction.atomic():
        ship("the caller's")
        for act in (
            lambda: manager.start_job(KIND, Work()),
            lambda: manager.resume_job(held, Work()),
            lambda: manager.update_progress(job_id, 5),
            lambda: work.ctx.checkpoint("1"),  # type: ignore[union-attr]
        ):
            with pytest.raises(TransactionOwned):
                act()
    assert len(acts.shipments()) == 1
    with pytest.raises(ZeroDivisionError), transaction.atomic():
        manager.defer_job(KIND, Submission("april", "{}"))
        assert manager.cancel_job(job_id)
        raise ZeroDivisionError
    assert Job.objects.filter(idempotency_key="april").count() == 0
    assert read(job_id).cancel_requested_at is None and not work.ctx.stop.is_set()  # type: ignore[union-attr]
    work.go.set()
    settled(manager, job_id)


# --- what an executor gets --------------------------------------------------------------------------------


def test_an_executor_gets_three_things(managers: Any) -> None:
    """A99: and none of them writes past the lease."""
    work, manager = Work(), managers()
    job_id = manager.start_job(KIND, work)
    assert work.begun.wait(10) and work.ctx is not None
    assert {field.name for field in fields(work.ctx)} == {"stop", "lease", "checkpoint"}
    with pytest.raises(FrozenInstanceError):
        work.ctx.stop = None  # type: ignore[misc,assignment]
    work.ctx.checkpoint('{"at": 1.0}')
    expiry = read(job_id).lease_expires_at
    assert read(job_id).checkpoint_text == '{"at": 1.0}' and read(job_id).checkpoint_at is not None
    for wrong in ("", "{", None, {"at": 1}, "NaN"):
        with pytest.raises(InvalidInput):
            work.ctx.checkpoint(wrong)  # type: ignore[arg-type]
    assert read(job_id).checkpoint_text == '{"at": 1.0}' and read(job_id).lease_expires_at == expiry  # A42
    acts.write(job_id, "lease_owner", "thief")
    with pytest.raises(LeaseLostError):
        work.ctx.checkpoint("2")
    assert read(job_id).checkpoint_text == '{"at": 1.0}'
    work.go.set()
    settled(manager, job_id)


def test_progress_is_a_percentage_and_renews_nothing(managers: Any) -> None:
    """A41, A106."""
    work, manager = Work(), managers()
    job_id = manager.start_job(KIND, work)
    expiry = read(job_id).lease_expires_at
    for given, stored in ((50, 50.0), (150, 100.0), (-3, 0.0), (12.5, 12.5)):
        assert manager.update_progress(job_id, given) is True
        assert read(job_id).progress == stored
    assert read(job_id).lease_expires_at == expiry
    for wrong in (float("nan"), float("inf"), "5", None, True):
        with pytest.raises(InvalidInput):
            manager.update_progress(job_id, wrong)
    assert manager.update_progress(uuid7(), 1) is False and manager.update_progress("x", 1) is False
    assert managers(scope=Scope("acme")).update_progress(job_id, 1) is False
    with pytest.raises(LeaseLostError):
        managers().update_progress(job_id, 1)
    work.go.set()
    settled(manager, job_id)
    assert manager.update_progress(job_id, 1) is False


# --- beats ------------------------------------------------------------------------------------------------


def test_a_short_lease_lives_as_long_as_its_executor(managers: Any) -> None:
    """A39, A100."""
    work, manager = Work(), managers(lease_seconds=0.6)
    job_id = manager.start_job(KIND, work)
    born = read(job_id).heartbeat_at
    for _ in range(4):
        time.sleep(0.35)
        assert read(job_id).ownership == "current"
    assert read(job_id).heartbeat_at > born
    work.go.set()
    assert settled(manager, job_id).status == "completed"


def test_beats_keep_no_process_alive(processes: Processes) -> None:
    """A100: the row stays, for whoever recovers it."""
    code = (
        "from durable_jobs.manager import JobManager\nimport time\n"
        "print(JobManager().start_job('slow', lambda ctx: time.sleep(60)), flush=True)\n"
    )
    process = processes.python(code)
    assert process.wait(20) == 0
    job = read(UUID(process.output.strip()))
    assert job.status == "running" and job.lease_owner is not None


@pytest.mark.parametrize("place", ["row", "mail"])
def test_a_cancel_by_somebody_else_reaches_the_executor(managers: Any, place: str) -> None:
    """A39, A104, A100."""

    work, manager, other = Work(until_stopped), managers(lease_seconds=0.6), managers()
    job_id = manager.start_job(KIND, work)
    work.go.set()
    if place == "row":
        assert other.cancel_job(job_id) is True
    else:
        rows.post_letter(job_id)
    job = settled(manager, job_id)
    assert (job.status, job.diagnostic) == ("cancelled", None) and job.cancel_requested_at is not None


def until_stopped(ctx: ExecutorContext) -> None:
    assert ctx.stop.wait(20)
    raise Aborted


def test_a_lost_lease_stops_the_executor_and_is_told(managers: Any) -> None:
    """A100, A103: nothing of its outcome is recorded; the row stays for recovery."""

    work, manager = Work(until_stopped), managers(lease_seconds=0.6)
    job_id = manager.start_job(KIND, work)
    assert work.begun.wait(10)
    rows.execute(
        "UPDATE durable_jobs_job SET lease_owner = 'thief', lease_epoch = 2, lease_expires_at = %s WHERE id = %s",
        rows.ahead(60), job_id,
    )  # fmt: skip
    stolen = read(job_id)
    work.go.set()
    job = settled(manager, job_id)
    assert (job.status, job.lease_owner, job.lease_epoch) == ("running", "thief", 2)
    assert job.lease_expires_at == stolen.lease_expires_at
    assert "is lost" in (job.diagnostic or "")
    assert "is lost" in (manager.list_jobs()[0].diagnostic or "")  # A107
    assert managers().get_job(job_id).diagnostic is None  # type: ignore[union-attr]


def test_an_end_by_somebody_else_under_the_same_lease_stops_the_executor(managers: Any) -> None:
    """Nothing was lost, so nothing is told; but going on is pointless."""

    work, manager = Work(until_stopped), managers(lease_seconds=60.0)
    job_id = manager.start_job(KIND, work)
    assert work.begun.wait(10)
    assert lifecycle.complete_owned(None, work.ctx.lease, None) is not None  # type: ignore[union-attr]
    manager._runs[job_id].next_beat = 0.0
    manager._wake.set()
    work.go.set()
    job = settled(manager, job_id)
    assert (job.status, job.diagnostic) == ("completed", None) and work.ctx.stop.is_set()  # type: ignore[union-attr]


@pytest.mark.postgres_only
def test_a_locked_row_keeps_no_other_lease_from_its_beat(
    managers: Any, second_connection: OtherConnection
) -> None:
    """A100: one thread beats for all, and waits for none of them."""
    locked, free, manager = Work(), Work(), managers(lease_seconds=0.9)
    locked_id, free_id = manager.start_job(KIND, locked), manager.start_job(KIND, free)
    second_connection.enter(transaction.atomic())
    second_connection.run(lambda: Job.objects.select_for_update().get(pk=locked_id))
    time.sleep(0.6)
    second_connection.leave()  # in time for the locked one, too
    second_connection.enter(transaction.atomic())
    second_connection.run(lambda: Job.objects.select_for_update().get(pk=locked_id))
    for _ in range(6):
        time.sleep(0.25)
        assert read(free_id).ownership == "current"
    assert locked.ctx.stop.is_set() and read(locked_id).ownership == "expired"  # type: ignore[union-attr]
    second_connection.leave()
    for work in (locked, free):
        work.go.set()
    assert settled(manager, free_id).status == "completed"
    assert "is lost" in (settled(manager, locked_id).diagnostic or "")


def test_an_error_of_a_beat_stops_the_executor(managers: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A100, A103: without a recorded request it is no cancellation."""

    def failing(lease: Any) -> None:
        raise RuntimeError("no beat today")

    monkeypatch.setattr(store, "renew", failing)
    work, manager = Work(until_stopped), managers(lease_seconds=1.0)
    job_id = manager.start_job(KIND, work)
    work.go.set()
    job = settled(manager, job_id)
    assert job.status == "running" and job.diagnostic


def test_a_database_that_does_not_answer_is_asked_again(
    managers: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A beat that failed for an outage says nothing about the lease, while that lasts."""
    real, failures = store.renew, []

    def failing(lease: Any) -> Any:
        if len(failures) < 3:
            failures.append(lease)
            raise OperationalError("database is locked")
        return real(lease)

    monkeypatch.setattr(store, "renew", failing)
    work, manager = Work(), managers(lease_seconds=1.0)
    job_id = manager.start_job(KIND, work)
    time.sleep(1.3)
    assert len(failures) == 3 and not work.ctx.stop.is_set()  # type: ignore[union-attr]
    work.go.set()
    assert settled(manager, job_id).status == "completed"


# --- outcomes ---------------------------------------------------------------------------------------------


def test_work_that_was_finished_is_completed_though_its_end_was_asked_for(managers: Any) -> None:
    """A102, A44, C12, T12: its own rule; a receipt refuses, a slice obeys."""
    work, manager = Work(lambda ctx: "all of it"), managers()
    job_id = manager.start_job(KIND, work)
    assert work.begun.wait(10)
    assert manager.cancel_job(job_id) and work.ctx.stop.is_set()  # type: ignore[union-attr]
    assert manager.cancel_job(job_id)
    work.go.set()
    job = settled(manager, job_id)
    assert (job.status, job.result) == ("completed", "all of it") and job.cancel_requested_at is not None


def test_stopped_and_aborted_is_cancelled(managers: Any) -> None:
    """A102, A50."""

    def abort(ctx: ExecutorContext) -> None:
        raise Aborted("stopped at row 7")

    work, manager = Work(abort), managers()
    job_id = manager.start_job(KIND, work)
    assert work.begun.wait(10)
    manager.cancel_job(job_id)
    work.go.set()
    assert settled(manager, job_id).status == "cancelled"


def raising(error: BaseException) -> Callable[[ExecutorContext], None]:
    def end(ctx: ExecutorContext) -> None:
        raise error

    return end


@pytest.mark.parametrize(
    ("error", "message"),
    [(ValueError("no such month"), "no such month"), (Aborted("nobody asked"), "nobody asked"), (SystemExit(3), "3"),
     (KeyboardInterrupt("x"), "x"), (ValueError("nul \x00 inside"), "nul \ufffd inside")],
)  # fmt: skip
def test_any_other_error_fails_the_job(managers: Any, error: BaseException, message: str) -> None:
    """A102, A45, C17: one failure is final."""
    job = run(managers(), raising(error))
    assert (job.status, job.error_message) == ("failed", message)
    assert JobEvent.objects.filter(job_id=job.id, event="failed").count() == 1


def test_an_error_after_a_cancel_is_a_failure(managers: Any) -> None:
    """A102: only an acknowledged stop is a cancellation."""
    work, manager = Work(raising(ValueError("broke"))), managers()
    job_id = manager.start_job(KIND, work)
    assert work.begun.wait(10)
    manager.cancel_job(job_id)
    work.go.set()
    assert settled(manager, job_id).status == "failed"


def test_a_result_that_is_no_json_fails_the_job(managers: Any) -> None:
    """A102."""
    job = run(managers(), lambda ctx: object())
    assert job.status == "failed" and "result" in (job.error_message or "")


def test_a_stale_attempt_replaces_no_outcome(managers: Any) -> None:
    """A45, A105."""
    work, one, other = Work(lambda ctx: "old"), managers(), managers()
    job_id = one.start_job(KIND, work, SUBMISSION)
    assert work.begun.wait(10)
    one._runs[job_id].kept = False
    age(job_id)
    newer = Work(lambda ctx: "new")
    assert other.resume_job(job_id, newer) == job_id
    assert newer.begun.wait(10)
    assert work.ctx.lease.epoch == 1 and newer.ctx.lease.epoch == 2  # type: ignore[union-attr]
    with pytest.raises(LeaseLostError):
        work.ctx.checkpoint("1")  # type: ignore[union-attr]
    work.go.set()
    assert "is lost" in (settled(one, job_id).diagnostic or "")
    newer.go.set()
    job = settled(other, job_id)
    assert (job.status, job.result, job.attempts) == ("completed", "new", 2)


def test_a_manager_that_resumes_its_own_dead_attempt_stops_that_one(managers: Any) -> None:
    """A105: there are two executors then, and one of them may write."""
    work, newer, manager = Work(lambda ctx: "old"), Work(lambda ctx: "new"), managers()
    job_id = manager.start_job(KIND, work, SUBMISSION)
    assert work.begun.wait(10)
    age(job_id)
    manager.resume_job(job_id, newer)
    assert newer.begun.wait(10)
    assert work.ctx.stop.is_set() and not newer.ctx.stop.is_set()  # type: ignore[union-attr]
    work.go.set()
    newer.go.set()
    job = settled(manager, job_id)
    assert (job.result, job.attempts) == ("new", 2)


def test_an_executor_may_end_its_job_by_a_receipt(managers: Any) -> None:
    """A66 inside a manager: that is no failure to record."""
    manager = managers()

    def end(ctx: ExecutorContext) -> None:
        own = acts.context("march", kind=KIND).with_fence(ctx.lease)
        receipts.complete_atomically(own, lambda _: ship())

    job = run(manager, end, SUBMISSION)
    assert (job.status, job.result_text, job.diagnostic) == ("completed", acts.RECEIPT, None)


def test_nothing_changes_a_finished_job(managers: Any) -> None:
    """A46, A47."""
    manager = managers()
    for job in (run(manager, lambda ctx: 1), run(manager, raising(ValueError())), acts.ended("cancelled")):
        before = everything()
        assert manager.cancel_job(job.id) is False and manager.update_progress(job.id, 1) is False
        with pytest.raises(NotReclaimable):
            manager.resume_job(job.id, Work())
        assert manager.cleanup() == 0
        manager.destroy()
        assert everything() == before


# --- deferring, resuming, cancelling ------------------------------------------------------------------------


def test_deferred_work_runs_when_it_is_resumed(managers: Any) -> None:
    """A57, A60, A105."""
    manager, work = managers(), Work(lambda ctx: 7)
    job_id = manager.defer_job(KIND, SUBMISSION)
    assert manager.defer_job(KIND, SUBMISSION) == job_id == manager.start_job(KIND, work, SUBMISSION)
    assert work.calls == 0 and read(job_id).status == "held"
    assert manager.resume_job(str(job_id), work) == job_id
    with pytest.raises(NotReclaimable):
        manager.resume_job(job_id, work)
    work.go.set()
    assert settled(manager, job_id).result == 7


def test_a_job_that_was_started_held_can_be_resumed_here(managers: Any) -> None:
    """C5: it need not be released to a worker."""
    from durable_jobs.testing import register_for_test
    from tests.receipts.test_owned_rows import Import

    with register_for_test(Import):
        job = service.start(Import, {"n": 1}, scope=HOME, hold=True).job
        manager, work = managers(), Work(lambda ctx: 1)
        manager.resume_job(job.id, work)
        work.go.set()
        assert settled(manager, job.id).status == "completed"


def test_a_cancel_requested_before_means_that_nothing_runs(managers: Any) -> None:
    """A101."""
    manager, work = managers(), Work()
    dead = acts.expired(kind=KIND)
    job_id = acts.job_of(dead).id
    assert manager.cancel_job(job_id) is True
    assert status_of(job_id) == "running"  # A48
    manager.resume_job(job_id, work)
    job = settled(manager, job_id)
    assert (job.status, work.calls, job.diagnostic) == ("cancelled", 0, None)


def test_a_cancel_stamps_the_first_request_only(managers: Any) -> None:
    """A47, A48."""
    manager, ctx = managers(), acts.owned()
    job_id = acts.job_of(ctx).id
    assert manager.cancel_job(job_id)
    first = read(job_id).cancel_requested_at
    assert managers().cancel_job(job_id) and read(job_id).cancel_requested_at == first
    assert read(job_id).status == "running"
    before = everything()
    assert managers(scope=Scope("acme")).cancel_job(job_id) is False
    assert manager.cancel_job(uuid7()) is False and manager.cancel_job("nonsense") is False
    assert everything() == before


def test_held_work_is_cancelled_at_once_if_it_is_authentic(managers: Any) -> None:
    """A49."""
    manager = managers()
    job_id = manager.defer_job(KIND, SUBMISSION)
    assert manager.cancel_job(job_id)
    job = read(job_id)
    assert job.status == "cancelled" and job.cancel_requested_at is not None and job.finished_at is not None
    changed = manager.defer_job(KIND, Submission("april", "{}"))
    tamper(changed)
    before = everything()
    with pytest.raises(NotReclaimable, match="do not match"):
        manager.cancel_job(changed)
    assert everything() == before


def test_the_acknowledgement_of_a_cancel_needs_a_request() -> None:
    """A50, A3."""
    ctx = acts.owned()
    assert ctx.fence is not None
    with transaction.atomic():
        assert store.cancel_owned(ctx.fence.lease) is None
    answer = receipts.finalize_atomically(ctx, receipts.AttemptOutcome("cancelled", "m"), lambda _: "1")
    assert isinstance(answer, receipts.PendingFinalization) and answer.code == "E_JOB_INPUT_INVALID"


# --- reading, keeping, ending -------------------------------------------------------------------------------


def test_lists_are_of_one_scope_and_one_status(managers: Any) -> None:
    """A56, A107, C15."""
    manager = managers()
    done = run(manager, lambda ctx: 1)
    held = manager.defer_job(KIND, SUBMISSION)
    dead = acts.job_of(acts.expired())
    managers(scope=Scope("acme")).defer_job(KIND, SUBMISSION)
    make_job("pending", scope=HOME)
    assert [job.id for job in manager.list_jobs()] == [dead.id, held, done.id]
    assert [job.id for job in manager.list_jobs("held")] == [held]
    assert [job.ownership for job in manager.list_jobs("running")] == ["expired"]
    assert manager.list_jobs("failed") == [] and len(manager.list_jobs(limit=2)) == 2
    for wrong in ("complete", "", "nonsense"):
        with pytest.raises(InvalidInput):
            manager.list_jobs(wrong)
    assert managers(scope=Scope("acme")).get_job(done.id) is None
    assert manager.get_job("nonsense") is None


def test_evidence_is_kept(managers: Any) -> None:
    """A96, A97, C25."""
    manager = managers()
    job = acts.ended("failed")
    acts.write(job.id, "finished_at", rows.ago(400 * 86_400))
    before = everything()
    assert manager.cleanup() == 0 and everything() == before


def test_a_destroyed_manager_touches_only_its_own(managers: Any) -> None:
    """A108."""

    mine, theirs = Work(until_stopped), Work()
    one, other = managers(), managers()
    my_id, their_id = one.start_job(KIND, mine), other.start_job(KIND, theirs)
    held = one.defer_job(KIND, SUBMISSION)
    dead = acts.job_of(acts.expired()).id
    assert mine.begun.wait(10) and theirs.begun.wait(10)
    before = rows.stored()
    one.destroy()
    after = rows.stored()
    assert [job_id for job_id in before if before[job_id] != after[job_id]] == [my_id]
    assert read(my_id).cancel_requested_at is not None and read(my_id).status == "running"
    assert mine.ctx.stop.is_set() and not theirs.ctx.stop.is_set()  # type: ignore[union-attr]
    mine.go.set(), theirs.go.set()
    assert settled(one, my_id).status == "cancelled" and settled(other, their_id).status == "completed"
    assert (status_of(held), status_of(dead)) == ("held", "running")
    one.destroy()


def test_after_its_end_a_manager_beats_no_more(managers: Any) -> None:
    """A108, A40: an executor that does not listen loses its lease."""
    work, manager = Work(), managers(lease_seconds=0.6)
    job_id = manager.start_job(KIND, work)
    assert work.begun.wait(10)
    manager.destroy()
    time.sleep(0.7)
    assert read(job_id).ownership == "expired"
    work.go.set()
    job = settled(manager, job_id)
    assert job.status == "running" and "is lost" in (job.diagnostic or "")


def test_no_threads_and_no_connections_are_left(managers: Any) -> None:
    """A103: timers and controllers always go."""
    manager = managers(lease_seconds=0.6)
    run(manager, lambda ctx: 1)
    run(manager, raising(ValueError()))
    wait_until(lambda: manager._beats is None, 5, "the beats go on")
    assert not manager._runs
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("durable-jobs-executor")]
    assert connection.connection is not None
