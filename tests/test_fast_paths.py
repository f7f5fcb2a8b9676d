"""What makes a worker fast changes nothing about what it leaves: with it and without it the rows are the same."""

from __future__ import annotations

import gc
import itertools
import math
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from typing import Any

import pytest
from django.db import IntegrityError, InterfaceError, connection, transaction

from durable_jobs import connection as own_connection
from durable_jobs import database, kinds, lifecycle, runner, service, signals, store
from durable_jobs.exceptions import TerminalError
from durable_jobs.keeper import Hold, Keeper
from durable_jobs.kinds import Cancelled, Done, Kind, Retry, StatusMirror, Yield
from durable_jobs.lifecycle import Ending, Share
from durable_jobs.models import Job, JobEvent
from durable_jobs.reconciler import Reconciler
from durable_jobs.runner import Finished, SliceContext, SliceResult, begin_slice
from durable_jobs.store import Lease, Probe
from durable_jobs.transports import database as transport
from durable_jobs.transports.database import Claimer
from durable_jobs.worker import Task, Worker
from tests import fast_kinds
from tests.connections import OtherConnection
from tests.models import Shipment
from tests.postgres import wait_until
from tests.processes import Process, Processes
from tests.slices import change
from tests.store.rows import execute
from tests.test_worker import RunningHere

pytestmark = pytest.mark.django_db(transaction=True)

SETTINGS = {"POLL": 0.1, "TICK": 0, "GRACE": 0.5}
SLOW = {
    "PREFETCH": 0,
    "GROUP_COMMIT": False,
    "GROUP_HOOKS": False,
    "DIRECT_STATEMENTS": False,
    "PREPARE": False,
    "LISTEN": False,
}
GATE, WAITING = threading.Event(), threading.Event()
MOMENTS = {
    field.attname for field in Job._meta.concrete_fields if field.get_internal_type() == "DateTimeField"
}
OWN = {"id", "subject_id", "lease_owner"}


class Fast(Kind):
    """Ends at once, in the way that its input says."""

    name = "fast.any"
    queue = "fast"
    orphan_policy = "redrive"
    retry = Retry(failures=2, first_delay=0.3, longest_delay=0.3)

    def step(self, ctx: SliceContext) -> Any:
        how = ctx.input
        if how == "yield" and not ctx.checkpoint:
            ctx.save_checkpoint({"at": 1}, advance=2, total=3)
            return Yield()
        if how == "terminal":
            raise TerminalError("no", code="no")
        if how == "fail":
            raise ValueError("not yet")
        if how == "cancel":
            return Cancelled()
        if how == "progress":
            ctx.progress(processed=4, message="half")
        if how == "nothing":
            return None
        if how == "wait":
            GATE.wait(60)
        if how == "slow":
            time.sleep(0.03)
        return Done({"said": how} if how != "none" else None)


class Told(Fast):
    name = "fast.told"
    told: list[Any] = []

    def after_transition(self, job: Job) -> None:
        self.told.append((job.id, job.status, connection.in_atomic_block))


class Careful(Fast):
    """Parks what its worker leaves behind."""

    name = "fast.careful"
    orphan_policy = "park"


class Mirrored(Fast):
    """A row of the project follows its end."""

    name = "fast.mirrored"
    mirror = StatusMirror(
        "tests.Shipment", open=("queued", "moving"), redriven="queued", completed="arrived", failed="lost",
        cancelled="stopped",
    )  # fmt: skip


class Hooked(Fast):
    """A row of the project follows its end, by a hook of its own; a completion's fails as the row's note says."""

    name = "fast.hooked"
    called: list[Any] = []

    def on_transition(self, job: Job) -> int:
        self.called.append(job.id)
        shipment = Shipment.objects.get(pk=job.subject_id)
        changed = Shipment.objects.filter(pk=shipment.pk).update(status="arrived")
        transaction.on_commit(lambda: self.after_commit(job, shipment.note))
        if job.status != "completed":
            return changed
        if shipment.note == "fails":
            raise ValueError("no")
        if shipment.note == "exits":
            raise SystemExit
        if shipment.note == "breaks":
            with suppress(IntegrityError):
                Shipment.objects.create(id=shipment.id)
        if shipment.note == "waits":
            WAITING.set()
            GATE.wait(60)
        if shipment.note == "leaves open":
            transaction.atomic().__enter__()
        return changed

    def after_commit(self, job: Job, note: str) -> None:
        Told.told.append((job.id, job.status, connection.in_atomic_block))
        if note == "fails afterwards":
            raise ValueError("too late")

    def on_redrive(self, job: Job) -> int:
        return 1


EVERY = (Fast, Told, Careful, Mirrored, Hooked)


@pytest.fixture(autouse=True)
def registered(settings: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    settings.DURABLE_JOBS = SETTINGS
    monkeypatch.setattr(lifecycle, "ALONE_SECONDS", 600.0)
    GATE.clear()
    WAITING.clear()
    for kept in (
        Told.told,
        Hooked.called,
        lifecycle._alone_until,
        lifecycle._hook_seconds,
        lifecycle._hook_waiting,
    ):
        kept.clear()
    for kind in EVERY:
        kinds.register(kind)
    yield
    GATE.set()
    for kind in EVERY:
        kinds.unregister(kind.name)


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hooks are known to be quick, and a machine that stands still makes them no slower."""
    lifecycle._hook_seconds[Hooked.name] = 0.0001
    for name in ("QUICK_HOOK_SECONDS", "SHARED_SECONDS", "LONGEST_HOOKS", "MOST_WAITING"):
        monkeypatch.setattr(lifecycle, name, 1e6)


def start(how: str = "done", kind: type[Kind] = Fast, note: str = "", **options: Any) -> Job:
    if kind in (Mirrored, Hooked):
        options["subject"] = Shipment.objects.create(note=note)
    return service.start(kind, how, **options).job


def now(job: Job) -> Job:
    return Job.objects.get(pk=job.pk)


def ended(*jobs: Job) -> bool:
    return not Job.objects.filter(id__in=[job.id for job in jobs], finished_at=None).exists()


def without_ids(job: Job, text: str) -> str:
    own = text.replace(str(job.id), "its id")
    return own.replace(f"Shipment {job.subject_id} ", "Shipment of its own ")


def left_behind() -> tuple[list[Any], list[Any]]:
    """Every row without what no two runs share, and which moments it has; its history."""
    rows = []
    for job in Job.objects.order_by("created_at", "id"):
        row = {field.attname: getattr(job, field.attname) for field in Job._meta.concrete_fields}
        row["error_message"] = without_ids(job, job.error_message or "")
        rows.append(
            {
                name: bool(value) if name in MOMENTS else value
                for name, value in row.items()
                if name not in OWN
            }
        )
    order = list(Job.objects.order_by("created_at", "id").values_list("id", flat=True))
    events = [
        (
            order.index(event.job_id),
            event.event,
            event.code,
            event.error_type,
            without_ids(event.job, event.message),
            event.seq,
            event.epoch,
        )
        for event in JobEvent.objects.select_related("job").order_by("id")
    ]
    return rows, sorted(events)


NOTES = {"": True, "fails": False, "fails afterwards": True, "exits": False, "breaks": False}
"""What a hook does, and whether its job is completed all the same."""
WAYS = ("done", "none", "yield", "fail", "terminal", "cancel", "progress", "nothing")


def test_both_ways_leave_the_same_rows(settings: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every way in which a slice can end, with each fast path off, and with all of them.

    What was claimed ahead and could not begin for a second goes back, on a machine that stands still: claimed twice.
    """
    monkeypatch.setattr("durable_jobs.worker.LONGEST_UNBEGUN", 600.0)
    expected = left_by({})
    for off in ({name: SLOW[name]} for name in SLOW):
        settings.DURABLE_JOBS = {**SETTINGS, **off}
        assert left_by(off) == expected, off
    settings.DURABLE_JOBS = {**SETTINGS, **SLOW}
    assert left_by(SLOW) == expected


def left_by(off: Any) -> Any:
    for kind in EVERY:
        for how in WAYS:
            start(how, kind, lock_key=f"{kind.name} {how}", meta={"a": 1})
    for kind in (Fast, Mirrored, Hooked):
        for _ in range(12):
            start(kind=kind)
    jobs = [start(kind=Hooked, note=note) for note in NOTES]
    gone = start(kind=Mirrored)
    Shipment.objects.filter(pk=gone.subject_id).delete()
    strayed = start(kind=Mirrored)
    Shipment.objects.filter(pk=strayed.subject_id).update(status="lost")
    assert Worker(queues=["fast"], concurrency=2, until_idle=True).run() == 0
    assert {status for _, status, _ in Told.told} == {"completed", "failed", "cancelled"}
    assert not any(in_block for _, _, in_block in Told.told)
    assert sum(now(job).status == "completed" for job in jobs) == sum(NOTES.values())
    found = (*left_behind(), [row.status for row in Shipment.objects.order_by("id")])
    forget_everything()
    return found


def forget_everything() -> None:
    with connection.cursor() as cursor:
        cursor.execute("DELETE FROM durable_jobs_event")
        cursor.execute("DELETE FROM durable_jobs_job")
    Shipment.objects.all().delete()


# --- ends that share a transaction


def running(how: str = "done", owner: str = "me", **options: Any) -> tuple[Job, Lease]:
    job = start(how, **options)
    claimed = store.claim(job.id, 0, 0, owner, 60.0)
    assert isinstance(claimed, Job)
    return claimed, Lease(job.id, owner, claimed.lease_epoch, 60.0)


def complete_together(*ends: tuple[Lease, str | None]) -> set[Any]:
    with transaction.atomic():
        return store.complete_many("me", list(ends))


def test_of_many_only_what_is_still_ours_is_completed() -> None:
    (fine, a), (stolen, b), (judged, c), (gone, d) = (running() for _ in range(4))
    change(stolen, lease_owner="thief", lease_epoch=9, attempts=1)
    change(judged, verdict="unrecoverable")
    change(gone, lease_epoch=2, attempts=1)
    text = '{"x":"é 😀 \\u2028 \\\\ \\" [1]"}'
    assert complete_together((a, text), (b, None), (c, None), (d, None)) == {fine.id}
    done = now(fine)
    assert (done.status, done.result_text, done.lease_owner) == ("completed", text, None)
    assert done.domain_mirrored_at and done.finished_at
    assert {now(job).status for job in (stolen, judged, gone)} == {"running"}


def test_what_is_completed_with_others_is_as_if_it_was_alone() -> None:
    (one, lease), (other, also) = running(), running()
    complete_together((lease, '"r"'), (also, None))
    (alone, third) = running()
    lifecycle.complete(kinds.get(Fast), third, '"r"')
    rows = [
        {
            f.attname: getattr(job, f.attname)
            for f in Job._meta.concrete_fields
            if f.attname not in MOMENTS | OWN
        }
        for job in (now(one), now(alone))
    ]
    assert rows[0] == rows[1]
    assert now(other).result is None


@pytest.mark.postgres_only
def test_a_row_that_somebody_holds_keeps_no_other_from_its_end(second_connection: OtherConnection) -> None:
    (held, a), (free, b) = running(), running()
    second_connection.enter(transaction.atomic())
    second_connection.run(Job.objects.select_for_update().get, pk=held.pk)
    assert complete_together((a, None), (b, None)) == {free.id}
    second_connection.leave()
    assert complete_together((a, None)) == {held.id}


@pytest.mark.postgres_only
def test_the_worker_completes_alone_what_was_held_and_goes_on_meanwhile(
    second_connection: OtherConnection,
) -> None:
    first = start("wait")
    with RunningHere(queues=["fast"], concurrency=4):
        wait_until(lambda: now(first).status == "running", 5, "not begun")
        second_connection.enter(transaction.atomic())
        second_connection.run(Job.objects.select_for_update().get, pk=first.pk)
        GATE.set()
        others = [start() for _ in range(20)]
        wait_until(lambda: ended(*others), 10, "the others wait")
        assert now(first).status == "running"
        second_connection.leave()
        wait_until(lambda: ended(first), 10, "not completed afterwards")
    assert now(first).status == "completed" and now(first).attempts == 1


def test_a_batch_that_fails_is_completed_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    complete_many, calls = lifecycle.complete_many, []

    def fails(owner: str, ends: Any) -> Any:
        calls.append(len(ends))
        raise IntegrityError("a check that does not hold")

    monkeypatch.setattr(lifecycle, "complete_many", fails)
    jobs = [start() for _ in range(6)]
    assert Worker(queues=["fast"], concurrency=2, until_idle=True).run() == 0
    assert calls
    assert {now(job).status for job in jobs} == {"completed"}
    assert {now(job).attempts for job in jobs} == {1}
    monkeypatch.setattr(lifecycle, "complete_many", complete_many)


def test_a_batch_whose_commit_was_answered_by_silence_loses_no_lease(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Committed, and then the answer was lost: what had been written is not told as somebody else's."""
    lost = []

    def losing(unit: Any) -> Any:
        @contextmanager
        def unit_whose_answer_is_lost(using: str, **options: Any) -> Iterator[Any]:
            with unit(using, **options) as opened:
                yield opened
            if options.get("what") == "completions" and not lost:
                lost.append(options)
                raise InterfaceError("the connection was cut")

        return unit_whose_answer_is_lost

    monkeypatch.setattr(database, "statement", losing(database.statement))
    monkeypatch.setattr(database, "transaction", losing(database.transaction))
    jobs = [start() for _ in range(4)]
    assert Worker(queues=["fast"], concurrency=8, until_idle=True).run() == 0
    assert lost
    assert {(now(job).status, now(job).attempts) for job in jobs} == {("completed", 1)}
    assert "lease_lost" not in caplog.text


def leading(monkeypatch: pytest.MonkeyPatch, most: int = 4) -> list[str]:
    """The threads that complete from now on; `most` ends share a transaction."""
    complete, by = Worker._complete, list[str]()

    def noting(self: Worker, together: Any, and_then: Any = None) -> None:
        if together:
            by.append(threading.current_thread().name)
        complete(self, together, and_then)

    monkeypatch.setattr(Worker, "_complete", noting)
    monkeypatch.setattr("durable_jobs.worker.MOST_TOGETHER", most)
    return by


def held_up(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """The first completion by the thread for ends waits for GATE; set once it does."""
    complete_many, begun = lifecycle.complete_many, threading.Event()

    def slow(owner: str, endings: Any) -> None:
        if threading.current_thread().name.startswith("durable-jobs-ends") and not begun.is_set():
            begun.set()
            GATE.wait(60)
        complete_many(owner, endings)

    monkeypatch.setattr(lifecycle, "complete_many", slow)
    return begun


def start_until(condition: Callable[[], bool], jobs: list[Job], problem: str) -> None:
    """Start more when none is left: while the thread for ends has no turn, the claiming thread completes."""
    kind = kinds.get(jobs[0].kind)

    def holds() -> bool:
        if not Job.objects.filter(status="pending").exists():
            jobs.append(start(kind=type(kind)))
        return condition()

    wait_until(holds, 20, problem)


@pytest.mark.parametrize("kind", [Fast, Told, Mirrored, Hooked])
def test_where_two_can_write_one_thread_completes_while_another_claims(
    kind: type[Kind], monkeypatch: pytest.MonkeyPatch
) -> None:
    by = leading(monkeypatch)
    jobs = [start(kind=kind) for _ in range(60)]
    assert Worker(queues=["fast"], concurrency=2, until_idle=True).run() == 0
    assert {(now(job).status, now(job).attempts) for job in jobs} == {("completed", 1)}
    led = [name for name in by if name.startswith("durable-jobs-ends")]
    assert bool(led) is (connection.vendor == "postgresql")


@pytest.mark.postgres_only
@pytest.mark.parametrize("error", [InterfaceError("the connection was cut"), IntegrityError("a check")])
def test_what_the_thread_for_ends_could_not_complete_is_completed_all_the_same(
    error: Exception, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    by, complete_many, failed = leading(monkeypatch), lifecycle.complete_many, list[str]()

    def failing(owner: str, endings: Any) -> None:
        name = threading.current_thread().name
        if name.startswith("durable-jobs-ends") and not failed:
            failed.append(name)
            raise error
        complete_many(owner, endings)

    monkeypatch.setattr(lifecycle, "complete_many", failing)
    jobs = [start() for _ in range(60)]
    assert Worker(queues=["fast"], concurrency=2, until_idle=True).run() == 0
    assert failed and by
    assert {(now(job).status, now(job).attempts) for job in jobs} == {("completed", 1)}
    assert "lease_lost" not in caplog.text


@pytest.mark.postgres_only
def test_a_worker_waits_for_what_the_thread_for_ends_completes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither does it pass for idle meanwhile, nor does a drain go without it."""
    leading(monkeypatch)
    begun = held_up(monkeypatch)
    jobs = [start() for _ in range(30)]
    here = RunningHere(queues=["fast"], concurrency=2)
    with here as worker:
        start_until(begun.is_set, jobs, "the thread for ends has nothing to do")
        held = list(worker._led)
        assert held and not worker._is_idle()
        worker.stop()
        wait_until(worker._draining.is_set, 10, "no drain")
        time.sleep(1.5)
        assert not worker.keeper._stopping.is_set(), "it went, and nobody renews those leases"
        GATE.set()
    assert here.code == 0
    assert {now(task.job).status for task in held} == {"completed"}
    assert {now(job).status for job in jobs} <= {"completed", "pending"}


@pytest.mark.postgres_only
def test_a_completion_that_hangs_holds_up_no_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    leading(monkeypatch)
    begun = held_up(monkeypatch)
    jobs = [start() for _ in range(40)]
    with RunningHere(queues=["fast"], concurrency=2) as worker:
        start_until(begun.is_set, jobs, "the thread for ends has nothing to do")
        held = {task.job.id for task in worker._led}
        others = [job for job in jobs if job.id not in held]
        wait_until(lambda: all(now(job).status == "completed" for job in others), 20, "they wait for it")
        assert held and {now(job).status for job in jobs if job.id in held} == {"running"}
        GATE.set()
        wait_until(lambda: all(now(job).status == "completed" for job in jobs), 20, "it never came back")


@pytest.mark.postgres_only
@pytest.mark.parametrize("kind", [Fast, Hooked])
def test_the_thread_that_completes_goes_on_with_what_has_ended_meanwhile(
    kind: type[Kind], quick: None, monkeypatch: pytest.MonkeyPatch, settings: Any
) -> None:
    settings.DURABLE_JOBS = {**settings.DURABLE_JOBS, "PREFETCH": 4}
    by = leading(monkeypatch)
    for name, value in {"LONGEST_ENDED": 60.0, "LONGEST_UNBEGUN": 60.0, "MOST_ENDED": 12}.items():
        monkeypatch.setattr(f"durable_jobs.worker.{name}", value)
    begun = held_up(monkeypatch)
    jobs = [start(kind=kind) for _ in range(60)]
    with RunningHere(queues=["fast"], concurrency=2) as worker:
        start_until(lambda: begun.is_set() and worker._unended() >= 12, jobs, "nothing ends meanwhile")
        jobs += [start(kind=kind) for _ in range(30)]
        time.sleep(0.5)
        assert sum(now(job).status == "pending" for job in jobs) > 20, "it claims without an end"
        before = len(by)
        GATE.set()
        wait_until(lambda: all(now(job).status == "completed" for job in jobs), 20, "not completed")
    assert by[before] == by[before - 1], "another one had to come for it"


def test_what_has_ended_beside_a_full_inbox_wakes_the_claiming_thread(
    settings: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Quick jobs were claimed ahead; then they take long, and there is no room to claim for."""
    settings.DURABLE_JOBS = {**settings.DURABLE_JOBS, "PREFETCH": 40}
    monkeypatch.setattr("durable_jobs.worker.LOOK_SECONDS", 60.0)
    begun, may_end = itertools.count(), threading.Semaphore(0)

    def step(self: Fast, ctx: SliceContext) -> Done:
        if next(begun) >= 10:
            may_end.acquire(timeout=60)
        return Done()

    monkeypatch.setattr(Fast, "step", step)
    for _ in range(80):
        start()
    with RunningHere(queues=["fast"], concurrency=2) as worker:
        through = Job.objects.filter(status="completed")
        wait_until(lambda: through.count() == 10 and worker._inbox.qsize() > worker._low > 0, 20, "not full")
        may_end.release()
        wait_until(lambda: through.count() == 11, 20, "it waits for a look around")
        may_end.release(1000)
        wait_until(lambda: through.count() == 80, 20, "not through")


def test_a_drain_counts_what_the_thread_for_ends_has_just_put_back() -> None:
    """It goes from one list to another between two looks of the drain."""
    worker = Worker(queues=["fast"], drain_timeout=20)
    job, lease = running()
    task = Task(job, Hold(lease), suspect=False)
    worker._led = [task]

    def put_back() -> None:
        worker._tasks[task] = None
        worker._led = []

    turns = iter([put_back, worker._tasks.clear])

    class Guard:
        """What the other thread does comes at once after a look."""

        def __enter__(self) -> None:
            pass

        def __exit__(self, *error: object) -> None:
            next(turns, lambda: None)()

    worker._guard = Guard()  # type: ignore[assignment]
    assert worker._drain(0) == 0


@pytest.mark.parametrize("kind", [Fast, Hooked])
def test_a_job_that_is_through_leaves_nothing_for_the_garbage_collector(kind: type[Kind]) -> None:
    """What refers to itself stays until a collection, which stops every thread."""
    start(kind=kind)
    assert Worker(queues=["fast"], concurrency=2, until_idle=True).run() == 0
    jobs = [start(kind=kind) for _ in range(20)]
    gc.collect()
    gc.disable()
    gc.set_debug(gc.DEBUG_SAVEALL)
    try:
        assert Worker(queues=["fast"], concurrency=2, until_idle=True).run() == 0
        gc.collect()
        left = {type(one).__qualname__ for one in gc.garbage}
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()
    assert {now(job).status for job in jobs} == {"completed"}
    assert not left & {"Job", "Task", "Hold", "Lease", "SliceContext", "_Slice", "Finished", "Ending"}


def test_a_worker_of_its_own_process_keeps_the_collector_off_what_is_loaded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    frozen: list[int] = []

    def looks(self: Fast, ctx: SliceContext) -> Done:
        frozen.append(gc.get_freeze_count())
        return Done()

    monkeypatch.setattr(Fast, "step", looks)
    start()
    assert Worker(queues=["fast"], concurrency=1, until_idle=True).run() == 0
    start()
    with RunningHere(queues=["fast"], concurrency=1):
        wait_until(lambda: len(frozen) == 2, 20, "not run")
    assert frozen[0] > 1000 and frozen[1] == gc.get_freeze_count() == 0


def test_a_receiver_for_a_kind_s_old_name_is_told_of_rows_that_carry_it() -> None:
    class Renamed(Fast):
        name = "fast.renamed"
        aliases = ("fast.former",)

    def receive(**said: Any) -> None:
        pass

    kinds.register(Renamed)
    signals.job_completed.connect(receive, sender="fast.former")
    try:
        assert lifecycle.share_of(kinds.get(Renamed)) is Share.TOLD
    finally:
        signals.job_completed.disconnect(receive, sender="fast.former")
        kinds.unregister(Renamed.name)


def test_nothing_is_told_before_the_commit_and_a_receiver_is_told_of_the_end() -> None:
    seen: list[Any] = []

    def receive(sender: Any, job: Job, **rest: Any) -> None:
        seen.append((job.status, store.get(job.id).status, connection.in_atomic_block))  # type: ignore[union-attr]

    signals.job_completed.connect(receive, sender=Fast.name)
    try:
        jobs = [start() for _ in range(5)]
        assert Worker(queues=["fast"], concurrency=2, until_idle=True).run() == 0
    finally:
        signals.job_completed.disconnect(receive, sender=Fast.name)
    assert seen == [("completed", "completed", False)] * len(jobs)


# --- ends with hooks


def ending(kind: type[Kind], share: Share, note: str = "") -> Ending:
    job, lease = running(kind=kind, note=note)
    return Ending(kinds.get(kind), job, lease, None, share)


def test_a_hook_that_fails_takes_no_neighbour_with_it() -> None:
    """In one transaction: its savepoint is rolled back, with what it wanted called after the commit."""
    endings = [ending(Hooked, Share.HOOKED), ending(Hooked, Share.HOOKED, "fails")]
    other = ending(Mirrored, Share.MIRRORED)
    with database.transaction(database.alias()):
        lifecycle.complete_many("me", [*endings, other])
        assert connection.run_on_commit == []
    assert [one.done for one in [*endings, other]] == [True, False, True]
    assert [now(one.job).status for one in [*endings, other]] == ["completed", "running", "completed"]
    rows = [Shipment.objects.get(pk=one.job.subject_id).status for one in [*endings, other]]
    assert rows == ["arrived", "queued", "arrived"]
    assert Told.told == []
    lifecycle.tell_completed(endings[0])
    assert Told.told == [(endings[0].job.id, "completed", False)]
    assert lifecycle.share_of(kinds.get(Hooked)) is Share.ALONE
    assert now(endings[1].job).mirror_attempts == 0


def test_a_rollback_leaves_nothing_done() -> None:
    both = [ending(Hooked, Share.HOOKED), ending(Mirrored, Share.MIRRORED)]
    with suppress(ZeroDivisionError), database.transaction(database.alias()):
        lifecycle.complete_many("me", both)
        raise ZeroDivisionError
    assert {now(one.job).status for one in both} == {"running"}
    assert {row.status for row in Shipment.objects.all()} == {"queued"}


def test_of_mirrored_jobs_only_those_end_whose_rows_agree() -> None:
    fine, gone, strayed, stolen = (ending(Mirrored, Share.MIRRORED) for _ in range(4))
    Shipment.objects.filter(pk=gone.job.subject_id).delete()
    Shipment.objects.filter(pk=strayed.job.subject_id).update(status="lost")
    change(stolen.job, lease_owner="thief", lease_epoch=9, attempts=1)
    with database.transaction(database.alias()):
        lifecycle.complete_many("me", [fine, gone, strayed, stolen])
    assert [one.done for one in (fine, gone, strayed, stolen)] == [True, False, False, False]
    assert Shipment.objects.get(pk=stolen.job.subject_id).status == "queued"


@pytest.mark.postgres_only
def test_a_project_s_row_that_somebody_holds_is_waited_for_by_its_own_job_alone(
    second_connection: OtherConnection,
) -> None:
    held, free = ending(Mirrored, Share.MIRRORED), ending(Mirrored, Share.MIRRORED)
    second_connection.enter(transaction.atomic())
    second_connection.run(Shipment.objects.select_for_update().get, pk=held.job.subject_id)
    with database.transaction(database.alias()):
        lifecycle.complete_many("me", [held, free])
    second_connection.leave()
    assert (held.done, free.done) == (False, True)
    assert now(held.job).status == "running"


def shared(monkeypatch: pytest.MonkeyPatch) -> Counter[Share]:
    """How many ends of each sort have shared a transaction from now on."""
    complete_many, counted = lifecycle.complete_many, Counter[Share]()

    def counting(owner: str, endings: Any) -> None:
        complete_many(owner, endings)
        counted.update(one.share for one in endings if one.done)

    monkeypatch.setattr(lifecycle, "complete_many", counting)
    return counted


def test_hooks_that_are_quick_share_and_have_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where no more than one of them has time in a transaction."""
    counted = shared(monkeypatch)
    monkeypatch.setattr(lifecycle, "QUICK_HOOK_SECONDS", 10.0)
    monkeypatch.setattr(lifecycle, "SHARED_SECONDS", 0.0)
    jobs = [start(kind=kind) for _ in range(20) for kind in (Hooked, Mirrored)]
    assert Worker(queues=["fast"], concurrency=2, until_idle=True).run() == 0
    assert {now(job).status for job in jobs} == {"completed"}
    assert {row.status for row in Shipment.objects.all()} == {"arrived"}
    assert counted[Share.MIRRORED] == 20
    assert counted[Share.HOOKED] > 0
    assert sorted(Hooked.called) == sorted(job.id for job in jobs if job.kind == Hooked.name)


def complete_hooked(*endings: Ending) -> list[bool]:
    with database.transaction(database.alias()):
        lifecycle.complete_many("me", endings)
    return [one.done for one in endings]


def test_hooks_stand_or_fall_together_and_nothing_is_half_done(quick: None) -> None:
    together = [ending(Hooked, Share.HOOKED, note) for note in ("", "fails", "")]
    with database.transaction(database.alias()):
        lifecycle.complete_many("me", together)
        assert connection.run_on_commit == []
    assert [one.done for one in together] == [False] * 3
    assert [one.callbacks for one in together] == [[]] * 3
    assert {now(one.job).status for one in together} == {"running"}
    assert {row.status for row in Shipment.objects.all()} == {"queued"}
    assert Hooked.called == [one.job.id for one in together[:2]]
    assert lifecycle.share_of(kinds.get(Hooked)) is Share.ALONE


def test_no_more_hooks_stand_or_fall_together_than_are_set(
    quick: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lifecycle, "MOST_HOOKS", 3)
    ends = [ending(Hooked, Share.HOOKED, "fails" if number == 4 else "") for number in range(8)]
    assert complete_hooked(*ends) == [True] * 3 + [False] * 3 + [True] * 2
    monkeypatch.setattr(lifecycle, "SHARED_SECONDS", 4.0)
    lifecycle._hook_seconds[Hooked.name] = 0.9
    ends = [ending(Hooked, Share.HOOKED, "fails" if number == 3 else "") for number in range(5)]
    assert complete_hooked(*ends) == [True] * 2 + [False] * 2 + [True]


def test_of_jobs_that_share_a_stolen_one_has_no_hook(quick: None) -> None:
    ends = [ending(Hooked, Share.HOOKED) for _ in range(3)]
    change(ends[1].job, lease_owner="thief", lease_epoch=9, attempts=1)
    assert complete_hooked(*ends) == [True, False, True]
    assert Hooked.called == [ends[0].job.id, ends[2].job.id]
    assert now(ends[1].job).lease_owner == "thief"


def test_hooks_that_turn_slow_are_rolled_back_and_run_alone(
    quick: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lifecycle, "LONGEST_HOOKS", 0.0)
    ends = [ending(Hooked, Share.HOOKED) for _ in range(3)]
    assert complete_hooked(*ends) == [False] * 3
    assert Hooked.called == [ends[0].job.id]
    assert {row.status for row in Shipment.objects.all()} == {"queued"}
    lifecycle._alone_until.clear()
    jobs = [start(kind=Hooked) for _ in range(20)]
    with RunningHere(queues=["fast"], concurrency=2):
        wait_until(lambda: ended(*jobs), 30, "not ended")
    assert {(now(job).status, now(job).mirror_attempts) for job in jobs} == {("completed", 0)}


def test_hooks_that_wait_do_so_beside_others(quick: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where more than one can write. Some that had to wait are no reason."""
    kind, on_transition = kinds.get(Hooked), Hooked.on_transition
    monkeypatch.setattr(lifecycle, "MOST_WAITING", 0.02)
    sleeps = itertools.chain([0.1] * 4, [0.0], itertools.repeat(0.05))

    def sleeping(self: Hooked, job: Job) -> int:
        time.sleep(next(sleeps))
        return on_transition(self, job)

    monkeypatch.setattr(Hooked, "on_transition", sleeping)
    assert complete_hooked(*(ending(Hooked, Share.HOOKED) for _ in range(5))) == [True] * 5
    assert lifecycle.share_of(kind) is Share.HOOKED
    assert complete_hooked(*(ending(Hooked, Share.HOOKED) for _ in range(30))) == [True] * 30
    alone = Share.ALONE if connection.vendor == "postgresql" else Share.HOOKED
    assert lifecycle.share_of(kind) is alone


@pytest.mark.postgres_only
def test_hooks_that_share_give_way_in_a_circle_of_waiting(
    quick: None, monkeypatch: pytest.MonkeyPatch, second_connection: OtherConnection
) -> None:
    """The project's transaction has the second row and waits for the first, and must not be the one that is
    ended for it. No server looks for a circle meanwhile."""
    ends = [ending(Hooked, Share.HOOKED) for _ in range(3)]
    shipments = [Shipment.objects.get(pk=one.job.subject_id) for one in ends]
    second_connection.enter(transaction.atomic())
    for run in (second_connection.run, lambda call, sql: call(sql)):
        run(execute, "SET deadlock_timeout = '1h'")
    second_connection.run(Shipment.objects.select_for_update().get, pk=shipments[1].pk)
    on_transition, wanted = Hooked.on_transition, Shipment.objects.filter(pk=shipments[0].pk)

    def closing(self: Hooked, job: Job) -> int:
        if job.id == ends[1].job.id:
            second_connection.begin(wanted.update, note="its own")
            wait_until(is_waiting_for_a_row, 20, "it does not wait")
        return on_transition(self, job)

    monkeypatch.setattr(Hooked, "on_transition", closing)
    assert complete_hooked(*ends) == [False] * 3
    assert second_connection.join(20) == 1
    second_connection.leave()
    assert lifecycle.share_of(kinds.get(Hooked)) is Share.ALONE
    assert [(row.status, row.note) for row in Shipment.objects.order_by("id")] == [
        ("queued", "its own"), ("queued", ""), ("queued", ""),
    ]  # fmt: skip


def is_waiting_for_a_row() -> bool:
    waiting = execute("SELECT count(*) FROM pg_locks WHERE NOT granted AND locktype = 'transactionid'")
    return bool(waiting[0][0])


@pytest.mark.postgres_only
def test_a_hook_that_hangs_with_others_holds_up_no_other(quick: None) -> None:
    """Nor those of its own kind: they end alone."""
    with RunningHere(queues=["fast"], concurrency=2) as worker:
        first = start(kind=Hooked, note="waits")
        assert WAITING.wait(20)
        assert {task.job.id for task in worker._led} == {first.id}
        others = [start(kind=kind) for _ in range(20) for kind in (Hooked, Fast, Mirrored)]
        wait_until(lambda: ended(*others), 30, "they wait for it")
        assert now(first).status == "running"
        GATE.set()
        wait_until(lambda: ended(first), 20, "it never came back")
    assert {(now(job).status, now(job).attempts) for job in [first, *others]} == {("completed", 1)}


@pytest.mark.postgres_only
@pytest.mark.parametrize("error", [InterfaceError("the connection was cut"), IntegrityError("a check")])
def test_what_has_hooks_ends_alone_when_the_thread_for_ends_cannot(
    error: Exception, quick: None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    failed = list[str]()

    def failing(owner: str, endings: Any) -> None:
        failed.append(threading.current_thread().name)
        raise error

    monkeypatch.setattr(lifecycle, "complete_many", failing)
    jobs = [start(kind=Hooked) for _ in range(30)]
    assert Worker(queues=["fast"], concurrency=2, until_idle=True).run() == 0
    assert failed and all(name.startswith("durable-jobs-ends") for name in failed)
    assert {(now(job).status, now(job).attempts) for job in jobs} == {("completed", 1)}
    assert "lease_lost" not in caplog.text


def test_a_drain_waits_for_hooks_that_share(quick: None) -> None:
    here = RunningHere(queues=["fast"], concurrency=2)
    with here as worker:
        first = start(kind=Hooked, note="waits")
        assert WAITING.wait(20)
        worker.stop()
        if connection.vendor == "postgresql":
            wait_until(worker._draining.is_set, 10, "no drain")
            time.sleep(0.3)
            assert not worker.keeper._stopping.is_set(), "it went, and nobody renews that lease"
        GATE.set()
    assert here.code == 0
    assert now(first).status == "completed"


def finished_tasks(kind: type[Kind], owner: str, many: int) -> list[Task]:
    """Their steps are done, and they wait for an end that they share."""
    tasks = []
    for _ in range(many):
        job, lease = running(kind=kind, owner=owner)
        hold = Hold(lease)
        finished = begin_slice(job, hold, Keeper(owner), grouped=True)
        assert isinstance(finished, Finished)
        tasks.append(Task(job, hold, suspect=False, finished=finished))
    return tasks


def test_a_job_that_was_put_off_and_cancelled_meanwhile_ends_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lifecycle, "share_of", lambda kind: Share.HOOKED)
    monkeypatch.setattr(lifecycle, "SHARED_SECONDS", 0.0)
    worker = Worker(queues=["fast"])
    first, second = finished_tasks(Hooked, worker.owner, 2)
    worker._complete([first, second])
    assert list(worker._ended) == [second]
    second.hold.observe(cancel=True)
    worker._complete(worker._take_ended())
    assert not worker._ended, "it is put off for ever"
    assert second in worker._running() and second.finished is not None
    second.finished.complete()
    assert [now(task.job).status for task in (first, second)] == ["completed", "cancelled"]


def test_a_log_that_raises_keeps_nobody_from_an_end(monkeypatch: pytest.MonkeyPatch) -> None:
    worker = Worker(queues=["fast"])
    first, stolen = finished_tasks(Fast, worker.owner, 2)
    change(stolen.job, lease_owner="thief", lease_epoch=9, attempts=1)

    def broken(*args: Any, **facts: Any) -> None:
        raise OSError("no space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(lifecycle, "log", broken)
        worker._complete([first, stolen])
    assert now(first.job).status == "completed"
    assert worker._running() == [stolen], "nobody would ever look at it again"


def test_what_follows_the_commit_comes_in_the_same_order_with_others_and_alone() -> None:
    """The hook's own callback last, so that whatever it raises keeps nobody from being told."""

    class Exiting(Hooked):
        name = "fast.exiting"
        seen: list[Any] = []

        def after_commit(self, job: Job, note: str) -> None:
            self.seen.append("callback")
            raise SystemExit

        def after_transition(self, job: Job) -> None:
            self.seen.append("after_transition")

    kinds.register(Exiting)
    try:
        job, lease = running(kind=Hooked)
        shared_end = Ending(kinds.get(Exiting), job, lease, None, Share.HOOKED)
        with database.transaction(database.alias()):
            lifecycle.complete_many("me", [shared_end])
        lifecycle.tell_completed(shared_end)
        job, lease = running(kind=Hooked)
        lifecycle.complete(kinds.get(Exiting), lease, None)
    finally:
        kinds.unregister(Exiting.name)
    assert Exiting.seen == ["after_transition", "callback"] * 2


def test_a_slow_hook_ends_its_jobs_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    counted = shared(monkeypatch)
    monkeypatch.setattr(lifecycle, "QUICK_HOOK_SECONDS", 1e-9)
    jobs = [start(kind=Hooked) for _ in range(5)]
    assert Worker(queues=["fast"], concurrency=2, until_idle=True).run() == 0
    assert {now(job).status for job in jobs} == {"completed"} and not counted


def test_a_hook_that_leaves_a_transaction_open_does_not_stop_the_worker(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Whether it is found in a shared transaction or alone, the others end, and their rows are committed."""
    monkeypatch.setattr(lifecycle, "QUICK_HOOK_SECONDS", 10.0)
    first = [start(kind=Hooked) for _ in range(3)]
    broken = start(kind=Hooked, note="leaves open")
    after = [start(kind=kind) for _ in range(5) for kind in (Hooked, Mirrored, Fast)]
    with RunningHere(queues=["fast"], concurrency=2):
        wait_until(lambda: ended(*first, *after), 30, "the others did not end")
    assert {now(job).status for job in (*first, *after)} == {"completed"}
    assert now(broken).status != "completed"


def test_whoever_observes_slices_is_told_once_after_the_commit(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []
    variable: ContextVar[str] = ContextVar("variable", default="outside")

    @contextmanager
    def observe(kind: Kind, job: Job) -> Iterator[Callable[[SliceResult], None]]:
        token = variable.set("inside")

        def told(result: SliceResult) -> None:
            assert result.job is not None
            facts = (str(result.outcome), result.job.status, now(job).status, variable.get())
            seen.append((job.id, *facts, connection.in_atomic_block))

        yield told
        variable.reset(token)

    counted = shared(monkeypatch)
    monkeypatch.setattr(runner, "observers", [observe])
    jobs = [start(kind=kind) for _ in range(10) for kind in (Fast, Told, Mirrored)]
    assert Worker(queues=["fast"], concurrency=2, until_idle=True).run() == 0
    assert sorted(one for one, *_ in seen) == sorted(job.id for job in jobs)
    assert {rest for _, *rest_ in seen for rest in [tuple(rest_)]} == {
        ("completed", "completed", "completed", "inside", False)
    }
    assert sum(counted.values()) > 10


# --- jobs claimed ahead of their turn


def claim_ahead(limit: int = 8) -> list[Job]:
    probes = [Probe("fast", Fast.name, 0, None, 60.0)]
    return [one.job for one in store.claim_next("me", limit, probes, ahead=True)]


def test_what_is_claimed_ahead_has_not_begun_unless_it_was_redriven() -> None:
    fresh, redriven = start(), start()
    change(redriven, redrives=1)
    beaten = {job.id: job.heartbeat_at for job in claim_ahead()}
    assert beaten[fresh.id] is None and beaten[redriven.id] is not None
    store.beat_many("me", [Lease(fresh.id, "me", 1, 60.0)])
    assert now(fresh).heartbeat_at is not None


def test_the_end_of_a_worker_is_not_counted_against_what_had_not_begun() -> None:
    fresh, begun = start(), start()
    claim_ahead()
    store.beat_many("me", [Lease(begun.id, "me", 1, 60.0)])
    orphans = {orphan.id: orphan for orphan in store.dead_leases("me")}
    assert (orphans[fresh.id].begun, orphans[begun.id].begun) == (False, True)
    assert store.take_orphan(orphans[begun.id], grace=0, delay=0, dead=True, counted=False) is None
    report = Reconciler("mender").repair_dead("me")
    assert report.redriven == 2
    assert (now(fresh).redrives, now(fresh).redrives_since_commit) == (1, 0)
    assert (now(begun).redrives, now(begun).redrives_since_commit) == (1, 1)


def most_running(act: Callable[[], bool], timeout: float) -> int:
    most, end = 0, time.monotonic() + timeout
    while not act():
        assert time.monotonic() < end
        most = max(most, Job.objects.filter(status="running").count())
    return most


def test_only_kinds_that_end_at_once_and_may_be_repeated_are_claimed_ahead() -> None:
    for kind, how, limit in ((Careful, "slow", 4), (Fast, "slow", 100)):
        jobs = [start(how, kind) for _ in range(60)]
        with RunningHere(queues=["fast"], concurrency=2):
            most = most_running(lambda jobs=jobs: ended(*jobs), 30)  # type: ignore[misc]
        assert most <= limit, kind
        if kind is Fast:
            assert most > 2


def test_a_drain_gives_back_what_was_claimed_ahead(settings: Any) -> None:
    jobs = [start("slow") for _ in range(100)]
    with RunningHere(queues=["fast"], concurrency=2):
        wait_until(lambda: Job.objects.filter(status="completed").count() > 5, 10, "nothing ends")
        wait_until(lambda: Job.objects.filter(status="running", heartbeat_at=None).exists(), 10, "none ahead")
    states = Counter(now(job).status for job in jobs)
    assert set(states) == {"completed", "pending"}
    assert not Job.objects.exclude(interruptions=0, redrives=0, consecutive_failures=0).exists()


def test_what_waits_behind_a_long_job_goes_back_to_others() -> None:
    quick = [start() for _ in range(30)]
    with RunningHere(queues=["fast"], concurrency=1):
        wait_until(lambda: ended(*quick), 10, "not warm")
        long = start("wait")
        behind = [start() for _ in range(10)]
        wait_until(lambda: now(long).status == "running", 5, "not begun")
        with RunningHere(queues=["fast"], concurrency=1):
            wait_until(lambda: ended(*behind), 10, "they wait for the long one")
        assert not ended(long)
        GATE.set()
    assert now(long).status == "completed"


def test_a_cancel_that_comes_while_a_job_waits_its_turn_is_obeyed() -> None:
    job = start()
    (claimed,) = claim_ahead()
    hold = Hold(Lease(job.id, "me", claimed.lease_epoch, 60.0))
    service.cancel(job.id)
    hold.observe(cancel=True)
    result = begin_slice(claimed, hold, Keeper("me"), grouped=True)
    assert isinstance(result, SliceResult) and result.outcome == "cancelled"
    assert now(job).status == "cancelled"


# --- poison


def test_what_was_claimed_with_a_job_that_kills_its_worker_is_not_taken_for_poison(
    processes: Processes,
) -> None:
    """200 quick jobs, and one in their midst that kills whoever runs it, three workers without a supervisor."""
    settings = {**SETTINGS, "DISCOVER": ["fast_kinds"], "TICK": 0.2, "GRACE": 0.2}
    for kind in fast_kinds.KINDS:
        kinds.register(kind)
    try:
        jobs = [service.start("fast.quick").job for _ in range(100)]
        killer = service.start("fast.killer").job
        jobs += [service.start("fast.quick").job for _ in range(100)]
        deadline = time.monotonic() + 90
        worker: Process | None = None
        while not ended(*jobs, killer):
            assert time.monotonic() < deadline
            if worker is None or not worker.running:
                worker = processes.manage(
                    "runworker",
                    "--concurrency",
                    "2",
                    settings=settings,
                    environment={fast_kinds.SPACING: "0.1"},
                )
            time.sleep(0.05)
        assert worker is not None
        worker.terminate()
        worker.wait(15)
    finally:
        for kind in fast_kinds.KINDS:
            kinds.unregister(kind.name)
    assert (now(killer).status, now(killer).error_code) == ("failed", "poison")
    assert {now(job).status for job in jobs} == {"completed"}
    # Beside the killer runs one other thread: what that had begun is counted, nothing else.
    counted = JobEvent.objects.filter(event="orphaned").exclude(job_id=killer.id)
    assert sum("begun" not in event.data for event in counted) <= killer_deaths(killer)


def killer_deaths(killer: Job) -> int:
    return JobEvent.objects.filter(job_id=killer.id, event__in=["orphaned", "parked"]).count()


# --- statements past Django's cursors


@pytest.mark.postgres_only
def test_the_project_s_own_statements_are_left_as_they_are() -> None:
    own_connection.own("test")
    try:
        start()
        raw = connection.connection
        with connection.cursor() as cursor:
            for _ in range(10):
                cursor.execute("SELECT %s", [1])
        assert claim_ahead()
        names = list(raw.execute("SELECT statement FROM pg_prepared_statements"))
        assert names and all("durable_jobs_" in text for (text,) in names)
    finally:
        own_connection.disown()


@pytest.mark.postgres_only
def test_a_prepared_statement_that_was_taken_away_is_done_without() -> None:
    """As a pooler does that gives each transaction another server connection."""
    own_connection.own("test")
    try:
        job = start()
        assert store.get(job.id) is not None
        with connection.cursor() as cursor:
            cursor.execute("DO $$ BEGIN EXECUTE 'DEALLOCATE ALL'; END $$")
        assert store.get(job.id) is not None
        assert store.get(job.id) is not None
    finally:
        own_connection.disown()


@pytest.mark.postgres_only
def test_nothing_is_prepared_where_the_project_says_so(settings: Any) -> None:
    settings.DURABLE_JOBS = {**SETTINGS, "PREPARE": False}
    own_connection.own("test")
    try:
        job = start()
        for _ in range(3):
            assert store.get(job.id) is not None
        count = connection.connection.execute("SELECT count(*) FROM pg_prepared_statements").fetchone()
        assert count == (0,)
    finally:
        own_connection.disown()


def prepared() -> set[str]:
    raw = connection.connection
    return {name for (name,) in raw.execute("SELECT name FROM pg_prepared_statements")}


def estimated_rows() -> float:
    with connection.cursor() as cursor:
        cursor.execute("SELECT reltuples FROM pg_class WHERE oid = 'durable_jobs_job'::regclass")
        return float(cursor.fetchone()[0])


@pytest.mark.postgres_only
def test_after_a_claim_that_took_long_plans_are_made_anew_and_not_again_soon(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A plan for a table that was nearly empty is kept for ever, and walks whatever has come since."""
    monkeypatch.setattr(transport, "LONG_CLAIM_SECONDS", -1000.0)
    own_connection.own("test")
    try:
        jobs = [start() for _ in range(300)]
        claimer = Claimer("me", queues=["fast"])
        assert claimer.claim(4)
        old = prepared()
        assert old
        claimer.renew_doubtful_plans()
        assert not prepared() & old
        assert estimated_rows() == len(jobs)
        assert claimer.claim(4)
        kept = prepared()
        assert kept and connection.connection.prepare_threshold is not None
        claimer.renew_doubtful_plans()
        assert prepared() >= kept
    finally:
        own_connection.disown()


@pytest.mark.postgres_only
def test_a_claim_that_takes_its_time_leaves_the_plans_alone() -> None:
    own_connection.own("test")
    try:
        start()
        claimer = Claimer("me", queues=["fast"])
        assert claimer.claim(4)
        claimer._plans_doubted = False
        claimer._time_claim(transport.LONG_CLAIM_SECONDS, 1)
        kept = prepared()
        claimer.renew_doubtful_plans()
        assert kept and prepared() >= kept
    finally:
        own_connection.disown()


@pytest.mark.postgres_only
def test_a_worker_renews_plans_between_two_claims(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transport, "LONG_CLAIM_SECONDS", -1000.0)
    renewed = threading.Event()
    renew = store.renew_plans

    def watched() -> None:
        assert not connection.in_atomic_block
        renew()
        renewed.set()

    monkeypatch.setattr(store, "renew_plans", watched)
    with RunningHere(queues=["fast"], concurrency=1):
        first = start()
        assert renewed.wait(30)
        second = start()
        wait_until(lambda: ended(first, second), 30, "not completed afterwards")


# --- what an idle worker is told of


PLACE = transport.Pair("fast", Fast.name, 0)


def told_of(worker: Worker, place: transport.Pair = PLACE) -> None:
    """As its listener tells it while it waits."""
    worker.claimer._waits = True
    worker.claimer.heard(place)


@pytest.mark.postgres_only
def test_what_an_idle_worker_is_told_of_ends_as_it_would_by_a_whole_round(
    monkeypatch: pytest.MonkeyPatch, settings: Any
) -> None:
    settings.DURABLE_JOBS = {**SETTINGS, "LISTEN": False, "POLL": 5}
    # What could not begin at once is not to go back, however slow the machine is.
    monkeypatch.setattr("durable_jobs.worker.LONGEST_UNBEGUN", 600.0)
    begin_told = Worker._begin_told
    begun: list[bool] = []
    waits = Claimer.wait
    ways: list[str] = []

    def starts_the_next(self: Claimer, timeout: float) -> None:
        if ways and ended(*Job.objects.all()):
            # There before it counts as started: whoever waits for all looks at both.
            start(ways[-1])
            ways.pop()
            self._waits = True
            self.heard(told)
        else:
            waits(self, min(timeout, 0.05))

    def left() -> Any:
        forget_everything()
        ways.extend(WAYS)
        with RunningHere(queues=["fast"], concurrency=4):
            wait_until(lambda: not ways and ended(*Job.objects.all()), 60, "not all have ended")
        return left_behind()

    monkeypatch.setattr(Claimer, "wait", starts_the_next)
    monkeypatch.setattr(Worker, "_begin_told", lambda self: begun.append(begin_told(self)) or begun[-1])
    told: transport.Pair | None = None
    by_whole_rounds = left()
    assert not begun
    told = PLACE
    assert left() == by_whole_rounds
    assert begun == [True] * len(WAYS)


@pytest.mark.postgres_only
def test_a_lease_that_it_was_told_of_is_never_unheld(monkeypatch: pytest.MonkeyPatch) -> None:
    worker = Worker(queues=["fast"])
    job = start()
    told_of(worker)
    open_claims: list[int] = []
    held: list[Any] = []
    claim_one, ends = store.claim_one, type(worker.keeper._claiming).__exit__

    def claims(*given: Any, **more: Any) -> Any:
        open_claims.append(worker.keeper._claiming.open)
        return claim_one(*given, **more)

    def ending(self: Any, *error: object) -> None:
        held.extend(worker.keeper._holds)
        ends(self, *error)

    monkeypatch.setattr(store, "claim_one", claims)
    monkeypatch.setattr(type(worker.keeper._claiming), "__exit__", ending)
    assert worker._round()
    assert open_claims == [1] and held == [(job.id, 1)]
    assert worker.keeper._claiming.open == 0
    (task,) = worker._tasks
    assert task is worker._inbox.get_nowait() and task.lease == Lease(job.id, worker.owner, 1, 60.0)


@pytest.mark.postgres_only
@pytest.mark.parametrize("why", ["is full", "has ends", "runs a suspect", "is paused", "is of another queue"])
def test_what_a_worker_may_not_begin_it_does_not_begin_because_it_is_told(why: str) -> None:
    worker = Worker(queues=["fast"], concurrency=1 if why == "is full" else 2)
    claimed, lease = running()
    task = Task(claimed, Hold(lease), suspect=why == "runs a suspect")
    worker.keeper.hold(task.hold)
    if why in ("is full", "runs a suspect"):
        worker._tasks[task] = None
    if why == "has ends":
        worker._ended.append(task)
    job = start()
    if why == "runs a suspect":
        change(job, redrives_since_commit=1)
    if why == "is paused":
        service.pause(queue="fast", reason="test", actor="test")
    told_of(worker, PLACE._replace(queue="other") if why == "is of another queue" else PLACE)
    assert not worker._begin_told()
    assert now(job).status == "pending" and worker._inbox.empty()
    assert list(worker.keeper._holds) == [task.hold.key]


@pytest.mark.postgres_only
def test_a_kind_with_a_limit_is_counted_also_when_a_worker_is_told_of_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Fast, "max_running", 1)
    jobs = [start(), start()]
    workers = Worker(queues=["fast"]), Worker(queues=["fast"])
    for worker in workers:
        told_of(worker)
    assert [worker._begin_told() for worker in workers] == [True, False]
    assert sorted(now(job).status for job in jobs) == ["pending", "running"]


@pytest.mark.postgres_only
def test_where_nothing_is_left_of_what_it_was_told_it_asks_once(monkeypatch: pytest.MonkeyPatch) -> None:
    worker = Worker(queues=["fast"])
    assert not worker._round()
    # No list is made anew, from which the place would be missing.
    worker.claimer._sweep_at = math.inf
    asked: list[str] = []
    for name in ("claim_one", "claim_next"):
        real = getattr(store, name)
        monkeypatch.setattr(
            store, name, lambda *a, _real=real, _name=name, **k: asked.append(_name) or _real(*a, **k)
        )

    def asks(act: Callable[[], object]) -> list[str]:
        asked.clear()
        act()
        return list(asked)

    told_of(worker)
    assert asks(worker._round) == ["claim_one"]
    assert asks(worker._round) == ["claim_next"]
    for between in (worker.claimer.wait, worker.claimer.rest):
        told_of(worker)
        assert asks(worker._begin_told) == ["claim_one"]
        between(0)
        assert asks(worker._round) == ["claim_next"]
    told_of(worker)
    assert asks(worker._begin_told) == ["claim_one"]
    worker.claimer._waits = False
    worker.claimer.heard(PLACE)
    assert asks(worker._round) == ["claim_next"]
    told_of(worker)
    other = start(kind=Told)
    worker.claimer.expect(other)
    assert asks(worker._round) == ["claim_one", "claim_next"]
    assert now(other).status == "running"


def test_a_wake_up_ends_one_wait_and_is_not_lost_before_it() -> None:
    wakeup = transport._Wakeup()
    assert not wakeup.is_set and not wakeup.wait(0) and not wakeup.wait(-1.0)
    wakeup.set()
    wakeup.set()
    assert wakeup.is_set and wakeup.wait(0) and not wakeup.is_set and not wakeup.wait(0.001)
    woken: list[bool] = []
    waiting = threading.Thread(target=lambda: woken.append(wakeup.wait(60)))
    waiting.start()
    wakeup.set()
    waiting.join(60)
    assert woken == [True] and not wakeup.is_set


@pytest.mark.postgres_only
def test_hooks_are_not_forgotten_where_the_claiming_thread_was_away_meanwhile(
    quick: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The thread for ends failed, and by the time the claiming thread looks the rest from that is over."""
    monkeypatch.setattr("durable_jobs.worker.LONGEST_UNBEGUN", 0.0)
    complete_many, failed = lifecycle.complete_many, threading.Event()

    def failing_once(owner: str, endings: Any) -> None:
        if not failed.is_set():
            failed.set()
            raise InterfaceError("the connection was cut")
        complete_many(owner, endings)

    monkeypatch.setattr(lifecycle, "complete_many", failing_once)
    one = start(kind=Hooked)
    with RunningHere(queues=["fast"], concurrency=2):
        wait_until(lambda: ended(one), 20, "nobody completes it")
    assert failed.is_set()


@pytest.mark.postgres_only
@pytest.mark.parametrize(
    "sql", ["SET LOCAL app.tenant = 'first'", "SELECT set_config('app.tenant', 'first', true)"]
)
@pytest.mark.parametrize("most", [16, 1])
def test_what_a_hook_sets_for_its_transaction_is_not_met_by_the_next(
    most: int, sql: str, quick: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such as the tenant of row-level security, a role, or another lock_timeout."""
    monkeypatch.setattr(lifecycle, "MOST_HOOKS", most)
    on_transition, found = Hooked.on_transition, list[Any]()

    def setting(self: Hooked, job: Job) -> int:
        with connection.cursor() as cursor:
            cursor.execute("SELECT current_setting('app.tenant', true)")
            found.append(cursor.fetchone()[0] or "")
            if job.id == ends[0].job.id:
                cursor.execute(sql)
        return on_transition(self, job)

    monkeypatch.setattr(Hooked, "on_transition", setting)
    ends = [ending(Hooked, Share.HOOKED) for _ in range(3)]
    complete_hooked(*ends)
    assert set(found) == {""}
    assert lifecycle.share_of(kinds.get(Hooked)) is Share.ALONE
    assert lifecycle._alone_until[Hooked.name] == float("inf")
