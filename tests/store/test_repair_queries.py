"""What the reconciler is shown, page by page."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from uuid import UUID

import pytest

from durable_jobs import store
from durable_jobs.conf import MANUAL_QUEUE
from durable_jobs.models import WorkerProcess, uuid7
from tests.store.rows import (
    GRACE,
    STATES,
    State,
    ago,
    ahead,
    execute,
    image,
    make,
    make_all,
    post_letter,
    stored,
)

pytestmark = pytest.mark.django_db


def test_an_orphan_is_a_running_row_with_an_owner_whose_lease_ran_out() -> None:
    """B121, P19: not a retry waiter, not within the grace; its request and verdict are told."""
    ids = make_all(STATES)
    found = {orphan.id: orphan for orphan in store.orphans(GRACE)}
    assert found.keys() == {job_id for state, job_id in ids.items() if state.base == "expired"}
    for state, job_id in ids.items():
        if state.base == "expired":
            orphan, row = found[job_id], image(job_id)
            assert orphan.cancel == (state.request != "none"), state
            assert (orphan.verdict, orphan.owner, orphan.epoch) == (state.verdict, "worker-me", 3)
            assert (orphan.kind, orphan.tenant, orphan.organization) == ("tests.work", "acme", "north")
            assert orphan.expires_at == row["lease_expires_at"]
            assert abs(orphan.overdue - 900) < 10


def test_the_grace_is_a_strict_border() -> None:
    """C010: within the grace nobody is an orphan, for the list and for the statement that acts."""
    inside = make("running", lease_expires_at=ago(GRACE - 5))
    outside = make("running", lease_expires_at=ago(GRACE + 5))
    orphans = {orphan.id: orphan for orphan in store.orphans(GRACE)}
    assert orphans.keys() == {outside}
    near = orphans[outside]._replace(id=inside)
    assert store.take_orphan(near, grace=GRACE, delay=0) is None
    assert store.take_orphan(near, grace=GRACE - 8, delay=0) is not None


def test_dead_leases_are_all_that_an_owner_held() -> None:
    ids = make_all(STATES)
    make("running", lease_owner="alive")
    found = {orphan.id: orphan for orphan in store.dead_leases("worker-me")}
    assert found.keys() == {job for state, job in ids.items() if state.base in ("running", "expired")}
    assert {orphan.cancel for orphan in found.values()} == {True, False}
    assert store.dead_leases("nobody") == []


def test_the_word_of_a_death_holds_for_that_owner_alone() -> None:
    """Only the owner that its supervisor has reaped, and only that epoch."""
    job_id = make("running", lease_owner="alive")
    orphan = store.dead_leases("alive")[0]
    assert store.take_orphan(orphan._replace(owner="dead"), grace=GRACE, delay=0, dead=True) is None
    assert store.park_orphan(
        orphan._replace(owner="dead"), grace=GRACE, code="c", message="m", dead=True
    ) is None  # fmt: skip
    assert image(job_id)["status"] == "running"


def test_the_manual_queue_is_left_alone() -> None:
    """Rows of receipts and managers belong to their owners and to people, not to the reconciler."""
    make_all(STATES, queue_name=MANUAL_QUEUE)
    assert store.orphans(GRACE) == []
    assert store.cancelling() == []
    assert not store.unfinished(None, ["tests.work"])


def test_cancelling_is_what_nobody_works_on() -> None:
    """B120, B132, P24: held too; a lease, live or not, is its driver's or an orphan's and never fills the page."""
    ids = make_all(STATES)
    found = {waiting.id: waiting for waiting in store.cancelling()}
    assert found.keys() == {
        job_id
        for state, job_id in ids.items()
        if state.request in ("row", "both") and state.base in ("held", "pending", "retry")
    }
    assert all(abs(waiting.asked - 500) < 10 for waiting in found.values())
    assert {waiting.kind for waiting in found.values()} == {"tests.work"}


def test_a_sweep_can_be_of_one_tenant() -> None:
    """B119."""
    for state in (State("expired"), State("pending", request="row"), State("running", request="mail")):
        make(state), make(state, tenant_id="umbrella")
    for tenant, count in [(None, 2), ("umbrella", 1), ("acme", 1), ("", 0)]:
        assert len(store.orphans(GRACE, tenant=tenant)) == count
        assert len(store.cancelling(tenant=tenant)) == count
        assert len(store.mailed(tenant=tenant)) == count


def test_a_pause_defers_repair_but_no_cancel() -> None:
    """F10: orphans of paused work are neither shown nor taken; a request ends them all the same."""
    plain, asked, mailed = (make(State("expired", request=how)) for how in ("none", "row", "mail"))
    orphans = {orphan.id: orphan for orphan in store.orphans(GRACE)}
    store.pause(kind="tests.work", reason="r", actor="a")
    assert {orphan.id for orphan in store.orphans(GRACE)} == {asked, mailed}
    before = image(plain)
    assert store.take_orphan(orphans[plain], grace=GRACE, delay=0) is None
    assert store.park_orphan(orphans[plain], grace=GRACE, code="c", message="m") is None
    assert image(plain) == before
    assert store.cancel_orphan(orphans[asked], grace=GRACE) is not None
    assert store.cancel_orphan(orphans[mailed], grace=GRACE) is not None
    assert store.unpause(kind="tests.work") is True
    assert store.unpause(kind="tests.work") is False
    assert store.take_orphan(orphans[plain], grace=GRACE, delay=0) is not None


def test_mailed_is_every_live_job_with_a_letter() -> None:
    ids = make_all(STATES)
    assert set(store.mailed()) == {
        job_id
        for state, job_id in ids.items()
        if state.request in ("mail", "both")
        and state.base in ("held", "pending", "retry", "running", "expired")
    }


@pytest.mark.parametrize(
    ("state", "page"),
    [
        (State("expired"), lambda after: [orphan.id for orphan in store.orphans(GRACE, after)]),
        (State("pending", request="row"), lambda after: [waiting.id for waiting in store.cancelling(after)]),
        (State("running", request="mail"), store.mailed),
    ],
    ids=["orphans", "cancelling", "mailed"],
)
def test_pages_go_by_key(state: State, page: Callable[[UUID | None], list[UUID]]) -> None:
    """B132: rows that cannot be settled never hide those behind them."""
    ids = sorted(make(state) for _ in range(230))
    pages = [page(None)]
    while pages[-1]:
        pages.append(page(pages[-1][-1]))
    assert [len(one) for one in pages] == [100, 100, 30, 0]
    assert [job_id for one in pages for job_id in one] == ids


def test_a_repair_restates_what_it_was_shown() -> None:
    """B123, B127, P15, T3: a beat, a commit, a claim or a request in between wins."""
    between: dict[str, Callable[[UUID], object]] = {
        "beat": lambda job_id: execute(
            "UPDATE durable_jobs_job SET lease_expires_at = %s WHERE id = %s", ahead(9), job_id
        ),
        "yield": lambda job_id: store.yield_slice(store.Lease(job_id, "worker-me", 3, 9)),
        "retry": lambda job_id: store.release_lease(store.Lease(job_id, "worker-me", 3, 9), 0),
        "taken": lambda job_id: execute("UPDATE durable_jobs_job SET lease_epoch = 4 WHERE id = %s", job_id),
        "ended": lambda job_id: store.complete(store.Lease(job_id, "worker-me", 3, 9), None),
    }
    for what, happens in between.items():
        for request in ("none", "row"):
            make(State("expired", request=request))
            (orphan,) = store.orphans(GRACE)
            happens(orphan.id)
            before = image(orphan.id)
            assert store.take_orphan(orphan, grace=GRACE, delay=0) is None, what
            assert store.park_orphan(orphan, grace=GRACE, code="c", message="m") is None, what
            assert store.cancel_orphan(orphan, grace=GRACE) is None, what
            assert image(orphan.id) == before
            execute("DELETE FROM durable_jobs_job")


@pytest.mark.parametrize("how", ["row", "mail"])
def test_a_request_that_came_in_between_is_not_parked_over(how: str) -> None:
    """B102, T11: seen without a request, asked to stop before the repair acts."""
    make("expired")
    (orphan,) = store.orphans(GRACE)
    assert not orphan.cancel
    if how == "row":
        assert store.request_cancel(orphan.id, scope=None) == "stamped"
    else:
        post_letter(orphan.id)
    assert store.take_orphan(orphan, grace=GRACE, delay=0) is None
    assert store.park_orphan(orphan, grace=GRACE, code="c", message="m") is None
    job = store.cancel_orphan(orphan, grace=GRACE)
    assert job is not None and job.status == "cancelled"


@pytest.mark.parametrize("statuses", [["completed"], ["failed", "cancelled"], ["running", "pending", "held"]])
def test_only_what_ended_is_pruned(statuses: list[str]) -> None:
    """History is deleted when a person asks: what ended long enough ago, its events and letters with it."""
    ids = make_all(STATES)
    recent = make("completed", finished_at=ago(60))
    for job_id in ids.values():
        job = store.get(job_id)
        assert job is not None
        store.add_event(job, "e")
    before = stored()
    pruned = store.prune_batch(
        ended_before=ago(300), statuses=statuses, after=(ago(9e6), UUID(int=0)), batch=500, budget=10**9
    )
    gone = {job.id for job in pruned}
    assert gone == {
        job_id for state, job_id in ids.items() if before[job_id][0][3].strip("'") in statuses
        and state.base in ("completed", "failed", "parked", "cancelled")
    }  # fmt: skip
    events = store.prune_events(gone, 500)
    assert {event.job_id for event in events} == gone
    assert stored() == {job_id: rows for job_id, rows in before.items() if job_id not in gone}
    assert recent not in gone


def test_workers_come_and_go() -> None:
    """One row a process, for the screens."""
    store.worker_started("w1", host="h", pid=7, queues=["a"], kinds=["k"], concurrency=4)
    store.worker_started("w2", host="h", pid=8, queues=[], kinds=[], concurrency=1)
    execute("UPDATE durable_jobs_worker SET beat_at = %s", ago(600))
    assert store.worker_beat("w1") is True
    assert store.worker_beat("w3") is False
    beat = WorkerProcess.objects.get(owner="w1")
    assert (beat.pid, beat.concurrency, beat.queues, beat.kinds) == (7, 4, '["a"]', '["k"]')
    assert abs(beat.beat_at - ago(0)) < timedelta(seconds=5)
    store.worker_started("w1", host="h", pid=7, queues=["a"], kinds=["k"], concurrency=4)
    store.forget_workers(300)
    assert list(WorkerProcess.objects.values_list("owner", flat=True)) == ["w1"]
    store.worker_stopped("w1")
    store.worker_stopped("w1")
    assert not WorkerProcess.objects.exists()


def test_history_is_appended() -> None:
    """What an event says is kept whole, with scope, epoch and seq of the moment."""
    job = store.get(make("running"))
    assert job is not None
    store.add_event(
        job, "failed", owner="w", actor="Ann", actor_id="7", reason="why", operation_id="op", code="E1",
        error_type="builtins.OSError", message="no \U0001f980", traceback="…", data={"was": [1, None, "ß"]},
    )  # fmt: skip
    store.add_event(job, "parked")
    first, second = job.events.order_by("id")
    assert (first.kind, first.tenant_id, first.organization_id) == ("tests.work", "acme", "north")
    assert (first.epoch, first.seq, first.data) == (3, 4, {"was": [1, None, "ß"]})
    assert (first.actor, first.actor_id, first.operation_id) == ("Ann", "7", "op")
    assert (second.event, second.data, second.reason) == ("parked", None, "")
    assert store.get(uuid7()) is None
