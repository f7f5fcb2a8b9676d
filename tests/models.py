"""Rows that the tests' kinds work on."""

from __future__ import annotations

import uuid

from django.db import models


class Depot(models.Model):
    """A parcel's place; its own ordering is there to be met through the relation."""

    name = models.CharField(max_length=40, null=True)

    class Meta:
        ordering = ("name",)


class Parcel(models.Model):
    """A row with columns of many types to be read in order, and marks that batches leave on it."""

    depot = models.ForeignKey(Depot, models.CASCADE, null=True)
    label = models.CharField(max_length=40, default="")
    rank = models.IntegerField(null=True)
    weight = models.DecimalField(max_digits=9, decimal_places=3, default=0)
    sent_at = models.DateTimeField(null=True)
    rate = models.FloatField(default=0)
    done = models.PositiveIntegerField(default=0)


class Token(models.Model):
    """A row whose key says nothing about when it came."""

    id = models.UUIDField(primary_key=True, default=uuid.uuid4)
    done = models.PositiveIntegerField(default=0)


class Shipment(models.Model):
    """A project's own row that must agree with its job."""

    class Status(models.TextChoices):
        QUEUED = "queued"
        MOVING = "moving"
        ARRIVED = "arrived"
        LOST = "lost"
        STOPPED = "stopped"

    status = models.CharField(max_length=10, choices=Status, default=Status.QUEUED, editable=False)
    note = models.CharField(max_length=40, default="")


class Leg(models.Model):
    """A row whose key is made of two columns."""

    pk = models.CompositePrimaryKey("route", "number")
    route = models.CharField(max_length=10)
    number = models.IntegerField()
    done = models.PositiveIntegerField(default=0)


class Crate(Parcel):
    """A row in two tables."""

    size = models.IntegerField(default=0)
