"""Adds data of optional features to the last delta: ids for a receipt, a vector, or a prompt's scores."""

from frontend.features import Features
from frontend.generation.choice import Choice, Extra
from frontend.request import Delta


def endings(features: Features) -> list[Extra]:
    """Returns the extras for the requested features."""
    asked = (
        (features.receipt, _output), (features.pooling, _vector), (features.scored, _scores),
        (features.predicted is not None, _predicted),
    )  # fmt: skip
    return [extra for wanted, extra in asked if wanted]


def _output(choice: Choice, delta: Delta) -> None:
    if delta.finish is not None:
        delta.add().output = choice.stream.output[: choice.text.consumed]


def _vector(choice: Choice, delta: Delta) -> None:
    if delta.finish is not None:
        delta.add().vector = choice.stream.vector


def _scores(choice: Choice, delta: Delta) -> None:
    if delta.finish is not None:
        delta.add().scores = choice.logprobs


def _predicted(choice: Choice, delta: Delta) -> None:
    if delta.finish is not None:
        end = choice.stream.end
        delta.add().predicted = (0, 0) if end is None or end.predicted is None else end.predicted
