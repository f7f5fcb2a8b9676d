"""What must always be true stands in the table itself: each constraint refuses its forbidden row."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
from django.db import IntegrityError, connection, transaction

from durable_jobs import database, store
from durable_jobs.models import Job, Pause, Scope, WorkerProcess
from tests.store.rows import STATES, State, ago, ahead, columns_of, execute, insert_raw, make, make_all

pytestmark = pytest.mark.django_db

FORBIDDEN: tuple[tuple[str, str, dict[str, Any]], ...] = (
    # constraint, a legal row to start from, what is wrong with it
    ("status", "failed", {"status": "done"}),
    ("status", "failed", {"status": "Failed"}),
    ("claimable", "pending", {"next_run_at": None}),
    ("claimable", "retry", {"next_run_at": None}),
    ("claimable", "running", {"next_run_at": ago(1)}),
    ("claimable", "completed", {"next_run_at": ago(1)}),
    ("claimable", "held", {"next_run_at": ago(1)}),
    ("pending", "pending", {"pending_since": None}),
    ("pending", "running", {"pending_since": ago(1)}),
    ("pending", "failed", {"pending_since": ago(1)}),
    ("running", "running", {"lease_expires_at": None}),
    ("running", "running", {"started_at": None}),
    ("running", "running", {"attempts": 0}),
    ("running", "retry", {"attempts": 0, "lease_epoch": 0}),
    ("owner", "pending", {"lease_owner": "w"}),
    ("owner", "completed", {"lease_owner": "w"}),
    ("owner", "failed", {"lease_owner": "w"}),
    ("terminal", "completed", {"finished_at": None, "domain_mirrored_at": None}),
    ("terminal", "failed", {"finished_at": None, "domain_mirrored_at": None}),
    ("terminal", "running", {"finished_at": ago(1)}),
    ("terminal", "pending", {"finished_at": ago(1)}),
    ("held", "held", {"lease_epoch": 1}),
    ("held", "held", {"attempts": 1, "lease_epoch": 1}),
    ("held", "held", {"input": None}),
    ("parked", "completed", {"parked_at": ago(1)}),
    ("parked", "pending", {"parked_at": ago(1)}),
    ("parked", "parked", {"error_code": None}),
    ("verdict", "running", {"verdict": "tired"}),
    ("verdict", "completed", {"verdict": "unrecoverable"}),
    ("verdict", "held", {"verdict": "retry_exhausted"}),
    ("cancelled", "completed", {"status": "cancelled"}),
    ("failed", "failed", {"error_class": None}),
    ("completed", "completed", {"error_class": "transient"}),
    ("completed", "completed", {"error_code": "E1"}),
    ("completed", "completed", {"error_message": "no"}),
    ("class", "failed", {"error_class": "bad"}),
    ("mirrored", "running", {"domain_mirrored_at": ago(1)}),
    ("input", "running", {"input_sha256": None}),
    ("input", "running", {"input_sha256": "ab"}),
    ("blank", "pending", {"tenant_id": ""}),
    ("blank", "pending", {"organization_id": ""}),
    ("blank", "pending", {"kind": ""}),
    ("blank", "pending", {"queue_name": ""}),
    ("blank", "pending", {"idempotency_key": ""}),
    ("blank", "pending", {"lock_key": ""}),
    *(
        ("counters", "running", {name: -1})
        for name in (
            "continuation_seq", "redrives", "redrives_since_commit", "lost_deliveries",
            "consecutive_failures", "interruptions", "mirror_attempts", "processed_count",
            "processed_at_claim", "total_count",
        )
    ),
    ("counters", "pending", {"attempts": -1}),
    ("counters", "pending", {"lease_epoch": -1, "attempts": -1}),
    ("optional", "running", {"checkpoint_at": None}),
    ("optional", "running", {"checkpoint": None}),
    ("optional", "running", {"subject_id": None}),
    ("optional", "running", {"subject_type": None}),
    ("optional", "running", {"progress": 100.5}),
    ("optional", "running", {"progress": -0.5}),
    ("optional", "running", {"attempts": 9}),
    ("priority", "pending", {"priority": 101}),
    ("priority", "pending", {"priority": -101}),
)  # fmt: skip


def test_every_state_is_legal() -> None:
    """No CHECK stands in the way of a state that the statements lead to."""
    assert len(make_all(STATES)) == len(STATES)


@pytest.mark.parametrize(
    ("name", "base", "wrong"), FORBIDDEN, ids=lambda part: part if isinstance(part, str) else ",".join(part)
)
def test_a_check_refuses_its_forbidden_row(name: str, base: str, wrong: dict[str, Any]) -> None:
    """B13, B7, A6, A9: whoever writes it, by INSERT as by UPDATE."""
    with refused(name):
        insert_raw({**columns_of(State(base)), **wrong})
    job_id = make(base)
    with refused(name):
        update_raw(job_id, wrong)


def test_each_check_has_a_forbidden_row() -> None:
    checks = {constraint.name for constraint in Job._meta.constraints if hasattr(constraint, "condition")}
    uniques = {"durable_jobs_one_live", "durable_jobs_idempotency"}
    assert checks == {f"durable_jobs_{name}" for name, _, _ in FORBIDDEN} | uniques


@pytest.mark.parametrize("column", ["tenant_id", "kind", "status", "created_at", "queue_name", "lease_epoch"])
def test_what_every_job_has_cannot_be_missing(column: str) -> None:
    """B7: a row without scope or kind is an IntegrityError."""
    with pytest.raises(IntegrityError), transaction.atomic():
        insert_raw({**columns_of(State("pending")), column: None})


LIVE = ("pending", "running", "expired", "retry")
FREE = ("held", "completed", "failed", "parked", "cancelled")


def legal(base: str) -> State:
    return State(base, request="row" if base == "cancelled" else "none")


@pytest.mark.parametrize("holder", [*LIVE, *FREE])
@pytest.mark.parametrize("base", [*LIVE, *FREE])
def test_one_live_job_for_each_lock_key(holder: str, base: str) -> None:
    """B14, B32, B35: pending and running hold the key, in every form; held and ended rows do not."""
    make(legal(holder), lock_key="ledger")
    if holder in LIVE and base in LIVE:
        with refused("one_live"):
            make(legal(base), lock_key="ledger")
    else:
        make(legal(base), lock_key="ledger")


@pytest.mark.parametrize(
    ("tenant", "organization"), [("acme", "north"), ("acme", None), ("acme", "south"), ("umbrella", None)]
)
def test_a_lock_key_belongs_to_its_scope(tenant: str, organization: str | None) -> None:
    """B33: no organization is a scope of its own, and two jobs without one conflict."""
    scopes = [("acme", "north"), ("acme", None), ("acme", "south"), ("umbrella", None)]
    for one in scopes:
        make("pending", lock_key="ledger", tenant_id=one[0], organization_id=one[1])
    with refused("one_live"):
        make("pending", lock_key="ledger", tenant_id=tenant, organization_id=organization)
    held = store.by_lock_key("ledger", Scope(tenant, organization))
    assert held is not None and held.scope == Scope(tenant, organization)


@pytest.mark.parametrize("earlier", ["held", *LIVE, "completed", "failed", "parked", "cancelled"])
def test_an_idempotency_key_is_taken_for_ever(earlier: str) -> None:
    """B15, B24: over all statuses, for one kind in one scope."""
    make(legal(earlier), idempotency_key="once")
    with refused("idempotency"):
        make("pending", idempotency_key="once")
    make("pending", idempotency_key="once", kind="tests.other")
    make("pending", idempotency_key="once", organization_id=None)
    make("pending", idempotency_key="once", tenant_id="umbrella")
    with refused("idempotency"):
        make("pending", idempotency_key="once", organization_id=None)


def test_one_pause_for_each_target() -> None:
    pause = {"queue_name": "q", "kind": "", "tenant_id": "", "reason": "", "actor": "", "since": ago(1)}
    insert_raw(pause, table=Pause._meta.db_table)
    with refused("one_pause"):
        insert_raw({**pause, "since": ahead(1)}, table=Pause._meta.db_table)


def test_one_row_for_each_worker() -> None:
    worker = {"owner": "w"}
    insert_raw(worker, table=WorkerProcess._meta.db_table)
    with pytest.raises(IntegrityError), transaction.atomic():
        insert_raw(worker, table=WorkerProcess._meta.db_table)


def test_the_mailbox_takes_any_number_of_requests() -> None:
    """P11: a unique key there would make two open transactions wait for each other."""
    job_id = make(State("running", request="mail"))
    (count,) = execute("SELECT count(*) FROM durable_jobs_cancelrequest WHERE job_id = %s", job_id)[0]
    assert count == 2


class refused:
    """The block has to break the constraint of this name, and no other; what it did is rolled back."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._atomic = transaction.atomic(database.alias())

    def __enter__(self) -> None:
        self._atomic.__enter__()

    def __exit__(self, kind: Any, error: Any, trace: Any) -> bool:
        self._atomic.__exit__(kind, error, trace)
        assert isinstance(error, IntegrityError), f"not refused: {error!r}"
        # A status that nobody knows breaks other CHECKs as well; PostgreSQL names the first by name.
        told = "durable_jobs_" if self._name == "status" else f"durable_jobs_{self._name}"
        if self._name == "one_pause" and connection.vendor == "sqlite":
            told = "durable_jobs_pause.queue_name"  # SQLite names the columns of a plain unique constraint
        assert told in str(error), str(error)
        return True


def update_raw(job_id: Any, changes: Mapping[str, Any]) -> None:
    names = ", ".join(f'"{name}" = %s' for name in changes)
    execute(f"UPDATE durable_jobs_job SET {names} WHERE id = %s", *changes.values(), job_id)
