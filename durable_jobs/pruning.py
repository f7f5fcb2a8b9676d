"""Deletes the history that a person has asked to delete, and archives it first.

A job that has not ended is never deleted, a failed one only when that was said. Batches are small transactions: a
batch is written to the archive and flushed to the disk before it commits. The archive begins each batch with a
line of its own; when a killed run has left a batch that did not commit, the next run takes it out again. So every
deleted job stands in the archive once.
"""

from __future__ import annotations

import fcntl
import json
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, Final
from uuid import UUID, uuid4

from django.db.models import Model

from durable_jobs import database, store
from durable_jobs.exceptions import Refusal
from durable_jobs.models import TERMINAL, Job, JobEvent, Status

DEFAULT_STATUSES: Final = (Status.COMPLETED.value, Status.CANCELLED.value)
DEFAULT_BATCH: Final = 500
BATCH_CHARACTERS: Final = 8 * 1024 * 1024
"""About how much text one batch holds in memory at the most; one job is always taken whole."""
EVENTS_AT_A_TIME: Final = 100
DEFAULT_REST: Final = 0.05
"""Seconds between two batches, for everybody else."""
MOST_COUNTED: Final = 100_000
LAST_CHUNK: Final = 1024 * 1024
_BEGINNING: Final = b'{"batch": '
_FIRST: Final = (datetime(1970, 1, 1, tzinfo=UTC), UUID(int=0))


class ArchiveUnusable(Refusal):
    """The archive cannot be written, or is not one."""

    code = "archive_unusable"

    def __init__(self, path: Path, problem: str, way_out: str) -> None:
        self.path, self.problem, self.way_out = path, problem, way_out
        super().__init__(f"archive {path} {problem}. {way_out}")


@dataclass(frozen=True)
class Policy:
    """What may go: jobs of these statuses that ended before this moment (aware)."""

    ended_before: datetime
    statuses: tuple[str, ...] = DEFAULT_STATUSES

    def __post_init__(self) -> None:
        wrong = set(self.statuses) - {str(status) for status in TERMINAL}
        if wrong or not self.statuses:
            raise ValueError(f"statuses {sorted(wrong)} cannot be pruned: only jobs that have ended go.")


@dataclass
class Pruned:
    """What has gone so far."""

    jobs: int = 0
    events: int = 0
    batches: int = 0
    by_status: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Preview:
    """What a policy would take and leave, each number at most `MOST_COUNTED`."""

    going: dict[str, int]
    failed_kept: int
    live_kept: int
    oldest: datetime | None


def cutoff(age: timedelta) -> datetime:
    """The moment so long ago, by the database's clock."""
    return store.now() - age


def preview(policy: Policy) -> Preview:
    """Count what the policy would take, and what of the same age it leaves."""
    jobs = Job.objects.using(database.alias())
    old = jobs.filter(finished_at__lt=policy.ended_before).order_by("finished_at")
    going = {status: _counted(old.filter(status=status)) for status in policy.statuses}
    failed = 0 if Status.FAILED in policy.statuses else _counted(old.filter(status=Status.FAILED))
    live = jobs.filter(finished_at__isnull=True, created_at__lt=policy.ended_before)
    first = old.filter(status__in=policy.statuses).only("finished_at").first()
    return Preview(going, failed, _counted(live), first.finished_at if first else None)


def _counted(jobs: Any) -> int:
    return int(jobs.order_by()[:MOST_COUNTED].count())


def prune(
    policy: Policy,
    archive: Path | None,
    *,
    batch: int = DEFAULT_BATCH,
    rest: float = DEFAULT_REST,
    progress: Callable[[Pruned], None] | None = None,
) -> Pruned:
    """Delete what the policy allows, batch by batch; `archive=None` keeps nothing.

    `rest` in seconds between batches. It may be killed at any moment and run again. Raises `ArchiveUnusable`,
    and `TransactionOwned` inside a caller's transaction.
    """
    done, after = Pruned(), _FIRST
    with _opened(archive) as file:
        while True:
            with database.transaction(database.alias(), what="prune") as _, file.batch(policy) as write:
                jobs = store.prune_batch(
                    ended_before=policy.ended_before,
                    statuses=policy.statuses,
                    after=after,
                    batch=batch,
                    budget=BATCH_CHARACTERS,
                )
                write("job", jobs)
                events = 0
                while jobs and (page := store.prune_events([job.id for job in jobs], EVENTS_AT_A_TIME)):
                    write("event", page)
                    events += len(page)
            if not jobs:
                return done
            last = jobs[-1]
            assert last.finished_at is not None
            after = (last.finished_at, last.id)
            done.jobs += len(jobs)
            done.events += events
            done.batches += 1
            for job in jobs:
                done.by_status[job.status] = done.by_status.get(job.status, 0) + 1
            if progress is not None:
                progress(done)
            time.sleep(rest)


# --- the archive ----------------------------------------------------------------------------------------

Write = Callable[[str, list[Any]], None]


class _Nothing:
    """The archive of who wants none."""

    @contextmanager
    def batch(self, policy: Policy) -> Iterator[Write]:
        yield lambda name, rows: None


class _Archive:
    """A file of JSON lines, held by one process at a time."""

    def __init__(self, path: Path, descriptor: int) -> None:
        self._path, self._descriptor = path, descriptor

    @contextmanager
    def batch(self, policy: Policy) -> Iterator[Write]:
        """Write a batch; on the disk when the block has ended, taken back when it fails.

        The block ends before the transaction around it commits.
        """
        began = os.fstat(self._descriptor).st_size
        header = {
            "id": str(uuid4()),
            "at": datetime.now(UTC).isoformat(),
            "ended_before": policy.ended_before.isoformat(),
        }
        begun = False

        def write(name: str, rows: list[Any]) -> None:
            nonlocal begun
            if rows and not begun:
                self._append(_line({"batch": header}))
                begun = True
            for row in rows:
                self._append(_line({name: as_stored(row)}))

        try:
            yield write
            if begun:
                os.fsync(self._descriptor)
        except BaseException:
            os.ftruncate(self._descriptor, began)
            raise

    def _append(self, line: bytes) -> None:
        try:
            while line:
                line = line[os.write(self._descriptor, line) :]
        except OSError as error:
            raise ArchiveUnusable(
                self._path, f"cannot be written ({error.strerror})", "Nothing of this batch was deleted."
            ) from error

    def take_back_what_did_not_commit(self) -> None:
        """Cut off the last batch, if its jobs are still there: the run that wrote it ended before its commit."""
        size = os.fstat(self._descriptor).st_size
        if not size:
            return
        if os.pread(self._descriptor, len(_BEGINNING), 0) != _BEGINNING[:size]:
            raise ArchiveUnusable(
                self._path, "is not an archive of this command", "Name a new file, or an earlier archive."
            )
        begins = self._last_batch(size)
        if not self._is_whole(size) or self._is_still_there(begins):
            os.ftruncate(self._descriptor, begins)
            os.fsync(self._descriptor)

    def _last_batch(self, size: int) -> int:
        """Where the line is that begins the last batch, looked for from the end."""
        mark, end = b"\n" + _BEGINNING, size
        while end > 0:
            start = max(0, end - LAST_CHUNK)
            found = os.pread(self._descriptor, end - start + len(mark), start).rfind(mark)
            if found >= 0:
                return start + found + 1
            end = start
        return 0

    def _is_whole(self, size: int) -> bool:
        return os.pread(self._descriptor, 1, size - 1) == b"\n"

    def _is_still_there(self, begins: int) -> bool:
        """A batch commits as one: its first job tells of all."""
        with os.fdopen(os.dup(self._descriptor), "rb") as file:
            file.seek(begins)
            file.readline()
            line = file.readline()
        try:
            job_id = UUID(json.loads(line)["job"]["id"])
        except (ValueError, KeyError, TypeError):
            # Never flushed, so never committed.
            return True
        return store.get(job_id) is not None


@contextmanager
def _opened(path: Path | None) -> Iterator[_Archive | _Nothing]:
    if path is None:
        yield _Nothing()
        return
    try:
        is_new = not path.exists()
        # Read as well: what an earlier run has left is looked at first.
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600)
    except OSError as error:
        raise ArchiveUnusable(
            path, f"cannot be opened ({error.strerror})", "Name a file in a folder that can be written."
        ) from error
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise ArchiveUnusable(
                path, "is being written by another process", "Wait for it, or name another file."
            ) from error
        archive = _Archive(path, descriptor)
        archive.take_back_what_did_not_commit()
        if is_new:
            _sync_folder(path)
        yield archive
    finally:
        os.close(descriptor)


def _sync_folder(path: Path) -> None:
    """A new file is lost in a crash as long as its name is not on the disk."""
    folder = os.open(path.resolve().parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def as_stored(row: Job | JobEvent | Model) -> dict[str, Any]:
    """Every column of a row for JSON: exact texts, ids as text, times in ISO 8601."""
    return {str(field.column): getattr(row, field.attname) for field in row._meta.concrete_fields}


def _line(content: dict[str, Any]) -> bytes:
    return json.dumps(content, ensure_ascii=False, default=_plain).encode() + b"\n"


def _plain(value: Any) -> str:
    return value.isoformat() if isinstance(value, datetime) else str(value)
