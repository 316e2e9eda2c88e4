"""Prompts of formats with special rules: Mistral's call ids of nine characters, and gpt-oss's channels."""

import json
import threading
from pathlib import Path
from typing import Any

import openai
import pytest

from frontend.api.openai import chat
from frontend.chat import template_sandbox
from frontend.chat.history import as_the_template_shows, call, chat_message
from frontend.errors import BadRequest, Unprocessable
from frontend.output_parser.model_format import ModelFormat, ToolFormat
from frontend.text.tokenizer import Tokenizer
from frontend.turns import FairChildren
from tests.fakes import MODEL, context
from tests.frontend.api.harness import parse
from tests.frontend.speaking import Model
from tests.frontend.text.tokenizers import byte_level, save
from tests.templates import MISTRAL

SCHEMA: dict[str, Any] = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}


TOOLS: list[Any] = [
    {"type": "function", "function": {"name": name, "parameters": SCHEMA}} for name in ("get_weather", "get_time")
]


CALLS = ' [{"name": "get_weather", "arguments": {"city": "Ulm"}}, {"name": "get_time", "arguments": {"city": "Rom"}}]'


@pytest.mark.parametrize("streamed", [False, True])
async def test_mistral_loop_of_calls_and_results(tmp_path: Path, streamed: bool) -> None:
    config = {"chat_template": MISTRAL, "bos_token": "<s>", "eos_token": "</s>"}
    model = Model(Tokenizer.load(save(byte_level(), tmp_path, tokenizer_config=config)), [CALLS, "Sunny."])
    asked: dict[str, Any] = {"model": MODEL, "messages": [{"role": "user", "content": "Weather?"}], "tools": TOOLS}
    async with model.served() as url, openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none") as sdk:
        if streamed:
            async with sdk.chat.completions.stream(**asked) as stream:
                first: Any = (await stream.get_final_completion()).choices[0]
        else:
            first = (await sdk.chat.completions.create(**asked)).choices[0]
        assert (first.finish_reason, first.message.content) == ("tool_calls", None)
        calls = first.message.tool_calls
        assert [(one.function.name, json.loads(one.function.arguments)) for one in calls] == [
            ("get_weather", {"city": "Ulm"}), ("get_time", {"city": "Rom"}),
        ]  # fmt: skip
        results = [{"role": "tool", "tool_call_id": one.id, "content": "20"} for one in calls]
        asked["messages"] = [*asked["messages"], first.message, *results]
        second = (await sdk.chat.completions.create(**asked)).choices[0]
    assert second.message.content == "Sunny."
    shown = model.prompts[1].partition("[/INST]")[2]
    ids = [piece[:9] for piece in shown.split('"id": "')[1:]]
    assert shown.count("[TOOL_CALLS] [") == 1 and len(set(ids)) == 2
    assert all(f'"call_id": "{id}"' in shown for id in ids)


def test_mistral_call_ids_that_fit_are_kept() -> None:
    turns = [chat_message("assistant", "", calls=[call("abc123XYZ", "f", {}), call("call_1", "f", {})])]
    turns += [chat_message("tool", "1") | {"tool_call_id": id} for id in ("abc123XYZ", "call_1")]
    said, one, other = as_the_template_shows(turns, ModelFormat(ToolFormat.MISTRAL, shows_tools=True))
    first, second = (each["id"] for each in said["tool_calls"])
    assert first == one["tool_call_id"] == "abc123XYZ"
    assert second == other["tool_call_id"] != "call_1" and len(second) == 9 and second.isalnum()
    assert turns[0]["tool_calls"][1]["id"] == "call_1", "the client's own stays as it was"


def test_channels_show_each_call_before_its_result_and_every_system_message() -> None:
    style = ModelFormat(ToolFormat.HARMONY, shows_tools=True)
    calls = [call("1", "a", {}), call("2", "b", {})]
    results = [{"role": "tool", "content": id, "tool_call_id": id} for id in "12"]
    system, later = chat_message("system", "Be brief."), chat_message("system", "Be kind.")
    messages = [system, later, chat_message("user", "Hi"), chat_message("assistant", "So.", "Hm.", calls), *results]
    assert as_the_template_shows([*messages, later], style) == [
        chat_message("system", "Be brief.\nBe kind."), chat_message("user", "Hi"),
        chat_message("assistant", "", "Hm.\nSo.", calls[:1]), results[0],
        chat_message("assistant", "", calls=calls[1:]), results[1], later | {"role": "user"},
    ]  # fmt: skip


async def test_output_continues_the_final_message_of_a_prompt(gpt_oss: Model) -> None:
    gpt_oss.says = ["y.<|return|>"] * 2
    last = {"role": "assistant", "content": "Sunn", "reasoning_content": "Hm."}
    asked: dict[str, Any] = {"model": MODEL, "messages": [{"role": "user", "content": "Weather?"}, last]}
    async with gpt_oss.served() as url, openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none") as sdk:
        extra = {"continue_final_message": True, "add_generation_prompt": False}
        form: Any = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "string"}}}
        for more in ({}, {"response_format": form}):
            answer = await sdk.chat.completions.create(**asked, **more, extra_body=extra)
            assert answer.choices[0].message.content == "y."
    assert all(prompt.endswith("<|channel|>final<|message|>Sunn") for prompt in gpt_oss.prompts)
    assert "final" not in gpt_oss.grammars[1]


SHOWS_DOCUMENTS = "{% for d in documents or () %}[{{ d.text }}]{% endfor %}{{ messages[0].content }}"
ASKED = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 5}


async def prompt_of(tokenizer: Tokenizer, *, trusts: bool = True, **more: Any) -> str:
    request = await parse(chat, ASKED | more, context(tokenizer, trusts_templates=trusts))
    return tokenizer.decode(request.prompts[0], skip_special=False)


async def test_template_of_a_request_replaces_the_models_if_it_is_trusted(tokenizer: Tokenizer) -> None:
    asked = {"chat_template": "{{ bos_token }}!{{ messages[0].content }}"}
    assert await prompt_of(tokenizer, **asked) == f"{tokenizer.named_tokens.get('bos_token', '')}!hi"
    with pytest.raises(Unprocessable, match="--trust-request-chat-template"):
        await prompt_of(tokenizer, trusts=False, **asked)
    for broken in ("{% if %}", "{% break %}", "{{ 10**5000 }}", "{" * 3000):
        with pytest.raises(BadRequest, match=r"^`chat_template` does not compile: .") as caught:
            await prompt_of(tokenizer, chat_template=broken)
        assert caught.value.param == "chat_template"
    with pytest.raises(BadRequest, match=r"^`chat_template` refused the messages: .*unsafe"):
        await prompt_of(tokenizer, chat_template="{{ messages.__class__.__mro__ }}")


async def test_documents_are_shown_or_refused(tokenizer: Tokenizer) -> None:
    documents = [{"title": "A", "text": "one"}, {"text": "two"}]
    assert await prompt_of(tokenizer, chat_template=SHOWS_DOCUMENTS, documents=documents) == "[one][two]hi"
    assert "hi" in await prompt_of(tokenizer, documents=[])
    with pytest.raises(Unprocessable, match="no place"):
        await prompt_of(tokenizer, documents=documents)


@pytest.mark.parametrize(
    ("template", "problem"),
    [
        ("{{ 'a' * 10**9 }}", "MemoryError"),
        ("{% for i in [0] * 10**9 %}{% endfor %}", "MemoryError"),
        (
            "{% for i in range(99999) %}{% for j in range(99999) %}x{% endfor %}{% endfor %}",
            "`chat_template` cannot be rendered: it takes longer than 0.3 s",
        ),
    ],
)
async def test_template_of_a_request_that_takes_all_time_or_memory_is_refused_and_holds_up_nobody(
    template: str, problem: str, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(template_sandbox, "SECONDS", 0.3)
    waiting = set[int]()
    call_now = FairChildren.call_now

    def noted(children: FairChildren, *arguments: Any, **named: Any) -> Any:
        waiting.add(threading.get_ident())
        return call_now(children, *arguments, **named)

    monkeypatch.setattr(FairChildren, "call_now", noted)
    with pytest.raises(BadRequest, match=problem):
        await prompt_of(tokenizer, chat_template=template)
    assert waiting and threading.get_ident() not in waiting, "the event loop stood still"
    monkeypatch.setattr(template_sandbox, "SECONDS", 30.0)
    assert await prompt_of(tokenizer, chat_template="{{ messages[0].content }}") == "hi"
