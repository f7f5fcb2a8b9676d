"""`BatchKind`: a kind that goes through a collection batch by batch and resumes exactly where it was."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple, Protocol

from django.db import DatabaseError, connections, models, router, transaction
from django.db.models.manager import BaseManager
from django.db.models.query import ModelIterable, RawQuerySet

from durable_jobs import database, exceptions, keyset
from durable_jobs.exceptions import ErrorClass, Park, RetryAfter, TerminalError, shown
from durable_jobs.kinds import (
    ABSENT,
    KEEP,
    Done,
    Fault,
    Kind,
    Outcome,
    Sentinel,
    Yield,
    classify,
    fault_of_integer,
    faults_of_call,
    is_integer,
    overrides,
)
from durable_jobs.logs import log

if TYPE_CHECKING:
    from durable_jobs.runner import SliceContext

UNTIL_EMPTY: Final = "until_empty"
WIND_AT_ONCE: Final = 10_000
"""How many items an iterable is wound forward before a stop is looked for."""


class BatchKind(Kind):
    """A kind that goes through a collection batch by batch: give it `collection` and `process`.

    The cursor is committed with each batch, so after a crash, a deploy or a failure nothing is repeated and
    nothing is skipped. `collection` gives

    - a QuerySet of model instances. It is read by its ordering, made unique with the primary key, inside the
      batch's transaction. Order it by columns that do not change while the job runs. The highest key at the
      beginning is the end, so a table that grows meanwhile ends; rows that appear behind the cursor (random
      keys, late commits) are not seen in that pass. `passes = "until_empty"` begins again until a pass finds
      nothing, for a collection whose filter leaves out what is done; `passes = n` goes through it n times.
    - or an iterable that gives the same items in the same order each time, such as the lines of a file. It
      resumes by position (sequences by slicing) and is closed (`close()`) at the end of each slice. Keep the
      file's size or hash in the job's input and compare.

    With `lock_rows` the rows of a batch are locked (FOR NO KEY UPDATE on PostgreSQL; on SQLite nobody else
    writes anyway). Every slice does one batch at least.

    When a slice has failed and the kind has `on_item_error`, the next batch is taken item by item, each in a
    savepoint, and the kind is asked about every item that fails: True skips it, which is recorded as the
    event `item_skipped`. `before_batch` and `process` are then called with one item at a time. An error that
    ends the job by its class (terminal, unrecoverable) is asked about at once. Errors of the database as a
    whole are not asked about. More than `max_skipped` items in one pass park the job as `too_many_skipped`.

    Raise `cursor_version` when a change of the collection makes old cursors wrong: a job with a cursor of
    another version is parked as `cursor_version` unless `migrate_cursor` translates it. So is a job whose
    cursor has the right version but another ordering: nobody said what it means now.

    The checkpoint is an object: `version` (the cursor_version), `order` (the columns, null for an iterable),
    `pass` (from 1), `cursor` (the key of the last row, or the number of items done), `end` (the last key of
    this pass), `found` and `skipped` (items of this pass), `before` (end, found and skipped of the pass
    before, or null). A key is a list of values as the database driver gives them; dates, Decimals, UUIDs and
    the like are objects of one entry, `{"uuid": "…"}`.

    What cannot be read so fails the job as terminal with the code `bad_collection`; `collection_changed` says
    that an iterable has become shorter than what was done, `collection_not_shrinking` that an until-empty
    collection still holds what was processed.
    """

    orphan_policy = "redrive"
    batch_size: int = 500
    lock_rows: bool = False
    passes: int | Literal["until_empty"] = 1
    max_skipped: int = 0
    cursor_version: int = 1
    count_limit: int = 10_000_000
    """Up to how many rows `total` counts; more, or 0, leaves the total unknown."""

    def collection(self, ctx: SliceContext) -> Iterable[Any]:
        """What to go through: a QuerySet, or an iterable with the same items in the same order each time."""
        raise NotImplementedError

    def total(self, ctx: SliceContext) -> int | None:
        """How many items a pass has, asked once when the job begins; None = unknown."""
        source = _opened(self, ctx)
        try:
            return source.count(self.count_limit)
        finally:
            source.close()

    def before_batch(self, ctx: SliceContext, batch: list[Any]) -> Any:
        """Fetch, call, wait, outside the transaction. Its value is `ctx.prepared`; `Yield` ends the slice."""

    def process(self, ctx: SliceContext, batch: list[Any]) -> None:
        """Work on a batch inside its transaction, which commits the cursor. Never sleep or call out here."""
        raise NotImplementedError

    def on_item_error(self, ctx: SliceContext, item: Any, error: Exception) -> bool:
        """Whether to skip an item that failed; asked inside the batch's transaction."""
        return False

    def migrate_cursor(self, old_version: int | None, cursor: Any) -> Any:
        """Translate a cursor of another version: the key (one value for each column of the order), or the
        number of items done; None begins the pass anew. Called for the end of the pass, too. For a checkpoint
        that no BatchKind wrote, the version is None and the cursor is the whole checkpoint.
        """
        raise NotImplementedError

    def step(self, ctx: SliceContext) -> Outcome:
        """Go through batches until the collection or the slice is at its end."""
        return _Slice(self, ctx).run()

    def _faults(self) -> Iterator[Fault]:
        yield from super()._faults()
        for hook in ("collection", "process"):
            if not overrides(self, hook):
                yield Fault(hook, ABSENT, "is missing", f"Define {hook}; BatchKind's docstring shows how.")
        for hook, values in _HOOKS.items():
            yield from faults_of_call(self, hook, values, generator=hook == "collection")
        yield from fault_of_integer(self, "batch_size", 1, 100_000)
        yield from fault_of_integer(self, "max_skipped", 0, 1_000_000_000)
        yield from fault_of_integer(self, "cursor_version", 1, 1_000_000_000)
        yield from fault_of_integer(self, "count_limit", 0, 1_000_000_000_000)
        if self.passes != UNTIL_EMPTY and not (is_integer(self.passes) and 1 <= self.passes <= 1000):
            yield Fault("passes", self.passes, "is out of range", 'Use 1 to 1000, or "until_empty".')
        if not isinstance(self.lock_rows, bool):
            yield Fault("lock_rows", self.lock_rows, "is not a truth value", "Write True or False.")
        if overrides(self, "on_item_error") and self.retry.failures < 2:
            yield Fault(
                "retry.failures",
                self.retry.failures,
                "ends the job at the first failure, so on_item_error would never be asked",
                "Raise it to 2 or more, or leave on_item_error out.",
            )


_HOOKS: Final = {
    "collection": 1,
    "total": 1,
    "before_batch": 2,
    "process": 2,
    "on_item_error": 3,
    "migrate_cursor": 2,
}


class _Again(Enum):
    """Says that the pass goes on with a fresh collection."""

    AGAIN = "again"


_AGAIN: Final = _Again.AGAIN


class BadCollection(TerminalError):
    """The collection cannot be gone through; nothing was done."""


def _refused(problem: str, code: str = "bad_collection") -> BadCollection:
    return BadCollection(problem, code=code)


@dataclass(frozen=True)
class _Position:
    """How far the job has come; what the checkpoint holds."""

    order: list[str] | None = None
    number: int = 1
    cursor: Any = None
    end: Any = None
    found: int = 0
    skipped: int = 0
    before: dict[str, Any] | None = None

    def next_pass(self) -> _Position:
        before = {"end": _packed(self.end), "found": self.found, "skipped": self.skipped}
        return _Position(order=self.order, number=self.number + 1, before=before)

    def as_checkpoint(self, version: int) -> dict[str, Any]:
        return {
            "version": version,
            "order": self.order,
            "pass": self.number,
            "cursor": _packed(self.cursor),
            "end": _packed(self.end),
            "found": self.found,
            "skipped": self.skipped,
            "before": self.before,
        }

    @classmethod
    def from_checkpoint(cls, saved: dict[str, Any]) -> _Position:
        return cls(
            order=saved["order"],
            number=saved["pass"],
            cursor=_unpacked(saved["cursor"]),
            end=_unpacked(saved["end"]),
            found=saved["found"],
            skipped=saved["skipped"],
            before=saved["before"],
        )


def _packed(cursor: Any) -> Any:
    try:
        return keyset.encode(cursor) if isinstance(cursor, list) else cursor
    except keyset.Unordered as error:
        raise _refused(f"The collection cannot be read by its order: {error}.") from error


def _unpacked(cursor: Any) -> Any:
    return keyset.decode(cursor) if isinstance(cursor, list) else cursor


class _Window(NamedTuple):
    """Items, and beside each its key (of a row) or its position."""

    items: list[Any]
    keys: Sequence[Any]


class _Batch(NamedTuple):
    items: list[Any]
    keys: Sequence[Any]
    cursor: Any
    """Where the next batch begins."""
    seen: int


class _Slice:
    """One slice of one job: reads where it was, goes on, and says how it ended."""

    def __init__(self, kind: BatchKind, ctx: SliceContext) -> None:
        self.kind, self.ctx = kind, ctx
        self.prepares = overrides(kind, "before_batch")
        self.asks = overrides(kind, "on_item_error")
        self.one_by_one = self.asks and ctx.job.consecutive_failures > 0
        self.prepared: dict[Any, Any] = {}
        self.failed: dict[Any, Exception] = {}
        self.worked = False
        self.total: int | Sentinel | None = KEEP

    def run(self) -> Outcome:
        self.begins = self.ctx.checkpoint is None
        self.position = self._resumed()
        while True:
            source = _opened(self.kind, self.ctx)
            try:
                outcome = self._pass(source)
            finally:
                source.close()
            if outcome is _AGAIN:
                continue
            if outcome is not None:
                return outcome
            if self._is_last_pass():
                return Done()
            self.position = self.position.next_pass()

    def _pass(self, source: _Source) -> Outcome | _Again | None:
        """Go on with the current pass: None at its end, an outcome when the slice ends before."""
        self._check_order(source)
        self.position = replace(source.begin(self.position), order=source.names)
        if self.begins:
            self.total, self.begins = self._count(source), False
        self.one_by_one = self.one_by_one or self._expects_bad_items()
        while not source.is_over(self.position):
            # One batch at least for each slice, or a slow start would never come to any.
            if self.ctx.stop.is_set() or (self.worked and self.ctx.should_yield()):
                return Yield()
            outcome = self._batch(source)
            if outcome is not None:
                return outcome
        return None

    def _batch(self, source: _Source) -> Outcome | _Again | None:
        try:
            return self._work(source)
        except Exception as error:
            # A failure that is tried again comes back item by item; this one would not come back.
            ends_job = classify(self.kind, error) is not ErrorClass.TRANSIENT
            if self.one_by_one or not self.asks or not ends_job or not _is_the_items(error):
                raise
        self.one_by_one = True
        # From a fresh collection, because the failed attempt may have changed the items in memory.
        return _AGAIN

    def _work(self, source: _Source) -> Outcome | None:
        window = None
        if source.reads_ahead or self.prepares:
            window = source.ahead(self.position, self.kind.batch_size)
            outcome = self._prepare(window) if self.prepares and window.items else None
            if outcome is not None:
                return outcome
            if not window.items:
                source.finish()
                return None
        with self.ctx.fenced():
            batch = source.inside(self.position, self.kind.batch_size, window)
            position = self._commit(batch) if batch.seen else None
        if position is None:
            source.finish()
            return None
        self.position, self.total, self.worked = position, KEEP, True
        self.one_by_one = self._expects_bad_items()
        return None

    def _expects_bad_items(self) -> bool:
        """In a later pass what was skipped before comes again, and not much else."""
        return self.asks and self.position.before is not None and bool(self.position.before["skipped"])

    def _prepare(self, window: _Window) -> Outcome | None:
        """Call `before_batch`; an outcome that it gives ends the slice."""
        self.prepared, self.failed = {}, {}
        if not self.one_by_one:
            self.ctx.prepared = value = self.kind.before_batch(self.ctx, list(window.items))
            return _outcome(value)
        for item, key in zip(*window, strict=True):
            try:
                value = self.kind.before_batch(self.ctx, [item])
            except Exception as error:
                if not _is_the_items(error):
                    raise
                self.failed[_hashed(key)] = error
                continue
            outcome = _outcome(value)
            if outcome is not None:
                return outcome
            self.prepared[_hashed(key)] = value
        return None

    def _commit(self, batch: _Batch) -> _Position:
        """Process a batch and write its cursor, inside the fence."""
        skipped = 0
        if self.one_by_one:
            for item, key in zip(batch.items, batch.keys, strict=True):
                skipped += self._skips(item, key, self.position.skipped + skipped)
        elif batch.items:
            self._process(list(batch.items))
        position = replace(
            self.position,
            cursor=batch.cursor,
            found=self.position.found + batch.seen - skipped,
            skipped=self.position.skipped + skipped,
        )
        self.ctx.save_checkpoint(
            position.as_checkpoint(self.kind.cursor_version), advance=len(batch.items), total=self.total
        )
        return position

    def _skips(self, item: Any, key: Any, skipped: int) -> bool:
        """Process one item; True when it failed and the kind skips it."""
        try:
            failed = self.failed.get(_hashed(key))
            if failed is not None:
                raise failed
            self.ctx.prepared = self.prepared.get(_hashed(key))
            with transaction.atomic(using=self.ctx.alias):
                self._process([item])
            return False
        except Exception as error:
            if not _is_the_items(error) or not self.kind.on_item_error(self.ctx, item, error):
                raise
            facts = exceptions.describe(error)
        what = f"{facts.type}: {exceptions.cut(facts.message, 1000)}"
        if skipped >= self.kind.max_skipped:
            raise Park(
                "too_many_skipped",
                f"More than max_skipped = {self.kind.max_skipped} items of this pass failed. The last one: "
                f"{shown(item)} failed with {what}",
            )
        self.ctx.record(
            "item_skipped",
            code=facts.code or "",
            message=exceptions.cut(facts.message, 1000),
            data={"cursor": _packed(key), "item": shown(item), "error": what},
        )
        return True

    def _process(self, items: list[Any]) -> None:
        process: Callable[..., Any] = self.kind.process
        if isinstance(process(self.ctx, items), Outcome):
            raise _refused(
                "process returned an outcome, but inside the batch's transaction there is only finishing and "
                "raising. Return Yield from before_batch, or raise RetryAfter.",
                code="bad_outcome",
            )

    def _count(self, source: _Source) -> int | None:
        if overrides(self.kind, "total"):
            total = self.kind.total(self.ctx)
        else:
            total = source.count(self.kind.count_limit)
        if total is None or self.kind.passes == UNTIL_EMPTY:
            return total
        return total * self.kind.passes

    def _is_last_pass(self) -> bool:
        position, before = self.position, self.position.before
        if self.kind.passes != UNTIL_EMPTY:
            return position.number >= self.kind.passes
        if not position.found:
            return True
        if before and not position.skipped and before == position.next_pass().before:
            raise _refused(
                f"Two passes found the same {position.found} items, so what was processed is still in the "
                'collection. With passes = "until_empty" its filter must leave out what is done.',
                code="collection_not_shrinking",
            )
        return False

    def _resumed(self) -> _Position:
        saved = self.ctx.checkpoint
        if saved is None:
            return _Position()
        try:
            position, version = _Position.from_checkpoint(saved), saved["version"]
        except (KeyError, TypeError, ValueError):
            return self._migrated(_Position(cursor=saved), None)
        if version != self.kind.cursor_version:
            return self._migrated(position, version)
        return position

    def _migrated(self, position: _Position, version: int | None) -> _Position:
        if not overrides(self.kind, "migrate_cursor"):
            written = "by no BatchKind" if version is None else f"with cursor_version {version}"
            raise Park(
                "cursor_version",
                f"The checkpoint was written {written}; this kind has cursor_version = "
                f"{self.kind.cursor_version} and no migrate_cursor. Define it, or redrive from the start.",
            )
        cursor = self.kind.migrate_cursor(version, position.cursor)
        end = None if position.end is None else self.kind.migrate_cursor(version, position.end)
        return replace(position, order=None, cursor=cursor, end=end, before=None)

    def _check_order(self, source: _Source) -> None:
        cursor, order = self.position.cursor, self.position.order
        if cursor is None:
            return
        if order is not None and order != source.names:
            problem = f"was written in the order {order}, and the collection now has {source.names}"
        elif not source.understands(cursor):
            problem = f"has the cursor {shown(cursor)}, which does not fit the order {source.names}"
        else:
            return
        raise Park(
            "cursor_version",
            f"The checkpoint {problem}. Restore the order; or raise cursor_version and define migrate_cursor, "
            "or redrive from the start.",
        )


def _outcome(value: Any) -> Outcome | None:
    if isinstance(value, RetryAfter):
        raise value
    return value if isinstance(value, Outcome) else None


def _is_the_items(error: Exception) -> bool:
    """Whether an error may be the fault of an item, about which the kind is asked."""
    if isinstance(error, Park | RetryAfter | BadCollection):
        return False
    return not database.is_outage(error) and not database.is_conflict(error)


def _hashed(key: Any) -> Any:
    return tuple(key) if isinstance(key, list) else key


# Where batches come from.


class _Source(Protocol):
    names: list[str] | None
    reads_ahead: bool

    def understands(self, cursor: Any) -> bool: ...
    def begin(self, position: _Position) -> _Position: ...
    def count(self, limit: int) -> int | None: ...
    def is_over(self, position: _Position) -> bool: ...
    def finish(self) -> None: ...
    def ahead(self, position: _Position, size: int) -> _Window: ...
    def inside(self, position: _Position, size: int, window: _Window | None) -> _Batch: ...
    def close(self) -> None: ...


def _opened(kind: BatchKind, ctx: SliceContext) -> _Source:
    collection: Any = kind.collection(ctx)
    if isinstance(collection, BaseManager):
        collection = collection.all()
    if isinstance(collection, models.QuerySet):
        return _Rows(collection, kind, ctx.alias)
    if isinstance(collection, RawQuerySet):
        raise _refused("The collection is a raw query, which cannot be read in pieces. Use a QuerySet.")
    if isinstance(collection, set | frozenset):
        raise _refused(
            "The collection is a set, which has another order in each process. Sort it into a list."
        )
    if isinstance(collection, str | bytes) or not isinstance(collection, Iterable):
        raise _refused(
            f"The collection is {shown(collection)}. Return a QuerySet, a list or another iterable of items."
        )
    if kind.passes == UNTIL_EMPTY:
        raise _refused(
            'passes = "until_empty" needs a QuerySet; an iterable cannot shrink and keep its order.'
        )
    return _Items(collection, ctx)


class _Rows:
    """A QuerySet, read by key from the cursor to the end that was fixed when the pass began."""

    reads_ahead = False

    def __init__(self, rows: models.QuerySet[Any], kind: BatchKind, alias: str) -> None:
        self._rows = _on_jobs_alias(_readable(rows), kind, alias)
        connection = connections[self._rows.db]
        try:
            self._order = keyset.order_of(self._rows, connection)
        except keyset.Unordered as error:
            raise _refused(f"The collection cannot be read by its order: {error}.") from error
        self._locks = kind.lock_rows and connection.features.has_select_for_update
        # A join over many gives a row more than once. Those of select_related are made later.
        query = self._rows.query
        self._repeats = len(query.alias_map) > 1 or bool(query.extra_tables or query.select_related)
        self._of_the_pass: models.QuerySet[Any] | None = None
        self._finished = False
        self.names: list[str] | None = self._order.names
        if self._locks and self._rows.query.group_by is not None:
            raise _refused("The rows of a collection with aggregates cannot be locked. Leave lock_rows out.")

    def understands(self, cursor: Any) -> bool:
        return isinstance(cursor, list) and len(cursor) == len(self._order.columns)

    def begin(self, position: _Position) -> _Position:
        if position.end is not None:
            return position
        last = self._order.sort(self._rows.prefetch_related(None), backwards=True)[:1]
        end = next((self._order.key(row) for row in last), None)
        _packed(end)
        return replace(position, end=end)

    def count(self, limit: int) -> int | None:
        if not limit:
            return None
        try:
            number = self._rows.order_by()[: limit + 1].count()
        except DatabaseError as error:
            log(
                "collection_not_counted",
                level=logging.WARNING,
                error=error,
                model=self._rows.model._meta.label,
            )
            return None
        return number if number <= limit else None

    def is_over(self, position: _Position) -> bool:
        return self._finished or position.end is None or position.cursor == position.end

    def finish(self) -> None:
        self._finished = True

    def ahead(self, position: _Position, size: int) -> _Window:
        return self._read(self._up_to_the_end(position), position.cursor, size)

    def inside(self, position: _Position, size: int, window: _Window | None) -> _Batch:
        if window is None and self._locks and not self._order.is_primary_key:
            # A row that changes while its lock is waited for comes back with its new key, perhaps far ahead:
            # what a batch is must be known before.
            window = self.ahead(position, size)
        if window is None:
            items, keys = self._read(self._locked(self._up_to_the_end(position)), position.cursor, size)
            return _Batch(items, keys, keys[-1] if keys else None, len(keys))
        if not window.keys:
            return _Batch([], [], None, 0)
        wanted = set(map(_hashed, window.keys))
        until = window.keys[-1]
        rows = self._order.sort(self._rows).filter(self._order.until(until))
        items, keys = self._read(self._locked(rows), position.cursor, None)
        # A row that came between was not prepared; like every row behind the cursor it is for another pass.
        kept = [(item, key) for item, key in zip(items, keys, strict=True) if _hashed(key) in wanted]
        return _Batch([item for item, _ in kept], [key for _, key in kept], until, len(window.keys))

    def close(self) -> None:
        """Nothing stays open."""

    def _up_to_the_end(self, position: _Position) -> models.QuerySet[Any]:
        if self._of_the_pass is None:
            self._of_the_pass = self._order.sort(self._rows).filter(self._order.until(position.end))
        return self._of_the_pass

    def _locked(self, rows: models.QuerySet[Any]) -> models.QuerySet[Any]:
        return rows.select_for_update(no_key=True, of=("self",)) if self._locks else rows

    def _read(self, rows: models.QuerySet[Any], after: Any, size: int | None) -> _Window:
        """Those of these rows, in order, that come after a key: `size` of them, or all."""
        rows = rows.all() if after is None else rows.filter(self._order.after(after))
        items = list(rows if size is None else rows[:size])
        keys = self._order.keys(items)
        if self._repeats:
            first = [index for index, key in enumerate(keys) if not index or key != keys[index - 1]]
            items, keys = [items[index] for index in first], [keys[index] for index in first]
        if keys and keys[0] == after:
            raise _refused(
                f"The database gives {shown(after)} again as coming after itself, so its values do not come "
                f"back exactly. Order {self._rows.model._meta.label} by other columns than {self.names}."
            )
        return _Window(items, keys)


def _readable(rows: Any) -> models.QuerySet[Any]:
    readable: models.QuerySet[Any] = rows
    query = rows.query
    if query.is_sliced:
        problem = "is sliced. Bound it with a filter"
    elif query.combinator:
        problem = f"is a {query.combinator}. Use one QuerySet with Q objects"
    elif rows._fields is not None or not issubclass(rows._iterable_class, ModelIterable):
        problem = "gives values. Leave values() and values_list() out; only() saves columns"
    elif query.distinct:
        problem = "is distinct. Leave distinct() out: a row that a join repeats comes once anyway"
    elif query.select_for_update:
        problem = "locks its rows itself. Set lock_rows = True instead"
    else:
        return readable
    raise _refused(f"The collection, a QuerySet of {rows.model._meta.label}, {problem}.")


def _on_jobs_alias(rows: Any, kind: BatchKind, alias: str) -> models.QuerySet[Any]:
    """From the database that the batch commits on, never from a replica behind it."""
    using = rows._db or router.db_for_write(rows.model, **rows._hints)
    if using != alias and (rows._db is None or kind.lock_rows):
        raise _refused(
            f"The collection's {rows.model._meta.label} is written on the database {using!r}, and the batch "
            f"commits on {alias!r}: the two cannot change in one transaction. If it is only read, say "
            f".using({using!r}) and leave lock_rows out."
        )
    moved: models.QuerySet[Any] = rows.using(using)
    return moved


class _Items:
    """An iterable, read by position."""

    names: list[str] | None = None
    reads_ahead = True

    def __init__(self, collection: Iterable[Any], ctx: SliceContext) -> None:
        self._collection, self._ctx = collection, ctx
        self._iterator: Iterator[Any] | None = None
        self._finished = False

    def understands(self, cursor: Any) -> bool:
        return is_integer(cursor) and cursor >= 0

    def begin(self, position: _Position) -> _Position:
        done = position.cursor or 0
        if isinstance(self._collection, Sequence):
            length = len(self._collection)
            if length < done:
                raise self._changed(length, done)
            return position
        self._iterator = iter(self._collection)
        wound = 0
        while wound < done and not self._ctx.stop.is_set():
            step = min(WIND_AT_ONCE, done - wound)
            skipped = sum(1 for _ in itertools.islice(self._iterator, step))
            wound += skipped
            if skipped < step:
                raise self._changed(wound, done)
        return position

    def count(self, limit: int) -> int | None:
        length = getattr(self._collection, "__len__", None)
        return length() if length is not None else None

    def is_over(self, position: _Position) -> bool:
        if isinstance(self._collection, Sequence) and (position.cursor or 0) >= len(self._collection):
            return True
        return self._finished

    def finish(self) -> None:
        self._finished = True

    def ahead(self, position: _Position, size: int) -> _Window:
        done = position.cursor or 0
        if isinstance(self._collection, Sequence):
            items = list(self._collection[done : done + size])
        else:
            items = list(itertools.islice(self._iterator or (), size))
        self._finished = len(items) < size
        return _Window(items, range(done, done + len(items)))

    def inside(self, position: _Position, size: int, window: _Window | None) -> _Batch:
        items, keys = window or ([], [])
        return _Batch(items, keys, (position.cursor or 0) + len(items), len(items))

    def close(self) -> None:
        """Close what can be closed. The work is committed by then: an error here is only logged."""
        for thing in (self._iterator, self._collection):
            close = getattr(thing, "close", None)
            try:
                if callable(close):
                    close()
            except Exception as error:
                log("collection_not_closed", self._ctx.job, level=logging.ERROR, error=error)

    def _changed(self, length: int, done: int) -> BadCollection:
        return _refused(
            f"The collection has {length} items, but {done} were done before: it is not the one that the job "
            "began with. Give it back its items, or redrive the job from the start.",
            code="collection_changed",
        )
