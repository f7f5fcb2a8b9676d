"""Every error of the package, what class an error has, and how it is written down.

A *refusal* (`Refusal`) means that nothing was changed. It carries a stable `code` for programs and a
sentence for people that names what was wrong, the value and the way out. The constructors take facts
and write the sentence; the facts stay readable as attributes.

Every error can be pickled; facts that are no plain values then become text.
"""

from __future__ import annotations

import math
import re
import reprlib
import traceback as tracebacks
from collections.abc import Callable, Collection
from dataclasses import dataclass
from datetime import UTC, datetime
from difflib import get_close_matches
from email.utils import parsedate_to_datetime
from enum import StrEnum
from typing import Any, ClassVar, TypeVar
from uuid import UUID

MARKER = "durable_jobs_class"
"""Name of the attribute that gives an exception its class (see `classify`)."""

LONGEST_DELAY = 366 * 86_400.0
"""Longest delay in seconds that a step may ask for: longer ones are typing errors that hide a job."""

CODE_LENGTH = 100
TYPE_LENGTH = 200
MESSAGE_LENGTH = 10_000
TRACEBACK_LENGTH = 50_000

UNKNOWN_ERROR = "Unknown error"

T = TypeVar("T")

_UNSTORABLE = re.compile("[\x00\ud800-\udfff]")
_PLAIN = (str, int, float, UUID, type(None))
_MARK_LENGTH = 60  # room for the mark of `cut`


class ErrorClass(StrEnum):
    """What the failure of a slice means for its job."""

    TRANSIENT = "transient"
    """Try again after a delay, until the kind's `retry` is used up."""

    TERMINAL = "terminal"
    """Fail now; an operator may redrive."""

    UNRECOVERABLE = "unrecoverable"
    """Fail now; a redrive needs force."""


class DurableJobsError(Exception):
    """Base of every error of this package."""

    code: str | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (type(self), self.args, _portable(self.__dict__))


class Refusal(DurableJobsError):
    """The call was refused, nothing was changed, and `code` says why."""

    code: str


# Raised by a step


class _StepError(DurableJobsError):
    """An error whose class the author of a step has chosen."""

    durable_jobs_class: ClassVar[ErrorClass]

    def __init__(self, message: str = "", *, code: str | None = None) -> None:
        super().__init__(message)
        self.code = code


class TransientError(_StepError):
    """Raise it in a step: try again later. `code` is stored with the job."""

    durable_jobs_class = ErrorClass.TRANSIENT


class TerminalError(_StepError):
    """Raise it in a step: the job fails now, and an operator may redrive it."""

    durable_jobs_class = ErrorClass.TERMINAL


class UnrecoverableError(_StepError):
    """Raise it in a step: the job fails now, and a redrive needs force."""

    durable_jobs_class = ErrorClass.UNRECOVERABLE


class RetryAfter(DurableJobsError):
    """Raise it in a step: come back in so many seconds; no failure is counted.

    `seconds` is a number from 0 to `LONGEST_DELAY`; anything else raises `InvalidInput`.
    """

    seconds: float

    def __init__(self, seconds: float) -> None:
        is_number = isinstance(seconds, int | float) and not isinstance(seconds, bool)
        if not is_number or not 0 <= seconds <= LONGEST_DELAY:
            raise InvalidInput(
                "RetryAfter.seconds",
                seconds,
                "is not a delay that a job can wait",
                f"Give a number of seconds from 0 to {LONGEST_DELAY:,.0f}.",
            )
        self.seconds = float(seconds)
        super().__init__(f"Come back in {self.seconds:g} s.")

    @classmethod
    def from_header(cls, value: str | None, default: float = 30) -> RetryAfter:
        """From the value of an HTTP `Retry-After` header: seconds or a date (RFC 9110, 10.2.3).

        `default` seconds where there is none or it cannot be read. A time that has passed is 0 seconds, one
        beyond `LONGEST_DELAY` is that.
        """
        seconds = _seconds_of_header(value or "")
        if seconds is None:
            return cls(default)
        return cls(min(max(seconds, 0.0), LONGEST_DELAY))


class Park(DurableJobsError):
    """Raise it in a step: the job fails and waits for a human, with this code as the reason."""

    code: str

    def __init__(self, code: str, message: str = "") -> None:
        self.code = code
        self.message = message
        super().__init__(message or f"The job was parked: {code}.")


class Aborted(DurableJobsError):
    """Raise it in an executor of a `JobManager` that ends because its `stop` was set: the job is cancelled.

    Without `stop` it counts as any other error.
    """

    code = "aborted"


class LeaseLost(BaseException):
    """The lease of the running slice belongs to somebody else: stop, change nothing more.

    Control flow of a slice, no failure. Derived from BaseException so that `except Exception` in a step
    cannot swallow it.
    """

    code = "lease_lost"

    def __init__(self, job_id: UUID, owner: str, epoch: int) -> None:
        self.job_id, self.owner, self.epoch = job_id, owner, epoch
        super().__init__(f"The lease of {owner} on job {job_id} is lost.")

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (type(self), self.args, _portable(self.__dict__))


def _seconds_of_header(value: str) -> float | None:
    try:
        seconds = float(value)
        return None if math.isnan(seconds) else seconds
    except ValueError:
        pass
    try:
        moment = parsedate_to_datetime(value)
    except (ValueError, TypeError, OverflowError):
        return None
    # A date without a zone, or with "-0000", is in UTC.
    aware = moment if moment.tzinfo else moment.replace(tzinfo=UTC)
    return (aware - datetime.now(UTC)).total_seconds()


# Refusals of input and identity


class InvalidInput(Refusal, ValueError):
    """A value that was passed in cannot be accepted.

    `field` is the path of the value (`input.rows[3].name`), `problem` continues the sentence "<field> …",
    `way_out` is a sentence.
    """

    code = "E_JOB_INPUT_INVALID"

    def __init__(self, field: str, value: object, problem: str, way_out: str) -> None:
        self.field, self.value, self.problem, self.way_out = field, value, problem, way_out
        super().__init__(f"{field} {problem} (given: {shown(value)}). {way_out}")


class ScopeMismatch(Refusal):
    """Scope, operation or key of the caller differ from the job's.

    The job's own value is not told: it may belong to somebody else.
    """

    code = "E_JOB_SCOPE_MISMATCH"

    def __init__(self, field: str, given: object, job_id: UUID | str | None = None) -> None:
        self.field, self.given, self.job_id = field, given, job_id
        job = f"job {job_id}" if job_id else "the job"
        super().__init__(
            f"{field} {shown(given)} is not that of {job}. Pass the {field} that it was made with."
        )


class IdempotencyConflict(Refusal):
    """The idempotency key was used before, with another input."""

    code = "E_JOB_IDEMPOTENCY_CONFLICT"

    def __init__(self, key: str, job_id: UUID | None = None) -> None:
        self.key, self.job_id = key, job_id
        super().__init__(
            f"idempotency_key {shown(key)} belongs to job {job_id}, which was started with another input. "
            "Pass the same input again, or another key."
        )


class LeaseLostError(Refusal):
    """The caller's lease is not, or no longer, the one that the job has.

    `reason` says which of the facts it was that did not hold, where that is known.
    """

    code = "E_JOB_LEASE_LOST"
    durable_jobs_class = ErrorClass.TRANSIENT

    def __init__(
        self, job_id: UUID | str | None, owner: str | None = None, epoch: int | None = None, reason: str = ""
    ) -> None:
        self.job_id, self.owner, self.epoch, self.reason = job_id, owner, epoch, reason
        job = f"job {job_id}" if job_id else "its job"
        super().__init__(
            f"The lease of {owner or 'the caller'} on {job} is lost{f' ({reason})' if reason else ''}, "
            "and nothing was written. "
            "Stop this work: whoever holds the job now continues it from its last checkpoint."
        )


class NotReclaimable(Refusal):
    """The job is not in a state in which it can be claimed or taken over."""

    code = "E_JOB_NOT_RECLAIMABLE"

    def __init__(self, job_id: UUID | str, reason: str = "it is unknown here or not free") -> None:
        self.job_id, self.reason = job_id, reason
        super().__init__(
            f"Job {job_id} cannot be claimed: {reason}. Read its state again before trying once more."
        )


class TransactionOwned(Refusal):
    """The call opens a transaction of its own, and one is open already."""

    code = "E_JOB_TRANSACTION_OWNED"

    def __init__(self, what: str) -> None:
        self.what = what
        super().__init__(
            f"{what} commits a transaction of its own, but one is open on this connection already. "
            "Call it outside atomic() (and outside ATOMIC_REQUESTS)."
        )


class DeadlineExceeded(Refusal):
    """The caller's deadline passed first; everything was rolled back."""

    code = "E_JOB_DEADLINE_EXCEEDED"

    def __init__(self, what: str = "The operation") -> None:
        self.what = what
        super().__init__(
            f"{what} did not finish before its deadline and was rolled back. "
            "Start again with a later deadline."
        )


class LockPolicyConflict(Refusal):
    """Somebody changed the connection's lock wait inside a transaction that had bounded it."""

    code = "E_JOB_LOCK_POLICY_CONFLICT"

    def __init__(self, ours: object = None, found: object = None) -> None:
        self.ours, self.found = ours, found
        super().__init__(
            f"The lock wait of the connection was set to {shown(ours)} for this operation and is now "
            f"{shown(found)}; everything was rolled back. Do not change it inside the operation."
        )


# Refusals of operators' and authors' calls


class LockKeyHeld(Refusal):
    """Another live job of the scope holds the lock key."""

    code = "lock_key_held"
    durable_jobs_class = ErrorClass.TERMINAL

    def __init__(self, lock_key: str, held_by: UUID | None = None) -> None:
        self.lock_key, self.held_by = lock_key, held_by
        holder = f"job {held_by}" if held_by else "another live job"
        super().__init__(
            f"lock_key {shown(lock_key)} is held by {holder}. Wait until that job has ended, or cancel it."
        )


class UnknownKind(Refusal):
    """No kind of this name is registered in this process."""

    code = "unknown_kind"

    def __init__(
        self, name: object, known: Collection[str] = (), modules: Collection[str] = ("jobs",)
    ) -> None:
        self.name = name
        meant = get_close_matches(name, known, 1) if isinstance(name, str) else []
        guess = f"Did you mean {shown(meant[0])}? " if meant else ""
        known_here = f"Known here: {', '.join(sorted(known))}." if known else "No kind is known here."
        super().__init__(
            f"kind {shown(name)} is not registered in this process. {guess}{known_here} "
            f"{where_kinds_are_found(modules)}"
        )


def where_kinds_are_found(modules: Collection[str]) -> str:
    """What to look at when a kind is missing, in a sentence; `modules` as in `DURABLE_JOBS['DISCOVER']`."""
    named = " or ".join(f"{name.replace('.', '/')}.py" for name in modules) or "no module at all"
    return (
        f"Kinds are classes with @register in {named} (DURABLE_JOBS['DISCOVER']) of an app in INSTALLED_APPS."
    )


class NotRedrivable(Refusal):
    """The job is not in a state from which it can be run again."""

    code = "not_redrivable"

    def __init__(self, job_id: UUID, status: str, reason: str = "") -> None:
        self.job_id, self.status, self.reason = job_id, status, reason
        super().__init__(
            f"Job {job_id} is {status}{f' ({reason})' if reason else ''} and cannot be redriven. "
            "A job can be redriven when it has failed, waits for its retry, or runs past its lease; "
            "otherwise start a new one."
        )


class ForceRequired(Refusal):
    """The job failed as unrecoverable: redriving it needs force."""

    code = "unrecoverable_requires_force"

    def __init__(self, job_id: UUID) -> None:
        self.job_id = job_id
        super().__init__(
            f"Job {job_id} failed as unrecoverable: running it again is expected to fail again. "
            "Repair the cause, then redrive with force."
        )


class RestartNotAllowed(Refusal):
    """The kind does not allow its jobs to begin again from the start."""

    code = "restart_not_allowed"

    def __init__(self, job_id: UUID, kind: str) -> None:
        self.job_id, self.kind = job_id, kind
        super().__init__(
            f"Job {job_id} cannot begin again from the start: kind {kind} does not set allow_restart. "
            "Redrive it from its checkpoint."
        )


class NotHeld(Refusal):
    """The job is not one that waits for its release."""

    code = "not_held"

    def __init__(self, job_id: UUID, status: str, reason: str = "") -> None:
        self.job_id, self.status, self.reason = job_id, status, reason
        super().__init__(
            f"Job {job_id} is {status}{f' ({reason})' if reason else ''} and cannot be released. "
            "A job can be released once, when it was started with hold=True."
        )


class NotCancellable(Refusal):
    """The job has ended already."""

    code = "not_cancellable"

    def __init__(self, job_id: UUID, status: str) -> None:
        self.job_id, self.status = job_id, status
        super().__init__(f"Job {job_id} is {status} already: there is nothing left to cancel.")


class NotSettleable(Refusal):
    """The job is not one that only its hooks keep from ending."""

    code = "not_settleable"

    def __init__(self, job_id: UUID, status: str, mirror_attempts: int) -> None:
        self.job_id, self.status, self.mirror_attempts = job_id, status, mirror_attempts
        super().__init__(
            f"Job {job_id} is {status}, and its hooks have failed {mirror_attempts} times: there is nothing to settle. "
            "Settling is for live jobs that do not run and whose hooks have failed."
        )


class Busy(Refusal):
    """The job's row is locked just now."""

    code = "busy"

    def __init__(self, job_id: UUID | None = None) -> None:
        self.job_id = job_id
        super().__init__(f"{f'Job {job_id}' if job_id else 'The job'} is committing just now. Try again.")


class NotFound(Refusal):
    """No such job in the scope; a job of another scope gives the same answer."""

    code = "not_found"

    def __init__(self, job_id: object) -> None:
        self.job_id = job_id
        named = str(job_id) if isinstance(job_id, UUID) else shown(job_id)
        super().__init__(f"There is no job {named} in this scope. Check the id and the scope.")


class InvalidKind(Refusal):
    """The definition of a kind is wrong; raised when it is registered."""

    code = "invalid_kind"

    def __init__(self, kind: str, problem: str, way_out: str) -> None:
        self.kind, self.problem, self.way_out = kind, problem, way_out
        super().__init__(f"kind {kind}: {problem}. {way_out}")


class DirectWrite(Refusal, TypeError):
    """Rows of this package are written by its own statements alone; a save would go around the lease."""

    code = "direct_write"

    def __init__(self, model: str) -> None:
        self.model = model
        super().__init__(
            f"{model} rows cannot be written or deleted directly: that would go around the lease. "
            "Use durable_jobs.service (start, cancel, redrive, …)."
        )


# Failures of the mechanism


class DomainMirrorMismatch(DurableJobsError):
    """A hook did not bring the project's own row in line; the transition was rolled back."""

    code = "domain_mirror_mismatch"

    def __init__(
        self, job: object, rows: object = 0, hook: str = "on_transition", disagreement: str = ""
    ) -> None:
        self.job_id = getattr(job, "id", job)
        self.kind, self.rows, self.hook = getattr(job, "kind", None), rows, hook
        super().__init__(
            f"{hook} of kind {self.kind} answered {shown(rows)} for job {self.job_id}, so the project's row "
            "does not agree with the job. "
            + (
                disagreement
                or "Return how many rows agree now (at least 1), or ROW_GONE when the row was deleted."
            )
        )


class HookFailed(DurableJobsError):
    """A hook of a transition raised, or its answer did not agree; the transition was rolled back.

    `error` is what the hook raised (also the `__cause__`). The failure has been counted on the row.
    """

    code = "hook_failed"

    def __init__(self, job_id: UUID, kind: str, status: str, error: BaseException) -> None:
        self.job_id, self.kind, self.status, self.error = job_id, kind, status, error
        super().__init__(
            f"A hook of kind {kind} failed while job {job_id} became {status}; nothing was changed: "
            f"{type(error).__name__}: {shown(_message(error))}"
        )


class NoFurtherAttempts(DurableJobsError):
    """Tells a transport that the job has ended and the delivery must not be repeated.

    Transports recognise it by its name, as `classify` does by the marker.
    """

    code = "no_further_attempts"

    def __init__(self, reason: str) -> None:
        self.reason = reason
        super().__init__(f"No further attempts: {reason}.")


# What the result of a task tells (`durable_jobs.tasks`)


class TaskNotLoaded(DurableJobsError):
    """The task of a stored result is not in this process's code, or its backend or queue not in TASKS.

    Transient: during a deploy a newer process may have it.
    """

    code = "task_not_loaded"
    durable_jobs_class = ErrorClass.TRANSIENT

    def __init__(self, path: str, problem: str) -> None:
        self.path, self.problem = path, problem
        super().__init__(
            f"The task {shown(path)} cannot be loaded: {problem}. Put it back under this name, or cancel the job."
        )


class TaskCancelled(DurableJobsError):
    """A person cancelled the task's job. Never raised: it stands in the result's `errors`."""

    code = "task_cancelled"

    def __init__(self, job_id: UUID | str) -> None:
        self.job_id = job_id
        super().__init__(f"Job {job_id} was cancelled.")


class WorkerLost(DurableJobsError):
    """The worker died, or was cut off, while it ran the task. Never raised: it stands in the result's `errors`."""

    code = "worker_lost"

    def __init__(self, worker: str, problem: str = "") -> None:
        self.worker, self.problem = worker, problem
        super().__init__(problem or f"The worker {worker} was lost while it ran the task.")


# Reading errors


@dataclass(frozen=True, slots=True)
class ErrorFacts:
    """An error as it is stored: cleaned and cut, so that writing it down cannot fail."""

    error_class: ErrorClass
    code: str | None
    type: str
    message: str
    traceback: str


def classify(error: object) -> ErrorClass:
    """Give the class of an error, read from its `durable_jobs_class` attribute.

    The attribute decides, never the type, so that an error that was pickled, or comes from a second copy
    of this package, keeps its class. No attribute or an unknown value means transient.
    """
    marker = _asked(lambda: getattr(error, MARKER, None), None)
    if not isinstance(marker, str):
        return ErrorClass.TRANSIENT
    try:
        return ErrorClass(marker)
    except ValueError:
        return ErrorClass.TRANSIENT


def describe(error: object) -> ErrorFacts:
    """Write an error down; never raises, whatever the error does.

    `code` is the error's own code when that is a nonblank string, else None. `message` is its text; when
    that is blank, the name of its class; for what is no exception and no text, "Unknown error". Limits in
    characters: code 100, type 200, message 10,000 and traceback 50,000, these two keeping head and tail.
    """
    return ErrorFacts(
        error_class=classify(error),
        code=_code(error),
        type=_type_name(error),
        message=cut(clean(_message(error)), MESSAGE_LENGTH),
        traceback=cut(clean(_traceback(error)), TRACEBACK_LENGTH),
    )


def clean(text: str) -> str:
    """Replace what a database cannot store in a text, NUL and lone surrogates, by U+FFFD."""
    return _UNSTORABLE.sub("\N{REPLACEMENT CHARACTER}", text)


def plain_text(field: str, value: object, longest: int, way_out: str = "") -> str:
    """The value, if it is a text that can be stored: not blank, at most so many characters; else `InvalidInput`."""
    usual = f"Use a text of 1 to {longest:,} characters."
    if not isinstance(value, str):
        raise InvalidInput(field, value, "is not a text", way_out or usual)
    if not value.strip():
        raise InvalidInput(field, value, "is blank", way_out or usual)
    if len(value) > longest:
        raise InvalidInput(field, value, f"has {len(value):,} characters", usual)
    if clean(value) != value:
        raise InvalidInput(field, value, "holds NUL or a lone surrogate", "Use plain text.")
    # A str subclass (SafeString) may be adapted differently by a driver.
    return str.__str__(value)


def cut(text: str, limit: int) -> str:
    """Shorten a text to `limit` characters, keeping its head and its tail."""
    if len(text) <= limit:
        return text
    room = limit - _MARK_LENGTH
    if room <= 0:
        return text[:limit]
    tail = room // 2
    mark = f"\n… {len(text) - room:,} characters left out …\n"
    return text[: room - tail] + mark + text[len(text) - tail :]


def shown(value: object, limit: int = 200) -> str:
    """Show a value in a message: its `repr`, cut to `limit` characters; never raises."""
    text = clean(_asked(lambda: _SHORT.repr(value), f"<{type(value).__name__}>"))
    return text if len(text) <= limit else text[: limit - 1] + "…"


class _Short(reprlib.Repr):
    def __init__(self) -> None:
        super().__init__()
        self.maxstring = self.maxother = self.maxlong = 160
        self.maxlevel = 3


_SHORT = _Short()


def _code(error: object) -> str | None:
    if isinstance(error, SystemExit):  # its code is an exit status or a message
        return None
    code = _asked(lambda: getattr(error, "code", None), None)
    if not isinstance(code, str) or not code.strip():
        return None
    return clean(str.__str__(code))[:CODE_LENGTH]


def _type_name(error: object) -> str:
    cls = type(error)
    name = f"{cls.__module__}.{cls.__qualname__}".removeprefix("builtins.")
    return clean(name)[-TYPE_LENGTH:]


def _message(error: object) -> str:
    if isinstance(error, str):
        return str.__str__(error)
    if not isinstance(error, BaseException):
        return UNKNOWN_ERROR
    text = _asked(lambda: str.__str__(str(error)), UNKNOWN_ERROR)
    return text if text.strip() else type(error).__name__


def _traceback(error: object) -> str:
    if not isinstance(error, BaseException):
        return ""
    return _asked(lambda: "".join(tracebacks.format_exception(error)), "")


def _asked(ask: Callable[[], T], otherwise: T) -> T:
    """Ask a foreign object, whose answer may be any error, SystemExit included."""
    try:
        return ask()
    except BaseException:
        return otherwise


def _portable(facts: dict[str, Any]) -> dict[str, Any]:
    return {name: fact if isinstance(fact, _PLAIN) else shown(fact) for name, fact in facts.items()}


def _rebuild(cls: type[BaseException], args: tuple[Any, ...], facts: dict[str, Any]) -> BaseException:
    error = cls.__new__(cls, *args)
    error.__dict__.update(facts)
    return error
