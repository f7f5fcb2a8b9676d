"""`manage.py demo`: kill a worker in the middle of an import, and show that nothing is lost or done twice."""

from __future__ import annotations

import fcntl
import logging
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any, Final

from django.conf import settings
from django.core.management import call_command
from django.core.management.base import BaseCommand, CommandError, CommandParser
from django.db import connection, transaction
from django.db.models.functions import Now
from rich.console import Console
from rich.markup import escape
from rich.progress import (
    BarColumn,
    Progress,
    TaskProgressColumn,
    TextColumn,
    TimeElapsedColumn,
)

from durable_jobs import service
from durable_jobs.exceptions import LockKeyHeld
from durable_jobs.models import LIVE, Job, WorkerProcess
from durable_jobs.reconciler import Reconciler
from project.demo import airports
from project.demo.children import Children, ended_by_signals
from project.demo.jobs import AirportsImport, start_import
from project.demo.models import Airport, ImportBatch, ImportedRow, ImportRun
from project.demo.proof import Finding, examine

FOLDER: Final = Path(settings.DEMO_FOLDER)
PREPARED: Final = "DEMO_PREPARED"
ENVIRONMENT: Final = {
    "DATABASE_URL": f"sqlite:///{FOLDER / 'demo.sqlite3'}",
    "DURABLE_JOBS_GRACE": "1",
    "DURABLE_JOBS_TICK": "0.5",
    "DEMO_LEASE_SECONDS": "2",
    "DEMO_BATCH_SIZE": "100",
    "DEMO_PAUSE": "0.03",
}
"""Short times, so that a person need not wait for what takes a minute in production."""

KILLED_AT: Final = 0.4
"""The part of the rows after which the first worker is killed."""
PATIENCE: Final = 30.0
"""Seconds in which a process must begin, or something must go on."""
LOOK: Final = 0.05


class Command(BaseCommand):
    """Ends 0 only if the tables prove what it prints."""

    help = (
        "Import the world's airports, kill the worker (SIGKILL) in the middle, start another, and prove from the "
        "tables that every row was applied exactly once. Uses a fresh SQLite database in .demo/, or the "
        "database in DATABASE_URL, where it removes its own earlier rows."
    )
    requires_system_checks = []

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument("--airports", type=int, metavar="N", help="import only the first N airports")

    def handle(self, *args: Any, **options: Any) -> None:
        limit: int | None = options["airports"]
        least = 20 * settings.DEMO_BATCH_SIZE
        if limit is not None and limit < least:
            raise CommandError(
                f"--airports {limit}: give {least} or more, so that there is a middle to kill in."
            )
        if PREPARED not in os.environ:
            self._begin_again_with_short_times()
        # What the workers log goes to files; here it would stand between the lines of the account.
        logging.getLogger("durable_jobs").setLevel(logging.WARNING)
        console = Console(highlight=False, soft_wrap=True)
        with ended_by_signals(), alone(), Children() as children:
            try:
                holds = Demo(console, children, limit).run()
            except KeyboardInterrupt:
                console.print("\nInterrupted; the workers are ended.")
                sys.exit(130)
        if not holds:
            sys.exit(1)

    def _begin_again_with_short_times(self) -> None:
        """Settings have been read already: a fresh start of this process reads them anew."""
        environment = {**ENVIRONMENT, **os.environ, PREPARED: "1"}
        manage = str(Path(settings.BASE_DIR) / "manage.py")
        os.execve(sys.executable, [sys.executable, manage, *sys.argv[1:]], environment)


@contextmanager
def alone() -> Iterator[None]:
    """Keep a second demo from clearing the files of this one."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    with (FOLDER / "lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise CommandError(f"Another demo is running: it holds {FOLDER / 'lock'}.") from None
        yield


class Demo:
    """The play, act by act."""

    def __init__(self, console: Console, children: Children, limit: int | None) -> None:
        self.console, self.children, self.limit = console, children, limit
        self.total = len(airports.world()[:limit])
        self.bar = Progress(
            TextColumn("  {task.description}"),
            BarColumn(),
            TaskProgressColumn(),
            TextColumn("{task.completed:,.0f} of {task.total:,.0f} rows"),
            TimeElapsedColumn(),
            console=console,
            disable=not console.is_terminal,
        )
        self.task = self.bar.add_task("starting", total=self.total)
        self.told = 0
        grace, tick = settings.DURABLE_JOBS["GRACE"], settings.DURABLE_JOBS["TICK"]
        self.patience = PATIENCE + AirportsImport.lease_seconds + 2 * (grace + tick)

    def run(self) -> bool:
        begun = time.monotonic()
        self._prepare()
        with self.bar:
            run, job = self._start()
            first = self._worker(1)
            self._watch(first, job, lambda: self._rows(run) >= KILLED_AT * self.total)
            killed_at, epoch = self._kill(first, job, run)
            second = self._worker(2)
            self._show("its lease runs out")
            self._watch(second, job, lambda: run.batches.filter(lease_epoch__gt=epoch).exists())
            resumed = time.monotonic() - killed_at
            self._say(
                f"Worker 2 goes on at row {self._rows_before(run, epoch):,}, {resumed:.1f} s after the kill."
            )
            self._show("worker 2 imports")
            self._watch(second, job, lambda: self._job(job).status not in LIVE)
            self._progress(self._rows(run))
        code = self._end(second)
        return self._account(run, job, resumed, code, time.monotonic() - begun)

    # --- the acts

    def _prepare(self) -> None:
        name = connection.settings_dict["NAME"]
        if connection.vendor == "sqlite":
            where = f"SQLite, {os.path.relpath(name)}"
            if Path(name) == FOLDER / "demo.sqlite3":
                for path in FOLDER.glob("demo.sqlite3*"):
                    path.unlink()
        else:
            where = f"{connection.display_name}, {name} on {connection.settings_dict['HOST'] or 'this host'}"
        grace, tick = settings.DURABLE_JOBS["GRACE"], settings.DURABLE_JOBS["TICK"]
        self._heading("An import that survives kill -9")
        self._say(f"Database: {where}")
        self._say(
            f"Data: {self.total:,} airports in batches of {AirportsImport.batch_size}, "
            f"{settings.DEMO_PAUSE:g} s apart as from a slow source"
        )
        self._say(
            f"Short times for the show: lease {AirportsImport.lease_seconds:g} s, grace {grace:g} s, "
            f"repair looks every {tick:g} s"
        )
        call_command("migrate", verbosity=0, interactive=False)
        refuse_other_workers()
        clear_earlier_demos()
        self._heading("What happens")

    def _start(self) -> tuple[ImportRun, Job]:
        try:
            with transaction.atomic():
                run = ImportRun.objects.create(source=ImportRun.Source.AIRPORTS, by_demo=True)
                job = start_import(run, limit=self.limit)
        except LockKeyHeld as refusal:
            raise CommandError(
                f"Another import is not finished in this database (job {refusal.held_by}). Let it end, or cancel it."
            ) from refusal
        self._say(f"Started together: import {run.pk} and job {job.pk}.")
        return run, job

    def _worker(self, number: int) -> subprocess.Popen[bytes]:
        log = FOLDER / f"worker-{number}.log"
        worker = self.children.start("runworker", "--queues", AirportsImport.queue, log=log)
        self._say(f"Worker {number} starts (manage.py runworker, process {worker.pid}).")
        self._show(f"worker {number} imports")
        return worker

    def _kill(self, worker: subprocess.Popen[bytes], job: Job, run: ImportRun) -> tuple[float, int]:
        owner = self._job(job).lease_owner or ""
        if f":{worker.pid}:" not in owner:
            raise CommandError(f"The job is held by {owner!r}, not by worker 1 (process {worker.pid}).")
        os.kill(worker.pid, signal.SIGKILL)
        killed_at = time.monotonic()
        worker.wait()
        dead = self._job(job)
        self._progress(self._rows(run))
        self._say(f"kill -9 {worker.pid}: worker 1 is gone, {self._rows(run):,} rows are committed.")
        self._say(f"The job still says {dead.status!r}, under a lease that nobody renews any more.")
        return killed_at, dead.lease_epoch

    def _end(self, worker: subprocess.Popen[bytes]) -> int:
        worker.terminate()
        try:
            return worker.wait(PATIENCE)
        except subprocess.TimeoutExpired:
            worker.kill()
            return worker.wait()

    def _account(self, run: ImportRun, job: Job, resumed: float, code: int, took: float) -> bool:
        findings = examine(run, self._job(job), limit=self.limit)
        findings.append(Finding("worker 2, asked to end", f"exit code {code}", code == 0))
        left = self.children.running
        findings.append(Finding("workers left", f"{len(left)}", not left))
        self._heading("What the tables say")
        width = max(len(finding.what) for finding in findings)
        for finding in findings:
            mark = "[green]ok[/]" if finding.holds else "[bold red]NO[/]"
            self.console.print(f"  {mark}  {finding.what:<{width}}  {escape(finding.found)}")
        self.console.print(f"      {'from the kill to the next batch':<{width}}  {resumed:.1f} s")
        holds = all(finding.holds for finding in findings)
        verdict = (
            "[green]Nothing was lost and nothing was done twice[/]"
            if holds
            else "[bold red]This is not right[/]"
        )
        self.console.print(f"\n{verdict} ({took:.0f} s in all).")
        if os.environ["DATABASE_URL"] == ENVIRONMENT["DATABASE_URL"]:
            file = os.path.relpath(FOLDER / "demo.sqlite3", settings.BASE_DIR)
            self.console.print(f"Look at it in a browser: make serve DATABASE_URL=sqlite:///{escape(file)}")
        return holds

    # --- looking

    def _watch(self, worker: subprocess.Popen[bytes], job: Job, arrived: Callable[[], bool]) -> None:
        """Show progress until something has arrived; give up when the worker ends or nothing goes on."""
        rows, changed_at = -1, time.monotonic()
        while not arrived():
            now = self._rows_of(job)
            if now != rows:
                rows, changed_at = now, time.monotonic()
                self._progress(rows)
            if worker.poll() is not None:
                raise CommandError(f"The worker ended by itself, with {worker.returncode}.{self._logs()}")
            if time.monotonic() - changed_at > self.patience:
                state = self._job(job)
                raise CommandError(
                    f"Nothing has gone on for {self.patience:g} s; the job is {state.status}, "
                    f"{state.error_message or 'without an error'}.{self._logs()}"
                )
            time.sleep(LOOK)

    def _job(self, job: Job) -> Job:
        now = service.get(job.pk)
        if now is None:
            raise CommandError(f"The job {job.pk} is gone.")
        return now

    def _rows_of(self, job: Job) -> int:
        return self._job(job).processed_count

    def _rows(self, run: ImportRun) -> int:
        run.refresh_from_db()
        return run.rows_done

    def _rows_before(self, run: ImportRun, epoch: int) -> int:
        return sum(run.batches.filter(lease_epoch__lte=epoch).values_list("rows", flat=True))

    def _logs(self) -> str:
        logs = [
            path.read_text(errors="replace").splitlines()[-15:]
            for path in sorted(FOLDER.glob("worker-*.log"))
        ]
        return "".join("\nIts log ends so:\n  " + "\n  ".join(lines) for lines in logs[-1:])

    # --- showing

    def _heading(self, text: str) -> None:
        self.console.print(f"\n[bold]{text}[/]")

    def _say(self, text: str) -> None:
        self.console.print(f"  {escape(text)}")

    def _show(self, text: str) -> None:
        self.bar.update(self.task, description=text)

    def _progress(self, rows: int) -> None:
        self.bar.update(self.task, completed=rows)
        tenths = rows * 10 // self.total
        if not self.console.is_terminal and tenths > self.told:
            self.told = tenths
            self._say(f"{rows:,} of {self.total:,} rows")


def refuse_other_workers() -> None:
    """Another worker on this database would take the job, and the wrong process would be killed."""
    for other in WorkerProcess.objects.filter(beat_at__gt=Now() - timedelta(seconds=30)):
        if other.host == socket.gethostname() and not _is_alive(other.pid):
            continue
        raise CommandError(
            f"A worker serves this database already (process {other.pid} on {other.host}). Stop it first."
        )


def clear_earlier_demos() -> None:
    """Remove the rows of earlier demos; a job that one left behind is cancelled and keeps its history."""
    runs = ImportRun.objects.filter(by_demo=True)
    subjects = [str(pk) for pk in runs.values_list("pk", flat=True)]
    jobs = Job.objects.filter(
        subject_type=ImportRun._meta.label_lower, subject_id__in=subjects, status__in=LIVE
    )
    for job in jobs:
        service.cancel(job.pk, actor="demo", reason="left by an earlier demo", scope=service.ALL_SCOPES)
    # What a killed worker held is ended by repair: when its lease has run out, at the second look.
    reconciler = Reconciler("demo")
    deadline = time.monotonic() + PATIENCE
    while jobs.all().exists():
        if time.monotonic() > deadline:
            raise CommandError("A job of an earlier demo does not end. Cancel it in the admin.")
        reconciler.tick()
        time.sleep(0.2)
    ImportedRow.objects.filter(batch__run__in=runs).delete()
    ImportBatch.objects.filter(run__in=runs).delete()
    Airport.objects.filter(last_run__in=runs).delete()
    runs.delete()


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True
