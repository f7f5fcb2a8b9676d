from django.core.management.base import BaseCommand, CommandError
from django.db import transaction
from django.utils import timezone

from durable_jobs.exceptions import LockKeyHeld

from ...jobs import start_import
from ...models import ImportRun, Supplier


class Command(BaseCommand):
    help = "Start tonight's imports. Call it as often as you like: what is started already stays as it is."

    def handle(self, **options):
        night, problems = timezone.localdate(), []
        for supplier in Supplier.objects.exclude(nightly_file=""):
            try:
                with transaction.atomic():
                    run, _ = ImportRun.objects.get_or_create(
                        supplier=supplier, night=night, defaults={"file": supplier.fetch}
                    )
                    _, created = start_import(run)
            except (LockKeyHeld, OSError) as problem:
                problems.append(f"{supplier}: {problem}")
            else:
                self.stdout.write(f"{supplier}: {'started' if created else 'there already'}")
        if problems:
            raise CommandError("\n".join(problems))
