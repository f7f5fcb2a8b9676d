"""A row that is looked for by its key is found by it, whatever the statistics say of the others."""

from __future__ import annotations

import re
from typing import Any

import pytest
from django.db import connection

from durable_jobs import database, store
from durable_jobs.models import uuid7

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.postgres_only]

STATEMENTS = (
    "_COMPLETE", "_COMPLETE_MANY", "_COMPLETE_MANY_WHOLE", "_BEAT_MANY", "_WRITE_CHECKPOINT", "_LOCK_FENCE",
    "_STILL_MINE", "_SET_PROGRESS",
)  # fmt: skip


@pytest.mark.parametrize("name", STATEMENTS)
def test_where_the_statistics_know_of_no_running_job_none_of_them_is_walked(name: str) -> None:
    plan = plan_of_a_quiet_hour(name)
    assert "durable_jobs_job_pkey" in plan
    assert "durable_jobs_running" not in plan, plan


def test_the_leases_that_a_beat_renewed_are_not_searched_for_each_lease() -> None:
    """A thousand leases would be a million comparisons: the planner knows of neither list how long it is."""
    plan = plan_of_a_quiet_hour("_BEAT_MANY")
    assert "hashed SubPlan" in plan, plan
    # For the answer, for how many they are, and for the hash.
    assert plan.count("CTE Scan on renewed") == 3, plan


def test_a_beat_walks_the_key_once_to_lock_and_once_to_write() -> None:
    """A join would search it for every lease, and while the table is nearly empty read all of it for every lease."""
    plan = plan_of_a_quiet_hour("_BEAT_MANY")
    assert plan.count("Index Cond: (id = ANY (") == 2, plan
    assert "CTE Scan on locked" in plan and "Join Filter" not in plan, plan


def plan_of_a_quiet_hour(name: str) -> str:
    """As prepared when many have ended and none runs."""
    now = "clock_timestamp()"
    with connection.cursor() as cursor:
        cursor.execute(
            f"""INSERT INTO durable_jobs_job (id, status, queue_name, kind, tenant_id, created_at, updated_at,
                finished_at) SELECT gen_random_uuid(), 'completed', 'main', 'plans.any', 'acme', {now}, {now}, {now}
            FROM generate_series(1, 2000)"""
        )
        cursor.execute("ANALYZE durable_jobs_job")
        return generic_plan(cursor, getattr(store, name))


def generic_plan(cursor: Any, statement: database.Statement) -> str:
    """The plan that a prepared statement keeps, made without looking at any value."""
    text, names = statement._build("postgresql")
    numbered = re.sub(r"%\((\w+)\)s", lambda found: f"${names.index(found[1]) + 1}", text).replace("%%", "%")
    given = {
        "id": uuid7(),
        "epoch": 1,
        "owner": "me",
        "ttl": 60.0,
        "ids": [],
        "epochs": [],
        "ttls": [],
        "results": [],
    }
    cursor.execute("SET plan_cache_mode = force_generic_plan")
    cursor.execute(f"PREPARE looked_at AS {numbered.replace('%', '%%')}", ())
    try:
        marks = ", ".join(["%s"] * len(names))
        cursor.execute(f"EXPLAIN EXECUTE looked_at({marks})", [given.get(name) for name in names])
        return "\n".join(row[0] for row in cursor.fetchall())
    finally:
        cursor.execute("DEALLOCATE looked_at")
        cursor.execute("RESET plan_cache_mode")
