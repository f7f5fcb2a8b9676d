"""Every transport keeps to the same suite; the memory transport also fails like a broker, and jobs survive it."""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from django.core.exceptions import ImproperlyConfigured
from django.db import OperationalError, transaction

from durable_jobs import reconciler, runner, service, store, transports
from durable_jobs.consumer import Consumer
from durable_jobs.exceptions import NoFurtherAttempts
from durable_jobs.kinds import Done, Yield
from durable_jobs.models import Job, WorkerProcess, uuid7
from durable_jobs.reconciler import Reconciler
from durable_jobs.testing import make_job, register_for_test
from durable_jobs.testing import transports as suite
from durable_jobs.testing.transports import QUEUE, TransportSuite, runs
from durable_jobs.transports import Delivery, State
from durable_jobs.transports.memory import Faults, MemoryTransport
from durable_jobs.worker import Worker
from tests.connections import OtherConnection
from tests.postgres import wait_until
from tests.slices import change, columns, made, row, start

pytestmark = pytest.mark.django_db(transaction=True)

SETTINGS = {"POLL": 0.1, "TICK": 0.3, "GRACE": 0.5, "DRAIN_TIMEOUT": 10}


@pytest.fixture(autouse=True)
def quick(settings: Any) -> None:
    settings.DURABLE_JOBS = SETTINGS


# --- the suite


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
        with consuming(self.transport):
            yield

    @contextmanager
    def broken(self) -> Iterator[None]:
        self.transport.faults.down = True
        yield
        self.transport.faults.down = False

    def lose_messages(self) -> None:
        assert self.transport.flush() > 0 or self.faults

    def is_quiet(self) -> bool:
        return self.transport.waiting == 0


@contextmanager
def consuming(transport: MemoryTransport) -> Iterator[Consumer]:
    consumer = Consumer(transport, queues=[QUEUE], concurrency=transport.threads)
    consumer.start()
    transport.bind(consumer.handle, queues=[QUEUE])
    try:
        yield consumer
    finally:
        began = time.monotonic()
        consumer.drain()
        transport.close(10)
        consumer.close()
    assert time.monotonic() - began < 15


# --- the memory transport


@pytest.fixture
def memory() -> Iterator[MemoryTransport]:
    transport = MemoryTransport()
    with transports.use(transport):
        yield transport
    transport.close(5)


def delivery() -> Delivery:
    return Delivery(uuid7(), 0, 0)


def test_jobs_survive_everything_that_a_broker_does() -> None:
    """B140, B156: lost, late, twice and out of order; each slice runs once."""
    faults = Faults(lose=0.3, duplicate=0.3, delay=0.1, reorder=0.3, seed=7)
    with register_for_test(*suite.KINDS), transports.use(transport := MemoryTransport(faults)):
        jobs = [service.start(suite.Sliced, 2).job for _ in range(10)]
        jobs += [service.start(suite.Quick, number).job for number in range(20)]
        with consuming(transport):
            for job in jobs:
                wait_until(lambda job=job: row(job).status == "completed", 60, "not completed")
    assert [[run["seq"] for run in runs(job)] for job in jobs] == [[0, 1, 1, 2]] * 10 + [[0]] * 20
    assert {row(job).redrives for job in jobs} == {0}


def test_what_its_handler_raises_is_delivered_again_three_times_in_all(memory: MemoryTransport) -> None:
    """B143, B149, B150: a class of that name, whoever has defined it, ends it."""
    got: list[tuple[str, Delivery]] = []

    class Foreign(Exception):
        pass

    Foreign.__name__ = "NoFurtherAttempts"
    raised = {"fails": OSError("no"), "last": NoFurtherAttempts("done"), "foreign": Foreign()}
    sent = {name: delivery() for name in raised}

    def handle(one: Delivery) -> None:
        [name] = [name for name, other in sent.items() if other == one]
        got.append((name, one))
        raise raised[name]

    memory.bind(handle)
    for one in sent.values():
        memory.send(one, QUEUE, 0.0)
    wait_until(lambda: len(got) == 5 and memory.waiting == 0, 10, f"{got}")
    assert sorted(name for name, _ in got) == ["fails"] * 3 + ["foreign", "last"]


def test_a_delivery_that_waits_is_not_taken_twice(memory: MemoryTransport) -> None:
    """B152."""
    one = delivery()
    for _ in range(3):
        memory.send(one, QUEUE, 0.0)
    assert memory.waiting == 1


def test_it_tells_what_became_of_a_delivery(memory: MemoryTransport) -> None:
    """B137, B157."""
    gate, begun = threading.Event(), threading.Event()

    def handle(one: Delivery) -> None:
        begun.set()
        gate.wait(10)

    job = make_job(queue=QUEUE)
    assert memory.get_state(job) == State.UNKNOWN
    memory.send(Delivery.of(job), QUEUE, 60.0)
    assert memory.get_state(job) == State.DELAYED
    memory.withdraw(job)
    assert memory.get_state(job) == State.UNKNOWN
    memory.send(Delivery.of(job), QUEUE, 0.0)
    assert memory.get_state(job) == State.WAITING
    memory.bind(handle)
    assert begun.wait(10)
    assert memory.get_state(job) == State.ACTIVE
    memory.withdraw(job)
    assert memory.get_state(job) == State.ACTIVE
    gate.set()
    wait_until(lambda: memory.get_state(job) != State.ACTIVE, 10, "active")


@pytest.mark.usefixtures("registry")
def test_the_brokers_own_id_of_a_message_is_kept_for_its_withdrawal() -> None:
    """B164."""

    class Numbering(MemoryTransport):
        taken_back: str | None = None

        def send(self, delivery: Delivery, queue: str, after: float) -> str:
            super().send(delivery, queue, after)
            return f"message {delivery.redrives + 1}"

        def withdraw(self, job: Job) -> None:
            self.taken_back = job.queue_job_id

    broker = Numbering()
    with transports.use(broker):
        job = start(made())
        assert row(job).queue_job_id == "message 1"
        # One that comes late, about a delivery that is none any more, changes nothing.
        broker.resend(Delivery(job.id, seq=0, redrives=7), QUEUE)
        assert row(job).queue_job_id == "message 1"
        service.cancel(job.id, actor="anna")
    assert broker.taken_back == "message 1"


def test_its_close_does_not_wait_for_a_handler_that_hangs(memory: MemoryTransport) -> None:
    """B142, B155."""
    gate, begun = threading.Event(), threading.Event()

    def hang(one: Delivery) -> None:
        begun.set()
        gate.wait(30)

    memory.bind(hang)
    memory.send(delivery(), QUEUE, 0.0)
    assert begun.wait(10)
    began = time.monotonic()
    memory.close(0.5)
    assert time.monotonic() - began < 10
    gate.set()


@pytest.mark.parametrize("wrong", [{"lose": 1.1}, {"duplicate": -0.1}, {"reorder": 2}])
def test_a_fault_is_a_chance(wrong: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong))):
        Faults(**wrong)


def test_it_is_refused_where_debug_is_off(settings: Any) -> None:
    """B156: every use, whatever checks say."""
    settings.DURABLE_JOBS = {"TRANSPORT": "memory"}
    settings.DEBUG = False
    with pytest.raises(ImproperlyConfigured, match="DEBUG is off"):
        transports.current()
    with register_for_test(suite.Quick), pytest.raises(ImproperlyConfigured):
        service.start(suite.Quick)
    settings.DEBUG = True
    assert isinstance(transports.current(), MemoryTransport)


def test_a_transport_of_ones_own_is_named_by_its_path(settings: Any) -> None:
    settings.DURABLE_JOBS = {"TRANSPORT": "tests.test_transports.TestMemory"}
    with pytest.raises(ImproperlyConfigured, match="is no durable_jobs"):
        transports.current()
    settings.DURABLE_JOBS = {"TRANSPORT": "durable_jobs.transports.memory.MemoryTransport"}
    with pytest.raises(ImproperlyConfigured, match="DEBUG is off"):
        transports.current()
    settings.DEBUG = True
    assert isinstance(transports.current(), MemoryTransport)


# --- what the reconciler announces


@pytest.fixture
def told(memory: MemoryTransport) -> list[Job]:
    return []


@pytest.fixture
def mender(told: list[Job]) -> Reconciler:
    return Reconciler("mender", published=told.append)


def age(job: Job, **seconds: float) -> None:
    """Let these times of the row lie so many seconds ago."""
    current = store.now()
    change(job, **{name: current - timedelta(seconds=value) for name, value in seconds.items()})


def waiting(**options: Any) -> Job:
    return start(made(**options) if options else made())


@pytest.mark.usefixtures("registry")
class TestAnnouncing:
    def test_a_waiting_job_is_announced_when_its_kinds_time_is_over(
        self, mender: Reconciler, told: list[Job]
    ) -> None:
        """B124, B130: counted from the later of due and last announced; and not again at once."""
        long, short = start(made()), start(made(name="tests.short", pending_ttl_seconds=60))
        for job in (long, short):
            age(job, next_run_at=120, updated_at=120)
        assert mender.tick().announced == 1
        assert [job.id for job in told] == [short.id]
        assert (row(short).lost_deliveries, row(long).lost_deliveries) == (1, 0)
        assert (row(short).status, row(short).redrives) == ("pending", 0)
        assert mender.tick().announced == 0
        age(short, updated_at=120)
        assert mender.tick().announced == 1
        assert row(short).lost_deliveries == 2

    def test_one_of_two_reconcilers_announces(self, mender: Reconciler, told: list[Job]) -> None:
        job = waiting()
        age(job, next_run_at=1_000, updated_at=1_000)
        other = Reconciler("other", published=told.append)
        assert mender.tick().announced + other.tick().announced == 1

    def test_a_time_far_ahead_is_announced_when_it_comes_near(
        self, mender: Reconciler, told: list[Job], memory: MemoryTransport
    ) -> None:
        """C118: the row keeps the time, not the broker."""
        job = start(made(), run_after=timedelta(hours=1))
        assert memory.waiting == 0
        assert mender.tick().announced == 0
        age(job, next_run_at=-5, updated_at=3_595)
        assert mender.tick().announced == 1
        assert row(job).lost_deliveries == 0
        assert mender.tick().announced == 0
        assert [one.id for one in told] == [job.id]

    def test_a_retry_that_waits_is_announced_as_well(self, mender: Reconciler, told: list[Job]) -> None:
        made(name="tests.made")
        job = make_job("retrying")
        age(job, next_run_at=1_000, updated_at=1_000)
        assert mender.tick().announced == 1

    def test_waiting_harms_no_job(
        self, mender: Reconciler, told: list[Job], caplog: pytest.LogCaptureFixture
    ) -> None:
        """B125, B131, P1: nobody comes for a job for ever, and it is neither parked nor counted as an orphan."""
        job = waiting()
        for _ in range(12):
            age(job, next_run_at=1_000, updated_at=1_000)
            mender.tick()
        left = row(job)
        assert (left.status, left.lost_deliveries, left.redrives, left.redrives_since_commit) == (
            "pending", 12, 0, 0,
        )  # fmt: skip
        errors = [record for record in caplog.records if getattr(record, "event", "") == "never_started"]
        assert len(errors) == 2 and errors[0].levelno == logging.ERROR

    def test_what_is_paused_asked_to_end_unknown_or_reserved_is_left_alone(
        self, mender: Reconciler, told: list[Job]
    ) -> None:
        made()
        jobs = {
            "paused": make_job(queue="paused"),
            "unknown": make_job(kind="nobody.knows"),
            "manual": make_job(queue="manual"),
            "held": make_job("held"),
        }
        service.pause(queue="paused", reason="made for a test")
        for name, job in jobs.items():
            age(job, updated_at=1_000, **({} if name == "held" else {"next_run_at": 1_000}))
        before = {name: columns(job) for name, job in jobs.items()}
        assert mender.tick().announced == 0
        assert {name: columns(job) for name, job in jobs.items()} == before

    def test_one_tenant_at_a_time(self, mender: Reconciler, told: list[Job]) -> None:
        """B119."""
        made()
        jobs = [make_job(scope=service.Scope(tenant)) for tenant in ("acme", "other")]
        for job in jobs:
            age(job, next_run_at=1_000, updated_at=1_000)
        assert mender.tick(tenant="acme").announced == 1
        assert [one.tenant_id for one in told] == ["acme"]

    def test_more_than_a_batch(self, mender: Reconciler, told: list[Job]) -> None:
        """B132."""
        made()
        jobs = [make_job() for _ in range(7)]
        for job in jobs:
            age(job, next_run_at=1_000, updated_at=1_000)
        assert mender.tick(batch=2).announced == 7
        assert {one.id for one in told} == {job.id for job in jobs}

    def test_a_pass_announces_no_more_than_so_many_of_one_route(
        self, mender: Reconciler, told: list[Job], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(reconciler, "MOST_ANNOUNCED", 4)
        made()
        for job in [make_job() for _ in range(7)]:
            age(job, next_run_at=1_000, updated_at=1_000)
        assert [mender.tick(batch=2).announced for _ in range(3)] == [4, 3, 0]
        assert len({one.id for one in told}) == 7

    def test_a_locked_row_waits_for_the_next_pass(
        self, mender: Reconciler, told: list[Job], second_connection: OtherConnection
    ) -> None:
        if store.database.connection().vendor == "sqlite":
            pytest.skip("SQLite locks files, not rows")
        job = waiting()
        age(job, next_run_at=1_000, updated_at=1_000)
        lock(second_connection)
        assert mender.tick().announced == 0
        second_connection.leave()
        assert mender.tick().announced == 1

    def test_a_long_look_is_not_repeated_soon(self, told: list[Job], monkeypatch: pytest.MonkeyPatch) -> None:
        now, asked = [0.0], []

        def slow(*args: Any, **options: Any) -> list[Job]:
            now[0] += 1.0
            asked.append(args)
            return []

        waiting()
        monkeypatch.setattr(reconciler.store, "announce", slow)
        mender = Reconciler("mender", published=told.append, clock=lambda: now[0])
        mender.tick()
        now[0] += 15
        mender.tick()
        assert len(asked) == 1
        now[0] += 6
        mender.tick()
        assert len(asked) == 2


# --- a consumer


@pytest.fixture
def consumer(memory: MemoryTransport) -> Iterator[Consumer]:
    consumer = Consumer(memory, queues=[QUEUE])
    consumer.start()
    yield consumer
    consumer.close()


def lock(other: OtherConnection) -> None:
    """Hold every row on another connection until `leave`."""
    other.enter(transaction.atomic())
    other.run(lambda: list(Job._base_manager.select_for_update().values_list("id")))


def in_a_thread(act: Callable[[], Any]) -> None:
    suite.side_by_side([act])


@pytest.mark.usefixtures("registry")
class TestConsumer:
    def test_an_old_delivery_leaves_the_row_as_it_was(self, consumer: Consumer) -> None:
        """B38, B62."""
        job = waiting()
        before = columns(job)
        for one in (Delivery(job.id, 1, 0), Delivery(job.id, 0, 1), delivery()):
            in_a_thread(lambda one=one: consumer.handle(one))
        assert columns(job) == before

    def test_a_delivery_that_comes_far_too_early_leaves_the_row_alone(
        self, consumer: Consumer, memory: MemoryTransport
    ) -> None:
        job = start(made(), run_after=timedelta(hours=1))
        before = columns(job)
        in_a_thread(lambda: consumer.handle(Delivery.of(job)))
        assert columns(job) == before and memory.waiting == 0

    def test_one_that_comes_a_little_early_waits(self, consumer: Consumer) -> None:
        job = start(made(), run_after=timedelta(seconds=0.5))
        in_a_thread(lambda: consumer.handle(Delivery.of(job)))
        done = row(job)
        assert done.status == "completed"
        assert done.started_at is not None and done.started_at >= job.next_run_at

    def test_a_kind_that_is_not_known_here_waits_for_others(self, consumer: Consumer) -> None:
        job = make_job(kind="nobody.knows")
        before = columns(job)
        in_a_thread(lambda: consumer.handle(Delivery.of(job)))
        assert columns(job) == before

    def test_a_draining_one_sends_back_what_arrives(
        self, consumer: Consumer, memory: MemoryTransport
    ) -> None:
        job = waiting()
        memory.flush()
        consumer.drain()
        before = columns(job)
        in_a_thread(lambda: consumer.handle(Delivery.of(job)))
        assert columns(job) == before and memory.waiting == 1

    def test_a_hand_back_is_announced_at_once(self, consumer: Consumer, memory: MemoryTransport) -> None:
        """B67: not when the reconciler comes by."""
        job = start(made(lambda ctx: Yield()))
        memory.flush()
        in_a_thread(lambda: consumer.handle(Delivery.of(job)))
        assert [message.delivery for message in memory._messages] == [Delivery(job.id, 1, 0)]

    def test_an_end_announces_the_next_of_a_limited_kind(
        self, consumer: Consumer, memory: MemoryTransport
    ) -> None:
        """The message of one that met the limit is gone."""
        met: list[Any] = []

        def step(ctx: Any) -> Done:
            met.append(in_a_thread(lambda: consumer.handle(Delivery.of(second))))
            return Done()

        kind = made(step, max_running=1)
        first, second = start(kind), start(kind)
        age(second, updated_at=60, next_run_at=60)
        memory.flush()
        in_a_thread(lambda: consumer.handle(Delivery.of(first)))
        assert (row(first).status, row(second).status, len(met)) == ("completed", "pending", 1)
        assert [message.delivery for message in memory._messages] == [Delivery.of(second)]

    def test_a_drain_wakes_a_step_that_waits(self, consumer: Consumer) -> None:
        """B69, B155."""
        begun = threading.Event()

        def step(ctx: Any) -> Any:
            begun.set()
            return Yield() if ctx.stop.wait(60) else Done("not woken")

        job = start(made(step, slice_seconds=60))
        thread = threading.Thread(target=lambda: in_a_thread(lambda: consumer.handle(Delivery.of(job))))
        thread.start()
        assert begun.wait(20)
        consumer.drain()
        thread.join(20)
        assert not thread.is_alive()
        assert (row(job).status, row(job).interruptions) == ("pending", 1)

    def test_two_that_may_be_poison_do_not_run_together(
        self, consumer: Consumer, memory: MemoryTransport
    ) -> None:
        gate, begun = threading.Event(), threading.Event()

        def step(ctx: Any) -> Done:
            begun.set()
            gate.wait(20)
            return Done()

        kind = made(step)
        first, second = start(kind), start(kind)
        change(first, redrives_since_commit=1)
        change(second, redrives_since_commit=1)
        memory.flush()
        thread = threading.Thread(target=lambda: in_a_thread(lambda: consumer.handle(Delivery.of(first))))
        thread.start()
        assert begun.wait(20)
        in_a_thread(lambda: consumer.handle(Delivery.of(second)))
        assert (row(second).status, row(second).continuation_seq) == ("pending", 0)
        assert memory.waiting == 1
        gate.set()
        thread.join(20)
        assert row(first).status == "completed"

    def test_a_locked_row_is_asked_for_again_and_then_sent_again(
        self, consumer: Consumer, memory: MemoryTransport, second_connection: OtherConnection
    ) -> None:
        """P17: a lock of a moment must not swallow a delivery."""
        if store.database.connection().vendor == "sqlite":
            pytest.skip("SQLite locks files, not rows")
        job = waiting()
        memory.flush()
        lock(second_connection)
        in_a_thread(lambda: consumer.handle(Delivery.of(job)))
        assert row(job).status == "pending" and memory.waiting == 1
        second_connection.leave()
        in_a_thread(lambda: consumer.handle(Delivery.of(job)))
        assert row(job).status == "completed"

    def test_an_outage_is_waited_for(self, consumer: Consumer, monkeypatch: pytest.MonkeyPatch) -> None:
        """C061: a delivery is kept while the database is away."""
        job, asked = waiting(), []
        claim = store.claim

        def away(*names: Any, **options: Any) -> Any:
            asked.append(1)
            if len(asked) < 3:
                raise OperationalError("server closed the connection unexpectedly")
            return claim(*names, **options)

        monkeypatch.setattr(store, "claim", away)
        in_a_thread(lambda: consumer.handle(Delivery.of(job)))
        assert row(job).status == "completed" and len(asked) == 3

    def test_a_drain_gives_an_outages_delivery_back_to_the_broker(
        self, consumer: Consumer, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """C061: the process ends before the database is back."""
        job, raised = waiting(), []

        def away(*names: Any, **options: Any) -> Any:
            consumer.draining.set()
            raise OperationalError("server closed the connection unexpectedly")

        def handle() -> None:
            try:
                consumer.handle(Delivery.of(job))
            except OperationalError as error:
                raised.append(error)

        monkeypatch.setattr(store, "claim", away)
        in_a_thread(handle)
        assert len(raised) == 1 and row(job).status == "pending"

    def test_a_slice_that_breaks_is_left_to_the_reconciler(
        self, consumer: Consumer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        """Nothing renews its lease any more, so that it has an end; the process goes on."""
        broken, sound = start(kind := made()), start(kind)
        run_slice = runner.run_slice

        def break_once(job: Job, **options: Any) -> Any:
            if job.id == broken.id:
                raise RuntimeError("made for a test")
            return run_slice(job, **options)

        monkeypatch.setattr(runner, "run_slice", break_once)
        for job in (broken, sound):
            in_a_thread(lambda job=job: consumer.handle(Delivery.of(job)))
        assert (row(broken).status, row(broken).lease_owner) == ("running", consumer.owner)
        assert row(sound).status == "completed"
        assert "slice_broke" in [record.event for record in caplog.records]

    def test_without_a_beginning_it_runs_in_the_callers_thread(
        self, memory: MemoryTransport, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """For eager modes: nobody keeps a lease, and what goes wrong is the caller's."""
        alone, ran = Consumer(memory), []

        def step(ctx: Any) -> Done:
            ran.append(threading.current_thread())
            return Done()

        job, other = start(kind := made(step)), start(kind)
        alone.handle(Delivery.of(job))
        assert row(job).status == "completed" and ran == [threading.current_thread()]
        with monkeypatch.context() as patch:
            patch.setattr(runner, "run_slice", lambda *_, **__: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                alone.handle(Delivery.of(other))
        third = start(kind)
        memory.flush()
        alone.close()
        alone.handle(Delivery.of(third))
        assert row(third).status == "pending" and memory.waiting == 1

    def test_it_is_on_the_operators_screen_until_it_ends(self, consumer: Consumer) -> None:
        wait_until(lambda: WorkerProcess.objects.filter(owner=consumer.owner).exists(), 10, "not there")
        assert WorkerProcess.objects.get(owner=consumer.owner).queues == json.dumps([QUEUE])
        consumer.close()
        assert not WorkerProcess.objects.filter(owner=consumer.owner).exists()


@pytest.mark.usefixtures("registry")
def test_nothing_is_sent_before_the_commit_or_after_a_rollback(memory: MemoryTransport) -> None:
    """B30, B158."""
    kind = made()
    with transaction.atomic():
        start(kind)
        assert memory.waiting == 0
    assert memory.waiting == 1
    with pytest.raises(ZeroDivisionError), transaction.atomic():
        start(kind)
        raise ZeroDivisionError
    assert memory.waiting == 1


def test_far_ahead_is_what_a_message_is_not_sent_for(memory: MemoryTransport, settings: Any) -> None:
    for tick, reach in [(0.3, 10.0), (15, 18.75), (3_600, 60.0)]:
        settings.DURABLE_JOBS = {"TICK": tick}
        assert memory.reach == reach
    near, far = (
        Job(
            id=uuid7(), updated_at=datetime.now(UTC), next_run_at=datetime.now(UTC) + timedelta(seconds=ahead)
        )
        for ahead in (50, 70)
    )
    memory.publish(near)
    memory.publish(far)
    assert memory.waiting == 1
