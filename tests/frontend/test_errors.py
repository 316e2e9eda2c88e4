"""Errors and their HTTP status."""

import pytest

from frontend import errors

STATUSES = {
    errors.BadRequest: 400, errors.Unauthorized: 401, errors.Forbidden: 403, errors.NotFound: 404,
    errors.MethodNotAllowed: 405,
    errors.TooLarge: 413, errors.UnsupportedMediaType: 415, errors.Unprocessable: 422,
    errors.Internal: 500, errors.NotSupported: 501, errors.Overloaded: 503,
    errors.DeadlineExceeded: 504,
}  # fmt: skip


def test_every_error_has_its_status() -> None:
    defined = [kind for kind in errors.SluiceError.__subclasses__() if kind.__module__ == errors.__name__]
    assert {kind: kind.status for kind in defined} == STATUSES


@pytest.mark.parametrize("kind", STATUSES)
def test_error_message_is_its_text(kind: type[errors.SluiceError]) -> None:
    error = kind("broken")
    assert str(error) == error.message == "broken" and error.kind
