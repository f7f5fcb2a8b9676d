"""Lists and details: their shapes, who sees what of whom, and what nonsense is answered with."""

from __future__ import annotations

import json
import re
from typing import Any
from uuid import uuid4

import pytest
from django.db import connection
from django.test.utils import CaptureQueriesContext

from durable_jobs import store
from durable_jobs.explain import Phase
from durable_jobs.kinds import MASKED
from durable_jobs.models import Job, Scope
from durable_jobs.selection import Look
from durable_jobs.service import ALL_SCOPES
from durable_jobs.testing import make_job, run
from tests.rest.conftest import client
from tests.rest.kinds import Echo, Internal
from tests.store import rows

pytestmark = pytest.mark.django_db

JOBS = "/api/jobs/"
ABROAD = Scope("elsewhere")
STATES = (
    "held", "pending", "running", "completed", "failed", "cancelled", "retrying", "verdict", "parked", "expired",
    "cancelling",
)  # fmt: skip
READS = ("", "events/", "explain/")


def of(job: Job | str, act: str = "") -> str:
    return f"{JOBS}{job.id if isinstance(job, Job) else job}/{act}"


# --- who may ---


@pytest.mark.parametrize("path", ["jobs/", "jobs/counts/", "kinds/", "workers/", "health/", "pauses/"])
def test_strangers_are_401_and_the_unpermitted_403(path: str, signed_in: Any, viewer: Any) -> None:
    """B177, B178, C094: unknown and not allowed are two things."""
    stranger = client().get(f"/api/{path}")
    assert (stranger.status_code, stranger["WWW-Authenticate"]) == (401, 'Basic realm="api"')
    assert signed_in().get(f"/api/{path}").status_code == 403
    assert viewer.get(f"/api/{path}").status_code == 200


@pytest.mark.parametrize("act", [*READS, "status/"])
def test_a_job_is_401_to_strangers(act: str) -> None:
    assert client().get(of(make_job(kind=Echo), act)).status_code == 401


@pytest.mark.parametrize("act", READS)
def test_a_job_is_403_to_the_unpermitted(act: str, signed_in: Any) -> None:
    job = make_job(kind=Echo)
    assert signed_in("operate_job").get(of(job, act)).status_code == 403


@pytest.mark.parametrize("act", ["cancel/", "redrive/"])
def test_acts_are_401_and_403(act: str, viewer: Any) -> None:
    job = make_job(kind=Echo)
    assert client().post(of(job, act)).status_code == 401
    assert viewer.post(of(job, act)).status_code == 403
    assert store.get(job.id).status == "pending"  # type: ignore[union-attr]


def test_a_challenge_names_a_scheme_when_no_class_does(monkeypatch: pytest.MonkeyPatch) -> None:
    from rest_framework.authentication import SessionAuthentication

    from durable_jobs.rest.views import JobViewSet

    monkeypatch.setattr(JobViewSet, "authentication_classes", [SessionAuthentication])
    answer = client().get(JOBS)
    assert (answer.status_code, answer["WWW-Authenticate"]) == (401, 'Session realm="durable_jobs"')


def test_model_permissions_of_the_project_do_not_forbid_everything(
    monkeypatch: pytest.MonkeyPatch, operator: Any
) -> None:
    from rest_framework.permissions import DjangoModelPermissions, IsAdminUser

    from durable_jobs.rest.views import JobViewSet

    monkeypatch.setattr(JobViewSet, "permission_classes", [DjangoModelPermissions])
    assert operator.get(JOBS).status_code == 200
    monkeypatch.setattr(JobViewSet, "permission_classes", [IsAdminUser])
    assert operator.get(JOBS).status_code == 403


@pytest.mark.parametrize("act", [*READS, "status/"])
def test_a_foreign_id_and_a_missing_one_cannot_be_told_apart(act: str, viewer: Any) -> None:
    """B178, B179: neither by body nor status, nor by what the database is asked."""
    foreign = make_job(kind=Echo, scope=ABROAD)
    told = []
    for one in (str(foreign.id), str(uuid4())):
        with CaptureQueriesContext(connection) as queries:
            answer = viewer.get(of(one, act))
        told.append((answer.status_code, answer.content, dict(answer.headers), asked(queries, one)))
    assert told[0] == told[1]
    assert told[0][0] == 404


@pytest.mark.parametrize("act", ["cancel/", "redrive/"])
def test_acts_on_a_foreign_id_and_a_missing_one_cannot_be_told_apart(act: str, operator: Any) -> None:
    foreign = make_job("failed", kind=Echo, scope=ABROAD)
    told = []
    for one in (str(foreign.id), str(uuid4())):
        with CaptureQueriesContext(connection) as queries:
            answer = operator.post(of(one, act), {"force": True} if act == "redrive/" else {}, format="json")
        told.append((answer.status_code, answer.content, dict(answer.headers), asked(queries, one)))
    assert told[0] == told[1]
    assert told[0][0] == 404
    assert store.get(foreign.id).status == "failed"  # type: ignore[union-attr]


def test_holders_of_view_all_scopes_see_all(signed_in: Any) -> None:
    jobs = [
        make_job(kind=Echo),
        make_job(kind=Echo, scope=ABROAD),
        make_job(kind=Echo, scope=Scope("x", "y")),
    ]
    everyone = signed_in("view_job", "view_all_scopes")
    assert ids(everyone.get(JOBS)) == [str(job.id) for job in reversed(jobs)]
    assert everyone.get(of(jobs[1])).status_code == 200
    assert ids(everyone.get(JOBS, {"tenant": "x", "organization": "y"})) == [str(jobs[2].id)]


def test_a_word_in_the_request_opens_no_scope(viewer: Any) -> None:
    """B178: a tenant named by the caller narrows what is seen, and widens nothing."""
    make_job(kind=Echo, scope=ABROAD)
    own = make_job(kind=Echo)
    assert ids(viewer.get(JOBS)) == [str(own.id)]
    assert ids(viewer.get(JOBS, {"tenant": "elsewhere"})) == []


@pytest.mark.parametrize("asked", ["ADMIN_SCOPES", "SCOPE_FROM_REQUEST"])
def test_scopes_come_from_the_projects_functions(asked: str, viewer: Any, settings: Any) -> None:
    first, second = make_job(kind=Echo, scope=Scope("a", "1")), make_job(kind=Echo, scope=Scope("b"))
    make_job(kind=Echo, scope=Scope("a"))
    answers = {"ADMIN_SCOPES": [Scope("a", "1"), Scope("b")], "SCOPE_FROM_REQUEST": Scope("b")}
    settings.DURABLE_JOBS = {asked: lambda request: answers[asked]}
    wanted = [str(second.id), str(first.id)] if asked == "ADMIN_SCOPES" else [str(second.id)]
    assert ids(viewer.get(JOBS)) == wanted
    settings.DURABLE_JOBS = {"ADMIN_SCOPES": lambda request: ALL_SCOPES}
    assert len(ids(viewer.get(JOBS))) == 3


def test_who_belongs_to_no_scope_is_refused(viewer: Any, settings: Any) -> None:
    make_job(kind=Echo)
    settings.DURABLE_JOBS = {"SCOPE_FROM_REQUEST": lambda request: None}
    assert viewer.get(JOBS).status_code == 403
    assert viewer.get(of(str(uuid4()), "status/")).status_code == 403


@pytest.mark.parametrize("answer", ["default", ("default", None), 5])
def test_a_scope_of_another_type_is_not_guessed_at(answer: Any, viewer: Any, settings: Any) -> None:
    from django.core.exceptions import ImproperlyConfigured

    settings.DURABLE_JOBS = {"SCOPE_FROM_REQUEST": lambda request: answer}
    with pytest.raises(ImproperlyConfigured, match="SCOPE_FROM_REQUEST"):
        viewer.get(JOBS)


def asked(queries: CaptureQueriesContext, job_id: str) -> list[str]:
    """The statements, without the id that was asked for, and without the time at which the session is looked for."""
    texts = [query["sql"].replace(job_id, "ID").replace(job_id.replace("-", ""), "ID") for query in queries]
    return [re.sub(r"'\d{4}-\d\d-\d\d [^']*'", "TIME", text) for text in texts]


# --- what is seen ---


def ids(answer: Any) -> list[str]:
    assert answer.status_code == 200, answer.content
    return [one["id"] for one in answer.json()["results"]]


def test_the_list_is_light(operator: Any) -> None:
    make_job("failed", kind=Echo, input={"token": "secret"})
    with CaptureQueriesContext(connection) as queries:
        (one,) = operator.get(JOBS).json()["results"]
    assert not {"input", "checkpoint", "result", "error_message", "traceback", "meta"} & set(one)
    (selected,) = [q["sql"] for q in queries if 'FROM "durable_jobs_job"' in q["sql"] and "LIMIT" in q["sql"]]
    for column in ("input", "checkpoint", "result", "error_message", "meta"):
        assert f'"durable_jobs_job"."{column}"' not in selected


@pytest.mark.parametrize("number", [1, 7])
def test_the_list_asks_the_database_the_same_for_one_and_many(
    number: int, viewer: Any, django_assert_num_queries: Any
) -> None:
    for index in range(number):
        make_job("failed", kind=Echo, lock_key=f"key {index}")
    with django_assert_num_queries(7):  # session, user, rights (2), time and pauses, jobs, lock keys
        assert len(ids(viewer.get(JOBS))) == number


def test_the_payload_needs_its_right_and_is_masked(viewer: Any, operator: Any) -> None:
    job = run(Echo, {"token": "hidden", "count": 1, "deep": [{"token": 5}]})
    plain = viewer.get(of(job)).json()
    assert not {"input", "input_sha256", "checkpoint", "result"} & set(plain)
    full = operator.get(of(job)).json()
    assert full["input"] == {"token": MASKED, "count": 1, "deep": [{"token": MASKED}]}
    assert full["result"]["token"] == MASKED
    assert "hidden" not in json.dumps([plain, full])


def test_an_event_shows_data_with_the_right_alone_and_masked(viewer: Any, operator: Any) -> None:
    job = make_job("failed", kind=Echo)
    store.add_event(job, "redriven", data={"checkpoint": '{"token": "hidden", "at": 5}', "forced": False})
    (plain,) = viewer.get(of(job, "events/")).json()["results"]
    assert "data" not in plain
    (full,) = operator.get(of(job, "events/")).json()["results"]
    assert full["data"] == {"checkpoint": {"token": MASKED, "at": 5}, "forced": False}


def test_of_an_unknown_kind_the_payload_stays_hidden(operator: Any) -> None:
    """C0xx: nobody here knows what to mask."""
    job = make_job("failed", kind="gone.kind", input={"token": "hidden"})
    answer = operator.get(of(job))
    assert answer.json()["input"] == MASKED
    assert answer.json()["redrivable"] == "no"
    assert operator.post(of(job, "redrive/")).json()["code"] == "unknown_kind"
    assert [reason["code"] for reason in operator.get(of(job, "explain/")).json()["reasons"]] == [
        "failed",
        "unknown_kind",
    ]


def test_numbers_come_back_as_they_are(operator: Any) -> None:
    """C083: nothing is rounded; ids are texts."""
    job = make_job(kind=Internal, input={"n": 2**63, "m": 10**400, "x": 0.1})
    job = rows.put(job, processed_count=2**40, total_count=2**62) if hasattr(rows, "put") else job
    answer = operator.get(of(job))
    assert json.loads(answer.content)["input"] == {"n": 2**63, "m": 10**400, "x": 0.1}
    job = make_job("failed", kind=Echo, created_by=operator.user.pk)
    store.add_event(job, "seen")
    assert operator.get(of(job)).json()["created_by"] == str(operator.user.pk)
    assert isinstance(operator.get(of(job, "events/")).json()["results"][0]["id"], str)


def test_times_are_utc_with_their_offset(viewer: Any, settings: Any) -> None:
    settings.TIME_ZONE = "Asia/Tokyo"
    settings.REST_FRAMEWORK = {**settings.REST_FRAMEWORK, "DATETIME_FORMAT": "%d.%m.%Y"}
    job = make_job(kind=Echo)
    told = viewer.get(of(job)).json()["created_at"]
    assert told == job.created_at.isoformat().replace("+00:00", "Z")


def test_every_state_is_shown_with_the_phase_of_the_commands(viewer: Any) -> None:
    jobs = {state: make_job(state, kind=Echo) for state in STATES}
    look = Look.take()
    for state, job in jobs.items():
        now = store.get(job.id)
        assert now is not None
        told = viewer.get(of(job)).json()
        phase = look.phase(now)
        assert (told["status"], told["phase"], told["stuck"]) == (now.status, phase, phase is Phase.STUCK), (
            state
        )


def test_the_history_is_walked_both_ways(viewer: Any) -> None:
    job = make_job(kind=Echo)
    for number in range(7):
        store.add_event(job, f"seen {number}")
    pages, address = [], f"{of(job, 'events/')}?page_size=3"
    while address:
        page = viewer.get(address).json()
        pages.append([event["event"] for event in page["results"]])
        last, address = address, page["next"]
    assert [event for page in pages for event in page] == [f"seen {number}" for number in reversed(range(7))]
    assert [len(page) for page in pages] == [3, 3, 1]
    back = viewer.get(viewer.get(last).json()["previous"]).json()
    assert [event["event"] for event in back["results"]] == pages[1]
    first = viewer.get(back["previous"]).json()
    assert [event["event"] for event in first["results"]] == pages[0]
    assert first["previous"] is None


def test_counts_are_of_the_callers_scopes(viewer: Any, signed_in: Any) -> None:
    for scope in (Scope(), ABROAD):
        for state in ("pending", "failed", "parked", "retrying", "expired"):
            make_job(state, kind=Echo, scope=scope)
    own = viewer.get("/api/jobs/counts/").json()
    every = signed_in("view_job", "view_all_scopes").get("/api/jobs/counts/").json()
    for name in ("waiting", "failed", "parked", "retrying", "stuck"):
        assert own["live"][name] in ({"number": 1, "more": False}, {"number": 0, "more": False})
        assert every["live"][name]["number"] == 2 * own["live"][name]["number"]
    assert own["live"]["failed"]["number"] == 1
    assert own["ended"]["1 h"]["failed"]["number"] == 2


def test_kinds_tell_what_an_operator_needs(viewer: Any) -> None:
    told = {kind["name"]: kind for kind in viewer.get("/api/kinds/").json()}
    assert told["rest.echo"]["startable"] and told["rest.letter"]["startable"]
    assert not told["rest.internal"]["startable"]
    assert told["rest.echo"]["runbook_url"] == "https://wiki.example/echo"
    assert told["rest.guarded"]["required_permissions"] == ["auth.change_user"]


def test_workers_are_listed(viewer: Any) -> None:
    store.worker_started("w:1", host="web1", pid=7, queues=["a"], kinds=[], concurrency=4)  # type: ignore[call-arg]
    (worker,) = viewer.get("/api/workers/").json()
    assert (worker["owner"], worker["queues"], worker["kinds"], worker["concurrency"]) == (
        "w:1",
        ["a"],
        [],
        4,
    )


def test_health_names_jobs_only_to_those_who_see_all(signed_in: Any, settings: Any) -> None:
    settings.DURABLE_JOBS = {"SCOPE_FROM_REQUEST": lambda request: Scope("mine")}
    some, every = signed_in("view_job"), signed_in("view_job", "view_all_scopes")
    assert {check["sentence"] for check in some.get("/api/health/").json()["checks"]} == {""}
    assert all(check["sentence"] for check in every.get("/api/health/").json()["checks"])


def test_health_tells_when_it_is_bad(viewer: Any) -> None:
    assert viewer.get("/api/health/").json()["healthy"] is True
    rows.execute(
        "UPDATE durable_jobs_job SET next_run_at = %s WHERE id = %s", rows.ago(7_200), make_job(kind=Echo).id
    )
    bad = viewer.get("/api/health/")
    assert (bad.status_code, bad.json()["healthy"]) == (200, False)


# --- nonsense ---

NONSENSE = [
    ("status", "bogus"), ("phase", "Running"), ("created_after", "yesterday"), ("created_since", "yesterday"),
    ("created_since", "2026-03-01"), ("created_since", "2026-03-01T00:00:00"), ("created_since", "2026-02-30T00:00:00Z"),
    ("created_before", "2026-03-01T00:00:00+99:00"), ("finished_since", "9" * 400), ("page_size", "-1"),
    ("page_size", "0"), ("page_size", "201"), ("page_size", "1000000000"), ("page_size", "٣"), ("page_size", "1e1"),
    ("page_size", "ten"), ("cursor", "%%%"), ("cursor", "a" * 45), ("cursor", "c" + "0" * 45), ("cursor", "\x00"),
    ("cursor", "a" + "0" * 45 + "\n"), ("ordering", "password"), ("kind", ""), ("kind", "x\x00"), ("kind", "x" * 201),
    ("subject_id", "x" * 300), ("tenant", "x" * 65), ("page", "99999999999999999999"), ("search", "%"), ("limit", "5"),
    ("kind__in", "a"), ("id", "1"), ("format", "xml"), ("", "x"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "value"), NONSENSE, ids=lambda value: repr(value)[:24])
def test_nonsense_is_400_and_named(name: str, value: str, viewer: Any) -> None:
    """B174, C089, C093: never a 500, never a filter that is passed over."""
    answer = viewer.get(JOBS, {name: value})
    assert answer.status_code == 400
    assert answer["Content-Type"] == "application/json"
    assert list(answer.json()) == [name]


def test_a_parameter_given_twice_is_400(viewer: Any) -> None:
    answer = viewer.get(f"{JOBS}?status=failed&status=running")
    assert (answer.status_code, list(answer.json())) == (400, ["status"])


@pytest.mark.parametrize("path", ["counts/", f"{uuid4()}/", f"{uuid4()}/status/", f"{uuid4()}/explain/"])
def test_where_there_are_no_parameters_every_one_is_400(path: str, viewer: Any) -> None:
    answer = viewer.get(f"{JOBS}{path}", {"status": "failed"})
    assert (answer.status_code, list(answer.json())) == (400, ["status"])


@pytest.mark.parametrize(
    "pk", ["1", "x" * 300, "%00", "%FF", "0" * 31, "counts.json", "..", "99999999999999999999", "' OR 1=1"]
)
@pytest.mark.parametrize("act", ["", "status/", "events/"])
def test_an_id_that_is_none_is_404_in_json(pk: str, act: str, viewer: Any) -> None:
    answer = viewer.get(f"{JOBS}{pk}/{act}")
    assert answer.status_code == 404
    assert answer.json() == viewer.get(f"{JOBS}{uuid4()}/{act}").json()


def test_an_id_may_lack_its_dashes(viewer: Any) -> None:
    job = make_job(kind=Echo)
    assert viewer.get(of(job.id.hex)).json()["id"] == str(job.id)


@pytest.mark.parametrize(
    "value",
    [
        "0001-01-01T00:00:00%2B14:00",
        "9999-12-31T23:59:59-23:59",
        "0000-01-01T00:00:00Z",
        "2016-12-31T23:59:60Z",
    ],
)
def test_times_at_the_calendars_ends_are_taken(value: str, viewer: Any) -> None:
    assert viewer.get(f"{JOBS}?created_since={value}&finished_before={value}").status_code == 200


def test_each_filter_finds_its_job_alone(viewer: Any) -> None:
    other = make_job(kind=Internal)
    job = make_job(
        "parked", kind=Echo, queue="special", lock_key="k", subject_type="app.model", subject_id="5"
    )
    found = {
        "kind": "rest.echo", "queue": "special", "status": "failed", "phase": "parked", "lock_key": "k",
        "subject_type": "app.model", "subject_id": "5", "error_code": "made", "error_type": "Park",
        "finished_since": job.finished_at.isoformat().replace("+", "%2B"),
    }  # fmt: skip
    for name, value in found.items():
        assert ids(viewer.get(f"{JOBS}?{name}={value}")) == [str(job.id)], name
    assert ids(viewer.get(JOBS, {"phase": "waiting"})) == [str(other.id)]
    assert ids(viewer.get(JOBS, {"phase": "waiting", "kind": "rest.echo"})) == []
    before = other.created_at.isoformat().replace("+", "%2B")
    assert ids(viewer.get(f"{JOBS}?created_before={before}")) == []


@pytest.mark.parametrize("phase", list(Phase))
def test_the_list_of_a_phase_holds_what_is_in_it(phase: Phase, viewer: Any) -> None:
    jobs = [make_job(state, kind=Echo) for state in STATES]
    look = Look.take()
    now = [store.get(job.id) for job in jobs]
    wanted = {str(job.id) for job in now if job is not None and look.phase(job) is phase}
    assert set(ids(viewer.get(JOBS, {"phase": phase.value}))) == wanted


@pytest.mark.parametrize(
    ("body", "code"),
    [
        (b"[]", 400), (b"5", 400), (b'"x"', 400), (b"{", 400), (b"\xff", 400), (b'{"force": NaN}', 400),
        (b"[" * 100_000, 400), (b'{"reason": "\\ud800"}', 400), (b'{"reason": 5}', 400), (b'{"reason": null}', 400),
        (b'{"force": "true"}', 400), (b'{"force": 1}', 400), (b'{"forced": true}', 400), (b'{"\\ud800": 1}', 400),
        (b'{"reason": "a", "reason": "b"}', 400), (b'{"reason": "\\u0000"}', 400), (b'{"force": ' + b"9" * 9000 + b"}", 400),
        (b'{"reason": "' + b"x" * 2001 + b'"}', 400), (b'{"reason": "' + b"x" * 3_000_000 + b'"}', 413),
    ],
    ids=range(19),
)  # fmt: skip
def test_a_malformed_body_is_refused_and_nothing_done(body: bytes, code: int, operator: Any) -> None:
    job = make_job("failed", kind=Echo)
    answer = operator.post(of(job, "redrive/"), body, content_type="application/json")
    assert answer.status_code == code
    assert isinstance(answer.json(), dict)
    assert store.get(job.id).status == "failed"  # type: ignore[union-attr]


def test_a_form_is_no_json(operator: Any) -> None:
    answer = operator.post(
        of(make_job("failed", kind=Echo), "redrive/"), {"force": "true"}, format="multipart"
    )
    assert answer.status_code == 415


def test_an_unknown_encoding_changes_nothing(operator: Any) -> None:
    job = make_job(kind=Echo)
    for charset in ("utf-16", "hex", "rot13", "nonsense"):
        answer = operator.post(of(job, "cancel/"), b"{}", content_type=f"application/json; charset={charset}")
        assert answer.status_code in (200, 409)
