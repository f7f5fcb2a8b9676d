"""`manage.py demo` and `serve`, as a person runs them."""

from __future__ import annotations

import os
import re
import signal
import urllib.request
from pathlib import Path

import pytest

from project.demo.models import Airport, ImportRun
from tests.postgres import alive, free_port, wait_until
from tests.processes import Process, Processes

QUICK = {
    "DURABLE_JOBS_GRACE": "0.3",
    "DURABLE_JOBS_TICK": "0.2",
    "DEMO_LEASE_SECONDS": "1",
    "DEMO_BATCH_SIZE": "50",
}


def demo(processes: Processes, folder: Path) -> Process:
    environment = {**QUICK, "DJANGO_SETTINGS_MODULE": "project.settings", "DEMO_FOLDER": str(folder / "demo")}
    return processes.manage("demo", "--airports", "2000", environment=environment)


def pids(process: Process) -> list[int]:
    return [int(found) for found in re.findall(r"process (\d+)", process.output)]


def wait_for_end(started: list[int]) -> None:
    assert started
    wait_until(lambda: not any(alive(pid) for pid in started), 15, f"Of {started} some are left.")


def test_the_demo_proves_what_it_prints_also_after_one_that_was_killed(
    processes: Processes, tmp_path: Path
) -> None:
    killed = demo(processes, tmp_path)
    killed.wait_for_output("of 2,000 rows")
    killed.kill()
    wait_for_end(pids(killed))
    left = ImportRun.objects.get()

    shown = demo(processes, tmp_path)
    assert shown.wait(90) == 0, shown.output
    assert "kill -9" in shown.output
    assert "2,000 of 2,000" in shown.output
    assert "NO" not in shown.output
    assert not ImportRun.objects.filter(pk=left.pk).exists()
    assert Airport.objects.count() == 2000
    wait_for_end(pids(shown))


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_demo_that_is_ended_leaves_no_worker(
    processes: Processes, tmp_path: Path, number: signal.Signals, code: int
) -> None:
    shown = demo(processes, tmp_path)
    shown.wait_for_output("of 2,000 rows")
    shown.send(number)
    assert shown.wait() == code, shown.output
    assert not any(alive(pid) for pid in pids(shown))


def test_two_demos_do_not_share_a_folder(processes: Processes, tmp_path: Path) -> None:
    first = demo(processes, tmp_path)
    first.wait_for_output("Worker 1")
    # It could be through before the second one has started.
    first.freeze()
    try:
        second = demo(processes, tmp_path)
        assert second.wait() == 1
        assert "Another demo is running" in second.output
    finally:
        # Its worker goes on writing until it notices, while the tables are to be emptied.
        first.kill()
        wait_for_end(pids(first))


def test_serve_prints_the_login_replaces_a_killed_worker_and_ends_both(
    processes: Processes, tmp_path: Path
) -> None:
    port = free_port()
    site = processes.manage("serve", str(port), environment={"DJANGO_SETTINGS_MODULE": "project.settings"})
    site.wait_for_output("password demo")
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/", timeout=10) as response:
        assert b"There is no import yet." in response.read()
    worker = int(re.findall(r"Worker\s+process (\d+)", site.output)[0])
    site.wait_for_output("worker_started")
    os.kill(worker, signal.SIGKILL)
    site.wait_for_output("has ended: SIGKILL")
    heir = int(re.findall(r"Worker (\d+) starts", site.output)[0])
    site.terminate()
    assert site.wait() == 143
    assert not alive(heir)
    with pytest.raises(OSError):
        urllib.request.urlopen(f"http://127.0.0.1:{port}/", timeout=2)
