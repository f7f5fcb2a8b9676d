"""Numbers of the moment, and whether all is well: for `durable_jobs stats` and `health`, screens and probes.

Everything comes from partial indexes and stops counting at `MOST`, so that it stays quick over ten million rows.
"""

from __future__ import annotations

import socket
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any, Final
from uuid import UUID

from django.db import Error
from django.db.models import DurationField, ExpressionWrapper, F, Q

from durable_jobs import database, explain, store
from durable_jobs.conf import config
from durable_jobs.lifecycle import MIRROR_STUCK_AFTER
from durable_jobs.models import MANUAL_QUEUE, Job, Pause, Status, WorkerProcess
from durable_jobs.selection import LARGE_COLUMNS

MOST: Final = 10_000
"""Numbers are exact up to here."""
WINDOWS: Final = {"1 h": timedelta(hours=1), "24 h": timedelta(hours=24), "7 d": timedelta(days=7)}
PROBED_AFTER: Final = 45.0
"""A worker shows itself every ten seconds, unless its claiming has stood still for thirty."""
EVERYTHING: Final = Q()


@dataclass(frozen=True)
class Bounded:
    """A number of jobs; `more` says that there are more than this."""

    number: int
    more: bool = False

    def __str__(self) -> str:
        return f"{self.number:,}{'+' if self.more else ''}"


@dataclass(frozen=True)
class Queue:
    """A queue with work: what is due, and for how long the oldest has been; which live workers serve it."""

    name: str
    due: Bounded
    oldest_due: float
    running: Bounded
    workers: int


@dataclass(frozen=True)
class Stats:
    """`live`: not ended, by what it waits for. `ended`: in each window, by status. `failures`: (kind, error type)."""

    now: datetime
    live: dict[str, Bounded]
    ended: dict[str, dict[str, Bounded]]
    failures: list[tuple[str, str, Bounded]]
    queues: list[Queue]
    workers: list[WorkerProcess]
    pauses: list[Pause]


@dataclass(frozen=True)
class Counts:
    """`live`: not ended, by what it waits for, and what waits for a person. `ended`: in each window, by status."""

    now: datetime
    live: dict[str, Bounded]
    ended: dict[str, dict[str, Bounded]]


def counts(among: Q = EVERYTHING, *, most: int | None = None) -> Counts:
    """Count, up to `most` each (default: `MOST`); `among` narrows the jobs, to a scope for example."""
    now = store.now()
    ended = {
        label: {
            status: _count(Q(status=status, finished_at__gte=now - window) & among, most)
            for status in (Status.COMPLETED.value, Status.FAILED.value, Status.CANCELLED.value)
        }
        for label, window in WINDOWS.items()
    }
    return Counts(now, live(now, among, most=most), ended)


def stats() -> Stats:
    """Count everything."""
    counted = counts()
    now = counted.now
    workers = explain.live_workers(now)
    return Stats(
        now=now,
        live=counted.live,
        ended=counted.ended,
        failures=_failures(now - WINDOWS["24 h"]),
        queues=queues(now, workers),
        workers=workers,
        pauses=list(Pause.objects.using(database.alias()).order_by("id")),
    )


def live(now: datetime, among: Q = EVERYTHING, *, most: int | None = None) -> dict[str, Bounded]:
    """Jobs that have not ended, by what they wait for, and those that need a human. `among` narrows them."""
    most = MOST if most is None else most
    conditions = {
        "waiting": Q(status=Status.PENDING, next_run_at__lte=now),
        "scheduled": Q(status=Status.PENDING, next_run_at__gt=now),
        "retrying": Q(status=Status.RUNNING, next_run_at__isnull=False),
        "running": Q(status=Status.RUNNING, lease_owner__isnull=False),
        "stopping": Q(cancel_requested_at__isnull=False, finished_at__isnull=True),
        "failed": Q(status=Status.FAILED, parked_at__isnull=True),
        "parked": Q(status=Status.FAILED, parked_at__isnull=False),
    }
    counted = {name: _count(condition & among, most) for name, condition in conditions.items()}
    stuck = _bounded(len(stuck_jobs(now, limit=most + 1, among=among)), most)
    return {
        name: stuck if name == "stuck" else counted[name]
        for name in (
            "waiting", "scheduled", "retrying", "running", "stopping", "stuck", "failed", "parked",
        )
    }  # fmt: skip


def stuck_jobs(now: datetime, *, limit: int, slack: float = 0.0, among: Q = EVERYTHING) -> list[Job]:
    """Jobs that do not get on by themselves, oldest first; `slack` seconds are still given to lease and cancel."""
    moment = now - timedelta(seconds=slack)
    found: dict[UUID, Job] = {}
    # Two questions, each of which has a partial index: SQLite would answer both at once by reading all rows.
    for condition in (
        Q(status=Status.RUNNING),
        Q(cancel_requested_at__isnull=False, finished_at__isnull=True) & ~Q(status=Status.RUNNING),
    ):
        jobs = _jobs().filter(condition, among).exclude(queue_name=MANUAL_QUEUE).order_by()
        for job in jobs.defer(*LARGE_COLUMNS)[:MOST]:
            if explain.phase(job, moment) is explain.Phase.STUCK:
                found[job.id] = job
    return [found[key] for key in sorted(found)[:limit]]


# --- what has happened ----------------------------------------------------------------------------------

HOUR: Final = timedelta(hours=1)


@dataclass(frozen=True)
class Bar:
    """A span of time that begins at `since`: how many jobs ended in it, and how long they had waited before.

    `wait` is the median of the seconds from creation to the first claim; None without jobs.
    """

    since: datetime
    until: datetime
    ended: int
    failed: int
    wait: float | None = None


@dataclass(frozen=True)
class Failures:
    """Failed jobs of one kind with one type of error, in each window."""

    kind: str
    error_type: str
    windows: dict[str, int]


@dataclass(frozen=True)
class Recent:
    """What ended lately, from at most `MOST` rows each.

    `bars` are the last hour; `reaches` says how far back they know, when not the whole hour. `hours` are the
    failures of the last day, `failures` those of the last week, grouped; `failures_since` likewise.
    """

    bars: list[Bar]
    reaches: datetime | None
    hours: list[Bar]
    failures: list[Failures]
    failures_since: datetime | None


def recent(now: datetime, among: Q = EVERYTHING) -> Recent:
    """Throughput, waiting and failures; `among` narrows the jobs, to a scope for example."""
    jobs = _jobs().filter(among)
    ended = jobs.filter(finished_at__gte=now - HOUR, finished_at__lte=now).order_by("-finished_at")
    rows = list(ended.values_list("finished_at", "status", _WAITED)[: MOST + 1])
    bars = _by_five_minutes(now, rows)
    week = now - WINDOWS["7 d"]
    failed = jobs.filter(status=Status.FAILED, finished_at__gte=week).order_by("-finished_at")
    failures = list(failed.values_list("finished_at", "kind", "error_type")[: MOST + 1])
    return Recent(
        bars=bars,
        reaches=rows[-1][0] if len(rows) > MOST else None,
        hours=_by_hour(now, [row[0] for row in failures]),
        failures=_grouped_by_window(now, failures),
        failures_since=failures[-1][0] if len(failures) > MOST else None,
    )


_WAITED: Final = ExpressionWrapper(F("started_at") - F("created_at"), output_field=DurationField())
FIVE_MINUTES: Final = timedelta(minutes=5)


def _by_five_minutes(now: datetime, rows: list[Any]) -> list[Bar]:
    ended, failed = Counter[int](), Counter[int]()
    waits: dict[int, list[float]] = {}
    for moment, status, waited in rows:
        number = (now - moment) // FIVE_MINUTES
        ended[number] += 1
        failed[number] += status == Status.FAILED
        if waited is not None:
            waits.setdefault(number, []).append(max(0.0, waited.total_seconds()))
    return [
        Bar(
            since=now - (number + 1) * FIVE_MINUTES,
            until=now - number * FIVE_MINUTES,
            ended=ended[number],
            failed=failed[number],
            wait=sorted(waits[number])[len(waits[number]) // 2] if number in waits else None,
        )
        for number in reversed(range(12))
    ]


def _by_hour(now: datetime, moments: list[datetime]) -> list[Bar]:
    numbers = Counter((now - moment) // HOUR for moment in moments)
    return [Bar(now - (n + 1) * HOUR, now - n * HOUR, numbers[n], numbers[n]) for n in reversed(range(24))]


def _grouped_by_window(now: datetime, rows: list[Any]) -> list[Failures]:
    groups: dict[tuple[str, str], Counter[str]] = {}
    horizons = [(label, now - window) for label, window in WINDOWS.items()]
    for moment, kind, error_type in rows:
        group = groups.setdefault((kind, error_type or ""), Counter())
        for label, horizon in horizons:
            group[label] += moment >= horizon
    ordered = sorted(groups.items(), key=lambda item: (-item[1]["1 h"], -item[1]["7 d"], item[0]))
    return [
        Failures(kind, error, {label: numbers[label] for label in WINDOWS})
        for (kind, error), numbers in ordered
    ]


def _jobs() -> Any:
    return Job.objects.using(database.alias())


def _count(condition: Q, most: int | None = None) -> Bounded:
    most = MOST if most is None else most
    return _bounded(_jobs().filter(condition).order_by()[: most + 1].count(), most)


def _bounded(number: int, most: int) -> Bounded:
    return Bounded(min(number, most), number > most)


def _failures(since: datetime) -> list[tuple[str, str, Bounded]]:
    """Of the last failures since then, by kind and type of error, most first."""
    rows = _jobs().filter(status=Status.FAILED, finished_at__gte=since).order_by("-finished_at")
    found = list(rows.values_list("kind", "error_type")[: MOST + 1])
    counted = Counter((kind, error_type or "") for kind, error_type in found)
    more = len(found) > MOST
    return [(kind, error, Bounded(number, more)) for (kind, error), number in counted.most_common()]


def queues(now: datetime, workers: list[WorkerProcess], among: Q = EVERYTHING) -> list[Queue]:
    """The queues that have work, by name; `among` narrows the jobs, to a scope for example."""
    oldest: dict[str, float] = {}
    for route in store.routes():
        oldest[route.queue] = max(oldest.get(route.queue, 0.0), -route.due_in)
    owned = _jobs().filter(among, status=Status.RUNNING, lease_owner__isnull=False).order_by()
    running = Counter(owned.values_list("queue_name", flat=True)[: MOST + 1])
    found = []
    for name in sorted({*oldest, *running}):
        due = Q(queue_name=name, next_run_at__lte=now) & among
        number, waited = _count(due), oldest.get(name, 0.0)
        if among:
            first = _jobs().filter(due).order_by("next_run_at").values_list("next_run_at", flat=True).first()
            waited = (now - first).total_seconds() if first else 0.0
            if not number.number and not running[name]:
                continue
        found.append(
            Queue(
                name=name,
                due=number,
                oldest_due=waited,
                running=Bounded(min(running[name], MOST), running[name] > MOST),
                workers=sum(explain.serves(worker, name) for worker in workers),
            )
        )
    return found


# --- health ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Limits:
    """What is still healthy. Seconds: due work without a live worker, the oldest due work, a job that is stuck.

    Numbers of jobs that are tolerated: stuck ones, and ones whose hooks keep failing.
    """

    without_worker: float = 60.0
    due: float = 900.0
    stuck_for: float | None = None
    stuck: int = 0
    mirrors: int = 0

    @property
    def stuck_slack(self) -> float:
        """By default what a repair takes: a second sighting and two ticks."""
        return config.GRACE + 2 * config.TICK if self.stuck_for is None else self.stuck_for


@dataclass(frozen=True)
class Check:
    """One thing that was looked at: its name, whether it is well, a sentence, and the way out when it is not."""

    name: str
    ok: bool
    sentence: str
    way_out: str = ""


@dataclass
class Health:
    """Healthy when every check is."""

    checks: list[Check] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        return all(check.ok for check in self.checks)


def health(limits: Limits | None = None) -> Health:
    """Is work being done? Never raises for a database that fails: that is an answer, too."""
    found = Health()
    try:
        # Extended as it goes: what was found before the database failed is still true.
        for check in _look(limits or Limits()):
            found.checks.append(check)
    except Error as error:
        found.checks.append(_unreachable(error))
        database.drop_broken(database.alias())
    return found


def worker_health(silent: float = PROBED_AFTER) -> Health:
    """Does a worker of this host poll? For a container's probe: the host's name is the container's."""
    host = socket.gethostname()
    try:
        now = store.now()
        rows = WorkerProcess.objects.using(database.alias()).filter(host=host)
        last = rows.order_by("-beat_at").first()
    except Error as error:
        database.drop_broken(database.alias())
        return Health([_unreachable(error)])
    if last is None:
        return Health(
            [Check("worker", False, f"No worker of host {host} is registered.", "Start runworker here.")]
        )
    age = max(0.0, (now - last.beat_at).total_seconds())
    sentence = f"The worker {last.owner} showed itself {age:.0f} s ago."
    if age > silent:
        return Health([Check("worker", False, sentence, "It hangs or has died: end it and start a new one.")])
    return Health([Check("worker", True, sentence)])


def _unreachable(error: Exception) -> Check:
    problem = " ".join(str(error).split()).rstrip(".?")
    way_out = "Is it running, and is it migrated? (manage.py migrate)"
    return Check("database", False, f"The database {database.alias()!r} fails: {problem}.", way_out)


def _look(limits: Limits) -> Iterator[Check]:
    now = store.now()
    pauses = list(Pause.objects.using(database.alias()))
    yield Check("database", True, f"The database {database.alias()!r} answers.")
    yield from _look_at_due_work(now, limits, pauses)
    yield _look_at_stuck_jobs(now, limits)
    yield _look_at_hooks(limits)


def _look_at_due_work(now: datetime, limits: Limits, pauses: list[Pause]) -> Iterator[Check]:
    workers = explain.live_workers(now)
    unserved: dict[str, float] = {}
    oldest, place = 0.0, ""
    for route in store.routes():
        if route.queue == MANUAL_QUEUE:
            continue
        due = _due_for(route, now, pauses)
        if due > limits.without_worker and not any(
            explain.serves(worker, route.queue, route.kind) for worker in workers
        ):
            name = f"{route.queue} ({route.kind})"
            unserved[name] = max(unserved.get(name, 0.0), due)
        if due > oldest:
            oldest, place = due, f"{route.queue} ({route.kind})"
    if unserved:
        listed = ", ".join(f"{name} for {explain.span(due)}" for name, due in sorted(unserved.items())[:5])
        more = f", and {len(unserved) - 5} more" if len(unserved) > 5 else ""
        yield Check(
            "workers",
            False,
            f"Due work that no live worker takes: {listed}{more}.",
            "Start one: manage.py runworker",
        )
    else:
        yield Check("workers", True, f"{len(workers)} live; no due work without one.")
    if oldest > limits.due:
        sentence = f"The oldest due work has waited {explain.span(oldest)}, in {place}."
        yield Check("due", False, sentence, "Start more workers, or find out what they are busy with.")
    else:
        waited = (
            f"The oldest due work has waited {explain.span(oldest)}." if oldest > 0 else "No work is due."
        )
        yield Check("due", True, waited)


def _due_for(route: store.Route, now: datetime, pauses: list[Pause]) -> float:
    """Seconds for which the oldest due work of a route has waited that is not paused."""
    if route.due_in > 0:
        return 0.0
    here = [
        pause for pause in pauses if pause.queue_name in ("", route.queue) and pause.kind in ("", route.kind)
    ]
    if not here:
        return -route.due_in
    if any(not pause.tenant_id for pause in here):
        return 0.0
    jobs = _jobs().filter(
        queue_name=route.queue, kind=route.kind, priority=route.priority, next_run_at__lte=now
    )
    first = jobs.exclude(explain.held_back(here)).order_by("next_run_at").only("next_run_at").first()
    return (now - first.next_run_at).total_seconds() if first else 0.0


def _look_at_stuck_jobs(now: datetime, limits: Limits) -> Check:
    stuck = stuck_jobs(now, limit=MOST, slack=limits.stuck_slack)
    if len(stuck) <= limits.stuck:
        return Check("stuck", True, f"{len(stuck)} stuck jobs." if stuck else "No stuck jobs.")
    shown = ", ".join(f"{job.kind} {job.id}" for job in stuck[:3])
    sentence = f"{len(stuck):,} stuck {'job' if len(stuck) == 1 else 'jobs'}: {shown}{', …' if len(stuck) > 3 else ''}."
    return Check("stuck", False, sentence, "manage.py durable_jobs explain ID says why.")


def _look_at_hooks(limits: Limits) -> Check:
    failing = Q(mirror_attempts__gte=MIRROR_STUCK_AFTER)
    running = _count(Q(status=Status.RUNNING) & failing)
    waiting = _count(
        Q(cancel_requested_at__isnull=False, finished_at__isnull=True) & ~Q(status=Status.RUNNING) & failing
    )
    number = running.number + waiting.number
    if number <= limits.mirrors:
        return Check("hooks", True, f"{number} jobs with failing hooks." if number else "No failing hooks.")
    return Check(
        "hooks",
        False,
        f"{number:,} {'job' if number == 1 else 'jobs'} cannot end, because their hooks keep failing.",
        "manage.py durable_jobs list --phase stuck shows them; mend the hooks, or settle the jobs without them.",
    )
