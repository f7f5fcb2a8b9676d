"""Errors say what was wrong, keep their facts, and can be written down whatever they are."""

import copy
import pickle
import sys
import uuid
from datetime import UTC, datetime, timedelta
from enum import Enum, StrEnum

import pytest
from hypothesis import given
from hypothesis import strategies as st

from durable_jobs import exceptions
from durable_jobs.exceptions import (
    LONGEST_DELAY,
    Aborted,
    Busy,
    DeadlineExceeded,
    DirectWrite,
    DomainMirrorMismatch,
    DurableJobsError,
    ErrorClass,
    ForceRequired,
    HookFailed,
    IdempotencyConflict,
    InvalidInput,
    InvalidKind,
    LeaseLost,
    LeaseLostError,
    LockKeyHeld,
    LockPolicyConflict,
    NoFurtherAttempts,
    NotCancellable,
    NotFound,
    NotHeld,
    NotReclaimable,
    NotRedrivable,
    NotSettleable,
    Park,
    Refusal,
    RestartNotAllowed,
    RetryAfter,
    ScopeMismatch,
    TaskCancelled,
    TaskNotLoaded,
    TerminalError,
    TransactionOwned,
    TransientError,
    UnknownKind,
    UnrecoverableError,
    WorkerLost,
    classify,
    clean,
    cut,
    describe,
    shown,
)

pytestmark = pytest.mark.any_database

JOB = uuid.UUID(int=7)

REFUSALS = {
    "E_JOB_INPUT_INVALID": InvalidInput("input.rows[3]", 10**10, "is too big", "Send less."),
    "E_JOB_SCOPE_MISMATCH": ScopeMismatch("tenant", "acme", JOB),
    "E_JOB_IDEMPOTENCY_CONFLICT": IdempotencyConflict("order-1", JOB),
    "E_JOB_LEASE_LOST": LeaseLostError(JOB, "worker-1", 3),
    "E_JOB_NOT_RECLAIMABLE": NotReclaimable(JOB, "it is completed"),
    "E_JOB_TRANSACTION_OWNED": TransactionOwned("complete_atomically"),
    "E_JOB_DEADLINE_EXCEEDED": DeadlineExceeded("complete_atomically"),
    "E_JOB_LOCK_POLICY_CONFLICT": LockPolicyConflict("200ms", "0"),
    "lock_key_held": LockKeyHeld("sync:7", JOB),
    "unknown_kind": UnknownKind("catalog.reindx", ["catalog.reindex"]),
    "not_redrivable": NotRedrivable(JOB, "completed"),
    "unrecoverable_requires_force": ForceRequired(JOB),
    "restart_not_allowed": RestartNotAllowed(JOB, "catalog.reindex"),
    "not_cancellable": NotCancellable(JOB, "completed"),
    "not_held": NotHeld(JOB, "running"),
    "not_settleable": NotSettleable(JOB, "completed", 0),
    "busy": Busy(JOB),
    "not_found": NotFound(JOB),
    "direct_write": DirectWrite("Job"),
}
OTHERS = [
    TaskNotLoaded("shop.tasks.gone", "ImportError: no such module"),
    TaskCancelled(JOB),
    WorkerLost("host:1:abc"),
    Aborted("The cancel was seen."),
    InvalidKind("catalog.reindex", "lease_seconds is 0", "Set 0.3 or more."),
    TransientError("later", code="rate_limited"),
    TerminalError("no"),
    UnrecoverableError("never", code="schema"),
    RetryAfter(30),
    Park("needs_a_file", "Upload the file first."),
    DomainMirrorMismatch(JOB, 0),
    HookFailed(JOB, "catalog.reindex", "completed", KeyError("run")),
    NoFurtherAttempts("the job has failed"),
    LeaseLost(JOB, "worker-1", 3),
]
EVERY_ERROR = pytest.mark.parametrize(
    "error", [*REFUSALS.values(), *OTHERS], ids=lambda error: type(error).__name__
)


def error_classes():
    return {
        value
        for value in vars(exceptions).values()
        if isinstance(value, type) and issubclass(value, BaseException) and not value.__name__.startswith("_")
    }


class Hostile(Exception):
    """Raises whatever it is asked."""

    def __init__(self, raised=RuntimeError):
        self.raised = raised

    def __str__(self):
        raise self.raised

    __repr__ = __str__

    @property
    def code(self):
        raise self.raised

    durable_jobs_class = code


class TestRefusals:
    @pytest.mark.parametrize(("code", "error"), REFUSALS.items(), ids=list(REFUSALS))
    def test_one_type_has_one_code(self, code, error):
        """A1, A2, B4."""
        assert error.code == code
        assert isinstance(error, Refusal) and isinstance(error, DurableJobsError)

    def test_every_error_of_the_module_is_in_these_tests(self):
        made = {type(error) for error in [*REFUSALS.values(), *OTHERS]}
        assert error_classes() == made | {DurableJobsError, Refusal}

    def test_no_two_types_share_a_code(self):
        codes = [cls.code for cls in error_classes() if isinstance(getattr(cls, "code", None), str)]
        assert len(codes) == len(set(codes)) > 17

    @pytest.mark.parametrize("error", REFUSALS.values(), ids=list(REFUSALS))
    def test_a_refusal_says_what_is_wrong_and_then_the_way_out(self, error):
        """A1."""
        text = str(error)
        assert text.endswith(".")
        assert ". " in text or error.code == "not_cancellable"

    @EVERY_ERROR
    def test_words_for_insiders_are_not_in_a_message(self, error):
        """They have no place on a screen."""
        for word in ("epoch", "verdict", "mirror", "orphan", "delivery"):
            assert word not in str(error).lower()

    def test_invalid_input_names_field_value_and_way_out(self):
        error = InvalidInput("input.rows[3].name", "a\0b", "contains NUL", "Remove it.")
        assert str(error) == r"input.rows[3].name contains NUL (given: 'a\x00b'). Remove it."
        assert (error.field, error.value, error.way_out) == ("input.rows[3].name", "a\0b", "Remove it.")
        assert isinstance(error, ValueError)

    def test_the_facts_stay_readable(self):
        """B2."""
        held = REFUSALS["lock_key_held"]
        assert (held.lock_key, held.held_by) == ("sync:7", JOB)
        assert "sync:7" in str(held) and str(JOB) in str(held)
        lost = REFUSALS["E_JOB_LEASE_LOST"]
        assert (lost.job_id, lost.owner, lost.epoch) == (JOB, "worker-1", 3)
        assert NoFurtherAttempts("ended").reason == "ended"
        assert REFUSALS["unknown_kind"].name == "catalog.reindx"
        assert "catalog.reindex" in str(REFUSALS["unknown_kind"])
        assert DomainMirrorMismatch(JOB, 0).job_id == JOB

    def test_the_holder_of_a_lock_may_be_unknown(self):
        """B4."""
        assert LockKeyHeld("sync:7").held_by is None
        assert "another live job" in str(LockKeyHeld("sync:7"))

    def test_a_scope_mismatch_tells_nothing_of_the_other_scope(self):
        assert vars(ScopeMismatch("tenant", "mine", JOB)) == {
            "field": "tenant",
            "given": "mine",
            "job_id": JOB,
        }

    def test_a_huge_or_hostile_value_is_shown_short(self):
        deep = []
        for _ in range(10_000):
            deep = [deep]
        for value in ("x" * 10**6, deep, Hostile(), 10**5000, "\ud800\0", {"k": ["v" * 500] * 500}):
            message = str(InvalidInput("input", value, "is wrong", "Try another."))
            assert len(message) < 300
            message.encode()
            assert "\0" not in message


class TestPickling:
    @EVERY_ERROR
    def test_an_error_survives_pickling_and_copying(self, error):
        """B1: transports and process pools pickle errors."""
        for again in (pickle.loads(pickle.dumps(error)), copy.copy(error)):
            assert type(again) is type(error)
            assert (str(again), again.code, classify(again)) == (str(error), error.code, classify(error))
            plain = (str, int, float, uuid.UUID, type(None))
            assert vars(again) == {
                name: fact if isinstance(fact, plain) else shown(fact) for name, fact in vars(error).items()
            }

    def test_invalid_input_with_a_value_that_cannot_be_pickled(self):
        error = pickle.loads(pickle.dumps(InvalidInput("input", lambda: None, "is wrong", "Send data.")))
        assert "lambda" in error.value


class TestClassify:
    def test_named_errors(self):
        """B2."""
        assert classify(TransientError()) is ErrorClass.TRANSIENT
        assert classify(TerminalError()) is ErrorClass.TERMINAL
        assert classify(UnrecoverableError()) is ErrorClass.UNRECOVERABLE
        assert classify(LeaseLostError(JOB, "w", 1)) is ErrorClass.TRANSIENT
        assert classify(LockKeyHeld("k")) is ErrorClass.TERMINAL

    @pytest.mark.parametrize(
        "error",
        [Exception(), KeyError("k"), SystemExit(1), LeaseLost(JOB, "w", 1), "a text", None, Hostile()],
    )
    def test_anything_unrecognised_is_transient(self, error):
        """B1."""
        assert classify(error) is ErrorClass.TRANSIENT

    @pytest.mark.parametrize("error_class", ErrorClass)
    def test_the_marker_decides_and_not_the_type(self, error_class):
        """B1: a plain Exception subclass that carries only the attribute."""

        class Foreign(Exception):
            durable_jobs_class = error_class.value

        assert classify(Foreign()) is error_class
        on_instance = ValueError("x")
        on_instance.durable_jobs_class = error_class
        assert classify(on_instance) is error_class

    def test_an_enum_of_a_second_copy_of_the_package_is_understood(self):
        """B1: its members equal ours as texts, whatever their names."""

        class Copy(StrEnum):
            TERMINAL_OF_THE_COPY = "terminal"

        class MixedCopy(str, Enum):  # noqa: UP042
            TERMINAL = "terminal"

        for marker in (Copy.TERMINAL_OF_THE_COPY, MixedCopy.TERMINAL):
            error = ValueError()
            error.durable_jobs_class = marker
            assert classify(error) is ErrorClass.TERMINAL

    @pytest.mark.parametrize("value", ["fatal", "", "TERMINAL", 2, None, [], {}, object(), b"terminal"])
    def test_an_unknown_marker_means_transient(self, value):
        """B1."""
        error = ValueError()
        error.durable_jobs_class = value
        assert classify(error) is ErrorClass.TRANSIENT

    @pytest.mark.parametrize("code", ["unrecoverable", "retry_exhausted"])
    def test_a_transient_error_may_use_the_name_of_a_verdict_as_its_code(self, code):
        """B5."""
        facts = describe(TransientError("x", code=code))
        assert (facts.error_class, facts.code) == (ErrorClass.TRANSIENT, code)


class TestDescribe:
    def test_facts_of_an_ordinary_error(self):
        try:
            raise TerminalError("No such customer: 7", code="no_customer") from KeyError(7)
        except TerminalError as error:
            facts = describe(error)
        assert facts.error_class is ErrorClass.TERMINAL
        assert facts.code == "no_customer"
        assert facts.type == "durable_jobs.exceptions.TerminalError"
        assert facts.message == "No such customer: 7"
        assert "KeyError: 7" in facts.traceback
        assert "test_facts_of_an_ordinary_error" in facts.traceback

    @pytest.mark.parametrize(
        ("code", "stored"),
        [
            ("rate_limited", "rate_limited"),
            (42, None),
            ("", None),
            ("  ", None),
            (None, None),
            (b"x", None),
            ("a\0\ud800b", "a\ufffd\ufffdb"),
            ("x" * 300, "x" * 100),
        ],
    )
    def test_only_a_nonblank_text_is_a_code(self, code, stored):
        """B3, A4."""
        error = ValueError("x")
        error.code = code
        assert describe(error).code == stored

    def test_the_code_of_an_enum_is_its_value(self):
        class Code(str, Enum):  # noqa: UP042
            LIMIT = "rate_limited"

        code = describe(TransientError("x", code=Code.LIMIT)).code
        assert code == "rate_limited" and type(code) is str

    def test_what_sys_exit_was_given_is_no_code(self):
        facts = describe(SystemExit("Cannot go on."))
        assert (facts.code, facts.message, facts.type) == (None, "Cannot go on.", "SystemExit")

    @pytest.mark.parametrize(
        ("error", "message"),
        [
            (ValueError("it is wrong"), "it is wrong"),
            ("a text that was raised", "a text that was raised"),
            (None, "Unknown error"),
            (object(), "Unknown error"),
            (TimeoutError(), "TimeoutError"),
            (ValueError("  "), "ValueError"),
        ],
    )
    def test_the_message(self, error, message):
        """B3."""
        assert describe(error).message == message

    def test_a_huge_message_keeps_head_and_tail(self):
        """C079."""
        facts = describe(ValueError("head " + "x" * 2_000_000 + " tail"))
        assert len(facts.message) <= 10_000
        assert facts.message.startswith("head x") and facts.message.endswith("x tail")
        assert "\n… 1,990,070 characters left out …\n" in facts.message
        assert len(facts.traceback) <= 50_000
        assert facts.traceback.startswith("ValueError: head") and facts.traceback.endswith(" tail\n")

    def test_a_deep_recursion_keeps_head_and_tail(self):
        """C079: 2,000 frames of two functions that call each other, which Python does not fold."""

        def ping(n):
            if n == 0:
                raise ValueError("at the bottom")
            pong(n - 1)

        def pong(n):
            ping(n)

        limit = sys.getrecursionlimit()
        sys.setrecursionlimit(10_000)
        try:
            ping(1_000)
        except ValueError as error:
            facts = describe(error)
        finally:
            sys.setrecursionlimit(limit)
        assert len(facts.traceback) <= 50_000
        assert "test_a_deep_recursion_keeps_head_and_tail" in facts.traceback[:2_000]
        assert facts.traceback.endswith("ValueError: at the bottom\n")

    def test_what_cannot_be_stored_is_replaced(self):
        facts = describe(ValueError("a\0b\ud800c"))
        assert facts.message == "a\ufffdb\ufffdc"
        facts.traceback.encode()
        assert "\0" not in facts.traceback

    @pytest.mark.parametrize("raised", [RuntimeError, SystemExit, KeyboardInterrupt, RecursionError])
    def test_an_error_that_cannot_say_itself_is_still_described(self, raised):
        try:
            raise Hostile(raised)
        except Hostile as error:
            facts = describe(error)
        assert facts.message == "Unknown error"
        assert facts.code is None
        assert facts.type == f"{__name__}.Hostile"

    def test_a_text_of_a_foreign_class_becomes_a_plain_one(self):
        class Text(str):
            pass

        class Odd(Exception):
            def __str__(self):
                return Text("odd")

        assert type(describe(Odd()).message) is str

    def test_the_longest_type_name_keeps_its_end(self):
        facts = describe(type("E" * 300 + "End", (Exception,), {})())
        assert len(facts.type) == 200 and facts.type.endswith("End")

    @given(st.text(alphabet=st.characters()), st.text(alphabet=st.characters()))
    def test_no_text_makes_it_fail(self, message, code):
        facts = describe(TransientError(message, code=code))
        for text in (facts.message, facts.traceback, facts.code or ""):
            text.encode()
            assert "\0" not in text


class TestTexts:
    @given(st.text(alphabet=st.characters()))
    def test_clean_changes_only_what_cannot_be_stored(self, text):
        cleaned = clean(text)
        cleaned.encode()
        assert all(
            new == old or (new == "\ufffd" and (old == "\0" or "\ud800" <= old <= "\udfff"))
            for old, new in zip(text, cleaned, strict=True)
        )

    @given(st.integers(0, 400), st.integers(0, 200))
    def test_cut_never_exceeds_its_limit(self, length, limit):
        text = "x" * length
        shortened = cut(text, limit)
        assert len(shortened) <= limit
        assert shortened == text or length > limit


class TestControlFlow:
    def test_lease_lost_is_not_swallowed_by_a_handler_for_exceptions(self):
        with pytest.raises(LeaseLost):
            try:
                raise LeaseLost(JOB, "worker-1", 3)
            except Exception:
                pytest.fail("It was swallowed.")

    @pytest.mark.parametrize("seconds", [0, 0.5, 30, LONGEST_DELAY])
    def test_retry_after_takes_a_delay(self, seconds):
        assert RetryAfter(seconds).seconds == seconds

    @pytest.mark.parametrize(
        "seconds", [-1, 10**10, 10**400, float("nan"), float("inf"), "30", None, True, LONGEST_DELAY + 1]
    )
    def test_retry_after_refuses_what_is_no_delay(self, seconds):
        """C029."""
        with pytest.raises(InvalidInput, match=r"from 0 to 31,622,400") as refusal:
            RetryAfter(seconds)
        assert refusal.value.field == "RetryAfter.seconds"

    @pytest.mark.parametrize(
        ("header", "seconds"),
        [
            ("120", 120),
            (" 7 ", 7),
            ("1.5", 1.5),
            ("-3", 0),
            ("1e99", LONGEST_DELAY),
            ("inf", LONGEST_DELAY),
            ("Wed, 21 Oct 2015 07:28:00 GMT", 0),
            ("Fri, 31 Dec 9999 23:59:59 GMT", LONGEST_DELAY),
            (None, 30),
            ("", 30),
            ("nan", 30),
            ("soon", 30),
            ("Wed, 99 Oct 2015 07:28:00 GMT", 30),
        ],
    )
    def test_retry_after_reads_the_header(self, header, seconds):
        assert RetryAfter.from_header(header).seconds == seconds

    @pytest.mark.parametrize("zone", ["GMT", "-0000", "+0000"])
    def test_retry_after_reads_a_date_in_the_header(self, zone):
        soon = datetime.now(UTC) + timedelta(seconds=90)
        header = f"{soon:%a, %d %b %Y %H:%M:%S} {zone}"
        assert 85 < RetryAfter.from_header(header).seconds <= 90

    def test_retry_after_takes_another_default(self):
        assert RetryAfter.from_header(None, default=300).seconds == 300

    def test_park_carries_code_and_message(self):
        park = Park("needs_a_file", "Upload the file first.")
        assert (park.code, park.message) == ("needs_a_file", "Upload the file first.")
        assert str(park) == "Upload the file first."
        assert str(Park("needs_a_file")) == "The job was parked: needs_a_file."
