"""Sends recorded requests to a server, several at a time, and measures how long the answers take.

A request is sent with the recorded seeds of its choices. If these cannot be expressed by one seed, as for several
prompts without a seed, each choice is sent as a request of its own. A chat is sent with the time at which it was
recorded, because some chat templates write the date.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from deploy.cli.http_client import Server
from deploy.replay.answers import Difference, FailedAnswer, Part, difference, parts_of
from deploy.supervisor.child_command import CliError
from shared.logs.record import RecordedRequest

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

    def run(request: RecordedRequest) -> Replayed:
        due = begun + (datetime.fromisoformat(request.began) - first).total_seconds() if paced else time.monotonic()
        time.sleep(max(0.0, due - time.monotonic()))
        return replay_one(server, request, max(0.0, time.monotonic() - due))

    done: list[Replayed] = []
    with ThreadPoolExecutor(concurrency) as threads:
        try:
            for result in threads.map(run, requests):
                done.append(result)
                on_done(len(done))
        except BaseException:
            threads.shutdown(wait=False, cancel_futures=True)
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
