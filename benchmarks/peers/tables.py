"""The peers' tables, in a database of their own."""

from __future__ import annotations

import sys
from importlib.metadata import version


def make() -> dict[str, str]:
    """Create them; answers the versions that are measured."""
    from django.core.management import call_command
    from django.db import connection

    call_command("migrate", verbosity=0, stdout=sys.stderr)
    if connection.vendor == "postgresql":
        from benchmarks.peers import pgqueuer_asyncpg

        pgqueuer_asyncpg.install()
    names = (
        "procrastinate",
        "pgqueuer",
        "asyncpg",
        "django-tasks",
        "django-tasks-db",
        "celery",
        "redis",
        "uvloop",
    )
    return {name: version(name) for name in names}


def settle(*tables: str) -> None:
    """What was written for a measurement is on the disk and known to the planner before it begins."""
    from django.db import connection

    with connection.cursor() as cursor:
        if connection.vendor == "postgresql":
            for table in tables:
                cursor.execute(f"VACUUM ANALYZE {table}")
            cursor.execute("CHECKPOINT")
        else:
            cursor.execute("PRAGMA wal_checkpoint(TRUNCATE)")
            cursor.fetchall()
