"""The demo's imports and pages."""

from __future__ import annotations

import io
import re
from pathlib import Path
from typing import Any

import pytest
from django.contrib.auth.models import Group, User
from django.core.files.base import ContentFile
from django.test import Client
from django.urls import reverse

from durable_jobs import service
from durable_jobs.exceptions import LockKeyHeld
from durable_jobs.models import Job, JobEvent, Scope
from durable_jobs.reconciler import Reconciler
from durable_jobs.testing import interrupt_after, kill_after, run, run_slice
from project import settings as project_settings
from project.demo import airports
from project.demo.airports import FIELDS, BadFile
from project.demo.jobs import AirportsImport, CsvImport, start_import
from project.demo.models import Airport, ImportBatch, ImportedRow, ImportRun
from project.demo.proof import examine

pytestmark = pytest.mark.django_db

Source, Status = ImportRun.Source, ImportRun.Status

HEADER = "icao,name,country,lat,lon"
LINES = ["EDDF,Frankfurt,DE,50.03,8.57", "LFPG,Paris,FR,49.01,2.55", "RJTT,Tokyo,JP,35.55,139.78"]


@pytest.fixture(autouse=True)
def media(settings: Any, tmp_path: Path) -> Path:
    settings.MEDIA_ROOT = tmp_path
    return tmp_path


@pytest.fixture
def small_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(AirportsImport, "batch_size", 10)
    monkeypatch.setattr(CsvImport, "batch_size", 2)


def upload(*lines: str) -> ImportRun:
    return ImportRun.objects.create(source=Source.CSV, file=ContentFile("\n".join(lines).encode(), "a.csv"))


def finish(job: Job) -> Job:
    """Run the slices of a started job until it ends."""
    while (now := service.get(job.pk)) and now.status in ("pending", "running"):
        run_slice(now)
    assert now is not None
    return now


def run_upload(*lines: str) -> tuple[Job, ImportRun]:
    imported = upload(*lines)
    job = finish(start_import(imported))
    imported.refresh_from_db()
    return job, imported


def stored() -> list[dict[str, Any]]:
    return list(Airport.objects.order_by("icao").values(*FIELDS.values()))


def expected(first: int) -> list[dict[str, Any]]:
    return [{FIELDS[name]: value for name, value in row.items()} for row in airports.world()[:first]]


def applied() -> list[str]:
    return list(ImportedRow.objects.order_by("icao").values_list("icao", flat=True))


# --- the world's airports ---


def test_the_package_gives_the_same_airports_in_the_same_order() -> None:
    codes = [row["icao"] for row in airports.world()]
    assert len(codes) > 28_000
    assert codes == sorted(set(codes))


def test_an_import_brings_every_airport_and_ends_with_its_run(small_batches: None) -> None:
    imported = ImportRun.objects.create(source=Source.AIRPORTS)
    job = finish(start_import(imported, limit=35))
    imported.refresh_from_db()
    assert (job.status, job.processed_count, job.total_count) == ("completed", 35, 35)
    assert (imported.status, imported.rows_done) == (Status.DONE, 35)
    assert stored() == expected(35)
    assert applied() == [row["icao"] for row in airports.world()[:35]]
    assert list(ImportBatch.objects.order_by("pk").values_list("rows", flat=True)) == [10, 10, 10, 5]


@pytest.mark.parametrize("ends", [interrupt_after, kill_after])
def test_an_import_that_ends_after_each_batch_applies_each_row_once(small_batches: None, ends: Any) -> None:
    imported = ImportRun.objects.create(source=Source.AIRPORTS)
    with ends(1):
        job = run("demo.airports", {"run": imported.pk, "pause": 0, "limit": 35}, subject=imported)
    imported.refresh_from_db()
    assert job.status == "completed"
    assert job.attempts >= 4
    assert (imported.status, imported.rows_done) == (Status.DONE, 35)
    assert applied() == [row["icao"] for row in airports.world()[:35]]
    assert stored() == expected(35)


def test_a_second_import_writes_the_same_rows_under_its_own_run() -> None:
    for _ in range(2):
        imported = ImportRun.objects.create(source=Source.AIRPORTS)
        finish(start_import(imported, limit=20))
    assert stored() == expected(20)
    assert set(Airport.objects.values_list("last_run", flat=True)) == {imported.pk}
    assert ImportedRow.objects.filter(batch__run=imported).count() == 20


def test_one_import_at_a_time() -> None:
    held_by = start_import(ImportRun.objects.create(source=Source.AIRPORTS))
    with pytest.raises(LockKeyHeld) as refusal:
        start_import(upload(HEADER, *LINES))
    assert refusal.value.held_by == held_by.pk


def test_a_cancelled_import_ends_its_run() -> None:
    imported = ImportRun.objects.create(source=Source.AIRPORTS)
    service.cancel(start_import(imported).pk, actor="test")
    imported.refresh_from_db()
    assert imported.status == Status.CANCELLED


@pytest.mark.parametrize("source", Source.values)
def test_an_import_whose_run_was_deleted_ends_at_once(small_batches: None, source: str) -> None:
    imported = upload(HEADER, *LINES)
    ImportRun.objects.update(source=source)
    imported.refresh_from_db()
    job = start_import(imported)
    with interrupt_after(1):
        run_slice(job)
    imported.delete()
    job = finish(job)
    assert (job.status, job.error_code) == ("failed", "run_gone")
    assert Airport.objects.filter(last_run=None).count() == job.processed_count > 0


# --- CSV files ---


def test_a_file_is_imported() -> None:
    job, imported = run_upload(HEADER, *LINES)
    assert (job.status, job.total_count) == ("completed", 3)
    assert (imported.status, imported.rows_done, imported.rows_skipped) == (Status.DONE, 3, 0)
    assert list(Airport.objects.values_list("icao", "latitude")) == [
        ("EDDF", 50.03),
        ("LFPG", 49.01),
        ("RJTT", 35.55),
    ]


def test_a_file_leaves_columns_alone_that_it_does_not_have() -> None:
    Airport.objects.create(
        icao="EDDF", name="old", city="Frankfurt am Main", country="DE", latitude=0, longitude=0
    )
    run_upload(HEADER, LINES[0])
    airport = Airport.objects.get()
    assert (airport.name, airport.city) == ("Frankfurt", "Frankfurt am Main")


def test_the_last_of_two_lines_with_one_code_wins() -> None:
    _, imported = run_upload(HEADER, "EDDF,First,DE,1,1", LINES[1], "EDDF,Last,DE,2,2")
    assert (imported.status, imported.rows_done) == (Status.DONE, 3)
    assert Airport.objects.get(icao="EDDF").name == "Last"


@pytest.mark.parametrize(
    "bad",
    [
        "XXXX,,DE,1,1",
        "XXXX,Nowhere,DE,far,1",
        "XXXX,Nowhere,DE,91,1",
        "XXXX,Nowhere,DE,nan,1",
        "XXXX,Nowhere,DEU,1,1",
        "XXXX,Nowhere,DE,1,1,more",
        "XXXX,Nowhere",
        "XXXX,No\x00where,DE,1,1",
        ",Nowhere,DE,1,1",
    ],
)
def test_a_bad_line_is_skipped_and_recorded(small_batches: None, bad: str) -> None:
    job, imported = run_upload(HEADER, LINES[0], bad, *LINES[1:])
    assert job.status == "completed"
    assert (imported.status, imported.rows_done, imported.rows_skipped) == (Status.DONE, 3, 1)
    assert applied() == ["EDDF", "LFPG", "RJTT"]
    event = JobEvent.objects.get(job=job.pk, event="item_skipped")
    assert (event.code, event.data["cursor"]) == ("bad_row", 1)
    assert job.consecutive_failures == 0


def test_too_many_bad_lines_end_the_import_and_nothing_of_the_batch_stays(
    small_batches: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(CsvImport, "max_skipped", 1)
    job, imported = run_upload(HEADER, LINES[0], "XXXX", "YYYY", LINES[1])
    assert (job.status, job.error_code) == ("failed", "too_many_skipped")
    assert job.parked_at is not None
    assert (imported.status, imported.rows_done, imported.rows_skipped) == (Status.FAILED, 1, 1)
    assert applied() == ["EDDF"]


@pytest.mark.parametrize(
    ("header", "problem"),
    [
        ("icao,name,country,lat", "lacks the columns: 'lon'"),
        (HEADER + ",elevtion", "unknown columns: 'elevtion'"),
        (HEADER + ",icao", "columns twice: 'icao'"),
        ("", "lacks the columns: 'icao', 'name'"),
    ],
)
def test_a_wrong_first_line_ends_the_import_at_once(header: str, problem: str) -> None:
    job, imported = run_upload(header, *LINES)
    assert (job.status, job.error_code, job.attempts) == ("failed", "bad_header", 1)
    assert problem in (job.error_message or "")
    assert imported.status == Status.FAILED


def test_a_file_that_is_not_utf8_ends_the_import_and_keeps_what_came_before(small_batches: None) -> None:
    text = "\n".join([HEADER, *LINES * 500]).encode() + "\nMÜNC,München,DE,1,1".encode("latin-1")
    imported = ImportRun.objects.create(source=Source.CSV, file=ContentFile(text, "a.csv"))
    job = finish(start_import(imported))
    assert (job.status, job.error_code) == ("failed", "bad_file")


def test_a_changed_file_is_not_gone_on_with(small_batches: None) -> None:
    imported = upload(HEADER, *LINES)
    job = start_import(imported)
    with interrupt_after(1):
        run_slice(job)
    Path(imported.file.path).write_text("\n".join([HEADER, *reversed(LINES)]))
    job = finish(job)
    assert (job.status, job.error_code, job.processed_count) == ("failed", "file_changed", 2)


def test_an_import_goes_on_in_the_file_where_it_was_killed(small_batches: None) -> None:
    imported = upload(HEADER, *LINES, "XXXX", *(f"A{n:03},Field {n},US,1,1" for n in range(20)))
    with kill_after(2):
        job = run(
            "demo.csv",
            {"run": imported.pk, "pause": 0, "sha256": file_hash(imported)},
            subject=imported,
        )
    imported.refresh_from_db()
    assert job.status == "completed"
    assert (imported.rows_done, imported.rows_skipped) == (23, 1)
    assert applied() == sorted(["EDDF", "LFPG", "RJTT", *(f"A{n:03}" for n in range(20))])


def test_reading_leaves_the_file_open_for_its_owner() -> None:
    file = io.BytesIO(b"icao\nEDDF\n")
    with pytest.raises(BadFile):
        list(airports.csv_rows(file))
    assert not file.closed


def file_hash(imported: ImportRun) -> str:
    with imported.opened() as file:
        return airports.sha256(file)


# --- the account of the demo ---


@pytest.fixture
def resumed(small_batches: None) -> tuple[ImportRun, Job]:
    """An import of 35 airports that was killed once and has finished."""
    imported = ImportRun.objects.create(source=Source.AIRPORTS)
    job = start_import(imported, limit=35)
    with kill_after(2), pytest.raises(KeyboardInterrupt):
        run_slice(job)
    Reconciler("test").repair_dead(service.get(job.pk).lease_owner)
    return imported, finish(job)


def broken(imported: ImportRun, job: Job) -> list[str]:
    now = service.get(job.pk)
    assert now is not None
    return [finding.what for finding in examine(imported, now, limit=35) if not finding.holds]


def test_an_import_that_was_killed_once_is_found_right(resumed: tuple[ImportRun, Job]) -> None:
    assert broken(*resumed) == []


def test_an_import_that_was_never_killed_proves_nothing(small_batches: None) -> None:
    imported = ImportRun.objects.create(source=Source.AIRPORTS)
    assert broken(imported, finish(start_import(imported, limit=35))) == ["times resumed"]


@pytest.mark.parametrize(
    ("spoil", "found"),
    [
        (lambda run: run.airports.first().delete(), ["rows imported, equal to the data set"]),
        (
            lambda run: run.airports.filter(icao="00AA").update(name="x"),
            ["rows imported, equal to the data set"],
        ),
        (
            lambda run: Airport.objects.create(
                icao="ZZZZZ", name="x", country="XX", latitude=0, longitude=0, last_run=run
            ),
            ["rows imported, equal to the data set"],
        ),
        (lambda run: ImportedRow.objects.first().delete(), ["rows skipped"]),
        (
            lambda run: ImportedRow.objects.create(batch=run.batches.first(), icao="00AA"),
            ["rows applied twice"],
        ),
        (
            lambda run: ImportBatch.objects.create(run=run, first="00AA", rows=10, lease_epoch=1),
            ["batches repeated"],
        ),
        (lambda run: ImportRun.objects.update(rows_done=36), ["the import’s own row"]),
        (lambda run: ImportRun.objects.update(status="running"), ["the import’s own row"]),
    ],
    ids=["lost", "changed", "foreign", "skipped", "twice", "repeated", "miscounted", "still open"],
)
def test_what_is_not_as_promised_is_found(
    resumed: tuple[ImportRun, Job], spoil: Any, found: list[str]
) -> None:
    spoil(resumed[0])
    assert broken(*resumed) == found


# --- pages ---


@pytest.fixture
def site(settings: Any, client: Client) -> Client:
    settings.ROOT_URLCONF = "project.urls"
    settings.TEMPLATES = project_settings.TEMPLATES
    settings.INSTALLED_APPS = [*settings.INSTALLED_APPS, "django.contrib.humanize"]
    client.force_login(User.objects.create_superuser("anna"))
    return client


def post(site: Client, source: str, text: str | None = None) -> Any:
    data: dict[str, Any] = {"source": source}
    if text is not None:
        data["file"] = ContentFile(text.encode(), "a.csv")
    return site.post(reverse("admin:demo_importrun_add"), data, follow=True)


def test_an_upload_starts_its_job_in_the_same_transaction(site: Client) -> None:
    response = post(site, "csv", "\n".join([HEADER, *LINES]))
    assert response.redirect_chain[-1][0] == reverse("admin:demo_importrun_changelist")
    imported = ImportRun.objects.get()
    job = Job.objects.for_subject(imported).get()
    assert (imported.created_by.username, job.created_by.username) == ("anna", "anna")
    assert finish(job).status == "completed"


def test_an_import_beside_another_is_refused_with_a_message_and_leaves_nothing(
    site: Client, media: Path
) -> None:
    post(site, "airports")
    response = post(site, "csv", "\n".join([HEADER, *LINES]))
    assert "Another import is not finished yet" in response.content.decode()
    assert ImportRun.objects.count() == Job.objects.count() == 1
    assert not [path for path in media.rglob("*") if path.is_file()]


@pytest.mark.parametrize(
    ("source", "text", "problem"),
    [
        ("csv", None, "Choose the file to import."),
        ("csv", "icao,nme\nEDDF,x", "lacks the columns"),
        ("airports", HEADER, "come without a file"),
    ],
)
def test_a_wrong_upload_is_refused_in_the_form(
    site: Client, source: str, text: str | None, problem: str
) -> None:
    assert problem in post(site, source, text).content.decode()
    assert not ImportRun.objects.exists()


def test_the_admin_shows_imports_and_airports_and_changes_no_import(site: Client) -> None:
    _, imported = run_upload(HEADER, *LINES)
    for name in ("importrun_changelist", "airport_changelist"):
        assert site.get(reverse(f"admin:demo_{name}")).status_code == 200
    page = site.get(reverse("admin:demo_importrun_change", args=[imported.pk])).content.decode()
    assert "done" in page
    assert 'name="_save"' not in page


def test_the_home_page_shows_how_far_each_import_is(site: Client, small_batches: None) -> None:
    assert "There is no import yet." in site.get("/").content.decode()
    run_upload(HEADER, *LINES, "XXXX")
    job = start_import(ImportRun.objects.create(source=Source.AIRPORTS), limit=35)
    with interrupt_after(1):
        run_slice(job)
    page = site.get("/").content.decode()
    assert "The table holds 13 airports." in page
    assert '<progress max="35" value="10"' in page
    assert "3 / 4, 1 skipped" in page


# --- an ordinary user ---


@pytest.fixture
def visitor(settings: Any, client: Client) -> Client:
    settings.ROOT_URLCONF = "project.urls"
    settings.DURABLE_JOBS = {"SCOPE_FROM_REQUEST": "project.demo.scopes.scope_of_request"}
    settings.LOGIN_URL = "login"
    settings.TEMPLATES = project_settings.TEMPLATES
    visitor = User.objects.create_user("visitor")
    visitor.groups.add(Group.objects.create(name="Visitors"))
    client.force_login(visitor)
    return client


def follow_page(client: Client, page: Any) -> dict[str, Any]:
    """What the page's script would get."""
    (address,) = re.findall(r'const address = "([^"]+)"', page.content.decode())
    answer: dict[str, Any] = client.get(address).json()
    return answer


def test_an_ordinary_user_follows_an_import_live(visitor: Client, small_batches: None) -> None:
    assert "There is no import yet." in visitor.get("/imports/").content.decode()
    page = visitor.post("/imports/", follow=True)
    assert page.redirect_chain == [(reverse("follow", args=[ImportRun.objects.get().pk]), 302)]
    job = Job.objects.get()
    assert job.scope == Scope(organization="Visitors")
    assert follow_page(visitor, page)["public_message"] == "Waiting to start."
    with interrupt_after(2):
        run_slice(job)
    told = follow_page(visitor, page)
    assert (told["processed"], told["finished"]) == (20, False)
    assert told["total"] > 28_000
    service.cancel(job.pk, scope=job.scope)
    assert follow_page(visitor, page)["phase"] == "cancelled"
    assert "cancelled" in visitor.get("/imports/").content.decode()


def test_an_ordinary_user_sees_nothing_of_others(visitor: Client) -> None:
    other = User.objects.create_user("other")
    theirs = ImportRun.objects.create(source=Source.AIRPORTS, created_by=other)
    job = start_import(theirs)
    assert visitor.get(f"/imports/{theirs.pk}/").status_code == 404
    assert visitor.get(f"/api/jobs/{job.pk}/status/").status_code == 404
    assert visitor.get("/api/jobs/").status_code == 403
    assert str(theirs) not in visitor.get("/imports/").content.decode()


def test_a_second_import_of_a_scope_is_not_started(visitor: Client) -> None:
    visitor.post("/imports/")
    page = visitor.post("/imports/", follow=True)
    assert "Another import is not finished yet" in page.content.decode()
    assert ImportRun.objects.count() == Job.objects.count() == 1


def test_strangers_are_asked_to_sign_in(visitor: Client) -> None:
    visitor.logout()
    assert visitor.get("/imports/")["Location"] == "/login/?next=/imports/"
    assert "password" in visitor.get("/login/").content.decode()
    assert visitor.get("/api/jobs/").status_code == 401
    assert visitor.get("/api/schema/").status_code == 200
