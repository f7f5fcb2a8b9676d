"""The examples of `docs/django_tasks.md` do what the page says."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import pytest
from django.test import override_settings

from durable_jobs import service
from durable_jobs.testing import finish
from tests.postgres import ROOT
from tests.tasks.django_api import PACKAGE

BLOCKS = [
    block.replace("django.tasks import", f"{PACKAGE} import")
    for block in re.findall(
        r"^```python\n(.*?)^```", (ROOT / "docs" / "django_tasks.md").read_text(), re.DOTALL | re.MULTILINE
    )
]


@pytest.mark.django_db(transaction=True)
def test_the_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, registry: None) -> None:
    settings, tasks, use, transient, jobs, two = BLOCKS
    package = tmp_path / "newsletters"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "tasks.py").write_text(tasks + transient)
    (package / "jobs.py").write_text(jobs)
    (package / "more.py").write_text(
        f'from {PACKAGE} import task\n\n\n@task(backend="idempotent")\ndef again():\n    raise ValueError("no")\n'
    )
    monkeypatch.syspath_prepend(tmp_path)
    try:
        with override_settings(**run(settings)):
            used = run(use)
            finish(service.get(used["result"].id))
            used["same"].refresh()
            assert used["same"].return_value == {"sent": 1} and used["same"].attempts == 1
            assert used["later"].task.run_after == used["tomorrow"]
            from newsletters.tasks import call_the_bank  # type: ignore[import-not-found]

            assert attempts_of(call_the_bank) == 8
        run("import newsletters.jobs")
        with override_settings(**run(two)):
            from newsletters.more import again  # type: ignore[import-not-found]

            assert attempts_of(again) == 5
            assert service.get(again.enqueue().id).kind == "newsletters.idempotent_task"
    finally:
        for name in [name for name in sys.modules if name.partition(".")[0] == "newsletters"]:
            del sys.modules[name]


def attempts_of(task: Any) -> int:
    result = task.enqueue("1") if task.name == "call_the_bank" else task.enqueue()
    finish(service.get(result.id))
    result.refresh()
    assert result.status == "FAILED"
    return int(result.attempts)


def run(code: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    exec(code, found)
    return {name: value for name, value in found.items() if name != "__builtins__"}
