"""Indexes that a beat never touches, pages with room, and a schema that goes both ways."""

from __future__ import annotations

import re
from collections.abc import Iterator
from io import StringIO

import pytest
from django.apps import apps
from django.core.management import call_command
from django.db import connection

from durable_jobs import store
from durable_jobs.models import Job, uuid7
from durable_jobs.store import Counts
from tests.store.rows import ME, State, ago, execute, insert_raw, lease_on, make

MODELS = list(apps.get_app_config("durable_jobs").get_models())
VENDORS = ("sqlite", "postgresql")


# --- what a beat and a checkpoint write ----------------------------------------------------------------------


def written_by(statement: store.Statement, vendor: str) -> set[str]:
    """The columns that stand left of an equals sign in its SET."""
    sql = statement.sql(vendor)
    found: set[str] = set()
    for part in sql.split(" SET ")[1:]:
        depth, start = 0, 0
        for position, sign in enumerate(part):
            depth += {"(": 1, ")": -1}.get(sign, 0)
            ended = depth < 0 or (depth == 0 and re.match(r"\s(FROM|WHERE|RETURNING)\s", part[position:]))
            if ended or (depth == 0 and sign == ","):
                found.add(part[start:position].partition("=")[0].strip())
                start = position + 1
            if ended:
                break
    return found


@pytest.mark.parametrize("vendor", VENDORS)
def test_the_columns_are_read_from_the_statements(vendor: str) -> None:
    """The next test would be empty without this one."""
    assert written_by(store._BEAT_MANY, vendor) == {"lease_expires_at", "heartbeat_at"}
    assert written_by(store._SET_PROGRESS, vendor) == {
        "heartbeat_at", "processed_count", "total_count", "progress_message",
    }  # fmt: skip
    assert written_by(store._WRITE_CHECKPOINT, vendor) == {
        "lease_expires_at", "heartbeat_at", "last_committed_at", "updated_at", "consecutive_failures",
        "redrives_since_commit", "checkpoint", "checkpoint_at", "processed_count", "total_count",
        "progress_message",
    }  # fmt: skip


def definitions() -> Iterator[tuple[str, str]]:
    """Name and full text of every index on the jobs' table, as the database has it."""
    if connection.vendor == "postgresql":
        yield from execute("SELECT indexname, indexdef FROM pg_indexes WHERE tablename = 'durable_jobs_job'")
    else:
        for name, sql in execute(
            "SELECT name, sql FROM sqlite_master WHERE type = 'index' AND tbl_name = 'durable_jobs_job'"
        ):
            yield name, sql or "id"


@pytest.mark.django_db
def test_no_index_and_no_predicate_holds_what_a_beat_writes() -> None:
    """B17, B53, T24: else every beat of a two-day job rewrites an index."""
    written = set().union(
        *(
            written_by(statement, vendor)
            for statement in (store._BEAT_MANY, store._SET_PROGRESS, store._WRITE_CHECKPOINT)
            for vendor in VENDORS
        )
    )
    seen = dict(definitions())
    assert len(seen) == 13
    for name, text in seen.items():
        assert not written & set(re.findall(r"\w+", text)), f"{name}: {text}"


@pytest.mark.django_db
def test_the_indexes_are_those_that_the_model_names() -> None:
    """B16, B18: the migration and the model tell the same."""
    named = {index.name for index in Job._meta.indexes}
    named |= {one.name for one in Job._meta.constraints if hasattr(one, "expressions")}
    present = {name for name, _ in definitions()} - {
        "durable_jobs_job_pkey",
        "sqlite_autoindex_durable_jobs_job_1",
    }
    assert present == named


@pytest.mark.postgres_only
@pytest.mark.django_db
def test_pages_have_room_for_every_row_once_more() -> None:
    """P-G: at fillfactor 80 only 42 % of a first mass renewal stayed on its page."""
    ((options,),) = execute("SELECT reloptions FROM pg_class WHERE relname = 'durable_jobs_job'")
    assert "fillfactor=50" in options
    assert any(option.startswith("autovacuum_vacuum_scale_factor=0.01") for option in options)


@pytest.mark.postgres_only
@pytest.mark.django_db(transaction=True)
@pytest.mark.parametrize("requested", [False, True], ids=["", "with a cancel request"])
def test_beats_and_checkpoints_stay_on_their_page(requested: bool) -> None:
    """C107, P-E (d): all updates of a running job are HOT, the first mass renewal too."""
    execute("ALTER TABLE durable_jobs_job SET (autovacuum_enabled = off)")
    try:
        rows = [State("running", request="row" if requested else "none") for _ in range(300)]
        ids = [make(state) for state in rows[:1]]
        for _ in range(299):
            ids.append(make(rows[0]))
        leases = [lease_on(job_id) for job_id in ids]
        updated, hot = updates()
        for _ in range(3):
            store.beat_many(ME, leases)
        for lease in leases[:100]:
            store.write_checkpoint(lease, '{"at": 11}', Counts(processed=11, message="on"))
            store.set_progress(lease, Counts(processed=12, total=99))
        after, hot_after = updates()
        assert after - updated == 3 * 300 + 200
        assert hot_after - hot == after - updated
    finally:
        execute("ALTER TABLE durable_jobs_job RESET (autovacuum_enabled)")


def updates() -> tuple[int, int]:
    execute("SELECT pg_stat_force_next_flush()")
    execute("SELECT 1")
    execute("SELECT pg_stat_clear_snapshot()")
    return execute(
        "SELECT n_tup_upd, n_tup_hot_upd FROM pg_stat_user_tables WHERE relname = 'durable_jobs_job'"
    )[0]


# --- migrations ------------------------------------------------------------------------------------------------


@pytest.mark.django_db
def test_no_migration_is_missing() -> None:
    """B18."""
    out = StringIO()
    call_command("makemigrations", "durable_jobs", check=True, dry_run=True, verbosity=1, stdout=out)


@pytest.mark.django_db
def test_every_field_has_its_column() -> None:
    """B18: the model and the table have the same columns, no more and no fewer."""
    with connection.cursor() as cursor:
        for model in MODELS:
            table = connection.introspection.get_table_description(cursor, model._meta.db_table)
            assert {column.name for column in table} == {f.column for f in model._meta.concrete_fields}


@pytest.mark.django_db(transaction=True)
def test_the_schema_can_be_taken_back_and_made_again() -> None:
    """Backwards leaves no table and no index; forwards again, and the store works on it."""
    tables = {model._meta.db_table for model in MODELS}
    try:
        call_command("migrate", "durable_jobs", "zero", verbosity=0)
        assert not tables & set(connection.introspection.table_names())
    finally:
        call_command("migrate", "durable_jobs", verbosity=0)
    assert tables <= set(connection.introspection.table_names())
    job_id = make("pending")
    assert store.claim(job_id, 4, 2, ME, 30) is not None


# --- old code on the new schema --------------------------------------------------------------------------------


@pytest.mark.django_db
def test_a_row_needs_only_its_required_columns() -> None:
    """Rolling deploys: code that does not know a column inserts rows that are whole all the same."""
    required = {
        field.column for field in Job._meta.concrete_fields if not field.null and not field.has_db_default()
    }
    assert required == {"id", "kind", "status"}
    moments = {"next_run_at": ago(1), "pending_since": ago(1)}
    insert_raw({"id": uuid7(), "kind": "k", "status": "pending", **moments})
    job = Job.objects.get()
    for field in Job._meta.concrete_fields:
        if field.has_default() and field.column != "id":
            assert getattr(job, field.attname) == field.get_default(), field.name
        if field.null and field.column not in moments:
            assert getattr(job, field.attname) is None, field.name
    assert abs((job.created_at - ago(0)).total_seconds()) < 5
    claimed = store.claim(job.id, 0, 0, ME, 30)
    assert claimed is not None and (claimed.lease_epoch, claimed.attempts) == (1, 1)


@pytest.mark.django_db
@pytest.mark.parametrize("model", MODELS, ids=lambda model: model.__name__)
def test_what_has_a_default_has_it_in_the_database(model: type[Job]) -> None:
    """`id` alone is made in Python."""
    for field in model._meta.concrete_fields:
        if field.has_default() and not field.primary_key:
            assert field.has_db_default(), field.name
