"""Jobs on the project's own admin pages: a panel with a row's jobs, and a column with its progress."""

from __future__ import annotations

from typing import Any, Final

from django.contrib import admin
from django.forms import Media
from django.http import HttpRequest
from django.template.loader import render_to_string
from django.utils.translation import gettext_lazy

from durable_jobs import database, selection
from durable_jobs.admin import access, listing
from durable_jobs.models import Job
from durable_jobs.selection import LARGE_COLUMNS, Look

SHOWN: Final = 10


class JobsForSubject:
    """For the admin of a model whose rows are the subjects of jobs: `class ImportAdmin(JobsForSubject, ModelAdmin)`.

    Its change page gets a panel "Jobs"; put `"job_progress"` into `list_display` for a bar in the list. Only
    users who may see jobs see them, and only those of their scopes. One query for a list.
    """

    admin_site: Any
    model: Any

    @property
    def media(self) -> Any:
        return super().media + Media(css={"all": ["durable_jobs/jobs.css"]})  # type: ignore[misc]

    def get_object(self, request: HttpRequest, object_id: str, from_field: str | None = None) -> Any:
        found = super().get_object(request, object_id, from_field)  # type: ignore[misc]
        if found is not None:
            found._durable_jobs_request = request
        return found

    def get_readonly_fields(self, request: HttpRequest, obj: Any = None) -> Any:
        own = super().get_readonly_fields(request, obj)  # type: ignore[misc]
        return (*own, "jobs_panel") if self._shows(request, obj) and "jobs_panel" not in own else own

    def get_fieldsets(self, request: HttpRequest, obj: Any = None) -> Any:
        own = list(super().get_fieldsets(request, obj))  # type: ignore[misc]
        if not self._shows(request, obj):
            return own
        cleaned = [
            (name, {**options, "fields": [field for field in options["fields"] if field != "jobs_panel"]})
            for name, options in own
        ]
        return [*cleaned, (gettext_lazy("Jobs"), {"fields": ["jobs_panel"]})]

    def _shows(self, request: HttpRequest, obj: Any) -> bool:
        return obj is not None and access.may(request, access.VIEW)

    @admin.display(description=gettext_lazy("jobs"))
    def jobs_panel(self, obj: Any) -> str:
        """The newest jobs of this row."""
        request = getattr(obj, "_durable_jobs_request", None)
        if request is None or not self._shows(request, obj):
            return ""
        jobs = Job.objects.using(database.alias()).for_subject(obj).filter(access.among(request))
        newest = list(jobs.defer(*LARGE_COLUMNS).order_by("-id")[:SHOWN])
        look = Look.take()
        context = {"rows": listing.rows_of(newest, look, self.admin_site), "now": look.now}
        return render_to_string("admin/durable_jobs/subject_panel.html", context, request)

    def get_changelist_instance(self, request: HttpRequest) -> Any:
        found = super().get_changelist_instance(request)  # type: ignore[misc]
        if "job_progress" in found.list_display and access.may(request, access.VIEW):
            self._attach(request, list(found.result_list))
        return found

    def _attach(self, request: HttpRequest, rows: list[Any]) -> None:
        jobs = Job.objects.using(database.alias()).filter(
            access.among(request),
            subject_type=self.model._meta.label_lower,
            subject_id__in=[str(row.pk) for row in rows],
        )
        newest = {job.subject_id: job for job in jobs.defer(*selection.LARGE_COLUMNS).order_by("id")}
        look = Look.take()
        for row in rows:
            job = newest.get(str(row.pk))
            row._durable_jobs_latest = (job, look.phase(job)) if job is not None else None

    @admin.display(description=gettext_lazy("job"))
    def job_progress(self, obj: Any) -> str:
        """Phase and progress of this row's newest job."""
        latest = getattr(obj, "_durable_jobs_latest", None)
        if latest is None:
            return "–"
        job, phase = latest
        return render_to_string("admin/durable_jobs/subject_cell.html", {"job": job, "phase": phase})
