"""The grammar of gpt-oss's messages accepts exactly what the parser reads as reasoning, calls and answers."""

from typing import Any

import pytest
from llguidance import LLMatcher, LLTokenizer
from tokenizers import AddedToken

from frontend.errors import Unprocessable
from frontend.output_parser.model_format import HARMONY, Function, Mode, Reasoning, ToolChoice, ToolFormat
from frontend.structured_output import grammar as grammar_builder
from frontend.structured_output.tool_grammar import output_grammar
from frontend.text.tokenizer import Tokenizer
from tests.frontend.text.tokenizers import byte_level, save

SCHEMA: dict[str, Any] = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
FUNCTIONS = tuple(Function(name, SCHEMA, False, "tools", {}) for name in ("get_weather", "get-time"))
NAMES = frozenset({"get_weather", "get-time"})
THOUGHT = "<|channel|>analysis<|message|>Hm.\n<|end|><|start|>assistant"
PREAMBLE = "<|channel|>commentary<|message|>I look.<|end|><|start|>assistant"
CALL = '<|channel|>commentary to=functions.get-time <|constrain|>json<|message|>{"city": "Ulm"}<|call|>'
FINAL = "<|channel|>final<|message|>It is sunny."


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    engine = byte_level()
    engine.add_special_tokens([AddedToken(mark, special=True) for mark in HARMONY])
    config = {"eos_token_id": [engine.token_to_id(end) for end in ("<|return|>", "<|call|>")]}
    return Tokenizer.load(save(engine, tmp_path_factory.mktemp("harmony"), generation_config=config))


def accepts(tokenizer: Tokenizer, grammar: str, text: str) -> bool:
    source = tokenizer._engine.to_str()
    matcher = LLMatcher(LLTokenizer(source, eos_token=list(tokenizer.eos_ids)), grammar, log_level=0)
    (ids,) = tokenizer.encode_now([text], False)
    return all(matcher.consume_token(id) and not matcher.is_error() for id in ids) and matcher.is_accepting()


def grammar_of(tokenizer: Tokenizer, choice: ToolChoice, begins: Reasoning, answer: str = "") -> str:
    return output_grammar(choice, ToolFormat.HARMONY, begins, specials=tokenizer.special_ids_of(HARMONY), answer=answer)


@pytest.mark.parametrize("mode", Mode)
def test_grammar_with_tools_accepts_messages_and_offered_calls(tokenizer: Tokenizer, mode: Mode) -> None:
    grammar = grammar_of(tokenizer, ToolChoice(FUNCTIONS, mode, NAMES), Reasoning.UNDECIDED)
    calls, required = mode is not Mode.NONE, mode is Mode.REQUIRED
    forms = [
        CALL, THOUGHT + CALL, THOUGHT + THOUGHT + CALL, CALL.replace(" <|constrain|>json", ""),
        CALL.replace(" <|constrain|>", "<|constrain|>"),
        CALL.replace(" <|constrain|>json", " json"),
        ' to=functions.get_weather<|channel|>commentary json<|message|>{"city": "Ulm"}<|call|>',
    ]  # fmt: skip
    for form in forms:
        assert accepts(tokenizer, grammar, form) == calls, form
    assert accepts(tokenizer, grammar, PREAMBLE + CALL) == (mode is Mode.AUTO)
    assert accepts(tokenizer, grammar, FINAL) == accepts(tokenizer, grammar, THOUGHT + FINAL) == (not required)
    for wrong in ("get-times", "", "get_weather get-time"):
        assert not accepts(tokenizer, grammar, CALL.replace("get-time", wrong))
    assert not accepts(tokenizer, grammar, CALL.replace("city", "town"))
    assert not accepts(tokenizer, grammar, CALL.replace("<|call|>", ""))
    assert not accepts(tokenizer, grammar, CALL.replace("<|call|>", "<|return|>"))
    assert not accepts(tokenizer, grammar, "It is sunny.")


def test_grammar_of_an_answer_begins_with_its_header(tokenizer: Tokenizer) -> None:
    answer = grammar_builder.json_schema({"type": "integer"}, "response_format")
    free, either = ToolChoice(), ToolChoice(FUNCTIONS, Mode.AUTO, NAMES)
    seven = "<|channel|>final<|message|>7"
    for choice in (free, either):
        grammar = grammar_of(tokenizer, choice, Reasoning.UNDECIDED, answer)
        assert accepts(tokenizer, grammar, seven) and accepts(tokenizer, grammar, THOUGHT + seven)
        assert not accepts(tokenizer, grammar, FINAL) and not accepts(tokenizer, grammar, PREAMBLE + seven)
        assert accepts(tokenizer, grammar, CALL) == (choice is either)


def test_grammar_of_a_continued_message_begins_with_its_content(tokenizer: Tokenizer) -> None:
    answer = grammar_builder.json_schema({"type": "integer"}, "response_format")
    auto, required = (ToolChoice(FUNCTIONS, mode, NAMES) for mode in (Mode.AUTO, Mode.REQUIRED))
    rest = "e.<|end|><|start|>assistant"
    for begins, choice, grammar, text in (
        (Reasoning.DONE, auto, "", "e."), (Reasoning.DONE, auto, answer, "7"),
        (Reasoning.DONE, required, "", rest + CALL), (Reasoning.OPEN, auto, "", rest + FINAL),
        (Reasoning.OPEN, required, "", rest + THOUGHT + CALL),
    ):  # fmt: skip
        assert accepts(tokenizer, grammar_of(tokenizer, choice, begins, grammar), text), (begins, choice.mode)


def test_grammar_without_special_tokens_is_refused() -> None:
    with pytest.raises(Unprocessable, match=r"no special token <\|start\|>") as refused:
        output_grammar(ToolChoice(FUNCTIONS, Mode.AUTO, NAMES), ToolFormat.HARMONY, Reasoning.UNDECIDED)
    assert refused.value.param == "tools"
