"""What a job is doing, why it does not run, and what can be done: as tables, and on real rows."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from django.conf import settings
from django.test import override_settings

from durable_jobs import explain, overview, selection, service, store
from durable_jobs.explain import Phase, Reason, phase, reasons
from durable_jobs.kinds import Done, Kind
from durable_jobs.models import Job, JobEvent, Pause, WorkerProcess, uuid7
from durable_jobs.selection import Look, Selection
from durable_jobs.store import Lease
from durable_jobs.testing import make_job, register_for_test
from tests.store import rows
from tests.store.conftest import no_users_remembered  # noqa: F401

NOW = datetime(2026, 3, 1, 3, 0, tzinfo=UTC)
on_the_database = pytest.mark.django_db


class Known(Kind):
    name = "tests.known"
    aliases = ("tests.renamed",)
    orphan_policy = "redrive"
    max_slice_seconds = 3_600

    def step(self, ctx: Any) -> Done:
        return Done()


class Careful(Known):
    name = "tests.careful"
    aliases = ()
    orphan_policy = "park"


@pytest.fixture(autouse=True)
def registered() -> Iterator[None]:
    with register_for_test(Known, Careful):
        yield


# --- rows in memory -------------------------------------------------------------------------------------


def at(seconds: float) -> datetime:
    return NOW + timedelta(seconds=seconds)


def pending(**columns: Any) -> Job:
    usual: dict[str, Any] = {"status": "pending", "next_run_at": at(-10), "pending_since": at(-10)}
    return job(**{**usual, **columns})


def running(**columns: Any) -> Job:
    usual: dict[str, Any] = {
        "status": "running", "lease_owner": "web3:17:ab", "lease_epoch": 2, "lease_expires_at": at(40),
        "heartbeat_at": at(-5), "claimed_at": at(-60), "attempts": 2, "last_committed_at": at(-30),
    }  # fmt: skip
    return job(**{**usual, **columns})


def retrying(**columns: Any) -> Job:
    usual: dict[str, Any] = {
        "lease_owner": None, "next_run_at": at(40), "consecutive_failures": 3, "error_type": "builtins.OSError",
        "lease_expires_at": at(-5),
    }  # fmt: skip
    return running(**{**usual, **columns})


def failed(**columns: Any) -> Job:
    usual: dict[str, Any] = {
        "status": "failed", "finished_at": at(-100), "error_type": "builtins.OSError", "error_message": "no route",
        "error_class": "transient", "consecutive_failures": 5, "verdict": "retry_exhausted",
    }  # fmt: skip
    return job(**{**usual, **columns})


def job(**columns: Any) -> Job:
    return Job(
        **{"id": uuid7(), "kind": "tests.known", "queue_name": "imports", "tenant_id": "acme", **columns}
    )


def pause(**columns: Any) -> Pause:
    return Pause(**{"reason": "migration", "actor": "anna", "since": at(-600), **columns})


def worker(
    queues: list[str] | None = None, kinds: list[str] | None = None, seen: float = -5, **columns: Any
) -> WorkerProcess:
    listed = {"queues": json.dumps(queues or []), "kinds": json.dumps(kinds or [])}
    return WorkerProcess(**{"owner": "web3:17:ab", "host": "web3", "beat_at": at(seen), **listed, **columns})


ALL = [pause()]

# --- phase ----------------------------------------------------------------------------------------------

PHASES = [
    (job(status="held"), [], "held"),
    (job(status="held"), ALL, "held"),
    (job(status="held", cancel_requested_at=at(-5)), [], "stopping"),
    (job(status="held", cancel_requested_at=at(-500)), [], "stuck"),
    (pending(), [], "waiting"),
    (pending(next_run_at=at(0)), [], "waiting"),
    (pending(next_run_at=at(1)), [], "scheduled"),
    (pending(), ALL, "paused"),
    (pending(next_run_at=at(1)), ALL, "paused"),
    (pending(), [pause(queue_name="imports")], "paused"),
    (pending(), [pause(kind="tests.known")], "paused"),
    (pending(), [pause(tenant_id="acme")], "paused"),
    (pending(), [pause(queue_name="imports", kind="tests.known", tenant_id="acme")], "paused"),
    (pending(), [pause(queue_name="imports", tenant_id="other")], "waiting"),
    (
        pending(),
        [pause(queue_name="exports"), pause(kind="tests.other"), pause(tenant_id="other")],
        "waiting",
    ),
    (pending(cancel_requested_at=at(-5)), ALL, "stopping"),
    (pending(cancel_requested_at=at(-500)), [], "stuck"),
    (pending(mirror_attempts=3), [], "stuck"),
    (pending(mirror_attempts=2), [], "waiting"),
    (running(), [], "running"),
    (running(), ALL, "running"),
    (running(lease_expires_at=at(-20)), [], "running"),
    (running(lease_expires_at=at(-21)), [], "stuck"),
    (running(lease_expires_at=at(-21)), ALL, "stuck"),
    (running(last_committed_at=at(-899)), [], "running"),
    (running(last_committed_at=at(-901)), [], "running"),
    (running(last_committed_at=at(-901), claimed_at=at(-901)), [], "stuck"),
    (running(last_committed_at=None, claimed_at=at(-901)), [], "stuck"),
    (running(cancel_requested_at=at(-5)), [], "stopping"),
    (running(cancel_requested_at=at(-31)), [], "stuck"),
    (running(mirror_attempts=3), [], "stuck"),
    (retrying(), [], "retrying"),
    (retrying(next_run_at=at(-1)), [], "retrying"),
    (retrying(), ALL, "paused"),
    (retrying(cancel_requested_at=at(-5)), [], "stopping"),
    (retrying(lease_expires_at=at(-5_000)), [], "retrying"),
    (retrying(verdict="retry_exhausted", mirror_attempts=3), [], "stuck"),
    (job(status="completed", finished_at=at(-1)), ALL, "completed"),
    (job(status="cancelled", finished_at=at(-1), cancel_requested_at=at(-500)), [], "cancelled"),
    (failed(), [], "failed"),
    (failed(mirror_attempts=9, cancel_requested_at=at(-500)), [], "failed"),
    (failed(parked_at=at(-100), error_code="poison"), ALL, "parked"),
]


@pytest.mark.parametrize(("row", "pauses", "expected"), PHASES)
def test_phase(row: Job, pauses: list[Pause], expected: str) -> None:
    assert phase(row, NOW, pauses) == expected


def test_every_phase_is_in_the_table() -> None:
    assert {expected for _, _, expected in PHASES} == set(Phase)


# --- reasons --------------------------------------------------------------------------------------------

WORKERS = [worker()]
REASONS: list[tuple[Job, dict[str, Any], list[str], str, str]] = [
    # row, what was read with it, codes, a part of the first sentence, a part of its way out
    (pending(), {"workers": WORKERS}, ["waiting"], "Due for 10 s; waits for a free worker of the queue imports.", ""),
    (pending(), {}, ["no_worker"], "No live worker serves the queue imports. No worker is signed on.",
     "manage.py runworker --queues imports"),
    (pending(), {"workers": [worker(["exports"])], "last_worker": worker(seen=-720)}, ["no_worker"],
     "The last worker of any queue was seen 12 min ago on web3.", "runworker"),
    (pending(), {"workers": [worker(["imports"])]}, ["waiting"], "Due", ""),
    (pending(), {"workers": [worker(["imports", "x"], ["tests.known"])]}, ["waiting"], "Due", ""),
    (pending(kind="tests.renamed"), {"workers": [worker(kinds=["tests.known"])]}, ["waiting"], "Due", ""),
    (pending(kind="tests.known"), {"workers": [worker(kinds=["tests.renamed"])]}, ["waiting"], "Due", ""),
    (pending(), {"workers": [worker(kinds=["tests.other"])]}, ["unknown_kind"],
     "The live workers of the queue imports do not take the kind tests.known.", "Start one that does."),
    (pending(kind="tests.gone"), {"workers": WORKERS}, ["unknown_kind"], "The kind tests.gone is not registered here.",
     "aliases"),
    (pending(kind="tests.gone"), {"workers": [worker(kinds=["tests.gone"])]}, ["waiting"], "Due", ""),
    (pending(), {"workers": [worker(queues=["{"])]}, ["no_worker"], "No live worker", ""),
    (pending(next_run_at=at(7_200)), {"workers": WORKERS}, ["scheduled"], "Due in 2 h, as scheduled.", ""),
    (pending(next_run_at=at(90), attempts=4), {"workers": WORKERS}, ["scheduled"], "Due in 90 s, as the job asked.", ""),
    (pending(next_run_at=at(7_200)), {}, ["no_worker", "scheduled"], "No live worker", "Start one"),
    (pending(), {"workers": WORKERS, "pauses": ALL}, ["paused"],
     "Paused (all work) since 2026-03-01 02:50 UTC by anna: migration.", "Unpause."),
    (pending(), {"pauses": [pause(queue_name="imports", tenant_id="acme", actor="", reason="Moving.")], "workers": WORKERS},
     ["paused"], "Paused (queue imports, tenant acme) since 2026-03-01 02:50 UTC: Moving.", "Unpause."),
    (pending(), {"pauses": [*ALL, pause(kind="tests.known")]}, ["paused", "paused", "no_worker"], "Paused (all work)", ""),
    (pending(queue_name="manual"), {"workers": WORKERS}, ["manual"], "Workers leave this queue alone", ""),
    (retrying(), {"workers": WORKERS}, ["retrying"], "Tries again in 40 s; 3 of 5 failures, the last: builtins.OSError.",
     "A redrive runs it now."),
    (retrying(next_run_at=at(-1)), {"workers": WORKERS}, ["retrying"], "Tries again as soon as a worker is free;", ""),
    (retrying(kind="tests.gone"), {"workers": WORKERS}, ["unknown_kind", "retrying"], "The kind tests.gone", ""),
    (retrying(consecutive_failures=0), {"workers": WORKERS}, ["retrying"], "Goes on in 40 s; no failure is counted.", ""),
    (retrying(), {"workers": WORKERS, "pauses": ALL}, ["paused", "retrying"], "Paused", "Unpause."),
    (retrying(verdict="retry_exhausted"), {"workers": WORKERS}, ["ending"],
     "Its work has failed for good (builtins.OSError); ending the job, with its hooks, is tried again in 40 s.", ""),
    (running(), {"workers": WORKERS}, [], "", ""),
    (running(), {}, [], "", ""),
    (running(), {"pauses": ALL}, ["pausing"], "Its slice is asked to yield at the next boundary.", ""),
    (running(lease_expires_at=at(-75)), {}, ["lease_expired"],
     "Its worker web3:17:ab has not renewed the lease, which ended 75 s ago.", "runs it again from its checkpoint by itself"),
    (running(kind="tests.careful", lease_expires_at=at(-75)), {}, ["lease_expired"], "which ended 75 s ago",
     "parks it, as its kind asks"),
    (running(kind="tests.gone", lease_expires_at=at(-75)), {}, ["lease_expired"], "which ended 75 s ago",
     "a worker that knows it repairs the job"),
    (running(queue_name="manual", lease_expires_at=at(-75)), {}, ["lease_expired"], "ended 75 s ago", "No reconciler touches this queue"),
    (running(lease_expires_at=at(-75)), {"pauses": ALL}, ["lease_expired", "pausing"], "ended 75 s ago", "Paused work is not repaired."),
    (running(lease_expires_at=at(-75), cancel_requested_at=at(-9)), {"pauses": ALL}, ["lease_expired"], "ended 75 s ago",
     "ends it as cancelled by itself"),
    (running(last_committed_at=at(-1_200), claimed_at=at(-1_300)), {}, ["stalled"], "has committed nothing for 20 min",
     "should commit more often"),
    (running(last_committed_at=at(-7_201), claimed_at=at(-7_300)), {}, ["slice_overdue"],
     "Its slice has committed nothing for 2 h; after 60 min it counts as hung", "slice_overdue shows the stack"),
    (running(cancel_requested_at=at(-3)), {}, ["stopping"],
     "A cancel was requested 3 s ago; its worker sees it with its next beat.", ""),
    (running(cancel_requested_at=at(-8)), {}, ["stopping"],
     "A cancel was requested 8 s ago; its worker has seen it and stops at the next boundary.", ""),
    (running(cancel_requested_at=at(-300)), {}, ["cancel_seen"], "requested 5 min ago, and its worker knows",
     "end its worker"),
    (running(cancel_requested_at=at(-300), heartbeat_at=at(-301)), {}, ["cancel_unseen"], "nobody has acted on it", "live worker"),
    (pending(cancel_requested_at=at(-3)), {"workers": WORKERS}, ["stopping"],
     "A cancel was requested 3 s ago; the reconciler of any worker ends the job with its next pass.", ""),
    (pending(cancel_requested_at=at(-300)), {"workers": WORKERS}, ["cancel_unseen"], "requested 5 min ago", "reconciler"),
    (running(), {"requested_at": at(-3)}, ["stopping"], "requested 3 s ago; its worker sees it", ""),
    (running(), {"requested_at": at(-300)}, ["cancel_seen"], "requested 5 min ago", ""),
    (retrying(mirror_attempts=3, verdict="retry_exhausted"), {"workers": WORKERS}, ["mirror_failing", "ending"],
     "Its hooks have failed 3 times, so it cannot end.", "settle the job without hooks"),
    (pending(mirror_attempts=4, cancel_requested_at=at(-300)),
     {"mirror_error": JobEvent(error_type="shop.Gone", message="no row")},
     ["cancel_unseen", "mirror_failing"], "requested 5 min ago", ""),
    (job(status="held"), {}, ["held"], "It is held: nothing starts it by itself.", "Release it."),
    (job(status="held", cancel_requested_at=at(-3)), {}, ["stopping"], "A cancel was requested 3 s ago", ""),
    (failed(), {}, ["failed"], "Failed after 5 failures. builtins.OSError: no route", "Redrive it once the cause is gone."),
    (failed(consecutive_failures=1), {}, ["failed"], "Failed after 1 failure. ", ""),
    (failed(error_type=None, error_message=None, consecutive_failures=0), {}, ["failed"], "Failed. no message", ""),
    (failed(verdict="unrecoverable"), {}, ["unrecoverable"],
     "Failed, and running it again is expected to fail again. builtins.OSError: no route", "redrive it with force"),
    (failed(parked_at=at(-1), error_code="poison"), {}, ["parked"], "Parked as poison. builtins.OSError: no route", "Redrive it"),
    (failed(parked_at=at(-1), error_code="cursor_version", verdict="unrecoverable"), {}, ["parked"], "Parked as cursor_version.", "with force"),
    (failed(lock_key="import:7"), {"holder": job(id="01a22961-2345-77d8-823b-1d8c1ed4a4dd")}, ["failed", "lock_held"],
     "Failed after", "Redrive it"),
    (failed(kind="tests.gone"), {}, ["failed", "unknown_kind"], "Failed after", ""),
    (job(status="completed", finished_at=at(-1)), {"pauses": ALL}, [], "", ""),
    (job(status="cancelled", finished_at=at(-1), cancel_requested_at=at(-500)), {"pauses": ALL}, [], "", ""),
]  # fmt: skip


@pytest.mark.parametrize(("row", "read", "codes", "sentence", "way_out"), REASONS)
def test_reasons(row: Job, read: dict[str, Any], codes: list[str], sentence: str, way_out: str) -> None:
    found = reasons(row, NOW, **read)
    assert [reason.code for reason in found] == codes
    if found:
        assert sentence in found[0].sentence
        assert way_out in found[0].way_out


def test_every_reason_is_in_the_table() -> None:
    codes = {code for _, _, listed, _, _ in REASONS for code in listed}
    assert codes == {
        "waiting", "scheduled", "retrying", "ending", "no_worker", "unknown_kind", "paused", "pausing", "manual", "held",
        "lease_expired", "stalled", "slice_overdue", "stopping", "cancel_seen", "cancel_unseen", "mirror_failing",
        "failed", "unrecoverable", "parked", "lock_held",
    }  # fmt: skip


@pytest.mark.parametrize("row", [row for row, *_ in REASONS])
def test_sentences_are_whole(row: Job) -> None:
    for reason in reasons(row, NOW, ALL, [], worker(seen=-100)):
        assert reason.sentence[0].isupper() and "None" not in reason.sentence, reason
        assert reason.way_out == "" or reason.way_out[0].isupper(), reason


def test_what_is_stuck_says_why_first() -> None:
    for row, pauses, expected in PHASES:
        if expected == "stuck":
            assert reasons(row, NOW, pauses)[0].code in explain.STUCK_REASONS


def test_the_last_error_of_a_failing_hook_is_told() -> None:
    row = retrying(mirror_attempts=3)
    event = JobEvent(error_type="shop.Gone", message="no row " * 200)
    found = reasons(row, NOW, workers=WORKERS, mirror_error=event)[0]
    assert "The last error: shop.Gone: no row" in found.sentence
    assert len(found.sentence) < 500


def test_the_holder_of_the_lock_is_named() -> None:
    holder = job()
    held = reasons(failed(lock_key="import:7"), NOW, holder=holder)[1]
    assert f"job {holder.id} holds its lock key import:7" in held.sentence
    row = failed(lock_key="import:7")
    assert [reason.code for reason in reasons(row, NOW, holder=row)] == ["failed"]


@pytest.mark.parametrize(
    ("seconds", "expected"),
    [(-3, "0 s"), (0.4, "0 s"), (119, "119 s"), (120, "2 min"), (7_199, "119 min"), (7_200, "2 h"), (172_799, "47 h"), (172_800, "2 d"), (9e8, "10416 d")],
)  # fmt: skip
def test_span(seconds: float, expected: str) -> None:
    assert explain.span(seconds) == expected


def test_limits_come_from_the_settings() -> None:
    row = running(lease_expires_at=at(-30), last_committed_at=at(-100), claimed_at=at(-100))
    with override_settings(DURABLE_JOBS={"GRACE": 60.0}):
        assert phase(row, NOW) is Phase.RUNNING
    with override_settings(DURABLE_JOBS={"GRACE": 60.0, "STALLED_AFTER": 90.0}):
        assert phase(row, NOW) is Phase.STUCK


# --- on real rows ---------------------------------------------------------------------------------------

MADE = {
    "held": "held", "pending": "waiting", "running": "running", "retrying": "retrying", "verdict": "retrying",
    "failed": "failed", "parked": "parked", "completed": "completed", "cancelled": "cancelled", "cancelling": "stopping",
}  # fmt: skip


@on_the_database
@pytest.mark.parametrize("status", MADE)
def test_the_phase_of_real_rows(status: str) -> None:
    made = make_job(status, kind="tests.known")
    assert Look.take().phase(made) == MADE[status]
    assert Look.take().phase(Job.objects.get(pk=made.pk)) == MADE[status]


@on_the_database
def test_explain_reads_what_it_needs() -> None:
    row = make_job("pending", kind="tests.known", queue="imports")
    assert codes_of(row) == ["no_worker"]
    store.worker_started("w1", host="web3", pid=1, queues=[], kinds=[], concurrency=4)
    assert codes_of(row) == ["waiting"]
    service.pause(queue="imports", reason="migration", actor="anna")
    (paused,) = explain.explain(row)
    assert "Paused (queue imports)" in paused.sentence and "by anna: migration." in paused.sentence
    service.unpause(queue="imports")
    rows.execute("UPDATE durable_jobs_worker SET beat_at = %s", rows.ago(720))
    (silent,) = explain.explain(row)
    assert silent.code == "no_worker" and "was seen 12 min ago on web3" in silent.sentence


@on_the_database
def test_explain_finds_the_holder_of_the_lock() -> None:
    done = make_job("failed", kind="tests.known", lock_key="import:7")
    assert codes_of(done) == ["failed"]
    holder = make_job("pending", kind="tests.known", lock_key="import:7")
    lock_held = explain.explain(done)[1]
    assert lock_held.code == "lock_held" and str(holder.id) in lock_held.sentence


@on_the_database
def test_explain_reads_a_cancel_that_is_still_in_the_mailbox() -> None:
    row = make_job("running", kind="tests.known")
    assert codes_of(row) == []
    rows.insert_raw(rows.letter(row.id, "anna", 300), table="durable_jobs_cancelrequest")
    rows.execute("UPDATE durable_jobs_job SET heartbeat_at = %s", rows.ago(301))
    assert codes_of(Job.objects.get(pk=row.pk)) == ["cancel_unseen"]
    store.beat_many(row.lease_owner or "", [Lease(row.id, row.lease_owner or "", row.lease_epoch, 60.0)])
    assert codes_of(Job.objects.get(pk=row.pk)) == ["cancel_seen"]


@on_the_database
def test_explain_tells_the_last_error_of_the_hooks() -> None:
    row = make_job("verdict", kind="tests.known")
    rows.execute("UPDATE durable_jobs_job SET mirror_attempts = 3 WHERE id = %s", row.id)
    store.add_event(row, "mirror_failed", error_type="shop.Gone", message="first")
    store.add_event(row, "mirror_failed", error_type="shop.Gone", message="second")
    found = explain.explain(Job.objects.get(pk=row.pk))
    assert found[0].code == "mirror_failing" and "shop.Gone: second" in found[0].sentence


@on_the_database
def test_an_expired_lease_is_stuck_past_the_grace() -> None:
    row = make_job("expired", kind="tests.known")
    assert Look.take().phase(row) is Phase.RUNNING
    rows.execute("UPDATE durable_jobs_job SET lease_expires_at = %s WHERE id = %s", rows.ago(25), row.id)
    row.refresh_from_db()
    assert Look.take().phase(row) is Phase.STUCK
    assert codes_of(row) == ["lease_expired"]


@on_the_database
@pytest.mark.parametrize(
    "pauses",
    [[], [{}], [{"queue": "imports"}], [{"kind": "tests.known", "tenant": "default"}, {"queue": "x"}]],
)
def test_the_filter_by_phase_agrees_with_the_phase(pauses: list[dict[str, str]]) -> None:
    made = [
        make_job(status, kind="tests.known", queue=queue)
        for status in [*MADE, "expired"]
        for queue in ("imports", "default")
    ]
    made.append(service.start("tests.known", run_after=timedelta(hours=1)).job)
    for row in made[2:8]:
        rows.execute("UPDATE durable_jobs_job SET mirror_attempts = 3 WHERE id = %s", row.id)
    for status in ("running", "expired"):
        old = make_job(status, kind="tests.known")
        rows.execute("UPDATE durable_jobs_job SET lease_expires_at = %s WHERE id = %s", rows.ago(600), old.id)
    for part in pauses:
        service.pause(**part, reason="test")
    look = Look.take()
    everything = {row.pk: look.phase(row) for row in Job.objects.all()}
    for wanted in Phase:
        found = selection.newest(Selection(phase=wanted), look, limit=1_000)
        assert [row.pk for row in found] == sorted(
            (pk for pk, its in everything.items() if its is wanted), reverse=True
        )
    assert {Phase.STUCK, Phase.STOPPING} <= set(everything.values())


class Brisk(Known):
    name = "tests.brisk"
    aliases = ("tests.swift",)
    slice_seconds = 10
    max_slice_seconds = 60


class Slow(Known):
    name = "tests.slow"
    aliases = ()
    max_slice_seconds = 20_000


@on_the_database
@pytest.mark.parametrize("stalled_after", [900, 7_200])
def test_what_is_stuck_is_found_in_the_database_as_it_is_judged(stalled_after: int) -> None:
    """One condition, so that millions are counted without being read; it holds for the stuck and no others."""
    ages = (None, 10, 20.5, 29, 31, 59.9, 61, 899, 901, 3_599, 3_601, 7_199, 7_201, 19_999, 20_001)
    dice = random.Random(7)
    with (
        register_for_test(Brisk, Slow),
        override_settings(DURABLE_JOBS={**settings.DURABLE_JOBS, "STALLED_AFTER": stalled_after}),
    ):
        names = ("tests.known", "tests.swift", "tests.brisk", "tests.slow", "tests.nobody-knows")
        for _ in range(150):
            row = make_job(dice.choice([*MADE, *["running"] * 9]), kind=dice.choice(names))
            changed: dict[str, Any] = {}
            if row.status == "running":
                columns = ("claimed_at", "last_committed_at", "lease_expires_at")
                for column in columns[: 3 if row.lease_owner else 2]:
                    age = dice.choice(ages[1:] if column == "lease_expires_at" else ages)
                    changed[column] = None if age is None else rows.ago(age)
            if row.is_live and dice.random() < 0.3:
                changed["cancel_requested_at"] = rows.ago(dice.choice(ages[1:]))
            if row.status == "running" or changed:
                changed["mirror_attempts"] = dice.choice((0, 0, 0, 2, 3))
            for column, value in changed.items():
                rows.execute(f"UPDATE durable_jobs_job SET {column} = %s WHERE id = %s", value, row.id)
        look = Look.take()
        judged = {row.id for row in Job.objects.all() if look.phase(row) is Phase.STUCK}
        found = Job.objects.filter(explain.among(Phase.STUCK, look.now)).values_list("id", flat=True)
        assert set(found) == judged and 20 < len(judged) < 130
        assert {job.id for job in overview.stuck_jobs(look.now, limit=1_000)} == judged
        assert overview.live(look.now)["stuck"].number == len(judged)


def codes_of(row: Job) -> list[str]:
    return [reason.code for reason in explain.explain(row)]


def test_a_reason_can_be_sent_as_json() -> None:
    assert json.loads(json.dumps(vars(Reason("a", "B.")))) == {"code": "a", "sentence": "B.", "way_out": ""}


# --- how fast it goes, and what may be told ---


@pytest.mark.parametrize(
    ("columns", "rate", "left"),
    [
        (
            {"claimed_at": at(-100), "processed_count": 300, "processed_at_claim": 100, "total_count": 700},
            2.0,
            200,
        ),
        ({"claimed_at": at(-100), "processed_count": 300, "processed_at_claim": 100}, 2.0, None),
        (
            {"claimed_at": at(-100), "processed_count": 900, "processed_at_claim": 0, "total_count": 700},
            9.0,
            0,
        ),
        ({"claimed_at": at(-9), "processed_count": 300, "total_count": 700}, None, None),
        (
            {"claimed_at": at(-100), "processed_count": 5, "processed_at_claim": 5, "total_count": 700},
            None,
            None,
        ),
        ({"claimed_at": None, "processed_count": 5, "total_count": 700}, None, None),
    ],
)
def test_the_pace_is_that_of_the_present_slice(
    columns: dict[str, Any], rate: float | None, left: int | None
) -> None:
    """F23: what earlier slices did, and how long they waited, says nothing about this one."""
    told = explain.pace(running(**columns), NOW)
    assert (told.rate, told.eta_seconds) == (rate, left)


def test_what_does_not_run_has_no_pace() -> None:
    waiting = Job(status="pending", processed_count=10, total_count=20, claimed_at=at(-100), next_run_at=NOW)
    assert explain.pace(waiting, NOW) == explain.Pace()


@pytest.mark.parametrize("phase", list(Phase))
def test_every_phase_has_words_for_the_user(phase: Phase) -> None:
    job = Job(error_message="secret", error_type="Secret", progress_message="Page 3")
    told = explain.public_message(job, phase)
    assert told == "Page 3" if phase is Phase.RUNNING else "secret" not in told and told.endswith(".")
