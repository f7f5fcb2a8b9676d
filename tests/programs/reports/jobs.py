from django.contrib.auth import get_user_model
from django.core.files.base import ContentFile
from django.core.files.storage import default_storage

from durable_jobs.kinds import Done, Kind, register


@register
class YearReport(Kind):
    name = "reports.year"
    orphan_policy = "redrive"
    public_result = True

    def step(self, ctx):
        lines, total = ["month,accounts"], 0
        for month in range(1, 13):
            accounts = accounts_of(ctx.input["year"], month)
            lines.append(f"{month},{accounts}")
            total += accounts
            ctx.progress(processed=month, total=12)
        name = f"reports/{ctx.job.id}.csv"
        default_storage.delete(name)  # what a killed slice has left of it
        default_storage.save(name, ContentFile("\n".join(lines)))
        return Done({"file": name, "accounts": total})


def accounts_of(year, month):
    return get_user_model().objects.filter(date_joined__year=year, date_joined__month=month).count()
