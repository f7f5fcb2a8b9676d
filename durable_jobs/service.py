"""What a project calls: start work, look at it, cancel it, run it again.

`start`, `cancel` and `redrive` join the caller's transaction: the job and the caller's rows commit or vanish
together. A refusal is a `durable_jobs.exceptions.Refusal` with a `code`; it left everything as it was, and the
caller's transaction usable. Everything reads the database that jobs are written to.
"""

from __future__ import annotations

import logging
import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from enum import Enum
from functools import partial
from typing import Any, Final, Literal, NamedTuple
from uuid import UUID

from django.db import IntegrityError, OperationalError, router, transaction
from django.db.models import Model

from durable_jobs import database, jsontext, kinds, lifecycle, reconciler, signals, store, transports
from durable_jobs.candidates import CandidatePage, CandidateQuery, candidates
from durable_jobs.conf import MANUAL_QUEUE, QUEUE_NAME, config
from durable_jobs.exceptions import (
    Busy,
    DurableJobsError,
    ForceRequired,
    HookFailed,
    IdempotencyConflict,
    InvalidInput,
    LockKeyHeld,
    NotCancellable,
    NotFound,
    NotHeld,
    NotReclaimable,
    NotRedrivable,
    NotSettleable,
    Refusal,
    RestartNotAllowed,
    plain_text,
)
from durable_jobs.kinds import Kind
from durable_jobs.logs import log
from durable_jobs.models import TERMINAL, Job, JobEvent, Scope, Status, Verdict, as_uuid, uuid7
from durable_jobs.store import NewJob

__all__ = [
    "ALL_SCOPES",
    "AllScopes",
    "CandidatePage",
    "CandidateQuery",
    "Scope",
    "Started",
    "cancel",
    "cancel_subject",
    "candidates",
    "get",
    "pause",
    "reconcile",
    "redrive",
    "release",
    "running_under",
    "settle_without_hooks",
    "start",
    "start_by",
    "start_many",
    "unpause",
]


class AllScopes(Enum):
    """Must be said: nothing here looks across scopes by default."""

    ALL_SCOPES = "all scopes"


ALL_SCOPES: Final = AllScopes.ALL_SCOPES

KEY_LENGTH: Final = 200
SCOPE_LENGTH: Final = 64
QUEUE_LENGTH: Final = 100
REASON_LENGTH: Final = 2000
OPERATION_LENGTH: Final = 64
EARLIEST_RUN: Final = datetime(2000, 1, 1, tzinfo=UTC)
LONGEST_SCHEDULE: Final = timedelta(days=3660)
LONGEST_REDRIVE_DELAY: Final = 366 * 86_400.0
CANCEL_WAIT_SECONDS: Final = 3.0
ATTEMPTS_AT_A_FREED_KEY: Final = 3
_NOT_YET: Final = UUID(int=0)
_HELD, _PENDING = Status.HELD.value, Status.PENDING.value
MANY: Final = 500
"""Rows in one statement of `start_many`."""


class Started(NamedTuple):
    """The job, and whether this call made it (False: an earlier one with the same key)."""

    job: Job
    created: bool


@dataclass(slots=True, kw_only=True)
class _Ready(NewJob):
    """A new job that nothing is to be refused of, but for its keys; `_sealed` gives it its id and its hash."""

    known: Kind
    if_locked: str


class _Part(NamedTuple):
    """What one statement of `start_many` inserts; which of the caller's rows they are."""

    numbers: Sequence[int]
    ready: Sequence[_Ready]
    new_jobs: store.NewJobs


def start(
    kind: str | type[Kind],
    input: Any = None,
    *,
    scope: Scope | None = None,
    subject: Model | None = None,
    idempotency_key: str | None = None,
    lock_key: str | None = None,
    if_locked: Literal["raise", "return"] = "raise",
    created_by: Any = None,
    priority: int = 0,
    queue: str | None = None,
    run_after: datetime | timedelta | None = None,
    hold: bool = False,
    meta: Mapping[str, Any] | None = None,
) -> Started:
    """Start a job of a registered kind.

    `input` is JSON (at most MAX_INPUT_BYTES). `subject` is the project's own saved row. `idempotency_key`: the
    same key in the scope gives the same job, in whatever status it is, and refuses another input. `lock_key`:
    at most one live job of the scope has it; `if_locked="return"` gives the holder instead of refusing.
    `priority` −100 to 100, higher first. `run_after` an aware datetime or a timedelta. `meta` labels.
    `hold=True` keeps the job until `release`: nothing starts it, and its lock key stays free.

    Joins the caller's transaction. It may wait there for another open transaction that starts the same key.
    Raises `UnknownKind`, `InvalidInput`, `IdempotencyConflict`, `LockKeyHeld`.
    """
    ready = _prepare(
        _Terms.now(),
        kind,
        input,
        scope=scope,
        subject=subject,
        idempotency_key=idempotency_key,
        lock_key=lock_key,
        if_locked=if_locked,
        created_by=created_by,
        priority=priority,
        queue=queue,
        run_after=run_after,
        hold=hold,
        meta=meta,
    )
    return _start(_sealed(ready))


def start_by(
    begin: Callable[[], Started | Job],
    *,
    kind: str | type[Kind],
    request: Any,
    scope: Scope | None = None,
    idempotency_key: str | None = None,
    created_by: Any = None,
) -> Started:
    """Start by a function that makes the project's own row and the job of this kind, together or not at all.

    The key is written on the job in the same transaction. The job's input names the row, so it cannot tell a
    repeated request from another one: `request`, JSON as an input is, is what must be the same, and the history
    keeps its hash. A repeated request gives the same job, also when both come at once; the row of the second is
    rolled back.

    Raises `UnknownKind`, `InvalidInput`, `IdempotencyConflict`, and what `begin` raises.
    """
    known, wanted, who = kinds.get(kind), _scope_of_one(scope), _actor(created_by)
    key = _key("idempotency_key", idempotency_key)
    asked = jsontext.encode(request, field="request", limit=config.MAX_INPUT_BYTES)
    facts = {"request_sha256": jsontext.sha256(asked)}
    earlier = _begun(known, key, wanted, facts)
    if earlier is not None:
        return earlier
    try:
        with database.joined(database.alias()):
            answer = begin()
            started = answer if isinstance(answer, Started) else Started(answer, True)
            if started.created:
                has_own = started.job.idempotency_key is not None
                if key is not None and not has_own and not store.set_idempotency_key(started.job.id, key):
                    raise IdempotencyConflict(key)
                store.add_event(started.job, "started", actor=who.text, actor_id=who.id, data=facts)
            return started
    except DurableJobsError:
        # The same request, sent twice at once, may have met itself: at its key, or at its job's lock.
        earlier = _begun(known, key, wanted, facts)
        if earlier is None:
            raise
        return earlier


def _begun(kind: Kind, key: str | None, scope: Scope, facts: dict[str, Any]) -> Started | None:
    """The job that this request has started before."""
    if key is None:
        return None
    found = (store.by_idempotency_key(name, key, scope) for name in kind.all_names)
    job = next((job for job in found if job is not None), None)
    if job is None:
        return None
    told = JobEvent.objects.using(database.alias()).filter(job_id=job.id, event="started").order_by("id")
    if told.values_list("data", flat=True).first() != facts:
        raise IdempotencyConflict(key, job.id)
    return Started(job, False)


def start_many(rows: Iterable[Mapping[str, Any]]) -> list[Started | DurableJobsError]:
    """Start many jobs: one answer per row, in their order; what is refused is the refusal itself.

    A row is a mapping with `kind`, perhaps `input`, and the options of `start`. It never fails as a whole for
    what a row holds. Rows are inserted sorted by key, 500 in a statement.
    """
    terms = _Terms.now()
    answers: list[Any] = []
    ready: list[_Ready] = []
    numbers: list[int] = []
    for number, row in enumerate(rows):
        try:
            one = _prepare_row(terms, row)
            answer = _under_an_old_name(_sealed(one)) if one.known.aliases else None
        except DurableJobsError as refusal:
            answers.append(refusal)
            continue
        answers.append(answer)
        if answer is None:
            ready.append(one)
            numbers.append(number)
    parts = _parts(ready, numbers)
    del ready
    while parts:
        part = parts.popleft()
        try:
            inserted = store.insert_many(part.new_jobs, parts[0].new_jobs if parts else None)
        except IntegrityError as error:
            if not _is_of_a_deleted_user(error):
                raise
            inserted = {}  # one by one, so that the others need not suffer for it
        jobs = [inserted.get(one.id) for one in part.ready]
        _announce([job for job in jobs if job is not None])
        for number, one, job in zip(part.numbers, part.ready, jobs, strict=True):
            answers[number] = _answer(one) if job is None else Started(job, True)
    return answers


def _parts(ready: list[_Ready], numbers: list[int]) -> deque[_Part]:
    """In the order of their keys; what can be done for a part while another is inserted is left for then."""
    if any(one.idempotency_key is not None or one.lock_key is not None for one in ready):
        order = sorted(range(len(ready)), key=lambda place: _lock_order(ready[place]))
        ready, numbers = [ready[place] for place in order], [numbers[place] for place in order]
    parts: deque[_Part] = deque()
    for begin in range(0, len(ready), MANY):
        part = ready[begin : begin + MANY]
        new_jobs = store.NewJobs(map(_sealed, part))
        parts.append(_Part(numbers[begin : begin + MANY], part, new_jobs))
    return parts


def get(job_id: UUID | str, *, scope: Scope | AllScopes | None = None) -> Job | None:
    """The job as it now is, or None when the scope has no such job."""
    job_uuid = as_uuid(job_id)
    job = store.get(job_uuid) if job_uuid else None
    wanted = _scope(scope)
    if job is None or (wanted is not None and job.scope != wanted):
        return None
    return job


def release(
    job_id: UUID | str, *, actor: Any = "", reason: str = "", scope: Scope | AllScopes | None = None
) -> Job:
    """Let a held job run: it is pending, due now, and takes its lock key.

    Joins the caller's transaction. Raises `NotFound`, `NotHeld`, `LockKeyHeld`, `NotReclaimable` (its input was
    changed since it was started), `Busy`.
    """
    who = _actor(actor)
    job_uuid, wanted = _required_id(job_id), _scope(scope)
    with _busy_where_locked(job_uuid), database.joined(database.alias()):
        job = store.release_held(job_uuid, scope=wanted)
        if not isinstance(job, Job):
            raise _not_released(job_id, job, get(job_uuid, scope=scope))
        store.add_event(job, "released", actor=who.text, actor_id=who.id, reason=jsontext.clean(reason))
        transports.current().publish(job)
    log("job_released", job, actor=who.text)
    return job


@contextmanager
def _busy_where_locked(job_id: UUID) -> Iterator[None]:
    """On SQLite somebody may have held the file for too long; that is no error of the database."""
    try:
        yield
    except OperationalError as error:
        if database.is_locked(error):
            raise Busy(job_id) from error
        raise


def _not_released(job_id: object, answer: store.Answer | None, now: Job | None) -> Refusal:
    if now is None:
        return NotFound(job_id)
    if answer is not None:
        holder = store.by_lock_key(now.lock_key or "", now.scope)
        return LockKeyHeld(now.lock_key or "", holder.id if holder else None)
    if now.status != Status.HELD:
        return NotHeld(now.id, now.status)
    if now.queue_name == MANUAL_QUEUE:
        return NotHeld(now.id, now.status, "no worker serves its queue; its manager resumes it")
    if now.diagnostic:
        return NotReclaimable(now.id, now.diagnostic.rstrip("."))
    return Busy(now.id)


def cancel(
    job_id: UUID | str,
    *,
    actor: Any = "",
    reason: str = "",
    operation: str | None = None,
    scope: Scope | AllScopes | None = None,
) -> Job:
    """Ask for a job's end, and give the job as it then is.

    Work that does not run ends `cancelled` at once, with its hooks; if a hook fails, the request stays and the
    reconciler settles it. Running work sees the request at its next boundary: until then its status is
    `running`. Never waits for a row that a slice has locked. `actor` is a user or a text; `operation` (at most
    64 characters) is kept in the history with the event, so that the jobs of one act can be found.
    Raises `NotFound`, `NotCancellable` (finished already), `Busy` (SQLite: the file was locked for 3 s).
    """
    who, why, operation = _actor(actor), _reason(reason), _operation(operation)
    job_uuid, wanted = _required_id(job_id), _scope(scope)
    with _busy_where_locked(job_uuid), database.joined(database.alias(), timeout=CANCEL_WAIT_SECONDS):
        how = store.request_cancel(job_uuid, scope=wanted, actor=who.text, user=who.user_id, reason=why)
        job = get(job_uuid, scope=scope)
        if job is None:
            raise NotFound(job_id)
        # A mailed request may have met a row that ended meanwhile: then it asks for nothing any more.
        if how is None or job.status in TERMINAL:
            raise NotCancellable(job.id, job.status)
        store.add_event(
            job, "cancel_requested", actor=who.text, actor_id=who.id, reason=why, operation_id=operation
        )
    log("cancel_requested", job, actor=who.text, how=how)
    if job.status == Status.RUNNING and job.lease_owner is not None:
        transports.current().hint_cancel(job)
        return job
    kind = kinds.find(job.kind)
    if kind is None and job.queue_name != MANUAL_QUEUE:
        # Its hooks are unknown here: a process that knows the kind ends it.
        return job
    try:
        ended = lifecycle.cancel_waiting(kind, job.id, actor=who.text)
    except HookFailed:
        return store.get(job.id) or job
    if ended is None:
        return store.get(job.id) or job
    transports.current().withdraw(ended)
    return ended


def cancel_subject(
    subject: Model,
    *,
    actor: Any = "",
    reason: str = "",
    operation: str | None = None,
    scope: Scope | AllScopes | None = None,
) -> list[Job]:
    """Ask for the end of every job of a saved model instance that has not ended, and give them as they then are.

    For a cancel that is made on the project's own row. A row without such a job gives an empty list. Jobs that
    end meanwhile are left out; otherwise as `cancel`, in the order of their ids. Raises `Busy`: it had come no
    further than that job.
    """
    jobs = Job.objects.using(database.alias()).for_subject(subject).filter(finished_at__isnull=True)
    cancelled = []
    for job_id in jobs.order_by("id").values_list("id", flat=True):
        with suppress(NotFound, NotCancellable):
            cancelled.append(cancel(job_id, actor=actor, reason=reason, operation=operation, scope=scope))
    return cancelled


def redrive(
    job_id: UUID | str,
    *,
    actor: Any = "",
    reason: str = "",
    force: bool = False,
    restart: bool = False,
    delay: float = 0.0,
    failed_before: datetime | None = None,
    operation: str | None = None,
    scope: Scope | AllScopes | None = None,
) -> Job:
    """Run a job again from its checkpoint: one that failed, waits for its retry, or lost its worker.

    `force` (exactly True) also for what failed as unrecoverable; `restart` from the start, where the kind
    allows it; `delay` in seconds. Limits are reset, the kind's `on_redrive` runs in the same transaction.
    `failed_before` (aware) leaves alone what did not fail, or failed later: a bulk act must not take a job twice.
    `operation` as in `cancel`.
    Raises `NotFound`, `UnknownKind`, `RestartNotAllowed`, `ForceRequired`, `LockKeyHeld`, `NotRedrivable`,
    `Busy`, and `HookFailed` when the hook refused (nothing was changed).
    """
    for name, value in (("force", force), ("restart", restart)):
        if not isinstance(value, bool):
            raise InvalidInput(name, value, "is neither True nor False", "Pass the boolean itself.")
    wait = _seconds("delay", delay, LONGEST_REDRIVE_DELAY)
    who, why, operation = _actor(actor), _reason(reason), _operation(operation)
    if failed_before is not None:
        _require_instant("failed_before", failed_before)
    job_uuid = _required_id(job_id)
    before = get(job_uuid, scope=scope)
    if before is None:
        raise NotFound(job_id)
    kind = _require_redrivable(before, force=force, restart=restart)

    def transition() -> Job | None:
        answer = store.redrive(
            before.id,
            scope=before.scope,
            grace=config.GRACE,
            delay=wait,
            forced=force,
            restart=restart,
            failed_before=failed_before,
        )
        if isinstance(answer, store.Answer):
            _require_free_lock(before)
            raise LockKeyHeld(before.lock_key or "", None)
        return answer

    def record(job: Job) -> None:
        store.add_event(
            job,
            "redriven",
            actor=who.text,
            actor_id=who.id,
            reason=why,
            operation_id=operation,
            data={
                "forced": force,
                "restart": restart,
                "delay": wait,
                "error_type": before.error_type,
                # A restart forgets where the work was: here it is kept.
                **({"checkpoint": before.checkpoint_text} if restart else {}),
            },
        )
        transports.current().publish(job)

    with _busy_where_locked(before.id):
        job = lifecycle.redrive(kind, before.lease_epoch, transition, record)
    if job is None:
        raise _not_redriven(before.id, store.get(before.id), failed_before)
    return job


def _require_redrivable(job: Job, *, force: bool, restart: bool) -> Kind:
    """The job's kind; raises what the row, as it was read, tells already. The statement has the last word."""
    kind = kinds.find(job.kind)
    if kind is None:
        raise kinds.unknown(job.kind)
    if restart and not kind.allow_restart:
        raise RestartNotAllowed(job.id, job.kind)
    if job.status in (Status.COMPLETED, Status.CANCELLED):
        raise NotRedrivable(job.id, job.status)
    if job.queue_name == MANUAL_QUEUE:
        raise NotRedrivable(job.id, job.status, "no worker serves its queue; its owner resumes or retries it")
    if job.verdict == Verdict.UNRECOVERABLE and not force:
        raise ForceRequired(job.id)
    _require_free_lock(job)
    return kind


def _not_redriven(job_id: UUID, now: Job | None, failed_before: datetime | None) -> Refusal:
    if now is None:
        return NotRedrivable(job_id, "gone")
    if now.status == Status.RUNNING and now.lease_owner is None and failed_before is None:
        return Busy(job_id)
    if now.status != Status.FAILED:
        return NotRedrivable(job_id, now.status)
    if failed_before is not None and now.finished_at is not None and now.finished_at >= failed_before:
        return NotRedrivable(job_id, now.status, f"since {now.finished_at.isoformat(sep=' ')}, too lately")
    return Busy(job_id)


def settle_without_hooks(
    job_id: UUID | str, *, actor: Any, reason: str, scope: Scope | AllScopes | None = None
) -> Job:
    """End a job whose hooks can never succeed, without them: `cancelled` if that was requested, else `failed`.

    The project's own row stays as it is, and the job is not marked as mirrored. Both `actor` and `reason` are
    kept in the job's history. Raises `NotFound`, `InvalidInput` (no reason), `NotSettleable`.
    """
    why = plain_text("reason", reason, REASON_LENGTH, "Say why the project's row is left as it is.")
    who = _actor(actor)
    job_uuid, wanted = _required_id(job_id), _scope(scope)
    with database.joined(database.alias()):
        job = store.settle(job_uuid, scope=wanted, grace=config.GRACE)
        if job is None:
            now = get(job_uuid, scope=scope)
            if now is None:
                raise NotFound(job_id)
            raise NotSettleable(now.id, now.status, now.mirror_attempts)
        store.add_event(job, "settled_without_hooks", actor=who.text, actor_id=who.id, reason=why)
    log("settled_without_hooks", job, level=logging.WARNING, actor=who.text)
    return job


def pause(*, queue: str = "", kind: str = "", tenant: str = "", reason: str, actor: Any = "") -> None:
    """Stop new claims of a queue, a kind, a tenant, or (all blank) of everything, until `unpause`.

    Running slices are asked to yield at their next boundary, which counts no failure. Starting stays allowed.
    Raises `InvalidInput` for a blank reason or a name too long. A kind need not be known here.
    """
    why = plain_text("reason", reason, REASON_LENGTH, "Say why, for whoever finds the work standing.")
    who = _actor(actor)
    store.pause(**_pause_of(queue, kind, tenant), reason=why, actor=who.text, actor_id=who.id)
    log("paused", level=logging.WARNING, queue=queue, kind=kind, tenant=tenant, actor=who.text)


def unpause(*, queue: str = "", kind: str = "", tenant: str = "", actor: Any = "") -> bool:
    """Take away the pause of exactly this queue, kind and tenant, and wake the workers; False: there was none."""
    who = _actor(actor)
    ended = store.unpause(**_pause_of(queue, kind, tenant), actor=who.text, actor_id=who.id)
    if ended:
        transports.current().wake()
        log("unpaused", level=logging.WARNING, queue=queue, kind=kind, tenant=tenant, actor=who.text)
    return ended


def running_under(*, queue: str = "", kind: str = "", tenant: str = "") -> int:
    """How many matching jobs still run under a live lease: 0 when a pause has taken full effect."""
    return store.leased(**_pause_of(queue, kind, tenant))


def reconcile(*, batch: int = 100, tenant: str | None = None, wait: bool = True) -> reconciler.Report:
    """Repair once what ended processes left behind, as every worker does by itself; takes `GRACE` seconds.

    It looks twice, because an expired lease alone is no proof of a dead worker; `wait=False` takes it for one.
    `batch` rows are read at a time; `tenant=None` means every tenant. Raises `TransactionOwned` inside a caller's
    transaction.
    """
    return reconciler.repair_once(
        published=transports.current().publish, batch=batch, tenant=tenant, wait=wait
    )


# --- starting -------------------------------------------------------------------------------------------


def _start(ready: _Ready) -> Started:
    earlier = _under_an_old_name(ready)
    if earlier is not None:
        return earlier
    for _ in range(ATTEMPTS_AT_A_FREED_KEY):
        try:
            job = store.insert(ready)
        except IntegrityError as error:
            if not _is_of_a_deleted_user(error):
                raise
            raise InvalidInput(
                "created_by",
                ready.created_by,
                "is a user that has been deleted",
                "Pass a saved user, or None.",
            ) from error
        if job is not None:
            _announce([job])
            return Started(job, True)
        explained = _explain(ready)
        if explained is not None:
            return explained
    if ready.lock_key is not None:
        raise LockKeyHeld(ready.lock_key, None)
    raise DurableJobsError(f"Job {ready.id} was not inserted, and no key explains it: its id exists already.")


def _is_of_a_deleted_user(error: IntegrityError) -> bool:
    """The user is the one row that a new job points to; in a caller's transaction its commit is the judge."""
    return "foreign key" in str(error).lower()


def _answer(ready: _Ready) -> Started | DurableJobsError:
    try:
        return _explain(ready) or _start(ready)
    except Refusal as refusal:
        return refusal


def _explain(ready: _Ready) -> Started | None:
    """Whose key was in the way: idempotency before lock. None when it has been freed meanwhile."""
    scope = Scope(ready.tenant, ready.organization)
    if ready.idempotency_key is not None:
        earlier = store.by_idempotency_key(ready.kind, ready.idempotency_key, scope)
        if earlier is not None:
            return _repeated(ready, earlier)
    if ready.lock_key is not None:
        holder = store.by_lock_key(ready.lock_key, scope)
        if holder is not None:
            if ready.if_locked == "return":
                return Started(holder, False)
            raise LockKeyHeld(ready.lock_key, holder.id)
    return None


def _repeated(new: NewJob, earlier: Job) -> Started:
    # An old row may have kept the hash alone.
    if earlier.input_sha256 != new.input_sha256 or earlier.input_text not in (None, new.input):
        raise IdempotencyConflict(new.idempotency_key or "", earlier.id)
    return Started(earlier, False)


def _under_an_old_name(ready: _Ready) -> Started | None:
    """The job that this key made before its kind was renamed: the index knows the kind's present name alone."""
    if ready.idempotency_key is None:
        return None
    for alias in ready.known.aliases:
        earlier = store.by_idempotency_key(
            alias, ready.idempotency_key, Scope(ready.tenant, ready.organization)
        )
        if earlier is not None:
            return _repeated(ready, earlier)
    return None


def _announce(jobs: list[Job]) -> None:
    if not jobs:
        return
    transport, told = transports.current(), set()
    for job in jobs:
        if job.status == _PENDING:
            route = (job.queue_name, job.kind, job.priority)
            if not transport.transactional or route not in told:
                told.add(route)
                transport.publish(job)
        log("job_created", job, queue=job.queue_name)
    connection = database.connection()
    # A receiver may still come before the commit of an open transaction; where none is open it would be asked now.
    if signals.job_created.receivers or connection.in_atomic_block or not connection.autocommit:
        transaction.on_commit(partial(_tell_created, jobs), using=connection.alias, robust=True)


def _tell_created(jobs: list[Job]) -> None:
    for job in jobs:
        signals.send(signals.job_created, job)


def _lock_order(new: NewJob) -> tuple[str, ...]:
    return (
        new.tenant,
        new.organization or "",
        new.kind if new.idempotency_key else "",
        new.idempotency_key or "",
        new.lock_key or "",
    )


def _require_free_lock(job: Job) -> None:
    if job.lock_key is None:
        return
    holder = store.by_lock_key(job.lock_key, job.scope)
    if holder is not None and holder.id != job.id:
        raise LockKeyHeld(job.lock_key, holder.id)


# --- what is refused at the door ------------------------------------------------------------------------

_OPTIONS = frozenset(
    ("scope", "subject", "idempotency_key", "lock_key", "if_locked", "created_by", "priority", "queue",
     "run_after", "hold", "meta")
)  # fmt: skip


class _Terms(NamedTuple):
    """What the settings say of starting, read once for all rows of a call."""

    scope: Scope
    longest_input: int

    @classmethod
    def now(cls) -> _Terms:
        return cls(Scope(config.DEFAULT_TENANT), config.MAX_INPUT_BYTES)


def _prepare_row(terms: _Terms, row: Mapping[str, Any]) -> _Ready:
    if type(row) is not dict and not isinstance(row, Mapping):
        raise InvalidInput(
            "row", row, "is not a mapping", 'Give a dict such as {"kind": "imports.csv", "input": {}}.'
        )
    options = dict(row)
    kind, input = options.pop("kind", None), options.pop("input", None)
    if not options.keys() <= _OPTIONS:
        raise InvalidInput(
            "row",
            next(name for name in options if name not in _OPTIONS),
            "has an option that start does not know",
            f"Options: {', '.join(sorted(_OPTIONS))}.",
        )
    return _prepare(terms, kind, input, **options)


def _prepare(
    terms: _Terms,
    kind: Any,
    input: Any,
    *,
    scope: Any = None,
    subject: Any = None,
    idempotency_key: Any = None,
    lock_key: Any = None,
    if_locked: Any = "raise",
    created_by: Any = None,
    priority: Any = 0,
    queue: Any = None,
    run_after: Any = None,
    hold: Any = False,
    meta: Any = None,
) -> _Ready:
    known = kinds.get(kind)
    owner = terms.scope if scope is None else _scope_of_one(scope)
    text = jsontext.encode(input, field="input", limit=terms.longest_input)
    subject_type, subject_id = _subject(known, subject)
    run_at, delay = _moment(run_after)
    if not isinstance(hold, bool):
        raise InvalidInput("hold", hold, "is neither True nor False", "Pass the boolean itself.")
    if hold and run_after is not None:
        raise InvalidInput(
            "run_after", run_after, "has no meaning for held work", "Release the job when it is to run."
        )
    if if_locked not in ("raise", "return"):
        raise InvalidInput("if_locked", if_locked, "is unknown", 'Use "raise" or "return".')
    return _Ready(
        id=_NOT_YET,
        kind=known.name,
        status=_HELD if hold else _PENDING,
        tenant=owner.tenant,
        organization=owner.organization,
        queue=_queue(known, queue),
        input=text,
        input_sha256=None,
        created_by=None if created_by is None else _user_id("created_by", created_by),
        meta=None if meta is None else _meta(meta),
        idempotency_key=None if idempotency_key is None else _key("idempotency_key", idempotency_key),
        lock_key=None if lock_key is None else _key("lock_key", lock_key),
        subject_type=subject_type,
        subject_id=subject_id,
        priority=_priority(priority),
        run_at=run_at,
        delay=delay,
        known=known,
        if_locked=if_locked,
    )


def _sealed(ready: _Ready) -> _Ready:
    """With its id and the hash of its input: what is never refused."""
    if ready.id is _NOT_YET:
        ready.id, ready.input_sha256 = uuid7(), jsontext.sha256(ready.input or "")
    return ready


def _pause_of(queue: str, kind: str, tenant: str) -> dict[str, str]:
    def part(field: str, value: str, most: int) -> str:
        return (
            plain_text(field, value, most, f"Use at most {most} characters, or leave it blank for all.")
            if value
            else ""
        )

    return {
        "queue": part("queue", queue, QUEUE_LENGTH),
        "kind": part("kind", kind, KEY_LENGTH),
        "tenant": part("tenant", tenant, SCOPE_LENGTH),
    }


def _key(field: str, value: object) -> str | None:
    if value is None:
        return None
    return plain_text(field, value, KEY_LENGTH, f"Pass a text of 1 to {KEY_LENGTH} characters, or None.")


def _operation(value: object) -> str | None:
    if value is None:
        return None
    return plain_text(
        "operation", value, OPERATION_LENGTH, f"Use 1 to {OPERATION_LENGTH} characters, or None."
    )


def _scope(scope: object) -> Scope | None:
    """The scope that was said; None for all of them."""
    if scope is ALL_SCOPES:
        return None
    if scope is None:
        return Scope(config.DEFAULT_TENANT)
    if not isinstance(scope, Scope):
        raise InvalidInput(
            "scope", scope, "is not a Scope", "Pass Scope(tenant, organization), or ALL_SCOPES."
        )
    tenant = plain_text("scope.tenant", scope.tenant, SCOPE_LENGTH)
    organization = scope.organization
    if organization is not None:
        organization = plain_text("scope.organization", organization, SCOPE_LENGTH)
    return Scope(tenant, organization)


def _scope_of_one(scope: object) -> Scope:
    said = _scope(scope)
    if said is None:
        raise InvalidInput("scope", scope, "is not the scope of one job", "Pass Scope(tenant, organization).")
    return said


def _subject(kind: Kind, subject: object) -> tuple[str | None, str | None]:
    label: str | None = None
    identity: str | None = None
    if subject is not None:
        if not isinstance(subject, Model):
            raise InvalidInput(
                "subject", subject, "is not a model instance", "Pass the row itself, not its id."
            )
        label = subject._meta.label_lower
        if subject.pk is None or subject._state.adding:
            raise InvalidInput(
                "subject", label, "is not saved", "Save the row first, in the same transaction."
            )
        using, home = database.alias(), router.db_for_write(type(subject), instance=subject)
        if home != using:
            raise InvalidInput(
                "subject",
                label,
                f"lives in the database {home!r}, jobs in {using!r}: they could not change in one transaction",
                "Start the job without a subject, or keep both in one database.",
            )
        identity = plain_text("subject.pk", str(subject.pk), KEY_LENGTH, "Use a shorter primary key.")
    if kind.mirror is not None:
        kind.mirror.check_subject(label)
    return label, identity


def _moment(run_after: object) -> tuple[datetime | None, float]:
    if run_after is None:
        return None, 0.0
    if isinstance(run_after, timedelta):
        if not timedelta(0) <= run_after <= LONGEST_SCHEDULE:
            raise InvalidInput(
                "run_after", run_after, "is out of range", f"Use 0 to {LONGEST_SCHEDULE.days} days."
            )
        return None, run_after.total_seconds()
    if not isinstance(run_after, datetime):
        raise InvalidInput(
            "run_after",
            run_after,
            "is neither a datetime nor a timedelta",
            "Pass an aware datetime or a timedelta.",
        )
    _require_instant("run_after", run_after)
    latest = datetime.now(UTC) + LONGEST_SCHEDULE
    if not EARLIEST_RUN <= run_after <= latest:
        raise InvalidInput(
            "run_after",
            run_after,
            "is out of range",
            f"Use a time from {EARLIEST_RUN:%Y-%m-%d} to {latest:%Y-%m-%d}.",
        )
    return run_after.astimezone(UTC), 0.0


def _require_instant(field: str, value: object) -> None:
    if not isinstance(value, datetime):
        raise InvalidInput(field, value, "is not a datetime", "Pass an aware datetime.")
    if value.tzinfo is None or value.utcoffset() is None:
        raise InvalidInput(
            field,
            value,
            "is a naive datetime: it names no instant",
            "Pass an aware one, such as timezone.now() + timedelta(hours=1).",
        )


def _priority(value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not -100 <= value <= 100:
        raise InvalidInput("priority", value, "is out of range", "Use a whole number from -100 to 100.")
    return int(value)


def _queue(kind: Kind, value: object) -> str:
    if value is None:
        return kind.queue
    if not isinstance(value, str) or not QUEUE_NAME.fullmatch(value):
        raise InvalidInput(
            "queue",
            value,
            "is not a queue's name",
            "Use 1 to 100 letters, digits, dots, dashes and underscores.",
        )
    if value == MANUAL_QUEUE:
        raise InvalidInput("queue", value, "is reserved for jobs that no worker runs", "Choose another name.")
    return value


def _meta(value: object) -> str:
    if not isinstance(value, Mapping):
        raise InvalidInput(
            "meta", value, "is not a mapping of labels", 'Pass a dict such as {"source": "cron"}.'
        )
    labels = value if isinstance(value, dict) else dict(value)
    return jsontext.encode(labels, field="meta", limit=config.MAX_META_BYTES)


def _seconds(field: str, value: object, most: float) -> float:
    if (
        isinstance(value, bool)
        or not isinstance(value, int | float)
        or not math.isfinite(value)
        or not 0 <= value <= most
    ):
        raise InvalidInput(field, value, "is out of range", f"Use seconds from 0 to {most:,.0f}.")
    return float(value)


def _user_id(field: str, user: Any) -> Any:
    """The key of a user; an anonymous one counts as none."""
    if user is None or getattr(user, "is_anonymous", False):
        return None
    is_user = isinstance(user, Model) and hasattr(user, "is_authenticated")
    if not is_user or user.pk is None or user._state.adding:
        raise InvalidInput(field, user, "is not a saved user", "Pass the user itself, or None.")
    return user.pk


def _reason(reason: object) -> str:
    if not isinstance(reason, str):
        raise InvalidInput("reason", reason, "is not a text", "Say why in a text, or leave it out.")
    return jsontext.clean(reason)[:REASON_LENGTH]


class _Actor(NamedTuple):
    text: str
    user_id: Any
    id: str | None


def _actor(actor: Any) -> _Actor:
    """Who acts, as text fixed now: "user:42 anna" for a user."""
    if isinstance(actor, str):
        return _Actor(jsontext.clean(actor)[:KEY_LENGTH], None, None)
    user_id = _user_id("actor", actor)
    if user_id is None:
        return _Actor("", None, None)
    return _Actor(
        jsontext.clean(f"user:{user_id} {actor.get_username()}")[:KEY_LENGTH], user_id, str(user_id)
    )


def _required_id(job_id: object) -> UUID:
    found = as_uuid(job_id)
    if found is None:
        raise NotFound(job_id)
    return found
