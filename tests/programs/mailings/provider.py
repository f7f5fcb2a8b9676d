import json
from urllib.error import HTTPError
from urllib.request import Request, urlopen

from django.conf import settings

from durable_jobs.kinds import RetryAfter


class Refused(Exception):
    """The provider will never send this mail, such as to an address that does not exist."""


def send(address, subject, text, *, key):
    """Hand a mail to the provider, which sends one mail for each key, however often it is asked."""
    body = json.dumps({"to": address, "subject": subject, "text": text}).encode()
    headers = {"Content-Type": "application/json", "Idempotency-Key": key}
    try:
        urlopen(Request(settings.MAIL_API_URL, body, headers), timeout=30).close()
    except HTTPError as error:
        if error.code == 429:
            raise RetryAfter.from_header(error.headers["Retry-After"]) from error
        if error.code == 422:
            raise Refused from error
        raise
