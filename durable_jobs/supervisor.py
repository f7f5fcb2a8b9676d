"""`runworker --processes N`: starts worker processes, and starts others in place of those that end.

Each one is a fresh interpreter with the command line of this process; nothing is forked that is connected. A
process tells its supervisor over a socket under which name it holds leases, and is told over it to drain; when
the supervisor is gone, the socket says so. A supervisor that has reaped a process knows what no lease can
tell: it is dead. So it repairs that process's jobs at once, in a thread of its own: the supervisor itself
waits for no database.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import heapq
import itertools
import logging
import os
import random
import selectors
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, MutableMapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final

from django.db import connections
from django.utils.autoreload import get_child_arguments, get_reloader

from durable_jobs import connection as own_connection
from durable_jobs import store, transports
from durable_jobs.conf import config
from durable_jobs.logs import tell
from durable_jobs.outage import Outage
from durable_jobs.reconciler import Reconciler
from durable_jobs.worker import (
    EXIT_DONE,
    EXIT_NO_DATABASE,
    EXIT_NO_THREAD,
    EXIT_SIGNAL,
    EXIT_STILL_RUNNING,
    SAME_SIGNAL_SECONDS,
    Worker,
    new_owner,
    signals_read,
)

logger = logging.getLogger("durable_jobs.supervisor")

EXIT_GAVE_UP: Final = 70
"""EX_SOFTWARE: processes ended again and again, or the first one never began to claim."""

VARIABLE: Final = "DURABLE_JOBS_SUPERVISED"
"""In the environment of a process: the descriptor of its socket, and its supervisor's process id."""

HEALTHY_SECONDS: Final = 60.0
"""A process that has lived for so long has not ended quickly: the count and the delay begin anew."""
QUICK_ENDS: Final = 8
"""So many quick ends in a row of one place, about a minute with the delays, are the last."""
LONGEST_DELAY: Final = 30.0
LONGEST_DELAY_RELOADING: Final = 2.0
KILL_AFTER: Final = 3.0
"""Seconds beyond the drain timeout; a process leaves by itself before, unless it is stuck."""
LOOK_SECONDS: Final = 0.5
REPAIR_AT: Final = (0.0, 0.1, 0.4, 1.0, 3.0)
"""Seconds after a process's end. The server may still be at its last statement: that one is repaired, too."""
LAST_LOOK_SECONDS: Final = 120.0
FINISH_SECONDS: Final = 3.0

PR_SET_PDEATHSIG: Final = 1


def delay_after(quick_ends: int) -> float:
    """Seconds until the next start after so many quick ends in a row (before jitter): 0, 1, 2, … 30."""
    return 0.0 if quick_ends < 2 else min(LONGEST_DELAY, 2.0 ** min(quick_ends - 2, 16))


@dataclass(eq=False)
class Child:
    """One started process."""

    process: subprocess.Popen[bytes]
    line: socket.socket
    started_at: float
    owner: str = ""
    ready: bool = False
    killed: str = ""
    """Why the supervisor itself has ended it."""
    received: bytearray = field(default_factory=bytearray)

    def listen(self) -> bool:
        """Read what it has told; False when its end of the socket is closed."""
        while True:
            try:
                read = self.line.recv(4096)
            except BlockingIOError:
                return True
            except OSError:
                return False
            if not read:
                return False
            self.received += read
            *lines, rest = self.received.split(b"\n")
            self.received = bytearray(rest)
            for told in lines:
                word, _, rest = told.partition(b" ")
                if word == b"owner":
                    self.owner = rest.decode(errors="replace")
                self.ready = self.ready or word == b"ready"

    def drain(self) -> None:
        """Ask it to drain, over the socket: a signal might be its second one, and end it at once."""
        with contextlib.suppress(OSError):
            if self.ready:
                self.line.sendall(b"drain\n")
            else:
                self.process.terminate()

    def kill(self, why: str) -> None:
        self.killed = self.killed or why
        self.process.kill()


@dataclass(eq=False)
class Place:
    """One of the N processes, whoever fills it now."""

    number: int
    child: Child | None = None
    quick_ends: int = 0
    start_at: float = 0.0
    done: bool = False


class Supervisor:
    """Keeps `processes` workers running until it is stopped. `run` it once, in the main thread.

    With `until_idle` a process that ends 0 is not replaced; with `reloading` every one is, without a limit.
    """

    def __init__(
        self,
        processes: int,
        *,
        drain_timeout: float | None = None,
        until_idle: bool = False,
        reloading: bool = False,
    ) -> None:
        self.drain_timeout = config.DRAIN_TIMEOUT if drain_timeout is None else drain_timeout
        self.until_idle, self.reloading = until_idle, reloading
        self.repairs = Repairs()
        self._command = get_child_arguments()
        self._places = [Place(number) for number in range(1, processes + 1)]
        self._selector = selectors.DefaultSelector()
        self._proved = False
        """One process has begun to claim: what ends later does not fail for what fails always."""
        self._draining_since: float | None = None
        self._signalled_at: float | None = None
        self._code = EXIT_DONE

    def run(self) -> int:
        """Supervise until stopped, idle (`until_idle`) or hopeless; answers the exit code.

        0: every process drained. 1: some slices still ran when the drain timeout was over. 70: given up, as
        processes ended again and again. A first process that ends before it begins to claim ends it all with
        its own code: 3 tables are missing, 4 no database, 1 an error in the project. 128 plus the number of a
        second signal.
        """
        tell(logger, logging.INFO, "supervisor_started", processes=len(self._places), pid=os.getpid())
        disconnect()
        heard = signals_read(signal.SIGTERM, signal.SIGINT, signal.SIGCHLD)
        with heard as reader, reader, self._selector:
            reader.setblocking(False)
            self._selector.register(reader, selectors.EVENT_READ, self._take_signals)
            while not self._over():
                self._start_what_is_due()
                for key, _ in self._selector.select(self._pause()):
                    key.data(key.fileobj)
                self._reap()
                self._enforce_time_limits()
        self.repairs.finish()
        tell(logger, logging.INFO, "supervisor_stopped", code=self._code)
        return self._code

    def _over(self) -> bool:
        if any(place.child for place in self._places):
            return False
        return self._draining_since is not None or all(place.done for place in self._places)

    def _pause(self) -> float:
        if self._draining_since is not None or not self._proved:
            return LOOK_SECONDS
        now = time.monotonic()
        moments = [place.start_at - now for place in self._places if place.child is None and not place.done]
        return max(0.0, min([LOOK_SECONDS, *moments]))

    # --- starting

    def _start_what_is_due(self) -> None:
        """Until the first process has begun to claim it is the only one: what is wrong is said once."""
        if self._draining_since is not None:
            return
        now = time.monotonic()
        for place in self._places if self._proved or self.reloading else self._places[:1]:
            if place.child is None and not place.done and place.start_at <= now:
                place.child = self._start()

    def _start(self) -> Child:
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        with theirs:
            environment = {**os.environ, VARIABLE: f"{theirs.fileno()}:{os.getpid()}"}
            process = subprocess.Popen(
                self._command, env=environment, stdin=subprocess.DEVNULL, pass_fds=[theirs.fileno()]
            )
        child = Child(process, ours, time.monotonic())
        self._selector.register(ours, selectors.EVENT_READ, partial(self._listen, child))
        tell(logger, logging.INFO, "process_started", pid=process.pid)
        return child

    def _listen(self, child: Child, line: Any) -> None:
        if not child.listen():
            self._selector.unregister(line)
            line.close()
        if child.ready:
            self._proved = True

    # --- ends

    def _reap(self) -> None:
        for place in self._places:
            child = place.child
            if child is not None and child.process.poll() is not None:
                place.child = None
                self._part(child)
                self._decide(place, child)
        self._reap_strangers()

    def _part(self, child: Child) -> None:
        """Read its last words, and have what it held repaired."""
        if child.line.fileno() >= 0:
            self._listen(child, child.line)
        if child.line.fileno() >= 0:
            self._selector.unregister(child.line)
            child.line.close()
        code = child.process.returncode
        facts: dict[str, Any] = {"pid": child.process.pid, "code": code, "owner": child.owner}
        told = logging.INFO if code == EXIT_DONE else logging.WARNING
        tell(logger, told, "process_ended", child.killed, **facts)
        # One that has ended by itself before it began to claim holds nothing.
        if child.owner and code != EXIT_DONE and (child.ready or code < 0):
            self.repairs.add(child.owner)

    def _decide(self, place: Place, child: Child) -> None:
        """Whether its place is filled again, and when."""
        code = child.process.returncode
        if self._draining_since is not None:
            if child.killed or (child.ready and code != EXIT_DONE):
                self._code = self._code or EXIT_STILL_RUNNING
            return
        if self.until_idle and code == EXIT_DONE:
            place.done = True
            return
        if not self._proved and not self.reloading:
            self._say(f"The first process {_ended(child)} before it began to claim: starting no others.")
            self._give_up(code if 0 < code < EXIT_SIGNAL else EXIT_GAVE_UP)
            return
        now = time.monotonic()
        if code == EXIT_NO_THREAD or (self.reloading and child.ready and code in (0, 1)):
            place.start_at = now
            return
        quick = now - child.started_at < HEALTHY_SECONDS
        place.quick_ends = place.quick_ends + 1 if quick else 1
        if code == EXIT_NO_DATABASE:
            # It worked before: an outage, whose end is worth waiting for.
            place.quick_ends = min(place.quick_ends, QUICK_ENDS - 2)
        if place.quick_ends >= QUICK_ENDS and not self.reloading:
            self._say(
                f"Giving up: {QUICK_ENDS} processes in a row have ended within {HEALTHY_SECONDS:.0f} s of their"
                f" start; the last one {_ended(child)}."
            )
            self._give_up(EXIT_GAVE_UP)
            return
        delay = delay_after(place.quick_ends)
        if self.reloading:
            delay = min(delay, LONGEST_DELAY_RELOADING)
        delay *= random.uniform(0.5, 1.0)
        place.start_at = now + delay
        if delay:
            self._say(
                f"Process {child.process.pid} {_ended(child)}; the next one starts in {delay:.1f} s"
                f" (quick end {place.quick_ends} of {QUICK_ENDS})."
            )

    def _reap_strangers(self) -> None:
        """As process 1 of a container: whatever lost its parent is this one's to reap."""
        if os.getpid() != 1:
            return
        own = {place.child.process.pid for place in self._places if place.child is not None}
        with contextlib.suppress(ChildProcessError):
            while found := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT):
                if found.si_pid in own:
                    return
                os.waitpid(found.si_pid, os.WNOHANG)

    def _give_up(self, code: int) -> None:
        self._code = code
        self._drain()

    # --- the drain

    def _drain(self) -> None:
        if self._draining_since is None:
            self._draining_since = time.monotonic()
            for place in self._places:
                if place.child is not None:
                    place.child.drain()

    def _enforce_time_limits(self) -> None:
        now = time.monotonic()
        for child in [place.child for place in self._places if place.child is not None]:
            if self._draining_since is not None:
                if now - self._draining_since > self.drain_timeout + KILL_AFTER and not child.killed:
                    self._say(f"Process {child.process.pid} does not end: killing it.")
                    child.kill("it did not end in time")
            elif not child.ready and now - child.started_at > config.START_TIMEOUT and not child.killed:
                limit = f"{config.START_TIMEOUT:g} s"
                self._say(f"Process {child.process.pid} has not begun to claim within {limit}: killing it.")
                child.kill(f"it did not begin to claim within {limit}")

    # --- signals and words

    def _take_signals(self, reader: Any) -> None:
        for number in reader.recv(4096):
            if number not in (signal.SIGTERM, signal.SIGINT):
                continue
            name, now = signal.Signals(number).name, time.monotonic()
            if self._signalled_at is None:
                self._signalled_at = now
                self._say(f"{name}: draining {self._living()} processes.")
                self._drain()
            elif now - self._signalled_at > SAME_SIGNAL_SECONDS:
                self._leave(number, name)

    def _leave(self, number: int, name: str) -> None:
        self._say(f"{name} again: leaving at once, {self._living()} processes are killed.")
        for place in self._places:
            if place.child is not None:
                place.child.kill("a second signal")
        logging.shutdown()
        os._exit(EXIT_SIGNAL + number)

    def _living(self) -> int:
        return sum(place.child is not None for place in self._places)

    def _say(self, text: str) -> None:
        with contextlib.suppress(OSError, ValueError):
            print(text, file=sys.stderr, flush=True)


def _ended(child: Child) -> str:
    code = child.process.returncode
    if child.killed:
        return f"was killed, as {child.killed}"
    if code < 0:
        return f"was ended by {signal.Signals(-code).name}"
    return f"ended with exit code {code}"


def disconnect() -> None:
    """Close every connection of this thread, and the pools with theirs: a supervisor holds none."""
    for connection in connections.all(initialized_only=True):
        connection.close()
        if hasattr(connection, "close_pool"):
            connection.close_pool()


# --- what a dead process held


@dataclass(order=True)
class Look:
    """When to look at what a dead process held; `number` is the place in REPAIR_AT."""

    at: float
    order: int
    owner: str = field(compare=False)
    number: int = field(compare=False)
    died_at: float = field(compare=False)


class Repairs:
    """Repairs what processes held that the supervisor has reaped, in a thread that begins with the first."""

    def __init__(self) -> None:
        self._looks: list[Look] = []
        self._order = itertools.count()
        self._changed = threading.Condition()
        self._finishing = False
        self._thread: threading.Thread | None = None
        self._outage = Outage("supervisor", longest=5.0)

    def add(self, owner: str) -> None:
        """This process has been reaped: its leases are nobody's."""
        now = time.monotonic()
        with self._changed:
            heapq.heappush(self._looks, Look(now, next(self._order), owner, 0, now))
            self._changed.notify()
            if self._thread is None:
                self._thread = threading.Thread(target=self._serve, name="durable-jobs-repairs", daemon=True)
                self._thread.start()

    def finish(self) -> None:
        """Look once more at what is left, and end."""
        with self._changed:
            self._finishing = True
            self._changed.notify()
        if self._thread is not None:
            self._thread.join(FINISH_SECONDS)

    def _serve(self) -> None:
        own_connection.own("supervisor")
        reconciler = Reconciler(new_owner(), published=lambda job: transports.current().publish(job))
        try:
            while (look := self._next()) is not None:
                again_at = self._repair(reconciler, look)
                if again_at is not None:
                    with self._changed:
                        look.at = again_at
                        heapq.heappush(self._looks, look)
        finally:
            own_connection.disown()

    def _next(self) -> Look | None:
        """The look that is due, when it is; None at the end."""
        with self._changed:
            while True:
                if not self._looks:
                    if self._finishing:
                        return None
                    own_connection.close()
                    # The cursor of a BEGIN that met a locked file is in a cycle with its error, and SQLite's file
                    # stays open as long as it is there: in an idle process, for ever.
                    gc.collect()
                    self._changed.wait()
                    continue
                wait = self._looks[0].at - time.monotonic()
                if wait <= 0 or self._finishing:
                    return heapq.heappop(self._looks)
                self._changed.wait(wait)

    def _repair(self, reconciler: Reconciler, look: Look) -> float | None:
        """Repair what there is; when to look again, or None."""
        try:
            report = reconciler.repair_dead(look.owner)
            if report.scanned:
                tell(logger, logging.INFO, "process_repaired", owner=look.owner, **vars(report))
            store.worker_stopped(look.owner)
            self._outage.over()
            pause = 1.0 if report.errors else 0.0
        except Exception as error:
            pause = self._outage.seen(error)
        if self._finishing:
            return None
        now = time.monotonic()
        if pause:
            # The reconcilers of all workers come to it as well, when its leases have run out.
            return now + pause if now - look.died_at < LAST_LOOK_SECONDS else None
        look.number += 1
        return look.died_at + REPAIR_AT[look.number] if look.number < len(REPAIR_AT) else None


# --- the other end of the socket


class Line:
    """What a supervised process has to its supervisor."""

    def __init__(self, line: socket.socket, supervisor: int) -> None:
        self._line, self._supervisor = line, supervisor

    @classmethod
    def of_this_process(cls, environment: MutableMapping[str, str] = os.environ) -> Line | None:
        """The line of this process, if a supervisor has started it."""
        # Taken away: what a step starts is no child of the supervisor.
        descriptor, _, supervisor = environment.pop(VARIABLE, "").partition(":")
        try:
            line = socket.socket(fileno=int(descriptor))
            line.set_inheritable(False)
            return cls(line, int(supervisor))
        except (ValueError, OSError):
            return None

    def attach(self, worker: Worker) -> None:
        """Tell under which name the worker claims, before it does, and let it drain when it is told to."""
        self._tell(f"owner {worker.owner}")
        threading.Thread(
            target=self._listen, args=[worker.stop], name="durable-jobs-supervised", daemon=True
        ).start()
        die_with_parent()
        if os.getppid() != self._supervisor:
            worker.stop()

    def ready(self) -> None:
        """Tell that the worker has begun."""
        self._tell("ready")

    def _tell(self, text: str) -> None:
        with contextlib.suppress(OSError):
            self._line.sendall(f"{text}\n".encode())

    def _listen(self, stop: Callable[[], None]) -> None:
        """Whatever comes, a word or the end of the supervisor, means to drain."""
        with contextlib.suppress(OSError):
            self._line.recv(1)
        stop()


def has_checked(options: Mapping[str, Any]) -> bool:
    """Whether the supervisor of this process has run the system checks on the same code."""
    return VARIABLE in os.environ and not options.get("reload")


def die_with_parent() -> None:
    """On Linux have this process told by SIGTERM when its parent has ended, however it did."""
    if sys.platform == "linux":
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, int(signal.SIGTERM), 0, 0, 0)


def drain_on_change(worker: Worker) -> None:
    """Watch the project's files as `runserver` does, and drain when one has changed."""

    def watch() -> None:
        reloader = get_reloader()
        try:
            reloader.run(threading.main_thread())
        except SystemExit:
            worker.stop()

    threading.Thread(target=watch, name="durable-jobs-reloader", daemon=True).start()
