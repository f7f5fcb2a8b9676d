"""What an operator types: every subcommand, its answers for people and for programs, and its exit code."""

from __future__ import annotations

import argparse
import io
import json
import re
import signal
import socket
from collections.abc import Iterator
from contextlib import redirect_stdout
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from typing import Any
from uuid import UUID, uuid4

import pytest
from django.core.management import CommandError, call_command, load_command_class
from django.db import transaction
from django.test import override_settings
from django.utils import timezone

from durable_jobs import overview, selection, service, store
from durable_jobs.kinds import MASKED, Done, Kind, mask
from durable_jobs.management import acts, arguments, output
from durable_jobs.models import Job, JobEvent, Pause, Scope
from durable_jobs.testing import make_job, register_for_test
from tests.connections import OtherConnection
from tests.models import Shipment
from tests.postgres import ROOT, wait_until
from tests.processes import Processes
from tests.store import rows

with_database = pytest.mark.django_db
NOBODY = UUID("01a22961-0000-7000-8000-000000000000")
DISCOVERED = {"DISCOVER": ["worker_kinds"]}


class Plain(Kind):
    """Does nothing, and may be told to refuse its way back."""

    name = "tests.plain"
    queue = "plain"
    description = "Does nothing."
    operator_note = "Ask billing first."
    runbook_url = "https://wiki.example/plain"
    masked_keys = ("token",)
    allow_restart = True
    refuses: set[UUID] = set()

    def step(self, ctx: Any) -> Done:
        return Done()

    def on_transition(self, job: Job) -> int:
        return 1

    def on_redrive(self, job: Job) -> int:
        return 0 if job.id in self.refuses else 1


class Firm(Kind):
    name = "tests.firm"
    aliases = ("tests.soft",)
    queue = "plain"
    orphan_policy = "redrive"

    def step(self, ctx: Any) -> Done:
        return Done()


@pytest.fixture(autouse=True)
def registered() -> Iterator[None]:
    Plain.refuses = set()
    with register_for_test(Plain, Firm):
        yield


# --- helpers --------------------------------------------------------------------------------------------


class Answer:
    """What a command wrote and how it ended."""

    def __init__(self, out: str, err: str, code: int) -> None:
        self.out, self.err, self.code = out, err, code

    @property
    def document(self) -> Any:
        return json.loads(self.out)

    @property
    def lines(self) -> list[Any]:
        return [json.loads(line) for line in self.out.splitlines()]

    def __repr__(self) -> str:
        return f"exit {self.code}\n{self.out}\n{self.err}"


def call(*arguments: Any, command: str = "durable_jobs") -> Answer:
    out, err, code = io.StringIO(), io.StringIO(), 0
    try:
        call_command(command, *map(str, arguments), stdout=out, stderr=err)
    except CommandError as error:
        code = error.returncode
        err.write(f"{error}\n")
    except SystemExit as left:
        code = int(left.code or 0)
    return Answer(out.getvalue(), err.getvalue(), code)


def failed(count: int = 1, kind: str = "tests.plain", **columns: Any) -> list[Job]:
    return [make_job("failed", kind=kind, queue="plain", **columns) for _ in range(count)]


def statuses() -> dict[str, int]:
    found: dict[str, int] = {}
    for status in Job.objects.values_list("status", flat=True):
        found[status] = found.get(status, 0) + 1
    return found


def events(job: Job | UUID, name: str) -> list[JobEvent]:
    return list(JobEvent.objects.filter(job_id=getattr(job, "id", job), event=name).order_by("id"))


# --- arguments ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("90s", 90), ("30m", 1_800), ("12h", 43_200), ("90d", 7_776_000), ("2w", 1_209_600), ("1h30m", 5_400), ("1.5h", 5_400), ("0s", 0)],
)  # fmt: skip
def test_a_length_of_time(text: str, seconds: float) -> None:
    assert arguments.duration(text) == timedelta(seconds=seconds)


@pytest.mark.parametrize(
    "text", ["", "90", "d", "-1d", "1y", "1 d", "1d ago", "١d", "nan", "999999999d", "1e3s", "\x00"]
)
def test_what_is_no_length_of_time_is_refused(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match=r"Use "):
        arguments.duration(text)


def test_seconds_with_or_without_a_unit() -> None:
    assert (arguments.seconds("300"), arguments.seconds("5m"), arguments.seconds("0.5")) == (300, 300, 0.5)
    for text in ("-1", "nan", "inf", "x", ""):
        with pytest.raises(argparse.ArgumentTypeError):
            arguments.seconds(text)


def test_points_in_time() -> None:
    assert arguments.moment("2026-03-01T03:00+01:00") == datetime(2026, 3, 1, 2, 0, tzinfo=UTC)
    assert arguments.moment("2026-03-01 03:00Z") == datetime(2026, 3, 1, 3, 0, tzinfo=UTC)
    with timezone.override("Europe/Berlin"):
        assert arguments.moment("2026-03-01T03:00") == datetime(2026, 3, 1, 2, 0, tzinfo=UTC)
        assert arguments.moment("2026-03-01") == datetime(2026, 2, 28, 23, 0, tzinfo=UTC)
    assert abs(arguments.moment("2h") - datetime.now(UTC) + timedelta(hours=2)) < timedelta(seconds=5)
    assert arguments.later("30m") == timedelta(minutes=30)
    for text in ("yesterday", "2026-02-30", "2026-13-01T00:00", "", "99999-01-01", "12", "\x00"):
        with pytest.raises(argparse.ArgumentTypeError, match="is not a point in time"):
            arguments.moment(text)


def test_input_comes_as_json_from_a_file_or_from_standard_input(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "input.json"
    file.write_text('{"a": "ä"}', encoding="utf-8")
    assert arguments.json_input('[1, "x"]') == [1, "x"]
    assert arguments.json_input(f"@{file}") == {"a": "ä"}
    monkeypatch.setattr("sys.stdin", io.StringIO("7"))
    assert arguments.json_input("-") == 7
    for text in ("{a: 1}", "", "@/nowhere", f"@{tmp_path}", "[" * 100_000):
        with pytest.raises(argparse.ArgumentTypeError):
            arguments.json_input(text)


@pytest.mark.parametrize(
    ("convert", "text"),
    [(arguments.job_id, "7"), (arguments.job_id, "x" * 300), (arguments.job_id, "\x00"), (arguments.whole(1, 200), "0"),
     (arguments.whole(1, 200), "1e9"), (arguments.whole(1, 200), "9" * 400), (arguments.label, "a"), (arguments.label, "=b"),
     (arguments.subject, "tests.Shipment"), (arguments.subject, "Shipment:1"), (arguments.subject, "a.b:"),
     (arguments.statuses, "failed"), (arguments.statuses, "running"), (arguments.statuses, ","), (arguments.text, " ")],
)  # fmt: skip
def test_nonsense_is_refused_with_the_value_and_the_way_out(convert: Any, text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError) as refused:
        convert(text)
    assert re.search(r"(Use|Give|Quote) ", str(refused.value))
    assert len(str(refused.value)) < 400


# --- output ---------------------------------------------------------------------------------------------


def test_what_a_job_holds_cannot_steer_the_terminal() -> None:
    assert output.shown("a\x1b[31m\nb\u202e\x9b") == "a\\x1b[31m\\nb\\u202e\\x9b"


def test_times_are_shown_with_their_offset() -> None:
    moment = datetime(2026, 3, 1, 2, 0, 0, 500, tzinfo=UTC)
    assert output.shown(moment) == "2026-03-01 02:00:00+00:00"
    with timezone.override("Europe/Berlin"):
        assert output.shown(moment) == "2026-03-01 03:00:00+01:00"


@pytest.mark.parametrize("colour", [None, True])
def test_tables_are_drawn_with_rich_and_plain_without(colour: bool | None) -> None:
    stream = io.StringIO()
    stdout = load_command_class("durable_jobs", "durable_jobs").stdout.__class__(stream)
    out = output.Output(stdout, stdout, colour=colour)
    identity = str(uuid4())
    out.table(["id", "jobs", "text"], [(identity, "1,200", "[red]x" * 40), (identity, "7", None)])
    out.facts([("phase", "running"), ("empty", None)])
    text = re.sub(r"\x1b\[[0-9;]*m", "", stream.getvalue())
    assert text.count(identity) == 2
    assert "[red]x" in text and "empty" not in text
    assert re.search(r" +7\b", text)
    assert ("\x1b[" in stream.getvalue()) is bool(colour)


def test_masked_keys_are_hidden_at_any_depth() -> None:
    kind = Plain()
    value = {"a": [{"token": "s", "b": {"token": {"x": 1}}}], "c": 1}
    assert mask(kind, value) == {"a": [{"token": MASKED, "b": {"token": MASKED}}], "c": 1}
    assert mask(None, value) == MASKED and mask(None, None) is None
    assert value["c"] == 1 and value["a"][0]["token"] == "s"  # type: ignore[index]


# --- start ----------------------------------------------------------------------------------------------


@with_database
def test_start_takes_all_its_options() -> None:
    shipment = Shipment.objects.create()
    answer = call(
        "start", "tests.plain", "--input", '{"b": 1, "a": 2}', "--idempotency-key", "k", "--lock-key", "l", "--priority", "-7",
        "--queue", "other", "--run-after", "30m", "--subject", f"tests.Shipment:{shipment.pk}", "--meta", "source=cron",
        "--meta", "x=a=b", "--tenant", "acme", "--organization", "north",
    )  # fmt: skip
    job = Job.objects.get()
    assert answer.code == 0 and f"Started tests.plain {job.id} on queue other, due 2" in answer.out
    assert (job.input, job.priority, job.queue_name, job.scope) == (
        {"a": 2, "b": 1},
        -7,
        "other",
        Scope("acme", "north"),
    )
    assert (job.meta, job.subject, job.lock_key) == ({"source": "cron", "x": "a=b"}, shipment, "l")
    assert job.next_run_at is not None
    assert timedelta(minutes=29) < job.next_run_at - job.created_at < timedelta(minutes=31)
    again = call(
        "start",
        "tests.plain",
        "--input",
        '{"a":2,"b":1}',
        "--idempotency-key",
        "k",
        "--tenant",
        "acme",
        "--organization",
        "north",
        "--json",
    )
    assert again.document == {"id": str(job.id), "kind": "tests.plain", "created": False, "status": "pending"}


@with_database
@pytest.mark.parametrize(
    ("given", "said"),
    [(["tests.nope"], "kind 'tests.nope' is not registered"), (["tests.plain", "--queue", "manual"], "queue is reserved"),
     (["tests.plain", "--subject", "tests.Shipment:99"], "subject does not exist"),
     (["tests.plain", "--subject", "tests.Nothing:1"], "subject names no model"),
     (["tests.plain", "--subject", "tests.Shipment:x"], "subject names no model or key"),
     (["tests.plain", "--lock-key", "held"], "lock_key 'held' is held by job"),
     (["tests.plain", "--run-after", "1900-01-01"], "run_after is out of range"),
     (["tests.plain", "--idempotency-key", ""], "idempotency_key is blank")],
)  # fmt: skip
def test_a_refused_start_is_one_line_and_starts_nothing(given: list[str], said: str) -> None:
    make_job(lock_key="held")
    answer = call("start", *given)
    assert answer.code == 1 and said in answer.err and answer.err.count("\n") == 1 and not answer.out
    assert Job.objects.count() == 1
    error = json.loads(call("start", *given, "--json").out)["error"]
    assert said in error["message"] and error["code"]


# --- list, show, explain, kinds -------------------------------------------------------------------------


@with_database
def test_list_is_newest_first_and_goes_on_by_key() -> None:
    made = [make_job(kind="tests.plain").id for _ in range(7)]
    found: list[str] = []
    after: list[str] = []
    for _ in range(4):
        page = call("list", "--limit", 3, "--json", *after).lines
        found += [line["id"] for line in page]
        after = ["--after", found[-1]]
    assert found == [str(job_id) for job_id in reversed(made)]
    assert f"More: add --after {made[-3]}" in call("list", "--limit", 3).out
    assert "More" not in call("list", "--limit", 7).out
    assert call("list", "--after", made[0]).out == "No more jobs match.\n"


@with_database
@pytest.mark.parametrize(
    ("given", "expected"),
    [(["--kind", "tests.firm"], {"b"}), (["--queue", "q"], {"b"}), (["--tenant", "acme"], {"c", "d"}), (["--organization", "north"], {"d"}),
     (["--status", "failed"], {"e", "f"}), (["--phase", "failed"], {"e"}), (["--phase", "parked"], {"f"}), (["--phase", "waiting"], {"a", "b", "c", "d"}),
     (["--error-code", "made"], {"f"}), (["--error-type", "ValueError"], {"e"}), (["--subject", "Tests.Shipment:7"], {"a"}),
     (["--failed-since", "1h"], {"e", "f"}), (["--failed-before", "1h"], set()), (["--created-since", "1h"], set("abcdef")),
     (["--created-before", "1h"], set()), (["--failed-since", "2020-01-01", "--phase", "parked"], {"f"}), ([], set("abcdef"))],
)  # fmt: skip
def test_list_filters(given: list[str], expected: set[str]) -> None:
    made = {
        "a": make_job(kind="tests.plain", subject_type="tests.shipment", subject_id="7"),
        "b": make_job(kind="tests.firm", queue="q"),
        "c": make_job(kind="tests.plain", scope=Scope("acme")),
        "d": make_job(kind="tests.plain", scope=Scope("acme", "north")),
        "e": make_job("failed", kind="tests.plain"),
        "f": make_job("parked", kind="tests.plain"),
    }
    names = {str(job.id): name for name, job in made.items()}
    assert {names[line["id"]] for line in call("list", *given, "--json").lines} == expected


@with_database
def test_list_reads_no_large_columns_and_counts_nothing(django_assert_num_queries: Any) -> None:
    for number in range(5):
        make_job(kind="tests.plain", input="x" * 1000, lock_key=f"k{number}")
    with django_assert_num_queries(2) as queries:
        call("list", "--phase", "waiting")
    text = " ".join(query["sql"].lower() for query in queries)
    assert "count(" not in text and '"input"' not in text and '"checkpoint"' not in text


@with_database
def test_show_tells_all_and_hides_what_the_kind_masks() -> None:
    labels = '{"token": "secret", "from": "cron"}'
    job = make_job(
        "retrying", kind="tests.plain", input={"token": "secret", "x": "a\x1b[0m"}, lock_key="l", meta=labels
    )
    store.add_event(
        job, "slice_failed", owner="w", error_type="ValueError", message="bad\nline", reason="why"
    )
    answer = call("show", job.id)
    assert answer.code == 0
    for part in (str(job.id), "retrying", "tests.plain", "lock key", "1 of 5", "made for a test", MASKED, "Ask billing first.",
                 "https://wiki.example/plain", "slice_failed", "bad\\nline", "Tries again as soon as"):  # fmt: skip
        assert part in answer.out, part
    assert "secret" not in answer.out and "\x1b" not in answer.out
    found = call("show", job.id, "--json").document
    assert found["input"] == {"token": MASKED, "x": "a\x1b[0m"}
    assert found["meta"] == {"token": MASKED, "from": "cron"}
    assert (found["phase"], found["status"], found["events"][0]["event"]) == (
        "retrying",
        "running",
        "slice_failed",
    )
    assert call("show", job.id, "--events", 0, "--json").document["events"] == []


@with_database
@pytest.mark.parametrize(
    "status",
    [
        "held",
        "pending",
        "running",
        "expired",
        "retrying",
        "verdict",
        "failed",
        "parked",
        "completed",
        "cancelled",
        "cancelling",
    ],
)
@pytest.mark.parametrize("kind", ["tests.plain", "app.jobs.gone"])
def test_every_job_can_be_shown_and_explained(status: str, kind: str) -> None:
    """C034: a kind whose code is gone can be shown, too."""
    job = make_job(status, kind=kind)
    for name in ("show", "explain"):
        assert call(name, job.id).code == 0
        assert call(name, job.id, "--json").document["kind"] == kind
    assert str(job.id) in call("list").out


@with_database
def test_explain_says_phase_reason_and_way_out() -> None:
    job = make_job(kind="tests.plain", queue="plain")
    answer = call("explain", job.id)
    assert f"Job {job.id} (tests.plain) is waiting." in answer.out
    assert "No live worker serves the queue plain." in answer.out and "→ Start one" in answer.out
    assert call("explain", job.id, "--json").document["reasons"][0]["code"] == "no_worker"
    running = make_job("running", kind="tests.plain")
    assert "all is as it should be" in call("explain", running.id).out


@with_database
@pytest.mark.parametrize("name", ["show", "explain", "settle"])
def test_a_missing_job_is_not_found(name: str) -> None:
    more = ["--reason", "x"] if name == "settle" else []
    answer = call(name, NOBODY, *more)
    assert answer.code == 1 and f"There is no job {NOBODY}" in answer.err


def test_kinds_lists_what_is_registered() -> None:
    text = call("kinds").out
    assert "tests.plain" in text and "tests.firm, also tests.soft" in text and "Does nothing." in text
    found = {kind["name"]: kind for kind in call("kinds", "--json").document}
    assert found["tests.firm"]["aliases"] == ["tests.soft"] and found["tests.plain"]["retry"]["failures"] == 5


# --- cancel and redrive by id ---------------------------------------------------------------------------


@with_database
def test_cancel_by_id_says_what_became_of_each() -> None:
    waiting, running, done = (
        make_job(kind="tests.plain"),
        make_job("running", kind="tests.plain"),
        make_job("completed"),
    )
    answer = call("cancel", waiting.id, running.id, waiting.id, done.id, NOBODY, "--reason", "wrong file")
    assert answer.code == 1
    assert f"{waiting.id}: cancelled." in answer.out
    assert f"{running.id}: asked to stop; it ends at its next boundary." in answer.out
    assert "Cancelled 2, skipped 2 (not_cancellable 1, not_found 1)." in answer.out
    assert f"{done.id}: not_cancellable: " in answer.err
    (requested,) = events(waiting, "cancel_requested")
    assert requested.actor.startswith("cli:") and requested.actor.endswith(f"@{socket.gethostname()}")
    assert requested.reason == "wrong file"
    assert call("cancel", make_job(kind="tests.plain").id).code == 0


@with_database
def test_redrive_by_id_follows_the_same_rules_as_the_service() -> None:
    """C042: every refusal is told with its code, and the others are done."""
    done, (lost,) = make_job("completed", kind="tests.plain"), failed(lock_key="held")
    make_job(kind="tests.plain", lock_key="held")
    gone, (refusing,) = make_job("failed", kind="app.jobs.gone"), failed()
    Plain.refuses = {refusing.id}
    hopeless = failed()[0]
    rows.execute("UPDATE durable_jobs_job SET verdict = 'unrecoverable' WHERE id = %s", hopeless.id)
    fine, waiting = failed()[0], make_job("retrying", kind="tests.plain")
    answer = call(
        "redrive", done.id, lost.id, gone.id, refusing.id, hopeless.id, fine.id, waiting.id, "--json"
    )
    assert answer.code == 1
    *each, total = answer.lines
    assert {line["id"]: line.get("code") for line in each} == {
        str(done.id): "not_redrivable", str(lost.id): "lock_key_held", str(gone.id): "unknown_kind",
        str(refusing.id): "hook_failed", str(hopeless.id): "unrecoverable_requires_force", str(fine.id): None, str(waiting.id): None,
    }  # fmt: skip
    assert total["done"] == 2 and total["skipped"]["lock_key_held"] == 1
    assert call("redrive", hopeless.id, "--force").code == 0
    assert call("redrive", make_job("failed", kind="tests.firm").id, "--restart").code == 1


@with_database
@pytest.mark.parametrize(
    "given", [["redrive"], ["cancel"], ["redrive", str(NOBODY), "--kind", "x"], ["redrive", str(NOBODY), "--spread", "1m"],
              ["cancel", str(NOBODY), "--limit", "1"], ["redrive", "7"], ["redrive", "--phase", "running"], ["cancel", "--status", "failed"],
              ["redrive", "--kind", ""], ["redrive", "--failed-since", "yesterday"], ["list", "--limit", "0"], ["list", "--limit", "201"],
              ["list", "--limit", "-1"], ["list", "--after", "%%%"], ["list", "--phase", "bogus"], ["list", "--phase", "failed", "--status", "failed"],
              ["list", "--ordering", "password"], ["health", "--silent", "3"], ["health", "--stuck", "-1"], ["pause", "--reason", "x"],
              ["pause", "--all", "--queue", "q", "--reason", "x"], ["pause", "--all"], ["unpause"], ["settle", str(NOBODY)], ["nonsense"], []],
)  # fmt: skip
def test_wrong_usage_is_refused_before_anything_happens(given: list[str]) -> None:
    """C093: nonsense is an error of the caller."""
    out = io.StringIO()
    with redirect_stdout(out), pytest.raises(CommandError) as refused:
        call_command("durable_jobs", *given)
    # argparse's own errors leave a process with 2; called from code they are CommandErrors without a code of their own.
    assert refused.value.returncode in (1, 2) and str(refused.value)
    assert not Job.objects.exists() and not Pause.objects.exists()


# --- cancel and redrive in bulk -------------------------------------------------------------------------


@with_database
def test_bulk_without_yes_shows_and_changes_nothing() -> None:
    failed(12), failed(3, "tests.firm"), make_job("completed")
    before = rows.stored()
    answer = call("redrive", "--queue", "plain")
    assert answer.code == 0
    assert "15 jobs would be redriven:" in answer.out
    assert re.search(r"12 +tests\.plain +ValueError", answer.out) and re.search(r"3 +tests\.firm", answer.out)
    assert "tests.plain: Ask billing first. https://wiki.example/plain" in answer.out
    assert "Nothing was changed." in answer.out and "add --yes" in answer.out
    assert rows.stored() == before
    shown = call("redrive", "--queue", "plain", "--json").document
    assert (shown["dry_run"], shown["jobs"], shown["more"], len(shown["sample"])) == (True, 15, False, 10)
    assert {group["kind"]: group["jobs"] for group in shown["groups"]} == {"tests.plain": 12, "tests.firm": 3}


@with_database
def test_bulk_redrive_takes_what_the_filters_choose_and_counts_the_refusals() -> None:
    chosen, other = failed(30), failed(2, "tests.firm")
    for number, job in enumerate(chosen[:10]):
        rows.execute("UPDATE durable_jobs_job SET lock_key = %s WHERE id = %s", f"k{number}", job.id)
        make_job(kind="tests.plain", lock_key=f"k{number}")
    Plain.refuses = {chosen[10].id, chosen[11].id}
    answer = call("redrive", "--kind", "tests.plain", "--yes", "--reason", "outage over")
    assert answer.code == 1
    assert "Redrove 18 of 30, skipped 12 (lock_key_held 10, hook_failed 2)." in answer.out
    assert answer.err.count("lock_key_held") == 10
    told = JobEvent.objects.filter(event="redriven")
    assert told.count() == 18
    assert set(told.values_list("reason", flat=True)) == {"outage over"}
    (operation,) = set(told.values_list("operation_id", flat=True))
    assert UUID(operation)
    assert {Job.objects.get(pk=job.pk).status for job in other} == {"failed"}
    again = call("redrive", "--kind", "tests.plain", "--yes")
    assert "Redrove 0 of 12" in again.out


@with_database
def test_what_fails_again_during_the_call_is_not_taken_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    jobs = failed(5)
    taken: list[UUID] = []
    redrive = service.redrive

    def redrive_and_fail(job_id: UUID, **options: Any) -> Job:
        job = redrive(job_id, **options)
        taken.append(job_id)
        store.claim(job_id, job.continuation_seq, job.redrives, "w", 60)
        with transaction.atomic():
            return store.fail_terminal(job_id, job.lease_epoch + 1) or job

    monkeypatch.setattr(service, "redrive", redrive_and_fail)
    monkeypatch.setattr(selection, "PAGE", 2)
    answer = call("redrive", "--kind", "tests.plain", "--yes")
    assert "Redrove 5 of 5." in answer.out and taken == [job.id for job in jobs]
    assert statuses() == {"failed": 5}


@with_database
def test_a_job_that_failed_again_between_the_look_and_the_act_is_refused() -> None:
    (job,) = failed()
    with pytest.raises(service.NotRedrivable, match="too lately"):
        service.redrive(job.id, failed_before=job.finished_at, scope=service.ALL_SCOPES)
    (waiting,) = [make_job("retrying", kind="tests.plain")]
    with pytest.raises(service.NotRedrivable):
        service.redrive(waiting.id, failed_before=datetime.now(UTC), scope=service.ALL_SCOPES)
    assert service.redrive(job.id, failed_before=datetime.now(UTC) + timedelta(seconds=5)).status == "pending"


@with_database
def test_spread_and_limit() -> None:
    failed(10)
    answer = call("redrive", "--kind", "tests.plain", "--spread", "40m", "--limit", 4, "--yes")
    assert "Redrove 4 of 4." in answer.out
    first, *later = Job.objects.filter(status="pending").order_by("id").values_list("next_run_at", flat=True)
    assert statuses() == {"pending": 4, "failed": 6}
    for number, due in enumerate(later, 1):
        assert abs(due - first - timedelta(minutes=10 * number)) < timedelta(seconds=5)


@with_database
def test_bulk_cancel_takes_what_was_there_and_has_not_been_asked() -> None:
    mine = [
        make_job(status, kind="tests.plain", scope=Scope("acme"))
        for status in ("pending", "held", "running", "retrying")
    ]
    asked = make_job("cancelling", kind="tests.plain", scope=Scope("acme"))
    other, done = make_job(kind="tests.plain"), make_job("completed", scope=Scope("acme"))
    assert "4 jobs would be cancelled" in call("cancel", "--tenant", "acme").out
    answer = call("cancel", "--tenant", "acme", "--yes")
    assert answer.code == 0 and "Cancelled 4 of 4." in answer.out
    assert {Job.objects.get(pk=job.pk).status for job in mine} == {"cancelled", "running"}
    assert not events(asked, "cancel_requested")
    assert [Job.objects.get(pk=job.pk).status for job in (other, done)] == ["pending", "completed"]
    assert call("cancel", "--tenant", "acme", "--yes").out == "Cancelled 0 of 0.\n"


@with_database
def test_bulk_by_the_phase_of_live_work() -> None:
    scheduled = service.start("tests.plain", run_after=timedelta(hours=1)).job
    waiting = make_job(kind="tests.plain")
    assert "1 job would be cancelled" in call("cancel", "--phase", "scheduled").out
    assert "Cancelled 1 of 1." in call("cancel", "--phase", "scheduled", "--yes").out
    assert [Job.objects.get(pk=job.pk).status for job in (scheduled, waiting)] == ["cancelled", "pending"]


@with_database
def test_no_match_is_no_error_and_a_kind_nobody_knows_is_doubted() -> None:
    answer = call("redrive", "--kind", "tests.plian")
    assert (answer.code, answer.out) == (0, "No job matches.\n")
    assert "No kind 'tests.plian' is registered here" in answer.err


@with_database
def test_a_selection_is_read_in_pages_without_a_cursor_and_counted_to_a_bound(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """C109: key-based pages; nothing is held open between them."""
    failed(25)
    monkeypatch.setattr(selection, "PAGE", 10)
    look = selection.Look.take()
    chosen = selection.Selection(kind="tests.plain").failed_by(look.now + timedelta(seconds=1))
    assert [len(page) for page in selection.pages(chosen, look)] == [10, 10, 5]
    monkeypatch.setattr(selection, "MOST_COUNTED", 20)
    summary = selection.summarize(chosen, look)
    assert (summary.jobs, summary.more) == (20, True)
    assert selection.summarize(chosen, look, limit=7).jobs == 7
    assert selection.count(chosen, look) == 25
    assert "More than 20 jobs would be redriven" in call("redrive", "--kind", "tests.plain").out


# --- pause, unpause, settle -----------------------------------------------------------------------------


@with_database
def test_pause_and_unpause_by_name() -> None:
    assert (
        call("pause", "--queue", "plain", "--tenant", "acme", "--reason", "migration").out
        == "Paused queue plain, tenant acme.\n"
    )
    pause = Pause.objects.get()
    assert (pause.queue_name, pause.kind, pause.tenant_id, pause.reason) == ("plain", "", "acme", "migration")
    assert pause.actor.startswith("cli:")
    other = call("unpause", "--queue", "plain")
    assert other.code == 1 and "There is no pause of exactly queue plain." in other.out
    assert "Paused (queue plain, tenant acme) since" in other.out
    assert call("unpause", "--queue", "plain", "--tenant", "acme").code == 0
    assert call("pause", "--all", "--reason", "x", "--json").document == {"paused": True, "running": 0}
    assert call("unpause", "--all", "--json").document == {"unpaused": True, "left": []}
    assert call("pause", "--all", "--reason", " ").code == 1


@with_database
def test_pause_waits_for_what_runs_and_says_what_does() -> None:
    running = make_job("running", kind="tests.plain", queue="plain")
    make_job("running", kind="tests.firm", queue="other")
    answer = call("pause", "--queue", "plain", "--reason", "x", "--wait", "0.3")
    assert answer.code == 1 and "Still running after 0.3 s:" in answer.out and str(running.id) in answer.out
    assert Pause.objects.count() == 1
    found = call("pause", "--queue", "plain", "--reason", "x", "--wait", "0", "--json")
    assert found.code == 1 and [job["id"] for job in found.document["running"]] == [str(running.id)]
    rows.execute("UPDATE durable_jobs_job SET lease_expires_at = %s WHERE id = %s", rows.ago(5), running.id)
    quiet = call("pause", "--queue", "plain", "--reason", "x", "--wait", "5")
    assert quiet.code == 0 and "Nothing runs any more." in quiet.out
    # A worker that is merely cut off could still commit: it is named.
    assert "make sure that these workers are gone" in quiet.out and str(running.id) in quiet.out


@with_database
def test_settle_shows_first_and_settles_with_yes() -> None:
    job = make_job("verdict", kind="tests.plain")
    rows.execute("UPDATE durable_jobs_job SET mirror_attempts = 3 WHERE id = %s", job.id)
    shown = call("settle", job.id, "--reason", "row deleted")
    assert shown.code == 0 and "It would become failed" in shown.out and Job.objects.get().status == "running"
    assert call("settle", job.id, "--reason", "row deleted", "--json").document["becomes"] == "failed"
    done = call("settle", job.id, "--reason", "row deleted", "--yes")
    assert done.code == 0 and f"Job {job.id} is failed; its hooks did not run." in done.out
    (event,) = events(job, "settled_without_hooks")
    assert event.reason == "row deleted" and event.actor.startswith("cli:")
    assert call("settle", job.id, "--reason", "again", "--yes").code == 1


# --- stats and health -----------------------------------------------------------------------------------


@with_database
def test_stats_counts_by_phase_queue_and_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    """F11."""
    for status in (
        "pending",
        "running",
        "retrying",
        "failed",
        "parked",
        "completed",
        "cancelled",
        "cancelling",
    ):
        make_job(status, kind="tests.plain", queue="plain")
    service.start("tests.plain", run_after=timedelta(hours=1))
    service.pause(kind="tests.plain", reason="migration", actor="anna")
    store.worker_started("w1", host="web3", pid=1, queues=["plain"], kinds=[], concurrency=4)
    found = call("stats", "--json").document
    assert {name: number["number"] for name, number in found["live"].items()} == {
        "waiting": 1, "scheduled": 1, "retrying": 1, "running": 2, "stopping": 1, "stuck": 0, "failed": 1, "parked": 1,
    }  # fmt: skip
    assert {name: number["number"] for name, number in found["ended"]["1 h"].items()} == {
        "completed": 1,
        "failed": 2,
        "cancelled": 1,
    }
    (queue,) = found["queues"]
    assert (queue["name"], queue["due"]["number"], queue["running"]["number"], queue["workers"]) == (
        "plain",
        2,
        2,
        1,
    )
    assert {(row["kind"], row["error_type"]) for row in found["failures"]} == {
        ("tests.plain", "ValueError"),
        ("tests.plain", "Park"),
    }
    text = call("stats").out
    assert (
        "Paused (kind tests.plain)" in text
        and "by anna: migration." in text
        and "web3" not in text
        and "w1" in text
    )
    monkeypatch.setattr(overview, "MOST", 1)
    assert call("stats", "--json").document["live"]["running"] == {"number": 1, "more": True}
    assert "1+" in call("stats").out


@with_database
def test_health_is_green_when_nothing_is_wrong() -> None:
    answer = call("health")
    assert answer.code == 0 and "PROBLEM" not in answer.out and answer.out.count("ok ") == 5
    assert call("health", "--json").document["healthy"] is True


def checks(*given: Any) -> dict[str, bool]:
    answer = call("health", *given, "--json")
    assert answer.code == (0 if answer.document["healthy"] else 1)
    return {check["name"]: check["ok"] for check in answer.document["checks"]}


@with_database
def test_health_sees_due_work_without_a_worker_and_work_that_waits_too_long() -> None:
    job = make_job(kind="tests.plain", queue="plain")
    rows.execute("UPDATE durable_jobs_job SET next_run_at = %s WHERE id = %s", rows.ago(610), job.id)
    assert checks() == {"database": True, "workers": False, "due": True, "stuck": True, "hooks": True}
    assert checks("--without-worker", "800")["workers"]
    assert not checks("--due", "600")["due"]
    assert "plain (tests.plain) for 10 min" in call("health").out
    store.worker_started("w1", host="web3", pid=1, queues=["other"], kinds=[], concurrency=4)
    assert not checks()["workers"]
    store.worker_started("w2", host="web3", pid=1, queues=[], kinds=["tests.firm"], concurrency=4)
    assert not checks()["workers"]
    store.worker_started("w3", host="web3", pid=1, queues=["plain"], kinds=[], concurrency=4)
    assert checks()["workers"]
    rows.execute("UPDATE durable_jobs_worker SET beat_at = %s", rows.ago(300))
    assert not checks()["workers"]


@with_database
def test_paused_work_does_not_make_health_red() -> None:
    for tenant in ("acme", "other"):
        make_job(kind="tests.plain", queue="plain", scope=Scope(tenant))
    rows.execute("UPDATE durable_jobs_job SET next_run_at = %s", rows.ago(5_000))
    assert not checks()["due"]
    for part in ({"queue": "plain"}, {"kind": "tests.plain"}, {}):
        service.pause(**part, reason="x")
        assert all(checks().values())
        service.unpause(**part)
    service.pause(tenant="acme", reason="x")
    assert not checks()["due"]
    service.pause(tenant="other", reason="x")
    assert all(checks().values())


@with_database
def test_health_sees_stuck_jobs_after_the_time_of_a_repair() -> None:
    job = make_job("running", kind="tests.plain")
    rows.execute("UPDATE durable_jobs_job SET lease_expires_at = %s WHERE id = %s", rows.ago(40), job.id)
    assert (
        checks()["stuck"]
        and not checks("--stuck-for", "5")["stuck"]
        and checks("--stuck-for", "5", "--stuck", "1")["stuck"]
    )
    rows.execute("UPDATE durable_jobs_job SET lease_expires_at = %s WHERE id = %s", rows.ago(100), job.id)
    assert not checks()["stuck"]
    assert str(job.id) in call("health").out


@with_database
def test_health_sees_hooks_that_keep_failing() -> None:
    for status in ("verdict", "cancelling"):
        job = make_job(status, kind="tests.plain")
        rows.execute("UPDATE durable_jobs_job SET mirror_attempts = 3 WHERE id = %s", job.id)
    assert not checks()["hooks"] and checks("--mirrors", "2")["hooks"]


@with_database
def test_a_container_asks_for_its_own_worker() -> None:
    assert call("health", "--worker").code == 1
    store.worker_started("w1", host="elsewhere", pid=1, queues=[], kinds=[], concurrency=4)
    assert call("health", "--worker").code == 1
    store.worker_started("w2", host=socket.gethostname(), pid=1, queues=[], kinds=[], concurrency=4)
    assert call("health", "--worker").code == 0
    rows.execute("UPDATE durable_jobs_worker SET beat_at = %s", rows.ago(50))
    answer = call("health", "--worker")
    assert answer.code == 1 and "It hangs or has died" in answer.out
    assert call("health", "--worker", "--silent", "2m").code == 0


# --- reconcile ------------------------------------------------------------------------------------------


def orphans() -> list[Job]:
    made = [
        make_job("expired", kind=kind, owner="gone")
        for kind in ("tests.plain", "tests.firm", "app.jobs.gone")
    ]
    made.append(make_job("expired", kind="tests.firm", owner="gone", scope=Scope("acme")))
    rows.execute("UPDATE durable_jobs_job SET lease_expires_at = %s", rows.ago(600))
    return made


@with_database
def test_a_dry_run_says_what_would_be_done_and_writes_nothing() -> None:
    parked, redriven, unknown, _ = orphans()
    cancelled = make_job(kind="tests.plain")
    store.request_cancel(cancelled.id, scope=None)
    before = rows.stored()
    found = {
        line["id"]: line["decision"]
        for line in call("reconcile", "--dry-run", "--json", "--batch-size", 1, command="durable_jobs").lines
    }
    assert found[str(parked.id)] == "park as orphaned" and found[str(redriven.id)] == "redrive, due at once"
    assert (
        found[str(cancelled.id)] == "cancel"
        and found[str(unknown.id)] == "leave alone (its kind is unknown here)"
    )
    text = call("--dry-run", "--tenant", "acme", command="reconcile").out
    assert (
        "would redrive, due at once: its lease ended 10 min ago, of gone" in text and text.count("would") == 1
    )
    assert rows.stored() == before
    rows.execute("DELETE FROM durable_jobs_job")
    assert call("reconcile", "--dry-run").out == "There is nothing to repair.\n"


@with_database
def test_reconcile_now_repairs_at_once() -> None:
    parked, redriven, unknown, other = orphans()
    answer = call("reconcile", "--now", "--tenant", "default", "--batch-size", 2)
    assert answer.code == 0
    assert (
        "Cancelled 0, redrove 1, parked 1; left alone as of unknown kind 1; not yet sure 0; errors 0."
        in answer.out
    )
    assert [Job.objects.get(pk=job.pk).status for job in (parked, redriven, unknown, other)] == [
        "failed",
        "pending",
        "running",
        "running",
    ]


@with_database
@override_settings(DURABLE_JOBS={"GRACE": 0.5})
def test_reconcile_waits_and_spares_what_moves_meanwhile(second_connection: OtherConnection) -> None:
    _, redriven, _, alive = orphans()
    begun = second_connection.begin(call, "--json", command="reconcile")
    wait_until(lambda: not begun.done(), 1, "")
    rows.execute("UPDATE durable_jobs_job SET lease_expires_at = %s WHERE id = %s", rows.ago(300), alive.id)
    report = begun.result(10).document
    assert (report["redriven"], report["parked"], report["sighted"]) in [(1, 1, 1), (2, 1, 0)]
    assert Job.objects.get(pk=redriven.pk).status == "pending"


# --- real processes -------------------------------------------------------------------------------------


@with_database
def test_exit_codes_of_real_processes(processes: Processes, tmp_path: Path) -> None:
    job = make_job("failed", kind="worker.quick")
    nowhere = f"sqlite:///{tmp_path}/no/such/folder.sqlite3"
    empty = f"sqlite:///{tmp_path}/empty.sqlite3"
    expected = {
        ("redrive", str(job.id)): (0, f"{job.id}: redriven"),
        ("redrive", str(NOBODY)): (1, "not_found"),
        ("start", "worker.quik"): (1, "CommandError: kind 'worker.quik' is not registered"),
        ("cancel",): (2, "UsageError: Say which jobs"),
        ("list", "--limit", "0"): (
            2,
            "argument --limit: '0' is out of range. Use a whole number from 1 to 200.",
        ),
        ("health", "--worker", "--verbosity", "0", "--no-color"): (1, "No worker of host"),
    }
    started = [
        (processes.manage("durable_jobs", *given, settings=DISCOVERED), *result)
        for given, result in expected.items()
    ]
    for name, url, said in (
        ("health", nowhere, "unable to open database file"),
        ("list", empty, "manage.py migrate"),
        ("reconcile", empty, "manage.py migrate"),
    ):
        process = processes.manage("durable_jobs", name, environment={"DATABASE_URL": url})
        started.append((process, 1, said))
    for process, code, said in started:
        assert process.wait(60) == code, process.output
        assert said in process.output and "Traceback" not in process.output, process.output


@with_database
def test_the_doubles_and_the_worker_are_the_same_commands(processes: Processes) -> None:
    job = make_job(kind="worker.quick", queue="worker")
    worker = processes.manage(
        "durable_jobs", "worker", "--queues", "worker", "--until-idle", settings=DISCOVERED
    )
    assert worker.wait(30) == 0, worker.output
    assert Job.objects.get(pk=job.pk).status == "completed"
    for short, long in (("reconcile", "reconcile"), ("prune_jobs", "prune"), ("runworker", "worker")):
        group = subparsers()[long]
        alone = load_command_class("durable_jobs", short).create_parser("manage.py", short)
        assert options_of(group) <= options_of(alone)


@with_database
def test_a_wrong_setting_is_one_line(processes: Processes) -> None:
    process = processes.manage(
        "durable_jobs", "health", settings={"GRACE": "soon", "DEFAULT_TENANT": 7, "DRAIN_TIMEOUT": "x"}
    )
    assert process.wait(30) == 1 and "GRACE" in process.output and "Traceback" not in process.output


@with_database
def test_a_bulk_goes_on_after_a_kill(processes: Processes) -> None:
    made = [make_job("failed", kind="worker.quick", queue="worker") for _ in range(300)]
    given = ["durable_jobs", "redrive", "--kind", "worker.quick", "--yes"]
    first = processes.manage(*given, settings=DISCOVERED)
    wait_until(partial(pending_at_least, 20), 30, "nothing was redriven")
    first.kill()
    done = statuses()["pending"]
    assert 20 <= done < 300
    second = processes.manage(*given, settings=DISCOVERED)
    assert second.wait(60) == 0 and f"Redrove {300 - done} of {300 - done}." in second.output, second.output
    assert statuses() == {"pending": 300}
    assert set(Job.objects.values_list("redrives", flat=True)) == {1}
    assert JobEvent.objects.filter(event="redriven").count() == len(made)


def pending_at_least(number: int) -> bool:
    return Job.objects.filter(status="pending").count() >= number


@with_database
def test_a_bulk_that_is_interrupted_says_how_far_it_came(processes: Processes) -> None:
    for _ in range(300):
        make_job("failed", kind="worker.quick", queue="worker")
    run = processes.manage("durable_jobs", "redrive", "--kind", "worker.quick", "--yes", settings=DISCOVERED)
    wait_until(partial(pending_at_least, 20), 30, "nothing was redriven")
    run.send(signal.SIGINT)
    assert run.wait(20) == 130, run.output
    assert re.search(r"Redrove \d+ of 300\.", run.output) and "Run the same command again" in run.output
    assert "Traceback" not in run.output


@with_database
def test_a_reader_that_has_seen_enough_is_no_error(processes: Processes) -> None:
    for number in range(200):
        make_job(kind="worker.quick", lock_key=f"{'k' * 150}{number}")
    code = (
        "import subprocess, sys\n"
        "listing = subprocess.Popen([sys.executable, '-m', 'django', 'durable_jobs', 'list', '--limit', '200', '--json'],\n"
        "    stdout=subprocess.PIPE, stderr=subprocess.PIPE)\n"
        "listing.stdout.readline(); listing.stdout.close()\n"
        "print(listing.wait(), listing.stderr.read().decode() or 'quiet')\n"
    )
    process = processes.python(code)
    process.wait(30)
    assert process.output.strip() == "0 quiet"


# --- help and documentation -----------------------------------------------------------------------------


def subparsers() -> dict[str, argparse.ArgumentParser]:
    parser = load_command_class("durable_jobs", "durable_jobs").create_parser("manage.py", "durable_jobs")
    (group,) = [action for action in parser._actions if isinstance(action, argparse._SubParsersAction)]
    return dict(group.choices)


def own_actions(parser: argparse.ArgumentParser) -> list[argparse.Action]:
    return [
        action for action in parser._actions if action.help != argparse.SUPPRESS and action.dest != "help"
    ]


def options_of(parser: argparse.ArgumentParser) -> set[str]:
    return {option for action in own_actions(parser) for option in action.option_strings}


def documented(parser: argparse.ArgumentParser) -> str:
    """The table of a subcommand's options, as `docs/commands.md` has it."""
    lines = ["| option | meaning |", "|---|---|"]
    for action in own_actions(parser):
        name = ", ".join(action.option_strings) or str(action.metavar)
        value = f" {action.metavar}" if action.option_strings and action.nargs != 0 else ""
        text = str(action.help).replace("%%", "%").replace("|", "\\|")
        lines.append(f"| `{name}{value}` | {text} |")
    return "\n".join(lines)


@pytest.mark.parametrize("name", sorted(subparsers()))
def test_every_option_is_documented(name: str) -> None:
    """C126: the documentation has each option with its unit and default, and no other."""
    text = (ROOT / "docs" / "commands.md").read_text(encoding="utf-8")
    parser = subparsers()[name]
    assert f"## {name}\n" in text
    section = text.partition(f"## {name}\n")[2].partition("\n## ")[0]
    expected = documented(parser)
    assert expected in section, f"Put this table into docs/commands.md, section {name}:\n{expected}"
    assert section.count("\n| `") == len(own_actions(parser))
    codes = re.findall(r"(\d+) ", str(parser.epilog).partition("exit codes:")[2])
    assert codes and all(re.search(rf"\b{code}\b", section.partition("Exit codes")[2]) for code in codes)


@pytest.mark.parametrize("name", sorted(subparsers()))
def test_help_can_be_read(name: str) -> None:
    text = subparsers()[name].format_help()
    assert "exit codes:" in text and "%(" not in text and "==SUPPRESS==" not in text
    assert max(map(len, text.splitlines())) <= 130
    for action in own_actions(subparsers()[name]):
        assert action.help, f"{name} {action.dest} has no help"
        assert action.metavar or action.nargs == 0 or action.choices, (
            f"{name} {action.dest} shows its variable's name"
        )


def test_the_list_of_commands_is_the_documented_one() -> None:
    text = (ROOT / "docs" / "commands.md").read_text(encoding="utf-8")
    assert set(re.findall(r"(?m)^## (\w+)$", text)) == set(subparsers())
    assert set(subparsers()) == {
        "worker", "reconcile", "prune", "start", "list", "show", "explain", "cancel", "redrive", "pause", "unpause", "settle", "kinds",
        "stats", "health",
    }  # fmt: skip


def test_the_actor_has_a_name_even_where_the_user_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    def nameless() -> str:
        raise KeyError("uid not found")

    monkeypatch.setattr("getpass.getuser", nameless)
    assert re.fullmatch(r"cli:\d+@.+", acts.actor())
