"""A broker inside one process, for tests: it delivers like a real one, and fails like one when it is told to."""

from __future__ import annotations

import heapq
import itertools
import logging
import random
import threading
import time
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Final
from uuid import UUID

from django.db import connections

from durable_jobs.logs import tell
from durable_jobs.models import Job
from durable_jobs.transports.base import BrokerTransport, Delivery, Handler, State, state_of_row

logger = logging.getLogger("durable_jobs.transport")

ATTEMPTS: Final = 3
"""How often a message whose handler raises is delivered."""
FIRST_PAUSE: Final = 0.05
MOST_KEPT: Final = 1000
KEPT_SECONDS: Final = {State.COMPLETED: 3_600.0, State.FAILED: 86_400.0}
LAST: Final = "NoFurtherAttempts"


@dataclass
class Faults:
    """What goes wrong with messages: chances from 0 to 1, delays in seconds.

    `lose`: it is never delivered. `duplicate`: it is delivered a second time, perhaps at the same time.
    `delay`: it comes up to so many seconds late. `reorder`: it is delivered before others that were due sooner.
    `down`: nothing can be sent, as with a broker that does not answer.
    """

    lose: float = 0.0
    duplicate: float = 0.0
    delay: float = 0.0
    reorder: float = 0.0
    down: bool = False
    seed: int | None = None
    _random: random.Random = field(init=False, repr=False)

    def __post_init__(self) -> None:
        for name in ("lose", "duplicate", "reorder"):
            chance = getattr(self, name)
            if not 0 <= chance <= 1:
                raise ValueError(f"Faults({name}={chance!r}): give a chance from 0 to 1.")
        self._random = random.Random(self.seed)

    def strikes(self, chance: float) -> bool:
        return chance > 0 and self._random.random() < chance

    def lateness(self) -> float:
        return self._random.uniform(0, self.delay) if self.delay > 0 else 0.0


@dataclass(order=True)
class _Message:
    due_at: float
    rank: float
    delivery: Delivery = field(compare=False)
    queue: str = field(compare=False)
    attempt: int = field(compare=False, default=1)


class MemoryTransport(BrokerTransport):
    """Messages in this process's memory, handed to `threads` threads. All of them are lost with the process.

    `faults` may be changed at any time. A delivery that is waiting already is not taken a second time.
    """

    name = "memory"
    only_with_debug = True

    def __init__(self, faults: Faults | None = None, *, threads: int = 4) -> None:
        self.faults = faults or Faults()
        self.threads = threads
        self._messages: list[_Message] = []
        self._count = itertools.count()
        self._changed = threading.Condition()
        self._active: list[Delivery] = []
        self._ended: OrderedDict[Delivery, tuple[State, float]] = OrderedDict()
        self._closing = False
        self._started: list[threading.Thread] = []

    # --- sending

    def send(self, delivery: Delivery, queue: str, after: float) -> None:
        """Queue the message, unless a fault takes it."""
        faults = self.faults
        if faults.down:
            raise ConnectionRefusedError("the broker does not answer")
        if faults.strikes(faults.lose):
            return
        with self._changed:
            copies = 2 if faults.strikes(faults.duplicate) else 1
            if copies == 1 and any(message.delivery == delivery for message in self._messages):
                return
            for _ in range(copies):
                self._push(delivery, queue, after + faults.lateness())

    def _push(self, delivery: Delivery, queue: str, after: float, attempt: int = 1) -> None:
        rank = float(next(self._count))
        if self.faults.strikes(self.faults.reorder):
            rank = -rank
        heapq.heappush(self._messages, _Message(time.monotonic() + after, rank, delivery, queue, attempt))
        self._changed.notify()

    def withdraw(self, job: Job) -> None:
        """Take the row's deliveries out of the queue with the commit; one that is handled now is left alone."""
        self._after_commit(partial(self._take_out, job.id))

    def _take_out(self, job_id: UUID) -> None:
        with self._changed:
            self._messages = [message for message in self._messages if message.delivery.job_id != job_id]
            heapq.heapify(self._messages)

    def flush(self) -> int:
        """Lose everything that waits; answers how many messages that were."""
        with self._changed:
            lost, self._messages = len(self._messages), []
        return lost

    # --- looking

    @property
    def waiting(self) -> int:
        """How many messages wait to be delivered now or soon."""
        with self._changed:
            return len(self._messages)

    def get_state(self, job: Job) -> State:
        """By the messages that it holds, and by those that have ended within the last hour (failed: day)."""
        delivery = Delivery.of(job)
        with self._changed:
            if delivery in self._active:
                return State.ACTIVE
            due = [message.due_at for message in self._messages if message.delivery == delivery]
            if due:
                return State.DELAYED if min(due) > time.monotonic() else State.WAITING
            state, until = self._ended.get(delivery, (State.UNKNOWN, 0.0))
        if state == State.COMPLETED and until > time.monotonic():
            # The message was handled; what came of the job the row knows.
            known = state_of_row(job)
            return known if known in (State.COMPLETED, State.FAILED) else State.UNKNOWN
        return state if until > time.monotonic() else State.UNKNOWN

    # --- delivering

    def bind(self, handler: Handler, *, queues: Sequence[str] = ()) -> None:
        """Start the threads; without `queues` they serve all."""
        with self._changed:
            self._closing = False
        wanted = frozenset(queues)
        for number in range(1, self.threads + 1):
            thread = threading.Thread(
                target=self._serve, args=(handler, wanted), name=f"durable-jobs-memory-{number}", daemon=True
            )
            self._started.append(thread)
            thread.start()

    def close(self, timeout: float = 30.0) -> None:
        """End the threads when they have handled what they have; a handler that hangs is left behind."""
        deadline = time.monotonic() + timeout
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        for thread in self._started:
            thread.join(max(0.0, deadline - time.monotonic()))
        self._started = []

    def _serve(self, handler: Handler, queues: frozenset[str]) -> None:
        try:
            while (message := self._next(queues)) is not None:
                self._hand_over(message, handler)
        finally:
            connections.close_all()

    def _next(self, queues: frozenset[str]) -> _Message | None:
        with self._changed:
            while not self._closing:
                now = time.monotonic()
                ours = [message for message in self._messages if not queues or message.queue in queues]
                due = [message for message in ours if message.due_at <= now]
                if due:
                    # Those that a fault has put in front have a negative rank.
                    first = min(due, key=lambda message: (message.rank >= 0, message))
                    self._messages.remove(first)
                    heapq.heapify(self._messages)
                    self._active.append(first.delivery)
                    return first
                self._changed.wait(min((message.due_at for message in ours), default=now + 60) - now)
        return None

    def _hand_over(self, message: _Message, handler: Handler) -> None:
        state = State.COMPLETED
        try:
            handler(message.delivery)
        except BaseException as error:
            state = State.FAILED
            last = message.attempt >= ATTEMPTS or any(base.__name__ == LAST for base in type(error).__mro__)
            tell(
                logger, logging.WARNING, "handler_raised", str(error), job_id=message.delivery.job_id,
                attempt=message.attempt, last=last,
            )  # fmt: skip
            if not last:
                with self._changed:
                    pause = FIRST_PAUSE * 2 ** (message.attempt - 1)
                    self._push(message.delivery, message.queue, pause, message.attempt + 1)
        finally:
            with self._changed:
                self._active.remove(message.delivery)
                self._ended[message.delivery] = (state, time.monotonic() + KEPT_SECONDS[state])
                while len(self._ended) > MOST_KEPT:
                    self._ended.popitem(last=False)
