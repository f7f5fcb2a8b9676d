"""A backend for Django's tasks: `@task` functions run as durable jobs, by the same workers::

    TASKS = {"default": {"BACKEND": "durable_jobs.tasks.DurableJobsBackend"}}

On Django 6 for its own `django.tasks`, before that for the package `django-tasks` (extra `tasks`). Derive from
`durable_jobs.tasks.kind.TaskKind` for tasks with a lease, limits or repair of their own.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

# Nothing here may import a model, because an app may decorate its tasks before the models are loaded; nor Django's
# tasks, because Celery imports the module `tasks` of every app, also where there are none.

if TYPE_CHECKING:
    from durable_jobs.tasks.backend import DurableJobsBackend

__all__ = ["DurableJobsBackend", "register_kind"]


def __getattr__(name: str) -> Any:
    if name == "DurableJobsBackend":
        from durable_jobs.tasks.backend import DurableJobsBackend

        return DurableJobsBackend
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def register_kind() -> None:
    """Make the kind of the tasks known to this process, where TASKS names the backend; for `AppConfig.ready`."""
    from django.conf import settings
    from django.utils.module_loading import import_string

    for parameters in getattr(settings, "TASKS", {}).values():
        try:
            backend = import_string(parameters["BACKEND"])
        except (ImportError, KeyError, TypeError):
            continue  # Django tells at the first use of that backend
        if _is_ours(backend):
            from durable_jobs.tasks import kind

            kind.register()
            return


def _is_ours(backend: object) -> bool:
    try:
        from durable_jobs.tasks.backend import DurableJobsBackend
    except ImportError:
        return False
    return isinstance(backend, type) and issubclass(backend, DurableJobsBackend)
