"""A page of jobs to choose from: bounded in rows and bytes, bound to who asked for it."""

from __future__ import annotations

import threading
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest
from django.core import signing
from django.db import connection, transaction
from django.test.utils import CaptureQueriesContext

from durable_jobs import candidates as module
from durable_jobs import receipts, service, store
from durable_jobs.exceptions import (
    DeadlineExceeded,
    InvalidInput,
    LeaseLostError,
    ScopeMismatch,
    TransactionOwned,
)
from durable_jobs.models import Job, Scope
from durable_jobs.receipts import Limits, Submission
from durable_jobs.service import CandidateQuery, candidates
from tests.connections import OtherConnection
from tests.receipts import acts
from tests.receipts.acts import HOME, KIND, context, ended, everything
from tests.store import rows

pytestmark = pytest.mark.django_db(transaction=True)

QUERY = CandidateQuery(KIND, "anna", HOME)


def held(count: int, size: int = 2, **given: Any) -> list[Job]:
    """So many held jobs, a second apart, each with an input of about this size."""
    text = '"' + "x" * (size - 2) + '"'
    made = [
        receipts.defer(KIND, Submission(acts.new_key(), text), scope=given.get("scope", HOME))
        for _ in range(count)
    ]
    for number, job in enumerate(made):
        acts.write(job.id, "created_at", rows.ago(1000 - number))
    return made


def pages(query: CandidateQuery) -> list[list[Any]]:
    found = []
    while True:
        page = candidates(query, context())
        found.append([job.id for job in page.candidates])
        if page.cursor is None:
            assert not page.has_more
            return found
        query = replace(query, cursor=page.cursor)


def test_all_pages_hold_every_job_once_oldest_first() -> None:
    """A91, A95, A29 of the other scope aside."""
    made = [job.id for job in held(7)]
    held(2, scope=Scope("acme"))
    ended("failed", kind="tests.other")
    assert pages(replace(QUERY, limit=3)) == [made[:3], made[3:6], made[6:]]
    assert pages(replace(QUERY, limit=7)) == [made]
    assert pages(replace(QUERY, limit=100)) == [made]


def test_equal_times_are_told_apart_by_id() -> None:
    """A91: no row is skipped or given twice at a page's edge."""
    made = held(6)
    moment = rows.ago(50)
    for job in made:
        acts.write(job.id, "created_at", moment)
    flat = [job_id for page in pages(replace(QUERY, limit=2)) for job_id in page]
    assert flat == sorted(job.id for job in made)


def test_what_a_page_says_of_itself() -> None:
    """A95."""
    held(3)
    before = everything()
    page = candidates(replace(QUERY, limit=2), context())
    assert (page.scope, page.scanned, page.has_more, page.total) == (HOME, 2, True, None)
    assert (page.observation, page.principal_validation) == ("per-page-snapshot", "domain-required")
    assert page.cursor is not None and all(isinstance(job, Job) for job in page.candidates)
    assert candidates(replace(QUERY, status="failed"), context()).candidates == []
    assert everything() == before


@pytest.mark.parametrize(
    ("query", "ctx"),
    [
        ({}, {"scope": Scope("acme")}), ({}, {"scope": Scope("umbrella", "north")}), ({"scope": None}, {}),
        ({"scope": Scope("acme")}, {}), ({}, {"actor": "bob"}), ({"actor": "bob"}, {}), ({"actor": ""}, {"actor": ""}),
        ({"actor": "  "}, {"actor": "  "}), ({"actor": None}, {}), ({}, {"kind": "tests.other"}), ({"kind": "tests.other"}, {}),
    ],
)  # fmt: skip
def test_context_and_query_must_agree(query: dict[str, Any], ctx: dict[str, Any]) -> None:
    """A88."""
    with pytest.raises(ScopeMismatch):
        candidates(replace(QUERY, **query), context(**ctx))


@pytest.mark.parametrize(
    "wrong",
    [
        {"limit": 0}, {"limit": 101}, {"limit": 1.5}, {"limit": True}, {"limit": "3"}, {"max_payload_bytes": 0},
        {"max_payload_bytes": 1_048_577}, {"max_payload_bytes": 10.0}, {"status": "complete"}, {"status": ""},
    ],
)  # fmt: skip
def test_bounds_are_whole_numbers_in_their_range(wrong: dict[str, Any]) -> None:
    """A89, A3."""
    with pytest.raises(InvalidInput):
        candidates(replace(QUERY, **wrong), context())


def test_the_defaults() -> None:
    """A89."""
    assert (QUERY.limit, QUERY.max_payload_bytes, QUERY.status) == (25, 262_144, None)
    for edge in ({"limit": 1}, {"limit": 100}, {"max_payload_bytes": 1}, {"max_payload_bytes": 1_048_576}):
        candidates(replace(QUERY, status="completed", **edge), context())


@pytest.mark.parametrize(
    "changed",
    [
        {"actor": "bob"}, {"limit": 3}, {"max_payload_bytes": 1000}, {"status": "held"}, {"scope": Scope("acme")},
        {"kind": "tests.other"},
    ],
)  # fmt: skip
def test_a_cursor_serves_the_very_same_query_alone(changed: dict[str, Any]) -> None:
    """A90."""
    held(3)
    cursor = candidates(replace(QUERY, limit=2), context()).cursor
    query = replace(QUERY, limit=2, cursor=cursor)
    assert len(candidates(query, context()).candidates) == 1
    ctx = {name: value for name, value in changed.items() if name in ("actor", "scope", "kind")}
    with pytest.raises(ScopeMismatch):
        candidates(replace(query, **changed), context(**ctx))


def test_a_cursor_cannot_be_made_up() -> None:
    """A90: signed, of this version, with a time and an id."""
    (first, *_rest) = held(3)
    cursor = candidates(replace(QUERY, limit=2), context()).cursor
    assert cursor is not None
    *bound, created_at, _job_id = signing.loads(cursor, salt=module.CURSOR_SALT)
    forged = [
        "", "nonsense", cursor[:-1], cursor + "x", 7, signing.dumps([*bound, created_at, str(first.id)]),
        signing.dumps([2, *bound[1:], created_at, str(first.id)], salt=module.CURSOR_SALT),
        signing.dumps([*bound, 17, str(first.id)], salt=module.CURSOR_SALT),
        signing.dumps([*bound, created_at, "  "], salt=module.CURSOR_SALT),
        signing.dumps([*bound, created_at], salt=module.CURSOR_SALT), signing.dumps({"a": 1}, salt=module.CURSOR_SALT),
    ]  # fmt: skip
    for text in forged:
        with pytest.raises(ScopeMismatch):
            candidates(replace(QUERY, limit=2, cursor=text), context())  # type: ignore[arg-type]


def size_of(job: Job) -> int:
    """The bytes of all text columns, as Python counts them."""
    total = 0
    for column in Job._meta.concrete_fields:
        value = getattr(job, column.attname)
        if column.get_internal_type() in ("CharField", "TextField") and value is not None:
            total += len(str(value).encode())
    return total


def test_a_row_over_the_cap_refuses_the_whole_page() -> None:
    """A93: by bytes, not characters; the row that is only looked ahead at does not count."""
    made = held(3)
    text = '"' + "ä" * 3000 + '"'
    for column, value in (("input", text), ("input_sha256", receipts.jsontext.sha256(text))):
        acts.write(made[2].id, column, value)
    size = size_of(acts.read(made[2].id))
    assert size > 6000
    small = replace(QUERY, limit=2, max_payload_bytes=size - 1)
    page = candidates(small, context())
    assert [job.id for job in page.candidates] == [made[0].id, made[1].id] and page.has_more
    with pytest.raises(InvalidInput, match="max_payload_bytes"):
        candidates(replace(small, cursor=page.cursor), context())
    with pytest.raises(InvalidInput, match="max_payload_bytes"):
        candidates(replace(small, limit=3), context())
    assert len(candidates(replace(small, limit=3, max_payload_bytes=size), context()).candidates) == 3
    (row,) = store.candidate_sizes(HOME, KIND, status=None, after=(made[1].created_at + timedelta(days=-1), made[1].id),
                                   limit=9, cap=size - 1)[2:]  # fmt: skip
    assert (row.id, row.size) == (None, size)


def test_the_first_look_loads_no_contents() -> None:
    """A92: sizes and ids only; the contents come after they were paid for."""
    held(2, size=5000)
    with CaptureQueriesContext(
        connection,
    ) as captured:
        candidates(QUERY, context())
    looks = [query["sql"] for query in captured.captured_queries if "FROM durable_jobs_job" in query["sql"]]
    assert len(looks) == 2
    selected = looks[0].split("FROM")[0]
    assert "checkpoint" not in selected and "input" not in selected and "size" in selected
    assert '"input"' in looks[1] and "ORDER BY created_at, id" in looks[1]


def test_rows_and_bytes_are_charged_before_they_are_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    """A94."""
    held(4, size=100)
    size = sum(
        row.size for row in store.candidate_sizes(HOME, KIND, status=None, after=None, limit=3, cap=10**6)
    )
    told: list[str] = []
    real_load = store.candidates
    monkeypatch.setattr(store, "candidates", lambda *given: told.append("loaded") or real_load(*given))
    real_consume = receipts.ExecutionContext.consume

    def consume(self: Any, **charge: int) -> None:
        told.append(f"{charge['items']} items, {charge['bytes']} bytes")
        real_consume(self, **charge)

    monkeypatch.setattr(receipts.ExecutionContext, "consume", consume)
    candidates(replace(QUERY, limit=3), context())
    assert told == [f"3 items, {size} bytes", "loaded"]
    told.clear()
    for limits in (Limits(items=2), Limits(bytes=size - 1)):
        with pytest.raises(InvalidInput, match="used up"):
            candidates(replace(QUERY, limit=3), context(limits=limits))
    assert "loaded" not in told


def test_a_borrowed_transaction_a_stop_and_a_deadline_are_refused() -> None:
    """A95, A82, A83."""
    held(1)
    with transaction.atomic(), pytest.raises(TransactionOwned):
        candidates(QUERY, context())
    with pytest.raises(DeadlineExceeded):
        candidates(QUERY, context(seconds=-1))
    ctx = context()
    ctx.stop.set()
    with pytest.raises(LeaseLostError):
        candidates(QUERY, ctx)


def test_a_page_is_of_one_moment(second_connection: OtherConnection, monkeypatch: pytest.MonkeyPatch) -> None:
    """A95: what others commit between the two looks is not in it, and nobody is kept from committing."""
    made = held(2)
    real = store.candidates

    def late(*given: Any) -> list[Job]:
        second_connection.run(acts.write, made[0].id, "priority", 7)
        return real(*given)

    monkeypatch.setattr(store, "candidates", late)
    page = candidates(QUERY, context())
    assert [job.priority for job in page.candidates] == [0, 0]
    assert acts.read(made[0].id).priority == 7


def test_reading_waits_for_no_writer(second_connection: OtherConnection) -> None:
    """A95."""
    made = held(2)
    second_connection.enter(transaction.atomic())
    second_connection.run(acts.write, made[0].id, "priority", 7)
    done = threading.Event()
    page = candidates(QUERY, context(seconds=2))
    done.set()
    assert len(page.candidates) == 2
    second_connection.leave()


def test_other_scopes_are_not_there() -> None:
    """A88, A56: also not by the ids of the second look."""
    theirs = held(2, scope=Scope("acme"))
    assert candidates(QUERY, context()).candidates == []
    assert store.candidates(HOME, KIND, [job.id for job in theirs]) == []
    assert service.get(theirs[0].id, scope=HOME) is None
