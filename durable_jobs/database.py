"""How a statement reaches the database: alias, own transactions, the SQLite writer lock, one text per vendor.

SQLite has one writer per file and its busy handler has no queue: a steady writer starves everybody else
for seconds. So the transactions that this package opens pass one first-in-first-out lock per file and
process, taken only *before* BEGIN, never inside an open transaction.
"""

from __future__ import annotations

import enum
import json
import logging
import re
import sqlite3
import threading
import time
import uuid
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import UTC, datetime
from functools import partial
from typing import Any, TypeVar

from django.apps import apps
from django.db import DEFAULT_DB_ALIAS, InterfaceError, OperationalError, connections, router
from django.db.backends.base.base import BaseDatabaseWrapper
from django.db.models.base import Model, ModelState
from django.db.models.signals import post_init, pre_init
from django.db.transaction import Atomic, TransactionManagementError
from django.db.utils import DatabaseError

from durable_jobs.exceptions import TransactionOwned

logger = logging.getLogger("durable_jobs")

Answer = TypeVar("Answer")

JOB_TABLE = "durable_jobs_job"
MIGRATE_FIRST = "run manage.py migrate first."
BEGIN_RETRY_SECONDS = 0.001
URGENT_RETRY_SECONDS = 0.0002
"""A beat has to hit the short gap between two transactions of a writer that does not queue here."""

_ACTIVE, _IN_TRANSACTION, _IN_ERROR, _UNKNOWN = 1, 2, 3, 4
"""What libpq calls PQTRANS_…: the state of a PostgreSQL connection."""

BUSY_WINDOW_SECONDS = 1.0
BUSY_LIMIT_SECONDS = 0.7
REST_SECONDS = 0.11
"""A little longer than the longest nap of SQLite's busy handler (100 ms)."""


class FileLocked(OperationalError):
    """SQLite's file stayed locked for longer than a transaction of this package waits."""


def alias() -> str:
    """The database alias that job rows are written to."""
    if not router.routers:
        return DEFAULT_DB_ALIAS
    return router.db_for_write(apps.get_model("durable_jobs", "Job"))


def connection(using: str | None = None) -> BaseDatabaseWrapper:
    return connections[using or alias()]


def place(connection: BaseDatabaseWrapper) -> str:
    """The file, or the database and its host: what a person compares when two processes miss each other."""
    name, host = str(connection.settings_dict["NAME"]), connection.settings_dict["HOST"]
    return f"{name}@{host}" if host and not host.startswith("/") else name


def not_migrated(error: BaseException, *, own: bool = False) -> str:
    """What to do about an error that says that a table or a column of jobs is not there; empty for any other.

    `own`: a statement of this package failed, so that a column is ours even if no table is named with it.
    """
    for note in getattr(error, "__notes__", ()):
        if note.endswith(MIGRATE_FIRST):
            return str(note)
    text, state = str(error), getattr(error.__cause__, "sqlstate", None)
    ours = "durable_jobs" in text
    if ours and (state == _UNDEFINED_TABLE or "no such table" in text):
        return f"The database {alias()!r} has no tables for jobs: {MIGRATE_FIRST}"
    if (ours or own) and (state == _UNDEFINED_COLUMN or _NO_COLUMN.search(text)):
        return f"The tables for jobs in the database {alias()!r} lack a column: {MIGRATE_FIRST}"
    return ""


def note_not_migrated(error: BaseException, *, own: bool = False) -> None:
    """Add what is to be done to such an error; tracebacks and Django's debug page show the note."""
    if said := not_migrated(error, own=own):
        error.add_note(said)


def lacking(connection: BaseDatabaseWrapper) -> str:
    """The first table or column of jobs that the database has not, in words; empty where it has all."""
    tables = set(connection.introspection.table_names())
    for model in apps.get_app_config("durable_jobs").get_models():
        table = model._meta.db_table
        if table not in tables:
            return f"table {table}"
        with connection.cursor() as cursor:
            there = {column.name for column in connection.introspection.get_table_description(cursor, table)}
        for field in model._meta.local_concrete_fields:
            if field.column not in there:
                return f"column {table}.{field.column}"
    return ""


class OwnAtomic(Atomic):
    """An atomic block that this package opened; anybody else's innermost block is a borrowed one.

    It never ends well without having committed. Django rolls a block back in silence when a database error
    was swallowed inside it, or its connection closed; here that raises TransactionManagementError.
    """

    def __exit__(self, exc_type: Any, exc_value: Any, traceback: Any) -> None:
        if exc_type is None and _is_doomed(connections[self.using or alias()]):
            error = TransactionManagementError(
                "A database error was swallowed inside this transaction, or its connection was closed, so that "
                "it can only be rolled back. Put what may fail into a block of its own: "
                "`with transaction.atomic():` inside the try."
            )
            super().__exit__(TransactionManagementError, error, None)
            raise error
        super().__exit__(exc_type, exc_value, traceback)


def _is_doomed(connection: BaseDatabaseWrapper) -> bool:
    if connection.needs_rollback:
        return True
    info = getattr(connection.connection, "info", None)
    return getattr(info, "transaction_status", None) == _IN_ERROR


def is_testcases(block: Any) -> bool:
    """Whether this atomic block is the one that Django's TestCase wraps a test in."""
    return bool(block._from_testcase)


def refuse_borrowed(using: str, what: str) -> None:
    """Raise `TransactionOwned` inside a caller's transaction: a liveness write that it can undo is a lie.

    The block that Django's TestCase opens does not count, as with `atomic(durable=True)`.
    """
    refuse_borrowed_on(connections[using], what)


def refuse_borrowed_on(connection: BaseDatabaseWrapper, what: str) -> None:
    """`refuse_borrowed` for this very connection."""
    blocks = connection.atomic_blocks
    if blocks and not isinstance(blocks[-1], OwnAtomic) and not is_testcases(blocks[-1]):
        raise TransactionOwned(what)
    # With autocommit off the end of a block commits nothing. Asking must not connect: the server may be away.
    there = connection.connection is not None
    autocommit = connection.autocommit if there else connection.settings_dict["AUTOCOMMIT"]
    if not connection.in_atomic_block and not autocommit:
        raise TransactionOwned(what)


def in_transaction(using: str) -> bool:
    """Whether a transaction is open here; the block that Django's TestCase opens does not count."""
    return any(not is_testcases(block) for block in connections[using].atomic_blocks)


class WriterLock:
    """A fair lock for the writers of one SQLite file in this process; beats overtake the rest.

    When this process held the database for most of the last second it leaves it free for 110 ms, so that
    other processes, whose SQLite naps for up to 100 ms, get their turn.
    """

    def __init__(self) -> None:
        self._condition = threading.Condition()
        self._urgent: deque[object] = deque()
        self._normal: deque[object] = deque()
        self._held = False
        self._holder = 0
        self._urgent_turns = 0
        self._since = 0.0
        self._rest_until = 0.0
        self._spans: deque[tuple[float, float]] = deque()
        self._busy = 0.0
        """Seconds that all these spans take together."""

    @contextmanager
    def turn(self, *, urgent: bool, timeout: float) -> Iterator[None]:
        if urgent:
            with self._urgent_turn(timeout):
                yield
            return
        self._acquire(False, timeout)
        try:
            yield
        finally:
            self._release()

    @contextmanager
    def _urgent_turn(self, timeout: float) -> Iterator[None]:
        with self._condition:
            self._urgent_turns += 1
        try:
            self._acquire(True, timeout)
            try:
                yield
            finally:
                self._release()
        finally:
            with self._condition:
                self._urgent_turns -= 1
                self._condition.notify_all()

    def give_way(self, timeout: float) -> None:
        """Before a write that takes no turn: let beats go first, `timeout` seconds at most.

        A thread that writes back to back keeps the interpreter between COMMIT and BEGIN, so that no other
        thread of the process would ever find the file free.
        """
        with self._condition:
            if self._urgent_turns and self._holder != threading.get_ident():
                self._condition.wait_for(lambda: not self._urgent_turns, timeout)

    def _acquire(self, urgent: bool, timeout: float) -> None:
        now = time.monotonic()
        with self._condition:
            is_free = not (self._held or self._urgent or self._normal)
            if is_free and (urgent or self._rest_left(now) <= 0):
                self._take(now)
            else:
                self._wait(urgent, now + timeout)

    def _wait(self, urgent: bool, deadline: float) -> None:
        ticket = object()
        queue = self._urgent if urgent else self._normal
        queue.append(ticket)
        try:
            while True:
                now = time.monotonic()
                pause = 0.0
                if not self._held and self._next() is ticket:
                    pause = 0.0 if urgent else self._rest_left(now)
                    if pause <= 0:
                        self._take(now)
                        return
                if now >= deadline:
                    raise FileLocked("database is locked (by writers of this process)")
                left = deadline - now
                self._condition.wait(min(pause, left) if pause > 0 else left)
        finally:
            queue.remove(ticket)
            if not self._held:
                self._condition.notify_all()

    def _take(self, now: float) -> None:
        self._held, self._holder, self._since = True, threading.get_ident(), now

    def _next(self) -> object | None:
        if self._urgent:
            return self._urgent[0]
        return self._normal[0] if self._normal else None

    def _rest_left(self, now: float) -> float:
        if now < self._rest_until:
            return self._rest_until - now
        while self._spans and self._spans[0][1] < now - BUSY_WINDOW_SECONDS:
            begun, ended = self._spans.popleft()
            self._busy -= ended - begun
        if self._busy < BUSY_LIMIT_SECONDS:
            return 0.0
        self._spans.clear()
        self._busy = 0.0
        self._rest_until = now + REST_SECONDS
        return REST_SECONDS

    def _release(self) -> None:
        with self._condition:
            now = time.monotonic()
            self._held, self._holder = False, 0
            self._spans.append((self._since, now))
            self._busy += now - self._since
            self._condition.notify_all()


_writer_locks: dict[str, WriterLock] = {}
_writer_locks_guard = threading.Lock()


def writer_lock(connection: BaseDatabaseWrapper) -> WriterLock:
    """The lock of this connection's SQLite file, shared by all threads of the process."""
    name = str(connection.settings_dict["NAME"])
    with _writer_locks_guard:
        return _writer_locks.setdefault(name, WriterLock())


@contextmanager
def transaction(
    using: str, *, what: str = "this write", urgent: bool = False, timeout: float | None = None
) -> Iterator[BaseDatabaseWrapper]:
    """Our own outermost transaction; `TransactionOwned` inside a caller's.

    On SQLite it waits its turn, at most `timeout` seconds (default: the connection's own timeout), and then
    begins IMMEDIATE, whatever the project's mode is; past that it raises OperationalError ("locked").
    """
    refuse_borrowed(using, what)
    connection = connections[using]
    if connection.vendor != "sqlite" or connection.in_atomic_block:
        with OwnAtomic(using, savepoint=True, durable=False):
            yield connection
        return
    if timeout is None:
        timeout = float(connection.settings_dict["OPTIONS"].get("timeout", 5.0))
    started = time.monotonic()
    with writer_lock(connection).turn(urgent=urgent, timeout=timeout):
        block = _begin_immediate(connection, using, started + timeout, urgent)
        try:
            yield connection
        except BaseException as error:
            block.__exit__(type(error), error, error.__traceback__)
            raise
        # What runs after the commit may write, or take its time: not while the others wait for this turn.
        after_commit, connection.run_on_commit = connection.run_on_commit, []
        block.__exit__(None, None, None)
    if after_commit:
        connection.run_on_commit = after_commit
        connection.run_and_clear_commit_hooks()


def _begin_immediate(connection: Any, using: str, deadline: float, urgent: bool) -> OwnAtomic:
    """Begin with our own retry every millisecond: SQLite's busy handler naps longer and longer."""
    while True:
        try:
            return _begin_on(connection, using, deadline, urgent)
        except OperationalError as error:
            if not _reads_an_old_snapshot(connection, error):
                raise
        # Waiting would be for ever. The open read keeps the old connection and goes on there.
        connection.connection = None


def _begin_on(connection: Any, using: str, deadline: float, urgent: bool) -> OwnAtomic:
    connection.ensure_connection()
    mode, connection.transaction_mode = connection.transaction_mode, "IMMEDIATE"
    try:
        with _without_busy_handler(connection):
            while True:
                block = OwnAtomic(using, savepoint=True, durable=False)
                try:
                    block.__enter__()
                    return block
                except OperationalError as error:
                    if not is_locked(error) or _reads_an_old_snapshot(connection, error):
                        raise
                    if time.monotonic() >= deadline:
                        raise FileLocked(*error.args) from error.__cause__
                time.sleep(URGENT_RETRY_SECONDS if urgent else BEGIN_RETRY_SECONDS)
    finally:
        connection.transaction_mode = mode


def in_a_turn(using: str, write: Callable[[], Answer], *, what: str = "this write") -> Answer:
    """On SQLite, one statement as a transaction of its own, in its turn: as `transaction`, without BEGIN and COMMIT.

    The statement must be run to its end: it is its end that commits.
    """
    refuse_borrowed(using, what)
    connection = connections[using]
    timeout = float(connection.settings_dict["OPTIONS"].get("timeout", 5.0))
    deadline = time.monotonic() + timeout
    with writer_lock(connection).turn(urgent=False, timeout=timeout):
        while True:
            connection.ensure_connection()
            with _without_busy_handler(connection):
                try:
                    return write()
                except OperationalError as error:
                    if not is_locked(error):
                        raise
                    if time.monotonic() >= deadline:
                        raise FileLocked(*error.args) from error.__cause__
                    on_old_snapshot = _reads_an_old_snapshot(connection, error)
            if on_old_snapshot:
                # As where a transaction begins: the open read keeps the old connection.
                connection.connection = None
            else:
                time.sleep(BEGIN_RETRY_SECONDS)


def wait_for_file(connection: Any, write: Callable[[], Answer]) -> Answer:
    """Try one SQLite statement outside a transaction until the file is free, as long as the connection waits.

    SQLite's own handler waits with the connection's mutex held. A thread that holds the file can need that mutex:
    its garbage collector may come upon a cursor of this connection. Then each would wait for the other until the
    timeout is over, and everybody else with them.
    """
    patience = busy_timeout(connection.connection)
    if not patience:
        # Whoever has set this waits by himself.
        return write()
    deadline = time.monotonic() + patience / 1000
    with _without_busy_handler(connection):
        while True:
            try:
                return write()
            except OperationalError as error:
                in_vain = time.monotonic() >= deadline or _reads_an_old_snapshot(connection, error)
                if in_vain or not is_locked(error):
                    raise
            time.sleep(BEGIN_RETRY_SECONDS)


@contextmanager
def _without_busy_handler(connection: Any) -> Iterator[None]:
    raw = connection.connection
    patience = busy_timeout(raw)
    set_busy_timeout(raw, 0)
    try:
        yield
    finally:
        if connection.connection is raw:
            set_busy_timeout(raw, patience)


def busy_timeout(raw: Any) -> int:
    """For how many milliseconds SQLite's own handler waits for the file on this connection of the driver's."""
    return int(raw.execute("PRAGMA busy_timeout").fetchone()[0])


def set_busy_timeout(raw: Any, milliseconds: int) -> None:
    raw.execute(f"PRAGMA busy_timeout = {milliseconds}")


def _reads_an_old_snapshot(connection: Any, error: BaseException) -> bool:
    """Whether a SELECT is open on this connection (an `iterator()`, say), and somebody has written since."""
    name = getattr(error.__cause__, "sqlite_errorname", "")
    return bool(name == "SQLITE_BUSY_SNAPSHOT" and not connection.is_in_memory_db())


@contextmanager
def statement(using: str, *, what: str = "this write", urgent: bool = False) -> Iterator[BaseDatabaseWrapper]:
    """For one write of our own: autocommit on PostgreSQL (BEGIN and COMMIT are trips), a turn on SQLite."""
    connection = connections[using]
    if connection.vendor == "sqlite" and not connection.in_atomic_block:
        with transaction(using, what=what, urgent=urgent):
            yield connection
        return
    refuse_borrowed(using, what)
    yield connection


@contextmanager
def joined(using: str, *, timeout: float | None = None) -> Iterator[BaseDatabaseWrapper]:
    """One atomic unit: a savepoint in the caller's transaction, or a transaction of our own."""
    if connections[using].in_atomic_block:
        with OwnAtomic(using, savepoint=True, durable=False):
            yield connections[using]
        return
    with transaction(using, timeout=timeout) as connection:
        yield connection


def see_every_commit(connection: BaseDatabaseWrapper) -> None:
    """As the first statement of our own transaction: READ COMMITTED, whatever the project's default is.

    What is counted under a lock, or read again to find a change, must not come from a snapshot of before. In a
    transaction that is not ours to set up (TestCase's) nothing is done.
    """
    if connection.vendor != "postgresql" or len(connection.atomic_blocks) > 1:
        return
    from django.db.backends.postgresql.psycopg_any import IsolationLevel

    if connection.settings_dict["OPTIONS"].get("isolation_level") != IsolationLevel.READ_COMMITTED:
        with connection.cursor() as cursor:
            cursor.execute("SET TRANSACTION ISOLATION LEVEL READ COMMITTED")


def wait_briefly_for_locks(connection: BaseDatabaseWrapper, seconds: float) -> None:
    """Until the open transaction ends, wait no longer for a lock that somebody else has (PostgreSQL)."""
    if connection.vendor == "postgresql":
        with connection.cursor() as cursor:
            cursor.execute(f"SET LOCAL lock_timeout = {round(seconds * 1000)}")


def version_reader(connection: Any) -> Callable[[], tuple[Any, int]]:
    """What reads, again and again, SQLite's count of other connections' commits to the file.

    Every connection counts anew, so that the number says something only together with it.
    """
    ask = "PRAGMA data_version"
    connection.ensure_connection()
    raw = connection.connection
    if not is_direct(connection):

        def read() -> tuple[Any, int]:
            with connection.cursor() as cursor:
                cursor.execute(ask)
                return (connection.connection, int(cursor.fetchone()[0]))

        return read

    # Read some hundred times a second: most of that time Django's cursor would take.
    def read_directly() -> tuple[Any, int]:
        with connection.wrap_database_errors:
            return (raw, raw.execute(ask).fetchone()[0])

    return read_directly


def is_locked(error: BaseException) -> bool:
    """Whether SQLite said that somebody else holds the file."""
    # PostgreSQL says "blocked by process …" of a deadlock, with a state of its own.
    if not isinstance(error, OperationalError) or sqlstate(error):
        return False
    text = str(error)
    return "locked" in text or "busy" in text


_LOST_STATES = (
    "08", "57P01", "57P02", "57P03", "57P05", "53100", "53300", "53400", "58000", "58030", "25006", "25P03",
)  # fmt: skip
_SQLITE_AWAY = ("disk I/O error", "disk is full", "readonly database", "unable to open database file")
_RETRY_STATES = ("40001", "40P01", "55P03")


def is_outage(error: BaseException) -> bool:
    """Whether the database, not the statement, is at fault: unreachable, restarting, read-only, full, locked.

    Such an error says nothing about the job: it is retried, and never taken for a failure of the work or
    for a lost lease.
    """
    if isinstance(error, InterfaceError) or is_locked(error):
        return True
    if not isinstance(error, DatabaseError):
        return False
    state = sqlstate(error)
    if state:
        return state.startswith(_LOST_STATES)
    if isinstance(error.__cause__, sqlite3.Error):
        return any(words in str(error) for words in _SQLITE_AWAY)
    # Without a state the server never answered: the connection could not be made or was cut.
    return isinstance(error, OperationalError) and "psycopg" in type(error.__cause__).__module__


def is_conflict(error: BaseException) -> bool:
    """Whether the same transaction may succeed when it is tried again (serialization failure, deadlock)."""
    return (sqlstate(error) or "").startswith(_RETRY_STATES)


def sqlstate(error: BaseException) -> str | None:
    return getattr(error.__cause__, "sqlstate", None)


def drop_broken(using: str) -> None:
    """Close this thread's connection if it no longer works, so that the next statement makes a new one."""
    connection = connections[using]
    if connection.connection is None:
        return
    # A cut connection cannot end its transaction: Django's bookkeeping of it goes with it.
    if not connection.in_atomic_block and not connection.is_usable():
        connection.close()


class Leftover(enum.Enum):
    """What somebody else's code left on a connection."""

    NOTHING = "nothing"
    TRANSACTION = "an open transaction"
    BROKEN = "a connection that does not work"


def clear(using: str) -> Leftover:
    """Bring this thread's connection back to autocommit with nothing open; answer what was on it.

    An open transaction is rolled back. The blocks that Django's TestCase opened stay.
    """
    return clear_connection(connections[using])


def clear_connection(connection: BaseDatabaseWrapper) -> Leftover:
    """`clear` of this very connection."""
    blocks = connection.atomic_blocks
    if blocks and any(is_testcases(block) for block in blocks):
        found = Leftover.NOTHING
        while not is_testcases(blocks[-1]):
            found = Leftover.TRANSACTION
            error = TransactionManagementError("This block was left open.")
            blocks[-1].__exit__(TransactionManagementError, error, None)
        return found
    found = _left_on(connection)
    if found is not Leftover.NOTHING or connection.in_atomic_block or _autocommit_is_off(connection):
        discard(connection)
    elif connection.errors_occurred:
        connection.close_if_unusable_or_obsolete()
    return found


def _left_on(connection: BaseDatabaseWrapper) -> Leftover:
    raw = connection.connection
    if raw is None:
        return Leftover.NOTHING
    try:
        if connection.vendor == "sqlite":
            return Leftover.TRANSACTION if raw.in_transaction else Leftover.NOTHING
        status = raw.pgconn.transaction_status
    except Exception:
        return Leftover.BROKEN
    if status in (_ACTIVE, _IN_TRANSACTION, _IN_ERROR):
        return Leftover.TRANSACTION
    return Leftover.BROKEN if status == _UNKNOWN else Leftover.NOTHING


def _autocommit_is_off(connection: BaseDatabaseWrapper) -> bool:
    return connection.connection is not None and not connection.autocommit


def discard(connection: BaseDatabaseWrapper) -> None:
    """Close it and forget its transaction. Inside a block Django's own close() would keep the closed connection."""
    connection.in_atomic_block = False
    connection.savepoint_ids, connection.atomic_blocks, connection.run_on_commit = [], [], []
    connection.needs_rollback = connection.closed_in_transaction = False
    try:
        connection.close()
    except Exception as error:
        logger.debug("A connection could not be closed: %s", error)
    connection.connection = None


# --- statements -----------------------------------------------------------------------------------------


_PARAMETER = re.compile(r"(?<![:\w]):([a-z_][a-z_0-9]*)\b")
_NAMED = re.compile(r"%\((\w+)\)s")
_MOMENT = re.compile(r"\{(after|before)\s+([^{}]+)\}")

_SQLITE_CLOCK = "replace(strftime('%%Y-%%m-%%d %%H:%%M:%%f','now'{shift})||'000','.000000','')"
"""The text that Django's adapter writes: six digits, or none for a whole second. Another form of the same
instant would compare unequal to what Django sends back, and break paging over equal times."""

_SNIPPETS = {
    "postgresql": {
        "job": JOB_TABLE,
        "now": "clock_timestamp()",
        "index_now": "statement_timestamp()",
        "lock": "FOR NO KEY UPDATE",
        "skip_locked": "FOR NO KEY UPDATE SKIP LOCKED",
        "materialized": "MATERIALIZED",
    },
    "sqlite": {
        "job": JOB_TABLE,
        "now": _SQLITE_CLOCK.format(shift=""),
        "index_now": _SQLITE_CLOCK.format(shift=""),
        "lock": "",
        "skip_locked": "",
        "materialized": "",
    },
}


DIRECT = "_durable_jobs_direct"
"""Set on the connections of our own threads, where statements may go past Django's cursors."""

_CURSOR = "_durable_jobs_cursor"
_UNDEFINED_TABLE, _UNDEFINED_COLUMN = "42P01", "42703"
_NO_COLUMN = re.compile(r"no such column|has no column named")
"""As SQLite says it."""
_UNPREPARED = ("0A000", "26000", "42P05")
"""A prepared statement whose result has changed, that is not there, or that is there already."""


def is_direct(connection: BaseDatabaseWrapper) -> bool:
    """Whether nobody watches this connection's statements, so that Django's cursor can be left out."""
    return (
        getattr(connection, DIRECT, False)
        and connection.connection is not None
        and not connection.needs_rollback
        and not connection.queries_logged
        and all(getattr(wrapper, DIRECT, False) for wrapper in connection.execute_wrappers)
    )


class SettingsWatched:
    """An execute wrapper: whether a statement has set something for as long as the transaction lasts."""

    _sets = re.compile(r"set(_config|\s+local|\s+constraints)\b")

    def __init__(self) -> None:
        self.changed = False
        setattr(self, DIRECT, True)

    def __call__(self, execute: Any, sql: Any, params: Any, many: bool, context: dict[str, Any]) -> Any:
        if self._sets.search(str(sql).lower()):
            self.changed = True
        return execute(sql, params, many, context)


def _can_pipeline(connection: BaseDatabaseWrapper) -> bool:
    """Whether a statement can be on its way while Python goes on, with nobody who wants to see when it ends."""
    if connection.vendor != "postgresql" or connection.queries_logged or connection.execute_wrappers:
        return False
    import psycopg

    return psycopg.Pipeline.is_supported()


def _in_transaction(connection: BaseDatabaseWrapper) -> AbstractContextManager[object]:
    """The open transaction, or one of its own.

    Without one the end of a pipeline commits, and psycopg cannot leave it where a deferred constraint refuses that.
    """
    if connection.in_atomic_block or not connection.get_autocommit():
        return nullcontext()
    return OwnAtomic(connection.alias, savepoint=True, durable=False)


def _server_cursor(connection: BaseDatabaseWrapper) -> Any:
    """The one cursor of our own on this connection; it reads moments in C where Django does so in Python."""
    raw: Any = connection.connection
    kept = vars(connection).get(_CURSOR)
    if kept is not None and kept.connection is raw:
        return kept
    import psycopg
    from psycopg.types.datetime import TimestamptzLoader

    cursor = psycopg.Cursor(raw)
    if connection.timezone is UTC:
        cursor.adapters.register_loader("timestamptz", TimestamptzLoader)
    if raw.prepare_threshold is not None and _is_pooled(raw, cursor):
        raw.prepare_threshold = None
    setattr(connection, _CURSOR, cursor)
    return cursor


def _is_pooled(raw: Any, cursor: Any) -> bool:
    """Whether a pooler stands before the server: it has given the client another process id than the server's.

    Behind one the next transaction may meet a server that has not prepared what this one has.
    """
    cursor.execute("SELECT pg_backend_pid()", prepare=False)
    return bool(cursor.fetchone()[0] != raw.info.backend_pid)


class Statement:
    """One SQL text per vendor, built once, run in one round trip.

    In the text `:name` is a parameter, cast to its type on PostgreSQL (with server-side binding an uncast
    parameter used twice is ambiguous); `{now}`, `{after :seconds}`, `{before :seconds}` are moments of the
    database's clock; `{job}`, `{columns}`, `{skip_locked}` and what `snippets` adds are inserted as they are.
    """

    def __init__(
        self,
        postgresql: str,
        sqlite: str | None = None,
        *,
        types: Mapping[str, str],
        snippets: Callable[[str], Mapping[str, str]] | None = None,
    ) -> None:
        self._templates = {"postgresql": postgresql, "sqlite": postgresql if sqlite is None else sqlite}
        self._types = types
        self._snippets = snippets
        self._built: dict[str, tuple[str, tuple[str, ...]]] = {}
        self._named: str | None = None

    def sql(self, vendor: str) -> str:
        """The finished text for `postgresql` or `sqlite`, with pyformat parameters."""
        return self._build(vendor)[0]

    def run(self, connection: BaseDatabaseWrapper, **values: Any) -> list[tuple[Any, ...]]:
        """Run it and fetch every row (on SQLite an unfinished cursor would keep the write lock)."""
        try:
            if is_direct(connection):
                return self._run_directly(connection, values)
            sql, names = self._build(connection.vendor)
            with connection.cursor() as cursor:
                if connection.vendor == "sqlite":
                    cursor.execute(sql, _plain_values(names, values))
                    # As `fetchall`, for which Django makes a wrapper each time.
                    return list(cursor)
                cursor.execute(sql, {name: values[name] for name in names})
                return cursor.fetchall() if cursor.description else []
        except DatabaseError as error:
            note_not_migrated(error, own=True)
            raise

    def run_while(
        self, connection: BaseDatabaseWrapper, meanwhile: Callable[[], None], **values: Any
    ) -> list[tuple[Any, ...]]:
        """As `run`, and call `meanwhile` too: while the server works, where the driver can send and go on.

        It uses no connection. Whoever watches the statements of this one sees them end before it is called.
        """
        if not _can_pipeline(connection):
            rows = self.run(connection, **values)
            meanwhile()
            return rows
        sql, names = self._build(connection.vendor)
        try:
            with _in_transaction(connection), connection.cursor() as cursor:
                # The end of the pipeline waits for the answer, and raises what the server has refused.
                with connection.wrap_database_errors, connection.connection.pipeline():
                    cursor.execute(sql, {name: values[name] for name in names})
                    meanwhile()
                answer: list[tuple[Any, ...]] = cursor.fetchall()
            return answer
        except DatabaseError as error:
            note_not_migrated(error, own=True)
            raise

    def count(self, connection: BaseDatabaseWrapper, **values: Any) -> int:
        """Run it and answer how many rows it touched."""
        sql, names = self._build(connection.vendor)
        adapt = _adapt_sqlite if connection.vendor == "sqlite" else _adapt_postgresql
        try:
            with connection.cursor() as cursor:
                cursor.execute(sql, {name: adapt(values[name]) for name in names})
                return int(cursor.rowcount)
        except DatabaseError as error:
            note_not_migrated(error, own=True)
            raise

    def run_each(self, connection: BaseDatabaseWrapper, columns: Mapping[str, Sequence[Any]]) -> int:
        """Run it once for every row of these columns, prepared once; answer how many rows were touched (SQLite).

        The values are the driver's own, as `plain` gives them.
        """
        named, _ = self._build(connection.vendor)
        rows = list(zip(*(columns[name] for name in _NAMED.findall(named)), strict=True))
        try:
            with connection.cursor() as cursor:
                cursor.executemany(_NAMED.sub("%s", named), rows)
                return int(cursor.rowcount)
        except DatabaseError as error:
            note_not_migrated(error, own=True)
            raise

    def _run_directly(
        self, connection: BaseDatabaseWrapper, values: Mapping[str, Any]
    ) -> list[tuple[Any, ...]]:
        """By the driver's own cursor: bound by the server and prepared, whatever the project's own cursors do."""
        sql, names = self._build(connection.vendor)
        raw = connection.connection
        with connection.wrap_database_errors:
            if connection.vendor == "sqlite":
                given = _plain_values(names, values)
                rows: list[tuple[Any, ...]] = raw.execute(self._sqlite_text(), given).fetchall()
                return rows
            cursor = _server_cursor(connection)
            try:
                cursor.execute(sql, {name: values[name] for name in names}, prepare=True)
            except Exception as error:
                if getattr(error, "sqlstate", None) in _UNPREPARED:
                    # A pooler or a migration took it away: from now on this connection does without.
                    raw.prepare_threshold = None
                    if not connection.in_atomic_block:
                        cursor.execute(sql, {name: values[name] for name in names})
                        return cursor.fetchall() if cursor.pgresult.nfields else []
                raise
            # Of `description` every column would be made an object.
            return cursor.fetchall() if cursor.pgresult.nfields else []

    def _sqlite_text(self) -> str:
        if self._named is None:
            self._named = _NAMED.sub(r":\1", self._build("sqlite")[0]).replace("%%", "%")
        return self._named

    def _build(self, vendor: str) -> tuple[str, tuple[str, ...]]:
        if vendor not in self._built:
            text = self._templates[vendor]
            snippets = dict(_SNIPPETS[vendor])
            if self._snippets:
                snippets.update(self._snippets(vendor))
            while (expanded := _expand(text, snippets, vendor)) != text:
                text = expanded
            names: dict[str, None] = {}

            def parameter(match: re.Match[str]) -> str:
                name = match[1]
                names[name] = None
                return f"%({name})s::{self._types[name]}" if vendor == "postgresql" else f"%({name})s"

            text = _PARAMETER.sub(parameter, text)
            self._built[vendor] = (text, tuple(names))
        return self._built[vendor]


def _expand(text: str, snippets: Mapping[str, str], vendor: str) -> str:
    def moment(match: re.Match[str]) -> str:
        sign, seconds = ("+" if match[1] == "after" else "-"), match[2]
        if vendor == "postgresql":
            return f"(clock_timestamp() {sign} make_interval(secs => {seconds}))"
        amount = seconds if sign == "+" else f"-({seconds})"
        return _SQLITE_CLOCK.format(shift=f",printf('%%+.3f seconds',{amount})")

    text = _MOMENT.sub(moment, text)
    for name, snippet in snippets.items():
        text = text.replace("{" + name + "}", snippet)
    return text


def _adapt_sqlite(value: Any) -> Any:
    if isinstance(value, uuid.UUID):
        return value.hex
    if isinstance(value, datetime):
        return str(value.astimezone(UTC).replace(tzinfo=None))
    if isinstance(value, list):
        return json.dumps(value, default=_adapt_sqlite)
    return value


_PLAIN = frozenset((str, int, float, bool, type(None)))


def _plain_values(names: Sequence[str], values: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value if type(value := values[name]) in _PLAIN else _adapt_sqlite(value) for name in names}


def plain(value: Any) -> Any:
    """The value as SQLite's driver takes it."""
    return value if value is None else _adapt_sqlite(value)


def _adapt_postgresql(value: Any) -> Any:
    return value


def clock(using: str | None = None) -> datetime:
    """The database's clock, which judges leases and schedules."""
    asked = connection(using)
    return moment_of(asked, _CLOCK.run(asked)[0][0])


def moment_of(connection: BaseDatabaseWrapper, value: Any) -> datetime:
    """A moment as a statement answers it: SQLite gives a text."""
    moment = value if isinstance(value, datetime) else datetime.fromisoformat(value)
    return moment if moment.tzinfo else moment.replace(tzinfo=connection.timezone)


_CLOCK = Statement("SELECT {now}", types={})


class Loader:
    """Turns rows of named columns into model instances, with the converters that the ORM would use."""

    def __init__(self, model: Any, connection: BaseDatabaseWrapper) -> None:
        self._model = model
        fields = model._meta.concrete_fields
        self._names = [field.attname for field in fields]
        self.columns = [field.column for field in fields]
        self._converters = []
        for field in fields:
            column = field.get_col(model._meta.db_table)
            converters = connection.ops.get_db_converters(column) + column.get_db_converters(connection)
            if connection.vendor == "sqlite" and field.get_internal_type() == "DateTimeField":
                converters = [_moment]
            if converters:
                self._converters.append((field.attname, converters, column))
        # The key's default is another at every time.
        self.defaults = {
            field.attname: None if field.primary_key else field.get_default() for field in fields
        }
        self._plain = "from_db" not in vars(model) and model.__init__ is Model.__init__

    def load(self, connection: BaseDatabaseWrapper, rows: Iterable[Sequence[Any]]) -> list[Any]:
        """One instance per row; columns beyond the model's are ignored."""
        using, names, is_plain = connection.alias, self._names, self._is_plain()
        loaded = []
        for row in rows:
            values = dict(zip(names, row, strict=False))
            for name, converters, column in self._converters:
                value = values[name]
                if value is not None:
                    for converter in converters:
                        value = converter(value, column, connection)
                    values[name] = value
            # What `from_db` makes of all columns, without asking field by field.
            made = (
                self._of(using, values) if is_plain else self._model.from_db(using, names, [*values.values()])
            )
            loaded.append(made)
        return loaded

    def maker(self, using: str) -> Callable[[dict[str, Any]], Any]:
        """What makes of a row's values, one for each of `defaults`, the instance that `load` would give.

        It keeps the dictionary.
        """
        if self._is_plain():
            return partial(self._of, using)
        return lambda values: self._model.from_db(using, self._names, [values[name] for name in self._names])

    def _is_plain(self) -> bool:
        """Whether nobody has a say in how an instance is made."""
        if not self._plain:
            return False
        if not pre_init.receivers and not post_init.receivers:
            return True
        return not (pre_init.has_listeners(self._model) or post_init.has_listeners(self._model))

    def _of(self, using: str, attributes: dict[str, Any]) -> Any:
        made = self._model.__new__(self._model)
        made.__dict__ = attributes
        made._state = state = ModelState()
        state.adding, state.db = False, using
        return made


def _moment(value: Any, column: Any, connection: BaseDatabaseWrapper) -> datetime:
    """What Django's converter makes of it, without trying other forms first."""
    return moment_of(connection, value)


_loaders: dict[tuple[Any, str], Loader] = {}


def loader(model: Any, connection: BaseDatabaseWrapper) -> Loader:
    """The loader of a model for this connection's vendor, built once."""
    key = (model, connection.vendor)
    found = _loaders.get(key)
    if found is None:
        found = _loaders[key] = Loader(model, connection)
    return found
