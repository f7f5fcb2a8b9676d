"""Reading by key gives every row once, in the database's own order."""

from __future__ import annotations

import datetime
import json
import uuid
from decimal import Decimal
from typing import Any

import pytest
from django.contrib.auth.models import Group
from django.db import connection
from django.db.models import Count, F, Model, QuerySet
from django.db.models.functions import Length, Lower
from django.test.utils import CaptureQueriesContext

from durable_jobs import keyset
from durable_jobs.keyset import Unordered
from durable_jobs.models import Job
from tests.models import Crate, Depot, Leg, Parcel, Shipment, Token

pytestmark = pytest.mark.django_db


def order_of(rows: QuerySet[Any]) -> keyset.Order:
    return keyset.order_of(rows, connection)


def read(rows: QuerySet[Any], size: int = 2) -> list[Any]:
    """All rows, by pieces, each cursor carried through JSON."""
    order = order_of(rows)
    found: list[Model] = []
    end = [order.key(row) for row in order.sort(rows, backwards=True)[:1]]
    cursor = None
    for _ in range(1000):
        piece = order.sort(rows).filter(order.until(end[0])) if end else rows.none()
        if cursor is not None:
            piece = piece.filter(order.after(keyset.decode(json.loads(json.dumps(cursor)))))
        entries = [(order.key(row), row) for row in piece[:size]]
        if not entries:
            return found
        found += [row for _, row in entries]
        cursor = keyset.encode(entries[-1][0])
    raise AssertionError("never came to an end")


@pytest.fixture
def parcels() -> list[Parcel]:
    """Rows with ties, NULLs, and keys in another order than their primary keys."""
    depots = [None, *(Depot.objects.create(name=name) for name in (None, "b", "a", "b"))]
    day = datetime.datetime(2026, 3, 1, 12, tzinfo=datetime.UTC)
    return [
        Parcel.objects.create(
            depot=depots[number % 5],
            label="zÄa' b"[number % 6] * (number % 3),
            rank=[None, 3, -1, 3][number % 4],
            weight=Decimal(number % 4) / 3 + Decimal("0.001"),
            sent_at=None
            if number % 5 == 0
            else day + datetime.timedelta(microseconds=(number % 3) * 500_000),
            rate=[0.1, 1e300, -0.1][number % 3],
            done=number % 2,
        )
        for number in range(23)
    ]


ORDERS: list[tuple[Any, ...]] = [
    (),
    ("pk",),
    ("-pk",),
    ("label",),
    ("-label",),
    ("weight",),
    ("-weight", "label"),
    ("rate",),
    ("rank",),
    ("-rank",),
    ("rank", "-label"),
    ("done", "-rank", "label"),
    ("sent_at",),
    ("-sent_at", "rank"),
    ("depot_id",),
    ("-depot_id", "rank"),
    ("depot__name",),
    ("-depot__name", "label"),
    ("depot__pk",),
    (F("rank").asc(nulls_last=True),),
    (F("rank").asc(nulls_first=True), "label"),
    (F("rank").desc(nulls_last=True), "-sent_at"),
    (F("rank").desc(nulls_first=True),),
    (F("label"), F("rank").desc()),
    ("label", "pk", "rank"),
]


@pytest.mark.parametrize("order", ORDERS, ids=str)
def test_every_row_comes_once_in_the_databases_own_order(
    parcels: list[Parcel], order: tuple[Any, ...]
) -> None:
    rows = Parcel.objects.order_by(*order)
    names = order_of(rows).names
    follow = "-pk" if names[-1].startswith("-") else "pk"
    expected = list(Parcel.objects.order_by(*order, follow))
    assert len(expected) == len(parcels)
    for size in (1, 4, 50):
        assert read(rows, size) == expected
    if order:
        assert read(rows.reverse(), 4) == expected[::-1]


@pytest.mark.sqlite_only
def test_equal_times_that_are_stored_as_unequal_texts_come_once(parcels: list[Parcel]) -> None:
    texts = [
        "2026-03-01 12:00:00",
        "2026-03-01 12:00:00.000",
        "2026-03-01 12:00:00.5",
        "2026-03-01 12:00:00.500",
    ]
    with connection.cursor() as cursor:
        for number, parcel in enumerate(parcels):
            cursor.execute(
                "UPDATE tests_parcel SET sent_at = %s WHERE id = %s", [texts[number % 4], parcel.pk]
            )
    for size in (1, 3):
        assert read(Parcel.objects.order_by("sent_at"), size) == list(
            Parcel.objects.order_by("sent_at", "pk")
        )


def test_rows_read_beside_leave_no_trace_on_the_row(parcels: list[Parcel]) -> None:
    for row in read(Parcel.objects.order_by("depot__name")):
        assert not [name for name in vars(row) if name.startswith(keyset.BESIDE)]


@pytest.mark.parametrize("rows", [Parcel.objects.only("done"), Parcel.objects.defer("label", "rank")])
def test_a_column_that_was_left_out_costs_no_query(parcels: list[Parcel], rows: QuerySet[Any]) -> None:
    rows = rows.order_by("label", "rank")
    order = order_of(rows)
    loaded = list(order.sort(rows))
    with CaptureQueriesContext(connection) as queries:
        keys = [order.key(row) for row in loaded]
    assert not queries.captured_queries
    assert keys == [[p.label, p.rank, p.pk] for p in order.sort(Parcel.objects.all())]
    assert {p.pk for p in read(rows)} == {p.pk for p in parcels}


def test_the_primary_key_is_added_only_where_it_is_needed() -> None:
    assert order_of(Parcel.objects.all()).names == ["id"]
    assert order_of(Parcel.objects.order_by("-label")).names == ["-label", "-id"]
    assert order_of(Parcel.objects.order_by("label", "pk", "rank")).names == ["label", "id"]
    assert order_of(Parcel.objects.order_by("label", "label")).names == ["label", "id"]
    assert order_of(Token.objects.order_by("done", "-id")).names == ["done", "-id"]
    assert order_of(Parcel.objects.order_by("pk")).is_primary_key
    assert not order_of(Parcel.objects.order_by("done")).is_primary_key


def test_a_models_own_ordering_counts_unless_it_was_cleared() -> None:
    last = "last" if connection.vendor == "postgresql" else "first"
    assert order_of(Depot.objects.all()).names == [f"name nulls {last}", "id"]
    assert order_of(Depot.objects.order_by()).names == ["id"]


def test_random_keys_are_read_in_their_order() -> None:
    tokens = [Token.objects.create() for _ in range(12)]
    assert read(Token.objects.all(), 5) == sorted(tokens, key=lambda token: token.pk)


@pytest.mark.parametrize(
    "order", [(), ("-pk",), ("-route", "number"), ("done",), ("-done", "number")], ids=str
)
def test_keys_of_two_columns_are_read_in_their_order(order: tuple[str, ...]) -> None:
    Leg.objects.bulk_create(Leg(route="abc"[n % 3], number=n, done=n % 2) for n in range(12))
    follow = ("-pk",) if order == ("-pk",) else ("pk",)
    assert read(Leg.objects.order_by(*order), 5) == list(Leg.objects.order_by(*order, *follow))


@pytest.mark.parametrize("order", [("pk",), ("label", "-size"), ("rank", "size"), ("-rank",)], ids=str)
def test_rows_in_two_tables_are_read_in_their_order(order: tuple[str, ...]) -> None:
    for number in range(12):
        Crate.objects.create(label="abc"[number % 3], rank=[None, 1, 2][number % 3], size=number % 2)
    rows = Crate.objects.order_by(*order)
    follow = "-pk" if order[-1].startswith("-") else "pk"
    assert read(rows, 5) == list(rows.order_by(*order, follow))


def test_members_of_enumerations_become_plain_values() -> None:
    parcel = Parcel.objects.create(label=Shipment.Status.LOST)
    (label, _) = order_of(Parcel.objects.order_by("label")).key(parcel)
    assert type(label) is str
    assert label == "lost"


def test_a_whole_row_is_compared_where_an_index_can_serve_it() -> None:
    order = order_of(Parcel.objects.order_by("label"))
    assert f'("{Parcel._meta.db_table}"."label", "{Parcel._meta.db_table}"."id") > (' in str(
        Parcel.objects.filter(order.after(["a", 1])).query
    )


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        (lambda: Parcel.objects.order_by("?"), "random"),
        (lambda: Parcel.objects.order_by(Lower("label")), "expression"),
        (lambda: Parcel.objects.order_by(Length("label").desc()), "expression"),
        (lambda: Parcel.objects.order_by(F("rank") + 1), "expression"),
        (lambda: Parcel.objects.annotate(size=Length("label")).order_by("size"), "annotation 'size'"),
        (lambda: Parcel.objects.order_by("depot"), "write 'depot_id' or 'depot__<column>'"),
        (lambda: Parcel.objects.order_by("sent_at__year"), "not a column"),
        (lambda: Depot.objects.order_by("parcel__label"), "can have many"),
        (lambda: Depot.objects.order_by("parcel"), "can have many"),
        (lambda: Group.objects.order_by("permissions"), "can have many"),
        (lambda: Parcel.objects.order_by("crate"), "not a column"),
        (lambda: Job.objects.order_by("meta"), "holds JSON"),
        (lambda: Depot.objects.annotate(n=Count("parcel")).order_by("-n"), "annotation 'n'"),
        (lambda: Parcel.objects.extra(order_by=["label"]), "extra"),
    ],
)
def test_an_order_that_cannot_be_read_is_refused(rows: Any, words: str) -> None:
    with pytest.raises(Unordered, match=r"it is ordered by|it is in random order") as caught:
        order_of(rows())
    assert words in str(caught.value)


@pytest.mark.parametrize(
    "value",
    [
        None,
        True,
        -(2**80),
        1.5,
        0.1 + 0.2,
        float("inf"),
        "",
        "zażółć \U0001f600 \\u0000",
        "a\x00b",
        "a\ud800b",
        Decimal("1.10"),
        Decimal("1E+400"),
        uuid.UUID(int=5),
        datetime.date(2026, 1, 2),
        datetime.time(1, 2, 3, 4),
        datetime.datetime(2026, 1, 2, 3, 4, 5, 6),
        datetime.datetime(2026, 1, 2, tzinfo=datetime.timezone(datetime.timedelta(hours=5, minutes=30))),
        datetime.timedelta(days=-3, microseconds=7),
        b"\x00\xff",
    ],
    ids=repr,
)
def test_a_key_comes_back_from_json_as_it_was(value: Any) -> None:
    (back,) = keyset.decode(json.loads(json.dumps(keyset.encode([value]))))
    assert back == value
    assert type(back) is type(value)
    assert str(back) == str(value)


@pytest.mark.parametrize("value", [object(), {"a": 1}, [1], (1,), Exception("no")])
def test_a_value_that_would_not_come_back_is_refused(value: Any) -> None:
    with pytest.raises(Unordered, match="cannot hold"):
        keyset.encode([value])
