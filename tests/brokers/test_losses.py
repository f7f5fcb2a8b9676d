"""What Celery and Redis lose, repeat and delay, and that no job minds: the row is the authority."""

from __future__ import annotations

import os
import signal
import time
from datetime import timedelta
from pathlib import Path

import pytest
from django.db import connection

from durable_jobs import explain, service
from durable_jobs.models import Job, WorkerProcess
from durable_jobs.testing.transports import Gated, Quick, image, now, open_gate, runs
from durable_jobs.transports import Delivery
from durable_jobs.transports.celery import TASK
from tests.brokers.app import app
from tests.brokers.broker import Redis
from tests.brokers.conftest import SHUTDOWN_SECONDS, Fleet, publishing
from tests.brokers.kinds import Chunks, Poison
from tests.postgres import wait_until
from tests.processes import Process, Processes

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.timeout(240)]

PROVE = bool(os.environ.get("DURABLE_JOBS_PROVE"))
DOWN_SECONDS = 60 if PROVE else 5


def wait_for(job: Job, status: str, timeout: float = 60) -> Job:
    wait_until(lambda: now(job).status == status, timeout, f"{job.kind} is {now(job).status}, not {status}")
    return now(job)


def wait_for_all(jobs: list[Job], fleet: Fleet) -> None:
    """Wait until all are completed, and start a worker anew where it has ended, as a service manager does.

    Celery's own worker may end when Redis goes away in the moment of an acknowledgement.
    """

    def completed() -> bool:
        fleet.replace_the_dead()
        return all(now(job).status == "completed" for job in jobs)

    wait_until(completed, 90, "not all are completed")


def send(job: Job) -> None:
    """The message of the job, as it is now, once more and past everything that could hold it back."""
    app.send_task(TASK, (Delivery.of(job).id,), queue=job.queue_name)


def children(process: Process) -> list[int]:
    return [int(pid) for pid in Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()]


def kill_all(process: Process) -> None:
    """SIGKILL to the worker and to its children, as an out-of-memory killer or a power cut does."""
    for pid in [process.pid, *children(process)]:
        os.kill(pid, signal.SIGKILL)
    process.popen.wait(10)


# --- repeated


@pytest.mark.parametrize("pool", ["prefork", "threads"])
def test_a_message_that_comes_again_while_its_slices_run_does_nothing(
    pool: str, fleet: Fleet, broker: Redis
) -> None:
    """C118, B140: a visibility timeout of 5 s, 20 s of slices, three messages at once and one after success."""
    options, seconds = {"visibility_timeout": 5}, 20
    with publishing(broker.url, options):
        worker = fleet.start(pool, 4, options=options)
        job = service.start(Chunks, seconds).job
        for _ in range(2):
            send(job)
        done = wait_for(job, "completed", 90)
        wait_until(lambda: broker.is_quiet(), 30, "messages are left")
        before = image(job)
        send(now(job))
        send(job)
        wait_until(lambda: broker.is_quiet(), 30, "messages are left")
    slices = [run["seq"] for run in runs(job)]
    assert slices == list(range(len(slices))) and len(slices) >= 2
    assert (done.attempts, done.redrives, done.consecutive_failures) == (len(slices), 0, 0)
    assert done.processed_count == done.result == seconds * 10
    assert image(job) == before
    assert worker.output.count("delivery_refused") >= 4


def test_a_time_far_ahead_is_kept_in_the_row(fleet: Fleet, broker: Redis) -> None:
    """C118: no message waits in a broker or a worker for it, least of all past the visibility timeout."""
    options = {"visibility_timeout": 8}
    with publishing(broker.url, options):
        job = service.start(Quick, run_after=timedelta(seconds=6)).job
        assert broker.client.llen(job.queue_name) == 0
        fleet.start(options=options)
        done = wait_for(job, "completed")
    assert done.started_at is not None and done.started_at >= job.next_run_at
    assert len(runs(job)) == 1


# --- lost


def test_what_a_broker_forgets_is_done_all_the_same(fleet: Fleet, broker: Redis) -> None:
    """B124: FLUSHALL with messages waiting and messages in a worker's hands."""
    fleet.start("prefork", 2)
    jobs = [service.start(Chunks, 0.5).job for _ in range(12)]
    wait_until(lambda: any(now(job).status == "completed" for job in jobs), 30, "none has run")
    broker.lose_messages()
    wait_for_all(jobs, fleet)
    assert {(now(job).result, now(job).redrives) for job in jobs} == {(5, 0)}


def test_a_broker_that_is_away_loses_no_job(fleet: Fleet, broker: Redis) -> None:
    """B31: jobs run on, others are started meanwhile, and all of them end; a minute with DURABLE_JOBS_PROVE."""
    fleet.start("prefork", 2)
    jobs = [service.start(Chunks, 1).job for _ in range(6)]
    wait_until(lambda: any(runs(job) for job in jobs), 30, "none has run")
    broker.stop()
    began = time.monotonic()
    while time.monotonic() - began < DOWN_SECONDS:
        sent = time.monotonic()
        jobs.append(service.start(Quick).job)
        assert time.monotonic() - sent < 2, "a start waits for the broker"
        time.sleep(DOWN_SECONDS / 10)
    broker.start()
    wait_for_all(jobs, fleet)


def test_a_restart_of_the_broker_loses_no_job(fleet: Fleet, broker: Redis) -> None:
    fleet.start("prefork", 2)
    jobs = [service.start(Chunks, 0.5).job for _ in range(8)]
    wait_until(lambda: any(runs(job) for job in jobs), 30, "none has run")
    broker.restart()
    jobs += [service.start(Quick).job for _ in range(3)]
    wait_for_all(jobs, fleet)


# --- killed


def test_a_killed_workers_jobs_go_on_in_another(fleet: Fleet) -> None:
    """B115: nobody but Celery's own workers repairs them."""
    first = fleet.start("prefork", 2)
    job = service.start(Chunks, 4).job
    wait_until(lambda: now(job).processed_count >= 5, 30, "no commit")
    kill_all(first)
    left = now(job)
    assert left.status == "running" and left.lease_owner is not None
    fleet.start("prefork", 1)
    done = wait_for(job, "completed")
    assert done.result == 40 and done.redrives_since_commit == 0
    assert [run["redrives"] for run in runs(job)] == [0, 1]


def test_a_job_that_kills_its_process_is_parked_and_its_message_is_gone(fleet: Fleet, broker: Redis) -> None:
    """C120: also where Celery puts the message of a lost process back; the worker goes on."""
    worker = fleet.start("prefork", 1, environment={"DURABLE_JOBS_TEST_REJECT": "1"})
    job = service.start(Poison).job
    parked = wait_for(job, "failed", 90)
    assert parked.error_code == "poison" and parked.parked_at is not None
    assert [run["redrives"] for run in runs(job)] == [0, 1]
    wait_until(lambda: broker.is_quiet(), 30, "its message is still there")
    after = service.start(Quick).job
    wait_for(after, "completed")
    assert worker.running and len(runs(job)) == 2


def test_processes_that_live_for_one_task(fleet: Fleet) -> None:
    worker = fleet.start("prefork", 2, "--max-tasks-per-child", "1")
    jobs = [service.start(Quick, number).job for number in range(6)]
    for job in jobs:
        wait_for(job, "completed")
    assert len({tuple(run.items()) for job in jobs for run in runs(job)}) == 1
    assert worker.running


# --- the end


@pytest.mark.parametrize("pool", ["prefork", "threads", "solo"])
def test_a_warm_shutdown_asks_slices_to_yield(pool: str, fleet: Fleet) -> None:
    """B69: Celery alone would wait for them."""
    worker = fleet.start(pool, 1)
    job = service.start(Gated).job
    wait_until(lambda: now(job).processed_count > 0, 30, "no commit")
    worker.terminate()
    assert worker.wait(SHUTDOWN_SECONDS) == 0
    left = now(job)
    assert (left.status, left.interruptions, left.continuation_seq) == ("pending", 1, 1)
    assert not WorkerProcess.objects.exists()
    open_gate(job)


# --- connections


@pytest.mark.skipif(
    connection.vendor != "postgresql", reason="SQLite has no connections to a server; this run is on SQLite"
)
def test_no_process_uses_a_connection_of_its_parent(fleet: Fleet) -> None:
    """C064, C127: Celery's main process, which forks, has none; each child has its own."""
    worker = fleet.start("prefork", 3)
    jobs = [service.start(Gated).job for _ in range(3)]
    for job in jobs:
        wait_until(lambda: now(job).processed_count > 0, 60, "no commit")  # noqa: B023, it is called at once
    # Celery closes a child's connection after each task: now all three are in one.
    owned = [connections_of(pid) for pid in children(worker)]
    assert connections_of(worker.pid) == set()
    assert len(owned) == 3 and all(owned) and sum(map(len, owned)) == len(set().union(*owned))
    for job in jobs:
        open_gate(job)
        wait_for(job, "completed")


def connections_of(pid: int) -> set[str]:
    """The local ports of a process's connections to the tests' server."""
    sockets = set()
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        try:
            target = os.readlink(entry)
        except OSError:
            continue
        if target.startswith("socket:["):
            sockets.add(target[8:-1])
    server = f"{int(connection.settings_dict['PORT']):04X}"
    found = set()
    for line in Path(f"/proc/{pid}/net/tcp").read_text().splitlines()[1:]:
        _, local, remote, *rest = line.split()
        if remote.endswith(f":{server}") and rest[6] in sockets:
            found.add(local)
    return found


FORK = """
import os
from tests.brokers.app import app
from durable_jobs import kinds, transports
from durable_jobs.transports import Delivery
from uuid import UUID

transport = transports.current()
def send(number):
    transport.send(Delivery(UUID(int=number), 0, 0), "forked", 0)
send(1)
child = os.fork()
if child == 0:
    send(2)
    os._exit(0)
assert os.waitpid(child, 0)[1] == 0
send(3)
print("sent", len(transport._producers._idle))
"""


def test_a_server_that_forks_after_it_has_published_goes_on_publishing(
    processes: Processes, broker: Redis
) -> None:
    """C064: as gunicorn with a preloaded app does."""
    sender = processes.python(
        FORK, settings={"TRANSPORT": "celery"}, environment={"DURABLE_JOBS_TEST_BROKER": broker.url}
    )
    assert sender.wait(30) == 0, sender.output
    assert "sent 1" in sender.output
    assert broker.client.llen("forked") == 3


def test_a_job_is_told_on_the_operators_screen_to_have_workers(fleet: Fleet) -> None:
    job = service.start(Quick, run_after=timedelta(hours=1)).job
    assert "no_worker" in {reason.code for reason in explain.explain(job)}
    fleet.start("threads", 3)
    wait_until(WorkerProcess.objects.exists, 30, "no worker on the screen")
    worker = WorkerProcess.objects.get()
    assert (worker.concurrency, worker.queues) == (3, '["conformance"]')
    assert "no_worker" not in {reason.code for reason in explain.explain(job)}
