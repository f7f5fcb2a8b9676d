from __future__ import annotations

from django.apps import AppConfig
from django.conf import settings
from django.core.exceptions import ImproperlyConfigured
from django.utils.translation import gettext_lazy as _


class DurableJobsConfig(AppConfig):
    name = "durable_jobs"
    label = "durable_jobs"
    verbose_name = _("Durable jobs")
    default_auto_field = "django.db.models.BigAutoField"

    def ready(self) -> None:
        from durable_jobs import checks, kinds
        from durable_jobs.conf import config

        checks.register()
        try:
            kinds.discover()
            if config.TRANSPORT == "celery":
                from durable_jobs import consumer

                consumer.install()
        except ImproperlyConfigured:
            # A wrong setting; the checks say which, and every use of it refuses.
            return
        if getattr(settings, "TASKS", None):
            register_kind_of_tasks()


def register_kind_of_tasks() -> None:
    """Where TASKS names our backend, every process knows the kind that its tasks are jobs of."""
    try:
        from durable_jobs import tasks
    except ImportError as error:
        if error.name != "django_tasks":
            raise
        return  # neither Django's own tasks nor the package: here no task was ever stored
    tasks.register_kind()
