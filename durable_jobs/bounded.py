"""A transaction of our own that ends by a deadline: every wait for a lock in it is bounded by the time left.

The deadline is the caller's, a time of `time.monotonic()`; it is never renewed. The connection's own lock
policy (PostgreSQL: `lock_timeout` and `statement_timeout`; SQLite: `busy_timeout`) is narrowed for the
transaction and is back afterwards, unless somebody else has changed it meanwhile: that is refused.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final

from django.db import OperationalError, connections
from django.db.backends.base.base import BaseDatabaseWrapper

from durable_jobs import database
from durable_jobs.database import busy_timeout, set_busy_timeout
from durable_jobs.exceptions import DeadlineExceeded, LockPolicyConflict, TransactionOwned
from durable_jobs.logs import tell

logger = logging.getLogger("durable_jobs.bounded")

SLACK_SECONDS: Final = 0.02
"""How far beyond the deadline an installed bound may reach before it is tightened."""
IDLE_SECONDS: Final = 1.0
"""Beyond the deadline; then PostgreSQL ends a session that died in the middle and keeps its locks."""
LONGEST_MILLISECONDS: Final = 2**31 - 1
"""What PostgreSQL takes: three weeks and a bit."""
_TIMED_OUT: Final = ("55P03", "57014")
_IN_TRANSACTION: Final = 2  # libpq's PQTRANS_INTRANS


class Bounded:
    """The open transaction; `cleanup_error` is what went wrong after its commit, which stands all the same."""

    def __init__(
        self,
        connection: BaseDatabaseWrapper,
        what: str,
        deadline: float,
        before_commit: Callable[[], None] | None,
    ) -> None:
        self.connection = connection
        self.what = what
        self.deadline = deadline
        self.before_commit = before_commit
        self.cleanup_error: str | None = None

    def note_cleanup(self, sentence: str) -> None:
        """Keep what went wrong after the commit."""
        self.cleanup_error = "; ".join(part for part in (self.cleanup_error, sentence) if part)
        tell(logger, logging.WARNING, "cleanup_failed", sentence, what=self.what)

    def require_time(self) -> None:
        """Raise `DeadlineExceeded` when nothing is left."""
        if time.monotonic() >= self.deadline:
            raise DeadlineExceeded(self.what)

    def require_commit(self) -> None:
        """The last look before the commit: still open, still in time, still wanted."""
        self.require_open()
        self.require_time()
        if self.before_commit is not None:
            self.before_commit()

    def require_open(self) -> None:
        """Raise `TransactionOwned` when a callback has ended the transaction by SQL of its own."""
        if not _is_open(self.connection):
            raise TransactionOwned(self.what)


@contextmanager
def transaction(
    using: str,
    *,
    deadline: float,
    what: str,
    before_commit: Callable[[], None] | None = None,
    snapshot: bool = False,
) -> Iterator[Bounded]:
    """Our own outermost transaction, done by `deadline` or rolled back.

    `before_commit` is called last of all. `snapshot` is for reading: all statements see one state of the
    database, and no writer is kept out. Raises `TransactionOwned` when any transaction is open already (and
    leaves it usable), `DeadlineExceeded` (before anything is asked of the database, when no time is left),
    and `LockPolicyConflict`.
    """
    connection = connections[using]
    bounded = Bounded(connection, what, deadline, before_commit)
    refuse_open(using, what)
    bounded.require_time()
    act = _on_sqlite if connection.vendor == "sqlite" else _on_postgresql
    committed: list[bool] = []
    try:
        with _late_errors(bounded), act(bounded, using, snapshot):
            # Ahead of whatever the block asks to be called after the commit: what raises there undoes nothing.
            connection.on_commit(lambda: committed.append(True), robust=True)
            bounded.require_time()
            yield bounded
    except Exception as error:
        if not committed:
            raise
        bounded.note_cleanup(f"a callback after the commit failed: {type(error).__name__}: {error}")


@contextmanager
def _late_errors(bounded: Bounded) -> Iterator[None]:
    """A wait that ended because no time was left is the deadline's doing, not the database's."""
    try:
        yield
    except OperationalError as error:
        timed_out = database.is_locked(error) or database.sqlstate(error) in _TIMED_OUT
        if timed_out and time.monotonic() >= bounded.deadline - 0.001:
            raise DeadlineExceeded(bounded.what) from error
        raise


def refuse_open(using: str, what: str) -> None:
    """Raise `TransactionOwned` when any transaction is open, whoever began it and by whatever means.

    The block that Django's TestCase opens does not count.
    """
    connection: Any = connections[using]
    blocks = connection.atomic_blocks
    if any(not database.is_testcases(block) for block in blocks):
        raise TransactionOwned(what)
    connected = connection.connection is not None
    if not blocks and connected and (not connection.get_autocommit() or _is_open(connection)):
        raise TransactionOwned(what)


def _is_open(connection: Any) -> bool:
    """Whether the driver says that a transaction is open, whatever Django's bookkeeping says."""
    raw = connection.connection
    if raw is None:
        return False
    if connection.vendor == "sqlite":
        return bool(raw.in_transaction)
    return bool(raw.info.transaction_status)


# --- PostgreSQL -----------------------------------------------------------------------------------------

_READ_POLICY = """SELECT current_setting('lock_timeout'), current_setting('statement_timeout'),
    (extract(epoch FROM current_setting('lock_timeout')::interval) * 1000)::float8,
    (extract(epoch FROM current_setting('statement_timeout')::interval) * 1000)::float8,
    (extract(epoch FROM current_setting('idle_in_transaction_session_timeout')::interval) * 1000)::float8"""
_SET_POLICY = """SELECT current_setting('lock_timeout'), current_setting('statement_timeout'),
    set_config('lock_timeout', %s::text, true), set_config('statement_timeout', %s::text, true)"""
_SET_IDLE = "SELECT set_config('idle_in_transaction_session_timeout', %s::text, true)"


@contextmanager
def _on_postgresql(bounded: Bounded, using: str, snapshot: bool) -> Iterator[None]:
    nested = bounded.connection.in_atomic_block  # TestCase's own block
    with database.OwnAtomic(using, savepoint=True, durable=False):
        if snapshot and not nested:
            _ask(bounded, "SET TRANSACTION ISOLATION LEVEL REPEATABLE READ, READ ONLY")
        elif not nested:
            database.see_every_commit(bounded.connection)
        policy = _Policy(bounded, nested)
        with bounded.connection.execute_wrapper(policy.tighten):
            yield
        bounded.require_open()
        policy.end()
        bounded.require_commit()


class _Policy:
    """The bounds of the open transaction, tightened as its time runs out."""

    def __init__(self, bounded: Bounded, nested: bool) -> None:
        self._bounded, self._nested = bounded, nested
        lock, statement, lock_ms, statement_ms, idle_ms = _ask(bounded, _READ_POLICY)
        self._before = self._ours = (lock, statement)
        self._limits = (lock_ms or math.inf, statement_ms or math.inf)
        self._until = math.inf
        bounded.require_time()
        self._install()
        bounded.require_time()
        if not nested:
            idle = (bounded.deadline - time.monotonic() + IDLE_SECONDS) * 1000
            _ask(bounded, _SET_IDLE, str(_whole(min(idle, idle_ms or math.inf))))

    def tighten(self, execute: Any, sql: str, params: Any, many: bool, context: dict[str, Any]) -> Any:
        """Before each statement: no time left means no statement; a bound that reaches too far is narrowed."""
        self._bounded.require_time()
        usable = self._bounded.connection.connection.info.transaction_status == _IN_TRANSACTION
        if usable and time.monotonic() + self._until > self._bounded.deadline + SLACK_SECONDS:
            self._install()
        return execute(sql, params, many, context)

    def end(self) -> None:
        """Before the commit: refuse a policy that somebody else has set; ours ends with the transaction."""
        self._require_ours(_ask(self._bounded, _READ_POLICY))
        if self._nested:
            _ask(self._bounded, _SET_POLICY, *self._before)

    def _install(self) -> None:
        left = max(0.0, self._bounded.deadline - time.monotonic()) * 1000
        milliseconds = [_whole(min(left, limit)) for limit in self._limits]
        answer = _ask(self._bounded, _SET_POLICY, *(str(number) for number in milliseconds))
        self._require_ours(answer)
        self._ours, self._until = answer[2:4], max(milliseconds) / 1000

    def _require_ours(self, found: Any) -> None:
        if tuple(found[:2]) != tuple(self._ours):
            raise LockPolicyConflict(self._ours, tuple(found[:2]))


def _whole(milliseconds: float) -> int:
    return max(1, math.ceil(min(milliseconds, LONGEST_MILLISECONDS)))


def _ask(bounded: Bounded, sql: str, *values: str) -> Any:
    """Past the wrappers of the connection, the one of the policy among them."""
    connection: Any = bounded.connection
    with connection.wrap_database_errors, connection.connection.cursor() as cursor:
        cursor.execute(sql, values or None)
        return cursor.fetchone() if cursor.description else None


# --- SQLite ---------------------------------------------------------------------------------------------


@contextmanager
def _on_sqlite(bounded: Bounded, using: str, snapshot: bool) -> Iterator[None]:
    connection: Any = bounded.connection
    connection.ensure_connection()
    raw = connection.connection
    before = busy_timeout(raw)
    left = bounded.deadline - time.monotonic()
    ours = [before]

    def narrow() -> None:
        ours.append(math.floor(max(0.0, min(ours[-1], (bounded.deadline - time.monotonic()) * 1000))))
        set_busy_timeout(raw, ours[-1])

    try:
        with _reading(connection, using) if snapshot else _writing(using, bounded.what, before, left):
            narrow()
            yield
            if busy_timeout(raw) != ours[-1]:
                raise LockPolicyConflict(ours[-1], busy_timeout(raw))
            narrow()  # without a write-ahead log a COMMIT waits for those who read
            bounded.require_commit()
    except BaseException as error:
        _restore(raw, ours, bounded, error)
        raise
    _restore(raw, ours, bounded, None)


@contextmanager
def _writing(using: str, what: str, patience_ms: int, left: float) -> Iterator[None]:
    with database.transaction(using, what=what, timeout=max(0.0, min(patience_ms / 1000, left))):
        yield


@contextmanager
def _reading(connection: Any, using: str) -> Iterator[None]:
    """A deferred transaction: it sees one state of the file and keeps no writer out."""
    mode, connection.transaction_mode = connection.transaction_mode, None
    block = database.OwnAtomic(using, savepoint=True, durable=False)
    try:
        block.__enter__()
    finally:
        connection.transaction_mode = mode
    try:
        yield
    except BaseException as error:
        block.__exit__(type(error), error, error.__traceback__)
        raise
    block.__exit__(None, None, None)


def _restore(raw: Any, ours: list[int], bounded: Bounded, failure: BaseException | None) -> None:
    """Put the earlier policy, the first of `ours`, back if one of ours still stands.

    A failure to do so undoes nothing that was committed.
    """
    try:
        if busy_timeout(raw) in ours:
            set_busy_timeout(raw, ours[0])
    except Exception as error:
        sentence = f"the connection's lock policy could not be put back: {error}"
        if failure is None:
            bounded.note_cleanup(sentence)
        else:
            failure.add_note(f"Besides, {sentence}.")
