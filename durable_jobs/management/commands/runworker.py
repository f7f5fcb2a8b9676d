"""`manage.py runworker`: the same as `durable_jobs worker`."""

from durable_jobs.management.acts import ActCommand
from durable_jobs.management.acts.working import Work


class Command(ActCommand):
    act = Work()
