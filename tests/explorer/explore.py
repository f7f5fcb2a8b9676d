"""Finding and playing schedules: all of a scene's, some of them by chance, or the one that is named."""

from __future__ import annotations

import os
import random
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from tests.explorer.stage import Nonsense, Run, Stage, first_ready

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
    statements: int = 0
    waited: int = 0
    """Schedules in which somebody had to wait."""
    waits: Counter[str] = field(default_factory=Counter)
    """How often a statement waited."""
    seconds: float = 0.0

    def add(self, run: Run) -> None:
        self.schedules += 1
        self.statements += len(run.choices)
        self.waited += bool(run.blocked)
        self.waits.update(wait.rpartition(" <- ")[0] for wait in run.blocked)

    def lines(self) -> Iterator[str]:
        yield (
            f"  {self.what}: {self.schedules:,} schedules of {self.scenes:,} scenes, {self.statements:,} steps,"
            f" {self.seconds:.0f} s"
        )
        yield f"    {self.schedules - self.waited:,} in which nobody waited, {self.waited:,} in which somebody did:"
        for statement, times in self.waits.most_common():
            yield f"      {times:7,} × {statement}"


tallies: list[Tally] = []


def play(stage: Stage, scene: Scene, choose: Callable[[int, list[int]], int]) -> Run:
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


def every_schedule(stage: Stage, scene: Scene) -> Iterator[Run]:
    """Depth first: each run shows where others would have branched off."""
    pending: list[list[int]] = [[]]
    while pending:
        prefix = pending.pop()
        run = play(stage, scene, first_ready(prefix))
        yield run
        pending.extend(run.alternatives(len(prefix)))


def some_schedules(stage: Stage, scene: Scene, most: int) -> Iterator[Run]:
    """By chance, the same ones each time: in turn with few changes of the actor, and with many."""
    chance = random.Random(scene.name)
    for number in range(most):
        yield play(stage, scene, _walk(chance, 1.0 if number % 2 else FEW_CHANGES))


def _walk(chance: random.Random, changes: float) -> Callable[[int, list[int]], int]:
    """Let one actor go on, and another one from now on with this probability at each step."""
    now = -1

    def choose(place: int, ready: list[int]) -> int:
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
