"""What is repaired, how soon, and what is left alone: with real workers and no supervisor."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import UTC, datetime, timedelta

import pytest

from durable_jobs import kinds, service
from durable_jobs.models import Job, JobEvent
from tests.operate.conftest import (
    PROVE,
    Start,
    begun,
    history,
    holder,
    now,
    proof,
    runs,
    start,
    wait_for,
)
from tests.operate.kinds import SPACING
from tests.postgres import wait_until
from tests.slices import change

pytestmark = pytest.mark.django_db(transaction=True)


def test_a_killed_worker_s_job_goes_on_elsewhere(start_worker: Start, figure: Callable[..., None]) -> None:
    """C019, C020: Within the lease, twice the grace and two ticks, on two workers that nobody supervises."""
    kind, lease, grace, tick = ("lasting", 60, 20.0, 15.0) if PROVE else ("patient", 1, 0.5, 0.3)
    one = start(kind, 600 if PROVE else 60)
    workers = [start_worker(GRACE=grace, TICK=tick) for _ in range(2)]
    begun(one)
    wait_until(lambda: (now(one).checkpoint or 0) >= 3, 20, "no commits")
    (victim,) = [worker for worker in workers if worker.pid == holder(one)]
    left = now(one).checkpoint
    at = time.monotonic()
    victim.kill()
    limit = lease + 2 * grace + 2 * tick
    took = begun(one, 2, limit + 10) - at
    figure(
        "unsupervised: kill -9 to resumed",
        took,
        f"< {limit:g} s = lease {lease:g} + 2 × grace {grace:g} + 2 × tick {tick:g}",
    )
    # Under short leases the machine's own delays are no longer small.
    assert took < limit + (0 if PROVE else 0.5)
    assert runs(one)[1]["from"] >= left
    (other,) = [worker for worker in workers if worker is not victim]
    other.terminate()
    assert other.wait(15) == 0, other.output


@proof
def test_when_every_worker_is_killed_a_fresh_one_finds_the_jobs(start_worker: Start) -> None:
    """C020."""
    jobs = [start("patient", 1) for _ in range(4)]
    workers = [start_worker("--concurrency", "2") for _ in range(2)]
    for one in jobs:
        begun(one)
    for worker in workers:
        worker.kill()
    fresh = start_worker()
    for one in jobs:
        done = wait_for(one, "completed")
        assert done.checkpoint == 50
    fresh.terminate()
    assert fresh.wait(15) == 0, fresh.output


@proof
def test_a_worker_that_slept_for_long_drops_what_it_lost_and_goes_on(start_worker: Start) -> None:
    """C018."""
    one = start("nap", 2)
    slept = start_worker("--concurrency", "1")
    begun(one)
    # Between two beats: a sleeper that holds SQLite's file keeps everybody from writing.
    time.sleep(0.15)
    slept.freeze()
    other = start_worker("--concurrency", "1")
    begun(one, 2)
    slept.thaw()
    slept.wait_for_output("lease_lost")
    assert wait_for(one, "completed").redrives == 1
    other.terminate()
    assert other.wait(15) == 0, other.output
    after = start("quick")
    wait_for(after, "completed")
    assert "Traceback" not in slept.output
    slept.terminate()
    assert slept.wait(15) == 0, slept.output


def test_a_job_that_kills_its_process_ends_parked_and_takes_nobody_along(
    start_worker: Start, figure: Callable[..., None]
) -> None:
    environment = {} if PROVE else {SPACING: "0.5"}
    at = time.monotonic()
    poison = start("fatal", priority=5)
    beside = [start("nap", 0.5), start("patient", 1)]
    behind = [start("quick") for _ in range(10)]
    process = start_worker("--processes", "2", "--concurrency", "3", environment=environment)
    for one in beside + behind:
        done = wait_for(one, "completed", 60)
        # One that was caught by the first death is suspected itself, and runs apart from the others.
        assert done.redrives <= 2
    parked = wait_for(poison, "failed", 120)
    assert (parked.error_code, parked.parked_at is not None) == ("poison", True)
    assert (parked.redrives, len(runs(poison))) == (2, 3)
    assert history(poison).count("orphaned") == 2 and history(poison).count("parked") == 1
    figure("a job that kills its process three times, until it is parked", time.monotonic() - at, "")
    after = start("quick")
    wait_for(after, "completed")
    process.terminate()
    assert process.wait(15) == 0, process.output


def test_a_backlog_of_a_day_parks_nothing(start_worker: Start) -> None:
    """P1, T14."""
    jobs = [start("quick") for _ in range(50)]
    yesterday = datetime.now(UTC) - timedelta(hours=25)
    Job._base_manager.update(
        created_at=yesterday, updated_at=yesterday, next_run_at=yesterday, pending_since=yesterday
    )
    elsewhere = start_worker("--queues", "imports", DISCOVER=["jobs"], TICK=0.2)
    elsewhere.wait_for_output("worker_started")
    time.sleep(2)
    assert not JobEvent.objects.exists()
    assert {(now(one).status, now(one).redrives, now(one).lost_deliveries) for one in jobs} == {
        ("pending", 0, 0)
    }
    elsewhere.terminate()
    worker = start_worker("--until-idle", TICK=0.2)
    assert worker.wait(30) == 0, worker.output
    assert {(now(one).status, now(one).redrives, now(one).attempts) for one in jobs} == {("completed", 0, 1)}


def test_a_worker_of_the_old_release_leaves_new_kinds_alone(start_worker: Start) -> None:
    """P8, F19."""
    waiting, cancelled = start("quick"), start("quick")
    lost = start("patient", 1, priority=9)
    new = start_worker("--concurrency", "1", TICK=0)
    begun(lost)
    new.kill()
    change(lost, lease_expires_at=datetime.now(UTC) - timedelta(hours=1))
    with unknown_here("operate.quick"):
        service.cancel(cancelled.id)
    old = [start_worker(DISCOVER=[], TICK=0.2) for _ in range(2)]
    for process in old:
        process.wait_for_output("unknown_kind")
    time.sleep(2)
    assert [now(one).status for one in (waiting, cancelled, lost)] == ["pending", "pending", "running"]
    assert [now(one).redrives for one in (waiting, cancelled, lost)] == [0, 0, 0]
    assert "parked" not in history(lost) and "orphaned" not in history(lost)
    start_worker()
    for one, end in ((waiting, "completed"), (cancelled, "cancelled"), (lost, "completed")):
        wait_for(one, end)
    assert now(lost).redrives == 1
    for process in old:
        process.terminate()
        assert process.wait(15) == 0, process.output


class unknown_here:
    """For the block, a process whose code does not have this kind."""

    def __init__(self, name: str) -> None:
        self.kind = type(kinds.get(name))

    def __enter__(self) -> None:
        kinds.unregister(self.kind.name)

    def __exit__(self, *error: object) -> None:
        kinds.register(self.kind)


@proof
def test_two_dead_rows_take_no_place_from_new_jobs(start_worker: Start) -> None:
    """Capacity is what a process runs, never what rows say (C021)."""
    dead = [start("lasting", 60) for _ in range(2)]
    worker = start_worker("--concurrency", "2", TICK=0)
    for one in dead:
        begun(one)
    worker.kill()
    jobs = [start("quick") for _ in range(5)]
    start_worker("--concurrency", "2", TICK=0)
    for one in jobs:
        wait_for(one, "completed", 30)
    assert {now(one).status for one in dead} == {"running"}
