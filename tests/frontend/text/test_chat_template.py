"""Chat templates render like transformers' `apply_chat_template`, and their errors reach the client."""

from collections.abc import Mapping
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from frontend.chat.history import call, chat_message
from frontend.text.chat_template import ChatTemplate, TemplateError
from tests.frontend.text.tokenizers import byte_level
from tests.templates import LLAMA3, MISTRAL, QWEN3

SPECIALS = {"bos_token": "<s>", "eos_token": "</s>"}
CHATML = """{%- if messages[0].role == 'system' %}
    {{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'system' %}{% continue %}{% endif %}
    {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' + '\\n' }}
{%- endfor %}
{%- if tools %}
    {%- for tool in tools %}
        {{- tool | tojson }}{{ tool | tojson(indent=2) }}
    {%- endfor %}
{%- endif %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\\n\\n</think>\\n\\n' }}
    {%- endif %}
{%- endif %}"""
LLAMA = """{{- bos_token }}
{%- set ns = namespace(first=true) %}
    {% if messages[0]['role'] == 'system' %}
        {%- set system_message = messages[0]['content'] | trim %}
        {%- set messages = messages[1:] %}
    {% else %}
        {%- set system_message = '' %}
    {% endif %}
{{- '<|start_header_id|>system<|end_header_id|>\\n\\nCutting Knowledge Date: December 2023\\n' }}
{{- system_message }}<|eot_id|>
{%- for message in messages %}
    {%- set ns.first = false %}
    {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' }}
    {{- message['content'] | trim + '<|eot_id|>' }}
{%- endfor %}
{% if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{% endif %}
"""
GEMMA = """{{ bos_token }}
{%- if messages[0]['role'] == 'system' -%}
    {%- set first_user_prefix = messages[0]['content'] + '\\n\\n' -%}
    {%- set loop_messages = messages[1:] -%}
{%- else -%}
    {%- set first_user_prefix = "" -%}
    {%- set loop_messages = messages -%}
{%- endif -%}
{%- for message in loop_messages -%}
    {%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) -%}
        {{ raise_exception("Conversation roles must alternate user/assistant/user/assistant/...") }}
    {%- endif -%}
    {%- set role = "model" if message['role'] == 'assistant' else message['role'] -%}
    {{ '<start_of_turn>' + role + '\\n' + (first_user_prefix if loop.first else "") }}
    {%- generation %}{{ message['content'] | trim }}{% endgeneration -%}
    {{ '<end_of_turn>\\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}
    {{ '<start_of_turn>model\\n' }}
{%- endif -%}"""
TEMPLATES = {"chatml": CHATML, "llama": LLAMA, "gemma": GEMMA}
CHATS = [
    [{"role": "user", "content": "Hi"}],
    [{"role": "system", "content": " Be <brief> & 'kind' "}, {"role": "user", "content": "Grüße 👋\n"}],
    [{"role": role, "content": f"{{{{ {role} }}}}"} for role in ("user", "assistant", "user")],
]
TOOLS = [{"type": "function", "function": {"name": "größe", "parameters": {"z": "<b>", "a": 1}}}]


def reference(
    template: str,
    chat: list[dict[str, str]],
    generate: bool,
    tools: list[dict[str, object]] | None,
    extra: Mapping[str, object],
) -> str:
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=byte_level(), **SPECIALS)
    text: str = tokenizer.apply_chat_template(
        chat, chat_template=template, add_generation_prompt=generate, tools=tools, tokenize=False, **extra
    )
    return text


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("chat", CHATS)
@pytest.mark.parametrize("generate", [True, False])
@pytest.mark.parametrize("extra", [{}, {"enable_thinking": False}])
@pytest.mark.parametrize("tools", [None, TOOLS])
def test_render_equals_transformers(
    name: str,
    chat: list[dict[str, str]],
    generate: bool,
    extra: dict[str, object],
    tools: list[dict[str, object]] | None,
) -> None:
    mine = ChatTemplate({"default": TEMPLATES[name]}, SPECIALS).render(chat, generate, tools, **extra)
    assert mine == reference(TEMPLATES[name], chat, generate, tools, extra)


ASKED = chat_message("user", "Weather?")
CALLED = chat_message("assistant", "", "I look.", [call("abcdefgh1", "größe", {"z": "Ä", "a": [1, None]})])
TOLD = chat_message("tool", "20°") | {"tool_call_id": "abcdefgh1"}
LOOPS = {
    "called": [ASKED, CALLED, TOLD],
    "answered": [ASKED, CALLED, TOLD, chat_message("assistant", "20.", "So."), ASKED],
}


@pytest.mark.parametrize("template", [QWEN3, LLAMA3, MISTRAL], ids=["qwen3", "llama3", "mistral"])
@pytest.mark.parametrize("chat", LOOPS.values(), ids=LOOPS)
@pytest.mark.parametrize("tools", [None, TOOLS])
@pytest.mark.parametrize("extra", [{}, {"enable_thinking": False}])
def test_render_of_calls_results_and_reasoning_equals_transformers(
    template: str, chat: list[Any], tools: list[dict[str, object]] | None, extra: dict[str, object]
) -> None:
    mine = ChatTemplate({"default": template}, SPECIALS).render(chat, True, tools, **extra)
    assert mine == reference(template, chat, True, tools, extra)


@pytest.mark.parametrize("name", ["reasoning_content", "reasoning", "thinking"])
def test_render_offers_reasoning_under_every_known_name(name: str) -> None:
    source = "{% for m in messages %}{{ m.%s }}{% endfor %}".replace("%s", name)
    assert ChatTemplate({"default": source}, {}).render([ASKED, CALLED]) == "I look."


def test_render_with_enable_thinking_false() -> None:
    template = ChatTemplate({"default": CHATML}, SPECIALS)
    assert template.render(CHATS[0]).endswith("<|im_start|>assistant\n")
    assert template.render(CHATS[0], enable_thinking=False).endswith("<think>\n\n</think>\n\n")


def test_generation_block_has_a_scope_of_its_own() -> None:
    source = "{% set x = 1 %}{% generation %}{% set x = 2 %}{{ x }}{% endgeneration %}{{ x }}"
    mine = ChatTemplate({"default": source}, SPECIALS).render(CHATS[0])
    assert mine == reference(source, CHATS[0], True, None, {}) == "21"


def test_render_with_tools_uses_the_tool_use_template() -> None:
    template = ChatTemplate({"default": "plain", "tool_use": "{{ tools[0].function.name }}"}, {})
    assert template.render(CHATS[0]) == "plain"
    assert template.render(CHATS[0], tools=TOOLS) == "größe"


def test_strftime_now_formats_the_date() -> None:
    text = ChatTemplate({"default": "{{ strftime_now('%Y-%m-%d') }}"}, {}).render(CHATS[0])
    assert len(text) == 10 and text[4] == text[7] == "-"


def test_date_is_that_of_utc_or_of_the_client() -> None:
    template = ChatTemplate({"default": "{{ strftime_now('%d %b %Y %H') }}"}, {})
    assert template.at(86_399).render(CHATS[0]) == "01 Jan 1970 23"
    assert template.render(CHATS[0], strftime_now="2026-11-27T18:05:00-08:00") == "27 Nov 2026 18"
    assert template.at(0).render(CHATS[0], strftime_now="2026-11-27") == "27 Nov 2026 00"
    for wrong in ("today", 5, None):
        with pytest.raises(TemplateError, match="ISO 8601") as refused:
            template.render(CHATS[0], strftime_now=wrong)
        assert refused.value.param == "chat_template_kwargs.strftime_now"


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (GEMMA, "Conversation roles must alternate"),
        ("{{ messages[0].content + 1 }}", "refused the messages"),
        ("{{ messages.get(1) }}", "refused the messages"),
        ("{{ ''.__class__.__mro__ }}", "refused the messages"),
        ("{{ nothing.at.all }}", "'nothing' is undefined"),
        # half of a character, which a response cannot contain
        ("{{ raise_exception('half \\ud83d') }}", r"half \\ud83d$"),
    ],
)
def test_render_error_is_told_to_the_client(source: str, message: str) -> None:
    with pytest.raises(TemplateError, match=message) as caught:
        ChatTemplate({"default": source}, {}).render([{"role": "assistant", "content": "Hi"}])
    assert (caught.value.status, caught.value.param) == (400, "messages")


def test_kwargs_cannot_replace_the_messages() -> None:
    keywords: dict[str, Any] = {"messages": []}
    with pytest.raises(TemplateError, match="cannot be replaced") as caught:
        ChatTemplate({"default": "{{ messages }}"}, {}).render(CHATS[0], **keywords)
    assert caught.value.param == "chat_template_kwargs"


def test_kwargs_may_replace_other_variables() -> None:
    template = ChatTemplate({"default": CHATML}, SPECIALS)
    keywords: dict[str, Any] = {"add_generation_prompt": False}
    assert template.render(CHATS[0], True, **keywords) == template.render(CHATS[0], False)
    assert ChatTemplate({"default": "{{ bos_token }}"}, SPECIALS).render(CHATS[0], bos_token="") == ""


def test_render_without_a_template_raises() -> None:
    template = ChatTemplate({}, {})
    assert not template
    with pytest.raises(TemplateError, match="no chat template"):
        template.render(CHATS[0])


def test_render_without_a_default_template_raises() -> None:
    with pytest.raises(TemplateError, match="only rag, tool_use"):
        ChatTemplate({"tool_use": "a", "rag": "b"}, {}).render(CHATS[0])


def test_render_of_a_broken_template_raises() -> None:
    for source in ("{% if %}", "{% break %}", "{{ 1 | trim(}}"):
        with pytest.raises(TemplateError, match=r"^the model's chat template does not compile: ."):
            ChatTemplate({"default": source}, {}).render([{"role": "user", "content": "Hi"}])
