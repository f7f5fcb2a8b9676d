"""The shop that the pages of docs speak of."""

from django.db import models


class Product(models.Model):
    supplier = models.PositiveIntegerField(default=7)
    cost = models.DecimalField(max_digits=8, decimal_places=2, default=1)
    price = models.DecimalField(max_digits=8, decimal_places=2, default=0)


class Order(models.Model):
    total = models.DecimalField(max_digits=8, decimal_places=2, default=1)
    state = models.CharField(max_length=20, default="open")
    problem = models.TextField(blank=True)


class Export(models.Model):
    status = models.CharField(max_length=20, default="queued")
    rows = models.PositiveIntegerField(default=0)
