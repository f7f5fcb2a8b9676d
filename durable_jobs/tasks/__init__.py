"""A backend for Django's tasks: `@task` functions run as durable jobs, by the same workers::

    TASKS = {"default": {"BACKEND": "durable_jobs.tasks.DurableJobsBackend"}}

On Django 6 for its own `django.tasks`, before that for the package `django-tasks` (extra `tasks`). Derive from
`durable_jobs.tasks.kind.TaskKind` for tasks with a lease, limits or repair of their own.
"""

from durable_jobs.tasks.backend import DurableJobsBackend

# Nothing here may import a model: an app may decorate its tasks before the models are loaded.

__all__ = ["DurableJobsBackend", "register_kind"]


def register_kind() -> None:
    """Make the kind of the tasks known to this process, where TASKS names the backend; for `AppConfig.ready`."""
    from django.conf import settings
    from django.utils.module_loading import import_string

    for parameters in getattr(settings, "TASKS", {}).values():
        try:
            backend = import_string(parameters["BACKEND"])
        except (ImportError, KeyError, TypeError):
            continue  # Django tells at the first use of that backend
        if isinstance(backend, type) and issubclass(backend, DurableJobsBackend):
            from durable_jobs.tasks import kind

            kind.register()
            return
