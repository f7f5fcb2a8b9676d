"""Celery keeps to the suite of every transport: on Redis with both pools, and on RabbitMQ."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, ClassVar

import pytest

from durable_jobs import transports
from durable_jobs.testing.transports import QUEUE, TransportSuite
from tests.brokers.app import app
from tests.brokers.broker import RabbitMQ, Redis
from tests.brokers.conftest import SETTINGS, SHUTDOWN_SECONDS, Fleet, publishing
from tests.processes import Process, Processes

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.timeout(240)]


class CelerySuite(TransportSuite):
    """One worker is kept for the tests of a class; those that need none outside their blocks end it first."""

    pool: ClassVar[str] = "prefork"
    lasting: ClassVar[Process | None] = None
    fleet: Fleet

    @contextmanager
    def working(self) -> Iterator[None]:
        if type(self).lasting is None:
            type(self).lasting = self.fleet.start(self.pool)
        yield

    @contextmanager
    def working_alone(self) -> Iterator[None]:
        worker = self.fleet.start(self.pool)
        try:
            yield
        finally:
            worker.terminate()
            assert worker.wait(SHUTDOWN_SECONDS) == 0, worker.output

    def end_lasting(self) -> None:
        worker, type(self).lasting = type(self).lasting, None
        if worker is not None:
            worker.terminate()
            worker.wait(SHUTDOWN_SECONDS)


ALONE = ("test_a_cancelled_delivery", "test_a_lost_message", "test_a_drain_hands")


class TestRedisPrefork(CelerySuite):
    @pytest.fixture(autouse=True)
    def prepared(self, request: pytest.FixtureRequest, broker: Redis, lasting_processes: Processes) -> None:
        self.server = broker
        self.fleet = Fleet(lasting_processes, broker.url)
        if request.node.name.startswith(ALONE):
            self.end_lasting()

    def lose_messages(self) -> None:
        self.server.lose_messages()

    def is_quiet(self) -> bool:
        return self.server.is_quiet()

    @contextmanager
    def broken(self) -> Iterator[None]:
        self.server.stop()
        yield
        self.server.start()


class TestRedisThreads(TestRedisPrefork):
    pool = "threads"
    lasting = None


class TestRabbitMQ(CelerySuite):
    lasting = None

    @pytest.fixture(autouse=True)
    def prepared(
        self,
        request: pytest.FixtureRequest,
        rabbitmq_server: RabbitMQ,
        lasting_processes: Processes,
        settings: Any,
    ) -> Iterator[None]:
        self.server = rabbitmq_server
        settings.DURABLE_JOBS = SETTINGS
        self.fleet = Fleet(lasting_processes, rabbitmq_server.url)
        if request.node.name.startswith(ALONE):
            self.end_lasting()
        with publishing(rabbitmq_server.url):
            yield

    def lose_messages(self) -> None:
        with app.connection_for_write() as connection:
            queue = app.amqp.queues[QUEUE].bind(connection.default_channel)
            queue.declare()
            queue.purge()

    def is_quiet(self) -> bool:
        with app.connection_for_write() as connection:
            declared = app.amqp.queues[QUEUE].bind(connection.default_channel).queue_declare(passive=True)
            return int(declared.message_count) == 0

    @contextmanager
    def broken(self) -> Iterator[None]:
        self.server.stop()
        yield
        self.server.start()


def test_the_transport_is_celery(broker: Redis) -> None:
    transport = transports.current()
    assert (transport.name, transport.transactional, transport.loses_messages) == ("celery", False, True)
