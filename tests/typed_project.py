"""A project's code as `mypy --strict` sees it: what an author writes type-checks, and a mistake is told.

Checked by `make lint`, never run. An ignored error stands for a mistake that must be one: where mypy does not see
it any more, the comment itself is the error.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable
from datetime import datetime, timedelta
from typing import Any, assert_type

from durable_jobs import receipts, service, signals, testing
from durable_jobs.exceptions import DurableJobsError, LockKeyHeld, Refusal, UnrecoverableError
from durable_jobs.explain import Phase, Reason, explain, phase
from durable_jobs.kinds import (
    ROW_GONE,
    BatchKind,
    Cancelled,
    Done,
    HookAnswer,
    Kind,
    Retry,
    RetryAfter,
    StatusMirror,
    Yield,
    register,
)
from durable_jobs.manager import ExecutorContext, JobManager
from durable_jobs.models import Job
from durable_jobs.runner import SliceContext
from durable_jobs.service import ALL_SCOPES, Scope, Started
from project.demo.models import ImportRun


@register
class Import(Kind):
    name = "typed.import"
    queue = "imports"
    orphan_policy = "redrive"
    retry = Retry(failures=3, first_delay=1)

    def step(self, ctx: SliceContext) -> Done | Yield | Cancelled:
        run = ImportRun.objects.get(pk=ctx.input["run"])
        position: int = ctx.checkpoint or 0
        while position < 100:
            if ctx.stop.is_set():
                return Cancelled()
            if ctx.should_yield():
                return Yield(after=0.5)
            with ctx.fenced():
                ImportRun.objects.filter(pk=run.pk).update(rows_done=position)
                position += 1
                ctx.save_checkpoint(position, advance=1, total=100)
            ctx.progress(message=f"{position} of 100", total=None)
        if not ctx.still_mine():
            raise RetryAfter(60)
        key: str = ctx.effect_key("mail", run.pk)
        return Done({"mailed": key})

    def on_transition(self, job: Job) -> HookAnswer:
        if job.subject is None:
            return ROW_GONE
        return ImportRun.objects.filter(pk=job.subject_id).update(status=job.status)

    def on_redrive(self, job: Job) -> int:
        return ImportRun.objects.filter(pk=job.subject_id).update(status="queued")

    def after_transition(self, job: Job) -> None:
        if job.finished_at is not None and job.started_at is not None:
            assert_type(job.finished_at - job.started_at, timedelta)


class Mirrored(Import):
    name = "typed.mirrored"
    mirror = StatusMirror(
        "demo.ImportRun",
        open=("queued", "running"),
        redriven="queued",
        completed="done",
        failed="failed",
        cancelled="cancelled",
    )


class Asynchronous(Kind):
    name = "typed.asynchronous"

    async def step(self, ctx: SliceContext) -> Done:
        return Done(await ctx.run_fenced(len, "four"))


@register
class Prices(BatchKind):
    name = "typed.prices"
    batch_size = 100
    passes = "until_empty"

    def collection(self, ctx: SliceContext) -> Iterable[ImportRun]:
        return ImportRun.objects.filter(status="queued")

    def process(self, ctx: SliceContext, batch: list[ImportRun]) -> None:
        for run in batch:
            run.status = "done"
        ImportRun.objects.bulk_update(batch, ["status"])

    def on_item_error(self, ctx: SliceContext, item: ImportRun, error: Exception) -> bool:
        return not isinstance(error, UnrecoverableError)


def begin(run: ImportRun) -> Job:
    try:
        started = service.start(
            Import,
            {"run": run.pk},
            subject=run,
            lock_key="imports",
            idempotency_key=f"import-{run.pk}",
            scope=Scope("acme"),
            run_after=timedelta(minutes=5),
            meta={"source": "view"},
        )
    except LockKeyHeld as refusal:
        raise SystemExit(f"{refusal.code}: {refusal.held_by}") from refusal
    except Refusal as refusal:
        raise SystemExit(refusal.code) from refusal
    assert_type(started, Started)
    job, created = started
    assert_type(created, bool)
    return job


def mistakes(job: Job) -> None:
    service.start(Import(), {})  # type: ignore[arg-type]
    service.start(Import, {}, priority="high")  # type: ignore[arg-type]
    service.start(Import, {}, if_locked="wait")  # type: ignore[arg-type]
    service.start(Import, {}, scope="acme")  # type: ignore[arg-type]
    service.redrive(job)  # type: ignore[arg-type]
    job.finished_at.isoformat()  # type: ignore[union-attr]
    Retry(failures="many")  # type: ignore[arg-type]


class WrongHook(Import):
    def on_redrive(self, job: Job) -> str:  # type: ignore[override]
        return "queued"


def operate(job: Job, anna: Any) -> list[Reason]:
    assert_type(service.get(job.id), Job | None)
    assert_type(service.get(str(job.id), scope=ALL_SCOPES), Job | None)
    service.cancel(job.id, actor=anna, reason="wrong file")
    service.redrive(job.id, actor="night shift", restart=True, delay=30)
    for answer in service.start_many([{"kind": Import, "input": {"run": 1}}]):
        assert_type(answer, Started | DurableJobsError)
    now: datetime = job.updated_at
    assert_type(phase(job, now), Phase)
    assert_type(
        (job.kind, job.queue_name, job.lease_owner, job.percent), tuple[str, str, str | None, float | None]
    )
    return explain(job)


def by_receipt() -> str:
    ctx = receipts.ExecutionContext(
        Scope("acme"), "billing", "typed.invoice", "invoice-7", time.monotonic() + 30, stop=threading.Event()
    )
    begun = receipts.begin(ctx, '{"invoice": 7}')
    if begun.ctx is None:
        return begun.job.result_text or ""

    def mutation(ctx: receipts.ExecutionContext) -> str:
        ctx.consume(items=1)
        return '{"invoice": 7}'

    outcome = receipts.finalize_atomically(begun.ctx, receipts.AttemptOutcome("failed", "no stock"), mutation)
    if isinstance(outcome, receipts.Finalized):
        return outcome.receipt
    assert_type(outcome, receipts.PendingFinalization)
    return receipts.complete_atomically(begun.ctx, mutation)


def in_this_process() -> None:
    manager = JobManager(Scope("acme"), "nightly", max_jobs=2)

    def work(ctx: ExecutorContext) -> dict[str, int]:
        return {"done": 1}

    manager.start_job("typed.report", work)


def told(sender: str, job: Job, **named: Any) -> None:
    print(sender, job.pk)


signals.job_failed.connect(told, sender=Import)


def test_an_import() -> None:
    with testing.register_for_test(Import), testing.interrupt_after(3):
        job = testing.run(Import, {"run": 1})
    assert_type(job, Job)
