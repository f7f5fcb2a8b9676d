"""What a transport must do, and what it need not: leases, fences and limits live above it, in the rows."""

from __future__ import annotations

import abc
import logging
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from typing import Any, Final
from uuid import UUID

from django.db import connections, transaction

from durable_jobs import database, store
from durable_jobs.conf import MANUAL_QUEUE, config
from durable_jobs.logs import tell
from durable_jobs.models import Job

logger = logging.getLogger("durable_jobs.transport")

_DELIVERY = re.compile(r"dw-([0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12})-([0-9]+)-([0-9]+)")


@dataclass(frozen=True)
class Delivery:
    """The identity that a message carries, and nothing else: it grants no scope and no input.

    Its id is `dw-<job>-<seq>-<redrives>`: no colon, which some brokers refuse.
    """

    job_id: UUID
    seq: int
    redrives: int

    @classmethod
    def of(cls, job: Job) -> Delivery:
        """The delivery under which the row can be claimed now."""
        return cls(job.id, job.continuation_seq, job.redrives)

    @classmethod
    def parse(cls, text: str) -> Delivery | None:
        """The delivery of this id; None when it is none of ours."""
        match = _DELIVERY.fullmatch(text)
        return cls(UUID(match[1]), int(match[2]), int(match[3])) if match else None

    @property
    def id(self) -> str:
        """As text, for a message; `parse` reads it."""
        return f"dw-{self.job_id}-{self.seq}-{self.redrives}"


class State(StrEnum):
    """What a transport knows of a delivery; `UNKNOWN` covers all that it does not hold."""

    WAITING = "waiting"
    DELAYED = "delayed"
    ACTIVE = "active"
    COMPLETED = "completed"
    FAILED = "failed"
    UNKNOWN = "unknown"


Handler = Callable[[Delivery], None]
"""Runs one delivery. It raises only what the transport should retry; a refused delivery just returns."""


class BaseTransport(abc.ABC):
    """Tells workers that a job is due. Safe with duplicates and losses: the row refuses what it does not owe.

    Callers branch on the two flags, never on a transport's name.
    """

    name: str
    transactional: bool
    """What `publish` sends is part of the caller's open transaction; otherwise it is sent after the commit."""
    loses_messages: bool
    """A published message can vanish, so the reconciler looks after waiting rows."""

    only_with_debug = False
    """It is for tests: refused as the project's transport where DEBUG is off."""

    @abc.abstractmethod
    def publish(self, job: Job) -> None:
        """Announce the row's current delivery, to be run at `next_run_at`: a rolled-back one is never announced.

        Never raises: it is a hint.
        """

    def withdraw(self, job: Job) -> None:  # noqa: B027
        """Take the row's current delivery back if it has not begun. Best effort, never raises."""

    def problems(self) -> list[tuple[str, str, str]]:
        """What the system checks should warn of: sort, problem, way out."""
        return []

    def hint_cancel(self, job: Job) -> None:  # noqa: B027
        """A cancel was requested on a running job: let its owner look now. Best effort, never raises."""

    def wake(self) -> None:  # noqa: B027
        """Anything may be due now, such as what a pause has held: let every worker look. Never raises."""

    def get_state(self, job: Job) -> State:
        """What became of the row's current delivery, as far as the transport knows."""
        return state_of_row(job)

    def bind(self, handler: Handler, *, queues: Sequence[str]) -> None:  # noqa: B027
        """Hand the deliveries of these queues to `handler` until `close`.

        What makes it raise is delivered again, a few times, unless the error's class is called
        `NoFurtherAttempts`. A transport whose messages are the rows has none to hand over: there a `Worker`
        claims rows.
        """

    def close(self, timeout: float = 30.0) -> None:  # noqa: B027
        """Deliver no more and let go of connections; returns within `timeout` seconds, whatever happens."""


LONGEST_REACH: Final = 60.0
SHORTEST_REACH: Final = 10.0
MOST_WOKEN: Final = 1000
"""Jobs announced at once when a pause ends; the reconciler announces the rest."""


class BrokerTransport(BaseTransport):
    """A transport whose messages are beside the rows: sent after the commit, and perhaps lost.

    A message is sent only for what is due within `reach` seconds. A time further ahead stays in the row, and
    the reconciler announces the job when it comes due: brokers keep messages with a far time badly.
    """

    transactional = False
    loses_messages = True

    @property
    def reach(self) -> float:
        """Seconds ahead of its time that a delivery may be sent."""
        # Longer than the reconciler's passes are apart, so that it announces everything in time.
        return min(LONGEST_REACH, max(SHORTEST_REACH, 1.25 * config.TICK))

    @property
    def address(self) -> str:
        """Where the broker is, without its password, for messages; empty where that says nothing."""
        return ""

    @abc.abstractmethod
    def send(self, delivery: Delivery, queue: str, after: float) -> str | None:
        """Give the broker the message, to be delivered after so many seconds. May raise.

        Returns the id that the broker gave the message, where that is not the delivery's own. It is kept as the
        row's `queue_job_id`, for `withdraw`.
        """

    def publish(self, job: Job) -> None:
        """Send the row's current delivery when the open transaction commits, at once without one."""
        ahead = 0.0
        if job.next_run_at is not None and job.updated_at is not None:
            # Both by the database's clock.
            ahead = max(0.0, (job.next_run_at - job.updated_at).total_seconds())
        if ahead <= self.reach:
            self._after_commit(partial(self.resend, Delivery.of(job), job.queue_name, ahead))

    def resend(self, delivery: Delivery, queue: str, after: float = 0.0) -> None:
        """Send now, whatever transaction is open. Never raises: what is lost the reconciler finds."""
        try:
            message = self.send(delivery, queue, after)
        except Exception as error:
            where = f"{self.address}; " if self.address else ""
            problem = f"{type(error).__name__}: {error} ({where}the reconciler announces the job)"
            tell(logger, logging.WARNING, "publish_failed", problem, job_id=delivery.job_id)
            return
        if message is not None:
            self._keep_id(delivery, message)

    def _keep_id(self, delivery: Delivery, message: str) -> None:
        try:
            store.set_delivery(delivery.job_id, delivery.seq, delivery.redrives, message)
        except Exception as error:
            tell(logger, logging.WARNING, "message_id_lost", str(error), job_id=delivery.job_id)

    def host(self, make: Callable[..., Any]) -> None:
        """Where the broker has processes of its own: each makes one of these, and hands it its deliveries.

        `make(transport, queues=…, concurrency=…)` gives an object with `start`, `handle`, `drain`, `close`.
        """

    def wake(self) -> None:
        """Announce what is due, when the open transaction commits: messages that met a pause are gone."""
        self._after_commit(self._announce_due)

    def _announce_due(self) -> None:
        left = MOST_WOKEN
        for route in sorted(store.routes(), key=lambda route: -route.priority):
            if route.queue == MANUAL_QUEUE or route.due_in > 0 or left < 1:
                continue
            due = store.announce(route, reach=0.0, ttl=0.0, limit=left, counted=False)
            left -= len(due)
            for job in due:
                self.resend(Delivery.of(job), job.queue_name)

    def _after_commit(self, act: Callable[[], None]) -> None:
        try:
            using = database.alias()
            if connections[using].in_atomic_block:
                transaction.on_commit(act, using=using, robust=True)
            else:
                act()
        except Exception as error:
            tell(logger, logging.WARNING, "publish_failed", str(error))


def state_of_row(job: Job) -> State:
    """What the row tells of the delivery that `job` was read with."""
    now = store.get(job.id)
    if now is None or (now.continuation_seq, now.redrives) != (job.continuation_seq, job.redrives):
        return State.UNKNOWN
    if now.next_run_at is not None:
        return State.DELAYED if now.next_run_at > store.now() else State.WAITING
    return {"running": State.ACTIVE, "completed": State.COMPLETED, "failed": State.FAILED}.get(
        now.status, State.UNKNOWN
    )
