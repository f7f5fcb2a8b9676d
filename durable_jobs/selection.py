"""Many jobs by what they have in common: found by filters, acted on one by one.

A selection is read in pages by key, without a cursor that would outlive a commit, in bounded memory. Each job is
acted on in a transaction of its own, with its hooks: what is refused stays as it was and is counted by its code.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from itertools import islice
from typing import Any, Final
from uuid import UUID

from django.db.models import Q

from durable_jobs import database, explain, service, store
from durable_jobs.exceptions import DurableJobsError
from durable_jobs.explain import Phase
from durable_jobs.keyset import compared
from durable_jobs.models import LIVE, Job, Pause, Scope, Status
from durable_jobs.service import ALL_SCOPES

PAGE: Final = 200
MOST_COUNTED: Final = 100_000
"""A selection is counted up to here; beyond, the answer is "more"."""
SAMPLE: Final = 10
WINDOW: Final = 20_000
"""What no index answers is looked for among so many jobs at a time."""

RESTING: Final = frozenset((Phase.COMPLETED, Phase.CANCELLED, Phase.HELD))
"""Statuses and phases of many rows, which no partial index finds; every other one has one, or few rows."""
LARGE_COLUMNS: Final = ("input_text", "checkpoint_text", "result_text", "error_message", "meta")


@dataclass(frozen=True)
class Selection:
    """Which jobs; None takes all of them. Times are aware; `since` is included, `before` is not.

    `subject` is a model's label and a primary key, both as text.
    """

    kind: str | None = None
    queue: str | None = None
    tenant: str | None = None
    organization: str | None = None
    subject: tuple[str, str] | None = None
    status: str | None = None
    phase: Phase | None = None
    error_type: str | None = None
    error_code: str | None = None
    failed_since: datetime | None = None
    failed_before: datetime | None = None
    created_since: datetime | None = None
    created_before: datetime | None = None
    ended_since: datetime | None = None
    ended_before: datetime | None = None
    lock_key: str | None = None
    idempotency_key: str | None = None
    ids: tuple[UUID, ...] | None = None
    scopes: tuple[Scope, ...] | None = None
    not_kinds: tuple[str, ...] = ()
    unended: bool = False
    """Only what has not ended and was not asked to end."""

    def where(self, now: datetime, pauses: list[Pause]) -> Q:
        """The condition; of a phase it holds for a few others as well, which `matches` tells apart."""
        label, key = self.subject or (None, None)
        columns = {
            "kind": self.kind,
            "queue_name": self.queue,
            "tenant_id": self.tenant,
            "organization_id": self.organization,
            "subject_type": label,
            "subject_id": key,
            "status": self.status,
            "error_type": self.error_type,
            "error_code": self.error_code,
            "finished_at__gte": self.failed_since,
            "finished_at__lt": self.failed_before,
            "created_at__gte": self.created_since,
            "created_at__lt": self.created_before,
            "lock_key": self.lock_key,
            "idempotency_key": self.idempotency_key,
            "id__in": self.ids,
        }
        condition = Q(**{name: value for name, value in columns.items() if value is not None})
        # Apart from `failed_since`, which may hold as well.
        if self.ended_since is not None:
            condition &= Q(finished_at__gte=self.ended_since)
        if self.ended_before is not None:
            condition &= Q(finished_at__lt=self.ended_before)
        if self.scopes is not None:
            condition &= in_scopes(self.scopes)
        if self.not_kinds:
            condition &= ~Q(kind__in=self.not_kinds)
        if self.failed_since is not None or self.failed_before is not None:
            condition &= Q(status=Status.FAILED)
        if self.unended:
            # In three parts, each of which is the condition of an index.
            waiting = Q(status=Status.PENDING, next_run_at__isnull=False)
            live = Q(status=Status.RUNNING) | waiting | Q(status=Status.HELD)
            condition &= live & Q(cancel_requested_at__isnull=True)
        if self.phase is not None:
            condition &= explain.among(self.phase, now, pauses)
        return condition

    def failed_by(self, moment: datetime) -> Selection:
        """Of these the ones that had failed at that moment."""
        before = moment if self.failed_before is None else min(moment, self.failed_before)
        return replace(self, status=None if self.phase else Status.FAILED.value, failed_before=before)

    def unended_by(self, moment: datetime) -> Selection:
        """Of these the ones that were there at that moment, have not ended and were not asked to end."""
        before = moment if self.created_before is None else min(moment, self.created_before)
        return replace(self, created_before=before, unended=True)

    def matches(self, job: Job, now: datetime, pauses: list[Pause]) -> bool:
        """Whether a job that `where` has found is in the phase that was asked for."""
        return self.phase is None or explain.phase(job, now, pauses) is self.phase

    @property
    def is_indexed(self) -> bool:
        """Whether an index finds these jobs; the others are looked for in windows of the list."""
        if any(value is not None for value in (self.ids, self.subject, self.lock_key, self.idempotency_key)):
            return True
        states = [state for state in (self.status, self.phase) if state is not None]
        if self.unended or (states and RESTING.isdisjoint(states)):
            return True
        return any(
            value is not None
            for value in (self.ended_since, self.ended_before, self.failed_since, self.failed_before)
        )

    @property
    def is_failed(self) -> bool:
        """Whether all of them have failed: their order is then that of their ends, which has an index."""
        return (
            self.status == Status.FAILED
            or self.phase in (Phase.FAILED, Phase.PARKED)
            or self.failed_since is not None
            or self.failed_before is not None
        )

    @property
    def one_tenant(self) -> str | None:
        """The tenant that all of them belong to, when one was named: its list has an index by time."""
        if self.tenant is not None:
            return self.tenant
        tenants = {scope.tenant for scope in self.scopes or ()}
        return tenants.pop() if len(tenants) == 1 else None

    @property
    def is_empty(self) -> bool:
        """Whether nothing but a scope narrows it."""
        return self == Selection(scopes=self.scopes)


def in_scopes(scopes: Collection[Scope]) -> Q:
    """A condition that holds for the rows of these scopes."""
    condition = Q(pk__in=[])
    for scope in scopes:
        condition |= Q(tenant_id=scope.tenant, organization_id=scope.organization)
    return condition


@dataclass(frozen=True)
class Look:
    """Jobs as they were at a moment of the database's clock, with the pauses of then."""

    now: datetime
    pauses: list[Pause]

    @classmethod
    def take(cls) -> Look:
        """A look now."""
        return cls(*store.now_and_pauses())

    def phase(self, job: Job) -> Phase:
        """The job's phase at that moment."""
        return explain.phase(job, self.now, self.pauses)


def newest(selection: Selection, look: Look, *, limit: int, after: UUID | None = None) -> list[Job]:
    """Up to `limit` jobs, newest first, that come after the job `after` in this order; large columns are left out."""
    return list(islice(_read(selection, look, descending=True, after=after), limit))


@dataclass(frozen=True)
class Place:
    """A place in a list: the row that the next page begins after. As text it goes into addresses."""

    at: datetime
    id: UUID

    def __str__(self) -> str:
        return f"{self.at.astimezone(UTC):%Y%m%dT%H%M%S.%f}~{self.id.hex}"

    @classmethod
    def parse(cls, text: str) -> Place | None:
        """The place that was written so; None for anything else."""
        moment, _, key = text.partition("~")
        try:
            at = datetime.strptime(moment, "%Y%m%dT%H%M%S.%f").replace(tzinfo=UTC)
            return cls(at, UUID(hex=key))
        except ValueError:
            return None


@dataclass(frozen=True)
class Listed:
    """A page of a list; `next` is where more may be; `searched` when the search stopped before the page was full."""

    jobs: list[Job]
    next: Place | None
    searched: int | None = None


def listed(
    selection: Selection, look: Look, *, limit: int, after: Place | None = None, also: Q | None = None
) -> Listed:
    """A page of jobs, newest first; large columns are left out. `also` is a further condition without an index.

    Never reads more than `WINDOW` rows for what no index finds: then the page may be short, or empty, and the
    search goes on from `next`.
    """
    if selection.is_indexed and also is None:
        found = list(
            islice(_in_order(selection, look, descending=True, after=after, page=limit + 1), limit + 1)
        )
        return Listed(found[:limit], place_of(selection, found[limit - 1]) if len(found) > limit else None)
    by_time = selection.one_tenant is not None
    condition = selection.where(look.now, look.pauses)
    jobs = Job.objects.using(database.alias())
    within = jobs.filter(tenant_id=selection.one_tenant) if by_time else jobs
    order = ("-created_at", "-id") if by_time else ("-id",)
    window = _beyond(within.order_by(*order), after, by_time=by_time)
    floor = None
    if not selection.is_empty or also is not None:
        floor = window.only("id", "created_at")[WINDOW - 1 : WINDOW].first()
    rows = window.filter(condition, also or Q()).defer(*LARGE_COLUMNS)
    if floor is not None:
        rows = _down_to(rows, _place(floor), by_time=by_time)
    found = [job for job in rows[: limit + 1] if selection.matches(job, look.now, look.pauses)]
    if len(found) > limit:
        return Listed(found[:limit], _place(found[limit - 1]))
    return Listed(found, _place(floor) if floor else None, WINDOW if floor else None)


def place_of(selection: Selection, job: Job) -> Place:
    """Where a job stands in the order of its selection."""
    return Place(job.finished_at if selection.is_failed and job.finished_at else job.created_at, job.id)


def _place(job: Job) -> Place:
    return Place(job.created_at, job.id)


def _in_order(
    selection: Selection, look: Look, *, descending: bool, after: Place | None = None, page: int = PAGE
) -> Iterator[Job]:
    """The jobs by the order of their selection: what has failed by its end, the others by their ids.

    By ids a database would look for old failures among all the jobs that came before or after them.
    """
    if not selection.is_failed:
        yield from _read(selection, look, descending=descending, after=after.id if after else None, page=page)
        return
    condition = selection.where(look.now, look.pauses)
    jobs = Job.objects.using(database.alias()).filter(condition).defer(*LARGE_COLUMNS)
    jobs = jobs.order_by("-finished_at", "-id") if descending else jobs.order_by("finished_at", "id")
    beyond = "<" if descending else ">"
    while True:
        rows = jobs if after is None else jobs.filter(compared(beyond, finished_at=after.at, id=after.id))
        found = list(rows[:page])
        yield from (job for job in found if selection.matches(job, look.now, look.pauses))
        if len(found) < page:
            return
        after = place_of(selection, found[-1])


def _beyond(jobs: Any, after: Place | None, *, by_time: bool) -> Any:
    if after is None:
        return jobs
    if not by_time:
        return jobs.filter(id__lt=after.id)
    return jobs.filter(compared("<", created_at=after.at, id=after.id))


def _down_to(jobs: Any, floor: Place, *, by_time: bool) -> Any:
    if not by_time:
        return jobs.filter(id__gte=floor.id)
    return jobs.filter(created_at__gte=floor.at)


def pages(
    selection: Selection, look: Look, *, limit: int | None = None, after: Place | None = None
) -> Iterator[list[UUID]]:
    """The ids, oldest first, a page at a time; what was acted on in one page is not met in the next."""
    found = islice(_in_order(selection, look, descending=False, after=after), limit)
    while page := [job.id for job in islice(found, PAGE)]:
        yield page


def _read(
    selection: Selection, look: Look, *, descending: bool, after: UUID | None = None, page: int = PAGE
) -> Iterator[Job]:
    condition = selection.where(look.now, look.pauses)
    jobs = Job.objects.using(database.alias()).filter(condition).defer(*LARGE_COLUMNS)
    jobs = jobs.order_by("-id" if descending else "id")
    while True:
        beyond = {} if after is None else {"id__lt" if descending else "id__gt": after}
        rows = list(jobs.filter(**beyond)[:page])
        yield from (job for job in rows if selection.matches(job, look.now, look.pauses))
        if len(rows) < page:
            return
        after = rows[-1].id


@dataclass(frozen=True)
class Group:
    """So many jobs of one kind that ended with one type of error (blank: with none)."""

    kind: str
    error_type: str
    jobs: int


@dataclass(frozen=True)
class Summary:
    """What a selection holds: how many (`more`: at least), per kind and type of error, and some of them."""

    jobs: int
    more: bool
    groups: list[Group]
    sample: list[Job]


def summarize(selection: Selection, look: Look, *, limit: int | None = None) -> Summary:
    """Count a selection, up to `limit` and in any case up to `MOST_COUNTED`."""
    most = limit if limit is not None and limit <= MOST_COUNTED else MOST_COUNTED + 1
    some = min(SAMPLE, most)
    sample = list(islice(_in_order(selection, look, descending=False, page=some), some))
    grouped = _grouped if _is_exact(selection) else _grouped_one_by_one
    groups = grouped(selection, look, most)
    total = sum(group.jobs for group in groups)
    return Summary(min(total, MOST_COUNTED), total > MOST_COUNTED, groups, sample)


def count(selection: Selection, look: Look, *, limit: int | None = None) -> int:
    """How many jobs exactly, at most `limit`."""
    if _is_exact(selection):
        condition = selection.where(look.now, look.pauses)
        total = Job.objects.using(database.alias()).filter(condition).count()
    else:
        total = sum(1 for _ in _read(selection, look, descending=False))
    return total if limit is None else min(total, limit)


def _is_exact(selection: Selection) -> bool:
    """Whether the condition alone decides; the phase of live work is judged row by row."""
    return selection.phase in (None, Phase.FAILED, Phase.PARKED, Phase.COMPLETED, Phase.CANCELLED)


def _grouped(selection: Selection, look: Look, most: int) -> list[Group]:
    jobs = Job.objects.using(database.alias()).filter(selection.where(look.now, look.pauses))
    # As they are taken, and no more of them than are asked for. Grouped in the database they would be looked up
    # a second time by their ids.
    found = jobs.order_by("finished_at" if selection.is_failed else "id")[:most]
    # No iterator(): its cursor would not outlive a transaction behind a pooler.
    return _groups(found.values_list("kind", "error_type"))


def _grouped_one_by_one(selection: Selection, look: Look, most: int) -> list[Group]:
    jobs = islice(_read(selection, look, descending=False), most)
    return _groups((job.kind, job.error_type) for job in jobs)


def _groups(jobs: Iterable[tuple[str, str | None]]) -> list[Group]:
    numbers = Counter((kind, error_type or "") for kind, error_type in jobs)
    ordered = sorted(numbers.items(), key=lambda item: (-item[1], item[0]))
    return [Group(kind, error_type, number) for (kind, error_type), number in ordered]


# --- acting ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Outcome:
    """What became of one job: the job as it is now, or the refusal."""

    job_id: UUID
    job: Job | None = None
    refusal: DurableJobsError | None = None


Act = Callable[[UUID, int], Job]
"""Acts on the job of this id, the n-th (from 0) of its bulk."""


def act_on(ids: Iterator[list[UUID]], act: Act) -> Iterator[Outcome]:
    """Act on each job in a transaction of its own. An outage of the database ends it with its error."""
    number = 0
    for page in ids:
        for job_id in page:
            try:
                yield Outcome(job_id, job=act(job_id, number))
            except DurableJobsError as refusal:
                yield Outcome(job_id, refusal=refusal)
            number += 1


@dataclass(frozen=True)
class Spread:
    """Jobs that come due one after the other, evenly over so many seconds; 0: all at once."""

    seconds: float = 0.0
    jobs: int = 0

    def delay(self, number: int, elapsed: float) -> float:
        """Seconds that the job of this number (from 0) still has, when so many have gone by since the first."""
        return max(0.0, number * self.seconds / self.jobs - elapsed) if self.jobs else 0.0


def redriving(*, failed_before: datetime | None = None, spread: Spread | None = None, **options: Any) -> Act:
    """Redrive each, perhaps one after the other."""
    began, paced = time.monotonic(), spread or Spread()

    def act(job_id: UUID, number: int) -> Job:
        delay = paced.delay(number, time.monotonic() - began)
        return service.redrive(job_id, delay=delay, failed_before=failed_before, scope=ALL_SCOPES, **options)

    return act


def cancelling(**options: Any) -> Act:
    """Ask each to end."""
    return lambda job_id, number: service.cancel(job_id, scope=ALL_SCOPES, **options)


# --- what acting would meet -----------------------------------------------------------------------------

FORESEEN: Final = 500
"""So many jobs of a selection are looked at one by one before a person says yes."""


@dataclass(frozen=True)
class Foreseen:
    """A refusal that awaits so many jobs: an example, and the job that stands in its way."""

    reason: explain.Reason
    jobs: int
    example: Job
    holder: Job | None = None


Foresee = Callable[[Job, "Job | None"], "explain.Reason | None"]
"""The refusal that an act on a job would meet, given the live job that holds its lock key."""


def foresee(
    selection: Selection, look: Look, judge: Foresee, *, limit: int = FORESEEN
) -> tuple[int, list[Foreseen]]:
    """Look at the first `limit` jobs: how many were looked at, and what would be refused, by code."""
    jobs = list(islice(_in_order(selection, look, descending=False, page=limit), limit))
    held_by = holders(jobs)
    found: dict[str, Foreseen] = {}
    for job in jobs:
        holder = held_by.get((job.lock_key, job.scope))
        reason = judge(job, holder)
        if reason is not None:
            known = found.get(reason.code)
            found[reason.code] = (
                replace(known, jobs=known.jobs + 1) if known else Foreseen(reason, 1, job, holder)
            )
    return len(jobs), sorted(found.values(), key=lambda one: -one.jobs)


def holders(jobs: Collection[Job]) -> dict[tuple[str | None, Scope], Job]:
    """The live jobs that hold the lock keys of these, by key and scope: one query."""
    keys = {job.lock_key for job in jobs if job.lock_key is not None}
    if not keys:
        return {}
    live = Job.objects.using(database.alias()).filter(lock_key__in=keys, status__in=LIVE)
    return {(job.lock_key, job.scope): job for job in live.defer(*LARGE_COLUMNS)}
