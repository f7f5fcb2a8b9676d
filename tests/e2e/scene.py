"""A site in the middle of its day: what the pictures and the accessibility check look at."""

from __future__ import annotations

import json
from datetime import timedelta
from typing import Any

from django.contrib.auth.models import User
from django.utils import timezone

from durable_jobs import service, store
from durable_jobs.jsontext import sha256
from durable_jobs.models import Job, JobEvent, Pause, WorkerProcess, uuid7
from project.demo.jobs import start_import
from project.demo.models import ImportRun
from tests.admin.conftest import url

TRACEBACK = """Traceback (most recent call last):
  File "/srv/shop/imports/jobs.py", line 48, in process
    page = client.fetch(cursor)
  File "/srv/shop/partners/client.py", line 112, in fetch
    raise ConnectionError("partner.example did not answer within 10 s")
ConnectionError: partner.example did not answer within 10 s
"""


def make(status: str, kind: str, queue: str, age: float, **columns: Any) -> Job:
    """A job of a kind, so many seconds old."""
    now = timezone.now()
    at = now - timedelta(seconds=age)
    text = json.dumps({"customer": 4711, "since": "2026-11-01"}, sort_keys=True)
    row: dict[str, Any] = {
        "id": uuid7(), "kind": kind, "status": status, "queue_name": queue, "created_at": at, "updated_at": at,
        "input_text": text, "input_sha256": sha256(text),
    }  # fmt: skip
    if status != "pending":
        row |= {"started_at": at + timedelta(seconds=4), "attempts": 3, "lease_epoch": 3}
    if status == "pending":
        row |= {"pending_since": at, "next_run_at": at}
    if status in ("completed", "failed", "cancelled"):
        row["finished_at"] = at + timedelta(seconds=columns.pop("took", 95))
    if status == "failed":
        row |= {"error_class": "transient", "error_type": "requests.exceptions.ConnectionError",
                "error_message": "partner.example did not answer within 10 s", "consecutive_failures": 5}  # fmt: skip
    if status == "cancelled":
        row["cancel_requested_at"] = at + timedelta(seconds=60)
    if status == "running":
        row |= {"lease_owner": "web3:1201:1", "lease_expires_at": now + timedelta(seconds=56), "heartbeat_at": now,
                "claimed_at": at + timedelta(seconds=4), "last_committed_at": now}  # fmt: skip
    row |= columns
    Job._base_manager.bulk_create([Job(**row)])
    return Job.objects.get(pk=row["id"])


def build(anna: User) -> dict[str, str]:
    """Fill the tables; the address of each page by its name."""
    now = timezone.now()
    WorkerProcess._base_manager.bulk_create(
        [
            WorkerProcess(owner="web3:1201", host="web3", pid=1201, queues='["imports","mail"]', kinds="[]", concurrency=4,
                          release="2026.48.1", started_at=now - timedelta(hours=6), beat_at=now - timedelta(seconds=3)),
            WorkerProcess(owner="web4:977", host="web4", pid=977, queues="[]", kinds="[]", concurrency=4,
                          release="2026.48.0", started_at=now - timedelta(days=2), beat_at=now - timedelta(minutes=12)),
        ]
    )  # fmt: skip
    for number in range(60):
        age = 60 * (number % 55) + 130
        make("completed", ("shop.invoice", "shop.sync", "mail.newsletter")[number % 3], "imports", age, took=40 + number % 50,
             processed_count=500, total_count=500)  # fmt: skip
    for number in range(14):
        make(
            "failed",
            "shop.sync",
            "imports",
            3600 * (number * number % 20) + 300,
            processed_count=40 * number,
            total_count=900,
        )
    for number in range(3):
        make("failed", "mail.newsletter", "mail", 7200 * number + 500, error_type="smtplib.SMTPRecipientsRefused",
             error_message="550 no such user", error_class="terminal")  # fmt: skip
    make("failed", "shop.invoice", "imports", 900, error_type="", error_code="too_many_skipped", error_class="terminal",
         parked_at=now, error_message="More than 100 items of this pass failed.")  # fmt: skip
    make("cancelled", "shop.sync", "imports", 1500, processed_count=410, total_count=900)
    make("pending", "mail.newsletter", "mail", 40)
    make("pending", "shop.report", "reports", 700)
    stuck = make("running", "shop.sync", "imports", 1900, processed_count=120, total_count=900, lease_owner="web4:977:2",
                 lease_expires_at=now - timedelta(minutes=11), heartbeat_at=now - timedelta(minutes=12),
                 last_committed_at=now - timedelta(minutes=12))  # fmt: skip
    run = ImportRun.objects.create(source="airports", created_by=anna)
    running = start_import(run)
    at = now - timedelta(minutes=4)
    Job._base_manager.filter(pk=running.pk).update(
        status="running", next_run_at=None, pending_since=None, created_at=at - timedelta(seconds=20), started_at=at,
        claimed_at=at, lease_owner="web3:1201:2", lease_epoch=2, attempts=2, lease_expires_at=now + timedelta(seconds=50),
        heartbeat_at=now, last_committed_at=now, processed_count=17_420, total_count=28_298, checkpoint_text='{"icao":"LFPG"}',
        checkpoint_at=now, progress_message="batch 174 of 283",
    )  # fmt: skip
    ImportRun.objects.filter(pk=run.pk).update(status="running", rows_done=17_420)
    old = ImportRun.objects.create(source="airports", created_by=anna, status="failed")
    failed = make("failed", "demo.airports", "imports", 5400, took=4200, subject_type="demo.importrun", subject_id=str(old.pk),
                  created_by=anna, processed_count=41_200, total_count=90_000, checkpoint_text='{"icao":"KJFK"}', checkpoint_at=now)  # fmt: skip
    store.add_event(
        failed, "redriven", actor="user:1 anna", reason="the partner is back", operation_id="5d1c0f"
    )
    for seconds in (12.4, 251.0, 3_900.0):
        store.add_event(
            failed, "slice_failed", owner="web3:1201:1", error_type="requests.exceptions.ConnectionError",
            message="partner.example did not answer within 10 s", traceback=TRACEBACK, code="",
            data={"seconds": seconds},
        )  # fmt: skip
    store.add_event(
        failed, "item_skipped", message="ValueError: latitude 91.2 is out of range", code="bad_row"
    )
    store.add_event(stuck, "orphaned", owner="web4:977:2", actor="reconciler:web3")
    events = list(JobEvent.objects.order_by("id"))
    for number, event in enumerate(events):
        moment = now - timedelta(minutes=60 - 8 * number)
        JobEvent._base_manager.filter(pk=event.pk).update(created_at=moment, release="2026.48.1")
    service.pause(queue="reports", reason="Migration of the report tables, back at 14:00", actor=anna)
    list_ = url("changelist")
    return {
        "overview": url("overview"),
        "jobs": list_,
        "failures": f"{list_}?phase=human&error_type=requests.exceptions.ConnectionError",
        "job-running": url("change", running.pk),
        "job-failed": url("change", failed.pk),
        "job-stuck": url("change", stuck.pk),
        "confirm": url("act", failed.pk, "force"),
        "confirm-cancel": url("act", running.pk, "cancel"),
        "pause": url("pause"),
        "start": url("start"),
        "start-form": url("start_kind", "demo.airports"),
        "history": "/admin/durable_jobs/jobevent/",
        "subject": f"/admin/demo/importrun/{run.pk}/change/",
        "app": "/admin/durable_jobs/",
    }


def others() -> dict[str, str]:
    """The pages besides: those that are Django's own lists, and those that show little."""
    failed = Job.objects.filter(status="failed").latest("id")
    return {
        "unpause": url("unpause", Pause.objects.get().pk),
        "pauses": "/admin/durable_jobs/pause/",
        "workers": "/admin/durable_jobs/workerprocess/",
        "job-history": url("history", failed.pk),
        "pauses in the history": "/admin/durable_jobs/jobevent/?event=paused",
        "nothing found": f"{url('changelist')}?q=nothing-like-it",
        "wrong filter": f"{url('changelist')}?created_from=yesterday",
        "a refused act": url("act", failed.pk, "cancel"),
    }
