from __future__ import annotations

from django.apps import AppConfig
from django.core.exceptions import ImproperlyConfigured
from django.utils.translation import gettext_lazy as _


class DurableJobsConfig(AppConfig):
    name = "durable_jobs"
    label = "durable_jobs"
    verbose_name = _("Durable jobs")
    default_auto_field = "django.db.models.BigAutoField"

    def ready(self) -> None:
        from durable_jobs import checks, kinds, tasks
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
        tasks.register_kind()
