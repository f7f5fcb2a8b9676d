"""Celery on a Redis of its own: prefork, results ignored.

As its guide advises for short tasks, a worker takes many at a time (`prefetch`). With `durable` a task is acknowledged
after it has run, and Redis writes every change to the disk before it answers: nothing is lost by a crash of either.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import redis
from celery import Celery

from benchmarks.peers import clock
from tests.postgres import free_port

URL = "BENCH_REDIS"
app = Celery("bench", broker=os.environ.get(URL, "redis://127.0.0.1:1/0"))
app.conf.update(
    task_ignore_result=True,
    broker_connection_retry_on_startup=True,
    worker_prefetch_multiplier=int(os.environ.get("BENCH_PREFETCH", "4")),
    task_acks_late=bool(os.environ.get("BENCH_LATE")),
)


@app.task(name="noop")
def noop() -> None:
    pass


@app.task(name="mark")
def mark(key: str) -> None:
    redis.Redis.from_url(os.environ[URL]).set(key, repr(time.time()))


@app.task(name="clock")
def note(number: int) -> None:
    clock.note(number)


@contextmanager
def server(durable: bool) -> Iterator[str]:
    """A Redis on a port and in a folder of its own."""
    folder, port = tempfile.mkdtemp(prefix="bench-redis-"), free_port()
    command = [
        *("redis-server", "--port", str(port), "--bind", "127.0.0.1", "--save", "", "--dir", folder),
        *("--appendonly", "yes" if durable else "no", "--appendfsync", "always"),
    ]
    running = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    url = f"redis://127.0.0.1:{port}/0"
    try:
        client, deadline = redis.Redis.from_url(url), time.monotonic() + 20
        while True:
            try:
                client.ping()
                break
            except redis.ConnectionError:
                assert time.monotonic() < deadline, "Redis does not answer"
                time.sleep(0.05)
        app.conf.broker_url = url
        yield url
    finally:
        running.terminate()
        running.wait(20)
        shutil.rmtree(folder, ignore_errors=True)


def worker(concurrency: int) -> list[str]:
    return [
        *(sys.executable, "-m", "celery", "-A", __name__, "worker", "--concurrency", str(concurrency)),
        *("--loglevel", "ERROR", "--pool", "prefork"),
    ]


def drain(*, jobs: int, concurrency: int, prefetch: int, durable: bool = False) -> dict[str, Any]:
    """From the first task to the last, which note the time."""
    with server(durable) as url:
        mark.delay("first")
        for _ in range(jobs):
            noop.delay()
        mark.delay("last")
        late = {"BENCH_LATE": "1"} if durable else {}
        env = {**os.environ, URL: url, "BENCH_PREFETCH": str(prefetch), **late}
        running = subprocess.Popen(worker(concurrency), env=env, stdout=subprocess.DEVNULL)
        client, deadline = redis.Redis.from_url(url), time.monotonic() + 300
        try:
            while not client.exists("last"):
                assert time.monotonic() < deadline, "Celery does not come to an end"
                time.sleep(0.1)
            first, last = float(client.get("first")), float(client.get("last"))
        finally:
            running.terminate()
            running.wait(60)
    return {"value": jobs / (last - first), "jobs": jobs}


def pickup(*, jobs: int) -> dict[str, Any]:
    with server(False) as url:
        return clock.pickup(worker(8), lambda number: note.delay(number), jobs, {URL: url})
