"""`manage.py durable_jobs …`: everything an operator does, under one name."""

from __future__ import annotations

import argparse
from typing import Any

from django.core.management.base import CommandParser

from durable_jobs.management.acts import EXIT_CODES, Act, CheckedCommand, may_skip_checks, perform
from durable_jobs.management.acts.acting import Cancel, PauseWork, Redrive, Settle, Start, Unpause
from durable_jobs.management.acts.looking import Explain, Health, Kinds, List, Show, Stats
from durable_jobs.management.acts.upkeep import Prune, Reconcile
from durable_jobs.management.acts.working import Work

ACTS: tuple[type[Act], ...] = (
    Work, Reconcile, Prune, Start, List, Show, Explain, Cancel, Redrive, PauseWork, Unpause, Settle, Kinds, Stats,
    Health,
)  # fmt: skip

DJANGOS_OWN = (
    "--version", "-v", "--verbosity", "--settings", "--pythonpath", "--traceback", "--no-color", "--force-color",
    "--skip-checks",
)  # fmt: skip


class Command(CheckedCommand):
    """Finds the act and performs it."""

    help = "Run, look at and operate durable jobs."

    def create_parser(self, prog_name: str, subcommand: str, **kwargs: Any) -> CommandParser:
        parser = super().create_parser(prog_name, subcommand, epilog=EXIT_CODES, **kwargs)
        parser.formatter_class = argparse.RawDescriptionHelpFormatter
        return parser

    def add_arguments(self, parser: CommandParser) -> None:
        subparsers = parser.add_subparsers(
            dest="act",
            metavar="COMMAND",
            required=True,
            title="commands",
            description="COMMAND --help says more.",
        )
        for act_class in ACTS:
            act = act_class()
            subparser = subparsers.add_parser(act.name, help=act.help)
            act.prepare(subparser)
            _accept_djangos_own(parser, subparser)
            subparser.set_defaults(perform=act)

    def execute(self, *args: Any, **options: Any) -> Any:
        if may_skip_checks(options["perform"], options):
            self.requires_system_checks = []
        return super().execute(*args, **options)

    def handle(self, *args: Any, **options: Any) -> None:
        perform(options.pop("perform"), options, self)


def _accept_djangos_own(parser: CommandParser, subparser: argparse.ArgumentParser) -> None:
    """Django's options may stand after the subcommand as well; there they are not listed again."""
    for action in parser._actions:
        if (
            action.option_strings
            and set(action.option_strings) & set(DJANGOS_OWN)
            and action.dest != "version"
        ):
            given = {name: getattr(action, name) for name in ("dest", "type", "choices", "nargs", "const")}
            subparser._add_action(
                type(action)(
                    action.option_strings,
                    default=argparse.SUPPRESS,
                    help=argparse.SUPPRESS,
                    **_fitting(action, given),
                )
            )


def _fitting(action: argparse.Action, given: dict[str, Any]) -> dict[str, Any]:
    if action.nargs == 0:
        return {"dest": given["dest"]}
    return {name: value for name, value in given.items() if value is not None}
