"""The acts that only look: list, show, explain, kinds, stats, health."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from typing import Any, Final

from durable_jobs import connection, database, explain, kinds, overview, selection
from durable_jobs.conf import config
from durable_jobs.exceptions import where_kinds_are_found
from durable_jobs.explain import Phase, Reason
from durable_jobs.kinds import Kind
from durable_jobs.management import arguments
from durable_jobs.management.acts import OK, REFUSED, Act, UsageError
from durable_jobs.management.acts.acting import as_pause, found
from durable_jobs.management.output import Output
from durable_jobs.models import Job, JobEvent, Status
from durable_jobs.overview import Limits
from durable_jobs.selection import Look

DEFAULT_LENGTH: Final = 20
MOST_LISTED: Final = 200
EVENTS_SHOWN: Final = 20
TEXT_SHOWN: Final = 2_000


class List(Act):
    name = "list"
    help = "List jobs, newest first."
    epilog = (
        "With --json: one line per job. To go on, give the last line's id to --after.\n\n"
        "exit codes: 0 done, also when no job matches; 1 the database fails; 2 wrong usage."
    )

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        arguments.add_filters(parser, phases=list(Phase), statuses=list(Status))
        parser.add_argument(
            "--after",
            type=arguments.job_id,
            metavar="ID",
            help="only jobs that come after this one in the list",
        )
        parser.add_argument(
            "--limit", type=arguments.whole(1, MOST_LISTED), default=DEFAULT_LENGTH, metavar="N",
            help=f"at most so many, 1 to {MOST_LISTED} (default: {DEFAULT_LENGTH})",
        )  # fmt: skip

    def run(self, options: dict[str, Any], out: Output) -> int:
        look = Look.take()
        chosen, limit = arguments.selection_of(options), options["limit"]
        jobs = selection.newest(chosen, look, limit=limit + 1, after=options["after"])
        more, jobs = len(jobs) > limit, jobs[:limit]
        if out.json:
            for job in jobs:
                out.record(_brief(job, look))
            return OK
        if not jobs:
            out.say("No job matches." if options["after"] is None else "No more jobs match.")
            return OK
        out.table(
            ["id", "phase", "kind", "queue", "subject", "progress", "created", "error"],
            [
                (
                    job.id, look.phase(job), job.kind, job.queue_name, _subject(job), progress(job), job.created_at,
                    job.error_code or (job.error_type or "").rpartition(".")[2],
                )
                for job in jobs
            ],
        )  # fmt: skip
        if more:
            out.say(f"\nMore: add --after {jobs[-1].id}")
        return OK


class Show(Act):
    name = "show"
    help = "Show everything about a job: where it stands, what it holds, and its history."

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        parser.add_argument("id", type=arguments.job_id, metavar="ID", help="the job")
        parser.add_argument(
            "--events", type=arguments.whole(0, 1_000), default=EVENTS_SHOWN, metavar="N",
            help=f"the newest so many lines of its history, 0 to 1,000 (default: {EVENTS_SHOWN})",
        )  # fmt: skip

    def run(self, options: dict[str, Any], out: Output) -> int:
        job, look = found(options["id"]), Look.take()
        reasons = explain.explain(job)
        history = JobEvent.objects.using(database.alias()).filter(job_id=job.id)
        events = list(history.order_by("-id")[: options["events"]])
        if out.json:
            out.document(
                {
                    **_brief(job, look),
                    **kinds.payload(job),
                    "error_message": job.error_message,
                    "reasons": [vars(reason) for reason in reasons],
                    "events": [_as_event(event) for event in events],
                }
            )
            return OK
        out.facts([("job", job.id), ("kind", job.kind), ("phase", look.phase(job))])
        for reason in reasons:
            out.say(f"  {reason.sentence}{f' {reason.way_out}' if reason.way_out else ''}")
        kind = kinds.find(job.kind)
        out.facts(_facts(job, look.now), title="\nWhere it stands")
        out.facts(_limits(job, kind), title="\nLimits used")
        out.facts(_last_error(job), title="\nLast error")
        out.facts([(name, _as_text(value)) for name, value in kinds.payload(job).items()], title="\nPayload")
        if kind is not None:
            out.facts(_about(kind), title="\nAbout the kind")
        if events:
            out.say()
            out.table(
                ["time", "event", "by", "what"],
                [
                    (event.created_at, event.event, event.actor or event.owner, _told(event))
                    for event in events
                ],
                title="History, newest first",
            )
        return OK


class Explain(Act):
    name = "explain"
    help = "Say why a job does not run, what is wrong with it, and what can be done."

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        parser.add_argument("id", type=arguments.job_id, metavar="ID", help="the job")

    def run(self, options: dict[str, Any], out: Output) -> int:
        job, look = found(options["id"]), Look.take()
        phase, reasons = look.phase(job), explain.explain(job)
        if out.json:
            out.document(
                {
                    "id": job.id,
                    "kind": job.kind,
                    "phase": phase,
                    "reasons": [vars(reason) for reason in reasons],
                }
            )
            return OK
        out.say(f"Job {job.id} ({job.kind}) is {phase}.")
        for reason in reasons or [Reason("none", _well(job, phase))]:
            out.say(f"  {reason.sentence}")
            if reason.way_out:
                out.say(f"    → {reason.way_out}")
        return OK


def _well(job: Job, phase: Phase) -> str:
    if phase is Phase.RUNNING:
        return f"It runs on {job.lease_owner}: all is as it should be."
    return "There is nothing to explain: it has ended." if job.finished_at else "All is as it should be."


class Kinds(Act):
    name = "kinds"
    help = "List the kinds that are registered here."

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        pass

    def run(self, options: dict[str, Any], out: Output) -> int:
        registered = sorted(kinds.all_kinds(), key=lambda kind: kind.name)
        if out.json:
            out.document([_as_kind(kind) for kind in registered])
            return OK
        if not registered:
            out.say(f"No kind is registered here. {where_kinds_are_found(config.DISCOVER)}")
            return OK
        out.table(
            ["kind", "queue", "worker lost", "failures", "lease", "description"],
            [
                (
                    ", also ".join(kind.all_names), kind.queue, kind.orphan_policy, kind.retry.failures,
                    f"{kind.lease_seconds:g} s", str(kind.description),
                )
                for kind in registered
            ],
        )  # fmt: skip
        return OK


class Stats(Act):
    name = "stats"
    help = "Count jobs by what they do, queues, workers, pauses, and the failures of the last 24 hours."
    details = f"Counting stops at {overview.MOST:,}, shown as {overview.MOST:,}+."

    def run(self, options: dict[str, Any], out: Output) -> int:
        now = overview.stats()
        if out.json:
            out.document(_as_stats(now))
            return OK
        for pause in now.pauses:
            out.say(explain.of_pause(pause))
        out.table(list(now.live), [list(now.live.values())])
        out.say()
        out.table(
            ["ended within", *next(iter(now.ended.values()))],
            [(window, *row.values()) for window, row in now.ended.items()],
        )
        if now.queues:
            out.say()
            out.table(
                ["queue", "due", "oldest due", "running", "live workers"],
                [
                    (
                        queue.name,
                        queue.due,
                        explain.span(queue.oldest_due) if queue.oldest_due > 0 else "–",
                        queue.running,
                        queue.workers,
                    )
                    for queue in now.queues
                ],
            )
        if now.failures:
            out.say()
            out.table(
                ["failed in 24 h", "kind", "error type"],
                [(number, kind, error or "–") for kind, error, number in now.failures[:20]],
            )
        out.say()
        if now.workers:
            out.table(
                ["worker", "queues", "kinds", "threads", "release", "started", "seen"],
                [
                    (
                        worker.owner, ", ".join(worker.queue_names) or "all", ", ".join(worker.kind_names) or "all", worker.concurrency, worker.release,
                        worker.started_at, f"{max(0, round((now.now - worker.beat_at).total_seconds()))} s ago",
                    )
                    for worker in now.workers
                ],
            )  # fmt: skip
        else:
            out.say("No live worker.")
        return OK


class Health(Act):
    name = "health"
    help = (
        "Say whether work is being done: database, due work without a live worker, stuck jobs, failing hooks."
    )
    details = "Work that is paused is no problem."
    epilog = (
        "With --worker it is a probe for a container: does a worker of this host poll?\n\n"
        "exit codes: 0 healthy; 1 not healthy, or the database does not answer; 2 wrong usage."
    )

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        usual = Limits()
        parser.add_argument(
            "--worker", action="store_true", help="only: has a worker of this host shown itself lately"
        )
        parser.add_argument(
            "--silent", type=arguments.seconds, metavar="SECONDS",
            help=f"with --worker: longest time since then (default: {overview.PROBED_AFTER:g})",
        )  # fmt: skip
        parser.add_argument(
            "--without-worker", type=arguments.seconds, default=usual.without_worker, metavar="SECONDS",
            help=f"longest time that due work may have no live worker (default: {usual.without_worker:g})",
        )  # fmt: skip
        parser.add_argument(
            "--due", type=arguments.seconds, default=usual.due, metavar="SECONDS",
            help=f"longest time that work may be due (default: {usual.due:g})",
        )  # fmt: skip
        parser.add_argument(
            "--stuck-for", type=arguments.seconds, metavar="SECONDS",
            help="time that a stuck job has for its repair (default: GRACE + 2 × TICK)",
        )  # fmt: skip
        parser.add_argument(
            "--stuck", type=arguments.whole(0, 10_000), default=usual.stuck, metavar="N",
            help=f"stuck jobs that are tolerated (default: {usual.stuck})",
        )  # fmt: skip
        parser.add_argument(
            "--mirrors", type=arguments.whole(0, 10_000), default=usual.mirrors, metavar="N",
            help=f"jobs whose hooks keep failing that are tolerated (default: {usual.mirrors})",
        )  # fmt: skip

    def run(self, options: dict[str, Any], out: Output) -> int:
        if options["silent"] is not None and not options["worker"]:
            raise UsageError("--silent goes with --worker.")
        with _in_time():
            health = _ask(options)
        if out.json:
            out.document({"healthy": health.ok, "checks": [vars(check) for check in health.checks]})
        for check in health.checks:
            mark = "ok     " if check.ok else "PROBLEM"
            out.say(f"{mark}  {check.name}: {check.sentence}{f' {check.way_out}' if not check.ok else ''}")
        return OK if health.ok else REFUSED


def _ask(options: dict[str, Any]) -> overview.Health:
    if options["worker"]:
        return overview.worker_health(options["silent"] or overview.PROBED_AFTER)
    names = ("without_worker", "due", "stuck_for", "stuck", "mirrors")
    return overview.health(Limits(**{name: options[name] for name in names}))


@contextmanager
def _in_time() -> Iterator[None]:
    """A server that does not answer is an answer after seconds, where libpq would wait for minutes."""
    if database.connection().connection is not None:
        yield
        return
    connection.own("health")
    try:
        yield
    finally:
        connection.disown()


# --- as text --------------------------------------------------------------------------------------------


def progress(job: Job) -> str:
    """`41,200 of 90,000 (45 %)`, or as much of it as is known."""
    percent = f"{job.percent:.0f} %" if job.percent is not None else ""
    if job.total_count:
        return f"{job.processed_count:,} of {job.total_count:,} ({percent})"
    return f"{job.processed_count:,}" if job.processed_count else percent


def _facts(job: Job, now: datetime) -> list[tuple[str, Any]]:
    lease = None
    if job.lease_owner and job.lease_expires_at:
        left = (job.lease_expires_at - now).total_seconds()
        lease = f"ends in {explain.span(left)}" if left > 0 else f"ended {explain.span(-left)} ago"
    cancelled = f"{job.cancelled_by}" if job.cancelled_by_id else None
    return [
        ("status", job.status),
        ("tenant", job.tenant_id),
        ("organization", job.organization_id),
        ("subject", _subject(job)),
        ("queue", job.queue_name),
        ("priority", job.priority or None),
        ("lock key", job.lock_key),
        ("idempotency key", job.idempotency_key),
        ("progress", progress(job)),
        ("message", job.progress_message),
        ("created", job.created_at),
        ("due", job.next_run_at),
        ("first started", job.started_at),
        ("claimed", job.claimed_at if job.lease_owner else None),
        ("worker", job.lease_owner),
        ("lease", lease),
        ("last commit", job.last_committed_at),
        ("cancel requested", job.cancel_requested_at),
        ("cancelled by", cancelled),
        ("parked", job.parked_at),
        ("ended", job.finished_at),
        ("slices", job.attempts),
        ("interruptions", job.interruptions or None),
        ("run again", f"{job.redrives} times" if job.redrives else None),
    ]


def _limits(job: Job, kind: Kind | None) -> list[tuple[str, Any]]:
    def used(number: int, allowed: int | None) -> str:
        return f"{number} of {allowed}" if allowed is not None else str(number)

    return [
        ("failures in a row", used(job.consecutive_failures, kind.retry.failures if kind else None)),
        (
            "workers lost since a commit",
            used(job.redrives_since_commit, kind.max_orphanings if kind else None),
        ),
        ("failed hooks", job.mirror_attempts or None),
    ]


def _last_error(job: Job) -> list[tuple[str, Any]]:
    return [
        ("type", job.error_type),
        ("code", job.error_code),
        ("class", job.error_class),
        ("message", cut(job.error_message)),
    ]


def _about(kind: Kind) -> list[tuple[str, Any]]:
    return [
        ("description", str(kind.description)),
        ("note", str(kind.operator_note)),
        ("runbook", kind.runbook_url),
    ]


def _subject(job: Job) -> str:
    return f"{job.subject_type}:{job.subject_id}" if job.subject_type else ""


def _told(event: JobEvent) -> str:
    error = ": ".join(part for part in (event.error_type, event.message) if part)
    data = json.dumps(event.data, ensure_ascii=False) if event.data else ""
    return cut("  ".join(part for part in (event.reason, event.code, error, data) if part), 300) or ""


def _as_text(value: Any) -> str | None:
    return None if value is None else cut(json.dumps(value, ensure_ascii=False))


def cut(text: str | None, most: int = TEXT_SHOWN) -> str | None:
    """A text for a screen; the JSON output has all of it."""
    return text if text is None or len(text) <= most else f"{text[:most]}… ({len(text):,} characters)"


# --- as JSON --------------------------------------------------------------------------------------------

_BRIEF = (
    "id", "kind", "status", "tenant_id", "organization_id", "queue_name", "priority", "subject_type", "subject_id",
    "idempotency_key", "lock_key", "processed_count", "total_count", "progress_message", "created_at", "updated_at",
    "started_at", "next_run_at", "claimed_at", "lease_owner", "lease_epoch", "lease_expires_at", "heartbeat_at",
    "last_committed_at", "finished_at", "parked_at", "cancel_requested_at", "attempts", "redrives", "interruptions",
    "continuation_seq", "consecutive_failures", "redrives_since_commit", "mirror_attempts", "verdict", "error_class",
    "error_code", "error_type",
)  # fmt: skip


def _brief(job: Job, look: Look) -> dict[str, Any]:
    row = {name: getattr(job, name) for name in _BRIEF}
    return {**row, "phase": look.phase(job), "percent": job.percent}


def _as_event(event: JobEvent) -> dict[str, Any]:
    names = [field.attname for field in event._meta.concrete_fields]
    return {name: getattr(event, name) for name in names if name != "job_id"}


def _as_kind(kind: Kind) -> dict[str, Any]:
    names = (
        "name", "queue", "orphan_policy", "lease_seconds", "slice_seconds", "max_slice_seconds", "max_orphanings",
        "allow_restart", "runbook_url",
    )  # fmt: skip
    return {
        **{name: getattr(kind, name) for name in names},
        "aliases": list(kind.aliases),
        "retry": vars(kind.retry),
        "description": str(kind.description),
        "operator_note": str(kind.operator_note),
    }


def _as_stats(now: overview.Stats) -> dict[str, Any]:
    return {
        "now": now.now,
        "live": {name: vars(number) for name, number in now.live.items()},
        "ended": {
            window: {name: vars(number) for name, number in row.items()} for window, row in now.ended.items()
        },
        "failures": [
            {"kind": kind, "error_type": error, **vars(number)} for kind, error, number in now.failures
        ],
        "queues": [
            {**vars(queue), "due": vars(queue.due), "running": vars(queue.running)} for queue in now.queues
        ],
        "workers": [
            {
                "owner": worker.owner, "host": worker.host, "pid": worker.pid, "queues": worker.queue_names,
                "kinds": worker.kind_names, "concurrency": worker.concurrency, "release": worker.release,
                "started_at": worker.started_at, "beat_at": worker.beat_at,
            }
            for worker in now.workers
        ],
        "pauses": [as_pause(pause) for pause in now.pauses],
    }  # fmt: skip
