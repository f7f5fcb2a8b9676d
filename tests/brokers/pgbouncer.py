"""Debian's PgBouncer before the tests' PostgreSQL: transaction mode, three server connections, a port of its own."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import psycopg
from psycopg.rows import dict_row

from tests.brokers.broker import Guarded, require
from tests.postgres import UNPRIVILEGED_USER, free_port, wait_until

PROGRAM = "/usr/sbin/pgbouncer"
POOL_SIZE = 3

# Nothing resets a session between two clients: what one leaves behind, the next one meets.
CONFIGURATION = """
[databases]
* = host={host} port={port} user={user} password={password}
[pgbouncer]
listen_addr = 127.0.0.1
listen_port = {own_port}
unix_socket_dir =
auth_type = any
admin_users = {user}
pool_mode = transaction
default_pool_size = {pool_size}
max_client_conn = 200
server_reset_query =
query_wait_timeout = 60
user = {run_as}
logfile = {folder}/log
"""


class PgBouncer:
    """Runs until `close`; ends with this process in any case."""

    def __init__(self, server_url: str) -> None:
        require(PROGRAM, "pgbouncer")
        self._server = urlsplit(server_url)
        self.port = free_port()
        self.folder = Path(tempfile.mkdtemp(prefix="durable-jobs-pgbouncer-"))
        shutil.chown(self.folder, user=UNPRIVILEGED_USER)
        (self.folder / "pgbouncer.ini").write_text(
            CONFIGURATION.format(
                host=self._server.hostname,
                port=self._server.port or 5432,
                user=self._server.username,
                password=self._server.password or "",
                own_port=self.port,
                pool_size=POOL_SIZE,
                run_as=UNPRIVILEGED_USER,
                folder=self.folder,
            )
        )
        self._process = Guarded([PROGRAM, "-q", str(self.folder / "pgbouncer.ini")], self.folder / "said")
        wait_until(self.answers, 20, f"PgBouncer does not answer: {(self.folder / 'said').read_text()}")

    def url(self, database: str) -> str:
        """The address of a database through the pooler."""
        at = f"{self._server.username}:x@127.0.0.1:{self.port}"
        return self._server._replace(netloc=at, path=f"/{database}").geturl()

    def show(self, what: str) -> list[dict[str, Any]]:
        """PgBouncer's own tables: POOLS, SERVERS, CLIENTS, VERSION."""
        with psycopg.connect(self.url("pgbouncer"), autocommit=True, row_factory=dict_row) as admin:
            return list(admin.execute(f"SHOW {what}").fetchall())

    def answers(self) -> bool:
        try:
            return bool(self.show("VERSION"))
        except psycopg.Error:
            return False

    def close(self) -> None:
        self._process.end()
        shutil.rmtree(self.folder, ignore_errors=True)
