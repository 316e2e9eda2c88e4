"""Mistral's way of calling: an array behind a special token that no answer shows, and ids of nine signs."""

import json
from pathlib import Path
from typing import Any

import openai
import pytest
from llguidance import LLMatcher, LLTokenizer
from tokenizers import AddedToken

from frontend.api.chat_prompt import call, checked, turn
from frontend.output_parser.formats import ModelFormat, Reasoning, ToolFormat
from frontend.output_parser.tool_choice import Function, Mode, ToolChoice
from frontend.output_parser.tool_grammar import call_grammar
from frontend.text.tokenizer import Tokenizer
from tests.fakes import MODEL
from tests.frontend.speaking import Model
from tests.frontend.tokenizers_for_tests import byte_level, save
from tests.templates import LLAMA3, MISTRAL, QWEN3

SCHEMA: dict[str, Any] = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOLS: list[Any] = [
    {"type": "function", "function": {"name": name, "parameters": SCHEMA}} for name in ("get_weather", "get_time")
]
CALLS = ' [{"name": "get_weather", "arguments": {"city": "Ulm"}}, {"name": "get_time", "arguments": {"city": "Rom"}}]'
FUNCTIONS = tuple(Function(one["function"]["name"], SCHEMA, False, "tools", one) for one in TOOLS)
MARK = "[TOOL_CALLS]"


def test_templates_tell_it_and_newer_ones_are_not_taken_for_it() -> None:
    said = {
        name: ModelFormat.of({"default": source}).tool_format
        for name, source in (("a", MISTRAL), ("b", QWEN3), ("c", LLAMA3))
    }
    assert said == {"a": ToolFormat.MISTRAL, "b": ToolFormat.HERMES, "c": ToolFormat.LLAMA}
    newer = MISTRAL + "{{- '[TOOL_CALLS]' + call.function.name + '[ARGS]' }}"
    assert ModelFormat.of({"default": newer}).tool_format is ToolFormat.NONE


@pytest.mark.parametrize("streamed", [False, True])
async def test_a_loop_of_calls_and_results(tmp_path: Path, streamed: bool) -> None:
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


def test_ids_that_fit_are_left_alone() -> None:
    turns = [turn("assistant", "", calls=[call("abc123XYZ", "f", {}), call("call_1", "f", {})])]
    turns += [turn("tool", "1") | {"tool_call_id": id} for id in ("abc123XYZ", "call_1")]
    said, one, other = checked(turns, ModelFormat(ToolFormat.MISTRAL, shows_tools=True), answered=True)
    first, second = (each["id"] for each in said["tool_calls"])
    assert first == one["tool_call_id"] == "abc123XYZ"
    assert second == other["tool_call_id"] != "call_1" and len(second) == 9 and second.isalnum()
    assert turns[0]["tool_calls"][1]["id"] == "call_1", "the client's own stays as it was"


@pytest.fixture(params=[True, False], ids=["special", "text"])
def tokenizer(request: pytest.FixtureRequest, tmp_path: Path) -> Tokenizer:
    engine = byte_level()
    if request.param:
        engine.add_special_tokens([AddedToken(MARK, special=True)])
    return Tokenizer.load(save(engine, tmp_path))


def accepts(tokenizer: Tokenizer, grammar: str, text: str) -> bool:
    """`text` as ids; the mark is one of them where it is a special token."""
    source = tokenizer._engine.to_str()
    matcher = LLMatcher(LLTokenizer(source, eos_token=list(tokenizer.eos_ids) or None), grammar, log_level=0)
    (ids,) = tokenizer.encode_now([text], False)
    return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()


@pytest.mark.parametrize("mode", [Mode.AUTO, Mode.REQUIRED])
@pytest.mark.parametrize("several", [True, False])
def test_what_the_grammar_lets_it_say(tokenizer: Tokenizer, mode: Mode, several: bool) -> None:
    offer = ToolChoice(FUNCTIONS, mode, frozenset({"get_weather", "get_time"}), several)
    made = call_grammar(offer, ToolFormat.MISTRAL, Reasoning.DONE, mark=tokenizer.special_id(MARK))
    one = ' [{"name": "get_weather", "arguments": {"city": "Ulm"}}]'
    assert accepts(tokenizer, made, MARK + one)
    assert accepts(tokenizer, made, MARK + CALLS) == several
    assert not accepts(tokenizer, made, MARK + one.replace("city", "town"))
    assert not accepts(tokenizer, made, MARK + one.replace("weather", "wind"))
    assert not accepts(tokenizer, made, one), "a call without its mark"
    assert accepts(tokenizer, made, "It is sunny [1].") == (mode is Mode.AUTO)
