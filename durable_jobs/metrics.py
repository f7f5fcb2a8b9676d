"""Numbers for Prometheus, by its official client (extra `prometheus`).

`JobsCollector` reads the tables when it is scraped. `observe` counts the slices of this process. `serve` does both
for a worker: `runworker --metrics 9808`.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Final

from django.db import Error, connections
from prometheus_client import REGISTRY, CollectorRegistry, Counter, Gauge, Histogram, start_http_server
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from durable_jobs import database, overview, runner
from durable_jobs.kinds import Kind
from durable_jobs.models import Job
from durable_jobs.runner import SliceResult

FRESH: Final = 5.0
"""Seconds for which what was read from the tables is told again: several scrapers cost as much as one."""
SLICE_BUCKETS: Final = (0.005, 0.02, 0.1, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)


class JobsCollector(Collector):
    """What the tables say: jobs by state, queues, workers, pauses, health. Numbers are exact up to 10,000.

    The same from every process: take `max`, not `sum`. While the database does not answer, only
    `durable_jobs_healthy{check="database"}` is there, as 0.
    """

    def __init__(self) -> None:
        self._guard = threading.Lock()
        self._read_at = -FRESH
        self._families: list[GaugeMetricFamily] = []

    def describe(self) -> Iterable[GaugeMetricFamily]:
        """Nothing: being registered must not ask the database."""
        return []

    def collect(self) -> Iterator[GaugeMetricFamily]:
        with self._guard:
            if time.monotonic() - self._read_at >= FRESH:
                self._families = list(_read())
                self._read_at = time.monotonic()
            families = self._families
        yield from families


def _read() -> Iterator[GaugeMetricFamily]:
    healthy = GaugeMetricFamily(
        "durable_jobs_healthy", "1 where a check of `health` is well.", labels=["check"]
    )
    for check in overview.health().checks:
        healthy.add_metric([check.name], float(check.ok))
    yield healthy
    try:
        stats = overview.stats()
    except Error:
        database.drop_broken(database.alias())
        return
    jobs = GaugeMetricFamily(
        "durable_jobs_jobs", "Jobs that have not ended, or need a person.", labels=["state"]
    )
    for state, number in stats.live.items():
        jobs.add_metric([state], number.number)
    yield jobs
    columns: tuple[tuple[str, str, Callable[[overview.Queue], float]], ...] = (
        ("due_jobs", "Jobs that are due.", lambda queue: queue.due.number),
        (
            "oldest_due_seconds",
            "For how long the oldest has been due.",
            lambda queue: max(0.0, queue.oldest_due),
        ),
        ("running_jobs", "Jobs under a lease.", lambda queue: queue.running.number),
        ("workers", "Live workers that serve it.", lambda queue: queue.workers),
    )
    for name, help_text, value in columns:
        family = GaugeMetricFamily(f"durable_jobs_queue_{name}", help_text, labels=["queue"])
        for queue in stats.queues:
            family.add_metric([queue.name], value(queue))
        yield family
    yield GaugeMetricFamily("durable_jobs_workers", "Live workers.", value=len(stats.workers))
    yield GaugeMetricFamily("durable_jobs_pauses", "Pauses in force.", value=len(stats.pauses))


def observe(registry: CollectorRegistry = REGISTRY) -> None:
    """Count every slice of this process from now on: by kind and outcome, how long, how many at a time.

    Call it once per registry; the client raises ValueError at a second call.
    """
    labels = ["kind"]
    slices = Counter("durable_jobs_slices", "Slices that ended.", ["kind", "outcome"], registry=registry)
    seconds = Histogram(
        "durable_jobs_slice_seconds", "Length of slices.", labels, buckets=SLICE_BUCKETS, registry=registry
    )
    running = Gauge("durable_jobs_slices_running", "Slices at work.", labels, registry=registry)

    @contextmanager
    def count(kind: Kind, job: Job) -> Iterator[Callable[[SliceResult], None]]:
        begun = time.perf_counter()
        running.labels(kind.name).inc()
        try:
            yield lambda result: slices.labels(kind.name, result.outcome.value).inc()
        finally:
            running.labels(kind.name).dec()
            seconds.labels(kind.name).observe(time.perf_counter() - begun)

    runner.observers.append(count)


class _OfWorker(JobsCollector):
    """A scrape of a worker has a thread of its own, whose connection nobody else would close."""

    def collect(self) -> Iterator[GaugeMetricFamily]:
        try:
            yield from super().collect()
        finally:
            connections.close_all()


def serve(address: str, ports: Iterable[int], registry: CollectorRegistry = REGISTRY) -> int:
    """Observe this process, and answer scrapes at the first of these ports that is free; gives that port.

    Raises OSError when none is. The threads that answer end with the process.
    """
    problem: OSError | None = None
    for port in ports:
        try:
            server, _ = start_http_server(port, address, registry)
        except OSError as error:
            problem = error
            continue
        registry.register(_OfWorker())
        observe(registry)
        return int(server.server_port)
    raise problem or OSError("no port was given")
