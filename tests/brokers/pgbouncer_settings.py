"""The tests' settings as a project behind PgBouncer in transaction mode has them."""

from tests.settings import *  # noqa: F403
from tests.settings import DATABASES

DATABASES["default"]["DISABLE_SERVER_SIDE_CURSORS"] = True
