"""What Django promises of every task backend, held by ours (C122, C123, C124)."""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import Any

import pytest
from asgiref.sync import async_to_sync, sync_to_async
from django.db import connection, transaction
from django.test import override_settings
from django.utils import timezone

from durable_jobs import service, store
from durable_jobs.exceptions import TaskNotLoaded
from durable_jobs.models import Job
from durable_jobs.tasks import DurableJobsBackend
from durable_jobs.testing import finish, make_job, run_slice
from tests.tasks import functions
from tests.tasks.conftest import job_of, run
from tests.tasks.django_api import (
    InvalidTask,
    TaskResultDoesNotExist,
    TaskResultMismatch,
    TaskResultStatus,
    default_task_backend,
    task,
    task_backends,
)
from tests.tasks.early import early

pytestmark = pytest.mark.django_db(transaction=True)

READY, FAILED, SUCCESSFUL = TaskResultStatus.READY, TaskResultStatus.FAILED, TaskResultStatus.SUCCESSFUL


def test_a_task_is_enqueued_run_and_read() -> None:
    result = functions.add.enqueue(2, b=3)

    assert (result.status, result.is_finished, result.attempts) == (READY, False, 0)
    assert (result.args, result.kwargs, result.backend, result.errors) == ([2], {"b": 3}, "default", [])
    assert (result.started_at, result.finished_at, result.last_attempted_at) == (None, None, None)
    assert result.enqueued_at is not None and timezone.is_aware(result.enqueued_at)
    with pytest.raises(ValueError, match="not finished"):
        _ = result.return_value

    run(result)

    assert (result.status, result.is_finished, result.return_value) == (SUCCESSFUL, True, 5)
    assert result.enqueued_at <= result.started_at <= result.finished_at
    # PostgreSQL's clock is read for each column.
    assert abs(result.last_attempted_at - result.started_at) < timedelta(milliseconds=50)
    assert (result.attempts, len(result.worker_ids), result.errors) == (1, 1, [])


def test_a_result_is_found_again_by_its_id() -> None:
    result = functions.add.enqueue(1)
    run(result)

    for found in (functions.add.get_result(result.id), default_task_backend.get_result(result.id)):
        assert found == result
        assert found.return_value == 2


def test_flags_tell_the_truth() -> None:
    backend = task_backends["default"]
    assert isinstance(backend, DurableJobsBackend)
    flags = ("supports_defer", "supports_async_task", "supports_get_result", "supports_priority")
    assert {flag: getattr(backend, flag) for flag in flags} == dict.fromkeys(flags, True)


@pytest.mark.parametrize("unknown", ["", "nothing", "01900000-0000-7000-8000-000000000000", "\x00"])
def test_an_unknown_id(unknown: str) -> None:
    with pytest.raises(TaskResultDoesNotExist):
        default_task_backend.get_result(unknown)


def test_a_result_of_another_task_of_another_backend_and_of_no_task() -> None:
    result = functions.add.enqueue(1)
    with pytest.raises(TaskResultMismatch):
        functions.echo.get_result(result.id)
    with pytest.raises(TaskResultDoesNotExist):
        task_backends["patient"].get_result(result.id)
    with pytest.raises(TaskResultDoesNotExist):
        default_task_backend.get_result(str(make_job().id))


def test_two_backends_of_one_kind_keep_their_results_apart() -> None:
    twin = {"BACKEND": "durable_jobs.tasks.DurableJobsBackend"}
    with override_settings(TASKS={"default": twin, "twin": twin}):
        result = functions.add.using(backend="twin").enqueue(1)
        assert run(result).return_value == 2
        assert task_backends["twin"].get_result(result.id).task.backend == "twin"
        with pytest.raises(TaskResultDoesNotExist):
            task_backends["default"].get_result(result.id)


def test_async() -> None:
    async def all_of_it() -> Any:
        result = await functions.add_async.aenqueue(4, b=4)
        assert result.status == READY
        await sync_to_async(lambda: finish(job_of(result)))()
        await result.arefresh()
        assert (await functions.add_async.aget_result(result.id)).return_value == 8
        with pytest.raises(TaskResultDoesNotExist):
            await default_task_backend.aget_result("nothing")
        return result

    result = async_to_sync(all_of_it)()
    assert (result.status, result.return_value) == (SUCCESSFUL, 8)


def test_a_coroutine_that_fails() -> None:
    result = run(functions.fail_async.enqueue("no"))
    assert result.status == FAILED
    assert result.errors[0].exception_class is functions.Trouble


def test_the_context() -> None:
    result = run(functions.with_context.enqueue("hello"))
    assert result.return_value == {
        "word": "hello",
        "attempt": 1,
        "id": result.id,
        "status": "RUNNING",
        "workers": result.worker_ids,
    }


def test_an_error_is_told_with_its_traceback_and_fails_at_once() -> None:
    result = run(functions.fail.enqueue("what happened"))

    assert (result.status, result.is_finished, result.attempts) == (FAILED, True, 1)
    with pytest.raises(ValueError, match="failed"):
        _ = result.return_value
    [error] = result.errors
    assert error.exception_class is functions.Trouble
    assert "Trouble: what happened" in error.traceback and "functions.py" in error.traceback


def test_an_error_of_pythons_own_is_found_by_its_path() -> None:
    [error] = run(functions.add.enqueue("text")).errors
    assert error.exception_class is TypeError


def test_a_task_that_ends_the_process_fails_alone() -> None:
    result = run(functions.exit_process.enqueue())
    assert result.status == FAILED
    assert result.errors[0].exception_class is SystemExit


@pytest.mark.parametrize("what", ["object", "set"])
def test_a_return_value_that_is_no_json_fails_with_an_entry(what: str) -> None:
    result = run(functions.give.enqueue(what))
    assert (result.status, result.attempts) == (FAILED, 1)
    assert result.errors[0].exception_class is TypeError


def test_a_return_value_that_the_store_refuses_fails_with_an_entry() -> None:
    result = run(functions.give.enqueue("nan"))
    assert (result.status, result.attempts) == (FAILED, 1)
    assert job_of(result).error_code == "bad_result" and len(result.errors) == 1


@pytest.mark.parametrize(("what", "stored"), [("bytes", "text"), ("tuple", [1, 2])])
def test_a_return_value_is_made_json_as_django_does(what: str, stored: Any) -> None:
    assert run(functions.give.enqueue(what)).return_value == stored


def test_arguments_are_made_json_as_django_does() -> None:
    result = functions.echo.enqueue((1, b"x"), word={"a": (True, None, 1.5)})
    assert (result.args, result.kwargs) == ([[1, "x"]], {"word": {"a": [True, None, 1.5]}})
    assert run(result).return_value == [[[1, "x"]], {"word": {"a": [True, None, 1.5]}}]


@pytest.mark.parametrize(
    "argument",
    [object(), {1}, b"\xff", float("nan"), "\x00", {1: 2}, timezone.now()],
    ids=["object", "set", "bytes", "nan", "NUL", "number as key", "datetime"],
)
def test_arguments_that_are_no_json_are_refused_and_nothing_is_stored(argument: Any) -> None:
    with pytest.raises((TypeError, ValueError)):
        functions.echo.enqueue(argument)
    assert not Job.objects.exists()


@pytest.mark.parametrize("priority", [-100, 0, 100])
def test_priorities_are_those_of_jobs(priority: int) -> None:
    result = functions.add.using(priority=priority).enqueue(1)
    assert job_of(result).priority == priority
    assert functions.add.get_result(result.id).task.priority == priority


@pytest.mark.parametrize("priority", [-101, 101, 1.5])
def test_a_priority_out_of_range(priority: Any) -> None:
    with pytest.raises(InvalidTask):
        functions.add.using(priority=priority)


def test_run_after() -> None:
    later, before = timezone.now() + timedelta(hours=1), timezone.now() - timedelta(hours=1)
    future = functions.add.using(run_after=later).enqueue(1)
    past = functions.add.using(run_after=before).enqueue(1)

    assert job_of(future).next_run_at == later
    assert functions.add.get_result(future.id).task.run_after == later
    due = job_of(past).next_run_at
    assert due is not None and due <= timezone.now()
    with pytest.raises(InvalidTask):
        functions.add.using(run_after=datetime(2030, 1, 1))


def test_a_queue_and_its_default() -> None:
    assert job_of(functions.add.enqueue(1)).queue_name == "default"
    job = job_of(functions.mail.enqueue())
    assert (job.queue_name, job.priority) == ("mails", 7)
    assert functions.mail.get_result(str(job.id)).task == functions.mail


def test_an_unknown_queue() -> None:
    with pytest.raises(InvalidTask, match="elsewhere"):
        functions.add.using(queue_name="elsewhere")


@pytest.mark.parametrize("queue", ["manual", "a:b", "", "x" * 101])
def test_a_queue_that_no_worker_serves(queue: str) -> None:
    with pytest.raises(InvalidTask, match=r"[Qq]ueue"):
        functions.third_time.using(queue_name=queue)
    functions.third_time.using(queue_name="any-other")  # this backend has QUEUES = []


def test_what_a_worker_could_not_find_again_is_refused() -> None:
    for unfindable in (functions.renamed, functions.nested):
        with pytest.raises(InvalidTask, match="could not find"):
            unfindable.enqueue()

    def local() -> None:
        pass

    with pytest.raises(InvalidTask):
        task(local)
    with pytest.raises(InvalidTask):
        task(lambda: None)
    with pytest.raises(InvalidTask):
        task(takes_context=True)(functions.plain)
    assert not Job.objects.exists()


def test_a_task_of_an_app_loaded_early() -> None:
    assert run(early.enqueue()).return_value == "early"


# --- transactions ---


def test_a_rollback_leaves_nothing_and_tells_nobody(heard: list[Any]) -> None:
    """C124: the id is there at once, and nothing runs after a rollback."""
    with pytest.raises(functions.Trouble), transaction.atomic():
        result = functions.add.enqueue(1)
        assert functions.add.get_result(result.id).status == READY
        raise functions.Trouble
    with pytest.raises(TaskResultDoesNotExist):
        result.refresh()
    assert not heard


def test_a_commit_keeps_it(heard: list[Any], second_connection: Any) -> None:
    with transaction.atomic():
        result = functions.add.enqueue(1)
        assert not heard
        assert second_connection.run(Job.objects.count) == 0
    assert second_connection.run(Job.objects.count) == 1
    assert [(name, sender, told.id) for name, sender, told in heard] == [
        ("enqueued", DurableJobsBackend, result.id)
    ]


def test_a_task_that_leaves_a_transaction_open_fails_alone() -> None:
    result = run(functions.leave_open.enqueue())
    assert result.status == FAILED
    assert connection.get_autocommit()


# --- attempts ---


def test_attempts_and_workers_are_those_of_the_history() -> None:
    result = run(functions.third_time.enqueue())
    assert (result.status, result.return_value, result.attempts) == (SUCCESSFUL, 3, 3)
    assert [error.exception_class for error in result.errors] == [functions.Trouble] * 2
    assert "attempt 2" in result.errors[1].traceback
    assert len(result.worker_ids) == 3 and all(result.worker_ids)


def test_a_result_between_two_attempts_is_ready_again() -> None:
    result = functions.third_time.enqueue()
    run_slice(job_of(result))
    result.refresh()
    assert (result.status, result.attempts, len(result.errors)) == (READY, 1, 1)
    assert not result.is_finished


def test_an_error_marked_transient_is_tried_again() -> None:
    result = run(functions.fail_for_now.enqueue())
    assert (result.status, result.attempts, len(result.errors)) == (FAILED, 8, 8)


def test_a_redrive_runs_it_again() -> None:
    result = run(functions.fail.enqueue("first"))
    service.redrive(result.id, actor="tests", reason="again")
    result.refresh()
    assert result.status == READY
    run(result)
    assert (result.status, result.attempts, len(result.errors)) == (FAILED, 2, 2)


def test_a_cancelled_task_failed_and_says_so() -> None:
    result = functions.add.enqueue(1)
    service.cancel(result.id, actor="anna")
    result.refresh()
    assert (result.status, result.attempts) == (FAILED, 0)
    assert result.errors[0].exception_class.__name__ == "TaskCancelled"


def test_signals_come_in_order_with_the_backend_as_sender(heard: list[Any]) -> None:
    good, bad = run(functions.add.enqueue(1)), run(functions.fail.enqueue("x"))
    assert [(name, told.id, told.status) for name, _, told in heard] == [
        ("enqueued", good.id, READY),
        ("started", good.id, TaskResultStatus.RUNNING),
        ("finished", good.id, SUCCESSFUL),
        ("enqueued", bad.id, READY),
        ("started", bad.id, TaskResultStatus.RUNNING),
        ("finished", bad.id, FAILED),
    ]
    assert {sender for _, sender, _ in heard} == {DurableJobsBackend}


# --- what is stored and cannot be loaded ---


@pytest.mark.parametrize(
    ("path", "problem"),
    [
        ("tests.tasks.functions.gone", "gone"),
        ("tests.gone.task", "tests.gone"),
        ("tests.tasks.functions.plain", "no task"),
        ("os.getcwd", "no task"),
    ],
)
def test_a_stored_task_that_cannot_be_loaded_fails_alone(path: str, problem: str) -> None:
    job = store_task(path)
    neighbour = functions.add.enqueue(1)

    ended = finish(job)

    assert (ended.status, ended.error_code, ended.attempts) == ("failed", "task_not_loaded", 8)
    assert path in str(ended.error_message) and problem in str(ended.error_message)
    assert run(neighbour).return_value == 2
    with pytest.raises(TaskNotLoaded, match=path):
        default_task_backend.get_result(str(job.id))


def test_a_stored_task_of_a_queue_that_is_gone() -> None:
    result = functions.mail.enqueue()
    with override_settings(TASKS={"default": {"BACKEND": "durable_jobs.tasks.DurableJobsBackend"}}):
        ended = finish(job_of(result))
    assert ended.error_code == "task_not_loaded" and "mails" in str(ended.error_message)


def test_it_runs_when_the_code_has_it_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """A deploy: the old worker does not have the task yet, the new one does."""
    result = functions.add.enqueue(1)
    with monkeypatch.context() as patch:
        patch.delattr(functions, "add")
        run_slice(job_of(result))
    waiting = store.get(job_of(result).id)
    assert waiting is not None and waiting.next_run_at is not None
    run(result)
    assert (result.status, result.return_value, result.attempts) == (SUCCESSFUL, 2, 2)


def store_task(path: str) -> Job:
    input = {"task": path, "args": [], "kwargs": {}, "backend": "default", "run_after": None}
    return service.start("durable_jobs.task", input).job
