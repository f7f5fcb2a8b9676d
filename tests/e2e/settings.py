"""The tests' settings with a strict Content-Security-Policy: no inline script or style, nothing from elsewhere."""

from tests.settings import *  # noqa: F403
from tests.settings import MIDDLEWARE as _MIDDLEWARE

MIDDLEWARE = ["tests.e2e.policy.strict", *_MIDDLEWARE]
DEMO_PAUSE = 0.2
DEMO_BATCH_SIZE = 20
LANGUAGES = [("en", "English"), ("ar", "Arabic")]
