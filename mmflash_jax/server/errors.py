"""Errors in the shape that OpenAI's clients read."""

import re
from typing import Any

from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse

KINDS = {400: "invalid_request_error", 401: "authentication_error", 404: "invalid_request_error"}
RETRY_AFTER_S = 1
_TYPE = re.compile(r"(str|int|float|bool)$|.*[\[\]]")


class APIError(Exception):
    """An error with the HTTP status that a client should see."""

    def __init__(self, status: int, message: str, *, param: str | None = None, code: Any = None):
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code

    def body(self) -> dict[str, Any]:
        client = self.status < 500
        kind = KINDS.get(self.status, "invalid_request_error" if client else "server_error")
        return {
            "error": {
                "message": self.message,
                "type": kind,
                "param": self.param,
                "code": self.code if self.code is not None else self.status,
            }
        }

    def response(self) -> JSONResponse:
        # Busy is the one error that the same request may get over by itself.
        retry = {"Retry-After": str(RETRY_AFTER_S)} if self.status in (429, 503) else None
        return JSONResponse(self.body(), status_code=self.status, headers=retry)


def from_validation(error: RequestValidationError) -> APIError:
    """The first fault of a request body, by the dotted name of its field."""
    first = error.errors()[0]
    # Alternatives of a union add names of types ("str", "list[int]"), which are no fields.
    place = [str(part) for part in first["loc"]]
    named = [part for part in place if part != "body" and not _TYPE.match(part)]
    field = ".".join(named) or None
    if first["type"] == "extra_forbidden":
        return APIError(400, f"{field} is not supported", param=field)
    message = first["msg"].removeprefix("Value error, ")
    return APIError(400, f"{field}: {message}" if field else message, param=field)
