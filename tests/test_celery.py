"""Jobs by Celery, without a broker: eager mode, a broker that is away, messages that are none. Brokers: tests/brokers."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest
from django.db import transaction
from django.test import TestCase

from durable_jobs import service, transports
from durable_jobs.consumer import Consumer
from durable_jobs.exceptions import NoFurtherAttempts
from durable_jobs.kinds import Done, Retry, Yield
from durable_jobs.models import Job, uuid7
from durable_jobs.transports import Delivery, State
from durable_jobs.transports.celery import CeleryTransport, run
from durable_jobs.transports.database import DatabaseTransport
from tests.brokers.app import app
from tests.models import Shipment
from tests.slices import columns, made, row, start

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.usefixtures("registry")]

NOBODY = "redis://127.0.0.1:1/0"


@pytest.fixture(autouse=True)
def transport(settings: Any) -> Iterator[CeleryTransport]:
    settings.DURABLE_JOBS = {"TRANSPORT": "celery", "TICK": 15}
    app.set_default()
    app.conf.update(broker_url=NOBODY, task_always_eager=False, broker_transport_options={})
    transport = CeleryTransport()
    transport.host(Consumer)
    with transports.use(transport):
        yield transport
    transport.close()
    app.conf.update(task_always_eager=False, broker_transport_options={}, broker_url=NOBODY)


@pytest.fixture
def eager() -> None:
    app.conf.task_always_eager = True


# --- eager


@pytest.mark.usefixtures("eager")
class TestEager:
    """C119."""

    def test_it_runs_after_the_commit_and_every_slice(self) -> None:
        seen = []

        def step(ctx: Any) -> Any:
            seen.append((ctx.job.continuation_seq, transaction.get_connection().in_atomic_block))
            return Yield() if ctx.job.continuation_seq < 300 else Done("all")

        kind = made(step)
        with transaction.atomic():
            job = start(kind)
            assert seen == []
        assert (row(job).status, row(job).result) == ("completed", "all")
        assert seen == [(seq, False) for seq in range(301)]

    def test_nothing_of_a_transaction_that_is_rolled_back_runs(self) -> None:
        seen: list[int] = []
        kind = made(lambda ctx: seen.append(1))
        with pytest.raises(ZeroDivisionError), transaction.atomic():
            start(kind)
            raise ZeroDivisionError
        assert seen == [] and not Job.objects.exists()

    def test_a_step_that_locks_the_projects_row_does_not_block_itself(self) -> None:
        shipment = Shipment.objects.create()

        def step(ctx: Any) -> Done:
            with transaction.atomic():
                Shipment.objects.select_for_update().get(pk=shipment.pk)
            with ctx.fenced():
                Shipment.objects.select_for_update().filter(pk=shipment.pk).update(status="packed")
            return Done()

        kind = made(step)
        with transaction.atomic():
            Shipment.objects.select_for_update().get(pk=shipment.pk)
            job = start(kind)
        assert row(job).status == "completed"

    def test_what_is_due_later_waits(self) -> None:
        job = start(made(), run_after=timedelta(hours=1))
        before = columns(job)
        transports.current().send(Delivery.of(job), "default", 0.0)  # type: ignore[attr-defined]
        assert columns(job) == before

    def test_a_failure_waits_for_its_retry_and_a_job_started_by_a_job_runs(self) -> None:
        inner = made(name="tests.inner")

        def step(ctx: Any) -> Done:
            service.start(inner)
            raise OSError("no")

        job = start(made(step, name="tests.outer", retry=Retry(failures=3, first_delay=60)))
        assert Job.objects.get(kind="tests.inner").status == "completed"
        left = row(job)
        assert (left.status, left.lease_owner, left.consecutive_failures) == ("running", None, 1)


class TestEagerInATestCase(TestCase):
    """In a TestCase nothing commits: nothing runs, unless its callbacks are captured."""

    def setUp(self) -> None:
        app.conf.task_always_eager = True

    def test_it_runs_with_the_captured_callbacks(self) -> None:
        kind = made()
        with self.captureOnCommitCallbacks() as callbacks:
            job = start(kind)
        self.assertEqual(row(job).status, "pending")
        for callback in callbacks:
            callback()
        self.assertEqual(row(job).status, "completed")


# --- a broker that is away


def test_a_start_does_not_wait_for_a_broker_that_is_away(
    transport: CeleryTransport, caplog: pytest.LogCaptureFixture
) -> None:
    """B67: it is told, the row is there, and the reconciler announces it."""
    kind = made()
    began = time.monotonic()
    job = start(kind)
    # Celery's own way of connecting takes six.
    assert time.monotonic() - began < 5
    assert row(job).status == "pending"
    assert "publish_failed" in caplog.text and "; the reconciler announces the job)" in caplog.text
    assert f"({transport.address}; " in caplog.text and "://" in transport.address


def test_after_a_slow_failure_the_next_ones_fail_at_once(
    transport: CeleryTransport, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def slow(*args: Any, **options: Any) -> None:
        asked.append(1)
        time.sleep(0.6)
        raise TimeoutError

    monkeypatch.setattr(run, "apply_async", slow)
    kind = made()
    for _ in range(5):
        start(kind)
    assert len(asked) == 1


def test_the_message_has_the_id_of_the_delivery(transport: CeleryTransport) -> None:
    """B164: what names the message in Celery's log, and to `revoke`, is made of what the row says."""
    app.conf.update(broker_url="memory://")
    job = start(made(), queue="named")
    with app.connection_for_read() as connection:
        message = connection.SimpleQueue("named").get(timeout=10)
    assert message.headers["id"] == Delivery.of(job).id
    assert row(job).queue_job_id is None


def test_a_job_that_waits_is_unknown_to_celery(transport: CeleryTransport) -> None:
    """It cannot be asked for a message; what runs or has ended the row knows."""
    kind = made()
    job = start(kind)
    assert transport.get_state(job) == State.UNKNOWN
    later = start(kind, run_after=timedelta(hours=1))
    assert transport.get_state(later) == State.DELAYED


@pytest.mark.parametrize(("options", "reach"), [({}, 18.75), ({"visibility_timeout": 5}, 1.25)])
def test_no_message_waits_in_a_worker_for_long(
    transport: CeleryTransport, options: dict[str, Any], reach: float
) -> None:
    """C118: a message that outlives the visibility timeout comes again."""
    app.conf.broker_transport_options = options
    assert transport.reach == reach


# --- messages


def test_a_message_that_is_none_of_ours_is_dropped(
    transport: CeleryTransport, caplog: pytest.LogCaptureFixture
) -> None:
    transport.bind(lambda delivery: pytest.fail("handed over"))
    for unreadable in ("", "dw-1", None, ["dw"], "dw-" + "0" * 36 + "-1-1"):
        run.run(unreadable)
    assert caplog.text.count("delivery_unreadable") == 5


def test_what_the_handler_raises_is_tried_again_by_celery(transport: CeleryTransport) -> None:
    """B149, B150: three times in all, unless it says that this is of no use."""
    asked: list[Delivery] = []
    raised: list[Exception] = []

    def handle(delivery: Delivery) -> None:
        asked.append(delivery)
        raise raised[-1]

    transport.bind(handle)
    job = start(made())
    raised.append(NoFurtherAttempts("ended"))
    assert run.apply((Delivery.of(job).id,)).successful() and len(asked) == 1
    raised.append(OSError("no"))
    assert run.apply((Delivery.of(job).id,)).failed()
    assert asked == [Delivery.of(job)] * 4


def test_a_worker_with_another_transport_says_so() -> None:
    with transports.use(DatabaseTransport()):
        with pytest.raises(RuntimeError, match="give the workers the settings"):
            run.run(Delivery(uuid7(), 0, 0).id)


def test_a_fork_does_not_take_the_connections_along(transport: CeleryTransport) -> None:
    """C064, for the broker: a web server forks after it has published."""
    producers = transport._producers
    producers._idle.append("the parent's")
    try:
        reader, writer = os.pipe()
        child = os.fork()
        if child == 0:
            os.write(writer, b"0" if not producers._idle else b"1")
            os._exit(0)
        os.waitpid(child, 0)
        assert os.read(reader, 1) == b"0" and list(producers._idle) == ["the parent's"]
    finally:
        producers._idle.clear()
        os.close(reader)
        os.close(writer)
