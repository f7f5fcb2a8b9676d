"""Small promises of the row that no longer walk states: its columns, its lease, its delivery."""

from __future__ import annotations

import dataclasses
import math
import time
from uuid import uuid4

import pytest
from django.test import override_settings

from durable_jobs import store
from durable_jobs.models import Job
from durable_jobs.store import Lease
from durable_jobs.testing import make_job
from durable_jobs.upkeep import next_tick
from durable_jobs.worker import new_owner

pytestmark = pytest.mark.django_db(transaction=True)

COLUMNS = [
    "id",
    "kind",
    "status",
    "tenant_id",
    "organization_id",
    "created_by_id",
    "cancelled_by_id",
    "created_at",
    "updated_at",
    "input",
    "input_sha256",
    "checkpoint",
    "checkpoint_at",
    "result",
    "meta",
    "idempotency_key",
    "lock_key",
    "subject_type",
    "subject_id",
    "progress_job_id",
    "lease_owner",
    "lease_epoch",
    "lease_expires_at",
    "heartbeat_at",
    "attempts",
    "claimed_at",
    "processed_at_claim",
    "queue_name",
    "queue_job_id",
    "priority",
    "continuation_seq",
    "redrives",
    "next_run_at",
    "pending_since",
    "redrives_since_commit",
    "lost_deliveries",
    "consecutive_failures",
    "interruptions",
    "mirror_attempts",
    "last_committed_at",
    "started_at",
    "finished_at",
    "parked_at",
    "cancel_requested_at",
    "verdict",
    "error_class",
    "error_code",
    "error_type",
    "error_message",
    "domain_mirrored_at",
    "processed_count",
    "total_count",
    "progress",
    "progress_message",
]


def test_a_row_has_every_column_that_the_promises_need() -> None:
    """A5, B7, B8, B9, B10, B11, B12."""
    assert sorted(field.column for field in Job._meta.concrete_fields) == sorted(COLUMNS)


def test_a_fresh_job_has_used_no_limit() -> None:
    """B10, B11, B12, B22."""
    job = make_job("pending")
    for column in ("continuation_seq", "redrives", "redrives_since_commit", "consecutive_failures",
                   "interruptions", "mirror_attempts", "lost_deliveries", "attempts", "lease_epoch",
                   "processed_count"):  # fmt: skip
        assert getattr(job, column) == 0, column
    assert job.total_count is None and job.lease_owner is None and job.pending_since is not None


def test_a_claim_consumes_the_schedule() -> None:
    """B41, T13: so a kill right after the claim is an orphan at once, and no retry that is still to come."""
    waiting = make_job("retrying")
    assert waiting.next_run_at is not None
    claimed = store.claim(waiting.id, waiting.continuation_seq, waiting.redrives, "a:1", -1.0)
    assert isinstance(claimed, Job) and claimed.next_run_at is None and claimed.pending_since is None
    assert [orphan.id for orphan in store.orphans(0.2)] == [waiting.id]


def test_a_delivery_that_was_left_behind_is_refused_for_ever() -> None:
    """B43."""
    job = make_job("running", owner="a:1")
    yielded = store.yield_slice(Lease(job.id, "a:1", job.lease_epoch, 60.0))
    assert yielded is not None and yielded.continuation_seq == 1
    for _ in range(3):
        assert store.claim(job.id, 0, 0, "b:2", 60.0) is None
    assert isinstance(store.claim(job.id, 1, 0, "b:2", 60.0), Job)
    assert store.claim(job.id, 1, 0, "c:3", 60.0) is None


def test_a_delivery_of_a_job_that_is_gone_is_refused() -> None:
    """B161."""
    assert store.claim(uuid4(), 0, 0, "a:1", 60.0) is None


def test_a_lease_carries_no_expiry_of_the_workers() -> None:
    """B45: expiry is the database's to judge."""
    assert [field.name for field in dataclasses.fields(Lease)] == ["job_id", "owner", "epoch", "ttl"]
    with pytest.raises(dataclasses.FrozenInstanceError):
        Lease(uuid4(), "a:1", 1, 60.0).epoch = 2  # type: ignore[misc]


def test_no_two_starts_of_a_process_have_one_owner() -> None:
    """B48."""
    owners = {new_owner() for _ in range(1000)}
    assert len(owners) == 1000 and max(map(len, owners)) <= 200


def test_a_terminal_change_needs_the_epoch_and_not_the_owner() -> None:
    """B87, T7: the failing path has let the lease go before it decides."""
    job = make_job("verdict")
    assert job.lease_owner is None
    assert store.fail_terminal(job.id, job.lease_epoch - 1) is None
    failed = store.fail_terminal(job.id, job.lease_epoch)
    assert failed is not None and failed.status == "failed"


def test_every_worker_ticks_jittered_and_never_where_ticks_are_off() -> None:
    """B165: every 15 s by default, not all processes in one instant; 0 disables."""
    waits = [next_tick() - time.monotonic() for _ in range(50)]
    assert all(11.9 <= wait <= 15 for wait in waits) and len({round(wait, 3) for wait in waits}) > 10
    with override_settings(DURABLE_JOBS={"TICK": 0}):
        assert next_tick() == math.inf
