"""The kind whose step calls a task's function, and a job read as a task's result."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime
from typing import Final

from django.utils.module_loading import import_string

from durable_jobs import kinds
from durable_jobs.exceptions import MARKER, ErrorClass, TaskCancelled, TaskNotLoaded, WorkerLost
from durable_jobs.kinds import DAY, Done, Kind, Retry
from durable_jobs.models import Job, JobEvent, Status
from durable_jobs.runner import SliceContext
from durable_jobs.tasks.api import (
    Task,
    TaskContext,
    TaskError,
    TaskResult,
    TaskResultStatus,
    normalize_json,
    task_finished,
    task_started,
)

NAME: Final = "durable_jobs.task"

_STATUSES: Final = {
    Status.HELD: TaskResultStatus.READY,
    Status.PENDING: TaskResultStatus.READY,
    Status.COMPLETED: TaskResultStatus.SUCCESSFUL,
    Status.FAILED: TaskResultStatus.FAILED,
    Status.CANCELLED: TaskResultStatus.FAILED,
}
_ENDS_OF_ATTEMPTS: Final = ("slice_failed", "cut_off", "orphaned", "parked")
UNKNOWN_WORKER: Final = "unknown"


class TaskKind(Kind):
    """Calls a `@task` function once; whatever it raises fails the job, as Django's own backends do.

    Derive from it, with a name of its own, for tasks that are to be tried or repaired otherwise, register the
    class, and name it in `TASKS[…]["OPTIONS"]["KIND"]`.
    """

    # A function that begins again from its start may do everything twice: after a worker's death a person
    # decides, unless the project knows better.
    orphan_policy = "park"
    max_slice_seconds = DAY
    """A function cannot commit on the way, so an hour without a commit says nothing about it."""
    retry = Retry(failures=8, first_delay=5, longest_delay=300)
    """For errors that say so themselves, and for a task that only newer code has: ten minutes of a deploy."""
    description = "A function called through Django's tasks."

    def step(self, ctx: SliceContext) -> Done:
        """Call the function with the stored arguments."""
        task = load(ctx.job)
        result = result_of(ctx.job, task)
        task_started.send_robust(type(task.get_backend()), task_result=result)
        context: list[TaskContext] = [TaskContext(task_result=result)] if task.takes_context else []
        value = task.call(*context, *result.args, **result.kwargs)
        return Done({"return_value": normalize_json(value), "worker_id": ctx.lease.owner})

    def classify(self, error: BaseException) -> ErrorClass | None:
        """Terminal, unless the error carries a class of its own."""
        return ErrorClass.TERMINAL if getattr(error, MARKER, None) is None else None

    def after_transition(self, job: Job) -> None:
        """Send Django's signal `task_finished`."""
        try:
            result = result_of(job)
        except TaskNotLoaded:
            return
        task_finished.send_robust(type(result.task.get_backend()), task_result=result)


class DefaultTaskKind(TaskKind):
    """The kind of tasks whose backend names none."""

    name = NAME


def register() -> TaskKind:
    """Make the default kind known to this process; usable again and again."""
    kind = kinds.find(NAME)
    if not isinstance(kind, TaskKind):
        kinds.register(DefaultTaskKind)
        kind = kinds.get(DefaultTaskKind)
        assert isinstance(kind, TaskKind)
    return kind


def load(job: Job) -> Task:
    """The task of a job as it was enqueued; raises `TaskNotLoaded`."""
    stored = job.input
    try:
        found = import_string(stored["task"])
        if not isinstance(found, Task):
            raise TypeError(f"it is a {type(found).__name__} and no task")
        run_after = stored["run_after"]
        return found.using(
            priority=job.priority,
            queue_name=job.queue_name,
            run_after=datetime.fromisoformat(run_after) if run_after else None,
            backend=stored["backend"],
        )
    except Exception as error:
        # Importing a module may raise anything, and a backend or a queue may be gone from the settings.
        raise TaskNotLoaded(stored["task"], f"{type(error).__name__}: {error}") from error


def result_of(job: Job, task: Task | None = None) -> TaskResult:
    """The job as Django's tasks see it; raises `TaskNotLoaded`."""
    stored = job.input
    events = _ends_of_attempts(job)
    result: TaskResult = TaskResult(
        task=load(job) if task is None else task,
        id=str(job.id),
        status=_status(job),
        enqueued_at=job.created_at,
        started_at=job.started_at,
        finished_at=job.finished_at,
        last_attempted_at=job.claimed_at,
        args=stored["args"],
        kwargs=stored["kwargs"],
        backend=stored["backend"],
        errors=list(_errors(job, events)),
        worker_ids=_workers(job, events),
    )
    if job.status == Status.COMPLETED:
        object.__setattr__(result, "_return_value", job.result["return_value"])
    return result


def _status(job: Job) -> TaskResultStatus:
    if job.status == Status.RUNNING:
        return TaskResultStatus.RUNNING if job.lease_owner else TaskResultStatus.READY
    return _STATUSES[Status(job.status)]


def _ends_of_attempts(job: Job) -> list[JobEvent]:
    """What the history says of attempts that ended without success; a first attempt that stands needs no look."""
    is_first = job.attempts <= 1 and (job.status == Status.COMPLETED or job.lease_owner is not None)
    if job.attempts == 0 or is_first:
        return []
    rows = JobEvent._base_manager.using(job._state.db).filter(job_id=job.id, event__in=_ENDS_OF_ATTEMPTS)
    return list(rows.order_by("id"))


def _workers(job: Job, events: list[JobEvent]) -> list[str]:
    """One entry for each attempt, oldest first. Of an attempt that left no trace only its number is known."""
    workers = [event.owner or UNKNOWN_WORKER for event in events]
    if job.lease_owner is not None:
        workers.append(job.lease_owner)
    elif job.status == Status.COMPLETED:
        workers.append(job.result["worker_id"])
    missing = job.attempts - len(workers)
    return [UNKNOWN_WORKER] * missing + workers[-job.attempts :] if job.attempts else []


def _errors(job: Job, events: list[JobEvent]) -> Iterator[TaskError]:
    for event in events:
        if event.error_type:
            yield _error(event.error_type, event.traceback or event.message)
        else:
            yield _error_of(WorkerLost(event.owner, event.message))
    if job.status == Status.CANCELLED:
        yield _error_of(TaskCancelled(job.id))
    elif job.status == Status.FAILED and not events:
        yield _error(job.error_type or "durable_jobs.exceptions.DurableJobsError", job.error_message or "")


def _error(error_type: str, text: str) -> TaskError:
    path = error_type if "." in error_type else f"builtins.{error_type}"
    return TaskError(exception_class_path=path, traceback=text)


def _error_of(error: Exception) -> TaskError:
    path = f"{type(error).__module__}.{type(error).__qualname__}"
    return TaskError(exception_class_path=path, traceback=f"{path}: {error}")
