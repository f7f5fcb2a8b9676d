"""The example of `docs/receipts.md` does what the page says."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from durable_jobs import exceptions, kinds, receipts
from durable_jobs.models import Ownership
from durable_jobs.service import Scope
from durable_jobs.testing import finish
from tests.models import Shipment
from tests.postgres import wait_until
from tests.receipts import acts

pytestmark = pytest.mark.django_db(transaction=True)

PAGE = (Path(__file__).parents[2] / "docs" / "receipts.md").read_text()
BLOCKS = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
MODELS, REPAIR, MANAGER, HELD, CANDIDATES = BLOCKS


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
    Shipment.objects.update(status="lost")
    again = warehouse["try_again"](job, shipment.pk, "bob")
    assert (again.id, again.status, again.attempts, again.result["is"]) == (job.id, "completed", 2, "arrived")
    shipment.refresh_from_db()
    assert (shipment.status, shipment.note) == ("arrived", "tried: failed")


def test_the_repair_whose_process_died_is_tried_again(warehouse: dict[str, Any]) -> None:
    shipment = Shipment.objects.create(status="lost")
    context = warehouse["context"](shipment.pk, "anna")
    begun = receipts.begin(context, f'{{"shipment": {shipment.pk}}}')
    acts.age(begun.job.id)
    job = warehouse["repair"](shipment.pk, "anna")
    assert (job.status, job.ownership) == ("running", "expired")
    again = warehouse["try_again"](job, shipment.pk, "bob")
    shipment.refresh_from_db()
    assert (again.status, shipment.status, shipment.note) == ("completed", "arrived", "tried: running")


def test_the_models_of_the_page_are_those_of_the_tests() -> None:
    fields = set(re.findall(r"^    (\w+) = models\.", MODELS, re.MULTILINE))
    assert fields <= {field.name for field in Shipment._meta.get_fields()}


def test_the_held_import_of_the_page_is_released() -> None:
    names: dict[str, Any] = {}
    try:
        exec(HELD, names)
        assert finish(acts.read(names["held"].id)).result == {"imported": "march.csv"}
    finally:
        kinds.unregister("warehouse.import")


def test_the_page_of_the_page_is_read(warehouse: dict[str, Any]) -> None:
    shipment = Shipment.objects.create(status="moving")
    with pytest.raises(ValueError, match="is not lost"):
        warehouse["repair"](shipment.pk, "anna")
    names: dict[str, Any] = {}
    exec(CANDIDATES, names)
    assert [job.input for job in names["page"].candidates] == [{"shipment": shipment.pk}]


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


def test_the_page_says_what_is_not_promised() -> None:
    """A109, A110."""
    for sentence in (
        "nothing was changed by it", "does not protect what is written past them, nor effects outside the database",
        "does not say that anything has stopped", "Nothing interrupts running code", "refuses an open one",
        "says nothing about what was done", "`cleanup` removes nothing",
    ):  # fmt: skip
        assert sentence in PAGE, sentence
    assert "Callbacks are trusted" in (receipts.__doc__ or "")


def test_the_page_names_every_code_and_every_ownership() -> None:
    coded = {str(getattr(value, "code", "")) for value in vars(exceptions).values()}
    codes = {code for code in coded if code.startswith("E_JOB_")}
    assert set(re.findall(r"`(E_JOB_\w+)` \|", PAGE)) == codes
    assert all(f"`{ownership}`" in PAGE for ownership in Ownership.values)
