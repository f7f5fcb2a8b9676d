"""Arguments of the commands, each checked by a small function whose error names the value and the way out."""

from __future__ import annotations

import argparse
import json
import re
import sys
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from uuid import UUID

from django.core.exceptions import ImproperlyConfigured
from django.utils import timezone
from django.utils.dateparse import parse_date, parse_datetime

from durable_jobs.conf import config
from durable_jobs.explain import Phase
from durable_jobs.models import Status, as_uuid
from durable_jobs.selection import Selection

UNITS = {"s": 1, "m": 60, "h": 3_600, "d": 86_400, "w": 604_800}
_DURATION = re.compile(r"(?:\d+(?:\.\d+)?[smhdw])+", re.ASCII)
_PART = re.compile(r"(\d+(?:\.\d+)?)([smhdw])", re.ASCII)
LONGEST = timedelta(days=36_500)


def here(name: str) -> str:
    """The value of a setting, for a help text; a wrong one is the system checks' to tell, after the parsing."""
    try:
        return f"{getattr(config, name)}"
    except ImproperlyConfigured:
        return "wrong"


def duration(text: str) -> timedelta:
    """`90s`, `30m`, `12h`, `90d`, `2w`, or several such as `1h30m`. A bare number is refused: of what?"""
    if not _DURATION.fullmatch(text.strip()):
        raise _refused(
            text, "is not a length of time", "Use a number with s, m, h, d or w, such as 30m or 1h30m"
        )
    seconds = sum(float(number) * UNITS[unit] for number, unit in _PART.findall(text))
    if seconds > LONGEST.total_seconds():
        raise _refused(text, "is too long", f"Use at most {LONGEST.days}d")
    return timedelta(seconds=seconds)


def seconds(text: str) -> float:
    """Seconds as a number, or a length of time with its unit."""
    try:
        number = float(text)
    except ValueError:
        number = duration(text).total_seconds()
    if not 0 <= number <= LONGEST.total_seconds():
        raise _refused(text, "is out of range", "Use seconds from 0, such as 300, or 5m")
    return number


def moment(text: str, distance: str = "2h for two hours ago") -> datetime:
    """A point in time: ISO 8601 (in the project's time zone when it names none), or how long ago, as `2h`."""
    if _DURATION.fullmatch(text.strip()):
        return datetime.now(UTC) - duration(text)
    try:
        found = parse_datetime(text)
        if found is None and (day := parse_date(text)) is not None:
            found = datetime(day.year, day.month, day.day)
        if found is not None and timezone.is_naive(found):
            found = timezone.make_aware(found)
    except (ValueError, OverflowError):
        found = None
    if found is None:
        raise _refused(
            text,
            "is not a point in time",
            f"Use 2026-03-01T03:00, 2026-03-01T03:00+01:00, 2026-03-01, or {distance}",
        )
    return found


def later(text: str) -> datetime | timedelta:
    """A point in time to come, or how long from now, as `30m`."""
    if _DURATION.fullmatch(text.strip()):
        return duration(text)
    return moment(text, "2h for in two hours")


def job_id(text: str) -> UUID:
    found = as_uuid(text)
    if found is None:
        raise _refused(text, "is not a job's id", "Use the id that list and start print")
    return found


def whole(least: int, most: int) -> Any:
    """A whole number from `least` to `most`."""

    def convert(text: str) -> int:
        if not re.fullmatch(r"[+-]?\d{1,12}", text, re.ASCII) or not least <= int(text) <= most:
            raise _refused(text, "is out of range", f"Use a whole number from {least:,} to {most:,}")
        return int(text)

    return convert


def json_input(text: str) -> Any:
    """JSON, or `@file` with it, or `-` for standard input."""
    try:
        if text == "-":
            text = sys.stdin.read()
        elif text.startswith("@"):
            text = Path(text[1:]).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise _refused(text, f"cannot be read ({error})", "Use JSON itself, @file or -") from error
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise _refused(
            text, f"is not JSON ({error})", """Quote texts, as in --input '{"file": "a.csv"}'"""
        ) from None


def label(text: str) -> tuple[str, str]:
    """`key=value`."""
    name, sign, value = text.partition("=")
    if not sign or not name.strip():
        raise _refused(text, "is not a label", "Use key=value")
    return name, value


def subject(text: str) -> tuple[str, str]:
    """`app.Model:PK`."""
    model, sign, key = text.partition(":")
    if not sign or not key or not re.fullmatch(r"\w+\.\w+", model):
        raise _refused(text, "is not a subject", "Use app.Model:PK, such as shop.Order:42")
    return model.lower(), key


def statuses(text: str) -> tuple[str, ...]:
    """Several statuses, as `completed,cancelled`; only of jobs that have ended."""
    names = tuple(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))
    if not names or not set(names) <= {"completed", "cancelled"}:
        raise _refused(
            text, "is not allowed", "Use completed, cancelled or both; --include-failed adds failed ones"
        )
    return names


def text(value: str) -> str:
    """A text that says something."""
    if not value.strip():
        raise _refused(value, "is blank", "Give a text, or leave the option out")
    return value


def _refused(value: str, problem: str, way_out: str) -> argparse.ArgumentTypeError:
    given = value if len(value) <= 100 else f"{value[:100]}…"
    return argparse.ArgumentTypeError(f"{given!r} {problem}. {way_out}.")


def add_scope(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--tenant", type=text, metavar="T", help="only jobs of this tenant (default: of all)")
    parser.add_argument(
        "--organization", type=text, metavar="O", help="only jobs of this organization within the tenants"
    )


def add_filters(parser: argparse.ArgumentParser, *, phases: list[Phase], statuses: list[Status]) -> None:
    """The filters by which jobs are chosen, all of which must hold."""
    group = parser.add_argument_group("filters", "Which jobs; all that are given must hold.")
    group.add_argument("--kind", type=text, metavar="K", help="the kind's name, as stored on the job")
    group.add_argument("--queue", type=text, metavar="Q", help="the queue")
    which = group.add_mutually_exclusive_group()
    which.add_argument(
        "--phase",
        choices=[str(phase) for phase in phases],
        metavar="P",
        help=f"what the job is doing: {', '.join(phases)}",
    )
    which.add_argument(
        "--status", choices=[str(status) for status in statuses], metavar="S",
        help=f"the stored status: {', '.join(statuses)}",
    )  # fmt: skip
    group.add_argument(
        "--subject", type=subject, metavar="LABEL:PK", help="the project's row, as app.Model:PK"
    )
    group.add_argument(
        "--error-type",
        type=text,
        metavar="E",
        help="the error's class as stored: module.Class, of Python's own Class alone",
    )
    group.add_argument("--error-code", type=text, metavar="C", help="the error's code, or why it was parked")
    group.add_argument(
        "--failed-since",
        type=moment,
        metavar="TIME",
        help="failed then or later; ISO 8601, or 2h for two hours ago",
    )
    group.add_argument("--failed-before", type=moment, metavar="TIME", help="failed earlier than that")
    group.add_argument("--created-since", type=moment, metavar="TIME", help="created then or later")
    group.add_argument("--created-before", type=moment, metavar="TIME", help="created earlier than that")
    add_scope(group)  # type: ignore[arg-type]


FILTERS = (
    "kind", "queue", "phase", "status", "subject", "error_type", "error_code", "failed_since", "failed_before",
    "created_since", "created_before", "tenant", "organization",
)  # fmt: skip


def selection_of(options: dict[str, Any]) -> Selection:
    given = {name: options[name] for name in FILTERS}
    given["phase"] = Phase(given["phase"]) if given["phase"] else None
    return Selection(**given)


def is_filtered(options: dict[str, Any]) -> bool:
    return any(options[name] is not None for name in FILTERS)
