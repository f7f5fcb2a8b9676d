"""What becomes of a kind whose worker dies, tried at every place at which it can die.

A death here is not a process's: it is an exception that nothing of the slice gets past. No statement runs after
it, what was open is rolled back, callbacks of a commit are forgotten. Unlike after SIGKILL the step's own
`finally` blocks run, and what they do beside the database is done.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final

from django.apps import apps
from django.core import mail
from django.db import connections, models
from django.db.backends.base.base import BaseDatabaseWrapper

from durable_jobs import database, service, store
from durable_jobs.exceptions import TransactionOwned
from durable_jobs.kinds import Kind
from durable_jobs.models import LIVE, Job
from durable_jobs.reconciler import Reconciler
from durable_jobs.testing.jobs import MOST_SLICES, Killed, claim, finish, process_owner, work

MOST_CRASHES: Final = 500
MOST_SHOWN: Final = 10

Effects = Callable[[Job], Iterable[Hashable]]


@dataclass(frozen=True)
class Difference:
    """An effect that a crash changed: `found` times instead of `expected`, when the worker died at `where`."""

    where: str
    effect: Hashable
    expected: int
    found: int

    def __str__(self) -> str:
        return f"{self.effect!r}: {self.found} instead of {self.expected}, when it died {self.where}"


@dataclass
class CrashReport:
    """What `crash_test` has found.

    `crashes` is how many deaths were tried, one in each run. `repeated` are effects that were there more often than after
    an undisturbed run, `missing` those that were there less often, `ended` the runs whose job came to another
    end, each as (where, status, status undisturbed).
    """

    crashes: int = 0
    repeated: list[Difference] = field(default_factory=list)
    missing: list[Difference] = field(default_factory=list)
    ended: list[tuple[str, str, str]] = field(default_factory=list)

    @property
    def exact(self) -> bool:
        """Whether no death was to be seen afterwards."""
        return not (self.repeated or self.missing or self.ended)

    def assert_exact(self) -> None:
        """AssertionError unless everything happened once, wherever the worker died."""
        if not self.exact:
            raise AssertionError(str(self))

    def assert_nothing_missing(self) -> None:
        """AssertionError when something did not happen; for kinds whose effects may be repeated."""
        if self.missing or self.ended:
            raise AssertionError(str(self))

    def __str__(self) -> str:
        lines = [f"{self.crashes} crashes"]
        for title, found in (("Repeated", self.repeated), ("Missing", self.missing), ("Ended", self.ended)):
            if found:
                lines.append(f"{title} ({len(found)}):")
                lines += [f"  {_told(one)}" for one in found[:MOST_SHOWN]]
        return "\n".join(lines)


def crash_test(
    kind: str | type[Kind],
    input: Any = None,
    *,
    prepare: Callable[[], Mapping[str, Any] | None] | None = None,
    effects: Effects | None = None,
    ignore: Iterable[str] = (),
    most_crashes: int = MOST_CRASHES,
    **start: Any,
) -> CrashReport:
    """Run a job once for each place at which its worker can die, kill it there, resume it, and compare.

    The places: after the claim; before each statement, and after one that has written by itself; before and
    after each commit; in the step and while the job finishes. Each is tried in a run of its own, and compared
    with a run that nobody disturbed. A job that its kind parks is redriven, as an operator would.

    `prepare` is called before each run, to make what the job works on; it may answer with options for
    `service.start` (`{"subject": order}`), which `start` holds, too. Make it anew each time: a run that finds the
    work done by the one before has nothing to repeat. `effects(job)` answers with what has happened so far, a
    hashable for each; what was there before the run is subtracted. Without it the effects are the rows of all
    the project's tables and the mails in `django.core.mail.outbox`. Of rows, keys, relations and times are not
    compared, nor fields that `ignore` names ("shop.Order.token"). The job's id is shown as `<job>`.

    Needs real transactions (`TransactionTestCase`, `django_db(transaction=True)`), and raises `TransactionOwned`
    without them. Everything must run in the calling thread. More than `most_crashes` places are tried at equal
    distances.
    """
    if connections[database.alias()].in_atomic_block:
        raise TransactionOwned("crash_test()")
    look = effects or _Rows(frozenset(ignore))
    runs = _Runs(kind, input, start, prepare, look)
    undisturbed = runs.run(None)
    places = range(undisturbed.places)
    if len(places) > most_crashes:
        places = range(0, len(places), -(-len(places) // most_crashes))
    report = CrashReport()
    for place in places:
        outcome = runs.run(place)
        if outcome.where is None:
            continue
        report.crashes += 1
        _compare(report, outcome, undisturbed)
    return report


# --- inside ---


@dataclass
class _Outcome:
    status: str
    effects: Counter[Hashable]
    places: int
    where: str | None


@dataclass
class _Runs:
    kind: str | type[Kind]
    input: Any
    start: Mapping[str, Any]
    prepare: Callable[[], Mapping[str, Any] | None] | None
    look: Effects

    def run(self, place: int | None) -> _Outcome:
        made = (self.prepare() if self.prepare else None) or {}
        job = service.start(self.kind, self.input, **{**self.start, **made}).job
        before = self._seen(job)
        death = _Death(place)
        with suppress(Killed):
            _live(job, death)
        ended = _resumed(job)
        effects = self._seen(job)
        effects.subtract(before)
        return _Outcome(ended.status, effects, death.places, death.where)

    def _seen(self, job: Job) -> Counter[Hashable]:
        return Counter(_without_id(effect, str(job.id)) for effect in self.look(job))


def _live(job: Job, death: _Death) -> None:
    """Run slices to the end, or to the death."""
    for _ in range(MOST_SLICES):
        current = store.get(job.id)
        if current is None or current.status not in LIVE:
            return
        claimed = claim(current)
        with death.waiting():
            work(claimed)
    raise AssertionError(f"Job {job.id} of {job.kind} has not ended after {MOST_SLICES} slices.")


def _resumed(job: Job) -> Job:
    """The job at its end, after a repair as by the supervisor that has reaped the worker."""
    Reconciler(process_owner()).repair_dead(process_owner())
    current = store.get(job.id)
    assert current is not None
    if current.parked_at is not None and current.error_code in ("orphaned", "poison"):
        service.redrive(job.id, actor="crash_test", force=True)
    elif current.status not in LIVE:
        return current
    return finish(job)


class _Death:
    """Comes at the place of a number, counted from 0; with None it never comes, and the places are counted."""

    def __init__(self, place: int | None) -> None:
        self.place = place
        self.places = 0
        self.where: str | None = None

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """The block is in danger. What is left open at its end is rolled back."""
        with ExitStack() as stack:
            for connection in connections.all():
                stack.enter_context(connection.execute_wrapper(self._execute))
                stack.enter_context(self._commits(connection))
            try:
                self._pass("after the claim", connections[database.alias()])
                yield
            finally:
                if self.where is not None:
                    for connection in connections.all(initialized_only=True):
                        connection.run_on_commit = []
                        database.clear(connection.alias)

    def _execute(self, execute: Any, sql: str, params: Any, many: bool, context: dict[str, Any]) -> Any:
        connection = context["connection"]
        ends = sql.startswith(("ROLLBACK TO SAVEPOINT", "RELEASE SAVEPOINT"))
        if self.where is not None:
            # What is left is the way out, on which savepoints are rolled back.
            if ends:
                return execute(sql, params, many, context)
            raise Killed
        if ends:
            return execute(sql, params, many, context)
        shown = f"{' '.join(sql.split()):.60}"
        self._pass(f"before {shown!r}", connection)
        result = execute(sql, params, many, context)
        if not connection.in_atomic_block and not sql.lstrip().upper().startswith(("SELECT", "BEGIN")):
            self._pass(f"after {shown!r}", connection)
        return result

    @contextmanager
    def _commits(self, connection: BaseDatabaseWrapper) -> Iterator[None]:
        commit = connection.commit
        connection.commit = partial(self._commit, commit, connection)  # type: ignore[method-assign]
        try:
            yield
        finally:
            del connection.commit

    def _commit(self, commit: Callable[[], None], connection: BaseDatabaseWrapper) -> None:
        if self.where is None:
            self._pass("before a commit", connection)
            commit()
            self._pass("after a commit", connection)
        else:
            self._strike(connection)

    def _pass(self, where: str, connection: BaseDatabaseWrapper) -> None:
        number, self.places = self.places, self.places + 1
        if number == self.place:
            self.where = f"{where} (place {number})"
            self._strike(connection)

    def _strike(self, connection: BaseDatabaseWrapper) -> None:
        # A block rolls back by itself, except at its commit: then restoring autocommit would commit what is open,
        # and run what waits for a commit.
        if not connection.in_atomic_block:
            connection.rollback()
        connection.run_on_commit = []
        raise Killed


class _Rows:
    """The rows of the project's tables and the mails sent, without what differs from run to run."""

    def __init__(self, ignored: frozenset[str]) -> None:
        self._ignored = ignored

    def __call__(self, job: Job) -> Iterator[Hashable]:
        for model in apps.get_models():
            if model._meta.app_label != "durable_jobs" and model._meta.managed and not model._meta.proxy:
                yield from self._rows(model)
        for message in getattr(mail, "outbox", ()):
            yield ("mail", message.subject, *message.to)

    def _rows(self, model: type[models.Model]) -> Iterator[Hashable]:
        names = [item.attname for item in model._meta.concrete_fields if self._compared(model, item)]
        using = database.alias()
        for values in model._base_manager.using(using).values_list(*names or ["pk"]):
            facts = zip(names, values, strict=True) if names else ()
            yield (model._meta.label, *(f"{name}={value!r}" for name, value in facts))

    def _compared(self, model: type[models.Model], item: models.Field[Any, Any]) -> bool:
        varying = (models.DateField, models.TimeField, models.UUIDField, models.AutoField)
        return (
            not item.primary_key
            and not item.is_relation
            and not isinstance(item, varying)
            and f"{model._meta.label}.{item.name}" not in self._ignored
        )


def _without_id(effect: Hashable, job_id: str) -> Hashable:
    if isinstance(effect, str):
        return effect.replace(job_id, "<job>")
    if isinstance(effect, tuple):
        return tuple(_without_id(part, job_id) for part in effect)
    return effect


def _compare(report: CrashReport, outcome: _Outcome, undisturbed: _Outcome) -> None:
    where = outcome.where or ""
    if outcome.status != undisturbed.status:
        report.ended.append((where, outcome.status, undisturbed.status))
    for effect in outcome.effects.keys() | undisturbed.effects.keys():
        found, expected = outcome.effects[effect], undisturbed.effects[effect]
        if found != expected:
            target = report.repeated if found > expected else report.missing
            target.append(Difference(where, effect, expected, found))


def _told(one: Difference | tuple[str, str, str]) -> str:
    if isinstance(one, Difference):
        return str(one)
    where, status, undisturbed = one
    return f"{status} instead of {undisturbed}, when it died {where}"
