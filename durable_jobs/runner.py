"""One slice of a job: what a step is given, and what becomes of its answer or its error.

The fence is the row's owner and epoch. A slice that lost it ends quietly: nothing written, nothing counted,
nothing raised to whoever ran it.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from contextvars import Context
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import lru_cache, partial
from typing import Any, Final, TypeVar
from uuid import UUID

from asgiref.sync import async_to_sync, sync_to_async
from django.core.exceptions import SynchronousOnlyOperation
from django.db import DatabaseError, InterfaceError, connections, transaction
from django.db.backends.base.base import BaseDatabaseWrapper

from durable_jobs import database, jsontext, kinds, lifecycle, signals, store
from durable_jobs.conf import config
from durable_jobs.database import Leftover
from durable_jobs.exceptions import (
    CODE_LENGTH,
    MESSAGE_LENGTH,
    ErrorClass,
    ErrorFacts,
    HookFailed,
    InvalidInput,
    LeaseLost,
    Park,
    RetryAfter,
    TransactionOwned,
    UnrecoverableError,
    cut,
    describe,
    shown,
)
from durable_jobs.keeper import Hold, Keeper
from durable_jobs.kinds import KEEP, Cancelled, Done, Kind, Sentinel, Yield
from durable_jobs.lifecycle import Share
from durable_jobs.logs import log
from durable_jobs.models import Job, Scope, Status
from durable_jobs.store import Answer, Counts, Lease

PROGRESS_SECONDS: Final = 1.0
"""Progress that a step reports is written at most this often."""
LONG_FENCE_SECONDS: Final = 1.0
LONGEST_HOOK_DELAY: Final = 600.0
IDLE_IN_FENCE: Final = "25P03"
"""The server ended a fence that had sent it nothing for too long (`lock_fence` sets that limit)."""
FIRST_WAIT_SECONDS, LONGEST_WAIT_SECONDS = 0.05, 2.0

Returned = TypeVar("Returned")


Observer = Callable[[Kind, Job], "AbstractContextManager[Callable[[SliceResult], None]]"]
"""Entered around each slice; what it yields is called with the slice's result."""
observers: list[Observer] = []
"""Those who watch this process's slices, such as metrics and traces."""


class Outcome(StrEnum):
    """What a slice came to."""

    COMPLETED = "completed"
    FAILED = "failed"
    CANCELLED = "cancelled"
    YIELDED = "yielded"
    RETRY = "retry"
    LEASE_LOST = "lease_lost"


_LEFT_AS: Final = {
    Status.COMPLETED: Outcome.COMPLETED,
    Status.FAILED: Outcome.FAILED,
    Status.CANCELLED: Outcome.CANCELLED,
    Status.PENDING: Outcome.YIELDED,
    Status.RUNNING: Outcome.RETRY,
}


@dataclass(frozen=True)
class SliceResult:
    """The outcome of a slice, the row as it left it (None when it is somebody else's), and the step's error."""

    outcome: Outcome
    job: Job | None = None
    error: BaseException | None = None


@dataclass
class _Noted:
    """What an open fence will commit with its end."""

    checkpoint: str | Sentinel | None = KEEP
    counts: Counts = store.NO_COUNTS


class SliceContext:
    """What a step works with. One thread uses it, for one slice.

    `stop` is set when the slice should end: a cancel was seen, the worker drains, the lease is lost or no
    longer renewed. `prepared` is what `BatchKind.before_batch` returned.
    """

    def __init__(
        self,
        kind: Kind,
        job: Job,
        hold: Hold,
        draining: threading.Event | None,
        on_commit: Callable[[], None] | None = None,
    ) -> None:
        self.job = job
        self.lease: Lease = hold.lease
        self.prepared: Any = None
        self.alias = database.alias()
        self._kind = kind
        self._hold = hold
        self._draining = draining
        self._on_commit = on_commit
        self._begun = time.monotonic()
        self._checkpoint_text = job.checkpoint_text
        self._processed = job.processed_count
        self._total = job.total_count
        self._noted: _Noted | None = None
        self._unwritten = store.NO_COUNTS
        self._progress_written = 0.0

    # --- reading ---

    @property
    def scope(self) -> Scope:
        """Whose job it is."""
        return self.job.scope

    @property
    def input(self) -> Any:
        """The input that the job was started with, parsed anew at each access."""
        return self.job.input

    @property
    def checkpoint(self) -> Any:
        """The last committed checkpoint, parsed anew at each access; None before the first."""
        return None if self._checkpoint_text is None else json.loads(self._checkpoint_text)

    @property
    def stop(self) -> threading.Event:
        """Set when going on is pointless: a cancel, a pause, a drain, a lost lease. A wait on it ends then."""
        return self._hold.stop

    @property
    def processed(self) -> int:
        """Items done, with what the open fence has noted."""
        noted = self._noted.counts.processed if self._noted else None
        return self._processed if noted is None else noted

    @property
    def total(self) -> int | None:
        """Items in all, None where unknown."""
        if self._noted and not isinstance(self._noted.counts.total, Sentinel):
            return self._noted.counts.total
        return self._total

    @property
    def slice_key(self) -> str:
        """`job:seq`: the same over retries and redrives of one slice, new after a yield."""
        return f"{self.job.id}:{self.job.continuation_seq}"

    def effect_key(self, *parts: object) -> str:
        """A key for one effect outside the database, the same whichever slice, retry or restart performs it.

        Give the parts that tell this effect of the job from its others. Another job for the same thing has
        other keys: give it the same idempotency key, so that there is none. Colons and percent signs in a part
        are escaped, so that different parts give different keys.
        """
        escaped = (str(part).replace("%", "%25").replace(":", "%3A") for part in parts)
        return ":".join((str(self.job.id), *escaped))

    def should_yield(self) -> bool:
        """Whether the step should return `Yield()` at this boundary: time is up, or somebody asks it to stop."""
        return (
            self.stop.is_set()
            or self._hold.paused
            or (self._draining is not None and self._draining.is_set())
            or time.monotonic() - self._begun >= self._kind.slice_seconds
        )

    def still_mine(self) -> bool:
        """Ask the row whether the job is still ours, before an effect outside the database.

        True is true only at that moment: what is sent afterwards is not fenced.
        """
        mine = store.still_mine(self.lease)
        if not mine:
            self._hold.observe(lost=True)
        return mine

    # --- writing ---

    @contextmanager
    def fenced(self) -> Iterator[None]:
        """One transaction on the jobs' database that only the lease's holder can commit.

        It locks the job's row, runs the block, and with its end renews the lease, counts a commit and writes
        what `save_checkpoint` and `progress` noted: rows, cursor and counts commit together or not at all.
        A commit zeroes the limits used, so open none that advances nothing: a step that commits an empty
        fence and then fails is tried for ever. Keep it under a second. Raises `TransactionOwned` inside an open transaction or another fence, and
        `LeaseLost` when the job was taken.
        """
        _refuse_event_loop("ctx.fenced()")
        if self._noted is not None:
            raise TransactionOwned("ctx.fenced()")
        hold, begun = self._hold, time.monotonic()
        committed = threading.Event()
        hold.in_fence = True
        try:
            with database.transaction(self.alias, what="ctx.fenced()"):
                if not store.lock_fence(self.lease, self._fence_idle_seconds()):
                    raise self._lost()
                # First of all, so that it is known when a callback of the block's raises after the commit.
                transaction.on_commit(committed.set, using=self.alias)
                self._noted = noted = _Noted(counts=self._unwritten)
                yield
                requested = store.write_checkpoint(self.lease, noted.checkpoint, noted.counts)
                if requested is None:
                    raise self._lost()
        except BaseException as error:
            self._noted = None
            hold.in_fence = False
            if committed.is_set():
                self._committed(noted.checkpoint, noted.counts, bool(requested))
            elif not isinstance(error, LeaseLost):
                self._beat()
            raise
        self._noted = None
        hold.in_fence = False
        self._committed(noted.checkpoint, noted.counts, requested)
        took = time.monotonic() - begun
        if took > LONG_FENCE_SECONDS:
            log("fenced_block_long", self.job, level=logging.WARNING, seconds=round(took, 3))

    async def run_fenced(self, function: Callable[..., Returned], *args: Any) -> Returned:
        """For async steps: call `function(*args)` inside `fenced()`, in the slice's own thread."""

        def call() -> Returned:
            with self.fenced():
                return function(*args)

        return await sync_to_async(call, thread_sensitive=True)()

    def save_checkpoint(
        self,
        state: Any = KEEP,
        *,
        advance: int = 0,
        processed: int | None = None,
        total: int | Sentinel | None = KEEP,
    ) -> None:
        """Commit where the work is: JSON `state` (default: leave it), and counts.

        `advance` adds to the items done, `processed` sets them; `total=None` means unknown. Inside `fenced()`
        it joins that transaction, and `ctx` moves on when that commits. Outside it is a commit of its own.
        Raises `InvalidInput` for what is not JSON or more than MAX_CHECKPOINT_BYTES, `TransactionOwned` in an
        atomic block of yours (a savepoint in the fence included), `LeaseLost` when the job was taken.
        """
        _refuse_event_loop("ctx.save_checkpoint()")
        database.refuse_borrowed(self.alias, "ctx.save_checkpoint()")
        text: str | Sentinel | None = KEEP
        if state is not KEEP:
            text = jsontext.encode(state, field="checkpoint", limit=config.MAX_CHECKPOINT_BYTES)
        counts = self._counts(advance, processed, total, None)
        if self._noted is not None:
            self._noted.checkpoint = self._noted.checkpoint if text is KEEP else text
            self._noted.counts = counts
            return
        requested = store.write_checkpoint(self.lease, text, counts)
        if requested is None:
            raise self._lost()
        self._committed(text, counts, requested)

    def progress(
        self,
        *,
        advance: int = 0,
        processed: int | None = None,
        total: int | Sentinel | None = KEEP,
        message: str | None = None,
    ) -> None:
        """Report progress: counts as in `save_checkpoint`, and a message of at most 500 characters.

        Written at most once a second, with the next commit, or with the slice's end; in a coroutine or a
        transaction of yours, with the next of those. It renews nothing.
        """
        if message is not None:
            message = jsontext.clean(str(message))[:500]
        counts = self._counts(advance, processed, total, message)
        if self._noted is not None:
            self._noted.counts = counts
            return
        self._unwritten = counts
        now = time.monotonic()
        if now - self._progress_written < PROGRESS_SECONDS or not self._may_write_alone():
            return
        self._progress_written = now
        requested = store.set_progress(self.lease, counts)
        if requested is None:
            raise self._lost()
        self._keep_counts(counts)
        self._unwritten = store.NO_COUNTS
        self._hold.observe(cancel=requested)

    def record(self, event: str, *, code: str = "", message: str = "", data: Any = None) -> None:
        """Append a line to the job's history; inside `fenced()` it commits with the fence.

        Texts are cleaned and cut (`event` 50 characters, `code` 100, `message` 10,000). Raises `InvalidInput`
        for data that is not JSON or more than MAX_CHECKPOINT_BYTES.
        """
        if data is not None:
            data = json.loads(jsontext.encode(data, field="data", limit=config.MAX_CHECKPOINT_BYTES))
        with database.joined(self.alias):
            store.add_event(
                self.job,
                jsontext.clean(event)[:50],
                owner=self.lease.owner,
                code=jsontext.clean(code)[:CODE_LENGTH],
                message=cut(jsontext.clean(message), MESSAGE_LENGTH),
                data=data,
            )

    # --- inside ---

    def unwritten(self) -> Counts:
        """Progress that the slice's last statement still has to write."""
        return self._unwritten

    def forget_unwritten(self) -> None:
        """Give up progress that could not be written."""
        self._unwritten = store.NO_COUNTS

    def _may_write_alone(self) -> bool:
        return not _in_event_loop() and not database.in_transaction(self.alias)

    def _counts(
        self, advance: int, processed: int | None, total: int | Sentinel | None, message: str | None
    ) -> Counts:
        noted = self._noted.counts if self._noted else self._unwritten
        base = self.processed if self._noted or noted.processed is None else noted.processed
        _count("advance", advance, negative=True)
        if processed is not None:
            if advance:
                raise InvalidInput(
                    "advance",
                    advance,
                    "is given beside processed",
                    "Add with advance, or set with processed.",
                )
            base = _count("processed", processed)
        elif not 0 <= base + advance < 2**63:
            raise InvalidInput(
                "advance", advance, f"leads from {base} to no count", "Count the items that are done."
            )
        else:
            base += advance
        if total is not None and not isinstance(total, Sentinel):
            _count("total", total)
        changed = processed is not None or bool(advance) or noted.processed is not None
        return Counts(
            processed=base if changed else None,
            total=noted.total if isinstance(total, Sentinel) else total,
            message=noted.message if message is None else message,
        )

    def _committed(self, checkpoint: str | Sentinel | None, counts: Counts, requested: bool) -> None:
        if not isinstance(checkpoint, Sentinel):
            self._checkpoint_text = checkpoint
        self._keep_counts(counts)
        self._unwritten = store.NO_COUNTS
        self._hold.committed()
        self._hold.observe(cancel=requested)
        if self._on_commit is not None:
            self._on_commit()
        if self._draining is not None and self._draining.is_set():
            self.stop.set()

    def _keep_counts(self, counts: Counts) -> None:
        if counts.processed is not None:
            self._processed = counts.processed
        if not isinstance(counts.total, Sentinel):
            self._total = counts.total

    def _lost(self) -> LeaseLost:
        self._hold.observe(lost=True)
        return LeaseLost(self.lease.job_id, self.lease.owner, self.lease.epoch)

    def _fence_idle_seconds(self) -> float:
        return self.lease.ttl + config.GRACE

    def _beat(self) -> None:
        """After a rollback, which renewed nothing; its failure is the keeper's to notice."""
        try:
            beat = store.beat_many(self.lease.owner, [self.lease]).get(self.lease.job_id)
        except Exception:
            return
        if beat is None or not beat.mine:
            self._hold.observe(lost=True)


def claim(job_id: UUID, seq: int, redrives: int, *, owner: str, early: bool = True) -> Job | Answer | None:
    """Claim the job of a delivery, as it is named by a message, for `run_slice`.

    `store.BUSY`: somebody holds the row, or counts the running jobs of its kind, just now: ask again.
    `store.FULL`: as many of its kind run in its scope as may (`max_running`); the row waits as it is: deliver
    it again later. `store.EARLY`, unless `early` is allowed: the row is not due yet. None: this delivery is
    refused for good. Raises `UnknownKind`.
    """
    job = store.get(job_id)
    if job is None:
        return None
    kind = kinds.find(job.kind)
    if kind is None:
        raise kinds.unknown(job.kind)
    limit = store.limit_of(kind, job.scope)
    return store.claim(job_id, seq, redrives, owner, kind.lease_seconds, limit=limit, early=early)


def run_slice(
    job: Job,
    *,
    owner: str,
    keeper: Keeper | None = None,
    draining: threading.Event | None = None,
    on_commit: Callable[[], None] | None = None,
) -> SliceResult:
    """Run one slice of a job that `owner` has just claimed, and put its outcome on the row.

    Raises nothing for what a step does, SystemExit included; a KeyboardInterrupt leaves everything as a kill
    would. `draining` set: the worker stops, and the slice hands back at its next boundary. `on_commit` is
    called after each commit of the slice. Before anything else it raises `UnknownKind`, and `TransactionOwned`
    inside a transaction of the caller.
    """
    database.refuse_borrowed(database.alias(), "run_slice()")
    kind = _kind_of(job)
    hold = Hold(Lease(job.id, owner, job.lease_epoch, kind.lease_seconds))
    slice = _Slice(kind, job, hold, keeper, draining, on_commit)
    return slice.run_whole()


def begin_slice(
    job: Job,
    hold: Hold,
    keeper: Keeper,
    draining: threading.Event | None = None,
    *,
    grouped: bool,
    context: Context | None = None,
    connection: BaseDatabaseWrapper | None = None,
) -> SliceResult | Finished:
    """As `run_slice`, under a lease that is held already; with `grouped`, of a kind that allows it, all but its end.

    What it then answers is still held, and waits to be completed, together with others or alone. `context` is the
    one that this call runs in: what follows runs there, too. `connection` is this thread's to the jobs' database,
    where the caller has it in hand.
    """
    slice = _Slice(
        _kind_of(job),
        job,
        hold,
        keeper,
        draining,
        None,
        grouped=grouped,
        context=context,
        connection=connection,
    )
    result = slice.run_whole()
    # Not both of each other: without a circle they go when they are done with, and no collector has to look for them.
    finished, slice.finished = slice.finished, None
    return result if finished is None else finished


def _kind_of(job: Job) -> Kind:
    kind = kinds.find(job.kind)
    if kind is None:
        raise kinds.unknown(job.kind)
    return kind


class Finished:
    """A slice whose step is done; what is missing is that its job is completed. The lease is held until then."""

    def __init__(self, slice: _Slice, ending: lifecycle.Ending) -> None:
        self._slice = slice
        self.ending = ending
        self.is_committed = False
        """Whether it was completed with others; what follows that is to be told."""
        self.is_over = False
        """Whether its end has been told, or it was completed alone."""
        self._watched: Callable[[SliceResult], None] | None = None

    @property
    def is_wanted(self) -> bool:
        """Whether nothing has been learned since that forbids a plain completion."""
        hold = self._slice.hold
        return not (hold.lost or hold.cancelled)

    def doubt(self) -> None:
        """A batch with it has failed, and may have been committed all the same: look at the row before a loss is told."""
        self._slice.retried = True

    def committed(self) -> bool:
        """Its completion has been committed with others: let the lease go; whether more is to be told than the log."""
        self.is_committed = True
        self._slice.let_go_of_lease()
        return self.ending.share is not Share.PLAIN

    def tell(self) -> None:
        """What follows that commit, in the context of its step."""
        self.is_over = True
        try:
            lifecycle.tell_completed(self.ending)
        finally:
            if self._watched is not None:
                self._watched(SliceResult(Outcome.COMPLETED, self.ending.row))

    def complete(self) -> SliceResult:
        """Complete it alone, as `run_slice` does: wait for its row, or find out whose it is."""
        self.is_over = True
        result = self._slice.finish(self.ending.result)
        if self._watched is not None:
            self._watched(result)
        return result

    def watch(self, tell: Callable[[SliceResult], None]) -> None:
        """Call this with its result, in the context of its step."""
        self._watched = tell


def _tell_all(told: Sequence[Callable[[SliceResult], None]], entered: ExitStack, result: SliceResult) -> None:
    with entered:
        for tell in told:
            tell(result)


class _Slice:
    """The acts of one slice, in order: look at the row, run the step, put its outcome on the row."""

    def __init__(
        self,
        kind: Kind,
        job: Job,
        hold: Hold,
        keeper: Keeper | None,
        draining: threading.Event | None,
        on_commit: Callable[[], None] | None,
        *,
        grouped: bool = False,
        context: Context | None = None,
        connection: BaseDatabaseWrapper | None = None,
    ) -> None:
        self.kind, self.job, self.hold, self.lease = kind, job, hold, hold.lease
        self.keeper = keeper
        self.grouped = grouped
        self.context = context
        self.finished: Finished | None = None
        self.patient = keeper is not None
        self.draining = draining
        self.let_go = False
        """Whether the row has no owner any more, though the slice still decides about it."""
        self.retried = False
        self.ctx = SliceContext(kind, job, hold, draining, on_commit)
        self.wrapper = connections[self.ctx.alias] if connection is None else connection

    def run_whole(self) -> SliceResult:
        """With the lease kept meanwhile, and let go at the end unless that is still to come."""
        self.hold.begin(self.kind.max_slice_seconds)
        if self.keeper is not None:
            self.keeper.hold(self.hold)
        if self.draining is not None and self.draining.is_set():
            self.hold.ask_to_stop()
        try:
            return self._observed()
        finally:
            if self.finished is None:
                self.let_go_of_lease()

    def _observed(self) -> SliceResult:
        if not observers:
            return self._guarded(self._run)
        with ExitStack() as entered:
            told = [entered.enter_context(observe(self.kind, self.job)) for observe in observers]
            result = self._guarded(self._run)
            if self.finished is not None:
                self.finished.watch(partial(_tell_all, told, entered.pop_all()))
            else:
                _tell_all(told, entered.pop_all(), result)
        return result

    def finish(self, result: str | None) -> SliceResult:
        try:
            return self._guarded(partial(self._finish, result))
        finally:
            self.let_go_of_lease()

    def let_go_of_lease(self) -> None:
        if self.keeper is not None:
            self.keeper.let_go(self.hold)

    def _finish(self, result: str | None) -> SliceResult:
        if self.hold.lost:
            return self._lost()
        return self._cancel() if self.hold.cancelled else self._write_completion(result)

    def _guarded(self, act: Callable[[], SliceResult]) -> SliceResult:
        try:
            return act()
        except LeaseLost:
            return self._lost()
        except KeyboardInterrupt:
            raise
        except BaseException as error:
            return self._not_recorded(error)

    def _run(self) -> SliceResult:
        job = self.job
        if self.hold.lost:
            return self._lost()
        if job.cancel_requested_at is not None or self.hold.cancelled:
            return self._cancel()
        if job.verdict is not None:
            return self._decide(job)
        if not _is_as_started(job):
            return self._refuse(
                "input_changed", "The stored input does not match its hash: it was changed after the start."
            )
        if job.attempts == 1:
            signals.send(signals.job_started, job)
        return self._run_step()

    def _run_step(self) -> SliceResult:
        before = self._connection()
        answer: object = None
        error: BaseException | None = None
        try:
            answer = self._call_step()
        except (LeaseLost, KeyboardInterrupt):
            self._clear()
            raise
        except BaseException as raised:
            error = raised
        now = self._connection()
        replaced = now is None if before is None else now is not before
        left = self._clear()
        if error is None:
            return self._returned(answer, left)
        try:
            return self._raised(error, replaced or left is Leftover.BROKEN)
        finally:
            # Its traceback holds this frame: with the error in it they, and all that the step had in its hands,
            # would stay until the garbage collector comes.
            del error

    def _call_step(self) -> object:
        step = self.kind.step
        return async_to_sync(step)(self.ctx) if _is_async(getattr(step, "__func__", step)) else step(self.ctx)

    def _clear(self) -> Leftover:
        """What a step left on the connection must not carry the outcome."""
        left = database.clear_connection(self.wrapper)
        if left is not Leftover.NOTHING:
            log("left_on_connection", self.job, level=logging.WARNING, left=left.value)
        return left

    def _not_recorded(self, error: BaseException) -> SliceResult:
        """The outcome could not be written, and no outage is to blame: counted, so that it ends some day."""
        log("slice_not_recorded", self.job, level=logging.ERROR, error=error)
        if self.let_go:
            return SliceResult(Outcome.RETRY, None, error)
        self.ctx.forget_unwritten()
        if database.is_outage(error) or isinstance(error, TransactionOwned):
            return self._release(error)
        try:
            job = self._persist(partial(self._record_failure, describe(error)))
        except Exception:
            return self._release(error)
        return SliceResult(Outcome.RETRY, job, error) if job else self._lost()

    # --- outcomes ---

    def _returned(self, answer: object, left: Leftover) -> SliceResult:
        if self.hold.lost:
            return self._lost()
        if self.hold.cancelled:
            return self._cancel()
        if left is Leftover.TRANSACTION:
            return self._refuse(
                "transaction_left_open",
                "step returned inside a transaction that it had opened; what it wrote there was rolled back. "
                "Leave atomic() blocks, or commit, before returning.",
            )
        match answer:
            case Done(result):
                return self._complete(result)
            case Yield(after):
                return self._yield(after)
            case Cancelled():
                return self._cancel()
        return self._refuse(
            "bad_outcome",
            f"step returned {shown(answer)}; return Done(result), Yield(after) or Cancelled().",
        )

    def _raised(self, error: BaseException, cut_off: bool) -> SliceResult:
        if self.hold.lost:
            return self._lost()
        if self.hold.cancelled:
            return self._cancel()
        if isinstance(error, RetryAfter):
            return self._yield(error.seconds)
        if self._interrupted:
            return self._yield(0.0)
        if isinstance(error, Park):
            return self._park(error)
        if self._is_outage(error, cut_off):
            return self._cut_off(error)
        return self._fail(error)

    def _cut_off(self, error: BaseException) -> SliceResult:
        """The step lost the database. If that is away, the job goes back and nothing is counted.

        If it stands and only this connection was cut, the step may be the cause, as with a worker that it
        kills: counted as an orphaning, ever later, and parked as poison like one.
        """
        facts = describe(error)
        stands = self._database_answers()
        log("slice_cut_off", self.job, level=logging.WARNING, error_type=facts.type, database_stands=stands)
        if not stands:
            return self._release(error)
        has_committed = self.hold.last_commit > self.hold.begun
        before = 0 if has_committed else self.job.redrives_since_commit
        if before >= self.kind.max_orphanings:
            sentence = (
                f"The step lost its connection {before + 1} times without a commit between: {facts.message}"
            )
            return self._park(Park("poison", sentence))
        try:
            self._persist(self._write_progress)
            job = self._persist(lambda: self._record_cut_off(facts, self.kind.retry.delay(before + 1)))
        except Exception as second:
            log("release_failed", self.job, level=logging.ERROR, error=second)
            return SliceResult(Outcome.RETRY, None, error)
        return SliceResult(Outcome.RETRY, job, error) if job else self._lost()

    def _record_cut_off(self, facts: ErrorFacts, delay: float) -> Job | None:
        with database.transaction(self.ctx.alias, what="release"):
            job = store.release_lease(self.lease, delay, cut_off=True)
            if job is not None:
                store.add_event(
                    job,
                    "cut_off",
                    owner=self.lease.owner,
                    error_type=facts.type,
                    message=facts.message,
                    traceback=facts.traceback,
                )
        return job

    def _is_outage(self, error: BaseException, cut_off: bool) -> bool:
        """Whether the jobs' database is at fault: the same error comes from a cursor used after its end, and
        from a database of somebody else, and those must be counted."""
        if isinstance(error, database.FileLocked):
            return True
        if not database.is_outage(error) or database.is_locked(error):
            return False
        if database.sqlstate(error) == IDLE_IN_FENCE:
            return False
        return cut_off or not self._database_answers()

    def _database_answers(self) -> bool:
        try:
            store.beat_many(self.lease.owner, [self.lease])
        except Exception:
            database.clear(self.ctx.alias)
            return False
        return True

    def _complete(self, result: Any) -> SliceResult:
        text = None
        if result is not None:
            try:
                text = jsontext.encode(result, field="result", limit=config.MAX_RESULT_BYTES)
            except InvalidInput as error:
                return self._refuse("bad_result", str(error))
        if self.grouped and self.ctx.unwritten() is store.NO_COUNTS:
            share = lifecycle.share_of(self.kind)
            if share is Share.PLAIN and observers:
                share = Share.TOLD
            if share is not Share.ALONE:
                ending = lifecycle.Ending(self.kind, self.job, self.lease, text, share, self.context)
                self.finished = Finished(self, ending)
                return SliceResult(Outcome.COMPLETED)
        return self._write_completion(text)

    def _write_completion(self, text: str | None) -> SliceResult:
        try:
            job = self._persist(lambda: lifecycle.complete(self.kind, self.lease, text, self.ctx.unwritten()))
        except HookFailed as failure:
            # The work is done but not agreed: a failure like any other, and the step runs again.
            return self._fail(failure.error)
        return SliceResult(Outcome.COMPLETED, job) if job else self._lost()

    def _yield(self, after: float) -> SliceResult:
        interrupted = self._interrupted
        job = self._persist(
            lambda: store.yield_slice(self.lease, after, interrupted=interrupted, counts=self.ctx.unwritten())
        )
        if job is None:
            return self._lost()
        log(
            "job_yielded",
            job,
            level=logging.DEBUG,
            seq=job.continuation_seq,
            after=after,
            interrupted=interrupted,
        )
        signals.send(signals.job_yielded, job)
        return SliceResult(Outcome.YIELDED, job)

    def _cancel(self) -> SliceResult:
        try:
            job = self._persist(
                lambda: lifecycle.cancel(
                    self.kind,
                    self.job.id,
                    self.lease.epoch,
                    self.ctx.unwritten(),
                    actor=f"worker:{self.lease.owner}",
                )
            )
        except HookFailed as failure:
            # No failure is counted and the request stays: a cancelled job must not end failed.
            log("cancel_mirror_failed", self.job, level=logging.ERROR, error=failure.error)
            return self._release_after_hook(failure)
        return SliceResult(Outcome.CANCELLED, job) if job else self._lost()

    def _park(self, error: Park) -> SliceResult:
        facts = describe(error)
        facts = replace(facts, error_class=ErrorClass.TERMINAL, code=facts.code or "parked")
        try:
            self._persist(self._write_progress)
            job = self._persist(
                lambda: lifecycle.fail(self.kind, self.job.id, self.lease.epoch, facts, parked=True)
            )
        except HookFailed as failure:
            return self._release_after_hook(failure)
        return SliceResult(Outcome.FAILED, job, error) if job else self._lost()

    def _refuse(self, code: str, sentence: str) -> SliceResult:
        """A mistake in the program, which repeating does not mend, whatever the kind says of errors."""
        error = UnrecoverableError(sentence, code=code)
        return self._record(error, describe(error))

    def _fail(self, error: BaseException) -> SliceResult:
        return self._record(error, replace(describe(error), error_class=kinds.classify(self.kind, error)))

    def _record(self, error: BaseException, facts: ErrorFacts) -> SliceResult:
        job = self._persist(lambda: self._record_failure(facts))
        if job is None:
            return self._lost()
        self.let_go = True
        log(
            "slice_failed",
            job,
            level=logging.WARNING,
            error_type=facts.type,
            failures=job.consecutive_failures,
            verdict=job.verdict,
            error=error,
        )
        if job.cancel_requested_at is not None:
            # The statement that recorded the failure has seen the request.
            self.ctx.forget_unwritten()
            return replace(self._cancel(), error=error)
        if job.verdict is not None:
            return replace(self._decide(job), error=error)
        return SliceResult(Outcome.RETRY, job, error)

    def _record_failure(self, facts: ErrorFacts) -> Job | None:
        retry = self.kind.retry
        with database.transaction(self.ctx.alias, what="fail"):
            job = store.fail_slice(
                self.lease,
                facts,
                max_failures=retry.failures,
                first_delay=retry.first_delay,
                longest_delay=retry.longest_delay,
                exponential=retry.backoff == "exponential",
                counts=self.ctx.unwritten(),
            )
            if job is not None:
                store.add_event(
                    job,
                    "slice_failed",
                    owner=self.lease.owner,
                    code=facts.code or "",
                    error_type=facts.type,
                    message=facts.message,
                    traceback=facts.traceback,
                    data={
                        "class": str(facts.error_class),
                        "failures": job.consecutive_failures,
                        "seconds": store.seconds_held(job),
                    },
                )
        return job

    def _decide(self, job: Job) -> SliceResult:
        """The row carries a verdict: tell the domain. The work is never run again for it."""
        try:
            failed = self._persist(lambda: lifecycle.fail(self.kind, job.id, job.lease_epoch))
        except HookFailed as failure:
            return self._release_after_hook(failure)
        if failed is None:
            return SliceResult(Outcome.RETRY, job) if self.let_go else self._lost()
        return SliceResult(Outcome.FAILED, failed)

    def _release_after_hook(self, failure: HookFailed) -> SliceResult:
        """The hook is tried again, ever later: each try leaves a line in the job's history."""
        first, failed = self.kind.retry.first_delay, self.job.mirror_attempts
        delay = first if failed < 1 else min(max(first, 1.0) * 2.0 ** min(failed, 16), LONGEST_HOOK_DELAY)
        return self._release(failure.error, delay)

    def _release(self, error: BaseException, delay: float | None = None) -> SliceResult:
        """Hand the row back for a retry that counts nothing, unless that has been done."""
        if self.let_go:
            return SliceResult(Outcome.RETRY, self._row(), error)
        try:
            self._persist(self._write_progress)
            wait = self.kind.retry.first_delay if delay is None else delay
            job = self._persist(partial(store.release_lease, self.lease, wait))
        except Exception as second:
            log("release_failed", self.job, level=logging.ERROR, error=second)
            return SliceResult(Outcome.RETRY, None, error)
        return SliceResult(Outcome.RETRY, job, error) if job else self._lost()

    def _write_progress(self) -> None:
        """For endings whose own statement takes no counts."""
        counts = self.ctx.unwritten()
        if counts != store.NO_COUNTS:
            store.set_progress(self.lease, counts)
            self.ctx.forget_unwritten()

    def _lost(self) -> SliceResult:
        job = self._row() if self.retried else None
        if job and job.lease_epoch == self.lease.epoch and job.lease_owner is None:
            # It had been written, and only the answer was lost.
            return SliceResult(_LEFT_AS[Status(job.status)], job)
        self.hold.observe(lost=True)
        log("lease_lost", self.job, level=logging.WARNING, owner=self.lease.owner, epoch=self.lease.epoch)
        signals.send(signals.job_lease_lost, self.job)
        return SliceResult(Outcome.LEASE_LOST)

    def _row(self) -> Job | None:
        try:
            return store.get(self.job.id)
        except Exception:
            return None

    @property
    def _interrupted(self) -> bool:
        return self.hold.paused or (self.draining is not None and self.draining.is_set())

    def _persist(self, write: Callable[[], Returned]) -> Returned:
        """Write the outcome, again and again through an outage: finished work is not failed work.

        It ends when the database answers: the row is written, or it is somebody else's.
        """
        wait = FIRST_WAIT_SECONDS
        while True:
            before = self._connection()
            try:
                return write()
            except (DatabaseError, InterfaceError) as error:
                if not (database.is_outage(error) or database.is_conflict(error)):
                    raise
                # A connection that was cut before, unnoticed, is worth a second try in any case.
                cut_off = (
                    database.clear(self.ctx.alias) is Leftover.BROKEN or self._connection() is not before
                )
                if not self.patient and (self.retried or not cut_off):
                    raise
                if not self.retried:
                    log(
                        "outcome_waits",
                        self.job,
                        level=logging.WARNING,
                        problem=f"{type(error).__name__}: {error}"[:200],
                    )
                self.retried = True
            time.sleep(wait)
            wait = min(wait * 2, LONGEST_WAIT_SECONDS)

    def _connection(self) -> Any:
        """The driver's own connection: another one after a cut, None where there is none."""
        return self.wrapper.connection


def _is_as_started(job: Job) -> bool:
    if job.input_text is None:
        return job.input_sha256 is None
    return job.is_authentic


def _count(field: str, value: object, *, negative: bool = False) -> int:
    if (
        isinstance(value, bool)
        or not isinstance(value, int)
        or (value < 0 and not negative)
        or value >= 2**63
    ):
        raise InvalidInput(field, value, "is not a count", "Give a whole number.")
    return value


@lru_cache(maxsize=1000)
def _is_async(step: Any) -> bool:
    return inspect.iscoroutinefunction(step)


def _in_event_loop() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


def _refuse_event_loop(what: str) -> None:
    if _in_event_loop():
        raise SynchronousOnlyOperation(
            f"{what} cannot be used in a coroutine: write `await ctx.run_fenced(function, *args)`."
        )
