"""The import under kill -9: whenever its worker dies, nothing is lost and nothing is done twice."""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable
from typing import TypeVar

import pytest
from django.db.models import Count

from durable_jobs import service
from durable_jobs.models import LIVE, Job, JobEvent
from project.demo import airports
from project.demo.airports import FIELDS
from project.demo.jobs import start_import
from project.demo.models import Airport, ImportBatch, ImportedRow, ImportRun
from tests.processes import Process, Processes

KILLS = 20
ROWS = 6_000
"""More than are imported between twenty kills, so that there is always something left to kill."""
SEED = "KILL_IMPORT_SEED"

SETTINGS = {"GRACE": 0.3, "TICK": 0.1, "NOTIFY_DEBOUNCE": 0.01}
ENVIRONMENT = {"DEMO_LEASE_SECONDS": "0.6", "DEMO_BATCH_SIZE": "20"}
PAUSE = 0.02

Found = TypeVar("Found")


@pytest.mark.timeout(240)
def test_an_import_killed_at_twenty_random_moments_applies_each_row_once(processes: Processes) -> None:
    """Run with KILL_IMPORT_SEED=… to have the moments of an earlier run again."""
    seed = int(os.environ.get(SEED, random.SystemRandom().randrange(2**32)))
    print(f"{SEED}={seed}")
    run = ImportRun.objects.create(source=ImportRun.Source.AIRPORTS)
    job = start_import(run, limit=ROWS, pause=PAUSE)

    fleet = Fleet(processes, job)
    for early, moment in moments(random.Random(seed)):
        fleet.kill_the_owner(early, moment)
    job = fleet.finish()

    run.refresh_from_db()
    told = f"{SEED}={seed}"
    assert (job.status, job.processed_count, job.total_count) == ("completed", ROWS, ROWS), told
    assert (run.status, run.rows_done, run.rows_skipped) == (ImportRun.Status.DONE, ROWS, 0), told
    assert stored() == expected(), told
    assert applied_other_than_once() == [], told
    assert ImportedRow.objects.count() == ROWS, told
    assert batches_repeated() == [], told
    orphanings = JobEvent.objects.filter(job=job.pk, event="orphaned").count()
    assert job.redrives == orphanings >= KILLS, told
    assert (job.consecutive_failures, job.lease_owner, job.next_run_at) == (0, None, None), told


def moments(chance: random.Random) -> list[tuple[bool, float]]:
    """When to kill: right after a claim, perhaps before any commit, or some time after a lease's first commit.

    Right after a claim only twice: a resumption that dies without a commit looks like poison, and the next one
    waits for 15 s.
    """
    early = [number in (0, KILLS // 2) for number in range(KILLS)]
    return [(soon, chance.uniform(0, 0.1) if soon else chance.uniform(0, 0.35)) for soon in early]


class Fleet:
    """Two workers: the one that holds the job is killed, the other takes over, and a new one stands by."""

    def __init__(self, processes: Processes, job: Job) -> None:
        self._processes, self._job = processes, job
        self._workers: list[Process] = []
        self._dead_epoch = 0
        self._join()
        self._join()

    def kill_the_owner(self, early: bool, moment: float) -> None:
        """Wait until a lease newer than the last victim's is held (or has committed); then, some time later, kill."""
        epoch = self._await(self._held_epoch)
        if not early:
            self._await(lambda: self._has_committed(epoch))
        time.sleep(moment)
        owner = self._await(self._owner)
        owner.kill()
        self._workers.remove(owner)
        self._dead_epoch = self._now().lease_epoch
        self._join()

    def finish(self) -> Job:
        """Let the workers finish, and drain them."""
        job = self._await(lambda: self._now() if self._now().status not in LIVE else None, 60)
        for worker in self._workers:
            worker.terminate()
        for worker in self._workers:
            assert worker.wait() == 0, worker.output
        return job

    def _join(self) -> None:
        self._workers.append(self._processes.manage("runworker", settings=SETTINGS, environment=ENVIRONMENT))

    def _now(self) -> Job:
        job = service.get(self._job.pk)
        assert job is not None
        return job

    def _held_epoch(self) -> int | None:
        job = self._now()
        assert job.status in LIVE, (
            f"It ended before its time: {job.status} {job.error_code} {job.error_message}"
        )
        return job.lease_epoch if job.lease_owner and job.lease_epoch > self._dead_epoch else None

    def _has_committed(self, epoch: int) -> bool:
        return ImportBatch.objects.filter(lease_epoch__gte=epoch).exists()

    def _owner(self) -> Process | None:
        owner = self._now().lease_owner or ""
        return next((worker for worker in self._workers if f":{worker.pid}:" in owner), None)

    def _await(self, find: Callable[[], Found | None], timeout: float = 40) -> Found:
        deadline = time.monotonic() + timeout
        while not (found := find()):
            for worker in self._workers:
                assert worker.running, f"A worker ended by itself:\n{worker.output}"
            if time.monotonic() > deadline:
                logs = "\n".join(worker.output[-3000:] for worker in self._workers)
                pytest.fail(f"Nothing has gone on for {timeout:g} s; the job: {vars(self._now())}\n{logs}")
            time.sleep(0.01)
        return found


def stored() -> list[dict[str, object]]:
    return list(Airport.objects.order_by("icao").values(*FIELDS.values()))


def expected() -> list[dict[str, object]]:
    return [{FIELDS[name]: value for name, value in row.items()} for row in airports.world()[:ROWS]]


def applied_other_than_once() -> list[str]:
    times = ImportedRow.objects.values("icao").annotate(times=Count("pk"))
    return list(times.exclude(times=1).values_list("icao", flat=True))


def batches_repeated() -> list[str]:
    times = ImportBatch.objects.values("first").annotate(times=Count("pk"))
    return list(times.exclude(times=1).values_list("first", flat=True))
