"""What `manage.py durable_jobs …` can do, one class for each subcommand.

An act parses its arguments, calls the service and prints the answer. Its exit code: 0 done; 1 refused, unhealthy
or out of time; 2 wrong usage. A refusal is one line on standard error, never a traceback.
"""

from __future__ import annotations

import argparse
import getpass
import logging
import os
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, ClassVar, Final

from django.core.exceptions import ImproperlyConfigured
from django.core.management.base import BaseCommand, CommandError, CommandParser
from django.db import DatabaseError, InterfaceError

from durable_jobs import database
from durable_jobs.exceptions import DurableJobsError
from durable_jobs.management.output import Output
from durable_jobs.supervisor import has_checked
from durable_jobs.worker import EXIT_NO_DATABASE

OK: Final = 0
REFUSED: Final = 1
USAGE: Final = 2
INTERRUPTED: Final = 130

EXIT_CODES: Final = "exit codes: 0 done; 1 refused; 2 wrong usage; 130 interrupted."


class UsageError(CommandError):
    """The arguments make no sense together."""

    def __init__(self, sentence: str) -> None:
        super().__init__(sentence, returncode=USAGE)


class Act:
    """One subcommand."""

    name: ClassVar[str]
    help: ClassVar[str]
    """One sentence for the list of subcommands; `details` follow in the subcommand's own help."""
    details: ClassVar[str] = ""
    epilog: ClassVar[str] = EXIT_CODES
    has_json: ClassVar[bool] = True
    has_checks: ClassVar[bool] = False
    """Whether system checks run first: not where an operator looks for one thing, or a probe wants to be quick."""
    shows_log: ClassVar[bool] = False
    """Whether the log's warnings go to standard error where the project has configured nothing; others say it all."""

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Declare what the act takes."""

    def run(self, options: dict[str, Any], out: Output) -> int:
        """Do it; answers the exit code."""
        raise NotImplementedError

    def prepare(self, parser: CommandParser) -> None:
        """Give a parser the act's arguments, its help and its exit codes."""
        self.add_arguments(parser)
        if self.has_json:
            parser.add_argument("--json", action="store_true", help="print JSON instead of text")
        parser.description = f"{self.help} {self.details}".strip()
        parser.epilog = self.epilog
        parser.formatter_class = _Formatter


class _Formatter(argparse.RawDescriptionHelpFormatter):
    """The epilog as it is written, the description filled."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        if "\n" in text:
            return super()._fill_text(text, width, indent)
        return argparse.HelpFormatter._fill_text(self, text, width, indent)


class CheckedCommand(BaseCommand):
    """A command that tells in one line, and with the worker's exit code, that its checks cannot ask the database."""

    requires_migrations_checks = False

    def check(self, *args: Any, **options: Any) -> None:
        try:
            super().check(*args, **options)
        except (DatabaseError, InterfaceError) as error:
            # Django 6.1 asks SQLite whether it knows JSON, when a project's model has such a field.
            raise CommandError(sentence_of(error), returncode=EXIT_NO_DATABASE) from None


class ActCommand(CheckedCommand):
    """A management command that is one act."""

    act: Act

    def add_arguments(self, parser: CommandParser) -> None:
        self.act.prepare(parser)

    def execute(self, *args: Any, **options: Any) -> Any:
        if may_skip_checks(self.act, options):
            self.requires_system_checks = []
        return super().execute(*args, **options)

    def handle(self, *args: Any, **options: Any) -> None:
        perform(self.act, options, self)


def may_skip_checks(act: Act, options: dict[str, Any]) -> bool:
    """Whether an act begins without Django's system checks: it never has them, or its supervisor has run them."""
    return not act.has_checks or has_checked(options)


def perform(act: Act, options: dict[str, Any], command: BaseCommand) -> None:
    """Run an act and end as it says: quietly with 0, by SystemExit or CommandError otherwise."""
    colour = False if options.get("no_color") else (True if options.get("force_color") else None)
    out = Output(command.stdout, command.stderr, json=bool(options.get("json")), colour=colour)
    try:
        with _log(act.shows_log or options.get("verbosity", 1) > 1):
            code = act.run(options, out)
    except BrokenPipeError:
        # Whoever read our output has seen enough (`| head`); flushing at exit must not complain either.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(OK)
    except KeyboardInterrupt:
        raise CommandError("Interrupted.", returncode=INTERRUPTED) from None
    except (DurableJobsError, ImproperlyConfigured, DatabaseError, InterfaceError) as error:
        if options.get("traceback"):
            raise
        sentence = sentence_of(error)
        if out.json:
            out.record({"error": {"code": getattr(error, "code", "database"), "message": sentence}})
        raise CommandError(sentence, returncode=REFUSED) from None
    if code:
        sys.exit(code)


@contextmanager
def _log(shown: bool) -> Iterator[None]:
    handler = logging.NullHandler()
    package = logging.getLogger("durable_jobs")
    if not shown:
        package.addHandler(handler)
    try:
        yield
    finally:
        package.removeHandler(handler)


def sentence_of(error: Exception) -> str:
    """An error in one line."""
    text = " ".join(str(error).split())
    if not isinstance(error, DatabaseError | InterfaceError):
        return text
    if said := database.not_migrated(error):
        return f"{said} ({text})"
    return f"The database {database.alias()!r} fails: {text}"


def actor() -> str:
    """Who acts here, for the history: `cli:user@host`."""
    try:
        user = getpass.getuser()
    except (KeyError, OSError):
        # A container's user need not have a name.
        user = str(os.getuid())
    return f"cli:{user}@{socket.gethostname()}"
