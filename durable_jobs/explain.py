"""Why a job does not run, what is wrong with it, and what can be done: for pill, page, API and command.

`phase` and `reasons` are pure: a row, a moment of the database's clock and the pauses and workers that were read
with it. `explain` reads them.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from enum import StrEnum
from pathlib import PurePath

from django.db.models import Min, Q
from django.utils.translation import gettext as _
from django.utils.translation import gettext_noop, ngettext, pgettext

from durable_jobs import database, kinds, store
from durable_jobs.conf import MANUAL_QUEUE, config
from durable_jobs.exceptions import cut
from durable_jobs.kinds import Kind
from durable_jobs.lifecycle import MIRROR_STUCK_AFTER
from durable_jobs.models import (
    CHANGED_INPUT,
    CancelRequest,
    Job,
    JobEvent,
    Pause,
    Status,
    Verdict,
    WorkerProcess,
)


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
"""A worker whose process has not shown itself for so long does not count as live."""
MESSAGE_SHOWN = 300


def phase(job: Job, now: datetime, pauses: Collection[Pause] = ()) -> Phase:
    """The job's phase at `now`, the database's time. Pure."""
    if job.status == Status.FAILED:
        return Phase.PARKED if job.parked_at else Phase.FAILED
    if job.status in (Status.COMPLETED, Status.CANCELLED):
        return Phase(job.status)
    if STUCK_REASONS.intersection(reason.code for reason in troubles(job, now)):
        return Phase.STUCK
    if job.cancel_requested_at is not None:
        return Phase.STOPPING
    if job.status == Status.HELD:
        return Phase.HELD
    if _is_owned(job):
        return Phase.RUNNING
    if matching(job, pauses):
        return Phase.PAUSED
    if job.status == Status.RUNNING:
        return Phase.RETRYING
    return Phase.SCHEDULED if job.next_run_at is not None and job.next_run_at > now else Phase.WAITING


def current_phase(job: Job) -> Phase:
    """The job's phase now, by the database's clock and with the pauses that are there."""
    return phase(job, *store.now_and_pauses())


def among(wanted: Phase, now: datetime, pauses: Collection[Pause] = ()) -> Q:
    """A condition that holds for every job of a phase, and for few others: `phase` has the last word on each.

    Of what is stuck, or has ended, it holds for no other.
    """
    owned = Q(status=Status.RUNNING, lease_owner__isnull=False)
    unowned = Q(status=Status.RUNNING, lease_owner__isnull=True)
    cancelling = Q(cancel_requested_at__isnull=False, finished_at__isnull=True)
    match wanted:
        case Phase.COMPLETED | Phase.CANCELLED | Phase.HELD:
            return Q(status=wanted.value)
        case Phase.FAILED | Phase.PARKED:
            return Q(status=Status.FAILED, parked_at__isnull=wanted is Phase.FAILED)
        case Phase.STUCK:
            # Each part has a partial index: what is running, to be cancelled, or claimable.
            failing = Q(mirror_attempts__gte=MIRROR_STUCK_AFTER)
            late = cancelling & Q(cancel_requested_at__lt=now - timedelta(seconds=_patience()))
            expired = Q(lease_expires_at__lt=now - timedelta(seconds=config.GRACE))
            claimable = Q(next_run_at__isnull=False)
            return (owned & (expired | _quiet(now) | failing)) | late | ((claimable | cancelling) & failing)
        case Phase.STOPPING:
            return cancelling
        case Phase.RUNNING:
            return owned
        case Phase.PAUSED:
            return (Q(status=Status.PENDING) | unowned) & held_back(pauses)
        case Phase.RETRYING:
            return unowned
        case Phase.SCHEDULED:
            return Q(status=Status.PENDING, next_run_at__gt=now)
        case Phase.WAITING:
            return Q(status=Status.PENDING, next_run_at__lte=now)


def _quiet(now: datetime) -> Q:
    """Of what runs, what has committed nothing for as long as stalls it, or for as long as its kind's slices may take."""

    def since(seconds: float) -> Q:
        moment = now - timedelta(seconds=seconds)
        claimed, committed = Q(claimed_at__lt=moment), Q(last_committed_at__lt=moment)
        unclaimed, uncommitted = Q(claimed_at__isnull=True), Q(last_committed_at__isnull=True)
        return (claimed & (committed | uncommitted)) | (unclaimed & committed)

    usual = min(config.STALLED_AFTER, Kind.max_slice_seconds)
    others: dict[float, list[str]] = {}
    for kind in kinds.all_kinds():
        longest = min(config.STALLED_AFTER, kind.max_slice_seconds)
        if longest != usual:
            others.setdefault(longest, []).extend(kind.all_names)
    condition = since(usual)
    if others:
        condition &= ~Q(kind__in=[name for names in others.values() for name in names])
    for longest, names in others.items():
        condition |= Q(kind__in=names) & since(longest)
    return condition


def held_back(pauses: Collection[Pause]) -> Q:
    """A condition that holds for every job that one of the pauses matches."""
    condition = Q(pk__in=[])
    for pause in pauses:
        parts = {"queue_name": pause.queue_name, "kind": pause.kind, "tenant_id": pause.tenant_id}
        named = {name: value for name, value in parts.items() if value}
        if not named:
            return Q()
        condition |= Q(**named)
    return condition


def matching(job: Job, pauses: Collection[Pause]) -> list[Pause]:
    """The pauses that hold this job back."""
    return [
        pause
        for pause in pauses
        if pause.queue_name in ("", job.queue_name)
        and pause.kind in ("", job.kind)
        and pause.tenant_id in ("", job.tenant_id)
    ]


def troubles(
    job: Job, now: datetime, pauses: Collection[Pause] = (), requested_at: datetime | None = None
) -> list[Reason]:
    """What is wrong with a job that has not ended, from its row alone. Pure.

    `requested_at`: a cancel request that is not on the row yet, because it met a locked one.
    """
    found: list[Reason] = []
    if job.status not in (Status.PENDING, Status.RUNNING, Status.HELD):
        return found
    requested_at = job.cancel_requested_at or requested_at
    if _is_owned(job):
        assert job.lease_expires_at is not None
        overdue = (now - job.lease_expires_at).total_seconds()
        if overdue > config.GRACE:
            found.append(
                Reason(
                    "lease_expired",
                    _("Its worker %(owner)s has not renewed the lease, which ended %(ago)s.")
                    % {"owner": job.lease_owner, "ago": _ago(overdue)},
                    _way_out_of_an_expired_lease(job, pauses, requested_at),
                )
            )
        found.extend(_of_a_slow_slice(job, now))
    if requested_at is not None:
        found.extend(_of_an_old_cancel(job, now, requested_at))
    if job.mirror_attempts >= MIRROR_STUCK_AFTER:
        found.append(
            Reason(
                "mirror_failing",
                _("Its hooks have failed %(number)s times, so it cannot end.")
                % {"number": job.mirror_attempts},
                _("Mend the hook or the project's row; it is tried again. Or settle the job without hooks."),
            )
        )
    return found


def explain(job: Job) -> list[Reason]:
    """What an operator should know about a job, most pressing first; empty when all is as it should be."""
    using = database.alias()
    now, pauses = store.now_and_pauses()
    last = WorkerProcess.objects.using(using).order_by("-beat_at").first()
    holder = error = requested_at = None
    if job.status == Status.FAILED and job.lock_key is not None:
        holder = store.by_lock_key(job.lock_key, job.scope)
    if job.is_live:
        letters = CancelRequest.objects.using(using).filter(job_id=job.id)
        requested_at = letters.aggregate(first=Min("requested_at"))["first"]
    if job.mirror_attempts >= MIRROR_STUCK_AFTER:
        failures = JobEvent.objects.using(using).filter(job_id=job.id, event="mirror_failed")
        error = failures.order_by("-id").first()
    running = _running_of_its_kind(job)
    return reasons(job, now, pauses, live_workers(now), last, holder, error, requested_at, running)


def _running_of_its_kind(job: Job) -> int | None:
    """How many jobs of a kind with a limit run in the scope of a job that waits; None where it does not matter."""
    kind = kinds.find(job.kind)
    if kind is None or kind.max_running is None or job.next_run_at is None:
        return None
    return store.running_of_kind(kind.all_names, job.scope)


def live_workers(now: datetime) -> list[WorkerProcess]:
    """The worker processes that have shown themselves lately, `now` being the database's time."""
    horizon = now - timedelta(seconds=max(WORKER_SILENT_SECONDS, 4 * config.TICK))
    return list(WorkerProcess.objects.using(database.alias()).filter(beat_at__gte=horizon).order_by("id"))


def serves(worker: WorkerProcess, queue: str, kind: str = "") -> bool:
    """Whether a worker takes jobs of this queue (and of this kind, by any of its names). Empty lists mean all.

    A worker of all kinds says nothing of those that its code lacks.
    """
    known = kinds.find(kind) if kind else None
    names = {kind, *(known.all_names if known else ())}
    return _has_one(worker.queue_names, {queue}) and (not kind or _has_one(worker.kind_names, names))


def reasons(
    job: Job,
    now: datetime,
    pauses: Sequence[Pause] = (),
    workers: Sequence[WorkerProcess] = (),
    last_worker: WorkerProcess | None = None,
    holder: Job | None = None,
    mirror_error: JobEvent | None = None,
    requested_at: datetime | None = None,
    running: int | None = None,
) -> list[Reason]:
    """The same from what was read. Pure. `workers` are those that beat lately, `running` the jobs of its kind."""
    kind = kinds.find(job.kind)
    found = [
        _with_error(reason, mirror_error) if reason.code == "mirror_failing" else reason
        for reason in troubles(job, now, pauses, requested_at)
    ]
    requested_at = job.cancel_requested_at or requested_at
    if job.status == Status.FAILED:
        return _of_failed(job, kind, holder)
    if job.status not in (Status.HELD, Status.PENDING, Status.RUNNING):
        return []
    if requested_at is not None:
        told = _has(found, "cancel_") or _has(found, "lease_expired")
        return found if told else [*found, _of_a_new_cancel(job, now, requested_at)]
    if not _is_owned(job) and job.input_text is not None and not job.is_authentic:
        # Nothing else is in the way of a job that nobody may start.
        return [*found, Reason("input_changed", _(CHANGED_INPUT), _("Cancel it, and start a new one."))]
    if job.status == Status.HELD:
        way_out = _("Release it.")
        if job.queue_name == MANUAL_QUEUE:
            way_out = _("Its manager resumes it (JobManager.resume_job).")
        return [*found, Reason("held", _("It is held: nothing starts it by itself."), way_out)]
    if _is_owned(job):
        return [*found, *(_pausing(pause) for pause in matching(job, pauses))]
    found += [_paused(pause) for pause in matching(job, pauses)]
    found += _of_workers(job, kind, now, workers, last_worker)
    if (
        kind is not None
        and kind.max_running is not None
        and running is not None
        and running >= kind.max_running
    ):
        found.append(
            Reason(
                "full",
                _("%(running)s jobs of its kind run in its scope, and %(limit)s may.")
                % {"running": running, "limit": kind.max_running},
                _("Wait for one to end; one whose worker died counts until it is repaired."),
            )
        )
    waiting = _of_waiting(job, kind, now)
    # "Waits for a free worker" is only true when nothing else is in the way.
    return found if found and waiting.code == "waiting" else [*found, waiting]


# --- what an act would meet -----------------------------------------------------------------------------


def refusal_of_cancel(job: Job) -> Reason | None:
    """Why a cancel would be refused, with the refusal's code; None when it would be taken. Pure."""
    if job.finished_at is not None:
        return Reason("not_cancellable", _("It has ended already: %(status)s.") % {"status": _status(job)})
    if job.cancel_requested_at is not None:
        return Reason("cancel_requested", _("Its end was requested already."), _("Wait for it."))
    return None


def refusal_of_redrive(
    job: Job, now: datetime, *, force: bool = False, restart: bool = False, holder: Job | None = None
) -> Reason | None:
    """Why a redrive would be refused, with the refusal's code; None when it would be taken. Pure.

    The same conditions as the redrive's own statement, judged at `now`, the database's time. `holder` is the
    live job that has the job's lock key.
    """
    kind = kinds.find(job.kind)
    if kind is None:
        return Reason(
            "unknown_kind",
            _("The kind %(kind)s is not known here.") % {"kind": job.kind},
            _("Redrive it where its code is installed."),
        )
    if restart and not kind.allow_restart:
        return Reason("restart_not_allowed", _("Its kind does not allow a run from the start."))
    if not _is_redrivable(job, now):
        if job.status == Status.COMPLETED:
            sentence = _("It has ended well: only what failed or lost its worker is run again.")
        else:
            said = _("It is %(status)s: only what failed or lost its worker is run again.")
            sentence = said % {"status": _status(job)}
        return Reason("not_redrivable", sentence)
    if job.verdict == Verdict.UNRECOVERABLE and not force:
        return Reason(
            "unrecoverable_requires_force",
            _("Running it again is expected to fail again."),
            _("Repair the cause, then force it."),
        )
    if holder is not None and holder.id != job.id:
        return Reason(
            "lock_key_held",
            _("Job %(id)s holds its lock key %(key)s.") % {"id": holder.id, "key": job.lock_key},
            _("Wait until that job has ended, or cancel it."),
        )
    return None


def refusal_of_settle(job: Job, now: datetime) -> Reason | None:
    """Why settling without hooks would be refused; None when it would be taken. Pure."""
    if job.finished_at is not None or not job.mirror_attempts:
        return Reason(
            "not_settleable", _("Only a live job whose hooks keep failing is settled without them.")
        )
    if _is_owned(job) and not _is_expired(job, now):
        return Reason("not_settleable", _("It runs: cancel it first."))
    return None


def _is_redrivable(job: Job, now: datetime) -> bool:
    if job.status == Status.FAILED:
        return True
    return job.status == Status.RUNNING and (not _is_owned(job) or _is_expired(job, now))


def _is_expired(job: Job, now: datetime) -> bool:
    if job.lease_expires_at is None:
        return False
    return job.lease_expires_at < now - timedelta(seconds=config.GRACE)


class Redrivable(StrEnum):
    """Whether a redrive would be taken: not at all, as it is, or only with force."""

    NO = "no"
    YES = "yes"
    FORCE = "force"


def redrivable(job: Job, now: datetime, holder: Job | None = None) -> Redrivable:
    """What a redrive would meet at `now`, the database's time; `holder` has the job's lock key. Pure."""
    if refusal_of_redrive(job, now, holder=holder) is None:
        return Redrivable.YES
    forced = refusal_of_redrive(job, now, force=True, holder=holder)
    return Redrivable.FORCE if forced is None else Redrivable.NO


# --- how fast it goes -----------------------------------------------------------------------------------

PACE_AFTER = 10.0
"""Seconds that a slice must have run before its speed says anything."""


@dataclass(frozen=True)
class Pace:
    """Items per second in the present slice, and the seconds that are left at this speed; None where unknown."""

    rate: float | None = None
    eta_seconds: int | None = None


def pace(job: Job, now: datetime) -> Pace:
    """How fast a running job gets on, from its counts since the claim. Pure."""
    if not _is_owned(job) or job.claimed_at is None:
        return Pace()
    seconds = (now - job.claimed_at).total_seconds()
    done = job.processed_count - job.processed_at_claim
    if seconds < PACE_AFTER or done <= 0:
        return Pace()
    rate = done / seconds
    if job.total_count is None:
        return Pace(rate)
    return Pace(rate, math.ceil(max(0, job.total_count - job.processed_count) / rate))


# --- for the user who started it ------------------------------------------------------------------------

_PUBLIC = {
    Phase.HELD: gettext_noop("Waiting to be released."),
    Phase.SCHEDULED: gettext_noop("Scheduled."),
    Phase.WAITING: gettext_noop("Waiting to start."),
    Phase.PAUSED: gettext_noop("Paused for the moment."),
    Phase.RUNNING: gettext_noop("Running."),
    Phase.RETRYING: gettext_noop("Interrupted; it goes on by itself."),
    Phase.STOPPING: gettext_noop("Being cancelled."),
    Phase.STUCK: gettext_noop("Not getting on at the moment."),
    Phase.COMPLETED: gettext_noop("Finished."),
    Phase.FAILED: gettext_noop("Failed."),
    Phase.PARKED: gettext_noop("Stopped until somebody has looked at it."),
    Phase.CANCELLED: gettext_noop("Cancelled."),
}


def public_message(job: Job, phase: Phase) -> str:
    """What the user who started a job may read: the step's own progress message, else a sentence by phase.

    Never an error's text, which shows internals.
    """
    if phase is Phase.RUNNING and job.progress_message:
        return job.progress_message
    return _(_PUBLIC[phase])


# --- inside ---------------------------------------------------------------------------------------------


def _is_owned(job: Job) -> bool:
    return job.status == Status.RUNNING and job.lease_owner is not None


def _way_out_of_an_expired_lease(job: Job, pauses: Collection[Pause], requested_at: datetime | None) -> str:
    kind = kinds.find(job.kind)
    if job.queue_name == MANUAL_QUEUE:
        return _("No reconciler touches this queue: its owner, or a person, ends the job.")
    if requested_at is not None:
        return _("A cancel was requested: the reconciler of any worker ends it as cancelled by itself.")
    if matching(job, pauses):
        return _(
            "Paused work is not repaired. Unpause it; or redrive the job, which then waits for the end of the pause."
        )
    if kind is None:
        said = _("The kind %(kind)s is not known here: a worker that knows it repairs the job by itself.")
        return said % {"kind": job.kind}
    if kind.orphan_policy == "redrive":
        return _(
            "The reconciler of any worker runs it again from its checkpoint by itself; a redrive does so at once."
        )
    return _(
        "The reconciler of any worker parks it, as its kind asks, for a person to decide; a redrive runs it at once."
    )


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
                _(
                    "Its slice has committed nothing for %(quiet)s; after %(longest)s it counts as hung and its "
                    "lease is renewed no more."
                )
                % {"quiet": span(quiet), "longest": span(longest)},
                _(
                    "Look for a call without a time limit in the worker's log (slice_overdue shows the stack)."
                ),
            )
        ]
    if quiet > config.STALLED_AFTER:
        return [
            Reason(
                "stalled",
                _("It runs, but has committed nothing for %(quiet)s.") % {"quiet": span(quiet)},
                _("Look at what the step waits for. Work that is slow by nature should commit more often."),
            )
        ]
    return []


def _patience() -> float:
    """Seconds after which a cancel should have been acted on."""
    return max(config.GRACE, 2 * config.TICK)


def _of_an_old_cancel(job: Job, now: datetime, requested_at: datetime) -> list[Reason]:
    waiting = (now - requested_at).total_seconds()
    if waiting <= _patience():
        return []
    if _has_seen(job, requested_at):
        return [
            Reason(
                "cancel_seen",
                _(
                    "A cancel was requested %(ago)s, and its worker knows; the step has not reached a boundary."
                )
                % {"ago": _ago(waiting)},
                _("Wait for the step, or end its worker: the job is then cancelled by the reconciler."),
            )
        ]
    return [
        Reason(
            "cancel_unseen",
            _("A cancel was requested %(ago)s, and nobody has acted on it.") % {"ago": _ago(waiting)},
            _("It needs its own worker, or the reconciler of any live worker that knows its kind."),
        )
    ]


def _of_a_new_cancel(job: Job, now: datetime, requested_at: datetime) -> Reason:
    if not _is_owned(job):
        sentence = _(
            "A cancel was requested %(ago)s; the reconciler of any worker ends the job with its next pass."
        )
    elif _has_seen(job, requested_at):
        sentence = _("A cancel was requested %(ago)s; its worker has seen it and stops at the next boundary.")
    else:
        sentence = _("A cancel was requested %(ago)s; its worker sees it with its next beat.")
    return Reason("stopping", sentence % {"ago": _ago((now - requested_at).total_seconds())})


def _has_seen(job: Job, requested_at: datetime) -> bool:
    return _is_owned(job) and job.heartbeat_at is not None and job.heartbeat_at > requested_at


def _paused(pause: Pause) -> Reason:
    return Reason("paused", of_pause(pause), _("Unpause."))


def _pausing(pause: Pause) -> Reason:
    asked = _("Its slice is asked to yield at the next boundary.")
    return Reason("pausing", f"{of_pause(pause)} {asked}")


def of_pause(pause: Pause) -> str:
    """The pause in a sentence: what it stops, since when, by whom, and why."""
    facts = {
        "what": what_stops(pause),
        "since": f"{pause.since.astimezone(UTC):%Y-%m-%d %H:%M} UTC",
        "who": pause.actor,
        "reason": pause.reason.rstrip("."),
    }
    if pause.actor:
        return _("Paused (%(what)s) since %(since)s by %(who)s: %(reason)s.") % facts
    return _("Paused (%(what)s) since %(since)s: %(reason)s.") % facts


def what_stops(pause: Pause) -> str:
    """What a pause stops, in a few words."""
    parts = [(_("queue"), pause.queue_name), (_("kind"), pause.kind), (_("tenant"), pause.tenant_id)]
    return ", ".join(f"{name} {value}" for name, value in parts if value) or _("all work")


def _of_workers(
    job: Job,
    kind: Kind | None,
    now: datetime,
    workers: Sequence[WorkerProcess],
    last_worker: WorkerProcess | None,
) -> list[Reason]:
    """Whether anybody would run the job."""
    if job.queue_name == MANUAL_QUEUE:
        return [Reason("manual", _("Workers leave this queue alone; its owner runs the job by hand."))]
    serving = [worker for worker in workers if serves(worker, job.queue_name)]
    register = _("Deploy the code that registers it, or give a renamed kind its old name among aliases.")
    unknown_here = Reason(
        "unknown_kind", _("The kind %(kind)s is not registered here.") % {"kind": job.kind}, register
    )
    if not serving:
        way_out = _("Start one: %(command)s") % {"command": f"manage.py runworker --queues {job.queue_name}"}
        if last_worker is None:
            seen = _("No worker is signed on.")
            elsewhere = _("(One that runs already uses another database than %(database)s.)")
            name = PurePath(database.place(database.connection())).name
            way_out = f"{way_out} {elsewhere % {'database': name}}"
        else:
            silent = (now - last_worker.beat_at).total_seconds()
            said = _("The last worker of any queue was seen %(ago)s on %(host)s.")
            seen = said % {"ago": _ago(silent), "host": last_worker.host}
        sentence = _("No live worker serves the queue %(queue)s.") % {"queue": job.queue_name}
        no_worker = Reason("no_worker", f"{sentence} {seen}", way_out)
        return [no_worker] if kind is not None else [no_worker, unknown_here]
    knowing = [worker for worker in serving if serves(worker, job.queue_name, job.kind)]
    if not knowing:
        sentence = _("The live workers of the queue %(queue)s do not take the kind %(kind)s.")
        facts = {"queue": job.queue_name, "kind": job.kind}
        return [Reason("unknown_kind", sentence % facts, " ".join((_("Start one that does."), register)))]
    if kind is None and not any(job.kind in worker.kind_names for worker in knowing):
        return [unknown_here]
    return []


def _of_waiting(job: Job, kind: Kind | None, now: datetime) -> Reason:
    """What the job waits for by itself."""
    assert job.next_run_at is not None
    ahead = (job.next_run_at - now).total_seconds()
    when = _("in %(time)s") % {"time": span(ahead)} if ahead > 0 else _("as soon as a worker is free")
    error = job.error_type or _("no type")
    if job.verdict is not None:
        sentence = _(
            "Its work has failed for good (%(error)s); ending the job, with its hooks, is tried again %(when)s."
        )
        return Reason("ending", sentence % {"error": error, "when": when})
    if job.status == Status.RUNNING:
        if not job.consecutive_failures:
            sentence = _("Goes on %(when)s; no failure is counted.")
        elif kind is not None:
            sentence = _("Tries again %(when)s; %(failures)s of %(limit)s failures, the last: %(error)s.")
        else:
            sentence = _("Tries again %(when)s; %(failures)s failures, the last: %(error)s.")
        facts = {"when": when, "failures": job.consecutive_failures, "error": error}
        facts["limit"] = kind.retry.failures if kind is not None else ""
        return Reason("retrying", sentence % facts, _("A redrive runs it now."))
    if ahead > 0:
        sentence = (
            _("Due in %(time)s, as the job asked.") if job.attempts else _("Due in %(time)s, as scheduled.")
        )
        return Reason("scheduled", sentence % {"time": span(ahead)})
    sentence = _("Due for %(time)s; waits for a free worker of the queue %(queue)s.")
    return Reason("waiting", sentence % {"time": span(-ahead), "queue": job.queue_name})


def _of_failed(job: Job, kind: Kind | None, holder: Job | None) -> list[Reason]:
    found = []
    nothing = _("no message")
    error = f"{job.error_type}: " if job.error_type else ""
    error = f"{error}{cut(job.error_message or nothing, MESSAGE_SHOWN)}"
    unrecoverable = job.verdict == Verdict.UNRECOVERABLE
    way_out = (
        _("Repair the cause, then redrive it with force.")
        if unrecoverable
        else _("Redrive it once the cause is gone.")
    )
    if job.parked_at is not None:
        said = _("Parked as %(code)s.") % {"code": job.error_code}
        found.append(Reason("parked", f"{said} {error}", way_out))
    elif unrecoverable:
        said = _("Failed, and running it again is expected to fail again.")
        found.append(Reason("unrecoverable", f"{said} {error}", way_out))
    else:
        count = job.consecutive_failures
        said = ngettext("Failed after %(count)s failure.", "Failed after %(count)s failures.", count)
        said = said % {"count": count} if count else _("Failed.")
        found.append(Reason("failed", f"{said} {error}", way_out))
    if holder is not None and holder.id != job.id:
        found.append(
            Reason(
                "lock_held",
                _("A redrive would be refused: job %(id)s holds its lock key %(key)s.")
                % {"id": holder.id, "key": job.lock_key},
                _("Wait until that job has ended, or cancel it."),
            )
        )
    if kind is None:
        found.append(
            Reason(
                "unknown_kind",
                _("The kind %(kind)s is not known here, so it cannot be redriven from here.")
                % {"kind": job.kind},
                _("Redrive it where its code is installed."),
            )
        )
    return found


def _with_error(reason: Reason, event: JobEvent | None) -> Reason:
    if event is None:
        return reason
    last = _("The last error:")
    return Reason(
        reason.code,
        f"{reason.sentence} {last} {event.error_type}: {cut(event.message, MESSAGE_SHOWN)}",
        reason.way_out,
    )


def _has(found: Sequence[Reason], prefix: str) -> bool:
    return any(reason.code.startswith(prefix) for reason in found)


def _has_one(listed: Collection[str], wanted: Collection[str]) -> bool:
    """Whether a worker's list has one of the names; an empty list stands for all."""
    return not listed or not set(wanted).isdisjoint(listed)


def _ago(seconds: float) -> str:
    return _("%(time)s ago") % {"time": span(seconds)}


def span(seconds: float) -> str:
    """A length of time in one unit, whole numbers: "45 s", "12 min", "3 h", "2 d"."""
    seconds = max(0, round(seconds))
    if seconds >= 2 * 86_400:
        return pgettext("days", "%(number)s d") % {"number": seconds // 86_400}
    if seconds >= 2 * 3_600:
        return pgettext("hours", "%(number)s h") % {"number": seconds // 3_600}
    if seconds >= 120:
        return pgettext("minutes", "%(number)s min") % {"number": seconds // 60}
    return pgettext("seconds", "%(number)s s") % {"number": seconds}


_STATUSES = {
    Status.HELD: gettext_noop("held"),
    Status.PENDING: gettext_noop("pending"),
    Status.RUNNING: gettext_noop("running"),
    Status.COMPLETED: gettext_noop("completed"),
    Status.FAILED: gettext_noop("failed"),
    Status.CANCELLED: gettext_noop("cancelled"),
}


def _status(job: Job) -> str:
    return _(_STATUSES[Status(job.status)])
