"""A project's own tests run in a transaction of Django's TestCase: there the verbs work as anywhere."""

from __future__ import annotations

import pytest
from django.db import transaction

from durable_jobs import receipts, service
from durable_jobs.exceptions import LeaseLostError, TransactionOwned
from durable_jobs.service import CandidateQuery
from tests.receipts import acts
from tests.receipts.acts import (
    HOME,
    KIND,
    RECEIPT,
    context,
    ended,
    everything,
    job_of,
    lock_policy,
    owned,
    ship,
)

pytestmark = pytest.mark.django_db


def test_the_verbs_work_and_leave_the_lock_policy_as_it_was() -> None:
    """A84, T22: TestCase's own block is not a borrowed transaction."""
    policy = lock_policy()
    ctx = owned(seconds=3)
    assert receipts.complete_atomically(ctx, lambda _: ship()) == RECEIPT
    assert job_of(ctx).status == "completed" and lock_policy() == policy
    job = ended("failed")
    receipts.retry_atomically(job.id, context(job.idempotency_key), lambda _: RECEIPT)
    page = service.candidates(CandidateQuery(KIND, "anna", HOME), context())
    assert len(page.candidates) == 2 and lock_policy() == policy


def test_what_is_refused_is_rolled_back_to_where_it_began() -> None:
    """A66."""
    ctx = owned()
    before, policy = everything(), lock_policy()

    def failing(_: object) -> str:
        ship()
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        receipts.complete_atomically(ctx, failing)
    ctx.stop.set()
    with pytest.raises(LeaseLostError):
        receipts.complete_atomically(ctx, lambda _: ship())
    assert everything() == before and lock_policy() == policy


def test_a_block_of_the_project_is_borrowed_here_as_well() -> None:
    """T22."""
    ctx = owned()
    with transaction.atomic(), pytest.raises(TransactionOwned):
        receipts.complete_atomically(ctx, lambda _: ship())
    assert not acts.shipments()
