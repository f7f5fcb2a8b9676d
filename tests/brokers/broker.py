"""Real brokers for the tests: Debian's Redis and RabbitMQ, each on a loopback port of its own, gone with the run.

`python -m tests.brokers.broker PARENT COMMAND…` runs a command that ends with the process PARENT, even by SIGKILL.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

import pytest
import redis

from tests.postgres import ROOT, alive, free_port, wait_until

RABBITMQ_SERVER = "/usr/lib/rabbitmq/bin/rabbitmq-server"
INSTALL_SECONDS = 600


def require(program: str, package: str) -> None:
    """Install Debian's package where the program is missing; without apt or root the tests skip and say so."""
    if Path(program).exists():
        return
    if shutil.which("apt-get") is None or os.geteuid() != 0:
        pytest.skip(f"{program} is missing; install Debian's {package}, or run as root where apt-get is")
    # Services are not started on the way: the tests start what they need, on ports of their own.
    environment = {
        "DEBIAN_FRONTEND": "noninteractive",
        "RUNLEVEL": "1",
        "PATH": "/usr/sbin:/usr/bin:/sbin:/bin",
    }
    for command in (
        ["apt-get", "update", "-qq"],
        ["apt-get", "install", "-y", "-qq", "--no-install-recommends", package],
    ):
        ended = subprocess.run(
            command, timeout=INSTALL_SECONDS, env=environment, capture_output=True, text=True, check=False
        )
        if ended.returncode:
            pytest.skip(f"{package} could not be installed: {ended.stderr.strip()[-300:]}")


class Guarded:
    """A server process in a group of its own, which ends with this process."""

    def __init__(self, command: list[str], log: Path, environment: Mapping[str, str] | None = None) -> None:
        with log.open("ab") as file:
            self._guard = subprocess.Popen(
                [sys.executable, "-m", "tests.brokers.broker", str(os.getpid()), *command],
                cwd=ROOT, env={**os.environ, **(environment or {})}, stdin=subprocess.DEVNULL, stdout=file,
                stderr=file, start_new_session=True,
            )  # fmt: skip

    def end(self) -> None:
        self._guard.terminate()
        self._guard.wait(30)

    @property
    def running(self) -> bool:
        return self._guard.poll() is None


class Redis:
    """A Redis that keeps nothing on disk: whoever stops it loses every message."""

    def __init__(self) -> None:
        require("/usr/bin/redis-server", "redis-server")
        self.folder = Path(tempfile.mkdtemp(prefix="durable-jobs-redis-"))
        self.port = free_port()
        self.url = f"redis://127.0.0.1:{self.port}/0"
        self._process: Guarded | None = None
        self.start()

    @property
    def client(self) -> redis.Redis:
        return redis.Redis(port=self.port, socket_timeout=5)

    def start(self) -> None:
        command = ["/usr/bin/redis-server", "--port", str(self.port), "--bind", "127.0.0.1", "--save", "",
                   "--appendonly", "no", "--dir", str(self.folder)]  # fmt: skip
        self._process = Guarded(command, self.folder / "log")
        wait_until(self.answers, 30, f"Redis does not answer:\n{(self.folder / 'log').read_text()}")

    def answers(self) -> bool:
        with contextlib.suppress(redis.RedisError):
            return bool(self.client.ping())
        return False

    def stop(self) -> None:
        assert self._process is not None
        self._process.end()

    def restart(self) -> None:
        self.stop()
        self.start()

    def lose_messages(self) -> None:
        self.client.flushall()

    def is_quiet(self) -> bool:
        """No message waits, nor is one in a worker's hands, but those whose slices run."""
        from durable_jobs.models import Job
        from durable_jobs.testing.transports import QUEUE

        running = Job.objects.filter(status="running", lease_owner__isnull=False).count()
        return self.client.llen(QUEUE) == 0 and self.client.hlen("unacked") <= running

    def close(self) -> None:
        self.stop()
        shutil.rmtree(self.folder, ignore_errors=True)


class RabbitMQ:
    """A RabbitMQ node with an epmd of its own."""

    def __init__(self) -> None:
        require(RABBITMQ_SERVER, "rabbitmq-server")
        self.folder = Path(tempfile.mkdtemp(prefix="durable-jobs-rabbitmq-"))
        self.port = free_port()
        self.url = f"amqp://guest:guest@127.0.0.1:{self.port}//"
        names = free_port(), free_port()
        (self.folder / "environment").touch()
        self._environment = {
            "HOME": str(self.folder),
            "ERL_EPMD_PORT": str(names[0]),
            "ERL_EPMD_ADDRESS": "127.0.0.1",
            "RABBITMQ_NODENAME": f"tests{self.port}@localhost",
            "RABBITMQ_NODE_IP_ADDRESS": "127.0.0.1",
            "RABBITMQ_NODE_PORT": str(self.port),
            "RABBITMQ_DIST_PORT": str(names[1]),
            "RABBITMQ_MNESIA_BASE": str(self.folder / "data"),
            "RABBITMQ_LOG_BASE": str(self.folder),
            "RABBITMQ_CONFIG_FILE": str(self.folder / "none"),
            "RABBITMQ_ENABLED_PLUGINS_FILE": str(self.folder / "plugins"),
            "RABBITMQ_PID_FILE": str(self.folder / "pid"),
            "RABBITMQ_CONF_ENV_FILE": str(self.folder / "environment"),
        }
        # In the foreground and before the node, which would start one that outlives it.
        self._names = Guarded(["epmd", "-port", str(names[0]), "-address", "127.0.0.1"], self.folder / "epmd")
        wait_until(lambda: listens(names[0]), 20, "epmd does not listen")
        self._node: Guarded | None = None
        self.start()

    def start(self) -> None:
        self._node = Guarded([RABBITMQ_SERVER], self.folder / "node", self._environment)
        wait_until(
            lambda: listens(self.port), 90, f"RabbitMQ does not answer:\n{(self.folder / 'node').read_text()}"
        )

    def stop(self) -> None:
        assert self._node is not None
        self._node.end()

    def restart(self) -> None:
        self.stop()
        self.start()

    def close(self) -> None:
        self.stop()
        self._names.end()
        shutil.rmtree(self.folder, ignore_errors=True)


def listens(port: int) -> bool:
    with socket.socket() as client, contextlib.suppress(OSError):
        client.settimeout(1)
        client.connect(("127.0.0.1", port))
        return True
    return False


def guard(parent: int, command: list[str]) -> int:
    """Run the command, end its whole group when it is asked to or when the parent has gone."""
    child = subprocess.Popen(command, start_new_session=True)
    asked: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, frame: asked.append(number))
    while child.poll() is None and not asked and alive(parent):
        time.sleep(0.1)
    for number in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(10)
            break
    return child.wait()


if __name__ == "__main__":
    sys.exit(guard(int(sys.argv[1]), sys.argv[2:]))
