"""`manage.py serve`: the demo site and a worker, for looking around."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import time
from contextlib import suppress
from typing import Any, Final

from django.contrib.auth import get_user_model
from django.contrib.auth.models import Group
from django.core.management import call_command
from django.core.management.base import BaseCommand, CommandError, CommandParser
from django.db import connection

from project.demo.children import Children, ended_by_signals

ENVIRONMENT: Final = {
    "DURABLE_JOBS_GRACE": "2",
    "DURABLE_JOBS_TICK": "1",
    "DEMO_LEASE_SECONDS": "5",
    "DEMO_PAUSE": "0.1",
}
"""Imports slow enough to be watched, and leases short enough to see one run out."""

LOGIN: Final = "demo"
VISITOR: Final = "visitor"
"""An ordinary user: no staff, no rights, and a scope of its own."""
PATIENCE: Final = 30.0
SHORTEST_LIFE: Final = 3.0
"""A worker that ends by itself sooner would only end again."""


class Command(BaseCommand):
    """Ends both children when it ends; starts another worker when somebody kills this one."""

    help = "Serve the demo site with a worker beside it. Prints address and login; Ctrl-C ends both."

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument("port", nargs="?", type=int, default=8000, help="default: 8000")

    def handle(self, *args: Any, **options: Any) -> None:
        port: int = options["port"]
        if not 1 <= port <= 65_535:
            raise CommandError(f"{port} is not a port: give a number from 1 to 65535.")
        if _answers(port):
            raise CommandError(
                f"Something listens on port {port} already. Name another: make serve ARGS=8001"
            )
        call_command("migrate", verbosity=0, interactive=False)
        password = self._make_login()
        with ended_by_signals(), Children() as children:
            with suppress(KeyboardInterrupt):
                self._serve(children, port, password)
            self._say("\nEnding the site and the worker.")

    def _make_login(self) -> str:
        """The words for the password of the user `demo`, who is made if missing, as is `visitor`."""
        users = get_user_model()._default_manager
        if not users.filter(username=VISITOR).exists():
            visitor = users.create_user(username=VISITOR, password=VISITOR)
            visitor.groups.add(Group.objects.get_or_create(name="Visitors")[0])
        user = users.filter(username=LOGIN).first()
        if user is None:
            users.create_superuser(username=LOGIN, email="", password=LOGIN)
            return LOGIN
        return LOGIN if user.check_password(LOGIN) else "(one of its own, from before)"

    def _serve(self, children: Children, port: int, password: str) -> None:
        environment = {name: value for name, value in ENVIRONMENT.items() if name not in os.environ}
        address = f"127.0.0.1:{port}"
        site = children.start("runserver", "--noreload", address, environment=environment, quiet=True)
        worker, begun = children.start("runworker", environment=environment), time.monotonic()
        self._await_site(site, port)
        self._tell(port, password, worker.pid)
        while True:
            time.sleep(0.2)
            if site.poll() is not None:
                raise CommandError(f"The site has ended: {_how(site)}.")
            if worker.poll() is None:
                continue
            if time.monotonic() - begun < SHORTEST_LIFE and worker.returncode > 0:
                raise CommandError(f"The worker has ended: {_how(worker)}.")
            ended = worker
            worker, begun = children.start("runworker", environment=environment), time.monotonic()
            self._say(f"Worker {ended.pid} has ended: {_how(ended)}. Worker {worker.pid} starts.")

    def _await_site(self, site: subprocess.Popen[bytes], port: int) -> None:
        deadline = time.monotonic() + PATIENCE
        while not _answers(port):
            if site.poll() is not None:
                raise CommandError(f"The site has ended: {_how(site)}.")
            if time.monotonic() > deadline:
                raise CommandError(f"The site does not answer on port {port} after {PATIENCE:g} s.")
            time.sleep(0.1)

    def _tell(self, port: int, password: str, worker: int) -> None:
        self._say(
            f"""
  Imports   http://127.0.0.1:{port}/
  Admin     http://127.0.0.1:{port}/admin/
  Login     {LOGIN}, password {password}
  Visitor   http://127.0.0.1:{port}/imports/ as {VISITOR}, password {VISITOR}: an ordinary user who follows an import
  API       http://127.0.0.1:{port}/api/jobs/ (schema: /api/schema/)
  Database  {connection.display_name}, {connection.settings_dict["NAME"]}
  Worker    process {worker}. Kill it during an import (kill -9 {worker}): another takes over.

  Ctrl-C ends the site and the worker.
"""
        )

    def _say(self, text: str) -> None:
        self.stdout.write(text)
        self.stdout.flush()


def _answers(port: int) -> bool:
    with socket.socket() as caller:
        caller.settimeout(1)
        return caller.connect_ex(("127.0.0.1", port)) == 0


def _how(child: subprocess.Popen[bytes]) -> str:
    code = child.returncode
    if code is not None and code < 0:
        return signal.Signals(-code).name
    return f"exit code {code}"
