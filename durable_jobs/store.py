"""Every statement that writes job rows, and nothing else writes them.

One function per transition; its docstring says from → to, and the WHERE of its statement is the guarantee.
A miss returns None, False or an empty answer, never an error. Each is one round trip, one SQL text per
database, built once. `docs/state_machine.md` draws the chart.

Clocks. The database's only. A WHERE on an index uses the statement's time, in statements that never wait;
a lease is set and compared by the wall clock, after the row's lock was taken.

Locks. A transaction may wait for a job row only as its first lock: the fence and the owner's own
transitions. Everything that takes a job from somebody skips locked rows. So no wait cycle can contain a
job row.
"""

from __future__ import annotations

import enum
import json
import random
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from functools import cache, cached_property, partial
from operator import attrgetter
from typing import Any, Final, NamedTuple
from uuid import UUID

from django.db import IntegrityError, connections
from django.db.backends.base.base import BaseDatabaseWrapper
from django.db.transaction import Atomic

from durable_jobs import database
from durable_jobs.conf import MANUAL_QUEUE, config
from durable_jobs.database import OwnAtomic, Statement
from durable_jobs.exceptions import ErrorFacts
from durable_jobs.kinds import KEEP, Kind, Sentinel
from durable_jobs.models import Job, JobEvent, Pause, Scope, Status


class Answer(enum.Enum):
    """Answers beside a row and None."""

    BUSY = "busy"
    FULL = "full"
    EARLY = "early"


BUSY: Final = Answer.BUSY
"""Somebody holds the row (or its lock key, or counts for its limit) just now: ask again."""
FULL: Final = Answer.FULL
"""As many jobs run as may: it waits where it is; ask again later."""
EARLY: Final = Answer.EARLY
"""The row is not due yet: ask again then."""


@dataclass(frozen=True)
class Lease:
    """The right to write a job: its owner (one worker start) and epoch (the fence). `ttl` in seconds.

    It carries no expiry: that is the database's to judge.
    """

    job_id: UUID
    owner: str
    epoch: int
    ttl: float


@dataclass(frozen=True)
class Counts:
    """Progress to lay over the row: None or KEEP leaves a column alone, `total=None` means unknown."""

    processed: int | None = None
    total: int | Sentinel | None = KEEP
    message: str | None = None


NO_COUNTS: Final = Counts()


@dataclass(slots=True)
class NewJob:
    """What `insert` writes: texts are exact, `run_at` (aware) wins over `delay` (seconds)."""

    id: UUID
    kind: str
    status: str
    tenant: str
    organization: str | None
    queue: str
    input: str | None
    input_sha256: str | None
    created_by: Any = None
    meta: str | None = None
    idempotency_key: str | None = None
    lock_key: str | None = None
    subject_type: str | None = None
    subject_id: str | None = None
    progress_job_id: UUID | None = None
    priority: int = 0
    run_at: datetime | None = None
    delay: float = 0.0


class Route(NamedTuple):
    """A (queue, kind, priority) that has claimable rows; `due_in` seconds until the earliest (≤ 0: now)."""

    queue: str
    kind: str
    priority: int
    due_in: float


class Probe(NamedTuple):
    """Where a claim looks. `floor` skips index entries below it (PostgreSQL: dead ones under an old
    snapshot); `ttl` is the lease in seconds."""

    queue: str
    kind: str
    priority: int
    floor: datetime | None
    ttl: float


class Claimed(NamedTuple):
    job: Job
    run_at: datetime | None


class Limit(NamedTuple):
    """At most `most` running jobs with an owner: of one kind, by all its names, in one scope."""

    names: tuple[str, ...]
    scope: Scope
    most: int


class Beat(NamedTuple):
    """What one beat learned of one lease. Lost means not `mine`, never "not renewed"."""

    renewed: bool
    mine: bool
    cancel: bool
    paused: bool


_RENEWED: Final = Beat(renewed=True, mine=True, cancel=False, paused=False)
_LOST: Final = Beat(renewed=False, mine=False, cancel=False, paused=False)


class Orphan(NamedTuple):
    """What the reconciler decides from: a running row, with owner, whose lease ran out."""

    id: UUID
    kind: str
    tenant: str
    organization: str | None
    owner: str
    epoch: int
    expires_at: datetime
    cancel: bool
    verdict: str | None
    redrives_since_commit: int
    overdue: float
    begun: bool = True
    """False: claimed ahead of its turn, and neither a beat nor a commit has come since."""


class Waiting(NamedTuple):
    """A job that nobody works on and that was asked to end, `asked` seconds ago."""

    id: UUID
    kind: str
    asked: float


# --- texts ----------------------------------------------------------------------------------------------


def _user_type() -> str:
    field: Any = Job._meta.get_field("created_by")
    return str(field.target_field.rel_db_type(connections[database.alias()]))


_TYPES: dict[str, str] = {
    "id": "uuid", "job_id": "uuid", "ids": "uuid[]", "after_id": "uuid", "progress_job_id": "uuid",
    "kind": "text", "status": "text", "tenant": "text", "organization": "text", "queue": "text",
    "input": "text", "input_sha256": "text", "meta": "jsonb", "idempotency_key": "text", "lock_key": "text",
    "subject_type": "text", "subject_id": "text", "priority": "int", "run_at": "timestamptz",
    "delay": "float8", "ttl": "float8", "grace": "float8", "first": "float8", "longest": "float8",
    "owner": "text", "dead_owner": "text", "epoch": "bigint", "epochs": "bigint[]", "ttls": "float8[]",
    "seq": "int", "redrives": "int", "interrupted": "int", "cut_off": "int", "max_failures": "int", "exponential": "boolean",
    "checkpoint": "text", "keep_checkpoint": "boolean", "result": "text",
    "processed": "bigint", "total": "bigint", "keep_total": "boolean", "message": "text",
    "error_class": "text", "code": "text", "error_type": "text", "error_message": "text",
    "parked": "boolean", "mirrored": "boolean", "forced": "boolean", "restart": "boolean",
    "queues": "text[]", "kinds": "text[]", "priorities": "int[]", "floors": "timestamptz[]",
    "probes": "json", "manual": "text", "leases": "json", "known": "uuid[]", "batch": "int",
    "idle": "text", "actor": "text", "actor_id": "text", "reason": "text", "event": "text",
    "operation_id": "text", "traceback": "text", "data": "jsonb", "release": "text", "suspects": "boolean",
    "host": "text", "pid": "int", "concurrency": "int", "queue_job_id": "text", "any": "boolean",
    "percent": "float8", "late": "boolean", "stopped": "boolean", "names": "text[]", "full": "text[]",
    "except_id": "uuid", "lock_name": "text", "cap": "bigint", "created": "timestamptz",
    "failed_before": "timestamptz", "ended_before": "timestamptz", "after_time": "timestamptz",
    "statuses": "text[]", "budget": "bigint", "early": "boolean", "reach": "float8", "counted": "boolean",
    "every": "boolean", "ahead": "boolean", "floor": "timestamptz", "orphanings": "int", "results": "text[]",
}  # fmt: skip


class _Types(dict[str, str]):
    """The user's key has the type of the project's user model, known only once apps are ready."""

    def __missing__(self, name: str) -> str:
        if name in ("user", "created_by"):
            return _user_type()
        raise KeyError(name)


# The table lets only a running job have an owner. With the status named, PostgreSQL's planner may take the index of
# the running jobs for cheaper than the key, and walk all of them and what is left of all that ran, for one row.
_OWNED = "id = :id AND lease_owner = :owner AND lease_epoch = :epoch"
_MAILBOX = "EXISTS (SELECT 1 FROM durable_jobs_cancelrequest m WHERE m.job_id = {job}.id)"


def _snippets(vendor: str) -> Mapping[str, str]:
    return {
        "columns": ", ".join(f'"{field.column}"' for field in Job._meta.concrete_fields),
        "event_columns": ", ".join(f'"{field.column}"' for field in JobEvent._meta.concrete_fields),
        "owned": _OWNED,
        "mailbox": _MAILBOX,
        # Read as a value: in SQLite's RETURNING (3.40) `x IS NOT NULL` over a partial index's column is true.
        "requested": """coalesce({job}.cancel_requested_at,
            (SELECT min(m.requested_at) FROM durable_jobs_cancelrequest m WHERE m.job_id = {job}.id))""",
        "in_scope": "tenant_id = :tenant AND coalesce(organization_id, '') = coalesce(:organization, '')",
        # A request that met a locked row is taken over by the next write that may act on it.
        # Whether there is any mail is asked once a statement, not once a row.
        "fold": """cancel_requested_at = CASE WHEN {job}.cancel_requested_at IS NULL AND {any_mail} THEN
                (SELECT min(m.requested_at) FROM durable_jobs_cancelrequest m WHERE m.job_id = {job}.id)
                ELSE {job}.cancel_requested_at END,
            cancelled_by_id = CASE WHEN {job}.cancel_requested_at IS NULL AND {any_mail} THEN
                (SELECT m.actor_user_id FROM durable_jobs_cancelrequest m WHERE m.job_id = {job}.id
                 ORDER BY m.id LIMIT 1) ELSE {job}.cancelled_by_id END""",
        "counts": """processed_count = coalesce(:processed, processed_count),
            total_count = CASE WHEN :keep_total THEN total_count ELSE :total END,
            progress_message = coalesce(:message, progress_message)""",
        "any_mail": "EXISTS (SELECT 1 FROM durable_jobs_cancelrequest)",
        "any_pause": "EXISTS (SELECT 1 FROM durable_jobs_pause)",
        "unpaused": """(NOT EXISTS (SELECT 1 FROM durable_jobs_pause) OR NOT EXISTS (
            SELECT 1 FROM durable_jobs_pause p WHERE (p.queue_name = '' OR p.queue_name = c.queue_name)
              AND (p.kind = '' OR p.kind = c.kind) AND (p.tenant_id = '' OR p.tenant_id = c.tenant_id)))""",
        # Asked of the route, so that a paused backlog is not walked row by row.
        "open": """NOT EXISTS (SELECT 1 FROM durable_jobs_pause p WHERE p.tenant_id = ''
            AND (p.queue_name = '' OR p.queue_name = {queue}) AND (p.kind = '' OR p.kind = {kind}))""",
        "queue": "g.queue" if vendor == "postgresql" else "json_extract(g.value, '$[0]')",
        "kind": "g.kind" if vendor == "postgresql" else "json_extract(g.value, '$[1]')",
        "wanted": (
            "(:any OR c.queue_name = ANY(:queues)) AND c.kind = ANY(:kinds) AND c.queue_name <> 'manual'"
            if vendor == "postgresql"
            else """(:any OR c.queue_name IN (SELECT value FROM json_each(:queues)))
                AND c.kind IN (SELECT value FROM json_each(:kinds)) AND c.queue_name <> 'manual'"""
        ),
        "by_running": "" if vendor == "postgresql" else "INDEXED BY durable_jobs_running",
        "by_cancelling": "" if vendor == "postgresql" else "INDEXED BY durable_jobs_cancelling",
        # Poison takes its neighbours along: a process that runs one suspect claims no second.
        "fit": "{unpaused} AND (:suspects OR c.redrives_since_commit = 0)",
        # The input is the one that the job was made with. Missing input never is.
        "authentic": (
            "encode(sha256(convert_to(c.input, 'UTF8')), 'hex') = c.input_sha256"
            if vendor == "postgresql"
            else "{hash} = c.input_sha256"
        ),
        # Whatever a database shell has put there: the function takes text alone.
        "hash": "CASE WHEN typeof(c.input) = 'text' THEN SHA256(c.input) END",
        # Work without any input has nothing that could have been changed.
        "sound": (
            "coalesce(encode(sha256(convert_to(c.input, 'UTF8')), 'hex'), '') = coalesce(c.input_sha256, '')"
            if vendor == "postgresql"
            else "coalesce({hash}, '') = coalesce(c.input_sha256, '')"
        ),
        # A lease that is held at this very moment. The row is locked before the clock is read: an UPDATE that
        # waited for somebody who only locked the row does not look at its conditions again.
        "strict": """id = (SELECT id FROM {job} WHERE {owned} {lock})
            AND lease_owner = :owner AND lease_epoch = :epoch AND lease_expires_at > {now}""",
        "countable": "c.lease_epoch < 9223372036854775807 AND c.attempts < 2147483647",
        "over": "c.status = 'running' AND c.lease_owner IS NOT NULL AND c.lease_expires_at <= {now}",
        "scope_key": "length(c.tenant_id) || ':' || c.tenant_id || ':' || coalesce(c.organization_id, '')",
        "paused": """EXISTS (SELECT 1 FROM durable_jobs_pause p
            WHERE (p.queue_name = '' OR p.queue_name = {job}.queue_name)
              AND (p.kind = '' OR p.kind = {job}.kind) AND (p.tenant_id = '' OR p.tenant_id = {job}.tenant_id))""",
        "take": "{took}, heartbeat_at = {now}",
        # Claimed ahead of its turn, so that it does not count as begun until a beat or a commit says so. Once
        # only: what was taken back unbegun is claimed in its turn, or a job that kills its worker is never counted.
        "take_ahead": "{took}, heartbeat_at = CASE WHEN :ahead AND redrives = 0 THEN NULL ELSE {now} END",
        "took": """status = 'running', lease_owner = :owner, lease_epoch = lease_epoch + 1,
            attempts = attempts + 1, claimed_at = {now},
            processed_at_claim = processed_count, started_at = coalesce(started_at, {now}),
            pending_since = NULL, next_run_at = NULL, updated_at = {now}, {fold}""",
        # What was claimed ahead of its turn has no beat yet; what has ended has begun.
        "begun": "heartbeat_at = coalesce(heartbeat_at, {now})",
        # an ordinary expired lease, not none, so that every reader of expiry sees the same thing.
        "let_go": "lease_owner = NULL, lease_expires_at = {now}, updated_at = {now}",
        "end": "{end_unmirrored}, domain_mirrored_at = CASE WHEN :mirrored THEN {now} END",
        "end_unmirrored": """lease_owner = NULL, lease_expires_at = {now}, next_run_at = NULL,
            pending_since = NULL, finished_at = {now}, updated_at = {now}""",
        "cancel": """status = 'cancelled', {end}, verdict = NULL,
            cancel_requested_at = coalesce({job}.cancel_requested_at,
                (SELECT min(m.requested_at) FROM durable_jobs_cancelrequest m WHERE m.job_id = {job}.id), {now}),
            cancelled_by_id = CASE WHEN {job}.cancel_requested_at IS NULL THEN
                (SELECT m.actor_user_id FROM durable_jobs_cancelrequest m WHERE m.job_id = {job}.id
                 ORDER BY m.id LIMIT 1) ELSE {job}.cancelled_by_id END""",
        "orphan": """id = (SELECT c.id FROM {job} c WHERE c.id = :id AND c.status = 'running'
            AND c.lease_owner IS NOT NULL AND c.lease_epoch = :epoch
            AND (c.lease_owner = :dead_owner OR c.lease_expires_at < {before :grace}) {skip_locked})""",
        "overdue": (
            "(extract(epoch FROM clock_timestamp() - lease_expires_at))::float8"
            if vendor == "postgresql"
            else "(julianday('now') - julianday(lease_expires_at)) * 86400.0"
        ),
        "asked": (
            "(extract(epoch FROM clock_timestamp() - cancel_requested_at))::float8"
            if vendor == "postgresql"
            else "(julianday('now') - julianday(cancel_requested_at)) * 86400.0"
        ),
        "sweep": "{job}.id > :after_id AND (:any OR {job}.tenant_id = :tenant)",
        "least": "least" if vendor == "postgresql" else "min",
        "greatest": "greatest" if vendor == "postgresql" else "max",
        "unheard": "{greatest}({job}.next_run_at, {job}.updated_at)",
        "written_ahead": (
            "(extract(epoch FROM c.next_run_at - c.updated_at))::float8"
            if vendor == "postgresql"
            else "(julianday(c.next_run_at) - julianday(c.updated_at)) * 86400.0"
        ),
        # The statement's time: on an index the clock's would be a filter over all that is scheduled.
        "reached": (
            "statement_timestamp() + make_interval(secs => :reach)"
            if vendor == "postgresql"
            else "{after :reach}"
        ),
        # Evaluated once, whatever the plan: as a plain IN a statement once took more rows than its LIMIT.
        "among": "= ANY(ARRAY" if vendor == "postgresql" else "IN",
        "array_end": ")" if vendor == "postgresql" else "",
        "by_ready": "" if vendor == "postgresql" else "INDEXED BY durable_jobs_ready",
    }


def _statement(text: str, sqlite: str | None = None) -> Statement:
    return Statement(text, sqlite, types=_Types(_TYPES), snippets=_snippets)


_INSERT_COLUMNS = """(id, kind, status, tenant_id, organization_id, queue_name, input, input_sha256,
    created_by_id, meta, idempotency_key, lock_key, subject_type, subject_id, progress_job_id, priority,
    created_at, updated_at, next_run_at, pending_since)"""

# One moment for all columns of the row: what is not read back is known.
_INSERT = _statement(
    f"""
    INSERT INTO {{job}} {_INSERT_COLUMNS}
    SELECT :id, :kind, :status, :tenant, :organization, :queue, :input, :input_sha256,
        :user, :meta, :idempotency_key, :lock_key, :subject_type, :subject_id, :progress_job_id, :priority,
        m.now, m.now, CASE WHEN :status = 'pending' THEN coalesce(:run_at, {{after :delay}}) END,
        CASE WHEN :status = 'pending' THEN m.now END
    FROM (SELECT {{now}} AS now) AS m WHERE true
    ON CONFLICT DO NOTHING RETURNING created_at, next_run_at, meta""",
    "SELECT 1",
)

_MANY_NAMES = ("id", "kind", "status", "tenant", "organization", "queue", "input", "input_sha256",
               "created_by", "meta", "idempotency_key", "lock_key", "subject_type", "subject_id",
               "progress_job_id", "priority", "run_at", "delay")  # fmt: skip
_MANY_VALUES = attrgetter(*_MANY_NAMES)


@cache
def _insert_together(apart: tuple[str, ...]) -> Statement:
    """For PostgreSQL: what the rows have in common is sent once, an array for each of the columns in which they differ."""
    types = _Types(_TYPES | {f"each_{name}": "json" for name in apart})
    return Statement(_insert_many_postgresql(apart), "SELECT 1", types=types, snippets=_snippets)


def _insert_many_postgresql(apart: tuple[str, ...]) -> str:
    """A microsecond lies between one row and the next.

    Without it rows of one priority would come due together, and run in any order.
    """
    types = _Types(_TYPES)
    arrays = "".join(f", json_array_elements_text(:each_{name})" for name in apart)
    columns = ", ".join(("id", *apart, "n"))
    values = ", ".join(
        f"r.{name}::{types[name]} AS {name}" if name in apart else f":{name} AS {name}"
        for name in _MANY_NAMES
        if name != "id"
    )
    return f"""
    WITH moment AS MATERIALIZED (SELECT {{now}} AS now),
    made AS (
        INSERT INTO {{job}} {_INSERT_COLUMNS}
        SELECT g.id, g.kind, g.status, g.tenant, g.organization, g.queue, g.input, g.input_sha256,
            g.created_by, g.meta, g.idempotency_key, g.lock_key, g.subject_type,
            g.subject_id, g.progress_job_id, g.priority, g.now, g.now,
            CASE WHEN g.status = 'pending' THEN coalesce(g.run_at, g.now + make_interval(secs => g.delay)) END,
            CASE WHEN g.status = 'pending' THEN g.now END
        FROM (
            SELECT r.n, m.now - (:batch - r.n) * interval '1 microsecond' AS now, r.id, {values}
            FROM ROWS FROM (unnest(:ids){arrays}) WITH ORDINALITY AS r({columns}), moment m
        ) AS g ORDER BY g.n
        ON CONFLICT DO NOTHING RETURNING id, meta
    )
    SELECT (SELECT now FROM moment), count(*), json_agg(id)::text,
        (json_object_agg(id, meta) FILTER (WHERE meta IS NOT NULL))::text
    FROM made"""


_MANY_COLUMNS = {name: name for name in _MANY_NAMES if name not in ("run_at", "delay")} | {
    "tenant": "tenant_id", "organization": "organization_id", "queue": "queue_name", "created_by": "created_by_id",
    "created_at": "created_at", "updated_at": "updated_at", "next_run_at": "next_run_at",
    "pending_since": "pending_since",
}  # fmt: skip


@cache
def _insert_given(names: tuple[str, ...], first_run: str | None) -> Statement:
    """For SQLite, of the columns that have a value, with the row's first run as an expression; None: it is held."""
    values = {_MANY_COLUMNS[name]: f":{name}" for name in names} | {
        "created_at": "m.now",
        "updated_at": "m.now",
    }
    if first_run is not None:
        values |= {"next_run_at": first_run, "pending_since": "m.now"}
    text = f"""
    INSERT INTO {{job}} ({", ".join(values)}) SELECT {", ".join(values.values())}
    FROM (SELECT {{now}} AS now) AS m WHERE true
    ON CONFLICT DO NOTHING RETURNING created_at, next_run_at, meta"""
    return _statement("SELECT 1", text)


@cache
def _insert_each(names: tuple[str, ...]) -> Statement:
    """For SQLite, of the columns that any row has a value for: each that is bound takes its time for each row."""
    columns = ", ".join(_MANY_COLUMNS[name] for name in names)
    values = ", ".join(f":{name}" for name in names)
    text = f"INSERT INTO {{job}} ({columns}) VALUES ({values}) ON CONFLICT DO NOTHING"
    return _statement("SELECT 1", text)


_PENDING = Status.PENDING.value
_BEFORE_MANY = _statement("SELECT {now}, 0", "SELECT {now}, coalesce(max(rowid), 0) FROM {job}")
_ADDED_SINCE = _statement(
    "SELECT id FROM {job} WHERE id = ANY(:ids)",
    "SELECT id FROM {job} WHERE rowid > :rowid AND id IN (SELECT value FROM json_each(:ids))",
)

_BY_ID = _statement("SELECT {columns} FROM {job} WHERE id = :id")
_BY_IDEMPOTENCY_KEY = _statement("""
    SELECT {columns} FROM {job} WHERE idempotency_key = :idempotency_key AND kind = :kind AND {in_scope}""")
_BY_LOCK_KEY = _statement("""
    SELECT {columns} FROM {job} WHERE lock_key = :lock_key AND status IN ('pending', 'running')
        AND {in_scope}""")

_CLAIM = _statement("""
    UPDATE {job} SET {take}, lease_expires_at = {after :ttl}
    WHERE id = (SELECT c.id FROM {job} c WHERE c.id = :id AND c.continuation_seq = :seq
        AND c.redrives = :redrives AND c.next_run_at IS NOT NULL AND (:early OR c.next_run_at <= {now})
        AND {unpaused} {skip_locked})
    RETURNING {columns}""")
_STILL_CLAIMABLE = _statement("""
    SELECT c.next_run_at <= {now} FROM {job} c WHERE c.id = :id AND c.continuation_seq = :seq AND c.redrives = :redrives
        AND c.next_run_at IS NOT NULL AND {unpaused}""")

# What was written to be due later than the transport reaches ahead has no message yet; what nobody has come for
# since its last one may have lost it. `updated_at` tells both, because announcing writes it: one process of
# many announces, and once.
_ANNOUNCE = _statement("""
    UPDATE {job} SET updated_at = {now}, lost_deliveries = lost_deliveries + CASE
        WHEN :counted AND {unheard} < {before :ttl} THEN 1 ELSE 0 END
    WHERE id {among} (SELECT c.id FROM {job} c {by_ready}
        WHERE c.queue_name = :queue AND c.kind = :kind AND c.priority = :priority
            AND c.next_run_at IS NOT NULL AND c.next_run_at <= {reached}
            AND ({written_ahead} > :reach OR {greatest}(c.next_run_at, c.updated_at) < {before :ttl})
            AND (:any OR c.tenant_id = :tenant)
            AND (:every OR coalesce(c.organization_id, '') = coalesce(:organization, ''))
            AND c.cancel_requested_at IS NULL AND {unpaused}
        ORDER BY c.next_run_at LIMIT :batch {skip_locked}){array_end}
    RETURNING {columns}""")

# LIMIT is a literal (as a parameter it is planned anew each time), in a few sizes, inside a locking CTE:
# as a plain `id IN (SELECT … LIMIT 1 …)`, planned on an empty table, one claim took the whole queue.
_CLAIM_SIZES = (1, 2, 4, 8, 16, 32, 64, 128)


def _claim_next(size: int) -> Statement:
    return _statement(
        f"""
    WITH g AS MATERIALIZED (
        SELECT * FROM unnest(:queues, :kinds, :priorities, :floors, :ttls)
            AS g(queue, kind, priority, floor, ttl)
        WHERE {{open}} ORDER BY priority DESC, random()),
    due AS MATERIALIZED (
        SELECT ready.id AS due_id, ready.next_run_at AS due_at, g.ttl AS due_ttl FROM g CROSS JOIN LATERAL (
            SELECT c.id, c.next_run_at FROM {{job}} c
            WHERE c.queue_name = g.queue AND c.kind = g.kind AND c.priority = g.priority
                AND c.next_run_at IS NOT NULL AND c.next_run_at <= {{index_now}}
                AND c.next_run_at >= coalesce(g.floor, '-infinity') AND {{fit}}
            ORDER BY c.next_run_at LIMIT {size} {{skip_locked}}) ready
        LIMIT {size})
    UPDATE {{job}} SET {{take_ahead}}, lease_expires_at = {{after due.due_ttl}}
    FROM due WHERE {{job}}.id = due.due_id
    RETURNING {{columns}}, due.due_at""",
        # CROSS JOIN keeps SQLite to this order of loops: probes by priority, rows by the index, stop early.
        f"""
    UPDATE {{job}} SET {{take_ahead}},
        lease_expires_at = {{after (SELECT json_extract(g.value, '$[3]') FROM json_each(:probes) g
            WHERE json_extract(g.value, '$[1]') = {{job}}.kind LIMIT 1)}}
    WHERE id IN (
        SELECT c.id FROM json_each(:probes) g CROSS JOIN {{job}} c INDEXED BY durable_jobs_ready
        WHERE c.queue_name = json_extract(g.value, '$[0]') AND c.kind = json_extract(g.value, '$[1]')
            AND c.priority = json_extract(g.value, '$[2]') AND c.next_run_at IS NOT NULL
            AND c.next_run_at <= {{index_now}} AND {{open}} AND {{fit}}
        LIMIT {size})
    RETURNING {{columns}}, NULL""",
    )


_CLAIM_NEXT = {size: _claim_next(size) for size in _CLAIM_SIZES}
# The same for one job of one place, where somebody waits for it. What takes lists is planned anew each time, because
# their length is known only then, and planning takes as long as the claim.
_CLAIM_ONE = _statement("""
    WITH due AS MATERIALIZED (
        SELECT c.id AS due_id, c.next_run_at AS due_at
        FROM (SELECT :queue AS queue, :kind AS kind, :priority AS priority) g CROSS JOIN {job} c
        WHERE c.queue_name = g.queue AND c.kind = g.kind AND c.priority = g.priority
            AND c.next_run_at IS NOT NULL AND c.next_run_at <= {index_now}
            AND c.next_run_at >= coalesce(:floor, '-infinity') AND {open} AND {fit}
        ORDER BY c.next_run_at LIMIT 1 {skip_locked})
    UPDATE {job} SET {take}, lease_expires_at = {after :ttl}
    FROM due WHERE {job}.id = due.due_id
    RETURNING {columns}, due.due_at""")

_IS_DUE = _statement(
    """
    WITH g AS MATERIALIZED (
        SELECT * FROM unnest(:queues, :kinds, :priorities) AS g(queue, kind, priority) WHERE {open})
    SELECT 1 FROM g CROSS JOIN LATERAL (
        SELECT 1 FROM {job} c
        WHERE c.queue_name = g.queue AND c.kind = g.kind AND c.priority = g.priority
            AND c.next_run_at IS NOT NULL AND c.next_run_at <= {index_now} AND {fit}
        ORDER BY c.next_run_at LIMIT 1) ready
    LIMIT 1""",
    """
    SELECT 1 FROM json_each(:probes) g CROSS JOIN {job} c INDEXED BY durable_jobs_ready
    WHERE c.queue_name = json_extract(g.value, '$[0]') AND c.kind = json_extract(g.value, '$[1]')
        AND c.priority = json_extract(g.value, '$[2]') AND c.next_run_at IS NOT NULL
        AND c.next_run_at <= {index_now} AND {open} AND {fit} LIMIT 1""",
)

_ROUTES = _statement(
    """
    WITH RECURSIVE g(queue, kind, priority, due) AS (
        (SELECT queue_name, kind, priority, next_run_at FROM {job} WHERE next_run_at IS NOT NULL
         ORDER BY queue_name, kind, priority, next_run_at LIMIT 1)
        UNION ALL
        SELECT n.queue_name, n.kind, n.priority, n.next_run_at FROM g CROSS JOIN LATERAL (
            SELECT c.queue_name, c.kind, c.priority, c.next_run_at FROM {job} c
            WHERE c.next_run_at IS NOT NULL
                AND ROW(c.queue_name, c.kind, c.priority) > ROW(g.queue, g.kind, g.priority)
            ORDER BY c.queue_name, c.kind, c.priority, c.next_run_at LIMIT 1) n)
    SELECT queue, kind, priority, extract(epoch FROM due - clock_timestamp())::float8 FROM g""",
    # SQLite's row value comparison uses the first column only: three searches, narrowest first.
    """
    WITH RECURSIVE g(id) AS (
        SELECT (SELECT id FROM {job} WHERE next_run_at IS NOT NULL
                ORDER BY queue_name, kind, priority, next_run_at LIMIT 1)
        UNION ALL
        SELECT coalesce(
            (SELECT c.id FROM {job} c WHERE c.next_run_at IS NOT NULL AND c.queue_name = a.queue_name
                AND c.kind = a.kind AND c.priority > a.priority ORDER BY c.priority, c.next_run_at LIMIT 1),
            (SELECT c.id FROM {job} c WHERE c.next_run_at IS NOT NULL AND c.queue_name = a.queue_name
                AND c.kind > a.kind ORDER BY c.kind, c.priority, c.next_run_at LIMIT 1),
            (SELECT c.id FROM {job} c WHERE c.next_run_at IS NOT NULL AND c.queue_name > a.queue_name
                ORDER BY c.queue_name, c.kind, c.priority, c.next_run_at LIMIT 1))
        FROM g CROSS JOIN {job} a ON a.id = g.id)
    SELECT queue_name, kind, priority, (julianday(next_run_at) - julianday('now')) * 86400.0
    FROM g CROSS JOIN {job} a ON a.id = g.id""",
)

# `ANY` finds all rows by one walk through the key, where a join would search it for each, and again for each that is
# locked. The ids come in order, so that `width_bucket` is the place of an id among them, and of its epoch and ttl.
# Each list stands there once: where the driver writes values into the text, it would be sent as often as it is named.
# The second walk goes by id, too: of a row that somebody has changed just before it was locked, the statement sees
# the older version alone, and would find nothing where the newer is.
# The moments, in brackets, are computed once, when all rows are locked; on SQLite the leases of one length are an
# object, epochs by id.
# What was renewed and has nothing to be told is left out of PostgreSQL's answer: most of the time that is all.
_BEAT_MANY = _statement(
    """
    WITH given AS MATERIALIZED (SELECT :ids AS ids, :epochs AS epochs, :ttls AS ttls),
    locked AS MATERIALIZED (
        SELECT id AS locked_id FROM {job}
        WHERE id = ANY((SELECT ids FROM given)::uuid[])
            AND {job}.lease_owner = :owner
            AND {job}.lease_epoch = (SELECT epochs FROM given)[width_bucket(id, (SELECT ids FROM given))]
        FOR NO KEY UPDATE SKIP LOCKED),
    renewed AS (
        UPDATE {job} SET heartbeat_at = (SELECT {now}),
            lease_expires_at = (SELECT {now}) + make_interval(
                secs => (SELECT ttls FROM given)[width_bucket(id, (SELECT ids FROM given))])
        WHERE id = ANY(ARRAY(SELECT locked_id FROM locked))
        RETURNING id, cancel_requested_at IS NOT NULL OR ({any_mail} AND {mailbox}) AS cancelled,
            {any_pause} AND {paused} AS paused)
    SELECT id, true, true, cancelled, paused FROM renewed WHERE cancelled OR paused
    UNION ALL
    SELECT mine.mine_id, false,
        coalesce({job}.lease_owner = :owner AND {job}.lease_epoch = mine.mine_epoch, false),
        {job}.cancel_requested_at IS NOT NULL OR {mailbox}, {paused}
    FROM given CROSS JOIN unnest(given.ids, given.epochs) AS mine(mine_id, mine_epoch)
        LEFT JOIN {job} ON {job}.id = mine.mine_id
    WHERE (SELECT count(*) FROM renewed) < cardinality(given.ids) AND mine.mine_id NOT IN (SELECT id FROM renewed)""",
    """
    UPDATE {job} SET heartbeat_at = (SELECT {now}), lease_expires_at = (SELECT {after :ttl})
    FROM (SELECT key AS mine_id, value AS mine_epoch FROM json_each(:leases)) mine
    WHERE id = mine_id AND lease_epoch = mine_epoch AND +lease_owner = :owner
    RETURNING id, cancel_requested_at""",
)
# SQLite would ask for mail and pauses row by row: here nothing is asked where there are none.
_MAILED_OR_PAUSED = _statement(
    "",
    """
    SELECT m.job_id, 'mailed' FROM durable_jobs_cancelrequest m CROSS JOIN {job} c ON c.id = m.job_id
    WHERE c.lease_owner = :owner
    UNION ALL
    SELECT c.id, 'paused' FROM durable_jobs_pause p CROSS JOIN json_each(:leases) mine
        CROSS JOIN {job} c ON c.id = mine.key
    WHERE (p.queue_name = '' OR p.queue_name = c.queue_name)
        AND (p.kind = '' OR p.kind = c.kind) AND (p.tenant_id = '' OR p.tenant_id = c.tenant_id)""",
)

_ASKED_TO_STOP = _statement("""
    SELECT c.id, c.lease_epoch, 1, 0 FROM {job} c {by_cancelling}
    WHERE c.cancel_requested_at IS NOT NULL AND c.finished_at IS NULL AND c.lease_owner = :owner
    UNION ALL
    SELECT c.id, c.lease_epoch, 1, 0 FROM durable_jobs_cancelrequest m CROSS JOIN {job} c
    WHERE c.id = m.job_id AND c.lease_owner = :owner
    UNION ALL
    SELECT c.id, c.lease_epoch, 0, 1 FROM durable_jobs_pause p CROSS JOIN {job} c {by_running}
    WHERE c.status = 'running' AND c.lease_owner = :owner AND (p.queue_name = '' OR p.queue_name = c.queue_name)
        AND (p.kind = '' OR p.kind = c.kind) AND (p.tenant_id = '' OR p.tenant_id = c.tenant_id)""")

_STILL_MINE = _statement("SELECT 1 FROM {job} WHERE {owned}")
_STRANGERS = _statement(
    """SELECT id, lease_epoch FROM {job} WHERE status = 'running' AND lease_owner = :owner
        AND NOT (id = ANY(:known))""",
    """SELECT id, lease_epoch FROM {job} WHERE status = 'running' AND lease_owner = :owner
        AND id NOT IN (SELECT value FROM json_each(:known))""",
)

_LOCK_FENCE = _statement(
    """SELECT id, set_config('idle_in_transaction_session_timeout', :idle, true) FROM {job}
        WHERE {owned} FOR NO KEY UPDATE""",
    # A write, so that the fence holds the database even in a deferred transaction.
    "UPDATE {job} SET lease_epoch = lease_epoch WHERE {owned} RETURNING id",
)

# The row is locked before the times are computed: a lease set by an UPDATE that waited is born too short.
_WRITE_CHECKPOINT = _statement("""
    UPDATE {job} SET lease_expires_at = {after :ttl}, heartbeat_at = {now}, last_committed_at = {now},
        updated_at = {now}, consecutive_failures = 0, redrives_since_commit = 0,
        checkpoint = CASE WHEN :keep_checkpoint THEN checkpoint ELSE :checkpoint END,
        checkpoint_at = CASE WHEN :keep_checkpoint THEN checkpoint_at
            WHEN :checkpoint IS NULL THEN NULL ELSE {now} END, {counts}
    WHERE id = (SELECT id FROM {job} WHERE {owned} {lock})
    RETURNING {requested}""")
_SET_PROGRESS = _statement("""
    UPDATE {job} SET heartbeat_at = {now}, {counts} WHERE {owned}
    RETURNING {requested}""")

_YIELD_SLICE = _statement("""
    UPDATE {job} SET status = 'pending', continuation_seq = continuation_seq + 1, {let_go}, {begun},
        pending_since = {now}, next_run_at = {after :delay}, interruptions = interruptions + :interrupted,
        {fold}, {counts}
    WHERE {owned} RETURNING {columns}""")
_GIVE_BACK = _statement("""
    UPDATE {job} SET status = 'pending', {let_go}, pending_since = {now}, next_run_at = {now}, {fold}
    WHERE {owned} RETURNING {columns}""")
# The verdict and the delay come from the counter as it stands under the row's lock: a commit earlier in the
# slice has reset it. The shift is clamped before it is computed.
_FAIL_SLICE = _statement("""
    UPDATE {job} SET {let_go}, {begun}, consecutive_failures = consecutive_failures + 1,
        error_class = :error_class, error_code = :code, error_type = :error_type,
        error_message = :error_message,
        verdict = CASE WHEN :error_class = 'unrecoverable' OR verdict = 'unrecoverable' THEN 'unrecoverable'
            WHEN :error_class = 'terminal' OR consecutive_failures + 1 >= :max_failures
                THEN 'retry_exhausted' ELSE verdict END,
        next_run_at = {after {least}(:longest, :first * CASE WHEN :exponential
            THEN (1 << {least}(consecutive_failures, 20)) ELSE 1 END)}, {fold}, {counts}
    WHERE {owned} RETURNING {columns}""")
_RELEASE_LEASE = _statement("""
    UPDATE {job} SET {let_go}, {begun}, next_run_at = {after :delay}, {fold},
        redrives_since_commit = redrives_since_commit + :cut_off
    WHERE {owned} RETURNING {columns}""")

_COMPLETE = _statement("""
    UPDATE {job} SET status = 'completed', {end}, {begun}, result = :result, error_class = NULL,
        error_code = NULL, error_type = NULL, error_message = NULL, {counts}
    WHERE {owned} AND verdict IS NULL RETURNING {columns}""")
# All at once, and waiting for none.
_COMPLETED_TOGETHER = """
    WITH mine AS MATERIALIZED (
        SELECT * FROM unnest(:ids, :epochs, :results) AS m(mine_id, mine_epoch, mine_result)),
    locked AS MATERIALIZED (
        SELECT {job}.id AS locked_id, mine.mine_result FROM {job} JOIN mine
            ON {job}.id = mine.mine_id AND {job}.lease_epoch = mine.mine_epoch
        WHERE {job}.lease_owner = :owner AND {job}.verdict IS NULL
        ORDER BY {job}.id FOR NO KEY UPDATE OF {job} SKIP LOCKED)
    UPDATE {job} SET status = 'completed', {end}, {begun}, result = locked.mine_result, error_class = NULL,
        error_code = NULL, error_type = NULL, error_message = NULL
    FROM locked WHERE {job}.id = locked.locked_id"""
# As one statement on SQLite, too: between two of them other threads take the interpreter. The plus signs keep the
# planner to the key.
_COMPLETED_TOGETHER_SQLITE = """
    UPDATE {job} SET status = 'completed', {end}, {begun}, result = mine.mine_result, error_class = NULL,
        error_code = NULL, error_type = NULL, error_message = NULL
    FROM (SELECT json_extract(value, '$[0]') AS mine_id, json_extract(value, '$[1]') AS mine_epoch,
        json_extract(value, '$[2]') AS mine_result FROM json_each(:leases)) mine
    WHERE id = mine_id AND lease_epoch = mine_epoch AND +status = 'running' AND +lease_owner = :owner
        AND verdict IS NULL"""
_COMPLETE_MANY = _statement(
    f"{_COMPLETED_TOGETHER} RETURNING {{job}}.id", f"{_COMPLETED_TOGETHER_SQLITE} RETURNING id"
)
_COMPLETE_MANY_WHOLE = _statement(
    f"{_COMPLETED_TOGETHER} RETURNING {{columns}}", f"{_COMPLETED_TOGETHER_SQLITE} RETURNING {{columns}}"
)
# By epoch alone: the failing path has let the lease go before it decides.
_FAIL_TERMINAL = _statement("""
    UPDATE {job} SET status = 'failed', {end}, {begun}, {fold},
        parked_at = CASE WHEN :parked THEN {now} END,
        error_class = coalesce(:error_class, error_class, 'terminal'),
        error_code = coalesce(:code, error_code), error_type = coalesce(:error_type, error_type),
        error_message = coalesce(:error_message, error_message)
    WHERE id = :id AND status = 'running' AND lease_epoch = :epoch RETURNING {columns}""")
_CANCEL_RUNNING = _statement("""
    UPDATE {job} SET {cancel}, {begun}, {counts}
    WHERE id = :id AND status = 'running' AND lease_epoch = :epoch RETURNING {columns}""")

_REQUEST_CANCEL = _statement(
    """
    WITH target AS MATERIALIZED (
        SELECT id AS target_id FROM {job} WHERE id = :id AND (:any OR {in_scope})
            AND status IN ('held', 'pending', 'running') {skip_locked}),
    stamped AS (
        UPDATE {job} SET cancelled_by_id = CASE WHEN {job}.cancel_requested_at IS NULL THEN :user
                ELSE {job}.cancelled_by_id END,
            cancel_requested_at = coalesce({job}.cancel_requested_at, {now})
        FROM target WHERE {job}.id = target.target_id RETURNING {job}.id),
    posted AS (
        INSERT INTO durable_jobs_cancelrequest (job_id, requested_at, actor, actor_user_id, reason)
        SELECT id, {now}, :actor, :user, :reason FROM {job}
        WHERE id = :id AND (:any OR {in_scope}) AND status IN ('held', 'pending', 'running')
            AND NOT EXISTS (SELECT 1 FROM target) RETURNING job_id)
    SELECT 'stamped' FROM stamped UNION ALL SELECT 'posted' FROM posted""",
    """
    UPDATE {job} SET cancelled_by_id = CASE WHEN {job}.cancel_requested_at IS NULL THEN :user
            ELSE {job}.cancelled_by_id END,
        cancel_requested_at = coalesce({job}.cancel_requested_at, {now})
    WHERE id = :id AND (:any OR {in_scope}) AND status IN ('held', 'pending', 'running')
    RETURNING 'stamped'""",
)
_FOLD_CANCEL = _statement("""
    UPDATE {job} SET {fold}
    WHERE id = (SELECT c.id FROM {job} c WHERE c.id = :id AND c.status IN ('held', 'pending', 'running')
        {skip_locked}) AND {mailbox} RETURNING {columns}""")
_EMPTY_MAILBOX = _statement("DELETE FROM durable_jobs_cancelrequest WHERE job_id = :id")
_CANCEL_WAITING = _statement("""
    UPDATE {job} SET {cancel}
    WHERE id = (SELECT c.id FROM {job} c WHERE c.id = :id
        AND (c.status IN ('held', 'pending') OR (c.status = 'running' AND c.lease_owner IS NULL))
        {skip_locked})
    AND (cancel_requested_at IS NOT NULL OR {mailbox}) RETURNING {columns}""")
_CANCELLING = _statement("""
    SELECT id, kind, {asked} FROM {job} {by_cancelling}
    WHERE cancel_requested_at IS NOT NULL AND finished_at IS NULL
        AND (status <> 'running' OR lease_owner IS NULL) AND queue_name <> :manual AND {sweep}
    ORDER BY id LIMIT :batch""")

# An orphan of paused work waits; its cancel does not.
_ORPHANS = _statement("""
    SELECT id, kind, tenant_id, organization_id, lease_owner, lease_epoch, lease_expires_at,
        cancel_requested_at IS NOT NULL OR {mailbox}, verdict, redrives_since_commit, {overdue},
        heartbeat_at IS NOT NULL
    FROM {job} {by_running} WHERE status = 'running' AND lease_owner IS NOT NULL AND queue_name <> :manual
        AND lease_expires_at < {before :grace} AND {sweep}
        AND (cancel_requested_at IS NOT NULL OR {mailbox} OR NOT {paused})
    ORDER BY id LIMIT :batch""")
_TAKE_ORPHAN = _statement("""
    UPDATE {job} SET status = 'pending', {let_go}, lease_epoch = lease_epoch + 1,
        redrives = redrives + 1, redrives_since_commit = redrives_since_commit + :orphanings,
        pending_since = {now}, next_run_at = {after :delay}
    WHERE {orphan} AND (:orphanings = 1 OR heartbeat_at IS NULL) AND cancel_requested_at IS NULL AND verdict IS NULL AND NOT {mailbox} AND NOT {paused}
    RETURNING {columns}""")
_PARK_ORPHAN = _statement("""
    UPDATE {job} SET status = 'failed', {end}, parked_at = {now}, error_code = :code,
        error_class = coalesce(error_class, 'terminal'),
        error_message = coalesce(error_message, :message)
    WHERE {orphan} AND cancel_requested_at IS NULL AND NOT {mailbox} AND NOT {paused}
    RETURNING {columns}""")
_CANCEL_ORPHAN = _statement("""
    UPDATE {job} SET {cancel}
    WHERE {orphan} AND (cancel_requested_at IS NOT NULL OR {mailbox}) RETURNING {columns}""")
_DEAD_LEASES = _statement("""
    SELECT id, kind, tenant_id, organization_id, lease_owner, lease_epoch, lease_expires_at,
        cancel_requested_at IS NOT NULL OR {mailbox}, verdict, redrives_since_commit, {overdue},
        heartbeat_at IS NOT NULL
    FROM {job} WHERE status = 'running' AND lease_owner = :owner""")
_MAILED = _statement("""
    SELECT DISTINCT m.job_id FROM durable_jobs_cancelrequest m JOIN {job} ON {job}.id = m.job_id
    WHERE {job}.status IN ('held', 'pending', 'running') AND queue_name <> :manual AND {sweep}
    ORDER BY m.job_id LIMIT :batch""")
_IS_FREE = _statement("SELECT 1 FROM {job} WHERE id = :id {skip_locked}")
# A row's lock is not in pg_locks, but the row names the transaction that took it last.
_HOLDERS = _statement(
    """
    SELECT l.pid, coalesce(a.state, ''),
        coalesce(extract(epoch FROM clock_timestamp() - a.xact_start), 0)::float8
    FROM {job} JOIN pg_locks l
        ON l.locktype = 'transactionid' AND l.transactionid = {job}.xmax AND l.granted AND l.pid IS NOT NULL
    LEFT JOIN pg_stat_activity a ON a.pid = l.pid WHERE {job}.id = :id""",
    "SELECT 0, '', 0.0 FROM {job} WHERE false AND id = :id",
)

_REDRIVE = _statement("""
    UPDATE {job} SET status = 'pending', {let_go}, lease_epoch = lease_epoch + 1,
        redrives = redrives + 1, pending_since = {now}, next_run_at = {after :delay},
        redrives_since_commit = 0, lost_deliveries = 0, consecutive_failures = 0, mirror_attempts = 0,
        verdict = NULL, parked_at = NULL, error_class = NULL, error_code = NULL, error_type = NULL,
        finished_at = NULL, domain_mirrored_at = NULL, cancel_requested_at = NULL, cancelled_by_id = NULL,
        checkpoint = CASE WHEN :restart THEN NULL ELSE checkpoint END,
        checkpoint_at = CASE WHEN :restart THEN NULL ELSE checkpoint_at END,
        processed_count = CASE WHEN :restart THEN 0 ELSE processed_count END
    WHERE id = (SELECT c.id FROM {job} c WHERE c.id = :id AND (:any OR (c.tenant_id = :tenant
            AND coalesce(c.organization_id, '') = coalesce(:organization, '')))
        AND (c.status = 'failed' OR (c.status = 'running' AND (c.lease_owner IS NULL
            OR c.lease_expires_at < {before :grace})))
        AND (:forced OR c.verdict IS NULL OR c.verdict <> 'unrecoverable')
        AND (:failed_before IS NULL OR (c.status = 'failed' AND c.finished_at < :failed_before)) {skip_locked})
    RETURNING {columns}""")

_SETTLE = _statement("""
    UPDATE {job} SET {end_unmirrored}, verdict = CASE WHEN {requested} IS NULL THEN verdict END,
        status = CASE WHEN {requested} IS NULL THEN 'failed' ELSE 'cancelled' END,
        {fold}, error_class = CASE WHEN {requested} IS NULL THEN coalesce(error_class, 'terminal')
            ELSE error_class END
    WHERE id = (SELECT c.id FROM {job} c WHERE c.id = :id AND (:any OR (c.tenant_id = :tenant
            AND coalesce(c.organization_id, '') = coalesce(:organization, ''))) AND c.mirror_attempts > 0
        AND (c.status IN ('held', 'pending') OR (c.status = 'running' AND (c.lease_owner IS NULL
            OR c.lease_expires_at < {before :grace}))) {skip_locked})
    RETURNING {columns}""")

# The savepoint's rollback has freed the row, and a caller's transaction may hold more: it must not wait here.
_BUMP_MIRROR = _statement("""
    UPDATE {job} SET mirror_attempts = mirror_attempts + 1
    WHERE id = (SELECT c.id FROM {job} c WHERE c.id = :id AND c.lease_epoch = :epoch
        AND c.status IN ('held', 'pending', 'running', 'failed') {skip_locked})""")
_SET_IDEMPOTENCY_KEY = _statement("""
    UPDATE {job} SET idempotency_key = :idempotency_key, updated_at = {now}
    WHERE id = :id AND idempotency_key IS NULL""")
# A request that starts a job must not wait for a worker that has taken it already, and holds it in a fence.
_SET_DELIVERY = _statement("""
    UPDATE {job} SET queue_job_id = :queue_job_id
    WHERE id = (SELECT c.id FROM {job} c WHERE c.id = :id AND c.continuation_seq = :seq
        AND c.redrives = :redrives AND c.finished_at IS NULL {skip_locked})""")

# Work that is owned by hand (receipts, manager): only an unexpired lease writes.
_INSERT_RUNNING = _statement("""
    INSERT INTO {job} (id, kind, status, tenant_id, organization_id, queue_name, input, input_sha256,
        idempotency_key, created_at, updated_at, lease_owner, lease_epoch, lease_expires_at, heartbeat_at,
        attempts, claimed_at, started_at)
    VALUES (:id, :kind, 'running', :tenant, :organization, :queue, :input, :input_sha256,
        :idempotency_key, {now}, {now}, :owner, 1, {after :ttl}, {now}, 1, {now}, {now})
    ON CONFLICT DO NOTHING RETURNING {columns}""")
_EXTEND = _statement("""
    UPDATE {job} SET lease_expires_at = {after :ttl}, heartbeat_at = {now}
    WHERE id = (SELECT id FROM {job} WHERE {owned} {lock}) RETURNING {columns}""")
_RENEW = _statement("""
    UPDATE {job} SET lease_expires_at = {after :ttl}, heartbeat_at = {now}, {fold}
    WHERE id = (SELECT id FROM {job} WHERE {owned} AND lease_expires_at > {now} {skip_locked})
    RETURNING {columns}""")
_STILL_CURRENT = _statement("SELECT 1 FROM {job} WHERE {owned} AND lease_expires_at > {now}")
_SET_PERCENT = _statement("""
    UPDATE {job} SET progress = :percent, heartbeat_at = {now} WHERE {strict} RETURNING id""")
_KEEP_CHECKPOINT = _statement("""
    UPDATE {job} SET checkpoint = :checkpoint, checkpoint_at = {now}, updated_at = {now}
    WHERE {strict} RETURNING id""")
_COMPLETE_OWNED = _statement("""
    UPDATE {job} SET status = 'completed', {end}, result = :result, progress = 100, heartbeat_at = {now},
        error_class = NULL, error_code = NULL, error_type = NULL, error_message = NULL
    WHERE {strict} AND verdict IS NULL AND (:late OR {requested} IS NULL) RETURNING {columns}""")
_FAIL_OWNED = _statement("""
    UPDATE {job} SET status = 'failed', {end}, {fold}, heartbeat_at = {now}, result = coalesce(:result, result),
        error_class = :error_class, error_code = :code, error_type = :error_type,
        error_message = :error_message
    WHERE {strict} RETURNING {columns}""")
_CANCEL_OWNED = _statement("""
    UPDATE {job} SET {cancel}, heartbeat_at = {now}, result = coalesce(:result, result),
        error_message = coalesce(:error_message, error_message)
    WHERE {strict} AND (:stopped OR {requested} IS NOT NULL) RETURNING {columns}""")
_RELEASE_HELD = _statement("""
    UPDATE {job} SET status = 'pending', pending_since = {now}, next_run_at = {now}, updated_at = {now}, {fold}
    WHERE id = (SELECT c.id FROM {job} c WHERE c.id = :id AND (:any OR (c.tenant_id = :tenant
            AND coalesce(c.organization_id, '') = coalesce(:organization, '')))
        AND c.status = 'held' AND c.queue_name <> :manual AND {authentic} {skip_locked})
    RETURNING {columns}""")
_CLAIM_HELD = _statement("""
    UPDATE {job} SET {take}, lease_expires_at = {after :ttl}
    WHERE id = (SELECT c.id FROM {job} c WHERE c.id = :id AND c.tenant_id = :tenant
            AND coalesce(c.organization_id, '') = coalesce(:organization, '')
        AND ((c.status = 'held' AND {authentic})
            OR ({over} AND {sound} AND c.verdict IS NULL))
        AND {countable} {skip_locked})
    RETURNING {columns}""")
_RETRY_CLAIM = _statement("""
    UPDATE {job} SET status = 'running', lease_owner = :owner, lease_epoch = lease_epoch + 1,
        attempts = attempts + 1, heartbeat_at = {now}, claimed_at = {now}, lease_expires_at = {after :ttl},
        processed_at_claim = processed_count, started_at = coalesce(started_at, {now}), updated_at = {now},
        redrives_since_commit = 0, lost_deliveries = 0, consecutive_failures = 0, mirror_attempts = 0,
        verdict = NULL, parked_at = NULL, error_class = NULL, error_code = NULL, error_type = NULL,
        error_message = NULL, result = NULL, progress = 0, finished_at = NULL, domain_mirrored_at = NULL,
        cancel_requested_at = NULL, cancelled_by_id = NULL
    WHERE id = (SELECT c.id FROM {job} c WHERE c.id = :id AND c.lease_epoch = :epoch
        AND (c.status IN ('failed', 'cancelled') OR ({over})) AND {authentic} AND {countable} {skip_locked})
    RETURNING {columns}""")
_LOCK_ROW = _statement("SELECT id FROM {job} WHERE id = :id {lock}")
# The real table: a temporary one of its name would be found first. On PostgreSQL the row tells its own table,
# on SQLite the schema is named.
_IMAGE = _statement(
    """
    SELECT {columns}, lease_expires_at > {now}, {requested}, current_database(),
        (SELECT t.relpersistence = 't' FROM pg_class t WHERE t.oid = {job}.tableoid)
    FROM {job} WHERE id = :id""",
    """
    SELECT {columns}, lease_expires_at > {now}, {requested},
        (SELECT file FROM pragma_database_list WHERE name = 'main'), 0
    FROM main.{job} AS {job} WHERE id = :id""",
)

_TRY_LOCK = _statement("SELECT pg_try_advisory_xact_lock(hashtextextended(:lock_name, 0))", "SELECT 1")
_WAIT_LOCK = _statement("SELECT pg_advisory_xact_lock(hashtextextended(:lock_name, 0))", "SELECT 1")
_COUNT_OF_KIND = _statement(
    """SELECT count(*) FROM {job} WHERE status = 'running' AND lease_owner IS NOT NULL AND {in_scope}
        AND kind = ANY(:names) AND id <> :except_id""",
    """SELECT count(*) FROM {job} WHERE status = 'running' AND lease_owner IS NOT NULL AND {in_scope}
        AND kind IN (SELECT value FROM json_each(:names)) AND id <> :except_id""",
)
_COUNT_BY_HAND = _statement("""
    SELECT count(*) FROM {job} WHERE status = 'running' AND lease_owner IS NOT NULL AND {in_scope}
        AND (queue_name = :manual OR lease_owner LIKE 'manager:%%') AND id <> :except_id""")

_DUE_SCOPES = _statement("""
    SELECT DISTINCT tenant_id, organization_id FROM (
        SELECT c.tenant_id, c.organization_id FROM {job} c
        WHERE c.queue_name = :queue AND c.kind = :kind AND c.priority = :priority
            AND c.next_run_at IS NOT NULL AND c.next_run_at <= {index_now} AND {fit}
            AND NOT ({scope_key} = ANY(:full)) ORDER BY c.next_run_at LIMIT 500) s""",
    """
    SELECT DISTINCT tenant_id, organization_id FROM (
        SELECT c.tenant_id, c.organization_id FROM {job} c INDEXED BY durable_jobs_ready
        WHERE c.queue_name = :queue AND c.kind = :kind AND c.priority = :priority
            AND c.next_run_at IS NOT NULL AND c.next_run_at <= {index_now} AND {fit}
            AND {scope_key} NOT IN (SELECT value FROM json_each(:full)) ORDER BY c.next_run_at LIMIT 500) s""",
)  # fmt: skip
_CLAIM_LIMITED = _statement(
    """
    WITH due AS MATERIALIZED (
        SELECT c.id AS due_id FROM {job} c
        WHERE c.queue_name = :queue AND c.kind = :kind AND c.priority = :priority AND c.tenant_id = :tenant
            AND coalesce(c.organization_id, '') = coalesce(:organization, '')
            AND c.next_run_at IS NOT NULL AND c.next_run_at <= {index_now} AND {fit}
        ORDER BY c.next_run_at LIMIT :batch {skip_locked})
    UPDATE {job} SET {take}, lease_expires_at = {after :ttl}
    FROM due WHERE {job}.id = due.due_id RETURNING {columns}""",
    """
    UPDATE {job} SET {take}, lease_expires_at = {after :ttl}
    WHERE id IN (
        SELECT c.id FROM {job} c INDEXED BY durable_jobs_ready
        WHERE c.queue_name = :queue AND c.kind = :kind AND c.priority = :priority AND c.tenant_id = :tenant
            AND coalesce(c.organization_id, '') = coalesce(:organization, '')
            AND c.next_run_at IS NOT NULL AND c.next_run_at <= {index_now} AND {fit}
        ORDER BY c.next_run_at LIMIT :batch)
    RETURNING {columns}""",
)


def _sizes(vendor: str) -> str:
    """The bytes of every text column of a row."""
    measured = []
    for column in Job._meta.concrete_fields:
        if column.get_internal_type() in ("CharField", "TextField", "JSONField"):
            text = f"coalesce(c.{column.column}{'::text' if vendor == 'postgresql' else ''}, '')"
            measured.append(
                f"octet_length({text})" if vendor == "postgresql" else f"length(CAST({text} AS BLOB))"
            )
    return " + ".join(measured)


def _page_snippets(vendor: str) -> Mapping[str, str]:
    return {**_snippets(vendor), "bytes": _sizes(vendor)}


# The first look gives sizes, and withholds the id of what is too big, so that no caller can load it.
_CANDIDATES = Statement(
    """
    SELECT CASE WHEN sized.size <= :cap THEN sized.id END, sized.size, sized.created_at FROM (
        SELECT c.id, ({bytes}) AS size, c.created_at FROM {job} c
        WHERE c.tenant_id = :tenant AND coalesce(c.organization_id, '') = coalesce(:organization, '')
            AND c.kind = :kind AND (:any OR c.status = :status)
            AND (c.created_at, c.id) > (:created, :after_id)
        ORDER BY c.created_at, c.id LIMIT :batch) sized
    ORDER BY sized.created_at, sized.id""",
    types=_Types(_TYPES),
    snippets=_page_snippets,
)
_CHOSEN = _statement(
    """SELECT {columns} FROM {job} WHERE id = ANY(:ids) AND {in_scope} AND kind = :kind
        ORDER BY created_at, id""",
    """SELECT {columns} FROM {job} WHERE id IN (SELECT value FROM json_each(:ids)) AND {in_scope}
        AND kind = :kind ORDER BY created_at, id""",
)

_ADD_EVENT = _statement("""
    INSERT INTO durable_jobs_event (job_id, created_at, event, kind, tenant_id, organization_id, epoch, seq,
        owner, actor, actor_id, reason, operation_id, code, error_type, message, traceback, data, release)
    VALUES (:id, {now}, :event, :kind, :tenant, :organization, :epoch, :seq, :owner, :actor, :actor_id,
        :reason, :operation_id, :code, :error_type, :message, :traceback, :data, :release)""")

# By key, so that no batch walks over the index entries of the rows that earlier ones have deleted. Rows are
# large or small: the sizes decide how many of a batch go, the first in any case.
_PRUNE_BATCH = _statement(
    """
    WITH page AS MATERIALIZED (
        SELECT c.id AS page_id, c.finished_at AS page_time, coalesce(octet_length(c.input), 0)
            + coalesce(octet_length(c.checkpoint), 0) + coalesce(octet_length(c.result), 0)
            + coalesce(octet_length(c.error_message), 0) + 1000 AS size
        FROM {job} c WHERE c.finished_at IS NOT NULL AND c.finished_at < :ended_before
            AND c.status IN ('completed', 'cancelled', 'failed') AND c.status = ANY(:statuses)
            AND (c.finished_at, c.id) > (:after_time, :after_id)
        ORDER BY c.finished_at, c.id LIMIT :batch FOR UPDATE OF c SKIP LOCKED),
    chosen AS MATERIALIZED (
        SELECT page_id FROM (
            SELECT page_id, sum(size) OVER (ORDER BY page_time, page_id) - size AS before FROM page) p
        WHERE before < :budget)
    DELETE FROM {job} USING chosen WHERE {job}.id = chosen.page_id
        AND {job}.finished_at < :ended_before AND {job}.status = ANY(:statuses)
    RETURNING {columns}""",
    """
    DELETE FROM {job} WHERE id IN (
        SELECT id FROM (
            SELECT id, sum(size) OVER (ORDER BY finished_at, id) - size AS before FROM (
                SELECT c.id, c.finished_at, coalesce(length(c.input), 0) + coalesce(length(c.checkpoint), 0)
                    + coalesce(length(c.result), 0) + coalesce(length(c.error_message), 0) + 1000 AS size
                FROM {job} c WHERE c.finished_at IS NOT NULL AND c.finished_at < :ended_before
                    AND c.status IN ('completed', 'cancelled', 'failed')
                    AND c.status IN (SELECT value FROM json_each(:statuses))
                    AND (c.finished_at > :after_time OR (c.finished_at = :after_time AND c.id > :after_id))
                    AND c.finished_at >= :after_time
                ORDER BY c.finished_at, c.id LIMIT :batch)) WHERE before < :budget)
    RETURNING {columns}""",
)
_PRUNE_EVENTS = _statement(
    """DELETE FROM durable_jobs_event WHERE id IN (
        SELECT e.id FROM durable_jobs_event e WHERE e.job_id = ANY(:ids) ORDER BY e.id LIMIT :batch)
    RETURNING {event_columns}""",
    """DELETE FROM durable_jobs_event WHERE id IN (
        SELECT e.id FROM durable_jobs_event e WHERE e.job_id IN (SELECT value FROM json_each(:ids))
        ORDER BY e.id LIMIT :batch)
    RETURNING {event_columns}""",
)
_PRUNE_MAIL = _statement(
    "DELETE FROM durable_jobs_cancelrequest WHERE job_id = ANY(:ids)",
    "DELETE FROM durable_jobs_cancelrequest WHERE job_id IN (SELECT value FROM json_each(:ids))",
)

_WORKER_STARTED = _statement("""
    INSERT INTO durable_jobs_worker (owner, host, pid, queues, kinds, concurrency, release, started_at,
        beat_at) VALUES (:owner, :host, :pid, :queue, :kind, :concurrency, :release, {now}, {now})
    ON CONFLICT (owner) DO UPDATE SET beat_at = excluded.beat_at""")
_WORKER_BEAT = _statement("UPDATE durable_jobs_worker SET beat_at = {now} WHERE owner = :owner")
_WORKER_STOPPED = _statement("DELETE FROM durable_jobs_worker WHERE owner = :owner")
_FORGET_WORKERS = _statement("DELETE FROM durable_jobs_worker WHERE beat_at < {before :grace}")

_PAUSE = _statement("""
    INSERT INTO durable_jobs_pause (queue_name, kind, tenant_id, reason, actor, since)
    VALUES (:queue, :kind, :tenant, :reason, :actor, {now})
    ON CONFLICT (queue_name, kind, tenant_id) DO UPDATE SET reason = excluded.reason, actor = excluded.actor""")
_UNPAUSE = _statement("""
    DELETE FROM durable_jobs_pause WHERE queue_name = :queue AND kind = :kind AND tenant_id = :tenant""")
_NOW_AND_PAUSES = _statement(f"""
    SELECT {{now}}, {", ".join(f"p.{field.column}" for field in Pause._meta.concrete_fields)}
    FROM (SELECT 1 AS one) always LEFT JOIN durable_jobs_pause p ON always.one = 1 ORDER BY p.id""")
_LEASED = _statement("""
    SELECT count(*) FROM {job} WHERE status = 'running' AND lease_owner IS NOT NULL
        AND lease_expires_at >= {now} AND (:queue = '' OR queue_name = :queue) AND (:kind = '' OR kind = :kind)
        AND (:tenant = '' OR tenant_id = :tenant)""")

# What ended is never read: a sorted look at the ready index, after the running rows.
_UNFINISHED = _statement(
    """
    SELECT 1 WHERE EXISTS (
        SELECT 1 FROM {job} c WHERE c.status = 'running' AND {wanted})
    OR (SELECT c.id FROM {job} c WHERE c.next_run_at IS NOT NULL AND {wanted}
            AND (c.next_run_at <= {index_now} OR c.attempts > 0)
        ORDER BY c.queue_name, c.kind, c.priority, c.next_run_at LIMIT 1) IS NOT NULL""",
    """
    SELECT 1 WHERE EXISTS (
        SELECT 1 FROM {job} c INDEXED BY durable_jobs_running WHERE c.status = 'running' AND {wanted})
    OR EXISTS (SELECT 1 FROM {job} c INDEXED BY durable_jobs_ready WHERE c.next_run_at IS NOT NULL AND {wanted}
            AND (c.next_run_at <= {index_now} OR c.attempts > 0))""",
)


# --- reading --------------------------------------------------------------------------------------------


def _jobs(connection: BaseDatabaseWrapper, rows: Sequence[Sequence[Any]]) -> list[Job]:
    return database.loader(Job, connection).load(connection, rows)


def _one(connection: BaseDatabaseWrapper, rows: Sequence[Sequence[Any]]) -> Job | None:
    loaded = _jobs(connection, rows)
    return loaded[0] if loaded else None


def _uuid(value: Any) -> UUID:
    return value if isinstance(value, UUID) else UUID(hex=value)


def get(job_id: UUID) -> Job | None:
    """The row as it now is, whatever its scope."""
    connection = database.connection()
    return _one(connection, _BY_ID.run(connection, id=job_id))


def by_idempotency_key(kind: str, key: str, scope: Scope) -> Job | None:
    """The job that this key made, in whatever status it is."""
    connection = database.connection()
    rows = _BY_IDEMPOTENCY_KEY.run(
        connection, idempotency_key=key, kind=kind, tenant=scope.tenant, organization=scope.organization
    )
    return _one(connection, rows)


def by_lock_key(key: str, scope: Scope) -> Job | None:
    """The live job that holds this lock key."""
    connection = database.connection()
    rows = _BY_LOCK_KEY.run(connection, lock_key=key, tenant=scope.tenant, organization=scope.organization)
    return _one(connection, rows)


def routes() -> list[Route]:
    """Every (queue, kind, priority) with claimable rows, by a loose scan of the ready index."""
    connection = database.connection()
    return [Route(*row) for row in _ROUTES.run(connection)]


def still_mine(lease: Lease) -> bool:
    """Whether the row still carries this owner and epoch. True only now: it locks nothing."""
    connection = database.connection()
    return bool(_STILL_MINE.run(connection, id=lease.job_id, owner=lease.owner, epoch=lease.epoch))


def unfinished(queues: Collection[str] | None, kinds: Collection[str]) -> bool:
    """Whether work of these queues (None: of any) and kinds is due, has begun, or waits for a retry.

    Jobs that were only scheduled for later do not count.
    """
    connection = database.connection()
    return bool(_UNFINISHED.run(connection, any=queues is None, queues=list(queues or ()), kinds=list(kinds)))


# --- starting -------------------------------------------------------------------------------------------


def insert(new: NewJob) -> Job | None:
    """→ pending or held. None when the idempotency key or the live lock key is taken already.

    Joins the caller's transaction, which stays usable. It may wait there for a rival that holds the same
    key in an open transaction.
    """
    using = database.alias()
    connection = connections[using]
    if connection.vendor == "sqlite":
        write = _writing(connection, new)
        rows = write() if connection.in_atomic_block else database.in_a_turn(using, write)
    else:
        rows = _INSERT.run(connection, user=new.created_by, **_new_columns(new))
    if not rows:
        return None
    created, first_run, meta = rows[0]
    created_at = database.moment_of(connection, created)
    if first_run == created:
        first_run = created_at
    elif first_run is not None:
        first_run = database.moment_of(connection, first_run)
    loader = database.loader(Job, connection)
    labels = None if meta is None else json.loads(meta)
    job: Job = loader.maker(using)(_add_decided(loader.defaults | _known(new), created_at, first_run, labels))
    return job


def _writing(connection: BaseDatabaseWrapper, new: NewJob) -> Callable[[], list[tuple[Any, ...]]]:
    """SQLite's statement for this row: each value that is bound takes its time, and most are NULL."""
    values = {
        name: value for name, value in zip(_MANY_NAMES, _MANY_VALUES(new), strict=True) if value is not None
    }
    run_at, delay = values.pop("run_at", None), values.pop("delay")
    names, first_run = tuple(values), None
    if new.status == _PENDING:
        first_run = ":run_at" if run_at else "{after :delay}" if delay else "m.now"
    return partial(_insert_given(names, first_run).run, connection, run_at=run_at, delay=delay, **values)


class NewJobs:
    """Rows of one `insert_many`, which may still have to be made; what needs no database can be done ahead."""

    def __init__(self, rows: Iterable[NewJob]) -> None:
        self._rows = rows

    @cached_property
    def rows(self) -> Sequence[NewJob]:
        """In the order of their keys: two statements that take the same keys in opposite order deadlock."""
        rows = list(self._rows)
        if any(new.idempotency_key is not None or new.lock_key is not None for new in rows):
            rows.sort(key=_by_key)
        return rows

    def make_ready(self) -> None:
        """Do now what needs no database (PostgreSQL)."""
        _ = self.sent

    @cached_property
    def sent(self) -> tuple[Statement, dict[str, Any]]:
        """The statement for PostgreSQL, and its values."""
        columns, count = _columns(self.rows), len(self.rows)
        ids = ",".join([job_id.hex for job_id in columns.pop("id")])
        shared = {name: column[0] for name, column in columns.items() if column.count(column[0]) == count}
        apart = tuple(name for name in columns if name not in shared)
        each = {f"each_{name}": json.dumps(columns[name], default=_as_json) for name in apart}
        return _insert_together(apart), {"batch": count, "ids": f"{{{ids}}}", **shared, **each}


def insert_many(rows: Sequence[NewJob] | NewJobs, following: NewJobs | None = None) -> dict[UUID, Job]:
    """→ pending or held, many in one statement; what met a taken key is missing from the answer.

    While the server inserts them, `following` are made ready. Two transactions that call this twice can deadlock.
    """
    new_jobs = rows if isinstance(rows, NewJobs) else NewJobs(rows)
    with _joining(database.alias()) as connection:
        if not new_jobs.rows:
            return {}
        if connection.vendor == "postgresql":
            return _insert_many_at_once(connection, new_jobs, following)
        return _insert_many_in_turn(connection, new_jobs.rows)


def _insert_many_at_once(
    connection: BaseDatabaseWrapper, new_jobs: NewJobs, following: NewJobs | None
) -> dict[UUID, Job]:
    """PostgreSQL: one statement, which answers its moment and the ids that were inserted."""
    loader, made_ready = database.loader(Job, connection), list[dict[str, Any]]()

    def meanwhile() -> None:
        defaults = loader.defaults
        made_ready.extend(defaults | _known(new) for new in new_jobs.rows)
        if following is not None:
            following.make_ready()

    statement, values = new_jobs.sent
    if config.PIPELINE:
        answer = statement.run_while(connection, meanwhile, **values)
    else:
        answer = statement.run(connection, **values)
        meanwhile()
    ((moment, count, made, metas),) = answer
    rows, labels = new_jobs.rows, json.loads(metas) if metas else {}
    there = None if count == len(rows) else set(json.loads(made or "[]"))
    jobs, make, latest = {}, loader.maker(connection.alias), len(rows) - 1
    for number, (new, attributes) in enumerate(zip(rows, made_ready, strict=True)):
        if there is None or str(new.id) in there:
            created_at = moment - timedelta(microseconds=latest - number)
            meta = labels.get(str(new.id)) if labels else None
            jobs[new.id] = make(_add_decided(attributes, created_at, _first_run(new, created_at), meta))
    return jobs


def _insert_many_in_turn(connection: BaseDatabaseWrapper, rows: Sequence[NewJob]) -> dict[UUID, Job]:
    """SQLite: a prepared statement for each, inside the open transaction; all have the moment of its start."""
    ((clock, rowid),) = _BEFORE_MANY.run(connection)
    moment = database.moment_of(connection, clock)
    now = database.plain(moment)
    first_runs = [_first_run(new, moment) for new in rows]
    columns = _columns(rows)
    columns["id"] = [job_id.hex for job_id in columns["id"]]
    columns["created_at"] = columns["updated_at"] = [now] * len(rows)
    columns["next_run_at"] = [now if run is moment else database.plain(run) for run in first_runs]
    columns["pending_since"] = [None if run is None else now for run in first_runs]
    names = tuple(
        name
        for name in _MANY_COLUMNS
        if columns[name][0] is not None or columns[name].count(None) < len(rows)
    )
    for name in ("created_by", "progress_job_id"):
        if name in names:
            columns[name] = [database.plain(value) for value in columns[name]]
    count = _insert_each(names).run_each(connection, columns)
    loader, there = database.loader(Job, connection), None
    if count != len(rows):
        added = _ADDED_SINCE.run(connection, rowid=rowid, ids=[new.id for new in rows])
        there = {_uuid(row[0]) for row in added}
    jobs, defaults, make = {}, loader.defaults, loader.maker(connection.alias)
    for new, first_run in zip(rows, first_runs, strict=True):
        if there is None or new.id in there:
            meta = None if new.meta is None else json.loads(new.meta)
            jobs[new.id] = make(_add_decided(defaults | _known(new), moment, first_run, meta))
    return jobs


def _columns(rows: Sequence[NewJob]) -> dict[str, Sequence[Any]]:
    return {name: list(map(attrgetter(name), rows)) for name in _MANY_NAMES}


def _first_run(new: NewJob, created_at: datetime) -> datetime | None:
    if new.status != _PENDING:
        return None
    if new.run_at is not None:
        return new.run_at
    return created_at + timedelta(seconds=new.delay) if new.delay else created_at


def _known(new: NewJob) -> dict[str, Any]:
    """Of the new job's attributes what its row is given."""
    return {
        "id": new.id,
        "kind": new.kind,
        "status": new.status,
        "tenant_id": new.tenant,
        "organization_id": new.organization,
        "created_by_id": new.created_by,
        "input_text": new.input,
        "input_sha256": new.input_sha256,
        "idempotency_key": new.idempotency_key,
        "lock_key": new.lock_key,
        "subject_type": new.subject_type,
        "subject_id": new.subject_id,
        "progress_job_id": new.progress_job_id,
        "queue_name": new.queue,
        "priority": new.priority,
    }


def _add_decided(
    attributes: dict[str, Any], created_at: datetime, next_run_at: datetime | None, meta: Any
) -> dict[str, Any]:
    """And what the database has decided."""
    if next_run_at is not None and next_run_at.tzinfo is not created_at.tzinfo:
        next_run_at = next_run_at.astimezone(created_at.tzinfo)
    attributes["created_at"] = attributes["updated_at"] = created_at
    attributes["next_run_at"] = next_run_at
    attributes["pending_since"] = created_at if attributes["status"] == _PENDING else None
    attributes["meta"] = meta
    return attributes


def _by_key(new: NewJob) -> tuple[str, ...]:
    scope = (new.tenant, new.organization or "")
    return (*scope, new.kind, new.idempotency_key or "", new.lock_key or "")


def _as_json(value: Any) -> str:
    return value.isoformat() if isinstance(value, datetime) else str(value)


@contextmanager
def _joining(using: str) -> Iterator[BaseDatabaseWrapper]:
    """A single statement that joins the caller's transaction, or is one of its own."""
    connection = connections[using]
    if connection.vendor == "postgresql" or connection.in_atomic_block:
        yield connection
        return
    with database.transaction(using) as own:
        yield own


# --- claiming -------------------------------------------------------------------------------------------


def claim(
    job_id: UUID,
    seq: int,
    redrives: int,
    owner: str,
    ttl: float,
    *,
    limit: Limit | None = None,
    early: bool = True,
) -> Job | Answer | None:
    """pending, or running without owner → running, epoch + 1, attempts + 1, for this delivery's identity.

    Never looks at any expiry. BUSY when the row is still claimable but locked: ask again. FULL when it is, and
    the `limit` of its kind and scope is reached: ask again later. EARLY, unless `early` is allowed: not due yet.
    None: refused for good.
    """
    identity = {"id": job_id, "seq": seq, "redrives": redrives, "early": early}
    if limit is not None:
        return _claim_within(limit, identity, owner, ttl)
    with database.statement(database.alias(), what="claim") as connection:
        return _claimed_by(connection, identity, owner, ttl)


def _claim_within(limit: Limit, identity: Mapping[str, Any], owner: str, ttl: float) -> Job | Answer | None:
    """The count and the claim are one transaction: it must see what the last holder of the lock has committed."""
    with database.transaction(database.alias(), what="claim") as connection:
        database.see_every_commit(connection)
        if not try_lock(capacity_lock(limit.names[0], limit.scope)):
            refusal = BUSY
        elif running_of_kind(limit.names, limit.scope) >= limit.most:
            refusal = FULL
        else:
            return _claimed_by(connection, identity, owner, ttl)
        return _refused(connection, identity, refusal)


def _claimed_by(
    connection: BaseDatabaseWrapper, identity: Mapping[str, Any], owner: str, ttl: float
) -> Job | Answer | None:
    rows = _CLAIM.run(connection, **identity, owner=owner, ttl=ttl)
    return _one(connection, rows) if rows else _refused(connection, identity, BUSY)


def _refused(connection: BaseDatabaseWrapper, identity: Mapping[str, Any], refusal: Answer) -> Answer | None:
    rows = _STILL_CLAIMABLE.run(connection, **identity)
    if not rows:
        return None
    [(is_due,)] = rows
    return refusal if is_due or identity["early"] else EARLY


def is_due(probes: Sequence[Probe], *, suspects: bool = True) -> bool:
    """Whether `claim_next` would find something, floors aside. A read: it takes no lock."""
    if not probes:
        return False
    connection = database.connection()
    return bool(_IS_DUE.run(connection, **_probed(probes), suspects=suspects))


def claim_next(
    owner: str, limit: int, probes: Sequence[Probe], *, suspects: bool = True, ahead: bool = False
) -> list[Claimed]:
    """pending or running without owner, due → running: never more than `limit`, highest priority first.

    `suspects=False` leaves out what was orphaned since its last commit. `ahead`: more than can begin at once;
    what was never redriven then has no heartbeat, and counts as begun only when a beat or a commit has come.
    """
    if not probes or limit < 1:
        return []
    using = database.alias()
    if limit == len(probes) == 1 and not ahead and connections[using].vendor == "postgresql":
        one = claim_one(owner, probes[0], suspects=suspects)
        return [] if one is None else [one]
    size = max(size for size in _CLAIM_SIZES if size <= limit)
    # Chance decides among equals: SQLite takes the probes as they come, and a backlog would starve the rest.
    ordered = sorted(probes, key=lambda probe: (-probe.priority, random.random()))
    with database.statement(using, what="claim_next") as connection:
        rows = _CLAIM_NEXT[size].run(
            connection,
            owner=owner,
            floors=[probe.floor for probe in ordered],
            ttls=[float(probe.ttl) for probe in ordered],
            suspects=suspects,
            ahead=ahead,
            **_probed(ordered),
        )
        jobs = _jobs(connection, rows)
    claimed = [Claimed(job, row[-1]) for job, row in zip(jobs, rows, strict=True)]
    # By the number: two ids are compared in Python.
    return sorted(claimed, key=lambda one: (-one.job.priority, one.job.id.int))


def claim_one(owner: str, probe: Probe, *, suspects: bool = True) -> Claimed | None:
    """As `claim_next`, for one job of one place (PostgreSQL)."""
    connection = database.connection()
    database.refuse_borrowed_on(connection, "claim_next")
    rows = _CLAIM_ONE.run(
        connection,
        owner=owner,
        suspects=suspects,
        queue=probe.queue,
        kind=probe.kind,
        priority=probe.priority,
        floor=probe.floor,
        ttl=float(probe.ttl),
    )
    if not rows:
        return None
    return Claimed(_jobs(connection, rows)[0], rows[0][-1])


def announce(
    route: Route,
    *,
    reach: float,
    ttl: float,
    limit: int,
    scope: Scope | None = None,
    tenant: str | None = None,
    counted: bool = True,
) -> list[Job]:
    """Claimable → claimable: the jobs of this place that a message is to be sent for now, the longest due first.

    Those due within `reach` seconds that were written for later than that, and those that nobody has come for
    in `ttl` seconds since they were due or last announced (`counted`: that is a lost delivery). Not what is
    paused or asked to end. Never waits: a locked row is left for the next time.
    """
    where = {"tenant": tenant, "organization": None} if scope is None else _in(scope)
    with database.statement(database.alias(), what="announce") as connection:
        rows = _ANNOUNCE.run(
            connection, queue=route.queue, kind=route.kind, priority=route.priority, reach=reach, ttl=ttl,
            batch=limit, counted=counted,
            **{**where, "any": where["tenant"] is None, "every": scope is None},
        )  # fmt: skip
        return _jobs(connection, rows)


def renew_plans() -> None:
    """Let the planner look at the table anew, and forget the plans that this connection has prepared (PostgreSQL).

    A plan that was made while the table was nearly empty is kept until then, and walks whatever has come since.
    """
    connection = database.connection()
    if connection.vendor == "postgresql":
        with connection.cursor() as cursor:
            cursor.execute("ANALYZE durable_jobs_job")
            cursor.execute("DEALLOCATE ALL")


def give_back(lease: Lease) -> Job | None:
    """running → pending with the same seq: claimed and not begun. Counts nothing."""
    with database.statement(database.alias(), what="give_back") as connection:
        return _one(connection, _GIVE_BACK.run(connection, **_named(lease)))


# --- the lease ------------------------------------------------------------------------------------------


def beat_many(owner: str, leases: Sequence[Lease]) -> dict[UUID, Beat]:
    """running → running: renew all leases of one owner in one statement that waits for no row.

    A row locked by somebody is not renewed but still mine. Each lease has its answer; a lost one is not mine.
    """
    if not leases:
        return {}
    with database.statement(database.alias(), what="beat", urgent=True) as connection:
        if connection.vendor == "sqlite":
            return _beats_on_sqlite(connection, owner, leases)
        ordered = sorted(leases, key=attrgetter("job_id.int"))
        texts = {ttl: str(ttl) for ttl in {lease.ttl for lease in leases}}
        rows = _BEAT_MANY.run(
            connection,
            owner=owner,
            ids=_array([lease.job_id.hex for lease in ordered]),
            epochs=_array([str(lease.epoch) for lease in ordered]),
            ttls=_array([texts[lease.ttl] for lease in ordered]),
        )
    beats = dict.fromkeys([lease.job_id for lease in leases], _RENEWED)
    beats.update((row[0], Beat(*row[1:])) for row in rows)
    return beats


def _beats_on_sqlite(
    connection: BaseDatabaseWrapper, owner: str, leases: Sequence[Lease]
) -> dict[UUID, Beat]:
    """One statement for all leases of one length: a process has few lengths, and a row costs its time."""
    lengths: dict[float, dict[str, int]] = {}
    for lease in leases:
        lengths.setdefault(lease.ttl, {})[lease.job_id.hex] = lease.epoch
    requested: dict[str, Any] = {}
    told: set[tuple[str, str]] = set()
    for ttl, held in lengths.items():
        given = {"owner": owner, "leases": json.dumps(held)}
        requested.update(_BEAT_MANY.run(connection, **given, ttl=ttl))
        told.update(_MAILED_OR_PAUSED.run(connection, **given))
    if not told and not any(requested.values()):
        return {lease.job_id: _RENEWED if lease.job_id.hex in requested else _LOST for lease in leases}
    return {
        lease.job_id: _LOST if lease.job_id.hex not in requested else Beat(
            renewed=True,
            mine=True,
            cancel=requested[lease.job_id.hex] is not None or (lease.job_id.hex, "mailed") in told,
            paused=(lease.job_id.hex, "paused") in told,
        )
        for lease in leases
    }  # fmt: skip


def asked_to_stop(owner: str) -> list[tuple[UUID, int, Beat]]:
    """(id, epoch, what a beat would tell) of this owner's running rows that are to be cancelled or paused.

    A read, which renews nothing. A row may come more than once.
    """
    rows = _ASKED_TO_STOP.run(database.connection(), owner=owner)
    return [
        (_uuid(job_id), epoch, Beat(renewed=False, mine=True, cancel=bool(cancel), paused=bool(paused)))
        for job_id, epoch, cancel, paused in rows
    ]


def strangers(owner: str, known: Collection[UUID]) -> list[tuple[UUID, int]]:
    """(id, epoch) of running rows of this owner that it does not know: claims whose reply was lost."""
    connection = database.connection()
    rows = _STRANGERS.run(connection, owner=owner, known=list(known))
    return [(_uuid(job_id), epoch) for job_id, epoch in rows]


def lock_fence(lease: Lease, idle_seconds: float) -> bool:
    """Lock the row for the transaction that is open; False when owner or epoch moved on.

    Owner and epoch suffice, past the expiry too, as long as nobody took the job. On PostgreSQL the
    transaction also gets an idle timeout, so that a half-dead peer cannot keep the row locked.
    """
    connection = database.connection()
    idle = str(max(1, int(idle_seconds * 1000)))
    return bool(_LOCK_FENCE.run(connection, **_named(lease), idle=idle))


def write_checkpoint(
    lease: Lease, checkpoint: str | Sentinel | None = KEEP, counts: Counts = NO_COUNTS
) -> bool | None:
    """running → running: a commit. Renews the lease, zeroes the limits used, stamps last_committed_at.

    Answers whether a cancel was requested; None when owner or epoch moved on.
    """
    with database.statement(database.alias(), what="save_checkpoint") as connection:
        rows = _WRITE_CHECKPOINT.run(
            connection,
            **_named(lease),
            **_laid_over(counts),
            ttl=lease.ttl,
            keep_checkpoint=checkpoint is KEEP,
            checkpoint=None if checkpoint is KEEP else checkpoint,
        )
    return rows[0][0] is not None if rows else None


def set_progress(lease: Lease, counts: Counts) -> bool | None:
    """running → running: counts and message; renews nothing. Answers as `write_checkpoint`."""
    with database.statement(database.alias(), what="progress") as connection:
        rows = _SET_PROGRESS.run(connection, **_named(lease), **_laid_over(counts))
    return rows[0][0] is not None if rows else None


# --- the end of a slice ---------------------------------------------------------------------------------


def yield_slice(
    lease: Lease, after: float = 0.0, *, interrupted: bool = False, counts: Counts = NO_COUNTS
) -> Job | None:
    """running → pending with seq + 1, due in `after` seconds. No failure; `interrupted` counts a drain."""
    with database.statement(database.alias(), what="yield") as connection:
        rows = _YIELD_SLICE.run(
            connection, **_named(lease), **_laid_over(counts), delay=after, interrupted=int(interrupted)
        )
        return _one(connection, rows)


def fail_slice(
    lease: Lease,
    facts: ErrorFacts,
    *,
    max_failures: int,
    first_delay: float,
    longest_delay: float,
    exponential: bool,
    counts: Counts = NO_COUNTS,
) -> Job | None:
    """running → running without owner, next_run_at set, one failure more, the verdict decided here.

    Unrecoverable: verdict at once, whatever the count. Terminal, or the count at its limit:
    retry_exhausted. A verdict on the row is never taken back. Seq and redrives stay, so the same delivery
    can claim again.
    """
    with database.statement(database.alias(), what="fail") as connection:
        rows = _FAIL_SLICE.run(
            connection,
            **_named(lease),
            **_laid_over(counts),
            **_error(facts),
            max_failures=max_failures,
            first=first_delay,
            longest=longest_delay,
            exponential=exponential,
        )
        return _one(connection, rows)


def release_lease(lease: Lease, delay: float, *, cut_off: bool = False) -> Job | None:
    """running → running without owner, due in `delay` seconds. Counts nothing; `cut_off` counts an orphaning."""
    with database.statement(database.alias(), what="release") as connection:
        rows = _RELEASE_LEASE.run(connection, **_named(lease), delay=delay, cut_off=int(cut_off))
        return _one(connection, rows)


# --- terminal: called inside the one transaction of lifecycle -------------------------------------------


def complete(lease: Lease, result: str | None, counts: Counts = NO_COUNTS) -> Job | None:
    """running → completed. Owner and epoch, and no verdict on the row."""
    connection = database.connection()
    rows = _COMPLETE.run(connection, **_named(lease), **_laid_over(counts), result=result, mirrored=True)
    return _one(connection, rows)


def complete_many(owner: str, ended: Sequence[tuple[Lease, str | None]]) -> set[UUID]:
    """running → completed, many leases of one owner, each with its result; the ids of those that were.

    Waits for no row. What somebody has locked, has taken, or has put a verdict on is missing from the answer:
    complete it alone, which waits or says why. Call it inside the one transaction of the batch.
    """
    connection = database.connection()
    return {_uuid(row[0]) for row in _COMPLETE_MANY.run(connection, **_together(connection, owner, ended))}


def complete_many_whole(owner: str, ended: Sequence[tuple[Lease, str | None]]) -> dict[UUID, Job]:
    """running → completed, as `complete_many`; answers the rows as it left them, by id."""
    connection = database.connection()
    rows = _COMPLETE_MANY_WHOLE.run(connection, **_together(connection, owner, ended))
    return {job.id: job for job in _jobs(connection, rows)}


def _together(
    connection: BaseDatabaseWrapper, owner: str, ended: Sequence[tuple[Lease, str | None]]
) -> dict[str, Any]:
    if connection.vendor == "sqlite":
        leases = [[lease.job_id.hex, lease.epoch, result] for lease, result in ended]
        return {"owner": owner, "leases": json.dumps(leases, ensure_ascii=False), "mirrored": True}
    has_results = any(result is not None for _, result in ended)
    return {
        "owner": owner,
        "ids": _array([lease.job_id.hex for lease, _ in ended]),
        "epochs": _array([str(lease.epoch) for lease, _ in ended]),
        "results": [result for _, result in ended] if has_results else _array(["NULL"] * len(ended)),
        "mirrored": True,
    }


def fail_terminal(
    job_id: UUID, epoch: int, facts: ErrorFacts | None = None, *, parked: bool = False
) -> Job | None:
    """running → failed (with `parked` it waits for a human). Epoch alone: the lease may be let go already."""
    connection = database.connection()
    rows = _FAIL_TERMINAL.run(
        connection, id=job_id, epoch=epoch, parked=parked, mirrored=True, **_error(facts)
    )
    return _one(connection, rows)


def cancel_running(job_id: UUID, epoch: int, counts: Counts = NO_COUNTS) -> Job | None:
    """running → cancelled, by epoch alone. A step that cancels itself stamps the request."""
    connection = database.connection()
    job = _one(
        connection,
        _CANCEL_RUNNING.run(connection, id=job_id, epoch=epoch, mirrored=True, **_laid_over(counts)),
    )
    return _emptied(connection, job)


def cancel_waiting(job_id: UUID, *, mirrored: bool = True) -> Job | None:
    """pending, held, or running without owner → cancelled, if a cancel was requested."""
    connection = database.connection()
    return _emptied(
        connection, _one(connection, _CANCEL_WAITING.run(connection, id=job_id, mirrored=mirrored))
    )


def _emptied(connection: BaseDatabaseWrapper, job: Job | None) -> Job | None:
    if job is not None:
        _EMPTY_MAILBOX.run(connection, id=job.id)
    return job


def request_cancel(
    job_id: UUID, *, scope: Scope | None, actor: str = "", user: Any = None, reason: str = ""
) -> str | None:
    """live or held → the same, with the first request's time and user: `stamped`.

    Never waits: a locked row gets a line in the mailbox: `posted`. None: no such live job in that scope.
    `scope=None` means whatever scope.
    """
    connection = database.connection()
    rows = _REQUEST_CANCEL.run(connection, id=job_id, **_in(scope), actor=actor, user=user, reason=reason)
    return rows[0][0] if rows else None


def fold_cancel(job_id: UUID) -> Job | None:
    """live or held → the same: a mailed cancel request is stamped on the row, if nobody holds it."""
    connection = database.connection()
    job = _one(connection, _FOLD_CANCEL.run(connection, id=job_id))
    return _emptied(connection, job)


# --- repair ---------------------------------------------------------------------------------------------

_FIRST = UUID(int=0)
_LONG_AGO = datetime(1970, 1, 1, tzinfo=UTC)


def orphans(
    grace: float, after: UUID | None = None, *, batch: int = 100, tenant: str | None = None
) -> list[Orphan]:
    """Up to `batch` running rows with an owner whose lease ran out more than `grace` seconds ago, by id.

    Locks nothing. Go on with the last id of the page, so that rows that cannot be settled never fill it.
    Orphans of paused work are left out unless they are to be cancelled; `tenant=None` means every tenant.
    """
    connection = database.connection()
    rows = _ORPHANS.run(connection, grace=grace, **_swept(after, batch, tenant))
    return [_orphan(connection, row) for row in rows]


def dead_leases(owner: str) -> list[Orphan]:
    """The running rows of an owner whose process is known to have ended (its supervisor has reaped it)."""
    connection = database.connection()
    return [_orphan(connection, row) for row in _DEAD_LEASES.run(connection, owner=owner)]


def _orphan(connection: BaseDatabaseWrapper, row: Sequence[Any]) -> Orphan:
    job_id, kind, tenant, organization, owner, epoch, expires, cancel, verdict, redrives, overdue, begun = row
    return Orphan(
        _uuid(job_id), kind, tenant, organization, owner, epoch, database.moment_of(connection, expires),
        bool(cancel), verdict, redrives, float(overdue), bool(begun),
    )  # fmt: skip


def cancelling(after: UUID | None = None, *, batch: int = 100, tenant: str | None = None) -> list[Waiting]:
    """Up to `batch` jobs with a cancel request that nobody works on, by id.

    Pending, held, or waiting for a retry; a running one is its owner's to end, or an orphan.
    """
    connection = database.connection()
    rows = _CANCELLING.run(connection, **_swept(after, batch, tenant))
    return [Waiting(_uuid(job_id), kind, float(asked)) for job_id, kind, asked in rows]


def mailed(after: UUID | None = None, *, batch: int = 100, tenant: str | None = None) -> list[UUID]:
    """Up to `batch` ids of live or held jobs with a request in the mailbox, by id."""
    connection = database.connection()
    return [_uuid(row[0]) for row in _MAILED.run(connection, **_swept(after, batch, tenant))]


def holders(job_id: UUID) -> list[str] | None:
    """Who holds the row's lock just now, in words; empty when that cannot be told, None when nobody does."""
    connection = database.connection()
    if _IS_FREE.run(connection, id=job_id):
        return None
    rows = _HOLDERS.run(connection, id=job_id)
    return [f"pid {pid} ({state}, transaction open for {age:.0f} s)" for pid, state, age in rows]


def take_orphan(
    orphan: Orphan, *, grace: float, delay: float, dead: bool = False, counted: bool = True
) -> Job | None:
    """orphan of work that is not paused → pending, epoch + 1, redrives + 1, due in `delay` seconds.

    Every condition is restated: epoch, expiry, no verdict, no cancel. `dead`: the owner's process is known
    to have ended, which stands in for expiry and grace. Without `counted` only what has not begun, and it uses
    up no limit.
    """
    connection = database.connection()
    rows = _TAKE_ORPHAN.run(
        connection, **_orphaned(orphan, grace, dead), delay=delay, orphanings=int(counted)
    )
    return _one(connection, rows)


def park_orphan(
    orphan: Orphan, *, grace: float, code: str, message: str, dead: bool = False, mirrored: bool = True
) -> Job | None:
    """orphan of work that is not paused → failed and parked with `code`; everything restated, no cancel."""
    connection = database.connection()
    rows = _PARK_ORPHAN.run(
        connection, **_orphaned(orphan, grace, dead), code=code, message=message, mirrored=mirrored
    )
    return _one(connection, rows)


def cancel_orphan(orphan: Orphan, *, grace: float, dead: bool = False, mirrored: bool = True) -> Job | None:
    """orphan with a cancel request → cancelled; a lease renewed since it was seen is left alone."""
    connection = database.connection()
    job = _one(
        connection, _CANCEL_ORPHAN.run(connection, **_orphaned(orphan, grace, dead), mirrored=mirrored)
    )
    return _emptied(connection, job)


def redrive(
    job_id: UUID,
    *,
    scope: Scope | None,
    grace: float,
    delay: float = 0.0,
    forced: bool = False,
    restart: bool = False,
    failed_before: datetime | None = None,
) -> Job | Answer | None:
    """failed, orphaned, or waiting for its retry → pending, redrives + 1, epoch + 1, limits reset.

    With `failed_before` only what failed before that moment.
    BUSY when another live job holds the lock key: the index has the last word. None: not redrivable
    (or locked, or unrecoverable and not forced).
    """
    answer = _taking(
        _REDRIVE, id=job_id, **_in(scope), grace=grace, delay=delay, forced=forced, restart=restart,
        failed_before=failed_before,
    )  # fmt: skip
    return _emptied(database.connection(), answer) if isinstance(answer, Job) else answer


def settle(job_id: UUID, *, scope: Scope | None, grace: float) -> Job | None:
    """A live job whose hooks failed → cancelled, if that was requested, else failed; not marked as mirrored."""
    connection = database.connection()
    job = _one(connection, _SETTLE.run(connection, id=job_id, **_in(scope), grace=grace))
    return _emptied(connection, job)


def bump_mirror_attempts(job_id: UUID, epoch: int) -> bool:
    """Count a failed hook, on the connection whose savepoint has just been rolled back.

    Never waits: on a row that somebody has taken since, it is not counted.
    """
    connection = database.connection()
    return _BUMP_MIRROR.count(connection, id=job_id, epoch=epoch) > 0


def set_idempotency_key(job_id: UUID, key: str) -> bool:
    """Give a job that has no key one, in the transaction that made it; False when another job has it already."""
    connection = database.connection()
    try:
        with Atomic(connection.alias, savepoint=True, durable=False):
            return _SET_IDEMPOTENCY_KEY.count(connection, id=job_id, idempotency_key=key) > 0
    except IntegrityError as error:
        if "durable_jobs_idempotency" not in str(error):
            raise
        return False


def set_delivery(job_id: UUID, seq: int, redrives: int, queue_job_id: str) -> bool:
    """Record the broker's id of the message for the row's current delivery; False, too, while the row is locked."""
    with _joining(database.alias()) as connection:
        return (
            _SET_DELIVERY.count(connection, id=job_id, seq=seq, redrives=redrives, queue_job_id=queue_job_id)
            > 0
        )


# --- work that is owned by hand: an unexpired lease, or nothing ------------------------------------------


class Image(NamedTuple):
    """A row as it is for this transaction, with what decides who may write it."""

    job: Job
    row: tuple[Any, ...]
    """The columns as the driver gives them: equal exactly when nothing changed."""
    current: bool
    """The lease has not run out."""
    requested: bool
    """A cancel was requested, on the row or in the mailbox."""
    database: str
    """Which database it was read from, by its own word."""
    temporary: bool
    """Read from a temporary table that hides the real one."""


def insert_running(new: NewJob, owner: str, ttl: float) -> Job | None:
    """→ running, epoch 1, owned from the start. None when the idempotency key is taken.

    Inside a transaction of the caller's. It may wait there for a rival that holds the same key.
    """
    connection = database.connection()
    if not _INSERT_RUNNING.run(connection, **_new_columns(new), owner=owner, ttl=ttl):
        return None
    # A statement that waited has set its lease before the wait.
    return _one(connection, _EXTEND.run(connection, id=new.id, owner=owner, epoch=1, ttl=ttl))


def release_held(job_id: UUID, *, scope: Scope | None) -> Job | Answer | None:
    """held → pending, due now, if its input is the one it was made with.

    BUSY when another live job holds the lock key. None: not held, or locked, or changed, or of the queue that
    no worker serves.
    """
    return _taking(_RELEASE_HELD, id=job_id, **_in(scope), manual=MANUAL_QUEUE)


def claim_held(job_id: UUID, *, scope: Scope, owner: str, ttl: float) -> Job | Answer | None:
    """held, or running without verdict and with a lease that ran out → running, epoch + 1, attempts + 1.

    Only if its input is the one it was made with.
    Keeps checkpoint, progress and a cancel request. BUSY when another live job holds the lock key. None: not
    so, or locked, or of another scope.
    """
    return _taking(_CLAIM_HELD, id=job_id, **_in(scope), owner=owner, ttl=ttl)


def retry_claim(job_id: UUID, epoch: int, owner: str, ttl: float) -> Job | Answer | None:
    """failed, cancelled, or running with a lease that ran out → running, epoch + 1, attempts + 1.

    Clears the outcome, the cancel request and the limits used; keeps checkpoint and input. The caller has
    locked the row and read this epoch. BUSY when another live job holds the lock key.
    """
    answer = _taking(_RETRY_CLAIM, id=job_id, epoch=epoch, owner=owner, ttl=ttl)
    return _emptied(database.connection(), answer) if isinstance(answer, Job) else answer


def _taking(statement: Statement, **values: Any) -> Job | Answer | None:
    """A transition that makes a job live: the index on lock keys has the last word, in a savepoint."""
    connection = database.connection()
    try:
        with OwnAtomic(connection.alias, savepoint=True, durable=False):
            return _one(connection, statement.run(connection, **values))
    except IntegrityError as error:
        if "durable_jobs_one_live" not in str(error):
            raise
        return BUSY


def lock_row(job_id: UUID) -> bool:
    """Wait for the row and lock it for the open transaction (on SQLite that has the whole file)."""
    return bool(_LOCK_ROW.run(database.connection(), id=job_id))


def image(job_id: UUID, using: str | None = None) -> Image | None:
    """The row as the open transaction sees it; locks and writes nothing. One query."""
    connection = database.connection(using)
    rows = _IMAGE.run(connection, id=job_id)
    if not rows:
        return None
    width = len(Job._meta.concrete_fields)
    current, requested, name, temporary = rows[0][width:]
    job = _jobs(connection, rows)[0]
    return Image(
        job, tuple(rows[0][:width]), bool(current), requested is not None, str(name), bool(temporary)
    )


def renew(lease: Lease) -> Job | Answer | None:
    """running → running: a new expiry for a lease that has not run out; takes a mailed cancel request over.

    Never waits: BUSY when the lease is good and somebody has locked the row.
    """
    with database.statement(database.alias(), what="heartbeat", urgent=True) as connection:
        rows = _RENEW.run(connection, **_named(lease), ttl=lease.ttl)
        if rows:
            return _one(connection, rows)
        return BUSY if _STILL_CURRENT.run(connection, **_named(lease)) else None


def set_percent(lease: Lease, percent: float) -> bool:
    """running → running: progress in percent, under a lease that has not run out; renews nothing."""
    with database.statement(database.alias(), what="update_progress") as connection:
        return bool(_SET_PERCENT.run(connection, **_named(lease), percent=percent))


def keep_checkpoint(lease: Lease, checkpoint: str) -> bool:
    """running → running: the checkpoint, under a lease that has not run out; renews nothing."""
    with database.statement(database.alias(), what="checkpoint") as connection:
        return bool(_KEEP_CHECKPOINT.run(connection, **_named(lease), checkpoint=checkpoint))


def complete_owned(lease: Lease, result: str | None, *, late: bool) -> Job | None:
    """running → completed, under a lease that has not run out; without `late` only if no cancel was requested."""
    connection = database.connection()
    rows = _COMPLETE_OWNED.run(connection, **_named(lease), result=result, late=late, mirrored=True)
    return _one(connection, rows)


def fail_owned(lease: Lease, facts: ErrorFacts, result: str | None = None) -> Job | None:
    """running → failed, under a lease that has not run out; `result` is the receipt of the outcome."""
    connection = database.connection()
    rows = _FAIL_OWNED.run(connection, **_named(lease), **_error(facts), result=result, mirrored=True)
    return _one(connection, rows)


def cancel_owned(
    lease: Lease, *, stopped: bool = False, message: str | None = None, result: str | None = None
) -> Job | None:
    """running → cancelled, under a lease that has not run out, if a cancel was requested (or `stopped`)."""
    connection = database.connection()
    rows = _CANCEL_OWNED.run(
        connection, **_named(lease), stopped=stopped, error_message=message, result=result, mirrored=True
    )
    return _emptied(connection, _one(connection, rows))


# --- capacity: one lock for one count, in a transaction of READ COMMITTED ---------------------------------


def try_lock(name: str) -> bool:
    """Take the lock of this name for the open transaction, or say that somebody has it (SQLite: always ours)."""
    return bool(_TRY_LOCK.run(database.connection(), lock_name=name)[0][0])


def wait_lock(name: str) -> None:
    """Wait for the lock of this name, before any row is locked."""
    _WAIT_LOCK.run(database.connection(), lock_name=name)


def running_of_kind(names: Sequence[str], scope: Scope, *, except_id: UUID | None = None) -> int:
    """Running jobs with an owner of a kind, by all its names, in one scope; dead leases count."""
    rows = _COUNT_OF_KIND.run(
        database.connection(), names=list(names), except_id=except_id or _FIRST, **_in(scope)
    )
    return int(rows[0][0])


def running_by_hand(scope: Scope, *, except_id: UUID | None = None) -> int:
    """Running jobs with an owner that belong to managers of the scope; dead leases count."""
    rows = _COUNT_BY_HAND.run(
        database.connection(), manual=MANUAL_QUEUE, except_id=except_id or _FIRST, **_in(scope)
    )
    return int(rows[0][0])


def due_scopes(probe: Probe, full: Collection[Scope], *, suspects: bool = True) -> list[Scope]:
    """Scopes with due jobs at this place, the longest due first among 500, without those that are full."""
    rows = _DUE_SCOPES.run(
        database.connection(), queue=probe.queue, kind=probe.kind, priority=probe.priority,
        suspects=suspects, full=[_scope_key(scope) for scope in full],
    )  # fmt: skip
    return [Scope(*row) for row in rows]


def claim_limited(
    owner: str,
    limit: int,
    probe: Probe,
    scope: Scope,
    names: Sequence[str],
    most: int,
    *,
    suspects: bool = True,
) -> tuple[list[Job], int] | None:
    """Due jobs of one limited kind and scope → running, so that no more than `most` run with an owner.

    Answers the jobs and how many more may run; None when somebody else is counting just now. A transaction
    of its own: the count must see what the last holder of the lock has committed.
    """
    with database.transaction(database.alias(), what="claim_limited") as connection:
        database.see_every_commit(connection)
        if not try_lock(capacity_lock(names[0], scope)):
            return None
        room = most - running_of_kind(names, scope)
        if room < 1:
            return [], 0
        rows = _CLAIM_LIMITED.run(
            connection, owner=owner, queue=probe.queue, kind=probe.kind, priority=probe.priority,
            ttl=float(probe.ttl), tenant=scope.tenant, organization=scope.organization,
            batch=min(limit, room), suspects=suspects,
        )  # fmt: skip
        jobs = _jobs(connection, rows)
    return jobs, room - len(jobs)


def capacity_lock(kind: str, scope: Scope) -> str:
    """The name of the lock under which running jobs of a kind and scope are counted."""
    return json.dumps(["durable_jobs", kind, scope.tenant, scope.organization])


def limit_of(kind: Kind, scope: Scope) -> Limit | None:
    """The limit of a kind in a scope; None: as many as there are."""
    if kind.max_running is None:
        return None
    return Limit(kind.all_names, scope, kind.max_running)


def _scope_key(scope: Scope) -> str:
    return f"{len(scope.tenant)}:{scope.tenant}:{scope.organization or ''}"


# --- candidates -----------------------------------------------------------------------------------------


class Sized(NamedTuple):
    """A row that a page may take: its id is withheld when it is bigger than was allowed."""

    id: UUID | None
    size: int
    created_at: datetime


def candidate_sizes(
    scope: Scope, kind: str, *, status: str | None, after: tuple[datetime, UUID] | None, limit: int, cap: int
) -> list[Sized]:
    """The next `limit` rows of a kind and scope by (created_at, id): sizes in bytes, no contents."""
    connection = database.connection()
    created, after_id = after or (_LONG_AGO, _FIRST)
    rows = _CANDIDATES.run(
        connection, tenant=scope.tenant, organization=scope.organization, kind=kind, any=status is None,
        status=status or "", created=created, after_id=after_id, batch=limit, cap=cap,
    )  # fmt: skip
    return [
        Sized(
            None if row_id is None else _uuid(row_id), int(size), database.moment_of(connection, created_at)
        )
        for row_id, size, created_at in rows
    ]


def candidates(scope: Scope, kind: str, ids: Sequence[UUID]) -> list[Job]:
    """These rows of a kind and scope, whole, by (created_at, id)."""
    connection = database.connection()
    return _jobs(connection, _CHOSEN.run(connection, ids=list(ids), kind=kind, **_in(scope)))


# --- history, workers -----------------------------------------------------------------------------------


def add_event(
    job: Job,
    event: str,
    *,
    owner: str = "",
    actor: str = "",
    actor_id: str | None = None,
    reason: str = "",
    operation_id: str | None = None,
    code: str = "",
    error_type: str = "",
    message: str = "",
    traceback: str = "",
    data: Any = None,
) -> None:
    """Append a line to the job's history, in the transaction of the change that it tells."""
    connection = database.connection()
    _ADD_EVENT.run(
        connection,
        id=job.id,
        event=event,
        kind=job.kind,
        tenant=job.tenant_id,
        organization=job.organization_id,
        epoch=job.lease_epoch,
        seq=job.continuation_seq,
        owner=owner,
        actor=actor,
        actor_id=actor_id,
        reason=reason,
        operation_id=operation_id,
        code=code,
        error_type=error_type,
        message=message,
        traceback=traceback,
        data=None if data is None else json.dumps(data),
        release=config.RELEASE,
    )


def prune_batch(
    *,
    ended_before: datetime,
    statuses: Collection[str],
    after: tuple[datetime, UUID],
    batch: int,
    budget: int,
) -> list[Job]:
    """completed, cancelled or failed → gone: up to `batch` jobs that ended before a moment, by (finished_at, id).

    Inside the caller's transaction, and never a job that has not ended. Together they hold little more than
    `budget` characters of text. Rows that somebody holds are passed over. Go on `after` the last (finished_at, id); the answer
    is empty when nothing is left. Delete their events with `prune_events` until none is left.
    """
    connection = database.connection()
    rows = _PRUNE_BATCH.run(
        connection, ended_before=ended_before, statuses=list(statuses), after_time=after[0], after_id=after[1],
        batch=batch, budget=budget,
    )  # fmt: skip
    jobs = sorted(_jobs(connection, rows), key=lambda job: (job.finished_at, job.id))
    if jobs:
        _PRUNE_MAIL.run(connection, ids=[job.id for job in jobs])
    return jobs


def prune_events(job_ids: Collection[UUID], batch: int) -> list[JobEvent]:
    """Delete up to `batch` events of these jobs, in the transaction that has deleted the jobs."""
    connection = database.connection()
    rows = _PRUNE_EVENTS.run(connection, ids=list(job_ids), batch=batch)
    events = database.loader(JobEvent, connection).load(connection, rows)
    return sorted(events, key=lambda event: event.id)


def worker_started(
    owner: str, *, host: str, pid: int, queues: Sequence[str], kinds: Sequence[str], concurrency: int
) -> None:
    """Put this process on the operators' screen."""
    with database.statement(database.alias(), what="worker_started") as connection:
        _WORKER_STARTED.run(
            connection, owner=owner, host=host, pid=pid, queue=json.dumps(list(queues)),
            kind=json.dumps(list(kinds)), concurrency=concurrency, release=config.RELEASE,
        )  # fmt: skip


def worker_beat(owner: str) -> bool:
    """Say that this process is alive; False when its row has gone (register again)."""
    with database.statement(database.alias(), what="worker_beat") as connection:
        return _WORKER_BEAT.count(connection, owner=owner) > 0


def worker_stopped(owner: str) -> None:
    """Take this process off the screen."""
    with database.statement(database.alias(), what="worker_stopped") as connection:
        _WORKER_STOPPED.run(connection, owner=owner)


def forget_workers(silent_seconds: float) -> None:
    """Take processes off the screen that have been silent for so long."""
    with database.statement(database.alias(), what="forget_workers") as connection:
        _FORGET_WORKERS.run(connection, grace=silent_seconds)


def pause(
    *,
    queue: str = "",
    kind: str = "",
    tenant: str = "",
    reason: str,
    actor: str,
    actor_id: str | None = None,
) -> None:
    """Stop new claims of what matches (blank matches everything); again: the reason is replaced."""
    what = {"queue": queue, "kind": kind, "tenant": tenant}
    with database.joined(database.alias()):
        _PAUSE.run(database.connection(), **what, reason=reason, actor=actor)
        _add_event_of_a_pause("paused", what, reason=reason, actor=actor, actor_id=actor_id)


def unpause(
    *, queue: str = "", kind: str = "", tenant: str = "", actor: str = "", actor_id: str | None = None
) -> bool:
    """Take away the pause of exactly this queue, kind and tenant; False when there is none."""
    what = {"queue": queue, "kind": kind, "tenant": tenant}
    with database.joined(database.alias()):
        if not _UNPAUSE.count(database.connection(), **what):
            return False
        _add_event_of_a_pause("unpaused", what, reason="", actor=actor, actor_id=actor_id)
    return True


def _add_event_of_a_pause(
    event: str, what: dict[str, str], *, reason: str, actor: str, actor_id: str | None
) -> None:
    of_a_job = dict.fromkeys(("id", "organization", "epoch", "seq", "operation_id"))
    blank = dict.fromkeys(("owner", "code", "error_type", "traceback"), "")
    _ADD_EVENT.run(
        database.connection(),
        **of_a_job,
        **blank,
        event=event,
        kind=what["kind"],
        tenant=what["tenant"],
        actor=actor,
        actor_id=actor_id,
        reason=reason,
        message=", ".join(f"{name} {value}" for name, value in what.items() if value) or "all work",
        data=json.dumps(what),
        release=config.RELEASE,
    )


def leased(*, queue: str = "", kind: str = "", tenant: str = "") -> int:
    """How many matching jobs are running under a live lease."""
    connection = database.connection()
    return int(_LEASED.run(connection, queue=queue, kind=kind, tenant=tenant)[0][0])


def seconds_held(job: Job, until: datetime | None = None) -> float | None:
    """Seconds from a job's last claim to the statement that answered this row, or to an earlier moment."""
    if job.claimed_at is None:
        return None
    return round(max(0.0, ((until or job.updated_at) - job.claimed_at).total_seconds()), 3)


def now() -> datetime:
    """The database's clock, which judges leases and schedules."""
    return database.clock()


def now_and_pauses() -> tuple[datetime, list[Pause]]:
    """The database's clock, and the pauses that are set, oldest first: one look."""
    connection = database.connection()
    rows = _NOW_AND_PAUSES.run(connection)
    pauses = [row[1:] for row in rows if row[1] is not None]
    loaded = database.loader(Pause, connection).load(connection, pauses)
    return database.moment_of(connection, rows[0][0]), loaded


# --- parameters -----------------------------------------------------------------------------------------


def _new_columns(new: NewJob) -> dict[str, Any]:
    values = dict(zip(_MANY_NAMES, _MANY_VALUES(new), strict=True))
    del values["created_by"]
    return values


def _named(lease: Lease) -> dict[str, Any]:
    return {"id": lease.job_id, "owner": lease.owner, "epoch": lease.epoch}


def _laid_over(counts: Counts) -> dict[str, Any]:
    return {
        "processed": counts.processed,
        "keep_total": counts.total is KEEP,
        "total": None if counts.total is KEEP else counts.total,
        "message": counts.message,
    }


def _probed(probes: Sequence[Probe]) -> dict[str, Any]:
    return {
        "queues": [probe.queue for probe in probes],
        "kinds": [probe.kind for probe in probes],
        "priorities": [probe.priority for probe in probes],
        "probes": [[probe.queue, probe.kind, probe.priority, probe.ttl] for probe in probes],
    }


def _error(facts: ErrorFacts | None) -> dict[str, Any]:
    if facts is None:
        return {"error_class": None, "code": None, "error_type": None, "error_message": None}
    return {
        "error_class": str(facts.error_class),
        "code": facts.code,
        "error_type": facts.type,
        "error_message": facts.message,
    }


def _array(values: Iterable[str]) -> str:
    """Numbers or hexadecimal ids as PostgreSQL writes an array: of a list psycopg would look at each value."""
    return "{" + ",".join(values) + "}"


def _in(scope: Scope | None) -> dict[str, Any]:
    if scope is None:
        return {"any": True, "tenant": "", "organization": None}
    return {"any": False, "tenant": scope.tenant, "organization": scope.organization}


def _swept(after: UUID | None, batch: int, tenant: str | None) -> dict[str, Any]:
    return {
        "after_id": after or _FIRST,
        "batch": batch,
        "any": tenant is None,
        "tenant": tenant or "",
        "manual": MANUAL_QUEUE,
    }


def _orphaned(orphan: Orphan, grace: float, dead: bool) -> dict[str, Any]:
    return {
        "id": orphan.id,
        "epoch": orphan.epoch,
        "grace": grace,
        "dead_owner": orphan.owner if dead else None,
    }
