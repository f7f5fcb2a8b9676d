"""Django's tasks under one set of names: built into Django 6, in the package `django-tasks` before."""

from __future__ import annotations

try:
    from django.tasks.backends.base import BaseTaskBackend
    from django.tasks.base import Task, TaskContext, TaskError, TaskResult, TaskResultStatus
    from django.tasks.exceptions import InvalidTask, TaskResultDoesNotExist
    from django.tasks.signals import task_enqueued, task_finished, task_started
    from django.utils.json import normalize_json
except ImportError as missing:
    if not str(missing.name).startswith(("django.tasks", "django.utils.json")):
        raise
    try:
        from django_tasks.backends.base import BaseTaskBackend  # type: ignore[assignment]
        from django_tasks.base import Task, TaskContext, TaskError, TaskResult, TaskResultStatus  # type: ignore[assignment]
        from django_tasks.exceptions import InvalidTaskError as InvalidTask  # type: ignore[assignment]
        from django_tasks.exceptions import TaskResultDoesNotExist  # type: ignore[assignment]
        from django_tasks.signals import task_enqueued, task_finished, task_started
        from django_tasks.utils import normalize_json
    except ImportError as error:
        if error.name is None or error.name.partition(".")[0] != "django_tasks":
            raise
        raise ImportError(
            "This Django has no django.tasks. Install the package of the same interface (pip install "
            "'durable-jobs[tasks]'), or use Django 6.",
            name="django_tasks",
        ) from error

__all__ = [
    "BaseTaskBackend",
    "InvalidTask",
    "Task",
    "TaskContext",
    "TaskError",
    "TaskResult",
    "TaskResultDoesNotExist",
    "TaskResultStatus",
    "normalize_json",
    "task_enqueued",
    "task_finished",
    "task_started",
]
