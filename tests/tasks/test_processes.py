"""Tasks run by workers that are processes, killed among them."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from durable_jobs import service
from tests.postgres import wait_until
from tests.processes import Process, Processes
from tests.tasks import functions
from tests.tasks.django_api import TaskResultStatus
from tests.tasks.test_contract import store_task

pytestmark = pytest.mark.django_db(transaction=True)

SHORT = {"POLL": 0.05, "TICK": 0.2, "GRACE": 0.3}
WORKER = {"settings": SHORT, "environment": {"DJANGO_SETTINGS_MODULE": "tests.tasks.settings"}}


@pytest.fixture
def worker(processes: Processes) -> Callable[..., Process]:
    return lambda *options: processes.manage("runworker", *options, **WORKER)


def ended(result: Any) -> bool:
    result.refresh()
    return bool(result.is_finished)


def test_a_worker_runs_tasks_and_goes_on_after_those_that_fail(
    worker: Callable[..., Process], tmp_path: Path
) -> None:
    """A stored task that cannot be imported fails alone; one that ends its process does so, too."""
    notes = tmp_path / "notes"
    bad = store_task("tests.gone.task")
    results = [
        functions.exit_process.enqueue(),
        functions.fail.enqueue("x"),
        functions.add_async.enqueue(1),
        functions.note.using(priority=-5).enqueue(str(notes), "low"),
        functions.note.using(priority=5).enqueue(str(notes), "high"),
    ]

    process = worker("--concurrency", "1")
    wait_until(lambda: all(ended(result) for result in results), 30, process.output)

    assert [result.status for result in results] == ["FAILED", "FAILED", *["SUCCESSFUL"] * 3]
    assert notes.read_text() == "high\nlow\n"
    tried = service.get(bad.id)
    assert tried is not None and tried.attempts >= 1 and tried.error_code == "task_not_loaded"
    assert results[2].return_value == 2
    assert len({worker_id for result in results for worker_id in result.worker_ids}) == 1
    process.terminate()
    assert process.wait() == 0


def test_a_task_whose_worker_was_killed_waits_for_a_person(
    worker: Callable[..., Process], tmp_path: Path
) -> None:
    """It may have had its effect: Django's contract knows no second run."""
    mark = tmp_path / "mark"
    result = functions.sleep_noted.enqueue(str(mark))
    kill_during(result, mark, worker())

    second = worker()
    let_the_lease_end(result)
    wait_until(lambda: ended(result), 30, second.output)

    assert (result.status, result.attempts) == (TaskResultStatus.FAILED, 1)
    assert result.errors[0].exception_class.__name__ == "WorkerLost"
    job = service.get(result.id)
    assert job is not None and job.parked_at is not None


def test_a_task_of_a_kind_that_redrives_runs_again(worker: Callable[..., Process], tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    result = functions.sleep_once.enqueue(str(mark))
    kill_during(result, mark, worker())

    second = worker()
    wait_until(lambda: ended(result), 30, second.output)

    assert (result.status, result.return_value, result.attempts) == ("SUCCESSFUL", "done", 2)
    assert [error.exception_class.__name__ for error in result.errors] == ["WorkerLost"]
    first, last = result.worker_ids
    assert first != last


def kill_during(result: Any, mark: Path, process: Process) -> None:
    wait_until(lambda: mark.exists() and mark.read_text() != "", 30, process.output)
    result.refresh()
    assert (result.status, result.attempts) == (TaskResultStatus.RUNNING, 1)
    os.kill(int(mark.read_text()), signal.SIGKILL)
    process.wait()


def let_the_lease_end(result: Any) -> None:
    """Let the lease of a dead worker run out now instead of in a minute."""
    from django.db import connection

    with connection.cursor() as cursor:
        past = (
            "now() - interval '5 seconds'" if connection.vendor == "postgresql" else "'2026-01-01 00:00:00'"
        )
        key = result.id if connection.vendor == "postgresql" else result.id.replace("-", "")
        cursor.execute(f"UPDATE durable_jobs_job SET lease_expires_at = {past} WHERE id = %s", [key])
