"""The acts that change something: start, cancel, redrive, pause, unpause, settle."""

from __future__ import annotations

import argparse
import time
from collections import Counter
from collections.abc import Iterator
from typing import Any, Final
from uuid import UUID, uuid4

from django.apps import apps
from django.db.utils import Error

from durable_jobs import database, explain, kinds, selection, service, store
from durable_jobs.conf import config
from durable_jobs.exceptions import InvalidInput, NotFound
from durable_jobs.explain import Phase
from durable_jobs.management import arguments
from durable_jobs.management.acts import OK, REFUSED, Act, UsageError, actor, sentence_of
from durable_jobs.management.output import Output, moment
from durable_jobs.models import Job, Pause, Scope, Status
from durable_jobs.selection import Look, Outcome, Selection, Summary
from durable_jobs.service import ALL_SCOPES

REFUSALS_SHOWN: Final = 20
LOOK_SECONDS: Final = 0.25
CALM_SECONDS: Final = 0.5
"""How long nothing must have run: a claim that began before the pause may just be about to commit."""


class Start(Act):
    name = "start"
    help = "Start a job."
    details = (
        "Prints its id. With a key that was used before, the earlier job is printed and nothing is started."
    )

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        parser.add_argument("kind", metavar="KIND", help="a registered kind; see the subcommand kinds")
        parser.add_argument(
            "--input",
            type=arguments.json_input,
            metavar="JSON",
            help="JSON, @file with it, or - for standard input (default: null)",
        )
        parser.add_argument(
            "--idempotency-key", metavar="KEY", help="at most one job for this key in the scope, ever"
        )
        parser.add_argument(
            "--lock-key", metavar="KEY", help="at most one live job for this key in the scope"
        )
        parser.add_argument(
            "--priority",
            type=arguments.whole(-100, 100),
            default=0,
            metavar="N",
            help="-100 to 100, higher first (default: 0)",
        )
        parser.add_argument("--queue", metavar="Q", help="default: the kind's own")
        parser.add_argument(
            "--run-after",
            type=arguments.later,
            metavar="WHEN",
            help="not before then: ISO 8601, or 30m for in thirty minutes",
        )
        parser.add_argument(
            "--subject", type=arguments.subject, metavar="LABEL:PK", help="the project's row, as app.Model:PK"
        )
        parser.add_argument(
            "--meta",
            type=arguments.label,
            action="append",
            default=[],
            metavar="K=V",
            help="a label, a text; may be given several times",
        )
        parser.add_argument(
            "--tenant",
            metavar="T",
            help=f"default: DURABLE_JOBS['DEFAULT_TENANT'], here {arguments.here('DEFAULT_TENANT')}",
        )
        parser.add_argument("--organization", metavar="O", help="default: none")

    def run(self, options: dict[str, Any], out: Output) -> int:
        started = service.start(
            options["kind"],
            options["input"],
            scope=Scope(options["tenant"] or config.DEFAULT_TENANT, options["organization"]),
            subject=_subject(options["subject"]),
            idempotency_key=options["idempotency_key"],
            lock_key=options["lock_key"],
            priority=options["priority"],
            queue=options["queue"],
            run_after=options["run_after"],
            meta=dict(options["meta"]) or None,
        )
        job = started.job
        if out.json:
            out.document({"id": job.id, "kind": job.kind, "created": started.created, "status": job.status})
            return OK
        if started.created:
            due = (
                ""
                if options["run_after"] is None or job.next_run_at is None
                else f", due {moment(job.next_run_at)}"
            )
            out.say(f"Started {job.kind} {job.id} on queue {job.queue_name}{due}.")
        else:
            out.say(f"Job {job.id} was started with this key before; it is {job.status}.")
        return OK


def _subject(given: tuple[str, str] | None) -> Any:
    if given is None:
        return None
    label, key = given
    try:
        model: Any = apps.get_model(label)
        found = model._base_manager.using(database.alias()).filter(pk=key).first()
    except (LookupError, ValueError, TypeError) as error:
        raise InvalidInput(
            "subject", f"{label}:{key}", "names no model or key", "Use app.Model:PK."
        ) from error
    if found is None:
        raise InvalidInput(
            "subject", f"{label}:{key}", "does not exist", "Use the primary key of a saved row."
        )
    return found


class _Bulk(Act):
    """Acts on jobs by id, or on all that the filters choose."""

    epilog = (
        "With filters it only shows what it would do, unless --yes is given. Each job is acted on in a transaction\n"
        "of its own; interrupted, run the same command again and it goes on with what is left.\n\n"
        "With --json: one line per job (id, done, code, message), then one line with the totals.\n\n"
        "exit codes: 0 done, or shown; 1 at least one job was refused; 2 wrong usage; 130 interrupted."
    )
    done: str
    would_be: str
    phases: list[Phase]
    statuses: list[Status]

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        parser.add_argument(
            "ids", nargs="*", type=arguments.job_id, metavar="ID", help="jobs, acted on at once"
        )
        arguments.add_filters(parser, phases=self.phases, statuses=self.statuses)
        parser.add_argument(
            "--limit",
            type=arguments.whole(1, 10_000_000),
            metavar="N",
            help="at most so many, oldest first; failed ones by when they failed",
        )
        parser.add_argument(
            "--yes", action="store_true", help="do it; without it filters only show what would be done"
        )
        parser.add_argument("--reason", default="", metavar="R", help="kept in the history of each job")

    def run(self, options: dict[str, Any], out: Output) -> int:
        ids, filtered = options["ids"], arguments.is_filtered(options)
        if ids and filtered:
            raise UsageError("Give ids or filters, not both.")
        if not ids and not filtered:
            raise UsageError("Say which jobs: ids, or filters such as --kind (see --help).")
        if ids:
            if options["limit"] is not None:
                raise UsageError("--limit goes with filters; give fewer ids.")
            unique = list(dict.fromkeys(ids))
            return self._act(iter([unique]), self.act_by_id(options), out, total=None)
        look = Look.take()
        chosen = self.choose(arguments.selection_of(options), look)
        if options["yes"]:
            total = selection.count(chosen, look, limit=options["limit"])
            ids = selection.pages(chosen, look, limit=options["limit"])
            return self._act(ids, self.act_in_bulk(options, look, total), out, total=total)
        self._show(selection.summarize(chosen, look, limit=options["limit"]), look, options, out)
        return OK

    def choose(self, chosen: Selection, look: Look) -> Selection:
        """Narrow a selection to what the act may meet, as of the call's beginning."""
        raise NotImplementedError

    def act_by_id(self, options: dict[str, Any]) -> selection.Act:
        raise NotImplementedError

    def act_in_bulk(self, options: dict[str, Any], look: Look, total: int) -> selection.Act:
        raise NotImplementedError

    def told(self, job: Job) -> str:
        """What is said of a job that was acted on by id."""
        raise NotImplementedError

    def _act(self, ids: Iterator[list[UUID]], act: selection.Act, out: Output, *, total: int | None) -> int:
        done, skipped = 0, Counter[str]()
        try:
            for outcome in selection.act_on(ids, act):
                if outcome.refusal is None:
                    done += 1
                else:
                    skipped[str(outcome.refusal.code)] += 1
                self._tell(outcome, out, by_id=total is None, refused=sum(skipped.values()))
        except (KeyboardInterrupt, Error):
            self._sum_up(done, skipped, total, out)
            if total is not None:
                out.note(
                    "It did not get to the end. Run the same command again: it goes on with what is left."
                )
            raise
        if total is not None or out.json or done + len(skipped) > 1:
            self._sum_up(done, skipped, total, out)
        return REFUSED if skipped else OK

    def _tell(self, outcome: Outcome, out: Output, *, by_id: bool, refused: int) -> None:
        refusal, job = outcome.refusal, outcome.job
        if out.json:
            said = {"code": refusal.code, "message": str(refusal)} if refusal else {}
            now = {"status": job.status} if job else {}
            out.record({"id": outcome.job_id, "done": refusal is None, **now, **said})
        elif refusal is not None:
            if by_id or refused <= REFUSALS_SHOWN:
                out.note(f"{outcome.job_id}: {refusal.code}: {sentence_of(refusal)}")
            elif refused == REFUSALS_SHOWN + 1:
                out.note("More refusals are only counted.")
        elif by_id and job is not None:
            out.say(self.told(job))

    def _sum_up(self, done: int, skipped: Counter[str], total: int | None, out: Output) -> None:
        if out.json:
            out.record({"done": done, "skipped": dict(skipped), **({} if total is None else {"of": total})})
            return
        number = sum(skipped.values())
        listed = ", ".join(f"{code} {count:,}" for code, count in skipped.most_common())
        of = "" if total is None else f" of {total:,}"
        left = f", skipped {number:,} ({listed})" if number else ""
        out.say(f"{self.done} {done:,}{of}{left}.")

    def _show(self, found: Summary, look: Look, options: dict[str, Any], out: Output) -> None:
        if out.json:
            groups = [vars(group) for group in found.groups]
            sample = [{"id": job.id, "kind": job.kind, "phase": look.phase(job)} for job in found.sample]
            out.document(
                {
                    "dry_run": True,
                    "as_of": look.now,
                    "jobs": found.jobs,
                    "more": found.more,
                    "groups": groups,
                    "sample": sample,
                }
            )
            return
        if not found.jobs:
            out.say("No job matches.")
            _doubt_kind(options["kind"], out)
            return
        number = f"More than {found.jobs:,}" if found.more else f"{found.jobs:,}"
        out.say(
            f"{number} {'job' if found.jobs == 1 and not found.more else 'jobs'} would be {self.would_be}:"
        )
        out.table(
            ["jobs", "kind", "error type"],
            [(f"{group.jobs:,}", group.kind, group.error_type or "–") for group in found.groups],
        )
        out.say()
        out.table(
            ["id", "phase", "kind", "ended"],
            [(job.id, look.phase(job), job.kind, job.finished_at) for job in found.sample],
            title="For example:",
        )
        for note in sorted({_note_of(group.kind) for group in found.groups} - {""}):
            out.say(note)
        out.say(f"\nNothing was changed. As of {moment(look.now)}; add --yes to do it.")


def _note_of(name: str) -> str:
    kind = kinds.find(name)
    if kind is None or not (kind.operator_note or kind.runbook_url):
        return ""
    return " ".join(part for part in (f"{name}:", str(kind.operator_note), kind.runbook_url) if part)


def _doubt_kind(name: str | None, out: Output) -> None:
    if name is not None and kinds.find(name) is None:
        out.note(f"No kind {name!r} is registered here. Registered: {', '.join(kinds.names()) or 'none'}.")


class Cancel(_Bulk):
    name = "cancel"
    help = "Ask jobs to end: by ids, or all that filters choose."
    details = "Work that does not run ends at once, with its hooks; running work ends at its next boundary."
    done, would_be = "Cancelled", "cancelled"
    phases = [
        Phase.HELD,
        Phase.SCHEDULED,
        Phase.WAITING,
        Phase.PAUSED,
        Phase.RUNNING,
        Phase.RETRYING,
        Phase.STUCK,
    ]
    statuses = [Status.HELD, Status.PENDING, Status.RUNNING]

    def choose(self, chosen: Selection, look: Look) -> Selection:
        return chosen.unended_by(look.now)

    def act_by_id(self, options: dict[str, Any]) -> selection.Act:
        return selection.cancelling(actor=actor(), reason=options["reason"])

    def act_in_bulk(self, options: dict[str, Any], look: Look, total: int) -> selection.Act:
        return selection.cancelling(actor=actor(), reason=options["reason"], operation=str(uuid4()))

    def told(self, job: Job) -> str:
        if job.status == Status.CANCELLED:
            return f"{job.id}: cancelled."
        if job.lease_owner is not None:
            return f"{job.id}: asked to stop; it ends at its next boundary."
        return f"{job.id}: asked to stop; a worker that knows its kind ends it."


class Redrive(_Bulk):
    name = "redrive"
    help = "Run jobs again from their checkpoints: by ids, or all failed ones that filters choose."
    details = (
        "By id also what waits for a retry or has lost its worker. Filters take only what failed before the call "
        "began, so that what fails again is not taken twice."
    )
    done, would_be = "Redrove", "redriven"
    phases = [Phase.FAILED, Phase.PARKED]
    statuses = [Status.FAILED]

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        super().add_arguments(parser)
        parser.add_argument(
            "--spread",
            type=arguments.duration,
            metavar="DURATION",
            help="spread the jobs evenly over this time, as 30m",
        )
        parser.add_argument("--force", action="store_true", help="also what failed as unrecoverable")
        parser.add_argument(
            "--restart",
            action="store_true",
            help="from the start, without the checkpoint, where the kind allows it",
        )

    def run(self, options: dict[str, Any], out: Output) -> int:
        if options["ids"] and options["spread"] is not None:
            raise UsageError("--spread goes with filters.")
        return super().run(options, out)

    def choose(self, chosen: Selection, look: Look) -> Selection:
        return chosen.failed_by(look.now)

    def act_by_id(self, options: dict[str, Any]) -> selection.Act:
        return selection.redriving(**self._options(options))

    def act_in_bulk(self, options: dict[str, Any], look: Look, total: int) -> selection.Act:
        seconds = options["spread"].total_seconds() if options["spread"] else 0.0
        return selection.redriving(
            failed_before=look.now,
            spread=selection.Spread(seconds, total),
            operation=str(uuid4()),
            **self._options(options),
        )

    def _options(self, options: dict[str, Any]) -> dict[str, Any]:
        return {"actor": actor(), **{name: options[name] for name in ("reason", "force", "restart")}}

    def told(self, job: Job) -> str:
        where = f"from item {job.processed_count:,}" if job.processed_count else "from its checkpoint"
        return f"{job.id}: redriven, goes on {where if job.checkpoint_text else 'from the start'}."


class _OfPause(Act):
    """Names what a pause stops."""

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--all", action="store_true", help="all work")
        parser.add_argument("--queue", type=arguments.text, metavar="Q", help="work of this queue")
        parser.add_argument("--kind", type=arguments.text, metavar="K", help="work of this kind")
        parser.add_argument("--tenant", type=arguments.text, metavar="T", help="work of this tenant")

    def _what(self, options: dict[str, Any]) -> dict[str, str]:
        what = {name: options[name] or "" for name in ("queue", "kind", "tenant")}
        if options["all"] == any(what.values()):
            raise UsageError("Say either --all, or one or more of --queue, --kind and --tenant.")
        return what


class PauseWork(_OfPause):
    name = "pause"
    help = "Stop new work, and ask what runs to yield."
    details = (
        "Given together, --queue, --kind and --tenant must all match. Jobs can still be started; they wait. Cancels are "
        "still settled; nothing else is repaired."
    )
    epilog = (
        "With --wait the answer says whether it is quiet: no lease of matching work is live.\n\n"
        "exit codes: 0 paused (with --wait: and nothing runs); 1 refused, or something still ran when the time was\n"
        "over (the pause stays); 2 wrong usage; 130 interrupted."
    )

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        super().add_arguments(parser)
        parser.add_argument(
            "--reason", required=True, metavar="R", help="why, for whoever finds the work standing"
        )
        parser.add_argument(
            "--wait",
            type=arguments.seconds,
            metavar="SECONDS",
            help="wait so long for what runs to yield, as 300 or 5m",
        )

    def run(self, options: dict[str, Any], out: Output) -> int:
        what = self._what(options)
        _refuse_unknown(what)
        service.pause(**what, reason=options["reason"], actor=actor())
        out.say(f"Paused {_named(what)}.")
        if options["wait"] is None:
            if out.json:
                out.document({"paused": True, "running": service.running_under(**what)})
            return OK
        quiet = _wait_until_quiet(what, options["wait"])
        running = [] if quiet else _running(what)
        lapsed = _lapsed(what)
        if out.json:
            out.document(
                {
                    "paused": True,
                    "quiet": quiet,
                    "running": [_as_running(job) for job in running],
                    "lapsed": [_as_running(job) for job in lapsed],
                }
            )
            return OK if quiet else REFUSED
        if quiet:
            out.say("Nothing runs any more.")
        else:
            out.table(
                ["id", "kind", "claimed", "worker"],
                [(job.id, job.kind, job.claimed_at, job.lease_owner) for job in running],
                title=f"Still running after {options['wait']:g} s:",
            )
        if lapsed:
            out.table(
                ["id", "kind", "lease ended", "worker"],
                [(job.id, job.kind, job.lease_expires_at, job.lease_owner) for job in lapsed],
                title="Not counted as running, because the lease has run out; make sure that these workers are gone:",
            )
        return OK if quiet else REFUSED


class Unpause(_OfPause):
    name = "unpause"
    help = "Take a pause away, named as it was set, and wake the workers."

    def run(self, options: dict[str, Any], out: Output) -> int:
        what = self._what(options)
        ended = service.unpause(**what, actor=actor())
        left = list(Pause.objects.using(database.alias()).order_by("id"))
        if out.json:
            out.document({"unpaused": ended, "left": [as_pause(pause) for pause in left]})
        else:
            out.say(f"Unpaused {_named(what)}." if ended else f"There is no pause of exactly {_named(what)}.")
            if left:
                out.say("Pauses that are set:")
            for pause in left:
                out.say(f"  {explain.of_pause(pause)}")
        return OK if ended else REFUSED


def _refuse_unknown(what: dict[str, str]) -> None:
    """A misspelt name would pause nothing, and `--wait` would find that quiet."""
    jobs = Job.objects.using(database.alias())
    kind, queue = what["kind"], what["queue"]
    if kind and kinds.find(kind) is None and not jobs.filter(kind=kind).exists():
        known = ", ".join(kinds.names()) or "none"
        raise InvalidInput(
            "kind", kind, "is registered nowhere here, and no job has it", f"Known here: {known}."
        )
    queues = sorted({known.queue for known in kinds.all_kinds()})
    if queue and queue not in queues and not jobs.filter(queue_name=queue).exists():
        raise InvalidInput(
            "queue",
            queue,
            "is no kind's queue here, and no job is in it",
            f"Queues here: {', '.join(queues)}.",
        )


def _named(what: dict[str, str]) -> str:
    return ", ".join(f"{name} {value}" for name, value in what.items() if value) or "all work"


def as_pause(pause: Pause) -> dict[str, Any]:
    """A pause as JSON."""
    return {
        "queue": pause.queue_name, "kind": pause.kind, "tenant": pause.tenant_id, "reason": pause.reason,
        "actor": pause.actor, "since": pause.since,
    }  # fmt: skip


def _as_running(job: Job) -> dict[str, Any]:
    return {
        "id": job.id, "kind": job.kind, "owner": job.lease_owner, "claimed_at": job.claimed_at,
        "lease_expires_at": job.lease_expires_at,
    }  # fmt: skip


def _wait_until_quiet(what: dict[str, str], seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    quiet_since: float | None = None
    while True:
        now = time.monotonic()
        if service.running_under(**what):
            quiet_since = None
        elif quiet_since is None:
            quiet_since = now
        if quiet_since is not None and now - quiet_since >= CALM_SECONDS:
            return True
        if now >= deadline and quiet_since is None:
            return False
        time.sleep(LOOK_SECONDS)


def _owned(what: dict[str, str]) -> Any:
    names = {"queue": "queue_name", "kind": "kind", "tenant": "tenant_id"}
    chosen = {names[name]: value for name, value in what.items() if value}
    jobs = Job.objects.using(database.alias()).filter(status="running", lease_owner__isnull=False, **chosen)
    return jobs.defer(*selection.LARGE_COLUMNS).order_by("id")


def _running(what: dict[str, str]) -> list[Job]:
    return list(_owned(what).filter(lease_expires_at__gte=store.now())[:100])


def _lapsed(what: dict[str, str]) -> list[Job]:
    return list(_owned(what).filter(lease_expires_at__lt=store.now())[:100])


class Settle(Act):
    name = "settle"
    help = "End a job whose hooks can never succeed, without them."
    details = (
        "The project's own row stays as it is. It becomes cancelled if that was requested, otherwise failed."
    )

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        parser.add_argument("id", type=arguments.job_id, metavar="ID", help="the job")
        parser.add_argument(
            "--reason", required=True, metavar="R", help="why the project's row is left as it is"
        )
        parser.add_argument("--yes", action="store_true", help="do it; without it only the job is shown")

    def run(self, options: dict[str, Any], out: Output) -> int:
        if options["yes"]:
            job = service.settle_without_hooks(
                options["id"], actor=actor(), reason=options["reason"], scope=ALL_SCOPES
            )
            if out.json:
                out.document({"id": job.id, "status": job.status})
            out.say(f"Job {job.id} is {job.status}; its hooks did not run.")
            return OK
        job = found(options["id"])
        becomes = "cancelled" if job.cancel_requested_at is not None else "failed"
        if out.json:
            out.document(
                {
                    "dry_run": True,
                    "id": job.id,
                    "status": job.status,
                    "mirror_attempts": job.mirror_attempts,
                    "becomes": becomes,
                }
            )
            return OK
        out.say(
            f"Job {job.id} ({job.kind}) is {job.status}; its hooks have failed {job.mirror_attempts} times."
        )
        subject = f"{job.subject_type}:{job.subject_id}" if job.subject_type else "whatever row it has"
        out.say(f"It would become {becomes}, and {subject} would stay as it is.")
        out.say("Nothing was changed; add --yes to do it.")
        return OK


def found(job_id: UUID) -> Job:
    """The job, whatever its scope; raises `NotFound`."""
    job = service.get(job_id, scope=ALL_SCOPES)
    if job is None:
        raise NotFound(job_id)
    return job
