"""Rows in every state that the table allows, written and read by raw SQL, past the code under test."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import UUID

from django.contrib.auth import get_user_model
from django.db import connections

from durable_jobs import database, store
from durable_jobs.jsontext import sha256
from durable_jobs.models import CancelRequest, Job, JobEvent, uuid7
from durable_jobs.store import Lease, Orphan, Probe

ME = "worker-me"
CLAIMER = "worker-claimer"
GRACE = 20.0
EPOCH = 3
INPUT = '{"from":"räwé \U0001f980","n":1}'
LIVE = ("held", "pending", "running", "expired", "retry")
ENDED = ("completed", "failed", "parked", "cancelled")

_numbers = itertools.count(1)


def ago(seconds: float) -> datetime:
    """The moment so many seconds ago, with microseconds, as an aware datetime."""
    return datetime.now(UTC) - timedelta(seconds=seconds)


def ahead(seconds: float) -> datetime:
    return ago(-seconds)


@dataclass(frozen=True)
class State:
    """What the statements tell apart: where the row is, its verdict, and where a cancel request is.

    `base` is the status, with four finer words: `expired` is running with an owner whose lease ran out beyond
    the grace, `retry` is running without owner, `parked` is failed and parked, `later` is not due yet.
    """

    base: str
    verdict: str | None = None
    request: str = "none"
    later: bool = False

    def __str__(self) -> str:
        words = [self.base, "later" if self.later else "", self.verdict or ""]
        if self.request != "none":
            words.append(f"cancel on {self.request}")
        return " + ".join(word for word in words if word)


REQUESTS = ("none", "row", "mail", "both")
VERDICTS = (None, "retry_exhausted", "unrecoverable")


def _states() -> Iterator[State]:
    for request in REQUESTS:
        yield State("held", None, request)
        yield State("completed", None, request)
        for verdict in VERDICTS:
            for base in ("pending", "retry"):
                yield State(base, verdict, request)
                yield State(base, verdict, request, later=True)
            for base in ("running", "expired", "failed", "parked"):
                yield State(base, verdict, request)
        if request in ("row", "both"):
            yield State("cancelled", None, request)


STATES = tuple(_states())


def columns_of(state: State) -> dict[str, Any]:
    """A legal row in this state, with a telling value in every column that a statement could change."""
    number = next(_numbers)
    row: dict[str, Any] = {
        "id": uuid7(),
        "kind": "tests.work",
        "status": state.base,
        "tenant_id": "acme",
        "organization_id": "north",
        "created_at": ago(7200),
        "updated_at": ago(3600),
        "input": INPUT,
        "input_sha256": sha256(INPUT),
        "checkpoint": '{"at": 10}',
        "checkpoint_at": ago(1800),
        "idempotency_key": f"key {number}",
        "lock_key": f"lock {number}",
        "subject_type": "auth.group",
        "subject_id": "42",
        "progress_job_id": uuid7(),
        "lease_owner": None,
        "lease_epoch": EPOCH,
        "lease_expires_at": ago(900),
        "heartbeat_at": ago(930),
        "attempts": 2,
        "claimed_at": ago(950),
        "processed_at_claim": 7,
        "queue_name": f"queue {number}",
        "queue_job_id": "message 1",
        "priority": 5,
        "continuation_seq": 4,
        "redrives": 2,
        "next_run_at": None,
        "pending_since": None,
        "redrives_since_commit": 1,
        "lost_deliveries": 5,
        "consecutive_failures": 2,
        "interruptions": 3,
        "mirror_attempts": 1,
        "last_committed_at": ago(1800),
        "started_at": ago(7000),
        "finished_at": None,
        "parked_at": None,
        "cancel_requested_at": None,
        "cancelled_by_id": None,
        "verdict": state.verdict,
        "error_class": "transient",
        "error_code": "earlier",
        "error_type": "builtins.TimeoutError",
        "error_message": "an earlier failure",
        "domain_mirrored_at": None,
        "processed_count": 10,
        "total_count": 20,
        "progress": 12.5,
        "progress_message": "halfway",
    }
    due = ahead(600) if state.later else ago(60)
    match state.base:
        case "held":
            row.update(lease_epoch=0, attempts=0, started_at=None, lease_expires_at=None)
        case "pending":
            row.update(pending_since=ago(800), next_run_at=due)
        case "running":
            row.update(lease_owner=ME, lease_expires_at=ahead(120))
        case "expired":
            row.update(status="running", lease_owner=ME)
        case "retry":
            row.update(status="running", next_run_at=due)
        case "completed":
            row.update(error_class=None, error_code=None, error_type=None, error_message=None)
        case "parked":
            row.update(status="failed", parked_at=ago(890))
    if state.base in ENDED:
        row.update(finished_at=ago(890), domain_mirrored_at=ago(890))
    if state.request in ("row", "both"):
        row.update(cancel_requested_at=ago(500), cancelled_by_id=user("on-row"))
    return row


def make(state: State | str, **changes: Any) -> UUID:
    """Insert a row in this state, and its letters in the mailbox; answer its id."""
    state = State(state) if isinstance(state, str) else state
    return make_all([state], **changes)[state]


def make_all(states: Sequence[State], **changes: Any) -> dict[State, UUID]:
    """One row for each state."""
    rows = {state: {**columns_of(state), **changes} for state in states}
    insert_raw(*rows.values())
    letters = []
    for state, row in rows.items():
        if state.request in ("mail", "both"):
            letters += [letter(row["id"], "by-mail", 400), letter(row["id"], "by-later-mail", 300)]
    if letters:
        insert_raw(*letters, table="durable_jobs_cancelrequest")
    return {state: row["id"] for state, row in rows.items()}


def letter(job_id: UUID, name: str, seconds_ago: float) -> dict[str, Any]:
    """A cancel request for the mailbox, as if the row had been locked."""
    return {
        "job_id": job_id, "requested_at": ago(seconds_ago), "actor": name, "actor_user_id": user(name),
        "reason": "",
    }  # fmt: skip


def post_letter(job_id: UUID, name: str = "by-mail", seconds_ago: float = 400) -> None:
    """Put one such request into the mailbox."""
    insert_raw(letter(job_id, name, seconds_ago), table="durable_jobs_cancelrequest")


def insert_raw(*rows: Mapping[str, Any], table: str = "durable_jobs_job") -> None:
    """INSERT exactly these columns."""
    names = ", ".join(f'"{name}"' for name in rows[0])
    marks = f"({', '.join(['%s'] * len(rows[0]))})"
    values = [value for row in rows for value in row.values()]
    execute(f"INSERT INTO {table} ({names}) VALUES {', '.join([marks] * len(rows))}", *values)


def execute(sql: str, *values: Any) -> list[tuple[Any, ...]]:
    """Run raw SQL with `%s` marks on the jobs' alias; all its rows."""
    connection = connections[database.alias()]
    with connection.cursor() as cursor:
        cursor.execute(sql, [_sent(value) for value in values])
        return cursor.fetchall() if cursor.description else []


def _sent(value: Any) -> Any:
    connection = connections[database.alias()]
    if isinstance(value, datetime):
        return connection.ops.adapt_datetimefield_value(value)
    if isinstance(value, UUID) and not connection.features.has_native_uuid_field:
        return value.hex
    return value


users: dict[str, int] = {}
"""The keys of the users of this test; each test begins with none."""


def user(name: str) -> int:
    """The key of a user of this name, made when it is missing."""
    if name not in users:
        users[name] = get_user_model().objects.get_or_create(username=name)[0].pk
    return users[name]


def images(ids: Collection[UUID]) -> dict[UUID, dict[str, Any]]:
    """Rows as the model reads them, by id and column."""
    jobs = Job._base_manager.using(database.alias()).filter(pk__in=ids)
    return {job.pk: as_columns(job) for job in jobs}


def image(job_id: UUID) -> dict[str, Any]:
    """The row as the model reads it, by column."""
    job = Job._base_manager.using(database.alias()).get(pk=job_id)
    return as_columns(job)


def as_columns(job: Job) -> dict[str, Any]:
    return {field.column: getattr(job, field.attname) for field in Job._meta.concrete_fields}


def stored() -> dict[UUID, list[tuple[Any, ...]]]:
    """Every value of every job, with its letters and events, as the driver gives them."""
    # SQLite's driver turns texts into moments, and two texts can be one moment: quoted, they are what they are.
    value = 'quote("{}")' if connections[database.alias()].vendor == "sqlite" else '"{}"'
    found: dict[UUID, list[tuple[Any, ...]]] = {}
    for model, key in [(Job, "id"), (CancelRequest, "job_id"), (JobEvent, "job_id")]:
        values = ", ".join(value.format(field.column) for field in model._meta.concrete_fields)
        table = f"{model._meta.db_table} WHERE {key} IS NOT NULL"
        for job_id, *row in execute(f"SELECT {key}, {values} FROM {table} ORDER BY id"):
            found.setdefault(UUID(str(job_id)), []).append((key, *row))
    return found


def letters() -> dict[UUID, list[tuple[Any, ...]]]:
    """The whole mailbox, by job."""
    found: dict[UUID, list[tuple[Any, ...]]] = {}
    for job_id, *row in execute("SELECT job_id, m.* FROM durable_jobs_cancelrequest m ORDER BY id"):
        found.setdefault(UUID(str(job_id)), []).append(tuple(row))
    return found


def state_of(row: Mapping[str, Any], mailed: bool) -> State:
    """Which of the states a row (by column) is in."""
    base = row["status"]
    if base == "running" and row["lease_owner"] is None:
        base = "retry"
    elif base == "running" and row["lease_expires_at"] < ago(GRACE):
        base = "expired"
    elif base == "failed" and row["parked_at"] is not None:
        base = "parked"
    on_row = row["cancel_requested_at"] is not None
    request = {(False, False): "none", (True, False): "row", (False, True): "mail"}.get(
        (on_row, mailed), "both"
    )
    later = row["next_run_at"] is not None and row["next_run_at"] > ahead(0)
    return State(base, row["verdict"], request, later)


def lease_on(row: UUID | Mapping[str, Any], ttl: float = 30.0) -> Lease:
    """The lease that the row carries (without owner: the one that ME would think to have)."""
    row = image(row) if isinstance(row, UUID) else row
    return Lease(row["id"], row["lease_owner"] or ME, row["lease_epoch"], ttl)


def orphan_on(row: UUID | Mapping[str, Any]) -> Orphan:
    """What the reconciler would have seen of this row."""
    row = image(row) if isinstance(row, UUID) else row
    return Orphan(
        id=row["id"],
        kind=row["kind"],
        tenant=row["tenant_id"],
        organization=row["organization_id"],
        owner=row["lease_owner"] or ME,
        epoch=row["lease_epoch"],
        expires_at=row["lease_expires_at"] or ago(900),
        cancel=False,
        verdict=row["verdict"],
        redrives_since_commit=row["redrives_since_commit"],
        overdue=900.0,
    )


def probe_for(row: UUID | Mapping[str, Any], ttl: float = 30.0) -> Probe:
    row = image(row) if isinstance(row, UUID) else row
    return Probe(row["queue_name"], row["kind"], row["priority"], None, ttl)


def claim(job_id: UUID, owner: str = CLAIMER, ttl: float = 30.0) -> Any:
    """Claim with the identity that the row has now."""
    row = image(job_id)
    return store.claim(job_id, row["continuation_seq"], row["redrives"], owner, ttl)
