"""Errors with their HTTP status. The middleware turns them into responses, in the format of the API.

`/v1/completions` uses an error's own status. The other routes follow the APIs of OpenAI and Anthropic, which do not use
422 (`api_status`).
"""

from typing import Any, Self


class SluiceError(Exception):
    """The base of all errors that a client sees.

    kind: the error type in OpenAI's format
    code: a machine-readable reason
    """

    status = 500
    kind = "internal_error"

    def __init__(
        self, message: str, *, param: str | None = None, code: str | None = None, retry_after: float | None = None
    ) -> None:
        message = message.encode(errors="backslashreplace").decode()  # a template's message may have a lone surrogate
        super().__init__(message)
        self.message = message
        self.param = param
        self.code = code
        self.retry_after = retry_after

    def renamed(self, name: str, param: str) -> Self:
        """Returns this error with the field `param` instead of `name`, in its text, too."""
        if self.param == name:
            self.message, self.param = self.message.replace(f"`{name}`", f"`{param}`", 1), param
            self.args = (self.message,)
        return self


class BadRequest(SluiceError):
    """The body is not JSON, a value has the wrong type, or a prompt is empty."""

    status = 400
    kind = "invalid_request_error"


class Unauthorized(SluiceError):
    status = 401
    kind = "authentication_error"


class Forbidden(SluiceError):
    """A page of another site sent the request, or the route needs a server with API keys or another setting."""

    status = 403
    kind = "permission_error"


class NotFound(SluiceError):
    status = 404
    kind = "not_found_error"


class MethodNotAllowed(SluiceError):
    """The route does not accept the method. `allow` lists the methods that it accepts."""

    status = 405
    kind = "not_found_error"

    def __init__(self, message: str, allow: str = "") -> None:
        super().__init__(message)
        self.allow = allow


class TooLarge(SluiceError):
    status = 413
    kind = "invalid_request_error"


class UnsupportedMediaType(SluiceError):
    """The headers say that the body is of another type than the route takes, or of an unknown content coding."""

    status = 415
    kind = "invalid_request_error"


class Unprocessable(SluiceError):
    """The request is well-formed but not acceptable: out of range, unknown field or model, too long."""

    status = 422
    kind = "invalid_request_error"


class UnknownModel(Unprocessable):
    """No model here has the name that the request states."""

    def __init__(self, message: str, *, name: str = "", **more: Any) -> None:
        super().__init__(message, **more)
        self.name = name


def unknown_model(name: str, served: str = "") -> UnknownModel:
    """Returns the error for a name that no model has. served: the name of the served model, if there is one alone"""
    only = served and f"; this server serves `{served}`"
    return UnknownModel(
        f"`model`: the model `{name}` does not exist{only}", name=name, param="model", code="model_not_found"
    )


class ContextLengthExceeded(Unprocessable):
    """The prompt, or the prompt together with the requested tokens, is longer than the model's context.

    prompt: the number of prompt tokens, or a lower bound of it if `at_least`
    output: the number of requested tokens; 0 if the prompt alone is too long
    limit: the longest possible sequence, in tokens
    """

    def __init__(
        self, message: str, *, prompt: int = 0, output: int = 0, limit: int = 0, at_least: bool = False, **more: Any
    ) -> None:
        super().__init__(message, **more)
        self.prompt, self.output, self.limit, self.at_least = prompt, output, limit, at_least


class Overloaded(SluiceError):
    """The queue is full, the server drains, or there is no worker. `retry_after` is in seconds."""

    status = 503
    kind = "overloaded_error"


class NotSupported(SluiceError):
    """The model cannot do what the route or a field needs, or the module for it is missing."""

    status = 501
    kind = "not_supported_error"


class Internal(SluiceError):
    """A fault of the frontend or the worker: a step raised an exception, or a stream could not be repaired."""


class DeadlineExceeded(SluiceError):
    """The request did not end within its `deadline_ms`."""

    status = 504
    kind = "timeout_error"


def own_status(error: SluiceError) -> int:
    return error.status


def api_status(error: SluiceError) -> int:
    """Returns the status of an error in OpenAI's and Anthropic's APIs: 404 for an unknown model, and 400 for everything
    else that is 422 here."""
    if error.code == "model_not_found":
        return 404
    return 400 if isinstance(error, Unprocessable) else error.status
