"""A process may die between any two statements: nothing live is ever out of sight of the repair.

The death is a closed connection (what was open is rolled back, nothing commits any more) and an error that no
statement of the dead gets past. Every statement counts: the store's, the step's own, and the hooks'.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
from django.db import connection

from durable_jobs import database, kinds, pruning, runner, service, store
from durable_jobs.exceptions import TerminalError
from durable_jobs.kinds import BatchKind, Done, StatusMirror, Yield
from durable_jobs.models import LIVE, Job, JobEvent, Pause
from durable_jobs.reconciler import Reconciler
from durable_jobs.runner import SliceContext
from tests.models import Parcel, Shipment
from tests.operate.conftest import proof
from tests.operate.kinds import Ship, move
from tests.slices import AT_ONCE, OWNER, change, events, made, row

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.usefixtures("registry")]

MOVES = 3
AGREEING = {
    "pending": ("queued", "moving"),
    "running": ("queued", "moving"),
    "completed": ("arrived",),
    "failed": ("lost",),
    "cancelled": ("stopped",),
}


class Died(BaseException):
    """The process is no more."""


class Death:
    """Comes before (even) or after (odd) the statement of a number, counted from 0."""

    last: Death | None = None

    def __init__(self, position: int | None) -> None:
        self.position = position
        self.statements = 0
        self.come = False
        Death.last = self

    def __call__(self, execute: Any, sql: str, params: Any, many: bool, context: Any) -> Any:
        if self.come:
            raise Died
        number = self.statements
        self.statements += 1
        if self.position == 2 * number:
            self._strike(context)
        result = execute(sql, params, many, context)
        if self.position == 2 * number + 1:
            self._strike(context)
        return result

    def _strike(self, context: Any) -> None:
        self.come = True
        # SQLite's connection lives on until its cursors are closed.
        context["cursor"].close()
        context["connection"].connection.close()
        raise Died


@contextmanager
def dying(position: int | None) -> Iterator[Death]:
    """Die at this position of what the block executes; with None live, and count."""
    death = Death(position)
    try:
        with connection.execute_wrapper(death):
            yield death
    except BaseException:
        if not death.come:
            raise
    finally:
        Death.last = None
        if death.come:
            database.discard(connection)


def every_death(prepare: Callable[[], Any], act: Callable[[Any], Any]) -> Iterator[tuple[int, Any]]:
    """Run `act(prepare())` once for each place at which it can die; give the place and what was prepared."""
    given = prepare()
    with dying(None) as counted:
        act(given)
    assert counted.statements
    for position in range(2 * counted.statements):
        given = prepare()
        with dying(position) as death:
            act(given)
        assert death.come, position
        yield position, given


# --- kinds and their lives


def ships(ctx: SliceContext) -> Done | Yield:
    return Ship.step(Ship(), ctx)


def fails(ctx: SliceContext) -> Done | Yield:
    """For good, after its first move."""
    if not ctx.checkpoint:
        with ctx.fenced():
            move(ctx.job.subject_id)
            ctx.save_checkpoint(1)
    raise TerminalError("no way on")


def wavers(ctx: SliceContext) -> Done | Yield:
    """Fails once, and gets there."""
    if not ctx.job.consecutive_failures and ctx.checkpoint == 2:
        raise ConnectionError("the other side is away")
    return ships(ctx)


@pytest.fixture
def kinds_registered(settings: Any) -> None:
    # A debounced NOTIFY is a statement more or less.
    settings.DURABLE_JOBS = {"NOTIFY_DEBOUNCE": 0}
    for step, policy in ((fails, "redrive"), (wavers, "redrive"), (ships, "park")):
        made(step, name=f"operate.{step.__name__}", mirror=copy_of(Ship.mirror), orphan_policy=policy)


def load(ctx: SliceContext, batch: list[str]) -> None:
    """Load each parcel of the batch; one in the middle is too heavy."""
    for label in batch:
        if label.startswith("heavy"):
            raise ValueError(label)
        Parcel.objects.create(label=f"{label} of {ctx.job.subject_id}", done=1)
        Shipment.objects.filter(pk=ctx.job.subject_id).update(status=Shipment.Status.MOVING)


LABELS = ["one", "two", "heavy", "three", "four"]


@pytest.fixture
def batches_registered(kinds_registered: None) -> None:
    """One kind that reads a list, and one that reads a table and goes again until it is empty."""
    shared: dict[str, Any] = {
        "batch_size": 2,
        "retry": AT_ONCE,
        "__module__": __name__,
        "process": lambda self, ctx, batch: load(ctx, batch),
    }
    listed = {
        "name": "operate.listed",
        "mirror": copy_of(Ship.mirror),
        "max_skipped": 1,
        "collection": lambda self, ctx: LABELS,
        "on_item_error": lambda self, ctx, item, error: True,
    }

    def take(self: Any, ctx: SliceContext, batch: list[Parcel]) -> None:
        load(ctx, [parcel.label for parcel in batch])
        Parcel.objects.filter(pk__in=[parcel.pk for parcel in batch]).update(rank=1)

    emptied = {
        "name": "operate.emptied",
        "mirror": copy_of(Ship.mirror),
        "passes": "until_empty",
        "collection": lambda self, ctx: Parcel.objects.filter(label__in=LABELS, rank=None).order_by("pk"),
        "process": take,
    }
    for attributes in (listed, emptied):
        kinds.register(type("Batches", (BatchKind,), {**shared, **attributes}))


def loaded(job: Job) -> dict[str, int]:
    """How often each parcel was loaded by this job."""
    labels = Parcel.objects.filter(label__endswith=f" of {job.subject_id}").values_list("label", flat=True)
    return dict(Counter(label.partition(" of ")[0] for label in labels))


def copy_of(mirror: StatusMirror | None) -> StatusMirror:
    assert mirror is not None
    names = ("field", "open", "redriven", "completed", "failed", "cancelled")
    return StatusMirror(mirror.model_label, **{name: getattr(mirror, name) for name in names})


def shipped(kind: str) -> Job:
    return service.start(kind, MOVES, subject=Shipment.objects.create()).job


def claim(job: Job) -> Job:
    current = row(job)
    claimed = store.claim(current.id, current.continuation_seq, current.redrives, OWNER, 60.0)
    assert isinstance(claimed, Job), (current.status, claimed)
    return claimed


def live(job: Job) -> None:
    """Run slices until the job has ended."""
    for _ in range(20):
        if row(job).status not in LIVE:
            return
        runner.run_slice(claim(job), owner=OWNER)
    raise AssertionError(f"no end: {row(job).status}")


def ask_and_live(job: Job) -> None:
    """The same, with a cancel that arrives when the first slice has been claimed."""
    claimed = claim(job)
    service.cancel(job.id)
    runner.run_slice(claimed, owner=OWNER)
    live(job)


# --- what must hold


def seen_by_repair(job: Job) -> None:
    """A live job can be claimed, or is an orphan by its owner's death and by its lease's end."""
    now = row(job)
    if now.status not in LIVE:
        return
    if now.next_run_at is not None:
        assert now.lease_owner is None
        pair = (now.queue_name, now.kind)
        assert pair in {(route.queue, route.kind) for route in store.routes()}
        return
    assert now.status == "running" and now.lease_owner == OWNER
    assert [orphan.id for orphan in store.dead_leases(OWNER)] == [now.id]


def agrees(job: Job) -> None:
    now = row(job)
    assert Shipment.objects.get(pk=now.subject_id).status in AGREEING[now.status], now.status


def moves(job: Job) -> int:
    parcel = Parcel.objects.filter(label=f"shipment {job.subject_id}").first()
    return parcel.done if parcel else 0


def repair(job: Job, position: int) -> None:
    """By the supervisor that has reaped the process, or by a reconciler that sees the lease run out twice."""
    if position % 4 < 2:
        Reconciler("operate:repair").repair_dead(OWNER)
        Reconciler("operate:repair").tick()
    else:
        now = row(job)
        if now.status == "running" and now.lease_owner:
            change(now, lease_expires_at=datetime.now(UTC) - timedelta(hours=1))
        clock = [0.0]
        reconciler = Reconciler("operate:repair", clock=lambda: clock[0])
        for _ in range(2):
            reconciler.tick()
            clock[0] += 25
    now = row(job)
    assert now.status not in LIVE or now.next_run_at is not None, "left as it was"


# --- the deaths


@pytest.mark.parametrize(
    ("kind", "life", "end"),
    [
        pytest.param("operate.ship", live, "completed", marks=proof),
        ("operate.wavers", live, "completed"),
        ("operate.fails", live, "failed"),
        ("operate.ship", ask_and_live, "cancelled"),
    ],
    ids=["completes", "retries", "fails", "is cancelled"],
)
def test_a_slice_that_dies_at_any_statement_is_repaired_and_comes_to_its_end(
    kinds_registered: None, kind: str, life: Callable[[Job], None], end: str
) -> None:
    """C008: between the step's return and the end of the job, too."""
    """C017, C019."""
    for position, job in every_death(lambda: shipped(kind), life):
        asked = row(job).cancel_requested_at is not None
        seen_by_repair(job)
        agrees(job)
        repair(job, position)
        agrees(job)
        live(job)
        agrees(job)
        ended = row(job)
        expected = "completed" if life is ask_and_live and not asked else end
        assert ended.status == expected, position
        if ended.status == "completed":
            assert moves(job) == MOVES, position


def test_a_batch_that_dies_at_any_statement_is_repaired_and_applied_once(batches_registered: None) -> None:
    """The failure of the batch, the items one by one, and the skipped one are on the way."""
    expected = dict.fromkeys(("one", "two", "three", "four"), 1)
    for position, job in every_death(lambda: shipped("operate.listed"), live):
        seen_by_repair(job)
        agrees(job)
        repair(job, position)
        live(job)
        agrees(job)
        assert (row(job).status, row(job).processed_count) == ("completed", len(LABELS)), position
        assert loaded(job) == expected, position
        assert events(job).count("item_skipped") == 1, position


@proof
def test_a_pass_over_a_table_that_dies_at_any_statement_takes_each_row_once(
    batches_registered: None,
) -> None:
    labels = ["one", "two", "three"]

    def filled() -> Job:
        Parcel.objects.all().delete()
        for label in labels:
            Parcel.objects.create(label=label)
        return shipped("operate.emptied")

    for position, job in every_death(filled, live):
        seen_by_repair(job)
        agrees(job)
        repair(job, position)
        live(job)
        agrees(job)
        assert row(job).status == "completed", position
        assert loaded(job) == dict.fromkeys(labels, 1), position
        assert not Parcel.objects.filter(label__in=labels, rank=None).exists()


def test_a_repair_that_dies_at_any_statement_is_done_by_the_next_one(kinds_registered: None) -> None:
    """C016."""

    def orphaned() -> Job:
        return claim(shipped("operate.ship"))

    for position, job in every_death(orphaned, lambda job: Reconciler("operate:dies").repair_dead(OWNER)):
        seen_by_repair(job)
        agrees(job)
        repair(job, position)
        live(job)
        agrees(job)
        assert (row(job).status, moves(job), row(job).redrives) == ("completed", MOVES, 1)


def test_a_parking_that_dies_at_any_statement_parks_with_its_hooks_or_not_at_all(
    kinds_registered: None,
) -> None:
    def orphaned() -> Job:
        return claim(shipped("operate.ships"))

    for position, job in every_death(orphaned, lambda job: Reconciler("operate:dies").repair_dead(OWNER)):
        seen_by_repair(job)
        agrees(job)
        repair(job, position)
        agrees(job)
        assert (row(job).status, row(job).error_code) == ("failed", "orphaned")


def test_a_start_that_dies_at_any_statement_has_begun_or_not(kinds_registered: None) -> None:
    def act(shipment: Shipment) -> None:
        service.start("operate.ship", MOVES, subject=shipment)

    for _, shipment in every_death(lambda: Shipment.objects.create(), act):
        for job in Job.objects.filter(subject_id=str(shipment.pk)):
            seen_by_repair(job)
            live(job)
            agrees(job)


def test_a_cancel_that_dies_at_any_statement_is_settled_or_never_was(kinds_registered: None) -> None:
    for position, job in every_death(lambda: shipped("operate.ship"), lambda job: service.cancel(job.id)):
        asked = row(job).cancel_requested_at is not None
        seen_by_repair(job)
        agrees(job)
        repair(job, position)
        agrees(job)
        live(job)
        agrees(job)
        assert row(job).status == ("cancelled" if asked else "completed"), position


def test_a_redrive_that_dies_at_any_statement_has_reopened_both_rows_or_none(
    kinds_registered: None,
) -> None:
    def failed() -> Job:
        job = shipped("operate.fails")
        live(job)
        assert row(job).status == "failed"
        return job

    for position, job in every_death(failed, lambda job: service.redrive(job.id, force=True)):
        seen_by_repair(job)
        agrees(job)
        repair(job, position)
        agrees(job)


def test_a_pause_that_dies_at_any_statement_stops_claims_or_not_and_hides_nothing(
    kinds_registered: None,
) -> None:
    def act(job: Job) -> None:
        service.pause(kind=job.kind, reason="to see", actor="operator")
        claimed = claim(unpaused(job))
        assert claimed.status == "running"

    def unpaused(job: Job) -> Job:
        assert store.claim(job.id, job.continuation_seq, job.redrives, OWNER, 60.0) is None
        assert service.unpause(kind=job.kind, actor="operator")
        return job

    def prepare() -> Job:
        service.unpause(kind="operate.ship")
        return shipped("operate.ship")

    for position, job in every_death(prepare, act):
        seen_by_repair(job)
        paused = Pause.objects.exists()
        if paused:
            service.unpause(kind="operate.ship")
        repair(job, position)
        live(job)
        agrees(job)
        assert (row(job).status, moves(job)) == ("completed", MOVES), position


def test_a_settlement_that_dies_at_any_statement_ends_the_job_or_leaves_it_in_sight(
    kinds_registered: None, registry: None
) -> None:
    made(fails, name="operate.hopeless", on_transition=lambda self, job: 0, on_redrive=lambda self, job: 1)

    def hopeless() -> Job:
        job = shipped("operate.hopeless")
        for _ in range(3):
            runner.run_slice(claim(job), owner=OWNER)
        now = row(job)
        assert (now.status, now.verdict, now.mirror_attempts) == ("running", "retry_exhausted", 3), now
        return job

    def settle(job: Job) -> None:
        service.settle_without_hooks(job.id, actor="operator", reason="the hook cannot succeed")

    for position, job in every_death(hopeless, settle):
        seen_by_repair(job)
        settled = row(job).status == "failed"
        assert ("settled_without_hooks" in events(job)) is settled, position
        if not settled:
            settle(job)
        assert (row(job).status, row(job).domain_mirrored_at) == ("failed", None)


def test_a_pruning_that_dies_at_any_statement_takes_whole_jobs_and_archives_each_once(
    kinds_registered: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A dead process takes nothing out of its archive any more: the next run does."""
    truncate = os.ftruncate

    def unless_dead(descriptor: int, length: int) -> None:
        if Death.last is None or not Death.last.come:
            truncate(descriptor, length)

    monkeypatch.setattr(pruning.os, "ftruncate", unless_dead)

    @dataclass
    class History:
        archive: Path
        ended: list[Job]
        alive: Job

    def history() -> History:
        Job._base_manager.all().delete()
        JobEvent._base_manager.all().delete()
        ended = [shipped("operate.fails") for _ in range(2)]
        for job in ended:
            live(job)
        return History(tmp_path / f"{uuid4()}.jsonl", ended, shipped("operate.ship"))

    def prune(given: History) -> None:
        policy = pruning.Policy(pruning.cutoff(timedelta(seconds=-60)), ("failed",))
        pruning.prune(policy, given.archive, batch=1, rest=0)

    for position, given in every_death(history, prune):
        seen_by_repair(given.alive)
        left = set(Job.objects.values_list("id", flat=True)) - {given.alive.id}
        told = set(JobEvent.objects.values_list("job_id", flat=True))
        assert told == left, position
        prune(given)
        assert list(Job.objects.all()) == [given.alive]
        lines = [json.loads(line) for line in given.archive.read_text().splitlines()]
        archived = [line["job"]["id"] for line in lines if "job" in line]
        assert sorted(archived) == sorted(str(job.id) for job in given.ended), position
        live(given.alive)
        agrees(given.alive)
