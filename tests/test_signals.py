"""The ten signals: when each is sent, what it carries, and what its receivers cannot do."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
from django.db import DatabaseError, connection, transaction
from django.dispatch import Signal

from durable_jobs import kinds, service, signals, store
from durable_jobs.exceptions import Park, TerminalError
from durable_jobs.kinds import Cancelled, Done, Yield
from durable_jobs.models import Job
from durable_jobs.runner import Outcome
from durable_jobs.testing import make_job
from tests.models import Parcel
from tests.slices import OWNER, made, row, run_slice, start, steal

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.usefixtures("registry")]

ALL = {name: signal for name, signal in vars(signals).items() if isinstance(signal, Signal)}


@pytest.fixture
def told() -> Iterator[list[tuple[str, str, str]]]:
    """Every signal that is sent: its name, its sender, the status of its job; never inside a transaction."""
    received: list[tuple[str, str, str]] = []
    receivers = []
    for name, signal in ALL.items():

        def receive(sender: str, job: Job, signal: Signal, name: str = name, **_: Any) -> None:
            assert not connection.in_atomic_block
            assert isinstance(job, Job) and signal is ALL[name]
            received.append((name.removeprefix("job_"), sender, job.status))

        signal.connect(receive)
        receivers.append((signal, receive))
    yield received
    for signal, receive in receivers:
        signal.disconnect(receive)


def names(told: list[tuple[str, str, str]]) -> list[str]:
    return [name for name, _, _ in told]


def raising(error: BaseException) -> Any:
    def step(ctx: Any) -> None:
        raise error

    return step


def test_there_are_ten() -> None:
    """B185"""
    assert sorted(ALL) == [
        "job_cancelled", "job_completed", "job_created", "job_failed", "job_lease_lost", "job_mirror_stuck",
        "job_parked", "job_redriven", "job_started", "job_yielded",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("step", "expected"),
    [
        (lambda ctx: Done(), [("completed", "completed")]),
        (lambda ctx: Yield(), [("yielded", "pending")]),
        (lambda ctx: Cancelled(), [("cancelled", "cancelled")]),
        (raising(TerminalError()), [("failed", "failed")]),
        (raising(Park("why")), [("parked", "failed")]),
        (raising(ValueError()), []),
        (lambda ctx: None, [("failed", "failed")]),
    ],
    ids=["done", "yield", "cancelled", "terminal", "park", "retry", "bad outcome"],
)
def test_a_slice_tells_what_became_of_it(step: Any, expected: list[Any], told: list[Any]) -> None:
    job = start(made(step))
    run_slice(job)
    assert told == [
        ("created", "tests.made", "pending"),
        ("started", "tests.made", "running"),
        *[(name, "tests.made", status) for name, status in expected],
    ]


def test_started_is_told_once_in_a_jobs_life(told: list[Any]) -> None:
    answers = iter([ValueError(), Yield(), TerminalError(), Done()])

    def step(ctx: Any) -> Any:
        answer = next(answers)
        if isinstance(answer, Exception):
            raise answer
        return answer

    job = start(made(step))
    for _ in range(3):
        run_slice(job)
    service.redrive(job.id)
    run_slice(job)
    assert names(told) == ["created", "started", "yielded", "failed", "redriven", "completed"]


def test_a_step_that_never_runs_is_not_told_as_started(told: list[Any]) -> None:
    job = start(made())
    store.request_cancel(job.id, scope=None)
    run_slice(job)
    assert names(told) == ["created", "cancelled"]


def test_a_lost_lease_is_told_by_the_one_who_lost_it(told: list[Any]) -> None:
    job = start(made(lambda ctx: steal(job) or Done()))
    assert run_slice(job).outcome == Outcome.LEASE_LOST
    assert told[-1] == ("lease_lost", "tests.made", "running") and len(told) == 3


def test_a_refusal_tells_nothing(told: list[Any]) -> None:
    made()
    job = make_job("completed", kind="tests.made", lock_key="l")
    told.clear()
    for act in (service.cancel, service.redrive):
        with pytest.raises(service.Refusal):
            act(job.id)
    with pytest.raises(service.Refusal):
        service.start("tests.made", {"x": float("nan")})
    assert told == []


def test_a_fact_of_a_callers_transaction_is_told_when_it_is_one(told: list[Any]) -> None:
    """B185: nobody rolls back a fact, and nobody is told of one that was rolled back."""
    made()
    failed, waiting = make_job("failed", kind="tests.made"), make_job("pending", kind="tests.made")
    told.clear()
    for keep in (False, True):
        with contextlib.suppress(KeyError), transaction.atomic():
            service.start("tests.made")
            service.redrive(failed.id)
            service.cancel(waiting.id)
            assert told == []
            if not keep:
                raise KeyError
        assert names(told) == (["created", "redriven", "cancelled"] if keep else [])


def test_a_receiver_sees_the_row_committed(told: list[Any]) -> None:
    seen: list[str] = []

    def receive(job: Job, **_: Any) -> None:
        seen.append(row(job).status)

    signals.job_completed.connect(receive)
    try:
        run_slice(start(made()))
    finally:
        signals.job_completed.disconnect(receive)
    assert seen == ["completed"]


@pytest.mark.parametrize("by", ["name", "class"])
def test_a_receiver_may_listen_to_one_kind(by: str) -> None:
    """Django compares senders by identity, and a name read from a row is another object than one in the code."""
    heard: list[str] = []

    def receive(sender: str, **_: Any) -> None:
        heard.append(sender)

    one, two = made(name="tests.one"), made(name="tests.two")
    sender = one if by == "class" else ".".join(["tests", "one"])
    signals.job_completed.connect(receive, sender=sender)
    try:
        assert signals.job_completed.has_listeners(sender)
        for kind in (one, two):
            run_slice(start(kind))
    finally:
        assert signals.job_completed.disconnect(receive, sender=sender)
    run_slice(start(one))
    assert heard == ["tests.one"]


@pytest.mark.parametrize("nasty", [ValueError("x"), SystemExit(3), DatabaseError("x")], ids=repr)
@pytest.mark.parametrize("name", sorted(ALL))
def test_what_a_receiver_raises_undoes_nothing(
    name: str, nasty: BaseException, caplog: pytest.LogCaptureFixture
) -> None:
    """B95, B185, T25"""

    def receive(**_: Any) -> None:
        raise nasty

    ALL[name].connect(receive)
    try:
        job = make_job("running", kind=made().name, owner=OWNER)
        signals.send(ALL[name], job)
    finally:
        ALL[name].disconnect(receive)
    [record] = [r for r in caplog.records if hasattr(r, "event")]
    assert record.event == "signal_receiver_failed" and record.exc_info is not None


def test_a_receiver_that_raises_keeps_nothing_from_the_others() -> None:
    heard: list[int] = []

    def first(**_: Any) -> None:
        raise ValueError

    def second(**_: Any) -> None:
        heard.append(1)

    signals.job_completed.connect(first)
    signals.job_completed.connect(second)
    try:
        assert run_slice(start(made())).outcome == Outcome.COMPLETED
    finally:
        signals.job_completed.disconnect(first)
        signals.job_completed.disconnect(second)
    assert heard == [1]


def test_a_receiver_that_breaks_its_own_transaction_breaks_nothing_else(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """C055: it runs after the commit, so its database error is its own."""

    def receive(**_: Any) -> None:
        with transaction.atomic():
            taken = Parcel.objects.create(label="x")
            Parcel.objects.create(pk=taken.pk)

    signals.job_completed.connect(receive)
    try:
        job = start(made())
        assert run_slice(job).outcome == Outcome.COMPLETED
        Parcel.objects.create(label="usable")
    finally:
        signals.job_completed.disconnect(receive)
    assert row(job).status == "completed"
    assert [r.event for r in caplog.records if hasattr(r, "event")] == ["signal_receiver_failed"]


def test_a_receiver_may_start_the_next_job(told: list[Any]) -> None:
    """At most once, best effort: chaining that must not be lost belongs into on_transition."""
    made(name="tests.next")

    def receive(job: Job, **_: Any) -> None:
        service.start("tests.next", str(job.id))

    signals.job_completed.connect(receive, sender="tests.made")
    try:
        job = start(made())
        run_slice(job)
    finally:
        signals.job_completed.disconnect(receive, sender="tests.made")
    assert [following.input for following in Job.objects.filter(kind="tests.next")] == [str(job.id)]


def test_the_third_failed_hook_is_told_as_stuck(told: list[Any]) -> None:
    job = start(made(None, on_transition=lambda self, job: 0, on_redrive=lambda self, job: 1))
    for _ in range(3):
        run_slice(job)
    assert names(told).count("mirror_stuck") >= 1
    assert kinds.find("tests.made") is not None
