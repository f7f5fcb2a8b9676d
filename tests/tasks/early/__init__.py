"""An app listed before durable_jobs that decorates a task before any model is loaded."""

from tests.tasks.django_api import task


@task
def early() -> str:
    return "early"
