"""What the pages ask the database: always the same number of questions, bounded, and no large column."""

from __future__ import annotations

import json
import re
from datetime import timedelta
from typing import Any

import pytest
from django.db import connection
from django.test import Client
from django.test.utils import CaptureQueriesContext
from django.utils import timezone

from durable_jobs import selection, store
from durable_jobs.models import Job, JobEvent, uuid7
from durable_jobs.testing import make_job
from tests.admin.conftest import url
from tests.slices import made, on_postgresql

pytestmark = pytest.mark.django_db

LARGE = re.compile(r'"durable_jobs_job"\."(input|checkpoint|result|meta)"')
COUNT = re.compile(r"SELECT COUNT\(", re.IGNORECASE)


def questions(client: Client, page: str) -> list[str]:
    client.get(page)
    with CaptureQueriesContext(
        connection,
    ) as asked:
        assert client.get(page).status_code == 200, page
    return [query["sql"] for query in asked.captured_queries]


def fill(count: int) -> Job:
    job = make_job("failed", kind="tests.made", input={"large": "x" * 1000})
    for number in range(count):
        state = ("failed", "completed", "running", "expired", "pending", "cancelled")[number % 6]
        made_ = make_job(
            state,
            kind="tests.made",
            input={"large": "x" * 1000},
            lock_key=f"{state} {uuid7()}",
            queue="imports",
        )
        store.add_event(made_, "redriven", actor="user:1 anna", operation_id="operation")
        store.add_event(job, "slice_failed", traceback="x" * 1000)
    return job


def pages(job: Job) -> list[str]:
    later = (timezone.now() + timedelta(hours=1)).strftime("%Y-%m-%dT%H:%M")
    return [
        url("overview"), url("changelist"), f"{url('changelist')}?phase=human", f"{url('changelist')}?phase=stuck",
        f"{url('changelist')}?kind=tests.made", f"{url('changelist')}?scope=default", f"{url('changelist')}?q=nothing",
        f"{url('changelist')}?finished_to={later}&error_type=ValueError", url("live", job.pk),
        "/admin/durable_jobs/jobevent/", "/admin/durable_jobs/jobevent/?actor=anna", url("act", job.pk, "redrive"),
    ]  # fmt: skip


def test_the_number_of_questions_does_not_grow_with_the_jobs(client: Client, registry: None) -> None:
    made()
    job = fill(6)
    few = {page: len(questions(client, page)) for page in [*pages(job), url("change", job.pk)]}
    fill(60)
    many = {page: len(questions(client, page)) for page in few}
    assert many == few
    assert max(many.values()) <= 40, many


def test_no_page_loads_a_large_column_or_counts_without_bound(client: Client, registry: None) -> None:
    made()
    job = fill(12)
    for page in pages(job):
        for asked in questions(client, page):
            assert not LARGE.search(asked), (page, asked)
            assert not COUNT.search(asked) or "LIMIT" in asked or "durable_jobs" not in asked, (page, asked)


ROWS = 20_000


@pytest.fixture
def full_table(registry: None) -> None:
    """Mostly completed jobs, a hundred of each other sort, with statistics."""
    made()
    now = timezone.now()
    text, digest = '"x"', "0" * 64
    rows = []
    for number in range(ROWS):
        at = now - timedelta(seconds=ROWS - number)
        common: dict[str, Any] = {
            "id": uuid7(), "kind": f"tests.{number % 7}", "created_at": at, "updated_at": at, "input_text": text,
            "input_sha256": digest, "queue_name": f"queue{number % 3}", "attempts": 1, "lease_epoch": 1, "started_at": at,
        }  # fmt: skip
        sort = number % 200
        if sort == 0:
            rows.append(
                Job(
                    status="failed",
                    finished_at=at,
                    error_class="transient",
                    error_type="ValueError",
                    **common,
                )
            )
        elif sort == 1:
            rows.append(Job(status="pending", pending_since=at, next_run_at=at, **common))
        elif sort == 2:
            rows.append(
                Job(
                    status="running",
                    lease_owner="w",
                    lease_expires_at=now + timedelta(hours=1),
                    heartbeat_at=now,
                    claimed_at=now,
                    **common,
                )
            )
        else:
            rows.append(Job(status="completed", finished_at=at, **common))
    Job._base_manager.bulk_create(rows, batch_size=500)
    job = rows[0]
    JobEvent._base_manager.bulk_create(
        [
            JobEvent(job=job, event="redriven", created_at=now - timedelta(seconds=number))
            for number in range(5000)
        ],
        batch_size=500,
    )
    with connection.cursor() as cursor:
        cursor.execute("ANALYZE durable_jobs_job")
        cursor.execute("ANALYZE durable_jobs_event")


def scanned(sql: str) -> int:
    """How many rows a question reads whole, by its plan (PostgreSQL)."""
    with connection.cursor() as cursor:
        cursor.execute(f"EXPLAIN (ANALYZE, FORMAT JSON, TIMING OFF) {sql}")
        found = cursor.fetchone()[0]
    plan = (json.loads(found) if isinstance(found, str) else found)[0]["Plan"]
    return _read(plan)


def _read(plan: dict[str, Any]) -> int:
    own = 0
    if plan["Node Type"] in ("Seq Scan", "Index Scan", "Bitmap Heap Scan") and plan.get(
        "Relation Name", ""
    ).startswith("durable_jobs"):
        own = int((plan["Actual Rows"] + plan.get("Rows Removed by Filter", 0)) * plan["Actual Loops"])
    return own + sum(_read(part) for part in plan.get("Plans", []))


@pytest.mark.postgres_only
def test_pages_read_a_small_part_of_a_large_table(
    client: Client, full_table: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert on_postgresql()
    monkeypatch.setattr(selection, "WINDOW", 1_000)
    job = Job.objects.filter(status="failed").order_by("id")[10]
    day = (timezone.now() - timedelta(days=1)).strftime("%Y-%m-%dT%H:%M")
    list_ = url("changelist")
    addresses = [
        list_, f"{list_}?phase=human", f"{list_}?phase=stuck", f"{list_}?phase=waiting", f"{list_}?phase=running",
        f"{list_}?kind=tests.none", f"{list_}?queue=none&phase=completed", f"{list_}?scope=default", f"{list_}?q={job.pk}",
        f"{list_}?phase=human&finished_from={day}", url("change", job.pk), "/admin/durable_jobs/jobevent/",
    ]  # fmt: skip
    for page in addresses:
        for sql in questions(client, page):
            if (sql.startswith("SELECT") and "durable_jobs_job" in sql) or (
                "durable_jobs_event" in sql and sql.startswith("SELECT")
            ):
                assert scanned(sql) <= 2_500, (page, sql)
