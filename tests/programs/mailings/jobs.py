from durable_jobs import service
from durable_jobs.kinds import Done, Kind, Yield, register

from . import provider
from .models import Mail, Mailing


@register
class SendMailing(Kind):
    name = "mailings.send"
    queue = "mail"
    orphan_policy = "redrive"
    operator_note = "Sends e-mail. A redrive goes on with those who were not mailed yet."

    def step(self, ctx):
        mailing = Mailing.objects.get(pk=ctx.input["mailing"])
        mails = Mail.objects.filter(mailing=mailing)
        ctx.progress(total=mails.count())
        while mail := mails.filter(state__in=["queued", "sending"]).order_by("pk").first():
            if ctx.should_yield():
                return Yield()
            deliver(ctx, mailing, mail)
        return Done()


def deliver(ctx, mailing, mail):
    row = Mail.objects.filter(pk=mail.pk)
    if mail.state == "queued":
        with ctx.fenced():
            row.update(state="sending")  # before the provider hears of it
    try:
        provider.send(mail.address, mailing.subject, mailing.text, key=ctx.effect_key("mail", mail.pk))
        state = "sent"
    except provider.Refused:
        state = "refused"
    with ctx.fenced():
        row.update(state=state)
        ctx.save_checkpoint(advance=1)


def start_mailing(mailing, created_by=None):
    """One job for each mailing, for ever: who starts it twice has sent it once."""
    return service.start(
        SendMailing,
        {"mailing": mailing.pk},
        subject=mailing,
        idempotency_key=f"mailing:{mailing.pk}",
        created_by=created_by,
    )
