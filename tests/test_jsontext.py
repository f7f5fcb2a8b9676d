"""Values become one text each, come back as they were, or are refused with their path."""

import datetime
import decimal
import enum
import json
import uuid
from collections import Counter, OrderedDict, defaultdict, namedtuple
from pathlib import Path

import pytest
from django.contrib.auth.models import Group
from django.http import QueryDict
from django.utils import translation
from django.utils.functional import lazystr
from django.utils.safestring import mark_safe
from django.utils.translation import gettext_lazy
from hypothesis import given
from hypothesis import strategies as st

from durable_jobs import jsontext
from durable_jobs.exceptions import InvalidInput

pytestmark = pytest.mark.any_database

MIB = 1024 * 1024
VALUES_PAGE = Path(__file__).parent.parent / "docs" / "values.md"


def encode(value, field="input", limit=MIB):
    return jsontext.encode(value, field=field, limit=limit)


def refusal(value, **options):
    with pytest.raises(InvalidInput) as caught:
        encode(value, **options)
    return caught.value


def nested(depth, leaf=None):
    value = leaf
    for _ in range(depth):
        value = [value]
    return value


def same(one, other):
    """Equal, and of the same types all the way down: 1 is not 1.0 and not True, -0.0 is not 0.0."""
    return repr(one) == repr(other)


storable_text = st.text(alphabet=st.characters(exclude_characters="\0", exclude_categories=["Cs"]))
json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.integers(min_value=-(10**400), max_value=10**400)
    | st.floats(allow_nan=False, allow_infinity=False)
    | storable_text,
    lambda children: st.lists(children) | st.dictionaries(storable_text, children),
    max_leaves=25,
)


class TestRoundTrip:
    @given(json_values)
    def test_any_json_value_comes_back_with_the_same_text(self, value):
        """A26: so its hash is the same, however often it is stored and read."""
        text = encode(value)
        again = json.loads(text)
        assert again == value
        assert encode(again) == text
        assert jsontext.verify(text, field="input", limit=MIB) == value

    @pytest.mark.parametrize(
        "value",
        [
            None,
            True,
            False,
            0,
            -1,
            2**53 + 1,
            2**63,
            -(2**63) - 1,
            10**400,
            10**4299,
            0.1,
            -0.0,
            1.0,
            1e16,
            1.5e300,
            5e-324,
            1.7976931348623157e308,
            123456789.123456789,
            "",
            " ",
            "ä",
            "e\u0301",  # stays decomposed
            "\ufeffa",
            "\u2028\u2029\x7f\x80",
            '\x01\x1f\t\n\r\b\f"\\/',
            "\ufffe\uffff\U0001fffe\U0010ffff",
            "<script>&amp;'",
            [],
            {},
            [[], {}, [None]],
            {"": 1, " ": 2, "0": 3, "a.b": 4, "ä": 5},
            nested(50, {"deep": [1.5]}),
        ],
        ids=lambda value: ascii(value)[:30],
    )
    def test_a_value_comes_back_with_its_type(self, value):
        """C083 among others."""
        text = encode(value)
        assert same(json.loads(text), value)
        assert encode(json.loads(text)) == text

    @pytest.mark.parametrize("plane", range(17))
    def test_every_plane_of_unicode_comes_back(self, plane):
        text = "".join(
            chr(point)
            for point in range(plane * 0x10000, (plane + 1) * 0x10000, 7)
            if point and not 0xD800 <= point <= 0xDFFF
        )
        encoded = encode([text], limit=MIB)
        assert json.loads(encoded) == [text]
        assert json.loads(encoded.encode().decode()) == [text]

    @pytest.mark.parametrize("backslashes", range(1, 8))
    def test_a_typed_escape_comes_back_byte_for_byte(self, backslashes):
        """C077: the six characters \\u0000, behind any number of backslashes, are no NUL."""
        value = "\\" * backslashes + "u0000"
        text = encode({"pattern": value, value: 1})
        assert json.loads(text) == {"pattern": value, value: 1}
        assert jsontext.verify(text, field="input", limit=MIB) == {"pattern": value, value: 1}

    @given(st.dictionaries(storable_text, st.integers(), min_size=2))
    def test_the_order_of_keys_does_not_matter(self, value):
        backwards = dict(reversed(value.items()))
        assert encode({"a": [backwards]}) == encode({"a": [value]})

    def test_the_text_is_canonical(self):
        assert encode({"b": [1, 2.5, "ä"], "a": None}) == '{"a":null,"b":[1,2.5,"ä"]}'

    def test_one_and_one_point_nought_are_different_values(self):
        assert encode(1) != encode(1.0)

    def test_two_hundred_levels_are_allowed_and_no_more(self):
        value = nested(200)
        assert json.loads(encode(value)) == value
        assert "more than 200 levels" in str(refusal(nested(201)))


class TestHash:
    def test_known_vectors(self):
        """A26: lower-case hexadecimal SHA-256 of the exact UTF-8 bytes."""
        assert jsontext.sha256("") == "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"
        assert jsontext.sha256("null") == "74234e98afe7498fb5daf1f36ac2d78acc339464f950703b8c019892f982b90b"
        assert jsontext.sha256('"ä"') == "1e5f2b0a7756f4b45eed5d71769ae579e023f70efba74bd855057914c7e16d40"


class Colour(enum.Enum):
    RED = "red"


class Word(enum.StrEnum):
    RED = "red"


class Number(enum.IntEnum):
    ONE = 1


class Text(str):
    pass


Point = namedtuple("Point", "x y")

ARRIVES_AS = {
    "aware datetime": (
        datetime.datetime(2026, 3, 1, 12, 30, 15, 123456, datetime.UTC),
        "2026-03-01T12:30:15.123Z",
    ),
    "datetime with an offset": (
        datetime.datetime(2026, 3, 1, 12, tzinfo=datetime.timezone(datetime.timedelta(hours=2))),
        "2026-03-01T12:00:00+02:00",
    ),
    "naive datetime": (datetime.datetime(2026, 3, 1, 12, 30), "2026-03-01T12:30:00"),
    "date": (datetime.date(2026, 3, 1), "2026-03-01"),
    "naive time": (datetime.time(12, 30, 15, 123456), "12:30:15.123"),
    "timedelta": (datetime.timedelta(days=1, hours=2, microseconds=3), "P1DT02H00M00.000003S"),
    "Decimal": (decimal.Decimal("1.10"), "1.10"),
    "UUID": (uuid.UUID(int=7), "00000000-0000-0000-0000-000000000007"),
    "lazy translation": (gettext_lazy("Yes"), "Yes"),
    "lazy text": (lazystr("later"), "later"),
}
EQUAL = {
    "SafeString": (mark_safe("<b>"), "<b>"),
    "subclass of str": (Text("a"), "a"),
    "StrEnum member": (Word.RED, "red"),
    "IntEnum member": (Number.ONE, 1),
    "OrderedDict": (OrderedDict(b=1, a=2), {"a": 2, "b": 1}),
    "defaultdict": (defaultdict(list, a=[1]), {"a": [1]}),
    "Counter": (Counter("aab"), {"a": 2, "b": 1}),
}
REFUSED = {
    "tuple": (1, 2),
    "named tuple": Point(1, 2),
    "set": {1},
    "frozenset": frozenset([1]),
    "bytes": b"x",
    "bytearray": bytearray(b"x"),
    "Enum member": Colour.RED,
    "model instance": Group(pk=7, name="editors"),
    "QuerySet": Group.objects.none(),
    "QueryDict": QueryDict("a=1&a=2"),
    "class": Group,
    "function": len,
    "generator": (number for number in [1]),
    "range": range(3),
    "complex": 1j,
    "Path": Path("/tmp"),
    "aware time": datetime.time(12, tzinfo=datetime.UTC),
    "exception": ValueError("x"),
    "NaN": float("nan"),
    "infinity": float("inf"),
    "1e400": json.loads("1e400"),
    "-infinity": float("-inf"),
    "integer of 4,301 digits": 10**4301,
    "NUL": "a\0b",
    "lone surrogate": "a\ud800b",
    "pair of surrogates": "\ud83d\ude00",
    "lazy NUL": lazystr("a\0"),
}


class TestTypes:
    @pytest.mark.parametrize(("value", "text"), ARRIVES_AS.values(), ids=list(ARRIVES_AS))
    def test_a_value_that_arrives_as_text(self, value, text):
        """C081."""
        assert json.loads(encode({"x": [value]})) == {"x": [text]}

    @pytest.mark.parametrize(("value", "expected"), EQUAL.values(), ids=list(EQUAL))
    def test_a_value_that_arrives_equal_but_plain(self, value, expected):
        """C081."""
        again = json.loads(encode({"x": value}))["x"]
        assert again == expected == value
        assert type(again) in (str, int, dict)

    @pytest.mark.parametrize("value", REFUSED.values(), ids=list(REFUSED))
    def test_a_value_that_is_refused_with_its_path(self, value):
        """C081, C083: nothing is changed silently."""
        error = refusal({"rows": [1, 2, 3, {"name": value}]})
        assert error.field == "input.rows[3].name"
        assert str(error).startswith("input.rows[3].name ")
        assert error.value is value
        assert error.way_out.endswith(".")
        assert error.code == "E_JOB_INPUT_INVALID"

    @pytest.mark.parametrize(
        ("key", "named"), [(1, "int"), (None, "NoneType"), (True, "bool"), (1.5, "float"), ((1, 2), "tuple"),
                           (uuid.UUID(int=1), "UUID"), (gettext_lazy("Yes"), "__proxy__"), (b"k", "bytes")]
    )  # fmt: skip
    def test_a_key_that_is_no_text_is_refused(self, key, named):
        """C081."""
        error = refusal({"rows": [{key: 1}]})
        assert error.field == "input.rows[0]"
        assert f"has a key of type {named}" in str(error)

    @pytest.mark.parametrize("key", ["a\0", "\udfff"])
    def test_a_key_that_cannot_be_stored_is_refused(self, key):
        error = refusal({"rows": {key: 1}})
        assert error.field == "input.rows"
        assert "has a key with" in str(error)
        str(error).encode()

    def test_a_lazy_translation_is_taken_in_the_language_of_the_call(self):
        with translation.override("de"):
            assert encode(gettext_lazy("Yes")) == '"Ja"'
        assert encode(gettext_lazy("Yes")) == '"Yes"'

    def test_the_documented_table_names_every_row(self):
        """C081: a documented table."""
        page = VALUES_PAGE.read_text()
        for name in [*ARRIVES_AS, *EQUAL, *REFUSED]:
            assert f"| {name} |" in page, name
        for _, text in ARRIVES_AS.values():
            assert f"`{text}`" in page, text


class TestPaths:
    @pytest.mark.parametrize(
        ("value", "path"),
        [
            (b"", "result"),
            ([b""], "result[0]"),
            ({"a": [[0, b""]]}, "result.a[0][1]"),
            ({"first-name": b""}, "result.first-name"),
            ({"first name": b""}, "result['first name']"),
            ({"": b""}, "result['']"),
            ({"a.b": b""}, "result['a.b']"),
            ({"0": b""}, "result['0']"),
            ({"größe": b""}, "result['größe']"),
            ({"it's": b""}, 'result["it\'s"]'),
            ({"k" * 300: b""}, f"result['{'k' * 60}']"),
            ([{}, {"a": 1}, [[], []], {"z": b""}], "result[3].z"),
        ],
    )
    def test_a_path_leads_to_the_value(self, value, path):
        assert refusal(value, field="result").field == path

    def test_the_path_of_a_deep_value_is_cut_in_the_middle(self):
        error = refusal(nested(150, b""))
        assert error.field == "input" + "[0]" * 10 + "…" + "[0]" * 10


class TestDepth:
    @pytest.mark.parametrize("make", [nested, lambda depth: nested_objects(depth)], ids=["arrays", "objects"])
    def test_ten_thousand_levels_are_refused(self, make):
        error = refusal({"rows": make(10_000)})
        assert "is nested more than 200 levels deep" in str(error)
        assert error.field.startswith("input.rows")
        assert len(str(error)) < 600

    def test_a_value_that_contains_itself_is_refused(self):
        value = {"a": []}
        value["a"].append(value)
        assert "more than 200 levels" in str(refusal(value))

    def test_a_list_that_occurs_in_itself_a_million_million_times_is_refused_at_once(self):
        value = []
        for _ in range(100):
            value = [value, value]
        assert "is too big" in str(refusal(value))


def nested_objects(depth):
    value = None
    for _ in range(depth):
        value = {"a": value}
    return value


class TestSize:
    @pytest.mark.parametrize("letter", ["a", "ä", "€", "\U0001f600"])
    def test_the_limit_counts_bytes(self, letter):
        size = len(letter.encode())
        assert encode(letter * 10, limit=10 * size + 2)
        error = refusal(letter * 10, limit=10 * size + 1)
        assert f"it takes {10 * size + 2} bytes of JSON and {10 * size + 1} are allowed" in str(error)

    @pytest.mark.parametrize("field", ["input", "result", "checkpoint", "meta"])
    def test_the_refusal_names_the_setting(self, field):
        """C079: refused with a named limit."""
        assert f"DURABLE_JOBS['MAX_{field.upper()}_BYTES']" in str(refusal("x" * 100, field=field, limit=10))

    def test_ten_megabytes_are_refused(self):
        """C079."""
        error = refusal(["x" * 1000] * 10_000, field="result")
        assert "result is too big: it takes 10,030,001 bytes of JSON and 1,048,576 are allowed" in str(error)
        assert len(str(error)) < 600


class TestVerify:
    """A3: a text that is to be stored byte for byte is held to the same rules."""

    @pytest.mark.parametrize(
        "text", ['{"b": 1,\n "a": 2}', "1.50", ' "x" ', '"\\u00e4"', '"\\\\u0000"', "1E2"]
    )
    def test_any_text_of_json_is_accepted(self, text):
        assert jsontext.verify(text, field="input", limit=100) == json.loads(text)

    @pytest.mark.parametrize(
        ("text", "problem"),
        [
            (None, "is no text"),
            ({}, "is no text"),
            (b"{}", "is no text"),
            ("", "is no JSON"),
            ("  ", "is no JSON"),
            ("{", "is no JSON"),
            ("{'a': 1}", "is no JSON"),
            ("1 2", "is no JSON"),
            ("\ufeff1", "is no JSON"),
            ("[1,]", "is no JSON"),
            ("9" * 5000, "is no JSON"),
            ("NaN", "is no number that JSON has"),
            ("[Infinity]", "is no number that JSON has"),
            ("1e400", "is no number that JSON has"),
            ('"a\0"', "contains NUL"),
            ('"\\u0000"', "contains NUL"),
            ('["\\ud800"]', "contains a lone surrogate"),
            ('"\ud800"', "contains a lone surrogate"),
            ("[" * 300 + "]" * 300, "more than 200 levels"),
            ("[" * 100_000 + "]" * 100_000, "more than 200 levels"),
            ('"' + "x" * MIB + '"', "is too big"),
        ],
        ids=range(21),
    )
    def test_anything_else_is_refused(self, text, problem):
        with pytest.raises(InvalidInput, match=problem):
            jsontext.verify(text, field="input", limit=MIB)


@pytest.mark.parametrize("text", ["NaN", "sNaN", "Infinity", "-Infinity"])
def test_a_decimal_that_is_no_number_is_refused(text):
    with pytest.raises(InvalidInput) as refused:
        jsontext.encode({"price": [decimal.Decimal(text)]}, field="input", limit=100)
    assert refused.value.field == "input.price[0]"


any_text = st.text(alphabet=st.sampled_from("ab\\u0\0\ud800é漢"), max_size=6)
any_leaf = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.just(10**4400)
    | st.floats()
    | any_text
    | st.just(mark_safe("safe"))
    | st.just((1, 2))
    | st.just(uuid.UUID(int=7))
)
any_key = any_text | st.integers() | st.just(mark_safe("safe"))


@given(
    st.dictionaries(any_key, any_leaf | st.lists(any_leaf, max_size=3) | st.dictionaries(any_key, any_leaf))
)
def test_leaving_the_walk_out_changes_no_answer(value):
    """Simple input is judged by its text: the same text, or the same refusal, as the walk through it gives."""

    def answer():
        try:
            return encode(value, limit=60)
        except InvalidInput as error:
            return str(error)

    with pytest.MonkeyPatch.context() as patch:
        quick = answer()
        patch.setattr(jsontext, "_is_simple", lambda value: False)
        assert quick == answer()
