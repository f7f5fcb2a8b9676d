"""The soak's workers, and what is done to them."""

from __future__ import annotations

import os
import random
import re
import signal
import sqlite3
import threading
import time
from collections.abc import Callable
from contextlib import closing, suppress
from pathlib import Path
from uuid import UUID

from django.db import InterfaceError, OperationalError, connection, connections

from durable_jobs.models import LIVE, Job
from tests.processes import Process, Processes
from tests.soak.breaking import BREAK_VARIABLE
from tests.soak.checks import Findings
from tests.soak.kinds import LEASE_SECONDS

GRACE, TICK = 1.5, 1.0
SETTINGS = {"DISCOVER": ["soak.kinds"], "POLL": 0.1, "TICK": TICK, "GRACE": GRACE}
ENVIRONMENT = {"DJANGO_SETTINGS_MODULE": "tests.soak.settings"}

CREW = (("--concurrency", "4"), ("--concurrency", "4"), ("--concurrency", "3", "--processes", "2"))
"""Two workers by themselves and two under a supervisor, which repairs what it has reaped."""

DRAIN_SECONDS = 25.0
EXIT_CUT_OFF, EXIT_NO_DATABASE, EXIT_GAVE_UP = 1, 4, 70
LIFE_SECONDS = 4.0
"""How long a worker works before it is struck: repair takes two looks and a grace between them, and a machine on
which nobody lives so long repairs nothing."""
STRIKES = {"kill": 6, "stop": 3, "terminate": 1}
"""What is done to a worker, by weight."""
MOST_STOPPED = 2
LONGEST_STOP = 12.0
"""Seconds for which a worker stays stopped at most while nobody else runs what it held: a supervisor that is told to
end meanwhile must not lose its patience with it."""
STUCK_AFTER = 0.8
"""Seconds for which nobody gets SQLite's write lock before it is said that a stopped process holds it."""

NOTED = ("lease_lost", "slice_cut_off", "outcome_waits", "cancel_mirror_failed", "database_unavailable",
         "process_repaired", "worker_stopped", "fenced_block_long",
         "reconcile_sightings_void", "reconcile_pass_failed", "reconcile_cancel_failed", "reconcile_orphan_failed",
         "orphan_locked")  # fmt: skip
FORBIDDEN = ("slice_broke", "deadlock detected", "IntegrityError", "terminal_mirror_mismatch", "bad_outcome",
             "slice_left_running")  # fmt: skip


class Crew:
    """Keeps the workers running; `strike` does something to one of them."""

    def __init__(
        self, processes: Processes, findings: Findings, chance: random.Random, broken: str | None = None
    ) -> None:
        self._environment = {**ENVIRONMENT, **({BREAK_VARIABLE: broken} if broken else {})}
        self._processes, self._findings, self._random = processes, findings, chance
        self._places: list[Process] = []
        self._told: dict[int, str] = {}
        self._stopped: set[int] = set()
        self._seen_at_work: dict[int, float] = {}
        self._guard = threading.RLock()
        self._ended: list[Process] = []

    def start(self) -> None:
        self._places = [self._worker(arguments) for arguments in CREW]

    def keep(self) -> None:
        """Start another in place of each that has ended."""
        with self._guard:
            for number, process in enumerate(self._places):
                if not process.running:
                    self._judge(process)
                    self._places[number] = self._worker(CREW[number])

    def strike(self) -> None:
        """SIGKILL, SIGTERM, or SIGSTOP until another owner has what it held."""
        with self._guard:
            pid = self._victim()
            if pid is None:
                return
            how = self._random.choices(tuple(STRIKES), tuple(STRIKES.values()))[0]
            if how == "stop" and (len(self._stopped) >= MOST_STOPPED or self._is_draining(pid)):
                how = "kill"
            if how == "stop":
                self._stopped.add(pid)
                threading.Thread(target=self._stop_for_a_while, args=[pid], daemon=True).start()
                return
            self._told[pid] = how
            number = signal.SIGKILL if how == "kill" else signal.SIGTERM
            with suppress(ProcessLookupError):
                os.kill(pid, number)
                self._findings.count("SIGKILL" if how == "kill" else "SIGTERM")

    def end(self) -> None:
        """Drain all; each must leave in time, and by itself."""
        with self._guard:
            for process in self._places:
                self._told[process.pid] = "terminate"
                process.terminate()
            for process in self._places:
                try:
                    process.wait(DRAIN_SECONDS + 10)
                except AssertionError:
                    self._findings.violate("a worker does not leave", said=process.output[-2000:])
                    process.kill()
                else:
                    self._judge(process)

    def wake_all(self) -> None:
        for pid in list(self._stopped):
            self._stopped.discard(pid)
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)

    def read_logs(self) -> None:
        for process in self._ended:
            said = process.output
            for event in NOTED:
                self._findings.count(f"log {event}", said.count(f" {event} "))
            for words in FORBIDDEN:
                if words in said:
                    around = said[max(said.index(words) - 500, 0) : said.index(words) + 1500]
                    self._findings.violate(f"a worker says {words}", said=around)

    # --- inside ---

    def _worker(self, arguments: tuple[str, ...]) -> Process:
        process = self._processes.manage(
            "runworker",
            *arguments,
            f"--drain-timeout={DRAIN_SECONDS:g}",
            settings=SETTINGS,
            environment=self._environment,
        )
        self._ended.append(process)
        self._findings.count("workers started")
        return process

    def _judge(self, process: Process) -> None:
        """Whether it ended as what was done to it lets expect."""
        told, code = self._told.pop(process.pid, ""), process.popen.returncode
        if told == "kill" and code == -signal.SIGKILL:
            return
        if told == "terminate" and code in (0, -signal.SIGTERM):
            # By the signal itself where it had not yet got so far as to handle it.
            return
        drained = process.output.rpartition("SIGTERM: draining")[2]
        if (
            told == "terminate"
            and code == EXIT_CUT_OFF
            and re.search(r"process_ended pid=\d+ code=-9", drained)
        ):
            # A supervisor, one of whose processes was struck meanwhile: it says that a slice was cut off.
            self._findings.count("supervisors whose process was killed while they drained")
        elif code == EXIT_NO_DATABASE:
            self._findings.count("workers that met no database when they started")
        elif code == EXIT_GAVE_UP:
            self._findings.count("supervisors that gave up, their processes killed again and again")
        else:
            self._findings.violate("a worker ended", told=told, code=code, said=process.output[-2000:])

    def _victim(self) -> int | None:
        alone = [process for process in self._places if "--processes" not in process.popen.args]
        pids = [process.pid for process in alone if "worker_started" in process.output] * 4
        for process in self._places:
            if process not in alone and process.running:
                pids += [pid for pid in children(process.pid) if _is_at_work(pid)]
                # The supervisor itself, seldom: its processes then leave by themselves.
                if process.output.count("process_started") and self._random.random() < 0.2:
                    pids.append(process.pid)
        now = time.monotonic()
        for pid in pids:
            self._seen_at_work.setdefault(pid, now)
        pids = [
            pid
            for pid in pids
            if pid not in self._stopped
            and pid not in self._told
            and now - self._seen_at_work[pid] >= LIFE_SECONDS
        ]
        return self._random.choice(pids) if pids else None

    def _is_draining(self, pid: int) -> bool:
        """Whether its supervisor has been told to end."""
        return any(pid in children(process.pid) for process in self._places if process.pid in self._told)

    def _stop_for_a_while(self, pid: int) -> None:
        """Until somebody else runs what it held; then it goes on beside that one, and must not write."""
        until = time.monotonic() + LONGEST_STOP
        short = time.monotonic() + LEASE_SECONDS + GRACE + TICK + self._random.uniform(0.5, 2.5)
        try:
            os.kill(pid, signal.SIGSTOP)
            if connection.vendor == "sqlite" and _nobody_can_write():
                # It holds the file: everybody waits for it, and nobody can take anything over meanwhile.
                self._findings.count("SIGSTOP inside a write transaction of SQLite")
                self._findings.count(
                    "seconds in which nobody could write", round(short - time.monotonic(), 1)
                )
                time.sleep(max(short - time.monotonic(), 0))
            elif held := self._held_by(pid, until):
                self._findings.count("SIGSTOP past the lease")
                self._wait_for_another(pid, held, until)
            else:
                self._findings.count("SIGSTOP of a worker that held nothing")
            os.kill(pid, signal.SIGCONT)
        except ProcessLookupError:
            pass
        finally:
            self._stopped.discard(pid)
            connections.close_all()

    def _held_by(self, pid: int, until: float) -> dict[UUID, int]:
        while time.monotonic() < until and pid in self._stopped:
            try:
                held = Job.objects.filter(status="running", lease_owner__contains=f":{pid}:")
                return dict(held.values_list("id", "lease_epoch"))
            except (OperationalError, InterfaceError):
                connections.close_all()
                time.sleep(0.1)
        return {}

    def _wait_for_another(self, pid: int, held: dict[UUID, int], until: float) -> None:
        """Until a job of these is run by another owner, or none of them will be."""
        while time.monotonic() < until and pid in self._stopped:
            try:
                live = Job.objects.filter(id__in=held, status__in=LIVE)
                rows = live.values_list("id", "lease_epoch", "lease_owner")
                if any(owner and epoch > held[job_id] for job_id, epoch, owner in rows):
                    self._findings.count("SIGSTOP until another owner ran the job")
                    return
                if not rows:
                    return
            except (OperationalError, InterfaceError):
                connections.close_all()
            time.sleep(0.1)


def children(pid: int) -> list[int]:
    """The processes that this one has started, where the system says so in /proc."""
    try:
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:
        return []


def _is_at_work(pid: int) -> bool:
    """Whether a supervised process has connected to its database and so claims, or soon will."""
    with suppress(OSError):
        return len(os.listdir(f"/proc/{pid}/task")) > 4
    return False


def _nobody_can_write() -> bool:
    name = str(connection.settings_dict["NAME"])
    until = time.monotonic() + STUCK_AFTER
    with closing(sqlite3.connect(name, timeout=0, isolation_level=None)) as other:
        while time.monotonic() < until:
            try:
                other.execute("BEGIN IMMEDIATE")
                other.execute("ROLLBACK")
                return False
            except sqlite3.OperationalError:
                time.sleep(0.002)
    return True


class Actor(threading.Thread):
    """Does one thing again and again until it is told to stop."""

    def __init__(self, act: Callable[[], None], rest: float, chance: random.Random, stop: threading.Event):
        super().__init__(name=getattr(act, "__name__", "actor"), daemon=True)
        self._act, self._rest, self._random, self._halt = act, rest, chance, stop

    def run(self) -> None:
        while not self._halt.wait(self._random.uniform(0.5, 1.5) * self._rest):
            self._act()


def version() -> str:
    with connection.cursor() as cursor:
        if connection.vendor == "sqlite":
            return f"SQLite {sqlite3.sqlite_version}"
        cursor.execute("SHOW server_version")
        return "PostgreSQL " + re.split(r"\s", cursor.fetchone()[0])[0]
