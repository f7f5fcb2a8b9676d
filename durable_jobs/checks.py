"""System checks: what is wrong with the settings, the kinds and the database, told when a process starts.

Every id is explained in `docs/checks.md`. Checks that ask the database carry Django's tag `database`: they
run with `migrate` and with `check --database ALIAS`, and answer nothing otherwise.
"""

from __future__ import annotations

import re
import sqlite3
import sys
from collections.abc import Iterator, Sequence
from typing import Any, Final

from django.conf import settings
from django.contrib.auth import get_user_model
from django.core import checks
from django.core.checks import CheckMessage, Error, Tags, Warning
from django.core.exceptions import ImproperlyConfigured
from django.core.management import get_commands
from django.db import DatabaseError, NotSupportedError, connections, router
from django.db.backends.base.base import BaseDatabaseWrapper
from django.utils.module_loading import import_string

from durable_jobs import conf, database, kinds, transports
from durable_jobs.conf import config
from durable_jobs.exceptions import shown

TAG: Final = "durable_jobs"
"""Runs these checks alone: `manage.py check --tag durable_jobs`."""

OLDEST_SQLITE: Final = (3, 35)  # RETURNING
OLDEST_POSTGRESQL: Final = 14
SHORTEST_SQLITE_TIMEOUT: Final = 20
COMMANDS: Final = ("runworker", "reconcile", "prune_jobs")

_WAL = re.compile(r"\bjournal_mode\s*=\s*['\"]?wal\b", re.IGNORECASE)
_SORTS: Final[dict[str, tuple[type[Error | Warning], str]]] = {
    "shape": (Error, "durable_jobs.E001"),
    "name": (Error, "durable_jobs.E002"),
    "value": (Error, "durable_jobs.E003"),
    "contradiction": (Error, "durable_jobs.E004"),
    "doubt": (Warning, "durable_jobs.W002"),
}
_OF_TRANSPORTS: Final = {"no_broker": "durable_jobs.W007", "visibility": "durable_jobs.W008"}


def register() -> None:
    """Register every check; for `AppConfig.ready`."""
    for check in (
        check_settings,
        check_scopes,
        check_transport,
        check_users,
        check_time_zone,
        check_kinds,
        check_commands,
        check_database,
    ):
        checks.register(check, TAG)
    checks.register(check_running_database, TAG, Tags.database)


def check_settings(app_configs: Any = None, **options: Any) -> list[CheckMessage]:
    """Report unknown names, wrong values and contradictions in `DURABLE_JOBS` (E001 to E004, W002)."""
    found: list[CheckMessage] = []
    for problem in conf.problems():
        level, id = _SORTS[problem.sort]
        found.append(level(problem.message, hint=problem.way_out, id=id))
    return found


def check_scopes(app_configs: Any = None, **options: Any) -> list[CheckMessage]:
    """Report functions for scopes that cannot be found (E012)."""
    found: list[CheckMessage] = []
    for name in ("SCOPE_FROM_REQUEST", "ADMIN_SCOPES", "SCOPE_LABELS"):
        try:
            function = getattr(config, name)
        except ImproperlyConfigured:  # told by check_settings
            continue
        if not isinstance(function, str):
            continue
        problem = ""
        try:
            if not callable(import_string(function)):
                problem = "which cannot be called"
        except ImportError as error:
            problem = f"which cannot be imported: {error}"
        if problem:
            found.append(
                Error(
                    f"{conf.NAME}[{name!r}] is {function!r}, {problem}.",
                    hint="Write the dotted path of a function that takes the request.",
                    id="durable_jobs.E012",
                )
            )
    return found


def check_transport(app_configs: Any = None, **options: Any) -> list[CheckMessage]:
    """Report a transport that cannot be used here (E013), and what Celery lacks for it (W007, W008)."""
    try:
        transport = transports.current()
    except ImproperlyConfigured as error:
        if conf.problems():  # told by check_settings
            return []
        hint = "Install durable-jobs[celery], or use 'database', which needs nothing else."
        return [Error(str(error), hint=hint, id="durable_jobs.E013")]
    return [
        Warning(problem, hint=hint, id=_OF_TRANSPORTS[sort]) for sort, problem, hint in transport.problems()
    ]


def check_users(app_configs: Any = None, **options: Any) -> list[CheckMessage]:
    """Report users in another database than the jobs that refer to them (E005)."""
    try:
        users = router.db_for_write(get_user_model())
    except ImproperlyConfigured:  # Django's own checks tell that there is no user model
        return []
    jobs = database.alias()
    if users == jobs:
        return []
    return [
        Error(
            f"Jobs are written to the database {jobs!r} and users to {users!r}, but jobs refer to users.",
            hint="Make DATABASE_ROUTERS send durable_jobs and the user model to the same database.",
            id="durable_jobs.E005",
        )
    ]


def check_time_zone(app_configs: Any = None, **options: Any) -> list[CheckMessage]:
    """Report naive times (E006)."""
    if settings.USE_TZ:
        return []
    return [
        Error(
            "USE_TZ is False: leases and delays would be local times, which jump by an hour twice a year.",
            hint="Set USE_TZ = True. TIME_ZONE may stay what it is.",
            id="durable_jobs.E006",
        )
    ]


def check_kinds(app_configs: Any = None, **options: Any) -> list[CheckMessage]:
    """Report what registration could not see yet (E010), and leases shorter than GRACE (W005)."""
    found: list[CheckMessage] = [
        Error(f"kind {error.kind}: {error.problem}.", hint=error.way_out, id="durable_jobs.E010")
        for error in kinds.problems()
    ]
    try:
        grace = config.GRACE
    except ImproperlyConfigured:  # told by check_settings
        return found
    for kind in kinds.all_kinds():
        if kind.lease_seconds < grace:
            found.append(
                Warning(
                    f"kind {kind.name}: lease_seconds = {kind.lease_seconds:g} is shorter than "
                    f"{conf.NAME}['GRACE'] = {grace:g}: more beats, and repairs that come hardly sooner.",
                    hint=f"Raise lease_seconds to {grace:g} or more, or lower GRACE.",
                    id="durable_jobs.W005",
                )
            )
    return found


def check_commands(app_configs: Any = None, **options: Any) -> list[CheckMessage]:
    """Report commands of ours that another app hides (W004)."""
    owners = get_commands()
    return [
        Warning(
            f"manage.py {name} is a command of {shown(owners[name])}: that app comes before durable_jobs in "
            "INSTALLED_APPS.",
            hint=f"Run manage.py durable_jobs {_long_name(name)} instead, or list durable_jobs first.",
            id="durable_jobs.W004",
        )
        for name in COMMANDS
        if name in owners and owners[name] != "durable_jobs"
    ]


def check_database(app_configs: Any = None, **options: Any) -> list[CheckMessage]:
    """Report what the settings of the jobs' database tell without asking it (E007, E008, E011, W001, W003)."""
    connection = connections[database.alias()]
    if connection.vendor == "sqlite":
        return [
            *_sqlite_version(connection),
            *_sqlite_time_zone(connection),
            *_sqlite_options(connection),
        ]
    if connection.vendor == "postgresql":
        return list(_isolation_option(connection))
    return [
        Error(
            f"Jobs are written to the database {connection.alias!r}, which is {connection.display_name}: it "
            "lacks the partial unique indexes that keep two jobs from holding one lock key.",
            hint="Keep jobs and users in PostgreSQL 14 or later, or in SQLite 3.35 or later.",
            id="durable_jobs.E007",
        )
    ]


def check_running_database(
    app_configs: Any = None, *, databases: Sequence[str] | None = None, **options: Any
) -> list[CheckMessage]:
    """Report what only the database itself can tell (E009, E014, W003, W006, W009)."""
    alias = database.alias()
    if alias not in (databases or ()):
        return []
    connection = connections[alias]
    try:
        connection.ensure_connection()
    except NotSupportedError as error:  # older than Django itself accepts
        return [_postgresql_too_old(connection, str(error))] if connection.vendor == "postgresql" else []
    except DatabaseError as error:
        return [
            Error(
                f"The database {alias!r} does not answer: {' '.join(str(error).split())}",
                hint=f'Is it running, and are NAME, HOST, PORT, USER and PASSWORD in DATABASES["{alias}"] right?',
                id="durable_jobs.E014",
            )
        ]
    if connection.vendor == "sqlite":
        return [*_sqlite_journal(connection), *_not_migrated(connection)]
    if connection.vendor == "postgresql":
        too_old = list(_postgresql_version(connection))
        return too_old or [*_isolation_default(connection), *_not_migrated(connection)]
    return []


def _not_migrated(connection: BaseDatabaseWrapper) -> Iterator[CheckMessage]:
    # `migrate` asks these checks before it makes the tables. No error: that would keep it from making them.
    if sys.argv[1:2] == ["migrate"] or (connection.vendor == "sqlite" and _in_memory(connection)):
        return
    if lacking := database.lacking(connection):
        yield Warning(
            f"The database {connection.alias!r} has no {lacking}: jobs can be neither started nor run.",
            hint="Run manage.py migrate.",
            id="durable_jobs.W009",
        )


def _sqlite_version(connection: BaseDatabaseWrapper) -> Iterator[CheckMessage]:
    version = sqlite3.sqlite_version_info
    if version < OLDEST_SQLITE:
        yield Error(
            f"The SQLite library of this Python is {_dotted(version)}, and the database {connection.alias!r} "
            f"needs {_dotted(OLDEST_SQLITE)} or later for jobs (RETURNING).",
            hint="Use a newer Python or SQLite library, or PostgreSQL.",
            id="durable_jobs.E008",
        )


def _sqlite_time_zone(connection: BaseDatabaseWrapper) -> Iterator[CheckMessage]:
    zone = connection.settings_dict.get("TIME_ZONE")
    if zone not in (None, "UTC"):
        yield Error(
            f'DATABASES["{connection.alias}"]["TIME_ZONE"] is {zone!r}: Django would read the times of jobs, which '
            "SQLite's own clock writes in UTC, as times of that zone.",
            hint='Leave TIME_ZONE of the database out, or set it to "UTC".',
            id="durable_jobs.E011",
        )


def _sqlite_options(connection: BaseDatabaseWrapper) -> Iterator[CheckMessage]:
    if _in_memory(connection):
        return
    options = connection.settings_dict["OPTIONS"]
    wanted: dict[str, object] = {}
    if str(options.get("transaction_mode")).upper() not in ("IMMEDIATE", "EXCLUSIVE"):
        wanted["transaction_mode"] = "IMMEDIATE"
    timeout = options.get("timeout", 5)
    if not isinstance(timeout, int | float) or timeout < SHORTEST_SQLITE_TIMEOUT:
        wanted["timeout"] = SHORTEST_SQLITE_TIMEOUT
    if not _sets_wal(connection):
        others = options.get("init_command", "").strip().rstrip(";")
        wanted["init_command"] = f"PRAGMA journal_mode=WAL;{f' {others};' if others else ''}"
    if not wanted:
        return
    lines = "\n".join(f'    "{name}": {_quoted(value)},' for name, value in wanted.items())
    yield Warning(
        f"The SQLite database {connection.alias!r} is not set up for several writers (missing: "
        f"{', '.join(wanted)}): requests and workers would fail with 'database is locked'.",
        hint=f'Put these lines into DATABASES["{connection.alias}"]["OPTIONS"]:\n{lines}',
        id="durable_jobs.W001",
    )


def _sqlite_journal(connection: BaseDatabaseWrapper) -> Iterator[CheckMessage]:
    if _in_memory(connection) or not _sets_wal(connection):
        return
    mode = _one(connection, "PRAGMA journal_mode")
    if mode.lower() != "wal":
        yield Warning(
            f"The SQLite database {connection.alias!r} is in journal mode {mode!r}, although init_command "
            "asks for WAL: readers block the workers' writes.",
            hint="Keep the file on a local disk (WAL does not work on network file systems), and set the "
            "journal mode once.",
            id="durable_jobs.W006",
        )


def _postgresql_version(connection: BaseDatabaseWrapper) -> Iterator[CheckMessage]:
    version = connection.get_database_version()
    if version < (OLDEST_POSTGRESQL,):
        yield _postgresql_too_old(connection, f"The server is PostgreSQL {_dotted(version)}.")


def _postgresql_too_old(connection: BaseDatabaseWrapper, found: str) -> CheckMessage:
    return Error(
        f"The database {connection.alias!r} is too old: jobs need PostgreSQL {OLDEST_POSTGRESQL} or "
        f"later. {found}",
        hint="Upgrade the server.",
        id="durable_jobs.E009",
    )


def _isolation_option(connection: BaseDatabaseWrapper) -> Iterator[CheckMessage]:
    level = connection.settings_dict["OPTIONS"].get("isolation_level")
    if level is None:
        return
    from django.db.backends.postgresql.psycopg_any import IsolationLevel

    # PostgreSQL treats READ UNCOMMITTED as READ COMMITTED.
    if level not in (IsolationLevel.READ_COMMITTED, IsolationLevel.READ_UNCOMMITTED):
        found = f'OPTIONS["isolation_level"] is {getattr(level, "name", level)}'
        yield _isolation(connection, found, 'Remove "isolation_level"')


def _isolation_default(connection: BaseDatabaseWrapper) -> Iterator[CheckMessage]:
    if "isolation_level" in connection.settings_dict["OPTIONS"]:
        return
    level = _one(connection, "SHOW default_transaction_isolation")
    if level not in ("read committed", "read uncommitted"):
        found = f"default_transaction_isolation is {level}"
        yield _isolation(connection, found, "Reset it for the role and the database")


def _isolation(connection: BaseDatabaseWrapper, found: str, way_out: str) -> CheckMessage:
    return Warning(
        f"{found} on the database {connection.alias!r}, and jobs need READ COMMITTED: starting and "
        "cancelling jobs in your transactions may fail with a serialization error.",
        hint=f"{way_out}, or retry those transactions.",
        id="durable_jobs.W003",
    )


def _one(connection: BaseDatabaseWrapper, sql: str) -> str:
    with connection.cursor() as cursor:
        cursor.execute(sql)
        return str(cursor.fetchall()[0][0])


def _sets_wal(connection: BaseDatabaseWrapper) -> bool:
    return bool(_WAL.search(connection.settings_dict["OPTIONS"].get("init_command", "")))


def _in_memory(connection: BaseDatabaseWrapper) -> bool:
    return bool(connection.is_in_memory_db())  # type: ignore[attr-defined]


def _quoted(value: object) -> str:
    return '"' + value.replace('"', "'") + '"' if isinstance(value, str) else str(value)


def _dotted(version: Sequence[int]) -> str:
    return ".".join(map(str, version))


def _long_name(command: str) -> str:
    return {"runworker": "worker", "prune_jobs": "prune"}.get(command, command)
