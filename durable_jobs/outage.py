"""What each long-lived part of a process does while the database does not answer: wait, and say it once."""

from __future__ import annotations

import logging
import random
import time

from django.db import connections

from durable_jobs import database
from durable_jobs.logs import tell

logger = logging.getLogger("durable_jobs.outage")

REMIND_SECONDS = 60.0


class Outage:
    """The failures that one part (keeper, claims, …) meets: growing pauses, one line at each end.

    `first` and `longest` bound the pause in seconds. It is jittered, so that the parts of all processes do
    not come back in one instant.
    """

    def __init__(self, part: str, *, first: float = 0.1, longest: float = 2.0) -> None:
        self.part = part
        self.first, self.longest = first, longest
        self.since: float | None = None
        self._failures = 0
        self._told = 0.0

    def seen(self, error: BaseException) -> float:
        """Note a failure, drop this thread's connection, and answer how many seconds to wait."""
        now = time.monotonic()
        if self.since is None or now - self._told >= REMIND_SECONDS:
            self._told = now
            self._tell(error)
        if self.since is None:
            self.since = now
        self._failures += 1
        close_connection()
        delay = min(self.longest, self.first * 2.0 ** min(self._failures - 1, 20))
        return delay * random.uniform(0.5, 1.0)

    def over(self) -> None:
        """Note a success."""
        if self.since is None:
            return
        seconds = round(time.monotonic() - self.since, 1)
        tell(logger, logging.WARNING, "working_again", part=self.part, seconds=seconds)
        self.since, self._failures = None, 0

    def _tell(self, error: BaseException) -> None:
        if database.is_outage(error):
            problem = str(error).strip().partition("\n")[0]
            tell(logger, logging.WARNING, "database_unavailable", f"{problem} (trying again)", part=self.part)
        else:
            tell(logger, logging.ERROR, "failed", "trying again", part=self.part, error=error)


def close_connection() -> None:
    """Close this thread's connection to the jobs' database; the next statement makes a new one."""
    connection = connections[database.alias()]
    try:
        if not connection.in_atomic_block:
            connection.close()
    except Exception as error:
        tell(logger, logging.DEBUG, "close_failed", str(error))
        connection.connection = None
