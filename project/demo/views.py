"""The demo's own page: the imports and how far they are."""

from __future__ import annotations

from dataclasses import dataclass

from django.http import HttpRequest, HttpResponse
from django.shortcuts import render

from durable_jobs.models import Job
from project.demo.models import Airport, ImportRun

LATEST = 20


@dataclass(frozen=True)
class Line:
    """An import with its latest job, if it has one."""

    run: ImportRun
    job: Job | None

    @property
    def handled(self) -> int:
        return self.run.rows_done + self.run.rows_skipped

    @property
    def total(self) -> int | None:
        return self.job.total_count if self.job else None


def home(request: HttpRequest) -> HttpResponse:
    runs = list(ImportRun.objects.select_related("created_by")[:LATEST])
    jobs = Job.objects.filter(
        subject_type=ImportRun._meta.label_lower, subject_id__in=[str(run.pk) for run in runs]
    )
    latest = {job.subject_id: job for job in jobs.order_by("id")}
    context = {
        "lines": [Line(run, latest.get(str(run.pk))) for run in runs],
        "airports": Airport.objects.count(),
    }
    return render(request, "demo/home.html", context)
