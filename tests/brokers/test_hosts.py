"""Three hosts and one PostgreSQL; one of them is cut off for longer than its lease, and comes back."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from urllib.parse import urlsplit

import pytest
from django.db import connection

from durable_jobs import service
from durable_jobs.models import Job, JobEvent, WorkerProcess
from tests.brokers import hosts
from tests.brokers.hosts import Host
from tests.brokers.ledger import epochs, lines, writers
from tests.postgres import Server, wait_until
from tests.processes import Process, Processes, database_url

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.postgres_only, pytest.mark.timeout(240)]

SETTINGS = {"DISCOVER": ["brokers.ledger"], "POLL": 0.1, "TICK": 0.3, "GRACE": 0.5}
STEPS = 120


@pytest.fixture(scope="module")
def three() -> Iterator[list[Host]]:
    hosts.require()
    made: list[Host] = []
    try:
        for _ in range(3):
            made.append(Host())
        yield made
    finally:
        for host in made:
            host.remove()


@pytest.fixture
def server(three: list[Host], postgres_server: Server) -> Iterator[Server]:
    """The run's server, which the hosts reach."""
    connection.close()
    postgres_server.listen_on(*(host.here for host in three))
    yield postgres_server
    for host in three:
        host.heal()
    connection.close()
    postgres_server.listen_on()


@pytest.fixture
def workers(three: list[Host], server: Server, processes: Processes) -> list[Process]:
    """A worker on each host."""
    started = []
    for host in three:
        address = urlsplit(database_url())
        netloc = f"{address.username}:{address.password}@{host.here}:{address.port}"
        started.append(
            processes._start(
                host.command(sys.executable, "-m", "django", "runworker", "--concurrency", "2"),
                settings=SETTINGS,
                environment={"DATABASE_URL": address._replace(netloc=netloc).geturl()},
            )
        )
    try:
        wait_until(lambda: WorkerProcess.objects.count() == 3, 60, "not all three workers are there")
    except TimeoutError as error:
        error.add_note("\n".join(worker.output for worker in started))
        raise
    return started


@pytest.mark.parametrize("moment", ["between two fences", "inside a fence"])
def test_a_host_that_is_cut_off_and_comes_back(
    three: list[Host], workers: list[Process], moment: str
) -> None:
    """Everything runs once; what the cut-off worker writes afterwards is refused by owner and epoch."""
    started = [service.start("brokers.ledger", STEPS).job for _ in range(6)]
    lonely, worker = three[0], workers[0]
    wait_until(lambda: len([job for job in held_by(worker) if lines(job)]) == 2, 60, worker.output)

    wanted = moment == "inside a fence"
    wait_until(lambda: in_fence(lonely) == wanted, 30, "never at that moment")
    lonely.cut()
    theirs = held_by(worker)
    before = {job.pk: job.lease_epoch for job in theirs}
    assert theirs

    # The others take over while the host is away, and go on from the last line that was committed.
    wait_until(lambda: not held_by(worker), 60, workers[1].output)
    wait_until(lambda: all(epochs(job)[-1] > before[job.pk] for job in theirs), 60, workers[1].output)
    assert worker.running
    lonely.heal()

    wait_until(lambda: all(now(job).status == "completed" for job in started), 90, workers[1].output)
    # It hears of it: its statement, sent again by its own system, arrives and is refused.
    wait_until(
        lambda: all(f"lease_lost job_id={job.pk}" in worker.output for job in theirs), 90, worker.output
    )
    for job in started:
        assert lines(job) == list(range(STEPS)), "a line is missing, or there twice"
        assert epochs(job) == sorted(epochs(job)), "a line was written after somebody else had the job"
    for job in theirs:
        assert [event.owner for event in orphanings(job)] == [job.lease_owner]

    # And it is a worker like the others again: alone, it runs what comes.
    for other in workers[1:]:
        other.terminate()
    assert [other.wait() for other in workers[1:]] == [0, 0]
    after = service.start("brokers.ledger", 5).job
    wait_until(lambda: now(after).status == "completed", 60, worker.output)
    assert set(writers(after)) == {worker.pid}
    worker.terminate()
    assert worker.wait() == 0


def now(job: Job) -> Job:
    return Job.objects.get(pk=job.pk)


def held_by(process: Process) -> list[Job]:
    running = Job.objects.filter(status="running", lease_owner__isnull=False)
    return [job for job in running if (job.lease_owner or "").split(":")[1] == str(process.pid)]


def orphanings(job: Job) -> list[JobEvent]:
    return list(JobEvent.objects.filter(job_id=job.pk, event="orphaned").order_by("id"))


def in_fence(host: Host) -> bool:
    """Whether a transaction of that host is open between two statements."""
    with connection.cursor() as cursor:
        cursor.execute(
            "SELECT count(*) FROM pg_stat_activity WHERE client_addr = %s AND state = 'idle in transaction'",
            [host.address],
        )
        return bool(cursor.fetchall()[0][0])
