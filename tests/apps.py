import os
import threading
import time

from django.apps import AppConfig

PARENT_VARIABLE = "DURABLE_JOBS_TEST_PARENT"


class TestsConfig(AppConfig):
    name = "tests"
    label = "tests"
    default_auto_field = "django.db.models.BigAutoField"

    def ready(self) -> None:
        if PARENT_VARIABLE in os.environ:
            parent = int(os.environ[PARENT_VARIABLE])
            threading.Thread(target=end_with, args=[parent], name="tests-parent", daemon=True).start()


def end_with(parent: int) -> None:
    """End this process when the pytest run that started it was killed."""
    while True:
        try:
            os.kill(parent, 0)
        except ProcessLookupError:
            os._exit(1)
        time.sleep(0.5)
