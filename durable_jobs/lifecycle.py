"""The one path on which a job ends, and its way back: the row, the kind's hooks and the history, in one transaction.

Each function has three answers that call for opposite reactions: the job as the transition left it; None
when the fence missed, so the job is somebody else's; `HookFailed` when it matched but a hook failed: all of it
is rolled back, and the failure is counted on the row.
"""

from __future__ import annotations

import enum
import logging
import math
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from contextvars import Context
from dataclasses import dataclass, field
from functools import lru_cache, partial
from typing import Any
from uuid import UUID

from django.db import connections, transaction
from django.db.backends.base.base import BaseDatabaseWrapper
from django.db.transaction import TransactionManagementError
from django.dispatch import Signal

from durable_jobs import database, signals, store
from durable_jobs.conf import config
from durable_jobs.exceptions import DomainMirrorMismatch, ErrorFacts, HookFailed, describe
from durable_jobs.kinds import ROW_GONE, Kind, overrides
from durable_jobs.logs import log
from durable_jobs.models import Job, Status
from durable_jobs.store import NO_COUNTS, Counts, Lease, Orphan

MIRROR_STUCK_AFTER = 3
"""Failed hooks after which a job counts as stuck (`job_mirror_stuck`)."""
QUICK_HOOK_SECONDS = 0.01
"""A hook that takes no longer, by what it took lately, may run in a transaction with others."""
SHARED_SECONDS = 0.025
"""So long hooks go on in one transaction; the rest have the next one."""
MOST_HOOKS = 16
"""Hooks that stand or fall together, in one savepoint."""
LONGEST_HOOKS = 0.25
"""Seconds after which hooks that were thought to be quick are rolled back together, to run alone."""
MOST_WAITING = 0.0003
"""Seconds. Hooks that wait longer for the server, beside what they compute, do better side by side than in a row: a
transaction of its own costs about as much of the processor."""
LOCK_SECONDS = 0.05
"""So long hooks that share wait for a lock of somebody else's."""
ALONE_SECONDS = 5.0
"""Seconds for which a kind ends its jobs alone after one of its hooks did not go through with others."""

PACE_WEIGHT = 0.1

Transition = Callable[[], Job | None]
Record = Callable[[Job], None]
Callback = tuple[Callable[[], Any], bool]
"""What is called after a commit, and whether its error keeps nothing from the next ones."""

_SIGNALS: dict[str, Signal] = {
    Status.COMPLETED: signals.job_completed,
    Status.FAILED: signals.job_failed,
    Status.CANCELLED: signals.job_cancelled,
}


def complete(kind: Kind, lease: Lease, result: str | None, counts: Counts = NO_COUNTS) -> Job | None:
    """running → completed, by its owner."""
    return _end(kind, lambda: store.complete(lease, result, counts), "job_completed")


class Share(enum.Enum):
    """How the completions of a kind may share a transaction."""

    PLAIN = "plain"
    """Its row changes and nothing else, and nobody is told but the log."""
    TOLD = "told"
    """Its row changes and nothing else; others are told afterwards."""
    MIRRORED = "mirrored"
    """The project's rows change with it, as a `StatusMirror` says: many in one statement."""
    HOOKED = "hooked"
    """Its `on_transition` runs, with others in a savepoint."""
    ALONE = "alone"


def share_of(kind: Kind) -> Share:
    """How a completion of this kind may share a transaction, for now."""
    share = _declared_share(kind)
    if share is Share.PLAIN:
        # Rows of before the kind was renamed tell by the name that they carry.
        told = signals.job_completed
        heard = told.receivers and any(told.has_listeners(name) for name in kind.all_names)
        return Share.TOLD if heard else share
    if share is Share.TOLD:
        return share
    if not config.GROUP_HOOKS or time.monotonic() < _alone_until.get(kind.name, 0.0):
        return Share.ALONE
    if share is Share.HOOKED and _seconds_of_hook(kind) > QUICK_HOOK_SECONDS:
        return Share.ALONE
    return share


def _seconds_of_hook(kind: Kind) -> float:
    return _hook_seconds.get(kind.name, math.inf)


@lru_cache(maxsize=1000)
def _declared_share(kind: Kind) -> Share:
    if overrides(kind, "on_transition"):
        return Share.HOOKED
    if kind.mirror is not None:
        return Share.MIRRORED if kind.mirror.is_plain else Share.HOOKED
    return Share.TOLD if overrides(kind, "after_transition") else Share.PLAIN


_hook_seconds: dict[str, float] = {}
"""What `on_transition` of a kind takes, by what it took lately."""
_hook_waiting: dict[str, float] = {}
"""What it waits for, of those that shared and had nobody in their way."""
_alone_until: dict[str, float] = {}


@dataclass(eq=False)
class Ending:
    """A job that is to be completed in a transaction with others."""

    kind: Kind
    job: Job
    """As it was claimed."""
    lease: Lease
    result: str | None
    share: Share
    context: Context | None = None
    """Where its step ran, and its hook runs."""
    done: bool = False
    """Whether the transaction completes it; else it is to be completed alone."""
    put_off: bool = False
    """Whether there was no time for it: it may share the next transaction."""
    row: Job | None = None
    """As the completion leaves it; None for a plain one."""
    callbacks: list[Callback] = field(default_factory=list)
    """What its hook wants called after the commit."""

    @property
    def pair(self) -> tuple[Lease, str | None]:
        return self.lease, self.result

    def reset(self) -> None:
        """Nothing has been tried, or all of it was rolled back."""
        self.done = self.put_off = False
        self.row, self.callbacks = None, []


def complete_many(owner: str, endings: Sequence[Ending]) -> None:
    """running → completed, in the open transaction, for those endings that are then `done`.

    It waits for no row; what does not go is left as it was. After the commit call `tell_completed` for each.
    """
    by_share: dict[Share, list[Ending]] = {share: [] for share in Share}
    for ending in endings:
        ending.reset()
        by_share[ending.share].append(ending)
    if plain := by_share[Share.PLAIN]:
        completed = store.complete_many(owner, [ending.pair for ending in plain])
        for ending in plain:
            ending.done = ending.job.id in completed
    if told := by_share[Share.TOLD]:
        _complete_whole(owner, told)
    for kind in dict.fromkeys(ending.kind for ending in by_share[Share.MIRRORED]):
        _complete_mirrored(owner, kind, [one for one in by_share[Share.MIRRORED] if one.kind is kind])
    if hooked := by_share[Share.HOOKED]:
        _complete_hooked(owner, hooked)


def _complete_whole(owner: str, endings: Sequence[Ending]) -> None:
    rows = store.complete_many_whole(owner, [ending.pair for ending in endings])
    for ending in endings:
        ending.row = rows.get(ending.job.id)
        ending.done = ending.row is not None


def _complete_mirrored(owner: str, kind: Kind, endings: Sequence[Ending]) -> None:
    """The project's rows first: those that somebody has locked, or that do not agree, are left for their own end."""
    mirror = kind.mirror
    assert mirror is not None
    try:
        with database.joined(database.alias()):
            open_ = mirror.lock_open([ending.job for ending in endings])
            ready = [ending for ending in endings if ending.job.id in open_]
            if ready:
                _complete_whole(owner, ready)
                mirror.write_completed([open_[ending.job.id] for ending in ready if ending.done])
    except Exception as error:
        if _is_gone(error):
            raise
        for ending in endings:
            ending.done = False
        leave_alone(kind, error)


def _complete_hooked(owner: str, endings: Sequence[Ending]) -> None:
    """Some at a time, each such group in a savepoint, until the time for one transaction is over.

    Where rows are locked, so many locks could close a circle of waiting with the project's own transactions, which
    take the same rows in another order. So these wait for a lock no longer than `LOCK_SECONDS`, far less than the
    server waits until it looks for a circle (`deadlock_timeout`, 1 s), and end alone when that was too short.
    """
    connection = connections[database.alias()]
    database.wait_briefly_for_locks(connection, LOCK_SECONDS)
    until = time.monotonic() + SHARED_SECONDS
    depth = len(connection.atomic_blocks)
    at = 0
    while at < len(endings):
        if at and time.monotonic() >= until:
            for ending in endings[at:]:
                ending.put_off = True
            return
        group = endings[at : at + _size_of_group(endings[at:])]
        at += len(group)
        registered = len(connection.run_on_commit)
        try:
            with database.joined(database.alias()):
                _complete_group(owner, group, connection)
        except KeyboardInterrupt:
            raise
        except BaseException as error:
            if _is_gone(error) or len(connection.atomic_blocks) != depth:
                raise
            del connection.run_on_commit[registered:]
            for ending in group:
                ending.reset()
            for kind in dict.fromkeys(ending.kind for ending in group):
                leave_alone(kind, error)
            continue
        for ending in group:
            ending.done = ending.row is not None
        for kind in dict.fromkeys(ending.kind for ending in group):
            if connection.vendor != "sqlite" and _hook_waiting.get(kind.name, 0.0) > MOST_WAITING:
                leave_alone(kind, TimeoutError("Its hook waits too long for the server."))


class _HookSets(Exception):
    """Others would meet what it has set, such as a tenant, a role or a limit: its kind ends alone for good."""

    def __init__(self, kind: Kind) -> None:
        super().__init__(f"{kind.name}.on_transition sets something for its transaction.")
        self.kind = kind


def _size_of_group(endings: Sequence[Ending]) -> int:
    """As many as stand or fall together in half of the time, by what the kinds' hooks took lately; at least one."""
    seconds = 0.0
    for number, ending in enumerate(endings[:MOST_HOOKS]):
        seconds += _seconds_of_hook(ending.kind)
        if number and seconds > SHARED_SECONDS / 2:
            return number
    return min(len(endings), MOST_HOOKS)


def _complete_group(owner: str, group: Sequence[Ending], connection: BaseDatabaseWrapper) -> None:
    rows = store.complete_many_whole(owner, [ending.pair for ending in group])
    until, depth = time.monotonic() + LONGEST_HOOKS, len(connection.atomic_blocks)
    for ending in group:
        ending.row = rows.get(ending.job.id)
        if ending.row is None:
            continue
        registered = len(connection.run_on_commit)
        settings = database.SettingsWatched()
        began, processor = time.monotonic(), time.thread_time()
        with connection.execute_wrapper(settings) if connection.vendor != "sqlite" else nullcontext():
            (ending.context or Context()).run(_run_hooks, ending.kind, ending.row)
        if settings.changed:
            raise _HookSets(ending.kind)
        waiting = time.monotonic() - began - (time.thread_time() - processor)
        _note_waiting(ending.kind, waiting)
        registered_by_hook: Any = connection.run_on_commit[registered:]
        ending.callbacks = [(call, robust) for _, call, robust in registered_by_hook]
        del connection.run_on_commit[registered:]
        if len(connection.atomic_blocks) != depth:
            raise TransactionManagementError(f"{ending.kind.name}.on_transition left a transaction open.")
        if time.monotonic() > until:
            raise TimeoutError("The hooks take too long to share a transaction.")


def _paced(before: float | None, latest: float) -> float:
    """What hooks take, by what they took lately; that the machine stood still for one of them counts for little."""
    latest = min(latest, 5 * QUICK_HOOK_SECONDS)
    return latest if before is None else latest + (1 - PACE_WEIGHT) * (before - latest)


def _note_waiting(kind: Kind, latest: float) -> None:
    """It falls at once and rises slowly: to wait for the interpreter, which others have, is not what is meant."""
    latest = min(latest, 2 * MOST_WAITING)
    before = _hook_waiting.get(kind.name, 0.0)
    _hook_waiting[kind.name] = min(latest, before + PACE_WEIGHT / 2 * (latest - before))


def _is_gone(error: BaseException) -> bool:
    """Whether the transaction went with it: nobody else in it can go on."""
    connection = connections[database.alias()]
    return database.is_outage(error) and not connection.is_usable()


def leave_alone(kind: Kind, error: BaseException) -> None:
    """Let jobs of this kind end alone for a while: there a failure is told, counted and repeated as it should be."""
    is_for_good = isinstance(error, _HookSets) and error.kind is kind
    until = math.inf if is_for_good else time.monotonic() + ALONE_SECONDS
    _alone_until[kind.name] = max(_alone_until.get(kind.name, 0.0), until)
    log("ends_alone", level=logging.DEBUG, kind=kind.name, problem=f"{type(error).__name__}: {error}"[:200])


def tell_completed(ending: Ending) -> None:
    """What follows the commit of a completion with others."""
    if ending.row is None:
        log("job_completed", ending.job)
        return
    # In the order in which a transaction of its own would call them.
    _after_end(ending.kind, ending.row, "job_completed")
    for call, robust in ending.callbacks:
        try:
            call()
        except KeyboardInterrupt:
            raise
        except BaseException as error:
            log("commit_callback_failed", ending.row, level=logging.ERROR, error=error)
            if not robust or not isinstance(error, Exception):
                break


def fail(
    kind: Kind, job_id: UUID, epoch: int, facts: ErrorFacts | None = None, *, parked: bool = False
) -> Job | None:
    """running → failed, by its epoch; with `parked` it waits for a human."""

    event = "job_parked" if parked else "job_failed"
    transition = partial(store.fail_terminal, job_id, epoch, facts, parked=parked)
    return _end(kind, transition, event, _record_failed)


def cancel(
    kind: Kind, job_id: UUID, epoch: int, counts: Counts = NO_COUNTS, *, actor: str = ""
) -> Job | None:
    """running → cancelled, by its epoch; `actor` says who ended it ("worker:…")."""
    transition = partial(store.cancel_running, job_id, epoch, counts)
    return _end(kind, transition, "job_cancelled", partial(_record_cancelled, actor))


def cancel_waiting(kind: Kind | None, job_id: UUID, *, actor: str = "") -> Job | None:
    """pending, held, or waiting for a retry → cancelled, if that was requested. No kind: no hooks."""
    record = partial(_record_cancelled, actor, hooks_skipped=kind is None)
    transition = partial(store.cancel_waiting, job_id, mirrored=kind is not None)
    return _end(kind, transition, "job_cancelled", record)


def cancel_orphan(
    kind: Kind | None, orphan: Orphan, *, grace: float, dead: bool = False, actor: str = ""
) -> Job | None:
    """An orphan with a cancel request → cancelled. No kind: no hooks."""
    transition = partial(store.cancel_orphan, orphan, grace=grace, dead=dead, mirrored=kind is not None)
    record = partial(_record_cancelled, actor, worker_gone=True, hooks_skipped=kind is None)
    return _end(kind, transition, "job_cancelled", record)


def park_orphan(
    kind: Kind | None,
    orphan: Orphan,
    *,
    grace: float,
    code: str,
    message: str,
    dead: bool = False,
    actor: str = "",
) -> Job | None:
    """An orphan → failed and parked with `code`. No kind: no hooks."""

    def record(job: Job) -> None:
        data = {"hooks_skipped": True} if kind is None else None
        store.add_event(job, "parked", owner=orphan.owner, actor=actor, code=code, message=message, data=data)

    transition = partial(
        store.park_orphan,
        orphan,
        grace=grace,
        code=code,
        message=message,
        dead=dead,
        mirrored=kind is not None,
    )
    return _end(kind, transition, "job_parked", record)


def complete_owned(kind: Kind | None, lease: Lease, result: str | None) -> Job | None:
    """running → completed under an unexpired lease, whether or not a cancel was requested. No kind: no hooks."""
    return _end(kind, lambda: store.complete_owned(lease, result, late=True), "job_completed")


def fail_owned(kind: Kind | None, lease: Lease, facts: ErrorFacts) -> Job | None:
    """running → failed under an unexpired lease. No kind: no hooks."""
    return _end(kind, lambda: store.fail_owned(lease, facts), "job_failed", _record_failed)


def cancel_owned(kind: Kind | None, lease: Lease, *, actor: str = "") -> Job | None:
    """running → cancelled under an unexpired lease, if that was requested. No kind: no hooks."""
    return _end(kind, lambda: store.cancel_owned(lease), "job_cancelled", partial(_record_cancelled, actor))


def conclude(kind: Kind | None, job: Job, event: str) -> None:
    """Hooks and whatever follows the commit, for a job that the open transaction has just ended itself.

    What a hook raises is the caller's to roll back; nothing is counted.
    """
    transaction.on_commit(partial(_after_end, kind, job, event), using=database.alias(), robust=True)
    if kind is not None:
        _run_hooks(kind, job)


def reopen(kind: Kind | None, job: Job) -> None:
    """`on_redrive` and whatever follows the commit, for a job that the open transaction has just reopened."""
    transaction.on_commit(partial(_after_redrive, kind, job), using=database.alias(), robust=True)
    if kind is not None:
        _run_redrive_hook(kind, job)


def redrive(kind: Kind, epoch: int, transition: Transition, record: Record) -> Job | None:
    """failed, orphaned, or waiting for its retry → pending, with `on_redrive` in the same transaction.

    `epoch` is the one before the redrive; there a failing hook is counted.
    """

    def hook_and_record(job: Job) -> None:
        _run_redrive_hook(kind, job)
        record(job)

    unit = database.joined(database.alias())
    return _carry_out(unit, transition, hook_and_record, partial(_after_redrive, kind), epoch)


def _end(kind: Kind | None, transition: Transition, event: str, record: Record | None = None) -> Job | None:
    def hook_and_record(job: Job) -> None:
        if kind is not None:
            _run_hooks(kind, job)
        if record is not None:
            record(job)

    unit = _unit(kind, database.alias(), record)
    return _carry_out(unit, transition, hook_and_record, lambda job: _after_end(kind, job, event))


def _carry_out(
    unit: AbstractContextManager[BaseDatabaseWrapper],
    transition: Transition,
    hook_and_record: Record,
    after: Callable[[Job], None],
    epoch: int | None = None,
) -> Job | None:
    """The transition and what must agree with it, in one unit; `after` it has committed.

    A failure is counted on the row as it is again then, under `epoch` where that is another than the transition's.
    """
    using = database.alias()
    job: Job | None = None
    raw: Any = None
    try:
        with unit as connection:
            raw = connection.connection
            job = transition()
            if job is None:
                return None
            committed = _Committed(using, partial(after, job))
            hook_and_record(job)
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        if job is not None and committed:
            return _despite(error, job)
        if job is None or _is_outage(error, using, raw):
            raise
        _count_failed_hook(job, job.lease_epoch if epoch is None else epoch, error)
        raise HookFailed(job.id, job.kind, job.status, error) from error
    return job


class _Committed:
    """Known the moment the transaction has committed, before any callback that a hook has registered.

    Such a callback may raise out of the end of the block, when nothing can be rolled back any more.
    """

    def __init__(self, using: str, after: Callable[[], None]) -> None:
        self._after = after
        self._known = False
        transaction.on_commit(self, using=using, robust=True)

    def __call__(self) -> None:
        self._known = True
        self._after()

    def __bool__(self) -> bool:
        return self._known


def _despite(error: BaseException, job: Job) -> Job:
    log("commit_callback_failed", job, level=logging.ERROR, error=error)
    return job


def _is_outage(error: BaseException, using: str, raw: Any) -> bool:
    """Whether the connection `raw` broke, which rolled everything back but says nothing about the hook.

    While it works, such an error is the hook's own: a cursor used after its end, another database.
    """
    connection = connections[using]
    return database.is_outage(error) and (connection.connection is not raw or not connection.is_usable())


def _unit(
    kind: Kind | None, using: str, record: Record | None
) -> AbstractContextManager[BaseDatabaseWrapper]:
    """A transaction; or a single statement, where there is nothing else to commit with it."""
    if record is None and kind is not None and not kind.has_transition_hook:
        return database.statement(using, what="the end of a job")
    return database.joined(using)


def _run_hooks(kind: Kind, job: Job) -> None:
    if job.status == Status.CANCELLED:
        kind.on_cancel(job)
    if kind.has_transition_hook:
        began = time.monotonic()
        answer = kind.on_transition(job)
        _hook_seconds[kind.name] = _paced(_hook_seconds.get(kind.name), time.monotonic() - began)
        _require_agreement(kind, job, answer, "on_transition")


def _run_redrive_hook(kind: Kind, job: Job) -> None:
    if kind.has_transition_hook:
        _require_agreement(kind, job, kind.on_redrive(job), "on_redrive")


def _require_agreement(kind: Kind, job: Job, answer: object, hook: str) -> None:
    if answer is ROW_GONE:
        store.add_event(
            job, "row_gone", message=f"{hook}: the project's row was deleted; nothing is left to agree."
        )
    elif isinstance(answer, bool) or not isinstance(answer, int) or answer < 1:
        raise DomainMirrorMismatch(job, answer, hook, kind.mirror.disagreement(job) if kind.mirror else "")


def _record_failed(job: Job) -> None:
    store.add_event(
        job,
        "parked" if job.parked_at else "failed",
        code=job.error_code or job.verdict or "",
        error_type=job.error_type or "",
        message=job.error_message or "",
    )


def _record_cancelled(
    actor: str, job: Job, *, worker_gone: bool = False, hooks_skipped: bool = False
) -> None:
    requested, ended = job.cancel_requested_at, job.finished_at
    waited = (ended - requested).total_seconds() if requested and ended else 0.0
    store.add_event(
        job,
        "cancelled",
        actor=actor,
        data={
            "seconds_since_request": round(max(waited, 0.0), 3),
            "processed": job.processed_count,
            "worker_gone": worker_gone,
            "hooks_skipped": hooks_skipped,
        },
    )


def _count_failed_hook(job: Job, epoch: int, error: BaseException) -> None:
    """After the rollback, on the same connection: a second one would wait for the first for ever."""
    facts = describe(error)
    log("terminal_mirror_failed", job, level=logging.ERROR, status=job.status, error=error)
    using = database.alias()
    try:
        with database.joined(using):
            counted = store.bump_mirror_attempts(job.id, epoch)
            store.add_event(
                job,
                "mirror_failed",
                code=facts.code or "",
                error_type=facts.type,
                message=facts.message,
                traceback=facts.traceback,
            )
            if counted and job.mirror_attempts + 1 >= MIRROR_STUCK_AFTER:
                transaction.on_commit(partial(_tell_stuck, job), using=using, robust=True)
    except Exception as second:
        log("mirror_not_counted", job, level=logging.ERROR, error=second)


def _tell_stuck(job: Job) -> None:
    log("mirror_stuck", job, level=logging.ERROR, mirror_attempts=job.mirror_attempts + 1)
    signals.send(signals.job_mirror_stuck, job)


def _after_end(kind: Kind | None, job: Job, event: str) -> None:
    log(event, job, code=job.error_code, verdict=job.verdict)
    if kind is not None:
        _after(kind.after_transition, job)
    signals.send(signals.job_parked if job.parked_at else _SIGNALS[job.status], job)


def _after_redrive(kind: Kind | None, job: Job) -> None:
    log("job_redriven", job, redrives=job.redrives, attempts=job.attempts)
    if kind is not None:
        _after(kind.after_redrive, job)
    signals.send(signals.job_redriven, job)


def _after(hook: Callable[[Job], None], job: Job) -> None:
    try:
        hook(job)
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        log("after_hook_failed", job, level=logging.ERROR, hook=hook.__name__, error=error)
