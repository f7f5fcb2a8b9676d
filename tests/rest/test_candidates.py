"""Jobs to choose from: whole pages of the caller's own scope, under a cursor that is bound."""

from __future__ import annotations

from typing import Any

import pytest

from durable_jobs.models import Scope
from durable_jobs.testing import make_job
from tests.rest.conftest import OPERATOR, client
from tests.rest.kinds import Echo

pytestmark = pytest.mark.django_db

ADDRESS = "/api/candidates/"


def test_pages_are_walked_oldest_first_and_say_what_they_are(operator: Any) -> None:
    """A91, A95."""
    jobs = [make_job(kind=Echo, input={"n": number, "token": "hidden"}) for number in range(5)]
    make_job(kind=Echo, scope=Scope("elsewhere"))
    found, cursor = [], None
    while True:
        given = {"kind": "rest.echo", "limit": 2, **({"cursor": cursor} if cursor else {})}
        answer = operator.get(ADDRESS, given)
        page = answer.json()
        found += [one["id"] for one in page["candidates"]]
        assert page["total"] is None and page["observation"] == "per-page-snapshot"
        assert page["principal_validation"] == "domain-required"
        assert page["scope"] == {"tenant": "default", "organization": None}
        cursor = page["cursor"]
        assert page["has_more"] is (cursor is not None)
        if cursor is None:
            break
    assert found == [str(job.id) for job in jobs]
    assert page["candidates"][0]["input"] == {"n": 4, "token": "••••"}


def test_a_cursor_is_bound_to_query_and_user(operator: Any, signed_in: Any) -> None:
    """A90."""
    for _ in range(3):
        make_job(kind=Echo)
    cursor = operator.get(ADDRESS, {"kind": "rest.echo", "limit": 1}).json()["cursor"]
    other = signed_in(*OPERATOR)
    for who, given in (
        (operator, {"limit": 2}), (operator, {"limit": 1, "status": "pending"}), (operator, {"limit": 1, "kind": "x"}),
        (operator, {"limit": 1, "max_payload_bytes": 5000}), (other, {"limit": 1}),
        (operator, {"limit": 1, "cursor": cursor[:-1] + ("A" if cursor[-1] != "A" else "B")}),
    ):  # fmt: skip
        answer = who.get(ADDRESS, {"kind": "rest.echo", "cursor": cursor, **given})
        assert (answer.status_code, answer.json()["code"]) == (409, "E_JOB_SCOPE_MISMATCH")


def test_a_row_over_the_cap_refuses_the_page(operator: Any) -> None:
    """A93."""
    make_job(kind=Echo, input={"text": "x" * 500})
    answer = operator.get(ADDRESS, {"kind": "rest.echo", "max_payload_bytes": 100})
    assert (answer.status_code, answer.json()["code"]) == (409, "E_JOB_INPUT_INVALID")


@pytest.mark.parametrize(
    ("name", "value"),
    [("kind", " "), ("kind", "x" * 201), ("status", "bogus"), ("limit", "0"), ("limit", "101"), ("limit", "1.5"),
     ("max_payload_bytes", "1048577"), ("cursor", "%%%"), ("cursor", "a:b:c\n"), ("order", "x")],
)  # fmt: skip
def test_nonsense_is_400_and_named(name: str, value: str, operator: Any) -> None:
    """A89."""
    answer = operator.get(ADDRESS, {"kind": "rest.echo", name: value})
    assert (answer.status_code, list(answer.json())) == (400, [name])


def test_it_needs_both_rights(viewer: Any) -> None:
    assert client().get(ADDRESS, {"kind": "rest.echo"}).status_code == 401
    assert viewer.get(ADDRESS, {"kind": "rest.echo"}).status_code == 403


@pytest.mark.django_db(transaction=True)
def test_it_is_read_outside_the_requests_transaction(operator: Any) -> None:
    from django.db import connection

    make_job(kind=Echo)
    connection.settings_dict["ATOMIC_REQUESTS"] = True
    try:
        assert len(operator.get(ADDRESS, {"kind": "rest.echo"}).json()["candidates"]) == 1
    finally:
        connection.settings_dict["ATOMIC_REQUESTS"] = False
