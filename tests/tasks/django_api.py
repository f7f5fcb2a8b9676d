"""Django's tasks as a project imports them: from Django 6, or from the package `django-tasks`."""

try:
    from django import tasks as module
    from django.tasks import TaskContext, TaskResultStatus, default_task_backend, task, task_backends
    from django.tasks.exceptions import InvalidTask, TaskResultDoesNotExist, TaskResultMismatch
    from django.tasks.signals import task_enqueued, task_finished, task_started
except ImportError:
    import django_tasks as module
    from django_tasks import TaskContext, TaskResultStatus, default_task_backend, task, task_backends
    from django_tasks.exceptions import InvalidTaskError as InvalidTask
    from django_tasks.exceptions import TaskResultDoesNotExist, TaskResultMismatch
    from django_tasks.signals import task_enqueued, task_finished, task_started

PACKAGE = module.__name__
"""`django.tasks` or `django_tasks`."""

__all__ = [
    "PACKAGE",
    "InvalidTask",
    "TaskContext",
    "TaskResultDoesNotExist",
    "TaskResultMismatch",
    "TaskResultStatus",
    "default_task_backend",
    "task",
    "task_backends",
    "task_enqueued",
    "task_finished",
    "task_started",
]
