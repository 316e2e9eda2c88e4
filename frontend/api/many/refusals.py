"""The errors of requests for one of many models, and the field `keep_alive`."""

from frontend.errors import BadRequest, Overloaded, Unprocessable
from shared.models.durations import seconds_of
from shared.models.messages import ModelState

RETRY_S = 10.0  # time after a failed load in which requests are refused without another attempt to load


def seconds_of_field(keep_alive: object) -> float | None:
    if keep_alive is None:
        return None
    try:
        if isinstance(keep_alive, bool) or not isinstance(keep_alive, str | int | float):
            raise ValueError("must be a duration like 300, 90s, 10m or -1")
        return seconds_of(keep_alive)
    except (ValueError, OverflowError) as error:
        raise BadRequest(f"`keep_alive` {error}", param="keep_alive", code="out_of_range") from None


def absent(name: str) -> Unprocessable:
    return Unprocessable(f"`model`: the model `{name}` does not exist", param="model", code="model_not_found")


def asleep() -> Overloaded:
    return Overloaded("the server sleeps; POST /wake_up wakes it", code="asleep", retry_after=RETRY_S)


def failure(state: ModelState) -> Overloaded:
    text = f"the model `{state.name}` cannot be loaded: {state.reason}"
    return Overloaded(text, code="model_failed", retry_after=RETRY_S)
