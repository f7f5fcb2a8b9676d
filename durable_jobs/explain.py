"""Why a job does not run, what is wrong with it, and what can be done: for pill, page, API and command.

`phase` and `reasons` are pure: a row, a moment of the database's clock and the pauses and workers that were read
with it. `explain` reads them.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from enum import StrEnum

from durable_jobs import database, kinds, store
from durable_jobs.conf import config
from durable_jobs.kinds import Kind
from durable_jobs.lifecycle import MIRROR_STUCK_AFTER
from durable_jobs.models import MANUAL_QUEUE, Job, JobEvent, Pause, Status, Verdict, WorkerProcess


class Phase(StrEnum):
    """What a job is doing, in a reader's words. `status` stays the stored fact."""

    HELD = "held"
    SCHEDULED = "scheduled"
    WAITING = "waiting"
    PAUSED = "paused"
    RUNNING = "running"
    RETRYING = "retrying"
    STOPPING = "stopping"
    STUCK = "stuck"
    COMPLETED = "completed"
    FAILED = "failed"
    PARKED = "parked"
    CANCELLED = "cancelled"


@dataclass(frozen=True)
class Reason:
    """One thing to know about a job: a stable code, a sentence, and the way out (empty when there is nothing to do)."""

    code: str
    sentence: str
    way_out: str = ""


STUCK_REASONS = frozenset(
    {"lease_expired", "stalled", "slice_overdue", "cancel_unseen", "cancel_seen", "mirror_failing"}
)
WORKER_SILENT_SECONDS = 60.0


def phase(job: Job, now: datetime, pauses: Collection[Pause] = ()) -> Phase:
    """The job's phase at `now`, the database's time. Pure."""
    if job.status == Status.FAILED:
        return Phase.PARKED if job.parked_at else Phase.FAILED
    if job.status in (Status.COMPLETED, Status.CANCELLED, Status.HELD):
        return Phase(job.status)
    if STUCK_REASONS.intersection(reason.code for reason in troubles(job, now)):
        return Phase.STUCK
    if job.cancel_requested_at is not None:
        return Phase.STOPPING
    if job.status == Status.RUNNING and job.lease_owner is not None:
        return Phase.RUNNING
    if matching(job, pauses):
        return Phase.PAUSED
    if job.status == Status.RUNNING:
        return Phase.RETRYING
    return Phase.SCHEDULED if job.next_run_at is not None and job.next_run_at > now else Phase.WAITING


def current_phase(job: Job) -> Phase:
    """The job's phase now, by the database's clock and with the pauses that are there."""
    return phase(job, store.now(), list(Pause.objects.using(database.alias())))


def matching(job: Job, pauses: Collection[Pause]) -> list[Pause]:
    """The pauses that hold this job back."""
    return [
        pause
        for pause in pauses
        if pause.queue_name in ("", job.queue_name)
        and pause.kind in ("", job.kind)
        and pause.tenant_id in ("", job.tenant_id)
    ]


def troubles(job: Job, now: datetime) -> list[Reason]:
    """What is wrong with a live job, from its row alone. Pure."""
    found: list[Reason] = []
    if job.status not in (Status.PENDING, Status.RUNNING, Status.HELD):
        return found
    owned = job.status == Status.RUNNING and job.lease_owner is not None
    if owned and job.lease_expires_at is not None:
        overdue = (now - job.lease_expires_at).total_seconds()
        if overdue > config.GRACE:
            found.append(
                Reason(
                    "lease_expired",
                    f"Its worker {job.lease_owner} has not renewed the lease, which ended {_ago(overdue)}.",
                    "The reconciler repairs it by itself as soon as a worker ticks; a redrive runs it at once.",
                )
            )
    if owned:
        found.extend(_of_a_slow_slice(job, now))
    if job.cancel_requested_at is not None:
        found.extend(_of_an_old_cancel(job, now, owned))
    if job.mirror_attempts >= MIRROR_STUCK_AFTER:
        found.append(
            Reason(
                "mirror_failing",
                f"Its hooks have failed {job.mirror_attempts} times, so it cannot end.",
                "Mend the hook or the project's row; it is tried again. Or settle the job without hooks.",
            )
        )
    return found


def explain(job: Job) -> list[Reason]:
    """What an operator should know about a job, most pressing first; empty when all is as it should be."""
    using = database.alias()
    now = store.now()
    pauses = list(Pause.objects.using(using))
    horizon = now - timedelta(seconds=max(WORKER_SILENT_SECONDS, 4 * config.TICK))
    workers = list(WorkerProcess.objects.using(using).filter(beat_at__gte=horizon))
    last = WorkerProcess.objects.using(using).order_by("-beat_at").first()
    holder = None
    if job.status == Status.FAILED and job.lock_key is not None:
        holder = store.by_lock_key(job.lock_key, job.scope)
    error = None
    if job.mirror_attempts >= MIRROR_STUCK_AFTER and job.is_live:
        error = (
            JobEvent.objects.using(using).filter(job_id=job.id, event="mirror_failed").order_by("-id").first()
        )
    return reasons(job, now, pauses, workers, last, holder, error)


def reasons(
    job: Job,
    now: datetime,
    pauses: Sequence[Pause] = (),
    workers: Sequence[WorkerProcess] = (),
    last_worker: WorkerProcess | None = None,
    holder: Job | None = None,
    mirror_error: JobEvent | None = None,
) -> list[Reason]:
    """The same from what was read. Pure. `workers` are those that beat lately."""
    kind = kinds.find(job.kind)
    found = [
        _with_error(reason, mirror_error) if reason.code == "mirror_failing" else reason
        for reason in troubles(job, now)
    ]
    match job.status:
        case Status.HELD:
            found.append(Reason("held", "It is held: nothing starts it by itself.", "Release it."))
        case Status.PENDING | Status.RUNNING if job.next_run_at is not None:
            found.extend(_of_waiting(job, kind, now, pauses, workers, last_worker))
        case Status.RUNNING if job.cancel_requested_at is not None and not _has(found, "cancel_"):
            seen = job.heartbeat_at is not None and job.heartbeat_at > job.cancel_requested_at
            found.append(
                Reason(
                    "stopping",
                    "A cancel was requested; its worker "
                    + (
                        "has seen it and stops at the next boundary."
                        if seen
                        else "sees it with its next beat."
                    ),
                )
            )
        case Status.FAILED:
            found.extend(_of_failed(job, kind, holder))
    return found


# --- inside ---------------------------------------------------------------------------------------------


def _of_a_slow_slice(job: Job, now: datetime) -> list[Reason]:
    kind = kinds.find(job.kind)
    moments = [moment for moment in (job.last_committed_at, job.claimed_at) if moment is not None]
    if not moments:
        return []
    quiet = (now - max(moments)).total_seconds()
    longest = kind.max_slice_seconds if kind is not None else Kind.max_slice_seconds
    if quiet > longest:
        return [
            Reason(
                "slice_overdue",
                f"Its slice has committed nothing for {_span(quiet)}; after {_span(longest)} it counts as hung and "
                "its lease is renewed no more.",
                "Look for a call without a time limit in the worker's log (slice_overdue shows the stack).",
            )
        ]
    if quiet > config.STALLED_AFTER:
        return [
            Reason(
                "stalled",
                f"It runs, but has committed nothing for {_span(quiet)}.",
                "Look at what the step waits for. Work that is slow by nature should commit more often.",
            )
        ]
    return []


def _of_an_old_cancel(job: Job, now: datetime, owned: bool) -> list[Reason]:
    assert job.cancel_requested_at is not None
    waiting = (now - job.cancel_requested_at).total_seconds()
    if waiting <= max(config.GRACE, 2 * config.TICK):
        return []
    if owned and job.heartbeat_at is not None and job.heartbeat_at > job.cancel_requested_at:
        return [
            Reason(
                "cancel_seen",
                f"A cancel was requested {_ago(waiting)}, and its worker knows; the step has not reached a boundary.",
                "Wait for the step, or end its worker: the job is then cancelled by the reconciler.",
            )
        ]
    return [
        Reason(
            "cancel_unseen",
            f"A cancel was requested {_ago(waiting)}, and nobody has acted on it.",
            "It needs a live worker of its queue, or the reconciler of any worker that knows its kind.",
        )
    ]


def _of_waiting(
    job: Job,
    kind: Kind | None,
    now: datetime,
    pauses: Sequence[Pause],
    workers: Sequence[WorkerProcess],
    last_worker: WorkerProcess | None,
) -> list[Reason]:
    found = [
        Reason(
            "paused",
            f"Paused since {pause.since:%Y-%m-%d %H:%M} UTC"
            + (f" by {pause.actor}" if pause.actor else "")
            + f": {pause.reason}",
            "Unpause.",
        )
        for pause in matching(job, pauses)
    ]
    assert job.next_run_at is not None
    ahead = (job.next_run_at - now).total_seconds()
    if job.status == Status.RUNNING:
        limit = kind.retry.failures if kind is not None else None
        count = f"{job.consecutive_failures}{f' of {limit}' if limit else ''} failures"
        when = f"in {_span(ahead)}" if ahead > 0 else "as soon as a worker is free"
        found.append(
            Reason(
                "retrying",
                f"Tries again {when}; {count}, the last: {job.error_type or 'none'}.",
                "Redrive runs it now.",
            )
        )
    elif ahead > 0:
        asked = "asked by the job" if job.attempts else "as scheduled"
        found.append(Reason("scheduled", f"Waits {_span(ahead)} longer, {asked}."))
    if job.queue_name == MANUAL_QUEUE:
        return [*found, Reason("manual", "Workers leave this queue alone; its owner runs it by hand.")]
    serving = [worker for worker in workers if _serves(worker.queues, job.queue_name)]
    knowing = [worker for worker in serving if _serves(worker.kinds, job.kind)]
    if not serving:
        seen = (
            f" The last worker of any queue was seen {_ago((now - last_worker.beat_at).total_seconds())} on {last_worker.host}."
            if last_worker
            else " No worker has ever been seen."
        )
        found.append(
            Reason(
                "no_worker",
                f"No live worker serves the queue {job.queue_name}.{seen}",
                f"Start one: manage.py runworker --queues {job.queue_name}",
            )
        )
    elif not knowing:
        found.append(
            Reason(
                "unknown_kind",
                f"The workers of the queue {job.queue_name} do not know the kind {job.kind}.",
                "Deploy the code that registers it, or give a renamed kind its old name among aliases.",
            )
        )
    elif ahead <= 0 and not found:
        found.append(Reason("waiting", f"Due; waits for a free worker of the queue {job.queue_name}."))
    return found


def _of_failed(job: Job, kind: Kind | None, holder: Job | None) -> list[Reason]:
    found = []
    if job.parked_at is not None:
        found.append(
            Reason(
                "parked",
                f"Parked as {job.error_code}: {job.error_message or 'no message'}",
                "Find out why, then redrive it.",
            )
        )
    elif job.verdict == Verdict.UNRECOVERABLE:
        found.append(
            Reason(
                "unrecoverable",
                f"Failed for good ({job.error_type or 'no type'}): {job.error_message or 'no message'}",
                "Repair the cause, then redrive with force.",
            )
        )
    else:
        found.append(
            Reason(
                "failed",
                f"Failed after {job.consecutive_failures} failures ({job.error_type or 'no type'}): "
                f"{job.error_message or 'no message'}",
                "Redrive it once the cause is gone.",
            )
        )
    if holder is not None and holder.id != job.id:
        found.append(
            Reason(
                "lock_held",
                f"A redrive would be refused: job {holder.id} holds its lock key {job.lock_key}.",
                "Wait until that job has ended, or cancel it.",
            )
        )
    if kind is None:
        found.append(
            Reason(
                "unknown_kind",
                f"The kind {job.kind} is not known here, so it cannot be redriven from here.",
                "Redrive it where its code is installed.",
            )
        )
    return found


def _with_error(reason: Reason, event: JobEvent | None) -> Reason:
    if event is None:
        return reason
    return Reason(
        reason.code,
        f"{reason.sentence} The last error: {event.error_type}: {event.message[:300]}",
        reason.way_out,
    )


def _has(found: Sequence[Reason], prefix: str) -> bool:
    return any(reason.code.startswith(prefix) for reason in found)


def _serves(names: str, wanted: str) -> bool:
    try:
        listed = json.loads(names or "[]")
    except ValueError:
        return False
    return not listed or wanted in listed


def _ago(seconds: float) -> str:
    return f"{_span(seconds)} ago"


def _span(seconds: float) -> str:
    seconds = max(0, round(seconds))
    for size, unit in ((86_400, "d"), (3_600, "h"), (60, "min")):
        if seconds >= 2 * size:
            return f"{seconds // size} {unit}"
    return f"{seconds} s"
