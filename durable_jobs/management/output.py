"""What the commands print: tables and sentences for people, JSON for programs.

With `rich` installed and a terminal, tables are drawn; otherwise they are plain text in columns. Everything that
comes from a job is text: control characters are shown, never sent to the terminal.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from enum import Enum
from typing import Any, TextIO
from uuid import UUID

from django.utils import timezone

try:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text
except ImportError:
    Console = None  # type: ignore[assignment,misc]

_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069]")

COLOURS: Mapping[str, str] = {
    "running": "green",
    "completed": "green",
    "ok": "green",
    "stuck": "bold red",
    "failed": "red",
    "parked": "red",
    "PROBLEM": "bold red",
    "retrying": "yellow",
    "stopping": "yellow",
    "paused": "yellow",
    "held": "cyan",
    "scheduled": "cyan",
    "waiting": "cyan",
    "cancelled": "dim",
}


LAST_COLUMN = 30
"""The least width that is left for it; it is the one that may be long."""


class Output:
    """Writes to a command's streams. `json` says that standard output is for a program."""

    def __init__(self, stdout: Any, stderr: Any, *, json: bool = False, colour: bool | None = None) -> None:
        self.stdout, self.stderr, self.json = stdout, stderr, json
        self._console: Any = None
        stream: TextIO = getattr(stdout, "_out", stdout)
        terminal = hasattr(stream, "isatty") and stream.isatty()
        if Console is not None and not json and colour is not False and (terminal or colour):
            self._console = Console(file=stream, highlight=False, markup=False, force_terminal=colour or None)

    def say(self, text: str = "") -> None:
        """A line for people; nothing when the output is JSON."""
        if not self.json:
            self.stdout.write(_lines(text))

    def note(self, text: str) -> None:
        """A line beside the output, on standard error."""
        self.stderr.write(_lines(text), ending="\n")

    def document(self, content: Any) -> None:
        """The one JSON document of a command."""
        self.stdout.write(json.dumps(content, ensure_ascii=False, indent=2, default=_plain))

    def record(self, content: Any) -> None:
        """One of a command's JSON lines."""
        self.stdout.write(json.dumps(content, ensure_ascii=False, default=_plain))

    def table(self, headings: Sequence[str], rows: Iterable[Sequence[Any]], *, title: str = "") -> None:
        """Rows in columns; numbers to the right."""
        if self.json:
            return
        cells = [[shown(value) for value in row] for row in rows]
        right = [
            bool(cells) and all(re.fullmatch(r"[\d,.]*\+?", row[n]) for row in cells)
            for n in range(len(headings))
        ]
        if self._console is not None:
            self._draw(headings, cells, right, title)
            return
        if title:
            self.stdout.write(title)
        widths = [max(map(len, column)) for column in zip(headings, *cells, strict=True)]
        for row in [[heading.upper() for heading in headings], *cells]:
            columns = zip(row, widths, right, strict=True)
            line = "  ".join(
                cell.rjust(width) if to_right else cell.ljust(width) for cell, width, to_right in columns
            )
            self.stdout.write(line.rstrip())

    def facts(self, pairs: Iterable[tuple[str, Any]], *, title: str = "") -> None:
        """Names and values, those without a value left out."""
        if self.json:
            return
        given = [(name, shown(value)) for name, value in pairs if value not in (None, "")]
        if not given:
            return
        if title:
            self.say(title)
        width = max(len(name) for name, _ in given)
        for name, value in given:
            if self._console is not None:
                line = Text.assemble((f"  {name.ljust(width)}  ", "dim"), (value, COLOURS.get(value, "")))
                self._console.print(line, soft_wrap=True)
            else:
                self.stdout.write(f"  {name.ljust(width)}  {value}")

    def _draw(
        self, headings: Sequence[str], cells: list[list[str]], right: Sequence[bool], title: str
    ) -> None:
        table = Table(title=title or None, title_justify="left", title_style="bold", box=None, pad_edge=False)
        *fixed, last = range(len(headings))
        for n in fixed:
            table.add_column(headings[n], justify="right" if right[n] else "left", no_wrap=True)
        table.add_column(headings[last], justify="right" if right[last] else "left", overflow="fold")
        for row in cells:
            table.add_row(*(Text(cell, style=COLOURS.get(cell, "")) for cell in row))
        # An id that is cut or folded cannot be copied: where the terminal is too narrow it wraps whole lines.
        needed = sum(2 + max(len(headings[n]), *(len(row[n]) for row in cells), 0) for n in fixed)
        self._console.width = max(self._console.width, needed + LAST_COLUMN)
        self._console.print(table)


def shown(value: Any) -> str:
    """A value as text: times with their offset in the active zone, control characters visible."""
    if value is None:
        return ""
    if isinstance(value, datetime):
        return moment(value)
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, Enum):
        return str(value.value)
    return _clean(str(value))


def moment(value: datetime) -> str:
    """A time to the second, in the active zone, with its offset."""
    return timezone.localtime(value).isoformat(sep=" ", timespec="seconds")


def _lines(text: str) -> str:
    """Sentences of ours may have several lines; what else stands in them is harmless."""
    return "\n".join(_clean(line) for line in text.split("\n"))


def _clean(text: str) -> str:
    return _CONTROL.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


def _plain(value: Any) -> Any:
    if isinstance(value, datetime):
        return value.isoformat()
    if isinstance(value, UUID):
        return str(value)
    if isinstance(value, Enum):
        return value.value
    return str(value)
