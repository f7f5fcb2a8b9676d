"""`runworker --processes` and `--reload`, with real processes."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import pytest
from django.core.management import CommandError, call_command
from django.db import connection, connections

from durable_jobs import supervisor
from durable_jobs.models import Job, WorkerProcess
from tests.operate.conftest import (
    SHORT,
    Start,
    begun,
    children,
    history,
    holder,
    lives,
    now,
    proof,
    runs,
    stands,
    start,
    wait_for,
)  # fmt: skip
from tests.operate.kinds import TRAP
from tests.postgres import Server, wait_until
from tests.processes import Process, Processes, database_url, process_environment

pytestmark = pytest.mark.django_db(transaction=True)


def all_begun(process: Process, count: int) -> list[int]:
    """Wait until `count` workers are registered; their process ids."""
    wait_until(lambda: WorkerProcess.objects.count() == count or not process.running, 20, process.output)
    assert process.running, process.output
    # A worker is registered a moment before it claims, and the supervisor hears of that a moment later.
    time.sleep(1)
    return list(WorkerProcess.objects.values_list("pid", flat=True))


@pytest.fixture
def start_script(processes: Processes, tmp_path: Path) -> Callable[..., Process]:
    """Starts a script of the project's own that changes the supervisor and calls the command."""

    def start(*lines: str) -> Process:
        script = tmp_path / "script.py"
        imports = [
            "import django",
            "django.setup()",
            "from django.core.management import call_command",
            "from durable_jobs import supervisor",
        ]
        script.write_text("\n".join([*imports, *lines]))
        paths = [str(Path(__file__).parents[2]), *filter(None, [os.environ.get("PYTHONPATH")])]
        environment = {"PYTHONPATH": os.pathsep.join(paths)}
        return processes._start([sys.executable, str(script)], settings=SHORT, environment=environment)

    return start


# --- a killed process


def test_a_killed_process_is_replaced_and_its_job_goes_on_within_two_seconds(
    start_worker: Start, figure: Callable[..., None]
) -> None:
    one = start("lasting", 60)
    process = start_worker("--processes", "2", GRACE=20, TICK=15, POLL=1.0)
    begun(one)
    pids = all_begun(process, 2)
    wait_until(lambda: (now(one).checkpoint or 0) >= 3, 20, "no commits")
    killed, left = holder(one), now(one)
    at = time.monotonic()
    os.kill(killed, signal.SIGKILL)
    took = begun(one, 2) - at
    figure("supervised: kill -9 to resumed", took, "< 2 s (lease 60 s, grace 20 s, tick 15 s)")
    assert took < 2
    first, second = runs(one)
    assert first["pid"] == killed and second["pid"] != killed
    assert second["from"] >= left.checkpoint
    assert "orphaned" in history(one)
    wait_until(lambda: WorkerProcess.objects.count() == 2, 20, "not replaced")
    fresh = set(WorkerProcess.objects.values_list("pid", flat=True)) - set(pids)
    assert len(fresh) == 1 and not lives(killed)
    process.terminate()
    assert process.wait(15) == 0, process.output
    assert not WorkerProcess.objects.exists()
    assert now(one).status == "pending"


@proof
def test_the_only_process_is_replaced_at_once(start_worker: Start, figure: Callable[..., None]) -> None:
    one = start("lasting", 60)
    process = start_worker("--processes", "1", GRACE=20, TICK=15)
    begun(one)
    at = time.monotonic()
    os.kill(holder(one), signal.SIGKILL)
    took = begun(one, 2) - at
    figure("supervised, a single process: kill -9 to resumed by its replacement", took, "a start of Django")
    # Its lease of a minute would have it resumed much later.
    assert took < 30
    process.terminate()
    assert process.wait(15) == 0, process.output


def test_a_process_whose_threads_all_hang_is_replaced_at_once(start_worker: Start) -> None:
    """C036."""
    hung = start("hang")
    process = start_worker("--processes", "1", "--concurrency", "1", GRACE=20, TICK=15)
    begun(hung)
    pid = holder(hung)
    behind = start("quick")
    wait_for(behind, "completed")
    assert "code=75" in process.output
    assert runs(behind)[0]["pid"] != pid
    assert (wait_for(hung, "failed").error_code, now(hung).parked_at is not None) == ("orphaned", True)
    process.terminate()
    assert process.wait(15) == 0, process.output


def test_what_the_server_commits_after_the_death_is_repaired_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """A claim may commit after its client has gone; the first look then finds nothing."""
    from tests.slices import claim

    monkeypatch.setattr(supervisor, "REPAIR_AT", (0.0, 0.3, 0.6))
    one = start("lasting", 1)
    repairs = supervisor.Repairs()
    repairs.add("dead:1")
    time.sleep(0.15)
    claim(one, "dead:1")
    wait_until(lambda: now(one).status == "pending", 20, "left running")
    repairs.finish()
    assert history(one) == ["orphaned"]


def test_a_process_that_dies_in_an_outage_is_repaired_after_it(
    start_worker: Start, postgres_server: Server
) -> None:
    """Meanwhile no process can start; that is no reason to give up."""
    one = start("lasting", 60)
    process = start_worker("--processes", "1", GRACE=20, TICK=15)
    begun(one)
    pid = holder(one)
    connections.close_all()
    postgres_server.stop("fast")
    os.kill(pid, signal.SIGKILL)
    process.wait_for_output("does not answer")
    time.sleep(1)
    postgres_server.start()
    begun(one, 2)
    assert process.output.count("database_unavailable part=supervisor") == 1
    # The checks are the supervisor's: each process would repeat their warnings.
    assert process.output.count("System check identified") == 1
    process.terminate()
    assert process.wait(15) == 0, process.output


# --- signals


@pytest.mark.parametrize(
    ("number", "whole_group"),
    [
        (signal.SIGTERM, False),
        (signal.SIGINT, True),
        pytest.param(signal.SIGTERM, True, marks=proof),
    ],
)
def test_a_signal_drains_every_process_once(
    tmp_path: Path, number: signal.Signals, whole_group: bool
) -> None:
    """C066."""
    jobs = [start("lasting", 60) for _ in range(2)]
    output = tmp_path / "output"
    with output.open("wb") as file:
        process = subprocess.Popen(
            [sys.executable, "-m", "django", "runworker", "--processes", "2", "--concurrency", "1"],
            env=process_environment(SHORT),
            stdout=file,
            stderr=file,
            start_new_session=True,
        )
    try:
        for one in jobs:
            begun(one)
        (os.killpg if whole_group else os.kill)(process.pid, number)
        assert process.wait(15) == 0, output.read_text()
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    assert {(now(one).status, now(one).interruptions, now(one).redrives) for one in jobs} == {
        ("pending", 1, 0)
    }
    assert not WorkerProcess.objects.exists()


def test_a_second_signal_leaves_at_once_and_takes_the_processes_along(start_worker: Start) -> None:
    one = start("nap", 60)
    process = start_worker("--processes", "2", "--drain-timeout", "60")
    begun(one)
    pids = all_begun(process, 2)
    process.terminate()
    process.wait_for_output("draining 2 processes")
    time.sleep(0.7)
    process.terminate()
    at = time.monotonic()
    assert process.wait(20) == 128 + signal.SIGTERM, process.output
    assert time.monotonic() - at < 1
    wait_until(lambda: not any(lives(pid) for pid in pids), 20, "a process lives on")


def test_a_step_that_blocks_in_c_and_keeps_the_interpreter_cannot_hold_up_a_stop(start_worker: Start) -> None:
    """C036, C067: such a process hears no signal itself and renews no lease; its supervisor ends it."""
    one = start("deaf", 60)
    process = start_worker("--processes", "1", "--concurrency", "1", "--drain-timeout", "60")
    begun(one)
    pid = holder(one)
    process.terminate()
    process.wait_for_output("draining 1 process")
    # Two signals within half a second count as one.
    time.sleep(0.7)
    process.terminate()
    assert process.wait(20) == 128 + signal.SIGTERM, process.output
    wait_until(lambda: not lives(pid), 20, "it lives on")


def test_a_process_that_does_not_end_is_killed_after_the_drain(
    start_worker: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = start("patient", 60)
    process = start_worker("--processes", "1", "--drain-timeout", "0.5")
    begun(one)
    pid = holder(one)
    os.kill(pid, signal.SIGSTOP)
    # The kernel stops its threads one by one; until the last of them stands, the process may still drain.
    wait_until(lambda: stands(pid), 20, "it goes on in spite of SIGSTOP")
    process.terminate()
    assert process.wait(15) == 1, process.output
    assert "does not end: killing it" in process.output
    assert (now(one).status, now(one).redrives) == ("pending", 1)


@pytest.mark.parametrize(
    "without",
    [
        "supervisor.die_with_parent = lambda: None",
        pytest.param(
            "supervisor.Line._listen = lambda self, stop: None",
            marks=[
                pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells of a parent's end"),
                proof,
            ],
        ),
    ],
    ids=["socket alone", "kernel alone"],
)
def test_either_of_two_ways_tells_that_the_supervisor_is_gone(
    start_script: Callable[..., Process], without: str
) -> None:
    one = start("patient", 60)
    process = start_script(without, "call_command('runworker', processes=2)")
    begun(one)
    pids = all_begun(process, 2)
    process.kill()
    wait_until(lambda: not any(lives(pid) for pid in pids), 20, "a process lives on")
    assert now(one).status == "pending"


def test_as_process_one_of_a_container_it_reaps_and_drains(tmp_path: Path) -> None:
    unshare = shutil.which("unshare")
    if (
        unshare is None
        or subprocess.run([unshare, "--pid", "--fork", "true"], capture_output=True).returncode
    ):
        pytest.skip("no new process namespace can be made here")
    one = start("patient", 60)
    command = [unshare, "--pid", "--fork", "--kill-child", sys.executable, "-m", "django", "runworker"]
    environment = process_environment(SHORT)
    environment.pop("DURABLE_JOBS_TEST_PARENT")
    output = tmp_path / "output"
    with output.open("wb") as file:
        outside = subprocess.Popen([*command, "--processes", "2"], env=environment, stdout=file, stderr=file)
    try:
        begun(one)
        wait_until(lambda: WorkerProcess.objects.count() == 2, 20, "not begun")

        def below(pid: int) -> list[int]:
            return [int(one) for one in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]

        (inside,) = below(outside.pid)
        # A process whose parent ends becomes a child of process 1.
        subprocess.run(
            ["nsenter", "--pid", "--target", str(inside), "sh", "-c", "sleep 0.5 & exit"], check=True
        )
        one_of_them = below(inside)[0]
        os.kill(one_of_them, signal.SIGKILL)
        wait_until(lambda: one_of_them not in below(inside), 20, "not reaped")
        wait_until(lambda: len(below(inside)) == 2, 20, "a zombie is left, or nobody replaced")
        os.kill(inside, signal.SIGTERM)
        assert outside.wait(15) == 0, output.read_text()
    finally:
        outside.kill()
        outside.wait()
    assert now(one).status == "pending"


# --- ends and limits


def test_until_idle_ends_when_every_process_is_idle(processes: Processes) -> None:
    jobs = [start("quick") for _ in range(20)]
    process = processes.manage("durable_jobs", "worker", "--processes", "2", "--until-idle", settings=SHORT)
    assert process.wait(30) == 0, process.output
    assert {now(one).status for one in jobs} == {"completed"}


def test_delays_grow_and_have_an_end() -> None:
    assert [supervisor.delay_after(ends) for ends in range(9)] == [0, 0, 1, 2, 4, 8, 16, 30, 30]
    assert supervisor.delay_after(10_000) == 30


class Ended:
    """A process that has ended in this way."""

    pid = 1

    def __init__(self, code: int) -> None:
        self.returncode = code


def decided(code: int, times: int) -> tuple[supervisor.Supervisor, supervisor.Place]:
    """What a supervisor, one of whose processes has begun to claim, makes of so many quick ends."""
    deciding = supervisor.Supervisor(1)
    deciding._proved = True
    place = supervisor.Place(1)
    for _ in range(times):
        here, there = socket.socketpair()
        with here, there:
            child = supervisor.Child(Ended(code), here, time.monotonic(), ready=True)  # type: ignore[arg-type]
            deciding._decide(place, child)
    return deciding, place


@pytest.mark.parametrize(
    ("code", "times", "given_up", "least", "most"),
    [
        (75, 100, False, 0, 0),
        (-9, 1, False, 0, 0),
        (-9, 2, False, 0.5, 1),
        (1, 7, False, 15, 30),
        (1, 8, True, 0, 0),
        (4, 100, False, 8, 30),
    ],
)
def test_each_end_has_its_delay(code: int, times: int, given_up: bool, least: float, most: float) -> None:
    """75 at once, always; without a database for as long as it takes; anything else ever later, then never."""
    deciding, place = decided(code, times)
    assert (deciding._code == supervisor.EXIT_GAVE_UP) is given_up
    if not given_up:
        assert least <= place.start_at - time.monotonic() + 0.1 <= most + 0.1


def test_it_gives_up_after_many_quick_ends_and_drains_the_others(
    start_script: Callable[..., Process],
) -> None:
    one = start("lasting", 60)
    process = start_script(
        "supervisor.QUICK_ENDS, supervisor.LONGEST_DELAY = 3, 0.1",
        "call_command('runworker', processes=2, concurrency=1)",
    )
    begun(one)
    for _ in range(3):
        pids = all_begun(process, 2)
        (other,) = [pid for pid in pids if pid != holder(one)]
        os.kill(other, signal.SIGKILL)
        wait_until(lambda other=other: not WorkerProcess.objects.filter(pid=other).exists(), 20, "not reaped")  # type: ignore[misc]
    assert process.wait(15) == supervisor.EXIT_GAVE_UP, process.output
    lines = [line for line in process.output.splitlines() if line.startswith("Giving up")]
    assert lines == [
        "Giving up: 3 processes in a row have ended within 60 s of their start;"
        " the last one was ended by SIGKILL."
    ]
    assert (now(one).status, now(one).interruptions) == ("pending", 1)


# --- starting


def test_no_process_uses_a_connection_of_another_and_the_supervisor_has_none(
    start_worker: Start, tmp_path: Path
) -> None:
    """C064: Dead jobs are repaired and a process is replaced before the jobs run."""
    dead = start("lasting", 60)
    environment = {}
    if connection.vendor == "postgresql" and find_spec("psycopg_pool"):
        pooled = "from tests.job_settings import *\nDATABASES['default']['OPTIONS'] = {'pool': True}\n"
        (tmp_path / "pooled.py").write_text(pooled)
        environment = {
            "DJANGO_SETTINGS_MODULE": "pooled",
            "PYTHONPATH": os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])]),
        }
    process = start_worker("--processes", "2", "--queues", "operate", environment=environment)
    begun(dead)
    all_begun(process, 2)
    assert not connected(process.pid)
    os.kill(holder(dead), signal.SIGKILL)
    begun(dead, 2)
    all_begun(process, 2)
    jobs = [start("quick") for _ in range(20)]
    for one in jobs:
        assert wait_for(one, "completed").attempts == 1
    wait_until(lambda: not connected(process.pid), 20, f"the supervisor stays connected: {process.output}")
    process.terminate()
    assert process.wait(15) == 0, process.output


def connected(pid: int) -> bool:
    """Whether the process has the tests' database open."""
    targets = []
    for path in Path(f"/proc/{pid}/fd").iterdir():
        # A descriptor may be closed between the look at the folder and the look at it.
        with contextlib.suppress(OSError):
            targets.append(os.readlink(path))
    if connection.vendor == "sqlite":
        return any(str(connection.settings_dict["NAME"]) in target for target in targets)
    port = f":{int(connection.settings_dict['PORT']):04X}"
    inodes = {target[8:-1] for target in targets if target.startswith("socket:[")}
    rows = [line.split() for line in Path(f"/proc/{pid}/net/tcp").read_text().splitlines()[1:]]
    return any(row[2].endswith(port) and row[9] in inodes for row in rows)


def ends_with_one_clear_line(process: Process, code: int, words: str) -> None:
    # Two interpreters start one after the other, on a machine that may be busy.
    assert process.wait(60) == code, process.output
    said = [line for line in process.output.splitlines() if re.search(words, line)]
    assert len(said) == 1, process.output
    assert process.output.count("process_started") == 1


def test_missing_tables_end_it_with_their_code(start_worker: Start, tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path / 'empty.sqlite3'}"
    process = start_worker("--processes", "4", environment={"DATABASE_URL": url})
    ends_with_one_clear_line(process, 3, "manage.py migrate")


def test_a_wrong_password_ends_it_with_its_code(start_worker: Start) -> None:
    url = "sqlite:////nowhere/at/all.sqlite3"
    if connection.vendor == "postgresql":
        url = re.sub(r"(//[^:]+:)[^@]+@", r"\1wrong@", database_url())
    process = start_worker("--processes", "4", environment={"DATABASE_URL": url})
    ends_with_one_clear_line(process, 4, "does not answer")


def test_an_error_on_import_ends_it_at_once(start_worker: Start, tmp_path: Path) -> None:
    trap = tmp_path / "trap"
    trap.write_text("raise")
    process = start_worker("--processes", "4", environment={TRAP: str(trap)})
    ends_with_one_clear_line(process, 1, "The first process ended with exit code 1 before it began")
    assert process.output.count("ImportError: a module that is not there") == 1


def test_a_hanging_import_ends_it_when_the_start_takes_too_long(start_worker: Start, tmp_path: Path) -> None:
    """C070."""
    trap = tmp_path / "trap"
    trap.write_text("hang")
    process = start_worker("--processes", "4", environment={TRAP: str(trap)}, START_TIMEOUT=2)
    ends_with_one_clear_line(
        process, supervisor.EXIT_GAVE_UP, "The first process was killed, as it did not begin"
    )


def test_a_replacement_that_hangs_on_import_is_replaced(start_worker: Start, tmp_path: Path) -> None:
    """C070."""
    trap = tmp_path / "trap"
    process = start_worker("--processes", "1", environment={TRAP: str(trap)}, START_TIMEOUT=8)
    (pid,) = all_begun(process, 1)
    trap.write_text("hang")
    os.kill(pid, signal.SIGKILL)
    process.wait_for_output("has not begun to claim within 8 s")
    trap.unlink()
    one = start("quick")
    wait_for(one, "completed", 60)
    process.terminate()
    assert process.wait(15) == 0, process.output


def test_outside_of_the_main_thread_it_is_refused_in_words() -> None:
    refusals = []

    def call() -> None:
        try:
            call_command("runworker", processes=2)
        except CommandError as error:
            refusals.append(str(error))

    thread = threading.Thread(target=call)
    thread.start()
    thread.join(10)
    assert refusals and "main thread" in refusals[0]


# --- reloading


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A folder with an app whose kind may change."""
    app = tmp_path / "changing"
    app.mkdir()
    (app / "__init__.py").write_text("")
    (app / "settings.py").write_text(
        "from tests.job_settings import *\nINSTALLED_APPS = [*INSTALLED_APPS, 'changing']\n"
    )
    write_kind(app, "first")
    return app


def write_kind(app: Path, result: str) -> None:
    path = app / "jobs.py"
    path.write_text(
        textwrap.dedent(f"""
        from durable_jobs.kinds import Done, Kind, Yield, register
        @register
        class Changing(Kind):
            name = "changing"
            def step(self, ctx):
                ctx.record("ran")
                while ctx.input and not ctx.checkpoint:
                    if ctx.should_yield():
                        ctx.save_checkpoint(1)
                        return Yield()
                    ctx.stop.wait(0.05)
                return Done("{result}")
        """)
    )
    later = time.time() + 5
    os.utime(path, (later, later))


def test_reload_drains_and_starts_again_when_code_changes(
    processes: Processes, project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """C069."""
    from durable_jobs import service
    from tests.slices import made

    made(name="changing")
    process = processes.manage(
        "runworker",
        "--reload",
        settings={**SHORT, "DISCOVER": ["jobs"]},
        environment={"DJANGO_SETTINGS_MODULE": "changing.settings", "PYTHONPATH": str(project.parent)},
    )
    waiting = service.start("changing", True).job
    first = service.start("changing", False).job
    assert wait_for(first, "completed").result == "first"
    begun(waiting)
    time.sleep(1.2)
    write_kind(project, "second")
    assert wait_for(waiting, "completed").result == "second"
    assert now(waiting).interruptions == 1
    second = service.start("changing", False).job
    assert wait_for(second, "completed").result == "second"
    left = children(process)
    process.send(signal.SIGINT)
    assert process.wait(20) == 0, process.output
    assert not any(lives(pid) for pid in left)
    assert Job.objects.filter(status="running").count() == 0
