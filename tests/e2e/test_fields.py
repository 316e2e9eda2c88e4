"""Fields of vLLM, SGLang and other servers, sent by the official SDKs to untrained models, which write at random."""

import itertools
import json
import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import anthropic
import openai
import pytest

from tests.e2e.conftest import Served
from tests.e2e.server import Server
from tests.patience import PATIENCE_S

HELLO: list[Any] = [{"role": "user", "content": "Hello."}]
QWEN = pytest.mark.parametrize("served", ["qwen3"], indirect=True)


@pytest.fixture
def sdk(server: Server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as sdk:
        yield sdk


def ids_of(server: Server, text: str) -> list[int]:
    found: list[int] = server.client.post("/tokenize", json={"prompt": text, "add_special_tokens": False}).json()[
        "tokens"
    ]
    return found


def completion(sdk: openai.OpenAI, prompt: str = "Once upon", max_tokens: int = 12, **extra: Any) -> Any:
    own = {name: extra.pop(name) for name in ("logprobs", "stop", "n", "seed", "temperature") if name in extra}
    return sdk.completions.create(
        model="m", prompt=prompt, max_tokens=max_tokens, **{"seed": 1, **own}, extra_body={"ignore_eos": True, **extra}
    )


def chat(sdk: openai.OpenAI, max_tokens: int = 12, messages: list[Any] = HELLO, **extra: Any) -> Any:
    own = {name: extra.pop(name) for name in ("logprobs", "top_logprobs", "n", "seed", "tools", "response_format",
           "stop", "stream", "stream_options", "tool_choice") if name in extra}  # fmt: skip
    return sdk.chat.completions.create(
        model="m", messages=messages, max_tokens=max_tokens, **{"seed": 1, **own}, extra_body=extra
    )


@QWEN
def test_token_ids_are_those_of_the_prompt_and_the_answer(server: Server, sdk: openai.OpenAI) -> None:
    whole = completion(sdk, return_token_ids=True, n=2).choices
    assert [choice.prompt_token_ids for choice in whole] == [ids_of(server, "Once upon")] * 2
    assert [len(choice.token_ids) for choice in whole] == [12, 12] and whole[0].token_ids != whole[1].token_ids
    body = {"model": "m", "prompt": "Once upon", "max_tokens": 12, "seed": 1, "n": 2}
    streamed: list[list[int]] = [[], []]
    prompts: list[Any] = []
    for chunk in sdk.completions.create(**body, stream=True, extra_body={"return_token_ids": True, "ignore_eos": True}):  # type: ignore[call-overload]
        for choice in chunk.choices:
            streamed[choice.index] += getattr(choice, "token_ids", [])
            prompts += [choice.prompt_token_ids] if hasattr(choice, "prompt_token_ids") else []
    assert streamed == [choice.token_ids for choice in whole] and prompts == [whole[0].prompt_token_ids] * 2
    assert not hasattr(completion(sdk).choices[0], "token_ids")


@QWEN
def test_token_ids_of_a_chat_are_told_whole_and_in_a_stream(sdk: openai.OpenAI) -> None:
    whole = chat(sdk, return_token_ids=True)
    chunks = list(chat(sdk, return_token_ids=True, stream=True))
    assert chunks[0].prompt_token_ids == whole.prompt_token_ids and whole.usage.prompt_tokens == len(
        whole.prompt_token_ids
    )
    assert not any(hasattr(chunk, "prompt_token_ids") for chunk in chunks[1:])
    ids = [getattr(choice, "token_ids", []) for chunk in chunks for choice in chunk.choices]
    assert list(itertools.chain(*ids)) == whole.choices[0].token_ids and len(whole.choices[0].token_ids) > 0


@QWEN
def test_logprobs_name_tokens_by_id(sdk: openai.OpenAI) -> None:
    (choice,) = completion(sdk, logprobs=2, return_tokens_as_token_ids=True, return_token_ids=True).choices
    assert choice.logprobs.tokens == [f"token_id:{id}" for id in choice.token_ids]
    assert all(name.startswith("token_id:") for top in choice.logprobs.top_logprobs for name in top)
    (choice,) = chat(sdk, logprobs=True, top_logprobs=1, return_tokens_as_token_ids=True, return_token_ids=True).choices
    assert [entry.token for entry in choice.logprobs.content] == [f"token_id:{id}" for id in choice.token_ids]
    assert all(entry.top_logprobs[0].token.startswith("token_id:") for entry in choice.logprobs.content)


@QWEN
def test_prompt_logprobs_agree_with_those_of_an_echo(server: Server, sdk: openai.OpenAI) -> None:
    ids = ids_of(server, "Once upon a time")
    (choice,) = completion(sdk, "Once upon a time", 1, prompt_logprobs=3).choices
    first, *others = choice.prompt_logprobs
    assert first is None and len(others) == len(ids) - 1
    (echoed,) = completion(sdk, "Once upon a time", 1, logprobs=3, echo=True).choices
    for position, entry in enumerate(others, 1):
        told = entry[str(ids[position])]
        assert told["logprob"] == pytest.approx(echoed.logprobs.token_logprobs[position], abs=1e-6)
        ranks = sorted(one["rank"] for one in entry.values())
        assert {1, 2, 3} <= {*ranks} and len(entry) in (3, 4)
        assert (told["rank"] <= 3) == (len(entry) == 3)
    asked = chat(sdk, 1, prompt_logprobs=0, return_token_ids=True)
    assert [[*entry] for entry in asked.prompt_logprobs[1:]] == [[str(id)] for id in asked.prompt_token_ids[1:]]
    with pytest.raises(openai.APIStatusError, match="prompt_logprobs"):
        chat(sdk, 1, prompt_logprobs=1, stream=True)


@QWEN
def test_stop_text_stays_if_it_is_asked_for(sdk: openai.OpenAI) -> None:
    (free,) = completion(sdk, max_tokens=40).choices
    stop = free.text[6:8]
    (cut,), (kept,) = (
        completion(sdk, max_tokens=40, stop=stop, include_stop_str_in_output=kept).choices for kept in (False, True)
    )
    assert kept.text == cut.text + stop and free.text.startswith(kept.text) and kept.stop_reason == stop


@QWEN
def test_special_tokens_are_shown_if_they_are_asked_for(server: Server, sdk: openai.OpenAI) -> None:
    ids = server.client.post("/tokenize", json={"prompt": "<|im_start|>", "add_special_tokens": False}).json()["tokens"]
    fields: dict[str, Any] = {
        "allowed_token_ids": [*ids, *ids_of(server, "a")],
        "max_tokens": 30,
        "return_token_ids": True,
    }
    (hidden,), (shown,) = (
        completion(sdk, seed=3, temperature=1000, **fields, skip_special_tokens=skip).choices for skip in (True, False)
    )
    assert {*shown.token_ids} == {*fields["allowed_token_ids"]} and hidden.token_ids == shown.token_ids
    assert {*hidden.text} == {"a"} and shown.text.replace("<|im_start|>", "") == hidden.text != shown.text


@QWEN
def test_bad_words_do_not_occur_and_allowed_tokens_do(server: Server, sdk: openai.OpenAI) -> None:
    allowed = ids_of(server, "abc")
    (choice,) = completion(sdk, max_tokens=60, temperature=1000, allowed_token_ids=allowed).choices
    assert {*choice.text} == {*"abc"} and "ab" in choice.text and "c" in choice.text
    restricted = {"allowed_token_ids": allowed, "bad_words": ["ab", "c"]}
    (choice,) = completion(sdk, max_tokens=60, temperature=1000, **restricted).choices
    assert {*choice.text} <= {*"ab"} and "ab" not in choice.text
    for wrong in ([], [1 << 20]):
        with pytest.raises(openai.APIStatusError, match="allowed_token_ids"):
            completion(sdk, allowed_token_ids=wrong)


@QWEN
def test_prompt_is_cut_to_its_last_tokens(server: Server, sdk: openai.OpenAI) -> None:
    ids = ids_of(server, "Once upon a time")
    cut = completion(sdk, "Once upon a time", truncate_prompt_tokens=5, return_token_ids=True)
    assert cut.choices[0].prompt_token_ids == ids[-5:] and cut.usage.prompt_tokens == 5
    long = completion(sdk, "Once " * 4096, 12, truncate_prompt_tokens=-1)
    assert long.usage.prompt_tokens == 4096 - 12 and long.usage.completion_tokens == 12
    with pytest.raises(openai.APIStatusError, match="truncate_prompt_tokens"):
        completion(sdk, truncate_prompt_tokens=0)


@QWEN
def test_suffix_needs_tokens_for_the_middle(sdk: openai.OpenAI) -> None:
    with pytest.raises(openai.APIStatusError, match="filling in the middle"):
        completion(sdk, suffix="the end")


THINKS = {"ignore_eos": True, "chat_template_kwargs": {"enable_thinking": True}}


def opened(server: Server) -> list[Any]:
    """Returns a conversation whose last message begins with reasoning."""
    return [*HELLO, {"role": "assistant", "content": "<think>\n"}]


GOES_ON = {"continue_final_message": True, "add_generation_prompt": False, "ignore_eos": True}


@QWEN
@pytest.mark.parametrize("field", ["max_thinking_tokens", "thinking_budget", "thinking_token_budget", "reasoning"])
def test_thinking_ends_at_its_budget_and_the_answer_follows(server: Server, sdk: openai.OpenAI, field: str) -> None:
    budget: dict[str, Any] = {field: {"max_tokens": 9} if field == "reasoning" else 9}
    (close,) = ids_of(server, "</think>")
    asked = {"messages": opened(server), "n": 2, **GOES_ON, **budget, "return_token_ids": True}
    whole = chat(sdk, 40, **asked)
    for choice in whole.choices:
        assert choice.token_ids.index(close) == 9 and len(choice.token_ids) == 40
        assert choice.message.reasoning and choice.message.content
    assert whole.usage.completion_tokens_details.reasoning_tokens == 2 * 10
    *chunks, last = chat(sdk, 40, **asked, stream=True, stream_options={"include_usage": True})
    assert last.usage.completion_tokens_details.reasoning_tokens == 2 * 10
    ids: list[list[int]] = [[], []]
    for chunk in chunks:
        for one in chunk.choices:
            ids[one.index] += getattr(one, "token_ids", [])
    assert ids == [choice.token_ids for choice in whole.choices]


@QWEN
def test_budget_changes_nothing_before_it_is_used_up(server: Server, sdk: openai.OpenAI) -> None:
    free, held = (
        chat(sdk, 30, opened(server), **GOES_ON, return_token_ids=True, **more).choices[0].token_ids
        for more in ({}, {"max_thinking_tokens": 9})
    )
    assert held[:9] == free[:9] and held != free


@QWEN
def test_budget_works_beside_tools_and_structured_output(server: Server, sdk: openai.OpenAI) -> None:
    asked = {"messages": opened(server), **GOES_ON, "max_thinking_tokens": 5, "return_token_ids": True}
    (close,) = ids_of(server, "</think>")
    tool = {"type": "function", "function": {"name": "now", "parameters": {"type": "object", "properties": {}}}}
    (called,) = chat(sdk, 200, **asked, tools=[tool], tool_choice="required").choices
    assert close in called.token_ids[5:12] and called.message.tool_calls[0].function.name == "now"
    (chosen,) = chat(sdk, 200, **asked, guided_choice=["yes", "no"]).choices
    assert close in chosen.token_ids[5:12] and chosen.message.content in ("yes", "no")


@QWEN
def test_budget_of_messages_ends_thinking(server: Server, served: Served) -> None:
    with anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0) as claude:
        answer = claude.messages.create(
            model="m", max_tokens=40, messages=[*HELLO, {"role": "assistant", "content": "<think>\nHm"}],
            thinking={"type": "enabled", "budget_tokens": 9}, extra_body={"ignore_eos": True, "seed": 1},
        )  # fmt: skip
    kinds = [block.type for block in answer.content]
    assert kinds == ["thinking", "text"] and answer.usage.output_tokens == 40


@QWEN
def test_budget_of_a_response_ends_reasoning(sdk: openai.OpenAI, server: Server) -> None:
    (opening,) = ids_of(server, "<think>")
    answer = sdk.responses.create(
        model="m", input="Hello.", max_output_tokens=40, extra_body={
            "ignore_eos": True, "seed": 1, "max_thinking_tokens": 9, "logit_bias": {str(opening): 100.0},
        },
    )  # fmt: skip
    assert answer.usage is not None and [item.type for item in answer.output][:1] == ["reasoning"]
    assert answer.usage.output_tokens_details.reasoning_tokens == 11


@QWEN
def test_reasoning_is_left_out_or_left_in(server: Server, sdk: openai.OpenAI) -> None:
    asked = {"messages": opened(server), **GOES_ON, "max_thinking_tokens": 6}
    (told,), (out,), (inside,) = (
        chat(sdk, 30, **asked, **more).choices
        for more in ({}, {"include_reasoning": False}, {"separate_reasoning": False})
    )
    assert out.message.content == told.message.content and not hasattr(out.message, "reasoning")
    assert told.message.reasoning in inside.message.content and "</think>" in inside.message.content
    assert inside.message.content.endswith(told.message.content)
    streamed = [
        chunk.choices[0].delta
        for chunk in chat(sdk, 30, **asked, include_reasoning=False, stream=True)
        if chunk.choices
    ]
    assert not any(hasattr(delta, "reasoning") for delta in streamed)
    assert "".join(delta.content or "" for delta in streamed) == told.message.content


CITY = {"type": "object", "properties": {"city": {"enum": ["Ulm", "Rom"]}}, "required": ["city"]}


@QWEN
@pytest.mark.parametrize("fields", [
    {"response_format": {"type": "json", "value": CITY}}, {"response_format": {"type": "json_object", "schema": CITY}},
    {"json_schema": CITY}, {"grammar": 'root ::= "{\\"city\\": \\"" ("Ulm" | "Rom") "\\"}"'},
])  # fmt: skip
def test_structured_output_by_the_names_of_other_servers(sdk: openai.OpenAI, fields: dict[str, Any]) -> None:
    (choice,) = chat(sdk, 200, **fields, chat_template_kwargs={"enable_thinking": False}).choices
    assert choice.finish_reason == "stop" and json.loads(choice.message.content)["city"] in ("Ulm", "Rom")


@QWEN
def test_structural_tag_keeps_its_tags_to_their_schemas(sdk: openai.OpenAI) -> None:
    tag = {"type": "tag", "begin": "<city>", "content": {"type": "json_schema", "json_schema": CITY}, "end": "</city>"}
    forced = {
        "type": "triggered_tags",
        "triggers": ["<city>"],
        "tags": [tag],
        "at_least_one": True,
        "stop_after_first": True,
    }
    asked = {"type": "structural_tag", "format": {"type": "sequence", "elements": [tag, forced]}}
    (choice,) = completion(sdk, max_tokens=400, response_format=asked, ignore_eos=False, bad_words=["\n"]).choices
    beginning, _, rest = choice.text.partition("</city>")
    assert json.loads(beginning.removeprefix("<city>"))["city"] in ("Ulm", "Rom")
    assert choice.finish_reason == "length" or rest.endswith("</city>")


RULES: dict[str, Any] = {"allowed_token_ids": list(range(300, 360)), "bad_words": ["e"]}
SAMPLERS: dict[str, Any] = {
    "samplers": "edkypmxt", "dry_multiplier": 0.8, "repeat_penalty": 1.2, "repeat_last_n": 32, "typical_p": 0.98,
    "xtc_probability": 0.5, "xtc_threshold": 0.05, "dynatemp_range": 0.3, "allowed_token_ids": list(range(300, 360)),
}  # fmt: skip


@pytest.mark.parametrize("asked", [RULES, SAMPLERS], ids=["rules", "samplers"])
def test_same_tokens_come_when_a_worker_is_killed(demo: Server, asked: dict[str, Any]) -> None:
    fields = {"temperature": 1.0, "seed": 4} | asked
    undisturbed = demo.events("Once upon a time", 200, **fields)
    pid = demo.stats()["worker"]["pid"]
    with ThreadPoolExecutor(1) as pool, demo.hold.at(len(undisturbed.ids) // 2):
        stream = pool.submit(demo.events, "Once upon a time", 200, **fields)
        demo.hold.wait()
        os.kill(pid, signal.SIGKILL)
        demo.hold.release()
        assert stream.result(timeout=PATIENCE_S) == undisturbed
    assert len(undisturbed.ids) == 200 and {*undisturbed.ids} <= {*range(300, 360)}
    demo.until(lambda stats: stats["worker"]["pid"] != pid)
    demo.until_idle()


@pytest.mark.parametrize("served", ["gpt_oss"], indirect=True)
def test_budget_of_harmony_ends_analysis_for_good(server: Server, sdk: openai.OpenAI) -> None:
    """The model is forced to open its analysis channel and never to end it."""
    end, channel, message = (ids_of(server, mark)[0] for mark in ("<|end|>", "<|channel|>", "<|message|>"))
    forced = ids_of(server, "<|end|><|start|>assistant<|channel|>")
    begun = [channel, *ids_of(server, "analysis"), message]
    tool: Any = {"type": "function", "function": {"name": "now", "parameters": {"type": "object", "properties": {}}}}
    bias = {str(end): -100.0, str(begun[1]): 100.0, "0": -100.0}
    (choice,) = chat(
        sdk, 120, max_thinking_tokens=12, logit_bias=bias, return_token_ids=True, tools=[tool]
    ).choices  # fmt: skip
    ids = choice.token_ids
    assert ids[: len(begun)] == begun
    assert ids[len(begun) + 12 :][: len(forced)] == forced
    assert begun[1] != ids[len(begun) + 12 + len(forced)], "there is no second analysis"
