"""Compares two answers in any API format: all texts and numbers that depend only on the request and the model.

Each path in the JSON of an answer gets its text, or its list of numbers. The events of a stream may cut a text
anywhere, so the pieces at one path are joined over all events.
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

Part = str | tuple[str, ...]  # the value at a path: a text, or numbers
Parts = Mapping[str, Part]

# Fields that differ between two answers to the same request, or only say how a stream was cut.
NOT_COMPARED = frozenset({
    "id", "item_id", "call_id", "request_id", "object", "type", "role", "index", "sequence_number", "output_index",
    "content_index", "created", "created_at", "completed_at", "model", "system_fingerprint", "receipt", "usage",
    "timings", "seed", "done", "total_duration", "load_duration", "prompt_eval_count", "prompt_eval_duration",
    "eval_count", "eval_duration", "metadata", "user", "max_output_tokens", "tokens_cached", "prompt_progress",
})  # fmt: skip


@dataclass(frozen=True, slots=True)
class Difference:
    """The place where two answers begin to differ: a path, and the index of the first different character or number."""

    path: str
    position: int
    recorded: Part
    replayed: Part


class FailedAnswer(Exception):
    """A stream ended with an error. The message is the server's message."""


def parts_of(answer: str) -> dict[str, Part]:
    """Returns path → value of an answer. Raises FailedAnswer for an error, ValueError for text that is not JSON."""
    texts: dict[str, list[str]] = {}
    numbers: dict[str, list[str]] = {}
    for event in _events(answer):
        kind = event.get("type")
        if error := event.get("error"):
            raise FailedAnswer(str(error.get("message") or error) if isinstance(error, dict) else str(error))
        _add(texts, numbers, kind if isinstance(kind, str) and kind != "message" else "", event)
    joined = {path: "".join(pieces) for path, pieces in texts.items()}
    return joined | {path: tuple(found) for path, found in numbers.items()}


def _events(answer: str) -> Iterator[dict[str, Any]]:
    """Yields the objects of server-sent events, of lines of JSON, or of one JSON text, which may be an array."""
    try:
        whole = json.loads(answer)
    except ValueError:
        pass
    else:
        yield from whole if isinstance(whole, list) else [whole]
        return
    for line in answer.split("\n"):
        data = line.removeprefix("data:").strip()
        if data.startswith("{"):
            yield json.loads(data)


def _add(texts: dict[str, list[str]], numbers: dict[str, list[str]], path: str, value: Any) -> None:
    match value:
        case dict():
            index = value.get("index")
            here = f"{path}[{index}]" if isinstance(index, int) else path
            for name, inner in value.items():
                if name not in NOT_COMPARED:
                    _add(texts, numbers, f"{here}.{name}" if here else name, inner)
        case list():
            for inner in value:
                _add(texts, numbers, path, inner)
        case str():
            texts.setdefault(path, []).append(value)
        case int() | float():
            numbers.setdefault(path, []).append(repr(value))


def difference(recorded: Parts, replayed: Parts) -> Difference | None:
    """Returns the first difference in the order of the recorded paths; None if all values are equal.

    A path that only the replayed answer has is no difference, because a newer version may report more.
    """
    for path, one in recorded.items():
        other = replayed.get(path, "")
        if one != other:
            cut = min(len(one), len(other))
            position = next((i for i in range(cut) if one[i] != other[i]), cut)
            return Difference(path, position, one, other)
    return None
