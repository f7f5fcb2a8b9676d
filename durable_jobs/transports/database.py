"""The default transport: the row is the message. It can be late, never lost.

On PostgreSQL a NOTIFY inside the transaction wakes the workers when it commits; on SQLite they watch the
file. Both are hints. Looking at the rows is the truth, so every failure here only slows pick-up.
"""

from __future__ import annotations

import json
import logging
import math
import os
import random
import threading
import time
from collections.abc import Callable, Collection, Iterable
from datetime import datetime, timedelta
from functools import lru_cache
from typing import Any, NamedTuple

from django.db import connections, transaction

from durable_jobs import connection as connection_module
from durable_jobs import database, kinds, store
from durable_jobs.conf import MANUAL_QUEUE, config
from durable_jobs.filewatch import FileWatch
from durable_jobs.logs import tell
from durable_jobs.models import Job, Scope
from durable_jobs.outage import Outage
from durable_jobs.store import Claimed, Probe
from durable_jobs.transports.base import BaseTransport

logger = logging.getLogger("durable_jobs.transport")

CHANNEL = "durable_jobs"
ANNOUNCED_AHEAD = 2.0
"""Seconds; what is due later than that is found by the workers' own looking, without a NOTIFY."""
COMMIT_SECONDS = 0.01
"""So long after a write to a SQLite file its commit is expected …"""
COMMIT_LOOK_SECONDS = 0.001
"""… and looked for so often; then each SQLITE_POLL …"""
STIRRED_SECONDS = 0.1
"""… until so long after it; and seldom while nobody writes."""
UNSTIRRED_LOOK_SECONDS = 0.1
FLOOR_MARGIN = timedelta(seconds=1)
SWEEP_SECONDS = 1.0
SWEEP_SHARE = 20
"""A sweep waits for this many times its own last duration."""
LONG_WALK_SECONDS = 0.02
LONG_CLAIM_SECONDS, LONG_CLAIM_SECONDS_EACH = 0.02, 0.001
PLANS_SECONDS = 300.0
"""Plans are made anew at most this often."""
LISTEN_SECONDS = 0.5
DUE_MARGIN = 0.002
AT_ONCE = 3
"""A start now and then is told at once; what comes faster waits for the end of the window."""


class Pair(NamedTuple):
    """Where work waits: the unit of polling and of NOTIFY."""

    queue: str
    kind: str
    priority: int


class DatabaseTransport(BaseTransport):
    """Publishes by NOTIFY, `AT_ONCE` per pair and `NOTIFY_DEBOUNCE` seconds; the last is late, never dropped."""

    name = "database"
    transactional = True
    loses_messages = False

    def __init__(self) -> None:
        self._trailer = _Trailer()

    def publish(self, job: Job) -> None:
        """Wake the workers when the open transaction commits (at once without one). Never raises."""
        try:
            connection = database.connection()
            if connection.vendor != "postgresql" or connection.needs_rollback or _is_far_ahead(job):
                return
            pair = Pair(job.queue_name, job.kind, job.priority)
            if self._trailer.may_go(pair, config.NOTIFY_DEBOUNCE):
                _notify(connection, list(pair))
            else:
                # After the commit, so that a transaction rolled back wakes nobody.
                transaction.on_commit(
                    lambda: self._trailer.send_later(pair), using=connection.alias, robust=True
                )
        except Exception as error:
            tell(logger, logging.WARNING, "publish_failed", str(error), job_id=job.id)

    def hint_cancel(self, job: Job) -> None:
        """Wake the keeper of the process that runs the job, when the open transaction commits."""
        self._tell({"cancel": job.lease_owner})

    def wake(self) -> None:
        """Wake all workers when the open transaction commits."""
        self._tell(None)

    def _tell(self, message: Any) -> None:
        try:
            connection = database.connection()
            if connection.vendor == "postgresql" and not connection.needs_rollback:
                _notify(connection, message)
        except Exception as error:
            tell(logger, logging.WARNING, "publish_failed", str(error))

    def close(self, timeout: float = 30.0) -> None:
        """Send what is still to be sent."""
        self._trailer.join(timeout)


def _is_far_ahead(job: Job) -> bool:
    if job.next_run_at is None or job.updated_at is None:
        return False
    return (job.next_run_at - job.updated_at).total_seconds() > ANNOUNCED_AHEAD


def _notify(connection: Any, message: Any) -> None:
    """`[queue, kind, priority]`: due; `{"cancel": owner}`: look at your leases; `null`: look at everything."""
    with connection.cursor() as cursor:
        cursor.execute("SELECT pg_notify(%s, %s)", [CHANNEL, json.dumps(message, ensure_ascii=False)])


@lru_cache(maxsize=1_000)
def _read(payload: str) -> Pair | str | None:
    """What is due (None: anything), or the owner who is to look at his leases."""
    try:
        message = json.loads(payload)
        if isinstance(message, dict):
            return str(message["cancel"])
        queue, kind, priority = message
        return Pair(str(queue), str(kind), int(priority))
    except (ValueError, TypeError, KeyError):
        # From another release, or `null`: looking at everything is always right.
        return None


class _Trailer:
    """Remembers what the debounce has held back, and sends it when the window has passed.

    Its thread lives, with a connection of its own, only while something is to be sent.
    """

    def __init__(self) -> None:
        self._guard = threading.Lock()
        self._sent: dict[Pair, tuple[float, int]] = {}
        """When the pair's window began, and how many were sent in it."""
        self._waiting: set[Pair] = set()
        self._thread: threading.Thread | None = None
        os.register_at_fork(after_in_child=self._forget)

    def may_go(self, pair: Pair, window: float) -> bool:
        """Whether this one is to be sent now: it begins a window, or is one of the first in it."""
        if window <= 0:
            return True
        now = time.monotonic()
        with self._guard:
            if pair in self._waiting:
                return False
            begun, sent = self._sent.get(pair, (-math.inf, 0))
            if now - begun >= window:
                begun, sent = now, 0
            if sent >= AT_ONCE:
                return False
            if len(self._sent) > 1000:
                self._sent.clear()
            self._sent[pair] = (begun, sent + 1)
            return True

    def send_later(self, pair: Pair) -> None:
        """Send it at the end of its window."""
        with self._guard:
            self._waiting.add(pair)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="durable-jobs-notify", daemon=True)
                self._thread.start()

    def join(self, timeout: float) -> None:
        thread = self._thread
        if thread is not None:
            thread.join(timeout)

    def _run(self) -> None:
        using = database.alias()
        try:
            while True:
                time.sleep(config.NOTIFY_DEBOUNCE)
                with self._guard:
                    pairs, self._waiting = self._waiting, set()
                    if not pairs:
                        self._thread = None
                        return
                    now = time.monotonic()
                    self._sent.update(dict.fromkeys(pairs, (now, 1)))
                self._send(using, pairs)
        finally:
            connections.close_all()

    def _send(self, using: str, pairs: Iterable[Pair]) -> None:
        try:
            connection_module.own("notify")
            for pair in pairs:
                _notify(connections[using], list(pair))
        except Exception as error:
            tell(logger, logging.WARNING, "publish_failed", str(error))
            connection_module.close()

    def _forget(self) -> None:
        self._guard = threading.Lock()
        self._sent, self._waiting, self._thread = {}, set(), None


class Listener:
    """LISTENs on a connection of its own (`LISTEN_DSN`, else as the jobs' database) and tells what it hears.

    `due` gets the pair that has work, or None when anything may be due or a notification may have been missed
    (after each connect); `cancel` gets the owner whose lease was asked to stop. It reconnects with growing
    pauses; without it the worker merely polls.
    """

    def __init__(self, due: Callable[[Pair | None], None], cancel: Callable[[str], None]) -> None:
        self._due, self._cancel = due, cancel
        self._stopping = threading.Event()
        self._outage = Outage("listener", longest=5.0)
        self._thread: threading.Thread | None = None
        self.connected = threading.Event()

    def start(self) -> None:
        """Start the thread, where there is something to listen to."""
        if database.connection().vendor != "postgresql" or not config.LISTEN:
            return
        self._thread = threading.Thread(target=self._run, name="durable-jobs-listener", daemon=True)
        self._thread.start()

    def stop(self, timeout: float = 2.0) -> None:
        """End the thread and close its connection."""
        self._stopping.set()
        if self._thread is not None:
            self._thread.join(timeout)

    def _run(self) -> None:
        while not self._stopping.is_set():
            try:
                self._listen()
            except Exception as error:
                self.connected.clear()
                self._stopping.wait(self._outage.seen(error))
        connections.close_all()

    def _listen(self) -> None:
        with database.connection().wrap_database_errors, self._connect() as connection:
            connection.execute(f"LISTEN {CHANNEL}")
            self._outage.over()
            self.connected.set()
            self._due(None)
            while not self._stopping.is_set():
                for notification in connection.notifies(timeout=LISTEN_SECONDS):
                    self._hear(notification.payload)

    def _hear(self, payload: str) -> None:
        heard = _read(payload)
        if isinstance(heard, str):
            self._cancel(heard)
        else:
            self._due(heard)

    def _connect(self) -> Any:
        import psycopg

        if config.LISTEN_DSN is not None:
            given: dict[str, Any] = {
                **connection_module.KEEPALIVES,
                "connect_timeout": connection_module.CONNECT_TIMEOUT,
            }
            return psycopg.connect(config.LISTEN_DSN, autocommit=True, **given)
        parameters = connection_module.own("listener").get_connection_params()
        return psycopg.connect(**{**parameters, "autocommit": True})


class _Wakeup:
    """An event that one thread waits for and any may set. The end of a wait unsets it.

    It is a bare lock, free when set: a `threading.Event` is ten calls for each of these in Python.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._lock.acquire()

    @property
    def is_set(self) -> bool:
        return not self._lock.locked()

    def set(self) -> None:
        try:
            self._lock.release()
        except RuntimeError:
            # Set already, and nobody has waited since.
            return

    def wait(self, timeout: float) -> bool:
        """Whether it was set before `timeout` seconds were over."""
        return self._lock.acquire(timeout=max(timeout, 0.0))


class Claimer:
    """Finds and claims due jobs of known kinds for one owner; used by one thread, woken by any.

    It keeps a list of the (queue, kind, priority) that have rows (PostgreSQL: with a floor each, so that a
    poll does not walk dead index entries under an old snapshot) and asks those alone. A sweep, every second
    or so, makes the list anew. On SQLite every look reads the list, and nothing is written unless something
    is due.
    """

    def __init__(
        self, owner: str, *, queues: Iterable[str] | None = None, kinds: Iterable[str] | None = None
    ) -> None:
        self.owner = owner
        self.queues = None if queues is None else frozenset(queues)
        self._kind_names = None if kinds is None else frozenset(kinds)
        self._due_at: dict[Pair, float | None] = {}
        """Monotonic time of the earliest known row; None: not known, ask."""
        self._floors: dict[Pair, datetime] = {}
        self._guard = threading.Lock()
        self._woken = _Wakeup()
        self._sweep_at = 0.0
        self._changed = True
        self._version: tuple[Any, int] | None = None
        self._watch: FileWatch | None = None
        self._stirred_at = -math.inf
        self._suspects = True
        self._full: dict[tuple[str, Scope], float] = {}
        """Kinds and scopes at their limit, until a monotonic time; an end seen here is sooner."""
        self._walk_at: dict[Pair, float] = {}
        self._waits = False
        self._told: set[Pair] = set()
        """Of what it was told since it waits."""
        self._asked_alone: list[Probe] = []
        """Where it has found nothing of what it was told, and need not ask again until it has waited or hears more."""
        self.claims_singly = False
        """Whether the last claim was of one job alone, of which it was told while it waited."""
        self._plans_doubted = False
        self._plans_renewed = -math.inf
        self.answers = 0
        """How often the database has answered; a look that needs no question says nothing about it."""

    # --- from any thread

    def wake(self) -> None:
        """End `wait` now."""
        # Who finds it set comes before the end of a wait, and so before the look that follows it.
        if not self._woken.is_set:
            self._woken.set()

    def stirred(self) -> None:
        """Somebody writes to the SQLite file, or has just done so."""
        self._stirred_at = time.monotonic()
        self.wake()

    def heard(self, pair: Pair | None) -> None:
        """A hint that a job of this pair is due; None: of any."""
        with self._guard:
            if pair is not None and not self._is_ours(pair):
                return
            self._asked_alone = []
            if pair is None:
                self._sweep_at = 0.0
            else:
                self._due_at[pair] = None
                if self._waits:
                    self._told.add(pair)
            self._changed = True
        self._woken.set()

    def expect(self, job: Job) -> None:
        """This process has just written the row: it may be claimable, and it may have made room."""
        kind = kinds.find(job.kind)
        if kind is not None and kind.max_running is not None:
            with self._guard:
                self._full.pop((kind.name, job.scope), None)
                self._changed = True
        if job.next_run_at is None or job.updated_at is None:
            return
        pair = Pair(job.queue_name, job.kind, job.priority)
        due_at = time.monotonic() + (job.next_run_at - job.updated_at).total_seconds()
        with self._guard:
            if self._is_ours(pair):
                known = self._due_at.get(pair, due_at)
                self._due_at[pair] = None if known is None else min(known, due_at)

    # --- from the claiming thread

    def claim(
        self, limit: int, *, suspects: bool = True, ahead: int = 0, quick: Collection[str] = ()
    ) -> list[Job]:
        """Claim up to `limit` due jobs, highest priority first.

        `suspects=False` leaves jobs alone that were orphaned since their last commit. `ahead` more while all that
        may be due is of `quick` kinds: what waits behind them would else wait for nothing.
        """
        if limit + ahead < 1:
            return []
        if database.connection().vendor == "sqlite":
            return self._claim_on_sqlite(limit, suspects, ahead, quick)
        if limit < 1:
            self._forget_told()
        elif (alone := self.claim_told(suspects=suspects)) is not None:
            return [alone]
        self._sweep_if_due()
        probes = self._probes()
        asked, self._asked_alone = self._asked_alone, []
        if not probes or probes == asked:
            return []
        return [one.job for one in self._ask(probes, limit, suspects, ahead, quick)]

    @property
    def is_told(self) -> bool:
        """Whether it was told of one place while it waited, and has not looked there since (PostgreSQL)."""
        return len(self._told) == 1

    def claim_told(self, *, suspects: bool = True) -> Job | None:
        """Claim one job of the one place that it was told of while it waited; None: of none or of several, or none is due.

        The list is made anew, and all else looked at, by the next `claim`: that takes as long as from commit to step.
        """
        self.claims_singly = False
        with self._guard:
            self._waits = False
            if not self._told:
                return None
            told, self._told = self._told, set()
            pair = told.pop()
            kind = self._kind(pair.kind)
            if told or kind is None:
                return None
            probe = Probe(*pair, self._floors.get(pair), kind.lease_seconds)
        if kind.max_running is not None:
            claimed = self._ask([probe], 1, suspects, 0, ())
            one = claimed[0] if claimed else None
        else:
            began = time.monotonic()
            one = store.claim_one(self.owner, probe, suspects=suspects)
            self._time_claim(time.monotonic() - began, int(one is not None))
            self.answers += 1
            with self._guard:
                self._due_at[pair] = None
                if one is not None and one.run_at is not None:
                    self._floors[pair] = one.run_at - FLOOR_MARGIN
        if one is None:
            self._asked_alone = [probe]
            return None
        self.claims_singly = True
        return one.job

    def _ask(
        self, probes: list[Probe], limit: int, suspects: bool, ahead: int, quick: Collection[str]
    ) -> list[Claimed]:
        began = time.monotonic()
        claimed = self._claim_at(probes, limit, suspects, ahead, quick)
        self._time_claim(time.monotonic() - began, len(claimed))
        self.answers += 1
        self._note(probes, claimed)
        return claimed

    def _forget_told(self) -> None:
        with self._guard:
            self._waits, self._told = False, set()
        self.claims_singly = False

    def _time_claim(self, took: float, jobs: int) -> None:
        if took > LONG_CLAIM_SECONDS + jobs * LONG_CLAIM_SECONDS_EACH:
            self._plans_doubted = True

    def renew_doubtful_plans(self) -> None:
        """Outside a transaction, after a claim that took long: perhaps it goes by a plan for another table."""
        now = time.monotonic()
        if self._plans_doubted and now >= self._plans_renewed + PLANS_SECONDS:
            self._plans_renewed = now
            store.renew_plans()
        self._plans_doubted = False

    def next_due(self) -> float:
        """Seconds until the earliest row that is known to be due later; infinite when none is known."""
        now = time.monotonic()
        with self._guard:
            later = [moment - now for moment in self._due_at.values() if moment is not None and moment > now]
        return min(later, default=math.inf)

    def wait(self, timeout: float) -> None:
        """Return when a job may be due, when woken, or after `timeout` seconds."""
        self._asked_alone = []
        timeout = min(timeout, self.next_due())
        if database.connection().vendor == "sqlite":
            self._watch_file(timeout)
        else:
            self._waits = not self._woken.is_set
            self._woken.wait(timeout)

    def rest(self, timeout: float) -> None:
        """Return when woken or after `timeout` seconds, whatever is due."""
        self._asked_alone = []
        self._woken.wait(timeout)

    # --- the list

    def known(self) -> dict[str, kinds.Kind]:
        """The kinds to claim, by each name that rows may carry."""
        known = {}
        for kind in kinds.all_kinds():
            if self._kind_names is None or self._kind_names.intersection(kind.all_names):
                known.update(dict.fromkeys(kind.all_names, kind))
        return known

    @property
    def counts(self) -> bool:
        """Whether a kind to claim has a limit, so that a claim must see what others have committed."""
        return any(kind.max_running is not None for kind in self.known().values())

    def _is_ours(self, pair: Pair) -> bool:
        return self._is_chosen(pair.queue) and self._kind(pair.kind) is not None

    def _kind(self, name: str) -> kinds.Kind | None:
        """The kind with that name, if it is one to claim."""
        kind = kinds.find(name)
        if kind is None or self._kind_names is None or self._kind_names.intersection(kind.all_names):
            return kind
        return None

    def _sweep_if_due(self) -> None:
        now = time.monotonic()
        with self._guard:
            if now < self._sweep_at:
                return
            # Still infinite afterwards, unless somebody has asked for another one meanwhile.
            self._sweep_at = math.inf
        next_at = 0.0
        try:
            self._sweep()
            pause = min(SWEEP_SECONDS, config.POLL)
            next_at = now + max(pause, SWEEP_SHARE * (time.monotonic() - now))
        finally:
            with self._guard:
                self._sweep_at = min(self._sweep_at, next_at)

    def _sweep(self) -> None:
        known, routes = self.known(), store.routes()
        # From here, so that a row is not asked for a moment before it is due.
        now = time.monotonic() + DUE_MARGIN
        found: dict[Pair, float | None] = {}
        for route in routes:
            pair = Pair(route.queue, route.kind, route.priority)
            if pair.kind in known and self._is_chosen(pair.queue):
                found[pair] = now + route.due_in if route.due_in > 0 else None
        self.answers += 1
        with self._guard:
            # Without floors until the next claim: a row that committed late may lie below its pair's.
            self._due_at, self._floors = found, {}

    def _is_chosen(self, queue: str) -> bool:
        return queue != MANUAL_QUEUE and (self.queues is None or queue in self.queues)

    def _probes(self) -> list[Probe]:
        now = time.monotonic()
        with self._guard:
            due = [pair for pair, moment in self._due_at.items() if moment is None or moment <= now]
        return self._probes_at(due)

    def _probes_at(self, pairs: Iterable[Pair]) -> list[Probe]:
        with self._guard:
            return [
                Probe(*pair, self._floors.get(pair), kind.lease_seconds)
                for pair in pairs
                if (kind := self._kind(pair.kind)) is not None
            ]

    def _note(self, probes: list[Probe], claimed: list[Claimed]) -> None:
        with self._guard:
            for probe in probes:
                self._due_at[Pair(*probe[:3])] = None
            least: dict[Pair, datetime] = {}
            for job, run_at in claimed:
                if run_at is not None:
                    pair = Pair(job.queue_name, job.kind, job.priority)
                    least[pair] = min(run_at, least.get(pair, run_at))
            self._floors.update((pair, run_at - FLOOR_MARGIN) for pair, run_at in least.items())

    # --- kinds with a limit

    def _claim_at(
        self, probes: list[Probe], limit: int, suspects: bool, ahead: int, quick: Collection[str]
    ) -> list[Claimed]:
        """Kinds without a limit in one statement, the others apart; higher priority first, else by chance."""
        known = {probe.kind: kinds.get(probe.kind) for probe in probes}
        limited = [probe for probe in probes if known[probe.kind].max_running is not None]
        if not limited:
            more = ahead if all(probe.kind in quick for probe in probes) else 0
            return store.claim_next(self.owner, limit + more, probes, suspects=suspects, ahead=more > 0)
        free = [probe for probe in probes if known[probe.kind].max_running is None]
        top = {id(part): max((probe.priority for probe in part), default=-101) for part in (free, limited)}
        parts = sorted((free, limited), key=lambda part: (-top[id(part)], random.random()))
        claimed: list[Claimed] = []
        for part in parts:
            left = limit - len(claimed)
            if part is free:
                claimed += store.claim_next(self.owner, left, part, suspects=suspects)
            else:
                claimed += self._claim_limited(part, left, suspects, known)
        return sorted(claimed, key=lambda one: (-one.job.priority, one.job.id))

    def _claim_limited(
        self, probes: list[Probe], limit: int, suspects: bool, known: dict[str, kinds.Kind]
    ) -> list[Claimed]:
        """One kind and scope after the other, each in a transaction that counts what runs."""
        claimed: list[Claimed] = []
        for probe in sorted(probes, key=lambda probe: (-probe.priority, random.random())):
            pair, kind, seen = Pair(*probe[:3]), known[probe.kind], self._full_scopes(known[probe.kind])
            while len(claimed) < limit and time.monotonic() >= self._walk_at.get(pair, 0.0):
                scopes = self._due_scopes(pair, probe, seen, suspects)
                if not scopes:
                    break
                for scope in scopes:
                    seen.add(scope)
                    if len(claimed) < limit:
                        claimed += self._claim_scope(kind, probe, scope, limit - len(claimed), suspects)
        return claimed

    def _claim_scope(
        self, kind: kinds.Kind, probe: Probe, scope: Scope, limit: int, suspects: bool
    ) -> list[Claimed]:
        assert kind.max_running is not None
        names = kind.all_names
        answer = store.claim_limited(
            self.owner, limit, probe, scope, names, kind.max_running, suspects=suspects
        )
        if answer is None:
            return []
        jobs, room = answer
        if room < 1:
            with self._guard:
                self._full[kind.name, scope] = time.monotonic() + min(SWEEP_SECONDS, config.POLL)
        # Without its time: a floor would hide older rows of scopes that are full.
        return [Claimed(job, None) for job in jobs]

    def _full_scopes(self, kind: kinds.Kind) -> set[Scope]:
        now = time.monotonic()
        with self._guard:
            self._full = {key: until for key, until in self._full.items() if until > now}
            return {scope for name, scope in self._full if name == kind.name}

    def _due_scopes(self, pair: Pair, probe: Probe, seen: set[Scope], suspects: bool) -> list[Scope]:
        began = time.monotonic()
        scopes = store.due_scopes(probe, seen, suspects=suspects)
        now = time.monotonic()
        if not scopes and now - began > LONG_WALK_SECONDS:
            # A long backlog of scopes that are full has been walked for nothing.
            self._walk_at[pair] = now + SWEEP_SHARE * (now - began)
        return scopes

    # --- SQLite

    def _claim_on_sqlite(self, limit: int, suspects: bool, ahead: int, quick: Collection[str]) -> list[Job]:
        version = database.version_reader(database.connection())()
        self.answers += 1
        with self._guard:
            changed = self._changed or version != self._version or (suspects and not self._suspects)
            if not changed and not self._has_come_due():
                return []
            self._changed, self._suspects = False, suspects
        self._sweep()
        probes = self._probes()
        if not probes or not store.is_due(probes, suspects=suspects):
            # Due and yet not to be claimed (paused, or a second suspect): only a change makes it so.
            self._note(probes, [])
            self._version = version
            return []
        self._full.clear()  # every commit is seen, so nothing has to be remembered
        if limit < 1 and not all(probe.kind in quick for probe in probes):
            self._changed = True
            return []
        claimed = self._claim_at(probes, limit, suspects, ahead, quick)
        if not claimed:
            # What is due is of kinds at their limit: only a change makes room.
            self._note(probes, [])
            self._version = version
            return []
        self._version, self._changed = None, True
        return [one.job for one in claimed]

    def _has_come_due(self) -> bool:
        now = time.monotonic()
        return any(moment is not None and moment <= now for moment in self._due_at.values())

    def _watch_file(self, timeout: float) -> None:
        """Other connections' commits change `data_version`; this one's own claims need no waking."""
        deadline = time.monotonic() + timeout
        read = database.version_reader(database.connection())
        while (left := deadline - time.monotonic()) > 0:
            if self._version is not None:
                version = read()
                self.answers += 1
                if version != self._version:
                    return
            if self._woken.wait(min(self._until_next_look(), left)):
                return

    def _until_next_look(self) -> float:
        """Seconds: few while somebody writes, because the commit is seen after the write that stirred."""
        if self._watch is None or not self._watch.is_watching:
            return config.SQLITE_POLL
        since = time.monotonic() - self._stirred_at
        if since < COMMIT_SECONDS:
            return min(COMMIT_LOOK_SECONDS, config.SQLITE_POLL)
        if since < STIRRED_SECONDS:
            return config.SQLITE_POLL
        return max(UNSTIRRED_LOOK_SECONDS, config.SQLITE_POLL)

    def watch_file(self) -> None:
        """Be told of writes to a SQLite file from now on, where the system can tell."""
        connection: Any = database.connection()
        if connection.vendor != "sqlite" or connection.is_in_memory_db():
            return
        with connection.cursor() as cursor:
            cursor.execute("PRAGMA database_list")
            path = next(path for _, name, path in cursor.fetchall() if name == "main")
        self._watch = FileWatch(path, self.stirred)
        self._watch.start()

    def leave_file(self) -> None:
        """End what `watch_file` began."""
        if self._watch is not None:
            self._watch.stop()
