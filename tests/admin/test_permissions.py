"""Who may do what: every URL and act, by GET and POST, with and without CSRF, for every sort of user."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from django.contrib.admin.models import LogEntry
from django.contrib.auth.models import User
from django.test import Client

from durable_jobs import service
from durable_jobs.models import Job, JobEvent, Pause, Scope
from durable_jobs.testing import make_job
from tests.admin.conftest import ALL, logged_in, make_user, url
from tests.slices import change, columns, made

pytestmark = pytest.mark.django_db

WHO: dict[str, tuple[str, ...] | None] = {
    "anonymous": None,
    "nobody": (),
    "viewer": ("view_job",),
    "operator": ("view_job", "operate_job"),
    "forcer": ("view_job", "operate_job", "force_redrive_job"),
    "force alone": ("view_job", "force_redrive_job"),
    "operate alone": ("operate_job", "pause_job", "start_job", "settle_job"),
    "payload": ("view_job", "view_job_payload"),
    "pauser": ("view_job", "pause_job", "view_all_scopes"),
    "pauser of a tenant": ("view_job", "pause_job"),
    "starter": ("view_job", "start_job"),
    "settler": ("view_job", "settle_job"),
    "customer": (),
}
"""`customer` is no member of the staff and has every permission."""


def client_of(who: str, **options: Any) -> Client:
    given = WHO[who]
    if given is None:
        return logged_in(None, **options)
    if who == "customer":
        return logged_in(make_user("customer", *ALL, staff=False), **options)
    return logged_in(make_user(who, *given), **options)


@pytest.fixture
def jobs(registry: None, settings: Any) -> dict[str, Job]:
    # A project that knows scopes: then not everybody may stop everybody's work.
    settings.DURABLE_JOBS = {**settings.DURABLE_JOBS, "SCOPE_FROM_REQUEST": lambda request: Scope()}
    made(allow_restart=True, on_transition=lambda self, job: 1, on_redrive=lambda self, job: 1)
    found = {
        "failed": make_job("failed", kind="tests.made", input={"secret": "of the input"}),
        "again": make_job("failed", kind="tests.made"),
        "unrecoverable": make_job("failed", kind="tests.made"),
        "waiting": make_job("pending", kind="tests.made"),
        "stuck": make_job("pending", kind="tests.made"),
        "foreign": make_job("failed", kind="tests.made", scope=Scope("other")),
    }
    change(found["unrecoverable"], verdict="unrecoverable")
    change(found["stuck"], mirror_attempts=3)
    service.pause(queue="slow", reason="for the test")
    return found


def state(jobs: dict[str, Job]) -> Any:
    return (
        {name: columns(job) for name, job in jobs.items()},
        Job.objects.count(), JobEvent.objects.count(), Pause.objects.count(), LogEntry.objects.count(),
    )  # fmt: skip


def pages(jobs: dict[str, Job]) -> list[str]:
    failed = jobs["failed"].pk
    pause = Pause.objects.get().pk
    return [
        "/admin/durable_jobs/", url("overview"), url("changelist"), url("change", failed), url("live", failed),
        url("history", failed), url("start"), url("start_kind", "demo.airports"), url("pause"), url("unpause", pause),
        url("many"), url("bulk"), url("add"), url("delete", failed), "/admin/durable_jobs/jobevent/",
        "/admin/durable_jobs/pause/", "/admin/durable_jobs/workerprocess/", f"/admin/durable_jobs/pause/{pause}/change/",
        *(url("act", job.pk, act) for job in (jobs["failed"], jobs["foreign"]) for act in ("cancel", "redrive", "restart", "force", "settle", "x")),
    ]  # fmt: skip


@pytest.mark.parametrize("who", WHO)
def test_looking_changes_nothing_and_leaks_nothing(jobs: dict[str, Job], who: str) -> None:
    """By GET, and by POST without a CSRF token: no page changes anything, answers 500, or shows what it must not."""
    client = client_of(who, enforce_csrf_checks=True)
    before = state(jobs)
    sees = "view_job" in (WHO[who] or ()) and who != "customer"
    for page in pages(jobs):
        answer = client.get(page)
        assert answer.status_code in ((200, 302, 403) if sees else (302, 403, 404)), (
            page,
            answer.status_code,
        )
        said = answer.content.decode()
        assert "of the input" not in said or who == "payload", page
        assert str(jobs["foreign"].pk) not in said or who == "pauser" or answer.status_code == 302, page
        assert client.post(page, {"reason": "x", "act": "redrive", "all": "1"}).status_code in (
            302,
            403,
            405,
        ), page
    assert state(jobs) == before


ATTEMPTS: dict[str, tuple[str, Callable[[dict[str, Job]], str], dict[str, str], set[str]]] = {
    # what: the job, its URL, what is posted, who may.
    "cancel": ("waiting", lambda jobs: url("act", jobs["waiting"].pk, "cancel"), {"version": "live:0"}, {"operator", "forcer"}),
    "redrive": ("failed", lambda jobs: url("act", jobs["failed"].pk, "redrive"), {}, {"operator", "forcer"}),
    "restart": ("again", lambda jobs: url("act", jobs["again"].pk, "restart"), {}, {"operator", "forcer"}),
    "force": ("unrecoverable", lambda jobs: url("act", jobs["unrecoverable"].pk, "force"), {}, {"forcer"}),
    "redrive what needs force": ("unrecoverable", lambda jobs: url("act", jobs["unrecoverable"].pk, "redrive"), {}, set()),
    "settle": ("stuck", lambda jobs: url("act", jobs["stuck"].pk, "settle"), {}, {"settler"}),
    "of another tenant": ("foreign", lambda jobs: url("act", jobs["foreign"].pk, "redrive"), {}, set()),
}  # fmt: skip


@pytest.mark.parametrize("who", WHO)
def test_each_act_is_for_those_who_may(jobs: dict[str, Job], who: str) -> None:
    client = client_of(who)
    for what, (name, address, said, allowed) in ATTEMPTS.items():
        before, job = columns(jobs[name]), Job.objects.get(pk=jobs[name].pk)
        given = {
            "version": f"{job.status}:{job.lease_epoch}:{job.redrives}",
            "reason": "for the test",
            **said,
        }
        answer = client.post(address(jobs), given)
        assert answer.status_code in (302, 403), (what, answer.status_code)
        assert (columns(jobs[name]) != before) == (who in allowed), (who, what)


@pytest.mark.parametrize("who", WHO)
def test_bulks_pauses_and_starts_are_for_those_who_may(jobs: dict[str, Job], who: str) -> None:
    client = client_of(who)
    asked = client.post(f"{url('many')}?phase=human", {"act": "redrive", "all": "1"})
    assert (asked.status_code == 200) == (who in ("operator", "forcer"))
    assert client.post(f"{url('many')}?phase=human", {"act": "force", "all": "1"}).status_code == (
        200 if who == "forcer" else 403 if WHO[who] is not None and who != "customer" else 302
    )
    before = state(jobs)
    client.post(url("pause"), {"queue": "other", "reason": "x"})
    client.post(url("pause"), {"queue": "other", "tenant": "other", "reason": "x"})
    client.post(url("unpause", Pause.objects.order_by("id").first().pk))
    assert (Pause.objects.count(), Pause.objects.filter(queue_name="slow").exists()) == (
        (2, False) if who == "pauser" else (1, True)
    )
    if who == "pauser of a tenant":
        client.post(url("pause"), {"queue": "other", "tenant": "default", "reason": "x"})
        assert Pause.objects.filter(tenant_id="default").exists()
    said = {"job-scope": "default", "job-once": "once"}
    client.post(url("start_kind", "demo.airports"), said)
    client.post(url("start_kind", "demo.airports"), {**said, "job-scope": "other"})
    assert Job.objects.count() == len(jobs) + (who == "starter")
    assert before[0] == state(jobs)[0]


def test_a_superuser_sees_and_may_do_all(jobs: dict[str, Job]) -> None:
    client = logged_in(User.objects.create_superuser("root"))
    for page in pages(jobs):
        assert client.get(page).status_code in (200, 302, 403), page
    page = client.get(url("change", jobs["foreign"].pk))
    assert page.status_code == 200 and "Redrive (run again)" in page.content.decode()


def test_an_inactive_user_is_nobody(jobs: dict[str, Job]) -> None:
    user = make_user("gone", *ALL)
    client = logged_in(user)
    User.objects.filter(pk=user.pk).update(is_active=False)
    assert client.get(url("overview")).status_code == 302
