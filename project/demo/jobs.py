"""The jobs of the demo: import airports from the package, or from an uploaded CSV file."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

from django import forms
from django.conf import settings
from django.db.models import F
from django.utils.translation import gettext_lazy as _

from durable_jobs import service
from durable_jobs.exceptions import TerminalError
from durable_jobs.kinds import BatchKind, StatusMirror, register
from durable_jobs.models import Job, Scope
from project.demo import airports
from project.demo.airports import FIELDS, BadRow, Row
from project.demo.models import Airport, ImportBatch, ImportedRow, ImportRun
from project.demo.scopes import scope_of_user

if TYPE_CHECKING:
    from durable_jobs.runner import SliceContext

Status = ImportRun.Status

LOCK_KEY = "airports"
"""One import of a scope at a time writes the table."""


class Import(BatchKind):
    """What both imports do with a batch: airports, ledger and progress, in the transaction of the cursor."""

    queue = "imports"
    batch_size = settings.DEMO_BATCH_SIZE
    lease_seconds = settings.DEMO_LEASE_SECONDS
    mirror = StatusMirror(
        "demo.ImportRun",
        field="status",
        open=(Status.QUEUED, Status.RUNNING),
        redriven=Status.QUEUED,
        completed=Status.DONE,
        failed=Status.FAILED,
        cancelled=Status.CANCELLED,
    )

    def before_batch(self, ctx: SliceContext, batch: list[Row]) -> None:
        """Wait as for a slow source. Here and not in `process`, which holds a transaction open."""
        ctx.stop.wait(ctx.input["pause"])

    def process(self, ctx: SliceContext, batch: list[Row]) -> None:
        run = ctx.input["run"]
        counted = {"status": Status.RUNNING, "rows_done": F("rows_done") + len(batch)}
        if not ImportRun.objects.filter(pk=run).update(**counted):
            raise TerminalError(f"Import {run} was deleted.", code="run_gone")
        # PostgreSQL refuses to update a row twice in one statement: as row by row, the last one wins.
        made = {made.icao: made for made in (airports.airport(row, last_run_id=run) for row in batch)}
        given = [FIELDS[name] for name in batch[0] if name != "icao"]
        Airport.objects.bulk_create(
            made.values(), update_conflicts=True, unique_fields=["icao"], update_fields=[*given, "last_run"]
        )
        line = ImportBatch.objects.create(
            run_id=run, first=batch[0]["icao"], rows=len(batch), lease_epoch=ctx.lease.epoch
        )
        ImportedRow.objects.bulk_create(ImportedRow(batch=line, icao=row["icao"]) for row in batch)


class AirportsForm(forms.Form):
    """The world's airports, or the first so many, by a click."""

    limit = forms.IntegerField(
        label=_("Only the first"),
        required=False,
        min_value=1,
        help_text=_("Empty: all of them."),
    )

    def start(self, *, created_by: Any, scope: Scope) -> Job:
        """Save the run and start its job, in the caller's transaction."""
        run = ImportRun.objects.create(source=ImportRun.Source.AIRPORTS, created_by=created_by)
        return start_import(run, limit=self.cleaned_data["limit"])


@register
class AirportsImport(Import):
    """The world's airports from the package; `limit` takes only the first so many."""

    name = "demo.airports"
    description = _("Imports the world's airports from the package airportsdata.")
    operator_note = _("Writes the table of airports; one import at a time.")
    runbook_url = "https://github.com/mborsetti/airportsdata"
    input_form = AirportsForm

    def collection(self, ctx: SliceContext) -> Iterable[Row]:
        return airports.world()[: ctx.input["limit"]]


@register
class CsvImport(Import):
    """An uploaded file. A line that is no airport is skipped and recorded; too many of them end the import."""

    name = "demo.csv"
    description = "Imports airports from an uploaded CSV file, and skips up to 100 bad lines."
    max_skipped = 100

    def collection(self, ctx: SliceContext) -> Iterator[Row]:
        run = ImportRun.objects.filter(pk=ctx.input["run"]).first()
        if run is None:
            raise TerminalError(f"Import {ctx.input['run']} was deleted.", code="run_gone")
        with run.opened() as file:
            if airports.sha256(file) != ctx.input["sha256"]:
                raise TerminalError(
                    f"{run.file.name} has other bytes than when the import began.", code="file_changed"
                )
            file.seek(0)
            yield from airports.csv_rows(file)

    def total(self, ctx: SliceContext) -> int:
        return sum(1 for _ in self.collection(ctx))

    def on_item_error(self, ctx: SliceContext, item: Row, error: Exception) -> bool:
        if not isinstance(error, BadRow):
            return False
        ImportRun.objects.filter(pk=ctx.input["run"]).update(rows_skipped=F("rows_skipped") + 1)
        return True


def start_import(run: ImportRun, *, limit: int | None = None, pause: float | None = None) -> Job:
    """Start the job of a saved run, in the caller's transaction.

    `limit`: only so many of the world's airports. `pause`: seconds before each batch, as for a slow source.
    Raises `LockKeyHeld` while another import is not finished.
    """
    input: dict[str, Any] = {"run": run.pk, "pause": settings.DEMO_PAUSE if pause is None else pause}
    if run.source == ImportRun.Source.CSV:
        with run.opened() as file:
            input["sha256"] = airports.sha256(file)
        kind: type[Import] = CsvImport
    else:
        input["limit"] = limit
        kind = AirportsImport
    return service.start(
        kind,
        input,
        scope=scope_of_user(run.created_by),
        subject=run,
        lock_key=LOCK_KEY,
        created_by=run.created_by,
    ).job
