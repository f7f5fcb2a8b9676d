"""How a statement reaches the database: turns of writers, own and borrowed transactions, one text a vendor."""

from __future__ import annotations

import gc
import re
import sqlite3
import threading
import time
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
from django.contrib.auth.models import Group
from django.db import DatabaseError, InterfaceError, OperationalError, connection, transaction
from django.test.utils import CaptureQueriesContext

from durable_jobs import connection as own_connection
from durable_jobs import database, store
from durable_jobs.database import BUSY_LIMIT_SECONDS, REST_SECONDS, Statement, WriterLock
from durable_jobs.exceptions import TransactionOwned
from durable_jobs.store import Counts, Lease
from tests.connections import OtherConnection
from tests.store.rows import GRACE, image, lease_on, make

ALIAS = "default"


# --- turns --------------------------------------------------------------------------------------------------------


class Queue:
    """Threads that wait for a turn, and the order in which they got it."""

    def __init__(self, lock: WriterLock) -> None:
        self.lock, self.order, self._threads = lock, [], []
        self.failed: list[str] = []

    def join(self, name: str, *, urgent: bool = False, timeout: float = 10.0) -> None:
        def wait() -> None:
            try:
                with self.lock.turn(urgent=urgent, timeout=timeout):
                    self.order.append(name)
                    time.sleep(0.01)
            except OperationalError as error:
                assert database.is_locked(error)
                self.failed.append(name)

        before = len(self.lock._urgent) + len(self.lock._normal)
        self._threads.append(threading.Thread(target=wait, name=f"tests-{name}"))
        self._threads[-1].start()
        deadline = time.monotonic() + 5
        while len(self.lock._urgent) + len(self.lock._normal) == before and time.monotonic() < deadline:
            time.sleep(0.002)

    def end(self) -> None:
        for thread in self._threads:
            thread.join(20)


def test_writers_take_turns_in_the_order_of_their_coming() -> None:
    """P6: SQLite's own busy handler has no queue and starves whoever naps longest."""
    queue = Queue(WriterLock())
    with queue.lock.turn(urgent=False, timeout=1):
        for name in "abcde":
            queue.join(name)
        assert not queue.order
    queue.end()
    assert queue.order == list("abcde")


def test_a_beat_overtakes_the_rest() -> None:
    queue = Queue(WriterLock())
    with queue.lock.turn(urgent=False, timeout=1):
        for name in ("a", "b"):
            queue.join(name)
        for name in ("first beat", "second beat"):
            queue.join(name, urgent=True)
    queue.end()
    assert queue.order == ["first beat", "second beat", "a", "b"]


def test_one_that_gives_up_holds_up_nobody() -> None:
    """C103: it is told "locked", and those behind it go on."""
    queue = Queue(WriterLock())
    with queue.lock.turn(urgent=False, timeout=1):
        queue.join("impatient", timeout=0.05)
        queue.join("impatient beat", urgent=True, timeout=0.05)
        queue.join("patient")
        time.sleep(0.2)
    queue.end()
    assert queue.order == ["patient"]
    assert sorted(queue.failed) == ["impatient", "impatient beat"]


def test_a_failed_turn_is_given_back() -> None:
    lock = WriterLock()
    for _ in range(2):
        with pytest.raises(ZeroDivisionError), lock.turn(urgent=False, timeout=0.2):
            raise ZeroDivisionError


def test_after_a_busy_second_the_file_is_left_free() -> None:
    """P6: longer than the longest nap of SQLite's busy handler; a beat does not wait for that."""
    lock = WriterLock()
    with lock.turn(urgent=False, timeout=1):
        time.sleep(BUSY_LIMIT_SECONDS + 0.05)
    start = time.monotonic()
    with lock.turn(urgent=True, timeout=1):
        assert time.monotonic() - start < REST_SECONDS / 2
    start = time.monotonic()
    with lock.turn(urgent=False, timeout=1):
        assert time.monotonic() - start >= REST_SECONDS * 0.8
    start = time.monotonic()
    with lock.turn(urgent=False, timeout=1):
        assert time.monotonic() - start < REST_SECONDS / 2


# --- transactions --------------------------------------------------------------------------------------------------


OWN: dict[str, Callable[[Lease], Any]] = {
    # Verbs whose promise a caller's rollback would break.
    "claim": lambda lease: store.claim(lease.job_id, 4, 2, "w", 9),
    "claim_next": lambda lease: store.claim_next("w", 1, [store.Probe("q", "k", 0, None, 9)]),
    "beat_many": lambda lease: store.beat_many(lease.owner, [lease]),
    "write_checkpoint": lambda lease: store.write_checkpoint(lease, "1"),
    "set_progress": lambda lease: store.set_progress(lease, Counts(processed=1)),
    "yield_slice": store.yield_slice,
    "give_back": store.give_back,
    "release_lease": lambda lease: store.release_lease(lease, 1),
    "worker_beat": lambda lease: store.worker_beat("w"),
}


@pytest.mark.django_db(transaction=True)
@pytest.mark.parametrize("verb", OWN)
def test_a_borrowed_transaction_is_refused_and_left_as_it_was(verb: str) -> None:
    """A38, T22: refused before anything is written; the caller's own row is committed all the same."""
    job_id = make("running")
    before = image(job_id)
    with transaction.atomic():
        Group.objects.create(name="the caller's")
        with pytest.raises(TransactionOwned) as refusal:
            OWN[verb](lease_on(job_id))
        assert refusal.value.code == "E_JOB_TRANSACTION_OWNED"
        assert not connection.needs_rollback
    assert Group.objects.count() == 1 and image(job_id) == before


@pytest.mark.django_db(transaction=True)
@pytest.mark.parametrize("verb", ["write_checkpoint", "set_progress"])
def test_in_our_own_transaction_it_joins_but_not_in_a_block_inside_it(verb: str) -> None:
    """`save_checkpoint` commits with the fence, never with a savepoint of the step's own."""
    job_id = make("running")
    before = image(job_id)
    with pytest.raises(ZeroDivisionError), database.transaction(ALIAS):
        assert OWN[verb](lease_on(job_id)) is False
        with transaction.atomic(), pytest.raises(TransactionOwned):
            OWN[verb](lease_on(job_id))
        raise ZeroDivisionError
    assert image(job_id) == before


@pytest.mark.django_db(transaction=True)
def test_what_joins_is_a_savepoint_for_the_caller() -> None:
    """B29: its failure leaves the caller's transaction usable; alone it is a transaction of its own."""
    with transaction.atomic():
        Group.objects.create(name="before")
        with pytest.raises(ZeroDivisionError), database.joined(ALIAS):
            Group.objects.create(name="undone")
            raise ZeroDivisionError
        with database.joined(ALIAS):
            Group.objects.create(name="kept")
    with pytest.raises(ZeroDivisionError), database.joined(ALIAS):
        Group.objects.create(name="undone")
        raise ZeroDivisionError
    assert set(Group.objects.values_list("name", flat=True)) == {"before", "kept"}
    assert not connection.in_atomic_block


@pytest.mark.django_db(transaction=True)
def test_a_statement_is_committed_when_it_returns(second_connection: OtherConnection) -> None:
    job_id = make("running")
    store.set_progress(lease_on(job_id), Counts(message="seen by all"))
    assert second_connection.run(image, job_id)["progress_message"] == "seen by all"
    assert not connection.in_atomic_block and connection.get_autocommit()


@pytest.mark.sqlite_only
@pytest.mark.django_db(transaction=True)
def test_a_connection_keeps_its_own_manners(second_connection: OtherConnection) -> None:
    """C102: our BEGIN is IMMEDIATE with a patience of its own; afterwards all is as the project set it."""

    def manners() -> tuple[Any, Any]:
        raw = connection.connection
        return connection.transaction_mode, raw.execute("PRAGMA busy_timeout").fetchone()[0]

    connection.ensure_connection()
    usual = manners()
    with database.transaction(ALIAS):
        assert manners() == usual
    with pytest.raises(ZeroDivisionError), database.transaction(ALIAS):
        raise ZeroDivisionError
    second_connection.enter(database.transaction(ALIAS))
    with pytest.raises(OperationalError, match="locked"), database.transaction(ALIAS, timeout=0.2):
        pytest.fail("two writers")
    second_connection.leave()
    assert manners() == usual
    with database.transaction(ALIAS, timeout=0.2):
        Group.objects.create(name="afterwards")
    assert Group.objects.exists()


def wait_in_a_worker_s_way(other: OtherConnection) -> None:
    """Its thread is a worker's, and has a cursor that only the garbage collector will find."""

    def prepare() -> None:
        kept: list[Any] = [own_connection.own("tests").cursor()]
        kept[0].execute("SELECT 1 UNION SELECT 2")
        kept.append(kept)

    other.run(prepare)


@pytest.mark.sqlite_only
@pytest.mark.parametrize("way", ["a statement by itself", "an atomic block"])
@pytest.mark.django_db(transaction=True)
def test_who_holds_the_file_never_waits_for_who_waits_for_it(
    second_connection: OtherConnection, way: str
) -> None:
    """A cursor of the waiting connection may be garbage, collected by the thread that holds the file; freeing it
    needs the mutex that SQLite holds while it waits by itself."""

    def write() -> None:
        with transaction.atomic() if way == "an atomic block" else nullcontext():
            Group.objects.create(name="the other")

    gc.collect()
    # What is there already is left out: in a long run it takes seconds to walk.
    gc.freeze()
    gc.disable()
    try:
        wait_in_a_worker_s_way(second_connection)
        with database.transaction(ALIAS):
            Group.objects.create(name="this one")
            waiting = second_connection.begin(write)
            time.sleep(0.1)
            begun = time.monotonic()
            gc.collect()
            took = time.monotonic() - begun
            assert not waiting.done()
        waiting.result(10)
    finally:
        gc.enable()
        gc.unfreeze()
        second_connection.run(own_connection.disown)
    assert took < 2
    assert set(Group.objects.values_list("name", flat=True)) == {"this one", "the other"}


@pytest.mark.sqlite_only
@pytest.mark.django_db(transaction=True)
def test_a_worker_s_write_waits_as_long_as_its_connection_says(second_connection: OtherConnection) -> None:
    def write(patience: int) -> float:
        raw = own_connection.own("tests")
        raw.ensure_connection()
        raw.connection.execute(f"PRAGMA busy_timeout = {patience}")
        begun = time.monotonic()
        with pytest.raises(OperationalError, match="locked"):
            Group.objects.create(name="in vain")
        assert raw.connection.execute("PRAGMA busy_timeout").fetchone() == (patience,)
        return time.monotonic() - begun

    try:
        with database.transaction(ALIAS):
            Group.objects.create(name="this one")
            assert 0.3 <= second_connection.run(write, 300) < 3
            assert second_connection.run(write, 0) < 0.3
    finally:
        second_connection.run(own_connection.disown)


@pytest.mark.django_db(transaction=True)
def test_a_debugging_connection_runs_them_too() -> None:
    """DEBUG logs every statement with its parameters."""
    job_id = make("pending")
    with CaptureQueriesContext(connection) as queries:
        assert store.claim(job_id, 4, 2, "w", 9) is not None
        assert store.orphans(GRACE) == []
        store.beat_many("w", [lease_on(job_id)])
    assert len(queries) >= 3
    assert any("w" in query["sql"] for query in queries)


# --- errors --------------------------------------------------------------------------------------------------------


def of_sqlite(text: str) -> OperationalError:
    error = OperationalError(text)
    error.__cause__ = sqlite3.OperationalError(text)
    return error


def error_of(state: str | None, kind: type[DatabaseError] = OperationalError) -> DatabaseError:
    error = kind("told by the server")
    if state is not None:
        cause = Exception()
        cause.sqlstate = state  # type: ignore[attr-defined]
        error.__cause__ = cause
    return error


@pytest.mark.parametrize(
    ("error", "outage", "conflict"),
    [
        (error_of("08006"), True, False),
        (error_of("57P01"), True, False),
        (error_of("57P03"), True, False),
        (error_of("25P03"), True, False),
        (error_of("25006"), True, False),
        (error_of("53300"), True, False),
        (error_of("53100"), True, False),
        (error_of("58030"), True, False),
        (of_sqlite("disk I/O error"), True, False),
        (of_sqlite("database or disk is full"), True, False),
        (of_sqlite("attempt to write a readonly database"), True, False),
        (of_sqlite("no such table: x"), False, False),
        (error_of("40001"), False, True),
        (error_of("40P01"), False, True),
        (error_of("55P03"), False, True),
        (error_of("23505"), False, False),
        (error_of("22003"), False, False),
        (error_of("57014"), False, False),
        (error_of(None), False, False),
        (OperationalError("database is locked"), True, False),
        (OperationalError("database table is locked"), True, False),
        (InterfaceError("connection already closed"), True, False),
        (ValueError("database is locked"), False, False),
        (ZeroDivisionError(), False, False),
    ],
    ids=lambda value: (
        str(getattr(value.__cause__, "sqlstate", value)) if isinstance(value, Exception) else ""
    ),
)
def test_an_outage_says_nothing_about_the_job(error: Exception, outage: bool, conflict: bool) -> None:
    """C103, C104: retried, and never taken for a failure of the work or a lost lease."""
    assert database.is_outage(error) is outage
    assert database.is_conflict(error) is conflict


# --- statements ----------------------------------------------------------------------------------------------------


def all_statements() -> dict[str, Statement]:
    found = {name: one for name, one in vars(store).items() if isinstance(one, Statement)}
    return found | {f"claim_next({size})": one for size, one in store._CLAIM_NEXT.items()}


@pytest.mark.parametrize("vendor", ["postgresql", "sqlite"])
@pytest.mark.django_db
def test_every_text_is_whole(vendor: str) -> None:
    """No snippet and no parameter is left over, and on PostgreSQL every parameter is cast (P24)."""
    for name, statement in all_statements().items():
        sql = statement.sql(vendor)
        assert not re.search(r"[{}]", sql), f"{name}: {sql}"
        assert not re.search(r"(?<![:\w]):[a-z_]+", sql.replace("::", "")), name
        marks = re.findall(r"%\(\w+\)s(::)?", sql)
        assert all(cast == ("::" if vendor == "postgresql" else "") for cast in marks), name
        assert sql is statement.sql(vendor), f"{name} is built anew"
        assert "RETURNING *" not in sql and "SELECT c.*" not in sql, name


def test_a_parameter_without_a_type_is_refused() -> None:
    statement = Statement("SELECT :known, :unknown", types={"known": "text"})
    with pytest.raises(KeyError, match="unknown"):
        statement.sql("postgresql")


def test_texts_may_hold_what_looks_like_a_parameter() -> None:
    statement = Statement("SELECT :a || 'x'::text, {b}", types={"a": "text"}, snippets=lambda _: {"b": ":a"})
    assert statement.sql("postgresql") == "SELECT %(a)s::text || 'x'::text, %(a)s::text"
    assert statement.sql("sqlite") == "SELECT %(a)s || 'x'::text, %(a)s"


@pytest.mark.django_db(transaction=True)
def test_whether_a_transaction_is_borrowed_is_known_without_the_server(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A thread's first slice may begin while the server restarts: that is not the slice's fault."""

    def away() -> None:
        raise OperationalError("the server is away")

    connection.close()
    with monkeypatch.context() as patched:
        patched.setattr(connection, "connect", away)
        database.refuse_borrowed(ALIAS, "this")
        patched.setitem(connection.settings_dict, "AUTOCOMMIT", False)
        with pytest.raises(TransactionOwned):
            database.refuse_borrowed(ALIAS, "this")
