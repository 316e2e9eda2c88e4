"""The grammar takes over where a call in another form than the format's is certain, and the parser finds that call."""

import json
import random
from dataclasses import replace
from pathlib import Path

import pytest
from jsonschema_rs import Draft202012Validator
from llguidance import LLMatcher, LLTokenizer

from frontend.output_parser.drift import names_within
from frontend.output_parser.model_format import THINK, Mode, ModelFormat, Reasoning, ToolChoice, ToolFormat
from frontend.output_parser.parser import Call, ParsedOutput
from frontend.output_parser.tool_syntax import SYNTAX
from frontend.structured_output import grammar as grammar_builder
from frontend.structured_output.tool_grammar import output_grammar
from frontend.text.tokenizer import Tokenizer
from shared import grammar_trial
from tests.frontend.output_parser.drifting import ARGUMENTS, CALL, FORMATS, drifted
from tests.frontend.output_parser.examples import EMPTY, EXAMPLES, FUNCTIONS, SCHEMA, SINGLE, function
from tests.frontend.output_parser.ordinary import ordinary_answers
from tests.frontend.structured_output.test_tool_grammar import SEED, specials, tokenizer_of

NAMES = frozenset({"get_weather", "add"})
ADD = '{"name": "add", "arguments": {}}'


class Output:
    """Outputs of one format under its grammar. special: whether its tags are special tokens of the vocabulary"""

    def __init__(self, folder: Path, tool_format: ToolFormat, special: bool) -> None:
        self.format = tool_format
        self.tags = THINK if special else SEED  # this vocabulary has tokens for the former
        marks = specials(tool_format, THINK) if special else []
        self.tokenizer: Tokenizer = tokenizer_of(folder, marks)
        self.known = self.tokenizer.special_ids_of(marks)
        self.engine = LLTokenizer(self.tokenizer._engine.to_str(), eos_token=list(self.tokenizer.eos_ids) or None)
        self.style = ModelFormat(tool_format, has_reasoning=True, drifts=True, tags=self.tags)

    def matcher(
        self, begins: Reasoning = Reasoning.DONE, parallel: bool = True, mode: Mode = Mode.AUTO, answer: str = ""
    ) -> LLMatcher:
        choice = ToolChoice(FUNCTIONS, mode, NAMES, parallel)
        grammar = output_grammar(
            choice, self.format, begins, specials=self.known, drifts=True, answer=answer, tags=self.tags
        )
        made = LLMatcher(self.engine, grammar, log_level=0)
        assert not made.is_error(), made.get_error()
        return made

    def accepted(self, matcher: LLMatcher, text: str) -> bool:
        """Whether the grammar accepts a whole output."""
        state = matcher.deep_copy()
        (ids,) = self.tokenizer.encode_now([text], False)
        return state.try_consume_tokens(ids) == len(ids) and state.is_accepting()

    def parsed(self, text: str, begins: Reasoning = Reasoning.DONE) -> ParsedOutput:
        parser_config = self.style.parser_config(begins, FUNCTIONS, may_drift=True, specials=self.known)
        assert parser_config is not None
        return ParsedOutput.parse(text, parser_config)


@pytest.mark.parametrize("special", [True, False], ids=["special", "text"])
@pytest.mark.parametrize("tool_format", FORMATS)
def test_grammar_accepts_the_forms_with_fitting_arguments_only(
    tmp_path: Path, tool_format: ToolFormat, special: bool
) -> None:
    output = Output(tmp_path, tool_format, special)
    matcher, single = output.matcher(), output.matcher(parallel=False)
    own = {**EXAMPLES, **SINGLE}[tool_format]
    assert output.accepted(matcher, own) and output.accepted(single, own) == (tool_format in SINGLE)
    for case in drifted(tool_format):
        if tool_format is ToolFormat.LLAMA and case.form == "bare":
            continue  # its own form, with which test_tool_grammar.py deals
        assert output.accepted(matcher, case.text) and output.accepted(single, case.text), case.text
        assert [call.name for call in output.parsed(case.text).calls] == ["get_weather"], case.text
        for other in (case.text.replace("city", "town"), case.text[: case.text.index("Ulm")]):
            assert not output.accepted(matcher, other), other
        unknown = case.text.replace("get_weather", "get_wind")
        tag = SYNTAX[tool_format].tag
        if not any(mark in unknown for mark in output.known):  # text has no special tokens
            assert output.accepted(matcher, unknown), unknown
        assert not tag or tag not in unknown
        more = f"{case.text}\n```json\n{ADD}\n```"
        if "```" not in case.text and tool_format not in SINGLE and not (special and "</" in case.text):
            assert output.accepted(matcher, more), more
            assert [call.name for call in output.parsed(more).calls] == ["get_weather", "add"], more
        assert not output.accepted(single, more)


@pytest.mark.parametrize("special", [True, False], ids=["special", "text"])
@pytest.mark.parametrize("tool_format", [one for one in EXAMPLES if one in FORMATS and SYNTAX[one].inline])
def test_call_within_reasoning_is_accepted_and_found(tmp_path: Path, tool_format: ToolFormat, special: bool) -> None:
    output, call = Output(tmp_path, tool_format, special), EXAMPLES[tool_format]
    if SYNTAX[tool_format].tag not in output.known and not all(map(names_within, SYNTAX[tool_format].heads)):
        return  # there, a call within reasoning stays reasoning
    first, closing = output.tags
    for begins, opening in ((Reasoning.UNDECIDED, first), (Reasoning.OPEN, "")):
        matcher = output.matcher(begins)
        for text in (f"{opening}\nI look.\n{call}", f"{opening}\nI look.\n{call}{closing}", f"{opening}{call}"):
            assert output.accepted(matcher, text), text
            parsed = output.parsed(text, begins)
            assert [one.name for one in parsed.calls] == ["get_weather", "add"] and not parsed.text
        for text in (f"{opening}\nHm.\n{closing}\n\nHi.", f"{opening}\nHm.{closing}{call}"):
            assert output.accepted(matcher, text), text
        broken = f"{opening}\nI look.\n{call}".replace("city", "town")
        assert not output.accepted(matcher, f"{broken}\n{closing}\n\nHi.")
        assert not output.accepted(output.matcher(begins, parallel=False), f"{opening}\n{call}")
        if begins is Reasoning.UNDECIDED:
            for said in ("Hi.", call, f"```json\n{{{CALL}}}\n```"):
                assert output.accepted(matcher, said), said


@pytest.mark.parametrize("tool_format", [ToolFormat.HERMES, ToolFormat.QWEN_XML, ToolFormat.PYTHONIC])
@pytest.mark.parametrize("parallel", [True, False], ids=["parallel", "single"])
def test_grammar_of_a_hundred_functions_is_within_the_workers_limits(
    tmp_path: Path, tool_format: ToolFormat, parallel: bool
) -> None:
    output = Output(tmp_path, tool_format, special=False)
    functions = tuple(function(f"mcp__server_number_{i % 5}__a_long_name_{i}", EMPTY) for i in range(100))
    choice = ToolChoice(functions, Mode.AUTO, frozenset(one.name for one in functions), parallel)
    grammar = output_grammar(choice, tool_format, Reasoning.UNDECIDED, specials={}, drifts=True, tags=SEED)
    matcher = LLMatcher(output.engine, grammar, log_level=0, limits=grammar_trial.limits())
    for one in (functions[0], functions[99]):
        for text in ("```json\n{X}\n```", "{X}", "Hm.\n<tools>{X}</tools>", "<seed:think>\nHm.</seed:think>\n\n{X}"):
            call = f'{{"name": "{one.name}", "arguments": {{}}}}'
            assert output.accepted(matcher, text.replace("{X}", call))
            assert not output.accepted(matcher, text.replace("{X}", call.replace("{}", '{"a": 1}')))
            assert output.accepted(matcher, text.replace("{X}", call.replace("mcp__", "mcp___")))
    state = matcher.deep_copy()
    for id in output.tokenizer.encode_now(['Hi\n\n```json\n{"name": "mcp__server_number_4__a_long_name_9"'], False)[0]:
        state.compute_bitmask()
        assert state.consume_token(id) and not state.is_error()


def test_thousand_ordinary_answers_are_allowed(tmp_path: Path) -> None:
    outputs = [Output(tmp_path / one, one, special=one is ToolFormat.HERMES) for one in
               (ToolFormat.HERMES, ToolFormat.PYTHONIC)]  # fmt: skip
    matchers = [output.matcher(Reasoning.UNDECIDED) for output in outputs]
    for number, text in enumerate(ordinary_answers(1000)):
        for output, matcher in list(zip(outputs, matchers, strict=True))[: 1 + (number % 10 == 0)]:
            assert output.accepted(matcher, text.replace("<think>", "").replace("<tool_call>", "")), text


def test_other_modes_allow_the_own_form_only(tmp_path: Path) -> None:
    output = Output(tmp_path, ToolFormat.HERMES, special=False)
    other = '```json\n{"name": "get_weather", "arguments": 5}'
    fenced = f"```json\n{{{CALL}}}\n```"
    assert not output.accepted(output.matcher(mode=Mode.REQUIRED), fenced)
    answered = output.matcher(answer=grammar_builder.one_of([fenced, other], "guided_choice"))
    for text in (fenced, other):
        assert output.accepted(answered, text)


def walked(output: Output, matcher: LLMatcher, start: str, seed: int) -> str:
    """Returns `start` and what a random model that the grammar restricts writes after it."""
    chance, state = random.Random(seed), matcher.deep_copy()
    (ids,) = output.tokenizer.encode_now([start], False)
    assert state.try_consume_tokens(ids) == len(ids)
    for _ in range(400):
        allowed = [id for id, weight in enumerate(state.compute_logit_bias()) if weight]
        plain = [id for id in allowed if 32 < (output.tokenizer.token_bytes(id) or b" ")[0] < 127] or allowed
        ends = [id for id in plain if output.tokenizer.token_bytes(id) in (b'"', b"}", b"]", b"<")]
        id = chance.choice(ends if ends and chance.random() < 0.3 else plain)
        assert state.consume_token(id)
        ids.append(id)
        if state.is_stopped():
            break
        if output.parsed(output.tokenizer.decode(ids, skip_special=False)).parser.called:
            break
    return output.tokenizer.decode(ids, skip_special=False)


@pytest.mark.parametrize("tool_format", [ToolFormat.HERMES, ToolFormat.QWEN_XML, ToolFormat.MISTRAL])
def test_what_begins_as_a_call_ends_as_one_that_fits(tmp_path: Path, tool_format: ToolFormat) -> None:
    output = Output(tmp_path, tool_format, special=True)
    matcher = output.matcher()
    for seed, case in enumerate(one for one in drifted(tool_format) if one.form != "function"):
        start = case.text[: case.text.index(ARGUMENTS)]
        text = walked(output, matcher, start, seed)
        (call,) = [one for one in output.parsed(text).parts if isinstance(one, Call)]
        if output.parsed(text).parser.called:
            assert Draft202012Validator(SCHEMA).is_valid(json.loads(call.arguments)), text


def test_functions_without_drift_have_the_grammar_that_they_had() -> None:
    choice = ToolChoice(FUNCTIONS, Mode.AUTO, NAMES)
    for tool_format in FORMATS:
        plain = output_grammar(choice, tool_format, Reasoning.UNDECIDED)
        assert "named_0" not in plain and "named_0" in output_grammar(
            choice, tool_format, Reasoning.UNDECIDED, drifts=True
        )
    required = replace(choice, mode=Mode.REQUIRED)
    for tool_format in FORMATS:
        same = [output_grammar(required, tool_format, Reasoning.DONE, drifts=one) for one in (False, True)]
        assert same[0] == same[1]
