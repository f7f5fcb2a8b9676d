"""Workers for a test that decides what each does next: real slices, in threads, that wait for orders."""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Callable, Iterator
from typing import Any, Final

from django.db import connection, connections

from durable_jobs import database
from durable_jobs.exceptions import LeaseLostError, Park, RetryAfter, TerminalError, UnrecoverableError
from durable_jobs.keeper import Keeper
from durable_jobs.kinds import Cancelled, Done, Kind, Yield
from durable_jobs.manager import Aborted, ExecutorContext, JobManager
from durable_jobs.models import Job
from durable_jobs.runner import SliceContext, SliceResult, run_slice
from tests.model.chart import AGREES
from tests.models import Shipment

PATIENCE: Final = 60.0
"""Seconds after which an order that has not been carried out counts as hanging."""

Order = Callable[[SliceContext], Any]


class Killed(KeyboardInterrupt):
    """The process is no more: nothing of it runs after this."""


class Undo(Exception):
    """Rolls a fence back, and the step goes on."""


class Ending(Exception):
    """Ends the step with an answer."""

    def __init__(self, answer: Any) -> None:
        self.answer = answer


ENDS: Final[dict[str, Callable[[], Any]]] = {
    "done": lambda: Ending(Done()),
    "yield": lambda: Ending(Yield()),
    "yield_later": lambda: Ending(Yield(20)),
    "cancelled": lambda: Ending(Cancelled()),
    "nothing": lambda: Ending(None),
    "transient": lambda: RuntimeError("no route"),
    "terminal": lambda: TerminalError("no such file"),
    "unrecoverable": lambda: UnrecoverableError("the file is gone"),
    "park": lambda: Park("by_step"),
    "later": lambda: RetryAfter(10),
}
"""How a step may end: what it returns, or raises."""


class Hooks:
    """Whether the project's own rows can be written just now; one for all kinds here."""

    broken: str | None = None


class Obedient(Kind):
    """Its step does what the hand is told that runs it."""

    def step(self, ctx: SliceContext) -> Any:
        return _hand.current.obey(ctx)


class Mirrored(Obedient):
    """Keeps its shipment in step with the job, while the hooks work."""

    def on_transition(self, job: Job) -> int:
        if Hooks.broken == "raise":
            raise RuntimeError("the hook fails")
        if Hooks.broken == "disagree":
            return 0
        return Shipment.objects.filter(pk=job.subject_id).update(status=AGREES[job.status])

    def on_redrive(self, job: Job) -> int:
        if Hooks.broken:
            raise RuntimeError("the hook fails")
        return Shipment.objects.filter(pk=job.subject_id).update(status="queued")


class _Current(threading.local):
    current: Hand


_hand = _Current()


class Process:
    """One worker process after another in the same place: an owner, a keeper, and hands that run its slices."""

    def __init__(self, name: str, hands: int) -> None:
        self.name = name
        self.starts = 0
        self.hands = [Hand(self) for _ in range(hands)]
        self.restart()

    def restart(self) -> None:
        """A new process: another owner, a keeper that knows nothing."""
        self.starts += 1
        self.owner = f"{self.name}-{self.starts}"
        self.keeper = Keeper(self.owner)
        self.draining = threading.Event()

    def kill(self) -> None:
        """Kill the process with all that it does, and start another in its place."""
        for hand in self.hands:
            hand.die()
        self.restart()

    def close(self) -> None:
        self.kill()
        for hand in self.hands:
            hand.close()


class Hand:
    """A thread of a process; it runs a slice at a time."""

    def __init__(self, process: Process) -> None:
        self.process = process
        self.busy = False
        self._inbox: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._outbox: queue.SimpleQueue[tuple[str, Any]] = queue.SimpleQueue()
        self._dead = False
        self._thread = threading.Thread(target=self._serve, name="tests-hand", daemon=True)
        self._thread.start()

    def run(self, job: Job) -> str:
        """Begin a slice; `step` when it waits for orders, else how it ended."""
        self.busy = True
        self._inbox.put(job)
        return self._heard()

    def order(self, order: Order) -> str:
        """Let the step do this: `did`, or how the slice ended."""
        assert self.busy
        self._inbox.put(order)
        return self._heard()

    def end(self, how: str) -> str:
        """Let the step return or raise this; how the slice ended."""

        def end(ctx: SliceContext) -> None:
            raise ENDS[how]()

        return self.order(end)

    def die(self) -> None:
        """Nothing more of the slice runs."""
        if self.busy:
            assert self.order(self._die) == "killed"

    def close(self) -> None:
        self._inbox.put(None)
        self._thread.join(10)

    # --- orders

    def fence(self, work: Order) -> Order:
        """A fenced batch with the checkpoint in it."""

        def order(ctx: SliceContext) -> None:
            with ctx.fenced():
                work(ctx)

        return order

    def open_fence(self, ctx: SliceContext) -> None:
        """Stay inside the fence until the next order, which is its work."""
        with ctx.fenced():
            self._outbox.put(("did", None))
            self._inbox.get()(ctx)

    def _die(self, ctx: SliceContext) -> None:
        self._dead = True
        raise Killed

    # --- the thread

    def obey(self, ctx: SliceContext) -> Any:
        self._outbox.put(("step", None))
        while True:
            try:
                self._inbox.get()(ctx)
            except Undo:
                pass
            except Ending as ending:
                return ending.answer
            self._outbox.put(("did", None))

    def _heard(self) -> str:
        word, value = self._outbox.get(timeout=PATIENCE)
        if word in ("step", "did"):
            return word
        self.busy = False
        if word == "broke":
            raise value
        return value if word == "ended" else word

    def _serve(self) -> None:
        _hand.current = self
        try:
            with connection.execute_wrapper(self._unless_dead):
                while (job := self._inbox.get()) is not None:
                    self._outbox.put(self._slice(job))
        finally:
            connections.close_all()

    def _slice(self, job: Job) -> tuple[str, Any]:
        in_transaction = False
        process = self.process
        try:
            result: SliceResult = run_slice(
                job, owner=process.owner, keeper=process.keeper, draining=process.draining
            )
            return ("ended", result.outcome.value)
        except Killed:
            in_transaction = connection.in_atomic_block or connection.connection is None
            return ("killed", None)
        except BaseException as error:
            return ("broke", error)
        finally:
            self._dead = False
            if in_transaction:
                database.discard(connection)

    def _unless_dead(self, execute: Any, sql: str, params: Any, many: bool, context: Any) -> Any:
        """No statement of a killed process goes out."""
        if self._dead:
            raise Killed
        return execute(sql, params, many, context)


def advance(ctx: SliceContext) -> None:
    """One batch: an effect in the project's row and the checkpoint that says so."""
    at = (ctx.checkpoint or 0) + 1
    ctx.save_checkpoint(at)
    if ctx.job.subject_id is not None:
        shipment = Shipment.objects.get(pk=ctx.job.subject_id)
        shipment.note, shipment.status = str(int(shipment.note) + 1), "moving"
        shipment.save()


@contextlib.contextmanager
def processes() -> Iterator[list[Process]]:
    """Two worker processes, one that runs two slices at a time and one that runs one."""
    made = [Process("two-hands", 2), Process("one-hand", 1)]
    try:
        yield made
    finally:
        for process in made:
            process.close()


class Executor:
    """What a manager runs: it waits for orders, too."""

    def __init__(self) -> None:
        self.stop: threading.Event | None = None
        self._orders: queue.SimpleQueue[str | int] = queue.SimpleQueue()
        self._told: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._dead = False

    def __call__(self, ctx: ExecutorContext) -> Any:
        self.stop = ctx.stop
        self._told.put("works")
        while True:
            order = self._orders.get()
            if order == "return":
                return None
            if order == "raise":
                raise RuntimeError("no route")
            if order == "abort":
                raise Aborted
            if order == "die":
                self._dead = True
                raise Killed
            try:
                ctx.checkpoint(str(order))
                self._told.put("kept")
            except LeaseLostError:
                self._told.put("refused")

    def heard(self) -> str:
        """`works` when it waits for orders, `over` when its outcome is recorded or could not be."""
        return self._told.get(timeout=PATIENCE)

    def order(self, order: str | int) -> str:
        """A number is a checkpoint; else how it ends."""
        self._orders.put(order)
        return self.heard()

    def tell_over(self) -> None:
        self._told.put("over")

    def unless_dead(self, execute: Any, sql: str, params: Any, many: bool, context: Any) -> Any:
        if self._dead:
            raise Killed
        return execute(sql, params, many, context)


class Manager(JobManager):
    """Beats when it is told to, and says when an executor is over."""

    def beat(self, job_id: Any) -> None:
        self._beat(self._runs[job_id])

    def _start_beats(self) -> None:
        pass

    def _execute(self, run: Any, executor: Any) -> None:
        connection.execute_wrappers.append(executor.unless_dead)
        try:
            super()._execute(run, executor)
        finally:
            executor.tell_over()
