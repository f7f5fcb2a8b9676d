"""What each screen shows, and that every page works for every state of a job."""

from __future__ import annotations

import re
import time
from datetime import timedelta
from typing import Any
from uuid import uuid4

import pytest
from django import forms
from django.contrib.admin.models import LogEntry
from django.contrib.auth.models import User
from django.test import Client
from django.urls import reverse
from django.utils import timezone

from durable_jobs import service, store
from durable_jobs.exceptions import TerminalError
from durable_jobs.kinds import Done
from durable_jobs.models import Job, JobEvent, Pause, Scope
from durable_jobs.testing import finish, make_job, run, run_slice
from project.demo.jobs import start_import
from project.demo.models import ImportRun
from tests.admin.conftest import ALL, confirm, logged_in, make_user, url, words
from tests.slices import change, made

pytestmark = pytest.mark.django_db

STATES = (
    "held", "pending", "running", "expired", "retrying", "verdict", "cancelling", "completed", "failed", "parked",
    "cancelled",
)  # fmt: skip


def test_every_page_works_without_a_single_job(client: Client) -> None:
    for name in ("overview", "changelist", "start", "pause"):
        assert client.get(url(name)).status_code == 200, name
    assert client.get("/admin/durable_jobs/jobevent/").status_code == 200
    assert client.get("/admin/durable_jobs/pause/").status_code == 200
    assert client.get("/admin/durable_jobs/workerprocess/").status_code == 200
    assert "Overview" in words(client.get("/admin/durable_jobs/"))


@pytest.mark.parametrize("known", [True, False])
def test_every_page_works_for_a_job_in_every_state(client: Client, registry: None, known: bool) -> None:
    """Also where nobody knows the kind (C034)."""
    if known:
        made(name="tests.state", allow_restart=True)
    jobs = {
        state: make_job(state, kind="tests.state", input={"state": state}, lock_key=state) for state in STATES
    }
    assert words(client.get(url("changelist"))).count("tests.state") >= len(STATES)
    assert client.get(url("overview")).status_code == 200
    for state, job in jobs.items():
        page = client.get(url("change", job.pk))
        assert page.status_code == 200 and str(job.pk) in words(page), state
        assert client.get(url("live", job.pk)).status_code == 200
        for act in ("cancel", "redrive", "restart", "force", "settle") if known else ("cancel", "redrive"):
            assert client.get(url("act", job.pk, act)).status_code == 200, (state, act)


def test_a_cancel_works_where_nobody_knows_the_kind(client: Client) -> None:
    """C034: the request is recorded; a worker that knows the kind ends it."""
    job = make_job("pending", kind="gone.kind")
    assert "cancel was requested" in words(confirm(client, job, "cancel"))
    assert "not known here" in words(
        client.get(url("act", make_job("failed", kind="gone.kind").pk, "redrive"))
    )


def test_the_job_page_says_what_a_redrive_would_do(client: Client, registry: None) -> None:
    made(operator_note="Sends e-mail; ask billing first.", runbook_url="https://example.org/runbook")
    job = make_job("failed", kind="tests.made")
    now = timezone.now()
    change(job, checkpoint_text="{}", checkpoint_at=now, processed_count=41_200, total_count=90_000)
    page = words(client.get(url("change", job.pk)))
    assert "Continues from item 41,200 of 90,000." in page
    assert "ask billing first" in page
    assert "https://example.org/runbook" in client.get(url("act", job.pk, "redrive")).content.decode()


def test_a_redrive_that_the_lock_forbids_names_the_holder(client: Client, registry: None) -> None:
    made()
    failed = make_job("failed", kind="tests.made", lock_key="one")
    holder = make_job("pending", kind="tests.made", lock_key="one")
    page = client.get(url("act", failed.pk, "redrive"))
    assert url("change", holder.pk) in page.content.decode()
    assert "Yes" not in words(page).split("Jobs")[-1]
    assert url("change", holder.pk) in client.get(url("change", failed.pk)).content.decode()


def test_a_cancel_tells_requested_seen_and_ended(client: Client, registry: None, operator: User) -> None:
    made()
    job = make_job("running", kind="tests.made")
    assert "stops at its next boundary" in words(confirm(client, job, "cancel", reason="wrong file"))
    page = words(client.get(url("change", job.pk)))
    assert "Requested by user:" in page and "anna" in page and "wrong file" in page
    assert "has not seen it yet" in page
    [entry] = LogEntry.objects.all()
    assert entry.object_id == str(job.pk) and "wrong file" in entry.change_message and entry.user == operator


@pytest.mark.parametrize(
    "words_",
    [
        "9" * 30,
        "%",
        "x" * 10_000,
        "no-uuid",
        "00000000-0000-0000-0000-00000000000g",
        "\x00",
        "'; --",
        "a:b:c",
        ":",
    ],
)
def test_nonsense_in_the_search_finds_nothing(client: Client, words_: str) -> None:
    """C089"""
    make_job("pending")
    answer = client.get(url("changelist"), {"q": words_})
    assert answer.status_code == 200


@pytest.mark.parametrize(
    "query",
    ["after=99999999999999999999", "after=~", "after=20200101T000000.0~zz", "phase=nothing", "created_from=yesterday",
     "finished_to=9999-12-31T23:59", "created_from=0001-01-01T00:00", "p=99999999999999999999", "kind=%00", "scope=/", "scope=a/b/c"],
)  # fmt: skip
def test_nonsense_in_the_address_is_no_error(client: Client, query: str) -> None:
    """C089"""
    make_job("pending")
    assert client.get(f"{url('changelist')}?{query}").status_code == 200
    assert (
        client.get(f"/admin/durable_jobs/jobevent/?{query}&since=x&until=9999-12-31T23:59").status_code == 200
    )


@pytest.mark.parametrize("key", ["nothing", "99999999999999999999999", str(uuid4()), "%00", "a/b"])
def test_a_job_that_is_not_there_leads_back_to_the_list(client: Client, key: str) -> None:
    answer = client.get(f"/admin/durable_jobs/job/{key}/change/")
    assert (answer.status_code, answer.get("Location")) == (302, url("changelist"))
    assert client.get(f"/admin/durable_jobs/jobevent/{key}/change/").status_code in (302, 404)
    assert client.get(f"/admin/durable_jobs/pause/{key}/change/").status_code in (302, 404)


def test_the_search_finds_an_id_subject_lock_and_idempotency_key(client: Client, registry: None) -> None:
    made()
    job = make_job(
        "completed",
        kind="tests.made",
        lock_key="the lock",
        idempotency_key="the key",
        subject_type="auth.user",
        subject_id="4711",
    )
    other = make_job("pending", kind="tests.made", lock_key="another")
    for said in (
        str(job.pk),
        job.pk.hex,
        job.pk.hex.upper(),
        "the lock",
        "the key",
        "auth.user:4711",
        "4711",
    ):
        page = client.get(url("changelist"), {"q": said}).content.decode()
        assert url("change", job.pk) in page, said
        assert url("change", other.pk) not in page, said
    assert url("change", other.pk) in client.get(url("changelist"), {"q": "another"}).content.decode()


def test_filters_narrow_the_list(client: Client, registry: None) -> None:
    made()
    failed, parked = make_job("failed", kind="tests.made"), make_job("parked", kind="tests.made")
    waiting = make_job("pending", kind="tests.made", queue="slow")
    done = make_job("completed", kind="tests.other")

    def found(**query: str) -> set[Any]:
        page = client.get(url("changelist"), query).content.decode()
        return {job.pk for job in (failed, parked, waiting, done) if url("change", job.pk) in page}

    assert found() == {failed.pk, parked.pk, waiting.pk, done.pk}
    assert found(phase="human") == {failed.pk, parked.pk}
    assert found(phase="parked") == {parked.pk}
    assert found(phase="completed") == {done.pk}
    assert found(queue="slow") == {waiting.pk}
    assert found(kind="tests.other") == {done.pk}
    assert found(error_code="made") == {parked.pk}
    assert found(error_type="ValueError") == {failed.pk}
    assert found(scope="default") == {failed.pk, parked.pk, waiting.pk, done.pk}
    assert found(scope="default/north") == set()
    later = (timezone.now() + timedelta(hours=1)).strftime("%Y-%m-%dT%H:%M")
    earlier = (timezone.now() - timedelta(hours=1)).strftime("%Y-%m-%dT%H:%M")
    assert found(finished_from=earlier) == {failed.pk, parked.pk, done.pk}
    assert found(created_from=later) == set()
    assert found(created_to=later, finished_to=later) == {failed.pk, parked.pk, done.pk}


def test_pages_follow_each_other_without_gap_or_repetition(client: Client) -> None:
    jobs = {make_job("pending").pk for _ in range(120)}
    for query in ("", "phase=waiting", "queue=default", "scope=default"):
        seen: list[str] = []
        following: str | None = query
        while following is not None:
            page = client.get(f"{url('changelist')}?{following}").content.decode()
            seen += re.findall(r'name="ids" value="([^"]+)"', page)
            found = re.search(r'rel="next"[^>]*href="\?([^"]+)"', page)
            following = found[1].replace("&amp;", "&") if found else None
        assert len(seen) == 120 and set(seen) == {str(key) for key in jobs}, query


def test_pages_of_failures_follow_each_other_by_their_ends(client: Client) -> None:
    jobs = {str(make_job("failed").pk) for _ in range(110)}
    seen: list[str] = []
    following: str | None = "phase=human"
    while following is not None:
        page = client.get(f"{url('changelist')}?{following}").content.decode()
        seen += re.findall(r'name="ids" value="([^"]+)"', page)
        found = re.search(r'rel="next"[^>]*href="\?([^"]+)"', page)
        following = found[1].replace("&amp;", "&") if found else None
    assert len(seen) == 110 and set(seen) == jobs


def test_times_are_in_the_active_zone_with_its_name(client: Client, settings: Any) -> None:
    """C073"""
    job = make_job("completed")
    at = timezone.datetime.fromisoformat("2026-07-15T03:30:00+00:00")
    change(job, created_at=at, started_at=at, finished_at=at, pending_since=None)
    settings.TIME_ZONE = "America/New_York"
    page = client.get(url("change", job.pk)).content.decode()
    assert "2026-07-14 23:30:00 EDT" in page and "2026-07-15T03:30:00+00:00" in page
    listed = client.get(
        url("changelist"), {"finished_from": "2026-07-14T00:00", "finished_to": "2026-07-14T23:59"}
    )
    assert url("change", job.pk) in listed.content.decode()
    listed = client.get(url("changelist"), {"finished_from": "2026-07-15T00:00"})
    assert url("change", job.pk) not in listed.content.decode()


def test_the_overview_tells_what_is_stuck_and_what_failed(client: Client, registry: None) -> None:
    made()
    stuck = make_job("expired", kind="tests.made")
    change(stuck, lease_expires_at=timezone.now() - timedelta(minutes=5))
    for _ in range(3):
        make_job("failed", kind="tests.made")
    page = client.get(url("overview"))
    said = words(page)
    assert "has not renewed the lease" in said and url("change", stuck.pk) in page.content.decode()
    assert "ValueError 3 tests.made 1 h 3" in said
    assert "<svg" in page.content.decode()


def test_a_pause_stands_on_every_screen_until_it_is_ended(client: Client, registry: None) -> None:
    made()
    job = make_job("pending", kind="tests.made", queue="slow")
    answer = client.post(
        url("pause"), {"queue": "slow", "reason": "Migration of the <b>disks</b>"}, follow=True
    )
    assert "Paused: queue slow" in words(answer)
    for page in (
        url("overview"),
        url("changelist"),
        url("change", job.pk),
        url("start"),
        "/admin/durable_jobs/jobevent/",
    ):
        said = client.get(page).content.decode()
        assert "Migration of the &lt;b&gt;disks&lt;/b&gt;" in said and "anna" in said, page
    assert "Paused (queue slow)" in words(client.get(url("change", job.pk)))
    [pause] = store_pauses()
    assert "Unpaused" in words(client.post(url("unpause", pause.pk), follow=True))
    assert not store_pauses()
    assert "ended already" in words(client.post(url("unpause", pause.pk), follow=True))
    assert LogEntry.objects.count() == 2


def test_the_timeline_tells_an_end_once_and_earlier_ends_too(client: Client, registry: None) -> None:
    def step(ctx: Any) -> Any:
        raise TerminalError("the file is empty")

    made(step, name="tests.ends")

    def timeline() -> str:
        return words(client.get(url("change", job.pk))).split("Timeline")[1].split("What went wrong")[0]

    job = run("tests.ends")
    # The clock goes on between the row's end and its line in the history.
    JobEvent._base_manager.filter(job_id=job.pk, event="failed").update(
        created_at=job.finished_at + timedelta(milliseconds=2)
    )
    assert timeline().count(" Failed ") == 1
    change(job, finished_at=job.finished_at - timedelta(hours=1))
    JobEvent._base_manager.filter(job_id=job.pk).update(created_at=job.finished_at - timedelta(hours=1))
    service.redrive(job.pk, actor="anna", force=True)
    finish(job)
    assert timeline().count(" Failed ") == 2 and timeline().index(" Failed ") < timeline().index("Redriven")


def test_the_history_tells_every_pause_and_its_end(client: Client, settings: Any) -> None:
    """Whoever set it, and however: on the history, and on the pages of the jobs that it held back."""
    kept = make_job("pending", kind="tests.made", queue="slow")
    other = make_job("pending", kind="tests.made", queue="other")
    service.pause(queue="slow", reason="new <b>disks</b>", actor="cron")
    service.pause(tenant="acme", reason="their wish", actor="cron")
    assert service.unpause(queue="slow", actor="cron") and not service.unpause(queue="slow", actor="cron")
    page = client.get("/admin/durable_jobs/jobevent/")
    said = words(page).split(" By What ")[1]
    assert said.index("Unpaused") < said.index("their wish") < said.index("new <b>disks</b>")
    assert "new &lt;b&gt;disks&lt;/b&gt;" in page.content.decode() and "queue slow" in said and "cron" in said
    timeline = words(client.get(url("change", kept.pk))).split("Timeline")[1].split("Limits")[0]
    assert "queue slow. new <b>disks</b>" in timeline and "Unpaused" in timeline and "acme" not in timeline
    assert "disks" not in words(client.get(url("change", other.pk)))
    event = JobEvent.objects.filter(event="paused").earliest("id")
    answer = client.get(reverse("admin:durable_jobs_jobevent_change", args=[event.pk]))
    assert answer.status_code == 302 and answer.headers["Location"].endswith("?event=paused")
    settings.DURABLE_JOBS = {
        **settings.DURABLE_JOBS,
        "ADMIN_SCOPES": lambda request: [Scope("default", "org")],
    }
    narrow = words(logged_in(make_user("ben", "view_job")).get("/admin/durable_jobs/jobevent/"))
    assert "queue slow" in narrow and "their wish" not in narrow


def test_attempts_say_for_how_long_the_worker_had_the_job(client: Client, registry: None) -> None:
    def step(ctx: Any) -> Done:
        time.sleep(0.05)
        raise TerminalError("no such file")

    made(step, orphan_policy="redrive")
    job = service.start("tests.made").job
    run_slice(job)
    page = words(client.get(url("change", job.pk)))
    attempts = page.split("What went wrong, newest first")[1].split("Limits")[0]
    assert attempts.count("TerminalError") == 1 + attempts.count("raise TerminalError") + attempts.count(
        ".TerminalError:"
    ), attempts
    assert re.search(r"after \d+ (ms|s) ·", attempts)
    lost, now = make_job("expired", kind="tests.made"), timezone.now()
    change(
        lost,
        claimed_at=now - timedelta(minutes=30),
        heartbeat_at=now - timedelta(minutes=20),
        lease_expires_at=now - timedelta(minutes=19),
    )
    assert service.reconcile(wait=False).redriven == 1
    assert "after 10 min ·" in words(client.get(url("change", lost.pk)))


def store_pauses() -> list[Any]:
    return list(Pause.objects.all())


def test_a_pause_needs_a_reason_and_something_to_pause(client: Client) -> None:
    for said in ({"queue": "slow"}, {"reason": "x"}, {"queue": "slow", "everything": "1", "reason": "x"}):
        assert client.post(url("pause"), said).status_code == 200
    assert not store_pauses()
    client.post(url("pause"), {"everything": "1", "reason": "x"})
    assert [(p.queue_name, p.kind, p.tenant_id) for p in store_pauses()] == [("", "", "")]


def test_the_history_is_newest_first_and_filtered(client: Client) -> None:
    job = make_job("pending", kind="tests.made")
    for number in range(3):
        store.add_event(
            job, "redriven", actor=f"user:{number}", operation_id=f"op{number}", reason=f"reason {number}"
        )
    page = words(client.get("/admin/durable_jobs/jobevent/"))
    assert page.index("reason 2") < page.index("reason 1") < page.index("reason 0")
    one = words(client.get("/admin/durable_jobs/jobevent/", {"operation": "op1"}))
    assert "reason 1" in one and "reason 2" not in one
    assert "reason 1" not in words(client.get("/admin/durable_jobs/jobevent/", {"event": "parked"}))
    assert "reason 0" in words(
        client.get("/admin/durable_jobs/jobevent/", {"actor": "user:0", "kind": "tests.made"})
    )


def test_the_history_is_paged_by_key(client: Client) -> None:
    job = make_job("pending")
    for _ in range(230):
        store.add_event(job, "redriven")
    seen, following = 0, "?"
    while following:
        page = client.get(f"/admin/durable_jobs/jobevent/{following}").content.decode()
        seen += page.count('<td class="jobs-nowrap"><time')
        found = re.search(r'rel="next"[^>]*href="([^"]+)"', page)
        following = found[1].replace("&amp;", "&") if found else ""
    assert seen == 230


def test_payload_is_masked_as_the_kind_asks(client: Client, registry: None) -> None:
    made(masked_keys=("token",))
    job = make_job("pending", kind="tests.made", input={"token": "secret-of-the-job", "n": 1})
    page = client.get(url("change", job.pk)).content.decode()
    assert "secret-of-the-job" not in page and "••••" in page and "&quot;n&quot;: 1" in page


def test_a_large_payload_is_cut(client: Client, registry: None) -> None:
    made()
    job = make_job("pending", kind="tests.made", input={"text": "x" * 900_000})
    page = client.get(url("change", job.pk))
    assert len(page.content) < 100_000 and "The first 20,000 of 900,01" in words(page)


def test_nobody_sees_jobs_of_another_scope(registry: None) -> None:
    made()
    mine, theirs = (
        make_job("failed", kind="tests.made"),
        make_job("failed", kind="tests.made", scope=Scope("other")),
    )
    store.add_event(theirs, "redriven", reason="theirs alone")
    limited = logged_in(make_user("ben", *(name for name in ALL if name != "view_all_scopes")))
    assert url("change", mine.pk) in limited.get(url("changelist")).content.decode()
    for page in (
        url("changelist"),
        f"{url('changelist')}?q={theirs.pk}",
        f"{url('changelist')}?scope=other",
        "/admin/durable_jobs/jobevent/",
        url("overview"),
    ):
        said = limited.get(page).content.decode()
        assert url("change", theirs.pk) not in said and "theirs alone" not in said, page
    missing = uuid4()
    for method in ("get", "post"):
        for name, args in (("change", ()), ("live", ()), ("history", ()), ("act", ("redrive",))):
            one = getattr(limited, method)(url(name, theirs.pk, *args))
            none = getattr(limited, method)(url(name, missing, *args))
            assert (one.status_code, one.get("Location")) == (none.status_code, none.get("Location")), name
    assert service.get(theirs.pk, scope=Scope("other")).status == "failed"  # type: ignore[union-attr]


def test_a_job_is_started_from_the_kinds_form(client: Client, operator: User, registry: None) -> None:
    class Form(forms.Form):
        count = forms.IntegerField(min_value=1)

    made(input_form=Form, description="Counts <b>things</b>.")
    assert "Counts <b>things</b>." in words(client.get(url("start")))
    page = client.get(url("start_kind", "tests.made")).content.decode()
    once = re.search(r'name="job-once" value="([^"]+)"', page)
    assert once
    assert (
        client.post(
            url("start_kind", "tests.made"), {"count": 0, "job-scope": "default", "job-once": once[1]}
        ).status_code
        == 200
    )
    assert not Job.objects.exists()
    said = {"count": 3, "job-scope": "acme/north", "job-once": once[1]}
    for text in ("The job was started.", "started before"):
        assert text in words(client.post(url("start_kind", "tests.made"), said, follow=True))
    [job] = Job.objects.all()
    assert (job.input, job.created_by, job.scope) == ({"count": 3}, operator, Scope("acme", "north"))
    assert LogEntry.objects.filter(object_id=str(job.pk)).exists()
    assert client.get(url("start_kind", "tests.none")).status_code == 302


def test_the_demo_starts_an_import_and_refuses_a_second(client: Client) -> None:
    page = client.get(url("start_kind", "demo.airports"))
    once = re.search(r'name="job-once" value="([^"]+)"', page.content.decode())
    assert once
    said = {"limit": "5", "job-scope": "default", "job-once": once[1]}
    assert "The job was started." in words(client.post(url("start_kind", "demo.airports"), said, follow=True))
    twice = words(client.post(url("start_kind", "demo.airports"), said, follow=True))
    assert "started before with the same key" in twice, "a second click"
    other = {**said, "job-once": "another"}
    assert "is held by job" in words(client.post(url("start_kind", "demo.airports"), other, follow=True))
    assert Job.objects.count() == ImportRun.objects.count() == 1


def test_the_subjects_own_page_shows_its_jobs() -> None:
    root = User.objects.create_superuser("root")
    run = ImportRun.objects.create(source="airports")
    job = start_import(run, limit=3)
    client = logged_in(root)
    page = client.get(f"/admin/demo/importrun/{run.pk}/change/").content.decode()
    assert url("change", job.pk) in page and "Waiting" in page
    assert "Waiting" in words(client.get("/admin/demo/importrun/"))
    assert client.get("/admin/demo/importrun/add/").status_code == 200
    assert JobEvent.objects.count() == 0


@pytest.mark.urls("tests.admin.other_site")
def test_another_admin_site_keeps_to_itself(client: Client) -> None:
    """F27: addresses by the site's name."""
    job = make_job("failed", kind="tests.made")
    service.pause(queue="slow", reason="for the test")
    base = "/ops/durable_jobs/job"
    pages = ["/ops/durable_jobs/", f"{base}/overview/", f"{base}/", f"{base}/{job.pk}/change/", f"{base}/{job.pk}/live/",
             f"{base}/{job.pk}/act/cancel/", f"{base}/start/", f"{base}/pause/", "/ops/durable_jobs/jobevent/"]  # fmt: skip
    for page in pages:
        answer = client.get(page)
        assert answer.status_code == 200 and "/admin/durable_jobs" not in answer.content.decode(), page
    answer = client.post(f"{base}/many/", {"act": "cancel", "ids": [str(job.pk)]})
    assert 'href="/admin/' not in answer.content.decode()
    assert (
        client.post(f"{base}/{job.pk}/act/cancel/", {"version": "x"})["Location"]
        == f"{base}/{job.pk}/change/"
    )


def test_names_of_scopes_come_from_the_project(client: Client, settings: Any) -> None:
    """F18: SCOPE_LABELS, asked once for a page."""
    asked: list[Any] = []

    def labels(scopes: list[Scope]) -> dict[Scope, str]:
        asked.append(scopes)
        return {Scope("acme", "north"): "Acme, northern branch"}

    settings.DURABLE_JOBS = {**settings.DURABLE_JOBS, "SCOPE_LABELS": labels}
    for scope in (Scope(), Scope("acme", "north"), Scope("acme", "north")):
        make_job("pending", scope=scope)
    page = words(client.get(url("changelist")))
    assert page.count("Acme, northern branch") == 2 and len(asked) == 1
