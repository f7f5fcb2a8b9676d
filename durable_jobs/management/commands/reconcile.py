"""`manage.py reconcile`: the same as `durable_jobs reconcile`."""

from durable_jobs.management.acts import ActCommand
from durable_jobs.management.acts.upkeep import Reconcile


class Command(ActCommand):
    act = Reconcile()
