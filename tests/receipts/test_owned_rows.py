"""Making, claiming and holding a job by hand: grants, identity, leases, ownership, held work."""

from __future__ import annotations

import json
import re
import threading
import time
from datetime import timedelta
from typing import Any

import pytest
from django.db import connection, transaction
from django.utils import timezone
from hypothesis import given, settings
from hypothesis import strategies as st

from durable_jobs import exceptions, jsontext, kinds, models, receipts, service, store
from durable_jobs.exceptions import (
    DurableJobsError,
    IdempotencyConflict,
    InvalidInput,
    LockKeyHeld,
    NotHeld,
    NotReclaimable,
    NotRedrivable,
    Refusal,
)
from durable_jobs.models import Job, Scope, uuid7
from durable_jobs.receipts import Submission
from durable_jobs.reconciler import Reconciler
from durable_jobs.store import NewJob
from durable_jobs.testing import finish, make_job, register_for_test
from durable_jobs.transports.database import Claimer
from tests.connections import OtherConnection
from tests.receipts import acts
from tests.receipts.acts import (
    HOME,
    INPUT,
    KIND,
    age,
    context,
    ended,
    everything,
    expired,
    job_of,
    owned,
    read,
    tamper,
)
from tests.store import rows

pytestmark = pytest.mark.django_db(transaction=True)


def insert(
    key: str | None = "k1", input: str = INPUT, *, scope: Scope = HOME, **given: Any
) -> receipts.Granted:
    submission = None if key is None else Submission(key, input)
    facts = {"owner": "me", "lease_seconds": 30.0, "scope": scope, **given}
    return receipts.insert(KIND, submission, **facts)


# --- refusals -------------------------------------------------------------------------------------------

CODES = {
    "E_JOB_INPUT_INVALID", "E_JOB_SCOPE_MISMATCH", "E_JOB_IDEMPOTENCY_CONFLICT", "E_JOB_LEASE_LOST",
    "E_JOB_NOT_RECLAIMABLE", "E_JOB_TRANSACTION_OWNED", "E_JOB_DEADLINE_EXCEEDED", "E_JOB_LOCK_POLICY_CONFLICT",
}  # fmt: skip


def test_eight_codes_one_family() -> None:
    """A1, A2, C18."""
    classes = [value for value in vars(exceptions).values() if isinstance(value, type)]
    coded = [cls for cls in classes if str(getattr(cls, "code", "")).startswith("E_JOB_")]
    assert {cls.code for cls in coded} == CODES and len(coded) == 8
    assert all(issubclass(cls, DurableJobsError) and issubclass(cls, Refusal) for cls in coded)


@pytest.mark.parametrize(
    "submission",
    [
        Submission("", "{}"), Submission("  ", "{}"), Submission("\t\n", "{}"), Submission("k" * 201, "{}"),
        Submission(7, "{}"), Submission("k", ""), Submission("k", "nonsense"), Submission("k", "{"),
        Submission("k", {"a": 1}), Submission("k", b"{}"), Submission("k", None), Submission("k", "NaN"),
        Submission("k", '"\\u0000"'), Submission("k", '"\\ud800"'), Submission(None, "{}"),
    ],
    ids=repr,
)  # fmt: skip
def test_a_submission_is_a_key_and_a_text_of_json(submission: Any) -> None:
    """A3, A4, A22: refused before any transaction."""
    before = everything()
    for act in (
        lambda: receipts.insert(KIND, submission, scope=HOME, owner="me", lease_seconds=30),
        lambda: receipts.defer(KIND, submission, scope=HOME),
    ):
        with transaction.atomic(), pytest.raises(InvalidInput) as refused:
            act()
        assert refused.value.code == "E_JOB_INPUT_INVALID"
    assert everything() == before


@pytest.mark.parametrize("kind", ["", "  ", None, 7, "k" * 201])
def test_a_job_has_a_kind(kind: Any) -> None:
    """A3, A4, A22."""
    with pytest.raises(InvalidInput):
        receipts.insert(kind, None, scope=HOME, owner="me", lease_seconds=30)


@pytest.mark.parametrize("lease_seconds", [0, -1, "x", True, None, float("nan"), float("inf"), 86_401])
def test_a_lease_has_a_length(lease_seconds: Any) -> None:
    """A27."""
    with pytest.raises(InvalidInput):
        insert(lease_seconds=lease_seconds)
    with pytest.raises(InvalidInput):
        receipts.begin(context(), "{}", lease_seconds=lease_seconds)


@pytest.mark.parametrize("limit", [0, -1, "2", 1.5, True])
def test_a_limit_is_a_positive_whole_number(limit: Any) -> None:
    """A62, A3."""
    with pytest.raises(InvalidInput, match="max_running"):
        receipts.begin(context(), "{}", max_running=limit)


# --- making ---------------------------------------------------------------------------------------------


def test_a_new_job_is_owned_from_the_start() -> None:
    """A15, A26, A13."""
    job, lease = insert()
    assert lease is not None and (lease.job_id, lease.owner, lease.epoch, lease.ttl) == (
        job.id,
        "me",
        1,
        30.0,
    )
    stored = read(job.id)
    assert (stored.status, stored.lease_owner, stored.lease_epoch, stored.attempts) == ("running", "me", 1, 1)
    assert (stored.queue_name, stored.input_text, stored.input_sha256) == (
        "manual",
        INPUT,
        jsontext.sha256(INPUT),
    )
    assert abs((stored.lease_expires_at - store.now()).total_seconds() - 30) < 2
    assert abs((stored.heartbeat_at - store.now()).total_seconds()) < 2
    assert stored.started_at is not None and stored.created_at is not None
    with pytest.raises(AttributeError):
        lease.epoch = 2  # type: ignore[misc]


@pytest.mark.parametrize("state", ["held", "running", "expired", "failed", "cancelled", "completed"])
def test_a_repeat_creates_nothing_and_grants_nothing(state: str) -> None:
    """A16, A46: whatever became of the first."""
    if state == "held":
        receipts.defer(KIND, Submission("k1", INPUT), scope=HOME)
    elif state in ("running", "expired"):
        job, _ = insert()
        if state == "expired":
            age(job.id)
    else:
        ended(state, key="k1")
    before = everything()
    again = insert()
    assert again.lease is None and again.job.idempotency_key == "k1"
    assert receipts.begin(context("k1"), INPUT).ctx is None
    assert receipts.defer(KIND, Submission("k1", INPUT), scope=HOME).id == again.job.id
    assert everything() == before


@pytest.mark.parametrize("other", ['{"shipment":7}', '{"shipment": 7 }', '{"shipment": 8}', "[]"])
def test_the_same_key_with_other_bytes_is_a_conflict(other: str) -> None:
    """A17, A18: byte for byte."""
    insert()
    before = everything()
    for act in (
        lambda: insert(input=other),
        lambda: receipts.defer(KIND, Submission("k1", other), scope=HOME),
        lambda: receipts.begin(context("k1"), other),
    ):
        with pytest.raises(IdempotencyConflict):
            act()
    assert everything() == before


def test_a_row_that_kept_only_the_hash_is_the_same_submission() -> None:
    """A19, A61: its bytes are not made up for."""
    job, _ = insert()
    acts.write(job.id, "input", None)
    before = everything()
    again = insert()
    assert (again.job.id, again.lease, again.job.input_text) == (job.id, None, None)
    assert everything() == before


def test_keys_belong_to_scope_and_kind() -> None:
    """C1, A11, C23: no organization is a scope of its own."""
    jobs = {insert(scope=scope).job.id for scope in (HOME, Scope("acme"), Scope("umbrella", "north"))}
    jobs.add(
        receipts.insert(
            "tests.other", Submission("k1", INPUT), scope=HOME, owner="me", lease_seconds=30
        ).job.id
    )
    assert len(jobs) == 4
    assert receipts.find_submission(KIND, "k1", Scope("acme", "south")) is None


def test_ten_threads_with_one_key_make_one_job() -> None:
    """A20, T20."""
    barrier, answers = threading.Barrier(10), []

    def start() -> None:
        try:
            barrier.wait(5)
            answers.append(insert(owner=threading.current_thread().name))
        finally:
            connection.close()

    threads = [threading.Thread(target=start) for _ in range(10)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert len(answers) == 10 and len({answer.job.id for answer in answers}) == 1
    (winner,) = [answer.lease for answer in answers if answer.lease]
    assert read(winner.job_id).lease_owner == winner.owner and Job.objects.count() == 1


@pytest.mark.postgres_only
def test_a_lease_born_behind_a_wait_has_its_whole_length(second_connection: OtherConnection) -> None:
    """P18: the insert waited for a rival who then rolled back."""
    second_connection.enter(transaction.atomic())
    second_connection.run(store.insert, NewJob(uuid7(), KIND, "held", "acme", "north", "manual", INPUT,
                                               jsontext.sha256(INPUT), idempotency_key="k1"))  # fmt: skip
    timer = threading.Timer(0.4, lambda: second_connection.leave(ZeroDivisionError()))
    timer.start()
    began = time.monotonic()
    job, lease = insert(lease_seconds=0.5)
    timer.join()
    assert lease is not None and time.monotonic() - began > 0.3
    assert (job.lease_expires_at - store.now()).total_seconds() > 0.4


def test_without_a_submission_every_call_makes_a_new_job() -> None:
    """A23: it can be ended, and resumed when its lease ran out; but there is nothing to retry it by."""
    first, lease = insert(None)
    second, _ = insert(None)
    assert (
        first.id != second.id and (first.input_text, first.input_sha256, first.idempotency_key) == (None,) * 3
    )
    assert lease is not None
    ctx = receipts.begin(receipts.ExecutionContext(HOME, "a", KIND, None, time.monotonic() + 5)).ctx
    assert ctx is not None and receipts.complete_atomically(ctx, lambda _: "1") == "1"
    third = receipts.begin(receipts.ExecutionContext(HOME, "a", KIND, None, time.monotonic() + 5)).ctx
    assert third is not None
    receipts.finalize_atomically(third, receipts.AttemptOutcome("failed", "m"), lambda _: "1")
    with pytest.raises(InvalidInput, match="input"):
        receipts.retry_atomically(job_of(third).id, context_without_key(), lambda _: "1")
    with pytest.raises(InvalidInput):
        receipts.defer(KIND, None, scope=HOME)


def context_without_key() -> receipts.ExecutionContext:
    return receipts.ExecutionContext(HOME, "a", KIND, None, time.monotonic() + 5)


def test_looking_a_submission_up_changes_nothing() -> None:
    """A24."""
    job, _ = insert()
    before = everything()
    found = receipts.find_submission(KIND, "k1", HOME)
    assert found is not None and found.id == job.id
    assert receipts.find_submission(KIND, "k1", Scope("acme")) is None
    assert receipts.find_submission("tests.other", "k1", HOME) is None
    assert everything() == before


@pytest.mark.parametrize("days", [-1, 1])
def test_the_callers_clock_decides_nothing(days: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A25, C6."""
    real, seconds = timezone.now, days * 86_400
    monkeypatch.setattr(timezone, "now", lambda: real() + timedelta(days=days))
    monkeypatch.setattr(time, "time", lambda now=time.time: now() + seconds)
    ctx = owned()
    assert abs((job_of(ctx).lease_expires_at - store.now()).total_seconds() - 30) < 2
    assert job_of(ctx).ownership == "current"
    receipts.complete_atomically(ctx, lambda _: "1")


@pytest.mark.parametrize(
    ("text", "digest"),
    [
        ("{}", "44136fa355b3678a1146ad16f7e8649e94fb4fc21fe77e8310c060f61caaff8a"),
        ('{"ä":"🦀"}', jsontext.hashlib.sha256('{"ä":"🦀"}'.encode()).hexdigest()),
    ],
)
def test_the_hash_is_that_of_the_utf8_bytes(text: str, digest: str) -> None:
    """A26, A10: and the database agrees."""
    job, _ = insert(input=text)
    assert (job.input_text, job.input_sha256) == (text, digest)
    age(job.id)
    assert isinstance(store.claim_held(job.id, scope=HOME, owner="x", ttl=30), Job)


anything = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**80), 2**80) | st.sampled_from([2**63, -(2**63), 2**53 + 1])
    | st.floats(allow_nan=False, allow_infinity=False) | st.sampled_from([-0.0, 1e300, 5e-324, 1.5e-7])
    | st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\x00"), max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\x00"), max_size=8), inner, max_size=4),
    max_leaves=12,
)  # fmt: skip


def deep(depth: int) -> Any:
    value: Any = "🦀"
    for number in range(depth):
        value = [value] if number % 2 else {"k": value}
    return value


def same(one: Any, other: Any) -> bool:
    """Equal, and of the same types all the way down; -0.0 is not 0."""
    return (
        repr(one) == repr(other)
        if not isinstance(one, dict)
        else repr(sorted(one.items())) == repr(sorted(other.items()))
    )


@settings(max_examples=60, deadline=None)
@given(anything | st.integers(1, 50).map(deep))
def test_any_json_comes_back_with_the_same_hash(value: Any) -> None:
    """A10, A26, T19: through the database and all verbs, byte for byte."""
    submission = Submission.of(acts.new_key(), value)
    job = receipts.defer(KIND, submission, scope=HOME)
    stored = read(job.id)
    assert stored.input_text == submission.input and stored.is_authentic
    assert stored.input_sha256 == jsontext.sha256(submission.input)
    assert same(stored.input, json.loads(submission.input))
    assert jsontext.encode(stored.input, field="input", limit=10**6) == submission.input
    ctx = receipts.claim(job.id, context(submission.idempotency_key))
    assert receipts.complete_atomically(ctx, lambda _: submission.input) == submission.input
    after = read(job.id)
    assert (after.input_text, after.input_sha256) == (stored.input_text, stored.input_sha256)
    assert after.result_text == submission.input


@pytest.mark.parametrize("plane", range(17))
def test_every_plane_of_unicode_is_stored_as_it_is(plane: int) -> None:
    """A26."""
    text = "".join(
        chr(code)
        for code in range(plane << 16, (plane << 16) + 0x10000, 257)
        if code and not 0xD800 <= code < 0xE000
    )
    test_any_json_comes_back_with_the_same_hash.hypothesis.inner_test({"text": text, text[:40]: plane})


# --- claiming -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("state", ["held", "expired"])
def test_held_and_expired_work_can_be_claimed(state: str) -> None:
    """A30, A31, A43, A60, C14, C22: a claim forgets no cancel request."""
    if state == "held":
        job = receipts.defer(KIND, Submission("k1", INPUT), scope=HOME)
    else:
        ctx = owned(key="k1")
        assert ctx.fence is not None
        store.keep_checkpoint(ctx.fence.lease, '{"at": 3}')
        store.set_percent(ctx.fence.lease, 42)
        store.request_cancel(job_of(ctx).id, scope=None)
        job = job_of(ctx)
        age(job.id)
    before = read(job.id)
    claimed = receipts.claim(job.id, context("k1"), lease_seconds=40)
    after = read(job.id)
    assert (after.status, after.lease_epoch, after.attempts) == (
        "running",
        before.lease_epoch + 1,
        before.attempts + 1,
    )
    assert after.lease_owner == claimed.fence.lease.owner != before.lease_owner  # type: ignore[union-attr]
    assert abs((after.lease_expires_at - store.now()).total_seconds() - 40) < 2
    kept = ("checkpoint_text", "cancel_requested_at", "progress", "created_at", "input_text", "input_sha256")
    assert all(getattr(after, name) == getattr(before, name) for name in kept)


@pytest.mark.parametrize(
    "state", ["running", "pending", "retrying", "completed", "failed", "cancelled", "parked", "verdict"]
)
def test_nothing_else_can_be_claimed(state: str) -> None:
    """A30, A8, A7: live leases, ended work, work of no owner, and what is a worker's to run."""
    job = make_job(state, kind=KIND, scope=HOME, idempotency_key="k1")
    before = everything()
    with pytest.raises(NotReclaimable) as refused:
        receipts.claim(job.id, context("k1"))
    assert refused.value.code == "E_JOB_NOT_RECLAIMABLE"
    assert everything() == before


def test_a_decided_failure_is_not_claimed_whoever_had_it() -> None:
    """A30: the worker that came to tell the domain of it has died."""
    job = make_job("verdict", kind=KIND, scope=HOME, idempotency_key="k1")
    store.claim(job.id, job.continuation_seq, job.redrives, "w", -1.0)
    with pytest.raises(NotReclaimable, match="decided"):
        receipts.claim(job.id, context("k1"))


def test_held_work_is_claimed_only_with_its_lock_key() -> None:
    """A30, C5."""
    with register_for_test(Import):
        job = service.start(Import, {"n": 1}, scope=HOME, hold=True, lock_key="l", idempotency_key="k1").job
        other = service.start(Import, {"n": 2}, scope=HOME, lock_key="l").job
        with pytest.raises(LockKeyHeld) as refused:
            receipts.claim(job.id, context("k1", kind=Import.name))
        assert refused.value.held_by == other.id and read(job.id).status == "held"
        service.cancel(other.id, scope=HOME)
        receipts.claim(job.id, context("k1", kind=Import.name))
    assert read(job.id).status == "running"


@pytest.mark.parametrize("scope", [Scope("acme"), Scope("acme", "south"), Scope("umbrella", "north")])
def test_another_scopes_work_is_unknown(scope: Scope) -> None:
    """A30, A11."""
    job = job_of(expired(key="k1"))
    before = everything()
    for job_id in (job.id, uuid7(), "nonsense"):
        with pytest.raises(NotReclaimable):
            receipts.claim(job_id, context("k1", scope=scope))
    assert everything() == before


def test_a_counter_at_its_end_refuses_the_claim() -> None:
    """A32, A9, A3."""
    job = job_of(expired(key="k1"))
    rows.execute(
        "UPDATE durable_jobs_job SET lease_epoch = %s, attempts = %s WHERE id = %s",
        2**63 - 1,
        2**31 - 1,
        job.id,
    )
    before = everything()
    with pytest.raises(InvalidInput, match="cannot grow"):
        receipts.claim(job.id, context("k1"))
    assert store.claim_held(job.id, scope=HOME, owner="x", ttl=30) is None
    assert everything() == before


def test_expiring_just_now_is_expired_for_all() -> None:
    """A33, C9: no instant has two owners, none has none."""
    ctx = owned(lease_seconds=5)
    job = job_of(ctx)
    moment = job.lease_expires_at
    assert job.ownership_at(moment) == "expired"
    assert job.ownership_at(moment - timedelta(microseconds=1000)) == "current"
    owners = ("_RENEW", "_STILL_CURRENT", "_SET_PERCENT", "_KEEP_CHECKPOINT", "_COMPLETE_OWNED", "_FAIL_OWNED",
              "_CANCEL_OWNED", "_IMAGE")  # fmt: skip
    for names, wanted in ((owners, "> "), (("_CLAIM_HELD", "_RETRY_CLAIM"), "<= ")):
        for name in names:
            sql = vars(store)[name].sql(connection.vendor)
            assert re.findall(r"lease_expires_at ([<>]=? )", sql) == [wanted], name


@pytest.mark.parametrize("broken", ["owner", "epoch", "status", "expiry"])
def test_an_owners_write_needs_the_whole_lease(broken: str) -> None:
    """A34, A35, A12, A40, A42, C8: each fact in turn, for each statement."""
    ctx = owned()
    assert ctx.fence is not None
    lease, job_id = ctx.fence.lease, job_of(ctx).id
    if broken == "owner":
        acts.write(job_id, "lease_owner", "same label, other store")
    elif broken == "epoch":
        acts.write(job_id, "lease_epoch", 2)
    elif broken == "expiry":
        age(job_id, 0.001)
    else:
        receipts.complete_atomically(ctx, lambda _: "1")
    before = everything()
    assert store.renew(lease) is None
    assert not store.set_percent(lease, 1.0)
    assert not store.keep_checkpoint(lease, "1")
    with transaction.atomic():
        assert store.complete_owned(lease, "1", late=True) is None
        assert store.fail_owned(lease, exceptions.describe(ValueError())) is None
        assert store.cancel_owned(lease, stopped=True) is None
    assert everything() == before


@pytest.mark.postgres_only
def test_a_beat_waits_for_no_lock_and_says_so(second_connection: OtherConnection) -> None:
    """A40: a locked row is no lost lease, until it has run out."""
    ctx = owned(lease_seconds=0.4)
    assert ctx.fence is not None
    second_connection.enter(transaction.atomic())
    second_connection.run(lambda: Job.objects.select_for_update().get(pk=job_of(ctx).id))
    began = time.monotonic()
    assert store.renew(ctx.fence.lease) is store.BUSY and time.monotonic() - began < 0.3
    time.sleep(0.45)
    assert store.renew(ctx.fence.lease) is None
    second_connection.leave()
    assert store.renew(ctx.fence.lease) is None and job_of(ctx).ownership == "expired"


@pytest.mark.postgres_only
@pytest.mark.parametrize("write", ["percent", "checkpoint"])
def test_a_lease_that_runs_out_behind_a_lock_writes_nothing(
    write: str, second_connection: OtherConnection
) -> None:
    """A40, P18: the row is locked before the clock is read."""
    ctx = owned(lease_seconds=0.3)
    assert ctx.fence is not None
    second_connection.enter(transaction.atomic())
    second_connection.run(lambda: Job.objects.select_for_update().get(pk=job_of(ctx).id))
    timer = threading.Timer(0.5, second_connection.leave)
    timer.start()
    lease = ctx.fence.lease
    assert not (store.set_percent(lease, 1.0) if write == "percent" else store.keep_checkpoint(lease, "1"))
    timer.join()
    assert job_of(ctx).ownership == "expired" and job_of(ctx).checkpoint is None


# --- tampering --------------------------------------------------------------------------------------------


def test_a_changed_input_never_runs() -> None:
    """A49, A53, A55, A60, C5: not by a worker, not by hand, and everybody is told."""

    class Plain(kinds.Kind):
        name = KIND

        def step(self, ctx: Any) -> kinds.Done:
            raise AssertionError("it ran")

    with register_for_test(Plain):
        pending = service.start(KIND, {"n": 1}, scope=HOME).job
        parked = service.start(KIND, {"n": 2}, scope=HOME, hold=True).job
        for job in (pending, parked):
            tamper(job.id)
        assert read(pending.id).ownership == "legacy-unknown"
        failed_by_worker = finish(pending)
        assert (failed_by_worker.status, failed_by_worker.error_code) == ("failed", "input_changed")
        with pytest.raises(NotReclaimable, match="do not match the hash"):
            service.release(parked.id, scope=HOME)
    deferred, running, failed = (
        receipts.defer(KIND, Submission("k", INPUT), scope=HOME),
        expired(),
        ended("failed"),
    )
    for job_id in (deferred.id, job_of(running).id, failed.id):
        tamper(job_id)
    for job_id in (parked.id, deferred.id, job_of(running).id):
        with pytest.raises(NotReclaimable):
            receipts.take(job_id, scope=HOME, owner="x", lease_seconds=30)
        assert store.claim_held(job_id, scope=HOME, owner="x", ttl=30) is None
    with pytest.raises(InvalidInput):
        receipts.retry_atomically(failed.id, context(failed.idempotency_key), lambda _: "1")
    assert store.retry_claim(failed.id, failed.lease_epoch, "x", 30) is None
    for job_id in (parked.id, deferred.id):
        assert read(job_id).ownership == "legacy-unknown"
        assert "do not match" in (read(job_id).diagnostic or "")
    for job_id in (job_of(running).id, failed.id):
        assert "do not match" in (read(job_id).diagnostic or "")


@pytest.mark.sqlite_only
def test_an_input_that_is_no_text_never_runs_either() -> None:
    """A53, A55: SQLite lets a database shell put bytes into the column."""

    class Plain(kinds.Kind):
        name = KIND

        def step(self, ctx: Any) -> kinds.Done:
            raise AssertionError("it ran")

    with register_for_test(Plain):
        pending = service.start(KIND, {"n": 1}, scope=HOME).job
        held = service.start(KIND, {"n": 2}, scope=HOME, hold=True).job
        dead = job_of(expired())
        for job in (pending, held, dead):
            rows.execute("UPDATE durable_jobs_job SET input = CAST(input AS BLOB) WHERE id = %s", job.id)
        assert read(pending.id).ownership == read(held.id).ownership == "legacy-unknown"
        assert all("do not match" in (read(job.id).diagnostic or "") for job in (pending, held, dead))
        with pytest.raises(NotReclaimable):
            service.release(held.id, scope=HOME)
        for job in (held, dead):
            with pytest.raises(NotReclaimable):
                receipts.take(job.id, scope=HOME, owner="x", lease_seconds=30)
            assert store.claim_held(job.id, scope=HOME, owner="x", ttl=30) is None
        assert finish(pending).error_code == "input_changed"


def test_missing_bytes_are_never_made_up() -> None:
    """A61, A19: from a hash nothing is resumed or retried."""
    running, failed = expired(), ended("failed")
    for job_id in (job_of(running).id, failed.id):
        acts.write(job_id, "input", None)
    with pytest.raises(NotReclaimable):
        receipts.take(job_of(running).id, scope=HOME, owner="x", lease_seconds=30)
    with pytest.raises(InvalidInput):
        receipts.retry_atomically(failed.id, context(failed.idempotency_key), lambda _: "1")
    assert read(failed.id).input_text is None


# --- held work --------------------------------------------------------------------------------------------


class Import(kinds.Kind):
    name = "tests.import"
    queue = "imports"

    def step(self, ctx: Any) -> kinds.Done:
        return kinds.Done(ctx.input)


def test_nothing_starts_deferred_work(settings: Any) -> None:
    """A57, A61, A96: no worker, no reconciler, whatever time passes; and its row proves nothing."""
    settings.DURABLE_JOBS = {"GRACE": 0.2, "UNKNOWN_KIND_GRACE": 0.2}
    deferred = receipts.defer(KIND, Submission("k1", INPUT), scope=HOME)
    owned_job = job_of(expired(key="k2"))
    asked = expired(key="k3")
    store.request_cancel(job_of(asked).id, scope=None)
    rows.post_letter(owned_job.id)
    with register_for_test(Import):
        held = service.start(Import, {"n": 1}, scope=HOME, hold=True, lock_key="l").job
        before = everything()[0]
        assert Claimer("w").claim(10) == []
        control = make_job("expired", kind=Import, queue="imports")
        age(control.id, 5)
        reconciler = Reconciler("w")
        for _ in range(3):
            reconciler.tick()
            time.sleep(0.25)
        assert read(control.id).status == "failed"
        after = everything()[0]
        assert {job_id: row for job_id, row in after.items() if job_id != control.id} == before
    assert (deferred.status, deferred.lease_owner, deferred.lease_epoch, deferred.attempts) == (
        "held",
        None,
        0,
        0,
    )
    assert (held.status, held.queue_name, held.next_run_at, held.pending_since) == (
        "held",
        "imports",
        None,
        None,
    )
    assert deferred.result is None and deferred.finished_at is None


def test_held_work_is_released_once() -> None:
    """C5: it takes its lock key then, and runs."""
    with register_for_test(Import):
        job = service.start(Import, {"n": 1}, scope=HOME, hold=True, lock_key="l").job
        other = service.start(Import, {"n": 2}, scope=HOME, lock_key="l").job
        before = everything()
        with pytest.raises(LockKeyHeld) as refused:
            service.release(job.id, scope=HOME)
        assert refused.value.held_by == other.id and everything() == before
        service.cancel(other.id, scope=HOME)
        released = service.release(job.id, scope=HOME, actor="anna", reason="approved")
        assert released.status == "pending" and released.next_run_at is not None
        with pytest.raises(NotHeld):
            service.release(job.id, scope=HOME)
        (claimed,) = Claimer("w").claim(5)
        assert claimed.id == job.id
        with pytest.raises(NotHeld):
            service.release(job.id, scope=HOME)
    assert [event.event for event in claimed.events.all()] == ["released"]


def test_a_release_joins_the_callers_transaction() -> None:
    """C16."""
    with register_for_test(Import):
        job = service.start(Import, scope=HOME, hold=True).job
        with pytest.raises(ZeroDivisionError), transaction.atomic():
            service.release(job.id, scope=HOME)
            raise ZeroDivisionError
        assert read(job.id).status == "held"


def test_the_release_of_what_is_not_there_or_not_ours() -> None:
    """C5."""
    with register_for_test(Import):
        job = service.start(Import, scope=HOME, hold=True).job
        for job_id, scope in ((uuid7(), HOME), ("x", HOME), (job.id, Scope("acme"))):
            with pytest.raises(exceptions.NotFound):
                service.release(job_id, scope=scope)
        deferred = receipts.defer(KIND, Submission("k1", INPUT), scope=HOME)
        with pytest.raises(NotHeld, match="manager"):
            service.release(deferred.id, scope=HOME)
        failed = ended("failed")
        with register_for_test(type("Repair", (Import,), {"name": KIND, "queue": "q"})):
            with pytest.raises(NotRedrivable, match="resumes or retries"):
                service.redrive(failed.id, scope=HOME)


def test_held_work_whose_input_was_changed_is_not_released() -> None:
    """A54, C5."""
    with register_for_test(Import):
        job = service.start(Import, {"n": 1}, scope=HOME, hold=True).job
        tamper(job.id)
        with pytest.raises(NotReclaimable, match="hash"):
            service.release(job.id, scope=HOME)
    assert read(job.id).status == "held"


def test_held_and_scheduled_exclude_each_other() -> None:
    """C5."""
    with register_for_test(Import):
        with pytest.raises(InvalidInput, match="run_after"):
            service.start(Import, hold=True, run_after=timedelta(hours=1))
        with pytest.raises(InvalidInput, match="hold"):
            service.start(Import, hold="yes")  # type: ignore[arg-type]
        (started,) = service.start_many([{"kind": Import.name, "hold": True}])
        assert started.job.status == "held"  # type: ignore[union-attr]


def test_held_work_may_share_a_lock_key_and_a_repeat_finds_it() -> None:
    """A58, A59."""
    with register_for_test(Import):
        first = service.start(Import, hold=True, lock_key="l", idempotency_key="a").job
        service.start(Import, hold=True, lock_key="l", idempotency_key="b")
        again = service.start(Import, hold=True, lock_key="l", idempotency_key="a")
        assert (again.job.id, again.created) == (first.id, False)


# --- ownership --------------------------------------------------------------------------------------------


def test_ownership_is_told_apart_from_status() -> None:
    """A52, A53, C4."""
    expected = {
        "held": "unclaimed", "pending": "unclaimed", "retrying": "unclaimed", "running": "current",
        "expired": "expired", "completed": "terminal", "failed": "terminal", "cancelled": "terminal",
        "parked": "terminal", "cancelling": "current",
    }  # fmt: skip
    for state, ownership in expected.items():
        job = make_job(state, kind=KIND, scope=HOME)
        if state == "expired":
            age(job.id)
        assert read(job.id).ownership == ownership, state
        assert read(job.id).ownership_at(store.now()) == ownership, state


def test_only_a_lease_asks_for_the_clock(django_assert_num_queries: Any) -> None:
    """A52: judged when it is read."""
    running, done = make_job("running", kind=KIND), make_job("completed", kind=KIND)
    with django_assert_num_queries(1):
        assert running.ownership == "current"
    with django_assert_num_queries(0):
        assert done.ownership == "terminal"
    age(running.id)
    assert running.ownership == "current" and read(running.id).ownership == "expired"


def fake(**columns: Any) -> Job:
    """A row that the table itself would not let in."""
    facts = {"status": "held", "tenant_id": "acme", "queue_name": "manual", "idempotency_key": "k",
             "input_text": INPUT, "input_sha256": jsontext.sha256(INPUT)}  # fmt: skip
    return Job(**{**facts, **columns})


@pytest.mark.parametrize(
    ("columns", "problem"),
    [
        ({"lease_owner": "x"}, "traces of an execution"), ({"lease_epoch": 1}, "traces of an execution"),
        ({"attempts": 1}, "traces of an execution"), ({"lease_expires_at": rows.ago(1)}, "traces of an execution"),
        ({"attempts": 1, "input_text": None}, "traces of an execution"),
        ({"input_text": None}, "is missing"), ({"input_sha256": None}, "is missing"), ({"tenant_id": ""}, "is missing"),
        ({"idempotency_key": None}, "is missing"), ({"input_text": None, "input_sha256": "x"}, "is missing"),
        ({"input_text": "{"}, "is not JSON"), ({"input_text": "{", "input_sha256": "0" * 64}, "is not JSON"),
        ({"input_text": "[]"}, "do not match the hash"), ({"input_sha256": "0" * 64}, "do not match the hash"),
        ({}, None), ({"idempotency_key": None, "queue_name": "imports"}, None),
    ],
)  # fmt: skip
def test_four_problems_of_waiting_work_in_their_order(columns: dict[str, Any], problem: str | None) -> None:
    """A54, A55, A53."""
    job = fake(**columns)
    if problem is None:
        assert job.diagnostic is None and job.ownership == "unclaimed"
    else:
        assert problem in (job.diagnostic or "") and job.ownership == "legacy-unknown"


def test_who_runs_a_row_without_an_owner_is_not_known() -> None:
    """A53."""
    assert fake(status="running").ownership == "legacy-unknown"


def test_what_a_thousand_jobs_have_left_here_is_remembered_and_no_more() -> None:
    """A55."""
    first, *others = (uuid7() for _ in range(1001))
    for job_id in (first, *others):
        models.note_diagnostic(job_id, "a callback failed")
    assert set(models.local_diagnostics) == set(others)


def test_a_result_that_is_no_json_is_given_as_it_is() -> None:
    """A54."""
    job = ended("completed")
    assert job.diagnostic is None
    acts.write(job.id, "result", "done!")
    assert read(job.id).result == "done!" and "not JSON" in (read(job.id).diagnostic or "")
    assert read(job.id).ownership == "terminal"


def test_a_waiting_job_without_any_input_has_no_problem() -> None:
    """B8: nothing can have been changed."""
    job = make_job("pending", kind=KIND)
    rows.execute("UPDATE durable_jobs_job SET input = NULL, input_sha256 = NULL WHERE id = %s", job.id)
    assert read(job.id).ownership == "unclaimed" and read(job.id).diagnostic is None
    assert isinstance(store.claim(job.id, 0, 0, "w", 30), Job)
