"""Detecting the format of tool calls and reasoning from a chat template."""

import pytest

from frontend.output_parser.model_format import HARMONY as MARKS
from frontend.output_parser.model_format import THINK, ModelFormat, ParserConfig, Reasoning, Tags, ToolFormat
from frontend.text.chat_template import ChatTemplate
from shared.config.frontend import TOOL_FORMATS
from tests.templates import GLM, HARMONY, LLAMA3, MISTRAL, PLAIN, QWEN3, QWEN35

GEMMAS: Tags = ("<|channel>thought", "<channel|>")


DETECTED: dict[ToolFormat, str] = {
    ToolFormat.MISTRAL: MISTRAL,
    ToolFormat.MISTRAL_ARGS: MISTRAL + "{{- '[TOOL_CALLS]' + call.function.name + '[ARGS]' }}",
    ToolFormat.HERMES: QWEN3,
    ToolFormat.LLAMA: LLAMA3,
    ToolFormat.HARMONY: HARMONY,
    ToolFormat.QWEN_XML: QWEN35,
    ToolFormat.GLM: GLM,
    ToolFormat.SEED: "{{ tools }}{% set begin = '<seed:tool_call>' %}<function=name><parameter=a>b</parameter>",
    ToolFormat.MINIMAX: "{{ tools }}{% set begin = '<minimax:tool_call>' %}<invoke name=\"a\">",
    ToolFormat.GEMMA4: "{{ tools }}{{ '<|tool_call>call:' + function['name'] + '{' }}",
    ToolFormat.NEMOTRON: "{{ tools }}{{ '<TOOLCALL>[' }}",
    ToolFormat.DEEPSEEK_V3: "{{ tools }}{{ '<｜tool▁call▁begin｜>function<｜tool▁sep｜>' + name + '\\n```json' }}",
    ToolFormat.DEEPSEEK_V31: "{{ tools }}{{ '<｜tool▁call▁begin｜>' + name + '<｜tool▁sep｜>' }}",
    ToolFormat.KIMI: "{{ tools }}<|tool_calls_section_begin|>",
    ToolFormat.LFM2: "{{ tools }}{{ '<|tool_call_start|>[' }}",
    ToolFormat.GRANITE: "{{ tools }}respond only with <|tool_call|> followed by a JSON list",
    ToolFormat.OLMO3: "{{ tools }}<function_calls>",
    ToolFormat.GEMMA3: "{{ tools }}```tool_code",
    ToolFormat.PYTHONIC: "{{ tools }}Environment: ipython [func_name1(params_name1=params_value1), func_name2(params)]",
    ToolFormat.GLM4: '{{ tools }}{% set meta = message.get("metadata", "") %}<|observation|>',
}


@pytest.mark.parametrize("tool_format", DETECTED)
def test_tool_format_is_detected_from_the_template(tool_format: ToolFormat) -> None:
    style = ModelFormat.of({"default": DETECTED[tool_format]})
    assert style.tool_format is tool_format and not style.tools_as_text and not style.calls_as_text
    assert set(DETECTED) == set(ToolFormat) - {ToolFormat.NONE} and set(TOOL_FORMATS) == set(DETECTED)


def test_template_without_tools_has_them_as_text() -> None:
    for source in (PLAIN, "{{ tools }} in a format of its own"):
        style = ModelFormat.of({"default": source})
        assert style.tool_format is ToolFormat.HERMES and style.tools_as_text and style.calls_as_text
    shows_calls = "{{ '<｜tool▁call▁begin｜>' + call['function']['arguments'] + '<｜tool▁call▁end｜>' }}"
    style = ModelFormat.of({"default": shows_calls})
    assert style.tool_format is ToolFormat.DEEPSEEK_V31 and style.tools_as_text and not style.calls_as_text
    assert style.arguments_as_text and not ModelFormat.of({"default": QWEN35}).arguments_as_text
    assert ModelFormat.of({"default": PLAIN}, "none").tool_format is ToolFormat.NONE


SHOWS_CALLS = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% for c in m.tool_calls or [] %}"
    "[{{ c.function.name }} {{ c.function.arguments | tojson }}]{% endfor %}</{{ m.role }}>{% endfor %}"
)


@pytest.mark.parametrize(
    ("source", "as_text"),
    [
        (SHOWS_CALLS, False),
        (SHOWS_CALLS.replace("c.function.arguments | tojson", "'' + c.function.arguments + ''"), False),
        (SHOWS_CALLS.replace("{{ m.content }}", "{{ m.content if m.role != 'tool' else '' }}"), True),
        (SHOWS_CALLS.replace("{{ c.function.name }}", ""), True),
        (SHOWS_CALLS.replace("[{{", "{{ raise_exception('one call') if loop.index > 1 else '' }}[{{"), True),
        (PLAIN, True),
        (SHOWS_CALLS + "{{ tools }}", True),
    ],
    ids=[
        "shown",
        "arguments as text",
        "no results",
        "no names",
        "one call alone",
        "nothing",
        "tools of its own format",
    ],
)
def test_template_without_tools_writes_the_calls_that_it_shows(source: str, as_text: bool) -> None:
    style = ModelFormat.of({"default": source}, render=ChatTemplate({"default": source}, {}).render)
    assert style.calls_as_text is as_text and style.tools_as_text and style.tool_format is ToolFormat.HERMES


@pytest.mark.parametrize(
    ("source", "tags"),
    [(QWEN35, THINK), ("<seed:think>", ("<seed:think>", "</seed:think>")), ("<|channel>thought", GEMMAS), ("", THINK)],
)
def test_tags_of_reasoning_are_detected(source: str, tags: Tags) -> None:
    style = ModelFormat.of({"default": source})
    assert style.tags == tags and style.has_reasoning == bool(source)
    if source:
        assert style.output_begins(f"a{tags[0]}\n") is Reasoning.OPEN
        assert style.output_begins(f"a{tags[0]}\n{tags[1]}\n") is Reasoning.DONE
        assert style.output_begins("a") is Reasoning.UNDECIDED


@pytest.mark.parametrize(
    ("prompt", "begins"),
    [
        ("<|start|>user<|message|>Hi<|end|><|start|>assistant", Reasoning.UNDECIDED),
        ("<|start|>user<|message|>Hi<|end|>", Reasoning.UNDECIDED),
        ("<|start|>assistant<|channel|>final<|message|>", Reasoning.DONE),
        ("<|start|>assistant<|channel|>final<|message|>Hi", Reasoning.DONE),
        ("<|start|>assistant<|channel|>analysis<|message|>Hi", Reasoning.OPEN),
        ("Hi", Reasoning.UNDECIDED),
    ],
)
def test_output_begins_in_the_message_that_the_prompt_leaves_open(prompt: str, begins: Reasoning) -> None:
    assert ModelFormat(ToolFormat.HARMONY, has_reasoning=True).output_begins(prompt) is begins


def test_flags_choose_harmony_and_leave_its_reasoning_in_the_text() -> None:
    config = ParserConfig(Reasoning.DONE, ToolFormat.HARMONY)
    assert ModelFormat.of({"default": QWEN3}, "harmony").parser_config(Reasoning.DONE, ()) == config
    style = ModelFormat.of({"default": HARMONY}, reasoning_format="none")
    assert style.parser_config(Reasoning.UNDECIDED, ()) == ParserConfig(
        Reasoning.UNDECIDED, ToolFormat.HARMONY, reasoning_is_text=True
    )
    assert config.marks == MARKS and not ParserConfig().marks
    assert ModelFormat.of({"default": HARMONY}, "none").parser_config(Reasoning.DONE, ()) is None


def test_degree_is_the_nearest_one_that_the_model_knows() -> None:
    efforts = ["none", "minimal", "low", "medium", "high", "xhigh", "max"]
    harmony = ModelFormat(ToolFormat.HARMONY)
    assert [harmony.degree(one) for one in efforts] == ["low", "low", "low", "medium", "high", "high", "high"]
    assert [ModelFormat().degree(one) for one in efforts] == efforts


def test_newer_mistral_models_have_tags_of_their_own() -> None:
    style = ModelFormat.of({"default": "{{ tools }}[TOOL_CALLS] [ARGS] [THINK]"})
    assert style.tool_format is ToolFormat.MISTRAL_ARGS and style.has_reasoning
    assert style.output_begins("a[THINK]") is Reasoning.OPEN and style.output_begins("a") is Reasoning.UNDECIDED
    assert style.output_begins("[THINK]a[/THINK]b", "[THINK]a[/THINK]b") is Reasoning.DONE
    assert not ModelFormat.of({"default": "{{ tools }}[TOOL_CALLS] [ARGS]"}).has_reasoning


@pytest.mark.parametrize(
    ("source", "switch"),
    [
        (QWEN3, "enable_thinking"),
        ("{% if not thinking is defined %}{% set thinking = false %}{% endif %}", "thinking"),  # from DeepSeek V3.1
        ("{% if message.thinking is defined %}{{ message.thinking }}{% endif %}", ""),
        ("You may end your thinking at any time.", ""),
    ],
)
def test_switch_of_thinking_is_a_variable_that_the_template_asks_for(source: str, switch: str) -> None:
    assert ModelFormat.of({"default": source}).thinking_switch == switch
