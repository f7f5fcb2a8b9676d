"""The settings of the package: `settings.DURABLE_JOBS`, a dictionary, with a typed default for each name.

`config.GRACE` reads through at every access, so `override_settings` works. Reading a wrong value raises
ImproperlyConfigured, which names the setting and what is allowed; the system checks tell everything that
`problems()` finds when the process starts.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final, Generic, Literal, TypeVar, overload

from django.conf import settings
from django.core.exceptions import ImproperlyConfigured

from durable_jobs.exceptions import shown

NAME: Final = "DURABLE_JOBS"
QUEUE_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
MANUAL_QUEUE: Final = "manual"
"""The reserved queue of jobs that workers and the reconciler leave alone."""

T = TypeVar("T")
Rule = Callable[[Any], "str | None"]
"""Says what is allowed when a value is not, else None."""


class Setting(Generic[T]):
    """One name in `DURABLE_JOBS`: its default, the rule for its values, and what it means."""

    name: str

    def __init__(self, default: T, rule: Rule, meaning: str) -> None:
        self.default, self.rule, self.meaning = default, rule, meaning

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name

    @overload
    def __get__(self, instance: None, owner: type) -> Setting[T]: ...
    @overload
    def __get__(self, instance: object, owner: type) -> T: ...
    def __get__(self, instance: object | None, owner: type) -> Setting[T] | T:
        if instance is None:
            return self
        given = getattr(settings, NAME, {})
        if not isinstance(given, Mapping):
            raise ImproperlyConfigured(_no_dictionary(given).sentence)
        if self.name not in given:
            return self.default
        value: T = given[self.name]
        if self.rule(value):
            raise ImproperlyConfigured(_wrong(self, value).sentence)
        return value


def number(least: float, most: float) -> Rule:
    """Allow numbers from `least` to `most`; a boolean is no number."""

    def rule(value: Any) -> str | None:
        fits = isinstance(value, int | float) and not isinstance(value, bool) and least <= value <= most
        return None if fits else f"a number from {least:,} to {most:,}"

    return rule


def whole(least: int, most: int) -> Rule:
    """Allow whole numbers from `least` to `most`."""

    def rule(value: Any) -> str | None:
        fits = isinstance(value, int) and not isinstance(value, bool) and least <= value <= most
        return None if fits else f"a whole number from {least:,} to {most:,}"

    return rule


def text(longest: int, *, blank: bool = False) -> Rule:
    """Allow texts of at most `longest` characters."""

    def rule(value: Any) -> str | None:
        if (
            isinstance(value, str)
            and len(value) <= longest
            and "\x00" not in value
            and (blank or value.strip())
        ):
            return None
        return f"a {'' if blank else 'nonblank '}text of at most {longest} characters"

    return rule


def one_of_or_path(*choices: str) -> Rule:
    """Allow these texts, and the dotted path of a class."""

    def rule(value: Any) -> str | None:
        parts = value.split(".") if isinstance(value, str) else ()
        if value in choices or (len(parts) > 1 and all(part.isidentifier() for part in parts)):
            return None
        return "one of " + ", ".join(repr(choice) for choice in choices) + ", or the dotted path of a class"

    return rule


def true_or_false(value: Any) -> str | None:
    """Allow True and False."""
    return None if isinstance(value, bool) else "True or False"


def dsn_or_none(value: Any) -> str | None:
    """Allow None and a nonblank text."""
    return (
        None if value is None or (isinstance(value, str) and value.strip()) else "None or a connection string"
    )


def module_names(value: Any) -> str | None:
    """Allow a list or tuple of dotted module names."""
    if isinstance(value, list | tuple) and all(
        isinstance(name, str) and name and all(part.isidentifier() for part in name.split("."))
        for name in value
    ):
        return None
    return 'a list of module names, such as ["jobs"]'


def function_or_none(value: Any) -> str | None:
    """Allow None, something that can be called, and the dotted path of it."""
    if value is None or callable(value):
        return None
    if isinstance(value, str) and "." in value and all(part.isidentifier() for part in value.split(".")):
        return None
    return "None, a function, or its dotted path"


def queue_name(value: Any) -> str | None:
    """Allow the names of queues, the reserved one apart."""
    if isinstance(value, str) and QUEUE_NAME.fullmatch(value) and value != MANUAL_QUEUE:
        return None
    return f"a name of at most 100 letters, digits, '.', '_' and '-', other than {MANUAL_QUEUE!r}"


KIB: Final = 1024
MIB: Final = 1024 * KIB
LARGEST_TEXT: Final = 256 * MIB


class Config:
    """The settings, each read from `settings.DURABLE_JOBS` at every access."""

    TRANSPORT = Setting(
        "database", one_of_or_path("database", "celery", "memory"), "What tells workers that a job is due."
    )
    DEFAULT_TENANT = Setting("default", text(64), "The tenant of calls that name no scope.")
    GRACE = Setting(
        20.0, number(0.2, 3_600), "Seconds that an expired lease must be seen expired before repair."
    )
    TICK = Setting(
        15.0, number(0, 3_600), "Seconds between two passes of the reconciler in a worker; 0: never."
    )
    POLL = Setting(1.0, number(0.01, 60), "Seconds between two looks for due jobs.")
    SQLITE_POLL = Setting(
        0.006,
        number(0.001, 60),
        "Seconds between two looks at whether a SQLite file has changed, where nobody tells of a write to it.",
    )
    DRAIN_TIMEOUT = Setting(25.0, number(0, 86_400), "Seconds that a stopping worker waits for its slices.")
    START_TIMEOUT = Setting(
        60.0, number(0.5, 3_600), "Seconds in which a process of `--processes` must begin to claim."
    )
    UNKNOWN_KIND_GRACE = Setting(
        86_400.0, number(0, 31 * 86_400), "Seconds that a job of a kind unknown here is left alone."
    )
    STALLED_AFTER = Setting(
        900.0, number(1, 31 * 86_400), "Seconds without a commit until a job counts as stalled."
    )
    NOTIFY_DEBOUNCE = Setting(
        0.05,
        number(0, 10),
        "Seconds in which a process tells of a kind three times; one NOTIFY at their end tells the rest.",
    )
    LISTEN = Setting(
        True,
        true_or_false,
        "Whether workers are told of new jobs: by PostgreSQL, or by Linux of writes to a SQLite file.",
    )
    LISTEN_DSN: Setting[str | None] = Setting(
        None, dsn_or_none, "A direct connection to listen on, past a connection pooler."
    )
    PREFETCH = Setting(
        256, whole(0, 1_000), "Jobs that a worker claims ahead, at most, of kinds that end at once; 0: none."
    )
    GROUP_COMMIT = Setting(True, true_or_false, "Whether jobs that end together share a transaction.")
    GROUP_HOOKS = Setting(
        True,
        true_or_false,
        "Whether kinds with a mirror or a quick `on_transition` take part in GROUP_COMMIT.",
    )
    DIRECT_STATEMENTS = Setting(
        True, true_or_false, "Whether a worker's own statements go past Django's cursors to the driver's."
    )
    PREPARE = Setting(
        True,
        true_or_false,
        "Whether workers on PostgreSQL prepare their own statements; not every pooler can.",
    )
    PIPELINE = Setting(
        True,
        true_or_false,
        "Whether `start_many` on PostgreSQL makes rows ready while the server inserts others.",
    )
    MAX_INPUT_BYTES = Setting(MIB, whole(2, LARGEST_TEXT), "Largest input, in bytes of JSON.")
    MAX_RESULT_BYTES = Setting(MIB, whole(2, LARGEST_TEXT), "Largest result, in bytes of JSON.")
    MAX_CHECKPOINT_BYTES = Setting(256 * KIB, whole(2, LARGEST_TEXT), "Largest checkpoint, in bytes of JSON.")
    MAX_META_BYTES = Setting(16 * KIB, whole(2, LARGEST_TEXT), "Largest set of labels, in bytes of JSON.")
    RELEASE = Setting(
        "", text(100, blank=True), "Name of the running release, shown with workers and events."
    )
    DISCOVER: Setting[list[str] | tuple[str, ...]] = Setting(
        ("jobs",), module_names, "Modules with kinds, looked for in every installed app."
    )
    DEFAULT_QUEUE = Setting("default", queue_name, "The queue of kinds that name none.")
    SCOPE_FROM_REQUEST: Setting[str | Callable[..., Any] | None] = Setting(
        None, function_or_none, "Gives the scope of a request; None: the default scope."
    )
    ADMIN_SCOPES: Setting[str | Callable[..., Any] | None] = Setting(
        None, function_or_none, "Gives the scopes that an operator's request may see; None: by permission."
    )
    SCOPE_LABELS: Setting[str | Callable[..., Any] | None] = Setting(
        None, function_or_none, "Gives names for scopes, for the admin; None: tenant and organization."
    )

    @classmethod
    def all(cls) -> dict[str, Setting[Any]]:
        """Give every setting by its name."""
        return {name: value for name, value in vars(cls).items() if isinstance(value, Setting)}


config = Config()


@dataclass(frozen=True, slots=True)
class Problem:
    """One thing that is wrong with `DURABLE_JOBS`."""

    sort: Literal["shape", "name", "value", "contradiction", "doubt"]
    settings: tuple[str, ...]
    message: str
    way_out: str

    @property
    def sentence(self) -> str:
        """Message and way out."""
        return f"{self.message} {self.way_out}"


def problems() -> list[Problem]:
    """Say everything that is wrong with `DURABLE_JOBS`: names, values, then how they fit together."""
    given = getattr(settings, NAME, {})
    if not isinstance(given, Mapping):
        return [_no_dictionary(given)]
    known = Config.all()
    unknown = [_unknown(name, known) for name in given if name not in known]
    wrong = [
        _wrong(setting, given[name])
        for name, setting in known.items()
        if name in given and setting.rule(given[name])
    ]
    # A relation of a value that is wrong by itself says nothing.
    return unknown + wrong or list(_relations())


def _no_dictionary(value: object) -> Problem:
    message = f"{NAME} is {shown(value)}, which is no dictionary."
    return Problem("shape", (NAME,), message, f'Write {NAME} = {{"TICK": 15}}, or leave it out.')


def _unknown(name: object, known: Mapping[str, Any]) -> Problem:
    near = difflib.get_close_matches(str(name).upper(), known, n=1)
    way_out = f"Did you mean {near[0]!r}?" if near else f"The names are {', '.join(known)}."
    return Problem("name", (str(name),), f"{NAME} has no setting {shown(name)}.", way_out)


def _wrong(setting: Setting[Any], value: Any) -> Problem:
    message = f"{_named(setting.name)} is {shown(value)}; allowed is {setting.rule(value)}."
    return Problem(
        "value", (setting.name,), message, f"The default is {setting.default!r}. {setting.meaning}"
    )


def _relations() -> Iterator[Problem]:
    """Compare settings with each other."""
    if config.UNKNOWN_KIND_GRACE < config.GRACE:
        yield Problem(
            "contradiction",
            ("UNKNOWN_KIND_GRACE", "GRACE"),
            f"{_set('UNKNOWN_KIND_GRACE')} is shorter than {_set('GRACE')}: jobs of a release that "
            "is still being rolled out would be parked before a dead worker would be noticed.",
            f"Raise UNKNOWN_KIND_GRACE to GRACE or more; its default is a day ({86_400:,}).",
        )
    if config.TICK > 3 * config.GRACE:
        yield Problem(
            "doubt",
            ("TICK", "GRACE"),
            f"{_set('TICK')} is more than three times {_set('GRACE')}: a repair takes two passes, so a dead "
            "worker's jobs wait for TICK and GRACE decides nothing.",
            "Lower TICK to GRACE or less, or raise GRACE.",
        )
    if config.NOTIFY_DEBOUNCE > config.POLL:
        yield Problem(
            "doubt",
            ("NOTIFY_DEBOUNCE", "POLL"),
            f"{_set('NOTIFY_DEBOUNCE')} is longer than {_set('POLL')}: workers find jobs by polling "
            "before they are told.",
            "Lower NOTIFY_DEBOUNCE below POLL, or turn LISTEN off.",
        )


def _set(name: str) -> str:
    return f"{_named(name)} = {getattr(config, name):g}"


def _named(name: str) -> str:
    return f"{NAME}[{name!r}]"
