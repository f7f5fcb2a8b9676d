"""Every step of the three verbs breaks once: job and project's rows are then as they were, or all of it is done."""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
from django.db import DatabaseError, connection, transaction

from durable_jobs import bounded, receipts, service, store
from durable_jobs.exceptions import DeadlineExceeded, LeaseLostError
from durable_jobs.receipts import (
    AttemptOutcome,
    ExecutionContext,
    Finalized,
    PendingFinalization,
    complete_atomically,
    finalize_atomically,
    retry_atomically,
)
from tests.connections import OtherConnection
from tests.processes import Processes
from tests.receipts import acts
from tests.receipts.acts import HOME, RECEIPT, context, ended, everything, job_of, owned, ship
from tests.store import rows

pytestmark = pytest.mark.django_db(transaction=True)


class Boom(DatabaseError):
    """Breaks a step."""


class Pending(Exception):
    """What finalize answers instead of raising."""

    def __init__(self, answer: PendingFinalization) -> None:
        self.answer = answer
        super().__init__(answer.reason)


@dataclass
class Case:
    """A verb that is about to be called."""

    ctx: ExecutionContext
    job_id: Any
    call: Callable[[], Any]

    def is_done(self, name: str) -> bool:
        job, made = acts.read(self.job_id), acts.shipments()
        done = {
            "complete": job.status == "completed" and job.result_text == RECEIPT,
            "finalize": job.status == "failed" and job.result_text == RECEIPT,
            "retry": job.status == "running" and job.lease_epoch == 2,
        }[name]
        return done and len(made) == 1


def work(_: Any) -> str:
    ship()
    return RECEIPT


def complete(**given: Any) -> Case:
    ctx = owned(**given)
    return Case(ctx, job_of(ctx).id, lambda: complete_atomically(ctx, lambda given: work(given)))


def finalize(**given: Any) -> Case:
    ctx = owned(**given)

    def call() -> Finalized:
        answer = finalize_atomically(ctx, AttemptOutcome("failed", "no route"), lambda given: work(given))
        if isinstance(answer, PendingFinalization):
            raise Pending(answer)
        return answer

    return Case(ctx, job_of(ctx).id, call)


def retry(**given: Any) -> Case:
    given.pop("lease_seconds", None)
    job = ended("failed")
    ctx = context(job.idempotency_key, **given)
    return Case(
        ctx, job.id, lambda: retry_atomically(job.id, ctx, lambda given: work(given), max_running=1000)
    )


VERBS = {"complete": complete, "finalize": finalize, "retry": retry}
each_verb = pytest.mark.parametrize("name", VERBS)


class Steps:
    """Calls `act` before or after the n-th statement of the verb, those of the lock policy and the ends included."""

    def __init__(self, number: int, after: bool, act: Callable[[], None]) -> None:
        self.number, self.after, self.act = number, after, act
        self.seen = 0

    def step(self, go: Callable[[], Any], *, mended: bool = False) -> Any:
        self.seen += 1
        hit = self.seen == self.number
        if hit and not self.after:
            self.act()
        answer = go()
        if hit and self.after and not mended:
            self.act()
        return answer

    def execute(self, execute: Any, sql: str, params: Any, many: bool, context: dict[str, Any]) -> Any:
        # What breaks between SQLite's BEGIN and Django's note of it is Django's to mend.
        return self.step(lambda: execute(sql, params, many, context), mended=sql.startswith("BEGIN"))


@contextmanager
def steps(number: int, after: bool, act: Callable[[], None]) -> Iterator[Steps]:
    """Around the call of a verb. Number 0 counts only."""
    counted = Steps(number, after, act)
    patch = pytest.MonkeyPatch()
    for name in ("_ask", "set_busy_timeout", "busy_timeout"):
        real = getattr(bounded, name)
        patch.setattr(bounded, name, lambda *given, real=real: counted.step(lambda: real(*given)))
    commit = connection._commit  # type: ignore[attr-defined]
    patch.setattr(connection, "_commit", lambda: counted.step(commit))
    # Bounds that are narrowed as time goes by would make more steps on a slow machine.
    patch.setattr(bounded, "SLACK_SECONDS", 3600.0)
    try:
        with connection.execute_wrapper(counted.execute):
            yield counted
    finally:
        patch.undo()


def nothing() -> None:
    """Only counts."""


def count(name: str) -> int:
    case = VERBS[name]()
    with steps(0, False, nothing) as counted:
        case.call()
    clear()
    return counted.seen


def clear() -> None:
    rows.execute("DELETE FROM tests_shipment")


def walk(name: str, act: Callable[[Case], None], **given: Any) -> Iterator[tuple[Case, Any, Any, str]]:
    """Each step, before and after: the case, everything as it was, the error, where."""
    total = count(name)
    assert total >= 8
    for number in range(1, total + 1):
        for after in (False, True):
            case = VERBS[name](**given)
            before, error = everything(), None
            policy = acts.lock_policy()
            with steps(number, after, lambda case=case: act(case)):
                try:
                    case.call()
                except Exception as raised:
                    error = raised
            where = f"{name}, {'after' if after else 'before'} step {number} of {total}"
            assert not connection.in_atomic_block and connection.get_autocommit(), where
            assert acts.lock_policy() == policy or error is None, where
            yield case, before, error, where
            clear()


@each_verb
def test_an_error_at_any_step_leaves_nothing_or_everything(name: str) -> None:
    """A66, A74, A79, A1: before, between and after each statement, the commit among them."""

    def boom(_: Case) -> None:
        raise Boom

    done = 0
    for case, before, error, where in walk(name, boom):
        if error is None:  # after the commit: it stands (A86)
            assert case.is_done(name), where
            done += 1
        elif case.is_done(name):  # the commit went through, its answer did not
            done += 1
        else:
            assert everything() == before, where
    assert 1 <= done <= 6


@each_verb
def test_a_stop_at_any_step_leaves_nothing_or_everything(name: str) -> None:
    """A82: an abort before the commit is no commit; finalize goes on (A72)."""
    refused = done = 0
    for case, before, error, where in walk(name, lambda case: case.ctx.stop.set()):
        if error is None:
            done += 1
            assert case.is_done(name), where
        else:
            refused += 1
            assert isinstance(error, LeaseLostError) and "asked to stop" in str(error), where
            assert everything() == before, where
    if name == "finalize":
        assert refused == 0
    else:
        # Later are only the commit itself and, on SQLite, the two steps that put the lock policy back;
        # there nothing happens right after BEGIN, either.
        assert done == (2 if connection.vendor == "postgresql" else 7) and refused >= 8


@each_verb
def test_a_deadline_that_passes_at_any_step_leaves_nothing_or_everything(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A83: after the policy is set, after the lock, before the commit."""
    late = [0.0]
    clock = SimpleNamespace(monotonic=lambda: time.monotonic() + late[0], sleep=time.sleep)
    monkeypatch.setattr(bounded, "time", clock)
    monkeypatch.setattr(receipts, "time", clock)

    def pass_by(_: Case) -> None:
        late[0] = 3600.0

    refused = 0
    for case, before, error, where in walk(name, pass_by):
        late[0] = 0.0
        if error is None:
            assert case.is_done(name), where
        else:
            refused += 1
            code = error.answer.code if isinstance(error, Pending) else getattr(error, "code", None)
            assert code == DeadlineExceeded.code, where
            assert everything() == before, where
    assert refused >= 12


@pytest.mark.parametrize("name", ["complete", "finalize"])
def test_a_lease_that_runs_out_at_any_step_leaves_nothing_or_everything(
    name: str, second_connection: OtherConnection
) -> None:
    """A66, A69, A72: also with a thief at hand, whom the lock keeps out (on SQLite he would wait for the file)."""
    refused = stolen = 0

    def run_out(case: Case) -> None:
        time.sleep(0.12)
        if connection.vendor == "postgresql":
            second_connection.run(store.claim_held, case.job_id, scope=HOME, owner="thief", ttl=60)

    for case, before, error, where in walk(name, run_out, lease_seconds=0.1):
        if error is None:
            assert case.is_done(name), where
            continue
        refused += 1
        code = error.answer.code if isinstance(error, Pending) else getattr(error, "code", None)
        assert code == LeaseLostError.code, where
        if acts.read(case.job_id).lease_owner == "thief":
            stolen += 1
            assert acts.read(case.job_id).lease_epoch == 2 and not acts.shipments(), where
        else:
            assert everything() == before, where
    assert refused >= 8
    if connection.vendor == "postgresql":
        assert 1 <= stolen < refused  # before the row was locked, and not after


@pytest.mark.postgres_only
@each_verb
def test_a_cancel_by_somebody_else_at_any_step(name: str, second_connection: OtherConnection) -> None:
    """A67, A72: refused while it can still be seen; a job that is ended all the same is ended whole."""
    refused, done = 0, list[str]()

    def cancel(case: Case) -> None:
        second_connection.run(ask, case.job_id)

    def ask(job_id: Any) -> None:
        try:
            service.cancel(job_id, scope=HOME)
        except Exception as error:  # it has ended already
            assert getattr(error, "code", None) == "not_cancellable", error

    for case, _, error, where in walk(name, cancel):
        job = acts.read(case.job_id)
        if error is None:
            done.append(where)
            assert case.is_done(name), where
            continue
        refused += 1
        assert name == "complete" and isinstance(error, LeaseLostError), where
        assert job.status == "running" and not acts.shipments(), where
    assert refused >= 8 if name == "complete" else refused == 0
    if name == "complete":
        assert len(done) == 5, done  # after the last look, before and after the policy's, and at the commit


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_cancel_by_somebody_else_before_and_after(when: str, second_connection: OtherConnection) -> None:
    """A67: on SQLite, with one writer per file, there is no between."""
    case = complete()
    if when == "before":
        second_connection.run(service.cancel, case.job_id, scope=HOME)
        with pytest.raises(LeaseLostError):
            case.call()
        assert not acts.shipments()
        return
    case.call()
    with pytest.raises(Exception, match="completed already"):
        second_connection.run(service.cancel, case.job_id, scope=HOME)
    assert case.is_done("complete")


def claim_as_thief(case: Case) -> None:
    with transaction.atomic():
        assert store.claim_held(case.job_id, scope=HOME, owner="thief", ttl=60) is None


@each_verb
def test_a_stolen_job_is_written_by_nobody_else(name: str, second_connection: OtherConnection) -> None:
    """A34, A79: stolen before the first lock; the lock, and then the job's end, keep thieves away."""

    def steal(case: Case) -> None:
        rows.execute(
            "UPDATE durable_jobs_job SET lease_owner = 'thief', lease_epoch = lease_epoch + 1, status = 'running', "
            "lease_expires_at = %s, finished_at = NULL, domain_mirrored_at = NULL WHERE id = %s",
            rows.ahead(60), case.job_id,
        )  # fmt: skip

    case = VERBS[name]()
    second_connection.run(steal, case)
    stolen = everything()
    with pytest.raises((LeaseLostError, Pending, receipts.NotReclaimable)):
        case.call()
    assert everything() == stolen
    clear()
    late = VERBS[name]()
    late.call()
    done = everything()
    second_connection.run(claim_as_thief, late)
    assert everything() == done


CHILD = """
import os, signal, sys, uuid
from durable_jobs import receipts
from durable_jobs.store import Lease
from tests.receipts import acts
name, job_id, key = sys.argv[1:]

def die(_):
    acts.ship()
    os.kill(os.getpid(), signal.SIGKILL)

job = acts.read(uuid.UUID(job_id))
if name == "retry":
    receipts.retry_atomically(job.id, acts.context(key), die)
ctx = acts.context(key).with_fence(Lease(job.id, job.lease_owner, job.lease_epoch, 30))
if name == "complete":
    receipts.complete_atomically(ctx, die)
receipts.finalize_atomically(ctx, receipts.AttemptOutcome("failed", "m"), die)
"""


@each_verb
def test_a_process_that_is_killed_inside_leaves_nothing(name: str, processes: Processes) -> None:
    """A66, A74, A79: and keeps nobody from doing it after."""
    job = ended("failed") if name == "retry" else job_of(owned())
    before, key = everything(), job.idempotency_key or ""
    process = processes.python(CHILD, name, str(job.id), key)
    assert process.wait(20) == -signal.SIGKILL, process.output
    assert everything() == before
    if name == "retry":
        retry_atomically(job.id, context(key), work)
    else:
        lease = store.Lease(job.id, job.lease_owner or "", job.lease_epoch, 30)
        complete_atomically(context(key).with_fence(lease), work)
    assert len(acts.shipments()) == 1


@each_verb
@pytest.mark.parametrize("cut", ["closed", "terminated"])
def test_a_connection_that_is_cut_inside_leaves_nothing(
    name: str, cut: str, second_connection: OtherConnection, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A66, A74, A79, A1: by the callback or by the server; the next call connects anew."""
    if cut == "terminated" and connection.vendor == "sqlite":
        cut = "closed"

    def cutting(_: Any) -> str:
        ship()
        if cut == "closed":
            connection.close()
            return RECEIPT
        (pid,) = rows.execute("SELECT pg_backend_pid()")[0]
        second_connection.run(rows.execute, "SELECT pg_terminate_backend(%s, 5000)", pid)
        return RECEIPT

    case = VERBS[name]()
    before = everything()
    with monkeypatch.context() as patch, pytest.raises(Exception) as refused:
        patch.setattr(sys.modules[__name__], "work", cutting)
        case.call()
    assert "clos" in str(refused.value) or "terminat" in str(refused.value)
    assert not connection.in_atomic_block and everything() == before
    case.call()
    assert case.is_done(name)


@pytest.mark.postgres_only
@each_verb
def test_while_a_verb_works_the_row_is_locked(
    name: str, second_connection: OtherConnection, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A66, A70, A77: what was looked at stays so until the commit."""
    seen: list[Any] = []
    case = VERBS[name]()

    def looking(_: Any) -> str:
        seen.append(second_connection.run(store.holders, case.job_id))
        return ship()

    monkeypatch.setattr(sys.modules[__name__], "work", looking)
    case.call()
    assert len(seen) == 1 and seen[0] is not None
    assert store.holders(case.job_id) is None


@pytest.mark.parametrize("name", ["complete", "finalize"])
def test_while_a_verb_works_nobody_takes_the_job(name: str, second_connection: OtherConnection) -> None:
    """P4: what takes a job from somebody skips the locked row (PostgreSQL), or waits for the file (SQLite)."""
    ctx = owned(lease_seconds=0.5)
    taken: list[Any] = []

    def take() -> Any:
        return store.claim_held(job_of(ctx).id, scope=HOME, owner="thief", ttl=30)

    def slow(_: ExecutionContext) -> str:
        time.sleep(0.55)
        if connection.vendor == "postgresql":
            taken.append(second_connection.run(take))
        return ship()

    if name == "complete":
        with pytest.raises(LeaseLostError):
            complete_atomically(ctx, slow)
    else:
        assert isinstance(finalize_atomically(ctx, AttemptOutcome("failed", "m"), slow), PendingFinalization)
    assert taken in ([], [None])
    assert not acts.shipments() and job_of(ctx).status == "running"
