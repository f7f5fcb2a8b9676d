"""The lease keeper: on time, never mistaken, not to be killed."""

from __future__ import annotations

import contextlib
import itertools
import logging
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import pytest
from django.db import OperationalError, connection, connections, transaction

from durable_jobs import connection as own_connection
from durable_jobs import database, kinds, service, store
from durable_jobs import keeper as keeper_module
from durable_jobs.keeper import Hold, Keeper
from durable_jobs.models import Job
from durable_jobs.store import Lease
from tests.connections import OtherConnection
from tests.postgres import Server, wait_until
from tests.processes import Processes
from tests.store.rows import ago, insert_raw
from tests.worker_kinds import KINDS

pytestmark = pytest.mark.django_db(transaction=True)

OWNER = "keeper-test"


@pytest.fixture(autouse=True)
def registered() -> Iterator[None]:
    for kind in KINDS:
        kinds.register(kind)
    yield
    for kind in KINDS:
        kinds.unregister(kind.name)


@pytest.fixture
def keeper() -> Iterator[Keeper]:
    keeper = Keeper(OWNER)
    keeper.start()
    yield keeper
    keeper.stop()


def claimed(ttl: float = 0.6, **hold: Any) -> Hold:
    job = service.start("worker.quick").job
    taken = store.claim(job.id, 0, 0, OWNER, ttl)
    assert isinstance(taken, Job)
    return Hold(Lease(job.id, OWNER, taken.lease_epoch, ttl), **hold)


def row(hold: Hold) -> Job:
    return Job.objects.get(pk=hold.lease.job_id)


def expired(hold: Hold) -> bool:
    return store.orphans(0.0) != [] and any(orphan.id == hold.lease.job_id for orphan in store.orphans(0.0))


def write(sql: str, *values: Any) -> None:
    with connection.cursor() as cursor:
        cursor.execute(sql, values)


def steal(hold: Hold) -> None:
    write("UPDATE durable_jobs_job SET lease_epoch = lease_epoch + 1, lease_owner = 'thief'")


def samples(hold: Hold, seconds: float) -> list[bool]:
    """Whether the lease had run out, looked at every 20 ms."""
    seen, end = [], time.monotonic() + seconds
    while time.monotonic() < end:
        seen.append(expired(hold))
        time.sleep(0.02)
    return seen


def test_a_lease_is_renewed_before_a_third_of_it_has_passed(keeper: Keeper) -> None:
    """B54."""
    hold = claimed(ttl=0.9)
    keeper.hold(hold)
    beats = {row(hold).heartbeat_at}
    end = time.monotonic() + 2
    while time.monotonic() < end:
        beats.add(row(hold).heartbeat_at)
        time.sleep(0.01)
    times = sorted(beats)
    gaps = [(later - earlier).total_seconds() for earlier, later in itertools.pairwise(times)]
    assert len(gaps) >= 5
    assert sorted(gaps)[-2] <= 0.3 + 0.05
    assert max(gaps) < 0.6


def test_a_short_lease_that_joins_a_long_one_is_renewed_in_time(keeper: Keeper) -> None:
    long, short = claimed(ttl=60), claimed(ttl=0.5)
    keeper.hold(long)
    time.sleep(0.1)
    store.beat_many(OWNER, [short.lease])
    keeper.hold(short)
    assert not any(samples(short, 1.5))


def test_all_leases_are_renewed_by_one_statement(keeper: Keeper, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []
    beat_many = store.beat_many
    monkeypatch.setattr(
        store, "beat_many", lambda owner, leases: calls.append(len(leases)) or beat_many(owner, leases)
    )
    holds = [claimed(ttl=3) for _ in range(20)]
    for hold in holds:
        keeper.hold(hold)
    keeper.beat_now()
    wait_until(lambda: 20 in calls, 10, "no beat for all")
    assert len(calls) <= 3


def test_a_lease_that_was_taken_is_lost_and_stops_its_slice_once(keeper: Keeper) -> None:
    """B55."""
    hold = claimed()
    keeper.hold(hold)
    steal(hold)
    assert hold.stop.wait(2)
    assert hold.lost
    assert not hold.cancelled


@pytest.fixture
def quiet(monkeypatch: pytest.MonkeyPatch) -> Iterator[Keeper]:
    """A keeper that has no reason to beat for an hour, and loses what it beats all the same."""
    monkeypatch.setattr(keeper_module, "LONGEST_INTERVAL", 3_600.0)
    monkeypatch.setattr(store, "beat_many", lambda owner, leases: {})
    keeper = Keeper(OWNER)
    keeper.start()
    yield keeper
    keeper.stop()


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[set[Any]]:
    """What each look for those who are asked to stop has found."""
    found: list[set[Any]] = []
    asked_to_stop = store.asked_to_stop

    def noted(owner: str) -> Any:
        answer = asked_to_stop(owner)
        found.append({job_id for job_id, *_ in answer})
        return answer

    monkeypatch.setattr(store, "asked_to_stop", noted)
    return found


@pytest.mark.sqlite_only
@pytest.mark.parametrize("how", ["cancel", "mail", "pause"])
def test_a_file_that_changed_is_searched_for_requests_between_beats(quiet: Keeper, how: str) -> None:
    """Nobody sends word of them there, and a beat comes every few seconds."""
    hold, other = claimed(ttl=36_000), claimed(ttl=36_000)
    write("UPDATE durable_jobs_job SET queue_name = 'other' WHERE id = %s", other.lease.job_id.hex)
    quiet.hold(hold)
    quiet.hold(other)
    if how == "cancel":
        service.cancel(hold.lease.job_id, actor="me", reason="r")
    elif how == "mail":
        letter = {"requested_at": ago(0), "actor": "me", "actor_user_id": None, "reason": ""}
        insert_raw({"job_id": hold.lease.job_id, **letter}, table="durable_jobs_cancelrequest")
    else:
        service.pause(queue="worker", reason="r", actor="me")
    assert hold.stop.wait(60)
    assert (hold.cancelled, hold.paused, hold.lost) == (how != "pause", how == "pause", False)
    assert not other.stop.is_set()


@pytest.mark.sqlite_only
def test_what_was_not_yet_in_hand_is_looked_for_again(quiet: Keeper, asked: list[set[Any]]) -> None:
    """The file changes between a claim and its arrival here, and then no more."""
    held, late = claimed(ttl=36_000), claimed(ttl=36_000)
    quiet.hold(held)
    service.cancel(late.lease.job_id, actor="me", reason="r")
    wait_until(lambda: {late.lease.job_id} in asked, 60, "the request was not found")
    quiet.hold(late)
    assert late.stop.wait(60)
    assert late.cancelled
    assert not held.stop.is_set()


@pytest.mark.sqlite_only
def test_a_file_that_has_not_changed_is_not_searched(
    quiet: Keeper, asked: list[set[Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    looks: list[Any] = []
    version_reader = database.version_reader
    monkeypatch.setattr(
        database, "version_reader", lambda connection: looks.append(1) or version_reader(connection)
    )
    quiet.hold(claimed(ttl=36_000))
    wait_until(lambda: len(looks) >= 5, 60, "it does not look")
    assert len(asked) == 1


def test_an_older_claim_of_this_process_is_lost_and_the_newer_is_not(keeper: Keeper) -> None:
    older = claimed(ttl=0.5)
    newer = Hold(Lease(older.lease.job_id, OWNER, older.lease.epoch + 1, 0.5))
    write("UPDATE durable_jobs_job SET lease_epoch = lease_epoch + 1, attempts = attempts + 1")
    keeper.hold(newer)
    keeper.hold(older)
    assert older.stop.wait(2)
    assert older.lost
    assert not any(samples(newer, 1))
    assert not newer.lost


@pytest.mark.postgres_only
def test_a_row_that_somebody_has_locked_is_not_lost_and_delays_no_other(
    keeper: Keeper, second_connection: OtherConnection
) -> None:
    locked, free = claimed(ttl=0.6), claimed(ttl=0.6)
    second_connection.enter(transaction.atomic())
    second_connection.run(lambda: list(Job.objects.select_for_update().filter(pk=locked.lease.job_id)))
    keeper.hold(locked)
    keeper.hold(free)
    assert not any(samples(free, 1.2))
    assert not locked.lost
    assert not locked.stop.is_set()
    second_connection.leave()
    wait_until(lambda: not expired(locked), 1.5, "not beaten again after the lock")
    assert not locked.lost


@pytest.mark.postgres_only
def test_a_lease_whose_row_is_locked_is_tried_again_alone_and_soon(
    keeper: Keeper, second_connection: OtherConnection
) -> None:
    locked, free = claimed(ttl=30), claimed(ttl=30)
    second_connection.enter(transaction.atomic())
    second_connection.run(lambda: list(Job.objects.select_for_update().filter(pk=locked.lease.job_id)))
    keeper.hold(locked)
    keeper.hold(free)
    keeper.beat_now()
    wait_until(lambda: locked._retry_at < float("inf"), 10, "not noticed as locked")
    beaten, waited = row(free).heartbeat_at, row(locked).heartbeat_at
    second_connection.leave()
    wait_until(lambda: row(locked).heartbeat_at > waited, 10, "not tried again")
    assert row(free).heartbeat_at == beaten


@pytest.mark.postgres_only
def test_the_keepers_connection_notices_a_cut_line_by_itself(keeper: Keeper) -> None:
    """The project's settings may know no timeouts; a beat that waits for hours would cost every lease."""
    hold = claimed()
    keeper.hold(hold)
    wait_until(lambda: len(keepers()) == 1, 5, "no connection of its own")
    given: dict[str, Any] = {}

    def remember() -> None:
        given.update(own_connection.own("other").get_connection_params())
        own_connection.close()

    in_a_thread(remember)
    wanted = ("connect_timeout", "keepalives_idle", "tcp_user_timeout")
    assert [given[name] for name in wanted] == [5, 30, 30_000]


def keepers() -> list[int]:
    with connection.cursor() as cursor:
        cursor.execute("SELECT pid FROM pg_stat_activity WHERE application_name = 'durable_jobs keeper'")
        return [pid for (pid,) in cursor.fetchall()]


def in_a_thread(act: Callable[[], None]) -> None:
    thread = threading.Thread(target=act)
    thread.start()
    thread.join()


@pytest.mark.postgres_only
def test_our_own_long_fence_is_not_lost(keeper: Keeper, second_connection: OtherConnection) -> None:
    hold = claimed(ttl=0.6)
    second_connection.enter(database.transaction("default"))
    assert second_connection.run(store.lock_fence, hold.lease, 30)
    hold.in_fence = True
    keeper.hold(hold)
    time.sleep(1.2)
    assert not hold.lost
    second_connection.run(store.write_checkpoint, hold.lease)
    second_connection.leave()
    hold.in_fence = False
    hold.committed()
    assert not any(samples(hold, 0.8))


def test_a_cancel_is_carried_back(keeper: Keeper) -> None:
    hold = claimed(ttl=0.6)
    keeper.hold(hold)
    store.request_cancel(hold.lease.job_id, scope=None)
    assert hold.stop.wait(2)
    assert hold.cancelled
    assert not hold.lost


def test_a_pause_is_carried_back_and_wakes_a_waiting_step(keeper: Keeper) -> None:
    hold = claimed(ttl=0.6)
    keeper.hold(hold)
    service.pause(queue="worker", reason="maintenance", actor="test")
    wait_until(lambda: hold.paused, 10, "the pause was not seen")
    assert hold.stop.is_set()
    assert not hold.cancelled


def test_a_row_of_this_owner_that_nobody_holds_is_given_back(
    keeper: Keeper, caplog: pytest.LogCaptureFixture
) -> None:
    known, stranger = claimed(ttl=0.6), claimed(ttl=30)
    keeper.hold(known)
    with caplog.at_level(logging.WARNING, "durable_jobs"):
        wait_until(lambda: row(stranger).status == "pending", 10, "not given back")
    job = row(stranger)
    assert (job.continuation_seq, job.redrives, job.consecutive_failures) == (0, 0, 0)
    assert row(known).status == "running"
    assert str(stranger.lease.job_id) in {record.job_id for record in caplog.records}  # type: ignore[attr-defined]


def test_an_idle_process_finds_strangers_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("durable_jobs.keeper.LONGEST_INTERVAL", 0.2)
    stranger = claimed(ttl=30)
    keeper = Keeper(OWNER)
    keeper.start()
    try:
        wait_until(lambda: row(stranger).status == "pending", 10, "not given back")
    finally:
        keeper.stop()


def look(keeper: Keeper) -> None:
    before = time.monotonic()
    keeper.beat_now()
    wait_until(lambda: keeper.last_beat > before, 10, "no look")


def test_a_row_whose_slice_was_given_up_here_is_no_stranger(keeper: Keeper) -> None:
    job = claimed(ttl=30)
    job.observe(lost=True)
    keeper.hold(job)
    for _ in range(3):
        look(keeper)
    assert row(job).status == "running"


def test_one_look_makes_no_stranger(keeper: Keeper) -> None:
    job = claimed(ttl=30)
    look(keeper)
    keeper.hold(job)
    look(keeper)
    keeper.let_go(job)
    look(keeper)
    assert row(job).status == "running"
    look(keeper)
    wait_until(lambda: row(job).status == "pending", 10, "not given back at the second look in a row")


def test_no_row_is_a_stranger_while_a_claim_is_in_flight(keeper: Keeper) -> None:
    known = claimed(ttl=0.6)
    keeper.hold(known)
    with keeper.claiming():
        job = claimed(ttl=0.6)
        time.sleep(1)
        assert row(job).status == "running"
        keeper.hold(job)
    time.sleep(0.5)
    assert row(job).status == "running"


def test_the_row_of_a_hung_slice_is_no_stranger(keeper: Keeper) -> None:
    known, hung = claimed(ttl=0.6), claimed(ttl=0.6, max_slice_seconds=0.1)
    keeper.hold(known)
    keeper.hold(hung)
    assert hung.stop.wait(2)
    time.sleep(1)
    assert row(hung).status == "running"


def test_a_slice_without_a_commit_for_too_long_is_given_up_with_its_stack(
    keeper: Keeper, caplog: pytest.LogCaptureFixture
) -> None:
    release = threading.Event()

    def hangs_here() -> None:
        release.wait(20)

    thread = threading.Thread(target=hangs_here, name="hanging")
    thread.start()
    try:
        hold = claimed(ttl=0.5, max_slice_seconds=0.8, thread=thread)
        with caplog.at_level(logging.ERROR, "durable_jobs"):
            keeper.hold(hold)
            assert hold.stop.wait(2)
            wait_until(lambda: "hangs_here" in caplog.text, 10, f"no stack in {caplog.text!r}")
        assert keeper.overdue == [hold]
        wait_until(lambda: expired(hold), 10, "still renewed")
        hold.committed()
        store.write_checkpoint(hold.lease)
        written = row(hold).heartbeat_at
        assert written is not None

        def renewed_again() -> bool:
            hold.committed()  # each time, so that a machine that stands still makes it no slice without a commit
            return row(hold).heartbeat_at > written and keeper.overdue == []

        wait_until(renewed_again, 10, "not renewed again")
    finally:
        release.set()
        thread.join()


def test_commits_put_the_end_off(keeper: Keeper) -> None:
    hold = claimed(ttl=0.6, max_slice_seconds=0.6)
    keeper.hold(hold)
    for _ in range(6):
        time.sleep(0.25)
        hold.committed()
    assert not hold.overdue


def test_a_bug_in_one_round_is_logged_and_the_next_goes_on(
    keeper: Keeper, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    beat_many, failed = store.beat_many, []

    def broken(*arguments: Any) -> Any:
        if len(failed) < 2:
            failed.append(1)
            raise SystemExit("a bug")
        return beat_many(*arguments)

    monkeypatch.setattr(store, "beat_many", broken)
    hold = claimed(ttl=0.9)
    with caplog.at_level(logging.ERROR, "durable_jobs"):
        keeper.hold(hold)
        assert not any(samples(hold, 1.5))
    assert len(failed) == 2
    assert not hold.lost
    assert len([record for record in caplog.records if record.event == "failed"]) == 1  # type: ignore[attr-defined]


def test_a_keeper_that_is_stopped_closes_its_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Any] = []
    beat_many = store.beat_many
    monkeypatch.setattr(
        store,
        "beat_many",
        lambda *arguments: (made.append(connections["default"]), beat_many(*arguments))[1],
    )
    keeper = Keeper(OWNER)
    keeper.start()
    hold = claimed(ttl=0.5)
    keeper.hold(hold)
    wait_until(lambda: bool(made), 10, "no beat")
    assert made[0] is not connections["default"]
    keeper.stop()
    assert keeper._thread is not None
    assert not keeper._thread.is_alive()
    assert made[0].connection is None


@pytest.mark.postgres_only
def test_its_connection_is_its_own_and_notices_a_peer_that_vanished(keeper: Keeper) -> None:
    """P10: a beat that is on its way to nobody must end long before the lease does."""
    hold = claimed()
    keeper.hold(hold)
    look(keeper)
    assert own_connection.KEEPALIVES["tcp_user_timeout"] <= 30_000
    with connection.cursor() as cursor:
        cursor.execute("SELECT count(*) FROM pg_stat_activity WHERE application_name = 'durable_jobs keeper'")
        assert cursor.fetchone() == (1,)


def test_an_outage_shorter_than_the_lease_loses_nothing(
    postgres_server: Server, caplog: pytest.LogCaptureFixture
) -> None:
    keeper = Keeper(OWNER)
    keeper.start()
    hold = claimed(ttl=6)
    keeper.hold(hold)
    connection.close()
    with caplog.at_level(logging.WARNING, "durable_jobs"):
        postgres_server.stop()
        keeper.beat_now()
        time.sleep(2)
        postgres_server.start()
        before = time.monotonic()
        wait_until(lambda: keeper.last_beat > before, 10, "no beat after the outage")
    try:
        assert not hold.lost
        assert not hold.stop.is_set()
        assert not expired(hold)
        lines = [record for record in caplog.records if record.event == "database_unavailable"]  # type: ignore[attr-defined]
        assert len(lines) == 1
    finally:
        keeper.stop()


@contextlib.contextmanager
def writing(block: Callable[[], Any], seconds: float, threads: int = 4) -> Iterator[None]:
    """Threads with connections of their own that write back to back, each for `seconds` at a time."""
    stop = threading.Event()

    def write_on() -> None:
        own_connection.own("writer")
        while not stop.is_set():
            with contextlib.suppress(OperationalError), block():
                service.start("worker.quick")
                time.sleep(seconds)
        connections.close_all()

    writers = [threading.Thread(target=write_on) for _ in range(threads)]
    for writer in writers:
        writer.start()
    try:
        yield
    finally:
        stop.set()
        for writer in writers:
            writer.join()


@pytest.mark.sqlite_only
@pytest.mark.parametrize("how", ["own", "plain"])
@pytest.mark.parametrize("seconds", [0.005, 0.05])
def test_beats_come_in_time_beside_four_busy_writers(keeper: Keeper, how: str, seconds: float) -> None:
    block = (lambda: database.transaction("default")) if how == "own" else transaction.atomic
    hold = claimed(ttl=1.5)
    keeper.hold(hold)
    beats = {row(hold).heartbeat_at}
    with writing(block, seconds):
        end = time.monotonic() + 4
        while time.monotonic() < end:
            beats.add(row(hold).heartbeat_at)
            time.sleep(0.02)
    times = sorted(beats)
    gaps = [later - earlier for earlier, later in itertools.pairwise(times)]
    assert max(gaps) < timedelta(seconds=1.5)
    assert not hold.lost


@pytest.mark.sqlite_only
def test_a_file_locked_for_longer_than_the_lease_means_nothing(
    keeper: Keeper, second_connection: OtherConnection
) -> None:
    hold = claimed(ttl=0.5)
    keeper.hold(hold)
    second_connection.enter(transaction.atomic())
    second_connection.run(write, "UPDATE durable_jobs_job SET lease_epoch = lease_epoch")
    time.sleep(1)
    assert expired(hold)
    second_connection.leave()
    wait_until(lambda: not expired(hold), 10, "not beaten after the lock")
    assert not hold.lost


WRITES_ON = """
import time
from django.db import transaction
from durable_jobs import service
while True:
    with transaction.atomic():
        service.start("worker.quick")
        time.sleep(float(sys.argv[1]))
"""


@pytest.mark.sqlite_only
def test_beats_come_in_time_beside_another_process_that_writes_back_to_back(
    keeper: Keeper, processes: Processes
) -> None:
    hold = claimed(ttl=4)
    keeper.hold(hold)
    processes.python("import sys\n" + WRITES_ON, "0.05", settings={"DISCOVER": ["worker_kinds"]})
    wait_until(lambda: Job.objects.count() > 3, 10, "no writes")
    beats = {row(hold).heartbeat_at}
    end = time.monotonic() + 5
    while time.monotonic() < end:
        beats.add(row(hold).heartbeat_at)
        time.sleep(0.02)
    gaps = [later - earlier for earlier, later in itertools.pairwise(sorted(beats))]
    assert max(gaps) < timedelta(seconds=4)
