"""What a kind may be, how it is found, and how a mirror keeps a row in step."""

from __future__ import annotations

import functools
import sys
import textwrap
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from django import forms
from django.apps import AppConfig, apps
from django.test import override_settings
from django.utils.translation import gettext_lazy

from durable_jobs import batch, kinds, service, store, testing
from durable_jobs.exceptions import (
    DomainMirrorMismatch,
    InvalidInput,
    InvalidKind,
    TerminalError,
    UnknownKind,
    UnrecoverableError,
)
from durable_jobs.kinds import (
    KEEP,
    ROW_GONE,
    BatchKind,
    Cancelled,
    Done,
    ErrorClass,
    Kind,
    Retry,
    StatusMirror,
    Yield,
    register,
)
from tests.models import Depot, Parcel, Shipment


@pytest.fixture(autouse=True)
def registry() -> Iterator[None]:
    """A registry of the test's own."""
    before = dict(kinds._kinds)
    yield
    kinds._kinds.clear()
    kinds._kinds.update(before)


def make(base: type[Kind] = Kind, **attributes: Any) -> type[Kind]:
    attributes = {"name": "tests.made", "__module__": __name__, **attributes}
    if base is Kind:
        attributes.setdefault("step", lambda self, ctx: Done())
    else:
        attributes.setdefault("collection", lambda self, ctx: [])
        attributes.setdefault("process", lambda self, ctx, batch: None)
    return type("Made", (base,), attributes)


def refusal(kind_class: Any) -> str:
    with pytest.raises(InvalidKind) as caught:
        register(kind_class)
    assert kinds.find("tests.made") is None
    return str(caught.value)


def mirror(**changes: Any) -> StatusMirror:
    given = {
        "open": ("queued", "moving"),
        "redriven": "queued",
        "completed": "arrived",
        "failed": "lost",
        "cancelled": "stopped",
        **changes,
    }
    return StatusMirror(given.pop("model", "tests.Shipment"), **given)


class TestRegistry:
    def test_a_kind_is_found_by_name_alias_and_class(self) -> None:
        kind_class = register(make(aliases=("tests.old",)))
        kind = kinds.get("tests.made")
        assert type(kind) is kind_class
        assert kinds.get("tests.old") is kinds.get(kind_class) is kinds.find("tests.old") is kind
        assert kinds.all_kinds().count(kind) == 1
        assert {"tests.made", "tests.old"} <= set(kinds.names())

    def test_registering_the_same_class_again_does_nothing(self) -> None:
        """B170"""
        kind_class = make()
        register(kind_class)
        kind = kinds.get("tests.made")
        assert register(kind_class) is kind_class
        assert kinds.get("tests.made") is kind

    @pytest.mark.parametrize(
        ("name", "aliases"),
        [
            ("tests.made", ()),
            ("tests.old", ()),
            ("tests.other", ("tests.made",)),
            ("tests.other", ("tests.old",)),
        ],
    )
    def test_two_kinds_of_one_name_or_alias_are_refused(self, name: str, aliases: tuple[str, ...]) -> None:
        """B170"""
        first = register(make(aliases=("tests.old",)))
        with pytest.raises(InvalidKind, match=r"already belongs to tests\.test_kinds\.Made"):
            register(make(name=name, aliases=aliases))
        assert kinds.find("tests.other") is None
        assert type(kinds.get("tests.made")) is type(kinds.get("tests.old")) is first

    def test_an_unknown_kind_raises_or_is_none(self) -> None:
        assert kinds.find("tests.nobody") is None
        for unknown in ("tests.nobody", make(name="tests.nobody")):
            with pytest.raises(UnknownKind, match=r"tests\.nobody"):
                kinds.get(unknown)

    def test_a_kind_can_be_forgotten_with_its_aliases(self) -> None:
        register(make(aliases=("tests.old",)))
        kinds.unregister("tests.old")
        assert kinds.find("tests.made") is kinds.find("tests.old") is None

    def test_defaults_are_those_of_the_documentation(self) -> None:
        """B171"""
        register(make())
        kind = kinds.get("tests.made")
        assert (kind.queue, kind.orphan_policy, kind.mirror, kind.has_transition_hook) == (
            "default",
            "park",
            None,
            False,
        )
        assert (kind.lease_seconds, kind.slice_seconds, kind.max_slice_seconds) == (60, 300, 3600)
        assert (kind.max_orphanings, kind.max_lost_deliveries, kind.pending_ttl_seconds) == (3, 10, 900)
        assert kind.retry == Retry(failures=5, first_delay=5, longest_delay=300, backoff="exponential")
        assert not kind.allow_restart
        assert make(BatchKind)().orphan_policy == "redrive"

    def test_the_default_queue_is_a_setting(self) -> None:
        register(make())
        with override_settings(DURABLE_JOBS={"DEFAULT_QUEUE": "slow"}):
            assert kinds.get("tests.made").queue == "slow"

    def test_batch_kind_comes_from_kinds(self) -> None:
        assert kinds.BatchKind is batch.BatchKind
        with pytest.raises(AttributeError, match="no attribute 'BatchKinds'"):
            _ = kinds.BatchKinds


async def _coroutine(self: Any, *arguments: Any) -> Any:
    return None


async def _async_generator(self: Any, *arguments: Any) -> Any:
    yield


def _generator(self: Any, *arguments: Any) -> Any:
    yield


class TestRefusals:
    @pytest.mark.parametrize(
        ("attributes", "words"),
        [
            ({"name": ""}, "name = '' is blank"),
            ({"name": "   "}, "is blank"),
            ({"name": " padded"}, "begins or ends with a blank"),
            ({"name": "x" * 201}, "longer than 200 characters"),
            ({"name": "a\nb"}, "unprintable"),
            ({"name": "a\x00b"}, "unprintable"),
            ({"name": "a\ud800b"}, "unprintable"),
            ({"name": None}, "is not a text"),
            ({"aliases": "tests.old"}, "is not a tuple"),
            ({"aliases": ("",)}, "is blank"),
            ({"aliases": ("tests.made",)}, "own name"),
            ({"queue": ""}, "is not a queue's name"),
            ({"queue": "-a"}, "is not a queue's name"),
            ({"queue": "a b"}, "is not a queue's name"),
            ({"queue": "a" * 101}, "is not a queue's name"),
            ({"queue": "a\n"}, "is not a queue's name"),
            ({"queue": None}, "is not a queue's name"),
            ({"queue": "manual"}, "reserved"),
            ({"orphan_policy": "retry"}, "orphan_policy = 'retry' is unknown"),
            ({"lease_seconds": 0.2}, "lease_seconds = 0.2 is out of range"),
            ({"lease_seconds": 86_401}, "out of range"),
            ({"lease_seconds": True}, "out of range"),
            ({"lease_seconds": "60"}, "out of range"),
            ({"slice_seconds": 0}, "out of range"),
            ({"slice_seconds": float("nan")}, "out of range"),
            ({"slice_seconds": float("inf")}, "out of range"),
            ({"slice_seconds": 10, "max_slice_seconds": 19.9}, "twice slice_seconds"),
            ({"max_orphanings": -1}, "out of range"),
            ({"max_orphanings": 1.0}, "out of range"),
            ({"max_orphanings": True}, "out of range"),
            ({"max_lost_deliveries": None}, "out of range"),
            ({"pending_ttl_seconds": 0}, "out of range"),
            ({"max_running": 0}, "out of range"),
            ({"retry": None}, "is not a Retry"),
            ({"retry": Retry(failures=0)}, "retry.failures = 0 is out of range"),
            ({"retry": Retry(failures=1001)}, "retry.failures"),
            ({"retry": Retry(failures=True)}, "retry.failures"),
            ({"retry": Retry(first_delay=-1)}, "retry.first_delay"),
            ({"retry": Retry(longest_delay=86_401)}, "retry.longest_delay"),
            ({"retry": Retry(first_delay=301)}, "longer than longest_delay"),
            ({"retry": Retry(backoff="linear")}, "retry.backoff = 'linear' is unknown"),
            ({"allow_restart": 1}, "is not a truth value"),
            ({"public_result": None}, "is not a truth value"),
            ({"description": None}, "is not a text"),
            ({"runbook_url": "javascript:alert(1)"}, "browser"),
            ({"runbook_url": None}, "browser"),
            ({"masked_keys": "password"}, "is not a tuple of texts"),
            ({"masked_keys": (1,)}, "is not a tuple of texts"),
            ({"required_permissions": "auth.add_user"}, "is not a tuple of texts"),
            ({"required_permissions": ("add_user",)}, "is not a permission"),
            ({"input_form": forms.Form()}, "is not a form class"),
            ({"input_serializer": forms.Form()}, "is neither a class nor a dotted path"),
            ({"input_serializer": "Input"}, "is neither a class nor a dotted path"),
            ({"mirror": "tests.Shipment"}, "is not a StatusMirror"),
        ],
    )
    def test_a_wrong_attribute_is_refused(self, attributes: dict[str, Any], words: str) -> None:
        message = refusal(make(**attributes))
        assert words in message
        assert "tests.test_kinds.Made" in message

    @pytest.mark.parametrize(
        "attributes",
        [
            {"name": "n" * 200, "queue": "A9._-", "aliases": ["tests.old"]},
            {"lease_seconds": 0.3, "slice_seconds": 0.5, "max_slice_seconds": 1},
            {
                "max_orphanings": 0,
                "retry": Retry(failures=1, first_delay=0, longest_delay=0, backoff="fixed"),
            },
            {"description": gettext_lazy("Reindex"), "runbook_url": "https://example.com/a?b#c"},
            {
                "runbook_url": "/runbook/",
                "masked_keys": ["token"],
                "required_permissions": ("auth.add_user",),
            },
            {"input_form": forms.Form, "allow_restart": True, "public_result": True},
            {"step": _coroutine},
            {"step": functools.partialmethod(lambda self, extra, ctx: Done(), 1)},
            {"steps": 3, "queues": (), "on_item_sent": None, "min_slice_seconds": 1},
        ],
    )
    def test_a_right_attribute_is_accepted(self, attributes: dict[str, Any]) -> None:
        register(make(**attributes))

    def test_a_step_must_be_there_and_run(self) -> None:
        assert "step is missing" in refusal(type("Made", (Kind,), {"name": "tests.made"}))
        assert "return Yield() instead" in refusal(make(step=_generator))
        assert "return Yield() instead" in refusal(make(step=_async_generator))
        assert "cannot be called" in refusal(make(step=None))
        assert "self comes first" in refusal(make(step=lambda ctx: Done()))

    def test_a_hook_must_be_a_plain_method(self) -> None:
        hooks = ("on_transition", "on_redrive", "on_cancel", "after_transition", "after_redrive", "classify")
        for hook in hooks:
            for wrong in (_coroutine, _generator, _async_generator, lambda self: 1, 3):
                both = {"on_transition": lambda self, job: 1, "on_redrive": lambda self, job: 1}
                assert hook in refusal(make(**{**both, hook: wrong}))

    def test_a_transition_hook_needs_its_way_back(self) -> None:
        """B96"""
        assert "on_redrive is missing" in refusal(make(on_transition=lambda self, job: 1))
        register(make(on_transition=lambda self, job: 1, on_redrive=lambda self, job: 1))
        assert kinds.get("tests.made").has_transition_hook

    def test_a_mirror_supplies_both_hooks(self) -> None:
        register(make(mirror=mirror(), on_transition=lambda self, job: 1))
        assert kinds.get("tests.made").has_transition_hook

    @pytest.mark.parametrize(
        ("written", "meant"),
        [
            ("on_transistion", "on_transition"),
            ("on_after_transition", "after_transition"),
            ("on_canceled", "on_cancel"),
            ("lease_second", "lease_seconds"),
            ("required_permission", "required_permissions"),
            ("orphan_polcy", "orphan_policy"),
        ],
    )
    def test_a_misspelt_name_is_refused(self, written: str, meant: str) -> None:
        assert f"looks like {meant} misspelt" in refusal(make(**{written: 1}))

    def test_a_misspelt_name_in_a_mixin_is_refused_and_one_beside_the_right_one_is_not(self) -> None:
        mixin = type("Mixin", (), {"on_transistion": lambda self, job: 1})
        assert "on_transistion" in refusal(
            type("Made", (mixin, Kind), {"name": "tests.made", "step": lambda self, ctx: Done()})
        )
        register(make(on_cancel=lambda self, job: None, on_canceled=lambda self: None))

    def test_what_is_no_kind_is_refused(self) -> None:
        for wrong in (object, make()(), lambda ctx: Done(), None):
            with pytest.raises(InvalidKind, match="derived from Kind"):
                register(wrong)

    def test_a_kind_that_needs_arguments_is_refused(self) -> None:
        assert "without arguments" in refusal(make(__init__=lambda self, needed: None))

    @pytest.mark.parametrize(
        ("attributes", "words"),
        [
            ({"batch_size": 0}, "batch_size = 0 is out of range"),
            ({"batch_size": 10.0}, "out of range"),
            ({"batch_size": True}, "out of range"),
            ({"passes": 0}, "passes = 0"),
            ({"passes": "until_done"}, "passes = 'until_done'"),
            ({"passes": True}, "passes = True"),
            ({"max_skipped": -1}, "max_skipped = -1"),
            ({"cursor_version": 0}, "cursor_version = 0"),
            ({"count_limit": -1}, "count_limit = -1"),
            ({"lock_rows": 1}, "lock_rows = 1"),
            ({"collection": _async_generator}, "collection"),
            ({"collection": _coroutine}, "collection"),
            ({"collection": lambda self, ctx, more: []}, "collection"),
            ({"process": _coroutine}, "process"),
            ({"process": _generator}, "process"),
            ({"process": lambda self, batch: None}, "process"),
            ({"before_batch": _coroutine}, "before_batch"),
            ({"on_item_error": lambda self, item: True}, "on_item_error"),
            ({"on_item_errors": 1}, "misspelt"),
            (
                {"on_item_error": lambda self, ctx, item, error: True, "retry": Retry(failures=1)},
                "on_item_error would never be asked",
            ),
        ],
    )
    def test_a_wrong_batch_attribute_is_refused(self, attributes: dict[str, Any], words: str) -> None:
        assert words in refusal(make(BatchKind, **attributes))

    def test_a_batch_kind_needs_its_two_methods(self) -> None:
        assert "collection is missing" in refusal(type("Made", (BatchKind,), {"name": "tests.made"}))
        both = {"name": "tests.made", "collection": _generator}
        assert "process is missing" in refusal(type("Made", (BatchKind,), both))
        register(make(BatchKind, collection=_generator, passes="until_empty", count_limit=0))


class TestOutcomes:
    def test_yield_refuses_what_is_no_time(self) -> None:
        assert Yield() == Yield(after=0)
        assert Yield(after=1.5).after == 1.5
        for wrong in (-1, float("nan"), float("inf"), 10**10, None, "5", True):
            with pytest.raises(UnrecoverableError, match="after=") as caught:
                Yield(after=wrong)
            assert caught.value.code == "bad_outcome"

    def test_outcomes_are_values(self) -> None:
        assert Done() == Done(result=None) != Done(1)
        assert Cancelled() == Cancelled()
        assert repr(ROW_GONE) == "ROW_GONE"
        assert repr(KEEP) == "KEEP"

    def test_delays_grow_to_the_longest(self) -> None:
        """B80"""
        assert [Retry().delay(n) for n in (1, 2, 3, 6, 7, 8)] == [5, 10, 20, 160, 300, 300]
        assert Retry(first_delay=0.5, longest_delay=2).delay(10**9) == 2
        assert [Retry(backoff="fixed").delay(n) for n in (1, 9)] == [5, 5]
        assert Retry().delay(0) == 5
        assert Retry(first_delay=0).delay(500) == 0


class TestClassify:
    def test_the_kind_speaks_first_then_the_marker(self) -> None:
        """B72"""
        register(make(classify=lambda self, error: "unrecoverable" if error.args else None))
        kind = kinds.get("tests.made")
        assert kinds.classify(kind, ValueError(1)) is ErrorClass.UNRECOVERABLE
        assert kinds.classify(kind, ValueError()) is ErrorClass.TRANSIENT
        own = TerminalError()
        own.args = ()
        assert kinds.classify(kind, own) is ErrorClass.TERMINAL

    @pytest.mark.parametrize("answer", ["fatal", 3, ErrorClass])
    def test_nonsense_and_errors_leave_it_to_the_marker(self, answer: Any) -> None:
        register(make(classify=lambda self, error: answer))
        assert kinds.classify(kinds.get("tests.made"), TerminalError("no")) is ErrorClass.TERMINAL
        kinds.unregister("tests.made")
        register(make(classify=lambda self, error: 1 / 0))
        assert kinds.classify(kinds.get("tests.made"), TerminalError("no")) is ErrorClass.TERMINAL


class TestMirrorDeclaration:
    @pytest.mark.parametrize(
        ("changes", "words"),
        [
            ({"model": "tests.Nothing"}, "no installed app has"),
            ({"model": "Shipment"}, "no installed app has"),
            ({"model": Shipment}, "no installed app has"),
            ({"field": "state"}, "is not a plain column"),
            ({"field": "id"}, "is not a plain column"),
            ({"model": "tests.Parcel", "field": "depot"}, "is not a plain column"),
            ({"open": "queued"}, "is not a tuple of values"),
            ({"open": ()}, "is not a tuple of values"),
            ({"open": ("queued", "waiting")}, "has open='waiting'"),
            ({"completed": "done"}, "has completed='done'"),
            ({"failed": None}, "has failed=None"),
            ({"field": "note", "cancelled": "x" * 41}, "has cancelled="),
            ({"field": "note", "cancelled": None}, "it is not null"),
            ({"redriven": "lost"}, "not among open"),
        ],
    )
    def test_what_does_not_fit_the_model_is_refused(self, changes: dict[str, Any], words: str) -> None:
        message = refusal(make(mirror=mirror(**changes)))
        assert "mirror = StatusMirror(" in message
        assert words in message

    def test_a_model_on_another_database_is_refused(self) -> None:
        class Elsewhere:
            def db_for_write(self, model: Any, **hints: Any) -> str | None:
                return "elsewhere" if model is Shipment else None

        with override_settings(DATABASE_ROUTERS=[Elsewhere()]):
            assert "cannot change in one transaction" in refusal(make(mirror=mirror()))

    def test_values_may_be_members_of_the_choices(self) -> None:
        status = Shipment.Status
        register(make(mirror=mirror(open=[status.QUEUED], redriven=status.QUEUED, completed=status.ARRIVED)))

    def test_before_the_models_are_loaded_it_is_a_matter_for_the_checks(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(apps, "models_ready", False)
        register(make(mirror=mirror(completed="done")))
        monkeypatch.undo()
        (problem,) = kinds.problems()
        assert "has completed='done'" in str(problem)
        assert problem.way_out

    def test_a_job_needs_a_subject_of_the_mirrors_model(self) -> None:
        mirror().check_subject("tests.shipment")
        for wrong in (None, "", "tests.depot", "tests.nothing", "shipment"):
            with pytest.raises(InvalidInput, match=r"Pass subject=<a saved tests\.Shipment>"):
                mirror().check_subject(wrong)


def job(status: str, shipment: Shipment | None, subject_type: str = "tests.shipment") -> Any:
    subject_id = None if shipment is None else str(shipment.pk)
    return SimpleNamespace(id=1, status=status, subject_type=subject_type, subject_id=subject_id)


@pytest.mark.django_db
class TestMirrorWrites:
    @pytest.mark.parametrize(
        ("ended", "target"), [("completed", "arrived"), ("failed", "lost"), ("cancelled", "stopped")]
    )
    def test_the_row_follows_the_job_and_agrees_when_it_is_there_already(
        self, ended: str, target: str
    ) -> None:
        """B91"""
        register(make(mirror=mirror()))
        kind = kinds.get("tests.made")
        neighbour = Shipment.objects.create()
        for before in ("queued", "moving", target):
            shipment = Shipment.objects.create(status=before)
            assert kind.on_transition(job(ended, shipment)) == 1
            shipment.refresh_from_db()
            assert shipment.status == target
        neighbour.refresh_from_db()
        assert neighbour.status == "queued"

    def test_a_row_that_finished_otherwise_does_not_agree(self) -> None:
        """B91"""
        for before, ended in [("lost", "completed"), ("arrived", "cancelled"), ("stopped", "failed")]:
            shipment = Shipment.objects.create(status=before)
            assert mirror().on_transition(job(ended, shipment)) == 0
            shipment.refresh_from_db()
            assert shipment.status == before

    def test_a_deleted_row_is_gone(self) -> None:
        shipment = Shipment.objects.create()
        gone = job("completed", shipment)
        shipment.delete()
        assert mirror().on_transition(gone) is ROW_GONE
        assert mirror().on_redrive(gone) is ROW_GONE
        assert mirror().on_transition(job("completed", None)) is ROW_GONE

    def test_a_subject_of_another_model_is_never_written(self) -> None:
        shipment = Shipment.objects.create()
        with pytest.raises(LookupError, match=r"mirrors tests\.Shipment"):
            mirror().on_transition(job("completed", shipment, Depot._meta.label_lower))

    def test_a_redrive_opens_what_failed_and_what_never_noticed(self) -> None:
        for before, answer in [("lost", 1), ("queued", 1), ("moving", 1), ("arrived", 0), ("stopped", 0)]:
            shipment = Shipment.objects.create(status=before)
            assert mirror().on_redrive(job("pending", shipment)) == answer
            shipment.refresh_from_db()
            assert shipment.status == ("queued" if answer else before)

    def test_without_a_mirror_the_standing_hooks_agree(self) -> None:
        kind = make()()
        assert kind.on_transition(job("completed", None)) == kind.on_redrive(job("pending", None)) == 1


@pytest.mark.django_db
class TestMirrorWithItsJob:
    def run(self, shipment: Shipment) -> Any:
        return testing.run("tests.made", subject=shipment)

    def test_the_row_ends_with_its_job(self) -> None:
        """B85"""
        register(make(mirror=mirror()))
        shipment = Shipment.objects.create(status="moving")
        ended = self.run(shipment)
        shipment.refresh_from_db()
        assert (ended.status, shipment.status) == ("completed", "arrived")
        assert ended.domain_mirrored_at is not None

    def test_the_row_fails_and_is_opened_again_with_its_job(self) -> None:
        def step(self: Any, ctx: Any) -> Done:
            if Shipment.objects.filter(note="").exists():
                raise TerminalError("no note")
            return Done()

        register(make(mirror=mirror(), step=step))
        shipment = Shipment.objects.create()
        failed = self.run(shipment)
        shipment.refresh_from_db()
        assert (failed.status, shipment.status) == ("failed", "lost")
        service.redrive(failed.id, actor="tests")
        shipment.refresh_from_db()
        assert shipment.status == "queued"
        Shipment.objects.update(note="found")
        assert testing.run_slice(failed).job.status == "completed"  # type: ignore[union-attr]
        shipment.refresh_from_db()
        assert shipment.status == "arrived"

    def test_a_row_that_finished_otherwise_keeps_the_job_from_ending(self) -> None:
        """B90"""
        register(make(mirror=mirror(), retry=Retry(failures=1)))
        shipment = Shipment.objects.create(status="stopped")
        job = service.start("tests.made", subject=shipment).job
        result = testing.run_slice(job)
        assert isinstance(result.error, DomainMirrorMismatch)
        said = str(result.error)
        assert (
            f"tests.Shipment {shipment.pk} has status='stopped'" in said
            and "becomes 'arrived' only from" in said
        )
        assert "add 'stopped' to `open` of the kind's StatusMirror" in said
        shipment.refresh_from_db()
        assert shipment.status == "stopped"
        assert store.get(job.id).status == "running"  # type: ignore[union-attr]

    def test_a_job_without_the_row_is_refused(self) -> None:
        register(make(mirror=mirror()))
        for wrong in (None, Depot.objects.create()):
            with pytest.raises(InvalidInput, match="subject"):
                service.start("tests.made", subject=wrong)


class TestDiscovery:
    @pytest.fixture
    def package(self, tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
        """Makes an installed app out of files."""
        monkeypatch.syspath_prepend(str(tmp_path))

        def make_app(name: str, **files: str) -> AppConfig:
            folder = tmp_path / name
            folder.mkdir()
            for path, text in {"__init__": "", **files}.items():
                file = folder / f"{path.replace('__in__', '/')}.py"
                file.parent.mkdir(exist_ok=True)
                file.write_text(textwrap.dedent(text))
            app = AppConfig.create(name)
            monkeypatch.setattr(apps, "get_app_configs", lambda: [app])
            return app

        yield make_app
        for module in [module for module in sys.modules if module.startswith("found_")]:
            del sys.modules[module]

    KIND = """
        from durable_jobs.kinds import Done, Kind, register

        @register
        class Found(Kind):
            name = "tests.found"

            def step(self, ctx):
                return Done()
    """

    def test_modules_named_in_the_settings_are_imported_once(self, package: Any) -> None:
        """B169"""
        package("found_one", jobs=self.KIND)
        kinds.discover()
        kind = kinds.get("tests.found")
        kinds.discover()
        assert kinds.get("tests.found") is kind

    def test_an_app_without_the_module_and_a_module_without_kinds_are_no_error(self, package: Any) -> None:
        package("found_two", other=self.KIND)
        kinds.discover()
        package("found_three", jobs__in____init__="", jobs__in__daily=self.KIND)
        kinds.discover()
        assert kinds.find("tests.found") is None

    def test_names_may_be_dotted(self, package: Any) -> None:
        package("found_four", work__in____init__="", work__in__kinds=self.KIND)
        with override_settings(DURABLE_JOBS={"DISCOVER": ["work.kinds", "work.nothing", "nothing.kinds"]}):
            kinds.discover()
        assert kinds.find("tests.found")

    @pytest.mark.parametrize("text", ["import a_module_that_is_not_there", "1 / 0", "from . import nothing"])
    def test_a_broken_module_is_loud(self, package: Any, text: str) -> None:
        package("found_five", jobs=text)
        with pytest.raises((ImportError, ZeroDivisionError)):
            kinds.discover()

    def test_a_package_whose_own_import_fails_is_loud(self, package: Any) -> None:
        package(
            "found_six", work__in____init__="import a_module_that_is_not_there", work__in__kinds=self.KIND
        )
        with override_settings(DURABLE_JOBS={"DISCOVER": ["work.kinds"]}), pytest.raises(ImportError):
            kinds.discover()

    def test_a_wrong_kind_is_loud(self, package: Any) -> None:
        package("found_seven", jobs=self.KIND.replace('"tests.found"', '""'))
        with pytest.raises(InvalidKind, match=r"found_seven\.jobs\.Found"):
            kinds.discover()


@pytest.mark.django_db
def test_the_input_of_a_form_names_rows_by_their_keys() -> None:
    class Move(forms.Form):
        to = forms.ModelChoiceField(Depot.objects.all())
        parcels = forms.ModelMultipleChoiceField(Parcel.objects.order_by("pk"))
        note = forms.CharField(required=False)

    depot, parcels = Depot.objects.create(name="north"), [Parcel.objects.create() for _ in range(2)]
    form = Move({"to": depot.pk, "parcels": [parcel.pk for parcel in parcels]})
    assert form.is_valid()
    assert kinds.input_of(form) == {"to": depot.pk, "parcels": [parcel.pk for parcel in parcels], "note": ""}
