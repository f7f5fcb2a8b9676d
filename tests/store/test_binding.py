"""Every statement with server-side binding and prepared statements, as the workers' connections have them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any
from uuid import UUID

import pytest
from django.db import connection

from durable_jobs import bounded, database, store
from durable_jobs.jsontext import sha256
from durable_jobs.models import Job, Scope, uuid7
from durable_jobs.store import NewJob, Probe
from tests.store.rows import GRACE, ME, STATES, ago, images, lease_on, letters, make, make_all, user
from tests.store.test_statement_table import RULES, Call, Rule, assert_effect, is_hit

pytestmark = [pytest.mark.postgres_only, pytest.mark.django_db(transaction=True)]

SCOPE = Scope("acme", "north")


@pytest.fixture(autouse=True)
def server_side_binding(transactional_db: None) -> Iterator[None]:
    """This thread's connection anew, with the option on and every statement prepared at its first run."""
    if connection.vendor != "postgresql":
        yield
        return
    options = connection.settings_dict["OPTIONS"]
    connection.close()
    connection.settings_dict["OPTIONS"] = {**options, "server_side_binding": True}
    try:
        connection.ensure_connection()
        connection.connection.prepare_threshold = 0
        yield
    finally:
        connection.settings_dict["OPTIONS"] = options
        connection.close()


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> set[int]:
    """The ids of the statements that ran."""
    seen: set[int] = set()
    build = database.Statement._build

    def note(self: database.Statement, vendor: str) -> Any:
        seen.add(id(self))
        return build(self, vendor)

    monkeypatch.setattr(database.Statement, "_build", note)
    return seen


def reads_and_records() -> Iterator[Callable[[], Any]]:
    """A call for each statement that the table of transitions does not run."""
    job_id = make("running")
    job = store.get(job_id)
    assert job is not None
    new = NewJob(
        uuid7(), "k", "pending", "acme", "north", "q", None, None, idempotency_key="k", lock_key="l",
        created_by=user("ann"), meta='{"a": 1}', progress_job_id=uuid7(),
    )  # fmt: skip
    yield lambda: store.insert(new)
    yield lambda: store.insert_many([new, NewJob(uuid7(), "k", "held", "acme", None, "q", "1", "0" * 64)])
    yield lambda: store.by_idempotency_key("k", "k", SCOPE)
    yield lambda: store.by_lock_key("l", Scope("acme"))
    yield lambda: store.routes()
    yield lambda: store.unfinished(["q"], ["k"])
    yield lambda: store.unfinished(None, [])
    for suspects in (True, False):
        yield lambda suspects=suspects: store.is_due([Probe("q", "k", 0, None, 9)], suspects=suspects)
    yield lambda: store.strangers(ME, [])
    yield lambda: store.strangers(ME, [job_id])
    yield lambda: store.orphans(GRACE, job_id, tenant="acme")
    yield lambda: store.cancelling(job_id)
    yield lambda: store.mailed(None, tenant="acme")
    yield lambda: store.dead_leases(ME)
    yield lambda: store.holders(job_id)
    yield lambda: store.request_cancel(job_id, scope=None, actor="a", user=None, reason="r")
    yield lambda: store.add_event(job, "e", data={"a": [1, "ß"]}, actor_id="1")
    yield lambda: store.add_event(job, "e")
    yield lambda: store.worker_started("w", host="h", pid=1, queues=["a"], kinds=[], concurrency=2)
    yield lambda: store.worker_beat("w")
    yield lambda: store.worker_stopped("w")
    yield lambda: store.forget_workers(60)
    yield lambda: store.pause(queue="z", reason="r", actor="a")
    yield lambda: store.unpause(queue="z")
    yield lambda: store.set_idempotency_key(job_id, "key")
    yield lambda: store.leased(queue="q")
    yield lambda: store.now()
    yield lambda: store.now_and_pauses()
    yield lambda: store.claim(uuid7(), 0, 0, ME, 9)
    yield lambda: store._HOLDERS.run(connection, id=job_id)
    yield lambda: store._BEFORE_MANY.run(connection)
    yield lambda: store._ADDED_SINCE.run(connection, rowid=0, ids=[job_id])
    done = make("completed")
    store.add_event(job, "e")
    yield lambda: store.prune_batch(
        ended_before=ago(1), statuses=["completed"], after=(ago(9e6), UUID(int=0)), batch=9, budget=10**6
    )
    yield lambda: store.prune_events([done, job_id], 9)
    yield lambda: store.asked_to_stop(ME)
    place = Probe("q", "x", 0, None, 9)
    yield lambda: store.claim_next(ME, 1, [place])
    for size in store._CLAIM_SIZES:
        yield lambda size=size: store.claim_next(ME, size, [place, place._replace(kind="y")])
    yield lambda: store.beat_many(ME, [lease_on(job_id), lease_on(job_id, ttl=9)])
    by_hand = NewJob(uuid7(), "k", "running", "acme", None, "manual", "1", sha256("1"), idempotency_key="h")
    yield lambda: store.insert_running(by_hand, ME, 30)
    yield lambda: store.insert_running(replace(by_hand, id=uuid7(), idempotency_key=None), ME, 30)
    yield lambda: store.renew(replace(lease_on(job_id), epoch=99))
    yield lambda: store.lock_row(job_id)
    yield lambda: store.image(job_id)
    yield lambda: store.wait_lock("l")
    yield lambda: store.try_lock("l")
    yield lambda: store.running_of_kind(["k", "tests.work"], SCOPE)
    yield lambda: store.running_by_hand(Scope("acme"), except_id=job_id)
    for full in ([], [SCOPE, Scope("ümbrella")]):
        yield lambda full=full: store.due_scopes(Probe("q", "k", 0, None, 9), full)
    for after in (None, (ago(9e6), job_id)):
        yield lambda after=after: store.candidate_sizes(
            SCOPE, "tests.work", status=None if after else "running", after=after, limit=9, cap=10**6
        )
    yield lambda: store.candidates(SCOPE, "tests.work", [job_id])
    yield lambda: store.candidates(SCOPE, "tests.work", [])


def test_every_statement_runs_and_does_the_same(ran: set[int]) -> None:
    """P24, R21: a parameter used twice is ambiguous there unless it is cast."""
    for rule in RULES:
        check(rule)
    for call in reads_and_records():
        call()
        call()
    missing = [
        name
        for name, one in vars(store).items()
        if isinstance(one, database.Statement) and one.sql("postgresql") and id(one) not in ran
    ]
    assert not missing
    with connection.cursor() as cursor:
        cursor.execute("SELECT count(*) FROM pg_prepared_statements")
        assert cursor.fetchone()[0] > 30


def check(rule: Rule) -> None:
    states = [state for state in STATES if rule.allows(state)]
    rows = make_all(states)
    before, mailed = images(rows.values()), letters()
    for state, job_id in rows.items():
        assert is_hit(rule.act(Call(before[job_id]))), f"{rule.name} on {state}"
    after = images(rows.values())
    for state, job_id in rows.items():
        effect = rule.effect_on(state)
        assert_effect(effect, before[job_id], after[job_id], job_id in mailed, f"{rule.name} on {state}")


def test_a_transaction_with_a_deadline_works_there_too() -> None:
    """Its bounds are set by statements of their own."""
    with bounded.transaction("default", deadline=time.monotonic() + 5, what="writing"):
        assert store.image(make("running")) is not None
    with bounded.transaction("default", deadline=time.monotonic() + 5, what="reading", snapshot=True):
        assert store.candidates(SCOPE, "tests.work", []) == []


def test_a_plan_made_on_an_empty_table_still_claims() -> None:
    """P-G: what was prepared before the first job came claims it afterwards."""
    probes = [Probe("q", "k", 0, None, 30.0)]
    for _ in range(7):
        assert store.claim_next(ME, 1, probes) == []
    ids = [make("pending", queue_name="q", kind="k", priority=0) for _ in range(3)]
    for _ in range(3):
        assert len(store.claim_next(ME, 1, probes)) == 1
    assert {job.lease_owner for job in Job.objects.filter(pk__in=ids)} == {ME}
