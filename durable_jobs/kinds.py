"""Kinds of job: what an author writes, what a step may answer, and the registry that finds them by name.

A kind is a class with a `step`. It lives in a module named in `DURABLE_JOBS["DISCOVER"]` (default `jobs`) of
an installed app and is registered once per process::

    from durable_jobs.kinds import Done, Kind, Yield, register

    @register
    class Reindex(Kind):
        name = "catalog.reindex"

        def step(self, ctx):
            ...
            return Done({"indexed": 41_200})

Whatever is wrong with a kind is refused by `register` with `InvalidKind`, when the process starts, so that
nothing of it is found out by a job.
"""

from __future__ import annotations

import difflib
import enum
import inspect
import logging
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any, Final, Literal, TypeVar
from uuid import UUID

from django import forms
from django.apps import AppConfig, apps
from django.core.exceptions import FieldDoesNotExist, ValidationError
from django.db import models, router
from django.utils.functional import Promise
from django.utils.module_loading import module_has_submodule

from durable_jobs import database, exceptions
from durable_jobs.conf import MANUAL_QUEUE, QUEUE_NAME, config
from durable_jobs.exceptions import (
    LONGEST_DELAY,
    ErrorClass,
    InvalidInput,
    InvalidKind,
    RetryAfter,
    UnknownKind,
    UnrecoverableError,
    shown,
)
from durable_jobs.logs import log

if TYPE_CHECKING:
    from durable_jobs.batch import BatchKind
    from durable_jobs.models import Job
    from durable_jobs.runner import SliceContext

__all__ = [
    "KEEP",
    "ROW_GONE",
    "BatchKind",
    "Cancelled",
    "Done",
    "ErrorClass",
    "InvalidKind",
    "Kind",
    "Outcome",
    "Retry",
    "RetryAfter",
    "StatusMirror",
    "UnknownKind",
    "Yield",
    "all_kinds",
    "classify",
    "discover",
    "find",
    "get",
    "names",
    "problems",
    "register",
    "unregister",
]

MAX_NAME_LENGTH: Final = 200
PERMISSION_NAME: Final = re.compile(r"[A-Za-z_]\w*\.\w+")
DOTTED_PATH: Final = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)+")
ORPHAN_POLICIES: Final = ("park", "redrive")
BACKOFFS: Final = ("exponential", "fixed")
DAY: Final = 86_400


class Sentinel(enum.Enum):
    """Values that stand for themselves where None and numbers mean something else."""

    ROW_GONE = "row gone"
    KEEP = "keep"

    def __repr__(self) -> str:
        return self.name


ROW_GONE: Final = Sentinel.ROW_GONE
"""A hook's answer when its row was deleted: nothing is left that could agree; the job settles and says so."""

KEEP: Final = Sentinel.KEEP
"""Leave the stored value as it is."""

HookAnswer = int | Literal[Sentinel.ROW_GONE]
"""How many rows agree with the job now (1 or more), or `ROW_GONE`."""


@dataclass(frozen=True)
class Done:
    """The work is finished; `result` (JSON) is stored on the job."""

    result: Any = None


@dataclass(frozen=True)
class Yield:
    """Hand the job back with its checkpoint, due again after so many seconds (0 = at once, at most 366 days).

    Counts no failure. A time that is not one raises `UnrecoverableError` with the code `bad_outcome`: a
    mistake in the program must not repeat work.
    """

    after: float = 0

    def __post_init__(self) -> None:
        if not _is_number(self.after) or not 0 <= self.after <= LONGEST_DELAY:
            raise UnrecoverableError(
                f"Yield(after={shown(self.after)}): give a number of seconds from 0 to {LONGEST_DELAY:,.0f}.",
                code="bad_outcome",
            )


@dataclass(frozen=True)
class Cancelled:
    """The step stopped because of a cancel; the job ends `cancelled` with its hooks."""


Outcome = Done | Yield | Cancelled


@dataclass(frozen=True)
class Retry:
    """How often and how late a failed slice is tried again.

    `failures` in a row (1 to 1,000, without a commit between them) end the job. The n-th failure waits
    `first_delay · 2^(n-1)` seconds but never more than `longest_delay`, or always `first_delay` when
    `backoff` is `"fixed"` (delays from 0 to 86,400 seconds).
    """

    failures: int = 5
    first_delay: float = 5
    longest_delay: float = 300
    backoff: str = "exponential"

    def delay(self, failure: int) -> float:
        """Seconds to wait after the `failure`-th failure in a row, counted from 1."""
        if self.backoff == "fixed":
            return float(self.first_delay)
        # Clamped before the power is taken: a counter of thousands must not become a number of a thousand
        # digits.
        doublings = min(max(failure, 1) - 1, 64)
        return float(min(self.first_delay * 2**doublings, self.longest_delay))


class StatusMirror:
    """Keeps the status column of the job's subject in step with the job, in the job's own transactions.

    `model` is the subject's model as `"app_label.ModelName"`, `field` its status column. `open` are the
    values of a row whose work is not finished; `redriven` is one of them, written when an operator runs the
    job again; `completed`, `failed` and `cancelled` are written when the job ends so. A row that finished as
    something else by another way is left alone, and then the job does not end either: the two must agree.

    Written with `QuerySet.update` through the model's base manager: no `save()`, no model signals, no
    `auto_now`. A kind with a mirror is started with a `subject` of that model.
    """

    def __init__(
        self,
        model: str,
        *,
        field: str = "status",
        open: Sequence[Any],
        redriven: Any,
        completed: Any,
        failed: Any,
        cancelled: Any,
    ) -> None:
        self.model_label = model
        self.field = field
        self.open = open
        self.redriven = redriven
        self.completed = completed
        self.failed = failed
        self.cancelled = cancelled

    def on_transition(self, job: Job) -> HookAnswer:
        """Write the target of the job's terminal status; a row already there counts as one that agrees."""
        return self._write(job, *self._ending(job.status))

    def on_redrive(self, job: Job) -> HookAnswer:
        """Open the row again: from failed, or from a row that never noticed the job's end."""
        return self._write(job, *self._opening())

    def disagreement(self, job: Job) -> str:
        """What keeps the row from following the job, and the way out; empty where it is not the row's value."""
        target, from_values = self._opening() if job.finished_at is None else self._ending(job.status)
        for value in self._rows(job).values_list(self.field, flat=True):
            if value not in from_values:
                return (
                    f"{self.model_label} {job.subject_id} has {self.field}={shown(value)}, and becomes "
                    f"{shown(target)} only from {', '.join(map(shown, dict.fromkeys(from_values)))}. Give the row "
                    f"one of these values, or add {shown(value)} to `open` of the kind's StatusMirror."
                )
        return ""

    @property
    def is_plain(self) -> bool:
        """Whether many rows can be written as one by one: no subclass has its own way, and one table holds them."""
        if type(self) is not StatusMirror:
            return False
        try:
            model = self._model()
            table = model._meta.get_field(self.field).model
        except (LookupError, ValueError, FieldDoesNotExist):
            return False
        return table._meta.concrete_model is model._meta.concrete_model

    def lock_open(self, jobs: Sequence[Job]) -> dict[UUID, Any]:
        """The keys of those rows that may become `completed`, by the job's id, locked; it waits for none."""
        model: Any = self._model()
        wanted = {
            job.id: model._meta.pk.to_python(job.subject_id)
            for job in jobs
            if job.subject_id is not None and self._is_row_of_model(job.subject_type)
        }
        rows = model._base_manager.using(database.alias())
        found = rows.filter(
            pk__in=set(wanted.values()), **{f"{self.field}__in": (*self.open, self.completed)}
        )
        locked = set(found.select_for_update(skip_locked=True, no_key=True).values_list("pk", flat=True))
        return {job_id: key for job_id, key in wanted.items() if key in locked}

    def write_completed(self, keys: Sequence[Any]) -> None:
        """Write the target of a completion into these rows, which are locked and open."""
        if keys:
            rows = self._model()._base_manager.using(database.alias())
            rows.filter(pk__in=keys).update(**{self.field: self.completed})

    def check_subject(self, subject_type: str | None) -> None:
        """Refuse with `InvalidInput` a subject (its label) that is not a row of the mirror's model."""
        if subject_type is None or not self._is_row_of_model(subject_type):
            raise InvalidInput(
                "subject",
                subject_type,
                f"is not a row of {self.model_label}, whose {self.field} this kind keeps in step",
                f"Pass subject=<a saved {self.model_label}>.",
            )

    def problems(self) -> list[tuple[str, str]]:
        """What is wrong with the declaration: pairs of problem and way out. Needs the models to be loaded."""
        return list(self._problems())

    def __repr__(self) -> str:
        return f"StatusMirror({self.model_label!r}, field={self.field!r})"

    def _write(self, job: Job, target: Any, from_values: tuple[Any, ...]) -> HookAnswer:
        if job.subject_id is None:
            return ROW_GONE
        if not self._is_row_of_model(job.subject_type):
            raise LookupError(
                f"Job {job.id} has a subject of {job.subject_type}; its kind mirrors {self.model_label}. "
                "Settle the job without hooks, or mirror the model that it was started with."
            )
        rows = self._rows(job)
        matched = rows.filter(**{f"{self.field}__in": from_values}).update(**{self.field: target})
        if not matched and not rows.exists():
            return ROW_GONE
        return matched

    def _ending(self, status: str) -> tuple[Any, tuple[Any, ...]]:
        """The value that the row gets when the job has ended so, and those that it may have before."""
        target = {"completed": self.completed, "failed": self.failed, "cancelled": self.cancelled}[status]
        return target, (*self.open, target)

    def _opening(self) -> tuple[Any, tuple[Any, ...]]:
        return self.redriven, (*self.open, self.failed, self.redriven)

    def _rows(self, job: Job) -> models.QuerySet[Any]:
        return self._model()._base_manager.using(database.alias()).filter(pk=job.subject_id)

    def _model(self) -> type[models.Model]:
        return apps.get_model(self.model_label)

    def _is_row_of_model(self, subject_type: str | None) -> bool:
        try:
            subject = apps.get_model(subject_type or "")._meta.concrete_model
            mirrored = self._model()._meta.concrete_model
        except (LookupError, ValueError):
            return False
        return subject is not None and mirrored is not None and issubclass(subject, mirrored)

    def _problems(self) -> Iterator[tuple[str, str]]:
        try:
            model = self._model()
        except (LookupError, ValueError, TypeError, AttributeError):
            yield (
                f"names the model {shown(self.model_label)}, which no installed app has",
                'Write "app_label.ModelName" of a model of an installed app.',
            )
            return
        alias = database.alias()
        if router.db_for_write(model) != alias:
            yield (
                f"names {self.model_label}, which is written on the database {router.db_for_write(model)!r}, "
                f"while jobs live on {alias!r}: the two cannot change in one transaction",
                "Route the model and durable_jobs to the same database.",
            )
        try:
            field: Any = model._meta.get_field(self.field)
        except (FieldDoesNotExist, TypeError):
            field = None
        if field is None or not getattr(field, "concrete", False) or field.is_relation or field.primary_key:
            yield (
                f"names the field {shown(self.field)}, which is not a plain column of {self.model_label}",
                "Name the column that holds the row's status.",
            )
            return
        yield from self._problems_of_values(field)

    def _problems_of_values(self, field: models.Field[Any, Any]) -> Iterator[tuple[str, str]]:
        if isinstance(self.open, str) or not isinstance(self.open, Sequence) or not self.open:
            yield (
                f"has open={shown(self.open)}, which is not a tuple of values",
                'Give the values of an unfinished row, such as open=("queued", "running").',
            )
            return
        targets = {name: getattr(self, name) for name in ("redriven", "completed", "failed", "cancelled")}
        for name, value in [*(("open", value) for value in self.open), *targets.items()]:
            objection = _objection(field, value)
            if objection:
                yield (
                    f"has {name}={shown(value)}, which the column {self.field} cannot hold: {objection}",
                    "Use one of the column's own values.",
                )
        if self.redriven not in self.open:
            yield (
                f"has redriven={shown(self.redriven)}, which is not among open={shown(self.open)}: a job "
                "that ran again could never end, because its row would not count as unfinished",
                "Add it to open.",
            )


class Kind:
    """A sort of work, and its code. Derive from it, give it a `name` and a `step`, and `register` it.

    One instance serves all jobs of the kind in all threads of the process: keep no state of a job on `self`.
    """

    name: str = ""
    """Stored in each row: at most 200 printable characters. Renaming? Put the old name into `aliases`."""
    aliases: Sequence[str] = ()
    orphan_policy: str = "park"
    """What becomes of a job whose worker died: `"redrive"` runs it again, `"park"` waits for a human."""
    lease_seconds: float = 60
    slice_seconds: float = 300
    """After this time `ctx.should_yield()` says yes."""
    max_slice_seconds: float = 3600
    """Without a commit for so long the slice counts as hung and its lease is renewed no more."""
    retry: Retry = Retry()
    max_orphanings: int = 3
    """Redrives after a worker's death without a commit between; the next such death parks the job."""
    pending_ttl_seconds: float = 900
    """Where messages can be lost: a job that nobody has come for in so many seconds is announced again."""
    max_lost_deliveries: int = 10
    """After so many of those, the log tells each further one as an error; waiting never parks a job."""
    max_running: int | None = None
    """At most so many jobs of the kind run at one time in each scope; a job whose worker died counts until it
    is repaired."""
    allow_restart: bool = False
    """Whether an operator may redrive a job from the start, without its checkpoint."""
    mirror: StatusMirror | None = None
    description: str | Promise = ""
    operator_note: str | Promise = ""
    """Shown before an operator acts on a job, such as "sends e-mail; ask billing first"."""
    runbook_url: str = ""
    input_form: type[forms.BaseForm] | None = None
    """A form whose cleaned values are the input: people may then start jobs of this kind from admin and API."""
    input_serializer: type | str | None = None
    """The same as a serializer of Django REST framework, or its dotted path: the API takes it before the form."""
    public_result: bool = False
    """Whether the user who started a job may read its result."""
    masked_keys: Sequence[str] = ()
    """Keys of input, checkpoint and result whose values no screen shows."""
    required_permissions: Sequence[str] = ()
    """Permissions (`"app_label.codename"`) that an operator needs besides the general ones."""

    @property
    def all_names(self) -> tuple[str, ...]:
        """Its name and its aliases: what rows of this kind may carry."""
        return (self.name, *self.aliases)

    @property
    def queue(self) -> str:
        """The queue that jobs of this kind wait in; a kind names its own with `queue = "imports"`."""
        return config.DEFAULT_QUEUE

    def step(self, ctx: SliceContext) -> Any:
        """Do a slice; answer `Done`, `Yield` or `Cancelled`. May be `async`, may raise `RetryAfter`."""
        raise NotImplementedError

    def on_transition(self, job: Job) -> HookAnswer:
        """Bring the project's own row into agreement with a job that ended, in the same transaction.

        Called when the job completed, failed or was cancelled, perhaps more than once. Answers how many rows
        agree now (a row that was there already counts), or `ROW_GONE`. With fewer than one, everything is
        rolled back.
        """
        return self.mirror.on_transition(job) if self.mirror else 1

    def on_redrive(self, job: Job) -> HookAnswer:
        """Open the project's row again, in the redrive's transaction. Required with `on_transition`."""
        return self.mirror.on_redrive(job) if self.mirror else 1

    def on_cancel(self, job: Job) -> None:
        """Called before `on_transition` when a job ends cancelled, in the same transaction."""

    def after_transition(self, job: Job) -> None:
        """Called after the commit of a job's end: at most once, best effort; its errors are logged only."""

    def after_redrive(self, job: Job) -> None:
        """Called after the commit of a redrive: at most once, best effort; its errors are logged only."""

    def classify(self, error: BaseException) -> ErrorClass | None:
        """The class of an error that the step raised; None leaves it to the error's own marker."""
        return None

    @property
    def has_transition_hook(self) -> bool:
        """Whether a row of the project must agree with the job's end."""
        return self.mirror is not None or overrides(self, "on_transition")

    def __repr__(self) -> str:
        return f"<Kind {self.name}>"

    def _faults(self) -> Iterator[Fault]:
        """Everything that is wrong with the kind's own attributes; the registry refuses the first."""
        yield from _faults_of_names(self)
        yield from _faults_of_hooks(self)
        yield from _faults_of_limits(self)
        yield from _faults_of_texts(self)
        yield from _faults_of_misspellings(self)


def input_of(form: forms.BaseForm) -> dict[str, Any]:
    """The input that a valid form gives: its cleaned values, rows of the project by their primary keys."""
    return {name: _keyed(value) for name, value in form.cleaned_data.items()}


def _keyed(value: Any) -> Any:
    if isinstance(value, models.Model):
        return value.pk
    if isinstance(value, models.QuerySet):
        return [row.pk for row in value]
    return value


MASKED: Final = "••••"


def mask(kind: Kind | None, value: Any) -> Any:
    """A value of input, checkpoint or result as screens may show it: without what the kind's `masked_keys` hold.

    Of an unknown kind nobody knows what to hide, so all of it is.
    """
    if kind is None:
        return None if value is None else MASKED
    if isinstance(value, Mapping):
        return {key: MASKED if key in kind.masked_keys else mask(kind, part) for key, part in value.items()}
    if isinstance(value, list):
        return [mask(kind, part) for part in value]
    return value


def payload(job: Job) -> dict[str, Any]:
    """Input, checkpoint, result and labels of a job by their names, without what its kind masks."""
    kind = find(job.kind)
    return {name: mask(kind, getattr(job, name)) for name in ("input", "checkpoint", "result", "meta")}


def classify(kind: Kind, error: BaseException) -> ErrorClass:
    """The class of an error: by the kind's own word, else by the error's marker, else transient."""
    try:
        own = kind.classify(error)
        if own is not None:
            return ErrorClass(own)
    except KeyboardInterrupt:
        raise
    except BaseException as own_error:
        log("classify_failed", level=logging.ERROR, error=own_error, kind=kind.name)
    return exceptions.classify(error)


# The registry. One per process; every process that may act on a job loads all kinds (AppConfig.ready).

_kinds: dict[str, Kind] = {}
_KindClass = TypeVar("_KindClass", bound=type[Kind])


def register(kind_class: _KindClass) -> _KindClass:
    """Make a kind known to this process; usable as a decorator.

    Registering the very same class again does nothing. Anything wrong with it, and another kind of the same
    name or alias, raises `InvalidKind`.
    """
    if not inspect.isclass(kind_class) or not issubclass(kind_class, Kind):
        raise InvalidKind(
            shown(kind_class), "it is not a class derived from Kind", "Register the class itself."
        )
    if any(type(kind) is kind_class for kind in _kinds.values()):
        return kind_class
    kind = _made(kind_class)
    for fault in kind._faults():
        raise _invalid(kind, fault)
    if apps.models_ready:
        for fault in _faults_of_mirror(kind):
            raise _invalid(kind, fault)
    taken = [name for name in kind.all_names if name in _kinds]
    for name in taken:
        raise _invalid(
            kind,
            Fault(
                "name" if name == kind.name else "aliases",
                name,
                f"already belongs to {_path(_kinds[name])}",
                "Give each kind a name of its own, and take the name out of the other kind's aliases.",
            ),
        )
    _kinds.update(dict.fromkeys(kind.all_names, kind))
    return kind_class


def unregister(name: str) -> Kind:
    """Forget the kind of that name or alias, for tests; raises `UnknownKind`."""
    kind = get(name)
    for known in [known for known, registered in _kinds.items() if registered is kind]:
        del _kinds[known]
    return kind


def find(name: str) -> Kind | None:
    """The kind of that name or alias, or None where this process knows none."""
    return _kinds.get(name)


def get(name: str | type[Kind]) -> Kind:
    """The kind of that name, alias or class; raises `UnknownKind`."""
    if isinstance(name, str):
        kind = _kinds.get(name)
        if kind is None:
            raise unknown(name)
        return kind
    for kind in _kinds.values():
        if type(kind) is name:
            return kind
    raise unknown(getattr(name, "name", None) or name)


def unknown(name: object) -> UnknownKind:
    """The refusal of a name that this process knows no kind of."""
    return UnknownKind(name, _kinds, config.DISCOVER)


def all_kinds() -> list[Kind]:
    """Every kind once, by name."""
    return [kind for name, kind in sorted(_kinds.items()) if name == kind.name]


def names() -> list[str]:
    """Every name that rows may carry, aliases included, sorted."""
    return sorted(_kinds)


def problems() -> list[InvalidKind]:
    """What registration could not check because the app registry was not ready; for a system check."""
    return [_invalid(kind, fault) for kind in all_kinds() for fault in _faults_of_mirror(kind)]


def discover() -> None:
    """Import the modules named in `DISCOVER` from every installed app.

    An app without such a module is passed over, and so is a module without kinds. A module that cannot be
    imported stops the process with its own error.
    """
    for app in apps.get_app_configs():
        for dotted in config.DISCOVER:
            _import_if_present(app, dotted)


def _import_if_present(app: AppConfig, dotted: str) -> None:
    # Asked part by part before the import: an ImportError from inside the module must not look like its
    # absence.
    module = app.module
    for part in dotted.split("."):
        if module is None or not module_has_submodule(module, part):
            return
        module = import_module(f"{module.__name__}.{part}")


# What is refused at registration.


@dataclass(frozen=True)
class Fault:
    """One attribute of a kind that cannot stand: what it is, its value, why not, and the way out."""

    attribute: str
    value: Any
    problem: str
    way_out: str


ABSENT: Final = object()
"""Stands for the value of a fault whose attribute is not there."""

HOOKS: Final[Mapping[str, int]] = {
    "on_transition": 1,
    "on_redrive": 1,
    "on_cancel": 1,
    "after_transition": 1,
    "after_redrive": 1,
    "classify": 1,
}
"""The methods besides `step` that a kind may override, and how many values each is called with."""


def _made(kind_class: type[Kind]) -> Kind:
    try:
        return kind_class()
    except TypeError as error:
        raise InvalidKind(
            f"{kind_class.__module__}.{kind_class.__qualname__}",
            f"it cannot be made without arguments: {error}",
            "Give __init__ no parameters (or no __init__), and leave no method abstract.",
        ) from error


def _faults_of_names(kind: Kind) -> Iterator[Fault]:
    objection = _objection_to_name(kind.name)
    if objection:
        yield Fault("name", kind.name, objection, 'Write a name such as name = "imports.csv".')
    if not _is_sequence(kind.aliases):
        yield Fault(
            "aliases", kind.aliases, "is not a tuple", 'Write aliases = ("old.name",), with the comma.'
        )
        return
    for alias in kind.aliases:
        objection = _objection_to_name(alias)
        if objection:
            yield Fault("aliases", alias, objection, "Write the name that old rows carry.")
        elif alias == kind.name:
            yield Fault("aliases", alias, "is the kind's own name", "Leave it out.")
    if not isinstance(kind.queue, str) or not QUEUE_NAME.fullmatch(kind.queue):
        yield Fault(
            "queue",
            kind.queue,
            "is not a queue's name",
            "Use 1 to 100 letters, digits, dots, dashes and underscores, beginning with a letter or a digit.",
        )
    elif kind.queue == MANUAL_QUEUE:
        yield Fault("queue", kind.queue, "is reserved for jobs that no worker runs", "Choose another name.")


def _objection_to_name(name: object) -> str:
    if not isinstance(name, str):
        return "is not a text"
    if not name.strip():
        return "is blank"
    if len(name) > MAX_NAME_LENGTH:
        return f"is longer than {MAX_NAME_LENGTH} characters"
    if not name.isprintable():
        return "holds control or other unprintable characters"
    if name != name.strip():
        return "begins or ends with a blank"
    return ""


def _faults_of_hooks(kind: Kind) -> Iterator[Fault]:
    yield from _faults_of_step(kind)
    if overrides(kind, "on_transition") and not overrides(kind, "on_redrive") and kind.mirror is None:
        yield Fault(
            "on_redrive",
            ABSENT,
            "is missing beside on_transition: a job that runs again would leave the project's row ended",
            "Define on_redrive, which opens the row again, or declare a mirror = StatusMirror(…).",
        )
    if kind.mirror is not None and not isinstance(kind.mirror, StatusMirror):
        yield Fault(
            "mirror", kind.mirror, "is not a StatusMirror", 'Write mirror = StatusMirror("app.Model", …).'
        )
    for hook, values in HOOKS.items():
        yield from faults_of_call(kind, hook, values)


def _faults_of_step(kind: Kind) -> Iterator[Fault]:
    step = kind.step
    if type(kind).step is Kind.step:
        yield Fault(
            "step",
            ABSENT,
            "is missing",
            "Define step(self, ctx), or derive from BatchKind and define collection and process.",
        )
    elif inspect.isgeneratorfunction(step) or inspect.isasyncgenfunction(step):
        yield Fault(
            "step",
            step,
            "is a generator: calling it would run nothing",
            "There is no yield in a step: return Yield() instead.",
        )
    elif not callable(step):
        yield Fault("step", step, "cannot be called", "Define step(self, ctx).")
    else:
        yield from _faults_of_arguments("step", step, 1)


def faults_of_call(kind: Kind, hook: str, values: int, *, generator: bool = False) -> Iterator[Fault]:
    """A hook, called with so many values, must be a plain method; `generator` says that it may yield."""
    if not overrides(kind, hook):
        return
    method = getattr(kind, hook)
    if not callable(method):
        yield Fault(hook, method, "cannot be called", f"Define {hook} as a method.")
    elif inspect.iscoroutinefunction(method) or inspect.isasyncgenfunction(method):
        yield Fault(hook, method, "is async, but it runs inside a transaction", "Define it with a plain def.")
    elif inspect.isgeneratorfunction(method) and not generator:
        yield Fault(hook, method, "is a generator: calling it would run nothing", "Use return, not yield.")
    else:
        yield from _faults_of_arguments(hook, method, values)


def _faults_of_arguments(name: str, method: Callable[..., Any], values: int) -> Iterator[Fault]:
    try:
        signature = inspect.signature(method)
    except (TypeError, ValueError):
        return
    try:
        signature.bind(*range(values))
    except TypeError:
        yield Fault(
            name,
            f"{name}{signature}",
            f"cannot be called with {values} value{'s' if values > 1 else ''}",
            f"Look at Kind's own {name} for its parameters; self comes first.",
        )


def _faults_of_limits(kind: Kind) -> Iterator[Fault]:
    if kind.orphan_policy not in ORPHAN_POLICIES:
        yield Fault("orphan_policy", kind.orphan_policy, "is unknown", f"Use one of {ORPHAN_POLICIES}.")
    yield from fault_of_number(kind, "lease_seconds", 0.3, DAY)
    yield from fault_of_number(kind, "slice_seconds", 0.001, DAY)
    yield from fault_of_number(kind, "max_slice_seconds", 0.002, 30 * DAY)
    yield from fault_of_number(kind, "pending_ttl_seconds", 1, 30 * DAY)
    yield from fault_of_integer(kind, "max_orphanings", 0, 1000)
    yield from fault_of_integer(kind, "max_lost_deliveries", 0, 1000)
    if (
        _is_number(kind.slice_seconds)
        and _is_number(kind.max_slice_seconds)
        and kind.max_slice_seconds < 2 * kind.slice_seconds
    ):
        yield Fault(
            "max_slice_seconds",
            kind.max_slice_seconds,
            f"is less than twice slice_seconds = {kind.slice_seconds}: a sound slice would count as hung",
            f"Raise it to {2 * kind.slice_seconds} or more, or lower slice_seconds.",
        )
    if kind.max_running is not None:
        yield from fault_of_integer(kind, "max_running", 1, 1_000_000)
    yield from _faults_of_retry(kind)


def _faults_of_retry(kind: Kind) -> Iterator[Fault]:
    retry = kind.retry
    if not isinstance(retry, Retry):
        yield Fault("retry", retry, "is not a Retry", "Write retry = Retry(failures=5, first_delay=5).")
        return
    yield from fault_of_integer(retry, "failures", 1, 1000, attribute="retry.failures")
    yield from fault_of_number(retry, "first_delay", 0, DAY, attribute="retry.first_delay")
    yield from fault_of_number(retry, "longest_delay", 0, DAY, attribute="retry.longest_delay")
    if retry.backoff not in BACKOFFS:
        yield Fault("retry.backoff", retry.backoff, "is unknown", f"Use one of {BACKOFFS}.")
    if (
        _is_number(retry.first_delay)
        and _is_number(retry.longest_delay)
        and retry.first_delay > retry.longest_delay
    ):
        yield Fault(
            "retry.first_delay",
            retry.first_delay,
            f"is longer than longest_delay = {retry.longest_delay}",
            "Raise longest_delay.",
        )


def _faults_of_texts(kind: Kind) -> Iterator[Fault]:
    for attribute in ("description", "operator_note"):
        if not isinstance(getattr(kind, attribute), str | Promise):
            yield Fault(
                attribute, getattr(kind, attribute), "is not a text", "Write a text, or leave it out."
            )
    if not isinstance(kind.runbook_url, str) or not re.fullmatch(r"((https?:/)?/\S+)?", kind.runbook_url):
        yield Fault(
            "runbook_url",
            kind.runbook_url,
            "is not an address that a browser should follow",
            "Write an address that begins with https://, http:// or /.",
        )
    for attribute in ("allow_restart", "public_result"):
        if not isinstance(getattr(kind, attribute), bool):
            yield Fault(attribute, getattr(kind, attribute), "is not a truth value", "Write True or False.")
    for attribute in ("masked_keys", "required_permissions"):
        value = getattr(kind, attribute)
        if not _is_sequence(value) or not all(isinstance(entry, str) and entry for entry in value):
            yield Fault(
                attribute, value, "is not a tuple of texts", f'Write {attribute} = ("…",), with the comma.'
            )
        elif attribute == "required_permissions":
            for permission in value:
                if not PERMISSION_NAME.fullmatch(permission):
                    yield Fault(attribute, permission, "is not a permission", 'Write "app_label.codename".')
    form = kind.input_form
    if form is not None and not (inspect.isclass(form) and issubclass(form, forms.BaseForm)):
        yield Fault("input_form", form, "is not a form class", "Write input_form = MyForm, or leave it out.")
    serializer = kind.input_serializer
    is_path = isinstance(serializer, str) and DOTTED_PATH.fullmatch(serializer)
    if serializer is not None and not is_path and not inspect.isclass(serializer):
        yield Fault(
            "input_serializer",
            serializer,
            "is neither a class nor a dotted path",
            'Write input_serializer = "app.serializers.MyInput", or leave it out.',
        )


def _faults_of_misspellings(kind: Kind) -> Iterator[Fault]:
    """Names that are almost a hook's or a limit's: they would silently do nothing.

    Only names of two words or more are compared, closely, and only where the kind does not also have the
    right one.
    """
    own_classes = [
        cls for cls in type(kind).__mro__ if cls.__module__ not in (__name__, "durable_jobs.batch")
    ]
    own = {name for cls in own_classes if cls is not object for name in vars(cls) if not name.startswith("_")}
    known = [name for cls in type(kind).__mro__ if cls not in own_classes for name in vars(cls)]
    compared = [
        name for name in known if "_" in name.strip("_") and not name.startswith("_") and name not in own
    ]
    for name in sorted(own.difference(known)):
        for meant in difflib.get_close_matches(name, compared, n=1, cutoff=0.9):
            yield Fault(
                name,
                getattr(type(kind), name),
                f"looks like {meant} misspelt",
                f"Write {meant}, or rename it.",
            )


def _faults_of_mirror(kind: Kind) -> Iterator[Fault]:
    if isinstance(kind.mirror, StatusMirror):
        for problem, way_out in kind.mirror.problems():
            yield Fault("mirror", kind.mirror, problem, way_out)


def fault_of_number(
    owner: object, name: str, least: float, most: float, *, attribute: str = ""
) -> Iterator[Fault]:
    value = getattr(owner, name)
    if not _is_number(value) or not least <= value <= most:
        yield Fault(attribute or name, value, "is out of range", f"Use a number from {least} to {most}.")


def fault_of_integer(
    owner: object, name: str, least: int, most: int, *, attribute: str = ""
) -> Iterator[Fault]:
    value = getattr(owner, name)
    if not is_integer(value) or not least <= value <= most:
        yield Fault(
            attribute or name, value, "is out of range", f"Use a whole number from {least} to {most}."
        )


def _invalid(kind: Kind, fault: Fault) -> InvalidKind:
    found = fault.attribute if fault.value is ABSENT else f"{fault.attribute} = {shown(fault.value)}"
    return InvalidKind(
        _path(kind) if _objection_to_name(kind.name) else f"{kind.name} ({_path(kind)})",
        f"{found} {fault.problem}",
        fault.way_out,
    )


def _objection(field: models.Field[Any, Any], value: Any) -> str:
    """Why a column cannot hold a value, or an empty text. Choices count for fields not editable, too."""
    choices = [choice for choice, _ in field.flatchoices]
    if choices and value not in choices:
        return f"its choices are {shown(choices)}"
    if value is None:
        return "" if field.null else "it is not null"
    try:
        field.run_validators(field.to_python(value))
    except (ValidationError, TypeError, ValueError) as error:
        messages = error.messages if isinstance(error, ValidationError) else [str(error)]
        return "; ".join(messages).rstrip(".")
    return ""


def overrides(kind: Kind, name: str) -> bool:
    """Whether a kind has its own method of a name that its base class in this package only stands in for."""
    base = next(cls for cls in type(kind).__mro__ if cls.__module__ in (__name__, "durable_jobs.batch"))
    return getattr(type(kind), name, None) is not getattr(base, name, None)


def _path(kind: Kind) -> str:
    return f"{type(kind).__module__}.{type(kind).__qualname__}"


def is_integer(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _is_sequence(value: object) -> bool:
    return isinstance(value, tuple | list)


def __getattr__(name: str) -> Any:
    # Late, because batch derives from Kind: so it works whichever of the two is imported first.
    if name == "BatchKind":
        from durable_jobs.batch import BatchKind

        return BatchKind
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
