"""What a transport must do, and what it need not: leases, fences and limits live above it, in the rows."""

from __future__ import annotations

import abc
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from uuid import UUID

from durable_jobs.models import Job

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
    """`publish` joins the caller's open transaction; otherwise call it after the commit."""
    loses_messages: bool
    """A published message can vanish, so the reconciler looks after waiting rows."""

    @abc.abstractmethod
    def publish(self, job: Job) -> None:
        """Announce the row's current delivery, to be run at `next_run_at`. Never raises: it is a hint."""

    def withdraw(self, job: Job) -> None:  # noqa: B027
        """Take the row's current delivery back if it has not begun. Best effort, never raises."""

    def hint_cancel(self, job: Job) -> None:  # noqa: B027
        """A cancel was requested on a running job: let its owner look now. Best effort, never raises."""

    def wake(self) -> None:  # noqa: B027
        """Anything may be due now, such as what a pause has held: let every worker look. Never raises."""

    @abc.abstractmethod
    def get_state(self, job: Job) -> State:
        """What became of the row's current delivery, as far as the transport knows."""

    def bind(self, handler: Handler, *, queues: Sequence[str]) -> None:  # noqa: B027
        """Hand the deliveries of these queues to `handler` until `close`.

        A transport whose messages are the rows has none to hand over: there a `Worker` claims rows.
        """

    def close(self, timeout: float = 30.0) -> None:  # noqa: B027
        """Deliver no more and let go of connections; returns within `timeout` seconds, whatever happens."""
