"""What the tests of this folder have in common: contexts, jobs that are owned, and everything that is stored."""

from __future__ import annotations

import itertools
import time
from typing import Any
from uuid import UUID

from django.db import connection

from durable_jobs import receipts, store
from durable_jobs.models import Job, Scope
from durable_jobs.receipts import ExecutionContext
from tests.models import Shipment
from tests.store import rows

HOME = Scope("acme", "north")
KIND = "tests.repair"
INPUT = '{"shipment": 7}'
RECEIPT = '{"moved": 1.50}'

_numbers = itertools.count(1)


def new_key() -> str:
    return f"key {next(_numbers)}"


def context(key: str | None = None, *, seconds: float = 10.0, **given: Any) -> ExecutionContext:
    """A context that has `seconds` left; by default for a key of its own."""
    facts = {"scope": HOME, "actor": "anna", "kind": KIND, "idempotency_key": key or new_key()}
    return ExecutionContext(deadline=time.monotonic() + seconds, **{**facts, **given})


def owned(*, lease_seconds: float = 30.0, input: str = INPUT, **given: Any) -> ExecutionContext:
    """A running job, and the context that may write it; a short lease begins when all of that is there."""
    begun = receipts.begin(context(**given), input, lease_seconds=max(lease_seconds, 5.0))
    assert begun.ctx is not None
    if lease_seconds < 5.0:
        write(begun.job.id, "lease_expires_at", rows.ahead(lease_seconds))
    return begun.ctx


def job_of(ctx: ExecutionContext) -> Job:
    assert ctx.fence is not None
    return read(ctx.fence.lease.job_id)


def read(job_id: UUID) -> Job:
    job = store.get(job_id)
    assert job is not None
    return job


def ended(status: str = "failed", **given: Any) -> Job:
    """A job that ended so, with an authentic input, and a checkpoint on it."""
    ctx = owned(**given)
    assert ctx.fence is not None
    store.keep_checkpoint(ctx.fence.lease, '{"at": 3}')
    if status == "completed":
        receipts.complete_atomically(ctx, lambda _: RECEIPT)
    else:
        if status == "cancelled":
            store.request_cancel(ctx.fence.lease.job_id, scope=None)
        outcome = receipts.AttemptOutcome(status, "no route")  # type: ignore[arg-type]
        answer = receipts.finalize_atomically(ctx, outcome, lambda _: RECEIPT)
        assert isinstance(answer, receipts.Finalized), answer
    return job_of(ctx)


def expired(**given: Any) -> ExecutionContext:
    """A context whose lease has run out."""
    ctx = owned(**given)
    age(job_of(ctx).id)
    return ctx


def age(job_id: UUID, seconds: float = 1.0) -> None:
    """Let the lease have run out so long ago."""
    rows.execute("UPDATE durable_jobs_job SET lease_expires_at = %s WHERE id = %s", rows.ago(seconds), job_id)


def write(job_id: UUID, column: str, value: Any) -> None:
    """Change a column by raw SQL, as somebody with a database shell would."""
    rows.execute(f"UPDATE durable_jobs_job SET {column} = %s WHERE id = %s", value, job_id)


def tamper(job_id: UUID) -> None:
    """Change the input and not its hash."""
    write(job_id, "input", '{"shipment": 8}')


def ship(note: str = "moved") -> str:
    """The domain change of these tests, with its receipt."""
    Shipment.objects.create(status="arrived", note=note)
    return RECEIPT


def shipments() -> list[tuple[Any, ...]]:
    return list(Shipment.objects.order_by("id").values_list("id", "status", "note"))


def everything() -> tuple[Any, ...]:
    """Every byte of every job with its history and mailbox, and of the project's rows."""
    return rows.stored(), shipments()


def lock_policy() -> tuple[Any, ...]:
    """What the connection waits for a lock just now."""
    if connection.vendor == "sqlite":
        return rows.execute("PRAGMA busy_timeout")[0]
    names = ("lock_timeout", "statement_timeout", "idle_in_transaction_session_timeout")
    return rows.execute(f"SELECT {', '.join(f'current_setting({name!r})' for name in names)}")[0]
