"""The kit for a project's own tests, in a TestCase's transaction and in real ones."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable
from typing import Any

import pytest
from django.db import connection, transaction

from durable_jobs import kinds, service, store, testing
from durable_jobs.exceptions import (
    InvalidInput,
    InvalidKind,
    NotReclaimable,
    TransactionOwned,
    UnknownKind,
)
from durable_jobs.kinds import BatchKind, Done, Kind, RetryAfter, Yield
from durable_jobs.models import Job, Pause, Scope
from durable_jobs.runner import Outcome
from durable_jobs.testing import (
    finish,
    interrupt_after,
    kill_after,
    make_job,
    register_for_test,
    run,
    run_slice,
)
from tests.models import Parcel
from tests.slices import change, events, made, row, start


@pytest.fixture(
    params=[
        pytest.param("TestCase", marks=pytest.mark.django_db),
        pytest.param("transactional", marks=pytest.mark.django_db(transaction=True)),
    ],
    autouse=True,
)
def database(registry: None) -> None:
    """Everything here holds in a TestCase and with real transactions."""


def counting(commits: int = 5, **attributes: Any) -> type[Kind]:
    """A kind that commits so many rows and resumes where it was."""

    def step(ctx: Any) -> Any:
        at = (ctx.checkpoint or {"at": 0})["at"]
        for number in range(at + 1, commits + 1):
            if ctx.should_yield():
                return Yield()
            with ctx.fenced():
                Parcel.objects.create(label=str(number))
                ctx.save_checkpoint({"at": number}, advance=1, total=commits)
        return Done({"rows": commits})

    return made(step, **{"orphan_policy": "redrive", **attributes})


def labels() -> list[str]:
    return list(Parcel.objects.order_by("id").values_list("label", flat=True))


class TestRun:
    def test_a_job_runs_here_and_now_to_its_end(self) -> None:
        """F4"""
        job = run(counting(), {"n": 1}, scope=Scope("acme"), priority=3)
        assert (job.status, job.result, job.processed_count, job.attempts) == ("completed", {"rows": 5}, 5, 1)
        assert (job.input, job.scope, job.priority) == ({"n": 1}, Scope("acme"), 3)
        assert labels() == ["1", "2", "3", "4", "5"]

    def test_due_times_are_skipped(self) -> None:
        answers = iter([RetryAfter(3600), ValueError(), Yield(after=7200), Done("late")])

        def step(ctx: Any) -> Any:
            answer = next(answers)
            if isinstance(answer, Exception):
                raise answer
            return answer

        job = run(made(step))
        assert (job.status, job.result, job.attempts) == ("completed", "late", 4)

    def test_a_failing_job_fails_as_it_would(self) -> None:
        def step(ctx: Any) -> None:
            raise ValueError("boom")

        job = run(made(step))
        assert (job.status, job.verdict, job.error_message) == ("failed", "retry_exhausted", "boom")
        assert events(job) == ["slice_failed"] * 3 + ["failed"]

    def test_what_start_refuses_run_refuses(self) -> None:
        """C082: values are encoded as for a real worker."""
        kind = made()
        with pytest.raises(InvalidInput):
            run(kind, {"when": (1, 2)})
        with pytest.raises(InvalidInput):
            run(kind, priority=1000)
        with pytest.raises(UnknownKind):
            run("nope")

    def test_jobs_that_the_code_under_test_has_started_are_finished(self) -> None:
        kind = counting(2)
        job = start(kind)
        assert finish(job).status == "completed"
        assert finish(job).status == "completed"
        assert testing.started(kind) == testing.started(kind.name) == [row(job)]

    def test_a_cancelled_job_ends_with_its_hooks(self) -> None:
        called: list[str] = []
        kind = made(None, on_cancel=lambda self, job: called.append("on_cancel"))
        job = start(kind)
        store.request_cancel(job.id, scope=None)
        assert finish(job).status == "cancelled"
        assert called == ["on_cancel"]

    def test_hooks_that_fail_for_ever_are_told_at_once(self) -> None:
        """Not after ten thousand slices."""
        kind = made(None, on_transition=lambda self, job: 0, on_redrive=lambda self, job: 1)
        with pytest.raises(AssertionError, match="hooks have failed") as caught:
            run(kind)
        assert "on_transition" in str(caught.value)

    def test_a_job_that_never_ends_is_told(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(testing.jobs, "MOST_SLICES", 20)
        with pytest.raises(AssertionError, match="20 slices"):
            run(made(lambda ctx: Yield()))

    def test_after_hooks_and_signals_come_with_the_commit(
        self, django_capture_on_commit_callbacks: Callable[..., Any]
    ) -> None:
        called: list[str] = []
        kind = made(None, after_transition=lambda self, job: called.append(job.status))
        if connection.in_atomic_block:
            run(kind)
            assert called == []
        with django_capture_on_commit_callbacks(execute=True):
            run(kind)
        assert called == ["completed"]

    def test_an_async_step_runs_too(self) -> None:
        async def step(ctx: Any) -> Done:
            def write() -> None:
                Parcel.objects.create(label="a")
                ctx.save_checkpoint({"at": 1})

            await ctx.run_fenced(write)
            return Done()

        assert run(made(step)).checkpoint == {"at": 1}
        assert labels() == ["a"]

    def test_a_batch_kind_runs_too(self) -> None:
        class Marking(BatchKind):
            name = "tests.marking"
            batch_size = 2

            def collection(self, ctx: Any) -> Any:
                return Parcel.objects.order_by("pk")

            def process(self, ctx: Any, batch: Any) -> None:
                for parcel in batch:
                    Parcel.objects.filter(pk=parcel.pk).update(done=parcel.done + 1)

        kinds.register(Marking)
        Parcel.objects.bulk_create([Parcel(label=str(number)) for number in range(5)])
        with interrupt_after(1):
            job = run(Marking)
        assert (job.status, job.processed_count) == ("completed", 5)
        assert set(Parcel.objects.values_list("done", flat=True)) == {1}

    def test_what_a_step_leaves_open_is_rolled_back_and_told(self) -> None:
        """The test's own transaction stays usable."""

        def step(ctx: Any) -> Done:
            transaction.atomic().__enter__()
            Parcel.objects.create(label="left open")
            return Done()

        Parcel.objects.create(label="before")
        job = run(made(step))
        assert (job.status, job.error_code) == ("failed", "transaction_left_open")
        Parcel.objects.create(label="after")
        assert labels() == ["before", "after"]

    def test_a_database_error_of_the_step_leaves_the_test_usable(self) -> None:
        def step(ctx: Any) -> None:
            with ctx.fenced():
                taken = Parcel.objects.create(label="x")
                Parcel.objects.create(pk=taken.pk)

        job = run(made(step))
        assert (job.status, labels()) == ("failed", [])
        assert "IntegrityError" in (job.error_type or "")

    def test_a_database_error_outside_a_fence_is_recorded(self) -> None:
        def step(ctx: Any) -> None:
            with transaction.atomic():
                taken = Parcel.objects.create(label="x")
                Parcel.objects.create(pk=taken.pk)

        assert run(made(step)).status == "failed"

    def test_a_chain_of_jobs_is_there_to_be_finished(self) -> None:
        """F22"""
        following = made(lambda ctx: Done(ctx.input), name="tests.next")

        def on_transition(self: Any, job: Job) -> int:
            service.start("tests.next", "after")
            return 1

        run(made(None, on_transition=on_transition, on_redrive=lambda self, job: 1))
        [job] = testing.started(following)
        assert finish(job).result == "after"


class TestRunSlice:
    def test_one_slice_and_what_came_of_it(self) -> None:
        job = start(counting(3))
        with interrupt_after(1):
            result = run_slice(job)
        assert (result.outcome, result.job and result.job.checkpoint) == (Outcome.YIELDED, {"at": 1})
        assert run_slice(job).outcome == Outcome.COMPLETED

    def test_an_old_instance_of_the_job_will_do(self) -> None:
        job = start(made(lambda ctx: Yield()))
        for _ in range(3):
            assert run_slice(job).outcome == Outcome.YIELDED
        assert row(job).continuation_seq == 3

    @pytest.mark.parametrize("status", ["completed", "failed", "cancelled", "held", "running"])
    def test_what_cannot_be_claimed_is_refused(self, status: str) -> None:
        job = make_job(status, kind=made(), owner="somebody")
        with pytest.raises(NotReclaimable):
            run_slice(job)

    def test_a_paused_job_is_refused(self) -> None:
        """F10"""
        job = start(made())
        Pause._base_manager.bulk_create([Pause(kind="tests.made", reason="r")])
        with pytest.raises(NotReclaimable):
            run_slice(job)

    def test_a_kind_that_is_not_registered_is_refused(self) -> None:
        with pytest.raises(UnknownKind):
            run_slice(make_job(kind="tests.nobody"))

    def test_a_job_that_is_gone_is_refused(self) -> None:
        job = start(made())
        Job._base_manager.all().delete()
        with pytest.raises(NotReclaimable, match="gone"):
            run_slice(job)

    def test_a_transaction_around_it_is_refused(self) -> None:
        """T22: TestCase's own does not count, the test's does."""
        job = start(made())
        with transaction.atomic():
            with pytest.raises(TransactionOwned):
                run_slice(job)
        assert run_slice(job).outcome == Outcome.COMPLETED


class TestInterruptions:
    @pytest.mark.parametrize("commits", [1, 2, 3, 4, 5, 9])
    def test_interrupted_at_every_place_nothing_is_lost_or_repeated(self, commits: int) -> None:
        """B58, B69, C026"""
        with interrupt_after(commits):
            job = run(counting(5))
        assert labels() == ["1", "2", "3", "4", "5"]
        assert (job.status, job.consecutive_failures) == ("completed", 0)
        assert job.interruptions == (0 if commits >= 5 else -(-5 // commits) - 1)

    @pytest.mark.parametrize("commits", [1, 2, 3, 4, 5])
    def test_killed_at_every_place_nothing_is_lost_or_repeated(self, commits: int) -> None:
        """B58, B168, C028"""
        with kill_after(commits):
            job = run(counting(5))
        assert labels() == ["1", "2", "3", "4", "5"]
        assert (job.status, job.redrives) == ("completed", 5 // commits)
        assert "orphaned" in events(job)

    def test_a_killed_job_follows_its_kinds_policy(self) -> None:
        with kill_after(2):
            job = run(counting(5, orphan_policy="park"))
        assert (job.status, job.error_code, labels()) == ("failed", "orphaned", ["1", "2"])

    def test_a_job_that_dies_without_a_commit_is_poison(self) -> None:
        """C120"""

        def step(ctx: Any) -> None:
            raise testing.Killed

        job = run(made(step, orphan_policy="redrive", max_orphanings=2))
        assert (job.status, job.error_code, job.attempts) == ("failed", "poison", 3)

    def test_an_async_step_is_killed_as_well(self) -> None:
        async def step(ctx: Any) -> Done:
            for number in range((ctx.checkpoint or 0) + 1, 4):
                await ctx.run_fenced(ctx.save_checkpoint, number)
            return Done()

        with kill_after(1):
            job = run(made(step, orphan_policy="redrive"))
        assert (job.status, job.checkpoint, job.redrives) == ("completed", 3, 3)
        gc.collect()  # the thread of asgiref's loop ends with its executor

    def test_nothing_of_a_killed_slice_runs_on(self) -> None:
        ran: list[str] = []

        def step(ctx: Any) -> Done:
            try:
                ctx.save_checkpoint({"at": 1})
            except Exception:
                ran.append("except Exception")
            ran.append("after")
            return Done()

        job = start(made(step))
        with kill_after(1), pytest.raises(testing.Killed):
            run_slice(job)
        assert (ran, row(job).status, row(job).checkpoint) == ([], "running", {"at": 1})

    def test_the_orders_end_with_their_block(self) -> None:
        kind = counting(5)
        with interrupt_after(1):
            with interrupt_after(3):
                assert run_slice(start(kind)).job.checkpoint == {"at": 3}  # type: ignore[union-attr]
            assert run_slice(start(kind)).job.checkpoint == {"at": 1}  # type: ignore[union-attr]
        with pytest.raises(KeyError), kill_after(1):
            raise KeyError
        assert run(kind).attempts == 1

    def test_the_orders_are_for_this_thread_alone(self) -> None:
        seen: list[Any] = []
        with kill_after(1):
            thread = threading.Thread(target=lambda: seen.append(testing.jobs._orders.kill_after))
            thread.start()
            thread.join()
        assert seen == [None]

    @pytest.mark.parametrize("commits", [0, -1, 1.5, "1", True, None], ids=repr)
    @pytest.mark.parametrize("order", [interrupt_after, kill_after])
    def test_a_number_that_is_none_is_refused(self, order: Any, commits: Any) -> None:
        with pytest.raises(ValueError, match="1 or more"), order(commits):
            pass


class TestRegisterForTest:
    class Sample(Kind):
        name = "tests.sample"
        aliases = ("tests.sampled",)

        def step(self, ctx: Any) -> Done:
            return Done()

    def test_a_kind_is_known_inside_the_block(self) -> None:
        with register_for_test(self.Sample):
            assert run("tests.sampled").kind == "tests.sample"
        assert kinds.find("tests.sample") is kinds.find("tests.sampled") is None

    def test_a_kind_that_was_known_stays_known(self) -> None:
        """Its jobs.py has been imported; the other tests need it."""
        kinds.register(self.Sample)
        with register_for_test(self.Sample):
            with register_for_test(self.Sample):
                pass
            assert kinds.find("tests.sample") is not None
        assert kinds.find("tests.sample") is not None

    def test_an_error_inside_leaves_nothing_behind(self) -> None:
        with pytest.raises(KeyError), register_for_test(self.Sample):
            raise KeyError
        assert kinds.find("tests.sample") is None

    def test_a_kind_that_is_refused_takes_the_others_back(self) -> None:
        class Other(self.Sample):  # type: ignore[misc, name-defined]
            aliases = ()

        with pytest.raises(InvalidKind), register_for_test(self.Sample, Other):
            raise AssertionError("entered")
        assert kinds.find("tests.sample") is None


class TestMakeJob:
    @pytest.mark.parametrize(
        ("status", "stored", "owned", "claimable"),
        [
            ("pending", "pending", False, True), ("held", "held", False, False), ("running", "running", True, False),
            ("expired", "running", True, False), ("retrying", "running", False, True),
            ("verdict", "running", False, True), ("cancelling", "running", True, False),
            ("completed", "completed", False, False), ("failed", "failed", False, False),
            ("parked", "failed", False, False), ("cancelled", "cancelled", False, False),
        ],
    )  # fmt: skip
    def test_a_job_in_every_status(self, status: str, stored: str, owned: bool, claimable: bool) -> None:
        job = make_job(
            status, kind="tests.any", input={"a": 1}, scope=Scope("acme", "x"), queue="q", priority=5
        )
        assert job == row(job) and job.status == stored
        assert (job.lease_owner is not None, job.next_run_at is not None) == (owned, claimable)
        assert (job.kind, job.input, job.scope, job.queue_name, job.priority) == (
            "tests.any", {"a": 1}, Scope("acme", "x"), "q", 5,
        )  # fmt: skip
        assert (job.verdict is not None) == (status in ("verdict", "failed"))
        assert (job.parked_at is not None) == (status == "parked")
        assert (job.cancel_requested_at is not None) == (status in ("cancelling", "cancelled"))
        if status == "expired":
            assert [orphan.id for orphan in store.orphans(0)] == [job.id]

    def test_a_kind_may_be_a_class_and_an_owner_given(self) -> None:
        job = make_job("running", kind=made(), owner="web1", lease_seconds=5)
        assert (job.kind, job.lease_owner) == ("tests.made", "web1")

    def test_a_status_that_is_none_makes_nothing(self) -> None:
        with pytest.raises(ValueError, match="retrying"):
            make_job("done")
        assert Job.objects.count() == 0

    def test_a_taken_key_is_said(self) -> None:
        make_job(idempotency_key="k")
        with pytest.raises(AssertionError, match="taken"):
            make_job(idempotency_key="k")

    def test_a_made_job_runs_like_any_other(self) -> None:
        kind = made(lambda ctx: Done(ctx.input))
        assert finish(make_job("retrying", kind=kind, input=7)).result == 7
        parked = make_job("parked", kind=kind, input=8)
        service.redrive(parked.id)
        assert finish(parked).result == 8
        tampered = make_job(kind=kind, input=9)
        change(tampered, input_text="10")
        assert finish(tampered).error_code == "input_changed"
