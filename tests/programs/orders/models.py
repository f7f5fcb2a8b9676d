from django.db import models


class Order(models.Model):
    ref = models.CharField(max_length=40, unique=True)
    total = models.DecimalField(max_digits=10, decimal_places=2)
