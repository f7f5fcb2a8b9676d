"""The worker, as processes: it drains, it survives, it ends as it says."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from django.core.management import CommandError, call_command
from django.db import connection, connections, transaction
from django.utils import timezone

from durable_jobs import kinds, service, worker
from durable_jobs.models import Job, JobEvent, WorkerProcess
from durable_jobs.worker import Worker
from tests.connections import OtherConnection
from tests.postgres import Server, wait_until
from tests.processes import Process, Processes, process_environment
from tests.worker_kinds import KINDS

pytestmark = pytest.mark.django_db(transaction=True)

SETTINGS = {"DISCOVER": ["worker_kinds"], "POLL": 0.1, "TICK": 0, "GRACE": 0.5}
Start = Callable[..., Process]


@pytest.fixture(autouse=True)
def registered() -> Iterator[None]:
    for kind in KINDS:
        kinds.register(kind)
    yield
    for kind in KINDS:
        kinds.unregister(kind.name)


@pytest.fixture
def start_worker(processes: Processes) -> Start:
    def start(*arguments: str, **settings: Any) -> Process:
        return processes.manage("runworker", *arguments, settings={**SETTINGS, **settings})

    return start


def job(kind: str, value: Any = None, **options: Any) -> Job:
    return service.start(f"worker.{kind}", value, **options).job


def now(one: Job) -> Job:
    return Job.objects.get(pk=one.pk)


def wait_for(one: Job, status: str, timeout: float = 15) -> Job:
    wait_until(lambda: now(one).status == status, timeout, f"not {status}")
    return now(one)


def begun(one: Job, timeout: float = 15) -> None:
    wait_until(lambda: ran(one) > 0, timeout, "not begun")


def ran(one: Job) -> int:
    return JobEvent.objects.filter(job_id=one.pk, event="ran").count()


# --- in this process


def test_it_ends_when_idle_and_a_job_scheduled_for_later_stays() -> None:
    jobs = [job("quick", number) for number in range(20)]
    later = job("quick", run_after=timedelta(hours=1))
    assert Worker(until_idle=True).run() == 0
    assert {now(one).status for one in jobs} == {"completed"}
    assert now(later).status == "pending"
    assert not WorkerProcess.objects.exists()


def test_idle_waits_for_a_retry() -> None:
    one = job("leave", "base")
    assert Worker(until_idle=True).run() == 0
    assert (now(one).status, now(one).result) == ("completed", "again")


@pytest.mark.parametrize("how", ["exit", "base"])
def test_nothing_that_a_step_raises_ends_the_worker(how: str) -> None:
    bad, good = job("leave", how), job("quick")
    assert Worker(until_idle=True, concurrency=1).run() == 0
    assert now(bad).attempts == 2
    assert now(bad).status == now(good).status == "completed"


@pytest.mark.parametrize("how", ["nothing", "atomic", "autocommit", "raw"])
def test_a_slice_finds_a_clean_thread(how: str) -> None:
    first = job("litter", how, priority=5)
    second = job("tidy")
    assert Worker(until_idle=True, concurrency=1).run() == 0
    assert now(first).finished_at
    assert now(second).result == {
        "language": "en-us",
        "zone": "UTC",
        "variable": "none",
        "atomic": False,
        "autocommit": True,
    }


def test_it_works_in_another_thread_and_says_that_signals_do_not_reach_it(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """C069."""
    handlers = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)
    one, codes = job("quick"), []

    def work() -> None:
        codes.append(Worker(until_idle=True).run())
        connections.close_all()

    thread = threading.Thread(target=work)
    thread.start()
    thread.join(20)
    assert codes == [0]
    assert now(one).status == "completed"
    assert "no_signals" in caplog.text
    assert handlers == (signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT))


def test_it_leaves_signal_handlers_as_they_were() -> None:
    handlers = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)
    assert Worker(until_idle=True).run() == 0
    assert handlers == (signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT))


class RunningHere:
    """A worker in a thread of this process, until the block ends."""

    def __init__(self, **options: Any) -> None:
        self.worker = Worker(**options)
        self.code: int | None = None
        self._thread = threading.Thread(target=self._run)

    def _run(self) -> None:
        self.code = self.worker.run()
        connections.close_all()

    def __enter__(self) -> Worker:
        self._thread.start()
        return self.worker

    def __exit__(self, *error: object) -> None:
        self.worker.stop()
        self._thread.join(30)
        assert self.code is not None


def test_of_jobs_orphaned_since_their_last_commit_one_runs_at_a_time(settings: Any) -> None:
    settings.DURABLE_JOBS = SETTINGS
    suspects = [job("nap", 0.4) for _ in range(3)]
    sound = [job("nap", 0.4) for _ in range(2)]
    with connection.cursor() as cursor:
        cursor.execute(
            "UPDATE durable_jobs_job SET redrives_since_commit = 1 WHERE id IN (%s, %s, %s)",
            [one.id if connection.vendor == "postgresql" else one.id.hex for one in suspects],
        )
    most = most_suspects = 0
    with RunningHere(concurrency=4):
        end = time.monotonic() + 15
        while not all(now(one).finished_at for one in suspects + sound):
            assert time.monotonic() < end
            most = max(most, Job.objects.filter(status="running").count())
            begun = JobEvent.objects.filter(event="ran", job__in=suspects, job__finished_at=None)
            most_suspects = max(most_suspects, begun.values("job_id").distinct().count())
    assert most_suspects == 1
    assert most >= 3
    assert all(now(one).attempts <= 3 for one in suspects)


def test_a_suspect_that_has_committed_is_none_any_more(settings: Any) -> None:
    settings.DURABLE_JOBS = SETTINGS
    suspects = [job("patient", 60) for _ in range(2)]
    with connection.cursor() as cursor:
        cursor.execute("UPDATE durable_jobs_job SET redrives_since_commit = 1")
    with RunningHere(concurrency=4):
        wait_until(lambda: all(ran(one) for one in suspects), 20, "one at a time although it commits")


def test_threads_and_connections_are_as_many_after_a_thousand_jobs_as_after_ten(settings: Any) -> None:
    """C100."""
    settings.DURABLE_JOBS = SETTINGS
    files = Path("/proc/self/fd")

    def done() -> bool:
        return not Job.objects.exclude(status="completed").exists()

    with RunningHere(concurrency=3):
        # As many as there are threads, at a time: each has opened what it needs.
        for _ in range(3):
            job("nap", 0.5)
        for _ in range(10):
            job("quick")
        wait_until(done, 20, "not done")
        before = (threading.active_count(), len(list(files.iterdir())) if files.exists() else 0)
        for _ in range(300):
            job("quick")
        wait_until(done, 30, "not done")
        time.sleep(0.2)
        after = (threading.active_count(), len(list(files.iterdir())) if files.exists() else 0)
    assert after[0] <= before[0] + 1
    assert after[1] <= before[1] + 2


def test_a_slice_thread_whose_runner_breaks_goes_on_and_the_job_is_left_to_the_reconciler(
    settings: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    settings.DURABLE_JOBS = SETTINGS
    begin_slice, broken = worker.begin_slice, []

    def breaks_once(one: Job, *rest: Any, **options: Any) -> Any:
        if not broken:
            broken.append(one)
            raise RuntimeError("a bug")
        return begin_slice(one, *rest, **options)

    monkeypatch.setattr(worker, "begin_slice", breaks_once)
    first = job("quick", priority=1)
    with RunningHere(concurrency=1):
        second = job("quick")
        wait_for(second, "completed", 30)
        time.sleep(1.5)
        left = now(first)
        assert left.status == "running"
        assert left.lease_expires_at is not None
        assert left.lease_expires_at < now(second).finished_at + timedelta(seconds=1.5)
    assert "slice_broke" in caplog.text


# --- as processes: stopping


def test_a_drain_asks_slices_to_yield_and_gives_back_what_has_not_begun(start_worker: Start) -> None:
    """B166."""
    jobs = [job("patient", 60) for _ in range(4)]
    process = start_worker("--concurrency", "2")
    wait_until(lambda: sum(ran(one) for one in jobs) == 2, 20, "not begun")
    process.terminate()
    assert process.wait(20) == 0, process.output
    rows = [now(one) for one in jobs]
    assert {row.status for row in rows} == {"pending"}
    assert sorted(row.interruptions for row in rows) == [0, 0, 1, 1]
    assert {row.consecutive_failures for row in rows} == {0}
    assert all(row.checkpoint for row in rows if row.interruptions)
    assert not WorkerProcess.objects.exists()
    assert re.search(r"Waiting up to 25 s for [12] running slice.*worker\.patient", process.output)


def test_a_drain_waits_only_so_long_and_says_what_it_left(start_worker: Start) -> None:
    """C067."""
    one = job("nap", 60)
    process = start_worker("--drain-timeout", "0.7")
    begun(one)
    began = time.monotonic()
    process.terminate()
    assert process.wait(20) == 1, process.output
    assert 0.6 < time.monotonic() - began < 4
    assert f"Not waiting any longer for 1 running slice (worker.nap {one.id})" in process.output
    assert now(one).status == "running"


def test_a_slice_that_takes_three_leases_runs_once(start_worker: Start) -> None:
    """C005: its lease is renewed beside it, and a second worker that repairs all the time leaves it alone."""
    one = job("nap", 3.2)
    for each in [start_worker(TICK=0.2) for _ in range(2)]:
        each.wait_for_output("worker_started")
    done = wait_for(one, "completed", 20)
    assert (done.attempts, done.redrives, done.lost_deliveries) == (1, 0, 0)
    assert JobEvent.objects.filter(job_id=one.pk, event="ran").count() == 1


def test_leases_are_kept_during_a_drain(start_worker: Start) -> None:
    one = job("nap", 3)
    process = start_worker()
    begun(one)
    process.terminate()
    end = time.monotonic() + 2.4
    while time.monotonic() < end and process.running:
        row = now(one)
        assert row.status == "completed" or row.lease_expires_at > timezone.now()
        time.sleep(0.1)
    assert process.wait(20) == 0, process.output
    assert now(one).status == "completed"
    assert now(one).redrives == 0


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_second_signal_ends_it_within_a_second(start_worker: Start, number: signal.Signals) -> None:
    """C067."""
    one = job("nap", 60)
    process = start_worker("--drain-timeout", "60")
    begun(one)
    process.send(number)
    process.wait_for_output("Waiting up to 60 s")
    time.sleep(0.7)
    process.send(number)
    began = time.monotonic()
    assert process.wait(20) == 128 + number, process.output
    assert time.monotonic() - began < 1
    assert now(one).status == "running"


@pytest.mark.sqlite_only
def test_a_second_signal_works_while_the_database_blocks_the_main_thread(
    start_worker: Start, second_connection: OtherConnection
) -> None:
    process = start_worker("--drain-timeout", "60")
    process.wait_for_output("worker_started")
    wait_until(WorkerProcess.objects.exists, 20, "not registered")
    second_connection.run(lambda: connections["default"].cursor().execute("BEGIN EXCLUSIVE"))
    time.sleep(0.5)
    process.terminate()
    process.wait_for_output("draining")
    time.sleep(0.7)
    process.terminate()
    began = time.monotonic()
    code = process.wait(20)
    assert time.monotonic() - began < 1
    assert code in (0, 128 + signal.SIGTERM)
    second_connection.run(lambda: connections["default"].cursor().execute("ROLLBACK"))


def test_a_signal_to_the_whole_group_that_arrives_twice_is_one_drain(tmp_path: Path) -> None:
    """B167, C066: As an init system does it: to every process of the group, and the parent passes it on."""
    one = job("patient", 60)
    output = tmp_path / "output"
    with output.open("wb") as file:
        shell = subprocess.Popen(
            [
                "sh",
                "-c",
                f"trap 'kill -TERM $!; wait $!; exit $?' TERM; {sys.executable} -m django runworker & wait $!",
            ],
            env=process_environment(SETTINGS),
            stdout=file,
            stderr=file,
            start_new_session=True,
        )
    try:
        begun(one)
        os.killpg(shell.pid, signal.SIGTERM)
        assert shell.wait(20) == 0, output.read_text()
    finally:
        if shell.poll() is None:
            os.killpg(shell.pid, signal.SIGKILL)
    wait_for(one, "pending", 30)
    assert now(one).interruptions == 1


def test_it_drains_as_process_one_of_a_container(processes: Processes, tmp_path: Path) -> None:
    unshare = shutil.which("unshare")
    if (
        unshare is None
        or subprocess.run([unshare, "--pid", "--fork", "true"], capture_output=True).returncode
    ):
        pytest.skip("no new process namespace can be made here")
    one = job("patient", 60)
    command = [unshare, "--pid", "--fork", "--kill-child", sys.executable, "-m", "django", "runworker"]
    output = tmp_path / "output"
    environment = process_environment(SETTINGS)
    environment.pop("DURABLE_JOBS_TEST_PARENT")
    with output.open("wb") as file:
        outside = subprocess.Popen(command, env=environment, stdout=file, stderr=file)
    try:
        begun(one)
        (inside,) = Path(f"/proc/{outside.pid}/task/{outside.pid}/children").read_text().split()
        os.kill(int(inside), signal.SIGTERM)
        assert outside.wait(20) == 0, output.read_text()
    finally:
        outside.kill()
        outside.wait()
    assert now(one).status == "pending"


def test_a_process_that_was_killed_leaves_its_last_commit_behind(start_worker: Start) -> None:
    one = job("patient", 60)
    process = start_worker()
    wait_until(lambda: (now(one).checkpoint or 0) >= 3, 20, "no commits")
    process.kill()
    left = now(one)
    assert left.status == "running"
    assert left.lease_owner
    assert left.checkpoint >= 3


def test_the_next_worker_goes_on_after_the_last_commit_of_one_that_was_killed(start_worker: Start) -> None:
    one = job("patient", 1)
    process = start_worker()
    wait_until(lambda: (now(one).checkpoint or 0) >= 3, 20, "no commits")
    process.kill()
    left = now(one)
    start_worker("--until-idle", TICK=0.2)
    done = wait_for(one, "completed", 20)
    assert (done.result, done.redrives, done.consecutive_failures) == (50, 1, 0)
    resumed = JobEvent.objects.filter(job_id=one.pk, event="ran").latest("id")
    assert resumed.data == {"from": left.checkpoint}


def test_an_idle_worker_takes_a_job_at_once_and_stops_at_once(start_worker: Start) -> None:
    process = start_worker(POLL=60)
    wait_until(WorkerProcess.objects.exists, 20, "not registered")
    time.sleep(0.5)
    began = time.monotonic()
    wait_for(job("quick"), "completed", 30)
    assert time.monotonic() - began < 2
    process.terminate()
    assert process.wait(20) == 0, process.output


# --- as processes: hung steps


def test_a_worker_whose_threads_all_hang_ends_with_75(start_worker: Start) -> None:
    """C036."""
    hung = [job("hang"), job("hang")]
    process = start_worker("--concurrency", "2")
    assert process.wait(20) == 75, process.output
    assert "slice_overdue" in process.output
    assert "in step" in process.output
    assert {now(one).status for one in hung} == {"running"}


def test_a_worker_goes_on_with_the_threads_that_do_not_hang(start_worker: Start) -> None:
    hung = job("hang", priority=9)
    process = start_worker("--concurrency", "2", "--drain-timeout", "60")
    process.wait_for_output("slice_overdue")
    wait_until(lambda: now(hung).lease_expires_at < timezone.now(), 20, "still renewed")
    others = [job("quick") for _ in range(5)]
    for one in others:
        wait_for(one, "completed")
    process.terminate()
    assert process.wait(20) == 1, process.output


# --- as processes: races and outages


def test_of_many_processes_exactly_one_runs_each_job(start_worker: Start) -> None:
    """B42, B160."""
    jobs = (
        service.start_many([service.New("worker.quick", number) for number in range(200)])
        if False
        else [job("quick", number) for number in range(200)]
    )
    started = [start_worker("--until-idle") for _ in range(3)]
    assert [process.wait(60) for process in started] == [0, 0, 0]
    runs = Counter(JobEvent.objects.filter(event="ran").values_list("job_id", flat=True))
    assert set(runs) == {one.id for one in jobs}
    assert set(runs.values()) == {1}
    assert set(Job.objects.values_list("status", "attempts")) == {("completed", 1)}


def test_it_survives_cut_connections_without_a_flood_of_new_ones(
    start_worker: Start, postgres_server: Server
) -> None:
    process = start_worker("--concurrency", "3")
    process.wait_for_output("worker_started")
    first = job("quick")
    wait_for(first, "completed")
    before = connections_made(postgres_server)
    for _ in range(3):
        connections.close_all()
        postgres_server.terminate_backends()
        connections.close_all()
        wait_for(job("quick"), "completed", 30)
        time.sleep(0.3)
    assert connections_made(postgres_server) - before < 60
    assert process.running


def connections_made(server: Server) -> int:
    with connection.cursor() as cursor:
        cursor.execute("SELECT sessions FROM pg_stat_database WHERE datname = current_database()")
        return int(cursor.fetchone()[0])


@pytest.mark.postgres_only
def test_connections_are_few_named_and_kept(start_worker: Start) -> None:
    """C100: and none is left when the worker has gone."""
    process = start_worker("--concurrency", "3")
    for _ in range(30):
        job("quick")
    wait_until(lambda: not Job.objects.exclude(status="completed").exists(), 20, "not done")

    def backends() -> dict[str, int]:
        with connection.cursor() as cursor:
            cursor.execute(
                "SELECT application_name, pid FROM pg_stat_activity WHERE application_name LIKE 'durable_jobs %'"
            )
            return dict(cursor.fetchall())

    first = backends()
    assert set(first) >= {"durable_jobs claims", "durable_jobs listener", "durable_jobs slice-1"}
    assert len(first) <= 3 + 4
    for _ in range(30):
        job("quick")
    wait_until(lambda: not Job.objects.exclude(status="completed").exists(), 20, "not done")
    second = backends()
    assert {name: pid for name, pid in second.items() if name in first} == first
    process.terminate()
    assert process.wait(20) == 0
    wait_until(lambda: not backends(), 5, "connections are left")


@pytest.mark.sqlite_only
def test_a_file_that_is_locked_for_long_is_waited_for(
    start_worker: Start, second_connection: OtherConnection
) -> None:
    process = start_worker()
    process.wait_for_output("worker_started")
    first = job("quick")
    second_connection.enter(transaction.atomic())
    second_connection.run(job, "quick")
    time.sleep(1.5)
    second_connection.leave()
    wait_for(first, "completed")
    wait_until(lambda: Job.objects.filter(status="completed").count() == 2, 20, "not taken")
    process.terminate()
    assert process.wait(20) == 0, process.output


# --- the command


def test_a_database_without_tables_is_named_in_one_line(processes: Processes, tmp_path: Path) -> None:
    """C110: "migrate first", and an exit code of its own."""
    environment = {"DATABASE_URL": f"sqlite:///{tmp_path / 'empty.sqlite3'}"}
    process = processes.manage("runworker", settings=SETTINGS, environment=environment)
    assert process.wait(20) == 3, process.output
    (line,) = [line for line in process.output.splitlines() if line.strip()]
    assert "no table durable_jobs_" in line
    assert "manage.py migrate" in line


def test_a_database_that_does_not_answer_is_named_within_seconds(
    processes: Processes, tmp_path: Path
) -> None:
    url = "sqlite:////nowhere/at/all.sqlite3"
    if connection.vendor == "postgresql":
        url = "postgresql://somebody:secret@127.0.0.1:1/nothing"
    process = processes.manage("runworker", settings=SETTINGS, environment={"DATABASE_URL": url})
    assert process.wait(20) == 4, process.output
    (line,) = [line for line in process.output.splitlines() if line.strip()]
    assert "does not answer" in line
    assert "secret" not in line


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--kinds", "worker.quick,worker.quack"], "No kind is called 'worker.quack'"),
        (["--queues", "nowhere"], "No kind and no waiting job has the queue 'nowhere'. Known queues: "),
        (["--queues", "manual"], "reserved"),
        (["--concurrency", "0"], "whole number from 1 to 256"),
        (["--concurrency", "many"], "'many' is out of range. Use a whole number"),
        (["--drain-timeout", "-1"], "'-1' is out of range. Use seconds from 0"),
        (["--drain-timeout", "nan"], "'nan' is out of range. Use seconds from 0"),
        (["--queues", ","], "at least one name"),
    ],
)
def test_nonsense_is_refused_with_what_is_known(arguments: list[str], words: str) -> None:
    with pytest.raises(CommandError, match=re.escape(words)):
        call_command("runworker", *arguments)


def test_a_queue_that_only_jobs_name_is_known() -> None:
    one = job("quick", queue="special")
    with pytest.raises(SystemExit) as ended:
        call_command("runworker", "--queues", "special", "--until-idle")
    assert ended.value.code == 0
    assert now(one).status == "completed"


def test_the_help_tells_units_defaults_and_exit_codes(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        call_command("runworker", "--help")
    text = " ".join(capsys.readouterr().out.split())
    for words in (
        "seconds that a drain waits",
        "default: 4",
        "DRAIN_TIMEOUT",
        "exit codes: 0 drained",
        "75 every",
    ):
        assert words in text
