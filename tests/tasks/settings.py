"""The tests' databases with little more than the package, so that they also run where only Django 6 is installed."""

import django

from tests.settings import DATABASES, DEFAULT_AUTO_FIELD, DURABLE_JOBS, SECRET_KEY, TIME_ZONE, USE_TZ

__all__ = ["DATABASES", "DEFAULT_AUTO_FIELD", "DURABLE_JOBS", "SECRET_KEY", "TIME_ZONE", "USE_TZ"]

INSTALLED_APPS = [
    "tests.tasks.early",
    *(["django_tasks"] if django.VERSION < (6, 0) else []),
    "django.contrib.contenttypes",
    "django.contrib.auth",
    "durable_jobs",
    "tests",
]

BACKEND = "durable_jobs.tasks.DurableJobsBackend"
TASKS = {
    "default": {"BACKEND": BACKEND, "QUEUES": ["default", "mails"]},
    "patient": {"BACKEND": BACKEND, "QUEUES": [], "OPTIONS": {"KIND": "tests.patient_task"}},
}
