"""Jobs that people start over HTTP, once each."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import pytest
from django.contrib.auth.models import Group, User

from durable_jobs import service, store
from durable_jobs.models import Job, Scope
from durable_jobs.testing import finish, make_job
from tests.connections import OtherConnection
from tests.rest.conftest import OPERATOR, client, user
from tests.rest.test_looking import JOBS, of

ECHO = {"kind": "rest.echo", "input": {"count": 5}}
LETTER = {"kind": "rest.letter", "input": {"address": "Here", "copies": 2, "colour": "red"}}


def post(who: Any, body: Any, key: str | None = None) -> Any:
    headers = {} if key is None else {"Idempotency-Key": key}
    return who.post(JOBS, body, format="json", headers=headers)


@pytest.mark.django_db
class TestOnce:
    def test_first_201_then_200_then_409(self, operator: Any) -> None:
        """C047."""
        first = post(operator, ECHO, "k1")
        assert first.status_code == 201
        again = post(operator, ECHO, "k1")
        assert (again.status_code, again.json()["id"]) == (200, first.json()["id"])
        other = post(operator, {**ECHO, "input": {"count": 6}}, "k1")
        assert (other.status_code, other.json()["code"]) == (409, "E_JOB_IDEMPOTENCY_CONFLICT")
        finish(service.get(first.json()["id"]))  # type: ignore[arg-type]
        after = post(operator, ECHO, "k1")
        assert (after.status_code, after.json()["phase"]) == (200, "completed")
        assert Job.objects.count() == 1

    def test_another_users_key_is_another_key(self, operator: Any, signed_in: Any) -> None:
        """C047: it gives nothing away, not even that the key exists."""
        first = post(operator, ECHO, "k1")
        other = signed_in(*OPERATOR)
        theirs = post(other, {**ECHO, "input": {"count": 6}}, "k1")
        assert theirs.status_code == 201
        assert theirs.json()["id"] != first.json()["id"]
        assert "k1" not in str([job.idempotency_key for job in Job.objects.all()])

    def test_a_key_cannot_be_forged_into_that_of_another(self, operator: Any) -> None:
        taken = service.start("rest.echo", {"count": 5}, idempotency_key="k1").job
        assert post(operator, ECHO, "k1").json()["id"] != str(taken.id)

    @pytest.mark.parametrize("key", ["", " ", "x" * 201, "a b", "größe", "a\tb"])
    def test_a_key_that_is_none_is_400(self, key: str, operator: Any) -> None:
        """C079: refused before the database, which on SQLite would take it."""
        answer = post(operator, ECHO, key)
        assert (answer.status_code, list(answer.json())) == (400, ["Idempotency-Key"])
        assert not Job.objects.exists()

    def test_without_a_key_each_request_starts_a_job(self, operator: Any) -> None:
        assert {post(operator, ECHO).status_code for _ in range(2)} == {201}
        assert Job.objects.count() == 2


@pytest.mark.django_db
class TestByTheKindsOwnForm:
    """A form with a method `start` makes its own row, job and keys."""

    PARCEL: ClassVar = {"kind": "rest.parcel", "input": {"weight": 2, "street": "Here"}}

    def test_it_starts_the_job_with_its_row(self, operator: Any) -> None:
        answer = post(operator, self.PARCEL)
        assert answer.status_code == 201
        job = Job.objects.get(pk=answer.json()["id"])
        assert (job.subject, job.created_by_id, job.lock_key) == (
            Group.objects.get(),
            operator.user.pk,
            "Here",
        )
        [event] = job.events.all()
        assert (event.event, event.actor) == ("started", f"user:{operator.user.pk} {operator.user}")

    def test_first_201_then_200_then_409(self, operator: Any) -> None:
        first = post(operator, self.PARCEL, "k1")
        again = post(operator, self.PARCEL, "k1")
        assert (first.status_code, again.status_code) == (201, 200)
        assert first.json()["id"] == again.json()["id"]
        other = post(operator, {**self.PARCEL, "input": {"weight": 3}}, "k1")
        assert (other.status_code, other.json()["code"]) == (409, "E_JOB_IDEMPOTENCY_CONFLICT")
        assert Job.objects.count() == Group.objects.count() == 1

    def test_a_refusal_leaves_no_row(self, operator: Any) -> None:
        holder = post(operator, self.PARCEL, "k1").json()["id"]
        refused = post(operator, self.PARCEL, "k2")
        assert (refused.status_code, refused.json()["code"]) == (409, "lock_key_held")
        assert refused.json()["held_by"] == holder
        said = post(operator, {**self.PARCEL, "input": {"weight": 13}})
        assert (said.status_code, said.json()) == (400, {"input": ["Nobody carries thirteen."]})
        wrong = post(operator, {**self.PARCEL, "input": {"weight": 31}})
        assert (wrong.status_code, list(wrong.json()["input"])) == (400, ["weight"])
        assert Job.objects.count() == Group.objects.count() == 1


@pytest.mark.django_db(transaction=True)
@pytest.mark.parametrize("street", ["", "Here"])
def test_the_same_form_at_the_same_time_makes_one_job_and_one_row(
    other_connections: Callable[[], OtherConnection], street: str
) -> None:
    """C047: whether they meet at the key, or at the lock of the job."""
    body = {"kind": "rest.parcel", "input": {"weight": 2, "street": street}}
    who = user("anna", *OPERATOR)
    clients = [client(who) for _ in range(3)]
    begun = [other_connections().begin(post, one, body, "k1") for one in clients]
    answers = [future.result(30) for future in begun]
    assert sorted(answer.status_code for answer in answers) == [200, 200, 201]
    assert Job.objects.count() == Group.objects.count() == 1


@pytest.mark.django_db(transaction=True)
def test_the_same_key_at_the_same_time_makes_one_job(
    other_connections: Callable[[], OtherConnection],
) -> None:
    """C047: a lost race is never a 500."""
    who = user("anna", *OPERATOR)
    clients = [client(who) for _ in range(3)]
    begun = [other_connections().begin(post, one, ECHO, "k1") for one in clients]
    answers = [future.result(30) for future in begun]
    assert sorted(answer.status_code for answer in answers) == [200, 200, 201]
    assert len({answer.json()["id"] for answer in answers}) == Job.objects.count() == 1


@pytest.mark.django_db
class TestInput:
    @pytest.mark.parametrize("body", [ECHO, LETTER])
    def test_what_a_serializer_or_a_form_takes_is_the_input(self, body: Any, operator: Any) -> None:
        answer = post(operator, body)
        assert answer.status_code == 201
        assert answer["Location"] == f"http://testserver{of(answer.json()['id'], 'status/')}"
        job = service.get(answer.json()["id"])
        assert job is not None
        assert (
            job.input == {"urgent": False, **body["input"]} if body is LETTER else job.input == body["input"]
        )
        assert (job.created_by_id, job.scope) == (operator.user.pk, Scope())
        assert operator.get(answer["Location"]).status_code == 200

    @pytest.mark.parametrize(
        ("kind", "input", "named"),
        [
            ("rest.echo", {}, "count"), ("rest.echo", {"count": -1}, "count"), ("rest.echo", {"count": 1, "x": 1}, "x"),
            ("rest.echo", {"count": 10**400}, "count"), ("rest.echo", [], "non_field_errors"),
            ("rest.letter", {"address": "x", "copies": 99, "colour": "red"}, "copies"),
            ("rest.letter", {"address": ["x"], "copies": 1, "colour": "red"}, "address"),
            ("rest.letter", {"address": "x", "copies": 1, "colour": "red", "b": 1}, "b"),
            ("rest.letter", {"address": "x", "copies": True, "colour": "red"}, "copies"), ("rest.letter", {}, "address"),
        ],
    )  # fmt: skip
    def test_a_wrong_input_is_400_and_named(self, kind: str, input: Any, named: str, operator: Any) -> None:
        answer = post(operator, {"kind": kind, "input": input})
        assert answer.status_code == 400
        assert named in answer.json()["input"]
        assert not Job.objects.exists()

    @pytest.mark.parametrize("kind", ["rest.internal", "gone", "", "x" * 300, 5, None, [], "\x00"])
    def test_other_kinds_are_400(self, kind: Any, operator: Any) -> None:
        answer = post(operator, {"kind": kind, "input": {}})
        assert (answer.status_code, list(answer.json())) == (400, ["kind"])

    @pytest.mark.parametrize(
        "name", ["scope", "tenant", "created_by", "lock_key", "priority", "idempotency_key"]
    )
    def test_a_body_names_no_scope_and_no_other_option(self, name: str, operator: Any) -> None:
        answer = post(operator, {**ECHO, name: "x"})
        assert (answer.status_code, list(answer.json())) == (400, [name])

    def test_the_scope_is_the_sessions(self, operator: Any, settings: Any) -> None:
        settings.DURABLE_JOBS = {"SCOPE_FROM_REQUEST": lambda request: Scope("t", request.user.username)}
        job = store.get(Job(id=post(operator, ECHO).json()["id"]).pk)
        assert job is None or job.scope == Scope("t", operator.user.username)

    def test_starting_needs_its_right(self, viewer: Any) -> None:
        assert post(client(), ECHO).status_code == 401
        assert post(viewer, ECHO).status_code == 403

    def test_a_kind_may_ask_for_more_rights(self, operator: Any, signed_in: Any) -> None:
        body = {"kind": "rest.guarded", "input": {"count": 1}}
        assert post(operator, body).status_code == 403
        assert post(signed_in("start_job", "change_user"), body).status_code == 201


# --- the status of one's own job ---


@pytest.mark.django_db
class TestOwnStatus:
    def test_who_started_a_job_needs_no_right_to_follow_it(self, signed_in: Any) -> None:
        """F25."""
        starter = signed_in("start_job")
        address = post(starter, ECHO)["Location"]
        begun = starter.get(address).json()
        assert set(begun) == {
            "id", "kind", "phase", "finished", "percent", "processed", "total", "eta_seconds", "public_message", "result",
            "created_at", "started_at", "finished_at",
        }  # fmt: skip
        assert (begun["phase"], begun["public_message"], begun["result"]) == (
            "waiting",
            "Waiting to start.",
            None,
        )
        finish(service.get(begun["id"]))  # type: ignore[arg-type]
        ended = starter.get(address).json()
        assert (ended["phase"], ended["percent"], ended["finished"]) == ("completed", 100.0, True)
        assert ended["result"] == {"said": {"count": 5}, "token": "••••"}

    def test_a_kind_that_does_not_say_so_shows_no_result(self, operator: Any) -> None:
        job = finish(service.get(post(operator, LETTER).json()["id"]))  # type: ignore[arg-type]
        assert job.result == {"printed": 2}
        assert operator.get(of(job, "status/")).json()["result"] is None

    def test_an_error_shows_no_internals(self, operator: Any) -> None:
        """F12."""
        job = make_job("failed", kind="rest.echo", created_by=operator.user.pk)
        told = operator.get(of(job, "status/"))
        assert (told.json()["phase"], told.json()["public_message"]) == ("failed", "Failed.")
        assert b"made for a test" not in told.content

    def test_nobody_elses_job_and_no_other_scopes(self, operator: Any, signed_in: Any, settings: Any) -> None:
        job = make_job(kind="rest.echo", created_by=operator.user.pk)
        assert operator.get(of(job, "status/")).status_code == 200
        assert signed_in("view_job", "view_all_scopes").get(of(job, "status/")).status_code == 404
        settings.DURABLE_JOBS = {"SCOPE_FROM_REQUEST": lambda request: Scope("moved")}
        assert operator.get(of(job, "status/")).status_code == 404

    def test_an_unchanged_job_is_304(self, operator: Any) -> None:
        job = make_job(kind="rest.echo", created_by=operator.user.pk)
        first = operator.get(of(job, "status/"))
        assert first["Cache-Control"] == "private, no-cache" and "Cookie" in first["Vary"]
        again = operator.get(of(job, "status/"), headers={"If-None-Match": first["ETag"]})
        assert (again.status_code, again.content, again["ETag"]) == (304, b"", first["ETag"])
        for other in ('"x"', "nonsense", "W/"):
            assert operator.get(of(job, "status/"), headers={"If-None-Match": other}).status_code == 200
        service.cancel(job.id)
        changed = operator.get(of(job, "status/"), headers={"If-None-Match": first["ETag"]})
        assert (changed.status_code, changed.json()["phase"]) == (200, "cancelled")

    def test_retry_after_says_when_to_ask_again(self, operator: Any) -> None:
        who = operator.user.pk
        asked = {
            "running": "1", "pending": "2", "held": "15", "completed": None, "failed": None, "cancelled": None,
        }  # fmt: skip
        for state, seconds in asked.items():
            told = operator.get(of(make_job(state, kind="rest.echo", created_by=who), "status/"))
            assert told.headers.get("Retry-After") == seconds, state

    def test_it_asks_the_database_little(self, operator: Any, django_assert_num_queries: Any) -> None:
        job = make_job("running", kind="rest.echo", created_by=operator.user.pk)
        with django_assert_num_queries(4):  # session, user, job, time and pauses
            operator.get(of(job, "status/"))


@pytest.mark.django_db
def test_a_deleted_users_jobs_are_nobodys(operator: Any) -> None:
    job = make_job(kind="rest.echo", created_by=operator.user.pk)
    User.objects.get(pk=operator.user.pk).delete()
    assert client(user("anna")).get(of(job, "status/")).status_code == 404
