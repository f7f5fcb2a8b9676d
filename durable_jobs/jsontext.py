"""Canonical JSON in, exact text out.

The text that `encode` gives is what is stored and what is hashed. Equal values give equal text, and
encoding a decoded text gives the same text again.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Iterator
from decimal import Decimal
from typing import Any, Final

from django.core.serializers.json import DjangoJSONEncoder
from django.utils.datastructures import MultiValueDict

from durable_jobs.conf import NAME, Config
from durable_jobs.exceptions import InvalidInput, clean

__all__ = ["DEEPEST", "clean", "encode", "sha256", "verify"]

DEEPEST: Final = 200
"""How many objects and arrays may be nested."""

_MOST_INTEGER_BITS: Final = 14_284  # 4,300 digits, what Python reads back from text by default
_TOO_DEEP: Final = f"is nested more than {DEEPEST} levels deep"
_ONLY_TEXT: Final = frozenset((str,))
_SIMPLE: Final = frozenset((str, int, bool, type(None)))
"""A float may be none that JSON has."""
_WIDEST_SIMPLE: Final = 64
_LONGEST_SIMPLE: Final = 4_000
_PLAIN_KEY = re.compile(r"[A-Za-z_][A-Za-z0-9_-]*\Z")


class _Encoder(DjangoJSONEncoder):
    """Only what `_check` lets through reaches this encoder."""


_encoder = _Encoder(ensure_ascii=False, allow_nan=False, sort_keys=True, separators=(",", ":"))


def encode(value: Any, *, field: str, limit: int) -> str:
    """Give the canonical JSON text of `value`: sorted keys, no spaces, UTF-8 characters as they are.

    Dates, times, durations, Decimals, UUIDs and lazy translations become text as in DjangoJSONEncoder
    (`docs/values.md` has the table). Raises `InvalidInput` naming the path (`input.rows[3].name`, where
    `field` is the first word) for anything that would not come back as it was: NaN and infinity, NUL, lone
    surrogates, keys that are no text, tuples, sets, bytes, model instances, more than 200 levels, and a
    text of more than `limit` bytes.
    """
    quick = _quick(value, limit) if _is_simple(value) else None
    if quick is not None:
        return quick
    _check(value, field, limit)
    text = _encoder.encode(value)
    _check_size(text, value, field, limit)
    return text


def _quick(value: Any, limit: int) -> str | None:
    try:
        text = _encoder.encode(value)
    except ValueError:
        return None
    refused = len(text) > min(limit, _LONGEST_SIMPLE) or "\\u0000" in text or not text.isascii()
    return None if refused else text


def _is_simple(value: Any) -> bool:
    """Whether only its text can still be refused: plain types, in few and small containers.

    Most input is so. The walk that could name what is wrong is then left out.
    """
    if type(value) is not dict:
        return value is None
    if len(value) > _WIDEST_SIMPLE:
        return False
    for key, one in value.items():
        if type(key) is not str:
            return False
        if type(one) in _SIMPLE:
            continue
        if type(one) is list:
            if len(one) > _WIDEST_SIMPLE or not _SIMPLE.issuperset(map(type, one)):
                return False
        elif (
            type(one) is not dict
            or len(one) > _WIDEST_SIMPLE
            or not (_ONLY_TEXT.issuperset(map(type, one)) and _SIMPLE.issuperset(map(type, one.values())))
        ):
            return False
    return True


def verify(text: Any, *, field: str, limit: int) -> Any:
    """Give the value of a JSON text that will be stored byte for byte.

    Raises `InvalidInput` where it is no text or no JSON, and where `encode` would refuse its value.
    """
    if not isinstance(text, str):
        raise InvalidInput(field, text, "is no text", "Give a text of JSON.")
    _check_text(text, text, _Path(field))
    _check_size(text, text, field, limit)
    try:
        value = json.loads(text)
    except RecursionError:
        raise InvalidInput(field, text, _TOO_DEEP, "Make it flatter.") from None
    except ValueError as error:
        raise InvalidInput(field, text, f"is no JSON: {error}", "Give a text of JSON.") from None
    _check(value, field, limit)
    return value


def sha256(text: str) -> str:
    """Give the SHA-256 of the text's UTF-8 bytes in lower-case hexadecimal."""
    return hashlib.sha256(text.encode()).hexdigest()


def _check(root: Any, field: str, limit: int) -> None:
    """Refuse what JSON would change or cannot carry. Walks with a stack of its own: input may be deep."""
    where = _Path(field)
    left: list[Iterator[tuple[str | int | None, Any]]] = [iter([(None, root)])]
    seen = 0
    while left:
        step = next(left[-1], None)
        if step is None:
            left.pop()
            where.up()
            continue
        seen += 1
        where.at(step[0])
        value = step[1]
        children = _children(value, where)
        if children is None:
            continue
        if len(left) > DEEPEST:
            raise where.refuse(value, _TOO_DEEP, "Make it flatter.")
        # One list that occurs in itself many times would take for ever; every value needs a byte at least.
        if seen > limit:
            raise _too_big(root, field, f"more than {limit:,}", limit)
        left.append(children)
        where.down()


def _children(value: Any, where: _Path) -> Iterator[tuple[str | int | None, Any]] | None:
    """Check one value; give its children, or None where it has none."""
    if isinstance(value, MultiValueDict):  # its items() leave values out
        raise where.refuse(value, "has several values for a key", "Use dict(value.lists()) or value.dict().")
    if isinstance(value, dict):
        _check_keys(value, where)
        return iter(value.items())
    if isinstance(value, list):
        return iter(enumerate(value))
    if isinstance(value, str):
        _check_text(value, value, where)
    elif isinstance(value, int):
        _check_integer(value, where)
    elif isinstance(value, float):
        _check_float(value, where)
    elif isinstance(value, Decimal) and not value.is_finite():
        raise where.refuse(value, "is no number", "Use None, or a text.")
    elif value is not None:
        _check_other(value, where)
    return None


def _check_text(text: str, value: Any, where: _Path, has: str = "contains") -> None:
    if "\x00" in text:
        at = text.index("\x00")
        raise where.refuse(value, f"{has} NUL at character {at}", "Remove it, or send base64.")
    if text.isascii():
        return
    try:
        text.encode()
    except UnicodeEncodeError as error:
        problem = f"{has} a lone surrogate at character {error.start}"
        raise where.refuse(value, problem, "Decode the text properly first.") from None


def _check_integer(value: int, where: _Path) -> None:
    if value.bit_length() > _MOST_INTEGER_BITS:
        raise where.refuse(value, "is an integer of more than 4,300 digits", "Send it as text.")


def _check_float(value: float, where: _Path) -> None:
    if not math.isfinite(value):
        raise where.refuse(value, "is no number that JSON has", "Use None, or a text.")


def _check_keys(value: dict[Any, Any], where: _Path) -> None:
    for key in value:
        if not isinstance(key, str):
            raise where.refuse(key, f"has a key of type {type(key).__name__}", "Use text keys: str(key).")
        _check_text(key, key, where, has="has a key with")


def _check_other(value: Any, where: _Path) -> None:
    try:
        text = _encoder.default(value)
    except Exception as error:
        raise where.refuse(value, _unfit(value, error), _way_out(value)) from None
    _check_text(text, value, where)


def _unfit(value: Any, error: Exception) -> str:
    if isinstance(error, ValueError):
        return f"cannot become JSON: {error}".rstrip(".")
    return f"is of type {type(value).__name__}, which would not come back from JSON as it was"


def _way_out(value: Any) -> str:
    if isinstance(value, tuple | set | frozenset):
        return "Use a list: list(value), or sorted(value)."
    if isinstance(value, bytes | bytearray | memoryview):
        return "Decode it to text, send base64, or store a file and send its name."
    if hasattr(value, "_meta") and hasattr(value, "pk"):
        return "Send its primary key: value.pk."
    return "Convert it to text, numbers, lists and objects first."


def _check_size(text: str, value: Any, field: str, limit: int) -> None:
    size = len(text) if text.isascii() else len(text.encode())
    if size > limit:
        raise _too_big(value, field, f"{size:,}", limit)


def _too_big(value: Any, field: str, size: str, limit: int) -> InvalidInput:
    way_out = "Store the data in a row or a file and pass its key"
    setting = f"MAX_{field.upper()}_BYTES"
    if setting in Config.all():
        way_out += f", or raise {NAME}[{setting!r}]"
    problem = f"is too big: it takes {size} bytes of JSON and {limit:,} are allowed"
    return InvalidInput(field, value, problem, f"{way_out}.")


class _Path:
    """Where the walk is; becomes text only when something is refused."""

    def __init__(self, field: str) -> None:
        self.field = field
        self.steps: list[str | int | None] = [None]

    def at(self, step: str | int | None) -> None:
        self.steps[-1] = step

    def down(self) -> None:
        self.steps.append(None)

    def up(self) -> None:
        self.steps.pop()

    def refuse(self, value: Any, problem: str, way_out: str) -> InvalidInput:
        return InvalidInput(str(self), value, problem, way_out)

    def __str__(self) -> str:
        steps = [self._show(step) for step in self.steps if step is not None]
        if len(steps) > 20:
            steps[10:-10] = ["…"]
        return self.field + "".join(steps)

    @staticmethod
    def _show(step: str | int) -> str:
        if isinstance(step, int):
            return f"[{step}]"
        if _PLAIN_KEY.match(step) and len(step) <= 60:
            return f".{step}"
        return f"[{clean(str.__str__(step)[:60])!r}]"
