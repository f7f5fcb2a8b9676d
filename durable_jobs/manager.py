"""Callables in this process's threads, with the durability of a job and without a worker.

A `JobManager` owns what it starts under leases of its own and renews them as long as it lives. Nothing recovers
its jobs by itself: workers and the reconciler leave the queue `manual` alone, and a lease that ran out says
nothing about the outcome. Somebody decides, and resumes or retries the job.

The lease protects the job's row. What an executor does to the project's rows is protected only where it goes
through `durable_jobs.receipts`.
"""

from __future__ import annotations

import inspect
import logging
import math
import threading
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final
from uuid import UUID

from asgiref.sync import async_to_sync
from django.db import connections, transaction

from durable_jobs import connection as own_connection
from durable_jobs import database, jsontext, kinds, lifecycle, receipts, service, store
from durable_jobs.conf import MANUAL_QUEUE, config
from durable_jobs.exceptions import (
    Aborted,
    InvalidInput,
    LeaseLostError,
    NotCancellable,
    NotFound,
    NotReclaimable,
    describe,
    plain_text,
)
from durable_jobs.logs import log
from durable_jobs.models import TERMINAL, Job, Scope, Status
from durable_jobs.receipts import Capacity, ExecutionContext, Submission
from durable_jobs.store import Lease

__all__ = ["Aborted", "Executor", "ExecutorContext", "JobManager", "Submission"]

LISTED: Final = 200
RETRY_SECONDS: Final = 0.05
"""Until a beat is tried again that met a locked row, or that the database did not answer."""


@dataclass(frozen=True)
class ExecutorContext:
    """All that an executor is given.

    `stop` is set when a cancel was requested, the lease was lost, or the job has ended: raise `Aborted` then. `lease` names this
    attempt. `checkpoint(text)` stores a text of JSON under the lease; a resumed attempt finds it on the job.
    """

    stop: threading.Event
    lease: Lease
    checkpoint: Callable[[str], None]


Executor = Callable[[ExecutorContext], Any]
"""Does the work in a thread of its own and returns the job's result (JSON). May be a coroutine function."""


@dataclass(eq=False)
class _Run:
    """One executor of this manager."""

    lease: Lease
    kind: str
    stop: threading.Event = field(default_factory=threading.Event)
    renewed: float = field(default_factory=time.monotonic)
    next_beat: float = 0.0
    kept: bool = True


class JobManager:
    """Starts callables as durable jobs of one scope.

    `actor` says who works, for people. `lease_seconds` is how long a job stays owned without a beat (a beat
    comes every third of it). At most `max_jobs` jobs of managers run in the scope, those included whose manager
    died. Making one reads and changes nothing; each has an owner name of its own, so it never inherits the jobs
    of an earlier process.

    Every write has a transaction of its own and is refused inside a caller's (`TransactionOwned`), except
    `defer_job` and `cancel_job`, which join it. `ctx` bounds a call by a deadline and holds it to one scope,
    kind and key.
    """

    def __init__(
        self, scope: Scope | None = None, actor: str = "", *, lease_seconds: float = 30.0, max_jobs: int = 10
    ) -> None:
        self.scope = Scope(config.DEFAULT_TENANT) if scope is None else scope
        if not isinstance(self.scope, Scope):
            raise InvalidInput("scope", scope, "is not a Scope", "Pass Scope(tenant, organization).")
        plain_text("scope.tenant", self.scope.tenant, 64)
        if self.scope.organization is not None:
            plain_text("scope.organization", self.scope.organization, 64)
        self.actor = plain_text("actor", actor, 200) if actor else ""
        self.lease_seconds = receipts.lease_length(lease_seconds)
        self.max_jobs = receipts.limit("max_jobs", max_jobs)
        self.owner = receipts.make_owner("manager")
        self._runs: dict[UUID, _Run] = {}
        self._diagnostics: dict[UUID, str] = {}
        self._guard = threading.Lock()
        self._wake = threading.Event()
        self._beats: threading.Thread | None = None

    # --- the nine verbs

    def start_job(
        self,
        kind: str,
        executor: Executor,
        submission: Submission | None = None,
        *,
        ctx: ExecutionContext | None = None,
    ) -> UUID:
        """Start `executor` as a job of this kind (any name), and give the job's id.

        A submission that was made before gives the earlier job's id, in whatever state that is, and starts
        nothing; with another input it is refused. Raises `InvalidInput` when `max_jobs` jobs run,
        `IdempotencyConflict`, `TransactionOwned`.
        """
        _require_callable(executor)
        limits = [self._capacity(), *receipts.capacities(kind, self.scope, None)]
        granted = receipts.insert(
            kind, submission, scope=self.scope, owner=self.owner, lease_seconds=self.lease_seconds,
            limits=limits, ctx=ctx,
        )  # fmt: skip
        if granted.lease is None:
            if service.get(granted.job.id, scope=self.scope) is None:
                raise LeaseLostError(granted.job.id, self.owner, None, "the earlier job cannot be read")
            return granted.job.id
        self._launch(granted.lease, kind, executor)
        return granted.job.id

    def defer_job(
        self, kind: str, submission: Submission | None, *, ctx: ExecutionContext | None = None
    ) -> UUID:
        """Keep work for later and start nothing; `resume_job` runs it. A repeat gives the earlier job's id."""
        return receipts.defer(kind, submission, scope=self.scope, ctx=ctx).id

    def resume_job(
        self, job_id: UUID | str, executor: Executor, *, ctx: ExecutionContext | None = None
    ) -> UUID:
        """Run `executor` for a held job, or for one whose lease ran out; its checkpoint is on the job.

        The earlier owner can write nothing from here on. With a cancel requested before, the executor is not
        called and the job ends cancelled. Raises `NotReclaimable`, `InvalidInput`, `LockKeyHeld`.
        """
        _require_callable(executor)
        lease = receipts.take(
            job_id, scope=self.scope, owner=self.owner, lease_seconds=self.lease_seconds,
            limits=[self._capacity()], ctx=ctx,
        )  # fmt: skip
        job = store.get(lease.job_id)
        self._launch(lease, job.kind if job else "", executor, job)
        return lease.job_id

    def get_job(self, job_id: UUID | str) -> Job | None:
        """The job as it now is, with what this manager failed to record as its `diagnostic`."""
        job = service.get(job_id, scope=self.scope)
        return None if job is None else self._with_diagnostic(job)

    def list_jobs(self, status: str | None = None, *, limit: int = LISTED) -> list[Job]:
        """The scope's jobs of this and other managers, newest first; `ownership` tells whose lease ran out."""
        if status is not None and status not in Status.values:
            raise InvalidInput("status", status, "is unknown", f"Use one of {', '.join(Status.values)}.")
        most = receipts.limit("limit", limit)
        jobs = Job.objects.using(database.alias()).in_scope(self.scope).filter(queue_name=MANUAL_QUEUE)
        if status is not None:
            jobs = jobs.filter(status=status)
        return [self._with_diagnostic(job) for job in jobs.order_by("-created_at", "-id")[:most]]

    def cancel_job(self, job_id: UUID | str, *, ctx: ExecutionContext | None = None) -> bool:
        """Ask for a job's end. True: the request is recorded, which does not say that anything has stopped.

        Held work ends at once; an executor of this manager gets its `stop`; other owners see it at their next
        beat. False: no such job here, or it has ended already. Raises `NotReclaimable` for held work whose
        input was changed, `ScopeMismatch` when `ctx` is not the job's.
        """
        if ctx is not None:
            ctx.check_active()
        job = service.get(job_id, scope=self.scope)
        if job is None:
            return False
        if ctx is not None:
            receipts.require_identity(ctx, job)
        if job.status == Status.HELD and job.diagnostic:
            raise NotReclaimable(job.id, job.diagnostic.rstrip("."))
        try:
            with receipts.write(ctx, "cancel_job", job.id) if ctx else nullcontext():
                service.cancel(job.id, actor=self.actor, scope=self.scope)
        except (NotFound, NotCancellable):
            return False
        run = self._runs.get(job.id)
        if run is not None:
            transaction.on_commit(run.stop.set, using=database.alias())
        return True

    def update_progress(self, job_id: UUID | str, percent: float) -> bool:
        """Set the progress of a job that this manager runs (0 to 100, cut to that); renews nothing.

        False: no such job here, or it does not run. Raises `LeaseLostError` when another attempt owns it.
        """
        number = isinstance(percent, int | float) and not isinstance(percent, bool)
        if not number or not math.isfinite(percent):
            raise InvalidInput("percent", percent, "is not a number", "Use 0 to 100.")
        job = service.get(job_id, scope=self.scope)
        if job is None or job.status != Status.RUNNING:
            return False
        lease = self._lease_on(job)
        if lease is None or not store.set_percent(lease, min(100.0, max(0.0, float(percent)))):
            raise LeaseLostError(job.id, self.owner, lease.epoch if lease else None)
        return True

    def cleanup(self) -> int:
        """Removes nothing and says so: 0. That a job is old is no reason to delete what it proves."""
        return 0

    def destroy(self) -> None:
        """Ask this manager's own executors to stop, and renew their leases no more.

        Says nothing about whether they have stopped, and touches nobody else's jobs.
        """
        with self._guard:
            runs = list(self._runs.values())
        for run in runs:
            try:
                service.cancel(run.lease.job_id, actor=self.actor, scope=self.scope)
            except (NotFound, NotCancellable):
                pass
            except Exception as error:
                self._note(run, error)
            run.kept = False
            run.stop.set()
        self._wake.set()

    # --- executors

    def _capacity(self) -> Capacity:
        return Capacity(None, self.scope, self.max_jobs)

    def _lease_on(self, job: Job) -> Lease | None:
        run = self._runs.get(job.id)
        return run.lease if run is not None else None

    def _launch(self, lease: Lease, kind: str, executor: Executor, job: Job | None = None) -> None:
        run = _Run(lease, kind)
        if job is not None and job.cancel_requested_at is not None:
            run.stop.set()
        run.next_beat = run.renewed + self._interval
        with self._guard:
            earlier, self._runs[lease.job_id] = self._runs.get(lease.job_id), run
            self._diagnostics.pop(lease.job_id, None)
        if earlier is not None:
            # An attempt of this manager whose lease ran out, and whose executor goes on.
            earlier.stop.set()
        name = f"durable-jobs-executor-{lease.job_id}"
        try:
            self._start_beats()
            # Daemons: a process that ends does not wait for its executors.
            threading.Thread(target=self._execute, args=[run, executor], name=name, daemon=True).start()
        except RuntimeError:
            # No thread is to be had: the lease runs out, and the job can be resumed.
            self._forget(run)
            raise
        self._wake.set()

    def _start_beats(self) -> None:
        with self._guard:
            if self._beats is None:
                beats = threading.Thread(target=self._keep, name="durable-jobs-manager", daemon=True)
                beats.start()
                self._beats = beats

    def _execute(self, run: _Run, executor: Executor) -> None:
        try:
            self._record(run, partial(self._outcome, run, executor))
        finally:
            self._forget(run)
            connections.close_all()

    def _forget(self, run: _Run) -> None:
        with self._guard:
            if self._runs.get(run.lease.job_id) is run:
                del self._runs[run.lease.job_id]
        self._wake.set()

    def _outcome(self, run: _Run, executor: Executor) -> Callable[[], Job | None]:
        """Run the executor, and give the transition that puts its outcome on the row."""
        kind = kinds.find(run.kind)
        cancel = partial(lifecycle.cancel_owned, kind, run.lease, actor=self.actor)
        if run.stop.is_set():
            return cancel
        ctx = ExecutorContext(run.stop, run.lease, partial(_save_checkpoint, run.lease))
        try:
            result = async_to_sync(executor)(ctx) if inspect.iscoroutinefunction(executor) else executor(ctx)
            encoded = None
            if result is not None:
                encoded = jsontext.encode(result, field="result", limit=config.MAX_RESULT_BYTES)
        except BaseException as error:
            if run.stop.is_set() and isinstance(error, Aborted):
                return cancel
            return partial(lifecycle.fail_owned, kind, run.lease, describe(error))
        # Work that was finished stays finished, whether or not its end was asked for meanwhile.
        return partial(lifecycle.complete_owned, kind, run.lease, encoded)

    def _record(self, run: _Run, decide: Callable[[], Callable[[], Job | None]]) -> None:
        try:
            if decide()() is None and not self._has_ended(run.lease):
                raise LeaseLostError(run.lease.job_id, run.lease.owner, run.lease.epoch)
        except BaseException as error:
            # The row stays as it is, for whoever recovers it.
            self._note(run, error)

    def _has_ended(self, lease: Lease) -> bool:
        """Whether the job was ended under this lease already, by a receipt."""
        job = store.get(lease.job_id)
        return job is not None and job.status in TERMINAL and job.lease_epoch == lease.epoch

    # --- beats

    @property
    def _interval(self) -> float:
        return max(0.001, self.lease_seconds / 3)

    def _keep(self) -> None:
        try:
            own_connection.own("manager")
            while True:
                self._wake.clear()
                with self._guard:
                    runs = [run for run in self._runs.values() if run.kept]
                    if not runs:
                        self._beats = None
                        return
                now = time.monotonic()
                for run in runs:
                    if run.next_beat <= now:
                        self._beat(run)
                soonest = min(run.next_beat for run in runs)
                self._wake.wait(min(max(0.0, soonest - time.monotonic()), self._interval))
        finally:
            with self._guard:
                if self._beats is threading.current_thread():
                    self._beats = None
            connections.close_all()

    def _beat(self, run: _Run) -> None:
        sent = time.monotonic()
        try:
            job = store.renew(run.lease)
            if isinstance(job, store.Answer):
                # Somebody holds the row, perhaps the executor for its receipt: the others must not wait for it.
                run.next_beat = sent + min(RETRY_SECONDS, self._interval)
                return
            if job is None:
                if self._runs.get(run.lease.job_id) is not run or self._has_ended(run.lease):
                    # By the executor's own receipt, or by that of somebody else who had the lease from it.
                    run.kept = False
                    run.stop.set()
                    return
                raise LeaseLostError(run.lease.job_id, run.lease.owner, run.lease.epoch)
        except Exception as error:
            if database.is_outage(error) and sent - run.renewed < run.lease.ttl:
                # A database that does not answer says nothing about the lease, as long as that lasts.
                run.next_beat = sent + min(RETRY_SECONDS, self._interval)
                database.drop_broken(database.alias())
                return
            self._note(run, error)
            run.kept = False
            run.stop.set()
            return
        run.renewed, run.next_beat = sent, sent + self._interval
        if job.cancel_requested_at is not None:
            run.stop.set()

    # --- diagnostics

    def _note(self, run: _Run, error: BaseException) -> None:
        with self._guard:
            if self._runs.get(run.lease.job_id, run) is run:
                self._diagnostics[run.lease.job_id] = describe(error).message
        log("manager_failed", level=logging.WARNING, job_id=run.lease.job_id, problem=describe(error).message)

    def _with_diagnostic(self, job: Job) -> Job:
        with self._guard:
            job.local_diagnostic = self._diagnostics.get(job.id)
        return job


def _save_checkpoint(lease: Lease, checkpoint: str) -> None:
    jsontext.verify(checkpoint, field="checkpoint", limit=config.MAX_CHECKPOINT_BYTES)
    if not store.keep_checkpoint(lease, checkpoint):
        raise LeaseLostError(lease.job_id, lease.owner, lease.epoch)


def _require_callable(executor: Any) -> None:
    if not callable(executor):
        raise InvalidInput("executor", executor, "cannot be called", "Pass a function of one argument.")
