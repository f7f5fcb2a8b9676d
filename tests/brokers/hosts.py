"""Network namespaces as hosts: each has one line to this machine, and the line can be cut."""

from __future__ import annotations

import itertools
import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

_numbers = itertools.count()


class Host:
    """A namespace at the far end of a line; `here` is this machine's address on it, `address` its own."""

    def __init__(self) -> None:
        number = next(_numbers)
        # The names tell the process, so that a later run can remove what one that was killed has left.
        self.name = f"durable-jobs-{os.getpid()}-{number}"
        self._near, self._far = f"dj{os.getpid()}n{number}", f"dj{os.getpid()}f{number}"
        network = unused_network()
        self.here, self.address = f"{network}.1", f"{network}.2"
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


def ip(*arguments: str) -> str:
    return subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True).stdout


def unused_network() -> str:
    """The first three numbers of a network that this machine has no line to yet."""
    taken = ip("-o", "-4", "address") + ip("-4", "route")
    return next(network for n in range(256) if f"{(network := f'10.213.{n}')}." not in taken)


def sweep() -> None:
    """Remove the hosts of runs that were killed."""
    for name in re.findall(r"^durable-jobs-\S+", ip("netns", "list"), re.MULTILINE):
        owner = re.fullmatch(r"durable-jobs-(\d+)-\d+", name)
        if owner and not Path(f"/proc/{owner[1]}").exists():
            # Its end of the line goes with it, and so the other.
            subprocess.run(["ip", "netns", "delete", name], capture_output=True, check=False)


def require() -> None:
    """Skip, with the reason, where namespaces cannot be made."""
    if shutil.which("ip") is None:
        pytest.skip("`ip` is missing; install Debian's iproute2")
    if os.geteuid() != 0:
        pytest.skip("network namespaces need root")
    sweep()
    probe = f"durable-jobs-{os.getpid()}-{next(_numbers)}"
    made = subprocess.run(["ip", "netns", "add", probe], capture_output=True, text=True, check=False)
    subprocess.run(["ip", "netns", "delete", probe], capture_output=True, check=False)
    if made.returncode:
        pytest.skip(f"network namespaces cannot be made here: {made.stderr.strip()}")
