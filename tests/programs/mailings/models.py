from django.db import models


class Mailing(models.Model):
    subject = models.CharField(max_length=200)
    text = models.TextField()


class Mail(models.Model):
    class State(models.TextChoices):
        QUEUED = "queued"
        SENDING = "sending"
        SENT = "sent"
        REFUSED = "refused"

    mailing = models.ForeignKey(Mailing, models.CASCADE)
    address = models.EmailField()
    state = models.CharField(max_length=8, choices=State, default=State.QUEUED)

    class Meta:
        constraints = [models.UniqueConstraint(fields=["mailing", "address"], name="one_mail_per_address")]
        indexes = [
            models.Index(
                fields=["mailing", "id"],
                condition=models.Q(state__in=["queued", "sending"]),
                name="mails_to_send",
            )
        ]
