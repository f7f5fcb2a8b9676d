"""A kind of tasks of the project's own: tried again after every error, and after a worker's death."""

from durable_jobs.exceptions import ErrorClass
from durable_jobs.kinds import Retry, register
from durable_jobs.tasks.kind import TaskKind


@register
class PatientTask(TaskKind):
    name = "tests.patient_task"
    orphan_policy = "redrive"
    lease_seconds = 1
    retry = Retry(failures=3, first_delay=0, longest_delay=0)

    def classify(self, error: BaseException) -> ErrorClass:
        return ErrorClass.TRANSIENT
