"""The demo's own pages: all imports for whoever looks around, and one's own, followed live."""

from __future__ import annotations

from dataclasses import dataclass

from django.contrib import messages
from django.contrib.auth.decorators import login_required
from django.db import transaction
from django.http import HttpRequest, HttpResponse
from django.shortcuts import get_object_or_404, redirect, render
from django.utils.translation import gettext as _
from django.views.decorators.http import require_http_methods, require_safe

from durable_jobs.exceptions import LockKeyHeld
from durable_jobs.models import Job
from project.demo.jobs import start_import
from project.demo.models import Airport, ImportRun
from project.demo.scopes import scope_of_request

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


@login_required
@require_http_methods(["GET", "HEAD", "POST"])
def imports(request: HttpRequest) -> HttpResponse:
    """The user's own imports; a POST starts one of the world's airports, and leads to its page."""
    if request.method != "POST":
        runs = ImportRun.objects.filter(created_by=request.user.pk)[:LATEST]
        return render(request, "demo/imports.html", {"runs": runs})
    try:
        with transaction.atomic():
            run = ImportRun.objects.create(source=ImportRun.Source.AIRPORTS, created_by_id=request.user.pk)
            start_import(run)
    except LockKeyHeld:
        messages.error(request, _("Another import is not finished yet. Nothing was started."))
        return redirect("imports")
    return redirect("follow", run.pk)


@login_required
@require_safe
def follow(request: HttpRequest, pk: int) -> HttpResponse:
    """One of the user's own imports. The page asks the API how far its job is."""
    run = get_object_or_404(ImportRun, pk=pk, created_by=request.user.pk)
    jobs = Job.objects.in_scope(scope_of_request(request)).for_subject(run).filter(created_by=request.user.pk)
    job = get_object_or_404(jobs.only("id").order_by("-id")[:1])
    return render(request, "demo/follow.html", {"run": run, "job": job})
