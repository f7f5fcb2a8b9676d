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
        mails = Mail.objects.filter(mailing=mailing).order_by("pk")
        ctx.progress(total=mails.count())
        while not ctx.should_yield():
            batch = list(mails.filter(state="sending")) or reserve(ctx, mails)
            if not batch:
                return Done()
            deliver(ctx, mailing, batch)
        return Yield()


def reserve(ctx, mails):
    """Write down whom we are about to mail, before anybody is."""
    with ctx.fenced():
        batch = list(mails.filter(state="queued")[:50])
        mails.filter(pk__in=[mail.pk for mail in batch]).update(state="sending")
    return batch


def deliver(ctx, mailing, batch):
    sent, refused = [], []
    try:
        for mail in batch:
            if ctx.stop.is_set():
                break
            try:
                provider.send(
                    mail.address, mailing.subject, mailing.text, key=ctx.effect_key("mail", mail.pk)
                )
            except provider.Refused:
                refused.append(mail.pk)
            else:
                sent.append(mail.pk)
    finally:  # whatever ends the loop, those who were mailed were mailed
        with ctx.fenced():
            Mail.objects.filter(pk__in=sent).update(state="sent")
            Mail.objects.filter(pk__in=refused).update(state="refused")
            ctx.save_checkpoint(advance=len(sent) + len(refused))


def start_mailing(mailing, created_by=None):
    """One job for each mailing, for ever: who starts it twice has sent it once."""
    return service.start(
        SendMailing,
        {"mailing": mailing.pk},
        subject=mailing,
        idempotency_key=f"mailing:{mailing.pk}",
        created_by=created_by,
    )
