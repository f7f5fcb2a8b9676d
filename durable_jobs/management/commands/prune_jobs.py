"""`manage.py prune_jobs`: the same as `durable_jobs prune`."""

from durable_jobs.management.acts import ActCommand
from durable_jobs.management.acts.upkeep import Prune


class Command(ActCommand):
    act = Prune()
