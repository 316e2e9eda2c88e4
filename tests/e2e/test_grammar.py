"""Structured output over HTTP with the demo model: schemas of all kinds, SDKs, a killed worker."""

import json
import os
import signal
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import anthropic
import openai
import pytest
from hypothesis import given, settings
from jsonschema_rs import Draft202012Validator

from tests.e2e.server import Server
from tests.patience import PATIENCE_S
from tests.schemas import SCHEMAS, TEMPERATURES

LONG = {"type": "array", "minItems": 30, "items": {"type": "string", "maxLength": 6}}
PET = {"type": "object", "properties": {"name": {"type": "string", "maxLength": 9}, "legs": {"enum": [2, 4]}},
       "required": ["name", "legs"], "additionalProperties": False}  # fmt: skip
HELLO: Any = [{"role": "user", "content": "Tell me about a cat."}]


def test_guided_json_answer_that_stops_matches_schema(demo: Server) -> None:
    stopped: list[str] = []

    @settings(max_examples=12, database=None)
    @given(SCHEMAS)
    def keeps(schema: dict[str, Any]) -> None:
        def ask(temperature: float) -> dict[str, Any]:
            body = {"model": "m", "prompt": "x", "max_tokens": 120, "temperature": temperature, "guided_json": schema}
            answer = demo.client.post("/v1/completions", json=body)
            assert answer.status_code == 200, answer.text
            return dict(answer.json()["choices"][0])

        for choice in pool.map(ask, TEMPERATURES):
            if choice["finish_reason"] == "stop":
                Draft202012Validator(schema).validate(json.loads(choice["text"]))
                stopped.append(choice["text"])

    with ThreadPoolExecutor(len(TEMPERATURES)) as pool:
        keeps()
    assert len(stopped) > 10, "most of them end"


def test_structured_output_in_sdks_matches_schema(demo: Server) -> None:
    with openai.OpenAI(base_url=demo.url + "/v1", api_key="x", max_retries=0) as sdk:
        wanted: Any = {"type": "json_schema", "json_schema": {"name": "pet", "strict": True, "schema": PET}}
        answer = sdk.chat.completions.create(
            model="m", messages=HELLO, max_tokens=200, n=2, seed=1, response_format=wanted
        )
        for choice in answer.choices:
            assert choice.finish_reason == "stop" and Draft202012Validator(PET).is_valid(
                json.loads(choice.message.content or "")
            )
        with pytest.raises(openai.UnprocessableEntityError, match="nonesuch"):
            sdk.completions.create(model="m", prompt="x", extra_body={"guided_grammar": "start: <|nonesuch|>"})
    with anthropic.Anthropic(base_url=demo.url, api_key="x", max_retries=0) as other:
        message = other.messages.create(
            model="m", messages=HELLO, max_tokens=200, output_config={"format": {"type": "json_schema", "schema": PET}}
        )
        (block,) = message.content
        assert message.stop_reason == "end_turn" and block.type == "text"
        assert Draft202012Validator(PET).is_valid(json.loads(block.text))


def test_guided_json_stream_with_killed_worker_is_unchanged(demo: Server) -> None:
    fields = {"guided_json": LONG, "temperature": 1.0, "seed": 4}
    undisturbed = demo.events("Once upon a time", 400, **fields)
    pid = demo.stats()["worker"]["pid"]
    with ThreadPoolExecutor(1) as pool, demo.hold.at(len(undisturbed.ids) // 2):
        stream = pool.submit(demo.events, "Once upon a time", 400, **fields)
        demo.hold.wait()
        os.kill(pid, signal.SIGKILL)
        demo.hold.release()
        assert stream.result(timeout=PATIENCE_S) == undisturbed
    assert undisturbed.done and len(undisturbed.ids) > 100
    demo.until(lambda stats: stats["worker"]["pid"] != pid)
    demo.until_idle()
