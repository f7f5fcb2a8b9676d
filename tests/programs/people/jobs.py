from durable_jobs.kinds import BatchKind, register

from .models import Person


@register
class BackfillEmail(BatchKind):
    name = "people.backfill_email"
    batch_size = 2000
    lock_rows = True
    passes = "until_empty"
    max_skipped = 1000

    def collection(self, ctx):
        return Person.objects.filter(email_normalized=None)

    def before_batch(self, ctx, batch):
        ctx.stop.wait(len(batch) / 20_000)  # at most 20,000 rows a second

    def process(self, ctx, batch):
        for person in batch:
            person.email_normalized = normalized(person.email)
        Person.objects.bulk_update(batch, ["email_normalized"])

    def on_item_error(self, ctx, item, error):
        return isinstance(error, UnicodeError)


def normalized(email):
    name, at, domain = email.strip().lower().rpartition("@")
    return name + at + domain.encode("idna").decode()
