"""JSON as it comes in: what cannot be stored or answered is refused here, before anything reads it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import IO, Any

from django.conf import settings
from rest_framework import status
from rest_framework.exceptions import APIException, ParseError
from rest_framework.parsers import BaseParser


class TooLarge(APIException):
    """The body has more bytes than DATA_UPLOAD_MAX_MEMORY_SIZE."""

    status_code = status.HTTP_413_REQUEST_ENTITY_TOO_LARGE
    default_detail = "The body is too large."
    default_code = "too_large"


class JSONParser(BaseParser):
    """JSON in UTF-8. NaN, infinities, lone surrogates, twice the same name and bottomless nesting are errors."""

    media_type = "application/json"

    def parse(
        self,
        stream: IO[bytes],
        media_type: str | None = None,
        parser_context: Mapping[str, Any] | None = None,
    ) -> Any:
        """The value of the body; raises `ParseError` and `TooLarge`."""
        most = settings.DATA_UPLOAD_MAX_MEMORY_SIZE
        body = stream.read() if most is None else stream.read(most + 1)
        if most is not None and len(body) > most:
            raise TooLarge
        try:
            value = json.loads(body.decode(), parse_constant=_refuse, object_pairs_hook=_object)
            # Escapes may hide half of a character, which no answer could hold.
            json.dumps(value, ensure_ascii=False).encode()
        except RecursionError:
            raise ParseError("The JSON is nested too deeply.") from None
        except ValueError as error:
            raise ParseError(
                f"This is no JSON: {str(error)[:200]}".encode("utf-8", "replace").decode()
            ) from None
        return value


def _refuse(constant: str) -> Any:
    raise ValueError(f"{constant} is no number")


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) != len(pairs):
        raise ValueError("an object has the same name twice")
    return made
