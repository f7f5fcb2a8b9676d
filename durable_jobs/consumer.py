"""Runs the deliveries that a broker hands over: claims the job that each one names, runs a slice, and announces
what follows.

A delivery is a hint. What it may do the row decides: an old one, a duplicate, one for work that runs already or
has ended is refused, and leaves the row as it was.
"""

from __future__ import annotations

import contextvars
import logging
import math
import threading
import time
from collections.abc import Sequence
from contextlib import nullcontext, suppress
from typing import Final

from django.db.utils import Error as DatabaseError

from durable_jobs import connection as own_connection
from durable_jobs import kinds, runner, store, transports
from durable_jobs.exceptions import UnknownKind
from durable_jobs.keeper import Hold, Keeper
from durable_jobs.kinds import Kind
from durable_jobs.logs import tell
from durable_jobs.models import Job, Scope
from durable_jobs.outage import Outage
from durable_jobs.runner import SliceResult
from durable_jobs.store import Lease
from durable_jobs.transports import BrokerTransport, Delivery
from durable_jobs.upkeep import Upkeep
from durable_jobs.worker import new_owner

logger = logging.getLogger("durable_jobs.consumer")

BUSY_SECONDS: Final = 1.0
"""How long a delivery asks again for a row that somebody has locked."""
BUSY_PAUSE: Final = 0.05
SOON_SECONDS: Final = 1.0
"""A delivery that comes so much too early waits; the clocks of two hosts are never the same."""
SUSPECT_PAUSE: Final = 2.0
PATIENCE_SECONDS: Final = 30.0
"""How long a delivery is kept while the database does not answer."""
SETTLED_SECONDS: Final = 0.5
"""What was announced so shortly ago is on its way."""


class Consumer:
    """Handles the deliveries of one process, in as many threads as the transport has.

    `queues` and `concurrency` are shown on the screens. `start` begins what stays: the lease keeper, and the
    reconciler's passes, so that a fleet of consumers repairs itself. Without `start` it runs deliveries in the
    caller's thread and on the caller's connection, with nobody to renew leases: for eager modes and tests.
    """

    def __init__(
        self, transport: BrokerTransport, *, queues: Sequence[str] = (), concurrency: int = 1
    ) -> None:
        self.transport = transport
        self.queues, self.concurrency = queues, concurrency
        self.owner = new_owner()
        self.draining = threading.Event()
        self._keeper: Keeper | None = None
        self._upkeep: Upkeep | None = None
        self._suspect = threading.Lock()

    # --- beginning and end

    def start(self) -> None:
        """Begin to keep leases and to repair. Nothing is connected by the caller's thread."""
        self._keeper = Keeper(self.owner)
        self._keeper.start()
        self._upkeep = Upkeep(
            self.owner,
            queues=self.queues,
            kinds=kinds.names,
            concurrency=self.concurrency,
            published=self.transport.publish,
            of_a_fleet=True,
        )
        self._upkeep.start()
        tell(
            logger, logging.INFO, "consumer_started", owner=self.owner, transport=self.transport.name,
            queues=",".join(self.queues) or "all", concurrency=self.concurrency,
        )  # fmt: skip

    def drain(self) -> None:
        """Ask the slices to yield, and send back every delivery that arrives from now on."""
        self.draining.set()
        if self._keeper is not None:
            self._keeper.ask_to_stop()

    def close(self, timeout: float = 5.0) -> None:
        """Let go of everything, after the last delivery was handled; within about `timeout` seconds."""
        self.drain()
        deadline = time.monotonic() + timeout
        if self._upkeep is not None:
            self._upkeep.ask_to_stop()
            self._upkeep.join(timeout)
        if self._keeper is not None:
            self._keeper.stop(max(0.0, deadline - time.monotonic()))
            tell(logger, logging.INFO, "consumer_stopped", owner=self.owner)

    # --- a delivery

    def handle(self, delivery: Delivery) -> None:
        """Run one slice of the job that the delivery names, or leave it alone.

        Raises only what a second delivery may cure: a database that has not answered for 30 s.
        """
        if self.draining.is_set():
            self._send_again(delivery, 0.0)
            return
        if self._keeper is None:
            self._handle(delivery)
            return
        try:
            own_connection.own(self.transport.name)
            self._handle(delivery)
        finally:
            with suppress(Exception):
                own_connection.clean()

    def _handle(self, delivery: Delivery) -> None:
        claimed = self._claim(delivery)
        if claimed is None:
            return
        job, hold = claimed
        suspect = job.redrives_since_commit > 0
        if suspect and not self._suspect.acquire(blocking=False):
            # Perhaps it kills processes: it must not take another such job along.
            self._give_back(hold)
            self._send_again(delivery, SUSPECT_PAUSE)
            return
        try:
            result = self._run(job, hold)
        finally:
            if suspect:
                self._suspect.release()
        self._announce_what_follows(job, result)

    def _claim(self, delivery: Delivery) -> tuple[Job, Hold] | None:
        """The claimed job, its lease kept; None when the delivery is refused, or was sent again for later."""
        outage, since = Outage("deliveries"), time.monotonic()
        deadline = since + BUSY_SECONDS
        while True:
            try:
                answer = self._ask(delivery)
                outage.over()
            except UnknownKind as error:
                # A worker of another release may know it; the reconciler announces the job again.
                tell(logger, logging.WARNING, "unknown_kind", str(error), job_id=delivery.job_id)
                return None
            except DatabaseError as error:
                if self._keeper is None or time.monotonic() - since > PATIENCE_SECONDS:
                    raise
                self.draining.wait(outage.seen(error))
                if self.draining.is_set():
                    raise
                deadline = time.monotonic() + BUSY_SECONDS
                continue
            if isinstance(answer, tuple):
                return answer
            wait = self._wait_after(answer, delivery, deadline)
            if wait is None:
                return None
            self.draining.wait(wait)

    def _ask(self, delivery: Delivery) -> tuple[Job, Hold] | store.Answer | None:
        names = (delivery.job_id, delivery.seq, delivery.redrives)
        with self._keeper.claiming() if self._keeper is not None else nullcontext():
            answer = runner.claim(*names, owner=self.owner, early=False)
            if not isinstance(answer, Job):
                return answer
            kind = kinds.get(answer.kind)
            hold = Hold(Lease(answer.id, self.owner, answer.lease_epoch, kind.lease_seconds))
            if self._keeper is not None:
                self._keeper.hold(hold)
            return answer, hold

    def _wait_after(self, answer: store.Answer | None, delivery: Delivery, deadline: float) -> float | None:
        """Seconds until the next question; None: no question any more."""
        if answer is None:
            tell(logger, logging.INFO, "delivery_refused", delivery=delivery.id)
            return None
        tell(logger, logging.DEBUG, "delivery_waits", delivery=delivery.id, answer=answer.value)
        if answer is store.BUSY:
            if time.monotonic() < deadline:
                return BUSY_PAUSE
            self._send_again(delivery, 1.0)
        elif answer is store.EARLY:
            row = store.get(delivery.job_id)
            ahead = math.inf
            if row is not None and row.next_run_at is not None:
                ahead = max(0.0, (row.next_run_at - store.now()).total_seconds())
            if ahead <= SOON_SECONDS and self._keeper is not None:
                return ahead + 0.002
            if ahead <= self.transport.reach:
                self._send_again(delivery, ahead)
        # FULL: the end of one that runs announces the next.
        return None

    def _run(self, job: Job, hold: Hold) -> SliceResult | None:
        keeper = self._keeper
        try:
            # A context of its own: what a step sets (language, time zone, variables) ends with it.
            result = contextvars.Context().run(
                runner.run_slice, job, owner=self.owner, keeper=keeper, draining=self.draining
            )
        except Exception as error:
            if keeper is None:
                raise
            # Renewed no more and yet known here: the reconciler counts it, so that it has an end.
            hold.observe(lost=True)
            keeper.hold(hold)
            tell(logger, logging.ERROR, "slice_broke", error=error, job_id=job.id, epoch=job.lease_epoch)
            return None
        if keeper is not None:
            keeper.let_go(hold)
        return result

    def _announce_what_follows(self, job: Job, result: SliceResult | None) -> None:
        if result is None:
            return
        if result.job is not None and result.job.next_run_at is not None:
            self.transport.publish(result.job)
        kind = kinds.find(job.kind)
        if kind is None or kind.max_running is None:
            return
        try:
            self._announce_next(kind, job.scope)
        except DatabaseError as error:
            tell(logger, logging.WARNING, "not_announced", str(error), job_id=job.id)

    def _announce_next(self, kind: Kind, scope: Scope) -> None:
        """A job of a limited kind has made room: the messages of those that wait may be gone."""
        for route in sorted(store.routes(), key=lambda route: -route.priority):
            if route.kind not in kind.all_names or route.due_in > 0:
                continue
            due = store.announce(route, reach=0.0, ttl=SETTLED_SECONDS, limit=1, scope=scope, counted=False)
            if due:
                self.transport.resend(Delivery.of(due[0]), due[0].queue_name)
                return

    def _give_back(self, hold: Hold) -> None:
        try:
            store.give_back(hold.lease)
        finally:
            if self._keeper is not None:
                self._keeper.let_go(hold)

    def _send_again(self, delivery: Delivery, after: float) -> None:
        """The same delivery as a new message, unless the row has moved on."""
        row = store.get(delivery.job_id)
        if row is not None and row.next_run_at is not None and Delivery.of(row) == delivery:
            self.transport.resend(delivery, row.queue_name, after)


def install() -> None:
    """Give the transport that has processes of its own something to run there; for `AppConfig.ready`."""
    transport = transports.current()
    if isinstance(transport, BrokerTransport):
        transport.host(Consumer)
