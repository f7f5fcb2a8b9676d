import csv
import io

from django.core.exceptions import ValidationError
from django.db.models import F

from durable_jobs import service
from durable_jobs.kinds import BatchKind, StatusMirror, register

from .models import ImportRun, Product


@register
class ImportCsv(BatchKind):
    name = "imports.csv"
    queue = "imports"
    max_skipped = 1000
    mirror = StatusMirror(
        "imports.ImportRun",
        open=("queued", "running"),
        redriven="queued",
        completed="done",
        failed="failed",
        cancelled="cancelled",
    )

    def collection(self, ctx):
        run = ImportRun.objects.get(pk=ctx.input["run"])
        with run.file.open("rb") as raw:
            yield from csv.DictReader(io.TextIOWrapper(raw, "utf-8-sig", newline=""))

    def total(self, ctx):
        return sum(1 for _ in self.collection(ctx))

    def process(self, ctx, batch):
        products = {row["sku"]: checked_product(row) for row in batch}  # of two rows for one sku the later
        Product.objects.bulk_create(
            products.values(), update_conflicts=True, unique_fields=["sku"], update_fields=["name", "price"]
        )
        run = ImportRun.objects.filter(pk=ctx.input["run"])
        run.update(status="running", rows_done=F("rows_done") + len(batch))

    def on_item_error(self, ctx, item, error):
        return isinstance(error, ValidationError)


def checked_product(row):
    product = Product(sku=row["sku"], name=row["name"], price=row["price"])
    product.clean_fields()
    return product


def start_import(run, created_by=None):
    """One job for each run, and one run at a time for each supplier; raises LockKeyHeld."""
    return service.start(
        ImportCsv,
        {"run": run.pk},
        subject=run,
        idempotency_key=f"run:{run.pk}",
        lock_key=f"supplier:{run.supplier_id}",
        created_by=created_by,
    )
