"""Starting, reading, cancelling and redriving jobs: what is refused, what is kept, what joins whose transaction."""

from __future__ import annotations

import contextlib
import enum
import logging
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from datetime import UTC, date, datetime, timedelta, timezone
from decimal import Decimal
from typing import Any
from zoneinfo import ZoneInfo

import pytest
from django.contrib.auth import get_user_model
from django.contrib.auth.models import AnonymousUser
from django.db import OperationalError, connection, transaction
from django.http import QueryDict
from django.test import override_settings
from django.utils import timezone as django_timezone
from django.utils.functional import SimpleLazyObject
from django.utils.safestring import mark_safe
from django.utils.translation import gettext_lazy

from durable_jobs import jsontext, kinds, service, signals, store, transports
from durable_jobs.exceptions import (
    Busy,
    DurableJobsError,
    ForceRequired,
    HookFailed,
    IdempotencyConflict,
    InvalidInput,
    LockKeyHeld,
    NotCancellable,
    NotFound,
    NotRedrivable,
    Refusal,
    RestartNotAllowed,
    TerminalError,
    UnknownKind,
    UnrecoverableError,
)
from durable_jobs.kinds import Done, Kind, StatusMirror, Yield
from durable_jobs.models import CancelRequest, Job, JobEvent, Scope, uuid7
from durable_jobs.runner import Outcome
from durable_jobs.service import ALL_SCOPES, start_many
from durable_jobs.testing import make_job
from durable_jobs.transports.database import Claimer
from tests.connections import OtherConnection
from tests.models import Parcel, Shipment
from tests.slices import OWNER, change, claim, columns, events, made, row, run_slice, start, steal

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.usefixtures("registry")]

KIND = "tests.made"
ALL_STATUSES = [
    "held",
    "pending",
    "running",
    "retrying",
    "verdict",
    "completed",
    "failed",
    "parked",
    "cancelled",
]
LIVE = {"pending", "running", "retrying", "verdict"}


@pytest.fixture(autouse=True)
def kind(registry: None) -> type[Kind]:
    return made()


@pytest.fixture
def anna() -> Any:
    return get_user_model().objects.create_user("anna")


class Told:
    """Stands where the transport stands."""

    transactional = True

    def __init__(self) -> None:
        self.published: list[Job] = []
        self.withdrawn: list[Job] = []
        self.hinted: list[Job] = []

    def publish(self, job: Job) -> None:
        self.published.append(job)

    def withdraw(self, job: Job) -> None:
        self.withdrawn.append(job)

    def hint_cancel(self, job: Job) -> None:
        self.hinted.append(job)


@pytest.fixture
def transport(monkeypatch: pytest.MonkeyPatch) -> Told:
    told = Told()
    monkeypatch.setattr(transports, "current", lambda: told)
    return told


class Colour(enum.Enum):
    RED = "red"


def deep(levels: int) -> Any:
    value: Any = 1
    for _ in range(levels):
        value = [value]
    return value


def refused(code: str, act: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
    """The refusal; nothing was stored and nothing changed by it."""
    jobs = list(Job.objects.order_by("id").values())
    history, mail = JobEvent.objects.count(), CancelRequest.objects.count()
    with pytest.raises(Refusal) as caught:
        act(*arguments, **options)
    assert caught.value.code == code
    assert list(Job.objects.order_by("id").values()) == jobs
    assert (JobEvent.objects.count(), CancelRequest.objects.count()) == (history, mail)
    return caught.value


class TestStart:
    def test_a_started_job_waits_for_a_worker(self, anna: Any) -> None:
        """B22, B7–B11"""
        before = django_timezone.now() - timedelta(seconds=1)
        shipment = Shipment.objects.create()
        job, created = service.start(
            KIND, {"b": 1, "a": [2]}, scope=Scope("acme", "north"), subject=shipment, idempotency_key="k",
            lock_key="l", created_by=anna, priority=-7, queue="slow.lane", meta={"source": "cron"},
        )  # fmt: skip
        assert created
        assert {name: value for name, value in columns(job).items() if value is not None} == {
            "id": job.id, "kind": KIND, "status": "pending", "tenant_id": "acme", "organization_id": "north",
            "created_by_id": anna.pk, "created_at": job.created_at, "updated_at": job.updated_at,
            "input_text": '{"a":[2],"b":1}', "input_sha256": jsontext.sha256('{"a":[2],"b":1}'),
            "meta": {"source": "cron"}, "idempotency_key": "k", "lock_key": "l",
            "subject_type": "tests.shipment", "subject_id": str(shipment.pk), "lease_epoch": 0, "attempts": 0,
            "processed_at_claim": 0, "queue_name": "slow.lane", "priority": -7, "continuation_seq": 0,
            "redrives": 0, "next_run_at": job.next_run_at, "pending_since": job.pending_since,
            "redrives_since_commit": 0, "lost_deliveries": 0, "consecutive_failures": 0, "interruptions": 0,
            "mirror_attempts": 0, "processed_count": 0,
        }  # fmt: skip
        for moment in (job.created_at, job.updated_at, job.next_run_at, job.pending_since):
            assert moment is not None and before < moment < django_timezone.now() + timedelta(seconds=1)
        assert job.id.version == 7 if hasattr(job.id, "version") else True
        assert row(job).subject == shipment
        assert list(Job.objects.for_subject(shipment)) == [job]

    def test_the_least_that_can_be_said(self) -> None:
        job = start(kinds_class())
        assert (job.input_text, job.input, job.scope) == ("null", None, Scope("default"))
        assert job.input_sha256 == jsontext.sha256("null")
        assert (job.queue_name, job.priority, job.meta, job.created_by_id) == ("default", 0, None, None)

    @pytest.mark.parametrize("said", [None, AnonymousUser()], ids=["nobody", "anonymous"])
    def test_an_anonymous_user_counts_as_none(self, said: Any) -> None:
        assert start(kinds_class(), created_by=said).created_by_id is None

    def test_the_lazy_user_of_a_request_is_a_user(self, anna: Any) -> None:
        job = start(kinds_class(), created_by=SimpleLazyObject(lambda: anna))
        assert job.created_by_id == anna.pk

    def test_text_of_a_template_is_stored_as_text(self) -> None:
        job = start(kinds_class(), {"a": mark_safe("<b>")}, idempotency_key=mark_safe("key"))
        assert (row(job).idempotency_key, row(job).input) == ("key", {"a": "<b>"})

    def test_the_kinds_own_queue_and_the_settings_are_read(self) -> None:
        made(name="tests.queued", queue="imports")
        assert service.start("tests.queued").job.queue_name == "imports"
        with override_settings(DURABLE_JOBS={"DEFAULT_QUEUE": "other", "DEFAULT_TENANT": "acme"}):
            job = service.start(KIND).job
            assert (job.queue_name, job.tenant_id) == ("other", "acme")
            assert service.get(job.id) == job
        assert service.get(job.id) is None

    def test_a_kind_is_found_by_name_class_and_alias(self) -> None:
        renamed = made(name="tests.new_name", aliases=("tests.old_name",))
        for said in ("tests.new_name", "tests.old_name", renamed):
            assert service.start(said).job.kind == "tests.new_name"

    @pytest.mark.parametrize(
        ("value", "text"),
        [
            ({"b": 1, "a": 2}, '{"a":2,"b":1}'),
            ("ü€😀\u2028", '"ü€😀\u2028"'),
            (
                'six characters: \\u0000 and "\\\\u0000"',
                '"six characters: \\\\u0000 and \\"\\\\\\\\u0000\\""',
            ),
            ([1, 1.5, True, None, 2**70, -0.0], "[1,1.5,true,null,1180591620717411303424,-0.0]"),
            (Decimal("1.10"), '"1.10"'),
            (uuid.UUID(int=5), '"00000000-0000-0000-0000-000000000005"'),
            (datetime(2026, 1, 2, 3, 4, 5, 678000, tzinfo=UTC), '"2026-01-02T03:04:05.678Z"'),
            ("", '""'),
            ({}, "{}"),
            (False, "false"),
        ],
        ids=repr,
    )
    def test_input_is_stored_as_one_canonical_text(self, value: Any, text: str) -> None:
        """A26, C077: the bytes that are hashed; the same for one and for many."""
        one = start(kinds_class(), value)
        [(many, _)] = start_many([{"kind": KIND, "input": value}])  # type: ignore[misc]
        for job in (row(one), row(many)):
            assert job.input_text == text
            assert job.input_sha256 == jsontext.sha256(text)

    @pytest.mark.parametrize(
        "what", ["", "nope", "tests.Made", None, 5, b"x", ["tests.made"], object()], ids=repr
    )
    def test_an_unknown_kind_is_refused_and_nothing_stored(self, what: Any) -> None:
        """B23"""
        refused("unknown_kind", service.start, what)

    def test_a_class_that_is_not_registered_is_an_unknown_kind(self) -> None:
        class Loose(Kind):
            name = "tests.loose"

        error = refused("unknown_kind", service.start, Loose)
        assert "tests.loose" in str(error) and KIND in str(error)

    def test_the_instance_of_a_kind_is_no_kind(self) -> None:
        refused("unknown_kind", service.start, kinds.get(KIND))


def kinds_class(name: str = KIND) -> type[Kind]:
    return type(kinds.get(name))


def unsaved_user() -> Any:
    return get_user_model()(username="nobody", pk=987_654)


BAD: list[tuple[str, str, Any]] = [
    *[("input", "input", value) for value in (
        float("nan"), float("inf"), "a\x00b", "\ud800", {1: 2}, (1, 2), {1}, b"x", object(), Colour.RED, int,
        {"\x00": 1}, deep(300), 10**5000, QueryDict("a=1&a=2"), "x" * (1024 * 1024 + 1), iter([1]), 1j,
    )],
    *[("scope", "scope", value) for value in ("acme", ("acme", None), 5, ALL_SCOPES, Scope, {"tenant": "a"})],
    *[("scope", "scope.tenant", Scope(value)) for value in ("", "  ", "x" * 65, None, 5, "a\x00", "\udfff")],
    *[("scope", "scope.organization", Scope("a", value)) for value in ("", " ", "x" * 65, 5, "\x00")],
    *[("subject", "subject", value) for value in (5, "tests.shipment:1", Shipment, Shipment(), Shipment(pk=3))],
    *[(key, key, value) for key in ("idempotency_key", "lock_key") for value in (
        "", "   ", "\t\n", 5, 0, False, b"x", "x" * 201, "a\x00b", "\ud800", uuid.UUID(int=1), ["a"],
        gettext_lazy("key"),
    )],
    *[("if_locked", "if_locked", value) for value in ("skip", "", None, True)],
    *[("created_by", "created_by", value) for value in (5, "anna", True, Shipment(pk=1), object())],
    *[("priority", "priority", value) for value in (101, -101, 1.0, "1", True, None, float("nan"), 2**70)],
    *[("queue", "queue", value) for value in ("", "a b", "ü", "x" * 101, 5, "manual", "-x", "a:b", "a\n", b"x")],
    *[("run_after", "run_after", value) for value in (
        datetime(2030, 1, 1), date(2030, 1, 1), "2030-01-01T00:00:00Z", 60, 60.0, True,
        datetime(9999, 12, 31, 23, 59, tzinfo=UTC), datetime(1, 1, 1, tzinfo=UTC),
        datetime(1, 1, 1, tzinfo=timezone(timedelta(hours=14))),
        datetime(9999, 12, 31, 23, 59, tzinfo=timezone(timedelta(hours=-12))),
        timedelta(seconds=-1), timedelta(days=4000), timedelta.max, timedelta.min,
    )],
    *[("meta", "meta", value) for value in ("x", ["a"], 5, True, QueryDict("a=1&a=2"))],
    *[("meta", "meta.a", {"a": value}) for value in (float("nan"), "\x00", "\ud800", {1}, b"x")],
    ("meta", "meta", {"a": "x" * 17_000}),
    ("meta", "meta", {1: 2}),
]  # fmt: skip


class TestTheDoor:
    """Bad input is refused where it enters, with field, value and way out, and nothing is stored."""

    def check(self, error: Any, field: str) -> None:
        assert isinstance(error, InvalidInput) and isinstance(error, ValueError)
        assert error.field == field or error.field.startswith(f"{field}[0]")
        assert error.way_out and error.way_out in str(error)
        assert len(str(error)) < 1000 and "\x00" not in str(error)

    @pytest.mark.parametrize(
        ("option", "field", "value"),
        BAD,
        ids=[f"{option}{number}" for number, (option, *_) in enumerate(BAD)],
    )
    def test_bad_input_is_refused_where_it_enters(self, option: str, field: str, value: Any) -> None:
        """C072, C074."""
        with pytest.raises(InvalidInput) as caught:
            service.start(KIND, **{option: value})
        self.check(caught.value, field)
        assert Job.objects.count() == 0

    def test_bad_rows_are_refused_one_by_one_and_the_others_start(self) -> None:
        rows: list[dict[str, Any]] = []
        for number, (option, _, value) in enumerate(BAD):
            rows += [{"kind": KIND, "input": number}, {"kind": KIND, option: value}]
        answers = start_many(rows)
        assert [answer.job.input for answer in answers[::2]] == list(range(len(BAD)))  # type: ignore[union-attr]
        for answer, (_, field, _) in zip(answers[1::2], BAD, strict=True):
            self.check(answer, field)
        assert Job.objects.count() == len(BAD)

    def test_an_unsaved_user_is_refused(self) -> None:
        refused("E_JOB_INPUT_INVALID", service.start, KIND, created_by=unsaved_user())

    def test_a_user_deleted_meanwhile_is_refused(self, anna: Any) -> None:
        """The object of a request outlives its row; nobody else's job suffers for it."""
        bob = get_user_model().objects.create_user("bob")
        get_user_model().objects.filter(pk=anna.pk).delete()
        error = refused("E_JOB_INPUT_INVALID", service.start, KIND, created_by=anna)
        assert error.field == "created_by"
        rows = [{"kind": KIND, "input": n, "created_by": user} for n, user in enumerate([bob, anna, None])]
        answers = start_many(rows)
        assert [type(answer).__name__ for answer in answers] == ["Started", "InvalidInput", "Started"]
        assert [job.input for job in Job.objects.order_by("id")] == [0, 2]

    def test_a_deleted_subject_is_refused(self) -> None:
        shipment = Shipment.objects.create()
        shipment.delete()
        refused("E_JOB_INPUT_INVALID", service.start, KIND, subject=shipment)

    def test_a_subject_of_another_database_is_refused(self) -> None:
        """T1, C115: the two could not change in one transaction."""

        class Elsewhere:
            def db_for_write(self, model: Any, **hints: Any) -> str | None:
                return "elsewhere" if model is Shipment else None

        shipment = Shipment.objects.create()
        with override_settings(DATABASE_ROUTERS=[Elsewhere()]):
            error = refused("E_JOB_INPUT_INVALID", service.start, KIND, subject=shipment)
        assert "elsewhere" in str(error) and "default" in str(error)

    def test_a_kind_with_a_mirror_needs_its_subject(self) -> None:
        mirror = StatusMirror("tests.Shipment", open=("queued",), redriven="queued", completed="arrived",
                              failed="lost", cancelled="stopped")  # fmt: skip
        made(name="tests.mirrored", mirror=mirror)
        for subject in (None, Parcel.objects.create()):
            error = refused("E_JOB_INPUT_INVALID", service.start, "tests.mirrored", subject=subject)
            assert error.field == "subject"
        assert service.start("tests.mirrored", subject=Shipment.objects.create()).created

    @pytest.mark.parametrize("option", ["kinds", "Input", "input_", ""])
    def test_an_option_that_start_does_not_know_is_refused(self, option: str) -> None:
        with pytest.raises(TypeError):
            service.start(KIND, **{option: 1})
        [answer] = start_many([{"kind": KIND, option: 1}])
        assert isinstance(answer, InvalidInput) and answer.field == "row"
        assert Job.objects.count() == 0

    def test_the_limits_are_the_settings(self) -> None:
        with override_settings(DURABLE_JOBS={"MAX_INPUT_BYTES": 10, "MAX_META_BYTES": 10}):
            assert service.start(KIND, "x" * 8).created
            error = refused("E_JOB_INPUT_INVALID", service.start, KIND, "x" * 9)
            assert "MAX_INPUT_BYTES" in error.way_out
            refused("E_JOB_INPUT_INVALID", service.start, KIND, "ü" * 5)
            refused("E_JOB_INPUT_INVALID", service.start, KIND, meta={"a": "xxxx"})

    @pytest.mark.parametrize(
        "value",
        ["x" * 200, "ü" * 200, "😀" * 200, " k ", "a/b:c%d'e\"f", "\u200b"],
        ids=["200", "200 ü", "200 emoji", "blanks around", "punctuation", "zero width"],
    )
    def test_any_other_text_is_a_key(self, value: str) -> None:
        job = start(kinds_class(), idempotency_key=value, lock_key=value)
        assert (row(job).idempotency_key, row(job).lock_key) == (value, value)
        assert start(kinds_class(), idempotency_key=value, lock_key=value) == job

    @pytest.mark.parametrize(
        "bad",
        [{"actor": 5}, {"actor": object()}, {"reason": None}, {"reason": 5}, {"reason": ["x"]}],
        ids=repr,
    )
    @pytest.mark.parametrize("act", ["cancel", "redrive"])
    def test_an_operators_words_are_checked(self, act: str, bad: dict[str, Any]) -> None:
        job = make_job("failed" if act == "redrive" else "pending", kind=KIND)
        error = refused("E_JOB_INPUT_INVALID", getattr(service, act), job.id, **bad)
        assert error.field in bad and error.way_out

    @pytest.mark.parametrize("scope", ["acme", 5, Scope(""), Scope("a", ""), Scope("x" * 65)], ids=repr)
    @pytest.mark.parametrize("act", ["get", "cancel", "redrive"])
    def test_a_scope_that_is_none_is_refused(self, act: str, scope: Any) -> None:
        job = make_job("failed", kind=KIND)
        refused("E_JOB_INPUT_INVALID", getattr(service, act), job.id, scope=scope)


class TestRunAfter:
    @pytest.mark.parametrize(
        "moment",
        [
            datetime(2030, 5, 6, 7, 8, 9, 123456, tzinfo=UTC),
            datetime(2030, 5, 6, 7, 8, 9, tzinfo=UTC),
            datetime(2030, 5, 6, 7, 8, 9, 123000, tzinfo=ZoneInfo("Asia/Kathmandu")),
            datetime(2030, 10, 27, 2, 30, fold=1, tzinfo=ZoneInfo("Europe/Berlin")),
            datetime(2030, 3, 31, 2, 30, tzinfo=ZoneInfo("Europe/Berlin")),
            datetime(2001, 1, 1, tzinfo=UTC),
        ],
        ids=str,
    )
    def test_a_job_is_due_at_the_instant_that_was_named(self, moment: datetime) -> None:
        """C072, B19, C-DST: any zone, to the microsecond, for one and for many."""
        one = start(kinds_class(), run_after=moment)
        [(many, _)] = start_many([{"kind": KIND, "run_after": moment}])  # type: ignore[misc]
        assert row(one).next_run_at == row(many).next_run_at == moment.astimezone(UTC)

    @pytest.mark.parametrize(
        "delay", [timedelta(0), timedelta(seconds=1.5), timedelta(hours=3), timedelta(days=3660)]
    )
    def test_a_delay_counts_from_the_databases_now(self, delay: timedelta) -> None:
        """B19: a skewed clock of this process changes nothing."""
        one = start(kinds_class(), run_after=delay)
        [(many, _)] = start_many([{"kind": KIND, "run_after": delay}])  # type: ignore[misc]
        for job in (row(one), row(many)):
            assert job.next_run_at is not None
            assert abs((job.next_run_at - job.created_at - delay).total_seconds()) < 0.05

    def test_no_time_means_now(self) -> None:
        job = start(kinds_class())
        assert job.next_run_at is not None and job.next_run_at <= django_timezone.now() + timedelta(seconds=1)


class TestIdempotency:
    @pytest.mark.parametrize("status", ALL_STATUSES)
    def test_a_repeat_gives_the_same_job_whatever_became_of_it(self, status: str) -> None:
        """B24, A16, T20: nothing is created, nothing changed, nothing run again."""
        job = make_job(status, kind=KIND, input={"a": 1}, idempotency_key="k")
        before = columns(job)
        again, created = service.start(KIND, {"a": 1}, idempotency_key="k")
        assert (again.id, created) == (job.id, False)
        assert (columns(job), Job.objects.count()) == (before, 1)

    @pytest.mark.parametrize("status", ALL_STATUSES)
    def test_another_input_under_the_key_is_refused(self, status: str) -> None:
        """A17, C2"""
        job = make_job(status, kind=KIND, input={"a": 1}, idempotency_key="k")
        error = refused("E_JOB_IDEMPOTENCY_CONFLICT", service.start, KIND, {"a": 2}, idempotency_key="k")
        assert (error.key, error.job_id) == ("k", job.id)
        [answer] = start_many([{"kind": KIND, "input": {"a": 2}, "idempotency_key": "k"}])
        assert isinstance(answer, IdempotencyConflict)

    def test_equal_values_are_the_same_input(self) -> None:
        """A18: identity is of the canonical bytes."""
        job = start(kinds_class(), {"a": 1, "b": [2, 3]}, idempotency_key="k")
        assert service.start(KIND, {"b": [2, 3], "a": 1}, idempotency_key="k") == (job, False)

    @pytest.mark.parametrize(
        "other", [{"a": 1.0}, {"a": "1"}, {"a": True}, {"a": [1]}, {"a": 1, "b": None}], ids=repr
    )
    def test_values_that_only_look_alike_are_another_input(self, other: Any) -> None:
        start(kinds_class(), {"a": 1}, idempotency_key="k")
        refused("E_JOB_IDEMPOTENCY_CONFLICT", service.start, KIND, other, idempotency_key="k")

    def test_options_other_than_the_input_belong_to_the_first(self) -> None:
        first = start(
            kinds_class(), 1, idempotency_key="k", priority=5, queue="a", run_after=timedelta(hours=1)
        )
        again, created = service.start(KIND, 1, idempotency_key="k", priority=-5, queue="b", meta={"x": 1})
        assert (again, created) == (first, False)
        assert (again.priority, again.queue_name, again.meta) == (5, "a", None)

    def test_an_earlier_row_that_kept_the_hash_alone_coalesces(self) -> None:
        """A19: and it is not filled in."""
        job = make_job("completed", kind=KIND, input={"a": 1}, idempotency_key="k")
        change(job, input_text=None)
        assert service.start(KIND, {"a": 1}, idempotency_key="k") == (job, False)
        assert row(job).input_text is None
        refused("E_JOB_IDEMPOTENCY_CONFLICT", service.start, KIND, {"a": 2}, idempotency_key="k")

    def test_an_earlier_row_whose_bytes_were_changed_is_a_conflict(self) -> None:
        """A17: hash and bytes must both be equal."""
        job = make_job("completed", kind=KIND, input={"a": 1}, idempotency_key="k")
        change(job, input_text='{"a": 1}')
        refused("E_JOB_IDEMPOTENCY_CONFLICT", service.start, KIND, {"a": 1}, idempotency_key="k")

    def test_a_key_belongs_to_its_kind_tenant_and_organization(self) -> None:
        """C1, B21"""
        made(name="tests.other")
        scopes = [Scope("a"), Scope("b"), Scope("a", "x"), Scope("a", "y")]
        jobs = {
            service.start(name, 1, scope=scope, idempotency_key="k").job.id
            for name in (KIND, "tests.other")
            for scope in scopes
        }
        assert len(jobs) == 8
        assert not any(service.start(KIND, 1, scope=scope, idempotency_key="k").created for scope in scopes)

    def test_a_key_outlives_the_renaming_of_its_kind(self) -> None:
        """A row that carries the old name answers for the key, as it does for everything else."""
        earlier = make_job("completed", kind="tests.old", input=1, idempotency_key="k")
        made(name="tests.renamed", aliases=("tests.old",))
        assert service.start("tests.renamed", 1, idempotency_key="k") == (earlier, False)
        refused("E_JOB_IDEMPOTENCY_CONFLICT", service.start, "tests.renamed", 2, idempotency_key="k")
        [answer] = start_many([{"kind": "tests.renamed", "input": 1, "idempotency_key": "k"}])
        assert answer == (earlier, False)
        assert service.start("tests.renamed", 1, idempotency_key="other").created

    def test_a_repeat_announces_nothing(self, transport: Told) -> None:
        """B30"""
        start(kinds_class(), idempotency_key="k")
        start(kinds_class(), idempotency_key="k")
        assert len(transport.published) == 1


class TestLockKey:
    @pytest.mark.parametrize("status", ALL_STATUSES)
    def test_one_live_job_holds_it(self, status: str) -> None:
        """C015, C050, B32, B34, B35: held between retries and with a verdict, free after any end, and held jobs hold nothing."""
        holder = make_job(status, kind=KIND, lock_key="l")
        if status not in LIVE:
            assert service.start(KIND, lock_key="l").created
            return
        error = refused("lock_key_held", service.start, KIND, lock_key="l")
        assert (error.lock_key, error.held_by) == ("l", holder.id)
        assert str(holder.id) in str(error)

    @pytest.mark.parametrize("status", ["pending", "running", "retrying"])
    def test_the_holder_may_be_asked_for_instead(self, status: str) -> None:
        """F5"""
        holder = make_job(status, kind=KIND, lock_key="l")
        before = columns(holder)
        assert service.start(KIND, {"other": 1}, lock_key="l", if_locked="return") == (holder, False)
        assert columns(holder) == before

    def test_a_yield_keeps_it(self) -> None:
        """B35"""
        kinds.unregister(KIND)
        job = start(made(lambda ctx: Yield()), lock_key="l")
        run_slice(job)
        refused("lock_key_held", service.start, KIND, lock_key="l")

    def test_it_belongs_to_the_scope_and_to_all_its_kinds(self) -> None:
        """B33"""
        made(name="tests.other")
        for scope in (Scope("a"), Scope("b"), Scope("a", "x"), Scope("a", "y")):
            assert service.start(KIND, scope=scope, lock_key="l").created
            refused("lock_key_held", service.start, "tests.other", scope=scope, lock_key="l")

    def test_the_same_key_and_the_same_lock_give_the_same_job(self) -> None:
        """B27: a safe repeat is not refused as busy."""
        job = start(kinds_class(), 1, idempotency_key="k", lock_key="l")
        assert service.start(KIND, 1, idempotency_key="k", lock_key="l") == (job, False)
        refused("E_JOB_IDEMPOTENCY_CONFLICT", service.start, KIND, 2, idempotency_key="k", lock_key="l")
        refused("lock_key_held", service.start, KIND, 1, idempotency_key="k2", lock_key="l")

    def test_a_holder_that_vanished_meanwhile_is_still_a_refusal(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """B34, P20"""
        make_job("pending", kind=KIND, lock_key="l")
        monkeypatch.setattr(store, "by_lock_key", lambda key, scope: None)
        error = refused("lock_key_held", service.start, KIND, lock_key="l")
        assert error.held_by is None

    def test_a_holder_that_ends_between_refusal_and_look_makes_room(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """P20: a second insert succeeds."""
        holder = make_job("pending", kind=KIND, lock_key="l")
        real = store.by_lock_key

        def by_lock_key(key: str, scope: Scope) -> Job | None:
            service.cancel(holder.id)
            return real(key, scope)

        monkeypatch.setattr(store, "by_lock_key", by_lock_key)
        assert service.start(KIND, lock_key="l").created

    @pytest.mark.parametrize("lock_key", [None, "l"])
    def test_an_id_that_exists_already_is_no_refusal(
        self, lock_key: str | None, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """B28, B37: a real bug must not pass for "busy"."""
        job = start(kinds_class())
        monkeypatch.setattr(service, "uuid7", lambda: job.id)
        with pytest.raises(DurableJobsError) as caught:
            service.start(KIND, lock_key=lock_key)
        if lock_key is None:
            assert not isinstance(caught.value, Refusal) and str(job.id) in str(caught.value)
        assert Job.objects.count() == 1


class TestTransactions:
    def test_job_and_row_commit_or_vanish_together(self, transport: Told) -> None:
        """B29, C053, C058"""
        with contextlib.suppress(KeyError), transaction.atomic():
            Parcel.objects.create(label="lost")
            lost = service.start(KIND, 1).job
            assert service.get(lost.id) == lost
            raise KeyError
        with transaction.atomic():
            Parcel.objects.create(label="kept")
            with contextlib.suppress(KeyError), transaction.atomic():
                service.start(KIND, 2)
                raise KeyError
            kept = service.start(KIND, 3).job
            [(many, _)] = start_many([{"kind": KIND, "input": 4}])  # type: ignore[misc]
        assert {job.id for job in Job.objects.all()} == {kept.id, many.id}
        assert [parcel.label for parcel in Parcel.objects.all()] == ["kept"]

    def test_created_is_told_after_the_commit_or_not_at_all(self) -> None:
        """B185"""
        from durable_jobs import signals

        told: list[Any] = []

        def receive(sender: str, job: Job, **_: Any) -> None:
            told.append((sender, job.input))

        signals.job_created.connect(receive)
        try:
            with contextlib.suppress(KeyError), transaction.atomic():
                service.start(KIND, "lost")
                raise KeyError
            with transaction.atomic():
                service.start(KIND, "kept")
                start_many([{"kind": KIND, "input": "many"}])
                assert told == []
            service.start(KIND, "alone")
        finally:
            signals.job_created.disconnect(receive)
        assert told == [(KIND, "kept"), (KIND, "many"), (KIND, "alone")]

    @pytest.mark.parametrize("way", ["lock", "conflict", "repeat", "many"])
    def test_the_callers_transaction_stays_usable_after_a_refusal(self, way: str) -> None:
        """B25, T6, C044: on PostgreSQL a unique violation would abort it."""
        make_job("pending", kind=KIND, input=1, lock_key="l", idempotency_key="k")
        with transaction.atomic():
            Parcel.objects.create(label="before")
            match way:
                case "lock":
                    with pytest.raises(LockKeyHeld):
                        service.start(KIND, lock_key="l")
                case "conflict":
                    with pytest.raises(IdempotencyConflict):
                        service.start(KIND, 2, idempotency_key="k")
                case "repeat":
                    assert not service.start(KIND, 1, idempotency_key="k").created
                case "many":
                    answers = start_many([{"kind": KIND, "lock_key": "l"}, {"kind": KIND, "input": 9}])
                    assert [type(answer).__name__ for answer in answers] == ["LockKeyHeld", "Started"]
            Parcel.objects.create(label="after")
            assert Job.objects.count() == (2 if way == "many" else 1)
        assert [parcel.label for parcel in Parcel.objects.order_by("id")] == ["before", "after"]

    def test_bad_input_costs_the_callers_transaction_nothing(self) -> None:
        with transaction.atomic():
            with pytest.raises(InvalidInput):
                service.start(KIND, {"x": "\x00"})
            Parcel.objects.create(label="after")
        assert Parcel.objects.count() == 1


def blocked(future: Future[Any], seconds: float = 0.15) -> bool:
    time.sleep(seconds)
    return not future.done()


class TestRaces:
    @pytest.mark.parametrize("ending", ["commit", "rollback"])
    @pytest.mark.parametrize("key", ["idempotency_key", "lock_key"])
    def test_a_loser_waits_for_the_winner_and_takes_what_comes_of_it(
        self, key: str, ending: str, second_connection: OtherConnection
    ) -> None:
        """B26, B32"""
        options: dict[str, Any] = {key: "k"}
        winner: Job | None = None
        with contextlib.suppress(KeyError), transaction.atomic():
            winner = service.start(KIND, 1, **options).job
            loser = second_connection.begin(service.start, KIND, 1, **options)
            assert blocked(loser)
            if ending == "rollback":
                raise KeyError
        assert winner is not None
        if ending == "rollback":
            job, created = loser.result(10)
            assert created and job.id != winner.id
        elif key == "idempotency_key":
            assert loser.result(10) == (winner, False)
        else:
            with pytest.raises(LockKeyHeld) as caught:
                loser.result(10)
            assert caught.value.held_by == winner.id
        assert Job.objects.count() == 1

    @pytest.mark.parametrize("many", [False, True], ids=["start", "start_many"])
    def test_of_many_at_once_one_is_made(
        self, many: bool, other_connections: Callable[[], OtherConnection]
    ) -> None:
        """A20, C044, C047: every call gets the same job."""
        others = [other_connections() for _ in range(6)]
        gate = threading.Barrier(6)

        def call() -> Any:
            gate.wait(10)
            if many:
                return start_many([{"kind": KIND, "input": 1, "idempotency_key": "k"}])[0]
            return service.start(KIND, 1, idempotency_key="k")

        answers = [future.result(30) for future in [other.begin(call) for other in others]]
        assert len({job.id for job, _ in answers}) == 1
        assert sorted(created for _, created in answers) == [False] * 5 + [True]
        assert Job.objects.count() == 1

    def test_of_many_at_once_one_gets_the_lock(
        self, other_connections: Callable[[], OtherConnection]
    ) -> None:
        """B32"""
        others = [other_connections() for _ in range(6)]
        gate = threading.Barrier(6)

        def call() -> str:
            gate.wait(10)
            try:
                return str(service.start(KIND, lock_key="l").job.id)
            except LockKeyHeld as error:
                return f"held by {error.held_by}"

        answers = sorted(future.result(30) for future in [other.begin(call) for other in others])
        [job] = Job.objects.all()
        assert answers == [str(job.id)] + [f"held by {job.id}"] * 5

    def test_starting_many_in_opposite_orders_does_not_deadlock(
        self, other_connections: Callable[[], OtherConnection]
    ) -> None:
        """P13"""
        keys = [f"k{number:03}" for number in range(150)]
        gate = threading.Barrier(2)

        def call(ordered: list[str]) -> int:
            gate.wait(10)
            answers = start_many({"kind": KIND, "input": 1, "idempotency_key": key} for key in ordered)
            return sum(answer.created for answer in answers)  # type: ignore[union-attr]

        futures = [other_connections().begin(call, order) for order in (keys, keys[::-1])]
        assert sum(future.result(60) for future in futures) == 150
        assert Job.objects.count() == 150


def varied_rows(user: Any) -> list[dict[str, Any]]:
    """With keys that meet each other, and rows that are refused at the door."""
    rows: list[dict[str, Any]] = []
    for number in range(160):
        row: dict[str, Any] = {"kind": KIND, "input": number}
        match number % 8:
            case 1:
                row |= {"idempotency_key": f"k{number % 48}", "priority": 3}
            case 2:
                row |= {"lock_key": f"l{number % 80}", "if_locked": "return" if number % 3 else "raise"}
            case 3:
                row |= {"meta": {"é": [1.0, None]}, "created_by": user}
            case 4:
                row |= {"run_after": timedelta(hours=1), "queue": "q", "scope": Scope("acme", "north")}
            case 5:
                row |= {"hold": True}
            case 6:
                row |= {"priority": 101} if number % 3 else {"kind": "nobody.knows"}
        rows.append(row)
    return rows


class TestStartMany:
    def test_each_row_has_its_answer_in_its_place(self) -> None:
        """F5"""
        earlier = make_job("completed", kind=KIND, input=1, idempotency_key="k")
        holder = make_job("running", kind=KIND, lock_key="l")
        answers = start_many(
            [
                {"kind": KIND, "input": 1, "idempotency_key": "k"},
                {"kind": "nope"},
                {"kind": KIND, "lock_key": "l"},
                {"kind": KIND, "lock_key": "l", "if_locked": "return"},
                {"kind": KIND, "input": 2, "idempotency_key": "k"},
                {"kind": KIND, "input": {"x": float("nan")}},
                {"kind": KIND, "input": "made"},
                {},
                None,  # type: ignore[list-item]
                5,  # type: ignore[list-item]
                "tests.made",  # type: ignore[list-item]
                {5: 6, "kind": KIND},  # type: ignore[dict-item]
                {"kind": []},
            ]
        )
        assert answers[0] == (earlier, False)
        assert isinstance(answers[1], UnknownKind)
        assert isinstance(answers[2], LockKeyHeld) and answers[2].held_by == holder.id
        assert answers[3] == (holder, False)
        assert isinstance(answers[4], IdempotencyConflict)
        assert isinstance(answers[5], InvalidInput)
        made_job, created = answers[6]  # type: ignore[misc]
        assert created and row(made_job).input == "made"
        assert [type(answer).__name__ for answer in answers[7:]] == [
            "UnknownKind", "InvalidInput", "InvalidInput", "InvalidInput", "InvalidInput", "UnknownKind",
        ]  # fmt: skip

    def test_duplicates_within_the_call_are_one_job(self) -> None:
        answers = start_many(
            [
                {"kind": KIND, "input": 1, "idempotency_key": "k"},
                {"kind": KIND, "input": 1, "idempotency_key": "k"},
                {"kind": KIND, "input": 2, "idempotency_key": "k"},
                {"kind": KIND, "input": 3, "lock_key": "l"},
                {"kind": KIND, "input": 4, "lock_key": "l"},
                {"kind": KIND, "input": 5, "lock_key": "l", "if_locked": "return"},
            ]
        )
        assert Job.objects.count() == 2
        keyed = [answer for answer in answers[:3] if isinstance(answer, tuple)]
        assert len({job.id for job, _ in keyed}) == 1
        assert [created for _, created in keyed].count(True) == 1
        assert sum(isinstance(answer, IdempotencyConflict) for answer in answers[:3]) in (1, 2)
        locked = answers[3:]
        assert sum(isinstance(answer, tuple) and answer.created for answer in locked) == 1
        [holder] = Job.objects.filter(lock_key="l")
        for answer in locked:
            assert (answer.job if isinstance(answer, tuple) else answer.held_by) in (holder, holder.id)  # type: ignore[union-attr]

    def test_the_first_of_two_equal_keys_wins(self) -> None:
        """The row that the caller wrote first, whatever the order in the statement."""
        first, second = start_many(
            [{"kind": KIND, "input": 2, "lock_key": "l"}, {"kind": KIND, "input": 1, "lock_key": "l"}]
        )
        assert isinstance(first, tuple) and first.created and isinstance(second, LockKeyHeld)

    def test_more_rows_than_one_statement_takes(self, django_assert_max_num_queries: Any) -> None:
        """§14: 1,200 rows in three statements, each with its own answer."""
        rows = [{"kind": KIND, "input": n, "idempotency_key": f"k{n * 7 % 1200}"} for n in range(1200)]
        with django_assert_max_num_queries(20):
            answers = start_many(iter(rows))
        assert [answer.job.input for answer in answers] == list(range(1200))  # type: ignore[union-attr]
        assert all(answer.created for answer in answers)  # type: ignore[union-attr]
        assert Job.objects.count() == 1200

    @pytest.mark.parametrize("together", [True, False], ids=["in a transaction", "alone"])
    def test_both_ways_leave_the_same_rows(
        self, together: bool, settings: Any, anna: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """With PIPELINE and without it: the same rows, answers and announcements, refusals in their midst."""
        monkeypatch.setattr(service, "MANY", 50)
        left = []
        for pipeline in (True, False):
            settings.DURABLE_JOBS = {"PIPELINE": pipeline}
            told: list[Any] = []

            def hear(sender: Any, job: Job, told: list[Any] = told, **more: Any) -> None:
                told.append((job.input, connection.in_atomic_block))

            signals.job_created.connect(hear)
            try:
                with transaction.atomic() if together else contextlib.nullcontext():
                    answers = start_many(varied_rows(anna))
            finally:
                signals.job_created.disconnect(hear)
            jobs = list(Job.objects.order_by("input_text"))
            same = {"id", "created_at", "updated_at", "pending_since", "next_run_at"}
            said = [
                (answer.created, answer.job.input) if isinstance(answer, tuple) else answer.code
                for answer in answers
            ]
            left.append(([columns(job, *same) for job in jobs], said, told))
            with connection.cursor() as cursor:
                cursor.execute("DELETE FROM durable_jobs_job")
        assert left[0] == left[1]
        _, said, told = left[0]
        assert {"E_JOB_INPUT_INVALID", "E_JOB_IDEMPOTENCY_CONFLICT", "lock_key_held"} <= {
            one for one in said if isinstance(one, str)
        }
        assert len(told) == sum(one[0] for one in said if isinstance(one, tuple))

    def test_no_rows_are_no_jobs(self) -> None:
        assert start_many([]) == []

    def test_rows_carry_every_option(self, anna: Any) -> None:
        shipment = Shipment.objects.create()
        options = {
            "scope": Scope("acme", "north"), "subject": shipment, "idempotency_key": "k", "lock_key": "l",
            "created_by": anna, "priority": 9, "queue": "q", "run_after": timedelta(hours=1), "meta": {"a": "😀"},
        }  # fmt: skip
        [(many, _)] = start_many([{"kind": KIND, "input": {"a": 1}, **options}])  # type: ignore[misc]
        change(many, idempotency_key=None, lock_key=None)
        one = start(kinds_class(), {"a": 1}, **options)
        different = {
            "id",
            "created_at",
            "updated_at",
            "pending_since",
            "next_run_at",
            "idempotency_key",
            "lock_key",
        }
        assert columns(one, *different) == columns(many, *different)

    def test_one_announcement_for_each_route(self, transport: Told) -> None:
        """§18"""
        start_many([{"kind": KIND, "queue": queue} for queue in "aabbb"])
        assert sorted(job.queue_name for job in transport.published) == ["a", "b"]


class TestGet:
    def test_a_job_is_seen_in_its_own_scope_only(self) -> None:
        """B21: NULL matches only NULL, and a foreign job looks like none."""
        scopes = [Scope("a"), Scope("b"), Scope("a", "x"), Scope("a", "y")]
        jobs = [start(kinds_class(), scope=scope) for scope in scopes]
        for job, scope in zip(jobs, scopes, strict=True):
            assert [service.get(job.id, scope=other) for other in scopes] == [
                job if other == scope else None for other in scopes
            ]
            assert service.get(job.id) is None
            assert service.get(job.id, scope=ALL_SCOPES) == job

    @pytest.mark.parametrize("no_id", ["", "nope", None, 5, "x" * 10_000, "\x00", uuid.UUID(int=0)], ids=repr)
    def test_what_is_no_id_finds_nothing(self, no_id: Any) -> None:
        assert service.get(no_id) is None
        for act in (service.cancel, service.redrive):
            with pytest.raises(NotFound):
                act(no_id)

    def test_an_id_may_be_text(self) -> None:
        job = start(kinds_class())
        assert service.get(str(job.id)) == service.get(str(job.id).upper()) == job


class TestCancel:
    @pytest.mark.parametrize("status", ["pending", "held", "retrying", "verdict"])
    def test_what_does_not_run_ends_at_once(self, status: str, transport: Told, anna: Any) -> None:
        """B175, B99, B104: with its hooks, then the withdrawal of its delivery."""
        calls: list[str] = []
        kinds.unregister(KIND)
        made(
            None,
            on_cancel=lambda self, job: calls.append("on_cancel"),
            on_transition=lambda self, job: calls.append(job.status) or 1,
            on_redrive=lambda self, job: 1,
            after_transition=lambda self, job: calls.append("after"),
        )
        job = make_job(status, kind=KIND)
        answer = service.cancel(job.id, actor=anna, reason="wrong\x00 file")
        now = row(job)
        assert answer.status == now.status == "cancelled"
        assert (now.next_run_at, now.pending_since, now.verdict, now.lease_owner) == (None,) * 4
        assert now.cancel_requested_at and now.finished_at and now.cancelled_by_id == anna.pk
        assert calls == ["on_cancel", "cancelled", "after"]
        assert [job.id for job in transport.withdrawn] == [job.id]
        requested, ended = job.events.order_by("id")
        assert (requested.event, requested.actor, requested.actor_id, requested.reason) == (
            "cancel_requested", f"user:{anna.pk} anna", str(anna.pk), "wrong\ufffd file",
        )  # fmt: skip
        assert (ended.event, ended.actor) == ("cancelled", f"user:{anna.pk} anna")

    def test_running_work_is_asked_and_left_running(self, transport: Told, anna: Any) -> None:
        """B175, B97: the first time and the first requester are kept."""
        job = make_job("running", kind=KIND, owner=OWNER)
        bob = get_user_model().objects.create_user("bob")
        first = service.cancel(job.id, actor=anna)
        before = columns(job)
        second = service.cancel(job.id, actor=bob)
        assert first.status == second.status == "running"
        assert (row(job).cancelled_by_id, columns(job)) == (anna.pk, before)
        assert first.cancel_requested_at == second.cancel_requested_at is not None
        assert [job.id for job in transport.hinted] == [job.id] * 2
        assert events(job) == ["cancel_requested"] * 2

    @pytest.mark.parametrize("status", ["completed", "failed", "parked", "cancelled"])
    def test_a_finished_job_is_not_cancellable(self, status: str) -> None:
        """A47, §9"""
        job = make_job(status, kind=KIND)
        error = refused("not_cancellable", service.cancel, job.id)
        assert isinstance(error, NotCancellable) and error.status == row(job).status

    def test_a_foreign_job_is_not_found(self) -> None:
        """B21, B178"""
        for scope in (Scope("a"), Scope("a", "x")):
            job = start(kinds_class(), scope=scope)
            for other in (None, Scope("b"), Scope("a", "y"), Scope("a" if scope.organization else "b")):
                error = refused("not_found", service.cancel, job.id, scope=other)
                assert str(error) == str(NotFound(job.id))
            assert service.cancel(job.id, scope=scope).status == "cancelled"
        refused("not_found", service.cancel, uuid.uuid4())

    def test_a_cancel_of_the_projects_row_cancels_its_jobs(self, anna: Any) -> None:
        """B105: with their hooks; a row that has no job, or none that lives, is no error."""
        calls: list[Any] = []
        kinds.unregister(KIND)
        made(
            None,
            on_cancel=lambda self, job: calls.append(job.id),
            on_transition=lambda self, job: 1,
            on_redrive=lambda self, job: 1,
        )
        shipment, other = Shipment.objects.create(), Shipment.objects.create()
        assert service.cancel_subject(shipment) == service.cancel_subject(Shipment()) == []
        ended = start(kinds_class(), subject=shipment)
        service.cancel(ended.id)
        waiting, running, held = (
            start(kinds_class(), subject=shipment, hold=hold) for hold in (False, False, True)
        )
        claim(running)
        foreign = start(kinds_class(), subject=shipment, scope=Scope("b"))
        others = start(kinds_class(), subject=other)
        with transaction.atomic():
            answers = service.cancel_subject(shipment, actor=anna, reason="wrong file", operation="o1")
        assert [(job.id, job.status) for job in answers] == [
            (waiting.id, "cancelled"), (running.id, "running"), (held.id, "cancelled"),
        ]  # fmt: skip
        assert row(running).cancel_requested_at is not None
        assert calls == [ended.id, waiting.id, held.id]
        assert {row(job).cancel_requested_at for job in (foreign, others)} == {None}
        assert {event.actor_id for event in waiting.events.filter(event="cancel_requested")} == {str(anna.pk)}
        assert [job.id for job in service.cancel_subject(shipment, scope=ALL_SCOPES)] == [
            running.id, foreign.id,
        ]  # fmt: skip

    def test_a_job_that_ends_meanwhile_is_left_out_of_a_cancel_of_its_row(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """B105."""
        shipment = Shipment.objects.create()
        first, second = start(kinds_class(), subject=shipment), start(kinds_class(), subject=shipment)
        real = service.cancel

        def ends_first(job_id: Any, **options: Any) -> Job:
            if job_id == first.id:
                run_slice(first)
            return real(job_id, **options)

        monkeypatch.setattr(service, "cancel", ends_first)
        assert [job.id for job in service.cancel_subject(shipment)] == [second.id]
        assert row(first).status == "completed"

    def test_all_scopes_must_be_said(self) -> None:
        job = start(kinds_class(), scope=Scope("a", "x"))
        assert service.cancel(job.id, scope=ALL_SCOPES).status == "cancelled"

    @pytest.mark.parametrize("status", ["pending", "retrying", "running"])
    def test_a_kind_unknown_here_keeps_the_request(self, status: str) -> None:
        """§9, C034: a process that knows the kind ends it, with its hooks."""
        job = make_job(status, kind="tests.elsewhere", owner=OWNER)
        answer = service.cancel(job.id)
        assert answer.status == row(job).status != "cancelled"
        assert row(job).cancel_requested_at is not None

    @pytest.mark.parametrize("status", ["pending", "held", "retrying"])
    def test_a_failing_hook_leaves_the_request(self, status: str) -> None:
        """B100: the caller gets the job, not the error; the reconciler settles it."""
        kinds.unregister(KIND)
        made(None, on_transition=lambda self, job: 0, on_redrive=lambda self, job: 1)
        job = make_job(status, kind=KIND)
        for outer in (contextlib.nullcontext(), transaction.atomic()):
            with outer:
                answer = service.cancel(job.id)
            assert answer.status == job.status
            assert answer.cancel_requested_at is not None
        assert row(job).mirror_attempts == 2
        assert events(job) == ["cancel_requested", "mirror_failed"] * 2

    def test_it_joins_the_callers_transaction(self, transport: Told) -> None:
        """C16, T22"""
        job = start(kinds_class())
        before = columns(job)
        with contextlib.suppress(KeyError), transaction.atomic():
            assert service.cancel(job.id).status == "cancelled"
            raise KeyError
        assert (columns(job), events(job)) == (before, [])

    @pytest.mark.parametrize("status", ["completed", "missing"])
    def test_a_refusal_leaves_the_callers_transaction_usable(self, status: str) -> None:
        job = make_job("completed", kind=KIND)
        with transaction.atomic():
            with pytest.raises(Refusal):
                service.cancel(job.id if status == "completed" else uuid.uuid4())
            Parcel.objects.create(label="goes on")
        assert Parcel.objects.count() == 1

    def test_losing_the_race_to_a_claim_leaves_the_driver_to_observe(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """B104: a job that runs is never ended from outside."""
        job = start(kinds_class())
        real = store.cancel_waiting

        def claimed_first(*arguments: Any, **options: Any) -> Job | None:
            claim(job)
            return real(*arguments, **options)

        monkeypatch.setattr(store, "cancel_waiting", claimed_first)
        answer = service.cancel(job.id)
        assert answer.status == row(job).status == "running"
        assert row(job).cancel_requested_at is not None and row(job).lease_owner == OWNER

    @pytest.mark.parametrize(
        ("actor", "text"),
        [("cli:deploy@web3", "cli:deploy@web3"), ("", ""), (None, ""), (AnonymousUser(), ""), ("x" * 300, "x" * 200),
         ("a\x00b", "a\ufffdb")],
        ids=repr,
    )  # fmt: skip
    def test_who_asked_is_kept_as_text(self, actor: Any, text: str) -> None:
        """F17"""
        job = make_job("running", kind=KIND)
        service.cancel(job.id, actor=actor)
        [event] = job.events.all()
        assert (event.actor, event.actor_id, row(job).cancelled_by_id) == (text, None, None)


@contextlib.contextmanager
def row_locked(other: OtherConnection, job: Job) -> Iterator[None]:
    """Another connection holds the job's row in an open transaction."""
    other.enter(transaction.atomic())
    other.run(lambda: Job._base_manager.select_for_update().get(pk=job.pk))
    try:
        yield
    finally:
        other.leave()


class TestLockedRows:
    """F16, P11: what an operator does never waits for a slice."""

    @pytest.mark.postgres_only
    @pytest.mark.parametrize("status", ["running", "pending", "retrying", "held"])
    def test_a_cancel_of_a_locked_row_goes_to_the_mailbox(
        self, status: str, second_connection: OtherConnection, anna: Any
    ) -> None:
        job = make_job(status, kind=KIND, owner=OWNER)
        with row_locked(second_connection, job):
            begun = time.monotonic()
            answer = service.cancel(job.id, actor=anna, reason="r")
            assert time.monotonic() - begun < 1
        assert answer.status == row(job).status == job.status
        [mail] = CancelRequest.objects.all()
        assert (mail.job_id, mail.actor, mail.reason) == (job.id, f"user:{anna.pk} anna", "r")
        assert row(job).cancel_requested_at is None
        folded = store.fold_cancel(job.id)
        assert folded is not None and folded.cancelled_by_id == anna.pk
        assert folded.cancel_requested_at == mail.requested_at
        assert CancelRequest.objects.count() == 0

    @pytest.mark.postgres_only
    def test_two_open_transactions_may_mail_the_same_job(
        self, other_connections: Callable[[], OtherConnection]
    ) -> None:
        """§3: a unique key would make them wait for each other."""
        job = make_job("running", kind=KIND, owner=OWNER)
        locker, one, two = (other_connections() for _ in range(3))
        with row_locked(locker, job):
            for other in (one, two):
                other.enter(transaction.atomic())
            for other in (one, two):
                assert other.begin(service.cancel, job.id).result(5).status == "running"
            for other in (one, two):
                other.leave()
        assert CancelRequest.objects.count() == 2

    @pytest.mark.sqlite_only
    def test_a_cancel_of_a_locked_file_waits_and_then_refuses(
        self, second_connection: OtherConnection, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """§9: with one writer per file, at most CANCEL_WAIT_SECONDS."""
        assert service.CANCEL_WAIT_SECONDS == 3.0
        monkeypatch.setattr(service, "CANCEL_WAIT_SECONDS", 0.2)
        job = make_job("running", kind=KIND, owner=OWNER)
        second_connection.enter(transaction.atomic())
        second_connection.run(Parcel.objects.create, label="held")
        begun = time.monotonic()
        with pytest.raises(Busy):
            service.cancel(job.id)
        assert 0.15 < time.monotonic() - begun < 2
        second_connection.leave()
        assert service.cancel(job.id).status == "running"

    @pytest.mark.postgres_only
    def test_a_view_and_a_slice_do_not_deadlock(self, second_connection: OtherConnection) -> None:
        """P11, F16: the view locks the project's row and cancels; the slice holds the job and wants that row."""
        shipment = Shipment.objects.create()
        view_has_the_row = threading.Event()

        def view() -> str:
            with transaction.atomic():
                Shipment.objects.select_for_update().get(pk=shipment.pk)
                view_has_the_row.set()
                time.sleep(0.3)
                return service.cancel(job.id).status

        def step(ctx: Any) -> Any:
            with ctx.fenced():
                answers.append(second_connection.begin(view))
                assert view_has_the_row.wait(10)
                Shipment.objects.filter(pk=shipment.pk).update(status="moving")
            return Done()

        answers: list[Future[str]] = []
        kinds.unregister(KIND)
        job = start(made(step))
        begun = time.monotonic()
        assert run_slice(job).outcome == Outcome.CANCELLED
        assert answers[0].result(5) == "running"
        assert time.monotonic() - begun < 4

    @pytest.mark.postgres_only
    @pytest.mark.parametrize("status", ["failed", "retrying"])
    def test_a_redrive_of_a_locked_row_is_busy(self, status: str, second_connection: OtherConnection) -> None:
        """§10"""
        job = make_job(status, kind=KIND)
        with row_locked(second_connection, job):
            begun = time.monotonic()
            refused("busy", service.redrive, job.id)
            assert time.monotonic() - begun < 1
        assert service.redrive(job.id).status == "pending"

    def test_a_request_that_nobody_saw_cancels_no_later_redrive(self) -> None:
        """§9, T18: it came as the job ended; the mailbox still holds it."""
        ran: list[int] = []
        kinds.unregister(KIND)
        job = make_job("failed", kind=made(lambda ctx: ran.append(1) or Done()).name)
        CancelRequest._base_manager.bulk_create([CancelRequest(job_id=job.id, actor="late")])
        change(job, cancel_requested_at=django_timezone.now())
        redriven = service.redrive(job.id)
        assert redriven.cancel_requested_at is None and CancelRequest.objects.count() == 0
        assert run_slice(job).outcome == Outcome.COMPLETED
        assert ran == [1]

    def test_a_request_as_the_job_completed_is_refused(
        self, monkeypatch: pytest.MonkeyPatch, second_connection: OtherConnection
    ) -> None:
        """§9: between the request and the look at the row the job ended; nothing stays behind."""
        job = start(kinds_class())
        real = store.request_cancel

        def too_late(*arguments: Any, **options: Any) -> str | None:
            if connection.vendor == "postgresql":
                answer = real(*arguments, **options)
                Job._base_manager.filter(pk=job.pk).update(
                    status="completed",
                    finished_at=django_timezone.now(),
                    next_run_at=None,
                    pending_since=None,
                )
                return answer
            run_slice(job)
            return real(*arguments, **options)

        if connection.vendor == "sqlite":
            run_slice(job)
        else:
            monkeypatch.setattr(store, "request_cancel", too_late)
        with pytest.raises(NotCancellable):
            service.cancel(job.id)
        assert row(job).cancel_requested_at is None and events(job) == []


class TestRedrive:
    def failed(self, **columns: Any) -> Job:
        return make_job("failed", kind=KIND, **columns)

    def test_a_redrive_resets_the_limits_and_keeps_the_work(self, transport: Told, anna: Any) -> None:
        """B110, B111, P9"""
        job = self.failed(lock_key="l", priority=3)
        change(
            job, checkpoint_text='{"at":7}', checkpoint_at=job.created_at, processed_count=7, total_count=9,
            continuation_seq=4, interruptions=2, redrives=5, redrives_since_commit=3, lost_deliveries=2,
            mirror_attempts=4, error_code="why", parked_at=job.finished_at, progress_message="seven",
            cancel_requested_at=job.created_at, cancelled_by_id=anna.pk, result_text=None,
        )  # fmt: skip
        before = columns(job)
        answer = service.redrive(job.id, actor=anna, reason="fixed")
        now = columns(job)
        expected = {
            **before, "status": "pending", "lease_epoch": before["lease_epoch"] + 1, "redrives": 6,
            "redrives_since_commit": 0, "lost_deliveries": 0, "consecutive_failures": 0, "mirror_attempts": 0,
            "verdict": None, "parked_at": None, "error_class": None, "error_code": None, "error_type": None,
            "finished_at": None, "domain_mirrored_at": None, "cancel_requested_at": None, "cancelled_by_id": None,
        }  # fmt: skip
        moments = ("next_run_at", "pending_since", "updated_at", "lease_expires_at")
        assert {n: v for n, v in now.items() if n not in moments} == {
            n: v for n, v in expected.items() if n not in moments
        }
        assert all(abs((now[name] - django_timezone.now()).total_seconds()) < 5 for name in moments)
        assert answer == row(job)
        assert [job.id for job in transport.published] == [job.id]
        [event] = job.events.all()
        assert (event.event, event.actor, event.reason) == ("redriven", f"user:{anna.pk} anna", "fixed")
        assert event.data["forced"] is False and event.data["error_type"] == "ValueError"

    def test_redriving_twice_counts_twice(self) -> None:
        """B111: an old delivery stays refused for ever."""
        kinds.unregister(KIND)

        def step(ctx: Any) -> None:
            raise TerminalError

        job = start(made(step))
        for redrives in (1, 2):
            run_slice(job)
            assert service.redrive(job.id).redrives == redrives
        assert store.claim(job.id, 0, 0, OWNER, 60) is None
        assert store.claim(job.id, 0, 1, OWNER, 60) is None
        assert isinstance(store.claim(job.id, 0, 2, OWNER, 60), Job)

    def test_an_exhausted_job_gets_its_tries_back(self) -> None:
        """C038, C039: the step is entered again, as often as at first."""
        ran: list[int] = []

        def step(ctx: Any) -> None:
            ran.append(1)
            raise ValueError

        kinds.unregister(KIND)
        job = start(made(step))
        while row(job).status != "failed":
            run_slice(job)
        service.redrive(job.id)
        while row(job).status != "failed":
            run_slice(job)
        assert len(ran) == 6

    @pytest.mark.parametrize("force", [False, True])
    @pytest.mark.parametrize("status", ["completed", "cancelled", "held", "pending", "running"])
    def test_what_is_not_redrivable(self, status: str, force: bool) -> None:
        """B106, B107: forced or not."""
        job = make_job(status, kind=KIND)
        error = refused("not_redrivable", service.redrive, job.id, force=force)
        assert isinstance(error, NotRedrivable) and error.status == status

    @pytest.mark.parametrize("status", ["completed", "cancelled"])
    def test_a_finished_job_is_not_redrivable_whoever_holds_its_key(self, status: str) -> None:
        """B107: "held by another" would promise a later success."""
        job = make_job(status, kind=KIND, lock_key="l")
        start(kinds_class(), lock_key="l")
        refused("not_redrivable", service.redrive, job.id, force=True)

    def test_a_lease_past_the_grace_is_redrivable(self) -> None:
        """B106, B114"""
        job = make_job("running", kind=KIND, owner=OWNER)
        change(job, lease_expires_at=django_timezone.now() - timedelta(seconds=10))
        refused("not_redrivable", service.redrive, job.id)
        change(job, lease_expires_at=django_timezone.now() - timedelta(seconds=30))
        assert service.redrive(job.id).status == "pending"
        assert store.beat_many(OWNER, [store.Lease(job.id, OWNER, 1, 60)]) == {} or (
            not store.beat_many(OWNER, [store.Lease(job.id, OWNER, 1, 60)])[job.id].mine
        )

    def test_a_retry_may_be_had_now(self) -> None:
        """P19"""
        job = make_job("retrying", kind=KIND)
        change(job, next_run_at=django_timezone.now() + timedelta(hours=1))
        now = service.redrive(job.id)
        assert now.status == "pending" and now.next_run_at is not None
        assert now.next_run_at < django_timezone.now() + timedelta(seconds=5)

    def test_a_foreign_or_missing_job_is_not_found(self) -> None:
        """B107: no leak of existence."""
        job = make_job("failed", kind=KIND, scope=Scope("a", "x"))
        for scope in (None, Scope("a"), Scope("a", "y"), Scope("b", "x")):
            assert str(refused("not_found", service.redrive, job.id, scope=scope)) == str(NotFound(job.id))
        refused("not_found", service.redrive, uuid.uuid4())
        assert service.redrive(job.id, scope=Scope("a", "x")).status == "pending"

    def test_an_unknown_kind_is_refused(self) -> None:
        """B113, F19, C034"""
        job = make_job("failed", kind="tests.elsewhere")
        assert isinstance(refused("unknown_kind", service.redrive, job.id), UnknownKind)

    def test_an_unrecoverable_failure_needs_force(self) -> None:
        """B108, B5"""

        def step(ctx: Any) -> None:
            raise UnrecoverableError("known wrong", code="mine")

        kinds.unregister(KIND)
        job = start(made(step))
        run_slice(job)
        assert isinstance(refused("unrecoverable_requires_force", service.redrive, job.id), ForceRequired)
        redriven = service.redrive(job.id, force=True)
        assert (redriven.status, redriven.verdict) == ("pending", None)
        assert job.events.get(event="redriven").data["forced"] is True

    @pytest.mark.parametrize("option", ["force", "restart"])
    @pytest.mark.parametrize("value", ["true", "", 1, 0, None, [], b"1"], ids=repr)
    def test_force_and_restart_are_strictly_boolean(self, option: str, value: Any) -> None:
        """B108"""
        job = self.failed()
        change(job, verdict="unrecoverable")
        error = refused("E_JOB_INPUT_INVALID", service.redrive, job.id, **{option: value})
        assert error.field == option

    @pytest.mark.parametrize("moment", [datetime(2026, 1, 1), date(2026, 1, 1), "2026-01-01", 5], ids=repr)
    def test_a_bound_that_names_no_instant_is_refused(self, moment: Any) -> None:
        error = refused("E_JOB_INPUT_INVALID", service.redrive, self.failed().id, failed_before=moment)
        assert error.field == "failed_before"

    @pytest.mark.parametrize(
        "delay", [-1, float("nan"), float("inf"), "5", None, True, 1e10, timedelta(1)], ids=repr
    )
    def test_a_delay_that_is_none_is_refused(self, delay: Any) -> None:
        """C029"""
        error = refused("E_JOB_INPUT_INVALID", service.redrive, self.failed().id, delay=delay)
        assert error.field == "delay"

    def test_a_delay_spreads(self) -> None:
        """F13"""
        now = service.redrive(self.failed().id, delay=90)
        assert now.next_run_at is not None
        assert 85 < (now.next_run_at - django_timezone.now()).total_seconds() < 95

    def test_the_error_stays_to_be_read(self) -> None:
        """B111"""
        assert service.redrive(self.failed().id).error_message == "made for a test"

    def test_a_restart_needs_the_kinds_leave(self) -> None:
        """F9: for force, too."""
        job = self.failed()
        change(job, checkpoint_text='{"at":7}', checkpoint_at=job.created_at, processed_count=7)
        for force in (False, True):
            error = refused("restart_not_allowed", service.redrive, job.id, restart=True, force=force)
            assert isinstance(error, RestartNotAllowed)
        kinds.unregister(KIND)
        made(None, allow_restart=True)
        now = service.redrive(job.id, restart=True)
        assert (now.checkpoint_text, now.checkpoint_at, now.processed_count) == (None, None, 0)
        assert job.events.get().data["checkpoint"] == '{"at":7}'

    @pytest.mark.parametrize("answer", [0, None, True, "x", LookupError("no")], ids=repr)
    def test_a_failing_hook_rolls_it_back(self, answer: Any, transport: Told) -> None:
        """B112"""
        kinds.unregister(KIND)

        def on_redrive(self: Any, job: Job) -> Any:
            assert job.status == "pending"
            Parcel.objects.create(label="x")
            if isinstance(answer, Exception):
                raise answer
            return answer

        made(None, on_transition=lambda self, job: 1, on_redrive=on_redrive)
        job = self.failed()
        before = columns(job, "mirror_attempts")
        with transaction.atomic():
            with pytest.raises(HookFailed):
                service.redrive(job.id)
            Parcel.objects.create(label="goes on")
        assert columns(job, "mirror_attempts") == before
        assert (row(job).mirror_attempts, events(job)) == (1, ["mirror_failed"])
        assert [parcel.label for parcel in Parcel.objects.all()] == ["goes on"]
        assert transport.published == []

    def test_a_redrive_that_nobody_hears_of_waits_for_whoever_looks(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """B113: neither a publish that fails nor an after-hook that raises undoes it; a poll finds the row."""
        calls: list[str] = []

        def unheard(*arguments: Any) -> None:
            calls.append("publish")
            raise OSError("no route")

        def after_redrive(self: Any, job: Job) -> None:
            calls.append("after")
            raise RuntimeError("a broken after-hook")

        monkeypatch.setattr("durable_jobs.transports.database._notify", unheard)
        kinds.unregister(KIND)
        made(None, after_redrive=after_redrive)
        job = self.failed()
        assert service.redrive(job.id).status == row(job).status == "pending"
        assert calls == ["publish", "after"] if connection.vendor == "postgresql" else ["after"]
        [found] = Claimer(OWNER).claim(5)
        assert found.id == job.id

    def test_another_holder_of_the_lock_is_named(self) -> None:
        """B109, B36"""
        job = self.failed(lock_key="l")
        holder = start(kinds_class(), lock_key="l")
        error = refused("lock_key_held", service.redrive, job.id)
        assert (error.lock_key, error.held_by) == ("l", holder.id)
        service.cancel(holder.id)
        assert service.redrive(job.id).status == "pending"
        refused("lock_key_held", service.start, KIND, lock_key="l")

    @pytest.mark.parametrize("outer", [False, True], ids=["alone", "in the caller's transaction"])
    def test_a_holder_that_came_between_is_named_as_well(
        self, outer: bool, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """B109, B36: the index has the last word, and the caller's transaction stays usable."""
        job = self.failed(lock_key="l")
        holder = start(kinds_class(), lock_key="l")
        real = store.by_lock_key
        looked: list[int] = []

        def by_lock_key(key: str, scope: Scope) -> Job | None:
            looked.append(1)
            return None if len(looked) == 1 else real(key, scope)

        monkeypatch.setattr(store, "by_lock_key", by_lock_key)
        before = columns(job)
        with transaction.atomic() if outer else contextlib.nullcontext():
            with pytest.raises(LockKeyHeld) as caught:
                service.redrive(job.id)
            Parcel.objects.create(label="goes on")
        assert caught.value.held_by == holder.id
        assert (columns(job), Parcel.objects.count(), events(job)) == (before, 1, [])

    def test_two_clicks_are_one_redrive(self, other_connections: Callable[[], OtherConnection]) -> None:
        """C035: the second finds a job that has changed."""
        job = self.failed()
        gate = threading.Barrier(4)

        def click() -> str:
            gate.wait(10)
            try:
                return service.redrive(job.id).status
            except Refusal as refusal:
                return refusal.code

        answers = [future.result(30) for future in [other_connections().begin(click) for _ in range(4)]]
        assert answers.count("pending") == 1
        assert set(answers) <= {"pending", "not_redrivable", "busy"}
        assert row(job).redrives == 1

    def test_it_joins_the_callers_transaction(self) -> None:
        job = self.failed()
        before = columns(job)
        with contextlib.suppress(KeyError), transaction.atomic():
            assert service.redrive(job.id).status == "pending"
            raise KeyError
        assert (columns(job), events(job)) == (before, [])

    def test_a_stolen_job_is_none_of_the_old_workers(self, second_connection: OtherConnection) -> None:
        """B44: every redrive ends the old lease."""
        job = make_job("running", kind=KIND, owner=OWNER)
        lease = store.Lease(job.id, OWNER, job.lease_epoch, 60)
        second_connection.run(steal, job)
        before = columns(job)
        assert store.write_checkpoint(lease, '{"at":1}') is None
        assert store.yield_slice(lease) is None and store.release_lease(lease, 0) is None
        assert columns(job) == before


def test_what_is_started_cancelled_and_redriven_is_told(caplog: pytest.LogCaptureFixture) -> None:
    """B186"""
    caplog.set_level(logging.INFO, "durable_jobs.jobs")
    job = start(kinds_class())
    service.cancel(job.id, actor="anna")
    failed = make_job("failed", kind=KIND)
    service.redrive(failed.id)
    assert [r.event for r in caplog.records] == [
        "job_created",
        "cancel_requested",
        "job_cancelled",
        "job_redriven",
    ]


@pytest.mark.parametrize(
    ("status", "act", "statement"),
    [
        ("failed", service.redrive, "redrive"),
        ("held", service.release, "release_held"),
        ("pending", service.cancel, "request_cancel"),
    ],
)
def test_a_file_locked_for_too_long_is_busy_and_any_other_error_of_the_database_is_itself(
    status: str, act: Callable[..., Any], statement: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = make_job(status, kind=KIND)

    def failing(sentence: str) -> Callable[..., None]:
        def fail(*_: Any, **__: Any) -> None:
            raise OperationalError(sentence)

        return fail

    monkeypatch.setattr(store, statement, failing("database is locked"))
    refused("busy", act, job.id)
    monkeypatch.setattr(store, statement, failing("the disk is gone"))
    with pytest.raises(OperationalError, match="the disk is gone"):
        act(job.id)


def test_a_job_that_is_not_there_cannot_be_settled() -> None:
    refused("not_found", service.settle_without_hooks, uuid7(), actor="anna", reason="gone")
