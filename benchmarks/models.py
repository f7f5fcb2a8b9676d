"""A row of the project, for kinds whose ends it follows."""

from __future__ import annotations

import uuid

from django.db import models


class Thing(models.Model):
    id = models.UUIDField(primary_key=True, default=uuid.uuid4)
    status = models.CharField(max_length=10, default="open")
    count = models.IntegerField(default=0)
