"""History goes only when a person asks, archived first, and a kill loses nothing of it."""

from __future__ import annotations

import json
import threading
import tracemalloc
from collections import Counter
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest
from django.core.management import CommandError, call_command
from django.db import connection, transaction

from durable_jobs import pruning, store
from durable_jobs.exceptions import TransactionOwned
from durable_jobs.models import CancelRequest, Job, JobEvent, uuid7
from durable_jobs.pruning import ArchiveUnusable, Policy
from durable_jobs.testing import make_job
from tests.connections import OtherConnection
from tests.postgres import wait_until
from tests.processes import Processes
from tests.store import rows
from tests.store.conftest import no_users_remembered  # noqa: F401

pytestmark = pytest.mark.django_db

OLD = 100
LATER = datetime.now(UTC) + timedelta(days=1)


# --- helpers --------------------------------------------------------------------------------------------


def ended(
    count: int, status: str = "completed", *, days: float = OLD, events: int = 0, **columns: Any
) -> list[UUID]:
    """Jobs that ended so many days ago, each with so many lines of history."""
    shape = rows.columns_of(
        rows.State(
            "failed" if status == "parked" else status, None, "row" if status == "cancelled" else "none"
        )
    )
    made = []
    for number in range(count):
        when = rows.ago(days * 86_400 - number * 0.001)
        parked = when if status == "parked" else None
        made.append(
            {**shape, "id": uuid7(), "finished_at": when, "parked_at": parked, "idempotency_key": None, "lock_key": None,
             "created_at": when, "domain_mirrored_at": None, "cancelled_by_id": None, **columns}
        )  # fmt: skip
    for begin in range(0, count, 200):
        rows.insert_raw(*made[begin : begin + 200])
    history = [
        {"job_id": row["id"], "event": f"line {number}", "created_at": rows.ago(3), "message": "wörd\n", "reason": "", "code": "",
         "owner": "", "actor": "", "error_type": "", "traceback": "", "release": "", "kind": row["kind"], "tenant_id": "acme"}
        for row in made for number in range(events)
    ]  # fmt: skip
    for begin in range(0, len(history), 200):
        rows.insert_raw(*history[begin : begin + 200], table="durable_jobs_event")
    return [row["id"] for row in made]


def archived(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def ids_in(path: Path) -> Counter[str]:
    return Counter(line["job"]["id"] for line in archived(path) if "job" in line)


def command(*arguments: str, capsys: Any = None) -> str:
    call_command("prune_jobs", *arguments)
    return capsys.readouterr().out if capsys else ""


def left() -> set[UUID]:
    return set(Job.objects.values_list("id", flat=True))


# --- what goes, and what stays --------------------------------------------------------------------------


def test_without_yes_nothing_is_deleted_and_it_says_what_would_go_and_stay(capsys: Any) -> None:
    ended(3)
    ended(2, "cancelled")
    ended(1, "failed")
    make_job("pending")
    out = command("--older-than", "90d", capsys=capsys)
    assert "3 completed, 2 cancelled would be deleted" in out
    assert "1 failed would stay (--include-failed takes them as well)" in out
    assert "Nothing was deleted; add --yes" in out
    assert Job.objects.count() == 7


def test_only_what_the_policy_names_goes(tmp_path: Path, capsys: Any) -> None:
    going = ended(3) + ended(2, "cancelled")
    staying = set(ended(1, "failed") + ended(1, "parked") + ended(2, days=80))
    archive = tmp_path / "jobs.jsonl"
    out = command("--older-than", "90d", "--archive", str(archive), "--yes", capsys=capsys)
    assert "Deleted 5 jobs (2 cancelled, 3 completed) and 0 lines of history, kept in" in out
    assert left() == staying
    assert set(ids_in(archive)) == {str(job_id) for job_id in going}


def test_failed_and_parked_jobs_go_when_that_was_said(tmp_path: Path) -> None:
    ended(2, "failed"), ended(2, "parked"), ended(1)
    command("--older-than", "90d", "--no-archive", "--include-failed", "--yes")
    assert not left()


def test_jobs_that_have_not_ended_never_go() -> None:
    staying = {
        make_job(status).id
        for status in ("held", "pending", "running", "expired", "retrying", "verdict", "cancelling")
    }
    rows.execute("UPDATE durable_jobs_job SET created_at = %s", rows.ago(400 * 86_400))
    pruning.prune(Policy(LATER, ("completed", "cancelled", "failed")), None, rest=0)
    assert left() == staying
    with pytest.raises(ValueError, match="running"):
        Policy(LATER, ("completed", "running"))


def test_the_age_must_be_given_and_the_archive_decided(tmp_path: Path) -> None:
    ended(1)
    for arguments in [("--yes",), ("--older-than", "90", "--yes"), ("--older-than", "90d", "--yes"),
                      ("--older-than", "90d", "--yes", "--status", "running", "--no-archive")]:  # fmt: skip
        with pytest.raises(CommandError):
            command(*arguments)
    assert Job.objects.count() == 1


def test_events_and_letters_go_with_their_job_and_with_no_other(tmp_path: Path) -> None:
    (going,) = ended(1, events=3)
    (staying,) = ended(1, "failed", events=2)
    rows.insert_raw(rows.letter(going, "late", 10), table="durable_jobs_cancelrequest")
    archive = tmp_path / "a.jsonl"
    pruning.prune(Policy(rows.ago(90 * 86_400)), archive, rest=0)
    assert set(JobEvent.objects.values_list("job_id", flat=True)) == {staying}
    assert not CancelRequest.objects.exists()
    lines = archived(archive)
    assert [next(iter(line)) for line in lines] == ["batch", "job", "event", "event", "event"]
    assert [line["event"]["event"] for line in lines[2:]] == ["line 0", "line 1", "line 2"]
    assert lines[2]["event"]["message"] == "wörd\n"


def test_the_archive_holds_every_column_as_it_was_stored(tmp_path: Path) -> None:
    (job_id,) = ended(1)
    before = rows.image(job_id)
    archive = tmp_path / "a.jsonl"
    pruning.prune(Policy(rows.ago(90 * 86_400)), archive, rest=0)
    stored = archived(archive)[1]["job"]
    assert set(stored) == {field.column for field in Job._meta.concrete_fields}
    assert stored["input"] == rows.INPUT == before["input"]
    assert datetime.fromisoformat(stored["finished_at"]) == before["finished_at"]
    assert UUID(stored["id"]) == job_id


def test_a_pruned_jobs_idempotency_key_can_be_used_again() -> None:
    ended(1, idempotency_key="once")
    pruning.prune(Policy(rows.ago(90 * 86_400)), None, rest=0)
    ended(1, idempotency_key="once")


def test_a_row_that_somebody_holds_is_passed_over(second_connection: OtherConnection, tmp_path: Path) -> None:
    if connection.vendor == "sqlite":
        pytest.skip("SQLite has no row locks")
    held = ended(5)[0]
    second_connection.enter(transaction.atomic())
    second_connection.run(lambda: Job.objects.select_for_update().get(pk=held))
    done = pruning.prune(Policy(rows.ago(90 * 86_400)), tmp_path / "a.jsonl", rest=0)
    assert (done.jobs, left()) == (4, {held})
    second_connection.leave()
    assert pruning.prune(Policy(rows.ago(90 * 86_400)), tmp_path / "a.jsonl", rest=0).jobs == 1


def test_it_owns_its_transactions() -> None:
    with transaction.atomic(), pytest.raises(TransactionOwned):
        pruning.prune(Policy(LATER), None)


# --- batches --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("batch", [1, 7, 500])
def test_every_batch_size_takes_everything_once(batch: int, tmp_path: Path) -> None:
    going = ended(23, events=2)
    # Equal times: the key has the id as well.
    rows.execute("UPDATE durable_jobs_job SET finished_at = %s", rows.ago(OLD * 86_400))
    archive = tmp_path / "a.jsonl"
    done = pruning.prune(Policy(rows.ago(90 * 86_400)), archive, batch=batch, rest=0)
    assert (done.jobs, done.events, left()) == (23, 46, set())
    assert ids_in(archive) == Counter(str(job_id) for job_id in going)


def test_large_jobs_make_small_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    ended(10, result=json.dumps("x" * 100_000))
    monkeypatch.setattr(pruning, "BATCH_CHARACTERS", 250_000)
    done = pruning.prune(Policy(rows.ago(90 * 86_400)), None, rest=0)
    assert (done.jobs, done.batches) == (10, 4)


def test_one_job_larger_than_a_batch_goes_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    ended(2, result=json.dumps("x" * 100_000))
    monkeypatch.setattr(pruning, "BATCH_CHARACTERS", 10)
    assert pruning.prune(Policy(rows.ago(90 * 86_400)), None, rest=0).jobs == 2


def test_memory_is_bounded_by_the_batch(tmp_path: Path) -> None:
    ended(400, result=json.dumps("x" * 50_000))
    tracemalloc.start()
    try:
        pruning.prune(Policy(rows.ago(90 * 86_400)), tmp_path / "a.jsonl", rest=0)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert not left()
    assert peak < 45 * 1024 * 1024


# --- the archive ----------------------------------------------------------------------------------------


def test_two_runs_add_to_one_archive(tmp_path: Path) -> None:
    archive = tmp_path / "a.jsonl"
    first, second = ended(3), ended(3, days=95)
    pruning.prune(Policy(rows.ago(97 * 86_400)), archive, rest=0)
    pruning.prune(Policy(rows.ago(90 * 86_400)), archive, rest=0)
    assert ids_in(archive) == Counter(str(job_id) for job_id in first + second)
    assert sum("batch" in line for line in archived(archive)) == 2


def test_the_archive_is_readable_by_its_owner_alone(tmp_path: Path) -> None:
    ended(1)
    pruning.prune(Policy(LATER), tmp_path / "a.jsonl", rest=0)
    assert (tmp_path / "a.jsonl").stat().st_mode & 0o777 == 0o600


def test_a_file_that_is_no_archive_is_left_alone(tmp_path: Path) -> None:
    ended(1)
    notes = tmp_path / "notes.txt"
    notes.write_text("my notes")
    with pytest.raises(ArchiveUnusable, match="is not an archive of this command"):
        pruning.prune(Policy(LATER), notes)
    with pytest.raises(CommandError, match="cannot be opened"):
        command("--older-than", "1d", "--yes", "--archive", str(tmp_path / "nowhere" / "a.jsonl"))
    assert notes.read_text() == "my notes"
    assert Job.objects.count() == 1


def test_two_runs_do_not_write_one_archive_at_a_time(
    tmp_path: Path, second_connection: OtherConnection
) -> None:
    ended(40)
    archive = tmp_path / "a.jsonl"
    begun, go_on = threading.Event(), threading.Event()

    def wait(done: pruning.Pruned) -> None:
        begun.set()
        assert go_on.wait(10)

    first = second_connection.begin(
        pruning.prune, Policy(rows.ago(90 * 86_400)), archive, batch=20, rest=0, progress=wait
    )
    assert begun.wait(10)
    with pytest.raises(ArchiveUnusable, match="another process"):
        pruning.prune(Policy(LATER), archive)
    go_on.set()
    assert first.result(10).jobs == 40


def test_a_batch_that_fails_is_taken_out_of_the_archive(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended(5, events=1)
    archive = tmp_path / "a.jsonl"

    def fail(ids: Any, batch: int) -> Any:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(store, "prune_events", fail)
        pruning.prune(Policy(rows.ago(90 * 86_400)), archive, rest=0)
    assert archive.read_bytes() == b""
    assert Job.objects.count() == 5


@pytest.mark.parametrize("cut", [0, 1, 200])
def test_what_a_killed_run_wrote_and_did_not_delete_is_taken_out(cut: int, tmp_path: Path) -> None:
    archive = tmp_path / "a.jsonl"
    gone, there = ended(4), ended(4, days=95, events=1)
    pruning.prune(Policy(rows.ago(97 * 86_400)), archive, rest=0)
    whole = archive.read_bytes()
    # The state after a kill between the archive's flush and the commit: the lines are there, and so are the rows.
    with pytest.raises(RuntimeError), transaction.atomic():
        jobs = store.prune_batch(
            ended_before=rows.ago(90 * 86_400),
            statuses=["completed"],
            after=pruning._FIRST,
            batch=10,
            budget=10**9,
        )
        events = store.prune_events([job.id for job in jobs], 10)
        lines = [
            {"batch": {"id": "x"}},
            *({"job": pruning.as_stored(job)} for job in jobs),
            *({"event": pruning.as_stored(event)} for event in events),
        ]
        text = b"".join(pruning._line(line) for line in lines)
        archive.write_bytes(whole + (text[:-cut] if cut else text))
        raise RuntimeError("killed")
    assert len(left()) == 4
    pruning.prune(Policy(rows.ago(90 * 86_400)), archive, rest=0)
    assert ids_in(archive) == Counter(str(job_id) for job_id in gone + there)
    assert archive.read_bytes().startswith(whole)


def test_a_last_batch_that_did_commit_is_kept(tmp_path: Path) -> None:
    archive = tmp_path / "a.jsonl"
    going = ended(4)
    pruning.prune(Policy(rows.ago(90 * 86_400)), archive, rest=0)
    pruning.prune(Policy(rows.ago(90 * 86_400)), archive, rest=0)
    assert ids_in(archive) == Counter(str(job_id) for job_id in going)


# --- killed ---------------------------------------------------------------------------------------------

PRUNE = ["prune_jobs", "--older-than", "90d", "--yes", "--skip-checks"]


def deleted_down_to(number: int) -> bool:
    return Job.objects.count() < number


def test_five_thousand_jobs_through_two_kills(processes: Processes, tmp_path: Path) -> None:
    """C101: killed half-way by SIGKILL, run again: nothing lost, nothing twice, the rest untouched."""
    going = ended(2_500) + ended(2_000, "cancelled", days=120) + ended(500, days=91, events=1)
    staying = set(ended(30, "failed") + ended(20, days=10) + [make_job("running").id, make_job("pending").id])
    archive = tmp_path / "a.jsonl"
    for bound in (3_800, 2_000):
        run = processes.manage(*PRUNE, "--archive", str(archive), "--batch-size", "50", "--rest", "0.01")
        wait_until(partial(deleted_down_to, bound + len(staying)), 30, "nothing was deleted")
        run.kill()
    assert 0 < Job.objects.count() - len(staying) < 3_800
    last = processes.manage(*PRUNE, "--archive", str(archive), "--rest", "0")
    assert last.wait(60) == 0, last.output
    assert left() == staying
    assert ids_in(archive) == Counter(str(job_id) for job_id in going)
    events = Counter(line["event"]["id"] for line in archived(archive) if "event" in line)
    assert (len(events), set(events.values())) == (500, {1})


def test_work_goes_on_while_history_is_deleted(processes: Processes, tmp_path: Path) -> None:
    ended(1_500)
    settings = {"DISCOVER": ["worker_kinds"]}
    worker = processes.manage("runworker", "--queues", "worker", "--skip-checks", settings=settings)
    worker.wait_for_output("worker_started")
    run = processes.manage(*PRUNE, "--no-archive", "--batch-size", "50", "--rest", "0.02", settings=settings)
    jobs = [make_job(kind="worker.quick", queue="worker", input=number).id for number in range(20)]
    wait_until(
        lambda: Job.objects.filter(id__in=jobs, status="completed").count() == 20, 20, "jobs did not end"
    )
    assert run.wait(30) == 0, run.output
    assert left() == set(jobs)
    worker.terminate()
    assert worker.wait(20) == 0
