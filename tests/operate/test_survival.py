"""A worker survives its database: what it was about is not lost, is not failed, and is done once."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest
from django.db import connection, connections, transaction

from durable_jobs import overview, service
from durable_jobs.models import Job
from tests.connections import OtherConnection
from tests.operate.conftest import SHORT, Start, begun, history, now, proof, start, wait_for
from tests.operate.kinds import LEASE
from tests.postgres import ROOT, Server, wait_until
from tests.processes import Process, Processes, database_url
from tests.slices import row
from tests.wire import Wire

pytestmark = pytest.mark.django_db(transaction=True)

Healthy = Callable[..., bool]


@pytest.fixture
def asked(processes: Processes) -> Healthy:
    """Whether a process `durable_jobs health` with these arguments ends 0."""

    def ask(*arguments: str) -> bool:
        process = processes.manage("durable_jobs", "health", "--json", *arguments, settings=SHORT)
        code = process.wait(30)
        answer = json.loads(process.output)
        assert code == (0 if answer["healthy"] else 1), process.output
        return code == 0

    return ask


@pytest.fixture
def healthy(settings: Any) -> Healthy:
    """The same of this process, where limits are given by name."""
    settings.DURABLE_JOBS = SHORT
    return lambda **limits: overview.health(overview.Limits(**limits)).ok


def ends_well(worker: Process) -> None:
    assert worker.running, worker.output
    worker.terminate()
    assert worker.wait(20) == 0, worker.output
    assert "Traceback" not in worker.output, worker.output


def done_as_if_nothing_had_happened(job: Job, *, attempts: int = 1) -> None:
    done = wait_for(job, "completed", 30)
    counted = (done.attempts, done.redrives, done.consecutive_failures, done.lost_deliveries)
    assert counted == (attempts, 0, 0, 0), counted
    assert not {"slice_failed", "orphaned", "parked", "cut_off"} & set(history(job)), history(job)


# --- answers that are lost


def naming(job: Job, *words: bytes) -> Callable[[bytes], bool]:
    """Whether bytes of the server name the job, as text or in binary form, and hold these words."""
    identity: UUID = job.id
    return lambda answer: (
        (str(identity).encode() in answer or identity.bytes in answer)
        and all(word in answer for word in words)
    )


@pytest.mark.postgres_only
def test_a_claim_whose_answer_is_lost_is_given_back_and_counts_nothing(start_worker: Start) -> None:
    """P7: the server has committed it, so the row runs under an owner who does not know it.

    The kind parks its orphans and its lease lasts a minute: only the keeper can have mended it.
    """
    with Wire(database_url()) as wire:
        worker = start_worker("--concurrency", "2", environment={"DATABASE_URL": wire.url, LEASE: "60"})
        # Its short lease makes the keeper look often, as it does not commit.
        beside = start("nap", 3)
        begun(beside)
        one = start("quiet", 0.2, hold=True)
        names_it = naming(one)
        wire.lose(lambda name, answer: name == "durable_jobs claims" and names_it(answer))
        service.release(one.id)
        wire.wait()
        claimed = now(one)
        assert (claimed.status, claimed.attempts) == ("running", 1), "the claim had not committed"
        done_as_if_nothing_had_happened(one, attempts=2)
        assert worker.output.count("stranger_given_back") == 1, worker.output
        done_as_if_nothing_had_happened(beside)
        ends_well(worker)


@pytest.mark.postgres_only
def test_an_end_a_beat_and_a_commit_whose_answers_are_lost_are_known_again(start_worker: Start) -> None:
    """None of them is repeated, none is taken for a lost lease.

    Each end in a transaction of its own; of ends that share one, `tests/test_fast_paths.py` tells the same.
    """
    with Wire(database_url()) as wire:
        worker = start_worker(
            "--concurrency", "2", environment={"DATABASE_URL": wire.url}, GRACE=5.0, GROUP_COMMIT=False
        )
        one = start("nap", 1.5)
        begun(one)
        # A beat's answer names what is cancelled or paused, and nothing when there is nothing to tell.
        wire.lose(lambda name, answer: name == "durable_jobs keeper" and b"cancelled" in answer)
        wire.wait()
        ends = naming(one, b"completed")
        wire.lose(lambda name, answer: ends(answer))
        wire.wait()
        assert now(one).status == "completed", "the end had not committed"
        done_as_if_nothing_had_happened(one)

        two = start("patient", 0.6)
        wait_until(lambda: (row(two).checkpoint or 0) >= 3, 20, "no commits")
        # A commit's answer holds no id: whatever comes to the slice next is lost.
        wire.lose(lambda name, answer: name.startswith("durable_jobs slice"))
        wire.wait()
        done = wait_for(two, "completed", 30)
        assert (done.result, done.redrives, done.consecutive_failures) == (30, 0, 0)
        assert "lease_lost" not in worker.output
        ends_well(worker)


# --- connections that are ended


def waiting_for_a_lock(which: str, *names: str) -> int | None:
    """The server's process of a worker's connection that waits for a lock."""
    with connection.cursor() as cursor:
        cursor.execute(
            "SELECT pid FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'"
            f" AND application_name LIKE 'durable_jobs %%' AND application_name {which} (%s, %s, %s, %s)",
            (*names, *[""] * 4)[:4],
        )
        found = cursor.fetchone()
    return found[0] if found else None


def end_of(pid: int | None) -> None:
    with connection.cursor() as cursor:
        cursor.execute("SELECT pg_terminate_backend(%s, 5000)", [pid])
        assert cursor.fetchone() == (True,)


@contextmanager
def locked_table(other: OtherConnection, mode: str) -> Iterator[None]:
    def lock() -> None:
        with connections["default"].cursor() as cursor:
            cursor.execute(f"LOCK TABLE durable_jobs_job IN {mode} MODE")

    other.enter(transaction.atomic())
    other.run(lock)
    try:
        yield
    finally:
        other.leave()


CLAIMS, KEEPER, UPKEEP = "durable_jobs claims", "durable_jobs keeper", "durable_jobs upkeep"
READS_NOTHING, WRITES_NOTHING = "ACCESS EXCLUSIVE", "EXCLUSIVE"


@pytest.mark.postgres_only
@pytest.mark.parametrize("together", [True, False], ids=["ends share a commit", "each end for itself"])
def test_a_connection_that_is_ended_in_the_middle_of_anything_costs_no_job_and_no_poll(
    together: bool, start_worker: Start, second_connection: OtherConnection, figure: Callable[..., None]
) -> None:
    """C062: while it polls, claims, renews, writes an end, and listens. The next job runs within two polls."""
    poll, longest = 1.0, 0.0
    worker = start_worker("--concurrency", "3", POLL=poll, GRACE=10.0, GROUP_COMMIT=together)
    worker.wait_for_output("worker_started")

    def cut(which: str, *names: str) -> None:
        wait_until(lambda: waiting_for_a_lock(which, *names) is not None, 15, f"nobody waits: {names}")
        end_of(waiting_for_a_lock(which, *names))

    def next_one_runs(after: str) -> None:
        nonlocal longest
        at = time.monotonic()
        one = start("quick")
        wait_for(one, "completed", 15)
        took = time.monotonic() - at
        longest = max(longest, took)
        assert took < 2 * poll, (after, worker.output)
        done_as_if_nothing_had_happened(one)

    with locked_table(second_connection, READS_NOTHING):
        cut("IN", CLAIMS)
    next_one_runs("polling")

    claimed = start("quick", run_after=timedelta(seconds=0.7))
    with locked_table(second_connection, WRITES_NOTHING):
        cut("IN", CLAIMS)
    next_one_runs("claiming")
    done_as_if_nothing_had_happened(claimed)

    renewed = start("nap", 1.5)
    begun(renewed)
    with locked_table(second_connection, WRITES_NOTHING):
        cut("IN", KEEPER)
    next_one_runs("renewing")
    done_as_if_nothing_had_happened(renewed)

    ending = start("nap", 0.5)
    begun(ending)
    with locked_table(second_connection, WRITES_NOTHING):
        # Ends that share a commit are written by the thread that claims.
        cut(*(("IN", CLAIMS) if together else ("NOT IN", CLAIMS, KEEPER, UPKEEP)))
    next_one_runs("completing")
    done_as_if_nothing_had_happened(ending)

    with connection.cursor() as cursor:
        cursor.execute(
            "SELECT pid FROM pg_stat_activity WHERE datname = current_database()"
            " AND application_name = 'durable_jobs listener'"
        )
        [(listener,)] = cursor.fetchall()
    end_of(listener)
    next_one_runs("listening")
    figure(
        "a connection cut while polling, claiming, …: the next job is done within",
        longest,
        "< 2 polls of 1 s",
    )
    ends_well(worker)


# --- outages, and what a monitor sees


@pytest.mark.parametrize("mode", [pytest.param("fast", marks=proof), "immediate"])
def test_a_restart_of_the_database_is_waited_out(
    start_worker: Start, asked: Healthy, postgres_server: Server, mode: Any
) -> None:
    """C061: shorter than a lease for one job, longer for the other. Red during it, green before and after."""
    short, long = start("lasting", 4), start("patient", 4)
    worker = start_worker("--concurrency", "2", GRACE=5.0)
    for one in (short, long):
        begun(one)
    assert asked()
    connections.close_all()
    postgres_server.stop(mode)
    at = time.monotonic()
    assert not asked()
    time.sleep(max(0.0, at + 2 - time.monotonic()))
    postgres_server.start()
    after = start("quick")
    wait_for(after, "completed", 10)
    for one in (short, long):
        done = wait_for(one, "completed", 30)
        assert (done.result, done.redrives, done.consecutive_failures, done.parked_at) == (200, 0, 0, None)
    assert asked()
    for part in ("claims", "listener"):
        assert worker.output.count(f"database_unavailable part={part}") == 1, worker.output
    ends_well(worker)


@contextmanager
def read_only(name: str) -> Iterator[None]:
    """The server takes no write from anybody who connects now; those who were connected are cut."""
    cut = (
        "SELECT pg_terminate_backend(pid) FROM pg_stat_activity"
        " WHERE datname = current_database() AND application_name LIKE 'durable_jobs %'"
    )
    with connection.cursor() as cursor:
        cursor.execute(f'ALTER DATABASE "{name}" SET default_transaction_read_only = on')
        try:
            cursor.execute(cut)
            yield
        finally:
            cursor.execute("SET default_transaction_read_only = off")
            cursor.execute(f'ALTER DATABASE "{name}" RESET default_transaction_read_only')
            cursor.execute(cut)


@pytest.mark.postgres_only
def test_a_server_that_is_read_only_for_five_seconds_is_waited_out(
    start_worker: Start, healthy: Healthy
) -> None:
    """C063: as after a failover. Work that nobody takes makes health red."""
    running = start("patient", 3)
    worker = start_worker("--concurrency", "2", GRACE=10.0)
    begun(running)
    assert healthy(due=2)
    with read_only(connection.settings_dict["NAME"]):
        at = time.monotonic()
        one = start("quick")
        worker.wait_for_output("database_unavailable part=claims")
        time.sleep(max(0.0, at + 3 - time.monotonic()))
        assert not healthy(due=2)
        assert worker.running
        time.sleep(max(0.0, at + 5 - time.monotonic()))
    done_as_if_nothing_had_happened(one)
    done = wait_for(running, "completed", 30)
    assert (done.result, done.redrives, done.consecutive_failures) == (150, 0, 0)
    assert healthy(due=2)
    ends_well(worker)


@pytest.fixture
def impatient(tmp_path: Path) -> dict[str, str]:
    """The environment of a project whose SQLite waits for 0.3 s."""
    (tmp_path / "impatient.py").write_text(
        "from tests.job_settings import *\nDATABASES['default']['OPTIONS']['timeout'] = 0.3\n"
    )
    return {
        "DJANGO_SETTINGS_MODULE": "impatient",
        "PYTHONPATH": os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])]),
    }


@pytest.mark.sqlite_only
def test_a_file_that_is_locked_beyond_the_timeout_is_waited_out(
    start_worker: Start, healthy: Healthy, impatient: dict[str, str], second_connection: OtherConnection
) -> None:
    """C061, C062: while it polls, claims, renews, commits (every 20 ms), and at the end of a slice."""

    def execute(sql: str) -> Callable[[], Any]:
        return lambda: connections["default"].cursor().execute(sql)

    worker = start_worker("--concurrency", "4", environment=impatient, GRACE=10.0)
    committing, ending = start("fragile", 3), start("nap", 1.5)
    wait_until(lambda: (now(committing).checkpoint or 0) >= 3, 20, "no commits")
    begun(ending)
    waiting = start("quick", run_after=timedelta(seconds=0.5))
    second_connection.run(execute("BEGIN EXCLUSIVE"))
    worker.wait_for_output("database_unavailable part=claims")
    worker.wait_for_output("database_unavailable part=keeper")
    worker.wait_for_output("outcome_waits")
    wait_until(lambda: not healthy(due=1), 10, "not red")
    second_connection.run(execute("ROLLBACK"))
    done_as_if_nothing_had_happened(waiting)
    done_as_if_nothing_had_happened(ending)
    done = wait_for(committing, "completed", 30)
    assert (done.result, done.redrives, done.consecutive_failures) == (150, 0, 0)
    assert "slice_failed" not in history(committing)
    assert healthy(due=1)
    ends_well(worker)


# --- half-dead peers


@pytest.mark.postgres_only
def test_a_peer_that_idles_on_a_jobs_row_is_named_and_costs_nothing(
    start_worker: Start, healthy: Healthy, second_connection: OtherConnection
) -> None:
    """P10: neither the slice nor any repair gets past it; health is red until it goes."""
    worker = start_worker("--concurrency", "2")
    worker.wait_for_output("worker_started")
    assert healthy()
    one = start("patient", 2)
    wait_until(lambda: (now(one).checkpoint or 0) >= 3, 20, "no commits")
    second_connection.enter(transaction.atomic())
    second_connection.run(lambda: list(Job.objects.select_for_update().filter(pk=one.pk)))
    worker.wait_for_output("orphan_locked")
    wait_until(lambda: not healthy(), 10, "not red")
    behind = start("quick")
    done_as_if_nothing_had_happened(behind)
    second_connection.leave()
    done = wait_for(one, "completed", 30)
    assert (done.result, done.consecutive_failures, done.parked_at) == (100, 0, None)
    assert done.redrives == 0
    assert healthy()
    ends_well(worker)


def test_a_worker_that_freezes_in_its_fence_keeps_nobody_from_the_row_for_long(
    start_worker: Start,
) -> None:
    """P10. PostgreSQL ends the idle transaction and another worker goes on; SQLite's file is free after the thaw."""
    one = start("fenced", 1)
    frozen = start_worker("--concurrency", "1")
    frozen.wait_for_output("inside")
    frozen.freeze()
    other = start_worker("--concurrency", "1")
    if connection.vendor == "postgresql":
        wait_for(one, "completed", 30)
        frozen.thaw()
        frozen.wait_for_output("lease_lost")
        assert now(one).redrives == 1
    else:
        other.wait_for_output("worker_started")
        # Longer than the lease, twice the grace and the ticks.
        time.sleep(3)
        frozen.thaw()
        wait_for(one, "completed", 30)
    done = now(one)
    assert (done.checkpoint, done.consecutive_failures, done.parked_at) == (1, 0, None)
    after = start("quick")
    wait_for(after, "completed")
    for worker in (frozen, other):
        ends_well(worker)


VANISHES = """
import subprocess, time
import django
django.setup()
from django.db import connection
from durable_jobs import connection as own_connection
own_connection.own("keeper")
with connection.cursor() as cursor:
    cursor.execute("SELECT 1")
    subprocess.run(["ip", "link", "set", "lo", "down"], check=True)
    at = time.monotonic()
    try:
        cursor.execute("SELECT 2")
    finally:
        print("noticed after", time.monotonic() - at, flush=True)
        subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
"""


@proof
@pytest.mark.postgres_only
def test_a_server_that_vanishes_under_a_statement_is_noticed_before_a_lease_runs_out(
    figure: Callable[..., None],
) -> None:
    """P10: in a network of its own, which goes down while a statement is on its way."""
    unshare = shutil.which("unshare")
    if unshare is None or subprocess.run([unshare, "--net", "ip", "link", "set", "lo", "up"]).returncode:
        pytest.skip("no network of its own can be made here")
    inside = 'ip link set lo up && exec "$0" -m tests.postgres run -- "$0" -c "$1"'
    done = subprocess.run(
        [unshare, "--net", "sh", "-c", inside, sys.executable, VANISHES],
        cwd=ROOT,
        env={**os.environ, "DJANGO_SETTINGS_MODULE": "tests.settings"},
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert "OperationalError" in done.stderr, done.stderr
    took = float(done.stdout.rpartition("noticed after ")[2])
    figure(
        "a server that vanishes under a statement, until that is noticed", took, "< 45 s of a lease of 60 s"
    )
    assert took < 45
