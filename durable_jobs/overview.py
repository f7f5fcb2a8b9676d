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
from django.db.models import Count, DateTimeField, F, FloatField, Func, Min, Q, Value

from durable_jobs import database, explain, store
from durable_jobs.conf import MANUAL_QUEUE, config
from durable_jobs.lifecycle import MIRROR_STUCK_AFTER
from durable_jobs.models import Job, Pause, Status, WorkerProcess
from durable_jobs.selection import LARGE_COLUMNS

MOST: Final = 10_000
"""Numbers are exact up to here."""
WINDOWS: Final = {"1 h": timedelta(hours=1), "24 h": timedelta(hours=24), "7 d": timedelta(days=7)}
PROBED_AFTER: Final = 45.0
"""A worker shows itself every ten seconds, unless its claiming has stood still for thirty."""


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


def counts(where: Q | None = None, *, most: int | None = None) -> Counts:
    """Count, up to `most` each (default: `MOST`); `where` narrows the jobs, to a scope for example.

    What has ended is counted among the last `MOST` that failed and the last `MOST` that ended at all.
    """
    now, within = store.now(), where or Q()
    most = MOST if most is None else most
    failed = _ended(_jobs().filter(status=Status.FAILED), now, within, most, _FAILED_STATES)
    others = _ended(_jobs(), now, within, most, _OTHER_STATES)
    ended = {
        label: {
            Status.COMPLETED.value: others["completed", label],
            Status.FAILED.value: failed["any", label],
            Status.CANCELLED.value: others["cancelled", label],
        }
        for label in WINDOWS
    }
    return Counts(now, _live(now, within, most, failed), ended)


def stats() -> Stats:
    """Count everything."""
    counted = counts()
    workers = explain.live_workers(counted.now)
    return Stats(
        now=counted.now,
        live=counted.live,
        ended=counted.ended,
        failures=_failures(counted.now - WINDOWS["24 h"]),
        queues=queues(counted.now, workers),
        workers=workers,
        pauses=list(Pause.objects.using(database.alias()).order_by("id")),
    )


def live(now: datetime, where: Q | None = None) -> dict[str, Bounded]:
    """Jobs that have not ended, by what they wait for, and those that need a human; `where` narrows them."""
    within = where or Q()
    failed = _ended(_jobs().filter(status=Status.FAILED), now, within, MOST, _FAILED_STATES)
    return _live(now, within, MOST, failed)


def _live(now: datetime, within: Q, most: int, failed: dict[tuple[str, str], Bounded]) -> dict[str, Bounded]:
    return {
        "waiting": _count(Q(status=Status.PENDING, next_run_at__lte=now) & within, most),
        "scheduled": _count(Q(status=Status.PENDING, next_run_at__gt=now) & within, most),
        "retrying": _count(Q(status=Status.RUNNING, next_run_at__isnull=False) & within, most),
        "running": _count(Q(status=Status.RUNNING, lease_owner__isnull=False) & within, most),
        "stopping": _count(Q(cancel_requested_at__isnull=False, finished_at__isnull=True) & within, most),
        "stuck": _bounded(sum(jobs.order_by()[: most + 1].count() for jobs in _stuck(now, within)), most),
        "failed": failed["failed", ""],
        "parked": failed["parked", ""],
    }


_FAILED_STATES: Final = {
    "any": Q(),
    "failed": Q(parked_at__isnull=True),
    "parked": Q(parked_at__isnull=False),
}
_OTHER_STATES: Final = {
    "completed": Q(status=Status.COMPLETED),
    "cancelled": Q(status=Status.CANCELLED),
}


def _ended(
    jobs: Any, now: datetime, within: Q, most: int, states: dict[str, Q]
) -> dict[tuple[str, str], Bounded]:
    """By state and window ("" for no window) how many of the last `MOST` jobs are so: one query.

    Without a bound, the few cancelled jobs of a week would be looked for among all that ended in it.
    """
    horizons = {"": None, **{label: now - window for label, window in WINDOWS.items()}}
    numbers = {
        f"{state}{number}": Count(
            "pk",
            filter=condition & within & (Q(finished_at__gte=horizon) if horizon else Q(pk__isnull=False)),
        )
        for state, condition in states.items()
        for number, horizon in enumerate(horizons.values())
    }
    last = jobs.filter(finished_at__isnull=False).order_by("-finished_at")[: MOST + 1]
    found = last.aggregate(read=Count("pk"), oldest=Min("finished_at"), **numbers)

    def reaches_back(horizon: datetime | None) -> bool:
        return found["read"] <= MOST or (horizon is not None and found["oldest"] < horizon)

    return {
        (state, label): Bounded(
            min(counted := found[f"{state}{number}"], most), counted > most or not reaches_back(horizon)
        )
        for state in states
        for number, (label, horizon) in enumerate(horizons.items())
    }


def stuck_jobs(now: datetime, *, limit: int, slack: float = 0.0, where: Q | None = None) -> list[Job]:
    """Jobs that do not get on by themselves, oldest first; `slack` seconds are still given to lease and cancel."""
    found: dict[UUID, Job] = {}
    for jobs in _stuck(now - timedelta(seconds=slack), where or Q()):
        found |= {job.id: job for job in jobs.order_by("id").defer(*LARGE_COLUMNS)[:limit]}
    return [found[key] for key in sorted(found)[:limit]]


def _stuck(moment: datetime, where: Q) -> list[Any]:
    """What was stuck at that moment, in two parts, each of which has a partial index.

    SQLite would answer both at once by reading all rows.
    """
    jobs = _jobs().filter(where, explain.among(explain.Phase.STUCK, moment)).exclude(queue_name=MANUAL_QUEUE)
    running = Q(status=Status.RUNNING)
    return [
        jobs.filter(running),
        jobs.filter(~running, cancel_requested_at__isnull=False, finished_at__isnull=True),
    ]


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


def recent(now: datetime, where: Q | None = None) -> Recent:
    """Throughput, waiting and failures; `where` narrows the jobs, to a scope for example."""
    jobs = _jobs().filter(where or Q())
    age = Seconds(Value(now, output_field=DateTimeField()), F("finished_at"))
    ended = jobs.filter(finished_at__gte=now - HOUR, finished_at__lte=now).order_by("-finished_at")
    rows = list(ended.values_list(age, "status", _WAITED)[: MOST + 1])
    week = now - WINDOWS["7 d"]
    failed = jobs.filter(status=Status.FAILED, finished_at__gte=week).order_by("-finished_at")
    failures = list(failed.values_list(age, "kind", "error_type")[: MOST + 1])
    return Recent(
        bars=_by_five_minutes(now, rows),
        reaches=now - timedelta(seconds=rows[-1][0]) if len(rows) > MOST else None,
        hours=_by_hour(now, [row[0] for row in failures]),
        failures=_grouped_by_window(failures),
        failures_since=now - timedelta(seconds=failures[-1][0]) if len(failures) > MOST else None,
    )


class Seconds(Func):
    """The seconds from the second moment to the first: numbers are read many times faster than moments."""

    output_field = FloatField()
    arity = 2

    def as_postgresql(self, compiler: Any, connection: Any, **extra: Any) -> Any:
        return self.as_sql(
            compiler, connection, template="extract(epoch FROM (%(expressions)s))::float8", arg_joiner=" - "
        )

    def as_sqlite(self, compiler: Any, connection: Any, **extra: Any) -> Any:
        joiner = ") - julianday("
        return self.as_sql(
            compiler, connection, template="(julianday(%(expressions)s)) * 86400.0", arg_joiner=joiner
        )


_WAITED: Final = Seconds(F("started_at"), F("created_at"))
FIVE_MINUTES: Final = timedelta(minutes=5)


def _by_five_minutes(now: datetime, rows: list[Any]) -> list[Bar]:
    ended, failed = Counter[int](), Counter[int]()
    waits: dict[int, list[float]] = {}
    for age, status, waited in rows:
        number = max(0, min(11, int(age // 300)))
        ended[number] += 1
        failed[number] += status == Status.FAILED
        if waited is not None:
            waits.setdefault(number, []).append(max(0.0, waited))
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


def _by_hour(now: datetime, ages: list[float]) -> list[Bar]:
    numbers = Counter(int(age // 3600) for age in ages)
    return [Bar(now - (n + 1) * HOUR, now - n * HOUR, numbers[n], numbers[n]) for n in reversed(range(24))]


def _grouped_by_window(rows: list[Any]) -> list[Failures]:
    groups: dict[tuple[str, str], Counter[str]] = {}
    horizons = [(label, window.total_seconds()) for label, window in WINDOWS.items()]
    for age, kind, error_type in rows:
        group = groups.get(key := (kind, error_type or ""))
        if group is None:
            group = groups[key] = Counter()
        for label, horizon in horizons:
            group[label] += age <= horizon
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


def queues(now: datetime, workers: list[WorkerProcess], where: Q | None = None) -> list[Queue]:
    """The queues that have work, by name; `where` narrows the jobs, to a scope for example."""
    within = where or Q()
    oldest: dict[str, float] = {}
    for route in store.routes():
        oldest[route.queue] = max(oldest.get(route.queue, 0.0), -route.due_in)
    owned = _jobs().filter(within, status=Status.RUNNING, lease_owner__isnull=False).order_by()
    running = Counter(owned.values_list("queue_name", flat=True)[: MOST + 1])
    found = []
    for name in sorted({*oldest, *running}):
        due = Q(queue_name=name, next_run_at__lte=now) & within
        number, waited = _count(due), oldest.get(name, 0.0)
        if within:
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
        """Whether every check is well."""
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
    way_out = database.not_migrated(error) or "Is it running, and is it migrated? (manage.py migrate)"
    return Check("database", False, f"The database {database.alias()!r} fails: {problem}.", way_out)


def _look(limits: Limits) -> Iterator[Check]:
    now, pauses = store.now_and_pauses()
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
        yield Check(
            "workers",
            True,
            f"{len(workers)} live; no work due for over {limits.without_worker:g} s without one.",
        )
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
