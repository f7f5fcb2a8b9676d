"""The schema says what the API does; and the package does without the API, and the API without the schema."""

from __future__ import annotations

import re
import subprocess
import sys
import textwrap
from typing import Any

import pytest
from django.test import override_settings
from django.urls import include, path
from drf_spectacular.drainage import GENERATOR_STATS
from drf_spectacular.generators import SchemaGenerator
from drf_spectacular.validation import validate_schema
from rest_framework.routers import DefaultRouter

from durable_jobs.rest.filters import JobFilter
from durable_jobs.rest.views import JobViewSet
from tests.postgres import ROOT

ACTS = {"/api/jobs/{id}/cancel/": {"200", "202", "409"}, "/api/jobs/{id}/redrive/": {"200", "409"}}


@pytest.fixture(scope="module")
def schema() -> Any:
    GENERATOR_STATS.reset()
    made = SchemaGenerator().get_schema(request=None, public=True)
    assert not GENERATOR_STATS, "drf-spectacular warns"
    return made


@pytest.mark.any_database
def test_it_is_valid(schema: Any) -> None:
    validate_schema(schema)


@pytest.mark.any_database
def test_a_start_needs_its_body(schema: Any) -> None:
    assert schema["paths"]["/api/jobs/"]["post"]["requestBody"]["required"] is True


@pytest.mark.any_database
def test_every_operation_lists_its_refusals(schema: Any) -> None:
    """C094."""
    assert len(schema["paths"]) == 15
    for address, operations in schema["paths"].items():
        for operation in operations.values():
            assert {"400", "401", "403"} <= set(operation["responses"]), address
            assert ("404" in operation["responses"]) is ("{id}" in address), address
            assert operation["security"], address
    for address, codes in ACTS.items():
        assert codes <= set(schema["paths"][address]["post"]["responses"])


@pytest.mark.any_database
def test_what_may_be_started_is_in_it(schema: Any) -> None:
    assert "409" in schema["paths"]["/api/jobs/"]["post"]["responses"]
    assert "StartBody" in schema["components"]["schemas"]


@pytest.mark.any_database
def test_the_page_names_every_address_filter_and_right(schema: Any) -> None:
    page = (ROOT / "docs" / "rest.md").read_text()
    for address in schema["paths"]:
        assert f"{address.removeprefix('/api/')}`" in page, address
    for name in (*JobFilter.base_filters, "page_size"):
        assert re.search(rf"`{name}`|\?{name}=", page), name
    for right in (
        "view_job",
        "start_job",
        "operate_job",
        "pause_job",
        "force_redrive_job",
        "view_job_payload",
    ):
        assert f"`{right}`" in page


def run(program: str, *blocked: str) -> None:
    """Run a program in a project that has only some packages."""
    guard = f"""
    import sys
    sys.modules.update(dict.fromkeys({blocked!r}))
    import django
    from django.conf import settings
    settings.configure(
        SECRET_KEY="x", USE_TZ=True, ROOT_URLCONF="durable_jobs.rest.urls", ALLOWED_HOSTS=["testserver"],
        INSTALLED_APPS=["django.contrib.auth", "django.contrib.contenttypes", "durable_jobs"],
        DATABASES={{"default": {{"ENGINE": "django.db.backends.sqlite3", "NAME": ":memory:"}}}},
    )
    django.setup()
    """
    text = textwrap.dedent(guard) + textwrap.dedent(program)
    subprocess.run([sys.executable, "-c", text], cwd=ROOT, check=True, timeout=60)


@pytest.mark.any_database
def test_the_package_does_without_the_rest_of_it() -> None:
    program = """
    import durable_jobs.service, durable_jobs.worker, durable_jobs.testing, durable_jobs.access
    assert not [name for name, module in sys.modules.items() if module and name.startswith(("rest_", "django_f"))]
    """
    run(program, "rest_framework", "django_filters", "drf_spectacular")


@pytest.mark.any_database
def test_the_api_does_without_the_schema() -> None:
    program = """
    from django.test import Client
    assert Client().get("/jobs/").status_code in (401, 403)
    assert "durable_jobs.rest.schema" not in sys.modules
    """
    run(program, "drf_spectacular")


# --- in the project's own router, under a version ---

router = DefaultRouter()
router.register("work", JobViewSet, basename="work")
urlpatterns = [path("<str:version>/", include((router.urls, "own")))]


@pytest.mark.django_db
@override_settings(ROOT_URLCONF=__name__)
def test_it_lives_in_the_projects_own_router(operator: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """F25."""
    from rest_framework.versioning import URLPathVersioning

    monkeypatch.setattr(JobViewSet, "versioning_class", URLPathVersioning)
    started = operator.post("/v1/work/", {"kind": "rest.echo", "input": {"count": 1}}, format="json")
    assert started.status_code == 201
    assert started["Location"].endswith(f"/v1/work/{started.json()['id']}/status/")
    assert operator.get(started["Location"]).status_code == 200
    page = operator.get("/v1/work/", {"page_size": 1}).json()
    assert [one["id"] for one in page["results"]] == [started.json()["id"]]
    assert operator.post(f"/v1/work/{started.json()['id']}/cancel/").json()["result"] == "cancelled"
