"""What the scripts act on: a few rows in a known state, and what a row is when moments and ids are left out."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final
from uuid import UUID

from django.db import connection

from durable_jobs.models import Job
from tests.explorer import meeting
from tests.store.rows import GRACE, State, columns_of, execute, insert_raw, letter

Program = Sequence[Callable[[], Any]]

MOMENTS: Final = (
    "checkpoint_at", "pending_since", "started_at", "finished_at", "parked_at", "domain_mirrored_at", "claimed_at",
)  # fmt: skip
LEFT_OUT: Final = (
    "id", "created_at", "updated_at", "heartbeat_at", "last_committed_at", "subject_type", "subject_id",
    "progress_job_id", "cancel_requested_at", "cancelled_by_id", "created_by_id", "idempotency_key", "lock_key",
    "queue_name", "input", "input_sha256", "next_run_at", "lease_expires_at", "meta", "tenant_id",
)  # fmt: skip
"""Moments that say nothing of the outcome, names, and the cancel request, which is told with the mailbox."""
PLAIN: Final = tuple(
    field.column
    for field in Job._meta.concrete_fields
    if field.column not in MOMENTS and field.column not in LEFT_OUT
)
NEVER_BACK: Final = ("lease_epoch", "attempts", "continuation_seq", "redrives")
SECONDS: Final = {
    "postgresql": "extract(epoch FROM {} - clock_timestamp())::float8",
    "sqlite": "(julianday({}) - julianday('now')) * 86400.0",
}
MANY: Final = 400
"""Worlds after which the tables are emptied: rows of earlier ones are in nobody's way, deleting is dear."""
TABLES: Final = (
    "durable_jobs_job", "durable_jobs_event", "durable_jobs_cancelrequest", "durable_jobs_pause", "tests_shipment",
)  # fmt: skip


_worlds = itertools.count(1)


def empty() -> None:
    deletions = [f"DELETE FROM {table}" for table in TABLES]
    with connection.cursor() as cursor:
        for deletion in deletions if connection.vendor == "sqlite" else [";".join(deletions)]:
            cursor.execute(deletion)
        if connection.vendor == "postgresql":
            cursor.execute("VACUUM durable_jobs_job")


@dataclass
class World:
    """The rows of one run, as they were before anybody acted, by names; in a scope of their own."""

    number: int = field(default_factory=lambda: next(_worlds))
    rows: dict[str, dict[str, Any]] = field(default_factory=dict)
    beside: list[tuple[Any, ...]] = field(default_factory=list)
    """Queries for what else is to be compared, with their values."""

    def __post_init__(self) -> None:
        meeting.names.clear()
        if self.number % MANY == 1:
            empty()

    @property
    def tenant(self) -> str:
        return f"tenant {self.number}"

    def add(self, name: str, state: State, **columns: Any) -> dict[str, Any]:
        row = {**columns_of(state), "tenant_id": self.tenant, **columns}
        insert_raw(row)
        if state.request in ("mail", "both"):
            insert_raw(letter(row["id"], "by-mail", 400), table="durable_jobs_cancelrequest")
        self.rows[name] = row
        meeting.names[row["id"]] = name
        return row


@dataclass
class Left:
    """What a run has left behind: each row by its name, new ones together, and what else there is."""

    rows: dict[str, dict[str, Any]]
    new: list[dict[str, Any]]
    rest: list[Any]
    by_mail: set[str] = field(default_factory=set, compare=False)
    """Rows whose cancel was requested in the mailbox alone: they met a lock, which a serial order has not."""


def left_behind(world: World) -> Left:
    """Every row as it now is, without what differs from run to run."""
    seconds = SECONDS[connection.vendor]
    columns = ", ".join(
        [
            "j.id",
            *(f"j.{name}" for name in PLAIN),
            *(f"j.{name} IS NOT NULL" for name in MOMENTS),
            "CASE WHEN j.cancel_requested_at IS NOT NULL THEN 'on the row' WHEN EXISTS"
            " (SELECT 1 FROM durable_jobs_cancelrequest m WHERE m.job_id = j.id) THEN 'by mail' END",
            seconds.format("j.next_run_at"),
            seconds.format("j.lease_expires_at"),
            "j.tenant_id, coalesce(j.organization_id, ''), j.lock_key, j.input, j.input_sha256",
        ]
    )
    known = {row["id"]: name for name, row in world.rows.items()}
    rows: dict[str, dict[str, Any]] = {}
    new: list[dict[str, Any]] = []
    live_keys: list[Any] = []
    letters: set[str] = set()
    for found in execute(f"SELECT {columns} FROM durable_jobs_job j WHERE j.tenant_id = %s", world.tenant):
        job_id = UUID(str(found[0]))
        *plain, due_in, expires_in, tenant, organization, lock_key, text, digest = found[1:]
        told = dict(zip((*PLAIN, *MOMENTS, "requested"), plain, strict=True))
        by_mail = told["requested"] == "by mail"
        for name in (*MOMENTS, "requested"):
            told[name] = bool(told[name])
        told["due"] = None if due_in is None else ("now" if due_in < 5 else "later")
        told["lease"] = None if told["lease_owner"] is None else ("over" if expires_in < -GRACE else "live")
        if told["status"] in ("pending", "running"):
            if lock_key is not None:
                live_keys.append((tenant, organization, lock_key))
            assert (due_in is not None) != (told["lease_owner"] is not None), f"out of sight: {told}"
        if job_id in known:
            before = world.rows[known[job_id]]
            for name in NEVER_BACK:
                assert told[name] >= before[name], f"{name} went back: {told}"
            assert (text, digest) == (before["input"], before["input_sha256"])
            rows[known[job_id]] = told
            letters |= {known[job_id]} if by_mail else set()
        else:
            new.append(told)
    assert len(live_keys) == len(set(live_keys)), "two live jobs with one lock key"
    rest = [execute(query, *values) for query, *values in world.beside]
    # A table gives its rows in whatever order.
    return Left(dict(sorted(rows.items())), sorted(new, key=str), rest, letters)


def differences(is_now: Left, should: Left) -> str:
    """What tells the two apart, in words."""
    told = []
    for name in sorted(is_now.rows.keys() | should.rows.keys()):
        here, there = is_now.rows.get(name, {}), should.rows.get(name, {})
        for column in sorted(here.keys() | there.keys()):
            if here.get(column) != there.get(column):
                told.append(f"{name}.{column} is {here.get(column)!r}, should be {there.get(column)!r}")
    if is_now.new != should.new:
        told.append(f"new rows are {is_now.new}, should be {should.new}")
    if is_now.rest != should.rest:
        told.append(f"beside the jobs there is {is_now.rest}, should be {should.rest}")
    return "; ".join(told)
