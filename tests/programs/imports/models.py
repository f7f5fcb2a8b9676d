from pathlib import Path

from django.core.files.base import ContentFile
from django.db import models


class Supplier(models.Model):
    name = models.CharField(max_length=100)
    nightly_file = models.CharField(max_length=500, blank=True, help_text="Where the supplier drops it.")

    def __str__(self):
        return self.name

    def fetch(self):
        return ContentFile(Path(self.nightly_file).read_bytes(), name="nightly.csv")


class ImportRun(models.Model):
    class Status(models.TextChoices):
        QUEUED = "queued"
        RUNNING = "running"
        DONE = "done"
        FAILED = "failed"
        CANCELLED = "cancelled"

    supplier = models.ForeignKey(Supplier, models.PROTECT)
    file = models.FileField(upload_to="imports/")
    night = models.DateField(null=True, blank=True)
    status = models.CharField(max_length=10, choices=Status, default=Status.QUEUED)
    rows_done = models.PositiveIntegerField(default=0)

    class Meta:
        constraints = [models.UniqueConstraint(fields=["supplier", "night"], name="one_run_per_night")]


class Product(models.Model):
    sku = models.CharField(max_length=40, unique=True)
    name = models.CharField(max_length=200)
    price = models.DecimalField(max_digits=10, decimal_places=2)
