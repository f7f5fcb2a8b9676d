"""Where airports come from: the package `airportsdata`, or a CSV file with the same columns."""

from __future__ import annotations

import csv
import hashlib
import io
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from typing import IO, Any, Final

import airportsdata
from django.core.exceptions import ValidationError

from durable_jobs.exceptions import TerminalError
from project.demo.models import Airport

FIELDS: Final[Mapping[str, str]] = {
    "icao": "icao",
    "iata": "iata",
    "name": "name",
    "city": "city",
    "subd": "subdivision",
    "country": "country",
    "elevation": "elevation",
    "lat": "latitude",
    "lon": "longitude",
    "tz": "time_zone",
    "lid": "local_code",
}
"""The model's field for each column of the data set."""

REQUIRED: Final = ("icao", "name", "country", "lat", "lon")

EXTRA: Final = "(more)"
"""The name under which a row keeps what stands beyond its last column; never a column's own."""

Row = Mapping[str, Any]


class BadRow(TerminalError):
    """A row that is no airport. Trying again would not help."""


class BadFile(TerminalError):
    """A file that cannot be read as a list of airports."""


@cache
def world() -> Sequence[Row]:
    """The package's rows, by ICAO code: the same in the same order each time."""
    return [dict(row) for _, row in sorted(airportsdata.load().items())]


def csv_rows(file: IO[bytes]) -> Iterator[Row]:
    """The rows of a CSV file in UTF-8 whose first line names its columns; `BadFile` says what is wrong."""
    text = io.TextIOWrapper(file, "utf-8-sig", newline="")
    reader = csv.DictReader(text, restkey=EXTRA)
    try:
        check_header(reader.fieldnames or ())
        yield from reader
    except (UnicodeDecodeError, csv.Error) as error:
        raise BadFile(f"After line {reader.line_num}: {error}.", code="bad_file") from error
    finally:
        # The file stays the caller's: a wrapper that goes away would close it.
        text.detach()


def check_header(columns: Sequence[str]) -> None:
    """Refuse a header that lacks a column, or has one twice or one that no airport has."""
    missing = [name for name in REQUIRED if name not in columns]
    unknown = [name for name in columns if name not in FIELDS]
    twice = sorted({name for name in columns if columns.count(name) > 1})
    for problem, names in (
        ("lacks the columns", missing),
        ("has unknown columns", unknown),
        ("has columns twice", twice),
    ):
        if names:
            raise BadFile(
                f"The first line {problem}: {', '.join(map(repr, names))}. It names columns, "
                f"{', '.join(REQUIRED)} at least; allowed are also "
                f"{', '.join(name for name in FIELDS if name not in REQUIRED)}.",
                code="bad_header",
            )


def airport(row: Row, **values: Any) -> Airport:
    """The row as an airport, not saved; `BadRow` says what is wrong with it."""
    if EXTRA in row:
        raise BadRow(f"{row.get('icao')!r}: more fields than columns.", code="bad_row")
    if any("\x00" in value for value in row.values() if isinstance(value, str)):
        raise BadRow(f"{row.get('icao')!r}: holds NUL, which no database keeps in a text.", code="bad_row")
    made = Airport(**{FIELDS[name]: value for name, value in row.items() if value is not None}, **values)
    try:
        made.clean_fields(exclude=["last_run"])
    except ValidationError as error:
        problems = "; ".join(f"{field}: {' '.join(texts)}" for field, texts in error.message_dict.items())
        raise BadRow(f"{row.get('icao')!r}: {problems}", code="bad_row") from error
    return made


def sha256(file: IO[bytes]) -> str:
    """The hash of a file's bytes, by which a job knows that it is still the file that it began with."""
    digest = hashlib.sha256()
    while chunk := file.read(1 << 20):
        digest.update(chunk)
    return digest.hexdigest()
