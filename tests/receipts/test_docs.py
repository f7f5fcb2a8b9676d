"""The example of `docs/receipts.md` does what the page says."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from durable_jobs import exceptions
from durable_jobs.models import Ownership
from durable_jobs.service import Scope
from tests.models import Shipment
from tests.postgres import wait_until
from tests.receipts import acts

pytestmark = pytest.mark.django_db(transaction=True)

PAGE = (Path(__file__).parents[2] / "docs" / "receipts.md").read_text()
REPAIR, MANAGER = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)


@pytest.fixture
def warehouse(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The project of the example; a table of the tests stands for its own."""
    models = ModuleType("warehouse.models")
    models.Shipment = Shipment  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "warehouse", ModuleType("warehouse"))
    monkeypatch.setitem(sys.modules, "warehouse.models", models)
    names: dict[str, Any] = {}
    exec(REPAIR, names)
    return names


def test_the_repair_happens_once_with_its_receipt(warehouse: dict[str, Any]) -> None:
    shipment = Shipment.objects.create(status="lost")
    job = warehouse["repair"](shipment.pk, "anna")
    shipment.refresh_from_db()
    assert shipment.status == "arrived"
    assert (job.status, job.result) == (
        "completed",
        {"shipment": shipment.pk, "was": "lost", "is": "arrived"},
    )
    before = acts.everything()
    assert warehouse["repair"](shipment.pk, "bob").id == job.id
    assert acts.everything() == before


def test_the_failed_repair_is_recorded_and_tried_again(warehouse: dict[str, Any]) -> None:
    shipment = Shipment.objects.create(status="moving")
    with pytest.raises(ValueError, match="is not lost"):
        warehouse["repair"](shipment.pk, "anna")
    job = warehouse["repair"](shipment.pk, "anna")
    assert (job.status, job.result) == ("failed", {"changed": 0})
    assert job.error_message == f"ValueError: Shipment {shipment.pk} is not lost."
    assert warehouse["try_again"](job, shipment.pk, "bob") == f'{{"checked": {shipment.pk}}}'
    assert (acts.read(job.id).status, acts.read(job.id).attempts) == ("completed", 2)


def test_the_manager_of_the_page_runs_its_report() -> None:
    names: dict[str, Any] = {}
    exec(MANAGER, names)
    manager, job_id = names["manager"], names["job_id"]
    wait_until(lambda: not manager._runs, 10, "the report goes on")
    job = manager.get_job(job_id)
    assert (job.status, job.result, job.checkpoint, job.scope) == (
        "completed",
        {"months": 12},
        {"month": 12},
        Scope("acme"),
    )
    manager._beats and manager._beats.join(5)


def test_the_page_names_every_code_and_every_ownership() -> None:
    coded = {str(getattr(value, "code", "")) for value in vars(exceptions).values()}
    codes = {code for code in coded if code.startswith("E_JOB_")}
    assert set(re.findall(r"`(E_JOB_\w+)` \|", PAGE)) == codes
    assert all(f"`{ownership}`" in PAGE for ownership in Ownership.values)
