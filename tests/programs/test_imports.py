"""Program (a): a nightly CSV import behind a row of its own, started by cron or by an upload in the admin."""

from __future__ import annotations

from collections.abc import Callable
from decimal import Decimal
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from django.contrib.messages import get_messages
from django.core.files.base import ContentFile
from django.core.files.uploadedfile import SimpleUploadedFile
from django.core.management import CommandError, call_command
from django.db import connections, transaction
from django.test import Client
from django.urls import reverse

from durable_jobs import service
from durable_jobs.models import Job
from durable_jobs.reconciler import Reconciler
from durable_jobs.testing import finish, interrupt_after, kill_after, run_slice, started
from tests.connections import OtherConnection
from tests.processes import Processes
from tests.programs.imports.jobs import ImportCsv, start_import
from tests.programs.imports.models import ImportRun, Product, Supplier

ROWS = 95


def csv_file(rows: int = ROWS, **prices: str) -> bytes:
    """Rows A0, A1, …; `prices` replaces the price of single rows."""
    lines = [f"A{n},Näme {n},{prices.get(f'A{n}', f'{n}.10')}" for n in range(rows)]
    return "\r\n".join(["\ufeffsku,name,price", *lines]).encode()


@pytest.fixture(autouse=True)
def media(settings: Any, tmp_path: Path) -> Path:
    settings.MEDIA_ROOT = tmp_path / "media"
    return settings.MEDIA_ROOT


@pytest.fixture(autouse=True)
def small_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ImportCsv, "batch_size", 10)


@pytest.fixture
def supplier(db: None) -> Supplier:
    return Supplier.objects.create(name="Acme")


def new_run(supplier: Supplier, content: bytes | None = None) -> ImportRun:
    return ImportRun.objects.create(
        supplier=supplier, file=ContentFile(csv_file() if content is None else content, name="prices.csv")
    )


def assert_imported(run: ImportRun, *, without: frozenset[str] = frozenset()) -> None:
    """Every row once: the counter would show a row applied twice, the table one that is missing."""
    run.refresh_from_db()
    wanted = {f"A{n}": Decimal(f"{n}.10") for n in range(ROWS)}
    assert (run.status, run.rows_done) == ("done", ROWS - len(without))
    assert dict(Product.objects.values_list("sku", "price")) == {
        sku: price for sku, price in wanted.items() if sku not in without
    }


class TestImport:
    def test_it_imports_every_row_and_says_so_on_its_row(self, supplier: Supplier) -> None:
        run = new_run(supplier)
        job = finish(start_import(run).job)
        assert (job.status, job.processed_count, job.total_count, job.subject) == (
            "completed",
            ROWS,
            ROWS,
            run,
        )
        assert_imported(run)
        assert Product.objects.get(sku="A7").name == "Näme 7"

    @pytest.mark.parametrize("block", [interrupt_after, kill_after])
    def test_stopped_after_each_batch_it_repeats_and_skips_nothing(
        self, supplier: Supplier, block: Any
    ) -> None:
        run = new_run(supplier)
        with block(1):
            job = finish(start_import(run).job)
        assert job.attempts >= ROWS // 10
        assert_imported(run)

    def test_the_row_says_that_it_runs(self, supplier: Supplier) -> None:
        run = new_run(supplier)
        with interrupt_after(1):
            run_slice(start_import(run).job)
        run.refresh_from_db()
        assert (run.status, run.rows_done) == ("running", 10)

    def test_a_poison_row_is_skipped_and_recorded(self, supplier: Supplier) -> None:
        run = new_run(supplier, csv_file(A33="n/a", A34="NaN"))
        job = finish(start_import(run).job)
        assert job.status == "completed"
        assert_imported(run, without=frozenset({"A33", "A34"}))
        first, second = job.events.filter(event="item_skipped").order_by("id")
        assert "A33" in first.data["item"]
        assert "must be a decimal number" in first.message
        assert "A34" in second.data["item"]

    def test_a_short_row_is_skipped(self, supplier: Supplier) -> None:
        run = new_run(supplier, csv_file() + b"\r\nB1,half a row")
        assert finish(start_import(run).job).status == "completed"
        assert_imported(run)

    def test_two_rows_for_one_sku_are_one_product(self, supplier: Supplier) -> None:
        run = new_run(supplier, csv_file(3) + b"\r\nA1,later,7.00")
        assert finish(start_import(run).job).status == "completed"
        assert Product.objects.get(sku="A1").price == 7
        assert Product.objects.count() == 3

    def test_a_file_of_another_form_fails_and_the_row_agrees(self, supplier: Supplier) -> None:
        run = new_run(supplier, b"id;title\r\n1;x")
        job = finish(start_import(run).job)
        run.refresh_from_db()
        assert (job.status, job.error_type, run.status) == ("failed", "KeyError", "failed")

    def test_a_redrive_opens_the_row_and_goes_on_where_it_was(
        self, supplier: Supplier, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        run = new_run(supplier, csv_file(A33="n/a"))
        monkeypatch.setattr(ImportCsv, "max_skipped", 0)
        job = finish(start_import(run).job)
        run.refresh_from_db()
        assert (job.status, job.error_code, run.status, run.rows_done) == (
            "failed",
            "too_many_skipped",
            "failed",
            30,
        )
        monkeypatch.setattr(ImportCsv, "max_skipped", 1)
        job = service.redrive(job.id)
        run.refresh_from_db()
        assert run.status == "queued"
        finish(job)
        assert_imported(run, without=frozenset({"A33"}))

    def test_a_cancel_reaches_the_row(self, supplier: Supplier) -> None:
        run = new_run(supplier)
        service.cancel(start_import(run).job.id)
        run.refresh_from_db()
        assert run.status == "cancelled"

    def test_a_deleted_run_does_not_keep_its_job_alive(self, supplier: Supplier) -> None:
        run = new_run(supplier)
        job = start_import(run).job
        run.delete()
        assert finish(job).status == "failed"


class TestKill:
    def test_sigkill_inside_a_batch_leaves_nothing_of_it(
        self, processes: Processes, transactional_db: None, media: Path
    ) -> None:
        """The process dies with a batch's rows written and not committed; another repeats that batch alone."""
        supplier = Supplier.objects.create(name="Acme")
        run = new_run(supplier)
        job = start_import(run).job
        doomed = processes.python(KILLED_INSIDE_A_BATCH, str(job.id), str(media))
        assert doomed.wait() == -9, doomed.output
        run.refresh_from_db()
        assert (run.status, run.rows_done, Product.objects.count()) == ("running", 30, 30)
        report = Reconciler("tests").repair_dead("doomed")
        assert report.redriven == 1
        assert finish(job).attempts == 2
        assert_imported(run)


KILLED_INSIDE_A_BATCH = """
import os, signal, sys, uuid
from django.conf import settings
from durable_jobs import store
from durable_jobs.runner import run_slice
from tests.programs.imports.jobs import ImportCsv

settings.MEDIA_ROOT = sys.argv[2]
ImportCsv.batch_size = 10
process = ImportCsv.process

def dies(self, ctx, batch):
    process(self, ctx, batch)
    if batch[0]["sku"] == "A30":
        os.kill(os.getpid(), signal.SIGKILL)

ImportCsv.process = dies
run_slice(store.claim(uuid.UUID(sys.argv[1]), 0, 0, "doomed", 60), owner="doomed")
"""


class TestCron:
    @pytest.fixture
    def supplier(self, db: None, tmp_path: Path) -> Supplier:
        (tmp_path / "acme.csv").write_bytes(csv_file())
        return Supplier.objects.create(name="Acme", nightly_file=str(tmp_path / "acme.csv"))

    def cron(self) -> str:
        out = StringIO()
        call_command("nightly_import", stdout=out)
        return out.getvalue().strip()

    def test_the_second_call_is_a_repeat_while_it_runs_and_when_it_is_done(self, supplier: Supplier) -> None:
        assert self.cron() == "Acme: started"
        assert self.cron() == "Acme: there already"
        finish(started(ImportCsv)[0])
        assert self.cron() == "Acme: there already"
        assert len(started(ImportCsv)) == 1
        assert_imported(ImportRun.objects.get())

    def test_two_calls_at_once_start_one(
        self, transactional_db: None, supplier: Supplier, other_connections: Callable[[], OtherConnection]
    ) -> None:
        """The second waits for the first, whose run and job it then finds."""
        first, second = other_connections(), other_connections()
        out = StringIO()
        first.enter(transaction.atomic())
        first.run(call_command, "nightly_import", stdout=StringIO())
        second.begin(call_command, "nightly_import", stdout=out)
        with pytest.raises(TimeoutError):
            second.join(0.3)
        first.leave()
        second.join()
        assert out.getvalue().strip() == "Acme: there already"
        assert (ImportRun.objects.count(), len(started(ImportCsv))) == (1, 1)

    def test_the_file_is_fetched_once_a_night(self, supplier: Supplier) -> None:
        self.cron()
        Path(supplier.nightly_file).unlink()
        assert self.cron() == "Acme: there already"

    def test_a_refused_start_leaves_no_run_and_the_next_call_makes_it(self, supplier: Supplier) -> None:
        upload = start_import(new_run(supplier)).job
        with pytest.raises(CommandError, match=r"Acme: lock_key 'supplier:\d+' is held by job"):
            self.cron()
        assert not ImportRun.objects.exclude(night=None).exists()
        finish(upload)
        assert self.cron() == "Acme: started"

    def test_one_suppliers_trouble_is_not_anothers(self, supplier: Supplier) -> None:
        Supplier.objects.create(name="Late", nightly_file="/nowhere/late.csv")
        with pytest.raises(CommandError, match=r"Late: .*No such file"):
            self.cron()
        assert [run.supplier for run in ImportRun.objects.all()] == [supplier]


class TestAdmin:
    @pytest.fixture(params=[False, True], ids=["", "atomic requests"])
    def admin(
        self, request: pytest.FixtureRequest, admin_client: Client, monkeypatch: pytest.MonkeyPatch
    ) -> Client:
        monkeypatch.setitem(connections.settings["default"], "ATOMIC_REQUESTS", request.param)
        return admin_client

    def upload(self, admin: Client, supplier: Supplier) -> Any:
        file = SimpleUploadedFile("prices.csv", csv_file())
        return admin.post(reverse("admin:imports_importrun_add"), {"supplier": supplier.pk, "file": file})

    def test_an_upload_starts_its_import(self, admin: Client, supplier: Supplier, admin_user: Any) -> None:
        answer = self.upload(admin, supplier)
        assert answer.status_code == 302
        run = ImportRun.objects.get()
        job = Job.objects.for_subject(run).get()
        assert job.created_by == admin_user
        finish(job)
        assert_imported(run)

    def test_a_refused_start_is_a_message_and_leaves_no_run(self, admin: Client, supplier: Supplier) -> None:
        self.upload(admin, supplier)
        answer = self.upload(admin, supplier)
        assert (answer.status_code, answer.url) == (302, reverse("admin:imports_importrun_add"))
        told = [str(message) for message in get_messages(answer.wsgi_request)]
        assert told[-1] == "This supplier's last import is still at work. Nothing was saved."
        assert ImportRun.objects.count() == len(started(ImportCsv)) == 1
        finish(started(ImportCsv)[0])
        assert self.upload(admin, supplier).url == reverse("admin:imports_importrun_changelist")

    def test_a_later_edit_starts_nothing(self, admin: Client, supplier: Supplier) -> None:
        run = new_run(supplier)
        address = reverse("admin:imports_importrun_change", args=[run.pk])
        assert admin.get(address).status_code == 200
        assert admin.post(address, {}).status_code == 302
        assert started(ImportCsv) == []
