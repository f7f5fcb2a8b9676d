"""The ten signals, sent after commit; a receiver's error is logged and changes nothing.

Each is sent with `sender` the name of the job's kind and `job` the row as the transition left it.
"""

from __future__ import annotations

import logging

from django.dispatch import Signal

from durable_jobs.logs import log
from durable_jobs.models import Job

job_created = Signal()
job_started = Signal()
job_yielded = Signal()
job_completed = Signal()
job_failed = Signal()
job_parked = Signal()
job_cancelled = Signal()
job_redriven = Signal()
job_lease_lost = Signal()
job_mirror_stuck = Signal()


def send(signal: Signal, job: Job) -> None:
    """Tell the receivers; what one of them raises keeps nothing from the caller."""
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
