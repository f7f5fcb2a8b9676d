"""Who is claimed, in which order, and who is left alone."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace
from datetime import datetime, timedelta
from typing import Any
from uuid import UUID

import pytest

from durable_jobs import store
from durable_jobs.models import Job
from durable_jobs.store import Lease, Probe
from tests.store.rows import (
    CLAIMER,
    EPOCH,
    ME,
    STATES,
    State,
    ago,
    ahead,
    execute,
    image,
    insert_raw,
    lease_on,
    make,
    make_all,
    probe_for,
)

pytestmark = pytest.mark.django_db


def claim_next(limit: int, *probes: Probe, owner: str = CLAIMER) -> list[UUID]:
    return [claimed.job.id for claimed in store.claim_next(owner, limit, probes)]


def probe(queue: str = "q", kind: str = "k", priority: int = 0, ttl: float = 30.0) -> Probe:
    return Probe(queue, kind, priority, None, ttl)


def due(seconds_ago: float = 60, **changes: Any) -> UUID:
    changes = {"queue_name": "q", "kind": "k", "priority": 0, "next_run_at": ago(seconds_ago), **changes}
    return make("pending", **changes)


def test_the_higher_priority_goes_first_then_the_longer_due() -> None:
    """Whatever the order of the probes, and across queues and kinds."""
    low = due(900, priority=-5)
    late, early = due(10, priority=5), due(500, priority=5)
    top = due(5, priority=100, queue_name="other", kind="x")
    probes = [probe(priority=-5), probe(priority=5), probe("other", "x", 100)]
    assert claim_next(1, *probes) == [top]
    assert claim_next(1, *probes) == [early]
    assert claim_next(8, *probes) == [late, low]
    assert claim_next(8, *probes) == []


def test_a_batch_is_answered_by_priority() -> None:
    """P23: RETURNING has no order."""
    ids = [due(priority=priority) for priority in (3, -1, 9, 0)]
    probes = [probe(priority=priority) for priority in (0, 9, -1, 3)]
    assert claim_next(4, *probes) == [ids[2], ids[0], ids[3], ids[1]]


@pytest.mark.parametrize("limit", [1, 2, 3, 5, 8, 17, 40, 64, 65, 128, 200])
def test_never_more_than_the_limit(limit: int) -> None:
    for _ in range(130):
        due()
    claimed = claim_next(limit, probe())
    assert 1 <= len(claimed) <= limit
    assert len(claimed) == max(size for size in store._CLAIM_SIZES if size <= limit)
    assert Job.objects.filter(status="running").count() == len(claimed)


def test_nothing_is_claimed_for_nobody() -> None:
    due()
    assert claim_next(0, probe()) == claim_next(-1, probe()) == claim_next(5) == []


def test_one_kind_with_a_backlog_does_not_starve_its_equals() -> None:
    """Among equal priorities chance decides, on both databases."""
    for number in range(60):
        due(1000 - number, kind="flood")
    quiet = [due(1, kind=kind) for kind in ("a", "b")]
    probes = [probe(kind=kind) for kind in ("flood", "a", "b")]
    claimed = [claim_next(1, *probes)[0] for _ in range(45)]
    assert set(quiet) <= set(claimed)


def test_each_kind_gets_its_own_lease() -> None:
    """C004: leases of different length in one batch."""
    short, long = due(kind="short"), due(kind="long")
    claim_next(2, probe(kind="short", ttl=5), probe(kind="long", ttl=3000))
    assert abs(image(short)["lease_expires_at"] - ahead(5)) < timedelta(seconds=4)
    assert abs(image(long)["lease_expires_at"] - ahead(3000)) < timedelta(seconds=4)


def test_a_floor_answers_where_the_claim_was() -> None:
    """P-E: the next probe begins there; a floor never hides what is due above it."""
    first, second = due(100), due(50)
    (claimed,) = store.claim_next(CLAIMER, 1, [probe()])
    if claimed.run_at is not None:
        assert abs(claimed.run_at - ago(100)) < timedelta(seconds=5)
    assert claimed.job.id == first
    assert claim_next(1, probe()._replace(floor=ago(101))) == [second]


PAUSES: list[dict[str, str]] = [
    {},
    {"queue": "elsewhere"},
    {"queue": "q"},
    {"kind": "k"},
    {"tenant": "acme"},
    {"queue": "q", "kind": "k", "tenant": "acme"},
    {"queue": "q", "kind": "other"},
    {"queue": "", "kind": "", "tenant": ""},
]


@pytest.mark.postgres_only
@pytest.mark.parametrize("paused", PAUSES, ids=str)
def test_of_one_place_one_is_claimed_as_of_several(paused: dict[str, str]) -> None:
    """The statement for one job of one place does to every row what the statement for many does."""
    if paused:
        store.pause(**paused, reason="r", actor="a")
    for neighbour in ({"kind": "other"}, {"queue_name": "other"}, {"priority": 9}):
        due(900, **neighbour)
    states = [
        *(State("pending", None, request) for request in ("none", "mail", "both")),
        State("retry", "retry_exhausted", "row"), State("pending", later=True), State("running"),
    ]  # fmt: skip
    # Whether it was orphaned, whether such are claimed, and where to look.
    ways = [(0, False, None), (1, True, None)]
    if not paused:
        ways += [(1, False, None), (0, True, 120), (0, True, 30)]
    for suspect, suspects, since in ways:
        place = probe()._replace(floor=None if since is None else ago(since))
        rows = make_all(states, queue_name="away", kind="k", priority=0, redrives_since_commit=suspect)
        for state, job_id in rows.items():
            alone, together = (left_by(job_id, probes, suspects) for probes in ([place], [place, probe("z")]))
            assert alone[0] == together[0], state
            for column, value in alone[1].items():
                assert_same(value, together[1][column], f"{state}: {column}")


def left_by(job_id: UUID, probes: list[Probe], suspects: bool) -> tuple[list[Any], dict[str, Any]]:
    """What a claim of one answers, and the row as it leaves it; undone afterwards."""
    execute("SAVEPOINT undone")
    execute("UPDATE durable_jobs_job SET queue_name = 'q' WHERE id = %s", job_id)
    claimed = store.claim_next(CLAIMER, 1, probes, suspects=suspects)
    left = image(job_id)
    execute("ROLLBACK TO SAVEPOINT undone")
    return [(one.job.id, one.run_at) for one in claimed], left


def assert_same(one: Any, other: Any, what: str) -> None:
    if isinstance(one, datetime) and isinstance(other, datetime):
        assert abs(one - other) < timedelta(seconds=20), what
    else:
        assert one == other, what


def test_a_delivery_may_come_early() -> None:
    """B40: a claim by identity never reads the time."""
    job_id = make(State("retry", later=True))
    row = image(job_id)
    assert claim_next(1, probe_for(job_id)) == []
    assert store.claim(job_id, row["continuation_seq"], row["redrives"], CLAIMER, 30) is not None


@pytest.mark.parametrize("field", ["queue_name", "kind", "tenant_id", "everything"])
def test_a_pause_stops_claims_and_nothing_else(field: str) -> None:
    """F10: a blank field matches all; a running slice is told by its beat."""
    paused = due()
    running = make("running", queue_name="q", kind="k")
    others = [due(queue_name="z"), due(kind="z"), due(tenant_id="z")]
    pause(**({} if field == "everything" else {field: image(paused)[field]}))
    probes = [probe(), probe(queue="z"), probe(kind="z")]
    free = {"queue_name": others[0], "kind": others[1], "tenant_id": others[2]}.get(field)
    claimed = claim_next(8, *probes)
    assert claimed == ([free] if free else [])
    row = image(paused)
    assert store.claim(paused, row["continuation_seq"], row["redrives"], CLAIMER, 30) is None
    assert image(paused) == row
    assert store.beat_many("worker-me", [lease_on(running)])[running] == (True, True, False, True)
    execute("DELETE FROM durable_jobs_pause")
    assert paused in claim_next(8, *probes)
    assert store.beat_many("worker-me", [lease_on(running)])[running] == (True, True, False, False)


def test_a_pause_of_something_else_changes_nothing() -> None:
    job, running = due(), make("running", queue_name="q", kind="k")
    pause(queue_name="q", kind="other")
    pause(queue_name="other", kind="k")
    pause(queue_name="q", kind="k", tenant_id="other")
    assert store.beat_many("worker-me", [lease_on(running)])[running] == (True, True, False, False)
    assert claim_next(1, probe()) == [job]


def test_routes_tell_where_work_is() -> None:
    """P-E: every (queue, kind, priority) with claimable rows, and how long until the earliest."""
    make_all([state for state in STATES if state.base not in ("pending", "retry")])
    assert store.routes() == []
    for queue, kind, priority, seconds in [
        ("a", "x", 0, 30), ("a", "x", 0, 90), ("a", "x", -3, -40), ("a", "y", 100, 5), ("b", "a", -100, 7),
        ("B", "a", 2, -600), ("ä", "Z", 0, 1),
    ]:  # fmt: skip
        due(seconds, queue_name=queue, kind=kind, priority=priority)
    make("retry", queue_name="r", kind="x", priority=1, next_run_at=ago(12))
    expected = {
        ("a", "x", 0): -90, ("a", "x", -3): 40, ("a", "y", 100): -5, ("b", "a", -100): -7,
        ("B", "a", 2): 600, ("ä", "Z", 0): -1, ("r", "x", 1): -12,
    }  # fmt: skip
    routes = store.routes()
    assert sorted(route[:3] for route in routes) == sorted(expected)
    for route in routes:
        assert abs(route.due_in - expected[route[:3]]) < 4, route


def test_every_route_can_be_probed() -> None:
    """What the list names a claim finds: nobody waits unseen (P19)."""
    ids = set(make_all([s for s in STATES if s.base in ("pending", "retry")], tenant_id="t").values())
    seen = set()
    for route in store.routes():
        execute("UPDATE durable_jobs_job SET next_run_at = %s WHERE queue_name = %s", ago(1), route.queue)
        seen |= set(claim_next(64, probe(*route[:3])))
    assert seen == ids


def test_a_lost_lease_is_told_as_lost() -> None:
    """P5: lost is "not still mine"; each lease asked about has an answer."""
    mine, stolen, ended, unknown = make("running"), make("running"), make("running"), make("running")
    leases = [lease_on(job_id) for job_id in (mine, stolen, ended, unknown)]
    execute("UPDATE durable_jobs_job SET lease_owner = 'thief' WHERE id = %s", stolen)
    store.complete(leases[2], None)
    execute("DELETE FROM durable_jobs_job WHERE id = %s", unknown)
    beats = store.beat_many("worker-me", leases)
    assert beats[mine][:2] == (True, True)
    for job_id in (stolen, ended, unknown):
        assert beats[job_id] == (False, False, False, False)


def test_each_lease_of_a_beat_is_judged_by_its_own_epoch_and_gets_its_own_length() -> None:
    """In whatever order they come; a row of the owner with another epoch, or of another owner, is left alone."""
    jobs = [make("running", lease_epoch=epoch, attempts=1) for epoch in range(1, 41)]
    leases = [Lease(job_id, "worker-me", epoch, 100.0 * epoch) for epoch, job_id in enumerate(jobs, 1)]
    leases[4] = replace(leases[4], epoch=6)
    leases[5] = replace(leases[5], epoch=5)
    execute("UPDATE durable_jobs_job SET lease_owner = 'thief' WHERE id = %s", jobs[9])
    lost = {jobs[4], jobs[5], jobs[9]}
    before = {job_id: image(job_id) for job_id in lost}
    random.shuffle(leases)
    beats = store.beat_many("worker-me", leases)
    assert set(beats) == set(jobs)
    assert {job_id for job_id, beat in beats.items() if not beat.renewed} == lost
    assert {job_id for job_id, beat in beats.items() if not beat.mine} == lost
    assert {job_id: image(job_id) for job_id in lost} == before
    for epoch, job_id in enumerate(jobs, 1):
        if job_id not in lost:
            row = image(job_id)
            length = (row["lease_expires_at"] - row["heartbeat_at"]).total_seconds()
            assert length == pytest.approx(100 * epoch, abs=1), epoch


def test_strangers_are_rows_of_this_owner_that_it_does_not_know() -> None:
    """P7: a claim whose reply was lost."""
    known, lost, expired = make("running"), make("running"), make("expired")
    make("running", lease_owner="another")
    make("retry")
    assert dict(store.strangers("worker-me", [known])) == {lost: 3, expired: 3}
    assert len(store.strangers("worker-me", [])) == 3
    assert store.strangers("nobody", [known]) == []


def test_unfinished_is_what_is_due_or_has_begun() -> None:
    """A job that was only scheduled for later keeps nobody waiting."""
    waits: Counter[str] = Counter()
    for state in STATES:
        job_id = make(state, queue_name="q", kind="k")
        if store.unfinished(["q", "z"], ["k"]):
            waits[state.base] += 1
        assert not store.unfinished(["z"], ["k"]) and not store.unfinished(["q"], ["z"])
        execute("DELETE FROM durable_jobs_job WHERE id = %s", job_id)
    assert set(waits) == {"pending", "running", "expired", "retry"}
    assert not store.unfinished([], ["k"]) and not store.unfinished(["q"], [])
    assert not store.unfinished(None, ["k"])
    make(State("pending", later=True), queue_name="q", kind="k", attempts=0)
    assert not store.unfinished(["q"], ["k"])
    make(State("pending", later=True), queue_name="q", kind="k", attempts=1)
    assert store.unfinished(["q"], ["k"]) and store.unfinished(None, ["k"])


def test_a_look_agrees_with_the_claim() -> None:
    """`is_due` takes nothing and promises nothing that the claim would not give."""
    for state in STATES:
        job_id = make(state, queue_name="q", kind="k", priority=0)
        for suspects in (True, False):
            due = store.is_due([probe()], suspects=suspects)
            assert due == (state.base in ("pending", "retry") and not state.later and suspects), state
        execute("UPDATE durable_jobs_job SET redrives_since_commit = 0 WHERE id = %s", job_id)
        due = store.is_due([probe()], suspects=False)
        assert due == bool(store.claim_next(CLAIMER, 1, [probe()], suspects=False)), state
        execute("DELETE FROM durable_jobs_job WHERE id = %s", job_id)
    assert not store.is_due([])


def test_a_suspect_is_left_out_when_told_so() -> None:
    """Poison takes its neighbours along: what was orphaned since its last commit runs alone."""
    suspect, plain = due(100), due(50, redrives_since_commit=0)
    assert [one.job.id for one in store.claim_next(CLAIMER, 4, [probe()], suspects=False)] == [plain]
    assert claim_next(4, probe()) == [suspect]


def pause(**target: str) -> None:
    columns = {"queue_name": "", "kind": "", "tenant_id": "", "reason": "", "actor": "", "since": ago(1)}
    insert_raw({**columns, **target}, table="durable_jobs_pause")


@pytest.mark.parametrize(
    ("paused", "stops"),
    [
        ({}, False),
        ({"queue": "q", "kind": "k", "tenant": "acme"}, True),
        ({"queue": "q"}, True),
        ({"kind": "k"}, True),
        ({"tenant": "acme"}, True),
        ({"queue": "other", "kind": "k", "tenant": "acme"}, False),
        ({"queue": "q", "kind": "other", "tenant": "acme"}, False),
        ({"queue": "q", "kind": "k", "tenant": "other"}, False),
    ],
    ids=str,
)
def test_an_owner_s_jobs_that_are_asked_to_stop_are_told(paused: dict[str, str], stops: bool) -> None:
    """A cancel on the row or in the mailbox, and a pause; of nobody else's jobs, and of none that has ended."""
    place = {"queue_name": "q", "kind": "k"}
    rows = make_all([state for state in STATES if state.verdict is None], **place)
    make_all([State("running", None, "both"), State("running")], **place, lease_owner="somebody else")
    if paused:
        store.pause(**paused, reason="r", actor="a")
    mine = {state: job_id for state, job_id in rows.items() if state.base in ("running", "expired")}
    told = store.asked_to_stop(ME)
    assert {job_id for job_id, _, beat in told if beat.cancel} == {
        job_id for state, job_id in mine.items() if state.request != "none"
    }
    assert {job_id for job_id, _, beat in told if beat.paused} == (set(mine.values()) if stops else set())
    assert all(epoch == EPOCH and beat.mine and not beat.renewed for _, epoch, beat in told)
