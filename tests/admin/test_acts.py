"""Acts on one job and on many: what changes, what is skipped and said, and what must not happen."""

from __future__ import annotations

import re
from collections.abc import Iterator
from datetime import timedelta
from itertools import pairwise
from typing import Any

import pytest
from django.contrib.admin.models import LogEntry
from django.contrib.auth.models import Group, User
from django.db import connection
from django.test import Client
from django.utils import timezone

from durable_jobs import service, store
from durable_jobs.admin import acts
from durable_jobs.kinds import StatusMirror
from durable_jobs.models import Job, JobEvent, Status
from durable_jobs.testing import make_job
from tests.admin.conftest import ALL, confirm, logged_in, make_user, token, url, version, words
from tests.slices import change, events, made, row

pytestmark = pytest.mark.django_db


def many(client: Client, act: str, jobs: list[Job], query: str = "", **said: Any) -> Any:
    """Ask about the ticked jobs."""
    return client.post(f"{url('many')}{query}", {"act": act, "ids": [str(job.pk) for job in jobs], **said})


def carry_out(client: Client, asked: Any, **said: Any) -> Any:
    """Say yes, and go on until it is done."""
    answer = client.post(url("bulk"), {"token": token(asked), "reason": "", **said}, follow=True)
    while "data-jobs-continue" in answer.content.decode():
        answer = client.post(url("bulk"), {"token": token(answer)}, follow=True)
    return answer


def redriven(job: Job) -> int:
    return events(job).count("redriven")


# --- one ------------------------------------------------------------------------------------------------


def test_a_redrive_runs_the_hook_and_is_logged(client: Client, registry: None, operator: User) -> None:
    """B183"""
    group = Group.objects.create(name="failed")
    mirrored()
    job = make_job("failed", kind="tests.mirrored", subject_type="auth.group", subject_id=str(group.pk))
    assert "waits for a worker" in words(confirm(client, job, "redrive", reason="the network is back"))
    group.refresh_from_db()
    assert (row(job).status, group.name) == ("pending", "redriven")
    [entry] = LogEntry.objects.filter(object_id=str(job.pk))
    assert entry.user == operator and "the network is back" in entry.change_message
    [event] = JobEvent.objects.filter(job_id=job.pk, event="redriven")
    assert event.actor_id == str(operator.pk) and event.reason == "the network is back"


def mirrored(**attributes: Any) -> Any:
    mirror = StatusMirror(
        "auth.Group", field="name", open=("open", "redriven"), redriven="redriven", completed="done",
        failed="failed", cancelled="cancelled",
    )  # fmt: skip
    return made(name="tests.mirrored", mirror=mirror, **attributes)


def test_a_stale_page_does_nothing(client: Client, registry: None) -> None:
    """C035"""
    made()
    job = make_job("failed", kind="tests.made")
    shown = version(client, job, "redrive")
    confirm(client, job, "redrive")
    answer = client.post(url("act", job.pk, "redrive"), {"version": shown}, follow=True)
    assert "The job has changed" in words(answer) and "Nothing was done" in words(answer)
    assert redriven(job) == 1 and row(job).status == "pending"


def test_a_cancel_meant_for_a_failed_job_does_not_end_its_next_run(client: Client, registry: None) -> None:
    """C035"""
    made()
    job = make_job("pending", kind="tests.made")
    shown = version(client, job, "cancel")
    change(job, redrives=1)
    assert "The job has changed" in words(
        client.post(url("act", job.pk, "cancel"), {"version": shown}, follow=True)
    )
    assert row(job).status == "pending"


def test_a_hook_that_fails_is_a_message(client: Client, registry: None) -> None:
    made(on_transition=lambda self, job: 1 / 0, on_redrive=lambda self, job: 1 / 0)
    job = make_job("failed", kind="tests.made")
    answer = confirm(client, job, "redrive")
    assert answer.status_code == 200 and "ZeroDivisionError" in words(answer)
    assert row(job).status == "failed" and "mirror_failed" in events(job)
    waiting = make_job("pending", kind="tests.made")
    assert "a hook failed" in words(confirm(client, waiting, "cancel"))
    assert row(waiting).status == "pending"


def test_a_forced_redrive_needs_its_permission_and_a_reason(registry: None) -> None:
    made()
    job = make_job("failed", kind="tests.made")
    change(job, verdict="unrecoverable")
    operating = logged_in(make_user("ben", *(name for name in ALL if name != "force_redrive_job")))
    assert "Force a redrive You lack the permission" in words(operating.get(url("change", job.pk)))
    assert operating.post(url("act", job.pk, "force"), {"version": "x", "reason": "y"}).status_code == 403
    forcing = logged_in(make_user("cleo", *ALL))
    assert "expected to fail again" in words(forcing.get(url("act", job.pk, "redrive")))
    assert "required" in words(confirm(forcing, job, "force"))
    assert row(job).status == "failed"
    confirm(forcing, job, "force", reason="repaired by hand")
    assert row(job).status == "pending"


def test_settling_needs_a_reason_and_says_that_no_hook_ran(client: Client, registry: None) -> None:
    made(on_transition=lambda self, job: 1 / 0, on_redrive=lambda self, job: 1)
    job = make_job("pending", kind="tests.made")
    change(job, mirror_attempts=3)
    assert "hooks did not run" in words(confirm(client, job, "settle", reason="the row is gone"))
    assert row(job).status == "failed" and events(job) == ["settled_without_hooks"]


def test_a_kind_may_ask_for_permissions_of_its_own(registry: None, client: Client) -> None:
    made(required_permissions=("auth.change_user",))
    job = make_job("failed", kind="tests.made")
    assert "You lack a permission" in words(client.get(url("act", job.pk, "redrive")))
    client.post(url("act", job.pk, "redrive"), {"version": acts.REDRIVE.version(job)})
    asked = many(client, "redrive", [job])
    assert "forbidden" in words(asked)
    assert "skipped 1 (forbidden 1)" in words(carry_out(client, asked))
    assert row(job).status == "failed"
    assert "tests.made: you lack" in words(
        client.post(f"{url('many')}?phase=failed", {"act": "redrive", "all": "1"})
    )


# --- many -----------------------------------------------------------------------------------------------


def test_a_mixed_selection_is_told_apart(client: Client, registry: None) -> None:
    """C042: five failed, two completed, one running, one gone."""
    made()
    failed = [make_job("failed", kind="tests.made") for _ in range(5)]
    others = [make_job("completed", kind="tests.made") for _ in range(2)] + [
        make_job("running", kind="tests.made")
    ]
    gone = make_job("failed", kind="tests.made")
    asked = many(client, "redrive", [*failed, *others, gone])
    assert "3 jobs · not_redrivable" in words(asked)
    Job._base_manager.filter(pk=gone.pk).delete()
    said = words(carry_out(client, asked))
    assert "changed 5 of 9 jobs, skipped 3 (not_redrivable 3)" in said
    assert [row(job).status for job in others] == ["completed", "completed", "running"]
    assert LogEntry.objects.count() == 5


def test_a_mixed_selection_is_cancelled(client: Client, registry: None) -> None:
    made()
    live = [make_job(state, kind="tests.made") for state in ("pending", "retrying", "running", "held")]
    ended = [make_job(state, kind="tests.made") for state in ("completed", "failed")]
    said = words(carry_out(client, many(client, "cancel", [*live, *ended]), reason="wrong customer"))
    assert "changed 4 of 6 jobs, skipped 2 (not_cancellable 2)" in said
    assert [row(job).status for job in live] == ["cancelled", "cancelled", "running", "cancelled"]
    assert set(JobEvent.objects.filter(event="cancel_requested").values_list("reason", flat=True)) == {
        "wrong customer"
    }


def failing_third(names: list[str]) -> Iterator[Any]:
    def on_redrive(self: Any, job: Job) -> int:
        if job.subject_id == names[2]:
            raise RuntimeError("the third one")
        return Group.objects.filter(pk=job.subject_id).update(name=f"redriven {job.subject_id}")

    yield made(on_transition=lambda self, job: 1, on_redrive=on_redrive)


@pytest.mark.parametrize("atomic", [False, True])
@pytest.mark.django_db(transaction=True)
def test_a_hook_that_raises_on_the_third_of_five(registry: None, atomic: bool) -> None:
    """Four jobs and their rows are changed; one is named, and neither it nor its row has changed."""
    client = logged_in(make_user("anna", *ALL))
    groups = [Group.objects.create(name=f"failed {number}") for number in range(5)]
    next(failing_third([str(group.pk) for group in groups]))
    jobs = [
        make_job("failed", kind="tests.made", subject_type="auth.group", subject_id=str(group.pk))
        for group in groups
    ]
    before = connection.settings_dict["ATOMIC_REQUESTS"]
    connection.settings_dict["ATOMIC_REQUESTS"] = atomic
    try:
        answer = carry_out(client, many(client, "redrive", jobs))
    finally:
        connection.settings_dict["ATOMIC_REQUESTS"] = before
    said = words(answer)
    assert "changed 4 of 5 jobs, skipped 1 (hook_failed 1)" in said
    assert f"{jobs[2].pk}: " in said and "the third one" in said
    assert [row(job).status for job in jobs] == ["pending", "pending", "failed", "pending", "pending"]
    for number, group in enumerate(groups):
        group.refresh_from_db()
        assert group.name.startswith("failed" if number == 2 else "redriven")
    assert row(jobs[2]).mirror_attempts == 1 and "mirror_failed" in events(jobs[2])


def test_all_that_match_are_taken_in_parts(
    client: Client, registry: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """C088, with parts of ten."""
    monkeypatch.setattr(acts, "JOBS_A_REQUEST", 10)
    made()
    jobs = [make_job("failed", kind="tests.made") for _ in range(25)]
    other = make_job("failed", kind="tests.other")
    asked = client.post(f"{url('many')}?kind=tests.made&phase=human", {"act": "redrive", "all": "1"})
    assert "Redrive (run again): 25 jobs" in words(asked)
    first = client.post(
        f"{url('bulk')}?kind=tests.made", {"token": token(asked), "reason": "outage", "spread_minutes": "10"}
    )
    assert "changed 10 of 25" in words(first)
    # The browser dies here with the answer; the page before is still there, and pressing again goes on.
    again = client.post(
        f"{url('bulk')}?kind=tests.made", {"token": token(asked), "reason": "outage", "spread_minutes": "10"}
    )
    assert "changed 20 of 25" in words(again)
    last = client.post(f"{url('bulk')}?kind=tests.made", {"token": token(again)}, follow=True)
    assert "changed 25 of 25" in words(last) and last.request["QUERY_STRING"] == "kind=tests.made"
    assert {redriven(job) for job in jobs} == {1} and row(other).status == "failed"
    assert JobEvent.objects.values("operation_id").distinct().count() == 1


def test_what_fails_again_is_not_taken_twice(
    client: Client, registry: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(acts, "JOBS_A_REQUEST", 2)
    made()
    jobs = [make_job("failed", kind="tests.made") for _ in range(4)]
    asked = client.post(f"{url('many')}?phase=failed", {"act": "redrive", "all": "1"})
    client.post(url("bulk"), {"token": token(asked), "reason": ""})
    later = timezone.now() + timedelta(seconds=1)
    change(
        jobs[0],
        status="failed",
        finished_at=later,
        pending_since=None,
        next_run_at=None,
        error_class="terminal",
    )
    client.post(url("bulk"), {"token": token(asked), "reason": ""}, follow=True)
    assert [redriven(job) for job in jobs] == [1, 1, 1, 1]


def test_spread_jobs_come_due_one_after_the_other(client: Client, registry: None) -> None:
    made()
    jobs = [make_job("failed", kind="tests.made") for _ in range(5)]
    asked = client.post(f"{url('many')}?phase=failed", {"act": "redrive", "all": "1"})
    carry_out(client, asked, spread_minutes="50")
    due = [row(job).next_run_at for job in jobs]
    steps = [(after - before).total_seconds() for before, after in pairwise(due)]
    assert all(595 < step < 605 for step in steps), steps


def test_a_confirmation_holds_for_its_own_user_and_unchanged(client: Client, registry: None) -> None:
    made()
    job = make_job("failed", kind="tests.made")
    signed = token(many(client, "redrive", [job]))
    other = logged_in(make_user("ben", *ALL))
    for who, text in ((other, signed), (client, signed[:-2]), (client, ""), (client, "x:y:z")):
        answer = who.post(url("bulk"), {"token": text, "act": "redrive", "reason": ""}, follow=True)
        assert "does not hold any more" in words(answer)
    assert row(job).status == "failed"
    client.user = None  # type: ignore[attr-defined]
    User.objects.get(username="anna").user_permissions.clear()
    assert client.post(url("bulk"), {"token": signed, "act": "redrive"}).status_code == 403
    assert row(job).status == "failed"


def test_nothing_ticked_is_said(client: Client) -> None:
    assert "Tick the jobs" in words(client.post(url("many"), {"act": "cancel"}, follow=True))
    assert "Tick the jobs" in words(client.post(url("many"), {"act": "cancel", "ids": ["x"]}, follow=True))
    assert client.post(url("many"), {"act": "settle", "ids": ["x"]}).status_code == 403
    assert client.post(url("many"), {"act": "delete_selected", "ids": ["x"]}).status_code == 403


def test_nothing_is_deleted_here(client: Client) -> None:
    """C086"""
    root = logged_in(User.objects.create_superuser("root"))
    job = make_job("running")
    assert "Delete" not in words(root.get(url("changelist"))) + words(root.get(url("change", job.pk)))
    assert root.post(url("delete", job.pk), {"post": "yes"}).status_code == 403
    assert (
        root.post(
            url("changelist"), {"action": "delete_selected", "_selected_action": [str(job.pk)]}
        ).status_code
        == 405
    )
    assert root.post(url("change", job.pk), {"status": "failed"}).status_code == 405
    assert root.get(url("add")).status_code == 403
    assert row(job).status == Status.RUNNING


HOSTILE = "<script>alert(1)</script><img src=x onerror=alert(2)>\"'&amp;{{ 7*7 }}"


def test_hostile_values_stay_text(client: Client, registry: None) -> None:
    made(name=HOSTILE[:150], description=HOSTILE, operator_note=HOSTILE, allow_restart=True)
    job = make_job(
        "failed", kind=HOSTILE[:150], input={HOSTILE: HOSTILE}, lock_key=HOSTILE, idempotency_key=HOSTILE,
        subject_type="auth.group", subject_id=HOSTILE,
    )  # fmt: skip
    change(
        job, error_type=f"a.{HOSTILE}", error_code=HOSTILE, error_message=HOSTILE, queue_name=HOSTILE, meta={"m": HOSTILE},
        tenant_id=HOSTILE[:60], progress_message=HOSTILE, checkpoint_text=None,
    )  # fmt: skip
    running = make_job("running", kind=HOSTILE[:150], owner=HOSTILE)
    change(
        running,
        queue_name=HOSTILE,
        progress_message=HOSTILE,
        lease_expires_at=timezone.now() - timedelta(hours=1),
    )
    service.pause(queue=HOSTILE, reason=HOSTILE, actor=HOSTILE)
    store.add_event(
        row(job), "failed", owner=HOSTILE, actor=HOSTILE, reason=HOSTILE, operation_id=HOSTILE[:60], code=HOSTILE,
        error_type=HOSTILE, message=HOSTILE, traceback=HOSTILE,
    )  # fmt: skip
    pages = [
        url("overview"), url("changelist"), f"{url('changelist')}?q={HOSTILE}&kind={HOSTILE}", url("change", job.pk),
        url("change", running.pk), url("live", running.pk), url("act", job.pk, "redrive"), url("start"), url("pause"),
        "/admin/durable_jobs/jobevent/", "/admin/durable_jobs/pause/",
    ]  # fmt: skip
    for page in pages:
        check_text(client.get(page), page)
    check_text(many(client, "redrive", [job, running], f"?kind={HOSTILE}"), "many")
    check_text(confirm(client, job, "redrive", reason=HOSTILE), "done")
    check_text(client.get(url("history", job.pk)), "history")


def check_text(answer: Any, page: str) -> None:
    assert answer.status_code == 200, page
    said = answer.content.decode()
    assert "&lt;script&gt;alert(1)" in said or page in (url("start"), "done"), page
    assert "alert(1)</script>" not in said and "<img src=x" not in said, page
    assert not re.search(r"\son\w+=", re.sub(r"&lt;.*?&gt;", "", said)), page
    assert not re.search(r"<[^>]+\sstyle=", said), page
    assert not re.search(r"<script(?![^>]*\bsrc=)(?![^>]*application/json)[^>]*>", said), page
