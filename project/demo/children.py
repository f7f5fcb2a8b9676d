"""Child processes that end with the command that started them, however it ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Any, Final

from django.conf import settings

PARENT: Final = "DEMO_PARENT"
PATIENCE: Final = 10.0
"""Seconds that a child has for its own end before it is killed."""


class Children:
    """Starts management commands and, at the end of its block, ends those that still run."""

    def __init__(self) -> None:
        self._started: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> Children:
        return self

    def __exit__(self, *exception: Any) -> None:
        self.end()

    def start(
        self,
        *arguments: str,
        environment: Mapping[str, str] | None = None,
        log: Path | None = None,
        quiet: bool = False,
    ) -> subprocess.Popen[bytes]:
        """Start `manage.py` with these arguments.

        Its output goes to the file `log`, or where ours goes; with `quiet` only its errors go there.
        """
        output = log.open("wb") if log else None
        try:
            child = subprocess.Popen(
                [sys.executable, str(settings.BASE_DIR / "manage.py"), *arguments],
                cwd=settings.BASE_DIR,
                env={**os.environ, **(environment or {}), PARENT: str(os.getpid())},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL if quiet else output,
                stderr=subprocess.STDOUT if output else None,
                # A Ctrl-C at the terminal is for us: we end the children in our own order.
                start_new_session=True,
            )
        finally:
            if output:
                output.close()
        self._started.append(child)
        return child

    @property
    def running(self) -> list[int]:
        """The pids of the children that have not ended."""
        return [child.pid for child in self._started if child.poll() is None]

    def end(self) -> None:
        """Ask all to end, wait, and kill what is left."""
        left = [child for child in self._started if child.poll() is None]
        for child in left:
            child.terminate()
        deadline = time.monotonic() + PATIENCE
        for child in left:
            with suppress(subprocess.TimeoutExpired):
                child.wait(max(0.0, deadline - time.monotonic()))
        for child in left:
            if child.poll() is None:
                child.kill()
                child.wait()


@contextmanager
def ended_by_signals() -> Iterator[None]:
    """In this block SIGTERM and SIGHUP raise SystemExit, as Ctrl-C raises KeyboardInterrupt: blocks clean up."""

    def leave(number: int, frame: FrameType | None) -> None:
        raise SystemExit(128 + number)

    earlier = {number: signal.signal(number, leave) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in earlier.items():
            signal.signal(number, handler)


def follow_parent() -> None:
    """In a child: drain when the parent is gone, which could not say so if it was killed."""
    parent = os.environ.get(PARENT, "")
    if parent.isdigit():
        threading.Thread(target=_follow, args=[int(parent)], name="demo-parent", daemon=True).start()


def _follow(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(0.5)
    os.kill(os.getpid(), signal.SIGTERM)
