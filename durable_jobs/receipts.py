"""Work that is owned by hand: a domain change, its receipt and the job's end commit together, or not at all.

For work that runs in the caller's own thread, under a lease that the caller holds: `begin` or `claim` it, then
`complete_atomically` or `finalize_atomically` it; `retry_atomically` begins a new attempt at what has ended.
Each opens a transaction of its own on the jobs' database and refuses a borrowed one; every wait for a lock in
it ends with the caller's deadline. Jobs made here wait in the reserved queue `manual`, which workers and the
reconciler leave alone.

The checks are made at fixed points; nothing interrupts running code. Callbacks are trusted: they use the jobs'
database, end no transaction and have no effects outside of it.
"""

from __future__ import annotations

import inspect
import json
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Final, Literal, NamedTuple
from uuid import UUID, uuid4

from django.core.serializers.json import DjangoJSONEncoder
from django.db import transaction as django_transaction

from durable_jobs import bounded, database, jsontext, kinds, lifecycle, signals, store
from durable_jobs.bounded import Bounded
from durable_jobs.conf import MANUAL_QUEUE, config
from durable_jobs.exceptions import (
    Busy,
    DeadlineExceeded,
    ErrorClass,
    ErrorFacts,
    IdempotencyConflict,
    InvalidInput,
    LeaseLostError,
    LockKeyHeld,
    NotReclaimable,
    ScopeMismatch,
    clean,
    cut,
    describe,
    plain_text,
)
from durable_jobs.logs import log
from durable_jobs.models import Job, Scope, Status, as_uuid, note_diagnostic, uuid7
from durable_jobs.store import Image, Lease, NewJob

__all__ = [
    "AttemptOutcome",
    "Begun",
    "ExecutionContext",
    "Fence",
    "Finalized",
    "Limits",
    "PendingFinalization",
    "Submission",
    "assert_write_fence",
    "begin",
    "claim",
    "complete_atomically",
    "finalize_atomically",
    "find_submission",
    "retry_atomically",
]

LEASE_SECONDS: Final = 30.0
LONGEST_LEASE: Final = 86_400.0
LARGEST_EPOCH: Final = 2**63 - 1
LARGEST_ATTEMPTS: Final = 2**31 - 1
MESSAGE_LENGTH: Final = 10_000

Mutation = Callable[["ExecutionContext"], str]
"""Changes the project's rows and returns the receipt: a text of JSON."""
Retain = Callable[[str], str]
"""Gets the job's whole row before the retry, as JSON, and keeps it; returns a receipt: a text of JSON."""


@dataclass(frozen=True)
class Submission:
    """What a job is to do, byte for byte, and the key that makes a repeat of it the same job."""

    idempotency_key: str
    input: str
    """A text of JSON. It is stored and hashed as it is: other spacing or order of keys is another input."""

    @classmethod
    def of(cls, idempotency_key: str, value: Any) -> Submission:
        """With the canonical text of a JSON value (sorted keys, no spaces), as `service.start` stores it."""
        return cls(idempotency_key, jsontext.encode(value, field="input", limit=config.MAX_INPUT_BYTES))


@dataclass(frozen=True)
class Limits:
    """How much a context may read: items and bytes in all; None is unlimited."""

    items: int | None = None
    bytes: int | None = None

    def __post_init__(self) -> None:
        for name, most in (("items", self.items), ("bytes", self.bytes)):
            if most is not None:
                _amount(f"limits.{name}", most)


class _Used:
    def __init__(self) -> None:
        self.guard = threading.Lock()
        self.items = self.bytes = 0


@dataclass(frozen=True)
class Fence:
    """The captured right to write: a lease, the hash of the job's input, and which database holds the row."""

    lease: Lease
    input_sha256: str
    alias: str
    vendor: str
    database: str

    @classmethod
    def capture(cls, lease: Lease) -> Fence:
        """Read what the lease's job is now. Raises `LeaseLostError` when the lease is not the row's."""
        using = database.alias()
        image = store.image(lease.job_id)
        reason = "there is no such job" if image is None else _lost(image, lease)
        if image is None or reason:
            raise LeaseLostError(lease.job_id, lease.owner, lease.epoch, reason)
        vendor = database.connection(using).vendor
        return cls(lease, image.job.input_sha256 or "", using, vendor, image.database)


@dataclass(frozen=True)
class ExecutionContext:
    """For whom, for what and until when one call works. Frozen: authority is carried, never ambient.

    `deadline` is a time of this process's `time.monotonic()` and is never renewed; `math.inf` is none. `stop` asks the call to end
    without a commit. `fence` is there once a lease is held (`with_fence`). `limits` is what may be read.
    """

    scope: Scope
    actor: str
    kind: str
    idempotency_key: str | None
    deadline: float
    stop: threading.Event = field(default_factory=threading.Event)
    fence: Fence | None = None
    limits: Limits = Limits()
    _used: _Used = field(default_factory=_Used, repr=False, compare=False)

    def __post_init__(self) -> None:
        if not isinstance(self.scope, Scope):
            raise InvalidInput("scope", self.scope, "is not a Scope", "Pass Scope(tenant, organization).")
        plain_text("scope.tenant", self.scope.tenant, 64)
        if self.scope.organization is not None:
            plain_text("scope.organization", self.scope.organization, 64)
        plain_text("kind", self.kind, 200)
        if self.idempotency_key is not None:
            plain_text("idempotency_key", self.idempotency_key, 200)
        if not isinstance(self.actor, str):
            raise InvalidInput("actor", self.actor, "is not a text", "Say who acts, in words.")
        number = isinstance(self.deadline, int | float) and not isinstance(self.deadline, bool)
        if not number or self.deadline != self.deadline:
            raise InvalidInput(
                "deadline", self.deadline, "is not a time", "Pass time.monotonic() plus the seconds allowed."
            )
        if not callable(getattr(self.stop, "is_set", None)):
            raise InvalidInput("stop", self.stop, "is not an event", "Pass a threading.Event.")
        if not isinstance(self.fence, Fence | None):
            raise InvalidInput("fence", self.fence, "is not a Fence", "Use ctx.with_fence(lease).")
        if not isinstance(self.limits, Limits):
            raise InvalidInput("limits", self.limits, "is not Limits", "Pass Limits(items, bytes).")

    def check_active(self) -> None:
        """Raise `DeadlineExceeded` past the deadline, `LeaseLostError` when the caller was asked to stop."""
        if time.monotonic() >= self.deadline:
            raise DeadlineExceeded(self.kind)
        if self.stop.is_set():
            lease = self.fence.lease if self.fence else None
            raise LeaseLostError(
                lease.job_id if lease else None,
                lease.owner if lease else None,
                lease.epoch if lease else None,
                "the caller was asked to stop",
            )

    def consume(self, *, items: int = 0, bytes: int = 0) -> None:
        """Charge what is about to be read; raises `InvalidInput` beyond `limits`, and charges nothing then."""
        _amount("items", items)
        _amount("bytes", bytes)
        with self._used.guard:
            for name, used, more, most in (
                ("items", self._used.items, items, self.limits.items),
                ("bytes", self._used.bytes, bytes, self.limits.bytes),
            ):
                if most is not None and used + more > most:
                    raise InvalidInput(
                        f"limits.{name}",
                        most,
                        f"is used up: {used:,} and {more:,} more",
                        "Allow more, or ask for less.",
                    )
            self._used.items += items
            self._used.bytes += bytes

    def with_fence(self, lease: Lease) -> ExecutionContext:
        """The same context under this lease, as the row carries it now; raises `LeaseLostError` if it does not."""
        return replace(self, fence=Fence.capture(lease))


class Begun(NamedTuple):
    """A job, and the context that may write it: None when an identical submission was there already."""

    job: Job
    ctx: ExecutionContext | None


class Granted(NamedTuple):
    """A job, and the lease on it: None when an identical submission was there already."""

    job: Job
    lease: Lease | None


@dataclass(frozen=True)
class AttemptOutcome:
    """What became of an attempt, by somebody's word: that a lease ran out says nothing."""

    status: Literal["failed", "cancelled"]
    message: str


@dataclass(frozen=True)
class Finalized:
    """The outcome and its receipt are committed. `cleanup_error`: what went wrong after that."""

    receipt: str
    elapsed: float
    deadline_exceeded: bool
    cleanup_error: str | None = None


@dataclass(frozen=True)
class PendingFinalization:
    """Nothing was recorded; status, lease and checkpoint are as they were. `reason` says why."""

    reason: str
    elapsed: float
    deadline_exceeded: bool
    code: str | None = None


class Capacity(NamedTuple):
    """At most `most` running jobs with an owner: of one kind (all its names), or of the scope's managers."""

    names: tuple[str, ...] | None
    scope: Scope
    most: int

    @property
    def lock(self) -> str:
        return store.capacity_lock(self.names[0] if self.names else "", self.scope)


# --- the fence ------------------------------------------------------------------------------------------


def assert_write_fence(ctx: ExecutionContext, *, using: str | None = None) -> None:
    """Raise `LeaseLostError` unless the captured lease still allows a write, as the open transaction sees it.

    For use inside the domain's own transaction on `using` (default: the jobs' database), before its writes and
    again after them. It must be all of: the context active; the same job, running, owner and epoch; the lease
    unexpired; no cancel requested; scope, kind and key equal; the stored hash the captured one, and that of
    the stored bytes; the very database that was captured, read through its real table. One query; it opens no
    transaction, writes nothing and grants nothing. Without a fence only the activity is checked.
    """
    ctx.check_active()
    if ctx.fence is not None:
        _require(ctx, ctx.fence, _image_under(ctx.fence, using))


def _image_under(fence: Fence, using: str | None = None) -> Image:
    """The row on this connection, if that leads to the captured database."""
    alias = using or database.alias()
    lease = fence.lease
    lost = partial(LeaseLostError, lease.job_id, lease.owner, lease.epoch)
    if alias != fence.alias or database.connection(alias).vendor != fence.vendor:
        raise lost("the write goes to another database")
    image = store.image(lease.job_id, alias)
    if image is None:
        raise lost("the job is gone")
    if image.database != fence.database:
        raise lost("the write goes to another database")
    if image.temporary:
        raise lost("a temporary table hides the jobs")
    return image


def _require(ctx: ExecutionContext, fence: Fence, image: Image, *, bookkeeping: bool = False) -> None:
    """The facts of A36, one after the other; `bookkeeping` may go on after a cancel."""
    job, lease = image.job, fence.lease
    reason = _lost(image, lease)
    if not reason and image.requested and not bookkeeping:
        reason = "a cancel was requested"
    if not reason:
        reason = _foreign(ctx, job)
    if not reason and job.input_sha256 != (fence.input_sha256 or None):
        reason = "the hash of the input is another one"
    if not reason and (job.input_text is not None or job.input_sha256 is not None) and not job.is_authentic:
        reason = "the stored input does not match its hash"
    if reason:
        raise LeaseLostError(lease.job_id, lease.owner, lease.epoch, reason)


def _lost(image: Image, lease: Lease) -> str:
    job = image.job
    if job.status != Status.RUNNING:
        return f"the job is {job.status}"
    if (job.lease_owner, job.lease_epoch) != (lease.owner, lease.epoch):
        return "another attempt owns the job"
    return "" if image.current else "it has run out"


def _foreign(ctx: ExecutionContext, job: Job) -> str:
    for name, given, own in _identity(ctx, job):
        if given != own:
            return f"the context's {name} is not the job's"
    return ""


def _identity(ctx: ExecutionContext, job: Job) -> Sequence[tuple[str, Any, Any]]:
    return (
        ("scope", ctx.scope, job.scope),
        ("kind", ctx.kind, job.kind),
        ("idempotency_key", ctx.idempotency_key, job.idempotency_key),
    )


def require_identity(ctx: ExecutionContext, job: Job) -> None:
    """Raise `ScopeMismatch` unless scope, kind and key of the context are the job's."""
    for name, given, own in _identity(ctx, job):
        if given != own:
            raise ScopeMismatch(name, given, job.id)


# --- the three verbs ------------------------------------------------------------------------------------


def complete_atomically(ctx: ExecutionContext, mutation: Mutation) -> str:
    """Commit a domain change, its receipt and the job's completion together; gives the receipt's exact text.

    `mutation(ctx)` changes the project's rows on the jobs' database and returns its receipt, a text of JSON
    that becomes the job's result. It is refused, and all of it rolled back, when it is no plain function,
    returns anything else, changes the job's row or lets the lease run out; and when a cancel was requested
    before the commit, the caller was asked to stop, or the deadline has passed.

    Raises `LeaseLostError`, `InvalidInput`, `DeadlineExceeded`, `TransactionOwned`, `LockPolicyConflict`, and
    whatever the mutation or a hook of a registered kind raises.
    """
    ctx.check_active()
    fence = _required_fence(ctx)
    _refuse_async("mutation", mutation)
    with _transaction(ctx, "complete_atomically", fence.lease.job_id) as unit:
        _lock(fence.lease)
        before = _image_under(fence)
        _require(ctx, fence, before)
        receipt = _receipt(mutation(ctx))
        unit.require_open()
        ctx.check_active()
        _require_untouched(ctx, fence, before)
        job = store.complete_owned(fence.lease, receipt, late=False)
        if job is None:
            raise _refused(fence, "it ran out, or a cancel was requested")
        _conclude(ctx, job, "job_completed")
        _verify_end(fence, Status.COMPLETED, receipt, None)
    return receipt


def finalize_atomically(
    ctx: ExecutionContext, outcome: AttemptOutcome, bookkeeping: Mutation
) -> Finalized | PendingFinalization:
    """Record that an attempt failed or was cancelled, with its receipt. Never raises.

    `bookkeeping(ctx)` writes metadata only and returns a receipt, a text of JSON that becomes the job's result;
    the outcome's message becomes its error. It works after a stop or a cancel, yet needs the unexpired lease,
    scope, kind, key and hash. `cancelled` needs a recorded request or a context that was asked to stop. When
    anything is refused, nothing is changed; past the deadline the database is not even asked.
    """
    started = time.monotonic()
    try:
        receipt, cleanup_error = _finalize(ctx, outcome, bookkeeping)
    except (KeyboardInterrupt, SystemExit, GeneratorExit):
        raise
    except BaseException as error:
        facts, late = describe(error), time.monotonic()
        exceeded = isinstance(ctx, ExecutionContext) and late >= ctx.deadline
        return PendingFinalization(
            f"{type(error).__name__}: {facts.message}", late - started, exceeded, facts.code
        )
    now = time.monotonic()
    return Finalized(receipt, now - started, now >= ctx.deadline, cleanup_error)


def _finalize(
    ctx: ExecutionContext, outcome: AttemptOutcome, bookkeeping: Mutation
) -> tuple[str, str | None]:
    status = getattr(outcome, "status", None)
    if status not in (Status.FAILED, Status.CANCELLED):
        raise InvalidInput(
            "outcome.status", status, "is no outcome of an attempt", "Use failed or cancelled."
        )
    message = cut(plain_text("outcome.message", outcome.message, 10**9), MESSAGE_LENGTH)
    fence = _required_fence(ctx)
    _refuse_async("bookkeeping", bookkeeping)
    with _transaction(ctx, "finalize_atomically", fence.lease.job_id, active=False) as unit:
        _lock(fence.lease)
        before = _image_under(fence)
        _require(ctx, fence, before, bookkeeping=True)
        if status == Status.CANCELLED and not (before.requested or ctx.stop.is_set()):
            raise InvalidInput(
                "outcome.status", status, "was neither requested nor observed", "Request the cancel first."
            )
        receipt = _receipt(bookkeeping(ctx))
        unit.require_open()
        _require_untouched(ctx, fence, before, bookkeeping=True)
        job = _write_outcome(fence.lease, status, message, receipt, stopped=ctx.stop.is_set())
        if job is None:
            raise _refused(fence, "it ran out")
        _conclude(ctx, job, f"job_{status}")
        _verify_end(fence, status, receipt, message)
    return receipt, unit.cleanup_error


def _write_outcome(lease: Lease, status: str, message: str, receipt: str, *, stopped: bool) -> Job | None:
    if status == Status.CANCELLED:
        return store.cancel_owned(lease, stopped=stopped, message=message, result=receipt)
    facts = ErrorFacts(ErrorClass.TERMINAL, None, "", message, "")
    return store.fail_owned(lease, facts, receipt)


def retry_atomically(
    job_id: UUID | str,
    ctx: ExecutionContext,
    retain: Retain,
    *,
    owner: str | None = None,
    lease_seconds: float = LEASE_SECONDS,
    max_running: int | None = None,
) -> Lease:
    """Begin a new attempt at a job that failed, was cancelled, or whose lease ran out, once its past is kept.

    `retain(image)` gets the job's whole row as JSON before anything is changed, keeps it where the project
    keeps its history, and returns a receipt, a text of JSON. It must leave the job's row as it is. Then the job
    is claimed: epoch and attempts grow, its outcome and a cancel request are cleared, checkpoint and input stay.
    No domain work is applied again. A kind's `on_redrive` runs in the same transaction. `max_running` bounds
    the running jobs of the kind in the scope, besides the kind's own limit.

    Raises `InvalidInput` (a context with a fence, changed input, no capacity), `NotReclaimable`,
    `ScopeMismatch`, `LockKeyHeld`, `LeaseLostError`, `DeadlineExceeded`, `TransactionOwned`.
    """
    ctx.check_active()
    if ctx.fence is not None:
        raise InvalidInput(
            "ctx.fence", "a fence", "belongs to an earlier attempt", "Pass a fresh context without a fence."
        )
    wanted, ttl = job_uuid(job_id), lease_length(lease_seconds)
    new_owner = make_owner("receipts") if owner is None else plain_text("owner", owner, 200)
    capacity = capacities(ctx.kind, ctx.scope, max_running)
    _refuse_async("retain", retain)
    with _transaction(ctx, "retry_atomically", wanted) as unit:
        for one in capacity:
            store.wait_lock(one.lock)
        store.lock_row(wanted)
        before = store.image(wanted)
        _require_retryable(ctx, wanted, before)
        assert before is not None
        require_room(capacity, except_id=wanted)
        receipt = _receipt(retain(_image_text(before.job)))
        unit.require_open()
        ctx.check_active()
        now = store.image(wanted)
        if now is None or now.row != before.row:
            raise LeaseLostError(wanted, None, None, "the callback changed the job")
        job = store.retry_claim(wanted, before.job.lease_epoch, new_owner, ttl)
        if isinstance(job, store.Answer):
            raise lock_held(before.job)
        if job is None:
            raise NotReclaimable(wanted, "its state changed")
        lifecycle.reopen(kinds.find(job.kind), job)
        store.add_event(
            job,
            "retried",
            owner=new_owner,
            actor=clean(ctx.actor)[:200],
            data={"receipt": receipt, "before": json.loads(_image_text(before.job))},
        )
        lease = Lease(wanted, new_owner, job.lease_epoch, ttl)
        after = store.image(wanted)
        if after is None or _lost(after, lease) or after.requested or after.temporary:
            raise LeaseLostError(wanted, new_owner, job.lease_epoch, "the new attempt is not the row's")
    return lease


def _require_retryable(ctx: ExecutionContext, job_id: UUID, before: Image | None) -> None:
    """State, identity, input, counters: in this order."""
    job = before.job if before else None
    expired = before is not None and job is not None and (
        job.status == Status.RUNNING and job.lease_owner is not None and not before.current
    )  # fmt: skip
    if job is None or before is None:
        raise NotReclaimable(job_id, "it is unknown here")
    if job.status not in (Status.FAILED, Status.CANCELLED) and not expired:
        raise NotReclaimable(job_id, f"it is {job.status}{' and owned' if job.lease_owner else ''}")
    require_identity(ctx, job)
    if not job.is_authentic:
        raise InvalidInput(
            "input", str(job.id), "is not the one that the job was made with", "Start a new job instead."
        )
    require_counters(job)


# --- beginning and claiming -----------------------------------------------------------------------------


def begin(
    ctx: ExecutionContext,
    input: str | None = None,
    *,
    lease_seconds: float = LEASE_SECONDS,
    max_running: int | None = None,
) -> Begun:
    """Make a running job that the caller owns, and give the context that may write it.

    `input` is a text of JSON, stored byte for byte; it needs the context's `idempotency_key`. The same key with
    the same bytes gives the earlier job, in whatever state, and no context; with other bytes it is refused with
    `IdempotencyConflict`. Without input and key every call makes a new job, which can be ended but never
    retried. Nothing renews the lease: end the job within it.
    """
    submission = None
    if input is not None or ctx.idempotency_key is not None:
        # One without the other is refused where both are checked.
        submission = Submission(ctx.idempotency_key, input)  # type: ignore[arg-type]
    granted = insert(
        ctx.kind, submission, scope=ctx.scope, owner=make_owner("receipts"), lease_seconds=lease_seconds,
        limits=capacities(ctx.kind, ctx.scope, max_running), ctx=ctx, what="begin",
    )  # fmt: skip
    return Begun(granted.job, ctx.with_fence(granted.lease) if granted.lease else None)


def claim(
    job_id: UUID | str,
    ctx: ExecutionContext,
    *,
    lease_seconds: float = LEASE_SECONDS,
    max_running: int | None = None,
) -> ExecutionContext:
    """Own a held job, or one whose lease ran out, and give the context that may write it.

    Keeps checkpoint, progress and a cancel request. Raises `NotReclaimable` for anything else, and for a job
    whose input was changed.
    """
    lease = take(
        job_id, scope=ctx.scope, owner=make_owner("receipts"), lease_seconds=lease_seconds,
        limits=capacities(ctx.kind, ctx.scope, max_running), ctx=ctx, what="claim",
    )  # fmt: skip
    return ctx.with_fence(lease)


def find_submission(kind: str, idempotency_key: str, scope: Scope) -> Job | None:
    """The job that this key made, in whatever state; claims nothing and compares no input."""
    return store.by_idempotency_key(kind, idempotency_key, scope)


def insert(
    kind: str,
    submission: Submission | None,
    *,
    scope: Scope,
    owner: str,
    lease_seconds: float,
    limits: Sequence[Capacity] = (),
    ctx: ExecutionContext | None = None,
    what: str = "start_job",
) -> Granted:
    """→ running and owned; or the earlier job of an identical submission, without a lease.

    Look-up, capacity and insert are one transaction. A repeat is recognised before capacity is judged.
    """
    new, ttl = new_job(kind, submission, scope, Status.RUNNING, ctx), lease_length(lease_seconds)
    with write(ctx, what, new.id):
        for one in limits:
            store.wait_lock(one.lock)
        earlier = _earlier(new)
        if earlier is not None:
            return Granted(earlier, None)
        require_room(limits)
        job = store.insert_running(new, owner, ttl)
        if job is None:
            earlier = _earlier(new)
            if earlier is None:
                raise Busy(new.id)
            return Granted(earlier, None)
        _announce(job)
    return Granted(job, Lease(job.id, owner, job.lease_epoch, ttl))


def defer(
    kind: str, submission: Submission | None, *, scope: Scope, ctx: ExecutionContext | None = None
) -> Job:
    """→ held: nothing starts it by itself. Or the earlier job of an identical submission, as it is.

    Without a context it joins the caller's transaction. No capacity is needed.
    """
    if submission is None:
        raise InvalidInput("submission", None, "is missing", "Held work needs a key and an input.")
    new = new_job(kind, submission, scope, Status.HELD, ctx)
    with write(ctx, "defer_job", new.id) if ctx else database.joined(database.alias()):
        job = store.insert(new)
        if job is None:
            earlier = _earlier(new)
            if earlier is None:
                raise Busy(new.id)
            return earlier
        _announce(job)
    return job


def take(
    job_id: UUID | str,
    *,
    scope: Scope,
    owner: str,
    lease_seconds: float,
    limits: Sequence[Capacity] = (),
    ctx: ExecutionContext | None = None,
    what: str = "resume_job",
) -> Lease:
    """held and authentic, or running with a lease that ran out → running under a new lease."""
    wanted, ttl = job_uuid(job_id), lease_length(lease_seconds)
    if ctx is not None:
        ctx.check_active()
    with write(ctx, what, wanted):
        for one in limits:
            store.wait_lock(one.lock)
        before = store.image(wanted)
        require_claimable(wanted, before, scope)
        assert before is not None
        if ctx is not None:
            require_identity(ctx, before.job)
        own = () if any(one.names for one in limits) else capacities(before.job.kind, scope, None)
        for one in own:
            store.wait_lock(one.lock)
        require_room([*limits, *own], except_id=wanted)
        require_counters(before.job)
        job = store.claim_held(wanted, scope=scope, owner=owner, ttl=ttl)
        if isinstance(job, store.Answer):
            raise lock_held(before.job)
        if job is None:
            raise NotReclaimable(wanted, "somebody else has it just now")
    return Lease(wanted, owner, job.lease_epoch, ttl)


def require_claimable(job_id: UUID, before: Image | None, scope: Scope) -> None:
    """Raise `NotReclaimable` unless the job is held, or owned by a lease that ran out, with authentic input."""
    job = before.job if before is not None and before.job.scope == scope else None
    if before is None or job is None:
        raise NotReclaimable(job_id, "it is unknown here")
    owned = job.status == Status.RUNNING and job.lease_owner is not None
    if job.status != Status.HELD and not (owned and not before.current):
        raise NotReclaimable(job_id, f"it is {job.status}{' and owned' if owned else ''}")
    if job.status == Status.HELD and job.diagnostic:
        raise NotReclaimable(job_id, job.diagnostic.rstrip("."))
    if job.verdict is not None:
        raise NotReclaimable(job_id, "it was decided that it has failed")
    if job.input_sha256 is not None and not job.is_authentic:
        raise NotReclaimable(job_id, "its input is missing or was changed")


def require_room(limits: Sequence[Capacity], *, except_id: UUID | None = None) -> None:
    """Raise `InvalidInput` when one more running job would be too many; `except_id` is not counted."""
    for names, scope, most in limits:
        if names is None:
            running = store.running_by_hand(scope, except_id=except_id)
        else:
            running = store.running_of_kind(names, scope, except_id=except_id)
        if running >= most:
            raise InvalidInput(
                "max_jobs" if names is None else "max_running", most, f"is reached: {running} jobs run",
                "Wait for one to end, or recover those whose lease ran out.",
            )  # fmt: skip


def require_counters(job: Job) -> None:
    """Raise `InvalidInput` when epoch or attempts cannot grow any more."""
    if job.lease_epoch >= LARGEST_EPOCH or job.attempts >= LARGEST_ATTEMPTS:
        raise InvalidInput("attempts", job.attempts, "cannot grow any more", "Start a new job instead.")


def capacities(kind: str, scope: Scope, max_running: int | None) -> tuple[Capacity, ...]:
    """The limit on running jobs of a kind: the lesser of the given one and the registered kind's own."""
    given = None if max_running is None else limit("max_running", max_running)
    known = kinds.find(kind)
    own = None if known is None else known.max_running
    most = min((bound for bound in (given, own) if bound is not None), default=None)
    if most is None:
        return ()
    names = known.all_names if known is not None else (kind,)
    return (Capacity(names, scope, most),)


def new_job(
    kind: str, submission: Submission | None, scope: Scope, status: Status, ctx: ExecutionContext | None
) -> NewJob:
    """What `store` inserts, checked before any transaction."""
    key = input = None
    plain_text("kind", kind, 200)
    if submission is not None:
        key = plain_text("idempotency_key", submission.idempotency_key, 200)
        input = submission.input
        jsontext.verify(input, field="input", limit=config.MAX_INPUT_BYTES)
    if ctx is not None:
        ctx.check_active()
        for name, given, own in (
            ("scope", ctx.scope, scope), ("kind", ctx.kind, kind), ("idempotency_key", ctx.idempotency_key, key),
        ):  # fmt: skip
            if given != own:
                raise ScopeMismatch(name, given)
    return NewJob(
        id=uuid7(),
        kind=kind,
        status=status.value,
        tenant=scope.tenant,
        organization=scope.organization,
        queue=MANUAL_QUEUE,
        input=input,
        input_sha256=None if input is None else jsontext.sha256(input),
        idempotency_key=key,
    )


def _earlier(new: NewJob) -> Job | None:
    """The job that an identical submission made; `IdempotencyConflict` for another input under its key."""
    if new.idempotency_key is None:
        return None
    earlier = store.by_idempotency_key(new.kind, new.idempotency_key, Scope(new.tenant, new.organization))
    if earlier is None:
        return None
    # A row that has kept the hash alone is the same submission; its bytes are not made up for.
    same = earlier.input_sha256 == new.input_sha256 and earlier.input_text in (None, new.input)
    if not same:
        raise IdempotencyConflict(new.idempotency_key, earlier.id)
    return earlier


def _announce(job: Job) -> None:
    django_transaction.on_commit(
        partial(signals.send, signals.job_created, job), using=database.alias(), robust=True
    )
    log("job_created", job, queue=job.queue_name)


# --- transactions ---------------------------------------------------------------------------------------


@contextmanager
def _transaction(ctx: ExecutionContext, what: str, job_id: UUID, *, active: bool = True) -> Iterator[Bounded]:
    """Our own transaction within the context's deadline; `active` asks again, last of all, whether to commit."""
    with bounded.transaction(
        database.alias(), deadline=ctx.deadline, what=what, before_commit=ctx.check_active if active else None
    ) as unit:
        yield unit
    if unit.cleanup_error:
        note_diagnostic(job_id, f"Committed, but {unit.cleanup_error}")


def write(ctx: ExecutionContext | None, what: str, job_id: UUID) -> AbstractContextManager[Any]:
    """A transaction of our own: within the context's deadline, or as long as it takes without one."""
    return _unbounded(what) if ctx is None else _checked(ctx, what, job_id)


@contextmanager
def _unbounded(what: str) -> Iterator[None]:
    using = database.alias()
    bounded.refuse_open(using, what)
    with database.transaction(using, what=what) as connection:
        database.see_every_commit(connection)
        yield


@contextmanager
def _checked(ctx: ExecutionContext, what: str, job_id: UUID) -> Iterator[Bounded]:
    ctx.check_active()
    with _transaction(ctx, what, job_id) as unit:
        ctx.check_active()
        yield unit


# --- inside ---------------------------------------------------------------------------------------------


def _lock(lease: Lease) -> None:
    if not store.lock_row(lease.job_id):
        raise LeaseLostError(lease.job_id, lease.owner, lease.epoch, "the job is gone")


def _require_untouched(
    ctx: ExecutionContext, fence: Fence, before: Image, *, bookkeeping: bool = False
) -> None:
    """The whole fence again, and the row as it was: a callback grants itself nothing."""
    after = _image_under(fence)
    _require(ctx, fence, after, bookkeeping=bookkeeping)
    if after.row != before.row:
        raise _refused(fence, "the callback changed the job")


def _conclude(ctx: ExecutionContext, job: Job, event: str) -> None:
    lifecycle.conclude(kinds.find(job.kind), job, event)
    store.add_event(job, "receipt", actor=clean(ctx.actor)[:200], message=job.status)


def _verify_end(fence: Fence, status: str, receipt: str, message: str | None) -> None:
    """Read the row once more, through the real table: it must say exactly what is about to be committed."""
    after = _image_under(fence)
    job = after.job
    late = status == Status.COMPLETED and after.requested
    said = (job.status, job.lease_epoch, job.result_text, job.error_message, job.input_sha256)
    if late or said != (status, fence.lease.epoch, receipt, message, fence.input_sha256 or None):
        raise _refused(fence, "a cancel was requested" if late else "the row does not hold the outcome")


def _refused(fence: Fence, reason: str) -> LeaseLostError:
    return LeaseLostError(fence.lease.job_id, fence.lease.owner, fence.lease.epoch, reason)


def _required_fence(ctx: ExecutionContext) -> Fence:
    if ctx.fence is None:
        raise LeaseLostError(None, None, None, "the context carries no fence")
    return ctx.fence


def _refuse_async(name: str, callback: Any) -> None:
    if not callable(callback):
        raise InvalidInput(name, callback, "cannot be called", "Pass a plain function.")
    if inspect.iscoroutinefunction(callback) or inspect.isgeneratorfunction(callback):
        raise InvalidInput(name, callback, "is not a plain function", "Do the work before it returns.")


def _receipt(value: Any) -> str:
    if inspect.iscoroutine(value):
        value.close()
    jsontext.verify(value, field="receipt", limit=config.MAX_RESULT_BYTES)
    return str.__str__(value)


def _image_text(job: Job) -> str:
    """The whole row as JSON, by column."""
    row = {column.column: getattr(job, column.attname) for column in Job._meta.concrete_fields}
    return json.dumps(row, cls=_RowEncoder, ensure_ascii=False)


class _RowEncoder(DjangoJSONEncoder):
    """Times in full: the image is evidence."""

    def default(self, o: Any) -> Any:
        return o.isoformat() if hasattr(o, "isoformat") else super().default(o)


def lock_held(job: Job) -> LockKeyHeld:
    """The refusal that names the holder, where there still is one."""
    holder = store.by_lock_key(job.lock_key or "", job.scope)
    return LockKeyHeld(job.lock_key or "", holder.id if holder else None)


def make_owner(role: str) -> str:
    """A name for one owner that nobody else ever has."""
    return f"{role}:{socket.gethostname()[:60]}:{os.getpid()}:{uuid4()}"


def job_uuid(job_id: object) -> UUID:
    """The id as a UUID; `NotReclaimable` for what is none."""
    found = as_uuid(job_id)
    if found is None:
        raise NotReclaimable(str(job_id)[:100], "that is no job's id")
    return found


def lease_length(value: object) -> float:
    """Seconds of a lease; `InvalidInput` for what is no length of time."""
    if isinstance(value, int | float) and not isinstance(value, bool) and 0 < value <= LONGEST_LEASE:
        return float(value)
    raise InvalidInput(
        "lease_seconds",
        value,
        "is not a length of time",
        f"Use more than 0 and at most {LONGEST_LEASE:,.0f} seconds.",
    )


def _amount(field: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise InvalidInput(field, value, "is not an amount", "Use a whole number, 0 or more.")


def limit(field: str, value: object) -> int:
    """A limit on running jobs; `InvalidInput` for anything but a positive whole number."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise InvalidInput(field, value, "is not a limit", "Use a whole number, 1 or more.")
    return value
