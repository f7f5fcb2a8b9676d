"""Everybody at once: workers, reconcilers, and operators who act in bulk."""

from __future__ import annotations

import random
import threading
import time
from collections import Counter
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from django.db import connections, transaction

from durable_jobs import pruning, service
from durable_jobs.exceptions import DurableJobsError, HookFailed
from durable_jobs.models import LIVE, Job, JobEvent
from durable_jobs.pruning import Policy
from tests.models import Parcel, Shipment
from tests.operate.conftest import PROVE, SHORT, Start
from tests.operate.test_boundaries import AGREEING
from tests.postgres import wait_until
from tests.processes import Processes

pytestmark = pytest.mark.django_db(transaction=True)

SECONDS = 60 if PROVE else 8
MOVES = 3
MOST_WAITING = 150

RECONCILER = """
import logging, os, sys, time
from durable_jobs.reconciler import Reconciler
from durable_jobs.worker import new_owner
logging.basicConfig(level=logging.WARNING)
reconciler = Reconciler(new_owner())
while not os.path.exists(sys.argv[1]):
    reconciler.tick()
    time.sleep(0.2)
"""


answers: Counter[str] = Counter()
"""What became of the cancels and redrives of single jobs."""


class Actor(threading.Thread):
    """Does one thing again and again; refusals are counted, every other error is kept."""

    def __init__(self, act: Callable[[], None], rest: float, until: float) -> None:
        super().__init__(name=act.__name__)
        self.act, self.rest, self.until = act, rest, until
        self.done: Counter[str] = Counter()
        self.errors: list[BaseException] = []

    def run(self) -> None:
        try:
            while time.monotonic() < self.until:
                try:
                    self.act()
                    self.done["done"] += 1
                except BaseException as error:
                    self._note(error)
                time.sleep(random.uniform(0.5, 1.5) * self.rest)
        finally:
            connections.close_all()

    def _note(self, error: BaseException) -> None:
        if isinstance(error, DurableJobsError) and not isinstance(error, HookFailed):
            self.done[str(error.code)] += 1
        else:
            self.errors.append(error)


def some(count: int, among: int = 200, **which: Any) -> list[Any]:
    """The ids of a few of the latest jobs, in any order."""
    ids = list(Job.objects.filter(**which).order_by("-id").values_list("id", flat=True)[:among])
    return random.sample(ids, min(count, len(ids)))


def refused_or_done(act: Callable[..., Any], *arguments: Any, **named: Any) -> None:
    try:
        act(*arguments, **named)
        answers["done"] += 1
    except HookFailed:
        raise
    except DurableJobsError as refusal:
        answers[str(refusal.code)] += 1


def starting() -> None:
    if Job.objects.filter(status__in=LIVE).count() > MOST_WAITING:
        return
    with transaction.atomic():
        rows = [Shipment.objects.create() for _ in range(12)]
        started = service.start_many(
            {
                "kind": random.choice(["operate.ship", "operate.ship", "operate.sink"]),
                "input": MOVES,
                "subject": row,
            }
            for row in rows
        )
    for answer in started:
        assert isinstance(answer, service.Started), answer


def cancelling_in_one_transaction() -> None:
    """As a bulk action does it under ATOMIC_REQUESTS, in whatever order the rows come."""
    with transaction.atomic():
        for job_id in some(6, 10, status__in=LIVE):
            refused_or_done(service.cancel, job_id, actor="bulk")
            time.sleep(0.01)


def cancelling() -> None:
    for job_id in some(3, status__in=LIVE):
        refused_or_done(service.cancel, job_id, actor="click")


def redriving() -> None:
    for job_id in some(10, status="failed"):
        refused_or_done(service.redrive, job_id, actor="bulk", force=True)


def redriving_in_one_transaction() -> None:
    with transaction.atomic():
        for job_id in some(5, 10, status="failed"):
            refused_or_done(service.redrive, job_id, actor="bulk", force=True)
            time.sleep(0.01)


def pausing() -> None:
    which = random.choice([{"kind": "operate.ship"}, {"queue": "operate"}, {}])
    service.pause(**which, reason="to see", actor="operator")
    time.sleep(0.3)
    service.unpause(**which, actor="operator")


def pruning_old_ones() -> None:
    pruning.prune(Policy(ended_before=pruning.cutoff(timedelta(seconds=2))), None, batch=20, rest=0.01)


ACTS = (
    (starting, 0.1),
    (cancelling_in_one_transaction, 0.1),
    (cancelling_in_one_transaction, 0.1),
    (cancelling, 0.1),
    (redriving, 0.1),
    (redriving_in_one_transaction, 0.2),
    (pausing, 0.7),
    (pruning_old_ones, 0.5),
)


def test_workers_reconcilers_and_bulk_acts_at_once_leave_every_row_right(
    start_worker: Start, processes: Processes, tmp_path: Path, figure: Callable[..., None]
) -> None:
    answers.clear()
    end = tmp_path / "end"
    workers = [start_worker("--concurrency", "2", TICK=0) for _ in range(4)]
    reconcilers = [processes.python(RECONCILER, str(end), settings=SHORT) for _ in range(2)]
    for worker in workers:
        worker.wait_for_output("worker_started")
    until = time.monotonic() + SECONDS
    actors = [Actor(act, rest, until) for act, rest in ACTS]
    for actor in actors:
        actor.start()
    for actor in actors:
        actor.join(SECONDS + 60)
        assert not actor.is_alive(), f"{actor.name} hangs"
    assert [(actor.name, error) for actor in actors for error in actor.errors] == []
    for which in ({"kind": "operate.ship"}, {"queue": "operate"}, {}):
        service.unpause(**which)
    wait_until(lambda: not Job.objects.filter(status__in=LIVE).exists(), 90, "work is left over")

    end.touch()
    for process in workers:
        process.terminate()
    for process in [*workers, *reconcilers]:
        assert process.wait(20) == 0, process.output
        assert "deadlock" not in process.output.lower(), process.output
        for event in ("terminal_mirror_failed", "slice_broke", "IntegrityError", "reconcile_pass_failed"):
            assert event not in process.output, process.output

    jobs = {job.subject_id: job for job in Job.objects.all()}
    ended = Counter(job.status for job in jobs.values())
    for shipment in Shipment.objects.all():
        job = jobs.get(str(shipment.pk))
        if job is not None:
            assert shipment.status in AGREEING[job.status], job.id
        else:
            assert shipment.status in ("arrived", "stopped"), "pruned although it had not ended well"
    moved = dict(Parcel.objects.values_list("label", "done"))
    for job in jobs.values():
        if job.kind == "operate.ship" and job.status == "completed":
            assert moved[f"shipment {job.subject_id}"] == MOVES, job.id
    assert {job.error_code for job in jobs.values() if job.parked_at} == set()
    acts = sum((actor.done for actor in actors), Counter())
    history = Counter(JobEvent.objects.values_list("event", flat=True))
    figure(
        f"bulk acts beside 4 workers and 2 reconcilers: {acts['done']} acts, {Shipment.objects.count()} jobs,"
        f" {history['redriven']} redrives kept",
        SECONDS,
        f"cancels and redrives {dict(answers)}; whole acts refused {dict(acts - Counter(done=acts['done']))};"
        f" left {dict(ended)}",
    )
    assert acts["done"] > 20 and Shipment.objects.count() > 50
