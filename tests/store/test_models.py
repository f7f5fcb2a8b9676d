"""What the models promise to those who read them, and what they refuse to those who write."""

from __future__ import annotations

import inspect
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
from django.apps import apps
from django.contrib.auth import get_user_model
from django.contrib.auth.models import Group
from django.db import models

from durable_jobs import models as jobs
from durable_jobs.exceptions import DirectWrite
from durable_jobs.models import (
    CancelRequest,
    Job,
    JobEvent,
    JobQuerySet,
    Pause,
    ReadOnlyQuerySet,
    Scope,
    WorkerProcess,
    uuid7,
)
from tests.store.rows import ENDED, LIVE, State, execute, image, make, post_letter, user

MODELS = (Job, JobEvent, CancelRequest, Pause, WorkerProcess)


# --- writes are refused ------------------------------------------------------------------------------------------


def test_these_are_all_models() -> None:
    assert set(apps.get_app_config("durable_jobs").get_models()) == set(MODELS)


@pytest.mark.django_db
@pytest.mark.parametrize("model", MODELS, ids=lambda model: model.__name__)
@pytest.mark.parametrize(
    "write",
    [
        lambda model: model().save(),
        lambda model: model().save(force_insert=True),
        lambda model: model().save(update_fields=["id"]),
        lambda model: model(pk=uuid7() if model is Job else 1).delete(),
        lambda model: model.objects.create(),
        lambda model: model.objects.get_or_create(pk=1),
        lambda model: model.objects.update_or_create(pk=1),
        lambda model: model.objects.bulk_create([model()]),
        lambda model: model.objects.bulk_update([model(pk=1)], ["id"]),
        lambda model: model.objects.update(id=1),
        lambda model: model.objects.all().update(id=1),
        lambda model: model.objects.filter(pk__in=[]).delete(),
        lambda model: model.objects.acreate(),
        lambda model: model.objects.aupdate(id=1),
        lambda model: model.objects.filter(pk__in=[]).adelete(),
        lambda model: model.objects.abulk_create([model()]),
        lambda model: model.objects.aget_or_create(pk=1),
        lambda model: model.objects.aupdate_or_create(pk=1),
        lambda model: model.objects.abulk_update([model(pk=1)], ["id"]),
    ],
)  # fmt: skip
def test_a_direct_write_is_refused(model: type[models.Model], write: Callable[[Any], Any]) -> None:
    """T2: it would go around the lease; the refusal names the way that there is."""
    with pytest.raises(DirectWrite) as refusal:
        write(model)
    assert refusal.value.code == "direct_write"
    assert model.__name__ in str(refusal.value) and "service" in str(refusal.value)
    assert not model._base_manager.exists()


def test_no_writing_method_of_a_queryset_was_forgotten() -> None:
    """Whatever a later Django adds that writes stands out here."""
    reads = {name for name in dir(models.QuerySet) if not name.startswith("_")} - {
        "update", "delete", "create", "bulk_create", "bulk_update", "get_or_create", "update_or_create",
        "aupdate", "adelete", "acreate", "abulk_create", "abulk_update", "aget_or_create",
        "aupdate_or_create",
    }  # fmt: skip
    for name in dir(models.QuerySet):
        own = inspect.getattr_static(ReadOnlyQuerySet, name, None)
        if own is ReadOnlyQuerySet._refuse:
            assert name not in reads
    alters = [
        name for name in reads if getattr(inspect.getattr_static(models.QuerySet, name), "alters_data", False)
    ]
    assert not alters


@pytest.mark.django_db
def test_a_related_manager_refuses_too() -> None:
    job = Job.objects.get(pk=make("pending"))
    for write in (
        lambda: job.events.create(event="x"),
        lambda: job.events.all().delete(),
        lambda: job.events.update(event="x"),
        lambda: job.events.add(JobEvent(event="x"), bulk=False),
    ):
        with pytest.raises(DirectWrite):
            write()


def test_the_base_manager_is_plain() -> None:
    """Django's own care of foreign keys needs it."""
    for model in MODELS:
        assert type(model._base_manager) is models.Manager
        assert isinstance(model._default_manager.all(), ReadOnlyQuerySet)
    assert isinstance(Job.objects.all(), JobQuerySet)


@pytest.mark.django_db
def test_deleting_a_user_leaves_the_jobs() -> None:
    """`created_by`, `cancelled_by` and a letter's author become nobody; nothing else of the row changes."""
    author, asker = user("author"), user("asker")
    job_id = make(State("pending", request="row"), created_by_id=author, cancelled_by_id=asker)
    post_letter(job_id, "author")
    before = image(job_id)
    get_user_model().objects.filter(pk__in=[author, asker]).delete()
    assert image(job_id) == {**before, "created_by_id": None, "cancelled_by_id": None}
    ((sender,),) = execute("SELECT actor_user_id FROM durable_jobs_cancelrequest")
    assert sender is None


def test_nobody_is_given_rights_to_add_or_change() -> None:
    for model in MODELS:
        assert model._meta.default_permissions == ("view",)
    assert {name for name, _ in Job._meta.permissions} == {
        "start_job", "operate_job", "force_redrive_job", "pause_job", "settle_job", "view_job_payload",
        "view_all_scopes",
    }  # fmt: skip


@pytest.mark.django_db
def test_the_history_outlives_its_job() -> None:
    """Its reference to the job has no constraint, and no letter has one."""
    job_id = make("completed")
    execute(
        "INSERT INTO durable_jobs_event (job_id, created_at, event) SELECT id, created_at, 'x' FROM durable_jobs_job"
    )
    post_letter(job_id)
    execute("DELETE FROM durable_jobs_job")
    assert JobEvent.objects.get().job_id == job_id
    assert CancelRequest.objects.get().job_id == job_id


# --- reading --------------------------------------------------------------------------------------------------------


@pytest.mark.django_db
def test_json_is_parsed_anew_at_each_access() -> None:
    """The exact text stays; what a caller does to its copy changes nothing."""
    text = '{"b": [1, 2.50, null],\n "a": "\\u00df"}'
    job = Job.objects.get(pk=make("completed", input=text, checkpoint="[1]", result='"done"'))
    assert job.input == {"b": [1, 2.5, None], "a": "ß"}
    job.input["b"].append(3)
    assert job.input == {"b": [1, 2.5, None], "a": "ß"}
    assert (job.input_text, job.checkpoint, job.result) == (text, [1], "done")
    empty = Job.objects.get(
        pk=make("pending", input=None, input_sha256=None, checkpoint=None, checkpoint_at=None)
    )
    assert (empty.input, empty.checkpoint, empty.result) == (None, None, None)


@pytest.mark.django_db
def test_jobs_are_found_by_their_subject() -> None:
    """Stored as label and key; loaded again as what it now is; gone is None."""
    group, other = Group.objects.create(name="a"), Group.objects.create(name="b")
    job_id = make("pending", subject_id=str(group.pk))
    make("pending", subject_id=str(other.pk))
    make("pending", subject_type="auth.user", subject_id=str(group.pk))
    (job,) = Job.objects.for_subject(group)
    assert job.pk == job_id and job.subject == group
    assert Job.objects.filter(status="pending").for_subject(group).count() == 1
    key = group.pk
    group.delete()
    assert Job.objects.get(pk=job_id).subject is None
    assert Job.objects.filter(subject_type="auth.group", subject_id=str(key)).count() == 1
    unknown = Job.objects.get(pk=make("pending", subject_type="gone.model"))
    none = Job.objects.get(pk=make("pending", subject_type=None, subject_id=None))
    assert unknown.subject is None and none.subject is None


@pytest.mark.django_db
def test_a_scope_without_organization_matches_only_none() -> None:
    """B21: no organization is a value of its own, never "any"."""
    north, none = make("pending"), make("pending", organization_id=None)
    make("pending", tenant_id="umbrella")
    assert [job.pk for job in Job.objects.in_scope(Scope("acme", "north"))] == [north]
    assert [job.pk for job in Job.objects.in_scope(Scope("acme"))] == [none]
    assert not Job.objects.in_scope(Scope())
    assert Job.objects.get(pk=none).scope == Scope("acme") != Scope("acme", "")


@pytest.mark.django_db
def test_live_is_pending_or_running() -> None:
    for base in (*LIVE, *ENDED):
        state = State(base, request="row" if base == "cancelled" else "none")
        job = Job.objects.get(pk=make(state))
        assert job.is_live == (base in ("pending", "running", "expired", "retry"))
    assert jobs.LIVE == ("pending", "running") and jobs.TERMINAL == ("completed", "failed", "cancelled")


@pytest.mark.parametrize(
    ("status", "processed", "total", "reported", "percent"),
    [
        ("running", 5, 20, None, 25.0), ("running", 5, 20, 90.0, 25.0), ("running", 30, 20, None, 100.0),
        ("running", 5, None, 12.5, 12.5), ("running", 5, None, None, None), ("running", 0, 0, None, None),
        ("completed", 0, None, None, 100.0), ("failed", 5, 20, None, 25.0),
    ],
)  # fmt: skip
def test_percent(
    status: str, processed: int, total: int | None, reported: float | None, percent: float | None
) -> None:
    job = Job(status=status, processed_count=processed, total_count=total, progress=reported)
    assert job.percent == percent


def test_lengths_are_as_documented() -> None:
    """What does not fit is refused at the call or cut, never by the database alone."""
    texts = [field for field in Job._meta.concrete_fields if isinstance(field, models.CharField)]
    lengths = {field.column: field.max_length for field in texts}
    assert lengths == {
        "kind": 200, "status": 9, "tenant_id": 64, "organization_id": 64, "input_sha256": 64,
        "idempotency_key": 200, "lock_key": 200, "subject_type": 200, "subject_id": 200,
        "lease_owner": 200, "queue_name": 100, "queue_job_id": 200, "verdict": 20, "error_class": 20,
        "error_code": 100, "error_type": 200, "progress_message": 500,
    }  # fmt: skip


# --- ids -------------------------------------------------------------------------------------------------------------


def test_an_id_is_a_uuid_of_version_seven(monkeypatch: pytest.MonkeyPatch) -> None:
    """RFC 9562: 48 bits of milliseconds, then version and variant where they belong."""
    # Another test may have set the clock forward; ids never go back.
    monkeypatch.setattr(jobs, "_uuid_last", 0)
    before = time.time_ns() // 1_000_000
    ids = [uuid7() for _ in range(2000)]
    after = time.time_ns() // 1_000_000
    for one in ids:
        assert (one.version, one.variant) == (7, "specified in RFC 4122")
        assert before <= one.int >> 80 <= after + 1
    assert ids == sorted(ids) and [str(one) for one in ids] == sorted(map(str, ids))
    # 74 random bits: each of them is sometimes set and sometimes not.
    random = [(one.int >> 64 & 0xFFF) << 62 | one.int & (1 << 62) - 1 for one in ids]
    always, never = -1, 0
    for value in random:
        always &= value
        never |= value
    assert never == (1 << 74) - 1


def test_ids_grow_when_the_clock_stands_or_goes_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """Within one millisecond, and after a step of the clock (RFC 9562 §6.2)."""
    moments = [5_000_000_000_000, 5_000_000_000_000, 1_000, 4_999_999_999_999, 5_000_000_000_001]
    monkeypatch.setattr(jobs, "_uuid_last", 0)
    ids = []
    for moment in moments:
        monkeypatch.setattr(time, "time_ns", lambda moment=moment: moment * 1_000_000)
        ids += [uuid7() for _ in range(200)]
    assert ids == sorted(set(ids))
    assert {one.version for one in ids} == {7}
    assert {one.variant for one in ids} == {"specified in RFC 4122"}


def test_threads_share_no_id() -> None:
    made: list[list[Any]] = [[] for _ in range(4)]
    gate = threading.Barrier(4)

    def make_many(mine: list[Any]) -> None:
        gate.wait(10)
        mine += [uuid7() for _ in range(3000)]

    threads = [threading.Thread(target=make_many, args=[mine]) for mine in made]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    for mine in made:
        assert mine == sorted(mine)
    assert len({one for mine in made for one in mine}) == 12_000
