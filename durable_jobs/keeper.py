"""The lease keeper: one thread and one connection that keep all leases of a process alive.

It renews them in one statement that skips locked rows, and carries back what it learns: a lease that is
lost, a cancel, a pause. A database that does not answer means nothing for a lease: the keeper tries again.
"""

from __future__ import annotations

import logging
import math
import sys
import threading
import time
import traceback
from contextlib import AbstractContextManager
from typing import Any
from uuid import UUID

from django.db import connections

from durable_jobs import connection as own_connection
from durable_jobs import database, store
from durable_jobs.logs import tell
from durable_jobs.outage import Outage
from durable_jobs.store import Beat, Lease

logger = logging.getLogger("durable_jobs.keeper")

BEAT_SHARE = 0.3
"""A beat begins when this share of a lease has passed: a little before its third."""
LONGEST_INTERVAL = 5.0
"""Seconds; the beat also is how a slice learns of a cancel and of a pause."""
WATCH_SECONDS = 0.1
"""Between two looks at whether a SQLite file has changed: there nobody sends word of a cancel or a pause."""
SKIPPED_INTERVAL = 1.0
"""Seconds until a lease is tried again whose row somebody else has locked."""


_making_events = threading.Lock()
"""Events are made when they are asked for: most slices end before anybody does."""


class Hold:
    """A lease in use: what a slice and its keeper share.

    The slice tells `committed()` and `in_fence`; the keeper tells `lost`, `cancelled`, `paused`, `overdue`.
    All times are seconds of `time.monotonic()`.
    """

    def __init__(
        self, lease: Lease, *, max_slice_seconds: float = math.inf, thread: threading.Thread | None = None
    ) -> None:
        self.lease = lease
        self.max_slice_seconds = max_slice_seconds
        self.thread = thread or threading.current_thread()
        self._stop: threading.Event | None = None
        self._stopped = False
        self.lost = False
        self.cancelled = False
        self.paused = False
        """A pause matches: yield at the next boundary, as an interruption."""
        self.overdue = False
        """No commit within `max_slice_seconds`: the lease is not renewed any more."""
        self.in_fence = False
        self.begun = self.last_commit = time.monotonic()
        self.key = (lease.job_id, lease.epoch)
        self._interval = min(lease.ttl * BEAT_SHARE, LONGEST_INTERVAL)
        self._renewed = self.begun
        self._retry_at = math.inf

    @property
    def stop(self) -> threading.Event:
        """Set once, at the first sign that going on is pointless: lost, cancelled, paused or overdue."""
        if self._stop is None:
            with _making_events:
                if self._stop is None:
                    event = threading.Event()
                    if self._stopped:
                        event.set()
                    self._stop = event
        return self._stop

    def ask_to_stop(self) -> None:
        """Set `stop`."""
        with _making_events:
            self._stopped = True
            if self._stop is not None:
                self._stop.set()

    def begin(self, max_slice_seconds: float) -> None:
        """Its slice begins now, in this thread; until then the lease was held for a job that waits its turn."""
        self.max_slice_seconds = max_slice_seconds
        self.thread = threading.current_thread()
        self.begun = self.last_commit = time.monotonic()

    def committed(self) -> None:
        """Restart the clock of `max_slice_seconds`; the commit has renewed the lease, too."""
        self.last_commit = self._renewed = time.monotonic()
        self._retry_at = math.inf
        self.overdue = False

    def observe(self, *, cancel: bool = False, pause: bool = False, lost: bool = False) -> None:
        """Note a cancel, a pause or the loss of the lease, and set `stop`."""
        self.cancelled = self.cancelled or cancel
        self.paused = self.paused or pause
        self.lost = self.lost or lost
        if cancel or pause or lost:
            self.ask_to_stop()

    @property
    def _due_at(self) -> float:
        return self._retry_at if self._retry_at < math.inf else self._renewed + self._interval

    @property
    def _overdue_at(self) -> float:
        return self.last_commit + self.max_slice_seconds

    @property
    def _next_at(self) -> float:
        overdue_at = self.last_commit + self.max_slice_seconds
        if self.lost:
            return overdue_at
        due_at = self._retry_at if self._retry_at < math.inf else self._renewed + self._interval
        return due_at if due_at < overdue_at else overdue_at

    def _skipped(self, now: float) -> None:
        """Its row is locked: by our own fence, whose end renews it, or by somebody else."""
        if self.in_fence:
            self._renewed, self._retry_at = now, math.inf
        else:
            self._retry_at = now + min(SKIPPED_INTERVAL, self._interval)


class _Claiming:
    """Counts the claims that are open, and those that have begun, under the keeper's guard."""

    def __init__(self, guard: threading.Lock) -> None:
        self._guard = guard
        self.open = self.begun = 0

    def __enter__(self) -> None:
        with self._guard:
            self.open += 1
            self.begun += 1

    def __exit__(self, *error: object) -> None:
        with self._guard:
            self.open -= 1


class Keeper:
    """Keeps the leases of one owner. `start()`, then `hold` and `let_go` from any thread, then `stop()`.

    It also finds running rows of its owner that nobody here holds at two looks in a row (claims whose reply
    was lost) and gives them back.
    """

    def __init__(self, owner: str) -> None:
        self.owner = owner
        self.last_beat = time.monotonic()
        """When the last round succeeded (`time.monotonic()`)."""
        self._holds: dict[tuple[UUID, int], Hold] = {}
        self._guard = threading.Lock()
        self._wake = threading.Event()
        self._planned = math.inf
        self._at_once = False
        self._stopping = threading.Event()
        self._claiming = _Claiming(self._guard)
        self._strangers: set[tuple[UUID, int]] = set()
        self._version: tuple[Any, int] | None = None
        self._outage = Outage("keeper", longest=1.0)
        self._thread: threading.Thread | None = None

    # --- for the slices and the worker

    def start(self) -> None:
        """Start the thread."""
        self._thread = threading.Thread(target=self._run, name="durable-jobs-keeper", daemon=True)
        self._thread.start()

    def stop(self, timeout: float = 5.0) -> None:
        """End the thread and close its connection; leases still held are renewed no more."""
        self._stopping.set()
        self._wake.set()
        if self._thread is not None:
            self._thread.join(timeout)

    def hold(self, hold: Hold) -> None:
        """Keep this lease alive until `let_go`. A second hold of one lease takes the first one's place."""
        with self._guard:
            self._holds[hold.key] = hold
            sooner = hold._next_at < self._planned
        if sooner:
            self._wake.set()

    def let_go(self, hold: Hold) -> None:
        """Renew this lease no more. Call it after the row was written, or the row looks like a stranger.

        Nothing happens when another hold has taken its place.
        """
        with self._guard:
            if self._holds.get(hold.key) is hold:
                del self._holds[hold.key]

    def claiming(self) -> AbstractContextManager[None]:
        """Around a claim and the `hold` of everything it claimed: meanwhile nothing passes for a stranger."""
        return self._claiming

    def ask_to_stop(self) -> None:
        """Wake every step that waits on `ctx.stop`: the process drains."""
        with self._guard:
            for hold in self._holds.values():
                hold.ask_to_stop()

    def beat_now(self) -> None:
        """Beat as soon as possible: after a rolled-back fence, or when a cancel was announced."""
        self._at_once = True
        self._wake.set()

    def has_committed(self, lease: Lease) -> bool:
        """Whether the slice of this lease has committed since it began, or has ended."""
        with self._guard:
            hold = self._holds.get((lease.job_id, lease.epoch))
        return hold is None or hold.last_commit > hold.begun

    @property
    def overdue(self) -> list[Hold]:
        """The holds of slices that count as hung."""
        with self._guard:
            return [hold for hold in self._holds.values() if hold.overdue]

    # --- the thread

    def _run(self) -> None:
        try:
            own_connection.own("keeper")
            while not self._stopping.is_set():
                try:
                    self._wait()
                    self._round()
                    self._outage.over()
                except BaseException as error:
                    self._rest_after(error)
        finally:
            connections.close_all()

    def _wait(self) -> None:
        """Sleep until the next lease is due; a shorter one that arrives meanwhile ends the sleep."""
        while not self._stopping.is_set() and not self._at_once:
            now = time.monotonic()
            with self._guard:
                # Cleared in the same breath as the plan is made, so that no wake-up falls in between.
                self._wake.clear()
                moments = [hold._next_at for hold in self._holds.values() if not hold.overdue]
                self._planned = min([*moments, self.last_beat + LONGEST_INTERVAL])
                if self._at_once or self._stopping.is_set():
                    return
            if self._planned <= now:
                return
            self._sleep(min(self._planned - now, LONGEST_INTERVAL))

    def _sleep(self, seconds: float) -> None:
        if database.connection().vendor != "sqlite":
            self._wake.wait(seconds)
            return
        until = time.monotonic() + seconds
        while (left := until - time.monotonic()) > 0 and not self._wake.wait(min(left, WATCH_SECONDS)):
            self._look_for_requests()

    def _look_for_requests(self) -> None:
        """When the file has changed: who of ours is asked to stop. Nothing is written, and no lease renewed."""
        with self._guard:
            holds = {key: hold for key, hold in self._holds.items() if not hold.lost}
        if not holds:
            return
        version = database.version_reader(database.connection())()
        if version == self._version:
            return
        self._version = version
        for job_id, epoch, beat in store.asked_to_stop(self.owner):
            hold = holds.get((job_id, epoch))
            if hold is None:
                # Claimed just now, and not yet in our hands: it is looked for again.
                self._version = None
            else:
                self._tell(hold, beat)

    def _round(self) -> None:
        now = time.monotonic()
        with self._guard:
            forced, self._at_once = self._at_once, False
            hung = [hold for hold in self._holds.values() if not hold.overdue and hold._overdue_at <= now]
        for hold in hung:
            self._give_up_on(hold)
        with self._guard:
            holds = [hold for hold in self._holds.values() if not hold.lost and not hold.overdue]
        due = [hold for hold in holds if hold._due_at <= now]
        if due and not forced and all(hold._retry_at < math.inf for hold in due):
            self._beat(due)
            return
        self._beat(holds)
        self._look_for_strangers()
        self.last_beat = time.monotonic()

    def _beat(self, holds: list[Hold]) -> None:
        # One lease a job: where this process has claimed anew what it has lost meanwhile, the older is lost.
        latest = {hold.lease.job_id: hold for hold in sorted(holds, key=lambda hold: hold.lease.epoch)}
        sent = time.monotonic()
        beats = store.beat_many(self.owner, [hold.lease for hold in latest.values()])
        for hold in holds:
            if latest[hold.lease.job_id] is not hold:
                hold.observe(lost=True)
        for hold in latest.values():
            self._carry_back(hold, beats.get(hold.lease.job_id), sent)

    def _carry_back(self, hold: Hold, beat: Beat | None, sent: float) -> None:
        if beat is None or not beat.mine:
            hold.observe(lost=True)
            return
        self._tell(hold, beat)
        if beat.renewed:
            hold._renewed, hold._retry_at = max(hold._renewed, sent), math.inf
        else:
            hold._skipped(sent)

    def _tell(self, hold: Hold, beat: Beat) -> None:
        if beat.paused and not hold.paused:
            hold.observe(pause=True)
        if beat.cancel and not hold.cancelled:
            hold.observe(cancel=True)

    def _give_up_on(self, hold: Hold) -> None:
        """Let the reconciler have a slice that hangs: its process lives, its lease runs out."""
        hold.overdue = True
        hold.ask_to_stop()
        frame = sys._current_frames().get(hold.thread.ident or 0)
        stack = "".join(traceback.format_stack(frame)) if frame else "(its thread has ended)\n"
        tell(
            logger,
            logging.ERROR,
            "slice_overdue",
            f"no commit for {hold.max_slice_seconds:g} s; its lease is not renewed; it stands at\n{stack}",
            job_id=hold.lease.job_id,
            epoch=hold.lease.epoch,
            thread=hold.thread.name,
        )

    def _look_for_strangers(self) -> None:
        with self._guard:
            quiet, claims_begun = self._claiming.open == 0, self._claiming.begun
            known = {hold.lease.job_id for hold in self._holds.values() if not hold.lost}
        if not quiet:
            self._strangers = set()
            return
        found = set(store.strangers(self.owner, known))
        with self._guard:
            quiet = self._claiming.open == 0 and self._claiming.begun == claims_begun
            found -= self._holds.keys()
        if not quiet:
            self._strangers = set()
            return
        for job_id, epoch in found & self._strangers:
            self._give_back(job_id, epoch)
        self._strangers = found

    def _give_back(self, job_id: UUID, epoch: int) -> None:
        job = store.give_back(Lease(job_id, self.owner, epoch, 0.0))
        if job is not None:
            tell(
                logger,
                logging.WARNING,
                "stranger_given_back",
                "a claim whose answer never arrived",
                job_id=job_id,
                epoch=epoch,
            )

    def _rest_after(self, error: BaseException) -> None:
        """An outage and a bug alike end one round, never the keeper."""
        self._strangers = set()
        delay = self._outage.seen(error)
        with self._guard:
            shortest = min((hold._interval for hold in self._holds.values()), default=1.0)
        self._stopping.wait(min(delay, max(shortest, 0.01)))
        self._at_once = True
