"""The acts that keep things going: reconcile, prune."""

from __future__ import annotations

import argparse
from datetime import timedelta
from pathlib import Path
from typing import Any, Final

from durable_jobs import explain, kinds, pruning, reconciler, service, store
from durable_jobs.conf import config
from durable_jobs.management import arguments
from durable_jobs.management.acts import OK, REFUSED, Act, UsageError
from durable_jobs.management.output import Output, moment
from durable_jobs.models import Status
from durable_jobs.reconciler import Cancel, Leave, Park, Redrive

SOON: Final = timedelta(days=1)


class Reconcile(Act):
    name = "reconcile"
    shows_log = True
    help = "Repair once what ended processes left behind, as every worker does by itself."
    details = (
        "It looks, waits for the setting GRACE, looks again, and repairs what has not moved: an expired lease alone "
        "is no proof of a dead worker. Cancels of work that nobody runs are settled at once."
    )
    epilog = (
        "With --json: one document with the report; with --dry-run one line per job.\n\n"
        "exit codes: 0 done; 1 some rows could not be repaired, or the database failed; 2 wrong usage;\n"
        "130 interrupted."
    )

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        parser.add_argument(
            "--dry-run", action="store_true", help="only say what would be done; nothing is written"
        )
        parser.add_argument(
            "--batch-size",
            type=arguments.whole(1, 10_000),
            default=100,
            metavar="N",
            help="rows that are read at a time (default: 100)",
        )
        parser.add_argument(
            "--tenant", type=arguments.text, metavar="T", help="only jobs of this tenant (default: of all)"
        )
        parser.add_argument(
            "--now",
            action="store_true",
            help="do not wait: for when the workers are known to be dead. After an outage of the database it would "
            "take jobs from workers that live",
        )

    def run(self, options: dict[str, Any], out: Output) -> int:
        if options["dry_run"]:
            return _show_decisions(options, out)
        store.now_and_pauses()  # the reconciler waits out a database that fails; a person wants to know
        out.say("Looking." if options["now"] else f"Looking twice, {config.GRACE:g} s apart.")
        report = service.reconcile(
            batch=options["batch_size"], tenant=options["tenant"], wait=not options["now"]
        )
        if out.json:
            out.document(vars(report))
        out.say(
            f"Cancelled {report.cancelled:,}, redrove {report.redriven:,}, parked {report.parked:,}"
            f"{f', announced {report.announced:,}' if report.announced else ''}; "
            f"left alone as of unknown kind {report.unknown_kind:,}; not yet sure {report.sighted:,}; "
            f"errors {report.errors:,}."
        )
        return REFUSED if report.errors else OK


def _show_decisions(options: dict[str, Any], out: Output) -> int:
    count = 0
    page = {"batch": options["batch_size"], "tenant": options["tenant"]}
    for waiting in reconciler.pages(lambda after: store.cancelling(after, **page), options["batch_size"]):
        unknown = kinds.find(waiting.kind) is None and waiting.asked <= config.UNKNOWN_KIND_GRACE
        act = "leave alone (its kind is unknown here)" if unknown else "cancel"
        _show_decision(out, waiting, act, f"a cancel was requested {explain.span(waiting.asked)} ago")
        count += 1
    for orphan in reconciler.pages(
        lambda after: store.orphans(config.GRACE, after, **page), options["batch_size"]
    ):
        decision = reconciler.decide(
            orphan, kinds.find(orphan.kind), unknown_kind_grace=config.UNKNOWN_KIND_GRACE
        )
        _show_decision(
            out,
            orphan,
            _in_words(decision),
            f"its lease ended {explain.span(orphan.overdue)} ago, of {orphan.owner}",
        )
        count += 1
    if not count:
        out.say("There is nothing to repair.")
    else:
        out.say("Nothing was changed. A lease that is renewed meanwhile is left alone.")
    return OK


def _show_decision(out: Output, row: Any, act: str, why: str) -> None:
    if out.json:
        out.record({"id": row.id, "kind": row.kind, "decision": act, "why": why})
    else:
        out.say(f"{row.id}  {row.kind}  would {act}: {why}")


def _in_words(decision: reconciler.Decision) -> str:
    match decision:
        case Cancel():
            return "cancel"
        case Park(code, _):
            return f"park as {code}"
        case Redrive(delay):
            return f"redrive, due in about {delay:g} s" if delay else "redrive, due at once"
        case Leave():
            return "leave alone (its kind is unknown here)"


class Prune(Act):
    name = "prune"
    help = "Delete the history of jobs that ended long ago, after archiving it."
    details = (
        "Without --yes it only shows what it would take and what it leaves. Jobs that have not ended always stay, failed "
        "ones unless --include-failed is given. With a job go its history and its idempotency key, which can then be "
        "used again."
    )
    epilog = (
        'The archive is a file of JSON lines, to which is added: {"batch": …}, then a {"job": …} with every column for\n'
        'each job, then an {"event": …} for each line of their histories. It is on the disk before the batch is\n'
        "deleted. Killed at any moment, run it again: nothing is lost and nothing stands in the archive twice.\n\n"
        "exit codes: 0 done, or shown; 1 refused; 2 wrong usage; 130 interrupted."
    )

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        parser.add_argument(
            "--older-than",
            type=arguments.duration,
            required=True,
            metavar="DURATION",
            help="jobs that ended longer ago than this, as 90d; required, there is no default",
        )
        parser.add_argument(
            "--status", type=arguments.statuses, default=pruning.DEFAULT_STATUSES, metavar="S,S",
            help=f"statuses that may go (default: {','.join(pruning.DEFAULT_STATUSES)})",
        )  # fmt: skip
        parser.add_argument(
            "--include-failed", action="store_true", help="failed and parked jobs may go, too"
        )
        where = parser.add_mutually_exclusive_group()
        where.add_argument("--archive", type=Path, metavar="FILE", help="where what is deleted is kept")
        where.add_argument("--no-archive", action="store_true", help="keep nothing of what is deleted")
        parser.add_argument(
            "--batch-size", type=arguments.whole(1, 10_000), default=pruning.DEFAULT_BATCH, metavar="N",
            help=f"jobs in one transaction, fewer when they are large (default: {pruning.DEFAULT_BATCH})",
        )  # fmt: skip
        parser.add_argument(
            "--rest", type=arguments.seconds, default=pruning.DEFAULT_REST, metavar="SECONDS",
            help=f"pause between two batches (default: {pruning.DEFAULT_REST:g})",
        )  # fmt: skip
        parser.add_argument("--yes", action="store_true", help="do it; needs --archive or --no-archive")

    def run(self, options: dict[str, Any], out: Output) -> int:
        statuses = (*options["status"], *([Status.FAILED.value] if options["include_failed"] else ()))
        policy = pruning.Policy(pruning.cutoff(options["older_than"]), statuses)
        if not options["yes"]:
            _show_preview(policy, out)
            return OK
        if options["archive"] is None and not options["no_archive"]:
            raise UsageError(
                "Say where the deleted history is kept: --archive FILE, or --no-archive to keep nothing."
            )
        if options["older_than"] < SOON:
            out.note("This takes jobs that ended less than a day ago.")
        done = pruning.Pruned()

        def note(now: pruning.Pruned) -> None:
            nonlocal done
            done = now

        try:
            pruning.prune(
                policy,
                options["archive"],
                batch=options["batch_size"],
                rest=options["rest"],
                progress=note,
            )
        finally:
            _sum_up(done, options["archive"], out)
        return OK


def _show_preview(policy: pruning.Policy, out: Output) -> None:
    preview = pruning.preview(policy)
    if out.json:
        out.document({"dry_run": True, "ended_before": policy.ended_before, **vars(preview)})
        return
    going = ", ".join(f"{_bounded(number)} {status}" for status, number in preview.going.items())
    out.say(f"Jobs that ended before {moment(policy.ended_before)}: {going} would be deleted.")
    if preview.oldest is not None:
        out.say(f"The oldest of them ended {moment(preview.oldest)}.")
    if Status.FAILED not in policy.statuses:
        out.say(f"{_bounded(preview.failed_kept)} failed would stay (--include-failed takes them as well).")
    out.say(f"{_bounded(preview.live_kept)} of that age have not ended and stay in any case.")
    out.say("Nothing was deleted; add --yes to do it.")


def _bounded(number: int) -> str:
    return f"{number:,}{'+' if number >= pruning.MOST_COUNTED else ''}"


def _sum_up(done: pruning.Pruned, archive: Path | None, out: Output) -> None:
    if out.json:
        out.document({**vars(done), "archive": str(archive) if archive else None})
        return
    listed = ", ".join(f"{number:,} {status}" for status, number in sorted(done.by_status.items()))
    where = f", kept in {archive}" if archive else ""
    out.say(
        f"Deleted {done.jobs:,} jobs{f' ({listed})' if listed else ''} and {done.events:,} lines of history{where}."
    )
