"""Being told by Linux that somebody writes to a SQLite file, instead of asking the file again and again."""

from __future__ import annotations

import ctypes
import os
import select
import struct
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import lru_cache
from typing import Any, Final

# inotify(7).
_MODIFIED: Final = 0x2
_GONE: Final = 0x400 | 0x800 | 0x8000
_EVENT: Final = struct.Struct("iIII")

REST_SECONDS: Final = 0.05
"""After a write no other one is told of for so long."""
AGAIN_SECONDS: Final = 1.0
"""Until the file is looked for again when it was not there, or has been deleted."""


class FileWatch:
    """Calls `told` from a thread of its own when the write-ahead log of this SQLite file has been written to.

    A write is told as it is made: its commit may be seen some milliseconds later. Where the system or the file
    cannot be watched `is_watching` is False, and the file has to be asked.
    """

    def __init__(self, path: str, told: Callable[[], None]) -> None:
        self._log = os.fsencode(f"{path}-wal")
        self._told = told
        self._thread: threading.Thread | None = None
        self._ends, self._end = -1, -1
        self.is_watching = False

    def start(self) -> None:
        """Begin, where this is Linux."""
        if _library() is None:
            return
        self._ends, self._end = os.pipe2(os.O_CLOEXEC)
        self._thread = threading.Thread(target=self._serve, name="durable-jobs-watch", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End, and wait for that; more than once does nothing."""
        thread, self._thread = self._thread, None
        if thread is None:
            return
        os.write(self._end, b".")
        thread.join()
        os.close(self._end)
        os.close(self._ends)

    def _serve(self) -> None:
        while True:
            with suppress(OSError):
                self._watch()
            if self._is_asked_to_end(AGAIN_SECONDS):
                return

    def _is_asked_to_end(self, seconds: float) -> bool:
        return bool(_readable([self._ends], seconds))

    def _watch(self) -> None:
        """Until the file is deleted, or the end."""
        descriptor = _call("inotify_init1", os.O_CLOEXEC | os.O_NONBLOCK)
        try:
            _call("inotify_add_watch", descriptor, self._log, _MODIFIED | _GONE)
            self.is_watching = True
            while True:
                ready = _readable([descriptor, self._ends])
                if self._ends in ready or _is_gone(os.read(descriptor, 65_536)):
                    return
                self._told()
                if self._is_asked_to_end(REST_SECONDS):
                    return
        finally:
            self.is_watching = False
            os.close(descriptor)


def _readable(descriptors: Sequence[int], seconds: float | None = None) -> set[int]:
    """Those that can be read, as soon as one can; none after `seconds`. `select` would refuse numbers from 1,024."""
    poll = select.poll()
    for descriptor in descriptors:
        poll.register(descriptor, select.POLLIN)
    return {ready for ready, _ in poll.poll(None if seconds is None else seconds * 1000)}


def _is_gone(events: bytes) -> bool:
    at = 0
    while at < len(events):
        _, mask, _, length = _EVENT.unpack_from(events, at)
        if mask & _GONE:
            return True
        at += _EVENT.size + length
    return False


@lru_cache(maxsize=1)
def _library() -> Any:
    with suppress(OSError, TypeError, AttributeError):
        library = ctypes.CDLL(None, use_errno=True)
        if library.inotify_init1 and library.inotify_add_watch:
            return library
    return None


def _call(name: str, *arguments: Any) -> int:
    answer = getattr(_library(), name)(*arguments)
    if answer < 0:
        error = ctypes.get_errno()
        raise OSError(error, os.strerror(error), name)
    return int(answer)
