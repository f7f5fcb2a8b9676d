"""Whoever writes to a SQLite file wakes an idle worker, which else asks the file seldom."""

from __future__ import annotations

import math
import os
import sqlite3
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from durable_jobs import filewatch, service
from durable_jobs.filewatch import FileWatch
from durable_jobs.models import Job
from durable_jobs.transports import database as transport
from durable_jobs.transports.database import Claimer
from tests.connections import OtherConnection
from tests.models import Shipment
from tests.postgres import wait_until
from tests.test_fast_paths import Fast, registered
from tests.test_worker import RunningHere

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells of writes to a file")

assert registered  # the fixture, for the worker's kinds


def written(path: Path) -> sqlite3.Connection:
    connection = sqlite3.connect(path, isolation_level=None)
    connection.execute("PRAGMA journal_mode = WAL")
    connection.execute("CREATE TABLE IF NOT EXISTS thing (id)")
    return connection


@pytest.fixture
def told() -> threading.Event:
    return threading.Event()


@pytest.fixture
def watch(tmp_path: Path, told: threading.Event, monkeypatch: pytest.MonkeyPatch) -> Iterator[FileWatch]:
    monkeypatch.setattr(filewatch, "AGAIN_SECONDS", 0.05)
    watch = FileWatch(str(tmp_path / "a.db"), told.set)
    watch.start()
    yield watch
    watch.stop()


def test_a_write_of_another_connection_is_told(
    watch: FileWatch, told: threading.Event, tmp_path: Path
) -> None:
    connection = written(tmp_path / "a.db")
    wait_until(lambda: watch.is_watching, 20, "not watched")
    for number in range(3):
        told.clear()
        connection.execute("INSERT INTO thing VALUES (?)", [number])
        assert told.wait(20), number
    connection.close()


def test_a_file_that_comes_later_or_comes_back_is_watched(
    watch: FileWatch, told: threading.Event, tmp_path: Path
) -> None:
    assert not watch.is_watching
    for _ in range(2):
        connection = written(tmp_path / "a.db")
        wait_until(lambda: watch.is_watching, 20, "not watched")
        told.clear()
        connection.execute("INSERT INTO thing VALUES (1)")
        assert told.wait(20)
        connection.close()  # the last one takes the log with it
        wait_until(lambda: not watch.is_watching, 20, "still watched")


def test_it_ends_with_its_thread_and_leaves_no_descriptor(tmp_path: Path) -> None:
    connection = written(tmp_path / "b.db")
    before = len(os.listdir("/proc/self/fd"))
    watch = FileWatch(str(tmp_path / "b.db"), lambda: None)
    watch.start()
    wait_until(lambda: watch.is_watching, 20, "not watched")
    thread = watch._thread
    watch.stop()
    watch.stop()
    assert thread is not None and not thread.is_alive()
    wait_until(lambda: len(os.listdir("/proc/self/fd")) <= before, 20, "descriptors are left")
    connection.close()


def test_where_the_system_cannot_tell_the_file_is_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(filewatch, "_library", lambda: None)
    watch = FileWatch(str(tmp_path / "c.db"), lambda: None)
    watch.start()
    assert not watch.is_watching and watch._thread is None
    watch.stop()


@pytest.mark.parametrize(
    ("is_watching", "since", "expected"),
    [(False, math.inf, 0.006), (True, math.inf, 0.1), (True, 0.0, 0.001), (True, 0.05, 0.006)],
)
def test_it_looks_often_only_while_somebody_writes(
    is_watching: bool, since: float, expected: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transport, "time", SimpleNamespace(monotonic=lambda: 1000.0))
    claimer = Claimer("me")
    claimer._watch = FileWatch("", lambda: None)
    claimer._watch.is_watching = is_watching
    claimer._stirred_at = 1000.0 - since
    assert claimer._until_next_look() == expected


@pytest.mark.sqlite_only
@pytest.mark.django_db(transaction=True)
@pytest.mark.usefixtures("registered")
class TestIdleWorker:
    def test_it_looks_seldom_and_is_told_of_a_write(self, second_connection: OtherConnection) -> None:
        with RunningHere(queues=["fast"], concurrency=2) as worker:
            claimer = worker.claimer
            wait_until(lambda: claimer._watch is not None and claimer._watch.is_watching, 20, "not watched")
            wait_until(lambda: looks_in(claimer, 1.0) < 60, 30, "it asks as often as without")
            before = claimer._stirred_at
            second_connection.run(Shipment.objects.create)
            wait_until(lambda: claimer._stirred_at > before, 20, "not told")
            job = second_connection.run(service.start, Fast, "done").job
            wait_until(lambda: Job.objects.get(pk=job.pk).status == "completed", 20, "not done")
        assert claimer._watch is not None and claimer._watch._thread is None

    def test_a_setting_switches_it_off(self, settings: Any) -> None:
        settings.DURABLE_JOBS = {**settings.DURABLE_JOBS, "LISTEN": False}
        job = service.start(Fast, "done").job
        with RunningHere(queues=["fast"], concurrency=2) as worker:
            wait_until(lambda: Job.objects.get(pk=job.pk).status == "completed", 20, "not done")
            assert worker.claimer._watch is None


def looks_in(claimer: Claimer, seconds: float) -> int:
    before = claimer.answers
    time.sleep(seconds)
    return claimer.answers - before
