"""The grammar of tool calls in every format accepts exactly the calls that the parser finds.

Each format is tested with tags that are special tokens of the vocabulary, and with tags that are text.
"""

import json
import random
from pathlib import Path
from typing import Any

import pytest
from jsonschema_rs import Draft202012Validator
from llguidance import LLMatcher, LLTokenizer
from tokenizers import AddedToken

from frontend.errors import Unprocessable
from frontend.output_parser.model_format import (
    THINK,
    Function,
    Mode,
    ModelFormat,
    Reasoning,
    Tags,
    ToolChoice,
    ToolFormat,
)
from frontend.output_parser.parser import Call, ParsedOutput
from frontend.output_parser.tool_syntax import SYNTAX, specials_of
from frontend.structured_output import grammar as grammar_builder
from frontend.structured_output.tool_grammar import output_grammar
from frontend.text.tokenizer import Tokenizer
from tests.frontend.output_parser.examples import EMPTY, EXAMPLES, FUNCTIONS, SINGLE, function
from tests.frontend.text.tokenizers import byte_level, save

ALL = {**EXAMPLES, **SINGLE}
NAMES = frozenset({"get_weather", "add"})
SEED: Tags = ("<seed:think>", "</seed:think>")
GEMMA: Tags = ("<|channel>thought", "<channel|>")


def specials(tool_format: ToolFormat, tags: Tags) -> list[str]:
    """Returns the tags of a format that look like special tokens."""
    words = [word for word in specials_of(tool_format, tags) if word[0] in "<[" and word[-1] in ">]" and len(word) > 3]
    return [word for word in dict.fromkeys(words) if "NAME" not in word]


def tokenizer_of(folder: Path, special: list[str]) -> Tokenizer:
    engine = byte_level()
    engine.add_special_tokens([AddedToken(word, special=True, normalized=False) for word in special])
    return Tokenizer.load(save(engine, folder))


def accepts(tokenizer: Tokenizer, grammar: str, text: str) -> bool:
    """Whether the grammar accepts the ids of `text`, in which a special token is one id."""
    source = tokenizer._engine.to_str()
    matcher = LLMatcher(LLTokenizer(source, eos_token=list(tokenizer.eos_ids) or None), grammar, log_level=0)
    (ids,) = tokenizer.encode_now([text], False)
    return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()


def grammar_of(
    tool_format: ToolFormat,
    mode: Mode,
    known: dict[str, int],
    *,
    parallel: bool = True,
    functions: tuple[Function, ...] = FUNCTIONS,
    begins: Reasoning = Reasoning.DONE,
    tags: Tags = THINK,
) -> str:
    tool_choice = ToolChoice(functions, mode, frozenset(one.name for one in functions), parallel)
    return output_grammar(tool_choice, tool_format, begins, specials=known, tags=tags)


@pytest.mark.parametrize("special", [True, False], ids=["special", "text"])
@pytest.mark.parametrize("mode", [Mode.AUTO, Mode.REQUIRED])
@pytest.mark.parametrize("tool_format", ALL)
def test_grammar_accepts_the_calls_of_a_template_and_no_others(
    tmp_path: Path, tool_format: ToolFormat, mode: Mode, special: bool
) -> None:
    marks = specials(tool_format, THINK) if special else []
    tokenizer = tokenizer_of(tmp_path, marks)
    known = tokenizer.special_ids_of(marks)
    text = ALL[tool_format]
    grammar = grammar_of(tool_format, mode, known)
    assert accepts(tokenizer, grammar, text)
    assert accepts(tokenizer, grammar, "It is sunny [1].") == (mode is Mode.AUTO)
    for other in (text.replace("city", "town"), text[: len(text) // 2]):
        assert not accepts(tokenizer, grammar, other)
    is_text = mode is Mode.AUTO and not (SYNTAX[tool_format].inline or SYNTAX[tool_format].needs_mark)
    assert accepts(tokenizer, grammar, text.replace("get_weather", "get_wind")) == is_text
    single = grammar_of(tool_format, mode, known, parallel=False)
    assert accepts(tokenizer, single, text) == (tool_format in SINGLE)
    if SYNTAX[tool_format].inline:
        assert accepts(tokenizer, grammar, f"I look.\n{text}") == (mode is Mode.AUTO)


@pytest.mark.parametrize("special", [True, False], ids=["special", "text"])
@pytest.mark.parametrize("begins", [Reasoning.UNDECIDED, Reasoning.OPEN])
@pytest.mark.parametrize("mode", [Mode.REQUIRED, Mode.NONE])
def test_blanks_around_reasoning_are_bounded(tmp_path: Path, mode: Mode, begins: Reasoning, special: bool) -> None:
    tags = THINK if special else SEED
    marks = specials("hermes", tags) if special else []
    tokenizer = tokenizer_of(tmp_path, marks)
    tool_choice = ToolChoice(FUNCTIONS, mode, NAMES)
    answer = "" if mode is Mode.REQUIRED else grammar_builder.one_of(["yes"], "x")
    grammar = output_grammar(
        tool_choice, "hermes", begins, specials=tokenizer.special_ids_of(marks), answer=answer, tags=tags
    )
    ends = EXAMPLES["hermes"] if mode is Mode.REQUIRED else "yes"
    undecided = begins is Reasoning.UNDECIDED
    for before, after, allowed in ((0, 0, True), (8, 8, True), (9, 0, not undecided), (0, 9, False)):
        thought = "\n" * before + (tags[0] if undecided else "") + f"hm{tags[1]}" + "\n" * after
        assert accepts(tokenizer, grammar, thought + ends) is allowed


LIMITED: dict[str, Any] = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 6},
        "unit": {"enum": ["C", "F", "°"]},
        "days": {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 9}, "maxItems": 3},
        "exact": {"type": "boolean"},
        "note": {"anyOf": [{"enum": ["a", "b"]}, {"type": "null"}]},
        "where": {
            "type": "object", "properties": {"lat": {"enum": [1.5, -2]}, "name": {"type": "string", "minLength": 2,
            "maxLength": 4}}, "required": ["lat"], "additionalProperties": False,
        },
        "two": {"type": "string", "minLength": 2, "maxLength": 3},
    },
    "required": ["city", "exact", "two"],
    "additionalProperties": False,
}  # fmt: skip


def walked(tokenizer: Tokenizer, grammar: str, seed: int) -> str:
    """Returns a random output that the grammar allows, in the form that the parser gets."""
    chance, ids = random.Random(seed), []
    llm = LLTokenizer(tokenizer._engine.to_str(), eos_token=list(tokenizer.eos_ids) or None)
    matcher = LLMatcher(llm, grammar, log_level=0)
    for _ in range(2000):
        mask = matcher.compute_logit_bias()
        allowed = [id for id, weight in enumerate(mask) if weight]
        plain = [id for id in allowed if 32 < (tokenizer.token_bytes(id) or b" ")[0] < 127]
        if matcher.is_accepting() and not plain:
            break
        id = chance.choice(plain or allowed)
        assert matcher.consume_token(id)
        ids.append(id)
    assert matcher.is_accepting() or matcher.is_stopped()
    return tokenizer.decode(ids, skip_special=False)


@pytest.mark.parametrize("special", [True, False], ids=["special", "text"])
@pytest.mark.parametrize("tool_format", ALL)
def test_any_output_of_the_grammar_is_parsed_into_calls_that_fit(
    tmp_path: Path, tool_format: ToolFormat, special: bool
) -> None:
    functions = (function("get_weather", LIMITED), function("add", EMPTY))
    marks = specials(tool_format, THINK) if special else []
    tokenizer = tokenizer_of(tmp_path, marks)
    grammar = grammar_of(
        tool_format, Mode.REQUIRED, tokenizer.special_ids_of(marks), functions=functions, parallel=False
    )
    parser_config = ModelFormat(tool_format).parser_config(Reasoning.DONE, functions, must_call=True)
    assert parser_config is not None
    for seed in range(8):
        text = walked(tokenizer, grammar, seed)
        parsed = ParsedOutput.parse(text, parser_config)
        assert len(parsed.parts) == 1, (text, parsed.parts)
        call = parsed.parts[0]
        assert isinstance(call, Call) and parsed.parser.called, text
        schema = LIMITED if call.name == "get_weather" else EMPTY
        assert Draft202012Validator(schema).is_valid(json.loads(call.arguments)), (text, call)


@pytest.mark.parametrize("special", [True, False], ids=["special", "text"])
@pytest.mark.parametrize("tags", [SEED, GEMMA], ids=["seed", "gemma"])
@pytest.mark.parametrize("tool_format", [ToolFormat.QWEN_XML, ToolFormat.GEMMA4, ToolFormat.PYTHONIC, ToolFormat.LLAMA])
def test_reasoning_comes_before_text_and_calls(
    tmp_path: Path, tool_format: ToolFormat, tags: Tags, special: bool
) -> None:
    marks = specials(tool_format, tags) if special else []
    tokenizer = tokenizer_of(tmp_path, [mark for mark in marks if mark != GEMMA[0]])
    known = tokenizer.special_ids_of(marks)
    call, opening, closing = ALL[tool_format], *tags
    thought = "Hm: a call\nwould be good.\n"
    for mode in (Mode.REQUIRED, Mode.AUTO):
        undecided = grammar_of(tool_format, mode, known, begins=Reasoning.UNDECIDED, tags=tags)
        opened = grammar_of(tool_format, mode, known, begins=Reasoning.OPEN, tags=tags)
        for said in (call, *(["Hi."] if mode is Mode.AUTO else [])):
            assert accepts(tokenizer, undecided, f"{opening}\n{thought}{closing}\n\n{said}")
            assert accepts(tokenizer, undecided, said)
            assert accepts(tokenizer, opened, f"{thought}{closing}\n\n{said}")
        assert not accepts(tokenizer, opened, call) and not accepts(tokenizer, undecided, f"{opening}\n{thought}")
        assert accepts(tokenizer, undecided, f"{opening}\n{thought}{closing}\n\n") == (mode is Mode.AUTO)


def test_answer_with_a_grammar_follows_reasoning_with_special_tags(tmp_path: Path) -> None:
    tokenizer = tokenizer_of(tmp_path, ["<|channel>", "<channel|>"])
    known = tokenizer.special_ids_of(["<|channel>", "<channel|>"])
    answer = grammar_builder.one_of(["yes", "no"], "guided_choice")
    made = output_grammar(
        ToolChoice(), ToolFormat.GEMMA4, Reasoning.UNDECIDED, specials=known, answer=answer, tags=GEMMA
    )
    assert accepts(tokenizer, made, "<|channel>thought\nHm.<channel|>yes") and accepts(tokenizer, made, "no")
    assert not accepts(tokenizer, made, "<|channel>thought\nHm.<channel|>maybe")


def test_schema_that_cannot_be_enforced_is_named() -> None:
    broken = Function("f", {"type": "object", "properties": {"a": {"type": "strin"}}}, True, "tools[0].x", {})
    for tool_format in (ToolFormat.HERMES, ToolFormat.QWEN_XML, ToolFormat.GEMMA4, ToolFormat.LFM2):
        with pytest.raises(Unprocessable, match=r"tools\[0\].x.properties.a.type"):
            grammar_of(tool_format, Mode.REQUIRED, {}, functions=(broken,))
