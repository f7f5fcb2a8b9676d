"""Network namespaces as hosts: each has one line to this machine, and the line can be cut."""

from __future__ import annotations

import os
import shutil
import subprocess
import uuid

import pytest


class Host:
    """A namespace at the far end of a line; `here` is this machine's address on it, `address` its own."""

    def __init__(self, number: int) -> None:
        run_id = uuid.uuid4().hex[:6]
        self.name = f"durable-jobs-{run_id}"
        self._near, self._far = f"dj{run_id}n", f"dj{run_id}f"
        self.here, self.address = f"10.213.{number}.1", f"10.213.{number}.2"
        ip("netns", "add", self.name)
        try:
            ip("link", "add", self._near, "type", "veth", "peer", "name", self._far, "netns", self.name)
            ip("address", "add", f"{self.here}/24", "dev", self._near)
            ip("link", "set", self._near, "up")
            self.run("address", "add", f"{self.address}/24", "dev", self._far)
            self.run("link", "set", self._far, "up")
            self.run("link", "set", "lo", "up")
        except subprocess.CalledProcessError:
            self.remove()
            raise

    def run(self, *arguments: str) -> None:
        """An `ip` command within the namespace."""
        ip("-netns", self.name, *arguments)

    def command(self, *words: str) -> list[str]:
        """The command line that runs a command on this host; its process id is that of the command."""
        return ["ip", "netns", "exec", self.name, *words]

    def cut(self) -> None:
        """From now on nothing arrives on either side, and nobody is told."""
        ip("link", "set", self._near, "down")

    def heal(self) -> None:
        ip("link", "set", self._near, "up")

    def remove(self) -> None:
        subprocess.run(["ip", "link", "delete", self._near], capture_output=True, check=False)
        subprocess.run(["ip", "netns", "delete", self.name], capture_output=True, check=False)


def ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True)


def require() -> None:
    """Skip, with the reason, where namespaces cannot be made."""
    if shutil.which("ip") is None:
        pytest.skip("`ip` is missing; install Debian's iproute2")
    if os.geteuid() != 0:
        pytest.skip("network namespaces need root")
    probe = f"durable-jobs-{uuid.uuid4().hex[:6]}"
    made = subprocess.run(["ip", "netns", "add", probe], capture_output=True, text=True, check=False)
    subprocess.run(["ip", "netns", "delete", probe], capture_output=True, check=False)
    if made.returncode:
        pytest.skip(f"network namespaces cannot be made here: {made.stderr.strip()}")
