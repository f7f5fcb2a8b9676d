"""Settings are read through, and a wrong one is named together with what is allowed."""

from pathlib import Path

import pytest
from django.core.exceptions import ImproperlyConfigured
from django.test import override_settings

from durable_jobs.conf import Config, config, problems

pytestmark = pytest.mark.any_database

SETTINGS_PAGE = Path(__file__).parent.parent / "docs" / "settings.md"


def given(**values):
    return override_settings(DURABLE_JOBS=values)


RIGHT = {
    "TRANSPORT": ["database", "celery", "memory", "shop.queue.Transport"],
    "DEFAULT_TENANT": ["acme", "x" * 64, "größe"],
    "GRACE": [0.2, 1, 3600],
    "TICK": [0, 0.1, 3600],
    "POLL": [0.01, 60],
    "SQLITE_POLL": [0.001, 1],
    "DRAIN_TIMEOUT": [0, 86_400],
    "START_TIMEOUT": [0.5, 60, 3_600],
    "UNKNOWN_KIND_GRACE": [0, 60, 2_678_400],
    "STALLED_AFTER": [1, 2_678_400],
    "NOTIFY_DEBOUNCE": [0, 10],
    "LISTEN": [True, False],
    "LISTEN_DSN": [None, "host=db1"],
    "PREFETCH": [0, 1, 1_000],
    "GROUP_COMMIT": [True, False],
    "GROUP_HOOKS": [True, False],
    "DIRECT_STATEMENTS": [True, False],
    "PREPARE": [True, False],
    "PIPELINE": [True, False],
    "MAX_INPUT_BYTES": [2, 10 * 1024 * 1024],
    "MAX_RESULT_BYTES": [2, 10 * 1024 * 1024],
    "MAX_CHECKPOINT_BYTES": [2, 10 * 1024 * 1024],
    "MAX_META_BYTES": [2, 10 * 1024 * 1024],
    "RELEASE": ["", "2026-03-01", "x" * 100],
    "DISCOVER": [["jobs"], ("jobs", "background.kinds"), []],
    "DEFAULT_QUEUE": ["default", "bulk"],
    "SCOPE_FROM_REQUEST": [None, "shop.tenants.scope", len],
    "ADMIN_SCOPES": [None, "shop.tenants.scopes", len],
    "SCOPE_LABELS": [None, "shop.tenants.labels", len],
}
NO_NUMBERS = [
    True,
    False,
    None,
    "1",
    "ten",
    [1],
    float("nan"),
    float("inf"),
    -float("inf"),
    10**10,
    10**400,
    -1,
]
NO_TEXTS = [None, 1, True, b"x", "", "  ", "a\0b"]
WRONG = {
    "TRANSPORT": [*NO_TEXTS, "Database", "redis", "shop.", "a b.c", ["database"]],
    "DEFAULT_TENANT": [*NO_TEXTS, "x" * 65],
    "GRACE": [*NO_NUMBERS, 0, 0.1, 3601],
    "TICK": [*NO_NUMBERS, -0.1, 3601],
    "POLL": [*NO_NUMBERS, 0, 61],
    "SQLITE_POLL": [*NO_NUMBERS, 0, 61],
    "DRAIN_TIMEOUT": [*NO_NUMBERS, 86_401],
    "START_TIMEOUT": [*NO_NUMBERS, 0, 3_601],
    "UNKNOWN_KIND_GRACE": NO_NUMBERS,
    "STALLED_AFTER": [*NO_NUMBERS, 0],
    "NOTIFY_DEBOUNCE": [*NO_NUMBERS, 11],
    "LISTEN": [None, 0, 1, "true", "False", []],
    "LISTEN_DSN": [True, 5, "", " ", {}],
    "PREFETCH": [*NO_NUMBERS, 1.5, 1_001],
    "GROUP_COMMIT": [None, 0, 1, "true", []],
    "GROUP_HOOKS": [None, 0, 1, "true", []],
    "DIRECT_STATEMENTS": [None, 0, 1, "true", []],
    "PREPARE": [None, 0, 1, "true", []],
    "PIPELINE": [None, 0, 1, "true", []],
    "MAX_INPUT_BYTES": [*NO_NUMBERS, 0, 1, 1024.0],
    "MAX_RESULT_BYTES": [*NO_NUMBERS, 0, 1, 1024.0],
    "MAX_CHECKPOINT_BYTES": [*NO_NUMBERS, 0, 1, 1024.0],
    "MAX_META_BYTES": [*NO_NUMBERS, 0, 1, 1024.0],
    "RELEASE": [None, 1, b"x", "x" * 101, "a\0b"],
    "DISCOVER": ["jobs", None, 5, [""], ["my-jobs"], [None], {"jobs"}, ["jobs."]],
    "DEFAULT_QUEUE": [*NO_TEXTS, "x" * 101, "manual", "a,b", "größe", "a\n"],
    "SCOPE_FROM_REQUEST": [1, True, "", "scope", "shop..scope", "shop.scope()", ["shop.scope"]],
    "ADMIN_SCOPES": [1, True, "", "scopes", "shop..scopes", "shop.scopes()", ["shop.scopes"]],
    "SCOPE_LABELS": [1, True, "", "labels", "shop..labels", "shop.labels()", ["shop.labels"]],
}


def values(table):
    return [pytest.param(name, value, id=f"{name}-{value!r:.30}") for name in table for value in table[name]]


class TestReading:
    def test_defaults(self):
        with given():
            assert config.TRANSPORT == "database"
            assert config.DEFAULT_TENANT == "default"
            assert (config.GRACE, config.TICK, config.POLL, config.SQLITE_POLL) == (20.0, 15.0, 1.0, 0.006)
            assert (config.DRAIN_TIMEOUT, config.UNKNOWN_KIND_GRACE) == (25.0, 86_400.0)
            assert (config.STALLED_AFTER, config.NOTIFY_DEBOUNCE) == (900.0, 0.05)
            assert (config.LISTEN, config.LISTEN_DSN) == (True, None)
            assert (config.PREFETCH, config.GROUP_COMMIT) == (256, True)
            assert (config.DIRECT_STATEMENTS, config.PREPARE, config.PIPELINE) == (True, True, True)
            assert (config.MAX_INPUT_BYTES, config.MAX_RESULT_BYTES) == (1_048_576, 1_048_576)
            assert (config.MAX_CHECKPOINT_BYTES, config.MAX_META_BYTES) == (262_144, 16_384)
            assert (config.RELEASE, config.DEFAULT_QUEUE) == ("", "default")
            assert list(config.DISCOVER) == ["jobs"]

    def test_the_dictionary_may_be_missing(self, settings):
        del settings.DURABLE_JOBS
        assert config.GRACE == 20.0
        assert problems() == []

    def test_a_setting_is_read_at_every_access(self):
        with given(GRACE=3):
            assert config.GRACE == 3
            with given(TICK=1):
                assert (config.GRACE, config.TICK) == (20.0, 1)
        with given():
            assert config.GRACE == 20.0

    def test_a_setting_that_does_not_exist(self):
        with pytest.raises(AttributeError):
            config.GRAZE  # noqa: B018

    @pytest.mark.parametrize(("name", "value"), values(RIGHT))
    def test_a_right_value_is_handed_on(self, name, value):
        with given(**{name: value}):
            assert getattr(config, name) == value
            assert [problem for problem in problems() if problem.sort == "value"] == []

    @pytest.mark.parametrize(("name", "value"), values(WRONG))
    def test_a_wrong_value_is_never_handed_on(self, name, value):
        """C029: the error names the setting and what is allowed."""
        with given(**{name: value}):
            allowed = Config.all()[name].rule(value)
            with pytest.raises(ImproperlyConfigured) as caught:
                getattr(config, name)
            [problem] = problems()
        assert problem.sort == "value"
        assert problem.settings == (name,)
        assert f"DURABLE_JOBS['{name}'] is " in problem.message
        assert f"allowed is {allowed}." in problem.message
        assert str(caught.value) == problem.sentence
        assert len(problem.sentence) < 600

    @pytest.mark.parametrize("value", [None, [], "TICK=1", 5])
    def test_what_is_no_dictionary(self, value):
        with override_settings(DURABLE_JOBS=value):
            with pytest.raises(ImproperlyConfigured, match="no dictionary"):
                config.GRACE  # noqa: B018
            [problem] = problems()
        assert problem.sort == "shape"

    def test_every_setting_is_in_these_tests(self):
        assert set(RIGHT) == set(WRONG) == set(Config.all())

    def test_a_default_is_allowed(self):
        assert [name for name, setting in Config.all().items() if setting.rule(setting.default)] == []


class TestNames:
    @pytest.mark.parametrize(
        ("name", "meant"),
        [("GRASE", "GRACE"), ("grace", "GRACE"), ("tick", "TICK"), ("DRAIN_TIME_OUT", "DRAIN_TIMEOUT")],
    )
    def test_a_misspelt_setting_is_reported_with_what_was_meant(self, name, meant):
        """C126."""
        with given(**{name: 5}):
            [problem] = problems()
        assert (problem.sort, problem.settings) == ("name", (name,))
        assert repr(name) in problem.message
        assert problem.way_out == f"Did you mean {meant!r}?"

    @pytest.mark.parametrize("name", ["VISIBILITY", "", 5, None, "x" * 1000])
    def test_a_name_like_no_other_gets_the_list(self, name):
        with override_settings(DURABLE_JOBS={name: 1}):
            [problem] = problems()
        assert "GRACE, TICK" in problem.way_out
        assert len(problem.message) < 300

    def test_everything_wrong_is_told_at_once(self):
        with given(GRAZE=5, TICK="x", POLL=-1):
            assert [problem.sort for problem in problems()] == ["name", "value", "value"]


class TestRelations:
    @pytest.mark.parametrize(
        ("values", "sort", "names"),
        [
            ({"UNKNOWN_KIND_GRACE": 5}, "contradiction", ("UNKNOWN_KIND_GRACE", "GRACE")),
            ({"TICK": 61}, "doubt", ("TICK", "GRACE")),
            ({"GRACE": 0.2}, "doubt", ("TICK", "GRACE")),
            ({"NOTIFY_DEBOUNCE": 2}, "doubt", ("NOTIFY_DEBOUNCE", "POLL")),
        ],
    )
    def test_settings_that_do_not_fit_together_are_both_named(self, values, sort, names):
        """C126."""
        with given(**values):
            [problem] = problems()
        assert (problem.sort, problem.settings) == (sort, names)
        for name in names:
            assert f"DURABLE_JOBS['{name}'] = " in problem.message

    def test_a_tick_of_zero_contradicts_nothing(self):
        with given(TICK=0, GRACE=0.2):
            assert problems() == []

    def test_a_relation_of_a_wrong_value_is_not_told(self):
        with given(GRACE="x", UNKNOWN_KIND_GRACE=5):
            [problem] = problems()
        assert problem.sort == "value"


def test_the_documented_settings_are_those_of_the_code():
    """C126: defaults and ranges are visible."""
    rows = {
        cells[1].strip("` "): (cells[2].strip(), cells[3].strip())
        for line in SETTINGS_PAGE.read_text().splitlines()
        if line.startswith("| `")
        for cells in [line.split("|")]
    }
    assert rows == {
        name: (f"`{setting.default!r}`", setting.rule(object())) for name, setting in Config.all().items()
    }
