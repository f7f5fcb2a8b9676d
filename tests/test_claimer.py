"""Finding due jobs: what wakes a worker, what it looks at, and what it leaves alone."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest
from django.db import connection, connections, transaction

from durable_jobs import kinds, service, store
from durable_jobs.kinds import Done, Kind
from durable_jobs.models import Job
from durable_jobs.transports import current
from durable_jobs.transports.base import Delivery, State
from durable_jobs.transports.database import (
    AT_ONCE,
    SWEEP_SECONDS,
    Claimer,
    DatabaseTransport,
    Listener,
    Pair,
)
from tests.connections import OtherConnection
from tests.postgres import Server, wait_until
from tests.worker_kinds import KINDS

pytestmark = pytest.mark.django_db(transaction=True)

OWNER = "claimer-test"
QUICK = Pair("worker", "worker.quick", 0)


@pytest.fixture(autouse=True)
def registered() -> Iterator[None]:
    for kind in KINDS:
        kinds.register(kind)
    yield
    for kind in KINDS:
        kinds.unregister(kind.name)


def start(**options: Any) -> Job:
    return service.start("worker.quick", **options).job


def ids(jobs: list[Job]) -> set[Any]:
    return {job.id for job in jobs}


def write(sql: str, *values: Any) -> None:
    with connection.cursor() as cursor:
        cursor.execute(sql, values)


def test_due_jobs_of_known_kinds_are_claimed_highest_priority_first() -> None:
    low, high = start(), start(priority=5)
    claimer = Claimer(OWNER)
    assert [job.id for job in claimer.claim(2)] == [high.id, low.id]
    assert claimer.claim(2) == []


def test_never_more_than_asked_for_are_claimed() -> None:
    started = {start().id for _ in range(7)}
    claimer = Claimer(OWNER)
    assert claimer.claim(0) == []
    seen = [ids(claimer.claim(3)) for _ in range(5)]
    assert all(len(claimed) <= 3 for claimed in seen)
    assert set().union(*seen) == started


def test_unknown_kinds_other_queues_and_the_reserved_queue_are_left_alone() -> None:
    """B160, B162."""
    unknown, elsewhere, manual, ours = start(), start(queue="elsewhere"), start(), start(priority=-9)
    write("UPDATE durable_jobs_job SET kind = 'unknown' WHERE id = %s", key(unknown))
    write("UPDATE durable_jobs_job SET queue_name = 'manual' WHERE id = %s", key(manual))
    assert ids(Claimer(OWNER, queues=["worker"]).claim(9)) == {ours.id}
    assert ids(Claimer(OWNER).claim(9)) == {elsewhere.id}
    assert Claimer(OWNER, queues=["manual"]).claim(9) == []


def key(job: Job) -> Any:
    return job.id if connection.vendor == "postgresql" else job.id.hex


def test_only_chosen_kinds_are_claimed_under_all_their_names() -> None:
    class Renamed(Kind):
        name = "worker.new_name"
        aliases = ("worker.old_name",)
        queue = "worker"

        def step(self, ctx: Any) -> Done:
            return Done()

    start()
    kinds.register(Renamed)
    try:
        old, new = service.start("worker.new_name").job, service.start("worker.new_name").job
        write("UPDATE durable_jobs_job SET kind = 'worker.old_name' WHERE id = %s", key(old))
        assert ids(Claimer(OWNER, kinds=["worker.new_name"]).claim(9)) == {old.id, new.id}
    finally:
        kinds.unregister("worker.new_name")


def test_with_suspects_excluded_only_what_was_not_orphaned_is_claimed() -> None:
    suspect, sound = start(), start()
    write("UPDATE durable_jobs_job SET redrives_since_commit = 1 WHERE id = %s", key(suspect))
    claimer = Claimer(OWNER)
    assert ids(claimer.claim(9, suspects=False)) == {sound.id}
    assert claimer.claim(9, suspects=False) == []
    assert ids(claimer.claim(9)) == {suspect.id}


def test_what_is_due_later_is_known_and_claimed_when_its_time_has_come(settings: Any) -> None:
    """B164."""
    settings.DURABLE_JOBS = {"POLL": 30}
    later = start(run_after=timedelta(seconds=0.6))
    claimer = Claimer(OWNER)
    assert claimer.claim(9) == []
    assert 0 < claimer.next_due() <= 0.61
    began = time.monotonic()
    while not (claimed := claimer.claim(9)) and time.monotonic() < began + 5:
        claimer.wait(10)
    assert time.monotonic() - began < 1
    assert ids(claimed) == {later.id}
    assert claimer.next_due() == float("inf")


def test_a_wake_ends_the_wait() -> None:
    claimer = Claimer(OWNER)
    claimer.claim(1)
    claimer.wake()
    began = time.monotonic()
    claimer.wait(5)
    assert time.monotonic() - began < 1


def test_another_connections_commit_ends_the_wait(second_connection: OtherConnection, settings: Any) -> None:
    settings.DURABLE_JOBS = {"POLL": 30}
    claimer = Claimer(OWNER)
    listener = Listener(claimer.heard, lambda owner: None)
    listener.start()
    try:
        if connection.vendor == "postgresql":
            assert listener.connected.wait(5)
        assert claimer.claim(1) == []
        second_connection.begin(lambda: (time.sleep(0.3), start())[1])
        began = time.monotonic()
        while not (claimed := claimer.claim(1)) and time.monotonic() < began + 5:
            claimer.wait(5)
        assert ids(claimed) == {second_connection.join().id}
        assert time.monotonic() - began < 0.3 + 0.4
    finally:
        listener.stop()


def test_what_this_process_itself_has_written_is_expected(settings: Any) -> None:
    """B163: On SQLite a connection does not see its own commits as changes."""
    settings.DURABLE_JOBS = {"POLL": 30, "LISTEN": False}
    claimer = Claimer(OWNER)
    first = start()
    (job,) = claimer.claim(1)
    assert claimer.claim(1) == []
    lease = store.Lease(job.id, OWNER, job.lease_epoch, 1)
    given_back = store.give_back(lease)
    assert given_back is not None
    claimer.expect(given_back)
    assert ids(claimer.claim(1)) == {first.id}


# --- SQLite


@pytest.mark.sqlite_only
@pytest.mark.parametrize("why", ["nothing", "scheduled", "paused", "second suspect"])
def test_a_look_that_finds_nothing_takes_no_lock(second_connection: OtherConnection, why: str) -> None:
    if why != "nothing":
        start(run_after=timedelta(hours=1) if why == "scheduled" else None)
    if why == "paused":
        service.pause(queue="worker", reason="test", actor="test")
    write("UPDATE durable_jobs_job SET redrives_since_commit = %s", int(why == "second suspect"))
    claimer = Claimer(OWNER)
    second_connection.enter(transaction.atomic())
    second_connection.run(write, "UPDATE durable_jobs_job SET lease_epoch = lease_epoch")
    began = time.monotonic()
    assert claimer.claim(4, suspects=False) == []
    assert time.monotonic() - began < 0.5
    second_connection.leave()


@pytest.mark.sqlite_only
def test_an_unchanged_file_is_not_read_again(django_assert_num_queries: Any) -> None:
    claimer = Claimer(OWNER)
    claimer.claim(1)
    with django_assert_num_queries(1) as captured:
        claimer.claim(1)
    assert "data_version" in captured.captured_queries[0]["sql"]


# --- PostgreSQL


@pytest.mark.postgres_only
def test_a_poll_asks_above_the_floor_and_a_sweep_below_it(monkeypatch: pytest.MonkeyPatch) -> None:
    probes: list[Any] = []
    claim_next = store.claim_next
    monkeypatch.setattr(
        store,
        "claim_next",
        lambda owner, limit, given, **more: probes.append(given) or claim_next(owner, limit, given, **more),
    )
    claimer = Claimer(OWNER)
    first = start()
    assert ids(claimer.claim(1)) == {first.id}
    early = start()
    write("UPDATE durable_jobs_job SET next_run_at = next_run_at - interval '1 hour' WHERE id = %s", early.id)
    assert claimer.claim(1) == []
    assert probes[-1][0].floor == first.next_run_at - timedelta(seconds=1)
    time.sleep(1.05)
    assert ids(claimer.claim(1)) == {early.id}
    assert probes[-1][0].floor is None


@pytest.mark.postgres_only
def test_a_sweep_waits_for_twenty_times_its_last_duration(monkeypatch: pytest.MonkeyPatch) -> None:
    sweeps: list[tuple[float, float]] = []

    def slow() -> list[Any]:
        began = time.monotonic()
        time.sleep(0.1)
        sweeps.append((began, time.monotonic() - began))
        return []

    monkeypatch.setattr(store, "routes", slow)
    claimer = Claimer(OWNER)

    def again() -> bool:
        claimer.claim(1)
        return len(sweeps) == 2

    wait_until(again, 60, "no second sweep")
    (first, took), (second, _) = sweeps
    assert second - first >= 20 * took > SWEEP_SECONDS


@pytest.mark.postgres_only
@pytest.mark.parametrize("told", ["of one", "of two", "of none due", "of one, not waiting", "of anything"])
def test_what_it_was_told_of_while_it_waited_is_claimed_alone(
    told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And before the list is made anew; everything else, with the next claim."""
    sweeps: list[int] = []
    routes = store.routes
    monkeypatch.setattr(store, "routes", lambda: sweeps.append(1) or routes())
    claimer = Claimer(OWNER)
    assert claimer.claim(1) == []
    waiting = threading.Thread(target=claimer.wait, args=(60,))
    if told != "of one, not waiting":
        waiting.start()
        wait_until(lambda: claimer._waits, 60, "it does not wait")
    jobs = [start(), start(), start(priority=5)]
    for job in jobs:
        claimer.expect(job)
    others = {
        "of two": [QUICK, QUICK._replace(priority=5)],
        "of none due": [QUICK._replace(priority=-5)],
        "of anything": [None],
    }
    for pair in others.get(told, [QUICK]):
        claimer.heard(pair)
    if waiting.ident:
        waiting.join(60)
    sweeps.clear()
    claimer._sweep_at = 0.0
    claimed = claimer.claim(4)
    assert claimer.claims_singly is (told == "of one")
    assert bool(sweeps) is (told != "of one")
    assert [job.priority for job in claimed] == ([0] if told == "of one" else [5, 0, 0])
    assert ids(claimed + claimer.claim(4)) == ids(jobs)
    assert not claimer.claims_singly


class Heard:
    """A listener and what it has heard since it connected."""

    def __init__(self) -> None:
        self.pairs: list[Pair | None] = []
        self.cancels: list[str] = []
        self.listener = Listener(self.pairs.append, self.cancels.append)
        self.listener.start()
        assert self.listener.connected.wait(5)
        self.pairs.clear()


@pytest.fixture
def heard() -> Iterator[Heard]:
    heard = Heard()
    yield heard
    heard.listener.stop()


@pytest.fixture
def transport() -> Iterator[DatabaseTransport]:
    transport = DatabaseTransport()
    yield transport
    transport.close(5)


@pytest.mark.postgres_only
def test_a_start_is_heard_when_it_commits_and_a_rolled_back_one_never(
    heard: Heard, transport: DatabaseTransport
) -> None:
    """B30, B31, B158."""
    job = start()
    time.sleep(0.2)
    heard.pairs.clear()
    for _ in range(2):
        with transaction.atomic():
            transport.publish(job)
            transaction.set_rollback(True)
    time.sleep(0.3)
    assert heard.pairs == []
    with transaction.atomic():
        transport.publish(job)
        time.sleep(0.2)
        assert heard.pairs == []
    wait_until(lambda: heard.pairs == [QUICK], 2, f"heard {heard.pairs}")


@pytest.mark.postgres_only
def test_many_publishes_are_few_notifications_and_the_last_is_heard(
    heard: Heard, transport: DatabaseTransport, settings: Any
) -> None:
    settings.DURABLE_JOBS = {"NOTIFY_DEBOUNCE": 0.1}
    job = start()
    time.sleep(0.3)
    heard.pairs.clear()
    end = time.monotonic() + 0.45
    while time.monotonic() < end:
        transport.publish(job)
    last = time.monotonic()
    before = len(heard.pairs)
    wait_until(lambda: len(heard.pairs) > before, 2, "the last one was dropped")
    assert time.monotonic() - last < 0.5
    transport.close(5)
    time.sleep(0.1)
    # Six windows have begun at most, and each has a last one.
    assert 3 <= len(heard.pairs) <= 6 * (AT_ONCE + 1)


def started_and_heard(heard: Heard, settings: Any) -> Job:
    """A job whose start was told, whatever other tests have told of its kind just before."""
    settings.DURABLE_JOBS = {"NOTIFY_DEBOUNCE": 0}
    job = start()
    wait_until(lambda: len(heard.pairs) == 1, 5, "the start was not heard")
    return job


@pytest.mark.postgres_only
def test_a_start_now_and_then_is_heard_at_once(
    heard: Heard, transport: DatabaseTransport, settings: Any
) -> None:
    """Nobody waits for the end of a window that is not full."""
    job = started_and_heard(heard, settings)
    settings.DURABLE_JOBS = {"NOTIFY_DEBOUNCE": 10}
    for number in range(3):
        transport.publish(job)
        wait_until(lambda number=number: len(heard.pairs) == number + 2, 5, "it was held back")  # type: ignore[misc]


@pytest.mark.postgres_only
def test_without_a_debounce_every_publish_is_heard(
    heard: Heard, transport: DatabaseTransport, settings: Any
) -> None:
    job = started_and_heard(heard, settings)
    for _ in range(5):
        transport.publish(job)
    wait_until(lambda: len(heard.pairs) == 6, 2, f"heard {heard.pairs}")


@pytest.mark.postgres_only
def test_what_is_due_much_later_is_not_announced(heard: Heard, transport: DatabaseTransport) -> None:
    job = start(run_after=timedelta(minutes=5))
    transport.publish(job)
    time.sleep(0.3)
    assert heard.pairs == []


@pytest.mark.postgres_only
def test_the_held_back_notification_leaves_no_thread_and_no_connection(transport: DatabaseTransport) -> None:
    job = start()
    for _ in range(20):
        transport.publish(job)
    assert transport._trailer._thread is not None
    transport.close(5)
    assert transport._trailer._thread is None
    wait_until(lambda: backends("durable_jobs notify") == 0, 2, "a connection was left")


def backends(name: str) -> int:
    with connection.cursor() as cursor:
        cursor.execute("SELECT count(*) FROM pg_stat_activity WHERE application_name = %s", [name])
        return int(cursor.fetchone()[0])


def test_a_publish_that_fails_is_no_error(
    transport: DatabaseTransport, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    job = start()

    def broken(*arguments: Any) -> None:
        raise OSError("no")

    monkeypatch.setattr("durable_jobs.transports.database._notify", broken)
    with caplog.at_level(logging.WARNING, "durable_jobs"):
        for _ in range(3):
            transport.publish(job)
        transport.hint_cancel(job)
        transport.wake()
    transport.close(5)
    if connection.vendor == "postgresql":
        assert {record.event for record in caplog.records} == {"publish_failed"}  # type: ignore[attr-defined]


@pytest.mark.postgres_only
def test_a_cancel_is_announced_to_the_owner(heard: Heard) -> None:
    job = start()
    assert store.claim(job.id, 0, 0, OWNER, 30)
    service.cancel(job.id, actor="test", reason="test")
    wait_until(lambda: heard.cancels == [OWNER], 2, "not heard")


@pytest.mark.postgres_only
def test_an_unknown_message_is_a_reason_to_look(heard: Heard) -> None:
    for payload in ("", "null", "[1]", '{"other": 1}', "nonsense"):
        write("SELECT pg_notify('durable_jobs', %s)", payload)
    wait_until(lambda: heard.pairs == [None] * 5, 2, f"heard {heard.pairs}")


@pytest.mark.postgres_only
def test_a_listener_hears_again_after_the_server_was_away(
    postgres_server: Server, heard: Heard, transport: DatabaseTransport, caplog: pytest.LogCaptureFixture
) -> None:
    job = start()
    connections.close_all()
    with caplog.at_level(logging.WARNING, "durable_jobs"):
        postgres_server.stop()
        wait_until(lambda: not heard.listener.connected.is_set(), 5, "not noticed")
        time.sleep(1)
        postgres_server.start()
        assert heard.listener.connected.wait(10)
    assert len([record for record in caplog.records if record.event == "database_unavailable"]) == 1  # type: ignore[attr-defined]
    wait_until(lambda: None in heard.pairs, 2, "not told that something may have been missed")
    heard.pairs.clear()
    transport.publish(job)
    wait_until(lambda: heard.pairs == [QUICK], 2, "not heard")


@pytest.mark.postgres_only
@pytest.mark.parametrize("how", ["off", "wrong"])
def test_without_a_listener_looking_finds_everything(settings: Any, how: str) -> None:
    wrong = {"LISTEN_DSN": "host=127.0.0.1 port=1 dbname=none"}
    settings.DURABLE_JOBS = {"POLL": 0.1, **({"LISTEN": False} if how == "off" else wrong)}
    claimer = Claimer(OWNER)
    listener = Listener(claimer.heard, lambda owner: None)
    listener.start()
    assert claimer.claim(1) == []
    job = start()
    try:
        began = time.monotonic()
        while not (claimed := claimer.claim(1)) and time.monotonic() < began + 3:
            claimer.wait(0.1)
        assert ids(claimed) == {job.id}
        assert time.monotonic() - began < 2
    finally:
        listener.stop()


@pytest.mark.postgres_only
def test_a_dsn_of_its_own_is_listened_on(settings: Any) -> None:
    parameters = connection.get_connection_params()
    words = ("host", "port", "dbname", "user", "password")
    settings.DURABLE_JOBS = {"LISTEN_DSN": " ".join(f"{word}={parameters[word]}" for word in words)}
    heard = Heard()
    try:
        start()
        wait_until(lambda: heard.pairs == [QUICK], 2, f"heard {heard.pairs}")
    finally:
        heard.listener.stop()


# --- the interface


def test_the_default_transport_joins_the_transaction_and_loses_nothing() -> None:
    transport = current()
    assert isinstance(transport, DatabaseTransport)
    assert (transport.transactional, transport.loses_messages) == (True, False)
    assert current() is transport


def test_a_delivery_has_an_id_that_reads_back() -> None:
    delivery = Delivery.of(start())
    assert ":" not in delivery.id
    assert Delivery.parse(delivery.id) == delivery
    assert Delivery.parse("dw-x-0-0") is None
    assert Delivery.parse(delivery.id + "x") is None


def test_the_state_of_a_delivery_is_read_from_its_row() -> None:
    transport = current()
    waiting, delayed = start(), start(run_after=timedelta(hours=1))
    assert transport.get_state(waiting) == State.WAITING
    assert transport.get_state(delayed) == State.DELAYED
    (active,) = Claimer(OWNER).claim(1)
    assert transport.get_state(active) == State.ACTIVE
    store.yield_slice(store.Lease(active.id, OWNER, active.lease_epoch, 1))
    assert transport.get_state(active) == State.UNKNOWN
