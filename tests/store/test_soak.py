"""Many hands at random on few jobs for some seconds: no deadlock, no error, no epoch with two owners."""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Callable
from typing import Any
from uuid import UUID

import pytest
from django.contrib.auth.models import Group
from django.db import connection, transaction

from durable_jobs import database, store
from durable_jobs.exceptions import ErrorClass, ErrorFacts
from durable_jobs.models import Job, uuid7
from durable_jobs.store import Lease, NewJob, Probe
from tests.connections import OtherConnection
from tests.store.rows import execute, images

SECONDS = 3.0
HANDS = 5
PROBES = [Probe("q", "k", priority, None, 0.4) for priority in (0, 1)]
TRANSIENT = ErrorFacts(ErrorClass.TRANSIENT, None, "E", "no", "")


class Hand:
    """One process's worth of behaviour: claims, works in fences, fails, dies, repairs, cancels, redrives."""

    def __init__(self, number: int, ids: list[UUID], group: int) -> None:
        self.name = f"w{number}"
        self.random = random.Random(number)
        self.ids, self.group = ids, group
        self.leases: list[Lease] = []
        self.claims: list[tuple[UUID, int]] = []
        self.completed: list[tuple[UUID, int]] = []
        self.done: Counter[str] = Counter()

    def run(self) -> Hand:
        acts: list[Callable[[], Any]] = [
            self.claim, self.claim, self.claim, self.work, self.work, self.work, self.end, self.end,
            self.repair, self.cancel_some, self.redrive, self.forget, self.start,
        ]  # fmt: skip
        until = time.monotonic() + SECONDS
        while time.monotonic() < until:
            act = self.random.choice(acts)
            act()
            self.done[act.__name__] += 1
        return self

    def lease(self) -> Lease | None:
        return self.random.choice(self.leases) if self.leases else None

    def took(self, job: Job) -> None:
        assert job.lease_owner == self.name
        self.leases.append(Lease(job.id, self.name, job.lease_epoch, 0.4))
        self.claims.append((job.id, job.lease_epoch))

    def claim(self) -> None:
        if self.random.random() < 0.5:
            for claimed in store.claim_next(self.name, self.random.choice([1, 2, 4]), PROBES):
                self.took(claimed.job)
            return
        job = store.get(self.random.choice(self.ids))
        if job is not None:
            answer = store.claim(job.id, job.continuation_seq, job.redrives, self.name, 0.4)
            if isinstance(answer, Job):
                self.took(answer)

    def work(self) -> None:
        """A fenced batch: the project's row changes with the checkpoint."""
        lease = self.lease()
        if lease is None:
            return
        with database.transaction(database.alias()):
            if store.lock_fence(lease, 10):
                Group.objects.filter(pk=self.group).update(name=str(uuid7()))
                time.sleep(self.random.random() * 0.01)
                assert store.write_checkpoint(lease, '{"at": 1}') is not None
        store.beat_many(self.name, self.leases)

    def end(self) -> None:
        lease = self.lease()
        if lease is None:
            return
        way = self.random.randrange(6)
        with database.transaction(database.alias()):
            if way == 0:
                if store.complete(lease, None) is not None:
                    self.completed.append((lease.job_id, lease.epoch))
            elif way == 1:
                store.fail_terminal(lease.job_id, lease.epoch, TRANSIENT)
            elif way == 2:
                store.cancel_running(lease.job_id, lease.epoch)
            elif way == 3:
                store.yield_slice(lease)
            elif way == 4:
                store.fail_slice(
                    lease, TRANSIENT, max_failures=3, first_delay=0, longest_delay=0, exponential=False
                )
            else:
                store.give_back(lease)
        self.leases.remove(lease)

    def forget(self) -> None:
        """A worker that dies: nobody beats its leases any more."""
        self.leases = self.leases[: len(self.leases) // 2]

    def repair(self) -> None:
        for orphan in store.orphans(0.1):
            with database.transaction(database.alias()):
                if orphan.cancel:
                    store.cancel_orphan(orphan, grace=0.1)
                elif orphan.verdict or self.random.random() < 0.2:
                    store.park_orphan(orphan, grace=0.1, code="orphaned", message="gone")
                else:
                    store.take_orphan(orphan, grace=0.1, delay=0)
        for waiting in store.cancelling():
            with database.transaction(database.alias()):
                store.cancel_waiting(waiting.id)
        for job_id in store.mailed():
            with database.transaction(database.alias()):
                store.fold_cancel(job_id)

    def cancel_some(self) -> None:
        """A bulk action of a view: several requests in one transaction, in any order, with a row of its own."""
        if self.random.random() < 0.7:
            return
        with database.transaction(database.alias()), transaction.atomic():
            Group.objects.filter(pk=self.group).update(name=str(uuid7()))
            for job_id in self.random.sample(self.ids, 2):
                store.request_cancel(job_id, scope=None, actor=self.name)

    def redrive(self) -> None:
        with database.transaction(database.alias()):
            for job_id in self.random.sample(self.ids, 3):
                store.redrive(job_id, scope=None, grace=0.1, forced=True)

    def start(self) -> None:
        """A new job for a lock key that most of the time is held."""
        job_id = uuid7()
        number = self.random.randrange(4)
        store.insert(
            NewJob(job_id, "k", "pending", "t", None, "q", None, None, lock_key=f"l{number}", priority=1)
        )


@pytest.mark.django_db(transaction=True)
def test_many_hands_at_random(other_connections: Callable[[], OtherConnection]) -> None:
    """B42, B44, B115, C105: whatever meets whatever, each epoch has one owner and each end is one end."""
    group = Group.objects.create(name="domain").pk
    ids = [uuid7() for _ in range(14)]
    for number, job_id in enumerate(ids):
        store.insert(NewJob(job_id, "k", "pending", "t", None, "q", None, None, priority=number % 2))
    hands = [Hand(number, ids, group) for number in range(HANDS)]
    calls = [other_connections().begin(hand.run) for hand in hands]
    for call in calls:
        call.result(60)
    done = sum((hand.done for hand in hands), Counter())
    assert all(done[name] > 3 for name in ("claim", "work", "end", "repair", "redrive")), done

    claims = Counter(claim for hand in hands for claim in hand.claims)
    assert len(claims) > 20 and set(claims.values()) == {1}, "an epoch with two owners"
    completed = Counter(job_id for hand in hands for job_id, _ in hand.completed)
    assert set(completed.values()) <= {1}, "a job that was completed twice"
    rows = images(Job.objects.values_list("pk", flat=True))
    for job_id, row in rows.items():
        assert (row["status"] == "completed") == (job_id in completed)
        assert row["attempts"] == sum(1 for claimed, _ in claims if claimed == job_id)
        assert row["lease_epoch"] == row["attempts"] + row["redrives"]
    ((held,),) = execute(
        "SELECT count(*) FROM (SELECT lock_key FROM durable_jobs_job WHERE lock_key IS NOT NULL"
        " AND status IN ('pending', 'running') GROUP BY lock_key HAVING count(*) > 1) twice"
    )
    assert held == 0
    assert not connection.in_atomic_block
