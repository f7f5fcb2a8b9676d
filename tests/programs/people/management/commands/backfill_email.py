from django.core.management.base import BaseCommand

from durable_jobs import service

from ...jobs import BackfillEmail


class Command(BaseCommand):
    help = "Normalize the e-mail addresses that are not yet normalized."

    def handle(self, **options):
        job, created = service.start(BackfillEmail, lock_key="people.backfill_email", if_locked="return")
        self.stdout.write(f"{'Started' if created else 'At work already'}: job {job.id}")
