"""What a process that runs jobs does beside them: it is on the operators' screens as long as it gets on."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from durable_jobs import upkeep
from durable_jobs.models import WorkerProcess
from durable_jobs.upkeep import Upkeep
from tests.postgres import wait_until
from tests.store import rows

pytestmark = pytest.mark.django_db(transaction=True)

OWNER = "tests:1:aa"


@pytest.fixture(autouse=True)
def often(settings: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    settings.DURABLE_JOBS = {"TICK": 0}
    monkeypatch.setattr(upkeep, "PRESENCE_SECONDS", 0.02)


@contextmanager
def kept(**options: Any) -> Iterator[None]:
    """A process that has shown itself, and is kept up in this block."""
    one = Upkeep(
        OWNER, queues=["b", "a"], kinds=lambda: ["k"], concurrency=3, published=lambda job: None, **options
    )
    one.register()
    one.start()
    try:
        yield
    finally:
        one.ask_to_stop()
        one.join(20)


def shown() -> WorkerProcess | None:
    return WorkerProcess.objects.filter(owner=OWNER).first()


def test_it_is_shown_with_what_it_takes() -> None:
    with kept():
        row = shown()
    assert row is not None
    assert (row.queue_names, row.kind_names, row.concurrency) == (["a", "b"], ["k"], 3)


def test_a_process_whose_row_is_gone_is_shown_again() -> None:
    with kept():
        rows.execute("DELETE FROM durable_jobs_worker")
        wait_until(lambda: shown() is not None, 20, "not shown again")


def test_one_that_gets_nowhere_looks_silent_until_it_does() -> None:
    moves, asked = threading.Event(), threading.Semaphore(0)

    def is_moving() -> bool:
        asked.release()
        return moves.is_set()

    with kept(is_moving=is_moving):
        first = shown()
        for _ in range(3):
            assert asked.acquire(timeout=20)
        still = shown()
        assert first is not None and still is not None and still.beat_at == first.beat_at
        moves.set()
        wait_until(lambda: shown().beat_at > first.beat_at, 20, "no beat")  # type: ignore[union-attr]
