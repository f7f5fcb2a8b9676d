"""The connections of long-lived threads: kept as long as the thread, reset between slices."""

from __future__ import annotations

import copy
import enum
import logging
from typing import Any

from django.db import connections, reset_queries
from django.db.backends.base.base import BaseDatabaseWrapper
from django.db.transaction import TransactionManagementError

from durable_jobs import database
from durable_jobs.logs import tell

logger = logging.getLogger("durable_jobs.connection")

KEEPALIVES = {"keepalives": 1, "keepalives_idle": 30, "keepalives_interval": 10, "keepalives_count": 3}
"""A peer that vanished is noticed within a minute instead of hours."""
CONNECT_TIMEOUT = 5
GIVE_WAY_SECONDS = 1.0


def own(name: str) -> BaseDatabaseWrapper:
    """Make this thread's connection to the jobs' database one for a long life; `name` shows on the server.

    On PostgreSQL: TCP keepalives, READ COMMITTED, a connection of its own beside the project's pool. The
    project's other threads keep their settings. On SQLite, a write of the project's own lets the beats of this
    process go first. Nothing is connected yet.
    """
    connection = connections[database.alias()]
    if getattr(connection, "durable_jobs_own", False):
        return connection
    close(connection)
    settings = copy.copy(connection.settings_dict)
    settings["CONN_MAX_AGE"] = None
    if connection.vendor == "postgresql":
        settings["OPTIONS"] = _postgresql_options(settings["OPTIONS"], name)
    if connection.vendor == "sqlite":
        connection.execute_wrappers.append(_give_way)
    connection.settings_dict = settings
    connection.durable_jobs_own = True
    return connection


def _give_way(execute: Any, sql: str, params: Any, many: bool, context: dict[str, Any]) -> Any:
    connection = context["connection"]
    raw = connection.connection
    # Only where no transaction is open: a thread that holds the file must not wait for anybody.
    if (raw is None or not raw.in_transaction) and not sql.startswith(("SELECT", "PRAGMA")):
        database.writer_lock(connection).give_way(GIVE_WAY_SECONDS)
    return execute(sql, params, many, context)


def _postgresql_options(given: dict[str, Any], name: str) -> dict[str, Any]:
    from django.db.backends.postgresql.psycopg_any import IsolationLevel

    options = {**KEEPALIVES, "connect_timeout": CONNECT_TIMEOUT, **given}
    options.pop("pool", None)
    options["isolation_level"] = IsolationLevel.READ_COMMITTED
    options["application_name"] = f"durable_jobs {name}"[:63]
    return options


def close(connection: BaseDatabaseWrapper | None = None) -> None:
    """Close this thread's connection to the jobs' database, whatever its state; the next use connects."""
    connection = connections[database.alias()] if connection is None else connection
    raw = connection.connection
    # What a block that was never left has noted would otherwise refuse every later connection.
    connection.in_atomic_block = connection.needs_rollback = connection.closed_in_transaction = False
    connection.savepoint_ids, connection.atomic_blocks, connection.run_on_commit = [], [], []
    try:
        connection.close()
    except Exception as error:
        tell(logger, logging.DEBUG, "close_failed", str(error))
        connection.connection = None
    if raw is not None and connection.connection is raw:
        connection.connection = None


def clean() -> None:
    """Make this thread's connections as new: what a step has left open is rolled back or closed."""
    for connection in connections.all(initialized_only=True):
        leave_clean(connection)
    reset_queries()


class Leftover(enum.Enum):
    """What somebody else's code left on a connection."""

    NOTHING = "nothing"
    TRANSACTION = "an open transaction"
    BROKEN = "a connection that does not work"


def leave_clean(connection: BaseDatabaseWrapper) -> Leftover:
    """Make one connection as new, and answer what was on it.

    An open transaction is rolled back, what broke is closed. The blocks that Django's TestCase opened stay.
    """
    if any(database.is_testcases(block) for block in connection.atomic_blocks):
        return _leave_blocks(connection)
    found = _found_on(connection)
    if found is not Leftover.NOTHING:
        event = "transaction_left_open" if found is Leftover.TRANSACTION else "connection_dropped"
        tell(logger, logging.WARNING, event, "closed", alias=connection.alias)
        close(connection)
    elif connection.in_atomic_block or _autocommit_is_off(connection):
        close(connection)
    elif connection.errors_occurred:
        if connection.is_usable():
            connection.errors_occurred = False
        else:
            found = Leftover.BROKEN
            close(connection)
    return found


def _leave_blocks(connection: BaseDatabaseWrapper) -> Leftover:
    found = Leftover.NOTHING
    while not database.is_testcases(connection.atomic_blocks[-1]):
        found = Leftover.TRANSACTION
        error = TransactionManagementError("This block was left open.")
        connection.atomic_blocks[-1].__exit__(TransactionManagementError, error, None)
    return found


_IDLE, _UNKNOWN = 0, 4
"""libpq's PQTRANS_IDLE and PQTRANS_UNKNOWN; what lies between is some open transaction."""


def _found_on(connection: BaseDatabaseWrapper) -> Leftover:
    raw: Any = connection.connection
    if raw is None:
        return Leftover.NOTHING
    try:
        if connection.vendor == "sqlite":
            return Leftover.TRANSACTION if raw.in_transaction else Leftover.NOTHING
        status = _UNKNOWN if raw.closed else int(raw.info.transaction_status)
    except Exception:
        return Leftover.BROKEN
    if status == _IDLE:
        return Leftover.NOTHING
    return Leftover.BROKEN if status == _UNKNOWN else Leftover.TRANSACTION


def _autocommit_is_off(connection: BaseDatabaseWrapper) -> bool:
    return connection.connection is not None and not connection.autocommit
