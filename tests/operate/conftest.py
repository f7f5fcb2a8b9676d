"""What the tests of operation share: their kinds, workers as processes, and the figures that they measure."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from durable_jobs import kinds, service
from durable_jobs.models import Job, JobEvent, WorkerProcess
from tests.operate.kinds import KINDS
from tests.postgres import wait_until
from tests.processes import Process, Processes

PROVE = os.environ.get("DURABLE_JOBS_PROVE") == "1"
"""Long versions: the defaults instead of short leases, a minute instead of seconds (`make prove`)."""

proof = pytest.mark.skipif(not PROVE, reason="for `make prove`: a shorter test holds the same in part")

SHORT = {"DISCOVER": ["operate.kinds"], "POLL": 0.1, "TICK": 0.3, "GRACE": 0.5}
"""Settings of processes that wait for nothing longer than they must."""

_figures: list[str] = []

Start = Callable[..., Process]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if PROVE and "operate" in item.path.parts:
            item.add_marker(pytest.mark.timeout(600))


def pytest_terminal_summary(terminalreporter: Any) -> None:
    if _figures:
        terminalreporter.section("figures")
        for line in _figures:
            terminalreporter.write_line(line)


@pytest.fixture
def figure() -> Callable[[str, float, str], None]:
    """Notes a measured value and its limit for the summary."""

    def note(what: str, seconds: float, limit: str) -> None:
        _figures.append(f"  {what:<78} {seconds:9.3f} s   {limit}")

    return note


@pytest.fixture(autouse=True)
def registered() -> Iterator[None]:
    for kind in KINDS:
        kinds.register(kind)
    yield
    for kind in KINDS:
        kinds.unregister(kind.name)


@pytest.fixture
def start_worker(processes: Processes) -> Iterator[Start]:
    """Starts `runworker` with arguments; keywords are settings. Ends what it has started, children first."""
    started: list[Process] = []

    def start(*arguments: str, environment: dict[str, str] | None = None, **settings: Any) -> Process:
        process = processes.manage(
            "runworker", *arguments, settings={**SHORT, **settings}, environment=environment
        )
        started.append(process)
        return process

    yield start
    for process in started:
        left = children(process)
        if process.running:
            process.popen.kill()
        for pid in left:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        wait_until(lambda left=left: not any(lives(pid) for pid in left), 20, "a child lives on")  # type: ignore[misc]


def children(process: Process) -> list[int]:
    """The processes that this one has started and not yet reaped."""
    try:
        listed = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text()
        return [int(pid) for pid in listed.split()]
    except OSError:
        rows = WorkerProcess.objects.exclude(pid=process.pid)
        return list(rows.values_list("pid", flat=True))


def lives(pid: int) -> bool:
    """Whether the process runs; one that nobody has reaped does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def stands(pid: int) -> bool:
    """Whether every thread of the process has been stopped by SIGSTOP (True where there is no /proc to tell)."""
    try:
        threads = [path.read_text() for path in Path(f"/proc/{pid}/task").glob("*/stat")]
    except OSError:
        return False
    return all(text.rpartition(")")[2].split()[0] == "T" for text in threads)


def start(kind: str, value: Any = None, **options: Any) -> Job:
    return service.start(f"operate.{kind}", value, **options).job


def now(one: Job) -> Job:
    return Job.objects.get(pk=one.pk)


def wait_for(one: Job, status: str, timeout: float = 20) -> Job:
    wait_until(lambda: now(one).status == status, timeout, f"not {status} but {now(one).status}")
    return now(one)


def runs(one: Job) -> list[dict[str, Any]]:
    """What the slices of the job have told, oldest first."""
    events = JobEvent.objects.filter(job_id=one.pk, event="ran").order_by("id")
    return [event.data for event in events]


def begun(one: Job, times: int = 1, timeout: float = 20) -> float:
    """Wait until so many slices have begun; when that was seen."""
    wait_until(lambda: len(runs(one)) >= times, timeout, f"not begun {times} times")
    return time.monotonic()


def holder(one: Job) -> int:
    """The process that holds the job's lease."""
    return int((now(one).lease_owner or "").split(":")[1])


def history(one: Job) -> list[str]:
    return list(JobEvent.objects.filter(job_id=one.pk).order_by("id").values_list("event", flat=True))
