"""The five tables. Rows of `Job` are written by `store` alone; here they are described and read."""

from __future__ import annotations

import hashlib
import json
import os
import threading
import time
import uuid
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, ClassVar, Final
from uuid import UUID

from django.apps import apps
from django.conf import settings
from django.db import DatabaseError, models, router
from django.db.models import F, Q, Value
from django.db.models.functions import Coalesce, Length, Now
from django.db.models.lookups import Exact
from django.utils.translation import gettext_lazy as _
from django.utils.translation import gettext_noop

from durable_jobs import database
from durable_jobs.conf import MANUAL_QUEUE
from durable_jobs.exceptions import DirectWrite, ErrorClass

_uuid_lock = threading.Lock()
_uuid_last = 0


def uuid7() -> uuid.UUID:
    """A time-ordered UUID (RFC 9562, version 7), strictly increasing within a process.

    48 bits of Unix milliseconds, then 74 random bits. Within one millisecond, or when the clock steps
    back, the last value is continued by a random step (RFC 9562 §6.2, method 2).
    """
    global _uuid_last
    random = int.from_bytes(os.urandom(10), "big") >> 6
    with _uuid_lock:
        value = (time.time_ns() // 1_000_000) << 74 | random
        if value <= _uuid_last:
            value = _uuid_last + 1 + (random >> 42)
        _uuid_last = value
    high, low = value >> 62, value & ((1 << 62) - 1)
    return uuid.UUID(int=(high >> 12) << 80 | 0x7 << 76 | (high & 0xFFF) << 64 | 0b10 << 62 | low)


def as_uuid(value: object) -> UUID | None:
    """The UUID that a value is, or is the text of; None for anything else."""
    if isinstance(value, UUID):
        return value
    try:
        return UUID(str(value))
    except ValueError:
        return None


@dataclass(frozen=True)
class Scope:
    """Whose job it is: a tenant, and within it an organization or none (`None` is a value of its own)."""

    tenant: str = "default"
    organization: str | None = None


class Status(models.TextChoices):
    """The stored fact; what a reader is shown is `durable_jobs.explain.Phase`."""

    HELD = "held"
    PENDING = "pending"
    RUNNING = "running"
    COMPLETED = "completed"
    FAILED = "failed"
    CANCELLED = "cancelled"


class Verdict(models.TextChoices):
    """A decision to fail that is already on the row; what is left to do is to tell the domain."""

    UNRECOVERABLE = "unrecoverable"
    RETRY_EXHAUSTED = "retry_exhausted"


class Ownership(models.TextChoices):
    """Who may write a job just now (`Job.ownership`)."""

    TERMINAL = "terminal"
    UNCLAIMED = "unclaimed"
    LEGACY_UNKNOWN = "legacy-unknown"
    EXPIRED = "expired"
    CURRENT = "current"


CHANGED_INPUT = gettext_noop(
    "The stored input is not the one that the job was made with: its bytes do not match the hash."
)

LIVE = (Status.PENDING, Status.RUNNING)
TERMINAL = (Status.COMPLETED, Status.FAILED, Status.CANCELLED)


class ReadOnlyQuerySet(models.QuerySet[Any]):
    """Reads as any queryset; writes are refused, because they would go around the lease."""

    def _fetch_all(self) -> None:
        try:
            super()._fetch_all()
        except DatabaseError as error:
            database.note_not_migrated(error)
            raise

    def _refuse(self, *args: Any, **kwargs: Any) -> Any:
        raise DirectWrite(self.model.__name__)

    update = delete = create = bulk_create = bulk_update = _refuse
    get_or_create = update_or_create = aupdate = adelete = acreate = abulk_create = _refuse
    abulk_update = aget_or_create = aupdate_or_create = _refuse


class JobQuerySet(ReadOnlyQuerySet):
    """Jobs, by subject and scope."""

    def for_subject(self, subject: models.Model) -> JobQuerySet:
        """The jobs whose subject is this saved model instance."""
        return self.filter(subject_type=subject._meta.label_lower, subject_id=str(subject.pk))

    def in_scope(self, scope: Scope) -> JobQuerySet:
        """The jobs of one tenant and one organization; no organization matches only none."""
        return self.filter(tenant_id=scope.tenant, organization_id=scope.organization)


class ReadOnlyRow(models.Model):
    """Rows that only the store writes: `save()` and `delete()` refuse and name the service."""

    objects: ClassVar[Any] = ReadOnlyQuerySet.as_manager()

    class Meta:
        abstract = True

    def save(self, *args: Any, **kwargs: Any) -> None:
        raise DirectWrite(type(self).__name__)

    def delete(self, *args: Any, **kwargs: Any) -> tuple[int, dict[str, int]]:
        raise DirectWrite(type(self).__name__)


def _iff(left: Q, not_left: Q, right: Q, not_right: Q) -> Q:
    return (left & right) | (not_left & not_right)


_UNOWNED_RUN = Q(status="running", lease_owner__isnull=True)
_OWNED_RUN = Q(status="running", lease_owner__isnull=False)
_ENDED = Q(status__in=["completed", "failed", "cancelled"])
_NOT_ENDED = Q(status__in=["held", "pending", "running"])


def _check(name: str, condition: Any) -> models.CheckConstraint:
    return models.CheckConstraint(condition=condition, name=f"durable_jobs_{name}")


def _text(length: int, **options: Any) -> models.CharField[str, str]:
    return models.CharField(max_length=length, **options)


def _optional_text(length: int, **options: Any) -> models.CharField[str | None, str | None]:
    return models.CharField(max_length=length, null=True, blank=True, **options)


def _count() -> models.IntegerField[int, int]:
    return models.IntegerField(default=0, db_default=0)


def _moment() -> models.DateTimeField[datetime | None, datetime | None]:
    return models.DateTimeField(null=True, blank=True)


def _user() -> models.ForeignKey[Any, Any]:
    return models.ForeignKey(
        settings.AUTH_USER_MODEL,
        on_delete=models.SET_NULL,
        null=True,
        blank=True,
        related_name="+",
        db_index=False,
    )


class Job(ReadOnlyRow):
    """One piece of durable work, with a lease on it.

    A row is claimable exactly when `next_run_at` is set: pending rows, and running rows without owner
    (they wait for a retry). A running row with an owner whose lease ran out is an orphan and belongs to
    the reconciler. Terminal rows change only by redrive or retry.
    """

    # identity
    id = models.UUIDField(primary_key=True, default=uuid7, editable=False)
    kind = _text(200)
    status = _text(9, choices=Status.choices)
    tenant_id = _text(64, default="default", db_default="default")
    organization_id = _optional_text(64)
    created_by = _user()
    cancelled_by = _user()
    created_at = models.DateTimeField(db_default=Now())
    updated_at = models.DateTimeField(db_default=Now())

    # work
    input_text = models.TextField(null=True, blank=True, db_column="input")
    input_sha256 = _optional_text(64)
    checkpoint_text = models.TextField(null=True, blank=True, db_column="checkpoint")
    checkpoint_at = _moment()
    result_text = models.TextField(null=True, blank=True, db_column="result")
    meta = models.JSONField(null=True, blank=True)

    # keys
    idempotency_key = _optional_text(200)
    lock_key = _optional_text(200)
    subject_type = _optional_text(200)
    # A text here, and any model's key where it is compared: `filter(pk=job.subject_id)`.
    subject_id: models.CharField[Any, Any] = _optional_text(200)
    progress_job_id = models.UUIDField(null=True, blank=True)

    # lease
    lease_owner = _optional_text(200)
    lease_epoch = models.BigIntegerField(default=0, db_default=0)
    lease_expires_at = _moment()
    heartbeat_at = _moment()
    attempts = _count()
    claimed_at = _moment()
    processed_at_claim = models.BigIntegerField(default=0, db_default=0)

    # delivery
    queue_name = _text(100, default="default", db_default="default")
    queue_job_id = _optional_text(200)
    priority = models.SmallIntegerField(default=0, db_default=0)
    continuation_seq = _count()
    redrives = _count()
    next_run_at = _moment()
    pending_since = _moment()

    # limits used
    redrives_since_commit = _count()
    lost_deliveries = _count()
    consecutive_failures = _count()
    interruptions = _count()
    mirror_attempts = _count()
    last_committed_at = _moment()

    # outcome
    started_at = _moment()
    finished_at = _moment()
    parked_at = _moment()
    cancel_requested_at = _moment()
    verdict = _optional_text(20, choices=Verdict.choices)
    error_class = _optional_text(20)
    error_code = _optional_text(100)
    error_type = _optional_text(200)
    error_message = models.TextField(null=True, blank=True)
    domain_mirrored_at = _moment()

    # progress
    processed_count = models.BigIntegerField(default=0, db_default=0)
    total_count = models.BigIntegerField(null=True, blank=True)
    progress = models.FloatField(null=True, blank=True)
    progress_message = _optional_text(500)

    local_diagnostic: str | None = None
    """Set on what a `JobManager` returns: what it failed to record."""

    objects: ClassVar[Any] = JobQuerySet.as_manager()

    class Meta:
        db_table = "durable_jobs_job"
        default_permissions = ("view",)
        permissions = (
            ("start_job", "Can start jobs"),
            ("operate_job", "Can cancel and redrive jobs"),
            ("force_redrive_job", "Can force a redrive"),
            ("pause_job", "Can pause and unpause work"),
            ("settle_job", "Can settle a job without its hooks"),
            ("view_job_payload", "Can see input, checkpoint and result"),
            ("view_all_scopes", "Can see the jobs of all scopes"),
        )
        indexes = (
            models.Index(
                "queue_name",
                "kind",
                "priority",
                "next_run_at",
                name="durable_jobs_ready",
                condition=Q(next_run_at__isnull=False),
            ),
            models.Index(
                fields=["tenant_id", "organization_id", "kind"],
                name="durable_jobs_running",
                condition=Q(status="running"),
            ),
            models.Index(
                fields=["cancel_requested_at"],
                name="durable_jobs_cancelling",
                condition=Q(cancel_requested_at__isnull=False, finished_at__isnull=True),
            ),
            models.Index(
                fields=["subject_type", "subject_id"],
                name="durable_jobs_subject",
                condition=Q(subject_type__isnull=False),
            ),
            models.Index(
                fields=["finished_at"],
                name="durable_jobs_finished",
                condition=Q(finished_at__isnull=False),
            ),
            models.Index(
                fields=["finished_at", "kind"],
                name="durable_jobs_failed_by_kind",
                condition=Q(status="failed"),
            ),
            models.Index(fields=["tenant_id", "created_at", "id"], name="durable_jobs_list"),
            models.Index(fields=["id"], name="durable_jobs_held", condition=Q(status="held")),
            models.Index(
                fields=["created_by"],
                name="durable_jobs_created_by",
                condition=Q(created_by__isnull=False),
            ),
            models.Index(
                fields=["cancelled_by"],
                name="durable_jobs_cancelled_by",
                condition=Q(cancelled_by__isnull=False),
            ),
        )
        constraints = (
            models.UniqueConstraint(
                "lock_key",
                "tenant_id",
                Coalesce("organization_id", Value("")),
                condition=Q(lock_key__isnull=False, status__in=["pending", "running"]),
                name="durable_jobs_one_live",
            ),
            models.UniqueConstraint(
                "tenant_id",
                Coalesce("organization_id", Value("")),
                "kind",
                "idempotency_key",
                condition=Q(idempotency_key__isnull=False),
                name="durable_jobs_idempotency",
            ),
            _check("status", Q(status__in=Status.values)),
            _check(
                "claimable",
                _iff(
                    Q(next_run_at__isnull=False),
                    Q(next_run_at__isnull=True),
                    Q(status="pending") | _UNOWNED_RUN,
                    Q(status="held") | _ENDED | _OWNED_RUN,
                ),
            ),
            _check(
                "pending",
                _iff(
                    Q(status="pending"),
                    Q(status__in=["held", "running", "completed", "failed", "cancelled"]),
                    Q(pending_since__isnull=False),
                    Q(pending_since__isnull=True),
                ),
            ),
            _check(
                "running",
                Q(status__in=["held", "pending", "completed", "failed", "cancelled"])
                | Q(
                    lease_epoch__gt=0,
                    attempts__gt=0,
                    lease_expires_at__isnull=False,
                    started_at__isnull=False,
                ),
            ),
            _check("owner", Q(lease_owner__isnull=True) | Q(status="running")),
            _check(
                "terminal",
                _iff(Q(finished_at__isnull=False), Q(finished_at__isnull=True), _ENDED, _NOT_ENDED),
            ),
            _check(
                "held",
                Q(status__in=["pending", "running", "completed", "failed", "cancelled"])
                | Q(lease_epoch=0, attempts=0, input_text__isnull=False),
            ),
            _check("parked", Q(parked_at__isnull=True) | Q(status="failed", error_code__isnull=False)),
            _check(
                "verdict",
                Q(verdict__isnull=True)
                | Q(verdict__in=Verdict.values, status__in=["pending", "running", "failed"]),
            ),
            _check(
                "cancelled",
                Q(status__in=["held", "pending", "running", "completed", "failed"])
                | Q(cancel_requested_at__isnull=False),
            ),
            _check(
                "failed",
                Q(status__in=["held", "pending", "running", "completed", "cancelled"])
                | Q(error_class__isnull=False),
            ),
            _check(
                "completed",
                Q(status__in=["held", "pending", "running", "failed", "cancelled"])
                | Q(error_class__isnull=True, error_code__isnull=True, error_message__isnull=True),
            ),
            _check("class", Q(error_class__isnull=True) | Q(error_class__in=[e.value for e in ErrorClass])),
            _check("mirrored", Q(domain_mirrored_at__isnull=True) | Q(finished_at__isnull=False)),
            _check(
                "input",
                (Q(input_text__isnull=True) & Q(input_sha256__isnull=True))
                | (Q(input_sha256__isnull=False) & Exact(Length("input_sha256"), Value(64))),
            ),
            _check(
                "blank",
                Q(tenant_id__gt="", kind__gt="", queue_name__gt="")
                & (Q(organization_id__isnull=True) | Q(organization_id__gt=""))
                & (Q(idempotency_key__isnull=True) | Q(idempotency_key__gt=""))
                & (Q(lock_key__isnull=True) | Q(lock_key__gt="")),
            ),
            _check(
                "counters",
                Q(
                    lease_epoch__gte=0,
                    attempts__gte=0,
                    continuation_seq__gte=0,
                    redrives__gte=0,
                    redrives_since_commit__gte=0,
                    lost_deliveries__gte=0,
                    consecutive_failures__gte=0,
                    interruptions__gte=0,
                    mirror_attempts__gte=0,
                    processed_count__gte=0,
                    processed_at_claim__gte=0,
                )
                & (Q(total_count__isnull=True) | Q(total_count__gte=0)),
            ),
            _check(
                "optional",
                _iff(
                    Q(checkpoint_text__isnull=False),
                    Q(checkpoint_text__isnull=True),
                    Q(checkpoint_at__isnull=False),
                    Q(checkpoint_at__isnull=True),
                )
                & _iff(
                    Q(subject_type__isnull=False),
                    Q(subject_type__isnull=True),
                    Q(subject_id__isnull=False),
                    Q(subject_id__isnull=True),
                )
                & (Q(progress__isnull=True) | Q(progress__gte=0, progress__lte=100))
                & Q(attempts__lte=F("lease_epoch")),
            ),
            _check("priority", Q(priority__gte=-100, priority__lte=100)),
        )

    def __str__(self) -> str:
        return f"{self.kind} {self.pk}"

    @property
    def input(self) -> Any:
        """The start's input, parsed anew at each access (a change to it changes nothing stored)."""
        return _parsed(self.input_text)

    @property
    def checkpoint(self) -> Any:
        """Where the last committed slice left off, parsed anew; None before the first checkpoint."""
        return _parsed(self.checkpoint_text)

    @property
    def result(self) -> Any:
        """What the kind returned in `Done(result)`, or the receipt of the job's end, parsed anew.

        A stored text that is no JSON is given as it is; `diagnostic` says so.
        """
        try:
            return _parsed(self.result_text)
        except ValueError:
            return self.result_text

    @property
    def scope(self) -> Scope:
        """Whose job it is."""
        return Scope(self.tenant_id, self.organization_id)

    @property
    def is_live(self) -> bool:
        """Whether it is pending or running."""
        return self.status in LIVE

    @property
    def is_authentic(self) -> bool:
        """Whether the stored input is there and is the one that the job was made with, byte for byte."""
        # SQLite lets a database shell put bytes there.
        return isinstance(self.input_text, str) and _sha256(self.input_text) == self.input_sha256

    def ownership_at(self, now: datetime) -> Ownership:
        """Who may write the job, judged at `now` (the database's time), whatever its status says."""
        if self.status in TERMINAL:
            return Ownership.TERMINAL
        if self.status == Status.HELD or self.next_run_at is not None:
            return Ownership.LEGACY_UNKNOWN if self._waiting_problem() else Ownership.UNCLAIMED
        if self.lease_owner is None or self.lease_expires_at is None:
            return Ownership.LEGACY_UNKNOWN
        return Ownership.EXPIRED if self.lease_expires_at <= now else Ownership.CURRENT

    @property
    def ownership(self) -> Ownership:
        """`ownership_at` the present time, which is asked of the database where it matters.

        For many rows read `durable_jobs.database.clock()` once and use `ownership_at`.
        """
        if self.status == Status.RUNNING and self.lease_expires_at is not None and self.next_run_at is None:
            return self.ownership_at(database.clock(self._state.db))
        return self.ownership_at(_LONG_AGO)

    @property
    def diagnostic(self) -> str | None:
        """What is wrong with the row or with the writing of it, apart from the job's outcome; None: nothing.

        In this order: what this process failed to record (`local_diagnostics`), why waiting work may not be
        started, input that was changed, a result that is no JSON.
        """
        local = self.local_diagnostic or local_diagnostics.get(self.pk)
        if local:
            return local
        if self.status == Status.HELD or self.next_run_at is not None:
            problem = self._waiting_problem()
            if problem:
                return problem
        if self.input_text is not None and not self.is_authentic:
            return CHANGED_INPUT
        try:
            _parsed(self.result_text)
        except ValueError:
            return "The stored result is not JSON; it is given as text."
        return None

    def _waiting_problem(self) -> str | None:
        held = self.status == Status.HELD
        if held and (self.lease_owner or self.lease_expires_at or self.lease_epoch or self.attempts):
            return "Held work carries the traces of an execution; recover it explicitly."
        if not held and self.input_text is None and self.input_sha256 is None:
            return None  # it was made without, and nothing can have been changed
        keyless = held and self.queue_name == MANUAL_QUEUE and not self.idempotency_key
        if not self.tenant_id or keyless or self.input_text is None or self.input_sha256 is None:
            return "The scope, key, input or hash of waiting work is missing; recover it explicitly."
        try:
            _parsed(self.input_text)
        except ValueError:
            return "The input of waiting work is not JSON."
        return None if self.is_authentic else CHANGED_INPUT

    @property
    def percent(self) -> float | None:
        """Progress in percent: from the counts where the total is known, else as reported, else None."""
        if self.status == Status.COMPLETED:
            return 100.0
        if self.total_count:
            return min(100.0, 100.0 * self.processed_count / self.total_count)
        return self.progress

    @property
    def subject(self) -> models.Model | None:
        """The project's own row, loaded from the jobs' database; None without one or when it is gone."""
        if not self.subject_type:
            return None
        try:
            model = apps.get_model(self.subject_type)
        except LookupError:
            return None
        rows: models.QuerySet[models.Model] = model._base_manager.using(
            self._state.db or router.db_for_read(Job)
        )
        return rows.filter(pk=self.subject_id).first()


_LONG_AGO: Final = datetime(1970, 1, 1, tzinfo=UTC)

local_diagnostics: dict[UUID, str] = {}
"""By job: what went wrong in this process after a commit that stands (`note_diagnostic`)."""


def note_diagnostic(job_id: UUID, sentence: str) -> None:
    """Remember it for `job.diagnostic` in this process; the oldest of a thousand are forgotten."""
    local_diagnostics.pop(job_id, None)
    local_diagnostics[job_id] = sentence
    while len(local_diagnostics) > 1000:
        local_diagnostics.pop(next(iter(local_diagnostics)), None)


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode(errors="surrogatepass")).hexdigest()


def _parsed(text: str | None) -> Any:
    return None if text is None else json.loads(text)


class JobEvent(ReadOnlyRow):
    """One line of the history: append-only; it goes only when its job is pruned.

    A pause and its end belong to no job. They name what they stop in `data`, blank matching everything.
    """

    job = models.ForeignKey(
        Job,
        on_delete=models.DO_NOTHING,
        db_constraint=False,
        db_index=False,
        null=True,
        blank=True,
        related_name="events",
    )
    created_at = models.DateTimeField(db_default=Now())
    event = _text(50)
    kind = _text(200, default="", db_default="")
    tenant_id = _text(64, default="default", db_default="default")
    organization_id = _optional_text(64)
    epoch = models.BigIntegerField(null=True, blank=True)
    seq = models.IntegerField(null=True, blank=True)
    owner = _text(200, default="", db_default="", blank=True)
    actor = _text(200, default="", db_default="", blank=True)
    actor_id = _optional_text(64)
    reason = models.TextField(default="", db_default="", blank=True)
    operation_id = _optional_text(64)
    code = _text(100, default="", db_default="", blank=True)
    error_type = _text(200, default="", db_default="", blank=True)
    message = models.TextField(default="", db_default="", blank=True)
    traceback = models.TextField(default="", db_default="", blank=True)
    data = models.JSONField(null=True, blank=True)
    release = _text(100, default="", db_default="", blank=True)

    class Meta:
        db_table = "durable_jobs_event"
        default_permissions = ("view",)
        verbose_name = _("event")
        verbose_name_plural = _("history")
        indexes = (
            models.Index(fields=["job", "id"], name="durable_jobs_event_job"),
            models.Index(fields=["created_at", "id"], name="durable_jobs_event_time"),
            models.Index(fields=["event", "created_at"], name="durable_jobs_event_name"),
        )

    def __str__(self) -> str:
        return f"{self.event} {self.job_id or self.message}"


class CancelRequest(ReadOnlyRow):
    """The mailbox of cancel requests that met a locked row.

    Append-only and without a unique key: with one, two open transactions would wait for each other.
    """

    job_id = models.UUIDField(db_index=True)
    requested_at = models.DateTimeField(db_default=Now())
    actor = _text(200, default="", db_default="", blank=True)
    actor_user = _user()
    reason = models.TextField(default="", db_default="", blank=True)

    class Meta:
        db_table = "durable_jobs_cancelrequest"
        default_permissions = ("view",)


class Pause(ReadOnlyRow):
    """New claims of matching work are stopped while the row exists; a blank field matches everything."""

    queue_name = _text(100, default="", db_default="", blank=True)
    kind = _text(200, default="", db_default="", blank=True)
    tenant_id = _text(64, default="", db_default="", blank=True)
    reason = models.TextField(default="", db_default="", blank=True)
    actor = _text(200, default="", db_default="", blank=True)
    since = models.DateTimeField(db_default=Now())

    class Meta:
        db_table = "durable_jobs_pause"
        default_permissions = ("view",)
        constraints = (
            models.UniqueConstraint(
                fields=["queue_name", "kind", "tenant_id"], name="durable_jobs_one_pause"
            ),
        )


class WorkerProcess(ReadOnlyRow):
    """One row per worker process, for the screens; no repair depends on it."""

    owner = _text(200, unique=True)
    host = _text(200, default="", db_default="", blank=True)
    pid = models.IntegerField(default=0, db_default=0)
    queues = models.TextField(default="", db_default="", blank=True)
    kinds = models.TextField(default="", db_default="", blank=True)
    concurrency = models.IntegerField(default=0, db_default=0)
    release = _text(100, default="", db_default="", blank=True)
    started_at = models.DateTimeField(db_default=Now())
    beat_at = models.DateTimeField(db_default=Now())

    class Meta:
        db_table = "durable_jobs_worker"
        default_permissions = ("view",)
        verbose_name = _("worker")
        verbose_name_plural = _("workers")

    def __str__(self) -> str:
        return self.owner

    @property
    def queue_names(self) -> list[str]:
        """The queues that it serves; none means all."""
        return _names(self.queues)

    @property
    def kind_names(self) -> list[str]:
        """The kinds that it takes; none means all."""
        return _names(self.kinds)


def _names(stored: str) -> list[str]:
    return [str(name) for name in json.loads(stored or "[]")]
