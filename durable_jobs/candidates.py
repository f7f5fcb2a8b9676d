"""Jobs to choose from, a bounded page at a time: what a domain service reads before it claims or retries one."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Final
from uuid import UUID

from django.core import signing

from durable_jobs import bounded, database, store
from durable_jobs.conf import config
from durable_jobs.exceptions import InvalidInput, ScopeMismatch, plain_text
from durable_jobs.models import Job, Scope, Status
from durable_jobs.receipts import ExecutionContext

CURSOR_SALT: Final = "durable_jobs.candidates"
CURSOR_VERSION: Final = 1
LARGEST_PAGE: Final = 100
LARGEST_PAYLOAD: Final = 1_048_576


@dataclass(frozen=True)
class CandidateQuery:
    """Which jobs to look at: of one kind and scope, on behalf of one actor; `status` None is any.

    `limit` 1 to 100 rows, each of at most `max_payload_bytes` (1 to 1,048,576) bytes in all its text columns.
    `cursor` is the one of the page before, of the very same query.
    """

    kind: str
    actor: str
    scope: Scope | None = None
    status: str | None = None
    limit: int = 25
    max_payload_bytes: int = 262_144
    cursor: str | None = None


@dataclass(frozen=True)
class CandidatePage:
    """One page, oldest first, as of one moment. It owns nothing: whoever acts on it claims first.

    `actor` and `scope` are the caller's word: the project itself must know that they are who they say.
    """

    candidates: list[Job]
    scope: Scope
    scanned: int
    has_more: bool
    cursor: str | None
    """For the next page; None on the last."""
    total: None = None
    observation: str = "per-page-snapshot"
    principal_validation: str = "domain-required"


def candidates(query: CandidateQuery, ctx: ExecutionContext) -> CandidatePage:
    """Read a bounded page of jobs, oldest first, without loading more than was allowed.

    Sizes are looked at first; one row over the cap refuses the whole page, because a page with a gap looks
    complete. Rows and bytes are charged to `ctx.consume` before any content is loaded. It changes nothing and
    opens a transaction of its own. Raises `ScopeMismatch` (context and query differ, or the cursor is of
    another query), `InvalidInput`, `TransactionOwned`, `DeadlineExceeded`.
    """
    ctx.check_active()
    scope = Scope(config.DEFAULT_TENANT) if query.scope is None else query.scope
    bound = _checked_query(query, scope, ctx)
    after = _position(query.cursor, bound)
    with bounded.transaction(
        database.alias(),
        deadline=ctx.deadline,
        what="candidates",
        before_commit=ctx.check_active,
        snapshot=True,
    ):
        rows = store.candidate_sizes(
            scope, query.kind, status=query.status, after=after, limit=query.limit + 1,
            cap=query.max_payload_bytes,
        )  # fmt: skip
        ctx.check_active()
        scanned = rows[: query.limit]
        ids = [row.id for row in scanned if row.id is not None]
        if len(ids) < len(scanned):
            raise InvalidInput(
                "max_payload_bytes", query.max_payload_bytes, "is less than a row of this page has",
                "Allow more bytes, or narrow the query; no page is given with a gap.",
            )  # fmt: skip
        ctx.consume(items=len(scanned), bytes=sum(row.size for row in scanned))
        jobs = store.candidates(scope, query.kind, ids) if ids else []
        ctx.check_active()
    has_more = len(rows) > query.limit
    cursor = _cursor(bound, scanned[-1]) if has_more else None
    return CandidatePage(jobs, scope, len(scanned), has_more, cursor)


def _checked_query(query: CandidateQuery, scope: Scope, ctx: ExecutionContext) -> list[Any]:
    """What a cursor is bound to."""
    plain_text("kind", query.kind, 200)
    if ctx.scope != scope:
        raise ScopeMismatch("scope", ctx.scope)
    if not isinstance(query.actor, str) or not query.actor.strip() or ctx.actor != query.actor:
        raise ScopeMismatch("actor", ctx.actor)
    if ctx.kind != query.kind:
        raise ScopeMismatch("kind", ctx.kind)
    if query.status is not None and query.status not in Status.values:
        raise InvalidInput("status", query.status, "is unknown", f"Use one of {', '.join(Status.values)}.")
    for name, value, most in (
        ("limit", query.limit, LARGEST_PAGE),
        ("max_payload_bytes", query.max_payload_bytes, LARGEST_PAYLOAD),
    ):
        if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= most:
            raise InvalidInput(name, value, "is out of range", f"Use a whole number from 1 to {most:,}.")
    return [
        CURSOR_VERSION, scope.tenant, scope.organization, query.actor, query.kind, query.status, query.limit,
        query.max_payload_bytes,
    ]  # fmt: skip


def _cursor(bound: list[Any], last: store.Sized) -> str:
    position = [last.created_at.astimezone(UTC).isoformat(), str(last.id)]
    return signing.dumps([*bound, *position], salt=CURSOR_SALT)


def _position(cursor: object, bound: list[Any]) -> tuple[datetime, UUID] | None:
    if cursor is None:
        return None
    try:
        *given, created_at, last_id = signing.loads(str(cursor), salt=CURSOR_SALT)
        if given != bound:
            raise ValueError("of another query")
        return datetime.fromisoformat(created_at), UUID(last_id)
    except (signing.BadSignature, ValueError, TypeError) as error:
        raise ScopeMismatch("cursor", cursor) from error
