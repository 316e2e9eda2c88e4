"""Receipts of real answers: identical for every kind of request and route, and different if a token was changed."""

import json
import random
from pathlib import Path
from typing import Any

import pytest

from tests.deploy.cli.harness import sluice
from tests.e2e.server import Server

TEXT = {"prompt": "Once upon a time there was", "max_tokens": 30, "seed": 5}
CHAT = {"messages": [{"role": "user", "content": "Tell me a story about a fox."}], "max_tokens": 30}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {"a": {}}}}}
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "greedy": ("/v1/completions", {**TEXT, "temperature": 0}),
    "drawn seed": ("/v1/completions", {**TEXT, "seed": None}),
    "sampling": ("/v1/completions", {**TEXT, "temperature": 1.3, "top_k": 40, "top_p": 0.9, "min_p": 0.02}),
    "penalties": ("/v1/completions", {**TEXT, "presence_penalty": 0.5, "repetition_penalty": 1.2}),
    "bias": ("/v1/completions", {**TEXT, "logit_bias": {"14": -100, "16": 2.5}, "min_tokens": 20}),
    "stop text": ("/v1/completions", {**TEXT, "stop": ["he w", "ver"], "max_tokens": 100}),
    "stop id": ("/v1/completions", {**TEXT, "stop_token_ids": [16], "max_tokens": 100}),
    "eos": ("/v1/completions", {**TEXT, "max_tokens": 400}),
    "regex": ("/v1/completions", {**TEXT, "guided_regex": "[a-z ]{20,40}\\."}),
    "mirostat": (
        "/api/generate",
        {
            "model": "m",
            "prompt": "Hi",
            "stream": False,
            "options": {"num_predict": 30, "mirostat": 2, "mirostat_tau": 3},
        },
    ),
    "mirostat branch": ("/v1/chat/completions", {**CHAT, "mirostat": 1, "continue_from": {"ids": [5, 6, 7]}}),
    "choices": ("/v1/completions", {**TEXT, "prompt": ["A", "The"], "n": 2, "logprobs": 1, "echo": True}),
    "chat": ("/v1/chat/completions", {**CHAT, "n": 2}),
    "tools": ("/v1/chat/completions", {**CHAT, "tools": [TOOL], "tool_choice": "required"}),
    "schema": ("/v1/chat/completions", {**CHAT, "response_format": {"type": "json_object"}}),
    "branch": ("/v1/chat/completions", {**CHAT, "continue_from": {"ids": [5, 6, 7]}}),
    "responses": ("/v1/responses", {"input": "Hello", "max_output_tokens": 20}),
    "messages": ("/v1/messages", {**CHAT, "stop_sequences": ["e"]}),
    "ollama": ("/api/generate", {"model": "m", "prompt": "Hi", "options": {"num_predict": 20}, "stream": False}),
}


def receipts(answer: dict[str, Any]) -> list[dict[str, Any]]:
    return [holder["receipt"] for holder in answer.get("choices", [answer])]


def checked(demo: Server, receipt: dict[str, Any], sent: dict[str, Any]) -> dict[str, Any]:
    answer = demo.client.post("/v1/receipts/verify", json={"receipt": receipt, "request": sent})
    assert answer.status_code == 200, answer.text
    verdict: dict[str, Any] = answer.json()
    return verdict


@pytest.mark.parametrize("kind", KINDS)
def test_receipt_is_identical_and_a_changed_token_is_found(demo: Server, kind: str) -> None:
    route, body = KINDS[kind]
    sent = {name: value for name, value in body.items() if value is not None} | {"receipt": True}
    draw = random.Random(kind)
    for receipt in receipts(demo.client.post(route, json=sent).json()):
        verdict = checked(demo, receipt, sent)
        assert verdict["identical"] and verdict["fingerprint_matches"], verdict
        ids = receipt["output_ids"]
        place = draw.randrange(len(ids))
        other = ids[place] + 1
        verdict = checked(demo, receipt | {"output_ids": [*ids[:place], other, *ids[place + 1 :]]}, sent)
        assert (verdict["identical"], verdict["position"]) == (False, place)
        assert (verdict["expected"], verdict["found"]) == (other, ids[place])


def test_verify_command_says_by_its_exit_code(demo: Server, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sent = CHAT | {"receipt": True, "n": 2}
    answer = demo.client.post("/v1/chat/completions", json=sent).json()
    request, whole, changed, none = (tmp_path / name for name in ("request", "whole", "changed", "none"))
    request.write_text(json.dumps(sent))
    whole.write_text(json.dumps(answer))
    receipt = answer["choices"][1]["receipt"]
    changed.write_text(json.dumps(receipt | {"output_ids": receipt["output_ids"][:-1]}))
    none.write_text("{}")
    code, out, _ = sluice(capsys, "verify", str(whole), "--request", str(request), "--url", demo.url)
    assert code == 0 and out.startswith("choice 0: identical, ") and "\nchoice 1: identical, " in out
    code, out, _ = sluice(capsys, "verify", str(changed), "--request", str(request), "--url", demo.url)
    assert code == 1 and out.startswith("choice 1: not identical: the answer goes on with token ")
    code, _, err = sluice(capsys, "verify", str(none), "--request", str(request), "--url", demo.url)
    assert code == 2 and "has no receipt" in err
    code, _, err = sluice(capsys, "verify", str(whole), "--request", str(none), "--url", demo.url)
    assert code == 2 and "`messages` is missing" in err
