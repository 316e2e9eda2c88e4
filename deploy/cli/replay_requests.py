"""Sends recorded requests to a server, several at a time, and measures how long the answers take.

A request is sent with the recorded seeds of its choices. If these cannot be expressed by one seed, as for several
prompts without a seed, each choice is sent as a request of its own. A chat is sent with the time at which it was
recorded, because some chat templates write the date.
"""

import json
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import msgspec

from deploy.cli.http_client import Server
from deploy.launcher.child_command import CliError
from shared.record import VERSION, RecordedRequest, older_files

# Compares two answers in any API format: all texts and numbers that depend only on the request and the model.
#
# Each path in the JSON of an answer gets its text, or its list of numbers. The events of a stream may cut a text
# anywhere, so the pieces at one path are joined over all events.

Part = str | tuple[str, ...]  # the value at a path: a text, or numbers
Parts = Mapping[str, Part]
# Fields that differ between two answers to the same request, or only say how a stream was cut.
NOT_COMPARED = frozenset({
    "id", "item_id", "call_id", "request_id", "object", "type", "role", "index", "sequence_number", "output_index",
    "content_index", "created", "created_at", "completed_at", "model", "system_fingerprint", "receipt", "usage",
    "timings", "seed", "done", "total_duration", "load_duration", "prompt_eval_count", "prompt_eval_duration",
    "eval_count", "eval_duration", "metadata", "user", "max_output_tokens", "tokens_cached", "prompt_progress",
    "e2e_latency", "prompt_tokens", "completion_tokens", "cached_tokens", "tokens_predicted", "tokens_evaluated",
    "stop", "id_slot",
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


OLLAMA = "/api/"
CONVERSATION = {"messages", "input"}  # fields with a conversation, in bodies of chats and of responses
VARIABLES = "chat_template_kwargs"
LATE_S = 1.0
SEEDS = 1 << 64


@dataclass(frozen=True, slots=True)
class Replayed:
    """The outcome of a replayed request. Times are in milliseconds. late_s: seconds by which it was sent too late"""

    request: RecordedRequest
    difference: Difference | None = None
    error: str = ""
    fingerprint: str = ""
    ttft_ms: float = 0.0
    total_ms: float = 0.0
    late_s: float = 0.0


def replay(
    server: Server,
    requests: Sequence[RecordedRequest],
    *,
    paced: bool,
    concurrency: int,
    on_done: Callable[[int], None] = lambda count: None,
) -> list[Replayed]:
    """Sends the requests, which are in the order of their arrival, and returns their outcomes.

    paced: whether requests keep their recorded intervals; else a request is sent as soon as another one has ended
    concurrency: how many requests run at a time
    on_done: called with the number of requests that have ended
    """
    begun, first = time.monotonic(), datetime.fromisoformat(requests[0].began)
    stopped = threading.Event()

    def run(request: RecordedRequest) -> Replayed:
        due = begun + (datetime.fromisoformat(request.began) - first).total_seconds() if paced else time.monotonic()
        stopped.wait(max(0.0, due - time.monotonic()))
        return replay_one(server, request, max(0.0, time.monotonic() - due))

    done: list[Replayed] = []
    with ThreadPoolExecutor(concurrency) as threads:
        try:
            for result in threads.map(run, requests):
                done.append(result)
                on_done(len(done))
        except BaseException:
            stopped.set()
            threads.shutdown(wait=False, cancel_futures=True)
            server.abort()
            raise
    return done


def replay_one(server: Server, request: RecordedRequest, late_s: float) -> Replayed:
    """Sends one request and compares its answer."""
    began = time.perf_counter()
    first_at, fingerprint, found = 0.0, "", dict[str, Part]()
    try:
        for choice, body in bodies_of(request):
            answer = server.ask(request.route, body)
            first_at = first_at or answer.first_at
            fingerprint = answer.headers.get("x-sluice-fingerprint", "")
            parts = parts_of(answer.text)
            found |= parts if choice is None else {_at(choice, path): part for path, part in parts.items()}
    except (CliError, FailedAnswer, ValueError) as error:
        return Replayed(request, error=str(error), late_s=late_s)
    ended = time.perf_counter()
    return Replayed(
        request, difference(parts_of(request.answer), found), "", fingerprint,
        1e3 * (first_at - began), 1e3 * (ended - began), late_s,
    )  # fmt: skip


def _at(choice: int, path: str) -> str:
    """Returns, for a path in the answer with one choice, the path in the whole answer, where the choice has the index
    `choice`. llama.cpp's answers have an index instead of `choices`."""
    if path.startswith("[0]"):
        return f"[{choice}]{path[3:]}"
    return path.replace("choices[0]", f"choices[{choice}]", 1)


def bodies_of(request: RecordedRequest) -> Iterator[tuple[int | None, dict[str, Any]]]:
    """Yields the bodies to send, each with the index of the choice that the body asks for; None: all choices."""
    body, seeds = with_time(request), request.seeds
    if all(seed == (seeds[0] + i % request.n) % SEEDS for i, seed in enumerate(seeds)):
        yield None, with_seed(request.route, body, seeds[0])
        return
    prompts = body.get("prompt") if len(seeds) > request.n else None
    for choice, seed in enumerate(seeds):
        own = {} if prompts is None else {"prompt": prompts[choice // request.n]}
        one = {name: value for name, value in body.items() if name not in ("n", "n_cmpl", "best_of")}
        yield choice, with_seed(request.route, one | own, seed)


def with_time(request: RecordedRequest) -> dict[str, Any]:
    """Returns the body with the recorded time for the chat template, if the route applies the template."""
    body: dict[str, Any] = request.request
    if not (request.route.startswith(OLLAMA) or body.keys() & CONVERSATION):
        return body
    return body | {VARIABLES: {"strftime_now": request.began} | (body.get(VARIABLES) or {})}


def with_seed(route: str, body: dict[str, Any], seed: int) -> dict[str, Any]:
    """Returns the body with a seed in the field where the route's API format expects it."""
    if route.startswith(OLLAMA):
        return body | {"options": (body.get("options") or {}) | {"seed": seed}}
    return body | {"seed": seed}


# Reads a record, as `--record FILE --record-text` writes it (shared/record.py).

BAD_FILE = 2  # the exit code
BEGIN = b'{"sluice_record":'  # how every line begins


@dataclass(frozen=True, slots=True)
class Record:
    """The requests that can be sent, in the order of their arrival.

    notes: sentences on requests that were left out
    """

    requests: Sequence[RecordedRequest]
    notes: Sequence[str]


def read_record(path: Path) -> Record:
    """Reads the file of a record, and its older files.

    Raises CliError, whose message names the file, if there is nothing to send.
    """
    requests: list[RecordedRequest] = []
    notes: list[str] = []
    for file in _files(path):
        found, notes_on_file = _read_file(file)
        requests += found
        notes += notes_on_file
    if not requests:
        raise CliError(f"{path} contains no complete line of a record", BAD_FILE)
    whole = [request for request in requests if request.request is not None]
    if not whole:
        raise CliError(f"{path} has only hashes: a record that can be replayed is made with --record-text", BAD_FILE)
    finished = [request for request in whole if request.outcome == "finished" and request.status == 200]
    counts = {
        "have no text": len(requests) - len(whole),
        "had not finished when they were recorded": len(whole) - len(finished),
        "are missing in the record, which could not be written in time": sum(request.lost for request in requests),
    }
    notes += [f"{count} requests {what}" for what, count in counts.items() if count]
    if not finished:
        raise CliError(f"{path} contains no request that had finished", BAD_FILE)
    return Record(sorted(finished, key=lambda request: datetime.fromisoformat(request.began)), notes)


def _files(path: Path) -> list[Path]:
    """Returns the files of a record, the oldest first. Raises CliError if there is none."""
    try:
        older = older_files(path)
        return [
            *(older[number] for number in sorted(older, reverse=True)),
            *([path] if path.exists() or not older else []),
        ]
    except OSError as error:
        raise CliError(f"{path} cannot be read: {error.strerror}", BAD_FILE) from error


def _read_file(path: Path) -> tuple[list[RecordedRequest], list[str]]:
    """Returns the requests of a file, and notes on incomplete lines, which a full disk or a killed process leaves."""
    try:
        # A complete line has a line end, so `rest` is empty or an incomplete line.
        *lines, rest = path.read_bytes().split(b"\n")
    except OSError as error:
        raise CliError(f"{path} cannot be read: {error.strerror}", BAD_FILE) from error
    notes = [f"the last line of {path} is incomplete and was left out"] if rest else []
    requests, torn = [], 0
    for number, line in enumerate(lines, 1):
        if line.startswith(BEGIN) and not _is_json(line):
            torn += 1
        elif line:
            requests.append(_read(path, number, line))
    if torn:
        notes.append(f"{torn} lines of {path} are incomplete and were left out")
    return requests, notes


def _is_json(line: bytes) -> bool:
    try:
        msgspec.json.decode(line, type=msgspec.Raw)
    except msgspec.DecodeError:
        return False
    return True


def _read(path: Path, number: int, line: bytes) -> RecordedRequest:
    try:
        request = msgspec.json.decode(line, type=RecordedRequest)
    except msgspec.DecodeError as error:
        raise CliError(
            f"line {number} of {path} is no line of a record, as --record writes them: {error}", BAD_FILE
        ) from error
    if request.sluice_record != VERSION:
        raise CliError(
            f"line {number} of {path} has version {request.sluice_record} of the format; this version of sluice reads "
            f"{VERSION}",
            BAD_FILE,
        )
    return request
