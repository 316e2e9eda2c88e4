"""What of an answer is compared: all texts and numbers that the request and the model decide, in any API format.

An answer becomes a text for each path in its JSON. The events of a stream may cut the text anywhere, so the texts at
one path are joined over all events.
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

Parts = Mapping[str, str]

# Names of what differs between two answers to the same request, or only says how a stream was cut.
NOT_COMPARED = frozenset({
    "id", "item_id", "call_id", "request_id", "object", "type", "role", "index", "sequence_number", "output_index",
    "content_index", "created", "created_at", "completed_at", "model", "system_fingerprint", "receipt", "usage",
    "timings", "seed", "done", "total_duration", "load_duration", "prompt_eval_count", "prompt_eval_duration",
    "eval_count", "eval_duration", "metadata", "user", "max_output_tokens",
})  # fmt: skip


@dataclass(frozen=True, slots=True)
class Difference:
    """Where two answers begin to differ: at this character of the text at this path."""

    path: str
    position: int
    recorded: str
    replayed: str


class FailedAnswer(Exception):
    """A stream ended with an error; the message is the server's."""


def parts_of(answer: str) -> dict[str, str]:
    """Returns the texts of an answer by path. Raises FailedAnswer for an error, ValueError for what is no JSON."""
    parts: dict[str, list[str]] = {}
    for event in _events(answer):
        kind = event.get("type")
        if error := event.get("error"):
            raise FailedAnswer(str(error.get("message") or error) if isinstance(error, dict) else str(error))
        _add(parts, kind if isinstance(kind, str) and kind != "message" else "", event)
    return {path: "".join(pieces) for path, pieces in parts.items()}


def _events(answer: str) -> Iterator[dict[str, Any]]:
    """Yields the objects of server-sent events, of lines of JSON, or of one JSON text."""
    try:
        whole = json.loads(answer)
    except ValueError:
        pass
    else:
        yield whole
        return
    for line in answer.split("\n"):
        data = line.removeprefix("data:").strip()
        if data.startswith("{"):
            yield json.loads(data)


def _add(parts: dict[str, list[str]], path: str, value: Any) -> None:
    match value:
        case dict():
            index = value.get("index")
            here = f"{path}[{index}]" if isinstance(index, int) else path
            for name, inner in value.items():
                if name not in NOT_COMPARED:
                    _add(parts, f"{here}.{name}" if here else name, inner)
        case list():
            for inner in value:
                _add(parts, path, inner)
        case str():
            parts.setdefault(path, []).append(value)
        case int() | float():
            parts.setdefault(path, []).append(f"{value!r},")


def difference(recorded: Parts, replayed: Parts) -> Difference | None:
    """Returns where the first of the recorded texts differs; None if all are equal.

    Paths that only the replayed answer has are no difference: another version may tell more.
    """
    for path, text in recorded.items():
        other = replayed.get(path, "")
        if text != other:
            cut = min(len(text), len(other))
            position = next((i for i in range(cut) if text[i] != other[i]), cut)
            return Difference(path, position, text, other)
    return None
