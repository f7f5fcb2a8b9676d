"""Files that no test can run here say nothing that the repository does not hold."""

from __future__ import annotations

import re
import shlex
from typing import Any

import pytest
import yaml

from tests.postgres import ROOT

pytestmark = pytest.mark.any_database

DOCKERFILE = (ROOT / "Dockerfile").read_text(encoding="utf-8")
COMPOSE: dict[str, Any] = yaml.safe_load((ROOT / "compose.yaml").read_text(encoding="utf-8"))
PINS = dict(
    re.findall(r"^([\w-]+)(?:\[\w+\])?==(\S+)$", (ROOT / "requirements.txt").read_text(), re.MULTILINE)
)


def test_what_the_image_copies_is_there() -> None:
    for line in re.findall(r"^COPY (.+) \S+$", DOCKERFILE, re.MULTILINE):
        assert all((ROOT / name).exists() for name in line.split()), line


def test_the_image_has_the_versions_that_are_tested() -> None:
    pinned = re.findall(r'"([\w-]+)(?:\[\w+\])?==([^"]+)"', DOCKERFILE)
    assert pinned and all(PINS[name] == version for name, version in pinned)


def test_every_service_starts_after_what_it_needs() -> None:
    services = COMPOSE["services"]
    assert set(services["site"]["depends_on"]) == set(services["worker"]["depends_on"]) == {"migrate"}
    assert set(services["migrate"]["depends_on"]) == {"database"}
    volumes = {volume.split(":")[0] for service in services.values() for volume in service.get("volumes", ())}
    assert volumes == set(COMPOSE["volumes"])


def test_every_command_is_one_of_manage_py() -> None:
    from django.core.management import get_commands

    commands = [service["command"] for service in COMPOSE["services"].values() if "command" in service]
    commands += [
        service["healthcheck"]["test"][1:]
        for service in COMPOSE["services"].values()
        if "build" in service and "healthcheck" in service
    ]
    commands.append(shlex.split(DOCKERFILE.partition("CMD [")[2].partition("]")[0].replace(",", " ")))
    for command in commands:
        assert command[:2] == ["python", "manage.py"] and command[2] in get_commands(), command
