"""The tasks of the tests."""

import os
import time
from pathlib import Path
from typing import Any

from django.db import connection, transaction

from durable_jobs.exceptions import TransientError
from tests.tasks.django_api import TaskContext, task


class Trouble(Exception):
    pass


@task
def add(a: int, b: int = 1) -> int:
    return a + b


@task
async def add_async(a: int, b: int = 1) -> int:
    return a + b


@task
def echo(*args: Any, **kwargs: Any) -> Any:
    return [args, kwargs]


@task
def fail(text: str) -> None:
    raise Trouble(text)


@task
async def fail_async(text: str) -> None:
    raise Trouble(text)


@task
def exit_process() -> None:
    raise SystemExit(3)


@task
def fail_for_now() -> None:
    raise TransientError("later")


@task
def give(what: str) -> Any:
    return {"object": object(), "set": {1}, "bytes": b"text", "tuple": (1, 2), "nan": float("nan")}[what]


@task
def leave_open() -> None:
    transaction.set_autocommit(False)
    with connection.cursor() as cursor:
        cursor.execute("SELECT 1")
        cursor.execute("UPDATE auth_user SET is_active = is_active")


@task(takes_context=True)
def with_context(context: TaskContext, word: str) -> dict[str, Any]:
    result = context.task_result
    return {
        "word": word,
        "attempt": context.attempt,
        "id": result.id,
        "status": result.status,
        "workers": result.worker_ids,
    }


@task(takes_context=True, backend="patient")
def third_time(context: TaskContext) -> int:
    if context.attempt < 3:
        raise Trouble(f"attempt {context.attempt}")
    return context.attempt


@task(priority=7, queue_name="mails")
def mail() -> str:
    return "sent"


@task
def note(path: str, text: str) -> None:
    with Path(path).open("a") as file:
        file.write(f"{text}\n")


@task(backend="patient")
def sleep_once(path: str) -> str:
    """Sleeps when it is called for the first time, so that its worker can be killed."""
    mark = Path(path)
    if not mark.exists():
        mark.write_text(str(os.getpid()))
        time.sleep(60)
    return "done"


@task
def sleep_noted(path: str) -> None:
    Path(path).write_text(str(os.getpid()))
    time.sleep(60)


def plain() -> None:
    pass


renamed = task(plain)


class Holder:
    @staticmethod
    def inside() -> None:
        pass


nested = task(Holder.inside)
