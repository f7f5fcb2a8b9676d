"""Finding and playing schedules: all of a scene's, some of them by chance, or the one that is named."""

from __future__ import annotations

import functools
import os
import random
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from tests.explorer.meeting import Step
from tests.explorer.stage import Choose, Nonsense, Run, Stage, first_ready

ALL: Final = os.environ.get("DURABLE_JOBS_EXPLORE") == "1"
"""Every schedule (`make explore`), not a few of each scene (`make test`)."""
MOST: Final = int(os.environ.get("DURABLE_JOBS_EXPLORE_MOST", 0)) or None
"""With it at most so many schedules of a scene."""
ENOUGH: Final = 5
"""Broken scenes after which no more are played."""
FEW_CHANGES: Final = 0.15
"""Most of what goes wrong goes wrong with one or two changes at the wrong place."""
REPLAY: Final = os.environ.get("DURABLE_JOBS_SCHEDULE", "")
"""One schedule to be played again, as a failure has named it: `a slice and a cancel: 0 1 1 0`."""

NEVER_WAIT: Final = frozenset(
    [
        "claim",
        "claim_next",
        "claim_limited",
        "beat_many",
        "take_orphan",
        "park_orphan",
        "cancel_orphan",
        "request_cancel",
        "cancel_waiting",
        "fold_cancel",
        "settle",
        "bump_mirror",
        "prune_batch",
        "still_claimable",
    ]
)
"""Statements that pass over a locked row: whoever takes a job from somebody, or looks after many, waits for none."""

Programs = Sequence[Sequence[Callable[[], Any]]]
Begin = Callable[[], tuple[Programs, Callable[[Run], None]]]


@dataclass(frozen=True)
class Scene:
    """Something that can be played again and again: `begin` sets up the rows, and gives programs and a check."""

    name: str
    begin: Begin


class Broken(AssertionError):
    """A schedule after which something does not hold."""

    def __init__(self, scene: Scene, run: Run, error: AssertionError) -> None:
        self.scene, self.choices = scene, run.choices
        steps = "\n".join(f"    {line:.160}" for line in run.trace)
        schedule = " ".join(map(str, run.choices))
        super().__init__(
            f"{scene.name}: {error}\n  answers: {run.answers}\n  the schedule:\n{steps}\n"
            f"  to play it again: DURABLE_JOBS_SCHEDULE='{scene.name}: {schedule}' make explore"
        )


@dataclass
class Tally:
    """What has been played, for the summary."""

    what: str
    scenes: int = 0
    schedules: int = 0
    stand_for: int = 0
    """The schedules of which these are all that differ in more than the order of steps that cannot meet."""
    repeats: int = 0
    statements: int = 0
    waited: int = 0
    """Schedules in which somebody had to wait."""
    waits: Counter[str] = field(default_factory=Counter)
    """How often a statement waited."""
    seconds: float = 0.0

    def add(self, run: Run) -> None:
        self.schedules += 1
        self.repeats += run.repeats
        if ALL and MOST is None and not run.repeats:
            self.stand_for += orders(run.steps)
        self.statements += len(run.choices)
        self.waited += bool(run.blocked)
        self.waits.update(wait.rpartition(" <- ")[0] for wait in run.blocked)

    def lines(self) -> Iterator[str]:
        yield (
            f"  {self.what}: {self.schedules:,} schedules of {self.scenes:,} scenes, {self.statements:,} steps,"
            f" {self.seconds:.0f} s"
        )
        if self.stand_for:
            yield (
                f"    they stand for {self.stand_for:,}, the rest of which swaps only steps that cannot meet"
                f" ({self.repeats:,} repeated another one)"
            )
        yield f"    {self.schedules - self.waited:,} in which nobody waited, {self.waited:,} in which somebody did:"
        for statement, times in self.waits.most_common():
            yield f"      {times:7,} × {statement}"


tallies: list[Tally] = []


def play(stage: Stage, scene: Scene, choose: Choose) -> Run:
    """One schedule; raises `Broken` when something does not hold after it."""
    programs, check = scene.begin()
    try:
        run = stage.play(programs, choose)
    except Nonsense as error:
        raise Broken(scene, error.run, error) from error
    try:
        for error in run.errors:
            assert error is None, f"raised {error!r}"
        for wait in run.blocked:
            assert wait.rpartition(" <- ")[0] not in NEVER_WAIT, f"waited: {wait}"
        check(run)
    except AssertionError as error:
        raise Broken(scene, run, error) from (next(filter(None, run.errors), None) or error)
    return run


@dataclass
class _Place:
    """A choice on the way of the last run: who could go on, and who has been let go there by some run."""

    ready: list[int]
    wanted: set[int] = field(default_factory=set)
    """Who is to be let go here, because it can make a difference."""
    tried: dict[int, Step] = field(default_factory=dict)
    asleep: dict[int, Step] = field(default_factory=dict)
    """Who was let go before, at an earlier place, and has met nobody since: that was played already."""

    def next(self) -> int | None:
        return min(self.wanted - self.tried.keys() - self.asleep.keys(), default=None)


def every_schedule(stage: Stage, scene: Scene) -> Iterator[Run]:
    """Depth first, one schedule for all those that differ only in the order of steps that cannot meet.

    After each run, wherever two steps met and the later one could have come first, that is tried, too (dynamic
    partial-order reduction by source sets, with sleep sets: Abdulla et al., "Optimal dynamic partial order
    reduction", 2014).
    """
    path: list[_Place] = []
    prefix: list[int] = []
    while True:
        run = play(stage, scene, functools.partial(_go_on, path, prefix))
        run.repeats = len(path) < len(run.steps)
        for place, step in zip(path, run.steps, strict=False):
            place.tried[step.actor] = step
        _want_reversals(path, run)
        yield run
        while path and path[-1].next() is None:
            path.pop()
        if not path:
            return
        following = path[-1].next()
        assert following is not None
        prefix = [*run.choices[: len(path) - 1], following]


def all_orders(stage: Stage, scene: Scene) -> Iterator[Run]:
    """Every schedule, one by one."""
    pending: list[list[int]] = [[]]
    while pending:
        prefix = pending.pop()
        run = play(stage, scene, first_ready(prefix))
        yield run
        for place in range(len(prefix), len(run.choices)):
            others = (other for other in run.ready[place] if other != run.choices[place])
            pending.extend([*run.choices[:place], other] for other in others)


def _go_on(path: list[_Place], prefix: Sequence[int], run: Run, ready: list[int]) -> int:
    """Along the prefix, then on with whoever does not repeat what was played."""
    at = len(run.choices)
    if at < len(prefix):
        assert path[at].ready == ready, f"the same choices gave another run: {run.trace}"
        return prefix[at]
    if len(path) < at:
        return ready[0]
    asleep: dict[int, Step] = {}
    if at:
        before, step = path[-1], run.steps[-1]
        asleep = {
            number: slept
            for number, slept in (before.asleep | before.tried).items()
            if number != step.actor and not slept.meets(step)
        }
    awake = [number for number in ready if number not in asleep]
    if not awake:
        return ready[0]
    path.append(_Place(ready, {awake[0]}, asleep=asleep))
    return awake[0]


def _want_reversals(path: Sequence[_Place], run: Run) -> None:
    order = Order(run.steps[: len(path)])
    for later, event in enumerate(order.events):
        for earlier in range(later):
            if event.actor == order.events[earlier].actor or not order.at_once(earlier, later):
                continue
            _want(path[order.places[earlier]], order, earlier, later)


def _want(place: _Place, order: Order, earlier: int, later: int) -> None:
    """Let somebody go on here with whom the later of the two comes before the earlier."""
    free = [at for at in range(earlier + 1, later) if not order.after[at] >> earlier & 1] + [later]
    first = {
        order.events[at].actor
        for at in free
        if not any(order.after[at] >> other & 1 for other in free if other < at)
    }
    can = first & set(place.ready)
    if not can:
        place.wanted |= set(place.ready)
    elif not can & (place.wanted | place.asleep.keys()):
        place.wanted.add(min(can))


class Order:
    """What came after what, in every order that gives the same run."""

    def __init__(self, steps: Sequence[Step]) -> None:
        self.events = [event for step in steps for event in step.events]
        self.places = [place for place, step in enumerate(steps) for _ in step.events]
        self.begins = [event is step.own for step in steps for event in step.events]
        """False: it was freed by the one before it, and was not chosen."""
        self.after: list[int] = []
        """For each event the earlier ones that it comes after, as bits."""
        for at, event in enumerate(self.events):
            bits = 0
            for before in range(at - 1, -1, -1):
                frees = not self.begins[at] and self.places[before] == self.places[at] and self.begins[before]
                if not bits >> before & 1 and (frees or event.meets(self.events[before])):
                    bits |= 1 << before | self.after[before]
            self.after.append(bits)

    def at_once(self, earlier: int, later: int) -> bool:
        """The two meet, and nothing is between them that came after the one and before the other."""
        return bool(self.after[later] >> earlier & 1) and not any(
            self.after[later] >> between & 1 and self.after[between] >> earlier & 1
            for between in range(earlier + 1, later)
        )


def orders(steps: Sequence[Step]) -> int:
    """How many schedules this one stands for: the orders of its steps in which those that meet keep theirs."""
    order = Order(steps)
    after = [0] * len(steps)
    for at, bits in enumerate(order.after):
        for before in range(at):
            if bits >> before & 1 and order.places[before] != order.places[at]:
                after[order.places[at]] |= 1 << order.places[before]
    lines = [
        [at for at, step in enumerate(steps) if step.actor == actor]
        for actor in {step.actor for step in steps}
    ]
    ways = {0: 1}
    for _ in steps:
        following: Counter[int] = Counter()
        for done, number in ways.items():
            for line in lines:
                at = next((at for at in line if not done >> at & 1), None)
                if at is not None and after[at] & ~done == 0:
                    following[done | 1 << at] += number
        ways = following
    [number] = ways.values()
    return number


def some_schedules(stage: Stage, scene: Scene, most: int) -> Iterator[Run]:
    """By chance, the same ones each time: in turn with few changes of the actor, and with many."""
    chance = random.Random(scene.name)
    for number in range(most):
        yield play(stage, scene, _walk(chance, 1.0 if number % 2 else FEW_CHANGES))


def _walk(chance: random.Random, changes: float) -> Choose:
    """Let one actor go on, and another one from now on with this probability at each step."""
    now = -1

    def choose(run: Run, ready: list[int]) -> int:
        nonlocal now
        if now not in ready or chance.random() < changes:
            now = chance.choice(ready)
        return now

    return choose


def explore(stage: Stage, scenes: Sequence[Scene], what: str, few: int) -> Tally:
    """Play the scenes: all schedules, or `few` of each; raises what broke."""
    tally, begun, broken = Tally(what), time.monotonic(), []
    tallies.append(tally)
    for scene in scenes:
        tally.scenes += 1
        if ALL and MOST is None:
            runs = every_schedule(stage, scene)
        else:
            runs = some_schedules(stage, scene, (MOST or few) if ALL else few)
        try:
            for run in runs:
                tally.add(run)
        except Broken as error:
            broken.append(error)
            if len(broken) == ENOUGH:
                break
    tally.seconds = time.monotonic() - begun
    if broken:
        raise AssertionError(
            f"{len(broken)} of {tally.scenes} scenes broke.\n\n" + "\n\n".join(map(str, broken))
        ) from broken[0]
    return tally


def replay(stage: Stage, scenes: Sequence[Scene]) -> None:
    """Play the schedule that the environment names."""
    name, _, schedule = REPLAY.rpartition(":")
    [scene] = [scene for scene in scenes if scene.name == name.strip()]
    run = play(stage, scene, first_ready([int(number) for number in schedule.split()]))
    print("\n".join(run.trace))
