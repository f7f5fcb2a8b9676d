"""What the soak's jobs write, so that it can be counted afterwards. Nothing here is unique: a second row is evidence."""

from __future__ import annotations

from django.db import models


class Order(models.Model):
    """The project's own row; `applied` counts what was applied for it."""

    class Status(models.TextChoices):
        WAITING = "waiting"
        MOVING = "moving"
        DONE = "done"
        FAILED = "failed"
        STOPPED = "stopped"

    status = models.CharField(max_length=10, choices=Status, default=Status.WAITING)
    applied = models.IntegerField(default=0)


class Applied(models.Model):
    """One item, written inside the fence: by which lease, and when by the database's clock."""

    job_id = models.UUIDField(db_index=True)
    number = models.IntegerField()
    owner = models.TextField()
    epoch = models.BigIntegerField()
    at = models.DateTimeField()


class Sent(models.Model):
    """One effect outside the fence; a repeat carries the same key."""

    job_id = models.UUIDField()
    key = models.TextField()
