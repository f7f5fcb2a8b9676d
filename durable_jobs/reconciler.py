"""Repairs what processes left behind that ended without a word.

A pass decides from rows alone, so any process may run it, several may run at once, and none of them leads.
It settles cancels of work that nobody holds, then orphans: running rows whose lease ran out under their
owner. Where messages can be lost it then announces jobs that wait without one; waiting harms none of them, so
none is ever parked for it. Each repair is a transaction of its own, restates every condition, and waits for no row.

An expired lease is no proof of a dead worker: after an outage of the database every lease is old. So an orphan
is repaired only on its second sighting: this reconciler has seen it before, at least `GRACE` seconds ago, with
the same epoch and expiry, and nothing has happened since that makes it doubt what it saw. A machine that is always
slow would be doubted for ever: a sighting that has outlasted `MOST_DOUBTS` of them holds.
"""

from __future__ import annotations

import logging
import math
import os
import random
import socket
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import datetime
from functools import partial
from typing import Any, Final, TypeVar
from uuid import UUID

from django.db import Error

from durable_jobs import database, kinds, lifecycle, store, transports
from durable_jobs.conf import MANUAL_QUEUE, config
from durable_jobs.exceptions import HookFailed
from durable_jobs.kinds import Kind
from durable_jobs.logs import log
from durable_jobs.models import Job
from durable_jobs.outage import Outage
from durable_jobs.store import Orphan, Waiting
from durable_jobs.transports import BrokerTransport

SLOW_WRITE: Final = 1.0
"""Seconds after which the write that begins a pass counts as a sign of an outage."""

MOST_DOUBTS: Final = 3
"""Slow writes and late passes that begin a sighting anew. Each of those writes was taken, so those of a living owner,
which tries all the time, would have been taken too."""

FIRST_SPACING: Final = 15.0
LONGEST_SPACING: Final = 600.0
JITTER: Final = 0.2

MOST_ANNOUNCED: Final = 1000
"""Waiting jobs of one queue, kind and priority that a pass sends messages for."""

LONG_LOOK: Final = 0.1
ANNOUNCE_SHARE: Final = 20
"""A look for them that took longer than `LONG_LOOK` seconds is repeated after this many times its duration."""

LOCKED_AFTER: Final = 5
"""An orphan that is still locked this many graces after its lease ran out is reported."""

SILENT_WORKER: Final = 86_400.0
FORGET_EVERY: Final = 3_600.0

Row = TypeVar("Row", UUID, Waiting, Orphan)


@dataclass(frozen=True)
class Leave:
    """Not ours to repair; `reason` is one word."""

    reason: str


@dataclass(frozen=True)
class Redrive:
    """Run it again, due in `delay` seconds (before jitter). Not `counted`: it had not begun."""

    delay: float
    counted: bool = True


@dataclass(frozen=True)
class Park:
    """Failed with a reason, waiting for a human."""

    code: str
    message: str


@dataclass(frozen=True)
class Cancel:
    """Somebody asked for its end, and nobody is left to obey."""


Repair = Redrive | Park | Cancel
Decision = Leave | Repair


@dataclass
class Report:
    """What a pass saw and did, in numbers of jobs.

    `scanned`: rows looked at. `sighted`: orphans seen that are not old enough news to act on. `unknown_kind`:
    left alone because no code for them is loaded here. `announced`: waiting jobs that a message was sent for,
    because their time has come or the last one was lost. `errors`: rows that could not be repaired, and a
    database that failed.
    """

    scanned: int = 0
    sighted: int = 0
    cancelled: int = 0
    redriven: int = 0
    parked: int = 0
    unknown_kind: int = 0
    announced: int = 0
    errors: int = 0


def decide(orphan: Orphan, kind: Kind | None, *, unknown_kind_grace: float) -> Decision:
    """What becomes of an orphan. Pure and total; the first rule that matches counts.

    A kind unknown here may be known elsewhere, as in a rolling deploy: for `unknown_kind_grace` seconds past
    the lease its job is left alone. A cancel comes before everything else, whatever the kind's policy.
    """
    if kind is None and orphan.overdue <= unknown_kind_grace:
        return Leave("unknown_kind")
    if orphan.cancel:
        return Cancel()
    if kind is None:
        return Park("no_handler", f"No process that repairs jobs knows the kind {orphan.kind}.")
    if orphan.verdict:
        return Park(orphan.verdict, "The worker ended before it could record that the job has failed.")
    if kind.orphan_policy != "redrive":
        return Park("orphaned", "The worker ended in the middle of the work. Is it safe to go on?")
    if not orphan.begun:
        return Redrive(0.0, counted=False)
    if orphan.redrives_since_commit >= kind.max_orphanings:
        return Park(
            "poison",
            f"The worker ended in the middle of the work {orphan.redrives_since_commit + 1} times "
            "without a commit between.",
        )
    return Redrive(spacing(orphan.redrives_since_commit))


def spacing(earlier: int) -> float:
    """Seconds to wait after `earlier` tries that came to nothing: 0, then 15 doubling to 600."""
    if earlier < 1:
        return 0.0
    # Clamped before the power is taken: a counter may be large.
    return min(FIRST_SPACING * 2.0 ** min(earlier - 1, 16), LONGEST_SPACING)


@dataclass(frozen=True)
class Sighting:
    """A lease seen expired, and when, by the clock of the reconciler that saw it; how often that was doubted."""

    epoch: int
    expires_at: datetime
    seen_at: float
    doubts: int = 0


@dataclass(frozen=True)
class Failure:
    """Tries in a row at one row that raised, and when it is worth another."""

    count: int
    until: float


@dataclass
class Pass:
    """One pass under way: when it began, what it has counted, and which rows it has met."""

    began: float
    report: Report = field(default_factory=Report)
    met: set[UUID] = field(default_factory=set)
    unknown: Counter[str] = field(default_factory=Counter)


class Reconciler:
    """Repairs jobs in passes, on behalf of the process `owner`. Use one from one thread at a time.

    Its sightings are its own and in memory: a fresh reconciler repairs no orphan before its second pass.
    `clock` is monotonic. `published` is told of each job that is due again, after the commit; `register` is
    called when the process's own `WorkerProcess` row has gone.
    """

    def __init__(
        self,
        owner: str,
        *,
        clock: Callable[[], float] = time.monotonic,
        published: Callable[[Job], None] | None = None,
        register: Callable[[], None] | None = None,
    ) -> None:
        self.owner = owner
        self._clock = clock
        self._published = published
        self._register = register
        self._actor = f"reconciler:{owner}"[:200]
        self._sightings: dict[UUID, Sighting] = {}
        self._failures: dict[UUID, Failure] = {}
        self._unknown: set[str] = set()
        self._ended_at: float | None = None
        self._forgot_at: float | None = None
        self._outage = Outage("reconciler")
        self._announce_at = -math.inf

    def tick(self, *, batch: int = 100, tenant: str | None = None) -> Report:
        """Make one pass over all rows, read `batch` at a time; over one tenant's where one is given.

        Survives every error of the database: the pass ends, and the next one starts from nothing seen.
        Raises `TransactionOwned` inside a caller's transaction.
        """
        this = Pass(self._clock())
        try:
            self._begin(this)
            self._fold_mail(batch, tenant)
            self._settle_cancels(this, batch, tenant)
            self._repair_orphans(this, batch, tenant)
            self._announce_waiting(this, batch, tenant)
            self._forget_what_is_gone(this)
            self._outage.over()
        except Error as error:
            this.report.errors += 1
            if database.is_outage(error):
                self._outage.seen(error)
            else:
                log("reconcile_pass_failed", level=logging.ERROR, owner=self.owner, error=error)
            self._void()
            database.drop_broken(database.alias())
        finally:
            self._ended_at = self._clock()
        return this.report

    def repair_dead(self, owner: str) -> Report:
        """Repair at once what a process held that has ended; only its supervisor, who has reaped it, may say so."""
        database.refuse_borrowed(database.alias(), "repair_dead")
        this = Pass(self._clock())
        try:
            for orphan in store.dead_leases(owner):
                this.report.scanned += 1
                self._repair(this, orphan, dead=True)
        except Error as error:
            this.report.errors += 1
            log("reconcile_dead_failed", level=logging.ERROR, owner=owner, error=error)
            database.drop_broken(database.alias())
        return this.report

    # --- the steps of a pass ----------------------------------------------------------------------------

    def _begin(self, this: Pass) -> None:
        """Write before reading: a database that does not take a write has taken no beats either."""
        # Passes may be as far apart as a sighting must be old.
        longest = 2 * max(config.TICK, config.GRACE)
        late = self._ended_at is not None and this.began - self._ended_at > longest
        registered = store.worker_beat(self.owner)
        if self._clock() - this.began > SLOW_WRITE:
            self._doubt("slow_write")
        elif late:
            self._doubt("late_tick")
        if not registered and self._register is not None:
            self._register()

    def _fold_mail(self, batch: int, tenant: str | None) -> None:
        """Stamp requests that met a locked row on the row, where nobody holds it any more."""
        for job_id in pages(partial(store.mailed, batch=batch, tenant=tenant), batch):
            with database.joined(database.alias()):
                store.fold_cancel(job_id)

    def _settle_cancels(self, this: Pass, batch: int, tenant: str | None) -> None:
        for waiting in pages(partial(store.cancelling, batch=batch, tenant=tenant), batch):
            this.report.scanned += 1
            this.met.add(waiting.id)
            if self._is_spaced_out(this, waiting.id):
                continue
            kind = kinds.find(waiting.kind)
            if kind is None and waiting.asked <= config.UNKNOWN_KIND_GRACE:
                self._leave_unknown(this, waiting.kind)
                continue
            with self._one(this, waiting, "reconcile_cancel_failed"):
                if lifecycle.cancel_waiting(kind, waiting.id, actor=self._actor) is not None:
                    this.report.cancelled += 1

    def _repair_orphans(self, this: Pass, batch: int, tenant: str | None) -> None:
        for orphan in pages(partial(store.orphans, config.GRACE, batch=batch, tenant=tenant), batch):
            this.report.scanned += 1
            this.met.add(orphan.id)
            self._repair(this, orphan)

    def _announce_waiting(self, this: Pass, batch: int, tenant: str | None) -> None:
        """Only where a message can be lost: else the row is the message, and a backlog needs no repair."""
        transport = transports.current()
        if self._published is None or not isinstance(transport, BrokerTransport):
            return
        if this.began < self._announce_at:
            return
        began = self._clock()
        for route in sorted(store.routes(), key=lambda route: -route.priority):
            kind = kinds.find(route.kind)
            if kind is None or route.queue == MANUAL_QUEUE or route.due_in > transport.reach:
                continue
            for _ in range(max(1, MOST_ANNOUNCED // batch)):
                jobs = store.announce(
                    route, reach=transport.reach, ttl=kind.pending_ttl_seconds, limit=batch, tenant=tenant
                )
                for job in jobs:
                    self._tell_lost(job, kind)
                    self._publish(this, job)
                this.report.announced += len(jobs)
                if len(jobs) < batch:
                    break
        took = self._clock() - began
        if took > LONG_LOOK:
            # A long backlog is walked over each time, by every process.
            self._announce_at = self._clock() + ANNOUNCE_SHARE * took

    def _tell_lost(self, job: Job, kind: Kind) -> None:
        if job.lost_deliveries > kind.max_lost_deliveries:
            log(
                "never_started",
                job,
                level=logging.ERROR,
                lost_deliveries=job.lost_deliveries,
                problem=f"nobody comes for the queue {job.queue_name}: is a worker there, and the broker?",
            )

    def _forget_what_is_gone(self, this: Pass) -> None:
        """A row that was not met again has moved on; what was noted of it must not meet a later orphaning."""
        self._sightings = {key: seen for key, seen in self._sightings.items() if key in this.met}
        self._failures = {key: failure for key, failure in self._failures.items() if key in this.met}
        for name in sorted(set(this.unknown) - self._unknown):
            log("unknown_kind", level=logging.WARNING, kind=name, jobs=this.unknown[name])
        self._unknown = set(this.unknown)
        if self._forgot_at is None or this.began - self._forgot_at >= FORGET_EVERY:
            store.forget_workers(SILENT_WORKER)
            self._forgot_at = this.began

    # --- one orphan -------------------------------------------------------------------------------------

    def _repair(self, this: Pass, orphan: Orphan, *, dead: bool = False) -> None:
        with self._one(this, orphan, "reconcile_orphan_failed"):
            kind = kinds.find(orphan.kind)
            decision = decide(orphan, kind, unknown_kind_grace=config.UNKNOWN_KIND_GRACE)
            if isinstance(decision, Leave):
                self._leave_unknown(this, orphan.kind)
            elif not dead and not self._seen_before(this, orphan):
                this.report.sighted += 1
            elif not self._is_spaced_out(this, orphan.id):
                job = self._act(this, orphan, kind, decision, dead=dead)
                if job is None:
                    self._report_lock(orphan)
                else:
                    self._sightings.pop(orphan.id, None)

    def _seen_before(self, this: Pass, orphan: Orphan) -> bool:
        """The second sighting: the same lease, in a pass that was at least `GRACE` seconds ago."""
        seen = self._sightings.get(orphan.id)
        if seen is None or (seen.epoch, seen.expires_at) != (orphan.epoch, orphan.expires_at):
            self._sightings[orphan.id] = Sighting(orphan.epoch, orphan.expires_at, self._clock())
            return False
        return this.began - seen.seen_at >= config.GRACE

    def _act(
        self, this: Pass, orphan: Orphan, kind: Kind | None, repair: Repair, *, dead: bool
    ) -> Job | None:
        """The job as the repair left it; None when a condition no longer held, or somebody holds the row."""
        grace, actor = config.GRACE, self._actor
        match repair:
            case Cancel():
                job = lifecycle.cancel_orphan(kind, orphan, grace=grace, dead=dead, actor=actor)
                this.report.cancelled += job is not None
            case Park(code, message):
                job = lifecycle.park_orphan(
                    kind, orphan, grace=grace, code=code, message=message, dead=dead, actor=actor
                )
                this.report.parked += job is not None
                if job is not None and kind is None:
                    log("no_handler", job, level=logging.WARNING, overdue=round(orphan.overdue))
            case Redrive(delay, counted):
                job = self._redrive(orphan, _jittered(delay), dead=dead, counted=counted)
                this.report.redriven += job is not None
                if job is not None:
                    self._publish(this, job)
        return job

    def _redrive(self, orphan: Orphan, delay: float, *, dead: bool, counted: bool) -> Job | None:
        facts: dict[str, Any] = {
            "redrives_since_commit": orphan.redrives_since_commit + counted,
            "delay": round(delay, 3),
            "overdue": round(orphan.overdue, 3),
        }
        if not counted:
            facts["begun"] = False
        with database.joined(database.alias()):
            job = store.take_orphan(orphan, grace=config.GRACE, delay=delay, dead=dead, counted=counted)
            if job is None:
                return None
            held = store.seconds_held(job, until=job.heartbeat_at)
            data = {"owner": orphan.owner, "epoch": orphan.epoch, "reaped": dead, "seconds": held, **facts}
            store.add_event(job, "orphaned", owner=orphan.owner, actor=self._actor, data=data)
        log("job_orphaned", job, level=logging.WARNING, owner=orphan.owner, epoch=orphan.epoch, **facts)
        return job

    def _publish(self, this: Pass, job: Job) -> None:
        """Best effort: the row is due, and a worker finds it by itself."""
        if self._published is None:
            return
        try:
            self._published(job)
        except Exception as error:
            this.report.errors += 1
            log("reenqueue_failed", job, level=logging.ERROR, error=error)

    def _report_lock(self, orphan: Orphan) -> None:
        """Say who holds a row that ought to have been repaired long ago: no statement of ours waits for it."""
        if orphan.overdue <= LOCKED_AFTER * config.GRACE:
            return
        holders = store.holders(orphan.id)
        if holders is not None:
            log(
                "orphan_locked",
                orphan,
                level=logging.ERROR,
                owner=orphan.owner,
                overdue=round(orphan.overdue),
                holders="; ".join(holders) or "unknown",
            )

    # --- doubts and errors ------------------------------------------------------------------------------

    def _void(self) -> None:
        """Forget every sighting: what was seen may be the outage's doing and not a dead worker's."""
        self._tell_void("database_error", len(self._sightings))
        self._sightings.clear()

    def _doubt(self, reason: str) -> None:
        """Let what was seen count from now on: the owners may not have been able to write until now, either."""
        now, doubted = self._clock(), 0
        for job_id, seen in self._sightings.items():
            if seen.doubts < MOST_DOUBTS:
                self._sightings[job_id] = replace(seen, seen_at=now, doubts=seen.doubts + 1)
                doubted += 1
        self._tell_void(reason, doubted)

    def _tell_void(self, reason: str, jobs: int) -> None:
        if jobs:
            log(
                "reconcile_sightings_void",
                level=logging.WARNING,
                owner=self.owner,
                reason=reason,
                jobs=jobs,
            )

    @contextmanager
    def _one(self, this: Pass, row: Waiting | Orphan, event: str) -> Iterator[None]:
        """One row's error is counted and logged, and the pass goes on; a failing database ends it."""
        raw = database.connection().connection
        try:
            yield
        except Exception as error:
            count = self._failures[row.id].count + 1 if row.id in self._failures else 1
            self._failures[row.id] = Failure(count, self._clock() + spacing(count))
            if self._is_our_outage(error, raw):
                raise
            this.report.errors += 1
            # The traceback of a failed hook has been logged where it was counted.
            shown = None if isinstance(error, HookFailed) else error
            log(event, row, level=logging.ERROR, failures=count, problem=error, error=shown)

    def _is_spaced_out(self, this: Pass, job_id: UUID) -> bool:
        """Whether the row failed so lately that another try would only fill its history."""
        failure = self._failures.get(job_id)
        return failure is not None and this.began < failure.until

    def _is_our_outage(self, error: Exception, raw: Any) -> bool:
        """Whether the jobs' own database failed: a hook may have met another one that did."""
        if not database.is_outage(error):
            return False
        connection = database.connection()
        # A connection cut inside an atomic block has been replaced by Django at the block's end.
        if database.is_locked(error) or connection.connection is not raw or not connection.is_usable():
            return True
        try:
            store.worker_beat(self.owner)
        except Error:
            return True
        return False

    def _leave_unknown(self, this: Pass, name: str) -> None:
        this.report.unknown_kind += 1
        this.unknown[name] += 1


def repair_once(
    *,
    published: Callable[[Job], None] | None = None,
    batch: int = 100,
    tenant: str | None = None,
    wait: bool = True,
) -> Report:
    """Two passes, `GRACE` seconds apart, for who has no worker: the sum of what they did.

    `wait=False` makes the second at once: what has run out is then taken for dead, which an outage of the
    database makes a lie. `sighted` and `unknown_kind` are those of the second pass.
    """
    skipped = 0.0
    owner = f"{socket.gethostname()[:100]}:{os.getpid()}"
    mender = Reconciler(owner, clock=lambda: time.monotonic() + skipped, published=published)
    first = mender.tick(batch=batch, tenant=tenant)
    # A little longer, because the age of a sighting is counted from the pass's beginning.
    if wait:
        time.sleep(config.GRACE + 0.01)
    else:
        skipped = config.GRACE + 0.01
    second = mender.tick(batch=batch, tenant=tenant)
    for name in ("scanned", "cancelled", "redriven", "parked", "announced", "errors"):
        setattr(second, name, getattr(first, name) + getattr(second, name))
    return second


def pages(read: Callable[[UUID | None], list[Row]], batch: int) -> Iterator[Row]:
    """Every row, a page at a time by key: rows that cannot be settled never stand in the way of others."""
    after: UUID | None = None
    while page := read(after):
        yield from page
        if len(page) < batch:
            return
        last = page[-1]
        after = last if isinstance(last, UUID) else last.id


def _jittered(delay: float) -> float:
    return delay * random.uniform(1 - JITTER, 1 + JITTER)
