"""A hop between clients and the PostgreSQL server, which can swallow an answer and cut that connection.

The server has then done what it was told, and the client never hears of it.
"""

from __future__ import annotations

import contextlib
import re
import socket
import threading
from collections.abc import Callable
from typing import Self
from urllib.parse import urlsplit

CHUNK = 65_536
Lost = Callable[[str, bytes], bool]


class Wire:
    """Passes bytes on between its own port on the loopback and the server of `url`, until the block ends."""

    def __init__(self, url: str) -> None:
        self._parts = urlsplit(url)
        self._lost: Lost | None = None
        self._cut = threading.Event()
        self._sockets: set[socket.socket] = set()
        self._guard = threading.Lock()

    def __enter__(self) -> Self:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._thread = threading.Thread(target=self._accept, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        with self._guard:
            left = list(self._sockets)
        for one in left:
            end(one)
        self._thread.join(5)

    @property
    def url(self) -> str:
        """The server's address by way of this hop."""
        credentials = self._parts.netloc.rpartition("@")[0]
        port = self._listener.getsockname()[1]
        return self._parts._replace(netloc=f"{credentials}@127.0.0.1:{port}").geturl()

    def lose(self, which: Lost) -> None:
        """Cut the first connection whose answer is one of those: ``which(application_name, bytes)``."""
        self._cut.clear()
        self._lost = which

    def wait(self, timeout: float = 20) -> None:
        """Return when an answer has been lost."""
        assert self._cut.wait(timeout), "no such answer came by"

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
                server = socket.create_connection((self._parts.hostname or "", self._parts.port or 5432))
            except OSError:
                return
            hop = Hop(self, client, server)
            with self._guard:
                self._sockets |= {client, server}
            for carry in (hop.carry_questions, hop.carry_answers):
                threading.Thread(target=carry, daemon=True).start()

    def _is_lost(self, name: str, answer: bytes) -> bool:
        with self._guard:
            if self._lost is None or not self._lost(name, answer):
                return False
            self._lost = None
        return True


class Hop:
    """One client's connection."""

    def __init__(self, wire: Wire, client: socket.socket, server: socket.socket) -> None:
        self._wire, self._client, self._server = wire, client, server
        self._name: str | None = None

    def carry_questions(self) -> None:
        with contextlib.suppress(OSError):
            while question := self._client.recv(CHUNK):
                if self._name is None and (found := re.search(rb"\0application_name\0([^\0]*)\0", question)):
                    self._name = found[1].decode()
                self._server.sendall(question)
        self._end()

    def carry_answers(self) -> None:
        lost = False
        with contextlib.suppress(OSError):
            while answer := self._server.recv(CHUNK):
                if lost := self._wire._is_lost(self._name or "", answer):
                    break
                self._client.sendall(answer)
        self._end()
        if lost:
            self._wire._cut.set()

    def _end(self) -> None:
        for one in (self._client, self._server):
            end(one)


def end(one: socket.socket) -> None:
    with contextlib.suppress(OSError):
        one.shutdown(socket.SHUT_RDWR)
    one.close()
