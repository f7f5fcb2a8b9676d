"""Program (e): a report that a user asks for, watches and fetches."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from django.contrib.auth.models import User
from django.core.files.storage import default_storage
from django.db import connections
from django.test import Client
from django.urls import reverse

from durable_jobs import service
from durable_jobs.models import Job
from durable_jobs.reconciler import Reconciler
from durable_jobs.testing import finish, make_job, run_slice, started
from tests.processes import Processes
from tests.programs.reports import jobs, views
from tests.programs.reports.jobs import YearReport

pytestmark = pytest.mark.urls("tests.programs.reports.urls")


@pytest.fixture(autouse=True)
def media(settings: Any, tmp_path: Path) -> Path:
    settings.MEDIA_ROOT = tmp_path / "media"
    return settings.MEDIA_ROOT


@pytest.fixture(params=[False, True], ids=["", "atomic requests"])
def atomic_requests(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    monkeypatch.setitem(connections.settings["default"], "ATOMIC_REQUESTS", request.param)
    return request.param


@pytest.fixture
def ann(db: None) -> User:
    return User.objects.create_user("ann")


@pytest.fixture
def client_of_ann(ann: User, atomic_requests: bool) -> Client:
    return signed_in(ann)


def signed_in(user: User) -> Client:
    client = Client(raise_request_exception=False)
    client.force_login(user)
    return client


def ask_for_report(client: Client, year: int = 2026) -> Job:
    answer = client.post(reverse("report-create", args=[year]))
    assert answer.status_code == 302
    job = service.get(answer.url.split("/")[2])
    assert job is not None
    assert answer.url == reverse("report-status", args=[job.id])
    return job


def status_of(client: Client, job: Job) -> dict[str, Any]:
    return client.get(reverse("report-status", args=[job.id])).json()


class TestAsking:
    def test_a_report_is_asked_for_made_and_fetched(self, client_of_ann: Client, ann: User) -> None:
        User.objects.update(date_joined="2026-03-01T00:00:00Z")
        job = ask_for_report(client_of_ann)
        assert status_of(client_of_ann, job) == {"phase": "waiting", "percent": None, "result": None}
        finish(job)
        name = f"reports/{job.id}.csv"
        assert status_of(client_of_ann, job) == {
            "phase": "completed",
            "percent": 100.0,
            "result": {"file": name, "accounts": 1},
        }
        answer = client_of_ann.get(reverse("report-file", args=[job.id]))
        lines = b"".join(answer.streaming_content).decode().splitlines()  # type: ignore[attr-defined]
        assert (lines[0], lines[3], len(lines)) == ("month,accounts", "3,1", 13)

    def test_the_percent_is_seen_while_it_runs(
        self, client_of_ann: Client, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        job, seen = ask_for_report(client_of_ann), []

        def watched(year: int, month: int) -> int:
            seen.append(status_of(client_of_ann, job))
            return 0

        monkeypatch.setattr(jobs, "accounts_of", watched)
        finish(job)
        assert seen[0] == {"phase": "running", "percent": None, "result": None}
        assert seen[1] == {"phase": "running", "percent": pytest.approx(100 / 12), "result": None}

    def test_a_pause_is_seen(self, client_of_ann: Client) -> None:
        job = ask_for_report(client_of_ann)
        service.pause(kind="reports.year", reason="moving house")
        assert status_of(client_of_ann, job)["phase"] == "paused"

    def test_a_second_click_gives_the_report_that_is_being_made(self, client_of_ann: Client) -> None:
        job = ask_for_report(client_of_ann)
        assert ask_for_report(client_of_ann) == job
        assert ask_for_report(client_of_ann, 2025) != job
        finish(job)
        assert ask_for_report(client_of_ann) != job

    def test_only_a_post_of_somebody_known_starts_one(self, db: None, client_of_ann: Client) -> None:
        address = reverse("report-create", args=[2026])
        assert client_of_ann.get(address).status_code == 405
        assert Client().post(address).status_code == 302
        assert started(YearReport) == []

    def test_a_view_that_raises_leaves_no_job(
        self, client_of_ann: Client, monkeypatch: pytest.MonkeyPatch, atomic_requests: bool
    ) -> None:
        """With ATOMIC_REQUESTS; without, what was started before the error was started."""

        def fails(*arguments: Any) -> None:
            raise RuntimeError("after the start")

        monkeypatch.setattr(views, "redirect", fails)
        assert client_of_ann.post(reverse("report-create", args=[2026])).status_code == 500
        assert len(started(YearReport)) == (0 if atomic_requests else 1)


class TestWatching:
    def test_it_serves_its_owner_alone(self, client_of_ann: Client) -> None:
        """Somebody else's job, a missing one and one of another kind give the same answer."""
        job = ask_for_report(client_of_ann)
        finish(job)
        bob = signed_in(User.objects.create_user("bob"))
        admin = signed_in(User.objects.create_superuser("root"))
        other_kind = make_job(created_by=job.created_by_id)
        missing = "00000000-0000-7000-8000-000000000000"
        for view in ("report-status", "report-file"):
            assert client_of_ann.get(reverse(view, args=[job.id])).status_code == 200
            for client, job_id in [
                (bob, job.id),
                (admin, job.id),
                (client_of_ann, other_kind.id),
                (client_of_ann, missing),
            ]:
                assert client.get(reverse(view, args=[job_id])).status_code == 404
            assert Client().get(reverse(view, args=[job.id])).status_code == 302

    def test_there_is_no_file_before_it_is_done(self, client_of_ann: Client) -> None:
        job = ask_for_report(client_of_ann)
        assert client_of_ann.get(reverse("report-file", args=[job.id])).status_code == 404

    def test_a_failure_is_told_without_its_internals(
        self, client_of_ann: Client, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def fails(year: int, month: int) -> int:
            raise ConnectionError("password=secret")

        monkeypatch.setattr(jobs, "accounts_of", fails)
        job = ask_for_report(client_of_ann)
        run_slice(job)
        assert status_of(client_of_ann, job) == {"phase": "retrying", "percent": None, "result": None}
        finish(job)
        answer = status_of(client_of_ann, job)
        assert answer["phase"] == "failed"
        assert answer["message"] == "The report could not be made. We have been told."
        assert "secret" not in str(answer)
        monkeypatch.undo()
        finish(service.redrive(job.id))
        assert status_of(client_of_ann, job)["phase"] == "completed"


class TestKill:
    def test_sigkill_while_the_file_is_written_leaves_one_whole_file(
        self, processes: Processes, transactional_db: None, media: Path
    ) -> None:
        job = service.start(YearReport, {"year": 2026}).job
        doomed = processes.python(KILLED_IN_THE_FILE, str(job.id), str(media))
        assert doomed.wait() == -9, doomed.output
        assert default_storage.size(f"reports/{job.id}.csv") == 140_000
        assert Reconciler("tests").repair_dead("doomed").redriven == 1
        assert finish(job).result == {"file": f"reports/{job.id}.csv", "accounts": 0}
        assert [path.name for path in (media / "reports").iterdir()] == [f"{job.id}.csv"]
        assert default_storage.open(f"reports/{job.id}.csv").read().endswith(b"12,0")


KILLED_IN_THE_FILE = """
import os, signal, sys, uuid
from django.conf import settings
from durable_jobs import store
from durable_jobs.runner import run_slice
from tests.programs.reports import jobs

settings.MEDIA_ROOT = sys.argv[2]

class HalfAFile(jobs.ContentFile):
    def chunks(self, chunk_size=None):
        yield b"month,accounts" * 10_000
        os.kill(os.getpid(), signal.SIGKILL)

jobs.ContentFile = HalfAFile
run_slice(store.claim(uuid.UUID(sys.argv[1]), 0, 0, "doomed", 60), owner="doomed")
"""
