"""The same two calls in every format of tagged text, as the models' templates write them."""

from typing import Any

from frontend.output_parser.model_format import Function, ModelFormat, ParserConfig, Reasoning, ToolFormat

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "unit": {"enum": ["C", "F"]},
        "days": {"type": "array", "items": {"type": "integer"}},
        "exact": {"type": "boolean"},
        "note": {"anyOf": [{"type": "string"}, {"type": "null"}]},
        "where": {"$ref": "#/$defs/Place"},
    },
    "required": ["city", "days"],
    "$defs": {
        "Place": {"type": "object", "properties": {"lat": {"type": "number"}, "name": {"type": "string"}}},
    },
}
EMPTY: dict[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}
ARGUMENTS = {"city": 'São "P"\n<b>', "days": [1, 20], "exact": True, "note": None, "where": {"lat": -1.5, "name": "x"}}
JSON = (
    '{"city": "São \\"P\\"\\n<b>", "days": [1, 20], "exact": true, "note": null, "where": {"lat": -1.5, "name": "x"}}'
)
PLACE = '{"lat": -1.5, "name": "x"}'
PYTHON = f'city="São \\"P\\"\\n<b>", days=[1, 20], exact=True, note=None, where={PLACE}'
BARE = 'city:<|"|>São "P"\n<b><|"|>,days:[1,20],exact:true,note:null,where:{lat:-1.5,name:<|"|>x<|"|>}'


def function(name: str, schema: dict[str, Any], strict: bool = False) -> Function:
    return Function(name, schema, strict, "tools", {"type": "function", "function": {"name": name}})


FUNCTIONS = (function("get_weather", SCHEMA), function("add", EMPTY))


def _tagged(opening: str, line: str, closing: str) -> str:
    values = (('São "P"\n<b>', "city"), ("[1, 20]", "days"), ("true", "exact"), ("null", "note"), (PLACE, "where"))
    inner = "\n".join(f"<parameter={key}>{line}{value}{line}</parameter>" for value, key in values)
    return (
        f"{opening}\n<function=get_weather>\n{inner}\n</function>\n{closing}\n"
        f"{opening}\n<function=add>\n</function>\n{closing}"
    )


GLM = "".join(
    f"<arg_key>{key}</arg_key>\n<arg_value>{value}</arg_value>\n"
    for key, value in (
        ("city", 'São "P"\n<b>'),
        ("days", "[1, 20]"),
        ("exact", "true"),
        ("note", "null"),
        ("where", PLACE),
    )
)
MINIMAX = "".join(
    f'<parameter name="{key}">{value}</parameter>\n'
    for key, value in (
        ("city", 'São "P"\n<b>'),
        ("days", "[1, 20]"),
        ("exact", "true"),
        ("note", "null"),
        ("where", PLACE),
    )
)
LIST = f'[{{"name": "get_weather", "arguments": {JSON}}}, {{"name": "add", "arguments": {{}}}}]'

EXAMPLES: dict[ToolFormat, str] = {
    ToolFormat.HERMES: f'<tool_call>\n{{"name": "get_weather", "arguments": {JSON}}}\n</tool_call>\n'
    '<tool_call>\n{"name": "add", "arguments": {}}\n</tool_call>',
    ToolFormat.MISTRAL: f"[TOOL_CALLS] {LIST}",
    ToolFormat.GRANITE: f"<|tool_call|>{LIST}",
    ToolFormat.NEMOTRON: f"<TOOLCALL>{LIST}</TOOLCALL>",
    ToolFormat.DEEPSEEK_V3: "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>get_weather\n```json\n"
    f"{JSON}\n```<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>function<｜tool▁sep｜>add\n```json\n{{}}\n```<｜tool▁call▁end｜>"
    "<｜tool▁calls▁end｜>",
    ToolFormat.DEEPSEEK_V31: f"<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>{JSON}"
    "<｜tool▁call▁end｜><｜tool▁call▁begin｜>add<｜tool▁sep｜>{}<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    ToolFormat.KIMI: "<|tool_calls_section_begin|>"
    "<|tool_call_begin|>functions.get_weather:0<|tool_call_argument_begin|>"
    f"{JSON}<|tool_call_end|><|tool_call_begin|>functions.add:1<|tool_call_argument_begin|>{{}}<|tool_call_end|>"
    "<|tool_calls_section_end|>",
    ToolFormat.QWEN_XML: _tagged("<tool_call>", "\n", "</tool_call>"),
    ToolFormat.SEED: _tagged("<seed:tool_call>", "", "</seed:tool_call>"),
    ToolFormat.GLM: f"<tool_call>get_weather\n{GLM}</tool_call>\n<tool_call>add\n</tool_call>",
    ToolFormat.MINIMAX: f'<minimax:tool_call>\n<invoke name="get_weather">\n{MINIMAX}</invoke>\n'
    '<invoke name="add">\n</invoke>\n</minimax:tool_call>',
    ToolFormat.PYTHONIC: f"[get_weather({PYTHON}), add()]",
    ToolFormat.LFM2: f"<|tool_call_start|>[get_weather({PYTHON}), add()]<|tool_call_end|>",
    ToolFormat.OLMO3: f"<function_calls>\nget_weather({PYTHON})\nadd()\n</function_calls>",
    ToolFormat.GEMMA3: f"```tool_code\nget_weather({PYTHON})\nadd()\n```",
    ToolFormat.GEMMA4: f"<|tool_call>call:get_weather{{{BARE}}}<tool_call|><|tool_call>call:add{{}}<tool_call|>",
}
SINGLE: dict[ToolFormat, str] = {  # formats that allow one call in an answer
    ToolFormat.LLAMA: f'{{"name": "get_weather", "parameters": {JSON}}}',
    ToolFormat.GLM4: f"get_weather\n{JSON}",
}


def config(tool_format: ToolFormat, begins: Reasoning = Reasoning.DONE, must_call: bool = False) -> ParserConfig:
    """Returns the parser's configuration for an output that may call `FUNCTIONS`."""
    found = ModelFormat(tool_format, has_reasoning=True).parser_config(begins, FUNCTIONS, must_call=must_call)
    assert found is not None
    return found
