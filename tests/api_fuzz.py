"""`python -m tests.api_fuzz`: schemathesis against the served API, as an operator and as a viewer.

A server of its own is started on an empty SQLite file, or on the database that DATABASE_URL names, which must be empty.
Jobs in every state are made first. All checks are on; the number of examples is bounded (`--examples`).
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from tests.postgres import ROOT

KINDS = json.dumps({"DISCOVER": ["rest.kinds"]})
SHELL = """
from django.contrib.auth.models import Permission, User
from durable_jobs.testing import make_job
from tests.rest.conftest import OPERATOR, VIEWER
for name, rights in (("operator", (*OPERATOR, "force_redrive_job", "view_all_scopes", "change_user")), ("viewer", VIEWER)):
    user = User.objects.create_user(name, password=name)
    user.user_permissions.set(Permission.objects.filter(codename__in=rights))
for state in ("held", "pending", "running", "completed", "failed", "cancelled", "retrying", "parked", "expired") * 4:
    make_job(state, kind="rest.echo", created_by=User.objects.get(username="operator").pk)
"""
SEED = 20260301


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--examples", type=int, default=15, help="examples per operation (default: 15)")
    parser.add_argument("--only", choices=["operator", "viewer"], help="as this user alone")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="durable-jobs-fuzz-") as folder, served(Path(folder)) as address:
        failed = [
            name
            for name in ("operator", "viewer")
            if options.only in (None, name) and not fuzz(address, name, options.examples, Path(folder))
        ]
    print(f"API fuzz: {'FAILED as ' + ', '.join(failed) if failed else 'passed'}")
    return 1 if failed else 0


@contextlib.contextmanager
def served(folder: Path) -> Iterator[str]:
    """The API at an address, with its users and jobs."""
    environment = {
        **os.environ,
        "DJANGO_SETTINGS_MODULE": "tests.settings",
        "DURABLE_JOBS_TEST_SETTINGS": KINDS,
        "PYTHONPATH": str(ROOT),
        "PYTHONUNBUFFERED": "1",
    }
    environment.setdefault("DATABASE_URL", f"sqlite:///{folder / 'fuzz.sqlite3'}")
    for arguments in (["migrate", "--verbosity=0"], ["shell", "--verbosity=0", "--command", SHELL]):
        subprocess.run([sys.executable, "-m", "django", *arguments], env=environment, cwd=ROOT, check=True)
    port = free_port()
    log = folder / "server.log"
    with log.open("wb") as output:
        server = subprocess.Popen(
            [sys.executable, "-m", "django", "runserver", "--noreload", f"127.0.0.1:{port}"],
            env=environment,
            cwd=ROOT,
            stdout=output,
            stderr=subprocess.STDOUT,
        )
        try:
            await_port(port, server)
            yield f"http://127.0.0.1:{port}"
        finally:
            server.terminate()
            server.wait(10)
            for line in [line for line in log.read_text().splitlines() if '" 500 ' in line][:5]:
                print(line)


def fuzz(address: str, name: str, examples: int, folder: Path) -> bool:
    """Whether schemathesis finds nothing."""
    print(f"\n==> as {name}", flush=True)
    command = [
        str(Path(sys.executable).parent / "schemathesis"), "run", f"{address}/schema/?format=json",
        f"--auth={name}:{name}", "--checks=all", f"--max-examples={examples}", f"--seed={SEED}",
        "--generation-database=none", "--continue-on-failure", "--no-shrink", "--warnings=off", "--no-color",
    ]  # fmt: skip
    return subprocess.run(command, cwd=folder, timeout=900).returncode == 0


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def await_port(port: int, server: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline and server.poll() is None:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
            return
        time.sleep(0.1)
    raise SystemExit("The server does not answer.")


if __name__ == "__main__":
    sys.exit(main())
