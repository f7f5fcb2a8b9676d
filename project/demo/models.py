"""The airports, the imports that bring them, and a ledger of what each import has applied."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import BinaryIO

from django.conf import settings
from django.core.exceptions import ValidationError
from django.core.validators import MaxValueValidator, MinValueValidator
from django.db import models
from django.utils.translation import gettext_lazy as _


def finite(value: float) -> None:
    """Refuse NaN and infinities, which a text may stand for."""
    if not math.isfinite(value):
        raise ValidationError(_("This is not a finite number."), code="finite")


class ImportRun(models.Model):
    """One import: the row that a person looks at. Its job keeps `status` in step, whatever becomes of it."""

    class Source(models.TextChoices):
        AIRPORTS = "airports", _("the world's airports")
        CSV = "csv", _("an uploaded CSV file")

    class Status(models.TextChoices):
        QUEUED = "queued", _("queued")
        RUNNING = "running", _("running")
        DONE = "done", _("done")
        FAILED = "failed", _("failed")
        CANCELLED = "cancelled", _("cancelled")

    source = models.CharField(_("source"), max_length=10, choices=Source)
    file = models.FileField(_("file"), upload_to="imports/", blank=True)
    status = models.CharField(_("status"), max_length=10, choices=Status, default=Status.QUEUED)
    rows_done = models.PositiveIntegerField(_("rows done"), default=0)
    rows_skipped = models.PositiveIntegerField(_("rows skipped"), default=0)
    created_by = models.ForeignKey(
        settings.AUTH_USER_MODEL,
        models.SET_NULL,
        null=True,
        blank=True,
        related_name="+",
        verbose_name=_("created by"),
    )
    created_at = models.DateTimeField(_("created at"), auto_now_add=True)
    by_demo = models.BooleanField(default=False, editable=False)
    """Made by `manage.py demo`, which clears its own earlier rows away."""

    class Meta:
        ordering = ("-pk",)
        verbose_name = _("import")
        verbose_name_plural = _("imports")

    def __str__(self) -> str:
        return f"Import {self.pk} of {self.get_source_display()}"

    @contextmanager
    def opened(self) -> Iterator[BinaryIO]:
        """The uploaded file's bytes."""
        with self.file.open("rb") as file:
            yield file.file


class Airport(models.Model):
    """An airport as the last import that knew it wrote it."""

    icao = models.CharField(_("ICAO code"), max_length=10, unique=True)
    iata = models.CharField(_("IATA code"), max_length=3, blank=True)
    name = models.CharField(_("name"), max_length=200)
    city = models.CharField(_("city"), max_length=100, blank=True)
    subdivision = models.CharField(_("state or region"), max_length=100, blank=True)
    country = models.CharField(_("country"), max_length=2)
    elevation = models.FloatField(_("elevation (feet)"), default=0.0, validators=[finite])
    latitude = models.FloatField(
        _("latitude"), validators=[finite, MinValueValidator(-90), MaxValueValidator(90)]
    )
    longitude = models.FloatField(
        _("longitude"), validators=[finite, MinValueValidator(-180), MaxValueValidator(180)]
    )
    time_zone = models.CharField(_("time zone"), max_length=50, blank=True)
    local_code = models.CharField(_("local code"), max_length=10, blank=True)
    last_run = models.ForeignKey(
        ImportRun,
        models.SET_NULL,
        null=True,
        editable=False,
        related_name="airports",
        verbose_name=_("last import"),
    )

    class Meta:
        ordering = ("icao",)
        verbose_name = _("airport")
        verbose_name_plural = _("airports")

    def __str__(self) -> str:
        return f"{self.icao} {self.name}"


class ImportBatch(models.Model):
    """One committed batch of an import. Appended in the batch's own transaction, and nothing forbids a second
    line for the same rows: so work that was repeated would show."""

    run = models.ForeignKey(ImportRun, models.CASCADE, related_name="batches")
    first = models.CharField(max_length=10)
    rows = models.PositiveIntegerField()
    lease_epoch = models.BigIntegerField()
    """Under which lease of the job it was committed: a killed worker's batches have another than its heir's."""

    class Meta:
        default_permissions = ("view",)


class ImportedRow(models.Model):
    """One row that a batch applied; a row applied twice would be here twice."""

    batch = models.ForeignKey(ImportBatch, models.CASCADE, related_name="applied")
    icao = models.CharField(max_length=10)

    class Meta:
        default_permissions = ("view",)
