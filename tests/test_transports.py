"""Every transport keeps to the same suite; the memory transport also fails like a broker."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from durable_jobs import transports
from durable_jobs.consumer import Consumer
from durable_jobs.testing.transports import QUEUE, TransportSuite
from durable_jobs.transports.memory import Faults, MemoryTransport
from durable_jobs.worker import Worker

pytestmark = pytest.mark.django_db(transaction=True)

SETTINGS = {"POLL": 0.1, "TICK": 0.3, "GRACE": 0.5, "DRAIN_TIMEOUT": 10}


@pytest.fixture(autouse=True)
def quick(settings: Any) -> None:
    settings.DURABLE_JOBS = SETTINGS


class TestDatabase(TransportSuite):
    @contextmanager
    def working(self) -> Iterator[None]:
        worker = Worker(queues=[QUEUE], concurrency=3)
        thread = threading.Thread(target=worker.run)
        thread.start()
        try:
            yield
        finally:
            worker.stop()
            thread.join(20)
        assert not thread.is_alive() and not worker.has_threads_left


class TestMemory(TransportSuite):
    faults: dict[str, Any] = {}

    def sending(self) -> Any:
        self.transport = MemoryTransport(Faults(**self.faults), threads=3)
        return transports.use(self.transport)

    @contextmanager
    def working(self) -> Iterator[None]:
        consumer = Consumer(self.transport, queues=[QUEUE], concurrency=3)
        consumer.start()
        self.transport.bind(consumer.handle, queues=[QUEUE])
        began = time.monotonic()
        try:
            yield
        finally:
            began = time.monotonic()
            consumer.drain()
            self.transport.close(10)
            consumer.close()
        assert time.monotonic() - began < 15

    @contextmanager
    def broken(self) -> Iterator[None]:
        self.transport.faults.down = True
        yield
        self.transport.faults.down = False

    def lose_messages(self) -> None:
        assert self.transport.flush() > 0

    def is_quiet(self) -> bool:
        return self.transport.waiting == 0


class TestMemoryWithFaults(TestMemory):
    """Lost, late, twice and out of order: the same suite."""

    faults = {"lose": 0.3, "duplicate": 0.3, "delay": 0.1, "reorder": 0.3, "seed": 7}

    def lose_messages(self) -> None:
        self.transport.flush()
