"""The demo's rows in the admin. Adding an import starts its job, in the transaction that saves the row."""

from __future__ import annotations

from typing import Any

from django import forms
from django.contrib import admin, messages
from django.core.exceptions import ValidationError
from django.core.files.uploadedfile import UploadedFile
from django.http import HttpRequest, HttpResponse, HttpResponseRedirect
from django.urls import reverse
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy

from durable_jobs.admin import JobsForSubject
from durable_jobs.exceptions import LockKeyHeld
from project.demo import airports
from project.demo.airports import BadFile
from project.demo.jobs import start_import
from project.demo.models import Airport, ImportRun


class ImportForm(forms.ModelForm):
    """A source, and a file where the source is one."""

    class Meta:
        model = ImportRun
        fields = ("source", "file")
        help_texts = {
            "file": gettext_lazy(
                "UTF-8; the first line names the columns: icao, name, country, lat, lon, and if you like "
                "iata, city, subd, elevation, tz, lid."
            )
        }

    def clean(self) -> dict[str, Any] | None:
        cleaned = super().clean() or {}
        file, source = cleaned.get("file"), cleaned.get("source")
        if source == ImportRun.Source.CSV and not file and "file" not in self.errors:
            self.add_error("file", _("Choose the file to import."))
        if source == ImportRun.Source.AIRPORTS and file:
            self.add_error("file", _("The world’s airports come without a file. Choose CSV as the source."))
        return cleaned

    def clean_file(self) -> Any:
        file = self.cleaned_data["file"]
        if isinstance(file, UploadedFile) and file.file is not None:
            try:
                next(airports.csv_rows(file.file), None)
            except BadFile as error:
                raise ValidationError(str(error)) from error
            file.seek(0)
        return file


@admin.register(ImportRun)
class ImportRunAdmin(JobsForSubject, admin.ModelAdmin):
    """Imports are started and looked at here; only their jobs change them."""

    form = ImportForm
    list_display = (
        "id",
        "source",
        "status",
        "job_progress",
        "rows_done",
        "rows_skipped",
        "created_by",
        "created_at",
    )
    list_filter = ("status", "source")
    list_select_related = ("created_by",)
    readonly_fields = ("status", "rows_done", "rows_skipped", "created_by", "created_at")

    def get_fields(self, request: HttpRequest, obj: ImportRun | None = None) -> Any:
        return ("source", "file") if obj is None else ("source", "file", *self.readonly_fields)

    def has_change_permission(self, request: HttpRequest, obj: ImportRun | None = None) -> bool:
        return False

    def save_model(self, request: HttpRequest, obj: ImportRun, form: Any, change: bool) -> None:
        obj.created_by = request.user  # type: ignore[assignment]
        super().save_model(request, obj, form, change)
        try:
            start_import(obj)
        except LockKeyHeld:
            # The transaction takes the row back, but no file.
            obj.file.delete(save=False)
            raise

    def add_view(
        self, request: HttpRequest, form_url: str = "", extra_context: dict[str, Any] | None = None
    ) -> HttpResponse:
        try:
            return super().add_view(request, form_url, extra_context)
        except LockKeyHeld as refusal:
            # Out here the transaction has been rolled back: no import is left without a job.
            text = _("Another import is not finished yet (job %(job)s). Nothing was started.")
            messages.error(request, text % {"job": refusal.held_by})
            return HttpResponseRedirect(reverse("admin:demo_importrun_changelist"))


@admin.register(Airport)
class AirportAdmin(admin.ModelAdmin):
    """What the imports have brought."""

    list_display = ("icao", "iata", "name", "city", "country", "last_run")
    list_filter = ("country",)
    list_select_related = ("last_run",)
    search_fields = ("=icao", "=iata", "name", "city")
    readonly_fields = ("last_run",)
