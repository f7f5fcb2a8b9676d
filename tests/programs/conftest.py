"""What the programs' tests share: a local HTTP server that a test scripts."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qsl, urlsplit

import pytest


@dataclass
class Answer:
    """What the server says: status, body, headers."""

    status: int = 200
    body: bytes = b"{}"
    headers: dict[str, str] = field(default_factory=dict)


@dataclass
class Asked:
    """What the server was asked."""

    query: dict[str, str]
    headers: dict[str, str]
    body: bytes


class Server:
    """A server on this machine; `answer` decides about each request, `requests` keeps them."""

    def __init__(self, answer: Callable[[Asked], Answer]) -> None:
        self.answer, self.requests = answer, list[Asked]()
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                length = int(self.headers.get("Content-Length", 0))
                query = dict(parse_qsl(urlsplit(self.path).query))
                asked = Asked(query, dict(self.headers), self.rfile.read(length))
                outer.requests.append(asked)
                answer = outer.answer(asked)
                self.send_response(answer.status)
                for name, value in answer.headers.items():
                    self.send_header(name, value)
                self.send_header("Content-Length", str(len(answer.body)))
                self.end_headers()
                self.wfile.write(answer.body)

            do_POST = do_GET

            def log_message(self, *arguments: Any) -> None:
                """Quiet: a test shows what it needs."""

        self._http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._http.server_port}/"
        self._thread = threading.Thread(target=self._http.serve_forever, args=[0.02], name="tests-server")
        self._thread.start()

    def close(self) -> None:
        self._http.shutdown()
        self._http.server_close()
        self._thread.join()


@pytest.fixture
def serve() -> Iterator[Callable[[Callable[[Asked], Answer]], Server]]:
    """Starts servers that answer as the given function says."""
    started: list[Server] = []

    def start(answer: Callable[[Asked], Answer]) -> Server:
        started.append(Server(answer))
        return started[-1]

    yield start
    for server in started:
        server.close()
