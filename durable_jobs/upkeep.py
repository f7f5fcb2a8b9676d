"""What a process that runs jobs does beside them: it shows itself on the screens, and repairs what others have left."""

from __future__ import annotations

import math
import os
import random
import socket
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Final

from django.db import connections

from durable_jobs import connection as own_connection
from durable_jobs import store
from durable_jobs.conf import config
from durable_jobs.models import Job
from durable_jobs.outage import Outage
from durable_jobs.reconciler import Reconciler

PRESENCE_SECONDS: Final = 10.0


class Upkeep:
    """A beat for the screens every ten seconds and the reconciler's passes, in a thread of its own.

    The process is shown with `queues` (none: all), `kinds` and `concurrency`, as long as `is_moving` says so.
    `published` is told of each job that a pass has made due. `of_a_fleet`: a broker has many such processes, and
    this may be the only thread of one that is connected, so it is so for its rounds alone, and signs off itself.
    """

    def __init__(
        self,
        owner: str,
        *,
        queues: Iterable[str],
        kinds: Callable[[], Iterable[str]],
        concurrency: int,
        published: Callable[[Job], None],
        is_moving: Callable[[], bool] = lambda: True,
        of_a_fleet: bool = False,
    ) -> None:
        self.owner = owner
        self._queues, self._kinds, self._concurrency = sorted(queues), kinds, concurrency
        self._is_moving = is_moving
        self._of_a_fleet = of_a_fleet
        self._reconciler = Reconciler(owner, published=published, register=self.register)
        self._outage = Outage("upkeep")
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="durable-jobs-upkeep", daemon=True)
        self._beat_at = 0.0

    def register(self) -> None:
        """Put the process on the screens, now and by the caller's connection."""
        store.worker_started(
            self.owner,
            host=socket.gethostname(),
            pid=os.getpid(),
            queues=self._queues,
            kinds=sorted(self._kinds()),
            concurrency=self._concurrency,
        )
        self._beat_at = time.monotonic() + PRESENCE_SECONDS

    def start(self) -> None:
        """Start the thread; a process that is not registered yet is so with its first beat."""
        self._thread.start()

    def ask_to_stop(self) -> None:
        """No more rounds."""
        self._stopping.set()

    def join(self, timeout: float) -> None:
        """Wait for the end of the thread, if it was started."""
        if self._thread.is_alive():
            self._thread.join(max(0.0, timeout))

    def _run(self) -> None:
        tick_at = next_tick(first=True)
        try:
            while not self._stopping.wait(max(0.0, min(self._beat_at, tick_at) - time.monotonic())):
                own_connection.own("upkeep")
                try:
                    now = time.monotonic()
                    if now >= self._beat_at:
                        self._beat_at = now + PRESENCE_SECONDS
                        self._beat()
                    if now >= tick_at:
                        tick_at = next_tick()
                        self._reconciler.tick()
                    self._outage.over()
                except Exception as error:
                    self._stopping.wait(self._outage.seen(error))
                if self._of_a_fleet:
                    own_connection.close()
            if self._of_a_fleet:
                with suppress(Exception):
                    store.worker_stopped(self.owner)
        finally:
            connections.close_all()

    def _beat(self) -> None:
        if self._is_moving() and not store.worker_beat(self.owner):
            self.register()


def next_tick(*, first: bool = False) -> float:
    """When the next pass begins (`time.monotonic()`), jittered: never, if TICK says so."""
    if config.TICK <= 0:
        return math.inf
    return time.monotonic() + config.TICK * random.uniform(0.2 if first else 0.8, 1.0)
