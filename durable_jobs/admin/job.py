"""What the page of one job says: how it goes, its way from start to end, what failed, and what it may still use."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from itertools import zip_longest
from typing import Any, Final

from django.db.models import F, Q
from django.http import HttpRequest
from django.utils.translation import gettext as _
from django.utils.translation import ngettext

from durable_jobs import database, explain, kinds, store
from durable_jobs.admin import access, acts, listing
from durable_jobs.explain import Phase, Reason
from durable_jobs.kinds import Kind
from durable_jobs.lifecycle import MIRROR_STUCK_AFTER
from durable_jobs.models import LIVE, CancelRequest, Job, JobEvent, Status
from durable_jobs.selection import LARGE_COLUMNS
from durable_jobs.templatetags.durable_jobs import event_name, pretty, span

EVENTS: Final = 100
SKIPPED: Final = 50
PAUSES: Final = 50
SAME_END: Final = timedelta(seconds=1)
"""So far apart may be a job's end and the line of its history that tells it."""
SHOWN: Final = 20_000
"""Characters of input, checkpoint and result; they may have a million."""
FAILURES: Final = ("slice_failed", "failed", "orphaned", "parked", "mirror_failed")


@dataclass(frozen=True)
class Progress:
    """How fast it goes: items a second, and when it would be done at that pace."""

    rate: float | None
    eta: float | None
    elapsed: float | None
    quiet: float | None


@dataclass(frozen=True)
class Stop:
    """One station on the job's way; `since` is the time that has gone by since the one before."""

    name: str
    at: datetime | None
    who: str = ""
    what: str = ""
    since: float | None = None
    tone: str = ""


@dataclass(frozen=True)
class Limit:
    """How much of a limit is used up; no `allowed`: it is only counted."""

    name: str
    used: int
    allowed: int | None
    meaning: str


@dataclass(frozen=True)
class Payload:
    """Input, checkpoint, result or labels as text; `whole` is its length when it was cut."""

    name: str
    text: str
    whole: int | None = None


@dataclass(frozen=True)
class Live:
    """The part of the page that changes while the job runs."""

    job: Job
    now: datetime
    kind: Kind | None
    phase: Phase
    reasons: list[Reason]
    holder: Job | None
    offers: list[acts.Offer]
    progress: Progress
    subject: listing.Subject | None
    scope: str
    requested: CancelRequest | None

    @property
    def moves(self) -> bool:
        """Whether there is anything to wait for."""
        return self.job.finished_at is None


def live(request: HttpRequest, job: Job, site: Any) -> Live:
    """Read it; large columns are not loaded."""
    using = database.alias()
    now, pauses = store.now_and_pauses()
    holder = None
    if job.lock_key is not None and job.status not in LIVE:
        holder = store.by_lock_key(job.lock_key, job.scope)
    letter = CancelRequest.objects.using(using).filter(job_id=job.id).order_by("id").first()
    return Live(
        job=job,
        now=now,
        kind=kinds.find(job.kind),
        phase=(phase := explain.phase(job, now, pauses)),
        reasons=explain.explain(job),
        holder=holder if holder is not None and _sees(request, holder) else None,
        offers=acts.offers(request, job, now, holder),
        progress=_progress(job, now, phase),
        subject=listing.subject_of(job, site),
        scope=access.labels([job.scope])[job.scope],
        requested=letter if job.is_live else None,
    )


def _sees(request: HttpRequest, job: Job) -> bool:
    allowed = access.scopes(request)
    return allowed is None or job.scope in allowed


def _progress(job: Job, now: datetime, phase: Phase) -> Progress:
    end = job.finished_at or now
    elapsed = (end - job.started_at).total_seconds() if job.started_at else None
    quiet = (now - job.last_committed_at).total_seconds() if job.last_committed_at else None
    # What stands still has no pace: one from before would promise an end that does not come.
    pace = explain.Pace() if phase is Phase.STUCK else explain.pace(job, now)
    rate, eta = pace.rate, pace.eta_seconds
    if job.finished_at and elapsed and job.processed_count:
        rate = job.processed_count / elapsed
    return Progress(rate, eta, elapsed, quiet)


def for_user(request: HttpRequest) -> Any:
    """The jobs that the user may see."""
    return Job.objects.using(database.alias()).filter(access.among(request))


def without_payload(request: HttpRequest) -> Any:
    """The same without the large columns, the error's message apart."""
    return for_user(request).defer(*(name for name in LARGE_COLUMNS if name != "error_message"))


# --- history --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Attempt:
    """What went wrong once; `seconds` is for how long the worker had held the job, None where nobody knows."""

    event: JobEvent
    seconds: float | None


@dataclass(frozen=True)
class History:
    """What the events tell: the way of the job, its failures newest first, and the items it skipped."""

    stops: list[Stop]
    cancel: list[str]
    failures: list[Attempt]
    skipped: list[JobEvent]
    more: bool


def history(job: Job) -> History:
    """Read the newest events."""
    events = JobEvent.objects.using(database.alias()).filter(job_id=job.id).defer("data")
    others = events.filter(~Q(event="item_skipped")).annotate(seconds=F("data__seconds"))
    newest = list(others.order_by("-id")[: EVENTS + 1])
    told = newest[:EVENTS]
    skipped = list(events.filter(event="item_skipped").order_by("-id")[:SKIPPED])
    return History(
        stops=_with_durations(_stops(job, [*reversed(told), *_pauses(job)])),
        cancel=_cancel_story(job, told),
        failures=_attempts(job, told),
        skipped=skipped,
        more=len(newest) > EVENTS,
    )


def _attempts(job: Job, events: list[Any]) -> list[Attempt]:
    """The failures, newest first. An end whose slice has told the same error already is left out."""
    told = [event for event in events if event.event in FAILURES]
    found = []
    for event, before in zip_longest(told, told[1:]):
        is_the_end = event.event == "failed" and before is not None and before.event == "slice_failed"
        if is_the_end and (event.epoch, event.message) == (before.epoch, before.message):
            continue
        found.append(Attempt(event, event.seconds if event.seconds is not None else _held(job, event)))
    return found


def _held(job: Job, event: JobEvent) -> float | None:
    """For how long the worker of a job's end had held it, from the row: of a lost one, until it was last seen."""
    if job.claimed_at is None or event.epoch != job.lease_epoch or event.event not in ("failed", "parked"):
        return None
    until = job.heartbeat_at if event.actor.startswith("reconciler") else event.created_at
    return max(0.0, ((until or event.created_at) - job.claimed_at).total_seconds())


def _pauses(job: Job) -> list[JobEvent]:
    """The pauses that held the job back while it lived, and their ends."""
    events = JobEvent.objects.using(database.alias()).filter(
        event__in=("paused", "unpaused"), job_id__isnull=True, created_at__gte=job.created_at
    )
    if job.finished_at is not None:
        events = events.filter(created_at__lte=job.finished_at)
    its = {"queue": job.queue_name, "kind": job.kind, "tenant": job.tenant_id}
    return [
        event
        for event in events.order_by("-created_at")[:PAUSES]
        if all((event.data or {}).get(name) in ("", value) for name, value in its.items())
    ]


def _stops(job: Job, events: list[JobEvent]) -> list[Stop]:
    by = str(job.created_by) if job.created_by_id else ""
    stops = [Stop(_("Created"), job.created_at, by)]
    if job.started_at:
        stops.append(Stop(_("First started"), job.started_at))
    ending = _ending(job, events)
    stops += [_of_event(event) for event in events if event is not ending]
    if job.status == Status.RUNNING and job.lease_owner and job.claimed_at:
        slices = _("slice %(number)s") % {"number": job.attempts}
        stops.append(Stop(_("Running since"), job.claimed_at, job.lease_owner, slices, tone="running"))
    if job.finished_at:
        many = ngettext("%(number)s slice in all", "%(number)s slices in all", job.attempts)
        slices = many % {"number": job.attempts} if job.attempts else ""
        words = {
            Status.COMPLETED: _("Completed"),
            Status.FAILED: _("Failed"),
            Status.CANCELLED: _("Cancelled"),
        }
        name = _("Parked") if job.parked_at else words[Status(job.status)]
        stops.append(Stop(name, job.finished_at, what=slices, tone=job.status))
    return sorted(stops, key=lambda stop: stop.at or job.created_at)


def _ending(job: Job, events: list[JobEvent]) -> JobEvent | None:
    """The line that the end of this job has written into its history: the row tells the same."""
    if job.finished_at is None:
        return None
    last = next(
        (event for event in reversed(events) if event.event in ("cancelled", "failed", "parked")), None
    )
    # One from before the last redrive ended another life of the job.
    return last if last is not None and last.created_at > job.finished_at - SAME_END else None


def _of_event(event: JobEvent) -> Stop:
    told = ": ".join(part for part in (event.error_type, event.message) if part)
    what = event.reason or told
    if event.job_id is None:
        what = f"{told}. {event.reason}" if event.reason else told
    tone = "failed" if event.event in FAILURES else ""
    return Stop(event_name(event.event), event.created_at, event.actor or event.owner, what[:200], tone=tone)


def _with_durations(stops: list[Stop]) -> list[Stop]:
    before: datetime | None = None
    told = []
    for stop in stops:
        since = (stop.at - before).total_seconds() if stop.at and before else None
        told.append(Stop(stop.name, stop.at, stop.who, stop.what, since, stop.tone))
        before = stop.at
    return told


def _cancel_story(job: Job, events: Sequence[JobEvent]) -> list[str]:
    """Requested · seen · ended, in sentences, of the last cancel."""
    if job.cancel_requested_at is None:
        return []
    asked = next((event for event in events if event.event == "cancel_requested"), None)
    ended = next((event for event in events if event.event == "cancelled"), None)
    who = asked.actor if asked is not None else (str(job.cancelled_by) if job.cancelled_by_id else "")
    story = [_("Requested by %(who)s.") % {"who": who} if who else _("Requested.")]
    if job.heartbeat_at and job.heartbeat_at > job.cancel_requested_at:
        waited = (job.heartbeat_at - job.cancel_requested_at).total_seconds()
        if job.finished_at is None:
            story.append(_("Seen by its worker %(time)s later.") % {"time": span(waited)})
    elif job.finished_at is None and job.lease_owner is not None:
        story.append(_("Its worker has not seen it yet."))
    if job.finished_at is not None and job.status == Status.CANCELLED:
        waited = (job.finished_at - job.cancel_requested_at).total_seconds()
        by = ended.actor if ended is not None else ""
        facts = {"time": span(waited), "item": f"{job.processed_count:,}", "who": by}
        story.append(
            _("Ended %(time)s later by %(who)s, at item %(item)s.") % facts
            if by
            else _("Ended %(time)s later, at item %(item)s.") % facts
        )
        if by.startswith("reconciler") and job.attempts:
            story.append(_("Its worker was gone; calls that it made outside the database may still run."))
    return story


# --- facts ----------------------------------------------------------------------------------------------


def limits(job: Job, kind: Kind | None) -> list[Limit]:
    """What of its limits the job has used up."""
    return [
        Limit(
            _("Failures in a row"),
            job.consecutive_failures,
            kind.retry.failures if kind else None,
            _("Then the job fails."),
        ),
        Limit(
            _("Workers lost since a commit"),
            job.redrives_since_commit,
            kind.max_orphanings if kind else None,
            _("The next one parks the job."),
        ),
        Limit(
            _("Failed hooks"),
            job.mirror_attempts,
            MIRROR_STUCK_AFTER,
            _("Then the job counts as stuck; it is tried again all the same."),
        ),
        Limit(_("Interruptions"), job.interruptions, None, _("Deploys and pauses. They harm nothing.")),
        Limit(_("Slices"), job.attempts, None, _("Times that a worker took the job up.")),
        Limit(_("Times run again"), job.redrives, None, _("By a person, or after a worker was lost.")),
    ]


def payloads(job: Job) -> Iterator[Payload]:
    """Input, checkpoint, result and labels, as the kind lets them be seen."""
    labels = {"input": _("Input"), "checkpoint": _("Checkpoint"), "result": _("Result"), "meta": _("Labels")}
    for name, value in kinds.payload(job).items():
        yield _payload(labels[name], value)


def _payload(label: str, value: Any) -> Payload:
    if value is None:
        return Payload(label, "")
    text = pretty(value)
    return Payload(label, text[:SHOWN], len(text) if len(text) > SHOWN else None)


def technical(job: Job) -> list[tuple[str, Any]]:
    """What only those look for who know the engine."""
    return [
        ("id", job.id),
        ("status", job.status),
        ("lease_owner", job.lease_owner),
        ("lease_epoch", job.lease_epoch),
        ("lease_expires_at", job.lease_expires_at),
        ("heartbeat_at", job.heartbeat_at),
        ("attempts", job.attempts),
        ("continuation_seq", job.continuation_seq),
        ("redrives", job.redrives),
        ("next_run_at", job.next_run_at),
        ("verdict", job.verdict),
        ("error_class", job.error_class),
        ("queue_job_id", job.queue_job_id),
        ("priority", job.priority),
        ("tenant_id", job.tenant_id),
        ("organization_id", job.organization_id),
        ("lock_key", job.lock_key),
        ("idempotency_key", job.idempotency_key),
        ("input_sha256", job.input_sha256),
        ("domain_mirrored_at", job.domain_mirrored_at),
        ("updated_at", job.updated_at),
    ]
