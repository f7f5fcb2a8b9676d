"""What must hold while everything is killed, and what must hold when all has come to rest."""

from __future__ import annotations

import itertools
import threading
from collections import Counter, defaultdict
from datetime import timedelta
from typing import Any
from uuid import UUID

from django.db import connection

from durable_jobs import database
from durable_jobs.models import LIVE, Job, JobEvent
from tests.soak.models import Applied, Order, Sent

LONGEST_EXPIRED = timedelta(seconds=60)
MOST_KEPT = 200

AGREEING = {
    "pending": ("waiting", "moving"),
    "running": ("waiting", "moving"),
    "completed": ("done",),
    "failed": ("failed",),
    "cancelled": ("stopped",),
}


class Findings:
    """What happened, in numbers, and what must not have happened, in full."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self.violations: list[dict[str, Any]] = []
        self._guard = threading.Lock()

    def count(self, what: str, number: float = 1) -> None:
        with self._guard:
            self.counts[what] += number  # type: ignore[assignment]

    def most(self, what: str, number: float) -> None:
        with self._guard:
            self.counts[what] = max(self.counts[what], number)  # type: ignore[assignment]

    def violate(self, rule: str, **facts: Any) -> None:
        violation = {"rule": rule, **{name: str(fact) for name, fact in facts.items()}}
        with self._guard:
            told = any(
                (one["rule"], one.get("job")) == (rule, violation.get("job")) for one in self.violations
            )
            if not (told and "job" in violation) and len(self.violations) < MOST_KEPT:
                self.violations.append(violation)


class Watch:
    """Looks at the rows while everything moves; each look is one statement, so one moment."""

    def __init__(self, findings: Findings) -> None:
        self.findings = findings
        self._epochs: dict[UUID, int] = {}

    def look(self) -> None:
        self._no_lease_is_long_over()
        self._one_live_job_for_a_key()
        self._the_domain_agrees()
        self._epochs_only_grow()
        self.findings.count("looks at all rows")

    def _no_lease_is_long_over(self) -> None:
        now = database.clock()
        for job in Job.objects.filter(status="running", lease_owner__isnull=False, lease_expires_at__lt=now):
            assert job.lease_expires_at is not None
            over = now - job.lease_expires_at
            self.findings.most("longest that a row stayed expired, seconds", over.total_seconds())
            if over <= LONGEST_EXPIRED:
                continue
            self.findings.violate(
                "a running row stays expired",
                job=job.id,
                owner=job.lease_owner,
                expired_at=job.lease_expires_at,
                cancel_requested_at=job.cancel_requested_at,
                history=list(
                    JobEvent.objects.filter(job_id=job.id).order_by("id").values_list("event", flat=True)
                ),
            )

    def _one_live_job_for_a_key(self) -> None:
        keys = Counter(
            Job.objects.filter(status__in=LIVE, lock_key__isnull=False).values_list("lock_key", flat=True)
        )
        for key, number in keys.items():
            if number > 1:
                self.findings.violate("two live jobs hold one lock key", key=key)

    def _the_domain_agrees(self) -> None:
        for job_id, status, order_status in disagreeing():
            self.findings.violate("job and order disagree", job=job_id, status=status, order=order_status)

    def _epochs_only_grow(self) -> None:
        now = dict(Job.objects.filter(status__in=LIVE).values_list("id", "lease_epoch"))
        for job_id, epoch in now.items():
            if epoch < self._epochs.get(job_id, 0):
                self.findings.violate("an epoch went back", job=job_id, epoch=epoch)
        self._epochs.update(now)


def disagreeing() -> list[tuple[Any, ...]]:
    """Jobs whose order says something else, as of one statement."""
    rules = " OR ".join(
        f"(j.status = '{status}' AND o.status IN ({', '.join(map(repr, allowed))}))"
        for status, allowed in AGREEING.items()
    )
    with connection.cursor() as cursor:
        cursor.execute(
            "SELECT j.id, j.status, o.status FROM durable_jobs_job j"
            f" LEFT JOIN soak_order o ON CAST(o.id AS text) = j.subject_id WHERE NOT coalesce({rules}, false)"
        )
        return cursor.fetchall()


def audit(findings: Findings) -> None:
    """What must hold when nothing moves any more."""
    jobs = {job.id: job for job in Job.objects.all()}
    for job in jobs.values():
        if job.status in LIVE or job.status == "held":
            findings.violate("a job has not ended", job=job.id, status=job.status)
    for job_id, status, order_status in disagreeing():
        findings.violate("job and order disagree", job=job_id, status=status, order=order_status)
    _every_order_has_its_job(findings, jobs)
    _each_item_once(findings, jobs)
    _count_what_happened(findings, jobs)


def _every_order_has_its_job(findings: Findings, jobs: dict[UUID, Job]) -> None:
    subjects = Counter(job.subject_id for job in jobs.values())
    for order in Order.objects.all():
        if subjects.pop(str(order.pk), 0) != 1:
            findings.violate("an order has no job, or two", order=order.pk)
    for subject in subjects:
        findings.violate("a job has no order", order=subject)


def _each_item_once(findings: Findings, jobs: dict[UUID, Job]) -> None:
    """Nothing twice, nothing skipped, nothing by a lease that had been lost; owners follow one another."""
    applied: dict[UUID, list[Applied]] = defaultdict(list)
    for row in Applied.objects.order_by("id").iterator():
        applied[row.job_id].append(row)
    orders = {str(order.pk): order for order in Order.objects.all()}
    for job_id, job in jobs.items():
        rows = applied.pop(job_id, [])
        numbers = [row.number for row in rows]
        if len(set(numbers)) != len(numbers):
            findings.violate("an item was applied twice", job=job_id, numbers=numbers)
        elif numbers != list(range(1, len(numbers) + 1)):
            findings.violate("an item was skipped, or applied out of turn", job=job_id, numbers=numbers)
        if job.status == "completed" and len(numbers) != job.input["items"]:
            findings.violate("a completed job misses items", job=job_id, applied=len(numbers))
        if len(numbers) != job.processed_count:
            findings.violate(
                "items and checkpoint differ", job=job_id, applied=len(numbers), said=job.processed_count
            )
        order = orders.get(job.subject_id or "")
        if order is not None and order.applied != len(numbers):
            findings.violate("items and order differ", job=job_id, applied=len(numbers), said=order.applied)
        epochs = [(row.epoch, row.owner) for row in rows]
        if [epoch for epoch, _ in epochs] != sorted(epoch for epoch, _ in epochs):
            findings.violate("the writes of two owners overlap", job=job_id, epochs=epochs)
        if len(set(epochs)) != len({epoch for epoch, _ in epochs}):
            findings.violate("one epoch had two owners", job=job_id, epochs=epochs)
        if any(later.at < earlier.at for earlier, later in itertools.pairwise(rows)):
            findings.violate("a write is older than the one before it", job=job_id)
        findings.count("items applied", len(numbers))
        findings.count("changes of owner between items", max(len(set(epochs)) - 1, 0))
    for job_id in applied:
        findings.violate("items of a job that is not there", job=job_id)


def _count_what_happened(findings: Findings, jobs: dict[UUID, Job]) -> None:
    for event, number in Counter(JobEvent.objects.values_list("event", flat=True)).items():
        findings.count(f"event {event}", number)
    sent = Counter(Sent.objects.values_list("key", flat=True))
    findings.count("effects outside fences", sum(sent.values()))
    findings.count("repeats outside fences", sum(number - 1 for number in sent.values()))
    findings.count("claims", sum(job.attempts for job in jobs.values()))
    for code, number in Counter(job.error_code for job in jobs.values() if job.parked_at).items():
        findings.count(f"left parked as {code}", number)
    repaired = JobEvent.objects.filter(event="orphaned").count()
    repaired += JobEvent.objects.filter(event="parked", code__in=["orphaned", "poison"]).count()
    repaired += JobEvent.objects.filter(event="cancelled", data__worker_gone=True).count()
    findings.count("repairs", repaired)
