"""Cancel, redrive, pause: what they answer, and that the flags foretold it."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest

from durable_jobs import service, store
from durable_jobs.exceptions import ErrorClass, ErrorFacts
from durable_jobs.explain import Redrivable
from durable_jobs.kinds import Done, Kind
from durable_jobs.models import Job, JobEvent, Pause, Scope
from durable_jobs.selection import Look
from durable_jobs.store import Lease
from durable_jobs.testing import make_job, register_for_test
from tests.rest.kinds import Echo, Guarded
from tests.rest.test_looking import JOBS, STATES, of
from tests.store import rows

pytestmark = pytest.mark.django_db


def unrecoverable(**columns: Any) -> Job:
    job = make_job("running", kind=Echo, owner="w:1", **columns)
    facts = ErrorFacts(ErrorClass.UNRECOVERABLE, None, "ValueError", "for good", "")
    failed = store.fail_slice(
        Lease(job.id, "w:1", job.lease_epoch, 60.0), facts, max_failures=5, first_delay=0.0, longest_delay=0.0,
        exponential=False,
    )  # fmt: skip
    assert failed is not None
    ended = store.fail_terminal(job.id, failed.lease_epoch)
    assert ended is not None
    return ended


def blocked() -> Job:
    job = make_job("failed", kind=Echo, lock_key="key")
    make_job("running", kind=Echo, lock_key="key")
    return job


def past_grace() -> Job:
    job = make_job("expired", kind=Echo)
    rows.execute("UPDATE durable_jobs_job SET lease_expires_at = %s WHERE id = %s", rows.ago(3_600), job.id)
    return job


def scheduled() -> Job:
    return service.start(Echo, run_after=timedelta(hours=1)).job


MADE = {
    **{state: lambda state=state: make_job(state, kind=Echo) for state in STATES},
    "unrecoverable": unrecoverable,
    "blocked": blocked,
    "past grace": past_grace,
    "scheduled": scheduled,
    "unknown kind": lambda: make_job("failed", kind="gone.kind"),
}


# --- the flags ---


@pytest.mark.parametrize("state", MADE)
def test_the_flag_foretells_the_redrive(state: str, signed_in: Any) -> None:
    """B182, C029: no button that then answers 409, and none missing."""
    operator = signed_in("view_job", "operate_job", "force_redrive_job")
    job = MADE[state]()
    flag = Redrivable(operator.get(of(job)).json()["redrivable"])
    listed = {one["id"]: one for one in operator.get(JOBS).json()["results"]}
    assert listed[str(job.id)]["redrivable"] == flag
    plain = operator.post(of(job, "redrive/"), {"reason": "why"}, format="json")
    assert (plain.status_code == 200) is (flag is Redrivable.YES), plain.json()
    if plain.status_code == 200:
        return
    assert plain.status_code == 409
    before = rows.image(job.id)
    forced = operator.post(of(job, "redrive/"), {"force": True}, format="json")
    assert (forced.status_code == 200) is (flag is Redrivable.FORCE), forced.json()
    if forced.status_code != 200:
        assert rows.image(job.id) == before


@pytest.mark.parametrize("state", MADE)
def test_stuck_is_what_the_phase_says_by_the_databases_clock(state: str, viewer: Any) -> None:
    job = MADE[state]()
    now = store.get(job.id)
    assert now is not None
    assert viewer.get(of(job)).json()["stuck"] is (Look.take().phase(now) == "stuck")


def test_the_process_clock_says_nothing(viewer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """B182: judged on the database's clock."""
    job = past_grace()
    monkeypatch.setattr("time.time", lambda: 0.0)
    told = viewer.get(of(job)).json()
    assert (told["redrivable"], told["stuck"]) == ("yes", True)


# --- redrive ---


def test_a_redrive_is_recorded_with_who_and_why(operator: Any) -> None:
    job = make_job("failed", kind=Echo)
    answer = operator.post(of(job, "redrive/"), {"reason": "cause gone"}, format="json")
    body = answer.json()
    assert (answer.status_code, body["result"], body["job"]["status"]) == (200, "redriven", "pending")
    event = JobEvent.objects.get(job_id=job.id, event="redriven")
    assert (event.reason, event.actor_id) == ("cause gone", str(operator.user.pk))
    assert event.actor == f"user:{operator.user.pk} {operator.user.username}"


@pytest.mark.parametrize("body", [None, {}])
def test_no_body_is_no_force(body: Any, operator: Any) -> None:
    """B181."""
    answer = operator.post(of(unrecoverable(), "redrive/"), body, format="json")
    assert (answer.status_code, answer.json()["code"]) == (409, "unrecoverable_requires_force")


def test_force_needs_its_right(operator: Any, signed_in: Any) -> None:
    job = unrecoverable()
    assert operator.post(of(job, "redrive/"), {"force": True}, format="json").status_code == 403
    assert store.get(job.id).status == "failed"  # type: ignore[union-attr]
    forcing = signed_in("operate_job", "force_redrive_job")
    assert forcing.post(of(job, "redrive/"), {"force": True}, format="json").status_code == 200


def test_a_refusal_tells_code_status_and_holder(operator: Any) -> None:
    job = blocked()
    holder = Job.objects.get(lock_key="key", status="running")
    answer = operator.post(of(job, "redrive/"))
    body = answer.json()
    assert answer.status_code == 409
    assert (body["code"], body["status"], body["held_by"]) == ("lock_key_held", "failed", str(holder.id))


def test_restart_is_the_kinds_to_allow(operator: Any) -> None:
    refused = operator.post(
        of(make_job("failed", kind=Guarded), "redrive/"), {"restart": True}, format="json"
    )
    assert refused.status_code == 403
    with register_for_test(Plain):
        answer = operator.post(
            of(make_job("failed", kind=Plain), "redrive/"), {"restart": True}, format="json"
        )
    assert (answer.status_code, answer.json()["code"]) == (409, "restart_not_allowed")
    job = make_job("failed", kind=Echo)
    assert operator.post(of(job, "redrive/"), {"restart": True}, format="json").status_code == 200


class Plain(Kind):
    name = "rest.plain"

    def step(self, ctx: Any) -> Done:
        return Done()


class Stubborn(Plain):
    name = "rest.stubborn"

    def on_transition(self, job: Job) -> int:
        return 1

    def on_redrive(self, job: Job) -> int:
        return 0


def test_a_hook_that_refuses_is_a_refusal(operator: Any) -> None:
    with register_for_test(Stubborn):
        job = make_job("failed", kind=Stubborn)
        answer = operator.post(of(job, "redrive/"))
    assert (answer.status_code, answer.json()["code"], answer.json()["status"]) == (
        409,
        "hook_failed",
        "failed",
    )


def test_a_kind_may_ask_for_more_rights(operator: Any, signed_in: Any) -> None:
    """B172."""
    job = make_job("failed", kind=Guarded)
    assert operator.post(of(job, "redrive/")).status_code == 403
    assert store.get(job.id).status == "failed"  # type: ignore[union-attr]
    assert signed_in("operate_job", "change_user").post(of(job, "redrive/")).status_code == 200


# --- cancel ---


@pytest.mark.parametrize("state", MADE)
def test_cancel_tells_the_truth_in_every_state_twice(state: str, operator: Any) -> None:
    """B180, C094: `cancelled` only if it is."""
    job = MADE[state]()
    for turn in ("first", "second"):
        before = store.get(job.id)
        answer = operator.post(of(job, "cancel/"), {"reason": "enough"}, format="json")
        now = store.get(job.id)
        assert before is not None and now is not None
        if before.finished_at is not None:
            body = answer.json()
            assert (answer.status_code, body["code"], body["status"]) == (
                409,
                "not_cancellable",
                before.status,
            )
        elif now.status == "cancelled":
            assert (answer.status_code, answer.json()["result"]) == (200, "cancelled")
        else:
            assert (answer.status_code, answer.json()["result"]) == (202, "cancelling"), turn
            assert now.cancel_requested_at is not None
            assert answer.json()["job"]["phase"] in ("stopping", "stuck")


def test_a_cancel_names_who_asked(operator: Any) -> None:
    job = make_job(kind=Echo)
    operator.post(of(job, "cancel/"), {"reason": "enough"}, format="json")
    event = JobEvent.objects.get(job_id=job.id, event="cancel_requested")
    assert (event.reason, event.actor_id) == ("enough", str(operator.user.pk))


# --- pause ---


def test_pause_and_unpause(operator: Any) -> None:
    body = {"queue": "default", "reason": "maintenance"}
    answer = operator.post("/api/pauses/pause/", body, format="json")
    assert (answer.status_code, answer.json()["queue"], answer.json()["kind"]) == (200, "default", "")
    assert answer.json()["actor"].endswith(operator.user.username)
    assert operator.get(of(make_job(kind=Echo))).json()["phase"] == "paused"
    assert [one["reason"] for one in operator.get("/api/pauses/").json()] == ["maintenance"]
    assert operator.post("/api/pauses/unpause/", {"queue": "default"}, format="json").json() == {
        "unpaused": True
    }
    assert operator.post("/api/pauses/unpause/", {"queue": "default"}, format="json").json() == {
        "unpaused": False
    }
    assert not Pause.objects.exists()


@pytest.mark.parametrize(
    ("body", "named"),
    [({}, "reason"), ({"reason": " "}, "reason"), ({"reason": "x", "queue": " "}, "queue"),
     ({"reason": "x", "tenant": "y" * 65}, "tenant"), ({"reason": "x", "all": True}, "all")],
)  # fmt: skip
def test_a_pause_says_why_and_what(body: Any, named: str, operator: Any) -> None:
    answer = operator.post("/api/pauses/pause/", body, format="json")
    assert (answer.status_code, list(answer.json())) == (400, [named])
    assert not Pause.objects.exists()


def test_who_does_not_see_all_scopes_pauses_nothing(operator: Any, signed_in: Any, settings: Any) -> None:
    settings.DURABLE_JOBS = {"SCOPE_FROM_REQUEST": lambda request: Scope("mine")}
    body = {"tenant": "mine", "reason": "x"}
    assert operator.post("/api/pauses/pause/", body, format="json").status_code == 403
    every = signed_in("pause_job", "view_all_scopes")
    assert every.post("/api/pauses/pause/", body, format="json").status_code == 200
    service.pause(tenant="other", reason="secret")
    assert [one["tenant"] for one in operator.get("/api/pauses/").json()] == ["mine"]
    assert operator.post("/api/pauses/unpause/", {"tenant": "mine"}, format="json").status_code == 403


def test_pausing_needs_its_right(viewer: Any) -> None:
    assert viewer.post("/api/pauses/pause/", {"reason": "x"}, format="json").status_code == 403
    assert viewer.post("/api/pauses/unpause/", {}, format="json").status_code == 403
