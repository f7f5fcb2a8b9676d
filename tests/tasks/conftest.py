from __future__ import annotations

import gc
from collections.abc import Iterator
from copy import copy
from typing import Any

import pytest

from durable_jobs import service
from durable_jobs.models import Job
from durable_jobs.testing import finish
from tests.tasks.django_api import task_enqueued, task_finished, task_started


@pytest.fixture(autouse=True)
def no_thread_left(no_thread_left: None, caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """The thread of a coroutine's event loop ends when its executor is collected; a logged error holds it."""
    yield
    caplog.get_records("call").clear()
    gc.collect()


@pytest.fixture
def heard() -> Iterator[list[tuple[str, Any, Any]]]:
    """The signals of tasks that were sent: name, sender, result."""
    told: list[tuple[str, Any, Any]] = []
    signals = {"enqueued": task_enqueued, "started": task_started, "finished": task_finished}
    receivers = []
    for name, signal in signals.items():

        def receive(sender: Any, task_result: Any, name: str = name, **kwargs: Any) -> None:
            told.append((name, sender, copy(task_result)))

        signal.connect(receive)
        receivers.append((signal, receive))
    yield told
    for signal, receive in receivers:
        signal.disconnect(receive)


def job_of(result: Any) -> Job:
    job = service.get(result.id)
    assert job is not None
    return job


def run(result: Any) -> Any:
    """Run the task's job to its end, here, and bring the result up to date."""
    finish(job_of(result))
    result.refresh()
    return result
