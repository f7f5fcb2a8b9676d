"""The operator's screens in Django's admin. They show; every act goes through the service."""

from __future__ import annotations

from typing import Any

from django.contrib import admin

from durable_jobs.admin.site import (
    JobAdminMixin,
    JobEventAdminMixin,
    PauseAdminMixin,
    WorkerProcessAdminMixin,
)
from durable_jobs.admin.subject import JobsForSubject
from durable_jobs.models import Job, JobEvent, Pause, WorkerProcess

__all__ = [
    "JobAdmin",
    "JobAdminMixin",
    "JobEventAdmin",
    "JobsForSubject",
    "PauseAdmin",
    "WorkerProcessAdmin",
    "register",
]


class JobAdmin(JobAdminMixin, admin.ModelAdmin):
    """Jobs in the default theme."""


class JobEventAdmin(JobEventAdminMixin, admin.ModelAdmin):
    """The history in the default theme."""


class PauseAdmin(PauseAdminMixin, admin.ModelAdmin):
    """Pauses in the default theme."""


class WorkerProcessAdmin(WorkerProcessAdminMixin, admin.ModelAdmin):
    """Workers in the default theme."""


def register(site: Any) -> None:
    """Put the screens into an admin site; the default one has them."""
    site.register(Job, JobAdmin)
    site.register(JobEvent, JobEventAdmin)
    site.register(Pause, PauseAdmin)
    site.register(WorkerProcess, WorkerProcessAdmin)


register(admin.site)
