"""The same code with the database transport and with one that has a broker (C124)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from django.db import transaction

from durable_jobs import transports
from durable_jobs.consumer import Consumer
from durable_jobs.transports import State
from durable_jobs.transports.memory import MemoryTransport
from tests.postgres import wait_until
from tests.tasks import functions
from tests.tasks.conftest import job_of
from tests.tasks.django_api import TaskResultDoesNotExist

pytestmark = pytest.mark.django_db(transaction=True)


@pytest.fixture
def memory() -> Iterator[MemoryTransport]:
    transport = MemoryTransport()
    with transports.use(transport):
        yield transport
    transport.close(5)


def test_a_message_follows_the_commit_and_a_rollback_sends_none(memory: MemoryTransport) -> None:
    with pytest.raises(functions.Trouble), transaction.atomic():
        undone = functions.add.enqueue(1)
        assert memory.waiting == 0
        raise functions.Trouble
    with pytest.raises(TaskResultDoesNotExist):
        functions.add.get_result(undone.id)
    assert memory.waiting == 0

    with transaction.atomic():
        result = functions.add.enqueue(1)
        assert functions.add.get_result(result.id).status == "READY"
        assert memory.waiting == 0
    assert memory.get_state(job_of(result)) == State.WAITING


def test_messages_run_tasks(memory: MemoryTransport) -> None:
    results = [functions.add.enqueue(1), functions.fail.enqueue("x"), functions.third_time.enqueue()]
    consumer = Consumer(memory, queues=["default"])
    consumer.start()
    memory.bind(consumer.handle)

    def all_ended() -> bool:
        for result in results:
            result.refresh()
        return all(result.is_finished for result in results)

    try:
        wait_until(all_ended, 30, "not run")
    finally:
        memory.close(5)
        consumer.close()
    told: list[Any] = [(str(result.status), result.attempts) for result in results]
    assert told == [("SUCCESSFUL", 1), ("FAILED", 1), ("SUCCESSFUL", 3)]
