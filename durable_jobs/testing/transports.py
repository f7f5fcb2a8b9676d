"""What every transport must do, written once: subclass `TransportSuite` for a transport of your own.

It works under pytest and under unittest, and needs real transactions (`TransactionTestCase`, or pytest-django's
`transaction=True`). It waits for conditions, never for durations.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import timedelta
from typing import Any, ClassVar, Final, TypeVar

from django.db import connections, transaction

from durable_jobs import database, service, store, transports
from durable_jobs.exceptions import TerminalError
from durable_jobs.kinds import Done, Kind, Retry, Yield
from durable_jobs.models import Job, JobEvent, Status
from durable_jobs.runner import SliceContext
from durable_jobs.testing.jobs import register_for_test
from durable_jobs.transports import State

QUEUE: Final = "conformance"
POLL_SECONDS: Final = 0.02
GATE_SECONDS: Final = 60.0

_Value = TypeVar("_Value")


class _Kind(Kind):
    queue = QUEUE
    lease_seconds = 2
    orphan_policy = "redrive"
    pending_ttl_seconds = 1
    retry = Retry(failures=3, first_delay=0.1, longest_delay=0.1)

    def step(self, ctx: SliceContext) -> Done | Yield:
        job = ctx.job
        ctx.record("ran", data={"seq": job.continuation_seq, "redrives": job.redrives})
        return self.work(ctx)

    def work(self, ctx: SliceContext) -> Done | Yield:
        return Done(ctx.input)


class Quick(_Kind):
    """Is done at once; its result is its input."""

    name = "conformance.quick"


class Failing(_Kind):
    """Fails each time, with an error that may pass (`input` "transient") or is final ("final")."""

    name = "conformance.failing"

    def work(self, ctx: SliceContext) -> Done:
        raise TerminalError("made for a test") if ctx.input == "final" else OSError("made for a test")


class Sliced(_Kind):
    """Yields after each of `input` slices; the second fails once."""

    name = "conformance.sliced"

    def work(self, ctx: SliceContext) -> Done | Yield:
        job = ctx.job
        if job.continuation_seq == 1 and not job.consecutive_failures:
            raise OSError("made for a test")
        return Yield() if job.continuation_seq < ctx.input else Done(job.continuation_seq)


class Gated(_Kind):
    """Works in small commits until its gate is opened or it is asked to stop."""

    name = "conformance.gated"
    slice_seconds = GATE_SECONDS

    def work(self, ctx: SliceContext) -> Done | Yield:
        deadline = time.monotonic() + GATE_SECONDS
        while time.monotonic() < deadline and not _is_open(ctx.job):
            if ctx.should_yield():
                return Yield()
            ctx.save_checkpoint(advance=1)
            ctx.stop.wait(POLL_SECONDS)
        return Done(ctx.processed)


class Limited(_Kind):
    """May run one at a time; its result is how many of them it has seen running."""

    name = "conformance.limited"
    max_running = 1

    def work(self, ctx: SliceContext) -> Done:
        time.sleep(POLL_SECONDS)
        running = Job.objects.using(ctx.alias).filter(kind=self.name, status=Status.RUNNING)
        return Done(running.exclude(lease_owner=None).count())


KINDS: Final = (Quick, Failing, Sliced, Gated, Limited)
"""For workers in other processes: register these there (`kinds.register`)."""


class TransportSuite:
    """The tests; a subclass says how its workers run. They serve the queue `QUEUE` and know `KINDS`.

    Workers must make the reconciler's passes often (`TICK` of half a second or so).
    """

    patience: ClassVar[float] = 30.0
    """Seconds after which a condition that has not come about fails the test."""

    # --- for the adapter

    def sending(self) -> AbstractContextManager[Any]:
        """In this block the transport is the current one in this process, with nobody to receive."""
        return nullcontext()

    def working(self) -> AbstractContextManager[Any]:
        """In this block, inside `sending`, workers run."""
        raise NotImplementedError

    def working_alone(self) -> AbstractContextManager[Any]:
        """In this block and never outside it workers run; its end drains them as a deploy does, and returns soon.

        To be given where `working` keeps workers for several tests.
        """
        return self.working()

    def broken(self) -> AbstractContextManager[Any]:
        """In this block nothing can be sent; a transport that cannot be separated from its rows does nothing."""
        return nullcontext()

    def lose_messages(self) -> None:
        """Let the broker forget everything that it holds."""

    def is_quiet(self) -> bool:
        """Whether the broker holds no message that could still be delivered."""
        return True

    # --- deliveries

    def test_a_job_reaches_a_worker_under_its_own_identity(self) -> None:
        """B136, B147."""
        with self._at_work():
            job = service.start(Quick, {"n": 1}).job
            done = self.wait_for(job, Status.COMPLETED)
        assert done.result == {"n": 1}
        assert runs(job) == [{"seq": 0, "redrives": 0}]
        assert (done.attempts, done.consecutive_failures) == (1, 0)

    def test_a_delay_is_honoured(self) -> None:
        """B148."""
        with self._at_work():
            job = service.start(Quick, run_after=timedelta(seconds=1.5)).job
            done = self.wait_for(job, Status.COMPLETED)
        assert done.started_at is not None
        assert (done.started_at - done.created_at).total_seconds() >= 1.5

    def test_a_failed_slice_is_tried_again_up_to_its_limit(self) -> None:
        """B149: and each try is the same delivery."""
        with self._at_work():
            job = service.start(Failing, "transient").job
            failed = self.wait_for(job, Status.FAILED)
        assert (failed.attempts, failed.consecutive_failures) == (3, 3)
        assert runs(job) == [{"seq": 0, "redrives": 0}] * 3

    def test_a_final_error_is_tried_once(self) -> None:
        """B150."""
        with self._at_work():
            job = service.start(Failing, "final").job
            failed = self.wait_for(job, Status.FAILED)
        assert failed.attempts == len(runs(job)) == 1

    def test_a_hand_back_is_the_next_delivery_and_spends_no_try(self) -> None:
        """B67, B145, B151: a slice that fails after a hand-back has all its tries."""
        with self._at_work():
            job = service.start(Sliced, 2).job
            done = self.wait_for(job, Status.COMPLETED)
        assert [run["seq"] for run in runs(job)] == [0, 1, 1, 2]
        assert (done.result, done.attempts, done.redrives, done.interruptions) == (2, 4, 0, 0)

    def test_one_delivery_sent_many_times_runs_once(self) -> None:
        """B140, B152: at the same time, while it runs, and after its end; the row is not touched by the others."""
        with self._at_work():
            job = service.start(Gated).job
            side_by_side([lambda: transports.current().publish(job)] * 4)
            self.until(lambda: len(runs(job)) == 1, "the job has begun")
            transports.current().publish(job)
            self._let_pass()
            open_gate(job)
            self.wait_for(job, Status.COMPLETED)
            before = image(job)
            for _ in range(3):
                transports.current().publish(job)
            self._let_pass()
        assert image(job) == before
        assert len(runs(job)) == before["attempts"] == 1

    # --- transactions

    def test_nothing_runs_before_the_commit_or_after_a_rollback(self) -> None:
        """B30, B158."""
        with self._at_work():
            with transaction.atomic(using=database.alias()):
                committed = service.start(Quick).job
                self._let_pass()
                early = elsewhere(lambda: store.get(committed.id))
            try:
                with transaction.atomic(using=database.alias()):
                    rolled_back = service.start(Quick).job
                    raise ConnectionAbortedError
            except ConnectionAbortedError:
                pass
            self.wait_for(committed, Status.COMPLETED)
            self._let_pass()
        assert early is None
        assert store.get(rolled_back.id) is None and runs(rolled_back) == []

    # --- looking and taking back

    def test_what_is_not_held_is_unknown(self) -> None:
        """B137, B153."""
        with self.sending(), self._registered():
            held = service.start(Quick, run_after=timedelta(hours=1)).job
            other = service.start(Quick, run_after=timedelta(hours=1)).job
            other.redrives += 1
            assert transports.current().get_state(other) == State.UNKNOWN
            service.cancel(held.id)
            assert transports.current().get_state(held) == State.UNKNOWN

    def test_a_cancelled_delivery_does_not_run(self) -> None:
        """B153, B157: taking back what is gone, or runs, raises nothing."""
        with self.sending(), self._registered():
            cancelled = service.start(Quick).job
            service.cancel(cancelled.id)
            with self.working_alone():
                running = service.start(Gated).job
                self.until(lambda: len(runs(running)) == 1, "the job has begun")
                transports.current().withdraw(running)
                service.cancel(running.id)
                self.wait_for(running, Status.CANCELLED)
                transports.current().withdraw(running)
                self._let_pass()
        assert now(cancelled).status == Status.CANCELLED and runs(cancelled) == []

    # --- losses

    def test_a_lost_message_is_found(self) -> None:
        """B31, B124, B154: the row and the workers' own passes are enough."""
        with self.sending(), self._registered():
            jobs = [service.start(Quick, number).job for number in range(3)]
            self.lose_messages()
            with self.working_alone():
                for job in jobs:
                    self.wait_for(job, Status.COMPLETED)
        assert [len(runs(job)) for job in jobs] == [1, 1, 1]
        assert {(now(job).redrives, now(job).parked_at) for job in jobs} == {(0, None)}

    def test_a_broker_that_is_down_refuses_no_start(self) -> None:
        """B67, B113, B128."""
        with self._at_work():
            with self.broken():
                job = service.start(Sliced, 1).job
                assert store.get(job.id) is not None
            self.wait_for(job, Status.COMPLETED)

    def test_what_met_a_pause_goes_on_when_it_ends(self) -> None:
        """F10."""
        with self._at_work():
            service.pause(queue=QUEUE, reason="made for a test")
            jobs = [service.start(Quick, number).job for number in range(3)]
            self._let_pass()
            assert [now(job).status for job in jobs] == [Status.PENDING] * 3
            service.unpause(queue=QUEUE)
            for job in jobs:
                self.wait_for(job, Status.COMPLETED)

    def test_a_limit_is_kept_and_all_come_to_run(self) -> None:
        """A28: what met a full kind runs when there is room."""
        with self._at_work():
            jobs = [service.start(Limited).job for _ in range(4)]
            done = [self.wait_for(job, Status.COMPLETED) for job in jobs]
        assert {job.result for job in done} == {1}

    # --- the end

    def test_a_drain_hands_running_work_back(self) -> None:
        """B69, B142, B155: and the next worker goes on from the last commit."""
        with self.sending(), self._registered():
            with self.working_alone():
                job = service.start(Gated).job
                self.until(lambda: now(job).processed_count > 0, "a commit")
            left = now(job)
            assert (left.status, left.lease_owner) == (Status.PENDING, None)
            assert (left.interruptions, left.consecutive_failures, left.redrives) == (1, 0, 0)
            assert left.processed_count > 0
            open_gate(job)
            with self.working_alone():
                done = self.wait_for(job, Status.COMPLETED)
        assert done.processed_count >= left.processed_count
        assert [run["seq"] for run in runs(job)] == [0, 1]

    # --- for the tests

    def until(self, condition: Callable[[], bool], what: str) -> None:
        """Wait for the condition."""
        deadline = time.monotonic() + self.patience
        while not condition():
            assert time.monotonic() < deadline, f"after {self.patience:g} s still not: {what}"
            time.sleep(POLL_SECONDS)

    def wait_for(self, job: Job, status: str) -> Job:
        """The job, when it has this status."""
        self.until(lambda: now(job).status == status, f"{job.kind} {job.id} is {status}")
        return now(job)

    @contextmanager
    def _at_work(self) -> Iterator[None]:
        with self.sending(), self._registered(), self.working():
            yield

    @contextmanager
    def _registered(self) -> Iterator[None]:
        with register_for_test(*KINDS):
            yield

    def _let_pass(self) -> None:
        """Wait until everything that was sent has been received, as far as the broker can tell."""
        self.until(self.is_quiet, "the broker holds no message")


def now(job: Job) -> Job:
    """The row as it is."""
    current = store.get(job.id)
    assert current is not None
    return current


def image(job: Job) -> dict[str, Any]:
    """Every column of the row as it is."""
    current = now(job)
    return {field.attname: getattr(current, field.attname) for field in Job._meta.concrete_fields}


def runs(job: Job) -> list[dict[str, int]]:
    """The identities under which a step of the job has run, oldest first."""
    events = JobEvent._base_manager.using(database.alias()).filter(job_id=job.id, event="ran")
    return [dict(event.data or {}) for event in events.order_by("id")]


def open_gate(job: Job) -> None:
    """Let a `Gated` job end."""
    with database.joined(database.alias()):
        store.add_event(job, "gate_opened")


def _is_open(job: Job) -> bool:
    events = JobEvent._base_manager.using(database.alias())
    return bool(events.filter(job_id=job.id, event="gate_opened").exists())


def elsewhere(act: Callable[[], _Value]) -> _Value:
    """Do it on another connection, in a thread of its own."""
    answers: list[_Value] = []
    side_by_side([lambda: answers.append(act())])
    [answer] = answers
    return answer


def side_by_side(acts: list[Callable[[], Any]]) -> None:
    """Do them at the same time, each on a connection of its own."""

    def run(act: Callable[[], Any]) -> None:
        try:
            act()
        finally:
            connections.close_all()

    threads = [threading.Thread(target=run, args=(act,)) for act in acts]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
