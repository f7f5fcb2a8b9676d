"""Short scenes with the real actors above the store: slices, reconcilers, operators, keepers, on one or two jobs."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

from django.db import transaction

from durable_jobs import database, runner, service, store
from durable_jobs.exceptions import Refusal, TerminalError
from durable_jobs.kinds import Done, Kind, Retry, Yield
from durable_jobs.models import Job, Scope
from durable_jobs.reconciler import Pass, Reconciler
from durable_jobs.store import Lease, Probe
from tests.explorer.explore import Begin, Programs, Scene
from tests.explorer.stage import Run
from tests.explorer.world import Left, World, left_behind
from tests.models import Shipment
from tests.store.rows import ME, State, execute

AGREES: Final = {"completed": "arrived", "failed": "lost", "cancelled": "stopped"}
OPEN: Final = ("queued", "moving")


class Ship(Kind):
    """Two fenced batches, each one more move of the shipment; the job's end is the shipment's."""

    name = "explorer.ship"
    queue = "explorer"
    orphan_policy = "redrive"
    lease_seconds = 60
    slice_seconds = 30
    max_orphanings = 9
    retry = Retry(failures=9, first_delay=0, longest_delay=0)

    def step(self, ctx: runner.SliceContext) -> Any:
        for at in range((ctx.checkpoint or 0) + 1, 2):
            with ctx.fenced():
                ctx.save_checkpoint(at)
                move(ctx.job.subject_id)
        return self.answer()

    def answer(self) -> Any:
        return Done()

    def on_transition(self, job: Job) -> int:
        return Shipment.objects.filter(pk=job.subject_id).update(status=AGREES[job.status])

    def on_redrive(self, job: Job) -> int:
        return Shipment.objects.filter(pk=job.subject_id).update(status="queued")


class Yielding(Ship):
    name = "explorer.yields"

    def answer(self) -> Any:
        return Yield()


class Failing(Ship):
    name = "explorer.fails"

    def answer(self) -> Any:
        raise TerminalError("it leaks")


class Parking(Ship):
    name = "explorer.parks"
    orphan_policy = "park"


KINDS: Final = (Ship, Yielding, Failing, Parking)


def move(shipment: str | None) -> None:
    execute(
        "UPDATE tests_shipment SET note = note || '+', status = 'moving' WHERE id = %s", int(shipment or 0)
    )


@dataclass(frozen=True)
class Script:
    """Who does what on which rows; `check` looks at what the general rules do not know."""

    name: str
    states: dict[str, State]
    cast: Sequence[Callable[[World], Any]]
    kind: str = "explorer.ship"
    same_lock: bool = False
    check: Callable[[Left, Run], None] | None = None


# --- the cast: each makes an actor's program for one world


def tell(act: Callable[[], Any]) -> str:
    """The act's answer, or its refusal, in a word."""
    try:
        answer = act()
    except Refusal as refusal:
        return str(refusal.code)
    if isinstance(answer, Job):
        return str(answer.status)
    return str(answer)


def works(world: World, name: str = "job", owner: str = ME) -> Any:
    """The owner's slice, which was claimed before: two fences, and its end."""
    job = store.get(world.rows[name]["id"])
    assert job is not None
    return [lambda: runner.run_slice(job, owner=owner).outcome.value]


def claims_and_works(world: World, owner: str = "rival") -> Any:
    row = world.rows["job"]
    probe = Probe(row["queue_name"], row["kind"], row["priority"], None, 60.0)

    def act() -> str:
        claimed = store.claim_next(owner, 1, [probe])
        if not claimed:
            return "nothing"
        return runner.run_slice(claimed[0].job, owner=owner).outcome.value

    return [act]


def claims(world: World, owner: str = "rival") -> Any:
    row = world.rows["job"]
    probe = Probe(row["queue_name"], row["kind"], row["priority"], None, 60.0)
    return [lambda: len(store.claim_next(owner, 1, [probe]))]


def is_delivered(world: World, owner: str = "consumer") -> Any:
    row = world.rows["job"]
    return [lambda: tell(lambda: store.claim(row["id"], row["continuation_seq"], row["redrives"], owner, 60))]


def repairs(world: World, owner: str = "mender") -> Any:
    """A reconciler that has seen the orphan before, long enough ago."""
    clock = [0.0]
    reconciler = Reconciler(owner, clock=lambda: clock[0])
    # Its own row on the screen is nothing that the others could meet.
    reconciler._begin = lambda this: None  # type: ignore[method-assign]
    reconciler._forgot_at = 0.0
    reconciler._repair_orphans(Pass(0.0), 100, world.tenant)
    clock[0] = 25.0

    def act() -> str:
        report = reconciler.tick(tenant=world.tenant)
        assert report.errors == 0
        return f"{report.redriven} redriven, {report.parked} parked, {report.cancelled} cancelled"

    return [act]


def reaps(world: World) -> Any:
    """A supervisor, whose child is known to be dead."""
    # It looks for whatever the child had, and so would find the rows of earlier runs.
    execute(
        "UPDATE durable_jobs_job SET lease_owner = 'of an earlier run' WHERE status = 'running' AND lease_owner = %s"
        " AND tenant_id <> %s",
        world.rows["job"]["lease_owner"] or ME, world.tenant,
    )  # fmt: skip
    reconciler = Reconciler("supervisor", clock=lambda: 0.0)
    return [lambda: str(reconciler.repair_dead(world.rows["job"]["lease_owner"] or ME).redriven)]


def cancels(world: World, name: str = "job") -> Any:
    row = world.rows[name]
    return [lambda: tell(lambda: service.cancel(row["id"], actor="anna", scope=scope(world)))]


def redrives(world: World, name: str = "job") -> Any:
    row = world.rows[name]
    return [lambda: tell(lambda: service.redrive(row["id"], actor="anna", force=True, scope=scope(world)))]


def releases(world: World, name: str = "job") -> Any:
    row = world.rows[name]
    return [lambda: tell(lambda: service.release(row["id"], actor="anna", scope=scope(world)))]


def settles(world: World) -> Any:
    row = world.rows["job"]
    return [
        lambda: tell(
            lambda: service.settle_without_hooks(row["id"], actor="anna", reason="gone", scope=scope(world))
        )
    ]


def starts(world: World) -> Any:
    """Another job for the same lock key."""
    row = world.rows["job"]
    subject = Shipment.objects.create(note="")

    def act() -> bool:
        return service.start(
            row["kind"], {}, subject=subject, lock_key=row["lock_key"], queue=row["queue_name"], scope=scope(world)
        ).created  # fmt: skip

    return [lambda: tell(act)]


def starts_once(world: World) -> Any:
    """The same key from two sides, each in a transaction with a row of its own."""
    row = world.rows["job"]
    subject = Shipment.objects.create(note="")

    def act() -> str:
        with database.transaction(database.alias()):
            started = service.start(
                row["kind"], {}, subject=subject, idempotency_key="once", queue=row["queue_name"],
                scope=scope(world),
            )  # fmt: skip
            return str(started.created)

    return [act]


def beats(world: World, owner: str = ME) -> Any:
    row = world.rows["job"]
    lease = Lease(row["id"], owner, row["lease_epoch"], 60.0)
    return [lambda: str(store.beat_many(owner, [lease])[row["id"]].renewed)]


def gives_back(world: World, owner: str = ME) -> Any:
    """The keeper, for a claim whose answer was lost."""
    row = world.rows["job"]
    return [lambda: tell(lambda: store.give_back(Lease(row["id"], owner, row["lease_epoch"], 60.0)))]


def pauses(world: World) -> Any:
    queue = world.rows["job"]["queue_name"]
    return [lambda: tell(lambda: service.pause(queue=queue, reason="a test", actor="anna"))]


def acts_on_both(act: Callable[[Any], Any], *names: str) -> Callable[[World], Any]:
    """A view that acts on several jobs in one transaction, in this order."""

    def made(world: World) -> Any:
        ids = [world.rows[name]["id"] for name in names]

        def all_of_them() -> str:
            with database.transaction(database.alias()):
                return " ".join(
                    tell(functools.partial(act, one, actor="anna", scope=scope(world))) for one in ids
                )

        return [all_of_them]

    made.__name__ = f"{act.__name__}_both"
    return made


def a_view_redrives(world: World) -> Any:
    """Joins the caller's own transaction, which writes a row of its own first."""
    row = world.rows["job"]

    def act() -> str:
        with transaction.atomic(using=database.alias()):
            execute("UPDATE tests_shipment SET note = note WHERE id = %s", int(row["subject_id"]))
            return tell(lambda: service.redrive(row["id"], actor="anna", force=True, scope=scope(world)))

    return [act]


def scope(world: World) -> Scope:
    row = next(iter(world.rows.values()))
    return Scope(row["tenant_id"], row["organization_id"])


# --- what else must be so


def one_made(left: Left, run: Run) -> None:
    assert [answer[0] for answer in run.answers].count("True") == 1 and len(left.new) == 1


REDRIVES: Final = 2
"""Of every row at first."""


def renewed_is_kept(left: Left, run: Run) -> None:
    """A lease that its owner has renewed meanwhile is no orphan any more: a commit renews it, and a beat."""
    job = left.rows["job"]
    taken = job["redrives"] > REDRIVES or job["parked_at"]
    assert not (taken and (job["checkpoint"] == "1" or run.answers[0] == ["True"])), "taken while alive"


def asked_is_ended(left: Left, run: Run) -> None:
    """A repair does not send a job that was asked to end into another round.

    A request that met the row of a repair under way is in the mailbox, for whoever comes next.
    """
    job = left.rows["job"]
    asked = job["requested"] and "job" not in left.by_mail
    assert job["status"] != "pending" or not asked, "goes on though it was asked to end"


def redriven_goes_on(left: Left, run: Run) -> None:
    """A redrive takes the cancel back: what was asked before it ends nothing after it."""
    assert run.answers[1] != ["pending"] or left.rows["job"]["status"] == "pending", (
        "ended by a request of before"
    )


WORK: Final = {works, claims_and_works}
TAKE: Final = {repairs, reaps, redrives, a_view_redrives}
"""Who ends a job that was claimed, and who may take one from its owner."""

PENDING, RUNNING, EXPIRED = State("pending"), State("running"), State("expired")
RETRY, FAILED, HELD = State("retry"), State("failed"), State("held")

SCRIPTS: Final = (
    Script("a slice and a cancel", {"job": RUNNING}, (works, cancels)),
    Script("a slice that yields and a cancel", {"job": RUNNING}, (works, cancels), "explorer.yields"),
    Script("a slice that fails and a cancel", {"job": RUNNING}, (works, cancels), "explorer.fails"),
    Script("a slice that fails and a redrive", {"job": RUNNING}, (works, redrives), "explorer.fails"),
    Script("a slice and its keeper", {"job": RUNNING}, (works, beats)),
    Script("a late slice and a reconciler", {"job": EXPIRED}, (works, repairs), check=renewed_is_kept),
    Script("a late slice and a reconciler that parks", {"job": EXPIRED}, (works, repairs), "explorer.parks",
           check=renewed_is_kept),
    Script("a late beat and a reconciler", {"job": EXPIRED}, (beats, repairs), check=renewed_is_kept),
    Script("a late slice and a redrive", {"job": EXPIRED}, (works, redrives), check=renewed_is_kept),
    Script("a late slice and its keeper's beat and a reaper", {"job": EXPIRED}, (beats, reaps, claims)),
    Script("a late slice, a redrive and a rival", {"job": EXPIRED}, (works, redrives, claims), check=renewed_is_kept),
    Script("a late slice, a redrive, and its own worker again", {"job": EXPIRED},
           (works, redrives, functools.partial(claims, owner=ME)), check=renewed_is_kept),
    Script("a killed slice that still writes, and its supervisor", {"job": RUNNING}, (works, reaps)),
    Script("two claims and a cancel", {"job": PENDING}, (claims, is_delivered, cancels)),
    Script("a claimed slice and a cancel", {"job": PENDING}, (claims_and_works, cancels)),
    Script("a claimed slice and a message", {"job": RETRY}, (claims_and_works, is_delivered)),
    Script("a redrive and a claim", {"job": RETRY}, (redrives, claims, cancels)),
    Script("two reconcilers", {"job": EXPIRED}, (repairs, repairs)),
    Script("two reconcilers that park", {"job": EXPIRED}, (repairs, repairs), "explorer.parks"),
    Script("two reconcilers that cancel", {"job": State("expired", request="mail")}, (repairs, repairs)),
    Script("a reconciler and a cancel", {"job": EXPIRED}, (repairs, cancels), check=asked_is_ended),
    Script("a reconciler and a redrive", {"job": EXPIRED}, (repairs, redrives)),
    Script("a reconciler and a pause", {"job": EXPIRED}, (repairs, pauses)),
    Script("a reconciler, a cancel that waits and a claim", {"job": State("retry", request="row")}, (repairs, claims)),
    Script("a reconciler, a cancel that waits and a redrive", {"job": State("retry", request="row")},
           (repairs, redrives), check=redriven_goes_on),
    Script("a lost claim given back, and a cancel", {"job": RUNNING}, (gives_back, cancels, claims)),
    Script("a settlement and a reconciler", {"job": State("retry", request="row")}, (settles, repairs)),
    Script("a settlement, a claim and a cancel", {"job": RETRY}, (settles, claims, cancels)),
    Script("two cancels", {"job": RETRY}, (cancels, cancels)),
    Script("a pause and two claims", {"job": PENDING}, (pauses, claims, is_delivered)),
    Script("a redrive and a start for one lock", {"job": FAILED}, (redrives, starts)),
    Script("a release and a start for one lock", {"job": HELD}, (releases, starts)),
    Script("two redrives for one lock", {"job": FAILED, "other": FAILED},
           (redrives, functools.partial(redrives, name="other")), same_lock=True),
    Script("a release and a redrive for one lock", {"job": HELD, "other": FAILED},
           (releases, functools.partial(redrives, name="other")), same_lock=True),
    Script("two starts with one key", {"job": State("completed")}, (starts_once, starts_once), check=one_made),
    Script("cancels and redrives in opposite order", {"job": RETRY, "other": RETRY},
           (acts_on_both(service.cancel, "job", "other"), acts_on_both(service.redrive, "other", "job"))),
    Script("cancels in opposite order, and a slice", {"job": RUNNING, "other": RETRY},
           (works, acts_on_both(service.cancel, "other", "job"))),
    Script("a view's redrive and a reconciler", {"job": EXPIRED}, (a_view_redrives, repairs)),
    Script("a view's redrive and a late slice", {"job": EXPIRED}, (a_view_redrives, works)),
)  # fmt: skip


def set_up(script: Script) -> World:
    """The rows of a script, each with a shipment that agrees."""
    world = World()
    for name, state in script.states.items():
        ended = {"completed": "arrived", "failed": "lost", "parked": "lost", "cancelled": "stopped"}
        shipment = Shipment.objects.create(status=ended.get(state.base, "queued"), note="")
        columns: dict[str, Any] = {"lock_key": f"lock of {world.number}"} if script.same_lock else {}
        row = world.add(
            name, state, queue_name=f"queue-{world.number}", kind=script.kind, subject_type="tests.shipment", subject_id=str(shipment.pk),
            checkpoint=None, checkpoint_at=None, redrives=REDRIVES, redrives_since_commit=0, consecutive_failures=0, **columns,
        )  # fmt: skip
        world.beside.append(("SELECT status, note FROM tests_shipment WHERE id = %s", int(row["subject_id"])))
    return world


def check(script: Script, world: World, run: Run) -> None:
    """What must be so after every schedule."""
    left = left_behind(world)
    for name, ((status, note),) in zip(world.rows, left.rest, strict=True):
        told, before = left.rows[name], world.rows[name]
        if told["domain_mirrored_at"]:
            assert status == AGREES[told["status"]], f"{name}: {told['status']} but {status}"
        elif told["status"] not in AGREES:
            assert status in OPEN, f"{name}: {told['status']} but {status}"
        assert len(note) == (1 if told["checkpoint"] == "1" else 0), f"{name}: applied {len(note)} times"
        grown = {column: told[column] - before[column] for column in ("attempts", "redrives", "lease_epoch")}
        assert grown["lease_epoch"] == grown["attempts"] + grown["redrives"], "an epoch for each"
        if grown["attempts"] and not grown["redrives"] and not WORK & set(script.cast):
            assert told["status"] == "running" and told["lease_owner"], "taken from who had claimed it"
    if not TAKE & set(script.cast):
        assert not any("lease_lost" in answers for answers in run.answers), "a lease lost to nobody"
    if script.check is not None:
        script.check(left, run)
    waits = [
        name
        for name, row in left.rows.items()
        if row["requested"] and row["status"] in ("held", "pending", "running") and not row["lease_owner"]
    ]
    if waits:
        Reconciler("the next").tick(tenant=world.tenant)
        after = left_behind(world).rows
        assert {after[name]["status"] for name in waits} == {"cancelled"}, (
            "the next pass leaves what was asked to end"
        )


def scenes() -> list[Scene]:
    return [Scene(script.name, _beginning(script)) for script in SCRIPTS]


def _beginning(script: Script) -> Begin:
    def begin() -> tuple[Programs, Callable[[Run], None]]:
        world = set_up(script)
        return [make(world) for make in script.cast], functools.partial(check, script, world)

    return begin
