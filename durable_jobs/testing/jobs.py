"""Run jobs here and now, interrupt them as a deploy does, kill them as a crash does, make them in any status."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final, TypeVar
from uuid import uuid4

from durable_jobs import database, jsontext, kinds, service, store
from durable_jobs.exceptions import ErrorClass, ErrorFacts, NotReclaimable
from durable_jobs.kinds import Kind
from durable_jobs.models import Job, Scope, Status, uuid7
from durable_jobs.reconciler import Reconciler
from durable_jobs.runner import SliceResult
from durable_jobs.runner import claim as _claim
from durable_jobs.runner import run_slice as _run_slice
from durable_jobs.store import Lease, NewJob

MOST_SLICES: Final = 10_000
MOST_FAILED_HOOKS: Final = 10

_KindClass = TypeVar("_KindClass", bound=type[Kind])


class Killed(KeyboardInterrupt):
    """Stands for SIGKILL in this process: nothing of the slice runs after it, nothing is written."""


class _Orders(threading.local):
    """What the blocks around a test ask for."""

    interrupt_after: int | None = None
    kill_after: int | None = None


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
            Reconciler(_owner()).repair_dead(_owner())
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


def run_slice(job: Job) -> SliceResult:
    """Claim the job, whenever it is due, and run one slice of it here.

    Raises `NotReclaimable` when it cannot be claimed (finished, held, paused, running elsewhere, or as many of
    its kind running in its scope as may).
    """
    current = store.get(job.id)
    if current is None:
        raise NotReclaimable(job.id, "it is gone")
    claimed = _claim(current.id, current.continuation_seq, current.redrives, owner=_owner())
    if claimed is store.FULL:
        raise NotReclaimable(job.id, f"as many of {current.kind} run in its scope as may (max_running)")
    if not isinstance(claimed, Job):
        raise NotReclaimable(job.id, f"it is {current.status} and not free")
    draining = threading.Event()
    commits = _Commits(draining)
    return _run_slice(claimed, owner=_owner(), draining=draining, on_commit=commits)


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
    who = owner or _owner()
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


def _owner() -> str:
    return f"{_process_owner}:{threading.get_ident()}"


class _Commits:
    """Counts a slice's commits and carries out what the blocks around the test ask for."""

    def __init__(self, draining: threading.Event) -> None:
        self._draining = draining
        self._count = 0

    def __call__(self) -> None:
        self._count += 1
        if _orders.kill_after is not None and self._count >= _orders.kill_after:
            raise Killed
        if _orders.interrupt_after is not None and self._count >= _orders.interrupt_after:
            self._draining.set()


@contextmanager
def _ordered(name: str, commits: int) -> Iterator[None]:
    if isinstance(commits, bool) or not isinstance(commits, int) or commits < 1:
        raise ValueError(f"{name}({commits!r}): give a whole number of commits, 1 or more")
    before = getattr(_orders, name)
    setattr(_orders, name, commits)
    try:
        yield
    finally:
        setattr(_orders, name, before)


def _inside(write: Any) -> Job | None:
    with database.joined(database.alias()):
        return write()


def _present(job: Job | None) -> Job:
    assert job is not None
    return job
