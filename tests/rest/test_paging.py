"""Walks through the list: each id exactly once, whatever comes and changes meanwhile."""

from __future__ import annotations

from typing import Any
from uuid import UUID

import pytest
from django.db import connection
from django.test.utils import CaptureQueriesContext

from durable_jobs import service
from durable_jobs.models import Scope
from durable_jobs.rest import paging
from durable_jobs.testing import make_job
from tests.rest.kinds import Echo, Internal
from tests.rest.test_looking import JOBS, ids
from tests.store import rows

pytestmark = pytest.mark.django_db

NUMBER, SIZE = 45, 10


@pytest.fixture
def twins() -> list[str]:
    """45 jobs of one moment, in the order of the list."""
    jobs = [make_job("failed" if number % 3 else "pending", kind=Echo) for number in range(NUMBER)]
    rows.execute("UPDATE durable_jobs_job SET created_at = %s", jobs[0].created_at)
    return sorted((str(job.id) for job in jobs), reverse=True)


@pytest.fixture(params=["one scope", "all scopes", "a tenant of all"])
def walker(request: Any, signed_in: Any) -> Any:
    """A client, and the parameters that it asks with: the list is read by time, or by id."""
    rights = ["view_job", "operate_job"]
    if request.param != "one scope":
        rights.append("view_all_scopes")
    return signed_in(*rights), {"tenant": "default"} if request.param == "a tenant of all" else {}


def flat(pages: list[list[str]]) -> list[str]:
    return [one for page in pages for one in page]


def walk(
    client: Any, address: str | None, way: str, between: Any = None, **parameters: Any
) -> list[list[str]]:
    pages: list[list[str]] = []
    while address:
        answer = client.get(address, parameters if not pages else None)
        found, address = ids(answer), answer.json()[way]
        pages.append(found)
        walk.last = answer.json()  # type: ignore[attr-defined]
        if between is not None:
            between(found)
    return pages


def test_a_walk_forwards_and_back_meets_each_job_once(twins: list[str], walker: Any) -> None:
    client, parameters = walker
    forwards = walk(client, JOBS, "next", page_size=SIZE, **parameters)
    assert [len(page) for page in forwards] == [10, 10, 10, 10, 5]
    assert flat(forwards) == twins
    backwards = walk(client, walk.last["previous"], "previous")  # type: ignore[attr-defined]
    assert backwards == forwards[-2::-1]
    assert flat(walk(client, walk.last["next"], "next")) == twins[10:]  # type: ignore[attr-defined]


@pytest.mark.parametrize("way", ["next", "previous"])
def test_rows_that_come_and_change_move_nothing(way: str, twins: list[str], walker: Any) -> None:
    client, parameters = walker

    def meddle(found: list[str]) -> None:
        make_job(kind=Internal)
        rows.execute("UPDATE durable_jobs_job SET updated_at = %s, priority = priority + 1", rows.ago(0))
        for job_id in found[:2]:
            if service.get(job_id).status == "failed":  # type: ignore[union-attr]
                service.redrive(job_id)

    forwards = walk(client, JOBS, "next", meddle if way == "next" else None, page_size=SIZE, **parameters)
    seen = flat(forwards)
    if way == "previous":
        back = walk(client, walk.last["previous"], "previous", meddle)  # type: ignore[attr-defined]
        seen = [one for page in reversed(back) for one in page] + forwards[-1]
    known = [one for one in seen if one in twins]
    assert known == twins
    assert len(seen) == len(set(seen))


def test_jobs_deleted_at_a_pages_edge_leave_no_gap(twins: list[str], viewer: Any) -> None:
    first = viewer.get(JOBS, {"page_size": 10}).json()
    rows.execute("DELETE FROM durable_jobs_job WHERE id = %s", UUID(twins[9]))
    assert ids(viewer.get(first["next"])) == twins[10:20]


def test_an_empty_page_leads_back_to_the_row_before_it(twins: list[str], viewer: Any) -> None:
    last = viewer.get(JOBS, {"page_size": 44}).json()
    rows.execute("DELETE FROM durable_jobs_job WHERE id = %s", UUID(twins[44]))
    empty = viewer.get(last["next"])
    assert ids(empty) == []
    assert ids(viewer.get(empty.json()["previous"])) == twins[:44]


def test_a_cursor_opens_no_scope(viewer: Any) -> None:
    foreign = [make_job(kind=Echo, scope=Scope("elsewhere")) for _ in range(3)]
    own = [make_job(kind=Echo) for _ in range(2)]
    place = paging.Place.of(foreign[2])
    assert ids(viewer.get(JOBS, {"cursor": str(place)})) == []
    assert ids(viewer.get(JOBS, {"cursor": "b" + str(place)[1:]})) == [str(job.id) for job in reversed(own)]


def test_filters_walk_as_well(twins: list[str], walker: Any) -> None:
    client, parameters = walker
    pages = walk(client, JOBS, "next", page_size=4, status="failed", **parameters)
    assert len(flat(pages)) == 30
    assert flat(pages) == [one for one in twins if one in flat(pages)]
    judged = walk(client, JOBS, "next", page_size=4, phase="waiting", **parameters)
    assert sorted(flat(pages + judged), reverse=True) == twins


@pytest.mark.parametrize("limit", ["WINDOW", "JUDGED"])
def test_a_search_that_stops_goes_on_from_where_it_stopped(
    limit: str, twins: list[str], walker: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What no index finds costs so many rows in a request, and is found all the same."""
    client, parameters = walker
    monkeypatch.setattr(paging, limit, 7)
    wanted = twins[3::11]
    for one in wanted:
        rows.execute("UPDATE durable_jobs_job SET kind = 'rest.letter' WHERE id = %s", UUID(one))
    asked = {"kind": "rest.letter"} if limit == "WINDOW" else {"phase": "waiting", "kind": "rest.letter"}
    if limit == "JUDGED":
        wanted = [one for one in wanted if service.get(one).status == "pending"]  # type: ignore[union-attr]
    forwards = walk(client, JOBS, "next", page_size=2, **asked, **parameters)
    assert flat(forwards) == wanted
    if limit == "WINDOW":
        assert [] in forwards
        back = walk(client, walk.last["previous"], "previous")  # type: ignore[attr-defined]
        assert [one for page in reversed(back) for one in page] == flat(forwards[:-1])


def test_a_page_costs_the_same_anywhere(twins: list[str], viewer: Any) -> None:
    def cost(address: str) -> int:
        with CaptureQueriesContext(connection) as queries:
            viewer.get(address)
        return len(queries)

    first = viewer.get(JOBS, {"page_size": 10}).json()
    second = viewer.get(first["next"]).json()
    assert cost(f"{JOBS}?page_size=10") == cost(second["next"]) == cost(second["previous"])


@pytest.mark.postgres_only
def test_the_list_of_a_scope_is_read_from_its_index(twins: list[str], viewer: Any) -> None:
    """P6: no sort and no scan of the table."""
    page = viewer.get(JOBS, {"page_size": 10}).json()
    with CaptureQueriesContext(connection) as queries:
        viewer.get(page["next"])
    (selected,) = [
        q["sql"] for q in queries if 'FROM "durable_jobs_job"' in q["sql"] and "ORDER BY" in q["sql"]
    ]
    with connection.cursor() as cursor:
        cursor.execute("SET LOCAL enable_seqscan = off")
        cursor.execute("SET LOCAL enable_bitmapscan = off")
        cursor.execute("SET LOCAL enable_sort = off")
        cursor.execute("EXPLAIN " + selected)
        plan = "\n".join(row[0] for row in cursor.fetchall())
    assert "Index Scan Backward using durable_jobs_list" in plan
    assert "Sort" not in plan
    (condition,) = [line for line in plan.splitlines() if "Index Cond" in line]
    assert "ROW(created_at, id) <" in condition and "tenant_id" in condition
