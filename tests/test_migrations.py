"""The schema: it can be undone and done again, and no later release may take it away under old code."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from django.contrib.postgres.operations import AddIndexConcurrently
from django.db import connection, migrations, models
from django.db.migrations import Migration
from django.db.migrations.loader import MigrationLoader
from django.db.migrations.operations.base import Operation

from tests.processes import Processes, database_url

APP = "durable_jobs"
FIRST = "0001_initial"

NO_LONGER_USED: dict[str, str] = {}
"""Migrations that take away what the release before does not use any more, with that release: see docs/upgrading.md."""


# --- done, undone, done again ----------------------------------------------------------------------------------


THERE_AND_BACK = """
from django.core.management import call_command
from django.db import connection
from durable_jobs import kinds, service
from durable_jobs.kinds import Done, Kind
from durable_jobs.models import Job


@kinds.register
class Import(Kind):
    name = "shop.import"

    def step(self, ctx):
        return Done()


def tables():
    return [name for name in connection.introspection.table_names() if name.startswith("durable_jobs")]


call_command("migrate", "durable_jobs", verbosity=0)
job = service.start("shop.import", {"line": 1}, lock_key="one").job
service.cancel(job.id, reason="to have a history")
service.start("shop.import", lock_key="one")
service.pause(queue="imports", reason="to have a row")
assert Job.objects.count() == 2
call_command("migrate", "durable_jobs", "zero", verbosity=0)
assert tables() == [], tables()
call_command("migrate", "durable_jobs", verbosity=0)
assert service.start("shop.import", lock_key="one").created and Job.objects.count() == 1
"""


@pytest.fixture
def scratch(transactional_db: None, tmp_path: Path) -> Iterator[str]:
    """The address of a database of the test's own, empty."""
    if connection.vendor == "sqlite":
        yield f"sqlite:///{tmp_path}/scratch.sqlite3"
        return
    name = f"scratch_{os.getpid()}"
    with connection.cursor() as cursor:
        cursor.execute(f"DROP DATABASE IF EXISTS {name}")
        cursor.execute(f"CREATE DATABASE {name}")
    yield urlsplit(database_url())._replace(path=f"/{name}").geturl()
    with connection.cursor() as cursor:
        cursor.execute(f"DROP DATABASE {name} WITH (FORCE)")


def test_the_schema_can_be_undone_and_done_again_with_rows_in_it(scratch: str, processes: Processes) -> None:
    process = processes.python(THERE_AND_BACK, environment={"DATABASE_URL": scratch})
    assert process.wait(100) == 0, process.output


def test_every_migration_can_be_undone() -> None:
    assert [str(operation) for _, operation in operations(all_migrations()) if not operation.reversible] == []


# --- old code goes on with the new schema ------------------------------------------------------------------------


def all_migrations() -> list[Migration]:
    loader = MigrationLoader(None)
    return [migration for (app, _), migration in sorted(loader.disk_migrations.items()) if app == APP]


def operations(found: list[Migration]) -> Iterator[tuple[str, Operation]]:
    for migration in found:
        for operation in migration.operations:
            if isinstance(operation, migrations.SeparateDatabaseAndState):
                for inner in operation.database_operations:
                    yield migration.name, inner
            else:
                yield migration.name, operation


def fits_old_rows(field: models.Field[Any, Any]) -> bool:
    """Whether an INSERT that does not name the column goes through."""
    return field.null or field.has_db_default() or field.many_to_many is True


def problem(operation: Operation, new_models: set[str]) -> str:
    """Why processes of the release before could not go on while this has been done; empty when they can."""
    name = getattr(operation, "model_name", getattr(operation, "name", "")).lower()
    match operation:
        case migrations.CreateModel() | migrations.RemoveIndex() | migrations.RemoveConstraint():
            return ""
        case migrations.AlterModelOptions() | migrations.AlterModelManagers():
            return ""
        case _ if name in new_models:
            return ""
        case migrations.AddField(field=field):
            return "" if fits_old_rows(field) else "old code inserts rows without it: null=True or db_default"
        case AddIndexConcurrently():
            return ""
        case migrations.AddIndex():
            return "it locks the table out while it is built: not atomic, and CONCURRENTLY on PostgreSQL"
        case migrations.RunPython() | migrations.RunSQL():
            return "" if operation.reversible else "it cannot be undone"
    return "old code still writes, reads or names what this changes: see docs/upgrading.md"


def problems(found: list[Migration]) -> dict[str, list[str]]:
    told: dict[str, list[str]] = {}
    for migration in found:
        if migration.name == FIRST or migration.name in NO_LONGER_USED:
            continue
        new = {op.name.lower() for op in migration.operations if isinstance(op, migrations.CreateModel)}
        for name, operation in operations([migration]):
            if why := problem(operation, new):
                told.setdefault(name, []).append(f"{operation.describe()}: {why}")
    return told


def test_no_migration_takes_anything_away_from_the_release_before() -> None:
    assert problems(all_migrations()) == {}


TEXT = models.TextField
REFUSED: list[Operation] = [
    migrations.RemoveField("job", "priority"),
    migrations.RenameField("job", "priority", "rank"),
    migrations.RenameModel("Job", "Work"),
    migrations.DeleteModel("Pause"),
    migrations.AlterModelTable("job", "work"),
    migrations.AddField("job", "colour", TEXT(default="red")),
    migrations.AlterField("job", "progress_message", TEXT()),
    migrations.AddIndex("job", models.Index(fields=["created_at"], name="one")),
    migrations.AddConstraint("job", models.CheckConstraint(condition=models.Q(priority=0), name="two")),
    migrations.RunPython(lambda apps, editor: None),
    migrations.RunSQL("UPDATE durable_jobs_job SET priority = 0"),
    migrations.SeparateDatabaseAndState([migrations.RemoveField("job", "priority")], []),
]
ALLOWED: list[Operation] = [
    migrations.CreateModel("Note", [("id", models.BigAutoField(primary_key=True)), ("text", TEXT())]),
    migrations.AddField("note", "colour", TEXT(default="red")),
    migrations.AddField("job", "colour", TEXT(null=True)),
    migrations.AddField("job", "shade", TEXT(db_default="red")),
    migrations.RemoveIndex("job", name="durable_jobs_held"),
    AddIndexConcurrently("job", models.Index(fields=["created_at"], name="three")),
    migrations.RunPython(migrations.RunPython.noop, migrations.RunPython.noop),
    migrations.SeparateDatabaseAndState([], [migrations.RemoveField("job", "priority")]),
]


def next_release(*done: Operation) -> list[Migration]:
    migration = Migration("0002_next", APP)
    migration.operations = list(done)
    return [migration]


@pytest.mark.parametrize("operation", REFUSED, ids=lambda operation: operation.describe())
def test_what_old_code_would_miss_is_refused(operation: Operation) -> None:
    assert list(problems(next_release(operation))) == ["0002_next"]


def test_what_old_code_does_not_notice_is_allowed() -> None:
    assert problems(next_release(*ALLOWED)) == {}
