"""What the statements say at their edges: what is left out, what is given when nothing is said, what is full."""

from __future__ import annotations

from dataclasses import replace
from typing import Any
from uuid import UUID

import pytest
from django.db import connection

from durable_jobs import store
from durable_jobs.jsontext import sha256
from durable_jobs.models import Job, Scope, uuid7
from durable_jobs.store import Beat, NewJob
from tests.store.rows import (
    EPOCH,
    GRACE,
    ME,
    STATES,
    State,
    ago,
    execute,
    image,
    lease_on,
    make,
    orphan_on,
    probe_for,
)

pytestmark = pytest.mark.django_db

HOME = Scope("acme", "north")


def is_claimed(job_id: UUID, **options: bool) -> bool:
    return [one.job.id for one in store.claim_next("w", 1, [probe_for(job_id)], **options)] == [job_id]


# --- due at once, where no delay is said ----------------------------------------------------------------


def test_what_yields_goes_on_at_once() -> None:
    job_id = make("running")
    assert store.yield_slice(lease_on(job_id)) is not None
    assert is_claimed(job_id)


def test_what_is_redriven_runs_at_once() -> None:
    job_id = make("failed")
    assert store.redrive(job_id, scope=None, grace=GRACE) is not None
    assert is_claimed(job_id)


def test_what_is_started_runs_at_once() -> None:
    new = NewJob(uuid7(), "tests.work", "pending", "acme", "north", "q", None, None)
    both = [new, replace(new, id=uuid7())]
    assert store.insert(both[0]) is not None
    assert set(store.insert_many(both[1:])) == {both[1].id}
    probe = probe_for(new.id)
    assert {one.job.id for one in store.claim_next("w", 2, [probe])} == {one.id for one in both}


def test_what_was_orphaned_is_due_for_whoever_does_not_say_otherwise() -> None:
    job_id = make("pending")
    probe = probe_for(job_id)
    assert image(job_id)["redrives_since_commit"] == 1
    assert (store.is_due([probe]), store.is_due([probe], suspects=False), store.is_due([])) == (
        True,
        False,
        False,
    )
    assert store.claim_next("w", 1, [probe], suspects=False) == []
    assert is_claimed(job_id)


@pytest.mark.parametrize("limit", [0, -1])
def test_who_has_no_hand_free_claims_nothing(limit: int) -> None:
    job_id = make("pending")
    assert store.claim_next("w", limit, [probe_for(job_id)]) == []
    assert store.claim_next("w", 1, []) == []
    assert image(job_id)["status"] == "pending"


def test_many_are_inserted_in_the_order_of_scope_kind_and_keys() -> None:
    """Two statements that take the same keys in opposite order would wait for each other."""
    places = [
        NewJob(
            uuid7(), kind, "pending", tenant, organization, "q", "1", None, idempotency_key=key, lock_key=lock
        )
        for tenant in ("b", "a")
        for organization in ("y", "x", None)
        for kind in ("n", "m")
        for key, lock in (("2", "2"), (None, "1"), ("1", None), (None, "3"))
    ]
    places = [
        replace(new, lock_key=new.lock_key and f"{new.kind}{new.lock_key}", input_sha256=sha256("1"))
        for new in places
    ]
    assert len(store.insert_many(places)) == len(places)
    # On PostgreSQL the clock is read for each row; two of one moment tell nothing.
    when = "rowid" if connection.vendor == "sqlite" else "created_at"
    inserted = execute(
        f"SELECT {when}, tenant_id, coalesce(organization_id, ''), kind, coalesce(idempotency_key, ''), "
        "coalesce(lock_key, '') FROM durable_jobs_job"
    )
    keys = [key for _, *key in sorted(inserted)]
    assert keys == sorted(keys)


def test_a_key_is_given_to_a_job_that_has_none_only() -> None:
    keyless, keyed = make("pending", idempotency_key=None), make("pending", idempotency_key="old")
    assert store.set_idempotency_key(keyless, "new") is True
    assert store.set_idempotency_key(keyless, "newer") is False
    assert store.set_idempotency_key(keyed, "new") is False
    assert store.set_idempotency_key(make("pending", idempotency_key=None), "new") is False
    assert (image(keyless)["idempotency_key"], image(keyed)["idempotency_key"]) == ("new", "old")


@pytest.mark.parametrize("stale", [{"seq": -1}, {"redrives": -1}])
@pytest.mark.parametrize("options", [{}, {"early": False}, {"limit": store.Limit(("tests.work",), HOME, 0)}])
def test_a_message_of_an_earlier_delivery_is_refused_for_good(
    stale: dict[str, int], options: dict[str, Any]
) -> None:
    """Not "ask again": nobody will ever owe it anything (B38)."""
    job_id = make("pending")
    row = image(job_id)
    seq, redrives = row["continuation_seq"], row["redrives"]
    other = make("pending", continuation_seq=seq - 1, redrives=redrives - 1)
    answer = store.claim(
        job_id, seq + stale.get("seq", 0), redrives + stale.get("redrives", 0), "w", 30, **options
    )
    assert answer is None
    assert {image(one)["status"] for one in (job_id, other)} == {"pending"}


@pytest.mark.parametrize("state", ["running", "expired", "held", "completed", "paused"])
def test_a_message_for_what_is_not_claimable_is_refused_for_good(state: str) -> None:
    job_id = make("pending" if state == "paused" else state)
    if state == "paused":
        store.pause(reason="r", actor="a")
    row = image(job_id)
    assert store.claim(job_id, row["continuation_seq"], row["redrives"], "w", 30) is None
    assert image(job_id) == row


def test_a_message_that_comes_too_early_or_meets_a_full_kind_is_asked_to_come_again() -> None:
    job_id = make(State("pending", later=True))
    row = image(job_id)
    delivery = (job_id, row["continuation_seq"], row["redrives"], "w", 30)
    full = store.Limit(("tests.work",), HOME, 0)
    assert store.claim(*delivery, early=False) is store.EARLY
    assert store.claim(*delivery, limit=full) is store.FULL
    assert store.claim(*delivery, limit=full, early=False) is store.EARLY
    assert isinstance(store.claim(*delivery), Job)


# --- a claim of limited work ----------------------------------------------------------------------------


def test_limited_work_that_is_paused_is_not_claimed() -> None:
    """Even where its scope was found before the pause came."""
    job_id = make("pending")
    probe = probe_for(job_id)
    assert store.due_scopes(probe, []) == [HOME]
    store.pause(queue=probe.queue, reason="r", actor="a")
    assert store.due_scopes(probe, []) == []
    assert store.claim_limited("w", 5, probe, HOME, [probe.kind], 5) == ([], 5)
    store.unpause(queue=probe.queue)
    claimed = store.claim_limited("w", 5, probe, HOME, [probe.kind], 5)
    assert claimed is not None and [job.id for job in claimed[0]] == [job_id]


def test_limited_work_that_was_orphaned_goes_only_to_who_takes_suspects() -> None:
    job_id = make("pending")
    probe = probe_for(job_id)
    assert image(job_id)["redrives_since_commit"] == 1
    assert store.due_scopes(probe, [], suspects=False) == []
    assert store.claim_limited("w", 5, probe, HOME, [probe.kind], 5, suspects=False) == ([], 5)
    assert store.due_scopes(probe, []) == [HOME]
    claimed = store.claim_limited("w", 5, probe, HOME, [probe.kind], 5)
    assert claimed is not None and [job.id for job in claimed[0]] == [job_id]


@pytest.mark.parametrize(
    "elsewhere", [{"queue_name": "other"}, {"kind": "tests.other"}, {"priority": 6}, {"later": True}]
)
def test_the_scopes_of_due_work_are_those_of_this_place_and_of_now(elsewhere: dict[str, Any]) -> None:
    here = make("pending", queue_name="q", organization_id=None)
    columns = {"queue_name": "q", "tenant_id": "theirs", **elsewhere}
    there = make(State("pending", later=columns.pop("later", False)), **columns)
    held = make("held", queue_name="q", tenant_id="held")
    assert store.due_scopes(probe_for(here), []) == [Scope("acme", None)]
    assert store.due_scopes(probe_for(here), [Scope("acme", None)]) == []
    for job_id in (there, held):
        probe, scope = probe_for(here), Scope(image(job_id)["tenant_id"], "north")
        assert store.claim_limited("w", 5, probe, scope, [probe.kind], 5) == ([], 5)


def test_limited_work_is_claimed_up_to_the_limit_of_the_call_and_of_the_kind() -> None:
    first = make("pending", redrives_since_commit=0)
    probe = probe_for(first)
    rest = [make("pending", queue_name=probe.queue) for _ in range(4)]
    answers = [store.claim_limited("w", 2, probe, HOME, [probe.kind], 3) for _ in range(3)]
    assert [(len(jobs), room) for jobs, room in answers] == [(2, 1), (1, 0), (0, 0)]  # type: ignore[misc]
    assert sum(image(job_id)["status"] == "running" for job_id in [first, *rest]) == 3


def test_a_route_leads_to_work_that_can_be_claimed_and_nowhere_else() -> None:
    for name, state in (("a", State("pending")), ("b", State("held")), ("c", State("retry")), ("d", State("running")),
                        ("e", State("completed")), ("f", State("pending", later=True))):  # fmt: skip
        make(state, queue_name=name)
    routes = store.routes()
    assert [(route.queue, route.due_in <= 0) for route in routes] == [("a", True), ("c", True), ("f", False)]
    assert {(route.kind, route.priority) for route in routes} == {("tests.work", 5)}


# --- beats ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "changed", [{"owner": "somebody else"}, {"epoch": EPOCH + 1}, {"job_id": UUID(int=7)}]
)
def test_a_lease_is_lost_when_any_part_of_it_is_anothers(changed: dict[str, Any]) -> None:
    """And the beat of one says nothing about the others that are sent with it."""
    good, other = lease_on(make("running")), lease_on(make("running"))
    foreign = replace(other, **changed)
    beats = {lease.job_id: store.beat_many(lease.owner, [lease])[lease.job_id] for lease in (good, foreign)}
    assert beats[good.job_id] == Beat(renewed=True, mine=True, cancel=False, paused=False)
    assert (beats[foreign.job_id].renewed, beats[foreign.job_id].mine) == (False, False)


# --- repair -----------------------------------------------------------------------------------------------


def test_a_job_whose_hooks_never_failed_is_not_settled_without_them() -> None:
    job_id = make("expired", mirror_attempts=0)
    assert store.settle(job_id, scope=None, grace=GRACE) is None
    execute("UPDATE durable_jobs_job SET mirror_attempts = 1 WHERE id = %s", job_id)
    settled = store.settle(job_id, scope=None, grace=GRACE)
    assert settled is not None and settled.status == "failed"


def test_a_lease_that_holds_is_nobodys_to_end_but_a_reapers() -> None:
    """Without the word of a supervisor the expiry counts, in each of the three repairs."""
    running, cancelling = make("running"), make("running", cancel_requested_at=ago(60))
    assert store.take_orphan(orphan_on(running), grace=GRACE, delay=0) is None
    assert store.park_orphan(orphan_on(running), grace=GRACE, code="c", message="m") is None
    assert store.cancel_orphan(orphan_on(cancelling), grace=GRACE) is None
    assert store.cancel_orphan(orphan_on(cancelling), grace=GRACE, dead=True) is not None


def test_nobody_holds_a_free_row() -> None:
    assert store.holders(make("expired")) is None


# --- history ----------------------------------------------------------------------------------------------


def test_pruning_goes_on_after_the_last_one_even_among_equals() -> None:
    """Rows that ended at the same moment are told apart by their ids; those passed over do not come again."""
    moment = ago(1_000)
    ids = sorted(make("completed", finished_at=moment) for _ in range(4))
    pruned = store.prune_batch(
        ended_before=ago(300), statuses=["completed"], after=(moment, ids[1]), batch=10, budget=10**9
    )
    assert [job.id for job in pruned] == ids[2:]
    assert set(Job.objects.values_list("id", flat=True)) == set(ids[:2])


def test_a_batch_of_pruning_is_bounded_by_rows_and_by_text_and_is_never_empty() -> None:
    ids = [make("completed", finished_at=ago(1_000 - number), result="x" * 5_000) for number in range(5)]

    def prune(batch: int, budget: int) -> list[UUID]:
        start = (ago(9e6), UUID(int=0))
        pruned = store.prune_batch(
            ended_before=ago(300), statuses=["completed"], after=start, batch=batch, budget=budget
        )
        return [job.id for job in pruned]

    assert prune(batch=1, budget=10**9) == ids[:1]
    assert prune(batch=10, budget=1) == ids[1:2]
    assert prune(batch=10, budget=7_000) == ids[2:4]
    assert prune(batch=10, budget=10**9) == ids[4:]
    assert prune(batch=10, budget=10**9) == []


# --- counters that are full -------------------------------------------------------------------------------


@pytest.mark.parametrize("full", [{"lease_epoch": 2**63 - 1}, {"attempts": 2**31 - 1, "lease_epoch": 2**31}])
def test_a_counter_that_cannot_grow_lets_nobody_own_the_job_by_hand(full: dict[str, int]) -> None:
    epoch = full.get("lease_epoch", EPOCH)
    ended, expired = make("failed", **full), make("expired", **full)
    assert store.retry_claim(ended, epoch, "w", 30) is None
    assert store.claim_held(expired, scope=HOME, owner="w", ttl=30) is None
    assert (image(ended)["status"], image(expired)["lease_owner"]) == ("failed", ME)


def test_counters_may_grow_up_to_their_end() -> None:
    last = {"lease_epoch": 2**63 - 2, "attempts": 2**31 - 2}
    claimed = store.retry_claim(make("failed", **last), 2**63 - 2, "w", 30)
    assert isinstance(claimed, Job)
    assert (claimed.lease_epoch, claimed.attempts) == (2**63 - 1, 2**31 - 1)


# --- what screens and commands ask ------------------------------------------------------------------------


def test_due_begun_and_waiting_for_a_retry_is_unfinished_and_scheduled_is_not() -> None:
    make("held"), make("completed"), make("failed")
    scheduled = image(make(State("pending", later=True), attempts=0, lease_epoch=0))
    kinds = ["tests.work"]
    assert not store.unfinished(None, kinds)
    fresh = {"attempts": 0, "lease_epoch": 0}
    for state, columns in (
        (State("pending"), fresh),
        (State("pending", later=True), {}),
        (State("running"), {}),
        (State("expired"), {}),
        (State("retry", later=True), {}),
    ):
        job_id = make(state, **columns)
        queue = image(job_id)["queue_name"]
        assert store.unfinished(None, kinds) and store.unfinished([queue, "z"], kinds), state
        assert not store.unfinished([scheduled["queue_name"]], kinds), state
        assert not store.unfinished(None, ["tests.other"]) and not store.unfinished([queue], []), state
        execute("DELETE FROM durable_jobs_job WHERE id = %s", job_id)
    make("running", queue_name="manual")
    assert not store.unfinished(None, kinds)


def test_only_leases_that_hold_count_as_leased() -> None:
    for state in STATES:
        if state.request == "none" and state.verdict is None and not state.later:
            make(state)
    running = image(make("running", tenant_id="other", kind="tests.other"))
    assert (store.leased(), store.leased(queue=running["queue_name"])) == (2, 1)
    assert (store.leased(kind="tests.other"), store.leased(kind="tests.none")) == (1, 0)
    assert (store.leased(tenant="acme"), store.leased(tenant="nobody")) == (1, 0)
