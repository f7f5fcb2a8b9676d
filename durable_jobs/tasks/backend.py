"""What Django asks of a task backend, answered by jobs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from django.apps import apps
from django.core.checks import CheckMessage, Error
from django.db import transaction
from django.utils.module_loading import import_string

from durable_jobs.exceptions import UnknownKind, shown
from durable_jobs.tasks.api import (
    BaseTaskBackend,
    InvalidTask,
    Task,
    TaskResult,
    TaskResultDoesNotExist,
    normalize_json,
    task_enqueued,
)

if TYPE_CHECKING:
    from durable_jobs.tasks.kind import TaskKind

OPTIONS = frozenset({"KIND"})


class DurableJobsBackend(BaseTaskBackend):
    """Stores a task as a job of the kind `durable_jobs.task`, or of the one that `OPTIONS["KIND"]` names.

    `enqueue` joins the caller's transaction: after a rollback there is no job. Raises `InvalidTask` for a task
    that a worker could not find again, `TypeError` or `ValueError` for arguments that are not JSON.
    """

    supports_defer = True
    supports_async_task = True
    supports_get_result = True
    supports_priority = True

    def __init__(self, alias: str, params: dict[str, Any]) -> None:
        super().__init__(alias, params)
        self.options = self.options or {}

    def validate_task(self, task: Task) -> None:
        """Refuse with `InvalidTask` what Django refuses, and queues that no worker could serve."""
        if not isinstance(task, Task):
            raise InvalidTask(
                f"{shown(task)} is a task of {type(task).__module__}, and this Django has its own: decorate it with "
                f"{Task.__module__.removesuffix('.base')}.task."
            )
        super().validate_task(task)
        from durable_jobs.conf import MANUAL_QUEUE, QUEUE_NAME

        if not QUEUE_NAME.fullmatch(task.queue_name) or task.queue_name == MANUAL_QUEUE:
            raise InvalidTask(f"Queue {shown(task.queue_name)} {_UNUSABLE_QUEUE}.")

    def enqueue(self, task: Task, args: Sequence[Any], kwargs: Mapping[str, Any]) -> TaskResult:
        """Start the job; the result's id is its id. The signal `task_enqueued` follows the commit."""
        from durable_jobs import database, service
        from durable_jobs.tasks import kind as kinds_of_tasks

        self.validate_task(task)
        _require_findable(task)
        input = {
            "task": task.module_path,
            "args": normalize_json(args),
            "kwargs": normalize_json(kwargs),
            "backend": self.alias,
            "run_after": task.run_after.isoformat() if task.run_after else None,
        }
        job = service.start(
            type(self.kind()),
            input,
            queue=task.queue_name,
            priority=int(task.priority),
            run_after=task.run_after,
            meta={"task": task.module_path},
        ).job
        result = kinds_of_tasks.result_of(job, task)
        transaction.on_commit(
            partial(task_enqueued.send_robust, type(self), task_result=result),
            using=database.alias(),
            robust=True,
        )
        return result

    def get_result(self, result_id: str) -> TaskResult:
        """The result as it now is; raises `TaskResultDoesNotExist`, also for a result of another backend.

        `durable_jobs.exceptions.TaskNotLoaded` when its function is no longer in the code.
        """
        from durable_jobs import service
        from durable_jobs.tasks import kind as kinds_of_tasks

        job = service.get(result_id, scope=service.ALL_SCOPES)
        kind = self.kind()
        if job is None or job.kind not in kind.all_names or job.input["backend"] != self.alias:
            raise TaskResultDoesNotExist(result_id)
        return kinds_of_tasks.result_of(job)

    def check(self, **options: Any) -> list[CheckMessage]:
        """Report what is wrong with this entry of TASKS (E020 to E022)."""
        return list(self._problems())

    def kind(self) -> TaskKind:
        """The kind that this backend's tasks are jobs of; raises `UnknownKind`."""
        from durable_jobs import kinds
        from durable_jobs.tasks import kind as kinds_of_tasks

        name = self.options.get("KIND")
        if name is None:
            return kinds_of_tasks.register()
        kind = kinds.get(name)
        if not isinstance(kind, kinds_of_tasks.TaskKind):
            raise UnknownKind(name, [one.name for one in kinds.all_kinds() if _is_for_tasks(one)])
        return kind

    def _problems(self) -> Iterator[CheckMessage]:
        entry = f"TASKS[{self.alias!r}]"
        if not apps.is_installed("durable_jobs"):
            yield Error(
                f"{entry} stores tasks as jobs, and durable_jobs is not in INSTALLED_APPS.",
                hint='Add "durable_jobs" to INSTALLED_APPS and run migrate.',
                id="durable_jobs.E020",
            )
            return
        from durable_jobs.conf import MANUAL_QUEUE, QUEUE_NAME

        for name in sorted(set(self.options) - OPTIONS):
            yield Error(
                f"{entry}['OPTIONS'] has the option {name!r}, which the backend does not know.",
                hint=f"Options: {', '.join(sorted(OPTIONS))}.",
                id="durable_jobs.E021",
            )
        try:
            self.kind()
        except UnknownKind as error:
            yield Error(
                f"{entry}['OPTIONS']['KIND'] names no kind of tasks: {error}",
                hint="Name a registered kind that derives from durable_jobs.tasks.kind.TaskKind.",
                id="durable_jobs.E021",
            )
        for name in sorted(self.queues, key=str):
            if not isinstance(name, str) or not QUEUE_NAME.fullmatch(name) or name == MANUAL_QUEUE:
                yield Error(
                    f"{entry}['QUEUES'] has {shown(name)}, which {_UNUSABLE_QUEUE}.",
                    hint="Use 1 to 100 letters, digits, dots, dashes and underscores, beginning with a letter or "
                    "a digit.",
                    id="durable_jobs.E022",
                )


_UNUSABLE_QUEUE = "is not a name of a queue that workers serve"


def _is_for_tasks(kind: object) -> bool:
    from durable_jobs.tasks.kind import TaskKind

    return isinstance(kind, TaskKind)


def _require_findable(task: Task) -> None:
    """The row keeps a dotted path: what is not found under it here is not found by a worker either."""
    path = task.module_path
    try:
        found = import_string(path)
    except ImportError:
        found = None
    if not isinstance(found, Task) or found.func is not task.func or path.startswith("__main__."):
        raise InvalidTask(
            f"A worker could not find {path}: {shown(found)} is there. Decorate the function where it is defined, "
            "at the top of a module that workers can import, and keep its name."
        )
