"""Speculative decoding changes no byte of an answer, for every way of sampling and ending, and with a killed worker."""

import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import pytest

from deploy.launcher.child_command import DEMO_MODEL
from tests.checkpoints import VOCAB, Checkpoints
from tests.e2e.server import Server, serving
from tests.patience import PATIENCE_S
from tests.worker.spec_decode.eagle_heads import EAGLES, Eagle
from tests.worker.spec_decode.heads import with_head

STORY = "Once upon a time there was a little dog. The little dog was happy. Once upon a time there was a"
COUNT = "1, 2, 3, 4, 5, 6, 7, 8, 9, 10. 1, 2, 3, 4, 5,"
LETTER = {
    "type": "object", "required": ["kind", "text"], "additionalProperties": False,
    "properties": {"kind": {"enum": ["a short story", "a long letter"]}, "text": {"type": "string", "maxLength": 90}},
}  # fmt: skip
BODIES: list[dict[str, Any]] = [
    {"prompt": STORY, "temperature": 0, "max_tokens": 160, "ignore_eos": True},
    {"prompt": STORY, "temperature": 0, "max_tokens": 300},
    *({"prompt": STORY, "temperature": 1, "seed": seed, "max_tokens": 100, "ignore_eos": True} for seed in range(4)),
    {"prompt": STORY, "temperature": 0.5, "top_p": 0.9, "top_k": 20, "min_p": 0.02, "seed": 9, "max_tokens": 100},
    {"prompt": [STORY, COUNT, "The"], "n": 3, "seed": 3, "temperature": 0.4, "max_tokens": 50},
    {"prompt": COUNT, "temperature": 0, "max_tokens": 200, "ignore_eos": True, "stop": [" 9, 1", "zzz"]},
    {"prompt": STORY, "temperature": 0, "max_tokens": 200, "min_tokens": 60, "stop": "happy"},
    {"prompt": STORY, "temperature": 0, "max_tokens": 200, "min_tokens": 60, "stop_token_ids": list(range(300, 340))},
    {"prompt": STORY, "temperature": 0, "max_tokens": 90, "ignore_eos": True, "logit_bias": {"290": 4, "300": -100}},
    {"prompt": COUNT, "temperature": 0, "max_tokens": 60, "echo": True, "ignore_eos": True},
    {"prompt": COUNT, "temperature": 0, "max_tokens": 60, "logprobs": 3, "echo": True},
    {"prompt": COUNT, "temperature": 0.7, "seed": 1, "max_tokens": 60, "logprobs": 2},
    {"prompt": COUNT, "temperature": 0, "max_tokens": 60, "repetition_penalty": 1.2, "frequency_penalty": 0.1},
    *({"prompt": COUNT, "temperature": 0, "max_tokens": count, "ignore_eos": True} for count in (1, 2, 3, 17)),
    {"prompt": COUNT, "temperature": 0, "max_tokens": 80, "guided_regex": "( [0-9]+,){20}", "logprobs": 2},
    {"prompt": STORY, "temperature": 0.6, "n": 2, "max_tokens": 80, "guided_json": LETTER, "stop": "happy"},
    {"prompt": STORY, "temperature": 0, "max_tokens": 80, "bad_words": [" dog", " happy"], "dry_multiplier": 0.8},
    {"prompt": STORY, "temperature": 0.9, "max_tokens": 60, "mirostat": 2, "logprobs": 1},
]


@pytest.fixture(scope="module")
def both(demo: Server, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Server, Server]]:
    """A server with draft tokens, and a server without draft tokens, which is the default for so small a model."""
    log = tmp_path_factory.mktemp("drafts") / "log"
    with serving("demo", log, "--speculation", "ngram", held=True) as on:
        yield on, demo


def ask(server: Server, body: dict[str, Any]) -> dict[str, Any]:
    """Returns the deterministic parts of the answer; the number of cached prompt tokens varies."""
    answer = server.client.post("/v1/completions", json={"model": "m", "seed": 0, **body})
    assert answer.status_code == 200, answer.text
    told = answer.json()
    return {
        "choices": told["choices"],
        **{name: told["usage"][name] for name in ("prompt_tokens", "completion_tokens")},
    }


Found = TypeVar("Found")


def speculation(stats: dict[str, Any]) -> tuple[int, int]:
    return stats["speculation"]["drafted"], stats["speculation"]["accepted"]


def repeated(ask: Callable[[], Found], enough: Callable[[Found], bool]) -> Found:
    """Asks until what it returns is enough: drafts are made as far as measured times say that they help, so that a busy
    machine may make none for a while."""
    deadline = time.monotonic() + PATIENCE_S
    while not enough(found := ask()):
        assert time.monotonic() < deadline, f"no drafts for {PATIENCE_S:g} s: {found}"
    return found


def ask_until_drafted(server: Server, body: dict[str, Any], drafted: int, accepted: int = 0) -> None:
    """Repeats a request until the server has made more than so many drafts, and more than so many were right."""

    def counts() -> tuple[int, int]:
        ask(server, body)
        return speculation(server.stats())

    repeated(counts, lambda found: found[0] > drafted and (not accepted or found[1] > accepted))


def test_answers_with_drafts_alone_and_concurrent_are_unchanged(both: tuple[Server, Server]) -> None:
    on, off = both
    plain = [ask(off, body) for body in BODIES]
    assert [ask(on, body) for body in BODIES] == plain
    with ThreadPoolExecutor(6) as pool:
        assert list(pool.map(lambda body: ask(on, body), BODIES)) == plain
    ask_until_drafted(on, BODIES[0], 100, accepted=100)
    drafted, accepted = speculation(on.stats())
    assert accepted < drafted
    assert speculation(off.stats()) == (0, 0)


@pytest.mark.parametrize(
    "options", [{}, {"temperature": 0.9, "seed": 7}, {"stop": [" day", "dog was"]}, {"min_tokens": 9}]
)
def test_streams_with_drafts_have_one_event_per_token(both: tuple[Server, Server], options: dict[str, Any]) -> None:
    streams = [server.events(STORY, 120, **options) for server in both]
    assert streams[0] == streams[1]
    assert streams[0].done and streams[0].done["usage"]["completion_tokens"] == len(streams[0].ids)


def test_answer_that_was_given_before_is_drafted_within_its_scope(both: tuple[Server, Server]) -> None:
    def answered(server: Server, salt: str) -> tuple[str, int]:
        body = {"model": "m", "prompt": STORY, "temperature": 1, "seed": 11, "max_tokens": 120, "ignore_eos": True}
        told = server.client.post("/v1/completions", json=body | {"timings": True, "cache_salt": salt}).json()
        return told["choices"][0]["text"], told["timings"]["accepted_draft_tokens"]

    on, off = both
    text, first = answered(on, "one")
    again, _ = repeated(lambda: answered(on, "one"), lambda found: found[1] > 60)
    other, apart = answered(on, "two")
    assert text == again == other == answered(off, "one")[0]
    assert first < 60 and apart < 60


def test_draft_model_changes_no_byte_also_when_its_worker_is_killed(demo: Server, tmp_path: Path) -> None:
    config = json.dumps({"method": "draft_model", "model": str(DEMO_MODEL), "num_speculative_tokens": 5})
    with serving("demo", tmp_path / "log", "--speculative-config", config, held=True) as on:
        assert [ask(on, body) for body in BODIES] == [ask(demo, body) for body in BODIES]
        ask_until_drafted(on, BODIES[0], 100, accepted=100)
        check_killed_worker(on, demo)


def test_trained_head_changes_no_byte_and_a_request_is_told_its_drafts(demo: Server, tmp_path: Path) -> None:
    config = json.dumps({"method": "mtp", "num_speculative_tokens": 3})
    with serving("demo", tmp_path / "log", "--speculative-config", config, held=True) as on:
        assert [ask(on, body) for body in BODIES[:5]] == [ask(demo, body) for body in BODIES[:5]]
        body = {"model": "m", "prompt": COUNT, "max_tokens": 200, "ignore_eos": True, "temperature": 0, "timings": True}
        told = repeated(
            lambda: on.client.post("/v1/completions", json=body).json()["timings"],
            lambda timings: timings["accepted_draft_tokens"] > 0,
        )
        assert told["draft_tokens"] >= told["accepted_draft_tokens"]


@dataclass(frozen=True)
class Headed:
    """A model with recurrent layers and an MTP head, an EAGLE-3 head for it, and a server without drafts."""

    folder: Path
    eagle: Path
    off: Server


@pytest.fixture(scope="module")
def headed(checkpoints: Checkpoints, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Headed]:
    made = tmp_path_factory.mktemp("headed")
    with_head("qwen3_5", checkpoints("qwen3_5"), made / "model")
    eagle = Eagle(EAGLES["recurrent"], checkpoints("qwen3_5")).save(made / "eagle")
    with serving(made / "model", made / "log", "--speculation", "off") as off:
        yield Headed(made / "model", eagle, off)


@pytest.mark.parametrize("method", ["mtp", "eagle3"])
def test_head_changes_no_byte_also_when_its_worker_is_killed(method: str, headed: Headed, tmp_path: Path) -> None:
    """A random head never guesses right by itself, so a logit bias leaves only few tokens to choose from."""
    config: dict[str, Any] = {"method": method, "num_speculative_tokens": 3}
    if method == "eagle3":
        config["model"] = str(headed.eagle)
    few = dict.fromkeys(sorted(EAGLES["recurrent"].target_ids(VOCAB).tolist())[9:13], 40)
    biased = [{**body, "logit_bias": few, "temperature": 1.5} for body in BODIES[2:8]]
    flags = ("--speculative-config", json.dumps(config))
    with serving(headed.folder, tmp_path / "log", *flags, held=True) as on:
        for body in (*biased[::2], *BODIES[1::4]):
            assert ask(on, body) == ask(headed.off, body)
        ask_until_drafted(on, biased[0], 0)
        check_killed_worker(on, headed.off, logit_bias=few)


@pytest.mark.parametrize(
    "options",
    [{}, {"guided_regex": '[a-zA-Z ,."]{400,}', "repetition_penalty": 1.05, "bad_words": [" cat"], "logprobs": 2}],
    ids=["plain", "constrained"],
)
def test_stream_with_drafts_and_killed_worker_is_unchanged(
    both: tuple[Server, Server], options: dict[str, Any]
) -> None:
    ask_until_drafted(both[0], {"prompt": STORY, "max_tokens": 120, "temperature": 0.3, **options}, 0)
    check_killed_worker(*both, **options)


def test_tool_call_with_drafts_is_unchanged(both: tuple[Server, Server]) -> None:
    schema = {"type": "object", "properties": {"city": {"type": "string", "maxLength": 40}, "kind": LETTER},
              "required": ["city", "kind"], "additionalProperties": False}  # fmt: skip
    body = {
        "model": "m", "messages": [{"role": "user", "content": "The weather in Ulm, in Ulm, in Ulm?"}], "seed": 4,
        "tools": [{"type": "function", "function": {"name": "get_the_weather", "parameters": schema, "strict": True}}],
        "tool_choice": "required", "max_tokens": 150, "temperature": 0.7, "timings": True,
    }  # fmt: skip
    on, off = both
    drafted = repeated(
        lambda: on.client.post("/v1/chat/completions", json=body).json(),
        lambda answer: answer["timings"]["accepted_draft_tokens"] > 0,  # some were forced
    )
    told = [drafted, off.client.post("/v1/chat/completions", json=body).json()]
    for answer in told:
        for call in answer["choices"][0]["message"].get("tool_calls", ()):
            del call["id"]  # drawn anew for each request
    assert told[0]["choices"] == told[1]["choices"]
    assert drafted["timings"]["draft_tokens"] >= drafted["timings"]["accepted_draft_tokens"]


def check_killed_worker(on: Server, off: Server, **more: Any) -> None:
    options = {"temperature": 0.3, "seed": 5, "ignore_eos": True, **more}

    def answered(server: Server) -> object:
        whole = {"prompt": STORY, "max_tokens": 120, **options}
        return ask(server, whole) if "logprobs" in more else server.events(STORY, 120, **options)

    before = on.stats()["worker"]
    with ThreadPoolExecutor(1) as pool, on.hold.at(60):
        stream = pool.submit(answered, on)
        on.hold.wait()
        os.kill(before["pid"], signal.SIGKILL)
        on.hold.release()
        disturbed = stream.result(timeout=PATIENCE_S)
    assert disturbed == answered(off)
    after = on.until(lambda stats: stats["worker"]["pid"] != before["pid"])["worker"]
    assert after["epoch"] > before["epoch"]
    on.until_idle()


@pytest.mark.parametrize("options", [{"temperature": 0}, {"temperature": 0.8, "seed": 5}])
def test_prediction_changes_no_byte_and_is_counted(both: tuple[Server, Server], options: dict[str, Any]) -> None:
    on, off = both
    body = {
        "model": "m",
        "messages": [{"role": "user", "content": "Tell me of a dog."}],
        "max_tokens": 120,
        "ignore_eos": True,
        **options,
    }

    def chat(server: Server, **more: Any) -> tuple[str, dict[str, Any]]:
        told = server.client.post("/v1/chat/completions", json=body | more).json()
        return told["choices"][0]["message"]["content"], told["usage"]

    text, usage = chat(off)
    words = text.split(" ")
    edited = " ".join([*words[: len(words) // 2], "zebra", *words[len(words) // 2 + 1 :]])
    for content in (text, edited, [{"type": "text", "text": text}], "something else", ""):
        predicted = content not in ("something else", "")
        prediction = {"type": "content", "content": content}

        def accepted(prediction: dict[str, Any]) -> int:
            again, counted = chat(on, prediction=prediction)
            assert again == text and counted["completion_tokens"] == usage["completion_tokens"]
            return int(counted["completion_tokens_details"]["accepted_prediction_tokens"])

        if predicted:
            repeated(partial(accepted, prediction), lambda count: count > 5)
        else:
            assert accepted(prediction) <= 5
    assert chat(off, prediction={"type": "content", "content": text})[0] == text
    refused = on.client.post("/v1/chat/completions", json=body | {"prediction": {"type": "other", "content": "x"}})
    assert refused.status_code in (400, 422) and "prediction.type" in refused.text
