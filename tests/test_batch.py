"""BatchKind: nothing repeated, nothing skipped, whatever happens to the slice or under the collection."""

from __future__ import annotations

import datetime
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
from django.db import OperationalError, connection, transaction
from django.db.models import Count, F, FilteredRelation, QuerySet, Value
from django.db.models.functions import Concat
from django.test import override_settings

from durable_jobs import jsontext, kinds, store
from durable_jobs.exceptions import RetryAfter, TerminalError
from durable_jobs.kinds import BatchKind, Done, Kind, Retry, Yield, register
from durable_jobs.models import Job, JobEvent, uuid7
from durable_jobs.runner import Outcome, SliceResult, run_slice
from durable_jobs.store import NewJob
from tests.connections import OtherConnection
from tests.models import Depot, Leg, Parcel, Token
from tests.postgres import wait_until
from tests.processes import Processes

pytestmark = pytest.mark.django_db

OWNER = "tests:batch"
NOW = datetime.datetime(2026, 3, 1, 12, tzinfo=datetime.UTC)


class Killed(KeyboardInterrupt):
    """Nothing of the slice runs after it."""


@pytest.fixture(autouse=True)
def registry() -> Iterator[None]:
    before = dict(kinds._kinds)
    yield
    kinds._kinds.clear()
    kinds._kinds.update(before)


def mark(self: Any, ctx: Any, batch: list[Any]) -> None:
    """Count on each row how often it was processed."""
    type(batch[0]).objects.filter(pk__in=[row.pk for row in batch]).update(done=F("done") + 1)


def batch_kind(**attributes: Any) -> type[BatchKind]:
    given = {
        "name": "tests.batch",
        "__module__": __name__,
        "batch_size": 3,
        "process": mark,
        "retry": Retry(failures=3, first_delay=0, longest_delay=0),
        **attributes,
    }
    if not callable(given["collection"]):
        rows = given["collection"]
        given["collection"] = lambda self, ctx: rows
    kinds._kinds.pop("tests.batch", None)
    return register(type("Made", (BatchKind,), given))


def start(kind_class: type[Kind], input: Any = None) -> Job:
    text = jsontext.encode(input, field="input", limit=2**20)
    new = NewJob(
        id=uuid7(),
        kind=kind_class.name,
        status="pending",
        tenant="default",
        organization=None,
        queue="default",
        input=text,
        input_sha256=jsontext.sha256(text),
    )
    job = store.insert(new)
    assert job is not None
    return job


@dataclass
class Ran:
    """A job that was run slice by slice."""

    job: Job
    results: list[SliceResult] = field(default_factory=list)

    @property
    def outcomes(self) -> list[Outcome]:
        return [result.outcome for result in self.results]

    @property
    def error(self) -> BaseException | None:
        return self.results[-1].error

    @property
    def events(self) -> list[JobEvent]:
        return list(JobEvent.objects.filter(job=self.job, event="item_skipped").order_by("id"))


def one_slice(job: Job, *, stop_after: int = 0, kill_after: int = 0, owner: str = OWNER) -> SliceResult:
    """Claim and run one slice; it is asked to stop, or dies, at its n-th commit."""
    current = store.get(job.id)
    assert current is not None
    claimed = store.claim(job.id, current.continuation_seq, current.redrives, owner, 60)
    assert isinstance(claimed, Job), claimed
    draining, commits = threading.Event(), 0

    def on_commit() -> None:
        nonlocal commits
        commits += 1
        if commits == kill_after:
            raise Killed
        if commits == stop_after:
            draining.set()

    return run_slice(claimed, owner=owner, draining=draining, on_commit=on_commit)


def run(
    kind_class: type[Kind], input: Any = None, *, most: int = 100, job: Job | None = None, **how: int
) -> Ran:
    """Run all slices of a job; killed ones are repaired."""
    ran = Ran(job or start(kind_class, input))
    for _ in range(most):
        try:
            ran.results.append(one_slice(ran.job, **how))
        except Killed:
            (orphan,) = store.dead_leases(OWNER)
            assert store.take_orphan(orphan, grace=0, delay=0, dead=True)
        current = store.get(ran.job.id)
        assert current is not None
        ran.job = current
        if current.status not in ("pending", "running"):
            return ran
    return ran


def parcels(number: int, **columns: Any) -> list[Parcel]:
    return Parcel.objects.bulk_create(Parcel(**columns) for _ in range(number))


def done(model: Any = Parcel) -> list[int]:
    return list(model.objects.order_by("pk").values_list("done", flat=True))


@pytest.fixture
def mixed() -> list[Parcel]:
    """Fifteen rows with ties and NULLs, in another order than their keys."""
    depots = [None, *(Depot.objects.create(name=name) for name in ("b", None, "a"))]
    return [
        Parcel.objects.create(
            depot=depots[number % 4],
            label="ba"[number % 2],
            rank=[None, 2, 1, 2, None][number % 5],
            sent_at=None if number % 4 == 0 else NOW + datetime.timedelta(milliseconds=number % 3),
        )
        for number in range(15)
    ]


ORDERS: list[tuple[Any, ...]] = [
    (),
    ("-pk",),
    ("label",),
    ("rank", "-label"),
    ("-rank",),
    ("-sent_at", "label"),
    ("depot__name", "-rank"),
    (F("rank").desc(nulls_last=True), "sent_at"),
]

HOWS: list[dict[str, int]] = [{}, {"stop_after": 1}, {"kill_after": 1}, {"kill_after": 2}]


class TestEveryRowOnce:
    @pytest.mark.parametrize("how", HOWS, ids=str)
    @pytest.mark.parametrize("order", ORDERS, ids=str)
    def test_in_every_order_whatever_ends_the_slices(
        self, mixed: list[Parcel], order: tuple[Any, ...], how: dict[str, int]
    ) -> None:
        """B58, B168, C028"""
        seen: list[Parcel] = []

        def process(self: Any, ctx: Any, batch: list[Any]) -> None:
            assert isinstance(batch, list)
            seen.extend(batch)
            mark(self, ctx, batch)

        kind = batch_kind(collection=lambda self, ctx: Parcel.objects.order_by(*order), process=process)
        ran = run(kind, **how)
        assert ran.job.status == "completed"
        assert done() == [1] * 15
        follow = "-pk" if ran.job.checkpoint["order"][-1].startswith("-") else "pk"
        assert seen == list(Parcel.objects.order_by(*order, follow))
        assert (ran.job.processed_count, ran.job.total_count) == (15, 15)
        assert ran.job.consecutive_failures == 0

    @pytest.mark.parametrize("how", HOWS, ids=str)
    def test_with_random_keys_and_with_keys_of_two_columns(self, how: dict[str, int]) -> None:
        Token.objects.bulk_create(Token() for _ in range(10))
        assert (
            run(batch_kind(collection=lambda self, ctx: Token.objects.all()), **how).job.status == "completed"
        )
        assert done(Token) == [1] * 10
        Leg.objects.bulk_create(Leg(route="ab"[n % 2], number=n) for n in range(10))

        def process(self: Any, ctx: Any, batch: list[Any]) -> None:
            for leg in batch:
                Leg.objects.filter(route=leg.route, number=leg.number).update(done=F("done") + 1)

        kind = batch_kind(collection=lambda self, ctx: Leg.objects.all(), process=process)
        assert run(kind, **how).job.status == "completed"
        assert list(Leg.objects.values_list("done", flat=True)) == [1] * 10

    def test_a_batch_that_fails_leaves_nothing_behind(self) -> None:
        parcels(7)
        failing = iter([False, True, False, True, False])

        def process(self: Any, ctx: Any, batch: list[Any]) -> None:
            mark(self, ctx, batch)
            if next(failing, False):
                raise ValueError("half-way")

        ran = run(batch_kind(collection=Parcel.objects.all(), process=process))
        assert ran.outcomes == [Outcome.RETRY, Outcome.RETRY, Outcome.COMPLETED]
        assert done() == [1] * 7
        assert ran.job.processed_count == 7

    @pytest.mark.parametrize(
        "repeating",
        [
            Depot.objects.filter(parcel__rank=1),
            Depot.objects.annotate(ranked=FilteredRelation("parcel")).select_related("ranked"),
        ],
        ids=["filter", "select_related"],
    )
    def test_a_row_that_a_join_repeats_comes_once(self, repeating: QuerySet[Depot]) -> None:
        depots = [Depot.objects.create(name=name) for name in "abc"]
        for depot in depots:
            parcels(5, depot=depot, rank=1)
        seen: list[str] = []
        kind = batch_kind(
            collection=lambda self, ctx: repeating.all(),
            process=lambda self, ctx, batch: seen.extend(depot.name for depot in batch),
        )
        assert run(kind).job.status == "completed"
        assert seen == ["a", "b", "c"]

    def test_managers_related_managers_and_loaded_relations(self) -> None:
        depot = Depot.objects.create(name="a")
        parcels(4, depot=depot)
        parcels(1)
        assert run(batch_kind(collection=lambda self, ctx: depot.parcel_set)).job.processed_count == 4
        kind = batch_kind(
            collection=lambda self, ctx: (
                Parcel.objects.select_related("depot")
                .prefetch_related("depot__parcel_set")
                .annotate(shown=Concat("label", Value("!")))
                .only("label", "depot")
            ),
            process=lambda self, ctx, batch: [parcel.shown for parcel in batch],
        )
        assert run(kind).job.processed_count == 5

    def test_an_empty_collection_completes(self) -> None:
        for collection in (Parcel.objects.all(), Parcel.objects.none(), [], iter(())):
            ran = run(batch_kind(collection=collection))
            assert ran.outcomes == [Outcome.COMPLETED]
            assert ran.job.processed_count == 0

    def test_a_batch_of_several_sizes_ends_exactly(self) -> None:
        parcels(6)
        for size in (1, 2, 3, 6, 100):
            Parcel.objects.update(done=0)
            assert run(batch_kind(collection=Parcel.objects.all(), batch_size=size)).job.processed_count == 6
            assert done() == [1] * 6


class TestChangesUnderneath:
    def test_a_table_that_grows_meanwhile_ends(self) -> None:
        parcels(7)

        def process(self: Any, ctx: Any, batch: list[Any]) -> None:
            mark(self, ctx, batch)
            parcels(2)

        ran = run(batch_kind(collection=Parcel.objects.all(), process=process), stop_after=1)
        assert done() == [1] * 7 + [0] * 6
        assert ran.job.processed_count == 7

    def test_rows_that_vanish_even_the_last_one_do_not_matter(self) -> None:
        rows = parcels(9)

        def process(self: Any, ctx: Any, batch: list[Any]) -> None:
            mark(self, ctx, batch)
            Parcel.objects.filter(pk__in=[rows[4].pk, rows[7].pk, rows[8].pk]).delete()

        assert (
            run(batch_kind(collection=Parcel.objects.all(), process=process), stop_after=1).job.status
            == "completed"
        )
        assert done() == [1] * 6

    def test_a_row_that_moves_ahead_of_the_cursor_does_not_come_again_in_the_pass(self) -> None:
        for number in range(8):
            Parcel.objects.create(rank=number)

        def process(self: Any, ctx: Any, batch: list[Any]) -> None:
            mark(self, ctx, batch)
            Parcel.objects.filter(pk__in=[row.pk for row in batch]).update(rank=F("rank") + 100)

        assert (
            run(batch_kind(collection=Parcel.objects.order_by("rank"), process=process)).job.status
            == "completed"
        )
        assert done() == [1] * 8

    def test_until_empty_finds_what_came_behind_the_cursor(self) -> None:
        parcels(6)
        behind = iter([True, False, True])

        def process(self: Any, ctx: Any, batch: list[Any]) -> None:
            mark(self, ctx, batch)
            if next(behind, False):
                first = Parcel.objects.order_by("pk").values_list("pk", flat=True)[0]
                Parcel.objects.create(pk=first - 1)

        kind = batch_kind(
            collection=lambda self, ctx: Parcel.objects.filter(done=0), process=process, passes="until_empty"
        )
        Parcel.objects.update(id=F("id") + 10_000)
        for how in HOWS:
            ran = run(kind, **how)
            assert ran.job.status == "completed"
        assert done() == [1] * 8

    def test_until_empty_fails_when_the_collection_keeps_what_is_done(self) -> None:
        parcels(4)
        ran = run(batch_kind(collection=Parcel.objects.all(), passes="until_empty"))
        assert (ran.job.status, ran.job.error_code) == ("failed", "collection_not_shrinking")
        assert ran.outcomes == [Outcome.FAILED]
        assert done() == [2] * 4

    def test_until_empty_of_rows_that_keep_coming_goes_on(self) -> None:
        parcels(2)
        coming = iter(range(5))

        def process(self: Any, ctx: Any, batch: list[Any]) -> None:
            mark(self, ctx, batch)
            if next(coming, None) is not None:
                parcels(2)

        kind = batch_kind(
            collection=lambda self, ctx: Parcel.objects.filter(done=0), process=process, passes="until_empty"
        )
        assert run(kind).job.status == "completed"
        assert done() == [1] * 12

    @pytest.mark.parametrize("how", HOWS, ids=str)
    def test_passes_go_through_it_so_often(self, how: dict[str, int]) -> None:
        parcels(5)
        ran = run(batch_kind(collection=Parcel.objects.all(), passes=3), **how)
        assert done() == [3] * 5
        assert (ran.job.processed_count, ran.job.total_count) == (15, 15)
        seen: list[int] = []
        kind = batch_kind(
            collection=lambda self, ctx: iter(range(5)),
            passes=2,
            process=lambda self, ctx, batch: seen.extend(batch),
        )
        run(kind, **how)
        assert seen == [0, 1, 2, 3, 4] * 2


class TestTotal:
    def test_it_is_counted_once(self) -> None:
        parcels(7)
        counted: list[int] = []

        def total(self: Any, ctx: Any) -> int:
            counted.append(1)
            return 70

        ran = run(batch_kind(collection=Parcel.objects.all(), total=total), stop_after=1)
        assert (ran.job.total_count, len(counted), len(ran.results)) == (70, 1, 3)

    def test_more_than_the_limit_is_unknown(self) -> None:
        parcels(7)
        for limit, total in [(7, 7), (6, None), (0, None)]:
            ran = run(batch_kind(collection=Parcel.objects.all(), count_limit=limit))
            assert ran.job.total_count == total

    def test_iterables_know_it_when_they_have_a_length(self) -> None:
        process = {"process": lambda self, ctx, batch: None}
        assert run(batch_kind(collection=[1, 2, 3, 4], **process)).job.total_count == 4
        assert run(batch_kind(collection=lambda self, ctx: iter([1, 2]), **process)).job.total_count is None

    def test_a_kind_may_build_on_it(self) -> None:
        parcels(4)
        kind = batch_kind(
            collection=Parcel.objects.all(), total=lambda self, ctx: BatchKind.total(self, ctx) * 10
        )
        assert run(kind).job.total_count == 40


@pytest.mark.django_db(transaction=True)
class TestBeforeBatch:
    def test_it_runs_outside_the_transaction_and_its_value_is_prepared(self) -> None:
        parcels(5)
        log: list[Any] = []

        def before_batch(self: Any, ctx: Any, batch: list[Any]) -> Any:
            log.append((connection.in_atomic_block, isinstance(batch, list)))
            return {row.pk: f"for {row.pk}" for row in batch}

        def process(self: Any, ctx: Any, batch: list[Any]) -> None:
            assert connection.in_atomic_block
            assert ctx.prepared == {row.pk: f"for {row.pk}" for row in batch}
            mark(self, ctx, batch)

        kind = batch_kind(collection=Parcel.objects.all(), before_batch=before_batch, process=process)
        assert run(kind).job.status == "completed"
        assert log == [(False, True)] * 2
        assert done() == [1] * 5
        items = batch_kind(
            collection=["a", "b"],
            before_batch=lambda self, ctx, batch: [item.upper() for item in batch],
            process=lambda self, ctx, batch: log.append(ctx.prepared),
        )
        run(items)
        assert log[-1] == ["A", "B"]

    def test_process_sees_the_rows_as_they_are_then(self) -> None:
        rows = parcels(6)
        seen: list[tuple[int, str]] = []

        def before_batch(self: Any, ctx: Any, batch: list[Any]) -> Any:
            if batch[0].pk == rows[0].pk:
                Parcel.objects.filter(pk=rows[0].pk).update(label="edited")
                rows[1].delete()
                Parcel.objects.filter(pk=rows[2].pk).update(done=1)

        def process(self: Any, ctx: Any, batch: list[Any]) -> None:
            seen.extend((row.pk, row.label) for row in batch)

        first, *_ = rows
        kind = batch_kind(
            collection=lambda self, ctx: Parcel.objects.filter(done=0),
            before_batch=before_batch,
            process=process,
        )
        deleted = rows[1].pk
        ran = run(kind)
        assert seen == [(first.pk, "edited"), *((row.pk, "") for row in rows[3:])]
        assert deleted not in dict(seen)
        assert ran.job.status == "completed"
        assert ran.job.processed_count == 4

    def test_a_row_that_comes_between_was_not_prepared_and_is_not_processed(self) -> None:
        for rank in (10, 20, 30, 40):
            Parcel.objects.create(rank=rank)
        prepared: list[int] = []

        def before_batch(self: Any, ctx: Any, batch: list[Any]) -> Any:
            prepared.extend(row.rank for row in batch)
            if len(prepared) == 3:
                Parcel.objects.create(rank=15)
                Parcel.objects.create(rank=35)

        kind = batch_kind(collection=Parcel.objects.order_by("rank"), before_batch=before_batch)
        assert run(kind).job.status == "completed"
        assert prepared == [10, 20, 30, 35, 40]
        assert Parcel.objects.get(rank=15).done == 0
        assert Parcel.objects.exclude(rank=15).filter(done=1).count() == 5

    def test_a_batch_of_which_nothing_is_left_is_passed_over(self) -> None:
        rows = parcels(6)

        def before_batch(self: Any, ctx: Any, batch: list[Any]) -> Any:
            if batch[0].pk == rows[0].pk:
                Parcel.objects.filter(pk__in=[row.pk for row in batch]).delete()

        ran = run(batch_kind(collection=Parcel.objects.all(), before_batch=before_batch))
        assert ran.job.processed_count == 3
        assert done() == [1] * 3

    def test_it_may_hand_the_job_back(self) -> None:
        """B66"""
        rows = parcels(4)
        answers: list[Any] = [None, Yield(after=120), RetryAfter(240), None]

        def before_batch(self: Any, ctx: Any, batch: list[Any]) -> Any:
            return answers.pop(0)

        kind = batch_kind(collection=Parcel.objects.all(), before_batch=before_batch)
        ran = run(kind, most=1)
        assert ran.outcomes == [Outcome.YIELDED]
        assert ran.job.next_run_at is not None
        assert 100 < (ran.job.next_run_at - ran.job.updated_at).total_seconds() < 140
        assert done() == [1] * 3 + [0]
        ran = run(kind, most=1, job=ran.job)
        assert 220 < (ran.job.next_run_at - ran.job.updated_at).total_seconds() < 260  # type: ignore[operator]
        assert run(kind, job=ran.job).job.status == "completed"
        assert done() == [1] * len(rows)
        assert ran.job.consecutive_failures == 0

    def test_an_outcome_from_process_is_a_mistake(self) -> None:
        parcels(2)
        ran = run(batch_kind(collection=Parcel.objects.all(), process=lambda self, ctx, batch: Yield()))
        assert ran.job.status == "failed"
        assert "Return Yield from before_batch" in str(ran.error)


@pytest.mark.django_db(transaction=True)
class TestLocks:
    @pytest.mark.postgres_only
    def test_rows_are_locked_against_writers_but_not_against_references(
        self, second_connection: OtherConnection
    ) -> None:
        depots = [Depot.objects.create(name=name) for name in "abc"]
        answers: list[Any] = []

        def process(self: Any, ctx: Any, batch: list[Any]) -> None:
            def lock() -> Any:
                with transaction.atomic():
                    return (
                        Depot.objects.select_for_update(nowait=True, no_key=True)
                        .filter(pk=depots[0].pk)
                        .get()
                    )

            try:
                answers.append(second_connection.run(lock))
            except OperationalError:
                answers.append("locked")
            answers.append(second_connection.run(Parcel.objects.create, depot=depots[0]).pk)

        kind = batch_kind(collection=Depot.objects.order_by("pk"), process=process, lock_rows=True)
        assert run(kind).job.status == "completed"
        assert answers[0] == "locked"
        assert Parcel.objects.filter(pk=answers[1]).exists()

    def test_in_every_order_rows_come_once(self, mixed: list[Parcel]) -> None:
        for order in ORDERS:
            Parcel.objects.update(done=0)
            rows = Parcel.objects.select_related("depot").order_by(*order)
            assert run(batch_kind(collection=rows, lock_rows=True), stop_after=2).job.status == "completed"
            assert done() == [1] * 15

    @pytest.mark.postgres_only
    def test_a_row_that_moves_while_its_lock_is_waited_for_takes_no_others_with_it(
        self, second_connection: OtherConnection
    ) -> None:
        rows = [Parcel.objects.create(rank=rank) for rank in range(9)]
        second_connection.enter(transaction.atomic())
        second_connection.run(Parcel.objects.filter(pk=rows[2].pk).update, rank=7)
        job = start(batch_kind(collection=Parcel.objects.order_by("rank"), lock_rows=True))
        other = OtherConnection()
        try:
            slice_ = other.begin(one_slice, job)
            wait_until(lambda: waiting_for_a_lock(), 10, "The slice never waited.")
            second_connection.leave()
            assert slice_.result(20).outcome is Outcome.COMPLETED
        finally:
            other.close()
        assert done() == [1] * 9


def waiting_for_a_lock() -> bool:
    with connection.cursor() as cursor:
        cursor.execute("SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock'")
        return bool(cursor.fetchone()[0])


class Lines:
    """An iterable with a length of its own, that notes what is asked of it and that it is closed."""

    def __init__(self, number: int = 10, fail_at: int | None = None) -> None:
        self.number, self.fail_at = number, fail_at
        self.begun = self.closed = 0

    def __iter__(self) -> Iterator[int]:
        for line in range(self.number):
            if line == self.fail_at:
                raise ValueError("unreadable")
            yield line

    def close(self) -> None:
        self.closed += 1


class Slots(Sequence[int]):
    """A sequence of which only the slices that are needed may be read."""

    def __init__(self, length: int) -> None:
        self.length = length
        self.read: list[slice] = []

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: Any) -> Any:
        assert isinstance(index, slice)
        self.read.append(index)
        return list(range(self.length))[index]

    def __iter__(self) -> Iterator[int]:
        raise AssertionError("read from its beginning")


class TestIterables:
    @pytest.mark.parametrize("how", HOWS, ids=str)
    @pytest.mark.parametrize(
        "make",
        [
            lambda: list(range(10)),
            lambda: tuple(range(10)),
            lambda: range(10),
            lambda: (number for number in range(10)),
            lambda: dict.fromkeys(range(10)),
            lambda: dict.fromkeys(range(10)).keys(),
            lambda: map(int, "0123456789"),
            lambda: Lines(),
            lambda: Slots(10),
        ],
        ids=["list", "tuple", "range", "generator", "dict", "keys", "map", "lines", "sequence"],
    )
    def test_they_resume_by_position(self, make: Callable[[], Any], how: dict[str, int]) -> None:
        seen: list[int] = []

        def process(self: Any, ctx: Any, batch: list[Any]) -> None:
            assert isinstance(batch, list)
            seen.extend(batch)

        ran = run(batch_kind(collection=lambda self, ctx: make(), process=process), **how)
        assert seen == list(range(10))
        assert (ran.job.status, ran.job.processed_count) == ("completed", 10)
        assert ran.job.checkpoint["cursor"] == 10

    def test_a_generator_method_is_a_collection(self) -> None:
        seen: list[str] = []

        def collection(self: Any, ctx: Any) -> Iterator[str]:
            yield from ctx.input

        kind = batch_kind(collection=collection, process=lambda self, ctx, batch: seen.extend(batch))
        run(kind, ["a", "b", "c", "d"], stop_after=1)
        assert seen == ["a", "b", "c", "d"]

    def test_they_are_closed_on_every_way_out(self) -> None:
        """B71"""
        opened: list[Lines] = []
        generators: list[str] = []
        behaviour: dict[str, Any] = {"process": lambda ctx: None}

        def collection(self: Any, ctx: Any) -> Iterator[int]:
            lines = Lines()
            opened.append(lines)
            try:
                yield from lines
            finally:
                generators.append("closed")
                lines.close()

        kind = batch_kind(
            collection=collection, process=lambda self, ctx, batch: behaviour["process"](ctx), batch_size=2
        )

        def lose(ctx: Any) -> None:
            with connection.cursor() as cursor:
                cursor.execute("UPDATE durable_jobs_job SET lease_epoch = lease_epoch + 1")

        def fail(ctx: Any) -> None:
            raise ValueError

        def exit(ctx: Any) -> None:
            raise SystemExit

        assert run(kind).outcomes == [Outcome.COMPLETED]
        assert len(run(kind, stop_after=2).results) == 3
        run(kind, kill_after=2)
        for act, outcome in [(lose, Outcome.LEASE_LOST), (fail, Outcome.RETRY), (exit, Outcome.RETRY)]:
            behaviour["process"] = act
            assert run(kind, most=1).outcomes == [outcome]
        assert len(opened) == len(generators) == sum(lines.closed for lines in opened) >= 10

    def test_the_collection_itself_is_closed_and_an_error_there_harms_nothing(
        self, caplog: pytest.LogCaptureFixture
    ) -> None:
        class Broken(Lines):
            def close(self) -> None:
                super().close()
                raise OSError("no")

        opened = [Broken(), Broken(), Broken(), Broken()]
        left = iter(opened)
        kind = batch_kind(collection=lambda self, ctx: next(left), process=lambda self, ctx, batch: None)
        assert run(kind, stop_after=1).job.status == "completed"
        assert [lines.closed for lines in opened] == [1] * 4
        assert "collection_not_closed" in caplog.text

    def test_one_that_became_shorter_is_noticed(self) -> None:
        for long, short in [(list(range(9)), [1, 2]), (Lines(9), Lines(2))]:
            given = {"now": long}
            kind = batch_kind(
                collection=lambda self, ctx, given=given: given["now"], process=lambda self, ctx, batch: None
            )
            ran = run(kind, stop_after=1, most=1)
            given["now"] = short
            ran = run(kind, job=ran.job)
            assert ran.job.status == "failed"
            assert isinstance(ran.error, TerminalError)
            assert ran.error.code == "collection_changed"
            assert "2 items" in str(ran.error)

    def test_a_stop_is_seen_while_it_is_wound_forward(self) -> None:
        pulled: list[int] = []
        stopping: list[Any] = []

        def collection(self: Any, ctx: Any) -> Iterator[int]:
            for number in range(100_000):
                pulled.append(number)
                if stopping and number == 10:
                    ctx.stop.set()
                yield number

        kind = batch_kind(collection=collection, process=lambda self, ctx, batch: None, batch_size=50_000)
        ran = run(kind, stop_after=1, most=1)
        pulled.clear()
        stopping.append(True)
        ran = run(kind, job=ran.job, most=1)
        assert ran.outcomes == [Outcome.YIELDED]
        assert len(pulled) <= 20_000
        assert ran.job.checkpoint["cursor"] == 50_000

    def test_every_slice_does_one_batch_at_least(self) -> None:
        def collection(self: Any, ctx: Any) -> Iterator[int]:
            time.sleep(0.02)
            yield from range(5)

        kind = batch_kind(
            collection=collection,
            process=lambda self, ctx, batch: None,
            slice_seconds=0.001,
            max_slice_seconds=5,
        )
        assert run(kind).outcomes == [Outcome.YIELDED, Outcome.COMPLETED]

    def test_what_is_no_collection_is_refused(self) -> None:
        refused: list[tuple[Any, str]] = [
            (None, "Return a QuerySet"),
            (5, "Return a QuerySet"),
            ("text", "Return a QuerySet"),
            (b"bytes", "Return a QuerySet"),
            ({1, 2}, "Sort it into a list"),
            (Parcel.objects.raw("SELECT * FROM tests_parcel"), "raw query"),
            (Parcel.objects.all()[:5], "is sliced"),
            (Parcel.objects.values("pk"), "gives values"),
            (Parcel.objects.values_list("pk", flat=True), "gives values"),
            (Parcel.objects.distinct(), "is distinct"),
            (Parcel.objects.all().union(Parcel.objects.all()), "is a union"),
            (Parcel.objects.select_for_update(), "lock_rows = True"),
            (Parcel.objects.order_by("?"), "random order"),
            (Parcel.objects.order_by("depot"), "write 'depot_id'"),
        ]
        for collection, words in refused:
            ran = run(batch_kind(collection=lambda self, ctx, collection=collection: collection))
            assert ran.outcomes == [Outcome.FAILED], words
            assert words in str(ran.error)
            assert isinstance(ran.error, TerminalError)
            assert ran.error.code == "bad_collection"
        ran = run(batch_kind(collection=[1], passes="until_empty"))
        assert "needs a QuerySet" in str(ran.error)

    @pytest.mark.postgres_only
    def test_aggregates_cannot_be_locked(self) -> None:
        ran = run(batch_kind(collection=Depot.objects.annotate(n=Count("parcel")), lock_rows=True))
        assert "aggregates cannot be locked" in str(ran.error)

    def test_aggregates_can_be_read(self) -> None:
        for name in "abcde":
            parcels(2, depot=Depot.objects.create(name=name))
        seen: list[Any] = []
        kind = batch_kind(
            collection=lambda self, ctx: (
                Depot.objects.annotate(n=Count("parcel")).filter(n__gt=1).order_by("name")
            ),
            process=lambda self, ctx, batch: seen.extend((depot.name, depot.n) for depot in batch),
        )
        run(kind, stop_after=1)
        assert seen == [(name, 2) for name in "abcde"]

    def test_rows_of_another_database_are_refused_unless_it_is_named(self) -> None:
        class Elsewhere:
            def db_for_write(self, model: Any, **hints: Any) -> str | None:
                return "elsewhere" if model is Parcel else None

        with override_settings(DATABASE_ROUTERS=[Elsewhere()]):
            ran = run(batch_kind(collection=Parcel.objects.all()))
            assert "say .using('elsewhere')" in str(ran.error)
            assert run(batch_kind(collection=Parcel.objects.using("default"))).job.status == "completed"

    def test_a_replica_for_reading_is_not_read(self) -> None:
        parcels(2)

        class Replicas:
            def db_for_read(self, model: Any, **hints: Any) -> str | None:
                return "replica" if model is Parcel else None

        def process(self: Any, ctx: Any, batch: list[Any]) -> None:
            Parcel.objects.using("default").update(done=1)

        with override_settings(DATABASE_ROUTERS=[Replicas()]):
            assert (
                run(batch_kind(collection=lambda self, ctx: Parcel.objects.all(), process=process)).error
                is None
            )
        assert done() == [1, 1]


def poisoned(
    bad: Callable[[Any], bool], error: Callable[[], Exception] = lambda: ValueError("bad row")
) -> Any:
    """A process that fails for some rows."""

    def process(self: Any, ctx: Any, batch: list[Any]) -> None:
        mark(self, ctx, batch)
        for row in batch:
            if bad(row):
                raise error()

    return process


class TestItemErrors:
    def test_a_bad_row_is_skipped_by_the_retry_and_recorded(self) -> None:
        rows = parcels(8)
        bad = rows[4]
        asked: list[Any] = []

        def on_item_error(self: Any, ctx: Any, item: Any, error: Exception) -> bool:
            assert connection.in_atomic_block
            asked.append((item.pk, str(error)))
            return True

        kind = batch_kind(
            collection=Parcel.objects.all(),
            process=poisoned(lambda row: row.pk == bad.pk),
            on_item_error=on_item_error,
            max_skipped=1,
        )
        ran = run(kind)
        assert ran.outcomes == [Outcome.RETRY, Outcome.COMPLETED]
        assert asked == [(bad.pk, "bad row")]
        assert done() == [1, 1, 1, 1, 0, 1, 1, 1]
        assert ran.job.processed_count == 8
        (event,) = ran.events
        assert event.data == {"cursor": [bad.pk], "item": repr(bad), "error": "ValueError: bad row"}
        assert event.message == "bad row"
        assert ran.job.checkpoint["skipped"] == 1

    def test_only_the_failed_batch_is_taken_item_by_item(self) -> None:
        parcels(9)
        sizes: list[int] = []

        def process(self: Any, ctx: Any, batch: list[Any]) -> None:
            sizes.append(len(batch))
            if len(sizes) == 2:
                raise ValueError

        kind = batch_kind(
            collection=Parcel.objects.all(),
            process=process,
            on_item_error=lambda self, ctx, item, error: False,
        )
        assert run(kind).job.status == "completed"
        assert sizes == [3, 3, 1, 1, 1, 3]

    def test_without_a_yes_the_job_fails_as_any_other(self) -> None:
        rows = parcels(4)
        for answer in (False, None):
            kind = batch_kind(
                collection=Parcel.objects.all(),
                process=poisoned(lambda row: row.pk == rows[1].pk),
                on_item_error=lambda self, ctx, item, error, answer=answer: answer,
                max_skipped=5,
            )
            ran = run(kind)
            assert ran.outcomes == [Outcome.RETRY, Outcome.RETRY, Outcome.FAILED]
            assert ran.job.verdict == "retry_exhausted"
            assert done() == [0] * 4
            assert ran.events == []

    def test_more_than_the_limit_parks_the_job_and_keeps_nothing_of_the_batch(self) -> None:
        rows = parcels(9)
        kind = batch_kind(
            collection=Parcel.objects.all(),
            process=poisoned(lambda row: row.pk >= rows[4].pk),
            on_item_error=lambda self, ctx, item, error: True,
            max_skipped=1,
        )
        ran = run(kind)
        assert (ran.job.status, ran.job.error_code) == ("failed", "too_many_skipped")
        assert ran.job.parked_at is not None
        assert "max_skipped = 1" in (ran.job.error_message or "")
        assert "bad row" in (ran.job.error_message or "")
        assert done() == [1, 1, 1] + [0] * 6
        assert ran.events == []

    def test_the_default_limit_is_none_at_all(self) -> None:
        rows = parcels(2)
        kind = batch_kind(
            collection=Parcel.objects.all(),
            process=poisoned(lambda row: row.pk == rows[0].pk),
            on_item_error=lambda self, ctx, item, error: True,
        )
        assert run(kind).job.error_code == "too_many_skipped"

    def test_an_error_that_would_end_the_job_is_asked_about_at_once(self) -> None:
        rows = parcels(7)
        kind = batch_kind(
            collection=Parcel.objects.all(),
            process=poisoned(
                lambda row: row.pk == rows[1].pk, lambda: TerminalError("no price", code="price")
            ),
            on_item_error=lambda self, ctx, item, error: isinstance(error, TerminalError),
            max_skipped=1,
        )
        ran = run(kind)
        assert ran.outcomes == [Outcome.COMPLETED]
        assert done() == [1, 0] + [1] * 5
        assert ran.events[0].code == "price"

    def test_items_of_an_iterable_are_fresh_when_they_are_taken_again(self) -> None:
        seen: list[Any] = []

        def process(self: Any, ctx: Any, batch: list[Any]) -> None:
            for item in batch:
                item["price"] = int(item["price"]) * 2
                if item["price"] == 4:
                    raise TerminalError
            seen.extend(item["price"] for item in batch)

        kind = batch_kind(
            collection=lambda self, ctx: [{"price": "1"}, {"price": "2"}, {"price": "3"}],
            process=process,
            on_item_error=lambda self, ctx, item, error: True,
            max_skipped=1,
        )
        ran = run(kind)
        assert ran.outcomes == [Outcome.COMPLETED]
        assert seen == [2, 6]
        assert ran.events[0].data["cursor"] == 1

    def test_before_batch_is_asked_about_too_one_by_one(self) -> None:
        rows = parcels(4)
        calls: list[int] = []

        def before_batch(self: Any, ctx: Any, batch: list[Any]) -> Any:
            calls.append(len(batch))
            if any(row.pk == rows[2].pk for row in batch):
                raise ValueError("unreachable")
            return [row.pk for row in batch]

        def process(self: Any, ctx: Any, batch: list[Any]) -> None:
            assert ctx.prepared == [row.pk for row in batch]
            mark(self, ctx, batch)

        kind = batch_kind(
            collection=Parcel.objects.all(),
            before_batch=before_batch,
            process=process,
            on_item_error=lambda self, ctx, item, error: True,
            max_skipped=1,
        )
        ran = run(kind)
        assert ran.job.status == "completed"
        assert calls == [3, 1, 1, 1, 1]
        assert done() == [1, 1, 0, 1]
        assert ran.events[0].message == "unreachable"

    def test_before_batch_may_end_the_slice_one_by_one_and_an_outage_there_is_no_items_fault(self) -> None:
        parcels(3)
        answers: list[Any] = [ValueError("bad"), Yield(0), OperationalError("database is locked")]
        asked: list[Any] = []

        def before_batch(self: Any, ctx: Any, batch: list[Any]) -> Any:
            answer = answers.pop(0) if answers else None
            if isinstance(answer, Exception):
                raise answer
            return answer

        kind = batch_kind(
            collection=Parcel.objects.all(),
            before_batch=before_batch,
            on_item_error=lambda self, ctx, item, error: asked.append(error) or True,
            max_skipped=3,
        )
        ran = run(kind)
        assert ran.outcomes == [Outcome.RETRY, Outcome.YIELDED, Outcome.RETRY, Outcome.COMPLETED]
        assert (asked, done()) == ([], [1] * 3)

    def test_an_error_of_the_database_statement_is_undone_alone(self) -> None:
        rows = parcels(4)

        def process(self: Any, ctx: Any, batch: list[Any]) -> None:
            mark(self, ctx, batch)
            for row in batch:
                if row.pk == rows[1].pk:
                    Parcel.objects.create(pk=rows[0].pk)

        kind = batch_kind(
            collection=Parcel.objects.all(),
            process=process,
            on_item_error=lambda self, ctx, item, error: True,
            max_skipped=1,
        )
        ran = run(kind)
        assert ran.job.status == "completed"
        assert done() == [1, 0, 1, 1]
        assert "IntegrityError" in ran.events[0].data["error"]

    def test_an_outage_and_control_flow_are_no_items_fault(self) -> None:
        for error in (OperationalError("database is locked"), RetryAfter(5)):
            Parcel.objects.all().delete()
            parcels(3)
            asked: list[Any] = []
            failing = [ValueError("first"), error]

            def process(self: Any, ctx: Any, batch: list[Any], failing: Any = failing) -> None:
                if failing:
                    raise failing.pop(0)
                mark(self, ctx, batch)

            kind = batch_kind(
                collection=Parcel.objects.all(),
                process=process,
                on_item_error=lambda self, ctx, item, error, asked=asked: asked.append(error) or True,
                max_skipped=5,
            )
            assert run(kind).job.status == "completed"
            assert asked == []
            assert done() == [1] * 3

    def test_until_empty_ends_when_only_bad_rows_are_left(self) -> None:
        rows = parcels(12)
        bad = {rows[index].pk for index in (1, 2, 4, 7, 8)}
        kind = batch_kind(
            collection=lambda self, ctx: Parcel.objects.filter(done=0),
            process=poisoned(lambda row: row.pk in bad),
            on_item_error=lambda self, ctx, item, error: True,
            max_skipped=5,
            passes="until_empty",
        )
        ran = run(kind)
        assert ran.outcomes == [Outcome.RETRY] * 3 + [Outcome.COMPLETED]
        assert {row.pk for row in Parcel.objects.filter(done=0)} == bad
        assert ran.job.processed_count == 12 + 5

    def test_an_error_in_the_question_fails_the_slice(self) -> None:
        parcels(2)
        kind = batch_kind(
            collection=Parcel.objects.all(),
            process=poisoned(lambda row: True),
            on_item_error=lambda self, ctx, item, error: 1 / 0,
        )
        ran = run(kind)
        assert ran.job.status == "failed"
        assert isinstance(ran.error, ZeroDivisionError)


class TestCursorVersions:
    def begun(self, **attributes: Any) -> Job:
        """A job that has done three of seven rows."""
        parcels(7)
        ran = run(batch_kind(collection=Parcel.objects.order_by("pk"), **attributes), stop_after=1, most=1)
        assert ran.outcomes == [Outcome.YIELDED]
        return ran.job

    def assert_parked(self, ran: Ran, words: str) -> None:
        assert (ran.job.status, ran.job.error_code) == ("failed", "cursor_version")
        assert ran.job.parked_at is not None
        assert words in (ran.job.error_message or "")
        assert done().count(1) == 3

    def test_the_checkpoint_is_as_documented(self) -> None:
        job = self.begun()
        keys = list(Parcel.objects.order_by("pk").values_list("pk", flat=True))
        assert job.checkpoint == {
            "version": 1,
            "order": ["id"],
            "pass": 1,
            "cursor": [keys[2]],
            "end": [keys[6]],
            "found": 3,
            "skipped": 0,
            "before": None,
        }

    def test_another_version_parks_the_job(self) -> None:
        """C111"""
        job = self.begun()
        kind = batch_kind(collection=Parcel.objects.order_by("pk"), cursor_version=2)
        self.assert_parked(run(kind, job=job), "with cursor_version 1")

    def test_another_order_of_the_same_version_parks_the_job(self) -> None:
        job = self.begun()
        self.assert_parked(
            run(batch_kind(collection=Parcel.objects.order_by("label")), job=job), "['label', 'id']"
        )

    def test_an_iterable_instead_of_rows_parks_the_job(self) -> None:
        job = self.begun()
        self.assert_parked(run(batch_kind(collection=[1, 2, 3, 4]), job=job), "Restore the order")

    def test_a_kind_may_translate_it(self) -> None:
        """C111"""
        job = self.begun()
        asked: list[Any] = []

        def migrate_cursor(self: Any, old_version: Any, cursor: Any) -> Any:
            asked.append((old_version, cursor))
            return ["", *cursor]

        kind = batch_kind(
            collection=Parcel.objects.order_by("label"), cursor_version=2, migrate_cursor=migrate_cursor
        )
        ran = run(kind, job=job, stop_after=1)
        assert ran.job.status == "completed"
        keys = list(Parcel.objects.order_by("pk").values_list("pk", flat=True))
        assert asked == [(1, [keys[2]]), (1, [keys[6]])]
        assert done() == [1] * 7
        assert ran.job.checkpoint["version"] == 2

    @pytest.mark.parametrize("wrong", [5, [1, 2, 3], "x"])
    def test_a_translation_that_does_not_fit_parks_the_job(self, wrong: Any) -> None:
        job = self.begun()
        kind = batch_kind(
            collection=Parcel.objects.order_by("pk"),
            cursor_version=2,
            migrate_cursor=lambda self, old_version, cursor: wrong,
        )
        self.assert_parked(run(kind, job=job), "does not fit")

    def test_none_begins_anew(self) -> None:
        job = self.begun()
        kind = batch_kind(
            collection=Parcel.objects.order_by("pk"),
            cursor_version=2,
            migrate_cursor=lambda self, old_version, cursor: None,
        )
        assert run(kind, job=job).job.status == "completed"
        assert done() == [2, 2, 2, 1, 1, 1, 1]

    def test_a_checkpoint_of_an_ordinary_kind_is_offered_whole(self) -> None:
        parcels(4)

        class Before(Kind):
            name = "tests.batch"

            def step(self, ctx: Any) -> Any:
                ctx.save_checkpoint({"last": 2})
                return Yield()

        register(Before)
        job = run(Before, most=1).job
        asked: list[Any] = []
        kind = batch_kind(
            collection=Parcel.objects.all(),
            migrate_cursor=lambda self, old_version, cursor: asked.append((old_version, cursor)),
        )
        assert run(kind, job=job).job.status == "completed"
        assert asked == [(None, {"last": 2})]

    def test_a_checkpoint_of_an_ordinary_kind_parks_the_job(self) -> None:
        class Before(Kind):
            name = "tests.batch"

            def step(self, ctx: Any) -> Any:
                ctx.save_checkpoint([3])
                return Yield()

        parcels(3)
        Parcel.objects.update(done=1)
        register(Before)
        job = run(Before, most=1).job
        self.assert_parked(run(batch_kind(collection=Parcel.objects.all()), job=job), "by no BatchKind")

    def test_a_finished_pass_is_not_begun_again_after_a_crash(self) -> None:
        parcels(3)
        kind = batch_kind(collection=Parcel.objects.all())
        assert run(kind, kill_after=1).job.status == "completed"
        assert done() == [1] * 3


class TestLostLease:
    def test_nothing_of_the_batch_is_committed(self) -> None:
        """B47, B62"""
        parcels(5)

        def process(self: Any, ctx: Any, batch: list[Any]) -> None:
            mark(self, ctx, batch)
            with connection.cursor() as cursor:
                cursor.execute("UPDATE durable_jobs_job SET lease_epoch = lease_epoch + 1")

        kind = batch_kind(
            collection=Parcel.objects.all(),
            process=process,
            on_item_error=lambda self, ctx, item, error: True,
            max_skipped=9,
        )
        ran = run(kind, most=1)
        assert ran.outcomes == [Outcome.LEASE_LOST]
        assert done() == [0] * 5


KILLED = """
import sys, time, uuid
from django.db.models import F
from durable_jobs import store
from durable_jobs.kinds import BatchKind, register
from durable_jobs.runner import run_slice
from tests.models import Parcel

@register
class Made(BatchKind):
    name = "tests.batch"
    batch_size = 2

    def collection(self, ctx):
        return Parcel.objects.order_by("-rank", "label")

    def process(self, ctx, batch):
        for parcel in batch:
            Parcel.objects.filter(pk=parcel.pk).update(done=F("done") + 1)
            print("row", flush=True)
            time.sleep(0.003)

job = store.get(uuid.UUID(sys.argv[1]))
run_slice(store.claim(job.id, job.continuation_seq, job.redrives, "tests:batch", 60), owner="tests:batch")
"""


@pytest.mark.django_db(transaction=True)
def test_after_sigkill_nothing_is_repeated_and_nothing_skipped(processes: Processes) -> None:
    """B168"""
    Parcel.objects.bulk_create(Parcel(rank=number % 5 or None, label=f"{number % 7}") for number in range(60))
    kind = batch_kind(collection=Parcel.objects.order_by("-rank", "label"), batch_size=2)
    job = start(kind)
    for _ in range(3):
        process = processes.python(KILLED, str(job.id))
        process.wait_for_output("row\n" * 8)
        time.sleep(random.uniform(0, 0.01))
        process.send(signal.SIGKILL)
        process.wait()
        for orphan in store.dead_leases(OWNER):
            assert store.take_orphan(orphan, grace=0, delay=0, dead=True)
        assert set(done()) <= {0, 1}
        assert sum(done()) == store.get(job.id).processed_count  # type: ignore[union-attr]
    assert 0 < sum(done()) < 60
    assert run(kind, job=job).job.status == "completed"
    assert done() == [1] * 60


def test_a_result_of_done_is_none() -> None:
    ran = run(batch_kind(collection=[]))
    assert ran.job.result is None
    assert Done() == Done(None)
