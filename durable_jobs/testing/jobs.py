"""Run jobs here and now, interrupt them as a deploy does, kill them as a crash does, make them in any status."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final, TypeVar
from uuid import uuid4

from durable_jobs import database, jsontext, kinds, service, store
from durable_jobs.conf import MANUAL_QUEUE
from durable_jobs.exceptions import ErrorClass, ErrorFacts, NotReclaimable
from durable_jobs.kinds import Kind
from durable_jobs.models import Job, Pause, Scope, Status, uuid7
from durable_jobs.reconciler import Reconciler, repair_once
from durable_jobs.runner import SliceResult
from durable_jobs.runner import claim as _claim
from durable_jobs.runner import run_slice as _run_slice
from durable_jobs.store import Lease, NewJob

MOST_SLICES: Final = 10_000
MOST_FAILED_HOOKS: Final = 10
LONG_AGO: Final = 3600.0
"""Seconds."""

_KindClass = TypeVar("_KindClass", bound=type[Kind])


class Killed(KeyboardInterrupt):
    """Stands for SIGKILL in this process: nothing of the slice runs after it, nothing is written."""


class _Orders(threading.local):
    """What the blocks around a test ask for."""

    interrupt_after: int | None = None
    kill_after: int | None = None
    freeze_after: int | None = None


_orders = _Orders()


def run(kind: str | type[Kind], input: Any = None, **start: Any) -> Job:
    """Start a job and `finish` it here; `start` takes the options of `service.start`."""
    return finish(service.start(kind, input, **start).job)


def finish(job: Job) -> Job:
    """Run all slices of a job here, in this thread, until it ends; due times are skipped.

    For jobs that the code under test has started. No keeper and no sleeping. A slice killed by `kill_after` is
    repaired at once by its kind's orphan policy. Raises AssertionError when it has not ended after 10,000
    slices, or when its hooks have failed ten times.
    """
    for _ in range(MOST_SLICES):
        current = store.get(job.id)
        if current is None or current.status not in (Status.PENDING, Status.RUNNING):
            break
        try:
            result = run_slice(current)
        except Killed:
            Reconciler(process_owner()).repair_dead(process_owner())
            continue
        if result.job is not None and result.job.mirror_attempts >= MOST_FAILED_HOOKS:
            raise AssertionError(
                f"Job {job.id} of {job.kind} cannot end: its hooks have failed {MOST_FAILED_HOOKS} times, "
                f"the last time with {result.error!r:.500}"
            ) from result.error
    else:
        raise AssertionError(f"Job {job.id} of {job.kind} has not ended after {MOST_SLICES} slices.")
    assert current is not None
    return current


def run_until_idle() -> list[Job]:
    """Do here what a worker would do until nothing is due, jobs that others start included; the jobs that ran.

    Jobs that wait for their first run later, held and paused ones stay as they are. A job that has begun is
    finished, its retries and pauses at once. In the order of a worker: by priority, then by age.
    """
    ran: dict[Any, Job] = {}
    for _ in range(MOST_SLICES):
        job = _next_due()
        if job is None:
            return list(ran.values())
        ran[job.id] = finish(job)
    raise AssertionError(f"Jobs are still due after {MOST_SLICES} of them.")


def run_slice(job: Job) -> SliceResult:
    """Claim the job, whenever it is due, and run one slice of it here.

    Raises `NotReclaimable` when it cannot be claimed (finished, held, paused, running elsewhere, or as many of
    its kind running in its scope as may).
    """
    return work(claim(job))


def started(kind: str | type[Kind]) -> list[Job]:
    """The jobs of a kind that are there, oldest first."""
    return list(Job.objects.using(database.alias()).filter(kind=kinds.get(kind).name).order_by("id"))


@contextmanager
def interrupt_after(commits: int) -> Iterator[None]:
    """In this block each slice is asked to stop at its n-th commit, as by a deploy."""
    with _ordered("interrupt_after", commits):
        yield


@contextmanager
def kill_after(commits: int) -> Iterator[None]:
    """In this block each slice dies right after its n-th commit, as by SIGKILL: nothing more of it runs."""
    with _ordered("kill_after", commits):
        yield


@contextmanager
def freeze_worker(after: int = 1) -> Iterator[None]:
    """In this block each slice is frozen at its n-th commit, for longer than its lease, and then goes on.

    While it is frozen its job is repaired, as an orphan is, and run to its end by another owner. What the frozen
    one does afterwards is what a worker does that does not know that it was gone: no fence lets it write, and its
    slice comes to `Outcome.LEASE_LOST`.
    """
    with _ordered("freeze_after", after):
        yield


def expire_lease(job: Job) -> Job:
    """Let the lease of a running job run out an hour ago, as if its worker had died; the job as it is then.

    A repair finds it on its second look: `durable_jobs.reconciler.repair_once(wait=False)` takes both. Raises
    `NotReclaimable` when nobody holds the job.
    """
    current = store.get(job.id)
    if current is None or current.status != Status.RUNNING or current.lease_owner is None:
        raise NotReclaimable(job.id, "nobody holds it")
    store.beat_many(
        current.lease_owner, [Lease(current.id, current.lease_owner, current.lease_epoch, -LONG_AGO)]
    )
    return _present(store.get(job.id))


@contextmanager
def register_for_test(*kind_classes: _KindClass) -> Iterator[None]:
    """Register kinds for the length of a block; one that is registered already stays so afterwards."""
    registered: list[str] = []
    try:
        for kind_class in kind_classes:
            known = kinds.find(kind_class.name) if isinstance(kind_class.name, str) else None
            if known is not None and type(known) is kind_class:
                continue
            kinds.register(kind_class)
            registered.append(kind_class.name)
        yield
    finally:
        for name in registered:
            kinds.unregister(name)


_STATUSES = ("pending", "held", "running", "retrying", "verdict", "expired", "cancelling", "completed",
             "failed", "parked", "cancelled")  # fmt: skip


def make_job(
    status: str = "pending",
    *,
    kind: str | type[Kind] = "tests.made",
    input: Any = None,
    scope: Scope | None = None,
    owner: str | None = None,
    lease_seconds: float = 60.0,
    queue: str = "default",
    **columns: Any,
) -> Job:
    """A job in a status, brought there by the statements that bring real ones there.

    `status` is one of the six, or `retrying` (waits for a retry), `verdict` (a decision to fail on the row),
    `parked`, `expired` (running, its lease over), `cancelling` (running, a cancel requested). The kind need not
    be registered. `columns`: idempotency_key, lock_key, subject_type, subject_id, priority, created_by.
    """
    if status not in _STATUSES:
        raise ValueError(f"make_job({status!r}): give one of {', '.join(_STATUSES)}")
    name = kind if isinstance(kind, str) else kind.name
    text = jsontext.encode(input, field="input", limit=2**30)
    where = scope or Scope()
    new = NewJob(
        id=uuid7(),
        kind=name,
        status="held" if status == "held" else "pending",
        tenant=where.tenant,
        organization=where.organization,
        queue=queue,
        input=text,
        input_sha256=jsontext.sha256(text),
        **columns,
    )
    job = store.insert(new)
    assert job is not None, "the key is taken"
    if status in ("pending", "held"):
        return job
    who = owner or process_owner()
    if status == Status.CANCELLED:
        store.request_cancel(job.id, scope=None)
        return _present(_inside(lambda: store.cancel_waiting(job.id)))
    ttl = -1.0 if status == "expired" else lease_seconds
    claimed = store.claim(job.id, 0, 0, who, ttl)
    assert isinstance(claimed, Job)
    lease = Lease(job.id, who, claimed.lease_epoch, lease_seconds)
    facts = ErrorFacts(ErrorClass.TRANSIENT, None, "ValueError", "made for a test", "")
    failing: dict[str, Any] = {"first_delay": 0.0, "longest_delay": 0.0, "exponential": False}
    match status:
        case "running" | "expired":
            return claimed
        case "cancelling":
            store.request_cancel(job.id, scope=None)
            return _present(store.get(job.id))
        case "completed":
            return _present(_inside(lambda: store.complete(lease, None)))
        case "retrying":
            return _present(store.fail_slice(lease, facts, max_failures=5, **failing))
        case "verdict":
            return _present(store.fail_slice(lease, facts, max_failures=1, **failing))
        case "failed":
            failed = _present(store.fail_slice(lease, facts, max_failures=1, **failing))
            return _present(_inside(lambda: store.fail_terminal(job.id, failed.lease_epoch)))
        case "parked":
            parked = ErrorFacts(ErrorClass.TERMINAL, "made", "Park", "made for a test", "")
            return _present(
                _inside(lambda: store.fail_terminal(job.id, claimed.lease_epoch, parked, parked=True))
            )
    raise AssertionError(status)


# --- inside ---------------------------------------------------------------------------------------------

_process_owner = f"testing:{uuid4()}"


def process_owner() -> str:
    """Whose leases are taken here: this thread's of this process."""
    return f"{_process_owner}:{threading.get_ident()}"


def claim(job: Job, owner: str | None = None) -> Job:
    """Claim the job as it is now, whenever it is due; `NotReclaimable` when that cannot be."""
    current = store.get(job.id)
    if current is None:
        raise NotReclaimable(job.id, "it is gone")
    who = owner or process_owner()
    claimed = _claim(current.id, current.continuation_seq, current.redrives, owner=who)
    if claimed is store.FULL:
        raise NotReclaimable(job.id, f"as many of {current.kind} run in its scope as may (max_running)")
    if not isinstance(claimed, Job):
        raise NotReclaimable(job.id, f"it is {current.status} and not free")
    return claimed


def work(claimed: Job) -> SliceResult:
    """Run the slice of a job that was claimed here."""
    assert claimed.lease_owner is not None
    draining = threading.Event()
    commits = _Commits(claimed, draining)
    return _run_slice(claimed, owner=claimed.lease_owner, draining=draining, on_commit=commits)


def _next_due() -> Job | None:
    """The first job that a worker would claim, by its own statement's conditions; it is not claimed."""
    jobs = Job.objects.using(database.alias())
    now = database.clock(database.alias())
    waiting = jobs.filter(next_run_at__lte=now, kind__in=kinds.names()).exclude(queue_name=MANUAL_QUEUE)
    pauses = Pause.objects.using(database.alias())
    job: Job
    for job in waiting.order_by("-priority", "next_run_at", "id"):
        which = {"queue_name": job.queue_name, "kind": job.kind, "tenant_id": job.tenant_id}
        if not pauses.filter(**{f"{column}__in": ["", value] for column, value in which.items()}).exists():
            return job
    return None


def _freeze(job: Job) -> None:
    """The world goes on without this slice: its lease runs out, it is repaired, and another one finishes it."""
    expire_lease(job)
    repair_once(wait=False)
    with _set("freeze_after", None):
        current = store.get(job.id)
        for _ in range(MOST_SLICES):
            if current is None or current.status not in (Status.PENDING, Status.RUNNING):
                return
            work(claim(current, f"{process_owner()}:other"))
            current = store.get(job.id)


class _Commits:
    """Counts a slice's commits and carries out what the blocks around the test ask for."""

    def __init__(self, job: Job, draining: threading.Event) -> None:
        self._job = job
        self._draining = draining
        self._count = 0

    def __call__(self) -> None:
        self._count += 1
        if _orders.freeze_after is not None and self._count == _orders.freeze_after:
            _freeze(self._job)
        if _orders.kill_after is not None and self._count >= _orders.kill_after:
            raise Killed
        if _orders.interrupt_after is not None and self._count >= _orders.interrupt_after:
            self._draining.set()


@contextmanager
def _ordered(name: str, commits: int) -> Iterator[None]:
    if isinstance(commits, bool) or not isinstance(commits, int) or commits < 1:
        raise ValueError(f"{name}({commits!r}): give a whole number of commits, 1 or more")
    with _set(name, commits):
        yield


@contextmanager
def _set(name: str, commits: int | None) -> Iterator[None]:
    before = getattr(_orders, name)
    setattr(_orders, name, commits)
    try:
        yield
    finally:
        setattr(_orders, name, before)


def _inside(write: Callable[[], Job | None]) -> Job | None:
    with database.joined(database.alias()):
        return write()


def _present(job: Job | None) -> Job:
    assert job is not None
    return job
