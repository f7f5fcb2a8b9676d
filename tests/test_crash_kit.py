"""The crash-test kit: what it finds in kinds that are right and in kinds that are wrong."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
from django.core import mail
from django.db import connection, transaction
from django.db.models import F

from durable_jobs import service
from durable_jobs.exceptions import NotReclaimable, TerminalError, TransactionOwned
from durable_jobs.kinds import BatchKind, Done, Kind, StatusMirror
from durable_jobs.models import Job, Pause
from durable_jobs.reconciler import repair_once
from durable_jobs.runner import Outcome
from durable_jobs.testing import (
    CrashReport,
    crash_test,
    expire_lease,
    freeze_worker,
    interrupt_after,
    make_job,
    register_for_test,
    run,
    run_slice,
    run_until_idle,
)
from tests.models import Parcel, Shipment
from tests.slices import made, row, start

pytest_plugins = ["durable_jobs.testing.pytest"]
transactional = pytest.mark.django_db(transaction=True)


@pytest.fixture(autouse=True)
def own_kinds(registry: None) -> None:
    """Kinds of the test's own."""


def parcels() -> list[tuple[str, int]]:
    return list(Parcel.objects.order_by("label", "id").values_list("label", "done"))


def kind_of(work: Callable[[Any, int], None], items: int = 3, **attributes: Any) -> type[Kind]:
    """A kind that does `work(ctx, number)` for each number that its checkpoint has not passed."""

    def step(ctx: Any) -> Done:
        for number in range((ctx.checkpoint or 0) + 1, items + 1):
            work(ctx, number)
        return Done()

    return made(step, **{"name": f"tests.{work.__name__}", "orphan_policy": "redrive", **attributes})


def fenced(ctx: Any, number: int) -> None:
    with ctx.fenced():
        Parcel.objects.create(label=str(number))
        ctx.save_checkpoint(number)


def wrote_first(ctx: Any, number: int) -> None:
    """Wrong: the row and the checkpoint are two commits."""
    Parcel.objects.create(label=str(number))
    ctx.save_checkpoint(number)


def wrote_last(ctx: Any, number: int) -> None:
    """Wrong the other way round: a death between loses the row."""
    ctx.save_checkpoint(number)
    Parcel.objects.create(label=str(number))


def mailed(ctx: Any, number: int) -> None:
    with ctx.fenced():
        mail.send_mail(f"number {number}", "", None, ["anna@example.com"])
        ctx.save_checkpoint(number)


def mailed_after_the_commit(ctx: Any, number: int) -> None:
    with ctx.fenced():
        transaction.on_commit(lambda: mail.send_mail(f"number {number}", "", None, ["anna@example.com"]))
        ctx.save_checkpoint(number)


# --- what it finds ---


@transactional
def test_a_kind_that_works_in_fences_shows_no_death() -> None:
    """Killed at every place, nothing twice and nothing skipped."""
    report = crash_test(kind_of(fenced))
    report.assert_exact()
    assert report.exact and report.crashes > 12
    assert Parcel.objects.count() == 3 * (report.crashes + 1)


@transactional
def test_a_row_that_is_written_beside_its_checkpoint_is_there_twice() -> None:
    report = crash_test(kind_of(wrote_first))
    assert report.repeated and not report.missing and not report.ended
    assert {one.effect[:2] for one in report.repeated} == {  # type: ignore[index]
        ("tests.Parcel", f"label='{number}'") for number in (1, 2, 3)
    }
    assert {(difference.expected, difference.found) for difference in report.repeated} == {(1, 2)}
    with pytest.raises(AssertionError, match=r"Repeated(.|\n)*2 instead of 1, when it died"):
        report.assert_exact()
    report.assert_nothing_missing()


@transactional
def test_a_row_that_is_written_after_its_checkpoint_is_missing() -> None:
    report = crash_test(kind_of(wrote_last))
    assert report.missing and not report.repeated
    with pytest.raises(AssertionError, match="Missing"):
        report.assert_nothing_missing()
    assert any("after a commit" in one.where or "UPDATE" in one.where for one in report.missing)


@transactional
def test_a_mail_from_a_fence_may_go_out_twice_and_one_after_its_commit_not_at_all() -> None:
    """Effects outside the database are found as well."""
    inside = crash_test(kind_of(mailed, 1))
    assert inside.repeated and not inside.missing
    assert ("mail", "number 1", "anna@example.com") in {one.effect for one in inside.repeated}
    assert any("before a commit" in one.where for one in inside.repeated)
    after = crash_test(kind_of(mailed_after_the_commit, 1))
    assert after.missing and not after.repeated
    assert any("after a commit" in one.where for one in after.missing)


@transactional
def test_a_count_that_goes_up_twice_is_seen_in_the_row() -> None:
    """What a repeat changes in a row, not only how many rows there are."""

    def step(ctx: Any) -> Done:
        Parcel.objects.filter(pk=ctx.input).update(done=F("done") + 1)
        return Done()

    def prepare() -> None:
        Parcel.objects.all().delete()
        Parcel.objects.create(pk=7)

    report = crash_test(made(step, orphan_policy="redrive"), 7, prepare=prepare)
    assert {(one.expected, one.found) for one in report.repeated} == {(0, 1)}
    assert any("done=2" in one.effect for one in report.repeated)  # type: ignore[operator]


@transactional
def test_a_kind_that_parks_is_redriven_and_its_own_row_comes_along() -> None:
    mirror = StatusMirror(
        "tests.Shipment",
        open=["queued", "moving"],
        redriven="queued",
        completed="arrived",
        failed="lost",
        cancelled="stopped",
    )
    kind = kind_of(fenced, 1, orphan_policy="park", mirror=mirror)
    report = crash_test(kind, prepare=lambda: {"subject": Shipment.objects.create()})
    report.assert_exact()
    assert set(Shipment.objects.values_list("status", flat=True)) == {"arrived"}
    assert Job.objects.filter(redrives=1).count() > 5


@transactional
def test_a_batch_kind_shows_no_death() -> None:
    """B191: after a death nothing is repeated and nothing skipped."""

    class Batched(BatchKind):
        name = "tests.crashed_batches"
        batch_size = 2

        def collection(self, ctx: Any) -> Any:
            return range(5)

        def process(self, ctx: Any, batch: list[int]) -> None:
            Parcel.objects.bulk_create(Parcel(label=str(number)) for number in batch)

    with register_for_test(Batched):
        crash_test(Batched).assert_exact()


@transactional
def test_an_end_that_a_death_changes_is_told() -> None:
    """A step that takes its second run for a mistake."""

    def step(ctx: Any) -> Done:
        if Parcel.objects.filter(label=str(ctx.job.id)).exists():
            raise TerminalError("it has run before")
        Parcel.objects.create(label=str(ctx.job.id))
        return Done()

    report = crash_test(made(step, orphan_policy="redrive"))
    assert {(status, undisturbed) for _, status, undisturbed in report.ended} == {("failed", "completed")}
    assert "failed instead of completed, when it died" in str(report)
    with pytest.raises(AssertionError):
        report.assert_nothing_missing()


@transactional
def test_effects_can_be_told_by_the_caller_and_fields_left_out() -> None:
    sent: list[str] = []

    def step(ctx: Any) -> Done:
        sent.append(ctx.effect_key("hello"))
        Parcel.objects.create(label=str(len(sent)))
        ctx.save_checkpoint(1)
        return Done()

    kind = made(step, orphan_policy="redrive")
    by_key = crash_test(kind, effects=lambda job: [key for key in sent if str(job.id) in key])
    assert {one.effect for one in by_key.repeated} == {"<job>:hello"}
    labels = crash_test(kind, ignore=["tests.Parcel.label"])
    assert not labels.missing and {one.found for one in labels.repeated} == {2}


@transactional
def test_many_places_are_tried_at_equal_distances() -> None:
    kind = kind_of(fenced)
    everywhere = crash_test(kind)
    some = crash_test(kind, most_crashes=5)
    assert 3 <= some.crashes <= 5 < everywhere.crashes


@transactional
def test_nothing_is_left_behind() -> None:
    wrappers = list(connection.execute_wrappers)
    kind = kind_of(fenced, 1)
    crash_test(kind)
    assert connection.execute_wrappers == wrappers and "commit" not in vars(connection)
    assert not connection.in_atomic_block and connection.get_autocommit()
    assert run(kind).status == "completed"


@pytest.mark.django_db
def test_it_needs_real_transactions() -> None:
    with pytest.raises(TransactionOwned, match="crash_test"):
        crash_test(kind_of(fenced))


def test_a_report_without_a_finding_is_exact() -> None:
    assert CrashReport(crashes=3).exact and str(CrashReport(crashes=3)) == "3 crashes"


# --- idle, expired, frozen ---


@pytest.mark.django_db
class TestRunUntilIdle:
    def test_what_is_due_runs_by_priority_and_what_it_starts_runs_too(self) -> None:
        order: list[Any] = []

        def step(ctx: Any) -> Done:
            order.append(ctx.input)
            if ctx.input == "late":
                service.start(ctx.job.kind, "chained")
            return Done()

        kind = made(step)
        late, early = start(kind, "late"), start(kind, "early", priority=5)
        ran = run_until_idle()
        assert order == ["early", "late", "chained"]
        assert [job.id for job in ran[:2]] == [early.id, late.id]
        assert {job.status for job in ran} == {"completed"}
        assert run_until_idle() == []

    def test_retries_are_not_waited_for(self) -> None:
        fails = [True, True, False]

        def step(ctx: Any) -> Done:
            if fails.pop(0):
                raise ConnectionError
            return Done()

        start(made(step))
        assert [job.status for job in run_until_idle()] == ["completed"]

    def test_what_is_for_later_held_or_paused_stays(self) -> None:
        kind = made(lambda ctx: Done())
        start(kind, run_after=timedelta(hours=1))
        start(kind, hold=True)
        service.pause(queue="elsewhere", reason="a test", actor="tests")
        start(kind, queue="elsewhere")
        assert Pause.objects.count() == 1
        assert run_until_idle() == []
        service.unpause(queue="elsewhere", actor="tests")
        assert len(run_until_idle()) == 1


@pytest.mark.django_db
class TestExpireLease:
    def test_the_job_becomes_an_orphan(self) -> None:
        kind = kind_of(fenced, orphan_policy="park")
        job = make_job("running", kind=kind)
        expired = expire_lease(job)
        assert (expired.status, expired.lease_owner) == ("running", job.lease_owner)
        assert repair_once(wait=False).parked == 1
        assert (row(job).status, row(job).error_code) == ("failed", "orphaned")

    @pytest.mark.parametrize("status", ["pending", "retrying", "completed", "parked"])
    def test_what_nobody_holds_has_no_lease(self, status: str) -> None:
        job = make_job(status, kind=kind_of(fenced))
        with pytest.raises(NotReclaimable):
            expire_lease(job)


@pytest.mark.django_db
class TestFreezeWorker:
    def test_the_frozen_worker_writes_nothing_more_and_the_job_is_done(self) -> None:
        """C009: it wakes up after another owner has finished its job; it can commit nothing."""
        job = start(kind_of(fenced))
        with freeze_worker():
            result = run_slice(job)
        assert result.outcome is Outcome.LEASE_LOST
        assert row(job).status == "completed" and row(job).redrives == 1
        assert parcels() == [("1", 0), ("2", 0), ("3", 0)]

    def test_what_is_outside_a_fence_is_done_twice(self) -> None:
        with freeze_worker(2):
            run_slice(start(kind_of(wrote_first)))
        assert [label for label, _ in parcels()] == ["1", "2", "3", "3"]

    def test_a_job_whose_kind_parks_is_parked_meanwhile(self) -> None:
        job = start(kind_of(fenced, orphan_policy="park"))
        with freeze_worker():
            assert run_slice(job).outcome is Outcome.LEASE_LOST
        assert (row(job).status, row(job).error_code) == ("failed", "orphaned")
        assert len(parcels()) == 1

    def test_run_ends_as_well(self) -> None:
        with freeze_worker(), interrupt_after(3):
            assert run(kind_of(fenced)).status == "completed"
        assert len(parcels()) == 3

    @pytest.mark.parametrize("after", [0, True, "1"], ids=repr)
    def test_after_how_many_commits_is_checked(self, after: Any) -> None:
        with pytest.raises(ValueError, match="freeze_after"), freeze_worker(after):
            pass


# --- fixtures ---


def test_the_fixtures_run_jobs_and_crash_them(
    run_jobs: Callable[[], list[Job]],
    crash_test: Callable[..., CrashReport],
    register_kind: Callable[[type[Kind]], type[Kind]],
) -> None:
    @register_kind
    class Greeting(Kind):
        name = "tests.greeting"
        orphan_policy = "redrive"

        def step(self, ctx: Any) -> Done:
            if not ctx.checkpoint:
                fenced(ctx, 1)
            return Done()

    service.start(Greeting)
    assert [job.status for job in run_jobs()] == ["completed"]
    crash_test(Greeting).assert_exact()


def test_the_fixture_freezes_workers(frozen_worker: None) -> None:
    assert run_slice(start(kind_of(fenced))).outcome is Outcome.LEASE_LOST
