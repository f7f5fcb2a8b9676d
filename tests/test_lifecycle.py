"""How a job ends and comes back: the row, the kind's hooks and the history, in one transaction."""

from __future__ import annotations

import contextlib
import logging
import sys
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from django.db import DatabaseError, InterfaceError, connection, transaction

from durable_jobs import kinds, lifecycle, service, signals, store
from durable_jobs.exceptions import (
    DomainMirrorMismatch,
    ErrorClass,
    ErrorFacts,
    HookFailed,
    Park,
    TerminalError,
)
from durable_jobs.kinds import ROW_GONE, Cancelled, Done, Kind, StatusMirror
from durable_jobs.lifecycle import Share
from durable_jobs.models import Job
from durable_jobs.runner import Outcome
from durable_jobs.store import Lease
from durable_jobs.testing import make_job
from tests.connections import OtherConnection
from tests.models import Depot, Parcel, Shipment
from tests.slices import OWNER, change, columns, events, made, row, run_slice, start

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.usefixtures("registry")]

FACTS = ErrorFacts(ErrorClass.TERMINAL, "why", "ValueError", "because", "")
LONG_AGO = datetime(2020, 1, 1, tzinfo=UTC)


def lease(job: Job) -> Lease:
    return Lease(job.id, job.lease_owner or OWNER, job.lease_epoch, 60)


def orphan(job: Job) -> store.Orphan:
    [found] = [orphan for orphan in store.dead_leases(job.lease_owner or "") if orphan.id == job.id]
    return found


def redrive(kind: Kind, job: Job) -> Job | None:
    return lifecycle.redrive(
        kind,
        job.lease_epoch,
        lambda: store.redrive(job.id, scope=None, grace=20.0),  # type: ignore[return-value, arg-type]
        lambda job: store.add_event(job, "redriven"),
    )


class Path:
    """A way to end a job or to bring it back: the status that it starts from, the act, where it leads."""

    def __init__(self, before: str, act: Callable[[Kind, Job], Job | None], after: str, hook: str) -> None:
        self.before, self.act, self.after, self.hook = before, act, after, hook

    def job(self) -> Job:
        return make_job(self.before, kind="tests.made", owner=OWNER)


PATHS = {
    "complete": Path(
        "running", lambda k, j: lifecycle.complete(k, lease(j), '"r"'), "completed", "on_transition"
    ),
    "fail": Path(
        "running", lambda k, j: lifecycle.fail(k, j.id, j.lease_epoch, FACTS), "failed", "on_transition"
    ),
    "decide": Path("verdict", lambda k, j: lifecycle.fail(k, j.id, j.lease_epoch), "failed", "on_transition"),
    "park": Path(
        "running",
        lambda k, j: lifecycle.fail(k, j.id, j.lease_epoch, FACTS, parked=True),
        "failed",
        "on_transition",
    ),
    "cancel": Path(
        "cancelling", lambda k, j: lifecycle.cancel(k, j.id, j.lease_epoch), "cancelled", "on_transition"
    ),
    "cancel pending": Path(
        "pending", lambda k, j: lifecycle.cancel_waiting(k, j.id), "cancelled", "on_transition"
    ),
    "cancel held": Path("held", lambda k, j: lifecycle.cancel_waiting(k, j.id), "cancelled", "on_transition"),
    "cancel retrying": Path(
        "retrying", lambda k, j: lifecycle.cancel_waiting(k, j.id), "cancelled", "on_transition"
    ),
    "cancel orphan": Path(
        "cancelling",
        lambda k, j: lifecycle.cancel_orphan(k, orphan(j), grace=0, dead=True),
        "cancelled",
        "on_transition",
    ),
    "park orphan": Path(
        "running",
        lambda k, j: lifecycle.park_orphan(k, orphan(j), grace=0, code="orphaned", message="m", dead=True),
        "failed",
        "on_transition",
    ),
    "redrive": Path("failed", redrive, "pending", "on_redrive"),
    "redrive retrying": Path("retrying", redrive, "pending", "on_redrive"),
}

BAD_ANSWERS = [0, -1, None, True, "x", ValueError("no"), SystemExit(3), DatabaseError("no")]


def ready(path: Path) -> Job:
    job = path.job()
    if path.before in ("pending", "held", "retrying") and path.hook == "on_transition":
        store.request_cancel(job.id, scope=None)
    return row(job)


def hooked(answer: Any, *, calls: list[Any] | None = None, hook: str = "", **more: Any) -> Kind:
    """A kind whose hooks write a row and then answer: `answer` in `hook`, 1 in the other."""

    def act(name: str, job: Job) -> Any:
        Parcel.objects.create(label=name)
        if calls is not None:
            calls.append((name, job.status))
        if name != hook:
            return 1
        if isinstance(answer, BaseException):
            raise answer
        return answer() if callable(answer) else answer

    made(
        None,
        on_transition=lambda self, job: act("on_transition", job),
        on_redrive=lambda self, job: act("on_redrive", job),
        **more,
    )
    return kinds.get("tests.made")


@contextlib.contextmanager
def receivers() -> Iterator[list[tuple[str, str]]]:
    """What the ten signals tell: their name and the job's status."""
    told: list[tuple[str, str]] = []
    connected = []
    for name in vars(signals):
        if name.startswith("job_"):

            def receive(sender: str, job: Job, name: str = name, **_: Any) -> None:
                told.append((name, job.status))

            getattr(signals, name).connect(receive)
            connected.append((name, receive))
    try:
        yield told
    finally:
        for name, receive in connected:
            getattr(signals, name).disconnect(receive)


@pytest.fixture
def told() -> Iterator[list[tuple[str, str]]]:
    with receivers() as told:
        yield told


class TestHooks:
    @pytest.mark.parametrize("outer", [False, True], ids=["alone", "in the caller's transaction"])
    @pytest.mark.parametrize("name", PATHS)
    def test_a_hook_that_does_not_agree_rolls_all_of_it_back_and_is_counted_once(
        self, name: str, outer: bool
    ) -> None:
        """B85, B90, B94, T10: on every path, and the count survives under ATOMIC_REQUESTS."""
        for answer in BAD_ANSWERS:
            self.check_rolled_back(PATHS[name], answer, outer)
            Depot.objects.all().delete()
            kinds.unregister("tests.made")

    def check_rolled_back(self, path: Path, answer: Any, outer: bool) -> None:
        after_hooks: list[Job] = []
        kind = hooked(
            answer,
            hook=path.hook,
            after_transition=lambda self, job: after_hooks.append(job),
            after_redrive=lambda self, job: after_hooks.append(job),
        )
        job = ready(path)
        before, told_before = columns(job, "mirror_attempts"), events(job)
        with transaction.atomic() if outer else contextlib.nullcontext():
            with pytest.raises(HookFailed) as caught:
                path.act(kind, job)
            Depot.objects.create(name="the caller's")
        error = caught.value
        assert (error.job_id, error.kind, error.status) == (job.id, "tests.made", path.after)
        assert error.__cause__ is error.error
        if isinstance(answer, BaseException):
            assert error.error is answer
        else:
            assert isinstance(error.error, DomainMirrorMismatch)
        assert columns(job, "mirror_attempts") == before
        assert row(job).mirror_attempts == 1
        assert Parcel.objects.count() == 0 and Depot.objects.count() == 1
        assert events(job) == [*told_before, "mirror_failed"]
        assert after_hooks == []

    @pytest.mark.parametrize("answer", [1, 2, 5000], ids=repr)
    @pytest.mark.parametrize("name", PATHS)
    def test_a_hook_that_agrees_commits_with_the_transition(self, name: str, answer: int) -> None:
        """B85, B92, B93: it sees the job as it will be."""
        path = PATHS[name]
        calls: list[Any] = []
        kind = hooked(answer, hook=path.hook, calls=calls)
        job = ready(path)
        ended = path.act(kind, job)
        assert ended is not None and ended.status == row(job).status == path.after
        assert calls == [(path.hook, path.after)]
        assert [parcel.label for parcel in Parcel.objects.all()] == [path.hook]
        assert (row(job).domain_mirrored_at is not None) == (path.hook == "on_transition")
        assert row(job).mirror_attempts == 0

    @pytest.mark.parametrize("name", PATHS)
    def test_a_deleted_row_settles_and_is_recorded(self, name: str) -> None:
        """§8: ROW_GONE"""
        path = PATHS[name]
        kind = hooked(ROW_GONE, hook=path.hook)
        job = ready(path)
        assert path.act(kind, job) is not None
        assert row(job).status == path.after
        [event] = job.events.filter(event="row_gone")
        assert path.hook in event.message

    @pytest.mark.parametrize("name", PATHS)
    def test_a_missed_fence_calls_no_hook_and_counts_nothing(self, name: str) -> None:
        """B86: None is somebody else's job; a hook that failed is ours to try again."""
        path = PATHS[name]
        calls: list[Any] = []
        kind = hooked(1, calls=calls)
        job = ready(path)
        known = orphan(job) if "orphan" in name else None
        if path.before in ("pending", "held", "retrying") and path.hook == "on_transition":
            change(job, cancel_requested_at=None)
        elif path.hook == "on_redrive":
            change(job, status="completed", error_class=None, error_code=None, error_message=None, verdict=None,
                   next_run_at=None, lease_owner=None, finished_at=LONG_AGO)  # fmt: skip
        else:
            change(job, lease_epoch=job.lease_epoch + 1)
        before, told_before = columns(job), events(job)
        if known is not None:
            kwargs: dict[str, Any] = {"grace": 0, "dead": True}
            missed = (
                lifecycle.cancel_orphan(kind, known, **kwargs)
                if name == "cancel orphan"
                else lifecycle.park_orphan(kind, known, code="c", message="m", **kwargs)
            )
        else:
            missed = path.act(kind, job)
        assert missed is None
        assert (calls, columns(job), events(job)) == ([], before, told_before)

    @pytest.mark.parametrize("name", [name for name, path in PATHS.items() if path.hook == "on_transition"])
    def test_a_kind_without_hooks_is_stamped_too(self, name: str) -> None:
        """B93: nothing to agree is agreement."""
        path = PATHS[name]
        made()
        job = ready(path)
        assert path.act(kinds.get("tests.made"), job) is not None
        assert row(job).domain_mirrored_at is not None

    def test_hooks_run_in_order_and_only_a_cancel_calls_on_cancel(self) -> None:
        """B85, B99"""
        for name, path in PATHS.items():
            calls: list[Any] = []
            kinds._kinds.pop("tests.made", None)

            def note(name: str, self: Any, job: Job, calls: list[Any] = calls) -> int:
                calls.append((name, connection.in_atomic_block))
                return 1

            hooks = ("on_cancel", "on_transition", "on_redrive", "after_transition", "after_redrive")
            made(None, **{hook: partial_method(note, hook) for hook in hooks})
            path.act(kinds.get("tests.made"), ready(path))
            expected: list[Any] = [("on_cancel", True)] if path.after == "cancelled" else []
            after = "after_redrive" if path.hook == "on_redrive" else "after_transition"
            assert calls == [*expected, (path.hook, True), (after, False)], name

    def test_a_failing_on_cancel_rolls_back_as_well(self) -> None:
        """B85"""
        calls: list[str] = []

        def on_cancel(self: Any, job: Job) -> None:
            Parcel.objects.create(label="on_cancel")
            raise LookupError("no such container")

        made(None, on_cancel=on_cancel, on_transition=lambda self, job: calls.append("on_transition") or 1,
             on_redrive=lambda self, job: 1)  # fmt: skip
        job = ready(PATHS["cancel pending"])
        with pytest.raises(HookFailed, match="no such container"):
            lifecycle.cancel_waiting(kinds.get("tests.made"), job.id)
        assert (row(job).status, row(job).mirror_attempts, calls) == ("pending", 1, [])
        assert Parcel.objects.count() == 0

    def test_on_cancel_alone_is_a_hook_in_the_transaction(self) -> None:
        """A kind may want it without a row to agree."""

        def on_cancel(self: Any, job: Job) -> None:
            Parcel.objects.create(label="on_cancel")
            raise LookupError

        made(lambda ctx: Cancelled(), on_cancel=on_cancel)
        job = make_job(kind="tests.made")
        assert run_slice(job).outcome == Outcome.RETRY
        assert (row(job).status, row(job).mirror_attempts, Parcel.objects.count()) == ("running", 1, 0)

    @pytest.mark.parametrize("outer", [False, True], ids=["alone", "in the caller's transaction"])
    @pytest.mark.parametrize("name", PATHS)
    def test_a_hook_that_swallowed_a_database_error_has_not_agreed(self, name: str, outer: bool) -> None:
        """C055: without a savepoint the transaction can only be rolled back; it must not pass for committed."""
        path = PATHS[name]

        def swallow() -> int:
            taken = Parcel.objects.create(label="first")
            with contextlib.suppress(DatabaseError):
                Parcel.objects.create(pk=taken.pk, label="second")
            return 1

        kind = hooked(swallow, hook=path.hook)
        job = ready(path)
        before = columns(job, "mirror_attempts")
        with transaction.atomic() if outer else contextlib.nullcontext():
            with pytest.raises(HookFailed):
                path.act(kind, job)
            Depot.objects.create(name="the caller's")
        assert columns(job, "mirror_attempts") == before
        assert (row(job).mirror_attempts, Parcel.objects.count(), Depot.objects.count()) == (1, 0, 1)

    @pytest.mark.parametrize("how", ["raw", "orm"])
    def test_a_completion_whose_hook_swallowed_an_error_is_tried_again(self, how: str) -> None:
        """A slice must not say `completed` of a row that the rollback has left running."""

        def on_transition(self: Any, job: Job) -> int:
            if job.attempts == 1:
                taken = Parcel.objects.create(label="x")
                with contextlib.suppress(DatabaseError):
                    if how == "orm":
                        Parcel.objects.create(pk=taken.pk)
                    else:
                        with connection.cursor() as cursor:
                            cursor.execute("INSERT INTO tests_parcel (id) VALUES (%s)", [taken.pk])
            return 1

        job = start(made(None, on_transition=on_transition, on_redrive=lambda self, job: 1))
        first = run_slice(job)
        if how == "raw" and connection.vendor == "sqlite":
            assert first.outcome == Outcome.COMPLETED  # there only the statement failed
        else:
            assert (first.outcome, row(job).status, row(job).lease_owner) == (Outcome.RETRY, "running", None)
            assert run_slice(job).outcome == Outcome.COMPLETED

    def test_a_hook_that_swallowed_an_error_in_a_savepoint_agrees(self) -> None:
        def careful() -> int:
            taken = Parcel.objects.create(label="first")
            with contextlib.suppress(DatabaseError), transaction.atomic():
                Parcel.objects.create(pk=taken.pk, label="second")
            return 1

        kind = hooked(careful, hook="on_transition")
        job = ready(PATHS["complete"])
        assert lifecycle.complete(kind, lease(job), None) is not None
        assert row(job).status == "completed"

    @pytest.mark.parametrize("name", ["complete", "fail", "cancel pending"])
    def test_a_constraint_that_the_commit_finds_broken_rolls_all_of_it_back(self, name: str) -> None:
        """Foreign keys of Django are checked at COMMIT, when the hook has long agreed."""
        path = PATHS[name]

        def dangle() -> int:
            Parcel.objects.create(label="x", depot_id=987_654)
            return 1

        kind = hooked(dangle, hook=path.hook)
        job = ready(path)
        before = columns(job, "mirror_attempts")
        with pytest.raises(HookFailed):
            path.act(kind, job)
        assert columns(job, "mirror_attempts") == before
        assert (row(job).mirror_attempts, Parcel.objects.count()) == (1, 0)

    def test_a_hook_that_closes_the_connection_has_not_agreed(self) -> None:
        """Code shared with a view may call close_old_connections or close_all."""
        kind = hooked(lambda: connection.close() or 1, hook="on_transition")
        job = ready(PATHS["complete"])
        with pytest.raises(HookFailed):
            lifecycle.complete(kind, lease(job), None)
        assert row(job).status == "running"
        assert Parcel.objects.count() == 0

    @pytest.mark.parametrize("name", ["complete", "fail", "cancel", "park"])
    def test_an_error_of_a_hook_that_looks_like_an_outage_is_counted(self, name: str) -> None:
        """A cursor used after its end, another database that is down: waiting for it would be for ever."""
        path = PATHS[name]
        kind = hooked(InterfaceError("the cursor is closed"), hook=path.hook)
        with pytest.raises(HookFailed):
            path.act(kind, ready(path))

    @pytest.mark.parametrize("name", ["complete", "redrive"])
    def test_an_outage_in_a_hook_is_no_failure_of_the_hook(self, name: str) -> None:
        """The connection broke; everything is rolled back, and nothing is known about the hook."""
        path = PATHS[name]

        def cut() -> int:
            connection.close()
            raise InterfaceError("connection already closed")

        kind = hooked(cut, hook=path.hook)
        job = ready(path)
        before = columns(job)
        with pytest.raises(InterfaceError):
            path.act(kind, job)
        assert columns(job) == before
        assert (Parcel.objects.count(), job.events.count()) == (0, 0)

    def test_counting_that_fails_is_only_logged(
        self, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        """B94"""

        def broken(*_: Any) -> bool:
            raise DatabaseError("no")

        monkeypatch.setattr(store, "bump_mirror_attempts", broken)
        kind = hooked(0, hook="on_transition")
        job = ready(PATHS["complete"])
        with pytest.raises(HookFailed):
            lifecycle.complete(kind, lease(job), None)
        assert row(job).mirror_attempts == 0
        assert [r.event for r in caplog.records] == ["terminal_mirror_failed", "mirror_not_counted"]

    def test_the_event_of_a_failed_hook_tells_its_error(self) -> None:
        def fail() -> int:
            raise ValueError("head\x00" + "m" * 2_000_000)

        kind = hooked(fail, hook="on_transition")
        job = ready(PATHS["complete"])
        with pytest.raises(HookFailed) as caught:
            lifecycle.complete(kind, lease(job), None)
        [event] = job.events.all()
        assert event.error_type == "ValueError" and event.message.startswith("head\ufffd")
        assert len(event.message) <= 10_000 and "fail" in event.traceback
        assert len(str(caught.value)) < 1000

    def test_a_keyboard_interrupt_in_a_hook_is_nobodys_failure(self) -> None:
        kind = hooked(KeyboardInterrupt(), hook="on_transition")
        job = ready(PATHS["complete"])
        with pytest.raises(KeyboardInterrupt):
            lifecycle.complete(kind, lease(job), None)
        assert (row(job).status, row(job).mirror_attempts) == ("running", 0)

    def test_a_hook_may_write_through_its_own_savepoints(self) -> None:
        def nested() -> int:
            with transaction.atomic():
                Parcel.objects.create(label="a")
                with contextlib.suppress(KeyError), transaction.atomic():
                    Parcel.objects.create(label="b")
                    raise KeyError
            return 1

        kind = hooked(nested, hook="on_transition")
        job = ready(PATHS["complete"])
        lifecycle.complete(kind, lease(job), None)
        assert set(Parcel.objects.values_list("label", flat=True)) == {"on_transition", "a"}

    def test_the_event_of_a_failed_hook_tells_its_code(self) -> None:
        kind = hooked(TerminalError("no room", code="full"), hook="on_transition")
        job = ready(PATHS["complete"])
        with pytest.raises(HookFailed):
            lifecycle.complete(kind, lease(job), None)
        assert [(event.event, event.code) for event in job.events.all()] == [("mirror_failed", "full")]

    def test_an_error_of_the_transition_itself_comes_out_and_counts_for_no_hook(self) -> None:
        def refuse() -> Any:
            raise LookupError("no statement was sent")

        kind = hooked(1)
        running, failed = ready(PATHS["complete"]), ready(PATHS["redrive"])
        with pytest.raises(UnicodeEncodeError):
            lifecycle.complete(kind, lease(running), '"\ud800"')
        with pytest.raises(LookupError, match="no statement"):
            lifecycle.redrive(kind, failed.lease_epoch, refuse, lambda job: None)
        assert [(row(job).status, row(job).mirror_attempts) for job in (running, failed)] == [
            ("running", 0),
            ("failed", 0),
        ]
        assert Parcel.objects.count() == 0


def partial_method(function: Callable[..., Any], *first: Any) -> Callable[..., Any]:
    def method(self: Any, job: Job) -> Any:
        return function(*first, self, job)

    return method


class TestStuck:
    def test_the_third_failure_tells_that_the_mirror_is_stuck(self, told: list[Any]) -> None:
        """§8, B185"""
        kind = hooked(0, hook="on_transition")
        job = ready(PATHS["complete"])
        for _ in range(4):
            with pytest.raises(HookFailed):
                lifecycle.complete(kind, lease(job), None)
        assert row(job).mirror_attempts == 4
        assert [name for name, _ in told] == ["job_mirror_stuck"] * 2

    def test_it_is_told_after_the_commit_or_not_at_all(self, told: list[Any]) -> None:
        """B185"""
        kind = hooked(0, hook="on_transition")
        job = ready(PATHS["cancel pending"])
        change(job, mirror_attempts=2)
        with contextlib.suppress(KeyError), transaction.atomic():
            with pytest.raises(HookFailed):
                lifecycle.cancel_waiting(kind, job.id)
            assert told == []
            raise KeyError
        assert (told, row(job).mirror_attempts) == ([], 2)
        with transaction.atomic(), pytest.raises(HookFailed):
            lifecycle.cancel_waiting(kind, job.id)
        assert ([name for name, _ in told], row(job).mirror_attempts) == (["job_mirror_stuck"], 3)

    def test_a_failure_that_was_not_counted_makes_nothing_stuck(
        self, told: list[Any], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Somebody takes the job between the rollback and the count: what its row says then is theirs."""
        count = store.bump_mirror_attempts

        def taken(job_id: Any, epoch: int) -> bool:
            change(job, lease_epoch=epoch + 1)
            return count(job_id, epoch)

        kind = hooked(0, hook="on_transition")
        job = ready(PATHS["complete"])
        change(job, mirror_attempts=7)
        monkeypatch.setattr(store, "bump_mirror_attempts", taken)
        with pytest.raises(HookFailed):
            lifecycle.complete(kind, lease(job), None)
        assert (told, row(job).mirror_attempts) == ([], 7)


class TestAfterwards:
    @pytest.mark.parametrize("name", PATHS)
    def test_after_hook_and_signal_come_once_after_the_commit(self, name: str, told: list[Any]) -> None:
        """B95, B185"""
        path = PATHS[name]
        called: list[str] = []
        after = "after_redrive" if path.hook == "on_redrive" else "after_transition"
        made(None, **{after: lambda self, job: called.append(job.status)})
        job = ready(path)
        told.clear()
        parked = "park" in name
        signal = {"completed": "job_completed", "failed": "job_parked" if parked else "job_failed",
                  "cancelled": "job_cancelled", "pending": "job_redriven"}[path.after]  # fmt: skip
        if name == "complete":
            path.act(kinds.get("tests.made"), job)
        else:
            with transaction.atomic():
                path.act(kinds.get("tests.made"), job)
                assert (called, told) == ([], [])
        assert (called, told) == ([path.after], [(signal, path.after)])

    @pytest.mark.parametrize("name", [name for name in PATHS if name != "complete"])
    def test_neither_comes_when_the_caller_rolls_back(self, name: str, told: list[Any]) -> None:
        """B185: no event for a rolled-back fact."""
        path = PATHS[name]
        called: list[str] = []
        made(
            None,
            after_transition=lambda self, job: called.append(job.status),
            after_redrive=lambda self, job: called.append(job.status),
        )
        job = ready(path)
        before = columns(job)
        told.clear()
        with contextlib.suppress(KeyError), transaction.atomic():
            assert path.act(kinds.get("tests.made"), job) is not None
            raise KeyError
        assert (called, told, columns(job)) == ([], [], before)

    @pytest.mark.parametrize("nasty", [ValueError("x"), SystemExit(4), DatabaseError("x")], ids=repr)
    @pytest.mark.parametrize("name", ["complete", "cancel pending", "redrive"])
    def test_an_after_hook_that_raises_changes_nothing(
        self, name: str, nasty: BaseException, told: list[Any], caplog: pytest.LogCaptureFixture
    ) -> None:
        """B95: never retried, and the signal comes all the same."""
        path = PATHS[name]
        called: list[int] = []

        def after(self: Any, job: Job) -> None:
            called.append(1)
            raise nasty

        made(None, after_transition=after, after_redrive=after)
        job = ready(path)
        told.clear()
        assert path.act(kinds.get("tests.made"), job) is not None
        assert (row(job).status, len(called), len(told)) == (path.after, 1, 1)
        assert "after_hook_failed" in [getattr(r, "event", "") for r in caplog.records]

    def test_a_slice_survives_what_an_after_hook_raises(self) -> None:
        job = start(made(None, after_transition=lambda self, job: sys.exit(9)))
        assert run_slice(job).outcome == Outcome.COMPLETED
        assert row(job).status == "completed"

    @pytest.mark.parametrize("nasty", [ValueError, SystemExit])
    def test_a_receiver_that_raises_changes_nothing(self, nasty: type[BaseException]) -> None:
        """B185"""

        def receive(**_: Any) -> None:
            raise nasty

        signals.job_completed.connect(receive)
        try:
            job = start(made())
            assert run_slice(job).outcome == Outcome.COMPLETED
        finally:
            signals.job_completed.disconnect(receive)

    def test_others_write_while_an_after_hook_takes_its_time(
        self, second_connection: OtherConnection
    ) -> None:
        """On SQLite it would hold up every writer of the process, the beats of its leases among them."""
        waited: list[float] = []

        def after(self: Any, job: Job) -> None:
            begun = time.monotonic()
            second_connection.run(store.beat_many, OWNER, [Lease(job.id, OWNER, 1, 60)])
            second_connection.run(service.start, "tests.made")
            service.start("tests.made", "from the hook")
            waited.append(time.monotonic() - begun)

        job = start(made(None, after_transition=after))
        assert run_slice(job).outcome == Outcome.COMPLETED
        assert waited[0] < 2 and Job.objects.count() == 3

    def test_a_foreign_callback_that_raises_after_ours_keeps_ours(self, told: list[Any]) -> None:
        """C054, T25: ours is robust; one registered later by somebody else does not matter to it."""
        made()
        job = ready(PATHS["cancel pending"])

        def foreign() -> None:
            raise RuntimeError("somebody else's")

        with pytest.raises(RuntimeError), transaction.atomic():
            lifecycle.cancel_waiting(kinds.get("tests.made"), job.id)
            transaction.on_commit(foreign)
        assert (row(job).status, told[-1][0]) == ("cancelled", "job_cancelled")

    @pytest.mark.parametrize("nasty", [ValueError("x"), SystemExit(3), DatabaseError("x")], ids=repr)
    @pytest.mark.parametrize("name", PATHS)
    def test_a_callback_that_a_hook_registered_undoes_nothing(
        self, name: str, nasty: BaseException, told: list[Any], caplog: pytest.LogCaptureFixture
    ) -> None:
        """C054: it raises when all is committed; the job has ended, whoever ended it."""

        def fail() -> None:
            raise nasty

        path = PATHS[name]
        kind = hooked(lambda: transaction.on_commit(fail) or 1, hook=path.hook)
        job = ready(path)
        told.clear()
        ended = path.act(kind, job)
        assert ended is not None and ended.status == row(job).status == path.after
        assert (row(job).mirror_attempts, len(told)) == (0, 1)
        assert "mirror_failed" not in events(job)
        assert "commit_callback_failed" in [getattr(r, "event", "") for r in caplog.records]

    def test_a_slice_completes_despite_a_callback_of_its_hook(self) -> None:
        def on_transition(self: Any, job: Job) -> int:
            transaction.on_commit(lambda: sys.exit(3))
            return 1

        job = start(made(None, on_transition=on_transition, on_redrive=lambda self, job: 1))
        assert run_slice(job).outcome == Outcome.COMPLETED

    def test_ours_that_raises_keeps_nobody_elses(self) -> None:
        """C054: what follows a failing hook of ours still runs, and the caller sees no error."""
        made(None, after_transition=lambda self, job: 1 / 0)
        job = ready(PATHS["cancel pending"])
        ran: list[int] = []
        with transaction.atomic():
            lifecycle.cancel_waiting(kinds.get("tests.made"), job.id)
            transaction.on_commit(lambda: ran.append(1))
        assert ran == [1]


class TestPlain:
    def test_a_completion_is_plain_until_somebody_wants_to_know_of_it(self) -> None:
        """What others listen to, and hooks of other kinds, make nothing slower."""
        made()
        kind = kinds.get("tests.made")

        def receive(**_: Any) -> None:
            """Somebody's."""

        assert lifecycle.share_of(kind) is Share.PLAIN
        signals.job_completed.connect(receive, sender="tests.another")
        try:
            assert lifecycle.share_of(kind) is Share.PLAIN
            signals.job_completed.connect(receive, sender="tests.made")
            assert lifecycle.share_of(kind) is Share.TOLD
        finally:
            for sender in ("tests.another", "tests.made"):
                signals.job_completed.disconnect(receive, sender=sender)
        assert lifecycle.share_of(kind) is Share.PLAIN

    @pytest.mark.parametrize(
        "hooks",
        [
            {"after_transition": lambda self, job: None},
            {"on_transition": lambda self, job: 1, "on_redrive": lambda self, job: 1},
        ],
    )
    def test_a_kind_with_hooks_is_not(self, hooks: dict[str, Any]) -> None:
        made(**hooks)
        assert lifecycle.share_of(kinds.get("tests.made")) is not Share.PLAIN


class TestChaining:
    """F22: the next job exists exactly if this one ended."""

    def chain(self, answer: int = 1, **options: Any) -> type[Kind]:
        made(name="tests.next")

        def on_transition(self: Any, job: Job) -> int:
            service.start("tests.next", {"after": str(job.id)}, **options)
            return answer

        return made(None, on_transition=on_transition, on_redrive=lambda self, job: 1)

    def next_jobs(self) -> list[Any]:
        return [job.input["after"] for job in Job.objects.filter(kind="tests.next")]

    def test_the_next_job_comes_with_the_end(self, told: list[Any]) -> None:
        job = start(self.chain())
        run_slice(job)
        assert self.next_jobs() == [str(job.id)]
        assert [name for name, _ in told] == ["job_created", "job_started", "job_completed", "job_created"]

    def test_the_next_job_vanishes_with_an_end_that_fails(self, told: list[Any]) -> None:
        job = start(self.chain(answer=0))
        assert run_slice(job).outcome == Outcome.RETRY
        assert self.next_jobs() == []
        assert [name for name, _ in told] == ["job_created", "job_started"]

    def test_the_next_job_may_take_over_the_lock_key(self) -> None:
        """B35: the end has freed it in the same transaction."""
        job = start(self.chain(lock_key="one"), lock_key="one")
        assert run_slice(job).outcome == Outcome.COMPLETED
        assert self.next_jobs() == [str(job.id)]

    def test_a_start_that_is_refused_in_a_hook_fails_the_hook(self) -> None:
        job = start(self.chain(lock_key="taken"))
        start(kinds_class("tests.next"), {"after": "blocker"}, lock_key="taken")
        result = run_slice(job)
        assert (result.outcome, getattr(result.error, "code", None)) == (Outcome.RETRY, "lock_key_held")
        assert (row(job).status, row(job).error_code) == ("running", "lock_key_held")
        assert self.next_jobs() == ["blocker"]

    def test_a_refused_start_that_the_hook_handles_costs_nothing(self) -> None:
        """B25: on PostgreSQL, too, the transaction of the end stays usable."""
        blocker = start(made(name="tests.next"), {"after": "blocker"}, lock_key="taken")

        def on_transition(self: Any, job: Job) -> int:
            with contextlib.suppress(service.LockKeyHeld):
                service.start("tests.next", {"after": str(job.id)}, lock_key="taken")
            Parcel.objects.create(label="goes on")
            return 1

        job = start(made(None, on_transition=on_transition, on_redrive=lambda self, job: 1))
        assert run_slice(job).outcome == Outcome.COMPLETED
        assert self.next_jobs() == ["blocker"] and row(blocker).status == "pending"
        assert Parcel.objects.count() == 1


def kinds_class(name: str) -> type[Kind]:
    return type(kinds.get(name))


class TestColumns:
    def test_completed_clears_the_error_and_overlays_counts(self) -> None:
        """B88"""
        made()
        job = make_job("running", kind="tests.made", owner=OWNER)
        change(
            job, error_class="transient", error_code="c", error_message="m", error_type="t", processed_count=3
        )
        ended = lifecycle.complete(
            kinds.get("tests.made"), lease(job), '{"n":1}', store.Counts(9, 10, "done")
        )
        assert ended is not None
        now = row(job)
        assert (now.status, now.result, now.processed_count, now.total_count) == (
            "completed",
            {"n": 1},
            9,
            10,
        )
        assert (now.error_class, now.error_code, now.error_message, now.error_type) == (None,) * 4
        assert (now.lease_owner, now.next_run_at, now.parked_at) == (None, None, None)
        assert now.finished_at and now.lease_expires_at and now.domain_mirrored_at
        assert (now.lease_epoch, now.attempts) == (job.lease_epoch, job.attempts)

    def test_completed_needs_owner_epoch_and_no_verdict(self) -> None:
        """P9, P21"""
        made()
        kind = kinds.get("tests.made")
        job = make_job("running", kind="tests.made", owner=OWNER)
        assert lifecycle.complete(kind, Lease(job.id, "somebody", 1, 60), None) is None
        assert lifecycle.complete(kind, Lease(job.id, OWNER, 2, 60), None) is None
        change(job, verdict="retry_exhausted")
        assert lifecycle.complete(kind, lease(job), None) is None
        assert row(job).status == "running"

    def test_failed_keeps_what_is_not_given(self) -> None:
        """B89, B87: by epoch alone, since the failing path has let the lease go."""
        made()
        job = make_job("verdict", kind="tests.made")
        before = row(job)
        assert lifecycle.fail(kinds.get("tests.made"), job.id, job.lease_epoch) is not None
        now = row(job)
        assert (now.error_class, now.error_message, now.error_type, now.verdict) == (
            before.error_class, before.error_message, before.error_type, "retry_exhausted",
        )  # fmt: skip
        assert (now.lease_owner, now.next_run_at, now.parked_at) == (None, None, None)

    @pytest.mark.parametrize(
        ("facts", "verdict", "code"),
        [
            (FACTS, None, "why"),
            (FACTS, "unrecoverable", "why"),
            (None, "unrecoverable", "unrecoverable"),
            (None, None, ""),
        ],
    )
    def test_the_event_of_a_failure_tells_its_code_or_else_the_verdict(
        self, facts: ErrorFacts | None, verdict: str | None, code: str
    ) -> None:
        made()
        job = make_job("running", kind="tests.made", owner=OWNER)
        change(job, verdict=verdict)
        lifecycle.fail(kinds.get("tests.made"), job.id, job.lease_epoch, facts)
        [event] = job.events.all()
        assert (event.event, event.code) == ("failed", code)
        assert (event.error_type, event.message) == (("ValueError", "because") if facts else ("", ""))

    @pytest.mark.parametrize("known", [True, False])
    @pytest.mark.parametrize("how", ["cancel", "park"])
    def test_the_event_of_an_orphans_end_says_whether_its_hooks_ran(self, how: str, known: bool) -> None:
        made()
        kind = kinds.get("tests.made") if known else None
        job = make_job("cancelling" if how == "cancel" else "running", kind="tests.made", owner=OWNER)
        if how == "cancel":
            lifecycle.cancel_orphan(kind, orphan(job), grace=0, dead=True, actor="reconciler:x")
        else:
            lifecycle.park_orphan(kind, orphan(job), grace=0, code="no_handler", message="m", dead=True)
        event = job.events.latest("id")
        assert bool((event.data or {}).get("hooks_skipped")) is not known
        assert how == "park" or event.data["worker_gone"] is True

    def test_an_orphan_whose_lease_holds_again_is_left_alone(self) -> None:
        """Only a supervisor's word stands in for the expiry, and nobody says it by default."""
        made()
        kind = kinds.get("tests.made")
        running, cancelling = (
            make_job(status, kind="tests.made", owner=OWNER) for status in ("running", "cancelling")
        )
        assert lifecycle.park_orphan(kind, orphan(running), grace=0, code="c", message="m") is None
        assert lifecycle.cancel_orphan(kind, orphan(cancelling), grace=0) is None
        assert (row(running).status, row(cancelling).status) == ("running", "running")

    def test_a_stale_epoch_fails_nothing(self) -> None:
        """B87"""
        made()
        job = make_job("running", kind="tests.made", owner=OWNER)
        assert lifecycle.fail(kinds.get("tests.made"), job.id, job.lease_epoch - 1, FACTS) is None
        assert lifecycle.cancel(kinds.get("tests.made"), job.id, job.lease_epoch - 1) is None
        assert row(job).status == "running"

    def test_parked_has_its_reason(self) -> None:
        """B126"""
        made()
        job = make_job("running", kind="tests.made", owner=OWNER)
        change(job, error_class="transient", error_code="old", error_message="the last error")
        lifecycle.park_orphan(
            kinds.get("tests.made"),
            orphan(job),
            grace=0,
            code="poison",
            message="m",
            dead=True,
            actor="reconciler:x",
        )
        now = row(job)
        assert (now.status, now.error_code, now.error_class) == ("failed", "poison", "transient")
        assert (now.error_message, now.lease_owner, now.next_run_at) == ("the last error", None, None)
        assert now.parked_at is not None and now.finished_at is not None
        # PostgreSQL's clock is read for each column.
        assert abs(now.parked_at - now.finished_at) < timedelta(milliseconds=50)
        [event] = job.events.all()
        assert (event.event, event.code, event.actor, event.owner) == (
            "parked",
            "poison",
            "reconciler:x",
            OWNER,
        )

    def test_cancelled_leaves_the_error_alone_and_tells_how_long_it_took(self) -> None:
        """B89, F17"""
        made()
        job = make_job("retrying", kind="tests.made")
        store.request_cancel(job.id, scope=None)
        lifecycle.cancel_waiting(kinds.get("tests.made"), job.id, actor="user:1 anna")
        now = row(job)
        assert (now.status, now.error_message, now.verdict) == ("cancelled", "made for a test", None)
        [event] = job.events.all()
        assert (event.event, event.actor) == ("cancelled", "user:1 anna")
        assert 0 <= event.data["seconds_since_request"] < 5
        assert (event.data["worker_gone"], event.data["hooks_skipped"]) == (False, False)

    def test_cancelled_by_its_own_worker_says_that_it_was_there_and_that_the_hooks_ran(self) -> None:
        made()
        job = make_job("cancelling", kind="tests.made")
        lifecycle.cancel(kinds.get("tests.made"), job.id, job.lease_epoch, actor="worker:w")
        [event] = job.events.filter(event="cancelled")
        assert (event.data["worker_gone"], event.data["hooks_skipped"]) == (False, False)


class TestStatusMirror:
    """B91, F14: matched means that the row agrees."""

    @pytest.fixture(autouse=True)
    def kind(self, registry: None) -> None:
        mirror = StatusMirror(
            "tests.Shipment", open=("queued", "moving"), redriven="queued", completed="arrived", failed="lost",
            cancelled="stopped",
        )  # fmt: skip

        def step(ctx: Any) -> Any:
            match ctx.input:
                case "fail":
                    raise TerminalError
                case "park":
                    raise Park("why")
                case "cancel":
                    return Cancelled()
            return Done()

        made(step, mirror=mirror)

    def start(self, input: Any = None, status: str = "queued") -> tuple[Job, Shipment]:
        shipment = Shipment.objects.create(status=status)
        return service.start("tests.made", input, subject=shipment).job, shipment

    @pytest.mark.parametrize("status", ["queued", "moving"])
    @pytest.mark.parametrize(
        ("input", "target"), [(None, "arrived"), ("fail", "lost"), ("park", "lost"), ("cancel", "stopped")]
    )
    def test_an_open_row_is_closed_with_the_job(self, input: Any, target: str, status: str) -> None:
        job, shipment = self.start(input, status)
        run_slice(job)
        shipment.refresh_from_db()
        assert (shipment.status, row(job).finished_at is not None) == (target, True)

    def test_a_row_already_there_agrees(self) -> None:
        """T9"""
        job, shipment = self.start(status="arrived")
        assert run_slice(job).outcome == Outcome.COMPLETED
        shipment.refresh_from_db()
        assert shipment.status == "arrived"

    def test_a_row_that_finished_otherwise_does_not_agree(self) -> None:
        job, shipment = self.start(status="stopped")
        assert run_slice(job).outcome == Outcome.RETRY
        shipment.refresh_from_db()
        assert (shipment.status, row(job).status, row(job).mirror_attempts) == ("stopped", "running", 1)
        assert service.cancel(job.id).status == "cancelled"

    def test_a_deleted_row_settles(self) -> None:
        job, shipment = self.start()
        shipment.delete()
        assert run_slice(job).outcome == Outcome.COMPLETED
        assert "row_gone" in events(job)

    def test_a_redrive_opens_the_row_again(self) -> None:
        """B112"""
        job, shipment = self.start("fail")
        run_slice(job)
        service.redrive(job.id)
        shipment.refresh_from_db()
        assert (shipment.status, row(job).status) == ("queued", "pending")

    def test_a_redrive_is_refused_where_the_row_has_gone_another_way(self) -> None:
        job, shipment = self.start("fail")
        run_slice(job)
        Shipment.objects.filter(pk=shipment.pk).update(status="arrived")
        before = columns(job, "mirror_attempts")
        with pytest.raises(HookFailed):
            service.redrive(job.id)
        assert columns(job, "mirror_attempts") == before
        shipment.refresh_from_db()
        assert shipment.status == "arrived"

    def test_cancel_and_row_change_in_one_transaction_of_the_caller(self) -> None:
        job, shipment = self.start()
        with contextlib.suppress(KeyError), transaction.atomic():
            assert service.cancel(job.id).status == "cancelled"
            raise KeyError
        shipment.refresh_from_db()
        assert (shipment.status, row(job).status, row(job).cancel_requested_at) == ("queued", "pending", None)
        service.cancel(job.id)
        shipment.refresh_from_db()
        assert (shipment.status, row(job).status) == ("stopped", "cancelled")


def test_every_line_of_the_path_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    """B186"""
    caplog.set_level(logging.INFO, "durable_jobs.jobs")
    made()
    seen = {}
    for name, path in PATHS.items():
        job = ready(path)
        caplog.clear()
        path.act(kinds.get("tests.made"), job)
        seen[name] = [(r.event, r.job_id) for r in caplog.records if hasattr(r, "event")]
        assert len(seen[name]) == 1 and seen[name][0][1] == str(job.id)
    assert seen["complete"][0][0] == "job_completed"
    assert seen["park orphan"][0][0] == seen["park"][0][0] == "job_parked"
    assert seen["redrive"][0][0] == "job_redriven"


@pytest.mark.django_db
def test_an_interrupt_in_the_way_back_is_passed_on_and_nothing_is_counted(registry: None) -> None:
    """As everywhere: a KeyboardInterrupt leaves all as a kill would."""

    def interrupted(self: Any, job: Job) -> int:
        raise KeyboardInterrupt

    made(on_transition=lambda self, job: 1, on_redrive=interrupted)
    job = make_job("failed", kind="tests.made")
    with pytest.raises(KeyboardInterrupt):
        service.redrive(job.id, force=True)
    assert (row(job).status, row(job).mirror_attempts) == ("failed", 0)
