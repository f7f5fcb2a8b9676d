"""Brokers for the session, and Celery workers that know them."""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from durable_jobs import transports
from durable_jobs.testing.transports import QUEUE
from tests.brokers.app import BROKER, OPTIONS, app
from tests.brokers.broker import RabbitMQ, Redis
from tests.processes import Process, Processes

SETTINGS = {"TRANSPORT": "celery", "TICK": 0.3, "GRACE": 0.5, "DISCOVER": ["brokers.kinds"]}
SHUTDOWN_SECONDS = 50
"""A child whose last result met the shutdown waits 30 s for Celery's main process to have read it."""


@pytest.fixture(scope="session")
def redis_server() -> Iterator[Redis]:
    server = Redis()
    yield server
    server.close()


@pytest.fixture(scope="session")
def rabbitmq_server() -> Iterator[RabbitMQ]:
    server = RabbitMQ()
    yield server
    server.close()


@pytest.fixture
def broker(redis_server: Redis, settings: Any) -> Iterator[Redis]:
    """Redis, empty, as the broker of this process."""
    if not redis_server.answers():
        redis_server.start()
    redis_server.lose_messages()
    settings.DURABLE_JOBS = SETTINGS
    with publishing(redis_server.url):
        yield redis_server


class publishing:
    """In this block the app of this process sends to the broker."""

    def __init__(self, url: str, options: dict[str, Any] | None = None) -> None:
        self.url, self.options = url, options or {}

    def __enter__(self) -> None:
        app.set_default()
        app.conf.update(broker_url=self.url, broker_transport_options=self.options)

    def __exit__(self, *error: Any) -> None:
        transports.current().close()
        app.conf.update(broker_url="redis://127.0.0.1:1/0", broker_transport_options={})


class Fleet:
    """Celery workers on one broker."""

    def __init__(self, processes: Processes, url: str) -> None:
        self._processes, self._url = processes, url
        self._count = 0
        self._last: tuple[Process, tuple[Any, ...], dict[str, Any]] | None = None

    def start(
        self,
        pool: str = "prefork",
        concurrency: int = 2,
        *arguments: str,
        options: dict[str, Any] | None = None,
        environment: dict[str, str] | None = None,
        **settings: Any,
    ) -> Process:
        """Start a worker and wait until it is ready."""
        self._count += 1
        command = [
            sys.executable, "-m", "celery", "-A", "tests.brokers.app", "worker", "-P", pool, "-c", str(concurrency),
            "-Q", QUEUE, "-n", f"worker{self._count}@localhost", "-l", "INFO", "--without-gossip",
            "--without-mingle", "--without-heartbeat", *arguments,
        ]  # fmt: skip
        worker = self._processes._start(
            command,
            settings={**SETTINGS, **settings},
            environment={BROKER: self._url, OPTIONS: json.dumps(options or {}), **(environment or {})},
        )
        worker.wait_for_output("ready.", 60)
        given = {"options": options, "environment": environment, **settings}
        self._last = worker, (pool, concurrency, *arguments), given
        return worker

    def replace_the_dead(self) -> None:
        """Start the last worker anew if it has ended."""
        if self._last is not None and not self._last[0].running:
            _, arguments, given = self._last
            self.start(*arguments, **given)


@pytest.fixture
def fleet(processes: Processes, broker: Redis) -> Fleet:
    return Fleet(processes, broker.url)


@pytest.fixture(scope="class")
def lasting_processes() -> Iterator[Processes]:
    """Processes that live as long as the tests of a class."""
    with tempfile.TemporaryDirectory() as folder:
        started = Processes(Path(folder))
        yield started
        started.end()
