"""What a person can do with jobs: each act with its permission, its refusals, and how it is carried out.

One job is acted on in one atomic block, with its hooks and its line in Django's own history. A refusal, a failing
hook among them, leaves the job and the project's row as they were and is an answer, not an error.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from typing import Any, ClassVar, Final
from uuid import UUID, uuid4

from django.contrib.admin.models import CHANGE, LogEntry
from django.contrib.contenttypes.models import ContentType
from django.core import signing
from django.db import OperationalError
from django.http import HttpRequest
from django.utils.functional import Promise
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy

from durable_jobs import database, explain, kinds, selection, service
from durable_jobs.admin import access
from durable_jobs.exceptions import Busy, DurableJobsError
from durable_jobs.explain import Phase, Reason
from durable_jobs.models import Job, JobEvent, Status
from durable_jobs.selection import Look, Place, Selection, Spread

SECONDS_A_REQUEST: Final = 10.0
JOBS_A_REQUEST: Final = 500
LONGEST_SPREAD: Final = 7 * 24 * 60
"""Minutes."""
LONGEST_STANDING: Final = timedelta(days=1)
"""A confirmation older than this is not carried out."""
NAMED: Final = 10
"""So many refusals of a bulk are told job by job; all are counted."""
SALT: Final = "durable_jobs.admin.bulk"


@dataclass(frozen=True)
class Act:
    """One act: its name in addresses, its words, the permissions it needs, and the event that it leaves."""

    name: str
    label: str | Promise
    question: str | Promise
    permissions: tuple[str, ...]
    event: str
    danger: bool = False
    reason_required: bool = False
    in_bulk: bool = True

    def allowed(self, request: HttpRequest) -> bool:
        return all(access.may(request, permission) for permission in self.permissions)

    def refusal(self, job: Job, now: datetime, holder: Job | None = None) -> Reason | None:
        """Why the job would be refused; None when it would be acted on."""
        raise NotImplementedError

    def carry_out(self, job: Job, **said: Any) -> Job:
        """Do it; raises the refusal."""
        raise NotImplementedError

    def narrow(self, chosen: Selection, moment: datetime) -> Selection:
        """Of a selection what the act may meet, as of the moment of its confirmation."""
        return chosen

    def version(self, job: Job) -> str:
        """What must not have changed between the page and the click."""
        return f"{job.status}:{job.lease_epoch}:{job.redrives}"


class Cancel(Act):
    def refusal(self, job: Job, now: datetime, holder: Job | None = None) -> Reason | None:
        return explain.refusal_of_cancel(job)

    def carry_out(self, job: Job, **said: Any) -> Job:
        said.pop("delay", None)
        said.pop("failed_before", None)
        return service.cancel(job.id, scope=job.scope, **said)

    def narrow(self, chosen: Selection, moment: datetime) -> Selection:
        return chosen.unended_by(moment)

    def version(self, job: Job) -> str:
        # Slices come and go while a person reads; another run, or an end, is what matters.
        return f"{job.status if job.finished_at else 'live'}:{job.redrives}"


@dataclass(frozen=True)
class Redrive(Act):
    force: bool = False
    restart: bool = False

    def refusal(self, job: Job, now: datetime, holder: Job | None = None) -> Reason | None:
        return explain.refusal_of_redrive(job, now, force=self.force, restart=self.restart, holder=holder)

    def carry_out(self, job: Job, **said: Any) -> Job:
        return service.redrive(job.id, scope=job.scope, force=self.force, restart=self.restart, **said)

    def narrow(self, chosen: Selection, moment: datetime) -> Selection:
        return chosen.failed_by(moment)


class Settle(Act):
    def refusal(self, job: Job, now: datetime, holder: Job | None = None) -> Reason | None:
        return explain.refusal_of_settle(job, now)

    def carry_out(self, job: Job, **said: Any) -> Job:
        return service.settle_without_hooks(
            job.id, scope=job.scope, actor=said["actor"], reason=said["reason"]
        )


CANCEL = Cancel(
    "cancel",
    label=gettext_lazy("Cancel"),
    question=gettext_lazy("Cancel this work?"),
    permissions=(access.OPERATE,),
    event="cancel_requested",
    danger=True,
)
REDRIVE = Redrive(
    "redrive",
    label=gettext_lazy("Redrive (run again)"),
    question=gettext_lazy("Run this work again?"),
    permissions=(access.OPERATE,),
    event="redriven",
)
RESTART = Redrive(
    "restart",
    label=gettext_lazy("Redrive from the start"),
    question=gettext_lazy("Run this work again from the start?"),
    permissions=(access.OPERATE,),
    event="redriven",
    danger=True,
    restart=True,
)
FORCE = Redrive(
    "force",
    label=gettext_lazy("Force a redrive"),
    question=gettext_lazy("Force this work to run again?"),
    permissions=(access.OPERATE, access.FORCE),
    event="redriven",
    danger=True,
    reason_required=True,
    force=True,
)
SETTLE = Settle(
    "settle",
    label=gettext_lazy("Settle without hooks"),
    question=gettext_lazy("End this job without its hooks?"),
    permissions=(access.SETTLE,),
    event="settled_without_hooks",
    danger=True,
    reason_required=True,
    in_bulk=False,
)
ACTS: Final = {act.name: act for act in (CANCEL, REDRIVE, RESTART, FORCE, SETTLE)}


@dataclass(frozen=True)
class Offer:
    """An act as the job's page offers it: whether it may be clicked, and if not, why not."""

    act: Act
    why_not: str = ""
    hint: str = ""


def offers(request: HttpRequest, job: Job, now: datetime, holder: Job | None) -> list[Offer]:
    """What the user could do with the job. What makes no sense for it at all is left out."""
    kind = kinds.find(job.kind)
    found = []
    needs_force = _code(REDRIVE.refusal(job, now, holder)) == "unrecoverable_requires_force"
    for act in ACTS.values():
        refusal = act.refusal(job, now, holder)
        if act is FORCE and not needs_force:
            continue
        if refusal is not None and not _is_worth_showing(act, refusal):
            continue
        if not act.allowed(request) or not access.may_act_on(request, kind):
            found.append(Offer(act, _("You lack the permission.")))
        elif refusal is not None:
            found.append(Offer(act, f"{refusal.sentence} {refusal.way_out}".strip()))
        else:
            found.append(Offer(act, hint=hint(act, job, now)))
    return found


def _code(refusal: Reason | None) -> str:
    return refusal.code if refusal is not None else ""


def _is_worth_showing(act: Act, refusal: Reason) -> bool:
    if act in (CANCEL, REDRIVE):
        return True
    if act is SETTLE or act is FORCE:
        return False
    return refusal.code not in ("restart_not_allowed", "not_redrivable", "unknown_kind")


def hint(act: Act, job: Job, now: datetime) -> str:
    """What would come of it, in a few words."""
    if act is RESTART:
        return _("Its checkpoint is put away, and it begins with the first item.")
    if isinstance(act, Redrive):
        if job.checkpoint_at is None:
            return _("There is no checkpoint: it begins with the first item.")
        if job.total_count:
            return _("Continues from item %(done)s of %(total)s.") % {
                "done": f"{job.processed_count:,}",
                "total": f"{job.total_count:,}",
            }
        return _("Continues from item %(done)s.") % {"done": f"{job.processed_count:,}"}
    if act is CANCEL and job.status == Status.RUNNING and job.lease_owner is not None:
        if any(reason.code == "lease_expired" for reason in explain.troubles(job, now)):
            return _("Its worker is silent: the reconciler of any worker ends it.")
        return _("It runs: its worker stops it at the next boundary. What is committed stays.")
    if act is SETTLE:
        return _("The project’s own row stays as it is.")
    return ""


# --- one job --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Answer:
    """What became of one job: as it is now, or the refusal's code and sentence."""

    job: Job | None
    code: str = ""
    sentence: str = ""
    holder: UUID | None = None


def on_one(request: HttpRequest, act: Act, job: Job, **said: Any) -> Answer:
    """Act on a job in one atomic block. The caller has checked the act's permissions."""
    kind = kinds.find(job.kind)
    if not access.may_act_on(request, kind):
        return Answer(None, "forbidden", _("You lack a permission that the kind asks for."))
    try:
        with database.joined(database.alias(), timeout=service.CANCEL_WAIT_SECONDS):
            try:
                now = act.carry_out(job, actor=request.user, **said)
            except DurableJobsError as refusal:
                # Caught inside: what a failed hook has written to the history must stay.
                holder = getattr(refusal, "held_by", None)
                return Answer(None, refusal.code or "refused", str(refusal), holder)
            _log(request, now, act, str(said.get("reason") or ""))
    except OperationalError as error:
        if not database.is_locked(error):
            raise
        busy = Busy(job.id)
        return Answer(None, busy.code, str(busy))
    return Answer(now)


def log_entry(request: HttpRequest, target: Any, key: str, shown: str, message: str) -> None:
    """A line in Django's history."""
    user: Any = request.user
    LogEntry.objects.create(
        user=user,
        content_type_id=ContentType.objects.get_for_model(target, for_concrete_model=False).pk,
        object_id=key,
        object_repr=shown[:200],
        action_flag=CHANGE,
        change_message=message,
    )


def _log(request: HttpRequest, job: Job, act: Act, reason: str) -> None:
    words = f"{act.label}: {reason}" if reason else str(act.label)
    log_entry(request, Job, str(job.pk), str(job), words)


# --- many jobs ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Bulk:
    """A confirmed act on a selection, as it goes through the browser: signed, and bound to its user.

    Only jobs that failed (or were there) before `moment` are taken, so that none is taken twice.
    """

    act: str
    user: str
    chosen: Selection
    moment: datetime
    operation: str
    total: int
    more: bool
    reason: str = ""
    spread: float = 0.0
    """Seconds."""
    after: Place | None = None
    taken: int = 0
    skipped: dict[str, int] = field(default_factory=dict)
    named: tuple[tuple[str, str], ...] = ()

    FIELDS: ClassVar[tuple[str, ...]] = (
        "act",
        "user",
        "operation",
        "total",
        "more",
        "reason",
        "spread",
        "taken",
    )

    @classmethod
    def begin(
        cls, request: HttpRequest, act: Act, chosen: Selection, look: Look, total: int, more: bool
    ) -> Bulk:
        return cls(act.name, str(request.user.pk), chosen, look.now, uuid4().hex, total, more)

    def sign(self) -> str:
        facts = {name: getattr(self, name) for name in self.FIELDS}
        facts |= {
            "chosen": packed(self.chosen),
            "moment": self.moment.isoformat(),
            "after": str(self.after) if self.after else None,
            "skipped": self.skipped,
            "named": self.named,
        }
        return signing.dumps(facts, salt=SALT, compress=True)

    @classmethod
    def read(cls, request: HttpRequest, text: str) -> Bulk | None:
        """What was signed; None when it is not ours, too old, or another user's."""
        try:
            facts = signing.loads(text, salt=SALT, max_age=LONGEST_STANDING)
        except signing.BadSignature:
            return None
        if facts["user"] != str(request.user.pk):
            return None
        return cls(
            **{name: facts[name] for name in cls.FIELDS},
            chosen=unpacked(facts["chosen"]),
            moment=datetime.fromisoformat(facts["moment"]),
            after=Place.parse(facts["after"]) if facts["after"] else None,
            skipped=facts["skipped"],
            named=tuple(tuple(pair) for pair in facts["named"]),
        )

    @property
    def skipped_number(self) -> int:
        return sum(self.skipped.values())


@dataclass(frozen=True)
class Step:
    """Where a bulk stands after a request: what was done in all, and the form of the next request, if any."""

    bulk: Bulk
    done: int
    finished: bool


def step(request: HttpRequest, bulk: Bulk) -> Step:
    """Act for at most ten seconds or on 500 jobs, each in its own atomic block.

    What is done is counted from the history, so that a request that was killed is counted as well.
    """
    act = ACTS[bulk.act]
    began = time.monotonic()
    now = Look.take()
    chosen = meant(request, act, bulk.chosen, bulk.moment)
    look = replace(now, now=bulk.moment) if bulk.chosen.phase is None else now
    elapsed = (now.now - bulk.moment).total_seconds()
    skipped, named, taken, after = Counter(bulk.skipped), list(bulk.named), bulk.taken, bulk.after
    finished = True
    for page in selection.pages(chosen, look, after=after, limit=JOBS_A_REQUEST + 1):
        jobs = {job.id: job for job in _by_id(page)}
        for job_id in page:
            if taken - bulk.taken >= JOBS_A_REQUEST or time.monotonic() - began >= SECONDS_A_REQUEST:
                finished = False
                break
            job = jobs.get(job_id)
            if job is not None:
                after = selection.place_of(chosen, job)
            taken += 1
            answer = _one_of_many(request, act, bulk, job, taken - 1, elapsed, began)
            if answer.job is None:
                skipped[answer.code] += 1
                if len(named) < NAMED:
                    named.append((str(job_id), answer.sentence))
        if not finished:
            break
    after_it = replace(bulk, after=after, taken=taken, skipped=dict(skipped), named=tuple(named))
    return Step(after_it, _done(act, bulk), finished)


def _one_of_many(
    request: HttpRequest, act: Act, bulk: Bulk, job: Job | None, number: int, elapsed: float, began: float
) -> Answer:
    if job is None:
        return Answer(None, "not_found", _("It is gone."))
    said: dict[str, Any] = {"reason": bulk.reason, "operation": bulk.operation}
    if isinstance(act, Redrive):
        if job.status == Status.FAILED:
            said["failed_before"] = bulk.moment
        spread = Spread(bulk.spread, bulk.total)
        said["delay"] = spread.delay(number, elapsed + time.monotonic() - began)
    return on_one(request, act, job, **said)


def _by_id(ids: list[UUID]) -> Any:
    jobs = Job.objects.using(database.alias()).filter(id__in=ids)
    return jobs.defer(*selection.LARGE_COLUMNS)


def _done(act: Act, bulk: Bulk) -> int:
    events = JobEvent.objects.using(database.alias())
    # By name and time, which an index holds; a minute earlier, because it may be another process's clock.
    return int(
        events.filter(
            event=act.event,
            created_at__gte=bulk.moment - timedelta(minutes=1),
            operation_id=bulk.operation,
        ).count()
    )


def meant(request: HttpRequest, act: Act, chosen: Selection, moment: datetime) -> Selection:
    """What an act is carried out on: within what the user may see now, whatever was signed.

    Of jobs that were ticked one by one, those that cannot be acted on are met, and counted as skipped; a filter
    takes only what the act is for.
    """
    seen = replace(chosen, scopes=access.scopes(request))
    if chosen.ids is not None:
        return seen
    return act.narrow(replace(seen, not_kinds=access.closed_kinds(request)), moment)


def closed_jobs(request: HttpRequest, act: Act, chosen: Selection, look: Look) -> list[str]:
    """The kinds that a filter leaves out, because the user lacks their own permissions and there are such jobs."""
    closed = access.closed_kinds(request)
    if chosen.ids is not None or not closed:
        return []
    seen = replace(chosen, scopes=access.scopes(request))
    found = []
    for name in closed:
        of_kind = act.narrow(replace(seen, kind=name), look.now)
        if chosen.kind in (None, name) and selection.newest(of_kind, look, limit=1):
            found.append(name)
    return found


# --- a selection as facts -------------------------------------------------------------------------------

TEXTS: Final = ("kind", "queue", "tenant", "organization", "status", "error_type", "error_code", "lock_key")
MOMENTS: Final = (
    "failed_since", "failed_before", "created_since", "created_before", "ended_since", "ended_before",
)  # fmt: skip


def packed(chosen: Selection) -> dict[str, Any]:
    """A selection as JSON, without what the server decides anew: scopes and closed kinds."""
    facts: dict[str, Any] = {name: getattr(chosen, name) for name in (*TEXTS, "idempotency_key")}
    facts |= {name: value.astimezone(UTC).isoformat() for name in MOMENTS if (value := getattr(chosen, name))}
    facts |= {
        "phase": chosen.phase.value if chosen.phase else None,
        "subject": list(chosen.subject) if chosen.subject else None,
        "ids": [str(one) for one in chosen.ids] if chosen.ids is not None else None,
    }
    return {name: value for name, value in facts.items() if value is not None}


def unpacked(facts: dict[str, Any]) -> Selection:
    """The selection that was packed."""
    read: dict[str, Callable[[Any], Any]] = {
        **dict.fromkeys(MOMENTS, datetime.fromisoformat),
        "phase": Phase,
        "subject": tuple,
        "ids": lambda ids: tuple(UUID(one) for one in ids),
    }
    return Selection(**{name: read.get(name, str)(value) for name, value in facts.items()})
