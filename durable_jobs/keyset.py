"""Reading a QuerySet in pieces by its order: each piece begins after the last key of the one before.

An `Order` is the QuerySet's own ordering, made unique with the primary key. It says which rows lie beyond a
key and which up to a key, in the way that both databases sort, NULLs included. A *key* is the list of a row's
values in that order, as the database driver gives and takes them: what a field makes of a value need not come
back to the same place (on SQLite a Decimal is rounded, and equal times are stored as unequal texts). `encode`
and `decode` carry a key through JSON without loss.
"""

from __future__ import annotations

import datetime
import decimal
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import Any, Final

from django.core.exceptions import FieldDoesNotExist
from django.db import models
from django.db.backends.base.base import BaseDatabaseWrapper
from django.db.models import F, Func, OrderBy, Q, Value

from durable_jobs.exceptions import shown

Key = list[Any]
"""The values of one row in the order's sequence."""

BESIDE: Final = "durable_jobs_key_"
"""Prefix of the annotations that carry those values of a key that the row itself does not hold as they are."""

EXACT_FIELDS: Final = (models.IntegerField, models.CharField, models.TextField)
"""Fields whose value on the row is the stored value."""


class Unordered(ValueError):
    """The QuerySet cannot be read by its order; the message says why and what to write instead."""


@dataclass(frozen=True)
class Column:
    """One column of an order."""

    path: str
    field: models.Field[Any, Any]
    descending: bool = False
    nullable: bool = False
    nulls_last: bool = False

    @property
    def is_foreign(self) -> bool:
        return "__" in self.path

    @property
    def is_exact(self) -> bool:
        """Whether the row holds the stored value."""
        return self._is_on_the_row(EXACT_FIELDS)

    @property
    def is_exact_uuid(self) -> bool:
        """Whether the row holds the UUID that a database with such a type gives."""
        return self._is_on_the_row((models.UUIDField,))

    def _is_on_the_row(self, classes: tuple[type[models.Field[Any, Any]], ...]) -> bool:
        field = self.field.target_field if isinstance(self.field, models.ForeignKey) else self.field
        return not self.is_foreign and isinstance(field, classes) and not hasattr(field, "from_db_value")

    @property
    def is_unique(self) -> bool:
        return not self.is_foreign and not self.nullable and (self.field.unique or self.field.primary_key)

    def __str__(self) -> str:
        nulls = (" nulls last" if self.nulls_last else " nulls first") if self.nullable else ""
        return f"{'-' if self.descending else ''}{self.path}{nulls}"

    def reversed(self) -> Column:
        return replace(self, descending=not self.descending, nulls_last=not self.nulls_last)

    def expression(self) -> OrderBy:
        if not self.nullable:
            return OrderBy(F(self.path), descending=self.descending)
        nulls = {"nulls_last": True} if self.nulls_last else {"nulls_first": True}
        return OrderBy(F(self.path), descending=self.descending, **nulls)

    def equal(self, value: Any) -> Q:
        return Q(**{f"{self.path}__isnull": True}) if value is None else Q(**{self.path: _given(value)})

    def beyond(self, value: Any) -> Q | None:
        """The rows whose value sorts after this one; None where there can be none."""
        if value is None:
            return None if self.nulls_last else Q(**{f"{self.path}__isnull": False})
        after = Q(**{f"{self.path}__{'lt' if self.descending else 'gt'}": _given(value)})
        return after | Q(**{f"{self.path}__isnull": True}) if self.nullable and self.nulls_last else after

    def at_or_beyond(self, value: Any) -> Q | None:
        """The rows at or after this value, as an index can serve them; None where it cannot."""
        if value is None or (self.nullable and self.nulls_last):
            return None
        return Q(**{f"{self.path}__{'lte' if self.descending else 'gte'}": _given(value)})


@dataclass(frozen=True)
class Order:
    """A total order of a QuerySet's rows."""

    columns: tuple[Column, ...]
    loads: bool = False
    """Whether all values are read beside the row, because it may have left columns out."""
    has_uuids: bool = False
    """Whether the database has a type for UUIDs, so that its driver gives what the row holds."""

    @property
    def names(self) -> list[str]:
        """The order in words, to be compared with that of an earlier reading."""
        return [str(column) for column in self.columns]

    @property
    def is_primary_key(self) -> bool:
        return all(column.field.primary_key and not column.is_foreign for column in self.columns)

    def sort(self, rows: models.QuerySet[Any], *, backwards: bool = False) -> models.QuerySet[Any]:
        """The rows in this order, or in its reverse, with what `key` needs."""
        columns = [column.reversed() if backwards else column for column in self.columns]
        beside = {f"{BESIDE}{index}": Stored(F(column.path)) for index, column in self._beside()}
        if not rows.query.standard_ordering:
            rows = rows.reverse()  # else it would turn this order, too
        sorted_rows: models.QuerySet[Any] = rows.annotate(**beside)
        return sorted_rows.order_by(*(column.expression() for column in columns))

    def key(self, row: models.Model) -> Key:
        """The key of a row that `sort` has read; called once, because it takes away what was read beside."""
        return self.keys([row])[0]

    def keys(self, rows: Sequence[models.Model]) -> list[Key]:
        """The keys of rows that `sort` has read; called once, as `key`."""
        beside = {index for index, _ in self._beside()}
        columns = (
            [row.__dict__.pop(f"{BESIDE}{index}") for row in rows]
            if index in beside
            else map(attrgetter(column.path), rows)
            for index, column in enumerate(self.columns)
        )
        plain = ([v if type(v) in _PLAIN else _plain(v) for v in values] for values in columns)
        return list(map(list, zip(*plain, strict=True)))

    def after(self, key: Key) -> Q | RowComparison:
        """The rows beyond a key."""
        if self._compares_whole_rows():
            return self._whole_row("<" if self.columns[0].descending else ">", key)
        return _beyond(self.columns, key)

    def until(self, key: Key) -> Q | RowComparison:
        """The rows up to a key, its own row included."""
        if self._compares_whole_rows():
            return self._whole_row(">=" if self.columns[0].descending else "<=", key)
        backwards = tuple(column.reversed() for column in self.columns)
        return _beyond(backwards, key, inclusive=True)

    def _beside(self) -> Iterator[tuple[int, Column]]:
        return ((i, column) for i, column in enumerate(self.columns) if self.loads or not self._holds(column))

    def _holds(self, column: Column) -> bool:
        return column.is_exact or (self.has_uuids and column.is_exact_uuid)

    def _compares_whole_rows(self) -> bool:
        # Worth a form of its own: databases walk an index by it, where a chain of ORs over equal first values
        # would be read again from its beginning for each piece.
        directions = {column.descending for column in self.columns}
        return len(self.columns) > 1 and len(directions) == 1 and not any(c.nullable for c in self.columns)

    def _whole_row(self, operator: str, key: Key) -> RowComparison:
        return RowComparison(
            *(F(column.path) for column in self.columns), *map(_given, key), operator=operator
        )


class Stored(Func):
    """A column's value as the driver gives it, without what its field makes of it."""

    template = "%(expressions)s"
    output_field = models.Field()

    def as_sqlite(self, compiler: Any, connection: BaseDatabaseWrapper, **extra: Any) -> Any:
        # The sign changes nothing but that the value is no longer a column, which the driver would convert.
        return self.as_sql(compiler, connection, template="(+%(expressions)s)", **extra)


def compared(operator: str, **key: Any) -> RowComparison:
    """The rows whose columns of these names compare so (`<`, `>`, `<=`, `>=`) with the key, the first before the next.

    For columns that are never NULL, in a list of one direction; an index over them serves it.
    """
    return RowComparison(*map(F, key), *map(Value, key.values()), operator=operator)


class RowComparison(Func):
    """`(a, b) > (1, 2)`: both databases compare rows so, column by column."""

    output_field = models.BooleanField()
    conditional = True

    def __init__(self, *expressions: Any, operator: str) -> None:
        super().__init__(*expressions)
        self.operator = operator

    def as_sql(  # type: ignore[override]
        self, compiler: Any, connection: BaseDatabaseWrapper, **extra: Any
    ) -> tuple[str, list[Any]]:
        texts, parameters = [], []
        for expression in self.get_source_expressions():
            text, values = compiler.compile(expression)
            texts.append(text)
            parameters.extend(values)
        half = len(texts) // 2
        return f"({', '.join(texts[:half])}) {self.operator} ({', '.join(texts[half:])})", parameters


def _all_equal(columns: Sequence[Column], key: Key) -> Q:
    equal = Q()
    for column, value in zip(columns, key, strict=False):
        equal &= column.equal(value)
    return equal


def _beyond(columns: Sequence[Column], key: Key, *, inclusive: bool = False) -> Q:
    if len(columns) == 1 and not columns[0].nullable:
        only = columns[0].at_or_beyond(key[0]) if inclusive else columns[0].beyond(key[0])
        if only is not None:
            return only
    beyond = _all_equal(columns, key) if inclusive else Q(pk__in=[])
    for index, column in enumerate(columns):
        after = column.beyond(key[index])
        if after is not None:
            beyond |= _all_equal(columns[:index], key) & after
    # Says nothing new, but lets an index on the first column pass over what was read.
    start = columns[0].at_or_beyond(key[0])
    return beyond if start is None else start & beyond


_PLAIN: Final = frozenset((int, str, uuid.UUID))
"""Types of values that nothing is wrapped around."""


def _plain(value: Any) -> Any:
    """A value without what a driver or a field has wrapped it in: buffers, members of enumerations."""
    if isinstance(value, memoryview):
        return bytes(value)
    if isinstance(value, str):
        return str.__str__(value)
    return int(value) if isinstance(value, int) and not isinstance(value, bool) else value


_ANY: Final[models.Field[Any, Any]] = models.Field()


def _given(value: Any) -> Value:
    return Value(value, output_field=_ANY)


# From a QuerySet to its order.


def order_of(rows: models.QuerySet[Any], connection: BaseDatabaseWrapper) -> Order:
    """The order in which a QuerySet of model instances gives its rows, made unique; raises `Unordered`."""
    nulls_are_largest = bool(connection.features.nulls_order_largest)
    has_uuids = bool(connection.features.has_native_uuid_field)
    columns: list[Column] = []
    for entry in _entries(rows):
        for column in _columns(rows, entry, nulls_are_largest):
            if all(column.path != earlier.path for earlier in columns):
                columns.append(column)
            if column.is_unique:
                return Order(tuple(columns), _loads(rows), has_uuids)
    present = {column.path for column in columns}
    # The primary key follows the direction before it, so that one index can serve the whole order.
    descending = columns[-1].descending if columns else False
    for field in rows.model._meta.pk_fields:
        if field.attname not in present:
            columns.append(Column(field.attname, field, descending=descending))
    return Order(tuple(columns), _loads(rows), has_uuids)


def _loads(rows: models.QuerySet[Any]) -> bool:
    deferred, _ = rows.query.deferred_loading
    return bool(deferred)


def _entries(rows: models.QuerySet[Any]) -> list[Any]:
    query = rows.query
    if query.extra_order_by:
        raise Unordered("it is ordered by extra(); order it by columns")
    given = query.order_by or (query.default_ordering and rows.model._meta.ordering) or ()
    entries = [_as_order(entry) for entry in given]
    return entries if query.standard_ordering else [_turned(entry) for entry in entries]


def _as_order(entry: Any) -> OrderBy:
    if entry == "?":
        raise Unordered("it is in random order ('?'); order it by columns")
    if isinstance(entry, str):
        return OrderBy(F(entry.removeprefix("-")), descending=entry.startswith("-"))
    if isinstance(entry, F):
        return OrderBy(entry)
    if isinstance(entry, OrderBy) and isinstance(entry.expression, F):
        return entry
    raise Unordered(f"it is ordered by the expression {shown(entry)}; order it by columns")


def _turned(entry: OrderBy) -> OrderBy:
    return OrderBy(
        entry.expression,
        descending=not entry.descending,
        nulls_first=entry.nulls_last,
        nulls_last=entry.nulls_first,
    )


def _columns(rows: models.QuerySet[Any], entry: OrderBy, nulls_are_largest: bool) -> Iterator[Column]:
    expression: Any = entry.expression
    path: str = expression.name
    if path in rows.query.annotations:
        raise Unordered(f"it is ordered by the annotation {path!r}; order it by columns")
    if path == "pk":
        for field in rows.model._meta.pk_fields:
            yield Column(field.attname, field, descending=entry.descending)
        return
    path, field, nullable = _resolved(rows.model, path)
    if entry.nulls_first or entry.nulls_last:
        nulls_last = bool(entry.nulls_last)
    else:
        nulls_last = nulls_are_largest != entry.descending
    yield Column(path, field, entry.descending, nullable, nulls_last and nullable)


def _resolved(model: type[models.Model], path: str) -> tuple[str, models.Field[Any, Any], bool]:
    """The column at the end of a path, the path to it by its own name, and whether it can be NULL."""
    *hops, last = path.split("__")
    nullable = False
    meta = model._meta
    for hop in hops:
        relation = _field(meta, hop, path)
        related = getattr(relation, "related_model", None)
        if related is None:
            raise Unordered(f"it is ordered by {path!r}, which is not a column; order it by columns")
        _refuse_many(relation, path)
        nullable = nullable or not relation.concrete or relation.null
        meta = related._meta
    field = meta.pk if last == "pk" else _field(meta, last, path)
    _refuse_many(field, path)
    if not getattr(field, "concrete", False) or field.column is None:
        raise Unordered(f"it is ordered by {path!r}, which is not a column; order it by columns")
    if isinstance(field, models.JSONField):
        raise Unordered(f"it is ordered by {path!r}, which holds JSON; order it by another column")
    target: Any = field.related_model
    if field.is_relation and last != field.attname and last != "pk" and target._meta.ordering:
        raise Unordered(
            f"it is ordered by {path!r}, which means the order of {target._meta.label}; "
            f"write {'__'.join([*hops, field.attname])!r} or {path + '__<column>'!r}"
        )
    return "__".join([*hops, field.attname]), field, nullable or field.null


def _refuse_many(field: Any, path: str) -> None:
    if field.one_to_many or field.many_to_many:
        raise Unordered(
            f"it is ordered by {path!r}, of which a row can have many; order it by its own columns"
        )


def _field(meta: Any, name: str, path: str) -> Any:
    try:
        return meta.pk if name == "pk" else meta.get_field(name)
    except FieldDoesNotExist:
        raise Unordered(f"it is ordered by {path!r}, which is not a column; order it by columns") from None


# Keys as JSON. A value that JSON has no word for is an object of one entry: its type and its text.

_TO_TEXT: Final[Sequence[tuple[type, str, Callable[[Any], Any]]]] = (
    (datetime.datetime, "datetime", datetime.datetime.isoformat),
    (datetime.date, "date", datetime.date.isoformat),
    (datetime.time, "time", datetime.time.isoformat),
    (datetime.timedelta, "duration", lambda value: [value.days, value.seconds, value.microseconds]),
    (decimal.Decimal, "decimal", str),
    (uuid.UUID, "uuid", str),
    (float, "float", float.__repr__),
    (bytes, "bytes", bytes.hex),
)
_FROM_TEXT: Final[dict[str, Callable[[Any], Any]]] = {
    "datetime": datetime.datetime.fromisoformat,
    "date": datetime.date.fromisoformat,
    "time": datetime.time.fromisoformat,
    "duration": lambda parts: datetime.timedelta(*parts),
    "decimal": decimal.Decimal,
    "uuid": uuid.UUID,
    "float": float,
    "bytes": bytes.fromhex,
    "text": lambda text: bytes.fromhex(text).decode("utf-8", "surrogatepass"),
}


def encode(key: Key) -> list[Any]:
    """A key as JSON; raises `Unordered` for a value of a type that could not be given back."""
    return [_encoded(value) for value in key]


def decode(values: list[Any]) -> Key:
    """The key that `encode` was given."""
    return [_decoded(value) for value in values]


def _encoded(value: Any) -> Any:
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):
        # JSON for a database holds neither NUL nor half characters; keys from SQLite may.
        storable = "\x00" not in value and not any("\ud800" <= character <= "\udfff" for character in value)
        return value if storable else {"text": value.encode("utf-8", "surrogatepass").hex()}
    if isinstance(value, int):
        return value
    for kind, tag, to_text in _TO_TEXT:
        if isinstance(value, kind):
            return {tag: to_text(value)}
    raise Unordered(
        f"it is ordered by a column whose values are {type(value).__qualname__} ({shown(value)}), which a "
        "cursor cannot hold; order it by another column"
    )


def _decoded(value: Any) -> Any:
    if not isinstance(value, dict):
        return value
    ((tag, text),) = value.items()
    return _FROM_TEXT[tag](text)
