"""A worker process: one thread claims, N threads run slices, others keep leases, listen and repair.

Jobs of kinds without hooks that end together are completed in one transaction: a few by the claiming thread, which
claims the next ones with it; on PostgreSQL many by a thread of its own, because a server does both at a time.
Of kinds that end at once it claims more than can begin, so that no thread waits.

It ends by draining: no more claims, running slices are asked to yield, what was claimed and not begun goes
back. Whatever fails meanwhile, a step, the database or one of its own threads, does not end it.
"""

from __future__ import annotations

import contextvars
import gc
import logging
import math
import os
import queue
import secrets
import signal
import socket
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final, NoReturn

from django.db import connections
from django.db.backends.base.base import BaseDatabaseWrapper
from django.db.utils import Error as DatabaseError

from durable_jobs import connection as own_connection
from durable_jobs import database, kinds, lifecycle, store, transports
from durable_jobs.conf import MANUAL_QUEUE, config
from durable_jobs.exceptions import where_kinds_are_found
from durable_jobs.keeper import Hold, Keeper
from durable_jobs.lifecycle import Share
from durable_jobs.logs import tell
from durable_jobs.models import Job
from durable_jobs.outage import Outage
from durable_jobs.runner import Finished, SliceResult, begin_slice
from durable_jobs.store import Lease
from durable_jobs.transports.database import Claimer, Listener
from durable_jobs.upkeep import PRESENCE_SECONDS, Upkeep

logger = logging.getLogger("durable_jobs.worker")

EXIT_DONE: Final = 0
EXIT_STILL_RUNNING: Final = 1
EXIT_NOT_MIGRATED: Final = 3
EXIT_NO_DATABASE: Final = 4
EXIT_NO_THREAD: Final = 75
"""EX_TEMPFAIL: every thread hangs in a step; whoever supervises the process should start a new one."""
EXIT_SIGNAL: Final = 128
"""Plus the signal's number: the second signal, which does not wait for anything."""

DEFAULT_CONCURRENCY: Final = 4
SAME_SIGNAL_SECONDS: Final = 0.5
"""A signal that reaches the process twice (from its group and from its parent) counts once."""
LOOK_SECONDS: Final = 0.5
"""How often a full or draining worker looks at its threads."""
REPORT_SECONDS: Final = 5.0
IDLE_LOOK_SECONDS: Final = 0.2
AHEAD_SECONDS: Final = 0.1
"""So much work, by what jobs of their kind took lately, may be claimed before it can begin."""
LONGEST_UNBEGUN: Final = 1.0
"""Seconds after which what was claimed ahead goes back, because something else takes longer than was thought."""
MOST_TOGETHER: Final = 128
"""Jobs completed in one transaction."""
PACE_WEIGHT: Final = 0.1
GATHER_SECONDS: Final = 0.005
LONGEST_ENDED: Final = 0.02
"""Seconds that an end waits for others, while others are at it, until the claiming thread completes it."""
MOST_ENDED: Final = 2 * MOST_TOGETHER
"""With so many that have ended and are not completed, no others are begun."""
BEGIN_SECONDS: Final = 0.001
"""How long the claiming thread rests at most, so that the step of a single job begins before it looks again."""


def new_owner() -> str:
    """The name under which one start of this process holds leases; the random part makes it unique."""
    return f"{socket.gethostname()[:100]}:{os.getpid()}:{secrets.token_hex(8)}"


@dataclass(eq=False)
class Task:
    """A claimed job on its way through this process."""

    job: Job
    hold: Hold
    suspect: bool
    """Orphaned since its last commit: perhaps it kills processes."""
    thread: str = ""
    begun: bool = False
    finished: Finished | None = None
    ended_at: float = 0.0
    since: float = field(default_factory=time.monotonic)
    context: contextvars.Context = field(default_factory=contextvars.Context)
    """Of its own: what a step sets (language, time zone, variables) ends with it."""

    @property
    def lease(self) -> Lease:
        return self.hold.lease


class Worker:
    """Runs the jobs of these queues and kinds (default: of all) until it is stopped.

    `concurrency` slices at a time (default 4), `drain_timeout` in seconds (default: the setting
    DRAIN_TIMEOUT), `until_idle` ends it when nothing is left to do. `begun` is called when the database has
    answered and the first claim comes next.
    """

    def __init__(
        self,
        queues: Collection[str] | None = None,
        kinds: Collection[str] | None = None,
        concurrency: int | None = None,
        until_idle: bool = False,
        drain_timeout: float | None = None,
        begun: Callable[[], None] | None = None,
    ) -> None:
        self.owner = new_owner()
        self.queues, self.kinds = queues, kinds
        self.concurrency = concurrency or DEFAULT_CONCURRENCY
        self.until_idle = until_idle
        self.drain_timeout = config.DRAIN_TIMEOUT if drain_timeout is None else drain_timeout
        self._begun = begun
        self.keeper = Keeper(self.owner)
        self.claimer = Claimer(self.owner, queues=queues, kinds=kinds)
        self.listener = Listener(self.claimer.heard, self._heard_cancel)
        self._stopping = threading.Event()
        self._draining = threading.Event()
        self._is_over = False
        self._tasks: dict[Task, None] = {}
        self._guard = threading.Lock()
        self._inbox: queue.SimpleQueue[Task | None] = queue.SimpleQueue()
        self._ended: deque[Task] = deque()
        """Finished and not yet completed; still leased."""
        self._hooked: deque[Task] = deque()
        """The same, with hooks that share: for the thread of its own, where there is one."""
        self._led: list[Task] = []
        """What the thread of its own completes just now, together."""
        self._enough = threading.Event()
        """So many have ended that they are worth a transaction; or the end."""
        self._completer: threading.Thread | None = None
        self._led_since = 0.0
        self._unled_until = 0.0
        self._pace: dict[str, float] = {}
        """Seconds that jobs of a kind take, by what they took lately."""
        self._in_turn_until = 0.0
        self._low = 0
        """With no more than so many waiting, the next are claimed."""
        self._looked_at = 0.0
        self._threads: list[threading.Thread] = []
        self._last_round = time.monotonic()
        self._outage = Outage("claims")
        self._upkeep = Upkeep(
            self.owner,
            queues=queues or (),
            kinds=self.claimer.known,
            concurrency=self.concurrency,
            published=lambda job: transports.current().publish(job),
            is_moving=self._is_moving,
        )
        self._said_at = 0.0

    def run(self) -> int:
        """Work until stopped, idle (`until_idle`) or without a usable thread; answers the exit code.

        0: drained. 1: slices still ran when the drain timeout was over. 3: the tables are missing. 4: the
        database does not answer at the start. 75: every thread hangs in a step. After 1 and 75 threads are
        left running: end the process with `leave`.
        """
        with self._signals(), self._own_connection(), _heap_left_alone():
            refused = self._examine_database()
            if refused is not None:
                return refused
            try:
                self._begin()
                if self._begun is not None:
                    self._begun()
                code = self._work()
                return self._drain(code)
            finally:
                self._end()

    def stop(self) -> None:
        """Ask for a drain, from any thread; the first signal does the same."""
        self._stopping.set()
        self.claimer.wake()

    @property
    def has_threads_left(self) -> bool:
        """Whether threads that run slices or complete them still do so after `run` has ended."""
        left = [*self._threads, self._completer]
        return any(thread is not None and thread.is_alive() for thread in left)

    def _heard_cancel(self, owner: str) -> None:
        if owner == self.owner:
            self.keeper.beat_now()

    # --- beginning and end

    @contextmanager
    def _own_connection(self) -> Iterator[None]:
        own_connection.own("claims")
        try:
            yield
        finally:
            own_connection.disown()

    def _examine_database(self) -> int | None:
        connection = database.connection()
        try:
            connection.ensure_connection()
            lacking = database.lacking(connection)
        except DatabaseError as error:
            problem = str(error).strip().replace("\n", " ")
            self._say(f"The database {connection.alias!r} does not answer: {problem}")
            return EXIT_NO_DATABASE
        if lacking:
            self._say(f"The database {connection.alias!r} has no {lacking}: {database.MIGRATE_FIRST}")
            return EXIT_NOT_MIGRATED
        return None

    def _begin(self) -> None:
        tell(
            logger,
            logging.INFO,
            "worker_started",
            owner=self.owner,
            queues=_named(self.queues),
            kinds=_named(self.kinds),
            concurrency=self.concurrency,
            database=database.place(database.connection()),
        )
        self._tell_of_missing_kinds()
        try:
            self._upkeep.register()
        except DatabaseError as error:
            # For the screens only; upkeep tries again.
            tell(logger, logging.WARNING, "worker_row_missing", str(error), owner=self.owner)
            own_connection.close()
        self.keeper.start()
        self.listener.start()
        if config.LISTEN:
            self.claimer.watch_file()
        self._threads = [
            _started(f"durable-jobs-slice-{number}", self._serve) for number in range(1, self.concurrency + 1)
        ]
        # On SQLite one writes at a time: there the claiming thread completes.
        if config.GROUP_COMMIT and database.connection().vendor == "postgresql":
            self._completer = _started("durable-jobs-ends", self._serve_ends)
        self._upkeep.start()

    def _tell_of_missing_kinds(self) -> None:
        """Log what somebody would wait for in vain: no kind at all, or waiting jobs of kinds that this code lacks."""
        known = set(kinds.names())
        if not known:
            tell(logger, logging.WARNING, "no_kinds", where_kinds_are_found(config.DISCOVER))
        waiting: set[str] = set()
        with suppress(DatabaseError):
            waiting = {route.kind for route in store.routes() if self._serves(route.queue)}
        for name in sorted(waiting - known):
            tell(logger, logging.WARNING, "unknown_kind", str(kinds.unknown(name)), kind=name)

    def _serves(self, queue: str) -> bool:
        return queue in self.queues if self.queues else queue != MANUAL_QUEUE

    def _end(self) -> None:
        self._upkeep.ask_to_stop()
        self._draining.set()
        self._is_over = True
        self.listener.stop()
        self.claimer.leave_file()
        for _ in self._threads:
            self._inbox.put(None)
        deadline = time.monotonic() + 1
        busy = {task.thread for task in self._running()}
        for thread in self._threads:
            if thread.name not in busy:
                thread.join(max(0.0, deadline - time.monotonic()))
        self._enough.set()
        if self._completer is not None and not self._led:
            self._completer.join(max(0.0, deadline - time.monotonic()))
        self._upkeep.join(deadline - time.monotonic())
        self.keeper.stop()
        try:
            store.worker_stopped(self.owner)
        except Exception as error:
            tell(logger, logging.WARNING, "worker_row_left", str(error), owner=self.owner)
        tell(logger, logging.INFO, "worker_stopped", owner=self.owner)

    # --- the claiming thread

    def _work(self) -> int:
        while not self._stopping.is_set():
            try:
                answers = self.claimer.answers
                claimed = self._round()
                if self.claimer.answers > answers:
                    self._outage.over()
                    self._last_round = time.monotonic()
                if not claimed and self.until_idle and self._is_idle():
                    tell(logger, logging.INFO, "worker_idle", owner=self.owner)
                    return EXIT_DONE
                if not claimed and not self._stopping.is_set():
                    self._wait()
            except Exception as error:
                self._stopping.wait(self._outage.seen(error))
            if self._tasks and self._hung() >= self.concurrency:
                tell(logger, logging.CRITICAL, "no_thread_left", owner=self.owner)
                return EXIT_NO_THREAD
        return EXIT_DONE

    def _round(self) -> bool:
        """Complete what has ended and claim what can begin, together where that is possible; whether any began."""
        if self.claimer.is_told and self._begin_told():
            return True
        self._look_around()
        self._let_ends_gather()
        self._free_hooked()
        ended = [] if self._are_led() else self._take_ended()
        free = self.concurrency - len(self._running())
        ahead, quick = self._room_ahead(free)
        if self._unended() >= (MOST_TOGETHER if self._completer is None else MOST_ENDED):
            # Far more ends wait than one transaction takes: no others are begun before they are through.
            free, ahead = min(free, 0), 0
        if free + ahead < 1:
            self._complete(ended)
            return False
        if ended and self.claimer.counts:
            self._complete(ended)
            ended = []
        with self.keeper.claiming():
            tasks = [self._take(job) for job in self._complete_and_claim(ended, free, ahead, quick)]
        if not tasks:
            return False
        self._dispatch(tasks, free)
        if self.claimer.claims_singly:
            # The interpreter is for its step now: nothing else was due a moment ago.
            self.claimer.rest(BEGIN_SECONDS)
        return True

    def _begin_told(self) -> bool:
        """A job that came while there was nothing to do begins past everything else; the next round looks at that."""
        if self._unended() or self._led or len(self._tasks) >= self.concurrency:
            return False
        with self.keeper.claiming():
            job = self.claimer.claim_told(suspects=not self._has_suspect())
            if job is None:
                return False
            task = self._take(job)
        self._dispatch([task], 1)
        self.claimer.rest(BEGIN_SECONDS)
        return True

    def _complete_and_claim(
        self, ended: list[Task], free: int, ahead: int, quick: Collection[str]
    ) -> list[Job]:
        claim = partial(
            self.claimer.claim, max(free, 0), suspects=not self._has_suspect(), ahead=ahead, quick=quick
        )
        if not ended:
            return claim()
        claimed: list[Job] = []

        def and_claim() -> None:
            claimed.extend(claim())

        self._complete(ended, and_claim)
        return claimed

    # --- ahead of their turn

    def _room_ahead(self, free: int) -> tuple[int, set[str]]:
        """How many more than `free` may be claimed, and of which kinds."""
        most = config.PREFETCH
        if most < 1 or time.monotonic() < self._in_turn_until:
            return 0, set()
        pace = {name: seconds for name, seconds in self._pace.items() if self._may_go_ahead(name)}
        slowest = max(pace.values(), default=math.inf)
        depth = min(most, int(self.concurrency * AHEAD_SECONDS / max(slowest, 1e-6)))
        # Not one at a time: when half is left.
        waiting, self._low = -min(free, 0), depth // 2
        return (depth - waiting if depth and waiting <= self._low else 0), set(pace)

    def _may_go_ahead(self, name: str) -> bool:
        """What has perhaps begun may be begun again only where the kind says so; and only if it soon ends."""
        kind = kinds.find(name)
        return (
            kind is not None
            and kind.orphan_policy == "redrive"
            and kind.max_running is None
            and self._pace[name] <= AHEAD_SECONDS
        )

    def _look_around(self) -> None:
        """Now and then: plans that are doubtful, and jobs that were claimed ahead and could not begin for long."""
        now = time.monotonic()
        if now - self._looked_at < LOOK_SECONDS:
            return
        self._looked_at = now
        self.claimer.renew_doubtful_plans()
        if any(not task.begun and now - task.since > LONGEST_UNBEGUN for task in self._running()):
            self._in_turn_until = now + LONGEST_UNBEGUN
            self._empty_inbox()

    # --- ends

    def _are_led(self) -> bool:
        """Whether another thread completes what has ended, or soon will, so that the claiming thread need not."""
        with self._guard:
            if not self._ended or self._completer is None or time.monotonic() < self._unled_until:
                return False
            at_it = bool(self._led) or self._inbox.qsize() > 0
            return at_it and time.monotonic() - self._ended[0].ended_at < LONGEST_ENDED

    def _let_ends_gather(self) -> None:
        """While the threads have enough before them, wait a little for more to share the transaction."""
        if self._completer is not None:
            return
        until = time.monotonic() + GATHER_SECONDS
        while (
            self._inbox.qsize() > self._low
            and 0 < len(self._ended) < MOST_TOGETHER
            and time.monotonic() < until
            and not self._stopping.is_set()
        ):
            time.sleep(GATHER_SECONDS / 5)

    def _unended(self) -> int:
        return len(self._ended) + len(self._hooked)

    def _take_ended(self) -> list[Task]:
        return _taken(self._ended, MOST_TOGETHER)

    def _put_back(self, tasks: list[Task]) -> None:
        """Before the others that wait for their end."""
        for task in reversed(tasks):
            (self._hooked if self._is_hooked(task) else self._ended).appendleft(task)

    def _is_hooked(self, task: Task) -> bool:
        """Whether its end is for the thread of its own: hooks may take their time, and claims go on beside them."""
        is_hooked = task.finished is not None and task.finished.ending.share is Share.HOOKED
        return is_hooked and self._completer is not None

    def _free_hooked(self) -> None:
        """Where the thread of its own cannot go on, because of the database or of a hook, these end alone."""
        if not self._hooked or self._completer is None:
            return
        now = time.monotonic()
        is_stuck = bool(self._led) and now - self._led_since > LONGEST_UNBEGUN
        if self._completer.is_alive() and not is_stuck and now >= self._unled_until:
            if not self._led:
                # It may have looked in vain, while it rested after an error; nobody else tells it of these.
                self._enough.set()
            return
        if is_stuck:
            for kind in {task.finished.ending.kind for task in self._led if task.finished is not None}:
                lifecycle.leave_alone(kind, TimeoutError("Its ends with others take too long."))
        while hooked := _taken(self._hooked, MOST_TOGETHER):
            self._go_on_with(hooked)

    def _complete(self, ended: list[Task], and_then: Callable[[], None] | None = None) -> None:
        """Complete these jobs in one transaction, with `and_then` in it; what does not go is completed singly."""
        if not ended:
            return
        finished = [task.finished for task in ended if task.finished is not None]
        for one in finished:
            one.ending.reset()
        wanted = [one for one in finished if one.is_wanted]
        endings = [one.ending for one in wanted]
        is_plain = all(ending.share is Share.PLAIN for ending in endings)
        unit = database.statement if and_then is None and is_plain else database.transaction
        try:
            with unit(database.alias(), what="completions"):
                lifecycle.complete_many(self.owner, endings)
                if and_then is not None and not any(ending.put_off for ending in endings):
                    and_then()
        except BaseException as error:
            for one in wanted:
                one.doubt()
                one.ending.reset()
            if database.is_outage(error) or database.is_conflict(error):
                self._put_back(ended)
            else:
                for ending in endings:
                    if ending.share in (Share.MIRRORED, Share.HOOKED):
                        lifecycle.leave_alone(ending.kind, error)
                self._go_on_with(ended)
            raise
        finally:
            if not is_plain:
                self._clean_after_hooks()
        self._tell(ended)

    def _tell(self, ended: list[Task]) -> None:
        """After the commit: let go of what was completed, tell of it, and complete the others otherwise."""
        counts = self.claimer.counts
        rest: list[Task] = []
        again: list[Task] = []
        for task in ended:
            if task.finished is None:
                continue
            if task.finished.ending.put_off:
                again.append(task)
            elif not task.finished.ending.done:
                rest.append(task)
            else:
                if counts:
                    self.claimer.expect(task.job)
                if task.finished.committed():
                    rest.append(task)
                else:
                    # A handler of the project's log may raise: the others have their ends all the same.
                    with suppress(Exception):
                        task.finished.tell()
        self._put_back(again)
        self._go_on_with(rest)

    def _clean_after_hooks(self) -> None:
        """A hook may have used other connections of this thread, or left something open on its own."""
        connection = database.connection()
        with suppress(Exception):
            if own_connection.is_alone(connection):
                database.clear_connection(connection)
            else:
                own_connection.clean()

    def _go_on_with(self, tasks: list[Task]) -> None:
        """To be completed alone, or told of, by a slice's thread."""
        with self._guard:
            self._tasks.update(dict.fromkeys(tasks))
        for task in tasks:
            self._inbox.put(task)

    def _take(self, job: Job) -> Task:
        kind = kinds.find(job.kind)
        ttl = kind.lease_seconds if kind else 60.0
        hold = Hold(Lease(job.id, self.owner, job.lease_epoch, ttl))
        self.keeper.hold(hold)
        return Task(job, hold, suspect=job.redrives_since_commit > 0)

    def _dispatch(self, tasks: list[Task], free: int) -> None:
        """Hand over what may begin."""
        if len(tasks) > 1:
            tasks = self._begun_first(tasks, free)
        with self._guard:
            self._tasks.update(dict.fromkeys(tasks))
        for task in tasks:
            self._inbox.put(task)

    def _begun_first(self, tasks: list[Task], free: int) -> list[Task]:
        """Of several suspects one, and only after the others went back.

        What would count as begun already begins first, and no more of it than there are threads.
        """
        suspects = [task for task in tasks if task.suspect]
        back = dict.fromkeys(suspects[1:], "suspect_given_back")
        in_turn = [task for task in tasks if task.job.heartbeat_at is not None and task not in back]
        if len(in_turn) > max(free, 1):
            self._in_turn_until = time.monotonic() + LONGEST_UNBEGUN
            back.update(dict.fromkeys(in_turn[max(free, 1) :], "given_back"))
        for task, event in back.items():
            self._give_back(task, event)
        rest = [task for task in tasks if task not in back]
        return sorted(rest, key=lambda task: task.job.heartbeat_at is None)

    def _give_back(self, task: Task, event: str) -> None:
        """Return a job that has not begun; if that fails its lease runs out, or the keeper gives it back."""
        facts: dict[str, Any] = {"job_id": task.job.id, "epoch": task.lease.epoch}
        try:
            store.give_back(task.lease)
            tell(logger, logging.INFO, event, **facts)
        except Exception as error:
            tell(logger, logging.WARNING, "give_back_failed", str(error), **facts)
            own_connection.close()
        finally:
            self.keeper.let_go(task.hold)

    def _wait(self) -> None:
        timeout = IDLE_LOOK_SECONDS if self.until_idle else config.POLL
        if self._ended or self._hooked:
            if self._are_led() or not self._ended:
                self.claimer.rest(LONGEST_ENDED)
            return
        if len(self._running()) >= self.concurrency:
            self.claimer.rest(LOOK_SECONDS)
        else:
            self.claimer.wait(timeout)

    def _is_idle(self) -> bool:
        return (
            not self._running()
            and not self._unended()
            and not self._led
            and not store.unfinished(self.queues, self.claimer.known())
        )

    def _is_moving(self) -> bool:
        """Whether its claiming thread gets on; a full one need not."""
        full = len(self._running()) >= self.concurrency
        return full or time.monotonic() - self._last_round <= 3 * PRESENCE_SECONDS + config.POLL

    def _running(self) -> list[Task]:
        with self._guard:
            return list(self._tasks)

    def _hung(self) -> int:
        hung = {hold.key for hold in self.keeper.overdue}
        return sum(task.hold.key in hung for task in self._running())

    def _has_suspect(self) -> bool:
        return bool(self._tasks) and any(
            task.suspect and not self.keeper.has_committed(task.lease) for task in self._running()
        )

    # --- the slice threads

    def _serve(self) -> None:
        name = threading.current_thread().name
        try:
            while (task := self._inbox.get()) is not None:
                task.thread = name
                try:
                    self._run_task(task)
                finally:
                    self._note_end(task)
                    # For every job it would be a fight for the interpreter: when there is room, and for the first end.
                    if self._inbox.qsize() <= self._low or self._unended() == 1:
                        self.claimer.wake()
        finally:
            connections.close_all()

    def _note_end(self, task: Task) -> None:
        with self._guard:
            self._tasks.pop(task, None)
            if task.finished is None or task.finished.is_over:
                return
            task.ended_at = time.monotonic()
            if self._is_hooked(task):
                self._hooked.append(task)
            else:
                self._ended.append(task)
            if not self._led and (self._hooked or len(self._ended) >= MOST_TOGETHER):
                self._enough.set()

    # --- the thread that completes

    def _serve_ends(self) -> None:
        """Complete what has ended, whenever that is worth a transaction, while the claiming thread claims."""
        try:
            own_connection.own("ends")
            while not self._is_over:
                self._enough.wait()
                self._enough.clear()
                self._lead()
        finally:
            connections.close_all()

    def _take_led(self) -> list[Task]:
        """What has hooks first, however few: others gather meanwhile."""
        with self._guard:
            self._led_since = time.monotonic()
            if self._led_since < self._unled_until:
                self._led = []
            elif self._hooked:
                self._led = _taken(self._hooked, 2 * lifecycle.MOST_HOOKS)
            else:
                self._led = self._take_ended() if len(self._ended) >= MOST_TOGETHER else []
            return self._led

    def _lead(self) -> None:
        try:
            while together := self._take_led():
                self._complete(together)
        except BaseException as error:
            # What has not gone through waits again: the claiming thread meets the same, and tells it.
            self._unled_until = time.monotonic() + LONGEST_UNBEGUN
            with suppress(Exception):
                tell(logger, logging.DEBUG, "completions_wait", str(error), owner=self.owner)
            own_connection.close()
        finally:
            with self._guard:
                self._led = []
            self.claimer.wake()

    def _run_task(self, task: Task) -> None:
        connection = None
        try:
            connection = own_connection.own(task.thread.removeprefix("durable-jobs-"))
            if task.finished is None and (self._draining.is_set() or task.hold.paused):
                self._give_back(task, "given_back")
                return
            result = task.context.run(self._run_slice, task, connection)
            if result is not None and result.job is not None:
                self.claimer.expect(result.job)
        except BaseException as error:
            if task.finished is None or not task.finished.is_committed:
                # Renewed no more and yet known here: the reconciler counts it, so that it has an end.
                task.hold.observe(lost=True)
                self.keeper.hold(task.hold)
            facts = {"job_id": task.job.id, "epoch": task.lease.epoch}
            # A handler of the project's log may raise: the thread goes on all the same.
            with suppress(Exception):
                tell(logger, logging.ERROR, "slice_broke", "the worker goes on", error=error, **facts)
        finally:
            # The runner has just looked at the jobs' own connection before it let the job finish.
            looked_at = task.finished is not None and not task.finished.is_over
            if not (looked_at and connection is not None and own_connection.is_alone(connection)):
                with suppress(Exception):
                    own_connection.clean()

    def _run_slice(self, task: Task, connection: BaseDatabaseWrapper) -> SliceResult | None:
        """Its result, or None when the job is still to be completed."""
        if task.finished is not None:
            if not task.finished.is_committed:
                return task.finished.complete()
            task.finished.tell()
            return None
        task.begun, began = True, time.monotonic()
        result = begin_slice(
            task.job,
            task.hold,
            self.keeper,
            self._draining,
            grouped=config.GROUP_COMMIT,
            context=task.context,
            connection=connection,
        )
        took = time.monotonic() - began
        name = task.job.kind
        self._pace[name] = took + (1 - PACE_WEIGHT) * (self._pace.get(name, took) - took)
        if isinstance(result, Finished):
            task.finished = result
            return None
        return result

    # --- the drain

    def _drain(self, code: int) -> int:
        self._draining.set()
        self.keeper.ask_to_stop()
        self._empty_inbox()
        deadline = time.monotonic() + self.drain_timeout
        while time.monotonic() < deadline:
            waited_for, are_ending = self._at_work()
            if not waited_for and not are_ending:
                break
            try:
                self._free_hooked()
                while ended := self._take_ended():
                    self._complete(ended)
            except Exception as error:
                self.claimer.rest(min(self._outage.seen(error), LOOK_SECONDS))
            if waited_for or self._led or self._hooked:
                self._report(waited_for, deadline)
                self.claimer.rest(min(LOOK_SECONDS, max(0.0, deadline - time.monotonic())))
        left = [*self._running(), *self._ended, *self._hooked, *self._led]
        if code != EXIT_DONE or not left:
            return code
        self._say(f"Not waiting any longer for {_listed(left)}; their leases run out by themselves.")
        for task in left:
            facts: dict[str, Any] = {
                "job_id": task.job.id,
                "epoch": task.lease.epoch,
                "thread": task.thread,
            }
            tell(logger, logging.ERROR, "slice_left_running", **facts)
        return EXIT_STILL_RUNNING

    def _empty_inbox(self) -> None:
        """Give back what has not begun; what has only to be completed stays."""
        ended: list[Task] = []
        with suppress(queue.Empty):
            while (task := self._inbox.get_nowait()) is not None:
                if task.finished is not None:
                    ended.append(task)
                    continue
                self._give_back(task, "given_back")
                with self._guard:
                    self._tasks.pop(task, None)
        for task in ended:
            self._inbox.put(task)

    def _at_work(self) -> tuple[list[Task], bool]:
        """The slices that run and do not hang, and whether others wait for their end: at one moment.

        The thread that completes puts back what is left, and only then has none in hand.
        """
        hung = {hold.key for hold in self.keeper.overdue}
        with self._guard:
            are_ending = bool(self._led or self._unended())
            running = list(self._tasks)
        return [task for task in running if task.hold.key not in hung], are_ending

    def _report(self, waited_for: list[Task], deadline: float) -> None:
        now = time.monotonic()
        if now - self._said_at < REPORT_SECONDS:
            return
        self._said_at = now
        left = max(0.0, deadline - now)
        self._say(f"Waiting up to {left:.0f} s for {_listed(waited_for)}. A second signal leaves at once.")

    # --- signals and words

    @contextmanager
    def _signals(self) -> Iterator[None]:
        """Drain at the first SIGTERM or SIGINT, leave at the second.

        A thread reads them from the wake-up descriptor, so that a main thread that is blocked in the
        database's library cannot delay the second one.
        """
        if threading.current_thread() is not threading.main_thread():
            tell(logger, logging.WARNING, "no_signals", "not the main thread: stop it with Worker.stop()")
            yield
            return
        with signals_read(signal.SIGTERM, signal.SIGINT) as reader:
            _started("durable-jobs-signals", partial(self._watch_signals, reader))
            yield

    def _watch_signals(self, reader: socket.socket) -> None:
        first_at: float | None = None
        with reader:
            while received := reader.recv(1):
                number = received[0]
                if number not in (signal.SIGTERM, signal.SIGINT):
                    continue
                name, now = signal.Signals(number).name, time.monotonic()
                if first_at is None:
                    first_at = now
                    self._say(f"{name}: draining.")
                    self.stop()
                elif now - first_at > SAME_SIGNAL_SECONDS:
                    self._say(f"{name} again: leaving at once, {_listed(self._running())} not waited for.")
                    os._exit(EXIT_SIGNAL + number)

    def _say(self, text: str) -> None:
        with suppress(OSError, ValueError):
            print(text, file=sys.stderr, flush=True)


@contextmanager
def signals_read(*numbers: signal.Signals) -> Iterator[socket.socket]:
    """A socket that has a byte for each of these signals, and ends with the block; whoever reads it closes it."""
    reader, writer = socket.socketpair()
    writer.setblocking(False)
    earlier = {number: signal.getsignal(number) for number in numbers}
    earlier_descriptor = signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)
    for number in numbers:
        signal.signal(number, _noted)
    try:
        yield reader
    finally:
        for number, handler in earlier.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(earlier_descriptor)
        writer.close()


@contextmanager
def _heap_left_alone() -> Iterator[None]:
    """What the process has loaded before is not walked by the garbage collector at every full collection.

    A walk of all of Django stops every thread for tens of milliseconds. Only in a process of the worker's own.
    """
    if threading.current_thread() is not threading.main_thread() or gc.get_freeze_count():
        yield
        return
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def leave(worker: Worker, code: int) -> NoReturn:
    """End the process with this code, also when threads hang in steps that never end."""
    if not worker.has_threads_left:
        sys.exit(code)
    logging.shutdown()
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            stream.flush()
    os._exit(code)


def _started(name: str, run: Callable[[], None]) -> threading.Thread:
    thread = threading.Thread(target=run, name=name, daemon=True)
    thread.start()
    return thread


def _taken(ended: deque[Task], most: int) -> list[Task]:
    """So many of them, the oldest first."""
    taken: list[Task] = []
    with suppress(IndexError):
        while len(taken) < most:
            taken.append(ended.popleft())
    return taken


def _noted(number: int, frame: Any) -> None:
    """The wake-up descriptor has it; a handler in Python is what makes the descriptor work."""


def _named(names: Collection[str] | None) -> str:
    return "all" if names is None else ",".join(sorted(names))


def _listed(tasks: list[Task]) -> str:
    if not tasks:
        return "nothing"
    shown = ", ".join(f"{task.job.kind} {task.job.id}" for task in tasks[:5])
    more = f" and {len(tasks) - 5} more" if len(tasks) > 5 else ""
    return f"{len(tasks)} running {'slice' if len(tasks) == 1 else 'slices'} ({shown}{more})"
