"""What a step is given, and what becomes of its answer, its error and its lost lease."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import gc
import json
import logging
import sqlite3
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from types import SimpleNamespace
from typing import Any

import pytest
from asgiref.sync import sync_to_async
from django.core.exceptions import SynchronousOnlyOperation
from django.db import DatabaseError, OperationalError, connection, transaction
from django.test import override_settings
from django.utils import timezone

from durable_jobs import database, runner, service, signals, store
from durable_jobs.exceptions import (
    ErrorClass,
    InvalidInput,
    LeaseLost,
    Park,
    RetryAfter,
    TerminalError,
    TransactionOwned,
    TransientError,
    UnrecoverableError,
)
from durable_jobs.keeper import Hold, Keeper
from durable_jobs.kinds import ROW_GONE, Cancelled, Done, Retry, Yield
from durable_jobs.models import Job, Scope
from durable_jobs.runner import Outcome
from durable_jobs.testing import make_job
from tests.connections import OtherConnection
from tests.models import Parcel
from tests.slices import (
    OWNER,
    change,
    claim,
    columns,
    events,
    made,
    row,
    run_slice,
    start,
    steal,
)

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.usefixtures("registry")]

LONG_AGO = datetime(2020, 1, 1, tzinfo=UTC)


def limits(job: Job) -> tuple[int, int, int, int]:
    """Failures, orphanings, interruptions, failed hooks."""
    now = row(job)
    return (now.consecutive_failures, now.redrives_since_commit, now.interruptions, now.mirror_attempts)


def mark(label: str) -> None:
    """A row that a step writes."""
    Parcel.objects.create(label=label)


def marks() -> list[str]:
    return list(Parcel.objects.order_by("id").values_list("label", flat=True))


class KeptHolds:
    """Stands where a keeper stands: who is held, and what the keeper tells."""

    def __init__(self, tell: Callable[[Hold], None] = lambda hold: None) -> None:
        self.held: list[Hold] = []
        self.let_go_of: list[Hold] = []
        self.tell = tell

    def hold(self, hold: Hold) -> None:
        self.held.append(hold)
        self.tell(hold)

    def let_go(self, hold: Hold) -> None:
        self.let_go_of.append(hold)


class TestContext:
    def test_a_step_is_given_what_it_needs(self) -> None:
        """B59"""
        seen: dict[str, Any] = {}

        def step(ctx: Any) -> Done:
            seen.update(
                job=ctx.job, scope=ctx.scope, lease=ctx.lease, input=ctx.input, checkpoint=ctx.checkpoint,
                stop=ctx.stop, prepared=ctx.prepared, alias=ctx.alias, processed=ctx.processed,
                total=ctx.total, should=ctx.should_yield(), mine=ctx.still_mine(),
            )  # fmt: skip
            return Done()

        job = start(made(step), {"rows": [1, "ü"]}, scope=Scope("acme", "north"))
        assert run_slice(job).outcome == Outcome.COMPLETED
        assert seen.pop("job").id == job.id
        assert seen.pop("lease") == store.Lease(job.id, OWNER, 1, 60)
        assert isinstance(seen.pop("stop"), threading.Event)
        assert seen == {
            "scope": Scope("acme", "north"), "input": {"rows": [1, "ü"]}, "checkpoint": None,
            "prepared": None, "alias": "default", "processed": 0, "total": None, "should": False, "mine": True,
        }  # fmt: skip

    def test_a_change_to_input_or_checkpoint_changes_nothing_stored(self) -> None:
        def step(ctx: Any) -> Done:
            ctx.save_checkpoint({"n": [1]})
            ctx.input["a"] = 2
            ctx.checkpoint["n"].append(2)
            return Done([ctx.input, ctx.checkpoint])

        result = run_slice(start(made(step), {"a": 1})).job
        assert result is not None and result.result == [{"a": 1}, {"n": [1]}]

    def test_a_slice_key_lives_over_retries_and_redrives_and_ends_with_a_yield(self) -> None:
        """B60"""
        keys: list[str] = []
        answers = iter([ValueError(), UnrecoverableError(), Yield(), Done()])

        def step(ctx: Any) -> Any:
            keys.append(ctx.slice_key)
            answer = next(answers)
            if isinstance(answer, Exception):
                raise answer
            return answer

        job = start(made(step))
        run_slice(job)
        run_slice(job)
        service.redrive(job.id, force=True)
        run_slice(job)
        run_slice(job)
        assert keys == [f"{job.id}:0"] * 3 + [f"{job.id}:1"]

    def test_an_effect_key_is_the_same_whichever_slice_retry_or_restart_performs_the_effect(self) -> None:
        """F7"""
        keys: list[str] = []
        answers = iter([ValueError(), Yield(), UnrecoverableError(), Done()])

        def step(ctx: Any) -> Any:
            keys.append(ctx.effect_key("mail", 41))
            answer = next(answers)
            if isinstance(answer, Exception):
                raise answer
            return answer

        job = start(made(step, allow_restart=True))
        for _ in range(3):
            run_slice(job)
        service.redrive(job.id, force=True, restart=True)
        run_slice(job)
        assert keys == [f"{job.id}:mail:41"] * 4

    def test_different_parts_give_different_effect_keys(self) -> None:
        keys: list[str] = []

        def step(ctx: Any) -> Done:
            for parts in (("a", "b"), ("a:b",), ("a%3Ab",), ("a%253Ab",), ("a", ""), ("a",), (), ("", "a")):
                keys.append(ctx.effect_key(*parts))
            return Done()

        run_slice(start(made(step)))
        assert len(set(keys)) == len(keys) == 8

    def test_should_yield_once_the_slice_has_had_its_time(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """B61"""
        clock = SimpleNamespace(now=1000.0)
        monkeypatch.setattr(
            runner, "time", SimpleNamespace(monotonic=lambda: clock.now, sleep=lambda seconds: None)
        )
        seen: list[bool] = []

        def step(ctx: Any) -> Yield:
            for moment in (0.0, 9.9, 10.0, 11.0):
                clock.now = 1000.0 + moment
                seen.append(ctx.should_yield())
            return Yield()

        assert run_slice(start(made(step, slice_seconds=10))).outcome == Outcome.YIELDED
        assert seen == [False, False, True, True]

    @pytest.mark.parametrize("sign", ["stop", "paused", "draining"])
    def test_should_yield_when_somebody_asks_for_the_end(self, sign: str) -> None:
        """B61, F10"""
        draining = threading.Event()
        keeper = KeptHolds()

        def step(ctx: Any) -> Yield:
            assert not ctx.should_yield()
            if sign == "stop":
                ctx.stop.set()
            elif sign == "paused":
                keeper.held[0].paused = True
            else:
                draining.set()
            assert ctx.should_yield()
            return Yield()

        result = run_slice(start(made(step)), keeper=keeper, draining=draining)
        assert result.outcome == Outcome.YIELDED

    def test_still_mine_asks_the_row(self, second_connection: OtherConnection) -> None:
        """F21"""
        seen: list[bool] = []

        def step(ctx: Any) -> Yield:
            seen.append(ctx.still_mine())
            second_connection.run(steal, job)
            seen.append(ctx.still_mine())
            assert ctx.stop.is_set() and ctx.should_yield()
            return Yield()

        job = start(made(step))
        assert run_slice(job).outcome == Outcome.LEASE_LOST
        assert seen == [True, False]

    def test_a_record_in_a_fence_commits_with_it(self) -> None:
        def step(ctx: Any) -> Done:
            with contextlib.suppress(ValueError), ctx.fenced():
                ctx.record("note", message="lost")
                raise ValueError
            with ctx.fenced():
                ctx.record("note", code="kept", data={"n": 1})
            ctx.record("note", message="alone")
            return Done()

        job = start(made(step))
        assert run_slice(job).outcome == Outcome.COMPLETED
        assert [(e.code, e.message, e.owner, e.data) for e in job.events.order_by("id")] == [
            ("kept", "", OWNER, {"n": 1}),
            ("", "alone", OWNER, None),
        ]

    def test_a_record_is_written_whatever_its_texts_hold(self) -> None:
        """A message of a foreign system must not fail the batch in whose transaction it is recorded."""

        def step(ctx: Any) -> Done:
            with ctx.fenced():
                ctx.record("note", code="c" * 300, message="NUL \x00, half \ud83d " + "m" * 20_000)
            return Done()

        job = start(made(step))
        assert run_slice(job).outcome == Outcome.COMPLETED
        [event] = job.events.all()
        assert event.message.startswith("NUL \ufffd, half \ufffd") and len(event.message) <= 10_000
        assert event.code == "c" * 100

    @pytest.mark.parametrize("data", [{"x": float("nan")}, {"x": "\x00"}, {"x": "\ud800"}, {"x": {1, 2}}])
    def test_data_of_a_record_that_is_not_json_is_refused_at_the_call(self, data: Any) -> None:
        def step(ctx: Any) -> Done:
            with ctx.fenced():
                with pytest.raises(InvalidInput) as caught:
                    ctx.record("note", data=data)
                assert caught.value.field == "data.x"
                mark("goes on")
            return Done()

        assert run_slice(start(made(step))).outcome == Outcome.COMPLETED
        assert marks() == ["goes on"]


class TestFence:
    def test_rows_cursor_and_counts_commit_together(self) -> None:
        """B56, B58, C16"""

        def step(ctx: Any) -> Done:
            with ctx.fenced():
                mark("a")
                ctx.save_checkpoint({"at": 1}, advance=2, total=7)
                assert (ctx.processed, ctx.total) == (2, 7)
            assert (row(job).checkpoint, row(job).processed_count, row(job).total_count) == ({"at": 1}, 2, 7)
            assert (ctx.checkpoint, ctx.processed, ctx.total) == ({"at": 1}, 2, 7)
            return Done()

        job = start(made(step))
        assert run_slice(job).outcome == Outcome.COMPLETED
        assert marks() == ["a"]

    def test_neither_rows_nor_cursor_nor_counts_survive_a_rollback(self) -> None:
        """C16"""

        def step(ctx: Any) -> Done:
            ctx.save_checkpoint({"at": 0}, advance=1, total=9)
            with contextlib.suppress(ZeroDivisionError), ctx.fenced():
                mark("a")
                ctx.save_checkpoint({"at": 1}, advance=2, total=7)
                ctx.progress(advance=3, message="half")
                raise ZeroDivisionError
            assert (ctx.checkpoint, ctx.processed, ctx.total) == ({"at": 0}, 1, 9)
            with ctx.fenced():
                mark("b")
                ctx.save_checkpoint(advance=1)
            return Done()

        job = start(made(step))
        assert run_slice(job).outcome == Outcome.COMPLETED
        now = row(job)
        assert marks() == ["b"]
        assert (now.checkpoint, now.processed_count, now.total_count) == ({"at": 0}, 2, 9)
        assert now.progress_message is None

    def test_ctx_moves_on_only_after_the_commit(self) -> None:
        """The step reads the last committed checkpoint until the fence has committed."""
        seen: list[Any] = []

        def step(ctx: Any) -> Done:
            with ctx.fenced():
                ctx.save_checkpoint({"at": 1})
                seen.append(ctx.checkpoint)
            seen.append(ctx.checkpoint)
            return Done()

        run_slice(start(made(step)))
        assert seen == [None, {"at": 1}]

    def test_a_fence_without_a_checkpoint_is_a_commit_too(self) -> None:
        """F21, B52: a job that keeps its cursor in its rows is not poison."""

        def step(ctx: Any) -> Done:
            with ctx.fenced():
                mark("a")
            return Done()

        job = start(made(step))
        change(
            job,
            consecutive_failures=4,
            redrives_since_commit=2,
            checkpoint_text='{"x":1}',
            checkpoint_at=LONG_AGO,
        )
        assert run_slice(job).outcome == Outcome.COMPLETED
        now = row(job)
        assert limits(job) == (0, 0, 0, 0)
        assert now.last_committed_at is not None and now.last_committed_at > LONG_AGO
        assert (now.checkpoint, now.checkpoint_at) == ({"x": 1}, LONG_AGO)

    def test_a_fence_of_a_lost_lease_never_runs_its_block(self, second_connection: OtherConnection) -> None:
        """B47, B62"""
        entered: list[str] = []

        def step(ctx: Any) -> Done:
            second_connection.run(steal, job)
            with ctx.fenced():
                entered.append("block")
                mark("a")
            return Done()

        job = start(made(step))
        assert run_slice(job).outcome == Outcome.LEASE_LOST
        assert (entered, marks()) == ([], [])

    def test_nobody_takes_a_job_while_its_fence_is_open(self, second_connection: OtherConnection) -> None:
        """B46, P4: past the lease's end, too; the repair waits for nothing."""
        taken: list[Any] = []

        def take() -> Any:
            [orphan] = store.orphans(0)
            try:
                with database.transaction("default", timeout=0.05):
                    return store.take_orphan(orphan, grace=0, delay=0)
            except OperationalError as error:
                assert database.is_locked(error)
                return None

        def step(ctx: Any) -> Done:
            change(job, lease_expires_at=LONG_AGO)
            with ctx.fenced():
                taken.append(second_connection.run(take))
                mark("a")
            assert second_connection.run(store.orphans, 0) == []
            return Done()

        job = start(made(step))
        assert run_slice(job).outcome == Outcome.COMPLETED
        assert (taken, marks()) == ([None], ["a"])

    def test_a_fence_renews_the_lease_at_its_end(self) -> None:
        """B56: also one that ran out while nobody took the job."""

        def step(ctx: Any) -> Done:
            change(job, lease_expires_at=LONG_AGO)
            with ctx.fenced():
                pass
            assert row(job).lease_expires_at > timezone.now()
            return Done()

        job = start(made(step))
        assert run_slice(job).outcome == Outcome.COMPLETED

    def test_a_fence_that_rolled_back_beats_at_once(self) -> None:
        """P4: a rollback renewed nothing, and a repair may be waiting."""

        def step(ctx: Any) -> Done:
            change(job, lease_expires_at=LONG_AGO)
            with contextlib.suppress(KeyError), ctx.fenced():
                raise KeyError
            assert row(job).lease_expires_at > timezone.now()
            return Done()

        job = start(made(step))
        assert run_slice(job).outcome == Outcome.COMPLETED

    def test_a_fence_that_rolled_back_learns_that_the_job_is_lost(
        self, second_connection: OtherConnection
    ) -> None:
        seen: list[bool] = []

        def step(ctx: Any) -> Done:
            with contextlib.suppress(KeyError), ctx.fenced():
                store._RELEASE_LEASE.run(connection, **store._named(ctx.lease), delay=0)
                connection.cursor().execute("SELECT 1")
                raise KeyError
            seen.append(ctx.stop.is_set())
            second_connection.run(steal, job)
            with contextlib.suppress(TransactionOwned), transaction.atomic():
                with ctx.fenced():
                    pass
            return Done()

        job = start(made(step))
        assert run_slice(job).outcome == Outcome.LEASE_LOST
        assert seen == [False]

    @pytest.mark.parametrize("where", ["atomic", "fence", "savepoint"])
    def test_a_fence_inside_a_transaction_is_refused(self, where: str) -> None:
        """C16, P14: nothing is written, and the step may go on."""

        def step(ctx: Any) -> Done:
            opened = ctx.fenced() if where == "fence" else transaction.atomic()
            with opened:
                mark("outer")
                inner = transaction.atomic() if where == "savepoint" else contextlib.nullcontext()
                with inner, pytest.raises(TransactionOwned) as caught:
                    with ctx.fenced():
                        mark("inner")
                assert "ctx.fenced()" in str(caught.value)
            with ctx.fenced():
                mark("after")
            return Done()

        assert run_slice(start(made(step))).outcome == Outcome.COMPLETED
        assert marks() == ["outer", "after"]

    @pytest.mark.parametrize("where", ["atomic", "savepoint of a fence"])
    def test_a_checkpoint_inside_a_transaction_of_the_step_is_refused(self, where: str) -> None:
        """C16: a savepoint can be rolled back while ctx has moved on."""

        def step(ctx: Any) -> Done:
            outer = ctx.fenced() if where == "savepoint of a fence" else contextlib.nullcontext()
            with outer, transaction.atomic():
                with pytest.raises(TransactionOwned):
                    ctx.save_checkpoint({"at": 1}, advance=1)
            assert (ctx.checkpoint, ctx.processed) == (None, 0)
            return Done()

        job = start(made(step))
        assert run_slice(job).outcome == Outcome.COMPLETED
        assert (row(job).checkpoint_text, row(job).processed_count) == (None, 0)

    @pytest.mark.parametrize("act", ["fenced", "save_checkpoint", "progress"])
    def test_nothing_passes_for_committed_with_autocommit_off(self, act: str) -> None:
        """With autocommit off a block commits nothing at its end: ctx would move on without the row."""

        def step(ctx: Any) -> Done:
            transaction.set_autocommit(False)
            try:
                with pytest.raises(TransactionOwned):
                    if act == "fenced":
                        with ctx.fenced():
                            mark("a")
                    elif act == "progress":
                        ctx.progress(advance=1)
                    else:
                        ctx.save_checkpoint({"at": 1})
            finally:
                transaction.rollback()
                transaction.set_autocommit(True)
            assert ctx.checkpoint is None
            return Done()

        job = start(made(step))
        assert run_slice(job).outcome == Outcome.COMPLETED
        assert (marks(), row(job).checkpoint_text) == ([], None)

    def test_a_database_error_that_the_block_swallowed_cannot_commit_half_of_it(self) -> None:
        """C055: without a savepoint around it the whole transaction is lost, and the step hears of it."""

        def step(ctx: Any) -> Done:
            with ctx.fenced():
                mark("a")
                with contextlib.suppress(DatabaseError):
                    Parcel.objects.create(label="b", pk=Parcel.objects.get().pk)
                ctx.save_checkpoint({"at": 1})
            return Done()

        job = start(made(step))
        assert run_slice(job).outcome == Outcome.RETRY
        assert (marks(), row(job).checkpoint, row(job).consecutive_failures) == ([], None, 1)

    def test_a_database_error_in_a_savepoint_of_the_block_costs_only_the_savepoint(self) -> None:
        def step(ctx: Any) -> Done:
            with ctx.fenced():
                mark("a")
                with contextlib.suppress(DatabaseError), transaction.atomic():
                    Parcel.objects.create(label="b", pk=Parcel.objects.get().pk)
                ctx.save_checkpoint({"at": 1})
            return Done()

        assert run_slice(start(made(step))).outcome == Outcome.COMPLETED
        assert marks() == ["a"]

    @pytest.mark.parametrize("nasty", [ValueError("x"), SystemExit(3)], ids=repr)
    def test_a_callback_that_raises_after_the_commit_does_not_undo_it(self, nasty: BaseException) -> None:
        """C054: rows and cursor are committed, so ctx has moved on: whoever goes on must not do the batch again."""

        def fail() -> None:
            raise nasty

        def step(ctx: Any) -> Done:
            with pytest.raises(type(nasty)), ctx.fenced():
                mark("a")
                transaction.on_commit(fail)
                ctx.save_checkpoint({"at": 1}, advance=1)
            assert (ctx.checkpoint, ctx.processed) == ({"at": 1}, 1)
            with ctx.fenced():
                mark("b")
                ctx.save_checkpoint({"at": 2}, advance=1)
            return Done()

        job = start(made(step))
        change(job, consecutive_failures=2)
        assert run_slice(job).outcome == Outcome.COMPLETED
        assert (marks(), row(job).checkpoint, row(job).processed_count) == (["a", "b"], {"at": 2}, 2)

    def test_a_long_fence_is_told(
        self, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        """F16"""
        monkeypatch.setattr(runner, "LONG_FENCE_SECONDS", 0.01)

        def step(ctx: Any) -> Done:
            with ctx.fenced():
                time.sleep(0.02)
            return Done()

        run_slice(start(made(step)))
        assert [r.event for r in caplog.records if r.levelno == logging.WARNING] == ["fenced_block_long"]

    def test_an_iterator_over_rows_may_stay_open_across_fences(
        self, second_connection: OtherConnection
    ) -> None:
        """The loop that everybody writes. On SQLite a read that is not at its end keeps an old snapshot, and
        a transaction on the same connection could never begin once anybody else has written."""
        Parcel.objects.bulk_create([Parcel(label=f"{number}") for number in range(250)])
        done: list[str] = []

        def step(ctx: Any) -> Done:
            for parcel in Parcel.objects.filter(done=0).order_by("id").iterator(chunk_size=50):
                if parcel.rank is None and len(done) % 100 == 0:
                    second_connection.run(Parcel.objects.create, label="meanwhile", done=1)
                    with ctx.fenced():
                        Parcel.objects.filter(pk=parcel.pk).update(done=1)
                done.append(parcel.label)
            return Done()

        job = start(made(step))
        begun = time.monotonic()
        assert run_slice(job).outcome == Outcome.COMPLETED
        assert done == [f"{number}" for number in range(250)]
        assert time.monotonic() - begun < 5
        assert Parcel.objects.filter(done=1).count() == 6

    def test_a_step_that_fails_amid_an_iterator_can_be_recorded(
        self, second_connection: OtherConnection
    ) -> None:
        """The error's traceback keeps the iterator alive, and with it SQLite's old snapshot."""
        Parcel.objects.bulk_create([Parcel(label=f"{number}") for number in range(250)])

        def step(ctx: Any) -> Done:
            for _ in Parcel.objects.iterator(chunk_size=50):
                second_connection.run(Parcel.objects.create, label="meanwhile")
                raise ValueError("amid")
            return Done()

        job = start(made(step))
        begun = time.monotonic()
        result = run_slice(job, keeper=KeptHolds())
        assert (result.outcome, row(job).consecutive_failures) == (Outcome.RETRY, 1)
        assert time.monotonic() - begun < 5

    @pytest.mark.postgres_only
    def test_a_fence_that_idles_past_its_limit_is_a_failure_and_no_outage(self) -> None:
        """P10: our own idle timeout ends a half-dead peer; a block that computes for too long must not be
        tried for ever, uncounted."""

        def step(ctx: Any) -> Done:
            with ctx.fenced():
                mark("a")
                time.sleep(0.9)
                mark("b")
            return Done()

        with override_settings(DURABLE_JOBS={"GRACE": 0.2}):
            job = start(made(step, lease_seconds=0.3))
            assert run_slice(job).outcome == Outcome.RETRY
        assert (marks(), row(job).consecutive_failures) == ([], 1)


class TestCheckpoint:
    def test_a_checkpoint_is_fenced_and_credits_the_progress(self) -> None:
        """B56"""
        before: list[Any] = []

        def step(ctx: Any) -> Done:
            change(job, lease_expires_at=LONG_AGO, updated_at=LONG_AGO, heartbeat_at=LONG_AGO)
            before.append(row(job).lease_epoch)
            ctx.save_checkpoint({"at": 5}, processed=5, total=10)
            now = row(job)
            assert limits(job) == (0, 0, 0, 0)
            for moment in (
                now.lease_expires_at, now.updated_at, now.heartbeat_at, now.last_committed_at, now.checkpoint_at
            ):  # fmt: skip
                assert moment is not None and moment > LONG_AGO
            assert now.lease_expires_at > timezone.now()
            assert (now.checkpoint, now.processed_count, now.total_count) == ({"at": 5}, 5, 10)
            assert now.lease_epoch == before[0]
            return Done()

        job = start(made(step))
        change(job, consecutive_failures=4, redrives_since_commit=2)
        assert run_slice(job).outcome == Outcome.COMPLETED

    def test_a_refused_checkpoint_stops_the_slice_and_leaves_the_stored_one(
        self, second_connection: OtherConnection
    ) -> None:
        """B57"""
        raised: list[BaseException] = []

        def step(ctx: Any) -> Done:
            ctx.save_checkpoint({"at": 1})
            second_connection.run(steal, job)
            try:
                ctx.save_checkpoint({"at": 0})
            except LeaseLost as error:
                raised.append(error)
                assert ctx.stop.is_set()
                raise
            return Done()

        job = start(made(step))
        assert run_slice(job).outcome == Outcome.LEASE_LOST
        assert isinstance(raised[0], BaseException) and not isinstance(raised[0], Exception)
        assert (raised[0].job_id, raised[0].owner, raised[0].epoch) == (job.id, OWNER, 1)
        assert row(job).checkpoint == {"at": 1}

    def test_committed_batches_are_never_repeated(self) -> None:
        """B58, C028"""
        done: list[int] = []
        killed = iter([True, False])

        def step(ctx: Any) -> Done:
            at = (ctx.checkpoint or {"at": 0})["at"]
            doomed = next(killed)
            for batch in range(at + 1, 6):
                with ctx.fenced():
                    if doomed and batch == 3:
                        raise KeyboardInterrupt
                    done.append(batch)
                    ctx.save_checkpoint({"at": batch})
            return Done()

        job = start(made(step))
        with pytest.raises(KeyboardInterrupt):
            run_slice(job)
        [orphan] = store.dead_leases(OWNER)
        with database.transaction("default"):
            assert store.take_orphan(orphan, grace=0, delay=0, dead=True)
        assert run_slice(job).outcome == Outcome.COMPLETED
        assert done == [1, 2, 3, 4, 5]

    def test_a_checkpoint_survives_failure_yield_and_redrive(self) -> None:
        """A43"""
        answers = iter([ValueError(), Yield(), TerminalError()])
        seen: list[Any] = []

        def step(ctx: Any) -> Any:
            seen.append(ctx.checkpoint)
            if ctx.checkpoint is None:
                ctx.save_checkpoint({"at": 1}, advance=1)
            answer = next(answers, Done())
            if isinstance(answer, Exception):
                raise answer
            return answer

        job = start(made(step))
        for _ in range(3):
            run_slice(job)
        service.redrive(job.id)
        assert run_slice(job).outcome == Outcome.COMPLETED
        assert seen == [None] + [{"at": 1}] * 3

    @pytest.mark.parametrize(
        "state",
        [{"x": float("nan")}, {"x": float("inf")}, {"x": "a\x00"}, {"x": "\ud800"}, {"x": (1, 2)}, {"x": {1}},
         {"x": b"y"}, {1: 2}, {"x": object()}, {"x": "y" * 300_000}],
        ids=["nan", "inf", "nul", "surrogate", "tuple", "set", "bytes", "integer key", "object", "too big"],
    )  # fmt: skip
    def test_a_checkpoint_that_would_not_come_back_is_refused_at_the_call(self, state: Any) -> None:
        def step(ctx: Any) -> Done:
            ctx.save_checkpoint({"good": 1})
            with pytest.raises(InvalidInput) as caught:
                ctx.save_checkpoint(state, advance=1)
            assert caught.value.field.startswith("checkpoint")
            assert caught.value.way_out
            return Done(ctx.checkpoint)

        job = start(made(step))
        assert run_slice(job).outcome == Outcome.COMPLETED
        now = row(job)
        assert (now.checkpoint, now.result, now.processed_count) == ({"good": 1}, {"good": 1}, 0)

    @pytest.mark.parametrize(
        "given",
        [{"advance": "3"}, {"advance": 1.5}, {"advance": True}, {"advance": -1}, {"processed": -1},
         {"processed": "3"}, {"processed": False}, {"processed": 2**63}, {"total": -1}, {"total": "7"},
         {"total": 1.0}, {"total": True}, {"advance": 2, "processed": 3}],
        ids=str,
    )  # fmt: skip
    @pytest.mark.parametrize("call", ["save_checkpoint", "progress"])
    def test_counts_that_are_none_are_refused_at_the_call(self, call: str, given: dict[str, Any]) -> None:
        def step(ctx: Any) -> Done:
            with pytest.raises(InvalidInput) as caught:
                getattr(ctx, call)(**given)
            assert caught.value.field in given
            return Done()

        job = start(made(step))
        assert run_slice(job).outcome == Outcome.COMPLETED
        assert (row(job).processed_count, row(job).total_count) == (0, None)

    def test_advance_adds_and_processed_sets(self) -> None:
        """F21"""
        seen: list[int] = []

        def step(ctx: Any) -> Done:
            def note() -> None:
                seen.append(ctx.processed)

            ctx.save_checkpoint(advance=3)
            note()
            ctx.save_checkpoint(advance=4)
            note()
            ctx.save_checkpoint(processed=5)
            note()
            with ctx.fenced():
                ctx.save_checkpoint(advance=1)
                ctx.save_checkpoint({"at": 1}, advance=1)
                ctx.progress(advance=1)
                note()
            note()
            ctx.save_checkpoint(advance=-2)
            note()
            return Done()

        job = start(made(step))
        run_slice(job)
        assert seen == [3, 7, 5, 8, 8, 6]
        assert row(job).processed_count == 6

    def test_a_total_not_given_stays_and_none_means_unknown(self) -> None:
        """B51"""
        seen: list[int | None] = []

        def step(ctx: Any) -> Done:
            for given in ({"total": 10}, {}, {"total": None}, {"total": 0}):
                ctx.save_checkpoint(**given)
                seen.append(row(job).total_count)
                assert ctx.total == seen[-1]
            with ctx.fenced():
                ctx.save_checkpoint(total=8)
                ctx.save_checkpoint({"at": 1})
                assert ctx.total == 8
            return Done()

        job = start(made(step))
        run_slice(job)
        assert seen == [10, 10, None, 0]
        assert row(job).total_count == 8

    def test_the_last_state_of_a_fence_wins_and_keep_leaves_it(self) -> None:
        def step(ctx: Any) -> Done:
            with ctx.fenced():
                ctx.save_checkpoint({"at": 1})
                ctx.save_checkpoint({"at": 2})
                ctx.save_checkpoint(advance=1)
            ctx.save_checkpoint(advance=1)
            return Done()

        job = start(made(step))
        run_slice(job)
        assert (row(job).checkpoint, row(job).processed_count) == ({"at": 2}, 2)

    def test_what_is_saved_is_the_state_as_it_was_at_the_call(self) -> None:
        def step(ctx: Any) -> Done:
            state = {"at": 1}
            with ctx.fenced():
                ctx.save_checkpoint(state)
                state["at"] = 99
            return Done()

        job = start(made(step))
        run_slice(job)
        assert row(job).checkpoint == {"at": 1}

    def test_counts_go_on_from_the_last_slice(self) -> None:
        def step(ctx: Any) -> Any:
            ctx.save_checkpoint(advance=2, total=6)
            return Done() if ctx.processed == 6 else Yield()

        job = start(made(step))
        while row(job).status == "pending":
            run_slice(job)
        assert (row(job).processed_count, row(job).attempts) == (6, 3)


class TestProgress:
    def test_progress_renews_nothing_and_credits_no_commit(self) -> None:
        """A41, B52"""

        def step(ctx: Any) -> Done:
            change(job, lease_expires_at=LONG_AGO)
            ctx.progress(processed=3, total=9, message="reading")
            now = row(job)
            assert (now.processed_count, now.total_count, now.progress_message) == (3, 9, "reading")
            assert now.lease_expires_at == LONG_AGO
            assert (now.consecutive_failures, now.last_committed_at) == (2, None)
            return Done()

        job = start(made(step))
        change(job, consecutive_failures=2)
        assert run_slice(job).outcome == Outcome.COMPLETED

    def test_progress_is_written_at_most_once_a_second(self, django_assert_max_num_queries: Any) -> None:
        def step(ctx: Any) -> Done:
            with django_assert_max_num_queries(6):
                for number in range(500):
                    ctx.progress(advance=1, total=500, message=f"item {number}")
            assert row(job).processed_count == 1
            return Done()

        job = start(made(step))
        run_slice(job)
        assert (row(job).processed_count, row(job).progress_message) == (500, "item 499")

    @pytest.mark.parametrize(
        "end", ["done", "yield", "fail", "cancel", "park", "unrecoverable", "cancel hook fails"]
    )
    def test_the_last_progress_is_written_with_the_slices_end(self, end: str) -> None:
        def step(ctx: Any) -> Any:
            ctx.progress(advance=1)
            ctx.progress(advance=1, total=5, message="second")
            match end:
                case "done":
                    return Done()
                case "yield":
                    return Yield()
                case "cancel" | "cancel hook fails":
                    return Cancelled()
                case "park":
                    raise Park("why")
                case "unrecoverable":
                    raise UnrecoverableError
            raise ValueError

        hooks: dict[str, Any] = {}
        if end == "cancel hook fails":
            hooks = {"on_transition": lambda self, job: 0, "on_redrive": lambda self, job: 1}
        job = start(made(step, **hooks))
        run_slice(job)
        now = row(job)
        assert (now.processed_count, now.total_count, now.progress_message) == (2, 5, "second")

    def test_a_message_is_cleaned_and_cut(self) -> None:
        def step(ctx: Any) -> Done:
            ctx.progress(message="\x00\ud800" + "x" * 600)
            with ctx.fenced():
                ctx.progress(message=12)
            return Done()

        job = start(made(step))
        assert run_slice(job).outcome == Outcome.COMPLETED
        assert row(job).progress_message == "12"

    def test_a_long_message_is_cut(self) -> None:
        def step(ctx: Any) -> Done:
            ctx.progress(message="\x00" + "x" * 600)
            return Done()

        job = start(made(step))
        run_slice(job)
        assert row(job).progress_message == "\ufffd" + "x" * 499

    def test_progress_in_the_steps_own_transaction_waits_for_the_next_write(self) -> None:
        def step(ctx: Any) -> Done:
            with contextlib.suppress(KeyError), transaction.atomic():
                ctx.progress(advance=4)
                raise KeyError
            assert row(job).processed_count == 0
            return Done()

        job = start(made(step))
        run_slice(job)
        assert row(job).processed_count == 4

    def test_progress_of_a_lost_lease_stops_the_slice(self, second_connection: OtherConnection) -> None:
        def step(ctx: Any) -> Done:
            second_connection.run(steal, job)
            ctx.progress(advance=1)
            raise AssertionError("goes on")

        job = start(made(step))
        assert run_slice(job).outcome == Outcome.LEASE_LOST
        assert row(job).processed_count == 0


class TestLostLease:
    """B62, T8: nothing written, nothing counted, nothing raised, one log line."""

    def end_of(self, act: Callable[[Any], Any], second: OtherConnection, caplog: Any, **kind: Any) -> Job:
        stolen: dict[str, Any] = {}
        told: list[Job] = []

        def step(ctx: Any) -> Any:
            second.run(steal, job)
            stolen.update(columns(job))
            return act(ctx)

        def receiver(sender: str, job: Job, **_: Any) -> None:
            told.append(job)

        job = start(made(step, **kind))
        signals.job_lease_lost.connect(receiver)
        try:
            keeper = KeptHolds()
            result = run_slice(job, keeper=keeper)
        finally:
            signals.job_lease_lost.disconnect(receiver)
        assert (result.outcome, result.job) == (Outcome.LEASE_LOST, None)
        assert columns(job) == stolen
        assert marks() == []
        assert set(events(job)) <= {"orphaned"}
        lines = [r.event for r in caplog.records if r.levelno >= logging.WARNING]
        assert lines == ["lease_lost"]
        assert [one.id for one in told] == [job.id]
        assert keeper.held == keeper.let_go_of
        assert keeper.held[0].lost and keeper.held[0].stop.is_set()
        return job

    @pytest.mark.parametrize(
        "statement", ["fence", "checkpoint", "progress", "complete", "yield", "retry after", "fail", "terminal",
                      "unrecoverable", "cancel", "park", "bad outcome", "bad result", "exit", "drain"]
    )  # fmt: skip
    def test_it_ends_quietly_at_every_statement(
        self, statement: str, second_connection: OtherConnection, caplog: pytest.LogCaptureFixture
    ) -> None:
        def act(ctx: Any) -> Any:
            match statement:
                case "fence":
                    with ctx.fenced():
                        mark("a")
                case "checkpoint":
                    ctx.save_checkpoint({"at": 0}, advance=1)
                case "progress":
                    ctx.progress(advance=1)
                case "yield":
                    return Yield()
                case "retry after":
                    raise RetryAfter(5)
                case "fail":
                    raise ValueError("x")
                case "terminal":
                    raise TerminalError("x")
                case "unrecoverable":
                    raise UnrecoverableError("x")
                case "cancel":
                    return Cancelled()
                case "park":
                    raise Park("x")
                case "bad outcome":
                    return None
                case "bad result":
                    return Done({1, 2})
                case "exit":
                    sys.exit(1)
            return Done({"n": 1})

        self.end_of(act, second_connection, caplog)

    @pytest.mark.parametrize("statement", ["complete", "cancel", "park", "terminal"])
    def test_its_hooks_change_nothing(
        self, statement: str, second_connection: OtherConnection, caplog: pytest.LogCaptureFixture
    ) -> None:
        called: list[str] = []

        def act(ctx: Any) -> Any:
            if statement == "park":
                raise Park("x")
            if statement == "terminal":
                raise TerminalError
            return Cancelled() if statement == "cancel" else Done()

        self.end_of(
            act,
            second_connection,
            caplog,
            on_transition=lambda self, job: called.append("on_transition") or 1,
            on_redrive=lambda self, job: 1,
            on_cancel=lambda self, job: called.append("on_cancel"),
            after_transition=lambda self, job: called.append("after_transition"),
        )
        assert called == []

    @pytest.mark.parametrize("answer", [Done(), Yield(), Cancelled(), None, ValueError("x")], ids=repr)
    def test_a_step_that_swallows_the_loss_still_ends_nothing(
        self, answer: Any, second_connection: OtherConnection, caplog: pytest.LogCaptureFixture
    ) -> None:
        """T8"""

        def act(ctx: Any) -> Any:
            with contextlib.suppress(BaseException), ctx.fenced():
                mark("a")
            with contextlib.suppress(BaseException):
                ctx.save_checkpoint({"at": 9})
            assert ctx.stop.is_set()
            if isinstance(answer, Exception):
                raise answer
            return answer

        self.end_of(act, second_connection, caplog)

    def test_except_exception_cannot_swallow_it(
        self, second_connection: OtherConnection, caplog: pytest.LogCaptureFixture
    ) -> None:
        went_on: list[bool] = []

        def act(ctx: Any) -> Done:
            for _ in range(3):
                try:
                    with ctx.fenced():
                        mark("a")
                except Exception:
                    went_on.append(True)
            went_on.append(True)
            return Done()

        self.end_of(act, second_connection, caplog)
        assert went_on == []

    def test_a_step_without_any_statement_of_ours_cannot_complete(
        self, second_connection: OtherConnection, caplog: pytest.LogCaptureFixture
    ) -> None:
        self.end_of(lambda ctx: Done(), second_connection, caplog)

    def test_a_job_that_its_new_owner_has_completed_stays_as_it_is(
        self, second_connection: OtherConnection
    ) -> None:
        def finish() -> None:
            steal(job)
            current = row(job)
            lease = store.Lease(job.id, current.lease_owner or "", current.lease_epoch, 60)
            with database.transaction("default"):
                assert store.complete(lease, '"theirs"')

        def step(ctx: Any) -> Done:
            second_connection.run(finish)
            return Done("mine")

        job = start(made(step))
        assert run_slice(job).outcome == Outcome.LEASE_LOST
        assert (row(job).status, row(job).result) == ("completed", "theirs")

    def test_a_cancel_of_the_new_owner_is_none_of_ours(self, second_connection: OtherConnection) -> None:
        """A request on the row must not lead a displaced slice to end the job."""

        def cancel() -> None:
            steal(job)
            service.cancel(job.id)

        def step(ctx: Any) -> Cancelled:
            second_connection.run(cancel)
            return Cancelled()

        job = start(made(step))
        assert run_slice(job).outcome == Outcome.LEASE_LOST
        assert row(job).status == "running"

    def test_a_loss_that_the_keeper_saw_ends_the_slice_whatever_it_answers(self) -> None:
        """B55, B64"""
        job = start(made(lambda ctx: Done()))
        keeper = KeptHolds(lambda hold: hold.observe(lost=True))
        assert run_slice(job, keeper=keeper).outcome == Outcome.LEASE_LOST
        assert row(job).status == "running"


class TestOutcomes:
    def test_done_completes_with_its_result(self) -> None:
        """B63, B88"""
        job = start(made(lambda ctx: Done({"n": [1, None, "ü"]})))
        change(job, error_class="transient", error_code="x", error_message="y", error_type="z")
        result = run_slice(job)
        now = row(job)
        assert (result.outcome, result.job and result.job.status) == (Outcome.COMPLETED, "completed")
        assert now.result == {"n": [1, None, "ü"]}
        assert now.finished_at and now.domain_mirrored_at
        assert (now.lease_owner, now.next_run_at, now.pending_since) == (None, None, None)
        assert (now.error_class, now.error_code, now.error_message, now.error_type) == (None,) * 4
        assert events(job) == []

    def test_no_result_stays_null(self) -> None:
        """A44"""
        job = start(made(lambda ctx: Done()))
        run_slice(job)
        assert row(job).result_text is None

    @pytest.mark.parametrize("falsy", [0, False, "", [], {}], ids=repr)
    def test_a_falsy_result_is_a_result(self, falsy: Any) -> None:
        job = start(made(lambda ctx: Done(falsy)))
        run_slice(job)
        assert row(job).result_text == json.dumps(falsy)

    @pytest.mark.parametrize(
        "result",
        [{1, 2}, float("nan"), {"a": "\x00"}, object(), "x" * 1_100_000],
        ids=lambda v: type(v).__name__,
    )
    def test_a_result_that_is_not_json_fails_without_repeating_the_work(self, result: Any) -> None:
        ran: list[int] = []
        job = start(made(lambda ctx: ran.append(1) or Done(result)))
        assert run_slice(job).outcome == Outcome.FAILED
        now = row(job)
        assert (now.status, now.verdict, now.error_code) == ("failed", "unrecoverable", "bad_result")
        assert "result" in (now.error_message or "")
        assert len(ran) == 1

    def test_a_yield_hands_back_and_counts_nothing(self) -> None:
        """T16, B66, B67"""
        job = start(made(lambda ctx: Yield()))
        for seq in (1, 2, 3):
            result = run_slice(job)
            assert result.outcome == Outcome.YIELDED and result.job is not None
            assert (result.job.continuation_seq, result.job.redrives) == (seq, 0)
        now = row(job)
        assert (now.status, now.lease_owner, now.lease_epoch, now.attempts) == ("pending", None, 3, 3)
        assert limits(job) == (0, 0, 0, 0)
        assert now.pending_since and now.next_run_at and now.next_run_at <= timezone.now()
        assert now.lease_expires_at is not None and now.lease_expires_at <= timezone.now()
        assert events(job) == []

    @pytest.mark.parametrize("way", ["answer", "exception", "deep in a fence"])
    def test_a_later_time_may_be_asked_for(self, way: str) -> None:
        """F6: Yield(after) and RetryAfter hand back, due later, and count no failure."""

        def step(ctx: Any) -> Any:
            if way == "answer":
                return Yield(after=3600)
            if way == "exception":
                raise RetryAfter(3600)
            with ctx.fenced():
                mark("rolled back")
                raise RetryAfter(3600.0)

        job = start(made(step))
        assert run_slice(job).outcome == Outcome.YIELDED
        now = row(job)
        assert now.next_run_at is not None
        assert 3590 < (now.next_run_at - timezone.now()).total_seconds() < 3610
        assert (now.status, now.continuation_seq, limits(job)) == ("pending", 1, (0, 0, 0, 0))
        assert marks() == []

    @pytest.mark.parametrize("after", [-1, float("nan"), "5", True, None, 1e12], ids=repr)
    def test_a_yield_that_names_no_time_is_a_mistake_in_the_program(self, after: Any) -> None:
        job = start(made(lambda ctx: Yield(after=after)))
        assert run_slice(job).outcome == Outcome.FAILED
        assert (row(job).verdict, row(job).error_code) == ("unrecoverable", "bad_outcome")

    def test_a_retry_after_that_names_no_time_is_a_failure(self) -> None:
        def step(ctx: Any) -> None:
            raise RetryAfter(-1)

        job = start(made(step))
        assert run_slice(job).outcome == Outcome.RETRY
        assert row(job).error_code == "E_JOB_INPUT_INVALID"

    @pytest.mark.parametrize(
        "answer",
        [None, True, 0, "done", Done, Yield, Outcome.COMPLETED, ROW_GONE, {}, [Done()], (n for n in ())],
        ids=lambda value: repr(value)[:30],
    )
    def test_any_other_answer_fails_for_good_and_is_never_repeated(self, answer: Any) -> None:
        """B70, F6: a forgotten return must not repeat work, and leaves no live lease."""
        ran: list[int] = []

        def step(ctx: Any) -> Any:
            ran.append(1)
            return answer

        job = start(made(step))
        assert run_slice(job).outcome == Outcome.FAILED
        now = row(job)
        assert (now.status, now.verdict, now.error_class, now.error_code) == (
            "failed", "unrecoverable", "unrecoverable", "bad_outcome",
        )  # fmt: skip
        assert "Done" in (now.error_message or "")
        assert (now.lease_owner, now.next_run_at, len(ran)) == (None, None, 1)

    def test_a_bad_answer_is_bad_whatever_the_kind_thinks_of_errors(self) -> None:
        """classify() of a kind speaks for the errors of its step, not for mistakes in the program."""
        job = start(made(lambda ctx: None, classify=lambda self, error: ErrorClass.TRANSIENT))
        assert run_slice(job).outcome == Outcome.FAILED
        assert row(job).verdict == "unrecoverable"

    def test_an_answer_whose_repr_fails_is_a_bad_answer(self) -> None:
        class Nasty:
            def __repr__(self) -> str:
                raise RuntimeError("no repr")

        job = start(made(lambda ctx: Nasty()))
        assert run_slice(job).outcome == Outcome.FAILED
        assert row(job).error_code == "bad_outcome"

    def test_an_observed_cancel_overrides_every_outcome(self) -> None:
        """T12, B63, C12; a bare `return` at ctx.stop included."""

        def park(ctx: Any) -> None:
            raise Park("x")

        def fail(ctx: Any) -> None:
            raise ValueError

        def unrecoverable(ctx: Any) -> None:
            raise UnrecoverableError

        def later(ctx: Any) -> None:
            raise RetryAfter(60)

        def leave(ctx: Any) -> None:
            sys.exit()

        steps = {
            "done": lambda ctx: Done(), "yield": lambda ctx: Yield(), "cancelled": lambda ctx: Cancelled(),
            "bare return": lambda ctx: None, "bad result": lambda ctx: Done({1}), "park": park, "fail": fail,
            "unrecoverable": unrecoverable, "later": later, "exit": leave,
        }  # fmt: skip
        ended = {}
        for name, step in steps.items():
            job = start(made(step, name=f"tests.{name.replace(' ', '_')}"))
            keeper = KeptHolds(lambda hold: hold.observe(cancel=True))
            result = run_slice(job, keeper=keeper)
            ended[name] = (result.outcome, row(job).status, limits(job))
        assert ended == {name: (Outcome.CANCELLED, "cancelled", (0, 0, 0, 0)) for name in steps}

    def test_a_step_may_cancel_itself(self) -> None:
        """B63, P24: the request is stamped."""
        job = start(made(lambda ctx: Cancelled()))
        assert run_slice(job).outcome == Outcome.CANCELLED
        now = row(job)
        assert now.status == "cancelled" and now.cancel_requested_at is not None
        assert events(job) == ["cancelled"]

    def test_exceptions_are_met_in_order(self) -> None:
        """B64: lost, cancelled, shutting down, failed."""
        outcomes = []
        for lost, cancelled, draining in [(1, 1, 1), (0, 1, 1), (0, 0, 1), (0, 0, 0)]:

            def step(ctx: Any) -> None:
                raise ValueError("x")

            def tell(hold: Hold, lost: int = lost, cancelled: int = cancelled) -> None:
                hold.observe(lost=bool(lost), cancel=bool(cancelled))

            drain = threading.Event()
            if draining:
                drain.set()
            job = start(made(step, name=f"tests.order{len(outcomes)}"))
            result = run_slice(job, keeper=KeptHolds(tell), draining=drain)
            outcomes.append((result.outcome, limits(job)[0], limits(job)[2]))
        assert outcomes == [
            (Outcome.LEASE_LOST, 0, 0),
            (Outcome.CANCELLED, 0, 0),
            (Outcome.YIELDED, 0, 1),
            (Outcome.RETRY, 1, 0),
        ]

    @pytest.mark.parametrize("way", ["yield", "exception", "retry after"])
    @pytest.mark.parametrize("sign", ["draining", "paused"])
    def test_a_deploy_or_a_pause_is_an_interruption_and_no_failure(self, sign: str, way: str) -> None:
        """B64, B69, C026"""
        draining = threading.Event()

        def step(ctx: Any) -> Any:
            ctx.save_checkpoint({"at": 2})
            if sign == "draining":
                draining.set()
            else:
                keeper.held[0].paused = True
            if way == "exception":
                raise ConnectionError("the broker went away with us")
            if way == "retry after":
                raise RetryAfter(30)
            return Yield()

        keeper = KeptHolds()
        job = start(made(step))
        assert run_slice(job, keeper=keeper, draining=draining).outcome == Outcome.YIELDED
        now = row(job)
        assert (now.status, now.checkpoint, limits(job)) == ("pending", {"at": 2}, (0, 0, 1, 0))

    def test_finished_work_completes_in_a_drain(self) -> None:
        draining = threading.Event()
        job = start(made(lambda ctx: draining.set() or Done(1)))
        assert run_slice(job, draining=draining).outcome == Outcome.COMPLETED

    def test_a_hung_slice_that_was_let_go_may_still_hand_back(self) -> None:
        """F1: nobody took it, so owner and epoch suffice."""

        def tell(hold: Hold) -> None:
            hold.overdue = True
            hold.stop.set()

        job = start(made(lambda ctx: Yield() if ctx.should_yield() else Done()))
        assert run_slice(job, keeper=KeptHolds(tell)).outcome == Outcome.YIELDED

    def test_a_keyboard_interrupt_leaves_everything_as_a_kill_would(self) -> None:
        def step(ctx: Any) -> None:
            with ctx.fenced():
                mark("a")
                raise KeyboardInterrupt

        job = start(made(step))
        keeper = KeptHolds()
        with pytest.raises(KeyboardInterrupt):
            run_slice(job, keeper=keeper)
        now = row(job)
        assert (now.status, now.lease_owner, marks()) == ("running", OWNER, [])
        assert keeper.held == keeper.let_go_of

    @pytest.mark.parametrize(
        "end",
        [
            lambda ctx: Done(),
            lambda ctx: Yield(),
            lambda ctx: None,
            lambda ctx: 1 / 0,
            lambda ctx: sys.exit(2),
        ],
        ids=["done", "yield", "nothing", "error", "exit"],
    )
    def test_the_keeper_lets_go_on_every_path(self, end: Any) -> None:
        """B71"""
        keeper = KeptHolds()
        run_slice(start(made(end)), keeper=keeper)
        assert len(keeper.held) == 1 and keeper.held == keeper.let_go_of

    def test_an_unknown_kind_is_refused_before_anything_else(self) -> None:
        job = make_job("running", kind="tests.nobody", owner=OWNER)
        before = columns(job)
        with pytest.raises(Exception, match=r"tests\.nobody") as caught:
            runner.run_slice(row(job), owner=OWNER)
        assert getattr(caught.value, "code", None) == "unknown_kind"
        assert columns(job) == before


class TestFailures:
    def test_a_failed_slice_waits_for_its_retry(self) -> None:
        """B73, B76: running, no lease, same identity, the error written down and handed on."""

        def step(ctx: Any) -> None:
            raise TransientError("the network", code="net")

        job = start(made(step, retry=Retry(failures=3, first_delay=60, longest_delay=60)))
        result = run_slice(job)
        now = row(job)
        assert result.outcome == Outcome.RETRY and isinstance(result.error, TransientError)
        assert (now.status, now.lease_owner, now.consecutive_failures) == ("running", None, 1)
        assert (now.continuation_seq, now.redrives, now.verdict) == (0, 0, None)
        assert (now.error_class, now.error_code, now.error_message) == ("transient", "net", "the network")
        assert now.error_type == "durable_jobs.exceptions.TransientError"
        assert now.next_run_at is not None
        assert 50 < (now.next_run_at - timezone.now()).total_seconds() < 70
        [event] = job.events.all()
        assert (event.event, event.code, event.message, event.owner) == (
            "slice_failed",
            "net",
            "the network",
            OWNER,
        )
        assert "raise TransientError" in event.traceback
        assert claim(job).attempts == 2

    def test_the_last_failure_of_a_row_decides(self) -> None:
        """F15, B74, B79"""

        def step(ctx: Any) -> None:
            raise ValueError("again")

        job = start(made(step))
        outcomes = [run_slice(job).outcome for _ in range(3)]
        now = row(job)
        assert outcomes == [Outcome.RETRY, Outcome.RETRY, Outcome.FAILED]
        assert (now.status, now.verdict, now.consecutive_failures) == ("failed", "retry_exhausted", 3)
        assert (now.error_type, now.error_message, now.parked_at) == ("ValueError", "again", None)
        assert (now.lease_owner, now.next_run_at) == (None, None) and now.finished_at is not None
        assert events(job) == ["slice_failed"] * 3 + ["failed"]

    def test_a_commit_in_the_same_slice_has_reset_the_counter(self) -> None:
        """B75, T4"""

        def step(ctx: Any) -> None:
            ctx.save_checkpoint({"at": 1})
            raise ValueError

        job = start(made(step))
        change(job, consecutive_failures=2)
        assert run_slice(job).outcome == Outcome.RETRY
        assert (row(job).consecutive_failures, row(job).verdict) == (1, None)

    def test_a_job_that_commits_between_failures_is_never_exhausted(self) -> None:
        """B84"""

        def step(ctx: Any) -> Done:
            at = (ctx.checkpoint or {"at": 0})["at"]
            if at == 8:
                return Done()
            with ctx.fenced():
                ctx.save_checkpoint({"at": at + 1})
            raise ValueError

        job = start(made(step))
        for _ in range(8):
            assert run_slice(job).outcome == Outcome.RETRY
        assert run_slice(job).outcome == Outcome.COMPLETED
        assert row(job).attempts == 9

    def test_a_terminal_error_fails_at_once_and_needs_no_force(self) -> None:
        """B77"""

        def step(ctx: Any) -> None:
            raise TerminalError("no such file", code="missing")

        job = start(made(step))
        assert run_slice(job).outcome == Outcome.FAILED
        now = row(job)
        assert (now.verdict, now.error_class, now.error_code) == ("retry_exhausted", "terminal", "missing")
        assert service.redrive(job.id).status == "pending"

    def test_an_unrecoverable_error_fails_at_once_and_needs_force(self) -> None:
        """B78"""

        def step(ctx: Any) -> None:
            raise UnrecoverableError("known wrong", code="wrong")

        job = start(made(step))
        assert run_slice(job).outcome == Outcome.FAILED
        now = row(job)
        assert (now.verdict, now.error_class, now.error_code) == ("unrecoverable", "unrecoverable", "wrong")
        assert now.next_run_at is None
        with pytest.raises(Exception) as caught:
            service.redrive(job.id)
        assert getattr(caught.value, "code", None) == "unrecoverable_requires_force"

    @pytest.mark.parametrize("code", ["unrecoverable", "retry_exhausted", "orphaned", "bad_outcome"])
    def test_an_errors_own_code_decides_nothing(self, code: str) -> None:
        """B5"""

        def step(ctx: Any) -> None:
            raise TransientError("x", code=code)

        job = start(made(step))
        assert run_slice(job).outcome == Outcome.RETRY
        assert (row(job).error_code, row(job).verdict) == (code, None)

    @pytest.mark.parametrize("code", [42, "", "  ", None, b"x"], ids=repr)
    def test_a_code_is_stored_only_when_it_is_a_text(self, code: Any) -> None:
        """B3"""

        class Foreign(Exception):
            pass

        def step(ctx: Any) -> None:
            error = Foreign("x")
            error.code = code  # type: ignore[attr-defined]
            raise error

        job = start(made(step))
        run_slice(job)
        assert row(job).error_code is None

    @pytest.mark.parametrize(
        ("own", "verdict"),
        [(ErrorClass.UNRECOVERABLE, "unrecoverable"), ("terminal", "retry_exhausted"), (None, "retry_exhausted"),
         ("nonsense", "retry_exhausted")],
    )  # fmt: skip
    def test_the_kinds_word_comes_before_the_errors_marker(self, own: Any, verdict: str) -> None:
        """B72; what classify answers wrongly counts for nothing."""

        def step(ctx: Any) -> None:
            raise TerminalError

        job = start(made(step, classify=lambda self, error: own))
        run_slice(job)
        assert row(job).verdict == verdict

    @pytest.mark.parametrize("nasty", [ZeroDivisionError, SystemExit])
    def test_a_classify_that_raises_leaves_the_marker(self, nasty: type[BaseException]) -> None:
        def step(ctx: Any) -> None:
            raise TerminalError

        def classify(self: Any, error: BaseException) -> None:
            raise nasty

        job = start(made(step, classify=classify))
        assert run_slice(job).outcome == Outcome.FAILED
        assert row(job).verdict == "retry_exhausted"

    def test_delays_double_up_to_the_longest(self) -> None:
        """B80"""

        def step(ctx: Any) -> None:
            raise ValueError

        retry = Retry(failures=1000, first_delay=5, longest_delay=300)
        job = start(made(step, retry=retry))
        waits = []
        for failures in (0, 1, 2, 5, 6, 50, 998):
            change(job, consecutive_failures=failures)
            run_slice(job)
            now = row(job)
            assert now.next_run_at is not None
            waits.append(round((now.next_run_at - now.updated_at).total_seconds()))
            assert waits[-1] == retry.delay(failures + 1)
        assert waits == [5, 10, 20, 160, 300, 300, 300]

    def test_a_fixed_delay_stays(self) -> None:
        """B80"""

        def step(ctx: Any) -> None:
            raise ValueError

        job = start(made(step, retry=Retry(failures=9, first_delay=7, longest_delay=300, backoff="fixed")))
        for _ in range(3):
            run_slice(job)
            now = row(job)
            assert now.next_run_at is not None
            assert round((now.next_run_at - now.updated_at).total_seconds()) == 7

    def test_a_verdict_on_the_row_is_decided_without_running_the_work(self) -> None:
        """B81, T17"""
        ran: list[int] = []
        hook_answers = iter([0, 0, 1])

        def step(ctx: Any) -> None:
            ran.append(1)
            raise TerminalError("once", code="why")

        job = start(
            made(step, on_transition=lambda self, job: next(hook_answers), on_redrive=lambda self, job: 1)
        )
        assert run_slice(job).outcome == Outcome.RETRY
        first = row(job)
        assert (first.status, first.verdict, first.lease_owner) == ("running", "retry_exhausted", None)
        second = run_slice(job)
        now = row(job)
        assert second.outcome == Outcome.RETRY
        assert (now.status, now.verdict, now.lease_owner, now.error_code) == (
            "running",
            "retry_exhausted",
            None,
            "why",
        )
        assert now.next_run_at is not None
        assert run_slice(job).outcome == Outcome.FAILED
        assert (len(ran), row(job).mirror_attempts, row(job).consecutive_failures) == (1, 2, 1)
        assert row(job).error_code == "why"

    def test_a_failed_decision_keeps_the_verdict_and_lets_go(self) -> None:
        """B82, B83: so that the next claim is not refused."""
        job = start(
            made(
                lambda ctx: 1 / 0,
                retry=Retry(failures=1, first_delay=0, longest_delay=0),
                on_transition=lambda self, job: 0,
                on_redrive=lambda self, job: 1,
            )
        )
        for attempt in range(1, 5):
            assert run_slice(job).outcome == Outcome.RETRY
            now = row(job)
            assert (now.verdict, now.lease_owner, now.mirror_attempts) == ("retry_exhausted", None, attempt)
            assert now.lease_expires_at is not None and now.lease_expires_at <= timezone.now()

    def test_a_hook_that_fails_on_completion_is_a_failed_slice(self) -> None:
        """B68: counted, retried; the step runs again and finds nothing left."""
        answers = iter([0, 1])
        ran: list[Any] = []

        def step(ctx: Any) -> Done:
            ran.append(ctx.checkpoint)
            ctx.save_checkpoint({"all": True})
            return Done()

        job = start(made(step, on_transition=lambda self, job: next(answers), on_redrive=lambda self, job: 1))
        assert run_slice(job).outcome == Outcome.RETRY
        now = row(job)
        assert (now.status, now.consecutive_failures, now.mirror_attempts) == ("running", 1, 1)
        assert now.error_code == "domain_mirror_mismatch"
        assert run_slice(job).outcome == Outcome.COMPLETED
        assert ran == [None, {"all": True}]

    def test_a_hook_on_completion_that_fails_for_ever_exhausts_the_retries(self) -> None:
        job = start(made(None, on_transition=lambda self, job: 0 if job.status == "completed" else 1,
                         on_redrive=lambda self, job: 1))  # fmt: skip
        assert [run_slice(job).outcome for _ in range(3)] == [Outcome.RETRY, Outcome.RETRY, Outcome.FAILED]

    @pytest.mark.parametrize(
        "leave", [SystemExit(3), GeneratorExit(), asyncio.CancelledError("x"), SystemExit()]
    )
    def test_what_would_end_a_thread_is_a_failure_of_the_step(self, leave: BaseException) -> None:
        """C120: a step never kills its worker."""

        def step(ctx: Any) -> None:
            raise leave

        job = start(made(step))
        assert run_slice(job).outcome == Outcome.RETRY
        assert (row(job).consecutive_failures, row(job).error_code) == (1, None)
        assert type(leave).__name__ in (row(job).error_type or "")

    def test_an_error_is_recorded_whatever_it_says(self) -> None:
        """C079, §7: NUL, lone surrogates, 2 MB, deep recursion, a nasty __str__."""

        def recurse(n: int) -> int:
            return recurse(n + 1) + 1

        class Nasty(Exception):
            def __str__(self) -> str:
                raise SystemExit("no text")

        def big(ctx: Any) -> None:
            raise ValueError("head\x00" + "m" * 2_000_000 + "\ud800tail")

        def nasty(ctx: Any) -> None:
            raise Nasty

        def coded(ctx: Any) -> None:
            raise TransientError("x", code="c\x00" + "d" * 300)

        for number, step in enumerate([big, nasty, coded, lambda ctx: recurse(0)]):
            job = start(made(step, name=f"tests.says{number}"))
            assert run_slice(job).outcome == Outcome.RETRY
            now, [event] = row(job), job.events.all()
            assert now.consecutive_failures == 1
            assert len(now.error_message or "") <= 10_000 and len(event.traceback) <= 50_000
            assert "\x00" not in (now.error_message or "") + event.traceback
            if step is big:
                assert (now.error_message or "").startswith("head\ufffd") and (
                    now.error_message or ""
                ).endswith("tail")

    def test_what_a_failed_step_held_is_let_go_with_its_result(self) -> None:
        """A cycle through the traceback would keep it until the garbage collector comes."""

        class Large:
            pass

        gone: list[weakref.ref[Large]] = []

        def step(ctx: Any) -> None:
            large = Large()
            gone.append(weakref.ref(large))
            raise ValueError

        job = start(made(step))
        gc.disable()
        logging.disable()
        try:
            result = run_slice(job)
            assert result.outcome == Outcome.RETRY and gone[0]() is not None
            del result
            assert gone[0]() is None
        finally:
            logging.disable(logging.NOTSET)
            gc.enable()

    def test_a_parked_job_waits_for_a_human_with_its_reason(self) -> None:
        """F8"""

        def step(ctx: Any) -> None:
            raise Park("cursor_version", "The cursor is of version 1.")

        job = start(made(step))
        assert run_slice(job).outcome == Outcome.FAILED
        now = row(job)
        assert (now.status, now.error_code, now.error_class) == ("failed", "cursor_version", "terminal")
        assert now.parked_at is not None and now.verdict is None and now.next_run_at is None
        assert events(job) == ["parked"]
        assert service.redrive(job.id).status == "pending"

    @pytest.mark.parametrize("code", ["", "  ", None, 5, "x" * 300, "a\x00b"], ids=lambda c: repr(c)[:9])
    def test_a_park_without_a_usable_code_still_parks(self, code: Any) -> None:
        """A row that could not be written would be run again and again."""

        def step(ctx: Any) -> None:
            raise Park(code, "why")

        job = start(made(step))
        assert run_slice(job).outcome == Outcome.FAILED
        now = row(job)
        assert now.parked_at is not None and now.error_code and len(now.error_code) <= 100

    def test_a_park_whose_hook_fails_is_tried_again(self) -> None:
        answers = iter([0, 1])

        def step(ctx: Any) -> None:
            raise Park("why")

        job = start(made(step, on_transition=lambda self, job: next(answers), on_redrive=lambda self, job: 1))
        assert run_slice(job).outcome == Outcome.RETRY
        assert (row(job).status, row(job).lease_owner, limits(job)) == ("running", None, (0, 0, 0, 1))
        assert run_slice(job).outcome == Outcome.FAILED
        assert row(job).parked_at is not None

    @pytest.mark.parametrize("tampering", ["text", "hash", "gone"])
    def test_changed_input_is_never_run(self, tampering: str) -> None:
        """C5: what is hashed is what is run."""
        ran: list[int] = []
        job = start(made(lambda ctx: ran.append(1) or Done()), {"amount": 1})
        if tampering == "text":
            change(job, input_text='{"amount":1000}')
        elif tampering == "hash":
            change(job, input_sha256="0" * 64)
        else:
            change(job, input_text=None)
        assert run_slice(job).outcome == Outcome.FAILED
        now = row(job)
        assert (now.verdict, now.error_code, ran) == ("unrecoverable", "input_changed", [])

    @pytest.mark.parametrize("error", [DatabaseError("violates a check"), SystemExit(3)], ids=repr)
    def test_a_statement_that_never_succeeds_is_counted_and_ends_the_job(
        self, error: BaseException, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """An outcome that cannot be written must not be tried for ever, and never as somebody's outage."""
        ran: list[int] = []

        def refuse(*_: Any, **__: Any) -> None:
            raise error

        monkeypatch.setattr(store, "complete", refuse)
        job = start(made(lambda ctx: ran.append(1) or Done()))
        outcomes = [run_slice(job).outcome for _ in range(4)]
        assert outcomes == [Outcome.RETRY] * 3 + [Outcome.FAILED]
        assert (row(job).status, len(ran)) == ("failed", 3)


class TestCancel:
    def test_a_request_before_the_claim_means_that_the_step_never_runs(self) -> None:
        """B103"""
        ran: list[int] = []
        job = start(made(lambda ctx: ran.append(1) or Done()))
        store.request_cancel(job.id, scope=None)
        assert run_slice(job).outcome == Outcome.CANCELLED
        assert (row(job).status, ran) == ("cancelled", [])

    @pytest.mark.postgres_only
    def test_a_mailed_request_before_the_claim_counts_as_well(
        self, second_connection: OtherConnection
    ) -> None:
        """B103, P11"""
        ran: list[int] = []
        job = start(made(lambda ctx: ran.append(1) or Done()))
        with second_connection_lock(second_connection, job):
            assert service.cancel(job.id).status == "pending"
        assert row(job).cancel_requested_at is None
        assert run_slice(job).outcome == Outcome.CANCELLED
        assert ran == []

    def test_a_request_beats_a_verdict_at_the_claim(self) -> None:
        """B102"""
        job = make_job("verdict", kind=made().name)
        store.request_cancel(job.id, scope=None)
        assert run_slice(job).outcome == Outcome.CANCELLED
        assert (row(job).status, row(job).verdict) == ("cancelled", None)

    @pytest.mark.parametrize(
        "error", [ValueError("x"), TerminalError("x"), UnrecoverableError("x")], ids=repr
    )
    def test_a_request_that_the_failing_slice_meets_ends_the_job_cancelled(
        self, error: Exception, second_connection: OtherConnection
    ) -> None:
        """B102: the statement that records the failure has seen the request."""

        def step(ctx: Any) -> None:
            second_connection.run(service.cancel, job.id)
            raise error

        job = start(made(step))
        assert run_slice(job).outcome == Outcome.CANCELLED
        now = row(job)
        assert (now.status, now.verdict) == ("cancelled", None)
        assert events(job) == ["cancel_requested", "slice_failed", "cancelled"]

    def test_a_request_that_the_failing_slice_meets_survives_a_failing_hook(
        self, second_connection: OtherConnection
    ) -> None:
        """B101, B102"""
        answers = iter([0, 1])

        def step(ctx: Any) -> None:
            second_connection.run(service.cancel, job.id)
            raise TerminalError

        job = start(made(step, on_transition=lambda self, job: next(answers), on_redrive=lambda self, job: 1))
        assert run_slice(job).outcome == Outcome.RETRY
        now = row(job)
        assert (now.status, now.lease_owner) == ("running", None)
        assert now.cancel_requested_at is not None and now.next_run_at is not None
        assert run_slice(job).outcome == Outcome.CANCELLED

    def test_a_commit_observes_the_request(self, second_connection: OtherConnection) -> None:
        """B55, B98, C12"""
        done: list[int] = []

        def step(ctx: Any) -> Done:
            for batch in range(20):
                if ctx.should_yield():
                    break
                if batch == 2:
                    second_connection.run(service.cancel, job.id)
                with ctx.fenced():
                    done.append(batch)
                    ctx.save_checkpoint({"at": batch})
            return Done("by mistake")

        job = start(made(step))
        assert run_slice(job).outcome == Outcome.CANCELLED
        now = row(job)
        assert (now.status, now.result, done) == ("cancelled", None, [0, 1, 2])
        assert now.checkpoint == {"at": 2}
        [event] = job.events.filter(event="cancelled")
        assert (event.actor, event.data["worker_gone"]) == (f"worker:{OWNER}", False)

    def test_a_request_inside_the_open_fence_is_observed_at_its_end(
        self, second_connection: OtherConnection, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """P11: the request does not wait on PostgreSQL; on SQLite it refuses as busy."""
        monkeypatch.setattr(service, "CANCEL_WAIT_SECONDS", 0.1)
        answers: list[Any] = []

        def cancel() -> Any:
            try:
                return service.cancel(job.id).status
            except Exception as error:
                return getattr(error, "code", error)

        def step(ctx: Any) -> Any:
            with ctx.fenced():
                begun = time.monotonic()
                answers.append(second_connection.run(cancel))
                answers.append(time.monotonic() - begun < 1)
            return Done() if not ctx.stop.is_set() else Yield()

        job = start(made(step))
        outcome = run_slice(job).outcome
        if connection.vendor == "postgresql":
            assert (outcome, answers) == (Outcome.CANCELLED, ["running", True])
        else:
            assert (outcome, answers) == (Outcome.COMPLETED, ["busy", True])

    def test_a_request_that_nobody_saw_before_the_last_commit_changes_nothing(
        self, second_connection: OtherConnection
    ) -> None:
        """B63, C12: committed work is not erased."""

        def step(ctx: Any) -> Done:
            second_connection.run(service.cancel, job.id)
            return Done("whole")

        job = start(made(step))
        assert run_slice(job).outcome == Outcome.COMPLETED
        assert row(job).result == "whole"

    def test_a_failing_hook_lets_the_lease_go_and_counts_no_failure(self) -> None:
        """B101, B65: the request stays, and the hook is not called twice."""
        called: list[str] = []

        def on_transition(self: Any, job: Job) -> int:
            called.append(job.status)
            if len(called) == 1:
                raise LookupError("gone for now")
            return 1

        job = start(made(None, retry=Retry(failures=1, first_delay=40, longest_delay=40),
                         on_transition=on_transition, on_redrive=lambda self, job: 1))  # fmt: skip
        keeper = KeptHolds(lambda hold: hold.observe(cancel=True))
        store.request_cancel(job.id, scope=None)
        result = run_slice(job, keeper=keeper)
        now = row(job)
        assert result.outcome == Outcome.RETRY and isinstance(result.error, LookupError)
        assert (now.status, now.lease_owner, now.error_code, now.verdict) == ("running", None, None, None)
        assert limits(job) == (0, 0, 0, 1) and now.cancel_requested_at is not None
        assert now.next_run_at is not None and (now.next_run_at - timezone.now()).total_seconds() > 30
        assert called == ["cancelled"]
        assert run_slice(job).outcome == Outcome.CANCELLED

    def test_a_live_driver_stops_at_a_boundary(self, second_connection: OtherConnection) -> None:
        """B98, with a keeper that beats."""
        done: list[int] = []

        def step(ctx: Any) -> Any:
            for batch in range(200):
                if ctx.should_yield():
                    return None
                done.append(batch)
                if batch == 2:
                    second_connection.run(service.cancel, job.id)
                ctx.stop.wait(0.05)
            return Done()

        job = start(made(step, lease_seconds=0.6))
        keeper = Keeper(OWNER)
        keeper.start()
        try:
            result = runner.run_slice(claim(job, ttl=0.6), owner=OWNER, keeper=keeper)
        finally:
            keeper.stop()
        assert (result.outcome, row(job).status) == (Outcome.CANCELLED, "cancelled")
        assert 3 <= len(done) < 50

    def test_a_step_that_cancels_its_own_job_is_cancelled_at_the_fences_end(self) -> None:
        def step(ctx: Any) -> Done:
            with ctx.fenced():
                service.cancel(ctx.job.id)
                mark("a")
            assert ctx.stop.is_set()
            return Done()

        job = start(made(step))
        assert run_slice(job).outcome == Outcome.CANCELLED
        assert marks() == ["a"]


@contextlib.contextmanager
def second_connection_lock(other: OtherConnection, job: Job) -> Any:
    """Another connection holds the job's row."""
    other.enter(transaction.atomic())
    other.run(lambda: Job._base_manager.select_for_update().get(pk=job.pk))
    try:
        yield
    finally:
        other.leave()


class TestAsync:
    @pytest.fixture(autouse=True)
    def no_loop_left(self, no_thread_left: None) -> Iterator[None]:
        """The thread of asgiref's loop ends with its executor, which a traceback may keep alive."""
        yield
        gc.collect()

    def test_an_async_step_writes_in_the_slices_own_thread(self) -> None:
        """F24"""
        threads: list[int] = []

        async def step(ctx: Any) -> Done:
            def write(label: str) -> str:
                threads.append(threading.get_ident())
                mark(label)
                ctx.save_checkpoint({"at": 1}, advance=1)
                return label.upper()

            await asyncio.sleep(0)
            answer = await ctx.run_fenced(write, "a")
            threads.append(await sync_to_async(threading.get_ident)())
            return Done(answer)

        job = start(made(step))
        assert run_slice(job).outcome == Outcome.COMPLETED
        assert (row(job).result, row(job).checkpoint, row(job).processed_count, marks()) == (
            "A",
            {"at": 1},
            1,
            ["a"],
        )
        assert set(threads) == {threading.get_ident()}

    @pytest.mark.parametrize("act", ["fenced", "save_checkpoint"])
    def test_a_block_in_a_coroutine_is_refused_with_the_way_out(self, act: str) -> None:
        """F24"""

        async def step(ctx: Any) -> Done:
            with pytest.raises(SynchronousOnlyOperation, match="run_fenced"):
                if act == "fenced":
                    with ctx.fenced():
                        raise AssertionError("entered")
                else:
                    ctx.save_checkpoint({"at": 1})
            return Done()

        assert run_slice(start(made(step))).outcome == Outcome.COMPLETED

    def test_progress_in_a_coroutine_is_written_with_the_slices_end(self) -> None:
        async def step(ctx: Any) -> Done:
            ctx.progress(advance=3, message="reading")
            return Done()

        job = start(made(step))
        assert run_slice(job).outcome == Outcome.COMPLETED
        assert (row(job).processed_count, row(job).progress_message) == (3, "reading")

    def test_a_fence_that_rolls_back_in_an_async_step_rolls_back(self) -> None:
        async def step(ctx: Any) -> None:
            def write() -> None:
                mark("a")
                raise KeyError("x")

            await ctx.run_fenced(write)

        job = start(made(step))
        logging.disable()  # a captured record would keep the traceback, and with it the loop's thread
        try:
            assert run_slice(job).outcome == Outcome.RETRY
        finally:
            logging.disable(logging.NOTSET)
        assert (marks(), row(job).consecutive_failures) == ([], 1)

    @pytest.mark.parametrize("group", [False, True])
    def test_a_lost_lease_ends_an_async_step_quietly(
        self, group: bool, second_connection: OtherConnection
    ) -> None:
        def taken() -> None:
            second_connection.run(steal, job)

        async def step(ctx: Any) -> Done:
            await sync_to_async(taken)()
            if group:
                async with asyncio.TaskGroup() as tasks:
                    tasks.create_task(ctx.run_fenced(mark, "a"))
            else:
                await ctx.run_fenced(mark, "a")
            return Done()

        job = start(made(step))
        assert run_slice(job).outcome == Outcome.LEASE_LOST
        assert marks() == []

    def test_an_async_step_that_forgot_its_answer_is_a_bad_outcome(self) -> None:
        async def step(ctx: Any) -> None:
            await asyncio.sleep(0)

        job = start(made(step))
        assert run_slice(job).outcome == Outcome.FAILED
        assert row(job).error_code == "bad_outcome"

    def test_a_step_that_returns_a_coroutine_is_a_bad_outcome(self) -> None:
        async def work(ctx: Any) -> Done:
            return Done()

        step = functools.partial(lambda ctx, act: act(ctx), act=work)
        job = start(made(step))
        with pytest.warns(RuntimeWarning, match="never awaited"):
            assert run_slice(job).outcome == Outcome.FAILED
        assert row(job).error_code == "bad_outcome"


class TestConnection:
    """C116, C052: what a step leaves behind on the connection must not carry the outcome."""

    def clean(self) -> None:
        assert (
            not connection.in_atomic_block and not connection.savepoint_ids and not connection.needs_rollback
        )
        assert connection.get_autocommit()
        with transaction.atomic(durable=True):
            mark("works")
        assert "works" in marks()

    def leave_atomic_open(self) -> None:
        transaction.atomic().__enter__()
        mark("left open")

    def leave_two_atomics_open(self) -> None:
        transaction.atomic().__enter__()
        transaction.atomic().__enter__()
        mark("left open")

    def leave_autocommit_off(self) -> None:
        transaction.set_autocommit(False)
        mark("left open")

    def begin_by_hand(self) -> None:
        connection.cursor().execute("BEGIN")
        mark("left open")

    LEAVINGS = ["leave_atomic_open", "leave_two_atomics_open", "leave_autocommit_off", "begin_by_hand"]

    @pytest.mark.parametrize("leave", LEAVINGS)
    def test_a_transaction_left_open_fails_the_slice_that_left_it(self, leave: str) -> None:
        """Its rows are rolled back: a job that completed over that would have lost work in silence."""

        def step(ctx: Any) -> Done:
            getattr(self, leave)()
            return Done()

        job = start(made(step))
        assert run_slice(job).outcome == Outcome.FAILED
        now = row(job)
        assert (now.verdict, now.error_code) == ("unrecoverable", "transaction_left_open")
        assert marks() == []
        self.clean()

    @pytest.mark.parametrize("leave", LEAVINGS)
    def test_an_error_within_a_transaction_left_open_is_recorded(self, leave: str) -> None:
        def step(ctx: Any) -> None:
            getattr(self, leave)()
            raise ValueError("amid")

        job = start(made(step))
        assert run_slice(job).outcome == Outcome.RETRY
        assert (row(job).error_message, row(job).consecutive_failures, marks()) == ("amid", 1, [])
        self.clean()

    def test_autocommit_left_off_with_nothing_open_is_only_put_back(self) -> None:
        def step(ctx: Any) -> Done:
            transaction.set_autocommit(False)
            mark("a")
            transaction.commit()
            return Done()

        assert run_slice(start(made(step))).outcome == Outcome.COMPLETED
        assert marks() == ["a"]
        self.clean()

    @pytest.mark.parametrize("patient", [False, True])
    @pytest.mark.parametrize("way", ["raw close", "django close", "killed"])
    @pytest.mark.parametrize("end", ["done", "error"])
    def test_a_broken_connection_does_not_keep_the_outcome_from_the_row(
        self, end: str, way: str, patient: bool, second_connection: OtherConnection
    ) -> None:
        if way == "killed" and connection.vendor != "postgresql":
            pytest.skip("SQLite has no backend to kill")

        def step(ctx: Any) -> Done:
            connection.ensure_connection()
            if way == "raw close":
                connection.connection.close()
            elif way == "django close":
                connection.close()
            else:
                pid = connection.connection.info.backend_pid
                second_connection.run(
                    lambda: connection.cursor().execute("SELECT pg_terminate_backend(%s, 2000)", [pid])
                )
            if end == "error":
                raise ValueError("after the cut")
            return Done("kept")

        job = start(made(step))
        result = run_slice(job, **({"keeper": KeptHolds()} if patient else {}))
        if end == "done":
            assert (result.outcome, row(job).result) == (Outcome.COMPLETED, "kept")
        else:
            assert (result.outcome, row(job).consecutive_failures) == (Outcome.RETRY, 1)
        self.clean()

    @pytest.mark.postgres_only
    @pytest.mark.parametrize("patient", [False, True])
    def test_a_cut_connection_is_no_failure_of_the_step(
        self, patient: bool, second_connection: OtherConnection
    ) -> None:
        """§5: no failure; but the server stands, so the step may be the cause: it counts as an orphaning."""

        def step(ctx: Any) -> None:
            with ctx.fenced():
                mark("a")
                pid = connection.connection.info.backend_pid
                second_connection.run(
                    lambda: connection.cursor().execute("SELECT pg_terminate_backend(%s, 2000)", [pid])
                )
                mark("b")

        job = start(made(step))
        result = run_slice(job, **({"keeper": KeptHolds()} if patient else {}))
        now = row(job)
        assert (result.outcome, limits(job), now.lease_owner) == (Outcome.RETRY, (0, 1, 0, 0), None)
        assert (now.next_run_at is not None, events(job), marks()) == (True, ["cut_off"], [])

    @pytest.mark.postgres_only
    def test_a_bug_that_looks_like_an_outage_is_counted(self) -> None:
        """A cursor used after its end raises InterfaceError, for ever; the database is well."""

        def step(ctx: Any) -> None:
            cursor = connection.cursor()
            cursor.close()
            cursor.execute("SELECT 1")

        job = start(made(step))
        assert [run_slice(job).outcome for _ in range(3)] == [Outcome.RETRY, Outcome.RETRY, Outcome.FAILED]

    @pytest.mark.sqlite_only
    def test_a_file_that_stays_locked_for_too_long_is_an_outage(
        self, second_connection: OtherConnection, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """C061: even a kind that allows no failure goes on afterwards."""
        monkeypatch.setitem(connection.settings_dict["OPTIONS"], "timeout", 0.1)
        unlock = threading.Timer(0.6, second_connection.leave)

        def step(ctx: Any) -> Done:
            if ctx.job.attempts == 1:
                second_connection.enter(transaction.atomic())
                second_connection.run(mark, "locks the file")
                unlock.start()
            with ctx.fenced():
                mark("done")
            return Done()

        job = start(made(step, retry=Retry(failures=1)))
        result = run_slice(job, keeper=KeptHolds())
        unlock.join()
        assert result.outcome == Outcome.RETRY and isinstance(result.error, database.FileLocked)
        assert (limits(job), events(job)) == ((0, 0, 0, 0), [])
        assert run_slice(job).outcome == Outcome.COMPLETED

    @pytest.mark.sqlite_only
    def test_a_step_that_locks_itself_out_has_an_end(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """The file is free as soon as the step has ended, so it is no outage."""
        monkeypatch.setitem(connection.settings_dict["OPTIONS"], "timeout", 0.2)

        def step(ctx: Any) -> Done:
            other = sqlite3.connect(connection.settings_dict["NAME"])
            other.execute("BEGIN EXCLUSIVE")
            try:
                with ctx.fenced():
                    return Done()
            finally:
                other.close()

        job = start(made(step, max_orphanings=2))
        outcomes = [run_slice(job, keeper=KeptHolds()).outcome for _ in range(3)]
        assert outcomes == [Outcome.RETRY, Outcome.RETRY, Outcome.FAILED]
        assert row(job).error_code == "poison" and events(job)[:2] == ["cut_off", "cut_off"]

    def test_an_outage_while_the_outcome_is_written_is_waited_out(
        self, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        """C011: finished work is not failed work, and never repeated for an outage."""
        monkeypatch.setattr(runner, "FIRST_WAIT_SECONDS", 0.001)
        monkeypatch.setattr(runner, "LONGEST_WAIT_SECONDS", 0.01)
        real, tries, ran = store.complete, [], []

        def flaky(*arguments: Any, **options: Any) -> Any:
            tries.append(1)
            if len(tries) < 11:
                raise OperationalError("database is locked")
            return real(*arguments, **options)

        monkeypatch.setattr(store, "complete", flaky)
        job = start(made(lambda ctx: ran.append(1) or Done("kept")))
        assert run_slice(job, keeper=KeptHolds()).outcome == Outcome.COMPLETED
        assert (len(tries), len(ran), row(job).result) == (11, 1, "kept")
        assert [r.event for r in caplog.records if r.levelno >= logging.WARNING] == ["outcome_waits"]

    @pytest.mark.parametrize("state", ["40001", "40P01", "55P03"])
    def test_a_conflict_while_the_outcome_is_written_is_tried_again(
        self, state: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A deadlock or a serialization failure says nothing about the job."""
        monkeypatch.setattr(runner, "FIRST_WAIT_SECONDS", 0.001)
        real, tries = store.yield_slice, []

        def flaky(*arguments: Any, **options: Any) -> Any:
            tries.append(1)
            if len(tries) < 3:
                cause = Exception("as the driver says it")
                cause.sqlstate = state  # type: ignore[attr-defined]
                raise OperationalError("deadlock detected") from cause
            return real(*arguments, **options)

        monkeypatch.setattr(store, "yield_slice", flaky)
        job = start(made(lambda ctx: Yield()))
        assert run_slice(job, keeper=KeptHolds()).outcome == Outcome.YIELDED
        assert (len(tries), limits(job)) == (3, (0, 0, 0, 0))

    def test_an_end_whose_answer_was_lost_is_known_again(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """COMMIT went through, its reply did not: the row says what became of the slice, and nobody took it."""
        monkeypatch.setattr(runner, "FIRST_WAIT_SECONDS", 0.001)
        real, told = runner.lifecycle.complete, []

        def committed_unheard(*arguments: Any, **options: Any) -> Any:
            answer = real(*arguments, **options)
            if answer is not None:
                raise OperationalError("database is locked")
            return answer

        monkeypatch.setattr(runner.lifecycle, "complete", committed_unheard)
        signals.job_lease_lost.connect(receiver := lambda **_: told.append(1))
        job = start(made(lambda ctx: Done("kept")))
        result = run_slice(job, keeper=KeptHolds())
        signals.job_lease_lost.disconnect(receiver)
        assert (result.outcome, result.job and result.job.result, told) == (Outcome.COMPLETED, "kept", [])

    def test_a_job_started_in_a_fence_commits_or_vanishes_with_it(self) -> None:
        """F22, C053"""
        made(name="tests.next")

        def step(ctx: Any) -> Done:
            with contextlib.suppress(KeyError), ctx.fenced():
                service.start("tests.next", {"from": "lost"})
                raise KeyError
            with ctx.fenced():
                service.start("tests.next", {"from": "kept"}, lock_key="one")
                with pytest.raises(Exception, match="is held"):
                    service.start("tests.next", {"from": "refused"}, lock_key="one")
                mark("usable")
            return Done()

        assert run_slice(start(made(step))).outcome == Outcome.COMPLETED
        assert [job.input for job in Job.objects.filter(kind="tests.next")] == [{"from": "kept"}]
        assert marks() == ["usable"]

    def test_no_slice_runs_in_a_transaction_of_the_caller(self) -> None:
        """T22: liveness that a caller can roll back is a lie. The caller's transaction stays usable."""
        job = start(made(lambda ctx: Done()))
        claimed = claim(job)
        before = columns(job)
        with transaction.atomic():
            with pytest.raises(TransactionOwned):
                runner.run_slice(claimed, owner=OWNER)
            mark("usable")
        assert (columns(job), marks()) == (before, ["usable"])
