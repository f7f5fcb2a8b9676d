"""The ten signals, sent after commit; a receiver's error is logged and changes nothing.

Each is sent with `sender` the name of the job's kind and `job` the row as the transition left it. Listen to one
kind with `connect(receiver, sender="catalog.reindex")`, or with the kind's class as the sender.
"""

from __future__ import annotations

import logging
from typing import Any

from django.dispatch import Signal

from durable_jobs.logs import log
from durable_jobs.models import Job

_names: dict[str, str] = {}


def _one(sender: Any) -> Any:
    """Of equal names always the same object; a kind's class stands for its name."""
    name = sender if isinstance(sender, str) else getattr(sender, "name", None)
    return _names.setdefault(name, name) if isinstance(name, str) else sender


class JobSignal(Signal):
    """A signal whose senders are names: Django compares senders by identity, which equal texts do not share."""

    def connect(self, receiver: Any, sender: Any = None, weak: bool = True, dispatch_uid: Any = None) -> None:
        super().connect(receiver, _one(sender), weak, dispatch_uid)

    def disconnect(self, receiver: Any = None, sender: Any = None, dispatch_uid: Any = None) -> bool:
        return bool(super().disconnect(receiver, _one(sender), dispatch_uid))

    def has_listeners(self, sender: Any = None) -> bool:
        return bool(super().has_listeners(_one(sender)))

    def send_robust(self, sender: Any, **named: Any) -> list[tuple[Any, Any]]:
        return super().send_robust(_one(sender), **named)


job_created = JobSignal()
job_started = JobSignal()
job_yielded = JobSignal()
job_completed = JobSignal()
job_failed = JobSignal()
job_parked = JobSignal()
job_cancelled = JobSignal()
job_redriven = JobSignal()
job_lease_lost = JobSignal()
job_mirror_stuck = JobSignal()


def send(signal: Signal, job: Job) -> None:
    """Tell the receivers; what one of them raises keeps nothing from the caller."""
    if not signal.receivers:
        return
    try:
        answers = signal.send_robust(sender=job.kind, job=job)
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        log("signal_receiver_failed", job, level=logging.ERROR, error=error)
        return
    for receiver, answer in answers:
        if isinstance(answer, Exception):
            log("signal_receiver_failed", job, level=logging.ERROR, receiver=receiver, error=answer)
