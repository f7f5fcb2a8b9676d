"""Deliveries as messages of Celery: one task, whose only argument is a delivery's id.

The message is acknowledged late and may come twice, late or never; the row decides what it does. Celery's worker
processes keep leases and repair jobs by themselves, and yield their slices on a warm shutdown.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final

from celery import current_app, shared_task, signals

from durable_jobs import kinds
from durable_jobs.logs import tell
from durable_jobs.models import Job
from durable_jobs.transports.base import BrokerTransport, Delivery, Handler, State, state_of_row

logger = logging.getLogger("durable_jobs.transport")

TASK: Final = "durable_jobs.run"
RETRIES: Final = 2
FIRST_RETRY: Final = 5.0
MOST_IDLE: Final = 10
"""Connections to the broker that are kept for the next message."""
VISIBILITY_SHARE: Final = 4
"""A message must not wait in a worker for more than this part of the broker's visibility timeout."""
AT_ONCE_OR_NEVER: Final = {"max_retries": 1, "interval_start": 0, "interval_step": 0, "interval_max": 0}
"""A request that starts a job does not wait for a broker to come back: the reconciler does."""
REDIS_TIMEOUTS: Final = {"socket_connect_timeout": 2.0, "socket_timeout": 5.0}
SLOW_SECONDS: Final = 0.5
REST_SECONDS: Final = 5.0
"""After a message that failed slowly, the next ones fail at once for so long."""


class CeleryTransport(BrokerTransport):
    """Publishes by the project's own Celery app; a job's queue is the Celery queue of that name.

    Celery cannot tell whether it still holds a message, so a job that waits is `UNKNOWN` to it.
    """

    name = "celery"

    def __init__(self) -> None:
        self._producers = _Producers()
        self._make: Callable[..., Any] | None = None
        self._hosted: Any = None
        self._hosted_pid = 0
        self._bound: Handler | None = None
        self._eager = _Eager()
        self._rest_until = 0.0

    @property
    def reach(self) -> float:
        visibility = _visibility_timeout()
        return super().reach if visibility is None else min(super().reach, visibility / VISIBILITY_SHARE)

    def problems(self) -> list[tuple[str, str, str]]:
        """No app of the project's, and a visibility timeout that is over before slices are (B139)."""
        if _broker_url() is None:
            return [
                (
                    "no_broker",
                    "The current Celery app has no broker_url: messages for jobs would go to a RabbitMQ on this host.",
                    "Import the project's Celery app in the package of its settings, as Celery's page on Django says.",
                )
            ]
        visibility = _visibility_timeout()
        longest = max((kind.slice_seconds for kind in kinds.all_kinds()), default=0.0)
        if visibility is None or visibility >= 2 * longest:
            return []
        return [
            (
                "visibility",
                f"The broker's visibility_timeout is {visibility:g} s and the longest slice of a kind {longest:g} s: "
                "messages come again while their slices run. They are refused, and cost a look each.",
                f'Set broker_transport_options = {{"visibility_timeout": {2 * longest:g}}} or more.',
            )
        ]

    def send(self, delivery: Delivery, queue: str, after: float) -> None:
        """Send the message; with `task_always_eager` run the delivery here, one after the other."""
        if current_app.conf.task_always_eager:
            self._eager.run(delivery, self._handle_here)
            return
        began = time.monotonic()
        if began < self._rest_until:
            raise TimeoutError("the broker has not answered lately")
        try:
            with self._producers.take() as producer:
                run.apply_async(
                    (delivery.id,),
                    task_id=delivery.id,
                    queue=queue,
                    countdown=after or None,
                    producer=producer,
                    retry=False,
                )
        except Exception:
            if time.monotonic() - began > SLOW_SECONDS:
                self._rest_until = time.monotonic() + REST_SECONDS
            raise

    @property
    def address(self) -> str:
        try:
            return str(current_app.connection_for_write().as_uri())
        except Exception:
            return ""  # a broker whose library is missing: that is the error that is told already

    def get_state(self, job: Job) -> State:
        """What the row tells; the broker cannot be asked for a message."""
        state = state_of_row(job)
        return State.UNKNOWN if state == State.WAITING else state

    # --- the worker's side

    def host(self, make: Callable[..., Any]) -> None:
        """Each of Celery's processes that runs tasks makes a handler of its own when it begins."""
        self._make = make

    def bind(self, handler: Handler, *, queues: Sequence[str] = ()) -> None:
        """Hand the messages to `handler`; which queues a worker consumes its own `-Q` says."""
        self._bound = handler

    def close(self, timeout: float = 30.0) -> None:
        """End what was begun in this process."""
        hosted, self._hosted, self._bound = self._hosted, None, None
        if hosted is not None and self._hosted_pid == os.getpid():
            hosted.close(timeout)
        self._producers.forget()

    def begin(self, queues: Sequence[str], concurrency: int) -> None:
        """This process is about to run tasks."""
        if self._make is not None and (self._hosted is None or self._hosted_pid != os.getpid()):
            self._hosted = self._make(self, queues=queues, concurrency=concurrency)
            self._hosted_pid = os.getpid()
            self._hosted.start()

    def drain(self) -> None:
        """Ask the slices of this process to yield."""
        if self._hosted is not None and self._hosted_pid == os.getpid():
            self._hosted.drain()

    def handle(self, delivery: Delivery) -> None:
        """Run what a message names."""
        if self._bound is not None:
            self._bound(delivery)
            return
        if self._hosted is None or self._hosted_pid != os.getpid():
            # A pool that does not tell when its processes begin.
            self.begin((), 1)
        if self._hosted is not None:
            self._hosted.handle(delivery)

    def _handle_here(self, delivery: Delivery) -> None:
        if self._bound is not None:
            self._bound(delivery)
        elif self._make is not None:
            self._make(self).handle(delivery)


@shared_task(name=TASK, bind=True, acks_late=True, ignore_result=True, max_retries=RETRIES)
def run(self: Any, delivery_id: str) -> None:
    """Run one slice of the job that the message names."""
    delivery = Delivery.parse(delivery_id) if isinstance(delivery_id, str) else None
    if delivery is None:
        tell(logger, logging.ERROR, "delivery_unreadable", f"{delivery_id!r:.200} is no delivery of ours")
        return
    try:
        _transport().handle(delivery)
    except Exception as error:
        if type(error).__name__ == "NoFurtherAttempts":
            return
        # After the last one the message is gone, and the reconciler announces the job.
        raise self.retry(exc=error, countdown=FIRST_RETRY * 2**self.request.retries) from error


def _transport() -> CeleryTransport:
    from durable_jobs import transports

    transport = transports.current()
    if not isinstance(transport, CeleryTransport):
        raise RuntimeError(
            f"A Celery worker has a message for a job, and DURABLE_JOBS['TRANSPORT'] is {transport.name!r} here: "
            "give the workers the settings of the project."
        )
    return transport


def _broker_url() -> str | None:
    conf = current_app.conf
    url = conf.broker_write_url or conf.broker_url
    return None if url is None else str(url)


def _visibility_timeout() -> float | None:
    """In seconds; None where it is the broker's own."""
    given = current_app.conf.broker_transport_options.get("visibility_timeout")
    return float(given) if isinstance(given, int | float) and given > 0 else None


class _Producers:
    """Connections to the broker for publishing, a few kept, none of them used after a fork.

    Celery's own pool is emptied when one of its workers forks, but not when a web server does.
    """

    def __init__(self) -> None:
        self._idle: deque[Any] = deque()
        self._inherited: list[Any] = []
        os.register_at_fork(after_in_child=self._inherit)

    @contextmanager
    def take(self) -> Iterator[Any]:
        try:
            producer = self._idle.pop()
        except IndexError:
            producer = self._make()
        try:
            yield producer
        except BaseException:
            _close(producer)
            raise
        if len(self._idle) < MOST_IDLE:
            self._idle.append(producer)
        else:
            _close(producer)

    def forget(self) -> None:
        """Close the connections that nobody uses."""
        while self._idle:
            _close(self._idle.pop())

    def _make(self) -> Any:
        app = current_app._get_current_object()
        url = _broker_url() or ""
        timeouts = REDIS_TIMEOUTS if url.startswith(("redis", "rediss", "sentinel")) else {}
        options = {**timeouts, **AT_ONCE_OR_NEVER, **app.conf.broker_transport_options}
        return app.amqp.Producer(app.connection_for_write(transport_options=options), auto_declare=False)

    def _inherit(self) -> None:
        # Kept, because a client that is collected here would say goodbye on the parent's connection.
        self._inherited.extend(self._idle)
        self._idle = deque()


def _close(producer: Any) -> None:
    try:
        producer.connection.release()
    except Exception as error:
        tell(logger, logging.DEBUG, "close_failed", str(error))


class _Eager(threading.local):
    """Deliveries run here one after the other: what a slice announces comes after it, not inside it."""

    def __init__(self) -> None:
        self._waiting: deque[Delivery] | None = None

    def run(self, delivery: Delivery, handle: Handler) -> None:
        if self._waiting is not None:
            self._waiting.append(delivery)
            return
        self._waiting = deque([delivery])
        try:
            while self._waiting:
                handle(self._waiting.popleft())
        finally:
            self._waiting = None


# --- Celery's processes ---------------------------------------------------------------------------------


class _Main:
    """What Celery's main process knows and its children inherit: the worker, and a pipe that ends with its work."""

    def __init__(self) -> None:
        self.pid = 0
        self.worker: Any = None
        self.reader, self.writer = -1, -1

    def begin(self, worker: Any) -> None:
        self.pid, self.worker = os.getpid(), worker
        self.reader, self.writer = os.pipe()

    @property
    def queues(self) -> list[str]:
        return sorted(self.worker.app.amqp.queues.consume_from) if self.worker is not None else []

    def end(self) -> None:
        """Every child reads the end of the pipe: a signal of Celery's reaches the main process alone."""
        if self.pid == os.getpid() and self.writer >= 0:
            os.close(self.writer)
            self.writer = -1


_main = _Main()


def _ours() -> CeleryTransport | None:
    from durable_jobs import transports

    transport = transports.current()
    return transport if isinstance(transport, CeleryTransport) else None


@signals.worker_init.connect(weak=False)
def _worker_begins(sender: Any = None, **_: Any) -> None:
    _main.begin(sender)


@signals.worker_process_init.connect(weak=False)
def _process_begins(**_: Any) -> None:
    transport = _ours()
    if transport is None:
        return
    transport.begin(_main.queues, 1)
    if _main.pid and _main.pid != os.getpid() and _main.reader >= 0:
        if _main.writer >= 0:
            os.close(_main.writer)
            _main.writer = -1
        threading.Thread(
            target=_drain_with_the_main_process, args=(transport,), name="durable-jobs-drain", daemon=True
        ).start()


def _drain_with_the_main_process(transport: CeleryTransport) -> None:
    os.read(_main.reader, 1)
    transport.drain()


@signals.worker_ready.connect(weak=False)
def _worker_is_ready(sender: Any = None, **_: Any) -> None:
    transport, pool = _ours(), getattr(sender, "pool", None)
    if transport is not None and not type(pool).__module__.endswith(".prefork"):
        transport.begin(_main.queues, getattr(pool, "limit", None) or 1)


@signals.worker_shutting_down.connect(weak=False)
def _worker_shuts_down(**_: Any) -> None:
    _main.end()
    transport = _ours()
    if transport is not None:
        # Called from a signal handler: the thread that it interrupts may hold the lock that a drain needs.
        threading.Thread(target=transport.drain, name="durable-jobs-drain", daemon=True).start()


@signals.worker_process_shutdown.connect(weak=False)
@signals.worker_shutdown.connect(weak=False)
def _process_ends(**_: Any) -> None:
    _main.end()
    transport = _ours()
    if transport is not None:
        transport.close(5.0)
