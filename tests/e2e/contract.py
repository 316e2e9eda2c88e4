"""Helpers for tests of the HTTP contract: a server with API keys, the smallest body of each format, and its answer."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import httpx

from tests.e2e.server import Server
from tests.patience import PATIENCE_S

LENGTH = 256  # the server's longest sequence
MOST_BYTES = 50_000  # largest request body
KEY = "sk-contract"
QUESTION = [{"role": "user", "content": "What is the capital of France?"}]
COMPLETIONS, CHAT, MESSAGES = "/v1/completions", "/v1/chat/completions", "/v1/messages"
OPENAI, ALL = (COMPLETIONS, CHAT), (COMPLETIONS, CHAT, MESSAGES)
LEAST: Mapping[str, dict[str, Any]] = {
    COMPLETIONS: {"model": "m", "prompt": "The capital of France is", "max_tokens": 24},
    CHAT: {"model": "m", "messages": QUESTION, "max_tokens": 24},
    MESSAGES: {"model": "m", "messages": QUESTION, "max_tokens": 24},
}
GREEDY = {"temperature": 0}
LONG = {**GREEDY, "ignore_eos": True}
HOT = {"temperature": 2.0, "seed": 5}  # so high a temperature that an answer shows whether unlikely tokens were cut off


@dataclass(frozen=True)
class Answer:
    """The parts that answers have in all API formats. told: the whole body of the answer"""

    text: str
    finish: str  # stop or length
    stop: str | int | None
    seed: int
    prompt: int
    tokens: int
    told: dict[str, Any]


def openais(told: dict[str, Any], choice: int = 0) -> Answer:
    one, usage = told["choices"][choice], told["usage"]
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
    text = one["text"] if "text" in one else one["message"]["content"]
    counts = usage["prompt_tokens"], usage["completion_tokens"]
    return Answer(text, one["finish_reason"], one["stop_reason"], one["seed"], *counts, told)


def anthropics(told: dict[str, Any]) -> Answer:
    usage = told["usage"]
    finish = {"end_turn": "stop", "stop_sequence": "stop", "max_tokens": "length"}[told["stop_reason"]]
    text = "".join(block["text"] for block in told["content"])
    counts = usage["input_tokens"], usage["output_tokens"]
    return Answer(text, finish, told["stop_sequence"], told["seed"], *counts, told)


@dataclass(frozen=True)
class Site:
    """The server, and the URL of its worker's metrics."""

    server: Server
    worker_metrics: str

    def post(self, route: str, body: dict[str, Any] | bytes, key: str = KEY) -> httpx.Response:
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        return self.server.client.post(route, content=content, headers={"Authorization": f"Bearer {key}"})

    def get(self, route: str) -> httpx.Response:
        """Sends a GET request on a new connection, so that any of the frontends may answer."""
        return httpx.get(self.server.url + route, headers={"X-Api-Key": KEY}, timeout=PATIENCE_S)

    def ask(self, route: str, fields: Mapping[str, Any]) -> Answer:
        said = self.post(route, LEAST[route] | dict(fields))
        assert said.status_code == 200, said.text
        return anthropics(said.json()) if route == MESSAGES else openais(said.json())


@dataclass(frozen=True)
class Row:
    """A row of the contract: on each of `routes`, `true` must accept the answers to `base` and to `base` + `fields`."""

    name: str
    routes: tuple[str, ...]
    base: dict[str, Any]
    fields: dict[str, Any]
    true: Callable[[Answer, Answer], bool]


def same(plain: Answer, changed: Answer) -> bool:
    return (changed.text, changed.finish, changed.tokens) == (plain.text, plain.finish, plain.tokens)


def other(plain: Answer, changed: Answer) -> bool:
    return changed.text != plain.text


def before_paris(plain: Answer, changed: Answer) -> bool:
    """The text ends before the stop string; usage counts the token that completed the stop string. Words are tokens."""
    whole = plain.text.startswith(changed.text + "Paris")
    return whole and changed.finish == "stop" and changed.tokens == len(changed.text.split()) + 1


def three_choices(plain: Answer, changed: Answer) -> bool:
    """The first choice is the answer with n=1, and each further choice has the next seed.

    Usage counts the prompt once.
    """
    choices = changed.told["choices"]
    asked = [choice["seed"] for choice in choices], [choice["index"] for choice in choices]
    return changed.text == plain.text and asked == ([5, 6, 7], [0, 1, 2]) and changed.prompt == plain.prompt


FIELDS = [
    Row("model left out", (CHAT,), GREEDY, {"model": None}, same),
    Row("max_tokens", ALL, LONG, {"max_tokens": 3}, lambda _, it: (it.tokens, it.finish) == (3, "length")),
    Row("no max_tokens", (COMPLETIONS,), LONG, {"max_tokens": None}, lambda _, it: it.tokens == 128),
    Row("no max_tokens", (CHAT,), LONG, {"max_tokens": None}, lambda _, it: it.prompt + it.tokens == LENGTH),
    Row("max_completion_tokens", (CHAT,), LONG, {"max_tokens": None, "max_completion_tokens": 3},
        lambda _, it: it.tokens == 3),
    Row("temperature is 1", ALL, {"seed": 3}, {"temperature": 1.0}, same),
    Row("temperature", ALL, {"seed": 3}, {"temperature": 2.0}, other),
    Row("top_p is 1", ALL, HOT, {"top_p": 1.0}, same),
    Row("top_p", ALL, HOT, {"top_p": 0.5}, other),
    Row("a small top_p", ALL, GREEDY, {**HOT, "top_p": 1e-6}, same),
    Row("top_k", ALL, HOT, {"top_k": 2}, other),
    Row("top_k of 1", ALL, GREEDY, {**HOT, "top_k": 1}, same),
    Row("min_p", OPENAI, HOT, {"min_p": 0.5}, other),
    Row("min_p of 1", OPENAI, GREEDY, {**HOT, "min_p": 1.0}, same),
    Row("repetition_penalty is 1", OPENAI, LONG, {"repetition_penalty": 1.0}, same),
    Row("repetition_penalty", OPENAI, LONG, {"repetition_penalty": 100.0}, other),
    Row("presence_penalty", OPENAI, {**LONG, "max_tokens": 100}, {"presence_penalty": 2.0}, other),
    Row("frequency_penalty", OPENAI, {**LONG, "max_tokens": 100}, {"frequency_penalty": 2.0}, other),
    Row("logit_bias", OPENAI, LONG, {"logit_bias": {"16": 100}, "max_tokens": 3}, lambda _, it: it.text == "..."),
    Row("seed", ALL, HOT, {"seed": 5}, same),
    Row("another seed", ALL, HOT, {"seed": 6}, lambda was, it: other(was, it) and it.seed == 6),
    Row("a told seed", ALL, {}, {"seed": None}, lambda was, it: was.seed != it.seed),
    Row("stop", OPENAI, GREEDY, {"stop": "Paris"}, before_paris),
    Row("many stops", OPENAI, GREEDY, {"stop": [*"0123456789#@%&*{}[]()<>", "Paris"]}, before_paris),
    Row("stop_sequences", (MESSAGES,), GREEDY, {"stop_sequences": ["Paris"]}, before_paris),
    Row("stop_token_ids", ALL, LONG, {"stop_token_ids": [16]}, lambda _, it: it.text.endswith("Paris.")),
    Row("ignore_eos", ALL, GREEDY, {"ignore_eos": True}, lambda _, it: (it.tokens, it.finish) == (24, "length")),
    Row("min_tokens", ALL, GREEDY, {"min_tokens": 15}, lambda was, it: was.tokens < 15 <= it.tokens),
    Row("n", OPENAI, HOT, {"n": 3}, three_choices),
    Row("timings", ALL, GREEDY, {"timings": True}, lambda was, it: same(was, it) and {
        "queue_ms", "prefill_ms", "decode_ms", "cached_tokens", "draft_tokens", "accepted_draft_tokens",
        "inter_token_p50_ms", "inter_token_p99_ms",
    } == set(it.told["timings"])),
    Row("no effect", ALL, GREEDY, {"user": "u", "metadata": {"a": "b"}, "store": False, "service_tier": "auto"}, same),
    Row("priority, deadline_ms", ALL, GREEDY, {"priority": -3, "deadline_ms": 60_000}, same),
    Row("stream_options", (MESSAGES,), GREEDY, {"stream_options": {"include_usage": True}}, same),
    Row("chat_template_kwargs", (CHAT, MESSAGES), GREEDY, {"chat_template_kwargs": {"x": 1}}, same),
    Row("what asks for nothing", (COMPLETIONS,), GREEDY, {"n": 1, "best_of": 1, "suffix": ""}, same),
    Row("response_format", OPENAI, GREEDY, {"response_format": {"type": "text"}}, same),
    Row("echo", (COMPLETIONS,), GREEDY, {"echo": True},
        lambda was, it: it.text == "The capital of France is" + was.text),
    Row("nothing but echo", (COMPLETIONS,), GREEDY, {"echo": True, "max_tokens": 0},
        lambda _, it: (it.text, it.tokens, it.finish) == ("The capital of France is", 0, "length")),
    Row("a prompt of ids", (COMPLETIONS,), GREEDY, {"prompt": [5, 6, 7]}, lambda _, it: it.prompt == 3),
    Row("several prompts", (COMPLETIONS,), {**GREEDY, "prompt": [5, 6]}, {"prompt": [[5, 6], "x"]},
        lambda was, it: same(was, openais(it.told | {"usage": was.told["usage"]})) and len(it.told["choices"]) == 2),
    Row("system", (MESSAGES,), GREEDY, {"system": [{"type": "text", "text": "Be brief."}]},
        lambda was, it: it.prompt > was.prompt),
    Row("roles and parts", (CHAT,), GREEDY, {"messages": [
        {"role": "system", "content": "Be brief."}, *QUESTION, {"role": "assistant", "content": "Paris."},
        {"role": "user", "content": [{"type": "text", "text": "And of"}, {"type": "text", "text": " Italy?"}]},
    ]}, lambda was, it: it.prompt > was.prompt),
]  # fmt: skip
