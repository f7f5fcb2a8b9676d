"""The connections of long-lived threads: kept as long as the thread, reset between slices."""

from __future__ import annotations

import copy
import logging
from typing import Any

from django.db import connections, reset_queries
from django.db.backends.base.base import BaseDatabaseWrapper

from durable_jobs import database
from durable_jobs.conf import config
from durable_jobs.logs import tell

logger = logging.getLogger("durable_jobs.connection")

KEEPALIVES = {
    "keepalives": 1,
    "keepalives_idle": 30,
    "keepalives_interval": 10,
    "keepalives_count": 3,
    "tcp_user_timeout": 30_000,
}
"""A peer that vanished is noticed within a minute instead of hours.

Keepalives alone would not do: they are not sent while a statement is on its way, and the kernel goes on sending
that one for a quarter of an hour.
"""
CONNECT_TIMEOUT = 5
GIVE_WAY_SECONDS = 1.0
NEVER_BY_ITSELF = 1_000_000
"""Executions after which psycopg prepares a statement unasked: the project's own are left as they are."""
_GIVEN = "_durable_jobs_given_settings"


def own(name: str) -> BaseDatabaseWrapper:
    """Make this thread's connection to the jobs' database one for a long life; `name` shows on the server.

    On PostgreSQL: TCP keepalives, READ COMMITTED, a connection of its own beside the project's pool, and the
    package's own statements prepared (PREPARE) and sent past Django's cursors (DIRECT_STATEMENTS). The
    project's own statements, and its other threads, keep their settings. On SQLite, a write of the project's own
    lets the beats of this process go first, and waits for the file here, not in SQLite. Nothing is connected yet.
    """
    connection = connections[database.alias()]
    if hasattr(connection, _GIVEN):
        return connection
    close(connection)
    setattr(connection, _GIVEN, connection.settings_dict)
    settings = copy.copy(connection.settings_dict)
    settings["CONN_MAX_AGE"] = None
    if connection.vendor == "postgresql":
        settings["OPTIONS"] = _postgresql_options(settings["OPTIONS"], name)
        if config.PREPARE and not settings.get("DISABLE_SERVER_SIDE_CURSORS"):
            settings["OPTIONS"].setdefault("prepare_threshold", NEVER_BY_ITSELF)
    if connection.vendor == "sqlite":
        connection.execute_wrappers.append(_give_way)
    connection.settings_dict = settings
    setattr(connection, database.DIRECT, config.DIRECT_STATEMENTS)
    return connection


def disown() -> None:
    """Close this thread's connection and give it the project's own settings back."""
    connection = connections[database.alias()]
    close(connection)
    if hasattr(connection, _GIVEN):
        connection.settings_dict = getattr(connection, _GIVEN)
        delattr(connection, _GIVEN)
        setattr(connection, database.DIRECT, False)
        if _give_way in connection.execute_wrappers:
            connection.execute_wrappers.remove(_give_way)


def _give_way(execute: Any, sql: str, params: Any, many: bool, context: dict[str, Any]) -> Any:
    connection = context["connection"]
    raw = connection.connection
    # Only where no transaction is open: a thread that holds the file must not wait for anybody.
    if raw is None or raw.in_transaction or sql.startswith(("SELECT", "PRAGMA")):
        return execute(sql, params, many, context)
    database.writer_lock(connection).give_way(GIVE_WAY_SECONDS)
    if many:
        # Each of its rows is committed by itself: it cannot be begun again.
        return execute(sql, params, many, context)
    return database.wait_for_file(connection, lambda: execute(sql, params, many, context))


setattr(_give_way, database.DIRECT, True)


def _postgresql_options(given: dict[str, Any], name: str) -> dict[str, Any]:
    from django.db.backends.postgresql.psycopg_any import IsolationLevel

    options = {**KEEPALIVES, "connect_timeout": CONNECT_TIMEOUT, **given}
    options.pop("pool", None)
    options["isolation_level"] = IsolationLevel.READ_COMMITTED
    options["application_name"] = f"durable_jobs {name}"[:63]
    return options


def close(connection: BaseDatabaseWrapper | None = None) -> None:
    """Close this thread's connection to the jobs' database, whatever its state; the next use connects."""
    database.discard(connections[database.alias()] if connection is None else connection)


def is_alone(connection: BaseDatabaseWrapper) -> bool:
    """Whether the project has this database only, and nobody collects its statements."""
    return len(connections.settings) == 1 and not connection.queries_logged


def clean() -> None:
    """Make this thread's connections as new: what a step has left open on any of them is rolled back."""
    for connection in connections.all(initialized_only=True):
        try:
            left = database.clear(connection.alias)
        except Exception as error:
            tell(logger, logging.WARNING, "connection_dropped", str(error), alias=connection.alias)
            database.discard(connection)
            continue
        if left is not database.Leftover.NOTHING:
            tell(logger, logging.WARNING, "left_on_connection", left.value, alias=connection.alias)
    reset_queries()
