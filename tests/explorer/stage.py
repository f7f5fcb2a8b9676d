"""Actors on connections of their own, stepped statement by statement: every order in which they can act.

An actor is a thread that runs ordinary code of the package and stops before each statement (and before BEGIN,
COMMIT and ROLLBACK). The stage lets one of them go on at a time. A statement that waits for another actor stays
under way while the others go on; it is told by `pg_blocking_pids`, and on SQLite by who holds the file.

A schedule is the list of who goes on at each choice, by number. Playing the same one again gives the same run.
"""

from __future__ import annotations

import functools
import queue
import re
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from django.db import connection, connections

from durable_jobs import store
from durable_jobs.database import Statement, WriterLock
from tests.explorer.meeting import COMMITS, FILE, LOCKS, Event, Step, Touch, committed, touches_of

Act = Callable[[], Any]
Choose = Callable[["Run", list[int]], int]
"""Who of those that can goes on now, given the run up to here."""

PATIENCE: Final = 30.0
"""Seconds after which an actor that neither stops nor waits for anybody counts as hanging."""
GLANCE: Final = 0.002
"""Seconds before the server is asked whether a statement waits."""

UNNOTICED: Final = re.compile(
    r"\s*(SAVEPOINT|RELEASE|ROLLBACK TO|PRAGMA|SELECT pg_notify|SELECT set_config|INSERT INTO durable_jobs_event)"
)
"""Statements that no other actor can notice: nothing is gained by stopping before them."""

READY, RUNNING, BLOCKED, FINISHED = "ready", "running", "blocked", "finished"

_local = threading.local()


class Nonsense(AssertionError):
    """The run came to no end: everybody waits, an actor hangs, or the schedule does not fit."""

    def __init__(self, message: str, run: Run | None = None) -> None:
        self.run = run or Run()
        super().__init__(message)


class Actor:
    """A thread with a connection of its own, kept for all runs."""

    def __init__(self, stage: Stage, number: int) -> None:
        self.stage, self.number = stage, number
        self.state = FINISHED
        self.at = ""
        """The statement before which it stopped, or in which it waits."""
        self.waits_for: set[int] = set()
        self.granted = False
        self.in_transaction = False
        self.has_turn = self.queues = False
        """On SQLite: it has its turn among this process's writers; it has asked for the file and does not have it."""
        self.touches: set[Touch] = set()
        """What it has touched since it was let go."""
        self.asked_for: set[Touch] = set()
        """What its last statement touches: when that has waited, it touches it again."""
        self.held: set[Touch] = set()
        """What its open transaction has locked or written."""
        self.answers: list[Any] = []
        self.error: BaseException | None = None
        self.pid = 0
        self._programs: queue.SimpleQueue[Sequence[Act] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._serve, name=f"tests-actor-{number}", daemon=True)
        self._thread.start()

    def begin(self, program: Sequence[Act]) -> None:
        self.answers, self.error, self.state = [], None, RUNNING
        self._programs.put(program)

    def close(self) -> None:
        self._programs.put(None)
        self._thread.join(10)

    # --- in its thread

    def _serve(self) -> None:
        _local.actor = self
        try:
            connection.ensure_connection()
            raw = connection.connection
            self.pid = raw.info.backend_pid if connection.vendor == "postgresql" else 0
            self._watch("commit")
            self._watch("rollback")
            with connection.execute_wrapper(self._before):
                while (program := self._programs.get()) is not None:
                    self._perform(program)
        finally:
            connections.close_all()

    def _perform(self, program: Sequence[Act]) -> None:
        try:
            for act in program:
                self.answers.append(act())
        except BaseException as error:
            self.error = error
        finally:
            self.in_transaction = self.has_turn = self.queues = False
            self.held.clear()
            self.stage.tell(self, FINISHED)

    def _watch(self, name: str) -> None:
        original = getattr(connection, name)

        def stepped() -> None:
            self.stop_before(name.upper())
            self._note_the_end()
            original()
            self.in_transaction = False

        setattr(connection, name, stepped)

    def _before(self, execute: Any, sql: str, params: Any, many: bool, context: Any) -> Any:
        if sql.startswith("BEGIN"):
            if not self.has_turn:
                self.stop_before("BEGIN")
                self.note_file()
                self.queues = True
            try:
                result = execute(sql, params, many, context)
            except BaseException:
                # With the turn it will ask again in a moment.
                self.queues = self.has_turn
                raise
            self.queues, self.in_transaction = False, True
            return result
        if not UNNOTICED.match(sql):
            self.stop_before(name_of(sql))
        self._note(sql, params)
        return execute(sql, params, many, context)

    def _note(self, sql: str, params: Any) -> None:
        if sql.startswith("ROLLBACK TO"):
            # What the savepoint had locked is free again; which that was is not known here.
            self.touches |= committed(self.held)
            return
        self.asked_for = touches_of(sql, params)
        if connection.vendor == "sqlite":
            self._note_on_sqlite()
        else:
            self.touches |= self.asked_for
            self.held |= self.asked_for
            if not connection.in_atomic_block:
                self._note_the_end()

    def _note_on_sqlite(self) -> None:
        """Inside a transaction it has the file: nobody can tell what it does before it is committed."""
        if self.in_transaction:
            self.held |= self.asked_for
            return
        self.touches |= {one for one in self.asked_for if one.how != LOCKS}
        if any(one.how == LOCKS for one in self.asked_for):
            self.held |= self.asked_for
            self.note_file()
            self._note_the_end()

    def note_file(self) -> None:
        self.asked_for = {Touch(LOCKS, FILE)}
        self.touches |= self.asked_for
        self.held |= self.asked_for

    def _note_the_end(self) -> None:
        self.touches |= committed(self.held)
        self.held.clear()

    def stop_before(self, what: str) -> None:
        """Wait until the stage lets this actor go on."""
        condition = self.stage.condition
        with condition:
            self.at, self.state = what, READY
            condition.notify_all()
            if not condition.wait_for(lambda: self.granted or self.stage.over, PATIENCE):
                raise Nonsense("nobody let this actor go on")
            self.granted, self.state = False, RUNNING


@dataclass
class Run:
    """What came of one schedule."""

    choices: list[int] = field(default_factory=list)
    ready: list[list[int]] = field(default_factory=list)
    """Who could have gone on at each choice."""
    steps: list[Step] = field(default_factory=list)
    """What each choice has led to."""
    repeats: bool = False
    """Another run has shown the same already; found out in the middle."""
    trace: list[str] = field(default_factory=list)
    blocked: list[str] = field(default_factory=list)
    """Statements that waited, and for whom."""
    answers: list[list[Any]] = field(default_factory=list)
    errors: list[BaseException | None] = field(default_factory=list)


class Stage:
    """Plays programs by schedules. One at a time in a process."""

    def __init__(self, actors: int) -> None:
        self.condition = threading.Condition()
        self.over = False
        """The run is given up: everybody goes on to the end."""
        self.actors: list[Actor] = []
        for number in range(actors):
            self.actors.append(Actor(self, number))
        self._original = WriterLock._acquire

    def __enter__(self) -> Stage:
        original = self._original

        def acquire(lock: WriterLock, urgent: bool, timeout: float) -> None:
            actor = getattr(_local, "actor", None)
            if actor is None:
                return original(lock, urgent, timeout)
            actor.stop_before("BEGIN")
            actor.note_file()
            actor.queues = True
            try:
                original(lock, urgent, timeout)
            except BaseException:
                actor.queues = False
                raise
            actor.has_turn = True

        original_release = WriterLock._release

        def release(lock: WriterLock) -> None:
            actor = getattr(_local, "actor", None)
            if actor is not None:
                actor.has_turn = actor.queues = actor.in_transaction = False
                actor.touches.add(Touch(COMMITS, FILE))
            original_release(lock)

        self._release = original_release
        WriterLock._acquire, WriterLock._release = acquire, release  # type: ignore[method-assign]
        return self

    def __exit__(self, *exc: object) -> None:
        WriterLock._acquire, WriterLock._release = self._original, self._release  # type: ignore[method-assign]
        for actor in self.actors:
            actor.close()

    # --- for the actors

    def tell(self, actor: Actor, state: str) -> None:
        with self.condition:
            actor.state = state
            self.condition.notify_all()

    def holders(self, actor: Actor) -> set[int]:
        """On SQLite: the other actors that have the file."""
        if connection.vendor != "sqlite":
            return set()
        return {
            other.number
            for other in self.actors
            if other is not actor and (other.in_transaction or (other.has_turn and not actor.has_turn))
        }

    # --- playing

    def play(self, programs: Sequence[Sequence[Act]], choose: Choose) -> Run:
        """Run the programs side by side; `choose` says who goes on."""
        run = Run()
        cast = self.actors[: len(programs)]
        try:
            self._perform(run, cast, programs, choose)
        except Nonsense:
            self._give_up(cast)
            raise
        run.answers = [actor.answers for actor in cast]
        run.errors = [actor.error for actor in cast]
        return run

    def _perform(
        self,
        run: Run,
        cast: Sequence[Actor],
        programs: Sequence[Sequence[Act]],
        choose: Choose,
    ) -> None:
        for actor, program in zip(cast, programs, strict=True):
            actor.begin(program)
            self._settle(run, cast, actor)
        while ready := [actor.number for actor in cast if actor.state == READY]:
            number = choose(run, ready)
            if number not in ready:
                raise Nonsense(f"actor {number} cannot go on here; ready are {ready}", run)
            run.choices.append(number)
            run.ready.append(ready)
            actor = cast[number]
            run.trace.append(f"{number}: {actor.at}")
            waited = [(one, set(one.asked_for)) for one in cast if one.state == BLOCKED]
            for one in cast:
                one.touches.clear()
            with self.condition:
                actor.state, actor.granted = RUNNING, True
                self.condition.notify_all()
            self._settle(run, cast, actor)
            run.steps.append(_step(number, cast, [one for one in waited if one[0].state != BLOCKED]))
        if stuck := [actor for actor in cast if actor.state != FINISHED]:
            told = "; ".join(f"{actor.number} in {actor.at:.200}" for actor in stuck)
            raise Nonsense(f"everybody waits for everybody: {told}", run)

    def _settle(self, run: Run, cast: Sequence[Actor], moved: Actor) -> None:
        """Until nobody runs: each has stopped, ended, or waits for another."""
        deadline = time.monotonic() + PATIENCE
        was_blocked = {actor.number for actor in cast if actor.state == BLOCKED}
        for actor in [moved, *(one for one in cast if one is not moved)]:
            while not self._rests(actor):
                if time.monotonic() > deadline:
                    raise Nonsense(f"actor {actor.number} hangs in {actor.at:.300}", run)
        # One that went on by itself may have taken what another one waited for, and the other way round.
        for actor in cast:
            while not self._rests(actor):
                if time.monotonic() > deadline:
                    raise Nonsense(f"actor {actor.number} hangs in {actor.at:.300}", run)
        for actor in cast:
            if actor.state == BLOCKED and actor.number not in was_blocked:
                held_by = ",".join(map(str, sorted(actor.waits_for)))
                run.blocked.append(f"{actor.at} <- {held_by}")
                run.trace.append(f"   {actor.number} waits for {held_by}")

    def _rests(self, actor: Actor) -> bool:
        with self.condition:
            # One that waited is looked at first; one that was let go is mostly done in a moment.
            if actor.state != BLOCKED and not (actor.queues and self.holders(actor)):
                self.condition.wait_for(lambda: actor.state in (READY, FINISHED), GLANCE)
            if actor.state in (READY, FINISHED):
                return True
        waits_for = self._whom_it_waits_for(actor)
        with self.condition:
            if actor.state in (READY, FINISHED):
                return True
            if waits_for:
                actor.waits_for, actor.state = waits_for, BLOCKED
                return True
            if actor.state == BLOCKED:
                actor.state = RUNNING
            return False

    def _whom_it_waits_for(self, actor: Actor) -> set[int]:
        if connection.vendor == "sqlite":
            return self.holders(actor) if actor.queues else set()
        with connection.cursor() as cursor:
            cursor.execute("SELECT unnest(pg_blocking_pids(%s))", [actor.pid])
            pids = {row[0] for row in cursor.fetchall()}
        return {other.number for other in self.actors if other.pid in pids}

    def _give_up(self, cast: Sequence[Actor]) -> None:
        """Let everybody run to the end, past what they wait for, so that the next run begins with idle actors."""
        with self.condition:
            self.over = True
            self.condition.notify_all()
        until = time.monotonic() + PATIENCE
        while waiting := [actor for actor in cast if actor.state != FINISHED]:
            if time.monotonic() > until:
                break
            if connection.vendor == "postgresql":
                with connection.cursor() as cursor:
                    for actor in waiting:
                        cursor.execute("SELECT pg_cancel_backend(%s)", [actor.pid])
            time.sleep(0.05)
        self.over = False
        for actor in cast:
            actor.granted = False


def _step(number: int, cast: Sequence[Actor], freed: Sequence[tuple[Actor, set[Touch]]]) -> Step:
    """What has happened since this actor was let go; `freed` had waited, each in a statement that touches these."""
    return Step(
        Event(number, frozenset(cast[number].touches)),
        tuple(
            Event(one.number, frozenset(one.touches | asked_for | committed(asked_for)))
            for one, asked_for in freed
        ),
    )


def first_ready(prefix: Sequence[int]) -> Choose:
    """Follow a schedule as far as it goes, then the first who can."""
    return lambda run, ready: prefix[len(run.choices)] if len(run.choices) < len(prefix) else ready[0]


@functools.cache
def name_of(sql: str) -> str:
    """The store's name for a statement, or its first words."""
    known = {one.sql(connection.vendor): name for name, one in _statements()}
    return known.get(sql, " ".join(sql.split())[:100])


def _statements() -> Iterator[tuple[str, Statement]]:
    for name, value in vars(store).items():
        many = value if isinstance(value, dict) else {0: value}
        for one in many.values():
            if isinstance(one, Statement):
                yield name.strip("_").lower(), one
