from django.contrib.auth.decorators import login_required
from django.core.files.storage import default_storage
from django.http import FileResponse, Http404, JsonResponse
from django.shortcuts import redirect
from django.views.decorators.http import require_POST

from durable_jobs import service
from durable_jobs.explain import current_phase

from .jobs import YearReport


@login_required
@require_POST
def create(request, year):
    job, _ = service.start(
        YearReport,
        {"year": year},
        lock_key=f"report:{request.user.pk}:{year}",
        if_locked="return",
        created_by=request.user,
    )
    return redirect("report-status", job.id)


@login_required
def status(request, job_id):
    job = own_job(request, job_id)
    answer = {"phase": current_phase(job), "percent": job.percent, "result": job.result}
    if job.status == "failed":
        answer["message"] = "The report could not be made. We have been told."
    return JsonResponse(answer)


@login_required
def file(request, job_id):
    job = own_job(request, job_id)
    if job.status != "completed":
        raise Http404
    return FileResponse(default_storage.open(job.result["file"]), as_attachment=True)


def own_job(request, job_id):
    job = service.get(job_id)
    if job is None or job.kind != YearReport.name or job.created_by_id != request.user.pk:
        raise Http404
    return job
